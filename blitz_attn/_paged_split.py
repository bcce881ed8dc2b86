"""Paged attention in fixed chunks of tokens, whose states are merged by a fixed tree (_state_tree.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy import ndarray

from . import _arrays, _state_tree
from ._paged_tables import Listed, Tables, cache_sizes, listed_blocks, query_lengths


class _Chunks:
    """The chunks of all requests, one request after the other, each as a request of its own."""

    def __init__(self, block_tables: Any, seq_lens: Any, k_cache: Any, kv_layout: Any, kv_split: Any) -> None:
        page_count, tokens, self.kv_heads = cache_sizes(k_cache, kv_layout)
        self.page_size = size = max(1, tokens)
        self.tokens = split = _arrays.integer(kv_split, "kv_split")
        if split < 1 or split % size:
            raise ValueError(f"kv_split: expected a positive multiple of the {size} tokens of a page, got {split}")
        self.of_request = tables = Tables(block_tables, seq_lens, size)
        self.counts = np.maximum(1, -(-tables.seq_lens // split))  # a request without tokens has one chunk without tokens
        self.request = np.arange(len(self.counts)).repeat(self.counts)
        self.first = np.cumsum(self.counts) - self.counts
        self.index = np.arange(len(self.request)) - self.first[self.request]
        lengths = np.minimum(tables.seq_lens[self.request] - self.index * split, split)
        used = -(-lengths // size)
        requests, blocks = self.request.repeat(used), _state_tree.ranges(self.index * (split // size), used)
        pages = tables.at(requests, blocks)
        tables.refuse_missing(pages, page_count, requests, blocks)
        self.tables = (pages, None, np.concatenate([[0], np.cumsum(used)]), lengths - np.maximum(used - 1, 0) * size)

    def lists(self, listed: Listed) -> tuple[ndarray, ndarray]:
        """(selected, counts) of each chunk, from the lists of the requests."""
        rows, request, head, _, block = listed
        per_chunk = self.tokens // self.page_size
        row = (self.first[request] + block // per_chunk) * rows + head
        used = np.bincount(row, minlength=len(self.request) * rows)
        split = np.full((len(used), max(1, int(used.max(initial=0)))), -1, np.int32)
        split[np.sort(row), _state_tree.ranges(np.zeros_like(used), used)] = (block % per_chunk)[np.argsort(row, kind="stable")]
        shape = len(self.request), rows
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
    run: Callable[..., Any], q: Any, k_cache: Any, v_cache: Any, block_tables: Any, seq_lens: Any, kv_split: Any, *, q_lens: Any,
    q_begin: Any, selected: Any = None, counts: Any = None, kv_layout: Any, sinks: Any, return_lse: Any, out: Any, out_dtype: Any,
    dtype: Any, **options: Any,
) -> Any:  # fmt: skip
    """`paged_attention`, or with `selected` `paged_select_attention`, in chunks of `kv_split` tokens. `run` attends to all chunks, each as
    a request of its own."""
    chunks = _Chunks(block_tables, seq_lens, k_cache, kv_layout, kv_split)
    return_lse = _arrays.flag(return_lse, "return_lse")
    queries, kind = _arrays.host(q, "q", _arrays.dtype_name(dtype))
    lengths, request = chunks.of_request.seq_lens, chunks.request
    begin = None if q_begin is None else _arrays.integers(q_begin, "q_begin")
    if begin is not None and begin.shape != lengths.shape:
        raise ValueError(f"q_begin: expected {len(lengths)} entries, one per request, got shape {begin.shape}")
    if q_lens is None:
        rows = np.ones(len(lengths), np.int64)
    else:
        rows = query_lengths(q_lens, lengths if begin is None else np.full_like(lengths, 1 << 30))
    if queries.ndim != 3 or len(queries) != rows.sum():
        raise ValueError(f"q: expected shape ({rows.sum()}, H, D), got {queries.shape}")
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

    own = rows[request]  # queries of each chunk: those of its request
    listed: Listed | None = None
    lists: tuple[Any, Any] = (None, None)
    if selected is not None:
        pages = -(-lengths // chunks.page_size)
        listed = listed_blocks(selected, counts, pages, (chunks.kv_heads, queries.shape[1]))
        lists = chunks.lists(listed)
    first = np.cumsum(rows) - rows
    try:
        state, lse = run(
            queries[_state_tree.ranges(first[request], own)], k_cache, v_cache, chunks.tables, q_lens=None if q_lens is None else own,
            q_begin=(lengths - rows if begin is None else begin)[request] - chunks.index * chunks.tokens, selected=lists[0],
            counts=lists[1], kv_layout=kv_layout, sinks=None, return_lse=True, out=None, out_dtype="float32" if narrow else None,
            dtype="bfloat16" if kind == "bfloat16" else dtype, **options,
        )  # fmt: skip
    except ValueError:
        if listed is not None:
            listed.refuse_repeated()  # by the caller's numbers: the call has those of chunks
        raise
    own_first = np.cumsum(own) - own
    _state_tree.Merges(_state_tree.pairs(chunks.counts), own_first, own).run(state, lse)
    kept = _state_tree.ranges(own_first[chunks.first], rows)
    state, lse = state[kept], lse[kept]
    if sinks is not None:
        state, lse = _state_tree.with_sinks(state, lse, sinks)
    for (_, memory), values in zip(results, (_state_tree.rounded(state, wanted_kind), lse), strict=False):
        memory[...] = values
    return (results[0][0], results[1][0]) if return_lse else results[0][0]
