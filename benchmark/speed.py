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
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import _bench  # noqa: F401  (finds the library of this checkout)
import blitz_attn
from _bench import Column, Progress, Table, command, positive
from blitz_attn import _core
from operation_set import Point, every_operation, measured
from result_files import RESULTS, commit, machine, tag, today

# Between two runs of the same build, medians differ by this much on a machine that others share: caches and memory more than arithmetic.
LEAST_MOVE = {"F": 0.05, "P": 0.05, "R": 0.15}
REPEATS = 7

COLUMNS = (
    Column("operation", 22),
    Column("dtype", 9),
    Column("level", 12),
    Column("threads", 7),
    Column("Time_[usec]", 12, ".1f"),
    Column("Bound_by", 8),
    Column("Share", 7, ".3f"),
    Column("Spread", 7, ".3f"),
)
MOVE_COLUMNS = (Column("Was", 7, ".3f"), Column("Its_spread", 10, ".3f"), Column("Moved", 7, "+.3f"), Column("Flag", 7))


def spread(shares: Sequence[float]) -> float:
    """Half the range of the middle half, over the median."""
    if len(shares) < 2:
        return 0.0
    low, _, high = statistics.quantiles(shares, n=4, method="inclusive")
    return (high - low) / 2 / statistics.median(shares)


def row_of(point: Point) -> dict[str, Any]:
    """What a record keeps of a point."""
    return {
        "key": point.key,
        "operation": point.operation.name,
        "dtype": point.operation.dtype,
        "level": point.level,
        "threads": point.threads,
        "microseconds": round(statistics.median(point.seconds) * 1e6, 2),
        "bound": point.bound,
        "shares": [round(share, 4) for share in point.shares],
    }


def moved(was: Sequence[float], now: Sequence[float], bound: str) -> tuple[float, str]:
    """How much a share moved, as a part of what it was, and the flag: faster, slower, or - where it may be noise."""
    change = statistics.median(now) / statistics.median(was) - 1
    noise = max(LEAST_MOVE[bound], 2 * (spread(was) + spread(now)))
    return change, "-" if abs(change) <= noise else "faster" if change > 0 else "SLOWER"


def values_of(row: dict[str, Any], was: dict[str, Any] | None) -> dict[str, Any]:
    """A table's row; `was` is the record's, where there is one."""
    values = {name: row[name] for name in ("dtype", "level", "threads")} | {
        "operation": row["operation"].replace(", ", ",").replace(" ", "_"),
        "Time_[usec]": row["microseconds"],
        "Bound_by": row["bound"],
        "Share": statistics.median(row["shares"]),
        "Spread": spread(row["shares"]),
    }
    if was:
        change, flag = moved(was["shares"], row["shares"], row["bound"])
        values |= {"Was": statistics.median(was["shares"]), "Its_spread": spread(was["shares"]), "Moved": change, "Flag": flag}
    return values


def read(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}. make bench-record makes a record of this machine") from None
    except ValueError:
        raise ValueError(f"{path}: not a record, for it is not JSON") from None


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = result.add_mutually_exclusive_group()
    what.add_argument("--record", action="store_true", help="store what is measured as this machine's record")
    what.add_argument("--compare", action="store_true", help="show what has moved since this machine's record")
    result.add_argument("--file", type=Path, help="the record (benchmark/results/<this machine>/speed.json)")
    result.add_argument("--only", nargs="+", metavar="WORD", help="only operations with one of these words in their name or dtype")
    result.add_argument("--threads", type=positive, nargs="+", help="numbers of threads (1, and what the library uses)")
    result.add_argument("--repeats", type=positive, default=REPEATS, help="timed turns (%(default)s)")
    return result


@command
def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    here = machine()
    path = args.file or RESULTS / tag(here) / "speed.json"
    try:
        record = read(path) if args.compare else None
    except ValueError as error:
        print(f"speed.py: {error}", file=sys.stderr)
        return 1
    known = {row["key"]: row for row in record["rows"]} if record else {}
    wanted = [one for one in every_operation() if not args.only or any(word in f"{one.name} {one.dtype}" for word in args.only)]
    progress = Progress(1.0)
    table = Table(COLUMNS + (MOVE_COLUMNS if record else ()), sys.stdout, progress)
    head = [f"{here['cpu']}, {here['threads']} threads, {here['level']}; blitz_attn {blitz_attn.__version__} {commit() or ''}"]
    if record:
        head.append(f"beside {record['version']} {record['commit'] or ''} of {record['date']}")
    table.head(*head)
    rows = []
    flags: list[str] = []
    for point in measured(wanted, args.threads or sorted({1, blitz_attn.get_num_threads()}), args.repeats, progress):
        rows.append(row_of(point))
        values = values_of(rows[-1], known.get(point.key))
        flags.append(values.get("Flag", "-"))
        table.row(values)
    table.foot()
    if record:
        lost = len(set(known) - {row["key"] for row in rows})
        new = sum(row["key"] not in known for row in rows)
        counts = f"slower: {flags.count('SLOWER')}, faster: {flags.count('faster')}, of {len(rows)} rows"
        print(f"# {counts}; {new} not in the record, {lost} only there")
    if args.record:
        path.parent.mkdir(parents=True, exist_ok=True)
        about = {"machine": here, "version": blitz_attn.__version__, "commit": commit(), "compiler": _core.compiler, "date": today()}
        lines = ",\n  ".join(json.dumps(row) for row in rows)  # a row a line: a record's changes can be read
        path.write_text(json.dumps(about, indent=1)[:-2] + f',\n "rows": [\n  {lines}\n ]\n}}\n', encoding="utf-8")
        print(f"{path}: {len(rows)} rows", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
