"""Arrays in and out: the one file that knows NumPy, ml_dtypes, torch and JAX by name.

The compiled core reads whatever exports the buffer protocol or DLPack. What neither protocol can say is said here:
ml_dtypes arrays go in as their bits with the name of their dtype, and results come back as the kind of array that came
in. No framework is imported: one that is not in ``sys.modules`` yet cannot have made the array at hand.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable
from functools import cache
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


# dtypes that neither protocol can name: the integers that hold their bits, and the core's name
_BITS = {"bfloat16": ("uint16", "bfloat16"), "float8_e4m3fn": ("uint8", "float8_e4m3")}


@cache
def _plain_name(dtype: np.dtype) -> str:
    """NumPy works a dtype's name out anew each time it is asked, in some microseconds."""
    return dtype.name


def _is_ml_dtypes(x: np.ndarray) -> bool:
    return x.dtype.kind == "V" and _plain_name(x.dtype) == "bfloat16"


def _bits_of(x: np.ndarray) -> tuple[np.ndarray, str] | None:
    """An ml_dtypes array as its bits, with the name of their dtype; None for an array that says all by itself."""
    entry = _BITS.get(_plain_name(x.dtype)) if x.dtype.kind == "V" else None
    return None if entry is None else (x.view(entry[0]), entry[1])


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
    """What the core is given for the input array `x`: `x` itself, or its bits with the name of their dtype."""
    if isinstance(x, np.ndarray):
        if isinstance(x, np.ma.MaskedArray):
            raise TypeError(f"{name}: expected an array without a mask, got MaskedArray")
        return x if x.dtype.kind != "V" else _bits_of(x) or x
    if isinstance(x, (tuple, list)):
        raise TypeError(f"{name}: expected an array, got {type(x).__name__}")
    if _is_torch(x) and x.requires_grad:
        if sys.modules["torch"].is_grad_enabled():
            raise ValueError(
                f"{name}: expected a tensor that needs no gradient, got one with requires_grad=True, whose gradient would be lost: "
                f"pass {name}.detach() or call under torch.no_grad()"
            )
        return x.detach()
    if _is_torch(x) and dtype_name(x.dtype) == "float8_e4m3":
        return x.view(sys.modules["torch"].uint8), "float8_e4m3"
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


def split_out(out: Any, return_lse: bool) -> tuple[Any, Any]:
    """The caller's arrays for the result and for the log-sum-exp, from an `out` that may be both in a pair."""
    if not isinstance(out, tuple):
        return out, None
    if not return_lse or len(out) != 2:
        raise ValueError(f"out: expected an array, or a pair (out, lse) with return_lse=True, got a tuple of {len(out)}")
    return out


def host(x: Any, name: str, bits_as: Any = None, written: bool = False) -> tuple[np.ndarray, str]:
    """NumPy view of an array's memory, and the name of its dtype; what NumPy lacks comes as bits, as the core takes it.

    `bits_as` names what plain uint8 and uint16 arrays hold; `written` says that the array is to be written.
    """
    x = writable(x, name) if written else readable(x, name)
    tag = None
    if isinstance(x, tuple):
        x, tag = x
    if _is_torch(x):
        if dtype_name(x.dtype) == "bfloat16":
            x, tag = x.view(sys.modules["torch"].int16).numpy().view(np.uint16), "bfloat16"
        else:
            x = x.numpy()
    if not isinstance(x, np.ndarray):
        if written or not (hasattr(x, "__array__") or hasattr(x, "__dlpack__")):
            raise TypeError(f"{name}: expected {'a NumPy array or a torch tensor' if written else 'an array'}, got {type(x).__name__}")
        x = np.asarray(x) if hasattr(x, "__array__") else np.from_dlpack(x)
        bits = _bits_of(x)
        x, tag = (x, tag) if bits is None else bits
    if not x.dtype.isnative:
        raise TypeError(f"{name}: expected native byte order, got {x.dtype}")
    if tag is None and bits_as in ("bfloat16", "float8_e4m3") and x.dtype == (np.uint16 if bits_as == "bfloat16" else np.uint8):
        tag = bits_as
    return x, tag or _plain_name(x.dtype)


def shape_of(x: Any) -> tuple[int, ...] | None:
    """The shape of an array, of one that only exports DLPack too; None where NumPy cannot read that."""
    shape = getattr(x, "shape", None)
    if shape is None and hasattr(x, "__dlpack__"):
        try:
            shape = np.from_dlpack(x).shape
        except (BufferError, RuntimeError, TypeError):
            return None
    return () if shape is None else tuple(shape)


def as_kind_of(result: np.ndarray, given: Any) -> Any:
    """A NumPy array of integers or floats as the kind of array that `given` is: a torch tensor, a JAX array, or as it is."""
    if _is_torch(given):
        return sys.modules["torch"].from_numpy(np.ascontiguousarray(result))
    return _to_jax(result) if _is_jax(given) else result


def integer(x: Any, name: str) -> int:
    """The integer that `x` is."""
    try:
        value = operator.index(x)
    except TypeError as error:
        raise TypeError(f"{name}: expected an integer, got {type(x).__name__}") from error
    if not -(2**63) <= value < 2**63:
        raise ValueError(f"{name}: expected an integer of 64 bits, got {value}")
    return value


def integers(x: Any, name: str) -> np.ndarray:
    """int64 array of the integers of a sequence or an array."""
    try:
        array = np.asarray(x)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"{name}: expected integers, got {type(x).__name__}") from error
    if array.dtype.kind not in "iu" and array.size:
        raise TypeError(f"{name}: expected integers, got {array.dtype if array.dtype != object else type(x).__name__}")
    return array.astype(np.int64, copy=False)


def float32_numbers(x: Any, name: str) -> np.ndarray:
    """Contiguous float32 array of the numbers of a sequence or an array."""
    if _is_torch(x):
        x = x.detach().float().numpy()
    try:
        return np.asarray(x, np.float32, order="C")
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name}: expected numbers, got {type(x).__name__}") from error


def dtype_name(dtype: Any) -> Any:
    """Plain name of a NumPy, ml_dtypes, torch or JAX dtype, such as ``"bfloat16"``; strings and None as they are. The e4m3 that
    has no infinity, which frameworks call float8_e4m3fn, is ``"float8_e4m3"`` here."""
    if dtype is None or isinstance(dtype, str):
        name = dtype
    else:
        name = getattr(dtype, "name", None) or getattr(dtype, "__name__", None) or str(dtype)
        name = str(name).rpartition(".")[2]
    return "float8_e4m3" if name == "float8_e4m3fn" else name
