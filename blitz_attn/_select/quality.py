"""The share of the softmax mass that a block list keeps, and the distance of its output from the output of dense attention."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import _arrays
from .._block_sparse.call import block_sparse_attention
from .._float_mode import in_usual_mode
from .._formats import widened
from .._names import LAYOUTS, Layout
from .._sabi.block_list import block_shape_for
from .._sabi.lists import with_four_axes
from .options import JudgingOptions, Options

if TYPE_CHECKING:
    from .._types import Array, ArrayLike, DType, Integers, IntOrIntegers

__all__ = ["output_error", "recall"]


def _spans(layout: str, batch: int, tokens: int, q_lens: Any, cu_seqlens_q: Any) -> list[tuple[int, int, int]]:
    """For each sequence: its batch entry in the arrays, and there the place of its first valid query and the place after its last."""
    if layout == "TND":
        cuts = _arrays.integers(cu_seqlens_q, "cu_seqlens_q").tolist()
        return [(0, a, b) for a, b in pairwise(cuts)]
    lens = [tokens] * batch if q_lens is None else _arrays.integers(q_lens, "q_lens").tolist()
    return [(b, 0, n) for b, n in enumerate(lens)]


def of_heads(x: Any, layout: str, heads: int, dtype: Any) -> np.ndarray:
    """A result as float64 (B, H, S, Dv), whatever its layout and kind of array; B is 1 for TND. `dtype` is the argument of the call."""
    array, name = _arrays.host(x, "out", _arrays.dtype_name(dtype))
    array = widened(array, name).astype(np.float64)
    if layout == "TND":
        return array.swapaxes(0, 1)[None]
    if layout == "BSH":
        array = array.reshape(*array.shape[:2], heads, -1)
    return array if layout == "BNSD" else array.swapaxes(1, 2)


def _of_queries(lse: Any, layout: str) -> np.ndarray:
    """Log-sum-exps (B, H, S) as float64; B is 1 for TND."""
    array = np.asarray(_arrays.host(lse, "lse")[0], np.float64)
    return array.swapaxes(0, 1)[None] if layout == "TND" else array


def _skipped(rows: int, every: int) -> np.ndarray:
    """Whether a row of blocks is not looked at, for each row: (rows,) bool."""
    return np.arange(rows) % every != 0


def _sampled(sabi: Any, every: int) -> np.ndarray:
    """A copy of the list in which the rows of blocks that are not looked at are empty."""
    kept = np.array(with_four_axes(_arrays.host(sabi, "sabi")[0]))
    if kept.dtype not in (np.uint16, np.int16, np.int32, np.int64):
        raise TypeError(f"sabi: expected uint16, int16, int32 or int64, got {kept.dtype}")
    pad = kept.dtype.type(65535 if kept.dtype == np.uint16 else -1)
    kept[:, :, _skipped(kept.shape[2], every)] = pad
    return kept


def checked(sabi: Any, every: Any, layout: Any) -> int:
    """`every` as an int, after the checks that `recall` and `output_error` have in common."""
    _arrays.choice(layout, "layout", LAYOUTS)
    if isinstance(sabi, (tuple, list)):
        raise TypeError(f"sabi: expected an array, got {type(sabi).__name__}")
    if len(_arrays.shape_of(sabi)) not in (2, 3, 4):
        raise ValueError(f"sabi: expected shape (B or 1; H, Hkv or 1; R; W), got {_arrays.shape_of(sabi)}")
    every = _arrays.integer(every, "every")
    if every < 1:
        raise ValueError(f"every: expected at least 1 row of blocks, got {every}")
    return every


def _columns_of(k: Any, layout: str, block_kv: int, cu_seqlens_kv: Any) -> int:
    """Number of blocks of keys that a list may name."""
    tokens = _arrays.shape_of(k)[2 if layout == "BNSD" else 1 if layout != "TND" else 0]
    if layout == "TND":  # lengths that do not fit k are refused by the call; until then they must not decide how much memory is allocated
        tokens = min(tokens, int(np.diff(_arrays.integers(cu_seqlens_kv, "cu_seqlens_kv")).max(initial=0)))
    return -(-tokens // block_kv)


def narrow(k: Any, layout: str) -> Any:
    """Values for a call whose output does not matter: the first element of each key, or all of `k` where this element cannot be had as a
    view."""
    if layout == "BSH" or len(_arrays.shape_of(k)) < 3:
        return k
    try:
        return k[..., :1]
    except Exception:  # the array has no views; if anything is wrong with it, the call says so
        return k


def attended_all(q: Any, k: Any, v: Any, rows: int, every: int, options: Options) -> tuple[Any, Any]:
    """Output and log-sum-exp of attention over all keys, for those of the `rows` rows of blocks that are looked at."""
    everything = None
    if every > 1:
        columns = _columns_of(k, options.layout, int(options.block_shape[1]), options.cu_seqlens_kv)
        everything = np.where(_skipped(rows, every)[:, None], np.int32(-1), np.arange(columns, dtype=np.int32))[None, None]
    return block_sparse_attention(q, k, v, everything, return_lse=True, **vars(options))


def attended_kept(q: Any, k: Any, v: Any, sabi: Any, every: int, options: Options) -> tuple[Any, Any]:
    """Output and log-sum-exp of attention over the list, for those rows of blocks that are looked at."""
    return block_sparse_attention(q, k, v, _sampled(sabi, every) if every > 1 else sabi, return_lse=True, **vars(options))


@in_usual_mode
def recall_of(lse: Any, lse_of_all: Any, rows: int, every: int, options: Options) -> np.ndarray:
    """`recall` from the log-sum-exps over the list and over all keys."""
    layout = options.layout
    kept, whole = _of_queries(lse, layout), _of_queries(lse_of_all, layout)
    spans = _spans(layout, kept.shape[0], kept.shape[2], options.q_lens, options.cu_seqlens_q)
    block_q = int(options.block_shape[0])
    result = np.full((len(spans), kept.shape[1], rows), np.nan)
    for s, (b, first, end) in enumerate(spans):
        for r in range(0, -(-(end - first) // block_q), every):
            at = slice(first + r * block_q, min(first + (r + 1) * block_q, end))
            seen = whole[b, :, at] > -np.inf
            shares = np.exp(np.where(seen, kept[b, :, at] - np.where(seen, whole[b, :, at], 0), -np.inf))
            count = seen.sum(axis=1)
            result[s, :, r] = np.where(count > 0, shares.sum(axis=1) / np.maximum(count, 1), np.nan)
    return np.minimum(result, 1.0)


@in_usual_mode
def error_of(result_of_list: tuple[Any, Any], out_of_all: Any, every: int, options: Options) -> np.ndarray:
    """`output_error` from the output and log-sum-exp over the list, and from the output over all keys."""
    layout, (out, lse) = options.layout, result_of_list
    heads = _of_queries(lse, layout).shape[1]
    kept, whole = (of_heads(x, layout, heads, options.dtype) for x in (out, out_of_all))
    spans = _spans(layout, kept.shape[0], kept.shape[2], options.q_lens, options.cu_seqlens_q)
    block_q = int(options.block_shape[0])
    result = np.zeros((len(spans), heads))
    differences = kept - whole
    for s, (b, first, end) in enumerate(spans):
        looked_at = first + np.flatnonzero(np.arange(end - first) // block_q % every == 0)
        difference, norm = (np.sqrt((x[b][:, looked_at] ** 2).sum(axis=(1, 2))) for x in (differences, whole))
        result[s] = np.divide(difference, norm, out=np.zeros(heads), where=norm > 0)
    return result


def recall(
    q: Array,
    k: Array,
    sabi: Array,
    *,
    block_shape: tuple[int, int] | None = None,
    every: int = 1,
    scale: float | None = None,
    layout: Layout = "BNSD",
    causal: bool = False,
    window: tuple[int, int] | None = None,
    q_lens: Integers | None = None,
    kv_lens: Integers | None = None,
    cu_seqlens_q: Integers | None = None,
    cu_seqlens_kv: Integers | None = None,
    num_heads: int | None = None,
    num_kv_heads: int | None = None,
    q_begin: IntOrIntegers | None = None,
    kv_ranges: Array | None = None,
    attn_mask: Array | None = None,
    alibi_slopes: ArrayLike | None = None,
    softcap: float | None = None,
    dtype: DType | None = None,
    num_threads: int | None = None,
) -> np.ndarray:
    """Share of the softmax mass that a block list keeps, for each block of queries.

    A query's share is ``exp(lse - lse_dense)``, where `lse` is its log-sum-exp over the listed blocks, and `lse_dense` over all keys that
    the rules let it see. The share of a block of queries is the mean over its valid queries that see any key.

    Parameters
    ----------
    q, k : array
        As in `block_sparse_attention`.
    sabi : array of int
        The block list, ``(B or 1; H, Hkv or 1; ceil(Sq / block_shape[0]); W)``.
    block_shape : (int, int), optional
        Tokens in a block of queries and in a block of keys. Default: the shape that the list knows if it is a `BlockList`; (64, 64) for any
        other array.
    every : int
        Look at every n-th block of queries, where n is this number, beginning with the first block. The time falls in proportion. With 1,
        all blocks are looked at.
    scale, layout, causal, window, q_lens, kv_lens, cu_seqlens_q, cu_seqlens_kv, num_heads, num_kv_heads, q_begin, kv_ranges
        As in the attention call: see `block_sparse_attention`.
    attn_mask, alibi_slopes, softcap, dtype
        Likewise. (`sinks` are not needed: they take mass from all keys in proportion, and do not change shares.)
    num_threads : int, optional
        Threads for this call. Default: see `set_num_threads`. The result does not depend on it.

    Returns
    -------
    numpy.ndarray
        ``(B, H, ceil(Sq / block_shape[0]))`` float64, from 0 to 1; NaN for blocks that are not looked at or whose queries see nothing.
        ``numpy.nanmean`` of the result over the last axis is a head's recall.

    Raises
    ------
    TypeError, ValueError, MemoryError
        As `block_sparse_attention` does, or `every` is below 1.

    See Also
    --------
    output_error : the error that the list causes in the output.

    Examples
    --------
    >>> import numpy as np
    >>> import blitz_attn
    >>> from blitz_attn import select
    >>> rng = np.random.default_rng(0)
    >>> q, k = (rng.standard_normal((1, 2, 512, 64), dtype=np.float32) for _ in range(2))
    >>> sabi = blitz_attn.select_blocks_prefill(q, k, top_p=0.9, causal=True)
    >>> kept = select.recall(q, k, sabi, causal=True)
    >>> kept.shape, bool(kept.min() > 0.7)
    ((1, 2, 8), True)
    """
    attn_mask, alibi_slopes = _arrays.detached(attn_mask, alibi_slopes)
    block_shape = block_shape_for(sabi, block_shape, (64, 64))
    options = JudgingOptions.of(locals())
    q, k = _arrays.detached(q, k)  # a measure has no gradient
    every, v = checked(sabi, every, layout), narrow(k, layout)
    rows = _arrays.shape_of(sabi)[-2]
    _, lse = attended_kept(q, k, v, sabi, every, options)
    _, lse_of_all = attended_all(q, k, v, rows, every, options)
    return recall_of(lse, lse_of_all, rows, every, options)


def output_error(
    q: Array,
    k: Array,
    v: Array,
    sabi: Array,
    *,
    block_shape: tuple[int, int] | None = None,
    every: int = 1,
    scale: float | None = None,
    layout: Layout = "BNSD",
    causal: bool = False,
    window: tuple[int, int] | None = None,
    q_lens: Integers | None = None,
    kv_lens: Integers | None = None,
    cu_seqlens_q: Integers | None = None,
    cu_seqlens_kv: Integers | None = None,
    num_heads: int | None = None,
    num_kv_heads: int | None = None,
    q_begin: IntOrIntegers | None = None,
    kv_ranges: Array | None = None,
    attn_mask: Array | None = None,
    alibi_slopes: ArrayLike | None = None,
    sinks: ArrayLike | None = None,
    softcap: float | None = None,
    dtype: DType | None = None,
    num_threads: int | None = None,
) -> np.ndarray:
    """Relative error of attention's output over a block list, for each head.

    Parameters
    ----------
    q, k, v : array
        As in `block_sparse_attention`.
    sabi, block_shape, every
        The block list, and which of its rows are looked at: see `recall`.
    scale, layout, causal, window, q_lens, kv_lens, cu_seqlens_q, cu_seqlens_kv, num_heads, num_kv_heads, q_begin, kv_ranges
        As in the attention call: see `block_sparse_attention`.
    attn_mask, alibi_slopes, sinks, softcap, dtype
        Likewise.
    num_threads : int, optional
        Threads for this call. Default: see `set_num_threads`. The result does not depend on it.

    Returns
    -------
    numpy.ndarray
        ``(B, H)`` float64: the norm of the difference between the outputs over the list and over all keys, divided by the norm of the
        output over all keys. Both norms are over all valid queries that are looked at. 0 where the output over all keys is 0.

    Raises
    ------
    TypeError, ValueError, MemoryError
        As `block_sparse_attention` does, or `every` is below 1.

    See Also
    --------
    recall : the share of the softmax mass that the list keeps.

    Examples
    --------
    >>> import numpy as np
    >>> import blitz_attn
    >>> from blitz_attn import select
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = (rng.standard_normal((1, 2, 512, 64), dtype=np.float32) for _ in range(3))
    >>> errors = [select.output_error(q, k, v, blitz_attn.select_blocks_prefill(q, k, top_p=p)).mean() for p in (0.4, 0.7, 1)]
    >>> bool(errors[0] > errors[1] > errors[2]), bool(errors[2] < 1e-6)
    (True, True)
    """
    attn_mask, alibi_slopes, sinks = _arrays.detached(attn_mask, alibi_slopes, sinks)
    block_shape = block_shape_for(sabi, block_shape, (64, 64))
    options = JudgingOptions.of(locals())
    q, k, v = _arrays.detached(q, k, v)
    every = checked(sabi, every, layout)
    of_list = attended_kept(q, k, v, sabi, every, options)
    out_of_all, _ = attended_all(q, k, v, _arrays.shape_of(sabi)[-2], every, options)
    return error_of(of_list, out_of_all, every, options)
