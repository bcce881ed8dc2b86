"""float64 twins of attention over paged caches and of their quantisation. Public through `blitz_attn.reference`.

Each request's tokens are gathered from the pages that its table names, and nothing else is read; then the dense twin
attends to them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from .._arrays import dtype_name
from .dense import Rules, SequenceParts, add_biases, add_sinks, attend_head, begins_of, input_dtype, per_head, round_to, to_float64, written

# ---- Cache values -------------------------------------------------------------------------------------------------


def _e4m3_values() -> np.ndarray:
    """The 256 values of float8 e4m3 by their bits: sign, 4 bits of exponent, 3 of mantissa, bias 7, NaN but no infinity."""
    bits = np.arange(128)
    exponent, mantissa = bits >> 3, bits & 7
    positive = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0))
    positive[127] = np.nan
    return np.concatenate([positive, -positive])


E4M3_VALUES = _e4m3_values()
INT8_MAX, E4M3_MAX = 127.0, 448.0


def is_e4m3(array: np.ndarray, kv_dtype: Any = None) -> bool:
    """True where an array of a cache holds float8 e4m3 values, as bits or as an ml_dtypes array."""
    return array.dtype.name.startswith("float8_e4m3") or (array.dtype == np.uint8 and dtype_name(kv_dtype) in (None, "float8_e4m3"))


def cache_to_float64(values: Any, kv_dtype: Any = None) -> np.ndarray:
    """float64 copy of cache entries of any dtype; scales are not applied."""
    array = np.asarray(values)
    if is_e4m3(array, kv_dtype):
        return E4M3_VALUES[np.ascontiguousarray(array).view(np.uint8).reshape(array.shape)]
    if array.dtype == np.int8:
        return array.astype(np.float64)
    return to_float64(array, kv_dtype)


def quantize_kv(x, kv_dtype, *, dtype=None):
    """See `blitz_attn.quantize_kv`. The values have the dtype of the cache, the scales are float32."""
    name, wide = dtype_name(kv_dtype), to_float64(x, dtype)
    if name not in ("int8", "float8_e4m3"):
        raise ValueError(f"kv_dtype: expected int8 or float8_e4m3, got {name}")
    largest = np.abs(wide).max(axis=-1, initial=0.0)
    scale = (largest / (INT8_MAX if name == "int8" else E4M3_MAX)).astype(np.float32)
    scale = np.where(scale == 0, np.float32(1), scale)
    return quantized(wide, name, scale), scale


def quantized(wide: np.ndarray, name: str, scale: np.ndarray) -> np.ndarray:
    """The numbers of an 8-bit dtype nearest to ``wide / scale``, which are within its range."""
    scaled = wide / scale[..., None].astype(np.float64)
    if name == "int8":
        return np.clip(np.rint(scaled), -INT8_MAX, INT8_MAX).astype(np.int8)
    magnitude = np.minimum(np.abs(scaled), E4M3_MAX)
    above = np.clip(np.searchsorted(E4M3_VALUES[:127], magnitude), 1, 126)
    low, high = E4M3_VALUES[above - 1], E4M3_VALUES[above]
    up = (high - magnitude < magnitude - low) | ((high - magnitude == magnitude - low) & (above % 2 == 0))
    bits = np.where(up, above, above - 1).astype(np.uint8)
    return bits | (np.signbit(scaled).astype(np.uint8) << 7)


def dequantize_kv(values, scale):
    """See `blitz_attn.dequantize_kv`."""
    return cache_to_float64(values) * np.asarray(scale, np.float64)[..., None]


# ---- Gathering pages ----------------------------------------------------------------------------------------------


def tables_of(block_tables: Any, seq_lens: Any, page_size: int) -> list[tuple[np.ndarray, int]]:
    """(pages, tokens) of each request, from padded tables with lengths or from (indptr, indices, last_page_len)."""
    if isinstance(block_tables, tuple):
        indptr, indices, last = (np.asarray(x, np.int64) for x in block_tables)
        runs = [indices[a:b] for a, b in pairwise(indptr)]
        return [(pages, (len(pages) - 1) * page_size + int(n) if len(pages) else 0) for pages, n in zip(runs, last, strict=True)]
    tables = np.asarray(block_tables, np.int64)
    lengths = [int(n) for n in np.asarray(seq_lens)]
    if len(tables) != len(lengths):
        raise ValueError(f"seq_lens: expected {len(tables)} lengths, got {len(lengths)}")
    used = [-(-n // page_size) for n in lengths]
    if any(n < 0 or u > tables.shape[1] for n, u in zip(lengths, used, strict=True)):
        raise ValueError(f"seq_lens: expected lengths from 0 to what {tables.shape[1]} pages hold, got {lengths}")
    return [(row[:u], n) for row, u, n in zip(tables, used, lengths, strict=True)]


def by_token(cache: Any, kv_layout: str) -> np.ndarray:
    """View of a cache, or of its scales, with axes (pages, page_size, heads, ...)."""
    if kv_layout not in ("NHD", "HND"):
        raise ValueError(f"kv_layout: expected NHD or HND, got {kv_layout!r}")
    array = np.asarray(cache)
    return array if kv_layout == "NHD" else array.swapaxes(1, 2)


def scale_by_token(scale: Any, cache: np.ndarray, kv_layout: str) -> np.ndarray:
    """Scales with the axes (pages, page_size, heads) of `cache`, from such scales in `kv_layout`, one per head, or one."""
    return by_token(scale, kv_layout) if np.ndim(scale) == 3 else np.broadcast_to(np.asarray(scale, np.float32), cache.shape[:3])


def gather(cache: Any, scale: Any, kv_layout: str, kv_dtype: Any, pages: np.ndarray, tokens: int) -> np.ndarray:
    """(heads, tokens, dim) float64 values of one request's tokens."""
    view = by_token(cache, kv_layout)
    if pages.size and not 0 <= pages.min() <= pages.max() < len(view):
        raise ValueError(f"block_tables: expected pages from 0 to {len(view) - 1}, got {pages.tolist()}")

    def rows(x):
        picked = x[pages]
        return picked.reshape(-1, *x.shape[2:])[:tokens]

    values = cache_to_float64(rows(view), kv_dtype)
    if scale is not None:
        values *= rows(scale_by_token(scale, view, kv_layout)).astype(np.float64)[..., None]
    return values.swapaxes(0, 1)


@dataclass
class _Options:
    """Arguments that the paged twins have in common, beside their arrays."""

    scale: float | None
    kv_layout: str
    q_lens: Any
    window: int | None
    sinks: Any
    softcap: float | None
    k_scale: Any
    v_scale: Any
    q_begin: Any
    kv_ranges: Any
    attn_mask: Any
    alibi_slopes: Any
    dtype: Any
    kv_dtype: Any


def _requests(q: np.ndarray, k_cache: Any, v_cache: Any, block_tables: Any, seq_lens: Any, o: _Options) -> list[SequenceParts]:
    """The requests of a call, each with its own queries and gathered keys and values."""
    page_size = by_token(k_cache, o.kv_layout).shape[1]
    tables = tables_of(block_tables, seq_lens, page_size)
    q_lens = [1] * len(q) if o.q_lens is None else [int(n) for n in np.asarray(o.q_lens)]
    if len(q_lens) != len(tables) or sum(q_lens) != len(q):
        raise ValueError(f"q_lens: expected {len(tables)} lengths that add up to {len(q)}, got {q_lens}")
    parts = []
    begins = begins_of(o.q_begin, q_lens, [tokens for _, tokens in tables])
    kv_dtype = o.dtype if o.kv_dtype is None and np.asarray(k_cache).dtype == np.uint16 else o.kv_dtype
    for (pages, tokens), first, n, begin in zip(tables, np.cumsum([0, *q_lens]), q_lens, begins, strict=False):
        k = gather(k_cache, o.k_scale, o.kv_layout, kv_dtype, pages, tokens)
        v = gather(v_cache, o.v_scale, o.kv_layout, kv_dtype, pages, tokens)
        runs = None if o.kv_ranges is None else np.asarray(o.kv_ranges)[first : first + n]
        parts.append(SequenceParts(q[first : first + n].swapaxes(0, 1), k, v, n, tokens, begin, runs))
    return parts


def _list_of(selected: Any, counts: Any, batch: int, row: int, pages: int) -> np.ndarray:
    """One row of a selection as a (1, K) block list that is padded with -1."""
    entries = np.asarray(selected)[batch, row].astype(np.int64)
    ended = np.logical_or.accumulate(entries < 0) if counts is None else np.arange(entries.size) >= np.asarray(counts)[batch, row]
    kept = entries[~ended]
    if np.any((kept < 0) | (kept >= pages)) or len(set(kept.tolist())) != kept.size:
        raise ValueError(f"selected: expected blocks from 0 to {pages - 1}, each once, got {kept.tolist()}")
    return np.where(ended, -1, entries)[None]


def _run(q, k_cache, v_cache, block_tables, seq_lens, selected, counts, o: _Options, name: str, return_lse: bool, out: Any):
    """The common body of the twins; `name` is the precision that is imitated."""
    wide = to_float64(q, o.dtype)
    requests = _requests(wide, k_cache, v_cache, block_tables, seq_lens, o)
    add_biases(requests, o.attn_mask, o.alibi_slopes, input_dtype(q, o.dtype), longer=True)
    page_size, kv_heads = by_token(k_cache, o.kv_layout).shape[1:3]
    heads, group = wide.shape[1], wide.shape[1] // kv_heads
    rows = kv_heads if selected is None else np.shape(selected)[1]
    shared = heads // rows  # query heads that one matrix product serves
    scale = 1.0 / math.sqrt(wide.shape[2]) if o.scale is None else float(o.scale)
    rules = Rules(o.kv_ranges is None, None if o.window in (None, -1) else int(o.window), None)
    real = np.float64 if name == "float64" else np.float32
    outs = np.zeros((len(wide), heads, np.asarray(v_cache).shape[-1]))
    lses = np.full((len(wide), heads), -np.inf)
    first = 0
    with np.errstate(all="ignore"):
        for b, r in enumerate(requests):
            q_b, k_b, v_b = (x.astype(real) for x in (r.q, r.k, r.v))
            for row in range(rows):
                h = slice(row * shared, (row + 1) * shared)
                queries = q_b[h].swapaxes(0, 1).reshape(r.q_len * shared, q_b.shape[2])  # the heads of a token are adjacent
                listed = None if selected is None else _list_of(selected, counts, b, row, -(-r.kv_len // page_size))
                g = h.start // group
                o_row, lse_row = attend_head(
                    queries,
                    k_b[g],
                    v_b[g],
                    r,
                    listed,
                    (max(1, r.q_len), page_size),
                    rules,
                    scale,
                    name,
                    float(o.softcap or 0.0),
                    head=h.start,
                    shared=shared,
                )
                outs[first : first + r.q_len, h] = o_row.reshape(r.q_len, shared, o_row.shape[1])
                lses[first : first + r.q_len, h] = lse_row.reshape(r.q_len, shared)
            first += r.q_len
        if o.sinks is not None:
            outs, lses = add_sinks(outs, lses, per_head(o.sinks, "sinks"))
    out, lse_out = out if isinstance(out, tuple) else (out, None)
    return (written(outs, out), written(lses, lse_out)) if return_lse else written(outs, out)


# ---- Attention ----------------------------------------------------------------------------------------------------


def paged_attention(
    q,
    k_cache,
    v_cache,
    block_tables,
    seq_lens=None,
    *,
    scale=None,
    kv_layout="NHD",
    q_lens=None,
    window=None,
    sinks=None,
    softcap=None,
    k_scale=None,
    v_scale=None,
    q_begin=None,
    kv_ranges=None,
    attn_mask=None,
    alibi_slopes=None,
    kv_split=None,
    return_lse=False,
    out_dtype=None,
    out=None,
    dtype=None,
    kv_dtype=None,
    num_threads=None,
):
    """See `blitz_attn.paged_attention`."""
    rules = (window, sinks, softcap, k_scale, v_scale, q_begin, kv_ranges, attn_mask, alibi_slopes)
    options = _Options(scale, kv_layout, q_lens, *rules, dtype, kv_dtype)
    return _run(q, k_cache, v_cache, block_tables, seq_lens, None, None, options, "float64", return_lse, out)


def paged_select_attention(
    q,
    k_cache,
    v_cache,
    block_tables,
    seq_lens,
    selected,
    *,
    counts=None,
    scale=None,
    kv_layout="NHD",
    q_lens=None,
    window=None,
    sinks=None,
    softcap=None,
    k_scale=None,
    v_scale=None,
    q_begin=None,
    kv_ranges=None,
    attn_mask=None,
    alibi_slopes=None,
    kv_split=None,
    return_lse=False,
    out_dtype=None,
    out=None,
    dtype=None,
    kv_dtype=None,
    num_threads=None,
):
    """See `blitz_attn.paged_select_attention`."""
    rules = (window, sinks, softcap, k_scale, v_scale, q_begin, kv_ranges, attn_mask, alibi_slopes)
    options = _Options(scale, kv_layout, q_lens, *rules, dtype, kv_dtype)
    return _run(q, k_cache, v_cache, block_tables, seq_lens, selected, counts, options, "float64", return_lse, out)


def paged_same_precision(
    q,
    k_cache,
    v_cache,
    block_tables,
    seq_lens=None,
    selected=None,
    *,
    counts=None,
    scale=None,
    kv_layout="NHD",
    q_lens=None,
    window=None,
    sinks=None,
    softcap=None,
    k_scale=None,
    v_scale=None,
    q_begin=None,
    kv_ranges=None,
    attn_mask=None,
    alibi_slopes=None,
    kv_split=None,
    return_lse=False,
    out_dtype=None,
    out=None,
    dtype=None,
    kv_dtype=None,
    num_threads=None,
):
    """Paged attention as a plain array program computes it in the precision of the queries.

    What `dense_same_precision` is to attention over whole arrays. Cache entries of another dtype are widened to float32
    and not rounded to the queries' dtype.

    Parameters
    ----------
    q, k_cache, v_cache, block_tables, seq_lens, scale, kv_layout, q_lens, window, sinks, softcap, k_scale, v_scale, q_begin
        See `blitz_attn.paged_attention`.
    kv_ranges, attn_mask, alibi_slopes, kv_split
        See `blitz_attn.paged_attention`.
    selected, counts
        See `blitz_attn.paged_select_attention`; None attends to all pages.
    return_lse, out_dtype, out, dtype, kv_dtype, num_threads
        See `paged_attention` in this module.

    Returns
    -------
    out, lse : numpy.ndarray
        float64 arrays, holding the rounded values.

    Raises
    ------
    ValueError
        As `paged_select_attention`.

    Examples
    --------
    >>> import numpy as np
    >>> from blitz_attn import reference
    >>> pages = np.linspace(0, 1, 12, dtype=np.float32).reshape(3, 2, 1, 2)
    >>> call = np.ones((1, 1, 2), np.float32), pages, pages, np.array([[2, 0]]), np.array([3])
    >>> exact, rounded = (f(*call) for f in (reference.paged_attention, reference.paged_same_precision))
    >>> bool(0 < abs(exact - rounded).max() < 1e-6)
    True
    """
    name = dtype_name(dtype) if dtype is not None else dtype_name(getattr(q, "dtype", np.asarray(q).dtype))
    rules = (window, sinks, softcap, k_scale, v_scale, q_begin, kv_ranges, attn_mask, alibi_slopes)
    options = _Options(scale, kv_layout, q_lens, *rules, dtype, kv_dtype)
    exact = _run(q, k_cache, v_cache, block_tables, seq_lens, selected, counts, options, name, True, None)
    rounded = (round_to_float64(exact[0], name), exact[1])
    out, lse_out = out if isinstance(out, tuple) else (out, None)
    return (written(rounded[0], out), written(rounded[1], lse_out)) if return_lse else written(rounded[0], out)


def round_to_float64(x: np.ndarray, name: str) -> np.ndarray:
    """float64 values after one rounding to dtype `name` (sinks scale a result that was rounded before)."""
    return to_float64(round_to(x, name), name)
