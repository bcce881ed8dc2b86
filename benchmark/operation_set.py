"""A small fixed set of operations, each held against what the machine allows it in the same turns.

They are the points of roofline.py's figure and the rows of speed.py's memory. The set is small so that measuring it can be a habit; a
number here that changes makes old records worthless.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

import _bench  # noqa: F401  (finds the library of this checkout)
import blitz_attn
import check
from _bench import Contender, Progress, in_turns
from blitz_attn import _core, sabi, testing
from operands import ITEM_BYTES, Decode, bits_options, dense_pairs, draw_decode, flops, kept_pairs, token_bytes

DTYPES = ("float32", "float16", "bfloat16")
TOKENS, HEADS = 2048, 2  # of the forward and backward passes
LARGE_BYTES = 64 << 20  # K and V of a decode step: beyond any L2
SEED = 1234
PROBE_SECONDS = 0.02
SETTLE_SECONDS = 0.01
READ_BINDS_BELOW = 64.0  # flop a byte; above, no machine's reads bind

Call = Callable[[], Any]
Make = Callable[[int, ModuleType], Call]  # the call for a number of threads, of this build of the library or of another one


@dataclass(frozen=True)
class Operation:
    """One call to measure. `prepare` draws its operands; it returns who makes the call, and the array that is filled."""

    name: str
    dtype: str
    flops: float
    bytes: float  # operands and results, each counted once
    prepare: Callable[[], tuple[Make, np.ndarray]]
    level: str | None = None  # None: the level in use

    @property
    def intensity(self) -> float:
        return self.flops / self.bytes


@dataclass
class Point:
    """What was measured of an operation with a number of threads, turn by turn."""

    operation: Operation
    threads: int
    level: str  # whose kernels ran
    bound: str  # the limit that binds: F, P or R
    seconds: list[float]
    shares: list[float]  # the least time that the limit allows, over the time

    @property
    def key(self) -> str:
        """What is measured; the same in every run on a machine."""
        return f"{self.operation.name}, {self.operation.dtype}, {self.level}, {self.threads}"

    @property
    def median(self) -> float:
        return statistics.median(self.shares)

    @property
    def rate(self) -> float:
        """GFLOP/s."""
        return self.operation.flops / statistics.median(self.seconds) / 1e9


# ---- The set -------------------------------------------------------------------------------------------------------


def _qkv(dtype: str, tokens: int, head_dim: int, heads: int = HEADS, queries: int | None = None) -> tuple[np.ndarray, ...]:
    return testing.make_qkv(1, heads, heads, queries or tokens, tokens, head_dim, dtype=dtype, seed=SEED)


def forward(
    name: str,
    dtype: str,
    *,
    head_dim: int = 128,
    tokens: int = TOKENS,
    block: int = 0,
    causal: bool = False,
    level: str | None = None,
) -> Operation:
    """The forward pass: dense, causal, or over lists of 0.9 sparsity of blocks of `block` tokens."""
    lists = sabi.random_with_frame(tokens, tokens, (block, block), 0.9, heads=HEADS, seed=SEED) if block else None
    pairs = kept_pairs(lists, tokens, tokens, (block, block)) if lists is not None else dense_pairs(tokens, tokens, causal)

    def prepare() -> tuple[Make, np.ndarray]:
        q, k, v = _qkv(dtype, tokens, head_dim)
        out = np.zeros_like(q)
        options: dict[str, Any] = {"block_shape": (block or 128,) * 2, "causal": causal, "out": out, **bits_options(q)}
        return lambda threads, library: functools.partial(
            library.block_sparse_attention, q, k, v, lists, num_threads=threads, **options
        ), out  # fmt: skip

    return Operation(
        name, dtype, HEADS * flops(pairs, head_dim, head_dim), 4.0 * HEADS * tokens * head_dim * ITEM_BYTES[dtype], prepare, level
    )


def few(dtype: str, queries: int) -> Operation:
    """A few queries over many keys, without pages."""
    heads, tokens, head_dim = 8, 4096, 128

    def prepare() -> tuple[Make, np.ndarray]:
        q, k, v = _qkv(dtype, tokens, head_dim, heads, queries)
        out = np.zeros_like(q)
        return lambda threads, library: functools.partial(
            library.block_sparse_attention, q, k, v, out=out, num_threads=threads, **bits_options(q)
        ), out  # fmt: skip

    moved = 2.0 * heads * (tokens + queries) * head_dim * ITEM_BYTES[dtype]
    return Operation(f"few queries ({queries})", dtype, heads * flops(queries * tokens, head_dim, head_dim), moved, prepare)


def small(dtype: str) -> Operation:
    """A call with next to nothing to do: what a call costs by itself."""
    tokens, head_dim = 16, 64

    def prepare() -> tuple[Make, np.ndarray]:
        q, k, v = _qkv(dtype, tokens, head_dim, 1)
        out = np.zeros_like(q)
        return lambda threads, library: functools.partial(
            library.block_sparse_attention, q, k, v, out=out, num_threads=threads, **bits_options(q)
        ), out  # fmt: skip

    return Operation("small call", dtype, flops(tokens**2, head_dim, head_dim), 4.0 * tokens * head_dim * ITEM_BYTES[dtype], prepare)


def backward(name: str, dtype: str, *, sparse: bool = False, level: str | None = None) -> Operation:
    """The backward pass, five products a pair."""
    head_dim, block = 128, 128
    lists = sabi.random_with_frame(TOKENS, TOKENS, (block, block), 0.9, heads=HEADS, seed=SEED) if sparse else None
    pairs = kept_pairs(lists, TOKENS, TOKENS, (block, block)) if lists is not None else dense_pairs(TOKENS, TOKENS)

    def prepare() -> tuple[Make, np.ndarray]:
        q, k, v = _qkv(dtype, TOKENS, head_dim)
        dout = testing.make_qkv(1, HEADS, HEADS, TOKENS, TOKENS, head_dim, dtype=dtype, seed=SEED + 1)[0]
        options: dict[str, Any] = {"block_shape": (block, block), **bits_options(q)}
        out, lse = blitz_attn.block_sparse_attention(q, k, v, lists, return_lse=True, **options)
        grads = tuple(np.zeros_like(x) for x in (q, k, v))
        return lambda threads, library: functools.partial(
            library.block_sparse_attention_backward, dout, q, k, v, out, lse, lists, grads=grads, num_threads=threads, **options
        ), grads[0]  # fmt: skip

    return Operation(name, dtype, HEADS * pairs * 10.0 * head_dim, 8.0 * HEADS * TOKENS * head_dim * ITEM_BYTES[dtype], prepare, level)


KV_HEADS, HEAD_DIM = 8, 128


def _decode_tokens(dtype: str, kv_bytes: int | None = None) -> int:
    return (kv_bytes or LARGE_BYTES) // token_bytes(dtype, KV_HEADS, HEAD_DIM)


def _draw(dtype: str, group: int, tokens: int, page: int = 128) -> Decode:
    return draw_decode([tokens], KV_HEADS * group, KV_HEADS, HEAD_DIM, page, dtype, SEED)


def decode(dtype: str, group: int, level: str | None = None, kv_bytes: int | None = None) -> Operation:
    """A decode step of one request over pages of so many bytes, `group` query heads a KV head."""
    tokens = _decode_tokens(dtype, kv_bytes)

    def prepare() -> tuple[Make, np.ndarray]:
        step = _draw(dtype, group, tokens)
        return step.call, step.out

    work = 4.0 * tokens * KV_HEADS * group * HEAD_DIM
    return Operation(f"decode G={group}", dtype, work, tokens * token_bytes(dtype, KV_HEADS, HEAD_DIM), prepare, level)


def select(dtype: str) -> Operation:
    """The choice of 32 blocks by Quest, from the summaries of a cache. Small pages make it worth measuring."""
    page = 16
    pages = _decode_tokens(dtype) // page

    def prepare() -> tuple[Make, np.ndarray]:
        step = _draw(dtype, 4, _decode_tokens(dtype), page)
        rows = -(-pages // page)
        high, low = np.zeros((2, rows, page, KV_HEADS, HEAD_DIM), step.cache.k.dtype)
        table = np.arange(rows, dtype=np.int32)[None]
        bits = bits_options(step.cache.k)
        blitz_attn.quest_prefill_metadata(step.cache.k, step.tables, step.lengths, table, high, low, **bits)
        picked = np.zeros((1, KV_HEADS, 32), np.int32)

        def call(threads: int, library: ModuleType) -> Call:
            def run() -> None:
                library.set_num_threads(threads)  # selection has no argument for it
                picked[...] = library.quest_block_select_paged(step.q, high, low, table, step.lengths, 32, **bits)
                library.set_num_threads(None)

            return run

        return call, picked

    elements = 2.0 * pages * KV_HEADS * HEAD_DIM
    return Operation("select", dtype, 2.0 * elements, elements * ITEM_BYTES[dtype], prepare)  # a multiply, and a maximum or an add


def _kernel(dtype: str, level: str) -> str:
    """The level whose kernels attend to a dtype at `level`."""
    return next(own for name, own in _core.kernels(level) if name.startswith(f"attend_{dtype}_"))


def every_operation() -> list[Operation]:
    """The set: at the level in use, and the main ones at the levels below it that have kernels of their own."""
    own = _core.isa_active()
    operations = [forward("dense", dtype) for dtype in DTYPES]
    operations += [forward("dense D=64", dtype, head_dim=64) for dtype in ("float32", "bfloat16")]
    operations += [forward("causal", dtype, causal=True) for dtype in ("float32", "bfloat16")]
    for block in (128, 64):
        operations += [forward(f"sparse 0.9, {block}x{block}", dtype, tokens=2 * TOKENS, block=block) for dtype in ("float32", "bfloat16")]
    operations += [backward("backward", dtype) for dtype in ("float32", "bfloat16")]
    operations += [backward("backward, sparse 0.9", "bfloat16", sparse=True)]
    operations += [few(dtype, 16) for dtype in ("float32", "bfloat16")]
    operations += [decode(dtype, group) for dtype in ("float32", "bfloat16", "int8") for group in (1, 8)]
    operations += [select("bfloat16"), small("float32")]
    for level in blitz_attn.isa_levels(available=True)[1:]:
        if level == own:
            break
        new = [dtype for dtype in DTYPES if _kernel(dtype, level) == level != _kernel(dtype, own)]
        operations += [forward("dense", dtype, level=level) for dtype in new]
        if "float32" in new:
            operations += [backward("backward", "float32", level=level), decode("bfloat16", 8, level=level)]
    return operations


# ---- Measuring -----------------------------------------------------------------------------------------------------


class Limits:
    """F, P and R of the turns, measured where an operation first needs them in a turn."""

    def __init__(self) -> None:
        self.found: dict[tuple, list[float]] = {}

    def contender(self, kind: str, level: str, threads: int, size: int = 0) -> Contender:
        key = (kind, level, threads, size)
        values = self.found.setdefault(key, [])

        def probe() -> None:
            if kind == "R":
                values.append(float(_core.probe_read(level, size, PROBE_SECONDS, threads)))
            else:
                ask = _core.probe_tile_flops if kind == "P" else _core.probe_flops
                values.append(float(ask(level, PROBE_SECONDS, threads)))

        return Contender(f"{kind} {level}", probe, 0.0)


def _at(level: str, call: Call) -> Call:
    def run() -> None:
        with blitz_attn.isa(level):
            call()

    return run


def _arithmetic(dtype: str, level: str) -> str:
    """P where the level multiplies tiles of the dtype, else F."""
    return "P" if dtype == "bfloat16" and _core.probe_tile_flops(level, 0.001, 1) else "F"


def _read_size(size: float) -> int:
    """Bytes a thread to read in a probe of as much memory: rounded, so that operations of about the same size share it."""
    unit = 1 << 20 if size >= 1 << 21 else 4096
    return max(1, round(size / unit)) * unit


def measured(operations: Sequence[Operation], threads: Sequence[int], repeats: int, progress: Progress) -> Iterator[Point]:
    """Measure the operations with each number of threads, all in turns with the limits that bind them."""
    own = _core.isa_active()
    limits = Limits()
    contenders: list[tuple[Any, Contender]] = []
    known: set[tuple] = set()
    progress.total = float((1 + repeats) * len(threads) * len(operations))
    for operation in operations:
        level = operation.level or own
        make, out = operation.prepare()
        for count in threads:
            needs = [(_arithmetic(operation.dtype, level), level, count, 0)]
            if operation.intensity < READ_BINDS_BELOW:
                needs.append(("R", level, count, _read_size(operation.bytes / count)))
            for need in needs:
                if need not in known:
                    known.add(need)
                    contenders.append((None, limits.contender(*need)))
            call = make(count, blitz_attn)
            check.poison(out)
            (call if level == own else _at(level, call))()
            if check.poisoned(out):
                raise AssertionError(f"{operation.name}, {operation.dtype}, {level}: elements of the output were not written")
            run = call if level == own else _at(level, call)
            contenders.append(((operation, count, level, needs), Contender(operation.name, run, 1.0, settle=SETTLE_SECONDS)))
    turns = in_turns([contender for _, contender in contenders], repeats, 1, progress)
    found = [(contenders[index][0], timing) for index, timing in turns if contenders[index][0]]
    for (operation, count, level, needs), timing in found:
        shares, bounds = [], []
        for turn, seconds in enumerate(timing.samples):
            allowed = {}
            for need in needs:
                rate = limits.found[need][1 + turn] * 1e9
                allowed[need[0]] = (operation.bytes if need[0] == "R" else operation.flops) / rate
            bounds.append(max(allowed, key=lambda name: allowed[name]))
            shares.append(max(allowed.values()) / seconds)
        yield Point(operation, count, level, statistics.mode(bounds), timing.samples, shares)
