"""DeepSeek-V4 attends to a window of tokens and to compressed entries. In some layers, each entry stands for 4 tokens, and the best entries
are chosen; in others, each entry stands for 128 tokens, and all entries are attended.

The model's own code makes entries, queries and keys, and keeps its state. It is stopped where it would score all entries for all queries.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from ..._select.tokens import select_tokens
from .config import config_of
from .tokens import Appended
from .trained import Table, check_code, leave, why_not_states

__all__ = ["ADAPTERS"]

_KNOWN = {
    "DeepseekV4Attention": "e78f761b94e8dcb2", "DeepseekV4CSACompressor": "66f156a5c9bfbea4", "DeepseekV4HCACompressor": "8740b502ae061887",
    "DeepseekV4Indexer": "d56c896887114c43", "DeepseekV4IndexerScorer": "240ad6a06d6e7f69",
}  # fmt: skip

_stops: ContextVar[bool] = ContextVar("stops", default=False)


class _ScoresWanted(Exception):  # noqa: N818
    """The model's code is about to score these keys for these queries."""


def _stop(own: Any, scorer: Any, q: Any, keys: Any, hidden: Any) -> Any:
    if _stops.get():
        raise _ScoresWanted(q, keys)
    return own(q, keys, hidden)


def _runs(positions: np.ndarray) -> Iterator[tuple[slice, slice, int]]:
    """Cuts queries into runs whose positions rise by one (step 1) or stay the same (step 0, in padding). Yields the batch entries, the
    rows and the step of each run."""
    steps = np.diff(positions, axis=1)
    if (steps == 1).all():
        yield slice(0, len(positions)), slice(0, positions.shape[1]), 1
        return
    for b, row in enumerate(steps):
        begin = 0
        while begin <= row.size:
            step = int(row[begin]) if begin < row.size and row[begin] in (0, 1) else 1
            others = np.flatnonzero(row[begin:] != step)
            end = begin + 1 + (int(others[0]) if others.size else row.size - begin)
            yield slice(b, b + 1), slice(begin, end), step
            begin = end


def _choose(indexer: Any, q: Any, keys: Any, weights: Any, positions: np.ndarray) -> Any:
    """The numbers of the best entries for each query, int32 (B, Sq, K)."""
    rate, entries = indexer.compress_rate, keys.shape[1]
    chosen = torch.empty((*q.shape[:2], min(indexer.index_topk, entries)), dtype=torch.int32)
    options = {"scale": indexer.scorer.softmax_scale, "pool_size": rate, "num_threads": config_of(indexer).num_threads}
    dtype = torch.promote_types(q.dtype, keys.dtype)
    q, keys = q.to(dtype), keys.to(dtype)
    for batch, rows, step in _runs(positions):
        first = positions[batch, rows.start]
        if step:
            places = {"causal": True, "q_begin": first.tolist(), "kv_lens": [entries * rate] * len(first)}
        else:
            places = {"kv_lens": np.minimum((first + 1) // rate, entries) * rate}
        chosen[batch, rows] = select_tokens(q[batch, rows], keys[batch], weights[batch, rows], chosen.shape[2], **options, **places)
    return chosen


def _compress_and_choose(own: Any, compressor: Any, hidden: Any, residual: Any, position_ids: Any, cache: Any, number: int) -> Any:
    indexer, state = compressor.indexer, cache
    if leave(indexer, why_not_states(hidden)):
        return own(hidden, residual, position_ids, cache, number)
    if state is None:
        own_cache = sys.modules[type(compressor).__module__].DeepseekV4CSACache
        state = SimpleNamespace(layers={number: own_cache(compressor.rotary_emb.config)})
    token = _stops.set(True)
    try:
        return own(hidden, residual, position_ids, state, number)
    except _ScoresWanted as wanted:
        q, keys = wanted.args
    finally:
        _stops.reset(token)
    entries = state.layers[number].compressed_kv["compressor"].unsqueeze(1)
    positions = position_ids.expand(hidden.shape[:2])
    if keys.shape[1] <= indexer.index_topk:
        return entries, _first_of(entries, (positions + 1) // compressor.compress_rate)
    with torch.no_grad():
        weights = indexer.scorer.weights_proj(hidden).float() * indexer.scorer.weights_scaling
        return entries, Appended(keys.shape[1], chosen=_choose(indexer, q, keys, weights, positions.numpy()))


def _compress(own: Any, compressor: Any, hidden: Any, residual: Any, position_ids: Any, cache: Any, number: int) -> Any:
    # Given the position of one query, the model's code makes no mask. (It lets a single query see all entries; so does `count` below.)
    entries, _ = own(hidden, residual, position_ids[:, :1], cache, number)
    positions = position_ids.expand(hidden.shape[:2])
    count = (positions + 1) // compressor.compress_rate if hidden.shape[1] > 1 else torch.full_like(positions, entries.shape[2])
    return entries, _first_of(entries, count)


def _first_of(entries: Any, count: Any) -> Appended | None:
    keys = entries.shape[2]
    return Appended(keys, count=count.clamp(max=keys)) if keys else None


def _adapters(attention: Any) -> dict[str, Any]:
    compressor = attention.compressor
    if compressor is None:
        return {}
    check_code(_KNOWN, attention, compressor)
    if not hasattr(compressor, "indexer"):
        return {"compressor.forward": _compress}
    check_code(_KNOWN, compressor.indexer, compressor.indexer.scorer)
    return {"compressor.forward": _compress_and_choose, "compressor.indexer.scorer.forward": _stop}


ADAPTERS: Table = {("modeling_deepseek_v4", "DeepseekV4Attention"): _adapters}
