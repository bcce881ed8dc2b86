"""float64 twins of native sparse attention, forward and backward, and the same as a plain array program computes it in lower
precision. Public through `blitz_attn.reference`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from .._arrays import dtype_name
from .._sentences import refusal
from . import nsa_core as core
from .dense import to_float64, written

__all__ = ["NSAContext", "NSAGradients", "nsa", "nsa_backward", "nsa_same_precision"]

Array = np.ndarray
BRANCHES = ("compressed", "selected", "window")


class NSAGradients(NamedTuple):
    """Gradients of the arrays that `nsa` was given; None for an array that it was not given."""

    dq: Any
    dk: Any
    dv: Any
    dw_k_compress: Any
    dw_v_compress: Any
    dgate_proj_weight: Any
    dgates: Any


@dataclass
class Kept:
    """What is kept of one sequence for its gradient. Arrays are (heads, tokens, dim); `out` and `lse` have one per branch."""

    q: Array
    k: Array
    v: Array
    k_cmp: Array
    v_cmp: Array
    routing: Array
    groups: Array | None
    place: core.Place
    gates: Array  # (tokens, H, 3)
    out: list[Array] = field(default_factory=list)
    lse: list[Array] = field(default_factory=list)


@dataclass
class NSAContext:
    """What `nsa` keeps for `nsa_backward`."""

    how: core.Selector
    window: int
    scale: float
    offsets: list[int] | None  # of the sequences, where they are packed
    weights: dict[str, Array | None]  # w_k_compress, w_v_compress, gate_proj_weight
    given_gates: bool
    name: str  # the precision that was imitated
    dtype: Any  # the dtype whose bits uint16 arrays hold
    shapes: list[tuple[int, ...]]  # of q, k, v
    shape: tuple[int, ...]  # of the result
    sequences: list[Kept]
    block_indices: Array
    gates: Array
    lse: dict[str, Array]  # by branch, (B, N, H) or (T, H)


# ---- Checks ---------------------------------------------------------------------------------------------------------


def _check_arrays(q: Array, k: Array, v: Array, packed: bool) -> None:
    rank, shape = (3, "(T, H, D)") if packed else (4, "(B, N, H, D)")
    if q.ndim != rank:
        raise ValueError(f"q: expected shape {shape}, got {q.shape}")
    if k.ndim != rank or (not packed and len(k) != len(q)) or k.shape[-1] != q.shape[-1]:
        raise refusal(ValueError, "k", f": expected shape {shape} with Hkv heads, else like ", "q", f" {q.shape}, got {k.shape}")
    if not packed and k.shape[1] < q.shape[1]:
        raise refusal(
            ValueError, "k", f": expected at least the {q.shape[1]} tokens of ", "q", f" (layout (B, tokens, heads, D)), got {k.shape}"
        )
    if v.ndim != rank or v.shape[:-1] != k.shape[:-1]:
        raise refusal(ValueError, "v", ": expected the tokens and heads of ", "k", f" {k.shape}, got {v.shape}")
    if k.shape[-2] == 0 or q.shape[-2] % k.shape[-2]:
        raise ValueError(f"k: expected a number of heads that divides {q.shape[-2]}, got {k.shape[-2]}")


def _places(q: Array, k: Array, o: dict[str, Any], how: core.Selector) -> tuple[list[core.Place], list[int] | None, list[int] | None]:
    """Where the queries of each sequence stand, and the cumulative lengths of queries and of tokens where they are packed."""
    lens = o["kv_lens"]
    if o["cu_seqlens"] is not None:
        if lens is not None:
            raise ValueError("kv_lens: expected None beside cu_seqlens, got some")
        own = o["cu_seqlens_q"]
        if own is None and len(k) != len(q):
            raise refusal(ValueError, "k", f": expected the {len(q)} tokens of ", "q", " without ", "cu_seqlens_q", f", got {k.shape}")
        where, cu_q, cu = core.places(q, len(k), o["cu_seqlens"], own)
    else:
        where, cu_q, cu = core.places(q, k.shape[1], None, o["cu_seqlens_q"])
        if lens is not None:
            numbers = [int(n) for n in np.asarray(lens).reshape(-1)]
            if len(numbers) != len(q) or any(not q.shape[1] <= n <= k.shape[1] for n in numbers):
                raise ValueError(f"kv_lens: expected {len(q)} numbers from {q.shape[1]} to {k.shape[1]}, got {numbers}")
            where = [core.Place.of(q.shape[1], n) for n in numbers]
    for place in where:
        core.check_tile(place, how)
    return where, cu_q, cu


def _check_compressed(pair: Any, x: list[Array], where: list[core.Place], how: core.Selector, o: dict[str, Any]) -> None:
    """Checks keys and values that are given compressed. With kv_lens there may be more blocks than the sequences have."""
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        raise TypeError(f"compressed_kv: expected a pair (k_cmp, v_cmp), got {type(pair).__name__}")
    for name in ("w_k_compress", "w_v_compress"):
        if o[name] is not None:
            raise ValueError(f"{name}: expected None beside compressed_kv, got some")
    packed, longest = x[0].ndim == 3, [place.tokens for place in where]
    for name, given, like in zip(("k_cmp", "v_cmp"), pair, x, strict=True):
        shape = np.shape(given)
        if len(shape) != like.ndim or shape[-2:] != like.shape[-2:] or (not packed and len(given) != len(like)):
            raise refusal(ValueError, name, ": expected the heads and the last axis of ", name[0], f" {like.shape}, got {shape}")
        if o["kv_lens"] is None:
            core.check_compressed(given, longest or ([] if packed else [like.shape[1]]), packed, how.block_size, how.stride, name)
        elif shape[1] < core.block_count(max(longest, default=0), how.block_size, how.stride):
            core.check_compressed(given, longest, packed, how.block_size, how.stride, name)


def _check_gates(gates: Any, gate_proj_weight: Any, q: Array) -> None:
    heads, dim = q.shape[-2:]
    if gates is not None and gate_proj_weight is not None:
        raise ValueError("gates: expected None with gate_proj_weight, got both")
    if gates is not None and tuple(gates.shape) != (*q.shape[:-1], 3):
        raise ValueError(f"gates: expected shape {(*q.shape[:-1], 3)}, got {tuple(gates.shape)}")
    if gate_proj_weight is not None and tuple(gate_proj_weight.shape) != (heads, 3, dim):
        raise ValueError(f"gate_proj_weight: expected shape (H, 3, D) = {(heads, 3, dim)}, got {tuple(gate_proj_weight.shape)}")


def _check_routing(
    indices: Any, how: core.Selector, q: Array, kv_heads: int, offsets: list[int] | None, where: list[core.Place]
) -> list[Array]:
    """The rows of each sequence, checked: a row names only blocks that exist, and each at most once."""
    indices = np.asarray(indices)
    if indices.dtype.kind not in "iu":
        raise TypeError(f"block_indices: expected integers, got {indices.dtype}")
    lengths = [q.shape[1]] * q.shape[0] if offsets is None else [b - a for a, b in pairwise(offsets)]
    tiles = [-(-n // how.tile) for n in lengths]
    heads = (kv_heads,) if how.mode == "paper" else (q.shape[-2], kv_heads)
    leading = (q.shape[0],) if offsets is None else ()
    rows = (tiles or [-(-q.shape[1] // how.tile)])[0] if offsets is None else sum(tiles)
    shapes = [(*leading, h, rows) for h in heads]
    if indices.ndim != len(shapes[0]) + 1 or indices.shape[:-1] not in shapes:
        raise ValueError(f"block_indices: expected shape {' or '.join(map(str, shapes))} with n more, got {indices.shape}")
    parts = core.routing_parts(indices, offsets, how.tile)
    for part, place in zip(parts, where, strict=True):
        blocks = -(-place.tokens // how.select_block_size)
        if part.size and (part.min() < -1 or part.max() >= blocks):
            wrong = part[(part < -1) | (part >= blocks)][0]
            raise ValueError(f"block_indices: expected blocks from 0 to {blocks - 1} or -1, got {wrong}")
        ordered = np.sort(part, axis=-1)
        twice = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)
        if twice.any():
            raise ValueError(f"block_indices: expected every block once in a row, got {ordered[..., 1:][twice][0]} twice")
    return parts


# ---- One call ---------------------------------------------------------------------------------------------------------


def _branches(one: Kept, how: core.Selector, window: int) -> list[tuple[Array, Array, Any]]:
    """Keys, values and rule of the three branches of a sequence."""
    rows, heads, kv_heads = one.q.shape[1], one.q.shape[0], one.k.shape[0]
    groups = None if one.groups is None else core.grouped(one.groups, kv_heads)
    compressed = core.compressed_strips(
        rows, heads, one.k_cmp.shape[1], how.block_size, how.stride, how.mode, how.causal, groups, how.tile, one.place.begin
    )
    selected = core.selected_strips(one.routing, rows, heads, kv_heads, how.select_block_size, how.causal, how.tile, one.place)
    return [
        (one.k_cmp, one.v_cmp, compressed),
        (one.k, one.v, selected),
        (one.k, one.v, core.window_strips(rows, heads, window, how.causal, one.place)),
    ]


def _turned(x: Array) -> Array:
    return x.swapaxes(0, 1)


def _run(q, k, v, name: str, options: dict[str, Any]) -> tuple[Array, NSAContext]:
    """Forward in the precision `name`; the selection is always computed in float64."""
    o = options
    dtype = o["dtype"]
    how = core.selector(
        o["mode"], o["compress_block_size"], o["causal"], o["q_tile_size"], o["compress_stride"], o["select_block_size"], o["init_blocks"],
        o["local_blocks"], o["num_selected_blocks"],
    )  # fmt: skip
    window, most = core.at_least(1, "window_size", o["window_size"]), o["num_cmp_selected_blocks"]
    if most is not None and how.mode == "paper":
        raise ValueError(f'num_cmp_selected_blocks: expected None in mode "paper", got {most}')
    most = None if most is None else core.at_least(1, "num_cmp_selected_blocks", most)
    kind = np.float64 if name == "float64" else np.float32
    q, k, v = (to_float64(x, dtype).astype(kind) for x in (q, k, v))
    _check_arrays(q, k, v, o["cu_seqlens"] is not None)
    where, offsets, key_offsets = _places(q, k, o, how)
    kv_heads, given = k.shape[-2], o["compressed_kv"]
    if given is not None:
        _check_compressed(given, [k, v], where, how, o)
    for label, w, x in (("w_k_compress", o["w_k_compress"], k), ("w_v_compress", o["w_v_compress"], v)):
        core.check_weight(label, w, kv_heads, x.shape[-1])
    _check_gates(o["gates"], o["gate_proj_weight"], q)
    weights = {
        label: None if o[label] is None else to_float64(o[label], dtype).astype(kind)
        for label in ("w_k_compress", "w_v_compress", "gate_proj_weight")
    }
    scale = core.default_scale(o["scale"], q)
    r = core.rounding_of(name)
    if o["gates"] is None:
        gates = core.sigmoid_gates(q, weights["gate_proj_weight"], r)
    else:
        gates = to_float64(o["gates"], dtype).astype(kind)
    parts = [core.split(x, cuts) for x, cuts in ((q, offsets), (k, key_offsets), (v, key_offsets), (gates, offsets))]
    routing = None if o["block_indices"] is None else _check_routing(o["block_indices"], how, q, kv_heads, offsets, where)
    inner = None if key_offsets is None else core.compressed_cuts(key_offsets, how.block_size, how.stride)
    known = None if given is None else [core.split(to_float64(x, dtype).astype(kind), inner) for x in given]
    sequences, outs, listed = [], [], []
    for n, (qs, ks, vs, gs) in enumerate(zip(*parts, strict=True)):
        place = where[n]
        ks, vs = ks[:, : place.tokens], vs[:, : place.tokens]  # fewer with kv_lens
        if known is None:
            k_cmp = core.compress(ks, how.block_size, how.stride, weights["w_k_compress"], r)
            v_cmp = core.compress(vs, how.block_size, how.stride, weights["w_v_compress"], r)
        else:
            k_cmp, v_cmp = (x[n][:, : core.block_count(place.tokens, how.block_size, how.stride)] for x in known)
        rows, groups = (None if routing is None else routing[n]), None
        if rows is None or most is not None:
            scores = core.sequence_scores(qs.astype(np.float64), k_cmp.astype(np.float64), how, scale, place)
            groups = core.cmp_groups(scores, most)
            rows = core.top_blocks(scores, int(o["num_selected_blocks"])) if rows is None else rows
        one = Kept(qs, ks, vs, k_cmp, v_cmp, rows, groups, place, _turned(gs))
        for keys, values, strips in _branches(one, how, window):
            out, lse = core.attend(qs, keys, values, strips, scale, r)
            one.out.append(out)
            one.lse.append(lse)
        outs.append(_turned(core.combine([_turned(x) for x in one.out], one.gates, r)))
        sequences.append(one)
        listed.append(rows)
    packed = offsets is not None
    shape = (*q.shape[:-1], v.shape[-1])
    lses = {
        branch: core.join([one.lse[c][..., None] for one in sequences], packed, (*q.shape[:-1], 1))[..., 0]
        for c, branch in enumerate(BRANCHES)
    }
    heads = kv_heads if how.mode == "paper" else q.shape[-2]
    if o["block_indices"] is not None:
        indices = np.asarray(o["block_indices"])
    elif packed:
        indices = np.concatenate([np.zeros((heads, 0, int(o["num_selected_blocks"])), np.int32), *listed], axis=1)
    else:
        indices = np.stack(listed) if listed else np.zeros((0, heads, -(-q.shape[1] // how.tile), int(o["num_selected_blocks"])), np.int32)
    has_gates, shapes = o["gates"] is not None, [q.shape, k.shape, v.shape]
    context = NSAContext(how, window, scale, offsets, weights, has_gates, name, dtype, shapes, shape, sequences, indices, gates, lses)
    return core.join(outs, packed, shape), context


def nsa(
    q, k, v, *, compress_block_size=64, num_selected_blocks=16, window_size=512, w_k_compress=None, w_v_compress=None,
    gate_proj_weight=None, gates=None, causal=True, scale=None, q_tile_size=256, num_cmp_selected_blocks=None, mode="paper",
    compress_stride=None, select_block_size=None, init_blocks=1, local_blocks=2, block_indices=None, compressed_kv=None,
    cu_seqlens=None, cu_seqlens_q=None, kv_lens=None, out=None, return_context=False, dtype=None, num_threads=None,
):  # fmt: skip
    """See `blitz_attn.nsa.nsa`. The context is of the twin's own kind, for the twin's `nsa_backward`, which takes that of any call whose
    queries are all tokens."""
    options = dict(locals())
    result, context = _run(q, k, v, "float64", options)
    result = written(result, out)
    return (result, context) if return_context else result


def nsa_same_precision(q, k, v, *, name=None, **options):
    """`nsa` and its context as a plain array program computes them in the precision of the inputs.

    float32: every step in float32. float16 and bfloat16: sums in float32, every array that a framework would store rounded
    to the dtype. Blocks are chosen in float64. `nsa_backward` goes on in the same precision from the context.

    Parameters
    ----------
    q, k, v : array_like
        As `nsa` takes them.
    name : str, optional
        Precision to imitate. Default: that of q.
    **options
        Keyword arguments of `nsa`; `out` and `return_context` are not looked at.

    Returns
    -------
    out : numpy.ndarray
        float64 values.
    context : NSAContext
        For `nsa_backward`.

    Raises
    ------
    TypeError, ValueError
        As `nsa`.

    Examples
    --------
    >>> import numpy as np
    >>> from blitz_attn import reference
    >>> x = np.random.default_rng(0).standard_normal((1, 9, 1, 4)).astype(np.float16)
    >>> rough, context = reference.nsa_same_precision(x, x, x, compress_block_size=2)
    >>> bool(0 < abs(rough - reference.nsa(x, x, x, compress_block_size=2)).max() < 1e-2)
    True
    """
    name = name or dtype_name(options.get("dtype")) or dtype_name(q.dtype)
    out, context = _run(q, k, v, name, {**nsa.__kwdefaults__, **options})
    return out.astype(np.float64), context


def nsa_backward(dout, ctx, *, num_threads=None):
    """See `blitz_attn.nsa.nsa_backward`. Takes a context of the twin's own `nsa`."""
    if not isinstance(ctx, NSAContext):
        raise TypeError(f"ctx: expected the context that nsa returned, got {type(ctx).__name__}")
    if ctx.shapes[0][:-2] != ctx.shapes[1][:-2]:
        raise ValueError(f"ctx: expected that of a call with as many queries as keys, got {ctx.shapes[0]} and {ctx.shapes[1]}")
    if tuple(dout.shape) != ctx.shape:
        raise ValueError(f"dout: expected shape {ctx.shape} of the result that came with ctx, got {tuple(dout.shape)}")
    kind = np.float64 if ctx.name == "float64" else np.float32
    r = core.rounding_of(ctx.name)
    douts = core.split(to_float64(dout, ctx.dtype).astype(kind), ctx.offsets)
    w_k, w_v, w_gate = (ctx.weights[name] for name in ("w_k_compress", "w_v_compress", "gate_proj_weight"))
    sums = {name: None if w is None else np.zeros(w.shape) for name, w in ctx.weights.items()}
    dqs, dks, dvs, dgates = [], [], [], []
    for dout_one, one in zip(douts, ctx.sequences, strict=True):
        turned = [_turned(x) for x in one.out]
        dbranches, dgate, dq_gate, dw_gate = core.gates_backward(_turned(one.q), _turned(dout_one), turned, one.gates, w_gate, r)
        grads = []
        for c, (keys, values, strips) in enumerate(_branches(one, ctx.how, ctx.window)):
            arrays = (_turned(dbranches[c]), one.q, keys, values, one.out[c], one.lse[c])
            grads.append(core.attend_backward(*arrays, strips, ctx.scale, r))
        (dq_cmp, dk_cmp, dv_cmp), (dq_slc, dk_slc, dv_slc), (dq_win, dk_win, dv_win) = grads
        how = ctx.how
        dk_back, dw_k = core.compress_backward(dk_cmp, one.k, how.block_size, how.stride, w_k, r)
        dv_back, dw_v = core.compress_backward(dv_cmp, one.v, how.block_size, how.stride, w_v, r)
        dq = r(dq_cmp + dq_slc + dq_win)
        dqs.append(dq if dq_gate is None else r(dq + _turned(dq_gate)))
        dks.append(r(r(dk_slc + dk_win) + dk_back))
        dvs.append(r(r(dv_slc + dv_win) + dv_back))
        dgates.append(_turned(dgate))
        for name, dw in (("w_k_compress", dw_k), ("w_v_compress", dw_v), ("gate_proj_weight", dw_gate)):
            if dw is not None:
                sums[name] += dw
    packed = ctx.offsets is not None
    joined = [core.join(x, packed, shape).astype(np.float64) for x, shape in zip((dqs, dks, dvs), ctx.shapes, strict=True)]
    weight_grads = [sums[name] for name in ("w_k_compress", "w_v_compress", "gate_proj_weight")]
    weight_grads = [None if w is None else r(w.astype(kind)).astype(np.float64) for w in weight_grads]
    given = core.join(dgates, packed, (*ctx.shape[:-1], 3)).astype(np.float64) if ctx.given_gates else None
    return NSAGradients(*joined, *weight_grads, given)
