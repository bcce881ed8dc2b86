"""The parts of the float64 twins of native sparse attention: sequences, the three branches, compression, scores, gates.

One sequence is (heads, tokens, dim), and its scores are (KV heads, group, queries, keys). Every branch is the same softmax
over the keys that its rule lets a query see; a rule is an iterator of `Strip`, one per strip of queries. Arrays are float64, or
float32 where a twin imitates a program of lower precision; a `Rounding` is then applied to every intermediate result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from .._arrays import integer
from .dense import round_in_float32

_STRIP_ELEMENTS = 1 << 22  # most scores in memory at a time: 32 MiB of float64
CMP_GROUP = 128  # compressed keys that num_cmp_selected_blocks counts as one block: upstream's

Rounding = Callable[[np.ndarray], np.ndarray]


def rounding_of(name: str) -> Rounding:
    """The rounding that a program in dtype `name` applies to each intermediate array, which is float64 or float32 here."""
    return lambda x: x if x.dtype == np.float64 else round_in_float32(x, name)


# ---- Sequences ----------------------------------------------------------------------------------------------------


def cuts(cu_seqlens: Any, total: int, name: str = "cu_seqlens") -> list[int]:
    """Checked cumulative lengths of `total` tokens."""
    offsets = [int(n) for n in np.asarray(cu_seqlens).reshape(-1)]
    if not offsets or offsets[0] != 0 or offsets[-1] != total or any(a > b for a, b in pairwise(offsets)):
        raise ValueError(f"{name}: expected lengths rising from 0 to {total}, got {offsets}")
    return offsets


def block_count(tokens: int, block_size: int, stride: int) -> int:
    """Number of complete blocks of a sequence."""
    return 0 if tokens < block_size else (tokens - block_size) // stride + 1


def compressed_cuts(offsets: list[int], block_size: int, stride: int) -> list[int]:
    """Where each sequence's blocks begin in a packed array of compressed keys."""
    counts = [block_count(b - a, block_size, stride) for a, b in pairwise(offsets)]
    return [0, *np.cumsum(counts, dtype=np.int64).tolist()]


def check_compressed(x: Any, lengths: list[int], packed: bool, block_size: int, stride: int, name: str = "k_cmp") -> None:
    """Refuses other numbers of compressed keys than `compress` makes of sequences of these lengths."""
    counts = [block_count(n, block_size, stride) for n in lengths]
    expected = sum(counts) if packed else max(counts, default=0)
    if np.ndim(x) < 3 or np.shape(x)[-3] != expected:
        raise ValueError(f"{name}: expected {expected} blocks of compress_block_size = {block_size}, got {np.shape(x)}")


class Place(NamedTuple):
    """Where the queries of a sequence stand among its tokens: they are its last ones."""

    begin: int  # token number of the first query
    tokens: int  # of the sequence

    @classmethod
    def of(cls, queries: int, tokens: int, name: str = "q") -> Place:
        if queries > tokens:
            raise ValueError(f"{name}: expected at most the {tokens} tokens of its sequence, got {queries}")
        return cls(tokens - queries, tokens)


def places(q: Any, tokens: Any, cu_seqlens: Any, cu_seqlens_q: Any) -> tuple[list[Place], list[int] | None, list[int] | None]:
    """The place of each sequence's queries, and the cumulative lengths of queries and of tokens where they are packed.

    `tokens`: of all sequences together where packed, else of each one; None: as many as there are queries.
    """
    queries = np.shape(q)[-3]
    if cu_seqlens is None:
        if cu_seqlens_q is not None:
            raise ValueError("cu_seqlens_q: expected None without cu_seqlens, got some")
        return [Place.of(queries, queries if tokens is None else tokens)] * np.shape(q)[0], None, None
    own = cu_seqlens if cu_seqlens_q is None else cu_seqlens_q
    cu_q = cuts(own, queries, "cu_seqlens" if cu_seqlens_q is None else "cu_seqlens_q")
    total = tokens if tokens is not None else int(np.asarray(cu_seqlens).reshape(-1)[-1]) if np.size(cu_seqlens) else 0
    cu = cuts(cu_seqlens, total)
    if len(cu) != len(cu_q):
        raise ValueError(f"cu_seqlens_q: expected {len(cu)} numbers like cu_seqlens, got {len(cu_q)}")
    lengths = [(b - a, d - c) for (a, b), (c, d) in zip(pairwise(cu_q), pairwise(cu), strict=True)]
    return [Place.of(n, m, "cu_seqlens_q") for n, m in lengths], cu_q, cu


def split(x: np.ndarray, offsets: list[int] | None) -> list[np.ndarray]:
    """(heads, tokens, dim) of every sequence of a (B, N, heads, dim) or packed (T, heads, dim) array."""
    return list(x.swapaxes(1, 2)) if offsets is None else [x[a:b].swapaxes(0, 1) for a, b in pairwise(offsets)]


def join(parts: list[np.ndarray], packed: bool, empty: tuple[int, ...]) -> np.ndarray:
    """The inverse of `split`. `empty` is the shape of the result where there is no sequence."""
    if not parts:
        return np.zeros(empty)
    turned = [x.swapaxes(0, 1) for x in parts]
    return np.concatenate(turned) if packed else np.stack(turned)


def default_scale(scale: float | None, q: np.ndarray) -> float:
    return 1.0 / math.sqrt(q.shape[-1]) if scale is None else float(scale)


# ---- Softmax over the keys that a rule allows -----------------------------------------------------------------------


class Strip(NamedTuple):
    """Some queries and the keys that any of them may see."""

    rows: slice
    keys: Any  # index into the keys: a slice or an array of positions
    seen: np.ndarray  # bool, broadcasts to (KV heads, group, rows, keys)


def _row_strips(rows: int, heads: int, columns: int) -> Iterator[slice]:
    step = max(1, _STRIP_ELEMENTS // max(1, heads * columns))
    return (slice(a, min(a + step, rows)) for a in range(0, rows, step))


def grouped(x: np.ndarray, kv_heads: int) -> np.ndarray:
    """(heads, n, dim) as (KV heads, group, n, dim)."""
    return x.reshape(kv_heads, x.shape[0] // kv_heads, *x.shape[1:])


def _scores(q: np.ndarray, k: np.ndarray, seen: np.ndarray, scale: float, r: Rounding) -> np.ndarray:
    s = r(q @ k[:, None].swapaxes(-1, -2) * q.dtype.type(scale))
    return np.where(seen, s, q.dtype.type(-np.inf))


def _weighted_sum(p: np.ndarray, v: np.ndarray, seen: np.ndarray) -> np.ndarray:
    """p @ v in which a NaN or inf in v reaches only the rows that see its key (0 * inf would reach all)."""
    nonfinite = np.flatnonzero(~np.isfinite(v).all(axis=(0, 1, 3)))
    if nonfinite.size == 0:
        return p @ v
    plain = v.copy()
    plain[:, :, nonfinite] = 0
    out = p @ plain
    for j in nonfinite:
        with np.errstate(invalid="ignore"):
            out += np.where(seen[..., j, None], p[..., j, None] * v[:, :, j, None], 0)
    return out


def attend(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, strips: Iterator[Strip], scale: float, r: Rounding
) -> tuple[np.ndarray, np.ndarray]:
    """(heads, n, dim_v) output and (heads, n) log-sum-exp of one sequence; queries that see no key get 0 and -inf."""
    kv_heads = k.shape[0]
    q4 = grouped(q, kv_heads)
    out, lse = np.zeros((*q4.shape[:3], v.shape[2]), q.dtype), np.full(q4.shape[:3], -np.inf, q.dtype)
    for rows, keys, seen in strips:
        if seen.shape[-1] == 0:
            continue
        s = _scores(q4[:, :, rows], k[:, keys], seen, scale, r)
        top = s.max(axis=-1, keepdims=True)
        top = np.where(np.isneginf(top), q.dtype.type(0), top)
        p = np.exp(s - top)
        total = p.sum(axis=-1, keepdims=True)
        with np.errstate(divide="ignore", invalid="ignore"):
            p = np.where(total == 0, q.dtype.type(0), p / total)
            lse[:, :, rows] = (top + np.log(total))[..., 0]
        out[:, :, rows] = r(_weighted_sum(r(p), v[:, None, keys], seen))
    return out.reshape(*q.shape[:2], v.shape[2]), lse.reshape(q.shape[:2])


def attend_backward(
    dout: np.ndarray, q: np.ndarray, k: np.ndarray, v: np.ndarray, out: np.ndarray, lse: np.ndarray, strips: Iterator[Strip], scale: float,
    r: Rounding,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:  # fmt: skip
    """Gradients of q, k, v of one sequence: P from the log-sum-exp, dS = P (dO V^T - rowsum(dO O))."""
    kv_heads = k.shape[0]
    q4, dout4, out4 = (grouped(x, kv_heads) for x in (q, dout, out))
    lse4 = lse.reshape(*q4.shape[:3], 1)
    delta = (dout4 * out4).sum(axis=-1, keepdims=True)
    dq, dk, dv = np.zeros_like(q4), np.zeros_like(k), np.zeros_like(v)
    for rows, keys, seen in strips:
        if seen.shape[-1] == 0:
            continue
        s = _scores(q4[:, :, rows], k[:, keys], seen, scale, r)
        known = lse4[:, :, rows]
        p = np.where(np.isneginf(s), q.dtype.type(0), np.exp(s - np.where(np.isneginf(known), q.dtype.type(0), known)))
        dp = r(dout4[:, :, rows] @ v[:, None, keys].swapaxes(-1, -2))
        ds = r(p * (dp - delta[:, :, rows]))
        dq[:, :, rows] = ds @ k[:, None, keys] * q.dtype.type(scale)
        dk[:, keys] += (ds.swapaxes(-1, -2) @ q4[:, :, rows]).sum(axis=1) * q.dtype.type(scale)
        dv[:, keys] += (r(p).swapaxes(-1, -2) @ dout4[:, :, rows]).sum(axis=1)
    return r(dq).reshape(q.shape), r(dk), r(dv)


# ---- The rules ------------------------------------------------------------------------------------------------------


def compressed_strips(
    rows: int, heads: int, blocks: int, block_size: int, stride: int, mode: str, causal: bool, kept: np.ndarray | None = None,
    tile: int = 1, first: int = 0,
) -> Iterator[Strip]:  # fmt: skip
    """Blocks that a query may see. paper: blocks that end at or before it; mslk: blocks that begin at or before it. `first`: token number
    of the first query.

    `kept` (KV heads, group, tiles, groups of blocks) restricts each tile of queries to the groups that are True.
    """
    begin = np.arange(blocks) * stride
    last = begin + block_size - 1 if mode == "paper" else begin
    for strip in _row_strips(rows, heads, blocks):
        at = np.arange(strip.start, strip.stop)
        seen = np.ones((1, 1, at.size, blocks), bool)
        if causal:
            seen &= last <= first + at[:, None]
        if kept is not None:
            seen = seen & kept[:, :, at // tile][..., np.arange(blocks) // CMP_GROUP]
        yield Strip(strip, slice(0, blocks), seen)


def selected_strips(
    indices: np.ndarray, rows: int, heads: int, kv_heads: int, block_size: int, causal: bool, tile: int, place: Place
) -> Iterator[Strip]:
    """Tokens of the blocks that `indices` (heads or KV heads, tiles, n) lists for a query's tile, none after the query."""
    blocks = -(-place.tokens // block_size)
    where = np.arange(place.tokens)
    for strip in _row_strips(rows, heads, place.tokens):
        at = np.arange(strip.start, strip.stop)
        listed = indices[:, at // tile]
        member = np.zeros((*listed.shape[:2], blocks + 1), bool)
        np.put_along_axis(member, np.where(listed < 0, blocks, listed), True, axis=-1)
        member = grouped(member[..., :blocks], kv_heads)
        listed_by_any: np.ndarray = np.logical_or.reduce(member, axis=(0, 1, 2))
        keys = where[listed_by_any[where // block_size]]
        seen = member[..., keys // block_size]
        yield Strip(strip, keys, seen & (keys <= place.begin + at[:, None]) if causal else seen)


def window_strips(rows: int, heads: int, window: int, causal: bool, place: Place) -> Iterator[Strip]:
    """`window` keys that end with the query itself; not causal: half as many before it, as many after it, and itself."""
    before, after = (window - 1, 0) if causal else (window // 2, window // 2)
    for strip in _row_strips(rows, heads, min(place.tokens, 2 * (before + after + 1))):
        at = place.begin + np.arange(strip.start, strip.stop)[:, None]
        a, b = max(0, place.begin + strip.start - before), min(place.tokens, place.begin + strip.stop + after)
        where = np.arange(a, b)
        yield Strip(strip, slice(a, b), ((where >= at - before) & (where <= at + after))[None, None])


# ---- Compression ----------------------------------------------------------------------------------------------------


def _block_means(x: np.ndarray, block_size: int, stride: int) -> np.ndarray:
    if x.shape[1] < block_size:
        return np.zeros((x.shape[0], 0, x.shape[2]), x.dtype)
    return np.lib.stride_tricks.sliding_window_view(x, block_size, axis=1)[:, ::stride].mean(axis=-1)


def compress(x: np.ndarray, block_size: int, stride: int, w: np.ndarray | None, r: Rounding) -> np.ndarray:
    """(KV heads, blocks, dim): means of blocks of tokens, times the head's matrix."""
    mean = r(_block_means(x, block_size, stride))
    return mean if w is None else r(mean @ w)


def compress_backward(
    dy: np.ndarray, x: np.ndarray, block_size: int, stride: int, w: np.ndarray | None, r: Rounding
) -> tuple[np.ndarray, np.ndarray | None]:
    """Gradients of `compress` for x and w."""
    dx, dw = np.zeros_like(x), None
    dmean = dy
    if w is not None:
        mean = r(_block_means(x, block_size, stride))
        dw = mean.swapaxes(1, 2) @ dy
        dmean = r(dy @ w.swapaxes(1, 2))
    blocks = dy.shape[1]
    if blocks:
        for offset in range(block_size):
            dx[:, offset : offset + (blocks - 1) * stride + 1 : stride] += dmean / x.dtype.type(block_size)
    return r(dx), dw


def at_least(least: int, name: str, value: Any) -> int:
    """The integer `value`, which must be at least `least`."""
    number = integer(value, name)
    if number < least:
        raise ValueError(f"{name}: expected {'a positive number' if least else '0 or more'}, got {number}")
    return number


def check_block_sizes(block_size: Any, stride: Any) -> tuple[int, int]:
    size = at_least(1, "compress_block_size", block_size)
    return size, size if stride is None else at_least(1, "compress_stride", stride)


def check_weight(name: str, w: Any, heads: int, dim: int) -> None:
    if w is not None and tuple(w.shape) != (heads, dim, dim):
        raise ValueError(f"{name}: expected shape (Hkv, D, D) = {(heads, dim, dim)}, got {tuple(w.shape)}")


# ---- Selection ------------------------------------------------------------------------------------------------------


class Selector(NamedTuple):
    """The rules by which blocks are selected."""

    mode: str
    block_size: int  # tokens per compressed block
    stride: int
    select_block_size: int
    causal: bool
    tile: int  # queries that share a row of scores: 1 in paper mode
    init_blocks: int
    local_blocks: int

    @property
    def overlaps(self) -> list[tuple[int, int]]:
        """(offset, times): how often compressed block ``(l'/d) j + offset`` counts for selection block j."""
        wide, narrow = self.select_block_size // self.stride, self.block_size // self.stride
        counts: dict[int, int] = {}
        for m in range(wide):
            for n in range(narrow):
                counts[m - n] = counts.get(m - n, 0) + 1
        return sorted(counts.items())

    def blocks(self, tokens: int) -> int:
        """Number of blocks that can be selected. mslk: complete blocks; paper: all blocks that begin within the sequence."""
        return tokens // self.block_size if self.mode == "mslk" else -(-tokens // self.select_block_size)


def sequence_scores(q: np.ndarray, k_cmp: np.ndarray, how: Selector, scale: float, place: Place) -> np.ndarray:
    """(heads, tiles, blocks) in mslk mode, (KV heads, queries, blocks) in paper mode. A block with -inf cannot be selected, one
    with +inf must be."""
    queries, kv_heads = q.shape[1], k_cmp.shape[0]
    blocks, rows = how.blocks(place.tokens), -(-queries // how.tile)
    if how.mode == "mslk":
        means = np.stack([q[:, a : a + how.tile].mean(axis=1) for a in range(0, queries, how.tile)], axis=1) if queries else q
        scores = scale * (grouped(means, kv_heads) @ k_cmp[:, None].swapaxes(-1, -2)).reshape(q.shape[0], rows, blocks)
        ends = place.begin + (np.arange(rows)[:, None] + 1) * how.tile
        eligible = np.arange(blocks) * how.block_size < ends if how.causal else np.ones((rows, blocks), bool)
        return np.where(eligible, scores, -np.inf)
    compressed = k_cmp.shape[1]
    scores = np.zeros((kv_heads, queries, blocks))
    first = np.arange(blocks) * (how.select_block_size // how.stride)
    q4 = grouped(q, kv_heads)
    sight = compressed_strips(queries, q.shape[0], compressed, how.block_size, how.stride, "paper", how.causal, first=place.begin)
    for strip in sight:
        if compressed == 0:
            break
        s = _scores(q4[:, :, strip.rows], k_cmp, strip.seen, scale, rounding_of("float64"))
        top = s.max(axis=-1, keepdims=True)
        p = np.exp(s - np.where(np.isneginf(top), 0.0, top))
        total = p.sum(axis=-1, keepdims=True)
        p = (p / np.where(total == 0, 1.0, total)).sum(axis=1)
        for offset, times in how.overlaps:
            inside = (first + offset >= 0) & (first + offset < compressed)
            scores[:, strip.rows, inside] += times * p[..., (first + offset)[inside]]
    own, block = (place.begin + np.arange(queries)[:, None]) // how.select_block_size, np.arange(blocks)
    if how.causal:
        local = (block > own - how.local_blocks) & (block <= own)
    else:
        local = (block >= own - how.local_blocks // 2) & (block < own - how.local_blocks // 2 + how.local_blocks)
    scores[:, (block < how.init_blocks) | local] = np.inf
    if how.causal:
        scores[:, block > own] = -np.inf
    return scores


def top_blocks(scores: np.ndarray, count: int) -> np.ndarray:
    """int32 (..., count): the highest scores, of equal ones the lower index, ascending; -1 where there are no more."""
    scores = np.where(np.isnan(scores), np.finfo(float).min, scores)  # a NaN can still be attended, where it will show
    order = np.argsort(-scores, axis=-1, kind="stable")[..., :count]
    eligible = ~np.isneginf(np.take_along_axis(scores, order, -1))
    ascending = np.sort(np.where(eligible, order, scores.shape[-1]), axis=-1)
    result = np.full((*scores.shape[:-1], count), -1, np.int32)
    result[..., : order.shape[-1]] = np.where(ascending == scores.shape[-1], -1, ascending)
    return result


def cmp_groups(scores: np.ndarray, count: int | None) -> np.ndarray | None:
    """bool (heads, tiles, groups): the groups of CMP_GROUP compressed keys that num_cmp_selected_blocks keeps, by the mean score
    of their members that can be selected; None keeps all."""
    if count is None:
        return None
    starts = np.arange(0, scores.shape[-1], CMP_GROUP)
    if starts.size == 0:
        return np.zeros((*scores.shape[:-1], 0), bool)
    eligible = ~np.isneginf(scores)
    members = np.add.reduceat(eligible, starts, axis=-1, dtype=np.int64)
    sums = np.add.reduceat(np.where(eligible, scores, 0.0), starts, axis=-1)
    means = np.where(members > 0, sums / np.maximum(members, 1), -np.inf)
    chosen = top_blocks(means, min(count, starts.size))
    kept = np.zeros((*means.shape[:-1], starts.size + 1), bool)
    np.put_along_axis(kept, np.where(chosen < 0, starts.size, chosen).astype(np.int64), True, axis=-1)
    return kept[..., :-1]


def selector(
    mode: str, compress_block_size: Any, causal: bool, q_tile_size: Any, compress_stride: Any, select_block_size: Any, init_blocks: Any,
    local_blocks: Any, num_selected_blocks: Any,
) -> Selector:  # fmt: skip
    """Checked rules of a selection, with each mode's defaults."""
    if mode not in ("paper", "mslk"):
        raise ValueError(f'mode: expected "paper" or "mslk", got {mode!r}')
    given = {
        "compress_block_size": compress_block_size,
        "num_selected_blocks": num_selected_blocks,
        "q_tile_size": q_tile_size,
        "compress_stride": compress_stride,
        "select_block_size": select_block_size,
    }
    for name, value in given.items():
        if value is not None:
            at_least(1, name, value)
    for name, value in (("init_blocks", init_blocks), ("local_blocks", local_blocks)):
        at_least(0, name, value)
    size = int(compress_block_size)
    if mode == "mslk":
        for name in ("compress_stride", "select_block_size"):
            if given[name] is not None and int(given[name]) != size:
                raise ValueError(f'{name}: expected None or compress_block_size = {size} in mode "mslk", got {given[name]}')
        return Selector(mode, size, size, size, bool(causal), int(q_tile_size), 0, 0)
    stride = int(compress_stride or max(1, size // 2))
    wide = int(select_block_size or size)
    for name, value in (("compress_block_size", size), ("select_block_size", wide)):
        if value % stride:
            raise ValueError(f"compress_stride: expected a divisor of {name} = {value}, got {stride}")
    if init_blocks + local_blocks > num_selected_blocks:
        raise ValueError(
            f"num_selected_blocks: expected at least init_blocks + local_blocks = {init_blocks + local_blocks}, got {num_selected_blocks}"
        )
    return Selector(mode, size, stride, wide, bool(causal), 1, int(init_blocks), int(local_blocks))


# ---- The branches ---------------------------------------------------------------------------------------------------


def check_tile(place: Place, how: Selector) -> None:
    """Refuses queries that begin within a tile, whose selection depends on queries that are not there."""
    if place.begin % how.tile:
        expected = f"queries from the beginning of a tile of q_tile_size = {how.tile} tokens on"
        raise ValueError(f'q: expected in mode "mslk" {expected}, got token {place.begin}')


def routing_parts(indices: Any, cu_seqlens: Any, tile: int) -> list[np.ndarray]:
    """The (heads, tiles, n) of each sequence of a selection, -1 from the first -1 of a row on. `cu_seqlens`: of the queries."""
    indices = np.asarray(indices)
    if indices.dtype.kind == "i":
        indices = np.where(np.logical_or.accumulate(indices == -1, axis=-1), -1, indices)
    if cu_seqlens is None:
        return list(indices)
    tiles = np.cumsum([0, *(-(-int(b - a) // tile) for a, b in pairwise(np.asarray(cu_seqlens).astype(np.int64)))])
    return [indices[:, a:b] for a, b in pairwise(tiles)]


# ---- Gates ----------------------------------------------------------------------------------------------------------


def sigmoid_gates(q: np.ndarray, weight: np.ndarray | None, r: Rounding) -> np.ndarray:
    """(..., H, 3): sigmoid of each head's query times its three weights; a third each without weights."""
    if weight is None:
        return np.full((*q.shape[:-1], 3), 1 / 3, q.dtype)
    logits = r(np.einsum("...hd,hcd->...hc", q, weight))
    half = np.exp(-np.abs(logits))
    return r(np.where(logits >= 0, 1 / (1 + half), half / (1 + half)).astype(q.dtype))


def combine(branches: list[np.ndarray], gates: np.ndarray, r: Rounding) -> np.ndarray:
    """The gated sum of the branches."""
    return r(sum(gates[..., c, None] * x for c, x in enumerate(branches)))


def gates_backward(
    q: np.ndarray, dout: np.ndarray, branches: list[np.ndarray], gates: np.ndarray, weight: np.ndarray | None, r: Rounding
) -> tuple[list[np.ndarray], np.ndarray, np.ndarray | None, np.ndarray | None]:
    """Gradients of the branches, of the gates as numbers, and through the weights of q and of them."""
    dbranches = [r(gates[..., c, None] * dout) for c in range(3)]
    dgates = r(np.stack([(dout * x).sum(axis=-1) for x in branches], axis=-1))
    if weight is None:
        return dbranches, dgates, None, None
    dlogits = dgates * gates * (1 - gates)
    dq = r(np.einsum("...hc,hcd->...hd", dlogits, weight))
    tokens = tuple(range(q.ndim - 2))
    dweight = (dlogits[..., None] * q[..., None, :]).sum(axis=tokens)
    return dbranches, dgates, dq, dweight
