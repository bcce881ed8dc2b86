"""Page tables and lengths of a batch of requests, from either form that callers may give."""

from __future__ import annotations

from typing import Any

from .. import _arrays
from .._names import KV_LAYOUTS


def tables_for_core(block_tables: Any, seq_lens: Any) -> tuple[Any, Any, Any, Any]:
    """(tables, seq_lens, indptr, last_page_len) as the core takes them, from an array of tables or a triple."""
    if isinstance(block_tables, tuple):
        if len(block_tables) != 3:
            raise ValueError(f"block_tables: expected an array or (indptr, indices, last_page_len), got a tuple of {len(block_tables)}")
        if seq_lens is not None:
            raise ValueError("seq_lens: expected None with (indptr, indices, last_page_len), which give the lengths, got lengths as well")
        indptr, indices, last_page_len = block_tables
        for part, name in ((indptr, "indptr"), (indices, "indices"), (last_page_len, "last_page_len")):
            if part is None:
                raise TypeError(f"{name}: expected an array of (indptr, indices, last_page_len), got NoneType")
        return indices, None, indptr, last_page_len
    if seq_lens is None:
        if isinstance(block_tables, list):  # most likely [indptr, indices, last_page_len]
            raise TypeError("block_tables: expected an array or a tuple (indptr, indices, last_page_len), got list")
        raise ValueError("seq_lens: expected one length per request where block_tables is an array, got None")
    return block_tables, seq_lens, None, None


def cache_shape(cache: Any, name: str, kv_layout: str) -> tuple[int, ...]:
    """The shape of k_cache or v_cache, which is refused unless it has four axes."""
    shape = _arrays.shape_of(cache)
    if len(shape) != 4:
        axes = "page_size, Hkv" if kv_layout == "NHD" else "Hkv, page_size"
        raise ValueError(f"{name}: expected shape (pages, {axes}, D), got {shape}")
    return shape


def cache_sizes(k_cache: Any, kv_layout: Any) -> tuple[int, int, int]:
    """Pages, tokens per page and KV heads of a cache."""
    layout = _arrays.choice(kv_layout, "kv_layout", KV_LAYOUTS)
    shape = cache_shape(k_cache, "k_cache", layout)
    return (shape[0], shape[1], shape[2]) if layout == "NHD" else (shape[0], shape[2], shape[1])
