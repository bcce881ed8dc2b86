"""Writing new tokens into a paged cache, and into the summaries of its pages, with arrays of any kind."""

from __future__ import annotations

from typing import Any, NamedTuple

from .. import _arrays, _core
from .call import scales_for_core


class Summaries(NamedTuple):
    """The summaries that appending keeps up to date: see `append_paged_kv`."""

    maxblocks: Any
    minblocks: Any
    meanblocks: Any
    tables: Any  # metadata_block_tables

    def arrays(self) -> dict[str, Any]:
        return {"maxblocks": self.maxblocks, "minblocks": self.minblocks, "meanblocks": self.meanblocks}


def _is_written(scale: Any) -> bool:
    """Whether appending writes this k_scale or v_scale. An array with a scale for each token and head is written; one scale per head, or a
    single scale, is only read."""
    return scale is not None and len(_arrays.shape_of(scale)) > 1


def _scales_to_append(scale: Any, name: str, cache: Any) -> Any:
    """k_scale or v_scale as the core takes it for appending."""
    if scale is None:
        return None
    if _is_written(scale):
        return _arrays.writable(scale, name)
    return scales_for_core(_arrays.readable(scale, name), name, cache)


def append_tokens(
    k: Any, v: Any, k_cache: Any, v_cache: Any, slot_mapping: Any, requests: tuple[Any, ...], kv_layout: Any, k_scale: Any, v_scale: Any,
    summaries: Summaries, dtype: Any, kv_dtype: Any, num_threads: Any,
) -> None:  # fmt: skip
    """Writes new tokens, and updates the summaries that are given, by one call of the core. `requests` are those of `attend_requests`, and
    are read only where `slot_mapping` is None."""
    arrays = summaries.arrays()
    if summaries.tables is None and any(x is not None for x in arrays.values()):
        raise ValueError("metadata_block_tables: expected the tables of maxblocks, minblocks and meanblocks, got None")
    tables, seq_lens, indptr, last_page_len, q_lens, q_begin, _ = requests
    writable = _arrays.writable
    new = _arrays.readable(k, "k"), None if v is None else _arrays.readable(v, "v"), writable(k_cache, "k_cache", True)
    values, kv_kind = _arrays.of_format(writable(v_cache, "v_cache", True), _arrays.kv_dtype_name(kv_dtype))
    _core.append_paged_kv(
        *new, values, slot_mapping, tables, seq_lens, indptr, last_page_len, q_lens, q_begin, kv_layout,
        _scales_to_append(k_scale, "k_scale", k_cache), _scales_to_append(v_scale, "v_scale", v_cache), summaries.tables,
        *(writable(x, name) for name, x in arrays.items()), _arrays.dtype_name(dtype), kv_kind, num_threads,
    )  # fmt: skip
    _arrays.count_writes(k_cache, v_cache, *(x for x in (k_scale, v_scale) if _is_written(x)), *arrays.values())
