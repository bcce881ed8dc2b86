"""Choosing tokens by an indexer. Public through `blitz_attn.integrations.jax`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

import numpy as np

from ... import select as numpy_calls
from ..._arrays import flag
from ..._operations import like
from ..._select.tokens import places
from .calls import call, is_traced, plain, read, shape_like, without_gradient

if TYPE_CHECKING:
    from jax import Array as JaxArray

    from ..._select.tokens import TokenRules

__all__ = ["select_tokens"]

_NOT_TAKEN = ("dtype", "kv_dtype")


def _select(out: tuple[np.ndarray, ...], **given: Any) -> None:
    for to, made in zip(out, numpy_calls.select_tokens(**given, return_scores=True), strict=True):
        to[...] = made


@overload
def select_tokens(
    q: JaxArray, k: JaxArray, weights: JaxArray, top_k: int, *, return_scores: Literal[False] = False, **options: Unpack[TokenRules]
) -> JaxArray: ...
@overload
def select_tokens(
    q: JaxArray, k: JaxArray, weights: JaxArray, top_k: int, *, return_scores: Literal[True], **options: Unpack[TokenRules]
) -> tuple[JaxArray, JaxArray]: ...
@overload
def select_tokens(
    q: JaxArray, k: JaxArray, weights: JaxArray, top_k: int, *, return_scores: bool, **options: Unpack[TokenRules]
) -> Any: ...
@like(numpy_calls.select_tokens, _NOT_TAKEN)
def select_tokens(q: Any, k: Any, weights: Any, top_k: Any, *, return_scores: Any = False, **rules: Any) -> Any:
    """`blitz_attn.select_tokens` on JAX arrays, also under `jax.jit`.

    Parameters
    ----------
    q, k, weights : jax.Array
        Arrays in CPU memory: see `blitz_attn.select_tokens` for shapes and dtypes.
    top_k : int
        How many keys each query gets. A Python value.
    scale, causal, q_lens, kv_lens, cu_seqlens_q, cu_seqlens_kv, block_tables, q_begin, ascending
        See `blitz_attn.select_tokens`. Arrays may be traced; the other arguments are Python values.
    pool_size, keep_tail, block_size, min_score, k_scale
        See `blitz_attn.select_tokens`. Arrays may be traced; the other arguments are Python values.
    return_scores : bool
        Also return the scores of the chosen keys.
    num_threads : int, optional
        Threads for this call.

    Returns
    -------
    selected : jax.Array
        ``(B, Sq, top_k)``, or ``(T, top_k)``, int32: the keys of each query, then -1. With `keep_tail`, one entry more.
    scores : jax.Array
        With `return_scores`, of the same shape: float32 (float64 for float64).

    Raises
    ------
    TypeError, ValueError
        As `blitz_attn.select_tokens`. TypeError also where JAX requests a derivative: the function has none.
    jax.errors.JaxRuntimeError
        Under `jax.jit` or `jax.vmap`, as for `block_sparse_attention`.

    Examples
    --------
    >>> import jax
    >>> from functools import partial
    >>> from blitz_attn.integrations.jax import select_tokens
    >>> q, k, weights = (jax.random.normal(jax.random.key(n), shape) for n, shape in enumerate([(1, 90, 16, 32), (1, 90, 32), (1, 90, 16)]))
    >>> jax.jit(partial(select_tokens, top_k=8, causal=True))(q, k, weights).shape
    (1, 90, 8)
    """
    given = {"q": q, "k": k, "weights": weights, "top_k": top_k} | rules
    arrays, options = read(numpy_calls.select_tokens, _NOT_TAKEN, given)
    if not is_traced(arrays):
        return numpy_calls.select_tokens(**plain(arrays), **options, return_scores=return_scores)
    return_scores, q = flag(return_scores, "return_scores"), arrays["q"]
    if q.ndim not in (3, 4):
        raise ValueError(f"q: expected 3 or 4 axes, got shape {q.shape}")
    shape = (*q.shape[:-2], places(options["top_k"], options["keep_tail"]))
    results = shape_like(shape, np.int32), shape_like(shape, np.float64 if q.dtype == np.float64 else np.float32)
    sentence = "select_tokens: expected a call that JAX does not differentiate, got a request for its derivative, which it does not have"
    selected, scores = without_gradient(lambda arrays: call(_select, results, arrays, options), sentence)(arrays)
    return (selected, scores) if return_scores else selected
