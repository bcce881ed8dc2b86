"""Block-sparse attention and its gradients, token by token in float64: the definitions of docs/guide/concepts.rst as boolean masks.

Arrays have one form for every layout: queries (B, H, Sq, D), keys and values (B, Hkv, Skv, ...). Entry b holds q_lens[b] queries and
kv_lens[b] keys, and padding behind them. Values are finite. `Case.bad` marks keys and values that hold NaN or infinity in the package's arrays.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from .checks import EPSILON

HIDES = -2.3e38  # if scores are float32, numbers of a mask below this number hide their keys, as -inf does
SMALL = 1e-30  # allowed error because numbers below 1e-38 may count as 0 at some levels, before they are multiplied and summed


@dataclass
class Attention:
    """One problem: what is computed, independent of how the call's arrays are stored."""

    dtype: str
    q: np.ndarray  # (B, H, Sq, D)
    k: np.ndarray  # (B, Hkv, Skv, D)
    v: np.ndarray  # (B, Hkv, Skv, Dv)
    q_lens: np.ndarray  # (B,)
    kv_lens: np.ndarray
    blocks: np.ndarray | None  # bool (B or 1, H or Hkv or 1, ceil(Sq / block_q), ceil(Skv / block_kv))
    block_shape: tuple[int, int]
    scale: float | None
    causal: bool
    window: tuple[int, int] | None
    begin: np.ndarray | None = None  # (B,): token numbers of the first queries; None: the queries are the last tokens
    total: np.ndarray | None = None  # (B,): the number of queries of the whole call, of which these are a slice; no result depends on it
    softcap: float | None = None
    sinks: np.ndarray | None = None  # (H,)
    ranges: np.ndarray | None = None  # (B, Sq, 2): the first key that each query may see, and the position after the last one
    mask: np.ndarray | None = None  # (B or 1, H or 1, Sq or 1, Skv or 1): added to the scores; -inf hides a key
    slopes: np.ndarray | None = None  # (H,): subtracted from the score per token of distance

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
        """(B, Sq, Skv): the position of a key minus the position of a query among the keys."""
        first = self.kv_lens - self.q_lens if self.begin is None else self.begin
        return np.arange(self.k.shape[2]) - (np.arange(self.q.shape[2])[:, None] + first[:, None, None])

    def bias(self) -> tuple[np.ndarray, np.ndarray]:
        """The bias of the scores, and the sum of the absolute values of its parts. Both broadcast to (B, H, Sq, Skv)."""
        bias = size = np.zeros((1, 1, 1, 1))
        if self.mask is not None:
            bias = hiding(self.mask, self.dtype)
            size = np.abs(bias)
        if self.slopes is not None:
            steps = self.slopes[:, None, None] * np.abs(self.away()[:, None])
            bias, size = bias - steps, size + np.abs(steps)
        return bias, size

    def seen(self) -> np.ndarray:
        """Bool (B, H, Sq, Skv): whether a query attends a key."""
        shown = self.shown()
        return shown if self.mask is None else shown & ~np.isneginf(hiding(self.mask, self.dtype))

    def shown(self) -> np.ndarray:
        """Bool (B, H, Sq, Skv): whether a query sees a key by all rules except the mask."""
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
    """The mask of a problem of `dtype`, with -inf in place of numbers that act as -inf."""
    return mask if dtype == "float64" else np.where(mask < HIDES, -np.inf, mask)


class Forward(NamedTuple):
    seen: np.ndarray  # (B, H, Sq, Skv)
    scores: np.ndarray
    out: np.ndarray  # (B, H, Sq, Dv)
    lse: np.ndarray  # (B, H, Sq)
    score_error: np.ndarray  # (B, H, Sq): the largest allowed error of a score in the row
    allowed_out: np.ndarray
    allowed_lse: np.ndarray
    some: np.ndarray  # (B, H, Sq): whether the row has a score, of a key or of a sink
    rate: np.ndarray | None  # (B, H, Sq, Skv): the derivative of each score by the score before the softcap; None: there is no softcap
    bias_error: np.ndarray | None  # (B, H, Sq, Skv): for each score, the allowed error that comes from its bias; None: no bias


def weight_error(dtype: str) -> float:
    """The relative error that a softmax weight adds to the error of its score: the error of the exponential, and of rounding the weight.

    Weights of bfloat16 problems may be rounded to bfloat16 before they are multiplied by values. Weights of float16 problems have the
    precision of float16.
    """
    return EPSILON[dtype] if dtype in ("float16", "bfloat16") else 8 * EPSILON[dtype]


def growth(weights: np.ndarray, score_error: np.ndarray, bias_error: np.ndarray) -> np.ndarray:
    """The allowed error of weights that comes from the biases of their scores. The error from the row's scores is counted elsewhere."""
    row = np.minimum(2 * score_error[..., None], 600)
    return np.minimum(weights * (np.expm1(np.minimum(row + 2 * bias_error, 600)) - np.expm1(row)), 1e30)


def forward(a: Attention) -> Forward:
    """The definition, and the errors that arithmetic in the promised precision may have.

    A score is a sum of D products in the dtype `real`, times a number: its error is at most (D + 8) eps times the sum of the products'
    absolute values. A weight is the exponential of a difference of two scores, so its relative error e follows from the errors of both. A
    result is a sum of n weighted values, over the sum of the weights: its error is (2 e + n eps) times the sum of the absolute values, and
    it is rounded to the dtype. The sum of a row's weights has the relative error e + n eps, which is an absolute error of the log-sum-exp.

    A bias is rounded as a number, and again as its product with log2(e), a factor that is itself rounded. Two sums round it, too. So the
    score's error grows by 6 eps times the sum of the absolute values of the bias's parts. This error is bounded for each key separately,
    because a number that nearly hides a key may be large.
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

    norms = np.linalg.norm(a.q, axis=-1) * np.linalg.norm(k, axis=-1).max(axis=-1, initial=0)[..., None]  # no sum of products is larger
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
    dbias: np.ndarray  # (B, H, Sq, Skv): the gradient of the bias of each score, and its allowed error
    dbias_error: np.ndarray

    def of_mask(self, shape: tuple[int, ...], dtype: str, real: str) -> tuple[np.ndarray, np.ndarray]:
        """The gradient of a mask of four axes, in its dtype, and its allowed error. `real` is the dtype of sums over batch and heads."""
        shared = tuple(axis for axis, n in enumerate(shape) if n == 1)
        total, size, error = (x.sum(axis=shared, keepdims=True) for x in (self.dbias, np.abs(self.dbias), self.dbias_error))
        terms = self.dbias.shape[0] * self.dbias.shape[1] + 4
        count = self.dbias.size / max(total.size, 1) if real == dtype else 1  # per sum: numbers that are rounded to the mask's dtype
        smallest = SMALL + (2.0**-24 * count if dtype == "float16" else 0)
        return total, error + terms * EPSILON[real] * size + 2 * EPSILON[dtype] * np.abs(total) + smallest

    def of_slopes(self, away: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The gradients of the slopes (H,), and their allowed errors. `away`: distances (B, Sq, Skv)."""
        distance = np.abs(away)[:, None]
        total, size, error = ((x * distance).sum(axis=(0, 2, 3)) for x in (self.dbias, np.abs(self.dbias), self.dbias_error))
        return -total, error + 8 * EPSILON["float32"] * size + SMALL


def backward(a: Attention, f: Forward, dout: np.ndarray, out: np.ndarray, lse: np.ndarray, dlse: np.ndarray | None) -> Gradients:
    """The formulas of the operation's docstring with the given `out` and `lse`, and the errors that arithmetic in `real` may have.

    A probability has the error of its score, of rounding the difference to `lse`, and `weight_error`. dout . v and dout . out are sums
    of Dv products, so a slope (the gradient of a score) has the relative error of its probability, and an error of (Dv + 4) eps times the
    products' absolute values. Slopes are rounded as probabilities are. Each gradient is a sum of n products with slopes or with
    probabilities, and is rounded to the dtype. The derivative of the softcap, ``1 - tanh(x)^2``, has at most
    twice the error of x and of the tanh.
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
