#!/usr/bin/env python3
"""Gradients of block-sparse attention: dense, causal and sparse, beside torch's dense backward where torch is installed.

    python benchmark/backward.py                                  # about a minute and a half
    python benchmark/backward.py --isa avx2 --dtypes float32      # what a CPU with AVX2 gets
    python benchmark/backward.py -S 16384 --sparsities 0 0.9 --no-torch

A row is one call of the backward pass. GFLOP/s counts five products a query-key pair that is attended, 2 (3 D + 2 D_v) operations, and
Share_of_F holds them against the fp32 FMA peak of the same threads, measured in the same turns. Share_of_ideal is the speed-up over the
dense row of the same dtype and threads, over 1 / (1 - s), s being the share of pairs that the list really drops. Backward/forward is the
time over that of our own forward call with the same arguments. Torch is scaled_dot_product_attention's backward, dense or causal: for
sparse rows the time of its dense one. Its forward pass is not in its time, nor is ours. README.md beside this file says more.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

import _bench  # noqa: F401  (finds the library of this checkout)
import blitz_attn
import roofline
from _bench import Column, Contender, Progress, Table, command, in_turns, isa_level, natural, parameters, positive, share
from benchmark import DTYPES, block_shape
from blitz_attn import reference, sabi, testing
from operands import dense_pairs, kept_pairs
from other_libraries import UnavailableError, imported_torch, torch_tensor
from result_files import add_save, main_with_save

COLUMNS = (
    Column("dtype", 9),
    Column("H", 3),
    Column("S", 6),
    Column("D", 4),
    Column("rule", 7),
    Column("block_shape", 11),
    Column("sparsity", 8, ".2f"),
    Column("threads", 7),
    Column("Equal", 6),
    Column("Our_[usec]", 11, ".0f"),
    Column("GFLOP/s", 8, ".1f"),
    Column("Share_of_F", 10, ".3f"),
    Column("Share_of_ideal", 14, ".3f"),
    Column("Over_1_thread", 13, ".2f"),
    Column("Backward/forward", 16, ".2f"),
    Column("Torch_[usec]", 12, ".0f"),
    Column("Torch/ours", 10, ".2f"),
)
PEAK_SECONDS = 0.05
LARGEST_ERROR = {"float64": 1e-11, "float32": 1e-5, "float16": 5e-3, "bfloat16": 4e-2}  # relative, for "Equal"; out is rounded to the dtype


@dataclass(frozen=True)
class Cell:
    """What a row measures, but for the threads."""

    causal: bool
    sparsity: float
    lists: np.ndarray | None
    pairs: float  # a head


class Problem:
    """Operands of one dtype, and the calls over them."""

    def __init__(self, dtype: str, args: argparse.Namespace):
        shape = (1, args.heads, args.heads, args.seq, args.seq, args.head_dim)
        self.q, self.k, self.v = testing.make_qkv(*shape, dtype=dtype, seed=args.seed)
        self.dout = testing.make_qkv(*shape, dtype=dtype, seed=args.seed + 1)[0]
        self.grads = tuple(np.zeros_like(x) for x in (self.q, self.k, self.v))
        self.bits: dict[str, Any] = {"dtype": dtype} if self.q.dtype == np.uint16 else {}
        self.dtype, self.args = dtype, args

    def options(self, cell: Cell) -> dict[str, Any]:
        return {"sabi": cell.lists, "block_shape": self.args.block_shape, "causal": cell.causal, **self.bits}

    def calls(self, cell: Cell, threads: int) -> tuple[Callable[[], Any], Callable[[], Any]]:
        """The forward call and the backward call of a cell."""
        options = self.options(cell)
        out, lse = blitz_attn.block_sparse_attention(self.q, self.k, self.v, return_lse=True, **options)
        spare = np.zeros_like(out)

        def forward() -> None:
            blitz_attn.block_sparse_attention(self.q, self.k, self.v, out=spare, num_threads=threads, **options)

        def backward() -> None:
            blitz_attn.block_sparse_attention_backward(
                self.dout, self.q, self.k, self.v, out, lse, grads=self.grads, num_threads=threads, **options
            )

        return forward, backward

    def poison(self) -> None:
        for x in self.grads:
            x[...] = testing.round_to(np.full((), np.nan), self.dtype)

    def is_equal(self, cell: Cell) -> bool:
        """Whether the first head's gradients, as they stand in `grads`, are the float64 reference's, by norms."""
        options = self.options(cell)
        if cell.lists is not None:
            options["sabi"] = cell.lists[:, :1]
        q, k, v, dout = (x[:, :1] for x in (self.q, self.k, self.v, self.dout))
        out, lse = reference.block_sparse_attention(q, k, v, return_lse=True, **options)
        exact = reference.block_sparse_attention_backward(dout, q, k, v, out, lse, **options)
        ours = (x[:, :1] for x in self.grads)
        errors = [testing.error_of(x, right, self.dtype).relative for x, right in zip(ours, exact, strict=True)]
        return max(errors) <= LARGEST_ERROR[self.dtype]

    def torch_call(self, causal: bool, threads: int) -> Callable[[], Any] | None:
        """torch's dense backward over the same operands; its forward pass has been run."""
        try:
            torch = imported_torch()
        except UnavailableError:
            return None
        inputs = [torch_tensor(x, self.dtype).requires_grad_() for x in (self.q, self.k, self.v)]
        dout = torch_tensor(self.dout, self.dtype)
        out = torch.nn.functional.scaled_dot_product_attention(*inputs, is_causal=causal)

        def run() -> None:
            torch.set_num_threads(threads)
            torch.autograd.grad(out, inputs, dout, retain_graph=True)

        return run


def cells_of(args: argparse.Namespace) -> Iterator[Cell]:
    for causal in args.rules:
        all_pairs = dense_pairs(args.seq, args.seq, causal)
        for sparsity in args.sparsities:
            if sparsity == 0:
                yield Cell(causal, 0.0, None, all_pairs)
                continue
            lists = sabi.random_with_frame(args.seq, args.seq, args.block_shape, sparsity, heads=args.heads, seed=args.seed)
            yield Cell(causal, sparsity, lists, kept_pairs(lists, args.seq, args.seq, args.block_shape, causal))


def measured(problem: Problem, cells: list[Cell], threads: int, args: argparse.Namespace, progress: Progress) -> Iterator[dict[str, Any]]:
    """Measure the cells of one rule with a number of threads, the dense one first, all in turns."""
    peaks: list[float] = []
    contenders = [Contender("limit", lambda: peaks.append(roofline.peak_flops(threads, seconds=PEAK_SECONDS)), 0.0)]
    torch_call = problem.torch_call(cells[0].causal, threads) if args.torch else None
    if torch_call:
        contenders.append(Contender("torch", torch_call, cells[0].pairs))
    ahead = len(contenders)
    for cell in cells:
        forward, backward = problem.calls(cell, threads)
        contenders.append(Contender("forward", forward, cell.pairs))
        contenders.append(Contender(f"{problem.dtype}, {threads} threads", backward, cell.pairs, before_last=problem.poison))
    times: dict[int, float] = {}
    for index, timing in in_turns(contenders, args.repeats, args.warmup, progress):
        times[index] = timing.median
        if index < ahead or (index - ahead) % 2 == 0:
            continue
        cell, dense = cells[(index - ahead) // 2], cells[0]
        rate = args.heads * cell.pairs * 10 * args.head_dim / timing.median / 1e9
        yield {
            "dtype": problem.dtype,
            "H": args.heads,
            "S": args.seq,
            "D": args.head_dim,
            "rule": "causal" if cell.causal else "all",
            "block_shape": "-" if cell.lists is None else "x".join(map(str, args.block_shape)),
            "sparsity": cell.sparsity,
            "threads": threads,
            "Equal": None if not args.run_reference else "yes" if problem.is_equal(cell) else "no",
            "Our_[usec]": timing.median * 1e6,
            "GFLOP/s": rate,
            "Share_of_F": rate / statistics.median(peaks),
            "Share_of_ideal": times[ahead + 1] / timing.median * cell.pairs / dense.pairs,
            "Backward/forward": timing.median / times[index - 1],
            "Torch_[usec]": times[1] * 1e6 if torch_call else None,
            "Torch/ours": times[1] / timing.median if torch_call else None,
        }


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    result.add_argument("--seq", "-S", type=positive, default=4096, help="tokens (%(default)s)")
    result.add_argument("--heads", "-H", type=positive, default=2, help="heads (%(default)s)")
    result.add_argument("--head-dim", "-D", type=positive, default=128, help="head dim (%(default)s)")
    result.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["float32", "bfloat16"], help="dtypes (float32 bfloat16)")
    result.add_argument("--sparsities", type=share, nargs="+", default=[0.0, 0.5, 0.8, 0.9], metavar="s", help="the first must be 0")
    result.add_argument("--block-shape", type=block_shape, default=(128, 128), metavar="QxKV", help="of the lists (128x128)")
    result.add_argument("--causal", action=argparse.BooleanOptionalAction, help="only causal rows, or none (both)")
    result.add_argument("--threads", type=positive, nargs="+", help="numbers of threads (1 and the library's choice)")
    result.add_argument("--isa", type=isa_level, help="highest instruction set to use, such as avx2 (the CPU's best)")
    result.add_argument("--repeats", type=positive, default=3, help="timed turns, of which the median counts (%(default)s)")
    result.add_argument("--warmup", type=natural, default=1, help="turns before them (%(default)s)")
    result.add_argument("--torch", action=argparse.BooleanOptionalAction, default=True, help="time torch too (yes)")
    result.add_argument("--run-reference", action=argparse.BooleanOptionalAction, default=True, help="check the gradients (yes)")
    result.add_argument("--seed", type=natural, default=1234, help="of lists and operands (%(default)s)")
    return add_save(result)


@command
def main(argv: list[str] | None = None) -> int:
    options = parser()
    args = options.parse_args(argv)
    if args.sparsities[0] != 0:
        options.error(f"--sparsities: expected 0 first, which the others are measured against, got {args.sparsities[0]:g}")
    args.rules = (False, True) if args.causal is None else (args.causal,)
    args.threads = args.threads or sorted({1, blitz_attn.get_num_threads()})
    with blitz_attn.isa(args.isa) as isa:
        cells = list(cells_of(args))
        total = (args.repeats + args.warmup) * len(args.dtypes) * len(args.threads) * 2 * sum(cell.pairs for cell in cells)
        progress = Progress(total)
        table = Table(COLUMNS, sys.stdout, progress)
        limits = ", ".join(f"{threads}: {roofline.peak_flops(threads):.0f}" for threads in args.threads)
        table.head(parameters(ISA=isa, SEED=args.seed), f"F in GFLOP/s by threads: {limits}")
        for dtype in args.dtypes:
            problem = Problem(dtype, args)
            for causal in args.rules:
                mine = [cell for cell in cells if cell.causal == causal]
                alone: dict[float, float] = {}
                for threads in args.threads:
                    for values in measured(problem, mine, threads, args, progress):
                        alone.setdefault(values["sparsity"], values["Our_[usec]"] if threads == 1 else float("nan"))
                        if threads > 1 and alone[values["sparsity"]] > 0:
                            values["Over_1_thread"] = alone[values["sparsity"]] / values["Our_[usec]"]
                        table.row(values)
        progress.clear()
        table.foot()
    return 0


if __name__ == "__main__":
    sys.exit(main_with_save(main))
