#!/usr/bin/env python3
"""Draw a table of peers.py: what each library reaches, over the length.

    python benchmark/peers.py | python benchmark/plot_peers.py -o peers.png

Reads the table on stdin and takes nothing else from it; several tables one after the other are one. A panel a dtype (across) and what is
attended (down), for the largest head dimension and the most threads in the table; GFLOP/s count what is attended only.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from _bench import command
from _plots import Row, counted, parse_rows, plot_main

STYLES = {
    "ours": ("#D55E00", "o"),
    "torch": ("#0072B2", "v"),
    "flex": ("#56B4E9", "^"),
    "onnxruntime": ("#009E73", "s"),
    "openvino": ("#CC79A7", "x"),
    "jax": ("#E69F00", "D"),
    "numpy": ("#000000", "+"),
}


def attended(row: Row) -> str:
    if row["rule"] == "causal":
        return "causal"
    return f"sparsity {row['sparsity']:g}" if row["sparsity"] else "dense"


def draw(rows: list[Row], title: str | None, dpi: int) -> Any:
    from matplotlib.figure import Figure

    widest, most = max(row["D"] for row in rows), max(row["threads"] for row in rows)
    rows = [row for row in rows if row["D"] == widest and row["threads"] == most]
    dtypes = list(dict.fromkeys(row["dtype"] for row in rows))
    rules = list(dict.fromkeys(attended(row) for row in sorted(rows, key=lambda row: (row["rule"], row["sparsity"]))))
    figure = Figure(figsize=(5 * len(dtypes) + 1, 3.4 * len(rules) + 0.6), dpi=dpi, layout="constrained")
    grid = figure.subplots(len(rules), len(dtypes), squeeze=False, sharex=True)
    for across, dtype in enumerate(dtypes):
        for down, rule in enumerate(rules):
            axes, own = grid[down][across], [row for row in rows if row["dtype"] == dtype and attended(row) == rule]
            for name, (colour, mark) in STYLES.items():
                points = sorted((row["S"], row["GFLOP/s"]) for row in own if row["contender"] == name and row["GFLOP/s"] is not None)
                if points:
                    axes.plot(*zip(*points, strict=True), color=colour, marker=mark, markersize=5, label=name)
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.grid(True, alpha=0.3, which="both")
            axes.set_title(f"{dtype}, {rule}", fontsize=10)
            if axes.get_legend_handles_labels()[0]:
                axes.legend(fontsize=7)
    for axes in grid[-1]:
        axes.set_xlabel("tokens")
    for axes in (line[0] for line in grid):
        axes.set_ylabel("GFLOP/s attended")
    figure.suptitle(title or f"Attention of a whole sequence: H = {rows[0]['H']}, D = {widest}, {counted(most)}")
    return figure


@command
def main(argv: Sequence[str] | None = None) -> int:
    return plot_main(argv, "plot_peers.py", __doc__, "a table of peers.py", lambda text: parse_rows(text, ("dtype",)), draw)


if __name__ == "__main__":
    sys.exit(main())
