#!/usr/bin/env python3
"""A speed memory: how near the library's operations came to this machine's limits, stored, and what has moved since.

    python benchmark/speed.py --record     # or make bench-record: before a change
    python benchmark/speed.py --compare    # or make bench-compare: after it
    python benchmark/speed.py              # the table alone

A row is one operation of a small fixed set (operations.py) at one level with one number of threads; its number is the share of the limit
that binds it (F, P or R), the median over turns, limits measured in the same turns. `Spread` is half the range of the middle half of the
turns, over the median. A row is flagged where its median moved by more than both spreads twice over and by more than a twentieth (0.15
where R binds): what moves by less may be the machine. Records are kept by machine, benchmark/results/<machine>/speed.json: CPU model,
number of threads, level and cache sizes, and nothing else of it.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import _bench  # noqa: F401  (finds the library of this checkout)
import blitz_attn
from _bench import RESULTS, Report, columns, command, commit, machine, parser_of, tag, today
from blitz_attn import _core
from operations import chosen, every_operation, measured

# Between two runs of the same build, medians differ by this much on a machine that others share: caches and memory more than arithmetic.
LEAST_MOVE = {"F": 0.05, "P": 0.05, "R": 0.15}

COLUMNS = columns("operation:22 dtype:9 level:12 threads:7 Time_[usec]:12.1f Bound_by:8 Share:7.3f Spread:7.3f")
MOVE_COLUMNS = columns("Was:7.3f Its_spread:10.3f Moved:7+.3f Flag:7")


def spread(shares: Sequence[float]) -> float:
    """Half the range of the middle half, over the median."""
    if len(shares) < 2:
        return 0.0
    low, _, high = statistics.quantiles(shares, n=4, method="inclusive")
    return (high - low) / 2 / statistics.median(shares)


def moved(was: Sequence[float], now: Sequence[float], bound: str) -> tuple[float, str]:
    """How much a share moved, as a part of what it was, and the flag: faster, slower, or - where it may be noise."""
    change = statistics.median(now) / statistics.median(was) - 1
    noise = max(LEAST_MOVE[bound], 2 * (spread(was) + spread(now)))
    return change, "-" if abs(change) <= noise else "faster" if change > 0 else "SLOWER"


def read(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"--compare: cannot read {path}: {error.strerror}. make bench-record makes a record of this machine") from None
    except ValueError:
        raise ValueError(f"--compare: {path} is no record, for it is not JSON") from None


def parser() -> argparse.ArgumentParser:
    result = parser_of(__doc__, repeats=7)
    what = result.add_mutually_exclusive_group()
    what.add_argument("--record", action="store_true", help="store what is measured as this machine's record")
    what.add_argument("--compare", action="store_true", help="show what has moved since this machine's record")
    result.add_argument("--file", type=Path, help="the record (benchmark/results/<this machine>/speed.json)")
    result.add_argument("--only", nargs="+", metavar="WORD", help="only operations with one of these words in their name or dtype")
    return result


@command(parser, COLUMNS)
def main(args: argparse.Namespace, report: Report) -> None:
    here = machine()
    path = args.file or RESULTS / tag(here) / "speed.json"
    record = read(path) if args.compare else None
    known = {row["key"]: row for row in record["rows"]} if record else {}
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
        lines = ",\n  ".join(json.dumps(row) for row in rows)  # a row a line: a record's changes can be read
        path.write_text(json.dumps(about, indent=1)[:-2] + f',\n "rows": [\n  {lines}\n ]\n}}\n', encoding="utf-8")
        report.note(f"{path}: {len(rows)} rows")


if __name__ == "__main__":
    raise SystemExit(main())
