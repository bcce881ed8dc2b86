"""How much work a block list asks for: query-key pairs to the token, and what they cost in floating-point operations."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

import _bench  # noqa: F401  (finds the library of this checkout)
from blitz_attn._sabi.lists import signed


def pair_areas(s_q: int, s_kv: int, block_shape: Sequence[int], causal: bool = False) -> np.ndarray:
    """Query-key pairs in each block of the grid, (R, C) int64: blocks at the ends are cut, and blocks on the diagonal where `causal`."""
    block_q, block_kv = block_shape
    row_starts, column_starts = np.arange(0, s_q, block_q), np.arange(0, s_kv, block_kv)
    widths = np.minimum(block_kv, s_kv - column_starts)
    if not causal:
        return np.multiply.outer(np.minimum(block_q, s_q - row_starts), widths)
    areas = np.zeros((row_starts.size, column_starts.size), np.int64)
    for row, start in enumerate(row_starts):
        seen = np.arange(start, min(start + block_q, s_q)) + s_kv - s_q + 1  # keys that each query of the block sees
        areas[row] = np.clip(seen[:, None] - column_starts, 0, widths).sum(axis=0)
    return areas


def dense_pairs(s_q: int, s_kv: int, causal: bool = False) -> int:
    """Query-key pairs of one head of dense attention."""
    return int(pair_areas(s_q, s_kv, (s_q, s_kv), causal)[0, 0])


def kept_pairs(sabi: np.ndarray, s_q: int, s_kv: int, block_shape: Sequence[int], causal: bool = False) -> float:
    """Query-key pairs that a block list keeps, a head: the mean over the heads (and batches) that it lists."""
    areas = pair_areas(s_q, s_kv, block_shape, causal)
    columns = signed(sabi)
    picked = np.take_along_axis(np.broadcast_to(areas, (*columns.shape[:-2], *areas.shape)), np.maximum(columns, 0), axis=-1)
    return float(np.where(columns >= 0, picked, 0).sum(axis=(-1, -2)).mean())


def flops(pairs: float, head_dim: int, v_dim: int) -> float:
    """Floating-point operations of `pairs` query-key pairs: a multiply and an add a dimension, for the scores and for the values."""
    return 2.0 * (head_dim + v_dim) * pairs
