"""Set operations on block lists, and block lists over other grids. Public through `blitz_attn.sabi`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from .._arrays import integer, pieces
from .block_list import BlockList, BlockShape, common_shape, listed, of_shape, shape_of
from .convert import any_pool, from_block_mask, mask_of, spread
from .lists import MOST_BLOCKS, blocks_of, columns_of, count_of, signed, two_integers

if TYPE_CHECKING:
    from .._types import ArrayLike, DType

__all__ = [
    "coarsen",
    "complement",
    "difference",
    "intersection",
    "refine",
    "transpose",
    "union",
]

_TWO_FACTORS = "two positive numbers"


def _combined(rule: np.ufunc, columns: Any, a: Any, b: Any, dtype: Any) -> np.ndarray:
    """The list of the blocks for which ``rule(listed in a, listed in b)`` is true."""
    shape_known = common_shape((a, b))
    x, y = signed(a, "a"), signed(b, "b")
    count = max(columns_of(x, columns, "a"), columns_of(y, columns, "b"))
    one, other = mask_of(x, count, "a"), mask_of(y, count, "b")
    try:
        shape = np.broadcast_shapes(one.shape, other.shape)
    except ValueError as error:
        raise ValueError(f"b: expected axes that broadcast with a's {x.shape}, got {y.shape}") from error
    one, other, made = np.broadcast_to(one, shape), np.broadcast_to(other, shape), np.empty(shape, bool)
    for at in pieces(shape):
        rule(one[at], other[at], out=made[at])
    return listed(from_block_mask(made, dtype=dtype), shape_known)


@overload
def union(a: BlockList, b: ArrayLike, columns: int | None = None, *, dtype: DType | None = None) -> BlockList: ...
@overload
def union(a: ArrayLike, b: BlockList, columns: int | None = None, *, dtype: DType | None = None) -> BlockList: ...
@overload
def union(a: ArrayLike, b: ArrayLike, columns: int | None = None, *, dtype: DType | None = None) -> np.ndarray: ...
def union(a: ArrayLike, b: ArrayLike, columns: int | None = None, *, dtype: DType | None = None) -> np.ndarray:
    """Blocks listed in `a` or `b`.

    Parameters
    ----------
    a, b : array_like of int
        Block lists (..., R, W). Their widths may differ, and their leading axes broadcast.
    columns : int, optional
        Number of key blocks. Default: one more than the largest entry.
    dtype : dtype, optional
        As in `from_block_mask`.

    Returns
    -------
    numpy.ndarray
        Block list with rising columns.

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
    return _combined(np.logical_or, columns, a, b, dtype)


@overload
def intersection(a: BlockList, b: ArrayLike, columns: int | None = None, *, dtype: DType | None = None) -> BlockList: ...
@overload
def intersection(a: ArrayLike, b: BlockList, columns: int | None = None, *, dtype: DType | None = None) -> BlockList: ...
@overload
def intersection(a: ArrayLike, b: ArrayLike, columns: int | None = None, *, dtype: DType | None = None) -> np.ndarray: ...
def intersection(a: ArrayLike, b: ArrayLike, columns: int | None = None, *, dtype: DType | None = None) -> np.ndarray:
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
    return _combined(np.logical_and, columns, a, b, dtype)


@overload
def difference(a: BlockList, b: ArrayLike, columns: int | None = None, *, dtype: DType | None = None) -> BlockList: ...
@overload
def difference(a: ArrayLike, b: BlockList, columns: int | None = None, *, dtype: DType | None = None) -> BlockList: ...
@overload
def difference(a: ArrayLike, b: ArrayLike, columns: int | None = None, *, dtype: DType | None = None) -> np.ndarray: ...
def difference(a: ArrayLike, b: ArrayLike, columns: int | None = None, *, dtype: DType | None = None) -> np.ndarray:
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
    return _combined(np.greater, columns, a, b, dtype)


@overload
def complement(a: BlockList, columns: int, *, dtype: DType | None = None) -> BlockList: ...
@overload
def complement(a: ArrayLike, columns: int, *, dtype: DType | None = None) -> np.ndarray: ...
def complement(a: ArrayLike, columns: int, *, dtype: DType | None = None) -> np.ndarray:
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
        Block list with rising columns.

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
    mask = mask_of(signed(a, "a"), integer(columns, "columns"), "a")
    for at in pieces(mask.shape):
        np.logical_not(mask[at], out=mask[at])
    return listed(from_block_mask(mask, dtype=dtype), shape_of(a))


@overload
def transpose(a: BlockList, columns: int, *, dtype: DType | None = None) -> BlockList: ...
@overload
def transpose(a: ArrayLike, columns: int, *, dtype: DType | None = None) -> np.ndarray: ...
def transpose(a: ArrayLike, columns: int, *, dtype: DType | None = None) -> np.ndarray:
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
        Block list (..., C, W') with rising entries from 0 to R - 1.

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
    turned = mask_of(signed(a, "a"), integer(columns, "columns"), "a").swapaxes(-1, -2)
    mask = np.empty(turned.shape, bool)
    for at in pieces(mask.shape):
        mask[at] = turned[at]
    return listed(from_block_mask(mask, dtype=dtype), of_shape(shape_of(a), lambda queries, keys: (keys, queries)))


@overload
def coarsen(a: BlockList, factors: Sequence[int], columns: int, *, dtype: DType | None = None) -> BlockList: ...
@overload
def coarsen(a: ArrayLike, factors: Sequence[int], columns: int, *, dtype: DType | None = None) -> np.ndarray: ...
def coarsen(a: ArrayLike, factors: Sequence[int], columns: int, *, dtype: DType | None = None) -> np.ndarray:
    """Least list over larger blocks that covers `a`.

    Parameters
    ----------
    a : array_like of int
        Block list (..., R, W).
    factors : (int, int)
        Numbers of old blocks of queries and of keys that make one new block.
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
    mask = mask_of(signed(a, "a"), integer(columns, "columns"), "a")
    tall, wide = two_integers(factors, "factors", _TWO_FACTORS, least=1)
    made = from_block_mask(any_pool(mask, (tall, wide)), dtype=dtype)
    return listed(made, of_shape(shape_of(a), lambda queries, keys: (queries * tall, keys * wide)))


@overload
def refine(a: BlockList, factors: Sequence[int], rows: int, columns: int, *, dtype: DType | None = None) -> BlockList: ...
@overload
def refine(a: ArrayLike, factors: Sequence[int], rows: int, columns: int, *, dtype: DType | None = None) -> np.ndarray: ...
def refine(a: ArrayLike, factors: Sequence[int], rows: int, columns: int, *, dtype: DType | None = None) -> np.ndarray:
    """A list over smaller blocks that keeps the same tokens.

    Parameters
    ----------
    a : array_like of int
        Block list (..., R, W).
    factors : (int, int)
        Numbers of new blocks of queries and of keys that one old block splits into.
    rows, columns : int
        Numbers of blocks of queries and of keys in the result; blocks beyond the last token are dropped.
    dtype : dtype, optional
        As in `from_block_mask`.

    Returns
    -------
    numpy.ndarray
        Block list (..., rows, W').

    Raises
    ------
    TypeError
        `a`, `factors`, `rows` or `columns` do not hold integers.
    ValueError
        `factors` are below 1 or do not divide the block shape of `a`, `rows` or `columns` do not fit `a`, or the new grid has more than
        2**28 blocks over all heads.

    Examples
    --------
    >>> import numpy as np
    >>> from blitz_attn import sabi
    >>> sabi.refine(np.array([[1], [0]]), (2, 2), 3, 4, dtype="int32").tolist()
    [[2, 3], [2, 3], [0, 1]]
    """
    tall, wide = two_integers(factors, "factors", _TWO_FACTORS, least=1)

    def divided(queries: int, keys: int) -> BlockShape:
        if queries % tall or keys % wide:
            raise ValueError(f"factors: expected divisors of a's block shape {(queries, keys)}, got {(tall, wide)}")
        return queries // tall, keys // wide

    shape = of_shape(shape_of(a), divided)
    rows, columns = (count_of(n, name, MOST_BLOCKS, least=1) for n, name in ((rows, "rows"), (columns, "columns")))
    mask = mask_of(signed(a, "a"), blocks_of(columns, wide), "a")
    if blocks_of(rows, tall) != mask.shape[-2]:
        raise ValueError(f"rows: expected {(mask.shape[-2] - 1) * tall + 1}..{mask.shape[-2] * tall}, got {rows}")
    if rows * columns * math.prod(mask.shape[:-2]) > MOST_BLOCKS:
        raise ValueError(f"rows: expected a grid of at most {MOST_BLOCKS} blocks, got {rows} x {columns}")
    return listed(from_block_mask(spread(mask, (tall, wide), rows, columns), dtype=dtype), shape)
