"""float64 twins of the parts of native sparse attention: compression, selection, the three branches, gating, and the
gradient of each. Public through `blitz_attn.reference`; `nsa.py` puts them together.
"""

from __future__ import annotations

import numpy as np

from .dense import to_float64
from .nsa_core import (
    at_least,
    attend,
    attend_backward,
    block_count,
    check_block_sizes,
    check_compressed,
    check_tile,
    check_weight,
    combine,
    compress,
    compress_backward,
    compressed_cuts,
    compressed_strips,
    cuts,
    default_scale,
    gates_backward,
    join,
    places,
    rounding_of,
    routing_parts,
    selected_strips,
    selector,
    sequence_scores,
    sigmoid_gates,
    split,
    top_blocks,
    window_strips,
)

__all__ = [
    "compress_kv",
    "compress_kv_backward",
    "compressed_attention",
    "compressed_attention_backward",
    "compute_gates",
    "gate_and_combine",
    "gating_backward",
    "score_and_select_blocks",
    "score_blocks",
    "selected_attention",
    "selected_attention_backward",
    "window_attention",
    "window_attention_backward",
]


# ---- Compression ----------------------------------------------------------------------------------------------------


def compress_kv(k, v, block_size, w_k=None, w_v=None, *, stride=None, cu_seqlens=None, dtype=None):
    """See `blitz_attn.nsa.compress_kv`."""
    block_size, stride = check_block_sizes(block_size, stride)
    results = []
    for name, x, w in (("w_k", k, w_k), ("w_v", v, w_v)):
        x = to_float64(x, dtype)
        check_weight(name, w, *x.shape[-2:])
        w = None if w is None else to_float64(w, dtype)
        offsets = None if cu_seqlens is None else cuts(cu_seqlens, x.shape[0])
        parts = [compress(one, block_size, stride, w, rounding_of("float64")) for one in split(x, offsets)]
        blocks = () if offsets is not None else (block_count(x.shape[1], block_size, stride),)
        results.append(join(parts, offsets is not None, (0, *blocks, *x.shape[-2:])))
    return tuple(results)


def compress_kv_backward(dk_cmp, dv_cmp, k, v, block_size, w_k=None, w_v=None, *, stride=None, cu_seqlens=None, dtype=None):
    """See `blitz_attn.nsa.compress_kv_backward`."""
    block_size, stride = check_block_sizes(block_size, stride)
    grads, weight_grads = [], []
    for name, dy, x, w in (("w_k", dk_cmp, k, w_k), ("w_v", dv_cmp, v, w_v)):
        dy, x = to_float64(dy, dtype), to_float64(x, dtype)
        check_weight(name, w, *x.shape[-2:])
        w = None if w is None else to_float64(w, dtype)
        offsets = None if cu_seqlens is None else cuts(cu_seqlens, x.shape[0])
        inner = None if offsets is None else compressed_cuts(offsets, block_size, stride)
        parts = [
            compress_backward(dy_one, x_one, block_size, stride, w, rounding_of("float64"))
            for dy_one, x_one in zip(split(dy, inner), split(x, offsets), strict=True)
        ]
        grads.append(join([dx for dx, _ in parts], offsets is not None, x.shape))
        weight_grads.append(None if w is None else sum((dw for _, dw in parts), np.zeros(w.shape)))
    return (*grads, *weight_grads)


# ---- Selection ------------------------------------------------------------------------------------------------------


def score_blocks(
    q, k_cmp, num_selected_blocks, compress_block_size, *, causal=True, q_tile_size=256, scale=None, cu_seqlens=None, mode="paper",
    compress_stride=None, select_block_size=None, init_blocks=1, local_blocks=2, tokens=None, cu_seqlens_q=None, dtype=None,
):  # fmt: skip
    """Scores by which `score_and_select_blocks` selects, one array per sequence.

    Parameters
    ----------
    q, k_cmp, num_selected_blocks, compress_block_size, causal, q_tile_size, scale, cu_seqlens, mode, compress_stride, dtype
        See `score_and_select_blocks`.
    select_block_size, init_blocks, local_blocks, tokens, cu_seqlens_q
        Likewise.

    Returns
    -------
    list of numpy.ndarray
        A float64 array a sequence: paper mode (Hkv, queries, blocks), mslk mode (H, tiles, blocks). ``-inf``: may not be selected;
        ``inf``: has to be.

    Raises
    ------
    ValueError
        As `score_and_select_blocks`.

    Examples
    --------
    >>> import numpy as np
    >>> from blitz_attn import reference
    >>> q = np.ones((1, 4, 1, 1)); k_cmp = np.array([1.0, 3.0]).reshape(1, 2, 1, 1)
    >>> reference.score_blocks(q, k_cmp, 1, 2, q_tile_size=2, scale=1.0, mode="mslk")[0].tolist()
    [[[1.0, -inf], [1.0, 3.0]]]
    """
    how = selector(
        mode, compress_block_size, causal, q_tile_size, compress_stride, select_block_size, init_blocks, local_blocks, num_selected_blocks
    )
    q, k_cmp = to_float64(q, dtype), to_float64(k_cmp, dtype)
    where, cu_q, inner = _compressed_places(q, k_cmp, tokens, cu_seqlens, cu_seqlens_q, how.block_size, how.stride)
    scale = default_scale(scale, q)
    for place in where:
        check_tile(place, how)
    sequences = zip(split(q, cu_q), split(k_cmp, inner), where, strict=True)
    return [sequence_scores(q_one, k_one, how, scale, place) for q_one, k_one, place in sequences]


def _compressed_places(q, k_cmp, tokens, cu_seqlens, cu_seqlens_q, size, stride):
    """Where the queries of each sequence stand, and the cumulative numbers of queries and of compressed keys."""
    if tokens is not None and cu_seqlens is not None:
        raise ValueError(f"tokens: expected None beside cu_seqlens, got {tokens}")
    where, cu_q, cu = places(q, None if tokens is None else at_least(0, "tokens", tokens), cu_seqlens, cu_seqlens_q)
    lengths = [place.tokens for place in where] or [np.shape(q)[-3] if tokens is None else tokens]
    check_compressed(k_cmp, lengths if cu is None or where else [], cu is not None, size, stride)
    return where, cu_q, None if cu is None else compressed_cuts(cu, size, stride)


def score_and_select_blocks(
    q, k_cmp, num_selected_blocks, compress_block_size, *, causal=True, q_tile_size=256, scale=None, cu_seqlens=None, mode="paper",
    compress_stride=None, select_block_size=None, init_blocks=1, local_blocks=2, lse=None, tokens=None, cu_seqlens_q=None, dtype=None,
    num_threads=None,
):  # fmt: skip
    """See `blitz_attn.nsa.score_and_select_blocks`."""
    scores = score_blocks(
        q, k_cmp, num_selected_blocks, compress_block_size, causal=causal, q_tile_size=q_tile_size, scale=scale, cu_seqlens=cu_seqlens,
        mode=mode, compress_stride=compress_stride, select_block_size=select_block_size, init_blocks=init_blocks,
        local_blocks=local_blocks, tokens=tokens, cu_seqlens_q=cu_seqlens_q, dtype=dtype,
    )  # fmt: skip
    parts = [top_blocks(x, int(num_selected_blocks)) for x in scores]
    heads = k_cmp.shape[-2] if mode == "paper" else q.shape[-2]
    if cu_seqlens is not None:
        return np.concatenate([np.zeros((heads, 0, num_selected_blocks), np.int32), *parts], axis=1)
    rows = -(-q.shape[1] // (1 if mode == "paper" else int(q_tile_size)))
    return np.stack(parts) if parts else np.zeros((0, heads, rows, num_selected_blocks), np.int32)


# ---- The branches ---------------------------------------------------------------------------------------------------


def _forward(q, k, v, cu_q, cu_k, scale, strips, return_lse, dtype):
    """A branch over all sequences: `strips(sequence, queries, heads, keys, KV heads)` is its rule."""
    q, k, v = (to_float64(x, dtype) for x in (q, k, v))
    scale, r = default_scale(scale, q), rounding_of("float64")
    outs, lses = [], []
    for n, (qs, ks, vs) in enumerate(zip(split(q, cu_q), split(k, cu_k), split(v, cu_k), strict=True)):
        out, lse = attend(qs, ks, vs, strips(n, qs.shape[1], qs.shape[0], ks.shape[1], ks.shape[0]), scale, r)
        outs.append(out)
        lses.append(lse[..., None])
    out = join(outs, cu_q is not None, (*q.shape[:-1], v.shape[-1]))
    return (out, join(lses, cu_q is not None, (*q.shape[:-1], 1))[..., 0]) if return_lse else out


def _backward(dout, q, k, v, out, lse, cu_q, cu_k, scale, strips, dtype):
    """The gradients of `_forward`."""
    dout, q, k, v, out = (to_float64(x, dtype) for x in (dout, q, k, v, out))
    lse = np.asarray(lse, np.float64)[..., None]
    scale, r = default_scale(scale, q), rounding_of("float64")
    parts = []
    sequences = zip(
        *(split(x, cu_q) for x in (dout, q)), *(split(x, cu_k) for x in (k, v)), *(split(x, cu_q) for x in (out, lse)), strict=True
    )
    for n, (ds, qs, ks, vs, os, ls) in enumerate(sequences):
        rule = strips(n, qs.shape[1], qs.shape[0], ks.shape[1], ks.shape[0])
        parts.append(attend_backward(ds, qs, ks, vs, os, ls[..., 0], rule, scale, r))
    return tuple(join([one[n] for one in parts], cu_q is not None, like.shape) for n, like in enumerate((q, k, v)))


def _compressed_rule(q, k_cmp, cu_seqlens, block_size, stride, causal, mode, tokens=None, cu_seqlens_q=None):
    size, step = check_block_sizes(block_size, stride)
    where, cu_q, inner = _compressed_places(q, k_cmp, tokens, cu_seqlens, cu_seqlens_q, size, step)
    if mode not in ("paper", "mslk"):
        raise ValueError(f'mode: expected "paper" or "mslk", got {mode!r}')

    def strips(n, rows, heads, blocks, kv_heads):
        return compressed_strips(rows, heads, blocks, size, step, mode, causal, first=where[n].begin)

    return cu_q, inner, strips


def compressed_attention(
    q, k_cmp, v_cmp, compress_block_size, *, stride=None, causal=True, scale=None, cu_seqlens=None, mode="paper", tokens=None,
    cu_seqlens_q=None, return_lse=False, dtype=None,
):  # fmt: skip
    """See `blitz_attn.nsa.compressed_attention`."""
    rule = _compressed_rule(q, k_cmp, cu_seqlens, compress_block_size, stride, causal, mode, tokens, cu_seqlens_q)
    cu_q, inner, strips = rule
    return _forward(q, k_cmp, v_cmp, cu_q, inner, scale, strips, return_lse, dtype)


def compressed_attention_backward(
    dout, q, k_cmp, v_cmp, out, lse, compress_block_size, *, stride=None, causal=True, scale=None, cu_seqlens=None, mode="paper", dtype=None
):
    """See `blitz_attn.nsa.compressed_attention_backward`."""
    cu_q, inner, strips = _compressed_rule(q, k_cmp, cu_seqlens, compress_block_size, stride, causal, mode)
    return _backward(dout, q, k_cmp, v_cmp, out, lse, cu_q, inner, scale, strips, dtype)


def _selected_rule(q, k, block_indices, block_size, causal, q_tile_size, cu_seqlens, cu_seqlens_q=None):
    size, _ = check_block_sizes(block_size, None)
    where, cu_q, cu = places(q, np.shape(k)[-3], cu_seqlens, cu_seqlens_q)
    parts = routing_parts(block_indices, cu_q, q_tile_size)
    return cu_q, cu, lambda n, rows, heads, _, kv: selected_strips(parts[n], rows, heads, kv, size, causal, q_tile_size, where[n])


def selected_attention(
    q, k, v, block_indices, block_size, *, q_tile_size=1, causal=True, scale=None, cu_seqlens=None, cu_seqlens_q=None, return_lse=False,
    dtype=None,
):  # fmt: skip
    """See `blitz_attn.nsa.selected_attention`."""
    cu_q, cu, strips = _selected_rule(q, k, block_indices, block_size, causal, q_tile_size, cu_seqlens, cu_seqlens_q)
    return _forward(q, k, v, cu_q, cu, scale, strips, return_lse, dtype)


def selected_attention_backward(
    dout, q, k, v, out, lse, block_indices, block_size, *, q_tile_size=1, causal=True, scale=None, cu_seqlens=None, dtype=None
):
    """See `blitz_attn.nsa.selected_attention_backward`."""
    cu_q, cu, strips = _selected_rule(q, k, block_indices, block_size, causal, q_tile_size, cu_seqlens)
    return _backward(dout, q, k, v, out, lse, cu_q, cu, scale, strips, dtype)


def _window_rule(q, k, window_size, causal, cu_seqlens, cu_seqlens_q=None):
    window = at_least(1, "window_size", window_size)
    where, cu_q, cu = places(q, np.shape(k)[-3], cu_seqlens, cu_seqlens_q)
    return cu_q, cu, lambda n, rows, heads, *_: window_strips(rows, heads, window, causal, where[n])


def window_attention(q, k, v, window_size, *, causal=True, scale=None, cu_seqlens=None, cu_seqlens_q=None, return_lse=False, dtype=None):
    """See `blitz_attn.nsa.window_attention`."""
    cu_q, cu, strips = _window_rule(q, k, window_size, causal, cu_seqlens, cu_seqlens_q)
    return _forward(q, k, v, cu_q, cu, scale, strips, return_lse, dtype)


def window_attention_backward(dout, q, k, v, out, lse, window_size, *, causal=True, scale=None, cu_seqlens=None, dtype=None):
    """See `blitz_attn.nsa.window_attention_backward`."""
    cu_q, cu, strips = _window_rule(q, k, window_size, causal, cu_seqlens)
    return _backward(dout, q, k, v, out, lse, cu_q, cu, scale, strips, dtype)


# ---- Gates ----------------------------------------------------------------------------------------------------------


def compute_gates(q, gate_proj_weight=None, *, dtype=None):
    """See `blitz_attn.nsa.compute_gates`."""
    q = to_float64(q, dtype)
    if gate_proj_weight is not None and tuple(gate_proj_weight.shape) != (q.shape[-2], 3, q.shape[-1]):
        expected = (q.shape[-2], 3, q.shape[-1])
        raise ValueError(f"gate_proj_weight: expected shape (H, 3, D) = {expected}, got {tuple(gate_proj_weight.shape)}")
    return sigmoid_gates(q, None if gate_proj_weight is None else to_float64(gate_proj_weight, dtype), rounding_of("float64"))


def gate_and_combine(o_cmp, o_slc, o_win, gates, *, dtype=None):
    """See `blitz_attn.nsa.gate_and_combine`."""
    return combine([to_float64(x, dtype) for x in (o_cmp, o_slc, o_win)], to_float64(gates, dtype), rounding_of("float64"))


def gating_backward(q, dout, o_cmp, o_slc, o_win, gates, gate_proj_weight=None, *, dtype=None):
    """See `blitz_attn.nsa.gating_backward`."""
    q, dout, *rest = (to_float64(x, dtype) for x in (q, dout, o_cmp, o_slc, o_win, gates))
    weight = None if gate_proj_weight is None else to_float64(gate_proj_weight, dtype)
    dbranches, _, dq, dweight = gates_backward(q, dout, rest[:3], rest[3], weight, rounding_of("float64"))
    return (*dbranches, dq, dweight)
