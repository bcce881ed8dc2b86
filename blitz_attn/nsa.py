"""Native sparse attention: three branches over compressed, selected and nearby keys, summed by gates, forward and backward.

`nsa` is the whole operation. Its parts are functions, too, all of which except the selection have gradients. `NsaCache` is for a model that
generates text. Arrays are ``(B, N, H, D)``, or packed ``(T, H, D)`` with ``cu_seqlens``.

>>> import numpy as np
>>> from blitz_attn import nsa
>>> q, k, v = (np.ones((1, 256, heads, 64), np.float32) for heads in (4, 2, 2))
>>> nsa.nsa(q, k, v).shape
(1, 256, 4, 64)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, TypeVar, Unpack, overload

import numpy as np

from . import _arrays, _core
from ._floats import Result, real_of, refuse_overlaps
from ._nsa.arrays import add_rounded, dtype_of, expect_shape, round_into, rounded, same_kind, storage, sums_for
from ._nsa.attend import attend_backward
from ._nsa.branches import (
    compressed_attention,
    compressed_attention_backward,
    selected_attention,
    selected_attention_backward,
    window_attention,
    window_attention_backward,
)
from ._nsa.call import BRANCHES, Call, Options, Results, Room, checked, compress, kept_results, run
from ._nsa.compression import compress_gradients, compress_kv, compress_kv_backward
from ._nsa.gates import check_gate_weight, compute_gates, gate_and_combine, gating_backward
from ._nsa.rules import scale_of, threads_of, window_and_groups
from ._nsa.selection import score_and_select_blocks
from ._nsa.sequences import pieces, pieces_of_heads
from ._nsa.store import Store

if TYPE_CHECKING:
    from ._options import CacheRules, NSAOptions
    from ._types import Array, DType, Integers, IntOrIntegers, Kind

__all__ = [
    "NSAContext",
    "NSAGradients",
    "NsaCache",
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


AnyKind = TypeVar("AnyKind")  # the kind of a call's arrays

# The arguments of `nsa` that NsaCache takes as `options`.
RULES = (
    "num_selected_blocks", "window_size", "gate_proj_weight", "causal", "scale", "q_tile_size", "num_cmp_selected_blocks",
    "select_block_size", "init_blocks", "local_blocks",
)  # fmt: skip

SHOWN = 8  # lengths of sequences in the repr of a cache

# A forward call holds about so many elements of a branch's output at a time. A backward call holds about so many elements of the
# gradient of such an output, for each thread.
PIECE_ELEMENTS = 1 << 22


def __dir__() -> list[str]:
    return __all__


class NSAGradients(NamedTuple, Generic[AnyKind]):
    """Gradients of the arrays that `nsa` was given. Each gradient has the shape and dtype of its array; None for an array that was not
    given."""

    dq: AnyKind
    dk: AnyKind
    dv: AnyKind
    dw_k_compress: AnyKind | None
    dw_v_compress: AnyKind | None
    dgate_proj_weight: AnyKind | None
    dgates: AnyKind | None


@dataclass(frozen=True, eq=False)
class NSAContext(Generic[AnyKind]):
    """The results that `nsa` keeps for `nsa_backward`. The context refers to the floating-point arrays of the call, which must not
    change before `nsa_backward` has run.

    Attributes
    ----------
    block_indices : numpy.ndarray
        The selection: see `score_and_select_blocks`.
    gates : numpy.ndarray
        ``(B, N, H, 3)`` or ``(T, H, 3)``, float32 (float64 for float64).
    lse : dict
        Log-sum-exp by branch (``"compressed"``, ``"selected"``, ``"window"``): ``(B, N, H)`` or ``(T, H)``.
    shape : tuple of int
        The shape of the result.
    call, branches, groups, like
        In this order: the arrays and rules of the call, the results of the branches, the selected groups of compressed keys (None without
        `num_cmp_selected_blocks`), and the arrays as the caller gave them. Gradients need these attributes, which are not for callers, and
        may change.
    """

    block_indices: np.ndarray
    gates: np.ndarray
    lse: dict[str, np.ndarray]
    shape: tuple[int, ...]
    call: Call
    branches: list[np.ndarray]
    groups: np.ndarray | None
    like: tuple[Any, ...]  # the caller's q, k, v, weights and gates, whose kind and dtype the gradients get


# ---- Forward ------------------------------------------------------------------------------------------------------


def _context(call: Call, kept: Results, like: tuple[Any, ...]) -> NSAContext[Any]:
    """The context of a call, with the arrays that the call fills."""
    real, tokens = real_of(call.common.kind), call.q.shape[:-1]
    gates = kept.gates if call.gates.array is None else call.gates.array
    if gates is None:
        gates = np.broadcast_to(np.array(1 / 3, real), (*tokens, 3))
    lists = kept.lists if call.lists is None else call.lists.copy()  # the lists of a call may be the caller's array
    assert lists is not None
    lse = {name: x for name, x in zip(BRANCHES, kept.lse, strict=True) if x is not None}
    return NSAContext(lists, gates, lse, (*tokens, call.v.shape[-1]), call, kept.outs, kept.groups, like)


@overload
def nsa(q: Kind, k: Array, v: Array, *, return_context: Literal[False] = False, **options: Unpack[NSAOptions]) -> Kind: ...
@overload
def nsa(q: Kind, k: Array, v: Array, *, return_context: Literal[True], **options: Unpack[NSAOptions]) -> tuple[Kind, NSAContext[Kind]]: ...
@overload
def nsa(q: Array, k: Array, v: Array, *, return_context: Literal[False] = False, **options: Unpack[NSAOptions]) -> np.ndarray: ...
@overload
def nsa(
    q: Array, k: Array, v: Array, *, return_context: Literal[True], **options: Unpack[NSAOptions]
) -> tuple[np.ndarray, NSAContext[np.ndarray]]: ...
@overload
def nsa(q: Array, k: Array, v: Array, *, return_context: bool, **options: Unpack[NSAOptions]) -> Any: ...
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
    compressed_kv: Any = None,
    cu_seqlens: Any = None,
    cu_seqlens_q: Any = None,
    kv_lens: Any = None,
    out: Any = None,
    return_context: bool = False,
    dtype: Any = None,
    num_threads: int | None = None,
) -> Any:
    """Native sparse attention, strictly causal by default (``mode="paper"``); ``mode="mslk"`` looks ahead.

    Each query attends to three sets of keys: block means of the keys up to the query (compressed), the tokens of the blocks whose means
    score highest (selected), and the tokens near the query (window). The result is the sum of the three results, each times its gate.

    In causal calls with ``mode="paper"``, no output depends on a later token. In ``mode="mslk"``, the rule of MSLK ("upstream") [2]_, a
    query sees the compressed block that it lies in, so that its output depends on up to ``compress_block_size - 1`` *later* tokens. The
    selection of its tile depends on later queries of the tile, too. So this mode is not for models that generate text.

    Parameters
    ----------
    q : array
        ``(B, N, H, D)``, with `cu_seqlens` ``(T, H, D)``: float32, float16, bfloat16 or float64. D from 1 to 576. If `q` has fewer tokens
        than `k`, its tokens are the last tokens of `k`.
    k : array
        ``(B, N, Hkv, D)``, of the dtype of `q`. H must be a multiple of Hkv; query head h reads key head ``h // (H // Hkv)``.
    v : array
        ``(B, N, Hkv, Dv)``, of the dtype of `q`. Dv is from 1 to 576 and may differ from D.
    compress_block_size : int
        Number l of tokens per compressed block. Tokens after the last complete block are in no compressed block.
    num_selected_blocks : int
        Largest number n of blocks that are selected, including forced ones. In the context of a call, each list that the call has
        selected has n entries; unused ones are -1.
    window_size : int
        Number W of keys in the window, which ends with the query's own key. If not `causal`, the window has ``W // 2`` keys before the
        query, as many after it, and the query's own key.
    w_k_compress, w_v_compress : array, optional
        ``(Hkv, D, D)`` and ``(Hkv, Dv, Dv)``: block means, as rows, are multiplied by these matrices.
    gate_proj_weight : array, optional
        ``(H, 3, D)``: gates are ``sigmoid(q . weight)``, in the order compressed, selected, window.
    gates : array, optional
        ``(B, N, H, 3)``: the gates themselves, in place of `gate_proj_weight`. If neither is given, every gate is 1/3.
    causal : bool
        False: a query sees all compressed blocks, may select any block, and has a window that reaches both ways. In paper mode, the
        `local_blocks` forced blocks then begin ``local_blocks // 2`` blocks before the query's own block; forced blocks that do not exist
        are left out.
    scale : float, optional
        Factor of ``q k^T`` in every branch. Default: ``1 / sqrt(D)``.
    q_tile_size : int
        mslk mode: number of queries that share a selection. The last tile of a sequence may have fewer.
    num_cmp_selected_blocks : int, optional
        mslk mode: number of groups of 128 compressed keys that the compressed branch sees per tile and head. These are the groups with the
        highest mean score. Default: all groups.
    mode : {"paper", "mslk"}
        The rules of compressing and selecting: see the notes.
    compress_stride : int, optional
        Paper mode: number d of tokens from the start of one compressed block to the start of the next. It divides l and l'.
        Default: ``max(1, l // 2)``.
    select_block_size : int, optional
        Paper mode: number l' of tokens per selected block. Default: l.
    init_blocks, local_blocks : int
        Paper mode: numbers of blocks that are always selected, at the start of the sequence and up to the query's own block.
    block_indices : array_like of int, optional
        A selection that takes the place of the computed one, such as the selection of a context. Its shape is ``(B, Hkv, N, n)`` in paper
        mode and ``(B, H or Hkv, tiles, n)`` in mslk mode; with `cu_seqlens`, B is left out, and the rows of all sequences come one after
        the other. Rows end at the first -1.
    compressed_kv : tuple of array, optional
        ``(k_cmp, v_cmp)``: the result of `compress_kv` for `k` and `v` with the model's stride and weights, which is then not computed
        again. `w_k_compress` and `w_v_compress` must be left out.
    cu_seqlens : sequence of int, optional
        ``(sequences + 1,)`` numbers that rise from 0 to T: the sequences lie one after the other, and do not see each other. A sequence may
        have any length.
    cu_seqlens_q : sequence of int, optional
        The same numbers for `q`, if `q` has only the last tokens of each sequence; `cu_seqlens` then counts the tokens of `k`. Default:
        `cu_seqlens`.
    kv_lens : sequence of int, optional
        Without `cu_seqlens`: ``(B,)`` numbers of valid tokens of `k` and `v`, for a cache with room for more tokens. The queries of each
        sequence are its last valid tokens. `compressed_kv` may have room for more blocks, too.
    out : array, optional
        Where to write the result: a writable array of the result's shape and dtype that shares no memory with any input.
    return_context : bool
        Also return the context that `nsa_backward` needs. True requires a `q` with all tokens, and neither `compressed_kv` nor `kv_lens`.
    dtype : str or dtype, optional
        ``"bfloat16"`` says that uint16 arrays hold bfloat16 bits. Any other value is only checked against the arrays.
    num_threads : int, optional
        Threads for this call. Default: see `set_num_threads`. The result does not depend on it.

    Returns
    -------
    out : array
        An array of the shape of `q` with the last dimension of `v`, of the dtype and kind of `q`. The result of a branch in which a query
        sees no key is 0: the branch adds 0, or NaN if its gate is NaN or infinite.
    context : NSAContext
        With `return_context`.

    Raises
    ------
    TypeError
        An argument of the wrong kind: not an array, an unknown or mixed dtype, a fraction where an integer belongs.
    ValueError
        An argument of the wrong shape or out of range. The text names the argument, what was expected and what was given. Nothing has been
        written then.
    MemoryError
        The scratch memory could not be allocated.

    See Also
    --------
    NsaCache : keeps the keys of a model that generates text, and their compressed blocks.
    score_and_select_blocks : the selection by itself.
    blitz_attn.reference.nsa : the same in plain float64 NumPy.

    Notes
    -----
    ``mode="paper"`` follows the paper [1]_: compressed block i holds tokens ``[i d, i d + l)`` and is visible to query t if it is complete,
    that is, if ``i d + l - 1 <= t``. The probabilities of the compressed branch, summed over the heads of a KV group, score the blocks of
    l' tokens: block j gets the sum of ``p[(l'/d) j + a - b]`` over all ``a < l'/d`` and ``b < l/d`` (m and n in Eq. 9 and 10). So a
    compressed block counts once for each stride of d tokens that it shares with block j. For each KV head, a query selects up to n
    blocks that begin at or before it.

    ``mode="mslk"`` follows upstream's reference [2]_: blocks do not overlap, and block j is visible from its *first* token on. For each
    query head, a tile of queries selects among the complete blocks that begin before the tile's end, by the product of the compressed keys
    with the tile's mean query. Where upstream's fast path differs from its own reference, this function follows the reference: selected
    blocks are not widened to 128 tokens, the window of a causal call has W keys and not W + 1, the window of any other call reaches both
    ways, and the backward pass uses the lists of the forward pass. Three cases differ from the reference. N need not be a multiple of
    anything. Unused entries of a selection are -1 and attend to nothing, where upstream repeats block 0. A query that sees no selected
    token gets 0 from the selected branch, where upstream gives NaN.

    A call over the last queries of a sequence returns, bit for bit, their rows of the call over all queries. In mslk mode, these queries
    must begin where a tile begins, because a tile selects by all of its queries; and in this mode, later tokens may change the rows of
    earlier tokens. With `compressed_kv`, such a call reads the compressed keys and values, the selected blocks and the window, and no other
    tokens.

    Of blocks with equal scores, the lower is selected. Sums are made in float32 (float64 for float64). A long call without a context is
    computed in pieces of queries, so that the results of the three branches never exist as a whole. Memory is linear in the number of
    tokens.

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

    The last token alone, with compressed keys and values that the caller keeps:

    >>> compressed = nsa.compress_kv(k, v, 16, stride=8)
    >>> last = nsa.nsa(q[:, -1:], k, v, **sizes, compressed_kv=compressed)
    >>> bool((last == out[:, -1:]).all())
    True
    """
    options = Options(
        compress_block_size=compress_block_size,
        num_selected_blocks=num_selected_blocks,
        window_size=window_size,
        w_k_compress=w_k_compress,
        w_v_compress=w_v_compress,
        gate_proj_weight=gate_proj_weight,
        gates=gates,
        causal=causal,
        scale=scale,
        q_tile_size=q_tile_size,
        num_cmp_selected_blocks=num_cmp_selected_blocks,
        mode=mode,
        compress_stride=compress_stride,
        select_block_size=select_block_size,
        init_blocks=init_blocks,
        local_blocks=local_blocks,
        block_indices=block_indices,
        compressed_kv=compressed_kv,
        cu_seqlens=cu_seqlens,
        cu_seqlens_q=cu_seqlens_q,
        kv_lens=kv_lens,
        dtype=dtype,
        num_threads=num_threads,
    )
    return _computed(q, k, v, options, out, return_context)


def _computed(q: Any, k: Any, v: Any, options: Options, out: Any, return_context: Any = False) -> Any:
    """The result of `nsa`. With `lens` among the options, the rows of `q` behind a sequence's queries give 0."""
    o, call = options, checked(q, k, v, options)
    return_context = _arrays.flag(return_context, "return_context")
    if return_context and not (call.compresses and call.sequences.whole and o.kv_lens is None):
        raise ValueError("return_context: expected False where q has fewer tokens than k, or with compressed_kv or kv_lens, got True")
    kind, shape = call.common.kind, (*call.q.shape[:-1], call.v.shape[-1])
    result = Result(shape, kind, q, out, "out", dtype_of(o.dtype))
    refuse_overlaps(
        {"out": out}, q=call.q, k=call.k, v=call.v, w_k_compress=o.w_k_compress, w_v_compress=o.w_v_compress,
        gate_proj_weight=o.gate_proj_weight, gates=o.gates, block_indices=o.block_indices, cu_seqlens=o.cu_seqlens,
        cu_seqlens_q=o.cu_seqlens_q, kv_lens=o.kv_lens, lens=o.lens, k_cmp=None if call.compresses else call.k_cmp,
        v_cmp=None if call.compresses else call.v_cmp,
    )  # fmt: skip
    kept = kept_results(call) if return_context else None

    compress(call)
    room, heads = Room(kept), (call.q.shape[-2], call.k.shape[-2])
    batch = shape[0] if call.sequences.queries is None else 0
    for piece in pieces(batch, call.sequences, call.rules.tile, PIECE_ELEMENTS // shape[-1], heads):
        part = call.of_piece(piece)
        run(part, room.results(part, piece, heads[1]), result.array[piece.queries])
    if o.lens is not None:  # last, since `run` may still refuse q
        for first, end, queries in call.sequences.runs(batch):
            result.array[first:end, queries:] = 0
    if kept is None:
        return result.value
    return result.value, _context(call, kept, (q, k, v, o.w_k_compress, o.w_v_compress, o.gate_proj_weight, o.gates))


# The fields of `Options` for a call that names no option.
USUAL = {name: value for name, value in (nsa.__kwdefaults__ or {}).items() if name not in ("out", "return_context")}


# ---- Decode -------------------------------------------------------------------------------------------------------


class NsaCache:
    """Keys and values of sequences that grow, their compressed blocks, and the rules by which `nsa` attends to them.

    Memory doubles when it is full, so that appending a token costs the same on average, however long the sequences are. A block is
    compressed once, when its last token comes. A call that fails or is interrupted leaves the cache as it was.

    Results are bit-identical to those of `nsa` over the tokens so far. (While a sequence has so few tokens that each key head has at most
    eight queries, another kernel computes its results than in a call of `nsa` over more tokens. The results of these first tokens may
    therefore differ by rounding from the results of such a call.)

    Parameters
    ----------
    compress_block_size, compress_stride, w_k_compress, w_v_compress, mode
        As in `nsa`.
    dtype : str or dtype, optional
        ``"bfloat16"`` says that uint16 arrays hold bfloat16 bits. Any other value is only checked against the arrays.
    num_threads : int, optional
        Threads for each call. Default: see `set_num_threads`.
    **options
        Other rules of `nsa`: `num_selected_blocks`, `window_size`, `gate_proj_weight`, `causal`, `scale`, `select_block_size`,
        `init_blocks`, `local_blocks`, and in mslk mode `q_tile_size` and `num_cmp_selected_blocks`.

    Raises
    ------
    TypeError, ValueError
        As `nsa`, as far as arguments can be checked without tokens. The first tokens and queries show whether weights fit the heads.

    See Also
    --------
    nsa : the operation, which has `compressed_kv` for callers that keep arrays of their own.

    Examples
    --------
    >>> import numpy as np
    >>> from blitz_attn import nsa
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = (rng.standard_normal((1, 40, heads, 16), dtype=np.float32) for heads in (4, 2, 2))
    >>> sizes = {"compress_block_size": 8, "num_selected_blocks": 4, "window_size": 8}
    >>> cache = nsa.NsaCache(**sizes)
    >>> out = []
    >>> for tokens in (slice(0, 30), *(slice(n, n + 1) for n in range(30, 40))):  # a prompt, and then one token after the other
    ...     cache.append(k[:, tokens], v[:, tokens])
    ...     out.append(cache.attend(q[:, tokens]))
    >>> bool((np.concatenate(out, axis=1) == nsa.nsa(q, k, v, **sizes)).all())
    True
    """

    def __init__(
        self, *, compress_block_size: int = 64, compress_stride: int | None = None, w_k_compress: Array | None = None,
        w_v_compress: Array | None = None, mode: str = "paper", dtype: DType | None = None, num_threads: int | None = None,
        **options: Unpack[CacheRules],
    ) -> None:  # fmt: skip
        for name in options:
            if name not in RULES:
                raise TypeError(f"NsaCache() got an unexpected keyword argument {name!r}")
        own = {"compress_block_size": compress_block_size, "compress_stride": compress_stride, "mode": mode, "num_threads": num_threads}
        self._options = o = Options(**{**USUAL, **own, **options})
        rules = o.rules()
        window_and_groups(o.window_size, o.num_cmp_selected_blocks, rules)
        scale_of(o.scale, 1)
        kind = dtype_of(dtype)
        if o.gate_proj_weight is not None:
            check_gate_weight(o.gate_proj_weight, kind)
        self._store = Store(rules, w_k_compress, w_v_compress, kind, threads_of(num_threads))

    def __repr__(self) -> str:
        lens, rules = self._store.lens.tolist(), self._store.rules
        shown = ", ".join(map(str, lens[:SHOWN])) + (", ..." if len(lens) > SHOWN else "")
        return (
            f"NsaCache(batch={len(lens)}, lens=[{shown}], mode={rules.mode!r}, compress_block_size={rules.size}, "
            f"compress_stride={rules.stride}, select_block_size={rules.select}, num_selected_blocks={rules.count}, "
            f"window_size={self._options.window_size})"
        )

    @property
    def lens(self) -> np.ndarray:
        """``(B,)``: number of tokens of each sequence. The array is empty before the first `append`."""
        return self._store.lens.copy()

    def append(self, k: Array, v: Array, lens: Integers | None = None) -> None:
        """Appends new tokens to each sequence. The arrays are copied.

        Parameters
        ----------
        k, v : array
            ``(B, N, Hkv, D)`` and ``(B, N, Hkv, Dv)``: float32, float16, bfloat16 or float64. B, Hkv, D, Dv and dtype must be the same in
            each call.
        lens : sequence of int, optional
            ``(B,)``: only the first ``lens[b]`` of a sequence's N tokens are appended; its other tokens are not read. Default: all are
            appended.

        Raises
        ------
        TypeError, ValueError
            An argument of the wrong kind, shape or range. Nothing has been taken then.

        Examples
        --------
        Two prompts, of five tokens and of three:

        >>> import numpy as np
        >>> from blitz_attn import nsa
        >>> cache = nsa.NsaCache(compress_block_size=4)
        >>> k = np.ones((2, 5, 1, 8), np.float32)
        >>> cache.append(k, k, lens=[5, 3])
        >>> cache.lens.tolist()
        [5, 3]
        """
        self._store.append(k, v, lens)

    def crop(self, lens: IntOrIntegers) -> None:
        """Takes back the last tokens of sequences, such as draft tokens that a model has rejected.

        All later results are bit-identical to those without these tokens. No memory is freed.

        Parameters
        ----------
        lens : int or sequence of int
            How many tokens each sequence keeps: ``(B,)`` numbers, or one number for all, which leaves shorter sequences as they are.

        Raises
        ------
        TypeError, ValueError
            An argument of the wrong kind, shape or range. All tokens are kept then.

        Examples
        --------
        Of three draft tokens of each sequence, one and two are accepted:

        >>> import numpy as np
        >>> from blitz_attn import nsa
        >>> cache = nsa.NsaCache(compress_block_size=4)
        >>> k = np.ones((2, 10, 1, 8), np.float32)
        >>> cache.append(k[:, :7], k[:, :7])
        >>> before = cache.lens
        >>> cache.append(k[:, 7:], k[:, 7:])
        >>> cache.crop(before + [1, 2])
        >>> cache.lens.tolist()
        [8, 9]
        """
        self._store.crop(lens)

    def reorder(self, indices: Integers) -> None:
        """Rearranges, repeats and drops sequences, as beam search does.

        Parameters
        ----------
        indices : sequence of int
            Sequence n becomes a copy of the former sequence ``indices[n]``. A sequence may occur more than once, or not at all, and there
            may be more or fewer sequences than before: ``np.repeat(np.arange(B), beams)`` makes beams of prompts.

        Raises
        ------
        TypeError, ValueError
            An argument of the wrong kind, shape or range. Nothing has been moved then.

        Examples
        --------
        >>> import numpy as np
        >>> from blitz_attn import nsa
        >>> cache = nsa.NsaCache(compress_block_size=4)
        >>> k = np.ones((2, 5, 1, 8), np.float32)
        >>> cache.append(k, k, lens=[5, 3])
        >>> cache.reorder([1, 1, 0])
        >>> cache.lens.tolist()
        [3, 3, 5]
        """
        self._store.reorder(indices)

    @overload
    def attend(self, q: Kind, *, lens: Integers | None = None, gates: Array | None = None, out: Array | None = None) -> Kind: ...
    @overload
    def attend(self, q: Array, *, lens: Integers | None = None, gates: Array | None = None, out: Array | None = None) -> np.ndarray: ...
    def attend(self, q: Any, *, lens: Any = None, gates: Any = None, out: Any = None) -> Any:
        """The results of queries that are the last tokens of each sequence.

        Parameters
        ----------
        q : array
            ``(B, N, H, D)``: the queries of the last N tokens of each sequence, whether these were appended at once or not. Without
            `lens`, no sequence may have fewer than N tokens. If B is 0, N may be any number.
        lens : sequence of int, optional
            ``(B,)``: only the first ``lens[b]`` of a sequence's N rows are queries: those of its last ``lens[b]`` tokens. The other rows
            have no influence, and their results are 0. Each number is at least 0, at most N and at most the number of tokens of the
            sequence. Default: N.
        gates, out
            As in `nsa`.

        Returns
        -------
        array
            ``(B, N, H, Dv)``, of the dtype and kind of `q`.

        Raises
        ------
        TypeError, ValueError
            As `nsa`, and if no tokens have been appended.

        Examples
        --------
        >>> import numpy as np
        >>> from blitz_attn import nsa
        >>> cache = nsa.NsaCache(compress_block_size=4)
        >>> k = np.ones((2, 5, 1, 8), np.float32)
        >>> cache.append(k, k)
        >>> cache.attend(np.ones((2, 1, 4, 8), np.float32)).shape
        (2, 1, 4, 8)

        Two prompts, of five tokens and of three:

        >>> cache = nsa.NsaCache(compress_block_size=4)
        >>> cache.append(k, k, lens=[5, 3])
        >>> out = cache.attend(np.ones((2, 5, 4, 8), np.float32), lens=[5, 3])
        >>> out[1, :, 0, 0].astype(bool).tolist()
        [True, True, True, False, False]
        """
        store = self._store
        shape = _arrays.shape_of(q)
        held, arrays = store.held(shape[1] if len(shape) == 4 else 0)
        if not arrays:
            raise ValueError("q: expected tokens appended before the first queries, got none")
        if lens is None and len(shape) == 4 and len(held.lens) == shape[0] and (short := np.flatnonzero(held.lens < shape[1])).size:
            n = short[0]
            raise ValueError(
                f"q: expected at most the {held.lens[n]} tokens of sequence {n}, got {shape[1]} (lens= gives the tokens of each sequence)"
            )
        k, v, *compressed = arrays
        options = replace(
            self._options, compressed_kv=compressed, kv_lens=held.ragged_lens, lens=lens, gates=gates,
            dtype="bfloat16" if held.kind == "bfloat16" else store.dtype,
        )  # fmt: skip
        try:
            return _computed(q, k, v, options, out)
        except (TypeError, ValueError):
            store.refuse_queries(q)
            raise


# ---- Backward -----------------------------------------------------------------------------------------------------


def nsa_backward(dout: Array, ctx: NSAContext[AnyKind], *, num_threads: int | None = None) -> NSAGradients[AnyKind]:
    """Gradients of the arrays that `nsa` was given. The selection counts as constant.

    Parameters
    ----------
    dout : array
        Gradient of the result, with the shape and dtype of the result.
    ctx : NSAContext
        The context that ``nsa(..., return_context=True)`` returned. It can be used any number of times.
    num_threads : int, optional
        Threads for this call. Default: see `set_num_threads`. The result does not depend on it.

    Returns
    -------
    NSAGradients
        ``(dq, dk, dv, dw_k_compress, dw_v_compress, dgate_proj_weight, dgates)``, where each gradient has the shape, dtype and kind of its
        array. None for an array that was not given.

    Raises
    ------
    TypeError
        `ctx` is not a context, or `dout` is not an array of the dtype of the result.
    ValueError
        `dout` has another shape than the result of the call that made the context.

    See Also
    --------
    blitz_attn.reference.nsa_backward : the same in plain float64 NumPy.

    Notes
    -----
    The gates come first: they give ``do_c = g_c dout``, and the gradients of queries and weights through the sigmoid. Then comes the
    gradient of attention in each branch, with the log-sum-exp of the forward pass. Last, the gradients of compressed keys and values go
    back through their weights to the tokens of their blocks. The scores of the selection have no gradient, as in upstream's program and in
    the paper. The gradients of keys and values, compressed ones included, and of weights are summed in float32 (float64 for float64), in an
    order that does not depend on the threads of this library or of BLAS, and rounded once.

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
    call, kind = ctx.call, ctx.call.common.kind
    common = call.common._replace(threads=threads_of(num_threads))
    gradient = same_kind(dout, "dout", kind, kind, "the result")
    expect_shape(gradient, "dout", ctx.shape, "of the result")
    q_like, k_like, v_like, *weight_likes = ctx.like
    dq, dk, dv = (Result(x.shape, kind, like) for x, like in zip((call.q, call.k, call.v), (q_like, k_like, v_like), strict=True))

    w_gate, gates = call.w_gate.array, call.gates.array
    dgates = None if gates is None else np.empty(gates.shape, real_of(kind))
    dw_gate = None if w_gate is None else np.empty(w_gate.shape, real_of(kind))
    weight_grads = [None if w.array is None else np.empty(w.array.shape, real_of(kind)) for w in (call.w_k, call.w_v)]
    sums = [sums_for(x.array, kind) for x in (dk, dv)]
    heads, threads = (call.q.shape[-2], call.k.shape[-2]), common.threads or _core.get_num_threads()
    most = PIECE_ELEMENTS * threads // max(call.q.shape[-1], call.v.shape[-1])  # enough heads to keep all threads at work
    memory: dict[str, np.ndarray] = {}  # for results that are needed only while a piece is computed

    def room(name: str, shape: tuple[int, ...]) -> np.ndarray:
        if name not in memory:  # the first piece is the largest
            memory[name] = np.empty(shape, storage(kind))
        return memory[name][..., : shape[-2], :]

    for piece in pieces_of_heads(call.sequences, call.q[..., 0, 0].size, most, heads):
        part, at = call.of_piece(piece), piece.queries
        douts = [room(f"dout {name}", gradient[at].shape) for name in BRANCHES]
        dqs = [room(f"dq {name}", part.q.shape) for name in BRANCHES]
        if w_gate is not None:
            dqs.append(room("dq", part.q.shape))
        _core.gate_backward(
            None if w_gate is None else part.q, part.w_gate.array, gates=None if gates is None and w_gate is None else ctx.gates[at],
            branches=tuple(x[at] for x in ctx.branches), dout=gradient[at], dbranches=tuple(douts),
            dgates=None if dgates is None else dgates[at], dq=None if w_gate is None else dqs[-1],
            dgate_proj_weight=None if dw_gate is None else dw_gate[piece.heads[0]], dtype=kind, num_threads=common.threads,
        )  # fmt: skip
        own = [x[piece.keys] for x in sums]
        lists = piece.lists(ctx.block_indices, heads[1])
        groups = None if ctx.groups is None else piece.lists(ctx.groups, heads[1])
        for c, (keys, values, branch) in enumerate(part.branches(lists, groups)):
            into = [np.zeros(x.shape, real_of(kind)) for x in (keys, values)] if c == 0 else own
            grads = (dqs[c], into[0], into[1])
            lse = ctx.lse[BRANCHES[c]][at]
            attend_backward(douts[c], part.q, keys, values, ctx.branches[c][at], lse, grads, common, branch, accumulate=True)
            if c == 0:  # from compressed keys and values back to the tokens, where the other branches add theirs
                sizes = call.rules.size, call.rules.stride, call.sequences
                for n, (x, w) in enumerate(((part.k, call.w_k.array), (part.v, call.w_v.array))):
                    weight = None if w is None else w[piece.heads[1]]
                    dweight, all_dweights = compress_gradients(into[n], x, weight, own[n], kind, *sizes, common.threads), weight_grads[n]
                    if all_dweights is not None:
                        all_dweights[piece.heads[1]] = dweight
        add_rounded(dqs, dq.array[at], kind, common.threads)
    for result, total in zip((dk, dv), sums, strict=True):
        round_into(result.array, total, kind)
    kinds = (call.w_k.kind, call.w_v.kind, call.w_gate.kind, call.gates.kind)
    made = [
        None if x is None else rounded(x, real_of(kind), own, like)
        for x, own, like in zip((*weight_grads, dw_gate, dgates), kinds, weight_likes, strict=True)
    ]
    return NSAGradients(dq.value, dk.value, dv.value, *made)
