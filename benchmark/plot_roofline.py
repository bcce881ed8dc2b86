#!/usr/bin/env python3
"""Draw the tables of roofline.py: what the machine allows at each arithmetic intensity, and where its operations stand.

    python benchmark/roofline.py | python benchmark/plot_roofline.py -o roofline.png

Reads the tables on stdin and takes nothing else from them. A panel a number of threads: slopes are the read bandwidths of the caches and of
memory, level lines the peaks of the instruction sets. Filled marks are operations at the highest level, hollow ones at a lower one.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from _bench import command
from _plots import Row, counted, parse_rows, plot_main

COLOURS = {"float32": "#0072B2", "float16": "#56B4E9", "bfloat16": "#009E73", "int8": "#E69F00"}
MARKS = {"dense": "o", "causal": "^", "sparse": "s", "backward": "v", "few": "D", "decode": "P", "select": "X", "small": "*"}
PEAKS = {"flops": "{} FMA", "tiles": "{} tiles"}
INTENSITIES = (0.0625, 4096.0)  # operations begin at 0.5; left of them stand the names of the slopes


def family(row: Row) -> str:
    """What a row's mark stands for: dense_D=64 and dense are both dense."""
    return next((name for name in MARKS if row["operation"].startswith(name)), "dense")


def draw_ceilings(axes: Any, limits: list[Row]) -> tuple[float, float]:
    """The roofs; returns where the lowest begins, and the highest."""
    peaks: dict[float, list[str]] = {}
    for row in limits:
        if row["what"] in PEAKS:  # levels whose vectors are equally wide have the same peak but for noise
            near = next((value for value in peaks if abs(value / row["value"] - 1) < 0.05), row["value"])
            peaks.setdefault(near, []).append(PEAKS[row["what"]].format(row["level"]))
    top = max(peaks)
    for value, names in peaks.items():
        axes.axhline(value, color="#444444", linewidth=1)
        text = f"{names[0] if len(names) == 1 else names[0] + ' and up'}, {value:.0f}"
        axes.text(INTENSITIES[1] * 0.9, value * 1.04, text, fontsize=7, ha="right", va="bottom", color="#444444")
    slopes: dict[float, list[str]] = {}
    for row in limits:
        if row["what"] == "read":
            near = next((value for value in slopes if abs(value / row["value"] - 1) < 0.15), row["value"])
            slopes.setdefault(near, []).append(row["level"])
    for value, names in slopes.items():
        ends = (INTENSITIES[0], min(top / value, INTENSITIES[1]))
        axes.plot(ends, [value * x for x in ends], color="#999999", linewidth=1, linestyle="--")
        place = (INTENSITIES[0] * 1.35, value * INTENSITIES[0] * 1.25)
        axes.text(*place, f"{', '.join(names)} {value:.0f} GB/s", fontsize=7, ha="left", va="top", color="#777777")
    return min(slopes) * INTENSITIES[0], top


def draw(rows: list[Row], title: str | None, dpi: int) -> Any:
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    limits = [row for row in rows if "what" in row]
    points = [row for row in rows if "operation" in row]
    if not limits or not points:
        raise ValueError("expected limits and operations: the whole output of roofline.py")
    counts = sorted({row["threads"] for row in points})
    best = points[0]["level"]  # the table starts with the level in use
    figure = Figure(figsize=(8.5 * len(counts), 7), dpi=dpi, layout="constrained")
    for axes, threads in zip(figure.subplots(1, len(counts), squeeze=False).flat, counts, strict=True):
        bottom, top = draw_ceilings(axes, [row for row in limits if row["threads"] == threads])
        own = [row for row in points if row["threads"] == threads]
        for row in own:
            style = {"color": COLOURS.get(row["dtype"], "#666666"), "fillstyle": "full" if row["level"] == best else "none"}
            axes.plot(row["flop/byte"], row["GFLOP/s"], MARKS[family(row)], markersize=7, **style)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlim(*INTENSITIES)
        rates = [row["GFLOP/s"] for row in own]  # those of pairs of bfloat16 can be twice the peak
        axes.set_ylim(0.7 * min(bottom, *rates), 1.6 * max(top, *rates))
        axes.set_xlabel("arithmetic intensity (flop/byte, operands and results counted once)")
        axes.set_ylabel("GFLOP/s")
        axes.grid(True, alpha=0.2, which="both")
        axes.set_title(counted(threads), fontsize=10)
    used = {"dtype": dict.fromkeys(row["dtype"] for row in points), "family": dict.fromkeys(family(row) for row in points)}
    keys = [Line2D([], [], color=COLOURS.get(name, "#666666"), marker="o", linestyle="", label=name) for name in used["dtype"]]
    keys += [Line2D([], [], color="#666666", marker=MARKS[name], linestyle="", label=name) for name in used["family"]]
    figure.axes[0].legend(handles=keys, fontsize=8, loc="lower right", ncols=2)
    figure.suptitle(title or "What the machine allows, and what the operations reach")
    return figure


@command
def main(argv: Sequence[str] | None = None) -> int:
    return plot_main(
        argv, "plot_roofline.py", __doc__, "a table of roofline.py", lambda text: parse_rows(text, ("what", "operation")), draw
    )


if __name__ == "__main__":
    sys.exit(main())
