"""A cache of transformers whose layers keep keys and values in pages."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from transformers import cache_utils

from .._torch.tensors import autocast_dtype, lowered
from .steps import Group, groups_of

__all__ = ["PagedCache", "PagedLayer", "PagedPair", "keeps_few_keys", "pages_of"]

_ATTRIBUTE = "_blitz_attn_pages"  # of the tensor of keys that a layer hands to attention
COPIED_AT_A_TIME = 1 << 12  # tokens, so that a signal need not wait for all of them
# Tokens that fit before a layer is copied again: at least 16, and about a sixteenth of its tokens. With the rest of the last page and the
# summaries of pages of 64 tokens, a layer of 1024 tokens and more takes less than 1.1 times the memory of its tokens.
_LEAST_ROOM = 16
_SHARE_OF_ROOM = 16


class Pages(NamedTuple):
    """What a layer holds at one moment. The pages of a batch entry lie one after the other in its own row of a buffer. A record never
    changes, but memory after the first `length` tokens of the buffers may be written at any time."""

    keys: Any  # the buffers: (B, tokens, Hkv, D)
    values: Any
    length: int
    views: tuple[Any, Any]  # keys and values as transformers knows them, (B, Hkv, length, D)
    starts: tuple[int, ...] = ()  # the token with which the first page of each entry begins; empty where nobody has asked for pages
    groups: tuple[Group, ...] = ()  # the pages from these tokens on, and their summaries
    summarised: int = 0  # number of tokens that the summaries cover

    @classmethod
    def of(cls, keys: Any, values: Any, length: int, starts: tuple[int, ...] = ()) -> Pages:
        """Buffers without summaries."""
        return cls(keys, values, length, _views(keys, values, length), starts)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles leave out the groups, whose arrays are the memory of these buffers."""
        return Pages.of, (self.keys, self.values, self.length)

    def with_length(self, length: int) -> Pages:
        # Where tokens were cut off, the summary of the page that is now the last is made again, without them.
        summarised = self.summarised if length >= self.length else min(self.summarised, max(0, length - 1))
        return self._replace(length=length, views=_views(self.keys, self.values, length), summarised=summarised)

    def with_room(self, tokens: int) -> Pages:
        """The same in larger buffers, whose summaries are not made yet."""
        keys, values = (old.new_empty((old.shape[0], tokens, *old.shape[2:])) for old in (self.keys, self.values))
        for old, new in ((self.keys, keys), (self.values, values)):
            for at in range(0, self.length, COPIED_AT_A_TIME):
                some = slice(at, min(at + COPIED_AT_A_TIME, self.length))
                new[:, some] = old[:, some]
        return Pages.of(keys, values, self.length, self.starts)

    def with_whole_pages(self, end: int, starts: tuple[int, ...], size: int) -> Pages:
        """These pages, if the buffers have room for whole pages of `size` tokens behind each of `starts`: at least one page, and as many as
        reach token `end` - 1. Otherwise the same in larger buffers, which have this room."""
        needed = max((start + max(1, -((start - end) // size)) * size for start in starts), default=end)
        if needed <= self.keys.shape[1]:
            return self
        return self.with_room(max(-(-needed // size), (end + max(size - 1 + _LEAST_ROOM, end // _SHARE_OF_ROOM)) // size) * size)


def _views(keys: Any, values: Any, length: int) -> tuple[Any, Any]:
    return keys[:, :length].transpose(1, 2), values[:, :length].transpose(1, 2)


class PagedLayer(cache_utils.CacheLayerMixin):
    """Keys and values of one layer, in pages of `page_size` tokens.

    The pages of a batch entry lie one after the other in its own row of a buffer. All its keys are therefore one view, which `update`
    returns and any attention can read; and pages may begin at any token, behind padding on the left. Keys and values have the dtype in
    which attention is computed: that of torch.autocast where it is on, else that of the latest keys and values.

    Each method writes new data where it is not visible yet, and publishes it by one assignment: an exception before that leaves the layer
    as it was.
    """

    is_sliding = False
    is_croppable = True

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self._pages: Pages | None = None

    # ---- What transformers reads

    @property
    def is_initialized(self) -> bool:
        return self._pages is not None

    @property
    def length(self) -> int:
        return self._pages.length if self._pages else 0

    @property
    def keys(self) -> Any:
        return self._pages.views[0] if self._pages else None

    @property
    def values(self) -> Any:
        return self._pages.views[1] if self._pages else None

    @property
    def dtype(self) -> Any:
        return self._pages.keys.dtype if self._pages else None

    @property
    def device(self) -> Any:
        return self._pages.keys.device if self._pages else None

    # ---- What transformers calls

    def lazy_initialization(self, key_states: Any, value_states: Any) -> None:
        self._pages = _no_tokens(key_states, value_states)

    @torch.compiler.disable(reason="blitz_attn: the pages of a paged cache are no tensors of a graph")
    def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        if torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad):
            raise ValueError("past_key_values: expected a call under torch.no_grad() for a paged cache, got keys that need gradients")
        dtype = autocast_dtype()
        if dtype is not None:
            key_states, value_states = lowered(key_states, dtype), lowered(value_states, dtype)
        self._publish(self._appended(self._pages, key_states, value_states))
        return self.keys, self.values

    def _publish(self, pages: Pages) -> None:
        """Makes `pages` what the layer holds, and marks their keys, by which attention finds the layer."""
        # The reference is weak: otherwise, the buffers of a layer that is replaced would wait for Python's garbage collector.
        setattr(pages.views[0], _ATTRIBUTE, weakref.ref(self))
        self._pages = pages

    def _appended(self, pages: Pages | None, key_states: Any, value_states: Any) -> Pages:
        """Pages with these tokens after those that they had."""
        if pages is None or not pages.length:  # `early_initialization` may have been given other shapes
            pages = _no_tokens(key_states, value_states)
        if (pages.keys.dtype, pages.values.dtype) != (key_states.dtype, value_states.dtype):
            pages = Pages.of(pages.keys.to(key_states.dtype), pages.values.to(value_states.dtype), pages.length)
        begin, end = pages.length, pages.length + key_states.shape[2]
        pages = pages.with_whole_pages(end, pages.starts, self.page_size)
        for buffer, new in ((pages.keys, key_states), (pages.values, value_states)):
            for at in range(begin, end, COPIED_AT_A_TIME):
                some = slice(at, min(at + COPIED_AT_A_TIME, end))
                buffer[:, some] = new[:, :, some.start - begin : some.stop - begin].transpose(1, 2)
        return pages.with_length(end)

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
        self._pages = None

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove > 0:
            raise ValueError(f"tokens_to_remove: expected a number of at most 0, got {tokens_to_remove}")
        self._pages = _cropped(self._pages, tokens_to_remove)

    def reorder_cache(self, beam_idx: Any) -> None:
        self._take(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self._pages:
            self._take(torch.arange(self._pages.keys.shape[0]).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Any) -> None:
        self._take(indices)

    def _take(self, entries: Any) -> None:
        """Keep these batch entries, in this order."""
        self._pages = _taken(self._pages, entries)

    # ---- Pages

    def _with_groups(self, pages: Pages, starts: tuple[int, ...], summaries: bool) -> Pages:
        """`pages` with groups that begin at `starts`, and with summaries of all pages where they are asked for. Summaries of pages without
        new tokens are left alone; a page that is summarised again after an exception gets the same summary."""
        if starts != pages.starts or not pages.groups:
            pages = pages.with_whole_pages(pages.length, starts, self.page_size)
            groups = groups_of(pages.keys, pages.values, starts, self.page_size)
            pages = pages._replace(starts=starts, groups=groups, summarised=0)
        if summaries and pages.summarised < pages.length:
            for group in pages.groups:
                group.summarise(pages.summarised, pages.length)
            pages = pages._replace(summarised=pages.length)
        return pages

    def select_and_attend(self, q: Any, bounds: Iterable[tuple[int, int]], *, budget: int, dense_below: int, **options: Any) -> Any:
        """Attention of the last tokens of each batch entry, (B, T, H, D), each over the pages that Quest chooses for it. `bounds` leave out
        padding: the first token of each entry, and the place after its last; padding itself gets 0. A token with fewer than `dense_below`
        tokens up to it, padding included, attends to all. `options`: those of `Group.attend`.

        Each token is a request of its own, so that its result is that of a step with this token alone."""
        pages = self._pages
        assert pages is not None
        starts, ends = zip(*bounds, strict=True)
        blocks = max(1, budget // self.page_size)
        some = blocks * self.page_size < pages.length - min(starts)  # else all pages are chosen, which takes no summaries
        pages = self._with_groups(pages, starts, some)
        self._publish(pages)
        parts, first = [], pages.length - q.shape[1]
        for group in pages.groups:
            dense = dense_below - group.start if first < dense_below else None
            parts.append(group.attend(q, first, ends, blocks if some else None, dense, **options))
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def _cropped(pages: Pages | None, tokens_to_remove: int) -> Pages | None:
    return pages.with_length(max(0, pages.length + tokens_to_remove)) if pages and tokens_to_remove else pages


def _taken(pages: Pages | None, entries: Any) -> Pages | None:
    if not pages:
        return pages
    keys, values = (x[entries.to(x.device)] for x in (pages.keys, pages.values))
    return Pages.of(keys, values, pages.length)


class _Indexed(NamedTuple):
    """What an `IndexedPagedLayer` holds at one moment."""

    pages: Pages | None = None
    indexer: Pages | None = None  # the keys of the indexer, as one head; the values have a last axis of 0
    positions: Any = None  # (..., tokens): position numbers, which some models keep in the layer


class IndexedPagedLayer(PagedLayer):
    """Pages for a layer whose model chooses its own tokens, with one key of the model's indexer per token beside them."""

    def __init__(self, page_size: int) -> None:
        self._indexed = _Indexed()
        self._indexer_view: tuple[Any, Any] = (None, None)  # what holds the keys of the indexer, and these keys
        super().__init__(page_size)

    @property
    def _pages(self) -> Pages | None:
        return self._indexed.pages

    @_pages.setter
    def _pages(self, pages: Pages | None) -> None:
        self._indexed = self._indexed._replace(pages=pages)

    @property
    def is_indexer_initialized(self) -> bool:
        return self._indexed.indexer is not None

    @property
    def indexer_keys(self) -> Any:
        """The same tensor until these keys change, so that what is made of them can be kept until then."""
        return self._view_of(self._indexed.indexer)

    def _view_of(self, held: Pages | None) -> Any:
        if self._indexer_view[0] is not held:
            self._indexer_view = held, held and held.views[0][:, 0]
        return self._indexer_view[1]

    @property
    def indexer_position_ids(self) -> Any:
        return self._indexed.positions

    @indexer_position_ids.setter
    def indexer_position_ids(self, positions: Any) -> None:
        self._indexed = self._indexed._replace(positions=positions)

    @torch.compiler.disable(reason="blitz_attn: the pages of a paged cache are no tensors of a graph")
    def update_indexer(self, indexer_key_states: Any) -> Any:
        states = indexer_key_states.detach()[:, None]
        self._indexed = self._indexed._replace(indexer=self._appended(self._indexed.indexer, states, states[..., :0]))
        return self.indexer_keys

    def reset(self) -> None:
        self._indexed = _Indexed()

    def crop(self, tokens_to_remove: int) -> None:
        changed = copy.copy(self)
        PagedLayer.crop(changed, tokens_to_remove)  # which also refuses numbers above 0
        pages, indexer, positions = changed._indexed
        positions = positions[..., :tokens_to_remove] if tokens_to_remove and positions is not None else positions
        self._indexed = _Indexed(pages, _cropped(indexer, tokens_to_remove), positions)

    def batch_repeat_interleave(self, repeats: int) -> None:
        held = self._indexed.pages or self._indexed.indexer
        if held:
            self._take(torch.arange(held.keys.shape[0]).repeat_interleave(repeats))

    def _take(self, entries: Any) -> None:
        pages, indexer, positions = self._indexed
        positions = positions if positions is None else positions[..., entries.to(positions.device), :]
        self._indexed = _Indexed(_taken(pages, entries), _taken(indexer, entries), positions)


def _no_tokens(key_states: Any, value_states: Any) -> Pages:
    keys, values = (x.new_zeros((x.shape[0], 0, x.shape[1], x.shape[3])) for x in (key_states, value_states))
    return Pages.of(keys, values, 0)


def _copied(layer: Any) -> Any:
    """A copy that can be changed while the layer stays as it is. Layers of linear attention change their states in place."""
    in_place = getattr(cache_utils, "LinearAttentionCacheLayerMixin", ())
    return copy.deepcopy(layer) if isinstance(layer, in_place) else copy.copy(layer)


class PagedCache(cache_utils.DynamicCache):
    """Pages for the layers that attend to everything; for other layers what `DynamicCache` has.

    Methods that change all layers make new layers and publish them by one assignment, so that an exception leaves all as they were. (A
    step is not such a method: it changes the states of linear attention in place, by the code of transformers.)
    """

    def __init__(self, config: Any, page_size: int) -> None:
        super().__init__(config=config)
        kinds = {cache_utils.DynamicLayer: PagedLayer, getattr(cache_utils, "DynamicIndexedLayer", None): IndexedPagedLayer}
        self.layers: list[Any] = [kinds[type(layer)](page_size) if type(layer) in kinds else layer for layer in self.layers]

    def update(self, key_states: Any, value_states: Any, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        if layer_idx >= len(self.layers):
            raise ValueError(
                f"past_key_values: expected a paged_cache of the model itself, got one of a model with {len(self.layers)} layers for layer "
                f"number {layer_idx}, counted from 0"
            )
        layer = self.layers[layer_idx]
        if not isinstance(layer, PagedLayer) and not torch.compiler.is_compiling():
            layer = copy.copy(layer)  # transformers' own layers change one attribute after the other
        keys, values = layer.update(key_states, value_states, *args, **kwargs)
        if getattr(layer, "is_sliding", False):
            setattr(keys, _ATTRIBUTE, None)
        self.layers[layer_idx] = layer
        return keys, values

    def _change_layers(self, method: str, *args: Any) -> None:
        layers = [_copied(layer) for layer in self.layers]
        for layer in layers:
            getattr(layer, method)(*args)
        self.layers = layers

    def reset(self) -> None:
        self._change_layers("reset")

    def reorder_cache(self, beam_idx: Any) -> None:
        self._change_layers("reorder_cache", beam_idx)

    def crop(self, tokens_to_remove: int) -> None:
        self._change_layers("crop", tokens_to_remove)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._change_layers("batch_repeat_interleave", repeats)

    def batch_select_indices(self, indices: Any) -> None:
        self._change_layers("batch_select_indices", indices)


class PagedPair(cache_utils.EncoderDecoderCache):
    """Pages for self-attention and for cross-attention, for models of encoder and decoder, whose layers have both.

    Where a pair is itself one of the two caches of an `EncoderDecoderCache`, it stands for its cache of self-attention.
    """

    def __init__(self, config: Any, page_size: int) -> None:
        super().__init__(PagedCache(config, page_size), PagedCache(config, page_size))

    @property
    def layers(self) -> list[Any]:
        own: list[Any] = self.self_attention_cache.layers
        return own

    def update(self, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        own: tuple[Any, Any] = self.self_attention_cache.update(*args, **kwargs)
        return own

    def _change_both(self, method: str, *args: Any) -> None:
        """Changes a copy of the pair, and takes over all that the copy holds by one assignment."""
        changed = copy.copy(self)
        changed.self_attention_cache = copy.copy(self.self_attention_cache)
        changed.cross_attention_cache = copy.copy(self.cross_attention_cache)
        changed.is_updated = dict(self.is_updated)
        getattr(super(PagedPair, changed), method)(*args)
        self.__dict__ = changed.__dict__

    def reset(self) -> None:
        self._change_both("reset")

    def reorder_cache(self, beam_idx: Any) -> None:
        self._change_both("reorder_cache", beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._change_both("batch_repeat_interleave", repeats)

    def batch_select_indices(self, indices: Any) -> None:
        self._change_both("batch_select_indices", indices)


def keeps_few_keys(keys: Any) -> bool:
    """Whether a paged cache has returned these keys for a layer that attends to a window or a chunk of tokens, without pages."""
    return getattr(keys, _ATTRIBUTE, keys) is None


def pages_of(keys: Any, values: Any) -> PagedLayer | None:
    """The layer whose pages hold these keys and values, where it still holds exactly them."""
    reference = getattr(keys, _ATTRIBUTE, None)
    layer: PagedLayer | None = reference and reference()
    return layer if layer is not None and layer.keys is keys and layer.values is values else None
