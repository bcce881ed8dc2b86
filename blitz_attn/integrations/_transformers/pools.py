"""GLM-5.3 and Qwen4 choose pools of neighbouring tokens: their attention gets a mask that holds the choice, and no array has a number for
each query and key.

Pools are counted from the first token of each sequence. Their keys are made of what the model's cache holds for each token. The keys of
complete pools are kept for the next call: as long as the cache holds the same tokens, only the pools of later tokens are made.
"""

from __future__ import annotations

import sys
import weakref
from typing import Any

import torch
from torch.nn.functional import linear

from ..._select.tokens import select_tokens
from .config import config_of
from .dsa import keep_latents, why_not, why_not_folded
from .masks import RuleMask, make_mask
from .tokens import Listed
from .trained import Table, UnsuitedError, check_code, leave

__all__ = ["ADAPTERS"]

_KNOWN = {
    "Glm5NextTextAttention": "f3b1bbd982712cf2", "Glm5NextTextIndexer": "638fce0ffa14f062", "Qwen4ExpTextAttention": "701ffcda5a2f847b",
    "Qwen4ExpTextQSAIndexer": "13aef60db521e9e1",
}  # fmt: skip


# By layer of a cache: the marks of what the last call made its pools of, and the pools, by range of batch entries and first token.
_kept: weakref.WeakKeyDictionary[Any, tuple[Any, dict[Any, Any]]] = weakref.WeakKeyDictionary()


class _Pools:
    """The keys of pools that one call of an indexer makes. Those of complete pools are kept for the next call with the same cache layer.

    They are used again only if the cache still holds the tensor of index keys that it held when they were made, and if neither this tensor
    nor a parameter that the keys of pools depend on has been changed in place since. A cache that is cropped or reordered holds another
    tensor.
    """

    def __init__(self, cache: Any, indexer: Any, *parameters: Any) -> None:
        """Called before the cache takes the keys of new tokens. `parameters`: what the keys of pools depend on besides index keys."""
        self._layer, self._parameters = None if cache is None else cache.layers[indexer.layer_idx], parameters
        marks, pools = _kept.get(self._layer, (None, {})) if self._layer is not None else (None, {})
        self._old = pools if marks is not None and _are_same(marks, self._marks()) else {}
        self._new: dict[Any, Any] = {}

    def _marks(self) -> Any:
        """Tensors that pools are made of, with what changes when they are written to; None where torch keeps no count of that."""
        tensors = (getattr(self._layer, "indexer_keys", None), *self._parameters)
        if any(x is None or x.is_inference() for x in tensors):
            return None
        return [(x, x._version, x.data_ptr()) for x in tensors]

    def of(self, make: Any, entries: slice, begin: int, end: int, size: int, past: int) -> Any:
        """The keys of the complete pools of `size` tokens between tokens `begin` and `end`. ``make(entries, tokens)`` makes those of a
        slice of batch entries and a slice of tokens. Before this call of the indexer, the cache held `past` tokens."""
        place, count = (entries.start, entries.stop, begin), (end - begin) // size
        old = self._old.get(place)
        known = 0 if old is None else min(old.shape[1], max(0, past - begin) // size, count)
        keys = old[:, :known] if old is not None and known else None
        if known < count or keys is None:
            made = make(entries, slice(begin + known * size, end))
            keys = made if keys is None else torch.cat([keys, made], dim=1)
        self._new[place] = keys
        return keys

    def keep(self) -> None:
        """Called once the cache holds the keys of the new tokens."""
        if self._layer is not None:
            _kept[self._layer] = self._marks(), self._new


def _are_same(marks: Any, others: Any) -> bool:
    return others is not None and all(a[0] is b[0] and a[1:] == b[1:] for a, b in zip(marks, others, strict=True))


def _chosen(
    indexer: Any, mask: RuleMask, q: Any, weights: Any, pools: _Pools, make: Any, count: int, *, rotated: Any = None, **options: Any
) -> RuleMask:
    """The mask, with the `count` pools that each query chooses. `make` makes the keys of pools, see `_Pools.of`, and `rotated`, if given,
    rotates them. `options`: those of `select_tokens`."""
    rules, size, tail = mask.rules, options["pool_size"], options["keep_tail"]
    assert rules is not None  # a mask without rules is left to the model
    covers = (count + 1) * size - 1 if tail else 0
    longest = min(max(rules.ends), rules.offset + rules.q_length) - min(rules.starts)
    if longest <= covers:
        return mask.among(Listed(torch.arange(-(-longest // size), dtype=torch.int32).expand(*q.shape[:2], -1), size, covers))
    parts = []
    for call in rules.calls():
        k = pools.of(make, call.entries, call.start, call.start + max(call.kv_lens), size, rules.offset)
        if rotated is not None:
            k = rotated(call.entries, slice(call.start, call.start + k.shape[1] * size, size), k)
        dtype = torch.promote_types(q.dtype, k.dtype)
        part = q[call.entries].to(dtype), k.to(dtype), weights[call.entries]
        options |= {"q_lens": call.q_lens, "kv_lens": call.kv_lens, "num_threads": config_of(indexer).num_threads}
        parts.append(select_tokens(*part, count, causal=True, **options))
    pools.keep()
    return mask.among(Listed(parts[0] if len(parts) == 1 else torch.cat(parts), size, covers))


# ---- Qwen4 -----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def _choose_means(own: Any, indexer: Any, hidden: Any, embeddings: tuple[Any, Any], mask: Any, cache: Any) -> Any:
    """What the model joins with its mask by `and`: the same mask, with the choice."""
    if leave(indexer, why_not(hidden, mask)):
        return own(hidden, embeddings, mask, cache)
    rotate = sys.modules[type(indexer).__module__].apply_rotary_pos_emb
    size, dim, tokens = indexer.compress_ratio, indexer.index_head_dim, hidden.shape[1]
    q, keys = indexer.index_qk_proj(hidden).split([indexer.index_n_heads * dim, indexer.index_kv_heads * dim], dim=-1)
    pools = _Pools(cache, indexer, indexer.k_layernorm.weight)
    if cache is not None:
        keys = cache.update_indexer(keys, indexer.layer_idx)
    q = indexer.q_layernorm(q.unflatten(-1, (-1, dim)))
    q = rotate(q, cos=embeddings[0][:, -tokens:], sin=embeddings[1][:, -tokens:], unsqueeze_dim=2)

    def make(entries: slice, part: slice) -> Any:
        groups = keys[entries, part.start : part.stop - (part.stop - part.start) % size].unflatten(1, (-1, size))
        return indexer.k_layernorm(groups.float().mean(2).to(keys.dtype))

    def rotated(entries: slice, firsts: slice, means: Any) -> Any:  # anew in each call, since positions are the caller's
        cos, sin = (x[entries, firsts] for x in embeddings)
        return rotate(means.unsqueeze(2), cos=cos, sin=sin, unsqueeze_dim=2).squeeze(2)

    weights = torch.ones(q.shape[:3])
    return _chosen(indexer, mask, q, weights, pools, make, indexer.block_topk, rotated=rotated, pool_size=size, keep_tail=True)


def _qwen(attention: Any) -> dict[str, Any]:
    check_code(_KNOWN, attention, attention.indexer)
    return {"indexer.forward": _choose_means}


# ---- GLM-5.3 ---------------------------------------------------------------------------------------------------------


@torch.no_grad()
def _choose_pools(own: Any, indexer: Any, hidden_states: Any, q_resid: Any, attention_mask: Any, cache: Any) -> Any:
    """The mask of the layer, in the place of tokens; layers that share the choice hand it on."""
    batch, tokens = attention_mask.shape
    valid, past, length = attention_mask, 0, tokens
    if cache is not None:  # whose latents have the new tokens already, and whose index keys have not
        layer = cache.layers[indexer.layer_idx]
        past, length = int(layer.get_seq_length()) - tokens, layer.keys.shape[-2]
        if past:
            valid = torch.cat([layer.indexer_keys[:, :past, -1].bool(), valid], dim=1)
    mask = make_mask(batch, tokens, length, past, attention_mask=valid)
    if leave(indexer, why_not(hidden_states, mask)):
        return own(hidden_states=hidden_states, q_resid=q_resid, attention_mask=attention_mask, cache=cache)
    q = indexer.wq_b(q_resid).unflatten(-1, (-1, indexer.head_dim))
    keys = indexer.k_norm(indexer.wk(hidden_states))
    states = torch.cat([keys, linear(hidden_states, indexer.index_kpool_compress_gate), attention_mask.to(keys.dtype)[..., None]], dim=-1)
    pools = _Pools(cache, indexer, indexer.index_kpool_compress_ape)
    if cache is not None:
        states = cache.update_indexer(states, indexer.layer_idx)
    weights = indexer.weights_proj(hidden_states.to(indexer.weights_proj.weight.dtype)).float() * indexer.n_heads**-0.5

    def make(entries: slice, part: slice) -> Any:
        return indexer.get_pooled_states(packed_states=states[entries, part])[0]

    size, tail = indexer.index_kpool, indexer.index_kpool_always_select_tail
    options = {"pool_size": size, "keep_tail": tail, "scale": indexer.softmax_scale}
    return _chosen(indexer, mask, q, weights, pools, make, indexer.index_topk // size, **options)


def _mask_of_choice(own: Any, attention: Any, topk_indices: Any, **options: Any) -> Any:
    return topk_indices if isinstance(topk_indices, RuleMask) else own(topk_indices=topk_indices, **options)


def _glm(attention: Any) -> dict[str, Any]:
    check_code(_KNOWN, attention)
    reason = why_not_folded(attention)
    if reason is not None:
        raise UnsuitedError(reason)
    methods = {"build_attention_mask_from_topk": _mask_of_choice, "expand_kv": keep_latents}
    if attention.indexer is not None:
        check_code(_KNOWN, attention.indexer)
        methods["indexer.forward"] = _choose_pools
    return methods


ADAPTERS: Table = {
    ("modeling_glm5_next", "Glm5NextTextAttention"): _glm,
    ("modeling_qwen4_exp", "Qwen4ExpTextAttention"): _qwen,
}
