"""Reasons why torch computes attention instead of this library, and their warnings. Each reason is logged once, on the logger of the
integration, for transformers or for diffusers. Each call of `sparse_video` has a set of reasons of its own, and logs each of them once."""

from __future__ import annotations

import logging
from typing import Any

import torch

__all__ = ["DTYPES", "MOST_HEAD_DIM", "TOLD", "tell", "why_not_tensors"]

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
MOST_HEAD_DIM = 576
TOLD: set[str] = set()  # reasons that were logged


def why_not_tensors(q: Any, k: Any, v: Any) -> str | None:
    """Why this library cannot attend to the tensors of a layer, whatever their layout; None where it can."""
    tensors = (q, k, v)
    elsewhere = [x.device for x in tensors if x.device.type != "cpu"]
    if elsewhere:
        return f"tensors on {elsewhere[0]}"
    if q.dtype not in DTYPES or any(x.dtype != q.dtype for x in tensors):
        return f"tensors of {', '.join(str(x.dtype) for x in tensors)}"
    if any(x.dim() != 4 for x in tensors):
        return f"tensors of {q.dim()}, {k.dim()} and {v.dim()} axes"
    if max(q.shape[3], v.shape[3]) > MOST_HEAD_DIM:
        return f"a head dim above {MOST_HEAD_DIM}"
    return None


@torch.compiler.assume_constant_result
def tell(text: str, integration: str = "transformers", told: set[str] = TOLD) -> None:
    """Log a warning, unless `told` has it already. Under torch.compile, it is logged while the call is traced."""
    if text not in told:
        told.add(text)
        logging.getLogger(f"blitz_attn.integrations.{integration}").warning(text)
