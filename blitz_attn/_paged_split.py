"""Paged attention in fixed chunks of tokens, whose states are merged by a fixed tree (_state_tree.py)."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy import ndarray

from . import _arrays, _core, _state_tree
from ._paged_tables import Listed, Tables, cache_sizes, listed_blocks, query_begins, query_lengths


class _Rows(NamedTuple):
    """The states of all chunks lie one after the other, one row per query."""

    query: ndarray  # of each row of the states: its row in q
    merges: _state_tree.Merges
    result: ndarray  # of each query: the row in which the merges leave its state


class Chunks:
    """The chunks of all requests, in the order of the requests. The core attends to each chunk as to a request of its own.

    They depend on tables and lengths alone, so that a plan makes them once for all of its calls. `requests` is the argument of that name of
    `paged._attend`.
    """

    def __init__(self, block_tables: Any, seq_lens: Any, page_size: Any, kv_split: Any, q_lens: Any, q_begin: Any) -> None:
        tables = Tables(block_tables, seq_lens, page_size)
        size, lengths = tables.page_size, tables.seq_lens
        split = _arrays.integer(kv_split, "kv_split")
        if split < 1 or split % size:
            raise ValueError(f"kv_split: expected a positive multiple of the {size} tokens of a page, got {split}")
        begins = None if q_begin is None else query_begins(q_begin, len(lengths))
        if q_lens is None:
            rows = np.ones(len(lengths), np.int64)
        else:
            rows = query_lengths(q_lens, lengths if begins is None else np.full_like(lengths, 1 << 30)).copy()
        self.batch, self.num_queries = len(lengths), int(rows.sum())
        self.pages_of_request = tables.used
        self._split_pages = split // size
        self._rows_of_request = rows
        self._counts = np.maximum(1, -(-lengths // split))  # a request without tokens has one chunk without tokens
        self._first = np.cumsum(self._counts) - self._counts
        self._request = request = np.arange(len(self._counts)).repeat(self._counts)
        index = np.arange(len(request)) - self._first[request]

        tokens = np.minimum(lengths[request] - index * split, split)
        used = -(-tokens // size)
        self._pages_request, self._pages_block = request.repeat(used), _state_tree.ranges(index * self._split_pages, used)
        self._pages = pages = tables.at(self._pages_request, self._pages_block)
        self._lowest_page, self._highest_page = int(pages.min(initial=0)), int(pages.max(initial=-1))
        opened, _, _ = _core.open_page_tables(
            pages, None, np.concatenate([[0], np.cumsum(used)]), tokens - np.maximum(used - 1, 0) * size,
            None if q_lens is None else rows[request], (lengths - rows if begins is None else begins)[request] - index * split, size, None,
        )  # fmt: skip
        self.requests = (opened, None, None, None, None, None)

    def refuse_missing(self, num_pages: int) -> None:
        """Refuses pages that a cache of so many pages does not have."""
        if self._lowest_page < 0 or self._highest_page >= num_pages:
            Tables.refuse_missing(self._pages, num_pages, self._pages_request, self._pages_block)

    @cached_property
    def rows(self) -> _Rows:
        """Made when the first call shows that q has `num_queries` rows: so many numbers may not fit into memory where it has not."""
        rows, request = self._rows_of_request, self._request
        own = rows[request]
        own_first, first = np.cumsum(own) - own, np.cumsum(rows) - rows
        return _Rows(
            _state_tree.ranges(first[request], own),
            _state_tree.Merges(_state_tree.pairs(self._counts), own_first, own),
            _state_tree.ranges(own_first[self._first], rows),
        )

    def lists(self, listed: Listed) -> tuple[ndarray, ndarray]:
        """(selected, counts) of each chunk, from the lists of the requests."""
        rows, request, head, _, block = listed
        row = (self._first[request] + block // self._split_pages) * rows + head
        used = np.bincount(row, minlength=len(self._request) * rows)
        split = np.full((len(used), max(1, int(used.max(initial=0)))), -1, np.int32)
        split[np.sort(row), _state_tree.ranges(np.zeros_like(used), used)] = (block % self._split_pages)[np.argsort(row, kind="stable")]
        shape = len(self._request), rows
        return split.reshape(*shape, split.shape[1]), used.reshape(shape)


def _results(q: Any, given: Any, wanted: list[tuple[str, tuple[int, ...], str]], dtype: Any, inputs: tuple[Any, ...]) -> list[Any]:
    """(what the caller gets, the memory to write) of each output, from the caller's arrays or made here."""
    family, results = _arrays.family_of(q), []
    for array, (name, shape, kind) in zip(given, wanted, strict=False):
        result = family.empty(shape, kind) if array is None else array
        memory, found = _arrays.host(result, name, kind if array is None else dtype, written=True)
        if found != kind:
            raise TypeError(f"{name}: expected dtype {kind}, got {found}")
        if memory.shape != shape:
            raise ValueError(f"{name}: expected shape {shape}, got {memory.shape}")
        if not memory.flags.writeable:
            raise ValueError(f"{name}: expected a writable array, got a read-only one")
        for other in inputs:
            if array is not None and np.may_share_memory(memory, other):
                raise ValueError(f"{name}: expected memory of its own, got an array that overlaps an input")
        results.append((_arrays.finished(result, array, family), memory))
    return results


def attend(
    run: Callable[..., Any], q: Any, k_cache: Any, v_cache: Any, chunks: Chunks, selected: Any, counts: Any, scale: Any, kv_layout: Any, *,
    sinks: Any, return_lse: Any, out: Any, out_dtype: Any, dtype: Any, **options: Any,
) -> Any:  # fmt: skip
    """Attention in chunks: `paged_attention`, or with `selected` `paged_select_attention`. ``run``, which has the signature of
    `paged._attend`, computes the states of all chunks, and this function merges them."""
    num_pages, _, kv_heads = cache_sizes(k_cache, kv_layout)
    chunks.refuse_missing(num_pages)
    return_lse = _arrays.flag(return_lse, "return_lse")
    queries, kind = _arrays.host(q, "q", _arrays.dtype_name(dtype))
    if queries.ndim != 3 or len(queries) != chunks.num_queries:
        raise ValueError(f"q: expected shape ({chunks.num_queries}, H, D), got {queries.shape}")
    if sinks is not None:
        sinks = _arrays.float32_numbers(sinks, "sinks")
        if sinks.shape != queries.shape[1:2]:
            raise ValueError(f"sinks: expected shape ({queries.shape[1]},), one number per head, got {sinks.shape}")
    narrow = kind in ("float16", "bfloat16")
    wanted_kind = _arrays.dtype_name(out_dtype, "out_dtype") or kind
    if wanted_kind != kind and not (narrow and wanted_kind == "float32"):
        raise ValueError(f"out_dtype: expected '{kind}'{' or ' + repr('float32') if narrow else ''} like q, got {wanted_kind!r}")
    v_dim = (_arrays.shape_of(v_cache) or (0,))[-1]
    real = "float64" if kind == "float64" else "float32"
    wanted = [("out", (*queries.shape[:2], v_dim), wanted_kind), ("lse", queries.shape[:2], real)][: 1 + return_lse]
    inputs = tuple(_arrays.host(x, name, "bfloat16")[0] for x, name in ((q, "q"), (k_cache, "k_cache"), (v_cache, "v_cache")))
    results = _results(q, _arrays.split_out(out, return_lse), wanted, _arrays.dtype_name(dtype), inputs)

    listed: Listed | None = None
    lists: tuple[Any, Any] = (None, None)
    if selected is not None:
        listed = listed_blocks(selected, counts, chunks.pages_of_request, (kv_heads, queries.shape[1]))
        lists = chunks.lists(listed)
    rows = chunks.rows
    try:
        state, lse = run(
            queries[rows.query], k_cache, v_cache, chunks.requests, *lists, scale, kv_layout, sinks=None, return_lse=True, out=None,
            out_dtype="float32" if narrow else None, dtype="bfloat16" if kind == "bfloat16" else dtype, **options,
        )  # fmt: skip
    except ValueError:
        if listed is not None:
            listed.refuse_repeated()  # by the caller's numbers: the call has those of chunks
        raise
    rows.merges.run(state, lse)
    state, lse = state[rows.result], lse[rows.result]
    if sinks is not None:
        state, lse = _state_tree.with_sinks(state, lse, sinks)
    for (_, memory), values in zip(results, (_state_tree.rounded(state, wanted_kind), lse), strict=False):
        memory[...] = values
    return (results[0][0], results[1][0]) if return_lse else results[0][0]
