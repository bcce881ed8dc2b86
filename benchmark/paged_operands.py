"""Paged caches to measure on: random tokens on pages in random order, the calls over them, and the check of what they return."""

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
    """One decode step: a query a request over its own pages."""

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
        """A multiply and an add an element of K and of V, for every query head of the group."""
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
