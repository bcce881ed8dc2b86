"""Draws biases of scores: masks of every shape, dtype, view and kind of array, and slopes.

A mask of any dtype is represented as (B or 1, H or 1, Sq or 1, Skv or 1) in float64, where -inf hides a key. A mask of bool becomes 0 and
-inf.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from . import arrays
from .draw import Draw

BFLOAT16_KINDS = arrays.kinds_for("bfloat16")[1:]  # calls do not take a mask of bits
DTYPES = tuple(x for x in arrays.FLOATS if x != "bfloat16" or BFLOAT16_KINDS)
LEAST = {"float16": -65504.0, "bfloat16": -3.3895313892515355e38, "float32": float(np.finfo(np.float32).min), "float64": -1e300}


def draw_mask(draw: Draw, full: Sequence[int], dtype: str, shown: np.ndarray, *, spoils: bool) -> tuple[np.ndarray, str]:
    """A mask for arrays of `dtype`, and its own dtype. `full`: its sizes if no axis is shortened to length 1. `shown`: the pairs that
    the other rules show.

    Elements of pairs that the other rules hide may be NaN. With `spoils`, elements of shown pairs may be NaN, too.
    """
    rng = draw.rng("mask")
    single = [draw.flag(f"mask.one_{axis}", share) for axis, share in (("batch", 0.4), ("head", 0.4), ("query", 0.25), ("key", 0.15))]
    shape = tuple(1 if one else n for one, n in zip(single, full, strict=True))
    kind = draw.pick("mask.kind", ("bool", "numbers", "holes", "least"), (4, 2, 2, 1))
    own = draw.pick("mask.dtype", DTYPES)
    hidden = rng.random(shape) < draw.pick("mask.hidden", (0.5, 0.1, 0.9))
    if draw.flag("mask.empty_rows", 0.3):
        hidden[rng.random(shape[:-1]) < 0.3] = True
    if draw.flag("mask.stretch", 0.3):  # hides a stretch of keys, which may cover whole blocks
        first, last = np.sort(rng.integers(0, shape[3] + 1, 2))
        hidden[..., first:last] = True
    if draw.flag("mask.run", 0.2):  # neighbouring queries, as in a panel, see none of the first keys, or of the last
        first, last = np.sort(rng.integers(0, shape[2] + 1, 2))
        key = rng.integers(0, shape[3] + 1)
        hidden[..., first:last, slice(key) if draw.flag("mask.run_first", 0.6) else slice(key, None)] = True
    if kind == "bool":
        return np.where(hidden, -np.inf, 0.0), "bool"
    values = rng.standard_normal(shape) * draw.pick("mask.spread", (3.0, 0.1, 30.0))
    if draw.flag("mask.lifted", 0.25):  # exp() of such a float32 score would overflow if nothing were subtracted first
        values += np.where(rng.random((*shape[:3], 1)) < 0.3, 100, 0)
    if kind == "holes":
        values[hidden] = -np.inf
    elif kind == "least":  # in float64, such numbers would absorb all differences of scores
        values[hidden] = -1e4 if dtype == "float64" else LEAST[own]
    if draw.flag("mask.nan", 0.4):
        axes = tuple(axis for axis, one in enumerate(single) if one)
        values[~shown.any(axis=axes, keepdims=True) & (rng.random(shape) < 0.5)] = np.nan
    if spoils and draw.flag("mask.spoils", 0.1):
        values[rng.random(shape) < 0.01] = np.nan
    return arrays.rounded(values, own), own


def draw_slopes(draw: Draw, heads: int) -> np.ndarray:
    """(H,) numbers of float32: the usual powers of two, or random numbers, some of which are 0 or negative."""
    if draw.pick("alibi.kind", ("powers", "any")) == "powers":
        return arrays.rounded(2.0 ** (-8 * (1 + np.arange(heads)) / max(heads, 1)), "float32")
    slopes = draw.rng("alibi").standard_normal(heads) * 0.2
    slopes[draw.rng("alibi.zero").random(heads) < 0.2] = 0
    return arrays.rounded(slopes, "float32")


def stored(mask: np.ndarray, dtype: str) -> np.ndarray:
    return mask > -np.inf if dtype == "bool" else arrays.stored(mask, dtype)


def plain(mask: np.ndarray, dtype: str) -> Any:
    """The mask as a call takes it, in C order."""
    return arrays.dressed(stored(mask, dtype), dtype, BFLOAT16_KINDS[0] if dtype == "bfloat16" else "numpy")


def place(draw: Draw, mask: np.ndarray, dtype: str, full: Sequence[int], most_missing: int = 4) -> tuple[arrays.Placed, Any]:
    """The mask as a drawn view and kind of array. Up to `most_missing` leading axes of 1 may be missing, and other axes of 1 may be repeated by a
    stride of 0."""
    kind = draw.pick("mask.dressed", BFLOAT16_KINDS if dtype == "bfloat16" else arrays.kinds_for(dtype))
    placed = arrays.place(draw, "mask", stored(mask, dtype), last_contiguous=False, views=arrays.views_for(kind))
    if draw.flag("mask.repeated", 0.2):
        for axis, n in enumerate(full):
            if mask.shape[axis] == 1 < n:
                arrays.repeated(placed, axis, n)
    leading = next((axis for axis, n in enumerate(placed.array.shape) if n != 1), 4)
    missing = draw.integer("mask.missing", 0, 4) % (min(leading, most_missing) + 1)
    return placed, arrays.dressed(placed.array[(0,) * missing + (...,)], dtype, kind)


def draw_given_slopes(draw: Draw, slopes: np.ndarray) -> Any:
    kind = draw.pick("alibi.as", ("float32", "list", "tuple", "float64", "strided"))
    if kind in ("list", "tuple"):
        return [list, tuple][kind == "tuple"](slopes.tolist())
    return np.repeat(slopes, 2)[::2] if kind == "strided" else slopes.astype(kind)
