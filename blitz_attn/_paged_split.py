"""Paged attention in fixed chunks of tokens, whose states are merged by a fixed tree (_state_tree.py)."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy import ndarray

from . import _arrays, _core, _state_tree
from ._floats import attention_results, floats, written
from ._paged_call import Rules, attend_requests, open_requests
from ._paged_tables import Listed, Tables, cache_sizes, listed_blocks, lists_by_unit, nearest_begin, tables_for_core


class _Rows(NamedTuple):
    """The states of all chunks lie one after the other, one row per query."""

    query: ndarray  # of each row of the states: its row in q
    first_token: ndarray  # likewise: the token of the request with which its chunk begins
    merges: _state_tree.Merges
    result: ndarray  # of each query: the row in which the merges leave its state


class _Part(NamedTuple):
    """Chunks that one call of the core attends to."""

    requests: Any  # the chunks, as `attend_requests` takes requests
    rows: Any  # index of the rows of these chunks in the states of all
    chunks: Any  # index of these chunks in all
    exists: Any = True  # whether each of them is a chunk of its request, or stands in the place of one that the request does not have
    columns: slice = slice(None)  # of a mask

    def lists(self, selected: Any, counts: Any) -> tuple[Any, Any]:
        """(selected, counts) for these chunks, of those for all."""
        if selected is None:
            return None, None
        return selected[self.chunks], np.where(np.reshape(self.exists, (-1, 1)), counts[self.chunks], 0)

    def mask(self, whole: Any) -> Any:
        """What the mask of the requests is for these chunks: a view. An axis of one column holds for all tokens."""
        return whole if whole is None or tuple(whole.shape[-1:]) in ((), (1,)) else whole[..., self.columns]


class Chunks:
    """The chunks of all requests, in the order of the requests. The core attends to each chunk as to a request of its own.

    They depend on tables and lengths alone, so that a plan makes them once for all of its calls.
    """

    def __init__(self, opened: Any, requests: Any, block_tables: Any, page_size: Any, kv_split: Any, one_query: bool, q_begin: Any) -> None:
        """`opened`: what `open_requests` gives for these tables; `requests`: what each call gives the core to check: the opened tables,
        or the caller's own arguments, where sentences shall name these. `one_query`: there is no q_lens."""
        self.requests, size = requests, _arrays.integer(page_size, "page_size")
        lengths, rows = (np.asarray(x, np.int64) for x in _core.page_table_lengths(opened[0]))
        tables = Tables(block_tables)
        split = _arrays.integer(kv_split, "kv_split")
        if split < 1 or split % size:
            raise ValueError(f"kv_split: expected a positive multiple of the {size} tokens of a page, got {split}")
        begins = None if q_begin is None else _arrays.integers(q_begin, "q_begin")
        self.num_queries = int(rows.sum())
        self.pages_of_request = -(-lengths // size)
        self._split, self._page_size = split, size
        self._rows_of_request = rows
        self._counts = np.maximum(1, -(-lengths // split))  # a request without tokens has one chunk without tokens
        self._first = np.cumsum(self._counts) - self._counts
        self._request = request = np.arange(len(self._counts)).repeat(self._counts)
        index = np.arange(len(request)) - self._first[request]  # of each chunk in its request
        self._first_token = index * split  # likewise

        self._tokens = np.minimum(lengths[request] - self._first_token, split)
        self._pages_of_chunk = used = -(-self._tokens // size)
        self._begins = nearest_begin((lengths - rows if begins is None else begins)[request] - self._first_token)
        self._pages_request, self._pages_block = request.repeat(used), _state_tree.ranges(index * (split // size), used)
        self._pages = pages = tables.at(self._pages_request, self._pages_block)
        all_chunks = self._opened(pages, self._tokens, None if one_query else rows[request], self._begins)
        self._whole = [_Part(all_chunks, slice(None), slice(None))]

    def _opened(self, pages: ndarray, tokens: ndarray, q_lens: ndarray | None, q_begin: ndarray) -> Any:
        """Chunks of so many tokens, which lie on `pages` one chunk after the other, as `attend_requests` takes requests."""
        used = -(-tokens // self._page_size)
        last = tokens - np.maximum(used - 1, 0) * self._page_size
        return open_requests(pages, None, np.concatenate([[0], np.cumsum(used)]), last, q_lens, q_begin, self._page_size)[0]

    def parts(self, attn_mask: Any) -> list[_Part]:
        """One part with all chunks. With a mask, which has an entry for each request and none for each chunk, one part for the first
        chunks of all requests, one for the second chunks, and so on: the chunks of a part read the same columns of the mask."""
        return self._whole if attn_mask is None else self._by_place

    @cached_property
    def _by_place(self) -> list[_Part]:
        """The first chunks of all requests, the second ones, and so on. A request that has no such chunk has one without tokens and queries
        in its place, so that the requests are those of a mask."""
        parts = []
        rows = self._rows_of_request
        first_row = np.cumsum(rows[self._request]) - rows[self._request]  # of each chunk
        first_page = np.cumsum(self._pages_of_chunk) - self._pages_of_chunk
        for place in range(int(self._counts.max(initial=1))):
            exists = place < self._counts
            chunks = self._first + np.minimum(place, self._counts - 1)
            tokens, queries, pages = (np.where(exists, x, 0) for x in (self._tokens[chunks], rows, self._pages_of_chunk[chunks]))
            own = self._pages[_state_tree.ranges(first_page[chunks], pages)]
            opened = self._opened(own, tokens, queries, self._begins[chunks])
            columns = slice(place * self._split, (place + 1) * self._split)
            parts.append(_Part(opened, _state_tree.ranges(first_row[chunks], queries), chunks, exists, columns))
        return parts

    @cached_property
    def rows(self) -> _Rows:
        """Made when the first call shows that q has `num_queries` rows: so many numbers may not fit into memory where it has not."""
        rows, request = self._rows_of_request, self._request
        own = rows[request]
        own_first, first = np.cumsum(own) - own, np.cumsum(rows) - rows
        return _Rows(
            _state_tree.ranges(first[request], own),
            self._first_token.repeat(own),
            _state_tree.Merges(_state_tree.pairs(self._counts), own_first, own),
            _state_tree.ranges(own_first[self._first], rows),
        )

    def ranges(self, kv_ranges: Any) -> ndarray | None:
        """Runs of tokens of the rows of all chunks, counted from the first token of the chunk."""
        if kv_ranges is None:
            return None
        runs, rows = _arrays.integers(kv_ranges, "kv_ranges"), self.rows
        # An end that lies farther before or behind the tokens means the same as these. The difference from it might not fit into 64 bits.
        return np.clip(runs[rows.query], -1, np.iinfo(np.int32).max) - rows.first_token[:, None]

    def lists(self, listed: Listed) -> tuple[ndarray, ndarray]:
        """(selected, counts) of each chunk, from the lists of the requests."""
        pages = self._split // self._page_size
        unit = self._first[listed.request] + listed.block // pages
        return lists_by_unit(unit, listed.head, listed.block % pages, (len(self._request), listed.rows))


class _Unopened(NamedTuple):
    """The chunks of a call without a plan before the call is checked. So its mistakes are found in the order in which a call that is not
    split finds them."""

    requests: tuple[Any, Any, Any, Any, Any, Any]  # as `attend_requests` takes them
    block_tables: Any
    kv_split: Any

    def opened(self, page_size: int) -> Chunks:
        """The chunks, once the call is known to be right."""
        q_lens, q_begin = self.requests[-2:]
        opened = open_requests(*self.requests, page_size)[0]
        return Chunks(opened, self.requests, self.block_tables, page_size, self.kv_split, q_lens is None, q_begin)


def _in_order(states: list[Any], parts: list[_Part]) -> tuple[ndarray, ndarray]:
    """The states of all chunks, one after the other, from those of the parts."""
    order = np.argsort(np.concatenate([part.rows for part in parts]))
    outs, lses = zip(*states, strict=True)
    return np.concatenate(outs)[order], np.concatenate(lses)[order]


def attend_in_chunks(
    q: Any, k_cache: Any, v_cache: Any, chunks: Chunks | _Unopened, rules: tuple[Any, ...], selected: Any = None, counts: Any = None,
    sinks: Any = None, k_scale: Any = None, v_scale: Any = None, kv_ranges: Any = None, attn_mask: Any = None, alibi_slopes: Any = None,
    return_lse: Any = False, out: Any = None,
) -> Any:  # fmt: skip
    """Attention in chunks: `attend_requests` computes their states, which are merged here."""
    named = Rules(*rules)
    attend_requests(  # checks the call
        q, k_cache, v_cache, chunks.requests, named, selected, counts, sinks, k_scale, v_scale, kv_ranges, attn_mask, alibi_slopes,
        computes=False,
    )  # fmt: skip
    if isinstance(chunks, _Unopened):
        chunks = chunks.opened(cache_sizes(k_cache, named.kv_layout)[1])
    return_lse, dtype = _arrays.flag(return_lse, "return_lse"), _arrays.dtype_name(named.dtype)
    queries, kind = floats(q, "q", dtype, strided=True)
    narrow = kind in ("float16", "bfloat16")
    wanted_kind = _arrays.dtype_name(named.out_dtype, "out_dtype") or kind
    sinks = None if sinks is None else _arrays.float32_numbers(sinks, "sinks")
    v_dim = _arrays.shape_of(v_cache)[-1]
    inputs = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "k_scale": k_scale, "v_scale": v_scale, "selected": selected}
    inputs |= {"sinks": sinks, "kv_ranges": kv_ranges, "attn_mask": attn_mask, "alibi_slopes": alibi_slopes}
    results = attention_results(q, (*queries.shape[:2], v_dim), wanted_kind, out, return_lse, dtype, inputs)

    listed: Listed | None = None
    lists: tuple[Any, Any] = (None, None)
    if selected is not None:
        kv_heads = cache_sizes(k_cache, named.kv_layout)[2]
        listed = listed_blocks(selected, counts, chunks.pages_of_request, (kv_heads, queries.shape[1]))
        lists = chunks.lists(listed)
    if attn_mask is not None:
        attn_mask = _arrays.cut_by_views(attn_mask, "attn_mask")
    rows, ranges, parts = chunks.rows, chunks.ranges(kv_ranges), chunks.parts(attn_mask)
    part_rules = named._replace(out_dtype="float32" if narrow else None, dtype="bfloat16" if kind == "bfloat16" else dtype)
    try:
        states = [
            attend_requests(
                queries[rows.query[part.rows]], k_cache, v_cache, part.requests, part_rules, *part.lists(*lists), k_scale=k_scale,
                v_scale=v_scale, kv_ranges=None if ranges is None else ranges[part.rows], attn_mask=part.mask(attn_mask),
                alibi_slopes=alibi_slopes, return_lse=True,
            )
            for part in parts
        ]  # fmt: skip
    except ValueError:
        if listed is not None:
            listed.refuse_repeated()  # by the caller's numbers: the call has those of chunks
        raise
    state, lse = states[0] if len(states) == 1 else _in_order(states, parts)
    rows.merges.run(state, lse)
    state, lse = state[rows.result], lse[rows.result]
    if sinks is not None:
        state, lse = _state_tree.with_sinks(state, lse, sinks)
    return written(results, _state_tree.rounded(state, wanted_kind), lse)


def whole_or_in_chunks(block_tables: Any, seq_lens: Any, q_lens: Any, q_begin: Any, kv_split: Any) -> tuple[Callable[..., Any], Any]:
    """The function that attends, and what it takes as `requests`."""
    requests = (*tables_for_core(block_tables, seq_lens), q_lens, q_begin)
    return (attend_requests, requests) if kv_split is None else (attend_in_chunks, _Unopened(requests, block_tables, kv_split))
