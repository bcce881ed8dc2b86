#!/usr/bin/env python3
"""Draw a benchmark table: speed-up over dense attention against sparsity, a line a block shape.

    python benchmark/benchmark.py | python benchmark/plot.py -o benchmark.png

Reads the table on stdin and takes nothing else from it, so a log with other lines in it is fine. A table of `benchmark.py --input` gets
a second panel: the softmax mass that the kept blocks hold. Its speeds are the medians over layers and choosers.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Any

from _bench import command
from _plots import Row, plot_main
from blitz_attn.plot import parse_table, plot_speedup

CHOOSER_COLOURS = {"mean-pool": "#0072B2", "oracle": "#D55E00"}
LINES = ("-", "--", ":", "-.")
MARKERS = "osD^"


def merged(rows: list[Row], keys: Sequence[str], columns: Sequence[str], middle: Callable = statistics.median) -> list[Row]:
    """One row for all rows that agree in `keys`: its `columns` hold the middle of theirs."""
    groups: dict[tuple, list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in keys), []).append(row)
    return [group[0] | {name: middle([row[name] for row in group]) for name in columns} for group in groups.values()]


def draw_mass(rows: list[Row], axes: Any) -> None:
    """Kept softmax mass against sparsity: a line a chooser and block size, the mean over the layers; faint: the layer that keeps least."""
    shapes = list(dict.fromkeys(row["block_shape"] for row in rows))
    for chooser in dict.fromkeys(row["Chooser"] for row in rows if row["Chooser"] != "all"):
        for index, shape in enumerate(shapes):
            own = [row for row in rows if row["block_shape"] == shape and row["Chooser"] in ("all", chooser)]
            style = {
                "color": CHOOSER_COLOURS.get(chooser, "#666666"),
                "linestyle": LINES[index % len(LINES)],
                "marker": MARKERS[index % len(MARKERS)],
            }
            for middle, more in ((statistics.fmean, {"label": "{}, {}x{}".format(chooser, *shape)}), (min, {"alpha": 0.25})):
                points = sorted((row["sparsity"], row["Kept_mass"]) for row in merged(own, ("sparsity",), ("Kept_mass",), middle))
                axes.plot(*zip(*points, strict=True), markersize=5, **style, **more)
    axes.set_xlabel("sparsity (share of causal blocks dropped)")
    axes.set_ylabel("softmax mass kept (mean over layers; faint: the least of any layer)")
    axes.set_ylim(top=1.01)
    axes.grid(True, alpha=0.3)
    axes.legend(fontsize=8, loc="lower left")
    axes.set_title("What the kept blocks hold")


def draw(rows: list[Row], title: str | None, dpi: int) -> Any:
    """The figure of a table."""
    if "Kept_mass" not in rows[0]:
        return plot_speedup(rows, title=title, dpi=dpi)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 6.5), dpi=dpi, layout="constrained")
    left, right = figure.subplots(1, 2)
    keys = ("B", "H", "s_q", "s_kv", "D", "block_shape", "sparsity")
    plot_speedup(merged(rows, keys, ("Ref_Latency_[usec]", "Our_Latency_[usec]")), title=title, ax=left)
    draw_mass(rows, right)
    return figure


@command
def main(argv: Sequence[str] | None = None) -> int:
    return plot_main(argv, "plot.py", __doc__, "a benchmark table", parse_table, draw)


if __name__ == "__main__":
    sys.exit(main())
