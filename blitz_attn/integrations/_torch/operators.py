"""The library's operations as operators of torch, `torch.ops.blitz_attn`: what torch.compile, export and autograd know of them.

Each operator has a schema, an implementation on CPU tensors, which calls the library's function of that name, and a fake one, which says
what shapes come out. Operators that torch differentiates have a formula; the others say in `backward` that they have none.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

from ..._float_mode import in_usual_mode
from ..._operations import FLOATS, OPERATIONS, REQUIRED, Argument, result_shapes
from ..._select.choosers import chooser_of
from ..._select.prefill import select_and_attend_prefill
from ...block_sparse import block_sparse_attention, block_sparse_attention_backward
from ...paged import paged_attention, paged_select_attention
from .arguments import CHOICE, taken
from .masks import read_mask
from .tensors import autocast_dtype, flag_of, lowered, rows, transforms_active

try:
    import torch
except ModuleNotFoundError:  # the module can be imported then; nothing is registered
    torch = None

# ---- Arguments ----------------------------------------------------------------------------------------------------


class Operator(NamedTuple):
    """The arguments of an operator and its schema."""

    tensors: dict[str, Argument]  # in order; they come first: torch differentiates no operator that takes some by keyword only
    schema: str

    def named(self, given: tuple[Any, ...], options: dict[str, Any]) -> dict[str, Any]:
        """All that is given, by name: the dispatcher leaves out the last tensors where they are None."""
        return dict(zip(self.tensors, given, strict=False)) | options


_TYPES = {
    "pair": "int[]", "integer": "int", "tokens_before": "int", "threads": "int", "number": "float", "scale": "float", "flag": "bool",
    "layout": "str", "kv_layout": "str", "chooser": "str", "budget": "float[]", "counts": "int[]",
}  # fmt: skip


def _declared(argument: Argument) -> str:
    """An argument in a schema."""
    kind = "Tensor" if argument.is_array else _TYPES[argument.role]
    if argument.default is REQUIRED:
        return f"{kind} {argument.name}"
    default = json.dumps(argument.default) if isinstance(argument.default, (str, tuple)) else argument.default
    optional = "?" if argument.default is None or kind in ("int", "float") else ""
    return f"{kind}{optional} {argument.name}={default}"


def _operator(arguments: dict[str, Argument], order: str, more: str = "", results: int = 2) -> Operator:
    """An operator that takes these arguments. `order` names the tensors that graphs which were exported know by their places; newer ones
    follow. `more`: options that only the operator has."""
    tensors = {name: arguments[name] for name in order.split()} | {name: x for name, x in arguments.items() if x.is_array}
    options = (x for x in arguments.values() if not x.is_array)
    declared = [*map(_declared, tensors.values()), "*", *map(_declared, options), *([more] if more else [])]
    return Operator(tensors, f"({', '.join(declared)}) -> ({', '.join(['Tensor'] * results)})")


_ATTENTION = "block_sparse_attention"
_GRADIENT = "block_sparse_attention_backward"
_LISTS = "q_lens kv_lens cu_seqlens_q cu_seqlens_kv kv_ranges attn_mask alibi_slopes"
_GIVEN = {"out": Argument("out", "floats")} | {
    name: x for name, x in taken(block_sparse_attention_backward).items() if name != "accumulate"
}
_LEARNED = [name for name, x in _GIVEN.items() if x.differentiable]  # that of sinks has a formula here
_PAGED = taken(paged_attention)
_TABLES = {x.name: x for x in OPERATIONS["paged_attention"] if x.name in ("indptr", "last_page_len", "selected", "counts")}
OPERATORS = {
    _ATTENTION: _operator(
        taken(block_sparse_attention), f"q k v sabi {_LISTS} sinks", "bool reads_mask=False, int? q_begin=None"
    ),
    _GRADIENT: _operator(
        _GIVEN, f"dout q k v out lse dlse sabi {_LISTS}", "bool reads_mask=False, int? q_begin=None, bool bias_grads=False", len(_LEARNED)
    ),
    "select_and_attend_prefill": _operator(CHOICE, f"q k v {_LISTS} sinks"),
    "paged_attention": _operator(
        _PAGED | {name: x._replace(default=None) for name, x in _TABLES.items()},
        "q k_cache v_cache block_tables seq_lens indptr last_page_len selected counts sinks k_scale v_scale q_lens kv_ranges attn_mask "
        "alibi_slopes",
    ),
}  # fmt: skip

# ---- On CPU tensors -----------------------------------------------------------------------------------------------


def _read(told: dict[str, Any]) -> None:
    """Replaces a mask by what it can be read as: the only rule that is not about lengths and the diagonal, in layout BNSD. That is done
    here since a graph holds no elements."""
    q, mask = told["q"], told.pop("attn_mask")
    told |= read_mask(mask, q.shape[2], told["k"].shape[2], q.dtype, lists=told.get("sabi") is None)


def _attend(told: dict[str, Any], return_lse: bool) -> Any:
    if told.pop("reads_mask", False):
        _read(told)
    return block_sparse_attention(**told, return_lse=return_lse)


def _attend_backward(told: dict[str, Any], return_lse: bool) -> Any:
    if told.pop("reads_mask", False) and not told.get("bias_grads"):  # what a mask is read as has no gradient
        _read(told)
    grads = block_sparse_attention_backward(**told)
    grads += (None,) * (len(_LEARNED) - len(grads))
    return tuple(told["q"].new_empty(0) if x is None else x for x in grads)  # an operator returns tensors only


def _select_and_attend(told: dict[str, Any], return_lse: bool) -> Any:
    chooser = told.get("chooser", "pooled")
    if chooser.startswith("{"):
        told["chooser"] = chooser_of(json.loads(chooser))
    return select_and_attend_prefill(**told, return_lse=return_lse)


def _paged(told: dict[str, Any], return_lse: bool) -> Any:
    indptr, last_page_len, selected = (told.pop(name, None) for name in ("indptr", "last_page_len", "selected"))
    if indptr is not None:
        told["block_tables"] = indptr, told["block_tables"], last_page_len
    if selected is None:
        told.pop("counts", None)
        return paged_attention(**told, return_lse=return_lse)
    told.setdefault("seq_lens", None)
    return paged_select_attention(**told, selected=selected, return_lse=return_lse)


_WORK: dict[str, Callable[[dict[str, Any], bool], Any]] = {
    _ATTENTION: _attend,
    _GRADIENT: _attend_backward,
    "select_and_attend_prefill": _select_and_attend,
    "paged_attention": _paged,
}


def _on_cpu(operator: Operator, work: Callable[[dict[str, Any], bool], Any]) -> Callable[..., Any]:
    """The implementation of an operator: the work on its tensors, in rows where the core reads rows."""
    floats = [name for name, x in operator.tensors.items() if x.role in FLOATS]

    def run(*given: Any, return_lse: bool = True, **options: Any) -> Any:
        told = operator.named(given, options)
        for name in floats:
            if told.get(name) is not None:
                told[name] = rows(told[name])
        return work(told, return_lse)

    return run


_ON_CPU = {name: _on_cpu(OPERATORS[name], work) for name, work in _WORK.items()}

# ---- Shapes -------------------------------------------------------------------------------------------------------


def _attend_shapes(told: dict[str, Any]) -> Any:
    q, (out, lse) = told["q"], result_shapes(told)
    return q.new_empty(out), q.new_empty(lse, dtype=torch.float64 if q.dtype == torch.float64 else torch.float32)


def _attend_backward_shapes(told: dict[str, Any]) -> Any:
    grads = []
    for name in _LEARNED:
        x, role = told.get(name), _GIVEN[name].role
        if x is None or x.dtype == torch.bool or (role != "floats" and not told.get("bias_grads")):
            grads.append(told["q"].new_empty(0))
        else:
            grads.append(x.new_empty(x.shape, dtype=torch.float32 if role == "heads" else x.dtype))
    return tuple(grads)


# ---- Under torch.autocast -----------------------------------------------------------------------------------------


def _cast_attention(told: dict[str, Any], dtype: Any) -> None:
    """As torch casts for its own attention: queries, keys, values, and a mask of numbers. Sinks and slopes are read as float32."""
    for name in ("q", "k", "v", "attn_mask"):
        told[name] = lowered(told.get(name), dtype)


def _cast_queries(told: dict[str, Any], dtype: Any) -> None:
    """Queries for a cache, which no call casts: it is as long as all that was said before."""
    kept = told["k_cache"].dtype
    to = dtype if kept.itemsize == 1 else kept
    told["q"] = told["q"] if to == torch.float64 else lowered(told["q"], to)


def _under_autocast(name: str, cast: Callable[[dict[str, Any], Any], None]) -> Callable[..., Any]:
    """The operator where autocast is on: its tensors are cast, where torch can differentiate that, and so is its result."""
    this_key = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)

    def run(*given: Any, **options: Any) -> Any:
        dtype, told = autocast_dtype(), OPERATORS[name].named(given, options)
        with torch._C._ExcludeDispatchKeyGuard(this_key):
            cast(told, dtype)
            out, lse = getattr(torch.ops.blitz_attn, name).default(**told)
            return lowered(out, dtype), lse

    return run


# ---- Gradients ----------------------------------------------------------------------------------------------------


def _keep(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Any) -> None:
    ctx.save_for_backward(*inputs, *output)
    ctx.options = keyword_only_inputs
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, dout: Any, dlse: Any) -> Any:
    *inputs, out, lse = ctx.saved_tensors  # read once: under torch.utils.checkpoint, each reading computes them again
    given = OPERATORS[_ATTENTION].named(tuple(inputs), {})
    needed = [name for name, needs in zip(given, ctx.needs_input_grad, strict=False) if needs]  # it has no entries for arguments left out
    dout = torch.zeros_like(out) if dout is None else dout
    grads: dict[str, Any] = {}
    if any(name in _LEARNED for name in needed):
        biases = any(name in _LEARNED and _GIVEN[name].role != "floats" for name in needed)
        told = given | {"dout": dout, "out": out, "lse": lse, "dlse": dlse}
        tensors = (told.get(name) for name in OPERATORS[_GRADIENT].tensors)
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
    empty = lse == -torch.inf  # queries that are not valid, which see no sink: whatever the loss makes of them, NaN included, adds nothing
    share = torch.exp(sinks.float().to(lse.dtype)[:, None] - lse.masked_fill(empty, torch.inf))
    return (share * change.flatten(1).masked_fill(empty, 0)).sum(1).to(sinks.dtype)


def no_second(name: str) -> str:
    """What is said where a gradient is to be differentiated."""
    return f"{name}: expected to be differentiated once, got a request for the gradient of its gradient, which it does not have"


def _refuse(sentence: str) -> Callable[..., Any]:
    def gradient(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError(sentence)

    return gradient


def _without(name: str, instead: str) -> Callable[..., Any]:
    return _refuse(f"{name}: expected a call under torch.no_grad(), got a request for its gradient, which it does not have{instead}")


def _nothing(ctx: Any, inputs: Any, output: Any, keyword_only_inputs: Any = None) -> None:
    """No input is kept for a gradient that is refused."""


def _register() -> Any:
    library = torch.library.Library("blitz_attn", "FRAGMENT")
    lists = "; block_sparse_attention has one, with the lists of select_blocks_prefill"
    for name, shapes, keep, gradient, cast in (
        (_ATTENTION, _attend_shapes, _keep, _gradients, _cast_attention),
        (_GRADIENT, _attend_backward_shapes, _nothing, _refuse(no_second(_ATTENTION)), None),
        ("select_and_attend_prefill", _attend_shapes, _nothing, _without("select_and_attend_prefill", lists), _cast_attention),
        ("paged_attention", _attend_shapes, _nothing, _without("paged_attention", ""), _cast_queries),
    ):
        operator = OPERATORS[name]
        library.define(name + operator.schema, tags=(torch.Tag.pt2_compliant_tag,))
        library.impl(name, _ON_CPU[name], "CPU")
        torch.library.register_fake(f"blitz_attn::{name}", _fake(operator, shapes), lib=library)
        torch.library.register_autograd(f"blitz_attn::{name}", gradient, setup_context=keep, lib=library)
        if cast is not None:
            library.impl(name, _under_autocast(name, cast), "AutocastCPU")
    return library


def _fake(operator: Operator, shapes: Callable[[dict[str, Any]], Any]) -> Callable[..., Any]:
    return lambda *given, **options: shapes(operator.named(given, options))


library = None if torch is None else _register()  # the operators exist as long as this object does


# ---- Calls --------------------------------------------------------------------------------------------------------

_CLASSES = frozenset() if torch is None else frozenset((torch.Tensor, torch.nn.Parameter, type(None), bool, int, float, str, list))


def _needs_dispatch(*given: Any, **options: Any) -> bool:
    """Whether torch would do more for a call than pass it on to the CPU: whether it follows a tensor for a gradient, a tensor is of a class
    of its own, autocast is on, a mode or torch's profiler watches operators, or a graph is made of them."""
    return (
        torch.compiler.is_compiling()
        or (torch.is_grad_enabled() and torch._C._any_requires_grad(*given, **options))
        or torch.is_autocast_enabled("cpu")
        or not _CLASSES.issuperset(map(type, (*given, *options.values())))
        or torch._C._len_torch_function_stack() > 0
        or torch._C._len_torch_dispatch_stack() > 0
        or transforms_active()
        or torch.jit.is_tracing()
        or torch.autograd._profiler_enabled()
    )


def call(name: str, *given: Any, return_lse: Any, **options: Any) -> Any:
    """What the operator of that name returns, with `return_lse` the log-sum-exp, too. Where torch would only pass the call on to the CPU,
    this does, since the way through torch takes longer than a small call."""
    return_lse = flag_of(return_lse, "return_lse")
    if _needs_dispatch(*given, **options):
        out, lse = getattr(torch.ops.blitz_attn, name)(*given, **options)
        return (out, lse) if return_lse else out
    return _ON_CPU[name](*given, return_lse=return_lse, **options)
