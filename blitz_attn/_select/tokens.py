"""Choosing single tokens for each query by the scores of an indexer. Public through `blitz_attn.select`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

import numpy as np

from .. import _arrays, _core
from .._floats import floats
from .._formats import converted

if TYPE_CHECKING:
    from typing import TypedDict

    from .._types import Array, DType, Integers, IntOrIntegers

    # Options by name, for overloads here and elsewhere.

    class TokenRules(TypedDict, total=False):
        """Options of `select_tokens` of `blitz_attn.integrations.torch` and of `blitz_attn.integrations.jax`."""

        scale: float | None
        causal: bool
        q_lens: Integers | None
        kv_lens: Integers | None
        cu_seqlens_q: Integers | None
        cu_seqlens_kv: Integers | None
        block_tables: Array | None
        q_begin: IntOrIntegers | None
        ascending: bool
        pool_size: int
        keep_tail: bool
        block_size: int
        min_score: float | None
        k_scale: Array | None
        num_threads: int | None

    class TokenOptions(TokenRules, total=False):
        """Options of `blitz_attn.select_tokens`."""

        dtype: DType | None
        kv_dtype: DType | None


__all__ = ["select_tokens"]


def places(top_k: Any, keep_tail: Any) -> int:
    """How many places a row of the result has."""
    chosen = _arrays.integer(top_k, "top_k")
    if not 1 <= chosen < 1 << 31:
        raise ValueError(f"top_k: expected 1 to 2147483647 keys, got {chosen}")
    return chosen + _arrays.flag(keep_tail, "keep_tail")


@overload
def select_tokens(
    q: Array, k: Array, weights: Array, top_k: int, *, return_scores: Literal[False] = False, **options: Unpack[TokenOptions]
) -> Any: ...
@overload
def select_tokens(
    q: Array, k: Array, weights: Array, top_k: int, *, return_scores: bool, **options: Unpack[TokenOptions]
) -> tuple[Any, Any]: ...
def select_tokens(
    q: Any,
    k: Any,
    weights: Any,
    top_k: int,
    *,
    scale: float | None = None,
    causal: bool = False,
    q_lens: Any = None,
    kv_lens: Any = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_kv: Any = None,
    block_tables: Any = None,
    q_begin: Any = None,
    ascending: bool = False,
    pool_size: int = 1,
    keep_tail: bool = False,
    block_size: int = 1,
    min_score: float | None = None,
    k_scale: Any = None,
    return_scores: bool = False,
    dtype: Any = None,
    kv_dtype: Any = None,
    num_threads: int | None = None,
) -> Any:
    """The keys with the highest scores of an indexer, for each query: the "lightning indexer" of DeepSeek-V3.2.

    The score of query i and key j is ``sum over h of weights[i, h] * max(0, scale * q[i, h] . k[j])``: the indexer has small heads of its
    own, which share one key per token. Scores are compared while they are made: no array has a score for each query and key.

    Parameters
    ----------
    q : array
        Queries of the indexer, ``(B, Sq, H, D)``, or with `cu_seqlens_q` ``(T, H, D)``: float32, float16, bfloat16 or float64; H up to 512,
        D up to 576.
    k : array
        One key per token, ``(B, Skv, D)``, or ``(T, D)``, of the dtype of `q`. With `pool_size`, one key per pool of tokens; an incomplete
        pool needs no key. With `block_tables`, pages of keys, ``(num_blocks, page_size, D)``. With `k_scale`, keys are int8 or float8_e4m3,
        and queries are not float64.
    weights : array of float
        ``(B, Sq, H)``, or ``(T, H)``. Weights are read as float32 (float64 for float64 queries), and must be finite. Weights of queries
        behind `q_lens` are not read.
    top_k : int
        How many keys, pools or blocks a query gets if it sees as many; at least 1.
    scale : float, optional
        Factor of the products. Default: ``1 / sqrt(D)``. (Without `min_score`, a positive scale changes no
        choice, except by rounding.)
    causal : bool
        A query sees the tokens up to its own. The last query stands at the last token, unless `q_begin` says otherwise.
    q_lens, kv_lens : sequence of int, optional
        ``(B,)``: numbers of valid queries and tokens of each batch entry. Queries behind the valid queries get no key. For packed queries,
        `q_lens` is None, and `kv_lens`, the number of tokens of each sequence, is only for calls with `block_tables` or a `pool_size` above
        1. Default: all queries and keys are valid; with a `pool_size`, all pools are complete.
    cu_seqlens_q, cu_seqlens_kv : sequence of int, optional
        ``(B + 1,)``: where the sequences of packed arrays begin and end, as rows of q and of k (with `pool_size`, the rows of k are pools).
    block_tables : array of int, optional
        ``(B, W)``, int32 or int64: the pages of each sequence, for all of its tokens; `kv_lens` says how many tokens it has. The queries
        are batched, or packed with `cu_seqlens_q`.
    q_begin : int or sequence of int, optional
        The token number of the first query, where the queries are a part of their sequence: one number for all sequences, or ``(B,)``.
    ascending : bool
        True: keys rise in each row. Default: scores fall in each row.
    pool_size : int
        How many tokens a key stands for: GLM-5.3 and Qwen's QSA choose pools. A query may choose a pool if it sees all tokens of the pool.
        Results are pool numbers, for attention with ``block_shape=(1, pool_size)``. `kv_lens`, `q_begin` and `causal` count tokens.
    keep_tail : bool
        The pool that a query sees only in part, if there is one, is always in the query's row, behind the chosen pools. Rows are then one
        place longer.
    block_size : int
        Choose blocks of this many keys, as MiniMax-M3 does. The score of a block is the largest score of its keys that the query sees.
        Results are block numbers, for attention with ``block_shape=(1, block_size)``. It cannot be combined with `pool_size`.
    min_score : float, optional
        Only keys, pools or blocks with at least this score are chosen, and no more than `top_k` of them. The pool that `keep_tail` adds
        needs no score.
    k_scale : array of float32, optional
        The factor of each 8-bit key, as `quantize_kv` makes it; its axes are those of `k` without the last.
    return_scores : bool
        Also return the scores of the chosen keys.
    dtype, kv_dtype : str or dtype, optional
        ``dtype="bfloat16"`` says that uint16 arrays among q and k hold bfloat16 bits, and ``kv_dtype="float8_e4m3"`` says that uint8 keys
        hold bits of that dtype. Any other value is only checked against the arrays.
    num_threads : int, optional
        Threads for this call. Default: see `set_num_threads`. The result does not depend on it.

    Returns
    -------
    selected : array of int32
        ``(B, Sq, top_k)``, or ``(T, top_k)``, with `keep_tail` one place longer: the chosen keys, counted from the first key of the
        sequence. Of equal scores, the lower key comes first; NaN counts as minus infinity. A row with fewer keys to choose from ends with
        -1.
    scores : array
        With `return_scores`, of the same shape: float32 (float64 for float64 queries). Infinity stands for a pool that `keep_tail` adds,
        minus infinity for a place without a key.

    Raises
    ------
    TypeError, ValueError, MemoryError
        An array of a wrong dtype or shape, lengths out of range, weights that are not finite, or a `top_k` below 1 or above 2147483647.

    See Also
    --------
    block_sparse_attention : takes the result as a list of blocks of one query and one key: ``sabi=selected[:, None], block_shape=(1, 1)``,
        or with the `block_shape` of pools or blocks, see `pool_size` and `block_size`.
    blitz_attn.reference.select_tokens : the same in plain float64 NumPy.

    References
    ----------
    .. [1] DeepSeek-AI, "DeepSeek-V3.2: Pushing the Frontier of Open Large Language Models", 2025, section 2.1.

    Examples
    --------
    >>> import numpy as np
    >>> import blitz_attn
    >>> rng = np.random.default_rng(0)
    >>> q, k = rng.standard_normal((1, 300, 16, 32), dtype=np.float32), rng.standard_normal((1, 300, 32), dtype=np.float32)
    >>> weights = rng.random((1, 300, 16), dtype=np.float32)
    >>> selected = blitz_attn.select_tokens(q, k, weights, 64, causal=True)
    >>> selected.shape, sorted(selected[0, 2].tolist())[-3:]
    ((1, 300, 64), [0, 1, 2])
    >>> heads = [rng.standard_normal((1, 4, 300, 64), dtype=np.float32) for _ in range(3)]
    >>> out = blitz_attn.block_sparse_attention(*heads, selected[:, None], block_shape=(1, 1), causal=True)
    """
    width, with_scores = places(top_k, keep_tail), _arrays.flag(return_scores, "return_scores")
    q, k, weights = _arrays.detached(q, k, weights)
    queries = _arrays.readable(q, "q")
    real = "float64" if getattr(_arrays.dtype_of(q), "itemsize", 4) == 8 else "float32"
    shape = (*_arrays.shape_of(q)[:-2], width)
    try:
        selected, scores = np.empty(shape, np.int32), np.empty(shape, real) if with_scores else None
    except ValueError:  # NumPy's own sentence names no argument; arrays of other libraries may claim shapes that NumPy has not
        raise ValueError(f"q: expected a shape whose result of shape {shape} can exist, got {_arrays.shape_of(q)}") from None
    numbers = converted(*floats(weights, "weights", None, strided=True), real)
    _core.select_tokens(
        queries, _arrays.readable(k, "k", cache=True), numbers, selected, scores, scale, causal, q_lens, kv_lens, cu_seqlens_q,
        cu_seqlens_kv, block_tables, q_begin, ascending, pool_size, block_size, keep_tail, min_score, k_scale,
        dtype=_arrays.dtype_name(dtype), kv_dtype=_arrays.dtype_name(kv_dtype, "kv_dtype"), num_threads=num_threads,
    )  # fmt: skip
    chosen = _arrays.as_kind_of(selected, q)
    return (chosen, _arrays.as_kind_of(scores, q)) if scores is not None else chosen
