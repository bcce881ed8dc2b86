"""The core's calls for paged caches, with arrays of any kind."""

from __future__ import annotations

from typing import Any, NamedTuple

from numpy import empty, float32, floating, integer, ndarray, zeros

from .. import _arrays, _core
from .._arrays import bias_for_core, is_registered
from .._floats import FLOATS
from .._sentences import rename

_CORE_NAMES = {"selected_counts": "counts"}
_OTHER_FLOATS = ("float64", "float16", "bfloat16")
_STORED = {name: name for name in ("float32", "float16", "float64", "int8")} | {"bfloat16": "uint16", "float8_e4m3": "uint8"}
_NO_REQUESTS = zeros((0, 1), "int32"), (), None, None, None, None, None  # what `attend_requests` takes for none


class Rules(NamedTuple):
    """Options that hold for all calls of a plan, see `paged_attention`: the last arguments of the core's function, in its order."""

    scale: Any = None
    kv_layout: Any = "NHD"
    window: Any = None
    softcap: Any = None
    out_dtype: Any = None
    dtype: Any = None
    kv_dtype: Any = None
    num_threads: Any = None


def scales_for_core(scale: Any, name: str, cache: Any) -> Any:
    """k_scale or v_scale as the core can read it: numbers and other floats as arrays of float32. Beside a `cache` of 16 bits or more, which
    has no scale, the number 1 means none."""
    if type(scale) is ndarray:
        number = scale.ndim == 0
    else:  # of what has dimensions, some cannot say how many, such as a released memoryview, which is refused as a number
        number = isinstance(scale, (float, int, floating, integer)) or (hasattr(type(scale), "ndim") and not _arrays.shape_of(scale))
    if number:
        made = _arrays.float32_numbers(scale, name)
        return None if made == 1 and getattr(_arrays.dtype_of(cache), "itemsize", 1) > 1 else made
    other = type(scale) is not ndarray or scale.dtype != float32
    return _arrays.float32_numbers(scale, name) if other and str(_arrays.dtype_of(scale)).rpartition(".")[2] in _OTHER_FLOATS else scale


def open_requests(
    block_tables: Any, seq_lens: Any, indptr: Any, last_page_len: Any, q_lens: Any, q_begin: Any, page_size: Any, num_pages: Any = None,
    kv_split: Any = None,
) -> tuple[tuple[Any, ...], int, int]:  # fmt: skip
    """What `attend_requests` takes as `requests`, checked and copied once for many calls; the number of requests, and of their queries."""
    opened, batch, num_queries = _core.open_page_tables(
        block_tables, seq_lens, indptr, last_page_len, q_lens, q_begin, page_size, num_pages, kv_split
    )
    return (opened, None, None, None, None, None, None), batch, num_queries


def attend_requests(
    q: Any, k_cache: Any, v_cache: Any, requests: tuple[Any, ...], rules: tuple[Any, ...], selected: Any = None, counts: Any = None,
    sinks: Any = None, k_scale: Any = None, v_scale: Any = None, kv_ranges: Any = None, attn_mask: Any = None, alibi_slopes: Any = None,
    return_lse: Any = False, out: Any = None,
) -> Any:  # fmt: skip
    """Attention over a paged cache by one call of the core, with arrays of any kind; over all blocks where `selected` is None. `requests`:
    what `tables_for_core` gives, `q_lens`, `q_begin` and `kv_split`, or what `open_requests` gives; `rules`: `Rules`, or their values as a
    plain tuple, which takes less time to make."""
    if k_scale is not None or v_scale is not None:
        k_scale, v_scale = scales_for_core(k_scale, "k_scale", k_cache), scales_for_core(v_scale, "v_scale", v_cache)
    if sinks is not None:
        sinks = _arrays.float32_numbers(sinks, "sinks")
    if not (attn_mask is alibi_slopes is None):
        attn_mask, alibi_slopes = bias_for_core(attn_mask, alibi_slopes)
    try:
        if (  # plain NumPy arrays: nothing to translate
            type(q) is type(k_cache) is type(v_cache) is ndarray and out is None
            and rules[4] is rules[5] is rules[6] is None  # out_dtype, dtype and kv_dtype
            and not (is_registered(q) or is_registered(k_cache) or is_registered(v_cache))
        ):  # fmt: skip
            scale, kv_layout, window, softcap, _, _, _, num_threads = rules  # unpacked, because a call with * takes longer
            tables, seq_lens, indptr, last_page_len, q_lens, q_begin, kv_split = requests
            return _core.paged_attention(
                empty, q, k_cache, v_cache, tables, seq_lens, indptr, last_page_len, q_lens, q_begin, kv_split, selected, counts, sinks,
                k_scale, v_scale, kv_ranges, attn_mask, alibi_slopes, return_lse, None, None, scale, kv_layout, window, softcap, None, None,
                None, num_threads,
            )  # fmt: skip
        family = _arrays.family_of(q)
        out, lse_out = _arrays.split_out(out, return_lse)
        rules = Rules(*rules)
        named = {name: _arrays.dtype_name(getattr(rules, name), name) for name in ("out_dtype", "dtype", "kv_dtype")}
        result = _core.paged_attention(
            family.empty, _arrays.readable(q, "q"), _arrays.readable(k_cache, "k_cache", True),
            _arrays.readable(v_cache, "v_cache", True), *requests, selected, counts, sinks, k_scale, v_scale, kv_ranges, attn_mask,
            alibi_slopes, return_lse, _arrays.writable(out, "out"), _arrays.writable(lse_out, "lse"), *rules._replace(**named),
        )  # fmt: skip
    except (TypeError, ValueError) as error:
        rename(error, _CORE_NAMES)
        raise
    if not return_lse:
        return _arrays.finished(result, out, family)
    return _arrays.finished(result[0], out, family), _arrays.finished(result[1], lse_out, family)


def check_rules(rules: Rules) -> None:
    """Refuses options that no call can have, by the sentences of a call: one without requests, whose arrays have the dtypes that the
    options name. float64, where they name none, has the widest range of softcaps."""
    dtype, kv_dtype = rules.dtype, rules.kv_dtype
    kind = dtype or (kv_dtype if kv_dtype in FLOATS else None) or rules.out_dtype or ("float64" if kv_dtype is None else "float32")
    kind = kind if kind in FLOATS else "float32"  # the call says what it does not know
    q, cache = (empty(shape, _STORED.get(name, "float32")) for shape, name in (((0, 1, 1), kind), ((0, 1, 1, 1), kv_dtype or kind)))
    factor = None if kv_dtype is None else 1
    if dtype is None and kind == "bfloat16":
        rules = rules._replace(dtype=kind)  # its bits are stored as uint16
    attend_requests(q, cache, cache, _NO_REQUESTS, rules, k_scale=factor, v_scale=factor)
