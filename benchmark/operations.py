"""The operations that scripts measure: attention of whole sequences, gradients, decode steps, selection; how each is drawn, called and
checked.

`every_operation` is the fixed set of roofline.py and speed.py. The set is small so that measuring it can be a habit. Changing a size in it
makes old records worthless. Operands are normal random numbers, and never zeros, because some processors need less power for zeros and so
compute faster.
"""

from __future__ import annotations

import functools
import itertools
import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any

import numpy as np

import _bench  # noqa: F401  (finds the library of this checkout)
import blitz_attn
from _bench import Contender, Progress, in_turns
from blitz_attn import _core, reference, sabi, testing
from blitz_attn._sabi.lists import signed

RTOL, ATOL = 0.01, 0.001  # upstream's tolerances, for results against float64
CHECKED_ROWS = 32
DTYPES = ("float32", "float16", "bfloat16", "float64")
# The largest relative errors that are allowed, by norm. Single elements are not compared: those near 0 have large relative errors anyway.
LARGEST_ERROR = {"float64": 1e-11, "float32": 1e-5, "float16": 5e-3, "bfloat16": 4e-2}

Call = Callable[[], Any]


@dataclass
class Work:
    """Something to time: flops, bytes, output, and a function that makes the call for a number of threads, in this build or another."""

    flops: float
    bytes: float  # operands and results, each counted once
    call: Callable[..., Call]
    out: np.ndarray


def poison(out: np.ndarray) -> None:
    """Fill an output with NaN (all bits set), so that elements that a kernel does not write show."""
    out.reshape(-1).view(np.uint8)[...] = 0xFF


def poisoned(out: np.ndarray) -> bool:
    """Whether any element still has the bits that `poison` wrote."""
    bits = out.reshape(-1).view(f"u{out.dtype.itemsize}")
    return bool((bits == np.iinfo(bits.dtype).max).any())


def bits_options(x: np.ndarray) -> dict[str, str]:
    """The option that names the dtype of `x`, if `x` holds bare bits."""
    return {"dtype": "bfloat16"} if x.dtype == np.uint16 else {}


def memory_available() -> int:
    """Bytes that can be allocated without swapping; a generous estimate if the system does not tell."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2 if hasattr(os, "sysconf") else 4 << 30


# ---- Whole sequences ---------------------------------------------------------------------------------------------


def pair_areas(s_q: int, s_kv: int, block_shape: Sequence[int], causal: bool = False) -> np.ndarray:
    """The number of query-key pairs in each block, (rows, columns). Blocks at the ends are cut, and so are blocks on the diagonal if
    `causal`."""
    block_q, block_kv = block_shape
    starts = np.arange(0, s_kv, block_kv)
    seen = np.arange(s_q) + s_kv - s_q + 1 if causal else np.full(s_q, s_kv)  # keys that each query sees
    widths = np.minimum(block_kv, s_kv - starts)
    return np.stack([np.clip(seen[row : row + block_q, None] - starts, 0, widths).sum(axis=0) for row in range(0, s_q, block_q)])


@dataclass(eq=False)
class Attention:
    """The arrays of a call, (B, H, S, D) views of the same memory, the options of every call, and the lists."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    out: np.ndarray
    views: tuple[np.ndarray, ...]
    dtype: str
    options: dict[str, Any]  # layout with its lengths or numbers of heads, dtype of bare bits, scale, causal
    lists: np.ndarray | None = None
    block_shape: tuple[int, int] = (128, 128)

    def over(self, lists: np.ndarray | None, block_shape: tuple[int, int] = (128, 128)) -> Attention:
        """The same arrays with another list, or without one."""
        return replace(self, lists=lists, block_shape=block_shape)

    def sparse(self, sparsity: float, block_shape: tuple[int, int], seed: int, frame: Any = None, sort: bool = True) -> Attention:
        """The same arrays with a random list that drops a share of the blocks."""
        batch, heads, s_q, _ = self.views[0].shape
        options = {"frame": frame if sparsity else None, "batch": batch, "heads": heads, "seed": seed, "sort": sort}
        return self.over(sabi.random_with_frame(s_q, self.views[1].shape[2], block_shape, sparsity, **options), block_shape)

    @property
    def bits(self) -> str | None:
        """The dtype's name if the arrays hold bare bits."""
        return self.options.get("dtype")

    @property
    def causal(self) -> bool:
        return bool(self.options.get("causal"))

    @functools.cached_property
    def pairs(self) -> float:
        """The number of query-key pairs that are attended, over all heads."""
        q, k = self.views[:2]
        heads, s_q, s_kv = q.shape[0] * q.shape[1], q.shape[2], k.shape[2]
        areas = pair_areas(s_q, s_kv, self.block_shape, self.causal)
        if self.lists is None:
            return heads * float(areas.sum())
        columns = signed(self.lists)
        picked = np.take_along_axis(np.broadcast_to(areas, (*columns.shape[:-2], *areas.shape)), np.maximum(columns, 0), axis=-1)
        return heads * float(np.where(columns >= 0, picked, 0).sum(axis=(-1, -2)).mean())

    @functools.cached_property
    def mask(self) -> np.ndarray | None:
        """(B or 1, H or 1, S_q, S_kv) bool, True where the list lets a query attend a key; None without a list."""
        shape = self.views[0].shape[2], self.views[1].shape[2]
        return None if self.lists is None else sabi.to_token_mask(self.lists, *shape, self.block_shape)

    @property
    def flops(self) -> float:
        """Counts a multiply and an add per pair and dimension, for the scores and for the values."""
        return 2.0 * (self.views[0].shape[3] + self.views[2].shape[3]) * self.pairs

    def call(self, threads: int, library: ModuleType = blitz_attn, **more: Any) -> Call:
        """A call that writes into `out`."""
        options = self.options | {"block_shape": self.block_shape, "out": self.out, "num_threads": threads} | more
        return lambda: library.block_sparse_attention(self.q, self.k, self.v, self.lists, **options)

    def work(self) -> Work:
        return Work(self.flops, float(sum(x.nbytes for x in (self.q, self.k, self.v, self.out))), self.call, self.out)

    def exact_rows(self, rows: np.ndarray) -> Iterator[tuple[tuple[Any, ...], np.ndarray]]:
        """Yields, for one KV head at a time (to save memory), the index of its query heads in (B, H) and the float64 results of some query
        rows."""
        q, k, v = self.views[:3]
        group = q.shape[1] // k.shape[1]
        seen = np.stack([0 * rows, rows + k.shape[2] - q.shape[2] + 1], axis=1) if self.causal else None
        for b, g in np.ndindex(k.shape[:2]):
            heads = slice(g * group, (g + 1) * group)
            lists = None
            if self.lists is not None:  # the rows become a problem of their own, with blocks of one query
                lists = signed(self.lists[b % len(self.lists)][None, :, rows // self.block_shape[0]])
                lists = lists if lists.shape[1] == 1 else lists[:, heads]
            here = slice(b, b + 1)
            yield (here, heads), reference.block_sparse_attention(
                q[here, heads][:, :, rows], k[here, g : g + 1], v[here, g : g + 1], lists, block_shape=(1, self.block_shape[1]),
                kv_ranges=seen, scale=self.options.get("scale"), dtype=self.bits,
            )  # fmt: skip

    def compared(self, out: np.ndarray, wanted: int = CHECKED_ROWS, seed: int = 0) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Rows of `out`, a (B, H, S, D) result, and the same rows of the float64 reference: at most `wanted` rows per head, 0 for all."""
        s_q = out.shape[2]
        rows = np.arange(s_q)
        if 0 < wanted < s_q:  # the first, the last and random ones between
            rows = np.unique([0, s_q - 1, *np.random.default_rng(seed).integers(0, s_q, max(wanted - 2, 0))])
        for place, exact in self.exact_rows(rows):
            yield testing.to_float64(out[place][:, :, rows], self.bits if out.dtype == np.uint16 else None), exact

    def is_equal(self, wanted: int = CHECKED_ROWS, seed: int = 0) -> bool:
        """Whether `out` was written everywhere, and sampled rows are right."""
        return not poisoned(self.out) and all(
            np.allclose(got, exact, rtol=RTOL, atol=ATOL) for got, exact in self.compared(self.views[3], wanted, seed)
        )

    def error(self, out: np.ndarray) -> float:
        """Relative error of sampled rows of a result by Frobenius norms; infinite if the result is not finite."""
        got, exact = (np.concatenate([x.reshape(-1) for x in parts]) for parts in zip(*self.compared(out), strict=True))
        return testing.error_of(got, exact).relative


@dataclass
class Gradients:
    """The gradients of attention over (B, H, S, D) arrays, for a random dout."""

    asked: Attention
    seed: int

    def __post_init__(self) -> None:
        asked, (q, k, v) = self.asked, self.asked.views[:3]
        self.options = {name: x for name, x in asked.options.items() if name != "layout"} | {"block_shape": asked.block_shape}
        self.dout = testing.make_qkv(*q.shape[:2], k.shape[1], q.shape[2], k.shape[2], q.shape[3], dtype=asked.dtype, seed=self.seed + 1)[0]
        self.saved = blitz_attn.block_sparse_attention(q, k, v, asked.lists, return_lse=True, **self.options)
        self.grads = tuple(np.zeros_like(x) for x in (q, k, v))

    def work(self) -> Work:
        """Counts five products per query-key pair."""
        moved = 8.0 * self.dout.nbytes
        return Work(2.5 * self.asked.flops, moved, self.call, self.grads[0])

    def call(self, threads: int, library: ModuleType = blitz_attn) -> Call:
        """A call that writes into `grads`."""
        arrays = (self.dout, *self.asked.views[:3], *self.saved, self.asked.lists)
        return lambda: library.block_sparse_attention_backward(*arrays, grads=self.grads, num_threads=threads, **self.options)

    def poison(self) -> None:
        for grad in self.grads:
            poison(grad)

    def is_equal(self) -> bool:
        """Whether the first head's gradients equal the float64 reference's, by norms."""
        lists = None if self.asked.lists is None else self.asked.lists[:, :1]
        q, k, v, dout = (x[:, :1] for x in (*self.asked.views[:3], self.dout))
        saved = reference.block_sparse_attention(q, k, v, lists, return_lse=True, **self.options)
        exact = reference.block_sparse_attention_backward(dout, q, k, v, *saved, lists, **self.options)
        errors = (testing.error_of(x[:, :1], right, self.asked.dtype).relative for x, right in zip(self.grads, exact, strict=True))
        return max(errors) <= LARGEST_ERROR[self.asked.dtype]


def _in_layout(x: np.ndarray, layout: str) -> tuple[np.ndarray, np.ndarray]:
    """A copy of a (B, H, S, D) array in `layout`, and a (B, H, S, D) view of the copy."""
    laid = testing.to_layout(x, layout)
    batch, heads, tokens, dim = x.shape
    return laid, laid if layout == "BNSD" else laid.reshape(batch, tokens, heads, dim).swapaxes(1, 2)


def lay_out(q: np.ndarray, k: np.ndarray, v: np.ndarray, dtype: str, layout: str = "BNSD", **options: Any) -> Attention:
    """Attention over (B, H, S, D) arrays in `layout`; `options` go to every call."""
    options |= {"layout": layout, **bits_options(q)}
    if layout == "BSH":
        options |= {"num_heads": q.shape[1], "num_kv_heads": k.shape[1]}
    if layout == "TND":
        options["cu_seqlens_q"] = np.arange(q.shape[0] + 1, dtype=np.int64) * q.shape[2]
        options["cu_seqlens_kv"] = np.arange(k.shape[0] + 1, dtype=np.int64) * k.shape[2]
    laid = [_in_layout(x, layout) for x in (q, k, v, np.zeros((*q.shape[:-1], v.shape[-1]), q.dtype))]
    arrays, views = zip(*laid, strict=True)
    return Attention(*arrays, views, dtype, options)


@functools.lru_cache(maxsize=1)  # cells that differ only in their lists share operands
def draw(
    dtype: str, heads: int, tokens: int, head_dim: int, *, batch: int = 1, kv_heads: int | None = None, queries: int | None = None,
    layout: str = "BNSD", seed: int = 1234, causal: bool = False,
) -> Attention:  # fmt: skip
    """Dense or causal attention over random operands."""
    q, k, v = testing.make_qkv(batch, heads, kv_heads or heads, queries or tokens, tokens, head_dim, dtype=dtype, seed=seed)
    return lay_out(q, k, v, dtype, layout, causal=causal)


def is_feasible(tokens: int, block_shape: tuple[int, int], sparsity: float, frame: Any = None) -> bool:
    """Whether a list of this sparsity exists: the frame fits into it and no row is left empty."""
    grid = testing.BlockGrid(tokens, tokens, *block_shape)
    return sparsity == 0 or testing.is_block_sparse_pattern_feasible(grid, frame, sparsity)


# ---- Paged caches: random tokens on pages in random order -------------------------------------------------------

ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1, "float8_e4m3": 1}
QUANTISED = ("int8", "float8_e4m3")
CELL_BYTES = {"q8_0": 34, "q4_0": 18, "q4_1": 20}  # per 32 numbers, factors included
PAIRS = {f"{k}+{v}": (k, v) for k in CELL_BYTES for v in CELL_BYTES if k != v}  # formats of K and V
CACHE_DTYPES = (*ITEM_BYTES, *CELL_BYTES, *PAIRS)
SCALE_BYTES = 4  # one float32 per token and KV head
DRAWN_TOKENS = 4099  # tokens drawn at random; a cache repeats them. A prime number, so that pages differ


def token_bytes(dtype: str, kv_heads: int, head_dim: int) -> int:
    """Bytes of K and V of one token in all KV heads, scales included."""
    if dtype in CELL_BYTES or dtype in PAIRS:
        return sum(kv_heads * head_dim // 32 * CELL_BYTES[x] for x in PAIRS.get(dtype, (dtype, dtype)))
    return 2 * kv_heads * (head_dim * ITEM_BYTES[dtype] + (SCALE_BYTES if dtype in QUANTISED else 0))


@dataclass
class Cache:
    """K and V in pages, with scales for int8 and float8_e4m3."""

    dtype: str
    k: np.ndarray  # (pages, page_size, H_kv, D)
    v: np.ndarray
    memory: np.ndarray  # the bytes of k and v together
    scales: dict[str, np.ndarray] = field(default_factory=dict)  # k_scale and v_scale, for int8 and float8_e4m3
    bits: dict[str, Any] = field(default_factory=dict)  # kv_dtype, where the arrays are bare bits

    def values(self, which: str, pages: np.ndarray, head: int) -> np.ndarray:
        """The float64 values of one KV head on the listed pages of `which` (k or v), (pages * page_size, D)."""
        raw = getattr(self, which)[pages, :, head]
        scale = self.scales.get(f"{which}_scale")
        if scale is not None:
            raw = blitz_attn.dequantize_kv(raw, scale[pages, :, head])
        of = PAIRS.get(self.dtype, (self.dtype, self.dtype))["kv".index(which)]
        if of in CELL_BYTES:
            raw = blitz_attn.dequantize_rows(raw, of)
        return testing.to_float64(raw.reshape(-1, raw.shape[-1]), bits_options(raw).get("dtype"))


def _on_a_line(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """An array that begins on a cache line, as arrays of other libraries do. NumPy's large arrays begin 16 bytes after the start of one."""
    size = int(np.prod(shape)) * dtype.itemsize
    memory = np.empty(size + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + size].view(dtype).reshape(shape)


def _fill_pages(pages: np.ndarray, part: np.ndarray) -> np.ndarray:
    """Fill (pages, page_size, ...) with the tokens of `part`, repeated."""
    tokens = pages.reshape(-1, *pages.shape[2:])
    for start in range(0, len(tokens), len(part)):
        tokens[start : start + len(part)] = part[: len(tokens) - start]
    return pages


@functools.lru_cache(maxsize=1)  # cells that differ only in their queries share a cache
def draw_cache(dtype: str, pages: int, page: int, kv_heads: int, head_dim: int, seed: int) -> Cache:
    """A cache of random tokens."""
    rng = np.random.default_rng(seed)
    scales, parts = {}, []
    for name, of in zip("kv", PAIRS.get(dtype, (dtype, dtype)), strict=True):
        drawn = rng.standard_normal((min(DRAWN_TOKENS, pages * page), kv_heads, head_dim), dtype=np.float32)
        if dtype in QUANTISED:
            drawn, scale = blitz_attn.quantize_kv(drawn, dtype)
            scales[f"{name}_scale"] = _fill_pages(_on_a_line((pages, page, kv_heads), scale.dtype), scale)
        else:
            drawn = blitz_attn.quantize_rows(drawn, of) if of in CELL_BYTES else testing.round_to(drawn, of)
        parts.append(drawn)
    sizes = [pages * page * part[0].nbytes for part in parts]
    memory = _on_a_line((sum(sizes),), np.dtype(np.uint8))
    k, v = (
        _fill_pages(whole.view(part.dtype).reshape(pages, page, *part.shape[1:]), part)
        for whole, part in zip(np.split(memory, [sizes[0]]), parts, strict=True)
    )
    bits = {"kv_dtype": PAIRS.get(dtype, dtype)} if k.dtype in (np.uint16, np.uint8) else {}
    return Cache(dtype, k, v, memory, scales, bits)


def draw_tables(lengths: Sequence[int], page: int, pages: int, rng: np.random.Generator) -> np.ndarray:
    """Block tables (B, W) int32 with the pages of a pool in random order, as in a busy pool. No page is used again before all have been
    used."""
    counts = [-(-length // page) for length in lengths]
    order = np.concatenate([rng.permutation(pages) for _ in range(-(-sum(counts) // pages))])
    tables = np.full((len(counts), max(counts)), -1, np.int32)
    for row, end in enumerate(np.cumsum(counts)):
        tables[row, : counts[row]] = order[end - counts[row] : end]
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
    def bits(self) -> dict[str, Any]:
        """The options that name dtypes, if the arrays hold bare bits."""
        return self.cache.bits | bits_options(self.q)

    def work(self) -> Work:
        """Bytes: K, V and their scales, once. Flops: a multiply and an add per element of K and V, for each query head of the group."""
        tokens = int(self.lengths.sum())
        moved = tokens * token_bytes(self.cache.dtype, self.cache.k.shape[2], self.q.shape[2])
        return Work(4.0 * tokens * self.q.shape[1] * self.q.shape[2], moved, self.call, self.out)

    def plan(self, threads: int | None = None, library: ModuleType = blitz_attn) -> blitz_attn.PagedPlan:
        """The plan of tables and lengths. A real decode step makes one plan for all layers."""
        return library.PagedPlan(self.tables, self.lengths, page_size=self.cache.k.shape[1], num_threads=threads, **self.bits)

    def call(self, threads: int, library: ModuleType = blitz_attn) -> Call:
        """A call that writes into `out`."""
        plan, arrays = self.plan(threads, library), (self.q, self.cache.k, self.cache.v)
        return lambda: plan.attention(*arrays, out=self.out, **self.cache.scales)

    def pages(self, request: int) -> np.ndarray:
        """The pages that a request uses, in the order of its tokens."""
        return self.tables[request, : -(-int(self.lengths[request]) // self.cache.k.shape[1])]

    def request(self, index: int, which: str) -> np.ndarray:
        """K or V of one request as a contiguous (H_kv, S, D) array in the cache's own dtype."""
        tokens = getattr(self.cache, which)[self.pages(index)]
        return np.ascontiguousarray(tokens.reshape(-1, *tokens.shape[2:])[: self.lengths[index]].swapaxes(0, 1))

    def head_is_equal(self, out: np.ndarray, request: int, head: int, pages: np.ndarray, tokens: int) -> bool:
        """Whether the outputs of one KV head's group equal float64 attention over the first `tokens` tokens of `pages`."""
        group = self.q.shape[1] // self.cache.k.shape[2]
        part = slice(head * group, (head + 1) * group)
        q, got = (testing.to_float64(x[request, part], bits_options(x).get("dtype"))[None, :, None] for x in (self.q, out))
        k, v = (self.cache.values(which, pages, head)[None, None, :tokens] for which in ("k", "v"))
        return np.allclose(got, reference.block_sparse_attention(q, k, v), rtol=RTOL, atol=ATOL)

    def is_equal(self, out: np.ndarray) -> bool:
        """Whether `out` (B, H, D) was written everywhere, and is right for the first and last KV head of the first and last request."""
        places = ((b, head) for b in {0, len(self.lengths) - 1} for head in {0, self.cache.k.shape[2] - 1})
        return not poisoned(out) and all(self.head_is_equal(out, b, head, self.pages(b), int(self.lengths[b])) for b, head in places)


def query_dtype(dtype: str) -> str:
    """The dtype of queries and outputs for a cache of `dtype`."""
    return dtype if ITEM_BYTES.get(dtype, 1) > 1 else "bfloat16"


def draw_decode(lengths: Sequence[int], heads: int, kv_heads: int, head_dim: int, page: int, dtype: str, seed: int) -> Decode:
    """A decode step over random operands."""
    rng = np.random.default_rng([seed, 1])  # not the seed of the cache, whose random numbers would make queries equal to keys
    pages = sum(-(-length // page) for length in lengths)
    cache = draw_cache(dtype, pages, page, kv_heads, head_dim, seed)
    q = testing.round_to(rng.standard_normal((len(lengths), heads, head_dim), dtype=np.float32), query_dtype(dtype))
    return Decode(q, cache, draw_tables(lengths, page, pages, rng), np.asarray(lengths, np.int64), np.zeros_like(q))


# ---- The fixed set -------------------------------------------------------------------------------------------------

TOKENS, HEADS = 2048, 2  # in forward and backward passes
KV_HEADS, HEAD_DIM = 8, 128
LARGE_BYTES = 64 << 20  # K and V of a decode step: beyond any L2
SEED = 1234
PROBE_SECONDS = 0.02
SETTLE_SECONDS = 0.01
SUSTAINED = "P_sustained"  # the name of P in tables and records: see roofline.py
READ_BINDS_BELOW = 64.0  # flop/byte; operations above this are not bound by reading on any machine


@dataclass(frozen=True)
class Operation:
    """One call to measure, and how it is drawn."""

    name: str
    dtype: str
    draw: Callable[[], Work]
    level: str | None = None  # None stands for the level in use

    @property
    def word(self) -> str:
        """The name as a cell of a table."""
        return self.name.replace(", ", ",").replace(" ", "_")


def attention(dtype: str, tokens: int, *, heads: int = HEADS, head_dim: int = HEAD_DIM, block: int = 0, **rules: Any) -> Attention:
    """Attention of one of the set's sizes. If `block` is not 0, it has lists of sparsity 0.9, with blocks of `block` tokens."""
    asked = draw(dtype, heads, tokens, head_dim, seed=SEED, **rules)
    return asked.sparse(0.9, (block, block), SEED) if block else asked


def forward(name: str, dtype: str, tokens: int | None = None, *, level: str | None = None, **asked: Any) -> Operation:
    return Operation(name, dtype, lambda: attention(dtype, tokens or TOKENS, **asked).work(), level)


def backward(name: str, dtype: str, *, level: str | None = None, **asked: Any) -> Operation:
    return Operation(name, dtype, lambda: Gradients(attention(dtype, TOKENS, **asked), SEED).work(), level)


def _step(dtype: str, group: int, page: int, kv_bytes: int | None = None) -> Decode:
    tokens = (kv_bytes or LARGE_BYTES) // token_bytes(dtype, KV_HEADS, HEAD_DIM)
    return draw_decode([tokens], KV_HEADS * group, KV_HEADS, HEAD_DIM, page, dtype, SEED)


def decode(dtype: str, group: int, level: str | None = None, kv_bytes: int | None = None) -> Operation:
    """A decode step of one request whose K and V have `kv_bytes` bytes, with `group` query heads per KV head."""
    return Operation(f"decode G={group}", dtype, lambda: _step(dtype, group, 128, kv_bytes).work(), level)


def selection(dtype: str) -> Work:
    """The choice of 32 pages by Quest, from the summaries of a cache. The pages are small, so that there are enough summaries to
    measure."""
    page = 16
    step = _step(dtype, 4, page)
    pages = step.tables.shape[1]
    rows = -(-pages // page)
    high, low = np.zeros((2, rows, page, KV_HEADS, HEAD_DIM), step.cache.k.dtype)
    table = np.arange(rows, dtype=np.int32)[None]
    bits = bits_options(step.cache.k)
    blitz_attn.quest_prefill_metadata(step.cache.k, step.tables, step.lengths, table, high, low, **bits)
    picked = np.zeros((1, KV_HEADS, 32), np.int32)

    def call(threads: int, library: ModuleType = blitz_attn) -> Call:
        def run() -> None:
            library.set_num_threads(threads)  # in place of num_threads= of the call
            picked[...] = library.quest_block_select_paged(step.q, high, low, table, step.lengths, 32, **bits)
            library.set_num_threads(None)

        return run

    elements = 2.0 * pages * KV_HEADS * HEAD_DIM
    return Work(2.0 * elements, elements * ITEM_BYTES[dtype], call, picked)  # flops per element: a multiply, and a maximum or an add


# Models that choose their own tokens: query heads, KV heads, D, D_v, keys per block, blocks per query.
LISTED = {
    "DSA": (128, 1, 576, 512, 1, 2048),
    "DeepSeek-V4": (64, 1, 512, 512, 1, 512),
    "QSA": (16, 2, 256, 256, 4, 512),
    "M3": (64, 4, 128, 128, 128, 16),
}
LISTED_QUERIES, LISTED_KEYS = 32, 16384


def query_lists(kv_heads: int, columns: int, width: int, shared: float) -> np.ndarray:
    """Random lists, one per query and KV head. A list has the share `shared` of its entries in common with the list of the query before."""
    rng = np.random.default_rng(SEED)
    lists = np.argsort(rng.random((kv_heads, LISTED_QUERIES, columns)), axis=-1)[..., :width].astype(np.int32)
    for head in lists:
        for before, row in itertools.pairwise(head):
            kept = rng.choice(before, int(width * shared), replace=False)
            others = rng.permutation(np.setdiff1d(np.arange(columns), kept))
            row[:] = np.concatenate([kept, others[: width - len(kept)]])
    return lists[None]


def listed(model: str, dtype: str, shared: float | None) -> Work:
    """Attention of some queries, each over a list of its own. Where `shared` is None, there are no lists, but as many keys as a list
    has."""
    heads, kv_heads, head_dim, v_dim, block, width = LISTED[model]
    keys = LISTED_KEYS if shared is not None else block * width
    q, k, v = testing.make_qkv(1, heads, kv_heads, LISTED_QUERIES, keys, head_dim, dtype=dtype, seed=SEED)
    asked = lay_out(q, k, np.ascontiguousarray(v[..., :v_dim]), dtype)
    if shared is not None:
        asked = asked.over(query_lists(kv_heads, keys // block, width, shared), (1, block))
    flops = 2.0 * heads * LISTED_QUERIES * block * width * (head_dim + v_dim)
    return replace(asked.work(), flops=flops)


def list_operations() -> list[Operation]:
    """Attention over lists of single queries, and dense rows of the same heads. Both kinds count equally many flops, so that their
    shares of F can be compared."""
    kinds = {"dense": None, "random": 0.0, "3/4 shared": 0.75}
    return [
        Operation(f"{model}, {kind}", dtype, functools.partial(listed, model, dtype, shared))
        for model in LISTED for dtype in ("float32", "bfloat16") for kind, shared in kinds.items()
    ]  # fmt: skip


def _kernel(dtype: str, level: str) -> str:
    """The level that has the kernels which run attention over `dtype` at `level`."""
    return next(own for name, own in _core.kernels(level) if name.startswith(f"attend_{dtype}_"))


def every_operation() -> list[Operation]:
    """The fixed set: all operations at the level in use, and the main operations at each lower level, except portable,
    whose kernels the level in use replaces."""
    own, main = _core.isa_active(), ("float32", "bfloat16")
    operations = [forward("dense", dtype) for dtype in DTYPES[:3]]
    operations += [forward("dense D=64", dtype, head_dim=64) for dtype in main]
    operations += [forward("causal", dtype, causal=True) for dtype in main]
    operations += [forward(f"sparse 0.9, {block}x{block}", dtype, 2 * TOKENS, block=block) for block in (128, 64) for dtype in main]
    operations += [backward("backward", dtype) for dtype in main]
    operations += [backward("backward, sparse 0.9", "bfloat16", block=128)]
    operations += [forward("few queries (16)", dtype, 4096, heads=8, queries=16) for dtype in main]
    operations += [decode(dtype, group) for dtype in (*main, "int8") for group in (1, 8)]
    operations += [Operation("select", "bfloat16", lambda: selection("bfloat16"))]
    operations += [forward("small call", "float32", 16, heads=1, head_dim=64)]  # the cost of a call by itself
    for level in blitz_attn.isa_levels(available=True)[1:]:
        if level == own:
            break
        new = [dtype for dtype in DTYPES[:3] if _kernel(dtype, level) == level != _kernel(dtype, own)]
        operations += [forward("dense", dtype, level=level) for dtype in new]
        if "float32" in new:
            operations += [backward("backward", "float32", level=level), decode("bfloat16", 8, level=level)]
    return operations


def chosen(operations: Sequence[Operation], words: Sequence[str] | None) -> list[Operation]:
    """The operations with one of the words in their name or dtype; all operations if there are no words."""
    return [one for one in operations if not words or any(word in f"{one.name} {one.word} {one.dtype}" for word in words)]


# ---- Measuring the set against the limits of the machine ---------------------------------------------------------


@dataclass
class Point:
    """Measurements of an operation with one number of threads, turn by turn."""

    operation: Operation
    work: Work
    threads: int
    level: str  # the level whose kernels ran
    bound: str  # the limit that binds: F, P_sustained or R (roofline.py explains them)
    seconds: list[float]
    shares: list[float]  # the least time that the limit allows, over the measured time

    def values(self) -> dict[str, Any]:
        """The cells that the tables of roofline.py and speed.py share."""
        return {
            "operation": self.operation.word,
            "dtype": self.operation.dtype,
            "level": self.level,
            "threads": self.threads,
            "Time_[usec]": statistics.median(self.seconds) * 1e6,
            "Bound_by": self.bound,
        }


def _probe(kind: str, level: str, threads: int, size: int = 0) -> Callable[[], float]:
    """A function that measures a limit."""
    probes: dict[str, Callable[[], float]] = {
        "F": lambda: _core.probe_flops(level, PROBE_SECONDS, threads),
        SUSTAINED: lambda: _core.probe_tile_flops(level, PROBE_SECONDS, threads),
        "R": lambda: _core.probe_read(level, size, PROBE_SECONDS, threads),
    }
    return probes[kind]


@functools.cache
def _has_tiles(level: str) -> bool:
    return _core.probe_tile_flops(level, 0.001, 1) > 0


def peak_name(dtype: str, level: str) -> str:
    """The limit of arithmetic in a dtype: P_sustained for bfloat16 on a CPU with tiles, else F."""
    return SUSTAINED if dtype == "bfloat16" and _has_tiles(level) else "F"


def _limits_of(work: Work, dtype: str, level: str, threads: int) -> list[tuple[Any, ...]]:
    """The limits that may bind, as arguments of `_probe`. Sizes to read are rounded, so that operations of similar size share a probe."""
    limits: list[tuple[Any, ...]] = [(peak_name(dtype, level), level, threads)]
    if work.flops / work.bytes < READ_BINDS_BELOW:
        size = work.bytes / threads
        unit = 1 << 20 if size >= 1 << 21 else 4096
        limits.append(("R", level, threads, max(1, round(size / unit)) * unit))
    return limits


def _at(level: str, call: Call) -> Call:
    def run() -> None:
        with blitz_attn.isa(level):
            call()

    return run


def measured(operations: Sequence[Operation], threads: Sequence[int], args: Any, progress: Progress) -> Iterator[Point]:
    """Measure the operations with each number of threads, in turns with the limits F and R that may bind them.

    P is measured right before and right after each sample, by the same threads, because products of tiles soon change the clock.
    """
    own = _core.isa_active()
    probes: dict[tuple[Any, ...], Contender] = {}
    contenders: list[Contender] = []
    asked: dict[Contender, tuple[Operation, Work, int, str, list[tuple[Any, ...]]]] = {}
    for operation in operations:
        level, work = operation.level or own, operation.draw()
        for count in threads:
            limits = _limits_of(work, operation.dtype, level, count)
            for limit in limits:
                if limit not in probes and limit[0] != SUSTAINED:
                    probes[limit] = Contender(f"{limit[0]} {level}", _probe(*limit), 0.0)
                    contenders.append(probes[limit])
            call = work.call(count)
            run = call if level == own else _at(level, call)
            poison(work.out)
            run()
            if poisoned(work.out):
                raise AssertionError(f"{operation.name}, {operation.dtype}, {level}: elements of the output were not written")
            around = _probe(*limits[0]) if limits[0][0] == SUSTAINED else None
            contenders.append(Contender(operation.name, run, settle=SETTLE_SECONDS, limit=around))
            asked[contenders[-1]] = operation, work, count, level, limits
    list(in_turns(contenders, args, progress))
    for contender, (operation, work, count, level, limits) in asked.items():
        shares, bounds = [], []
        for turn, seconds in enumerate(contender.samples):
            rates = {limit[0]: probes.get(limit, contender).values[turn] * 1e9 for limit in limits}
            allowed = {name: (work.bytes if name == "R" else work.flops) / rate for name, rate in rates.items()}
            bounds.append(max(allowed, key=lambda name: allowed[name]))
            shares.append(max(allowed.values()) / seconds)
        yield Point(operation, work, count, level, statistics.mode(bounds), contender.samples, shares)
