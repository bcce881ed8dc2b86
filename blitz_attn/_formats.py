"""Number formats that NumPy lacks: bfloat16, float8 e4m3 and rows of ggml's blocks. Arrays of integers hold their bits. Functions here make
values from the bits, and round values to bfloat16."""

from __future__ import annotations

import numpy as np

from ._float_mode import in_usual_mode

_E4M3_NAN = np.uint8(0x7F)


def _e4m3_table() -> np.ndarray:
    """The float32 value of each of the 256 bit patterns: a sign, 4 bits of exponent (bias 7), 3 of mantissa, no infinity."""
    magnitude = np.arange(128)
    exponent, mantissa = magnitude >> 3, magnitude & 7
    values = np.where(exponent > 0, np.ldexp(1.0 + mantissa / 8, exponent - 7), np.ldexp(mantissa / 8, -6))
    values[_E4M3_NAN] = np.nan
    return np.concatenate([values, -values]).astype(np.float32)


_E4M3_VALUES = _e4m3_table()


def e4m3_from_bits(bits: np.ndarray) -> np.ndarray:
    """float32 values of float8 e4m3 bits."""
    return _E4M3_VALUES[bits]


CELL_DIMS = 32  # numbers of a block of ggml
CELL_BYTES = {"q8_0": 34, "q4_0": 18, "q4_1": 20}


def cells_to_float32(rows: np.ndarray, name: str) -> np.ndarray:
    """float32 values ``(..., D)`` of rows of q8_0, q4_0 or q4_1, uint8 ``(..., bytes)``."""
    count = rows.shape[-1] // CELL_BYTES[name]
    cells = rows.reshape(*rows.shape[:-1], count, CELL_BYTES[name])
    head = 4 if name == "q4_1" else 2
    factors = np.ascontiguousarray(cells[..., :head]).view(np.float16).astype(np.float32)
    packed = cells[..., head:]
    if name == "q8_0":
        numbers = packed.view(np.int8)
    else:
        numbers = np.concatenate([packed & 15, packed >> 4], axis=-1).astype(np.int8) - np.int8(8 if name == "q4_0" else 0)
    with np.errstate(over="ignore", invalid="ignore"):  # factors may be infinite or NaN
        values = numbers.astype(np.float32) * factors[..., :1]
        if name == "q4_1":
            values += factors[..., 1:]
    return values.reshape(*rows.shape[:-1], count * CELL_DIMS)


def bfloat16_bits(x: np.ndarray) -> np.ndarray:
    """Bits of the bfloat16 nearest to each float32, ties to even; 0x7FC0 for each NaN."""
    pattern = np.ascontiguousarray(x).view(np.uint32)
    rounded = (pattern + np.uint32(0x7FFF) + (pattern >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(x), np.uint32(0x7FC0), rounded).astype(np.uint16)


def widened(x: np.ndarray, name: str) -> np.ndarray:
    """float32 values (float64 for float64) of an array whose dtype is called `name`."""
    if name == "bfloat16":
        return (x.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if name == "float8_e4m3":
        return e4m3_from_bits(x)
    with np.errstate(invalid="ignore"):  # signalling NaN
        return x if name == "float64" else x.astype(np.float32, copy=False)


@in_usual_mode
def converted(x: np.ndarray, name: str, to: str) -> np.ndarray:
    """Values of dtype `name` rounded to the floating dtype `to`. Arrays of bfloat16 hold bits, before and after."""
    if name == to:
        return x
    values = widened(x, name)
    with np.errstate(over="ignore", invalid="ignore"):  # numbers that are too large become infinite; NaN may signal
        return bfloat16_bits(values.astype(np.float32, copy=False)) if to == "bfloat16" else values.astype(to)
