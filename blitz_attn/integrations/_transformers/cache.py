"""A cache of transformers whose layers keep keys and values in pages."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from transformers import cache_utils

from ... import quest_prefill_metadata, select_and_attend
from .._torch.tensors import autocast_dtype, lowered

__all__ = ["PagedCache", "PagedLayer", "keeps_few_keys", "pages_of"]

_ATTRIBUTE = "_blitz_attn_pages"  # of the tensor of keys that a layer hands to attention


class PagedLayer(cache_utils.CacheLayerMixin):
    """Keys and values of one layer, in pages of `page_size` tokens.

    The pages of a batch entry lie one after the other in its own row of a buffer. All its keys are therefore one view, which `update`
    returns and any attention can read; and pages may begin at any token, behind padding on the left. They have the dtype in which attention
    is computed: that of torch.autocast where it is on, else that of the latest keys and values.
    """

    is_sliding = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, page_size: int) -> None:
        super().__init__()
        self.page_size = page_size
        self.length = 0
        self._forget_summaries()

    def _forget_summaries(self) -> None:
        self._summaries: tuple[Any, Any] | None = None
        self._starts: tuple[int, ...] = ()
        self._summarised = 0

    # ---- What transformers calls

    def lazy_initialization(self, key_states: Any, value_states: Any) -> None:
        self.device, self.dtype = key_states.device, key_states.dtype
        self._keys, self._values = (x.new_zeros((x.shape[0], 0, x.shape[1], x.shape[3])) for x in (key_states, value_states))
        self.is_initialized = True

    @torch.compiler.disable(reason="blitz_attn: the pages of a paged cache are no tensors of a graph")
    def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        if torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad):
            raise ValueError("past_key_values: expected a call under torch.no_grad() for a paged cache, got keys that need gradients")
        dtype = autocast_dtype()
        if dtype is not None:
            key_states, value_states = lowered(key_states, dtype), lowered(value_states, dtype)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        elif (self._keys.dtype, self._values.dtype) != (key_states.dtype, value_states.dtype):
            self.dtype = key_states.dtype
            self._keys, self._values = self._keys.to(key_states.dtype), self._values.to(value_states.dtype)
            self._forget_summaries()
        begin, self.length = self.length, self.length + key_states.shape[2]
        if self.length > self._keys.shape[1] - self.page_size:  # a page more than are needed, because they may begin at any token
            pages = -(-self.length // self.page_size)
            self._resize((max(pages, pages if begin == 0 else pages * 3 // 2) + 1) * self.page_size, begin)
        self._keys[:, begin : self.length] = key_states.transpose(1, 2)
        self._values[:, begin : self.length] = value_states.transpose(1, 2)
        return self._views()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return -1

    def offload(self) -> None:
        """Nothing: the pages are in the memory of the CPU."""

    def prefetch(self) -> None:
        """Nothing, as `offload`."""

    def reset(self) -> None:
        self.keys = self.values = None
        self.is_initialized, self.length = False, 0
        self._forget_summaries()

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove > 0:
            raise ValueError(f"tokens_to_remove: expected a number of at most 0, got {tokens_to_remove}")
        if self.is_initialized and tokens_to_remove:
            self.length = max(0, self.length + tokens_to_remove)
            self._summarised = min(self._summarised, self.length)
            self._views()

    def reorder_cache(self, beam_idx: Any) -> None:
        self._take(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.is_initialized:
            self._take(torch.arange(self._keys.shape[0]).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Any) -> None:
        self._take(indices)

    # ---- Pages

    def _views(self) -> tuple[Any, Any]:
        self.keys, self.values = (x[:, : self.length].transpose(1, 2) for x in (self._keys, self._values))
        setattr(self.keys, _ATTRIBUTE, self)
        return self.keys, self.values

    def _resize(self, tokens: int, used: int) -> None:
        for name in ("_keys", "_values"):
            old = getattr(self, name)
            new = old.new_empty((old.shape[0], tokens, *old.shape[2:]))
            new[:, :used] = old[:, :used]
            setattr(self, name, new)
        self._forget_summaries()

    def _take(self, entries: Any) -> None:
        """Keep these batch entries, in this order."""
        if self.is_initialized:
            self._keys, self._values = (x[entries.to(x.device)] for x in (self._keys, self._values))
            self._forget_summaries()
            self._views()

    def _pages(self, entries: slice, start: int) -> tuple[Any, Any, Any]:
        """Page caches and page table of batch entries whose first page begins at token `start`."""
        count = (self._keys.shape[1] - start) // self.page_size
        caches = []
        for buffer in (self._keys, self._values):
            rows = buffer[entries, start : start + count * self.page_size]
            caches.append(rows.unflatten(1, (count, self.page_size)).flatten(0, 1))
        tables = np.arange(caches[0].shape[0], dtype=np.int32).reshape(-1, count)
        return caches[0], caches[1], tables

    def _refresh(self, groups: list[tuple[slice, int]]) -> tuple[Any, Any]:
        """Summaries of all pages: (B, pages, Hkv, D) largest and smallest keys. What was summarised before is left alone."""
        starts = tuple(start for entries, start in groups for _ in range(entries.stop - entries.start))
        if self._summaries is None or starts != self._starts:
            batch, tokens, heads, dim = self._keys.shape
            shape = (batch, tokens // self.page_size, heads, dim)
            self._summaries = self._keys.new_zeros(shape), self._keys.new_zeros(shape)
            self._starts, self._summarised = starts, 0
        if self._summarised < self.length:
            for entries, start in groups:
                k_cache, _, tables = self._pages(entries, start)
                largest, smallest = (x[entries] for x in self._summaries)
                lengths = [self.length - start] * len(tables)
                before = [max(0, self._summarised - start)] * len(tables)
                summary_tables = np.arange(len(tables), dtype=np.int32)[:, None]
                quest_prefill_metadata(k_cache, tables, lengths, summary_tables, largest, smallest, start_lens=before)
            self._summarised = self.length
        return self._summaries

    def select_and_attend(self, q: Any, bounds: Iterable[tuple[int, int]], *, budget: int, dense_below: int, **options: Any) -> Any:
        """Attention of the last tokens of each batch entry, (B, T, H, D), each over the pages that Quest chooses for it. `bounds` leave out
        padding: the first token of each entry, and the place after its last; padding itself gets 0. A token with fewer than `dense_below`
        tokens up to it, padding included, attends to all.

        Each token is a request of its own, so that its result is that of a step with this token alone."""
        starts, ends = zip(*bounds, strict=True)
        groups, first, count = [], 0, q.shape[1]
        for b in range(1, len(starts) + 1):  # the pages of several entries are one array where they begin at the first token
            if b == len(starts) or starts[b] != starts[first] or starts[first]:
                groups.append((slice(first, b), starts[first]))
                first = b
        summaries = self._refresh(groups)
        parts = []
        for entries, start in groups:
            k_cache, v_cache, tables = self._pages(entries, start)
            source = tuple(x[entries] for x in summaries)
            summary_tables = np.arange(len(tables), dtype=np.int32).repeat(count)[:, None]
            blocks = max(1, budget // self.page_size)
            places = np.arange(self.length - count, self.length)
            lengths = np.where(places < np.array(ends[entries])[:, None], places + 1 - start, 0).clip(0).ravel()
            out = select_and_attend(
                q[entries].flatten(0, 1), k_cache, v_cache, tables.repeat(count, axis=0), lengths, source, summary_tables, k=blocks,
                dense_below=dense_below - start if self.length - count < dense_below else None, **options,
            )  # fmt: skip
            parts.append(out.unflatten(0, (len(tables), count)))
        return parts[0] if len(parts) == 1 else torch.cat(parts)


class PagedCache(cache_utils.Cache):
    """Pages for the layers that attend to everything; for other layers what `DynamicCache` has."""

    def __init__(self, config: Any, page_size: int) -> None:
        own = cache_utils.DynamicCache(config=config).layers
        super().__init__(layers=[PagedLayer(page_size) if type(layer) is cache_utils.DynamicLayer else layer for layer in own])

    def update(self, key_states: Any, value_states: Any, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        if layer_idx >= len(self.layers):
            raise ValueError(
                f"past_key_values: expected a paged_cache of the model itself, got one of a model with {len(self.layers)} layers for layer "
                f"number {layer_idx}, counted from 0"
            )
        keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        if getattr(self.layers[layer_idx], "is_sliding", False):
            setattr(keys, _ATTRIBUTE, None)
        return keys, values


def keeps_few_keys(keys: Any) -> bool:
    """Whether a paged cache has returned these keys for a layer that attends to a window or a chunk of tokens, without pages."""
    return getattr(keys, _ATTRIBUTE, keys) is None


def pages_of(keys: Any, values: Any) -> PagedLayer | None:
    """The layer whose pages hold these keys and values, where it still holds exactly them."""
    layer: PagedLayer | None = getattr(keys, _ATTRIBUTE, None)
    return layer if layer is not None and layer.keys is keys and layer.values is values else None
