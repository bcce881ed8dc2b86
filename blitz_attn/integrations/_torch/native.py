"""Native sparse attention that torch differentiates. Public through `blitz_attn.integrations.torch`.

`nsa` is a function of autograd, not an operator: its backward needs the context of its forward, which is more than tensors.
`torch.compiler.disable` makes `torch.compile` call `nsa` outside of its graph. `disable` imports the compiler, which takes seconds. So
`disable` is called only when a compiler first meets `nsa`.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np

from ..._operations import like, options_of
from ...nsa import nsa as _nsa
from ...nsa import nsa_backward as _nsa_backward
from .operators import no_second
from .tensors import autocast_dtype, expect_tensors, lowered, rows, torch, transforms_active

if TYPE_CHECKING:
    from torch import Tensor

    from ..._options import NSARules

__all__ = ["nsa"]

_NOT_TAKEN = ("compressed_kv", "cu_seqlens_q", "kv_lens", "out", "return_context", "dtype")
_NSA_TENSORS = ("q", "k", "v", "w_k_compress", "w_v_compress", "gate_proj_weight", "gates")


@cache
def _function() -> Any:
    """The autograd function, made at the first call, since it needs torch."""
    import torch

    class NoSecond(torch.autograd.Function):
        """Passes gradients through; the gradient of a gradient is refused with a sentence."""

        @staticmethod
        def forward(ctx: Any, count: int, *tensors: Any) -> Any:
            ctx.set_materialize_grads(False)
            return tuple(None if x is None else x.view_as(x) for x in tensors[:count])

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            raise RuntimeError(no_second("nsa"))

    class NativeSparseAttention(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, options: dict[str, Any], *tensors: Any) -> Any:
            given: dict[str, Any] = {name: None if x is None else rows(x) for name, x in zip(_NSA_TENSORS, tensors, strict=True)}
            out, ctx.kept = _nsa(**given, **options, return_context=True)
            ctx.save_for_backward(*tensors)  # the context holds them, too, but torch notices changes in place only in saved tensors
            ctx.num_threads = options.get("num_threads")
            return out

        @staticmethod
        def backward(ctx: Any, dout: Any) -> Any:
            sources = (*ctx.saved_tensors, dout)
            with torch.no_grad():
                grads = _nsa_backward(rows(dout), ctx.kept, num_threads=ctx.num_threads)
            wanted = tuple(x if needed else None for x, needed in zip(grads, ctx.needs_input_grad[1:], strict=True))
            if torch.is_grad_enabled():  # create_graph=True: torch would take the gradients for constants otherwise
                wanted = NoSecond.apply(len(wanted), *wanted, *sources)
            return (None, *wanted)

    return NativeSparseAttention


def _of_its_own(x: Any) -> Any:
    """Integers that backward reads: a copy of a tensor or array, so that the caller cannot change them before backward runs."""
    return x.clone() if hasattr(x, "clone") else x.copy() if isinstance(x, np.ndarray) else x


def _eager(options: dict[str, Any], tensors: tuple[Any, ...]) -> Any:
    """`nsa` itself, which torch's compiler does not look into."""
    expect_tensors(**{name: x for name, x in zip(_NSA_TENSORS, tensors, strict=True) if x is not None or name in ("q", "k", "v")})
    if transforms_active():
        raise ValueError("nsa: expected a call outside of torch.func's transforms, which cannot see into it")
    dtype = autocast_dtype()
    if dtype is not None:  # weights and gates are read as float32
        tensors = (*(lowered(x, dtype) for x in tensors[:3]), *tensors[3:])
    return _function().apply(options | {name: _of_its_own(options[name]) for name in ("block_indices", "cu_seqlens")}, *tensors)


_outside_of_graphs: list[Any] = []  # `_eager` as a compiler calls it, once a compiler has met `nsa`


@like(_nsa, _NOT_TAKEN)
def nsa(q: Tensor, k: Tensor, v: Tensor, **rules: Unpack[NSARules]) -> Tensor:
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
    options = options_of(_nsa, _NOT_TAKEN, {"q": q, "k": k, "v": v} | rules)
    tensors = tuple(options.pop(name) for name in _NSA_TENSORS)
    call = _eager
    if torch is not None and torch.compiler.is_compiling():
        if not _outside_of_graphs:
            _outside_of_graphs.append(torch.compiler.disable(_eager))
        call = _outside_of_graphs[0]
    return call(options, tensors)
