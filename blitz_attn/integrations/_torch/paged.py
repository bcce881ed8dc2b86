"""Decode over paged caches. Public through `blitz_attn.integrations.torch`."""

from __future__ import annotations

from typing import Any

from ..._names import KV_LAYOUTS, KVLayout
from ..._paged.tables import tables_for_core
from . import operators
from .tensors import expect_tensors, flag_of, integer_of, integers_of, mask_of, number_of, numbers_of, ranges_of, text_of

__all__ = ["paged_attention", "paged_select_attention"]


def _attend(
    q: Any, k_cache: Any, v_cache: Any, block_tables: Any, seq_lens: Any, selected: Any, counts: Any, scale: Any, kv_layout: Any,
    q_lens: Any, window: Any, kv_ranges: Any, attn_mask: Any, alibi_slopes: Any, sinks: Any, softcap: Any, k_scale: Any, v_scale: Any,
    return_lse: Any, num_threads: Any,
) -> Any:  # fmt: skip
    expect_tensors(q=q, k_cache=k_cache, v_cache=v_cache)
    return_lse = flag_of(return_lse, "return_lse")
    if block_tables is None:
        raise TypeError("block_tables: expected an array, got NoneType")
    tables, seq_lens, indptr, last_page_len = tables_for_core(block_tables, seq_lens)
    out, lse = operators.call(
        "paged_attention", q, k_cache, v_cache, integers_of(tables, "block_tables"), integers_of(seq_lens, "seq_lens"),
        integers_of(indptr, "indptr"), integers_of(last_page_len, "last_page_len"), integers_of(selected, "selected"),
        integers_of(counts, "counts"), numbers_of(sinks, "sinks"), numbers_of(k_scale, "k_scale"), numbers_of(v_scale, "v_scale"),
        integers_of(q_lens, "q_lens"), ranges_of(kv_ranges), mask_of(attn_mask, "attn_mask"),
        numbers_of(alibi_slopes, "alibi_slopes"), scale=number_of(scale, "scale"),
        kv_layout=text_of(kv_layout, "kv_layout", KV_LAYOUTS), window=integer_of(window, "window"),
        softcap=number_of(softcap, "softcap"), num_threads=integer_of(num_threads, "num_threads"), return_lse=return_lse,
    )  # fmt: skip
    return (out, lse) if return_lse else out


def paged_attention(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    block_tables: Any,
    seq_lens: Any = None,
    *,
    scale: float | None = None,
    kv_layout: KVLayout = "NHD",
    q_lens: Any = None,
    window: int | None = None,
    kv_ranges: Any = None,
    attn_mask: Any = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
    softcap: float | None = None,
    k_scale: Any = None,
    v_scale: Any = None,
    return_lse: bool = False,
    num_threads: int | None = None,
) -> Any:
    """`blitz_attn.paged_attention` on torch tensors, as an operator that `torch.compile` takes into its graph.

    Parameters
    ----------
    q, k_cache, v_cache : torch.Tensor
        CPU tensors: see `blitz_attn.paged_attention` for shapes and dtypes.
    block_tables, seq_lens, scale, kv_layout, q_lens, window, kv_ranges, attn_mask, alibi_slopes, sinks, softcap, k_scale, v_scale
        See `blitz_attn.paged_attention`. Under `torch.compile`, arrays are tensors.
    return_lse : bool
        Also return the log-sum-exp.
    num_threads : int, optional
        Threads for this call.

    Returns
    -------
    out : torch.Tensor
        ``(B, H, Dv)`` or ``(T, H, Dv)``, dtype of `q`.
    lse : torch.Tensor
        With `return_lse`: ``(B, H)`` or ``(T, H)``, float32 (float64 for float64).

    Raises
    ------
    TypeError, ValueError
        As `blitz_attn.paged_attention`.
    RuntimeError
        In ``backward``: it has no gradient.

    Examples
    --------
    >>> import torch
    >>> from blitz_attn.integrations.torch import paged_attention
    >>> k_cache, v_cache = (torch.randn(6, 16, 2, 64) for _ in range(2))
    >>> tables, seq_lens = torch.tensor([[4, 1, 0], [2, 5, 3]]), torch.tensor([40, 48])
    >>> paged_attention(torch.randn(2, 8, 64), k_cache, v_cache, tables, seq_lens).shape
    torch.Size([2, 8, 64])
    """
    return _attend(
        q, k_cache, v_cache, block_tables, seq_lens, None, None, scale, kv_layout, q_lens, window, kv_ranges, attn_mask, alibi_slopes,
        sinks, softcap, k_scale, v_scale, return_lse, num_threads,
    )  # fmt: skip


def paged_select_attention(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    block_tables: Any,
    seq_lens: Any,
    selected: Any,
    *,
    counts: Any = None,
    scale: float | None = None,
    kv_layout: KVLayout = "NHD",
    q_lens: Any = None,
    window: int | None = None,
    kv_ranges: Any = None,
    attn_mask: Any = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
    softcap: float | None = None,
    k_scale: Any = None,
    v_scale: Any = None,
    return_lse: bool = False,
    num_threads: int | None = None,
) -> Any:
    """`blitz_attn.paged_select_attention` on torch tensors, as an operator that `torch.compile` takes into its graph.

    Parameters
    ----------
    q, k_cache, v_cache : torch.Tensor
        CPU tensors: see `blitz_attn.paged_attention` for shapes and dtypes.
    block_tables, seq_lens, selected, counts, scale, kv_layout, q_lens, window, kv_ranges, attn_mask, alibi_slopes, sinks, softcap
        See `blitz_attn.paged_select_attention`. Under `torch.compile`, arrays are tensors.
    k_scale, v_scale : torch.Tensor or array_like, optional
        See `blitz_attn.paged_attention`.
    return_lse : bool
        Also return the log-sum-exp.
    num_threads : int, optional
        Threads for this call.

    Returns
    -------
    out : torch.Tensor
        ``(B, H, Dv)`` or ``(T, H, Dv)``, dtype of `q`.
    lse : torch.Tensor
        With `return_lse`: ``(B, H)`` or ``(T, H)``, float32 (float64 for float64).

    Raises
    ------
    TypeError, ValueError
        As `blitz_attn.paged_select_attention`.
    RuntimeError
        In ``backward``: it has no gradient.

    Examples
    --------
    >>> import torch
    >>> from blitz_attn.integrations.torch import paged_select_attention
    >>> k_cache, v_cache = (torch.randn(6, 16, 2, 64) for _ in range(2))
    >>> tables, seq_lens, selected = torch.tensor([[4, 1, 0]]), torch.tensor([40]), torch.tensor([[[0, 2], [2, 1]]])
    >>> paged_select_attention(torch.randn(1, 8, 64), k_cache, v_cache, tables, seq_lens, selected).shape
    torch.Size([1, 8, 64])
    """
    if selected is None:
        raise TypeError("selected: expected an array, got NoneType")
    return _attend(
        q, k_cache, v_cache, block_tables, seq_lens, selected, counts, scale, kv_layout, q_lens, window, kv_ranges, attn_mask, alibi_slopes,
        sinks, softcap, k_scale, v_scale, return_lse, num_threads,
    )  # fmt: skip
