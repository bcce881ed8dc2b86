#!/usr/bin/env python3
"""Paged decode attention against the machine's limits and against other libraries: a table on stdout, progress on stderr.

    python benchmark/decode.py | tee decode.log | python benchmark/plot.py  # everything; first prints the number of cells
    python benchmark/decode.py --quick                                      # a minute or so
    python benchmark/decode.py --cells DRAM --dtypes bfloat16 --groups 4 --batches 1
    python benchmark/decode.py --shapes 4x32x8x4096 --dtypes float16        # your own B x H x Hkv x S

Cells: `L2`, `L3` and `DRAM` have so many tokens that K and V lie in that level (8 KV heads; 1 for L2); `ragged` is one long request among
15 short ones; the others are upstream's 13 configurations. Pages are in random order. The limit of a cell is the time to read its K and V
once or the time of its arithmetic, whichever is longer. The rates of reading and of arithmetic are measured right before each of our calls,
and the share is the median over the turns, because the bandwidth of a shared machine changes within seconds. README.md explains the
columns.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

import _bench  # noqa: F401  (finds the library of this checkout)
import machine
from _bench import Contender, Report, checked, columns, command, in_turns, parameters, parser_of, positive, sizes, yes
from blitz_attn import _core, testing
from operations import CACHE_DTYPES, CELL_BYTES, ITEM_BYTES, Decode, draw_decode, memory_available, poison, query_dtype, token_bytes
from other_libraries import DECODE_PEERS, Pieces, Step, UnavailableError, pause

LEVELS = ("L2", "L3", "DRAM")
KV_HEADS = {"L2": 1, "L3": 8, "DRAM": 8}  # with 8 heads of 128 dims, only a handful of tokens would fit L2
RAGGED_LENGTHS = (512,) * 7 + (32768,) + (512,) * 8
HEAD_DIM = 128
UPSTREAM_CELLS = (  # name, and B x H x Hkv x S; D = 128, pages of 128 tokens
    "Qwen3-0.6B 1x16x8x2048", "Qwen3-1.7B 1x16x8x4096", "Qwen3-4B 1x32x8x2048", "Qwen3-8B 1x32x8x4096", "Qwen3-8B 1x32x8x8192",
    "Qwen3-14B 1x40x8x2048", "Qwen3-32B 1x64x8x2048", "MHA 1x32x32x2048",
    *(f"Qwen3-8B {batch}x32x8x2048" for batch in (4, 8, 16, 32, 64)),
)  # fmt: skip
CELLS = ("upstream", *LEVELS, "ragged")

PROBE_SECONDS = 0.03

COLUMNS = columns(
    "cell:10 dtype:11 B:3 H:3 H_kv:4 S:7 D:4 page:4 threads:7 KV_[MiB]:9.2f Outputs_equal:13 Our_[usec]:11.1f GB/s:7.1f GFLOP/s:8.1f "
    "R_[GB/s]:8.1f F_[GFLOP/s]:11.1f Bound_by:8 Share_of_limit:14.3f Over_1_thread:13.2f "
    "torch_[usec]:13.1f onnxruntime_[usec]:19.1f openvino_[usec]:16.1f Best_peer/ours:14.2f"
)


@dataclass(frozen=True)
class Cell:
    """The problem of a row, without its number of threads."""

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

    def values(self) -> dict[str, Any]:
        cells = (self.name, self.dtype, len(self.lengths), self.heads, self.kv_heads, max(self.lengths), self.head_dim, self.page)
        names = ("cell", "dtype", "B", "H", "H_kv", "S", "D", "page")
        return dict(zip(names, cells, strict=True)) | {"KV_[MiB]": self.kv_bytes / 2**20}


shape = checked(
    lambda text: sizes(text, 4), lambda found: found[1] % found[2] == 0, "B x H x Hkv x S such as 4x32x8x2048, H a multiple of Hkv"
)


def cells_of(args: argparse.Namespace) -> Iterator[Cell]:
    """The cells that were asked for. Cells that differ only in their queries are next to each other, because they share a cache."""
    per_level = machine.read_sizes(1)
    whole = [("own", one) for one in args.shapes or ()]
    if not args.shapes and "upstream" in args.cells:
        whole = [(name, sizes(text, 4)) for name, text in map(str.split, UPSTREAM_CELLS)]
    for name, (batch, heads, kv_heads, tokens) in whole:
        for dtype in args.dtypes or ("float16",):  # upstream's dtype
            yield Cell(name, dtype, (tokens,) * batch, heads, kv_heads, args.head_dim, args.page)
    for level, dtype in itertools.product(() if args.shapes else args.cells, args.dtypes or (*ITEM_BYTES, *CELL_BYTES)):
        kv_heads, each = KV_HEADS.get(level, 8), []
        if level == "ragged":
            each = [RAGGED_LENGTHS]
        elif level in per_level:
            most = per_level[level] // token_bytes(dtype, kv_heads, args.head_dim)
            each = [(max(1, most // batch),) * batch for batch in args.batches]
        for lengths, group in itertools.product(each, args.groups):
            yield Cell(level, dtype, lengths, kv_heads * group, kv_heads, args.head_dim, args.page)


def peer_calls(step: Decode, args: argparse.Namespace, notes: dict[str, None]) -> dict[tuple[str, int], Step]:
    """Calls of other libraries for the same step, by name and number of threads. A library whose result is wrong is left out."""
    calls: dict[tuple[str, int], Step] = {}
    try:
        pieces = Pieces(step)
    except UnavailableError:
        return calls
    for name, threads in itertools.product(args.peers, args.threads):
        try:
            run, fetch = DECODE_PEERS[name](pieces, threads)
            if not step.is_equal(testing.round_to(fetch(run()), query_dtype(step.cache.dtype))):
                raise UnavailableError(f"{step.cache.dtype}: its result is not equal to float64's within the tolerance, so it is not timed")
            calls[name, threads] = run
        except UnavailableError as reason:
            notes[f"{name}: {reason}"] = None
    return calls


def measure(cell: Cell, args: argparse.Namespace, report: Report, share: float, notes: dict[str, None]) -> None:
    """Print the rows of a cell, one for each number of threads."""
    step = draw_decode(cell.lengths, cell.heads, cell.kv_heads, cell.head_dim, cell.page, cell.dtype, args.seed)
    work, isa, largest_cache = step.work(), _core.isa_active(), max(machine.cache_sizes().values())
    memory = step.cache.memory  # filling new memory in each turn would keep the system busy while other contenders are timed
    beyond = work.bytes > 2 * largest_cache
    elsewhere = np.zeros(2 * largest_cache if beyond else 0, np.uint8)

    def forget() -> None:
        """Evict from L3 the K and V that the previous contender has read."""
        if beyond:
            _core.probe_read(isa, elsewhere, None, max(args.threads))

    others = peer_calls(step, args, notes)
    contenders: dict[tuple[str, int], Contender] = {}
    for threads in args.threads:
        for name, run in ((name, run) for (name, count), run in others.items() if count == threads):
            contenders[f"forget for {name}", threads] = Contender("forget", forget)
            contenders[name, threads] = Contender(name, run)
            contenders[f"pause after {name}", threads] = pause()
        contenders["read", threads] = Contender("limit", lambda threads=threads: _core.probe_read(isa, memory, PROBE_SECONDS, threads))
        contenders["flops", threads] = Contender("limit", lambda threads=threads: machine.peak_flops(threads, seconds=PROBE_SECONDS))
        contenders["forget", threads] = Contender("forget", forget)
        contenders["own", threads] = Contender("own", step.call(threads), before_last=lambda: poison(step.out))
    label = f"{cell.name} {cell.dtype} {len(cell.lengths)}x{cell.heads}x{cell.kv_heads}x{max(cell.lengths)}"
    keys = {contender: key for key, contender in contenders.items()}
    for contender in keys:
        contender.label = label
    equal = {}
    for contender in in_turns(list(keys), args, report.progress, share):
        name, threads = keys[contender]
        if name == "own":
            equal[threads] = step.is_equal(step.out)
    for threads in args.threads:
        own, read, peak = (contenders[name, threads] for name in ("own", "read", "flops"))
        limits = {"read": work.bytes / read.value, "flops": work.flops / peak.value}
        turns = zip(read.values, peak.values, own.samples, strict=True)
        by_peer = {name: contenders[name, threads] for name in args.peers if (name, threads) in contenders}
        ratios = [statistics.median(np.divide(peer.samples, own.samples)) for peer in by_peer.values()]
        values = cell.values() | {
            "threads": threads,
            "Outputs_equal": yes(equal[threads]),
            "Our_[usec]": own.median * 1e6,
            "GB/s": work.bytes / own.median / 1e9,
            "GFLOP/s": work.flops / own.median / 1e9,
            "R_[GB/s]": read.value,
            "F_[GFLOP/s]": peak.value,
            "Bound_by": max(limits, key=lambda name: limits[name]),
            "Share_of_limit": statistics.median(max(work.bytes / r, work.flops / f) / 1e9 / taken for r, f, taken in turns),
            "Over_1_thread": contenders["own", 1].median / own.median if threads != 1 and 1 in args.threads else None,
            **{f"{name}_[usec]": peer.median * 1e6 for name, peer in by_peer.items()},
            "Best_peer/ours": min(ratios, default=None),
        }
        report.row(values, samples_s=own.samples, **{f"{name}_samples_s": peer.samples for name, peer in by_peer.items()})


def parser() -> argparse.ArgumentParser:
    result = parser_of(__doc__, repeats=None)
    what = result.add_argument_group("what to run")
    what.add_argument("--quick", action="store_true", help="3 dtypes, groups 1 and 4, batch 1, 2 repeats, not upstream's cells")
    what.add_argument("--cells", nargs="+", choices=CELLS, help="kinds of cells (all)")
    what.add_argument("--shapes", type=shape, nargs="+", metavar="BxHxHKVxS", help="these problems instead")
    what.add_argument("--dtypes", nargs="+", choices=CACHE_DTYPES, help="of the caches (all except pairs; upstream's cells: float16)")
    what.add_argument("--groups", type=positive, nargs="+", help="query heads per KV head (1 4 8)")
    what.add_argument("--batches", type=positive, nargs="+", help="requests (1 16)")
    what.add_argument("--head-dim", type=positive, default=HEAD_DIM, help="head dimension (%(default)s)")
    what.add_argument("--page", type=positive, default=128, help="tokens per page (%(default)s)")
    every = list(DECODE_PEERS)
    what.add_argument("--peers", nargs="*", choices=every, default=every, help="libraries to compare with (all that are installed)")
    return result


@command(parser, COLUMNS)
def main(args: argparse.Namespace, report: Report) -> None:
    if args.quick:
        args.dtypes = args.dtypes or ["float32", "bfloat16", "int8"]
        args.cells = args.cells or [*LEVELS, "ragged"]
    args.cells = args.cells or CELLS
    args.groups = args.groups or ([1, 4] if args.quick else [1, 4, 8])
    args.batches = args.batches or ([1] if args.quick else [1, 16])
    args.repeats = args.repeats or (2 if args.quick else 5)
    cells = list(cells_of(args))
    report.note(f"{len(cells)} cells, each with {' and '.join(map(str, args.threads))} threads")
    options = {"THREADS": args.threads, "ISA": _core.isa_active()}
    report.head(parameters(**options, REPEATS=args.repeats, SEED=args.seed), _core.cpu_model())
    notes: dict[str, None] = {}
    for cell in cells:
        if cell.kv_bytes * (3 if args.peers else 2) > memory_available():
            report.note(f"{cell.name} {cell.dtype}: left out, it needs more memory than there is")
            continue
        measure(cell, args, report, 1 / len(cells), notes)
    report.foot()
    for note in notes:
        report.note(note)


if __name__ == "__main__":
    raise SystemExit(main())
