"""Attention over a paged key/value cache, for decoding and chunked prefill, and the functions that fill the cache."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy import ndarray

from . import _arrays, _core, _formats
from ._float_mode import in_usual_mode
from ._floats import FLOATS, floats
from ._names import KVLayout
from ._paged.append import Summaries, append_tokens
from ._paged.call import attend_requests
from ._paged.plan import PagedPlan
from ._paged.tables import tables_for_core
from ._sentences import shown

__all__ = ["PagedPlan", "append_paged_kv", "dequantize_kv", "paged_attention", "paged_select_attention", "quantize_kv"]

_QUANTISED = ("int8", "float8_e4m3")


# ---- Attention ----------------------------------------------------------------------------------------------------


def paged_attention(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    block_tables: Any,
    seq_lens: Any = None,
    *,
    scale: float | None = None,
    kv_layout: KVLayout = "NHD",
    q_lens: Any = None,
    window: int | None = None,
    q_begin: Any = None,
    kv_ranges: Any = None,
    attn_mask: Any = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
    softcap: float | None = None,
    k_scale: Any = None,
    v_scale: Any = None,
    kv_split: int | None = None,
    return_lse: bool = False,
    out_dtype: Any = None,
    out: Any = None,
    dtype: Any = None,
    kv_dtype: Any = None,
    num_threads: int | None = None,
) -> Any:
    """Attention of each request's newest queries over its own pages of a key/value cache.

    Token t of request b lies in page ``block_tables[b, t // page_size]``, at place ``t % page_size``. The queries are the
    last of the request's tokens, so that query i of n sees token j when ``j <= i + seq_len - n``. Only pages within a request's length are
    read.

    Parameters
    ----------
    q : array
        ``(B, H, D)``, one query per request; with `q_lens` ``(T, H, D)``, the queries of all requests one after the other. float32,
        float16, bfloat16 or float64; D from 1 to 576.
    k_cache, v_cache : array
        ``(pages, page_size, Hkv, D)`` and ``(pages, page_size, Hkv, Dv)``: page_size is at least 1. float32, float16,
        bfloat16, or with scales int8 or float8 e4m3, whatever the dtype of `q`; float64 where `q` is float64. H must be a
        multiple of Hkv; query head h reads head ``h // (H // Hkv)``.
    block_tables : array of int32 or int64, or tuple
        ``(B, W)`` page numbers; entries beyond a request's length are not read. Or the triple ``(indptr, indices, last_page_len)``:
        request b has the pages ``indices[indptr[b]:indptr[b + 1]]``, and its last page holds ``last_page_len[b]`` tokens.
    seq_lens : sequence of int
        ``(B,)``: number of tokens of each request in the cache, including those of the queries. None with the triple.
    scale : float, optional
        Factor of ``q k^T``. Default: ``1 / sqrt(D)``.
    kv_layout : {"NHD", "HND"}
        HND caches are ``(pages, Hkv, page_size, D)``, their scales ``(pages, Hkv, page_size)``.
    q_lens : sequence of int, optional
        ``(B,)``: queries of each request, 0 to ``seq_lens[b]``: chunked prefill, speculative decoding.
    window : int, optional
        Number of tokens before itself that a query sees, at least 0. Default, and -1: all.
    q_begin : sequence of int, optional
        ``(B,)``: token number of each request's query 0; may be negative. It is for a cache that holds a stretch of a longer request, whose
        first token there counts as 0. Query i then sees token j when ``j <= i + q_begin``, and `q_lens` may exceed the number of tokens.
        Default: the queries are the last tokens.
    kv_ranges : array of int, optional
        ``(B, 2)``, with `q_lens` ``(T, 2)``; int32 or int64: query i sees the tokens ``kv_ranges[i, 0] <= j < kv_ranges[i, 1]`` of its
        request instead of those up to itself, for prompts in which an image or a prefix sees itself. `window` still holds. Ranges may be
        empty, and reach beyond the tokens.
    attn_mask : array, optional
        ``(B, H, Q, T)``, or any shape that broadcasts to it, with Q at least the most queries of a request and T at least the most tokens:
        row i is that of a request's query i, column j that of its token j. Of bool, where False hides the token as the causal rule does, or
        of numbers that are added to the scores, as in `block_sparse_attention`: a tree of draft tokens, for example. A mask of one axis
        has one element per token of the longest request and no more, so that a flattened mask of queries and tokens is refused.
    alibi_slopes : array_like, optional
        ``(H,)`` float32: ``-alibi_slopes[h] * abs(p - j)`` is added to the score of token j, where p is the query's own token number.
    sinks : array_like, optional
        ``(H,)`` float32: one more score per head, which takes part in the softmax but has no value. The log-sum-exp includes it. One
        beyond about +-2.3e38 counts as infinite, unless `q` is float64.
    softcap : float, optional
        Replaces each score by ``softcap * tanh(score / softcap)``; positive. Default, and 0: scores are not capped.
    k_scale, v_scale : array of float32, or float, optional
        The factors of int8 and float8 e4m3 caches: ``(pages, page_size, Hkv)``, one for each token and head, ``(Hkv,)``, one for each head,
        or one number. Arrays of other floats are converted. For other caches only the number 1 is accepted, and has no effect.
    kv_split : int, optional
        Attend to each request in chunks of so many tokens, a multiple of page_size, and merge the states of its chunks by a fixed tree: see
        the notes. Default: requests are cut as suits the machine.
    return_lse : bool
        Also return the log-sum-exp.
    out_dtype : str or dtype, optional
        ``"float32"`` with float16 and bfloat16 queries returns the float32 result before rounding; rounding it gives exactly the default
        result. Default: the dtype of `q`.
    out : array, optional
        Where to write the result: writable, of the result's shape and dtype, sharing no memory with any input. With
        `return_lse`, also a pair ``(out, lse)``, either of which may be None.
    dtype, kv_dtype : str or dtype, optional
        ``"bfloat16"`` says that uint16 arrays hold bfloat16 bits; for the caches, ``"float8_e4m3"`` says that uint8 arrays hold such bits.
        `kv_dtype` defaults to `dtype`.
    num_threads : int, optional
        Threads for this call. Default: see `set_num_threads`. The result does not depend on it.

    Returns
    -------
    out : array
        ``(B, H, Dv)`` or ``(T, H, Dv)``, dtype of `q` (or `out_dtype`) and kind of `q`. A query that sees no token gets 0.
    lse : array
        With `return_lse`: ``(B, H)`` or ``(T, H)``, natural log of the sum of ``exp(score)``; ``-inf`` where no token is seen. float32,
        for float64 queries float64.

    Raises
    ------
    TypeError
        An argument of the wrong kind or dtype.
    ValueError
        An argument of the wrong shape or out of range, such as a page that the cache does not have within a request's length.
        No output has been written then.
    MemoryError
        The scratch memory could not be allocated.

    See Also
    --------
    paged_select_attention : over listed pages only.
    PagedPlan : checks tables and lengths once for all layers of a step.
    append_paged_kv : writes new tokens into the cache.
    blitz_attn.reference.paged_attention : the same in plain float64 NumPy.

    Notes
    -----
    Query heads that share a key/value head are computed together, so that each byte of the cache is read once. Long requests are cut into
    parts, which are merged by their log-sum-exp. Where a request is cut depends on that request alone: the result is the same bit for bit
    whatever else is in the batch and whatever the number of threads.

    With `kv_split`, chunk c of a request is its tokens ``c * kv_split`` to ``(c + 1) * kv_split - 1``. Attention over each chunk is
    computed by itself, and its state (the result and the log-sum-exp, in float32) is merged with others by `merge_states_tree`; then
    `sinks` take part, and the result is rounded once. So the result is bit-identical to that of calls over single chunks, each as a request
    of its own with `q_begin` and ``out_dtype="float32"``, whose results are merged in the same way: it does not matter who computes which
    chunk. Of `attn_mask`, each chunk has the columns of its tokens, which are read where they lie.

    A prefix that many requests share can be read once for all of them: attend to the prefix with all queries in one call, to the rest of
    each request in a second call, and merge the two results with `blitz_attn.merge_states` (see the second example).

    The operation follows paged attention of vLLM [1]_ and the table formats of FlashInfer [2]_.

    References
    ----------
    .. [1] W. Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention", 2023.
    .. [2] Z. Ye et al., "FlashInfer: Efficient and Customizable Attention Engine for LLM Inference Serving", 2025.

    Examples
    --------
    >>> import numpy as np
    >>> import blitz_attn
    >>> rng = np.random.default_rng(0)
    >>> q = rng.standard_normal((2, 8, 64), dtype=np.float32)
    >>> k_cache, v_cache = (rng.standard_normal((6, 16, 2, 64), dtype=np.float32) for _ in range(2))
    >>> tables, seq_lens = np.array([[4, 1, 0], [2, 5, 3]], dtype=np.int32), [40, 48]
    >>> out = blitz_attn.paged_attention(q, k_cache, v_cache, tables, seq_lens)
    >>> exact = blitz_attn.reference.paged_attention(q, k_cache, v_cache, tables, seq_lens)
    >>> bool(np.abs(out - exact).max() < 1e-5)
    True

    Two requests that share the 32 tokens of pages 4 and 1, which are read once for both:

    >>> tables = np.array([[4, 1, 0], [4, 1, 3]], dtype=np.int32)
    >>> k, v = (np.concatenate([cache[4], cache[1]]).swapaxes(0, 1)[None] for cache in (k_cache, v_cache))
    >>> prefix = blitz_attn.block_sparse_attention(q.swapaxes(0, 1)[None], k, v, return_lse=True)
    >>> own = blitz_attn.paged_attention(q, k_cache, v_cache, tables[:, 2:].copy(), [8, 16], return_lse=True)
    >>> own = own[0].swapaxes(0, 1)[None], own[1].swapaxes(0, 1)[None]
    >>> joined = blitz_attn.merge_states(*prefix, *own)[0][0].swapaxes(0, 1)
    >>> bool(np.abs(joined - blitz_attn.paged_attention(q, k_cache, v_cache, tables, [40, 48])).max() < 1e-5)
    True
    """
    requests = (*tables_for_core(block_tables, seq_lens), q_lens, q_begin, kv_split)
    return attend_requests(
        q, k_cache, v_cache, requests, (scale, kv_layout, window, softcap, out_dtype, dtype, kv_dtype, num_threads), None, None, sinks,
        k_scale, v_scale, kv_ranges, attn_mask, alibi_slopes, return_lse, out,
    )  # fmt: skip


def paged_select_attention(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    block_tables: Any,
    seq_lens: Any,
    selected: Any,
    *,
    counts: Any = None,
    scale: float | None = None,
    kv_layout: KVLayout = "NHD",
    q_lens: Any = None,
    window: int | None = None,
    q_begin: Any = None,
    kv_ranges: Any = None,
    attn_mask: Any = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
    softcap: float | None = None,
    k_scale: Any = None,
    v_scale: Any = None,
    kv_split: int | None = None,
    return_lse: bool = False,
    out_dtype: Any = None,
    out: Any = None,
    dtype: Any = None,
    kv_dtype: Any = None,
    num_threads: int | None = None,
) -> Any:
    """Attention over listed blocks of each request: `paged_attention` that leaves the other blocks out.

    Parameters
    ----------
    q, k_cache, v_cache, block_tables, seq_lens
        See `paged_attention`. `seq_lens` is None where `block_tables` is the triple.
    selected : array of int16, int32 or int64
        ``(B, Hkv, K)`` or ``(B, H, K)``: the blocks that a key/value head's group, or a query head, sees. Block i of a request is its i-th
        page, ``block_tables[b, i]``: numbers from 0 to ``ceil(seq_len / page_size) - 1``, in any order, none twice. A row ends at the
        first -1.
    counts : array of int, optional
        ``(B, Hkv)`` or ``(B, H)``: number of entries in use in each row of `selected`, which then needs no -1.
    scale, kv_layout, q_lens, window, q_begin, kv_ranges, attn_mask, alibi_slopes, sinks, softcap, k_scale, v_scale, kv_split, return_lse
        See `paged_attention`.
    out_dtype, out, dtype, kv_dtype, num_threads
        See `paged_attention`.

    Returns
    -------
    out : array
        As `paged_attention`. A row that lists no block gives 0.
    lse : array
        With `return_lse`, as `paged_attention`, over the tokens of the listed blocks.

    Raises
    ------
    TypeError, ValueError, MemoryError
        As `paged_attention`; also for a block that the request does not have or that a row lists twice.

    See Also
    --------
    blitz_attn.select_blocks : makes such lists.
    blitz_attn.select_and_attend : both in one call.

    Notes
    -----
    The last block of a request may be listed at any place; only its valid tokens are seen. With a list of all blocks, the result is
    bit-identical to that of `paged_attention`. One list per key/value head is faster than one per query head, whose heads do not share
    reads of the cache.

    Examples
    --------
    >>> import numpy as np
    >>> import blitz_attn
    >>> rng = np.random.default_rng(0)
    >>> q = rng.standard_normal((1, 4, 64), dtype=np.float32)
    >>> k_cache, v_cache = (rng.standard_normal((6, 16, 2, 64), dtype=np.float32) for _ in range(2))
    >>> tables, seq_lens = np.array([[4, 1, 0, 5]], dtype=np.int32), [57]
    >>> selected = np.array([[[0, 3, -1], [3, 1, 0]]], dtype=np.int32)
    >>> out = blitz_attn.paged_select_attention(q, k_cache, v_cache, tables, seq_lens, selected)
    >>> exact = blitz_attn.reference.paged_select_attention(q, k_cache, v_cache, tables, seq_lens, selected)
    >>> bool(np.abs(out - exact).max() < 1e-5)
    True
    """
    if selected is None:
        raise TypeError("selected: expected an array, got NoneType")
    requests = (*tables_for_core(block_tables, seq_lens), q_lens, q_begin, kv_split)
    return attend_requests(
        q, k_cache, v_cache, requests, (scale, kv_layout, window, softcap, out_dtype, dtype, kv_dtype, num_threads),
        selected, counts, sinks, k_scale, v_scale, kv_ranges, attn_mask, alibi_slopes, return_lse, out,
    )  # fmt: skip


# ---- Quantisation -------------------------------------------------------------------------------------------------


def quantize_kv(x: Any, kv_dtype: Any, *, dtype: Any = None) -> tuple[ndarray, ndarray]:
    """Keys or values in 8 bits, with one scale per token and head.

    Parameters
    ----------
    x : array
        ``(..., D)``: float32, float16, bfloat16 or float64, finite.
    kv_dtype : {"int8", "float8_e4m3"} or dtype
        The format: integers from -127 to 127, or floats of one sign bit, 4 exponent bits and 3 mantissa bits.
    dtype : str or dtype, optional
        ``"bfloat16"`` says that a uint16 `x` holds bfloat16 bits. Otherwise only checked.

    Returns
    -------
    values : numpy.ndarray
        ``(..., D)``: int8, or uint8 that hold the bits of float8 e4m3. Each is the nearest to ``x / scale``, ties to even.
    scale : numpy.ndarray
        ``(...)`` float32: the largest magnitude of a row divided by the largest number of the format, 127 or 448. It is 1 where that would
        be 0.

    Raises
    ------
    TypeError
        `x` is not an array of floats, or not of `dtype`.
    ValueError
        `kv_dtype` names another format, `x` has a NaN, an infinity or a number too large for a float32 scale, or D is above ``2**24``.
        The sentence says where such a number is; it counts rows over all axes but the last.

    Notes
    -----
    With M the largest magnitude of a row, the error of an element x is at most M / 254 in int8, up to the rounding of the scale. In float8
    e4m3 it is at most the larger of ``abs(x) / 16`` and M / 458752.

    Examples
    --------
    >>> import numpy as np
    >>> import blitz_attn
    >>> x = np.random.default_rng(0).standard_normal((4, 2, 64), dtype=np.float32)
    >>> values, scale = blitz_attn.quantize_kv(x, "int8")
    >>> values.dtype.name, scale.shape
    ('int8', (4, 2))
    >>> error = np.abs(blitz_attn.dequantize_kv(values, scale) - x)
    >>> bool((error <= 0.501 * scale[..., None]).all())
    True
    """
    to, own = _arrays.dtype_name(kv_dtype, "kv_dtype"), _arrays.dtype_name(dtype)
    if to not in _QUANTISED:
        raise ValueError(f"kv_dtype: expected 'int8' or 'float8_e4m3', got {shown(to)}")
    if own is not None and own not in FLOATS:
        raise ValueError(f"dtype: expected 'float32', 'float16', 'bfloat16' or 'float64', got {shown(own)}")
    array, kind = floats(x, "x", own, strided=True)
    if own not in (None, kind):
        raise TypeError(f"x: expected {own} as dtype says, got {kind}")
    if array.ndim < 1:
        raise ValueError(f"x: expected shape (..., D), got {array.shape}")
    values, scale = np.empty(array.shape, np.int8 if to == "int8" else np.uint8), np.empty(array.shape[:-1], np.float32)
    rows = scale.size, array.shape[-1]
    _core.quantize_kv(
        np.require(array, requirements=("C", "A")).reshape(rows), values.reshape(rows), scale.reshape(-1),
        dtype="bfloat16" if kind == "bfloat16" else None, kv_dtype="float8_e4m3" if to == "float8_e4m3" else None,
    )  # fmt: skip
    return values, scale


def dequantize_kv(values: Any, scale: Any) -> ndarray:
    """The numbers that quantised keys or values stand for: ``values * scale``.

    Parameters
    ----------
    values : array
        ``(..., D)``: int8, or float8 e4m3 as an array of that dtype or as uint8 bits.
    scale : array_like
        ``(...)``: the factor of each row; or fewer numbers, which NumPy's rules repeat: one, or one per head, ``(Hkv,)`` where heads are
        the last axis of the rows, and ``(Hkv, 1)`` in HND.

    Returns
    -------
    numpy.ndarray
        ``(..., D)`` float32.

    Raises
    ------
    TypeError
        `values` has another dtype.
    ValueError
        Shapes that do not fit.

    See Also
    --------
    quantize_kv : the inverse, up to rounding.

    Examples
    --------
    >>> import numpy as np
    >>> import blitz_attn
    >>> blitz_attn.dequantize_kv(np.array([[127, -64]], np.int8), np.array([0.5])).tolist()
    [[63.5, -32.0]]
    >>> blitz_attn.dequantize_kv(np.array([[0x38, 0xC0]], np.uint8), np.array([2.0])).tolist()
    [[2.0, -4.0]]
    """
    array, kind = _arrays.host(values, "values", "float8_e4m3")
    if kind not in _QUANTISED:
        raise TypeError(f"values: expected int8, float8_e4m3 or uint8 bits of it, got {kind}")
    factors = _arrays.float32_numbers(scale, "scale")
    rows = array.shape[:-1]
    if array.ndim < 1 or factors.ndim > len(rows) or any(n not in (1, m) for n, m in zip(factors.shape[::-1], rows[::-1], strict=False)):
        raise ValueError(f"scale: expected shape {rows}, values' without the last axis, or its last axes, got {factors.shape}")
    return _products(array, kind, np.broadcast_to(factors, rows)[..., None])


@in_usual_mode
def _products(values: ndarray, kind: str, factors: ndarray) -> ndarray:
    numbers = np.empty(values.shape, np.float32)
    with np.errstate(over="ignore", invalid="ignore"):  # infinite scales, and those that make numbers too large
        for at in _arrays.pieces(values.shape):
            np.multiply(_formats.widened(values[at], kind), factors[at[:-1]], out=numbers[at])
    return numbers


# ---- Filling the cache --------------------------------------------------------------------------------------------


def append_paged_kv(
    k: Any,
    v: Any,
    k_cache: Any,
    v_cache: Any,
    *,
    slot_mapping: Any = None,
    block_tables: Any = None,
    seq_lens: Any = None,
    q_lens: Any = None,
    kv_layout: KVLayout = "NHD",
    k_scale: Any = None,
    v_scale: Any = None,
    maxblocks: Any = None,
    minblocks: Any = None,
    meanblocks: Any = None,
    metadata_block_tables: Any = None,
    dtype: Any = None,
    kv_dtype: Any = None,
    num_threads: int | None = None,
) -> None:
    """Write the keys and values of new tokens into a paged cache, and update its summaries.

    Numbers are rounded once, to the nearest of the cache's dtype, ties to even. Either `slot_mapping` says where each token goes, or
    `block_tables` and `seq_lens` do as in `paged_attention`: call this function, then `paged_attention` with the same tables and lengths.

    Parameters
    ----------
    k, v : array
        ``(T, Hkv, D)`` and ``(T, Hkv, Dv)``: float32, float16, bfloat16 or float64, in memory of their own.
    k_cache, v_cache : array
        See `paged_attention`. NumPy arrays or torch tensors, written in place. They may be views of one array, where no element is in both.
        Where the values are part of the keys, as in MLA, `v` and `v_cache` are None.
    slot_mapping : sequence of int, optional
        ``(T,)``: the slot of each token, ``page * page_size + place``; -1 leaves a token out.
    block_tables, seq_lens : optional
        See `paged_attention`. The lengths include the new tokens, which are the last tokens of their requests.
    q_lens : sequence of int, optional
        ``(B,)``: number of new tokens of each request. Default: 1 for each.
    kv_layout : {"NHD", "HND"}
        See `paged_attention`.
    k_scale, v_scale : array of float32, or float, optional
        Required with int8 and float8 e4m3 caches, see `paged_attention`. An array with one scale per token and head is written in place:
        each row gets the scale that `quantize_kv` computes. One number, or one per head, is read: ``x / scale`` is rounded, and what lies
        beyond the dtype's largest number, 127 or 448, becomes that number.
    maxblocks, minblocks, meanblocks, metadata_block_tables : array, optional
        See `quest_prefill_metadata`. The summaries of blocks that get new tokens are computed again; those of 8-bit caches from what is in
        the cache, in float32. Only with `block_tables`, which must then be an array.
    dtype, kv_dtype : str or dtype, optional
        ``"bfloat16"`` says that uint16 arrays hold bfloat16 bits; for the caches, ``"float8_e4m3"`` says that uint8 arrays hold such bits.
        Either defaults to the other where that is bfloat16.
    num_threads : int, optional
        Threads for this call. Default: see `set_num_threads`.

    Raises
    ------
    TypeError, ValueError
        An argument of the wrong kind, shape or range, two tokens for one slot, or a NaN or an infinity for an 8-bit cache.
        Nothing has been written then.

    Notes
    -----
    A call that Ctrl-C or another signal handler interrupts has written the slots of some of the new tokens, and no other slots: the tokens
    before are as they were. The summaries of blocks that get new tokens may not fit these blocks. The same call again completes it, and
    leaves what an uninterrupted call does.

    Examples
    --------
    >>> import numpy as np
    >>> import blitz_attn
    >>> rng = np.random.default_rng(0)
    >>> k, v = (rng.standard_normal((5, 2, 64), dtype=np.float32) for _ in range(2))
    >>> k_cache, v_cache = (np.zeros((4, 16, 2, 64), np.int8) for _ in range(2))
    >>> k_scale, v_scale = (np.zeros((4, 16, 2), np.float32) for _ in range(2))
    >>> tables, seq_lens, q_lens = np.array([[2, 3], [1, 0]]), [18, 2], [3, 2]  # 15 tokens of the first request are there
    >>> blitz_attn.append_paged_kv(k, v, k_cache, v_cache, block_tables=tables, seq_lens=seq_lens, q_lens=q_lens,
    ...                            k_scale=k_scale, v_scale=v_scale)
    >>> written = blitz_attn.dequantize_kv(k_cache, k_scale)
    >>> bool(np.abs(written[[2, 3, 3, 1, 1], [15, 0, 1, 0, 1]] - k).max() < 0.02)
    True
    """
    if (slot_mapping is None) == (block_tables is None):
        given = "neither" if slot_mapping is None else "both"
        raise ValueError(f"slot_mapping: expected exactly one of slot_mapping and block_tables, got {given}")
    requests: tuple[Any, ...] = (None,) * 7
    if slot_mapping is None:
        requests = (*tables_for_core(block_tables, seq_lens), q_lens, None, None)
    else:
        of_requests = {"seq_lens": seq_lens, "q_lens": q_lens, "metadata_block_tables": metadata_block_tables}
        for name, given in {**of_requests, "maxblocks": maxblocks, "minblocks": minblocks, "meanblocks": meanblocks}.items():
            if given is not None:
                raise ValueError(f"{name}: expected None with slot_mapping, got {type(given).__name__}")
    summaries = Summaries(maxblocks, minblocks, meanblocks, metadata_block_tables)
    if isinstance(block_tables, tuple) and metadata_block_tables is not None:
        raise ValueError("block_tables: expected an array (B, W) with metadata_block_tables, got (indptr, indices, last_page_len)")
    append_tokens(
        k, v, k_cache, v_cache, slot_mapping, requests, kv_layout, k_scale, v_scale, summaries, dtype, kv_dtype, num_threads
    )  # fmt: skip
