"""Arguments as torch's operators take them: tensors in CPU memory, and options of exact Python types.

A value of the right type is returned as it is, by code that `torch.compile` can trace; any other value goes through the library's own
readers, which raise its sentences.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..._arrays import array, choice, flag, float32_numbers, host, integer, integers, number, readable, refuse_tangent
from ..._sabi.lists import some_integers
from ..._select.choosers import BUDGETS, budget_of

try:
    import torch
except ModuleNotFoundError:  # without torch, the module can be imported and documented, but its functions cannot be called
    torch = None

MOST = 2**63
_LISTS = ("uint16", "int16", "int32", "int64")
_RANGES = ("int32", "int64")
_MASKS = ("bool", "float32", "float16", "bfloat16", "float64")


def rows(x: Any) -> Any:
    """The tensor without its autograd history and with a contiguous last axis, as the core needs it."""
    x = x.detach() if x.requires_grad else x
    return x if x.dim() == 0 or x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()


def expect_tensors(**arguments: Any) -> None:
    """Refuses what is not a dense tensor in CPU memory, and tensors that forward-mode differentiation or torch.func's gradients follow."""
    import torch  # raises an error that names torch where it is not installed

    for name, x in arguments.items():
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name}: expected a torch tensor, got {type(x).__name__}")
        if x.layout != torch.strided or not x.is_cpu or x.is_quantized or x.is_nested:
            kind = "quantized" if x.is_quantized else "nested" if x.is_nested else x.layout
            raise TypeError(f"{name}: expected a dense tensor in CPU memory, got one of layout {kind} on {x.device}")
        refuse_tangent(x, name)
        _refuse_transform(x, name)


def autocast_dtype() -> Any:
    """The dtype that torch.autocast casts CPU tensors to; None where it is off."""
    return torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None


def lowered(x: Any, dtype: Any) -> Any:
    """The tensor as torch.autocast casts it: tensors of bool, of integers and of float64 stay. Elements that repeat along an axis of
    stride 0 are cast once, unless the tensor needs a gradient, which differs between these elements."""
    if x is None or x.dtype == dtype or not x.is_cpu or x.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return x
    if 0 not in x.stride() or (x.requires_grad and torch.is_grad_enabled()):
        return x.to(dtype)
    return x[tuple(slice(1) if step == 0 else slice(None) for step in x.stride())].to(dtype).expand(x.shape)


def transforms_active() -> bool:
    """Whether the call is within a transform of torch.func. Transforms in a graph of torch.compile do not count."""
    return not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()


def _refuse_transform(x: Any, name: str) -> None:
    """Refuses a tensor that torch.func differentiates, because torch.func does not take gradients as they are registered here. torch's own
    error about this is long. vmap alone is not refused."""
    if not transforms_active() or not torch.is_grad_enabled():
        return
    while torch._C._functorch.is_functorch_wrapped_tensor(x):
        if x.requires_grad:
            raise ValueError(
                f"{name}: expected a tensor that torch.func does not differentiate, got one of grad, vjp or jacrev: use "
                "torch.autograd.grad or backward"
            )
        x = torch._C._functorch.get_unwrapped(x)


def flag_of(x: Any, name: str) -> bool:
    """Whether `x` is true."""
    return x if x is True or x is False else flag(x, name)


def integer_of(x: Any, name: str) -> int | None:
    """The integer that `x` is; None stays None."""
    return x if x is None or (type(x) is int and -MOST <= x < MOST) else integer(x, name)


def number_of(x: Any, name: str) -> float | None:
    """The number that `x` is; None stays None."""
    if type(x) is int and -MOST <= x < MOST:
        return float(x)
    return x if x is None or type(x) is float else number(x, name)


def text_of(x: Any, name: str, choices: tuple[str, ...]) -> str:
    """`x`, which is one of the strings `choices`."""
    return x if type(x) is str and x in choices else str(choice(x, name, choices))


def pair_of(x: Any, name: str) -> list[int] | None:
    """The two integers of `x`; None stays None."""
    if x is None:
        return None
    if type(x) in (tuple, list) and len(x) == 2 and type(x[0]) is type(x[1]) is int and -MOST <= min(x) <= max(x) < MOST:
        return list(x)
    return list(some_integers(x, name, "a pair of integers", 2))


def numbers_list_of(x: Any, name: str, integers_only: bool = False) -> list[Any] | None:
    """The numbers of a sequence, or the one number that `x` is, as a list; None stays None."""
    kinds = (int,) if integers_only else (int, float)
    if x is None or (type(x) in kinds and -MOST <= x < MOST):
        return None if x is None else [x]
    if type(x) in (tuple, list) and all(type(n) in kinds and -MOST <= n < MOST for n in x):
        return list(x)
    numbers = budget_of(**{**dict.fromkeys(BUDGETS), name: x})[1].tolist()
    return [min(int(n), MOST - 1) for n in numbers] if integers_only else numbers


def integers_of(x: Any, name: str) -> Any:
    """A tensor of the integers of a sequence, an array or a tensor; None stays None."""
    if x is None or isinstance(x, torch.Tensor):
        return _of_integers(x, name)
    if torch.compiler.is_compiling() and isinstance(x, (tuple, list)):
        return torch.tensor(x, dtype=torch.int64)
    return _copied(integers(x, name))


def lists_of(x: Any, name: str, kinds: tuple[str, ...] = _LISTS) -> Any:
    """A tensor of a block list, or of other integers. Arrays must have one of the dtypes `kinds`. None stays None."""
    if x is None or isinstance(x, torch.Tensor):
        return _of_integers(x, name)
    if torch.compiler.is_compiling():
        return torch.as_tensor(x).clone()
    given = array(readable(x, name), name, "an array")
    if str(given.dtype) not in kinds:
        raise TypeError(f"{name}: expected {', '.join(kinds[:-1])} or {kinds[-1]}, got {given.dtype}")
    return _copied(given)


def ranges_of(x: Any, name: str) -> Any:
    """A tensor of runs of keys, or of other integers (arrays: int32 or int64); None stays None."""
    return lists_of(x, name, _RANGES)


def tensor_of(x: Any, name: str) -> Any:
    """`x`, which is a tensor; None stays None."""
    if x is not None:
        expect_tensors(**{name: x})
    return x


def numbers_of(x: Any, name: str) -> Any:
    """A tensor of numbers: `x` if it is a tensor, else a float32 copy of a sequence or an array; None stays None."""
    if x is None or isinstance(x, torch.Tensor):
        return tensor_of(x, name)
    if torch.compiler.is_compiling() and isinstance(x, (tuple, list)):
        return torch.tensor(x, dtype=torch.float32)
    return _copied(float32_numbers(x, name))


def mask_of(x: Any, name: str) -> Any:
    """A tensor of bool, or of numbers that are added to scores; axes of stride 0 of an array get length 1. None stays None."""
    if x is None or isinstance(x, torch.Tensor):
        return tensor_of(x, name)
    if torch.compiler.is_compiling():
        return torch.as_tensor(x).clone()
    given, dtype = host(x, name)
    if dtype not in _MASKS:
        raise TypeError(f"{name}: expected bool, float32, float16, bfloat16 or float64, got {dtype}")
    made = _copied(given[tuple(slice(1) if step == 0 else slice(None) for step in given.strides)])
    return made.view(torch.bfloat16) if dtype == "bfloat16" else made


def _of_integers(x: Any, name: str) -> Any:
    if x is not None:
        expect_tensors(**{name: x})
        if x.is_floating_point() or x.is_complex() or x.dtype == torch.bool:
            raise TypeError(f"{name}: expected integers, got {x.dtype}")
        if not torch.compiler.is_compiling() and x.is_neg():  # a view with the opposite sign of its memory
            x = x.resolve_neg()
    return x


def _copied(given: Any) -> Any:
    """A tensor with the numbers of an array, or of a NumPy scalar. It is a copy, because backward reads it later, and torch would not
    notice a change of the array before then."""
    return torch.from_numpy(np.array(given, order="C"))
