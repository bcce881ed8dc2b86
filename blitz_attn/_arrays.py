"""Arrays in and out: the one file that knows NumPy, ml_dtypes, torch and JAX by name.

The compiled core reads whatever exports the buffer protocol or DLPack. What neither protocol can say is said here:
ml_dtypes arrays go in as their bits with the name of their dtype, and results come back as the kind of array that came
in. No framework is imported: one that is not in ``sys.modules`` yet cannot have made the array at hand.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np


class Family(NamedTuple):
    """How results are made for one kind of input array."""

    empty: Callable[[tuple[int, ...], str], Any]  # (shape, dtype name) -> an array that the core can write
    finish: Callable[[Any], Any] | None  # turns such an array into what the caller gets; None: it is that already


# ---- Making results -----------------------------------------------------------------------------------------------


def _empty_bits(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    return np.empty(shape, "uint16" if dtype == "bfloat16" else dtype)


def _torch_empty(shape: tuple[int, ...], dtype: str) -> Any:
    torch = sys.modules["torch"]
    return torch.empty(shape, dtype=getattr(torch, dtype), device="cpu")


def _bits_to_ml_dtypes(array: np.ndarray) -> np.ndarray:
    return array.view(sys.modules["ml_dtypes"].bfloat16) if array.dtype == np.uint16 else array


def _bits_to_ml_dtypes_if_installed(array: np.ndarray) -> np.ndarray:
    if array.dtype == np.uint16:
        try:
            import ml_dtypes
        except ImportError:
            return array
        return array.view(ml_dtypes.bfloat16)
    return array


def _to_jax(array: np.ndarray) -> Any:
    return sys.modules["jax"].numpy.asarray(_bits_to_ml_dtypes(array))


NUMPY = Family(_empty_bits, None)  # bfloat16 came as uint16 bits and goes back as such
ML_DTYPES = Family(_empty_bits, _bits_to_ml_dtypes)
TORCH = Family(_torch_empty, None)
JAX = Family(_empty_bits, _to_jax)
FOREIGN = Family(_empty_bits, _bits_to_ml_dtypes_if_installed)  # some other exporter of DLPack


# ---- Recognising what came in -------------------------------------------------------------------------------------


def _is_ml_dtypes(x: np.ndarray) -> bool:
    return x.dtype.kind == "V" and x.dtype.name == "bfloat16"


def _is_torch(x: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor)


def _is_jax(x: Any) -> bool:
    jax = sys.modules.get("jax")
    return jax is not None and isinstance(x, jax.Array)


def family_of(x: Any) -> Family:
    """The family of the results of a call whose leading array is `x`."""
    if isinstance(x, np.ndarray):
        return ML_DTYPES if _is_ml_dtypes(x) else NUMPY
    if _is_torch(x):
        return TORCH
    if _is_jax(x):
        return JAX
    return FOREIGN if hasattr(x, "__dlpack__") else NUMPY


def readable(x: Any, name: str) -> Any:
    """What the core is given for the input array `x`: `x` itself, or ``(bits, "bfloat16")``."""
    if isinstance(x, np.ndarray):
        if isinstance(x, np.ma.MaskedArray):
            raise TypeError(f"{name}: expected an array without a mask, got MaskedArray")
        return (x.view(np.uint16), "bfloat16") if _is_ml_dtypes(x) else x
    if isinstance(x, (tuple, list)):
        raise TypeError(f"{name}: expected an array, got {type(x).__name__}")
    if _is_torch(x) and x.requires_grad:
        if sys.modules["torch"].is_grad_enabled():
            raise ValueError(
                f"{name}: expected a tensor that needs no gradient, got one with requires_grad=True, whose gradient would be lost: "
                f"pass {name}.detach() or call under torch.no_grad()"
            )
        return x.detach()
    return x


def writable(x: Any, name: str) -> Any:
    """The same for an array that will be written; None stays None."""
    if x is None:
        return None
    if _is_jax(x):
        raise TypeError(f"{name}: expected an array that can be written, got a JAX array, which cannot")
    return readable(x, name)


def finished(result: Any, given: Any, family: Family) -> Any:
    """What the caller gets for one output: the array that it gave, or the new one as its kind of array."""
    if given is not None:
        return given
    return result if family.finish is None else family.finish(result)


def dtype_name(dtype: Any) -> Any:
    """Plain name of a NumPy, ml_dtypes, torch or JAX dtype, such as ``"bfloat16"``; strings and None as they are."""
    if dtype is None or isinstance(dtype, str):
        return dtype
    name = getattr(dtype, "name", None) or getattr(dtype, "__name__", None) or str(dtype)
    return str(name).rpartition(".")[2]
