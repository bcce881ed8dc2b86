"""Warnings that torch computes attention instead of this library: each reason once, on the logger of the integration."""

from __future__ import annotations

import logging

import torch

__all__ = ["TOLD", "tell"]

_LOG = logging.getLogger("blitz_attn.integrations.transformers")
TOLD: set[str] = set()  # reasons that were logged


@torch.compiler.assume_constant_result
def tell(text: str) -> None:
    """Log a warning, once. torch.compile does so while it traces."""
    if text not in TOLD:
        TOLD.add(text)
        _LOG.warning(text)
