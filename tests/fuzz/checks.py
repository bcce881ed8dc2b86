"""Comparisons of results, and their tolerances."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import blitz_attn

from .arrays import bits_of
from .draw import Draw
from .problems import Finding

EPSILON = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
THREADS = (1, 2, 3, 4, 7, 16)


@contextlib.contextmanager
def at_level(draw: Draw) -> Iterator[str]:
    """Runs the block at a drawn instruction set level of this machine."""
    level = draw.pick("level", tuple(blitz_attn.isa_levels()))
    with blitz_attn.isa(level):
        yield level


@contextlib.contextmanager
def default_threads(count: int) -> Iterator[None]:
    """Sets the default number of threads for the calls in the block."""
    before = blitz_attn.get_num_threads()
    blitz_attn.set_num_threads(count)
    try:
        yield
    finally:
        blitz_attn.set_num_threads(before)


def threads(draw: Draw) -> int:
    return draw.pick("num_threads", THREADS)


def same_bits(what: str, one: Any, other: Any) -> None:
    """Asserts that both results are the same bit for bit. `one` and `other` are arrays, or tuples of arrays."""
    if isinstance(one, tuple):
        for i, (a, b) in enumerate(zip(one, other, strict=True)):
            same_bits(f"{what}, result {i}", a, b)
        return
    if bits_of(one) != bits_of(other):
        raise Finding(f"{what}: other bits")


def near(what: str, got: np.ndarray, expected: np.ndarray, allowed: Any) -> None:
    """Asserts that `got` is within `allowed` (a number, or an array that broadcasts) of `expected`, and that non-finite elements are equal."""
    if got.shape != expected.shape:
        raise Finding(f"{what}: shape {got.shape} where {expected.shape} was expected")
    if got.size == 0:
        return
    special = ~np.isfinite(expected)
    wrong = np.where(special, ~((got == expected) | (np.isnan(got) & np.isnan(expected))), False)
    with np.errstate(invalid="ignore", over="ignore"):
        error = np.abs(np.where(special, 0, got) - np.where(special, 0, expected))
    wrong |= ~(error <= allowed)  # written so that NaN counts as wrong
    if wrong.any():
        at = tuple(int(i) for i in np.argwhere(wrong)[0])
        limit = np.broadcast_to(allowed, got.shape)[at]
        raise Finding(f"{what}: {got[at]} at {at} where {expected[at]} was expected (allowed error {limit:.3g}; {wrong.sum()} of {wrong.size})")


def refused(call: Callable[[], Any], name: str) -> None:
    """Asserts that the call raises ValueError, with one sentence that names the argument `name`."""
    try:
        call()
    except ValueError as error:
        text = str(error)
        if name not in text or "\n" in text:
            raise Finding(f"the refusal does not name {name} in one line: {text}") from None
    else:
        raise Finding(f"a call that should be refused because of {name} was accepted")
