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
    """float64 twin of `blitz_attn.nsa.compress_kv`: block means of keys and values, each times a matrix a head.

    Parameters
    ----------
    k, v : array_like
        (B, N, Hkv, D) and (B, N, Hkv, Dv); with `cu_seqlens` (T, Hkv, D) and (T, Hkv, Dv).
    block_size : int
        Tokens a block. Only complete blocks count: tokens behind the last one are in none.
    w_k, w_v : array_like, optional
        (Hkv, D, D) and (Hkv, Dv, Dv): a mean, as a row, is multiplied by its head's matrix.
    stride : int, optional
        Tokens from one block's beginning to the next. Default: `block_size`.
    cu_seqlens : sequence of int, optional
        (sequences + 1,) offsets from 0 to T.
    dtype : str, optional
        ``"bfloat16"`` where arrays are uint16 bits.

    Returns
    -------
    k_cmp, v_cmp : numpy.ndarray
        (B, blocks, Hkv, D or Dv); with `cu_seqlens` (all sequences' blocks, Hkv, D or Dv), one sequence after the other.

    Raises
    ------
    ValueError
        A size below 1, a weight of the wrong shape, lengths that do not rise from 0 to T.

    Examples
    --------
    >>> import numpy as np
    >>> from blitz_attn import reference
    >>> k = np.arange(10.0).reshape(1, 10, 1, 1)
    >>> reference.compress_kv(k, k, 4, stride=2)[0].ravel().tolist()
    [1.5, 3.5, 5.5, 7.5]
    """
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
    """float64 twin of `blitz_attn.nsa.compress_kv_backward`: the gradients of `compress_kv`.

    Parameters
    ----------
    dk_cmp, dv_cmp : array_like
        Gradients of its results, in their shapes.
    k, v, block_size, w_k, w_v, stride, cu_seqlens, dtype
        Its arguments.

    Returns
    -------
    dk, dv, dw_k, dw_v : numpy.ndarray
        Gradients of its arrays; None for a weight that was not given.

    Raises
    ------
    ValueError
        As `compress_kv`.

    Examples
    --------
    >>> import numpy as np
    >>> from blitz_attn import reference
    >>> k = np.zeros((1, 7, 1, 1)); dy = np.ones((1, 2, 1, 1))
    >>> reference.compress_kv_backward(dy, dy, k, k, 4, stride=2)[0].ravel().tolist()
    [0.25, 0.25, 0.5, 0.5, 0.25, 0.25, 0.0]
    """
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
    compress_stride=None, select_block_size=None, init_blocks=1, local_blocks=2, dtype=None,
):  # fmt: skip
    """Scores by which `score_and_select_blocks` chooses, one array a sequence.

    Parameters
    ----------
    q, k_cmp, num_selected_blocks, compress_block_size, causal, q_tile_size, scale, cu_seqlens, mode, compress_stride, dtype
        See `score_and_select_blocks`.
    select_block_size, init_blocks, local_blocks
        Likewise.

    Returns
    -------
    list of numpy.ndarray
        A float64 array a sequence: paper mode (Hkv, tokens, blocks), mslk mode (H, tiles, blocks). ``-inf``: may not be selected;
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
    offsets = None if cu_seqlens is None else cuts(cu_seqlens, q.shape[0])
    inner = None if offsets is None else compressed_cuts(offsets, how.block_size, how.stride)
    scale = default_scale(scale, q)
    sequences = zip(split(q, offsets), split(k_cmp, inner), strict=True)
    return [sequence_scores(q_one, k_one, how, scale) for q_one, k_one in sequences]


def score_and_select_blocks(
    q, k_cmp, num_selected_blocks, compress_block_size, *, causal=True, q_tile_size=256, scale=None, cu_seqlens=None, mode="paper",
    compress_stride=None, select_block_size=None, init_blocks=1, local_blocks=2, lse=None, dtype=None, num_threads=None,
):  # fmt: skip
    """float64 twin of `blitz_attn.nsa.score_and_select_blocks`: the blocks that the selected branch attends to.

    Parameters
    ----------
    q : array_like
        (B, N, H, D), or (T, H, D) with `cu_seqlens`.
    k_cmp : array_like
        Of `compress_kv`.
    num_selected_blocks : int
        Blocks a row of the result can hold.
    compress_block_size : int
        Tokens a compressed block.
    causal : bool
        Only blocks that begin at or before a query (mslk mode: before the end of its tile).
    q_tile_size : int
        mslk mode: queries that share a selection. The last tile of a sequence is averaged over the queries that it has.
    scale : float, optional
        Default: 1 / sqrt(D).
    cu_seqlens : sequence of int, optional
        (sequences + 1,) offsets from 0 to T.
    mode : {"paper", "mslk"}
        paper: Eq. 9 and 10, one selection a query and KV head. mslk: mean scores, one selection a tile and query head, of complete
        blocks.
    compress_stride, select_block_size, init_blocks, local_blocks
        paper mode, see `nsa`.
    lse, num_threads
        Accepted for the sake of the signature.
    dtype : str, optional
        ``"bfloat16"`` where arrays are uint16 bits.

    Returns
    -------
    numpy.ndarray
        int32, ascending, then -1: paper (B, Hkv, N, n), mslk (B, H, tiles, n); with `cu_seqlens` (Hkv, T, n) and (H, all tiles, n).
        Of equal scores the lower index is taken.

    Raises
    ------
    ValueError
        An unknown mode or a size out of range.

    Examples
    --------
    >>> import numpy as np
    >>> from blitz_attn import reference
    >>> q = np.ones((1, 4, 1, 1)); k_cmp = np.array([1.0, 3.0]).reshape(1, 2, 1, 1)
    >>> reference.score_and_select_blocks(q, k_cmp, 1, 2, q_tile_size=2, mode="mslk")[0, 0].tolist()
    [[0], [1]]
    """
    scores = score_blocks(
        q, k_cmp, num_selected_blocks, compress_block_size, causal=causal, q_tile_size=q_tile_size, scale=scale, cu_seqlens=cu_seqlens,
        mode=mode, compress_stride=compress_stride, select_block_size=select_block_size, init_blocks=init_blocks,
        local_blocks=local_blocks, dtype=dtype,
    )  # fmt: skip
    parts = [top_blocks(x, int(num_selected_blocks)) for x in scores]
    heads = k_cmp.shape[-2] if mode == "paper" else q.shape[-2]
    if cu_seqlens is not None:
        return np.concatenate([np.zeros((heads, 0, num_selected_blocks), np.int32), *parts], axis=1)
    rows = -(-q.shape[1] // (1 if mode == "paper" else int(q_tile_size)))
    return np.stack(parts) if parts else np.zeros((0, heads, rows, num_selected_blocks), np.int32)


# ---- The branches ---------------------------------------------------------------------------------------------------


def _forward(q, k, v, key_cuts, cu_seqlens, scale, strips, return_lse, dtype):
    """A branch over all sequences: `strips(sequence, queries, heads, keys, KV heads)` tells its rule."""
    q, k, v = (to_float64(x, dtype) for x in (q, k, v))
    offsets = None if cu_seqlens is None else cuts(cu_seqlens, q.shape[0])
    inner = None if offsets is None else key_cuts(offsets)
    scale, r = default_scale(scale, q), rounding_of("float64")
    outs, lses = [], []
    for n, (qs, ks, vs) in enumerate(zip(split(q, offsets), split(k, inner), split(v, inner), strict=True)):
        out, lse = attend(qs, ks, vs, strips(n, qs.shape[1], qs.shape[0], ks.shape[1], ks.shape[0]), scale, r)
        outs.append(out)
        lses.append(lse[..., None])
    out = join(outs, offsets is not None, (*q.shape[:-1], v.shape[-1]))
    return (out, join(lses, offsets is not None, (*q.shape[:-1], 1))[..., 0]) if return_lse else out


def _backward(dout, q, k, v, out, lse, key_cuts, cu_seqlens, scale, strips, dtype):
    """The gradients of `_forward`."""
    dout, q, k, v, out = (to_float64(x, dtype) for x in (dout, q, k, v, out))
    lse = np.asarray(lse, np.float64)[..., None]
    offsets = None if cu_seqlens is None else cuts(cu_seqlens, q.shape[0])
    inner = None if offsets is None else key_cuts(offsets)
    scale, r = default_scale(scale, q), rounding_of("float64")
    parts = []
    sequences = zip(
        *(split(x, offsets) for x in (dout, q)), *(split(x, inner) for x in (k, v)), *(split(x, offsets) for x in (out, lse)), strict=True
    )
    for n, (ds, qs, ks, vs, os, ls) in enumerate(sequences):
        rule = strips(n, qs.shape[1], qs.shape[0], ks.shape[1], ks.shape[0])
        parts.append(attend_backward(ds, qs, ks, vs, os, ls[..., 0], rule, scale, r))
    return tuple(join([one[n] for one in parts], offsets is not None, like.shape) for n, like in enumerate((q, k, v)))


def _compressed_rule(block_size, stride, causal, mode):
    size, step = check_block_sizes(block_size, stride)
    if mode not in ("paper", "mslk"):
        raise ValueError(f'mode: expected "paper" or "mslk", got {mode!r}')
    return (
        lambda offsets: compressed_cuts(offsets, size, step),
        lambda n, rows, heads, blocks, kv_heads: compressed_strips(rows, heads, blocks, size, step, mode, causal),
    )


def compressed_attention(
    q, k_cmp, v_cmp, compress_block_size, *, stride=None, causal=True, scale=None, cu_seqlens=None, mode="paper", return_lse=False,
    dtype=None,
):  # fmt: skip
    """float64 twin of `blitz_attn.nsa.compressed_attention`: queries over compressed keys and values.

    Parameters
    ----------
    q : array_like
        (B, N, H, D), or (T, H, D) with `cu_seqlens`.
    k_cmp, v_cmp : array_like
        Of `compress_kv`.
    compress_block_size, stride : int
        With which they were made.
    causal : bool
        A query sees blocks that are complete at it (paper) or begin at or before it (mslk). False: all.
    scale : float, optional
        Default: 1 / sqrt(D).
    cu_seqlens : sequence of int, optional
        Offsets of the sequences' tokens.
    mode : {"paper", "mslk"}
        Which causal rule.
    return_lse : bool
        Return the log-sum-exp too.
    dtype : str, optional
        ``"bfloat16"`` where arrays are uint16 bits.

    Returns
    -------
    out : numpy.ndarray
        Like q with the last dimension of v_cmp; 0 for queries that see no block.
    lse : numpy.ndarray
        With `return_lse`: (B, N, H) or (T, H); -inf for such queries.

    Raises
    ------
    ValueError
        An unknown mode, a size below 1, lengths that do not rise from 0 to T.

    Examples
    --------
    >>> import numpy as np
    >>> from blitz_attn import reference
    >>> q = np.zeros((1, 4, 1, 1)); kv = np.array([2.0, 4.0]).reshape(1, 2, 1, 1)
    >>> [reference.compressed_attention(q, kv, kv, 2, mode=mode).ravel().tolist() for mode in ("paper", "mslk")]
    [[0.0, 2.0, 2.0, 3.0], [2.0, 2.0, 3.0, 3.0]]
    """
    key_cuts, strips = _compressed_rule(compress_block_size, stride, causal, mode)
    return _forward(q, k_cmp, v_cmp, key_cuts, cu_seqlens, scale, strips, return_lse, dtype)


def compressed_attention_backward(
    dout, q, k_cmp, v_cmp, out, lse, compress_block_size, *, stride=None, causal=True, scale=None, cu_seqlens=None, mode="paper", dtype=None
):
    """float64 twin of `blitz_attn.nsa.compressed_attention_backward`.

    Parameters
    ----------
    dout : array_like
        Gradient of `out`.
    q, k_cmp, v_cmp, compress_block_size, stride, causal, scale, cu_seqlens, mode, dtype
        Arguments of `compressed_attention`.
    out, lse : array_like
        Its results.

    Returns
    -------
    dq, dk_cmp, dv_cmp : numpy.ndarray

    Raises
    ------
    ValueError
        As `compressed_attention`.

    Examples
    --------
    >>> import numpy as np
    >>> from blitz_attn import reference
    >>> q = np.zeros((1, 4, 1, 1)); kv = np.array([2.0, 4.0]).reshape(1, 2, 1, 1)
    >>> out, lse = reference.compressed_attention(q, kv, kv, 2, return_lse=True)
    >>> reference.compressed_attention_backward(np.ones_like(out), q, kv, kv, out, lse, 2)[2].ravel().tolist()
    [2.5, 0.5]
    """
    key_cuts, strips = _compressed_rule(compress_block_size, stride, causal, mode)
    return _backward(dout, q, k_cmp, v_cmp, out, lse, key_cuts, cu_seqlens, scale, strips, dtype)


def _selected_rule(block_indices, block_size, causal, q_tile_size, cu_seqlens):
    size, _ = check_block_sizes(block_size, None)
    parts = routing_parts(block_indices, cu_seqlens, q_tile_size)
    return lambda n, rows, heads, keys, kv_heads: selected_strips(parts[n], rows, heads, kv_heads, size, causal, q_tile_size)


def selected_attention(
    q, k, v, block_indices, block_size, *, q_tile_size=1, causal=True, scale=None, cu_seqlens=None, return_lse=False, dtype=None
):
    """float64 twin of `blitz_attn.nsa.selected_attention`: queries over the tokens of the blocks listed for them.

    Parameters
    ----------
    q, k, v : array_like
        (B, N, H, D), (B, N, Hkv, D), (B, N, Hkv, Dv); packed with `cu_seqlens`.
    block_indices : array_like of int
        (B, H or Hkv, tiles, n), or (H or Hkv, all tiles, n) with `cu_seqlens`; -1 pads.
    block_size : int
        Tokens a block.
    q_tile_size : int
        Queries that share a row of indices: 1 in paper mode.
    causal : bool
        No token after the query.
    scale, cu_seqlens, return_lse, dtype
        See `compressed_attention`.

    Returns
    -------
    out : numpy.ndarray
        Like q with the last dimension of v; 0 for queries that see no token.
    lse : numpy.ndarray
        With `return_lse`: (B, N, H) or (T, H); -inf for such queries.

    Raises
    ------
    ValueError
        A size below 1, lengths that do not rise from 0 to T.

    Examples
    --------
    >>> import numpy as np
    >>> from blitz_attn import reference
    >>> q = np.zeros((1, 4, 1, 1)); v = np.arange(4.0).reshape(1, 4, 1, 1)
    >>> listed = np.array([[[[0, -1], [0, -1], [1, -1], [0, 1]]]])
    >>> reference.selected_attention(q, q, v, listed, 2).ravel().tolist()
    [0.0, 0.5, 2.0, 1.5]
    """
    strips = _selected_rule(block_indices, block_size, causal, q_tile_size, cu_seqlens)
    return _forward(q, k, v, list, cu_seqlens, scale, strips, return_lse, dtype)


def selected_attention_backward(
    dout, q, k, v, out, lse, block_indices, block_size, *, q_tile_size=1, causal=True, scale=None, cu_seqlens=None, dtype=None
):
    """float64 twin of `blitz_attn.nsa.selected_attention_backward`.

    Parameters
    ----------
    dout : array_like
        Gradient of `out`.
    q, k, v, block_indices, block_size, q_tile_size, causal, scale, cu_seqlens, dtype
        Arguments of `selected_attention`.
    out, lse : array_like
        Its results.

    Returns
    -------
    dq, dk, dv : numpy.ndarray

    Raises
    ------
    ValueError
        As `selected_attention`.

    Examples
    --------
    >>> import numpy as np
    >>> from blitz_attn import reference
    >>> q = np.zeros((1, 4, 1, 1)); v = np.arange(4.0).reshape(1, 4, 1, 1)
    >>> listed = np.array([[[[0], [0], [1], [0]]]])
    >>> out, lse = reference.selected_attention(q, q, v, listed, 2, return_lse=True)
    >>> reference.selected_attention_backward(np.ones_like(out), q, q, v, out, lse, listed, 2)[2].ravel().tolist()
    [2.0, 1.0, 1.0, 0.0]
    """
    strips = _selected_rule(block_indices, block_size, causal, q_tile_size, cu_seqlens)
    return _backward(dout, q, k, v, out, lse, list, cu_seqlens, scale, strips, dtype)


def _window_rule(window_size, causal):
    window = at_least(1, "window_size", window_size)
    return lambda n, rows, heads, keys, kv_heads: window_strips(rows, heads, window, causal)


def window_attention(q, k, v, window_size, *, causal=True, scale=None, cu_seqlens=None, return_lse=False, dtype=None):
    """float64 twin of `blitz_attn.nsa.window_attention`: queries over the tokens around them.

    Parameters
    ----------
    q, k, v : array_like
        (B, N, H, D), (B, N, Hkv, D), (B, N, Hkv, Dv); packed with `cu_seqlens`.
    window_size : int
        Keys that a query sees, itself the last of them.
    causal : bool
        False: ``window_size // 2`` keys before and as many after it, and itself.
    scale, cu_seqlens, return_lse, dtype
        See `compressed_attention`.

    Returns
    -------
    out : numpy.ndarray
        Like q with the last dimension of v.
    lse : numpy.ndarray
        With `return_lse`: (B, N, H) or (T, H).

    Raises
    ------
    ValueError
        A size below 1, lengths that do not rise from 0 to T.

    Examples
    --------
    >>> import numpy as np
    >>> from blitz_attn import reference
    >>> q = np.zeros((1, 4, 1, 1)); v = np.arange(4.0).reshape(1, 4, 1, 1)
    >>> [reference.window_attention(q, q, v, 2, causal=causal).ravel().tolist() for causal in (True, False)]
    [[0.0, 0.5, 1.5, 2.5], [0.5, 1.0, 2.0, 2.5]]
    """
    return _forward(q, k, v, list, cu_seqlens, scale, _window_rule(window_size, causal), return_lse, dtype)


def window_attention_backward(dout, q, k, v, out, lse, window_size, *, causal=True, scale=None, cu_seqlens=None, dtype=None):
    """float64 twin of `blitz_attn.nsa.window_attention_backward`.

    Parameters
    ----------
    dout : array_like
        Gradient of `out`.
    q, k, v, window_size, causal, scale, cu_seqlens, dtype
        Arguments of `window_attention`.
    out, lse : array_like
        Its results.

    Returns
    -------
    dq, dk, dv : numpy.ndarray

    Raises
    ------
    ValueError
        As `window_attention`.

    Examples
    --------
    >>> import numpy as np
    >>> from blitz_attn import reference
    >>> q = np.zeros((1, 4, 1, 1)); v = np.arange(4.0).reshape(1, 4, 1, 1)
    >>> out, lse = reference.window_attention(q, q, v, 2, return_lse=True)
    >>> reference.window_attention_backward(np.ones_like(out), q, q, v, out, lse, 2)[2].ravel().tolist()
    [1.5, 1.0, 1.0, 0.5]
    """
    return _backward(dout, q, k, v, out, lse, list, cu_seqlens, scale, _window_rule(window_size, causal), dtype)


# ---- Gates ----------------------------------------------------------------------------------------------------------


def compute_gates(q, gate_proj_weight=None, *, dtype=None):
    """float64 twin of `blitz_attn.nsa.compute_gates`: three gates a query head, never normalised.

    Parameters
    ----------
    q : array_like
        (..., H, D).
    gate_proj_weight : array_like, optional
        (H, 3, D). Default: every gate is 1/3.
    dtype : str, optional
        ``"bfloat16"`` where arrays are uint16 bits.

    Returns
    -------
    numpy.ndarray
        (..., H, 3): of the compressed, the selected and the window branch.

    Raises
    ------
    ValueError
        Weights of the wrong shape.

    Examples
    --------
    >>> import numpy as np
    >>> from blitz_attn import reference
    >>> reference.compute_gates(np.ones((1, 1, 2)), np.array([[[0.0, 0], [50, 50], [-50, -50]]])).round(6).tolist()
    [[[0.5, 1.0, 0.0]]]
    """
    q = to_float64(q, dtype)
    if gate_proj_weight is not None and tuple(gate_proj_weight.shape) != (q.shape[-2], 3, q.shape[-1]):
        expected = (q.shape[-2], 3, q.shape[-1])
        raise ValueError(f"gate_proj_weight: expected shape (H, 3, D) = {expected}, got {tuple(gate_proj_weight.shape)}")
    return sigmoid_gates(q, None if gate_proj_weight is None else to_float64(gate_proj_weight, dtype), rounding_of("float64"))


def gate_and_combine(o_cmp, o_slc, o_win, gates, *, dtype=None):
    """float64 twin of `blitz_attn.nsa.gate_and_combine`: the sum of the branches, each times its gate.

    Parameters
    ----------
    o_cmp, o_slc, o_win : array_like
        (..., H, Dv).
    gates : array_like
        (..., H, 3).
    dtype : str, optional
        ``"bfloat16"`` where arrays are uint16 bits.

    Returns
    -------
    numpy.ndarray
        (..., H, Dv).

    Examples
    --------
    >>> import numpy as np
    >>> from blitz_attn import reference
    >>> one = np.ones((1, 1, 2))
    >>> reference.gate_and_combine(one, 2 * one, 4 * one, np.array([[[0.5, 0.25, 1.0]]])).tolist()
    [[[5.0, 5.0]]]
    """
    return combine([to_float64(x, dtype) for x in (o_cmp, o_slc, o_win)], to_float64(gates, dtype), rounding_of("float64"))


def gating_backward(q, dout, o_cmp, o_slc, o_win, gates, gate_proj_weight=None, *, dtype=None):
    """float64 twin of `blitz_attn.nsa.gating_backward`: gradients of `gate_and_combine` over `compute_gates`.

    Parameters
    ----------
    q : array_like
        (..., H, D), from which the gates came.
    dout : array_like
        Gradient of the result, (..., H, Dv).
    o_cmp, o_slc, o_win, gates : array_like
        Arguments of `gate_and_combine`.
    gate_proj_weight : array_like, optional
        Argument of `compute_gates`.
    dtype : str, optional
        ``"bfloat16"`` where arrays are uint16 bits.

    Returns
    -------
    do_cmp, do_slc, do_win : numpy.ndarray
        Gradients of the branches.
    dq, dgate_proj_weight : numpy.ndarray or None
        Through the gates; None without weights.

    Examples
    --------
    >>> import numpy as np
    >>> from blitz_attn import reference
    >>> x = np.ones((1, 1, 2))
    >>> w = np.zeros((1, 3, 2))
    >>> results = reference.gating_backward(x, x, x, x, x, reference.compute_gates(x, w), w)
    >>> results[0].tolist(), results[4].tolist()
    ([[[0.5, 0.5]]], [[[0.5, 0.5], [0.5, 0.5], [0.5, 0.5]]])
    """
    q, dout, *rest = (to_float64(x, dtype) for x in (q, dout, o_cmp, o_slc, o_win, gates))
    weight = None if gate_proj_weight is None else to_float64(gate_proj_weight, dtype)
    dbranches, _, dq, dweight = gates_backward(q, dout, rest[:3], rest[3], weight, rounding_of("float64"))
    return (*dbranches, dq, dweight)
