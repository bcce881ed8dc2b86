"""float64 twins of page summaries, of filling a cache and its summaries, and of selecting pages by summaries. Public through
`blitz_attn.reference`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .._arrays import choice, dtype_name
from .common import round_to, taken_by, to_float64, with_options_of
from .paged import (
    CELL_BYTES,
    by_token,
    gather,
    is_e4m3,
    paged_select_attention,
    pair_of,
    quantize_kv,
    quantize_rows,
    quantized,
    scale_by_token,
    tables_of,
)  # fmt: skip

__all__ = [
    "append_paged_kv",
    "quest_block_select_paged",
    "quest_block_select_paged_in_out",
    "quest_block_select_paged_in_out_w",
    "quest_prefill_metadata",
    "select_and_attend",
    "select_blocks",
]

# ---- Summaries ----------------------------------------------------------------------------------------------------


_REDUCTIONS = {"max": np.fmax.reduce, "min": np.fmin.reduce, "mean": np.mean}  # max and min ignore NaN beside a number


def _stored(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """float64 values in a dtype of the library, uint16 standing for bfloat16 bits."""
    return round_to(values, "bfloat16" if dtype == np.uint16 else dtype_name(dtype)).view(dtype)


def quest_prefill_metadata(
    k_cache, block_tables, seq_lens, metadata_block_tables, maxblocks, minblocks, *, start_lens=None, kv_layout="NHD", k_scale=None,
    dtype=None, meanblocks=None, num_threads=None,
):  # fmt: skip
    """See `blitz_attn.quest_prefill_metadata`."""
    # A product of an 8-bit number and its scale is exact in float64, so rounding the largest product gives the largest rounded product.
    summaries = {kind: x for kind, x in (("max", maxblocks), ("min", minblocks), ("mean", meanblocks)) if x is not None}
    page_size = by_token(k_cache, kv_layout).shape[1]
    starts = np.zeros(len(seq_lens), int) if start_lens is None else np.asarray(start_lens)
    for b, (pages, tokens) in enumerate(tables_of(block_tables, seq_lens, page_size)):
        if starts[b] >= tokens:
            continue
        rows = next(iter(summaries.values())).shape[1]
        for page in range(starts[b] // page_size, -(-len(pages) // rows) * rows):
            at = (np.asarray(metadata_block_tables)[b, page // rows], page % rows)
            k = gather(k_cache, k_scale, kv_layout, dtype, pages[page : page + 1], min(page_size, tokens - page * page_size))
            for kind, array in summaries.items():
                array[at] = _stored(_REDUCTIONS[kind](k, axis=1) if page < len(pages) else np.zeros(array.shape[2:]), array.dtype)


# ---- Filling the cache --------------------------------------------------------------------------------------------


def append_paged_kv(
    k, v, k_cache, v_cache, *, slot_mapping=None, block_tables=None, seq_lens=None, q_lens=None, kv_layout="NHD", k_scale=None,
    v_scale=None, maxblocks=None, minblocks=None, meanblocks=None, metadata_block_tables=None, dtype=None, kv_dtype=None, num_threads=None,
):  # fmt: skip
    """See `blitz_attn.append_paged_kv`. Writes one token at a time, in the dtypes of the caches."""
    page_size = by_token(k_cache, kv_layout).shape[1]
    slots = slot_mapping if slot_mapping is not None else _newest_slots(block_tables, seq_lens, q_lens, page_size)
    for tokens, cache, scale, of in zip((k, v), (k_cache, v_cache), (k_scale, v_scale), pair_of(kv_dtype), strict=True):
        if tokens is None:
            continue
        wide, pages = to_float64(tokens, kv_dtype if dtype is None else dtype), by_token(cache, kv_layout)
        for token, slot in zip(wide, slots, strict=True):
            if slot < 0:
                continue
            at = divmod(int(slot), page_size)
            if scale is None and of in CELL_BYTES:
                pages[at] = quantize_rows(token, of)
                continue
            if scale is None:
                pages[at] = _stored(token, pages.dtype)
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
        quest_prefill_metadata(
            k_cache, block_tables, seq_lens, metadata_block_tables, maxblocks, minblocks, start_lens=starts, kv_layout=kv_layout,
            k_scale=k_scale, dtype=pair_of(kv_dtype)[0], meanblocks=meanblocks,
        )  # fmt: skip


def _newest_slots(block_tables: Any, seq_lens: Any, q_lens: Any, page_size: int) -> list[int]:
    """Slot (page * page_size + place) of each request's newest tokens, one request after the other."""
    tables = tables_of(block_tables, seq_lens, page_size)
    news = [1] * len(tables) if q_lens is None else [int(n) for n in np.asarray(q_lens)]
    return [
        int(pages[t // page_size]) * page_size + t % page_size
        for (pages, tokens), new in zip(tables, news, strict=True)
        for t in range(tokens - new, tokens)
    ]


# ---- Scores -------------------------------------------------------------------------------------------------------


def _page_scores(
    query, sources, tables, seq_lens, page_size, *, method, per_query_head=False, kv_layout="NHD", k_scale=None, dtype=None, kv_dtype=None,
    q_lens=None,
) -> list[np.ndarray]:  # fmt: skip
    """(rows, pages) scores of each request's own pages: the largest score by any of its queries, or NaN if one of these scores is NaN. The
    array of a request without queries has no pages.

    `sources` are the arrays that the method reads: (maxblocks, minblocks) for quest, (meanblocks,) for mean, (k_cache,)
    for max, where `tables` are block tables.
    """
    of_keys = choice(method, "method", ("quest", "mean", "max")) == "max"
    layout = kv_layout if of_keys else "NHD"
    per_page, kv_heads = by_token(sources[0], layout).shape[1:3]  # tokens, or summaries
    queries = to_float64(query, dtype)
    if not per_query_head:  # the mean query of each group
        queries = queries.reshape(len(queries), kv_heads, queries.shape[1] // kv_heads, queries.shape[2]).mean(axis=2)
    numbers = np.ones(len(seq_lens), int) if q_lens is None else np.asarray(q_lens, int)
    scores = []
    for end, count, table, tokens in zip(np.cumsum(numbers), numbers, np.asarray(tables, np.int64), np.asarray(seq_lens), strict=True):
        n = int(tokens) if of_keys else -(-int(tokens) // page_size)
        how = (k_scale, layout, dtype if kv_dtype is None or not of_keys else kv_dtype)
        parts = [np.repeat(gather(x, *how, table[: -(-n // per_page)], n), queries.shape[1] // kv_heads, axis=0) for x in sources]
        by_query = [_scores_of_query(q, parts, method, page_size) for q in queries[end - count : end]]
        scores.append(np.max(by_query, axis=0) if by_query else np.empty((queries.shape[1], 0)))
    return scores


def _scores_of_query(q: np.ndarray, parts: list[np.ndarray], method: str, page_size: int) -> np.ndarray:
    """(rows, pages) scores by one query. `parts`: (rows, pages, dim) of each summary, or (rows, tokens, dim) keys."""
    if method == "quest":
        return np.maximum(q[:, None] * parts[0], q[:, None] * parts[1]).sum(axis=-1)
    by_row = (q[:, None] * parts[0]).sum(axis=-1)
    if method == "mean" or not by_row.shape[1]:
        return by_row
    return np.maximum.reduceat(by_row, np.arange(0, by_row.shape[1], page_size), axis=1)


def _choose(scores: np.ndarray, slots: int, sink: int, recent: int, ascending: bool) -> np.ndarray:
    """Selected pages of one row of scores: sinks, others by falling score (of equal scores, the lower page first), newest. If `ascending`,
    they are sorted."""
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
    """(selected, counts) of all rows. `slots`: the number of entries that each request may fill; None: all."""
    rows = scores[0].shape[0] if scores else 0
    selected, counts = np.full((len(scores), rows, width), -1, np.int32), np.zeros((len(scores), rows), np.int32)
    for b, request in enumerate(scores):
        for r, row in enumerate(request):
            picked = _choose(row, width if slots is None else min(width, int(slots[b])), sink, int(recent[b]), ascending)
            selected[b, r, : picked.size], counts[b, r] = picked, picked.size
    return selected, counts


def _unsummarised(seq_lens: Any, since: Any, size: int) -> np.ndarray:
    """Number of pages of each request that were not complete `since` tokens ago, when summaries were made; 0 where `since` is -1."""
    tokens = np.asarray(seq_lens, np.int64)
    since = np.broadcast_to(np.asarray(since), tokens.shape)
    return np.where(since < 0, 0, -(-tokens // size) - np.maximum(tokens - since, 0) // size)


def _newest(recent: Any, tokens: np.ndarray, q_lens: Any, size: int) -> np.ndarray:
    """How many newest pages of each request include, for each of its queries, the last `recent` pages up to the query's own; 0 if `recent`
    is 0."""
    recent = np.broadcast_to(np.asarray(recent), tokens.shape)
    if q_lens is None:
        return recent
    own = (tokens - 1) // size - (tokens - np.maximum(np.asarray(q_lens), 1)) // size
    return np.where(recent > 0, recent + own, 0)


# ---- Quest by upstream's names ------------------------------------------------------------------------------------


def quest_block_select_paged(
    query, maxblocks, minblocks, metadata_block_tables, seq_lens, k, *, per_query_head=False, ascending=False, block_size=None, dtype=None,
    num_threads=None,
):  # fmt: skip
    """See `blitz_attn.quest_block_select_paged`. The selection is int32."""
    size, how = np.shape(maxblocks)[1] if block_size is None else int(block_size), {"per_query_head": per_query_head, "dtype": dtype}
    scores = _page_scores(query, (maxblocks, minblocks), metadata_block_tables, seq_lens, size, method="quest", **how)
    return _select(scores, int(k), 0, [0] * len(scores), ascending)[0]


def quest_block_select_paged_in_out(query, maxblocks, minblocks, metadata_block_tables, seq_lens, selected_indices, *, dtype=None):
    """See `blitz_attn.quest_block_select_paged_in_out`."""
    quest_block_select_paged_in_out_w(query, maxblocks, minblocks, metadata_block_tables, seq_lens, -1, selected_indices, dtype=dtype)


def quest_block_select_paged_in_out_w(
    query, maxblocks, minblocks, metadata_block_tables, seq_lens, tokens_since_metadata_update, selected_indices, *, dtype=None
):
    """See `blitz_attn.quest_block_select_paged_in_out_w`."""
    size, forced = np.shape(maxblocks)[1], np.ndim(tokens_since_metadata_update) > 0 or int(tokens_since_metadata_update) >= 0
    how = {"per_query_head": selected_indices.shape[1] != np.shape(maxblocks)[2], "dtype": dtype}
    scores = _page_scores(query, (maxblocks, minblocks), metadata_block_tables, seq_lens, size, method="quest", **how)
    recent = _unsummarised(seq_lens, tokens_since_metadata_update, size)
    selected_indices[...] = _select(scores, selected_indices.shape[2], int(forced), recent)[0]


# ---- One signature for all selectors ------------------------------------------------------------------------------


def select_blocks(
    q, source, tables, seq_lens, k=None, *, budget=None, method="quest", sink=1, recent=1, per_query_head=False, dense_below=None,
    tokens_since_metadata_update=-1, q_lens=None, ascending=True, block_size=None, kv_layout="NHD", return_scores=False, k_scale=None,
    dtype=None, kv_dtype=None, num_threads=None,
):  # fmt: skip
    """See `blitz_attn.select_blocks`. Scores are summed in float64: blocks whose scores differ by less than float32 rounding may be
    ranked otherwise than by the library."""
    sources = source if method == "quest" else (source,)
    tokens = np.asarray(seq_lens, np.int64)
    size = by_token(sources[0], kv_layout if method == "max" else "NHD").shape[1] if block_size is None else int(block_size)
    slots = np.broadcast_to(np.asarray(k) if budget is None else np.maximum(1, np.asarray(budget) // size), tokens.shape)
    if dense_below is not None:
        slots = np.where(tokens < dense_below, -(-tokens // size), slots)
    newest = np.maximum(_newest(recent, tokens, q_lens, size), _unsummarised(tokens, tokens_since_metadata_update, size))
    how = {"method": method, "per_query_head": per_query_head, "kv_layout": kv_layout, "dtype": dtype, "q_lens": q_lens}
    scores = _page_scores(q, sources, tables, tokens, size, **how, k_scale=k_scale, kv_dtype=kv_dtype)
    selected, counts = _select(scores, max(1, int(slots.max(initial=1))), int(sink), newest, ascending, slots)
    if not return_scores:
        return selected, counts
    kept = np.full(selected.shape, -np.inf)
    for (b, r, i), page in np.ndenumerate(selected):
        if page >= 0:
            kept[b, r, i] = scores[b][r][page]
    return selected, counts, kept


@with_options_of(select_blocks, paged_select_attention, without="ascending block_size return_scores counts q_begin")
def select_and_attend(
    q, k_cache, v_cache, block_tables, seq_lens, source=None, metadata_block_tables=None, *, k=None, return_selected=False, **options
):
    """See `blitz_attn.select_and_attend`."""
    size, of_keys = by_token(k_cache, options["kv_layout"]).shape[1], options["method"] == "max"
    runs = tables_of(block_tables, seq_lens, size)
    seq_lens = [tokens for _, tokens in runs]
    block_tables = np.zeros((len(runs), max((len(pages) for pages, _ in runs), default=0)), np.int64)
    for row, (pages, _) in zip(block_tables, runs, strict=True):
        row[: len(pages)] = pages
    choosing = taken_by(select_blocks, options) | {"k": k, "block_size": size}
    if not of_keys:  # summaries have no scales
        dtype = options["kv_dtype"] if options["dtype"] is None else options["dtype"]
        choosing |= {"k_scale": None, "kv_dtype": None, "dtype": dtype}
    found = (k_cache, block_tables) if of_keys else (source, metadata_block_tables)
    selected, counts = select_blocks(q, *found, seq_lens, **choosing)
    attending = taken_by(paged_select_attention, options)
    result = paged_select_attention(q, k_cache, v_cache, block_tables, seq_lens, selected, counts=counts, **attending)
    parts = (*(result if options["return_lse"] else (result,)), *((selected, counts) if return_selected else ()))
    return parts if len(parts) > 1 else parts[0]
