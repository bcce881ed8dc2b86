"""Block lists as arrays: pads, checks, conversions and set operations. Public through `blitz_attn.sabi`.

A block list (sabi, sparse attention block indices) has shape (..., R, W): for each of R blocks of queries, up to W
column numbers of the blocks of keys that are kept. A row ends at its first pad: 65535 in uint16, any negative number
in the signed types. All functions accept both conventions, any order within a row, and any leading axes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ._arrays import array as array_of
from ._arrays import integer, integers
from ._sentences import shown

__all__ = [
    "check",
    "coarsen",
    "complement",
    "difference",
    "from_block_mask",
    "from_csr",
    "from_num_idx",
    "from_token_mask",
    "intersection",
    "refine",
    "to_block_mask",
    "to_csr",
    "to_num_idx",
    "to_token_mask",
    "transpose",
    "union",
]

PAD_UINT16 = 65535
_TWO_FACTORS = "two positive numbers"


def signed(sabi: Any, name: str = "sabi") -> np.ndarray:
    """int64 copy of a block list in which everything from a row's first pad on is -1."""
    array = array_of(sabi, name, "an integer array")
    if array.dtype.kind not in "iu":
        raise TypeError(f"{name}: expected an integer array, got {array.dtype}")
    if array.ndim < 2:
        raise ValueError(f"{name}: expected shape (..., rows, width), got {array.shape}")
    rows = array.astype(np.int64)
    pad = rows == PAD_UINT16 if array.dtype == np.uint16 else rows < 0
    return np.where(np.logical_or.accumulate(pad, axis=-1), -1, rows)


MOST_BLOCKS = 1 << 28  # of a grid that a list is made for: more would take gigabytes while it is made
MOST_TOKENS = 1 << 48  # sums of such numbers fit in 64 bits


def count_of(x: Any, name: str, most: int, least: int = 0) -> int:
    """The integer `x`, which is from `least` to `most`."""
    value = integer(x, name)
    if not least <= value <= max(least, most):
        raise ValueError(f"{name}: expected {least} to {max(least, most)}, got {value}")
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


def grid_of(s_q: Any, s_kv: Any, block_shape: Any) -> tuple[int, int]:
    """Rows and columns of the block grid, after checking what makes it."""
    block_q, block_kv = checked_shape(block_shape)
    sizes = tokens_of(s_q, s_kv)
    rows, columns = blocks_of(sizes[0], block_q), blocks_of(sizes[1], block_kv)
    if rows * columns > MOST_BLOCKS:
        raise ValueError(f"block_shape: expected blocks so large that a grid has at most {MOST_BLOCKS} of them, got {rows} x {columns}")
    return rows, columns


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
    except TypeError as error:  # no integers, or one alone
        raise TypeError(f"{name}: expected {what}, got {type(given).__name__}") from error
    if numbers.shape != (count,):
        raise ValueError(f"{name}: expected {what}, got shape {numbers.shape}")
    return tuple(numbers.tolist())


def result_dtype(columns: int, dtype: Any = None) -> np.dtype:
    """The dtype of a list over `columns` blocks: uint16 where its pad is free, else int32, or the one asked for."""
    if dtype is None:
        return np.dtype(np.uint16 if columns < PAD_UINT16 else np.int32)
    try:
        chosen = np.dtype(dtype)
    except Exception as error:  # whatever NumPy has to say of it
        raise TypeError(f"dtype: expected uint16, int16, int32 or int64, got {shown(dtype)}") from error
    if chosen not in (np.dtype(np.uint16), np.dtype(np.int16), np.dtype(np.int32), np.dtype(np.int64)):
        raise TypeError(f"dtype: expected uint16, int16, int32 or int64, got {chosen}")
    if columns > np.iinfo(chosen).max:
        raise ValueError(f"dtype: expected room for {columns} columns and a pad, got {chosen}")
    return chosen


def padded(rows: np.ndarray, columns: int, dtype: Any = None) -> np.ndarray:
    """A list of signed integers, padded with -1, in its final dtype and with its pad."""
    chosen = result_dtype(columns, dtype)
    return rows.astype(chosen)  # -1 wraps to 65535 in uint16


def _columns(rows: np.ndarray, columns: Any, name: str = "sabi") -> int:
    """Number of columns: the one given, checked against the entries, or the least that holds them."""
    most = int(rows.max(initial=-1)) + 1
    if columns is not None:
        columns = count_of(columns, "columns", MOST_BLOCKS)
        if most > columns:
            raise ValueError(f"{name}: expected columns below {columns}, got {most - 1}")
    elif most > MOST_BLOCKS:
        raise ValueError(f"{name}: expected columns below {MOST_BLOCKS}, got {most - 1}")
    return most if columns is None else columns


def _width(width: Any, fullest: int, rows: int) -> int:
    """Width of a list: the one given, checked against the fullest of its rows, or that row's own."""
    if width is None:
        return max(1, fullest)
    width = count_of(width, "width", MOST_BLOCKS // max(1, rows))
    if fullest > width:
        raise ValueError(f"width: expected at least {fullest}, the blocks of the fullest row, got {width}")
    return width


def _booleans(mask: Any) -> np.ndarray:
    array = array_of(mask, "mask", "booleans")
    if array.dtype != np.bool_:
        raise TypeError(f"mask: expected booleans, got {array.dtype}")
    if array.ndim < 2:
        raise ValueError(f"mask: expected shape (..., rows, columns), got {array.shape}")
    return array


def check(
    sabi: Any,
    s_q: int,
    s_kv: int | None = None,
    block_shape: Sequence[int] = (128, 128),
    *,
    batch: int | None = None,
    heads: int | None = None,
) -> np.ndarray:
    """Check a block list against a problem, as the attention operations do.

    Parameters
    ----------
    sabi : array_like of int
        Block list (B or 1, H or 1, R, W).
    s_q, s_kv : int
        Numbers of query and key tokens; `s_kv` defaults to `s_q`.
    block_shape : (int, int)
        Tokens a block of queries and of keys.
    batch, heads : int, optional
        Sizes that the leading axes must have, where they are not 1. Not checked when left out.

    Returns
    -------
    numpy.ndarray
        int64 (B or 1, H or 1, R, W): the list with -1 from each row's first pad on.

    Raises
    ------
    TypeError
        Not integers.
    ValueError
        A shape that does not fit, a column out of range, or a column listed twice in a row.

    Examples
    --------
    >>> import numpy as np
    >>> from blitz_attn import sabi
    >>> sabi.check(np.array([[[[1, 0, -1], [1, -1, 0]]]]), 256).tolist()
    [[[[1, 0, -1], [1, -1, -1]]]]
    >>> sabi.check(np.array([[[[1, 1], [2, -1]]]]), 256)
    Traceback (most recent call last):
    ...
    ValueError: sabi: expected columns in 0..1, got 2 in row (0, 0, 1)
    """
    rows = signed(sabi)
    count, columns = grid_of(s_q, s_kv, block_shape)
    block_q, _ = checked_shape(block_shape)
    if rows.ndim != 4:
        raise ValueError(f"sabi: expected shape (B or 1, H or 1, rows, width), got {rows.shape}")
    for axis, (name, size) in enumerate((("batch", batch), ("heads", heads))):
        if size is not None and rows.shape[axis] not in (1, integer(size, name)):
            raise ValueError(f"sabi: expected {name} {size} or 1 on axis {axis}, got shape {rows.shape}")
    if rows.shape[2] != count:
        queries = integer(s_q, "s_q")
        raise ValueError(f"sabi: expected {count} rows for {queries} queries in blocks of {block_q}, got shape {rows.shape}")
    if rows.max(initial=-1) >= columns:
        where = tuple(int(n) for n in np.argwhere(rows >= columns)[0])
        raise ValueError(f"sabi: expected columns in 0..{columns - 1}, got {rows[where]} in row {where[:3]}")
    ordered = np.sort(rows, axis=-1)
    twice = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)
    if twice.any():
        where = tuple(int(n) for n in np.argwhere(twice)[0])
        raise ValueError(f"sabi: expected each column once per row, got {ordered[where]} twice in row {where[:3]}")
    return rows


# ---- Conversions --------------------------------------------------------------------------------------------------


def to_block_mask(sabi: Any, columns: int | None = None) -> np.ndarray:
    """Boolean mask over blocks, True = kept.

    Parameters
    ----------
    sabi : array_like of int
        Block list (..., R, W).
    columns : int, optional
        Number of key blocks C. Default: the least that holds every entry.

    Returns
    -------
    numpy.ndarray
        bool (..., R, C).

    Raises
    ------
    TypeError
        Not integers.
    ValueError
        An entry of `columns` or more.

    Examples
    --------
    >>> import numpy as np
    >>> from blitz_attn import sabi
    >>> sabi.to_block_mask(np.array([[2, 0], [-1, -1]]), 3).astype(int).tolist()
    [[1, 0, 1], [0, 0, 0]]
    """
    return _mask_of(signed(sabi), columns, "sabi")


def _mask_of(rows: np.ndarray, columns: Any, name: str) -> np.ndarray:
    """`to_block_mask` of the list `name`, read already."""
    count = _columns(rows, columns, name)
    if count * (rows.size // max(1, rows.shape[-1])) > MOST_BLOCKS:
        raise ValueError(f"columns: expected so few that the mask has at most {MOST_BLOCKS} blocks, got {count}")
    mask = np.zeros((*rows.shape[:-1], count + 1), bool)  # the last column swallows the pads
    np.put_along_axis(mask, rows, True, axis=-1)
    return np.ascontiguousarray(mask[..., :-1])


def from_block_mask(mask: Any, *, dtype: Any = None, width: int | None = None) -> np.ndarray:
    """Block list of a boolean mask over blocks.

    Parameters
    ----------
    mask : array_like of bool
        (..., R, C), True = kept.
    dtype : dtype, optional
        uint16, int16, int32 or int64. Default: uint16 where C < 65535, else int32.
    width : int, optional
        Width W of the list. Default: that of the fullest row, at least 1.

    Returns
    -------
    numpy.ndarray
        (..., R, W), columns rising, padded with 65535 (uint16) or -1.

    Raises
    ------
    TypeError
        `mask` is not boolean.
    ValueError
        A row holds more than `width` blocks, or the mask has fewer than two axes.

    Examples
    --------
    >>> import numpy as np
    >>> from blitz_attn import sabi
    >>> sabi.from_block_mask(np.array([[True, False, True], [False, True, False]]), dtype="int32").tolist()
    [[0, 2], [1, -1]]
    """
    array = _booleans(mask)
    counts = array.sum(axis=-1).reshape(-1)
    width = _width(width, int(counts.max(initial=0)), counts.size)
    row, column = np.nonzero(array.reshape(counts.size, array.shape[-1]))
    rows = np.full((counts.size, width), -1, np.int64)
    rows[row, np.arange(row.size) - np.repeat(np.cumsum(counts) - counts, counts)] = column
    return padded(rows.reshape(*array.shape[:-1], width), array.shape[-1], dtype)


def to_token_mask(sabi: Any, s_q: int, s_kv: int | None = None, block_shape: Sequence[int] = (128, 128)) -> np.ndarray:
    """Boolean mask over tokens, True = attended. For small problems: it has s_q * s_kv elements a head.

    Parameters
    ----------
    sabi : array_like of int
        Block list (..., R, W).
    s_q, s_kv : int
        Numbers of query and key tokens; `s_kv` defaults to `s_q`.
    block_shape : (int, int)
        Tokens a block of queries and of keys.

    Returns
    -------
    numpy.ndarray
        bool (..., s_q, s_kv).

    Raises
    ------
    ValueError
        Rows or columns that do not fit the sizes.

    Examples
    --------
    >>> import numpy as np
    >>> from blitz_attn import sabi
    >>> sabi.to_token_mask(np.array([[0], [1]]), 3, 3, (2, 2)).astype(int).tolist()
    [[1, 1, 0], [1, 1, 0], [0, 0, 1]]
    """
    count, columns = grid_of(s_q, s_kv, block_shape)
    (block_q, block_kv), (s_q, s_kv) = checked_shape(block_shape), tokens_of(s_q, s_kv)
    mask = to_block_mask(sabi, columns)
    if mask.shape[-2] != count:
        raise ValueError(f"sabi: expected {count} rows for {s_q} queries in blocks of {block_q}, got {mask.shape[-2]}")
    for name, size, other in (("s_q", s_q, s_kv), ("s_kv", s_kv, s_q)):
        if size > MOST_BLOCKS // other:
            raise ValueError(f"{name}: expected tokens whose mask has at most {MOST_BLOCKS} elements, got {s_q} x {s_kv}")
    tall = np.repeat(mask, min(block_q, s_q), axis=-2)[..., :s_q, :]
    return np.repeat(tall, min(block_kv, s_kv), axis=-1)[..., :s_kv]


def from_token_mask(mask: Any, block_shape: Sequence[int] = (128, 128), *, dtype: Any = None, width: int | None = None) -> np.ndarray:
    """Least block list that covers a boolean mask over tokens.

    Parameters
    ----------
    mask : array_like of bool
        (..., s_q, s_kv), True = attended.
    block_shape : (int, int)
        Tokens a block of queries and of keys.
    dtype, width
        As in `from_block_mask`.

    Returns
    -------
    numpy.ndarray
        (..., R, W): every block that holds at least one True.

    Raises
    ------
    TypeError, ValueError
        As in `from_block_mask`.

    Examples
    --------
    >>> import numpy as np
    >>> from blitz_attn import sabi
    >>> sabi.from_token_mask(np.tri(4, dtype=bool), (2, 2), dtype="int32").tolist()
    [[0, -1], [0, 1]]
    """
    return from_block_mask(_any_pool(_booleans(mask), checked_shape(block_shape)), dtype=dtype, width=width)


def to_csr(sabi: Any) -> tuple[np.ndarray, np.ndarray]:
    """Compressed rows: `indices[indptr[r]:indptr[r + 1]]` are the columns of row r.

    Parameters
    ----------
    sabi : array_like of int
        Block list (..., R, W); leading axes are flattened in C order, so that row r of head h of batch b is row
        ``(b * H + h) * R + r``.

    Returns
    -------
    indptr : numpy.ndarray
        int64, one more than there are rows.
    indices : numpy.ndarray
        int32, rising within a row.

    Raises
    ------
    TypeError
        Not integers.

    Examples
    --------
    >>> import numpy as np
    >>> from blitz_attn import sabi
    >>> [x.tolist() for x in sabi.to_csr(np.array([[2, 0], [-1, -1], [1, -1]]))]
    [[0, 2, 2, 3], [0, 2, 1]]
    """
    rows = signed(sabi)
    rows = rows.reshape(math.prod(rows.shape[:-1]), rows.shape[-1])
    kept = rows >= 0
    indptr = np.concatenate([[0], np.cumsum(kept.sum(axis=-1))]).astype(np.int64)
    ordered = np.sort(np.where(kept, rows, np.iinfo(np.int64).max), axis=-1)
    return indptr, ordered[ordered < np.iinfo(np.int64).max].astype(np.int32)


def from_csr(
    indptr: Any, indices: Any, lead: Sequence[int] = (1, 1), *, columns: int | None = None, dtype: Any = None, width: int | None = None
) -> np.ndarray:
    """Block list of compressed rows.

    Parameters
    ----------
    indptr : array_like of int
        Rising from 0 to the number of indices; one more entry than there are rows.
    indices : array_like of int
        Columns, row after row.
    lead : sequence of int
        Leading axes (batch, heads) that the rows are split over, in C order.
    columns : int, optional
        Number of key blocks. Default: the least that holds every index.
    dtype, width
        As in `from_block_mask`.

    Returns
    -------
    numpy.ndarray
        (*lead, R, W), columns in the order given.

    Raises
    ------
    ValueError
        `indptr` does not fit `indices`, the rows do not split over `lead`, or an index is out of range.

    Examples
    --------
    >>> from blitz_attn import sabi
    >>> sabi.from_csr([0, 2, 2, 3], [0, 2, 1], lead=(), dtype="int32").tolist()
    [[0, 2], [-1, -1], [1, -1]]
    """
    starts, flat = integers(indptr, "indptr"), integers(indices, "indices")
    if flat.ndim != 1:
        raise ValueError(f"indices: expected one axis, got shape {flat.shape}")
    if starts.ndim != 1 or starts.size < 1 or starts[0] != 0 or starts[-1] != flat.size or (np.diff(starts) < 0).any():
        raise ValueError(f"indptr: expected numbers rising from 0 to {flat.size}, the length of indices, got {shown(starts.tolist())}")
    if flat.min(initial=0) < 0:
        raise ValueError(f"indices: expected columns from 0 on, got {flat.min()}")
    count = _columns(flat, columns, "indices")
    counts = np.diff(starts)
    axes = integers(lead, "lead")
    lead_size = math.prod(axes.tolist()) if axes.ndim == 1 and axes.min(initial=1) > 0 else 0
    if lead_size < 1 or counts.size % lead_size:
        raise ValueError(f"lead: expected axes that divide {counts.size} rows, got {shown(axes.tolist())}")
    width = _width(width, int(counts.max(initial=0)), counts.size)
    rows = np.full((counts.size, width), -1, np.int64)
    rows[np.repeat(np.arange(counts.size), counts), np.arange(flat.size) - np.repeat(starts[:-1], counts)] = flat
    return padded(rows.reshape(*axes, counts.size // lead_size, width), count, dtype)


def to_num_idx(sabi: Any, columns: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Counts and indices, the form of FlexAttention's `kv_num_blocks` and `kv_indices`.

    Parameters
    ----------
    sabi : array_like of int
        Block list (..., R, W).
    columns : int, optional
        Number of key blocks C. Default: the least that holds every entry.

    Returns
    -------
    num : numpy.ndarray
        int32 (..., R): blocks kept.
    idx : numpy.ndarray
        int32 (..., R, C): the kept columns rising, then the others rising, so that every entry is a valid column.

    Raises
    ------
    TypeError, ValueError
        As in `to_block_mask`.

    Examples
    --------
    >>> import numpy as np
    >>> from blitz_attn import sabi
    >>> [x.tolist() for x in sabi.to_num_idx(np.array([[2, 0], [1, -1]]), 3)]
    [[2, 1], [[0, 2, 1], [1, 0, 2]]]
    """
    mask = to_block_mask(sabi, columns)
    return mask.sum(axis=-1).astype(np.int32), np.argsort(~mask, axis=-1, kind="stable").astype(np.int32)


def from_num_idx(num: Any, idx: Any, *, columns: int | None = None, dtype: Any = None) -> np.ndarray:
    """Block list of counts and indices; entries from a row's count on are not looked at.

    Parameters
    ----------
    num : array_like of int
        (..., R): entries of each row that count.
    idx : array_like of int
        (..., R, W): columns.
    columns : int, optional
        Number of key blocks. Default: the least that holds every entry.
    dtype : dtype, optional
        As in `from_block_mask`.

    Returns
    -------
    numpy.ndarray
        (..., R, W') with W' the largest count, at least 1; order kept.

    Raises
    ------
    ValueError
        Shapes that do not belong together, a count beyond W, or a column out of range.

    Examples
    --------
    >>> from blitz_attn import sabi
    >>> sabi.from_num_idx([2, 1], [[0, 2, 1], [1, 0, 2]], dtype="int32").tolist()
    [[0, 2], [1, -1]]
    """
    counts, entries = integers(num, "num"), integers(idx, "idx")
    if entries.shape[:-1] != counts.shape or entries.ndim < 2:
        raise ValueError(f"idx: expected shape {(*counts.shape, 'W')}, got {entries.shape}")
    if counts.min(initial=0) < 0 or counts.max(initial=0) > entries.shape[-1]:
        raise ValueError(f"num: expected counts in 0..{entries.shape[-1]}, got {counts.min()}..{counts.max()}")
    used = np.arange(entries.shape[-1]) < counts[..., None]
    if (entries[used] < 0).any():
        raise ValueError(f"idx: expected columns from 0 on, got {entries[used].min()}")
    rows = np.where(used, entries, -1)[..., : max(1, int(counts.max(initial=0)))]
    return padded(rows, _columns(rows, columns, "idx"), dtype)


# ---- Sets -----------------------------------------------------------------------------------------------------------


def _masks(columns: Any, a: Any, b: Any) -> tuple[np.ndarray, np.ndarray]:
    x, y = signed(a, "a"), signed(b, "b")
    count = max(_columns(x, columns, "a"), _columns(y, columns, "b"))
    one, other = _mask_of(x, count, "a"), _mask_of(y, count, "b")
    try:
        np.broadcast_shapes(one.shape, other.shape)
    except ValueError as error:
        raise ValueError(f"b: expected axes that broadcast with those of a {x.shape}, got {y.shape}") from error
    return one, other


def union(a: Any, b: Any, columns: int | None = None, *, dtype: Any = None) -> np.ndarray:
    """Blocks listed in `a` or `b`.

    Parameters
    ----------
    a, b : array_like of int
        Block lists (..., R, W), of widths that may differ and leading axes that broadcast.
    columns : int, optional
        Number of key blocks. Default: the least that holds every entry.
    dtype : dtype, optional
        As in `from_block_mask`.

    Returns
    -------
    numpy.ndarray
        Block list, columns rising.

    Raises
    ------
    TypeError, ValueError
        As in `to_block_mask`.

    Examples
    --------
    >>> import numpy as np
    >>> from blitz_attn import sabi
    >>> sabi.union(np.array([[2, 0]]), np.array([[1, -1]]), dtype="int32").tolist()
    [[0, 1, 2]]
    """
    x, y = _masks(columns, a, b)
    return from_block_mask(x | y, dtype=dtype)


def intersection(a: Any, b: Any, columns: int | None = None, *, dtype: Any = None) -> np.ndarray:
    """Blocks listed in both `a` and `b`.

    Parameters
    ----------
    a, b, columns, dtype
        As in `union`.

    Returns
    -------
    numpy.ndarray
        As in `union`.

    Raises
    ------
    TypeError, ValueError
        As in `union`.

    Examples
    --------
    >>> import numpy as np
    >>> from blitz_attn import sabi
    >>> sabi.intersection(np.array([[2, 0]]), np.array([[0, 1]]), dtype="int32").tolist()
    [[0]]
    """
    x, y = _masks(columns, a, b)
    return from_block_mask(x & y, dtype=dtype)


def difference(a: Any, b: Any, columns: int | None = None, *, dtype: Any = None) -> np.ndarray:
    """Blocks listed in `a` and not in `b`.

    Parameters
    ----------
    a, b, columns, dtype
        As in `union`.

    Returns
    -------
    numpy.ndarray
        As in `union`.

    Raises
    ------
    TypeError, ValueError
        As in `union`.

    Examples
    --------
    >>> import numpy as np
    >>> from blitz_attn import sabi
    >>> sabi.difference(np.array([[2, 0]]), np.array([[0, 1]]), dtype="int32").tolist()
    [[2]]
    """
    x, y = _masks(columns, a, b)
    return from_block_mask(x & ~y, dtype=dtype)


def complement(a: Any, columns: int, *, dtype: Any = None) -> np.ndarray:
    """Blocks of the grid that `a` does not list.

    Parameters
    ----------
    a : array_like of int
        Block list (..., R, W).
    columns : int
        Number of key blocks.
    dtype : dtype, optional
        As in `from_block_mask`.

    Returns
    -------
    numpy.ndarray
        Block list, columns rising.

    Raises
    ------
    TypeError, ValueError
        As in `to_block_mask`.

    Examples
    --------
    >>> import numpy as np
    >>> from blitz_attn import sabi
    >>> sabi.complement(np.array([[1], [0]]), 3, dtype="int32").tolist()
    [[0, 2], [1, 2]]
    """
    return from_block_mask(~_mask_of(signed(a, "a"), integer(columns, "columns"), "a"), dtype=dtype)


def transpose(a: Any, columns: int, *, dtype: Any = None) -> np.ndarray:
    """For each block of keys, the blocks of queries that list it.

    Parameters
    ----------
    a : array_like of int
        Block list (..., R, W).
    columns : int
        Number of key blocks C.
    dtype : dtype, optional
        As in `from_block_mask`.

    Returns
    -------
    numpy.ndarray
        Block list (..., C, W'), entries in 0..R-1, rising.

    Raises
    ------
    TypeError, ValueError
        As in `to_block_mask`.

    Examples
    --------
    >>> import numpy as np
    >>> from blitz_attn import sabi
    >>> sabi.transpose(np.array([[0, 1], [1, -1]]), 3, dtype="int32").tolist()
    [[0, -1], [0, 1], [-1, -1]]
    """
    return from_block_mask(np.ascontiguousarray(_mask_of(signed(a, "a"), integer(columns, "columns"), "a").swapaxes(-1, -2)), dtype=dtype)


def _any_pool(mask: np.ndarray, factors: tuple[int, int]) -> np.ndarray:
    """True where any element of a cell of `factors` rows and columns is."""
    rows, columns = mask.shape[-2:]
    tall = np.logical_or.reduceat(mask, np.arange(0, rows, factors[0]), axis=-2)
    return np.logical_or.reduceat(tall, np.arange(0, columns, factors[1]), axis=-1)


def coarsen(a: Any, factors: Sequence[int], columns: int, *, dtype: Any = None) -> np.ndarray:
    """Least list over larger blocks that covers `a`.

    Parameters
    ----------
    a : array_like of int
        Block list (..., R, W).
    factors : (int, int)
        Old blocks of queries and of keys that make a new one.
    columns : int
        Number of key blocks of `a`.
    dtype : dtype, optional
        As in `from_block_mask`.

    Returns
    -------
    numpy.ndarray
        Block list (..., ceil(R / factors[0]), W').

    Raises
    ------
    TypeError, ValueError
        As in `to_block_mask`, and factors below 1.

    Examples
    --------
    >>> import numpy as np
    >>> from blitz_attn import sabi
    >>> sabi.coarsen(np.array([[0], [3], [2]]), (2, 2), 4, dtype="int32").tolist()
    [[0, 1], [1, -1]]
    """
    mask = _mask_of(signed(a, "a"), integer(columns, "columns"), "a")
    return from_block_mask(_any_pool(mask, two_integers(factors, "factors", _TWO_FACTORS, least=1)), dtype=dtype)


def refine(a: Any, factors: Sequence[int], rows: int, columns: int, *, dtype: Any = None) -> np.ndarray:
    """The same tokens as a list over smaller blocks.

    Parameters
    ----------
    a : array_like of int
        Block list (..., R, W).
    factors : (int, int)
        New blocks of queries and of keys that an old one splits into.
    rows, columns : int
        Numbers of blocks of queries and keys of the result, which drop what lies beyond the last token.
    dtype : dtype, optional
        As in `from_block_mask`.

    Returns
    -------
    numpy.ndarray
        Block list (..., rows, W').

    Raises
    ------
    ValueError
        `rows` or `columns` do not fit `a` and `factors`.

    Examples
    --------
    >>> import numpy as np
    >>> from blitz_attn import sabi
    >>> sabi.refine(np.array([[1], [0]]), (2, 2), 3, 4, dtype="int32").tolist()
    [[2, 3], [2, 3], [0, 1]]
    """
    tall, wide = two_integers(factors, "factors", _TWO_FACTORS, least=1)
    rows, columns = (count_of(n, name, MOST_BLOCKS, least=1) for n, name in ((rows, "rows"), (columns, "columns")))
    mask = _mask_of(signed(a, "a"), blocks_of(columns, wide), "a")
    if blocks_of(rows, tall) != mask.shape[-2]:
        raise ValueError(f"rows: expected {(mask.shape[-2] - 1) * tall + 1}..{mask.shape[-2] * tall}, got {rows}")
    if rows * columns * math.prod(mask.shape[:-2]) > MOST_BLOCKS:
        raise ValueError(f"rows: expected a grid of at most {MOST_BLOCKS} blocks, got {rows} x {columns}")
    tall_mask = np.repeat(mask, min(tall, rows), axis=-2)[..., :rows, :]
    return from_block_mask(np.repeat(tall_mask, min(wide, columns), axis=-1)[..., :columns], dtype=dtype)
