"""Attention over sequences: lists of blocks, JAX's own signature, and chosen blocks. Public through `blitz_attn.integrations.jax`."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

import numpy as np

from ... import block_sparse as numpy_calls
from ..._arrays import choice, flag, integer
from ..._names import LAYOUTS
from ..._operations import OPERATIONS, like, result_shapes
from ..._select import prefill as numpy_choice
from ..._sentences import refusal, rename
from .calls import (
    BEYOND_LISTS,
    NOT_TAKEN,
    arrays_of,
    call,
    is_traced,
    jax,
    no_second,
    plain,
    read,
    shape_like,
    shapes_like,
    without_gradient,
)

if TYPE_CHECKING:
    from jax import Array as JaxArray

    from ..._block_sparse.call import SparseSliceRules
    from ..._options import ChosenRules, JaxOwnOptions
    from ..._types import Array

__all__ = ["block_sparse_attention", "dot_product_attention", "select_and_attend_prefill"]

_FORWARD, _BACKWARD = ({x.name: x for x in OPERATIONS[f"block_sparse_attention{of}"]} for of in ("", "_backward"))
_FLOATS = tuple(name for name, x in _BACKWARD.items() if x.differentiable and x.role == "floats")
_LEARNED = tuple(name for name, x in _BACKWARD.items() if x.differentiable and x.role != "floats")  # biases of the scores
_NAMES = {
    "q": "query",
    "k": "key",
    "v": "value",
    "q_lens": "query_seq_lengths",
    "kv_lens": "key_value_seq_lengths",
    "window": "local_window_size",
}


# ---- Shapes -------------------------------------------------------------------------------------------------------


def _expect_axes(arrays: dict[str, Any], layout: str) -> None:
    axes = 3 if layout in ("BSH", "TND") else 4
    for name in ("q", "k", "v"):
        if arrays[name].ndim != axes:
            raise ValueError(f"{name}: expected {axes} axes for layout {layout}, got shape {arrays[name].shape}")


def _attend_shapes(arrays: dict[str, Any], options: dict[str, Any]) -> tuple[Any, Any]:
    """Shape and dtype of the output and of the log-sum-exp."""
    layout = choice(options["layout"], "layout", LAYOUTS)
    _expect_axes(arrays, layout)
    counts = [options[name] for name in ("num_heads", "num_kv_heads")]
    if layout == "BSH":
        heads = 1 if counts[0] is None else integer(counts[0], "num_heads")
        counts = [heads, heads if counts[1] is None else integer(counts[1], "num_kv_heads")]
        for name, count, of in zip(("num_heads", "num_kv_heads"), counts, "qk", strict=True):
            if count < 1 or arrays[of].shape[-1] % count:
                raise refusal(ValueError, name, ": expected a divisor of the last axis of ", of, f", {arrays[of].shape[-1]}, got {count}")
    return shapes_like(arrays["q"], result_shapes(arrays | {"layout": layout, "num_heads": counts[0], "num_kv_heads": counts[1]}))


# ---- On the buffers of a computation ----------------------------------------------------------------------------------


def _attend(out: tuple[np.ndarray, np.ndarray], **given: Any) -> None:
    numpy_calls.block_sparse_attention(**given, out=out, return_lse=True)


def _attend_backward(out: tuple[np.ndarray, ...], *, learned: tuple[str, ...], **given: Any) -> None:
    given["out"] = given.pop("result")
    results = numpy_calls.block_sparse_attention_backward(**given, grads=out[: len(_FLOATS)], bias_grads=bool(learned))
    of_biases = dict(zip(_LEARNED, results[len(_FLOATS) :], strict=False))
    for name, to in zip(learned, out[len(_FLOATS) :], strict=True):
        to[...] = of_biases[name]


def _choose_and_attend(out: tuple[np.ndarray, np.ndarray], **given: Any) -> None:
    numpy_choice.select_and_attend_prefill(**given, out=out, return_lse=True)


# ---- Gradients ----------------------------------------------------------------------------------------------------


@cache
def _differentiable() -> Any:
    """``f(options, arrays) -> (out, lse)`` with its gradients. The function is made at the first call, since it needs JAX.

    `options` are pairs of names and values. `arrays` is a dict; lists, lengths and rules in it have no gradient.
    """
    from jax.custom_derivatives import SymbolicZero

    def primal(options: Any, arrays: dict[str, Any]) -> tuple[Any, ...]:
        return call(_attend, _attend_shapes(arrays, dict(options)), arrays, dict(options))

    def forward(options: Any, primals: dict[str, Any]) -> tuple[Any, Any]:
        arrays = {name: x.value for name, x in primals.items()}
        biases = (name for name, x in _FORWARD.items() if x.differentiable and name not in _FLOATS)
        followed = {name: () for name in biases if name in primals and primals[name].perturbed}  # JAX keeps no strings as values
        out, lse = without_gradient(lambda given: primal(options, given), no_second("block_sparse_attention"))(arrays)
        return (out, lse), (arrays, out, lse, followed)

    def backward(options: Any, kept: Any, slopes: Any) -> tuple[dict[str, Any]]:
        arrays, out, lse, followed = kept
        dout, dlse = (None if isinstance(x, SymbolicZero) else x for x in slopes)
        dout = jax.numpy.zeros(out.shape, out.dtype) if dout is None else dout
        learned = tuple(name for name in _LEARNED if name in followed)
        given = {name: x for name, x in arrays.items() if name in _BACKWARD} | {"dout": dout, "result": out, "lse": lse}
        if dlse is not None:
            given["dlse"] = dlse
        wanted = (*_FLOATS, *learned)
        shapes = [shape_like(arrays[name].shape, arrays[name].dtype) for name in wanted]
        told = {**dict(options), "learned": learned}
        gradient = without_gradient(lambda given: call(_attend_backward, shapes, given, told), no_second("block_sparse_attention"))
        grads = dict(zip(wanted, gradient(given), strict=True))
        if "sinks" in followed:
            grads["sinks"] = _gradient_of_sinks(arrays["sinks"], dout, out, lse, dlse, dict(options)["layout"])
        return ({name: grads.get(name) for name in arrays},)

    attend = jax.custom_vjp(primal, nondiff_argnums=(0,))
    attend.defvjp(forward, backward, symbolic_zeros=True)
    return attend


def _gradient_of_sinks(sinks: Any, dout: Any, out: Any, lse: Any, dlse: Any, layout: str) -> Any:
    """The share of a sink in the softmax of a query is exp(sink - lse). As a sink grows, the log-sum-exp grows by that share, and the
    output, to which a sink adds no value, shrinks by that share of itself."""
    np_ = jax.numpy
    products = dout.astype(lse.dtype) * out.astype(lse.dtype)
    if layout == "BSH":
        products = products.reshape(*products.shape[:-1], lse.shape[1], -1)
    change = -np_.moveaxis(products.sum(-1), 2 if layout in ("BSND", "BSH") else 1, 0)  # heads first, as below
    lse = np_.moveaxis(lse, 1, 0)
    change = change if dlse is None else change + np_.moveaxis(dlse, 1, 0)
    valid = lse != -np_.inf  # invalid queries see no sink: their part of the loss adds nothing here, even if it is NaN
    heads = sinks.astype(np.float32).astype(lse.dtype).reshape(-1, *[1] * (lse.ndim - 1))
    share = np_.exp(heads - np_.where(valid, lse, np_.inf))
    return (share * np_.where(valid, change, 0)).reshape(len(sinks), -1).sum(1).astype(sinks.dtype)


# ---- Calls --------------------------------------------------------------------------------------------------------


@overload
def block_sparse_attention(
    q: JaxArray, k: JaxArray, v: JaxArray, sabi: Array | None = None, *, return_lse: Literal[False] = False,
    **options: Unpack[SparseSliceRules],
) -> JaxArray: ...  # fmt: skip
@overload
def block_sparse_attention(
    q: JaxArray, k: JaxArray, v: JaxArray, sabi: Array | None = None, *, return_lse: Literal[True], **options: Unpack[SparseSliceRules]
) -> tuple[JaxArray, JaxArray]: ...
@overload
def block_sparse_attention(
    q: JaxArray, k: JaxArray, v: JaxArray, sabi: Array | None = None, *, return_lse: bool, **options: Unpack[SparseSliceRules]
) -> Any: ...
@like(numpy_calls.block_sparse_attention, NOT_TAKEN)
def block_sparse_attention(q: Any, k: Any, v: Any, sabi: Any = None, *, return_lse: Any = False, **rules: Any) -> Any:
    """`blitz_attn.block_sparse_attention` on JAX arrays, also under `jax.jit`; q, k, v, attn_mask, alibi_slopes and sinks have gradients.

    Parameters
    ----------
    q, k, v : jax.Array
        Arrays in CPU memory: float32, float16, bfloat16 or, where JAX has it, float64.
    sabi, block_shape, scale, layout, causal, window, q_lens, kv_lens, cu_seqlens_q, cu_seqlens_kv, num_heads, num_kv_heads
        See `blitz_attn.block_sparse_attention`. Lists, lengths and offsets may be traced; the other arguments are Python values.
    q_begin, q_total, kv_ranges : array of int, optional
        See `blitz_attn.block_sparse_attention`.
    attn_mask : jax.Array, optional
        ``(B, H, Sq, Skv)``, or any shape that broadcasts to it: bool, False where a query does not see a key, or numbers that are added to
        the scores. The numbers may be differentiated.
    alibi_slopes : jax.Array or sequence of float, optional
        ``(H,)``: how much the score of each head falls per token of distance. Read as float32.
    sinks : jax.Array or sequence of float, optional
        ``(H,)``: one more score per head, which takes part in the softmax but has no value. Read as float32.
    softcap : float, optional
        Replaces each score by ``softcap * tanh(score / softcap)``; 0: scores are not capped.
    return_lse : bool
        Also return the log-sum-exp, which is differentiable too.
    num_threads : int, optional
        Threads of this call and of its gradient.

    Returns
    -------
    out : jax.Array
        Like `q`, with the last dimension of `v`.
    lse : jax.Array
        With `return_lse`: float32 (float64 for float64).

    Raises
    ------
    TypeError, ValueError
        As `blitz_attn.block_sparse_attention`.
    jax.errors.JaxRuntimeError
        Under `jax.jit` or `jax.vmap`, in place of these errors, if the library refuses an argument when the computation runs. The library's
        sentence is part of the text.

    Examples
    --------
    >>> import jax
    >>> from blitz_attn.integrations.jax import block_sparse_attention
    >>> q, k, v = (jax.random.normal(key, (1, 2, 64, 16)) for key in jax.random.split(jax.random.key(0), 3))
    >>> loss = jax.jit(lambda q, k, v: block_sparse_attention(q, k, v, causal=True).sum())
    >>> dv = jax.grad(loss, argnums=2)(q, k, v)
    >>> dv.shape, round(float(dv.sum()))  # the weights of each of 2 x 64 x 16 results add up to 1
    ((1, 2, 64, 16), 2048)
    """
    arrays, options = read(numpy_calls.block_sparse_attention, NOT_TAKEN, {"q": q, "k": k, "v": v, "sabi": sabi} | rules)
    if not is_traced(arrays):
        return numpy_calls.block_sparse_attention(**plain(arrays), **options, return_lse=return_lse)
    return_lse = flag(return_lse, "return_lse")
    out, lse = _differentiable()(tuple(options.items()), arrays)
    return (out, lse) if return_lse else out


@overload
def dot_product_attention(
    query: JaxArray, key: JaxArray, value: JaxArray, bias: Array | None = None, mask: Array | None = None, *,
    return_residual: Literal[False] = False, **options: Unpack[JaxOwnOptions],
) -> JaxArray: ...  # fmt: skip
@overload
def dot_product_attention(
    query: JaxArray, key: JaxArray, value: JaxArray, bias: Array | None = None, mask: Array | None = None, *,
    return_residual: Literal[True], **options: Unpack[JaxOwnOptions],
) -> tuple[JaxArray, JaxArray]: ...  # fmt: skip
@overload
def dot_product_attention(
    query: JaxArray, key: JaxArray, value: JaxArray, bias: Array | None = None, mask: Array | None = None, *, return_residual: bool,
    **options: Unpack[JaxOwnOptions],
) -> Any: ...  # fmt: skip
def dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: Any = None,
    key_value_seq_lengths: Any = None,
    local_window_size: int | tuple[int, int] | None = None,
    return_residual: bool = False,
    sabi: Any = None,
    block_shape: tuple[int, int] | None = None,
    num_threads: int | None = None,
) -> Any:
    """`jax.nn.dot_product_attention` by this library, with lists of blocks on request.

    Parameters
    ----------
    query : jax.Array
        ``(B, T, N, H)`` or ``(T, N, H)``, in CPU memory: float32, float16, bfloat16 or, where JAX has it, float64.
    key, value : jax.Array
        ``(B, S, K, H)`` or ``(S, K, H)``, dtype of `query`; N is a multiple of K.
    bias : jax.Array, optional
        Numbers that are added to the scores, of a shape that broadcasts to ``(B, N, T, S)``. May be differentiated.
    mask : jax.Array, optional
        bool, True where a query sees a key, of a shape that broadcasts to ``(B, N, T, S)``.
    scale : float, optional
        Factor of ``query key^T``. Default: ``1 / sqrt(H)``.
    is_causal : bool
        As JAX means it: query i sees key j when ``j <= i``, whatever the numbers of queries and keys.
    query_seq_lengths, key_value_seq_lengths : array of int, optional
        ``(B,)``: number of valid tokens of each batch entry.
    local_window_size : int or (int, int), optional
        Number of keys that query i sees before and after key i; one number stands for both. A negative number leaves key i out, as in
        JAX: with ``(3, -1)``, query i sees three keys, the last of which is key ``i - 1``.
    return_residual : bool
        Also return the log-sum-exp.
    sabi : array of int, optional
        Block list ``(B or 1; N, K or 1; ceil(T / block_shape[0]); W)``: see `blitz_attn.block_sparse_attention`.
    block_shape : (int, int), optional
        Number of tokens per block of queries and per block of keys. Default: the shape that the list knows, or else (128, 128).
    num_threads : int, optional
        Threads of this call and of its gradient.

    Returns
    -------
    out : jax.Array
        Like `query`. A query that sees no key gets 0.
    lse : jax.Array
        With `return_residual`: ``(B, T, N)`` or ``(T, N)``, float32 (float64 for float64). It is differentiable, unlike JAX's own.

    Raises
    ------
    TypeError, ValueError
        What `blitz_attn.block_sparse_attention` refuses.
    jax.errors.JaxRuntimeError
        Under `jax.jit` or `jax.vmap`, as for `block_sparse_attention`.

    Notes
    -----
    There is no ``implementation=``. A query that sees no key gets 0; JAX's own function returns the mean of all values for it.

    Examples
    --------
    >>> import jax
    >>> from blitz_attn.integrations.jax import dot_product_attention
    >>> q, k, v = (jax.random.normal(jax.random.key(n), (1, 300, heads, 64)) for n, heads in enumerate((8, 2, 2)))
    >>> ours = dot_product_attention(q, k, v, is_causal=True)
    >>> theirs = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    >>> bool(abs(ours - theirs).max() < 1e-5)
    True
    """
    arrays = arrays_of(("query", "key", "value"), query=query, key=key, value=value, bias=bias, mask=mask)
    one = arrays["query"].ndim == 3
    q, k, v = (arrays[name][None] if one and arrays[name].ndim == 3 else arrays[name] for name in ("query", "key", "value"))
    rules: dict[str, Any] = {"q_lens": query_seq_lengths, "kv_lens": key_value_seq_lengths}
    is_causal = flag(is_causal, "is_causal")
    if local_window_size is not None:
        one_number = not isinstance(local_window_size, (tuple, list))
        rules["window"] = (local_window_size, local_window_size) if one_number else local_window_size
    if q.ndim == k.ndim == 4 and (is_causal or local_window_size is not None):
        rules |= _upper_left(q.shape, k.shape[1], rules, is_causal)
        if _leaves_its_own_out(rules.get("window")):
            rules["kv_ranges"] = _as_ranges(rules.pop("window"), q.shape[1], k.shape[1])
    mask, bias = (jax.numpy.atleast_1d(arrays[name]) if name in arrays else None for name in ("mask", "bias"))
    if mask is not None and mask.dtype != bool:
        raise TypeError(f"mask: expected bool, got {mask.dtype}")
    if bias is not None and bias.dtype == bool:
        raise TypeError("bias: expected numbers, got bool")
    rules["attn_mask"] = bias if mask is None else mask if bias is None else jax.numpy.where(mask, bias, -jax.numpy.inf)
    names = _NAMES | {"attn_mask": "bias" if mask is None else "mask"}
    try:
        out, lse = block_sparse_attention(
            q, k, v, sabi, block_shape=block_shape, scale=scale, layout="BSND", causal=is_causal, **rules, return_lse=True,
            num_threads=num_threads,
        )  # fmt: skip
    except (TypeError, ValueError) as error:
        rename(error, names)
        raise
    lse = jax.numpy.moveaxis(lse, 1, 2)
    out, lse = (out[0], lse[0]) if one else (out, lse)
    return (out, lse) if flag(return_residual, "return_residual") else out


def _leaves_its_own_out(window: Any) -> bool:
    """Whether a bound of a window is negative. JAX takes negative bounds like any others, while in the library -1 means no bound. A window
    that is not a pair of integers is left to the library, which refuses it."""
    return window is not None and len(window) == 2 and all(isinstance(n, (int, np.integer)) for n in window) and min(window) < 0


def _as_ranges(window: tuple[int, int], queries: int, keys: int) -> np.ndarray:
    """A window as the run of keys of each query. The run may be empty."""
    farthest = queries + keys
    left, right = np.clip(window, -farthest, farthest)
    places = np.arange(queries)
    return np.stack([places - left, places + right + 1], axis=-1).astype(np.int32)


def _upper_left(q_shape: tuple[int, ...], keys: int, rules: dict[str, Any], is_causal: bool) -> dict[str, Any]:
    """The rules for JAX's diagonal, query i at key i. Without `q_begin`, the library's diagonal ends at the last query and the last key."""
    batch, queries = q_shape[:2]
    if queries == keys and rules["q_lens"] is rules["kv_lens"] is None:
        return {}
    upper_left: dict[str, Any] = {"q_begin": 0}
    if is_causal and queries < keys and rules["kv_lens"] is None:  # no query sees the last keys, which take time unless they are left out
        upper_left["kv_lens"] = np.full(batch, queries, np.int32)
    return upper_left


@overload
def select_and_attend_prefill(
    q: JaxArray, k: JaxArray, v: JaxArray, *, return_lse: Literal[False] = False, **options: Unpack[ChosenRules]
) -> JaxArray: ...
@overload
def select_and_attend_prefill(
    q: JaxArray, k: JaxArray, v: JaxArray, *, return_lse: Literal[True], **options: Unpack[ChosenRules]
) -> tuple[JaxArray, JaxArray]: ...
@overload
def select_and_attend_prefill(q: JaxArray, k: JaxArray, v: JaxArray, *, return_lse: bool, **options: Unpack[ChosenRules]) -> Any: ...
@like(numpy_choice.select_and_attend_prefill, BEYOND_LISTS)
def select_and_attend_prefill(q: Any, k: Any, v: Any, *, return_lse: Any = False, **rules: Any) -> Any:
    """`blitz_attn.select_and_attend_prefill` on JAX arrays, also under `jax.jit`.

    Parameters
    ----------
    q, k, v : jax.Array
        Arrays in CPU memory: float32, float16, bfloat16 or, where JAX has it, float64.
    chooser, density, top_p, threshold, top_k, sink, recent, last_columns, first_rows, last_rows, per_kv_head
        See `blitz_attn.select_blocks_prefill`. Python values. Give exactly one of `density`, `top_p`, `threshold` and `top_k`.
    block_shape, scale, layout, causal, window, q_lens, kv_lens, cu_seqlens_q, cu_seqlens_kv, num_heads, num_kv_heads
        See `blitz_attn.block_sparse_attention`. Lengths may be traced.
    kv_ranges : array of int, optional
        A run of keys for each query: see `blitz_attn.select_blocks_prefill`.
    attn_mask, alibi_slopes, sinks, softcap
        Further options of attention: see `block_sparse_attention`. The choice of blocks ignores them.
    return_lse : bool
        Also return the log-sum-exp.
    num_threads : int, optional
        Threads for this call.

    Returns
    -------
    out : jax.Array
        Like `q`, with the last dimension of `v`.
    lse : jax.Array
        With `return_lse`: float32 (float64 for float64).

    Raises
    ------
    TypeError, ValueError
        As `blitz_attn.select_and_attend_prefill`. TypeError also where JAX requests a derivative: the function has none. For training, give
        the list of `blitz_attn.select_blocks_prefill` to `block_sparse_attention`.
    jax.errors.JaxRuntimeError
        Under `jax.jit` or `jax.vmap`, as for `block_sparse_attention`.

    Examples
    --------
    >>> import jax
    >>> from blitz_attn.integrations.jax import select_and_attend_prefill
    >>> q, k, v = (jax.random.normal(key, (1, 2, 1024, 64)) for key in jax.random.split(jax.random.key(0), 3))
    >>> jax.jit(lambda q, k, v: select_and_attend_prefill(q, k, v, density=0.4, causal=True))(q, k, v).shape
    (1, 2, 1024, 64)
    """
    arrays, options = read(numpy_choice.select_and_attend_prefill, BEYOND_LISTS, {"q": q, "k": k, "v": v} | rules)
    if not is_traced(arrays):
        return numpy_choice.select_and_attend_prefill(**plain(arrays), **options, return_lse=return_lse)
    return_lse = flag(return_lse, "return_lse")
    sentence = (
        "select_and_attend_prefill: expected a call that JAX does not differentiate, got a request for its derivative, which it does not "
        "have; block_sparse_attention has one, with the lists of select_blocks_prefill"
    )
    out, lse = without_gradient(
        lambda given: call(_choose_and_attend, _attend_shapes(given, options), given, options), sentence
    )(arrays)  # fmt: skip
    return (out, lse) if return_lse else out
