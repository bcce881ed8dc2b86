"""Whole sequences and paged caches to measure on: how they are drawn, how much work calls over them are, and how they are checked."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import numpy as np

import _bench  # noqa: F401  (finds the library of this checkout)
import blitz_attn
import check
from blitz_attn import testing
from blitz_attn._sabi.lists import signed

# ---- Query-key pairs ---------------------------------------------------------------------------------------------


def pair_areas(s_q: int, s_kv: int, block_shape: Sequence[int], causal: bool = False) -> np.ndarray:
    """Query-key pairs in each block of the grid, (R, C) int64: blocks at the ends are cut, and blocks on the diagonal where `causal`."""
    block_q, block_kv = block_shape
    row_starts, column_starts = np.arange(0, s_q, block_q), np.arange(0, s_kv, block_kv)
    widths = np.minimum(block_kv, s_kv - column_starts)
    if not causal:
        return np.multiply.outer(np.minimum(block_q, s_q - row_starts), widths)
    areas = np.zeros((row_starts.size, column_starts.size), np.int64)
    for row, start in enumerate(row_starts):
        seen = np.arange(start, min(start + block_q, s_q)) + s_kv - s_q + 1  # keys that each query of the block sees
        areas[row] = np.clip(seen[:, None] - column_starts, 0, widths).sum(axis=0)
    return areas


def dense_pairs(s_q: int, s_kv: int, causal: bool = False) -> int:
    """Query-key pairs of one head of dense attention."""
    return int(pair_areas(s_q, s_kv, (s_q, s_kv), causal)[0, 0])


def kept_pairs(sabi: np.ndarray, s_q: int, s_kv: int, block_shape: Sequence[int], causal: bool = False) -> float:
    """Query-key pairs that a block list keeps, a head: the mean over the heads (and batches) that it lists."""
    areas = pair_areas(s_q, s_kv, block_shape, causal)
    columns = signed(sabi)
    picked = np.take_along_axis(np.broadcast_to(areas, (*columns.shape[:-2], *areas.shape)), np.maximum(columns, 0), axis=-1)
    return float(np.where(columns >= 0, picked, 0).sum(axis=(-1, -2)).mean())


def flops(pairs: float, head_dim: int, v_dim: int) -> float:
    """Floating-point operations of `pairs` query-key pairs: one multiply and one add per dimension, for the scores and for the values."""
    return 2.0 * (head_dim + v_dim) * pairs


# ---- Whole sequences --------------------------------------------------------------------------------------------


@dataclass
class Operands:
    """One problem's arrays as a call takes them (`q`, `k`, `v`, `out`) and as (B, H, S, D) views of the same memory."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    out: np.ndarray
    views: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
    dtype: str
    options: dict[str, Any] = field(default_factory=dict)  # layout and what it needs, dtype of bare bits, scale, causal

    @property
    def bits(self) -> str | None:
        """The dtype's name where the arrays are bare bits, else None."""
        return self.options.get("dtype")

    def call(self, sabi: np.ndarray | None, block_shape: tuple[int, int], threads: int, **more: Any) -> Callable[[], Any]:
        """A call of the library that writes into `out`."""

        def run():
            return blitz_attn.block_sparse_attention(
                self.q, self.k, self.v, sabi, block_shape=block_shape, out=self.out, num_threads=threads, **self.options, **more
            )

        return run


def _in_layout(x: np.ndarray, layout: str) -> tuple[np.ndarray, np.ndarray]:
    """A (B, H, S, D) array laid out as `layout`, and a (B, H, S, D) view of that."""
    laid = testing.to_layout(x, layout)
    batch, heads, tokens, dim = x.shape
    return laid, laid if layout == "BNSD" else laid.reshape(batch, tokens, heads, dim).swapaxes(1, 2)


def lay_out(q, k, v, layout: str, dtype: str, **options: Any) -> Operands:
    """Operands of the (B, H, S, D) arrays `q`, `k`, `v` in `layout`; `options` go to every call."""
    options["layout"] = layout
    if q.dtype == np.uint16:
        options["dtype"] = dtype
    if layout == "BSH":
        options |= {"num_heads": q.shape[1], "num_kv_heads": k.shape[1]}
    if layout == "TND":
        options["cu_seqlens_q"] = np.arange(q.shape[0] + 1, dtype=np.int64) * q.shape[2]
        options["cu_seqlens_kv"] = np.arange(k.shape[0] + 1, dtype=np.int64) * k.shape[2]
    laid = [_in_layout(x, layout) for x in (q, k, v, np.zeros((*q.shape[:-1], v.shape[-1]), q.dtype))]
    arrays, views = zip(*laid, strict=True)
    return Operands(*arrays, views, dtype, options)


def draw(batch: int, heads: int, kv_heads: int, tokens: int, head_dim: int, dtype: str, layout: str, seed: int) -> Operands:
    """Normal random operands. Never zeros: processors that save power on them would be timed too fast."""
    q, k, v = testing.make_qkv(batch, heads, kv_heads, tokens, tokens, head_dim, dtype=dtype, seed=seed)
    return lay_out(q, k, v, layout, dtype)


# ---- Paged caches: random tokens on pages in random order -------------------------------------------------------

LAYOUTS = ("NHD", "HND")
ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1, "float8_e4m3": 1}
QUANTISED = ("int8", "float8_e4m3")
SCALE_BYTES = 4  # one float32 a token and KV head
DRAWN_TOKENS = 4099  # tokens drawn at random; a cache repeats them. Prime, so that pages differ


def token_bytes(dtype: str, kv_heads: int, head_dim: int) -> int:
    """Bytes of K and V that one token holds, with its scales."""
    return 2 * kv_heads * (head_dim * ITEM_BYTES[dtype] + (SCALE_BYTES if dtype in QUANTISED else 0))


def memory_available() -> int:
    """Bytes that can be taken without swapping; a generous guess where the system does not tell."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2 if hasattr(os, "sysconf") else 4 << 30


def bits_options(x: np.ndarray) -> dict[str, str]:
    """The option that names the dtype of bare bits, where `x` is such."""
    return {"dtype": "bfloat16"} if x.dtype == np.uint16 else {}


@dataclass
class Cache:
    """K and V in pages, with scales where they are quantised."""

    dtype: str
    k: np.ndarray  # (pages, page_size, H_kv, D)
    v: np.ndarray
    memory: np.ndarray  # the bytes of both
    scales: dict[str, np.ndarray] = field(default_factory=dict)  # k_scale and v_scale, where it is quantised
    bits: dict[str, str] = field(default_factory=dict)  # kv_dtype, where the arrays are bare bits

    def values(self, which: str, pages: np.ndarray, head: int) -> np.ndarray:
        """float64 (pages * page_size, D): what one KV head of the listed pages means, of `which`, k or v."""
        raw = getattr(self, which)[pages, :, head]
        scale = self.scales.get(f"{which}_scale")
        if scale is not None:
            raw = blitz_attn.dequantize_kv(raw, scale[pages, :, head])
        return testing.to_float64(raw.reshape(-1, raw.shape[-1]), "bfloat16" if raw.dtype == np.uint16 else None)


def _on_a_line(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """An array that begins on a cache line, as other libraries' do; NumPy's large ones begin 16 bytes behind."""
    size = int(np.prod(shape)) * dtype.itemsize
    memory = np.empty(size + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + size].view(dtype).reshape(shape)


def _fill_pages(pages: np.ndarray, part: np.ndarray) -> np.ndarray:
    """The tokens of `part` over and over in (pages, page_size, ...), in whatever order these lie in memory."""
    page = pages.shape[1]
    some = max(1, len(part) // page)
    for start in range(0, len(pages), some):
        to = pages[start : start + some]
        to[...] = part[np.arange(start * page, (start + len(to)) * page) % len(part)].reshape(to.shape)
    return pages


@functools.lru_cache(maxsize=1)  # cells that differ in their queries only share a cache
def draw_cache(dtype: str, pages: int, page: int, kv_heads: int, head_dim: int, seed: int, layout: str = "NHD") -> Cache:
    """A cache of normal random tokens. `layout`: how a page lies in memory; K and V have the shape of NHD either way."""
    rng = np.random.default_rng(seed)
    tokens = pages * page
    scales = {}
    parts = []
    for name in ("k", "v"):
        drawn = rng.standard_normal((min(DRAWN_TOKENS, tokens), kv_heads, head_dim), dtype=np.float32)
        if dtype in QUANTISED:
            drawn, scale = blitz_attn.quantize_kv(drawn, dtype)
            scales[f"{name}_scale"] = _fill_pages(_on_a_line((pages, page, kv_heads), scale.dtype), scale)
        else:
            drawn = testing.round_to(drawn, dtype)
        parts.append(drawn)
    by_head = layout == "HND"
    page_shape = (kv_heads, page, head_dim) if by_head else (page, kv_heads, head_dim)
    memory = _on_a_line((2, pages, *page_shape), parts[0].dtype)
    k, v = (_fill_pages(whole.swapaxes(1, 2) if by_head else whole, part) for whole, part in zip(memory, parts, strict=True))
    return Cache(dtype, k, v, memory.view(np.uint8).reshape(-1), scales, {"kv_dtype": dtype} if k.dtype in (np.uint16, np.uint8) else {})


def draw_tables(lengths: Sequence[int], page: int, pages: int, rng: np.random.Generator) -> np.ndarray:
    """Block tables (B, W) int32 over a pool: no page twice until all have been given, in random order, as a busy pool's."""
    counts = [-(-length // page) for length in lengths]
    order = np.concatenate([rng.permutation(pages) for _ in range(-(-sum(counts) // pages))])
    tables = np.full((len(counts), max(counts)), -1, np.int32)
    start = 0
    for row, count in enumerate(counts):
        tables[row, :count] = order[start : start + count]
        start += count
    return tables


@dataclass
class Decode:
    """One decode step: one query per request, over its own pages."""

    q: np.ndarray  # (B, H, D)
    cache: Cache
    tables: np.ndarray  # (B, W)
    lengths: np.ndarray  # (B,)
    out: np.ndarray

    @property
    def kv_bytes(self) -> int:
        """What a step must read: K, V and their scales of every token once."""
        return int(self.lengths.sum()) * token_bytes(self.cache.dtype, *self.cache.k.shape[2:])

    @property
    def flops(self) -> float:
        """One multiply and one add per element of K and of V, for every query head of the group."""
        return 4.0 * int(self.lengths.sum()) * self.q.shape[1] * self.q.shape[2]

    def bits(self) -> dict[str, str]:
        """The options that name the dtypes of bare bits."""
        return self.cache.bits | bits_options(self.q)

    def plan(self, threads: int | None = None, library: ModuleType = blitz_attn) -> blitz_attn.PagedPlan:
        """Tables and lengths, looked at before: what a step does once for all its layers."""
        return library.PagedPlan(self.tables, self.lengths, page_size=self.cache.k.shape[1], num_threads=threads, **self.bits())

    def call(self, threads: int, library: ModuleType = blitz_attn, *, planned: bool = True) -> Callable[[], Any]:
        """A call that writes into `out`, of this build of the library or of another one."""
        arrays = (self.q, self.cache.k, self.cache.v)
        options = self.cache.scales | {"out": self.out}
        if planned:
            plan = self.plan(threads, library)
            return lambda: plan.attention(*arrays, **options)
        options |= self.bits() | {"num_threads": threads}
        return lambda: library.paged_attention(*arrays, self.tables, self.lengths, **options)

    def request(self, index: int, which: str) -> np.ndarray:
        """K or V of one request as (H_kv, S, D), one piece of memory, in the cache's own dtype."""
        tokens = getattr(self.cache, which)[self.pages(index)]
        return np.ascontiguousarray(tokens.reshape(-1, *tokens.shape[2:])[: self.lengths[index]].swapaxes(0, 1))

    def head_is_equal(self, out: np.ndarray, request: int, head: int, pages: np.ndarray, tokens: int) -> bool:
        """Whether the outputs of one KV head's group equal float64 attention over the first `tokens` tokens of `pages`."""
        group = self.q.shape[1] // self.cache.k.shape[2]
        part = slice(head * group, (head + 1) * group)
        bits = bits_options(self.q).get("dtype")
        q, got = (testing.to_float64(x[request, part], bits)[None, :, None] for x in (self.q, out))
        k, v = (self.cache.values(which, pages, head)[None, None, :tokens] for which in ("k", "v"))
        return check.outputs_equal(got, q, k, v, None, (1, self.cache.k.shape[1]), wanted_rows=0)

    def is_equal(self, out: np.ndarray) -> bool:
        """Whether `out` (B, H, D) was written everywhere, and is right in the first and last request and KV head."""
        if check.poisoned(out):
            return False
        places = ((b, head) for b in {0, len(self.lengths) - 1} for head in {0, self.cache.k.shape[2] - 1})
        return all(self.head_is_equal(out, b, head, self.pages(b), int(self.lengths[b])) for b, head in places)

    def pages(self, request: int) -> np.ndarray:
        """The pages that a request uses, in the order of its tokens."""
        return self.tables[request, : -(-int(self.lengths[request]) // self.cache.k.shape[1])]


def query_dtype(dtype: str) -> str:
    """The dtype of queries and outputs beside a cache of `dtype`."""
    return "bfloat16" if dtype in QUANTISED else dtype


def draw_decode(
    lengths: Sequence[int], heads: int, kv_heads: int, head_dim: int, page: int, dtype: str, seed: int, layout: str = "NHD"
) -> Decode:
    """A decode step of random operands. Never zeros: processors that save power on them would be timed too fast."""
    rng = np.random.default_rng([seed, 1])  # not the cache's stream: a query that is one of the keys would find itself
    pages = sum(-(-length // page) for length in lengths)
    cache = draw_cache(dtype, pages, page, kv_heads, head_dim, seed, layout)
    q = testing.round_to(rng.standard_normal((len(lengths), heads, head_dim), dtype=np.float32), query_dtype(dtype))
    return Decode(q, cache, draw_tables(lengths, page, pages, rng), np.asarray(lengths, np.int64), np.zeros_like(q))
