"""Continuous batching of transformers: the requests of a step share a cache of pages, which attention reads where they lie.

In each layer, the cache gathers earlier keys and values at the places in the model's argument `read_index`. Where attention can
read the pages instead, a hook empties this argument, so that nothing is gathered. The hook adds another argument, by which attention gets
the pages of the requests.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
import transformers

from ... import _arrays
from ..._paged.plan import PagedPlan
from ..._sentences import shown

__all__ = ["NAME", "Batch", "batched", "check_model"]

# For a name with "flash" in it, transformers makes no mask, because functions with such names read the cumulative lengths of sequences.
NAME = "blitz_attn_flash"
_ARGUMENT = "paged_batch"  # of the model


class Batch:
    """The requests of one step, for all layers."""

    def __init__(self, cache: Any, arguments: dict[str, Any]) -> None:
        self._allocators = cache.layer_to_allocator
        self._reads = {
            name: arguments["read_index"][x.index]
            for name, x in cache.cache_allocators.items()
            if x.supports_block_table and arguments["read_index"][x.index].numel()
        }
        self._cu_q, self._cu_k = arguments["cu_seq_lens_q"], arguments["cu_seq_lens_k"]
        self._plans: dict[tuple[Any, ...], PagedPlan] = {}

    def left_to_cache(self, cache: Any, read_index: list[Any]) -> list[Any]:
        """The places that the cache still reads: none where attention reads the pages itself."""
        own = {cache.cache_allocators[name].index for name in self._reads}
        return [x[:0] if n in own else x for n, x in enumerate(read_index)]

    def attend(self, layer: Any) -> Any:
        """Attention of a layer, (1, T, H, D), over the pages of the requests; None where the layer is given all keys that it attends to."""
        allocator = self._allocators[layer.number]
        if allocator.layer_type not in self._reads:
            return None
        queries, kind = _arrays.host(layer.query[0].transpose(0, 1), "query")
        keys, values = (_arrays.host(x, "pages")[0] for x in allocator.get_cache_for_block_table(layer.number))
        plan = self._plan(allocator, (layer.scaling, layer.numbers.get("softcap"), kind, layer.config.num_threads))
        out = plan.attention(queries, keys, values, sinks=layer.sinks)
        return torch.from_numpy(out).view(layer.query.dtype)[None]

    def _plan(self, allocator: Any, rules: tuple[Any, ...]) -> PagedPlan:
        key = (allocator.layer_type, *rules)
        if key not in self._plans:
            size, places = allocator.tokens_per_page, self._reads[allocator.layer_type].numpy()
            begins, lens = (x.numpy().astype(np.int64) for x in (self._cu_k[allocator.layer_type], self._cu_q.diff()))
            kv_lens = np.diff(begins)
            counts = -(-kv_lens // size)
            indptr = np.concatenate([[0], counts.cumsum()])
            # where in `places` the first token of each page stands; its place, divided by `size`, is the number of the page
            firsts = (begins[:-1] - indptr[:-1] * size).repeat(counts) + np.arange(indptr[-1]) * size
            tables = indptr, places[firsts] // size, kv_lens - (counts - 1).clip(0) * size
            scale, softcap, kind, threads = rules
            options = {"scale": scale, "softcap": softcap, "dtype": kind if kind == "bfloat16" else None, "num_threads": threads}
            self._plans[key] = PagedPlan(tables, page_size=size, q_lens=lens, **options)
        return self._plans[key]


@torch.compiler.disable(reason="blitz_attn: the pages of continuous batching are no tensors of a graph")
def _with_batch(model: Any, given: tuple[Any, ...], arguments: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Hook before a call of a model."""
    cache = arguments.get("cache")
    if not hasattr(cache, "cache_allocators") or _ARGUMENT in arguments:
        return None
    batch = Batch(cache, arguments)
    return given, arguments | {"read_index": batch.left_to_cache(cache, arguments["read_index"]), _ARGUMENT: batch}


def check_model(model: Any) -> None:
    """Refuses what has no continuous batching, and releases of transformers with another kind of cache for it."""
    if not hasattr(model, "generate_batch") or not hasattr(model, "register_forward_pre_hook"):
        raise TypeError(f"model: expected a model of transformers that has generate_batch, got {shown(model)}")
    if find_spec("transformers.generation.continuous_batching.cache_allocators") is None:
        version = transformers.__version__
        raise ImportError(f"transformers: expected a version whose continuous batching has cache allocators, such as 5.24, got {version}")


@contextmanager
def batched(model: Any) -> Iterator[None]:
    """See `continuous_batching` of `blitz_attn.integrations.transformers`."""
    configs: dict[int, Any] = {id(x.config): x.config for x in model.modules() if hasattr(x, "config")}
    before = [(x, x._attn_implementation) for x in configs.values() if hasattr(x, "_attn_implementation")]
    hook = model.register_forward_pre_hook(_with_batch, with_kwargs=True)
    try:
        for config, _ in before:
            config._attn_implementation = NAME
        yield
    finally:
        hook.remove()
        for config, name in before:
            config._attn_implementation = name
