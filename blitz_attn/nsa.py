"""Native sparse attention: three branches over compressed, selected and nearby keys, gated together, forward and backward.

`nsa` is the whole; every part of it is here by itself too, each with its gradient. Arrays are ``(B, N, H, D)``, or packed
``(T, H, D)`` with ``cu_seqlens``.

>>> import numpy as np
>>> from blitz_attn import nsa
>>> q, k, v = (np.ones((1, 256, heads, 64), np.float32) for heads in (4, 2, 2))
>>> nsa.nsa(q, k, v).shape
(1, 256, 4, 64)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from . import _arrays, _core
from ._nsa.arrays import (
    BRANCHES,
    CMP_GROUP,
    COMPRESSED_NAMES,
    PIECE_ELEMENTS,
    SELECTED_NAMES,
    Piece,
    Result,
    Rules,
    Sequences,
    attend,
    attend_backward,
    cuts,
    dtype_of,
    expect_shape,
    floats,
    lists_of,
    number,
    pieces,
    real_of,
    rules_of,
    same_kind,
    scale_of,
    storage,
    sums_of,
    threads_of,
    window_of,
)
from ._nsa.branches import (
    compressed_attention,
    compressed_attention_backward,
    selected_attention,
    selected_attention_backward,
    window_attention,
    window_attention_backward,
)
from ._nsa.gates import compute_gates, gate_and_combine, gates_as_reals, gating_backward, weight_of
from ._nsa.parts import (
    check_weight,
    compress_gradients,
    compress_into,
    compress_kv,
    compress_kv_backward,
    compressed_shape,
    list_shape,
    rounded,
    score_and_select_blocks,
    select_into,
)

__all__ = [
    "NSAContext",
    "NSAGradients",
    "compress_kv",
    "compress_kv_backward",
    "compressed_attention",
    "compressed_attention_backward",
    "compute_gates",
    "gate_and_combine",
    "gating_backward",
    "nsa",
    "nsa_backward",
    "score_and_select_blocks",
    "selected_attention",
    "selected_attention_backward",
    "window_attention",
    "window_attention_backward",
]


class Call(NamedTuple):
    """A checked call: views of its arrays, its rules, and what is derived from the arrays once."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    kind: str
    rules: Rules
    window: int
    scale: float
    sequences: Sequences
    w_k: np.ndarray | None  # weights are of the dtype of sums
    w_v: np.ndarray | None
    w_gate: np.ndarray | None
    gates: np.ndarray | None  # given ones
    kinds: tuple[str, str, str, str]  # dtypes of the weights and of given gates
    most_groups: int | None  # num_cmp_selected_blocks
    lists: np.ndarray | None  # a given selection
    k_cmp: np.ndarray
    v_cmp: np.ndarray
    threads: int | None

    @property
    def packed(self) -> bool:
        return self.sequences.tokens is not None


class NSAGradients(NamedTuple):
    """Gradients of the arrays that `nsa` was given, each of its array's shape and dtype; None for one that it was not given."""

    dq: Any
    dk: Any
    dv: Any
    dw_k_compress: Any
    dw_v_compress: Any
    dgate_proj_weight: Any
    dgates: Any


@dataclass(frozen=True, eq=False)
class NSAContext:
    """What `nsa` leaves for `nsa_backward`. It holds the call's arrays themselves: they must not change in between.

    Attributes
    ----------
    block_indices : numpy.ndarray
        The selection, see `score_and_select_blocks`.
    gates : numpy.ndarray
        ``(B, N, H, 3)`` or ``(T, H, 3)``, float32 (float64 for float64).
    lse : dict
        Log-sum-exp by branch (``"compressed"``, ``"selected"``, ``"window"``): ``(B, N, H)`` or ``(T, H)``.
    shape : tuple of int
        Of the result.
    """

    block_indices: np.ndarray
    gates: np.ndarray
    lse: dict[str, np.ndarray]
    shape: tuple[int, ...]
    call: Call
    branches: list[np.ndarray]
    groups: np.ndarray | None
    like: tuple[Any, ...]  # what the gradients are to be like: q, k, v, the weights, the gates


# ---- Forward ------------------------------------------------------------------------------------------------------


def _check(given: dict[str, Any]) -> Call:
    """Everything that is checked before any output is touched."""
    rules = rules_of(
        given["mode"], given["compress_block_size"], given["num_selected_blocks"], given["q_tile_size"], given["compress_stride"],
        given["select_block_size"], given["init_blocks"], given["local_blocks"], given["causal"],
    )  # fmt: skip
    window = number(given["window_size"], "window_size")
    most_groups = given["num_cmp_selected_blocks"]
    if most_groups is not None:
        most_groups = number(most_groups, "num_cmp_selected_blocks")
        if rules.by_query:
            raise ValueError(f'num_cmp_selected_blocks: expected None in mode "paper", got {most_groups}')
    threads = threads_of(given["num_threads"])
    dtype = dtype_of(given["dtype"])
    q, kind = floats(given["q"], "q", dtype)
    k, v = (same_kind(given[name], name, dtype, kind, "q") for name in ("k", "v"))
    if dtype is not None and kind != dtype:
        raise TypeError(f"q: expected {dtype} as dtype says, got {kind}")
    cu_seqlens = sums_of(given["cu_seqlens"])
    packed = cu_seqlens is not None
    rank, shape = (3, "(T, H, D)") if packed else (4, "(B, N, H, D)")
    if q.ndim != rank:
        raise ValueError(f"q: expected shape {shape}, got {q.shape}")
    if k.ndim != rank or k.shape[:-2] != q.shape[:-2] or k.shape[-1] != q.shape[-1]:
        raise ValueError(f"k: expected shape {shape} with Hkv heads, else like q {q.shape}, got {k.shape}")
    if v.ndim != rank or v.shape[:-1] != k.shape[:-1]:
        raise ValueError(f"v: expected the tokens and heads of k {k.shape}, got {v.shape}")
    for x, name in ((q, "q"), (v, "v")):
        if not 1 <= x.shape[-1] <= 576 or x.shape[-2] < 1:
            raise ValueError(f"{name}: expected at least one head and a head dim from 1 to 576, got {x.shape}")
    if k.shape[-2] == 0 or q.shape[-2] % k.shape[-2]:
        raise ValueError(f"k: expected a number of heads that divides {q.shape[-2]}, got {k.shape[-2]}")
    sequences = Sequences.of(cuts(cu_seqlens, q.shape[0]) if packed else None, rules.size, rules.stride, rules.tile)
    w_k, kind_k = check_weight(given["w_k_compress"], "w_k_compress", k.shape, dtype, kind)
    w_v, kind_v = check_weight(given["w_v_compress"], "w_v_compress", v.shape, dtype, kind)
    w_gate, kind_gate = weight_of(given["gate_proj_weight"], q, dtype, kind)
    gates, kind_gates = None, kind
    if given["gates"] is not None:
        if w_gate is not None:
            raise ValueError("gates: expected None with gate_proj_weight, got both")
        gates, kind_gates = gates_as_reals(given["gates"], q.shape, dtype, kind)
    lists = None
    if given["block_indices"] is not None:
        heads = (k.shape[-2],) if rules.by_query else tuple(dict.fromkeys((q.shape[-2], k.shape[-2])))
        lengths = [q.shape[1]] if sequences.tokens is None else np.diff(sequences.tokens).tolist()
        lists = lists_of(given["block_indices"], rules, heads, q.shape[0], lengths, packed)
    scale = scale_of(given["scale"], q.shape[-1])
    k_cmp, v_cmp = (np.empty(compressed_shape(x, rules.size, rules.stride, sequences), storage(kind)) for x in (k, v))
    kinds = (kind_k, kind_v, kind_gate, kind_gates)
    return Call(q, k, v, kind, rules, window, scale, sequences, w_k, w_v, w_gate, gates, kinds, most_groups, lists, k_cmp, v_cmp, threads)


class Room:
    """Arrays for the branches of a piece: parts of whole arrays where those are kept, else memory that all pieces share."""

    def __init__(self) -> None:
        self.memory: dict[str, np.ndarray] = {}

    def array(self, name: str, shape: tuple[int, ...], dtype: Any, kept: np.ndarray | None) -> np.ndarray:
        if kept is not None:
            return kept
        count = int(np.prod(shape))
        if name not in self.memory or self.memory[name].size < count:
            self.memory[name] = np.empty(count, dtype)
        return self.memory[name][:count].reshape(shape)


def _select(call: Call, piece: Piece, q: np.ndarray, k_cmp: np.ndarray, lse: np.ndarray | None, chosen: np.ndarray, groups: Any) -> None:
    select_into(
        q, k_cmp, lse, chosen, groups, call.kind, call.rules, call.scale, piece.begin, piece.tokens, piece.sequences, call.threads
    )


def _run_piece(call: Call, piece: Piece, room: Room, keep: NSAContext | None, out: np.ndarray) -> None:
    """All of the call for the queries of one piece."""
    rules, kind, cu = call.rules, call.kind, piece.sequences.tokens
    q, result = call.q[piece.queries], out[piece.queries]
    k, v, k_cmp, v_cmp = call.k[piece.keys], call.v[piece.keys], call.k_cmp[piece.blocks], call.v_cmp[piece.blocks]
    branches = [
        room.array(name, result.shape, storage(kind), None if keep is None else keep.branches[c][piece.queries])
        for c, name in enumerate(BRANCHES)
    ]
    lse: list[np.ndarray | None] = [None] * 3
    for c, name in enumerate(BRANCHES):
        if keep is not None or (rules.by_query and c == 0 and call.lists is None):
            lse[c] = room.array(f"{name} lse", q.shape[:-1], real_of(kind), None if keep is None else keep.lse[name][piece.queries])

    def lists(name: str, width: int, kept: np.ndarray | None) -> np.ndarray:
        shape = list_shape(q, k.shape[-2], rules, piece.sequences, width)
        return room.array(name, shape, np.int32, None if kept is None else piece.lists(kept, kv_heads))

    chosen, groups, kv_heads = None, None, call.k.shape[-2]
    if call.lists is not None:
        chosen = piece.lists(call.lists, kv_heads)
    if call.most_groups is not None:
        groups = lists("groups", call.most_groups, None if keep is None else keep.groups)
    if chosen is None or groups is not None:
        selected = lists("lists", rules.count, None if keep is None or call.lists is not None else keep.block_indices)
        if not rules.by_query:
            _select(call, piece, q, k_cmp, None, selected, groups)

    shared = (kind, call.scale, rules.causal, call.threads)
    attend(
        q, k_cmp, v_cmp, branches[0], lse[0], *shared, COMPRESSED_NAMES, cu=cu, cu_kv=piece.sequences.blocks, lists=groups,
        cu_rows=piece.sequences.rows if groups is not None else None, block_shape=(rules.tile, CMP_GROUP), begin=piece.begin,
        stride=rules.stride, last=rules.last,
    )  # fmt: skip
    if chosen is None:
        chosen = selected
        if rules.by_query:
            _select(call, piece, q, k_cmp, lse[0], chosen, None)
    attend(
        q, k, v, branches[1], lse[1], *shared, SELECTED_NAMES, cu=cu, lists=chosen, cu_rows=piece.sequences.rows,
        block_shape=(rules.tile, rules.select), begin=piece.begin,
    )  # fmt: skip
    attend(q, k, v, branches[2], lse[2], *shared, {}, cu=cu, window=window_of(call.window, rules.causal), begin=piece.begin)
    gates = None if call.gates is None else call.gates[piece.queries]
    if call.w_gate is not None and keep is not None:
        gates = keep.gates[piece.queries]
    weight = None if call.w_gate is None else call.w_gate[piece.heads[0]]
    _core.gate(None if weight is None else q, weight, gates, tuple(branches), result, kind, call.threads)


def _context(call: Call, given: dict[str, Any], shape: tuple[int, ...]) -> NSAContext:
    """A context whose arrays are still to be filled."""
    real, q = real_of(call.kind), call.q
    lists = call.lists
    if lists is None:
        lists = np.empty(list_shape(q, call.k.shape[-2], call.rules, call.sequences, call.rules.count), np.int32)
    groups = None
    if call.most_groups is not None:
        groups = np.empty(list_shape(q, call.k.shape[-2], call.rules, call.sequences, call.most_groups), np.int32)
    gates = call.gates
    if gates is None:
        third = np.broadcast_to(np.array(1 / 3, real), (*q.shape[:-1], 3))
        gates = third if call.w_gate is None else np.empty(third.shape, real)
    lse = {name: np.empty(q.shape[:-1], real) for name in BRANCHES}
    branches = [np.empty(shape, storage(call.kind)) for _ in BRANCHES]
    like = tuple(given[name] for name in ("q", "k", "v", "w_k_compress", "w_v_compress", "gate_proj_weight", "gates"))
    return NSAContext(lists, gates, lse, shape, call, branches, groups, like)


def nsa(
    q: Any,
    k: Any,
    v: Any,
    *,
    compress_block_size: int = 64,
    num_selected_blocks: int = 16,
    window_size: int = 512,
    w_k_compress: Any = None,
    w_v_compress: Any = None,
    gate_proj_weight: Any = None,
    gates: Any = None,
    causal: bool = True,
    scale: float | None = None,
    q_tile_size: int = 256,
    num_cmp_selected_blocks: int | None = None,
    mode: str = "paper",
    compress_stride: int | None = None,
    select_block_size: int | None = None,
    init_blocks: int = 1,
    local_blocks: int = 2,
    block_indices: Any = None,
    cu_seqlens: Any = None,
    out: Any = None,
    return_context: bool = False,
    dtype: Any = None,
    num_threads: int | None = None,
) -> Any:
    """Native sparse attention; strictly causal by default (``mode="paper"``), while ``mode="mslk"`` looks ahead.

    In ``mode="mslk"``, which is upstream's rule, a query sees the compressed block that it is inside of, so that its output depends on up
    to ``compress_block_size - 1`` *later* tokens, and its tile's selection on later queries of the tile: not for models that generate. In
    ``mode="paper"`` no output depends on a later token.

    Each query attends to three sets of keys, and the results are summed with a gate each: block means of all keys before it
    (compressed), the tokens of the blocks whose means score highest (selected), and its neighbours (window).

    Parameters
    ----------
    q : array_like
        ``(B, N, H, D)``, with `cu_seqlens` ``(T, H, D)``: float32, float16, bfloat16 or float64. D from 1 to 576.
    k : array_like
        ``(B, N, Hkv, D)``, same dtype. H must be a multiple of Hkv; query head h reads key head ``h // (H // Hkv)``.
    v : array_like
        ``(B, N, Hkv, Dv)``, same dtype. Dv from 1 to 576 and may differ from D.
    compress_block_size : int
        Tokens l of a compressed block. Tokens that do not fill one are in none.
    num_selected_blocks : int
        Blocks n that are selected at most, the forced ones among them.
    window_size : int
        Keys W of the window, the query's own the last of them; not causal: ``W // 2`` before and as many after it, and itself.
    w_k_compress, w_v_compress : array_like, optional
        ``(Hkv, D, D)`` and ``(Hkv, Dv, Dv)``: the block means, as rows, are multiplied by them.
    gate_proj_weight : array_like, optional
        ``(H, 3, D)``: gates are ``sigmoid(q . weight)``, in the order compressed, selected, window.
    gates : array_like, optional
        ``(B, N, H, 3)`` gates as they are, in place of `gate_proj_weight`. Neither: 1/3 each.
    causal : bool
        False: compressed blocks and selectable blocks are all visible, and the window reaches both ways; in paper mode the forced local
        blocks are those from ``local_blocks // 2`` before the query's own on, as far as they exist.
    scale : float, optional
        Factor of ``q k^T`` in every branch. Default: ``1 / sqrt(D)``.
    q_tile_size : int
        mslk mode: queries that share a selection. The last tile of a sequence has those that are left.
    num_cmp_selected_blocks : int, optional
        mslk mode: the compressed branch sees only that many groups of 128 compressed keys a tile and head, those with the highest mean
        score. Default: all.
    mode : {"paper", "mslk"}
        See Notes.
    compress_stride : int, optional
        Paper mode: tokens d from one compressed block's beginning to the next one's; divides l and l'. Default: ``max(1, l // 2)``.
    select_block_size : int, optional
        Paper mode: tokens l' of a selected block. Default: l.
    init_blocks, local_blocks : int
        Paper mode: first blocks, and last ones up to the query's own, that are always selected.
    block_indices : array_like of int, optional
        A selection to use in place of the computed one, such as that of a context: paper ``(B, Hkv, N, n)``, mslk ``(B, H or Hkv, tiles,
        n)``, with `cu_seqlens` without B and with the rows of all sequences one after the other. Rows end at the first -1.
    cu_seqlens : sequence of int, optional
        ``(sequences + 1,)`` numbers that rise from 0 to T. Each sequence is as if it were alone, of whatever length.
    out : array, optional
        Where to write the result: writable, of the result's shape and dtype, sharing no memory with any input.
    return_context : bool
        Also return what `nsa_backward` needs.
    dtype : str or dtype, optional
        ``"bfloat16"`` says that uint16 arrays hold bfloat16 bits. Otherwise only checked.
    num_threads : int, optional
        Threads for this call. Default: see `set_num_threads`. The result does not depend on it.

    Returns
    -------
    out : array
        Of the shape of `q` with v's last dim, of the dtype and kind of `q`. A branch in which a query sees no key gives it 0.
    context : NSAContext
        With `return_context`.

    Raises
    ------
    TypeError
        An argument of the wrong kind: not an array, an unknown or mixed dtype, a fraction where an integer belongs.
    ValueError
        An argument of the wrong shape or out of range. The text names the argument, what was expected and what came. Nothing has been
        written then.
    MemoryError
        The scratch memory could not be had.

    See Also
    --------
    score_and_select_blocks : the selection by itself.
    blitz_attn.reference.nsa : the same in plain float64 NumPy.

    Notes
    -----
    ``mode="paper"`` follows the paper [1]_: compressed block i holds tokens ``[i d, i d + l)`` and is visible to query t when it is
    complete, ``i d + l - 1 <= t``. The probabilities of the compressed branch, summed over the heads of a KV group, score the blocks of
    l' tokens: block j gets ``p[(l'/d) j + m - n]`` for all ``m < l'/d`` and ``n < l/d`` (Eq. 9 and 10), which is how often the two
    overlap. Each query and KV head selects n blocks that begin at or before it.

    ``mode="mslk"`` follows upstream's reference [2]_: blocks do not overlap, block j is visible from its *first* token on, and each tile
    of queries and query head selects by the product of the compressed keys with the tile's mean query, among complete blocks that begin
    before the tile's end. Where upstream's fast path differs from its own reference, this follows the reference: selected blocks are
    not widened to 128 tokens, the window has W keys, not W + 1, and reaches both ways where not causal, and the backward pass goes over
    the very lists of the forward pass. Where the reference is not defined, or not well: N need not be a
    multiple of anything; unused places of a selection are -1 and attend to nothing, where upstream repeats block 0; a query that sees
    no selected token gets 0 from that branch, where upstream gives NaN.

    Ties in a selection go to the lower block. Sums are made in float32 (float64 for float64). Long calls without a context are worked off
    in stretches of queries, so that the three branches' results never exist as a whole; memory is linear in the number of tokens.

    References
    ----------
    .. [1] J. Yuan et al., "Native Sparse Attention: Hardware-Aligned and Natively Trainable Sparse Attention", 2025.
    .. [2] meta-pytorch/MSLK, pull request 297, mslk/attention/sparse_attn.

    Examples
    --------
    >>> import numpy as np
    >>> from blitz_attn import nsa, reference
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = (rng.standard_normal((1, 200, heads, 32), dtype=np.float32) for heads in (4, 2, 2))
    >>> sizes = {"compress_block_size": 16, "num_selected_blocks": 4, "window_size": 32}
    >>> out, context = nsa.nsa(q, k, v, **sizes, return_context=True)
    >>> exact = reference.nsa(q, k, v, **sizes, block_indices=context.block_indices)
    >>> bool(np.abs(out - exact).max() < 1e-5)
    True
    """
    given = dict(locals())
    call = _check(given)
    return_context = _arrays.flag(return_context, "return_context")
    shape = (*call.q.shape[:-1], call.v.shape[-1])
    result = Result(shape, call.kind, q, out, "out", dtype_of(dtype))
    result.refuse_overlap(q=call.q, k=call.k, v=call.v, gates=call.gates, gate_proj_weight=call.w_gate, block_indices=call.lists)
    context = _context(call, given, shape) if return_context else None
    halves = (call.k, call.w_k, call.k_cmp, ("k", "w_k_compress")), (call.v, call.w_v, call.v_cmp, ("v", "w_v_compress"))
    for x, w, made, names in halves:
        compress_into(x, w, made, call.kind, call.rules.size, call.rules.stride, call.sequences, call.threads, names)
    batch, tokens = (0, shape[0]) if call.packed else shape[:2]
    room = Room()
    heads = (call.q.shape[-2], call.k.shape[-2])
    for piece in pieces(batch, tokens, call.sequences, call.rules.tile, PIECE_ELEMENTS // shape[-1], heads):
        _run_piece(call, piece, room, context, result.array)
    return (result.value, context) if return_context else result.value


# ---- Backward -----------------------------------------------------------------------------------------------------


def _branch_gradients(call: Call, ctx: NSAContext, c: int, dout: np.ndarray, threads: int | None) -> tuple[np.ndarray, ...]:
    """Gradients of one branch for q and for the keys and values that it attends to."""
    rules, sequences = call.rules, call.sequences
    keys, values = (call.k_cmp, call.v_cmp) if c == 0 else (call.k, call.v)
    grads = tuple(np.empty(x.shape, storage(call.kind)) for x in (call.q, keys, values))
    options: dict[str, Any] = {"cu": sequences.tokens}
    if c == 0:
        options |= {"cu_kv": sequences.blocks, "stride": rules.stride, "last": rules.last}
        if ctx.groups is not None:
            options |= {"lists": ctx.groups, "cu_rows": sequences.rows, "block_shape": (rules.tile, CMP_GROUP)}
    elif c == 1:
        options |= {"lists": ctx.block_indices, "cu_rows": sequences.rows, "block_shape": (rules.tile, rules.select)}
    else:
        options |= {"window": window_of(call.window, rules.causal)}
    attend_backward(
        dout, call.q, keys, values, ctx.branches[c], ctx.lse[BRANCHES[c]], grads, call.kind, call.scale, rules.causal, threads, {},
        **options,
    )  # fmt: skip
    return grads


def nsa_backward(dout: Any, ctx: NSAContext, *, num_threads: int | None = None) -> NSAGradients:
    """Gradients of what `nsa` was given. The selection counts as constant.

    Parameters
    ----------
    dout : array_like
        Gradient of the result, of its shape and dtype.
    ctx : NSAContext
        What ``nsa(..., return_context=True)`` returned beside the result. It can be used any number of times.
    num_threads : int, optional
        Threads for this call. Default: see `set_num_threads`. The result does not depend on it.

    Returns
    -------
    NSAGradients
        ``(dq, dk, dv, dw_k_compress, dw_v_compress, dgate_proj_weight, dgates)``, each of the shape, dtype and kind of its array; None for
        an array that was not given.

    Raises
    ------
    TypeError
        `ctx` is no context, or `dout` of another kind or dtype than the result.
    ValueError
        `dout` of another shape than the result of the call that the context is of.

    See Also
    --------
    blitz_attn.reference.nsa_backward : the same in plain float64 NumPy.

    Notes
    -----
    Gates first, ``do_c = g_c dout`` and, through the sigmoid, the queries and the weights; then each branch as attention with its
    log-sum-exp of the forward pass; then what the compressed keys and values got goes back through their weights to the tokens of their
    blocks. The selection's scores have no gradient, as upstream and in the paper. Nothing depends on the order in which threads come.

    Examples
    --------
    >>> import numpy as np
    >>> from blitz_attn import nsa
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = (rng.standard_normal((1, 96, heads, 16)) for heads in (2, 1, 1))
    >>> sizes = {"compress_block_size": 16, "num_selected_blocks": 4, "window_size": 8}
    >>> out, context = nsa.nsa(q, k, v, **sizes, return_context=True)
    >>> grads = nsa.nsa_backward(np.ones_like(out), context)
    >>> step = 1e-5 * rng.standard_normal(v.shape)
    >>> moved = nsa.nsa(q, k, v + step, **sizes, block_indices=context.block_indices)
    >>> bool(abs((moved - out).sum() - (grads.dv * step).sum()) < 1e-12)
    True
    """
    if not isinstance(ctx, NSAContext):
        raise TypeError(f"ctx: expected the context that nsa(..., return_context=True) returns, got {type(ctx).__name__}")
    call, kind = ctx.call, ctx.call.kind
    threads = threads_of(num_threads)
    gradient = same_kind(dout, "dout", kind, kind, "the result")
    expect_shape(gradient, "dout", ctx.shape, "of the result")
    q_like, k_like, v_like, *weight_likes = ctx.like
    dq, dk, dv = (Result(x.shape, kind, like) for x, like in zip((call.q, call.k, call.v), (q_like, k_like, v_like), strict=True))

    douts: list[Any] = [np.empty(ctx.shape, storage(kind)) for _ in BRANCHES]
    dgates = None if call.gates is None else np.empty(call.gates.shape, real_of(kind))
    dw_gate = dq_gate = None
    if call.w_gate is not None:
        dw_gate, dq_gate = np.empty(call.w_gate.shape, real_of(kind)), np.empty(call.q.shape, storage(kind))
    gates = None if call.gates is None and call.w_gate is None else ctx.gates
    _core.gate_backward(
        None if call.w_gate is None else call.q, call.w_gate, gates, tuple(ctx.branches), gradient, tuple(douts), dgates, dq_gate, dw_gate,
        kind, threads,
    )  # fmt: skip

    grads = []
    for c in range(3):
        grads.append(_branch_gradients(call, ctx, c, douts[c], threads))
        douts[c] = None
    dqs = [x[0] for x in grads] + ([] if dq_gate is None else [dq_gate])
    one = (None,) if call.packed else ()  # a batch axis: sums know no sequences
    _core.block_means_backward(None, dq.array[one], tuple(x[one] for x in dqs), 1, 1, None, None, kind, threads)
    weight_grads = []
    for n, (x, w, dx) in enumerate(((call.k, call.w_k, dk), (call.v, call.w_v, dv)), 1):
        more = (grads[1][n], grads[2][n])
        weight_grads.append(
            compress_gradients(grads[0][n], x, w, dx.array, more, kind, call.rules.size, call.rules.stride, call.sequences, threads)
        )
    made = [
        None if x is None else rounded(x, real_of(kind), own, like)
        for x, own, like in zip((*weight_grads, dw_gate, dgates), call.kinds, weight_likes, strict=True)
    ]
    return NSAGradients(dq.value, dk.value, dv.value, *made)
