"""Wrong calls, and the sentences that refuse them.

A row takes a valid call, of `good_calls` or of `CORE` below, in the variety that the row names, and changes arguments: a value replaces an
argument, and a function makes the new argument from the valid one. In a sentence, "..." stands for any text. tests/test_refusals.py checks
the sentence of every row, and `bad_calls` draws rows in other varieties, too.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import as_strided

from blitz_attn import _core, video
from blitz_attn._operations import OPERATIONS, arguments_of
from blitz_attn.sabi import BlockList
from exporters import COMPLEX, CUDA, IS_COPIED, READ_ONLY, Dlpack, NotACapsule, StoppedDlpack, released_view

from .arena import Arena
from .good_calls import GROUPS, Good, parameters
from .unusual_values import OF_ARRAYS


class Refusal(NamedTuple):
    error: type[Exception]
    sentence: str
    variety: int
    changes: dict[str, Any]

    @property
    def pattern(self) -> str:
        return re.escape(self.sentence).replace(re.escape("..."), ".+")

    def beside(self, **more: Any) -> Refusal:
        return self._replace(changes=self.changes | more)

    def apply(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """The arguments of the valid call, changed."""
        changed = {}
        for name, change in self.changes.items():
            changed[name] = change(arguments if isinstance(change, Of) else arguments.get(name)) if callable(change) else change
        return arguments | changed


def type_error(sentence: str, variety: int = 0, /, **changes: Any) -> Refusal:
    return Refusal(TypeError, sentence, variety, changes)


def value_error(sentence: str, variety: int = 0, /, **changes: Any) -> Refusal:
    return Refusal(ValueError, sentence, variety, changes)


# ---- Changes ------------------------------------------------------------------------------------------------------


class Of:
    """A change that is made from all arguments of the valid call."""

    def __init__(self, make: Callable[[dict[str, Any]], Any]) -> None:
        self.make = make

    def __call__(self, arguments: dict[str, Any]) -> Any:
        return self.make(arguments)


def made(make: Callable[..., Any], *args: Any, **options: Any) -> Callable[[Any], Any]:
    """A change that makes a new object for each call, because a call uses up the object."""
    return lambda x: make(*args, **options)


def cast(dtype: str) -> Callable[[np.ndarray], np.ndarray]:
    return lambda x: np.nan_to_num(x).astype(dtype)


def entry(value: Any, *at: int) -> Callable[[np.ndarray], np.ndarray]:
    """A change that copies the array and changes one entry."""

    def change(x: np.ndarray) -> np.ndarray:
        x = x.copy()
        x[at] = value
        return x

    return change


def returning(result: Any) -> Callable[[Any], Any]:
    """A function as an argument. It takes any arguments, and returns `result`."""
    return lambda x: lambda *args, **options: result


def triple(**parts: Any) -> Callable[[Any], Any]:
    """Packed tables with other `indptr`, `indices` or `last`, the lengths of last pages."""
    return lambda x: tuple(np.asarray(parts.get(name, part), np.int64) for name, part in zip(("indptr", "indices", "last"), x, strict=True))


def huge(*shape: int) -> np.ndarray:
    """A view of a shape that no memory could hold."""
    return as_strided(np.zeros(shape[-1], np.float32), shape, (0,) * (len(shape) - 1) + (4,))


class Unending:
    """A sequence that never ends."""

    def __getitem__(self, i: int) -> int:
        return i


class Raising:
    """An object that raises when it is converted to a number or a truth value. A refusal quotes only the first line of the message."""

    def _raise(self) -> Any:
        raise RuntimeError("no number\nat all")

    __index__ = __float__ = __bool__ = _raise
    dtype = property(_raise)


ROW, MEMORY = np.ones((1, 1, 10), np.float32), np.zeros(500, np.float32)


def apart(begin: int) -> np.ndarray:
    """A cache within `MEMORY`. If one cache begins at 0 and another at 50, pages of the same number do not overlap: rows of one cache lie in
    gaps of the other. But page 1 of the first cache shares a row with page 0 of the second."""
    return as_strided(MEMORY[begin:], (2, 2, 1, 10), (600, 400, 40, 4))


# ---- Valid calls of the compiled module -----------------------------------------------------------------------------


def _means(a: Arena, v: int) -> dict[str, Any]:
    lead, blocks = ((12,), (3,)) if v else ((1, 12), (1, 3))
    call = {"x": a.floats(*lead, 2, 4), "weight": None, "out": a.poisoned(*blocks, 2, 4), "block_size": 4, "stride": 4}
    return call | ({"cu_seqlens": [0, 12], "cu_blocks": [0, 3]} if v else {})


def _means_backward(a: Arena, v: int) -> dict[str, Any]:
    more = (a.floats(1, 12, 2, 4),)
    return {"dout": a.floats(1, 3, 2, 4), "dx": a.poisoned(1, 12, 2, 4), "more": more, "block_size": 4, "stride": 4}


def _gate(a: Arena, v: int) -> dict[str, Any]:
    call = {"q": a.floats(1, 12, 2, 4), "gate_proj_weight": a.floats(2, 3, 4), "gates": a.poisoned(1, 12, 2, 3)}
    return call | {"branches": tuple(a.floats(1, 12, 2, 4) for _ in range(3)), "out": a.poisoned(1, 12, 2, 4)}


def _gate_backward(a: Arena, v: int) -> dict[str, Any]:
    call = {**_gate(a, v), "gates": a.floats(1, 12, 2, 3), "dout": a.floats(1, 12, 2, 4), "dgates": None}
    call |= {"dbranches": tuple(a.poisoned(1, 12, 2, 4) for _ in range(3)), "dq": a.poisoned(1, 12, 2, 4)}
    del call["out"]
    return call | {"dgate_proj_weight": a.poisoned(2, 3, 4)}


def _nsa_select(a: Arena, v: int) -> dict[str, Any]:
    lead, blocks, rows = ((12,), (3,), (2, 12)) if v else ((1, 12), (1, 3), (1, 2, 12))
    call: dict[str, Any] = {"q": a.floats(*lead, 2, 4), "k_cmp": a.floats(*blocks, 2, 4), "lse": a.floats(*lead, 2)}
    call |= {"block_indices": a.poisoned(*rows, 4, dtype="int32"), "cmp_block_indices": None, "scale": 1.0, "causal": True}
    call |= {"compress_block_size": 4, "compress_stride": 4, "select_block_size": 4, "q_tile_size": 0, "init_blocks": 1, "local_blocks": 2}
    return call | {"q_begin": 0, "tokens": 12, "cmp_group": 128} | ({"cu_seqlens": [0, 12], "cu_blocks": [0, 3]} if v else {})


def _core_attention(a: Arena, v: int) -> dict[str, Any]:
    shape = (64, 2, 8) if v else (1, 2, 64, 8)
    call: dict[str, Any] = {"empty": np.empty, "causal": False, "return_lse": False, "block_shape": (32, 32)}
    call |= {name: a.floats(*shape) for name in "qkv"} | {"out": a.poisoned(*shape), "layout": "TND" if v else "BNSD"}
    packed = {"cu_seqlens_q": [0, 64], "cu_seqlens_kv": [0, 64], "cu_rows": [0, 2], "sabi": a.integers(np.zeros((2, 2, 1)))}
    return call | (packed if v else {})


def _core_paged(a: Arena, v: int) -> dict[str, Any]:
    call = {"empty": np.empty, "q": a.floats(2, 2, 8), "k_cache": a.floats(4, 16, 1, 8), "v_cache": a.floats(4, 16, 1, 8)}
    call |= {"block_tables": a.integers([[0, 1], [2, 3]]), "seq_lens": [20, 32], "selected": a.integers([[[0, -1]], [[1, 0]]])}
    return call | {"kv_layout": "NHD", "return_lse": False, "out": a.poisoned(2, 2, 8)}


def _core_prefill(a: Arena, v: int) -> dict[str, Any]:
    call = {"empty": np.empty, "block_shape": (32, 32), "layout": "BNSD", "causal": False, "chooser": "pooled", "pool_q": 8, "pool_k": 8}
    call |= {name: a.floats(1, 2, 64, 8) for name in "qkv"} | {"term": "both", "largest": True, "budget": "density"}
    call |= {"budgets": np.array([0.5]), "sink": 1, "recent": 1, "last_columns": 0, "first_rows": 0, "last_rows": 0, "per_kv_head": False}
    return dict.fromkeys(x.name for x in OPERATIONS["select_prefill"]) | call | {"index_dtype": "int32", "return_scores": False}


def _core_pages(a: Arena, v: int) -> dict[str, Any]:
    call = {"empty": np.empty, "method": "max", "query": a.floats(1, 2, 8), "a": a.floats(4, 16, 2, 8)}
    call |= {"tables": a.integers([[0, 1]]), "seq_lens": [20], "k": 2, "block_size": 16, "per_query_head": False, "sink": 0, "recent": [0]}
    call |= {"budget": [1], "tokens_since_metadata_update": -1, "ascending": True, "kv_layout": "NHD"}
    return dict.fromkeys(x.name for x in OPERATIONS["select_blocks"]) | call | {"return_counts": False, "return_scores": False}


def _opened(a: Arena) -> Any:
    return _core.open_page_tables(a.integers([[0, 1], [2, 3]]), [20, 32], None, None, None, None, 16, None, None)[0]


CORE = {
    "block_means": Good(_core.block_means, _means, ("out",)),
    "block_means_backward": Good(_core.block_means_backward, _means_backward, ("dx",)),
    "gate": Good(_core.gate, _gate, ("out", "gates")),
    "gate_backward": Good(_core.gate_backward, _gate_backward, ("dbranches", "dq", "dgate_proj_weight")),
    "nsa_select": Good(_core.nsa_select, _nsa_select, ("block_indices",)),
    "block_sparse_attention": Good(_core.block_sparse_attention, _core_attention, ("out",)),
    "paged_attention": Good(_core.paged_attention, _core_paged, ("out",)),
    "in_usual_mode": Good(_core.in_usual_mode, lambda a, v: {"function": float, "args": (), "kwargs": {}}),
    "page_table_lengths": Good(_core.page_table_lengths, lambda a, v: {"tables": _opened(a)}),
    "merge_states": Good(
        _core.merge_states, lambda a, v: {"empty": np.empty, "outs": (a.floats(1, 12, 2, 4),), "lses": (a.floats(1, 12, 2),)}
    ),
    "select_prefill": Good(_core.select_prefill, _core_prefill),
    "select_blocks": Good(_core.select_blocks, _core_pages),
    "quantize_kv": Good(
        _core.quantize_kv, lambda a, v: {"x": a.floats(3, 8), "values": a.poisoned(3, 8, dtype="int8"), "scale": a.poisoned(3)},
        ("values", "scale"),
    ),
}  # fmt: skip


def valid(name: str) -> Good:
    """The valid call of the function that a key of REFUSALS names as `group.function`."""
    group, _, function = name.partition(".")
    return (CORE if group == "core" else GROUPS[group])[function]


# ---- Rows ---------------------------------------------------------------------------------------------------------

ADDED = [  # biases, softcap and positions of queries, for all functions of attention over lists and of its gradients
    value_error("attn_mask: expected shape (1, 2 or 1, 16 or 1, 24 or 1), got (3, 1, 16, 24)", attn_mask=np.zeros((3, 1, 16, 24), np.bool_)),
    value_error("attn_mask: expected shape (1, 2 or 1, 16 or 1, 24 or 1), got (3, 16, 24)", attn_mask=np.zeros((3, 16, 24), np.bool_)),
    value_error("attn_mask: expected shape (1, 2 or 1, 16 or 1, 24 or 1), got (17, 24)", attn_mask=np.zeros((17, 24), np.float32)),
    value_error("attn_mask: expected shape (1, 2 or 1, 16 or 1, 24 or 1), got (16, 23)", attn_mask=np.zeros((16, 23), np.float32)),
    value_error("attn_mask: expected shape (1, 2 or 1, 16 or 1, 24 or 1), got (3,)", attn_mask=np.zeros(3, np.float32)),
    value_error("attn_mask: expected shape (1, 2 or 1, 16 or 1, 24 or 1), got (16, 0)", attn_mask=np.zeros((16, 0), np.bool_)),
    value_error("attn_mask: expected at most 4 dimensions, got 5", attn_mask=np.zeros((1, 1, 1, 16, 24), np.bool_)),
    type_error("attn_mask: expected bool, float32, float16, bfloat16 or float64, got int64", attn_mask=np.zeros((16, 24), np.int64)),
    type_error("attn_mask: expected bool, float32, float16, bfloat16 or float64, got uint16", attn_mask=np.zeros((16, 24), np.uint16)),
    type_error("attn_mask: expected bool, float32, float16, bfloat16 or float64, got complex64", attn_mask=np.zeros((16, 24), np.complex64)),
    type_error("attn_mask: expected an array, got float", attn_mask=0.5),
    type_error("attn_mask: expected an array, got list", attn_mask=[[True] * 24] * 16),
    value_error("alibi_slopes: expected shape (2,), one number per head, got (1,)", alibi_slopes=np.zeros(1, np.float32)),
    value_error("alibi_slopes: expected shape (2,), one number per head, got (1, 2)", alibi_slopes=np.zeros((1, 2), np.float32)),
    value_error("alibi_slopes: expected shape (2,), one number per head, got ()", alibi_slopes=0.5),
    type_error("alibi_slopes: expected numbers, got complex64", alibi_slopes=np.zeros(2, np.complex64)),
    type_error("alibi_slopes: expected numbers, got <U1", alibi_slopes=np.array(["a", "a"])),
    value_error("softcap: expected a positive finite number, or 0 for none, got -1", softcap=-1.0),
    value_error("softcap: expected a number from 1e-37 to 1e+37 with a float32 q, or 0 for none, got 1e+39", softcap=1e39),
    type_error("softcap: expected a number, got str", softcap="3"),
    value_error("q_begin: expected 1 entry, one per batch entry, got 3", q_begin=[1, 2, 3]),
    value_error("q_begin: expected token numbers from -1073741823 to 1073741823, got 2147483648 at [0]", q_begin=2**31),
    value_error("q_begin: expected token numbers from -1073741823 to 1073741823, got -1099511627776 at [0]", q_begin=[-(2**40)]),
    type_error("q_begin: expected an integer or a sequence of integers, got float", q_begin=1.5),
    type_error("q_begin: expected an integer or a sequence of integers, got str", q_begin="1"),
    value_error("q_total: expected at least the 16 queries of the call and at most 1073741823, got 15 at [0]", q_total=15),
    value_error("q_total: expected at least the 16 queries of the call and at most 1073741823, got 1099511627776 at [0]", q_total=[2**40]),
    value_error("q_total: expected 1 entry, one per batch entry, got 2", q_total=[16, 16]),
]  # fmt: skip
TABLES = [  # for all functions that take block tables and lengths
    value_error("block_tables: expected pages from 0 to 3 within ..., got 4 for page 1 of request 0", block_tables=entry(4, 0, 1)),
    value_error("block_tables: expected pages from 0 to 3 within ..., got -1 for page 0 of request 1", block_tables=entry(-1, 1, 0)),
    value_error("block_tables: expected shape (B, W) with 2 requests, got (3, 2)", block_tables=np.zeros((3, 2), np.int32)),
    value_error("block_tables: expected shape (B, W) with 2 requests, got (2,)", block_tables=lambda x: x[0]),
    type_error("block_tables: expected int32 or int64, got float64", block_tables=cast("float64")),
    value_error("seq_lens: expected lengths from 0 to what the table's 2 pages of 4 tokens hold, got 9 at [0]", seq_lens=[9, 4]),
    value_error("seq_lens: expected lengths from 0 to what the table's 2 pages of 4 tokens hold, got -1 at [1]", seq_lens=[6, -1]),
    value_error("seq_lens: expected lengths of at most 1073741823 tokens, got 4611686018427387904 at [0]", seq_lens=[2**62, 4]),
    value_error("seq_lens: expected an integer of 64 bits, got 1208925819614629174706176", seq_lens=[2**80, 4]),
    value_error("seq_lens: expected one length per request where block_tables is an array, got None", seq_lens=None),
]  # fmt: skip
SCALES = [  # for all functions that take caches with scales
    value_error("k_scale: expected scales of shape (4, 4, 2), (2,) or () for int8 k_cache, got none", 4, k_scale=None),
    value_error("v_scale: expected scales of shape (4, 4, 2), (2,) or () for int8 v_cache, got none", 4, v_scale=None),
    value_error("k_scale: expected shape (4, 4, 2) like k_cache, (2,) for one number ..., got (4, 1, 2)", 4, k_scale=lambda x: x[:, :1]),
    value_error("v_scale: expected shape (4, 4, 2) like v_cache, (2,) for one number per KV head, or () for one number, got (4,)",
                4, v_scale=lambda x: x[:, 0, 0]),
    value_error("k_scale: expected shape (4, 4, 2) like k_cache, (2,) for one number per KV head, or () for one number, got (3,)",
                4, k_scale=np.ones(3, np.float32)),
    value_error("v_scale: expected positive numbers within the range of float32, got 0", 4, v_scale=0),
    value_error("k_scale: expected positive numbers within the range of float32, got inf", 4, k_scale=np.array([1, np.inf], np.float32)),
    value_error("k_scale: expected positive numbers within the range of float32, got inf", 4, k_scale=np.full(2, 1e39)),
    value_error("k_scale: expected positive numbers within the range of float32, got -1.0000001", 4, k_scale=-1 - 2.0**-23),
    type_error('k_cache: expected ..., got uint8 (kv_dtype=, or dtype= where there is no kv_dtype, says what uint8 holds, such as ...',
                4, k_cache=lambda x: x.view(np.uint8)),
    value_error("v_scale: expected none with float32 v_cache, got shape ()", k_scale=1.0, v_scale=1.5),
    value_error("k_scale: expected none with float32 k_cache, got shape (4, 4, 2)", k_scale=np.ones((4, 4, 2), np.float32)),
    type_error("v_cache: expected dtype float32 like k_cache, got float16", v_cache=cast("float16")),
    value_error("v_cache: expected the first three axes of k_cache (4, 4, 2, 8), got (2, 4, 2, 8)", v_cache=lambda x: x[:2]),
]  # fmt: skip
# Changes that pass tables as (indptr, indices, last_page_len), in place of a table with a row for each request.
PACKED_TABLES = {"block_tables": lambda x: (np.array([0, 2, 4]), x.reshape(-1), np.array([2, 4])), "seq_lens": None}
PAGED_RULES = [  # for calls over pages and for plans
    value_error("softcap: expected a positive finite number, or 0 for none, got -1", softcap=-1.0),
    value_error("window: expected a token count of at least 0, or -1 for no bound, got -2", window=-2),
    type_error("window: expected one integer, the number of tokens before itself that a query sees, got tuple", window=(4, 0)),
    value_error("kv_split: expected a positive multiple of the 4 tokens of a page, got 6", kv_split=6),
    value_error("kv_split: expected a positive multiple of the tokens of a page, got 0", kv_split=0),
    type_error("kv_split: expected an integer, got str", kv_split="4"),
    type_error("scale: expected a number, got str", scale="b"),
    value_error("num_threads: expected a positive number of threads or None, got 0", num_threads=0),
    value_error("num_threads: expected 1 to 1024, got 9999", num_threads=9999),
]
BIASES = [  # for all functions that attend tokens on pages
    value_error("kv_ranges: expected shape (2, 2), got (3, 2)", kv_ranges=np.zeros((3, 2), int)),
    value_error("attn_mask: expected shape (2 or 1, 4 or 1, 1, 6 or 1), or more ..., got (1, 5)", attn_mask=np.zeros((1, 5), bool)),
    value_error("attn_mask: expected 6 tokens in a mask of one axis, or shape (2, 1, 1, 6), a matrix of ... for each request, got (7,)",
                attn_mask=np.ones(7, bool)),
    value_error("alibi_slopes: expected shape (4,), one number per head, got (2,)", alibi_slopes=np.zeros(2, np.float32)),
]  # fmt: skip
SUMMARIES = [  # for all functions that keep summaries up to date
    value_error("metadata_block_tables: expected the tables of maxblocks, minblocks and meanblocks, got None",
                1, metadata_block_tables=None),
    value_error("maxblocks: expected a summary to write, got none", 1, maxblocks=None, minblocks=None, meanblocks=None),
    value_error("metadata_block_tables: expected pages from 0 ..., got 2 at [0, 0]", 1, metadata_block_tables=np.array([[2], [0]])),
    value_error("metadata_block_tables: expected ..., got 1, which is listed twice", 1, metadata_block_tables=np.array([[1], [1]])),
    value_error("metadata_block_tables: expected shape (2, W), got (1, 1)", 1, metadata_block_tables=np.array([[1]])),
    value_error("metadata_block_tables: expected pages that nothing else uses, got 3, which holds keys",
                1, maxblocks=Of(lambda a: a["k_cache"]), metadata_block_tables=np.array([[3], [2]]), minblocks=None, meanblocks=None),
]  # fmt: skip

_RULE = "expected a Neighbourhood, a Radial or a SlidingTiles such as SlidingTiles((3, 3, 3)), or a list of them"
REFUSALS: dict[str, list[Refusal]] = {
    "block_sparse.block_sparse_attention": [
        # shape
        value_error("q: expected shape (B, H, Sq, D) for layout BNSD, got (2, 16, 8)", q=lambda x: x[0]),
        value_error("q: expected shape (B, H, Sq, D) for layout BNSD, got ()", q=np.float32(1)),
        value_error("q: expected at most 4 dimensions, got 5", q=lambda x: x[None]),
        value_error("k: expected shape (B, Hkv, Skv, D) for layout BNSD, got (1, 24, 8)", k=lambda x: x[0]),
        value_error("v: expected shape (B, Hkv, Skv, Dv) for layout BNSD, got (1, 24, 4)", v=lambda x: x[0]),
        value_error("q: expected shape (T, H, D) for layout TND, got (1, 2, 16, 8)", layout="TND"),
        value_error("k: expected shape (B, Hkv, Skv, D) with D = 8 like q, got (1, 1, 24, 7)", k=lambda x: x[..., :7]),
        value_error("k: expected shape (B, Hkv, Skv, D) with B = 1 like q, got (0, 1, 24, 8)", k=lambda x: x[:0]),
        value_error("k: expected a number of heads that divides q's 2, got 3 in (1, 3, 24, 8)", k=lambda x: x.repeat(3, 1)),
        value_error("k: expected a number of heads that divides q's 2, got 0 in (1, 0, 24, 8)", k=lambda x: x[:, :0]),
        value_error("q: expected at least one head, got (1, 0, 16, 8)", q=lambda x: x[:, :0]),
        value_error("v: expected shape (B, Hkv, Skv, Dv) with the batch, heads and tokens of k (1, 1, 24, 8), got (1, 1, 23, 4)",
                    v=lambda x: x[:, :, 1:]),
        value_error("q: expected a head dim D from 1 to 576, got 0 in (1, 2, 16, 0)", q=lambda x: x[..., :0], k=lambda x: x[..., :0]),
        value_error("v: expected a head dim Dv from 1 to 576, got 0 in (1, 1, 24, 0)", v=lambda x: x[..., :0]),
        value_error("q: expected a head dim D from 1 to 576, got 577 in (1, 2, 16, 577)", q=huge(1, 2, 16, 577), k=huge(1, 1, 24, 577)),
        # dtype and memory
        type_error("q: expected float32, float16, bfloat16 or float64, got object", q=cast("object")),
        type_error('q: expected float32, float16, ..., got uint16 (dtype="bfloat16" reads uint16 as bfloat16 bits)', q=cast("uint16")),
        value_error("q: expected an array whose memory can be read, got ndarray that raises: ...", q=cast("M8[s]")),
        type_error("q: expected float32, float16, bfloat16 or float64, got [('x', '<f4')]", q=lambda x: x.view([("x", "<f4")])),
        type_error("q: expected float32, float16, bfloat16 or float64, got buffer format 'B'", q=lambda x: memoryview(x).cast("B")),
        type_error("q: expected an array, got NoneType", q=None),
        type_error("q: expected ..., got datetime64", q=np.datetime64("NaT")),
        type_error("k: expected an array, got str", k="keys"),
        type_error("k: expected dtype float32 like q, got float16", k=cast("float16")),
        type_error("v: expected dtype float32 like q, got float64", v=cast("float64")),
        value_error("k: expected a contiguous last axis (numpy.ascontiguousarray makes one), got a stride of -1 elements",
                    k=lambda x: x[..., ::-1]),
        value_error("v: expected a contiguous last ..., got a stride of 0 elements", v=lambda x: np.broadcast_to(x[..., :1], x.shape)),
        value_error("q: expected memory aligned to 4 bytes (numpy.ascontiguousarray makes a copy), got an address that is not",
                    q=OF_ARRAYS["misaligned"]),
        value_error("q: expected strides of whole elements (numpy.ascontiguousarray makes them), got 2 bytes on axis 2",
                    q=lambda x: as_strided(x, x.shape, (0, 0, 2, 4))),
        # sizes beyond 64 bits
        value_error("q: expected an output below 2^63 bytes, got shape (1048576, 1024, 1048576, 576)",
                    q=huge(1 << 20, 1 << 10, 1 << 20, 1), k=huge(1 << 20, 1 << 10, 1, 1), v=huge(1 << 20, 1 << 10, 1, 576)),
        value_error("k: expected axes of at least 0 and fewer ..., got 24 on axis 2", k=lambda x: Dlpack(x, shape=(1 << 40, 1 << 20, 24, 8))),
        value_error("k: expected an array of fewer than 2^63 bytes, got 2 elements 2305843009213693952 apart on axis 0",
                    k=lambda x: Dlpack(x, strides=(1 << 61, 0, 8, 1), shape=(2, 1, 24, 8))),
        value_error("k: expected an array of fewer than 2^63 bytes, got a stride of -4611686018427387904 bytes on axis 0",
                    k=lambda x: Dlpack(x, strides=(-(1 << 60), 0, 8, 1), shape=(5, 1, 24, 8))),
        value_error("q: expected axes of at least 0 and fewer than 2^63 bytes in all, got -1 on axis 2",
                    q=lambda x: Dlpack(x, shape=(1, 2, -1, 8))),
        value_error("q: expected at most ..., got 2147483648", q=huge(1, 1, 1 << 31, 1), k=huge(1, 1, 1, 1), v=huge(1, 1, 1, 1)),
        value_error("k: expected at most ..., got 2147483648", q=huge(1, 1, 1, 1), k=huge(1, 1, 1 << 31, 1), v=huge(1, 1, 1 << 31, 1)),
        # exporters
        value_error("q: expected an array whose memory can be read, got memoryview that raises: ...released...",
                    q=made(released_view)),
        value_error("k: expected an ..., got StoppedDlpack that raises: gone", k=made(StoppedDlpack, RuntimeError("gone\nfor good"))),
        value_error("sabi: expected an array ..., got StoppedDlpack that raises: gone", 3, sabi=made(StoppedDlpack, BufferError("gone"))),
        value_error("kv_lens: expected an ..., got StoppedDlpack that raises: gone", kv_lens=made(StoppedDlpack, TypeError("gone"))),
        type_error("v: expected an unused DLPack capsule from __dlpack__(), got int", v=NotACapsule()),
        type_error("q: expected an array in CPU memory, got one on DLPack device type 2", q=lambda x: Dlpack(x, device_type=CUDA)),
        type_error("q: expected float32, float16, bfloat16 or float64, got buffer format 'B'", q=lambda x: Dlpack(x, code=COMPLEX)),
        type_error("q: expected float32, float16, bfloat16 or float64, got buffer format 'B'", q=lambda x: Dlpack(x, lanes=4)),
        value_error("q: expected at most 4 dimensions, got 6", q=lambda x: Dlpack(x, ndim=6)),
        value_error("q: expected DLPack version 1, got version 2", q=lambda x: Dlpack(x, version=(2, 0))),
        # block lists
        value_error("sabi: expected shape (1, 2 or 1, 2, W), with 2 rows = ceil(16 queries / block_shape[0] = 8), got (2,)",
                    3, sabi=lambda x: x[0, 0, 0]),
        value_error("sabi: expected shape (1, 2 or 1, 2, W), with 2 rows = ceil(16 ..., got (3, 2)", 3, sabi=lambda x: x[0, 0, [0, 1, 0]]),
        value_error("sabi: expected shape (1, 2 or 1, 2, W), with 2 rows = ceil(16 ..., got (1, 1, 1, 2)", 3, sabi=lambda x: x[:, :, :1]),
        type_error("sabi: expected uint16, int16, int32 or int64, got bool (blitz_attn.sabi.from_block_mask makes a list from a mask over "
                   "blocks, from_token_mask from one over tokens)", 3, sabi=cast("bool")),
        value_error("block_shape: expected (8, 16), which sabi is made for, or none, got (8, 8)", 3, sabi=lambda x: BlockList(x, (8, 16))),
        type_error("sabi: expected uint16, int16, int32 or int64, got uint8", 3, sabi=cast("uint8")),
        type_error("sabi: expected native byte order, got >i4", 3, sabi=cast(">i4")),
        type_error("sabi: expected an array without a mask, got MaskedArray", 3, sabi=np.ma.masked),
        value_error("sabi: expected block columns from 0 to 2, or a pad, got 3 at [0, 0, 1, 0]", 3, sabi=entry(3, 0, 0, 1, 0)),
        value_error("sabi: expected block columns from 0 to 2, or a pad, got 9223372036854775807 at [0, 0, 1, 0]",
                    3, sabi=lambda x: entry(2**63 - 1, 0, 0, 1, 0)(x.astype(np.int64))),
        value_error("sabi: expected block columns ..., got 65534 at [0, 0, 0, 0]", 3, sabi=np.full((1, 1, 2, 1), 65534, np.uint16)),
        value_error("sabi: expected block columns from 0 to 2, or a pad, got 65535 at [0, 0, 1, 0] (65535 is a pad in uint16 alone)",
                    3, sabi=np.array([[[[0], [65535]]]])),
        value_error("sabi: expected each block column once per row, got 0 again at [0, 0, 0, 1]", 3, sabi=entry(0, 0, 0, 0, 1)),
        value_error("block_shape: expected two sizes of at least 1, got (0, 8)", block_shape=(0, 8)),
        value_error("block_shape: expected two sizes of at least 1, got (8, -1)", block_shape=(8, -1)),
        type_error("block_shape: expected integers, got float", block_shape=(8.0, 8)),
        value_error("block_shape: expected a pair of integers, got 3 of them", block_shape=(8, 8, 8)),
        value_error("block_shape: expected an integer of 64 bits, got 100000000000000000000", block_shape=(10**20, 8)),
        # lengths and ranges
        value_error("q_lens: expected 1 entry, one per batch entry, got 2", 3, q_lens=[1, 2]),
        value_error("q_lens: expected lengths from 0 to 16, got -1 at [0]", q_lens=[-1]),
        value_error("q_lens: expected lengths from 0 to 16, got 17 at [0]", q_lens=(17,)),
        type_error("q_lens: expected native byte order, got >i8", q_lens=np.array([1], ">i8")),
        value_error("kv_lens: expected lengths from 0 to 24, got 25 at [0]", kv_lens=np.array([25])),
        value_error("kv_lens: expected lengths from 0 to 24, got 9223372036854775807 at [0]", kv_lens=np.array([2**64 - 1], np.uint64)),
        type_error("kv_lens: expected integers, got float", kv_lens=[2.0]),
        value_error("kv_lens: expected 1 dimension, got 2", kv_lens=np.ones((1, 1), int)),
        type_error("kv_lens: expected a sequence of integers, got int", kv_lens=3),
        type_error("kv_lens: expected a sequence of integers, got str", kv_lens="1"),
        type_error("kv_lens: expected integers, got buffer format 'B'", kv_lens=made(Dlpack, np.array([1]), bits=24)),
        type_error("kv_lens: expected integers, got buffer format 'B'", kv_lens=made(Dlpack, np.array([1]), bits=0)),
        value_error("kv_lens: expected axes of at least 0 and fewer ..., got -2 on axis 0", kv_lens=made(Dlpack, np.array([1]), shape=(-2,))),
        value_error("kv_lens: expected integers, got Raising that raises: no number", kv_lens=[Raising()]),
        value_error("cu_seqlens_q: expected none with layout BNSD, whose lengths are q_lens and kv_lens, got some", cu_seqlens_q=[0, 16]),
        value_error("kv_ranges: expected shape (1, 16, 2) or (16, 2), got (16, 3)", kv_ranges=np.zeros((16, 3), int)),
        value_error("kv_ranges: expected shape (1, 16, 2) or (16, 2), got (2, 16, 2)", kv_ranges=np.zeros((2, 16, 2), int)),
        type_error("kv_ranges: expected an array, got int", kv_ranges=7),
        # rules and options
        value_error("scale: expected a finite number, got nan", scale=float("nan")),
        value_error("scale: expected a finite number, got inf", scale=float("inf")),
        type_error("scale: expected a number, got complex64", scale=np.complex64(1 + 5j)),
        value_error("scale: expected a number from -1e+37 to 1e+37 with a float32 q, got 1e+39", scale=1e39),
        value_error("scale: expected a number from -1e+37 to 1e+37 with a float32 q, got 1.00000001e+37", scale=1.00000001e37),
        value_error("scale: expected a finite number, got an integer beyond a double's range", scale=10**400),
        value_error("softcap: expected a positive finite number, or 0 for none, got -0.123456789", softcap=-0.123456789),
        value_error("softcap: expected a number from 1e-37 to 1e+37 with a float32 q, or 0 for none, got 1e+38", softcap=1e38),
        type_error("return_lse: expected True or False, got list", return_lse=[]),
        type_error("return_lse: expected True or False, got ndarray", return_lse=np.zeros(2), out=Of(lambda a: (a["q"], a["q"]))),
        value_error("layout: expected a string, got str that raises: 'utf-8' codec can't encode character ...",
                    layout="\ud800"),
        value_error("layout: expected a string without null characters, got 'BNSD\\x00'", layout="BNSD\0"),
        type_error("layout: expected a string, got int", layout=0),
        type_error("q: expected float16 as dtype says, got float32", dtype="float16"),
        type_error("dtype: expected native byte order, got >f4", dtype=np.dtype(">f4")),
        type_error("out_dtype: expected native byte order, got >f4", out_dtype=np.dtype(">f4")),
        value_error("out_dtype: expected 'float32' like q, got 'float16'", out_dtype="float16"),
        value_error("out_dtype: expected 'float16' or 'float32' like q, got 'float64'", 2, out_dtype="float64"),
        value_error("out_dtype: expected 'float16' or 'float32' like q, got 'bfloat16'", 2, out_dtype="bfloat16"),
        value_error("out_dtype: expected 'float64' like q, got 'float32'", 1, out_dtype="float32"),
        value_error("out_dtype: expected 'float32', 'float16', 'bfloat16' or 'float64', got 'double'", out_dtype="double"),
        value_error("window: expected a pair of integers, got 1 of them", window=(3,)),
        value_error("window: expected token counts of at least 0, or -1 for no bound, got (-2, 0)", window=(-2, 0)),
        type_error("window: expected integers, got float", window=(1, 0.5)),
        value_error("num_heads: expected an integer of 64 bits, got a larger one", num_heads=10**5000),
        value_error("num_heads: expected 2 like q, got 4", num_heads=4),
        value_error("num_heads: expected 2 like q, got 0", num_heads=0),
        value_error("num_kv_heads: expected 1 like k, got 4", num_kv_heads=4),
        value_error("num_kv_heads: expected 1 like k, got 0", num_kv_heads=0),
        value_error("num_threads: expected a positive number of threads or None, got 0", num_threads=0),
        value_error("num_threads: expected 1 to 1024, got 1000000", num_threads=1000000),
        # outputs
        value_error("out: expected memory of its own, got an array that overlaps q", out=Of(lambda a: a["q"]), v=Of(lambda a: a["k"])),
        value_error("out: expected memory of its own, got an array that overlaps v",
                    12, out=Of(lambda a: as_strided(a["v"].reshape(-1)[-1:], (1, 2, 16, 4), (512, 256, 16, 4)))),
        value_error("out: expected memory of its own, got an array that overlaps kv_ranges",
                    6, kv_ranges=Of(lambda a: a["out"].view(np.int64).reshape(-1)[:32].reshape(16, 2))),
        value_error("out: expected an array whose elements each have their own memory, got one that overlaps itself",
                    6, out=lambda x: as_strided(x, x.shape, (0, 0, 16, 4))),
        value_error("out: expected an ..., got one that overlaps itself", 6, out=lambda x: as_strided(x, x.shape, (512, 256, 8, 4))),
        value_error("out: expected shape (1, 2, 16, 4), got (1, 2, 16, 3)", 6, out=lambda x: x[..., :3]),
        value_error("out: expected shape (1, 2, 16, 4), got (2, 16, 4)", 6, out=lambda x: x[0]),
        type_error("out: expected dtype float32, got float64", 6, out=cast("float64")),
        type_error("out: expected float32, float16, bfloat16 or float64, got int32", 6, out=lambda x: x.view(np.int32)),
        value_error("out: expected a contiguous last axis (numpy.ascontiguousarray makes one), got a stride of 16 elements",
                    6, out=lambda x: np.zeros((1, 2, 4, 16), np.float32).swapaxes(2, 3)),
        type_error("out: expected native byte order, got >f4", 6, out=cast(">f4")),
        type_error("out: expected an array, got list", 6, out=[1.0]),
        value_error("out: expected a writable array, got a read-only one", 6, out=lambda x: Dlpack(x, flags=READ_ONLY)),
        value_error("out: expected a writable array, got a read-only one", 6, out=lambda x: Dlpack(x, flags=IS_COPIED)),
        value_error("out: expected an array, or a pair (out, lse) with return_lse=True, got a tuple of 2", 6, out=lambda x: (x, None)),
        type_error("out: expected dtype float32, got float16", 2, out_dtype="float32", out=np.empty((1, 2, 16, 4), np.float16)),
        type_error("out: expected dtype float16, got float32", 2, out=np.empty((1, 2, 16, 4), np.float32)),
        value_error("lse: expected shape (1, 2, 16), got (1, 2, 15)", 15, out=lambda x: (x[0], x[1][..., 1:])),
        type_error("lse: expected dtype float32, got float64", 15, out=lambda x: (x[0], x[1].astype(np.float64))),
        type_error("lse: expected float32 or float64, got float16", 15, out=lambda x: (x[0], x[1].astype(np.float16))),
        value_error("lse: expected memory of its own, got an array that overlaps out", 15, out=lambda x: (x[0], x[0][..., 0])),
        value_error("lse: expected memory of its own, got an array that overlaps k",
                    15, out=Of(lambda a: (a["out"][0], a["k"].reshape(-1)[:32].reshape(1, 2, 16)))),
        # what is added to scores
        *ADDED,
        value_error("sinks: expected shape (2,), one number per head, got (1,)", sinks=[1.0]),
        value_error("sinks: expected shape (2,), one number per head, got (1, 2)", sinks=[[1.0, 2.0]]),
        type_error("sinks: expected numbers, got str", sinks="ab"),
        value_error("out: expected memory of its own, got an array that overlaps sinks", 6, sinks=Of(lambda a: a["out"].reshape(-1)[:2])),
        value_error("out: expected memory of its own, got an array that overlaps attn_mask",
                    6, attn_mask=Of(lambda a: a["out"].reshape(-1)[:16].reshape(16, 1))),
    ],
    "block_sparse.block_sparse_attention BSH": [
        value_error("num_heads: expected num_heads= with layout BSH, whose last axis holds all heads, got no num_heads", num_heads=None),
        value_error("num_heads: expected at least 1, got 0", num_heads=0),
        value_error("q: expected a last axis that 5 heads divide, got (2, 5, 16)", num_heads=5),
        value_error("num_kv_heads: expected at least 1, got 0", num_kv_heads=0),
    ],
    "block_sparse.block_sparse_attention packed": [
        value_error("cu_seqlens_q: expected cu_seqlens_q= and cu_seqlens_kv= with layout TND, got no cu_seqlens_q", cu_seqlens_q=None),
        value_error("cu_seqlens_kv: expected cu_seqlens_q= and cu_seqlens_kv= with layout TND, got no cu_seqlens_kv", cu_seqlens_kv=None),
        value_error("q_lens: expected none with layout TND, whose lengths are cu_seqlens_q and cu_seqlens_kv, got some", q_lens=[1]),
        value_error("cu_seqlens_q: expected at least one number, got none", cu_seqlens_q=[], cu_seqlens_kv=[]),
        value_error("cu_seqlens_kv: expected 3 entries, as many as cu_seqlens_q has, got 4", cu_seqlens_kv=[0, 6, 7, 12]),
        value_error("cu_seqlens_q: expected 0 at [0], got 1", cu_seqlens_q=[1, 4, 12]),
        value_error("cu_seqlens_q: expected rising numbers, got 2 after 3 at [2]",
                    cu_seqlens_q=[0, 3, 2, 12], cu_seqlens_kv=[0, 1, 2, 12]),
        value_error("cu_seqlens_kv: expected the last number to be the token count 12, got 13", cu_seqlens_kv=[0, 6, 13]),
        value_error("kv_ranges: expected shape (12, 2), got (2, 6, 2)", kv_ranges=np.zeros((2, 6, 2), int)),
    ],
    "block_sparse.block_sparse_attention_backward": [
        *ADDED,
        value_error("out: expected shape (1, 2, 16, 8), got (1, 2, 15, 8)", out=lambda x: x[:, :, 1:].copy()),
        value_error("out: expected shape (1, 2, 16, 8), got (1, 2, 16, 7)", out=lambda x: x[..., 1:].copy()),
        type_error("out: expected dtype float32, got float64", out=cast("float64")),
        type_error("out: expected an array, got NoneType", out=None),
        value_error("out: expected a contiguous last axis ..., got a stride of 2 elements", out=lambda x: x.repeat(2, -1)[..., ::2]),
        value_error("lse: expected shape (1, 2, 16), got (1, 2, 1)", lse=lambda x: x[..., :1].copy()),
        value_error("lse: expected shape (1, 2, 16), got (1, 16)", lse=lambda x: x[:, 0].copy()),
        type_error("lse: expected dtype float32, got float64", lse=cast("float64")),
        type_error("lse: expected float32 or float64, got float16", lse=cast("float16")),
        type_error("lse: expected an array, got NoneType", lse=None),
        value_error("dout: expected shape (1, 2, 16, 8), got (1, 2, 16, 7)", dout=lambda x: x[..., 1:].copy()),
        type_error("dout: expected dtype float32, got float16", dout=cast("float16")),
        type_error("dout: expected an array, got list", dout=lambda x: x.tolist()),
        value_error("dlse: expected shape (1, 2, 16), got (0, 2, 16)", 2, dlse=lambda x: x[1:].copy()),
        type_error("dlse: expected dtype float32, got float64", 2, dlse=cast("float64")),
        type_error("dlse: expected an array, got float", dlse=1.0),
        value_error("grads: expected a tuple (dq, dk, dv), got a tuple of 2", 4, grads=lambda x: x[:2]),
        type_error("grads: expected a tuple (dq, dk, dv), got ndarray", 4, grads=lambda x: x[0]),
        value_error("dq: expected shape (1, 2, 16, 8), got (1, 2, 16, 7)", 4, grads=lambda x: (x[0][..., 1:], *x[1:])),
        value_error("dk: expected shape (1, 1, 24, 8), got (0, 1, 24, 8)", 4, grads=lambda x: (x[0], x[1][:0], None)),
        type_error("dv: expected dtype float32, got float64", 4, grads=lambda x: (*x[:2], x[1].astype(np.float64))),
        value_error("dk: expected an array whose elements each have their own memory, got one that overlaps itself",
                    4, grads=lambda x: (None, as_strided(x[1], x[1].shape, (0, 0, 0, 4)), None)),
        value_error("dq: expected memory of its own, got an array that overlaps q", 4, grads=Of(lambda a: (a["q"], None, None))),
        value_error("dv: expected memory of its own, got an array that overlaps dout",
                    4, grads=Of(lambda a: (None, None, a["dout"].reshape(-1)[:192].reshape(1, 1, 24, 8)))),
        value_error("dk: expected memory of its own, got an array that overlaps dq",
                    4, grads=lambda x: (x[0], x[0].reshape(-1)[:192].reshape(1, 1, 24, 8), None)),
        type_error("bias_grads: expected True or False, got str", bias_grads="yes"),
        value_error("dk: expected an array to add to with accumulate=True, got None", accumulate=True),
        value_error("dv: expected an array ..., got None", accumulate=True, grads=Of(lambda a: (None, np.zeros_like(a["k"]), None))),
        type_error("dk: expected dtype float32, got float64",
                    accumulate=True, grads=Of(lambda a: (None, a["k"].astype(np.float64), np.zeros_like(a["v"])))),
    ],
    "merge.merge_states": [
        value_error("out_b: expected shape (2, 5, 8) like out_a, got (1, 2, 5, 8)", out_a=lambda x: x[0]),
        value_error("out_b: expected shape (1, 2, 5, 8) like out_a, got (1, 2, 5, 4)", out_b=lambda x: x[..., :4]),
        type_error("out_b: expected dtype float32 like out_a, got float16", out_b=cast("float16")),
        type_error("out_b: expected float32, float16, bfloat16 or float64, got int64", out_b=cast("int64")),
        type_error("lse_a: expected an array, got list", lse_a=lambda x: x.tolist()),
        value_error("lse_b: expected shape (1, 2, 5) like the leading axes of out_a, got (1, 1, 5)", lse_b=lambda x: x[:, :1]),
        type_error("lse_b: expected dtype float32 with out_a of 32 bits or fewer, got float64", lse_b=cast("float64")),
        type_error("lse_b: expected float32 or float64, got float16", lse_b=cast("float16")),
        value_error("out_a: expected a contiguous last axis ..., got a stride of 2 elements", out_a=lambda x: x.repeat(2, -1)[..., ::2]),
        value_error("out_a: expected shape (..., Dv), got ()", out_a=np.float32(1), lse_a=np.float32(1)),
        value_error("out: expected memory of its own, got an array that overlaps out_a", 1, out=Of(lambda a: a["out_a"])),
        value_error("out: expected shape (1, 2, 5, 8) like out_a, got (1, 1, 5, 8)", 1, out=lambda x: x[:, :1]),
        value_error("lse_out: expected shape (1, 2, 5) like the leading axes of out_a, got (1, 1, 5)", 1, lse_out=lambda x: x[:, :1]),
        value_error("lse_out: expected memory of its own, got an array that overlaps lse_b", 1, lse_out=Of(lambda a: a["lse_b"])),
    ],
    "merge.merge_states_n": [
        value_error("outs: expected at least 1 array, got 0", outs=[], lses=[]),
        value_error("lses: expected 1 arrays, one for each of outs, got 2", lses=lambda x: x * 2),
        value_error("outs[1]: expected shape (1, 2, 5, 8) like outs[0], got (1, 2, 5, 2)", 1, outs=lambda x: [x[0], x[1][..., :2]]),
        value_error("lses[1]: expected shape (1, 2, 5) like the leading ..., got (1, 2, 2)", 1, lses=lambda x: [x[0], x[1][..., :2]]),
        type_error("lses[1]: expected dtype float32 with outs[0] of 32 bits or fewer, got float64",
                    1, lses=lambda x: [x[0], x[1].astype(np.float64)]),
        value_error("outs[0]: expected at most 4 dimensions, got 5", outs=lambda x: [x[0][None]], lses=lambda x: [x[0][None]]),
        value_error("outs: expected at most 65536 arrays, got more", outs=itertools.repeat(np.zeros((1, 2, 5, 8), np.float32))),
        type_error("outs: expected a sequence of arrays, got NoneType", outs=None),
        type_error("lses: expected a sequence of arrays, got Unending", outs=[], lses=Unending()),
        value_error("lse_out: expected shape (1, 2, 5) like the leading axes of outs[0], got (2, 5)", 4, lse_out=lambda x: x[0]),
    ],
    "merge.merge_states_tree": [
        value_error("outs: expected at least 1 array, got 0", outs=[], lses=[]),
        value_error("lses: expected 1 arrays, one for each of outs, got 2", lses=lambda x: x * 2),
        type_error("outs[0]: expected float32 ..., got float16, which each merge would round", outs=lambda x: [x[0].astype(np.float16)]),
    ],
    "paged.paged_attention": [
        *PAGED_RULES,
        *BIASES,
        *TABLES,
        *SCALES,
        value_error("scale: expected a finite number, got inf", scale=np.inf),
        value_error("scale: expected a number from -1e+37 to 1e+37 with a float32 q, got 1e+39", scale=1e39),
        value_error("softcap: expected a number from 1e-37 to 1e+37 with a float32 q, or 0 for none, got 1e+308", softcap=1e308),
        value_error("softcap: expected a number from 1e-37 to 1e+37 with a float32 q, or 0 for none, got 1e-300", softcap=1e-300),
        value_error("sinks: expected shape (4,), one number per head, got (2,)", sinks=[0.0, 1.0]),
        type_error("sinks: expected numbers, got datetime64[s]", sinks=np.zeros(4, "M8[s]")),
        value_error("q: expected shape (B, H, D), got (2, 1, 4, 8)", q=lambda x: x[:, None]),
        value_error("seq_lens: expected one length for each of q's 1 requests, got 2", q=lambda x: x[:1]),
        type_error("q: expected float32, float16, bfloat16 or float64, got int8", q=cast("int8")),
        value_error("k_cache: expected a last axis D = 7 like q, got (4, 4, 2, 8)", q=lambda x: x[..., :7]),
        value_error("k_cache: expected a number of heads that divides q's 3, got 2 in (4, 4, 2, 8)", q=lambda x: x[:, :3]),
        value_error("q: expected at least one head and a head dim D from 1 to 576, got (2, 0, 8)", q=lambda x: x[:, :0]),
        value_error("k_cache: expected shape (pages, page_size, Hkv, D), got (4, 2, 8)", k_cache=lambda x: x[0]),
        value_error("k_cache: expected a contiguous last axis ..., got a stride of -1 elements", k_cache=lambda x: x[..., ::-1]),
        type_error("k_cache: expected float32, float16, bfloat16, int8, float8_e4m3, q8_0, q4_0 or q4_1 with a float32 q, got float64",
                    k_cache=cast("float64"), v_cache=cast("float64")),
        value_error("v_cache: expected a head dim ..., got (4, 4, 2, 577)", v_cache=lambda x: np.zeros((4, 4, 2, 577), np.float32)),
        value_error("v_cache: expected shape (pages, page_size, Hkv, D), got (4, 2, 8)", v_cache=lambda x: x[0]),
        value_error("k_cache: expected a page_size of at least 1, got (4, 0, 2, 8)",
                    k_cache=lambda x: x[:, :0], v_cache=lambda x: x[:, :0]),
        value_error("kv_dtype: expected 'float32', 'float16', 'bfloat16', 'float64', 'int8', ..., got 'int4'", kv_dtype="int4"),
        type_error("k_cache: expected int8 as kv_dtype says, got float32", kv_dtype="int8"),
        type_error("q: expected float16 as dtype says, got float32", dtype="float16"),
        value_error("out_dtype: expected 'float32' like q, got 'float16'", out_dtype="float16"),
        value_error("out_dtype: expected 'float32' like q, got 'float64'", out_dtype="float64"),
        value_error("q_lens: expected lengths that add up to q's 2 tokens, got 3", q_lens=[1, 2]),
        value_error("q_lens: expected 2 entries, one per request, got 1", q_lens=[2]),
        value_error("q_lens: expected 0 to seq_lens[0] = 1, got 2 at [0]", q_lens=[2, 0], seq_lens=[1, 4]),
        value_error("q_lens: expected 0 to seq_lens[1] = 4, got -1 at [1]", q_lens=[3, -1]),
        value_error("q_lens: expected at least 0, got -1 at [1]", q_lens=[3, -1], q_begin=[0, 0]),
        value_error("q_begin: expected 2 entries, one per request, got 1", q_begin=[1]),
        value_error("q_begin: expected token numbers from -1073741823 to 1073741823, got 1073741824 at [1]", q_begin=[1, 2**30]),
        value_error("q_begin: expected token numbers from -1073741823 to 1073741823, got -1073741824 at [1]", q_begin=[1, -(2**30)]),
        type_error("q_begin: expected integers, got float", q_begin=[1.5, 2.0]),
        type_error("q_begin: expected integers, got float64", q_begin=np.zeros(2)),
        type_error("q_begin: expected a sequence of integers, got str", q_begin="12"),
        type_error("q_begin: expected a sequence of integers, got int", q_begin=3),
        value_error("seq_lens: expected None with (indptr, indices, last_page_len), which give the lengths, got lengths as well",
                    8, seq_lens=[6, 4]),
        value_error("block_tables: expected an array or (indptr, indices, last_page_len), got a tuple of 2",
                    8, block_tables=lambda x: x[:2]),
        type_error("block_tables: expected an array or a tuple (indptr, indices, last_page_len), got list",
                    block_tables=[[0, 1, 2], [0, 1], [4, 4]], seq_lens=None),
        value_error("indptr: expected B + 1 entries, got 0", 8, block_tables=triple(indptr=[])),
        value_error("indptr: expected rising numbers from 0 to 3, got 0 and 4611686018427387904 at [0]",
                    8, block_tables=triple(indptr=[0, 2**62, 2**62], last=[2, 0])),
        value_error("indptr: expected rising numbers from 0 to 3, got 9223372036854775807 and -9223372036854775808 at [0]",
                    8, block_tables=triple(indptr=[2**63 - 1, -(2**63), -1])),
        value_error("indptr: expected rising numbers from 0 to 3, got 3 and 2 at [1]", 8, block_tables=triple(indptr=[0, 3, 2])),
        value_error("indptr: expected rising numbers from 0 to 3, got 2 and 6 at [1]", 8, block_tables=triple(indptr=[0, 2, 6])),
        value_error("indptr: expected 1 dimension, got 2", 8, block_tables=triple(indptr=np.zeros((1, 3), int))),
        value_error("block_tables: expected shape (N,) with 2 requests, got (3, 1)",
                    8, block_tables=triple(indices=np.zeros((3, 1), int))),
        value_error("block_tables: expected pages from 0 ..., got 4 for page 0 of request 1", 8, block_tables=triple(indices=[3, 1, 4])),
        value_error("last_page_len: expected 1 to the 4 tokens of a page, got 5 at [1]", 8, block_tables=triple(last=[2, 5])),
        value_error("last_page_len: expected 1 to the 4 tokens of a page, got 0 at [0]", 8, block_tables=triple(last=[0, 4])),
        value_error("last_page_len: expected 2 entries, one per request, got 1", 8, block_tables=triple(last=[2])),
        type_error("indptr: expected an array of (indptr, indices, last_page_len), got NoneType",
                    8, block_tables=lambda x: (None, *x[1:])),
        type_error("indices: expected an array of (indptr, indices, ..., got NoneType", 8, block_tables=lambda x: (x[0], None, x[2])),
        type_error("last_page_len: expected an array of (indptr, indices, ..., got NoneType", 8, block_tables=lambda x: (*x[:2], None)),
        value_error("attn_mask: expected shape (2 or 1, 4 or 1, 1, 6 ..., got (2, 2, 1, 6)", attn_mask=np.zeros((2, 2, 1, 6), bool)),
        value_error("attn_mask: expected shape (2 or 1, 4 or 1, 1, 6 ..., got (3, 1, 1, 6)", attn_mask=np.zeros((3, 1, 1, 6), bool)),
        value_error("attn_mask: expected at most 4 dimensions, got 5", attn_mask=np.zeros((1, 1, 1, 1, 6), bool)),
        type_error("attn_mask: expected native byte order, got >f4", attn_mask=np.zeros((1, 6), ">f4")),
        value_error("out: expected shape (2, 4, 8), got (2, 4, 7)", 16, out=np.zeros((2, 4, 7), np.float32)),
        type_error("out: expected dtype float32, got float16", 16, out=cast("float16")),
        value_error("out: expected a contiguous last axis ..., got a stride of 2 elements", 16, out=lambda x: x.repeat(2, -1)[..., ::2]),
        value_error("out: expected memory of its own, got an array that overlaps v_cache",
                    16, out=Of(lambda a: a["v_cache"].reshape(-1)[:64].reshape(2, 4, 8))),
        value_error("out: expected memory of its own, got an array that overlaps q", 16, out=Of(lambda a: a["q"])),
        value_error("out: expected memory of its own, got an array that overlaps kv_ranges",
                    16, kv_ranges=Of(lambda a: a["out"].view(np.int32).reshape(-1)[:4].reshape(2, 2))),
        value_error("out: expected ..., got an array that overlaps attn_mask", 16, attn_mask=Of(lambda a: a["out"].reshape(-1)[:6])),
        value_error("lse: expected shape (2, 4), got (2, 3)",
                    return_lse=True, out=lambda x: (np.zeros((2, 4, 8), np.float32), np.zeros((2, 3), np.float32))),
        value_error("lse: expected memory of its own, got an array that overlaps out",
                    return_lse=True, out=Of(lambda a: (MEMORY[:64].reshape(2, 4, 8), MEMORY[56:64].reshape(2, 4)))),
    ],
    "paged.paged_select_attention": [
        *BIASES,
        *TABLES,
        value_error("selected: expected pages from 0 to 1, or a pad, got 2 at [0, 0, 1]", selected=entry(2, 0, 0, 1)),
        value_error("selected: expected pages from 0 to 1, or a pad, got -2 at [0, 0, 1]", selected=entry(-2, 0, 0, 1)),
        value_error("selected: expected pages from 0 to 1, or a pad, got 65535 at [0, 0, 1]", selected=entry(65535, 0, 0, 1)),
        value_error("selected: expected each page once per row, got 0 again at [0, 0, 1]", selected=entry(0, 0, 0, 1)),
        type_error("selected: expected an array, got NoneType", selected=None),
        value_error("selected: expected shape (2, 2 or 4, K), one row per request and KV head or query head, got (2, 2)",
                    selected=lambda x: x[0]),
        value_error("selected: expected shape (2, 2 or 4, K), one row per request ..., got (2, 6, 2)", selected=lambda x: x.repeat(3, 1)),
        value_error("selected: expected shape (2, 2 or 4, K), one row per request and KV ..., got (1, 2, 2)", selected=lambda x: x[:1]),
        type_error("selected: expected int16, int32 or int64, got uint16", selected=cast("uint16")),
        value_error("selected: expected no page, since request 1 has no tokens, got 0 at [1, 0, 0]", seq_lens=[6, 0]),
        value_error("selected: expected no page, since request 1 has no tokens, got 1 at [1, 1, 0]",
                    seq_lens=[6, 0], counts=np.array([[1, 1], [0, 1]]), selected=entry(1, 1, 1, 0)),
        value_error("counts: expected 0 to 2, got 3 at [0, 1]", counts=np.array([[1, 3], [1, 0]])),
        value_error("counts: expected 0 to 2, got -1 at [0, 1]", counts=np.array([[1, -1], [1, 0]])),
        value_error("counts: expected shape (2, 2) like the rows of selected, got (2, 4)", counts=np.ones((2, 4), int)),
        value_error("counts: expected axes of at least 0 and fewer than 2^63 bytes in all, got 2147483648 on axis 1",
                    counts=made(Dlpack, np.ones(1, np.int8), ndim=2, shape=(2**32, 2**31), strides=(0, 0))),
        value_error("selected: expected pages from 0 to 0, got -1 at [1, 0, 1]", counts=np.full((2, 2), 2)),
        value_error("selected: expected blocks from 0 to 2, or a pad, got 3 at [0, 1, 1]", selected=entry(3, 0, 1, 1), selected_size=2),
        value_error("selected: expected each block once per row, got 0 again at [0, 0, 1]", selected=entry(0, 0, 0, 1), selected_size=2),
        value_error("selected: expected no block, since request 1 has no tokens, got 0 at [1, 0, 0]", seq_lens=[6, 0], selected_size=2),
        value_error("selected: expected shape (2, 2 or 4 or 1, K), a list per query for each KV head, each query head or all heads, got (2, 6, 2)",
                    selected=lambda x: x.repeat(3, 1), selected_size=1),
        value_error("selected_size: expected at least 1 token, got 0", selected_size=0),
        value_error("selected_size: expected at least 1 token, got -1", selected_size=-1),
        type_error("selected_size: expected an integer, got float", selected_size=1.5),
        value_error("selected_size: expected none beside kv_split, got 2", selected_size=2, kv_split=4),
        value_error("counts: expected none beside selected_size, got some", counts=np.ones((2, 2), int), selected_size=2),
        value_error("k_cache: expected shape (pages, page_size, Hkv, D), got (4, 2, 8)", k_cache=lambda x: x[0]),
        value_error("v_cache: expected shape (pages, page_size, Hkv, D), got (4, 2, 8)", v_cache=lambda x: x[0]),
        type_error("indices: expected an array of (indptr, indices, ..., got NoneType", 8, block_tables=lambda x: (x[0], None, x[2])),
    ],
    "paged.append_paged_kv": [
        *SUMMARIES,
        *TABLES,
        *SCALES,
        value_error("slot_mapping: expected each slot once, got slot 3 twice", 16, slot_mapping=[3, 3]),
        value_error("slot_mapping: expected slots from 0 to 15, or -1 for none, got 16 at [1]", 16, slot_mapping=[3, 16]),
        value_error("slot_mapping: expected slots from 0 to 15, or -1 for none, got -2 at [0]", 16, slot_mapping=[-2, 3]),
        value_error("slot_mapping: expected 2 entries, one for each of k's tokens, got 1", 16, slot_mapping=[3]),
        value_error("slot_mapping: expected exactly one of slot_mapping and block_tables, got neither", 16, slot_mapping=None),
        value_error("slot_mapping: expected exactly one of slot_mapping and block_tables, got both", slot_mapping=[3, 11]),
        value_error("seq_lens: expected None with slot_mapping, got list", 16, seq_lens=[6, 4]),
        value_error("block_tables: expected each slot once, got slot 7 twice", block_tables=np.array([[1], [1]]), seq_lens=[4, 4]),
        value_error("k: expected shape (T, 2, 8) like k_cache, got (2, 2, 7)", k=lambda x: x[..., :7]),
        value_error("v: expected 2 tokens like k, got 1", v=lambda x: x[:1]),
        value_error("k: expected finite numbers to quantise, within float32's range, got inf at [0, 1, 2]", 4, k=entry(np.inf, 0, 1, 2)),
        value_error("k: expected memory of its own, got an array that overlaps k_cache", k=Of(lambda a: a["k_cache"][0, :2])),
        value_error("v: expected memory of its own, got an array that overlaps k_cache", v=Of(lambda a: a["k_cache"][0, :2])),
        value_error("v_cache: expected memory of its own, got an array that overlaps k_cache", v_cache=Of(lambda a: a["k_cache"])),
        value_error("v_cache: expected memory of its own, got an array that overlaps k_cache",
                    16, k=ROW, v=ROW, k_cache=apart(0), v_cache=apart(50), slot_mapping=[0]),
        value_error("v_cache: expected a cache for v, got none", v_cache=None),
        value_error("v_scale: expected none without v, got some", v=None, v_cache=None, v_scale=1.0),
        value_error("k_cache: expected a page_size ..., got (4, 0, 2, 8)", k_cache=lambda x: x[:, :0], v_cache=lambda x: x[:, :0]),
        type_error("k_cache: expected float16 as kv_dtype says, got float32", kv_dtype="float16"),
        value_error("v_scale: expected memory of its own, got an array that overlaps k_scale", 4, v_scale=Of(lambda a: a["k_scale"])),
        value_error("v_scale: expected memory of its own, got an array that overlaps k_scale",
                    4, k_scale=Of(lambda a: np.abs(a["v_scale"], out=a["v_scale"])[0, 0])),
        value_error("k_scale: expected memory of its own, got an array that overlaps k_cache",
                    4, k_scale=Of(lambda a: a["k_cache"].reshape(-1)[116:124].view(np.float32)), v_scale=1.0),
        value_error("q_lens: expected lengths that add up to k's 2 tokens, got 3", q_lens=[1, 2]),
        value_error("q_lens: expected 2 entries, one per request, got 1", q_lens=[2]),
        value_error("q_lens: expected 0 to seq_lens[0] = 1, got 2 at [0]", q_lens=[2, 0], seq_lens=[1, 4]),
        value_error("q_lens: expected 0 to seq_lens[1] = 0, got 1 at [1]", seq_lens=[6, 0]),
        value_error("q_lens: expected lengths that add up to k's 1 tokens, got none, which means 1 for each of 2 requests",
                    k=lambda x: x[:1], v=lambda x: x[:1]),
        value_error("block_tables: expected an array (B, W) with metadata_block_tables, got (indptr, indices, last_page_len)",
                    8, metadata_block_tables=np.array([[1], [0]])),
        type_error("maxblocks: expected dtype float32 like k_cache, got float16", 1, maxblocks=cast("float16")),
        type_error("maxblocks: expected dtype float32 with k_cache of int8, got float16",
                    5, maxblocks=np.ones((2, 2, 2, 8), np.float16), metadata_block_tables=np.array([[1], [0]])),
        value_error("k_scale: expected scales of shape (4, 4, 2), (2,) or () for int8 k_cache, got none",
                    5, maxblocks=np.ones((2, 2, 2, 8), np.float32), metadata_block_tables=np.array([[1], [0]]), k_scale=None),
        value_error("maxblocks: expected None with slot_mapping, got ndarray", 17, maxblocks=np.ones((2, 2, 2, 8), np.float32)),
        value_error("maxblocks: expected memory of its own, got an array that overlaps v_cache", 1, maxblocks=Of(lambda a: a["v_cache"])),
        value_error("seq_lens: expected lengths from 0 to what the table's 2 pages of 4 tokens hold, got -1 at [1]", 1, seq_lens=[6, -1]),
        type_error("k_cache: expected int8 as kv_dtype says, got float32", 1, kv_dtype="int8"),
        value_error("kv_dtype: expected 'float32', 'float16', 'bfloat16', 'float64', 'int8', ..., got 'int9'", 1, kv_dtype="int9"),
    ],
    "paged.quantize_kv": [
        value_error("kv_dtype: expected 'int8' or 'float8_e4m3', got 'int4'", kv_dtype="int4"),
        value_error("kv_dtype: expected 'int8' or 'float8_e4m3', got 'float32'", kv_dtype="float32"),
        value_error("kv_dtype: expected 'int8' or 'float8_e4m3', got None", kv_dtype=None),
        type_error("kv_dtype: expected a dtype or its name, got int", kv_dtype=3),
        type_error("x: expected bfloat16 as dtype says, got float32", dtype="bfloat16"),
        type_error("x: expected float32 as dtype says, got float16", 1, dtype="float32"),
        type_error('x: expected float32, float16, ..., got uint16 (dtype="bfloat16" reads uint16 as bfloat16 bits)', x=cast("uint16")),
        type_error("x: expected float32, float16, bfloat16 or float64, got int64", x=cast("int64")),
        value_error("x: expected finite numbers to quantise, within ..., got nan at place 1 of row 0", x=np.array([1.0, np.nan])),
        value_error("x: expected finite ..., got -1e+300 at place 2 of row 3", x=lambda x: entry(-1e300, 1, 1, 2)(x.astype(np.float64))),
        value_error("x: expected finite numbers to quantise, within float32's range, got 1.0000000000000001e+200 at place 3 of row 0",
                    x=[[0, 0, 0, 1e200 * (1 + 2.0**-52)]] * np.ones((1, 4))),
        value_error("x: expected shape (..., D), got ()", x=np.float32(1)),
        type_error("x: expected native byte order, got >f4", x=cast(">f4")),
    ],
    "paged.dequantize_kv": [
        type_error("values: expected int8, float8_e4m3 or uint8 bits of it, got float32", values=cast("float32")),
        value_error("scale: expected shape (3, 2), that of values without D, or the last axes of this shape, got (2, 2)", scale=lambda x: x[:2]),
    ],
    "paged.PagedPlan": [
        *PAGED_RULES,
        *(row.beside(num_pages=4, **split) for row in TABLES for split in ({}, {"kv_split": 8})),
        value_error("page_size: expected at least 1 token, got 0", page_size=0),
        value_error("num_pages: expected at least 0 pages, got -1", num_pages=-1),
        type_error("num_pages: expected an integer, got str", num_pages="8"),
        value_error("block_tables: expected pages from 0 to 0 within the request's length, got 3 for page 0 of request 0", num_pages=1),
        value_error("q_lens: expected 0 to seq_lens[1] = 4, got 5 at [1]", q_lens=[1, 5]),
        value_error("q_lens: expected at least 0, got -1 at [1]", q_lens=[1, -1], q_begin=[0, 0]),
        value_error("q_begin: expected 2 entries, one per request, got 3", q_begin=[1, 2, 3]),
        value_error("q_begin: expected token numbers from -1073741823 to 1073741823, got 1073741824 at [1]", q_begin=[1, 2**30]),
        type_error("q_begin: expected integers, got float64", q_begin=np.zeros(2)),
        value_error("seq_lens: expected lengths of at most 1073741823 ..., got 1073741824 at [1]", seq_lens=[6, 2**30], page_size=2**28),
        value_error("seq_lens: expected lengths of at most 1073741823 tokens, got 1073741824 at [1]",
                    8, block_tables=triple(last=[30, 2**28], indptr=[0, 1, 5], indices=[0] * 5), page_size=2**28),
        value_error("out_dtype: expected 'float32', 'float16', 'bfloat16' or 'float64', got 'int8'", out_dtype="int8"),
        value_error("out_dtype: expected 'float32' like q, got 'float16'", out_dtype="float16", dtype="float32"),
        value_error("dtype: expected 'float32', 'float16', 'bfloat16' or 'float64', got 'x'", dtype="x"),
    ],
    "paged.PagedPlan.attention": [
        *BIASES,
        value_error("q: expected 2 queries as the plan has them, got (1, 4, 8)", q=lambda x: x[:1]),
        value_error("k_cache: expected pages ..., got (4, 8, 2, 8)", k_cache=lambda x: x.repeat(2, 1), v_cache=lambda x: x.repeat(2, 1)),
        value_error("block_tables: expected pages ..., got 3 for page 0 of request 0", k_cache=lambda x: x[:2], v_cache=lambda x: x[:2]),
        value_error("out: expected shape (2, 4, 8), got (2, 4, 7)", out=np.zeros((2, 4, 7), np.float32)),
        value_error("sinks: expected shape (4,), one number per head, got (1,)", sinks=[1.0]),
    ],
    "paged.PagedPlan.select_attention": [
        *BIASES,
        type_error("selected: expected an array, got NoneType", selected=None),
        value_error("selected: expected pages from 0 to 1, or a pad, got 2 at [0, 0, 1]", selected=entry(2, 0, 0, 1)),
        value_error("selected: expected each page once per row, got 0 again at [0, 0, 1]", selected=entry(0, 0, 0, 1)),
    ],
    "paged.PagedPlan.append": [
        *SUMMARIES,
        value_error("k: expected 2 tokens as the plan has them, got 1", k=lambda x: x[:1], v=lambda x: x[:1]),
        value_error("k_cache: expected pages of 4 tokens as the plan has them, got pages of 8",
                    k_cache=lambda x: x.repeat(2, 1), v_cache=lambda x: x.repeat(2, 1)),
        value_error("meanblocks: expected memory of its own, got an array that overlaps k", 1, meanblocks=Of(lambda a: a["k"])),
        type_error("maxblocks: expected dtype float32 like k_cache, got float64", 1, maxblocks=cast("float64")),
    ],
    "paged.PagedPlan.select_and_attend": [
        *BIASES,
        value_error("q: expected 2 queries as the plan has them, got (1, 4, 8)", q=lambda x: x[1:]),
        value_error("q: expected shape (2, H, D), got (4, 8)", q=lambda x: x[0]),
        value_error("source: expected summaries and their tables for method 'quest', got None", source=None),
        value_error("source: expected None for method 'max', which reads k_cache itself, got tuple", method="max"),
        value_error("method: expected 'quest', 'mean' or 'max', got 'best'", method="best"),
        value_error("budget: expected exactly one of budget and k, got both", budget=3),
        value_error("k: expected a number, or 2 of them, one per request, got shape (3,)", k=[1, 2, 1]),
        value_error("recent: expected 2 entries, one per request, got 1", recent=[1]),
        value_error("metadata_block_tables: expected shape (2, W), got (1, 1)", metadata_block_tables=lambda x: x[1:]),
        type_error("metadata_block_tables: expected an array, got str", metadata_block_tables="x"),
        value_error("k_cache: expected pages ..., got pages of 8", 4, k_cache=lambda x: x.repeat(2, 1), v_cache=lambda x: x.repeat(2, 1)),
        value_error("block_tables: expected ..., got 3 for page 0 of request 0", 4, k_cache=lambda x: x[:2], v_cache=lambda x: x[:2]),
        value_error("k_cache: expected pages ..., got (4, 8, 2, 8)", k_cache=lambda x: x.repeat(2, 1), v_cache=lambda x: x.repeat(2, 1)),
        type_error("return_selected: expected True or False, got ndarray", return_selected=np.ones(2)),
    ],
    "quest.quest_prefill_metadata": [
        value_error("block_tables: expected pages from 0 to 3 within the request's length, got 4 at [0, 1]", block_tables=entry(4, 0, 1)),
        value_error("block_tables: expected pages from 0 to 3 within the request's ..., got -1 at [1, 0]", block_tables=entry(-1, 1, 0)),
        value_error("block_tables: expected shape (2, W), got (2,)", block_tables=lambda x: x[0]),
        value_error("seq_lens: expected 0 to the 8 tokens that the 2 pages of block_tables cover, got 9 at [0]", seq_lens=[9, 4]),
        value_error("seq_lens: expected at most 1073741823 tokens, got 4611686018427387904 at [0]", seq_lens=[2**62, 4]),
        value_error("seq_lens: expected one length per request, got none", seq_lens=None),
        value_error("metadata_block_tables: expected pages from 0 to 2 ..., got 3 at [1, 0]", metadata_block_tables=np.array([[2], [3]])),
        value_error("metadata_block_tables: expected pages that nothing else uses, got 2, which is listed twice",
                    metadata_block_tables=np.array([[2], [2]])),
        value_error("metadata_block_tables: expected pages that nothing else uses, got 3, which holds keys",
                    metadata_block_tables=np.array([[2], [3]]), maxblocks=Of(lambda a: a["k_cache"]), minblocks=None),
        value_error("metadata_block_tables: expected shape (2, W), got (3, 1)", metadata_block_tables=np.zeros((3, 1), int)),
        value_error("minblocks: expected shape (summary pages, rows, 2, 8), the same for each summary, got (2, 4, 2, 8)",
                    minblocks=lambda x: x[:2]),
        value_error("maxblocks: expected shape (summary pages, rows, 2, 8), ..., got (3, 4, 1, 8)", maxblocks=lambda x: x[:, :, :1]),
        type_error("maxblocks: expected dtype float32 like k_cache, got float64", maxblocks=cast("float64")),
        value_error("minblocks: expected memory ..., got an array that overlaps maxblocks", minblocks=Of(lambda a: a["maxblocks"])),
        value_error("maxblocks: expected a summary to write, got none", maxblocks=None, minblocks=None),
        value_error("num_threads: expected 1 to 1024, got 100000", num_threads=100000),
        value_error("start_lens: expected lengths of at least 0, got -1 at [1]", start_lens=[0, -1]),
        value_error("start_lens: expected 2 entries, as many as seq_lens has, got 1", start_lens=[0]),
        value_error("k_scale: expected scales of shape (4, 4, 2), (2,) or () for int8 k_cache, got none", k_cache=cast("int8")),
        type_error('k_cache: expected ..., got uint8 (kv_dtype=, or dtype= where there is no kv_dtype, says what uint8 holds, such as ...',
                    k_cache=cast("uint8"), k_scale=1.0),
        value_error("k_scale: expected none with float32 k_cache, got shape ()", k_scale=1.5),
        type_error("k_cache: expected bfloat16 as dtype says, got float32", dtype="bfloat16"),
        type_error("k_cache: expected float8_e4m3 as dtype says, got float32", dtype="float8_e4m3"),
        value_error("dtype: expected 'float32', 'float16', 'bfloat16', 'float64', 'int8', 'float8_e4m3', 'q8_0', 'q4_0' or 'q4_1', got 'int4'", dtype="int4"),
        type_error("k_cache: expected bfloat16 as dtype says, got int8", 4, dtype="bfloat16"),
        type_error("k_cache: expected float8_e4m3 as dtype says, got int8", 4, dtype="float8_e4m3"),
        value_error("k_scale: expected shape (4, 4, 2) like k_cache, (2,) for one ..., got (3,)", 4, k_scale=np.ones(3, np.float32)),
        type_error("maxblocks: expected dtype float32 with k_cache of int8, got float16", 12, maxblocks=cast("float16")),
        type_error("minblocks: expected float32, float16, bfloat16 or float64, got int8", 4, minblocks=cast("int8")),
        value_error("maxblocks: expected memory of its own, got an array that overlaps k_scale",
                    4, maxblocks=Of(lambda a: as_strided(a["k_scale"], (3, 4, 2, 8), (256, 64, 32, 4))), minblocks=None),
        value_error("maxblocks: expected memory of its own, got an array that overlaps k_cache",
                    12, maxblocks=Of(lambda a: as_strided(a["k_cache"].reshape(-1)[:4].view("f4"), (3, 4, 2, 8), (256, 64, 32, 4))),
                    minblocks=None),
    ],
    "quest.quest_block_select_paged": [
        value_error("k: expected 1 to 2147483647 blocks, got 0", k=0),
        type_error("k: expected an integer, got float", k=2.0),
        value_error("query: expected shape (2, H, D), got (4, 8)", query=lambda x: x[0]),
        value_error("query: expected shape (2, H, D), got (1, 4, 8)", query=lambda x: x[:1]),
        value_error("maxblocks: expected D = 7, as query has, and ..., got (3, 4, 2, 8)", query=lambda x: x[..., :7]),
        value_error("maxblocks: expected D = 8, as query has, and a number of heads that divides query's 3, got (3, 4, 2, 8)",
                    query=lambda x: x[:, :3]),
        value_error("query: expected a contiguous last axis ..., got a stride of -1 elements", query=lambda x: x[..., ::-1]),
        type_error("maxblocks: expected float64 with query of float64, got float32", query=cast("float64")),
        type_error("maxblocks: expected float32, float16 or bfloat16 with query of float32, got float64", maxblocks=cast("float64")),
        value_error("maxblocks: expected shape (pages, page_size, Hkv, D), got (4, 2, 8)", maxblocks=lambda x: x[0]),
        value_error("maxblocks: expected a head dim from 1 to 576, got (3, 4, 2, 577)", maxblocks=np.zeros((3, 4, 2, 577), np.float32)),
        value_error("maxblocks: expected a page_size ..., got (3, 0, 2, 8)", maxblocks=lambda x: x[:, :0], minblocks=lambda x: x[:, :0]),
        value_error("maxblocks: expected at ..., got (3, 4, 0, 8)", maxblocks=lambda x: x[:, :, :0], minblocks=lambda x: x[:, :, :0]),
        type_error("minblocks: expected an array, got NoneType", minblocks=None),
        value_error("minblocks: expected shape (3, 4, 2, 8) and dtype float32 like maxblocks, got (2, 4, 2, 8) of float32",
                    minblocks=lambda x: x[:2]),
        value_error("metadata_block_tables: expected pages from 0 ..., got -1 at [1, 0]", metadata_block_tables=np.array([[2], [-1]])),
        value_error("seq_lens: expected 0 to the 16 tokens that the 1 pages of metadata_block_tables cover, got 17 at [0]",
                    seq_lens=[17, 4]),
        value_error("seq_lens: expected at most ..., got 1152921504606846976 at [1]", seq_lens=np.array([3, 2**60]), block_size=2**62),
        value_error("block_size: expected at least 1 token per page, got 0", block_size=0),
        value_error("num_threads: expected 1 to 1024, got 9999", num_threads=9999),
    ],
    "quest.quest_block_select_paged_in_out": [
        type_error("selected_indices: expected dtype int32, got int64", selected_indices=cast("int64")),
        value_error("selected_indices: expected shape (2, 2, 2), got (2, 3, 2)", selected_indices=np.zeros((2, 3, 2), np.int32)),
        value_error("selected_indices: expected shape (2, 2, 0), got (2, 2)", selected_indices=lambda x: x[0]),
        value_error("selected_indices: expected at least 1 place per row, got 0", selected_indices=lambda x: x[..., :0]),
        type_error("selected_indices: expected an array, got NoneType", selected_indices=None),
    ],
    "quest.quest_block_select_paged_in_out_w": [
        type_error("selected_indices: expected an array, got NoneType", selected_indices=None),
        value_error("tokens_since_metadata_update: expected at least 0, or -1 for no window, got -2", tokens_since_metadata_update=-2),
        value_error("tokens_since_metadata_update: expected 2 entries, one per request, got 1", tokens_since_metadata_update=[1]),
        type_error("tokens_since_metadata_update: expected an integer or a sequence of integers, got float",
                    tokens_since_metadata_update=1.5),
        value_error("selected_indices: expected memory of its own, got an array that overlaps seq_lens",
                    seq_lens=Of(lambda a: a["selected_indices"].reshape(-1)[:2])),
        value_error("selected_indices: expected memory of its own, got an array that overlaps tokens_since_metadata_update",
                    tokens_since_metadata_update=Of(lambda a: a["selected_indices"].reshape(-1)[:2])),
    ],
    "quest.select_blocks": [
        value_error("method: expected 'quest', 'mean' or 'max', got 'best'", method="best"),
        type_error("source: expected the pair (maxblocks, minblocks) for method 'quest', got ndarray", 1, method="quest"),
        type_error("source: expected one array for method 'max', got a pair", method="max"),
        value_error("budget: expected exactly one of budget and k, got neither", budget=None),
        value_error("budget: expected exactly one of budget and k, got both", k=2),
        value_error("k: expected 1 to 2147483647 blocks, got -1", 8, k=-1),
        value_error("k: expected at least 1, got 0", 8, k=[2, 0]),
        value_error("k: expected a number, or 2 of them, one per request, got shape (3,)", 8, k=[2, 1, 1]),
        value_error("budget: expected at least 1 token, got 0", budget=0),
        value_error("budget: expected at most 2147483647 blocks of 4 tokens, got 4611686018427387904 tokens", budget=2**62),
        type_error("seq_lens: expected one length per request, got NoneType", seq_lens=None),
        value_error("sink: expected at least 0 pages, got -1", sink=-1),
        value_error("recent: expected at least 0 pages, got -1 at [1]", recent=[1, -1]),
        value_error("q: expected shape (2, H, D), got (4, 8)", q=lambda x: x[0]),
        value_error("block_size: expected at least 1 token, got 0", block_size=0),
        value_error("block_size: expected the 4 tokens per page of source, got 8", 1, block_size=8),
        value_error("q_lens: expected lengths that add up to q's 2 tokens, got 3", q_lens=[1, 2]),
        value_error("q_lens: expected 2 entries, one per request, got 1", 16, q_lens=[2]),
        value_error("q_lens: expected lengths that add up to q's 3 tokens, got 7", 16, q_lens=[2, 5]),
        value_error("q_lens: expected 0 to seq_lens[0] = 8, got -1 at [0]", 16, q_lens=[-1, 4]),
        value_error("q_lens: expected lengths that add up to q's 3 tokens, got 9223372036854775807", 16, q_lens=[2**63 - 1, 2**63 - 1]),
        type_error("q_lens: expected a sequence of integers, got int", 16, q_lens=3),
        type_error("q_lens: expected integers, got float", 16, q_lens=[2.0, 1]),
        value_error("q: expected shape (2, H, D), got (3, 4, 8)", 16, q_lens=None),
        type_error("source: expected an array with a shape, or one that NumPy can read by DLPack, got StoppedDlpack",
                    1, source=made(StoppedDlpack, BufferError("gone"))),
        value_error("k_scale: expected none with float32 source, got shape (2,)", 2, k_scale=np.ones(2, np.float32)),
        value_error("k_scale: expected scales of shape (4, 4, 2), (2,) or () for int8 source, got none", 5, k_scale=None),
        value_error("k_scale: expected shape (4, 4, 2) like source, (2,) for one number per KV head, or () for one number, got (3,)",
                    5, k_scale=np.ones(3, np.float32)),
        type_error("source: expected float8_e4m3 as kv_dtype says, got int8", 5, kv_dtype="float8_e4m3"),
        value_error("kv_dtype: expected 'float32', 'float16', 'bfloat16', 'float64', 'int8', ..., got 'int9'", 5, kv_dtype="int9"),
        type_error("source: expected float64 with q of float64, got int8", 5, q=cast("float64")),
        type_error("source: expected float32, float16, bfloat16 or float64, got int8", 5, method="mean"),
    ],
    "quest.select_and_attend": [
        *PAGED_RULES,
        *BIASES,
        value_error("q: expected shape (2, H, D), got (1, 4, 8)", 4, q=lambda x: x[:1], **PACKED_TABLES),
        value_error("q_lens: expected lengths that add up to q's 2 tokens, got 3", 4, q_lens=[1, 2], **PACKED_TABLES),
        value_error("k_cache: expected at least 1 token, got 0",
                    4, k_cache=lambda x: x[:, :0], v_cache=lambda x: x[:, :0], **PACKED_TABLES),
        value_error("source: expected summaries and their tables for method 'quest', got None", source=None),
        value_error("source: expected None for method 'max', which reads k_cache ..., got ndarray", 4, source=Of(lambda a: a["k_cache"])),
        value_error("out_dtype: expected 'float32' like q, got 'float16'", out_dtype="float16"),
        value_error("out: expected ..., got an array that overlaps attn_mask", 4, attn_mask=Of(lambda a: a["out"].reshape(-1)[:6])),
        value_error("out: expected memory of its own, got an array that overlaps kv_ranges",
                    4, kv_ranges=Of(lambda a: a["out"].view(np.int32).reshape(-1)[:4].reshape(2, 2))),
    ],
    "nsa.nsa": [
        value_error("num_selected_blocks: expected a positive number, got 0", num_selected_blocks=0),
        type_error("num_selected_blocks: expected an integer, got float", num_selected_blocks=2.5),
        value_error("num_selected_blocks: expected at least init_blocks + local_blocks = 3, got 2", num_selected_blocks=2),
        value_error("window_size: expected a positive number, got 0", window_size=0),
        type_error("window_size: expected an integer, got str", window_size="5"),
        value_error("compress_block_size: expected a positive number, got 0", compress_block_size=0),
        value_error("compress_block_size: expected at most 1073741823, got 2147483648", compress_block_size=2**31),
        value_error("compress_stride: expected a positive number, got 0", compress_stride=0),
        value_error("compress_stride: expected a divisor of compress_block_size = 4, got 3", compress_stride=3),
        value_error("compress_stride: expected a divisor ..., got the default compress_block_size // 2 = 4", compress_block_size=9),
        value_error("compress_stride: expected a divisor of compress_block_size = 9, got 4", compress_block_size=9, compress_stride=4),
        value_error("compress_stride: expected a divisor of select_block_size = 5, got the default compress_block_size // 2 = 2",
                    select_block_size=5),
        value_error("select_block_size: expected a positive number, got 0", select_block_size=0),
        value_error("init_blocks: expected 0 or more, got -1", init_blocks=-1),
        value_error("local_blocks: expected 0 or more, got -2", local_blocks=-2),
        value_error("q_tile_size: expected a positive number, got 0", 8, q_tile_size=0),
        value_error("q_tile_size: expected at most 1073741823, got 1073741824", 8, q_tile_size=2**30),
        value_error("mode: expected 'paper' or 'mslk', got 'fla'", mode="fla"),
        type_error("mode: expected a string, got list", mode=["paper"]),
        value_error('compress_stride: expected None or compress_block_size = 4 in mode "mslk", got 2', 8, compress_stride=2),
        value_error('select_block_size: expected None or compress_block_size = 4 in mode "mslk", got 8', 8, select_block_size=8),
        value_error('num_cmp_selected_blocks: expected None in mode "paper", got 4', num_cmp_selected_blocks=4),
        value_error("num_cmp_selected_blocks: expected a positive number, got 0", 8, num_cmp_selected_blocks=0),
        value_error("w_k_compress: expected shape (1, 8, 8), (Hkv, D, D), got (0, 8, 8)", 2, w_k_compress=lambda x: x[:0]),
        value_error("w_k_compress: expected shape (1, 8, 8), (Hkv, D, D), got (1, 8, 5)", 2, w_k_compress=lambda x: x[..., :5]),
        type_error("w_k_compress: expected float32, float16, bfloat16 or float64, got int64", 2, w_k_compress=cast("int64")),
        value_error("w_v_compress: expected shape (1, 8, 8), (Hkv, D, D), got (1, 8, 5)", 2, w_v_compress=lambda x: x[..., :5]),
        value_error("w_v_compress: expected shape (1, 8, 8), (Hkv, D, D), got (8, 8)", 2, w_v_compress=lambda x: x[0]),
        value_error("gate_proj_weight: expected shape (2, 3, 8), (H, 3, D), got (2, 2, 8)", 2, gate_proj_weight=lambda x: x[:, :2]),
        value_error("gate_proj_weight: expected shape (2, 3, 8), (H, 3, D), got (1, 3, 8)", 2, gate_proj_weight=lambda x: x[:1]),
        value_error("gates: expected None with gate_proj_weight, got both", 2, gates=np.ones((1, 12, 2, 3), np.float32)),
        value_error("gates: expected shape (1, 12, 2, 3), (..., H, 3), got (1, 12, 2, 2)", gates=np.ones((1, 12, 2, 2), np.float32)),
        value_error("q: expected shape (B, N, H, D), got (12, 2, 8)", q=lambda x: x[0]),
        type_error("k: expected dtype float32 like q, got float16", k=cast("float16")),
        value_error("k: expected an ..., got StoppedDlpack that raises: gone", k=made(StoppedDlpack, RuntimeError("gone\nfor good"))),
        value_error("k: expected at least the 12 tokens of q (layout (B, tokens, heads, D)), got (1, 11, 1, 8)", k=lambda x: x[:, :-1]),
        value_error("k: expected shape (B, N, H, D) with Hkv heads, else like q (1, 12, 2, 8), got (1, 12, 1, 4)",
                    k=lambda x: x[..., :4]),
        value_error("k: expected a number of heads that divides 2, got 3", k=lambda x: x.repeat(3, 2), v=lambda x: x.repeat(3, 2)),
        type_error("v: expected dtype float32 like q, got float64", v=cast("float64")),
        value_error("v: expected the tokens and heads of k (1, 12, 1, 8), got (1, 12, 2, 8)", v=lambda x: x.repeat(2, 2)),
        value_error("v: expected the tokens and heads of k (1, 12, 1, 8), got (1, 11, 1, 8)", v=lambda x: x[:, 1:]),
        value_error("v: expected at least one head and a head dim from 1 to 576, got (1, 12, 1, 0)", v=lambda x: x[..., :0]),
        value_error("cu_seqlens: expected numbers rising from 0 to 12, got 1 to 12", 1, cu_seqlens=[1, 5, 12]),
        value_error("cu_seqlens: expected numbers rising from 0 to 12, got 0 to 11", 1, cu_seqlens=[0, 5, 11]),
        value_error("cu_seqlens: expected numbers rising from 0 to 12, got 5 after a larger one", 1, cu_seqlens=[0, 9, 5, 12]),
        value_error("cu_seqlens: expected numbers rising from 0 to 12, got -9223372036854775808 after a larger one",
                    1, cu_seqlens=[0, 2**63 - 1, -(2**63), -1, 12]),
        value_error("cu_seqlens: expected numbers rising from 0 to 12, got shape (0,)", 1, cu_seqlens=[]),
        type_error("cu_seqlens: expected integers, got <U4", 1, cu_seqlens="0 12"),
        value_error("q: expected shape (T, H, D), got (1, 12, 2, 8)", cu_seqlens=[0, 12]),
        value_error("block_indices: expected blocks from 0 to 2, or -1 after them, got 99", block_indices=entry(99, 0, 0, 3, 1)),
        value_error("block_indices: expected blocks from 0 to 2, or -1 after them, got -2", block_indices=entry(-2, 0, 0, 3, 1)),
        value_error("block_indices: expected each block once per row, got 0 twice", block_indices=entry(0, 0, 0, 3, 1)),
        value_error("block_indices: expected shape (1, 1, 12, n), got (1, 3, 12, 3)", block_indices=lambda x: x.repeat(3, 1)),
        value_error("block_indices: expected shape (1, 1, 12, n), got (1, 1, 11, 3)", block_indices=lambda x: x[:, :, 1:]),
        type_error("block_indices: expected int16, int32 or int64, got float32", block_indices=cast("float32")),
        type_error("block_indices: expected int16, int32 or int64, got <U3", block_indices="all"),
        type_error("block_indices: expected int16, int32 or int64, got uint64", block_indices=cast("uint64")),
        value_error("block_indices: expected blocks from 0 to 2, or -1 after them, got 4294967295", block_indices=cast("uint32")),
        type_error("block_indices: expected an integer array, got dict", block_indices={}),
        value_error("out: expected shape (1, 12, 2, 8), got (1, 12, 2, 5)", 16, out=lambda x: x[..., :5]),
        type_error("out: expected dtype float32, got float64", 16, out=cast("float64")),
        value_error("out: expected a contiguous last axis ..., got a stride of -1 elements", 16, out=lambda x: x[..., ::-1]),
        value_error("out: expected memory of its own, got an array that overlaps q", 16, out=Of(lambda a: a["q"])),
        type_error("scale: expected a number, got str", scale="no"),
        value_error("scale: expected a finite number, got nan", scale=np.nan),
        type_error("scale: expected a number, got complex", scale=1j),
        type_error("causal: expected True or False, got list", causal=[True]),
        type_error("dtype: expected a dtype or its name, got list", dtype=["float32"]),
        type_error("q: expected float64 as dtype says, got float32", dtype="float64"),
        value_error("num_threads: expected a positive number, got 0", num_threads=0),
    ],
    "nsa.nsa of the last tokens": [
        value_error("k: expected at least the 13 tokens of q (layout (B, ..., got (1, 12, 1, 8)", q=np.ones((1, 13, 2, 8), np.float32)),
        value_error("return_context: expected False where q has fewer tokens than k, or with compressed_kv or kv_lens, got True",
                    return_context=True),
        value_error('q: expected in mode "mslk" queries from the beginning of a tile of q_tile_size = 16 tokens on, got token 10',
                    mode="mslk", q_tile_size=16),
        type_error("compressed_kv: expected a pair (k_cmp, v_cmp), got ndarray", 2, compressed_kv=lambda x: x[0]),
        type_error("compressed_kv: expected a pair (k_cmp, v_cmp), got tuple", 2, compressed_kv=lambda x: x[:1]),
        value_error("w_k_compress: expected None with compressed_kv, got some", 2, w_k_compress=np.zeros((1, 8, 8), np.float32)),
        value_error("k_cmp: expected 5 blocks ..., got (1, 4, 1, 8)", 2, compressed_kv=lambda x: (x[0][:, 1:], x[1])),
        value_error("v_cmp: expected 5 blocks ..., got (1, 4, 1, 8)", 2, compressed_kv=lambda x: (x[0], x[1][:, 1:])),
        value_error("k_cmp: expected at least 5 blocks of compress_block_size = 4, got (1, 4, 1, 8)",
                    2, compressed_kv=lambda x: (x[0][:, :4], x[1][:, :4]), kv_lens=[12]),
        value_error("k_cmp: expected blocks of tokens, else like k (1, 12, 1, 8), got (1, 5, 2, 8)",
                    2, compressed_kv=lambda x: (x[0].repeat(2, 2), x[1])),
        type_error("k_cmp: expected dtype float32 like q, got float64", 2, compressed_kv=lambda x: (x[0].astype(np.float64), x[1])),
        value_error("out: expected memory of its own, got an array that overlaps k_cmp",
                    2, compressed_kv=lambda x: x, out=Of(lambda a: a["compressed_kv"][0].reshape(-1)[:32].reshape(1, 2, 2, 8))),
        value_error("kv_lens: expected one number per sequence, (1,), got (2,)", 4, kv_lens=[12, 12]),
        value_error("kv_lens: expected numbers from the 2 tokens of q to the 12 of k, got 13", 4, kv_lens=[13]),
        value_error("kv_lens: expected numbers from the 2 tokens of q to the 12 of k, got 1", 4, kv_lens=[1]),
        value_error("block_indices: expected blocks from 0 to 0, ..., got 2", 4, kv_lens=[4], block_indices=np.full((1, 1, 2, 1), 2)),
        value_error("kv_lens: expected None with cu_seqlens, got some", 1, kv_lens=[12]),
        value_error("cu_seqlens_q: expected None without cu_seqlens, got some", cu_seqlens_q=[0, 2]),
        value_error("k: expected the 2 tokens of q without cu_seqlens_q, got (12, 1, 8)", 1, cu_seqlens_q=None),
        value_error("cu_seqlens_q: expected numbers rising from 0 to 2, got 0 to 3", 1, cu_seqlens_q=[0, 1, 3]),
        value_error("cu_seqlens_q: expected 3 numbers like cu_seqlens, got 2", 1, cu_seqlens_q=[0, 2]),
        value_error("cu_seqlens_q: expected at most the 1 tokens ..., got 2 queries", 1, cu_seqlens=[0, 1, 12], cu_seqlens_q=[0, 2, 2]),
    ],
    "nsa.nsa_backward": [
        value_error("dout: expected shape (1, 12, 2, 8), of the result, got (1, 11, 2, 8)", dout=lambda x: x[:, :-1]),
        value_error("dout: expected shape (1, 12, 2, 8), of the result, got (1, 12, 2, 7)", dout=lambda x: x[..., :-1]),
        value_error("dout: expected shape (1, 12, 2, 8), of the result, got (12, 2, 8)", dout=lambda x: x[0]),
        type_error("dout: expected dtype float32 like the result, got float16", dout=cast("float16")),
        type_error("ctx: expected the context that nsa(..., return_context=True) returns, got NoneType", ctx=None),
        type_error("ctx: expected the context that nsa(..., return_context=True) returns, got dict", ctx={}),
    ],
    "nsa.NsaCache": [
        value_error("window_size: expected a positive number, got -3", window_size=-3),
        type_error("scale: expected a number, got str", scale="x"),
        value_error('num_cmp_selected_blocks: expected None in mode "paper", got 2', num_cmp_selected_blocks=2),
        type_error("gate_proj_weight: expected an array, got int", gate_proj_weight=3),
        value_error("gate_proj_weight: expected shape (H, 3, D), got (4, 8)", gate_proj_weight=np.ones((4, 8))),
        value_error("compress_block_size: expected a positive number, got 0", compress_block_size=0),
    ],
    "nsa.compress_kv": [
        value_error("v: expected the tokens and heads of k (1, 12, 1, 8), got (1, 11, 1, 8)", v=lambda x: x[:, 1:]),
        value_error("k: expected shape (B, N, H, D) with at least one head and a last axis from 1 to 576, got (1, 12, 1, 577)",
                    k=np.zeros((1, 12, 1, 577), np.float32)),
        value_error("v: expected shape (B, N, H, D) with at least one ..., got (1, 12, 1, 577)", v=np.zeros((1, 12, 1, 577), np.float32)),
    ],
    "nsa.compress_kv_backward": [
        value_error("k: expected shape (B, N, H, D) with at least one head and a last axis from 1 to 576, got (1, 12, 1, 577)",
                    k=np.zeros((1, 12, 1, 577), np.float32), dk_cmp=np.zeros((1, 3, 1, 577), np.float32)),
        value_error("v: expected shape (B, N, H, D) with at least one head and a last axis from 1 to 576, got (1, 12, 1, 577)",
                    v=np.zeros((1, 12, 1, 577), np.float32), dv_cmp=np.zeros((1, 3, 1, 577), np.float32)),
    ],
    "nsa.compressed_attention": [
        value_error("k_cmp: expected 5 blocks of compress_block_size = 4, got (1, 4, 1, 8)", k_cmp=lambda x: x[:, :-1]),
        value_error("k_cmp: expected 5 blocks of compress_block_size = 4, got (1, 0, 1, 8)", k_cmp=lambda x: x[:, :0]),
        value_error("k_cmp: expected 5 blocks of compress_block_size = 4, got (1, 6, 1, 8)", k_cmp=lambda x: x[:, [0, *range(5)]]),
        value_error("k_cmp: expected 4 blocks of compress_block_size = 4, got (3, 1, 8)", 1, k_cmp=lambda x: x[:-1]),
        value_error("v_cmp: expected shape (B, Skv, Hkv, Dv) with the batch, heads and tokens of k_cmp (1, 5, 1, 8), got (1, 4, 1, 8)",
                    v_cmp=lambda x: x[:, 1:]),
        value_error("tokens: expected None with cu_seqlens, got 12", 1, tokens=12),
        value_error("q: expected at most the 3 tokens of the sequence, got 12 queries", tokens=3),
    ],
    "nsa.compressed_attention_backward": [
        value_error("k_cmp: expected a ..., got 3 in (1, 5, 3, 8)", k_cmp=lambda x: x.repeat(3, 2), v_cmp=lambda x: x.repeat(3, 2)),
        value_error("k_cmp: expected 5 blocks ..., got (1, 4, 1, 8)", k_cmp=lambda x: x[:, :-1], v_cmp=lambda x: x[:, :-1]),
    ],
    "nsa.window_attention": [
        value_error("k: expected at least the 12 tokens of q (layout ..., got (1, 11, 1, 8)", k=lambda x: x[:, 1:], v=lambda x: x[:, 1:]),
        value_error("cu_seqlens_q: expected None without cu_seqlens, got some", cu_seqlens_q=[0, 12]),
        value_error("k: expected the tokens of q (2, 2, 8), got (12, 1, 8)", 1, q=lambda x: x[:2]),
    ],
    "nsa.window_attention_backward": [
        value_error("k: expected the tokens of q (1, 12, 2, 8), got (1, 13, 1, 8)",
                    k=lambda x: x[:, [0, *range(12)]], v=lambda x: x[:, [0, *range(12)]]),
        value_error("q: expected a head dim D from 1 to 576, got 577 in (1, 12, 2, 577)",
                    **{name: np.zeros((1, 12, 2, 577), np.float32) for name in ("dout", "q", "k", "v", "out")}),
    ],
    "nsa.score_and_select_blocks": [
        value_error("k_cmp: expected 5 blocks of compress_block_size = 4, got (1, 4, 1, 8)", k_cmp=lambda x: x[:, :-1]),
        value_error("k_cmp: expected 4 blocks of compress_block_size = 4, got (3, 1, 8)", 1, k_cmp=lambda x: x[:-1]),
        value_error("cu_seqlens_q: expected None without cu_seqlens, got some", cu_seqlens_q=[0, 12]),
        value_error("q: expected in mode ..., got token 10", q=lambda x: x[:, -2:], k_cmp=lambda x: x[:, :3], mode="mslk", tokens=12),
        type_error("q: expected bfloat16 as dtype says, got float32", dtype="bfloat16"),
    ],
    "nsa.compute_gates": [
        value_error("q: expected ..., got a stride of 1048577 elements", q=lambda x: as_strided(x, (1, 1, 1, 8), (4, 4, 4, 4 * 1048577))),
        value_error("q: expected shape (B, N, H, D) or (T, H, D), got (2, 8)", q=lambda x: x[0, 0]),
        value_error("q: expected axes of at most 2**48 entries in all, got shape (1, 1125899906842624, 2, 8)", q=huge(1, 2**50, 2, 8)),
    ],
    "nsa.gating_backward": [
        value_error("q: expected the tokens and heads of o_cmp (1, 3, 2, 8), got (1, 3, 1, 8)", q=lambda x: x[:, :, :1]),
    ],
    "nsa.NsaCache.append": [
        value_error("k: expected shape (B, N, H, D), got (3, 1, 8)", k=lambda x: x[0]),
        value_error("v: expected the tokens and heads of k (1, 3, 1, 8), got (1, 2, 1, 8)", v=lambda x: x[:, 1:]),
        value_error("v: expected at least one head and a head dim from 1 to 576, got (1, 3, 1, 0)", v=lambda x: x[..., :0]),
        value_error("k: expected at least one head and a head dim from 1 to 576, got (1, 3, 0, 8)", k=lambda x: x[:, :, :0]),
        value_error("lens: expected one number per sequence, (1,), got (2,)", lens=[1, 2]),
        value_error("lens: expected numbers from 0 to the 3 tokens of k, got 4", lens=[4]),
    ],
    "nsa.NsaCache.attend": [
        value_error("q: expected at most the 12 tokens of sequence 0, got 13 (lens= gives the tokens of each sequence)",
                    q=np.ones((1, 13, 2, 8), np.float32)),
        value_error("lens: expected numbers from 0 to the 2 tokens of q, got 3", lens=[3]),
        value_error("lens: expected numbers from 0 to the tokens that each ..., got 13", q=np.ones((1, 13, 2, 8), np.float32), lens=[13]),
        value_error("lens: expected numbers from 0 to the 2 tokens of q, got 3", lens=[3], gates=None),
        value_error("lens: expected numbers from 0 to the 2 tokens of q, got -1", lens=[-1]),
        value_error("lens: expected one number per sequence, (1,), got (2,)", lens=[1, 1]),
        value_error("lens: expected one number per sequence, (1,), got ()", lens=1),
        type_error("lens: expected integers, got float64", lens=[1.0]),
        value_error("gates: expected shape (1, 2, 2, 3), (..., H, 3), got (1, 1, 2, 3)", gates=lambda x: x[:, :1]),
        value_error("q: expected shape (1, N, H, 8) like the tokens, got (1, 2, 2, 7)", q=lambda x: x[..., :7]),
        value_error("q: expected shape (1, N, H, 8) like the tokens, got (3, 2, 2, 8)", q=lambda x: x.repeat(3, 0)),
        value_error("q: expected shape (1, N, H, 8) like the tokens, got (2, 2, 8)", q=lambda x: x[0]),
        value_error("q: expected a number of heads that is a positive multiple of the 1 heads of the tokens, got 0", q=lambda x: x[:, :, :0]),
        type_error("q: expected dtype float32 like the tokens, got float64", q=cast("float64")),
    ],
    "nsa.NsaCache.crop": [
        value_error("lens: expected at least 0 tokens, got -3", lens=-3),
        type_error("lens: expected integers, got bool", lens=True),
        type_error("lens: expected integers, got float64", lens=2.5),
        type_error("lens: expected integers, got NoneType", lens=None),
        value_error("lens: expected one number per sequence, (2,), got (1,)", lens=[3]),
        value_error("lens: expected numbers from 0 to the tokens that each sequence has, got 13", lens=[12, 13]),
        value_error("lens: expected numbers from 0 to the tokens that each sequence has, got -1", lens=[-1, 9]),
    ],
    "nsa.NsaCache.reorder": [
        value_error("indices: expected numbers from 0 to 1, got 2", indices=[0, 2]),
        value_error("indices: expected numbers from 0 to 1, got -1", indices=[-1, 0]),
        value_error("indices: expected one number per sequence, got shape (1, 2)", indices=[[0, 1]]),
        value_error("indices: expected one number per sequence, got shape ()", indices=1),
        type_error("indices: expected integers, got bool", indices=[True, False]),
    ],
    "core.block_means": [
        type_error("x: expected float32, float16, bfloat16 or float64, got int32", x=cast("int32")),
        value_error("x: expected shape (B, N, H, D), got (12, 2, 4)", x=lambda x: x[0]),
        value_error("x: expected shape (B, N, H, D) with at least one ..., got (1, 12, 2, 577)", x=np.zeros((1, 12, 2, 577), np.float32)),
        value_error("num_threads: expected 1 to 1024, got 9999", num_threads=9999),
        value_error("block_size: expected at least 1 token, got 0", block_size=0),
        value_error("stride: expected at least 1 token, got 0", stride=0),
        value_error("out: expected 3 blocks, got (1, 2, 2, 4)", out=lambda x: x[:, 1:]),
        type_error("out: expected dtype float32 like x, or float32, got float16", out=cast("float16")),
        value_error("out: expected batch, heads and last axis of x (1, 12, 2, 4), got (1, 3, 1, 4)", out=lambda x: x[:, :, :1]),
        type_error("weight: expected dtype float32, got float64", weight=np.zeros((2, 4, 4))),
        value_error("weight: expected shape (2, 4, 4), got (2, 4, 5)", weight=np.zeros((2, 4, 5), np.float32)),
        value_error("cu_blocks: expected 3, the number of blocks in the sequences before this one, got 2 at [1]", 1, cu_blocks=[0, 2]),
        value_error("cu_blocks: expected the cumulative numbers of the sequences' blocks, got none", 1, cu_blocks=None),
        value_error("cu_blocks: expected 2 entries like cu_seqlens, got 1", 1, cu_blocks=[0]),
        value_error("cu_seqlens: expected at least one number, got none", 1, cu_seqlens=[]),
    ],
    "core.block_means_backward": [
        value_error("dout: expected batch, heads, last axis and dtype of dx (1, 12, 2, 4), got (1, 3, 2, 3)", dout=lambda x: x[..., :3]),
        type_error("more: expected dtype float32 like dx, got float16", more=lambda x: (x[0].astype(np.float16),)),
        value_error("more: expected 1 x 12 tokens and 2 heads like dx, and a last axis of 4, got ... a last axis of 3",
                    more=lambda x: (x[0][..., :3],)),
    ],
    "core.gate": [
        type_error("gate_proj_weight: expected dtype float32, got float64", gate_proj_weight=cast("float64")),
        value_error("gate_proj_weight: expected shape (2, 3, 4), got (2, 2, 4)", gate_proj_weight=lambda x: x[:, :2]),
        type_error("gates: expected dtype float32, got float64", gates=cast("float64")),
        value_error("gates: expected 1 x 12 tokens ..., got 1 x 12 tokens, 2 heads and a last axis of 2", gates=lambda x: x[..., :2]),
        type_error("o_slc: expected dtype float32 like ..., got float16", branches=lambda x: (x[0], x[1].astype(np.float16), x[2])),
        value_error("o_win: expected ..., got 1 x 12 tokens, 1 heads and a last axis of 4", branches=lambda x: (*x[:2], x[2][:, :, :1])),
        type_error("o_cmp: expected a tuple, got list", branches=list),
        value_error("o_cmp: expected at most 3 arrays, got 6", branches=lambda x: x * 2),
        type_error("out: expected dtype float32 like the other arrays, got float64", out=cast("float64")),
    ],
    "core.gate_backward": [
        type_error("gate_proj_weight: expected dtype float32, got float64", gate_proj_weight=cast("float64")),
        value_error("dq: expected 1 x 12 tokens and 2 heads like the other arrays, and a last axis of 4, got ... a last axis of 3",
                    dq=lambda x: x[..., :3]),
        value_error("dgate_proj_weight: expected shape (2, 3, 4), got (2, 3, 3)", dgate_proj_weight=lambda x: x[..., :3]),
    ],
    "core.nsa_select": [
        type_error("k_cmp: expected dtype float32 like q, got float16", k_cmp=cast("float16")),
        value_error("k_cmp: expected D = 4, as q has, and a number of heads that divides q's 2, got (1, 3, 3, 4)",
                    k_cmp=np.zeros((1, 3, 3, 4), np.float32)),
        value_error("compress_block_size: expected a number from 1 to 1073741823, got 0", compress_block_size=0),
        value_error("init_blocks: expected a number from 0 to 1073741823, got -1", init_blocks=-1),
        value_error("compress_stride: expected a divisor of compress_block_size = 4 and of select_block_size = 4, got 3",
                    compress_stride=3),
        value_error("compress_stride: expected compress_block_size = 4 with tiles, got 2", q_tile_size=4, compress_stride=2),
        value_error("scale: expected a finite number, got nan", scale=np.nan),
        value_error("q: expected at most 1073741823 tokens per sequence, got 2147483648", tokens=2**31),
        value_error("q: expected at most 5 tokens from token 0 on, got 12", tokens=5),
        value_error("k_cmp: expected (1, at least 5, Hkv, D), got (1, 3, 2, 4)", tokens=20),
        value_error("k_cmp: expected (1, blocks, Hkv, D), got (2, 3, 2, 4)", k_cmp=lambda x: x.repeat(2, 0)),
        value_error("q_begin: expected numbers from 0 to 1073741823, got -1", q_begin=-1),
        value_error("tokens: expected 1 entry, one per sequence, got 2", tokens=[12, 12]),
        value_error("q: expected at most 14 tokens from token 3 on, got 12", 1, q_begin=[3], tokens=[14]),
        value_error("cu_blocks: expected the cumulative numbers of the sequences' blocks, got none", 1, cu_blocks=None),
        value_error("cu_blocks: expected 3 blocks of sequence 0, got 2", 1, cu_blocks=[0, 2], k_cmp=lambda x: x[:2]),
        value_error("num_selected_blocks: expected at least 1, and at least init_blocks + local_blocks = 3, got 2",
                    block_indices=lambda x: x[..., :2]),
        type_error("block_indices: expected dtype int32, got int64", block_indices=cast("int64")),
        value_error("lse: expected the log-sum-exp of the compressed branch, got none", lse=None),
        value_error("num_cmp_selected_blocks: expected None without tiles, got some",
                    cmp_block_indices=lambda x: np.zeros((1, 2, 12, 1), np.int32)),
    ],
    "core.block_sparse_attention": [
        value_error("cu_rows: expected none with layout BNSD, whose lists have a batch axis, got some",
                    sabi=np.zeros((1, 2, 2, 1), np.int32), cu_rows=[0, 2]),
        value_error("cu_rows: expected 2, the number of block rows in the sequences before this one, got 3 at [1]", 1, cu_rows=[0, 3]),
        value_error("sabi: expected shape (2 or 1, 2, W), got (2, 3, 1)", 1, sabi=np.zeros((2, 3, 1), np.int32)),
        value_error("sabi: expected block columns from 0 to 1, or a pad, got 2 at [1, 1, 0]", 1, sabi=np.array([[[0], [1]], [[0], [2]]])),
        value_error("sabi: expected each block column once per row, got 1 again at [0, 1, 1]", 1, sabi=np.array([[[0, 1], [1, 1]]])),
        value_error("sabi: expected no block column, since sequence 0 has no keys, got 0 at [0, 0, 0]",
                    1, k=lambda x: x[:0], v=lambda x: x[:0], cu_seqlens_kv=[0, 0]),
        value_error("alibi_slopes: expected a contiguous array, got a stride of 2 elements", alibi_slopes=np.ones(4, np.float32)[::2]),
        value_error("sinks: expected none with routed lists, got some", sinks=np.ones(2, np.float32), routed=True),
        value_error("attn_mask: expected none with routed lists or key_stride, got some",
                    attn_mask=np.ones((64, 64), np.bool_), routed=True),
        value_error("alibi_slopes: expected none with routed lists or key_stride, got some",
                    alibi_slopes=np.ones(2, np.float32), q_begin=[0], key_stride=2),
        value_error("key_stride, key_last: expected at least 0, got -1 and 0", key_stride=-1),
        value_error("q_begin: expected the first query's token number where key_stride is given, got none", key_stride=2),
        value_error("window: expected no bound where key_stride is given, got (3, 4)", key_stride=2, q_begin=[0], window=(3, 4)),
    ],
    "core.in_usual_mode": [
        type_error("args: expected a tuple, got []", args=[]),
        type_error("kwargs: expected a dict, got None", kwargs=None),
    ],
    "core.page_table_lengths": [
        type_error("tables: expected opened page tables, got list", tables=[]),
    ],
    "core.paged_attention": [
        value_error("indptr: expected B + 1 entries, got 0", indptr=[]),
        type_error("indptr: expected last_page_len and no seq_lens with it, got none", indptr=[0, 2, 4]),
        type_error("indptr: expected last_page_len and no seq_lens with it, got both", indptr=[0, 2, 4], last_page_len=[4, 16]),
        value_error("selected: expected pages from 0 to 1, got -1 at [0, 0, 1]", counts=np.array([[2], [2]])),
        value_error("selected: expected pages from 0 to 1, or a pad, got 2 at [1, 0, 1]", selected=entry(2, 1, 0, 1)),
        type_error("rules: expected a tuple of the arguments behind it, got [None]", rules=[None]),
        type_error(f"rules: expected a tuple of the arguments behind it, got {(None,) * 40}", rules=(None,) * 40),
    ],
    "core.merge_states": [
        type_error("outs: expected a tuple, got list", outs=list),
        type_error("lses: expected a tuple, got list", lses=list),
        value_error("lses: expected 2 arrays, one for each of outs, got 1", outs=lambda x: x * 2),
        value_error("outs: expected at least 1 array, got 0", outs=(), lses=()),
    ],
    "core.select_prefill": [
        value_error("chooser: expected pooled or another of that kind, got 'best'", chooser="best"),
        value_error("term: expected mean or another of that kind, got 'most'", term="most"),
        value_error("budget: expected density or another of that kind, got 'all'", budget="all"),
        value_error("index_dtype: expected uint16 or another of that kind, got 'int8'", index_dtype="int8"),
        value_error("density: expected one number, or one for each of 2 lists, got (3,)", budgets=np.full(3, 0.5)),
    ],
    "core.select_blocks": [
        value_error("method: expected 'quest', 'mean' or 'max', got 'best'", method="best"),
        value_error("budget: expected at least 0 pages, got -1 at [0]", budget=[-1]),
        type_error("recent: expected an integer, or one per request, with tokens_since_metadata_update, got NoneType",
                    recent=None, tokens_since_metadata_update=3),
    ],
    "core.quantize_kv": [
        type_error("x: expected float32, float16, bfloat16 or float64, got int32", x=cast("int32")),
        value_error("x: expected shape (N, D), got (3, 1, 8)", x=lambda x: x[:, None]),
        type_error("values: expected int8, float8_e4m3, q8_0, q4_0 or q4_1, got float32", values=cast("float32")),
        value_error("values: expected shape (3, 8), got (3, 7)", values=lambda x: x[:, :7]),
        value_error("scale: expected shape (3,), got (2,)", scale=lambda x: x[:2]),
        value_error("x: expected rows of at most 16777216 numbers, got shape (0, 16777217)",
                    x=np.zeros((0, 2**24 + 1), np.float32), values=np.zeros((0, 2**24 + 1), np.int8), scale=np.zeros(0, np.float32)),
    ],
    "select.select_tokens": [
        value_error("top_k: expected 1 to 2147483647 keys, got 0", top_k=0),
        value_error("top_k: expected 1 to 2147483647 keys, got 2147483648", top_k=2**31),
        value_error("q: expected shape (B, Sq, H, D), got (10, 3, 8)", q=lambda x: x[0]),
        value_error("q: expected shape (T, H, D), got (1, 20, 3, 8)", 4, q=lambda x: x[None]),
        value_error("q: expected at most 512 heads, got 513", q=lambda x: np.repeat(x[:, :, :1], 513, axis=2)),
        value_error("k: expected shape (B, Skv, D), got (2, 30, 1, 8)", k=lambda x: x[:, :, None]),
        value_error("k: expected shape (T, D), got (30, 1, 8)", 4, k=lambda x: x[:, None]),
        value_error("k: expected 2 batch entries and a last axis of 8 like q, got (1, 30, 8)", k=lambda x: x[:1]),
        value_error("k: expected 2 batch entries and a last axis of 8 like q, got (2, 30, 7)", k=lambda x: x[..., :7]),
        type_error("k: expected dtype float32 like q, got float64", k=cast("float64")),
        value_error("weights: expected shape (2, 10, 3), got (2, 10)", weights=lambda x: x[..., 0]),
        type_error("weights: expected float32, float16, bfloat16 or float64, got int64", weights=cast("int64")),
        value_error("q_lens: expected lengths from 0 to 10, got 11 at [1]", q_lens=[10, 11]),
        value_error("kv_lens: expected lengths from 0 to 30, got -1 at [0]", kv_lens=[-1, 5]),
        value_error("kv_lens: expected lengths from 0 to 92, got 93 at [1]", kv_lens=[92, 93], pool_size=3),
        value_error("kv_lens: expected lengths from 0 to 32, got 33 at [0]", 4, kv_lens=[33, 62], pool_size=3),
        value_error("kv_lens: expected none with packed arrays, whose cumulative lengths give the lengths, got some", 4, kv_lens=[10, 20]),
        value_error("pool_size: expected 1 to 1073741823 tokens, got 0", pool_size=0),
        value_error("block_size: expected 1 to 1073741823 keys, got -3", block_size=-3),
        type_error("block_tables: expected int32 or int64, got float64", 24, block_tables=np.zeros((2, 3))),
        value_error("block_tables: expected shape (2, W), got (1, 3)", 24, block_tables=lambda x: x[:1]),
        value_error("block_tables: expected pages from 0 to 4 within the request's length, got 5 at [0, 2]", 24, block_tables=entry(5, 0, 2)),
        value_error("kv_lens: expected 0 to the 12 tokens that the 3 pages of block_tables cover, got 13 at [1]", 24, kv_lens=[4, 13]),
        value_error("kv_lens: expected one length per sequence with block_tables, got none", 24, kv_lens=None),
        value_error("cu_seqlens_kv: expected none with block_tables, got some", 28, cu_seqlens_kv=[0, 11, 15]),
        value_error("k: expected shape (num_blocks, page_size, D), got (20, 8)", 28, k=lambda x: x.reshape(20, 8)),
        value_error("k: expected a last axis of 8 like q, got (5, 4, 7)", 24, k=lambda x: x[..., :7]),
        value_error("k: expected pages of at least 1 token, got (5, 0, 8)", 24, k=lambda x: x[:, :0], k_scale=lambda x: x[:, :0]),
        value_error("k_scale: expected shape (5, 4) for int8 k, got none", 24, k_scale=None),
        value_error("k_scale: expected shape (5, 4), got (5, 3)", 24, k_scale=lambda x: x[:, :3]),
        type_error("k_scale: expected float32, got float64", 24, k_scale=cast("float64")),
        value_error("k_scale: expected none with float32 k, got shape (2, 30)", k_scale=np.ones((2, 30), np.float32)),
        type_error("k: expected float32, float16, bfloat16 or float64, got int8", 1, k=cast("int8")),
        value_error("min_score: expected a finite number, got nan", min_score=np.nan),
        value_error("min_score: expected a finite number, got -inf", min_score=-np.inf),
        value_error("weights: expected finite numbers, got inf for head 2 of query 3 of sequence 1", weights=entry(np.inf, 1, 3, 2)),
        value_error("weights: expected finite numbers, got nan for head 0 of query 1 of sequence 1", 4, weights=entry(np.nan, 13, 0)),
        value_error("block_size: expected 1 with a pool_size above 1, got 8", pool_size=2, block_size=8),
        value_error("k: expected at most 1073741823 tokens, got 30 times 1073741823", pool_size=2**30 - 1),
        value_error("q_lens: expected 2 entries, one per sequence, got 1", q_lens=[10]),
        value_error("q_lens: expected none with packed arrays, whose cumulative lengths give the lengths, got some", 4, q_lens=[12, 8]),
        value_error("cu_seqlens_q: expected the last number to be the token count 20, got 19", 4, cu_seqlens_q=[0, 12, 19]),
        value_error("cu_seqlens_kv: expected rising numbers, got 3 after 10 at [2]", 4, cu_seqlens_kv=[0, 10, 3]),
        value_error("cu_seqlens_kv: expected 3 entries, as many as cu_seqlens_q has, got 2", 4, cu_seqlens_kv=[0, 30]),
        value_error("cu_seqlens_kv: expected none without cu_seqlens_q, got some", cu_seqlens_kv=[0, 10, 30]),
        value_error("q_begin: expected token numbers from ..., got ... at [0]", q_begin=[-(2**40), 0]),
    ],
    "select.select_blocks_prefill": [
        value_error("density: expected a number above 0 and at most 1, got 1.0000001", density=1.0000001),
        value_error("top_p: expected a number above 0 and at most 1, got 1.0000000000000002", 2, top_p=1 + 2.0**-52),
        value_error("threshold: expected a number above 0 and at most 1, got -1e-300", 4, threshold=-1e-300),
        type_error("chooser: expected an instance of Pooled, Antidiagonal, SampledRows or VerticalSlash, or the name of one, got type", chooser=lambda x: object),
        type_error("chooser: expected scores in an array of float32, float16, bfloat16 or float64, got int64", chooser=returning(np.ones((1, 2, 3, 3), int))),
        type_error("chooser: expected scores in an array of float32, float16, bfloat16 or float64, got list", chooser=returning([[0.5]])),
        value_error("chooser: expected shape (1, 2, 3, 3), a score for each block of queries and block of keys, got (1, 2, 3, 4)",
                    chooser=returning(np.ones((1, 2, 3, 4)))),
        value_error("chooser: expected finite numbers of at least 0, or NaN or -inf, which count as 0, got -0.5 at [0, 0, 0, 0]",
                    chooser=returning(np.full((1, 2, 3, 3), -0.5))),
        value_error("kv_lens: expected ..., got 49 at [0]", kv_lens=[49], chooser=returning(None)),
    ],
    "select.scores": [
        value_error("chooser: expected finite numbers of at least 0, or NaN or -inf, which count as 0, got inf at [0, 1, 2, 0]",
                    chooser=returning(entry(np.inf, 0, 1, 2, 0)(np.ones((1, 2, 3, 3), np.float32)))),
    ],
    "select.list_from_scores": [
        type_error("scores: expected scores in an array of float32, float16, bfloat16 or float64, got complex128", scores=cast("complex128")),
        type_error("scores: expected scores in an array of float32, float16, bfloat16 or float64, got object", scores=made(object)),
        value_error("scores: expected shape (B, H, 3, 3), for 3 x 3 blocks of 40 queries and 48 keys in block_shape (16, 16), got (1, 2, 3)",
                    scores=lambda x: x[..., 0]),
        value_error("scores: expected shape (B, H, 4, 3), for 4 x 3 blocks of 49 queries and 48 keys in block_shape (16, 16), got (1, 2, 3, 3)",
                    s_q=49),
        value_error("scores: expected finite numbers of at least 0, or NaN or -inf, which count as 0, got -1e-30 at [0, 1, 2, 1]",
                    scores=entry(-1e-30, 0, 1, 2, 1)),
        value_error("s_kv: expected at least 1 token, got 0", s_kv=0),
        value_error("density, top_p, threshold, top_k: expected exactly one of them, got density and top_k", top_k=1),
    ],
    "sabi.from_function": [
        type_error("mask_mod: expected a function of (b, h, q_idx, kv_idx), got ndarray", mask_mod=np.ones((32, 32), bool)),
        type_error("mask_mod: expected a function that returns booleans, got one that returns float64", mask_mod=returning(0.5)),
        type_error("mask_mod: expected a function that returns booleans, got object", mask_mod=returning(object())),
        type_error("mask_mod: expected a function that returns booleans, got one that returns int64", mask_mod=returning(3)),
        value_error("mask_mod: expected a result that broadcasts to (32, 32), the shapes of q_idx and kv_idx together, got shape (3,)",
                    mask_mod=returning(np.ones(3, bool))),
        value_error("mask_mod: expected a function by which the keys of a query are one run in the listed blocks, the same for all heads "
                    "(token_rule='attn_mask' takes any), got a gap for [batch, head, query] = [0, 0, 0]", mask_mod=lambda x: lambda b, h, i, j: (i - j) % 2 == 0),
        value_error("token_rule: expected one of kv_ranges, attn_mask, none, got 'window'", token_rule="window"),
        value_error("token_rule: expected a rule other than 'attn_mask' for more than 268435456 pairs of tokens, got 268435488",
                    token_rule="attn_mask", s_kv=2**23 + 1, heads=1, block_shape=(32, 2**20)),
        value_error("batch: expected 1 to 1048576, got 0", batch=0),
        value_error("batch, heads: expected at most 268435456 blocks and 274877906944 pairs of tokens in all, got 1 x 1000 heads of 32 x 536870912 tokens",
                    heads=1000, s_kv=2**29, block_shape=(32, 2**20)),
        type_error("dtype: expected uint16, int16, int32 or int64, got bool", dtype="bool"),
    ],
    "quality.calibrate": [
        value_error("target: expected a number above 0 and at most 1, got 1.0000001", target=1.0000001),
    ],
    "quality.allocate": [
        value_error("density: expected a number above 0 and at most 1, got 1.0000001", density=1.0000001),
    ],
    "sabi.frame_plan": [
        value_error("sparsity: expected a number from 0 to 1, got 1.0000001", sparsity=1.0000001),
    ],
    "video.Geometry": [
        type_error("spans: expected a list of spans, each of them a number of tokens or a grid (frames, height, width), got int", spans=5),
        type_error("spans: expected a number of tokens or a grid (frames, height, width) for each span, got str", spans=["text"]),
        value_error("spans: expected at least 0 plain tokens, got -1", spans=[-1]),
        value_error("spans: expected grids of at least one frame, row and column, got (1, 2)", spans=[(1, 2)]),
        value_error("spans: expected grids of at least one frame, row and column, got (1, 0, 2)", spans=[(1, 0, 2)]),
        value_error("spans: expected 1 to 16777216 tokens in all, got 0", spans=[0]),
        value_error("spans: expected 1 to 16777216 tokens in all, got 16777217", spans=[1, (2**8, 2**8, 2**8)]),
    ],
    "video.cube_order": [
        type_error("geometry: expected a Geometry, got tuple", geometry=(1, 2, 3)),
        value_error("cube: expected three positive numbers of tokens (frames, height, width), got (4, 0, 4)", cube=(4, 0, 4)),
        value_error("cube: expected three positive numbers of tokens (frames, height, width), got (4, 4)", cube=(4, 4)),
        type_error("cube: expected three positive numbers of tokens (frames, height, width), got int", cube=4),
    ],
    "video.TokenOrder.permute": [
        value_error("layout: expected one of BNSD, BSND, BSH, TND, got 'bnsd'", layout="bnsd"),
        value_error("k: expected 37 tokens on axis 2 (layout BNSD), got shape (1, 1, 36, 4)", k=lambda x: x[:, :, :36]),
        value_error("q: expected 37 tokens on axis 2 (layout BNSD), got shape (1, 2)", q=lambda x: x[:, :, 0]),
        value_error('q: expected 37 tokens on axis 2 (layout BNSD), got shape (1, 37, 2, 4) (layout="BSND" fits)',
                    q=np.zeros((1, 37, 2, 4)), k=np.zeros((2, 37, 1, 4))),
        value_error('q: expected 37 tokens on axis 2 (layout BNSD), got shape (1, 37, 8) (layout="BSH" fits)',
                    q=np.zeros((1, 37, 8)), k=np.zeros((1, 37, 4))),
        value_error('q: expected 37 tokens on axis 2 (layout BNSD), got shape (37, 2, 4) (layout="TND" fits)',
                    q=np.zeros((37, 2, 4)), k=np.zeros((37, 1, 4))),
        value_error('q: expected 37 tokens on axis 1 (layout BSND), got shape (1, 2, 37) (layout="BNSD" fits)', layout="BSND",
                    q=np.zeros((1, 2, 37)), k=np.zeros((1, 1, 37))),
        type_error("q: expected a NumPy array, a torch tensor or a JAX array, got list", q=lambda x: x.tolist()),
        type_error("q: expected numbers, got <U4", q=lambda x: x.astype("U4")),
        type_error("q: expected an array without a mask, got MaskedArray", q=np.ma.masked_array),
        value_error("out: expected 2 arrays, one for each array, got 1", out=lambda x: np.zeros((1, 2, 37))),
        type_error("out: expected a NumPy array like q, got str", out=("x", None)),
        type_error("out: expected dtype float32 like q, got float64", out=lambda x: (np.zeros((1, 2, 37)), None)),
        value_error("out: expected shape (1, 2, 37) like q, got (1, 2, 36)", out=lambda x: (np.zeros((1, 2, 36), np.float32), None)),
        value_error("out: expected a writable array, got a read-only one", out=lambda x: (np.broadcast_to(np.float32(0), (1, 2, 37)), None)),
        value_error("out: expected memory of its own, got an array that overlaps q", out=Of(lambda call: (call["q"], None))),
        value_error("out: expected memory of its own, got an array that overlaps k",
                    out=Of(lambda call: (None, call["k"]))),
    ],
    "video.Neighbourhood": [
        type_error("radius: expected three distances from 0 on, or None (frames, height, width), got int", radius=1),
        value_error("radius: expected three distances from 0 on, or None (frames, height, width), got (1, 1)", radius=(1, 1)),
        value_error("radius: expected three distances from 0 on, or None (frames, height, width), got (1, -1, None)", radius=(1, -1, None)),
        type_error("radius: expected an integer, got float", radius=(1, 0.5, 1)),
    ],
    "video.Neighbourhood.spatial": [
        value_error("radius: expected three distances from 0 on, or None (frames, height, width), got (-1, None, None)", radius=-1),
    ],
    "video.SlidingTiles": [
        value_error("window: expected three numbers of cubes from 1 on, or None (frames, height, width), got (3, 0, 3)", window=(3, 0, 3)),
    ],
    "video.Radial": [
        value_error("decay_factor: expected a positive number, got 0", decay_factor=0),
        value_error("decay_factor: expected a positive number, got inf", decay_factor=np.inf),
        value_error("decay_factor: expected a positive number, got nan", decay_factor=np.nan),
    ],
    "video.blocks": [
        type_error("order: expected a TokenOrder, from cube_order(geometry), got Geometry", order=video.Geometry([(4, 4, 4)])),
        value_error("order: expected a geometry with a grid, such as Geometry([(9, 10, 16)]), got spans (3, 4, 5)",
                    order=video.cube_order(video.Geometry((3, 4, 5)))),
        type_error(f"rule: {_RULE}, got str", rule="radial"),
        type_error(f"rule: {_RULE}, got int in a tuple", rule=(3, 3, 3)),
        value_error("rule: expected at least one rule, got none", rule=[]),
        value_error("block_shape: expected two positive numbers (queries, keys), got (4, 0)", block_shape=(4, 0)),
        value_error("dense_frames: expected a number of frames from 0 on, got -1", dense_frames=-1),
        type_error("dense_tokens: expected integers, got float64", dense_tokens=[0.5]),
        value_error("dense_tokens: expected the numbers of tokens, from 0 to 36, got 0..37", dense_tokens=[0, 37]),
        value_error("dense_tokens: expected the numbers of tokens, from 0 to 36, got -1..2", dense_tokens=[2, -1]),
        value_error("dense_tokens: expected the numbers of tokens, from 0 to 36, got shape (1, 1)", dense_tokens=[[0]]),
        type_error("dtype: expected uint16, int16, int32 or int64, got float32", dtype="float32"),
        value_error("block_shape: expected two positive numbers (queries, keys), got (4,)", block_shape=(4,)),
    ],
    "video.density": [
        type_error("per_head: expected True or False, got str", per_head="yes"),
    ],
    "video.choose_rules": [
        type_error(f"rules: {_RULE}, got str", rules="radial"),
        value_error("sampled_rows: expected at least 1, got 0", sampled_rows=0),
        value_error("seed: expected a number from 0 on, got -1", seed=-1),
        value_error("q: expected 37 tokens on axis 2 (layout BNSD), got shape (1, 2, 36, 4)", q=lambda x: x[:, :, :36]),
        value_error("k: expected 37 tokens on axis 2 (layout BNSD), got shape (1, 1, 36, 4)", k=lambda x: x[:, :, :36]),
        value_error("kv_lens: expected lengths from 0 to 37, got 38 at [0]", kv_lens=[38]),
        value_error("kv_lens: expected lengths from 0 to 37, got -1 at [0]", kv_lens=[-1]),
        value_error("kv_lens: expected 1 entry, one per batch entry, got 2", kv_lens=[30, 37]),
        value_error("kv_lens: expected 1 dimension, got 2", kv_lens=[[30]]),
        type_error("kv_lens: expected integers, got float64", kv_lens=[30.0]),
        value_error("kv_lens: expected none with layout TND, whose only sequence has all tokens of the order, got some", 1, kv_lens=[37]),
    ],
    "video.Schedule": [
        value_error("dense_steps: expected a number of steps from 0 on, got -1", dense_steps=-1),
        value_error("densities: expected numbers above 0 and at most 1, got 0", densities=0),
        value_error("densities: expected numbers above 0 and at most 1, got 1.0000001", densities=(0.5, 1.0000001)),
        value_error("densities: expected at least one number, got none", densities=()),
        value_error("refresh_every: expected at least 1, got 0", refresh_every=0),
    ],
    "video.Schedule.density": [
        value_error("step: expected the number of a step, from 0 on, got -1", step=-1),
        type_error("step: expected an integer, got float", step=0.5),
    ],
    "torch_bsa.blitz_sparse_attention": [
        type_error("atten_mask: expected a bool array, got Raising", atten_mask=Raising()),
    ],
}  # fmt: skip
# Some parts do not take the dtype from q, but from these arrays.
_FIRST = {"compress_kv": "k", "compress_kv_backward": "k", "gate_and_combine": "o_cmp", "gating_backward": "o_cmp"}
for _name in (*_FIRST, "compute_gates", *(f"{x}_attention{y}" for x in ("compressed", "selected", "window") for y in ("", "_backward"))):
    _row = type_error(f"{_FIRST.get(_name, 'q')}: expected float16 as dtype says, got float32", dtype="float16")
    REFUSALS.setdefault(f"nsa.{_name}", []).append(_row)
if "plot_mask" in GROUPS["plots"]:  # if matplotlib is installed
    REFUSALS["plots.plot_mask"] = [value_error("dpi: expected a positive number, got -0.123456789", dpi=-0.123456789)]
    REFUSALS["plots.plot_cubes"] = [
        type_error("order: expected a TokenOrder, from cube_order(geometry), got int", order=4),
        value_error("order: expected a geometry with a grid, such as Geometry([(9, 10, 16)]), got spans (37,)",
                    order=lambda x: video.cube_order(video.Geometry([37]))),
        value_error("sabi: expected shape (B or 1, H, Hkv or 1, 10, W), with 10 rows = ceil(37 queries / block_shape[0] = 4), got (1, 1, 9, ...",
                    sabi=lambda x: x[:, :, 1:]),
        value_error("row: expected a row of the list, from 0 to 9, got 10", row=10),
        value_error("head: expected a head of the list, from 0 to 0, got 1", head=1),
        value_error("max_frames: expected at least 1, got 0", max_frames=0),
    ]


# ---- Rows by role -----------------------------------------------------------------------------------------------------

ARRAY = [
    type_error("x: expected an array, got list", x=lambda x: x.tolist()),
    type_error("x: expected an array, got Raising", x=Raising()),
]
IN_PLACE = [  # for arrays that are not copied
    *ARRAY,
    type_error("x: expected float32, float16, ..., got int32", x=cast("int32")),
    type_error("x: expected native byte order, got >f4", x=cast(">f4")),
    value_error("x: expected a contiguous last axis (numpy.ascontiguousarray makes one), got a stride of 2 elements",
                x=lambda x: x.repeat(2, -1)[..., ::2]),
]  # fmt: skip
INTEGERS = [type_error("x: expected integers, got float64", x=lambda x: np.array(x, np.float64))]
INTEGER = [type_error("x: expected an integer, got float", x=2.0)]
NUMBER = [
    type_error("x: expected a number, got str", x="1"),
    value_error("x: expected a number, got Raising that raises: no number", x=Raising()),
]
BY_ROLE = {  # for an argument x of that role, in all functions that have one
    "floats": IN_PLACE,
    "cache": IN_PLACE,
    "reals": [*ARRAY, type_error("x: expected float32... got int32", x=cast("int32"))],
    "scales": [
        *ARRAY,
        type_error("x: expected float32, got int64", x=cast("int64")),
        type_error("x: expected numbers, got memoryview", x=made(released_view)),
        value_error("x: expected positive numbers within the range of float32, got -1", x=lambda x: -1.0),
    ],
    "indices": [*ARRAY, type_error("x: expected uint16, int16, int32 or int64, got float32", x=cast("float32"))],
    "pages": [*ARRAY, type_error("x: expected int16, int32 or int64, got float32", x=cast("float32"))],
    "tables": [*ARRAY, type_error("x: expected int32 or int64, got int16", x=cast("int16"))],
    "mask": [*ARRAY, type_error("x: expected bool, float32, float16, bfloat16 or float64, got int32", x=cast("int32"))],
    "heads": [
        type_error("x: expected numbers, got str", x="1"),
        type_error("x: expected numbers, got complex64", x=np.zeros(4, np.complex64)),
    ],
    "lengths": INTEGERS,
    "list": INTEGERS,
    "per_sequence": INTEGERS,
    "flag": [
        type_error("x: expected True or False, got NoneType", x=None),
        type_error("x: expected True or False, got str", x="yes"),
        value_error("x: expected True or False, got Raising that raises: no number", x=Raising()),
    ],
    "integer": INTEGER,
    "threads": INTEGER,
    "pair": [type_error("x: expected a pair of integers, got int", x=3)],
    "scale": NUMBER,
    "number": NUMBER,
    "dtype": [
        type_error("x: expected a dtype or its name, got int", x=3),
        value_error("x: expected 'float32', 'float16', ..., got 'int8'", x="int8"),
    ],
    "kv_dtype": [type_error("x: expected a dtype or its name, got float", x=1.5)],
    "layout": [value_error("x: expected 'BNSD', 'BSND', 'BSH' or 'TND', got 'BHSD'", x="BHSD")],
    "kv_layout": [value_error("x: expected 'NHD' or 'HND', got 'NDH'", x="NDH")],
}
# Masked arrays are refused, because a number that the mask hides must not be read.
MASKED = [type_error("x: expected an array without a mask, got MaskedArray", x=np.ma.array)]
WRITTEN = [value_error("x: expected a writable array, got a read-only one", x=OF_ARRAYS["read-only"])]
ALIKE = ("block_sparse", "select", "merge", "paged", "quest", "nsa")  # groups of functions whose arguments the core reads
COPIED = ("x", "values", "gate_proj_weight", "block_indices", "tokens_since_metadata_update")  # copied by NumPy, which accepts more dtypes
SABI = ("list_from_scores", "block_shape")  # read as in functions of sabi, with their sentence
UNREAD = ("atten_mask", "w_k_compress")  # not read by some calls
assert BY_ROLE.keys() <= {x.role for arguments in OPERATIONS.values() for x in arguments}
NAMED: dict[str, str] = {}  # the role of arguments of this name, if it is the same in all operations
for _argument in itertools.chain(*OPERATIONS.values()):
    NAMED[_argument.name] = _argument.role if NAMED.get(_argument.name, _argument.role) == _argument.role else ""


def by_role(good: Good, alike: bool) -> Iterator[Refusal]:
    """The rows for all arguments of a function, in the first variety that has the argument: the rows of masked arrays, and with `alike` also
    the rows by role."""
    name, calls = good.call.__name__, [good.make(Arena(v), v) for v in range(17)]
    roles = NAMED | ({x.name: x.role for x in arguments_of(good.call).values()} if name in OPERATIONS else {})
    for argument in parameters(good.call):
        given = {v: call[argument] for v, call in enumerate(calls) if isinstance(call.get(argument), (np.ndarray, list, int))}
        variety, value = next(iter(given.items()), (0, None))
        rows = [*BY_ROLE.get(roles.get(argument), ())] if alike and argument not in COPIED and (name, argument) != SABI else []
        rows += WRITTEN if alike and argument in good.writes else []
        listed = isinstance(value, list) and all(isinstance(x, int) for x in value)
        rows += MASKED if argument not in UNREAD and (listed or isinstance(value, np.ndarray)) else []
        for row in rows:
            if given or not callable(row.changes["x"]):
                yield row._replace(sentence=argument + row.sentence[1:], variety=variety, changes={argument: row.changes["x"]})


for _group, _functions in GROUPS.items():
    for _name, _good in _functions.items():
        if not _good.lenient and _group != "plots":  # functions of plots write files
            _alike = _group in ALIKE and " " not in _name  # a name with a space is another form of a call
            REFUSALS.setdefault(f"{_group}.{_name}", []).extend(by_role(_good, _alike))
