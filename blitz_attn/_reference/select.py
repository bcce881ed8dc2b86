"""float64 twins of choosing blocks and tokens for prefill. Public through `blitz_attn.reference`."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np

from .._arrays import choice
from .._select.options import Options
from .attend import Sequence, factor
from .common import cuts, lengths, name_of, round_to, taken_by, to_float64, with_options_of
from .dense import block_sparse_attention, sequences_of
from .paged import dequantize_kv

__all__ = ["select_and_attend_prefill", "select_blocks_prefill", "select_tokens"]

_DEFAULTS: dict[str, tuple[str, dict[str, Any]]] = {
    "pooled": ("Pooled", {"pool": 8, "term": "both", "over": "largest"}),
    "antidiagonal": ("Antidiagonal", {"stride": 16, "over": "mean"}),
    "sampled_rows": ("SampledRows", {"rows": 8, "over": "largest"}),
    "vertical_slash": ("VerticalSlash", {"rows": 64}),
}


def _rules_of(chooser: Any, block_q: int, block_kv: int) -> tuple[str, dict[str, Any]]:
    """The name of a chooser's class, and its fields; "Given" for a function that returns scores."""
    if isinstance(chooser, str):
        kind, fields = _DEFAULTS[choice(chooser, "chooser", tuple(_DEFAULTS))]
        if kind == "Pooled":
            fields = fields | {"pool": (math.gcd(8, block_q), math.gcd(8, block_kv))}
        elif kind == "Antidiagonal":
            fields = fields | {"stride": math.gcd(16, block_q, block_kv)}
        elif kind == "SampledRows":
            fields = fields | {"rows": math.gcd(8, block_q)}
        return kind, fields
    if not hasattr(chooser, "_asdict"):
        return "Given", {}
    return type(chooser).__name__, chooser._asdict()


# ---- Rows and groups ------------------------------------------------------------------------------------------------


def _groups(tokens: int, size: int) -> list[slice]:
    return [slice(begin, min(begin + size, tokens)) for begin in range(0, tokens, size)]


def _in_bfloat16(x: np.ndarray) -> np.ndarray:
    return to_float64(round_to(x, "bfloat16"), "bfloat16")


def _pooled(q: np.ndarray, k: np.ndarray, rows: list[slice], groups: list[slice], term: str, bfloat16: bool) -> np.ndarray:
    queries = np.array([q[r].mean(axis=0) for r in rows])
    mean, high, low = (np.array([f(k[g], axis=0) for g in groups]) for f in (np.mean, np.fmax.reduce, np.fmin.reduce))
    if bfloat16:
        queries, mean = _in_bfloat16(queries), _in_bfloat16(mean)
        if term != "mean":
            of_bound, of_mean = (0.5, mean / 2) if term == "both" else (1.0, 0.0)
            middle, half = _in_bfloat16(of_mean + (high + low) / 2 * of_bound), _in_bfloat16((high - low) / 2 * of_bound)
            return queries @ middle.T + np.abs(queries) @ half.T
    by_mean = queries @ mean.T
    by_bound = np.maximum(queries, 0) @ high.T + np.minimum(queries, 0) @ low.T
    return {"mean": by_mean, "bound": by_bound, "both": (by_mean + by_bound) / 2}[term]


def _antidiagonal(q: np.ndarray, k: np.ndarray, rows: list[slice], groups: list[slice], stride: int) -> np.ndarray:
    scores = np.zeros((len(rows), len(groups)))
    for i, r in enumerate(rows):
        for j, g in enumerate(groups):
            for t in range(g.stop - g.start):
                if stride - 1 - t < r.stop - r.start:
                    scores[i, j] += q[r.start + stride - 1 - t] @ k[g.start + t]
    return scores / stride


def _visible(s: Sequence) -> np.ndarray:
    """(queries, 2): the first key that each valid query sees, and the place after the last one; (0, 0) where it sees none."""
    low, end = s.low[: s.q_len], s.high[: s.q_len] + 1
    return np.where((low < end)[:, None], np.stack([low, end], axis=1), 0)


def _hull(visible: np.ndarray) -> tuple[int, int]:
    """From the first key that some of these queries see to the place after the last one; (0, 0) where they see none."""
    seeing = visible[visible[:, 0] < visible[:, 1]]
    return (int(seeing[:, 0].min()), int(seeing[:, 1].max())) if len(seeing) else (0, 0)


def _blocks_of(keys: np.ndarray, columns: int, block_kv: int) -> np.ndarray:
    """(columns,) bool: the blocks that a query sees if it sees the keys from keys[0] to keys[1] - 1."""
    column = np.arange(columns)
    return (column * block_kv < keys[1]) & ((column + 1) * block_kv > keys[0]) & (keys[0] < keys[1])


def _softmax(scores: np.ndarray, seen: np.ndarray) -> np.ndarray:
    """The softmax of each row over what the row sees. Rows that see nothing are 0; rows with a NaN are NaN."""
    scores = np.where(seen, scores, -np.inf)
    top = scores.max(axis=1, keepdims=True)
    weights = np.exp(scores - np.where(top == -np.inf, 0, top))
    total = weights.sum(axis=1, keepdims=True)
    return weights / np.where(total == 0, 1, total)


def _row_shares(kind: str, fields: dict[str, Any], bfloat16: bool, q, k, visible, scale, block_shape) -> list[np.ndarray]:
    """For each block of queries, the shares of the softmax mass: (rows of the block, blocks of keys)."""
    block_q, block_kv = block_shape
    group = 1
    if kind == "Pooled":
        size, group = fields["pool"] if isinstance(fields["pool"], tuple) else (fields["pool"],) * 2
    elif kind == "Antidiagonal":
        size = group = fields["stride"]
    else:
        size = block_q // fields["rows"]
    rows, groups = _groups(len(q), size), _groups(len(k), group)
    if kind == "SampledRows":
        rows = [slice(r.stop - 1, r.stop) for r in rows]
        scores = q[[r.start for r in rows]] @ k.T
    elif kind == "Pooled":
        scores = _pooled(q, k, rows, groups, fields["term"], bfloat16)
    else:
        scores = _antidiagonal(q, k, rows, groups, fields["stride"])
    starts, stops = np.array([g.start for g in groups]), np.array([g.stop for g in groups])
    ranges = np.array([_hull(visible[r]) for r in rows])
    shares = _softmax(scores * scale, (starts < ranges[:, 1:]) & (stops > ranges[:, :1]))
    of_blocks = np.stack([shares[:, starts // block_kv == c].sum(axis=1) for c in range(-(-len(k) // block_kv))], axis=1)
    owners = np.array([r.start for r in rows]) // block_q
    return [of_blocks[owners == b] for b in range(-(-len(q) // block_q))]


def _vertical_slash(fields: dict[str, Any], q, k, visible, scale, block_shape) -> list[np.ndarray]:
    """For each block of queries, its scores as one row."""
    block_q, block_kv = block_shape
    looked_at, keys = np.arange(max(0, len(q) - fields["rows"]), len(q)), np.arange(len(k))
    ranges = visible[looked_at]
    weights = _softmax(q[looked_at] @ k.T * scale, (keys >= ranges[:, :1]) & (keys < ranges[:, 1:]))
    weights = np.where(np.isnan(weights), 0, weights) / len(looked_at)
    vertical, slash = weights.sum(axis=0), np.zeros(len(q) + len(k))
    # `slash` is indexed by the distance i - j + len(k) of query i and key j. Queries count from 0 here and below, wherever they begin.
    np.add.at(slash, looked_at[:, None] - keys + len(k), weights)
    every = vertical + slash[np.arange(len(q))[:, None] - keys + len(k)]
    starts = np.arange(0, len(k), block_kv)
    return [np.add.reduceat(every[part].mean(axis=0), starts)[None] for part in _groups(len(q), block_q)]


# ---- Budgets --------------------------------------------------------------------------------------------------------


def _joined(shares: np.ndarray, over: str, inside: np.ndarray) -> np.ndarray:
    """Scores of a row of blocks. They add up to 1, or are 0 if the row sees no block. `inside`: the blocks that it sees."""
    shares = np.where(shares > 0, shares, 0)  # NaN becomes 0, too
    scores = shares.max(axis=0) if over == "largest" else shares.mean(axis=0)
    scores = np.where(inside, scores, 0)
    return scores / scores.sum() if scores.sum() > 0 else inside / max(1, inside.sum())


def _forced(row: int, rows: int, inside: np.ndarray, s: Sequence, visible, block_shape, frame: tuple[int, ...]) -> np.ndarray:
    """The blocks that a row of blocks always keeps: of those that it sees, all if it is one of the first or last rows, else the last
    columns and those that are sink or recent for a query that sees them."""
    block_q, block_kv = block_shape
    sink, recent, last_columns, first_rows, last_rows = frame
    column = np.arange(inside.size)
    kept = column >= inside.size - last_columns
    if row < first_rows or row >= rows - last_rows:
        kept[:] = True
    for i in range(row * block_q, min((row + 1) * block_q, s.q_len)):
        own = _blocks_of(visible[i], inside.size, block_kv)
        begin = 0 if s.ranges is None else max(0, int(s.ranges[i, 0])) // block_kv
        kept |= own & (column >= begin) & (column < begin + sink)
        newest = min(i + s.begin, int(visible[i, 1]) - 1)
        if newest >= visible[i, 0]:
            kept |= own & (column > newest // block_kv - recent) & (column <= newest // block_kv)
    return kept & inside


def _order(scores: np.ndarray, free: np.ndarray) -> list[int]:
    """The free blocks by falling score. Of blocks with equal scores, the lower comes first."""
    return sorted(np.flatnonzero(free), key=lambda b: (-scores[b], b))


def _tails(scores: np.ndarray, free: np.ndarray) -> np.ndarray:
    """For each free block, its score plus the scores of all free blocks after it in `_order`; -1 elsewhere."""
    order, tails = _order(scores, free), np.full(scores.size, -1.0)
    tails[order] = np.cumsum(scores[order][::-1])[::-1]
    return tails


def _within(name: str, budget: float, scores: np.ndarray, kept: np.ndarray, free: np.ndarray) -> np.ndarray:
    """The blocks that a row keeps, under the budgets that apply to each row by itself."""
    if name == "threshold":
        return kept | (free & (scores >= budget))
    if name == "top_p":
        return kept | (free & (_tails(scores, free) > 1 - budget))
    kept, places = kept.copy(), max(0, int(budget) - int(kept.sum()))
    kept[_order(scores, free)[:places]] = True
    return kept


def _densest(density: float, scores: np.ndarray, kept: np.ndarray, free: np.ndarray) -> np.ndarray:
    """The blocks that rows (..., blocks) keep if together they have this density. Free blocks with the largest `_tails` are chosen."""
    tails = np.array([_tails(*row) for row in zip(scores.reshape(-1, scores.shape[-1]), free.reshape(-1, free.shape[-1]), strict=True)])
    wanted = math.floor(density * (kept.sum() + free.sum()) + 0.5) - int(kept.sum())
    chosen = np.zeros(tails.size, bool)
    chosen[np.argsort(-tails, axis=None, kind="stable")[: max(0, min(wanted, int(free.sum())))]] = True
    return kept | chosen.reshape(kept.shape)


# ---- The operations -------------------------------------------------------------------------------------------------


def select_blocks_prefill(
    q, k, *, chooser="pooled", density=None, top_p=None, threshold=None, top_k=None, block_shape=(64, 64), scale=None, layout="BNSD",
    causal=False, window=None, q_lens=None, kv_lens=None, cu_seqlens_q=None, cu_seqlens_kv=None, num_heads=None, num_kv_heads=None,
    q_begin=None, kv_ranges=None, sink=1, recent=2, last_columns=0, first_rows=0, last_rows=0, per_kv_head=False, return_scores=False,
    index_dtype="int32", dtype=None, num_threads=None,
):  # fmt: skip
    """See `blitz_attn.select_blocks_prefill`."""
    shape = block_q, block_kv = tuple(int(n) for n in block_shape)
    options, inputs = locals() | {"attn_mask": None, "alibi_slopes": None}, name_of(q, dtype)
    sequences = sequences_of(*(to_float64(x, dtype) for x in (q, k, k)), None, options, inputs)
    kind, fields = _rules_of(chooser, block_q, block_kv)
    if kind == "VerticalSlash" and kv_ranges is not None:
        raise ValueError("kv_ranges: expected None with the chooser vertical_slash, whose lines run through all keys, got ranges")
    budgets = {"density": density, "top_p": top_p, "threshold": threshold, "top_k": top_k}
    ((name, budget),) = ((name, value) for name, value in budgets.items() if value is not None)
    heads, kv_heads = (len(sequences[0].q), len(sequences[0].k)) if sequences else (1, 1)
    lists = kv_heads if per_kv_head else heads
    one_each = np.broadcast_to(np.asarray(budget, np.float64), lists)
    rows, columns = (
        max((-(-x.shape[1] // size) for x in xs), default=0)
        for xs, size in zip(([s.q for s in sequences], [s.k for s in sequences]), shape, strict=True)
    )
    scores = np.zeros((len(sequences), lists, rows, columns))
    if kind == "Given":
        given = np.asarray(chooser(q, k, per_kv_head=options["per_kv_head"], **vars(Options.of(options))), np.float64)
        given = np.repeat(given, heads // given.shape[1], axis=1) if given.size else given
    mask = np.zeros(scores.shape, bool)
    for b, s in enumerate(sequences):
        own_rows, own_columns = -(-s.q_len // block_q), -(-s.kv_len // block_kv)
        if not own_rows or not own_columns:
            continue
        here, visible = scores[b, :, :own_rows, :own_columns], _visible(s)
        seen = [np.any([_blocks_of(x, own_columns, block_kv) for x in visible[part]], axis=0) for part in _groups(s.q_len, block_q)]
        frame = (sink, recent, last_columns, first_rows, last_rows)
        always = [_forced(r, own_rows, seen[r], s, visible, shape, frame) for r in range(own_rows)]
        for h in range(heads):
            call = (visible, factor(scale, s.q.shape[2]), shape)
            q_h, k_h = s.q[h, : s.q_len], s.k[h // (heads // kv_heads), : s.kv_len]
            with np.errstate(all="ignore"):
                if kind == "Given":
                    shares = [given[b, h, r : r + 1, :own_columns] for r in range(own_rows)]
                elif kind == "VerticalSlash":
                    shares = _vertical_slash(fields, q_h, k_h, *call)
                else:
                    shares = _row_shares(kind, fields, inputs == "bfloat16", q_h, k_h, *call)
            for r in range(own_rows):
                here[h * lists // heads, r] += _joined(shares[r], fields.get("over", "mean"), seen[r]) * lists / heads
        kept = np.array([always] * lists)
        for x, r in np.ndindex(lists, own_rows):
            if seen[r].any() and not kept[x, r].any():
                kept[x, r, np.argmax(np.where(seen[r], here[x, r], -1))] = True
        free = np.array(seen) & ~kept
        if name == "density":
            for some in [slice(None)] if np.size(budget) == 1 else map(slice, range(lists), range(1, lists + 1)):
                kept[some] = _densest(one_each[some][0], here[some], kept[some], free[some])
        else:
            for at in np.ndindex(lists, own_rows):
                kept[at] = _within(name, one_each[at[0]], here[at], kept[at], free[at])
        mask[b, :, :own_rows, :own_columns] = kept
    width = max(1, int(mask.sum(axis=-1).max(initial=0)))
    sabi = np.full((*mask.shape[:-1], width), np.array(-1).astype(index_dtype), index_dtype)
    for at in np.ndindex(mask.shape[:-1]):
        listed = np.flatnonzero(mask[at])
        sabi[at][: listed.size] = listed
    sabi = np.repeat(sabi, heads // lists, axis=1)
    return (sabi, scores) if return_scores else sabi


@with_options_of(block_sparse_attention, select_blocks_prefill, without="return_scores")
def select_and_attend_prefill(q, k, v, *, return_sabi=False, **options):
    """See `blitz_attn.select_and_attend_prefill`."""
    sabi = select_blocks_prefill(q, k, **taken_by(select_blocks_prefill, options))
    result = block_sparse_attention(q, k, v, sabi, **taken_by(block_sparse_attention, options))
    parts = (*(result if options["return_lse"] else (result,)), *((sabi,) if return_sabi else ()))
    return parts if len(parts) > 1 else parts[0]


def select_tokens(
    q, k, weights, top_k, *, scale=None, causal=False, q_lens=None, kv_lens=None, cu_seqlens_q=None, cu_seqlens_kv=None,
    block_tables=None, q_begin=None, ascending=False, pool_size=1, keep_tail=False, block_size=1, min_score=None, k_scale=None,
    return_scores=False, dtype=None, kv_dtype=None, num_threads=None,
):  # fmt: skip
    """See `blitz_attn.select_tokens`."""
    kind = name_of(q, dtype)
    q, weights = to_float64(q, dtype), to_float64(weights)
    k = to_float64(k, dtype) if k_scale is None else dequantize_kv(k, k_scale)
    if cu_seqlens_q is not None:
        parts = [slice(*ends) for ends in pairwise(cuts("cu_seqlens_q", cu_seqlens_q, len(q)))]
    else:
        parts = list(range(len(q)))
    if block_tables is not None:
        keys_of = [k[pages].reshape(-1, k.shape[-1]) for pages in np.where(np.isin(block_tables, range(len(k))), block_tables, 0)]
    elif cu_seqlens_q is not None:
        keys_of = [k[a:b] for a, b in pairwise(cuts("cu_seqlens_kv", cu_seqlens_kv, len(k)))]
    else:
        keys_of = list(k)
    q_sizes = lengths("q_lens", q_lens, [len(q[own]) for own in parts])
    kv_sizes = [len(keys) * pool_size for keys in keys_of]
    if kv_lens is not None:  # the last pool need not be complete
        kv_sizes = lengths("kv_lens", kv_lens, [n + pool_size - 1 for n in kv_sizes])
    begins = [kv - n for n, kv in zip(q_sizes, kv_sizes, strict=True)]
    if q_begin is not None:
        begins = np.broadcast_to(np.asarray(q_begin), len(parts)).tolist()
    shape = (*q.shape[:-2], top_k + bool(keep_tail))
    selected, scores = np.full(shape, -1, np.int32), np.full(shape, -np.inf)
    for own, keys, n, kv, begin in zip(parts, keys_of, q_sizes, kv_sizes, begins, strict=True):
        for i in range(n):
            seen = max(0, min(kv, begin + i + 1)) if causal else kv
            with np.errstate(all="ignore"):
                products = factor(scale, q.shape[-1]) * (q[own][i] @ keys[: seen // pool_size].T)
                found = weights[own][i] @ np.where(products < 0, 0, products)
            found = np.where(np.isnan(found), -np.inf, found)
            found = np.maximum.reduceat(found, np.arange(0, len(found), block_size)) if len(found) else found  # of each block
            best = np.argsort(-found, kind="stable")
            best = best[found[best] >= (-np.inf if min_score is None else min_score)][:top_k]
            best = np.sort(best) if ascending else best
            selected[own][i, : len(best)], scores[own][i, : len(best)] = best, found[best]
            if keep_tail and seen % pool_size:
                selected[own][i, len(best)], scores[own][i, len(best)] = seen // pool_size, np.inf
    real = np.float64 if kind == "float64" else np.float32
    return (selected, scores.astype(real)) if return_scores else selected
