"""Block lists (sabi: sparse attention block indices): build, convert, combine, measure and show them.

A block list is an integer array (B or 1, H or 1, R, W): for each of the R = ceil(s_q / block_q) blocks of queries, the
column numbers of the blocks of keys that it attends. A row ends at its first pad, which is 65535 in uint16 and -1 in the
signed types. Builders return (1, 1, R, W), or more where they are given heads or batches, with columns rising, and
uint16 where the columns fit. Token rules (causal, window, lengths) cut exactly inside the listed blocks when they are
passed to the attention call: a builder lists every block that such a rule leaves at least one token of.

Lists over more than 65534 columns are int32.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from . import _sabi_lists
from ._arrays import flag, integer, integers, number
from ._sabi_lists import *  # noqa: F403
from ._sabi_lists import (
    MOST_BLOCKS,
    MOST_TOKENS,
    checked_shape,
    count_of,
    from_block_mask,
    grid_of,
    padded,
    signed,
    some_integers,
    to_block_mask,
    tokens_of,
    two_integers,
)
from ._sentences import shown

__all__ = [
    *_sabi_lists.__all__,
    "FrameWidths",
    "balance",
    "causal",
    "counts",
    "dense",
    "density",
    "dilated",
    "document",
    "frame_plan",
    "picture",
    "random_with_frame",
    "sink_local",
    "sliding_window",
    "sparsity",
    "vertical_slash",
]


_MOST_SIDE = 1 << 20  # what loops and lists of Python's go over: rows or columns of a grid with a frame, heads


class FrameWidths(NamedTuple):
    """Blocks that a random list keeps at its borders: columns in blocks of keys, rows in blocks of queries."""

    left_cols: int
    right_cols: int
    top_rows: int
    bottom_rows: int


class FramePlan(NamedTuple):
    """What a frame and a sparsity come to on a grid of blocks: see `frame_plan`."""

    forced_columns: list[int]
    free_columns: list[int]
    dense_rows: set[int]
    forced_blocks: int
    kept_blocks: int
    extra_per_row: int


# ---- Builders -----------------------------------------------------------------------------------------------------


def _one_head(mask: np.ndarray, dtype: Any, width: int | None) -> np.ndarray:
    return from_block_mask(mask[None, None] if mask.ndim == 2 else mask, dtype=dtype, width=width)


def _keys_seen(s_q: int, s_kv: int, block_q: int) -> tuple[np.ndarray, np.ndarray]:
    """Key positions on the bottom-right diagonal of each query block's first and last query."""
    first = np.arange(0, s_q, block_q)
    return first + s_kv - s_q, np.minimum(first + block_q, s_q) - 1 + s_kv - s_q


def _span_mask(low: np.ndarray, high: np.ndarray, s_kv: int, block_kv: int) -> np.ndarray:
    """Blocks of keys that meet the positions low..high (inclusive), a row each."""
    first = np.arange(0, s_kv, block_kv)
    last = np.minimum(first + block_kv, s_kv) - 1
    return (first <= high[:, None]) & (last >= low[:, None]) & (low <= high)[:, None]


def dense(s_q: int, s_kv: int | None = None, block_shape: Sequence[int] = (128, 128), *, dtype: Any = None) -> np.ndarray:
    """Every block.

    Parameters
    ----------
    s_q, s_kv : int
        Numbers of query and key tokens; `s_kv` defaults to `s_q`.
    block_shape : (int, int)
        Tokens a block of queries and of keys.
    dtype : dtype, optional
        uint16, int16, int32 or int64. Default: uint16 where the columns fit, else int32.

    Returns
    -------
    numpy.ndarray
        (1, 1, R, C).

    Raises
    ------
    TypeError, ValueError
        A size below 1, or a dtype that is not for lists or too narrow.

    Examples
    --------
    >>> from blitz_attn import sabi
    >>> sabi.dense(256).tolist()
    [[[[0, 1], [0, 1]]]]
    """
    rows, columns = grid_of(s_q, s_kv, block_shape)
    return padded(np.broadcast_to(np.arange(columns), (1, 1, rows, columns)), columns, dtype)


def causal(
    s_q: int, s_kv: int | None = None, block_shape: Sequence[int] = (128, 128), *, dtype: Any = None, width: int | None = None
) -> np.ndarray:
    """Blocks at or before the diagonal, aligned to the bottom right: query i sees keys up to i + s_kv - s_q.

    Parameters
    ----------
    s_q, s_kv, block_shape, dtype
        As in `dense`.
    width : int, optional
        Width of the list. Default: that of the fullest row.

    Returns
    -------
    numpy.ndarray
        (1, 1, R, W).

    Raises
    ------
    TypeError, ValueError
        As in `dense`.

    Examples
    --------
    >>> from blitz_attn import sabi
    >>> sabi.causal(384, dtype="int32").tolist()
    [[[[0, -1, -1], [0, 1, -1], [0, 1, 2]]]]
    """
    return sliding_window(s_q, s_kv, block_shape, window=(-1, 0), dtype=dtype, width=width)


def sliding_window(
    s_q: int,
    s_kv: int | None = None,
    block_shape: Sequence[int] = (128, 128),
    *,
    window: tuple[int, int],
    dtype: Any = None,
    width: int | None = None,
) -> np.ndarray:
    """Blocks within a window of tokens around the bottom-right diagonal.

    Parameters
    ----------
    s_q, s_kv, block_shape, dtype
        As in `dense`.
    window : (int, int)
        Tokens before and after the diagonal, -1 = no bound: the meaning of `window` in the attention call.
    width : int, optional
        Width of the list. Default: that of the fullest row.

    Returns
    -------
    numpy.ndarray
        (1, 1, R, W).

    Raises
    ------
    TypeError, ValueError
        As in `dense`, and a window below -1.

    Examples
    --------
    >>> from blitz_attn import sabi
    >>> sabi.sliding_window(512, window=(128, 0), dtype="int32").tolist()
    [[[[0, -1], [0, 1], [1, 2], [2, 3]]]]
    """
    left, right = two_integers(window, "window", "two token counts (before, after)")
    if min(left, right) < -1:
        raise ValueError(f"window: expected two counts of tokens or -1, got {(left, right)}")
    block_q, block_kv = checked_shape(block_shape)
    grid_of(s_q, s_kv, block_shape)
    s_q, s_kv = tokens_of(s_q, s_kv)
    left, right = min(left, s_q + s_kv), min(right, s_q + s_kv)
    low, high = _keys_seen(s_q, s_kv, block_q)
    low = np.zeros_like(low) if left == -1 else low - left
    high = np.full_like(high, s_kv) if right == -1 else high + right
    return _one_head(_span_mask(low, high, s_kv, block_kv), dtype, width)


def sink_local(
    s_q: int,
    s_kv: int | None = None,
    block_shape: Sequence[int] = (128, 128),
    *,
    sink: int,
    local: int,
    causal: bool = True,
    dtype: Any = None,
    width: int | None = None,
) -> np.ndarray:
    """The first tokens and those near the diagonal, the pattern of streaming attention.

    Parameters
    ----------
    s_q, s_kv, block_shape, dtype, width
        As in `sliding_window`.
    sink : int
        Tokens at the start that every query sees.
    local : int
        Tokens before the diagonal (and, unless `causal`, after it) that a query sees.
    causal : bool
        Drop the blocks that lie wholly after the diagonal.

    Returns
    -------
    numpy.ndarray
        (1, 1, R, W).

    Raises
    ------
    TypeError, ValueError
        As in `dense`, and negative `sink` or `local`.

    Examples
    --------
    >>> from blitz_attn import sabi
    >>> sabi.sink_local(512, sink=1, local=1, dtype="int32").tolist()
    [[[[0, -1, -1], [0, 1, -1], [0, 1, 2], [0, 2, 3]]]]
    """
    sink, local, causal = integer(sink, "sink"), integer(local, "local"), flag(causal, "causal")
    if min(sink, local) < 0:
        raise ValueError(f"sink, local: expected numbers of tokens from 0 on, got {sink}, {local}")
    block_q, block_kv = checked_shape(block_shape)
    grid_of(s_q, s_kv, block_shape)
    s_q, s_kv = tokens_of(s_q, s_kv)
    sink, local = min(sink, s_q + s_kv), min(local, s_q + s_kv)
    low, high = _keys_seen(s_q, s_kv, block_q)
    start = np.full_like(high, sink - 1)
    mask = _span_mask(np.zeros_like(low), np.minimum(start, high) if causal else start, s_kv, block_kv)
    return _one_head(mask | _span_mask(low - local, high + (0 if causal else local), s_kv, block_kv), dtype, width)


def document(
    lengths: Sequence[int],
    kv_lengths: Sequence[int] | None = None,
    block_shape: Sequence[int] = (128, 128),
    *,
    causal: bool = False,
    dtype: Any = None,
    width: int | None = None,
) -> np.ndarray:
    """Packed documents, each of which sees only itself.

    The blocks where two documents meet are shared: the list covers the documents and cannot cut between two tokens of a
    block. Layout TND of the attention call cuts exactly.

    Parameters
    ----------
    lengths : sequence of int
        Query tokens of each document, in order.
    kv_lengths : sequence of int, optional
        Key tokens of each; default `lengths`.
    block_shape, dtype, width
        As in `sliding_window`.
    causal : bool
        Within each document keep what lies at or before its own bottom-right diagonal.

    Returns
    -------
    numpy.ndarray
        (1, 1, R, W) over sum(lengths) queries and sum(kv_lengths) keys.

    Raises
    ------
    TypeError, ValueError
        As in `dense`, and lengths that are negative or differ in number.

    Examples
    --------
    >>> from blitz_attn import sabi
    >>> sabi.document([256, 100, 156], dtype="int32").tolist()
    [[[[0, 1], [0, 1], [2, 3], [2, 3]]]]
    """
    q_sizes = integers(lengths, "lengths")
    kv_sizes = q_sizes if kv_lengths is None else integers(kv_lengths, "kv_lengths")
    causal = flag(causal, "causal")
    if q_sizes.ndim != 1 or q_sizes.shape != kv_sizes.shape or min(q_sizes.min(initial=0), kv_sizes.min(initial=0)) < 0:
        raise ValueError(f"lengths: expected as many lengths from 0 on as kv_lengths, got {shown(q_sizes.tolist())}")
    for name, sizes in (("lengths", q_sizes), ("kv_lengths", kv_sizes)):
        if not 1 <= sum(map(int, sizes)) <= MOST_TOKENS:
            raise ValueError(f"{name}: expected 1 to {MOST_TOKENS} tokens in all, got {sum(map(int, sizes))}")
    s_q, s_kv = int(q_sizes.sum()), int(kv_sizes.sum())
    block_q, block_kv = checked_shape(block_shape)
    mask = np.zeros(grid_of(s_q, s_kv, block_shape), bool)
    start = kv_start = 0
    for size, kv_size in zip(q_sizes.tolist(), kv_sizes.tolist(), strict=True):
        if size:
            rows = np.arange(start // block_q, (start + size - 1) // block_q + 1)
            last = np.minimum((rows + 1) * block_q, start + size) - 1 - start  # the document's last query in each row
            high = last + kv_size - size if causal else np.full_like(last, kv_size - 1)
            mask[rows] |= _span_mask(np.full_like(high, kv_start), kv_start + high, s_kv, block_kv)
        start, kv_start = start + size, kv_start + kv_size
    return _one_head(mask, dtype, width)


def dilated(
    s_q: int,
    s_kv: int | None = None,
    block_shape: Sequence[int] = (128, 128),
    *,
    stride: int,
    reach: int | None = None,
    causal: bool = False,
    dtype: Any = None,
    width: int | None = None,
) -> np.ndarray:
    """The diagonal block of each row and every `stride`-th block from it.

    Parameters
    ----------
    s_q, s_kv, block_shape, dtype, width
        As in `sliding_window`. The diagonal block is that of the last key the row's last query sees when causal.
    stride : int
        Distance between kept blocks, in blocks.
    reach : int, optional
        Largest distance from the diagonal, in blocks. Default: no bound.
    causal : bool
        Drop the blocks after the diagonal.

    Returns
    -------
    numpy.ndarray
        (1, 1, R, W).

    Raises
    ------
    TypeError, ValueError
        As in `dense`, a stride below 1 or a negative reach.

    Examples
    --------
    >>> from blitz_attn import sabi
    >>> sabi.dilated(512, stride=2, dtype="int32").tolist()
    [[[[0, 2], [1, 3], [0, 2], [1, 3]]]]
    """
    stride, reach, causal = integer(stride, "stride"), None if reach is None else integer(reach, "reach"), flag(causal, "causal")
    if stride < 1 or (reach is not None and reach < 0):
        raise ValueError(f"stride, reach: expected a stride from 1 and a reach from 0 on, got {stride}, {reach}")
    block_q, block_kv = checked_shape(block_shape)
    _, columns = grid_of(s_q, s_kv, block_shape)
    _, high = _keys_seen(*tokens_of(s_q, s_kv), block_q)
    away = np.floor_divide(high, block_kv)[:, None] - np.arange(columns)
    mask = away % stride == 0
    if reach is not None:
        mask &= np.abs(away) <= reach
    if causal:
        mask &= away >= 0
    return _one_head(mask, dtype, width)


def vertical_slash(
    s_q: int,
    s_kv: int | None = None,
    block_shape: Sequence[int] = (128, 128),
    *,
    vertical: Any,
    slash: Any,
    causal: bool = True,
    dtype: Any = None,
    width: int | None = None,
) -> np.ndarray:
    """Blocks that hold chosen key tokens, or meet chosen diagonals.

    Parameters
    ----------
    s_q, s_kv, block_shape, dtype, width
        As in `sliding_window`.
    vertical : array_like of int
        Key positions, (n,) for all heads, (H, n) or (B, H, n).
    slash : array_like of int
        Distances before the bottom-right diagonal, in tokens (0 is the diagonal itself); axes as in `vertical`.
    causal : bool
        Drop the blocks that lie wholly after the diagonal.

    Returns
    -------
    numpy.ndarray
        (B, H, R, W), 1 where an axis was not given.

    Raises
    ------
    TypeError, ValueError
        As in `dense`, a key position out of range, or axes that do not broadcast.

    Examples
    --------
    >>> from blitz_attn import sabi
    >>> sabi.vertical_slash(512, vertical=[0], slash=[0], dtype="int32").tolist()
    [[[[0, -1], [0, 1], [0, 2], [0, 3]]]]
    """
    block_q, block_kv = checked_shape(block_shape)
    rows, columns = grid_of(s_q, s_kv, block_shape)
    s_q, s_kv = tokens_of(s_q, s_kv)
    causal = flag(causal, "causal")
    picked, offsets = (np.atleast_1d(integers(x, name)) for x, name in ((vertical, "vertical"), (slash, "slash")))
    if max(picked.ndim, offsets.ndim) > 3:
        raise ValueError(f"vertical, slash: expected at most three axes, got {picked.shape} and {offsets.shape}")
    if picked.min(initial=0) < 0 or picked.max(initial=0) >= s_kv:
        raise ValueError(f"vertical: expected key positions in 0..{s_kv - 1}, got {picked.min()}..{picked.max()}")
    if offsets.size and max(-int(offsets.min()), int(offsets.max())) > MOST_TOKENS:
        raise ValueError(f"slash: expected distances of at most {MOST_TOKENS} tokens, got {offsets.min()}..{offsets.max()}")
    try:
        lead = np.broadcast_shapes((1, 1), picked.shape[:-1], offsets.shape[:-1])
    except ValueError as error:
        raise ValueError(f"slash: expected axes that broadcast with those of vertical {picked.shape}, got {offsets.shape}") from error
    if math.prod(lead) > _MOST_SIDE:
        raise ValueError(f"vertical, slash: expected at most {_MOST_SIDE} heads in all, got {lead}")
    picked, offsets = (np.broadcast_to(x, (*lead, x.shape[-1])).reshape(math.prod(lead), x.shape[-1]) for x in (picked, offsets))
    low, high = _keys_seen(s_q, s_kv, block_q)
    mask = np.zeros((picked.shape[0], rows, columns), bool)
    for head, (keys, back) in enumerate(zip(picked, offsets, strict=True)):
        mask[head][:, keys // block_kv] = True
        for step in back:
            mask[head] |= _span_mask(low - step, high - step, s_kv, block_kv)
    if causal:
        mask &= _span_mask(np.zeros_like(low), high, s_kv, block_kv)
    return from_block_mask(mask.reshape(*lead, rows, columns), dtype=dtype, width=width)


def _kept_share(sparsity: Any) -> float:
    value = number(sparsity, "sparsity")
    if math.isnan(value):
        raise ValueError(f"sparsity: expected a share of the blocks, got {value}")
    return 1.0 - min(1.0, max(0.0, value))


def frame_plan(rows: int, columns: int, sparsity: float, frame: FrameWidths | None = None) -> FramePlan:
    """What upstream's random rule keeps on a grid: the frame, and how many blocks more in each row outside it.

    Parameters
    ----------
    rows, columns : int
        Blocks of queries and of keys.
    sparsity : float
        Share of blocks to drop, clamped to 0..1. The frame counts inside the kept share.
    frame : FrameWidths, optional
        Left and right columns kept in every row, top and bottom rows kept whole.

    Returns
    -------
    FramePlan
        ``forced_columns``, ``free_columns`` (lists), ``dense_rows`` (set), ``forced_blocks`` (what the frame alone
        keeps), ``kept_blocks`` = floor(rows * columns * (1 - sparsity)), and ``extra_per_row``, random blocks in each
        row outside the frame.

    Raises
    ------
    ValueError
        An empty grid, or a frame wider than the grid.

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
    if max(rows, columns) > _MOST_SIDE:
        raise ValueError(f"rows, columns: expected a grid of at most {_MOST_SIDE} blocks each, got {rows} x {columns}")
    share = _kept_share(sparsity)
    frame = FrameWidths(0, 0, 0, 0) if frame is None else FrameWidths(*some_integers(frame, "frame", "four widths", 4))
    left, right, top, bottom = frame
    if max(left, right) > columns or max(top, bottom) > rows or min(frame) < 0:
        raise ValueError(f"frame: expected widths within {rows} rows and {columns} columns, got {tuple(frame)}")
    forced = sorted({*range(left), *range(columns - right, columns)})
    whole = {*range(top), *range(rows - bottom, rows)}
    loose = rows - len(whole)
    forced_blocks = len(forced) * loose + columns * len(whole)
    kept = math.floor(rows * columns * share)
    extra = max(0, math.ceil((kept - forced_blocks) / loose)) if loose else 0
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
    dtype: Any = None,
    width: int | None = None,
) -> np.ndarray:
    """Random blocks inside a fixed frame, equally many in each row: upstream's rule, with upstream's results.

    Head h of batch entry b draws from ``random.Random(seed + b + h)``. See `frame_plan` for the counts. Sparsity 0
    gives the full list, so that a benchmark at 0 times the sparse path.

    Parameters
    ----------
    s_q, s_kv, block_shape, dtype, width
        As in `sliding_window`.
    sparsity : float
        Share of blocks to drop, clamped to 0..1.
    frame : FrameWidths, optional
        Border that is always kept; it counts inside the kept share.
    batch, heads : int
        Leading axes of the result.
    seed : int
        Base of the seeds.
    sort : bool
        Columns rising. False shuffles each row with the same generator.

    Returns
    -------
    numpy.ndarray
        (batch, heads, R, W).

    Raises
    ------
    TypeError, ValueError
        As in `dense`, and a frame that is wider than the grid or alone keeps more than the sparsity allows.

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
    batch, heads = count_of(batch, "batch", _MOST_SIDE), count_of(heads, "heads", _MOST_SIDE)
    if batch * heads > _MOST_SIDE:
        raise ValueError(f"batch, heads: expected at most {_MOST_SIDE} heads in all, got {batch} x {heads}")
    seed, sort = integer(seed, "seed"), flag(sort, "sort")
    if plan.forced_blocks / (rows * columns) > allowed:
        raise ValueError(
            f"frame: expected at most {allowed:.2%} of the blocks, got {plan.forced_blocks} of {rows * columns} "
            f"({plan.forced_blocks / (rows * columns):.2%}) at sparsity {sparsity}"
        )
    heads_drawn = {}
    for offset in range(batch + heads - 1 if min(batch, heads) > 0 else 0):
        heads_drawn[offset] = _draw_head(rows, columns, plan, seed + offset, sort)
    fullest = max([1, len(plan.forced_columns) + plan.extra_per_row, columns if plan.dense_rows else 0])
    width = min(fullest, columns) if width is None else count_of(width, "width", MOST_BLOCKS // max(1, rows * batch * heads))
    if width < min(fullest, columns):
        raise ValueError(f"width: expected at least {min(fullest, columns)}, the blocks of the fullest row, got {width}")
    drawn = np.full((batch, heads, rows, width), -1, np.int32)
    for b in range(batch):
        for h in range(heads):
            head = heads_drawn[b + h]
            drawn[b, h, :, : min(width, columns)] = head[:, : min(width, columns)]
    return padded(drawn, columns, dtype)


def _draw_head(rows: int, columns: int, plan: FramePlan, seed: int, sort: bool) -> np.ndarray:
    """(rows, columns) list of one head, -1 padded. The order of the draws is upstream's and decides the result."""
    rng = random.Random(seed)
    drawn = np.full((rows, columns), -1, np.int32)
    size = len(plan.forced_columns) + plan.extra_per_row
    if sort and plan.extra_per_row == len(plan.free_columns):
        drawn[:] = np.arange(columns)  # all of them: what the draws would be does not matter
        return drawn
    for r in range(rows):
        if r in plan.dense_rows:
            row = list(range(columns))
        else:
            row = plan.forced_columns + (rng.sample(plan.free_columns, plan.extra_per_row) if plan.extra_per_row else [])
            if sort:
                drawn[r, :size] = row
                continue
            row.sort()
        if not sort:
            rng.shuffle(row)
        drawn[r, : len(row)] = row
    if sort:
        loose = [r for r in range(rows) if r not in plan.dense_rows]
        drawn[loose, :size] = np.sort(drawn[loose, :size], axis=-1)
    return drawn


# ---- Measures -----------------------------------------------------------------------------------------------------


def counts(sabi: Any) -> np.ndarray:
    """Blocks kept in each row.

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
        Not an integer array of at least two axes.

    Examples
    --------
    >>> import numpy as np
    >>> from blitz_attn import sabi
    >>> sabi.counts(np.array([[0, 1], [1, -1]])).tolist()
    [2, 1]
    """
    return (signed(sabi) >= 0).sum(axis=-1)


def density(sabi: Any, columns: int, *, per_head: bool = False) -> Any:
    """Share of the blocks that is kept.

    Parameters
    ----------
    sabi : array_like of int
        Block list (..., R, W).
    columns : int
        Number of key blocks.
    per_head : bool
        Average over the rows only.

    Returns
    -------
    float or numpy.ndarray
        In 0..1; with `per_head` an array over the leading axes.

    Raises
    ------
    TypeError, ValueError
        Not an integer array of at least two axes, or `columns` below 1.

    Examples
    --------
    >>> import numpy as np
    >>> from blitz_attn import sabi
    >>> sabi.density(np.array([[0, 1], [1, -1]]), 4)
    0.375
    """
    columns, per_head = integer(columns, "columns"), flag(per_head, "per_head")
    if columns < 1:
        raise ValueError(f"columns: expected at least 1, got {columns}")
    share = counts(sabi) / columns
    if share.size == 0 and not (per_head and share.shape[-1]):
        raise ValueError(f"sabi: expected at least one row, got shape {(*share.shape, 'W')}")
    return share.mean(axis=-1) if per_head else float(share.mean())


def sparsity(sabi: Any, columns: int, *, per_head: bool = False) -> Any:
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
    return 1.0 - density(sabi, columns, per_head=per_head)


def balance(sabi: Any, *, per_head: bool = False) -> Any:
    """How even the work is: mean over most blocks a row (1 = all rows equal), or a head with `per_head`.

    Parameters
    ----------
    sabi : array_like of int
        Block list (..., R, W); with `per_head`, (..., H, R, W).
    per_head : bool
        Compare heads in place of rows.

    Returns
    -------
    float
        In 0..1; 1 for a list with nothing in it.

    Raises
    ------
    TypeError, ValueError
        Not an integer array of at least two axes.

    Examples
    --------
    >>> import numpy as np
    >>> from blitz_attn import sabi
    >>> sabi.balance(np.array([[0, 1], [1, -1]]))
    0.75
    """
    work = counts(sabi)
    work = work.sum(axis=-1) if flag(per_head, "per_head") else work
    return float(work.mean() / work.max()) if work.max(initial=0) else 1.0


def picture(sabi: Any, columns: int | None = None, *, max_rows: int = 32, max_columns: int = 32) -> str:
    """Text picture of a block list: two characters a cell, a header a head.

    A cell is full where every block in it is kept, shaded where some are and blank where none is; grids larger than the
    limits are drawn with several blocks a cell.

    Parameters
    ----------
    sabi : array_like of int
        Block list (..., R, W).
    columns : int, optional
        Number of key blocks. Default: the least that holds every entry.
    max_rows, max_columns : int
        Most cells drawn.

    Returns
    -------
    str
        Lines without trailing blanks.

    Raises
    ------
    TypeError, ValueError
        As in `to_block_mask`.

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
    tall, wide = -(-rows // max(1, integer(max_rows, "max_rows"))), -(-count // max(1, integer(max_columns, "max_columns")))
    lines = []
    for head in np.ndindex(*mask.shape[:-2]):
        one = mask[head]
        share = float(one.mean()) if one.size else 0.0
        scale = f", {tall} x {wide} blocks a cell" if max(tall, wide) > 1 else ""
        lines.append(f"{f'head {head}: ' if head else ''}{rows} x {count} blocks, {share:.1%} kept{scale}")
        if one.size == 0:
            continue
        kept = np.add.reduceat(one.astype(np.int64), np.arange(0, rows, tall), axis=0)
        kept = np.add.reduceat(kept, np.arange(0, count, wide), axis=1)
        sizes = np.outer(np.diff([*range(0, rows, tall), rows]), np.diff([*range(0, count, wide), count]))
        cells = np.where(kept == 0, "  ", np.where(kept == sizes, "██", "░░"))
        lines += ["".join(row).rstrip() for row in cells]
    return "\n".join(lines)
