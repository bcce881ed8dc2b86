#!/usr/bin/env python3
"""Paged decode attention against what the machine allows and against other libraries: a table on stdout, progress on stderr.

    python benchmark/decode.py | tee decode.log | python benchmark/plot.py  # everything; says first how many cells
    python benchmark/decode.py --quick                                      # a minute or so
    python benchmark/decode.py --cells DRAM --dtypes bfloat16 --groups 4 --batches 1
    python benchmark/decode.py --shapes 4x32x8x4096 --dtypes float16        # B x H x Hkv x S of one's own

Cells: `L2`, `L3` and `DRAM` have as many tokens as make K and V sit in that level (8 KV heads; 1 for L2); `ragged` is one long request
among 15 short ones; the others are upstream's 13 configurations. Pages lie in random order. The limit of a cell is the time to
read its K and V once at the read bandwidth of memory of that size, or the time of its arithmetic (every query head of a group needs
2 flop an element of K and of V) at F, whichever is longer. Both are measured with the same threads right before each of our calls, and
the share is the median over the turns, as is the ratio to each peer: the bandwidth of a machine that others use too changes within
seconds. README.md beside this file explains the columns.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import _bench
import blitz_attn
import check
import roofline
from _bench import Column, Contender, Progress, Table, command, in_turns, isa_level, natural, positive, writable
from blitz_attn import _core, testing
from operands import ITEM_BYTES, LAYOUTS, Decode, draw_decode, memory_available, query_dtype, token_bytes
from other_libraries import DECODE_PEERS, Pieces, Step, UnavailableError, pause
from result_files import Records, add_save, main_with_save

LEVELS = ("L2", "L3", "DRAM")
KV_HEADS = {"L2": 1, "L3": 8, "DRAM": 8}  # 8 heads of 128 would leave L2 a handful of tokens
RAGGED_LENGTHS = (512,) * 7 + (32768,) + (512,) * 8
HEAD_DIM = 128
# Upstream's: name, B, H, H_kv, S; D = 128, pages of 128 tokens.
UPSTREAM_CELLS = (
    ("Qwen3-0.6B", 1, 16, 8, 2048),
    ("Qwen3-1.7B", 1, 16, 8, 4096),
    ("Qwen3-4B", 1, 32, 8, 2048),
    ("Qwen3-8B", 1, 32, 8, 4096),
    ("Qwen3-8B", 1, 32, 8, 8192),
    ("Qwen3-14B", 1, 40, 8, 2048),
    ("Qwen3-32B", 1, 64, 8, 2048),
    ("MHA", 1, 32, 32, 2048),
    ("Qwen3-8B", 4, 32, 8, 2048),
    ("Qwen3-8B", 8, 32, 8, 2048),
    ("Qwen3-8B", 16, 32, 8, 2048),
    ("Qwen3-8B", 32, 32, 8, 2048),
    ("Qwen3-8B", 64, 32, 8, 2048),
)
CELLS = ("upstream", *LEVELS, "ragged")

PROBE_SECONDS = 0.03

COLUMNS = (
    Column("cell", 10),
    Column("dtype", 11),
    Column("B", 3),
    Column("H", 3),
    Column("H_kv", 4),
    Column("S", 7),
    Column("D", 4),
    Column("page", 4),
    Column("threads", 7),
    Column("KV_[MiB]", 9, ".2f"),
    Column("Outputs_equal", 13),
    Column("Our_[usec]", 11, ".1f"),
    Column("GB/s", 7, ".1f"),
    Column("GFLOP/s", 8, ".1f"),
    Column("R_[GB/s]", 8, ".1f"),
    Column("F_[GFLOP/s]", 11, ".1f"),
    Column("Bound_by", 8),
    Column("Share_of_limit", 14, ".3f"),
    Column("Over_1_thread", 13, ".2f"),
    *(Column(f"{name}_[usec]", len(name) + 8, ".1f") for name in DECODE_PEERS),
    Column("Best_peer/ours", 14, ".2f"),
)


@dataclass(frozen=True)
class Cell:
    """What a row measures, but for the threads."""

    name: str
    dtype: str  # of the cache
    lengths: tuple[int, ...]
    heads: int
    kv_heads: int
    head_dim: int
    page: int

    @property
    def kv_bytes(self) -> int:
        return sum(self.lengths) * token_bytes(self.dtype, self.kv_heads, self.head_dim)

    def draw(self, seed: int, layout: str) -> Decode:
        return draw_decode(self.lengths, self.heads, self.kv_heads, self.head_dim, self.page, self.dtype, seed, layout)

    def values(self) -> dict[str, Any]:
        return {
            "cell": self.name,
            "dtype": self.dtype,
            "B": len(self.lengths),
            "H": self.heads,
            "H_kv": self.kv_heads,
            "S": max(self.lengths),
            "D": self.head_dim,
            "page": self.page,
            "KV_[MiB]": self.kv_bytes / 2**20,
        }


def shape(text: str) -> tuple[int, int, int, int]:
    sizes = text.lower().split("x")
    if len(sizes) != 4 or not all(size.isdigit() and int(size) > 0 for size in sizes) or int(sizes[1]) % int(sizes[2]):
        raise argparse.ArgumentTypeError(f"expected B x H x Hkv x S such as 4x32x8x2048, H a multiple of Hkv, got {text!r}")
    return tuple(map(int, sizes))


def cells_of(args: argparse.Namespace) -> Iterator[Cell]:
    """The cells that were asked for. Those that differ in their queries only follow each other: they share a cache."""
    sizes = roofline.read_sizes(1)
    upstream = [("own", *one) for one in args.shapes or ()] or (UPSTREAM_CELLS if "upstream" in args.cells else ())
    for name, batch, heads, kv_heads, tokens in upstream:
        for dtype in args.dtypes or ("float16",):  # upstream's dtype
            yield Cell(name, dtype, (tokens,) * batch, heads, kv_heads, args.head_dim, args.page)
    if args.shapes:
        return
    for level in args.cells:
        for dtype in args.dtypes or tuple(ITEM_BYTES):
            if level == "ragged":
                for group in args.groups:
                    yield Cell(level, dtype, RAGGED_LENGTHS, 8 * group, 8, args.head_dim, args.page)
            if level not in sizes:
                continue
            kv_heads = KV_HEADS[level]
            for batch in args.batches:
                tokens = max(1, sizes[level] // (batch * token_bytes(dtype, kv_heads, args.head_dim)))
                for group in args.groups:
                    yield Cell(level, dtype, (tokens,) * batch, kv_heads * group, kv_heads, args.head_dim, args.page)


def peer_calls(step: Decode, args: argparse.Namespace, notes: dict[str, None]) -> dict[tuple[str, int], Step]:
    """What other libraries need to do the same, by name and threads; only those whose result equals float64's."""
    calls: dict[tuple[str, int], Step] = {}
    try:
        pieces = Pieces(step)
    except UnavailableError:
        return calls
    for name in args.peers:
        for threads in args.threads:
            try:
                run, fetch = DECODE_PEERS[name](pieces, threads)
            except UnavailableError as reason:
                notes[f"{name}: {reason}"] = None
                break
            run()
            if not step.is_equal(testing.round_to(fetch(), query_dtype(step.cache.dtype))):
                notes[f"{name}, {step.cache.dtype}: its result is not equal to float64's within the tolerance, so it is not timed"] = None
                break
            calls[name, threads] = run
    return calls


def measured(
    cell: Cell, args: argparse.Namespace, progress: Progress, notes: dict[str, None]
) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Measure a cell with each number of threads; yields the table's values and what else a record keeps."""
    step = cell.draw(args.seed, args.layout)
    isa, largest_cache = _core.isa_active(), max(roofline.cache_sizes().values())
    reads: dict[int, list[float]] = {threads: [] for threads in args.threads}
    peaks: dict[int, list[float]] = {threads: [] for threads in args.threads}

    memory = step.cache.memory  # to fill as much anew in each turn would keep the system busy when others are timed
    beyond = step.kv_bytes > 2 * largest_cache
    elsewhere = np.zeros(2 * largest_cache if beyond else 0, np.uint8)

    def probe(threads: int) -> None:
        reads[threads].append(float(_core.probe_read(isa, memory, PROBE_SECONDS, threads)))
        peaks[threads].append(roofline.peak_flops(threads, seconds=PROBE_SECONDS))
        forget()

    def forget() -> None:
        """Nothing of K and V that the one before has read is to be left in L3, for us or for peers."""
        if beyond:
            _core.probe_read(isa, elsewhere, None, max(args.threads))

    others = peer_calls(step, args, notes)
    contenders: list[tuple[tuple[str, int], Contender]] = []
    for threads in args.threads:
        for key, run in others.items():
            if key[1] == threads:
                contenders.append((("forget", threads), Contender("forget", forget, 0.0)))
                contenders.append((key, Contender(key[0], run, 0.0)))
                contenders.append((("pause", threads), pause()))
        contenders.append((("limit", threads), Contender("limit", lambda threads=threads: probe(threads), 0.0)))
        own = Contender("own", step.call(threads, planned=args.plan), 0.0, before_last=lambda: check.poison(step.out))
        contenders.append((("own", threads), own))
    label = f"{cell.name} {cell.dtype} {len(cell.lengths)}x{cell.heads}x{cell.kv_heads}x{max(cell.lengths)}"
    for _, contender in contenders:
        contender.work, contender.label = 1 / (len(contenders) * (args.repeats + args.warmup)), label
    times: dict[tuple[str, int], Any] = {}
    equal: dict[int, bool] = {}
    for index, timing in in_turns([contender for _, contender in contenders], args.repeats, args.warmup, progress):
        key = contenders[index][0]
        times[key] = timing
        if key[0] == "own":
            equal[key[1]] = step.is_equal(step.out)
    for threads in args.threads:
        seconds = times["own", threads].median
        turns = list(zip(reads[threads][args.warmup :], peaks[threads][args.warmup :], times["own", threads].samples, strict=True))
        read, peak = (statistics.median(turn[i] for turn in turns) for i in (0, 1))
        limits = {"read": step.kv_bytes / (read * 1e9), "flops": step.flops / (peak * 1e9)}
        shares = [max(step.kv_bytes / read, step.flops / peak) / 1e9 / taken for read, peak, taken in turns]
        by_peer = {name: times[name, threads] for name in args.peers if (name, threads) in times}
        ratios = [statistics.median(np.divide(timing.samples, times["own", threads].samples)) for timing in by_peer.values()]
        yield cell.values() | {
            "threads": threads,
            "Outputs_equal": "yes" if equal[threads] else "no",
            "Our_[usec]": seconds * 1e6,
            "GB/s": step.kv_bytes / seconds / 1e9,
            "GFLOP/s": step.flops / seconds / 1e9,
            "R_[GB/s]": read,
            "F_[GFLOP/s]": peak,
            "Bound_by": max(limits, key=lambda name: limits[name]),
            "Share_of_limit": statistics.median(shares),
            "Over_1_thread": times["own", 1].median / seconds if threads != 1 and 1 in args.threads else None,
            **{f"{name}_[usec]": by_peer[name].median * 1e6 if name in by_peer else None for name in DECODE_PEERS},
            "Best_peer/ours": min(ratios, default=None),
        }, {"samples_s": {f"{name}_{n}": timing.samples for (name, n), timing in times.items() if n == threads}}


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = result.add_argument_group("what to run")
    what.add_argument("--quick", action="store_true", help="3 dtypes, groups 1 and 4, batch 1, 2 repeats, not upstream's cells")
    what.add_argument("--cells", nargs="+", choices=CELLS, help="kinds of cells (all)")
    what.add_argument("--shapes", type=shape, nargs="+", metavar="BxHxHKVxS", help="these problems instead")
    what.add_argument("--dtypes", nargs="+", choices=tuple(ITEM_BYTES), help="of the caches (all; upstream's cells: float16)")
    what.add_argument("--groups", type=positive, nargs="+", help="query heads a KV head (1 4 8)")
    what.add_argument("--batches", type=positive, nargs="+", help="requests (1 16)")
    what.add_argument("--head-dim", type=positive, default=HEAD_DIM, help="head dimension (%(default)s)")
    what.add_argument("--page", type=positive, default=128, help="tokens a page (%(default)s)")
    what.add_argument(
        "--layout", choices=LAYOUTS, default="NHD", help="in a page: a token's heads together, or a head's tokens (%(default)s)"
    )
    every = list(DECODE_PEERS)
    what.add_argument("--peers", nargs="*", choices=every, default=every, help="libraries to compare with (all that are installed)")
    what.add_argument("--seed", type=natural, default=1234, help="of the operands (%(default)s)")
    timing = result.add_argument_group("timing")
    timing.add_argument("--threads", type=positive, nargs="+", help="numbers of threads (1, and what the library uses)")
    timing.add_argument("--isa", type=isa_level, help="highest instruction set to use, such as avx2 (the CPU's best)")
    timing.add_argument("--repeats", type=positive, help="timed turns, of which the median counts (5)")
    timing.add_argument("--warmup", type=positive, default=1, help="turns before them (%(default)s)")
    yes_or_no = argparse.BooleanOptionalAction
    timing.add_argument("--plan", action=yes_or_no, default=True, help="tables are looked at once, not in every call (yes)")
    outputs = result.add_argument_group("outputs")
    outputs.add_argument("--csv", type=writable, metavar="FILE", help="also write the rows as CSV")
    outputs.add_argument("--json", type=writable, metavar="FILE", help="the same as JSON, with every timing")
    return add_save(result)


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    args = parser().parse_args(argv)
    if args.quick:
        args.dtypes = args.dtypes or ["float32", "bfloat16", "int8"]
        args.cells = args.cells or [*LEVELS, "ragged"]
    args.cells = args.cells or list(CELLS)
    args.groups = args.groups or ([1, 4] if args.quick else [1, 4, 8])
    args.batches = args.batches or ([1] if args.quick else [1, 16])
    args.repeats = args.repeats or (2 if args.quick else 5)
    return args


@command
def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    if args.isa:
        blitz_attn.isa(args.isa)
    args.threads = args.threads or sorted({1, blitz_attn.get_num_threads()})
    cells = list(cells_of(args))
    progress = Progress(len(cells))
    table = Table(COLUMNS, sys.stdout, progress)
    records = Records(args.csv, args.json, {"cpu": _core.cpu_model(), "isa": _core.isa_active(), "options": vars(args)})
    progress.note(f"{len(cells)} cells, each with {' and '.join(map(str, args.threads))} threads")
    options = _bench.parameters(
        THREADS=args.threads, ISA=_core.isa_active(), LAYOUT=args.layout, PLAN=args.plan, REPEATS=args.repeats, SEED=args.seed
    )
    table.head(options, _core.cpu_model())
    notes: dict[str, None] = {}
    wrong = 0
    try:
        for cell in cells:
            if cell.kv_bytes * (3 if args.peers else 2) > memory_available():
                progress.note(f"{cell.name} {cell.dtype}: left out, it needs more memory than there is")
                progress.add(1.0)
                continue
            for values, more in measured(cell, args, progress, notes):
                table.row(values)
                records.add(values | more)
                wrong += values["Outputs_equal"] != "yes"
        table.foot()
    finally:
        records.close()
    for note in notes:
        progress.note(note)
    if wrong:
        progress.note(f"decode.py: {wrong} rows with wrong outputs")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main_with_save(main))
