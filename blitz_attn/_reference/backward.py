"""float64 twin of the gradients of attention over whole arrays, and their computation in the precision of the inputs. Public
through `blitz_attn.reference`.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .._arrays import dtype_name
from .._sabi import lists
from .dense import (
    Rules,
    SequenceParts,
    add_biases,
    bias_and_seen,
    input_dtype,
    join_sequences,
    listed_keys,
    make_rules,
    round_in_float32,
    seen_bounds,
    sequences_of,
    strips,
    to_float64,
    written,
)

__all__ = ["block_sparse_attention_backward", "dense_same_precision_backward"]


def _outer_sum(weights: np.ndarray, rows: np.ndarray, seen: np.ndarray | None) -> np.ndarray:
    """weights.T @ rows in which a NaN or infinity of a row reaches only results whose weight sees the row."""
    nonfinite = np.flatnonzero(~np.isfinite(rows).all(axis=1))
    if nonfinite.size == 0:
        return weights.T @ rows
    plain = rows.copy()
    plain[nonfinite] = 0
    out = weights.T @ plain
    for i in nonfinite:
        term = weights[i, :, None] * rows[i]
        out += term if seen is None else np.where(seen[i, :, None], term, 0)
    return out


def _strip_gradients(q, k, v, dout, lse, delta, seen, bias, scale, name, softcap):
    """(dq, dk, dv, dbias) of a strip of queries and some keys. `name`: the precision that every matrix is rounded to."""
    number = q.dtype.type
    s = round_in_float32(q @ k.T * number(scale), name)
    tangent = np.tanh(s / number(softcap)) if softcap else None
    if tangent is not None:
        s = round_in_float32(number(softcap) * tangent, name)
    if bias is not None:
        s = round_in_float32(s + bias.astype(s.dtype), name)
    p = np.exp(s - lse[:, None])
    if seen is not None:
        p = np.where(seen, p, number(0))
    p = round_in_float32(p, name)
    slope = p * (round_in_float32(dout @ v.T, name) - delta[:, None])
    slopes = [slope, slope if tangent is None else slope * (1 - tangent**2)]  # of the scores with and before their bias and softcap
    if seen is not None:
        slopes = [np.where(seen, x, number(0)) for x in slopes]
    dbias, slope = (round_in_float32(x, name) for x in slopes)
    mirrored = None if seen is None else seen.T
    dq = _outer_sum(slope.T, k, mirrored) * number(scale)
    return dq, _outer_sum(slope, q, seen) * number(scale), _outer_sum(p, dout, seen), dbias


def _head_gradients(tensors, seq: SequenceParts, head: int, rows, block_shape, rules: Rules, scale, name, softcap, sums, dbias):
    """dq of `head`. Its contributions to the gradients of its KV head are added to `sums`, (dk, dv), and those to the gradient of each
    score's bias, (tokens, tokens), to `dbias` unless that is None."""
    q, k, v, dout, lse, delta = tensors
    dq = np.zeros_like(q)
    block_q, block_kv = block_shape
    bands: Any = [(0, seq.q_len, None)]
    if rows is not None:
        starts = range(0, seq.q_len, block_q)
        bands = ((a, min(a + block_q, seq.q_len), listed_keys(rows[r], block_kv, seq.kv_len)) for r, a in enumerate(starts))
    for band_first, band_last, keys in bands:
        keys = np.arange(seq.kv_len) if keys is None else keys
        for first, last in strips(band_first, band_last, keys.size):
            low, high = seen_bounds(rules, seq, np.arange(first, last))
            pick = keys[(keys >= low.min()) & (keys <= high.max())]
            queries = np.arange(first, last)[lse[first:last] != -np.inf]  # the other queries attended to no key
            if pick.size == 0 or queries.size == 0:
                continue
            seen = (pick >= low[queries - first, None]) & (pick <= high[queries - first, None])
            bias, seen = bias_and_seen(seq, head, 1, queries, pick, seen)
            mine = (q[queries], k[pick], v[pick], dout[queries], lse[queries], delta[queries])
            shown = None if seen is None or seen.all() else seen
            dq[queries], dk, dv, own = _strip_gradients(*mine, shown, bias, scale, name, softcap)
            sums[0][pick] += dk
            sums[1][pick] += dv
            if dbias is not None:
                dbias[queries[:, None], pick] += own
    return round_in_float32(dq, name)


def _numbers_by_sequence(x: np.ndarray, layout: str, sequences: list[SequenceParts]) -> list[np.ndarray]:
    """(heads, tokens) arrays of the batch entries, from an array of the shape of the log-sum-exp."""
    if layout != "TND" or not sequences:
        return list(x)
    cuts = np.cumsum([s.q.shape[1] for s in sequences])[:-1]
    return [part.T for part in np.split(x, cuts)]


class _BiasSums:
    """The gradients of a mask (B or 1, H or 1, Sq or 1, Skv or 1) and of the slopes (H,), None for one that is not given, or is of bool."""

    def __init__(self, attn_mask, alibi_slopes):
        shape = np.shape(attn_mask)
        bool_mask = attn_mask is None or dtype_name(attn_mask.dtype) == "bool"
        self.shape = None if bool_mask else shape
        self.mask = None if bool_mask else np.zeros((1,) * (4 - len(shape)) + shape)
        self.slopes = None if alibi_slopes is None else np.zeros(len(alibi_slopes))

    def add(self, b, h, seq, dbias):
        """Adds the gradient of the bias of one head of a batch entry, (tokens, tokens)."""
        if self.mask is not None:
            place = self.mask[min(b, self.mask.shape[0] - 1), min(h, self.mask.shape[1] - 1)]
            shared = tuple(axis for axis, n in enumerate(place.shape) if n == 1)
            total = dbias.sum(axis=shared, keepdims=True)
            place[: total.shape[0], : total.shape[1]] += total
        if self.slopes is not None:
            queries, keys = (np.arange(n) for n in dbias.shape)
            self.slopes[h] -= (dbias * np.abs(queries[:, None] + seq.begin - keys)).sum()

    def results(self):
        return (None if self.mask is None else self.mask.reshape(self.shape)), self.slopes


def _run(tensors, numbers, sabi, block_shape, scale, layout, rules, shape_args, bias_args, name, softcap, bias_sums=None):
    """The common body of the twins. `tensors`: dout, q, k, v, out; `numbers`: lse and dlse, which may be None. The gradients of the biases
    are added to `bias_sums` unless that is None."""
    dout, q, k, v, out = tensors
    block_q, block_kv = (int(n) for n in block_shape)
    if min(block_q, block_kv) < 1:
        raise ValueError(f"block_shape: expected two positive numbers, got {(block_q, block_kv)}")
    sequences = sequences_of(q, k, v, layout, *shape_args)
    add_biases(sequences, *bias_args)
    q_lens, _, cu_q, _, num_heads, *_ = shape_args
    outs, douts = (
        [s.q for s in sequences_of(x, x, x, layout, q_lens, q_lens, cu_q, cu_q, num_heads, num_heads)] for x in (out, dout)
    )  # a tensor of q's kind in all three places
    lses = _numbers_by_sequence(numbers[0], layout, sequences)
    dlses = lses if numbers[1] is None else _numbers_by_sequence(numbers[1], layout, sequences)
    for what, parts in (("out", outs), ("dout", douts)):
        if any(x.shape != (*s.q.shape[:2], s.v.shape[2]) for x, s in zip(parts, sequences, strict=True)):
            raise ValueError(f"{what}: expected the shape of q with v's last dimension, got {(out if what == 'out' else dout).shape}")
    for what, parts in (("lse", lses), ("dlse", dlses)):
        if len(parts) != len(sequences) or any(x.shape != s.q.shape[:2] for x, s in zip(parts, sequences, strict=True)):
            raise ValueError(f"{what}: expected one number per query and head, got {numbers[what == 'dlse'].shape}")
    heads = sequences[0].q.shape[0] if sequences else 0
    if scale is None:
        scale = 1.0 / math.sqrt(sequences[0].q.shape[2] if sequences else 1)
    kept = None
    longest_q, longest_kv = (max((x.shape[1] for x in xs), default=0) for xs in ([s.q for s in sequences], [s.k for s in sequences]))
    if sabi is not None and longest_q and longest_kv:
        sizes = {"batch": len(sequences), "heads": heads, "kv_heads": sequences[0].k.shape[0]}
        kept = lists.check(sabi, longest_q, longest_kv, (block_q, block_kv), **sizes)
    results = ([], [], [])
    with np.errstate(all="ignore"):
        for b, seq in enumerate(sequences):
            group = heads // seq.k.shape[0]
            dq, dk, dv = (np.zeros(x.shape, x.dtype) for x in (seq.q, seq.k, seq.v))
            for h in range(heads):
                rows = None if kept is None else kept[b % kept.shape[0], h * kept.shape[1] // heads]
                delta = (douts[b][h] * outs[b][h]).sum(axis=1)
                if numbers[1] is not None:
                    delta = delta - dlses[b][h]
                own = (seq.q[h], seq.k[h // group], seq.v[h // group], douts[b][h], lses[b][h], delta)
                sums = (dk[h // group], dv[h // group])
                dbias = None if bias_sums is None else np.zeros((seq.q.shape[1], seq.k.shape[1]))
                cap = float(softcap or 0.0)
                dq[h] = _head_gradients(own, seq, h, rows, (block_q, block_kv), rules, scale, name, cap, sums, dbias)
                if bias_sums is not None:
                    bias_sums.add(b, h, seq, dbias)
            for result, gradient in zip(results, (dq, dk, dv), strict=True):
                result.append(round_in_float32(gradient, name))
    joined = [join_sequences(parts, layout, x.shape) for parts, x in zip(results, (q, k, v), strict=True)]
    return tuple(x.astype(np.float64) for x in joined)


def _kept(results: tuple[np.ndarray, ...], grads: Any, accumulate: bool) -> tuple[Any, ...]:
    """The gradients, written into `grads` where these are given, and those of k and v added to them with `accumulate`."""
    if not accumulate:
        return tuple(written(x, given) for x, given in zip(results, grads or (None,) * 3, strict=True))
    if grads is None or grads[1] is None or grads[2] is None:
        raise ValueError("grads: expected dk and dv to add to with accumulate=True, got None")
    for x, given in zip(results[1:], grads[1:], strict=True):
        given += x
    return written(results[0], grads[0]), grads[1], grads[2]


def block_sparse_attention_backward(
    dout,
    q,
    k,
    v,
    out,
    lse,
    sabi=None,
    *,
    block_shape=(128, 128),
    scale=None,
    layout="BNSD",
    causal=False,
    window=None,
    q_lens=None,
    kv_lens=None,
    cu_seqlens_q=None,
    cu_seqlens_kv=None,
    num_heads=None,
    num_kv_heads=None,
    q_begin=None,
    q_total=None,
    kv_ranges=None,
    attn_mask=None,
    alibi_slopes=None,
    softcap=None,
    dlse=None,
    grads=None,
    bias_grads=False,
    accumulate=False,
    dtype=None,
    num_threads=None,
):
    """See `blitz_attn.block_sparse_attention_backward`."""
    tensors = [to_float64(x, dtype) for x in (dout, q, k, v, out)]
    numbers = (to_float64(lse), None if dlse is None else to_float64(dlse))
    shape_args = (q_lens, kv_lens, cu_seqlens_q, cu_seqlens_kv, num_heads, num_kv_heads, q_begin, kv_ranges)
    bias_args = (attn_mask, alibi_slopes, input_dtype(q, dtype))
    rules = make_rules(causal, window)
    sums = _BiasSums(attn_mask, alibi_slopes) if bias_grads else None
    results = _run(tensors, numbers, sabi, block_shape, scale, layout, rules, shape_args, bias_args, "float64", softcap, sums)
    return _kept(results, grads, accumulate) + (sums.results() if sums else ())


def dense_same_precision_backward(
    dout,
    q,
    k,
    v,
    out,
    lse,
    sabi=None,
    *,
    block_shape=(128, 128),
    scale=None,
    layout="BNSD",
    causal=False,
    window=None,
    q_lens=None,
    kv_lens=None,
    cu_seqlens_q=None,
    cu_seqlens_kv=None,
    num_heads=None,
    num_kv_heads=None,
    q_begin=None,
    q_total=None,
    kv_ranges=None,
    attn_mask=None,
    alibi_slopes=None,
    softcap=None,
    dlse=None,
    grads=None,
    bias_grads=False,
    accumulate=False,
    dtype=None,
    num_threads=None,
):
    """The gradients of `block_sparse_attention_backward` as a plain array program computes them in the precision of the inputs.

    float32 inputs: every step in float32. float16 and bfloat16 inputs: products summed in float32; the scaled scores, the
    probabilities, their gradients and the results rounded to the input dtype. float64 inputs: the same as
    `block_sparse_attention_backward`. The error of this computation against float64 is what the error of the library is
    held against.

    Parameters
    ----------
    dout, q, k, v, out, lse, sabi, block_shape, scale, layout, causal, window, q_lens, kv_lens, cu_seqlens_q, cu_seqlens_kv, num_heads
        See `blitz_attn.block_sparse_attention_backward`.
    num_kv_heads, q_begin, q_total, kv_ranges, attn_mask, alibi_slopes, softcap, dlse, grads, bias_grads, accumulate, dtype, num_threads
        See `block_sparse_attention_backward` in this module.

    Returns
    -------
    dq, dk, dv : numpy.ndarray
        And the gradients of the biases with `bias_grads`, like `block_sparse_attention_backward`: float64 arrays of the rounded values.

    Raises
    ------
    ValueError
        A shape, length, block list or option out of range.

    Examples
    --------
    >>> import numpy as np
    >>> from blitz_attn import reference
    >>> q, k, v, dout = (np.float32([[[[0.1 * n, 0.3]] * 3]]) for n in range(4))
    >>> out, lse = reference.dense_same_precision(q, k, v, return_lse=True)
    >>> [x.shape for x in reference.dense_same_precision_backward(dout, q, k, v, out, lse)]
    [(1, 1, 3, 2), (1, 1, 3, 2), (1, 1, 3, 2)]
    """
    name = dtype_name(dtype) if dtype is not None else dtype_name(getattr(q, "dtype", np.asarray(q).dtype))
    kind = np.float64 if name == "float64" else np.float32
    tensors = [to_float64(x, dtype).astype(kind) for x in (dout, q, k, v, out)]
    numbers = (to_float64(lse).astype(kind), None if dlse is None else to_float64(dlse).astype(kind))
    shape_args = (q_lens, kv_lens, cu_seqlens_q, cu_seqlens_kv, num_heads, num_kv_heads, q_begin, kv_ranges)
    bias_args = (attn_mask, alibi_slopes, name)
    rules = make_rules(causal, window)
    sums = _BiasSums(attn_mask, alibi_slopes) if bias_grads else None
    results = _run(tensors, numbers, sabi, block_shape, scale, layout, rules, shape_args, bias_args, name, softcap, sums)
    return _kept(results, grads, accumulate) + (sums.results() if sums else ())
