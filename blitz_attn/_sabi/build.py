"""Block lists of fixed patterns: causal, window, sinks, documents, diagonals. Public through `blitz_attn.sabi`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .._arrays import flag, integer, integers, pieces
from .._sentences import shown
from .block_list import BlockList, BlockShape, listed
from .convert import from_block_mask
from .lists import (
    MOST_ROWS,
    MOST_SIDE,
    MOST_TOKENS,
    blocks_of,
    check_entries,
    checked_shape,
    filled,
    grid_of,
    padded,
    sides_of,
    tokens_of,
    two_integers,
)

if TYPE_CHECKING:
    from .._types import ArrayLike, DType, Integers

__all__ = [
    "causal",
    "dense",
    "dilated",
    "document",
    "document_ranges",
    "sink_local",
    "sliding_window",
    "vertical_slash",
]


def _keys_seen(s_q: int, s_kv: int, block_q: int) -> tuple[np.ndarray, np.ndarray]:
    """For each block of queries, two positions of keys on the bottom-right diagonal: beside its first query, and beside its last."""
    first = np.arange(0, s_q, block_q)
    return first + s_kv - s_q, np.minimum(first + block_q, s_q) - 1 + s_kv - s_q


def _span(low: np.ndarray, high: np.ndarray, s_kv: int, block_kv: int) -> tuple[np.ndarray, np.ndarray]:
    """The first block of keys that holds any of the positions low..high (inclusive), and the number after the last such block."""
    first = np.maximum(low // block_kv, 0)
    end = np.minimum(high // block_kv + 1, blocks_of(s_kv, block_kv))
    return first, np.where((low <= high) & (low < s_kv), np.maximum(end, first), first)


def _span_mask(low: np.ndarray, high: np.ndarray, s_kv: int, block_kv: int) -> np.ndarray:
    """`_span` as a mask, one row per pair of `low` and `high`."""
    first, end = _span(low, high, s_kv, block_kv)
    column = np.arange(blocks_of(s_kv, block_kv))
    return (column >= first[:, None]) & (column < end[:, None])


def _list_of_spans(
    row: np.ndarray, first: np.ndarray, end: np.ndarray, grid: tuple[int, int], block_shape: BlockShape, dtype: Any, width: Any
) -> BlockList:
    """The list of one head whose row ``row[i]`` has the columns from ``first[i]`` to ``end[i] - 1``. ``row[i]`` rises with i, and a row may
    have several such spans. Of the spans of a row that are not empty, each begins no earlier than the span before it, and may overlap that
    span; only the last one may end earlier than the span before it. The grid, which may have far more blocks than the list, is never held
    as a mask."""
    kept = end > first
    row, first, end = row[kept], first[kept], end[kept]
    again = np.append(False, row[1:] == row[:-1])
    first = np.maximum(first, np.where(again, np.append(0, end[:-1]), 0))
    counts = np.maximum(end - first, 0)
    rows, columns = grid
    of_rows = np.zeros(rows, np.int64)
    np.add.at(of_rows, row, counts)
    fullest = max(1, int(of_rows.max()))
    check_entries(rows, fullest)
    ends = np.cumsum(counts)
    columns_listed, shifts = np.empty(int(counts.sum()), np.int32), (ends - counts - first).astype(np.int32)
    for some, _ in pieces((len(counts), fullest)):
        if len(ends[some]):
            start, stop = int(ends[some][0] - counts[some][0]), int(ends[some][-1])
            columns_listed[start:stop] = np.arange(start, stop, dtype=np.int32) - np.repeat(shifts[some], counts[some])
    return listed(padded(filled(of_rows, columns_listed, width)[None, None], columns, dtype), block_shape)


def dense(s_q: int, s_kv: int | None = None, block_shape: Sequence[int] = (128, 128), *, dtype: DType | None = None) -> BlockList:
    """A list of every block.

    Parameters
    ----------
    s_q, s_kv : int
        Numbers of query and key tokens; `s_kv` defaults to `s_q`.
    block_shape : (int, int)
        Number of tokens per block of queries and of keys, at least 1 each.
    dtype : dtype, optional
        uint16, int16, int32 or int64. Default: int32.

    Returns
    -------
    numpy.ndarray
        (1, 1, R, C).

    Raises
    ------
    TypeError, ValueError
        A size below 1, or a dtype that is not one of these or is too narrow for the columns.

    Examples
    --------
    >>> from blitz_attn import sabi
    >>> sabi.dense(256).tolist()
    [[[[0, 1], [0, 1]]]]
    """
    rows, columns = grid_of(s_q, s_kv, block_shape)
    return listed(padded(np.broadcast_to(np.arange(columns), (1, 1, rows, columns)), columns, dtype), checked_shape(block_shape))


def causal(
    s_q: int, s_kv: int | None = None, block_shape: Sequence[int] = (128, 128), *, dtype: DType | None = None, width: int | None = None
) -> BlockList:
    """Blocks at or before the diagonal, aligned to the bottom right: query i sees keys up to i + s_kv - s_q.

    Parameters
    ----------
    s_q, s_kv, block_shape, dtype
        As in `dense`.
    width : int, optional
        Width of the list. Default: the number of blocks in the fullest row.

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
    dtype: DType | None = None,
    width: int | None = None,
) -> BlockList:
    """Blocks within a window of tokens around the bottom-right diagonal.

    Parameters
    ----------
    s_q, s_kv, block_shape, dtype
        As in `dense`.
    window : (int, int)
        Numbers of tokens before and after the diagonal, as `window` of the attention call. -1 sets no bound.
    width : int, optional
        Width of the list. Default: the number of blocks in the fullest row.

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
    grid = sides_of(s_q, s_kv, block_shape)
    s_q, s_kv = tokens_of(s_q, s_kv)
    left, right = min(left, s_q + s_kv), min(right, s_q + s_kv)
    low, high = _keys_seen(s_q, s_kv, block_q)
    low = np.zeros_like(low) if left == -1 else low - left
    high = np.full_like(high, s_kv) if right == -1 else high + right
    return _list_of_spans(np.arange(grid[0]), *_span(low, high, s_kv, block_kv), grid, (block_q, block_kv), dtype, width)


def sink_local(
    s_q: int,
    s_kv: int | None = None,
    block_shape: Sequence[int] = (128, 128),
    *,
    sink: int,
    local: int,
    causal: bool = True,
    dtype: DType | None = None,
    width: int | None = None,
) -> BlockList:
    """Blocks of the first tokens and of the tokens near the diagonal: the pattern of streaming attention.

    Parameters
    ----------
    s_q, s_kv, block_shape, dtype, width
        As in `sliding_window`.
    sink : int
        Number of tokens at the start that queries see, at least 0.
    local : int
        Number of tokens before the diagonal (and, unless `causal`, after it) that a query sees, at least 0.
    causal : bool
        Drop the blocks that lie wholly after the diagonal.

    Returns
    -------
    numpy.ndarray
        (1, 1, R, W).

    Raises
    ------
    TypeError, ValueError
        As in `dense`, and a negative `sink` or `local`.

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
    grid = sides_of(s_q, s_kv, block_shape)
    s_q, s_kv = tokens_of(s_q, s_kv)
    sink, local = min(sink, s_q + s_kv), min(local, s_q + s_kv)
    low, high = _keys_seen(s_q, s_kv, block_q)
    start = np.full_like(high, sink - 1)
    sinks = _span(np.zeros_like(low), np.minimum(start, high) if causal else start, s_kv, block_kv)
    near = _span(low - local, high + (0 if causal else local), s_kv, block_kv)
    first, end = (np.stack(pair, axis=1).reshape(-1) for pair in zip(sinks, near, strict=True))
    return _list_of_spans(np.repeat(np.arange(grid[0]), 2), first, end, grid, (block_q, block_kv), dtype, width)


def document(
    lengths: Sequence[int],
    kv_lengths: Sequence[int] | None = None,
    block_shape: Sequence[int] = (128, 128),
    *,
    causal: bool = False,
    dtype: DType | None = None,
    width: int | None = None,
) -> BlockList:
    """Packed documents, each of which sees only itself.

    A block that holds tokens of two documents is listed for both, since a list cannot cut inside a block. To cut exactly, pass the result
    of `document_ranges` as `kv_ranges` of the attention call, with or without this list. (Layout TND cuts exactly by itself. There, each
    document has a list of its own.)

    Parameters
    ----------
    lengths : sequence of int
        Number of query tokens of each document, in order.
    kv_lengths : sequence of int, optional
        Number of key tokens of each document; default: `lengths`.
    block_shape, dtype, width
        As in `sliding_window`.
    causal : bool
        Keep only blocks at or before the bottom-right diagonal of a document.

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
        raise ValueError(f"lengths: expected as many numbers of at least 0 as kv_lengths, got {shown(q_sizes.tolist())}")
    for name, sizes in (("lengths", q_sizes), ("kv_lengths", kv_sizes)):
        if not 1 <= sum(map(int, sizes)) <= MOST_TOKENS:
            raise ValueError(f"{name}: expected 1 to {MOST_TOKENS} tokens in all, got {sum(map(int, sizes))}")
    s_q, s_kv = int(q_sizes.sum()), int(kv_sizes.sum())
    block_q, block_kv = checked_shape(block_shape)
    grid = sides_of(s_q, s_kv, block_shape)
    start, kv_start = np.cumsum(q_sizes) - q_sizes, np.cumsum(kv_sizes) - kv_sizes
    first = start // block_q
    counts = np.where(q_sizes > 0, (start + q_sizes - 1) // block_q + 1 - first, 0)  # rows that hold queries of each document
    at = np.repeat(np.arange(len(q_sizes)), counts)
    row = np.arange(len(at)) - np.repeat(np.cumsum(counts) - counts - first, counts)
    last = np.minimum((row + 1) * block_q, (start + q_sizes)[at]) - 1 - start[at]  # the document's last query in each row
    high = last + (kv_sizes - q_sizes)[at] if causal else kv_sizes[at] - 1
    return _list_of_spans(row, *_span(kv_start[at], kv_start[at] + high, s_kv, block_kv), grid, (block_q, block_kv), dtype, width)


def document_ranges(lengths: Integers) -> np.ndarray:
    """`kv_ranges` of packed documents, each of which sees only itself.

    The attention call may take `causal`, `window` and a list of blocks together with these ranges; all of these rules then hold. Without a
    list, the call reads for a tile of queries only the keys that at least one of these queries sees.

    Parameters
    ----------
    lengths : sequence of int
        Number of tokens of each document, in order.

    Returns
    -------
    numpy.ndarray
        (sum(lengths), 2) int64: for each token, the first token of its document and the place after the last one.

    Raises
    ------
    TypeError, ValueError
        Lengths that are not integers, are negative, or whose sum is not from 1 to 2**24.

    See Also
    --------
    document : the blocks that hold tokens of a document.
    kv_ranges_from_token_mask : ranges from a mask of booleans.

    Examples
    --------
    >>> from blitz_attn import sabi
    >>> sabi.document_ranges([2, 1]).tolist()
    [[0, 2], [0, 2], [2, 3]]

    Documents with a sliding window:

    >>> import numpy as np
    >>> import blitz_attn
    >>> q, k, v = (np.random.default_rng(n).standard_normal((1, 2, 300, 16)) for n in range(3))
    >>> rules = {"causal": True, "window": (64, 0), "kv_ranges": sabi.document_ranges([120, 100, 80])}
    >>> blitz_attn.block_sparse_attention(q, k, v, **rules).shape
    (1, 2, 300, 16)
    """
    sizes = integers(lengths, "lengths")
    if sizes.ndim != 1 or sizes.min(initial=0) < 0 or not 1 <= sum(map(int, sizes)) <= MOST_ROWS:
        raise ValueError(f"lengths: expected lengths of at least 0 whose sum is from 1 to {MOST_ROWS}, got {shown(sizes.tolist())}")
    ends = np.cumsum(sizes, dtype=np.int64)
    return np.stack([ends - sizes, ends], axis=-1).repeat(sizes, axis=0)


def dilated(
    s_q: int,
    s_kv: int | None = None,
    block_shape: Sequence[int] = (128, 128),
    *,
    stride: int,
    reach: int | None = None,
    causal: bool = False,
    dtype: DType | None = None,
    width: int | None = None,
) -> BlockList:
    """The diagonal block of each row, and every `stride`-th block counted from the diagonal block.

    Parameters
    ----------
    s_q, s_kv, block_shape, dtype, width
        As in `sliding_window`. The diagonal block holds the last key that the row's last query sees in a causal call.
    stride : int
        Distance between kept blocks, in blocks, at least 1.
    reach : int, optional
        Largest distance from the diagonal, in blocks, at least 0. Default: no bound.
    causal : bool
        Drop the blocks after the diagonal.

    Returns
    -------
    numpy.ndarray
        (1, 1, R, W).

    Raises
    ------
    TypeError, ValueError
        As in `dense`, and a stride below 1 or a negative reach.

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
    rows, columns = grid_of(s_q, s_kv, block_shape)
    _, high = _keys_seen(*tokens_of(s_q, s_kv), block_q)
    diagonal = np.floor_divide(high, block_kv)[:, None]
    mask = np.empty((rows, columns), bool)
    for at in pieces(mask.shape):
        away = diagonal[at[0]] - np.arange(columns)
        part = np.equal(away % stride, 0, out=mask[at])
        if reach is not None:
            part &= np.abs(away) <= reach
        if causal:
            part &= away >= 0
    return from_block_mask(mask[None, None], dtype=dtype, width=width, block_shape=block_shape)


def vertical_slash(
    s_q: int,
    s_kv: int | None = None,
    block_shape: Sequence[int] = (128, 128),
    *,
    vertical: ArrayLike,
    slash: ArrayLike,
    causal: bool = True,
    dtype: DType | None = None,
    width: int | None = None,
) -> BlockList:
    """Blocks that hold chosen key tokens, or tokens of chosen diagonals.

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
        (B, H, R, W). B and H are 1 where `vertical` and `slash` have no such axis.

    Raises
    ------
    TypeError, ValueError
        As in `dense`, and positions or distances out of range, or axes that do not broadcast.

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
    if math.prod(lead) > MOST_SIDE:
        raise ValueError(f"vertical, slash: expected at most {MOST_SIDE} heads in all, got {lead}")
    picked, offsets = (np.broadcast_to(x, (*lead, x.shape[-1])).reshape(math.prod(lead), x.shape[-1]) for x in (picked, offsets))
    low, high = _keys_seen(s_q, s_kv, block_q)
    mask = np.empty((picked.shape[0], rows, columns), bool)
    for head, (keys, back) in enumerate(zip(picked, offsets, strict=True)):
        for at in pieces(mask.shape[1:]):
            part, begin, end = mask[head][at], low[at[0]], high[at[0]]
            part[...] = False
            part[:, keys // block_kv] = True
            for step in back:
                part |= _span_mask(begin - step, end - step, s_kv, block_kv)
            if causal:
                part &= _span_mask(np.zeros_like(begin), end, s_kv, block_kv)
    return from_block_mask(mask.reshape(*lead, rows, columns), dtype=dtype, width=width, block_shape=block_shape)
