"""Block lists to and from boolean masks, compressed rows, and counts with indices. Public through `blitz_attn.sabi`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from .._arrays import array as array_of
from .._arrays import falls, integers, pieces
from .._sentences import shown
from .block_list import BlockList, block_shape_for, listed
from .lists import (
    MOST_BLOCKS,
    checked_shape,
    columns_of,
    counts_of,
    filled,
    grid_of,
    largest_of,
    padded,
    result_dtype,
    signed,
    tokens_of,
    width_of,
)

if TYPE_CHECKING:
    from .._types import ArrayLike, DType

__all__ = [
    "from_block_mask",
    "from_csr",
    "from_num_idx",
    "from_token_mask",
    "kv_ranges_from_token_mask",
    "to_block_mask",
    "to_csr",
    "to_num_idx",
    "to_token_mask",
]


def _booleans(mask: Any) -> np.ndarray:
    array = array_of(mask, "mask", "booleans")
    if array.dtype != np.bool_:
        raise TypeError(f"mask: expected booleans, got {array.dtype}")
    if array.ndim < 2:
        raise ValueError(f"mask: expected shape (..., rows, columns), got {array.shape}")
    return array


def mask_of(rows: np.ndarray, columns: Any, name: str) -> np.ndarray:
    """`to_block_mask` of a list that `signed` has read. `name` is for errors."""
    count = columns_of(rows, columns, name)
    if count * (rows.size // max(1, rows.shape[-1])) > MOST_BLOCKS:
        raise ValueError(f"columns: expected so few that the mask has at most {MOST_BLOCKS} blocks, got {count}")
    mask = np.empty((*rows.shape[:-1], count), bool)
    for at in pieces(mask.shape):
        part = np.zeros((*mask[at].shape[:-1], count + 1), bool)  # the last column takes the pads
        np.put_along_axis(part, rows[at[:-1]], True, axis=-1)
        mask[at] = part[..., :-1]
    return mask


def any_pool(mask: np.ndarray, factors: tuple[int, int]) -> np.ndarray:
    """A mask with one element for each cell of `factors` rows and columns, which is True where any element of the cell is True."""
    rows, columns = mask.shape[-2:]
    tall = np.empty((*mask.shape[:-2], -(-rows // factors[0]), columns), bool)
    for n in range(tall.shape[-2]):  # reduceat of booleans along this axis takes up to a hundred times as long
        mask[..., n * factors[0] : (n + 1) * factors[0], :].any(axis=-2, out=tall[..., n, :])
    pooled = np.empty((*tall.shape[:-1], -(-columns // factors[1])), bool)
    for at in pieces(tall.shape):
        pooled[at[:-1]] = np.logical_or.reduceat(tall[at], np.arange(0, columns, factors[1]), axis=-1)
    return pooled


def spread(mask: np.ndarray, factors: tuple[int, int], rows: int, columns: int) -> np.ndarray:
    """A mask of `rows` rows and `columns` columns: `mask` with each element repeated as a cell of `factors` rows and columns, cut to this
    size."""
    made = np.empty((*mask.shape[:-2], rows, columns), bool)
    own = np.arange(rows) // factors[0]
    for at in pieces(made.shape):
        made[at] = np.repeat(mask[at[:-2]][..., own[at[-2]], :], min(factors[1], columns), axis=-1)[..., :columns]
    return made


def to_block_mask(sabi: ArrayLike, columns: int | None = None) -> np.ndarray:
    """Boolean mask over blocks, True where a block is kept.

    Parameters
    ----------
    sabi : array_like of int
        Block list (..., R, W).
    columns : int, optional
        Number of key blocks C. Default: one more than the largest entry.

    Returns
    -------
    numpy.ndarray
        bool (..., R, C).

    Raises
    ------
    TypeError
        An argument does not hold integers.
    ValueError
        An entry is not below `columns`.

    Examples
    --------
    >>> import numpy as np
    >>> from blitz_attn import sabi
    >>> sabi.to_block_mask(np.array([[2, 0], [-1, -1]]), 3).astype(int).tolist()
    [[1, 0, 1], [0, 0, 0]]
    """
    return mask_of(signed(sabi), columns, "sabi")


@overload
def from_block_mask(mask: ArrayLike, *, block_shape: Sequence[int], dtype: DType | None = None, width: int | None = None) -> BlockList: ...
@overload
def from_block_mask(
    mask: ArrayLike, *, dtype: DType | None = None, width: int | None = None, block_shape: Sequence[int] | None = None
) -> np.ndarray: ...
def from_block_mask(
    mask: ArrayLike, *, dtype: DType | None = None, width: int | None = None, block_shape: Sequence[int] | None = None
) -> np.ndarray:
    """Block list of a boolean mask over blocks.

    Parameters
    ----------
    mask : array_like of bool
        (..., R, C), True where a block is kept.
    dtype : dtype, optional
        uint16, int16, int32 or int64. Default: int32.
    width : int, optional
        Width W of the list. Default: the number of blocks in the fullest row, but at least 1.
    block_shape : (int, int), optional
        Number of tokens per block of queries and of keys, which the result then knows (see `BlockList`). Default: the result is a plain
        array, which calls take together with a `block_shape`.

    Returns
    -------
    numpy.ndarray
        (..., R, W), columns rising, padded with -1 (65535 in uint16).

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
    array, shape = _booleans(mask), None if block_shape is None else checked_shape(block_shape)
    counts = np.empty(array.shape[:-1], np.int64)
    for at in pieces(array.shape):
        counts[at[:-1]] = array[at].sum(axis=-1)
    wide = width_of(width, int(counts.max(initial=0)), counts.size)
    rows = np.empty((*counts.shape, wide), result_dtype(array.shape[-1], dtype))
    pad = np.array(-1).astype(rows.dtype)
    for at in pieces((*counts.shape, max(wide, array.shape[-1]))):
        part = rows[at[:-1]]
        part[...] = pad
        part[np.arange(wide) < counts[at[:-1]][..., None]] = np.nonzero(array[at[:-1]])[-1]
    return listed(rows, shape)


def to_token_mask(sabi: ArrayLike, s_q: int, s_kv: int | None = None, block_shape: Sequence[int] | None = None) -> np.ndarray:
    """Boolean mask over tokens, True where a query attends to a key. It has s_q * s_kv elements per head, so it is for small problems.

    Parameters
    ----------
    sabi : array_like of int
        Block list (..., R, W).
    s_q, s_kv : int
        Numbers of query and key tokens; `s_kv` defaults to `s_q`.
    block_shape : (int, int), optional
        Number of tokens per block of queries and of keys, at least 1 each. Default: the block shape that the list knows; (128, 128) for
        plain arrays.

    Returns
    -------
    numpy.ndarray
        bool (..., s_q, s_kv).

    Raises
    ------
    TypeError
        `sabi`, `s_q`, `s_kv` or `block_shape` do not hold integers.
    ValueError
        Rows or columns that do not fit the sizes.

    Examples
    --------
    >>> import numpy as np
    >>> from blitz_attn import sabi
    >>> sabi.to_token_mask(np.array([[0], [1]]), 3, 3, (2, 2)).astype(int).tolist()
    [[1, 1, 0], [1, 1, 0], [0, 0, 1]]
    """
    block_shape = block_shape_for(sabi, block_shape, (128, 128))
    count, columns = grid_of(s_q, s_kv, block_shape)
    (block_q, block_kv), (s_q, s_kv) = checked_shape(block_shape), tokens_of(s_q, s_kv)
    mask = to_block_mask(sabi, columns)
    if mask.shape[-2] != count:
        raise ValueError(f"sabi: expected {count} rows for {s_q} queries in blocks of {block_q}, got {mask.shape[-2]}")
    for name, size, other in (("s_q", s_q, s_kv), ("s_kv", s_kv, s_q)):
        if size > MOST_BLOCKS // other:
            raise ValueError(f"{name}: expected tokens whose mask has at most {MOST_BLOCKS} elements, got {s_q} x {s_kv}")
    return spread(mask, (block_q, block_kv), s_q, s_kv)


def from_token_mask(
    mask: ArrayLike, block_shape: Sequence[int] = (128, 128), *, dtype: DType | None = None, width: int | None = None
) -> BlockList:
    """Least block list that covers a boolean mask over tokens.

    Parameters
    ----------
    mask : array_like of bool
        (..., s_q, s_kv), True where a query attends to a key.
    block_shape : (int, int)
        Number of tokens per block of queries and of keys, at least 1 each.
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
    return from_block_mask(any_pool(_booleans(mask), checked_shape(block_shape)), dtype=dtype, width=width, block_shape=block_shape)


_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1)  # the bits of each byte, the highest first
_FIRST_BIT, _LAST_BIT, _BIT_COUNT = _BITS.argmax(axis=1), 7 - _BITS[:, ::-1].argmax(axis=1), _BITS.sum(axis=1, dtype=np.int64)


def runs_and_counts(seen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Two results for the rows of a mask, bool (..., keys). The run of a row, int64 (..., 2), is the first key that is seen and the place
    after the last such key, or 0 and 0 where no key is seen. The count of a row is the number of keys that are seen. If the count is less
    than the length of the run, the run has gaps."""
    runs, counts = np.zeros((*seen.shape[:-1], 2), np.int64), np.zeros(seen.shape[:-1], np.int64)
    for at in pieces(seen.shape) if seen.shape[-1] else ():
        eights = np.packbits(seen[at], axis=-1)
        some = eights != 0
        first, last = some.argmax(axis=-1), eights.shape[-1] - 1 - some[..., ::-1].argmax(axis=-1)
        of_first, of_last = (np.take_along_axis(eights, x[..., None], axis=-1)[..., 0] for x in (first, last))
        own, count = runs[at[:-1]], _BIT_COUNT[eights].sum(axis=-1)
        own[..., 0], own[..., 1] = 8 * first + _FIRST_BIT[of_first], 8 * last + _LAST_BIT[of_last] + 1
        own[count == 0] = 0
        counts[at[:-1]] = count
    return runs, counts


def listed_in_runs(listed: np.ndarray, runs: np.ndarray, shape: tuple[int, int], s_kv: int) -> np.ndarray:
    """int64 (..., s_q): for each query, how many keys of its run, in `runs` (..., s_q, 2), lie in the blocks of its row of `listed`, bool
    (..., R, C). By both rules together, a query sees exactly these keys. An axis of size 1 in `runs` fits any size in `listed`."""
    lead, s_q, (block_q, block_kv) = listed.shape[:-2], runs.shape[-2], shape
    runs = np.broadcast_to(runs, (*lead, s_q, 2))
    counts = np.empty((*lead, s_q), np.int64)
    sizes = np.minimum(block_kv, s_kv - np.arange(listed.shape[-1]) * block_kv)
    for at in pieces(listed.shape):
        rows = at[-2]
        queries = np.arange(rows.start * block_q, min(rows.stop * block_q, s_q))
        for n in np.ndindex(tuple(x.stop - x.start for x in at[:-2])):
            head = tuple(x.start + m for x, m in zip(at[:-2], n, strict=True))
            kept = np.append(listed[(*head, rows)], np.zeros((rows.stop - rows.start, 1), bool), axis=1)  # a column after the last key
            before = np.append(np.zeros((len(kept), 1), np.int64), np.cumsum(kept[:, :-1] * sizes, axis=1), axis=1)
            column, inside = np.divmod(runs[(*head, queries)], block_kv)
            own = (queries // block_q - rows.start)[:, None]
            up_to = before[own, column] + kept[own, column] * inside  # keys of listed blocks before each end of the run
            counts[(*head, queries)] = np.maximum(up_to[:, 1] - up_to[:, 0], 0)
    return counts


def kv_ranges_from_token_mask(mask: ArrayLike, block_shape: Sequence[int] | None = None) -> np.ndarray:
    """The `kv_ranges` of `block_sparse_attention` that hide exactly the keys that a boolean mask over tokens hides.

    Parameters
    ----------
    mask : array_like of bool
        (..., s_q, s_kv), True where a query attends to a key. The keys of each row must be a run, that is, without a gap between them.
    block_shape : (int, int), optional
        Needed if attention gets the ranges together with the list ``from_token_mask(mask, block_shape)``. Blocks that this list leaves out
        may then be gaps in a run. Default: there is no list.

    Returns
    -------
    numpy.ndarray
        int32 (..., s_q, 2): the first key of each query and the place after its last key; 0 and 0 for a query without keys. The `kv_ranges`
        of attention have no axis of heads: give ``mask[:, 0]`` of a mask ``(B, 1, s_q, s_kv)``.

    Raises
    ------
    TypeError
        `mask` is not boolean.
    ValueError
        A row whose keys are not a run, or a mask of fewer than two axes.

    See Also
    --------
    from_token_mask : the list of blocks.

    Examples
    --------
    >>> import numpy as np
    >>> from blitz_attn import sabi
    >>> prefix_lm = np.tri(4, dtype=bool) | (np.arange(4) < 2)  # the first two tokens see each other
    >>> sabi.kv_ranges_from_token_mask(prefix_lm).tolist()
    [[0, 2], [0, 2], [0, 3], [0, 4]]
    """
    seen = _booleans(mask)
    s_kv = seen.shape[-1]
    runs, counts = runs_and_counts(seen)
    ranges = runs.astype(np.int32)
    if seen.size == 0:
        return ranges
    gaps = counts != runs[..., 1] - runs[..., 0]
    if block_shape is not None and gaps.any():
        shape = checked_shape(block_shape)
        gaps = counts != listed_in_runs(any_pool(seen, shape), runs, shape, s_kv)
    if gaps.any():
        place = ", ".join(str(n) for n in np.argwhere(gaps)[0])
        raise ValueError(f"mask: expected rows whose keys are a run, got a gap in row [{place}]")
    return ranges


def to_csr(sabi: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    """Compressed rows: `indices[indptr[r]:indptr[r + 1]]` are the columns of row r.

    Parameters
    ----------
    sabi : array_like of int
        Block list (..., R, W); leading axes are flattened in C order, so that row r of head h of batch b is row
        ``(b * H + h) * R + r``.

    Returns
    -------
    indptr : numpy.ndarray
        int64, with one entry more than there are rows.
    indices : numpy.ndarray
        int32, rising within a row.

    Raises
    ------
    TypeError
        An argument does not hold integers.
    ValueError
        A column of 2**31 or more.

    Examples
    --------
    >>> import numpy as np
    >>> from blitz_attn import sabi
    >>> [x.tolist() for x in sabi.to_csr(np.array([[2, 0], [-1, -1], [1, -1]]))]
    [[0, 2, 2, 3], [0, 2, 1]]
    """
    rows = signed(sabi)
    most = largest_of(rows)
    if most >= 2**31:
        raise ValueError(f"sabi: expected columns below 2**31, got {most}")
    rows = rows.reshape(math.prod(rows.shape[:-1]), rows.shape[-1])
    indptr = np.concatenate([[0], np.cumsum(counts_of(rows))]).astype(np.int64)
    indices = np.empty(indptr[-1], np.int32)
    for at, _ in pieces(rows.shape):
        ordered = np.sort(rows[at], axis=-1)
        indices[indptr[at.start] : indptr[at.stop]] = ordered[ordered >= 0]
    return indptr, indices


@overload
def from_csr(
    indptr: ArrayLike, indices: ArrayLike, lead: Sequence[int] = (1, 1), *, block_shape: Sequence[int], columns: int | None = None,
    dtype: DType | None = None, width: int | None = None,
) -> BlockList: ...  # fmt: skip
@overload
def from_csr(
    indptr: ArrayLike, indices: ArrayLike, lead: Sequence[int] = (1, 1), *, columns: int | None = None, dtype: DType | None = None,
    width: int | None = None, block_shape: Sequence[int] | None = None,
) -> np.ndarray: ...  # fmt: skip
def from_csr(
    indptr: ArrayLike,
    indices: ArrayLike,
    lead: Sequence[int] = (1, 1),
    *,
    columns: int | None = None,
    dtype: DType | None = None,
    width: int | None = None,
    block_shape: Sequence[int] | None = None,
) -> np.ndarray:
    """Block list of compressed rows.

    Parameters
    ----------
    indptr : array_like of int
        Integers of any size, signed or not, that rise from 0 to the number of indices. There is one entry more than there are rows.
    indices : array_like of int
        Columns, row after row, as integers of any size.
    lead : sequence of int
        Leading axes (batch, heads) that the rows are split over, in C order.
    columns : int, optional
        Number of key blocks. Default: one more than the largest index.
    dtype, width, block_shape
        As in `from_block_mask`.

    Returns
    -------
    numpy.ndarray
        ``(*lead, R, W)``, columns in the order given.

    Raises
    ------
    TypeError
        An argument does not hold integers.
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
    if starts.ndim != 1 or starts.size < 1 or starts[0] != 0 or starts[-1] != flat.size or falls(starts).any():
        raise ValueError(f"indptr: expected numbers rising from 0 to {flat.size}, the length of indices, got {shown(starts.tolist())}")
    smallest = min(int(flat[at].min(initial=0)) for at, _ in pieces((flat.size, 1)))
    if smallest < 0:
        raise ValueError(f"indices: expected columns from 0 on, got {smallest}")
    count = columns_of(flat, columns, "indices")
    counts = np.diff(starts)
    axes = integers(lead, "lead")
    lead_size = math.prod(axes.tolist()) if axes.ndim == 1 and axes.min(initial=1) > 0 else 0
    if lead_size < 1 or counts.size % lead_size:
        raise ValueError(f"lead: expected axes that divide {counts.size} rows, got {shown(axes.tolist())}")
    rows = filled(counts, flat, width)
    made = padded(rows.reshape(*axes, counts.size // lead_size, rows.shape[1]), count, dtype)
    return listed(made, None if block_shape is None else checked_shape(block_shape))


def to_num_idx(sabi: ArrayLike, columns: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Counts and indices, the form of FlexAttention's `kv_num_blocks` and `kv_indices`.

    Parameters
    ----------
    sabi : array_like of int
        Block list (..., R, W).
    columns : int, optional
        Number of key blocks C. Default: one more than the largest entry.

    Returns
    -------
    num : numpy.ndarray
        int32 (..., R): number of blocks kept.
    idx : numpy.ndarray
        int32 (..., R, C): the kept columns in rising order, then the other columns in rising order, so that every entry is a valid column.

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
    num, idx = np.empty(mask.shape[:-1], np.int32), np.empty(mask.shape, np.int32)
    for at in pieces(mask.shape):
        num[at[:-1]] = mask[at].sum(axis=-1)
        idx[at] = np.argsort(~mask[at], axis=-1, kind="stable")
    return num, idx


@overload
def from_num_idx(
    num: ArrayLike, idx: ArrayLike, *, block_shape: Sequence[int], columns: int | None = None, dtype: DType | None = None
) -> BlockList: ...
@overload
def from_num_idx(
    num: ArrayLike, idx: ArrayLike, *, columns: int | None = None, dtype: DType | None = None, block_shape: Sequence[int] | None = None
) -> np.ndarray: ...
def from_num_idx(
    num: ArrayLike, idx: ArrayLike, *, columns: int | None = None, dtype: DType | None = None, block_shape: Sequence[int] | None = None
) -> np.ndarray:
    """Block list of counts and indices; entries from a row's count on are ignored.

    Parameters
    ----------
    num : array_like of int
        (..., R): number of entries of each row that are used.
    idx : array_like of int
        (..., R, W): columns.
    columns : int, optional
        Number of key blocks. Default: one more than the largest entry.
    dtype, block_shape
        As in `from_block_mask`.

    Returns
    -------
    numpy.ndarray
        (..., R, W'), where W' is the largest count, but at least 1. Entries keep their order.

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
    wide, smallest = min(entries.shape[-1], max(1, int(counts.max(initial=0)))), 0
    rows = np.empty((*counts.shape, wide), np.int64)
    for at in pieces(entries.shape):
        own = entries[at][..., :wide]
        used = np.arange(wide) < counts[at[:-1]][..., None]
        smallest = min(smallest, int(own[used].min(initial=0)))
        rows[at[:-1]] = np.where(used, own, -1)
    if smallest < 0:
        raise ValueError(f"idx: expected columns from 0 on, got {smallest}")
    made = padded(rows, columns_of(rows, columns, "idx"), dtype)
    return listed(made, None if block_shape is None else checked_shape(block_shape))
