"""A small valid call of every public function, in several varieties. `bad_calls` replaces arguments of these calls.

All arrays of a call are in one piece of memory (`Arena`), so that one comparison shows what a call has written.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np

import blitz_attn
from blitz_attn import config, nsa, sabi, select, testing
from blitz_attn.compat import mslk, select_attn_ops, torch_bsa

from . import good_nsa
from .arena import Arena, method
from .arrays import HAS_TORCH
from .good_nsa_cache import CACHES
from .good_plots import PLOTS
from .good_video import VIDEO


class Good(NamedTuple):
    """A public function, and the function that makes valid arguments for it: make(arena, variety) -> arguments by name."""

    call: Callable[..., Any]
    make: Callable[[Arena, int], dict[str, Any]]
    writes: tuple[str, ...] = ()  # arguments that a call may write to
    quiet: bool = True  # prints nothing
    names: tuple[str, ...] = ()  # further names, besides arguments, that refusals may use
    lenient: bool = False  # a helper for tests, which may raise anything
    sizes: tuple[str, ...] = ()  # arguments that decide how large the result is


# ---- Attention ----------------------------------------------------------------------------------------------------


def _attention(a: Arena, v: int) -> dict[str, Any]:
    dtype = ("float32", "float64", "float16")[v % 3]
    call: dict[str, Any] = {"q": a.floats(1, 2, 16, 8, dtype=dtype), "k": a.floats(1, 1 + v % 2, 24, 8, dtype=dtype)}
    call["v"] = a.floats(1, 1 + v % 2, 24, 4, dtype=dtype)
    call["block_shape"] = (8, 8)
    if v & 1:
        call |= {"sabi": a.integers([[[[0, 2], [1, -1]]]]), "causal": True, "window": (20, -1)}
    if v & 2:
        call |= {"q_lens": [16], "kv_lens": a.integers([20], "int64"), "kv_ranges": a.integers([[0, 9 + n] for n in range(16)], "int64")}
    if v & 4:
        out = a.poisoned(1, 2, 16, 4, dtype=dtype)
        lse = a.poisoned(1, 2, 16, dtype="float64" if dtype == "float64" else "float32")
        call |= {"return_lse": True, "out": (out, lse)} if v & 1 else {"out": out, "num_threads": 2}
    if v & 8:
        call["attn_mask"] = a.kept(16, 24) if v & 1 else a.floats(1, 2, 16, 24, dtype=dtype)
    if v & 16:
        call["alibi_slopes"] = a.floats(2)
    return call


def _packed_attention(a: Arena, v: int) -> dict[str, Any]:
    call: dict[str, Any] = {"q": a.floats(12, 2, 8), "k": a.floats(12, 1, 8), "v": a.floats(12, 1, 8), "layout": "TND"}
    call |= {"cu_seqlens_q": [0, 4, 12], "cu_seqlens_kv": a.integers([0, 6, 12])}
    if v & 2:
        call |= {"attn_mask": a.kept(2, 1, 8, 6), "alibi_slopes": [0.5, 0.25]}
    return call | ({"out": a.poisoned(12, 2, 8)} if v & 1 else {"causal": True})


def _flat_attention(a: Arena, v: int) -> dict[str, Any]:
    call = {"q": a.floats(2, 5, 16), "k": a.floats(2, 6, 8), "v": a.floats(2, 6, 8), "layout": "BSH", "num_heads": 2, "num_kv_heads": 1}
    return call | ({"scale": 0.5, "num_threads": 1} if v & 1 else {"dtype": "float32"})


def _attention_backward(a: Arena, v: int) -> dict[str, Any]:
    dtype = ("float32", "float64")[v % 2]
    shape, kv_shape = (1, 2, 16, 8), (1, 1, 24, 8)
    call: dict[str, Any] = {name: a.floats(*shape, dtype=dtype) for name in ("dout", "q")}
    call |= {name: a.floats(*kv_shape, dtype=dtype) for name in ("k", "v")}
    call |= {"out": a.floats(*shape, dtype=dtype), "lse": a.floats(1, 2, 16, dtype=dtype), "block_shape": (8, 8)}
    if v & 2:
        call |= {"sabi": a.integers([[[[0, 2], [1, -1]]]]), "dlse": a.floats(1, 2, 16, dtype=dtype)}
        call["kv_ranges"] = a.integers([[[n, 9 + n] for n in range(16)]])
    if v & 4:
        call |= {"grads": (a.poisoned(*shape, dtype=dtype), a.poisoned(*kv_shape, dtype=dtype), None)}
    if v & 8:
        call |= {"attn_mask": a.floats(2, 1, 24) if v & 1 else a.kept(1, 1, 16, 24), "alibi_slopes": a.floats(2), "bias_grads": True}
    return call


_CHOOSERS = (
    "pooled", "antidiagonal", "sampled_rows", "vertical_slash", select.Pooled((4, 8), "mean", "mean"), select.Pooled(2, "bound"),
    select.SampledRows(2), select.VerticalSlash(5),
)  # fmt: skip


def _choice(a: Arena, v: int) -> dict[str, Any]:
    dtype = ("float32", "float64", "float16")[v % 3]
    call: dict[str, Any] = {"q": a.floats(1, 2, 40, 8, dtype=dtype), "k": a.floats(1, 1 + v % 2, 48, 8, dtype=dtype)}
    call |= {"chooser": _CHOOSERS[v % 8], "block_shape": (16, 16)}
    call |= ({"density": 0.5}, {"top_p": [0.5, 0.9]}, {"threshold": 0.1}, {"top_k": 2})[v // 2 % 4]
    if v & 1:
        call |= {"causal": True, "window": (20, -1), "sink": 0, "recent": 1, "last_columns": 1, "first_rows": 1, "last_rows": 1}
    if v & 4:
        call |= {"q_lens": [40], "kv_lens": a.integers([30], "int64"), "scale": 0.3, "num_threads": 2}
    return call | ({"q_begin": a.integers([-3], "int64") if v & 1 else 5} if v & 16 else {})


def _indexed(a: Arena, v: int) -> dict[str, Any]:
    dtype = ("float32", "float64", "float16")[v % 3]
    real = "float64" if dtype == "float64" else "float32"
    if v & 4:
        call: dict[str, Any] = {"q": a.floats(20, 3, 8, dtype=dtype), "k": a.floats(30, 8, dtype=dtype), "weights": a.floats(20, 3, dtype=real)}
        call |= {"cu_seqlens_q": [0, 12, 20], "cu_seqlens_kv": a.integers([0, 10, 30], "int64")}
    else:
        call = {"q": a.floats(2, 10, 3, 8, dtype=dtype), "k": a.floats(2, 30, 8, dtype=dtype), "weights": a.floats(2, 10, 3, dtype=real)}
        call |= {"q_lens": [10, 4], "kv_lens": a.integers([30, 5], "int64")}
    call |= {"top_k": 7, "causal": bool(v & 1), "ascending": bool(v & 2)}
    if v & 16 and v & 8:
        call |= {"k": a.floats(5, 4, 8, dtype=dtype), "block_tables": a.integers([[3, 1, 0], [2, 99, 99]]), "kv_lens": [11, 4]}
        call.pop("cu_seqlens_kv", None)
        if dtype != "float64":
            call |= {"k": a.put(np.ones((5, 4, 8), np.int8)), "k_scale": a.floats(5, 4)}
    elif v & 16:
        call |= {"pool_size": 4, "keep_tail": bool(v & 2), "kv_lens": [43, 82] if v & 4 else [123, 7]}
    elif v & 1:
        call |= {"block_size": 4, "min_score": 0.25}
    return call | ({"q_begin": [3, -2], "scale": 0.5, "return_scores": True, "num_threads": 2} if v & 8 else {})


def _scored(a: Arena, v: int) -> dict[str, Any]:
    names = ("q", "k", "chooser", "block_shape", "causal", "window", "q_lens", "kv_lens", "scale", "num_threads", "q_begin")
    call = _choice(a, v)
    if v & 8:
        given = a.floats(1, 2, 3, 3) ** 2
        call["chooser"] = lambda q, k, **options: given
    return {name: call[name] for name in names if name in call}


def _listed(a: Arena, v: int) -> dict[str, Any]:
    call = _choice(a, v & ~16)
    call |= {"scores": a.put(a.floats(1, 2, 3, 3, dtype=call["q"].dtype.name) ** 2), "s_q": 40, "s_kv": 48}
    return {name: x for name, x in call.items() if name not in ("q", "k", "chooser", "scale")}


def _choice_of(a: Arena, v: int) -> dict[str, Any]:
    call = _choice(a, v)
    return call | ({"return_scores": True, "index_dtype": "uint16"} if v & 8 else {})


def _choice_and_attention(a: Arena, v: int) -> dict[str, Any]:
    call = _choice(a, v)
    dtype = call["q"].dtype.name
    call["v"] = a.floats(1, 1 + v % 2, 48, 4, dtype=dtype)
    call |= {"q_total": [60], "out_dtype": dtype} if v & 16 else {}
    call |= {"sinks": a.floats(2), "softcap": 20.0} if v & 4 else {}
    call |= {"attn_mask": a.kept(40, 48), "alibi_slopes": [0.5, 0.25]} if v & 2 else {}
    return call | ({"out": a.poisoned(1, 2, 40, 4, dtype=dtype), "return_sabi": True} if v & 8 else {"return_lse": True})


def _kept(a: Arena, v: int) -> dict[str, Any]:
    """Arguments of the functions that measure a list."""
    call = _attention(a, v & 3)
    call.pop("kv_ranges", None)
    call["sabi"] = a.integers([[[[0, 2], [1, -1]]]])
    return call | ({"every": 2} if v & 4 else {})


def _recall(a: Arena, v: int) -> dict[str, Any]:
    return {name: x for name, x in _kept(a, v).items() if name != "v"}


def _calibration(a: Arena, v: int) -> dict[str, Any]:
    layers = [[(a.floats(1, 2, 32, 8), a.floats(1, 1, 32, 8), a.floats(1, 1, 32, 8))] for _ in range(1 + v % 2)]
    call: dict[str, Any] = {"layers": layers, "target": 0.8, "block_shape": (8, 8), "steps": 2}
    return call | ({"measure": "error", "budget": "threshold", "every": 2} if v & 1 else {"chooser": select.SampledRows(2)})


def _allocation(a: Arena, v: int) -> dict[str, Any]:
    layers = [[(a.floats(1, 2, 32, 8), a.floats(1, 1, 32, 8), a.floats(1, 1, 32, 8), a.floats(1, 2, 32, 8))]]
    return {"layers": layers, "density": 0.8, "block_shape": (8, 8), "masses": (0.5, 0.9)} | ({"chooser": ["pooled"]} if v & 1 else {})


def _merge(a: Arena, v: int) -> dict[str, Any]:
    call: dict[str, Any] = {}
    for name in "ab":
        call |= {f"out_{name}": a.floats(1, 2, 5, 8), f"lse_{name}": a.floats(1, 2, 5)}
    return call | ({"out": a.poisoned(1, 2, 5, 8), "lse_out": a.poisoned(1, 2, 5)} if v & 1 else {})


def _merge_n(a: Arena, v: int) -> dict[str, Any]:
    parts = 1 + v % 3
    call: dict[str, Any] = {"outs": [a.floats(1, 2, 5, 8) for _ in range(parts)], "lses": tuple(a.floats(1, 2, 5) for _ in range(parts))}
    return call | ({"out": a.poisoned(1, 2, 5, 8), "lse_out": a.poisoned(1, 2, 5)} if v & 4 else {})


# ---- Paged caches -------------------------------------------------------------------------------------------------

_PAGES, _PAGE, _HEADS, _KV_HEADS, _DIM = 4, 4, 4, 2, 8


def _tables(a: Arena, v: int) -> dict[str, Any]:
    if v & 8:
        triple = (a.integers([0, 2, 3], "int64"), a.integers([3, 1, 0]), a.integers([2, 4], "int64"))
        return {"block_tables": triple}
    return {"block_tables": a.integers([[3, 1], [0, 99]]), "seq_lens": [6, 4] if v & 1 else a.integers([6, 4], "int64")}


def _caches(a: Arena, v: int) -> dict[str, Any]:
    shape = (_PAGES, _KV_HEADS, _PAGE, _DIM) if v & 2 else (_PAGES, _PAGE, _KV_HEADS, _DIM)
    layout = {"kv_layout": "HND"} if v & 2 else {}
    if v & 4:
        caches = {name: a.integers(np.arange(np.prod(shape)).reshape(shape) % 200 - 100, "int8") for name in ("k_cache", "v_cache")}
        return caches | {name: a.floats(*shape[:3]) for name in ("k_scale", "v_scale")} | layout
    return {"k_cache": a.floats(*shape), "v_cache": a.floats(*shape)} | layout


def _paged(a: Arena, v: int) -> dict[str, Any]:
    call = {"q": a.floats(2, _HEADS, _DIM)} | _caches(a, v) | _tables(a, v)
    if v & 16:
        call |= {"out": a.poisoned(2, _HEADS, _DIM), "sinks": a.floats(_HEADS), "softcap": 2.0}
        call["kv_ranges"] = a.integers([[0, 4], [1, 9]], ("int32", "int64")[v & 1])
    elif v & 1:
        call |= {"q_lens": [1, 1], "window": 3, "return_lse": True, "scale": 0.5}
    if v & 4:
        call |= {"attn_mask": a.kept(2, 1, 1, 6) if v & 1 else a.floats(_HEADS, 2, 7), "alibi_slopes": a.floats(_HEADS)}
        call |= {"kv_split": _PAGE} if v & 16 else {}
    return call


def _paged_select(a: Arena, v: int) -> dict[str, Any]:
    call = {"seq_lens": None} | _paged(a, v)
    call["selected"] = a.integers([[[0, 1], [1, 0]], [[0, -1], [-1, -1]]])
    return call | ({"counts": a.integers([[2, 1], [1, 0]])} if v & 4 else {"selected_size": 2} if v & 2 else {})


def _append(a: Arena, v: int) -> dict[str, Any]:
    call = {"k": a.floats(2, _KV_HEADS, _DIM), "v": a.floats(2, _KV_HEADS, _DIM)} | _caches(a, v)
    if v & 16:
        return call | {"slot_mapping": a.integers([5, -1], "int64") if v & 1 else [5, 11]}
    call |= _tables(a, v)
    if v & 1 and not v & 12:
        call |= _kept_summaries(a) | {"q_lens": [1, 1]}
    return call


def _kept_summaries(a: Arena) -> dict[str, Any]:
    arrays = {name: a.floats(2, 2, _KV_HEADS, _DIM) for name in ("maxblocks", "minblocks", "meanblocks")}
    return arrays | {"metadata_block_tables": a.integers([[1], [0]])}


def _append_by_plan(a: Arena, v: int) -> dict[str, Any]:
    call = {"k": a.floats(2, _KV_HEADS, _DIM), "v": a.floats(2, _KV_HEADS, _DIM)} | _caches(a, v & ~2)
    call |= _kept_summaries(a) if v & 1 and not v & 12 else {}
    return {name: x for name, x in call.items() if name not in ("kv_layout", "kv_dtype")}


def _quantize(a: Arena, v: int) -> dict[str, Any]:
    call = {"x": a.floats(3, 2, 8, dtype=("float32", "float16")[v % 2]), "kv_dtype": ("int8", "float8_e4m3")[v // 2 % 2]}
    return call | ({"x": a.integers(np.arange(48).reshape(3, 2, 8), "uint16"), "dtype": "bfloat16"} if v & 4 else {})


def _quantize_rows(a: Arena, v: int) -> dict[str, Any]:
    call = {"x": a.floats(3, 2, 32, dtype=("float32", "float16")[v % 2]), "kv_dtype": ("q8_0", "q4_0", "q4_1")[v // 2 % 3]}
    return call | ({"x": a.integers(np.arange(192).reshape(3, 2, 32), "uint16"), "dtype": "bfloat16"} if v % 7 == 6 else {})


def _dequantize_rows(a: Arena, v: int) -> dict[str, Any]:
    name, size = (("q8_0", 34), ("q4_0", 18), ("q4_1", 20))[v % 3]
    return {"rows": a.integers(np.arange(6 * size).reshape(3, 2, size) % 60, "uint8"), "kv_dtype": name}


def _dequantize(a: Arena, v: int) -> dict[str, Any]:
    return {"values": a.integers(np.arange(48).reshape(3, 2, 8), ("int8", "uint8")[v % 2]), "scale": a.floats(3, 2)}


def _plan(a: Arena, v: int) -> dict[str, Any]:
    call = _tables(a, v) | {"page_size": _PAGE}
    if v & 1:
        call |= {"q_lens": a.integers([1, 2], "int64"), "num_pages": _PAGES, "window": 3}
    if v & 4:
        call |= {"q_begin": a.integers([-1, 9], "int64") if v & 1 else [5, 3]}
    if v & 16:
        call |= {"kv_split": _PAGE}
    return call | ({"scale": 0.5, "kv_layout": "HND", "softcap": 2.0, "num_threads": 2} if v & 2 else {})


@cache
def _made_plan() -> Any:
    return blitz_attn.PagedPlan(np.array([[3, 1], [0, 99]]), [6, 4], page_size=_PAGE)


_APPENDED = ("k_cache", "v_cache", "k_scale", "v_scale", "maxblocks", "minblocks", "meanblocks")
_OF_PLAN = ("lse", "seq_lens", "q_lens", "block_tables")  # names in refusals of calls that do not fit the plan's tables and lengths


def _of_plan(make: Callable[[Arena, int], dict[str, Any]]) -> Callable[[Arena, int], dict[str, Any]]:
    left_out = ("block_tables", "seq_lens", "kv_layout", "softcap", "q_lens", "window", "scale", "kv_split")
    return lambda a, v: {name: x for name, x in make(a, v & ~10).items() if name not in left_out}


# ---- Choosing blocks ----------------------------------------------------------------------------------------------


def _summaries(a: Arena) -> dict[str, Any]:
    low, high = a.floats(3, 4, _KV_HEADS, _DIM), a.floats(3, 4, _KV_HEADS, _DIM)
    high += 3
    return {"maxblocks": high, "minblocks": low, "metadata_block_tables": a.integers([[2], [0]])}


def _metadata(a: Arena, v: int) -> dict[str, Any]:
    call = {"k_cache": a.floats(_PAGES, _PAGE, _KV_HEADS, _DIM)} | _tables(a, v & 1) | _summaries(a)
    if v & 4:
        call["k_cache"] = a.integers(np.ones((_PAGES, _PAGE, _KV_HEADS, _DIM)), "int8")
        call["k_scale"] = 0.5 if v & 8 else a.put(np.float32([0.5, 0.25]))
    return call | ({"start_lens": [1, 0], "meanblocks": a.poisoned(3, 4, _KV_HEADS, _DIM)} if v & 2 else {})


def _quest(a: Arena, v: int) -> dict[str, Any]:
    call = {"query": a.floats(2, _HEADS, _DIM)} | _summaries(a) | {"seq_lens": a.integers([13, 4], "int64"), "k": 1 + v % 3}
    return call | ({"per_query_head": True, "block_size": 4} if v & 4 else {"ascending": True, "num_threads": 1})


def _quest_into(a: Arena, v: int) -> dict[str, Any]:
    call = _quest(a, 0)
    for name in ("k", "ascending", "num_threads"):
        call.pop(name)
    return call | {"selected_indices": a.poisoned(2, _HEADS if v & 1 else _KV_HEADS, 2, dtype="int32")}


def _quest_into_w(a: Arena, v: int) -> dict[str, Any]:
    return _quest_into(a, v) | {"tokens_since_metadata_update": (3, -1, [1, 2])[v % 3]}


def _select(a: Arena, v: int) -> dict[str, Any]:
    call: dict[str, Any] = {"q": a.floats(2, _HEADS, _DIM)}
    summaries = _summaries(a)
    call |= {"source": (summaries["maxblocks"], summaries["minblocks"]), "tables": summaries["metadata_block_tables"]}
    if v & 1:
        keys = _caches(a, v & 4)
        call |= {"source": keys["k_cache"], "k_scale": keys.get("k_scale"), "tables": a.integers([[3, 1], [0, 2]]), "method": "max"}
    elif v & 2:
        call |= {"source": summaries["maxblocks"], "method": "mean"}
    call |= {"seq_lens": [8, 4], "k": (2, [2, 1])[v // 4 % 2]} if v & 8 else {"seq_lens": a.integers([8, 4], "int64"), "budget": 8}
    call |= {"q": a.floats(3, _HEADS, _DIM), "q_lens": [2, 1]} if v & 16 else {}
    return call | ({"dense_below": 5, "recent": [1, 2], "sink": 0} if v & 2 else {})


def _select_and_attend(a: Arena, v: int) -> dict[str, Any]:
    call = {"q": a.floats(2, _HEADS, _DIM)} | _caches(a, v & 2) | _tables(a, v & 1) | {"k": 2, "return_selected": bool(v & 16)}
    if v & 1:
        call |= {"kv_ranges": a.integers([[0, 4], [1, 9]]), "attn_mask": a.kept(2, 1, 1, 6), "alibi_slopes": a.floats(_HEADS)}
    if v & 8:
        call |= {"kv_split": _PAGE, "out_dtype": "float32"}
    if v & 4:
        return call | {"method": "max", "out": a.poisoned(2, _HEADS, _DIM)}
    summaries = _summaries(a)
    return call | {"source": (summaries["maxblocks"], summaries["minblocks"]), "metadata_block_tables": summaries["metadata_block_tables"]}


# ---- Block lists --------------------------------------------------------------------------------------------------


def _grid(**more: Any) -> Callable[[Arena, int], dict[str, Any]]:
    def make(a: Arena, v: int) -> dict[str, Any]:
        call: dict[str, Any] = {"s_q": 32 + v % 2, "block_shape": (16, 8)[:: 1 - 2 * (v // 2 % 2)]}
        return call | ({"s_kv": 48} if v & 1 else {}) | ({"dtype": "int32"} if v & 4 else {}) | more

    return make


def _lists(*names: str, columns: bool = False, **more: Any) -> Callable[[Arena, int], dict[str, Any]]:
    def make(a: Arena, v: int) -> dict[str, Any]:
        call: dict[str, Any] = {
            name: a.integers([[[[0, 2], [1, -1 % 2**16 if v & 1 else -1]]]], ("int32", "uint16")[v % 2]) for name in names
        }
        return call | ({"columns": 3} if columns or v & 2 else {}) | more

    return make


def _without_columns(make: Callable[[Arena, int], dict[str, Any]]) -> Callable[[Arena, int], dict[str, Any]]:
    return lambda a, v: make(a, v & ~2)


def _mask(**more: Any) -> Callable[[Arena, int], dict[str, Any]]:
    return lambda a, v: {"mask": a.put(np.eye(8, dtype=bool)[None, None])} | ({"width": 8} if v & 1 else {}) | more


def _token_mask(a: Arena, v: int) -> dict[str, Any]:
    return {"mask": a.put(np.tri(8, dtype=bool)[None])} | ({"block_shape": (4, 2)} if v & 1 else {})


def _csr(a: Arena, v: int) -> dict[str, Any]:
    return {"indptr": [0, 2, 3], "indices": a.integers([0, 2, 1])} | ({"columns": 3, "width": 2} if v & 1 else {})


def _num_idx(a: Arena, v: int) -> dict[str, Any]:
    return {"num": a.integers([[[1, 2]]]), "idx": a.integers([[[[2, 0, 1], [0, 1, 2]]]])} | ({"columns": 3} if v & 1 else {})


_FRAME = sabi.FrameWidths(1, 0, 1, 0)
_TOKENS = ("s_q", "s_kv")

SABI = {
    "dense": Good(sabi.dense, _grid(), sizes=_TOKENS),
    "causal": Good(sabi.causal, _grid(), sizes=_TOKENS),
    "sliding_window": Good(sabi.sliding_window, _grid(window=(8, 0)), sizes=_TOKENS),
    "sink_local": Good(sabi.sink_local, _grid(sink=4, local=8), sizes=_TOKENS),
    "document_ranges": Good(sabi.document_ranges, lambda a, v: {"lengths": a.integers([5, 0, 9])}),
    "document": Good(sabi.document, lambda a, v: {"lengths": [5, 9], "block_shape": (8, 4)} | ({"kv_lengths": a.integers([4, 0])} if v & 1 else {})),
    "dilated": Good(sabi.dilated, _grid(stride=2, reach=3), sizes=_TOKENS),
    "vertical_slash": Good(sabi.vertical_slash, lambda a, v: _grid()(a, v) | {"vertical": [0, 9], "slash": a.integers([[0, 3]])}, sizes=_TOKENS),
    "frame_plan": Good(sabi.frame_plan, lambda a, v: {"rows": 4, "columns": 6, "sparsity": 0.5} | ({"frame": _FRAME} if v & 1 else {})),
    "random_with_frame": Good(sabi.random_with_frame, _grid(sparsity=0.25, heads=2, frame=_FRAME), sizes=_TOKENS),
    "counts": Good(sabi.counts, _without_columns(_lists("sabi"))),
    "density": Good(sabi.density, _lists("sabi", columns=True)),
    "sparsity": Good(sabi.sparsity, _lists("sabi", columns=True, per_head=True)),
    "balance": Good(sabi.balance, _without_columns(_lists("sabi"))),
    "picture": Good(sabi.picture, _lists("sabi")),
    "check": Good(sabi.check, lambda a, v: _without_columns(_lists("sabi"))(a, v) | {"s_q": 16, "s_kv": 24, "block_shape": (8, 8)}),
    "to_block_mask": Good(sabi.to_block_mask, _lists("sabi")),
    "from_block_mask": Good(sabi.from_block_mask, _mask()),
    "to_token_mask": Good(sabi.to_token_mask, lambda a, v: _without_columns(_lists("sabi"))(a, v) | {"s_q": 16, "s_kv": 24, "block_shape": (8, 8)}),
    "from_token_mask": Good(sabi.from_token_mask, _mask(block_shape=(2, 4))),
    "kv_ranges_from_token_mask": Good(sabi.kv_ranges_from_token_mask, _token_mask),
    "to_csr": Good(sabi.to_csr, _without_columns(_lists("sabi"))),
    "from_csr": Good(sabi.from_csr, _csr),
    "from_function": Good(
        sabi.from_function, lambda a, v: _grid(mask_mod=lambda b, h, i, j: (j <= i) & (b < 1), heads=2)(a, v) | ({"token_rule": "attn_mask"} if v & 8 else {}),
        sizes=(*_TOKENS, "batch", "heads"),
    ),
    "to_num_idx": Good(sabi.to_num_idx, _lists("sabi")),
    "from_num_idx": Good(sabi.from_num_idx, _num_idx),
    "union": Good(sabi.union, _lists("a", "b")),
    "intersection": Good(sabi.intersection, _lists("a", "b")),
    "difference": Good(sabi.difference, _lists("a", "b")),
    "complement": Good(sabi.complement, _lists("a", columns=True)),
    "transpose": Good(sabi.transpose, _lists("a", columns=True)),
    "coarsen": Good(sabi.coarsen, _lists("a", columns=True, factors=(2, 2))),
    "refine": Good(sabi.refine, lambda a, v: _lists("a")(a, v) | {"factors": (2, 2), "rows": 4, "columns": 6}),
}  # fmt: skip


# ---- Upstream names -----------------------------------------------------------------------------------------------


def _torch_bsa(a: Arena, v: int) -> dict[str, Any]:
    call: dict[str, Any] = {
        "query": a.floats(1, 2, 16, 8),
        "key": a.floats(1, 1, 24, 8),
        "value": a.floats(1, 1, 24, 8),
        "input_layout": "BNSD",
    }
    call |= {"num_heads": 2, "num_key_value_heads": 1}
    if v & 1:
        call |= {"sabi": a.integers([[[[0]]]], "uint16"), "actual_seq_lengths": [16], "actual_seq_lengths_kv": a.integers([20])}
    if v & 2:
        call |= {"sparse_mode": (2, 3, 4)[v // 4 % 3], "softmax_lse_flag": True, "pre_tokens": 20, "next_tokens": 1}
    if v & 2 and v & 4:
        call |= {"atten_mask": a.put(np.ones((4, 4), bool))}
    return call


def _torch_bsa_packed(a: Arena, v: int) -> dict[str, Any]:
    call: dict[str, Any] = {name: a.floats(12, 2, 8) for name in ("query", "key", "value")}
    return call | {"input_layout": "TND", "actual_seq_lengths": [4, 12], "actual_seq_lengths_kv": [6, 12], "sparse_mode": 3 * (v % 2)}


def _upstream(make: Callable[[Arena, int], dict[str, Any]], *left_out: str) -> Callable[[Arena, int], dict[str, Any]]:
    return lambda a, v: {mslk._NAMES.get(name, name): x for name, x in make(a, v).items() if name not in left_out}


def _unpacked(make: Callable[[Arena, int], dict[str, Any]]) -> Callable[[Arena, int], dict[str, Any]]:
    return lambda a, v: make(a, v & ~1)


_NO = ("out", "gates", "mode", "block_indices")
_MSLK_WHOLE = _upstream(good_nsa.native, *_NO)
_MSLK_ALONE = _upstream(_unpacked(good_nsa.native), *_NO)

MSLK = {
    "nsa": Good(mslk.nsa, _MSLK_WHOLE),
    "nsa_forward": Good(mslk.nsa_forward, _MSLK_WHOLE),
    "nsa_forward_reference": Good(mslk.nsa_forward_reference, _MSLK_ALONE),
    "nsa_backward_reference": Good(mslk.nsa_backward_reference, lambda a, v: _MSLK_ALONE(a, v) | {"dO": a.floats(1, 12, 2, 8)}),
    "compute_block_indices_reference": Good(
        mslk.compute_block_indices_reference, lambda a, v: {"Q": a.floats(1, 12, 2, 8), "K": a.floats(1, 12, 1, 8), "compress_block_size": 4, "num_selected_blocks": 2}
    ),
    "compress_kv": Good(mslk.compress_kv, _upstream(good_nsa.compress(upstream=True))),
    "fused_compress_kv": Good(mslk.fused_compress_kv, _upstream(good_nsa.compress())),
    "fused_compress_kv_backward": Good(mslk.fused_compress_kv_backward, _upstream(good_nsa.compress("dk_cmp", "dv_cmp", upstream=True))),
    "score_and_select_blocks": Good(mslk.score_and_select_blocks, _upstream(good_nsa.score_mslk)),
    "fused_score_and_select_blocks": Good(mslk.fused_score_and_select_blocks, _upstream(good_nsa.score_mslk)),
    "compute_gates": Good(mslk.compute_gates, _upstream(good_nsa.gates)),
    "gate_and_combine": Good(mslk.gate_and_combine, _upstream(good_nsa.combine("o_cmp", "o_slc", "o_win"))),
    "fused_gate_and_combine": Good(mslk.fused_gate_and_combine, _upstream(good_nsa.combine("q", "o_cmp", "o_slc", "o_win"), "gates")),
    "fused_gating_backward": Good(mslk.fused_gating_backward, _upstream(good_nsa.combine("q", "dout", "o_cmp", "o_slc", "o_win"))),
}  # fmt: skip


# ---- Helpers for tests --------------------------------------------------------------------------------------------

_SPEC = testing.MaskSpec(1, 2, 64, 64, 8, 16, 16, 0.5, testing.FrameWidths(1, 0, 0, 0))
_GRID = {"s_q": 64, "s_kv": 64, "block_size_q": 16, "block_size_kv": 16, "sparsity": 0.5}


def _results(a: Arena, v: int) -> dict[str, Any]:
    return {"q": a.floats(1, 2, 8, 4), "k": a.floats(1, 1, 8, 4), "v": a.floats(1, 1, 8, 4)}


TESTING = {
    "small_frame": Good(testing.small_frame, lambda a, v: {"block_shape": (128, 64)} | ({"tokens": 256} if v & 1 else {})),
    "random_sabi": Good(testing.random_sabi, lambda a, v: {"spec": _SPEC}),
    "generate_sparse_blocks_by_row": Good(testing.generate_sparse_blocks_by_row, lambda a, v: {**_GRID, "seed": 1, "frame": None if v & 1 else _FRAME}),
    "generate_sparse_blocks_by_row_per_head": Good(
        testing.generate_sparse_blocks_by_row_per_head, lambda a, v: {**_GRID, "num_heads": 2, "frame": _FRAME, "base_seed": 3}
    ),
    "is_block_sparse_pattern_feasible": Good(
        testing.is_block_sparse_pattern_feasible, lambda a, v: {"grid": testing.BlockGrid(64, 64, 16, 16), "frame": _FRAME, "sparsity": 0.5}
    ),
    "token_mask": Good(testing.token_mask, lambda a, v: {"sabi": a.integers([[[[0, 2], [1, -1]]]]), "s_q": 16, "s_kv": 24, "block_shape": (8, 8)}),
    "make_qkv": Good(testing.make_qkv, lambda a, v: {"batch": 1, "heads": 2, "kv_heads": 1, "q_len": 4, "kv_len": 6, "head_dim": 8}),
    "make_paged": Good(
        testing.make_paged, lambda a, v: {"batch": 2, "heads": 2, "kv_heads": 1, "seq_lens": (5, [3, 5])[v % 2], "page_size": 4, "head_dim": 8}
    ),
    "to_layout": Good(testing.to_layout, lambda a, v: {"x": a.floats(1, 2, 4, 8), "layout": ("BSND", "BSH", "TND")[v % 3]}),
    "to_float64": Good(testing.to_float64, lambda a, v: {"x": a.floats(2, 3)} | ({"dtype": "float32"} if v & 1 else {})),
    "round_to": Good(testing.round_to, lambda a, v: {"x": a.floats(2, 3), "dtype": ("bfloat16", "float16")[v % 2]}),
    "error_of": Good(testing.error_of, lambda a, v: {"values": a.floats(2, 3), "exact": a.floats(2, 3, dtype="float64")}),
    "error_rule": Good(testing.error_rule, lambda a, v: _results(a, v) | {"out": a.floats(1, 2, 8, 4)}),
    "reference_attention": Good(testing.reference_attention, _results),
    "meets_error_rule": Good(
        testing.meets_error_rule, lambda a, v: {"ours": testing.Errors(1e-7, 1e-7, 1.0), "dense": testing.Errors(1e-7, 1e-7, 1.0), "dtype": "float32"}
    ),
    "block_allclose_map": Good(
        testing.block_allclose_map, lambda a, v: {"out": a.floats(1, 2, 8, 8), "ref": a.floats(1, 2, 8, 8), "block_h": 4, "block_w": 4}, quiet=False
    ),
}  # fmt: skip

# ---- All ------------------------------------------------------------------------------------------------------------

QUEST = {
    "quest_prefill_metadata": Good(blitz_attn.quest_prefill_metadata, _metadata, ("maxblocks", "minblocks", "meanblocks")),
    "quest_block_select_paged": Good(blitz_attn.quest_block_select_paged, _quest, sizes=("k",)),
    "quest_block_select_paged_in_out": Good(blitz_attn.quest_block_select_paged_in_out, _quest_into, ("selected_indices",)),
    "quest_block_select_paged_in_out_w": Good(blitz_attn.quest_block_select_paged_in_out_w, _quest_into_w, ("selected_indices",)),
}
_ROWS = ("dout", "q", "k", "v", "out", "lse")

# Names in refusals: fields of choosers, and the budgets, which are named together.
_CHOICE = ("pool", "stride", "rows", "over", "term", "top_p", "density, top_p, threshold, top_k")

GROUPS: dict[str, dict[str, Good]] = {
    "block_sparse": {
        "block_sparse_attention": Good(blitz_attn.block_sparse_attention, _attention, ("out",), names=("lse",)),
        "block_sparse_attention packed": Good(blitz_attn.block_sparse_attention, _packed_attention, ("out",), names=("lse",)),
        "block_sparse_attention BSH": Good(blitz_attn.block_sparse_attention, _flat_attention, ("out",), names=("lse",)),
        "block_sparse_attention_backward": Good(
            blitz_attn.block_sparse_attention_backward, _attention_backward, ("grads",), names=("dq", "dk", "dv")
        ),
    },
    "select": {
        "select_blocks_prefill": Good(blitz_attn.select_blocks_prefill, _choice_of, names=_CHOICE),
        "scores": Good(select.scores, _scored, names=_CHOICE),
        "list_from_scores": Good(select.list_from_scores, _listed, names=_CHOICE, sizes=_TOKENS),
        "select_tokens": Good(select.select_tokens, _indexed, names=("selected", "scores"), sizes=("top_k",)),
        "select_and_attend_prefill": Good(blitz_attn.select_and_attend_prefill, _choice_and_attention, ("out",), names=("lse", *_CHOICE)),
    },
    "quality": {
        "recall": Good(select.recall, _recall, names=("v", "lse")),
        "output_error": Good(select.output_error, _kept, names=("lse",)),
        "calibrate": Good(select.calibrate, _calibration, names=("q", "k", "v", *_CHOICE)),
        "allocate": Good(select.allocate, _allocation, names=("q", "k", "v", *_CHOICE)),
    },
    "plots": {name: Good(call, make, names=names) for name, (call, make, names) in PLOTS.items()},
    "video": {name: Good(call, make, writes, names=names) for name, (call, make, writes, names) in VIDEO.items()},
    "merge": {
        "merge_states": Good(blitz_attn.merge_states, _merge, ("out", "lse_out")),
        "merge_states_n": Good(blitz_attn.merge_states_n, _merge_n, ("out", "lse_out")),
        "merge_states_tree": Good(blitz_attn.merge_states_tree, lambda a, v: _merge_n(a, v & 3)),
    },
    "paged": {
        "paged_attention": Good(blitz_attn.paged_attention, _paged, ("out",), names=("lse", "indptr", "indices", "last_page_len")),
        "paged_select_attention": Good(
            blitz_attn.paged_select_attention, _paged_select, ("out",), names=("lse", "indptr", "indices", "last_page_len")
        ),
        "append_paged_kv": Good(blitz_attn.append_paged_kv, _append, _APPENDED, names=("indptr", "indices", "last_page_len")),
        "quantize_kv": Good(blitz_attn.quantize_kv, _quantize),
        "quantize_rows": Good(blitz_attn.quantize_rows, _quantize_rows),
        "dequantize_rows": Good(blitz_attn.dequantize_rows, _dequantize_rows),
        "dequantize_kv": Good(blitz_attn.dequantize_kv, _dequantize),
        "PagedPlan": Good(blitz_attn.PagedPlan, _plan, names=("indptr", "indices", "last_page_len")),
        "PagedPlan.append": Good(method(_made_plan, "append"), _append_by_plan, _APPENDED, names=_OF_PLAN),
        "PagedPlan.attention": Good(method(_made_plan, "attention"), _of_plan(_paged), ("out",), names=_OF_PLAN),
        "PagedPlan.select_attention": Good(method(_made_plan, "select_attention"), _of_plan(_paged_select), ("out",), names=_OF_PLAN),
        "PagedPlan.select_and_attend": Good(
            method(_made_plan, "select_and_attend"), _of_plan(_select_and_attend), ("out",), names=(*_OF_PLAN, "tables", "minblocks"),
            sizes=("k", "budget"),
        ),
    },
    "quest": QUEST | {
        "select_blocks": Good(blitz_attn.select_blocks, _select, names=("minblocks", "source"), sizes=("k", "budget")),
        "select_and_attend": Good(blitz_attn.select_and_attend, _select_and_attend, ("out",), names=("lse", "minblocks"), sizes=("k", "budget")),
    },
    "nsa": {
        "nsa": Good(nsa.nsa, good_nsa.native, ("out",), names=("k_cmp", "v_cmp")),
        "nsa of the last tokens": Good(nsa.nsa, good_nsa.native_last, ("out",), names=("k_cmp", "v_cmp")),
        **{name: Good(call, make, writes, names=names) for name, (call, make, writes, names) in CACHES.items()},
        "nsa_backward": Good(nsa.nsa_backward, lambda a, v: {"dout": a.floats(1, 12, 2, 8), "ctx": good_nsa.context()}),
        "compress_kv": Good(nsa.compress_kv, good_nsa.compress()),
        "compress_kv_backward": Good(nsa.compress_kv_backward, good_nsa.compress("dk_cmp", "dv_cmp")),
        "compressed_attention": Good(nsa.compressed_attention, good_nsa.compressed("q", "k_cmp", "v_cmp")),
        "compressed_attention_backward": Good(nsa.compressed_attention_backward, good_nsa.compressed("dout", "q", "k_cmp", "v_cmp", "out", "lse")),
        "selected_attention": Good(nsa.selected_attention, good_nsa.selected("q", "k", "v")),
        "selected_attention_backward": Good(nsa.selected_attention_backward, good_nsa.selected(*_ROWS)),
        "window_attention": Good(nsa.window_attention, good_nsa.window("q", "k", "v")),
        "window_attention_backward": Good(nsa.window_attention_backward, good_nsa.window(*_ROWS)),
        "score_and_select_blocks": Good(nsa.score_and_select_blocks, good_nsa.score),
        "compute_gates": Good(nsa.compute_gates, good_nsa.gates),
        "gate_and_combine": Good(nsa.gate_and_combine, good_nsa.combine("o_cmp", "o_slc", "o_win")),
        "gating_backward": Good(nsa.gating_backward, good_nsa.combine("q", "dout", "o_cmp", "o_slc", "o_win")),
    },
    "sabi": SABI,
    "config": {
        "set_num_threads": Good(config.set_num_threads, lambda a, v: {"num_threads": (1, None)[v % 2]}),
        "get_num_threads": Good(config.get_num_threads, lambda a, v: {}),
        "isa": Good(config.isa, lambda a, v: {"level": (None, "portable")[v % 2]}),
        "isa_levels": Good(config.isa_levels, lambda a, v: {"available": True} if v & 1 else {}),
        "kernels": Good(config.kernels, lambda a, v: {"level": "portable"} if v & 1 else {}),
        "show_config": Good(config.show_config, lambda a, v: {"mode": "dict"}, quiet=False),
    },
    "torch_bsa": {
        "blitz_sparse_attention": Good(torch_bsa.blitz_sparse_attention, _torch_bsa),
        "blitz_sparse_attention packed": Good(torch_bsa.blitz_sparse_attention, _torch_bsa_packed),
    },
    "select_attn_ops": {name: good._replace(call=getattr(select_attn_ops, name)) for name, good in QUEST.items()},
    "mslk": MSLK,
    "testing": {name: good._replace(lenient=True) for name, good in TESTING.items()},
}  # fmt: skip

if HAS_TORCH:
    from blitz_attn.integrations import torch as integration

    def _tensors(make: Callable[[Arena, int], dict[str, Any]], *left_out: str) -> Callable[[Arena, int], dict[str, Any]]:
        def dressed(a: Arena, v: int) -> dict[str, Any]:
            import torch

            call = {name: x for name, x in make(a, v).items() if name not in left_out}
            return {name: _tensor(x, torch) for name, x in call.items()}

        return dressed

    def _tensor(x: Any, torch: Any) -> Any:
        if type(x) is tuple:
            return tuple(_tensor(part, torch) for part in x)
        return torch.from_numpy(x) if isinstance(x, np.ndarray) else x

    def _torchs_own(a: Arena, v: int) -> dict[str, Any]:
        import torch

        call = _tensors(_attention, "out", "dtype", "alibi_slopes")(a, v)
        named = {name: call.pop(short) for short, name in (("q", "query"), ("k", "key"), ("v", "value"))}
        named["is_causal"] = call.pop("causal", False) and v & 2 == 0
        ranges = call.pop("kv_ranges", None)
        if "attn_mask" in call:
            named["is_causal"] = False
        elif ranges is not None:  # torch's function takes ranges only as a mask of elements
            keys = torch.arange(24)
            named["attn_mask"] = (keys >= ranges[:, :1]) & (keys < ranges[:, 1:])
        return named | call | {"enable_gqa": True}

    GROUPS["integrations"] = {
        "block_sparse_attention": Good(integration.block_sparse_attention, _tensors(_attention, "out", "dtype")),
        "nsa": Good(integration.nsa, _tensors(good_nsa.native, "out")),
        "scaled_dot_product_attention": Good(integration.scaled_dot_product_attention, _torchs_own, names=("q", "k", "v", "causal")),
        "select_and_attend_prefill": Good(
            integration.select_and_attend_prefill,
            _tensors(_choice_and_attention, "out", "dtype", "return_sabi", "q_begin", "q_total", "out_dtype"),
            names=_CHOICE,
        ),
        "paged_attention": Good(
            integration.paged_attention,
            _tensors(_paged, "out", "dtype", "kv_dtype", "kv_split"),
            names=("indptr", "indices", "last_page_len"),
        ),
        "paged_select_attention": Good(
            integration.paged_select_attention,
            _tensors(_paged_select, "out", "dtype", "kv_dtype", "kv_split"),
            names=("indptr", "indices", "last_page_len", "selected_counts"),
        ),
    }


@cache
def parameters(call: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """The named parameters of a function."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {name: p for name, p in inspect.signature(call).parameters.items() if p.kind in kinds}
