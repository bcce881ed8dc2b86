#!/usr/bin/env python3
"""A picture of real attention heads: where their softmax mass lies, and which blocks a chooser keeps.

    python benchmark/capture.py --layers 14 -o smollm2.npz      # queries and keys of a real model over a real text
    python examples/kept_blocks.py smollm2.npz --layer 14 --heads 0 3 7 -o kept_blocks.png
    python examples/kept_blocks.py smollm2.npz --layer 14 --heads 0 3 7 --density 0.12 --tokens 256 -o kept_tokens.png

The upper row shows the mean softmax mass of each block of keys for the queries of each block, on a logarithmic scale. The lower row shows
the blocks that `select_blocks_prefill` keeps at one density for the layer: heads whose mass is spread keep more blocks than heads whose
mass lies in few blocks. The titles give the share of the softmax mass that the kept blocks hold (`select.recall`). With --tokens, a third
row shows the tokens with the highest scores of each query, which an indexer that knew all scores would choose, and their share of the mass.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmark"))

import _bench  # noqa: F401  (finds the library of this checkout)
import blitz_attn
from blitz_attn import sabi, select
from capture import load_capture

SMALLEST = 1e-5  # smaller masses are drawn like this one


def masses_of(q: np.ndarray, k: np.ndarray, scale: float, block: int) -> np.ndarray:
    """The mean softmax mass of each block, (rows, columns), of causal attention of one head: q and k (S, D)."""
    count = -(-len(q) // block)
    masses = np.zeros((count, count))
    for row in range(count):
        first, end = row * block, min(len(q), (row + 1) * block)
        scores = scale * (q[first:end].astype(np.float64) @ k[:end].astype(np.float64).T)
        scores[np.arange(end) > np.arange(first, end)[:, None]] = -np.inf
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        shares = (weights / weights.sum(axis=1, keepdims=True)).mean(axis=0)
        masses[row, : row + 1] = np.add.reduceat(shares, np.arange(0, end, block))
    return masses


def tokens_of(q: np.ndarray, k: np.ndarray, scale: float, count: int) -> np.ndarray:
    """Lists of `count` tokens for each query, (1, H, S, count): the tokens with the highest scores of causal attention.

    An indexer takes max(0, x) of each head's product x. The score x itself is max(0, x) - max(0, -x). So there are two heads, q with
    weight 1 and -q with weight -1."""
    group, signs = q.shape[1] // k.shape[1], np.array([1, -1], q.dtype)
    weights = np.broadcast_to(signs, (1, q.shape[2], 2))
    heads = ((q[:, h, :, None] * signs[:, None], k[:, h // group], weights) for h in range(q.shape[1]))
    return np.stack([blitz_attn.select_tokens(*x, count, scale=scale, causal=True, ascending=True) for x in heads], axis=1)


def drawn_tokens(lists: np.ndarray, keys: int, cell: int) -> np.ndarray:
    """For each cell of `cell` queries by `cell` keys, the share of its pairs that the lists (S, count) name."""
    count = -(-keys // cell)
    query, _ = np.nonzero(lists >= 0)
    found = np.bincount(query // cell * count + lists[lists >= 0] // cell, minlength=count * count)
    return found.reshape(count, count) / cell**2


def draw(q: np.ndarray, k: np.ndarray, scale: float, heads: Sequence[int], density: float, block: int, tokens: int, title: str) -> Any:
    """The figure: q (1, H, S, D) and k (1, Hkv, S, D) of one layer."""
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure

    rules = {"causal": True, "scale": scale}
    lists = blitz_attn.select_blocks_prefill(q, k, density=density, block_shape=(block, block), **rules)
    kept = sabi.to_block_mask(lists, -(-k.shape[2] // block))[0]
    held = np.nanmean(select.recall(q, k, lists, **rules)[0], axis=1)
    figure = Figure(figsize=(1 + 3.1 * len(heads), 9.6 if tokens else 6.6), layout="constrained")
    axes = figure.subplots(3 if tokens else 2, len(heads), squeeze=False, sharex=True, sharey=True)
    extent = (0, k.shape[2], q.shape[2], 0)
    lower = np.tril(np.ones(kept.shape[1:], bool))
    for column, head in zip(axes.T, heads, strict=True):
        masses = masses_of(q[0, head], k[0, head // (q.shape[1] // k.shape[1])], scale, block)
        shown = np.where(lower, np.maximum(masses, SMALLEST), np.nan)
        image = column[0].imshow(shown, norm=LogNorm(SMALLEST, 1), cmap="magma", extent=extent, interpolation="nearest")
        column[1].imshow(np.where(lower, kept[head], np.nan), vmin=0, vmax=1.4, cmap="Blues", extent=extent, interpolation="nearest")
        column[0].set_title(f"head {head}", fontsize=10)
        share = kept[head].sum() / lower.sum()
        column[1].set_title(f"{100 * share:.0f} % of the blocks, {100 * held[head]:.1f} % of the mass", fontsize=9)
        column[-1].set_xlabel("key")
        column[-1].locator_params(axis="x", nbins=3)
    axes[0, 0].set_ylabel("query\nsoftmax mass of each block")
    axes[1, 0].set_ylabel("query\nblocks that are kept")
    if tokens:
        chosen = tokens_of(q, k, scale, tokens)
        held = np.nanmean(select.recall(q, k, sabi.BlockList(chosen, (1, 1)), **rules)[0], axis=1)
        share = np.minimum(np.arange(1, q.shape[2] + 1), tokens).sum() / (q.shape[2] * (q.shape[2] + 1) / 2)
        for below, head in zip(axes[2], heads, strict=True):
            cells = drawn_tokens(chosen[0, head], k.shape[2], 16)
            below.imshow(np.where(cells > 0, cells, np.nan), norm=LogNorm(1 / 256, 1), cmap="Blues", extent=extent, interpolation="nearest")
            below.set_title(f"{100 * share:.0f} % of the tokens, {100 * held[head]:.1f} % of the mass", fontsize=9)
        axes[2, 0].set_ylabel(f"query\nthe best {tokens} tokens of each query")
    figure.colorbar(image, ax=axes[0, :], shrink=0.8)
    figure.suptitle(title, fontsize=10)
    return figure


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("capture", type=Path, help="file that benchmark/capture.py wrote")
    parser.add_argument("--layer", type=int, help="the layer (the first in the file)")
    parser.add_argument("--heads", type=int, nargs="+", default=[0, 1, 2], help="query heads to draw (%(default)s)")
    parser.add_argument("--density", type=float, default=0.25, help="share of the layer's blocks to keep (%(default)s)")
    parser.add_argument("--block", type=int, default=64, help="tokens of a block (%(default)s)")
    parser.add_argument("--tokens", type=int, default=0, help="also draw so many single tokens for each query (none)")
    parser.add_argument("-o", "--output", type=Path, default=Path("kept_blocks.png"), help="picture to write (%(default)s)")
    args = parser.parse_args(argv)
    try:
        capture = load_capture(args.capture)
        layer = min(capture.layers) if args.layer is None else args.layer
        if layer not in capture.layers:
            raise ValueError(f"--layer: expected one of {sorted(capture.layers)}, got {layer}")
        q, k, _ = capture.layers[layer]
        wrong = [x for x in args.heads if not 0 <= x < q.shape[1]]
        if wrong:
            raise ValueError(f"--heads: expected heads from 0 to {q.shape[1] - 1}, got {wrong[0]}")
        title = f"{capture.model}, layer {layer}, {q.shape[2]} tokens: blocks of {args.block} x {args.block}, density {args.density:g}"
        draw(q, k, capture.scale, args.heads, args.density, args.block, args.tokens, title).savefig(args.output, dpi=110)
    except (OSError, ValueError) as error:
        print(f"kept_blocks.py: {error}", file=sys.stderr)
        return 1
    except ImportError as error:
        print(f"kept_blocks.py: needs matplotlib ({error})", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
