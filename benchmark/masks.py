#!/usr/bin/env python3
"""What masks and biases cost: attention under each, as a share of a call without any, beside torch's attention with the mask as a matrix.

    python benchmark/masks.py                                # about three minutes, one thread
    python benchmark/masks.py -S 2048 --dtypes bfloat16 --threads 2

A row is one call. `said_by` is the argument that says the mask to this library. Masks by `kv_ranges`: causal; causal, and the first quarter
of the tokens sees itself (prefix); causal within eighths of the tokens (documents); the eighth before each query (window). Masks by
`attn_mask`: causal, random (half of the pairs) and numbers that are added to the scores, the same for all heads (bias) or not
(bias_by_head). torch is scaled_dot_product_attention, with is_causal=True in the row whose rule that is, else with the mask as a matrix, of
bool or of the queries' dtype. Pairs is the share of pairs of tokens that are seen, Of_dense the time over that of this library's call
without any rule. Contenders take turns, and medians are compared. Equal: some queries of this library's result agree with float64.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

import _bench  # noqa: F401  (finds the library of this checkout)
from _bench import Column, Contender, Progress, Table, command, in_turns, natural, parameters, positive
from blitz_attn import _core, sabi, testing
from operands import Operands, draw
from other_libraries import imported_torch, torch_tensor, version
from result_files import add_save, main_with_save

COLUMNS = (
    Column("dtype", 9),
    Column("mask", 12),
    Column("said_by", 20),
    Column("H", 3),
    Column("H_kv", 4),
    Column("S", 6),
    Column("D", 4),
    Column("threads", 7),
    Column("Equal", 6),
    Column("Pairs", 6, ".2f"),
    Column("Our_[usec]", 11, ".0f"),
    Column("Of_dense", 8, ".2f"),
    Column("Torch_[usec]", 12, ".0f"),
    Column("Torch/ours", 10, ".2f"),
)
LARGEST_ERROR = {"float32": 1e-5, "float16": 5e-3, "bfloat16": 4e-2}
CHECKED_QUERIES = 8
ROWS = 11  # of a dtype


@dataclass
class Case:
    """A row: the options of this library's call, and what they add to the scores as a matrix: bool, or numbers whose -inf hides a key."""

    mask: str
    said_by: str
    options: dict[str, Any]
    matrix: np.ndarray | None = None  # (1 or heads, tokens, tokens); None: every query sees every key

    def matrix_of(self, head: int, query: int) -> np.ndarray | float:
        """What is added to the scores of one query, in float64."""
        if self.matrix is None:
            return 0.0
        row = self.matrix[head % len(self.matrix), query]
        return np.where(row, 0.0, -np.inf) if row.dtype == bool else testing.to_float64(row)


def cases_of(operands: Operands, seed: int) -> list[Case]:
    heads, tokens = operands.q.shape[1:3]
    rng = np.random.default_rng(seed)
    i, j = np.arange(tokens, dtype=np.int32)[:, None], np.arange(tokens, dtype=np.int32)
    eighth = max(1, tokens // 8)
    causal = j <= i
    slopes = np.exp2(-8 * np.arange(1, heads + 1) / heads).astype(np.float32)

    def by_ranges(mask: str, seen: np.ndarray) -> Case:
        return Case(mask, "kv_ranges", {"kv_ranges": sabi.kv_ranges_from_token_mask(seen)}, seen[None])

    def by_matrix(mask: str, matrix: np.ndarray) -> Case:
        return Case(mask, "attn_mask", {"attn_mask": matrix}, matrix)

    def numbers(count: int) -> np.ndarray:
        """Of the queries' dtype; of float32 where that is bare bits, which a mask cannot be."""
        drawn = rng.standard_normal((count, tokens, tokens), dtype=np.float32)
        return drawn if operands.bits else testing.round_to(drawn, operands.dtype)

    return [
        Case("none", "none", {}),
        Case("causal", "causal", {"causal": True}, causal[None]),
        by_ranges("causal", causal),
        by_ranges("prefix", causal | (j < tokens // 4)),
        by_ranges("documents", causal & (i // eighth == j // eighth)),
        by_ranges("window", causal & (i - j <= eighth)),
        by_matrix("causal", causal[None]),
        by_matrix("random", rng.random((1, tokens, tokens), dtype=np.float32) < 0.5),
        by_matrix("bias", numbers(1)),
        by_matrix("bias_by_head", numbers(heads)),
        Case(
            "causal_alibi",
            "causal,alibi_slopes",
            {"causal": True, "alibi_slopes": slopes},
            np.where(causal, -slopes[:, None, None] * np.abs(i - j).astype(np.float32), np.float32(-np.inf)),
        ),
    ]


def torch_call(case: Case, operands: Operands, threads: int) -> Callable[[], Any]:
    """torch's attention over the same operands."""
    torch = imported_torch()
    q, k, v = (torch_tensor(x, operands.dtype) for x in (operands.q, operands.k, operands.v))
    mask = None
    if case.matrix is not None and case.said_by != "causal":
        wanted = case.matrix if case.matrix.dtype == bool else testing.round_to(case.matrix, operands.dtype)
        mask = torch.from_numpy(wanted)[None] if wanted.dtype == bool else torch_tensor(wanted, operands.dtype)[None]

    def run() -> None:
        torch.set_num_threads(threads)
        with torch.no_grad():
            torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=case.said_by == "causal", enable_gqa=True)

    return run


def is_equal(case: Case, operands: Operands, seed: int) -> bool:
    """Whether some queries of `operands.out` have the results of float64."""
    q, k, v, out = (testing.to_float64(x, operands.dtype)[0] for x in (operands.q, operands.k, operands.v, operands.out))
    heads, tokens, dim = q.shape
    rng = np.random.default_rng(seed)
    for head, query in zip(rng.integers(heads, size=CHECKED_QUERIES), rng.integers(tokens, size=CHECKED_QUERIES), strict=True):
        own = head * len(k) // heads
        scores = k[own] @ q[head, query] / np.sqrt(dim) + case.matrix_of(head, query)
        weights = np.exp(scores - scores.max())
        if not np.abs(out[head, query] - weights @ v[own] / weights.sum()).max() <= LARGEST_ERROR[operands.dtype]:
            return False
    return True


def measured(dtype: str, args: argparse.Namespace, progress: Progress) -> Iterator[dict[str, Any]]:
    """The rows of a dtype."""
    operands = draw(1, args.heads, args.kv_heads, args.seq, args.head_dim, dtype, "BNSD", args.seed)
    cases = cases_of(operands, args.seed)
    contenders, label = [], f"{dtype}, {args.threads} threads"
    poison = partial(operands.out.fill, testing.round_to(np.full((), np.nan), dtype)[()])
    for case in cases:
        own = operands.call(None, (128, 128), args.threads, **case.options)
        contenders.append(Contender(label, own, 1.0, before_last=poison))
        if args.torch:
            contenders.append(Contender(label, torch_call(case, operands, args.threads), 1.0))
    times, equal = {}, {}
    for index, timing in in_turns(contenders, args.repeats, args.warmup, progress):
        case, by_torch = divmod(index, 2) if args.torch else (index, 0)
        times[case, by_torch] = timing.median * 1e6
        if not by_torch:
            equal[case] = is_equal(cases[case], operands, args.seed)
    for number, case in enumerate(cases):
        ours, torch = times[number, 0], times.get((number, 1))
        seen = case.matrix is None or (case.matrix if case.matrix.dtype == bool else case.matrix != -np.inf)
        yield {
            "dtype": dtype,
            "mask": case.mask,
            "said_by": case.said_by,
            "H": args.heads,
            "H_kv": args.kv_heads,
            "S": args.seq,
            "D": args.head_dim,
            "threads": args.threads,
            "Equal": "yes" if equal[number] else "no",
            "Pairs": float(np.mean(seen)),
            "Our_[usec]": ours,
            "Of_dense": ours / times[0, 0],
            "Torch_[usec]": torch,
            "Torch/ours": torch / ours if torch else None,
        }


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    result.add_argument("--dtypes", nargs="+", choices=tuple(LARGEST_ERROR), default=["float32", "bfloat16"], help="(float32 bfloat16)")
    result.add_argument("--seq", "-S", type=positive, default=4096, help="tokens (%(default)s)")
    result.add_argument("--heads", "-H", type=positive, default=8, help="heads of the queries (%(default)s)")
    result.add_argument("--kv-heads", type=positive, default=2, help="heads of keys and values (%(default)s)")
    result.add_argument("--head-dim", "-D", type=positive, default=128, help="head dim (%(default)s)")
    result.add_argument("--threads", type=positive, default=1, help="number of threads (%(default)s)")
    result.add_argument("--repeats", type=positive, default=5, help="timed turns, of which the median counts (%(default)s)")
    result.add_argument("--warmup", type=positive, default=1, help="turns before them (%(default)s)")
    result.add_argument("--torch", action=argparse.BooleanOptionalAction, default=True, help="time torch too, where it is installed (yes)")
    result.add_argument("--seed", type=natural, default=1234, help="of operands and masks (%(default)s)")
    return add_save(result)


@command
def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    torch = version("torch") if args.torch else None
    args.torch = torch is not None
    progress = Progress((args.repeats + args.warmup) * len(args.dtypes) * ROWS * (1 + args.torch))
    table = Table(COLUMNS, sys.stdout, progress)
    table.head(parameters(ISA=_core.isa_active(), SEED=args.seed), f"{_core.cpu_model()}; torch: {torch or 'none'}")
    for dtype in args.dtypes:
        for values in measured(dtype, args, progress):
            table.row(values)
    progress.clear()
    table.foot()
    return 0


if __name__ == "__main__":
    sys.exit(main_with_save(main))
