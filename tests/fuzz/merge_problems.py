"""Merging partial attention: `merge_states` and `merge_states_n`."""

from __future__ import annotations

import numpy as np

import blitz_attn

from . import arrays, checks
from .draw import Draw
from .problems import problem


def merged(outs: np.ndarray, lses: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Merges with weights exp(lse - total) over the parts that are not empty. The output of an empty part is not read."""
    present = lses > -np.inf
    largest = np.max(np.where(present, lses, -np.inf), axis=0)
    shift = np.where(np.isfinite(largest), largest, 0)
    weights = np.where(present, np.exp(np.where(present, lses - shift, 0)), 0)
    total = weights.sum(axis=0)
    out = np.where(present[..., None], outs, 0) * weights[..., None]
    with np.errstate(divide="ignore"):
        return out.sum(axis=0) / np.where(total > 0, total, 1)[..., None], np.log(total) + np.where(total > 0, shift, 0)


@problem("merge_states", weight=0.5)
def merge_states(draw: Draw) -> None:
    dtype = draw.pick("dtype", arrays.FLOATS)
    kind = draw.pick("kind", arrays.kinds_for(dtype))
    parts = draw.integer("parts", 1, 9, likely=(2,))
    shape = tuple(draw.integer(name, 0, high, likely=(1,)) for name, high in (("batch", 3), ("heads", 5), ("tokens", 40)))
    shape = shape[draw.pick("fewer_axes", (0, 1, 2)) :]
    dim = draw.integer("v_dim", 1, 576, likely=(64, 128))
    real = "float64" if dtype == "float64" else "float32"
    rng = draw.rng("values")
    outs = arrays.rounded(rng.standard_normal((parts, *shape, dim)), dtype)
    lses = arrays.rounded(rng.standard_normal((parts, *shape)) * draw.pick("lse_spread", (1, 30, 1000)), real)
    empty = rng.random((parts, *shape)) < draw.pick("empty", (0.0, 0.3, 1.0))
    lses[empty] = -np.inf
    outs[empty] = draw.pick("garbage", (0.0, np.nan, np.inf))

    placed_outs = [arrays.place(draw, f"outs[{i}]", arrays.stored(outs[i], dtype)) for i in range(parts)]
    placed_lses = [arrays.place(draw, f"lses[{i}]", arrays.stored(lses[i], real)) for i in range(parts)]
    given = [arrays.dressed(x.array, dtype, kind) for x in placed_outs]
    named = "bfloat16" if kind in ("bits", "torch") and dtype == "bfloat16" else None  # torch has no negative strides: such arrays go as bits
    written = arrays.poisoned(draw, "out", (*shape, dim), dtype) if draw.flag("out") else None
    arguments = {"dtype": named, "out": written and arrays.dressed(written.array, dtype, "numpy" if kind == "dlpack" else kind)}
    if parts == 2 and draw.flag("pair"):
        out, lse = blitz_attn.merge_states(given[0], placed_lses[0].array, given[1], placed_lses[1].array, **arguments)
    else:
        out, lse = blitz_attn.merge_states_n(given, [x.array for x in placed_lses], **arguments)

    expected, expected_lse = merged(outs, lses)
    scale = 4 * checks.EPSILON["float64" if dtype == "float64" else "float32"] * (4 + np.abs(np.where(np.isfinite(lses), lses, 0)).max(initial=0))
    checks.near("lse", arrays.values_of(lse, real), expected_lse, 2 * scale * (1 + np.abs(np.where(np.isfinite(expected_lse), expected_lse, 0))))
    size = np.abs(np.where(empty[..., None], 0, outs)).max(initial=0)
    checks.near("out", arrays.values_of(out, dtype), expected, size * (parts * scale + 2 * checks.EPSILON[dtype]))
    for x in (*placed_outs, *placed_lses):
        x.check_unchanged()
    if written:
        written.check_around()
