"""float64 twins of page summaries, of filling a cache with them, and of selecting pages by them. Public through
`blitz_attn.reference`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .._arrays import dtype_name
from .dense import round_to, to_float64
from .paged import by_token, gather, is_e4m3, paged_select_attention, quantize_kv, quantized, scale_by_token, tables_of

# ---- Summaries ----------------------------------------------------------------------------------------------------


_REDUCTIONS = {"max": np.fmax.reduce, "min": np.fmin.reduce, "mean": np.mean}  # the first two ignore NaN where there is a number


def _put(array: np.ndarray, at: tuple, values: np.ndarray) -> None:
    """Writes float64 values into an array of the library's dtypes, uint16 standing for bfloat16 bits."""
    if array.dtype == np.uint16:
        array[at] = round_to(values, "bfloat16").view(np.uint16)
    else:
        array[at] = round_to(values, dtype_name(array.dtype)).astype(array.dtype)


def _summarise(k_cache, block_tables, seq_lens, metadata_block_tables, summaries, start_lens, kv_layout, k_scale, dtype):
    """Writes page summaries: `summaries` maps ``"max"``, ``"min"`` and ``"mean"`` to the arrays to write. A product of an 8-bit number and
    its scale is exact in float64, so that the largest and the smallest, rounded, are those of the rounded products."""
    cache = np.asarray(k_cache)
    page_size = cache.shape[1 if kv_layout == "NHD" else 2]
    starts = np.zeros(len(seq_lens), int) if start_lens is None else np.asarray(start_lens)
    summary_tables = np.asarray(metadata_block_tables)
    for b, (pages, tokens) in enumerate(tables_of(block_tables, seq_lens, page_size)):
        if starts[b] >= tokens:
            continue
        rows = next(iter(summaries.values())).shape[1]
        for page in range(starts[b] // page_size, -(-len(pages) // rows) * rows):
            at = (summary_tables[b, page // rows], page % rows)
            k = gather(cache, k_scale, kv_layout, dtype, pages[page : page + 1], min(page_size, tokens - page * page_size))
            for kind, array in summaries.items():
                _put(array, at, _REDUCTIONS[kind](k, axis=1) if page < len(pages) else np.zeros(array.shape[2:]))


def quest_prefill_metadata(
    k_cache,
    block_tables,
    seq_lens,
    metadata_block_tables,
    maxblocks,
    minblocks,
    *,
    start_lens=None,
    kv_layout="NHD",
    k_scale=None,
    dtype=None,
    meanblocks=None,
    num_threads=None,
):
    """See `blitz_attn.quest_prefill_metadata`."""
    wanted = {"max": maxblocks, "min": minblocks, "mean": meanblocks}
    summaries = {kind: array for kind, array in wanted.items() if array is not None}
    _summarise(k_cache, block_tables, seq_lens, metadata_block_tables, summaries, start_lens, kv_layout, k_scale, dtype)


# ---- Filling the cache --------------------------------------------------------------------------------------------


def append_paged_kv(
    k,
    v,
    k_cache,
    v_cache,
    *,
    slot_mapping=None,
    block_tables=None,
    seq_lens=None,
    q_lens=None,
    kv_layout="NHD",
    k_scale=None,
    v_scale=None,
    maxblocks=None,
    minblocks=None,
    meanblocks=None,
    metadata_block_tables=None,
    dtype=None,
    kv_dtype=None,
    num_threads=None,
):
    """See `blitz_attn.append_paged_kv`. Writes one token at a time, in the dtypes of the caches."""
    page_size = by_token(k_cache, kv_layout).shape[1]
    slots = slot_mapping if slot_mapping is not None else _newest_slots(block_tables, seq_lens, q_lens, page_size)
    used = [int(s) for s in slots if s >= 0]
    if len(slots) != len(k) or len(set(used)) != len(used):
        raise ValueError(f"slot_mapping: expected {len(k)} slots, each once, got {list(slots)}")
    for tokens, cache, scale in ((k, k_cache, k_scale), (v, v_cache, v_scale)):
        if tokens is None:
            continue
        wide, pages = to_float64(tokens, kv_dtype if dtype is None else dtype), by_token(cache, kv_layout)
        for token, slot in zip(wide, slots, strict=True):
            if slot < 0:
                continue
            at = divmod(int(slot), page_size)
            if scale is None:
                pages[at] = round_to(token, "bfloat16" if pages.dtype == np.uint16 else dtype_name(pages.dtype)).view(pages.dtype)
                continue
            name = "float8_e4m3" if is_e4m3(pages, kv_dtype) else "int8"
            if np.ndim(scale) == 3:
                values, by_token(scale, kv_layout)[at] = quantize_kv(token, name)
            else:
                values = quantized(token, name, scale_by_token(scale, pages, kv_layout)[at])
            pages[at] = values.view(pages.dtype)
    if metadata_block_tables is not None:
        news = [1] * len(seq_lens) if q_lens is None else q_lens
        starts = [n if new == 0 else 0 for n, new in zip(seq_lens, news, strict=True)]
        summaries = (metadata_block_tables, maxblocks, minblocks)
        how = {"kv_layout": kv_layout, "k_scale": k_scale, "dtype": kv_dtype, "meanblocks": meanblocks}
        quest_prefill_metadata(k_cache, block_tables, seq_lens, *summaries, start_lens=starts, **how)


def _newest_slots(block_tables, seq_lens, q_lens, page_size) -> list[int]:
    """Slot (page * page_size + place) of each request's newest tokens, one request after the other."""
    tables = tables_of(block_tables, seq_lens, page_size)
    news = [1] * len(tables) if q_lens is None else [int(n) for n in np.asarray(q_lens)]
    slots = []
    for (pages, tokens), new in zip(tables, news, strict=True):
        slots += [int(pages[t // page_size]) * page_size + t % page_size for t in range(tokens - new, tokens)]
    return slots


# ---- Scores -------------------------------------------------------------------------------------------------------


def _grouped_queries(query: Any, kv_heads: int, per_query_head: bool, dtype: Any = None) -> np.ndarray:
    """(B, rows, D): each head's query, or the mean of each group's."""
    q = to_float64(query, dtype)
    return q if per_query_head else q.reshape(len(q), kv_heads, q.shape[1] // kv_heads, q.shape[2]).mean(axis=2)


def _summary_rows(array: Any, table: np.ndarray, pages: int, dtype: Any) -> np.ndarray:
    """(heads, pages, D) summaries of one request."""
    return gather(array, None, "NHD", dtype, np.asarray(table, np.int64)[: -(-pages // np.shape(array)[1])], pages)


def _page_scores(
    query, sources, tables, seq_lens, page_size, *, method, per_query_head=False, kv_layout="NHD", k_scale=None, dtype=None, kv_dtype=None,
    q_lens=None,
) -> list[np.ndarray]:  # fmt: skip
    """(rows, pages) scores of each request's own pages: the largest by any of its queries, NaN where one is. No pages where it has none.

    `sources` are the arrays that the method reads: (maxblocks, minblocks) for quest, (meanblocks,) for mean, (k_cache,)
    for max, where `tables` are block tables.
    """
    axis = 1 if method == "max" and kv_layout == "HND" else 2
    kv_heads = np.shape(sources[0])[axis]
    queries = _grouped_queries(query, kv_heads, per_query_head, dtype)
    shared = queries.shape[1] // kv_heads
    scores = []
    numbers = np.ones(len(seq_lens), int) if q_lens is None else np.asarray(q_lens, int)
    per_request = [queries[end - count : end] for end, count in zip(np.cumsum(numbers), numbers, strict=True)]
    for own, table, tokens in zip(per_request, np.asarray(tables), np.asarray(seq_lens), strict=True):
        n = -(-int(tokens) // page_size)
        if method == "max":
            named = dtype if kv_dtype is None else kv_dtype
            k = gather(sources[0], k_scale, kv_layout, named, np.asarray(table, np.int64)[:n], int(tokens))
            parts: list = [k]
        else:
            parts = [_summary_rows(x, table, n, dtype) for x in sources]
        parts = [np.repeat(x, shared, axis=0) for x in parts]
        by_query = [_scores_of_query(q, parts, method, page_size) for q in own]
        scores.append(np.max(by_query, axis=0) if by_query else np.empty((queries.shape[1], 0)))
    return scores


def _scores_of_query(q: np.ndarray, parts: list[np.ndarray], method: str, page_size: int) -> np.ndarray:
    """(rows, pages) scores by one query."""
    if method == "quest":
        return np.maximum(q[:, None] * parts[0], q[:, None] * parts[1]).sum(axis=-1)
    by_row = (q[:, None] * parts[0]).sum(axis=-1)
    if method == "mean" or not by_row.shape[1]:
        return by_row
    if method == "max":
        return np.maximum.reduceat(by_row, np.arange(0, by_row.shape[1], page_size), axis=1)
    raise ValueError(f"method: expected quest, mean or max, got {method!r}")


def _choose(scores: np.ndarray, slots: int, sink: int, recent: int, ascending: bool) -> np.ndarray:
    """Selected pages of one row of scores: sinks, then by falling score with ties to the lower page, then the newest."""
    n = len(scores)
    slots = min(slots, n)
    recent = min(recent, slots)
    sink = min(sink, slots - recent, n - recent)
    middle = np.arange(sink, n - recent)
    best = middle[np.argsort(-scores[sink : n - recent], kind="stable")][: slots - recent - sink]
    picked = np.concatenate([np.arange(sink), best, np.arange(n - recent, n)])
    return np.sort(picked) if ascending else picked


def _select(
    scores: list[np.ndarray], width: int, sink: int, recent: Any, ascending: bool = False, slots: Any = None
) -> tuple[np.ndarray, np.ndarray]:
    """(selected, counts) of all rows. `slots`: the number of places that each request may fill; None: all."""
    rows = scores[0].shape[0] if scores else 0
    selected, counts = np.full((len(scores), rows, width), -1, np.int32), np.zeros((len(scores), rows), np.int32)
    for b, request in enumerate(scores):
        for r, row in enumerate(request):
            picked = _choose(row, width if slots is None else min(width, int(slots[b])), sink, int(recent[b]), ascending)
            selected[b, r, : picked.size], counts[b, r] = picked, picked.size
    return selected, counts


def _unsummarised(seq_lens: Any, since: Any, size: int) -> np.ndarray:
    """Number of pages of each request that were not complete `since` tokens ago, when their summaries were made; 0 where that is -1."""
    lengths = np.asarray(seq_lens, np.int64)
    since = np.broadcast_to(np.asarray(since), lengths.shape)
    return np.where(since < 0, 0, -(-lengths // size) - np.maximum(lengths - since, 0) // size)


def _newest(recent: Any, lengths: np.ndarray, q_lens: Any, size: int) -> np.ndarray:
    """Number of newest pages of each request: `recent`, counted from the page of each query's own token."""
    recent = np.broadcast_to(np.asarray(recent), lengths.shape)
    if q_lens is None:
        return recent
    queries = np.asarray(q_lens)
    own = (lengths - 1) // size - (lengths - np.maximum(queries, 1)) // size
    return np.where(recent > 0, recent + own, 0)


# ---- Quest by upstream's names ------------------------------------------------------------------------------------


def quest_block_select_paged(
    query,
    maxblocks,
    minblocks,
    metadata_block_tables,
    seq_lens,
    k,
    *,
    per_query_head=False,
    ascending=False,
    block_size=None,
    dtype=None,
    num_threads=None,
):
    """See `blitz_attn.quest_block_select_paged`. The selection is int32."""
    size = np.shape(maxblocks)[1] if block_size is None else int(block_size)
    sources = (maxblocks, minblocks)
    scores = _page_scores(query, sources, metadata_block_tables, seq_lens, size, method="quest", per_query_head=per_query_head, dtype=dtype)
    return _select(scores, int(k), 0, [0] * len(scores), ascending)[0]


def quest_block_select_paged_in_out(query, maxblocks, minblocks, metadata_block_tables, seq_lens, selected_indices, *, dtype=None):
    """See `blitz_attn.quest_block_select_paged_in_out`."""
    quest_block_select_paged_in_out_w(query, maxblocks, minblocks, metadata_block_tables, seq_lens, -1, selected_indices, dtype=dtype)


def quest_block_select_paged_in_out_w(
    query, maxblocks, minblocks, metadata_block_tables, seq_lens, tokens_since_metadata_update, selected_indices, *, dtype=None
):
    """See `blitz_attn.quest_block_select_paged_in_out_w`."""
    size, forced = np.shape(maxblocks)[1], np.ndim(tokens_since_metadata_update) > 0 or int(tokens_since_metadata_update) >= 0
    per_query_head = selected_indices.shape[1] != np.shape(maxblocks)[2]
    sources, recent = (maxblocks, minblocks), _unsummarised(seq_lens, tokens_since_metadata_update, size)
    scores = _page_scores(query, sources, metadata_block_tables, seq_lens, size, method="quest", per_query_head=per_query_head, dtype=dtype)
    selected_indices[...] = _select(scores, selected_indices.shape[2], int(forced), recent)[0]


# ---- One signature for all selectors ------------------------------------------------------------------------------


def select_blocks(
    q,
    source,
    tables,
    seq_lens,
    k=None,
    *,
    budget=None,
    method="quest",
    sink=1,
    recent=1,
    per_query_head=False,
    dense_below=None,
    tokens_since_metadata_update=-1,
    q_lens=None,
    ascending=True,
    block_size=None,
    kv_layout="NHD",
    return_scores=False,
    k_scale=None,
    dtype=None,
    kv_dtype=None,
    num_threads=None,
):
    """See `blitz_attn.select_blocks`. Scores are summed in float64: blocks whose scores differ by less than float32 rounding may be
    ranked differently."""
    if (k is None) == (budget is None):
        raise ValueError("budget: expected exactly one of budget and k")
    sources = source if method == "quest" else (source,)
    lengths = np.asarray(seq_lens, np.int64)
    shape = np.shape(sources[0])
    size = shape[2 if method == "max" and kv_layout == "HND" else 1] if block_size is None else int(block_size)
    slots = np.broadcast_to(np.asarray(k) if k is not None else np.maximum(1, np.asarray(budget) // size), lengths.shape)
    if dense_below is not None:
        slots = np.where(lengths < dense_below, -(-lengths // size), slots)
    newest = np.maximum(_newest(recent, lengths, q_lens, size), _unsummarised(lengths, tokens_since_metadata_update, size))
    how = {"method": method, "per_query_head": per_query_head, "kv_layout": kv_layout, "dtype": dtype, "q_lens": q_lens}
    how |= {"k_scale": k_scale, "kv_dtype": kv_dtype}
    scores = _page_scores(q, sources, tables, lengths, size, **how)
    selected, counts = _select(scores, max(1, int(slots.max(initial=1))), int(sink), newest, ascending, slots)
    if not return_scores:
        return selected, counts
    kept = np.full(selected.shape, -np.inf)
    for (b, r, i), page in np.ndenumerate(selected):
        if page >= 0:
            kept[b, r, i] = scores[b][r][page]
    return selected, counts, kept


def select_and_attend(
    q,
    k_cache,
    v_cache,
    block_tables,
    seq_lens,
    source=None,
    metadata_block_tables=None,
    *,
    k=None,
    budget=None,
    method="quest",
    sink=1,
    recent=1,
    per_query_head=False,
    dense_below=None,
    tokens_since_metadata_update=-1,
    scale=None,
    kv_layout="NHD",
    q_lens=None,
    window=None,
    sinks=None,
    softcap=None,
    k_scale=None,
    v_scale=None,
    kv_ranges=None,
    attn_mask=None,
    alibi_slopes=None,
    kv_split=None,
    return_lse=False,
    return_selected=False,
    out_dtype=None,
    out=None,
    dtype=None,
    kv_dtype=None,
    num_threads=None,
):
    """See `blitz_attn.select_and_attend`."""
    size = by_token(k_cache, kv_layout).shape[1]
    if isinstance(block_tables, tuple):
        runs = tables_of(block_tables, seq_lens, size)
        seq_lens = [n for _, n in runs]
        block_tables = np.zeros((len(runs), max((len(pages) for pages, _ in runs), default=0)), np.int64)
        for row, (pages, _) in zip(block_tables, runs, strict=True):
            row[: len(pages)] = pages
    selected, counts = select_blocks(
        q,
        k_cache if method == "max" else source,
        block_tables if method == "max" else metadata_block_tables,
        seq_lens,
        k,
        budget=budget,
        method=method,
        sink=sink,
        recent=recent,
        per_query_head=per_query_head,
        dense_below=dense_below,
        tokens_since_metadata_update=tokens_since_metadata_update,
        q_lens=q_lens,
        block_size=size,
        kv_layout=kv_layout,
        k_scale=k_scale if method == "max" else None,
        dtype=dtype if dtype is not None or method == "max" else kv_dtype,
        kv_dtype=kv_dtype if method == "max" else None,
    )
    result = paged_select_attention(
        q,
        k_cache,
        v_cache,
        block_tables,
        seq_lens,
        selected,
        counts=counts,
        scale=scale,
        kv_layout=kv_layout,
        q_lens=q_lens,
        window=window,
        sinks=sinks,
        softcap=softcap,
        k_scale=k_scale,
        v_scale=v_scale,
        kv_ranges=kv_ranges,
        attn_mask=attn_mask,
        alibi_slopes=alibi_slopes,
        kv_split=kv_split,
        return_lse=return_lse,
        out_dtype=out_dtype,
        out=out,
        dtype=dtype,
        kv_dtype=kv_dtype,
    )
    parts = (*(result if return_lse else (result,)), *((selected, counts) if return_selected else ()))
    return parts if len(parts) > 1 else parts[0]
