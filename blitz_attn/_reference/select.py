"""float64 twins of the choosers for prefill. Public through `blitz_attn.reference`."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .. import _arrays
from .dense import Rules, SequenceParts, block_sparse_attention, make_rules, round_to, sequences_of, to_float64

__all__ = ["select_and_attend_prefill", "select_blocks_prefill"]

_DEFAULTS: dict[str, tuple[str, dict[str, Any]]] = {
    "pooled": ("Pooled", {"pool": 8, "term": "both", "over": "largest"}),
    "antidiagonal": ("Antidiagonal", {"stride": 16, "over": "mean"}),
    "sampled_rows": ("SampledRows", {"rows": 8, "over": "largest"}),
    "vertical_slash": ("VerticalSlash", {"rows": 64}),
}


def _rules_of(chooser: Any, block_q: int, block_kv: int) -> tuple[str, dict[str, Any]]:
    """The class of a chooser and its fields."""
    if isinstance(chooser, str):
        if chooser not in _DEFAULTS:
            raise ValueError(f"chooser: expected one of {', '.join(_DEFAULTS)}, got {chooser!r}")
        kind, fields = _DEFAULTS[chooser]
        if kind == "Pooled":
            fields = fields | {"pool": (math.gcd(8, block_q), math.gcd(8, block_kv))}
        elif kind == "Antidiagonal":
            fields = fields | {"stride": math.gcd(16, block_q, block_kv)}
        elif kind == "SampledRows":
            fields = fields | {"rows": math.gcd(8, block_q)}
        return kind, fields
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


def _visible(seq: SequenceParts, rules: Rules) -> np.ndarray:
    """(queries, 2): the first key that each valid query sees, and the place after the last one; (0, 0) where it sees none."""
    lows, highs = rules.bounds(np.arange(seq.q_len) + seq.begin)
    low, end = np.maximum(lows, 0), np.minimum(highs, seq.kv_len - 1) + 1
    if seq.ranges is not None:
        low, end = np.maximum(low, seq.ranges[: seq.q_len, 0]), np.minimum(end, seq.ranges[: seq.q_len, 1])
    return np.where((low < end)[:, None], np.stack([low, end], axis=1), 0)


def _hull(visible: np.ndarray) -> tuple[int, int]:
    """From the first key that some of these queries see to the place after the last one; (0, 0) where they see none."""
    seeing = visible[visible[:, 0] < visible[:, 1]]
    return (int(seeing[:, 0].min()), int(seeing[:, 1].max())) if len(seeing) else (0, 0)


def _blocks_of(keys: np.ndarray, columns: int, block_kv: int) -> np.ndarray:
    """(columns,) bool: the blocks that a query which sees these keys sees."""
    column = np.arange(columns)
    return (column * block_kv < keys[1]) & ((column + 1) * block_kv > keys[0]) & (keys[0] < keys[1])


def _softmax(scores: np.ndarray, seen: np.ndarray) -> np.ndarray:
    """Of each row over what it sees. Rows that see nothing are 0; what is not a number is NaN."""
    scores = np.where(seen, scores, -np.inf)
    top = scores.max(axis=1, keepdims=True)
    weights = np.exp(scores - np.where(top == -np.inf, 0, top))
    total = weights.sum(axis=1, keepdims=True)
    return weights / np.where(total == 0, 1, total)


def _row_shares(kind: str, fields: dict[str, Any], bfloat16: bool, q, k, seq, visible, scale, block_shape) -> list[np.ndarray]:
    """For each block of queries the shares (rows of the block, blocks of keys)."""
    block_q, block_kv = block_shape
    q, k = q[: seq.q_len], k[: seq.kv_len]
    group = 1
    if kind == "Pooled":
        pool = fields["pool"]
        size, group = pool if isinstance(pool, tuple) else (pool, pool)
    elif kind == "Antidiagonal":
        size = group = fields["stride"]
    else:
        size = block_q // fields["rows"]
    rows, groups = _groups(seq.q_len, size), _groups(seq.kv_len, group)
    if kind == "SampledRows":
        rows = [slice(r.stop - 1, r.stop) for r in rows]
        scores = q[[r.start for r in rows]] @ k.T
    elif kind == "Pooled":
        scores = _pooled(q, k, rows, groups, fields["term"], bfloat16)
    else:
        scores = _antidiagonal(q, k, rows, groups, fields["stride"])
    starts, stops = np.array([g.start for g in groups]), np.array([g.stop for g in groups])
    ranges = np.array([_hull(visible[r]) for r in rows])
    seen = (starts < ranges[:, 1:]) & (stops > ranges[:, :1])
    shares = _softmax(scores * scale, seen)
    of_blocks = np.stack([shares[:, starts // block_kv == c].sum(axis=1) for c in range(-(-seq.kv_len // block_kv))], axis=1)
    owners = np.array([r.start for r in rows]) // block_q
    return [of_blocks[owners == b] for b in range(-(-seq.q_len // block_q))]


def _vertical_slash(fields: dict[str, Any], q, k, seq, visible, scale, block_shape) -> list[np.ndarray]:
    """For each block of queries its scores, as one row."""
    block_q, block_kv = block_shape
    looked_at = range(max(0, seq.q_len - fields["rows"]), seq.q_len)
    ranges = visible[looked_at]
    keys = np.arange(seq.kv_len)
    weights = _softmax(q[looked_at] @ k[: seq.kv_len].T * scale, (keys >= ranges[:, :1]) & (keys < ranges[:, 1:]))
    weights = np.where(np.isnan(weights), 0, weights) / len(looked_at)
    vertical = weights.sum(axis=0)
    shift = seq.begin
    slash: dict[int, float] = {}
    for i, row in zip(looked_at, weights, strict=True):
        for j in np.flatnonzero(row):
            slash[i + shift - int(j)] = slash.get(i + shift - int(j), 0.0) + row[j]
    columns = -(-seq.kv_len // block_kv)
    blocks = []
    for first in range(0, seq.q_len, block_q):
        queries = range(first, min(first + block_q, seq.q_len))
        scores = np.zeros((1, columns))
        for c in range(columns):
            here = range(c * block_kv, min((c + 1) * block_kv, seq.kv_len))
            scores[0, c] = vertical[here.start : here.stop].sum()
            scores[0, c] += sum(slash.get(i + shift - j, 0.0) for i in queries for j in here) / len(queries)
        blocks.append(scores)
    return blocks


# ---- Budgets --------------------------------------------------------------------------------------------------------


def _joined(shares: np.ndarray, over: str, inside: np.ndarray) -> np.ndarray:
    """Scores of a row of blocks, adding up to 1. `inside`: the blocks that it sees."""
    shares = np.where(shares > 0, shares, 0)  # NaN too
    scores = shares.max(axis=0) if over == "largest" else shares.mean(axis=0)
    scores = np.where(inside, scores, 0)
    return scores / scores.sum() if scores.sum() > 0 else inside / max(1, inside.sum())


def _forced(row: int, rows: int, inside: np.ndarray, seq, visible, block_shape, frame: tuple[int, ...]) -> np.ndarray:
    """The blocks that a row of blocks always keeps: those that are forced for one of its queries, and that this query sees."""
    block_q, block_kv = block_shape
    sink, recent, last_columns, first_rows, last_rows = frame
    column = np.arange(inside.size)
    kept = column >= inside.size - last_columns
    if row < first_rows or row >= rows - last_rows:
        kept[:] = True
    for i in range(row * block_q, min((row + 1) * block_q, seq.q_len)):
        own = _blocks_of(visible[i], inside.size, block_kv)
        begin = 0 if seq.ranges is None else max(0, int(seq.ranges[i, 0])) // block_kv
        kept |= own & (column >= begin) & (column < begin + sink)
        newest = min(i + seq.begin, int(visible[i, 1]) - 1)
        if newest >= visible[i, 0]:
            kept |= own & (column > newest // block_kv - recent) & (column <= newest // block_kv)
    return kept & inside


def _tails(scores: np.ndarray, free: np.ndarray) -> np.ndarray:
    """Of each free block the scores of it and of those behind it; -1 elsewhere."""
    order = sorted(np.flatnonzero(free), key=lambda b: (-scores[b], b))
    tails = np.full(scores.size, -1.0)
    tails[order] = np.cumsum(scores[order][::-1])[::-1]
    return tails


def _within(name: str, budget: float, scores: np.ndarray, kept: np.ndarray, free: np.ndarray) -> np.ndarray:
    """What a row keeps, by the budgets that look at no other row."""
    if name == "threshold":
        return kept | (free & (scores >= budget))
    tails = _tails(scores, free)
    if name == "top_p":
        return kept | (free & (tails > 1 - budget))
    best = sorted(np.flatnonzero(free), key=lambda b: (-scores[b], b))[: max(0, int(budget) - int(kept.sum()))]
    kept = kept.copy()
    kept[best] = True
    return kept


# ---- The operations -------------------------------------------------------------------------------------------------


def select_blocks_prefill(
    q,
    k,
    *,
    chooser="pooled",
    density=None,
    top_p=None,
    threshold=None,
    top_k=None,
    block_shape=(64, 64),
    scale=None,
    layout="BNSD",
    causal=False,
    window=None,
    q_lens=None,
    kv_lens=None,
    cu_seqlens_q=None,
    cu_seqlens_kv=None,
    num_heads=None,
    num_kv_heads=None,
    q_begin=None,
    kv_ranges=None,
    sink=1,
    recent=2,
    last_columns=0,
    first_rows=0,
    last_rows=0,
    per_kv_head=False,
    return_scores=False,
    index_dtype="int32",
    dtype=None,
    num_threads=None,
):
    """See `blitz_attn.select_blocks_prefill`."""
    block_q, block_kv = (int(n) for n in block_shape)
    queries, keys = to_float64(q, dtype), to_float64(k, dtype)
    shape_args = (layout, q_lens, kv_lens, cu_seqlens_q, cu_seqlens_kv, num_heads, num_kv_heads, q_begin, kv_ranges)
    sequences = sequences_of(queries, keys, keys, *shape_args)
    kind, fields = _rules_of(chooser, block_q, block_kv)
    if kind == "VerticalSlash" and kv_ranges is not None:
        raise ValueError("kv_ranges: expected None with the chooser vertical_slash, whose lines run through all keys, got ranges")
    bfloat16 = "bfloat16" in (_arrays.dtype_name(getattr(q, "dtype", None)), _arrays.dtype_name(dtype))
    rules = make_rules(causal, window)
    budgets = {"density": density, "top_p": top_p, "threshold": threshold, "top_k": top_k}
    ((name, budget),) = ((name, value) for name, value in budgets.items() if value is not None)
    heads, kv_heads = (sequences[0].q.shape[0], sequences[0].k.shape[0]) if sequences else (1, 1)
    lists = kv_heads if per_kv_head else heads
    one_each = np.broadcast_to(np.asarray(budget, np.float64), lists)
    rows = max((-(-s.q.shape[1] // block_q) for s in sequences), default=0)
    columns = max((-(-s.k.shape[1] // block_kv) for s in sequences), default=0)
    scores = np.zeros((len(sequences), lists, rows, columns))
    mask = np.zeros(scores.shape, bool)
    for b, seq in enumerate(sequences):
        own_rows, own_columns = -(-seq.q_len // block_q), -(-seq.kv_len // block_kv)
        if not own_rows or not own_columns:
            continue
        factor = 1 / math.sqrt(seq.q.shape[2]) if scale is None else scale
        here = scores[b, :, :own_rows, :own_columns]
        kept, free = np.zeros(here.shape, bool), np.zeros(here.shape, bool)
        visible = _visible(seq, rules)
        parts = np.split(visible, range(block_q, seq.q_len, block_q))
        seen = [np.any([_blocks_of(keys, own_columns, block_kv) for keys in part], axis=0) for part in parts]
        frame = (sink, recent, last_columns, first_rows, last_rows)
        always = [_forced(r, own_rows, seen[r], seq, visible, (block_q, block_kv), frame) for r in range(own_rows)]
        for h in range(heads):
            call = (seq.q[h], seq.k[h // (heads // kv_heads)], seq, visible, factor, (block_q, block_kv))
            with np.errstate(all="ignore"):
                shares = _vertical_slash(fields, *call) if kind == "VerticalSlash" else _row_shares(kind, fields, bfloat16, *call)
            for r in range(own_rows):
                here[h * lists // heads, r] += _joined(shares[r], fields.get("over", "mean"), seen[r]) * lists / heads
        for x, r in np.ndindex(lists, own_rows):
            kept[x, r] = always[r]
            if seen[r].any() and not kept[x, r].any():
                kept[x, r, np.argmax(np.where(seen[r], here[x, r], -1))] = True
            free[x, r] = seen[r] & ~kept[x, r]
            if name != "density":
                kept[x, r] = _within(name, one_each[x], here[x, r], kept[x, r], free[x, r])
        for share in (range(lists),) if np.ndim(budget) == 0 or np.size(budget) == 1 else [[x] for x in range(lists)]:
            if name == "density":
                share = list(share)
                tails = np.array([[_tails(here[x, r], free[x, r]) for r in range(own_rows)] for x in share])
                wanted = math.floor(one_each[share[0]] * (kept[share].sum() + free[share].sum()) + 0.5) - int(kept[share].sum())
                order = np.argsort(-tails, axis=None, kind="stable")[: max(0, min(wanted, int(free[share].sum())))]
                chosen = np.zeros(tails.size, bool)
                chosen[order] = True
                kept[share] |= chosen.reshape(tails.shape)
        mask[b, :, :own_rows, :own_columns] = kept
    width = max(1, int(mask.sum(axis=-1).max(initial=0)))
    sabi = np.full((*mask.shape[:-1], width), np.array(-1).astype(index_dtype), index_dtype)
    for at in np.ndindex(mask.shape[:-1]):
        listed = np.flatnonzero(mask[at])
        sabi[at][: listed.size] = listed
    sabi = np.repeat(sabi, heads // lists, axis=1)
    return (sabi, scores) if return_scores else sabi


def select_and_attend_prefill(
    q, k, v, *, q_total=None, attn_mask=None, alibi_slopes=None, sinks=None, softcap=None, return_lse=False, return_sabi=False,
    out_dtype=None, out=None, **options,
):  # fmt: skip
    """See `blitz_attn.select_and_attend_prefill`."""
    sabi = select_blocks_prefill(q, k, **options)
    names = ["scale", "layout", "causal", "window", "q_lens", "kv_lens", "cu_seqlens_q", "cu_seqlens_kv", "num_heads", "num_kv_heads"]
    attention = {name: options[name] for name in (*names, "q_begin", "kv_ranges", "dtype") if name in options}
    attention |= {"q_total": q_total, "return_lse": return_lse, "out_dtype": out_dtype, "out": out}
    attention |= {"attn_mask": attn_mask, "alibi_slopes": alibi_slopes, "sinks": sinks, "softcap": softcap}
    block_shape = options.get("block_shape", (64, 64))
    result = block_sparse_attention(q, k, v, sabi, block_shape=block_shape, **attention)
    parts = result if return_lse else (result,)
    parts = (*parts, sabi) if return_sabi else parts
    return parts if len(parts) > 1 else parts[0]
