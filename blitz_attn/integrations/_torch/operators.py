"""The library's operations as operators of torch, `torch.ops.blitz_attn`, for torch.compile, export and autograd.

Each operator has a schema, an implementation on CPU tensors, which calls a function of the library, and a fake implementation, which makes
results of the right shapes. Operators that torch differentiates have a formula; the others raise an error in `backward`. The files of the
functions for torch define the operators.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from ..._operations import READ_IN_PLACE, REQUIRED, Argument, result_shapes
from .tensors import autocast_dtype, flag_of, lowered, rows, transforms_active

try:
    import torch
except ModuleNotFoundError:  # without torch, the module can be imported, but registers nothing
    torch = None

# ---- Schemas ------------------------------------------------------------------------------------------------------

_TYPES = {
    "pair": "int[]", "integer": "int", "tokens_before": "int", "threads": "int", "number": "float", "scale": "float", "flag": "bool",
    "layout": "str", "kv_layout": "str", "chooser": "str", "kv_format": "str", "budget": "float[]", "counts": "int[]",
}  # fmt: skip


def _declared(argument: Argument) -> str:
    """An argument in a schema."""
    kind = "Tensor" if argument.is_array else _TYPES[argument.role]
    if argument.default is REQUIRED:
        return f"{kind} {argument.name}"
    default = json.dumps(argument.default) if isinstance(argument.default, (str, tuple)) else argument.default
    optional = "?" if argument.default is None or kind in ("int", "float") else ""
    return f"{kind}{optional} {argument.name}={default}"


def _schema(tensors: dict[str, Argument], options: list[Argument], more: str, results: int) -> str:
    declared = [*map(_declared, tensors.values()), "*", *map(_declared, options), *([more] if more else [])]
    return f"({', '.join(declared)}) -> ({', '.join(['Tensor'] * results)})"


# ---- What an operator does ----------------------------------------------------------------------------------------

Told = dict[str, Any]  # the arguments of an operator, by name
TENSORS: dict[str, dict[str, Argument]] = {}  # [operator]: its tensors, before the `*` of its schema, where torch finds them for gradients
_ON_CPU: dict[str, Callable[..., Any]] = {}


def named(name: str, given: tuple[Any, ...], options: Told) -> Told:
    """All arguments that an operator is given, by name. The dispatcher leaves out the last tensors if they are None."""
    return dict(zip(TENSORS[name], given, strict=False)) | options


def _on_cpu(name: str, work: Callable[[Told, bool], Any]) -> Callable[..., Any]:
    """The implementation of an operator: `work` on its tensors. A tensor is copied if its last axis must be contiguous and is not."""
    floats = [tensor for tensor, x in TENSORS[name].items() if x.role in READ_IN_PLACE]

    def run(*given: Any, return_lse: bool = True, **options: Any) -> Any:
        told = named(name, given, options)
        for tensor in floats:
            if told.get(tensor) is not None:
                told[tensor] = rows(told[tensor])
        return work(told, return_lse)

    return run


def attend_shapes(told: Told) -> Any:
    """The fake output and log-sum-exp of an operator, for all kinds of attention."""
    q, (out, lse) = told["q"], result_shapes(told)
    return q.new_empty(out), q.new_empty(lse, dtype=torch.float64 if q.dtype == torch.float64 else torch.float32)


def _under_autocast(name: str, cast: Callable[[Told, Any], None]) -> Callable[..., Any]:
    """The operator under autocast: casts the tensors by operations that torch differentiates, calls the operator, and casts the result."""
    this_key = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)

    def run(*given: Any, **options: Any) -> Any:
        dtype, told = autocast_dtype(), named(name, given, options)
        with torch._C._ExcludeDispatchKeyGuard(this_key):
            cast(told, dtype)
            out, lse = getattr(torch.ops.blitz_attn, name).default(**told)
            return lowered(out, dtype), lse

    return run


# ---- Gradients that are refused ------------------------------------------------------------------------------------


def no_second(name: str) -> str:
    """The sentence that refuses to differentiate a gradient."""
    return f"{name}: expected to be differentiated once, got a request for the gradient of its gradient, which it does not have"


def refuse(sentence: str) -> Callable[..., Any]:
    def gradient(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError(sentence)

    return gradient


def without(name: str, instead: str = "") -> Callable[..., Any]:
    return refuse(f"{name}: expected a call under torch.no_grad(), got a request for its gradient, which it does not have{instead}")


def _nothing(ctx: Any, inputs: Any, output: Any, keyword_only_inputs: Any = None) -> None:
    """No input is kept for a gradient that is refused."""


# ---- Defining -----------------------------------------------------------------------------------------------------

_library = None if torch is None else torch.library.Library("blitz_attn", "FRAGMENT")  # the operators exist as long as this object does


def define(
    name: str, arguments: dict[str, Argument], order: str, work: Callable[[Told, bool], Any], shapes: Callable[[Told], Any],
    gradient: Callable[..., Any], *, keep: Callable[..., Any] = _nothing, cast: Callable[[Told, Any], None] | None = None, more: str = "",
    results: int = 2,
) -> None:  # fmt: skip
    """Defines an operator, which calls `work` with its arguments and with whether the second result is wanted.

    `order` names the tensors whose positions already exported graphs depend on; newer tensors follow. `shapes` makes the fake results,
    `gradient` computes the gradients or refuses to, `keep` saves the tensors that `gradient` needs, and `cast` casts tensors under
    autocast. `more`: options that only the operator has.
    """
    TENSORS[name] = {tensor: arguments[tensor] for tensor in order.split()} | {tensor: x for tensor, x in arguments.items() if x.is_array}
    _ON_CPU[name] = _on_cpu(name, work)
    if _library is None:
        return
    options = [x for x in arguments.values() if not x.is_array]
    _library.define(name + _schema(TENSORS[name], options, more, results), tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, _ON_CPU[name], "CPU")
    torch.library.register_fake(
        f"blitz_attn::{name}", lambda *given, **options: shapes(named(name, given, options)), lib=_library
    )
    torch.library.register_autograd(f"blitz_attn::{name}", gradient, setup_context=keep, lib=_library)
    if cast is not None:
        _library.impl(name, _under_autocast(name, cast), "AutocastCPU")


# ---- Calls --------------------------------------------------------------------------------------------------------

_CLASSES = frozenset() if torch is None else frozenset((torch.Tensor, torch.nn.Parameter, type(None), bool, int, float, str, list))


def _needs_dispatch(*given: Any, **options: Any) -> bool:
    """Whether torch would do more for a call than pass it on to the CPU: torch follows a tensor for a gradient, a tensor is of a derived
    class, autocast is on, a mode, a transform of torch.func or torch's profiler watches operators, or a graph is made of them."""
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
    """Calls the operator of that name. With `return_lse`, the second result is returned, too. Where torch would only pass the call on to
    the CPU implementation, that is called directly, since the way through torch takes longer than a small call."""
    return_lse = flag_of(return_lse, "return_lse")
    if _needs_dispatch(*given, **options):
        out, lse = getattr(torch.ops.blitz_attn, name)(*given, **options)
        return (out, lse) if return_lse else out
    return _ON_CPU[name](*given, return_lse=return_lse, **options)
