"""Valid calls of `nsa.NsaCache` and its methods, for `good_calls`. Each call of a method makes its cache first."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np

from blitz_attn import nsa

from .arena import method
from .good_nsa import SMALL


def _filled(lens: list[int]) -> nsa.NsaCache:
    cache = nsa.NsaCache(**SMALL)
    tokens = np.ones((len(lens), 12, 1, 8), np.float32)
    cache.append(tokens, tokens, lens)
    return cache


def _made(a: Any, v: int) -> dict[str, Any]:
    call: dict[str, Any] = {**SMALL, "mode": ("paper", "mslk")[v & 1]}
    return call | ({"w_k_compress": a.floats(1, 8, 8), "num_threads": 2, "dtype": "float32", "window_size": 4} if v & 2 else {})


def _appended(a: Any, v: int) -> dict[str, Any]:
    return {"k": a.floats(1, 3, 1, 8), "v": a.floats(1, 3, 1, 8)} | ({"lens": [2]} if v & 1 else {})


def _attended(a: Any, v: int) -> dict[str, Any]:
    call: dict[str, Any] = {"q": a.floats(1, 2, 2, 8)} | ({"lens": a.integers([1])} if v & 2 else {})
    return call | ({"out": a.poisoned(1, 2, 2, 8)} if v & 1 else {"gates": a.floats(1, 2, 2, 3)})


# By name: a function, the function that makes its arguments, the arguments that it may write to, and further names that refusals may use.
CACHES: dict[str, tuple[Callable[..., Any], Callable[[Any, int], dict[str, Any]], tuple[str, ...], tuple[str, ...]]] = {
    "NsaCache": (nsa.NsaCache, _made, (), tuple(inspect.signature(nsa.nsa).parameters)),
    "NsaCache.append": (method(lambda: nsa.NsaCache(**SMALL), "append"), _appended, (), ()),
    "NsaCache.attend": (method(lambda: _filled([12]), "attend"), _attended, ("out",), ("k",)),
    "NsaCache.crop": (method(lambda: _filled([12, 9]), "crop"), lambda a, v: {"lens": a.integers([10, 9]) if v & 1 else 7}, (), ()),
    "NsaCache.reorder": (method(lambda: _filled([12, 9]), "reorder"), lambda a, v: {"indices": a.integers([1, 1, 0])}, (), ()),
}
