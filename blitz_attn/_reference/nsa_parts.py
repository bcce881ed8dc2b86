"""float64 twins of the parts of native sparse attention: compression, selection, the three branches, gating, and the
gradients of all of these except the selection. Public through `blitz_attn.reference`; `nsa.py` has the twin of the whole.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from . import nsa_core as core
from .attend import ScoreRules, Sequence, attend, attend_backward
from .common import rounding_of, to_float64, with_options_of
from .dense import join, split

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

EXACT = rounding_of("float64")


# ---- Compression ----------------------------------------------------------------------------------------------------


def compress_kv(k, v, block_size, w_k=None, w_v=None, *, stride=None, cu_seqlens=None, dtype=None):
    """See `blitz_attn.nsa.compress_kv`."""
    (block_size, stride), results = core.sizes(block_size, stride), []
    for x, w in ((k, w_k), (v, w_v)):
        x, w = to_float64(x, dtype), None if w is None else to_float64(w, dtype)
        places = core.read_places(x, cu_seqlens)
        parts = [core.compress(one, block_size, stride, w, EXACT) for one in split(x, places.layout, places.tokens)]
        blocks = () if places.tokens else (core.block_count(x.shape[1], block_size, stride),)
        results.append(join(parts, places.layout, (0, *blocks, *x.shape[-2:])))
    return tuple(results)


def compress_kv_backward(dk_cmp, dv_cmp, k, v, block_size, w_k=None, w_v=None, *, stride=None, cu_seqlens=None, dtype=None):
    """See `blitz_attn.nsa.compress_kv_backward`."""
    (block_size, stride), grads, weight_grads = core.sizes(block_size, stride), [], []
    for dy, x, w in ((dk_cmp, k, w_k), (dv_cmp, v, w_v)):
        dy, x, w = to_float64(dy, dtype), to_float64(x, dtype), None if w is None else to_float64(w, dtype)
        places = core.read_places(x, cu_seqlens)
        inner = None if places.tokens is None else core.compressed_cuts(places.tokens, block_size, stride)
        pairs = zip(split(dy, places.layout, inner), split(x, places.layout, places.tokens), strict=True)
        parts = [core.compress_backward(*pair, block_size, stride, w, EXACT) for pair in pairs]
        grads.append(join([dx for dx, _ in parts], places.layout, x.shape))
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
        One float64 array per sequence: paper mode (Hkv, queries, blocks), mslk mode (H, tiles, blocks). ``-inf``: must not be selected;
        ``inf``: must be selected.

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
    rules = core.selector(
        mode, compress_block_size, num_selected_blocks, q_tile_size, compress_stride, select_block_size, init_blocks, local_blocks, causal
    )
    q, k_cmp = to_float64(q, dtype), to_float64(k_cmp, dtype)
    places = core.read_places(q, cu_seqlens, cu_seqlens_q, tokens)
    inner = None if places.tokens is None else core.compressed_cuts(places.tokens, rules.size, rules.stride)
    sequences = zip(split(q, places.layout, places.queries), split(k_cmp, places.layout, inner), places.of, strict=True)
    return [core.sequence_scores(q_one, k_one, rules, scale, *place) for q_one, k_one, place in sequences]


@with_options_of(score_blocks)
def score_and_select_blocks(q, k_cmp, num_selected_blocks, compress_block_size, *, lse=None, num_threads=None, **options):
    """See `blitz_attn.nsa.score_and_select_blocks`."""
    scores = score_blocks(q, k_cmp, num_selected_blocks, compress_block_size, **options)
    parts = [core.top_blocks(x, int(num_selected_blocks)) for x in scores]
    by_query = options["mode"] == "paper"
    heads, rows = (k_cmp if by_query else q).shape[-2], -(-q.shape[-3] // (1 if by_query else int(options["q_tile_size"])))
    return core.join_routing(parts, options["cu_seqlens"] is not None, (*q.shape[:-3], heads, rows, int(num_selected_blocks)))


# ---- The branches ---------------------------------------------------------------------------------------------------

Branch = Callable[..., Sequence]  # called with a sequence's number, q, k and v


def _forward(q, k, v, cu_q: Any, cu_k: Any, branch: Branch, o: dict[str, Any]) -> Any:
    """A branch over all sequences."""
    q, k, v = (to_float64(x, o["dtype"]) for x in (q, k, v))
    layout = "BSND" if cu_q is None else "TND"
    parts = zip(split(q, layout, cu_q), split(k, layout, cu_k), split(v, layout, cu_k), strict=True)
    results = [attend(branch(n, *part), ScoreRules(o["scale"]), EXACT) for n, part in enumerate(parts)]
    out = join([x for x, _ in results], layout, (*q.shape[:-1], v.shape[-1]))
    return (out, join([x[..., None] for _, x in results], layout, (*q.shape[:-1], 1))[..., 0]) if o["return_lse"] else out


def _backward(dout, q, k, v, out, lse, cu_q: Any, cu_k: Any, branch: Branch, o: dict[str, Any]) -> tuple[np.ndarray, ...]:
    """The gradients of `_forward`."""
    dout, q, k, v, out = (to_float64(x, o["dtype"]) for x in (dout, q, k, v, out))
    layout, lse = "BSND" if cu_q is None else "TND", np.asarray(lse, np.float64)[..., None]
    results = zip(*(split(x, layout, cu_q) for x in (dout, out, lse)), strict=True)
    parts = zip(split(q, layout, cu_q), split(k, layout, cu_k), split(v, layout, cu_k), results, strict=True)
    rules = ScoreRules(o["scale"])
    grads = [attend_backward(branch(n, *part), d, own, sums[..., 0], rules, EXACT) for n, (*part, (d, own, sums)) in enumerate(parts)]
    return tuple(join([one[n] for one in grads], layout, like.shape) for n, like in enumerate((q, k, v)))


def _compressed(q: Any, size: int, o: dict[str, Any]) -> tuple[Any, Any, Branch]:
    """Cumulative numbers of queries and of compressed keys, and the rule of the branch."""
    size, stride = core.sizes(size, o["stride"])
    places = core.read_places(q, o["cu_seqlens"], o.get("cu_seqlens_q"), o.get("tokens"))
    inner = None if places.tokens is None else core.compressed_cuts(places.tokens, size, stride)
    branch, how = core.compressed_branch, (size, stride, o["mode"], o["causal"])
    return places.queries, inner, lambda n, q, k, v: branch(q, k, v, places.of[n][0], *how)


def compressed_attention(
    q, k_cmp, v_cmp, compress_block_size, *, stride=None, causal=True, scale=None, cu_seqlens=None, mode="paper", tokens=None,
    cu_seqlens_q=None, return_lse=False, dtype=None,
):  # fmt: skip
    """See `blitz_attn.nsa.compressed_attention`."""
    return _forward(q, k_cmp, v_cmp, *_compressed(q, compress_block_size, locals()), locals())


def compressed_attention_backward(
    dout, q, k_cmp, v_cmp, out, lse, compress_block_size, *, stride=None, causal=True, scale=None, cu_seqlens=None, mode="paper", dtype=None
):
    """See `blitz_attn.nsa.compressed_attention_backward`."""
    return _backward(dout, q, k_cmp, v_cmp, out, lse, *_compressed(q, compress_block_size, locals()), locals())


def _selected(q: Any, k: Any, lists: Any, size: int, o: dict[str, Any]) -> tuple[Any, Any, Branch]:
    places, tile = core.read_places(q, o["cu_seqlens"], o.get("cu_seqlens_q"), np.shape(k)[-3]), o["q_tile_size"]
    parts = core.routing_parts(lists, places.queries, tile)
    branch = core.selected_branch
    return places.queries, places.tokens, lambda n, q, k, v: branch(q, k, v, places.of[n][0], parts[n], size, tile, o["causal"])


def selected_attention(
    q, k, v, block_indices, block_size, *, q_tile_size=1, causal=True, scale=None, cu_seqlens=None, cu_seqlens_q=None, return_lse=False,
    dtype=None,
):  # fmt: skip
    """See `blitz_attn.nsa.selected_attention`."""
    return _forward(q, k, v, *_selected(q, k, block_indices, block_size, locals()), locals())


def selected_attention_backward(
    dout, q, k, v, out, lse, block_indices, block_size, *, q_tile_size=1, causal=True, scale=None, cu_seqlens=None, dtype=None
):
    """See `blitz_attn.nsa.selected_attention_backward`."""
    return _backward(dout, q, k, v, out, lse, *_selected(q, k, block_indices, block_size, locals()), locals())


def _window(q: Any, k: Any, window: int, o: dict[str, Any]) -> tuple[Any, Any, Branch]:
    places = core.read_places(q, o["cu_seqlens"], o.get("cu_seqlens_q"), np.shape(k)[-3])
    return places.queries, places.tokens, lambda n, q, k, v: core.window_branch(q, k, v, places.of[n][0], window, o["causal"])


def window_attention(q, k, v, window_size, *, causal=True, scale=None, cu_seqlens=None, cu_seqlens_q=None, return_lse=False, dtype=None):
    """See `blitz_attn.nsa.window_attention`."""
    return _forward(q, k, v, *_window(q, k, window_size, locals()), locals())


def window_attention_backward(dout, q, k, v, out, lse, window_size, *, causal=True, scale=None, cu_seqlens=None, dtype=None):
    """See `blitz_attn.nsa.window_attention_backward`."""
    return _backward(dout, q, k, v, out, lse, *_window(q, k, window_size, locals()), locals())


# ---- Gates ----------------------------------------------------------------------------------------------------------


def compute_gates(q, gate_proj_weight=None, *, dtype=None):
    """See `blitz_attn.nsa.compute_gates`."""
    return core.sigmoid_gates(to_float64(q, dtype), None if gate_proj_weight is None else to_float64(gate_proj_weight, dtype), EXACT)


def gate_and_combine(o_cmp, o_slc, o_win, gates, *, dtype=None):
    """See `blitz_attn.nsa.gate_and_combine`."""
    return core.combine([to_float64(x, dtype) for x in (o_cmp, o_slc, o_win)], to_float64(gates, dtype), EXACT)


def gating_backward(q, dout, o_cmp, o_slc, o_win, gates, gate_proj_weight=None, *, dtype=None):
    """See `blitz_attn.nsa.gating_backward`."""
    q, dout, *branches, gates = (np.moveaxis(to_float64(x, dtype), -2, 0) for x in (q, dout, o_cmp, o_slc, o_win, gates))
    weight = None if gate_proj_weight is None else to_float64(gate_proj_weight, dtype)
    dbranches, _, dq, dweight = core.gates_backward(q, dout, branches, gates, weight, EXACT)
    return (*(None if x is None else np.moveaxis(x, 0, -2) for x in (*dbranches, dq)), dweight)
