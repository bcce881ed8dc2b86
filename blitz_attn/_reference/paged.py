"""float64 twins of attention over paged caches and of their quantisation. Public through `blitz_attn.reference`.

Each request's tokens are gathered from the pages that its table names, and nothing else is read. Then the queries of the request attend to
these tokens as in a dense call.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from .._arrays import choice, dtype_name
from .._paged import call as operation
from . import attend as core
from .common import delivered, lengths, name_of, per_head, real_of, rounding_of, to_float64, with_options_of
from .dense import add_biases, begins_of

__all__ = [
    "dequantize_kv", "dequantize_rows", "paged_attention", "paged_same_precision", "paged_select_attention", "quantize_kv", "quantize_rows",
]  # fmt: skip

# ---- Cache values -------------------------------------------------------------------------------------------------


def _e4m3_values() -> np.ndarray:
    """The 256 values of float8 e4m3 by their bits: sign, 4 bits of exponent, 3 of mantissa, bias 7, NaN but no infinity."""
    bits = np.arange(128)
    exponent, mantissa = bits >> 3, bits & 7
    positive = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0))
    positive[127] = np.nan
    return np.concatenate([positive, -positive])


E4M3_VALUES = _e4m3_values()
LARGEST = {"int8": 127.0, "float8_e4m3": 448.0}


def is_e4m3(array: np.ndarray, kv_dtype: Any = None) -> bool:
    """True where an array of a cache holds float8 e4m3 values, as bits or as an ml_dtypes array."""
    named = None if isinstance(kv_dtype, tuple) else dtype_name(kv_dtype)
    return array.dtype.name.startswith("float8_e4m3") or (array.dtype == np.uint8 and named in (None, "float8_e4m3"))


def cache_to_float64(values: Any, kv_dtype: Any = None) -> np.ndarray:
    """float64 copy of cache entries of any dtype, before they are multiplied by `k_scale` or `v_scale`."""
    array = np.asarray(values)
    if array.dtype == np.uint8 and kv_dtype in CELL_BYTES:
        return dequantize_rows(array, kv_dtype)
    if is_e4m3(array, kv_dtype):
        return E4M3_VALUES[np.ascontiguousarray(array).view(np.uint8).reshape(array.shape)]
    return array.astype(np.float64) if array.dtype == np.int8 else to_float64(array, kv_dtype)


def quantize_kv(x, kv_dtype, *, dtype=None):
    """See `blitz_attn.quantize_kv`. The values have the dtype of the cache, the scales are float32."""
    name, wide = choice(dtype_name(kv_dtype), "kv_dtype", tuple(LARGEST)), to_float64(x, dtype)
    scale = (np.abs(wide).max(axis=-1, initial=0.0) / LARGEST[name]).astype(np.float32)
    scale = np.where(scale == 0, np.float32(1), scale)
    return quantized(wide, name, scale), scale


def quantized(wide: np.ndarray, name: str, scale: np.ndarray) -> np.ndarray:
    """``wide / scale``, clipped to the range of an 8-bit dtype and rounded to its nearest number (ties to even); float8 as bits."""
    scaled = wide / scale[..., None].astype(np.float64)
    if name == "int8":
        return np.clip(np.rint(scaled), -LARGEST[name], LARGEST[name]).astype(np.int8)
    magnitude = np.minimum(np.abs(scaled), LARGEST[name])
    above = np.clip(np.searchsorted(E4M3_VALUES[:127], magnitude), 1, 126)
    low, high = E4M3_VALUES[above - 1], E4M3_VALUES[above]
    up = (high - magnitude < magnitude - low) | ((high - magnitude == magnitude - low) & (above % 2 == 0))
    return np.where(up, above, above - 1).astype(np.uint8) | (np.signbit(scaled).astype(np.uint8) << 7)


def dequantize_kv(values, scale):
    """See `blitz_attn.dequantize_kv`."""
    return cache_to_float64(values) * np.asarray(scale, np.float64)[..., None]


CELL_BYTES = {"q8_0": 34, "q4_0": 18, "q4_1": 20}  # bytes that hold 32 numbers


def pair_of(kv_dtype: Any) -> tuple[Any, Any]:
    """The formats of keys and of values."""
    return tuple(kv_dtype) if isinstance(kv_dtype, (tuple, list)) else (kv_dtype, kv_dtype)


def _quotients(x: np.ndarray, d: np.ndarray) -> np.ndarray:
    """Products in float64 of x and the float32 reciprocals of d; 0 where d has no finite reciprocal."""
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.float32(1) / d
    return x.astype(np.float64) * np.where((d == 0) | np.isinf(inverse), np.float32(0), inverse)


def quantize_rows(x, kv_dtype, *, dtype=None):
    """See `blitz_attn.quantize_rows`."""
    name = choice(kv_dtype, "kv_dtype", tuple(CELL_BYTES))
    wide = to_float64(x, dtype).astype(np.float32)
    cells = wide.reshape(*wide.shape[:-1], wide.shape[-1] // 32, 32)
    if name == "q8_0":
        d = np.abs(cells).max(axis=-1, keepdims=True, initial=0) / np.float32(127)
        quotients = _quotients(cells, d).astype(np.float32)
        heads, numbers = [d], (np.trunc(np.abs(quotients) + 0.5) * np.sign(quotients)).astype(np.int8)  # halves away from 0
    elif name == "q4_0":
        first = np.abs(cells).argmax(axis=-1)[..., None] if cells.size else np.zeros((*cells.shape[:-1], 1), int)
        d = (np.take_along_axis(cells, first, axis=-1) + np.float32(0)) / np.float32(-8)  # + 0 turns -0 into 0
        heads, numbers = [d], np.minimum(15, np.floor(_quotients(cells, d) + 8.5)).astype(np.uint8)
    else:
        first = cells.argmin(axis=-1)[..., None] if cells.size else np.zeros((*cells.shape[:-1], 1), int)
        low = np.take_along_axis(cells, first, axis=-1)  # argmin takes the first of 0 and -0, which are equal, and so does argmax below
        last = cells.argmax(axis=-1)[..., None] if cells.size else first
        d = (np.take_along_axis(cells, last, axis=-1) - low) / np.float32(15)
        quotients = _quotients(cells - low, d).astype(np.float32)
        heads, numbers = [d, low], np.minimum(15, np.floor(quotients + np.float32(0.5))).astype(np.uint8)
    if name != "q8_0":
        numbers = numbers[..., :16] | numbers[..., 16:] << 4
    halves = [h.astype(np.float16).view(np.uint8) for h in heads]
    return np.concatenate([*halves, numbers.view(np.uint8)], axis=-1).reshape(*wide.shape[:-1], wide.shape[-1] // 32 * CELL_BYTES[name])


def dequantize_rows(rows, kv_dtype):
    """See `blitz_attn.dequantize_rows`."""
    name, array = choice(kv_dtype, "kv_dtype", tuple(CELL_BYTES)), np.asarray(rows)
    count = array.shape[-1] // CELL_BYTES[name]
    cells = array.reshape(*array.shape[:-1], count, CELL_BYTES[name])
    d, m = (np.ascontiguousarray(cells[..., i : i + 2]).view(np.float16).astype(np.float64) for i in (0, 2))
    with np.errstate(invalid="ignore"):
        if name == "q8_0":
            values = d * np.ascontiguousarray(cells[..., 2:]).view(np.int8)
        else:
            packed = cells[..., 4 if name == "q4_1" else 2 :].astype(np.int64)
            numbers = np.concatenate([packed % 16, packed // 16], axis=-1)
            values = d * (numbers - 8) if name == "q4_0" else d * numbers + m
    return values.reshape(*array.shape[:-1], count * 32)


# ---- Gathering pages ----------------------------------------------------------------------------------------------


def tables_of(block_tables: Any, seq_lens: Any, page_size: int) -> list[tuple[np.ndarray, int]]:
    """(pages, tokens) of each request, from padded tables with lengths or from (indptr, indices, last_page_len)."""
    if isinstance(block_tables, tuple):
        indptr, indices, last = (np.asarray(x, np.int64) for x in block_tables)
        runs = [indices[a:b] for a, b in pairwise(indptr)]
        return [(pages, (len(pages) - 1) * page_size + int(n) if len(pages) else 0) for pages, n in zip(runs, last, strict=True)]
    tables = np.asarray(block_tables, np.int64)
    tokens = lengths("seq_lens", seq_lens, [tables.shape[1] * page_size] * len(tables))
    return [(row[: -(-n // page_size)], n) for row, n in zip(tables, tokens, strict=True)]


def by_token(cache: Any, kv_layout: str) -> np.ndarray:
    """View of a cache, or of its scales, with axes (pages, page_size, heads, ...)."""
    array = np.asarray(cache)
    return array if choice(kv_layout, "kv_layout", ("NHD", "HND")) == "NHD" else array.swapaxes(1, 2)


def scale_by_token(scale: Any, cache: np.ndarray, kv_layout: str) -> np.ndarray:
    """Scales broadcast to the axes (pages, page_size, heads) of `cache`. `scale` has a number for each token and head (axes in the order
    of `kv_layout`), one per head, or one in all."""
    return by_token(scale, kv_layout) if np.ndim(scale) == 3 else np.broadcast_to(np.asarray(scale, np.float32), cache.shape[:3])


def gather(cache: Any, scale: Any, kv_layout: str, kv_dtype: Any, pages: np.ndarray, tokens: int) -> np.ndarray:
    """(heads, tokens, dim) float64 values of one request's tokens."""
    view = by_token(cache, kv_layout)

    def rows(x: np.ndarray) -> np.ndarray:
        return x[pages].reshape(-1, *x.shape[2:])[:tokens]

    values = cache_to_float64(rows(view), kv_dtype)
    if scale is not None:
        values *= rows(scale_by_token(scale, view, kv_layout)).astype(np.float64)[..., None]
    return values.swapaxes(0, 1)


# ---- Attention ----------------------------------------------------------------------------------------------------


def _requests(q: np.ndarray, k_cache: Any, v_cache: Any, block_tables: Any, seq_lens: Any, o: dict[str, Any]) -> list[core.Sequence]:
    """The requests of a call, each with its own queries and gathered keys and values."""
    tables = tables_of(block_tables, seq_lens, by_token(k_cache, o["kv_layout"]).shape[1])
    q_lens = [1] * len(q) if o["q_lens"] is None else [int(n) for n in np.asarray(o["q_lens"])]
    kv_dtype = o["dtype"] if o["kv_dtype"] is None and np.asarray(k_cache).dtype == np.uint16 else o["kv_dtype"]
    bounds = {"left": None if o["window"] in (None, -1) else int(o["window"]), "right": 0 if o["kv_ranges"] is None else None}
    requests = []
    begins = begins_of(o["q_begin"], q_lens, [tokens for _, tokens in tables])
    for (pages, tokens), end, n, begin in zip(tables, np.cumsum(q_lens), q_lens, begins, strict=True):
        both = zip((k_cache, v_cache), ("k_scale", "v_scale"), pair_of(kv_dtype), strict=True)
        k, v = (gather(x, o[name], o["kv_layout"], of, pages, tokens) for x, name, of in both)
        ranges = None if o["kv_ranges"] is None else np.asarray(o["kv_ranges"])[end - n : end]
        k, v = (x.astype(q.dtype) for x in (k, v))
        requests.append(core.sequence(q[end - n : end].swapaxes(0, 1), k, v, begin=begin, ranges=ranges, **bounds))
    return requests


def _attend(name: str, q: Any, k_cache: Any, v_cache: Any, block_tables: Any, seq_lens: Any, selected: Any, o: dict[str, Any]) -> Any:
    """Attention as a program in dtype `name` computes it."""
    wide: np.ndarray = to_float64(q, o["dtype"]).astype(real_of(name))
    requests = _requests(wide, k_cache, v_cache, block_tables, seq_lens, o)
    add_biases(requests, o["attn_mask"], o["alibi_slopes"], name_of(q, o["dtype"]), longer=True)
    if selected is not None:
        lists = np.asarray(selected).astype(np.int64)
        behind = lists < 0 if o["counts"] is None else np.arange(lists.shape[2]) >= np.asarray(o["counts"])[..., None]
        lists[np.logical_or.accumulate(behind, axis=-1)] = -1
        size, first = o["selected_size"], 0
        if size is None:
            size = by_token(k_cache, o["kv_layout"]).shape[1]
            for r, rows in zip(requests, lists, strict=True):
                r.kept, r.block_shape = core.named(rows, -(-r.kv_len // size))[:, None], (max(1, r.q_len), size)
        else:
            for r in requests:
                rows = lists[first : first + r.q_len].swapaxes(0, 1)
                r.kept, r.block_shape = core.named(rows, -(-r.kv_len // size)), (1, size)
                first += r.q_len
    rules, sinks = core.ScoreRules.of(o), per_head(o["sinks"], "sinks")
    results = [core.attend(r, rules, rounding_of(name), sinks) for r in requests]
    v_cell = CELL_BYTES.get(pair_of(o["kv_dtype"])[1])
    v_dim = np.shape(v_cache)[-1] // v_cell * 32 if v_cell else np.shape(v_cache)[-1]
    outs = np.zeros((*wide.shape[:2], v_dim)), np.zeros(wide.shape[:2])
    for whole, parts in zip(outs, zip(*results, strict=True), strict=False):
        whole[...] = np.concatenate([x.swapaxes(0, 1) for x in parts])
    return delivered(*outs, o)


@with_options_of(operation.paged_select_attention)
def paged_select_attention(q, k_cache, v_cache, block_tables, seq_lens, selected, **options):
    """See `blitz_attn.paged_select_attention`."""
    return _attend("float64", q, k_cache, v_cache, block_tables, seq_lens, selected, options)


@with_options_of(paged_select_attention, without="counts selected_size")
def paged_attention(q, k_cache, v_cache, block_tables, seq_lens=None, **options):
    """See `blitz_attn.paged_attention`."""
    return _attend("float64", q, k_cache, v_cache, block_tables, seq_lens, None, options)


@with_options_of(paged_select_attention)
def paged_same_precision(q, k_cache, v_cache, block_tables, seq_lens=None, selected=None, **options):
    """Paged attention as a plain array program computes it in the precision of the queries.

    It is to paged attention what `dense_same_precision` is to attention over whole arrays. Cache entries of another dtype are widened, and
    not rounded to the queries' dtype.

    Parameters
    ----------
    q, k_cache, v_cache, block_tables, seq_lens, scale, kv_layout, q_lens, window, sinks, softcap, k_scale, v_scale, q_begin
        See `blitz_attn.paged_attention`.
    kv_ranges, attn_mask, alibi_slopes, kv_split
        See `blitz_attn.paged_attention`.
    selected, counts, selected_size
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
    return _attend(name_of(q, options["dtype"]), q, k_cache, v_cache, block_tables, seq_lens, selected, options)
