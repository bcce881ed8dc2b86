#!/usr/bin/env python3
"""Draws the documents' pictures into docs/images: block lists by the library's own plot functions, and results of benchmark/results.

    python docs/pictures.py      # from a checkout that has been built in place
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(Path(__file__).resolve().parent / "_ext"))

import numpy as np  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402
from results_table import read_results  # noqa: E402

from blitz_attn import plot, sabi  # noqa: E402

IMAGES = Path(__file__).resolve().parent / "images"
ZEN5 = "amd-epyc-2-avx512-bf16-l1.48k-l2.1024k-l3.32768k"
TOKENS = 4096
COLOURS = {"0.50": "#56B4E9", "0.80": "#0072B2", "0.90": "#D55E00"}


def save(figure: Figure, name: str) -> None:
    figure.savefig(IMAGES / name, metadata={"Software": None})


def bars_of_shares(axes: Any) -> None:
    """What each block shape keeps of the ideal speed-up."""
    table = read_results(f"{ZEN5}/headline.txt").tables[0]
    shapes = [f"{size}x{size}" for size in (32, 64, 128, 256, 512, 1024)]
    shares = {(row["block_shape"], row["sparsity"]): float(row["Share_of_ideal"]) for row in table.rows()}
    places = np.arange(len(shapes))
    for index, (sparsity, colour) in enumerate(COLOURS.items()):
        ideal = 1 / (1 - float(sparsity))
        heights = [shares[shape, sparsity] for shape in shapes]
        label = f"{float(sparsity):.0%} of blocks dropped (ideal: about {ideal:.0f} x)"
        axes.bar(places + (index - 1) * 0.27, heights, 0.25, color=colour, label=label)
    axes.axhline(1.0, color="black", linewidth=1, linestyle="--")
    axes.set_xticks(places, [shape.replace("x", " x ") for shape in shapes])
    axes.set_ylim(0, 1.32)
    axes.set_xlabel("block shape (queries x keys)")
    axes.set_ylabel("speed-up over dense attention / ideal speed-up")
    axes.set_title("How much of the ideal speed-up remains\n(118806 tokens, bfloat16, two cores of a Zen 5, 2026-11-23)", fontsize=10)
    axes.legend(loc="upper left", fontsize=8)


def first() -> None:
    """README's picture: a list, and what lists gain."""
    figure = Figure(figsize=(11, 4.6), dpi=100, layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.4))
    blocks = sabi.sink_local(TOKENS, sink=128, local=1024)
    plot.plot_mask(blocks, TOKENS // 128, block_shape=(128, 128), ax=left)
    kept = sabi.density(blocks, TOKENS // 128)
    left.set_title(f"A list says which blocks are attended\n({kept:.0%} kept: a sink and a local band)", fontsize=10)
    bars_of_shares(right)
    save(figure, "overview.png")


def lists() -> None:
    """One list of each maker."""
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
    """The same tokens covered by blocks of three sizes."""
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


if __name__ == "__main__":
    IMAGES.mkdir(exist_ok=True)
    first()
    lists()
    shapes()
    rules()
