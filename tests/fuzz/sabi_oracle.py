"""Block lists by brute force: boolean masks over tokens and over blocks, by the definitions in the docstrings."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def diagonal(s_q: int, s_kv: int) -> np.ndarray:
    """(s_q, 1): the last key that each query sees in a causal call."""
    return np.arange(s_q)[:, None] + s_kv - s_q


def keys(s_kv: int) -> np.ndarray:
    return np.arange(s_kv)[None]


def blocks_of(tokens: np.ndarray, block_shape: Sequence[int]) -> np.ndarray:
    """The blocks with at least one True of a mask over tokens (..., s_q, s_kv)."""
    *lead, s_q, s_kv = tokens.shape
    rows, columns = -(-s_q // block_shape[0]), -(-s_kv // block_shape[1])
    mask = np.zeros((*lead, rows, columns), np.bool_)
    for r in range(rows):
        stretch = tokens[..., r * block_shape[0] : (r + 1) * block_shape[0], :].any(axis=-2)
        for c in range(columns):
            mask[..., r, c] = stretch[..., c * block_shape[1] : (c + 1) * block_shape[1]].any(axis=-1)
    return mask


def tokens_of(mask: np.ndarray, s_q: int, s_kv: int, block_shape: Sequence[int]) -> np.ndarray:
    return mask[..., np.arange(s_q) // block_shape[0], :][..., np.arange(s_kv) // block_shape[1]]


def rising(mask: np.ndarray, dtype: str | None = None, width: int | None = None) -> np.ndarray:
    """The list of a mask: rising columns, padded up to the width, which by default is that of the fullest row and at least 1."""
    dtype = dtype or "int32"
    width = max(1, int(mask.sum(axis=-1).max(initial=0))) if width is None else width
    lists = np.full((*mask.shape[:-1], width), 65535 if dtype == "uint16" else -1, dtype)
    for at in np.ndindex(mask.shape[:-1]):
        columns = np.flatnonzero(mask[at])
        lists[at][: len(columns)] = columns
    return lists


# ---- Masks over tokens of the builders ----------------------------------------------------------------------------


def within(s_q: int, s_kv: int, before: int, after: int) -> np.ndarray:
    """Keys at most this many tokens before and after the diagonal; -1 sets no bound."""
    away = keys(s_kv) - diagonal(s_q, s_kv)
    mask = np.ones(away.shape, np.bool_)
    if before >= 0:
        mask &= away >= -before
    if after >= 0:
        mask &= away <= after
    return mask


def document(lengths: Sequence[int], kv_lengths: Sequence[int], causal: bool) -> np.ndarray:
    mask = np.zeros((sum(lengths), sum(kv_lengths)), np.bool_)
    at = at_kv = 0
    for n, n_kv in zip(lengths, kv_lengths, strict=True):
        mask[at : at + n, at_kv : at_kv + n_kv] = within(n, n_kv, -1, 0 if causal else -1)
        at, at_kv = at + n, at_kv + n_kv
    return mask


def vertical_slash(s_q: int, s_kv: int, vertical: np.ndarray, slash: np.ndarray) -> np.ndarray:
    """A mask (B, H, s_q, s_kv) from positions and distances (B, H, n), whose leading axes broadcast."""
    before = diagonal(s_q, s_kv) - keys(s_kv)
    return (keys(s_kv)[..., None] == vertical[:, :, None, None]).any(axis=-1) | (before[..., None] == slash[:, :, None, None]).any(axis=-1)


def dilated(s_q: int, s_kv: int, block_shape: Sequence[int], stride: int, reach: int | None, causal: bool) -> np.ndarray:
    """Blocks by their distance from the block of the last key that the row's last query sees in a causal call."""
    rows, columns = -(-s_q // block_shape[0]), -(-s_kv // block_shape[1])
    last = np.minimum((np.arange(rows) + 1) * block_shape[0], s_q) - 1 + s_kv - s_q
    away = np.arange(columns) - last[:, None] // block_shape[1]
    mask = away % stride == 0
    if reach is not None:
        mask &= np.abs(away) <= reach
    return mask & (away <= 0) if causal else mask


def picture(mask: np.ndarray) -> list[str]:
    """Lines of a picture in which each block is a cell."""
    lines = []
    for at in np.ndindex(mask.shape[:-2]):
        grid = mask[at]
        lines.append(f"head {at}: {grid.shape[0]} x {grid.shape[1]} blocks, {100 * grid.mean():.1f}% kept")
        lines += ["".join("██" if x else "  " for x in row).rstrip() for row in grid]
    return lines
