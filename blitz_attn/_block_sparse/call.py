"""Block-sparse attention, forward and backward: softmax attention in which lists of key blocks say which keys each block of queries
attends to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

from numpy import empty, ndarray

from .. import _arrays, _core
from .._arrays import bias_for_core, is_registered, refuse_block_mask
from .._floats import refuse_overlaps
from .._names import Layout
from .._sabi.block_list import block_shape_for

if TYPE_CHECKING:
    from typing import TypedDict

    from .._types import Array, ArrayLike, DType, Integers, IntOrIntegers, Kind

    # Options that functions take by name, for overloads here and elsewhere.

    class Places(TypedDict, total=False):
        """The keys that a query may see, and the order of the axes."""

        scale: float | None
        layout: Layout
        causal: bool
        window: tuple[int, int] | None
        q_lens: Integers | None
        kv_lens: Integers | None
        cu_seqlens_q: Integers | None
        cu_seqlens_kv: Integers | None
        num_heads: int | None
        num_kv_heads: int | None
        kv_ranges: Array | None
        num_threads: int | None

    class Biases(TypedDict, total=False):
        """The options that change scores."""

        attn_mask: Array | None
        alibi_slopes: ArrayLike | None
        softcap: float | None

    class Slice(TypedDict, total=False):
        """The place of the queries if they are a slice of a longer call's queries."""

        q_begin: IntOrIntegers | None
        q_total: IntOrIntegers | None

    class Outputs(TypedDict, total=False):
        """The place and the form of results."""

        out_dtype: DType | None
        out: Array | tuple[Array | None, Array | None] | None
        dtype: DType | None

    class AttentionRules(Places, Biases, total=False):
        """All rules of attention over sequences except the list."""

        sinks: ArrayLike | None

    class SparseRules(AttentionRules, total=False):
        """Options of `blitz_attn.integrations.torch.block_sparse_attention`."""

        block_shape: tuple[int, int] | None

    class SparseSliceRules(SparseRules, Slice, total=False):
        """Options of `blitz_attn.integrations.jax.block_sparse_attention`."""

    class SparseOptions(SparseSliceRules, Outputs, total=False):
        """Options of `blitz_attn.block_sparse_attention`."""

    class SparseGradientOptions(Places, Biases, Slice, total=False):
        """Options of `blitz_attn.block_sparse_attention_backward`."""

        block_shape: tuple[int, int] | None
        dlse: Array | None
        grads: tuple[Array | None, ...] | None  # of q, k and v
        accumulate: bool
        dtype: DType | None

__all__ = ["block_sparse_attention", "block_sparse_attention_backward"]


@overload
def block_sparse_attention(
    q: Kind, k: Array, v: Array, sabi: Array | None = None, *, return_lse: Literal[False] = False, **options: Unpack[SparseOptions]
) -> Kind: ...
@overload
def block_sparse_attention(
    q: Kind, k: Array, v: Array, sabi: Array | None = None, *, return_lse: Literal[True], **options: Unpack[SparseOptions]
) -> tuple[Kind, Kind]: ...
@overload
def block_sparse_attention(
    q: Array, k: Array, v: Array, sabi: Array | None = None, *, return_lse: Literal[False] = False, **options: Unpack[SparseOptions]
) -> ndarray: ...
@overload
def block_sparse_attention(
    q: Array, k: Array, v: Array, sabi: Array | None = None, *, return_lse: Literal[True], **options: Unpack[SparseOptions]
) -> tuple[ndarray, ndarray]: ...
@overload
def block_sparse_attention(
    q: Array, k: Array, v: Array, sabi: Array | None = None, *, return_lse: bool, **options: Unpack[SparseOptions]
) -> Any: ...
def block_sparse_attention(
    q: Any,
    k: Any,
    v: Any,
    sabi: Any = None,
    *,
    block_shape: tuple[int, int] | None = None,
    scale: float | None = None,
    layout: Layout = "BNSD",
    causal: bool = False,
    window: tuple[int, int] | None = None,
    q_lens: Any = None,
    kv_lens: Any = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_kv: Any = None,
    num_heads: int | None = None,
    num_kv_heads: int | None = None,
    q_begin: Any = None,
    q_total: Any = None,
    kv_ranges: Any = None,
    attn_mask: Any = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
    softcap: float | None = None,
    return_lse: bool = False,
    out_dtype: Any = None,
    out: Any = None,
    dtype: Any = None,
    num_threads: int | None = None,
) -> Any:
    """Attention over listed blocks of keys, with the log-sum-exp of the scores on request.

    ``out = softmax(scale * q k^T) v``, where a query sees a key when the key's block is listed for the query's block
    *and* the token rules (`causal`, `window`, `q_lens`, `kv_lens`, `kv_ranges`, `attn_mask`) allow it. Rules cut inside a listed
    block, to the token. A query that sees no key at all gets output 0 and, without `sinks`, log-sum-exp ``-inf``.

    Parameters
    ----------
    q : array
        Queries, ``(B, H, Sq, D)`` for layout BNSD: float32, float16, bfloat16 or float64. D from 1 to 576.
    k : array
        Keys, ``(B, Hkv, Skv, D)``, of the dtype of `q`. H must be a multiple of Hkv; query head h reads key head ``h // (H // Hkv)``.
    v : array
        Values, ``(B, Hkv, Skv, Dv)``, of the dtype of `q`. Dv is from 1 to 576 and may differ from D.
    sabi : array of int, optional
        Sparse attention block indices, an array of four axes: B or 1; H, Hkv or 1; ``ceil(Sq / block_shape[0])`` rows; W. So there is one
        list for each query head, one for each key head, which its query heads share, or one for all heads. The first axis, or the first
        two, may be missing: they then count as 1. With layout TND, B is the number of sequences, rows are counted from the start of each
        sequence, and their number is ``ceil(longest / block_shape[0])``, where longest is the largest number of queries of a sequence. Each
        row lists the columns of the key blocks that a block of queries sees, in any order, none of them twice. A row ends at the first pad:
        65535 for uint16, any negative entry for int16, int32 and int64. None: every block is listed.
    block_shape : (int, int), optional
        Number of tokens per block of queries and per block of keys, at least 1 each: the shape that `sabi` was made for. The last block of
        either axis may be partial. Default: the block shape that the list knows (`blitz_attn.sabi.BlockList`), or (128, 128) for other
        arrays. A shape that contradicts the list is refused.
    scale : float, optional
        Factor of ``q k^T``. Default: ``1 / sqrt(D)``.
    layout : {"BNSD", "BSND", "BSH", "TND"}
        Order of the axes of q, k, v and out: ``(B, H, S, D)``, ``(B, S, H, D)``, ``(B, S, H * D)`` with `num_heads`,
        or ``(T, H, D)``, sequences of different lengths one after the other, with `cu_seqlens_q` and `cu_seqlens_kv`.
    causal : bool
        Query i sees key j only when ``j <= i + kv_len - q_len``, a rule aligned to the bottom right; with `q_begin`, only when
        ``j <= i + q_begin``.
    window : (int, int), optional
        Numbers of tokens that are seen before and after the diagonal of `causal`; -1 sets no bound.
    q_lens, kv_lens : sequence of int, optional
        ``(B,)``: number of valid tokens of each batch entry. Rows from ``q_lens[b]`` on give output 0 and
        log-sum-exp ``-inf``.
    cu_seqlens_q, cu_seqlens_kv : sequence of int, optional
        Layout TND: ``(B + 1,)`` cumulative lengths that rise from 0 to T.
    num_heads, num_kv_heads : int, optional
        Layout BSH: numbers of heads in q, and in k and v (default: `num_heads`). In other layouts, they are checked against the arrays.
    q_begin : int or sequence of int, optional
        For queries that are a slice of a longer sequence: the token number of query 0, one number or one for each batch entry (layout TND:
        for each sequence). Query i then stands at ``i + q_begin`` in `causal` and `window`, and `kv_lens` still bounds the keys. The number
        is between -2**30 and 2**30, both excluded. It is negative where the first queries come before the first key. Default: the queries
        are the last tokens.
    q_total : int or sequence of int, optional
        For queries that are a slice of a whole call: the number of valid queries of that call, which is at least the number of the slice.
        Kernels are then chosen as for the whole call: see the notes. Default: the queries are the whole.
    kv_ranges : array of int, optional
        ``(B, Sq, 2)``, or ``(1, Sq, 2)`` or ``(Sq, 2)`` for all batch entries, or ``(T, 2)`` for layout TND; int32 or int64: query i sees
        key j only when ``kv_ranges[b, i, 0] <= j < kv_ranges[b, i, 1]``, counted in its own sequence, and the other rules allow it. Ranges
        express every rule that gives each query one run of keys: documents, chunks, a prefix that sees itself as a whole, images whose
        tokens see one another (then with ``causal=False``). Ranges may be empty, and may reach beyond the keys.
    attn_mask : array, optional
        ``(B, H, Sq, Skv)``, or any shape that broadcasts to it, in every layout; with layout TND, Sq and Skv are the lengths of the longest
        sequences, and a sequence reads the first rows and columns. A mask of bool hides the key from the query where it is False, as the
        other rules do. A mask of float32, float16, bfloat16 or float64 is added to the scores (after `scale` and `softcap`), and hides the
        key where it is -inf. Unless `q` is float64, a number below about -2.3e38, such as the lowest of float32, counts as -inf, and a
        number above about 2.3e38 makes the result NaN, as infinity does. A mask must be read to find the keys that it hides. Leave blocks
        that it hides from all queries out of `sabi`, and express runs of keys by `kv_ranges`, to save this time.
    alibi_slopes : array_like, optional
        ``(H,)`` float32: ``-alibi_slopes[h] * abs(d - j)`` is added to the score of query i and key j, where d is the query's position
        among the keys, as in `causal`.
    sinks : array_like, optional
        ``(H,)`` float32: one more score per head, which takes part in the softmax but has no value. The log-sum-exp includes it. A
        sink beyond about +-2.3e38 counts as infinite, unless `q` is float64.
    softcap : float, optional
        Replaces each score by ``softcap * tanh(score / softcap)``. It is from 1e-37 to 1e37 (for float64, from 1e-300 to 1e300). None or 0:
        scores are not capped.
    return_lse : bool
        Also return the log-sum-exp.
    out_dtype : str or dtype, optional
        ``"float32"`` with float16 and bfloat16 inputs returns the float32 result before rounding; rounding it gives exactly the default
        result. Default: the dtype of `q`.
    out : array, optional
        Where to write the result: a writable array of the result's shape and dtype that shares no memory with any input. With `return_lse`,
        it may be a pair ``(out, lse)``, of which either may be None.
    dtype : str or dtype, optional
        ``"bfloat16"`` says that uint16 arrays among q, k, v and out hold bfloat16 bits. Any other value is only checked against the arrays.
    num_threads : int, optional
        Threads for this call. Default: see `set_num_threads`. The result does not depend on it.

    Returns
    -------
    out : array
        ``(B, H, Sq, Dv)`` in the layout and dtype of `q` (or `out_dtype`), and the same kind of array: torch tensors come back as torch
        tensors, JAX arrays as JAX arrays.
    lse : array
        With `return_lse`: ``(B, H, Sq)``, for layout TND ``(T, H)``; float32, for float64 inputs float64. It is the natural log of the sum
        of ``exp(score)`` over the keys that the query sees. A score is ``scale * q.k``, capped with `softcap`, plus the bias of `attn_mask`
        and `alibi_slopes`. With `sinks`, the sum has one more term, even where no key is seen.

    Raises
    ------
    TypeError
        An argument of the wrong kind: not an array, an unknown or mixed dtype, foreign byte order, a float where an
        integer belongs.
    ValueError
        An argument of the wrong shape or out of range, such as a block listed twice or beyond the last key, or an
        array whose last axis is not contiguous. The text names the argument, what was expected and what was given. No output
        has been written then.
    MemoryError
        The scratch memory, which does not grow with the square of the length, could not be allocated.

    See Also
    --------
    blitz_attn.sabi : makes, converts and describes block lists.
    blitz_attn.merge_states : joins results over disjoint sets of keys.
    blitz_attn.block_sparse_attention_backward : its gradients.
    blitz_attn.reference.block_sparse_attention : the same in plain float64 NumPy.

    Notes
    -----
    Sums and the log-sum-exp are accumulated in float32 (float64 for float64). Strided views whose last axis is contiguous are read in
    place; no array of size Sq x Skv is ever built. The result has the same bits for any number of threads, and whatever else is in the
    batch.

    The result of a slice of the queries, from row a on, can be bit-identical to the same rows of the whole call, however many rows the
    slice has. The call of the slice needs the same keys; the rows of `sabi` that cover the slice, from row ``a // block_shape[0]`` on (a
    must be a multiple of ``block_shape[0]``); ``q_begin = a + kv_len - q_len``; and ``q_total = q_len``. Here kv_len and q_len are the
    lengths of the whole call. Without `q_total`, a slice may differ by rounding, because calls of a few queries have a kernel of their own.

    `block_sparse_attention_backward` needs no `sinks`, because the log-sum-exp includes them. The gradient of the sinks themselves is
    ``-(np.exp(sinks - lse) * (dout * out).sum(-1))``, summed over the queries of a head.

    The operation and the index format follow the BlitzSparseAttention operator of the CANN operator library [1]_; the
    online softmax follows FlashAttention [2]_.

    References
    ----------
    .. [1] CANN ops-transformer, experimental/attention/blitz_sparse_attention.
    .. [2] T. Dao, "FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning", 2023.

    Examples
    --------
    >>> import numpy as np
    >>> import blitz_attn
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = (rng.standard_normal((1, 2, 256, 64), dtype=np.float32) for _ in range(3))
    >>> sabi = np.array([[[[0, -1], [1, 0]]]], dtype=np.int16)  # block row 0 sees block 0, row 1 sees both
    >>> out, lse = blitz_attn.block_sparse_attention(q, k, v, sabi, causal=True, return_lse=True)
    >>> exact, exact_lse = blitz_attn.reference.block_sparse_attention(q, k, v, sabi, causal=True, return_lse=True)
    >>> bool(np.abs(out - exact).max() < 1e-5), bool(np.abs(lse - exact_lse).max() < 1e-5)
    (True, True)

    The result of the second block of queries by itself is bit-identical:

    >>> part = blitz_attn.block_sparse_attention(q[:, :, 128:], k, v, sabi[:, :, 1:], causal=True, q_begin=128, q_total=256)
    >>> bool((part == out[:, :, 128:]).all())
    True
    """
    if sinks is not None:
        sinks = _arrays.float32_numbers(sinks, "sinks")
    if sabi is not None and type(sabi) is not ndarray:
        refuse_block_mask(sabi, "sabi")
        block_shape = block_shape_for(sabi, block_shape)
    if not (attn_mask is alibi_slopes is None):
        attn_mask, alibi_slopes = bias_for_core(attn_mask, alibi_slopes)
    if (  # plain NumPy arrays: nothing to translate
        type(q) is type(k) is type(v) is ndarray
        and out is out_dtype is dtype is None
        and not (is_registered(q) or is_registered(k) or is_registered(v))
    ):
        # If the number of positional arguments plus twice the number of keyword arguments is above 30, CPython 3.11 first makes a dict of
        # the keywords, which slows small calls down. So both calls of this function pass the first arguments by position.
        return _core.block_sparse_attention(
            empty, q, k, v, sabi, block_shape, scale, layout, causal, window, q_lens, kv_lens, cu_seqlens_q, cu_seqlens_kv, num_heads,
            num_kv_heads, None, num_threads, q_begin, kv_ranges, q_total, attn_mask, alibi_slopes, softcap, sinks=sinks,
            return_lse=return_lse,
        )  # fmt: skip

    family = _arrays.family_of(q)
    out, lse_out = _arrays.split_out(out, return_lse)
    has_lengths = not (q_lens is kv_lens is cu_seqlens_q is cu_seqlens_kv is q_begin is q_total is None)
    if has_lengths and not (out is lse_out is None):  # the core copies lengths, so it cannot see that an output overlaps them
        refuse_overlaps(
            {"out": out, "lse": lse_out}, q_lens=q_lens, kv_lens=kv_lens, cu_seqlens_q=cu_seqlens_q, cu_seqlens_kv=cu_seqlens_kv,
            q_begin=q_begin, q_total=q_total,
        )  # fmt: skip
    result = _core.block_sparse_attention(
        family.empty, _arrays.readable(q, "q"), _arrays.readable(k, "k"), _arrays.readable(v, "v"), sabi, block_shape, scale, layout,
        causal, window, q_lens, kv_lens, cu_seqlens_q, cu_seqlens_kv, num_heads, num_kv_heads, _arrays.dtype_name(dtype), num_threads,
        q_begin, kv_ranges, q_total, attn_mask, alibi_slopes, softcap, sinks=sinks, return_lse=return_lse,
        out_dtype=_arrays.dtype_name(out_dtype, "out_dtype"), out=_arrays.writable(out, "out"), lse_out=_arrays.writable(lse_out, "lse"),
    )  # fmt: skip
    if not return_lse:
        return _arrays.finished(result, out, family)
    return _arrays.finished(result[0], out, family), _arrays.finished(result[1], lse_out, family)


@overload
def block_sparse_attention_backward(
    dout: Array, q: Kind, k: Array, v: Array, out: Array, lse: Array, sabi: Array | None = None, *, bias_grads: Literal[False] = False,
    **options: Unpack[SparseGradientOptions],
) -> tuple[Kind, Kind, Kind]: ...  # fmt: skip
@overload
def block_sparse_attention_backward(
    dout: Array, q: Kind, k: Array, v: Array, out: Array, lse: Array, sabi: Array | None = None, *, bias_grads: Literal[True],
    **options: Unpack[SparseGradientOptions],
) -> tuple[Kind, Kind, Kind, Kind | None, Kind | None]: ...  # fmt: skip
@overload
def block_sparse_attention_backward(
    dout: Array, q: Array, k: Array, v: Array, out: Array, lse: Array, sabi: Array | None = None, *, bias_grads: Literal[False] = False,
    **options: Unpack[SparseGradientOptions],
) -> tuple[ndarray, ndarray, ndarray]: ...  # fmt: skip
@overload
def block_sparse_attention_backward(
    dout: Array, q: Array, k: Array, v: Array, out: Array, lse: Array, sabi: Array | None = None, *, bias_grads: Literal[True],
    **options: Unpack[SparseGradientOptions],
) -> tuple[ndarray, ndarray, ndarray, ndarray | None, ndarray | None]: ...  # fmt: skip
@overload
def block_sparse_attention_backward(
    dout: Array, q: Array, k: Array, v: Array, out: Array, lse: Array, sabi: Array | None = None, *, bias_grads: bool,
    **options: Unpack[SparseGradientOptions],
) -> tuple[Any, ...]: ...  # fmt: skip
def block_sparse_attention_backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    sabi: Any = None,
    *,
    block_shape: tuple[int, int] | None = None,
    scale: float | None = None,
    layout: Layout = "BNSD",
    causal: bool = False,
    window: tuple[int, int] | None = None,
    q_lens: Any = None,
    kv_lens: Any = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_kv: Any = None,
    num_heads: int | None = None,
    num_kv_heads: int | None = None,
    q_begin: Any = None,
    q_total: Any = None,
    kv_ranges: Any = None,
    attn_mask: Any = None,
    alibi_slopes: Any = None,
    softcap: float | None = None,
    dlse: Any = None,
    grads: Any = None,
    bias_grads: bool = False,
    accumulate: bool = False,
    dtype: Any = None,
    num_threads: int | None = None,
) -> tuple[Any, ...]:
    """Gradients of `block_sparse_attention` with respect to q, k and v and, if `bias_grads`, to `attn_mask` and `alibi_slopes`.

    Let ``P = exp(scale * q k^T + bias - lse)`` where a query sees a key, and 0 elsewhere, with the bias of `attn_mask` and `alibi_slopes`.
    Then ``dS = P * (dout v^T - dout . out + dlse)``, ``dq = scale * dS k``, ``dk = scale * dS^T q``, ``dv = P^T dout``. With a `softcap`
    and ``T = tanh(scale * q k^T / softcap)``, ``softcap * T`` takes the place of ``scale * q k^T``, and dS is multiplied by ``1 - T^2`` in
    dq and dk. `dk` and `dv` are sums over the query heads that read a key head. The gradient of an element of `attn_mask` is the sum of dS
    over all pairs that it is added to, and the gradient of a slope is the sum of ``-abs(d - j) * dS``. A query that sees no key has
    gradient 0 and adds nothing to any other gradient.

    Parameters
    ----------
    dout : array
        Gradient of the loss with respect to `out`, with the shape and dtype of `out`.
    q, k, v : array
        As in the forward call: ``(B, H, Sq, D)``, ``(B, Hkv, Skv, D)`` and ``(B, Hkv, Skv, Dv)`` for layout BNSD; float32,
        float16, bfloat16 or float64.
    out : array
        The output of the forward call: ``(B, H, Sq, Dv)`` in the layout and dtype of `q`.
    lse : array
        The log-sum-exp of the forward call: ``(B, H, Sq)``, for layout TND ``(T, H)``; float32, for float64 inputs float64. A query whose
        entry is ``-inf`` attended to no key. If the forward call had `sinks`, `lse` already includes them.
    sabi, block_shape, scale, layout, causal, window, q_lens, kv_lens, cu_seqlens_q, cu_seqlens_kv, num_heads, num_kv_heads
        As in the forward call: see `block_sparse_attention`.
    q_begin, q_total, kv_ranges, attn_mask, alibi_slopes, softcap
        As in the forward call: see `block_sparse_attention`.
    dlse : array, optional
        Gradient of the loss with respect to `lse`, with the shape and dtype of `lse`. It is for a loss that depends on `lse`, such as one
        of merged partial results or of distillation. Default: 0.
    grads : tuple of array, optional
        Where to write the results: ``(dq, dk, dv)``, writable arrays of the shapes and dtype of q, k and v that share no memory with any
        other array of the call. Any of the three may be None.
    bias_grads : bool
        Also return the gradients of `attn_mask` and `alibi_slopes`, for biases that are learned (a table of relative positions, say). These
        gradients take a pass of their own: the call takes 1.5 to 3 times as long. Default: False.
    accumulate : bool
        Add the gradients of k and v to the contents of `dk` and `dv` of `grads`. These two arrays must then be given, in float32 (float64
        for float64), whatever the dtype of k and v. Rows of `dk` and `dv` in blocks that no list names are neither read nor written. Sums
        over several calls are then rounded only once, by the caller.
    dtype : str or dtype, optional
        ``"bfloat16"`` says that uint16 arrays hold bfloat16 bits. Any other value is only checked against the arrays.
    num_threads : int, optional
        Threads for this call. Default: see `set_num_threads`. The result does not depend on it.

    Returns
    -------
    dq, dk, dv : array
        Of the shapes, layout and dtype of q, k and v, and the same kind of array as `q`. With `accumulate`, `dk` and `dv` are the arrays of
        `grads`.
    dattn_mask, dalibi_slopes : array or None
        With `bias_grads`: of the shape and dtype of `attn_mask`, and ``(H,)`` of float32, both of the kind of array of `attn_mask`, or of
        `q` where there is no mask. None for a bias that is not given, and for a mask of bool. An element of the mask that serves several
        heads, batch entries, queries or keys gets the sum of their gradients. An element of -inf gets 0.

    Raises
    ------
    TypeError
        An argument of the wrong kind: not an array, an unknown or mixed dtype, foreign byte order, a float where an
        integer belongs.
    ValueError
        An argument of the wrong shape or out of range, such as an `lse` or `out` that does not fit `q`. The text names the
        argument, what was expected and what was given. Nothing has been written then.
    MemoryError
        The scratch memory could not be allocated.

    See Also
    --------
    blitz_attn.block_sparse_attention : the forward pass, which gives `out` and `lse` with ``return_lse=True``.
    blitz_attn.reference.block_sparse_attention_backward : the same in plain float64 NumPy.

    Notes
    -----
    Probabilities are recomputed from `lse`; no array of size Sq x Skv is ever built. Sums are accumulated in float32 (float64 for float64),
    for float16 and bfloat16 in scratch memory of 4 bytes per element of k and v. The results have the same bits for any number of threads,
    and whatever else is in the batch. With every block listed, `dq` has the bits of a call with ``sabi=None``. The same holds for `dk` and
    `dv` where ``block_shape[0]`` is a multiple of 128; for other sizes, their sums are taken in another order. For a slice of the queries,
    `dq` is bit-identical to these rows of the whole call (see the notes of `block_sparse_attention`), and `dk` and `dv` are the slice's
    share of the sums. Keys and values that a query does not see, NaN and infinity included, add exactly nothing to its gradients.

    The recomputation and the role of ``dout . out`` follow FlashAttention-2 [1]_, algorithm 2.

    References
    ----------
    .. [1] T. Dao, "FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning", 2023.

    Examples
    --------
    >>> import numpy as np
    >>> import blitz_attn
    >>> rng = np.random.default_rng(0)
    >>> q, k, v, dout = (rng.standard_normal((1, 2, 256, 64), dtype=np.float32) for _ in range(4))
    >>> out, lse = blitz_attn.block_sparse_attention(q, k, v, causal=True, return_lse=True)
    >>> dq, dk, dv = blitz_attn.block_sparse_attention_backward(dout, q, k, v, out, lse, causal=True)
    >>> exact = blitz_attn.reference.block_sparse_attention_backward(dout, q, k, v, out, lse, causal=True)
    >>> [bool(np.abs(ours - theirs).max() < 1e-5) for ours, theirs in zip((dq, dk, dv), exact)]
    [True, True, True]

    A bias that is learned, here one number for each distance between a query and a key:

    >>> table = np.linspace(-1, 1, 511, dtype=np.float32)
    >>> distance = 255 + np.arange(256)[:, None] - np.arange(256)  # 0 .. 510
    >>> out, lse = blitz_attn.block_sparse_attention(q, k, v, attn_mask=table[distance], return_lse=True)
    >>> grads = blitz_attn.block_sparse_attention_backward(
    ...     dout, q, k, v, out, lse, attn_mask=table[distance], bias_grads=True
    ... )
    >>> dtable = np.bincount(distance.ravel(), grads[3].ravel())
    >>> grads[3].shape, dtable.shape
    ((256, 256), (511,))
    """
    if sabi is not None and type(sabi) is not ndarray:
        refuse_block_mask(sabi, "sabi")
        block_shape = block_shape_for(sabi, block_shape)
    family = _arrays.family_of(q)
    bias_grads = _arrays.flag(bias_grads, "bias_grads")
    bias_family = family if attn_mask is None else _arrays.family_of(attn_mask)
    if not (attn_mask is alibi_slopes is None):
        attn_mask, alibi_slopes = bias_for_core(attn_mask, alibi_slopes)
    if grads is None:
        grads = (None, None, None)
    elif not isinstance(grads, tuple) or len(grads) != 3:
        came = f"a tuple of {len(grads)}" if isinstance(grads, tuple) else type(grads).__name__
        raise (ValueError if isinstance(grads, tuple) else TypeError)(f"grads: expected a tuple (dq, dk, dv), got {came}")
    names = ("dq", "dk", "dv")
    if any(x is not None for x in grads):
        refuse_overlaps(
            dict(zip(names, grads, strict=True)), q_lens=q_lens, kv_lens=kv_lens, cu_seqlens_q=cu_seqlens_q, cu_seqlens_kv=cu_seqlens_kv,
            q_begin=q_begin, q_total=q_total,
        )  # fmt: skip
    dq, dk, dv = (_arrays.writable(x, name) for x, name in zip(grads, names, strict=True))
    results = _core.block_sparse_attention_backward(
        family.empty, _arrays.readable(q, "q"), _arrays.readable(k, "k"), _arrays.readable(v, "v"), sabi, block_shape=block_shape,
        scale=scale, layout=layout, causal=causal, window=window, q_lens=q_lens, kv_lens=kv_lens, cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_kv=cu_seqlens_kv, num_heads=num_heads, num_kv_heads=num_kv_heads, dtype=_arrays.dtype_name(dtype),
        num_threads=num_threads, q_begin=q_begin, q_total=q_total, kv_ranges=kv_ranges, attn_mask=attn_mask,
        alibi_slopes=alibi_slopes, dout=_arrays.readable(dout, "dout"),
        out=_arrays.readable(out, "out"), lse=_arrays.readable(lse, "lse"),
        dlse=None if dlse is None else _arrays.readable(dlse, "dlse"), dq=dq, dk=dk, dv=dv, accumulate=accumulate, softcap=softcap,
        bias_grads=bias_family.empty if bias_grads else None,
    )  # fmt: skip
    dq, dk, dv = (_arrays.finished(result, given, family) for result, given in zip(results, grads, strict=False))
    return (dq, dk, dv, *(None if x is None else _arrays.finished(x, None, bias_family) for x in results[3:]))
