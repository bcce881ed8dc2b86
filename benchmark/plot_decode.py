#!/usr/bin/env python3
"""Draw a table of decode.py or quest.py.

    python benchmark/decode.py | python benchmark/plot_decode.py -o decode.png
    python benchmark/quest.py | python benchmark/plot_decode.py -o quest.png

Reads the table on stdin and takes nothing else from it. decode.py: the share of the limit that each cell reaches, a panel a size
class and number of threads; marks are the other libraries, held against the same limit. quest.py: time over context beside what the byte
model says, and the speed-up over dense decode.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from _bench import command
from _plots import Row, counted, parse_rows, plot_main

FIRST_COLUMNS = ("cell", "context")  # of decode.py and quest.py
COLOURS = {"float32": "#0072B2", "float16": "#56B4E9", "bfloat16": "#009E73", "int8": "#E69F00", "float8_e4m3": "#D55E00"}
PEER_MARKS = {"torch": "v", "onnxruntime": "s", "openvino": "x"}
SIZE_CLASSES = ("L2", "L3", "DRAM", "ragged")
CURVES = {"Dense": "#000000", "Both": "#D55E00", "Select": "#0072B2", "Attend": "#009E73", "Build": "#CC79A7"}


def panels(rows: list[Row]) -> dict[str, list[Row]]:
    """The rows of each panel of a decode figure, by its title: a panel a size class and number of threads."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        name = row["cell"] if row["cell"] in SIZE_CLASSES else "models"
        found.setdefault(f"{name}, {counted(row['threads'])}", []).append(row)
    return found


def bar_name(row: Row) -> str:
    return f"B{row['B']} G{row['H'] // row['H_kv']}\n{row['S']}"


def draw_decode(rows: list[Row], title: str | None, dpi: int) -> Any:
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    parts = list(panels(rows).items())
    across = min(2, len(parts))
    down = -(-len(parts) // across)
    figure = Figure(figsize=(9 * across, 3.6 * down + 0.6), dpi=dpi, layout="constrained")
    grid = figure.add_gridspec(down + 1, across, height_ratios=[1.0] * down + [0.1])
    for number, (name, own) in enumerate(parts):
        axes = figure.add_subplot(grid[number // across, number % across])
        for index, row in enumerate(own):
            style = {"hatch": None if row["Bound_by"] == "read" else "///", "edgecolor": "white"}
            axes.bar(index, row["Share_of_limit"], color=COLOURS.get(row["dtype"], "#666666"), **style)
            for peer, mark in PEER_MARKS.items():
                taken = row.get(f"{peer}_[usec]")
                if taken:
                    axes.plot(index, row["Share_of_limit"] * row["Our_[usec]"] / taken, mark, color="black", markersize=4)
        small = {"fontsize": max(3, 8 - len(own) // 8), "rotation": 90 if len(own) > 14 else 0}
        axes.set_xticks(range(len(own)), [bar_name(row) for row in own], **small)
        axes.set_ylim(0, max(1.05, *(row["Share_of_limit"] * 1.05 for row in own)))
        axes.axhline(1.0, color="#999999", linewidth=1)
        axes.set_title(name, fontsize=10)
        axes.set_ylabel("share of the limit")
    keys: list[Any] = [Patch(color=COLOURS.get(dtype, "#666666"), label=dtype) for dtype in dict.fromkeys(row["dtype"] for row in rows)]
    keys.append(Patch(facecolor="#BBBBBB", hatch="///", edgecolor="white", label="arithmetic binds, not reads"))
    keys += [
        Line2D([], [], color="black", marker=mark, linestyle="", label=peer)
        for peer, mark in PEER_MARKS.items()
        if any(row.get(f"{peer}_[usec]") for row in rows)
    ]
    foot = figure.add_subplot(grid[down, :])  # a row of its own: matplotlib 3.6 cannot place a figure's legend outside its axes
    foot.axis("off")
    foot.legend(handles=keys, loc="center", ncols=len(keys), fontsize=8)
    figure.suptitle(title or "Paged decode: share of what reads and arithmetic allow")
    return figure


def draw_quest(rows: list[Row], title: str | None, dpi: int) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 6), dpi=dpi, layout="constrained")
    left, right = figure.subplots(1, 2)
    most = max(row["threads"] for row in rows)
    groups: dict[tuple[int, int], list[Row]] = {}
    widest = max(row["blocks"] for row in rows)
    for row in rows:  # a context of fewer blocks than were asked for belongs to the smallest number that was
        groups.setdefault((row["threads"], row["blocks"] if row["blocks"] * row["page"] < row["context"] else widest), []).append(row)
    for number, ((threads, blocks), own) in enumerate(groups.items()):
        own = sorted(own, key=lambda row: row["context"])
        contexts = [row["context"] for row in own]
        if (threads, blocks) == (most, widest):
            for name, colour in CURVES.items():
                left.plot(contexts, [row[f"{name}_[usec]"] for row in own], color=colour, marker="o", markersize=4, label=name.lower())
            left.plot(contexts, [row["Model_[usec]"] for row in own], color=CURVES["Both"], linestyle=":", label="byte model of both")
            dense = [row["Model_[usec]"] * row["Model_speedup"] for row in own]
            left.plot(contexts, dense, color=CURVES["Dense"], linestyle=":", label="byte model of dense")
            left.set_title(f"one layer, {counted(threads)}, {blocks} blocks of {own[0]['page']}", fontsize=10)
            model = [row["Model_speedup"] for row in own]
            right.plot(contexts, model, color="#999999", linestyle=":", label=f"byte model, {blocks} blocks")
        label = f"{blocks} blocks, {counted(threads)}"
        right.plot(contexts, [row["Speedup"] for row in own], marker="os^Dv"[number % 5], markersize=4, label=label)
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel("context (tokens)")
        axes.grid(True, alpha=0.3, which="both")
        axes.legend(fontsize=8)
    left.set_ylabel("microseconds")
    right.set_ylabel("speed-up of select and attend over dense decode")
    figure.suptitle(title or "Quest: {dtype}, H = {H} on {H_kv} KV heads, D = {D}".format(**rows[0]))
    return figure


def draw(rows: list[Row], title: str | None, dpi: int) -> Any:
    return (draw_quest if "context" in rows[0] else draw_decode)(rows, title, dpi)


@command
def main(argv: Sequence[str] | None = None) -> int:
    source = "a table of decode.py or quest.py"
    return plot_main(argv, "plot_decode.py", __doc__, source, lambda text: parse_rows(text, FIRST_COLUMNS), draw)


if __name__ == "__main__":
    sys.exit(main())
