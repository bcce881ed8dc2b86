#!/usr/bin/env python3
"""Context parallelism: exact bytes and imbalance of each list pattern, computed from plans, without MPI. Takes half a minute.

    python benchmark/distributed.py | python benchmark/plot.py
    python benchmark/distributed.py --tokens 65536 --ranks 8 --dispatches cut items

Each row describes a plan. `Moved` is the largest quotient, among all ranks, of the bytes that a rank receives (including the queries and
results of dispatch "items") and the bytes of keys and values that an all-gather would bring it. `Imbalance` is the load of the
busiest rank over the mean load. Nothing is measured, so the table is the same on every machine. To time ranks: mpirun -n 4 python -m mpi4py
examples/context_parallel.py.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

import _bench  # noqa: F401  (finds the library of this checkout)
from _bench import Report, checked, columns, command, parameters, parser_of, positive
from blitz_attn import sabi
from blitz_attn.distributed import ContextParallelPlan

BLOCK = 128
DISPATCHES = ("cut", "zigzag", "contiguous", "items")
COLUMNS = columns("pattern:16 P:5 dispatch:11 Moved:8.3f Imbalance:10.3f Busiest_[MB]:13.1f All_gather_[MB]:16.1f")


def patterns(tokens: int, heads: int, seed: int) -> Iterator[tuple[str, np.ndarray | None, dict[str, Any]]]:
    """Yields (name, lists, options of the call) for each kind of list."""
    rng = np.random.default_rng(seed)
    rows = tokens // BLOCK
    causal = np.tri(rows, dtype=bool)
    shape = (BLOCK, BLOCK)

    def random(density: float) -> np.ndarray:
        masks = [((rng.random((rows, rows)) < density) | np.eye(rows, dtype=bool)) & causal for _ in range(heads)]
        return sabi.from_block_mask(np.stack(masks)[None])

    yield "dense", None, {"causal": True}
    yield "random_0.05", random(0.05), {"causal": True}
    window = min(4096, tokens // 4)
    yield "window_and_sink", sabi.sink_local(tokens, block_shape=shape, sink=BLOCK, local=window), {"causal": True}
    cuts = np.sort(rng.choice(np.arange(1, rows), size=min(31, rows - 1), replace=False)) * BLOCK
    lengths = np.diff([0, *cuts, tokens]).tolist()
    yield "documents", sabi.document(lengths, block_shape=shape, causal=True), {"causal": True}
    columns, diagonals = rng.choice(rows, rows // 40, replace=False), rng.choice(rows, rows // 40, replace=False)
    lines = causal & (np.isin(np.arange(rows), columns)[None] | np.isin(np.arange(rows)[:, None] - np.arange(rows)[None], [0, *diagonals]))
    yield "vertical_slash", sabi.from_block_mask(lines[None, None]), {"causal": True}
    frame = max(1, rows // 64)  # blocks per video frame: each block attends near frames, and a few blocks anywhere
    near = abs(np.arange(rows)[:, None] // frame - np.arange(rows)[None] // frame) <= 1
    yield "video", sabi.from_block_mask(np.stack([near | (rng.random((rows, rows)) < 0.02) for _ in range(heads)])[None]), {}


def parser() -> argparse.ArgumentParser:
    result = parser_of(__doc__, measured=False)
    blocks = checked(int, lambda tokens: tokens > 0 and tokens % BLOCK == 0, f"a multiple of {BLOCK}")
    result.add_argument("--tokens", type=blocks, default=262144, help="tokens of the sequence (%(default)s)")
    result.add_argument("--heads", type=positive, default=8, help="query heads (%(default)s)")
    result.add_argument("--kv-heads", type=positive, default=2, help="KV heads (%(default)s)")
    result.add_argument("--ranks", type=positive, nargs="+", default=[4, 16, 64, 256, 1024], help="numbers of ranks (4 16 64 256 1024)")
    result.add_argument("--dispatches", nargs="+", choices=DISPATCHES, default=list(DISPATCHES), help="ways to dispatch (all)")
    return result


@command(parser, COLUMNS)
def main(args: argparse.Namespace, report: Report) -> None:
    sizes = {"num_heads": args.heads, "num_kv_heads": args.kv_heads, "head_dim": 128, "dtype": "bfloat16"}
    report.head("Bytes of a forward call and imbalance of its work, from plans", parameters(tokens=args.tokens, **sizes))
    every = itertools.product(patterns(args.tokens, args.heads, args.seed), args.ranks, args.dispatches)
    for (name, lists, options), ranks, dispatch in every:
        plan = ContextParallelPlan(lists, args.tokens, size=ranks, dispatch=dispatch, **sizes, **options)
        received, whole = plan.bytes.sum(axis=0), plan.all_gather_bytes
        values = {"pattern": name, "P": ranks, "dispatch": dispatch, "Moved": float((received / np.maximum(whole, 1)).max())}
        values |= {"Imbalance": plan.balance, "Busiest_[MB]": received.max() / 1e6, "All_gather_[MB]": whole.max() / 1e6}
        report.row(values)
    report.foot()


if __name__ == "__main__":
    raise SystemExit(main())
