"""`select.select_tokens` against a brute-force oracle, with all options at once."""

from __future__ import annotations

from typing import Any

import numpy as np

from blitz_attn import select

from . import arrays, checks
from .arrays import stored
from .draw import Draw
from .problems import Finding, problem


def _exact(q: np.ndarray, k: np.ndarray, weights: np.ndarray, scale: float, seen: int) -> tuple[np.ndarray, np.ndarray]:
    """Scores of one query for the keys that it sees, and the sums of the magnitudes that they are made of."""
    scores, sizes = np.zeros(seen), np.zeros(seen)
    for h in range(len(q)):
        for j in range(seen):
            terms = q[h] * k[j] * scale
            score = float(terms.sum())
            scores[j] += weights[h] * max(score, 0.0)
            sizes[j] += abs(weights[h]) * float(np.abs(terms).sum())
    return scores, sizes


@problem("select_tokens", weight=0.6)
def select_tokens(draw: Draw) -> None:
    dtype = draw.pick("dtype", ("float32", "bfloat16", "float16", "float64"))
    batch, heads = draw.integer("batch", 1, 3), draw.pick("heads", (1, 2, 5, 16, 64))
    s_q, s_kv = draw.integer("s_q", 1, 20, likely=(1, 4)), draw.integer("s_kv", 1, 200, likely=(1, 32, 33, 64))
    dim = draw.pick("dim", (8, 1, 3, 16, 33, 64))
    rng = draw.rng("numbers")
    coarse = draw.flag("coarse", 0.3)  # many scores are equal
    make = (lambda *shape: rng.integers(-2, 3, shape).astype(float)) if coarse else (lambda *shape: rng.standard_normal(shape))
    q, k, weights = make(batch, s_q, heads, dim), make(batch, s_kv, dim), make(batch, s_q, heads)
    top_k = draw.integer("top_k", 1, 220, likely=(1, 8, s_kv))
    pool = draw.pick("pool_size", (1, 1, 2, 4, 7))
    options: dict[str, Any] = {"causal": draw.flag("causal"), "ascending": draw.flag("ascending"), "num_threads": checks.threads(draw)}
    options |= {"pool_size": pool, "keep_tail": draw.flag("keep_tail")} if pool > 1 or draw.flag("pools of one") else {}
    scale = draw.pick("scale", (None, 0.25, 1.0, -0.5)) if not coarse else 0.25
    if scale is not None:
        options["scale"] = scale
    packed, ragged = draw.flag("packed", 0.3), draw.flag("ragged")
    q_lens = [draw.integer(f"q_lens[{b}]", 0, s_q, likely=(s_q,)) if packed or ragged else s_q for b in range(batch)]
    rows = [draw.integer(f"rows[{b}]", 0, s_kv, likely=(s_kv,)) if packed else s_kv for b in range(batch)]  # of k
    tokens = [n * pool for n in rows]
    if ragged and (pool > 1 or not packed):
        tokens = [draw.integer(f"kv_lens[{b}]", 0, n + pool - 1, likely=(n,)) for b, n in enumerate(tokens)]
        options["kv_lens"] = tokens
    if ragged and not packed:
        options["q_lens"] = q_lens
    begins = [kv - n for n, kv in zip(q_lens, tokens, strict=True)]
    if draw.flag("begins", 0.3):
        begins = [draw.integer(f"begin[{b}]", -5, 220 * pool) for b in range(batch)]
        options["q_begin"] = begins
    given = [stored(q, dtype), stored(k, dtype), stored(weights, "float64" if dtype == "float64" else "float32")]
    exact = [arrays.values_of(given[0], dtype), arrays.values_of(given[1], dtype), given[2].astype(np.float64)]
    if packed:
        given = [np.concatenate([x[b, : n[b]] for b in range(batch)]) for x, n in zip(given, (q_lens, rows, q_lens), strict=True)]
        options |= {f"cu_seqlens_{name}": np.concatenate([[0], np.cumsum(n)]) for name, n in (("q", q_lens), ("kv", rows))}
    placed = [arrays.place(draw, name, x, last_contiguous=name != "weights") for name, x in zip(("q", "k", "weights"), given, strict=True)]
    named = {"dtype": dtype} if dtype == "bfloat16" else {}
    found, scores = select.select_tokens(*(x.array for x in placed), top_k, return_scores=True, **options, **named)
    alone = select.select_tokens(*(x.array for x in placed), top_k, **options | {"num_threads": 1}, **named)
    for x in placed:
        x.check_unchanged()
    if not np.array_equal(found, alone):
        raise Finding("other keys with one thread, or without scores")
    row = 0
    unit = 2.0**-50 if dtype == "float64" else 2.0**-21
    for b in range(batch):
        for i in range(q_lens[b] if packed else s_q):
            at = (row,) if packed else (b, i)
            row += 1
            seen = 0 if i >= q_lens[b] else tokens[b]
            if options["causal"]:
                seen = max(0, min(seen, begins[b] + i + 1))
            complete, rest = divmod(seen, pool)
            wanted, sizes = _exact(exact[0][b, i], exact[1][b], exact[2][b, i], scale if scale is not None else dim**-0.5, complete)
            keys, values = found[at], scores[at]
            if options.get("keep_tail"):
                place = min(top_k, complete) if rest else top_k
                if keys[place] != (complete if rest else -1) or values[place] != (np.inf if rest else -np.inf):
                    raise Finding(f"tail {keys[place]} with score {values[place]} of a query that sees {seen} tokens")
                keys, values = np.delete(keys, place), np.delete(values, place)
            _check_row(keys, values, wanted, unit * (heads + dim) * sizes, options["ascending"], coarse)


def _check_row(keys: np.ndarray, scores: np.ndarray, wanted: np.ndarray, slack: np.ndarray, ascending: bool, is_exact: bool) -> None:
    n = min(len(keys), len(wanted))
    if (keys[n:] != -1).any() or (scores[n:] != -np.inf).any() or (keys[:n] < 0).any() or (keys[:n] >= len(wanted)).any():
        raise Finding(f"keys {keys} where {n} of {len(wanted)} were expected")
    chosen, own = keys[:n], scores[:n]
    if len(set(chosen.tolist())) != n or (ascending and (np.diff(chosen) <= 0).any()):
        raise Finding(f"keys {chosen} are not different, or do not rise")
    if not ascending and (np.diff(own) > 0).any():
        raise Finding(f"scores {own} rise")
    if (np.abs(own - wanted[chosen]) > slack[chosen]).any():
        raise Finding(f"scores {own} where {wanted[chosen]} were expected")
    left = np.setdiff1d(np.arange(len(wanted)), chosen)
    if n and left.size and (wanted[left] - slack[left]).max() > (wanted[chosen] + slack[chosen]).min():
        raise Finding("a key with a higher score was left out")
    if is_exact:  # all sums are exact, so that ties are
        best = np.argsort(-wanted, kind="stable")[:n]
        if not np.array_equal(np.sort(chosen) if ascending else chosen, np.sort(best) if ascending else best):
            raise Finding(f"keys {chosen} where {best} were expected")
