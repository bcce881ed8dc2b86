"""What the scripts that draw a table share: reading it, their options, and what they say where there is nothing to draw."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

from _bench import positive, writable  # first: finds the library of this checkout
from blitz_attn.plot import _cell as cell_value

Row = dict[str, Any]


def parse_rows(text: str, first_columns: Sequence[str]) -> list[Row]:
    """Rows of tables, found among any other output: lines with as many cells as the last header line above them, which starts with one
    of `first_columns`. What stands behind a # is not looked at."""
    header: list[str] = []
    rows = []
    for line in text.splitlines():
        cells = line.partition("#")[0].split()
        if line.startswith("==="):
            header = []  # the end of a table, or what stands above the next one's header
        elif len(cells) > 5 and cells[0] in first_columns:
            header = cells
        elif header and len(cells) == len(header):
            rows.append({name: cell_value(name, cell) for name, cell in zip(header, cells, strict=True)})
    return rows


def counted(threads: int) -> str:
    return f"{threads} thread{'s' if threads > 1 else ''}"


def plot_main(
    argv: Sequence[str] | None,
    script: str,
    doc: str | None,
    source: str,
    read: Callable[[str], list[Row]],
    draw: Callable[[list[Row], str | None, int], Any],
) -> int:
    """The command: a table of `source` on stdin to a picture. Returns the exit code."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = "benchmark.png" if script == "plot.py" else script.removeprefix("plot_").removesuffix(".py") + ".png"
    parser.add_argument("--output", "-o", type=writable, default=default, help="picture to write (%(default)s)")
    parser.add_argument("--title", help="title of the figure")
    parser.add_argument("--dpi", type=positive, default=120, help="resolution (%(default)s)")
    args = parser.parse_args(argv)
    rows = read(sys.stdin.read())
    if not rows:
        print(f"{script}: no row of {source} on stdin, so there is nothing to draw", file=sys.stderr)
        return 1
    try:
        draw(rows, args.title, args.dpi).savefig(args.output)
    except ImportError as error:
        print(f"{script}: needs matplotlib ({error})", file=sys.stderr)
        return 1
    except (ValueError, OSError) as error:
        print(f"{script}: {error}", file=sys.stderr)
        return 1
    print(f"{args.output}: {len(rows)} rows drawn", file=sys.stderr)
    return 0
