"""The attention functions that are registered with transformers, and what they fall back to."""

from __future__ import annotations

import inspect
import sys
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from ... import _arrays, _core
from ..._select.choosers import rules_of
from ..._select.prefill import select_blocks_prefill
from ...block_sparse import block_sparse_attention
from ...merge import merge_states
from .._torch.masks import read_mask
from .._torch.tensors import autocast_dtype, lowered
from ..torch import block_sparse_attention as differentiable_attention
from .cache import keeps_few_keys, pages_of
from .config import SparseConfig, config_of, config_of_text
from .fallbacks import DTYPES, MOST_HEAD_DIM, tell, why_not_tensors
from .latents import Latents, latents_of
from .masks import MATRIX, AdditiveMask, Call, RuleMask, Rules, TracedMask, additive
from .operators import NUMBERS, Traced, attend_in_graph, register_operator
from .tokens import Appended, Listed, all_seen, as_lists, as_mask, check_indices, is_exact, pays_as_blocks, pays_as_lists, pieces

__all__ = ["attend_batch", "attend_dense", "attend_sparse"]

_MOST_NEW_TOKENS = 32  # new tokens that a step of speculative decoding may have; more are a chunk of a prompt

# Arguments of models to the attention function that change nothing about attention, or whose effect is computed here.
_HARMLESS = frozenset({
    "cache", "cache_position", "cu_seq_lens_k", "cu_seq_lens_q", "deterministic", "input_ids", "is_causal", "labels", "logits_indices",
    "logits_processor_args", "logits_to_keep", "max_length_k", "max_length_q", "num_items_in_batch", "num_logits_to_keep",
    "output_attentions", "output_hidden_states", "output_router_logits", "past_key_value", "past_key_values", "position_bias",
    "position_embeddings", "position_ids", "read_index", "return_dict", "seq_idx", "sliding_window", "token_type_ids", "use_cache",
    "write_index",
})  # fmt: skip


@dataclass
class _Layer:
    """One call of a layer's attention: the arguments of transformers' interface, and the options of the model."""

    module: Any
    query: Any  # (B, H, Sq, D)
    key: Any  # (B, Hkv, Skv, D)
    value: Any
    mask: Any
    scaling: float | None
    dropout: float
    numbers: dict[str, Any]  # those of NUMBERS that the model gives
    sinks: Any  # (H,)
    block_indices: Any  # (B, Hkv, Sq, K)
    indices: Any  # (B, Sq, K)
    is_causal: bool | None
    rest: dict[str, Any]
    config: SparseConfig
    sparse: bool
    exact: bool = False  # whether `indices` were made here

    @property
    def differentiated(self) -> bool:
        """Whether torch wants gradients of this call."""
        tensors = (self.query, self.key, self.value, self.sinks, self.mask, self.rest.get("position_bias"))
        return torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in tensors)

    @property
    def by_elements(self) -> bool:
        """Whether only the elements of the mask say which keys are seen, since no rules stand for it."""
        return self.mask is not None and (not isinstance(self.mask, RuleMask) or self.mask.rules is None)

    @property
    def added(self) -> list[Any]:
        """Arrays with one element per pair of query and key: the elements of a mask without rules, and a position bias. They are added to
        the scores; elements of bool hide the key where they are False."""
        elements = [self.mask.elements() if isinstance(self.mask, RuleMask) else self.mask] if self.by_elements else []
        bias = self.rest.get("position_bias")
        return elements if bias is None else [*elements, bias]

    @property
    def listed(self) -> Listed | None:
        """The keys that the model chose itself, where its mask holds them."""
        return self.mask.listed if isinstance(self.mask, RuleMask) else None

    @property
    def number(self) -> int | None:
        """The layer's number, for models that number their layers."""
        return getattr(self.module, "layer_idx", None)

    @property
    def kind(self) -> str:
        """The name of the module's class."""
        return self.module.kind if isinstance(self.module, Traced) else type(self.module).__name__

    @property
    def source(self) -> str:
        """The name of the Python module that the class is from."""
        return self.module.source if isinstance(self.module, Traced) else type(self.module).__module__


# ---- What is not computed here -------------------------------------------------------------------------------------


def _why_not_by_shape(layer: _Layer) -> str | None:
    """Why this library does not compute a call, as far as shapes, dtypes and options tell; None where they tell no reason."""
    reason = why_not_tensors(layer.query, layer.key, layer.value)
    if reason is not None:
        return reason
    batch = layer.query.shape[0]
    of_mask = layer.mask.shape[0] if isinstance(layer.mask, (RuleMask, TracedMask)) else 1
    if any(x.shape[0] != batch for x in (layer.query, layer.key, layer.value)) or of_mask not in (1, batch):
        return "queries, keys, values and masks of different batches"
    if layer.dropout:
        return "dropout of attention weights"
    if layer.rest.get("output_attentions"):
        return "output_attentions, since the weights are never stored"
    unknown = _unknown(layer)
    if unknown:
        return f"the model's argument {unknown[0]}"
    return None


def _why_not(layer: _Layer) -> str | None:
    """Why this library does not compute a call; None where it does."""
    reason = _why_not_by_shape(layer)
    if reason is not None:
        return reason
    if isinstance(layer.mask, RuleMask) and layer.mask.shape[2:] != (layer.query.shape[2], layer.key.shape[2]):
        return f"a mask for {tuple(layer.mask.shape[2:])} queries and keys where the layer has {(layer.query.shape[2], layer.key.shape[2])}"
    added = layer.added
    reason = _why_not_added(layer, added)
    if reason is not None:
        return reason
    rules = _rules_of(layer)
    if rules.sequences is not None and layer.mask.shape[0] != layer.query.shape[0]:
        return "packed sequences of one batch entry for several"
    if rules.window is not None and not rules.causal and rules.offset + rules.q_length != layer.key.shape[2]:
        return "a window without a causal mask where queries and keys do not end at the same token"
    packed = rules.sequences is not None or layer.rest.get("cu_seq_lens_q") is not None
    if layer.block_indices is not None and (packed or added or any(rules.starts)):
        return f"blocks chosen by the model beside {_without_rules(layer) or 'packed sequences or padding on the left'}"
    if layer.listed is not None and (packed or added):
        return "blocks chosen by the model beside packed sequences or a position bias"
    if layer.indices is not None and (packed or added):
        return f"tokens chosen by the model beside {_without_rules(layer) or 'packed sequences'}"
    if packed and added:
        return f"packed sequences beside {_without_rules(layer)}"
    whole = not any(rules.starts) and all(end == layer.key.shape[2] for end in rules.ends) and not rules.offset
    if layer.rest.get("cu_seq_lens_q") is not None and not whole:
        return "packed sequences beside padding or a cache"
    return None


def _without_rules(layer: _Layer) -> str:
    """The name, for error sentences, of the mask or position bias that rules do not express; empty where rules express all."""
    if isinstance(layer.mask, RuleMask) and layer.mask.rules is None:
        return layer.mask.reason
    if isinstance(layer.mask, TracedMask):
        return layer.mask.reason if layer.mask.made is not None else ""
    if layer.mask is not None and not isinstance(layer.mask, RuleMask):
        return MATRIX
    return "" if layer.rest.get("position_bias") is None else "a position bias"


def _why_not_added(layer: _Layer, added: list[Any]) -> str | None:
    """Why this library cannot add these masks and biases to the scores; None where it can."""
    shape = (*layer.query.shape[:3], layer.key.shape[2])
    for x in added:
        if x.dtype not in (torch.bool, *DTYPES) or x.device.type != "cpu":
            return f"a mask of {x.dtype} on {x.device}"
        if x.dim() > 4 or any(n not in (1, m) for n, m in zip(x.shape[::-1], shape[::-1], strict=False)):
            return f"a mask of shape {tuple(x.shape)} where the layer has {shape}"
    return None


def _unknown(layer: _Layer) -> list[str]:
    """Names of the arguments that the model gives attention and that are not in `_HARMLESS`."""
    return [name for name, x in layer.rest.items() if name not in _HARMLESS and x is not None and x is not False]


def _numbers_of(given: dict[str, Any]) -> dict[str, Any]:
    """Takes the rules of attention that are numbers (`NUMBERS`) out of the arguments of a call, and returns them."""
    numbers = {name: given.pop(name) for name in NUMBERS if name in given}
    return {name: x for name, x in numbers.items() if x is not None}


def _fall_back(layer: _Layer, reason: str) -> tuple[Any, Any]:
    """The call by torch: by SDPA, or by the model's own eager function where SDPA lacks what the call needs."""
    kind = layer.kind
    if layer.config.on_unsupported == "error":
        raise ValueError(f"{kind}: expected attention that blitz_attn computes, got {reason}")
    tell(f"{kind}: attention by torch instead of blitz_attn, because of {reason}")
    mask = layer.mask
    if isinstance(mask, (RuleMask, TracedMask)):
        mask = mask.elements()
    rest = dict(layer.rest)
    if rest.get("cu_seq_lens_q") is not None:
        mask = _same_sequence(layer, mask)
    if layer.block_indices is not None:
        positions = rest.get("position_ids")
        if positions is None:
            positions = torch.arange(layer.key.shape[2] - layer.query.shape[2], layer.key.shape[2])
        positions = positions.reshape(-1, layer.query.shape[2]).expand(layer.query.shape[0], -1)
        where = (layer.key.shape[2], layer.query.dtype, layer.query.device, positions)
        mask = layer.module.indexer.build_block_mask(layer.block_indices, mask, *where)
    if layer.indices is not None:
        mask = _among_keys(layer, mask)
    tensors = (layer.module, layer.query, layer.key, layer.value)
    options = {"dropout": layer.dropout, "scaling": layer.scaling}
    own = getattr(sys.modules.get(layer.source), "eager_attention_forward", None)
    beyond_sdpa = _unknown(layer)
    if layer.numbers or layer.sinks is not None or rest.get("output_attentions") or beyond_sdpa:
        if own is None:
            raise ValueError(f"{kind}: expected a model with an eager attention function to fall back to because of {reason}, got none")
        beyond_sdpa += [name for name in layer.numbers if name != "softcap"]  # the eager function of a model that gives a softcap takes one
        unused = [name for name in beyond_sdpa if name not in inspect.signature(own).parameters]
        if unused:
            raise ValueError(f"{kind}: expected arguments that the model's eager attention function takes, got {unused[0]}")
        if mask is None and _is_causal(layer):
            mask = sdpa_mask(layer.query.shape[0], layer.query.shape[2], layer.key.shape[2], allow_is_causal_skip=False)
        if mask is not None and mask.dtype == torch.bool:
            mask = additive(mask, layer.query.dtype)
        options |= layer.numbers | ({} if layer.sinks is None else {"s_aux": layer.sinks})
        return own(*tensors, mask, **options, **rest)
    return sdpa_attention_forward(*tensors, mask, is_causal=layer.is_causal, **options, **rest)


def _among_keys(layer: _Layer, mask: Any) -> Any:
    """A mask joined by `and` with the keys that the model itself chose for each query, as its eager attention sees them."""
    batch, queries, keys = layer.query.shape[0], layer.query.shape[2], layer.key.shape[2]
    if not torch.compiler.is_compiling():
        check_indices(layer.indices, batch, queries, keys)
    if mask is None and _is_causal(layer):
        mask = sdpa_mask(batch, queries, keys, allow_is_causal_skip=False)
    return _joined(mask, as_mask(layer.indices, keys))


def _joined(mask: Any, seen: Any) -> Any:
    """A mask of any kind joined by `and` with one of bool."""
    if mask is None:
        return seen
    return mask & seen if mask.dtype == torch.bool else mask.masked_fill(~seen, torch.finfo(mask.dtype).min)


def _same_sequence(layer: _Layer, mask: Any) -> Any:
    """A mask joined by `and` with what cumulative lengths say: queries see only their own sequence. Without a mask, causal calls are
    aligned to the end of each sequence."""
    numbers, places, lengths = [], [], []
    for cu, x in zip(_cumulative(layer), (layer.query, layer.key), strict=True):
        lengths.append(torch.tensor(cu).diff())
        begins = torch.tensor(cu[:-1]).repeat_interleave(lengths[-1])
        numbers.append(torch.arange(len(cu) - 1).repeat_interleave(lengths[-1]).reshape(x.shape[0], 1, x.shape[2]))
        places.append((torch.arange(len(begins)) - begins).reshape(x.shape[0], 1, x.shape[2]))
    seen = numbers[0][..., :, None] == numbers[1][..., None, :]
    if mask is None and _is_causal(layer):
        last = places[0] + (lengths[1] - lengths[0])[numbers[0]]
        seen &= places[1][..., None, :] <= last[..., :, None]
    return _joined(mask, seen)


def _cumulative(layer: _Layer) -> tuple[list[int], list[int]]:
    """Cumulative lengths of packed queries and keys."""
    queries: Any = layer.rest["cu_seq_lens_q"]
    keys: Any = layer.rest.get("cu_seq_lens_k")
    return queries.tolist(), (queries if keys is None else keys).tolist()


def _is_causal(layer: _Layer) -> bool:
    """Whether a call without a mask is causal, by the rule of transformers' SDPA: aligned to the top left, and never for one query."""
    wanted = getattr(layer.module, "is_causal", True) if layer.is_causal is None else layer.is_causal
    return bool(wanted) and layer.query.shape[2] > 1


def _rules_of(layer: _Layer) -> Rules:
    """The rules of the call."""
    batch, keys = layer.query.shape[0], layer.key.shape[2]
    if layer.by_elements:
        return Rules(0, layer.query.shape[2], False, None, None, (0,) * batch, (keys,) * batch)
    if layer.mask is not None:
        rules: Rules = layer.mask.rules
        return rules.of_batch(batch)
    return Rules(0, layer.query.shape[2], _is_causal(layer), None, None, (0,) * batch, (keys,) * batch)


# ---- What is computed here -------------------------------------------------------------------------------------------


def _attend_lists(layer: _Layer, q: Any, k: Any, v: Any, lists: Any, block_shape: tuple[int, int], rules: dict[str, Any]) -> Any:
    """The attention operation over a list of blocks."""
    attend = differentiable_attention if layer.differentiated else block_sparse_attention
    options = {"sabi": lists, "block_shape": block_shape, "num_threads": layer.config.num_threads} | rules
    return attend(q, k, v, sinks=layer.sinks, **layer.numbers, **options)


def _choose(
    layer: _Layer, q: Any, k: Any, keys: int, rules: dict[str, Any], begin: int | None = None
) -> tuple[Any, tuple[int, int]]:
    """The list of blocks of a call and their shape; without a list, attention is dense. `begin`: the position of the first query among the
    keys; None where the last query and the last key are aligned."""
    config = layer.config
    if not layer.sparse or layer.query.shape[2] == 1 or keys < config.min_tokens or not config._sparse_in(layer.number):
        return None, (128, 128)
    if rules.get("attn_mask") is not None:  # choosers do not know which keys the mask hides
        return None, (128, 128)
    options = config._options(layer.number, layer.query.shape[1], layer.key.shape[1], layer.query.shape[3])
    if rules.get("kv_ranges") is not None and rules_of(options["chooser"])[0] == "vertical_slash":  # which takes no ranges
        return None, (128, 128)
    lists = select_blocks_prefill(q.detach(), k.detach(), num_threads=config.num_threads, q_begin=begin, **options, **rules)
    return lists, options["block_shape"]


def _attend_packed(layer: _Layer, rules: Rules, cu: tuple[list[int], list[int]]) -> Any:
    """Attention of packed sequences, which follow one another."""
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (layer.query, layer.key, layer.value))
    given = {"layout": "TND", "causal": rules.causal, "window": rules.window, "cu_seqlens_q": cu[0], "cu_seqlens_kv": cu[1]}
    options = given | {"scale": layer.scaling}
    longest = max((b - a for a, b in zip(cu[1], cu[1][1:], strict=False)), default=0)
    lists, shape = _choose(layer, q, k, longest, options)
    out = _attend_lists(layer, q, k, v, lists, shape, options)
    return out.unflatten(0, (layer.query.shape[0], layer.query.shape[2]))


def _model_lists(layer: _Layer, blocks: int) -> Any:
    """Blocks that the model itself chose for each query, as lists of one query: (B, Hkv, Sq, K)."""
    chosen = layer.block_indices.to(torch.int32)
    chosen = chosen.masked_fill(chosen >= blocks, -1)  # blocks after the last key, which no query sees
    if ((chosen[..., :-1] < 0) & (chosen[..., 1:] >= 0)).any():  # a list ends at its first pad
        chosen = chosen.sort(dim=-1, descending=True).values
    return chosen.contiguous()


def _attend_model_lists(layer: _Layer, q: Any, k: Any, v: Any, lists: Any, rules: dict[str, Any]) -> Any:
    """Attention over `_model_lists`. The core's attention with `routed`, which native sparse attention uses, takes these lists as they are
    and works block by block."""
    shape = (1, layer.module.indexer.block_size)
    if layer.differentiated or layer.sinks is not None:
        return _attend_lists(layer, q, k, v, lists.repeat_interleave(q.shape[2] // lists.shape[1], dim=1), shape, rules)
    empty = _arrays.family_of(q).empty
    options: dict[str, Any] = rules | {"block_shape": shape, "routed": True, "num_threads": layer.config.num_threads, "return_lse": False}
    options |= layer.numbers
    return _core.block_sparse_attention(
        empty, _arrays.readable(q, "q"), _arrays.readable(k, "k"), _arrays.readable(v, "v"), lists, **options
    )


def _decodes_by_quest(layer: _Layer) -> bool:
    """Whether the configuration wants Quest in this layer, and the call has few tokens and is no prompt."""
    wanted = layer.sparse and layer.config.decode_budget is not None and layer.config._sparse_in(layer.number)
    return wanted and layer.query.shape[2] <= _MOST_NEW_TOKENS and layer.query.shape[2] < layer.key.shape[2]  # else the call is a prompt


def _attend_pages(layer: _Layer, rules: Rules) -> Any:
    """Attention of new tokens, each over the pages that Quest chooses for it; None where this is not wanted, or is not possible."""
    config, tokens, length = layer.config, layer.query.shape[2], layer.key.shape[2]
    budget = config.decode_budget
    if budget is None or not _decodes_by_quest(layer) or length < config.min_tokens or layer.differentiated:
        return None
    if layer.block_indices is not None or layer.indices is not None or rules.left is not None or keeps_few_keys(layer.key):
        return None  # each token attends to few keys already
    pages = pages_of(layer.key, layer.value)
    in_order = rules.offset == length - tokens if rules.causal else tokens == 1
    reason = None
    if pages is None:
        reason = "keys and values that are in no paged_cache"
    elif layer.added or rules.ranges is not None:
        reason = "a mask or a position bias"
    elif not in_order:
        reason = "queries that are not the last tokens"
    if reason is not None:
        if config.on_unsupported == "error":
            raise ValueError(f"{layer.kind}: expected new tokens that can attend to decode_budget = {budget} tokens, got {reason}")
        tell(f"{layer.kind}: new tokens attend to all keys instead of decode_budget = {budget}, because of {reason}")
        return None
    assert pages is not None  # else there is a reason
    options = {"scale": layer.scaling, "sinks": layer.sinks, "num_threads": config.num_threads} | layer.numbers
    bounds = zip(rules.starts, rules.ends, strict=True)
    return pages.select_and_attend(layer.query.transpose(1, 2), bounds, budget=budget, dense_below=config.min_tokens, **options)


def _attend(layer: _Layer) -> tuple[Any, Any]:
    if isinstance(layer.mask, AdditiveMask) and layer.mask.appended is not None and not _in_two_calls(layer):
        layer.mask = RuleMask.of(layer.mask.elements())
    reason = _why_not(layer)
    if reason is not None:
        return _fall_back(layer, reason)
    if layer.query.shape[0] == 0:
        return layer.query[..., :1].expand(*layer.query.shape[:3], layer.value.shape[3]).transpose(1, 2), None
    layer.query, layer.key, layer.value = (_with_contiguous_rows(x) for x in (layer.query, layer.key, layer.value))
    rules = _rules_of(layer)
    if isinstance(layer.mask, AdditiveMask) and layer.mask.appended is not None:
        return _attend_two_sources(layer, rules, layer.mask.appended), None
    if layer.rest.get("cu_seq_lens_q") is not None:
        return _attend_packed(layer, rules, _cumulative(layer)), None
    if rules.sequences is not None:
        return _attend_packed(layer, rules, (list(rules.sequences), list(rules.sequences))), None
    chosen = _attend_pages(layer, rules)
    if chosen is not None:
        return chosen, None
    if layer.indices is not None:
        return _attend_chosen_tokens(layer, rules), None
    if layer.listed is not None:
        return _attend_chosen_blocks(layer, rules, layer.listed), None
    added = _sum_of(layer)
    parts = []
    for call in rules.calls():
        longest = max(call.kv_lens)
        q, k, v, options = _arguments_of(layer, rules, call)
        if added is not None:
            options |= _read(layer, added, call, longest, options)
        if layer.block_indices is not None:
            lists = _model_lists(layer, -(-longest // layer.module.indexer.block_size))[call.entries]
            parts.append(_attend_model_lists(layer, q, k, v, lists, options))
            continue
        # where queries are padding as well as keys, the last query and the last valid key may be different tokens
        whole = "q_lens" not in options
        lists, shape = _choose(layer, q, k, longest, options, begin=None if whole or rules.aligned else rules.offset - call.start)
        parts.append(_attend_lists(layer, q, k, v, lists, shape, options))
    return parts[0] if len(parts) == 1 else torch.cat(parts), None


def _arguments_of(layer: _Layer, rules: Rules, call: Call, queries: slice = slice(None)) -> tuple[Any, Any, Any, dict[str, Any]]:
    """Queries, keys and values of a call, and its rules as options. The lengths in `call` must be those of the slice `queries`."""
    longest = max(call.kv_lens)
    q = layer.query[call.entries, :, queries].transpose(1, 2)
    k, v = (x[call.entries, :, call.start : call.start + longest].transpose(1, 2) for x in (layer.key, layer.value))
    whole = all(n == q.shape[1] for n in call.q_lens) and all(n == longest for n in call.kv_lens)
    lengths = {} if whole else {"q_lens": call.q_lens, "kv_lens": call.kv_lens}
    options = {"layout": "BSND", "causal": rules.causal, "window": rules.window, "scale": layer.scaling} | lengths
    if rules.ranges is not None:
        ranges = np.broadcast_to(rules.ranges, (layer.query.shape[0], *rules.ranges.shape[1:]))[call.entries, queries]
        options["kv_ranges"] = ranges - call.start
    return q, k, v, options


def _attend_chosen_tokens(layer: _Layer, rules: Rules) -> Any:
    """Attention to the tokens that the model itself chose for each query. The configuration leaves out nothing more."""
    batch, queries, keys = layer.query.shape[0], layer.query.shape[2], layer.key.shape[2]
    if not layer.exact:
        check_indices(layer.indices, batch, queries, keys)
    indices = layer.indices.expand(batch, -1, -1)
    whole = []
    for call in rules.calls():
        parts = []
        for rows, piece in pieces(rules, call, indices.shape[2]):
            q, k, v, options = _arguments_of(layer, rules, piece, rows)
            chosen, longest = indices[call.entries, rows] - call.start, k.shape[1]
            lists, shape = None, (128, 128)
            few = longest <= chosen.shape[2]  # a list has a place for every key, so that it may name all of them
            if few and layer.exact:
                pass  # and it names all that its query sees
            elif not few and pays_as_lists(q.shape[1], longest, chosen.shape[2], q.shape[2] // k.shape[2]):
                lists, shape = chosen.clamp(min=-1).unsqueeze(1) if layer.exact else as_lists(chosen, longest), (1, 1)
            else:
                seen = as_mask(chosen, longest)
                if not few or not all_seen(seen, piece, rules.causal):
                    given = "kv_ranges" in options
                    options |= {"attn_mask": seen} if given else read_mask(seen, q.shape[1], longest, q.dtype, lists=True)
                    lists, shape = options.pop("sabi", None), options.pop("block_shape", shape)
            parts.append(_attend_lists(layer, q, k, v, lists, shape, options))
        whole.append(parts[0] if len(parts) == 1 else torch.cat(parts, dim=1))
    return whole[0] if len(whole) == 1 else torch.cat(whole)


def _attend_chosen_blocks(layer: _Layer, rules: Rules, listed: Listed) -> Any:
    """Attention to the blocks that the model itself chose for each query, and passed on in its mask."""
    group, whole = layer.query.shape[1] // layer.key.shape[1], []
    for call in rules.calls():
        parts = []
        for rows, piece in pieces(rules, call, listed.covers):
            q, k, v, options = _arguments_of(layer, rules, piece, rows)
            chosen, longest = listed.blocks[call.entries, rows], k.shape[1]
            lists, shape = None, (128, 128)
            if longest > listed.covers and pays_as_blocks(q.shape[1], longest, chosen.shape[2] * listed.size, group):
                lists, shape = chosen.unsqueeze(1).contiguous(), (1, listed.size)
            elif longest > listed.covers:
                options |= read_mask(replace(listed, blocks=chosen).elements((0,), longest), q.shape[1], longest, q.dtype, lists=True)
                lists, shape = options.pop("sabi", None), options.pop("block_shape", shape)
            parts.append(_attend_lists(layer, q, k, v, lists, shape, options))
        whole.append(parts[0] if len(parts) == 1 else torch.cat(parts, dim=1))
    return whole[0] if len(whole) == 1 else torch.cat(whole)


def _in_two_calls(layer: _Layer) -> bool:
    """Whether the keys that are `Appended` to those of a mask are attended by a call of their own."""
    rules = layer.mask.rules
    alone = all(layer.rest.get(name) is None for name in ("cu_seq_lens_q", "position_bias"))
    return rules is not None and rules.sequences is None and alone and not layer.differentiated


def _attend_two_sources(layer: _Layer, rules: Rules, appended: Appended) -> Any:
    """Attention to the keys of a mask and to the keys appended to them, as one softmax. Calls over the keys of the mask take the sinks."""
    first, queries = layer.key.shape[2] - appended.keys, layer.query.transpose(1, 2)
    own = replace(layer, key=layer.key[:, :, :first], value=layer.value[:, :, :first])
    given: dict[str, Any] = {"return_lse": True, "num_threads": layer.config.num_threads} | layer.numbers
    given["out_dtype"] = None if queries.dtype == torch.float64 else "float32"
    states = []
    for call in rules.calls():
        q, k, v, options = _arguments_of(own, rules, call)
        states.append(block_sparse_attention(q, k, v, sinks=layer.sinks, **given, **options))
    outs, lses = (torch.cat(x) if len(x) > 1 else x[0] for x in zip(*states, strict=True))
    given |= {"layout": "BSND", "scale": layer.scaling}
    if appended.chosen is None:
        given["kv_ranges"] = torch.stack([torch.zeros_like(appended.count), appended.count], dim=-1)
    else:
        given |= {"sabi": appended.chosen.unsqueeze(1), "block_shape": (1, 1)}
    more, more_lses = block_sparse_attention(queries, *(x[:, :, first:].transpose(1, 2) for x in (layer.key, layer.value)), **given)
    lses, more_lses = (x.transpose(1, 2).contiguous() for x in (lses, more_lses))
    return merge_states(outs, lses, more, more_lses)[0].to(queries.dtype)


def _is_absorbed(layer: _Layer, latents: Latents) -> bool:
    """Whether a call may attend to latents as they are, where that is cheaper. Other calls expand them first, and attend as usual."""
    if (layer.indices is None and layer.listed is None) or latents.width > MOST_HEAD_DIM:
        return False
    if layer.differentiated or autocast_dtype() is not None:
        return False
    if not isinstance(layer.mask, RuleMask) or _why_not(layer) is not None or 0 in layer.query.shape:
        return False
    rules = _rules_of(layer)
    return rules.causal and rules.window is None and rules.ranges is None


def _attend_latents(layer: _Layer, latents: Latents) -> Any:
    """Attention to chosen tokens. If it costs less, the first queries of a prompt attend to expanded keys; the others attend to latents."""
    rules, lists, listed, queries = _rules_of(layer), layer.indices, layer.listed, layer.query.shape[2]
    most = lists.shape[2] if listed is None else listed.size * listed.blocks.shape[2]

    def attend(begin: int, end: int, query: Any, key: Any, value: Any) -> Any:
        part, some = replace(layer, query=query, key=key, value=value), replace(rules, offset=rules.offset + begin, q_length=end - begin)
        if listed is not None:
            return _attend_chosen_blocks(part, some, replace(listed, blocks=listed.blocks[:, begin:end]))
        return _attend_chosen_tokens(replace(part, indices=lists[:, begin:end]), some)

    split, parts = latents.rows_expanded(rules.offset + 1, queries, most), []
    if split:
        parts.append(attend(0, split, layer.query[:, :, :split], *latents.expanded(rules.offset + split)))
    keys = rules.offset + queries
    few = layer.exact and 2 * (queries - split) * most <= keys
    key: Any = None if few or split == queries else latents.joined(keys)
    step = latents.rows_at_once()
    for begin in range(split, queries, step):
        end = min(begin + step, queries)
        query = latents.folded(layer.query[:, :, begin:end])
        if few:
            out = _attend_gathered(layer, latents, query, lists[:, begin:end])
        else:
            out = attend(begin, end, query, key, key[..., : latents.nope.shape[3]])
        parts.append(latents.unfolded(out))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _attend_gathered(layer: _Layer, latents: Latents, query: Any, lists: Any) -> Any:
    """Attention of few queries, each of which becomes a batch entry with keys of its own."""
    key, width = latents.gathered(lists), latents.nope.shape[3]
    options = {"layout": "BSND", "scale": layer.scaling, "kv_lens": (lists >= 0).sum(-1).flatten().tolist()}
    rows = query.transpose(1, 2).flatten(0, 1).unsqueeze(1)
    return _attend_lists(layer, rows, key, key[..., :width], None, (128, 128), options).reshape(*lists.shape[:2], -1, width)


def _sum_of(layer: _Layer) -> Any:
    """A mask and a position bias as one mask; None where there is neither."""
    added = layer.added
    if len(added) < 2:
        return added[0] if added else None
    mask, bias = added
    return torch.where(mask, bias, -torch.inf) if mask.dtype == torch.bool else mask + bias


def _read(layer: _Layer, mask: Any, call: Call, keys: int, options: dict[str, Any]) -> dict[str, Any]:
    """The arguments for the part of a mask that one call needs."""
    mask = mask.reshape((1,) * (4 - mask.dim()) + tuple(mask.shape))
    mask = mask if mask.shape[0] == 1 else mask[call.entries]
    mask = mask if mask.shape[3] == 1 else mask[..., call.start : call.start + keys]
    # A mask may be read as kv_ranges, but the call may have kv_ranges already. And the rules that replace a mask have no gradient.
    if "kv_ranges" in options or (mask.requires_grad and torch.is_grad_enabled()):
        return {"attn_mask": mask}
    return read_mask(mask, layer.query.shape[2], keys, layer.query.dtype, lists=True)


def _with_contiguous_rows(x: Any) -> Any:
    """The tensor, or a copy that the operations can read."""
    return x if x.shape[-1] <= 1 or x.stride(-1) == 1 else x.contiguous()


def _of_one_batch(layer: _Layer) -> None:
    """Expands, as views, the tensors that are given once for all batch entries."""
    given = [layer.query, layer.key, layer.value, *([layer.mask] if isinstance(layer.mask, (RuleMask, TracedMask)) else [])]
    batch = max(x.shape[0] for x in given)
    if any(x.shape[0] != batch for x in given) and all(x.shape[0] in (1, batch) for x in given):
        layer.query, layer.key, layer.value = (x.expand(batch, *x.shape[1:]) for x in given[:3])


def _under_autocast(layer: _Layer) -> None:
    """Casts the tensors of a call as torch.autocast does for torch's own attention. A paged cache holds keys and values in that dtype
    already."""
    dtype = autocast_dtype()
    if dtype is None:
        return
    layer.query, layer.key, layer.value = (lowered(x, dtype) for x in (layer.query, layer.key, layer.value))
    if isinstance(layer.mask, torch.Tensor) and not isinstance(layer.mask, RuleMask):
        layer.mask = lowered(layer.mask, dtype)
    if layer.rest.get("position_bias") is not None:
        layer.rest["position_bias"] = lowered(layer.rest["position_bias"], dtype)


def _attend_outside(reason: str) -> Any:
    """`_attend` where it cannot stand in a graph of torch.compile: the graph ends before it, and the next begins after it."""

    def attend(layer: _Layer) -> tuple[Any, Any]:
        if isinstance(layer.mask, TracedMask):
            layer.mask = layer.mask.as_rules()
        return _attend(layer)

    return torch.compiler.disable(attend, reason=f"blitz_attn: {reason}")


_attend_differentiated = _attend_outside("attention that is differentiated stands in no graph")
_attend_by_rules = _attend_outside("a mask that was made outside of the graph is no tensor of it")
_attend_by_quest = _attend_outside("the pages of a paged cache are no tensors of a graph")


def _attend_traced(layer: _Layer) -> Any:
    """The call of a layer while torch traces: the operator in the graph, attention by torch in the graph, or a call that ends the graph."""
    mask = layer.mask
    if isinstance(mask, RuleMask):
        return _attend_by_rules(layer)
    reason = _why_not_by_shape(layer)
    if reason is None and layer.differentiated and _without_rules(layer):  # torch computes such a call in the graph
        reason = f"gradients beside {_without_rules(layer)}"
    if reason is not None:
        return _fall_back(layer, reason)
    if layer.differentiated:
        return _attend_differentiated(layer)
    if _decodes_by_quest(layer):
        return _attend_by_quest(layer)
    if not isinstance(mask, TracedMask):
        shape = (layer.query.shape[0], 1, layer.query.shape[2], layer.key.shape[2])
        mask = TracedMask(shape, mask is None and _is_causal(layer), None, None, None, None, 0, 0, mask)
    return attend_in_graph(layer, mask), None


def _attend_in_operator(module: Traced, tensors: tuple[Any, Any, Any], mask: Any, options: dict[str, Any]) -> Any:
    """The work of the operator when the graph runs."""
    rest = {name: options[name] for name in ("cu_seq_lens_q", "cu_seq_lens_k", "position_bias")}
    layer = _Layer(
        module, *tensors, mask, options.get("scaling"), 0.0, _numbers_of(options), options["sinks"], options["block_indices"],
        options["indices"], module.is_causal, rest, config_of_text(options.get("config") or SparseConfig()._text),
        bool(options.get("sparse")),
    )  # fmt: skip
    return _attend(layer)[0]


_library = register_operator(_attend_in_operator)


def _chooses(module: Any) -> bool:
    """Whether a layer was trained to choose what it attends to, or takes the choice of another layer. No configuration chooses there."""
    return any(getattr(module, name, None) for name in ("indexer", "compressor", "skip_topk"))


def _attention(sparse: bool) -> Any:
    def attend(
        module: Any, query: Any, key: Any, value: Any, attention_mask: Any, scaling: float | None = None, dropout: float = 0.0,
        is_causal: bool | None = None, s_aux: Any = None, block_indices: Any = None, indices: Any = None, **rest: Any,
    ) -> tuple[Any, Any]:  # fmt: skip
        layer = _Layer(
            module, query, key, value, attention_mask, scaling, dropout, _numbers_of(rest), s_aux, block_indices, indices, is_causal, rest,
            config_of(module), sparse and not _chooses(module), is_exact(indices),
        )  # fmt: skip
        latents = latents_of(key)
        if latents is not None:
            if _is_absorbed(layer, latents):
                return _attend_latents(layer, latents), None
            layer.key, layer.value = latents.expanded(key.shape[2])
        if isinstance(attention_mask, TracedMask) and not torch.compiler.is_compiling():  # the graph has ended between mask and attention
            layer.mask = attention_mask.as_rules()
        _of_one_batch(layer)
        _under_autocast(layer)
        return _attend_traced(layer) if torch.compiler.is_compiling() else _attend(layer)

    return attend


attend_dense = _attention(False)
attend_sparse = _attention(True)


def attend_batch(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, *given: Any, **options: Any) -> tuple[Any, Any]:
    """Attention of a step of continuous batching. All other calls are passed on to `attend_dense`."""
    if options.get("read_index") is None:
        return attend_dense(module, query, key, value, attention_mask, *given, **options)
    return _attend_requests(module, query, key, value, options), None


@torch.compiler.disable(reason="blitz_attn: the pages of continuous batching are no tensors of a graph")
def _attend_requests(module: Any, query: Any, key: Any, value: Any, options: dict[str, Any]) -> Any:
    """Attention of the requests of a step, with 0 for the padding after them. No mask is read: cumulative lengths say what is seen."""
    batch, cache = options.pop("paged_batch", None), options.get("cache")
    if cache is not None:  # in earlier releases, attention gives the cache its keys and values
        key, value = cache.update(key, value, module.layer_idx, kwargs=options)
    queries, keys = (int(options[name][-1]) for name in ("cu_seq_lens_q", "cu_seq_lens_k"))
    own = {name: options.pop(name, None) for name in ("scaling", "dropout", "s_aux")}
    layer = _Layer(
        module, query[:, :, :queries], key[:, :, :keys], value[:, :, :keys], None, own["scaling"], own["dropout"] or 0.0,
        _numbers_of(options), own["s_aux"], None, None, True, options, config_of(module), False,
    )  # fmt: skip
    reason = _why_not_by_shape(layer)
    if reason is not None:
        raise ValueError(f"{layer.kind}: expected requests that blitz_attn can attend to, got {reason}")
    out = None if batch is None else batch.attend(layer)
    if out is None:
        window = options.get("sliding_window")
        rules = replace(_rules_of(layer), causal=True, left=None if window is None else window - 1)
        out = _attend_packed(layer, rules, _cumulative(layer))
    return out if queries == query.shape[2] else torch.nn.functional.pad(out, (0, 0, 0, 0, 0, query.shape[2] - queries))
