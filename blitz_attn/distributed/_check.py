"""The report and the tests of ``python -m blitz_attn.distributed``: where ranks run, and whether their results are those of one process."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy import ndarray

from .. import _core
from .._sabi import build
from ..block_sparse import block_sparse_attention
from ..paged import paged_attention, paged_select_attention
from ..quest import select_blocks
from ._comm import Agreement, Alone, Place, everyone, has_threads, import_mpi, places, shared_cpus, spans_hosts
from .attention import context_parallel_attention, dispatch
from .decode import decode_context_parallel_attention
from .plan import ContextParallelPlan
from .selection import select_blocks_distributed

PAGE, SPLIT, TURN = 16, 64, 128
_MESSAGE = 1 << 24  # bytes


# ---- The report ---------------------------------------------------------------------------------------------------


def ranges_text(cpus: tuple[int, ...]) -> str:
    """CPU numbers as the kernel writes them: ``0-3,8``."""
    runs: list[list[int]] = []
    for cpu in cpus:
        if runs and runs[-1][1] == cpu - 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(f"{a}" if a == b else f"{a}-{b}" for a, b in runs) or "-"


def describe(ranks: list[Place]) -> list[str]:
    """The table of ranks, and warnings where ranks of a host share CPUs, or run more threads than they have CPUs."""
    rows = [("rank", "host", "pid", "CPUs", "threads", "level")]
    rows += [(str(r), p.host, str(p.pid), ranges_text(p.cpus), str(p.threads), p.isa) for r, p in enumerate(ranks)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(f"{cell:<{n}}" for cell, n in zip(row, widths, strict=True)).rstrip() for row in rows]
    overlaps = shared_cpus(ranks)
    for a, b, cpus in overlaps:
        lines.append(f"warning: ranks {a} and {b} on {ranks[b].host} may both use CPUs {ranges_text(cpus)}")
    if overlaps:
        lines.append(
            "  bind each rank to CPUs of its own (Open MPI: mpirun --map-by ppr:1:numa:PE=n, or slot:PE=n; MPICH: -bind-to core:n), or set "
            "BLITZ_ATTN_NUM_THREADS"
        )
    for host in dict.fromkeys(p.host for p in ranks):
        here = [p for p in ranks if p.host == host]
        threads, count = sum(p.threads for p in here), len({cpu for p in here for cpu in p.cpus})
        if threads > count > 0:
            lines.append(f"warning: {len(here)} ranks on {host} run {threads} threads on {count} CPUs")
    return lines


def library(comm: Any) -> list[str]:
    """Lines about MPI. Collective."""
    apart = spans_hosts(comm)
    if isinstance(comm, Alone):
        return ["MPI: none, one process"]
    mpi = import_mpi()
    names = {getattr(mpi, f"THREAD_{name.upper()}"): name for name in ("single", "funneled", "serialized", "multiple")}
    version = " ".join(mpi.Get_library_version().replace("\0", "").split())
    lines = [
        f"MPI: {version[:100]}",
        f"MPI standard {'.'.join(map(str, mpi.Get_version()))}, thread level {names.get(mpi.Query_thread(), mpi.Query_thread())}",
    ]
    if apart:
        waiting = "a thread waits for transfers" if has_threads() else "no thread can wait for transfers: MPI allows calls from one thread"
        lines.append(f"ranks span hosts: {waiting}")
    else:
        lines.append("all ranks run on one host: no thread waits for transfers")
    return lines


# ---- The tests ----------------------------------------------------------------------------------------------------


def same_bits(a: ndarray, b: ndarray) -> bool:
    """Whether two arrays are equal bit for bit."""
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


class _Cache:
    """A paged cache that all ranks make from the same seed, of which each rank keeps its own pages."""

    def __init__(self, comm: Any, lengths: list[int], kind: str, interleave: int | None) -> None:
        rng = np.random.default_rng(28)
        used = -(-np.array(lengths) // PAGE)
        self.lengths = lengths
        self.tables = np.full((len(lengths), used.max()), -1, np.int32)
        self.tables[np.arange(used.max()) < used[:, None]] = rng.permutation(used.sum())
        kinds = {"float16": np.float16, "float32": np.float32, "bfloat16": np.float32}
        self.q, self.k, self.v = (
            rng.standard_normal(shape).astype(kinds[kind]) for shape in ((len(lengths), 4, 64), *[(int(used.sum()), PAGE, 2, 64)] * 2)
        )
        if kind == "bfloat16":
            self.q, self.k, self.v = ((x.view(np.uint32) >> 16).astype(np.uint16) for x in (self.q, self.k, self.v))
        rank, size = comm.Get_rank(), comm.Get_size()
        page = np.arange(used.max())[None]
        chunks = -(-used // (SPLIT // PAGE))[:, None]
        holder = page // (interleave // PAGE) % size if interleave else page // (SPLIT // PAGE) * size // chunks
        mine = (self.tables >= 0) & (holder == rank)
        pages = self.tables[mine]
        self.own_k, self.own_v = self.k[pages], self.v[pages]
        number = np.full(len(self.k), -1, np.int32)
        number[pages] = np.arange(len(pages))
        rows = [number[row[keep]] for row, keep in zip(self.tables, mine, strict=True)]
        self.own_rows = np.zeros((len(lengths), max(map(len, rows), default=0)), np.int32)
        for to, row in zip(self.own_rows, rows, strict=True):
            to[: len(row)] = row
        self.own_tables = self.own_rows if interleave else np.where(mine, number[self.tables], -1).astype(np.int32)


class Counting:
    """A communicator that counts the bytes of the messages that it sends."""

    def __init__(self, comm: Any) -> None:
        self._comm, self.sent = comm, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)

    def Isend(self, message: Any, *arguments: Any) -> Any:  # noqa: N802 - MPI's name
        """Send, and count."""
        _, count, kind = message
        self.sent += count * kind.Get_size()
        return self._comm.Isend(message, *arguments)


def check_prefill(comm: Any) -> None:
    """Attention of a whole sequence is bit-identical to that of one process, and sends the bytes that its plan says."""
    tokens, rng = 1100, np.random.default_rng(28)
    lists = build.sliding_window(tokens, block_shape=(64, 64), window=(300, 0))
    q, k, v = (rng.standard_normal((1, heads, tokens, 64), dtype=np.float32) for heads in (4, 2, 2))
    for kind in ("float32", "bfloat16"):
        given = kind if kind == "bfloat16" else None
        queries, keys, values = ((x.view(np.uint32) >> 16).astype(np.uint16) if given else x for x in (q, k, v))
        shape: dict[str, Any] = {"block_shape": (64, 64), "causal": True}
        whole = block_sparse_attention(queries, keys, values, lists, return_lse=True, dtype=given, **shape)
        for name in ("cut", "items"):
            counting = Counting(comm)
            plan = ContextParallelPlan(
                lists, tokens, comm=counting, num_heads=4, num_kv_heads=2, head_dim=64, dispatch=name, dtype=kind, **shape
            )  # fmt: skip
            before = counting.sent
            shards = dispatch(queries, plan), dispatch(keys, plan, keys=True), dispatch(values, plan, keys=True)
            result = context_parallel_attention(shards[0], shards[1], shards[2], plan, comm_type="p2p", dtype=given)
            for part, a, b in zip(("out", "lse"), result, whole, strict=True):
                if not same_bits(np.asarray(a), np.ascontiguousarray(dispatch(b, plan, axis=2))):
                    raise AssertionError(f"{part} of {kind} with dispatch={name!r} differs from one process")
            expected, sent = int(plan.bytes[comm.Get_rank()].sum()), counting.sent - before
            if sent != expected:
                raise AssertionError(f"expected {expected} bytes to be sent with dispatch={name!r}, as the plan says, got {sent}")


def check_decode(comm: Any) -> None:
    """Decoding is bit-identical to that of one process, whichever rank holds which pages."""
    for kind in ("float32", "float16", "bfloat16"):
        for interleave in (None, TURN):
            c = _Cache(comm, [1500, 17, 777], kind, interleave)
            options: dict[str, Any] = {"dtype": "bfloat16" if kind == "bfloat16" else None, "return_lse": True, "kv_split": SPLIT}
            whole = paged_attention(c.q, c.k, c.v, c.tables, c.lengths, **options)
            shared = decode_context_parallel_attention(
                c.q, c.own_k, c.own_v, c.own_tables, c.lengths, comm=comm, interleave=interleave, **options
            )
            for name, a, b in zip(("out", "lse"), shared, whole, strict=True):
                if not same_bits(a, b):
                    raise AssertionError(f"{name} of {kind} with interleave={interleave} differs from one process")


def check_selection(comm: Any) -> None:
    """The choice of blocks, and attention over these blocks, are the same as in one process."""
    c = _Cache(comm, [1500, 17, 777], "float32", TURN)
    whole = select_blocks(c.q, c.k, c.tables, c.lengths, 8, method="max")
    shared = select_blocks_distributed(c.q, c.own_k, c.own_rows, c.lengths, 8, method="max", interleave=TURN, comm=comm)
    for name, a, b in zip(("selected", "counts"), shared, whole, strict=True):
        if not same_bits(a, b):
            raise AssertionError(f"{name} differs from one process")
    out = decode_context_parallel_attention(
        c.q, c.own_k, c.own_v, c.own_tables, c.lengths, comm=comm, interleave=TURN, kv_split=SPLIT, selected=shared[0]
    )
    if not same_bits(out, paged_select_attention(c.q, c.k, c.v, c.tables, c.lengths, whole[0], kv_split=SPLIT)):
        raise AssertionError("attention over the selected blocks differs from one process")


CHECKS: dict[str, Callable[[Any], None]] = {
    "prefill, bits and bytes": check_prefill,
    "decoding, bits": check_decode,
    "selection, choice and bits": check_selection,
}


def outcome(comm: Any, check: Callable[[Any], None]) -> str:
    """An empty string if a check passes on all ranks, else the error of the lowest rank on which it fails. Collective."""
    try:
        check(comm)
        text = ""
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
    texts = everyone(comm, text)
    return next((f"{text} (on rank {rank})" for rank, text in enumerate(texts) if text), "")


# ---- Speed --------------------------------------------------------------------------------------------------------


def bandwidth(comm: Any) -> list[str]:
    """Lines about how quickly bytes go from rank to rank. Collective."""
    rank, size = comm.Get_rank(), comm.Get_size()
    if size == 1:
        return []
    small, all_small = np.zeros(4, np.int64), np.zeros((size, 4), np.int64)
    times = []
    for _ in range(200):
        started = time.perf_counter()
        comm.Allgather(small, all_small)
        times.append(time.perf_counter() - started)
    sent, received = np.ones(_MESSAGE, np.uint8), np.zeros(_MESSAGE, np.uint8)
    rates = []
    for repeat in range(4):
        comm.Allgather(small, all_small)
        started = time.perf_counter()
        requests = [comm.Irecv(received, (rank - 1) % size, repeat), comm.Isend(sent, (rank + 1) % size, repeat)]
        type(requests[0]).Waitall(requests)
        rates.append(_MESSAGE / (time.perf_counter() - started))
    medians, best = (everyone(comm, float(x)) for x in (np.median(times), max(rates)))
    return [
        f"agreement of all ranks (Allgather of 32 bytes): median {max(medians) * 1e6:.0f} us on the slowest rank",
        f"{_MESSAGE >> 20} MiB from each rank to the next, all at once: {min(best) / 1e9:.2f} GB/s on the slowest rank, "
        f"{max(best) / 1e9:.2f} on the quickest",
    ]


# ---- The report ---------------------------------------------------------------------------------------------------


def run(comm: Any, check: bool) -> int:
    """Print the report on rank 0, and with `check` also test; returns the exit status, the same on all ranks."""

    def say(lines: list[str]) -> None:
        if comm.Get_rank() == 0:
            print("\n".join(lines), flush=True)

    ranks = f"{comm.Get_size()} rank{'s' if comm.Get_size() > 1 else ''}"
    say([f"blitz_attn {_core.__version__} on {ranks}", *library(comm), *describe(places(comm))])
    try:
        with Agreement(comm, "check"):
            pass
    except ValueError as error:
        say([f"refused: {error}"])
        return 1
    if not check:
        return 0
    failed = 0
    for name, test in CHECKS.items():
        text = outcome(comm, test)
        failed += bool(text)
        say([f"{name}: {text or 'as one process'}"])
    say(bandwidth(comm))
    say(["all checks passed" if not failed else f"{failed} of {len(CHECKS)} checks failed"])
    sys.stdout.flush()
    return int(failed > 0)
