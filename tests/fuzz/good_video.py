"""Valid calls of `blitz_attn.video`, for `good_calls`. `VIDEO` has the functions, the functions that make their arguments, the arguments that may
be written to, and further names that refusals may use."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from blitz_attn import video
from blitz_attn._sentences import rename

from .arena import Arena, method

_RULES = (
    video.Neighbourhood((0, 1, None)), video.SlidingTiles((1, 2, 3)), video.Radial(0.5), [video.Neighbourhood.spatial(), video.Neighbourhood.temporal()],
)  # fmt: skip


@cache
def _order() -> video.TokenOrder:
    return video.cube_order(video.Geometry([3, (2, 5, 3), (1, 2, 2)]), (1, 2, 2))


def _real(x: Any) -> Any:
    """Complex numbers, such as rotary embeddings, as their real and imaginary parts. No other function of the package returns complex numbers."""
    return x.view(x.real.dtype) if isinstance(x, np.ndarray) and x.dtype.kind == "c" else x


def _renamed(name: str, *arrays: Any, **options: Any) -> Any:
    """A call of a method of the order, whose refusals name the arrays q and k."""
    try:
        return getattr(_order(), name)(*arrays, **options)
    except (TypeError, ValueError) as error:
        rename(error, {"arrays[0]": "q", "arrays[1]": "k"})
        raise


def _permute(q: Any, k: Any, *, layout: Any = "BNSD", out: Any = None) -> Any:
    return tuple(map(_real, _renamed("permute", q, k, layout=layout, out=out)))


def _restore(q: Any, *, layout: Any = "BNSD", out: Any = None) -> Any:
    return _real(_renamed("restore", q, layout=layout, out=out))


def _laid_out(a: Arena, v: int, *shape: int) -> Any:
    return a.floats(*shape[: 4 if v & 1 else 3], dtype=("float32", "float64", "float16")[v % 3])


def _arrays(a: Arena, v: int) -> dict[str, Any]:
    call: dict[str, Any] = {"q": _laid_out(a, v, 1, 2, 37, 4), "k": _laid_out(a, v + 1, 1, 1, 37, 4)}
    if v & 4:
        call |= {"q": _laid_out(a, v, 1, 37, 2, 4), "k": _laid_out(a, v, 1, 37, 1, 4), "layout": "BSND"}
    return call | ({"out": (a.poisoned(*call["q"].shape, dtype=call["q"].dtype.name), None)} if v & 2 else {})


def _array(a: Arena, v: int) -> dict[str, Any]:
    call: dict[str, Any] = {"q": a.floats(37, 2, 4), "layout": "TND"} if v & 1 else {"q": a.floats(1, 2, 37)}
    return call | ({"out": a.poisoned(*call["q"].shape)} if v & 2 else {})


def _rule(a: Arena, v: int) -> dict[str, Any]:
    call: dict[str, Any] = {"order": _order(), "rule": _RULES[v % 4], "block_shape": (4, 5)[:: 1 - 2 * (v & 1)]}
    return call | ({"dense_frames": 1, "dense_tokens": a.integers([0, 36])} if v & 2 else {})


def _chosen(a: Arena, v: int) -> dict[str, Any]:
    call: dict[str, Any] = {"q": a.floats(1, 2, 37, 4), "k": a.floats(1, 1, 37, 4), "order": _order(), "rules": _RULES[:3], "block_shape": (4, 5)}
    if v & 1:
        call |= {"q": a.floats(37, 2, 4), "k": a.floats(37, 1, 4), "layout": "TND", "scale": 0.5, "dense_frames": 1}
    elif v & 2:
        call |= {"q": a.floats(1, 37, 8), "k": a.floats(1, 37, 4), "layout": "BSH", "num_heads": 2, "num_kv_heads": 1, "dense_tokens": [5]}
    else:
        call |= {"kv_lens": a.integers([29])}
    return call | ({"sampled_rows": 9, "seed": 3, "num_threads": 1} if v & 4 else {})


# By name: a function, the function that makes its arguments, arguments that it may write to, and further names that refusals may use.
VIDEO: dict[str, tuple[Callable[..., Any], Callable[[Arena, int], dict[str, Any]], tuple[str, ...], tuple[str, ...]]] = {
    "Geometry": (video.Geometry, lambda a, v: {"spans": [226, (13, 30, 45)] if v & 1 else ((1, 2, 2), 0, [3, 4, 5])}, (), ()),
    "cube_order": (video.cube_order, lambda a, v: {"geometry": _order().geometry, "cube": [(4, 4, 4), a.integers([1, 2, 9])][v % 2]}, (), ()),
    "TokenOrder": (video.TokenOrder, lambda a, v: {"geometry": _order().geometry, "cube": (4, 4, 4)}, (), ()),
    "TokenOrder.permute": (_permute, _arrays, ("out",), ()),
    "TokenOrder.restore": (_restore, _array, ("out",), ()),
    "Neighbourhood": (video.Neighbourhood, lambda a, v: {"radius": (None, 1, 0)}, (), ()),
    "Neighbourhood.spatial": (video.Neighbourhood.spatial, lambda a, v: {"radius": v % 3}, (), ()),
    "Neighbourhood.temporal": (video.Neighbourhood.temporal, lambda a, v: {"radius": v % 3}, (), ()),
    "SlidingTiles": (video.SlidingTiles, lambda a, v: {"window": (None, 1, 3)}, (), ()),
    "Radial": (video.Radial, lambda a, v: {"decay_factor": 0.5}, (), ()),
    "blocks": (video.blocks, lambda a, v: _rule(a, v) | ({"dtype": "uint16"} if v & 4 else {}), (), ()),
    "density": (video.density, lambda a, v: _rule(a, v) | ({"per_head": True} if v & 4 else {}), (), ()),
    "choose_rules": (video.choose_rules, _chosen, (), ("v", "lse")),
    "Schedule": (video.Schedule, lambda a, v: {"dense_steps": v % 3, "densities": (None, 0.5, (0.5, 0.25))[v % 3], "refresh_every": 2}, (), ()),
    "Schedule.density": (method(lambda: video.Schedule(1, 0.5), "density"), lambda a, v: {"step": v % 3}, (), ()),
    "Schedule.refreshes": (method(lambda: video.Schedule(1, 0.5), "refreshes"), lambda a, v: {"step": v % 3}, (), ()),
}  # fmt: skip
