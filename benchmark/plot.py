#!/usr/bin/env python3
"""Draw the table of a benchmark script. The head of the table tells which figure is drawn.

    python benchmark/benchmark.py | python benchmark/plot.py -o benchmark.png

benchmark.py: speed-up over dense attention by sparsity, one line per block shape; for a capture, the median over layers and choosers.
roofline.py: the highest rate that the machine allows at each arithmetic intensity, and the rates that operations reach; hollow marks are
lower levels. peers.py: the rate of each library by length, for the largest head dimension and the most threads in the table. decode.py: the
share of the limit that each cell reaches; marks show other libraries, against the same limit. quest.py: time by context length next to the
byte model, and the speed-up over dense decode. nsa.py: time, speed-up over dense attention, shares of the parts, and memory, all by length;
at points without a mark, the time of dense attention was extrapolated with N^2. distributed.py: the bytes that the busiest rank receives,
and the imbalance of work, by number of ranks.

Reads the table from stdin and ignores all other lines, such as lines of a log. Several tables of one script are drawn as one.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Any

from _bench import parse_rows, positive, writable
from blitz_attn.plot import parse_table, plot_speedup

Row = dict[str, Any]

GREY = "#666666"
DTYPE_COLOURS = {"float32": "#0072B2", "float16": "#56B4E9", "bfloat16": "#009E73", "int8": "#E69F00", "float8_e4m3": "#D55E00"}
DTYPE_COLOURS |= {"q8_0": "#CC79A7", "q4_0": "#F0E442", "q4_1": "#000000"}


def new_figure(width: float, height: float, dpi: int) -> Any:
    from matplotlib.figure import Figure  # imported here, so that one sentence can say that matplotlib is missing

    return Figure(figsize=(width, height), dpi=dpi, layout="constrained")


def counted(threads: int) -> str:
    return f"{threads} thread{'s' if threads > 1 else ''}"


def lines(axes: Any, rows: list[Row], x: str, y: str, **style: Any) -> None:
    """Draws a curve through the rows that have the column `y`, in the order of `x`."""
    points = sorted((row[x], row[y]) for row in rows if row.get(y) is not None)
    if points:
        axes.plot(*zip(*points, strict=True), **{"markersize": 4, **style})


def finish(axes: Any, x: str, y: str, *, log: bool = True, title: str = "") -> None:
    """Sets the labels and scales of a panel whose x axis is logarithmic."""
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:.0f}")
    if log:
        axes.set_yscale("log")
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.set_title(title, fontsize=10)
    axes.grid(True, alpha=0.3, which="both")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8)


def distinct(rows: list[Row], column: str) -> list[Any]:
    """The values of a column, in the order of the table."""
    return list(dict.fromkeys(row[column] for row in rows))


# ---- benchmark.py ------------------------------------------------------------------------------------------------


def merged(rows: list[Row], keys: Sequence[str], columns: Sequence[str]) -> list[Row]:
    """One row for all rows that agree in `keys`. Each of its `columns` holds the median of that column in these rows."""
    groups: dict[tuple, list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in keys), []).append(row)
    return [group[0] | {name: statistics.median([row[name] for row in group]) for name in columns} for group in groups.values()]


def draw_benchmark(rows: list[Row], title: str | None, dpi: int) -> Any:
    """Speed-up by sparsity, a line per block shape. For a capture, lines show the median over layers and choosers."""
    if "Layer" in rows[0]:
        keys = ("B", "H", "s_q", "s_kv", "D", "block_shape", "sparsity")
        rows = merged(rows, keys, ("Ref_Latency_[usec]", "Our_Latency_[usec]"))
    return plot_speedup(rows, title=title, dpi=dpi)


# ---- roofline.py -------------------------------------------------------------------------------------------------

FAMILY_MARKS = {"dense": "o", "causal": "^", "sparse": "s", "backward": "v", "few": "D", "decode": "P", "select": "X", "small": "*"}
PEAKS = {"flops": "{} FMA", "tiles_sustained": "{} tiles, sustained", "tiles": "{} tiles"}  # tiles: until 29 November 2026
INTENSITIES = (0.0625, 4096.0)  # of the axis: operations begin at 0.5, and the names of the slopes stand to the left of them


def family(row: Row) -> str:
    """The name of a row's mark in the legend: both dense_D=64 and dense are called dense, for instance."""
    return next((name for name in FAMILY_MARKS if row["operation"].startswith(name)), "dense")


def draw_ceilings(axes: Any, limits: list[Row]) -> tuple[float, float]:
    """Draw the roofs. Returns the rate at which the lowest roof begins, and the highest peak."""
    peaks: dict[float, list[str]] = {}
    for row in limits:
        if row["what"] in PEAKS:  # levels with vectors of the same width have the same peak, except for noise
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


def draw_roofline(rows: list[Row], title: str | None, dpi: int) -> Any:
    """A panel for each number of threads. Slopes are the read bandwidths of caches and memory; horizontal lines are the peaks of levels."""
    limits = [row for row in rows if "what" in row]
    points = [row for row in rows if "flop/byte" in row]
    if not limits or not points:
        raise ValueError("expected limits and operations: the whole output of roofline.py")
    counts = sorted({row["threads"] for row in points})
    best = points[0]["level"]  # the table starts with the level in use
    figure = new_figure(8.5 * len(counts), 7, dpi)
    for axes, threads in zip(figure.subplots(1, len(counts), squeeze=False).flat, counts, strict=True):
        bottom, top = draw_ceilings(axes, [row for row in limits if row["threads"] == threads])
        own = [row for row in points if row["threads"] == threads]
        for row in own:
            style = {"color": DTYPE_COLOURS.get(row["dtype"], GREY), "fillstyle": "full" if row["level"] == best else "none"}
            axes.plot(row["flop/byte"], row["GFLOP/s"], FAMILY_MARKS[family(row)], markersize=7, **style)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlim(*INTENSITIES)
        rates = [row["GFLOP/s"] for row in own]  # pairs of bfloat16 can reach twice the peak
        axes.set_ylim(0.7 * min(bottom, *rates), 1.6 * max(top, *rates))
        axes.set_xlabel("arithmetic intensity (flop/byte, operands and results counted once)")
        axes.set_ylabel("GFLOP/s")
        axes.grid(True, alpha=0.2, which="both")
        axes.set_title(counted(threads), fontsize=10)
    from matplotlib.lines import Line2D

    keys = [Line2D([], [], color=DTYPE_COLOURS.get(x, GREY), marker="o", linestyle="", label=x) for x in distinct(points, "dtype")]
    families = dict.fromkeys(family(row) for row in points)
    keys += [Line2D([], [], color=GREY, marker=FAMILY_MARKS[x], linestyle="", label=x) for x in families]
    figure.axes[0].legend(handles=keys, fontsize=8, loc="lower right", ncols=2)
    figure.suptitle(title or "What the machine allows, and what the operations reach")
    return figure


# ---- peers.py ----------------------------------------------------------------------------------------------------

PEER_STYLES = {
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


def draw_peers(rows: list[Row], title: str | None, dpi: int) -> Any:
    """A column of panels for each dtype, and a row of panels for each rule and sparsity."""
    widest, most = max(row["D"] for row in rows), max(row["threads"] for row in rows)
    rows = [row for row in rows if row["D"] == widest and row["threads"] == most]
    dtypes = distinct(rows, "dtype")
    rules = list(dict.fromkeys(attended(row) for row in sorted(rows, key=lambda row: (row["rule"], row["sparsity"]))))
    figure = new_figure(5 * len(dtypes) + 1, 3.4 * len(rules) + 0.6, dpi)
    grid = figure.subplots(len(rules), len(dtypes), squeeze=False, sharex=True)
    for (down, rule), (across, dtype) in itertools.product(enumerate(rules), enumerate(dtypes)):
        own = [row for row in rows if row["dtype"] == dtype and attended(row) == rule]
        for name, (colour, mark) in PEER_STYLES.items():
            lines(
                grid[down][across], [row for row in own if row["contender"] == name], "S", "GFLOP/s", color=colour, marker=mark, label=name
            )
        finish(grid[down][across], "tokens", "GFLOP/s attended", title=f"{dtype}, {rule}")
    figure.suptitle(title or f"Attention of a whole sequence: H = {rows[0]['H']}, D = {widest}, {counted(most)}")
    return figure


# ---- decode.py ---------------------------------------------------------------------------------------------------

DECODE_PEER_MARKS = {"torch": "v", "onnxruntime": "s", "openvino": "x"}
SIZE_CLASSES = ("L2", "L3", "DRAM", "ragged")


def draw_decode(rows: list[Row], title: str | None, dpi: int) -> Any:
    """A panel for each size class and number of threads."""
    panels: dict[str, list[Row]] = {}
    for row in rows:
        panels.setdefault(f"{row['cell'] if row['cell'] in SIZE_CLASSES else 'models'}, {counted(row['threads'])}", []).append(row)
    across = min(2, len(panels))
    down = -(-len(panels) // across)
    figure = new_figure(9 * across, 3.6 * down + 0.6, dpi)
    grid = figure.add_gridspec(down + 1, across, height_ratios=[1.0] * down + [0.1])
    for number, (name, own) in enumerate(panels.items()):
        axes = figure.add_subplot(grid[number // across, number % across])
        for index, row in enumerate(own):
            style = {"hatch": None if row["Bound_by"] == "read" else "///", "edgecolor": "white"}
            axes.bar(index, row["Share_of_limit"], color=DTYPE_COLOURS.get(row["dtype"], GREY), **style)
            for peer, mark in DECODE_PEER_MARKS.items():
                taken = row.get(f"{peer}_[usec]")
                if taken:
                    axes.plot(index, row["Share_of_limit"] * row["Our_[usec]"] / taken, mark, color="black", markersize=4)
        small = {"fontsize": max(3, 8 - len(own) // 8), "rotation": 90 if len(own) > 14 else 0}
        axes.set_xticks(range(len(own)), [f"B{row['B']} G{row['H'] // row['H_kv']}\n{row['S']}" for row in own], **small)
        axes.set_ylim(0, max(1.05, *(row["Share_of_limit"] * 1.05 for row in own)))
        axes.axhline(1.0, color="#999999", linewidth=1)
        axes.set_title(name, fontsize=10)
        axes.set_ylabel("share of the limit")
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    keys: list[Any] = [Patch(color=DTYPE_COLOURS.get(dtype, GREY), label=dtype) for dtype in distinct(rows, "dtype")]
    keys.append(Patch(facecolor="#BBBBBB", hatch="///", edgecolor="white", label="arithmetic binds, not reads"))
    for peer, mark in DECODE_PEER_MARKS.items():
        if any(row.get(f"{peer}_[usec]") for row in rows):
            keys.append(Line2D([], [], color="black", marker=mark, linestyle="", label=peer))
    foot = figure.add_subplot(grid[down, :])  # a row for the legend alone: matplotlib 3.6 cannot place a figure's legend outside the axes
    foot.axis("off")
    foot.legend(handles=keys, loc="center", ncols=len(keys), fontsize=8)
    figure.suptitle(title or "Paged decode: share of what reads and arithmetic allow")
    return figure


# ---- quest.py ----------------------------------------------------------------------------------------------------

QUEST_COLOURS = {"Dense": "#000000", "Both": "#D55E00", "Select": "#0072B2", "Attend": "#009E73", "Build": "#CC79A7"}


def draw_quest(rows: list[Row], title: str | None, dpi: int) -> Any:
    figure = new_figure(14, 6, dpi)
    left, right = figure.subplots(1, 2)
    most, widest = max(row["threads"] for row in rows), max(row["blocks"] for row in rows)
    groups: dict[tuple[int, int], list[Row]] = {}
    for row in rows:  # a context with no more blocks than were asked for is drawn on the curve of `widest`, the most blocks
        row["Model_of_dense"] = row["Model_[usec]"] * row["Model_speedup"]
        groups.setdefault((row["threads"], row["blocks"] if row["blocks"] * row["page"] < row["context"] else widest), []).append(row)
    for number, ((threads, blocks), own) in enumerate(groups.items()):
        label = f"{blocks} blocks, {counted(threads)}"
        lines(right, own, "context", "Speedup", marker="os^Dv"[number % 5], label=label)
        if (threads, blocks) == (most, widest):
            for name, colour in QUEST_COLOURS.items():
                lines(left, own, "context", f"{name}_[usec]", color=colour, marker="o", label=name.lower())
            lines(left, own, "context", "Model_[usec]", color=QUEST_COLOURS["Both"], linestyle=":", label="byte model of both")
            lines(left, own, "context", "Model_of_dense", color=QUEST_COLOURS["Dense"], linestyle=":", label="byte model of dense")
            lines(right, own, "context", "Model_speedup", color="#999999", linestyle=":", label=f"byte model, {blocks} blocks")
    finish(left, "context (tokens)", "microseconds", title=f"one layer, {widest} blocks, {counted(most)}")
    finish(right, "context (tokens)", "speed-up of select and attend over dense decode")
    figure.suptitle(title or "Quest: {dtype}, H = {H} on {H_kv} KV heads, D = {D}".format(**rows[0]))
    return figure


# ---- nsa.py ------------------------------------------------------------------------------------------------------

PASSES = {"fwd": ("forward", "-", "o", "#0072B2"), "f+b": ("forward and backward", "--", "s", "#009E73")}
PARTS = {
    "compress": ("compression", "#999999"),
    "cmp": ("compressed branch", "#0072B2"),
    "select": ("selection", "#E69F00"),
    "slc": ("selected branch", "#D55E00"),
    "win": ("window", "#009E73"),
    "gate": ("gates", "#CC79A7"),
}


def draw_nsa(rows: list[Row], title: str | None, dpi: int) -> Any:
    """Draws the rows with the most threads."""
    threads = max(row["threads"] for row in rows)
    rows = [row for row in rows if row["threads"] == threads]
    run = [row for row in rows if row["Dense_by"] == "run"]  # points with an extrapolated time of dense attention have no marks
    figure = new_figure(13, 9, dpi)
    times, speedups, shares, memory = figure.subplots(2, 2).flat
    for tag, (what, line, mark, colour) in PASSES.items():
        dense, own = f"Dense_{tag}_[ms]", f"NSA_{tag}_[ms]"
        lines(times, rows, "N", dense, linestyle=line, color="#000000", label=f"dense, {what}")
        lines(times, run, "N", dense, linestyle="", marker=mark, color="#000000")
        lines(times, rows, "N", own, linestyle=line, marker=mark, color="#D55E00", label=f"nsa, {what}")
        lines(speedups, rows, "N", f"Speedup_{tag}", linestyle=line, color=colour, label=what)
        lines(speedups, run, "N", f"Speedup_{tag}", linestyle="", marker=mark, color=colour)
        lines(memory, rows, "N", f"{tag.capitalize()}_peak_[MiB]", linestyle=line, marker=mark, color=colour, label=what)
    speedups.axhline(1.0, color="#999999", linewidth=1)
    own = [row for row in rows if row.get("cmp") is not None]
    bottom = [0.0] * len(own)
    for part, (label, colour) in PARTS.items():
        heights = [row[part] for row in own]
        shares.bar([row["N"] for row in own], heights, [0.6 * row["N"] for row in own], bottom=bottom, color=colour, label=label)
        bottom = [a + b for a, b in zip(bottom, heights, strict=True)]
    finish(times, "tokens", "milliseconds (without a mark: grown with N²)")
    finish(speedups, "tokens", "speed-up over dense causal attention")
    finish(memory, "tokens", "largest resident memory (MiB)")
    finish(shares, "tokens", "share of the forward parts", log=False)
    if own:
        shares.legend(fontsize=8, ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1.0))  # above: bars fill the panel
    usual = "Native sparse attention, {mode}: {dtype}, H = {H} on {H_kv} KV heads, D = {D}, {threads}"
    figure.suptitle(title or usual.format(**{**rows[0], "threads": counted(threads)}))
    return figure


# ---- distributed.py ----------------------------------------------------------------------------------------------

DISPATCHES = {
    "cut": ("#D55E00", "-", "o"),
    "items": ("#0072B2", "--", "s"),
    "zigzag": ("#009E73", ":", "^"),
    "contiguous": ("#999999", "-.", "x"),
}


def draw_distributed(rows: list[Row], title: str | None, dpi: int) -> Any:
    """A column for each pattern, with bytes above and imbalance below."""
    patterns = distinct(rows, "pattern")
    figure = new_figure(3 * len(patterns), 6.5, dpi)
    grid = figure.subplots(2, len(patterns), sharey="row", squeeze=False)
    for axes, pattern in zip(grid.T, patterns, strict=True):
        for dispatch, (colour, line, mark) in DISPATCHES.items():
            own = [row for row in rows if row["pattern"] == pattern and row["dispatch"] == dispatch]
            for panel, name in zip(axes, ("Moved", "Imbalance"), strict=True):
                lines(panel, own, "P", name, linestyle=line, color=colour, marker=mark, label=dispatch)
        finish(axes[0], "", "", title=pattern.replace("_", " "))
        finish(axes[1], "ranks", "", log=False)
    grid[0, 0].set_ylabel("received by the busiest rank,\nover an all-gather of keys and values")
    grid[1, 0].set_ylabel("load of the busiest rank over the mean")
    figure.suptitle(title or "Bytes and imbalance of context-parallel attention, from plans")
    return figure


# ---- The command -------------------------------------------------------------------------------------------------

Draw = Callable[[list[Row], str | None, int], Any]

# For each script: the first columns of its tables, columns of which each row that is drawn has one, and the function that draws them.
FIGURES: dict[str, tuple[tuple[str, ...], tuple[str, ...], Draw]] = {
    "roofline": (("what", "operation"), ("what", "flop/byte"), draw_roofline),
    "peers": (("dtype",), ("contender",), draw_peers),
    "decode": (("cell",), ("Share_of_limit",), draw_decode),
    "quest": (("context",), ("Model_speedup",), draw_quest),
    "nsa": (("N",), ("Dense_by",), draw_nsa),
    "distributed": (("pattern",), ("Imbalance",), draw_distributed),
}


def table_of(text: str) -> tuple[str, list[Row], Draw]:
    """The script whose table is in `text`, its rows, and the function that draws them. Rows of benchmark.py need no head."""
    for script, (first_columns, columns, draw) in FIGURES.items():
        rows = [row for row in parse_rows(text, first_columns) if any(column in row for column in columns)]
        if rows:
            return script, rows, draw
    return "benchmark", parse_table(text), draw_benchmark


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", "-o", type=writable, help="picture to write (the name of the table's script and .png)")
    parser.add_argument("--title", help="title of the figure")
    parser.add_argument("--dpi", type=positive, default=120, help="resolution (%(default)s)")
    args = parser.parse_args(argv)
    script, rows, draw = table_of(sys.stdin.read())
    output = args.output or f"{script}.png"
    try:
        if not rows:
            raise ValueError("no row of a table that it can draw on stdin, so there is nothing to draw")
        draw(rows, args.title, args.dpi).savefig(output)
    except (ImportError, ValueError, OSError) as error:  # without matplotlib, its name is in the sentence
        print(f"plot.py: {error}", file=sys.stderr)
        return 1
    print(f"{output}: {len(rows)} rows drawn", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
