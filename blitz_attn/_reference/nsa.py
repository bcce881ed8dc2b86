"""float64 twins of native sparse attention, forward and backward, and the same computation in lower precision, as a plain array program
does it. Public through `blitz_attn.reference`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np

from .._nsa.call import BRANCHES, Options, checked
from .._nsa.rules import Rules
from . import nsa_core as core
from .attend import Array, ScoreRules, Sequence, attend, attend_backward
from .common import name_of, real_of, rounding_of, to_float64, written
from .dense import join, split

__all__ = ["NSAContext", "NSAGradients", "nsa", "nsa_backward", "nsa_same_precision"]

WEIGHTS = ("w_k_compress", "w_v_compress", "gate_proj_weight")


class NSAGradients(NamedTuple):
    """Gradients of the arrays that `nsa` was given; None for an array that it was not given."""

    dq: Any
    dk: Any
    dv: Any
    dw_k_compress: Any
    dw_v_compress: Any
    dgate_proj_weight: Any
    dgates: Any


class Kept(NamedTuple):
    """The arrays of one sequence that its gradient needs. Lists have an entry per branch; arrays are (heads, queries, ...)."""

    branches: list[Sequence]
    out: list[Array]
    lse: list[Array]
    gates: Array


@dataclass
class NSAContext:
    """The rules and arrays that `nsa` keeps for `nsa_backward`."""

    how: Rules
    scale: float | None
    places: core.Places
    weights: dict[str, Array | None]
    given_gates: bool
    name: str  # the precision that was imitated
    dtype: Any  # the dtype whose bits uint16 arrays hold
    shapes: list[tuple[int, ...]]  # of q, k, v
    shape: tuple[int, ...]  # of the result
    sequences: list[Kept]
    block_indices: Array
    gates: Array
    lse: dict[str, Array]  # by branch, (B, N, H) or (T, H)


def _run(q: Any, k: Any, v: Any, name: str, o: dict[str, Any]) -> tuple[Array, NSAContext]:
    """Forward in the precision `name`; the selection is always computed in float64."""
    call = checked(q, k, v, Options(**{f.name: o.get(f.name) for f in fields(Options)}))
    how, dtype, r = call.rules, o["dtype"], rounding_of(name)

    def read(x: Any) -> Array:
        return to_float64(x, dtype).astype(real_of(name))

    q, k, v = read(q), read(k), read(v)
    places = core.read_places(q, o["cu_seqlens"], o["cu_seqlens_q"], k.shape[-3], o["kv_lens"])
    given = {label: None if o[label] is None else read(o[label]) for label in WEIGHTS}
    gates = core.sigmoid_gates(q, given["gate_proj_weight"], r) if o["gates"] is None else read(o["gates"])
    every = [
        split(x, places.layout, cu) for x, cu in ((q, places.queries), (k, places.tokens), (v, places.tokens), (gates, places.queries))
    ]
    known: list[Any] = [[None] * len(places.of)] * 2
    if o["compressed_kv"] is not None:
        inner = None if places.tokens is None else core.compressed_cuts(places.tokens, how.size, how.stride)
        known = [split(read(x), places.layout, inner) for x in o["compressed_kv"]]
    routing: list[Any] = [None] * len(places.of)
    if o["block_indices"] is not None:
        routing = core.routing_parts(o["block_indices"], places.queries, how.tile)
    sequences, outs, listed = [], [], []
    for (begin, tokens), q_one, k_one, v_one, gates_one, *own, lists in zip(places.of, *every, *known, routing, strict=True):
        k_one, v_one, groups = k_one[:, :tokens], v_one[:, :tokens], None  # with kv_lens, fewer tokens than the array has
        k_cmp, v_cmp = (
            core.compress(x, how.size, how.stride, given[label], r) if c is None else c[:, : core.block_count(tokens, how.size, how.stride)]
            for x, label, c in zip((k_one, v_one), WEIGHTS, own, strict=False)
        )
        if lists is None or call.most_groups is not None:
            scores = core.sequence_scores(q_one.astype(np.float64), k_cmp.astype(np.float64), how, o["scale"], begin, tokens)
            groups = None if call.most_groups is None else core.cmp_groups(scores, call.most_groups)
            lists = core.top_blocks(scores, how.count) if lists is None else lists
        branches = [
            core.compressed_branch(q_one, k_cmp, v_cmp, begin, how.size, how.stride, how.mode, how.causal, groups, how.tile),
            core.selected_branch(q_one, k_one, v_one, begin, lists, how.select, how.tile, how.causal),
            core.window_branch(q_one, k_one, v_one, begin, call.window, how.causal),
        ]
        out, lse = (list(x) for x in zip(*(attend(s, ScoreRules(o["scale"]), r) for s in branches), strict=True))
        outs.append(core.combine(out, gates_one, r))
        sequences.append(Kept(branches, out, lse, gates_one))
        listed.append(lists)
    heads = (k if how.by_query else q).shape[-2]
    indices = core.join_routing(listed, places.tokens is not None, (*q.shape[:-3], heads, how.rows(q.shape[-3]), how.count))
    lses = {
        branch: join([one.lse[c][..., None] for one in sequences], places.layout, (*q.shape[:-1], 1))[..., 0]
        for c, branch in enumerate(BRANCHES)
    }
    shape = (*q.shape[:-1], v.shape[-1])
    context = NSAContext(
        how, o["scale"], places, given, o["gates"] is not None, name, dtype, [q.shape, k.shape, v.shape], shape, sequences,
        indices if o["block_indices"] is None else np.asarray(o["block_indices"]), gates, lses,
    )  # fmt: skip
    return join(outs, places.layout, shape), context


def nsa(
    q, k, v, *, compress_block_size=64, num_selected_blocks=16, window_size=512, w_k_compress=None, w_v_compress=None,
    gate_proj_weight=None, gates=None, causal=True, scale=None, q_tile_size=256, num_cmp_selected_blocks=None, mode="paper",
    compress_stride=None, select_block_size=None, init_blocks=1, local_blocks=2, block_indices=None, compressed_kv=None,
    cu_seqlens=None, cu_seqlens_q=None, kv_lens=None, out=None, return_context=False, dtype=None, num_threads=None,
):  # fmt: skip
    """See `blitz_attn.nsa.nsa`. The context is for the `nsa_backward` of this module, which takes the context of any call with as many
    queries as tokens."""
    result, context = _run(q, k, v, "float64", locals())
    result = written(result, out)
    return (result, context) if return_context else result


def nsa_same_precision(q, k, v, *, name=None, **options):
    """`nsa` and its context as a plain array program computes them in the precision of the inputs.

    For float32, every step is in float32. For float16 and bfloat16, sums are in float32, and every array that a framework
    would store is rounded to the dtype. Blocks are chosen in float64. `nsa_backward` computes in the precision that the context names.

    Parameters
    ----------
    q, k, v : array_like
        As `nsa` takes them.
    name : str, optional
        Precision to imitate. Default: that of q.
    **options
        Keyword arguments of `nsa`; `out` and `return_context` are ignored.

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
    return _run(q, k, v, name or name_of(q, options.get("dtype")), {**nsa.__kwdefaults__, **options})


def nsa_backward(dout, ctx, *, num_threads=None):
    """See `blitz_attn.nsa.nsa_backward`. Takes a context of `nsa` or `nsa_same_precision` of this module."""
    if not isinstance(ctx, NSAContext):
        raise TypeError(f"ctx: expected the context that nsa returned, got {type(ctx).__name__}")
    if ctx.shapes[0][:-2] != ctx.shapes[1][:-2]:
        raise ValueError(f"ctx: expected that of a call with as many queries as keys, got {ctx.shapes[0]} and {ctx.shapes[1]}")
    if tuple(dout.shape) != ctx.shape:
        raise ValueError(f"dout: expected shape {ctx.shape} of the result that came with ctx, got {tuple(dout.shape)}")
    real, r, how, places = real_of(ctx.name), rounding_of(ctx.name), ctx.how, ctx.places
    douts = split(to_float64(dout, ctx.dtype).astype(real), places.layout, places.queries)
    w_k, w_v, w_gate = (ctx.weights[label] for label in WEIGHTS)
    dqs, dks, dvs, dgates, dweights = [], [], [], [], [[], [], []]
    for dout_one, one in zip(douts, ctx.sequences, strict=True):
        window = one.branches[2]
        dbranches, dgate, dq_gate, dw_gate = core.gates_backward(window.q, dout_one, one.out, one.gates, w_gate, r)
        grads = [attend_backward(*given, ScoreRules(ctx.scale), r) for given in zip(one.branches, dbranches, one.out, one.lse, strict=True)]
        (dq_cmp, dk_cmp, dv_cmp), (dq_slc, dk_slc, dv_slc), (dq_win, dk_win, dv_win) = grads
        dk_back, dw_k = core.compress_backward(dk_cmp, window.k, how.size, how.stride, w_k, r)
        dv_back, dw_v = core.compress_backward(dv_cmp, window.v, how.size, how.stride, w_v, r)
        dq = r(dq_cmp + dq_slc + dq_win)
        dqs.append(dq if dq_gate is None else r(dq + dq_gate))
        dks.append(r(r(dk_slc + dk_win) + dk_back))
        dvs.append(r(r(dv_slc + dv_win) + dv_back))
        dgates.append(dgate)
        for parts, dw in zip(dweights, (dw_k, dw_v, dw_gate), strict=True):
            parts.append(dw)
    joined = [join(x, places.layout, shape) for x, shape in zip((dqs, dks, dvs), ctx.shapes, strict=True)]
    of_weights = [
        None if w is None else r(sum(parts, np.zeros(w.shape)).astype(real)).astype(np.float64)
        for w, parts in zip((w_k, w_v, w_gate), dweights, strict=True)
    ]
    return NSAGradients(*joined, *of_weights, join(dgates, places.layout, (*ctx.shape[:-1], 3)) if ctx.given_gates else None)
