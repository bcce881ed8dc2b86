"""Arguments of valid calls of native sparse attention and of its parts, for `good_calls`."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from blitz_attn import nsa

from .arena import Arena

SMALL = {"compress_block_size": 4, "num_selected_blocks": 3, "window_size": 5}


def native(a: Arena, v: int) -> dict[str, Any]:
    lead = (12,) if v & 1 else (1, 12)
    call: dict[str, Any] = {"q": a.floats(*lead, 2, 8), "k": a.floats(*lead, 1, 8), "v": a.floats(*lead, 1, 8), **SMALL}
    if v & 1:
        call["cu_seqlens"] = [0, 5, 12]
    if v & 2:
        call |= {"gate_proj_weight": a.floats(2, 3, 8), "w_k_compress": a.floats(1, 8, 8), "w_v_compress": a.floats(1, 8, 8)}
    elif v & 4:
        call |= {"gates": a.floats(*lead, 2, 3)}
    if v & 8:
        call |= {"mode": "mslk", "q_tile_size": 4}
    elif not v & 5:
        call |= {"block_indices": a.integers(np.tile([0, -1, -1], (1, 1, 12, 1)))}
    return call | ({"out": a.poisoned(*lead, 2, 8)} if v & 16 else {})


def native_last(a: Arena, v: int) -> dict[str, Any]:
    """Arguments for two queries: the last two of twelve tokens, or the last one of each of two packed sequences."""
    lead, keys = ((2,), (12,)) if v & 1 else ((1, 2), (1, 12))
    call: dict[str, Any] = {"q": a.floats(*lead, 2, 8), "k": a.floats(*keys, 1, 8), "v": a.floats(*keys, 1, 8), **SMALL}
    if v & 1:
        call |= {"cu_seqlens": [0, 5, 12], "cu_seqlens_q": [0, 1, 2]}
    elif v & 4:
        call |= {"kv_lens": [12]}
    if v & 2:
        blocks = (3,) if v & 1 else (1, 5)
        call |= {"compressed_kv": (a.floats(*blocks, 1, 8), a.floats(*blocks, 1, 8))}
    return call | ({"out": a.poisoned(*lead, 2, 8)} if v & 16 else {})


@cache
def context() -> Any:
    x = np.ones((1, 12, 2, 8), np.float32)
    return nsa.nsa(x, x, x, **SMALL, return_context=True)[1]


def _rows(a: Arena, v: int, *names: str) -> dict[str, Any]:
    lead = (12,) if v & 1 else (1, 12)
    call: dict[str, Any] = {name: a.floats(*lead, 2, 8) for name in names if name in ("dout", "q", "out")}
    call |= {name: a.floats(*lead, 2) for name in names if name == "lse"}
    call |= {name: a.floats(*lead, 1, 8) for name in names if name in ("k", "v")}
    call |= {name: a.floats(*((4,) if v & 1 else (1, 5)), 1, 8) for name in names if name in ("k_cmp", "v_cmp", "dk_cmp", "dv_cmp")}
    return call | ({"cu_seqlens": [0, 6, 12]} if v & 1 else {})


def compressed(*names: str) -> Callable[[Arena, int], dict[str, Any]]:
    return lambda a, v: _rows(a, v, *names) | {"compress_block_size": 4, "stride": 2} | ({"causal": False} if v & 2 else {"scale": 0.5})


def selected(*names: str) -> Callable[[Arena, int], dict[str, Any]]:
    def make(a: Arena, v: int) -> dict[str, Any]:
        lists = np.tile([0, -1, -1], (1, 12, 1))
        return _rows(a, v, *names) | {"block_indices": a.integers(lists if v & 1 else lists[None]), "block_size": 4}

    return make


def window(*names: str) -> Callable[[Arena, int], dict[str, Any]]:
    return lambda a, v: _rows(a, v, *names) | {"window_size": 5} | ({"num_threads": 2} if v & 2 else {"dtype": "float32"})


def compress(*names: str, prefix: str = "w_", upstream: bool = False) -> Callable[[Arena, int], dict[str, Any]]:
    def make(a: Arena, v: int) -> dict[str, Any]:
        blocks = 3 if upstream or not v & 1 else 2
        call = _rows(a, v & ~1 if upstream else v, "k", "v") | {"block_size": 4}
        call |= {name: a.floats(*((blocks,) if v & 1 and not upstream else (1, blocks)), 1, 8) for name in names}
        return call | ({f"{prefix}k": a.floats(1, 8, 8), f"{prefix}v": a.floats(1, 8, 8)} if v & 2 else {})

    return make


def score(a: Arena, v: int) -> dict[str, Any]:
    call = _rows(a, v, "q", "k_cmp") | {"num_selected_blocks": 3, "compress_block_size": 4}
    return call | ({"scale": 0.5, "compress_stride": 2} if v & 2 else {"lse": a.floats(*call["q"].shape[:-1])})


def score_mslk(a: Arena, v: int) -> dict[str, Any]:
    return {"q": a.floats(1, 12, 2, 8), "k_cmp": a.floats(1, 3, 1, 8), "num_selected_blocks": 2, "compress_block_size": 4, "q_tile_size": 4}


def gates(a: Arena, v: int) -> dict[str, Any]:
    return {"q": a.floats(1, 3, 2, 8)} | ({"gate_proj_weight": a.floats(2, 3, 8)} if v & 1 else {})


def combine(*names: str) -> Callable[[Arena, int], dict[str, Any]]:
    def make(a: Arena, v: int) -> dict[str, Any]:
        call = {name: a.floats(1, 3, 2, 8) for name in names} | {"gates": a.floats(1, 3, 2, 3)}
        return call | ({"gate_proj_weight": a.floats(2, 3, 8)} if "q" in names else {})

    return make
