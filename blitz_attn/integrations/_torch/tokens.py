"""Choosing tokens by an indexer. Public through `blitz_attn.integrations.torch`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

from ... import select as numpy_calls
from ..._operations import like
from . import operators
from .arguments import read, taken, takes
from .tensors import expect_tensors, flag_of, torch

if TYPE_CHECKING:
    from torch import Tensor

    from ..._select.tokens import TokenRules

__all__ = ["select_tokens"]

_NOT_TAKEN = ("dtype", "kv_dtype")

# ---- The operator -------------------------------------------------------------------------------------------------


def _on_cpu(told: dict[str, Any], return_scores: bool) -> Any:
    return numpy_calls.select_tokens(**told, return_scores=return_scores)


def _shapes(told: dict[str, Any]) -> Any:
    q = told["q"]
    shape = (*q.shape[:-2], told["top_k"] + bool(told.get("keep_tail")))
    return q.new_empty(shape, dtype=torch.int32), q.new_empty(shape, dtype=torch.float64 if q.dtype == torch.float64 else torch.float32)


_ARGUMENTS = taken(numpy_calls.select_tokens, _NOT_TAKEN)
operators.define("select_tokens", _ARGUMENTS, "q k weights", _on_cpu, _shapes, operators.without("select_tokens"))
takes(numpy_calls.select_tokens, _ARGUMENTS)

# ---- The call -----------------------------------------------------------------------------------------------------


@overload
def select_tokens(
    q: Tensor, k: Tensor, weights: Tensor, top_k: int, *, return_scores: Literal[False] = False, **options: Unpack[TokenRules]
) -> Tensor: ...
@overload
def select_tokens(
    q: Tensor, k: Tensor, weights: Tensor, top_k: int, *, return_scores: Literal[True], **options: Unpack[TokenRules]
) -> tuple[Tensor, Tensor]: ...
@overload
def select_tokens(q: Tensor, k: Tensor, weights: Tensor, top_k: int, *, return_scores: bool, **options: Unpack[TokenRules]) -> Any: ...
@like(numpy_calls.select_tokens, _NOT_TAKEN)
def select_tokens(q: Any, k: Any, weights: Any, top_k: Any, *, return_scores: Any = False, **rules: Any) -> Any:
    """`blitz_attn.select_tokens` on torch tensors, as an operator that `torch.compile` takes into its graph.

    Parameters
    ----------
    q, k, weights : torch.Tensor
        CPU tensors: see `blitz_attn.select_tokens` for shapes and dtypes.
    top_k : int
        How many keys, pools or blocks each query gets.
    scale, causal, q_lens, kv_lens, cu_seqlens_q, cu_seqlens_kv, block_tables, q_begin, ascending
        See `blitz_attn.select_tokens`. Under `torch.compile`, arrays must be tensors.
    pool_size, keep_tail, block_size, min_score, k_scale
        See `blitz_attn.select_tokens`. Under `torch.compile`, arrays must be tensors.
    return_scores : bool
        Also return the scores of the chosen keys. They have no gradient.
    num_threads : int, optional
        Threads for this call.

    Returns
    -------
    selected : torch.Tensor
        ``(B, Sq, top_k)``, or ``(T, top_k)``, int32: the keys, pools or blocks of each query, then -1. With `keep_tail`, one entry more.
    scores : torch.Tensor
        With `return_scores`, of the same shape: float32 (float64 for float64).

    Raises
    ------
    TypeError, ValueError
        As `blitz_attn.select_tokens`.
    RuntimeError
        In ``backward`` through the scores.

    Examples
    --------
    >>> import torch
    >>> from blitz_attn.integrations.torch import block_sparse_attention, select_tokens
    >>> index_q, index_k, weights = torch.randn(1, 300, 16, 32), torch.randn(1, 300, 32), torch.rand(1, 300, 16)
    >>> q, k, v = (torch.randn(1, 4, 300, 64) for _ in range(3))
    >>> def attend(q, k, v):
    ...     selected = select_tokens(index_q, index_k, weights, 64, causal=True)
    ...     return block_sparse_attention(q, k, v, selected[:, None], block_shape=(1, 1), causal=True)
    >>> attend(q, k, v).shape
    torch.Size([1, 4, 300, 64])
    """
    expect_tensors(q=q, k=k, weights=weights)
    given = read("select_tokens", {"top_k": top_k} | rules)
    return operators.call("select_tokens", q, k, weights, **given, return_lse=flag_of(return_scores, "return_scores"))
