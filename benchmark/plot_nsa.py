#!/usr/bin/env python3
"""Draw a table of nsa.py: time, speed-up over dense attention, share of the parts and memory, over the length.

    python benchmark/nsa.py | python benchmark/plot_nsa.py -o nsa.png

Reads the table on stdin and takes nothing else from it. Dense times that were not measured but grown with N^2 are hollow marks, and so
are the speed-ups over them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from _bench import command
from _plots import Row, counted, parse_rows, plot_main

PASSES = {"fwd": ("forward", "-", "o"), "f+b": ("forward and backward", "--", "s")}
COLOURS = {"Dense": "#000000", "NSA": "#D55E00"}
PARTS = {
    "compress": ("compression", "#999999"),
    "cmp": ("compressed branch", "#0072B2"),
    "select": ("selection", "#E69F00"),
    "slc": ("selected branch", "#D55E00"),
    "win": ("window", "#009E73"),
    "gate": ("gates", "#CC79A7"),
}


def known(rows: list[Row], column: str) -> list[Row]:
    return [row for row in rows if row.get(column) is not None]


def draw_times(axes: Any, rows: list[Row]) -> None:
    for tag, (what, line, mark) in PASSES.items():
        for name, colour in COLOURS.items():
            column = f"{name}_{tag}_[ms]"
            own = known(rows, column)
            if not own:
                continue
            axes.plot([row["N"] for row in own], [row[column] for row in own], line, color=colour, label=f"{name.lower()}, {what}")
            for row in own:
                hollow = name == "Dense" and row["Dense_by"] != "run"
                axes.plot(row["N"], row[column], mark, color=colour, markersize=5, fillstyle="none" if hollow else "full")
    axes.set_ylabel("milliseconds (hollow: grown with N²)")
    axes.set_yscale("log")


def draw_speedups(axes: Any, rows: list[Row]) -> None:
    for (tag, (what, line, mark)), colour in zip(PASSES.items(), ("#0072B2", "#009E73"), strict=True):
        own = known(rows, f"Speedup_{tag}")
        if not own:
            continue
        axes.plot([row["N"] for row in own], [row[f"Speedup_{tag}"] for row in own], line, color=colour, label=what)
        for row in own:
            style = {"fillstyle": "full" if row["Dense_by"] == "run" else "none"}
            axes.plot(row["N"], row[f"Speedup_{tag}"], mark, color=colour, markersize=5, **style)
    axes.axhline(1.0, color="#999999", linewidth=1)
    axes.set_ylabel("speed-up over dense causal attention")
    axes.set_yscale("log")


def draw_shares(axes: Any, rows: list[Row]) -> None:
    own = known(rows, "cmp")
    bottom = [0.0] * len(own)
    for part, (label, colour) in PARTS.items():
        heights = [row[part] for row in own]
        axes.bar([row["N"] for row in own], heights, [0.6 * row["N"] for row in own], bottom=bottom, color=colour, label=label)
        bottom = [a + b for a, b in zip(bottom, heights, strict=True)]
    axes.set_ylim(0, 1)
    axes.set_ylabel("share of the forward parts")
    if own:
        axes.legend(fontsize=8, ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1.0))  # above: bars fill the panel


def draw_memory(axes: Any, rows: list[Row]) -> None:
    for (tag, (what, line, mark)), colour in zip(PASSES.items(), ("#0072B2", "#009E73"), strict=True):
        own = known(rows, f"{tag.capitalize()}_peak_[MiB]")
        if own:
            values = [row[f"{tag.capitalize()}_peak_[MiB]"] for row in own]
            axes.plot([row["N"] for row in own], values, line, marker=mark, color=colour, markersize=5, label=what)
    axes.set_ylabel("largest resident memory (MiB)")
    axes.set_yscale("log")


def draw(rows: list[Row], title: str | None, dpi: int) -> Any:
    """The figure of the rows with the most threads."""
    from matplotlib.figure import Figure

    threads = max(row["threads"] for row in rows)
    rows = sorted((row for row in rows if row["threads"] == threads), key=lambda row: row["N"])
    figure = Figure(figsize=(13, 9), dpi=dpi, layout="constrained")
    for axes, painter in zip(figure.subplots(2, 2).flat, (draw_times, draw_speedups, draw_shares, draw_memory), strict=True):
        painter(axes, rows)
        axes.set_xscale("log", base=2)
        axes.set_xlabel("tokens")
        axes.grid(True, alpha=0.3, which="both")
        if axes.get_legend_handles_labels()[0] and not axes.get_legend():
            axes.legend(fontsize=8)
    usual = "Native sparse attention, {mode}: {dtype}, H = {H} on {H_kv} KV heads, D = {D}, {threads}"
    figure.suptitle(title or usual.format(**{**rows[0], "threads": counted(threads)}))
    return figure


@command
def main(argv: Sequence[str] | None = None) -> int:
    return plot_main(argv, "plot_nsa.py", __doc__, "a table of nsa.py", lambda text: parse_rows(text, ("N",)), draw)


if __name__ == "__main__":
    sys.exit(main())
