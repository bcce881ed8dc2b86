"""Merging the states of a request's chunks by a fixed binary tree, for many requests at once.

Node i of level l covers the chunks from ``i * 2**l`` to ``(i + 1) * 2**l - 1``, as far as the request has them. If the right half of a node
has no chunk, the node has the state of its left half; otherwise, its state is the merge of both halves' states. So the result depends on
the chunks alone, and not on which rank computed which chunk, nor on the other requests of the call.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy import ndarray

from .. import _arrays
from .._float_mode import in_usual_mode
from .._formats import bfloat16_bits
from ..merge import merge_states


def ranges(starts: ndarray, lengths: ndarray) -> ndarray:
    """The numbers ``starts[i], starts[i] + 1, ...``, ``lengths[i]`` of them, for each i."""
    shift = starts - (np.cumsum(lengths) - lengths)
    return np.arange(int(lengths.sum())) + shift.repeat(lengths)


class Merges:
    """Merges of states in one array, level by level. A merged state replaces that of its left half."""

    def __init__(self, levels: list[tuple[ndarray, ndarray]], first: ndarray, rows: ndarray) -> None:
        """`levels`: (left, right) of each level, as numbers of states. `first` and `rows`: the first row of each state, and its number of
        rows, one per query."""
        self._levels = [(ranges(first[a], rows[a]), ranges(first[b], rows[b])) for a, b in levels]

    def run(self, out: ndarray, lse: ndarray) -> None:
        """Merge in place: `out` is (rows, H, Dv), `lse` (rows, H)."""
        for left, right in self._levels:
            if len(left):
                out[left], lse[left] = merged(out[left], lse[left], out[right], lse[right])


def merged(out_a: ndarray, lse_a: ndarray, out_b: ndarray, lse_b: ndarray) -> tuple[ndarray, ndarray]:
    """`merge_states` of arrays (rows, H, Dv) and (rows, H)."""
    out, lse = merge_states(*(x[:, :, None] for x in (out_a, lse_a, out_b, lse_b)))
    return out[:, :, 0], lse[:, :, 0]


def sinks_of(sinks: Any, heads: int) -> ndarray | None:
    """float32 sinks, one per query head."""
    if sinks is None:
        return None
    numbers = _arrays.float32_numbers(sinks, "sinks")
    if numbers.shape != (heads,):
        raise ValueError(f"sinks: expected shape ({heads},), one number per head, got {numbers.shape}")
    return numbers


@in_usual_mode
def with_sinks(out: ndarray, lse: ndarray, sinks: ndarray) -> tuple[ndarray, ndarray]:
    """The states (rows, H, Dv) and (rows, H) with one more score per head in their softmax, which has no value.

    A sink counts as infinite if its product with log2(e) is infinite, as in a call without chunks. Beside a sink of plus infinity, finite
    scores have weight 0."""
    with np.errstate(over="ignore"):
        exponents = (sinks.astype(np.float64) * np.log2(np.e)).astype(lse.dtype)
    scores = np.where(np.isinf(exponents), exponents, sinks.astype(lse.dtype))
    shares = np.broadcast_to(scores, lse.shape)
    joined, joined_lse = merged(out, lse, np.zeros_like(out), np.ascontiguousarray(shares))
    nothing = np.isposinf(shares) & (lse < np.inf)  # the merge takes the difference of infinities there, which is NaN
    if nothing.any():
        with np.errstate(invalid="ignore"):  # values that are not finite remain so
            joined[nothing] = out[nothing] * 0
        joined_lse[nothing] = np.inf
    return joined, joined_lse


@in_usual_mode
def rounded(x: ndarray, kind: str) -> Any:
    """float32 numbers in another dtype, to the nearest, ties to even; bfloat16 as bits, NaN as NaN. float64 stays float64."""
    if kind != "bfloat16":
        with np.errstate(over="ignore"):
            return x.astype(kind, copy=False)
    of_nan = (x.view(np.uint32) >> 16 | 0x40).astype(np.uint16)  # as the core writes it, with its sign and upper bits
    return np.where(np.isnan(x), of_nan, bfloat16_bits(x))
