"""Choosing the blocks of a paged cache that a decoding step attends to, by Quest, block means or block maxima."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

from . import _arrays, _core
from ._floats import refuse_overlaps
from ._names import KVLayout, Method
from ._paged.call import attend_requests, open_requests, scales_for_core
from ._paged.selection import Opened, integer_empty, select_pages, select_to_attend, with_lists
from ._paged.tables import cache_sizes, tables_for_core
from ._sentences import rename

if TYPE_CHECKING:
    from numpy import ndarray

    from ._options import PagedChoiceOptions, SelectOptions
    from ._types import Array, DType, Integers, IntOrIntegers, JaxArray, Kind, Scale, Source, Tables, Tensor

__all__ = [
    "quest_block_select_paged",
    "quest_block_select_paged_in_out",
    "quest_block_select_paged_in_out_w",
    "quest_prefill_metadata",
    "select_and_attend",
    "select_blocks",
]


# ---- Quest, as upstream names it ----------------------------------------------------------------------------------


def quest_prefill_metadata(
    k_cache: Array,
    block_tables: Array,
    seq_lens: Integers,
    metadata_block_tables: Array,
    maxblocks: Array,
    minblocks: Array,
    *,
    start_lens: Integers | None = None,
    kv_layout: KVLayout = "NHD",
    k_scale: Scale | None = None,
    dtype: DType | None = None,
    meanblocks: Array | None = None,
    num_threads: int | None = None,
) -> None:
    """Summarise the blocks of a paged cache: the largest and the smallest key of each block, channel by channel.

    A summary page has `rows` rows, with one summary in each: row ``i % rows`` of page ``metadata_block_tables[b, i // rows]`` describes
    block i of request b. Rows after the last block of a request, up to the end of their page, are set to 0; other pages are not written.

    Parameters
    ----------
    k_cache : array
        ``(pages, block_size, N, D)``: float32, float16, bfloat16 or float64, or, with `k_scale`, int8 or float8 e4m3. A cache of rows of
        llama.cpp's blocks is uint8, with the bytes of a row as its last axis, see `quantize_rows`. block_size is from 1 to 1024.
    block_tables : array of int32 or int64
        ``(B, W)``: page numbers of each request.
    seq_lens : sequence of int
        ``(B,)``: number of tokens of each request.
    metadata_block_tables : array of int32 or int64
        ``(B, M)``: numbers of the summary pages of each request, where M is at least ``ceil(ceil(seq_len / block_size) / rows)``. No page
        is named twice.
    maxblocks, minblocks : array
        ``(summary pages, rows, N, D)``, of the dtype of `k_cache` (float32 for caches of 8 bits and fewer), written in place. Either may be
        None. If rows equals block_size, as it does upstream [2]_, one of these arrays may be `k_cache` itself (layout NHD): the summaries
        then lie in pages of the cache that hold no keys.
    start_lens : sequence of int, optional
        ``(B,)``: only blocks with tokens from ``start_lens[b]`` on are summarised. Default: all blocks.
    kv_layout : {"NHD", "HND"}
        HND caches are ``(pages, N, block_size, D)``. Summaries have the same axes in both layouts.
    k_scale : array of float32, or float, optional
        The factors of int8 and float8 e4m3 keys, see `paged_attention`: one for each token and head, one for each head, or one number.
    dtype : str or dtype, optional
        ``"bfloat16"`` says that uint16 arrays hold bfloat16 bits, ``"float8_e4m3"`` that a cache of uint8 holds bits of float8 e4m3, and
        ``"q8_0"``, ``"q4_0"`` or ``"q4_1"`` that it holds rows of this format.
    meanblocks : array, optional
        Like `maxblocks`: the mean of each block's keys, for ``select_blocks(method="mean")``.
    num_threads : int, optional
        Threads for this call. Default: see `set_num_threads`.

    Raises
    ------
    TypeError, ValueError
        An argument of the wrong kind, shape or range. Nothing has been written then.

    See Also
    --------
    append_paged_kv : writes new tokens, and summarises the blocks that get them.

    Notes
    -----
    Summaries cover the valid tokens of a block, so the last block of a request is summarised as far as it is filled. Largest and smallest
    values are elements of the keys, unrounded. They ignore NaN, unless a channel has nothing else; a mean with NaN is NaN. The keys of
    caches of 8 bits and fewer are the float32 numbers that `dequantize_kv` or `dequantize_rows` gives.

    Upstream [2]_ always summarises whole requests, with block_size and D of 128, in float16 and bfloat16. `start_lens`, other sizes and
    other dtypes are additions.

    References
    ----------
    .. [1] J. Tang et al., "Quest: Query-Aware Sparsity for Efficient Long-Context LLM Inference", 2024.
    .. [2] The select_attn_ops package of the CANN operator family, quest_prefill_metadata.

    Examples
    --------
    >>> import numpy as np
    >>> import blitz_attn
    >>> rng = np.random.default_rng(0)
    >>> k_cache = rng.standard_normal((8, 16, 2, 64), dtype=np.float32)
    >>> tables, seq_lens, summary_tables = np.array([[3, 0, 6]]), [40], np.array([[1]])
    >>> maxblocks, minblocks = (np.full((2, 16, 2, 64), np.nan, np.float32) for _ in range(2))
    >>> blitz_attn.quest_prefill_metadata(k_cache, tables, seq_lens, summary_tables, maxblocks, minblocks)
    >>> bool((maxblocks[1, 0] == k_cache[3].max(0)).all()), bool((minblocks[1, 2] == k_cache[6, :8].min(0)).all())
    (True, True)

    An 8-bit cache:

    >>> values, k_scale = blitz_attn.quantize_kv(k_cache, "int8")
    >>> blitz_attn.quest_prefill_metadata(values, tables, seq_lens, summary_tables, maxblocks, minblocks, k_scale=k_scale)
    >>> bool((maxblocks[1, 0] == blitz_attn.dequantize_kv(values, k_scale)[3].max(0)).all())
    True
    """
    _core.quest_metadata(
        _arrays.readable(k_cache, "k_cache", True), block_tables, seq_lens, metadata_block_tables,
        maxblocks=_arrays.writable(maxblocks, "maxblocks"), minblocks=_arrays.writable(minblocks, "minblocks"),
        meanblocks=_arrays.writable(meanblocks, "meanblocks"), start_lens=start_lens, kv_layout=kv_layout, dtype=_arrays.dtype_name(dtype),
        num_threads=num_threads, k_scale=scales_for_core(k_scale, "k_scale", k_cache),
    )  # fmt: skip
    _arrays.count_writes(maxblocks, minblocks, meanblocks)


def _quest(
    query: Any, maxblocks: Any, minblocks: Any, tables: Any, seq_lens: Any, k: Any, block_size: Any, per_query_head: Any, sink: int,
    since: Any, ascending: Any, selected_indices: Any, dtype: Any, num_threads: Any,
) -> Any:  # fmt: skip
    if selected_indices is not None:  # the core copies lengths, so it cannot see that their memory overlaps
        refuse_overlaps({"selected_indices": selected_indices}, seq_lens=seq_lens, tokens_since_metadata_update=since)
    try:
        selected = _core.select_blocks(
            integer_empty(query), "quest", _arrays.readable(query, "query"), _arrays.readable(maxblocks, "maxblocks"),
            _arrays.readable(minblocks, "minblocks"), tables, seq_lens, k, block_size, per_query_head, sink, 0, since, None,
            budget=None, ascending=ascending, kv_layout="NHD", selected_indices=_arrays.writable(selected_indices, "selected_indices"),
            return_counts=False, return_scores=False, dtype=_arrays.dtype_name(dtype), num_threads=num_threads,
        )  # fmt: skip
    except (TypeError, ValueError) as error:
        if selected_indices is not None:
            rename(error, {"k": "selected_indices"})  # k is its last axis
        raise
    _arrays.count_writes(selected_indices)
    return selected


@overload
def quest_block_select_paged(
    query: Tensor, maxblocks: Array, minblocks: Array, metadata_block_tables: Array, seq_lens: Integers, k: int, *,
    per_query_head: bool = False, ascending: bool = False, block_size: int | None = None, dtype: DType | None = None,
    num_threads: int | None = None,
) -> Tensor: ...  # fmt: skip
@overload
def quest_block_select_paged(
    query: Array, maxblocks: Array, minblocks: Array, metadata_block_tables: Array, seq_lens: Integers, k: int, *,
    per_query_head: bool = False, ascending: bool = False, block_size: int | None = None, dtype: DType | None = None,
    num_threads: int | None = None,
) -> ndarray: ...  # fmt: skip
def quest_block_select_paged(
    query: Any,
    maxblocks: Any,
    minblocks: Any,
    metadata_block_tables: Any,
    seq_lens: Any,
    k: int,
    *,
    per_query_head: bool = False,
    ascending: bool = False,
    block_size: int | None = None,
    dtype: Any = None,
    num_threads: int | None = None,
) -> Any:
    """For each request, the k blocks whose keys could score highest with its query.

    The score of a block is the sum over channels of ``max(q * largest, q * smallest)``, an upper bound of the scores of its keys. A score
    of NaN comes last. A channel in which 0 and infinity are multiplied makes the score NaN or adds nothing. The
    ``ceil(seq_len / block_size)`` blocks of a request compete, and no others.

    Parameters
    ----------
    query : array
        ``(B, H, D)``: float32, float16, bfloat16 or float64.
    maxblocks, minblocks : array
        See `quest_prefill_metadata`. Their dtype may differ from that of `query`, except that float64 goes only with float64.
    metadata_block_tables : array of int32 or int64
        ``(B, M)``, see `quest_prefill_metadata`.
    seq_lens : sequence of int
        ``(B,)``: number of tokens of each request. All of its blocks must have been summarised.
    k : int
        Number of blocks to select, at least 1.
    per_query_head : bool
        Select for each query head by itself. Default: select once per key/value head, by the mean query of its group of query heads.
    ascending : bool
        Order the blocks of a row by number. Default: order them by falling score.
    block_size : int, optional
        Number of tokens per block. Default: the number of rows of a summary page, as in upstream's function.
    dtype : str or dtype, optional
        ``"bfloat16"`` says that uint16 arrays hold bfloat16 bits.
    num_threads : int, optional
        Threads for this call. Default: see `set_num_threads`. The result does not depend on it.

    Returns
    -------
    array
        int32 ``(B, N, k)``, with `per_query_head` ``(B, H, k)``: numbers of blocks within the request. A torch tensor where `query` is one,
        else a NumPy array. Of blocks with equal scores, the lower comes first. Unused entries hold -1.

    Raises
    ------
    TypeError, ValueError
        An argument of the wrong kind, shape or range.

    See Also
    --------
    select_blocks : other selectors, sinks, budgets.
    blitz_attn.paged_select_attention : attends to the selected blocks.

    Notes
    -----
    Upstream [1]_ differs. There, the zero rows that fill a summary page compete with blocks, and win where all blocks score below 0, so
    that numbers beyond the last block are returned. They are also returned for requests with fewer than k blocks. The order of equal scores
    is left open, and float16 scores are summed in float16. D and block_size are 128, k is a multiple of 8, and a request has at most 6
    summary pages. This function returns only blocks that exist, sums in float32 and takes all sizes.

    References
    ----------
    .. [1] The select_attn_ops package of the CANN operator family, quest_block_select_paged.

    Examples
    --------
    >>> import numpy as np
    >>> import blitz_attn
    >>> rng = np.random.default_rng(0)
    >>> q = rng.standard_normal((1, 4, 64), dtype=np.float32)
    >>> k_cache = rng.standard_normal((8, 16, 2, 64), dtype=np.float32)
    >>> tables, seq_lens, summary_tables = np.array([[3, 0, 6, 7, 1]]), [77], np.array([[1]])
    >>> maxblocks, minblocks = (np.empty((2, 16, 2, 64), np.float32) for _ in range(2))
    >>> blitz_attn.quest_prefill_metadata(k_cache, tables, seq_lens, summary_tables, maxblocks, minblocks)
    >>> selected = blitz_attn.quest_block_select_paged(q, maxblocks, minblocks, summary_tables, seq_lens, 2)
    >>> mean = q.reshape(1, 2, 2, 64).mean(2)  # of the query heads of a group
    >>> scores = np.maximum(mean[:, None] * maxblocks[1, :5], mean[:, None] * minblocks[1, :5]).sum(-1)  # (1, block, head)
    >>> bool((selected == np.argsort(-scores, axis=1, kind="stable")[:, :2].swapaxes(1, 2)).all())
    True
    """
    return _quest(
        query, maxblocks, minblocks, metadata_block_tables, seq_lens, k, block_size, per_query_head, 0, -1, ascending, None, dtype,
        num_threads,
    )  # fmt: skip


def _selects_per_query_head(query: Any, maxblocks: Any, selected_indices: Any) -> bool:
    """Whether the caller's result has one row per query head. The core refuses shapes that do not fit."""
    shapes = [_arrays.shape_of(x) for x in (query, maxblocks, selected_indices)]
    if any(len(shape) != rank for shape, rank in zip(shapes, (3, 4, 3), strict=True)):
        return False
    return bool(shapes[2][1] == shapes[0][1] != shapes[1][2])


def quest_block_select_paged_in_out(
    query: Array,
    maxblocks: Array,
    minblocks: Array,
    metadata_block_tables: Array,
    seq_lens: Integers,
    selected_indices: Array,
    *,
    dtype: DType | None = None,
) -> None:
    """`quest_block_select_paged` that writes into an array of the caller.

    Parameters
    ----------
    query, maxblocks, minblocks, metadata_block_tables, seq_lens, dtype
        See `quest_block_select_paged`. The number of tokens of a block is the number of rows of a summary page.
    selected_indices : array of int32
        ``(B, N, k)``, written in place. The shape ``(B, H, k)`` selects for each query head.

    Raises
    ------
    TypeError, ValueError
        As `quest_block_select_paged`. Nothing has been written then.

    Examples
    --------
    >>> import numpy as np
    >>> import blitz_attn
    >>> rng = np.random.default_rng(0)
    >>> q, maxblocks = rng.standard_normal((1, 4, 64), dtype=np.float32), rng.standard_normal((2, 16, 2, 64), dtype=np.float32)
    >>> call = q, maxblocks, maxblocks - 1, np.array([[1]]), [200]
    >>> selected = np.empty((1, 2, 8), np.int32)
    >>> blitz_attn.quest_block_select_paged_in_out(*call, selected)
    >>> bool((selected == blitz_attn.quest_block_select_paged(*call, 8)).all())
    True
    """
    per_query_head = _selects_per_query_head(query, maxblocks, selected_indices)
    if selected_indices is None:
        raise TypeError("selected_indices: expected an array, got NoneType")
    _quest(
        query, maxblocks, minblocks, metadata_block_tables, seq_lens, None, None, per_query_head, 0, -1, False, selected_indices, dtype,
        None,
    )  # fmt: skip


def quest_block_select_paged_in_out_w(
    query: Array,
    maxblocks: Array,
    minblocks: Array,
    metadata_block_tables: Array,
    seq_lens: Integers,
    tokens_since_metadata_update: IntOrIntegers,
    selected_indices: Array,
    *,
    dtype: DType | None = None,
) -> None:
    """`quest_block_select_paged_in_out` that always selects the first block and the newest blocks.

    The newest blocks are those that were not complete when the summaries were last made, so that the summaries do not cover all of their
    tokens. With m = seq_len - tokens_since_metadata_update, there are ``ceil(seq_len / block_size) - floor(m / block_size)`` newest blocks.
    They are the last of the used entries of a row, and the very newest block is at the end.

    Parameters
    ----------
    query, maxblocks, minblocks, metadata_block_tables, seq_lens, dtype
        See `quest_block_select_paged`. `seq_lens` are the present lengths. `metadata_block_tables` has summary pages for all blocks of
        these lengths, also for the newest blocks.
    tokens_since_metadata_update : int or sequence of int
        Number of tokens that each request has got since its summaries were last made: one number for all, or ``(B,)``. A single -1
        for all turns the whole rule off; a -1 among ``(B,)`` numbers forces no newest block of its own request.
    selected_indices : array of int32
        ``(B, N, k)``, written in place. The shape ``(B, H, k)`` selects for each query head. Unused entries hold -1.

    Raises
    ------
    TypeError, ValueError
        As `quest_block_select_paged`. Nothing has been written then.

    Notes
    -----
    Upstream [1]_ differs as follows:

    - Upstream counts ``(m % block_size != 0) + seq_len // block_size - m // block_size`` newest blocks. This number is one too low if m
      is a multiple of block_size and seq_len is not: the block that holds the newest tokens is then not forced. It is one too high if
      seq_len is a multiple and m is not.
    - Upstream lists a block twice if it is forced and also has one of the best scores; this function does not.
    - Upstream can overwrite the first block where the newest blocks take all entries. Here, too, the newest blocks take precedence over
      the first block, but no other block does.
    - The differences that `quest_block_select_paged` lists apply here, too.
    - This function takes one number per request, and any number of tokens since the update.

    References
    ----------
    .. [1] The select_attn_ops package of the CANN operator family, quest_block_select_paged_in_out_w.

    Examples
    --------
    >>> import numpy as np
    >>> import blitz_attn
    >>> rng = np.random.default_rng(0)
    >>> q, maxblocks = rng.standard_normal((1, 4, 64), dtype=np.float32), rng.standard_normal((2, 16, 2, 64), dtype=np.float32)
    >>> selected = np.empty((1, 2, 4), np.int32)
    >>> blitz_attn.quest_block_select_paged_in_out_w(q, maxblocks, maxblocks - 1, np.array([[1]]), [179], 3, selected)
    >>> selected[0, :, 0].tolist(), selected[0, :, -1].tolist()  # block 0, and block 11 of the 3 tokens from 176 on
    ([0, 0], [11, 11])
    """
    per_query_head = _selects_per_query_head(query, maxblocks, selected_indices)
    if selected_indices is None:
        raise TypeError("selected_indices: expected an array, got NoneType")
    one_number = hasattr(type(tokens_since_metadata_update), "__index__") and not _arrays.shape_of(tokens_since_metadata_update)
    off = one_number and _arrays.integer(tokens_since_metadata_update, "tokens_since_metadata_update") == -1
    _quest(
        query, maxblocks, minblocks, metadata_block_tables, seq_lens, None, None, per_query_head, 0 if off else 1,
        tokens_since_metadata_update, False, selected_indices, dtype, None,
    )  # fmt: skip


# ---- All selectors ------------------------------------------------------------------------------------------------


@overload
def select_blocks(
    q: Tensor, source: Source, tables: Array, seq_lens: Integers, k: IntOrIntegers | None = None, *,
    return_scores: Literal[False] = False, **options: Unpack[SelectOptions],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def select_blocks(
    q: Tensor, source: Source, tables: Array, seq_lens: Integers, k: IntOrIntegers | None = None, *,
    return_scores: Literal[True], **options: Unpack[SelectOptions],
) -> tuple[Tensor, Tensor, Tensor]: ...  # fmt: skip
@overload
def select_blocks(
    q: Array, source: Source, tables: Array, seq_lens: Integers, k: IntOrIntegers | None = None, *,
    return_scores: Literal[False] = False, **options: Unpack[SelectOptions],
) -> tuple[ndarray, ndarray]: ...  # fmt: skip
@overload
def select_blocks(
    q: Array, source: Source, tables: Array, seq_lens: Integers, k: IntOrIntegers | None = None, *, return_scores: Literal[True],
    **options: Unpack[SelectOptions],
) -> tuple[ndarray, ndarray, ndarray]: ...  # fmt: skip
@overload
def select_blocks(
    q: Array, source: Source, tables: Array, seq_lens: Integers, k: IntOrIntegers | None = None, *, return_scores: bool,
    **options: Unpack[SelectOptions],
) -> tuple[Any, ...]: ...  # fmt: skip
def select_blocks(
    q: Any,
    source: Any,
    tables: Any,
    seq_lens: Any,
    k: Any = None,
    *,
    budget: Any = None,
    method: Method = "quest",
    sink: int = 1,
    recent: Any = 1,
    per_query_head: bool = False,
    dense_below: int | None = None,
    tokens_since_metadata_update: Any = -1,
    q_lens: Any = None,
    ascending: bool = True,
    block_size: int | None = None,
    kv_layout: KVLayout = "NHD",
    return_scores: bool = False,
    k_scale: Any = None,
    dtype: Any = None,
    kv_dtype: Any = None,
    num_threads: int | None = None,
) -> tuple[Any, ...]:
    """The blocks of each request that matter most to its queries, by one of three scores.

    Parameters
    ----------
    q : array
        ``(B, H, D)``, one query per request; with `q_lens` ``(T, H, D)``, the queries of all requests one after the other. float32,
        float16, bfloat16 or float64.
    source : array or tuple of array
        The arrays from which scores are computed: for quest the pair ``(maxblocks, minblocks)`` and for mean the ``meanblocks`` of
        `quest_prefill_metadata`; for max the key cache, which may be one of 8 bits or fewer.
    tables : array of int32 or int64
        ``(B, M)``: page numbers of `source`: the ``metadata_block_tables``, or for max the ``block_tables``.
    seq_lens : sequence of int
        ``(B,)``: number of tokens of each request.
    k : int or sequence of int, optional
        Number of blocks to select, at least 1, including forced ones: one number for all requests, or ``(B,)``.
    budget : int or sequence of int, optional
        `k` in tokens, at least 1: ``max(1, budget // block_size)`` blocks are selected. Give exactly one of `k` and `budget`.
    method : {"quest", "mean", "max"}
        The score of a block. quest: an upper bound of ``q.k`` from the largest and the smallest value of each channel. mean: the product of
        ``q`` and the mean key. max: the largest ``q.k`` of its keys, for which all keys are read.
    sink : int
        Number of blocks at the start of a request that are always selected, at least 0.
    recent : int or sequence of int
        Number of blocks at the end of a request that are always selected, at least 0: one number for all requests, or ``(B,)``. If sinks
        and recent blocks do not all fit, recent blocks take precedence.
    per_query_head : bool
        Score with each query head by itself. Default: score once for each key/value head, with the mean query of its group.
    dense_below : int, optional
        Requests of fewer tokens than this select all of their blocks.
    tokens_since_metadata_update : int or sequence of int
        Number of tokens that each request has got since its summaries were last made, see `quest_block_select_paged_in_out_w`: blocks that
        the summaries do not cover are selected even where `recent` is smaller. -1: the summaries cover all tokens.
    q_lens : sequence of int, optional
        ``(B,)``: number of queries of each request, 0 to ``seq_lens[b]``. The queries are its last tokens, as in speculative decoding, and
        share one list per key/value head (or query head): see the notes. A request without queries selects no block. Default: each request
        has one query.
    ascending : bool
        Order the blocks of a row by number. False: sinks come first, then other blocks by falling score, then recent blocks.
    block_size : int, optional
        Number of tokens per block. Default: the number of rows of a summary page; for max, the number of tokens of a page. Give it where
        pages of keys have another size than pages of summaries: no other argument shows the size of pages of keys, and with a wrong size,
        wrong blocks are chosen.
    kv_layout : {"NHD", "HND"}
        Layout of the key cache for max.
    return_scores : bool
        Also return the score of each selected block.
    k_scale : array of float32, or float, optional
        The factors of int8 and float8 e4m3 keys for max, see `paged_attention`.
    dtype, kv_dtype : str or dtype, optional
        ``"bfloat16"`` says that uint16 arrays hold bfloat16 bits; for a key cache of uint8, `kv_dtype` says what it holds, see
        `paged_attention`. `kv_dtype` defaults to `dtype`.
    num_threads : int, optional
        Threads for this call. Default: see `set_num_threads`. The result does not depend on it.

    Returns
    -------
    selected : array
        int32 ``(B, Hkv, K)`` or, with `per_query_head`, ``(B, H, K)``; no block occurs twice, and unused entries hold -1. K is the largest
        number of blocks that any request may select.
    counts : array
        int32, ``(B, Hkv)`` or ``(B, H)``: number of entries in use.
    scores : array
        With `return_scores`: float32, of the shape of `selected`, the score of each selected block, including those that are always
        selected; ``-inf`` in unused entries.

    Raises
    ------
    TypeError, ValueError
        An argument of the wrong kind, shape or range.

    See Also
    --------
    blitz_attn.paged_select_attention : attends to the selected blocks.
    select_and_attend : both in one call.

    Notes
    -----
    Of blocks with equal scores, the lower is selected. A score of NaN comes last; for max, a key whose ``q.k`` is NaN makes the score of
    its block NaN. quest follows [1]_, and mean follows the gate of MoBA [2]_.

    With `q_lens`, the score of a block is the largest of its scores with each query of the request (by default, with each token's mean
    query of a group), and NaN if one of these scores is NaN. `recent` counts back from the block of each query's own token: unless `recent`
    is 0, all blocks that hold tokens of the queries are selected, and the `recent` - 1 blocks before them. So a list has all blocks that
    each of its queries, decoded alone, would force, as far as k allows. A query also scores the blocks of tokens after it.

    A block's score depends on the queries of its request and on that block alone. If the blocks of a request are shared out, for example
    over processes, the best k blocks are among the best k of each share. Join the candidates of all shares and take the k with the highest
    scores; of equal scores, take the block with the lower number.

    References
    ----------
    .. [1] J. Tang et al., "Quest: Query-Aware Sparsity for Efficient Long-Context LLM Inference", 2024.
    .. [2] E. Lu et al., "MoBA: Mixture of Block Attention for Long-Context LLMs", 2025.

    Examples
    --------
    >>> import numpy as np
    >>> import blitz_attn
    >>> rng = np.random.default_rng(0)
    >>> q = rng.standard_normal((1, 4, 64), dtype=np.float32)
    >>> k_cache = rng.standard_normal((8, 16, 2, 64), dtype=np.float32)
    >>> tables, seq_lens = np.array([[3, 0, 6, 7, 1]]), [77]
    >>> selected, counts = blitz_attn.select_blocks(q, k_cache, tables, seq_lens, 3, method="max")
    >>> exact, exact_counts = blitz_attn.reference.select_blocks(q, k_cache, tables, seq_lens, 3, method="max")
    >>> bool((selected == exact).all()), bool((counts == exact_counts).all())
    (True, True)

    Three draft tokens, which share the lists of their request:

    >>> drafts = rng.standard_normal((3, 4, 64), dtype=np.float32)
    >>> selected, counts = blitz_attn.select_blocks(drafts, k_cache, tables, seq_lens, 3, method="max", q_lens=[3])
    >>> selected.shape
    (1, 2, 3)
    >>> blitz_attn.paged_select_attention(drafts, k_cache, k_cache, tables, seq_lens, selected, counts=counts, q_lens=[3]).shape
    (3, 4, 64)
    """
    return select_pages(**locals())


@overload
def select_and_attend(
    q: Kind, k_cache: Array, v_cache: Array, block_tables: Tables, seq_lens: Integers | None, source: Source = None,
    metadata_block_tables: Array | None = None, *, return_lse: Literal[False] = False, return_selected: Literal[False] = False,
    **options: Unpack[PagedChoiceOptions],
) -> Kind: ...  # fmt: skip
@overload
def select_and_attend(
    q: Kind, k_cache: Array, v_cache: Array, block_tables: Tables, seq_lens: Integers | None, source: Source = None,
    metadata_block_tables: Array | None = None, *, return_lse: Literal[True], return_selected: Literal[False] = False,
    **options: Unpack[PagedChoiceOptions],
) -> tuple[Kind, Kind]: ...  # fmt: skip
@overload
def select_and_attend(
    q: Tensor, k_cache: Array, v_cache: Array, block_tables: Tables, seq_lens: Integers | None, source: Source = None,
    metadata_block_tables: Array | None = None, *, return_selected: Literal[True], return_lse: bool = False,
    **options: Unpack[PagedChoiceOptions],
) -> tuple[Tensor, ...]: ...  # fmt: skip
@overload
def select_and_attend(
    q: JaxArray, k_cache: Array, v_cache: Array, block_tables: Tables, seq_lens: Integers | None, source: Source = None,
    metadata_block_tables: Array | None = None, *, return_selected: Literal[True], return_lse: bool = False,
    **options: Unpack[PagedChoiceOptions],
) -> tuple[Any, ...]: ...  # fmt: skip
@overload
def select_and_attend(
    q: Array, k_cache: Array, v_cache: Array, block_tables: Tables, seq_lens: Integers | None, source: Source = None,
    metadata_block_tables: Array | None = None, *, return_lse: Literal[False] = False, return_selected: Literal[False] = False,
    **options: Unpack[PagedChoiceOptions],
) -> ndarray: ...  # fmt: skip
@overload
def select_and_attend(
    q: Array, k_cache: Array, v_cache: Array, block_tables: Tables, seq_lens: Integers | None, source: Source = None,
    metadata_block_tables: Array | None = None, *, return_lse: Literal[True], return_selected: Literal[False] = False,
    **options: Unpack[PagedChoiceOptions],
) -> tuple[ndarray, ndarray]: ...  # fmt: skip
@overload
def select_and_attend(
    q: Array, k_cache: Array, v_cache: Array, block_tables: Tables, seq_lens: Integers | None, source: Source = None,
    metadata_block_tables: Array | None = None, *, return_selected: Literal[True], return_lse: bool = False,
    **options: Unpack[PagedChoiceOptions],
) -> tuple[ndarray, ...]: ...  # fmt: skip
@overload
def select_and_attend(
    q: Array, k_cache: Array, v_cache: Array, block_tables: Tables, seq_lens: Integers | None, source: Source = None,
    metadata_block_tables: Array | None = None, *, return_lse: bool = False, return_selected: bool = False,
    **options: Unpack[PagedChoiceOptions],
) -> Any: ...  # fmt: skip
def select_and_attend(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    block_tables: Any,
    seq_lens: Any,
    source: Any = None,
    metadata_block_tables: Any = None,
    *,
    k: Any = None,
    budget: Any = None,
    method: Method = "quest",
    sink: int = 1,
    recent: Any = 1,
    per_query_head: bool = False,
    dense_below: int | None = None,
    tokens_since_metadata_update: Any = -1,
    scale: float | None = None,
    kv_layout: KVLayout = "NHD",
    q_lens: Any = None,
    window: int | None = None,
    sinks: Any = None,
    softcap: float | None = None,
    k_scale: Any = None,
    v_scale: Any = None,
    kv_ranges: Any = None,
    attn_mask: Any = None,
    alibi_slopes: Any = None,
    kv_split: int | None = None,
    return_lse: bool = False,
    return_selected: bool = False,
    out_dtype: Any = None,
    out: Any = None,
    dtype: Any = None,
    kv_dtype: Any = None,
    num_threads: int | None = None,
) -> Any:
    """Attention of each request's newest queries over the blocks that matter most to them: `select_blocks`, then `paged_select_attention`.

    Parameters
    ----------
    q : array
        ``(B, H, D)``, one query per request; with `q_lens` ``(T, H, D)``, the queries of all requests one after the other.
    k_cache, v_cache, block_tables, seq_lens
        See `paged_attention`.
    source, metadata_block_tables : optional
        See `select_blocks`: summaries and their tables for quest and mean. None for max, which takes `k_cache` and `block_tables`.
    k, budget, method, sink, recent, per_query_head, dense_below, tokens_since_metadata_update
        See `select_blocks`.
    scale, kv_layout, q_lens, window, sinks, softcap, k_scale, v_scale, kv_ranges, attn_mask, alibi_slopes, kv_split, return_lse
        See `paged_attention`.
    out_dtype, out, dtype, kv_dtype, num_threads
        See `paged_attention`.
    return_selected : bool
        Also return the selected blocks and their counts.

    Returns
    -------
    out : array
        As from `paged_select_attention`.
    lse : array
        With `return_lse`, as from `paged_select_attention`.
    selected, counts : array
        With `return_selected`, as from `select_blocks`.

    Raises
    ------
    TypeError, ValueError, MemoryError
        As `select_blocks` and `paged_select_attention`.

    See Also
    --------
    blitz_attn.PagedPlan.select_and_attend : the same with the tables of a plan, which are checked once for all layers of a step.

    Notes
    -----
    Blocks are chosen without `window`, `sinks`, `softcap`, `kv_ranges`, `attn_mask` and `alibi_slopes`; attention over the chosen blocks
    then uses all of these options. So a block in which no token is seen may be chosen, and counts towards the budget. `attn_mask` has a
    column for each token of the request, as in `paged_attention`, whichever blocks are chosen.

    Queries are the last tokens of their requests, from which `recent` blocks are counted. Where the cache holds a stretch of a longer
    request, choose with `select_blocks`, and attend with `paged_select_attention`, which takes `q_begin`.

    Examples
    --------
    >>> import numpy as np
    >>> import blitz_attn
    >>> rng = np.random.default_rng(0)
    >>> q = rng.standard_normal((1, 4, 64), dtype=np.float32)
    >>> k_cache, v_cache = (rng.standard_normal((8, 16, 2, 64), dtype=np.float32) for _ in range(2))
    >>> tables, seq_lens, summary_tables = np.array([[3, 0, 6, 7, 1]]), [77], np.array([[1]])
    >>> maxblocks, minblocks = (np.empty((2, 16, 2, 64), np.float32) for _ in range(2))
    >>> blitz_attn.quest_prefill_metadata(k_cache, tables, seq_lens, summary_tables, maxblocks, minblocks)
    >>> out = blitz_attn.select_and_attend(
    ...     q, k_cache, v_cache, tables, seq_lens, (maxblocks, minblocks), summary_tables, budget=48)
    >>> selected, counts = blitz_attn.select_blocks(q, (maxblocks, minblocks), summary_tables, seq_lens, budget=48)
    >>> exact = blitz_attn.reference.paged_select_attention(q, k_cache, v_cache, tables, seq_lens, selected, counts=counts)
    >>> bool(np.abs(out - exact).max() < 1e-5)
    True
    """
    with_lse, with_selected = _arrays.flag(return_lse, "return_lse"), _arrays.flag(return_selected, "return_selected")
    requests = (*tables_for_core(block_tables, seq_lens), q_lens, None, kv_split)
    tables, lengths, queries = block_tables, seq_lens, q_lens
    if isinstance(block_tables, tuple):  # opened tables include lengths and q_lens
        tables, lengths, queries = None, _opened(q, k_cache, kv_layout, block_tables, seq_lens, q_lens), None
    selected, counts = select_to_attend(
        q, k_cache, tables, lengths, source, metadata_block_tables, k, budget=budget, method=method, sink=sink, recent=recent,
        per_query_head=per_query_head, dense_below=dense_below, tokens_since_metadata_update=tokens_since_metadata_update, q_lens=queries,
        kv_layout=kv_layout, k_scale=k_scale, dtype=dtype, kv_dtype=kv_dtype, num_threads=num_threads,
    )  # fmt: skip
    result = attend_requests(
        q, k_cache, v_cache, requests, (out_dtype, dtype, kv_dtype, scale, kv_layout, window, softcap, num_threads),
        selected, counts, sinks, k_scale, v_scale, kv_ranges, attn_mask, alibi_slopes, with_lse, out,
    )  # fmt: skip
    return with_lists(result, with_lse, (selected, counts) if with_selected else ())


def _opened(q: Any, k_cache: Any, kv_layout: Any, block_tables: Any, seq_lens: Any, q_lens: Any) -> Opened:
    """Opens tables of `select_and_attend` that are (indptr, indices, last_page_len), and checks that they have as many queries as `q`."""
    page_size, shape = cache_sizes(k_cache, kv_layout)[1], _arrays.shape_of(q)
    try:
        opened, batch, num_queries = open_requests(*tables_for_core(block_tables, seq_lens), q_lens, None, page_size)
    except ValueError as error:
        rename(error, {"page_size": "k_cache"})
        raise
    if len(shape) == 3 and shape[0] != num_queries:
        if q_lens is None:
            raise ValueError(f"q: expected shape ({batch}, H, D), got {shape}")
        raise ValueError(f"q_lens: expected lengths that add up to q's {shape[0]} tokens, got {num_queries}")
    return Opened(opened[0], page_size)
