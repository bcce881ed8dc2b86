"""Block-sparse attention: softmax attention in which lists of key blocks say what each block of queries looks at."""

from __future__ import annotations

from typing import Any

from numpy import empty, ndarray

from . import _arrays, _core

__all__ = ["block_sparse_attention"]


def block_sparse_attention(
    q: Any,
    k: Any,
    v: Any,
    sabi: Any = None,
    *,
    block_shape: tuple[int, int] = (128, 128),
    scale: float | None = None,
    layout: str = "BNSD",
    causal: bool = False,
    window: tuple[int, int] | None = None,
    q_lens: Any = None,
    kv_lens: Any = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_kv: Any = None,
    num_heads: int | None = None,
    num_kv_heads: int | None = None,
    return_lse: bool = False,
    out: Any = None,
    dtype: Any = None,
    num_threads: int | None = None,
) -> Any:
    """Attention over listed blocks of keys, with the log-sum-exp of the scores on request.

    ``out = softmax(scale * q k^T) v``, where a query sees a key when the key's block is listed for the query's block
    *and* the token rules (`causal`, `window`, `q_lens`, `kv_lens`) allow it. Rules cut inside a listed block, to the
    token. A query that sees no key at all gets output 0 and log-sum-exp ``-inf``.

    Parameters
    ----------
    q : array_like
        Queries, ``(B, H, Sq, D)`` for layout BNSD: float32, float16, bfloat16 or float64. D from 1 to 576.
    k : array_like
        Keys, ``(B, Hkv, Skv, D)``, same dtype. H must be a multiple of Hkv; query head h reads key head
        ``h // (H // Hkv)``.
    v : array_like
        Values, ``(B, Hkv, Skv, Dv)``, same dtype. Dv from 1 to 576 and may differ from D.
    sabi : array_like of int, optional
        Sparse attention block indices, ``(B or 1, H or 1, ceil(Sq / block_shape[0]), W)``: each row lists the columns
        of the key blocks that a block of queries sees, in any order, none of them twice. A row ends at the first pad:
        65535 for uint16, any negative entry for int16, int32 and int64. None sees every block.
    block_shape : (int, int)
        Tokens in a block of queries and in a block of keys. The last block of either axis may be partial.
    scale : float, optional
        Factor of ``q k^T``. Default: ``1 / sqrt(D)``.
    layout : {"BNSD", "BSND", "BSH", "TND"}
        Order of the axes of q, k, v and out: ``(B, H, S, D)``, ``(B, S, H, D)``, ``(B, S, H * D)`` with `num_heads`,
        or ``(T, H, D)``, sequences of different lengths one after the other, with `cu_seqlens_q` and `cu_seqlens_kv`.
    causal : bool
        Aligned to the bottom right: query i sees key j when ``j <= i + kv_len - q_len``.
    window : (int, int), optional
        Tokens that are seen before and after that diagonal; -1 sets no bound.
    q_lens, kv_lens : sequence of int, optional
        ``(B,)``: how many tokens of each batch entry are valid. Rows from ``q_lens[b]`` on give output 0 and
        log-sum-exp ``-inf``.
    cu_seqlens_q, cu_seqlens_kv : sequence of int, optional
        Layout TND: ``(B + 1,)`` cumulative lengths that rise from 0 to T.
    num_heads, num_kv_heads : int, optional
        Layout BSH: heads in q, and in k and v (default: `num_heads`). Other layouts check them against the arrays.
    return_lse : bool
        Also return the log-sum-exp.
    out : array, optional
        Where to write the result: writable, of the result's shape and dtype, sharing no memory with any input. With
        `return_lse`, also a pair ``(out, lse)``, either of which may be None.
    dtype : str or dtype, optional
        ``"bfloat16"`` says that uint16 arrays among q, k, v and out hold bfloat16 bits. Otherwise only checked.
    num_threads : int, optional
        Threads for this call. Default: see `set_num_threads`. The result does not depend on it.

    Returns
    -------
    out : array
        ``(B, H, Sq, Dv)`` in the layout and dtype of `q`, and the same kind of array: torch tensors come back as torch
        tensors, JAX arrays as JAX arrays.
    lse : array
        With `return_lse`: natural log of the sum of ``exp(scale * q.k)`` over the keys seen, ``(B, H, Sq)``, for layout
        TND ``(T, H)``; float32, for float64 inputs float64.

    Raises
    ------
    TypeError
        An argument of the wrong kind: not an array, an unknown or mixed dtype, foreign byte order, a float where an
        integer belongs.
    ValueError
        An argument of the wrong shape or out of range, such as a block listed twice or beyond the last key, or an
        array whose last axis is not contiguous. The text names the argument, what was expected and what came. Nothing
        has been written then.
    MemoryError
        The scratch memory, which does not grow with the square of the length, could not be had.

    See Also
    --------
    blitz_attn.sabi : makes, converts and describes block lists.
    blitz_attn.merge_states : joins results over disjoint sets of keys.
    blitz_attn.reference.block_sparse_attention : the same in plain float64 NumPy.

    Notes
    -----
    Sums and the log-sum-exp are accumulated in float32 (float64 for float64). Strided views are read in place as long as
    their last axis is contiguous; nothing of size Sq x Skv is ever built. The result is the same bit for bit whatever
    the number of threads and whatever else is in the batch.

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
    """
    if (  # plain NumPy arrays: nothing to translate
        type(q) is type(k) is type(v) is ndarray and out is None and dtype is None and q.dtype.kind == k.dtype.kind == v.dtype.kind == "f"
    ):
        return _core.block_sparse_attention(
            empty, q, k, v, sabi, block_shape, scale, layout, causal, window, q_lens, kv_lens, cu_seqlens_q, cu_seqlens_kv,
            num_heads, num_kv_heads, return_lse, None, None, None, num_threads,
        )  # fmt: skip

    family = _arrays.family_of(q)
    out, lse_out = _arrays.split_out(out, return_lse)
    result = _core.block_sparse_attention(
        family.empty, _arrays.readable(q, "q"), _arrays.readable(k, "k"), _arrays.readable(v, "v"), sabi, block_shape, scale, layout,
        causal, window, q_lens, kv_lens, cu_seqlens_q, cu_seqlens_kv, num_heads, num_kv_heads, return_lse,
        _arrays.writable(out, "out"), _arrays.writable(lse_out, "lse"), _arrays.dtype_name(dtype), num_threads,
    )  # fmt: skip
    if not return_lse:
        return _arrays.finished(result, out, family)
    return _arrays.finished(result[0], out, family), _arrays.finished(result[1], lse_out, family)
