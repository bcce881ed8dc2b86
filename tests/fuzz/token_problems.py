"""`select.select_tokens` against a brute-force oracle, with all options drawn together."""

from __future__ import annotations

from typing import Any

import numpy as np

from blitz_attn import select

from . import arrays, checks
from .arrays import stored
from .draw import Draw
from .problems import Finding, problem


def _exact(q: np.ndarray, k: np.ndarray, weights: np.ndarray, scale: float, seen: int) -> tuple[np.ndarray, np.ndarray]:
    """Scores of one query for the keys that it sees, and the sums of the absolute values of their terms."""
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
    block = draw.pick("block_size", (1, 1, 2, 16, 21, 64)) if pool == 1 else 1
    options: dict[str, Any] = {"causal": draw.flag("causal"), "ascending": draw.flag("ascending"), "num_threads": checks.threads(draw)}
    options |= {"pool_size": pool, "keep_tail": draw.flag("keep_tail")} if pool > 1 or draw.flag("pools of one") else {}
    options |= {"block_size": block} if block > 1 else {}
    least = draw.pick("min_score", (None, 0.0, -1.0, 0.5, 3.0))
    options |= {"min_score": least} if least is not None else {}
    scale = draw.pick("scale", (None, 0.25, 1.0, -0.5)) if not coarse else 0.25
    if scale is not None:
        options["scale"] = scale
    packed, paged = draw.flag("packed", 0.3), draw.flag("paged", 0.3)
    ragged = paged or draw.flag("ragged")
    q_lens = [draw.integer(f"q_lens[{b}]", 0, s_q, likely=(s_q,)) if packed or ragged else s_q for b in range(batch)]
    rows = [draw.integer(f"rows[{b}]", 0, s_kv, likely=(s_kv,)) if packed else s_kv for b in range(batch)]  # rows of k
    tokens = [n * pool for n in rows]
    if paged or (ragged and (pool > 1 or not packed)):
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
    kind = draw.pick("keys", ("same", "same", "int8", "float8_e4m3")) if dtype != "float64" else "same"
    named = {"dtype": dtype} if dtype == "bfloat16" else {}
    if kind != "same":
        given[1], scales, exact[1] = _quantised(draw, k, kind, coarse)
        given.append(scales)
        named |= {"kv_dtype": kind} if kind != "int8" else {}
    own = given[1::2]  # the keys of each batch entry, and their scales if there are any
    if packed:
        rows = [n // pool for n in tokens] if paged else rows
        given = [np.concatenate([x[b, : n[b]] for b in range(batch)]) for x, n in zip(given, (q_lens, rows, q_lens, rows), strict=False)]
        options |= {f"cu_seqlens_{name}": np.concatenate([[0], np.cumsum(n)]) for name, n in (("q", q_lens), ("kv", rows))}
    together, joined = given[1::2], {name: x for name, x in options.items() if name != "kv_lens" or pool > 1 or not packed}
    if paged:
        given[1::2], options["block_tables"] = _paged(draw, own, [-(-n // pool) for n in tokens], kind if kind != "same" else dtype)
        options.pop("cu_seqlens_kv", None)
    placed = [arrays.place(draw, name, x, last_contiguous=name in "qk") for name, x in zip(("q", "k", "weights", "k_scale"), given, strict=False)]
    options |= {x.name: x.array for x in placed[3:]}
    found, scores = select.select_tokens(*(x.array for x in placed[:3]), top_k, return_scores=True, **options, **named)
    alone = select.select_tokens(*(x.array for x in placed[:3]), top_k, **options | {"num_threads": 1}, **named)
    for x in placed:
        x.check_unchanged()
    if not np.array_equal(found, alone):
        raise Finding("other keys with one thread, or without scores")
    if paged:
        joined |= dict(zip(("k_scale",), together[1:], strict=False))
        same = select.select_tokens(placed[0].array, together[0], placed[2].array, top_k, return_scores=True, **joined, **named)
        if any(x.tobytes() != y.tobytes() for x, y in zip(same, (found, scores), strict=True)):
            raise Finding("other bits from pages than from the same keys side by side")
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
                place = int((keys >= 0).sum()) - 1 if rest else top_k
                if keys[place] != (complete if rest else -1) or values[place] != (np.inf if rest else -np.inf):
                    raise Finding(f"tail {keys[place]} with score {values[place]} of a query that sees {seen} tokens")
                keys, values = np.delete(keys, place), np.delete(values, place)
            cuts = range(0, complete, block)
            best, largest = (np.array([x[i : i + block].max() for i in cuts]) for x in (wanted, sizes))
            _check_row(keys, values, best, unit * (heads + dim) * largest, -np.inf if least is None else least, options["ascending"], coarse)


def _quantised(draw: Draw, like: np.ndarray, kind: str, coarse: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Keys of 8 bits, their scales, and the numbers that both stand for."""
    rng = draw.rng("bits")
    bits = rng.integers(0, 256, like.shape, dtype=np.uint8)
    if coarse:
        bits = rng.choice(np.array([0, 1, 2, 254] if kind == "int8" else [0, 0x38, 0x40, 0xB8], np.uint8), like.shape)  # 0, 1, 2, ...
    bits[(bits & 0x7F) == 0x7F] = 0x11
    scales = np.full(like.shape[:2], 0.5, np.float32) if coarse else (0.5 + rng.random(like.shape[:2], np.float32)) * np.float32(0.01)
    if draw.flag("signed scales", 0.2):
        scales *= rng.choice(np.float32([1, -1, 0]), scales.shape)
    k = bits.view(np.int8) if kind == "int8" else bits
    return k, scales, arrays.values_of(k, kind) * scales[..., None].astype(np.float64)


def _paged(draw: Draw, keys: list[np.ndarray], counts: list[int], dtype: str) -> tuple[list[np.ndarray], np.ndarray]:
    """Pages with the keys of each batch entry, and with their scales, and tables for `counts` keys. Unused places hold NaN, or 0x7F in 8-bit keys."""
    size = draw.pick("page_size", (16, 1, 3, 64))
    pages = [-(-n // size) for n in counts]
    order = draw.rng("pages").permutation(sum(pages) + draw.integer("spare pages", 0, 3))
    own = np.split(order, np.cumsum(pages))[: len(counts)]
    caches = []
    for x, kind in zip(keys, (dtype, "float32"), strict=False):
        shape = (len(order), size, *x.shape[2:])
        caches.append(np.full(shape, 0x7F, x.dtype) if x.itemsize == 1 else stored(np.full(shape, np.nan), kind))
        for rows, numbers, count in zip(x, own, counts, strict=True):
            at = np.arange(min(len(rows), count))
            caches[-1][numbers[at // size], at % size] = rows[at]
    return caches, arrays.page_table(draw, "block_tables", own).array


def _check_row(keys: np.ndarray, scores: np.ndarray, wanted: np.ndarray, slack: np.ndarray, least: float, ascending: bool, is_exact: bool) -> None:
    n, surely, perhaps = (int(x.sum()) for x in (keys >= 0, wanted - slack >= least, wanted + slack >= least))
    chosen, own = keys[:n], scores[:n]
    if not min(surely, len(keys)) <= n <= perhaps or (keys[n:] != -1).any() or (scores[n:] != -np.inf).any() or (chosen >= len(wanted)).any():
        raise Finding(f"keys {keys} where {surely} to {perhaps} of {len(wanted)} may be chosen")
    if (own < least).any():
        raise Finding(f"scores {own} below {least}")
    if len(set(chosen.tolist())) != n or (ascending and (np.diff(chosen) <= 0).any()):
        raise Finding(f"keys {chosen} are not different, or do not rise")
    if not ascending and (np.diff(own) > 0).any():
        raise Finding(f"scores {own} rise")
    if (np.abs(own - wanted[chosen]) > slack[chosen]).any():
        raise Finding(f"scores {own} where {wanted[chosen]} were expected")
    left = np.setdiff1d(np.arange(len(wanted)), chosen)
    bound = (wanted[chosen] + slack[chosen]).min() if n == len(keys) else least
    if left.size and (wanted[left] - slack[left]).max() > bound:
        raise Finding("a key with a higher score was left out")
    if is_exact:  # all sums are exact, so ties are, too
        best = np.argsort(-wanted, kind="stable")[:n]  # none of these scores is below the least, since n keys have at least that
        if not np.array_equal(np.sort(chosen) if ascending else chosen, np.sort(best) if ascending else best):
            raise Finding(f"keys {chosen} where {best} were expected")
