"""The block list and the token rule of a mask that is a function of indices. Public through `blitz_attn.sabi`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .._arrays import array as array_of
from .._arrays import choice
from .block_list import BlockList
from .convert import from_block_mask, listed_in_runs, runs_and_counts
from .lists import MOST_BLOCKS, MOST_SIDE, checked_shape, count_of, grid_of, result_dtype, tokens_of

if TYPE_CHECKING:
    from .._types import DType

__all__ = ["FunctionMask", "from_function"]

MOST_PAIRS = 1 << 38  # most pairs of tokens that are evaluated, which take minutes
TILE = (128, 512)  # queries and keys that are evaluated at once: an int64 for each pair takes half a mebibyte, which fits in a cache


class FunctionMask(NamedTuple):
    """The keys that a function of indices lets queries see, as arguments of `block_sparse_attention`: see `from_function`.

    ``block_sparse_attention(q, k, v, **mask._asdict())`` passes them on.
    """

    sabi: BlockList
    kv_ranges: np.ndarray | None
    attn_mask: np.ndarray | None
    block_shape: tuple[int, int]


FunctionMask.__module__ = "blitz_attn.sabi"  # where users and pickles find it


def _steps(size: int, block: int, most: int) -> Iterator[tuple[int, int]]:
    """Cuts tokens into runs of at most `most`. A run is one or more whole blocks, a part of a block, or the shorter last block."""
    whole = size - size % block
    step = block * max(1, most // block)
    for begin, end in [(n, min(n + step, whole)) for n in range(0, whole, step)] + [(whole, size)] * (whole < size):
        part = most if end - begin <= block else end - begin
        yield from ((n, min(n + part, end)) for n in range(begin, end, part))


def _evaluated(mask_mod: Callable[..., Any], sizes: tuple[int, int], shape: tuple[int, int], heads: tuple[int, int]) -> Iterator[Any]:
    """(batch, head, slice of queries, slice of keys, bool (queries, keys)) for each tile, in tiles that together hold all pairs of
    tokens."""
    for b, h in np.ndindex(heads):
        for q0, q1 in _steps(sizes[0], shape[0], TILE[0]):
            for k0, k1 in _steps(sizes[1], shape[1], TILE[1]):
                made = mask_mod(np.int64(b), np.int64(h), np.arange(q0, q1)[:, None], np.arange(k0, k1)[None])
                seen = array_of(made, "mask_mod", "a function that returns booleans")
                if seen.dtype != np.bool_:
                    raise TypeError(f"mask_mod: expected a function that returns booleans, got one that returns {seen.dtype}")
                wanted = (q1 - q0, k1 - k0)
                if seen.shape != wanted:
                    try:
                        seen = np.broadcast_to(seen, wanted)
                    except ValueError as error:
                        which = f"a result that broadcasts to {wanted}, the shapes of q_idx and kv_idx together"
                        raise ValueError(f"mask_mod: expected {which}, got shape {seen.shape}") from error
                yield b, h, slice(q0, q1), slice(k0, k1), seen


class _Found:
    """What the tiles of a function have shown. For each block, `some` and `gap` say whether it holds a pair that is seen, and one that is
    not. For each query, `first` and `end` are the hull of the keys that any head sees, and `counts` has the number of keys that each head
    sees."""

    def __init__(self, lead: tuple[int, int], grid: tuple[int, int], sizes: tuple[int, int], shape: tuple[int, int]) -> None:
        self.shape = shape
        self.some, self.gap = np.zeros((2, *lead, *grid), np.bool_)
        self.first, self.end = np.full((lead[0], sizes[0]), sizes[1], np.int64), np.zeros((lead[0], sizes[0]), np.int64)
        self.counts = np.zeros((*lead, sizes[0]), np.int64)

    def add(self, b: int, h: int, queries: slice, keys: slice, seen: np.ndarray) -> None:
        (height, width), (block_q, block_kv) = seen.shape, self.shape
        rows, columns = (slice(x.start // n, -(-x.stop // n)) for x, n in ((queries, block_q), (keys, block_kv)))
        blocks = b, h, rows, columns
        if not seen.any():
            self.gap[blocks] = True
            return
        first, end = self.first[b, queries], self.end[b, queries]
        if seen.all():
            self.some[blocks] = True
            self.counts[b, h, queries] += width
            np.minimum(first, keys.start, out=first)
            np.maximum(end, keys.stop, out=end)
            return
        size = min(block_kv, width)
        runs, counts = runs_and_counts(seen.reshape(height, width // size, size))
        runs += np.arange(keys.start, keys.stop, size)[:, None]
        begins = np.arange(0, height, block_q)
        self.some[blocks] |= np.logical_or.reduceat(counts > 0, begins, axis=0)
        self.gap[blocks] |= np.logical_or.reduceat(counts < size, begins, axis=0)
        self.counts[b, h, queries] += counts.sum(axis=1)
        np.minimum(first, np.where(counts > 0, runs[..., 0], first[:, None]).min(axis=1), out=first)
        np.maximum(end, np.where(counts > 0, runs[..., 1], 0).max(axis=1), out=end)


def from_function(
    mask_mod: Callable[..., Any],
    s_q: int,
    s_kv: int | None = None,
    block_shape: Sequence[int] = (128, 128),
    *,
    batch: int = 1,
    heads: int = 1,
    token_rule: str = "kv_ranges",
    dtype: DType | None = None,
    width: int | None = None,
) -> FunctionMask:
    """Block list and token rule of a mask that is a function of batch, head, query and key, as FlexAttention's `mask_mod` is.

    Parameters
    ----------
    mask_mod : callable
        ``mask_mod(b, h, q_idx, kv_idx)`` says with booleans which queries see which keys. The first two are integers of NumPy, the others
        int64 arrays, (queries, 1) and (1, keys), of some of the tokens. The result may have any shape that broadcasts to (queries, keys).
        What it raises is passed on.
    s_q, s_kv : int
        Numbers of query and key tokens; `s_kv` defaults to `s_q`.
    block_shape : (int, int)
        Number of tokens per block of queries and of keys, at least 1 each.
    batch, heads : int
        How many batch entries and heads the function is evaluated for. Leave a number at 1 where the function does not depend on that
        index: the result then fits any number of batch entries or heads.
    token_rule : {"kv_ranges", "attn_mask", "none"}
        The rule that hides keys within the listed blocks. ``"kv_ranges"``: a run of keys for each query; a function that such runs cannot
        express is refused. ``"attn_mask"``: runs, or, if they cannot express the function, a mask of bool, which takes
        ``batch * heads * s_q * s_kv`` bytes. ``"none"``: no rule, so that attention over the listed blocks may see keys that the function
        hides.
    dtype, width
        As in `from_block_mask`.

    Returns
    -------
    FunctionMask
        A named tuple of arguments of `block_sparse_attention`. ``sabi``: (batch, heads, R, W), the blocks in which a query sees a key.
        ``kv_ranges``: int32 (s_q, 2), or (batch, s_q, 2) with more than one batch entry, as from `kv_ranges_from_token_mask`; None where
        every query sees all keys of its listed blocks, under ``token_rule="none"``, and where ``attn_mask`` is given. ``attn_mask``: None,
        or bool (batch, heads, s_q, s_kv). ``block_shape``: the block shape of the list.

    Raises
    ------
    TypeError
        `mask_mod` is not callable, or does not return booleans.
    ValueError
        Under ``token_rule="kv_ranges"``, a function for which no run of keys per query, the same for all heads, hides exactly the right
        keys of the listed blocks. A result of a wrong shape, sizes out of range, or a row that holds more than `width` blocks.

    See Also
    --------
    from_token_mask, kv_ranges_from_token_mask : the same for a mask that is an array.
    blitz_attn.integrations.torch.from_flex_block_mask : the same for a BlockMask.

    Notes
    -----
    The function is evaluated on all pairs of tokens, at most 128 x 512 at a time: no array of the size of queries times keys is kept,
    except the mask of ``token_rule="attn_mask"``. 16384 x 16384 pairs take about a second for each head. Where the keys that a query sees
    have gaps, another order of the tokens may close them: for a video, an order that goes cube by cube (`blitz_attn.video.cube_order`).

    Examples
    --------
    >>> import numpy as np
    >>> import blitz_attn
    >>> from blitz_attn import sabi
    >>> mask = sabi.from_function(lambda b, h, i, j: (i >= j) & (i - j <= 100), 512)
    >>> mask.sabi[0, 0].tolist(), mask.kv_ranges[[0, 300]].tolist()
    ([[0, -1], [0, 1], [1, 2], [2, 3]], [[0, 1], [200, 301]])
    >>> q = np.random.default_rng(0).standard_normal((1, 2, 512, 64), dtype=np.float32)
    >>> out = blitz_attn.block_sparse_attention(q, q, q, **mask._asdict())
    >>> expected = blitz_attn.block_sparse_attention(q, q, q, causal=True, window=(100, 0))
    >>> bool(np.abs(out - expected).max() < 1e-5)
    True
    """
    if not callable(mask_mod):
        raise TypeError(f"mask_mod: expected a function of (b, h, q_idx, kv_idx), got {type(mask_mod).__name__}")
    grid, shape, sizes = grid_of(s_q, s_kv, block_shape), checked_shape(block_shape), tokens_of(s_q, s_kv)
    lead = count_of(batch, "batch", MOST_SIDE, 1), count_of(heads, "heads", MOST_SIDE, 1)
    rule = choice(token_rule, "token_rule", ("kv_ranges", "attn_mask", "none"))
    result_dtype(grid[1], dtype)  # refuses a wrong dtype before the function is called
    pairs = math.prod((*lead, *sizes))
    if math.prod((*lead, *grid)) > MOST_BLOCKS or pairs > MOST_PAIRS:
        most = f"at most {MOST_BLOCKS} blocks and {MOST_PAIRS} pairs of tokens in all"
        raise ValueError(f"batch, heads: expected {most}, got {lead[0]} x {lead[1]} heads of {sizes[0]} x {sizes[1]} tokens")
    if rule == "attn_mask" and pairs > MOST_BLOCKS:
        raise ValueError(f"token_rule: expected a rule other than 'attn_mask' for more than {MOST_BLOCKS} pairs of tokens, got {pairs}")
    found = _Found(lead, grid, sizes, shape)
    for tile in _evaluated(mask_mod, sizes, shape, lead):
        found.add(*tile)
    sabi = from_block_mask(found.some, dtype=dtype, width=width, block_shape=shape)
    if rule == "none" or not (found.some & found.gap).any():
        return FunctionMask(sabi, None, None, shape)
    runs = np.where((found.first < found.end)[..., None], np.stack([found.first, found.end], axis=-1), 0)
    gaps = found.counts != listed_in_runs(found.some, runs[:, None], shape, sizes[1])
    if not gaps.any():
        ranges = runs.astype(np.int32 if sizes[1] < 1 << 31 else np.int64)
        return FunctionMask(sabi, ranges[0] if lead[0] == 1 else ranges, None, shape)
    if rule == "kv_ranges":
        place = ", ".join(str(n) for n in np.argwhere(gaps)[0])
        raise ValueError(
            "mask_mod: expected a function by which the keys of a query are one run in the listed blocks, the same for all heads "
            f"(token_rule='attn_mask' takes any), got a gap for [batch, head, query] = [{place}]"
        )
    mask = np.empty((*lead, *sizes), np.bool_)
    for *at, seen in _evaluated(mask_mod, sizes, shape, lead):
        mask[tuple(at)] = seen
    return FunctionMask(sabi, None, mask, shape)
