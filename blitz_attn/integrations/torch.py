"""Block-sparse and native sparse attention as functions that torch can differentiate, on CPU tensors.

The functions have the names and arguments of the library's functions. Tensors are not copied, except those whose last axis is not
contiguous. The library computes the gradients; second derivatives are not available.

torch is imported when a function is called.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from .._arrays import flag
from ..block_sparse import block_sparse_attention as _attend
from ..block_sparse import block_sparse_attention_backward as _attend_backward
from ..nsa import nsa as _nsa
from ..nsa import nsa_backward as _nsa_backward

__all__ = ["block_sparse_attention", "nsa"]

_NSA_TENSORS = ("q", "k", "v", "w_k_compress", "w_v_compress", "gate_proj_weight", "gates")


def _rows(x: Any) -> Any:
    """The tensor without its history and with a contiguous last axis, as the core reads it."""
    x = x.detach()
    return x if x.dim() == 0 or x.shape[-1] <= 1 or x.stride(-1) == 1 else x.contiguous()


def _expect_tensors(**arguments: Any) -> None:
    import torch

    for name, x in arguments.items():
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name}: expected a torch tensor, got {type(x).__name__}")
        if x.layout != torch.strided or x.device.type != "cpu":
            raise TypeError(f"{name}: expected a dense tensor in CPU memory, got one of layout {x.layout} on {x.device}")


class _Functions(NamedTuple):
    block_sparse_attention: Any
    nsa: Any


@cache
def _functions() -> _Functions:
    """The autograd functions, made at the first call, since they need torch."""
    import torch

    class NoSecond(torch.autograd.Function):
        """Passes gradients through; the gradient of a gradient is refused with a sentence."""

        @staticmethod
        def forward(ctx: Any, name: str, count: int, *tensors: Any) -> Any:
            ctx.name = name
            ctx.set_materialize_grads(False)
            return tuple(None if x is None else x.view_as(x) for x in tensors[:count])

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            raise RuntimeError(
                f"{ctx.name}: expected to be differentiated once, got a request for the gradient of its gradient, which it does not have"
            )

    def once(name: str, gradients: tuple[Any, ...], sources: tuple[Any, ...]) -> tuple[Any, ...]:
        """The gradients; under create_graph=True with a history that refuses a second derivative, because torch would treat them as
        constants otherwise."""
        if not torch.is_grad_enabled():
            return gradients
        return NoSecond.apply(name, len(gradients), *gradients, *sources)

    class BlockSparseAttention(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: Any, k: Any, v: Any, sabi: Any, options: dict[str, Any]) -> Any:
            out, lse = _attend(_rows(q), _rows(k), _rows(v), sabi, return_lse=True, **options)
            ctx.save_for_backward(q, k, v, out, lse)
            ctx.sabi, ctx.options = sabi, options
            ctx.set_materialize_grads(False)
            return out, lse

        @staticmethod
        def backward(ctx: Any, dout: Any, dlse: Any) -> Any:
            q, k, v, out, lse = ctx.saved_tensors
            sources = (q, k, v, dout, dlse)
            with torch.no_grad():
                dout = torch.zeros_like(out) if dout is None else _rows(dout)
                dlse = None if dlse is None else _rows(dlse)
                arrays = (_rows(q), _rows(k), _rows(v), out.detach(), lse.detach(), ctx.sabi)
                grads = _attend_backward(dout, *arrays, dlse=dlse, **ctx.options)
            wanted = tuple(x if needed else None for x, needed in zip(grads, ctx.needs_input_grad, strict=False))
            return (*once("block_sparse_attention", wanted, sources), None, None)

    class NativeSparseAttention(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, options: dict[str, Any], *tensors: Any) -> Any:
            rows: dict[str, Any] = {name: None if x is None else _rows(x) for name, x in zip(_NSA_TENSORS, tensors, strict=True)}
            out, ctx.kept = _nsa(**rows, **options, return_context=True)
            ctx.save_for_backward(*tensors)  # the context holds them too, but torch notices when one is changed in place
            ctx.num_threads = options.get("num_threads")
            return out

        @staticmethod
        def backward(ctx: Any, dout: Any) -> Any:
            sources = (*ctx.saved_tensors, dout)
            with torch.no_grad():
                grads = _nsa_backward(_rows(dout), ctx.kept, num_threads=ctx.num_threads)
            wanted = tuple(x if needed else None for x, needed in zip(grads, ctx.needs_input_grad[1:], strict=True))
            return (None, *once("nsa", wanted, sources))

    return _Functions(BlockSparseAttention, NativeSparseAttention)


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
    num_threads: int | None = None,
) -> Any:
    """`blitz_attn.block_sparse_attention` on torch tensors, differentiable in q, k and v.

    Parameters
    ----------
    q, k, v : torch.Tensor
        CPU tensors: float32, float16, bfloat16 or float64.
    sabi, block_shape, scale, layout, causal, window, q_lens, kv_lens, cu_seqlens_q, cu_seqlens_kv, num_heads, num_kv_heads
        See `blitz_attn.block_sparse_attention`.
    return_lse : bool
        Also return the log-sum-exp, which is differentiable too.
    num_threads : int, optional
        Threads of this call and of its gradient.

    Returns
    -------
    out : torch.Tensor
        Like `q`, with the last dimension of `v`.
    lse : torch.Tensor
        With `return_lse`: float32 (float64 for float64).

    Raises
    ------
    TypeError, ValueError
        As `blitz_attn.block_sparse_attention`.
    RuntimeError
        In ``backward``, where the gradient of a gradient is requested.

    Examples
    --------
    >>> import torch
    >>> from blitz_attn.integrations.torch import block_sparse_attention
    >>> q, k, v = (torch.randn(1, 2, 64, 16, requires_grad=True) for _ in range(3))
    >>> block_sparse_attention(q, k, v, causal=True).sum().backward()
    >>> bool(q.grad.shape == q.shape), round(v.grad.sum().item())  # each of 2 x 64 x 16 results takes its weights of 1 from v
    (True, 2048)
    """
    options = {
        "block_shape": block_shape,
        "scale": scale,
        "layout": layout,
        "causal": causal,
        "window": window,
        "q_lens": q_lens,
        "kv_lens": kv_lens,
        "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_kv": cu_seqlens_kv,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "num_threads": num_threads,
    }
    _expect_tensors(q=q, k=k, v=v)
    return_lse = flag(return_lse, "return_lse")
    out, lse = _functions().block_sparse_attention.apply(q, k, v, sabi, options)
    return (out, lse) if return_lse else out


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
    num_threads: int | None = None,
) -> Any:
    """`blitz_attn.nsa.nsa` on torch tensors, differentiable in all of them. The selection of blocks counts as constant.

    Parameters
    ----------
    q, k, v : torch.Tensor
        CPU tensors: float32, float16, bfloat16 or float64.
    w_k_compress, w_v_compress, gate_proj_weight, gates : torch.Tensor, optional
        See `blitz_attn.nsa.nsa`.
    compress_block_size, num_selected_blocks, window_size, causal, scale, q_tile_size, num_cmp_selected_blocks, mode
        See `blitz_attn.nsa.nsa`.
    compress_stride, select_block_size, init_blocks, local_blocks, block_indices, cu_seqlens
        See `blitz_attn.nsa.nsa`.
    num_threads : int, optional
        Threads of this call and of its gradient.

    Returns
    -------
    torch.Tensor
        Like `q`, with the last dimension of `v`.

    Raises
    ------
    TypeError, ValueError
        As `blitz_attn.nsa.nsa`.
    RuntimeError
        In ``backward``, where the gradient of a gradient is requested.

    Examples
    --------
    >>> import torch
    >>> from blitz_attn.integrations.torch import nsa
    >>> q, k, v = (torch.randn(1, 100, heads, 16, requires_grad=True) for heads in (4, 2, 2))
    >>> gates = torch.sigmoid(torch.randn(1, 100, 4, 3)).requires_grad_()
    >>> nsa(q, k, v, gates=gates, compress_block_size=8, num_selected_blocks=4, window_size=16).sum().backward()
    >>> [tuple(x.grad.shape) for x in (k, gates)]
    [(1, 100, 2, 16), (1, 100, 4, 3)]
    """
    options = {
        "compress_block_size": compress_block_size,
        "num_selected_blocks": num_selected_blocks,
        "window_size": window_size,
        "causal": causal,
        "scale": scale,
        "q_tile_size": q_tile_size,
        "num_cmp_selected_blocks": num_cmp_selected_blocks,
        "mode": mode,
        "compress_stride": compress_stride,
        "select_block_size": select_block_size,
        "init_blocks": init_blocks,
        "local_blocks": local_blocks,
        "block_indices": block_indices,
        "cu_seqlens": cu_seqlens,
        "num_threads": num_threads,
    }
    tensors = (q, k, v, w_k_compress, w_v_compress, gate_proj_weight, gates)
    _expect_tensors(**{name: x for name, x in zip(_NSA_TENSORS, tensors, strict=True) if x is not None or name in ("q", "k", "v")})
    return _functions().nsa.apply(options, *tensors)
