#!/usr/bin/env python3
"""Draws pictures of the documents into docs/images: block lists by the library's own plot functions, and results of benchmark/results.

    python docs/pictures.py      # in a checkout that has been built in place
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
sys.path[1:1] = [str(ROOT / "docs" / "_ext"), str(ROOT / "benchmark")]

import numpy as np  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402
from results_table import MACHINES, RESULTS, read_results  # noqa: E402

from blitz_attn import plot, sabi, video  # noqa: E402
from plot import table_of  # noqa: E402  (benchmark/plot.py)

IMAGES = Path(__file__).resolve().parent / "images"
TOKENS = 4096
COLOURS = {"AMD EPYC, Zen 5 (AVX-512)": "#56B4E9", "AMD EPYC, Zen 4 (AVX-512)": "#0072B2", "Intel Xeon, L3 of 480 MiB (AMX)": "#D55E00"}


def save(figure: Figure, name: str) -> None:
    figure.savefig(IMAGES / name, metadata={"Software": None})


def speed() -> None:
    """README's figure: what a list saves, on three CPUs."""
    figure = Figure(figsize=(9, 3.4), dpi=100, layout="constrained")
    axes = figure.subplots()
    for index, (name, colour) in enumerate(COLOURS.items()):
        head, table = (results := read_results(f"{MACHINES[name]}/headline.txt")).head, results.tables[0]
        shares = {row["sparsity"]: float(row["Share_of_ideal"]) for row in table.rows() if row["block_shape"] == "64x64"}
        times = [(1 - float(sparsity)) / share for sparsity, share in shares.items()]
        places = np.arange(len(times)) + (index - 1) * 0.27
        bars = axes.bar(places, times, 0.25, color=colour, label=f"{name}, {head['date']}")
        axes.bar_label(bars, [f"{time:.2f}" for time in times], fontsize=9)
    for place, sparsity in enumerate(shares):
        label = "ideal: the share of the blocks" if not place else None
        axes.plot([place - 0.42, place + 0.42], [1 - float(sparsity)] * 2, color="black", linewidth=1, linestyle="--", label=label)
    axes.set_xticks(range(len(shares)), [f"{1 - float(sparsity):.0%} of the blocks" for sparsity in shares])
    axes.set_ylim(0, 0.9)
    axes.set_ylabel("time / time of dense attention")
    axes.set_title("Time of a call by how many blocks it keeps (118806 tokens, blocks of 64 x 64, bfloat16, two cores)", fontsize=10)
    axes.legend(loc="upper right", fontsize=8)
    save(figure, "speed.png")


def speed_up() -> None:
    """The figure of benchmark.py on a CPU with AMX tiles."""
    text = (RESULTS / MACHINES["Intel Xeon, Emerald Rapids (AMX)"] / "benchmark.txt").read_text(encoding="utf-8")
    _, rows, draw = table_of(text)
    save(draw(rows, "Blocks of 16 shapes, 8192 tokens, 3 heads, bfloat16, one thread, AMX", 80), "speed_up_amx.png")


def lists() -> None:
    """Lists of seven makers, and the union of two lists."""
    makers = {
        "causal": sabi.causal(TOKENS),
        "sliding_window": sabi.sliding_window(TOKENS, window=(512, 512)),
        "sink_local": sabi.sink_local(TOKENS, sink=256, local=512),
        "dilated": sabi.dilated(TOKENS, stride=4, causal=True),
        "document": sabi.document([1000, 1500, 400, 1196]),
        "vertical_slash": sabi.vertical_slash(TOKENS, vertical=[0, 1, 700, 2100], slash=[0, 900, 1800]),
        "random_with_frame": sabi.random_with_frame(TOKENS, sparsity=0.8),
        "union": sabi.union(sabi.sink_local(TOKENS, sink=128, local=256), sabi.random_with_frame(TOKENS, sparsity=0.9)),
    }
    figure = Figure(figsize=(12, 6.4), dpi=80, layout="constrained")
    for panel, (name, blocks) in zip(figure.subplots(2, 4).flat, makers.items(), strict=True):
        plot.plot_mask(blocks, TOKENS // 128, block_shape=(128, 128), ax=panel)
        panel.set_title(f"{name}: {sabi.density(blocks, TOKENS // 128):.0%} kept", fontsize=10)
        panel.label_outer()
    save(figure, "lists.png")


def shapes() -> None:
    """The same pairs of tokens, covered by blocks of three sizes."""
    tokens = 2048
    query, key = np.arange(tokens)[:, None], np.arange(tokens)[None, :]
    wanted = (key <= query) & ((query - key < 96) | (key < 16) | (np.abs(query - key - 700) < 24) | ((key > 900) & (key < 930)))
    figure = Figure(figsize=(12, 3.6), dpi=80, layout="constrained")
    for panel, size in zip(figure.subplots(1, 4), (0, 32, 64, 128), strict=True):
        if size:
            plot.plot_mask(sabi.from_token_mask(wanted, (size, size)), tokens // size, block_shape=(size, size), ax=panel)
            kept = sabi.density(sabi.from_token_mask(wanted, (size, size)), tokens // size)
            panel.set_title(f"blocks of {size} x {size}: {kept:.0%} kept", fontsize=10)
        else:
            panel.imshow(wanted, cmap="Blues", vmin=0, vmax=1.4, extent=(0, tokens, tokens, 0))
            panel.set_title(f"tokens that matter: {wanted.mean():.0%}", fontsize=10)
            panel.set_xlabel("keys (tokens)")
            panel.set_ylabel("queries (tokens)")
        panel.label_outer()
    save(figure, "shapes.png")


def rules() -> None:
    """A list, a rule, and both together, to the token."""
    tokens, size = 256, 64
    blocks = sabi.sliding_window(tokens, block_shape=(size, size), window=(64, 64))
    listed = sabi.to_token_mask(blocks, tokens, tokens, (size, size))[0, 0]
    query, key = np.arange(tokens)[:, None], np.arange(tokens)[None, :]
    causal = key <= query
    figure = Figure(figsize=(10, 3.6), dpi=80, layout="constrained")
    panels = figure.subplots(1, 3)
    masks = {"the list: whole blocks": listed, "causal=True: single tokens": causal, "both: what is attended": listed & causal}
    for panel, (title, mask) in zip(panels, masks.items(), strict=True):
        panel.imshow(mask, cmap="Blues", vmin=0, vmax=1.4, extent=(0, tokens, tokens, 0))
        panel.set_xticks(range(0, tokens + 1, size))
        panel.set_yticks(range(0, tokens + 1, size))
        panel.grid(True, color="#999999", linewidth=0.6)
        panel.set_title(title, fontsize=10)
        panel.set_xlabel("keys (tokens)")
        panel.set_ylabel("queries (tokens)")
        panel.label_outer()
    save(figure, "rules.png")


def cubes() -> None:
    """What one block of queries sees of a video, by two rules."""
    order = video.cube_order(video.Geometry([(21, 30, 52)]), (3, 5, 4))
    rules = {"sliding_tiles": (video.SlidingTiles((3, 3, 3)), 12), "radial": (video.Radial(0.3), 21)}
    for name, (rule, most) in rules.items():
        figure = plot.plot_cubes(order, video.blocks(order, rule, (60, 60)), max_frames=most, dpi=70)
        save(figure, f"cubes_{name}.png")


if __name__ == "__main__":
    IMAGES.mkdir(exist_ok=True)
    speed()
    speed_up()
    lists()
    shapes()
    rules()
    cubes()
