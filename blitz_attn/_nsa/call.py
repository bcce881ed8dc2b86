"""A call of `nsa` from its arguments to its output: it is checked once and cut into pieces, and each piece is run by itself."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from .. import _core
from .._floats import real_of
from .._sentences import refusal
from .arrays import Reals, check_heads, dtype_of, leading, same_kind, storage
from .attend import Branch, Common, attend, compressed_branch, selected_branch, window_branch
from .compression import check_compressed, check_weight, compress_into, compressed_shape
from .gates import gates_as_reals, weight_of
from .rules import CMP_GROUP, Rules, rules_of, scale_of, threads_of, window_and_groups
from .selection import check_tiles, list_heads, list_shape, lists_of, select_into
from .sequences import Piece, Sequences, lengths_within, packed_cuts, refuse_cuts_of_queries, sums_of

BRANCHES = ("compressed", "selected", "window")


@dataclass(frozen=True, eq=False, kw_only=True)
class Options:
    """The arguments of `nsa` besides q, k, v and arrays for results, as the caller gave them."""

    compress_block_size: Any
    num_selected_blocks: Any
    window_size: Any
    w_k_compress: Any
    w_v_compress: Any
    gate_proj_weight: Any
    gates: Any
    causal: Any
    scale: Any
    q_tile_size: Any
    num_cmp_selected_blocks: Any
    mode: Any
    compress_stride: Any
    select_block_size: Any
    init_blocks: Any
    local_blocks: Any
    block_indices: Any
    cu_seqlens: Any
    dtype: Any
    num_threads: Any
    compressed_kv: Any = None
    cu_seqlens_q: Any = None
    kv_lens: Any = None
    lens: Any = None  # of `NsaCache.attend`: the number of queries of each sequence

    def rules(self) -> Rules:
        return rules_of(
            self.mode, self.compress_block_size, self.num_selected_blocks, self.q_tile_size, self.compress_stride, self.select_block_size,
            self.init_blocks, self.local_blocks, self.causal,
        )  # fmt: skip


@dataclass(frozen=True, eq=False)
class Call:
    """A checked call, or a piece of one: views of its arrays, its rules, and arrays that are derived from them once."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    k_cmp: np.ndarray  # will be filled, unless the caller gave it
    v_cmp: np.ndarray
    w_k: Reals
    w_v: Reals
    w_gate: Reals
    gates: Reals
    lists: np.ndarray | None  # a given selection
    common: Common
    rules: Rules
    window: int
    most_groups: int | None  # num_cmp_selected_blocks
    sequences: Sequences
    compresses: bool  # whether k_cmp and v_cmp must be filled

    @property
    def selects(self) -> bool:
        """Whether blocks are selected. Groups of compressed keys are selected together with blocks."""
        return self.lists is None or self.most_groups is not None

    def of_piece(self, piece: Piece) -> Call:
        """The part of the call that computes one piece of its output."""
        w_gate, gates = self.w_gate.array, self.gates.array
        return replace(
            self,
            q=self.q[piece.queries],
            k=self.k[piece.keys],
            v=self.v[piece.keys],
            k_cmp=self.k_cmp[piece.blocks],
            v_cmp=self.v_cmp[piece.blocks],
            w_gate=self.w_gate if w_gate is None else Reals(w_gate[piece.heads[0]], self.w_gate.kind),
            gates=self.gates if gates is None else Reals(gates[piece.queries], self.gates.kind),
            lists=None if self.lists is None else piece.lists(self.lists, self.k.shape[-2]),
            sequences=piece.sequences,
        )

    @property
    def width(self) -> int:
        """Entries of a row of the selection: the number that is asked for, or the number of blocks of the longest sequence if that is less,
        but at least 1, and at least the number of blocks that are always selected."""
        return max(1, self.rules.init + self.rules.local, min(self.rules.count, -(-self.sequences.longest // self.rules.select)))

    @property
    def group_width(self) -> int:
        """Entries of a row of lists of groups: the number that is asked for, or the number of groups if that is less, but at least 1."""
        assert self.most_groups is not None
        return max(1, min(self.most_groups, -(-self.k_cmp.shape[-3] // CMP_GROUP)))

    def list_shape(self, width: int) -> tuple[int, ...]:
        heads = list_heads(self.q, self.k.shape[-2], self.rules)
        return (*list_shape(self.q, heads, self.rules, self.sequences), width)

    def branches(self, lists: np.ndarray | None, groups: np.ndarray | None) -> list[tuple[np.ndarray, np.ndarray, Branch]]:
        """(keys, values, `Branch` that says which keys are seen) for each of `BRANCHES`."""
        return [
            (self.k_cmp, self.v_cmp, compressed_branch(self.rules, self.sequences, groups)),
            (self.k, self.v, selected_branch(self.rules, self.sequences, lists)),
            (self.k, self.v, window_branch(self.window, self.rules.causal, self.sequences)),
        ]


def checked(q: Any, k: Any, v: Any, options: Options) -> Call:
    """The call, after all checks that are made before any output is touched."""
    o = options
    rules = o.rules()
    window, most_groups = window_and_groups(o.window_size, o.num_cmp_selected_blocks, rules)
    threads, dtype = threads_of(o.num_threads), dtype_of(o.dtype)
    q, kind = leading(q, "q", dtype)
    k, v = (same_kind(x, name, dtype, kind, "q") for x, name in ((k, "k"), (v, "v")))
    cu_seqlens = sums_of(o.cu_seqlens)
    _check_shapes(q, k, v, cu_seqlens is not None, o.lens is not None)
    sequences = _sequences(q, k, cu_seqlens, o, rules)
    check_tiles(rules, sequences)
    w_k = check_weight(o.w_k_compress, "w_k_compress", k.shape, dtype, kind)
    w_v = check_weight(o.w_v_compress, "w_v_compress", v.shape, dtype, kind)
    w_gate = weight_of(o.gate_proj_weight, q, dtype, kind)
    if o.gates is not None and w_gate.array is not None:
        raise ValueError("gates: expected None with gate_proj_weight, got both")
    gates = Reals(None, kind) if o.gates is None else gates_as_reals(o.gates, q.shape, dtype, kind)
    lists = None
    if o.block_indices is not None:
        heads = (k.shape[-2],) if rules.by_query else tuple(dict.fromkeys((q.shape[-2], k.shape[-2])))
        lists = lists_of(o.block_indices, rules, heads, q, sequences)
    common, given = Common(kind, scale_of(o.scale, q.shape[-1]), threads), o.compressed_kv is not None
    if given:
        k_cmp, v_cmp = _given_compressed(k, v, o, dtype, kind, rules, sequences)
    else:
        k_cmp, v_cmp = (np.empty(compressed_shape(x, rules.size, rules.stride, sequences), storage(kind)) for x in (k, v))
    return Call(q, k, v, k_cmp, v_cmp, w_k, w_v, w_gate, gates, lists, common, rules, window, most_groups, sequences, not given)


def _sequences(q: np.ndarray, k: np.ndarray, cu_seqlens: Any, o: Options, rules: Rules) -> Sequences:
    """The sequences of a call. Queries are the last tokens of their sequence."""
    if cu_seqlens is not None:
        if o.kv_lens is not None:
            raise ValueError("kv_lens: expected None with cu_seqlens, got some")
        if o.cu_seqlens_q is None and len(k) != len(q):
            raise refusal(ValueError, "k", f": expected the {len(q)} tokens of ", "q", " without ", "cu_seqlens_q", f", got {k.shape}")
        cu, own = packed_cuts(cu_seqlens, o.cu_seqlens_q, len(q), len(k))
        return Sequences.packed(cu, rules.size, rules.stride, rules.tile, own)
    refuse_cuts_of_queries(o.cu_seqlens_q)
    queries, room = q.shape[1], k.shape[1]
    if o.lens is not None:
        lengths = np.full(len(q), room) if o.kv_lens is None else o.kv_lens
        counts = lengths_within(o.lens, "lens", len(q), 0, queries, f"0 to the {queries} tokens of q")
        lengths_within(counts, "lens", len(q), 0, lengths, "0 to the tokens that each sequence has")
        # A sequence without queries needs no tokens. Without tokens, its queries begin at 0, where a tile begins.
        return Sequences.batch(counts, np.where(counts > 0, lengths, 0))
    if o.kv_lens is None:
        return Sequences.batch(queries, room)
    bounds = f"the {queries} tokens of q to the {room} of k"
    return Sequences.batch(queries, lengths_within(o.kv_lens, "kv_lens", len(q), queries, room, bounds))


def _given_compressed(
    k: np.ndarray, v: np.ndarray, o: Options, dtype: Any, kind: str, rules: Rules, sequences: Sequences
) -> tuple[np.ndarray, np.ndarray]:
    """The compressed keys and values that the caller gave, after checks."""
    pair = o.compressed_kv
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        raise TypeError(f"compressed_kv: expected a pair (k_cmp, v_cmp), got {type(pair).__name__}")
    for name in ("w_k_compress", "w_v_compress"):
        if getattr(o, name) is not None:
            raise ValueError(f"{name}: expected None with compressed_kv, got some")
    arrays = []
    for x, like, name in zip(pair, (k, v), ("k_cmp", "v_cmp"), strict=True):
        array = same_kind(x, name, dtype, kind, "q")
        own = array.ndim == like.ndim and array.shape[-2:] == like.shape[-2:]
        if not own or (sequences.queries is None and len(array) != len(like)):
            raise refusal(ValueError, name, ": expected blocks of tokens, else like ", name[0], f" {like.shape}, got {array.shape}")
        check_compressed(array, rules.size, rules.stride, sequences, name)
        arrays.append(array)
    return arrays[0], arrays[1]


def _check_shapes(q: np.ndarray, k: np.ndarray, v: np.ndarray, packed: bool, padded: bool) -> None:
    rank, shape = (3, "(T, H, D)") if packed else (4, "(B, N, H, D)")
    if q.ndim != rank:
        raise ValueError(f"q: expected shape {shape}, got {q.shape}")
    if k.ndim != rank or (not packed and len(k) != len(q)) or k.shape[-1] != q.shape[-1]:
        raise refusal(ValueError, "k", f": expected shape {shape} with Hkv heads, else like ", "q", f" {q.shape}, got {k.shape}")
    if not packed and not padded and k.shape[1] < q.shape[1]:
        raise refusal(
            ValueError, "k", f": expected at least the {q.shape[1]} tokens of ", "q", f" (layout (B, tokens, heads, D)), got {k.shape}"
        )
    if v.ndim != rank or v.shape[:-1] != k.shape[:-1]:
        raise refusal(ValueError, "v", ": expected the tokens and heads of ", "k", f" {k.shape}, got {v.shape}")
    for x, name in ((q, "q"), (v, "v")):
        check_heads(x, name)
    if k.shape[-2] == 0 or q.shape[-2] % k.shape[-2]:
        raise ValueError(f"k: expected a number of heads that divides {q.shape[-2]}, got {k.shape[-2]}")


# ---- Results ------------------------------------------------------------------------------------------------------


class Results(NamedTuple):
    """The results of a call, or of a piece of one, besides its output. A result that is None is not computed, or not kept."""

    outs: list[np.ndarray]  # one for each branch
    lse: list[np.ndarray | None]
    lists: np.ndarray | None
    groups: np.ndarray | None
    gates: np.ndarray | None


def kept_results(call: Call) -> Results:
    """Arrays for all results of a call, for its gradient."""
    real, kind = real_of(call.common.kind), storage(call.common.kind)
    tokens = call.q.shape[:-1]
    return Results(
        outs=[np.empty((*tokens, call.v.shape[-1]), kind) for _ in BRANCHES],
        lse=[np.empty(tokens, real) for _ in BRANCHES],
        lists=np.empty(call.list_shape(call.rules.count), np.int32) if call.lists is None else None,
        groups=None if call.most_groups is None else np.empty(call.list_shape(call.most_groups), np.int32),
        gates=None if call.w_gate.array is None else np.empty((*tokens, 3), real),
    )


class Room:
    """Arrays for the results of each piece: parts of the arrays that are kept, or else memory that all pieces share."""

    def __init__(self, kept: Results | None) -> None:
        self.kept = kept
        self.memory: dict[str, np.ndarray] = {}

    def _shared(self, name: str, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        count = int(np.prod(shape))
        if name not in self.memory or self.memory[name].size < count:
            self.memory[name] = np.empty(count, dtype)
        return self.memory[name][:count].reshape(shape)

    def results(self, call: Call, piece: Piece, kv_heads: int) -> Results:
        """Arrays for the results of a piece. `call` is the part of the call for this piece, and `kv_heads` the number of KV heads of the
        whole call."""
        kept = self.kept
        lists = None
        if call.selects and (kept is None or kept.lists is None):
            lists = self._shared("lists", call.list_shape(call.width), np.int32)
        if kept is None:
            real, kind = real_of(call.common.kind), storage(call.common.kind)
            # A selection per query needs the log-sum-exp of the compressed branch.
            tokens, by_lse = call.q.shape[:-1], call.rules.by_query and call.lists is None
            return Results(
                outs=[self._shared(name, (*tokens, call.v.shape[-1]), kind) for name in BRANCHES],
                lse=[self._shared("lse", tokens, real) if by_lse else None, None, None],
                lists=lists,
                groups=None if call.most_groups is None else self._shared("groups", call.list_shape(call.group_width), np.int32),
                gates=None,
            )
        return Results(
            outs=[x[piece.queries] for x in kept.outs],
            lse=[None if x is None else x[piece.queries] for x in kept.lse],
            lists=lists if kept.lists is None else piece.lists(kept.lists, kv_heads),
            groups=None if kept.groups is None else piece.lists(kept.groups, kv_heads),
            gates=None if kept.gates is None else kept.gates[piece.queries],
        )


# ---- Compression and one piece ------------------------------------------------------------------------------------------------------


def compress(call: Call) -> None:
    """Fills the compressed keys and values of a call, unless the caller gave them."""
    if not call.compresses:
        return
    rules = call.rules
    for x, weight, made, names in (
        (call.k, call.w_k.array, call.k_cmp, ("k", "w_k_compress")),
        (call.v, call.w_v.array, call.v_cmp, ("v", "w_v_compress")),
    ):
        compress_into(x, weight, made, call.common.kind, rules.size, rules.stride, call.sequences, call.common.threads, names)


def _select(call: Call, lse: np.ndarray | None, results: Results) -> None:
    assert results.lists is not None
    select_into(call.q, call.k_cmp, lse, results.lists, results.groups, call.common, call.rules, call.sequences)


def run(call: Call, results: Results, out: np.ndarray) -> None:
    """Computes a piece: fills `results` and `out`."""
    if call.selects and not call.rules.by_query:  # mslk mode selects by mean queries
        _select(call, None, results)
    lists = results.lists if call.lists is None else call.lists
    for c, (keys, values, branch) in enumerate(call.branches(lists, results.groups)):
        if BRANCHES[c] == "selected" and call.selects and call.rules.by_query:  # paper mode selects by probabilities
            _select(call, results.lse[0], results)
        attend(call.q, keys, values, results.outs[c], results.lse[c], call.common, branch)
    weight = call.w_gate.array
    gates = call.gates.array if weight is None else results.gates
    _core.gate(
        None if weight is None else call.q, weight, gates=gates, branches=tuple(results.outs), out=out, dtype=call.common.kind,
        num_threads=call.common.threads,
    )  # fmt: skip
