#!/usr/bin/env python3
"""What threads gain where work is uneven, small or disturbed; and what a call costs that has next to nothing to do.

    python benchmark/scheduling.py                          # some three minutes
    python benchmark/scheduling.py --dtypes bfloat16 --no-busy

A row of the first table is one call with one thread and with several, in turns: dense and causal as measures, then lists of which one
head, or one row of blocks, holds most of the work, one long sequence among short ones, small problems, gradients, and decode steps of one
request, which memory or L3 may bind before the threads do. `Limit` is how many CPUs there are for the threads: all of them, or, in rows
marked `busy`, what a process leaves that runs on one of them meanwhile (by its CPU time; a thread of ours is taken off its CPU again and
again). `Share_of_limit` is the speed-up over one thread, divided by that. `Same_bits`: both gave the same.

A row of the second table is one small call from Python to its return; NumPy's matrix product of as many tokens stands beside them as a
measure of what any call costs.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

import _bench  # noqa: F401  (finds the library of this checkout)
import blitz_attn
from _bench import Column, Contender, Progress, Table, command, from_zero, in_turns, isa_level, natural, parameters, positive
from benchmark import DTYPES
from blitz_attn import sabi, testing
from operands import bits_options, draw_decode
from result_files import add_save, main_with_save

COLUMNS = (
    Column("dtype", 9),
    Column("call", 34),
    Column("CPUs", 5),
    Column("threads", 7),
    Column("Same_bits", 9),
    Column("One_[usec]", 11, ".0f"),
    Column("Threads_[usec]", 14, ".0f"),
    Column("Over_1_thread", 13, ".2f"),
    Column("Limit", 6, ".2f"),
    Column("Share_of_limit", 14, ".3f"),
)
SMALL_COLUMNS = (Column("dtype", 9), Column("call", 34), Column("tokens", 6), Column("Our_[usec]", 11, ".2f"))
BLOCK = (128, 128)
LEFT = 0.05  # of the blocks of rows that are sparse
HEAD_DIM = 128
SEED = 1234
LEAST_SECONDS = 0.05  # of calls that tell what another process leaves: the system counts its CPU time in steps of milliseconds

Call = Callable[[], Any]


@dataclass(frozen=True)
class Case:
    """A call for a number of threads, and the arrays that it fills."""

    name: str
    call: Callable[[int], Call]
    filled: tuple[np.ndarray, ...]
    work: float  # for the progress line: pairs


# ---- Uneven work -----------------------------------------------------------------------------------------------------


def masks(heads: int, blocks: int) -> dict[str, np.ndarray | None]:
    """Block masks (H, R, C) by what is uneven about them. Every row keeps its first block."""
    sparse = np.random.default_rng(SEED).random((heads, blocks, blocks)) < LEFT
    sparse[..., 0] = True
    one_head, one_row, last_row = sparse.copy(), sparse.copy(), sparse.copy()
    one_head[0] = True
    one_row[:, blocks // 2] = True
    last_row[-1, -1] = True
    return {
        "dense": None,
        "95 % sparse": sparse,
        "one head dense, others 95 % sparse": one_head,
        "a row a head with all blocks": one_row,
        "the last row with all blocks": last_row,
    }


def forward(name: str, dtype: str, heads: int, tokens: int, mask: np.ndarray | None = None, causal: bool = False) -> Case:
    """The forward pass."""
    q, k, v = testing.make_qkv(1, heads, heads, tokens, tokens, HEAD_DIM, dtype=dtype, seed=SEED)
    out = np.zeros_like(q)
    options: dict[str, Any] = {"block_shape": BLOCK, "causal": causal, "out": out, **bits_options(q)}
    lists = None if mask is None else sabi.from_block_mask(mask[None])
    share = 1.0 if mask is None else float(mask.mean())
    return Case(
        name,
        lambda threads: lambda: blitz_attn.block_sparse_attention(q, k, v, lists, num_threads=threads, **options),
        (out,),
        heads * tokens**2 * share * (0.5 if causal else 1),
    )


def sequences(dtype: str, heads: int, longest: int) -> Case:
    """One long sequence among fifteen short ones, causal."""
    ends = np.cumsum([0] + [longest // 32] * 15 + [longest]).astype(np.int64)
    shape = (1, heads, heads, int(ends[-1]), int(ends[-1]), HEAD_DIM)
    q, k, v = (np.ascontiguousarray(x[0].swapaxes(0, 1)) for x in testing.make_qkv(*shape, dtype=dtype, seed=SEED))
    out = np.zeros_like(q)
    options: dict[str, Any] = {"layout": "TND", "cu_seqlens_q": ends, "cu_seqlens_kv": ends, "causal": True, "out": out, **bits_options(q)}
    return Case(
        "one long sequence among 15 short",
        lambda threads: lambda: blitz_attn.block_sparse_attention(q, k, v, num_threads=threads, **options),
        (out,),
        heads * longest**2 / 2,
    )


def backward(name: str, dtype: str, heads: int, tokens: int, mask: np.ndarray) -> Case:
    """Gradients."""
    shape = (1, heads, heads, tokens, tokens, HEAD_DIM)
    q, k, v = testing.make_qkv(*shape, dtype=dtype, seed=SEED)
    dout = testing.make_qkv(*shape, dtype=dtype, seed=SEED + 1)[0]
    lists = sabi.from_block_mask(mask[None])
    options: dict[str, Any] = {"block_shape": BLOCK, **bits_options(q)}
    out, lse = blitz_attn.block_sparse_attention(q, k, v, lists, return_lse=True, **options)
    grads = tuple(np.zeros_like(x) for x in (q, k, v))
    return Case(
        "gradients, " + name,
        lambda threads: lambda: blitz_attn.block_sparse_attention_backward(
            dout, q, k, v, out, lse, lists, grads=grads, num_threads=threads, **options
        ),
        grads,
        2.5 * heads * tokens**2 * float(mask.mean()),
    )


def decode(dtype: str, kv_heads: int, tokens: int) -> Case:
    """A decode step of one request, four query heads a KV head; its pages lie in cache if they fit."""
    step = draw_decode([tokens], 4 * kv_heads, kv_heads, HEAD_DIM, BLOCK[1], dtype, SEED)
    return Case(f"decode, one request of {tokens}", step.call, (step.out,), 4.0 * kv_heads * tokens)


def uneven(dtype: str, heads: int, tokens: int) -> list[Case]:
    """The rows of the first table."""
    by_name = masks(heads, -(-tokens // BLOCK[0]))
    cases = [forward(name, dtype, heads, tokens, mask) for name, mask in by_name.items()]
    cases.insert(1, forward("causal", dtype, heads, tokens, causal=True))
    cases.append(sequences(dtype, heads, tokens))
    cases += [forward(f"dense, a head, {small} tokens", dtype, 1, small) for small in (256, 384, 512, 1024)]
    name, mask = next((name, mask) for name, mask in by_name.items() if mask is not None and name.startswith("one head"))
    cases.append(backward(name, dtype, heads, tokens, mask))
    return cases + [decode(dtype, heads, length) for length in (1024, 2048, 4096, 8192)]


@contextlib.contextmanager
def other_process(wanted: bool) -> Iterator[Callable[[], float]]:
    """A process that keeps the last CPU busy; gives a function for the CPU seconds that it has had. None runs where it is not wanted."""
    if not wanted:
        yield lambda: 0.0
        return
    cpu = max(os.sched_getaffinity(0))
    program = f"import os; os.sched_setaffinity(0, {{{cpu}}})\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-c", program]) as process:
        clock = (~process.pid << 3) | 2  # of another process: CPUCLOCK_SCHED
        try:
            yield lambda: time.clock_gettime(clock)
        finally:
            process.kill()


def measured(case: Case, threads: int, busy: bool, args: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    """A row of the first table."""
    kept: list[bytes] = []
    taken = other = 0.0  # summed over all calls
    with other_process(busy) as had:

        def timed(call: Call) -> Call:
            def run() -> None:
                nonlocal taken, other
                begin, before = time.perf_counter(), had()
                call()
                other += had() - before
                taken += time.perf_counter() - begin

            return run

        def keep() -> None:
            kept.append(b"".join(x.tobytes() for x in case.filled))
            for x in case.filled:
                x.fill(0)

        contenders = [
            Contender(case.name, case.call(1), case.work, settle=args.settle),
            Contender(case.name, timed(case.call(threads)), case.work / threads, before_last=keep, settle=args.settle),
        ]
        one, several = (timing.median for _, timing in in_turns(contenders, args.repeats, args.warmup, progress))
    keep()
    limit = threads - other / taken if not busy or taken > LEAST_SECONDS else None
    return {
        "call": case.name,
        "CPUs": "busy" if busy else "idle",
        "threads": threads,
        "Same_bits": "yes" if kept[0] == kept[1] else "no",
        "One_[usec]": one * 1e6,
        "Threads_[usec]": several * 1e6,
        "Over_1_thread": one / several,
        "Limit": limit,
        "Share_of_limit": one / several / limit if limit else None,
    }


# ---- Small calls -----------------------------------------------------------------------------------------------------


def small(dtype: str, tokens: int) -> Iterator[tuple[str, int, Call]]:
    """Name, tokens and call of rows of the second table."""
    q, k, v = testing.make_qkv(1, 1, 1, tokens, tokens, 64, dtype=dtype, seed=SEED)
    bits = bits_options(q)
    out, lse = np.zeros_like(q), np.zeros(q.shape[:3], np.float32)
    lists = sabi.from_block_mask(np.ones((1, 1, 1, 1), bool))
    step = draw_decode([tokens], 1, 1, 64, 16, dtype, SEED)
    attend = blitz_attn.block_sparse_attention
    if dtype == "float32":
        left, right, product = q[0, 0], np.ascontiguousarray(k[0, 0].T), np.zeros((tokens, tokens), q.dtype)
        yield "numpy.matmul", tokens, lambda: np.matmul(left, right, out=product)
    yield "block_sparse_attention, dense", tokens, lambda: attend(q, k, v, out=out, **bits)
    yield "block_sparse_attention, a list", tokens, lambda: attend(q, k, v, lists, block_shape=BLOCK, out=out, **bits)
    yield "paged_attention", tokens, step.call(1, planned=False)
    yield "PagedPlan.attention", tokens, step.call(1)
    yield "merge_states", tokens, lambda: blitz_attn.merge_states(q, lse, q, lse, **bits)


# ---- The run ---------------------------------------------------------------------------------------------------------


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    result.add_argument("--seq", "-S", type=positive, default=8192, help="tokens (%(default)s)")
    result.add_argument("--heads", "-H", type=positive, default=8, help="heads (%(default)s)")
    result.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["float32", "bfloat16"], help="dtypes (float32 bfloat16)")
    result.add_argument("--threads", type=positive, help="of the several (the library's choice)")
    result.add_argument("--isa", type=isa_level, help="highest instruction set to use, such as avx2 (the CPU's best)")
    result.add_argument("--busy", action=argparse.BooleanOptionalAction, default=True, help="also beside a busy process (yes; Linux)")
    result.add_argument("--repeats", type=positive, default=5, help="timed turns, of which the median counts (%(default)s)")
    result.add_argument("--warmup", type=natural, default=1, help="turns before them (%(default)s)")
    result.add_argument("--settle", type=from_zero, default=0.01, help="seconds of calls ahead of a sample of a short one (%(default)s)")
    return add_save(result)


def uneven_table(threads: int, states: tuple[bool, ...], args: argparse.Namespace, progress: Progress) -> None:
    table = Table(COLUMNS, sys.stdout, progress)
    for index, dtype in enumerate(args.dtypes):
        cases = uneven(dtype, args.heads, args.seq)
        if not index:
            progress.total = len(args.dtypes) * len(states) * (args.repeats + args.warmup) * 1.5 * sum(case.work for case in cases)
            progress.restart()
        for case in cases:
            for busy in states:
                table.row({"dtype": dtype, **measured(case, threads, busy, args, progress)})
    table.foot()


def small_table(args: argparse.Namespace, progress: Progress) -> None:
    table = Table(SMALL_COLUMNS, sys.stdout, progress)
    table.names()
    for dtype in args.dtypes:
        rows = [row for tokens in (1, 16, 64) for row in small(dtype, tokens)]
        contenders = [Contender(name, call, 0.0, settle=args.settle) for name, _, call in rows]
        for row, timing in in_turns(contenders, args.repeats, max(2, args.warmup), progress):
            table.row({"dtype": dtype, "call": rows[row][0], "tokens": rows[row][1], "Our_[usec]": timing.median * 1e6})
    table.foot()


@command
def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    threads = args.threads or blitz_attn.get_num_threads()
    states = (False, True) if args.busy and sys.platform == "linux" else (False,)
    progress = Progress(1.0)
    with blitz_attn.isa(args.isa) as isa:
        Table(COLUMNS, sys.stdout, progress).head(parameters(ISA=isa, S=args.seq, H=args.heads, D=HEAD_DIM, SEED=SEED))
        uneven_table(threads, states, args, progress)
        small_table(args, progress)
    progress.clear()
    return 0


if __name__ == "__main__":
    sys.exit(main_with_save(main))
