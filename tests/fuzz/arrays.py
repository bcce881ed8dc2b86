"""Arrays in every dtype, view and kind that the package takes, with guards around them.

Values are float64 arrays with only those numbers that the target dtype can represent (`rounded`), so that the oracle gets the same numbers
as the package.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Sequence
from typing import Any

import numpy as np

from .draw import Draw
from .problems import Finding

FLOATS = ("float32", "float16", "bfloat16", "float64")
HAS_ML_DTYPES = importlib.util.find_spec("ml_dtypes") is not None
HAS_TORCH = importlib.util.find_spec("torch") is not None
HAS_JAX = HAS_ML_DTYPES and importlib.util.find_spec("jax") is not None
CANARY = 0xA5


# ---- Dtypes -------------------------------------------------------------------------------------------------------


def to_bfloat16_bits(values: np.ndarray) -> np.ndarray:
    """The bits of the nearest bfloat16, ties to even; NaN stays NaN."""
    given = np.asarray(values)
    single = given.astype(np.float32)
    bits = single.view(np.uint32) if single.ndim else single.reshape(1).view(np.uint32).reshape(())
    # Rounding twice to the nearest would be wrong, so the first rounding is to odd: a number between two neighbouring float32 becomes the
    # neighbour whose last bit is 1. The number and this neighbour lie on the same side of every tie between two bfloat16.
    inexact = np.isfinite(given) & (single != given)
    bits = np.where(inexact, (bits - (np.abs(single) > np.abs(given))) | np.uint32(1), bits).astype(np.uint32)
    rounded_bits = ((bits.astype(np.uint64) + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(single), np.uint16(0x7FC0), rounded_bits).astype(np.uint16)


def from_bfloat16_bits(bits: np.ndarray) -> np.ndarray:
    return (np.ascontiguousarray(bits).astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def rounded(values: np.ndarray, dtype: str) -> np.ndarray:
    """`values` in float64, each rounded to the nearest number of `dtype`."""
    if dtype == "bfloat16":
        return from_bfloat16_bits(to_bfloat16_bits(values))
    return np.asarray(values).astype(dtype).astype(np.float64)


def stored(values: np.ndarray, dtype: str) -> np.ndarray:
    """The values as a NumPy array of `dtype`; bfloat16 as its uint16 bits."""
    return to_bfloat16_bits(values) if dtype == "bfloat16" else np.asarray(values).astype(dtype)


def float8_values(bits: np.ndarray) -> np.ndarray:
    """The numbers that bits of e4m3 stand for: a sign, 4 bits of exponent with bias 7, and 3 of mantissa.

    There is no infinity. The largest exponent has numbers, too. Bits that are all 1, whatever the sign, stand for NaN.
    """
    exponent, mantissa = (bits >> 3) & 15, bits & 7
    size = np.where(exponent > 0, (8.0 + mantissa) * 2.0 ** (exponent.astype(int) - 10), mantissa * 2.0**-9)
    return np.where(bits & 0x7F == 0x7F, np.nan, np.where(bits >> 7, -size, size))


ROWS = {"q8_0": 34, "q4_0": 18, "q4_1": 20}  # bytes of 32 numbers of llama.cpp's formats


def numbers_of_rows(rows: np.ndarray, dtype: str) -> np.ndarray:
    """The numbers that rows of these formats stand for. A number is a factor times an integer, in q4_1 plus an offset.

    For each 32 numbers, a row has a float16 factor, in q4_1 also a float16 offset, and then 32 integers. In q8_0, each integer is a signed
    byte. In the other formats, the integers take 16 bytes: the low halves are the first 16 integers, and the high halves are the last 16.
    q4_0 stores each integer plus 8.
    """
    blocks = np.ascontiguousarray(rows).reshape(*rows.shape[:-1], rows.shape[-1] // ROWS[dtype], ROWS[dtype])
    head = 4 if dtype == "q4_1" else 2
    factor, integers = np.ascontiguousarray(blocks[..., :head]).view(np.float16).astype(np.float64), blocks[..., head:].astype(np.int64)
    if dtype == "q8_0":
        integers = np.where(integers > 127, integers - 256, integers)
    else:
        integers = np.concatenate([integers & 15, integers >> 4], axis=-1) - (8 if dtype == "q4_0" else 0)
    numbers = factor[..., :1] * integers + (factor[..., 1:] if dtype == "q4_1" else 0)
    return numbers.reshape(*rows.shape[:-1], blocks.shape[-2] * 32)


def values_of(array: Any, dtype: str) -> np.ndarray:
    """A result of the package, which may be any kind of array, as float64."""
    if type(array).__module__.partition(".")[0] == "torch":
        array = array.detach()
        return array.double().numpy().copy()
    array = np.asarray(array)
    if dtype == "float8_e4m3":
        return float8_values(array.view(np.uint8))
    return from_bfloat16_bits(array.view(np.uint16)) if dtype == "bfloat16" else array.astype(np.float64)


def bits_of(array: Any) -> bytes:
    """The bytes of a result in C order, for bitwise comparisons."""
    if type(array).__module__.partition(".")[0] == "torch":
        import torch

        array = array.detach().contiguous()
        array = array.view(torch.uint8).numpy() if array.numel() else np.empty(0, np.uint8)
    return np.ascontiguousarray(array).tobytes()


# ---- Views --------------------------------------------------------------------------------------------------------

# The position of an array in its buffer. offset: begins some elements later; gaps: each axis may have unused entries before and after it;
# steps: it has only every second or third entry of some axes; turned: its axes have another order in memory; reversed: some axes have
# negative strides.
VIEWS = ("plain", "offset", "gaps", "steps", "turned", "reversed")


def views_for(kind: str) -> tuple[str, ...]:
    """The names of `VIEWS` that an array of this kind can have."""
    return VIEWS[:-1] if kind == "torch" else VIEWS  # torch has no negative strides


def place(draw: Draw, name: str, data: np.ndarray, *, last_contiguous: bool = True, views: Sequence[str] = VIEWS) -> Placed:
    """A copy of `data` as a view of a larger buffer that is filled with a canary. Draws ``<name>.view``."""
    view = draw.pick(f"{name}.view", views, [4] + [1] * (len(views) - 1))
    rng = draw.rng(f"{name}.view.details")
    ndim, shape = data.ndim, data.shape
    order = list(range(ndim))
    before, after, step, back = [0] * ndim, [0] * ndim, [1] * ndim, [False] * ndim
    free = ndim - 1 if last_contiguous else ndim
    lead = 0
    if view == "offset":
        lead = int(rng.integers(1, 70)) * data.itemsize
    elif view == "gaps":
        before, after = ([int(x) for x in rng.integers(0, 4, ndim)] for _ in range(2))
    elif view == "steps":
        step[:free] = [int(x) for x in rng.integers(1, 4, free)]
    elif view == "turned":
        order[:free] = [int(x) for x in rng.permutation(free)]
    elif view == "reversed":
        back[:free] = [bool(x) for x in rng.integers(0, 2, free)]
    outer = [before[i] + shape[i] * step[i] + after[i] for i in range(ndim)]
    stored_shape = [outer[i] for i in order]
    count = int(np.prod(stored_shape, dtype=np.int64))
    buffer = np.full(64 + lead + count * data.itemsize + 64, CANARY, np.uint8)
    whole = np.frombuffer(buffer.data, data.dtype, count, offset=64 + lead).reshape(stored_shape)
    turned = whole.transpose(np.argsort(order))
    index = tuple(slice(before[i], before[i] + shape[i] * step[i], step[i]) for i in range(ndim))
    inner = turned[(*index, ...)]
    inner = inner[(*(slice(None, None, -1) if back[i] else slice(None) for i in range(ndim)), ...)]
    inner[...] = data
    return Placed(name, buffer, inner)


class Placed:
    """An array inside a buffer of its own. `array` is the view of the buffer that holds the data."""

    def __init__(self, name: str, buffer: np.ndarray, array: np.ndarray):
        self.name, self.buffer, self.array = name, buffer, array
        self.before = buffer.copy()

    def check_unchanged(self) -> None:
        """Checks that no byte has changed, of an input or of an output of a refused call."""
        if not np.array_equal(self.buffer, self.before):
            raise Finding(f"{self.name}: {np.count_nonzero(self.buffer != self.before)} bytes were written that should not be")

    def check_around(self) -> None:
        """Checks that the bytes around an output have not changed."""
        inside = np.zeros(self.buffer.shape, np.bool_)
        offsets = np.array(self.array.__array_interface__["data"][0] - self.buffer.__array_interface__["data"][0])
        for size, stride in zip(self.array.shape, self.array.strides, strict=True):
            offsets = offsets[..., None] + np.arange(size) * stride
        inside[(offsets[..., None] + np.arange(self.array.itemsize)).ravel()] = True
        if not np.array_equal(self.buffer[~inside], self.before[~inside]):
            raise Finding(f"{self.name}: bytes around the output were written")


def poisoned(draw: Draw, name: str, shape: Sequence[int], dtype: str, **how: Any) -> Placed:
    """An output inside a guarded buffer, filled with NaN (integers: with the dtype's largest number)."""
    if dtype in FLOATS:
        return place(draw, name, stored(np.full(shape, np.nan), dtype), **how)
    return place(draw, name, np.full(shape, np.iinfo(dtype).max, dtype), **how)


def repeated(placed: Placed, axis: int, size: int) -> Placed:
    """Changes the array of `placed` so that the only entry of `axis` appears `size` times, by a stride of 0, and returns `placed`."""
    array = placed.array
    shape, strides = list(array.shape), list(array.strides)
    shape[axis], strides[axis] = size, 0
    placed.array = np.lib.stride_tricks.as_strided(array, shape, strides)
    return placed


def page_table(draw: Draw, name: str, pages: Sequence[np.ndarray]) -> Placed:
    """(B, W) page numbers. Behind a row's pages, numbers name no existing page. Draws the dtype, the view and the extra width."""
    dtype = draw.pick(f"{name}.dtype", ("int32", "int64"))
    width = max([len(x) for x in pages], default=0) + draw.integer(f"{name}.width", 0, 3)
    matrix = np.full((len(pages), width), draw.pick(f"{name}.behind", (-7, -(2**31), 2**31 - 1)), dtype)
    for row, numbers in zip(matrix, pages, strict=True):
        row[: len(numbers)] = numbers
    return place(draw, name, matrix, last_contiguous=False)


# ---- Kinds --------------------------------------------------------------------------------------------------------


class Dlpack:
    """An array that is exported by the DLPack protocol alone."""

    def __init__(self, array: np.ndarray):
        self._array = array

    def __dlpack__(self, **arguments: Any) -> Any:
        return self._array.__dlpack__(**arguments)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._array.__dlpack_device__()


@functools.cache
def _exported(dtype: str) -> bool:
    """Whether NumPy exports arrays of this dtype by DLPack. Before 1.25, it did not export bool."""
    try:
        np.zeros(1, dtype).__dlpack__()
    except (BufferError, TypeError):
        return False
    return True


def kinds_for(dtype: str) -> list[str]:
    """The kinds of array that can hold this dtype on this machine, the plainest first."""
    if dtype in ("bfloat16", "float8_e4m3"):
        return ["bits"] + ["ml_dtypes"] * HAS_ML_DTYPES + ["torch"] * HAS_TORCH
    return ["numpy"] + ["dlpack"] * _exported(dtype) + ["torch"] * HAS_TORCH


def dressed(array: np.ndarray, dtype: str, kind: str) -> Any:
    """An array of the given kind over the memory of `array`, which holds numbers of `dtype`, or their bits if NumPy lacks the dtype."""
    if kind == "ml_dtypes":
        import ml_dtypes

        return array.view(ml_dtypes.float8_e4m3fn if dtype == "float8_e4m3" else ml_dtypes.bfloat16)
    if kind == "dlpack":
        return Dlpack(array)
    if kind == "torch":
        import torch

        if min(array.strides, default=0) < 0:
            return dressed(array, dtype, "bits" if dtype == "bfloat16" else "numpy")  # torch has no negative strides
        tensor = torch.from_numpy(array.view(np.int16) if dtype == "bfloat16" else array)
        own = {"bfloat16": torch.bfloat16, "float8_e4m3": torch.float8_e4m3fn}.get(dtype)
        return tensor if own is None else tensor.view(own)
    return array


def check_kind(what: str, got: Any, dtype: str, kind: str) -> None:
    """Checks that the kind and the dtype of a result are those of the arguments."""
    if kind == "torch":
        import torch

        if not isinstance(got, torch.Tensor) or str(got.dtype) != f"torch.{dtype}":
            raise Finding(f"{what}: {type(got).__name__} of {getattr(got, 'dtype', None)} for torch tensors of {dtype}")
        return
    named = ("bfloat16" if kind == "ml_dtypes" else "uint16") if dtype == "bfloat16" else dtype
    if not isinstance(got, np.ndarray) or str(got.dtype) != named:
        raise Finding(f"{what}: {type(got).__name__} of {getattr(got, 'dtype', None)} for {kind} arrays of {dtype}")


# ---- Lists of integers ------------------------------------------------------------------------------------------------

INTEGERS_AS = ("list", "tuple", "int32", "int64", "strided")


def as_integers(draw: Draw, name: str, numbers: Any) -> Any:
    """Lengths in a drawn form: a list, a tuple or an array."""
    return integers_as(draw.pick(f"{name}.as", INTEGERS_AS), numbers)


def integers_as(how: str, numbers: Any) -> Any:
    plain = np.asarray(numbers, np.int64)
    if how in ("list", "tuple"):
        return tuple(plain.tolist()) if how == "tuple" else plain.tolist()
    return np.repeat(plain, 2)[::2] if how == "strided" else plain.astype(how)
