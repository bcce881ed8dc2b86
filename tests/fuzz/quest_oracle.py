"""Summaries of blocks, their scores, and the rules of a selection: token by token and block by block in float64.

A score has a bound for the error of the package's score: a sum of K products in float32 has an error of at most ``(K + c) u`` times the sum of
the products' absolute values, in any order. Two blocks whose scores differ by at most the sum of their bounds may come in either order. If
the scores are equal and the bounds 0 (for small integers), or if the blocks hold the same numbers, the lower block must come first.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .attention_oracle import SMALL
from .checks import EPSILON

UNIT = EPSILON["float32"]  # scores are float32, also for float64 inputs
SLACK = 8  # roundings in addition to those of the terms


# ---- Summaries ----------------------------------------------------------------------------------------------------


class Summaries(NamedTuple):
    """Arrays (blocks, N, D); `sizes` is the mean of the keys' absolute values."""

    largest: np.ndarray
    smallest: np.ndarray
    mean: np.ndarray
    sizes: np.ndarray


def blocks_of(tokens: np.ndarray, size: int) -> list[np.ndarray]:
    return [tokens[begin : begin + size] for begin in range(0, len(tokens), size)]


def summaries(keys: np.ndarray, size: int) -> Summaries:
    """The summaries of a request's keys (tokens, N, D). The largest and the smallest ignore NaN, unless all are NaN."""
    blocks = blocks_of(keys, size)
    with np.errstate(invalid="ignore"):
        lists = (
            [np.fmax.reduce(x, axis=0) for x in blocks],
            [np.fmin.reduce(x, axis=0) for x in blocks],
            [x.mean(axis=0) for x in blocks],
            [np.abs(x).mean(axis=0) for x in blocks],
        )
    return Summaries(*(np.array(x).reshape(len(blocks), *keys.shape[1:]) for x in lists))


# ---- Scores -------------------------------------------------------------------------------------------------------


class Scores(NamedTuple):
    """The scores of one request, as arrays (rows, blocks)."""

    value: np.ndarray
    error: np.ndarray
    open: np.ndarray  # bool: the definition leaves the score open, as for 0 times infinity
    alike: np.ndarray  # int: the first block that holds the same numbers


def exact(terms: np.ndarray) -> np.ndarray:
    """Whether float32 sums over the last axis are exact in any order: multiples of 1 / 256 whose absolute sum is below 2**16."""
    counts = np.abs(terms) * 256
    return (counts == np.rint(counts)).all(-1) & (counts.sum(-1) < 2.0**24)


def query_rows(q: np.ndarray, kv_heads: int, per_query_head: bool) -> tuple[np.ndarray, np.ndarray]:
    """Rows (rows, D), and their errors: the query heads (H, D) of a request, or the mean of each group."""
    if per_query_head:
        return q, np.zeros_like(q)
    group = len(q) // kv_heads
    parts = q.reshape(kv_heads, group, -1).swapaxes(1, 2) / group
    whole = exact(parts) & (group & (group - 1) == 0)
    return parts.sum(-1), np.where(whole, 0, (group + SLACK) * UNIT * np.abs(parts).sum(-1))


def sum_of_products(q: np.ndarray, q_error: np.ndarray, *sides: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(value, error, open) of sums over the last axis: of q (D,) times a side (n, D), or of the larger of two sides' products."""
    with np.errstate(invalid="ignore"):
        products = [q * side for side in sides]
        value = np.maximum(products[0], products[-1]).sum(-1)
    unsure = np.isinf(sides) & (np.abs(q) <= q_error) & (q_error > 0)
    if len(sides) > 1:  # the larger of two products is open if one is 0 times infinity
        unsure |= np.isinf(sides) & (q == 0) | np.isinf(q) & (np.asarray(sides) == 0)
    unsure = unsure.any((0, -1))
    numbers = [np.where(np.isfinite(x), x, 0) for x in products]  # if the value is finite, infinite products are the smaller ones
    size = np.maximum(np.abs(numbers[0]), np.abs(numbers[-1])).sum(-1)
    q_error = np.where(np.isfinite(q_error), q_error, 0)
    moved = (q_error * np.where(np.isfinite(sides), np.abs(sides), 0).max(0)).sum(-1)
    whole = exact(numbers[0]) & exact(numbers[-1]) & (size * 256 < 2.0**24) & (q_error == 0).all()
    error = (len(q) + SLACK) * UNIT * size + moved + len(q) * SMALL
    return value, np.where(whole | ~np.isfinite(value), 0, error), unsure


def score_of_queries(method: str, queries: np.ndarray, per_query_head: bool, sides: tuple[np.ndarray, ...], size: int) -> Scores:
    """The largest score of a request's queries (n, H, D), or NaN if one of their scores is NaN. There is at least one query."""
    each = [score(method, q, per_query_head, sides, size) for q in queries]
    with np.errstate(invalid="ignore"):
        value = np.max([x.value for x in each], axis=0)
    return Scores(value, np.max([x.error for x in each], axis=0), np.any([x.open for x in each], axis=0), each[0].alike)


def first_alike(blocks: list[bytes]) -> list[int]:
    seen: dict[bytes, int] = {}
    return [seen.setdefault(block, i) for i, block in enumerate(blocks)]


def score(method: str, q: np.ndarray, per_query_head: bool, sides: tuple[np.ndarray, ...], size: int) -> Scores:
    """The scores of one request's query (H, D). `sides`: the method's summaries (blocks, N, D); for "max" the keys (tokens, N, D)."""
    kv_heads = sides[0].shape[1]
    rows, errors = query_rows(q, kv_heads, per_query_head)
    blocks = [blocks_of(side, size if method == "max" else 1) for side in sides]
    n = len(blocks[0])
    result = Scores(np.empty((len(rows), n)), np.empty((len(rows), n)), np.empty((len(rows), n), np.bool_), np.empty((len(rows), n), np.int64))
    for r, (row, row_error) in enumerate(zip(rows, errors, strict=True)):
        head = r * kv_heads // len(rows)
        value, error, unsure = sum_of_products(row, row_error, *(side[:, head] for side in sides))
        result.alike[r] = first_alike([b"".join(side[i][:, head].tobytes() for side in blocks) for i in range(n)])
        if method == "max":  # the error of a maximum is at most the largest error; NaN remains
            parts = [blocks_of(x, size) for x in (value, error, unsure)]
            value, error, unsure = (np.array([x.max() for x in part]) for part in parts) if n else (value, error, unsure)
        result.value[r], result.error[r], result.open[r] = value, error, unsure
    return result


# ---- Selections ---------------------------------------------------------------------------------------------------


class Rule(NamedTuple):
    """The rules for each row of a request: the number of blocks and of places, and the blocks that are always selected."""

    blocks: int
    places: int
    sink: int
    recent: int

    @property
    def used(self) -> int:
        return min(self.blocks, self.places)

    @property
    def newest(self) -> int:
        return min(self.recent, self.used)

    @property
    def first(self) -> int:
        return min(self.sink, self.used - self.newest)


def stale(seq_len: int, since: int, size: int) -> int:
    """The number of blocks that were not complete when the request had `since` fewer tokens; 0 if `since` is -1."""
    return 0 if since < 0 else sum((i + 1) * size > seq_len - since for i in range(-(-seq_len // size)))


def forced(seq_len: int, queries: int, recent: int, size: int) -> int:
    """The number of newest blocks that the request's queries would always select if each were decoded alone."""
    own = [(token // size, range(token // size + 1 - recent, token // size + 1)) for token in range(seq_len - queries, seq_len)]
    return -(-seq_len // size) - min((i for _, blocks in own for i in blocks), default=-(-seq_len // size))


def surely_before(scores: Scores, row: int, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Bool (a, b): whether block a comes before block b in every valid order."""
    value, error, unsure, alike = (x[row] for x in scores)
    a, b = a[:, None], b[None, :]
    with np.errstate(invalid="ignore"):
        larger = value[a] - error[a] > value[b] + error[b]
        larger |= ~np.isnan(value[a]) & np.isnan(value[b])
        equal = (value[a] == value[b]) & (error[a] == 0) & (error[b] == 0) | np.isnan(value[a]) & np.isnan(value[b])
    same = alike[a] == alike[b]
    return ~unsure[a] & ~unsure[b] & ~same & (larger | equal & (a < b)) | same & (a < b)


def row_mistake(given: np.ndarray, rule: Rule, scores: Scores, row: int, ascending: bool) -> str | None:
    """The mistake in one row of a selection, or None."""
    n, used = rule.blocks, rule.used
    if (given[used:] != -1).any():
        return f"{given.tolist()}: places behind the {used} used ones do not hold -1"
    chosen = given[:used].astype(np.int64)
    if ((chosen < 0) | (chosen >= n)).any() or len(set(chosen.tolist())) != used:
        return f"{chosen.tolist()}: expected {used} different blocks of {n}"
    first, newest = np.arange(rule.first), np.arange(n - rule.newest, n)
    if not np.isin(first, chosen).all() or not np.isin(newest, chosen).all():
        return f"{chosen.tolist()}: expected the first {rule.first} and the newest {rule.newest} of {n} blocks to be there"
    forced = np.concatenate([first, newest])
    free, left = chosen[~np.isin(chosen, forced)], np.setdiff1d(np.arange(n), chosen)
    wrong = np.argwhere(surely_before(scores, row, left, free))
    if len(wrong):
        return f"{chosen.tolist()}: block {left[wrong[0][0]]} is left out, {free[wrong[0][1]]} of a lower score is not"
    if ascending:
        return None if (np.diff(chosen) > 0).all() else f"{chosen.tolist()}: not rising"
    if chosen[: rule.first].tolist() != first.tolist() or chosen[used - rule.newest :].tolist() != newest.tolist():
        return f"{chosen.tolist()}: expected {first.tolist()} first and {newest.tolist()} last"
    if np.tril(surely_before(scores, row, free, free)).any():
        return f"{chosen.tolist()}: not by falling score"
    return None
