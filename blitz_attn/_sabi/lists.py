"""Block lists as arrays: pads, checks and sizes, which all other modules of block lists build on.

A block list (sabi, sparse attention block indices) has shape (..., R, W). For each of R blocks of queries, it has the column numbers of the
blocks of keys that are kept, up to W of them. A row ends at its first pad: 65535 in uint16, any negative number in the signed types. All
functions accept both conventions, any order within a row, and any leading axes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .._arrays import array as array_of
from .._arrays import integer, integers, pieces
from .._sentences import shown

PAD_UINT16 = 65535

MOST_BLOCKS = 1 << 28  # most entries of a list, and blocks of a grid that is held as a mask: more would take gigabytes
MOST_ROWS = 1 << 24  # most rows of a list

MOST_TOKENS = 1 << 48  # sums of such numbers fit in 64 bits
MOST_SIDE = 1 << 20  # most of what Python loops over: heads, and rows or columns of a grid with a frame


def signed(sabi: Any, name: str = "sabi") -> np.ndarray:
    """int64 copy of a block list in which everything from a row's first pad on is -1."""
    array = array_of(sabi, name, "an integer array")
    if array.dtype.kind not in "iu":
        raise TypeError(f"{name}: expected an integer array, got {array.dtype}")
    if array.ndim < 2:
        raise ValueError(f"{name}: expected shape (..., rows, width), got {array.shape}")
    if array.dtype.kind == "u" and array.dtype.itemsize == 8 and int(array.max(initial=0)) >= 2**63:  # as int64, it would be a pad
        raise ValueError(f"{name}: expected columns below 2**63 (uint64 has no pad), got {array.max()}")
    rows = np.empty(array.shape, np.int64)
    for at in pieces(rows.shape):
        part = rows[at]
        part[...] = array[at]
        pad = part == PAD_UINT16 if array.dtype == np.uint16 else part < 0
        part[np.logical_or.accumulate(pad, axis=-1)] = -1
    return rows


def with_four_axes(sabi: np.ndarray) -> np.ndarray:
    """A list of two or three axes with axes of length 1 added in front, as NumPy broadcasts. Any other array is returned unchanged."""
    return sabi[(None,) * (4 - sabi.ndim)] if sabi.ndim in (2, 3) else sabi


def counts_of(rows: np.ndarray) -> np.ndarray:
    """int64: the number of entries of each row of a list that `signed` has read."""
    counts = np.empty(rows.shape[:-1], np.int64)
    for at in pieces(rows.shape):
        counts[at[:-1]] = (rows[at] >= 0).sum(axis=-1)
    return counts


def largest_of(rows: np.ndarray) -> int:
    """The largest entry; -1 if there are only pads."""
    flat = rows.reshape(-1)
    return max(int(flat[at].max(initial=-1)) for at, _ in pieces((flat.size, 1)))


def count_of(x: Any, name: str, most: int, least: int = 0) -> int:
    """The integer `x`, which is from `least` to `most`."""
    value = integer(x, name)
    if not least <= value <= max(least, most):
        raise ValueError(f"{name}: expected {least} to {max(least, most)}, got {value}")
    return value


def at_least_one(x: Any, name: str) -> int:
    """The integer `x`, which is at least 1."""
    value = integer(x, name)
    if value < 1:
        raise ValueError(f"{name}: expected at least 1, got {value}")
    return value


def blocks_of(size: int, block: int) -> int:
    """Number of blocks that cover `size` tokens."""
    return -(-int(size) // int(block))


def tokens_of(s_q: Any, s_kv: Any) -> tuple[int, int]:
    """Numbers of query and key tokens, each at least 1."""
    sizes = integer(s_q, "s_q"), integer(s_q, "s_q") if s_kv is None else integer(s_kv, "s_kv")
    for name, size in zip(("s_q", "s_kv"), sizes, strict=True):
        if size < 1:
            raise ValueError(f"{name}: expected at least 1 token, got {size}")
        if size > MOST_TOKENS:
            raise ValueError(f"{name}: expected at most {MOST_TOKENS} tokens, got {size}")
    return sizes


def sides_of(s_q: Any, s_kv: Any, block_shape: Any) -> tuple[int, int]:
    """Rows and columns of the block grid, after checking the arguments."""
    block_q, block_kv = checked_shape(block_shape)
    sizes = tokens_of(s_q, s_kv)
    rows, columns = blocks_of(sizes[0], block_q), blocks_of(sizes[1], block_kv)
    if rows > MOST_ROWS or columns > MOST_BLOCKS:
        most = f"{MOST_ROWS} rows and {MOST_BLOCKS} columns"
        raise ValueError(f"block_shape: expected blocks so large that a grid has at most {most}, got {rows} x {columns}")
    return rows, columns


def grid_of(s_q: Any, s_kv: Any, block_shape: Any) -> tuple[int, int]:
    """The result of `sides_of`, for a grid that will be held as a mask."""
    rows, columns = sides_of(s_q, s_kv, block_shape)
    if rows * columns > MOST_BLOCKS:
        raise ValueError(f"block_shape: expected blocks so large that a grid has at most {MOST_BLOCKS} of them, got {rows} x {columns}")
    return rows, columns


def check_entries(rows: int, fullest: int) -> None:
    """Refuses a list of too many entries: the number of rows times the number of blocks in the fullest row."""
    if rows * fullest > MOST_BLOCKS:
        raise ValueError(
            f"block_shape: expected blocks so large that a list has at most {MOST_BLOCKS} entries, got {rows} rows of up to {fullest}"
        )


def checked_shape(block_shape: Sequence[int]) -> tuple[int, int]:
    """The two block sizes as positive ints."""
    return two_integers(block_shape, "block_shape", "two positive numbers (queries, keys)", least=1)


def two_integers(pair: Any, name: str, what: str, least: int | None = None) -> tuple[int, int]:
    """The two integers of `pair`, each at least `least`."""
    one, other = some_integers(pair, name, what, 2)
    if least is not None and min(one, other) < least:
        raise ValueError(f"{name}: expected {what}, got {(one, other)}")
    return one, other


def some_integers(given: Any, name: str, what: str, count: int) -> tuple[int, ...]:
    """The `count` integers of a sequence or an array."""
    if isinstance(given, (tuple, list)):
        if len(given) != count:
            raise ValueError(f"{name}: expected {what}, got {shown(tuple(given))}")
        return tuple(integer(n, name) for n in given)
    try:
        numbers = integers(given, name)
        len(numbers)
    except TypeError as error:  # not integers, or a single one
        if isinstance(given, np.ma.MaskedArray):
            raise
        raise TypeError(f"{name}: expected {what}, got {type(given).__name__}") from error
    if numbers.shape != (count,):
        raise ValueError(f"{name}: expected {what}, got shape {numbers.shape}")
    return tuple(numbers.tolist())


def result_dtype(columns: int, dtype: Any = None) -> np.dtype:
    """The dtype of a list over `columns` blocks: int32, or the one that the caller gave."""
    if dtype is None:
        return np.dtype(np.int32)
    try:
        chosen = np.dtype(dtype)
    except Exception as error:  # NumPy raises errors of several kinds
        raise TypeError(f"dtype: expected uint16, int16, int32 or int64, got {shown(dtype)}") from error
    if chosen not in (np.dtype(np.uint16), np.dtype(np.int16), np.dtype(np.int32), np.dtype(np.int64)):
        raise TypeError(f"dtype: expected uint16, int16, int32 or int64, got {chosen}")
    if columns > np.iinfo(chosen).max + (chosen.kind == "i"):  # the pad of signed dtypes, -1, takes no column's number
        raise ValueError(f"dtype: expected room for {columns} columns and a pad, got {chosen}")
    return chosen


def padded(rows: np.ndarray, columns: int, dtype: Any = None) -> np.ndarray:
    """The list, given as signed integers padded with -1, in the dtype of the result and with that dtype's pad."""
    made = np.empty(rows.shape, result_dtype(columns, dtype))
    for at in pieces(rows.shape):
        made[at] = rows[at].astype(made.dtype)  # -1 wraps to 65535 in uint16
    return made


def columns_of(rows: np.ndarray, columns: Any, name: str = "sabi") -> int:
    """Number of columns: `columns`, checked against the entries, or one more than the largest entry where `columns` is None."""
    most = largest_of(rows) + 1
    if columns is not None:
        columns = count_of(columns, "columns", MOST_BLOCKS)
        if most > columns:
            raise ValueError(f"{name}: expected columns below {columns}, got {most - 1}")
    elif most > MOST_BLOCKS:
        raise ValueError(f"{name}: expected columns below {MOST_BLOCKS}, got {most - 1}")
    return most if columns is None else columns


def width_of(width: Any, fullest: int, rows: int) -> int:
    """Width of a list: `width`, checked against the number of blocks in the fullest row, or that number where `width` is None."""
    if width is None:
        return max(1, fullest)
    width = count_of(width, "width", MOST_BLOCKS // max(1, rows))
    if fullest > width:
        raise ValueError(f"width: expected at least {fullest}, the blocks of the fullest row, got {width}")
    return width


def filled(counts: np.ndarray, columns: np.ndarray, width: Any) -> np.ndarray:
    """A list (rows, width), padded with -1. Row r takes the next ``counts[r]`` of the columns."""
    rows = np.empty((counts.size, width_of(width, int(counts.max(initial=0)), counts.size)), columns.dtype)
    first = 0
    for at, _ in pieces(rows.shape):
        own = counts[at]
        end = first + int(own.sum())
        part = rows[at]
        part[...] = -1
        part[np.arange(part.shape[1]) < own[:, None]] = columns[first:end]
        first = end
    return rows
