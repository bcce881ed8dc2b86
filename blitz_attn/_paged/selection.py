"""The core's call that selects blocks of a paged cache, with arrays of any kind: by itself, and before attention over these blocks."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy import empty

from .. import _arrays, _core
from .._sentences import rename, shown
from .call import scales_for_core

_MOST = 2**31 - 1  # blocks in a row of the result
_NAMES = {
    "query": "q",
    **dict.fromkeys(("maxblocks", "meanblocks", "k_cache"), "source"),
    **dict.fromkeys(("block_tables", "metadata_block_tables"), "tables"),
}


class Opened(NamedTuple):
    """Opened page tables in place of `seq_lens`. They replace `q_lens`, the block size and, for the method max, the tables, too."""

    tables: Any  # opened by the core
    page_size: int


def integer_empty(like: Any) -> Any:
    """The function that makes results of the same kind of array as `like`."""
    return empty if type(like) is np.ndarray else _arrays.family_of(like).empty


def budgets(k: Any, budget: Any, dense_below: int | None, seq_lens: Any, size: int) -> tuple[Any, list[int] | None]:
    """(width of the result, number of blocks of each request). The second value is None where every request gets as many blocks as the
    width."""
    if (k is None) == (budget is None):
        raise ValueError(f"budget: expected exactly one of budget and k, got {'neither' if k is None else 'both'}")
    one, name = (k, "k") if k is not None else (budget, "budget")
    dense_below = None if dense_below is None else _arrays.integer(dense_below, "dense_below")
    if isinstance(one, (float, np.floating)) or (dense_below is None and isinstance(one, int)):
        one = _arrays.integer(one, name)
        if k is None and one < 1:
            raise ValueError(f"budget: expected at least 1 token, got {one}")
        if k is None and one // size > _MOST:
            raise ValueError(f"budget: expected at most {_MOST} blocks of {size} tokens, got {one} tokens")
        return one if k is not None else max(1, one // size), None
    lengths = _arrays.integers(_core.page_table_lengths(seq_lens.tables)[0] if isinstance(seq_lens, Opened) else seq_lens, "seq_lens")
    wanted = _arrays.integers(one, name)
    if wanted.shape not in ((), lengths.shape) or lengths.ndim != 1:
        raise ValueError(f"{name}: expected a number, or {lengths.size} of them, one per request, got shape {wanted.shape}")
    if wanted.size and wanted.min() < 1:
        raise ValueError(f"{name}: expected at least 1, got {wanted.min()}")
    blocks = np.broadcast_to(np.maximum(1, wanted // size) if k is None else wanted, lengths.shape)
    if dense_below is not None:
        blocks = np.where(lengths < dense_below, -(-lengths // size), blocks)
    rows = blocks.tolist()
    return max(rows, default=1) or 1, rows


def block_size_of(pages: Any, kv_layout: Any, name: str, needed: bool = True) -> int | None:
    """Number of tokens per page, from the shape of `pages`; None for a shape that the core refuses. With `needed`, an unknown shape is
    refused here."""
    shape = _arrays.shape_of(pages)
    if needed and shape == () and hasattr(pages, "__dlpack__") and not hasattr(pages, "shape"):
        raise TypeError(f"{name}: expected an array with a shape, or one that NumPy can read by DLPack, got {type(pages).__name__}")
    return shape[2 if isinstance(kv_layout, str) and kv_layout == "HND" else 1] if len(shape) == 4 else None


def select_pages(
    q: Any, source: Any, tables: Any, seq_lens: Any, k: Any, *, budget: Any, method: Any, sink: Any, recent: Any, per_query_head: Any,
    dense_below: Any, tokens_since_metadata_update: Any, q_lens: Any, ascending: Any, block_size: Any, kv_layout: Any, return_scores: Any,
    k_scale: Any, dtype: Any, kv_dtype: Any, num_threads: Any,
) -> tuple[Any, ...]:  # fmt: skip
    """See `blitz_attn.select_blocks`. `seq_lens` may be opened page tables."""
    if not isinstance(method, str):
        raise TypeError(f"method: expected a string, got {type(method).__name__}")
    if seq_lens is None:
        raise TypeError("seq_lens: expected one length per request, got NoneType")
    if method not in ("quest", "mean", "max"):
        raise ValueError(f"method: expected 'quest', 'mean' or 'max', got {shown(method)}")
    if return_scores is False:  # lists have no gradient, but scores would
        (q,) = _arrays.detached(q)
        source = tuple(_arrays.detached(*source)) if isinstance(source, tuple) else _arrays.detached(source)[0]
    first, second = source if isinstance(source, tuple) and len(source) == 2 and not isinstance(source[1], str) else (source, None)
    if method == "quest" and second is None:
        raise TypeError(f"source: expected the pair (maxblocks, minblocks) for method 'quest', got {type(source).__name__}")
    if method != "quest" and second is not None:
        raise TypeError(f"source: expected one array for method {method!r}, got a pair")
    size = block_size
    if size is None:
        size = block_size_of(first, kv_layout if method == "max" else "NHD", "source", budget is not None or dense_below is not None)
    else:
        size = _arrays.integer(size, "block_size")
    if size is not None and size < 1:
        raise ValueError(f"block_size: expected at least 1 token, got {size}")
    width, blocks = budgets(k, budget, dense_below, seq_lens, size or 1)
    k_scale = None if k_scale is None else scales_for_core(k_scale, "k_scale", first)
    try:
        return _core.select_blocks(
            integer_empty(q), method, _arrays.readable(q, "query"), _arrays.readable(first, "source", method == "max"),
            None if second is None else _arrays.readable(second, "minblocks"), tables,
            seq_lens.tables if isinstance(seq_lens, Opened) else seq_lens, width, size, per_query_head, sink,
            0 if recent is None else recent, tokens_since_metadata_update, q_lens, blocks, ascending, kv_layout, None, return_counts=True,
            return_scores=return_scores, dtype=_arrays.dtype_name(dtype), num_threads=num_threads,
            k_scale=k_scale, kv_dtype=_arrays.dtype_name(kv_dtype, "kv_dtype"),
        )  # fmt: skip
    except (TypeError, ValueError) as error:
        rename(error, _NAMES)
        raise


def select_to_attend(
    q: Any, k_cache: Any, block_tables: Any, seq_lens: Any, source: Any, metadata_block_tables: Any, k: Any, *, method: Any,
    kv_layout: Any, k_scale: Any, dtype: Any, kv_dtype: Any, **choice: Any,
) -> tuple[Any, ...]:  # fmt: skip
    """The selection of `select_and_attend`. `seq_lens` may be opened page tables, which include the block tables."""
    size, kv_dtype = seq_lens.page_size if isinstance(seq_lens, Opened) else None, _arrays.kv_dtype_name(kv_dtype)
    if isinstance(method, str) and method == "max":
        for name, given in (("source", source), ("metadata_block_tables", metadata_block_tables)):
            if given is not None:
                raise ValueError(f"{name}: expected None for method 'max', which reads k_cache itself, got {type(given).__name__}")
        of_keys = {"k_scale": k_scale, "kv_dtype": kv_dtype[0] if type(kv_dtype) is tuple else kv_dtype}
        source, tables = k_cache, block_tables
        names = {"source": "k_cache", "tables": "block_tables", "block_size": "k_cache"}
    else:
        for name, given in (("source", source), ("metadata_block_tables", metadata_block_tables)):
            if given is None:
                raise ValueError(f"{name}: expected summaries and their tables for method {shown(method)}, got None")
        tables, of_keys = metadata_block_tables, {"k_scale": None, "kv_dtype": None}
        size = block_size_of(k_cache, kv_layout, "k_cache") if size is None else size
        names = {"tables": "metadata_block_tables", "block_size": "k_cache"}
    bits = "bfloat16" if "bfloat16" in (_arrays.dtype_name(dtype), kv_dtype) else None
    try:
        return select_pages(
            q, source, tables, seq_lens, k, method=method, ascending=True, block_size=size, kv_layout=kv_layout, return_scores=False,
            dtype=bits, **of_keys, **choice,
        )  # fmt: skip
    except (TypeError, ValueError) as error:
        rename(error, names)
        raise


def with_lists(result: Any, has_lse: bool, lists: tuple[Any, ...]) -> Any:
    """The result of a function that attends: `result`, which is a pair if `has_lse`, followed by `lists`, if there are any."""
    parts = (*(result if has_lse else (result,)), *lists)
    return parts if len(parts) > 1 else parts[0]
