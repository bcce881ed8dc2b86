"""Attention of diffusers' calls by this library: tensors (B, S, H, D), and masks as torch reads them."""

from __future__ import annotations

from typing import Any

import torch

from .._torch import attention, operators  # noqa: F401 - the first one defines operators
from .._torch.arguments import read
from .._transformers.fallbacks import DTYPES, why_not_tensors

__all__ = ["computed", "why_not"]


def why_not(query: Any, key: Any, value: Any, attn_mask: Any, dropout_p: float, is_causal: bool, enable_gqa: bool) -> str | None:
    """Why this library does not compute a call; None where it does."""
    reason = why_not_tensors(query, key, value)
    if reason is not None:
        return reason
    if key.shape[0] != query.shape[0] or value.shape[0] != query.shape[0]:
        return "queries, keys and values of different batches"
    if value.shape[2] != key.shape[2]:
        return "different numbers of heads of keys and values"
    if key.shape[2] != query.shape[2] and not enable_gqa:
        return "different numbers of heads of queries and keys without enable_gqa"
    if dropout_p:
        return "dropout of attention weights"
    if is_causal and (attn_mask is not None or query.shape[1] != key.shape[1]):
        return "a causal rule with a mask, or for different numbers of queries and keys"
    if attn_mask is not None:
        shape = (query.shape[0], query.shape[2], query.shape[1], key.shape[1])
        mask = _of_pairs(attn_mask, query, key)
        if mask.device.type != "cpu" or mask.dtype not in (torch.bool, *DTYPES):
            return f"a mask of {mask.dtype} on {mask.device}"
        if mask.dim() > 4 or any(n not in (1, m) for n, m in zip(mask.shape[::-1], shape[::-1], strict=False)):
            return f"a mask of shape {tuple(mask.shape)} where attention has {shape}"
    return None


def _of_pairs(mask: Any, query: Any, key: Any) -> Any:
    """A mask of diffusers as a mask that torch expands to (B, H, Sq, Skv). A mask (B, Skv) hides keys of each batch entry."""
    return mask[:, None, None] if mask.dim() == 2 and mask.shape == (query.shape[0], key.shape[1]) else mask


def computed(
    query: Any, key: Any, value: Any, attn_mask: Any = None, is_causal: bool = False, scale: float | None = None, **rules: Any
) -> Any:
    """Attention by this library, in the layout of diffusers. `rules`: further options of `block_sparse_attention`."""
    options = read("block_sparse_attention", {"layout": "BSND", "causal": is_causal, "scale": scale} | rules)
    mask = None if attn_mask is None else _of_pairs(attn_mask, query, key)
    return operators.call(
        "block_sparse_attention", query, key, value, **options, attn_mask=mask, reads_mask=mask is not None, return_lse=False
    )
