"""Decode over paged caches. Public through `blitz_attn.integrations.torch`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

from ... import paged as numpy_calls
from ..._operations import OPERATIONS, like
from ..._paged.tables import tables_for_core
from . import operators
from .arguments import KV_FORMAT, NOT_TAKEN_OF_PAGES, read, taken, takes
from .tensors import expect_tensors, integers_of, lowered, torch

if TYPE_CHECKING:
    from torch import Tensor

    from ..._paged.call import PagedRules, PagedSelectRules
    from ..._types import Array, Integers, Tables

    class TensorRules(PagedRules, total=False):
        """Options of `paged_attention` here."""

        kv_dtype: str | tuple[str, str] | None

    class TensorSelectRules(PagedSelectRules, total=False):
        """Options of `paged_select_attention` here."""

        kv_dtype: str | tuple[str, str] | None

__all__ = ["paged_attention", "paged_select_attention"]


# ---- The operator -------------------------------------------------------------------------------------------------


def _on_cpu(told: dict[str, Any], return_lse: bool) -> Any:
    indptr, last_page_len, selected = (told.pop(name, None) for name in ("indptr", "last_page_len", "selected"))
    if told.get("kv_dtype") and "," in told["kv_dtype"]:
        told["kv_dtype"] = tuple(told["kv_dtype"].split(","))
    if indptr is not None:
        told["block_tables"] = indptr, told["block_tables"], last_page_len
    if selected is None:
        told.pop("counts", None)
        told.pop("selected_size", None)
        return numpy_calls.paged_attention(**told, return_lse=return_lse)
    told.setdefault("seq_lens", None)
    return numpy_calls.paged_select_attention(**told, selected=selected, return_lse=return_lse)


def _cast_queries(told: dict[str, Any], dtype: Any) -> None:
    """Casts queries to the dtype of their cache, unless that is float64. For caches with elements of one byte, casts them to `dtype`. The
    cache, which holds all tokens so far, is never cast."""
    kept = told["k_cache"].dtype
    to = dtype if kept.itemsize == 1 else kept
    told["q"] = told["q"] if to == torch.float64 else lowered(told["q"], to)


_TABLES = {x.name: x for x in OPERATIONS["paged_attention"] if x.name in ("indptr", "last_page_len", "selected", "counts", "selected_size")}
operators.define(
    "paged_attention",
    taken(numpy_calls.paged_attention) | {name: x._replace(default=None) for name, x in _TABLES.items()} | {"kv_dtype": KV_FORMAT},
    "q k_cache v_cache block_tables seq_lens indptr last_page_len selected counts sinks k_scale v_scale q_lens kv_ranges attn_mask "
    "alibi_slopes",
    _on_cpu,
    operators.attend_shapes,
    operators.without("paged_attention"),
    cast=_cast_queries,
)
for _function in (numpy_calls.paged_attention, numpy_calls.paged_select_attention):
    takes(_function, taken(_function) | {"kv_dtype": KV_FORMAT})


# ---- Calls --------------------------------------------------------------------------------------------------------


def _attend(function: str, q: Any, k_cache: Any, v_cache: Any, block_tables: Any, return_lse: Any, rules: dict[str, Any]) -> Any:
    expect_tensors(q=q, k_cache=k_cache, v_cache=v_cache)
    if block_tables is None:
        raise TypeError("block_tables: expected an array, got NoneType")
    tables, rules["seq_lens"], indptr, last_page_len = tables_for_core(block_tables, rules["seq_lens"])
    told = read(function, rules)
    if indptr is not None:
        told |= {"indptr": integers_of(indptr, "indptr"), "last_page_len": integers_of(last_page_len, "last_page_len")}
    given = q, k_cache, v_cache, integers_of(tables, "block_tables")
    return operators.call("paged_attention", *given, **told, return_lse=return_lse)


@overload
def paged_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_tables: Tables, seq_lens: Integers | None = None, *,
    return_lse: Literal[False] = False, **options: Unpack[TensorRules],
) -> Tensor: ...  # fmt: skip
@overload
def paged_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_tables: Tables, seq_lens: Integers | None = None, *, return_lse: Literal[True],
    **options: Unpack[TensorRules],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def paged_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_tables: Tables, seq_lens: Integers | None = None, *, return_lse: bool,
    **options: Unpack[TensorRules],
) -> Any: ...  # fmt: skip
@like(numpy_calls.paged_attention, NOT_TAKEN_OF_PAGES)
def paged_attention(
    q: Any, k_cache: Any, v_cache: Any, block_tables: Any, seq_lens: Any = None, *, return_lse: Any = False, **rules: Any
) -> Any:
    """`blitz_attn.paged_attention` on torch tensors, as an operator that `torch.compile` takes into its graph.

    Parameters
    ----------
    q, k_cache, v_cache : torch.Tensor
        CPU tensors: see `blitz_attn.paged_attention` for shapes and dtypes.
    block_tables, seq_lens, scale, kv_layout, q_lens, window, kv_ranges, attn_mask, alibi_slopes, sinks, softcap, k_scale, v_scale
        See `blitz_attn.paged_attention`. Under `torch.compile`, arrays must be tensors.
    return_lse : bool
        Also return the log-sum-exp.
    kv_dtype : str or pair of str, optional
        For caches of uint8: ``"q8_0"``, ``"q4_0"`` or ``"q4_1"``, or a pair for keys and values. Caches of other dtypes need none.
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
        In ``backward``: the operation has no gradient.

    Examples
    --------
    >>> import torch
    >>> from blitz_attn.integrations.torch import paged_attention
    >>> k_cache, v_cache = (torch.randn(6, 16, 2, 64) for _ in range(2))
    >>> tables, seq_lens = torch.tensor([[4, 1, 0], [2, 5, 3]]), torch.tensor([40, 48])
    >>> paged_attention(torch.randn(2, 8, 64), k_cache, v_cache, tables, seq_lens).shape
    torch.Size([2, 8, 64])
    """
    return _attend("paged_attention", q, k_cache, v_cache, block_tables, return_lse, {"seq_lens": seq_lens} | rules)


@overload
def paged_select_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_tables: Tables, seq_lens: Integers | None, selected: Array, *,
    return_lse: Literal[False] = False, **options: Unpack[TensorSelectRules],
) -> Tensor: ...  # fmt: skip
@overload
def paged_select_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_tables: Tables, seq_lens: Integers | None, selected: Array, *,
    return_lse: Literal[True], **options: Unpack[TensorSelectRules],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def paged_select_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_tables: Tables, seq_lens: Integers | None, selected: Array, *, return_lse: bool,
    **options: Unpack[TensorSelectRules],
) -> Any: ...  # fmt: skip
@like(numpy_calls.paged_select_attention, NOT_TAKEN_OF_PAGES)
def paged_select_attention(
    q: Any, k_cache: Any, v_cache: Any, block_tables: Any, seq_lens: Any, selected: Any, *, return_lse: Any = False, **rules: Any
) -> Any:
    """`blitz_attn.paged_select_attention` on torch tensors, as an operator that `torch.compile` takes into its graph.

    Parameters
    ----------
    q, k_cache, v_cache : torch.Tensor
        CPU tensors: see `blitz_attn.paged_attention` for shapes and dtypes.
    block_tables, seq_lens, selected, counts, scale, kv_layout, q_lens, window, kv_ranges, attn_mask, alibi_slopes, sinks, softcap
        See `blitz_attn.paged_select_attention`. Under `torch.compile`, arrays must be tensors.
    k_scale, v_scale : torch.Tensor or array_like, optional
        See `blitz_attn.paged_attention`.
    return_lse : bool
        Also return the log-sum-exp.
    kv_dtype : str or pair of str, optional
        For caches of uint8: ``"q8_0"``, ``"q4_0"`` or ``"q4_1"``, or a pair for keys and values. Caches of other dtypes need none.
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
        In ``backward``: the operation has no gradient.

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
    rules |= {"seq_lens": seq_lens, "selected": selected}
    return _attend("paged_select_attention", q, k_cache, v_cache, block_tables, return_lse, rules)
