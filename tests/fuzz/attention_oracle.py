"""Block-sparse attention and its gradients, token by token in float64: the definitions of docs/guide/concepts.rst as boolean masks.

Everything here has one form whatever the layout: queries (B, H, Sq, D), keys and values (B, Hkv, Skv, ...), where entry b holds
q_lens[b] queries and kv_lens[b] keys and padding behind them. Values are finite; what is NaN or infinite for the package is known
to `Problem.bad`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from .checks import EPSILON

HIDES = -2.3e38  # numbers of a mask below it hide their keys, as -inf does, where scores are float32
SMALL = 1e-30  # numbers below 1e-38 may count as 0 at some levels, before they are multiplied and summed


@dataclass
class Attention:
    """One problem: what is computed, independent of how its arrays are stored."""

    dtype: str
    q: np.ndarray  # (B, H, Sq, D)
    k: np.ndarray  # (B, Hkv, Skv, D)
    v: np.ndarray  # (B, Hkv, Skv, Dv)
    q_lens: np.ndarray  # (B,)
    kv_lens: np.ndarray
    blocks: np.ndarray | None  # bool (B or 1, H or 1, ceil(Sq / block_q), ceil(Skv / block_kv))
    block_shape: tuple[int, int]
    scale: float | None
    causal: bool
    window: tuple[int, int] | None
    begin: np.ndarray | None = None  # (B,): token numbers of the first queries; None: the queries are the last tokens
    total: np.ndarray | None = None  # (B,): queries of the call that these are a slice of; no number depends on it
    softcap: float | None = None
    sinks: np.ndarray | None = None  # (H,)
    ranges: np.ndarray | None = None  # (B, Sq, 2): first key that each query may see, and the place after the last one
    mask: np.ndarray | None = None  # (B or 1, H or 1, Sq or 1, Skv or 1): what is added to the scores; -inf hides a key
    slopes: np.ndarray | None = None  # (H,): what a token of distance takes from the score

    @property
    def real(self) -> str:
        """The dtype of sums and of the log-sum-exp."""
        return "float64" if self.dtype == "float64" else "float32"

    @property
    def factor(self) -> float:
        return self.q.shape[-1] ** -0.5 if self.scale is None else self.scale

    def grouped(self, x: np.ndarray) -> np.ndarray:
        """Repeats keys or values (B, Hkv, ...) for each query head."""
        return np.repeat(x, self.q.shape[1] // x.shape[1], axis=1) if x.shape[1] else x

    def ungrouped(self, x: np.ndarray) -> np.ndarray:
        """Sums over the query heads that share a KV head."""
        kv_heads = self.k.shape[1]
        return x.reshape(x.shape[0], kv_heads, x.shape[1] // max(kv_heads, 1), *x.shape[2:]).sum(axis=2)

    def away(self) -> np.ndarray:
        """(B, Sq, Skv): how many tokens behind the query's place among the keys a key stands."""
        first = self.kv_lens - self.q_lens if self.begin is None else self.begin
        return np.arange(self.k.shape[2]) - (np.arange(self.q.shape[2])[:, None] + first[:, None, None])

    def bias(self) -> tuple[np.ndarray, np.ndarray]:
        """What is added to the scores, and the sum of its parts' absolute values, which broadcast to (B, H, Sq, Skv)."""
        bias = size = np.zeros((1, 1, 1, 1))
        if self.mask is not None:
            bias = hiding(self.mask, self.dtype)
            size = np.abs(bias)
        if self.slopes is not None:
            steps = self.slopes[:, None, None] * np.abs(self.away()[:, None])
            bias, size = bias - steps, size + np.abs(steps)
        return bias, size

    def seen(self) -> np.ndarray:
        """Boolean (B, H, Sq, Skv): whether a query attends a key."""
        shown = self.shown()
        return shown if self.mask is None else shown & ~np.isneginf(hiding(self.mask, self.dtype))

    def shown(self) -> np.ndarray:
        """Boolean (B, H, Sq, Skv): whether a query sees a key by all rules other than the mask."""
        (batch, heads, s_q, _), s_kv = self.q.shape, self.k.shape[2]
        i, j = np.arange(s_q)[:, None], np.arange(s_kv)
        q_lens, kv_lens = self.q_lens[:, None, None], self.kv_lens[:, None, None]
        mask = (i < q_lens) & (j < kv_lens)
        away = self.away()
        if self.causal:
            mask &= away <= 0
        if self.window is not None:
            before, after = self.window
            if before >= 0:
                mask &= away >= -before
            if after >= 0:
                mask &= away <= after
        if self.ranges is not None:
            mask = mask & (j >= self.ranges[..., :1]) & (j < self.ranges[..., 1:])
        mask = np.broadcast_to(mask[:, None], (batch, heads, s_q, s_kv))
        if self.blocks is None:
            return mask
        block_q, block_kv = self.block_shape
        return mask & self.grouped(self.blocks)[:, :, np.arange(s_q) // block_q][..., np.arange(s_kv) // block_kv]


def hiding(mask: np.ndarray, dtype: str) -> np.ndarray:
    """The mask of a problem of `dtype`, in which what is as good as -inf is -inf."""
    return mask if dtype == "float64" else np.where(mask < HIDES, -np.inf, mask)


class Forward(NamedTuple):
    seen: np.ndarray  # (B, H, Sq, Skv)
    scores: np.ndarray
    out: np.ndarray  # (B, H, Sq, Dv)
    lse: np.ndarray  # (B, H, Sq)
    score_error: np.ndarray  # (B, H, Sq): how far a score of the row may be off
    allowed_out: np.ndarray
    allowed_lse: np.ndarray
    some: np.ndarray  # (B, H, Sq): whether the row has a score, of a key or of a sink
    rate: np.ndarray | None  # (B, H, Sq, Skv): the derivative of each score by what the softcap was applied to; None: there is no softcap
    bias_error: np.ndarray | None  # (B, H, Sq, Skv): how far each score may be off because of what is added to it; None: nothing is


def weight_error(dtype: str) -> float:
    """The relative error of a softmax weight, in addition to that of its score: that of the exponential, and of rounding it to the dtype.

    Weights of bfloat16 problems may be rounded to bfloat16 before they meet the values; those of float16 are known to that dtype's
    precision.
    """
    return EPSILON[dtype] if dtype in ("float16", "bfloat16") else 8 * EPSILON[dtype]


def growth(weights: np.ndarray, score_error: np.ndarray, bias_error: np.ndarray) -> np.ndarray:
    """How far weights may be off because of what is added to their scores, beyond what the error of the row's scores explains."""
    row = np.minimum(2 * score_error[..., None], 600)
    return np.minimum(weights * (np.expm1(np.minimum(row + 2 * bias_error, 600)) - np.expm1(row)), 1e30)


def forward(a: Attention) -> Forward:
    """The definition, and how far from it arithmetic in the promised precision may be.

    A score is a sum of D products in float32, times a number: it is off by at most (D + 8) eps times the sum of the products'
    absolute values. So is its exponential, relatively, and hence each weight before and after it is divided by their sum. A result
    is a sum of n weighted values, off by (2 * that + n eps) of the sum of their absolute values, and is rounded to the dtype. The
    sum of a row is off by as much, relatively, and the log-sum-exp absolutely.

    What is added to a score is rounded as a number, as its product with log2(e), which is itself rounded, and twice in sums: the
    score's error grows by 6 eps times the sum of the parts' absolute values. This is bounded for each key by itself, for a number that
    all but hides a key may be large.
    """
    seen, eps = a.seen(), EPSILON[a.real]
    k, v = a.grouped(a.k), a.grouped(a.v)
    scores = a.factor * (a.q @ k.swapaxes(-1, -2))
    rate = None
    if a.softcap:
        tangent = np.tanh(scores / a.softcap)
        scores, rate = a.softcap * tangent, 1 - tangent**2
    capped, bias_error, spoilt = scores, None, np.zeros(scores.shape[:3], np.bool_)
    if a.mask is not None or a.slopes is not None:
        bias, size = (np.where(seen, x, 0) for x in a.bias())
        spoilt = np.isnan(bias).any(axis=-1)
        scores, bias_error = scores + np.nan_to_num(bias, nan=0), 6 * eps * np.nan_to_num(size, nan=0)
    largest = np.max(np.where(seen, scores, -np.inf), axis=-1, initial=-np.inf)
    sinks = np.full(largest.shape, -np.inf)
    if a.sinks is not None:
        sinks = np.where(np.arange(largest.shape[2]) < a.q_lens[:, None, None], a.sinks[:, None], -np.inf)
        largest = np.maximum(largest, sinks)
    some = largest > -np.inf
    shift = np.where(some, largest, 0)
    weights = np.exp(np.where(seen, scores - shift[..., None], -np.inf))
    total = weights.sum(axis=-1) + np.exp(np.where(some, sinks - shift, -np.inf))
    weights /= np.where(some, total, 1)[..., None]
    out = weights @ v
    with np.errstate(divide="ignore"):
        lse = np.where(some, np.log(total) + shift, -np.inf)

    norms = np.linalg.norm(a.q, axis=-1) * np.linalg.norm(k, axis=-1).max(axis=-1, initial=0)[..., None]  # at least any sum of products
    score_error = eps * abs(a.factor) * (a.q.shape[-1] + 8) * norms
    if a.softcap:
        score_error = score_error + 16 * eps * np.abs(np.where(seen, capped, 0)).max(axis=-1, initial=0)
    if a.sinks is not None:
        score_error = score_error + 4 * eps * np.abs(np.where(np.isfinite(sinks), sinks, 0))
    with np.errstate(over="ignore"):
        relative = np.expm1(2 * score_error)
    count = np.minimum(seen.sum(axis=-1), 1 << 20)
    share = 2 * (relative + weight_error(a.dtype)) + count * eps
    tiny = SMALL + (2.0**-24 if a.dtype == "float16" else 0)
    allowed_out = share[..., None] * (weights @ np.abs(v)) + 2 * EPSILON[a.dtype] * np.abs(out) + tiny
    sum_error = relative + (2.0**-12 if a.dtype in ("float16", "bfloat16") else 8 * eps) + count * eps
    allowed_lse = sum_error + 4 * eps * np.abs(shift) + 4 * eps * np.abs(np.where(some, lse, 0)) + SMALL
    if bias_error is not None:
        grown = growth(weights, score_error, bias_error)
        allowed_out = allowed_out + grown @ np.abs(v) + grown.sum(axis=-1, keepdims=True) * (weights @ np.abs(v))
        allowed_lse = allowed_lse + grown.sum(axis=-1)
    out[spoilt], lse[spoilt] = np.nan, np.nan
    return Forward(seen, scores, out, lse, score_error, allowed_out, allowed_lse, some, rate, bias_error)


class Gradients(NamedTuple):
    dq: np.ndarray
    dk: np.ndarray
    dv: np.ndarray
    allowed: tuple[np.ndarray, np.ndarray, np.ndarray]
    dbias: np.ndarray  # (B, H, Sq, Skv): the gradient of what is added to each score, and how far it may be off
    dbias_error: np.ndarray

    def of_mask(self, shape: tuple[int, ...], dtype: str, real: str) -> tuple[np.ndarray, np.ndarray]:
        """The gradient of a mask of four axes, in its dtype, and how far it may be off. `real`: the dtype of sums over batch and heads."""
        shared = tuple(axis for axis, n in enumerate(shape) if n == 1)
        total, size, error = (x.sum(axis=shared, keepdims=True) for x in (self.dbias, np.abs(self.dbias), self.dbias_error))
        terms = self.dbias.shape[0] * self.dbias.shape[1] + 4
        count = self.dbias.size / max(total.size, 1) if real == dtype else 1  # numbers that are rounded to the mask's dtype
        smallest = SMALL + (2.0**-24 * count if dtype == "float16" else 0)
        return total, error + terms * EPSILON[real] * size + 2 * EPSILON[dtype] * np.abs(total) + smallest

    def of_slopes(self, away: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The gradients of the slopes (H,), and how far they may be off. `away`: distances (B, Sq, Skv)."""
        distance = np.abs(away)[:, None]
        total, size, error = ((x * distance).sum(axis=(0, 2, 3)) for x in (self.dbias, np.abs(self.dbias), self.dbias_error))
        return -total, error + 8 * EPSILON["float32"] * size + SMALL


def backward(a: Attention, f: Forward, dout: np.ndarray, out: np.ndarray, lse: np.ndarray, dlse: np.ndarray | None) -> Gradients:
    """The formulas of the docstring with the `out` and `lse` that are given, and how far float32 arithmetic may be from them.

    A probability is off by its score's error, by rounding the difference to `lse`, and by `weight_error`. dout . v and dout . out
    are sums of Dv products, so a slope is off by the probability's error of itself and (Dv + 4) eps of the products' absolute
    values; slopes are rounded as probabilities are. Each gradient is a sum of n products of these, rounded to the dtype. The derivative of
    the softcap, ``1 - tanh(x)^2``, is off by at most twice the error of x and of the tangent.
    """
    eps = EPSILON[a.real]
    k, v = a.grouped(a.k), a.grouped(a.v)
    some = f.seen.any(axis=-1) & (lse > -np.inf)
    shown = f.seen & some[..., None]
    row_lse = np.where(some, lse, 0)
    p = np.exp(np.where(shown, f.scores - row_lse[..., None], -np.inf))
    delta = (dout * out).sum(axis=-1)
    free = delta - (0 if dlse is None else dlse)
    products = dout @ v.swapaxes(-1, -2)
    ds = p * (products - free[..., None])

    of_row = 2 * (f.score_error + 4 * eps * np.abs(row_lse))[..., None]
    with np.errstate(over="ignore"):
        grown = np.expm1(of_row if f.bias_error is None else np.minimum(of_row + 2 * f.bias_error, 600))
    p_error = grown + weight_error(a.dtype)
    norms = np.linalg.norm(dout, axis=-1)[..., None] * (np.linalg.norm(v, axis=-1)[..., None, :] + np.linalg.norm(out, axis=-1)[..., None])
    size = np.abs(products) + np.abs(free)[..., None]
    ds_error = p * (p_error * size + eps * (v.shape[-1] + 4) * norms + eps * size)
    dbias, dbias_error = ds, ds_error
    if f.rate is not None:
        ds_error = ds_error * f.rate + np.abs(ds) * (2 * f.score_error[..., None] / a.softcap + 32 * eps)
        ds = ds * f.rate
    ds_error += weight_error(a.dtype) * np.abs(ds)
    n_kv, n_q = f.seen.shape[-1], f.seen.shape[-2] * (a.q.shape[1] // max(a.k.shape[1], 1))
    ds_size = np.abs(ds) + ds_error
    factor = abs(a.factor)
    dq, dk, dv = a.factor * (ds @ k), a.factor * a.ungrouped(ds.swapaxes(-1, -2) @ a.q), a.ungrouped(p.swapaxes(-1, -2) @ dout)
    dq_error = factor * ((ds_error + (n_kv + 4) * eps * ds_size) @ np.abs(k))
    dk_error = factor * a.ungrouped((ds_error + (n_q + 4) * eps * ds_size).swapaxes(-1, -2) @ np.abs(a.q))
    dv_error = a.ungrouped((p * (p_error + (n_q + 4) * eps)).swapaxes(-1, -2) @ np.abs(dout))
    tiny = SMALL + (2.0**-24 if a.dtype == "float16" else 0)
    rounding = 2 * EPSILON[a.dtype]
    allowed = tuple(e + rounding * np.abs(x) + tiny for x, e in ((dq, dq_error), (dk, dk_error), (dv, dv_error)))
    return Gradients(dq, dk, dv, allowed, dbias, dbias_error)
