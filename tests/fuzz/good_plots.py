"""Valid calls of `blitz_attn.plot` and of `select.Profile`, for `good_calls`.

Some functions are wrapped, because some outcomes do not concern the fuzzer: figures of matplotlib, and the documented OSError for a file
that cannot be read. `Profile.save` is left out, because it would write files with unusual names.
"""

from __future__ import annotations

import functools
import importlib.util
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from blitz_attn import plot, sabi, select, video

from .arena import method

_TABLE = """block_shape H B s_q s_kv D frame(L,R,T,B) sparsity Outputs_equal Ref_Latency_[usec] Our_Latency_[usec]
64x64 1 1 512 512 64 - 0.00 yes 90.0 100.0
64x64 1 1 512 512 64 (1,0,1,0) 50% yes N/A 50.0
"""


_SHAPE = {"heads": 2, "kv_heads": 1, "head_dim": 64}


@cache
def _profile() -> Any:
    return select.Profile(*_SHAPE.values(), select.Pooled(), (64, 64), "top_p", ((0.9, 0.95),), "mass", 0.9)


@cache
def _folder() -> Any:
    return tempfile.TemporaryDirectory(prefix="blitz_attn_fuzz")


def _saved() -> str:
    path = Path(_folder().name) / "profile.json"
    if not path.exists():
        _profile().save(path)
    return str(path)


def _load(path: Any) -> Any:
    try:
        return select.Profile.load(path)
    except OSError:
        return None


def _drawn(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> None:
        function(*args, **options)

    return call


def _mask(arena: Any, variety: int) -> dict[str, Any]:
    call: dict[str, Any] = {"sabi": arena.put(sabi.causal(64, block_shape=(16, 16), dtype="int32"))}
    return call | ({"columns": 4, "block_shape": (16, 16), "max_heads": 2, "title": "mask"} if variety & 1 else {})


def _cubes(arena: Any, variety: int) -> dict[str, Any]:
    order = video.cube_order(video.Geometry([3, (2, 5, 3), (1, 2, 2)]), (1, 2, 2))
    call: dict[str, Any] = {"order": order, "sabi": video.blocks(order, video.Neighbourhood(), (4, 5))}
    if variety & 1:
        call |= {"sabi": arena.put(np.asarray(call["sabi"])), "block_shape": (4, 5), "row": 3, "head": 0, "max_frames": 1, "title": "cubes"}
    return call


def _rows(arena: Any, variety: int) -> dict[str, Any]:
    return {"rows": plot.parse_table(_TABLE)}


# By name: a function, the function that makes its arguments, and further names that refusals may use.
PLOTS: dict[str, tuple[Callable[..., Any], Callable[[Any, int], dict[str, Any]], tuple[str, ...]]] = {
    "parse_table": (plot.parse_table, lambda arena, variety: {"text": _TABLE}, ()),
    "speedups": (plot.speedups, _rows, ()),
    "Profile.load": (_load, lambda arena, variety: {"path": _saved()}, ()),
    "Profile.options": (method(_profile, "options"), lambda arena, variety: {"layer": 0} | _SHAPE, ("profile",)),
}
if importlib.util.find_spec("matplotlib") is not None:
    PLOTS |= {
        "plot_mask": (_drawn(plot.plot_mask), _mask, ()),
        "plot_cubes": (_drawn(plot.plot_cubes), _cubes, ()),
        "plot_speedup": (_drawn(plot.plot_speedup), _rows, ()),
    }
