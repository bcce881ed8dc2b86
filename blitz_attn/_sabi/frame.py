"""Random block lists inside a fixed frame, by the rule of BlitzSparseAttention in CANN ("upstream"). Public through `blitz_attn.sabi`."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .._arrays import flag, integer, number, pieces
from .._float_mode import in_usual_mode
from .._sentences import number_shown
from .block_list import BlockList, listed
from .lists import MOST_BLOCKS, MOST_SIDE, checked_shape, count_of, grid_of, padded, some_integers

if TYPE_CHECKING:
    from .._types import DType

__all__ = [
    "FrameWidths",
    "frame_plan",
    "random_with_frame",
]


class FrameWidths(NamedTuple):
    """Blocks that a random list keeps at its borders: columns in blocks of keys, rows in blocks of queries."""

    left_cols: int
    right_cols: int
    top_rows: int
    bottom_rows: int


class FramePlan(NamedTuple):
    """The blocks of a frame, and the numbers of blocks that a frame and a sparsity keep on a grid: see `frame_plan`."""

    forced_columns: list[int]
    free_columns: list[int]
    dense_rows: set[int]
    forced_blocks: int
    kept_blocks: int
    extra_per_row: int


FrameWidths.__module__ = FramePlan.__module__ = "blitz_attn.sabi"  # where users and pickles find them


@in_usual_mode
def _kept_share(sparsity: Any) -> float:
    value = number(sparsity, "sparsity")
    if not 0 <= value <= 1:
        raise ValueError(f"sparsity: expected a number from 0 to 1, got {number_shown(value)}")
    return 1.0 - value


@in_usual_mode
def _counts(blocks: int, share: float, forced_blocks: int, loose: int) -> tuple[int, int]:
    """How many of the blocks are kept, and how many random blocks each of the `loose` rows outside the frame gets."""
    kept = math.floor(blocks * share)
    return kept, max(0, math.ceil((kept - forced_blocks) / loose)) if loose else 0


@in_usual_mode
def _share_of(some: int, blocks: int) -> float:
    return some / blocks


def frame_plan(rows: int, columns: int, sparsity: float, frame: FrameWidths | None = None) -> FramePlan:
    """The numbers of blocks that upstream's random rule keeps on a grid: of the frame, and of random blocks in each row outside it.

    Parameters
    ----------
    rows, columns : int
        Blocks of queries and of keys.
    sparsity : float
        Share of blocks to drop, from 0 to 1. Blocks of the frame count as kept blocks.
    frame : FrameWidths, optional
        Numbers of columns at the left and the right that every row keeps, and of rows at the top and the bottom that are kept whole.

    Returns
    -------
    FramePlan
        ``forced_columns``, ``free_columns`` (lists), ``dense_rows`` (set), ``forced_blocks`` (number of blocks of the frame),
        ``kept_blocks`` = floor(rows * columns * (1 - sparsity)), and ``extra_per_row``, the number of random blocks in each row outside the
        frame.

    Raises
    ------
    ValueError
        An empty grid, a frame wider than the grid, or a sparsity out of range.

    Examples
    --------
    >>> from blitz_attn import sabi
    >>> plan = sabi.frame_plan(8, 8, 0.5, sabi.FrameWidths(1, 1, 1, 1))
    >>> plan.forced_blocks, plan.kept_blocks, plan.extra_per_row
    (28, 32, 1)
    """
    rows, columns = integer(rows, "rows"), integer(columns, "columns")
    if rows < 1 or columns < 1:
        raise ValueError(f"rows, columns: expected at least one block each, got {rows} and {columns}")
    if max(rows, columns) > MOST_SIDE:
        raise ValueError(f"rows, columns: expected at most {MOST_SIDE} blocks each, got {rows} and {columns}")
    share = _kept_share(sparsity)
    frame = FrameWidths(0, 0, 0, 0) if frame is None else FrameWidths(*some_integers(frame, "frame", "four widths", 4))
    left, right, top, bottom = frame
    if max(left, right) > columns or max(top, bottom) > rows or min(frame) < 0:
        raise ValueError(f"frame: expected widths within {rows} rows and {columns} columns, got {tuple(frame)}")
    forced = sorted({*range(left), *range(columns - right, columns)})
    whole = {*range(top), *range(rows - bottom, rows)}
    loose = rows - len(whole)
    forced_blocks = len(forced) * loose + columns * len(whole)
    kept, extra = _counts(rows * columns, share, forced_blocks, loose)
    free = sorted(set(range(columns)) - set(forced))
    return FramePlan(forced, free, whole, forced_blocks, kept, extra)


def random_with_frame(
    s_q: int,
    s_kv: int | None = None,
    block_shape: Sequence[int] = (128, 128),
    sparsity: float = 0.5,
    *,
    frame: FrameWidths | None = None,
    batch: int = 1,
    heads: int = 1,
    seed: int = 1234,
    sort: bool = True,
    dtype: DType | None = None,
    width: int | None = None,
) -> BlockList:
    """Random blocks inside a fixed frame, equally many in each row that is not of the frame. The rule and its results are upstream's.

    Head h of batch entry b draws from ``random.Random(seed + b + h)``. See `frame_plan` for the counts. Sparsity 0
    gives the full list, so that a benchmark at sparsity 0 measures the sparse path.

    Parameters
    ----------
    s_q, s_kv, block_shape, dtype, width
        As in `sliding_window`.
    sparsity : float
        Share of blocks to drop, from 0 to 1.
    frame : FrameWidths, optional
        Border that is always kept. Its blocks count as kept blocks.
    batch, heads : int
        Leading axes of the result.
    seed : int
        Base of the seeds.
    sort : bool
        Columns rise in each row. False: the generator that drew a row also shuffles it.

    Returns
    -------
    numpy.ndarray
        (batch, heads, R, W).

    Raises
    ------
    TypeError, ValueError
        As in `dense`, and a frame that is wider than the grid or has more blocks than the sparsity allows.

    Examples
    --------
    >>> from blitz_attn import sabi
    >>> drawn = sabi.random_with_frame(1024, sparsity=0.5, frame=sabi.FrameWidths(1, 1, 1, 1), heads=2)
    >>> drawn.shape, sabi.counts(drawn)[0, 0].tolist()
    ((1, 2, 8, 8), [8, 3, 3, 3, 3, 3, 3, 8])
    >>> sabi.random_with_frame(1024, sparsity=0.9, frame=sabi.FrameWidths(1, 1, 1, 1))
    Traceback (most recent call last):
    ...
    ValueError: frame: expected at most 10.00% of the blocks, got 28 of 64 (43.75%) at sparsity 0.9
    """
    rows, columns = grid_of(s_q, s_kv, block_shape)
    plan = frame_plan(rows, columns, sparsity, frame)
    allowed = _kept_share(sparsity)
    batch, heads = count_of(batch, "batch", MOST_SIDE), count_of(heads, "heads", MOST_SIDE)
    if batch * heads > MOST_SIDE:
        raise ValueError(f"batch, heads: expected at most {MOST_SIDE} heads in all, got {batch} x {heads}")
    seed, sort = integer(seed, "seed"), flag(sort, "sort")
    forced = _share_of(plan.forced_blocks, rows * columns)
    if forced > allowed:
        raise ValueError(
            f"frame: expected at most {allowed:.2%} of the blocks, got {plan.forced_blocks} of {rows * columns} "
            f"({forced:.2%}) at sparsity {sparsity}"
        )
    heads_drawn = {}
    for offset in range(batch + heads - 1 if min(batch, heads) > 0 else 0):
        heads_drawn[offset] = _draw_head(rows, columns, plan, seed + offset, sort)
    fullest = max([1, len(plan.forced_columns) + plan.extra_per_row, columns if plan.dense_rows else 0])
    width = min(fullest, columns) if width is None else count_of(width, "width", MOST_BLOCKS // max(1, rows * batch * heads))
    if width < min(fullest, columns):
        raise ValueError(f"width: expected at least {min(fullest, columns)}, the blocks of the fullest row, got {width}")
    drawn = np.empty((batch, heads, rows, width), np.int32)
    for b in range(batch):
        for h in range(heads):
            for at, _ in pieces((rows, width)):
                drawn[b, h, at, : min(width, columns)] = heads_drawn[b + h][at, :width]
                drawn[b, h, at, columns:] = -1
    return listed(padded(drawn, columns, dtype), checked_shape(block_shape))


def _draw_head(rows: int, columns: int, plan: FramePlan, seed: int, sort: bool) -> np.ndarray:
    """(rows, columns) list of one head, -1 padded. The order of the draws is upstream's and decides the result."""
    rng = random.Random(seed)
    drawn = np.empty((rows, columns), np.int32)
    all_blocks = sort and plan.extra_per_row == len(plan.free_columns)
    for at, _ in pieces(drawn.shape):
        drawn[at] = np.arange(columns) if all_blocks else -1
    if all_blocks:  # every block is listed, whatever is drawn
        return drawn
    for r in range(rows):
        if r in plan.dense_rows:
            row = list(range(columns))
        else:
            row = plan.forced_columns + (rng.sample(plan.free_columns, plan.extra_per_row) if plan.extra_per_row else [])
        if not sort:
            row.sort()
            rng.shuffle(row)
        drawn[r, : len(row)] = row
        if sort:
            drawn[r, : len(row)].sort()
    return drawn
