#!/usr/bin/env python3
"""Context parallelism: bytes and imbalance by list pattern, and what ranks cost and hide on this machine.

    python benchmark/distributed.py                          # bytes: exact, from plans, without MPI; half a minute
    python benchmark/distributed.py exposed --ranks 2 4      # time that transfers add at a limited rate; needs root
    python benchmark/distributed.py scaling                  # one process of n threads, and n ranks of one thread
    python benchmark/distributed.py decode --ranks 1 2 4     # a decoding step over a shared cache

A row of `bytes` is a plan. `Moved` is what the rank that receives most receives, queries and results of "items" included, over the keys and
values that an all-gather would bring it; `Imbalance` is the load of the busiest rank over the mean. Nothing is measured, so the table is
the same on every machine.

The other tables are measured under mpirun; MPIRUN sets the command. In `exposed`, all ranks share one loopback device of a limited rate, in
a network namespace of their own. `Kernels` is the time that the slowest rank spends in calls of the library's kernels; `Exposed` is the
rest of its call; `Wire` is the plan's bytes over the rate; `Hidden` is the share of the time without overlap that overlap hides.
`Predicted` is the plan's model with that rate and the speed of the kernels as measured.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

import _bench  # noqa: F401  (finds the library of this checkout)
import blitz_attn
from _bench import Column, Table, checked, command, density, parameters, positive
from blitz_attn import sabi
from blitz_attn.distributed import ContextParallelPlan
from result_files import add_save, main_with_save

BLOCK = 128
DISPATCHES = ("cut", "zigzag", "contiguous", "items")
BYTES_COLUMNS = (
    Column("pattern", 16), Column("P", 5), Column("dispatch", 11), Column("Moved", 8, ".3f"), Column("Imbalance", 10, ".3f"),
    Column("Busiest_[MB]", 13, ".1f"), Column("All_gather_[MB]", 16, ".1f"),
)  # fmt: skip
EXPOSED_COLUMNS = (
    Column("P", 3), Column("overlap", 9), Column("Rate_[Mbit/s]", 14), Column("Total_[ms]", 11, ".1f"), Column("Kernels_[ms]", 13, ".1f"),
    Column("Exposed_[ms]", 13, ".1f"), Column("Wire_[ms]", 10, ".1f"), Column("Hidden", 7, ".2f"), Column("Predicted_[ms]", 15, ".1f"),
    Column("Same_bits", 9),
)  # fmt: skip
SCALING_COLUMNS = (
    Column("cores", 5), Column("Threads_[ms]", 13, ".1f"), Column("Ranks_[ms]", 11, ".1f"), Column("Ranks_over_threads", 19, ".3f"),
    Column("Efficiency", 11, ".3f"), Column("Same_bits", 9),
)  # fmt: skip
DECODE_COLUMNS = (
    Column("P", 3), Column("B", 4), Column("tokens", 8), Column("holders", 8), Column("Step_[usec]", 12, ".0f"),
    Column("Own_[usec]", 11, ".0f"), Column("Exchange_[usec]", 16, ".0f"), Column("Sent_[kB]", 10, ".1f"),
    Column("Whole_[usec]", 13, ".0f"), Column("Same_bits", 9),
)  # fmt: skip


def put(table: Table, *values: Any) -> None:
    """A row, from its values in the order of the columns."""
    table.row({column.name: value for column, value in zip(table.columns, values, strict=True)})


# ---- Lists --------------------------------------------------------------------------------------------------------


def patterns(tokens: int, heads: int, seed: int = 1234) -> Iterator[tuple[str, np.ndarray | None, dict[str, Any]]]:
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


def bytes_rows(tokens: int, heads: int, kv_heads: int, ranks: Sequence[int], dispatches: Sequence[str]) -> Iterator[tuple[Any, ...]]:
    for name, lists, options in patterns(tokens, heads):
        for size in ranks:
            for dispatch in dispatches:
                plan = ContextParallelPlan(
                    lists, tokens, size=size, num_heads=heads, num_kv_heads=kv_heads, head_dim=128, dtype="bfloat16", dispatch=dispatch,
                    **options,
                )  # fmt: skip
                received, whole = plan.bytes.sum(axis=0), plan.all_gather_bytes
                moved = float((received / np.maximum(whole, 1)).max())
                yield name, size, dispatch, moved, plan.balance, received.max() / 1e6, whole.max() / 1e6


def run_bytes(options: argparse.Namespace) -> None:
    table = Table(BYTES_COLUMNS, sys.stdout)
    sizes = {"tokens": options.tokens, "heads": options.heads, "kv_heads": options.kv_heads, "head_dim": 128, "dtype": "bfloat16"}
    table.head("Bytes of a forward call and imbalance of its work, from plans", parameters(**sizes))
    for row in bytes_rows(options.tokens, options.heads, options.kv_heads, options.ranks, options.dispatches):
        put(table, *row)
    table.foot()


# ---- Jobs ---------------------------------------------------------------------------------------------------------


def job(ranks: int, what: str, limit: int | None = None, /, **arguments: Any) -> list[dict[str, Any]]:
    """What rank 0 of a job reports. With `limit`, in a network namespace whose loopback device carries so many Mbit/s."""
    command = shlex.split(os.environ.get("MPIRUN") or "mpirun --oversubscribe --mca mpi_yield_when_idle 1")
    if shutil.which(command[0]) is None:
        sys.exit(f"distributed.py: found no {command[0]}, which starts the ranks: install an MPI library, or set MPIRUN to its command")
    if limit is not None:
        command += ["--mca", "pml", "ob1", "--mca", "btl", "tcp,self", "--mca", "btl_tcp_if_include", "lo"]
    command += ["-n", str(ranks), sys.executable, "-m", "mpi4py", __file__, "worker", json.dumps({"what": what, **arguments})]
    if limit is not None:
        shape = f"ip link set lo up && tc qdisc add dev lo root tbf rate {limit}mbit burst 256kb latency 200ms"
        command = ["unshare", "-n", "sh", "-c", f'{shape} && exec "$@"', "sh", *command]
    environment = {"OPENBLAS_NUM_THREADS": "1", "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", **os.environ}
    environment.setdefault("BLITZ_ATTN_NUM_THREADS", "1")
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800)
    if done.returncode:
        sys.exit(f"distributed.py: {shlex.join(command[:6])} ... ended with status {done.returncode}:\n{done.stdout}{done.stderr}")
    return [json.loads(line[2:]) for line in done.stdout.splitlines() if line.startswith("::")]


def arrays(tokens: int, heads: int, kv_heads: int, dim: int) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.standard_normal((1, n, tokens, dim), dtype=np.float32) for n in (heads, kv_heads, kv_heads)]


def lists_of(tokens: int, density: float) -> np.ndarray:
    rows = tokens // BLOCK
    mask = (np.random.default_rng(1).random((rows, rows)) < density) | np.eye(rows, dtype=bool)
    return sabi.from_block_mask((mask & np.tri(rows, dtype=bool))[None, None])


def cut_plan(comm: Any, lists: np.ndarray, tokens: int, heads: int, kv_heads: int) -> ContextParallelPlan:
    """The plan of what is measured."""
    return ContextParallelPlan(lists, tokens, comm=comm, num_heads=heads, num_kv_heads=kv_heads, head_dim=128, causal=True, dispatch="cut")


class Kernels:
    """The time that a rank spends in the kernels that a module of `blitz_attn.distributed` calls."""

    def __init__(self, module: Any, *names: str) -> None:
        self.seconds = 0.0
        for name in names:
            setattr(module, name, self.timed(getattr(module, name)))

    def timed(self, function: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            started = time.perf_counter()
            try:
                return function(*arguments, **options)
            finally:
                self.seconds += time.perf_counter() - started

        return call


def report(comm: Any, **values: Any) -> None:
    if comm.Get_rank() == 0:
        print("::" + json.dumps(values), flush=True)


def slowest(comm: Any, value: float) -> float:
    values = np.empty(comm.Get_size())
    comm.Allgather(np.array([float(value)]), values)
    return float(values.max())


def work_prefill(comm: Any, tokens: int, heads: int, kv_heads: int, density: float, repeats: int, overlaps: list[Any], rate: float) -> None:
    """A forward call by ranks, for each kind of overlap in turns."""
    from blitz_attn.distributed import attention, context_parallel_attention, dispatch

    q, k, v = arrays(tokens, heads, kv_heads, 128)
    lists = lists_of(tokens, density)
    plan = cut_plan(comm, lists, tokens, heads, kv_heads)
    whole = blitz_attn.block_sparse_attention(q, k, v, lists, causal=True)
    shards = [dispatch(q, plan), dispatch(k, plan, keys=True), dispatch(v, plan, keys=True)]
    own = dispatch(whole, plan)
    kernels = Kernels(attention, "block_sparse_attention")
    samples: dict[str, list[tuple[float, float]]] = {}
    same = True
    for _ in range(repeats + 1):
        for overlap in overlaps:
            slowest(comm, 0)  # all begin together
            kernels.seconds, started = 0.0, time.perf_counter()
            out = context_parallel_attention(*shards, plan=plan, overlap=overlap, return_lse=False)
            total = time.perf_counter() - started
            same &= np.asarray(out).tobytes() == np.ascontiguousarray(own).tobytes()
            samples.setdefault(str(overlap), []).append((slowest(comm, total), slowest(comm, kernels.seconds)))
    same = not slowest(comm, not same)
    flops = 4 * 128 * plan.loads.max()
    total_bytes, busiest = int(plan.bytes.sum()), max(plan.bytes.sum(axis=0).max(), plan.bytes.sum(axis=1).max())
    link = rate * busiest / max(1, total_bytes)  # the busiest rank's share of what all ranks send through one device
    for overlap in overlaps:
        kept = samples[str(overlap)][1:]
        total, inside = (statistics.median(x) for x in zip(*kept, strict=True))
        report(
            comm, overlap=overlap, total=total, kernels=inside, bytes=total_bytes, same=same,
            predicted=plan.predict(link=float(link) or 1.0, rate=float(flops / inside)).total,
        )  # fmt: skip


def work_scaling(comm: Any, tokens: int, heads: int, kv_heads: int, density: float, repeats: int, backward: bool, threads: int) -> None:
    """A call by ranks of one thread, or by one process of `threads`. What is compared of gradients is dq."""
    from blitz_attn.distributed import context_parallel_attention, context_parallel_attention_backward, dispatch

    q, k, v = arrays(tokens, heads, kv_heads, 128)
    lists = lists_of(tokens, density)
    whole, lse = blitz_attn.block_sparse_attention(q, k, v, lists, causal=True, return_lse=True)
    given = [q, q, k, v, whole, lse] if backward else [q, k, v]  # q is as good a gradient as any
    if backward:
        whole = blitz_attn.block_sparse_attention_backward(*given, lists, causal=True)[0]
    if threads:
        own, options = whole, {"sabi": lists, "causal": True, "num_threads": threads}
        run = blitz_attn.block_sparse_attention_backward if backward else blitz_attn.block_sparse_attention
    else:
        plan = cut_plan(comm, lists, tokens, heads, kv_heads)
        own, options = dispatch(whole, plan), {"plan": plan}
        given = [dispatch(x, plan, keys=x is k or x is v, axis=2) for x in given]
        run = context_parallel_attention_backward if backward else functools.partial(context_parallel_attention, return_lse=False)
    own, times, same = own.tobytes(), [], True
    for _ in range(repeats + 1):
        slowest(comm, 0)  # all begin together
        started = time.perf_counter()
        result = run(*given, **options)
        times.append(slowest(comm, time.perf_counter() - started))
        same &= (result[0] if backward else result).tobytes() == own  # results last until the next call's: their memory is new
    report(comm, total=statistics.median(times[1:]), same=not slowest(comm, not same))


def run_exposed(options: argparse.Namespace) -> None:
    for tool in ("unshare", "tc", "ip"):
        if shutil.which(tool) is None or os.geteuid() != 0:
            sys.exit("distributed.py: exposed needs root, and unshare, ip and tc, for a network namespace of a limited rate")
    table = Table(EXPOSED_COLUMNS, sys.stdout)
    sizes = {name: getattr(options, name) for name in ("tokens", "heads", "kv_heads", "density")}
    table.head("Time that transfers add, at a limited rate shared by all ranks", parameters(**sizes, head_dim=128, dtype="float32"))
    for ranks in options.ranks:
        rows = job(
            ranks, "prefill", options.rate, **sizes, repeats=options.repeats, overlaps=[False, True, "thread"], rate=options.rate * 1e6 / 8
        )  # fmt: skip
        bare = rows[0]["total"] - rows[0]["kernels"]
        for row in rows:
            exposed = row["total"] - row["kernels"]
            name = {"False": "none", "True": "prefetch"}.get(str(row["overlap"]), row["overlap"])
            put(
                table, ranks, name, options.rate, 1e3 * row["total"], 1e3 * row["kernels"], 1e3 * exposed,
                row["bytes"] * 8e-3 / options.rate, 1 - exposed / bare, 1e3 * row["predicted"], "yes" if row["same"] else "NO",
            )  # fmt: skip
    table.foot()


def run_scaling(options: argparse.Namespace) -> None:
    table = Table(SCALING_COLUMNS, sys.stdout)
    sizes = {name: getattr(options, name) for name in ("tokens", "heads", "kv_heads", "density", "backward", "repeats")}
    table.head("One process of n threads beside n ranks of one thread", parameters(**sizes, head_dim=128, dtype="float32"))
    single = None
    for cores in range(1, options.cores + 1):
        threads = job(1, "scaling", **sizes, threads=cores)[0]["total"]
        row = job(cores, "scaling", **sizes, threads=0)[0]
        single = single or row["total"]
        put(
            table, cores, 1e3 * threads, 1e3 * row["total"], row["total"] / threads, single / row["total"] / cores,
            "yes" if row["same"] else "NO",
        )  # fmt: skip
    table.foot()


def work_decode(comm: Any, batch: int, tokens: int, heads: int, kv_heads: int, holders: str, repeats: int) -> None:
    """A decoding step by ranks."""
    from blitz_attn.distributed import DecodePlan, decode

    page, split = 16, 1024
    rank, size = comm.Get_rank(), comm.Get_size()
    rng = np.random.default_rng(0)
    pages = tokens // page
    k_cache, v_cache = (rng.standard_normal((batch * pages, page, kv_heads, 128), dtype=np.float32) for _ in range(2))
    tables = np.arange(batch * pages, dtype=np.int32).reshape(batch, pages)
    q = rng.standard_normal((batch, heads, 128), dtype=np.float32)
    lengths = [tokens] * batch
    chunk = np.arange(pages) // (split // page)
    holder = chunk % size if holders == "turns" else chunk * size // (chunk[-1] + 1)
    own = np.where(holder == rank, tables, -1).astype(np.int32)
    plan = DecodePlan(own, lengths, page_size=page, kv_split=split, comm=comm)
    kernels = Kernels(decode, "paged_attention")
    samples = []
    for _ in range(repeats + 3):
        slowest(comm, 0)
        kernels.seconds, started = 0.0, time.perf_counter()
        out = plan.attention(q, k_cache, v_cache)
        samples.append((slowest(comm, time.perf_counter() - started), slowest(comm, kernels.seconds)))
    step, inside = (statistics.median(x) for x in zip(*samples[3:], strict=True))
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        whole = blitz_attn.paged_attention(q, k_cache, v_cache, tables, lengths, kv_split=split)
        times.append(time.perf_counter() - started)
    same = not slowest(comm, out.tobytes() != whole.tobytes())
    report(comm, step=step, kernels=inside, whole=statistics.median(times), sent=int(plan.states.max()) * heads * 129 * 4, same=same)


def run_decode(options: argparse.Namespace) -> None:
    table = Table(DECODE_COLUMNS, sys.stdout)
    table.head(
        "A decoding step over a cache that ranks hold by tokens; one process of one thread beside it (Whole)",
        parameters(heads=options.heads, kv_heads=options.kv_heads, head_dim=128, dtype="float32", kv_split=1024),
    )
    for ranks in options.ranks:
        for holders in ("runs", "turns"):
            row = job(
                ranks, "decode", holders=holders,
                **{name: getattr(options, name) for name in ("batch", "tokens", "heads", "kv_heads", "repeats")},
            )[0]  # fmt: skip
            put(
                table, ranks, options.batch, options.tokens, holders, 1e6 * row["step"], 1e6 * row["kernels"],
                1e6 * (row["step"] - row["kernels"]), row["sent"] / 1e3, 1e6 * row["whole"], "yes" if row["same"] else "NO",
            )  # fmt: skip
    table.foot()


def worker(text: str) -> None:
    from mpi4py import MPI

    arguments = json.loads(text)
    {"prefill": work_prefill, "scaling": work_scaling, "decode": work_decode}[arguments.pop("what")](MPI.COMM_WORLD, **arguments)


# ---- The command --------------------------------------------------------------------------------------------------


@command
def main(argv: Sequence[str] | None = None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv[:1] == ["worker"]:
        worker(argv[1])
        return 0
    what = argv.pop(0) if argv and not argv[0].startswith("-") else "bytes"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    defaults = {
        "bytes": {"tokens": 262144, "heads": 8, "kv_heads": 2, "ranks": [4, 16, 64, 256, 1024]},
        "exposed": {"tokens": 8192, "heads": 32, "kv_heads": 8, "ranks": [2, 4]},
        "scaling": {"tokens": 8192, "heads": 8, "kv_heads": 2, "ranks": []},
        "decode": {"tokens": 65536, "heads": 32, "kv_heads": 8, "ranks": [1, 2, 4]},
    }
    if what not in defaults:
        parser.error(f"expected bytes, exposed, scaling or decode, got {what}")
    blocks = checked(int, lambda tokens: tokens > 0 and tokens % BLOCK == 0, f"a multiple of {BLOCK}")
    parser.add_argument("--tokens", type=blocks, help="tokens of the sequence, or of each request")
    parser.add_argument("--heads", type=positive)
    parser.add_argument("--kv-heads", type=positive)
    parser.add_argument("--ranks", type=positive, nargs="+")
    parser.add_argument("--dispatches", nargs="+", choices=DISPATCHES, default=list(DISPATCHES))
    parser.add_argument("--density", type=density, default=0.25, help="of the lists of exposed and scaling (%(default)s)")
    parser.add_argument("--rate", type=positive, default=600, help="Mbit/s of exposed (%(default)s)")
    parser.add_argument("--batch", type=positive, default=1, help="requests of decode (%(default)s)")
    parser.add_argument("--cores", type=positive, default=len(os.sched_getaffinity(0)), help="most cores of scaling (%(default)s)")
    parser.add_argument("--backward", action="store_true", help="gradients, in scaling")
    parser.add_argument("--repeats", type=positive, default=5, help="timed calls, of which the median counts (%(default)s)")
    parser.set_defaults(**defaults[what])
    options = add_save(parser).parse_args(argv)
    {"bytes": run_bytes, "exposed": run_exposed, "scaling": run_scaling, "decode": run_decode}[what](options)
    return 0


if __name__ == "__main__":
    sys.exit(main_with_save(main))
