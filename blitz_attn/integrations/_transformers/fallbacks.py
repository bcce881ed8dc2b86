"""Warnings that torch computes attention instead of this library: each reason once, on the logger of the integration, which is that of
transformers or of diffusers."""

from __future__ import annotations

import logging

import torch

__all__ = ["TOLD", "tell"]

TOLD: set[str] = set()  # reasons that were logged


@torch.compiler.assume_constant_result
def tell(text: str, integration: str = "transformers") -> None:
    """Log a warning, once. torch.compile does so while it traces."""
    if text not in TOLD:
        TOLD.add(text)
        logging.getLogger(f"blitz_attn.integrations.{integration}").warning(text)
