"""Which blocks to keep for real queries and keys: a cheap guess (mean-pooled scores), the best possible choice, and the mass they hold.

All choosers keep the same number of blocks in every row (fewer where a row has fewer to give), among them the first block, the
diagonal one and the one before it, and look no further than the causal diagonal. Block rows and block columns have the same size.
"""

from __future__ import annotations

import numpy as np

FORCED = 3  # first, previous, diagonal


def pooled(x: np.ndarray, block: int) -> np.ndarray:
    """Mean over each block of tokens, (B, H, S, D) -> (B, H, ceil(S / block), D) float32; a cut last block counts its own tokens only."""
    starts = np.arange(0, x.shape[2], block)
    counts = np.diff([*starts, x.shape[2]])
    return np.add.reduceat(x.astype(np.float32), starts, axis=2) / counts[:, None].astype(np.float32)


def mean_pool_scores(q: np.ndarray, k: np.ndarray, block: int) -> np.ndarray:
    """Scores of all pairs of blocks from pooled queries and keys, (B, H, R, R): no scale, for only their order in a row counts."""
    group = q.shape[1] // k.shape[1]
    keys = np.repeat(pooled(k, block), group, axis=1)
    return pooled(q, block) @ keys.swapaxes(-1, -2)


def block_masses(q: np.ndarray, k: np.ndarray, scale: float, block: int) -> np.ndarray:
    """Exact softmax mass of each pair of blocks under causal attention, (B, H, R, R): summed over the block's queries, so that a
    row of blocks sums to its number of queries. Float32, a strip of queries at a time."""
    batch, heads, tokens, _ = q.shape
    group = heads // k.shape[1]
    starts = np.arange(0, tokens, block)
    masses = np.zeros((batch, heads, starts.size, starts.size), np.float32)
    for b, h in np.ndindex(batch, heads):
        queries, keys = q[b, h].astype(np.float32) * np.float32(scale), k[b, h // group].astype(np.float32)
        for row, start in enumerate(starts):
            stop = min(start + block, tokens)
            scores = queries[start:stop] @ keys[:stop].T
            ahead = np.arange(start, stop) > np.arange(start, stop)[:, None]
            scores[:, start:][ahead] = -np.inf
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            weights /= weights.sum(axis=1, keepdims=True)
            masses[b, h, row, : row + 1] = np.add.reduceat(weights, starts[: row + 1], axis=1).sum(axis=0)
    return masses


def coarser(masses: np.ndarray, factor: int) -> np.ndarray:
    """Masses of blocks `factor` times as large."""
    cuts = np.arange(0, masses.shape[-1], factor)
    return np.add.reduceat(np.add.reduceat(masses, cuts, axis=-1), cuts, axis=-2)


def blocks_a_row(rows: int, sparsity: float) -> int:
    """How many blocks each row keeps so that about 1 - sparsity of all causal blocks are kept; never fewer than the forced ones."""
    wanted = (1.0 - sparsity) * rows * (rows + 1) / 2
    totals = np.cumsum(np.arange(rows, 0, -1))  # k blocks a row, and r + 1 in the first rows, keep totals[k - 1]
    return max(FORCED, int(np.argmin(np.abs(totals - wanted))) + 1)


def choose(scores: np.ndarray, budget: int) -> np.ndarray:
    """Block list (B, H, R, W) int32 of the `budget` best causal blocks of each row, the forced ones first among them; -1 padded, rising."""
    rows = scores.shape[-1]
    row, column = np.arange(rows)[:, None], np.arange(rows)
    ranked = np.where((column == 0) | (column == row) | (column == row - 1), np.inf, scores)
    ranked = np.where(column > row, -np.inf, ranked)
    width = min(budget, rows)
    best = np.argpartition(-ranked, width - 1, axis=-1)[..., :width].astype(np.int32)
    best = np.sort(np.where(best > row, rows, best), axis=-1)  # what lies ahead of the diagonal goes to the end, as pads
    return np.where(best == rows, -1, best)


def causal_sparsity(sabi: np.ndarray) -> float:
    """Share of the causal blocks that a list drops: what was asked for, up to the whole numbers that a budget comes in."""
    rows = sabi.shape[-2]
    return 1.0 - float((sabi >= 0).sum(axis=(-1, -2)).mean()) / (rows * (rows + 1) / 2)


def kept_mass(masses: np.ndarray, sabi: np.ndarray) -> float:
    """Share of the softmax mass that a block list keeps, the mean over all queries and heads (recall)."""
    picked = np.take_along_axis(masses, np.maximum(sabi, 0).astype(np.int64), axis=-1)
    return float(np.where(sabi >= 0, picked, 0).sum(dtype=np.float64) / masses.sum(dtype=np.float64))
