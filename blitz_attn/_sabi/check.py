"""Checks of a block list against a problem. Public through `blitz_attn.sabi`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .._arrays import integer, pieces
from .block_list import block_shape_for, listed, shape_of
from .lists import PAD_UINT16, checked_shape, sides_of, signed, with_four_axes

if TYPE_CHECKING:
    from .._types import ArrayLike

__all__ = ["check"]


def check(
    sabi: ArrayLike,
    s_q: int,
    s_kv: int | None = None,
    block_shape: Sequence[int] | None = None,
    *,
    batch: int | None = None,
    heads: int | None = None,
    kv_heads: int | None = None,
) -> np.ndarray:
    """Check a block list against a problem, as the attention operations do.

    Parameters
    ----------
    sabi : array_like of int
        Block list of four axes: B or 1; H, Hkv or 1; R; W. The first axis, or the first two, may be missing: they then count as 1.
    s_q, s_kv : int
        Numbers of query and key tokens; `s_kv` defaults to `s_q`.
    block_shape : (int, int), optional
        Number of tokens per block of queries and of keys, at least 1 each. Default: the block shape that the list knows; (128, 128) for
        plain arrays.
    batch, heads : int, optional
        Sizes that the leading axes must have unless they are 1. A size that is left out is not checked.
    kv_heads : int, optional
        Another size that the axis of heads may have: the list then has rows for each key/value head.

    Returns
    -------
    numpy.ndarray
        The list as int64, with four axes and with -1 from each row's first pad on.

    Raises
    ------
    TypeError
        `sabi` does not hold integers.
    ValueError
        A shape that does not fit, a column out of range, or a column listed twice in a row.

    Examples
    --------
    >>> import numpy as np
    >>> from blitz_attn import sabi
    >>> sabi.check(np.array([[[[1, 0, -1], [1, -1, 0]]]]), 256).tolist()
    [[[[1, 0, -1], [1, -1, -1]]]]
    >>> sabi.check(np.array([[[[1, 0], [2, -1]]]]), 256)
    Traceback (most recent call last):
    ...
    ValueError: sabi: expected block columns from 0 to 1, or a pad, got 2 at [0, 0, 1, 0]
    """
    shape = block_shape_for(sabi, block_shape, (128, 128))
    rows = with_four_axes(signed(sabi))
    count, columns = sides_of(s_q, s_kv, shape)
    _check_axes(rows.shape, count, integer(s_q, "s_q"), checked_shape(shape)[0], batch, heads, kv_heads)
    for cut in pieces(rows.shape):
        bad = _bad_entries(rows[cut], columns)
        if bad is None:
            continue
        where = np.unravel_index(int(bad.argmax()), bad.shape)
        column, at = int(rows[cut][where]), [int(n) + axis.start for n, axis in zip(where, cut, strict=True)]
        if column >= columns:
            hint = " (65535 is a pad in uint16 alone)" if column == PAD_UINT16 else ""
            raise ValueError(f"sabi: expected block columns from 0 to {columns - 1}, or a pad, got {column} at {at}{hint}")
        raise ValueError(f"sabi: expected each block column once per row, got {column} again at {at}")
    return listed(rows, shape_of(sabi))


def _bad_entries(rows: np.ndarray, columns: int) -> np.ndarray | None:
    """A mask of the entries that are out of range or have occurred in their row before; None if there are none."""
    bad = rows >= columns
    ordered = np.sort(rows, axis=-1)
    if ((ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)).any():
        order = np.argsort(rows, axis=-1, kind="stable")
        again = np.zeros(rows.shape, np.bool_)
        again[..., 1:] = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)
        np.put_along_axis(bad, order, np.take_along_axis(bad, order, -1) | again, -1)
    return bad if bad.any() else None


def _check_axes(shape: tuple[int, ...], count: int, queries: int, block_q: int, batch: Any, heads: Any, kv_heads: Any) -> None:
    """Refuses a list whose axes do not fit a problem, with the core's sentence. A size that is None is not checked."""
    own = None if batch is None else {integer(batch, "batch"), 1}
    of_heads = None
    if heads is not None:
        of_heads = [integer(heads, "heads"), *(() if kv_heads is None else (integer(kv_heads, "kv_heads"),)), 1]
    fits = len(shape) == 4 and (own is None or shape[0] in own) and (of_heads is None or shape[1] in of_heads) and shape[2] == count
    if not fits:
        entries = "B or 1" if own is None else _either(sorted(own, reverse=True))
        lists = "H, Hkv or 1" if of_heads is None else _either(of_heads)
        rows = f"{count} rows = ceil({queries} queries / block_shape[0] = {block_q})"
        raise ValueError(f"sabi: expected shape ({entries}, {lists}, {count}, W), with {rows}, got {shape}")


def _either(numbers: list[int]) -> str:
    """The numbers that are allowed, as a sentence lists them."""
    *others, last = dict.fromkeys(numbers)
    return f"{', '.join(map(str, others))} or {last}" if others else str(last)
