#!/usr/bin/env python3
"""What this machine can do at most, measured through the library's own vector code, and how near its operations come.

    python benchmark/roofline.py | tee roofline.log | python benchmark/plot.py  # a minute or so
    python benchmark/roofline.py --threads 2 --no-operations                    # limits only, two threads only

First one row a limit: `flops` rows give F, the fp32 FMA peak of a level's widest vectors in GFLOP/s; `tiles` rows
give P, that of products of bfloat16 tiles with random operands, where the CPU has tiles; `read` rows give GB/s when
every thread reads its own memory over and over, small enough to stay in the cache named. All threads together. Then one row an
operation of a small fixed set: its flops over its operands and results counted once, what it reaches, and the share of the limit that binds
it (F or P for its arithmetic, R for reading), measured in the same turns. Columns are split by white space.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import _bench  # noqa: F401  (finds the library of this checkout)
import blitz_attn
from _bench import Column, Progress, Table, above_zero, command, isa_level, positive
from blitz_attn import _core
from result_files import add_save, main_with_save

READ_LEVELS = ("L1", "L2", "L3", "DRAM")
DRAM_BYTES = int(os.environ.get("BENCHMARK_DRAM_BYTES") or 0)  # tests set it, to save time; what is measured then is no limit
DEFAULT_CACHES = {"L1": 32 << 10, "L2": 512 << 10, "L3": 16 << 20}  # where the system does not tell


def _bytes(text: str) -> int:
    unit = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(text[-1:].upper(), 1)
    return int(text.rstrip("KMGkmg")) * unit


def cache_sizes() -> dict[str, int]:
    """Bytes of the data caches that the first CPU sees."""
    sizes = {}
    for index in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        try:
            kind, level, size = ((index / name).read_text().strip() for name in ("type", "level", "size"))
        except OSError:
            continue
        if kind != "Instruction":
            sizes[f"L{level}"] = _bytes(size)
    return sizes or dict(DEFAULT_CACHES)


def read_sizes(threads: int) -> dict[str, int]:
    """Bytes a thread that sit in each level and in none below it. A level that leaves no room for that is left out."""
    caches = cache_sizes()
    sizes = {}
    below = 0
    for level in ("L1", "L2", "L3"):
        if level not in caches:
            continue
        share = caches[level] // (threads if level == "L3" else 1)
        size = share // 2
        if size >= 2 * below:
            sizes[level] = size
        below = caches[level]
    largest = max(caches.values())
    # what L3 keeps of memory that is read again and again makes it look quicker than it is (of four times L3: by a quarter)
    sizes["DRAM"] = (DRAM_BYTES or max(8 * largest, 1 << 30)) // threads
    return sizes


def peak_flops(threads: int, isa: str | None = None, seconds: float = 0.15) -> float:
    """F in GFLOP/s, all threads together, of `isa` (the active level by default)."""
    return float(_core.probe_flops(isa or _core.isa_active(), seconds, threads))


def peak(dtype: str, threads: int, seconds: float = 0.15) -> tuple[str, float]:
    """What binds arithmetic of `dtype` at the active level: P for bfloat16 where there are tiles, else F; and its GFLOP/s, all threads."""
    tiles = float(_core.probe_tile_flops(_core.isa_active(), seconds, threads)) if dtype == "bfloat16" else 0.0
    return ("P", tiles) if tiles else ("F", peak_flops(threads, seconds=seconds))


def measure(threads: int, isas: list[str] | None = None, levels: tuple[str, ...] = READ_LEVELS, seconds: float = 0.2) -> dict:
    """Measure the machine's limits with `threads` threads.

    Returns
    -------
    dict
        ``{"threads": n, "flops": {isa: GFLOP/s}, "tiles": {isa: GFLOP/s}, "read": {level: GB/s}, "read_bytes": {level: bytes a thread}}``.
        Reads use the highest level of `isas`.
    """
    isas = isas or list(blitz_attn.isa_levels(available=True))
    sizes = {level: size for level, size in read_sizes(threads).items() if level in levels}
    tiles = {isa: float(_core.probe_tile_flops(isa, seconds, threads)) for isa in isas}
    return {
        "threads": threads,
        "tiles": {isa: value for isa, value in tiles.items() if value},
        "flops": {isa: float(_core.probe_flops(isa, seconds, threads)) for isa in isas},
        "read": {level: float(_core.probe_read(isas[-1], size, seconds, threads)) for level, size in sizes.items()},
        "read_bytes": sizes,
    }


LIMIT_COLUMNS = (
    Column("what", 6),
    Column("level", 12),
    Column("threads", 8),
    Column("bytes_a_thread", 15),
    Column("value", 10, ".1f"),
    Column("unit", 7),
)
OPERATION_COLUMNS = (
    Column("operation", 22),
    Column("dtype", 9),
    Column("level", 12),
    Column("threads", 8),
    Column("flop/byte", 10, ".2f"),
    Column("Time_[usec]", 12, ".1f"),
    Column("GFLOP/s", 9, ".1f"),
    Column("GB/s", 7, ".1f"),
    Column("Bound_by", 8),
    Column("Share_of_limit", 14, ".3f"),
)


def limit_rows(limits: dict) -> Iterator[dict[str, Any]]:
    """The table's rows of what `measure` found."""
    for what, unit in (("flops", "GFLOP/s"), ("tiles", "GFLOP/s"), ("read", "GB/s")):
        for level, value in limits[what].items():
            size = limits["read_bytes"][level] if what == "read" else 0
            yield {"what": what, "level": level, "threads": limits["threads"], "bytes_a_thread": size, "value": value, "unit": unit}


def operation_rows(threads: list[int], repeats: int, progress: Progress) -> Iterator[dict[str, Any]]:
    """The table's rows of the fixed set of operations."""
    import operation_set  # which measures its limits with this module

    for point in operation_set.measured(operation_set.every_operation(), threads, repeats, progress):
        seconds = statistics.median(point.seconds)
        yield {
            "operation": point.operation.name.replace(", ", ",").replace(" ", "_"),
            "dtype": point.operation.dtype,
            "level": point.level,
            "threads": point.threads,
            "flop/byte": point.operation.intensity,
            "Time_[usec]": seconds * 1e6,
            "GFLOP/s": point.rate,
            "GB/s": point.operation.bytes / seconds / 1e9,
            "Bound_by": point.bound,
            "Share_of_limit": point.median,
        }


@command
def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=positive, nargs="+", help="numbers of threads (1 .. what the library uses)")
    parser.add_argument("--isa", type=isa_level, nargs="+", help="levels (all that this CPU has)")
    parser.add_argument("--seconds", type=above_zero, default=0.3, help="time a measurement (%(default)s)")
    parser.add_argument("--operations", action=argparse.BooleanOptionalAction, default=True, help="measure operations too (yes)")
    parser.add_argument("--repeats", type=positive, default=5, help="turns of the operations, of which the median counts (%(default)s)")
    args = add_save(parser).parse_args(argv)
    isas = args.isa or list(blitz_attn.isa_levels(available=True))
    counts = list(args.threads or range(1, blitz_attn.get_num_threads() + 1))
    progress = Progress(1.0)
    table = Table(LIMIT_COLUMNS, sys.stdout, progress)
    table.names()
    for threads in counts:
        for values in limit_rows(measure(threads, isas, seconds=args.seconds)):
            table.row(values)
    if args.operations:
        table = Table(OPERATION_COLUMNS, sys.stdout, progress)
        table.line("")
        table.names()
        with blitz_attn.isa(args.isa[-1] if args.isa else None):
            for values in operation_rows(sorted({counts[0], counts[-1]}), args.repeats, progress):
                table.row(values)
    return 0


if __name__ == "__main__":
    sys.exit(main_with_save(main))
