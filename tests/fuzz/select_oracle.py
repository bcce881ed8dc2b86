"""Choosers of blocks, token by token in float64: the definitions in the docstrings, over boolean masks of what each query sees."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from . import arrays
from .attention_oracle import Attention
from .problems import Finding


@dataclass
class Choice:
    """How blocks are scored and kept, for an `Attention` without lists."""

    kind: str  # pooled, antidiagonal, sampled_rows, vertical_slash
    # pooled: queries of a pooled row; antidiagonal: the stride; sampled_rows: sampled queries of a block; vertical_slash: last queries looked at
    rows: int
    keys: int  # keys in a pooled group
    term: str
    over: str
    budget: str
    numbers: list[float]  # one number, or one per list
    sink: int = 0
    recent: int = 0
    last_columns: int = 0
    first_rows: int = 0
    last_rows: int = 0
    per_kv_head: bool = False


def _parts(tokens: int, size: int) -> list[np.ndarray]:
    return [np.arange(a, min(a + size, tokens)) for a in range(0, tokens, size)]


def _pair_scores(c: Choice, dtype: str, q: np.ndarray, k: np.ndarray, rows: list[np.ndarray], groups: list[np.ndarray]) -> np.ndarray:
    """Unscaled scores of each row of queries and group of keys. Where inputs are bfloat16, so are the means, and the vectors that are made
    from means and ranges."""
    scores = np.zeros((len(rows), len(groups)))
    if c.kind == "pooled":
        mean, largest, smallest = (np.array([x(k[g], axis=0) for g in groups]).reshape(len(groups), k.shape[1]) for x in (np.mean, np.max, np.min))
    for i, r in enumerate(rows):
        if c.kind == "pooled":
            query = q[r].mean(axis=0)
            if dtype == "bfloat16":
                query, kept_mean = arrays.rounded(query, dtype), arrays.rounded(mean, dtype)
                share = {"mean": 0.0, "bound": 1.0, "both": 0.5}[c.term]
                centre = arrays.rounded((1 - share) * kept_mean + share * (largest + smallest) / 2, dtype)
                scores[i] = centre @ query + arrays.rounded(share * (largest - smallest) / 2, dtype) @ np.abs(query)
                continue
            middle, bound = mean @ query, np.maximum(query * largest, query * smallest).sum(axis=1)
            scores[i] = {"mean": middle, "bound": bound, "both": (middle + bound) / 2}[c.term]
            continue
        for j, g in enumerate(groups):
            if c.kind == "antidiagonal":  # position a of the row is multiplied with position stride - 1 - a of the group
                pairs = [(a, c.rows - 1 - a) for a in range(len(r)) if c.rows - 1 - a < len(g)]
                scores[i, j] = sum(q[r[a]] @ k[g[b]] for a, b in pairs) / c.rows
            else:
                scores[i, j] = q[r[-1]] @ k[g[0]]
    return scores


def _hull(mask: np.ndarray) -> tuple[int, int]:
    """The first key that any of these queries sees, and the position after the last one."""
    keys = np.flatnonzero(mask.any(axis=0))
    return (int(keys[0]), int(keys[-1]) + 1) if keys.size else (0, 0)


def _shares(scores: np.ndarray, seen: np.ndarray) -> np.ndarray:
    shares = np.zeros(scores.shape)
    for i, mask in enumerate(seen):
        if mask.any():
            weights = np.exp(scores[i, mask] - scores[i, mask].max())
            shares[i, mask] = weights / weights.sum()
    return shares


def _head_scores(p: Attention, c: Choice, b: int, h: int, mask: np.ndarray) -> np.ndarray:
    """Scores (rows, columns) of one head's blocks, before they are divided by their sums. `mask`: what each valid query sees."""
    (s_q, s_kv), (block_q, block_kv) = mask.shape, p.block_shape
    q, k = p.q[b, h, :s_q], p.grouped(p.k)[b, h, :s_kv]
    blocks_q, blocks_kv = _parts(s_q, block_q), _parts(s_kv, block_kv)
    joined = np.zeros((len(blocks_q), len(blocks_kv)))
    if c.kind == "vertical_slash":
        last = np.arange(max(0, s_q - c.rows), s_q)
        shares = _shares(q[last] @ k.T * p.factor, mask[last]) / max(1, len(last))
        token = np.arange(s_q) + (s_kv - s_q if p.begin is None else int(p.begin[b]))
        away = token[:, None] - np.arange(s_kv)
        slash = {int(d): shares[away[last] == d].sum() for d in np.unique(away[last])}
        for i, r in enumerate(blocks_q):
            for j, g in enumerate(blocks_kv):
                joined[i, j] = shares[:, g].sum() + sum(slash.get(int(d), 0) for d in away[np.ix_(r, g)].ravel()) / len(r)
        return joined
    size = block_q // c.rows if c.kind == "sampled_rows" else c.rows
    rows, groups = _parts(s_q, size), _parts(s_kv, c.keys)
    if c.kind == "sampled_rows":
        rows = [r[-1:] for r in rows]
    seen = np.array([[any(first <= j < end for j in g) for g in groups] for first, end in (_hull(mask[r]) for r in rows)])
    shares = _shares(_pair_scores(c, p.dtype, q, k, rows, groups) * p.factor, seen)
    of_block = np.array([g[0] // block_kv for g in groups])
    shares = np.stack([shares[:, of_block == j].sum(axis=1) for j in range(len(blocks_kv))], axis=1)
    for i in range(len(blocks_q)):
        mine = shares[[r[0] // block_q == i for r in rows]]
        joined[i] = mine.max(axis=0) if c.over == "largest" else mine.mean(axis=0)
    return joined


def visible(p: Attention, b: int) -> tuple[np.ndarray, np.ndarray]:
    """The keys that each valid query of an entry sees, and a mask (rows, columns) of whether a block of queries sees any key of a block."""
    mask = p.seen()[b, 0, : int(p.q_lens[b]), : int(p.kv_lens[b])]
    blocks = np.zeros((-(-p.q.shape[2] // p.block_shape[0]), -(-p.k.shape[2] // p.block_shape[1])), bool)
    for i, j in zip(*np.nonzero(mask), strict=True):
        blocks[i // p.block_shape[0], j // p.block_shape[1]] = True
    return mask, blocks


def scores_of(p: Attention, c: Choice) -> np.ndarray:
    """(B, lists, rows, columns): scores that add up to 1 in each row that sees anything."""
    batch, heads, kv_heads = p.q.shape[0], p.q.shape[1], p.k.shape[1]
    lists = kv_heads if c.per_kv_head else heads
    every = []
    for b in range(batch):
        mask, blocks = visible(p, b)
        scores = np.zeros((lists, *blocks.shape))
        for h in range(heads):
            one = _head_scores(p, c, b, h, mask) if mask.size else np.zeros((0, 0))
            padded = np.zeros(blocks.shape)
            padded[: one.shape[0], : one.shape[1]] = one
            padded[~blocks] = 0
            total = padded.sum(axis=1, keepdims=True)
            alike = blocks / np.maximum(1, blocks.sum(axis=1, keepdims=True))
            scores[h * lists // heads] += np.where(total > 0, padded / np.where(total > 0, total, 1), alike) * lists / heads
        every.append(scores)
    return np.array(every).reshape(batch, lists, -(-p.q.shape[2] // p.block_shape[0]), -(-p.k.shape[2] // p.block_shape[1]))


def _forced_for_query(p: Attention, c: Choice, b: int, t: int, mask: np.ndarray) -> list[int]:
    """The sink blocks and the recent blocks of a query that sees the keys in `mask`."""
    keys, block = np.flatnonzero(mask), p.block_shape[1]
    begin = max(0, int(p.ranges[b, t, 0])) if p.ranges is not None else 0
    first = int(p.kv_lens[b]) - int(p.q_lens[b]) if p.begin is None else int(p.begin[b])
    up_to_diagonal = keys[keys <= t + first]
    found = {begin // block + n for n in range(min(c.sink, mask.size))}
    if up_to_diagonal.size:
        found |= {int(up_to_diagonal[-1]) // block - n for n in range(min(c.recent, mask.size))}
    return sorted(found & set((keys // block).tolist()))


def forced(p: Attention, c: Choice, b: int) -> np.ndarray:
    """Blocks (rows, columns) of an entry that are always kept."""
    mask, blocks = visible(p, b)
    (s_q, s_kv), (block_q, block_kv) = mask.shape, p.block_shape
    kept = np.zeros(blocks.shape, bool)
    rows, columns = -(-s_q // block_q), -(-s_kv // block_kv)
    for i in range(rows):
        for t in range(i * block_q, min((i + 1) * block_q, s_q)):
            for_query = _forced_for_query(p, c, b, t, mask[t])
            kept[i, for_query] = True
        kept[i, max(0, columns - c.last_columns) : columns] = True
        if i < c.first_rows or i >= rows - c.last_rows:
            kept[i] = True
    return kept & blocks


def check_lists(p: Attention, c: Choice, scores: np.ndarray, kept: np.ndarray) -> None:
    """Raises `Finding` unless `kept` (B, lists, rows, columns) is what the budget keeps with these scores."""
    lists = scores.shape[1]
    for b in range(scores.shape[0]):
        _, blocks = visible(p, b)
        always = np.repeat(forced(p, c, b)[None], lists, axis=0)
        for x, i in np.ndindex(always.shape[:2]):
            if blocks[i].any() and not always[x, i].any():
                always[x, i, np.argmax(np.where(blocks[i], scores[b, x, i], -1))] = True
        free = blocks & ~always
        if (kept[b] & ~blocks).any():
            raise Finding("a block is kept that the row may not see")
        if (always & ~kept[b]).any():
            raise Finding("a block that must always be kept is not kept")
        if c.budget == "density":
            _check_density(c, scores[b], kept[b], always, free)
            continue
        for x, i in np.ndindex(free.shape[:2]):
            number = c.numbers[x if len(c.numbers) > 1 else 0]
            _check_row(c.budget, number, scores[b, x, i], kept[b, x, i], always[x, i], free[x, i])


def _tails(scores: np.ndarray, free: np.ndarray) -> dict[int, float]:
    """For each free block, the sum of its score and of those after it, in the order of falling score and rising column."""
    order = sorted(np.flatnonzero(free).tolist(), key=lambda j: (-scores[j], j))
    return {j: float(np.sum(scores[order[at:]], dtype=np.float64)) for at, j in enumerate(order)}


def _check_row(budget: str, number: float, scores: np.ndarray, kept: np.ndarray, always: np.ndarray, free: np.ndarray) -> None:
    if budget == "threshold":
        expected = scores.astype(np.float64) >= number
    elif budget == "top_k":
        best = list(_tails(scores, free))[: max(0, int(number) - int(always.sum()))]
        expected = np.isin(np.arange(scores.size), best)
    else:
        tails = _tails(scores, free)
        near = [j for j, tail in tails.items() if abs(tail - (1 - number)) < 1e-12]
        expected = np.isin(np.arange(scores.size), [j for j, tail in tails.items() if tail > 1 - number])
        expected[near] = kept[near]
    if (kept[free] != expected[free]).any():
        raise Finding(f"{budget}: kept {np.flatnonzero(kept).tolist()} where {np.flatnonzero(expected | always).tolist()} was expected")


def _check_density(c: Choice, scores: np.ndarray, kept: np.ndarray, always: np.ndarray, free: np.ndarray) -> None:
    lists = scores.shape[0]
    for some in [[x] for x in range(lists)] if len(c.numbers) > 1 else [list(range(lists))]:
        number = c.numbers[some[0] if len(c.numbers) > 1 else 0]
        wanted = max(int(np.floor(number * (always[some] | free[some]).sum() + 0.5)), int(always[some].sum()))
        if kept[some].sum() != wanted:
            raise Finding(f"density: {kept[some].sum()} blocks are kept where {wanted} were expected")
        inside, outside = [np.inf], [-np.inf]
        for x in some:
            for i in range(scores.shape[1]):
                for j, tail in _tails(scores[x, i], free[x, i]).items():
                    (inside if kept[x, i, j] else outside).append(tail)
        if min(inside) < max(outside) * (1 - 1e-6):
            raise Finding(f"density: a tail of {min(inside)} is kept and one of {max(outside)} is not")


def mask_of(sabi: Any, columns: int, c: Choice, kv_heads: int) -> np.ndarray:
    """The kept blocks (B, lists, rows, columns) of a list, after a check that its rows are rising columns and then pads."""
    sabi = np.asarray(sabi)
    pad = 65535 if sabi.dtype == np.uint16 else -1
    if c.per_kv_head and sabi.shape[1]:
        grouped = sabi.reshape(sabi.shape[0], kv_heads, sabi.shape[1] // kv_heads, *sabi.shape[2:])
        if (grouped != grouped[:, :, :1]).any():
            raise Finding("heads that share keys have other lists")
        sabi = grouped[:, :, 0]
    mask = np.zeros((*sabi.shape[:3], columns), bool)
    for at in np.ndindex(sabi.shape[:3]):
        row = sabi[at].astype(np.int64)
        n = int((row != pad).sum())
        if (row[:n] == pad).any() or (np.diff(row[:n]) <= 0).any() or (n and not 0 <= row[0] <= row[n - 1] < columns):
            raise Finding(f"row {at}: {row.tolist()} is not rising columns and then pads")
        mask[(*at, row[:n])] = True
    if sabi.shape[3] != max(1, int(mask.sum(axis=-1).max(initial=0))):
        raise Finding(f"a width of {sabi.shape[3]} where the longest row has {int(mask.sum(axis=-1).max(initial=0))}")
    return mask
