"""Arrays of native sparse attention: reading the arrays that callers give, and writing the arrays that callers get."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from .. import _arrays, _core
from .._floats import FLOATS, Result, floats, real_of
from .._formats import converted
from .._sentences import refusal, shown


def dtype_of(dtype: Any) -> str | None:
    """The name of the dtype that a caller's `dtype` argument gives."""
    name = _arrays.dtype_name(dtype)
    if name is not None and name not in FLOATS:
        raise ValueError(f"dtype: expected 'float32', 'float16', 'bfloat16' or 'float64', got {shown(name)}")
    return name


def leading(x: Any, name: str, dtype: str | None) -> tuple[np.ndarray, str]:
    """View of the floating-point array that sets the dtype of a call, and the name of this dtype. `dtype` is the caller's argument."""
    array, kind = floats(x, name, dtype)
    if dtype is not None and kind != dtype:
        raise refusal(TypeError, name, f": expected {dtype} as ", "dtype", f" says, got {kind}")
    return array, kind


def same_kind(x: Any, name: str, dtype: Any, kind: str, like: str, written: bool = False) -> np.ndarray:
    """View of a floating-point array, which is refused unless it has dtype `kind`, the dtype of the argument `like`."""
    array, own = floats(x, name, dtype, written)
    if own != kind:
        raise refusal(TypeError, name, f": expected dtype {kind} like ", like, f", got {own}")
    return array


def storage(kind: str) -> str:
    """The NumPy dtype that holds elements of dtype `kind`."""
    return "uint16" if kind == "bfloat16" else kind


class Reals(NamedTuple):
    """Weights, gates or a log-sum-exp in the dtype of sums, and the dtype of the caller's array. `array` is None if the caller gave
    none."""

    array: np.ndarray | None
    kind: str


def reals(x: Any, name: str, dtype: Any, kind: str) -> tuple[np.ndarray, str]:
    """Contiguous array of the numbers of `x` in the dtype of sums for `kind`, and the name of the dtype of `x`."""
    array, own = floats(x, name, dtype, strided=True)
    if (own == "float64") != (kind == "float64"):
        expected = "float64" if kind == "float64" else "float32, float16 or bfloat16"
        raise refusal(TypeError, name, f": expected {expected} like ", "q", f", got {own}")
    return np.ascontiguousarray(converted(array, own, real_of(kind))), own


def expect_shape(x: np.ndarray, name: str, shape: tuple[int, ...], text: str, other: str = "", rest: str = "") -> None:
    """Refuses an array whose shape is not `shape`. `text` explains the shape in the sentence, which may go on with `other`, the name of
    another argument, and then `rest`."""
    if x.shape != shape:
        raise refusal(ValueError, name, f": expected shape {shape}, {text}", other, f"{rest}, got {x.shape}")


def check_rank(x: np.ndarray, name: str, packed: bool) -> None:
    if x.ndim != (3 if packed else 4):
        raise ValueError(f"{name}: expected shape {'(T, H, D)' if packed else '(B, N, H, D)'}, got {x.shape}")


def check_heads(x: np.ndarray, name: str) -> None:
    if not 1 <= x.shape[-1] <= 576 or x.shape[-2] < 1:
        raise ValueError(f"{name}: expected at least one head and a head dim from 1 to 576, got {x.shape}")


def rounded(x: np.ndarray, kind: str, to: str, like: Any) -> Any:
    """An array of sums, rounded from dtype `kind` to dtype `to`, as the kind of array that `like` is."""
    result = Result(x.shape, to, like)
    result.array[...] = converted(x, kind, to)
    return result.value


ROUNDED_AT_A_TIME = 1 << 12  # tokens: conversion to bfloat16 needs memory for several copies of its input


def sums_for(x: np.ndarray, kind: str) -> np.ndarray:
    """The array in which a result `x` of dtype `kind` is summed: `x` itself if sums have that dtype, else a new array."""
    return x if kind == real_of(kind) else np.empty(x.shape, real_of(kind))


def round_into(x: np.ndarray, sums: np.ndarray, kind: str) -> None:
    """Rounds `sums`, which came from `sums_for`, into their result `x`, whose axes are (..., tokens, heads, channels)."""
    for at in range(0, 0 if sums is x else x.shape[-3], ROUNDED_AT_A_TIME):
        some = (..., slice(at, at + ROUNDED_AT_A_TIME), slice(None), slice(None))
        x[some] = converted(sums[some], real_of(kind), kind)


def add_rounded(summands: Sequence[np.ndarray], into: np.ndarray, kind: str, threads: int | None) -> None:
    """Writes the sum of arrays of dtype `kind`, which have the axes of q, to `into`. The arrays are added in the given order, in the dtype
    of sums, and the sum is rounded once."""
    batched = (None,) if into.ndim == 3 else ()  # packed sequences get a batch axis: sums need not know where sequences begin
    # The core's gradient of block means adds further arrays to its result. Without blocks, it adds only these arrays.
    _core.block_means_backward(
        None, into[batched], tuple(x[batched] for x in summands), block_size=1, stride=1, dtype=kind, num_threads=threads
    )
