"""Native sparse attention that JAX compiles and differentiates. Public through `blitz_attn.integrations.jax`."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np

from ... import nsa as numpy_calls
from ..._operations import like, options_of
from .calls import arrays_of, call, frozen, is_traced, jax, no_second, plain, shape_like, without_gradient

if TYPE_CHECKING:
    from jax import Array as JaxArray

    from ..._options import NSARules

__all__ = ["nsa"]

_NOT_TAKEN = ("compressed_kv", "cu_seqlens_q", "kv_lens", "out", "return_context", "dtype")
_LEARNED = ("q", "k", "v", "w_k_compress", "w_v_compress", "gate_proj_weight", "gates")
_INTEGERS = ("block_indices", "cu_seqlens")


def _attend(out: tuple[np.ndarray, ...], **given: Any) -> None:
    numpy_calls.nsa(**given, out=out[0])


def _attend_backward(out: tuple[np.ndarray, ...], *, dout: np.ndarray, learned: tuple[str, ...], **given: Any) -> None:
    _, context = numpy_calls.nsa(**given, return_context=True)
    grads = numpy_calls.nsa_backward(dout, context, num_threads=given["num_threads"])
    for name, to in zip(learned, out, strict=True):
        to[...] = getattr(grads, f"d{name}")


@cache
def _differentiable() -> Any:
    """``f(options, arrays) -> out`` with its gradients. The function is made at the first call, since it needs JAX."""

    def primal(options: Any, arrays: dict[str, Any]) -> Any:
        q, v = arrays["q"], arrays["v"]
        return call(_attend, [shape_like((*q.shape[:-1], v.shape[-1]), q.dtype)], arrays, dict(options))[0]

    def forward(options: Any, arrays: dict[str, Any]) -> tuple[Any, Any]:
        return without_gradient(lambda given: primal(options, given), no_second("nsa"))(arrays), arrays

    def backward(options: Any, arrays: dict[str, Any], dout: Any) -> tuple[dict[str, Any]]:
        learned = tuple(name for name in _LEARNED if name in arrays)
        shapes = [shape_like(arrays[name].shape, arrays[name].dtype) for name in learned]
        told = {**dict(options), "learned": learned}
        gradient = without_gradient(lambda given: call(_attend_backward, shapes, given, told), no_second("nsa"))
        grads = dict(zip(learned, gradient({**arrays, "dout": dout}), strict=True))
        return ({name: grads.get(name) for name in arrays},)

    attend = jax.custom_vjp(primal, nondiff_argnums=(0,))
    attend.defvjp(forward, backward)
    return attend


@like(numpy_calls.nsa, _NOT_TAKEN)
def nsa(q: JaxArray, k: JaxArray, v: JaxArray, **rules: Unpack[NSARules]) -> JaxArray:
    """`blitz_attn.nsa.nsa` on JAX arrays, also under `jax.jit`; differentiable in q, k, v, weights and gates, for a constant selection.

    Parameters
    ----------
    q, k, v : jax.Array
        Arrays in CPU memory: float32, float16, bfloat16 or, where JAX has it, float64.
    w_k_compress, w_v_compress, gate_proj_weight, gates : jax.Array, optional
        See `blitz_attn.nsa.nsa`.
    compress_block_size, num_selected_blocks, window_size, causal, scale, q_tile_size, num_cmp_selected_blocks, mode
        See `blitz_attn.nsa.nsa`. Python values.
    compress_stride, select_block_size, init_blocks, local_blocks, block_indices, cu_seqlens
        See `blitz_attn.nsa.nsa`. The last two may be traced; the other arguments are Python values.
    num_threads : int, optional
        Threads of this call and of its gradient.

    Returns
    -------
    jax.Array
        Like `q`, with the last dimension of `v`.

    Raises
    ------
    TypeError, ValueError
        As `blitz_attn.nsa.nsa`. TypeError also where JAX requests the gradient of a gradient.
    jax.errors.JaxRuntimeError
        Under `jax.jit` or `jax.vmap`, as for `block_sparse_attention`.

    Notes
    -----
    The gradient runs the forward pass again, because the context of a forward pass cannot pass through a computation of JAX.

    Examples
    --------
    >>> import jax
    >>> from blitz_attn.integrations.jax import nsa
    >>> q, k, v = (jax.random.normal(jax.random.key(n), (1, 100, heads, 16)) for n, heads in enumerate((4, 2, 2)))
    >>> gates = jax.nn.sigmoid(jax.random.normal(jax.random.key(3), (1, 100, 4, 3)))
    >>> loss = lambda k, gates: nsa(q, k, v, gates=gates, compress_block_size=8, num_selected_blocks=4, window_size=16).sum()
    >>> [x.shape for x in jax.jit(jax.grad(loss, argnums=(0, 1)))(k, gates)]
    [(1, 100, 2, 16), (1, 100, 4, 3)]
    """
    options = options_of(numpy_calls.nsa, _NOT_TAKEN, {"q": q, "k": k, "v": v} | rules)
    arrays = arrays_of(("q", "k", "v"), **{name: options.pop(name) for name in (*_LEARNED, *_INTEGERS)})
    options = frozen(options)
    if not is_traced(arrays):
        return numpy_calls.nsa(**plain(arrays), **options)
    for name in ("q", "v"):
        if arrays[name].ndim not in (3, 4):
            raise ValueError(f"{name}: expected 3 or 4 axes, got shape {arrays[name].shape}")
    return _differentiable()(tuple(options.items()), arrays)
