"""Writing new tokens into a paged cache, and into the summaries of its pages, with arrays of any kind."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

from numpy import asarray, ndarray

from .. import _arrays, _core
from .._floats import refuse_overlaps
from .._sentences import renamed
from .call import scales_for_core


class Summaries(NamedTuple):
    """The summaries that appending keeps up to date, see `append_paged_kv`."""

    maxblocks: Any
    minblocks: Any
    meanblocks: Any
    tables: Any  # metadata_block_tables

    def arrays(self) -> dict[str, Any]:
        return {"maxblocks": self.maxblocks, "minblocks": self.minblocks, "meanblocks": self.meanblocks}


def _is_written(scale: Any) -> bool:
    """Whether appending writes k_scale or v_scale, which it does where there is one per token and head, and reads it otherwise."""
    return scale is not None and len(_arrays.shape_of(scale)) > 1


def _scales_to_append(scale: Any, name: str, cache: Any) -> Any:
    """k_scale or v_scale as the core takes it for appending."""
    if scale is None:
        return None
    if _is_written(scale):
        return _arrays.writable(scale, name)
    return scales_for_core(_arrays.readable(scale, name), name, cache)


def _write(
    k: Any, v: Any, k_cache: Any, v_cache: Any, slot_mapping: Any, requests: tuple[Any, ...], kv_layout: Any, k_scale: Any, v_scale: Any,
    dtype: Any, kv_dtype: Any, num_threads: Any,
) -> None:  # fmt: skip
    """Writes new tokens by one call of the core."""
    tables, seq_lens, indptr, last_page_len, q_lens, q_begin, _ = requests
    writable = _arrays.writable
    _core.append_paged_kv(
        _arrays.readable(k, "k"), None if v is None else _arrays.readable(v, "v"), writable(k_cache, "k_cache", True),
        writable(v_cache, "v_cache", True), slot_mapping, tables, seq_lens, indptr, last_page_len, q_lens, q_begin, kv_layout,
        _scales_to_append(k_scale, "k_scale", k_cache), _scales_to_append(v_scale, "v_scale", v_cache),
        _arrays.dtype_name(dtype), _arrays.dtype_name(kv_dtype, "kv_dtype"), num_threads,
    )  # fmt: skip
    _arrays.count_writes(k_cache, v_cache, *(x for x in (k_scale, v_scale) if _is_written(x)))


def _lengths(requests: tuple[Any, ...]) -> tuple[Any, ndarray, Any]:
    """seq_lens as the core takes it, the number of tokens of each request, and of its new tokens, which may not fit."""
    tables, seq_lens, _, _, q_lens, _, _ = requests
    if seq_lens is None:  # opened tables, which have the lengths
        ends, new = (asarray(x, int) for x in _core.page_table_lengths(tables))
        return None, ends, new
    ends = _arrays.integers(seq_lens, "seq_lens").copy()
    return ends, ends, 1 if q_lens is None else _arrays.integers(q_lens, "q_lens")


def append_tokens(
    k: Any, v: Any, k_cache: Any, v_cache: Any, slot_mapping: Any, requests: tuple[Any, ...], kv_layout: Any, k_scale: Any, v_scale: Any,
    summaries: Summaries, dtype: Any, kv_dtype: Any, num_threads: Any,
) -> None:  # fmt: skip
    """Writes new tokens, and updates the summaries that are given. `requests`: as for `attend_requests`; they are read where `slot_mapping`
    is None."""
    call = k, v, k_cache, v_cache, slot_mapping, requests, kv_layout, k_scale, v_scale, dtype, kv_dtype, num_threads
    if summaries.tables is None:
        if not (summaries.maxblocks is summaries.minblocks is summaries.meanblocks is None):
            raise ValueError("metadata_block_tables: expected the tables of maxblocks, minblocks and meanblocks, got None")
        _write(*call)
        return
    arrays = summaries.arrays()
    named, names = _arrays.dtype_name(kv_dtype, "kv_dtype"), {"start_lens": "seq_lens", "dtype": "kv_dtype"}
    if named is None and str(_arrays.dtype_of(k_cache)).endswith("uint16"):  # bits, which `dtype` names, too
        named, names["dtype"] = _arrays.dtype_name(dtype), "dtype"
    seq_lens, ends, new = _lengths(requests)
    refresh = partial(
        _core.quest_metadata, _arrays.readable(k_cache, "k_cache", True), requests[0], seq_lens, summaries.tables, kv_layout=kv_layout,
        dtype=named, num_threads=num_threads, k_scale=scales_for_core(k_scale, "k_scale", k_cache),
        **{name: _arrays.writable(x, name) for name, x in arrays.items()},
    )  # fmt: skip
    refuse_overlaps(arrays, k=k, v=v, v_cache=v_cache, v_scale=v_scale)
    try:
        refresh(start_lens=ends)  # an empty range: all checks but no work, so that nothing is written where the call below would fail
    except (TypeError, ValueError) as error:
        raise renamed(error, names) from error
    _write(*call)
    refresh(start_lens=ends - new)
    _arrays.count_writes(*arrays.values())
