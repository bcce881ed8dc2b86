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
from pathlib import Path
from types import ModuleType

import _bench  # noqa: F401  (finds the library of this checkout)
import blitz_attn
from _bench import Contender, Report, columns, command, in_turns, parser_of, positive, yes
from operations import SETTLE_SECONDS, chosen, decode, every_operation, poison

COLUMNS = columns("operation:22 dtype:9 threads:7 Other_[usec]:12.1f This_[usec]:12.1f This/other:10.3f Low:7.3f High:7.3f Same_bits:9")


def load(checkout: Path) -> ModuleType:
    """The library of a checkout that was built in place, or of any folder that holds the package, under another name."""
    package = (checkout / "blitz_attn").resolve()
    if not any(package.glob("_core*.so")):
        raise ValueError(f"other: expected a checkout that was built in place (make build), found no _core*.so in {package}")
    spec = importlib.util.spec_from_file_location("blitz_attn_other", package / "__init__.py", submodule_search_locations=[str(package)])
    assert spec  # of a path there is always one
    assert spec.loader
    library = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = library
    spec.loader.exec_module(library)
    return library


def parser() -> argparse.ArgumentParser:
    result = parser_of(__doc__, repeats=10)
    result.set_defaults(threads=[1])
    result.add_argument("other", type=Path, help="the checkout to measure beside: built in place")
    result.add_argument("--only", nargs="+", metavar="WORD", help="only operations with one of these words in their name or dtype")
    result.add_argument("--kv-mib", type=positive, default=64, help="K and V of a decode step in MiB (%(default)s)")
    return result


@command(parser, COLUMNS)
def main(args: argparse.Namespace, report: Report) -> None:
    other = load(args.other)
    report.head(f"{blitz_attn.__version__} of this checkout beside {other.__version__} of {args.other}")
    operations = [one for one in every_operation() if one.level is None and not one.name.startswith("decode")]
    operations += [decode(x, group, kv_bytes=args.kv_mib << 20) for x in ("float32", "float16", "bfloat16", "int8") for group in (1, 4, 8)]
    operations = chosen(operations, args.only)
    for operation in operations:
        work = operation.draw()
        for threads in args.threads:
            results, contenders = [], []
            for library in (other, blitz_attn):
                call = work.call(threads, library)
                poison(work.out)
                call()
                results.append(work.out.tobytes())
                contenders.append(Contender(operation.name, call, settle=SETTLE_SECONDS))
            before, after = contenders
            # each goes first in half of a turn: what the one left in caches is what the other finds
            list(in_turns([before, after, after, before], args, report.progress, 1 / len(operations) / len(args.threads)))
            ratios = [mine / theirs for mine, theirs in zip(after.samples, before.samples, strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
            report.row(
                {
                    "operation": operation.word,
                    "dtype": operation.dtype,
                    "threads": threads,
                    "Other_[usec]": before.median * 1e6,
                    "This_[usec]": after.median * 1e6,
                    "This/other": middle,
                    "Low": low,
                    "High": high,
                    "Same_bits": yes(results[0] == results[1]),
                }
            )
    report.foot()


if __name__ == "__main__":
    raise SystemExit(main())
