"""Where the pages of vLLM's cache hold keys, values, scales and summaries.

vLLM gives each layer one array of blocks. Each block has `heads` slots of ``block_size * bytes_per_token`` bytes. A slot holds the keys of
all tokens of the block, and then their values. In caches with a scale for each token, the scales of the keys and of the values follow. For
Quest, the largest and the smallest number of each dim of the block's keys follow. As all these parts lie in the block, vLLM's own copies of
blocks, its prefix cache and its accounting of memory cover them, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

# [vLLM's name of a cache dtype]: the library's 8-bit dtype (None for floats), and whether each token and head has scales of its own.
KV_DTYPES: dict[str, tuple[str | None, bool]] = {
    "auto": (None, False),
    "float16": (None, False),
    "bfloat16": (None, False),
    "fp8": ("float8_e4m3", False),
    "fp8_e4m3": ("float8_e4m3", False),
    "fp8_per_token_head": ("float8_e4m3", True),
    "int8_per_token_head": ("int8", True),
}
_SCALE = torch.float32


class Views(NamedTuple):
    """The parts of a layer's cache, as the operations take them (layout HND)."""

    k: Any
    v: Any
    k_scale: Any  # None where tokens have no scales
    v_scale: Any
    largest: Any  # None without summaries
    smallest: Any


@dataclass(frozen=True)
class Pages:
    """The parts of a block of one layer's cache, for blocks of `block_size` tokens."""

    block_size: int
    head_dim: int
    widths: tuple[int, int]  # elements of a key and of a value: `head_dim`, or the bytes of a row that holds them quantised
    dtype: torch.dtype  # of keys and values
    scaled: bool  # whether each token has scales
    summary: torch.dtype | None  # of the summaries; None: there are none

    def _parts(self) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
        tokens, dim = self.block_size, self.head_dim
        parts: list[tuple[str, tuple[int, ...], torch.dtype]]
        parts = [(name, (tokens, n), self.dtype) for name, n in zip("kv", self.widths, strict=True)]
        if self.scaled:
            parts += [(name, (tokens,), _SCALE) for name in ("k_scale", "v_scale")]
        if self.summary is not None:
            parts += [(name, (dim,), self.summary) for name in ("largest", "smallest")]
        return parts

    @property
    def bytes_per_token(self) -> int:
        """Bytes of a token and head, with its share of the summaries: a multiple of 16, so that slots begin at aligned addresses."""
        used = sum(torch.Size(shape).numel() * dtype.itemsize for _, shape, dtype in self._parts())
        return -(-used // (16 * self.block_size)) * 16

    def views(self, cache: torch.Tensor) -> Views:
        """The parts of a cache of shape (blocks, heads, block_size, elements of a token)."""
        blocks, heads, tokens, _ = cache.shape
        slots = cache.view(torch.uint8)
        size = tokens * slots.shape[3]
        slots = slots.as_strided((blocks, heads, size), (slots.stride(0), slots.stride(1), 1))
        found: dict[str, Any] = dict.fromkeys(Views._fields)
        begin = 0
        for name, shape, dtype in self._parts():
            end = begin + torch.Size(shape).numel() * dtype.itemsize
            part = slots[:, :, begin:end].view(dtype)
            found[name] = part.unsqueeze(1) if name in ("largest", "smallest") else part.unflatten(2, shape)
            begin = end
        return Views(**found)
