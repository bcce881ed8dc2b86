"""Measures and a text picture of block lists. Public through `blitz_attn.sabi`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np

from .._arrays import flag
from .._float_mode import in_usual_mode
from .convert import to_block_mask
from .lists import at_least_one, columns_of, counts_of, signed

if TYPE_CHECKING:
    from .._types import ArrayLike

__all__ = [
    "balance",
    "counts",
    "density",
    "picture",
    "sparsity",
]


def counts(sabi: ArrayLike) -> np.ndarray:
    """Number of blocks kept in each row.

    Parameters
    ----------
    sabi : array_like of int
        Block list (..., R, W).

    Returns
    -------
    numpy.ndarray
        int64 (..., R).

    Raises
    ------
    TypeError, ValueError
        `sabi` is not an integer array of at least two axes.

    Examples
    --------
    >>> import numpy as np
    >>> from blitz_attn import sabi
    >>> sabi.counts(np.array([[0, 1], [1, -1]])).tolist()
    [2, 1]
    """
    return counts_of(signed(sabi))


@in_usual_mode
def _kept_share(sabi: Any, columns: int, per_head: bool) -> Any:
    columns, per_head = at_least_one(columns, "columns"), flag(per_head, "per_head")
    rows = signed(sabi)
    share = counts_of(rows) / columns_of(rows, columns)
    if share.size == 0 and not (per_head and share.shape[-1]):
        raise ValueError(f"sabi: expected at least one row, got shape ({', '.join(map(str, share.shape))}, W)")
    return share.mean(axis=-1) if per_head else float(share.mean())


@in_usual_mode
def _dropped_share(sabi: Any, columns: int, per_head: bool) -> Any:
    return 1.0 - _kept_share(sabi, columns, per_head)


@in_usual_mode
def _evenness(work: np.ndarray) -> float:
    return float(work.mean() / work.max()) if work.max(initial=0) else 1.0


@overload
def density(sabi: ArrayLike, columns: int, *, per_head: Literal[False] = False) -> float: ...
@overload
def density(sabi: ArrayLike, columns: int, *, per_head: Literal[True]) -> np.ndarray: ...
@overload
def density(sabi: ArrayLike, columns: int, *, per_head: bool) -> Any: ...
def density(sabi: ArrayLike, columns: int, *, per_head: bool = False) -> Any:
    """Share of all pairs of blocks that is kept.

    Every row counts as if it could see all columns. A causal list of all visible blocks therefore has a density of about one half. A list
    of `select_blocks_prefill` with ``density=0.25, causal=True`` has a density of about one eighth, because that argument is a
    share of the blocks that the rules let a sequence see.

    Parameters
    ----------
    sabi : array_like of int
        Block list (..., R, W).
    columns : int
        Number of key blocks.
    per_head : bool
        Return one number for each head, instead of the mean over all heads.

    Returns
    -------
    float or numpy.ndarray
        From 0 to 1. With `per_head`, an array of the leading axes.

    Raises
    ------
    TypeError, ValueError
        `sabi` is not an integer array of at least two axes, `columns` is below 1, or an entry is not below `columns`.

    Examples
    --------
    >>> import numpy as np
    >>> from blitz_attn import sabi
    >>> sabi.density(np.array([[0, 1], [1, -1]]), 4)
    0.375
    """
    return _kept_share(sabi, columns, per_head)


@overload
def sparsity(sabi: ArrayLike, columns: int, *, per_head: Literal[False] = False) -> float: ...
@overload
def sparsity(sabi: ArrayLike, columns: int, *, per_head: Literal[True]) -> np.ndarray: ...
@overload
def sparsity(sabi: ArrayLike, columns: int, *, per_head: bool) -> Any: ...
def sparsity(sabi: ArrayLike, columns: int, *, per_head: bool = False) -> Any:
    """Share of the blocks that is dropped: 1 - `density`.

    Parameters
    ----------
    sabi, columns, per_head
        As in `density`.

    Returns
    -------
    float or numpy.ndarray
        As in `density`.

    Raises
    ------
    TypeError, ValueError
        As in `density`.

    Examples
    --------
    >>> import numpy as np
    >>> from blitz_attn import sabi
    >>> sabi.sparsity(np.array([[0, 1], [1, -1]]), 4)
    0.625
    """
    return _dropped_share(sabi, columns, per_head)


def balance(sabi: ArrayLike, *, per_head: bool = False) -> float:
    """How even the work is: the mean number of blocks per row, or per head, divided by the largest. 1 means that all are equal.

    Parameters
    ----------
    sabi : array_like of int
        Block list (..., R, W); with `per_head`, (..., H, R, W).
    per_head : bool
        Compare heads in place of rows.

    Returns
    -------
    float
        From 0 to 1; 1 for a list without blocks.

    Raises
    ------
    TypeError, ValueError
        `sabi` is not an integer array of at least two axes.

    Examples
    --------
    >>> import numpy as np
    >>> from blitz_attn import sabi
    >>> sabi.balance(np.array([[0, 1], [1, -1]]))
    0.75
    """
    work = counts(sabi)
    return _evenness(work.sum(axis=-1) if flag(per_head, "per_head") else work)


@in_usual_mode
def picture(sabi: ArrayLike, columns: int | None = None, *, max_rows: int = 32, max_columns: int = 32) -> str:
    """Text picture of a block list: two characters per cell, one header line per head.

    A cell is full where every block in it is kept, shaded where some blocks are, and blank where none is. Grids larger than the limits are
    drawn with several blocks per cell.

    Parameters
    ----------
    sabi : array_like of int
        Block list (..., R, W).
    columns : int, optional
        Number of key blocks. Default: one more than the largest entry.
    max_rows, max_columns : int
        Largest numbers of cells that are drawn, at least 1.

    Returns
    -------
    str
        Lines without trailing blanks.

    Raises
    ------
    TypeError, ValueError
        As in `to_block_mask`, and a limit below 1.

    Examples
    --------
    >>> from blitz_attn import sabi
    >>> print(sabi.picture(sabi.causal(512, dtype="int32")))
    head (0, 0): 4 x 4 blocks, 62.5% kept
    ██
    ████
    ██████
    ████████
    """
    mask = to_block_mask(sabi, columns)
    rows, count = mask.shape[-2:]
    tall, wide = (
        -(-blocks // at_least_one(most, name)) for blocks, most, name in ((rows, max_rows, "max_rows"), (count, max_columns, "max_columns"))
    )
    lines = []
    for head in np.ndindex(*mask.shape[:-2]):
        one = mask[head]
        kept = np.array([one[n : n + tall].sum(axis=0) for n in range(0, rows, tall)] if one.size else 0)
        share = float(kept.sum() / max(1, one.size))
        scale = f", {tall} x {wide} blocks per cell" if max(tall, wide) > 1 else ""
        lines.append(f"{f'head {head}: ' if head else ''}{rows} x {count} blocks, {share:.1%} kept{scale}")
        if one.size == 0:
            continue
        kept = np.add.reduceat(kept, np.arange(0, count, wide), axis=1)
        sizes = np.outer(np.diff([*range(0, rows, tall), rows]), np.diff([*range(0, count, wide), count]))
        cells = np.where(kept == 0, "  ", np.where(kept == sizes, "██", "░░"))
        lines += ["".join(row).rstrip() for row in cells]
    return "\n".join(lines)
