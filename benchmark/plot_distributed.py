#!/usr/bin/env python3
"""Draw the table of bytes of distributed.py: what the busiest rank receives, and the imbalance of work, over the number of ranks.

    python benchmark/distributed.py | python benchmark/plot_distributed.py -o distributed.png
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from _bench import command
from _plots import Row, parse_rows, plot_main

DISPATCHES = {
    "cut": ("#D55E00", "-", "o"),
    "items": ("#0072B2", "--", "s"),
    "zigzag": ("#009E73", ":", "^"),
    "contiguous": ("#999999", "-.", "x"),
}


def draw(rows: list[Row], title: str | None, dpi: int) -> Any:
    """A column for each pattern: bytes above, imbalance below."""
    from matplotlib.figure import Figure

    patterns = list(dict.fromkeys(row["pattern"] for row in rows))
    figure = Figure(figsize=(3 * len(patterns), 6.5), dpi=dpi, layout="constrained")
    axes = figure.subplots(2, len(patterns), sharex=True, sharey="row", squeeze=False)
    for column, pattern in enumerate(patterns):
        for dispatch, (colour, line, mark) in DISPATCHES.items():
            own = sorted((row for row in rows if row["pattern"] == pattern and row["dispatch"] == dispatch), key=lambda row: row["P"])
            for panel, name in zip(axes[:, column], ("Moved", "Imbalance"), strict=True):
                ranks, values = [row["P"] for row in own], [row[name] for row in own]
                panel.plot(ranks, values, line, color=colour, marker=mark, markersize=4, label=dispatch)
        axes[0, column].set_title(pattern.replace("_", " "))
        axes[1, column].set_xlabel("ranks")
        for panel in axes[:, column]:
            panel.set_xscale("log", base=2)
            panel.xaxis.set_major_formatter("{x:.0f}")
            panel.grid(True, alpha=0.3)
    axes[0, 0].set_yscale("log")
    axes[0, 0].set_ylabel("received by the busiest rank,\nover an all-gather of keys and values")
    axes[1, 0].set_ylabel("load of the busiest rank over the mean")
    axes[0, 0].legend(fontsize=8)
    figure.suptitle(title or "Bytes and imbalance of context-parallel attention, from plans")
    return figure


@command
def main(argv: Sequence[str] | None = None) -> int:
    return plot_main(argv, "plot_distributed.py", __doc__, "bytes of distributed.py", lambda text: parse_rows(text, ("pattern",)), draw)


if __name__ == "__main__":
    sys.exit(main())
