"""The operators of attention over sequences: attention over listed blocks, its gradients, and attention over chosen blocks."""

from __future__ import annotations

import json
from typing import Any

from ..._float_mode import in_usual_mode
from ..._operations import Argument
from ..._select.choosers import chooser_of
from ..._select.prefill import select_and_attend_prefill
from ...block_sparse import block_sparse_attention, block_sparse_attention_backward
from .arguments import CHOICE, taken, takes
from .masks import read_mask
from .operators import TENSORS, attend_shapes, define, named, no_second, refuse, without
from .tensors import lowered, torch

_ATTENTION = "block_sparse_attention"
_GRADIENT = "block_sparse_attention_backward"
_CHOOSING = "select_and_attend_prefill"
_LISTS = "q_lens kv_lens cu_seqlens_q cu_seqlens_kv kv_ranges attn_mask alibi_slopes"
_GIVEN = {"out": Argument("out", "floats")} | {
    name: x for name, x in taken(block_sparse_attention_backward).items() if name != "accumulate"
}
_LEARNED = [name for name, x in _GIVEN.items() if x.differentiable]  # the gradient of sinks has a formula here

# ---- On CPU tensors -----------------------------------------------------------------------------------------------


def _read(told: dict[str, Any]) -> None:
    """Replaces the mask of a call by cheaper rules that do the same, if there are any. The call is in layout BNSD or BSND, and has no
    other mask and no `kv_ranges`. The operator does so when it runs, because a graph does not know the elements of a mask."""
    q, mask, axis = told["q"], told.pop("attn_mask"), 1 if told.get("layout") == "BSND" else 2
    told |= read_mask(mask, q.shape[axis], told["k"].shape[axis], q.dtype, lists=told.get("sabi") is None)


def _attend(told: dict[str, Any], return_lse: bool) -> Any:
    if told.pop("reads_mask", False):
        _read(told)
    return block_sparse_attention(**told, return_lse=return_lse)


def _attend_backward(told: dict[str, Any], return_lse: bool) -> Any:
    if told.pop("reads_mask", False) and not told.get("bias_grads"):  # the rules that replace a mask have no gradient
        _read(told)
    grads = block_sparse_attention_backward(**told)
    grads += (None,) * (len(_LEARNED) - len(grads))
    return tuple(told["q"].new_empty(0) if x is None else x for x in grads)  # an operator returns tensors only


def _select_and_attend(told: dict[str, Any], return_lse: bool) -> Any:
    chooser = told.get("chooser", "pooled")
    if chooser.startswith("{"):
        told["chooser"] = chooser_of(json.loads(chooser))
    return select_and_attend_prefill(**told, return_lse=return_lse)


# ---- Shapes, and dtypes under torch.autocast ------------------------------------------------------------------------


def _attend_backward_shapes(told: dict[str, Any]) -> Any:
    grads = []
    for name in _LEARNED:
        x, role = told.get(name), _GIVEN[name].role
        if x is None or x.dtype == torch.bool or (role != "floats" and not told.get("bias_grads")):
            grads.append(told["q"].new_empty(0))
        else:
            grads.append(x.new_empty(x.shape, dtype=torch.float32 if role == "heads" else x.dtype))
    return tuple(grads)


def _cast_attention(told: dict[str, Any], dtype: Any) -> None:
    """Casts what torch casts for its own attention: queries, keys, values, and a mask of numbers. Sinks and slopes are read as float32."""
    for name in ("q", "k", "v", "attn_mask"):
        told[name] = lowered(told.get(name), dtype)


# ---- Gradients ----------------------------------------------------------------------------------------------------


def _keep(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Any) -> None:
    ctx.save_for_backward(*inputs, *output)
    ctx.options = keyword_only_inputs
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, dout: Any, dlse: Any) -> Any:
    *inputs, out, lse = ctx.saved_tensors  # read once: under torch.utils.checkpoint, each reading computes them again
    given = named(_ATTENTION, tuple(inputs), {})
    needed = [name for name, needs in zip(given, ctx.needs_input_grad, strict=False) if needs]  # of the arguments that are given
    dout = torch.zeros_like(out) if dout is None else dout
    grads: dict[str, Any] = {}
    if any(name in _LEARNED for name in needed):
        biases = any(name in _LEARNED and _GIVEN[name].role != "floats" for name in needed)
        told = given | {"dout": dout, "out": out, "lse": lse, "dlse": dlse}
        tensors = (told.get(name) for name in TENSORS[_GRADIENT])
        made = getattr(torch.ops.blitz_attn, _GRADIENT)(*tensors, **ctx.options, bias_grads=biases)
        grads = {name: x.to(given[name].dtype) for name, x in zip(_LEARNED, made, strict=True) if name in needed}
    if "sinks" in needed:
        grads["sinks"] = _gradient_of_sinks(given["sinks"], dout, out, lse, dlse, ctx.options["layout"])
    return tuple(grads.get(name) for name in given)


@in_usual_mode
def _gradient_of_sinks(sinks: Any, dout: Any, out: Any, lse: Any, dlse: Any, layout: str) -> Any:
    """The share of a sink in the softmax of a query is exp(sink - lse). As a sink grows, the log-sum-exp grows by that share, and the
    output, to which a sink adds no value, shrinks by that share of itself."""
    products = dout.to(lse.dtype) * out
    products = products.unflatten(-1, (lse.shape[1], -1)) if layout == "BSH" else products
    change = -products.sum(-1).movedim(2 if layout in ("BSND", "BSH") else 1, 0)  # heads first, as below
    change = change if dlse is None else change + dlse.movedim(1, 0)
    lse = lse.movedim(1, 0).flatten(1)
    empty = lse == -torch.inf  # invalid queries, which see no sink: their part of the loss adds nothing here, even if it is NaN
    share = torch.exp(sinks.float().to(lse.dtype)[:, None] - lse.masked_fill(empty, torch.inf))
    return (share * change.flatten(1).masked_fill(empty, 0)).sum(1).to(sinks.dtype)


# ---- Definitions --------------------------------------------------------------------------------------------------

_MORE = "bool reads_mask=False, int? q_begin=None"
define(
    _ATTENTION, taken(block_sparse_attention), f"q k v sabi {_LISTS} sinks", _attend, attend_shapes, _gradients, keep=_keep,
    cast=_cast_attention, more=_MORE,
)  # fmt: skip
define(
    _GRADIENT, _GIVEN, f"dout q k v out lse dlse sabi {_LISTS}", _attend_backward, _attend_backward_shapes, refuse(no_second(_ATTENTION)),
    more=f"{_MORE}, bool bias_grads=False", results=len(_LEARNED),
)  # fmt: skip
define(
    _CHOOSING, CHOICE, f"q k v {_LISTS} sinks", _select_and_attend, attend_shapes,
    without(_CHOOSING, "; block_sparse_attention has one, with the lists of select_blocks_prefill"), cast=_cast_attention,
)  # fmt: skip
takes(block_sparse_attention)
takes(select_and_attend_prefill, CHOICE, block_shape=list(taken(select_and_attend_prefill)["block_shape"].default))
