"""The options of an attention call that choosing blocks and judging a block list share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self


@dataclass(frozen=True, eq=False, kw_only=True)
class Options:
    """The options of `block_sparse_attention` that also concern the choice of blocks. ``**vars(options)`` passes them on."""

    block_shape: Any
    scale: Any = None
    layout: Any = "BNSD"
    causal: Any = False
    window: Any = None
    q_lens: Any = None
    kv_lens: Any = None
    cu_seqlens_q: Any = None
    cu_seqlens_kv: Any = None
    num_heads: Any = None
    num_kv_heads: Any = None
    q_begin: Any = None
    kv_ranges: Any = None
    dtype: Any = None
    num_threads: Any = None

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Self:
        """Picks the options from all arguments of a function, by name."""
        return cls(**{name: given[name] for name in cls.__dataclass_fields__ if name in given})


@dataclass(frozen=True, eq=False, kw_only=True)
class JudgingOptions(Options):
    """`Options` for judging a list: also the options that change attention but not the choice of blocks."""

    attn_mask: Any = None
    alibi_slopes: Any = None
    sinks: Any = None
    softcap: Any = None
