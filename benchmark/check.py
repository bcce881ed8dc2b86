"""Is an output right? Rows of it against the float64 reference, at a price that even the largest shapes can pay."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

import _bench  # noqa: F401  (finds the library of this checkout)
from blitz_attn import reference
from blitz_attn._sabi.lists import signed

RTOL, ATOL = 0.01, 0.001  # upstream's
ALL_ROWS_UP_TO = 1 << 23  # query-key pairs of all heads: below this every row is checked


def sample_rows(s_q: int, s_kv: int, heads: int, wanted: int, seed: int) -> np.ndarray:
    """Query rows to check: all of them where that is cheap (or `wanted` is 0), else the first, the last and random ones between."""
    if wanted == 0 or wanted >= s_q or heads * s_q * s_kv <= ALL_ROWS_UP_TO:
        return np.arange(s_q)
    inner = np.random.default_rng(seed).choice(np.arange(1, s_q - 1), size=max(wanted - 2, 0), replace=False)
    return np.unique(np.concatenate([[0, s_q - 1], inner]))


def reference_rows(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    sabi: np.ndarray | None,
    rows: np.ndarray,
    block_shape: Sequence[int],
    *,
    scale: float | None = None,
    causal: bool = False,
    dtype: str | None = None,
) -> np.ndarray:
    """float64 attention of some query rows of one batch entry and KV head: q (1, G, S, D), k, v (1, 1, S, D) -> (1, G, len(rows), D_v)."""
    s_q, s_kv = q.shape[2], k.shape[2]
    options = {"scale": scale, "dtype": dtype}
    if rows.size == s_q:
        return reference.block_sparse_attention(q, k, v, sabi, block_shape=block_shape, causal=causal, **options)
    picked = None if sabi is None else signed(sabi)[:, :, rows // block_shape[0]]
    if not causal:  # one query a block: the rows become a problem of their own
        return reference.block_sparse_attention(q[:, :, rows], k, v, picked, block_shape=(1, block_shape[1]), **options)
    parts = []
    for index, row in enumerate(rows):  # a causal row sees a prefix of the keys, so each is a problem of one query
        seen = row + s_kv - s_q + 1
        one = None if picked is None else picked[:, :, index : index + 1]
        if one is not None:
            one = -np.sort(-np.where(one * block_shape[1] < seen, one, -1))  # what lies ahead goes to the pads at the end
        parts.append(
            reference.block_sparse_attention(
                q[:, :, row : row + 1], k[:, :, :seen], v[:, :, :seen], one, block_shape=(1, block_shape[1]), **options
            )
        )
    return np.concatenate(parts, axis=2)


def outputs_equal(out, q, k, v, sabi, block_shape, *, wanted_rows: int, seed: int = 0, scale=None, causal=False, dtype=None) -> bool:
    """Whether `out` equals the float64 reference within upstream's tolerance on a sample of rows of every head.

    Parameters
    ----------
    out, q, k, v : numpy.ndarray
        (B, H, S, D) and (B, H_kv, S, D) views, of any dtype of the library.
    sabi : numpy.ndarray or None
        Block list (B or 1, H or 1, R, W).
    wanted_rows : int
        Query rows a head; small problems are checked whole, and 0 means all.
    seed : int
        Chooses the rows.
    """
    batch, heads, s_q = out.shape[:3]
    group = heads // k.shape[1]
    rows = sample_rows(s_q, k.shape[2], batch * heads, wanted_rows, seed)
    for b in range(batch):
        for g in range(k.shape[1]):  # one KV head at a time: float64 copies of all heads would be large
            part = slice(g * group, (g + 1) * group)
            listed = None
            if sabi is not None:
                listed = sabi[b % sabi.shape[0]][None]
                listed = listed if listed.shape[1] == 1 else listed[:, part]
            expected = reference_rows(
                q[b : b + 1, part], k[b : b + 1, g : g + 1], v[b : b + 1, g : g + 1], listed, rows, block_shape,
                scale=scale, causal=causal, dtype=dtype,
            )  # fmt: skip
            got = reference.to_float64(out[b : b + 1, part][:, :, rows], dtype)
            if not np.allclose(got, expected, rtol=RTOL, atol=ATOL):
                return False
    return True


def poison(out: np.ndarray) -> None:
    """Fill an output with NaN (all bits set), so that what a kernel does not write shows."""
    out.reshape(-1).view(np.uint8)[...] = 0xFF


def poisoned(out: np.ndarray) -> bool:
    """Whether any element still holds what `poison` wrote."""
    bits = out.reshape(-1).view(f"u{out.dtype.itemsize}")
    return bool((bits == np.iinfo(bits.dtype).max).any())
