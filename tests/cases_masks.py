"""Masks, the biases that they add, and attention with biases in plain NumPy, for tests of `attn_mask`, `alibi_slopes` and `kv_ranges`."""

import numpy as np
import pytest

import blitz_attn
from blitz_attn import testing
from cases import bits_option, same_bits

B, H, HKV, Q, KV, D = 2, 4, 2, 130, 210, 32
UNIT = {"float64": 1e-11, "float32": 5e-5, "float16": 6e-3, "bfloat16": 5e-2}
SLOPES = np.float32([0.5, 0.25, 0.02, 0.001])
HAS_ML_DTYPES = testing.round_to([1.0], "bfloat16").dtype != np.uint16
BFLOAT16 = pytest.param("bfloat16", marks=pytest.mark.skipif(not HAS_ML_DTYPES, reason="needs ml_dtypes"))


# ---- Masks and biases -----------------------------------------------------------------------------------------------


def kept(rng, *shape):
    """True for most keys. Some queries see no key."""
    mask = rng.random(shape) < 0.7
    return mask & (rng.random((*shape[:-1], 1)) > 0.1)


def numbers(rng, *shape):
    return (rng.standard_normal(shape) * 3).astype(np.float32)


def holes(rng, *shape):
    return np.where(kept(rng, *shape), numbers(rng, *shape), np.float32(-np.inf))


MASKS = {
    "bool, one for all": lambda rng, b, q, kv: kept(rng, q, kv),
    "bool, per entry": lambda rng, b, q, kv: kept(rng, b, 1, q, kv),
    "bool, keys": lambda rng, b, q, kv: kept(rng, b, 1, 1, kv),
    "bool, queries": lambda rng, b, q, kv: rng.random((b, H, q, 1)) < 0.8,
    "all axes": lambda rng, b, q, kv: holes(rng, b, H, q, kv),
    "per head": lambda rng, b, q, kv: numbers(rng, H, q, kv),
    "per head and key": lambda rng, b, q, kv: numbers(rng, 1, H, 1, kv),
    "per query": lambda rng, b, q, kv: numbers(rng, b, 1, q, 1),
    "a number": lambda rng, b, q, kv: np.float32([-2.5]),
}


def mask_of(name, batch=B, q_len=Q, kv_len=KV):
    return MASKS[name](np.random.default_rng(list(MASKS).index(name)), batch, q_len, kv_len)


def bias_of(mask):
    """The numbers that a mask adds to scores, in float64."""
    return np.where(mask, 0.0, -np.inf) if mask.dtype == bool else testing.to_float64(mask)


def distances(q_len, kv_len, begin=None):
    return np.abs(np.arange(q_len)[:, None] + (kv_len - q_len if begin is None else begin) - np.arange(kv_len))


def slope_bias(q_len, kv_len, slopes=SLOPES, begin=None):
    return -np.float64(slopes)[:, None, None] * distances(q_len, kv_len, begin)


def softmax_of(q, k, v, bias, softcap=None, sinks=None):
    """Weights, output and log-sum-exp in float64. `k` and `v` have as many heads as `q`."""
    scores = q @ k.swapaxes(2, 3) / np.sqrt(q.shape[3])
    scores = (scores if softcap is None else softcap * np.tanh(scores / softcap)) + bias
    sink = np.full(scores.shape[:3], -np.inf) if sinks is None else np.broadcast_to(np.float64(sinks)[:, None], scores.shape[:3])
    top = np.maximum(np.maximum(scores.max(axis=-1), sink), -1e300)[..., None]
    total = np.exp(scores - top).sum(axis=-1, keepdims=True) + np.exp(sink[..., None] - top)
    p = np.exp(scores - top) / np.where(total > 0, total, 1)
    out = p @ v
    with np.errstate(divide="ignore"):
        lse = (top + np.log(total))[..., 0]
    return p, out, lse


def score_gradients(p, out, v, dout, dlse=0.0):
    """The gradient of the bias that is added to each score, (B, H, Sq, Skv), from arguments and results of `softmax_of`."""
    return p * (dout @ v.swapaxes(2, 3) - (dout * out).sum(axis=-1, keepdims=True) + dlse)


def expected(q, k, v, bias, dout=None, softcap=None, sinks=None):
    """Output and log-sum-exp in float64, or, with dout, the gradients of q, k and v. A bias of -inf hides a key."""
    group = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    p, out, lse = softmax_of(q, k, v, bias, softcap, sinks)
    if dout is None:
        return out, lse
    ds = score_gradients(p, out, v, dout) / np.sqrt(q.shape[3])

    def summed(x):
        return x.reshape(x.shape[0], -1, group, *x.shape[2:]).sum(axis=2)

    return ds @ k, summed(ds.swapaxes(2, 3) @ q), summed(p.swapaxes(2, 3) @ dout)


# ---- Arrays in every layout -----------------------------------------------------------------------------------------


def problem(dtype="float32", layout="BNSD", q_len=Q, kv_len=KV):
    """Arrays in the layout, the same values in float64 as (B, H, S, D), and the options of the call."""
    given = testing.make_qkv(B, H, HKV, q_len, kv_len, D, dtype=dtype)
    exact = [testing.to_float64(x, dtype) for x in given]
    options = {"layout": layout} | bits_option(given[0])
    if layout == "BSH":
        options |= {"num_heads": H, "num_kv_heads": HKV}
    if layout == "TND":
        options |= {"cu_seqlens_q": [0, q_len, 2 * q_len], "cu_seqlens_kv": [0, kv_len, 2 * kv_len]}
    return [laid_out(x, layout) for x in given], exact, options


def laid_out(x, layout):
    return np.ascontiguousarray(x.swapaxes(1, 2)).reshape(-1, x.shape[1], x.shape[3]) if layout == "TND" else testing.to_layout(x, layout)


def to_heads(x, layout, heads):
    """A result as (B, H, S, D), or as (B, H, S) for a log-sum-exp."""
    if layout == "TND":
        return x.reshape(B, -1, *x.shape[1:]).swapaxes(1, 2)
    if layout == "BNSD" or x.shape[1] == heads:
        return x
    return x.reshape(*x.shape[:2], heads, -1).swapaxes(1, 2)


def attend(arrays, options, num_threads=1, **more):
    """(out, lse) of the call, after a check that three threads give the same bits."""
    results = [blitz_attn.block_sparse_attention(*arrays, return_lse=True, num_threads=n, **options, **more) for n in (num_threads, 3)]
    assert all(map(same_bits, *results))
    return results[0]


def gradients(dout, arrays, result, options, **more):
    """(dq, dk, dv) of the call, after a check that three threads give the same bits."""
    call = blitz_attn.block_sparse_attention_backward
    found = [call(dout, *arrays, *result, num_threads=n, **options, **more) for n in (1, 3)]
    assert all(map(same_bits, *found))
    return found[0]


def close(found, right, dtype="float32", times=1):
    for a, b in zip(found, right, strict=True):
        np.testing.assert_allclose(testing.to_float64(a, dtype), b, rtol=times * UNIT[dtype], atol=times * UNIT[dtype])


def hiding(kind, hidden):
    """A mask that hides the keys that are True in `hidden`."""
    if kind == "bool":
        return ~hidden
    least = np.finfo(np.float32).min if kind == "least" else -np.inf
    return np.where(hidden, least, np.random.default_rng(6).standard_normal(hidden.shape)).astype(np.float32)
