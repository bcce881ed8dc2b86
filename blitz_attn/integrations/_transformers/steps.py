"""Decoding over chosen pages of a paged cache.

Tables and lengths, which layers of one kind share in a step, are made once. The core gets NumPy arrays, because it reads them much faster
than tensors.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np
import torch

from ... import _arrays
from ..._paged.plan import PagedPlan
from ...quest import quest_prefill_metadata

__all__ = ["Group", "groups_of"]

_KEPT = 8  # steps that are kept: one for each kind of layer of a few models


class _Step(NamedTuple):
    """The plan and the table that layers with the same lengths share. Each query is a request of its own."""

    plan: PagedPlan
    summary_tables: np.ndarray  # (requests, 1)


@functools.lru_cache(maxsize=_KEPT)
def _step_of(size: int, pages: int, start: int, first: int, queries: int, ends: tuple[int, ...], **rules: Any) -> _Step:
    """The step of batch entries. Each has `pages` pages of `size` tokens from token `start` on, an end (exclusive) in `ends`, and
    `queries` queries, the first of which is token `first`. `rules`: options of `PagedPlan`."""
    places = np.arange(first, first + queries)
    lengths = np.where(places < np.array(ends)[:, None], places + 1 - start, 0).clip(0).ravel()
    plan = PagedPlan(_tables(len(ends), pages).repeat(queries, axis=0), lengths, page_size=size, **rules)
    return _Step(plan, np.arange(len(ends), dtype=np.int32).repeat(queries)[:, None])


@functools.lru_cache(maxsize=_KEPT)
def _tables(entries: int, pages: int) -> np.ndarray:
    """Page tables of batch entries whose pages lie one after the other."""
    return np.arange(entries * pages, dtype=np.int32).reshape(entries, pages)


class Group(NamedTuple):
    """Batch entries whose first page begins at the same token: their pages, and summaries of the pages. Arrays hold bfloat16 as bits."""

    entries: slice
    start: int
    k_cache: np.ndarray  # (entries * pages, page_size, Hkv, D)
    v_cache: np.ndarray
    largest: np.ndarray  # (entries, pages, Hkv, D)
    smallest: np.ndarray
    dtype: str | None  # "bfloat16" where arrays hold bits

    def summarise(self, begin: int, end: int) -> None:
        """Makes the summaries of the pages that hold tokens from `begin` to before `end`."""
        entries, pages = self.largest.shape[:2]
        quest_prefill_metadata(
            self.k_cache, _tables(entries, pages), [max(0, end - self.start)] * entries, _tables(entries, 1), self.largest, self.smallest,
            start_lens=[max(0, begin - self.start)] * entries, dtype=self.dtype,
        )  # fmt: skip

    def attend(
        self, q: Any, first: int, ends: tuple[int, ...], blocks: int | None, dense_below: int | None, *, sinks: Any = None, **rules: Any
    ) -> Any:
        """Attention of the queries of these entries in `q`, (B, T, H, D), over `blocks` pages per query; None: over all pages. `ends` has
        a number for each of the B entries. `rules` are options of `PagedPlan`."""
        count, size, pages = q.shape[1], self.k_cache.shape[1], self.largest.shape[1]
        step = _step_of(size, pages, self.start, first, count, ends[self.entries], dtype=self.dtype, **rules)
        own = q if len(ends) == len(self.largest) else q[self.entries]
        queries, _ = _arrays.host(own.reshape(-1, *q.shape[2:]), "query")
        if blocks is None:
            out = step.plan.attention(queries, self.k_cache, self.v_cache, sinks=sinks)
        else:
            out = step.plan.select_and_attend(
                queries, self.k_cache, self.v_cache, (self.largest, self.smallest), step.summary_tables, k=blocks, dense_below=dense_below,
                sinks=sinks,
            )  # fmt: skip
        result = torch.from_numpy(out.reshape(-1, count, *out.shape[1:]))
        return result if self.dtype is None else result.view(q.dtype)


def groups_of(keys: Any, values: Any, starts: tuple[int, ...], size: int) -> tuple[Group, ...]:
    """Groups of neighbouring entries of buffers, (B, tokens, Hkv, D), with pages of `size` tokens from `starts` on. Neighbours whose pages
    begin at the first token are one group, because their pages are then one array."""
    groups, first = [], 0
    for b in range(1, len(starts) + 1):
        if b == len(starts) or starts[b] != starts[first] or starts[first]:
            groups.append(_group_of(keys, values, slice(first, b), starts[first], size))
            first = b
    return tuple(groups)


def _group_of(keys: Any, values: Any, entries: slice, start: int, size: int) -> Group:
    count = (keys.shape[1] - start) // size
    caches = []
    for buffer in (keys, values):
        rows = buffer[entries, start : start + count * size]
        caches.append(_arrays.host(rows.unflatten(1, (count, size)).flatten(0, 1), "pages"))
    (k_cache, kind), (v_cache, _) = caches
    largest, smallest = np.zeros((2, entries.stop - entries.start, count, *keys.shape[2:]), k_cache.dtype)
    return Group(entries, start, k_cache, v_cache, largest, smallest, kind if kind == "bfloat16" else None)
