"""Decode over paged caches. Public through `blitz_attn.integrations.jax`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

import numpy as np

from ... import paged as numpy_calls
from ..._arrays import flag
from ..._operations import like, result_shapes
from .calls import BEYOND_LISTS, arrays_of, call, is_traced, plain, read, shapes_like, without_gradient

if TYPE_CHECKING:
    from jax import Array as JaxArray

    from ..._paged.call import PagedRules, PagedSelectRules
    from ..._types import Array, Integers, Tables

__all__ = ["paged_attention", "paged_select_attention"]

_TRIPLE = ("indptr", "indices", "last_page_len")


def _attend(out: tuple[np.ndarray, ...] | None, **given: Any) -> Any:
    """The library's function, with `selected` or without it, and with page tables of either form."""
    if "indptr" in given:
        given["block_tables"] = tuple(given.pop(name) for name in _TRIPLE)
    given.setdefault("seq_lens", None)
    function: Any = numpy_calls.paged_select_attention if "selected" in given else numpy_calls.paged_attention
    return function(**given, **({} if out is None else {"out": out, "return_lse": True}))


def _call(function: Any, block_tables: Any, return_lse: Any, given: dict[str, Any]) -> Any:
    parts = block_tables if isinstance(block_tables, tuple) else (block_tables,)
    if len(parts) not in (1, 3):
        raise ValueError(f"block_tables: expected an array or a tuple of 3 arrays, got a tuple of {len(parts)}")
    if any(x is None for x in parts):
        raise TypeError("block_tables: expected an array, got NoneType")
    arrays, options = read(function, BEYOND_LISTS, given)
    arrays |= arrays_of((), **dict(zip(_TRIPLE if len(parts) == 3 else ("block_tables",), parts, strict=True)))
    if not is_traced(arrays):
        return _attend(None, **plain(arrays), **options, return_lse=return_lse)
    return_lse = flag(return_lse, "return_lse")
    q, v_cache = arrays["q"], arrays["v_cache"]
    if q.ndim != 3 or v_cache.ndim != 4:
        wrong, axes, shape = ("q", 3, q.shape) if q.ndim != 3 else ("v_cache", 4, v_cache.shape)
        raise ValueError(f"{wrong}: expected {axes} axes, got shape {shape}")
    results, name = shapes_like(q, result_shapes(arrays)), function.__name__
    sentence = f"{name}: expected a call that JAX does not differentiate, got a request for its derivative, which it does not have"
    out, lse = without_gradient(lambda arrays: call(_attend, results, arrays, options), sentence)(arrays)
    return (out, lse) if return_lse else out


@overload
def paged_attention(
    q: JaxArray, k_cache: JaxArray, v_cache: JaxArray, block_tables: Tables, seq_lens: Integers | None = None, *,
    return_lse: Literal[False] = False, **options: Unpack[PagedRules],
) -> JaxArray: ...  # fmt: skip
@overload
def paged_attention(
    q: JaxArray, k_cache: JaxArray, v_cache: JaxArray, block_tables: Tables, seq_lens: Integers | None = None, *, return_lse: Literal[True],
    **options: Unpack[PagedRules],
) -> tuple[JaxArray, JaxArray]: ...  # fmt: skip
@overload
def paged_attention(
    q: JaxArray, k_cache: JaxArray, v_cache: JaxArray, block_tables: Tables, seq_lens: Integers | None = None, *, return_lse: bool,
    **options: Unpack[PagedRules],
) -> Any: ...  # fmt: skip
@like(numpy_calls.paged_attention, BEYOND_LISTS)
def paged_attention(
    q: Any, k_cache: Any, v_cache: Any, block_tables: Any, seq_lens: Any = None, *, return_lse: Any = False, **rules: Any
) -> Any:
    """`blitz_attn.paged_attention` on JAX arrays, also under `jax.jit`.

    Parameters
    ----------
    q, k_cache, v_cache : jax.Array
        Arrays in CPU memory: see `blitz_attn.paged_attention` for shapes and dtypes.
    block_tables, seq_lens, scale, kv_layout, q_lens, window, kv_ranges, attn_mask, alibi_slopes, sinks, softcap
        See `blitz_attn.paged_attention`. Arrays may be traced; the other arguments are Python values.
    k_scale, v_scale : jax.Array or float, optional
        See `blitz_attn.paged_attention`.
    return_lse : bool
        Also return the log-sum-exp.
    num_threads : int, optional
        Threads for this call.

    Returns
    -------
    out : jax.Array
        ``(B, H, Dv)`` or ``(T, H, Dv)``, dtype of `q`.
    lse : jax.Array
        With `return_lse`: ``(B, H)`` or ``(T, H)``, float32 (float64 for float64).

    Raises
    ------
    TypeError, ValueError
        As `blitz_attn.paged_attention`. TypeError also where JAX requests a derivative: the function has none.
    jax.errors.JaxRuntimeError
        Under `jax.jit` or `jax.vmap`, as for `block_sparse_attention`.

    Examples
    --------
    >>> import jax
    >>> import jax.numpy as jnp
    >>> from blitz_attn.integrations.jax import paged_attention
    >>> k_cache, v_cache = jax.random.normal(jax.random.key(0), (2, 6, 16, 2, 64))
    >>> tables, seq_lens = jnp.array([[4, 1, 0]]), jnp.array([40])
    >>> jax.jit(paged_attention)(jnp.ones((1, 8, 64)), k_cache, v_cache, tables, seq_lens).shape
    (1, 8, 64)
    """
    given = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "seq_lens": seq_lens} | rules
    return _call(numpy_calls.paged_attention, block_tables, return_lse, given)


@overload
def paged_select_attention(
    q: JaxArray, k_cache: JaxArray, v_cache: JaxArray, block_tables: Tables, seq_lens: Integers | None, selected: Array, *,
    return_lse: Literal[False] = False, **options: Unpack[PagedSelectRules],
) -> JaxArray: ...  # fmt: skip
@overload
def paged_select_attention(
    q: JaxArray, k_cache: JaxArray, v_cache: JaxArray, block_tables: Tables, seq_lens: Integers | None, selected: Array, *,
    return_lse: Literal[True], **options: Unpack[PagedSelectRules],
) -> tuple[JaxArray, JaxArray]: ...  # fmt: skip
@overload
def paged_select_attention(
    q: JaxArray, k_cache: JaxArray, v_cache: JaxArray, block_tables: Tables, seq_lens: Integers | None, selected: Array, *,
    return_lse: bool, **options: Unpack[PagedSelectRules],
) -> Any: ...  # fmt: skip
@like(numpy_calls.paged_select_attention, BEYOND_LISTS)
def paged_select_attention(
    q: Any, k_cache: Any, v_cache: Any, block_tables: Any, seq_lens: Any, selected: Any, *, return_lse: Any = False, **rules: Any
) -> Any:
    """`blitz_attn.paged_select_attention` on JAX arrays, also under `jax.jit`.

    Parameters
    ----------
    q, k_cache, v_cache : jax.Array
        Arrays in CPU memory: see `blitz_attn.paged_attention` for shapes and dtypes.
    block_tables, seq_lens, selected, counts, scale, kv_layout, q_lens, window, kv_ranges, attn_mask, alibi_slopes, sinks, softcap
        See `blitz_attn.paged_select_attention`. Arrays may be traced; the other arguments are Python values.
    k_scale, v_scale : jax.Array or float, optional
        See `blitz_attn.paged_attention`.
    return_lse : bool
        Also return the log-sum-exp.
    num_threads : int, optional
        Threads for this call.

    Returns
    -------
    out : jax.Array
        ``(B, H, Dv)`` or ``(T, H, Dv)``, dtype of `q`.
    lse : jax.Array
        With `return_lse`: ``(B, H)`` or ``(T, H)``, float32 (float64 for float64).

    Raises
    ------
    TypeError, ValueError
        As `blitz_attn.paged_select_attention`. TypeError also where JAX requests a derivative: the function has none.
    jax.errors.JaxRuntimeError
        Under `jax.jit` or `jax.vmap`, as for `block_sparse_attention`.

    Examples
    --------
    >>> import jax
    >>> import jax.numpy as jnp
    >>> from blitz_attn.integrations.jax import paged_select_attention
    >>> k_cache, v_cache = jax.random.normal(jax.random.key(0), (2, 6, 16, 2, 64))
    >>> tables, seq_lens, selected = jnp.array([[4, 1, 0]]), jnp.array([40]), jnp.array([[[0, 2], [2, 1]]])
    >>> jax.jit(paged_select_attention)(jnp.ones((1, 8, 64)), k_cache, v_cache, tables, seq_lens, selected).shape
    (1, 8, 64)
    """
    if selected is None:
        raise TypeError("selected: expected an array, got NoneType")
    given = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "seq_lens": seq_lens, "selected": selected} | rules
    return _call(numpy_calls.paged_select_attention, block_tables, return_lse, given)
