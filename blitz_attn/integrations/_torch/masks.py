"""Replaces masks that have an element for each query and key by what costs less: runs of keys, or lists without hidden blocks."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..._sabi.convert import any_pool, from_block_mask, runs_and_counts

try:
    import torch
except ModuleNotFoundError:  # without torch, the module can be imported, but its function cannot be called
    torch = None

_STRIPE = 64  # queries that are read at a time
_LEAST = -2.3e38  # where scores are float32, this number and smaller ones hide a key, as -inf does
_BLOCK_SHAPE = (128, 128)


def read_mask(mask: Any, queries: int, keys: int, dtype: Any, *, lists: bool) -> dict[str, Any]:
    """The arguments of `block_sparse_attention` that do what `mask` does, in the least time, for tensors of `dtype`.

    `mask` has at most four axes, of B, H, Sq and Skv entries or 1. Where it only hides keys, and the keys that a query sees have no gap
    between them, `kv_ranges` replaces it. Where there are gaps, or heads differ, a mask of bool replaces it; if `lists`, with a list of the
    blocks in which some pair is seen. Masks that do more than hide keys are returned as they are. No mask is expanded to all pairs.
    """
    given = mask.detach().reshape((1,) * (4 - mask.dim()) + tuple(mask.shape))
    given = given[tuple(slice(1) if step == 0 else slice(None) for step in given.stride())]
    seen = given if given.dtype == torch.bool else _shown(given, -torch.inf if dtype == torch.float64 else _LEAST)
    if seen is None:
        return {"attn_mask": mask}
    ranges = _ranges_of(seen.numpy(), queries, keys)
    if ranges is not None:
        return {"kv_ranges": ranges}
    return {"attn_mask": seen} | (_list_of(seen.numpy(), queries, keys) if lists else {})


def _shown(mask: Any, least: float) -> Any:
    """Where a mask of floats is 0; None if it holds anything except 0 and numbers that hide a key."""
    numbers, limits = mask.resolve_neg(), torch.tensor([least, -torch.inf]).to(mask.dtype)
    as_bits = numbers.itemsize == 2  # NumPy has no bfloat16, and is slow with float16; of numbers below 0, smaller ones have larger bits
    numbers, limits = ((x.view(torch.int16).numpy().view(np.uint16) if as_bits else x.numpy()) for x in (numbers, limits))
    shown = np.empty(numbers.shape, bool)
    for first in range(0, numbers.shape[2], _STRIPE):
        part, zero = numbers[:, :, first : first + _STRIPE], shown[:, :, first : first + _STRIPE]
        np.equal(part << 1 if as_bits else part, 0, out=zero)
        hides = (part >= limits[0]) & (part <= limits[1]) if as_bits else part <= limits[0]
        if not (zero | hides).all():
            return None
    return torch.from_numpy(shown)


def _ranges_of(seen: np.ndarray, queries: int, keys: int) -> Any:
    """`kv_ranges` (B or 1, Sq, 2) of a mask (B or 1, H or 1, Sq or 1, Skv or 1); None where keys have gaps or heads differ."""
    if any(not np.array_equal(seen[:, 0], seen[:, h]) for h in range(1, seen.shape[1])):
        return None
    seen = seen[:, 0] if seen.shape[1] else np.zeros((len(seen), *seen.shape[2:]), bool)
    if seen.shape[-1] == keys:
        runs, counts = runs_and_counts(seen)
        if (runs[..., 1] - runs[..., 0] != counts).any():
            return None
    else:  # one element for all keys
        runs = seen * np.array([0, keys])
    return torch.from_numpy(np.broadcast_to(runs, (len(runs), queries, 2)).copy())


def _list_of(seen: np.ndarray, queries: int, keys: int) -> dict[str, Any]:
    """The list of the blocks in which a mask shows some pair; no arguments if these are all blocks."""
    kept = any_pool(seen, _BLOCK_SHAPE)
    if kept.all():
        return {}
    grid = (-(-n // size) for n, size in zip((queries, keys), _BLOCK_SHAPE, strict=True))
    kept = np.broadcast_to(kept, (*kept.shape[:2], *grid))
    return {"sabi": torch.from_numpy(from_block_mask(kept, dtype="int32")), "block_shape": _BLOCK_SHAPE}
