"""The parts of the float64 twins of native sparse attention: the three branches, compression, scores, gates.

Every branch is the same softmax over the keys that its rule lets a query see. Arrays of one sequence are (heads, tokens, dim).
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from .._nsa.rules import CMP_GROUP, Rules, number, rules_of
from .attend import Array, ScoreRules, Sequence, factor, grouped, named, sequence, weights
from .common import Rounding, cuts, lengths, rounding_of

# ---- Sequences ------------------------------------------------------------------------------------------------------


class Places(NamedTuple):
    """Where the queries of each sequence stand: they are its last tokens."""

    queries: list[int] | None  # cumulative numbers where sequences are packed
    tokens: list[int] | None
    of: list[tuple[int, int]]  # the token number of each sequence's first query, and its number of tokens

    @property
    def layout(self) -> str:
        return "BSND" if self.tokens is None else "TND"


def read_places(q: Any, cu_seqlens: Any, cu_seqlens_q: Any = None, tokens: int | None = None, kv_lens: Any = None) -> Places:
    """`tokens`: the number of tokens of all packed sequences together, or of each sequence of a batch. None: the number that `cu_seqlens`
    says, or else the number of queries."""
    queries = np.shape(q)[-3]
    if cu_seqlens is None:
        full = [queries if tokens is None else tokens] * np.shape(q)[0]
        return Places(None, None, [(n - queries, n) for n in lengths("kv_lens", kv_lens, full)])
    total = int(np.asarray(cu_seqlens)[-1]) if tokens is None else tokens
    cu_q = cuts("cu_seqlens_q", cu_seqlens if cu_seqlens_q is None else cu_seqlens_q, queries)
    cu = cuts("cu_seqlens", cu_seqlens, total)
    return Places(cu_q, cu, [(n - m, n) for m, n in zip(np.diff(cu_q).tolist(), np.diff(cu).tolist(), strict=True)])


def sizes(block_size: Any, stride: Any) -> tuple[int, int]:
    """Tokens of a compressed block, and tokens from the start of one block to the start of the next."""
    size = number(block_size, "compress_block_size")
    return size, size if stride is None else number(stride, "compress_stride")


def block_count(tokens: int, block_size: int, stride: int) -> int:
    """Number of complete blocks of a sequence."""
    return 0 if tokens < block_size else (tokens - block_size) // stride + 1


def compressed_cuts(offsets: list[int], block_size: int, stride: int) -> list[int]:
    """Where each sequence's blocks begin in a packed array of compressed keys."""
    counts = [block_count(b - a, block_size, stride) for a, b in pairwise(offsets)]
    return [0, *np.cumsum(counts, dtype=np.int64).tolist()]


# ---- The branches ---------------------------------------------------------------------------------------------------


def compressed_branch(
    q: Array, k_cmp: Array, v_cmp: Array, begin: int, size: int, stride: int, mode: str, causal: bool, groups: Array | None = None,
    tile: int = 1,
) -> Sequence:  # fmt: skip
    """Compressed keys that a query may see: if causal, those of blocks that end (mode paper) or begin (mode mslk) at or before the query;
    else all.

    `groups` (heads, tiles, groups of compressed keys) restricts each tile of queries to the groups that are True.
    """
    s = sequence(q, k_cmp, v_cmp, begin=begin)
    if causal:
        last = begin + np.arange(q.shape[1]) - (size - 1 if mode == "paper" else 0)
        s.high = np.minimum(s.high, last // stride)
    s.kept, s.block_shape = groups, (tile, CMP_GROUP)
    return s


def selected_branch(q: Array, k: Array, v: Array, begin: int, lists: Array, size: int, tile: int, causal: bool) -> Sequence:
    """Tokens of the blocks that `lists` (heads or KV heads, tiles, n) names for a query's tile; if causal, none after the query."""
    s = sequence(q, k, v, begin=begin, right=0 if causal else None)
    s.kept, s.block_shape = named(lists, -(-k.shape[1] // size)), (tile, size)
    return s


def window_branch(q: Array, k: Array, v: Array, begin: int, window: int, causal: bool) -> Sequence:
    """`window` keys, the last of which is the query's own. If not causal: `window // 2` keys before it, as many after it, and its own."""
    left, right = (window - 1, 0) if causal else (window // 2, window // 2)
    return sequence(q, k, v, begin=begin, left=left, right=right)


# ---- Compression ----------------------------------------------------------------------------------------------------


def _block_means(x: Array, block_size: int, stride: int) -> Array:
    if x.shape[1] < block_size:
        return np.zeros((x.shape[0], 0, x.shape[2]), x.dtype)
    return np.lib.stride_tricks.sliding_window_view(x, block_size, axis=1)[:, ::stride].mean(axis=-1)


def compress(x: Array, block_size: int, stride: int, w: Array | None, r: Rounding) -> Array:
    """(KV heads, blocks, dim): means of blocks of tokens, times the head's matrix."""
    mean = r(_block_means(x, block_size, stride))
    return mean if w is None else r(mean @ w)


def compress_backward(dy: Array, x: Array, block_size: int, stride: int, w: Array | None, r: Rounding) -> tuple[Array, Array | None]:
    """Gradients of `compress` for x and w."""
    dx, dw, dmean = np.zeros_like(x), None, dy
    if w is not None:
        dw = r(_block_means(x, block_size, stride)).swapaxes(1, 2) @ dy
        dmean = r(dy @ w.swapaxes(1, 2))
    for i in range(dy.shape[1]):
        dx[:, i * stride : i * stride + block_size] += dmean[:, i, None] / x.dtype.type(block_size)
    return r(dx), dw


# ---- Selection ------------------------------------------------------------------------------------------------------


def overlaps(rules: Rules) -> dict[int, int]:
    """{offset: times}: how often compressed block ``(l'/d) j + offset`` counts for selection block j, by Eq. 9 of the NSA paper."""
    counts: dict[int, int] = {}
    for m in range(rules.select // rules.stride):
        for n in range(rules.size // rules.stride):
            counts[m - n] = counts.get(m - n, 0) + 1
    return dict(sorted(counts.items()))


def _mslk_scores(q: Array, k_cmp: Array, rules: Rules, scale: float, begin: int, tokens: int) -> Array:
    """(heads, tiles, blocks): the product of a compressed key and the mean query of a tile."""
    queries, blocks = q.shape[1], tokens // rules.size
    tiles = range(0, queries, rules.tile)
    means = np.stack([q[:, a : a + rules.tile].mean(axis=1) for a in tiles], axis=1) if queries else q
    scores = scale * (grouped(means, len(k_cmp)) @ k_cmp[:, None].swapaxes(-1, -2)).reshape(len(q), len(tiles), blocks)
    ends = begin + (np.arange(len(tiles))[:, None] + 1) * rules.tile
    return np.where(np.arange(blocks) * rules.size < ends, scores, -np.inf) if rules.causal else scores


def _paper_scores(q: Array, k_cmp: Array, rules: Rules, scale: float, begin: int, tokens: int) -> Array:
    """(KV heads, queries, blocks): the sum over the group's heads of the probabilities of the compressed keys that overlap a block, each
    times the number of strides that it shares with the block."""
    blocks, compressed, rows = -(-tokens // rules.select), k_cmp.shape[1], q.shape[1]
    scores = np.zeros((len(k_cmp), rows, blocks))
    first = np.arange(blocks) * (rules.select // rules.stride)
    s = compressed_branch(q, k_cmp, k_cmp, begin, rules.size, rules.stride, rules.mode, rules.causal)
    for strip, p, _ in weights(s, ScoreRules(scale), rounding_of("float64")):
        every = np.zeros((*p.shape[:3], compressed))
        every[..., strip.keys] = p
        for offset, times in overlaps(rules).items():
            inside = (first + offset >= 0) & (first + offset < compressed)
            scores[:, strip.rows, inside] += times * every.sum(axis=1)[..., (first + offset)[inside]]
    own, block = (begin + np.arange(rows)[:, None]) // rules.select, np.arange(blocks)
    oldest = own - (rules.local - 1 if rules.causal else rules.local // 2)
    scores[:, (block < rules.init) | ((block >= oldest) & (block < oldest + rules.local))] = np.inf
    if rules.causal:
        scores[:, block > own] = -np.inf
    return scores


def sequence_scores(q: Array, k_cmp: Array, rules: Rules, scale: Any, begin: int, tokens: int) -> Array:
    """Scores of the blocks of one sequence. A block with -inf cannot be selected, one with +inf must be."""
    of_mode = _mslk_scores if rules.mode == "mslk" else _paper_scores
    with np.errstate(all="ignore"):
        return of_mode(q, k_cmp, rules, factor(scale, q.shape[2]), begin, tokens)


def top_blocks(scores: Array, count: int) -> Array:
    """int32 (..., count): the indices of the highest scores, in rising order, then -1. Of equal scores, the lower index is taken."""
    scores = np.where(np.isnan(scores), np.finfo(float).min, scores)  # a NaN can still be selected, so that it shows in results
    order = np.argsort(-scores, axis=-1, kind="stable")[..., :count]
    eligible = ~np.isneginf(np.take_along_axis(scores, order, -1))
    ascending = np.sort(np.where(eligible, order, scores.shape[-1]), axis=-1)
    result = np.full((*scores.shape[:-1], count), -1, np.int32)
    result[..., : order.shape[-1]] = np.where(ascending == scores.shape[-1], -1, ascending)
    return result


def cmp_groups(scores: Array, count: int) -> Array:
    """bool (heads, tiles, groups): the groups of CMP_GROUP compressed keys that num_cmp_selected_blocks keeps, by the mean score
    of their members that can be selected."""
    starts = np.arange(0, scores.shape[-1], CMP_GROUP)
    if starts.size == 0:
        return np.zeros((*scores.shape[:-1], 0), np.bool_)
    eligible = ~np.isneginf(scores)
    members = np.add.reduceat(eligible, starts, axis=-1, dtype=np.int64)
    sums = np.add.reduceat(np.where(eligible, scores, 0.0), starts, axis=-1)
    means = np.where(members > 0, sums / np.maximum(members, 1), -np.inf)
    return named(top_blocks(means, min(count, starts.size)), starts.size)


def selector(*options: Any) -> Rules:
    """Checked rules of a selection, with each mode's defaults. `options`: mode, compress_block_size, num_selected_blocks, q_tile_size,
    compress_stride, select_block_size, init_blocks, local_blocks and causal."""
    return rules_of(*options)


def routing_parts(lists: Any, offsets: list[int] | None, tile: int) -> list[Array]:
    """The lists (heads, tiles, n) of each sequence, with -1 from the first -1 of a row on. `offsets`: cumulative numbers of queries."""
    lists = np.asarray(lists).astype(np.int64)
    lists = np.where(np.logical_or.accumulate(lists < 0, axis=-1), -1, lists)
    if offsets is None:
        return list(lists)
    tiles = np.cumsum([0, *(-(-(b - a) // tile) for a, b in pairwise(offsets))])
    return [lists[:, a:b] for a, b in pairwise(tiles)]


def join_routing(parts: list[Array], packed: bool, empty: tuple[int, ...]) -> Array:
    """The inverse of `routing_parts`. `empty`: the shape of the result if there are no sequences."""
    if not parts:
        return np.zeros(empty, np.int32)
    return np.concatenate(parts, axis=1) if packed else np.stack(parts)


# ---- Gates ----------------------------------------------------------------------------------------------------------


def sigmoid_gates(q: Array, weight: Array | None, r: Rounding) -> Array:
    """(..., H, 3): sigmoid of each head's query times its three weights. Without weights, each gate is a third."""
    if weight is None:
        return np.full((*q.shape[:-1], 3), 1 / 3, q.dtype)
    logits = r(np.einsum("...hd,hcd->...hc", q, weight))
    half = np.exp(-np.abs(logits))
    return r(np.where(logits >= 0, 1 / (1 + half), half / (1 + half)).astype(q.dtype))


def combine(branches: list[Array], gates: Array, r: Rounding) -> Array:
    """The gated sum of the branches."""
    return r(sum(gates[..., c, None] * x for c, x in enumerate(branches)))


def gates_backward(
    q: Array, dout: Array, branches: list[Array], gates: Array, weight: Array | None, r: Rounding
) -> tuple[list[Array], Array, Array | None, Array | None]:
    """Gradients of the branches, of the gates, and, where gates come from weights, of q and of the weights. Arrays are (heads, ...,
    dim)."""
    dbranches = [r(gates[..., c, None] * dout) for c in range(3)]
    dgates = r(np.stack([(dout * x).sum(axis=-1) for x in branches], axis=-1))
    if weight is None:
        return dbranches, dgates, None, None
    dlogits = dgates * gates * (1 - gates)
    dq = r(np.einsum("h...c,hcd->h...d", dlogits, weight))
    return dbranches, dgates, dq, (dlogits[..., None] * q[..., None, :]).sum(axis=tuple(range(1, q.ndim - 1)))
