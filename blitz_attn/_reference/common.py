"""Code that the float64 twins share: reading numbers of any dtype, rounding them, lengths, and options that several twins have."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from .._arrays import array, dtype_name, float32_numbers
from .._operations import naming_all

__all__ = ["round_to", "to_float64"]

# ---- Precision ----------------------------------------------------------------------------------------------------


def _host_array(x: Any) -> np.ndarray:
    """NumPy view or copy of `x`. Tensors of torch become float64, since NumPy may lack their dtype."""
    if hasattr(x, "detach"):
        return x.detach().cpu().double().numpy()
    return array(x, "x", "an array")


def to_float64(x: Any, dtype: Any = None) -> np.ndarray:
    """Exact float64 copy of an array of any floating kind the library takes.

    Parameters
    ----------
    x : array_like
        float16, float32, float64 or bfloat16 values; uint16 holds bfloat16 bits when `dtype` says so.
    dtype : str or dtype, optional
        ``"bfloat16"`` to read a uint16 array as bits. Ignored for other arrays.

    Returns
    -------
    numpy.ndarray
        float64, of the shape of `x`.

    Raises
    ------
    TypeError
        `x` holds uint16 and `dtype` does not name bfloat16.

    Examples
    --------
    >>> import numpy as np
    >>> from blitz_attn.reference import to_float64
    >>> to_float64(np.array([0x3F80, 0xC000], np.uint16), "bfloat16").tolist()
    [1.0, -2.0]
    """
    given = _host_array(x)
    if given.dtype.name == "bfloat16" or given.dtype == np.uint16:
        if given.dtype == np.uint16 and dtype_name(dtype) != "bfloat16":
            raise TypeError(f'dtype: expected "bfloat16" to read uint16 bits, got {dtype!r}')
        bits = np.ascontiguousarray(given).view(np.uint16).astype(np.uint32)
        return (bits << np.uint32(16)).view(np.float32).astype(np.float64).reshape(given.shape)
    with np.errstate(invalid="ignore"):  # a signalling NaN
        return given.astype(np.float64)


def _bfloat16_bits(x32: np.ndarray) -> np.ndarray:
    """Bits of float32 values rounded to bfloat16, ties to even; a NaN stays a NaN."""
    bits = x32.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(x32), np.uint32(0x7FC0), rounded).astype(np.uint16)


def _to_odd_float32(x: np.ndarray) -> np.ndarray:
    """float64 to float32 towards zero, with the last bit set where bits were lost: a second rounding then goes the way of a single one."""
    near = x.astype(np.float32)
    lossy = np.isfinite(near) & (near.astype(np.float64) != x)
    toward = np.where(lossy & (np.abs(near.astype(np.float64)) > np.abs(x)), np.nextafter(near, np.float32(0)), near)
    return (toward.view(np.uint32) | lossy.astype(np.uint32)).view(np.float32)


def round_to(x: Any, dtype: Any) -> np.ndarray:
    """Round float64 values once, to nearest with ties to even.

    Parameters
    ----------
    x : array_like
        Values; taken as float64.
    dtype : str or dtype
        ``"float64"``, ``"float32"``, ``"float16"`` or ``"bfloat16"``.

    Returns
    -------
    numpy.ndarray
        Of that dtype. bfloat16 comes as an ``ml_dtypes.bfloat16`` array where ml_dtypes is installed, else as its
        uint16 bits.

    Raises
    ------
    ValueError
        `dtype` is none of the four.

    Examples
    --------
    >>> from blitz_attn.reference import round_to, to_float64
    >>> to_float64(round_to([1.0, 1.00390625, 3.1415926], "bfloat16"), "bfloat16").tolist()
    [1.0, 1.0, 3.140625]
    """
    name = dtype_name(dtype)
    values = np.array(array(x, "x", "numbers"), dtype=np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        if name in ("float64", "float32", "float16"):
            return values.astype(name)
        if name == "bfloat16":
            bits = _bfloat16_bits(_to_odd_float32(values))
            try:
                import ml_dtypes
            except ImportError:
                return bits
            return bits.view(ml_dtypes.bfloat16)
    raise ValueError(f"dtype: expected float64, float32, float16 or bfloat16, got {name}")


Rounding = Callable[[np.ndarray], np.ndarray]


def rounding_of(name: str) -> Rounding:
    """How a program in dtype `name` rounds each array that it stores. Such arrays are float64 or float32 here."""
    if name == "float16":
        return lambda x: x.astype(np.float16).astype(np.float32)
    if name == "bfloat16":
        return lambda x: (_bfloat16_bits(x).astype(np.uint32) << np.uint32(16)).view(np.float32)
    return lambda x: x


def real_of(name: str) -> type:
    """The dtype of the arrays that imitate a program in dtype `name`."""
    return np.float64 if name == "float64" else np.float32


def name_of(q: Any, dtype: Any) -> str:
    """The name of the dtype of a call's inputs."""
    given = dtype if dtype is not None else getattr(q, "dtype", None)
    return dtype_name(given if given is not None else np.asarray(q).dtype)


def per_head(numbers: Any, name: str) -> np.ndarray | None:
    """The float64 values of sinks or slopes, which the library reads as float32 whatever the dtype of q."""
    return None if numbers is None else float32_numbers(numbers, name).astype(np.float64)


# ---- Lengths ------------------------------------------------------------------------------------------------------


def cuts(name: str, value: Any, total: int) -> list[int]:
    """The cumulative lengths of `total` packed tokens."""
    offsets = [] if value is None else [int(n) for n in np.asarray(value)]
    if not offsets or offsets[0] != 0 or offsets[-1] != total or any(a > b for a, b in pairwise(offsets)):
        raise ValueError(f"{name}: expected lengths rising from 0 to {total}, got {offsets}")
    return offsets


def lengths(name: str, value: Any, full: Sequence[int]) -> list[int]:
    """The number of valid tokens of each sequence, by default all of its `full` ones."""
    given = list(full) if value is None else [int(n) for n in np.asarray(value)]
    if len(given) != len(full) or any(not 0 <= n <= most for n, most in zip(given, full, strict=True)):
        raise ValueError(f"{name}: expected {len(full)} lengths within {list(full)}, got {given}")
    return given


# ---- Results and options ------------------------------------------------------------------------------------------


def written(result: np.ndarray, out: Any) -> Any:
    """The result, written into `out` where that is given."""
    if out is None:
        return result
    out[...] = result
    return out


def delivered(result: np.ndarray, lse: np.ndarray, o: dict[str, Any]) -> Any:
    """The results of a call with the options `o`."""
    out, lse_out = o["out"] if isinstance(o["out"], tuple) else (o["out"], None)
    result = written(result, out)
    return (result, written(lse, lse_out)) if o["return_lse"] else result


def with_options_of(*functions: Callable[..., Any], without: str = "") -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Replaces ``**options`` of a twin by the options of its operation, or of other twins, except those named in `without`. The twin gets
    all of them, with their defaults. Options that the Parameters of its docstring lack are added there."""

    def decorate(twin: Callable[..., Any]) -> Callable[..., Any]:
        own = [p for p in inspect.signature(twin).parameters.values() if p.kind is not p.VAR_KEYWORD]
        found = {p.name: p for function in functions for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY}
        names = found.keys() - {p.name for p in own} - set(without.split())
        shown = inspect.Signature([*own, *(found[name] for name in found if name in names)])

        @functools.wraps(twin)
        def call(*args: Any, **kwargs: Any) -> Any:
            given = shown.bind(*args, **kwargs)
            given.apply_defaults()
            return twin(*given.args, **given.kwargs)

        call.__doc__ = naming_all(twin.__doc__, shown.parameters, functions[0].__name__)
        call.__signature__ = shown  # type: ignore[attr-defined]
        return call

    return decorate


def taken_by(function: Callable[..., Any], options: dict[str, Any]) -> dict[str, Any]:
    """The part of `options` that a function takes."""
    return {name: x for name, x in options.items() if name in inspect.signature(function).parameters}
