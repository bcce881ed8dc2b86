"""Draws for all problems of summaries and selections: requests and their blocks, arrays on pages, numbers of chosen blocks."""

from __future__ import annotations

from typing import Any

import numpy as np

from . import arrays
from . import quest_oracle as oracle
from .arrays import as_integers
from .draw import Draw


class Batch:
    """Sizes, lengths, and the blocks of each request."""

    def __init__(self, draw: Draw, most_size: int = 64):
        self.draw = draw
        regime = draw.pick("regime", ("small", "many", "wide"), (6, 2, 1))
        count = draw.integer("batch", 0, 4 if regime == "small" else 2, likely=(1, 2))
        self.kv_heads = draw.integer("kv_heads", 1, 4, likely=(1, 2))
        self.dim = draw.integer("dim", 1, {"small": 64, "many": 20, "wide": 576}[regime], likely=(8, 16, 32, 64, 128, 576))
        self.size = draw.integer("block_size", 1, {"small": 40, "many": 4, "wide": most_size}[regime], likely=(1, 4, 16, 32, most_size))
        longest = {"small": 120, "many": 700 * self.size, "wide": 3 * self.size}[regime]
        near = (1, longest, self.size, self.size + 1, 128 * self.size, 129 * self.size, 257 * self.size)
        self.lens = np.array([draw.integer(f"seq_lens[{b}]", 0, longest, likely=near) for b in range(count)], np.int64)
        self.blocks = -(-self.lens // self.size)

    def pages(self, name: str, rows: int, spare: int = 2) -> tuple[list[np.ndarray], int]:
        """Pages that hold `rows` blocks each, for all blocks of the requests."""
        return pages_for(self.draw.rng(f"{name}.order"), self.blocks, rows, spare)


def pages_for(rng: np.random.Generator, blocks: np.ndarray, rows: int, spare: int) -> tuple[list[np.ndarray], int]:
    """The pages of `rows` entries that the blocks of each request need, in random order, and the number of all pages."""
    needed = [-(-int(n) // rows) for n in blocks]
    order = rng.permutation(sum(needed) + spare)
    return [order[end - n : end] for end, n in zip(np.cumsum(needed), needed, strict=True)], len(order)


def unusual_numbers(draw: Draw, name: str) -> tuple[float, float]:
    """The share of numbers that are replaced, and NaN or an infinity, which replaces them."""
    return draw.pick(f"{name}.share", (0.0, 0.01, 0.3), (3, 1, 1)), (np.nan, np.inf, -np.inf)[draw.pick(f"{name}.number", (0, 1, 2))]


def contents(rng: np.random.Generator, shape: tuple[int, ...], dtype: str, how: str, unusual: tuple[float, float] = (0.0, 0.0)) -> np.ndarray:
    """Numbers of `dtype`: "normal" ones; "whole" ones, whose sums are exact; or "alike", a few normal entries (along the first axis) that repeat."""
    if how == "whole":
        values = rng.integers(-2, 3, shape).astype(np.float64)
    else:
        values = rng.standard_normal((min(shape[0], 4) if how == "alike" else shape[0], *shape[1:]))
    if unusual[0]:
        values[rng.random(values.shape) < unusual[0]] = unusual[1]
    if how == "alike" and shape[0]:
        values = values[rng.integers(0, len(values), shape[0])]
    return arrays.rounded(values, dtype)


def laid_out(per_request: list[np.ndarray], entry: tuple[int, ...], own: tuple[list[np.ndarray], int], rows: int, garbage: float) -> np.ndarray:
    """An array (pages, rows, *entry) with the entries of each request on the request's own pages, and `garbage` everywhere else."""
    pages, count = own
    whole = np.full((count, rows, *entry), garbage)
    for values, these in zip(per_request, pages, strict=True):
        i = np.arange(len(values))
        whole[these[i // rows], i % rows] = values
    return whole


class Held:
    """An argument (pages, rows, N, D), with its buffer, layout, view and kind of array."""

    def __init__(self, draw: Draw, name: str, values: np.ndarray, dtype: str, kind: str, hnd: bool = False, spread: bool = False):
        """`values` in float64, or as they are stored. With `spread`, all heads are views of the first one."""
        self.dtype, self.kind, self.hnd = dtype, kind, hnd
        values = arrays.stored(values, dtype) if values.dtype == np.float64 else values
        heads = values.shape[2]
        values = values[:, :, :1] if spread else values
        self.placed = arrays.place(draw, name, values.swapaxes(1, 2) if hnd else values, views=arrays.views_for(kind))
        if spread:
            arrays.repeated(self.placed, 1 if hnd else 2, heads)

    def given(self, written: bool = False) -> Any:
        return arrays.dressed(self.placed.array, self.dtype, "numpy" if written and self.kind == "dlpack" else self.kind)

    def values(self) -> np.ndarray:
        values = arrays.values_of(self.placed.array, self.dtype)
        return values.swapaxes(1, 2) if self.hnd else values

    def other_layout(self) -> Any:
        return arrays.dressed(self.placed.array.swapaxes(1, 2).copy(), self.dtype, self.kind)


def named_bits(dtype: str, kind: str) -> str | None:
    """The option `dtype`, which plain uint16 arrays need."""
    return "bfloat16" if dtype == "bfloat16" and kind == "bits" else None


def one_or_each(draw: Draw, name: str, count: int, low: int, high: int, likely: tuple[int, ...]) -> tuple[np.ndarray, bool]:
    """One number for all requests, or one number per request."""
    if draw.flag(f"{name}.each", 0.3):
        return np.array([draw.integer(f"{name}[{b}]", low, high, likely=likely) for b in range(count)], np.int64), True
    return np.full(count, draw.integer(name, low, high, likely=likely)), False


class Choice:
    """Options of `select_blocks`, and their meaning for each request: the number of blocks, and the blocks that are always selected."""

    def __init__(self, draw: Draw, lens: np.ndarray, size: int, q_lens: np.ndarray):
        count, most, longest = len(lens), int(-(-lens // size).max(initial=0)), int(lens.max(initial=0))
        self.size, self.lens, self.numbers = size, lens, {}
        self.options: dict[str, Any] = {"sink": draw.integer("sink", 0, 6, likely=(0, 1)), "dense_below": None}
        if draw.pick("places", ("k", "budget")) == "k":
            self.wanted = places = self._take(draw, "k", 1, most + 5, (1, 2, 8, most))
        else:
            self.wanted = self._take(draw, "budget", 1, longest + 2 * size, (size, 2 * size, 9 * size - 1, longest))
            places = np.array([max(1, x // size) for x in self.wanted], np.int64)
        if draw.flag("dense", 0.25):
            below = self.options["dense_below"] = draw.integer("dense_below", 0, longest + 1, likely=(longest,))
            places = np.where(lens < below, -(-lens // size), places)
        recent = self._take(draw, "recent", 0, 6, (0, 1))
        since = self._take(draw, "tokens_since_metadata_update", -1, longest + 9, (0, 1, size, *(lens % size))) if draw.flag("stale", 0.3) else np.full(count, -1)
        numbers = [[int(x) for x in one] for one in zip(lens, q_lens, recent, since, places, strict=True)]
        self.rules = [
            oracle.Rule(-(-n // size) if queries else 0, p, self.options["sink"], max(oracle.forced(n, queries, r, size), oracle.stale(n, s, size)))
            for n, queries, r, s, p in numbers
        ]
        self.width = max(1, int(places.max(initial=0))) if count else None

    def _take(self, draw: Draw, name: str, low: int, high: int, likely: tuple[int, ...]) -> np.ndarray:
        numbers, each = one_or_each(draw, name, len(self.lens), low, high, likely)
        self.options[name] = as_integers(draw, name, numbers) if each else draw.options[name]
        if each:
            self.numbers[name] = numbers
        return numbers

    def given(self, rows: slice = slice(None)) -> dict[str, Any]:
        """The options for all requests, or for the given ones only."""
        return self.options if rows == slice(None) else self.options | {name: x[rows] for name, x in self.numbers.items()}
