"""DeepSeek's sparse attention: an indexer chooses tokens, and all heads attend to the latents of these tokens.

The indexer's own code still runs, but with stand-ins for the cached keys and for the mask. They compute nothing, and note which steps the
code applies to them. If the steps are the formula of `select_tokens`, that function computes the result; otherwise the model's code runs
again, on the real mask and keys. So how a family of models makes queries, keys and weights need not be known here.
"""

from __future__ import annotations

import inspect
import math
from types import SimpleNamespace
from typing import Any

import torch

from ..._select.tokens import select_tokens
from .config import config_of
from .latents import Latents, plain_weight
from .masks import RuleMask
from .tokens import mark_exact
from .trained import Table, UnsuitedError, leave, why_not_states

__all__ = ["ADAPTERS", "keep_latents", "why_not", "why_not_folded"]

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


# ---- The indexer ----------------------------------------------------------------------------------------------------


class _Noted:
    """Stands for the keys of an indexer, or for a result that its code makes from them, and records the steps to that result."""

    def __init__(self, call: _Selection, *steps: tuple[Any, ...]) -> None:
        self._call, self._steps = call, steps

    def _then(self, *step: Any) -> _Noted:
        return _Noted(self._call, *self._steps, step)

    def transpose(self, a: int, b: int) -> _Noted:
        return self._then("transpose", a, b)

    def unsqueeze(self, axis: int) -> _Noted:
        return self._then("unsqueeze", axis)

    def squeeze(self, axis: int) -> _Noted:
        return self._then("squeeze", axis)

    def masked_fill(self, where: Any, value: float) -> _Noted:
        return self._then("masked_fill", where, value)

    def __mul__(self, factor: float) -> _Noted:
        return self._then("mul", float(factor))

    def float(self) -> _Noted:
        return self._then("float")

    @property
    def shape(self) -> tuple[int, ...]:
        return self._call.shape

    def topk(self, count: int, dim: int) -> Any:
        return SimpleNamespace(indices=self._call.choose(self._steps, count, dim))

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        match function.__name__, arguments:
            case "matmul", (torch.Tensor() as left, _Noted() as right) if not options:
                return right._then("matmul", left)
            case "relu", (_Noted() as scores,) if not any((options or {}).values()):  # inplace
                return scores._then("relu")
        raise UnsuitedError(f"a step of its indexer that is not known here ({function.__name__})")

    def __getattr__(self, name: str) -> Any:
        raise UnsuitedError(f"a step of its indexer that is not known here ({name})")


class _Hidden:
    """Stands for the mask of an indexer. The real one is a RuleMask, which holds rules in place of elements."""

    dtype = torch.bool

    def __invert__(self) -> _Hidden:
        return self

    def __getattr__(self, name: str) -> Any:
        raise UnsuitedError(f"a step of its indexer that is not known here ({name} of its mask)")


class _Selection:
    """One call of an indexer. The indexer's code gets this object as its cache."""

    def __init__(self, mask: RuleMask, cache: Any, num_threads: int | None) -> None:
        self.mask, self.cache, self.num_threads = mask, cache, num_threads
        self.hidden = _Hidden()
        self.keys: Any = None
        self.chosen: Any = None

    def update_indexer(self, keys: Any, *arguments: Any, **options: Any) -> _Noted:
        self.keys = keys if self.cache is None else self.cache.update_indexer(keys, *arguments, **options)
        return _Noted(self)

    @property
    def shape(self) -> tuple[int, ...]:
        return len(self.keys), self.mask.shape[1], self.keys.shape[1]

    def choose(self, steps: tuple[tuple[Any, ...], ...], count: int, dim: int) -> Any:
        """The tokens that the steps choose, int32 (B, Sq, count)."""
        match steps:
            case (
                ("transpose", -1, -2), ("float",), ("unsqueeze", 1), ("matmul", q), *factors, ("relu",), ("matmul", weights),
                ("squeeze", -2), ("masked_fill", self.hidden, fill),
            ) if (
                fill == -math.inf and dim == -1 and all(step[0] == "mul" for step in factors)
                and q.dim() == 4 and weights.shape == (*q.shape[:2], 1, q.shape[2])
            ):  # fmt: skip
                self.chosen = self._selected(q, weights.squeeze(-2), math.prod(step[1] for step in factors), count)
                return self.chosen
        raise UnsuitedError("scores of its indexer that follow another formula")

    def _selected(self, q: Any, weights: Any, scale: float, count: int) -> Any:
        k, (batch, queries) = self.keys, q.shape[:2]
        if self.mask.shape[0] not in (1, batch) or self.mask.shape[1:] != (queries, k.shape[1]):
            raise UnsuitedError(f"a mask of shape {tuple(self.mask.shape)} for {queries} queries and {k.shape[1]} keys")
        assert self.mask.rules is not None  # why_not() leaves a mask without rules to the model
        rules = self.mask.rules.of_batch(batch)
        if rules.causal and rules.offset + queries <= count:  # no query sees more than `count` keys, so each chooses all that it sees
            return mark_exact(torch.arange(count, dtype=torch.int32).expand(batch, queries, count))
        lowered = q.to(k.dtype)
        # The indexer widened q to float32 for its sums. Where that was exact, q is narrowed again.
        q, k = (lowered, k) if k.dtype in _DTYPES and torch.equal(lowered.float(), q) else (q, k.float())
        parts = []
        for call in rules.calls():
            longest = max(call.kv_lens)
            chosen = select_tokens(
                q[call.entries], k[call.entries, call.start : call.start + longest], weights[call.entries], count, scale=scale,
                causal=rules.causal, q_lens=call.q_lens, kv_lens=call.kv_lens, ascending=True, num_threads=self.num_threads,
            )  # fmt: skip
            parts.append(chosen if call.start == 0 else torch.where(chosen < 0, chosen, chosen + call.start))
        return mark_exact(parts[0] if len(parts) == 1 else torch.cat(parts))


class _Given:
    """Stands for a cache that has taken the keys of an indexer already."""

    def __init__(self, keys: Any) -> None:
        self._keys = keys

    def update_indexer(self, keys: Any, *arguments: Any, **options: Any) -> Any:
        return self._keys


def why_not(hidden: Any, mask: Any) -> str | None:
    """Why an indexer is left to the model's code; None where its mask has rules, and these are the causal rule and padding at most."""
    reason = why_not_states(hidden)
    if reason is not None:
        return reason
    if not isinstance(mask, RuleMask):
        return "a mask that was made as a matrix"
    if mask.rules is None:
        return mask.reason
    if mask.rules.window is not None or mask.rules.ranges is not None or mask.rules.sequences is not None:
        return "a mask with a window, ranges or packed sequences"
    return None


def _choose_tokens(own: Any, indexer: Any, *arguments: Any, **options: Any) -> Any:
    """The forward call of an indexer."""
    bound = inspect.signature(type(indexer).forward).bind(indexer, *arguments, **options)
    given = bound.arguments
    given.pop("self")
    mask, cache = given["attention_mask"], given.get("cache")
    reason, call = why_not(given["hidden_states"], mask), None
    if reason is None:
        call = _Selection(mask, cache, config_of(indexer).num_threads)
        try:
            found = own(**given | {"attention_mask": call.hidden, "cache": call})
            if found is call.chosen:
                return found
            reason = "tokens that its indexer changes once they are chosen"
        except UnsuitedError as error:
            reason = str(error)
        except (TypeError, ValueError) as error:
            # Either a stand-in lacks an operation, or the model's own code has an error: then that code raises it again below.
            reason = f"a step of its indexer that is not known here ({type(error).__name__})"
    leave(indexer, reason)
    if call is not None and call.keys is not None:
        given["cache"] = _Given(call.keys)
    return own(**given)


# ---- Latents ---------------------------------------------------------------------------------------------------------


def _projection(attention: Any) -> tuple[Any, Any] | None:
    """The two parts, (H, D, C), of the projection that expands latents; None where the projection is no plain product."""
    weight = plain_weight(attention.kv_b_proj)
    return None if weight is None else weight.unflatten(0, (attention.num_heads, -1)).split(
        [attention.qk_nope_head_dim, attention.v_head_dim], dim=1
    )  # fmt: skip


def why_not_folded(attention: Any) -> str | None:
    """Why the parts from `_projection` cannot replace the module's own method of expanding latents; None where they can. Both expand random
    latents, and must agree."""
    try:
        parts = _projection(attention)
        if parts is None:
            return "a projection that is no plain linear layer"
        like, latent, rope = parts[0], parts[0].shape[2], attention.qk_rope_head_dim
        if like.device.type != "cpu":
            return f"weights on {like.device}"
        draw = torch.Generator().manual_seed(0)
        with torch.no_grad():
            kv_nope, k_rot = (torch.randn(1, 1, 3, n, generator=draw).to(like.dtype) for n in (latent, rope))
            key, value = attention.expand_kv(kv_nope, k_rot)
            nope, own_value = (torch.einsum("btc,hdc->bhtd", kv_nope[:, 0].double(), x.double()) for x in parts)
        expected = (torch.cat([nope, k_rot.double().expand(-1, len(like), -1, -1)], dim=-1), own_value)
        tolerance = max(4 * torch.finfo(like.dtype).eps, 1e-4)
        pairs = zip((key, value), expected, strict=True)
        if all(a.shape == b.shape and (a - b).abs().max() <= tolerance * max(1.0, b.abs().max()) for a, b in pairs):
            return None
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:
        return f"an expansion of its latents that is not known here ({type(error).__name__})"
    return "an expansion of its latents that is not known here"


def keep_latents(own: Any, attention: Any, *latents: Any, **options: Any) -> Any:
    """Replaces the method that expands latents: returns the latents as they are, and attention expands them where necessary. With
    gradients, or with arguments that are not known here, the module's own method runs."""
    parts = _projection(attention)
    if parts is None or options or len(latents) != 2:
        return own(*latents, **options)
    if torch.is_grad_enabled() and any(x.requires_grad for x in (*latents, *parts)):
        return own(*latents)
    kv_nope, k_rot = latents
    return Latents(own, kv_nope, k_rot, *parts).as_key(), kv_nope


# ---- The table -------------------------------------------------------------------------------------------------------


def _adapters(attention: Any) -> dict[str, Any]:
    reason = why_not_folded(attention)
    if reason is not None:
        raise UnsuitedError(reason)
    methods: dict[str, Any] = {"expand_kv": keep_latents}
    if getattr(attention, "indexer", None) is not None:
        names = inspect.signature(type(attention.indexer).forward).parameters
        missing = [name for name in ("hidden_states", "attention_mask", "cache") if name not in names]
        if missing:
            raise UnsuitedError(f"an indexer that takes no {missing[0]}")
        methods["indexer.forward"] = _choose_tokens
    return methods


ADAPTERS: Table = {
    ("modeling_axk2", "AXK2Attention"): _adapters,
    ("modeling_deepseek_v32", "DeepseekV32Attention"): _adapters,
    ("modeling_dots3_note", "Dots3NoteTextAttention"): _adapters,
    ("modeling_glm_moe_dsa", "GlmMoeDsaAttention"): _adapters,
    ("modeling_hy_v4", "HYV4Attention"): _adapters,
    ("modeling_hy_v4_vl", "HYV4VLAttention"): _adapters,
    ("modeling_mistral_large4", "MistralLarge4TextAttention"): _adapters,
}
