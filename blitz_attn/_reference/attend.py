"""Softmax attention of one sequence, and its gradients: the equations that the twins of all kinds of attention share.

Arrays of a sequence are (heads, tokens, dim); arrays over pairs of a query and a key are (KV heads, group, queries, keys). They are
float64, or float32 where a twin imitates a program of lower precision, which rounds every array that it stores (`common.rounding_of`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from .common import Rounding, to_float64

Array = np.ndarray

_STRIP_ELEMENTS = 1 << 22  # most scores in memory at a time: 32 MiB of float64
_FAR = 1 << 60  # more tokens than any sequence has


# ---- What a query sees --------------------------------------------------------------------------------------------


@dataclass
class Bias:
    """Numbers that are added to the scores, after the scale and the softcap."""

    mask: Array | None  # (heads, queries, keys): True where a key takes part; or numbers, where -inf hides the key
    slopes: Array | None  # (heads,): how much each token of distance lowers the score
    begin: int  # the number of the key beside which query 0 stands on the diagonal
    least: float  # smaller numbers of the mask count as -inf

    def of(self, rows: Array, keys: Array) -> Array:
        """The bias of some queries and keys: (heads, rows, keys)."""
        bias = np.zeros((1, rows.size, keys.size))
        if self.mask is not None:
            part = self.mask[:, rows[:, None], keys]
            numbers = np.where(part, 0.0, -np.inf) if part.dtype == np.bool_ else to_float64(part)
            bias = np.where(numbers < self.least, -np.inf, numbers)
        if self.slopes is not None:
            bias = bias - self.slopes[:, None, None] * np.abs(rows[:, None] + self.begin - keys)
        return bias


class Strip(NamedTuple):
    """Some queries; the keys that any of them may see; which of these keys each query sees; and the bias of their scores."""

    rows: slice
    keys: Any  # a slice, or an array of positions
    seen: Array
    bias: Array | None


@dataclass
class Sequence:
    """One batch entry, and which keys a query sees: those from `low` to `high` in the blocks that are kept, unless a bias hides them."""

    q: Array  # (heads, queries, dim)
    k: Array  # (KV heads, keys, dim)
    v: Array
    q_len: int  # number of valid queries: others see nothing
    kv_len: int
    begin: int  # the token number of query 0, and of the key beside which it stands on the diagonal
    ranges: Array | None  # (queries, 2): the run of keys of each query, already applied in `low` and `high`
    low: Array  # (queries,)
    high: Array
    kept: Array | None = None  # bool (heads, KV heads or 1; blocks of queries; blocks of keys)
    block_shape: tuple[int, int] = (1, 1)
    bias: Bias | None = None

    def strips(self) -> Iterator[Strip]:
        """All queries, a few at a time."""
        kv_heads, tokens = self.k.shape[:2]
        step = max(1, _STRIP_ELEMENTS // max(1, len(self.q) * tokens))
        if self.kept is not None:
            step = min(step, max(128, self.block_shape[0]))  # queries near each other, so that together they see few keys
        for first in range(0, len(self.low), step):
            rows = np.arange(first, min(first + step, len(self.low)))
            low, high = self.low[rows], self.high[rows]
            some = low <= high
            keys = np.arange(low[some].min(initial=tokens), high[some].max(initial=-1) + 1)
            seen = ((keys >= low[:, None]) & (keys <= high[:, None]))[None, None]
            if self.kept is not None:
                kept, block = self.kept[:, rows // self.block_shape[0]], keys // self.block_shape[1]
                listed: Any = kept.any(axis=(0, 1))
                listed = listed[block]
                keys, seen = keys[listed], seen[..., listed] & grouped(kept[..., block[listed]], kv_heads)
            bias = None
            if self.bias is not None:
                bias = grouped(self.bias.of(rows, keys), kv_heads)
                seen = seen & (bias != -np.inf)
                bias = np.where(seen, bias, 0).astype(self.q.dtype)
            run = self.kept is None and keys.size > 0  # a slice needs no copy
            yield Strip(slice(first, first + rows.size), slice(keys[0], keys[-1] + 1) if run else keys, seen, bias)


def sequence(
    q: Array, k: Array, v: Array, *, begin: int | None = None, left: int | None = None, right: int | None = None, q_len: int | None = None,
    kv_len: int | None = None, ranges: Array | None = None,
) -> Sequence:  # fmt: skip
    """A sequence in which a query sees its own key, `left` keys before it and `right` after it (None: all), within its run in `ranges`.

    By default, the queries are the last tokens.
    """
    q_len, kv_len = q.shape[1] if q_len is None else q_len, k.shape[1] if kv_len is None else kv_len
    begin = kv_len - q_len if begin is None else begin
    rows = np.arange(q.shape[1])
    low = np.maximum(0, rows + begin - (_FAR if left is None else left))
    high = np.minimum(kv_len - 1, rows + begin + (_FAR if right is None else right))
    if ranges is not None:
        ends = ranges.astype(np.int64)
        low, high = np.maximum(low, ends[:, 0]), np.minimum(high, ends[:, 1] - 1)
    return Sequence(q, k, v, q_len, kv_len, begin, ranges, low, np.where(rows < q_len, high, -1))


def grouped(x: Array, kv_heads: int) -> Array:
    """(heads, ...) as (KV heads, group, ...). An axis with one entry for all heads keeps one entry."""
    shared = min(kv_heads, len(x))
    return x.reshape(shared, len(x) // shared, *x.shape[1:])


def named(lists: Array, columns: int) -> Array:
    """bool (..., columns): which blocks each row of a list names. Unused entries of a list hold -1."""
    mask = np.zeros((*lists.shape[:-1], columns + 1), np.bool_)
    np.put_along_axis(mask, np.where(lists < 0, columns, lists), True, axis=-1)
    return mask[..., :-1]


# ---- Attention ----------------------------------------------------------------------------------------------------


def matmul(a: Array, b: Array) -> Array:
    """a @ b; one product for all heads of a group where they share b."""
    if b.shape[1] > 1:
        return a @ b
    return (a.reshape(len(a), a.shape[1] * a.shape[2], a.shape[3]) @ b[:, 0]).reshape(*a.shape[:3], b.shape[3])


def product(weights: Array, x: Array, seen: Array) -> Array:
    """weights @ x, where a NaN or infinity in a row of x reaches only results that see the row. In a plain product, it reaches all results,
    because a weight of 0 times NaN or infinity is NaN."""
    nonfinite = np.flatnonzero(~np.isfinite(x).all(axis=(0, 1, 3)))
    if nonfinite.size == 0:
        return matmul(weights, x)
    plain = x.copy()
    plain[:, :, nonfinite] = 0
    out = matmul(weights, plain)
    for j in nonfinite:
        out += np.where(seen[..., j, None], weights[..., j, None] * x[:, :, j, None], 0)
    return out


def _of(x: Array, strip: Strip) -> Array:
    """(KV heads, 1, keys, dim): the rows of x that belong to a strip's keys."""
    return x[:, None, strip.keys] if isinstance(strip.keys, slice) else np.take(x, strip.keys, axis=1)[:, None]


def factor(scale: Any, dim: int) -> float:
    """The scale of scores, which is 1 / sqrt(dim) by default."""
    return 1.0 / math.sqrt(dim) if scale is None else float(scale)


class ScoreRules(NamedTuple):
    """How products of queries and keys become scores. The fields are options of a call, with the same names."""

    scale: Any = None
    softcap: Any = None

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> ScoreRules:
        return cls(**{name: x for name, x in options.items() if name in cls._fields})

    def factor(self, dim: int) -> float:
        """The factor of the products."""
        return factor(self.scale, dim)


def _scores(s: Sequence, strip: Strip, rules: ScoreRules, r: Rounding) -> tuple[Array, Array | None]:
    """S = softcap * tanh(scale * q k^T / softcap) + bias, -inf where a query does not see the key; and the tanh, None without a softcap."""
    products = matmul(grouped(s.q, len(s.k))[:, :, strip.rows], _of(s.k, strip).swapaxes(-1, -2))
    scores, tangent = products * rules.factor(s.q.shape[2]), None
    if rules.softcap:
        tangent = np.tanh(scores / float(rules.softcap))
        scores = float(rules.softcap) * tangent
    scores = r(scores)
    if strip.bias is not None:
        scores = r(scores + strip.bias)
    return np.where(strip.seen, scores, s.q.dtype.type(-np.inf)), tangent


def weights(s: Sequence, rules: ScoreRules, r: Rounding, sinks: Array | None = None) -> Iterator[tuple[Strip, Array, Array]]:
    """P = softmax(S) of each strip, 0 where a query sees no key, and the log-sum-exp (KV heads, group, queries) of its scores.

    The sink of a head is one more score, which has no value.
    """
    sink = np.full(s.q.shape[:2], -np.inf, s.q.dtype)
    if sinks is not None:
        sink[:, : s.q_len] = sinks[:, None]
    sink = grouped(sink, len(s.k))[..., None]
    for strip in s.strips():
        scores, own = _scores(s, strip, rules, r)[0], sink[:, :, strip.rows]
        top = np.maximum(scores.max(axis=-1, keepdims=True, initial=-np.inf), own)
        top = np.where(top == -np.inf, s.q.dtype.type(0), top)
        p = np.exp(scores - top)
        total = p.sum(axis=-1, keepdims=True) + np.exp(own - top)
        yield strip, np.where(total == 0, s.q.dtype.type(0), p / total), (top + np.log(total))[..., 0]


@np.errstate(all="ignore")
def attend(s: Sequence, rules: ScoreRules, r: Rounding, sinks: Array | None = None) -> tuple[Array, Array]:
    """(heads, queries, dim_v) P V, 0 where a query sees no key; (heads, queries) log-sum-exp, -inf where it sees no key and no sink."""
    out = grouped(np.zeros((*s.q.shape[:2], s.v.shape[2]), s.q.dtype), len(s.k))
    lse = grouped(np.zeros(s.q.shape[:2], s.q.dtype), len(s.k))
    for strip, p, sums in weights(s, rules, r, sinks):
        out[:, :, strip.rows] = r(product(r(p), _of(s.v, strip), strip.seen))
        lse[:, :, strip.rows] = sums
    return out.reshape(*s.q.shape[:2], s.v.shape[2]), lse.reshape(s.q.shape[:2])


@np.errstate(all="ignore")
def attend_backward(
    s: Sequence, dout: Array, out: Array, lse: Array, rules: ScoreRules, r: Rounding, dlse: Array | None = None,
    add_bias: Callable[[Array, Array, Array], None] | None = None,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """Gradients of q, k and v: P from the log-sum-exp, and dS = P (dO V^T - (rowsum(dO O) - dlse)).

    `add_bias` is called for each strip with its queries, its keys and the gradient of the bias of its scores (heads, queries, keys).
    """
    kv_heads, scale = len(s.k), rules.factor(s.q.shape[2])
    delta = (dout * out).sum(axis=-1) - (0 if dlse is None else dlse)
    q, dout, lse, delta = (grouped(x, kv_heads) for x in (s.q, dout, lse[..., None], delta[..., None]))
    dq, dk, dv = np.zeros_like(q), np.zeros_like(s.k), np.zeros_like(s.v)
    for strip in s.strips():
        rows, keys, _, _ = strip
        seen = strip.seen & (lse[:, :, rows] != -np.inf)  # other queries attended to no key
        scores, tangent = _scores(s, strip, rules, r)
        p = r(np.where(seen, np.exp(scores - lse[:, :, rows]), s.q.dtype.type(0)))
        slope = p * (r(dout[:, :, rows] @ _of(s.v, strip).swapaxes(-1, -2)) - delta[:, :, rows])
        if add_bias is not None:
            dbias = r(np.where(seen, slope, s.q.dtype.type(0)))
            add_bias(np.arange(rows.start, rows.stop), np.arange(s.k.shape[1])[keys], dbias.reshape(len(s.q), *dbias.shape[2:]))
        ds = r(np.where(seen, slope if tangent is None else slope * (1 - tangent**2), s.q.dtype.type(0)))
        turned, back = ds.swapaxes(-1, -2), seen.swapaxes(-1, -2)
        dq[:, :, rows] = product(ds, _of(s.k, strip), seen) * scale
        dk[:, keys] += product(turned, q[:, :, rows], back).sum(axis=1) * scale
        dv[:, keys] += product(p.swapaxes(-1, -2), dout[:, :, rows], back).sum(axis=1)
    return r(dq).reshape(s.q.shape), r(dk), r(dv)
