#!/usr/bin/env python3
"""Records how near the library's operations come to this machine's limits, and compares with an earlier record or with another build.

    python benchmark/speed.py --record     # or make bench-record: before a change
    python benchmark/speed.py --compare    # or make bench-compare: after it
    python benchmark/speed.py              # the table alone
    git worktree add ../before HEAD && make -C ../before build && python benchmark/speed.py --beside ../before --threads 1

A row is one operation of a small fixed set (operations.py) at one level with one number of threads. `Share` is the operation's share of the
limit that binds it (F, P_sustained or R: roofline.py says how each is measured), as the median over turns. `Spread` is half the range of
the middle half of the turns, over the median. A row is flagged if its median moved by more than twice the sum of both spreads and by more
than a twentieth (0.15 if R binds): smaller moves may come from the machine. Each machine has its own record,
benchmark/results/<machine>/speed.json, where <machine> is made from the CPU model, number of threads, level and cache sizes. Rows of a
record that are shares of the old P, which was measured until 29 November 2026, are left out.

`--beside` measures two builds of this library in one process, in turns over the same arrays, and so shows differences of half a percent.
Separate runs differ by three percent, because each process is given other pages of memory. `This/other` is the time of this checkout over
the time of the other, as the median over turns: below 1, this checkout is faster. `Low` and `High` bound the middle half of the turns.
`Same_bits` tells whether both builds returned the same bits. `--only decode --kv-mib 512` uses caches larger than L3.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import _bench  # noqa: F401  (finds the library of this checkout)
import blitz_attn
from _bench import RESULTS, Contender, Report, columns, command, commit, in_turns, machine, parser_of, positive, tag, today, yes
from blitz_attn import _core
from operations import SETTLE_SECONDS, SUSTAINED, chosen, decode, every_operation, list_operations, measured, poison

# Medians of two runs of one build on a shared machine differ by up to these shares: more for caches and memory than for arithmetic.
LEAST_MOVE = {"F": 0.05, SUSTAINED: 0.05, "R": 0.15}

COLUMNS = columns("operation:22 dtype:9 level:12 threads:7 Time_[usec]:12.1f Bound_by:11 Share:7.3f Spread:7.3f")
MOVE_COLUMNS = columns("Was:7.3f Its_spread:10.3f Moved:7+.3f Flag:7")
BESIDE_COLUMNS = columns(
    "operation:22 dtype:9 threads:7 Other_[usec]:12.1f This_[usec]:12.1f This/other:10.3f Low:7.3f High:7.3f Same_bits:9"
)


def spread(shares: Sequence[float]) -> float:
    """Half the range of the middle half of the shares, over their median."""
    if len(shares) < 2:
        return 0.0
    low, _, high = statistics.quantiles(shares, n=4, method="inclusive")
    return (high - low) / 2 / statistics.median(shares)


def moved(was: Sequence[float], now: Sequence[float], bound: str) -> tuple[float, str]:
    """The change of a share relative to its old value, and the flag: faster, SLOWER, or - if the change may be noise."""
    change = statistics.median(now) / statistics.median(was) - 1
    noise = max(LEAST_MOVE[bound], 2 * (spread(was) + spread(now)))
    return change, "-" if abs(change) <= noise else "faster" if change > 0 else "SLOWER"


def read(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"--compare: cannot read {path}: {error.strerror}. make bench-record makes a record of this machine") from None
    except ValueError:
        raise ValueError(f"--compare: {path} is not a record, because it is not JSON") from None


def load(checkout: Path) -> ModuleType:
    """Import the library of a checkout that was built in place, or of any folder that holds the package, under another name."""
    package = (checkout / "blitz_attn").resolve()
    if not any(package.glob("_core*.so")):
        raise ValueError(f"--beside: expected a checkout that was built in place (make build), found no _core*.so in {package}")
    spec = importlib.util.spec_from_file_location("blitz_attn_other", package / "__init__.py", submodule_search_locations=[str(package)])
    assert spec  # a path always has one
    assert spec.loader
    library = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = library
    spec.loader.exec_module(library)
    return library


def beside(other: ModuleType, args: argparse.Namespace, report: Report) -> None:
    """The table of `--beside`."""
    report.columns = BESIDE_COLUMNS
    report.head(f"{blitz_attn.__version__} of this checkout beside {other.__version__} of {args.beside}")
    operations = [one for one in every_operation() if one.level is None and not one.name.startswith("decode")]
    operations += [decode(x, group, kv_bytes=args.kv_mib << 20) for x in ("float32", "float16", "bfloat16", "int8") for group in (1, 4, 8)]
    operations = chosen([*operations, *list_operations()], args.only)
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
            # Each build runs right after the other and right after itself equally often, so that caches favour neither.
            list(in_turns([before, after, after, before], args, report.progress, 1 / len(operations) / len(args.threads)))
            ratios = [mine / theirs for mine, theirs in zip(after.samples, before.samples, strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
            values = {"operation": operation.word, "dtype": operation.dtype, "threads": threads}
            values |= {"Other_[usec]": before.median * 1e6, "This_[usec]": after.median * 1e6}
            report.row(values | {"This/other": middle, "Low": low, "High": high, "Same_bits": yes(results[0] == results[1])})
    report.foot()


def parser() -> argparse.ArgumentParser:
    result = parser_of(__doc__, repeats=7)
    what = result.add_mutually_exclusive_group()
    what.add_argument("--record", action="store_true", help="store what is measured as this machine's record")
    what.add_argument("--compare", action="store_true", help="show what has moved since this machine's record")
    what.add_argument("--beside", type=Path, metavar="CHECKOUT", help="measure CHECKOUT too, in turns in one process; it must be built")
    result.add_argument("--kv-mib", type=positive, default=64, help="with --beside: K and V of a decode step in MiB (%(default)s)")
    result.add_argument("--file", type=Path, help="the record (benchmark/results/<this machine>/speed.json)")
    result.add_argument("--only", nargs="+", metavar="WORD", help="only operations with one of these words in their name or dtype")
    return result


@command(parser, COLUMNS)
def main(args: argparse.Namespace, report: Report) -> None:
    if args.beside:
        other = load(args.beside)
        with other.isa(args.isa):
            beside(other, args, report)
        return
    here = machine()
    path = args.file or RESULTS / tag(here) / "speed.json"
    record = read(path) if args.compare else None
    rows_before = record["rows"] if record else []
    known = {row["key"]: row for row in rows_before if row["bound"] in LEAST_MOVE}  # not the old P
    head = [f"{here['cpu']}, {here['threads']} threads, {here['level']}; blitz_attn {blitz_attn.__version__} {commit() or ''}"]
    if record:
        report.columns = COLUMNS + MOVE_COLUMNS
        head.append(f"beside {record['version']} {record['commit'] or ''} of {record['date']}")
    report.head(*head)
    rows, flags = [], []
    for point in measured(chosen(every_operation(), args.only), args.threads, args, report.progress):
        key = f"{point.operation.name}, {point.operation.dtype}, {point.level}, {point.threads}"
        rows.append({"key": key, "bound": point.bound, "shares": [round(share, 4) for share in point.shares]})
        values = point.values() | {"Share": statistics.median(point.shares), "Spread": spread(point.shares)}
        if key in known:
            was = known[key]["shares"]
            change, flag = moved(was, point.shares, point.bound)
            values |= {"Was": statistics.median(was), "Its_spread": spread(was), "Moved": change, "Flag": flag}
            flags.append(flag)
        report.row(values, shares=point.shares)
    report.foot()
    if record:
        new = sum(row["key"] not in known for row in rows)
        counts = f"slower: {flags.count('SLOWER')}, faster: {flags.count('faster')}, of {len(rows)} rows"
        report.line(f"# {counts}; {new} not in the record, {len(known) + new - len(rows)} only there")
    if args.record:
        path.parent.mkdir(parents=True, exist_ok=True)
        about = {"machine": here, "version": blitz_attn.__version__, "commit": commit(), "compiler": _core.compiler, "date": today()}
        lines = ",\n  ".join(json.dumps(row) for row in rows)  # one row per line, so that a diff of records can be read
        path.write_text(json.dumps(about, indent=1)[:-2] + f',\n "rows": [\n  {lines}\n ]\n}}\n', encoding="utf-8")
        report.note(f"{path}: {len(rows)} rows")


if __name__ == "__main__":
    raise SystemExit(main())
