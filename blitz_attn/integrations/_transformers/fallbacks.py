"""Warnings that torch computes attention instead of this library: each reason once, on the logger of the integration, which is that of
transformers or of diffusers. Each `sparse_video` statement has a set of its own, so that it says a reason once."""

from __future__ import annotations

import logging

import torch

__all__ = ["TOLD", "tell"]

TOLD: set[str] = set()  # reasons that were logged


@torch.compiler.assume_constant_result
def tell(text: str, integration: str = "transformers", told: set[str] = TOLD) -> None:
    """Log a warning, unless it is among those that were `told`. torch.compile does so while it traces."""
    if text not in told:
        told.add(text)
        logging.getLogger(f"blitz_attn.integrations.{integration}").warning(text)
