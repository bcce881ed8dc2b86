#!/usr/bin/env python3
"""Two builds of this library in one process, in turns over the same arrays: what a change gained, to half a percent.

    git worktree add ../before HEAD && make -C ../before build
    python benchmark/beside.py ../before                                    # this checkout beside that one
    python benchmark/beside.py ../before --only decode --kv-mib 512         # caches beyond L3

Runs of their own differ by three percent, for each process is given other pages of memory. `This/other` is the time of this checkout over
the other's, the median over turns and the middle half of them: below 1, this one is quicker. `Same_bits`: whether both returned the same.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import _bench  # noqa: F401  (finds the library of this checkout)
import blitz_attn
from _bench import Column, Contender, Progress, Table, command, in_turns, positive
from operation_set import DTYPES, SETTLE_SECONDS, Operation, decode, every_operation

GROUPS = (1, 4, 8)
COLUMNS = (
    Column("operation", 22),
    Column("dtype", 9),
    Column("threads", 7),
    Column("Other_[usec]", 12, ".1f"),
    Column("This_[usec]", 12, ".1f"),
    Column("This/other", 10, ".3f"),
    Column("Low", 7, ".3f"),
    Column("High", 7, ".3f"),
    Column("Same_bits", 9),
)


def load(checkout: Path, name: str = "blitz_attn_other") -> ModuleType:
    """The library of a checkout that was built in place, or of any folder that holds the package, under another name."""
    package = (checkout / "blitz_attn").resolve()
    if not any(package.glob("_core*.so")):
        raise ValueError(f"{checkout}: expected a checkout that was built in place (make build), found no {package.name}/_core*.so")
    if package == Path(blitz_attn.__file__).resolve().parent:
        raise ValueError(f"{checkout}: this is what is measured beside it")
    spec = importlib.util.spec_from_file_location(name, package / "__init__.py", submodule_search_locations=[str(package)])
    assert spec  # of a path there is always one
    assert spec.loader
    library = importlib.util.module_from_spec(spec)
    sys.modules[name] = library
    spec.loader.exec_module(library)
    return library


def wanted(only: Sequence[str] | None, kv_bytes: int) -> list[Operation]:
    """The speed memory's operations at the level in use, and decode in every dtype and group."""
    chosen = [one for one in every_operation() if one.level is None and not one.name.startswith("decode")]
    chosen += [decode(dtype, group, kv_bytes=kv_bytes) for dtype in (*DTYPES, "int8") for group in GROUPS]
    return [one for one in chosen if not only or any(word in f"{one.name} {one.dtype}" for word in only)]


def compared(operation: Operation, threads: int, other: ModuleType, turns: int, progress: Progress) -> dict[str, Any]:
    """A row of the table."""
    make, out = operation.prepare()
    results: list[bytes] = []

    def poison() -> None:
        out.view("u1")[...] = 0xFF

    def named(library: ModuleType) -> Callable[[], Any]:
        call = make(threads, library)
        poison()
        call()
        results.append(out.tobytes())
        return call

    contenders = [Contender(operation.name, named(library), 1.0, settle=SETTLE_SECONDS) for library in (other, blitz_attn)]
    # each goes first in half of the turns: what the one left in caches is what the other finds
    timings = {index: timing.samples for index, timing in in_turns([*contenders, *reversed(contenders)], turns, 1, progress)}
    before, after = timings[0] + timings[3], timings[1] + timings[2]
    ratios = [mine / theirs for mine, theirs in zip(after, before, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return {
        "operation": operation.name.replace(", ", ",").replace(" ", "_"),
        "dtype": operation.dtype,
        "threads": threads,
        "Other_[usec]": statistics.median(before) * 1e6,
        "This_[usec]": statistics.median(after) * 1e6,
        "This/other": middle,
        "Low": low,
        "High": high,
        "Same_bits": "yes" if results[0] == results[1] else "NO",
    }


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    result.add_argument("other", type=Path, help="the checkout to measure beside: built in place")
    result.add_argument("--only", nargs="+", metavar="WORD", help="only operations with one of these words in their name or dtype")
    result.add_argument("--threads", type=positive, nargs="+", default=[1], help="numbers of threads (%(default)s)")
    result.add_argument("--turns", type=positive, default=10, help="turns, in each of which both run twice (%(default)s)")
    result.add_argument("--kv-mib", type=positive, default=64, help="K and V of a decode step in MiB (%(default)s)")
    return result


@command
def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    try:
        other = load(args.other)
    except ValueError as error:
        print(f"beside.py: {error}", file=sys.stderr)
        return 1
    progress = Progress(1.0)
    table = Table(COLUMNS, sys.stdout, progress)
    table.head(f"{blitz_attn.__version__} of this checkout beside {other.__version__} of {args.other}; {args.turns} turns")
    operations = wanted(args.only, args.kv_mib << 20)
    progress.total = float(4 * (1 + args.turns) * len(operations) * len(args.threads))
    for operation in operations:
        for threads in args.threads:
            table.row(compared(operation, threads, other, args.turns, progress))
    table.foot()
    return 0


if __name__ == "__main__":
    sys.exit(main())
