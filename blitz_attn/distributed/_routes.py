"""The tokens that travel between ranks under one dispatch: exact, for all ranks at once, and computed from the lists alone."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy import ndarray

from ._dispatch import DISPATCHES, Cut, Dispatch, balance, cut_of, even, loads
from ._lazy import computed_once
from ._problem import Problem

TIE = 1.02  # a later dispatch is taken if it is faster by more than this factor


class Segments(NamedTuple):
    """The tokens of each column of blocks, cut where the holder changes; ordered by holder, then along the axis."""

    column: ndarray
    holder: ndarray
    entry: ndarray
    begin: ndarray
    end: ndarray
    local: ndarray
    """Index of `begin` in the holder's shard."""
    bounds: ndarray
    """Index of each rank's first segment, and at the end the number of all segments."""


class Runs(NamedTuple):
    """Stretches of tokens that travel between two ranks.

    In a layout with a batch axis, a stretch belongs to one entry, or to all entries if they are alike. In TND, a stretch may span several
    sequences; `entry` is then the sequence of its first token.
    """

    entry: ndarray
    begin: ndarray
    """On the axis of the whole sequence."""
    local: ndarray
    """In the holder's shard."""
    length: ndarray


class Rows(NamedTuple):
    """Stretches of query tokens that one rank holds and another computes for a KV head."""

    head: ndarray
    holder: ndarray
    worker: ndarray
    begin: ndarray
    end: ndarray


class Routes:
    """A problem under one dispatch for a number of ranks.

    Parameters
    ----------
    problem : Problem
    dispatch : Dispatch
    size : int
    held : Cut, optional
        Query tokens that ranks hold, where the dispatch does not decide this; in self-attention also the key tokens.

    Attributes
    ----------
    loads : (size,)
        Pairs of a query and a key that each rank computes.
    q_held, kv_held : Cut
        Query and key tokens that ranks hold.
    computed : tuple of Cut
        For each KV head, the rows that ranks compute.
    windows : dict
        Shape and dtype -> windows that earlier calls have left to later ones (`_exchange.Stages`).
    """

    def __init__(self, problem: Problem, dispatch: Dispatch, size: int, held: Cut | None = None) -> None:
        self.problem, self.size = problem, size
        self._runs: dict[tuple[int, int, int], Runs] = {}
        self.windows: dict[tuple[tuple[int, ...], str], list[ndarray]] = {}
        self.dispatch, self.computed = dispatch.name, dispatch.computed
        self.loads = loads(problem.work, self.computed, size)
        self.balance = balance(self.loads)
        self.q_held = dispatch.held.mapped(problem.row_at) if held is None else held
        if problem.self_attention:
            self.kv_held = self.q_held
        else:
            self.kv_held = cut_of(problem.cell_at[even(len(problem.cell_at) - 1, size)], np.arange(size))

    def cuts(self) -> tuple[str, list[tuple[ndarray, ndarray]]]:
        """The name and the cuts, which must be equal on ranks that have the same plan."""
        return self.dispatch, [(cut.at, cut.rank) for cut in (self.q_held, self.kv_held, *self.computed)]

    def stages(self, rank: int) -> list[int]:
        """The KV heads that a rank computes, in the order of their computation."""
        return [head for head, cut in enumerate(self.computed) if (cut.rank == rank).any()]

    # ---- Keys and values --------------------------------------------------------------------------------------------

    @computed_once
    def needs(self) -> list[ndarray]:
        """For each KV head (size, columns): whether a rank needs a block of keys."""
        return self.problem.needs(self.computed, self.size)

    @computed_once
    def segments(self) -> Segments:
        """All valid tokens of keys, each once."""
        entry, begin, end = self.problem.cell_tokens()
        column = np.arange(len(entry))
        # the stretches that hold a column's first and last token
        first = np.maximum(np.searchsorted(self.kv_held.at, begin, side="right") - 1, 0)
        last = np.searchsorted(self.kv_held.at, end, side="left") - 1
        count = np.where(end > begin, last - first + 1, 0)
        column = np.repeat(column, count)
        stretch = first[column] + np.arange(len(column)) - np.repeat(np.cumsum(count) - count, count)
        begin, end = np.maximum(begin[column], self.kv_held.at[stretch]), np.minimum(end[column], self.kv_held.at[stretch + 1])
        holder, local = self.kv_held.rank[stretch], begin - self.kv_held.at[stretch] + self.kv_held.local[stretch]
        order = np.argsort(holder, kind="stable")
        bounds = np.searchsorted(holder[order], np.arange(self.size + 1))
        return Segments(column[order], holder[order], entry[column][order], begin[order], end[order], local[order], bounds)

    def kv_runs(self, holder: int, worker: int, head: int) -> Runs:
        """Keys and values of a KV head that rank `holder` holds and rank `worker`, which may be the same, needs."""
        key = holder, worker, next(h for h in range(head + 1) if self.needs[h] is self.needs[head])
        if key not in self._runs:
            self._runs[key] = self._find_runs(*key)
        return self._runs[key]

    def _find_runs(self, holder: int, worker: int, head: int) -> Runs:
        segments = self.segments
        part = slice(*segments.bounds[holder : holder + 2])
        listed = self.needs[head][worker, segments.column[part]]
        entry, begin, end, local = (x[part][listed] for x in (segments.entry, segments.begin, segments.end, segments.local))
        apart = (begin[1:] != end[:-1]) | (local[1:] != (local + end - begin)[:-1])
        if self.problem.layout != "TND":
            apart |= entry[1:] != entry[:-1]
        first, last = np.append(True, apart)[: len(begin)], np.append(apart, True)[: len(begin)]
        return Runs(entry[first], begin[first], local[first], end[last] - begin[first])

    @computed_once
    def kv_tokens(self) -> ndarray:
        """(size, size): tokens of keys, over all KV heads and batch entries, that the first rank sends to the second."""
        segments = self.segments
        tokens = segments.end - segments.begin
        found = np.zeros((self.size, self.size), np.int64)
        full = np.flatnonzero(np.diff(segments.bounds))
        made: dict[int, ndarray] = {}
        for need in self.needs:
            if id(need) not in made and len(tokens):
                made[id(need)] = np.add.reduceat(need[:, segments.column] * tokens, segments.bounds[full], axis=1).T
            if len(tokens):
                found[full] += made[id(need)]
        np.fill_diagonal(found, 0)
        return found * self.problem.alike

    # ---- Queries and results ----------------------------------------------------------------------------------------

    @computed_once
    def rows(self) -> Rows:
        """Queries that travel, ordered by KV head and along the axis."""
        parts = []
        for head, cut in enumerate(self.computed):
            worked = cut.mapped(self.problem.row_at)
            at = np.union1d(self.q_held.at, worked.at)
            holder = self.q_held.rank[np.searchsorted(self.q_held.at, at[:-1], side="right") - 1]
            worker = worked.rank[np.searchsorted(worked.at, at[:-1], side="right") - 1]
            apart = holder != worker
            parts.append((np.full(int(apart.sum()), head), holder[apart], worker[apart], at[:-1][apart], at[1:][apart]))
        return Rows(*(np.concatenate([part[i] for part in parts]) for i in range(5)))

    @computed_once
    def q_tokens(self) -> ndarray:
        """(size, size): query tokens, over all KV heads and batch entries, that the first rank holds and the second computes."""
        found = np.zeros((self.size, self.size), np.int64)
        np.add.at(found, (self.rows.holder, self.rows.worker), self.rows.end - self.rows.begin)
        return found * (1 if self.problem.layout == "TND" else self.problem.batch)

    # ---- Bytes and times --------------------------------------------------------------------------------------------

    def bytes(self) -> ndarray:
        """(size, size): bytes that the first rank sends to the second in a forward call."""
        p = self.problem
        queries = p.group * p.head_dim * p.itemsize
        results = p.group * (p.head_dim_v * p.itemsize + p.lse_itemsize)
        return self.kv_tokens * (p.head_dim + p.head_dim_v) * p.itemsize + self.q_tokens * queries + self.q_tokens.T * results

    def backward_bytes(self) -> ndarray:
        """(size, size): bytes that the first rank sends to the second in a backward call without a gradient of the log-sum-exp."""
        p = self.problem
        queries = p.group * ((p.head_dim + 2 * p.head_dim_v) * p.itemsize + p.lse_itemsize)
        results = p.group * p.head_dim * p.itemsize
        keys = (p.head_dim + p.head_dim_v) * (self.kv_tokens * p.itemsize + self.kv_tokens.T * p.lse_itemsize)  # kv_tokens.T: gradients
        return keys + self.q_tokens * queries + self.q_tokens.T * results

    def all_gather_bytes(self) -> ndarray:
        """(size,): bytes of all keys and values that a rank does not hold."""
        p = self.problem
        each = (p.head_dim + p.head_dim_v) * p.itemsize * p.kv_heads * (1 if p.layout == "TND" else p.batch)
        return (p.tokens[1] - self.kv_held.counts(self.size)) * each

    def times(self, link: float, rate: float) -> tuple[ndarray, ndarray, ndarray]:
        """Three arrays (size,), in seconds: arithmetic, transfers, and both together.

        Arithmetic and transfers overlap, except in one stage: the shorter time, divided by the number of stages, is added to the longer.
        """
        p = self.problem
        compute = self.loads * (2.0 * (p.head_dim + p.head_dim_v) / rate)
        sent = self.bytes()
        transfer = np.maximum(sent.sum(axis=0), sent.sum(axis=1)) / link
        stages = np.zeros(self.size)
        for cut in self.computed:
            stages[np.unique(cut.rank)] += 1
        return compute, transfer, np.maximum(compute, transfer) + np.minimum(compute, transfer) / np.maximum(stages, 1)


def made(problem: Problem, name: str, size: int) -> Routes:
    """The routes of a dispatch by name."""
    return Routes(problem, DISPATCHES[name](problem.work, problem.kv_heads, size), size)


def best_of(problem: Problem, size: int, link: float, rate: float) -> Routes:
    """The routes whose slowest rank is the fastest. A later dispatch must be faster by more than the factor `TIE`."""
    best: Routes | None = None
    least = np.inf
    for name in DISPATCHES:
        routes = made(problem, name, size)
        total = float(routes.times(link, rate)[2].max())
        if best is None or total * TIE < least:
            best, least = routes, total
    assert best is not None
    return best
