#!/usr/bin/env python3
"""The limits of this machine, measured through the library's own vector code, and how near the library's operations come to them.

    python benchmark/roofline.py | tee roofline.log | python benchmark/plot.py  # a minute or so
    python benchmark/roofline.py --threads 2 --no-operations                    # only the limits, only with two threads
    python benchmark/roofline.py --threads 1 --lists                            # lists of single queries, next to dense rows

The first rows are limits, of all threads together: `flops` rows give F, the float32 FMA peak of a level's widest vectors in GFLOP/s.
`tiles_sustained` rows give P, if the CPU has tiles: the rate of products of bfloat16 tiles that a core sustains. Every four products load
four tiles of changing random operands from L1, and the first quarter of the time, in which the clock is still higher, does not count.
`read` rows give GB/s when every thread repeatedly reads memory of its own, of a size that lies in the named cache or in DRAM. Then each
operation of a small fixed set has a row: its flops over the bytes of its operands and results (each counted once), its rates, and its share
of the limit that binds it (F or P_sustained for arithmetic, R for reading). F and R take turns with the operations; P is measured by the
same threads right before and right after each sample of an operation. Columns are split by white space.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

import _bench  # noqa: F401  (finds the library of this checkout)
import blitz_attn
import operations
from _bench import Report, above_zero, columns, command, parser_of
from blitz_attn import _core
from machine import read_sizes

LIMIT_COLUMNS = columns("what:15 level:12 threads:8 bytes_a_thread:15 value:10.1f unit:7")
OPERATION_COLUMNS = columns(
    "operation:22 dtype:9 level:12 threads:8 flop/byte:10.2f Time_[usec]:12.1f GFLOP/s:9.1f GB/s:7.1f Bound_by:11 Share_of_limit:14.3f"
)


def limits(threads: int, levels: Sequence[str], seconds: float) -> Iterator[dict[str, Any]]:
    """Measure the machine's limits, and yield them as rows of the table. Reading is measured at the last of the levels, the highest."""
    for what, probe in (("flops", _core.probe_flops), ("tiles_sustained", _core.probe_tile_flops)):
        for level in levels:
            value = probe(level, seconds, threads)
            if value:
                yield {"what": what, "level": level, "threads": threads, "bytes_a_thread": 0, "value": value, "unit": "GFLOP/s"}
    for level, size in read_sizes(threads).items():
        value = _core.probe_read(levels[-1], size, seconds, threads)
        yield {"what": "read", "level": level, "threads": threads, "bytes_a_thread": size, "value": value, "unit": "GB/s"}


def parser() -> argparse.ArgumentParser:
    result = parser_of(__doc__, repeats=5)
    result.set_defaults(threads=list(range(1, blitz_attn.get_num_threads() + 1)))
    result.add_argument("--seconds", type=above_zero, default=0.3, help="seconds per measurement of a limit (%(default)s)")
    result.add_argument("--lists", action="store_true", help="measure attention over lists of single queries in place of the small set")
    result.add_argument("--operations", action=argparse.BooleanOptionalAction, default=True, help="measure operations too (yes)")
    return result


@command(parser, LIMIT_COLUMNS)
def main(args: argparse.Namespace, report: Report) -> None:
    levels = blitz_attn.isa_levels(available=True)
    report.names()
    for threads in args.threads:
        for values in limits(threads, levels[: levels.index(_core.isa_active()) + 1], args.seconds):
            report.row(values)
    if not args.operations:
        return
    report.columns = OPERATION_COLUMNS
    report.line("")
    report.names()
    chosen = operations.list_operations() if args.lists else operations.every_operation()
    counts = sorted({args.threads[0], args.threads[-1]})
    for point in operations.measured(chosen, counts, args, report.progress):
        seconds, work = statistics.median(point.seconds), point.work
        rates = {"flop/byte": work.flops / work.bytes, "GFLOP/s": work.flops / seconds / 1e9, "GB/s": work.bytes / seconds / 1e9}
        report.row(point.values() | rates | {"Share_of_limit": statistics.median(point.shares)}, samples_s=point.seconds)


if __name__ == "__main__":
    raise SystemExit(main())
