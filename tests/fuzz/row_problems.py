"""`quantize_rows`, `dequantize_rows` and `append_paged_kv` into caches of llama.cpp's blocks, against plain loops over blocks."""

from __future__ import annotations

from typing import Any

import numpy as np

import blitz_attn

from . import arrays, checks
from .draw import Draw
from .problems import Finding, problem

MOST = {"q8_0": 127 * 65504.0, "q4_0": 8 * 65504.0, "q4_1": 65504.0}


def block(x: np.ndarray, dtype: str) -> bytes:
    """The bytes of a block of 32 numbers, computed number by number in float32."""
    x = x.astype(np.float32)
    low, high = np.float32(x[0]), np.float32(x[0])
    largest = np.float32(0)
    for number in x:
        low, high = number if number < low else low, number if number > high else high
        largest = number if abs(number) > abs(largest) else largest
    d = {"q8_0": abs(largest) / np.float32(127), "q4_0": largest / np.float32(-8), "q4_1": (high - low) / np.float32(15)}[dtype]
    with np.errstate(divide="ignore", over="ignore"):
        inverse = float(np.float32(1) / d)
    inverse = inverse if d != 0 and np.isfinite(inverse) else 0.0
    integers = []
    for number in x:
        if dtype == "q8_0":
            quotient = float(np.float32(float(number) * inverse))
            integers.append(int(np.copysign(np.floor(abs(quotient) + 0.5), quotient)) & 255)
        elif dtype == "q4_0":
            integers.append(min(15, int(float(number) * inverse + 8.5)))
        else:
            integers.append(min(15, int(np.float32(np.float32(float(number - low) * inverse) + np.float32(0.5)))))
    heads = np.array([d, low] if dtype == "q4_1" else [d], np.float16).tobytes()
    return heads + bytes(integers if dtype == "q8_0" else [integers[i] | integers[i + 16] << 4 for i in range(16)])


def rows_of(x: np.ndarray, dtype: str) -> np.ndarray:
    """The rows (..., bytes) of a float64 array (..., D)."""
    blocks = x.reshape(-1, 32)
    made = np.frombuffer(b"".join(block(b, dtype) for b in blocks), np.uint8)
    return made.reshape(*x.shape[:-1], x.shape[-1] // 32 * arrays.ROWS[dtype])


def numbers(draw: Draw, name: str, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    rng = draw.rng(name)
    x = rng.standard_normal(shape) * 2.0 ** rng.integers(-8, 9, (*shape[:-1], 1)) * draw.pick(f"{name}.size", (1.0, 1e-6, 1e-38, 30.0))
    if draw.flag(f"{name}.halves", 0.3):
        x = rng.integers(-32, 33, shape) / 2.0
    if draw.flag(f"{name}.zeros", 0.2):
        x[rng.random(shape[:-1]) < 0.3] = 0
    return arrays.rounded(x, dtype)


@problem("quantize_rows", weight=0.4)
def quantize_rows(draw: Draw) -> None:
    dtype, to = draw.pick("dtype", arrays.FLOATS), draw.pick("format", tuple(arrays.ROWS))
    kind = draw.pick("kind", arrays.kinds_for(dtype))
    named = {"dtype": "bfloat16"} if kind == "bits" else {}
    before = (draw.integer(f"shape[{i}]", 0, 4, likely=(1, 2)) for i in range(draw.integer("axes", 0, 3)))
    x = numbers(draw, "x", (*before, 32 * draw.integer("blocks", 0, 3, likely=(1,))), dtype)
    bad = x.size and draw.flag("odd", 0.15)
    if bad:
        x.reshape(-1)[draw.integer("odd.at", 0, x.size - 1)] = (np.nan, np.inf, -np.inf, MOST[to] * 1.01)[draw.pick("odd.number", (0, 1, 2, 3))]
        with np.errstate(over="ignore"):
            x = arrays.rounded(x, dtype)
        bad = not (np.abs(x) <= MOST[to]).all()
    placed = arrays.place(draw, "x", arrays.stored(x, dtype), views=arrays.views_for(kind))
    given = arrays.dressed(placed.array, dtype, kind)
    with checks.at_level(draw):
        if bad:
            checks.refused(lambda: blitz_attn.quantize_rows(given, to, **named), "x")
        else:
            checks.same_bits("rows", blitz_attn.quantize_rows(given, to, **named), rows_of(x, to))
    placed.check_unchanged()


@problem("dequantize_rows", weight=0.2)
def dequantize_rows(draw: Draw) -> None:
    of, rng = draw.pick("format", tuple(arrays.ROWS)), draw.rng("rows")
    before = tuple(draw.integer(f"shape[{i}]", 0, 4, likely=(1, 2)) for i in range(draw.integer("axes", 0, 3)))
    rows = rng.integers(0, 256, (*before, arrays.ROWS[of] * draw.integer("blocks", 0, 3, likely=(1,))), dtype=np.uint8)
    placed = arrays.place(draw, "rows", rows, last_contiguous=False)
    got = blitz_attn.dequantize_rows(placed.array, of)
    with np.errstate(invalid="ignore", over="ignore"):
        expected = arrays.numbers_of_rows(rows, of)
    if got.dtype != np.float32:
        raise Finding(f"{got.dtype}, expected float32")
    checks.near("numbers", got.astype(np.float64), expected, (np.abs(np.nan_to_num(expected)) + 2.0**20) * 2.0**-22)
    placed.check_unchanged()


@problem("append_rows", weight=0.5)
def append_rows(draw: Draw) -> None:
    """New tokens become rows in their slots, and nothing else is written. If a number is refused, nothing at all is written."""
    formats = draw.pick("k.format", tuple(arrays.ROWS)), draw.pick("v.format", tuple(arrays.ROWS))
    dtype, kv_heads = draw.pick("dtype", arrays.FLOATS), draw.integer("kv_heads", 1, 3)
    pages, size, tokens = draw.integer("pages", 1, 4), draw.integer("page_size", 1, 20, likely=(1, 4, 16)), draw.integer("tokens", 0, 9, likely=(1,))
    hnd, rng = draw.flag("hnd"), draw.rng("slots")
    slots = rng.permutation(pages * size)[:tokens]
    dims = 32 * draw.integer("blocks", 1, 3), 32 * draw.integer("v_blocks", 1, 3)
    new = [numbers(draw, name, (len(slots), kv_heads, dim), dtype) for name, dim in zip("kv", dims, strict=True)]
    bad = len(slots) and draw.flag("odd", 0.15)
    if bad:
        new[draw.pick("odd.side", (0, 1))][-1, -1, -1] = np.inf
    slots = np.where(rng.random(len(slots)) < 0.1, -1, slots)
    caches, expected = [], []
    for name, to, x in zip("kv", formats, new, strict=True):
        whole = rng.integers(0, 256, (pages, size, kv_heads, x.shape[2] // 32 * arrays.ROWS[to]), dtype=np.uint8)
        caches.append(arrays.place(draw, f"{name}_cache", whole.swapaxes(1, 2).copy() if hnd else whole))
        if not bad:
            made, kept = rows_of(x, to), slots >= 0
            whole[slots[kept] // size, slots[kept] % size] = made[kept]
        expected.append(whole.swapaxes(1, 2) if hnd else whole)
    bad = bad and any(not np.isfinite(x[slots >= 0]).all() for x in new)
    options: dict[str, Any] = {"kv_layout": "HND" if hnd else "NHD", "kv_dtype": formats[0] if formats[0] == formats[1] else formats}
    options |= {"slot_mapping": slots, "num_threads": checks.threads(draw), "dtype": "bfloat16" if dtype == "bfloat16" else None}
    given = [arrays.stored(x, dtype) for x in new]

    def call() -> None:
        blitz_attn.append_paged_kv(*given, *(x.array for x in caches), **options)

    with checks.at_level(draw):
        if bad:
            checks.refused(call, "expected numbers")
        else:
            if not all(np.isfinite(x).all() for x in new):  # only tokens without a slot have such numbers
                return
            call()
    for name, cache, whole in zip("kv", caches, expected, strict=True):
        if not np.array_equal(cache.array, whole):
            raise Finding(f"{name}_cache: other bytes")
        cache.check_around()
