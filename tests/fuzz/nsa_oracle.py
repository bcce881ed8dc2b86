"""Native sparse attention of one sequence by brute force: a dense mask per branch, in float64, with an allowed error for every number.

A `Near` is an array, and a bound for the difference between the package's values and the array. Bounds are computed by running error
analysis: a dot product of K terms in arithmetic of unit roundoff u adds at most ``(K + c) u`` times the sum of the terms' absolute values, in
any order of the terms, and the error of each factor is multiplied by the absolute value of the other factor. No bound is tuned. Bounds allow
for results that the package may round to the dtype between two steps, such as compressed keys and branch results (`Near.rounded`), and for
softmax weights and their gradients, which it may round where they are factors of a product (`Arithmetic.weights`). An exponential may have
the error `Arithmetic.exponential` in addition. Everything else must have the precision of float32, or of float64 for float64.

Arrays of a sequence have the heads first: q ``(H, n, D)``, k ``(Hkv, n, D)``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from .checks import EPSILON

SLACK = 8  # roundings in addition to those of a sum's terms: the scale, the division, an exponential's last digits
GROUP = 128  # compressed keys that num_cmp_selected_blocks counts as one
TINY = 1e-36  # allowed error because numbers near the smallest float32 may count as 0


class Arithmetic(NamedTuple):
    """The precision in which the package computes a call."""

    dtype: str
    level: str

    @property
    def unit(self) -> float:
        """The unit roundoff of sums. For float64 it is doubled, because the oracle has errors of that size, too."""
        return 2 * EPSILON["float64"] if self.dtype == "float64" else EPSILON["float32"]

    @property
    def weights(self) -> float:
        """The unit roundoff of softmax weights and their gradients when they are factors of a product."""
        if self.dtype == "bfloat16" and self.level in ("avx512_bf16", "amx"):
            return EPSILON["bfloat16"]
        if self.dtype == "float16" and self.level == "amx":
            return 2.0**-16  # each is the sum of two bfloat16 numbers
        return 0.0

    @property
    def exponential(self) -> float:
        """The relative error of an exponential, in addition to roundings: on tiles, bfloat16 has a shorter polynomial (v_exp2_short in vec.h)."""
        return 2.7e-6 if self.dtype == "bfloat16" and self.level == "amx" else 0.0

    @property
    def least(self) -> float:
        """The absolute error of any rounding: half of the dtype's smallest positive number, or the size below which numbers may count as 0."""
        return {"float16": 2.0**-25, "float64": 0.0}.get(self.dtype, TINY)


class Near(NamedTuple):
    value: np.ndarray
    error: Any = 0.0

    def __add__(self, other: Near) -> Near:  # type: ignore[override]
        return Near(self.value + other.value, self.error + other.error)

    def scaled(self, factor: float) -> Near:
        return Near(self.value * factor, self.error * abs(factor))

    def times(self, other: Near) -> Near:
        size = np.abs(other.value) * self.error + (np.abs(self.value) + self.error) * other.error
        return Near(self.value * other.value, size)

    def turned(self) -> Near:
        return Near(self.value.swapaxes(-1, -2), np.swapaxes(self.error, -1, -2) if np.ndim(self.error) > 1 else self.error)

    def rounded(self, to: Arithmetic, dtype: str | None = None) -> Near:
        """The result of one rounding to the dtype."""
        return Near(self.value, self.error * (1 + EPSILON[dtype or to.dtype]) + EPSILON[dtype or to.dtype] * np.abs(self.value) + to.least)


def exact(value: np.ndarray) -> Near:
    return Near(np.asarray(value, np.float64))


def _plain(error: Any) -> bool:
    return np.ndim(error) == 0 and error == 0


def dot(a: Near, b: Near, unit: float) -> Near:
    """The matrix product."""
    size_a, size_b = np.abs(a.value), np.abs(b.value)
    error = (a.value.shape[-1] + SLACK) * unit * (size_a @ size_b)
    if not _plain(a.error):
        error = error + np.broadcast_to(a.error, a.value.shape) @ size_b
    if not _plain(b.error):
        error = error + (size_a + a.error) @ np.broadcast_to(b.error, b.value.shape)
    return Near(a.value @ b.value, error)


def row_dot(a: Near, b: Near, unit: float) -> Near:
    """The scalar products over the last axis, which is kept with length 1."""
    product = a.times(b)
    size = np.abs(product.value).sum(-1, keepdims=True)
    error = np.broadcast_to(product.error, product.value.shape).sum(-1, keepdims=True)
    return Near(product.value.sum(-1, keepdims=True), error + (a.value.shape[-1] + SLACK) * unit * size)


def total(a: Near, axis: int, unit: float) -> Near:
    error = np.broadcast_to(a.error, a.value.shape).sum(axis)
    return Near(a.value.sum(axis), error + (a.value.shape[axis] + SLACK) * unit * np.abs(a.value).sum(axis))


def for_queries(x: Near, group: int) -> Near:
    """Repeats arrays of KV heads for each query head that reads them."""
    return Near(*(np.repeat(a, group, axis=0) if np.ndim(a) else a for a in x))


def of_groups(x: Near, group: int, unit: float) -> Near:
    """Sums over the query heads of each KV head."""
    value = x.value.reshape(len(x.value) // group, group, *x.value.shape[1:])
    return total(Near(value, np.broadcast_to(x.error, x.value.shape).reshape(value.shape)), 1, unit)


def added(terms: list[Near], how: Arithmetic, between: bool = True) -> Near:
    """A sum whose terms may each have been rounded to the dtype."""
    if between:
        terms = [x.rounded(how) for x in terms]
    size = sum(np.abs(x.value) for x in terms)
    return Near(sum(x.value for x in terms), sum(x.error for x in terms) + SLACK * how.unit * size)


# ---- Visible keys -------------------------------------------------------------------------------------------------


class Rules(NamedTuple):
    """Options of a call, with defaults filled in."""

    mode: str = "paper"
    causal: bool = True
    scale: float = 1.0
    block: int = 1  # l
    stride: int = 1  # d
    wide: int = 1  # l'
    count: int = 1  # n
    init: int = 0
    local: int = 0
    tile: int = 1
    window: int = 1


def block_count(tokens: int, block: int, stride: int) -> int:
    return (tokens - block) // stride + 1 if tokens >= block else 0


def sees_blocks(tokens: int, rules: Rules) -> np.ndarray:
    """Bool (tokens, compressed blocks): whether a token sees a block."""
    t = np.arange(tokens)[:, None]
    begin = np.arange(block_count(tokens, rules.block, rules.stride)) * rules.stride
    if not rules.causal:
        return np.ones((tokens, len(begin)), np.bool_)
    return begin <= t if rules.mode == "mslk" else begin + rules.block - 1 <= t


def sees_listed(lists: np.ndarray, tokens: int, wide: int, tile: int, causal: bool) -> np.ndarray:
    """Bool (heads of the lists, tokens, tokens): whether a token sees a key, by lists (heads of the lists, tiles, places)."""
    blocks = -(-tokens // wide)
    ended = np.logical_or.accumulate(lists < 0, axis=-1)
    listed = np.zeros((*lists.shape[:2], blocks + 1), np.bool_)
    np.put_along_axis(listed, np.where(ended, blocks, lists), True, axis=-1)
    t = np.arange(tokens)
    seen = listed[:, t // tile][:, :, t // wide]
    return seen & (t[None, :] <= t[:, None]) if causal else seen


def sees_window(tokens: int, window: int, causal: bool) -> np.ndarray:
    t = np.arange(tokens)
    before = t[:, None] - t[None, :]
    return (before >= 0) & (before < window) if causal else np.abs(before) <= window // 2


def sees_groups(kept: np.ndarray, tokens: int, blocks: int, tile: int) -> np.ndarray:
    """(H, tokens, compressed blocks) from the groups of 128 compressed keys that each tile and head keeps, (H, tiles, places)."""
    of_block = np.arange(blocks) // GROUP
    of_tile = (kept[..., None] == of_block).any(-2)
    return of_tile[:, np.arange(tokens) // tile]


# ---- Attention ----------------------------------------------------------------------------------------------------


class Attention(NamedTuple):
    q: Near
    k: Near  # of the query heads
    v: Near
    scale: float
    weights: Near
    out: Near
    lse: Near
    scores: Near


def attend(q: Near, k: Near, v: Near, seen: np.ndarray, scale: float, how: Arithmetic) -> Attention:
    """Masked softmax attention; k and v have KV heads, `seen` is (H or 1, queries, keys)."""
    unit, group = how.unit, q.value.shape[0] // k.value.shape[0]
    k, v = for_queries(k, group), for_queries(v, group)
    scores = dot(q, k.turned(), unit).scaled(scale)
    error = np.where(seen, scores.error + SLACK * unit * np.abs(scores.value), 0)
    s = np.where(seen, scores.value, -np.inf)
    top = s.max(-1, keepdims=True, initial=-np.inf)
    top = np.where(np.isfinite(top), top, 0)
    p = np.exp(s - top)
    sums = p.sum(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = np.log(sums) + top
    # A weight is exp(score - lse). Its error comes from the score, from the lse (at most the largest error of a score plus the error of
    # the sum), and from the exponential, whose argument is rounded.
    sum_error = (s.shape[-1] + SLACK) * unit + how.exponential
    lse_error = error.max(-1, keepdims=True, initial=0) + sum_error + 2 * unit * (np.abs(top) + np.abs(np.where(np.isfinite(lse), lse, 0)))
    p /= np.where(sums > 0, sums, 1)
    depth = np.where(seen, np.abs(np.where(seen, s, 0) - np.where(np.isfinite(lse), lse, 0)), 0)
    relative = np.expm1(np.minimum(error + lse_error, 50.0)) + (SLACK + 2 * depth) * unit + how.weights
    weights = Near(p, p * relative + np.where(seen, how.least if how.dtype != "float16" else TINY, 0))
    return Attention(q, k, v, scale, weights, dot(weights, v, unit), Near(lse[..., 0], lse_error[..., 0]), Near(s, error))


class Gradients(NamedTuple):
    dq: Near
    dk: Near  # of KV heads
    dv: Near


def attend_backward(a: Attention, dout: Near, kv_heads: int, how: Arithmetic) -> Gradients:
    """dS = P (dout v^T - dout . out), where `out` is rounded to the dtype."""
    unit, group = how.unit, a.q.value.shape[0] // kv_heads
    dp = dot(dout, a.v.turned(), unit)
    delta = row_dot(dout, a.out.rounded(how), unit)
    ds = a.weights.times(Near(dp.value - delta.value, dp.error + delta.error))
    ds = Near(ds.value, ds.error + (how.weights + SLACK * unit) * np.abs(ds.value))
    dk, dv = dot(ds.turned(), a.q, unit).scaled(a.scale), dot(a.weights.turned(), dout, unit)
    return Gradients(dot(ds, a.k, unit).scaled(a.scale), of_groups(dk, group, unit), of_groups(dv, group, unit))


# ---- Compression --------------------------------------------------------------------------------------------------


def pooling(tokens: int, block: int, stride: int) -> Near:
    """(blocks, tokens): the means as a matrix."""
    matrix = np.zeros((block_count(tokens, block, stride), tokens))
    for i in range(len(matrix)):
        matrix[i, i * stride : i * stride + block] = 1 / block
    return exact(matrix)


def compress(x: Near, w: Near | None, rules: Rules, how: Arithmetic) -> Near:
    means = block_means(x, rules, how)
    return (means if w is None else dot(means, w, how.unit)).rounded(how)


def block_means(x: Near, rules: Rules, how: Arithmetic) -> Near:
    """The means of blocks. Their error has the roundings of `block` terms, and not of all tokens."""
    matrix = pooling(x.value.shape[1], rules.block, rules.stride)
    value, size = matrix.value @ x.value, matrix.value @ np.abs(x.value)
    return Near(value, (rules.block + SLACK) * how.unit * size)


def compress_backward(dcmp: Near, x: Near, w: Near | None, rules: Rules, how: Arithmetic) -> tuple[Near, Near | None]:
    matrix = pooling(x.value.shape[1], rules.block, rules.stride)
    if w is None:
        return dot(matrix.turned(), dcmp, how.unit), None
    dw = dot(block_means(x, rules, how).turned(), dcmp, how.unit)
    dmeans = dot(dcmp, w.turned(), how.unit).rounded(how)  # between the two steps, the gradient of the means is in the dtype
    return dot(matrix.turned(), dmeans, how.unit), dw


# ---- Selection ----------------------------------------------------------------------------------------------------


class Scores(NamedTuple):
    """(heads, rows, blocks) scores of the blocks that may be selected."""

    score: Near
    eligible: np.ndarray  # (rows, blocks)
    forced: np.ndarray  # (rows, blocks)
    clear: np.ndarray  # (heads, rows, blocks): the score comes from finite numbers


def paper_scores(a: Attention, tokens: int, kv_heads: int, rules: Rules, tainted: np.ndarray, how: Arithmetic) -> Scores:
    """Equations 9 and 10 of the paper, on the attention over the compressed keys. `tainted` (H, tokens): rows that see non-finite values."""
    p = of_groups(a.weights, a.q.value.shape[0] // kv_heads, how.unit)
    blocks, count = -(-tokens // rules.wide), p.value.shape[-1]
    overlap = np.zeros((count, blocks))
    for j in range(blocks):
        for m in range(rules.wide // rules.stride):
            for n in range(rules.block // rules.stride):
                i = rules.wide // rules.stride * j + m - n
                if 0 <= i < count:
                    overlap[i, j] += 1
    score = dot(p, exact(overlap), how.unit) if count else exact(np.zeros((kv_heads, tokens, blocks)))
    own, j = (np.arange(tokens) // rules.wide)[:, None], np.arange(blocks)[None, :]
    first = own - (rules.local - 1 if rules.causal else rules.local // 2)
    forced = (j < rules.init) | ((j >= first) & (j < first + rules.local))
    eligible = j <= own if rules.causal else np.ones((tokens, blocks), np.bool_)
    clear = np.broadcast_to(~tainted.reshape(kv_heads, len(tainted) // kv_heads, tokens).any(1)[..., None], score.value.shape)
    return Scores(score, eligible, forced & eligible, clear)


def tile_means(q: Near, tile: int, unit: float) -> Near:
    tokens = q.value.shape[1]
    tiles = -(-tokens // tile)
    matrix = np.zeros((tiles, tokens))
    matrix[np.arange(tokens) // tile, np.arange(tokens)] = 1
    matrix /= np.maximum(matrix.sum(1, keepdims=True), 1)
    return Near(matrix @ q.value, (min(tile, tokens) + SLACK) * unit * (matrix @ np.abs(q.value)))


def mslk_scores(q: Near, k_cmp: Near, rules: Rules, bad_q: np.ndarray, bad_blocks: np.ndarray, how: Arithmetic) -> Scores:
    """Scores of mslk mode. `bad_q` (H, tokens) and `bad_blocks` (Hkv, blocks) mark non-finite queries and blocks."""
    group, tokens = q.value.shape[0] // k_cmp.value.shape[0], q.value.shape[1]
    score = dot(tile_means(q, rules.tile, how.unit), for_queries(k_cmp, group).turned(), how.unit).scaled(rules.scale)
    score = Near(score.value, score.error + SLACK * how.unit * np.abs(score.value))
    tiles, blocks = score.value.shape[1:]
    end = np.minimum((np.arange(tiles) + 1) * rules.tile, tokens)[:, None]
    eligible = np.arange(blocks) * rules.block < end if rules.causal else np.ones((tiles, blocks), np.bool_)
    bad_tiles = np.zeros((q.value.shape[0], tiles), np.bool_)
    for i in range(tiles):
        bad_tiles[:, i] = bad_q[:, i * rules.tile : (i + 1) * rules.tile].any(1)
    clear = ~(bad_tiles[..., None] | np.repeat(bad_blocks, group, axis=0)[:, None, :])
    return Scores(score, eligible, np.zeros_like(eligible), clear)


def selection_mistake(lists: np.ndarray, scores: Scores, count: int) -> str | None:
    """The mistake in lists (heads, rows, places) as the selection of the `count` highest scores, or None.

    Of two clear scores, the selected one may be lower by at most the sum of both bounds. If they are equal and without an error (such as
    scores to which no compressed key adds, or scores from small integers), the lower block must come first.
    """
    heads, rows, blocks = scores.score.value.shape
    if lists.shape != (heads, rows, count):
        return f"shape {lists.shape}, expected {(heads, rows, count)}"
    if lists.size == 0:
        return None
    given = lists >= 0
    if (lists < -1).any() or (lists >= max(blocks, 1)).any() or (given[..., 1:] & ~given[..., :-1]).any():
        return "entries out of range, or behind a pad"
    if (np.where(given, lists, blocks + 1)[..., 1:] <= lists[..., :-1])[given[..., 1:]].any():
        return "not rising"
    wanted = np.minimum(count, scores.eligible.sum(-1))
    least = np.minimum(count, (scores.eligible & scores.clear).sum(-1))  # a score of -inf selects nothing
    if (given.sum(-1) > wanted).any() or (given.sum(-1) < least).any():
        return f"{given.sum(-1).tolist()} entries, expected {wanted.tolist()}"
    chosen = np.zeros((heads, rows, blocks + 1), np.bool_)
    np.put_along_axis(chosen, np.where(given, lists, blocks), True, axis=-1)
    chosen = chosen[..., :-1]
    if (chosen & ~scores.eligible).any():
        return "a block that is not eligible"
    if (scores.forced & ~chosen).any():
        return "a forced block is missing"
    rest, free = ~chosen & scores.eligible, chosen & ~scores.forced
    low = np.where(free & scores.clear, scores.score.value + scores.score.error, np.inf).min(-1, initial=np.inf)
    high = np.where(rest & scores.clear, scores.score.value - scores.score.error, -np.inf).max(-1, initial=-np.inf)
    if (low < high).any():
        return f"a block of score {low[low < high][0]} where one of {high[low < high][0]} is left"
    lowest = np.where(free & scores.clear, scores.score.value, np.inf).min(-1, keepdims=True, initial=np.inf)
    tied = scores.clear & (scores.score.value == lowest) & (np.broadcast_to(scores.score.error, (*lists.shape[:2], blocks)) == 0)
    place = np.arange(blocks)
    last = np.where(free & tied, place, -1).max(-1, initial=-1)
    first = np.where(rest & tied, place, blocks).min(-1, initial=blocks)
    return "of equal scores the higher block" if (first < last).any() else None


def group_scores(scores: Scores, how: Arithmetic) -> Scores:
    """Scores of groups of 128 compressed keys: the mean over the keys that may be selected."""
    blocks = scores.score.value.shape[-1]
    member = (np.arange(blocks)[:, None] // GROUP == np.arange(-(-blocks // GROUP))).astype(np.float64)
    eligible = scores.eligible @ member
    share = np.where(scores.eligible[..., None], member, 0) / np.maximum(eligible, 1)[:, None, :]  # (rows, blocks, groups)
    score = dot(Near(scores.score.value[..., None, :], scores.score.error[..., None, :]), exact(share), how.unit)
    clear = ~((~scores.clear)[..., None, :] & (share.swapaxes(-1, -2) > 0)).any(-1)
    seen = eligible > 0
    return Scores(Near(score.value[..., 0, :], score.error[..., 0, :]), seen, np.zeros_like(seen), clear)


# ---- Gates --------------------------------------------------------------------------------------------------------


def sigmoid_gates(q: Near, weight: Near, how: Arithmetic) -> Near:
    """The gates (H, n, 3) from q (H, n, D) and weight (H, 3, D)."""
    logits = dot(q, weight.turned(), how.unit)
    gates = 1 / (1 + np.exp(-logits.value))
    slope = np.minimum(0.25, gates * (1 - gates) * np.exp(np.minimum(logits.error, 50.0)))
    return Near(gates, slope * logits.error + SLACK * how.unit * gates * (1 + np.abs(logits.value)))


def combine(branches: list[Near], gates: Near, how: Arithmetic) -> Near:
    parts = [o.times(one_gate(gates, c)) for c, o in enumerate(branches)]
    size = sum(np.abs(x.value) for x in parts)
    return Near(sum(x.value for x in parts), sum(x.error for x in parts) + SLACK * how.unit * size).rounded(how)


def one_gate(gates: Near, c: int) -> Near:
    """The gates of branch c, (H, n, 1)."""
    return Near(gates.value[..., c : c + 1], np.broadcast_to(gates.error, gates.value.shape)[..., c : c + 1])


def gates_backward(dout: Near, branches: list[Near], how: Arithmetic) -> Near:
    """The gradients of the gates, (H, n, 3)."""
    parts = [row_dot(dout, o, how.unit) for o in branches]
    return Near(np.concatenate([x.value for x in parts], -1), np.concatenate([x.error for x in parts], -1))


def logits_backward(dgates: Near, gates: Near, how: Arithmetic) -> Near:
    slope = Near(gates.value * (1 - gates.value), gates.error + 4 * how.unit)
    product = dgates.times(slope)
    return Near(product.value, product.error + SLACK * how.unit * np.abs(product.value))
