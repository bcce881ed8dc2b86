"""Block lists of rules over cubes, and their density before they are made. Public through `blitz_attn.video`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np

from .. import _arrays
from .._float_mode import in_usual_mode
from .._sabi.block_list import BlockList, listed
from .._sabi.lists import check_entries, checked_shape, filled, padded, result_dtype, sides_of
from .order import TokenOrder, order_of_grids
from .rules import Rule, rules_of

if TYPE_CHECKING:
    from .._types import DType, Integers

__all__ = ["blocks", "density"]


class BlockGrid:
    """The blocks of an order: the cubes that each block holds, and the rows and columns of blocks that are dense under every rule.

    A row of blocks is dense if it holds a token that sees everything, or tokens of two grids, since tokens of each grid see the other grid.
    """

    def __init__(self, order: Any, block_shape: Any, dense_frames: Any, dense_tokens: Any) -> None:
        order = order_of_grids(order)
        self.shape = checked_shape(block_shape)
        tokens = order.geometry.num_tokens
        self.rows, self.columns = sides_of(tokens, tokens, self.shape)
        self.cubes, self.tokens = order._cubes, tokens
        dense = _dense_tokens(order, dense_frames, dense_tokens)
        self.dense_rows, self.dense_columns = (np.logical_or.reduceat(dense, np.arange(0, tokens, size)) for size in self.shape)
        self.first_cube, self.last_cube = self._cubes_in(self.shape[0], self.rows)
        own, last = self._cubes_in(self.shape[1], self.columns)
        self.column_cubes = own, last + 1
        changes = np.append(0, np.cumsum(self.cubes.grid[1:] != self.cubes.grid[:-1]))
        self.dense_rows |= changes[self.first_cube] < changes[self.last_cube]
        # for each grid: the raster-order numbers of its cubes, and the places of its cubes in the sequence
        self.raster = [np.ravel_multi_index(tuple(self.cubes.place[self.cubes.grid == g].T), n) for g, n in enumerate(self.cubes.counts)]
        self.own = [np.flatnonzero(self.cubes.grid == g) for g in range(len(self.cubes.counts))]

    def _cubes_in(self, size: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """The first and the last cube of each block. Plain tokens count as tokens of the last cube; their blocks are dense."""
        first = np.arange(count) * size
        last = np.minimum(first + size, self.tokens) - 1
        most = len(self.cubes.grid) - 1
        one, other = (np.minimum(np.searchsorted(self.cubes.start, at, side="right") - 1, most) for at in (first, last))
        return one, other

    def of_rows(self, rule: Rule, rows: np.ndarray) -> Iterator[np.ndarray]:
        """The listed columns, rising, of each of the `rows` of blocks. Several rows may yield the same array."""
        everything = np.arange(self.columns, dtype=np.int32)
        known, found = None, everything
        for row in rows.tolist():
            if self.dense_rows[row]:
                yield everything
                continue
            cubes = int(self.first_cube[row]), int(self.last_cube[row])
            if cubes != known:
                known, found = cubes, self._columns_of(rule, *cubes)
            yield found

    def _columns_of(self, rule: Rule, first: int, last: int) -> np.ndarray:
        """The columns that are listed for tokens of the cubes from `first` to `last`, which belong to one grid."""
        grid = int(self.cubes.grid[first])
        sizes, counts = self.cubes.sizes[grid], self.cubes.counts[grid]
        seen = np.zeros(counts, np.bool_)
        places = self.cubes.place[first : last + 1]
        runs = np.flatnonzero((places[1:, :2] != places[:-1, :2]).any(axis=1)) + 1  # consecutive cubes of one layer and row are one run
        for run in np.split(places, runs):
            t, h = int(run[0, 0]), run[:1, 1]
            levels = rule._levels(t, counts, sizes[0])
            for level in np.unique(levels[levels >= 0]).tolist():
                (top,), (bottom,) = rule._window(level, h, 1, counts)
                columns = np.zeros(counts[2], np.bool_)
                for left, right in zip(*rule._window(level, run[:, 2], 2, counts), strict=True):
                    columns[left:right] = True
                seen[levels == level, top:bottom] |= columns
        visible = np.ones(len(self.cubes.grid) + 1, np.int64)
        visible[0] = 0
        visible[1 + self.own[grid]] = seen.reshape(-1)[self.raster[grid]]
        before = np.cumsum(visible)
        begin, end = self.column_cubes
        return np.flatnonzero((before[end] > before[begin]) | self.dense_columns).astype(np.int32)


def _dense_tokens(order: TokenOrder, dense_frames: Any, dense_tokens: Any) -> np.ndarray:
    """For each position of the order, whether its token sees all tokens and is seen by all under every rule: (num_tokens,) bool."""
    frames = _arrays.integer(dense_frames, "dense_frames")
    if frames < 0:
        raise ValueError(f"dense_frames: expected a number of frames from 0 on, got {frames}")
    tokens = order.geometry.num_tokens
    dense = np.zeros(tokens, np.bool_)
    if dense_tokens is not None:
        given = _arrays.integers(dense_tokens, "dense_tokens")
        if given.ndim != 1 or given.min(initial=0) < 0 or given.max(initial=0) >= tokens:
            shown = f"{given.min()}..{given.max()}" if given.ndim == 1 else f"shape {given.shape}"
            raise ValueError(f"dense_tokens: expected the numbers of tokens, from 0 to {tokens - 1}, got {shown}")
        dense[given] = True
    first = 0
    for span in order.geometry.spans:
        if isinstance(span, int):
            dense[first : first + span] = True
            first += span
        else:
            dense[first : first + min(frames, span[0]) * span[1] * span[2]] = True
            first += span[0] * span[1] * span[2]
    return dense[order.indices]


def blocks(
    order: TokenOrder,
    rule: Rule | Sequence[Rule],
    block_shape: Sequence[int] = (64, 64),
    *,
    dense_frames: int = 0,
    dense_tokens: Integers | None = None,
    dtype: DType | None = None,
) -> BlockList:
    """The block list of a rule: every block in which a query and a key see each other.

    A token of a grid sees those tokens of its grid whose cubes its own cube sees by the rule, and all tokens of other grids. Plain tokens
    see all tokens, and are seen by all. A block is listed if at least one of its queries sees at least one of its keys. All queries of a
    listed block attend to all of its keys.

    Parameters
    ----------
    order : TokenOrder
        The order of the tokens of the call, from `cube_order`.
    rule : Neighbourhood, SlidingTiles or Radial, or sequence of them
        The rule that says which cubes see each other, or a rule for each head.
    block_shape : (int, int)
        Number of tokens per block of queries and of keys, at least 1 each. Blocks of a cube's size, or of a multiple, split no full cube.
    dense_frames : int
        How many of the first frames of each grid see all tokens and are seen by all.
    dense_tokens : array_like of int, optional
        Further tokens that see all tokens and are seen by all, given by their numbers in the model's order.
    dtype : dtype, optional
        uint16, int16, int32 or int64. Default: int32.

    Returns
    -------
    BlockList
        (1, 1, R, W), or (1, H, R, W) for H rules, with rising columns.

    Raises
    ------
    TypeError, ValueError
        An argument of a wrong kind, a geometry without a grid, sizes or tokens out of range, a dtype that is too narrow, or a list of more
        than 2**28 entries.

    See Also
    --------
    density : the share of the blocks that a list keeps, before the list is made.
    blitz_attn.sabi.union : joins the list with the blocks that a chooser finds.

    Notes
    -----
    Memory grows with the list alone: no grid of rows and columns is held. A list is as wide as its fullest row. Rows of plain or dense
    tokens list all blocks, and so the list is as wide as there are columns (14 MB per rule for 118806 tokens in blocks of 64).

    Examples
    --------
    >>> from blitz_attn import sabi, video
    >>> order = video.cube_order(video.Geometry([(4, 4, 8), 8]), (2, 4, 4))
    >>> lists = video.blocks(order, [video.Neighbourhood.spatial(), video.Neighbourhood.temporal()], (32, 32))
    >>> print(sabi.picture(lists))
    head (0, 0): 5 x 5 blocks, 68.0% kept
    ████    ██
    ████    ██
        ██████
        ██████
    ██████████
    head (0, 1): 5 x 5 blocks, 68.0% kept
    ██  ██  ██
      ██  ████
    ██  ██  ██
      ██  ████
    ██████████
    """
    grid, rules = BlockGrid(order, block_shape, dense_frames, dense_tokens), rules_of(rule)
    kind = result_dtype(grid.columns, dtype)
    of_rule: dict[Rule, list[np.ndarray]] = {}
    fullest = 0
    for one in rules:
        if one not in of_rule:
            rows = of_rule[one] = []
            for columns in grid.of_rows(one, np.arange(grid.rows)):
                rows.append(columns)
                if len(columns) > fullest:
                    fullest = len(columns)
                    check_entries(grid.rows * len(rules), fullest)
    found = [columns for one in rules for columns in of_rule[one]]
    made = filled(np.array([len(columns) for columns in found]), np.concatenate(found), None).reshape(1, len(rules), grid.rows, -1)
    return listed(made if made.dtype == kind else padded(made, grid.columns, kind), grid.shape)


@overload
def density(
    order: TokenOrder,
    rule: Rule | Sequence[Rule],
    block_shape: Sequence[int] = (64, 64),
    *,
    dense_frames: int = 0,
    dense_tokens: Integers | None = None,
    per_head: Literal[False] = False,
) -> float: ...
@overload
def density(
    order: TokenOrder,
    rule: Rule | Sequence[Rule],
    block_shape: Sequence[int] = (64, 64),
    *,
    dense_frames: int = 0,
    dense_tokens: Integers | None = None,
    per_head: Literal[True],
) -> np.ndarray: ...
@overload
def density(
    order: TokenOrder,
    rule: Rule | Sequence[Rule],
    block_shape: Sequence[int] = (64, 64),
    *,
    dense_frames: int = 0,
    dense_tokens: Integers | None = None,
    per_head: bool,
) -> Any: ...
@in_usual_mode
def density(
    order: TokenOrder,
    rule: Rule | Sequence[Rule],
    block_shape: Sequence[int] = (64, 64),
    *,
    dense_frames: int = 0,
    dense_tokens: Integers | None = None,
    per_head: bool = False,
) -> Any:
    """Share of all pairs of blocks that a rule keeps, exactly, without making the list.

    Parameters
    ----------
    order, rule, block_shape, dense_frames, dense_tokens
        As in `blocks`.
    per_head : bool
        Return one number for each rule.

    Returns
    -------
    float or numpy.ndarray
        From 0 to 1: the `blitz_attn.sabi.density` of the list of `blocks`. With `per_head`, float64 (1, H).

    Raises
    ------
    TypeError, ValueError
        As in `blocks`.

    Notes
    -----
    Rows are counted one by one, so that no grid of rows and columns is held.

    Examples
    --------
    >>> from blitz_attn import video
    >>> order = video.cube_order(video.Geometry([(16, 32, 32)]))
    >>> rules = [video.Neighbourhood.spatial(), video.SlidingTiles((3, 3, 3))]
    >>> video.density(order, rules), video.density(order, rules, per_head=True).tolist()
    (0.177734375, [[0.25, 0.10546875]])
    """
    grid, rules, per_head = BlockGrid(order, block_shape, dense_frames, dense_tokens), rules_of(rule), _arrays.flag(per_head, "per_head")
    kept = {one: sum(len(columns) for columns in grid.of_rows(one, np.arange(grid.rows))) for one in set(rules)}
    pairs = grid.rows * grid.columns
    if per_head:
        return np.array([[kept[one] / pairs for one in rules]])
    return sum(kept[one] for one in rules) / (pairs * len(rules))
