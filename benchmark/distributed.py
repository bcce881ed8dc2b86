#!/usr/bin/env python3
"""Context parallelism: bytes and imbalance by list pattern, and what ranks cost on this machine.

    python benchmark/distributed.py                          # bytes: exact, from plans, without MPI; half a minute
    python benchmark/distributed.py scaling                  # one process of n threads, and n ranks of one thread

A row of `bytes` is a plan. `Moved` is what the rank that receives most receives, queries and results of "items" included, over the keys and
values that an all-gather would bring it; `Imbalance` is the load of the busiest rank over the mean. Nothing is measured, so the table is
the same on every machine. `scaling` is measured under mpirun; MPIRUN sets the command.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

import _bench  # noqa: F401  (finds the library of this checkout)
import blitz_attn
from _bench import Report, checked, columns, command, parameters, parser_of, positive, yes
from blitz_attn import _core, sabi, testing
from blitz_attn.distributed import ContextParallelPlan, context_parallel_attention, context_parallel_attention_backward, dispatch

BLOCK = 128
DISPATCHES = ("cut", "zigzag", "contiguous", "items")
BYTES_COLUMNS = columns("pattern:16 P:5 dispatch:11 Moved:8.3f Imbalance:10.3f Busiest_[MB]:13.1f All_gather_[MB]:16.1f")
SCALING_COLUMNS = columns("cores:5 Threads_[ms]:13.1f Ranks_[ms]:11.1f Ranks_over_threads:19.3f Efficiency:11.3f Same_bits:9")


# ---- Lists --------------------------------------------------------------------------------------------------------


def patterns(tokens: int, heads: int, seed: int) -> Iterator[tuple[str, np.ndarray | None, dict[str, Any]]]:
    """(name, lists, options of the call) of each kind of list."""
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
    frame = max(1, rows // 64)  # blocks of a frame of a video: near frames, and a few blocks anywhere
    near = abs(np.arange(rows)[:, None] // frame - np.arange(rows)[None] // frame) <= 1
    yield "video", sabi.from_block_mask(np.stack([near | (rng.random((rows, rows)) < 0.02) for _ in range(heads)])[None]), {}


# ---- Jobs ---------------------------------------------------------------------------------------------------------


def job(ranks: int, **arguments: Any) -> dict[str, Any]:
    """What rank 0 of a job reports."""
    command = shlex.split(os.environ.get("MPIRUN") or "mpirun --oversubscribe --mca mpi_yield_when_idle 1")
    if shutil.which(command[0]) is None:
        sys.exit(f"distributed.py: found no {command[0]}, which starts the ranks: install an MPI library, or set MPIRUN to its command")
    command += ["-n", str(ranks), sys.executable, "-m", "mpi4py", __file__, "worker", json.dumps(arguments)]
    needed = {"OPENBLAS_NUM_THREADS": "1", "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    environment = {"BLITZ_ATTN_NUM_THREADS": "1", **needed, **os.environ, "BLITZ_ATTN_ISA": _core.isa_active()}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800)
    if done.returncode:
        sys.exit(f"distributed.py: {shlex.join(command[:6])} ... ended with status {done.returncode}:\n{done.stdout}{done.stderr}")
    return next(json.loads(line[2:]) for line in done.stdout.splitlines() if line.startswith("::"))


def worker(tokens: int, heads: int, kv_heads: int, density: float, repeats: int, backward: bool, threads: int) -> None:
    """A call by ranks of one thread, or by one process of `threads`. What is compared of gradients is dq."""
    from mpi4py import MPI

    comm, rows = MPI.COMM_WORLD, tokens // BLOCK

    def slowest(value: float) -> float:
        values = np.empty(comm.Get_size())
        comm.Allgather(np.array([float(value)]), values)
        return float(values.max())

    q, k, v = testing.make_qkv(1, heads, kv_heads, tokens, tokens, 128)
    mask = (np.random.default_rng(1).random((rows, rows)) < density) | np.eye(rows, dtype=bool)
    lists = sabi.from_block_mask((mask & np.tri(rows, dtype=bool))[None, None])
    whole, lse = blitz_attn.block_sparse_attention(q, k, v, lists, causal=True, return_lse=True)
    given = [q, q, k, v, whole, lse] if backward else [q, k, v]  # q is as good a gradient as any
    if backward:
        whole = blitz_attn.block_sparse_attention_backward(*given, lists, causal=True)[0]
    if threads:
        own, options = whole, {"sabi": lists, "causal": True, "num_threads": threads}
        run = blitz_attn.block_sparse_attention_backward if backward else blitz_attn.block_sparse_attention
    else:
        sizes = {"num_heads": heads, "num_kv_heads": kv_heads, "head_dim": 128}
        plan = ContextParallelPlan(lists, tokens, comm=comm, causal=True, dispatch="cut", **sizes)
        own, options = dispatch(whole, plan), {"plan": plan}
        given = [dispatch(x, plan, keys=x is k or x is v, axis=2) for x in given]
        run = context_parallel_attention_backward if backward else functools.partial(context_parallel_attention, return_lse=False)
    expected, times, same = own.tobytes(), [], True
    for _ in range(repeats + 1):
        slowest(0)  # all begin together
        started = time.perf_counter()
        result = run(*given, **options)
        times.append(slowest(time.perf_counter() - started))
        same &= (result[0] if backward else result).tobytes() == expected  # results last until the next call's: their memory is new
    same = not slowest(not same)
    if comm.Get_rank() == 0:
        print("::" + json.dumps({"total": statistics.median(times[1:]), "same": same}), flush=True)


# ---- The tables ---------------------------------------------------------------------------------------------------


def put(report: Report, *values: Any) -> None:
    """A row, from its values in the order of the columns."""
    report.row({column.name: value for column, value in zip(report.columns, values, strict=True)})


def run_bytes(args: argparse.Namespace, report: Report, sizes: dict[str, int]) -> None:
    report.columns = BYTES_COLUMNS
    report.head("Bytes of a forward call and imbalance of its work, from plans", parameters(**sizes, head_dim=128, dtype="bfloat16"))
    for (name, lists, options), size, way in itertools.product(patterns(args.tokens, args.heads, args.seed), args.ranks, args.dispatches):
        plan = ContextParallelPlan(
            lists, args.tokens, size=size, num_heads=args.heads, num_kv_heads=args.kv_heads, head_dim=128, dtype="bfloat16",
            dispatch=way, **options,
        )  # fmt: skip
        received, whole = plan.bytes.sum(axis=0), plan.all_gather_bytes
        moved = float((received / np.maximum(whole, 1)).max())
        put(report, name, size, way, moved, plan.balance, received.max() / 1e6, whole.max() / 1e6)


def run_scaling(args: argparse.Namespace, report: Report, sizes: dict[str, int]) -> None:
    report.columns = SCALING_COLUMNS
    given = {**sizes, "density": args.density, "backward": args.backward, "repeats": args.repeats}
    report.head("One process of n threads beside n ranks of one thread", parameters(**given, head_dim=128, dtype="float32"))
    single = None
    for cores in range(1, args.cores + 1):
        threads = job(1, **given, threads=cores)["total"]
        row = job(cores, **given, threads=0)
        total, single = row["total"], single or row["total"]
        put(report, cores, 1e3 * threads, 1e3 * total, total / threads, single / total / cores, yes(row["same"]))


TABLES = {  # who makes each, and sizes where none are given
    "bytes": (run_bytes, {"tokens": 262144, "heads": 8, "kv_heads": 2, "ranks": [4, 16, 64, 256, 1024]}),
    "scaling": (run_scaling, {"tokens": 8192, "heads": 8, "kv_heads": 2}),
}


def parser() -> argparse.ArgumentParser:
    result = parser_of(__doc__, repeats=5, threads="none")
    result.add_argument("what", nargs="?", choices=tuple(TABLES), default="bytes", help="the table (%(default)s)")
    blocks = checked(int, lambda tokens: tokens > 0 and tokens % BLOCK == 0, f"a multiple of {BLOCK}")
    density = checked(float, lambda value: 0 < value <= 1, "a number above 0 and at most 1")
    result.add_argument("--tokens", type=blocks, help="tokens of the sequence")
    result.add_argument("--heads", type=positive)
    result.add_argument("--kv-heads", type=positive)
    result.add_argument("--ranks", type=positive, nargs="+")
    result.add_argument("--dispatches", nargs="+", choices=DISPATCHES, default=list(DISPATCHES))
    result.add_argument("--density", type=density, default=0.25, help="of the lists of scaling (%(default)s)")
    result.add_argument("--cores", type=positive, default=len(os.sched_getaffinity(0)), help="most cores of scaling (%(default)s)")
    result.add_argument("--backward", action="store_true", help="gradients, in scaling")
    return result


@command(parser)
def main(args: argparse.Namespace, report: Report) -> None:
    run, defaults = TABLES[args.what]
    for name, value in defaults.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    run(args, report, {"tokens": args.tokens, "heads": args.heads, "kv_heads": args.kv_heads})
    report.foot()


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        worker(**json.loads(sys.argv[2]))
    else:
        raise SystemExit(main())
