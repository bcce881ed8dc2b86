"""Which rank computes what: cuts of a chain of block rows, or of items (KV head, block row), for ranks. Only arithmetic on arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy import ndarray

EVEN = 1.05  # a cut at whole rows is made finer where its busiest rank has more than this many times the mean work
SNAP = 0.03  # the share by which the work of the busiest rank may grow so that borders of a cut of items move to borders of heads


class Cut(NamedTuple):
    """A chain cut into stretches: stretch i, from ``at[i]`` to ``at[i + 1]``, belongs to rank ``rank[i]``. No stretch is empty."""

    at: ndarray
    rank: ndarray

    def of(self, rank: int) -> list[tuple[int, int]]:
        """The stretches of one rank, as pairs (begin, end)."""
        return [(int(self.at[i]), int(self.at[i + 1])) for i in np.flatnonzero(self.rank == rank)]

    def overlap(self, rank: int, begin: int, end: int) -> list[tuple[int, int, int]]:
        """The parts of a stretch that a rank has: (begin, end, index of begin in that rank's shard)."""
        found = []
        for i in np.flatnonzero((self.rank == rank) & (self.at[:-1] < end) & (self.at[1:] > begin)):
            first, after = max(begin, int(self.at[i])), min(end, int(self.at[i + 1]))
            found.append((first, after, int(self.local[i]) + first - int(self.at[i])))
        return found

    def counts(self, size: int) -> ndarray:
        """How many entries each rank has."""
        return np.bincount(self.rank, weights=np.diff(self.at), minlength=size).astype(np.int64)

    def put_in_order(self, shards: ndarray, chain: ndarray) -> None:
        """Fill the chain from the shards of all ranks, which follow one another. Entries lie along the first axis of chain and shards."""
        order, place = np.argsort(self.rank, kind="stable"), 0
        for begin, end in zip(self.at[order].tolist(), self.at[order + 1].tolist(), strict=True):
            chain[begin:end] = shards[place : place + end - begin]
            place += end - begin

    def places(self, entries: ndarray) -> ndarray:
        """The index of each entry of the chain in the shard of its rank."""
        stretch = np.searchsorted(self.at, entries, side="right") - 1
        return self.local[stretch] + entries - self.at[stretch]

    @property
    def local(self) -> ndarray:
        """Where each stretch begins in its rank's shard, in which that rank's stretches follow one another."""
        lengths = np.diff(self.at)
        found = np.zeros_like(lengths)
        order = np.argsort(self.rank, kind="stable")
        before = np.cumsum(lengths[order]) - lengths[order]
        first = np.searchsorted(self.rank[order], self.rank[order])
        found[order] = before - before[first]
        return found

    def mapped(self, places: ndarray) -> Cut:
        """The same stretches on another axis, where entry n of the chain begins at ``places[n]``."""
        return cut_of(places[self.at], self.rank)


class Dispatch(NamedTuple):
    """Rows of the chain that each rank holds, and rows that it computes for each KV head."""

    name: str
    held: Cut
    computed: tuple[Cut, ...]


def cut_of(at: ndarray, rank: ndarray) -> Cut:
    """The cut with the borders `at`, without empty stretches; neighbouring stretches of one rank become one."""
    at, rank = np.asarray(at, np.int64), np.asarray(rank, np.int64)
    full = at[1:] > at[:-1]
    begins, ranks = at[:-1][full], rank[full]
    new = np.ones(len(ranks), bool)
    new[1:] = ranks[1:] != ranks[:-1]
    return Cut(np.append(begins[new], at[-1]), ranks[new])


def balance(loads: ndarray) -> float:
    """Work of the busiest rank divided by the mean; 1 where there is no work."""
    mean = float(loads.mean())
    return float(loads.max()) / mean if mean > 0 else 1.0


def loads(work: ndarray, computed: tuple[Cut, ...], size: int) -> ndarray:
    """Work of each rank. `work` is (KV heads, rows), or (1, rows) where all heads are alike."""
    found = np.zeros(size)
    for head, cut in enumerate(computed):
        before = np.concatenate([[0.0], np.cumsum(work[head % len(work)], dtype=np.float64)])
        np.add.at(found, cut.rank, np.diff(before[cut.at]))
    return found


def chain_cut(work: ndarray, parts: int, borders: ndarray | None = None, slack: float = 0.0) -> ndarray:
    """The ``parts + 1`` borders that cut a chain into runs, so that the fullest run has the least possible work, to within 1e-4 of it.

    Among such cuts, the borders are as near to equal shares as possible. With `borders`, a border moves to one of these positions if no
    run then has more than ``1 + slack`` times the least work.
    """
    work = np.asarray(work, np.float64)
    if not work.any():
        work = np.ones(len(work))
    before = np.concatenate([[0.0], np.cumsum(work)])
    low = max(before[-1] / parts, float(work.max(initial=0.0)))
    high = before[-1] / parts + float(work.max(initial=0.0))
    while high - low > 1e-4 * low:
        middle = (low + high) / 2
        low, high = (low, middle) if _fits(before, parts, middle) else (middle, high)
    most = high * (1 + 1e-12) * (1 + slack)

    earliest = [len(work)]  # of each border: the first position after which the parts that follow can hold the rest
    for _ in range(parts):
        earliest.append(int(np.searchsorted(before, before[earliest[-1]] - most)))
    earliest.reverse()
    found = [0]
    for part in range(1, parts):
        last = int(np.searchsorted(before, before[found[-1]] + most, side="right")) - 1
        first = max(earliest[part], found[-1])
        share = int(np.searchsorted(before, before[-1] * part / parts))
        if share and before[share] - before[-1] * part / parts > before[-1] * part / parts - before[share - 1]:
            share -= 1
        place = min(max(share, first), last)
        if borders is not None:
            near = borders[(borders >= first) & (borders <= last)]
            place = int(near[np.argmin(np.abs(near - share))]) if len(near) else place
        found.append(place)
    return np.array([*found, len(work)], np.int64)


def _fits(before: ndarray, parts: int, most: float) -> bool:
    place = 0
    for _ in range(parts):
        place = int(np.searchsorted(before, before[place] + most, side="right")) - 1
        if place == len(before) - 1:
            return True
    return False


def even(count: int, parts: int) -> ndarray:
    """Borders of runs whose numbers of entries are as equal as possible."""
    return np.arange(parts + 1, dtype=np.int64) * count // parts


# ---- The dispatches: (work, heads, size) -> Dispatch. Work is (heads or 1, rows) --------------------------------------------------


def contiguous(work: ndarray, heads: int, size: int) -> Dispatch:
    """Runs of equally many rows."""
    held = cut_of(even(work.shape[1], size), np.arange(size))
    return Dispatch("contiguous", held, (held,) * heads)


def zigzag(work: ndarray, heads: int, size: int) -> Dispatch:
    """Twice as many runs as ranks. A rank has a run from the front and one from the back, which evens out the work of causal lists."""
    ranks = np.arange(size)
    held = cut_of(even(work.shape[1], 2 * size), np.concatenate([ranks, ranks[::-1]]))
    return Dispatch("zigzag", held, (held,) * heads)


def cut(work: ndarray, heads: int, size: int) -> Dispatch:
    """Runs of equal work. Where rows are too few for that, neighbouring ranks share the KV heads of the row at their border."""
    ranks, rows = np.arange(size), work.shape[1]
    held = cut_of(chain_cut(work.sum(axis=0), size), ranks)
    whole = Dispatch("cut", held, (held,) * heads)
    unevenness = balance(loads(work, whole.computed, size))
    if unevenness <= EVEN or heads == 1:
        return whole
    items = np.broadcast_to(work, (heads, rows)).T.reshape(-1)  # a row's heads stand together
    at = chain_cut(items, size)
    computed = tuple(cut_of(np.clip(-((head - at) // heads), 0, rows), ranks) for head in range(heads))
    finer = Dispatch("cut", cut_of((at + heads // 2) // heads, ranks), computed)
    return finer if balance(loads(work, computed, size)) < 0.99 * unevenness else whole


def items(work: ndarray, heads: int, size: int) -> Dispatch:
    """Runs of equal work in a chain of all rows of the first KV head, then all rows of the second, and so on. Ranks hold equally many
    rows."""
    ranks, rows = np.arange(size), work.shape[1]
    chain = np.broadcast_to(work, (heads, rows)).reshape(-1)
    at = chain_cut(chain, size, np.arange(heads + 1) * rows, SNAP)
    computed = tuple(cut_of(np.clip(at - head * rows, 0, rows), ranks) for head in range(heads))
    return Dispatch("items", cut_of(even(rows, size), ranks), computed)


DISPATCHES: dict[str, Callable[[ndarray, int, int], Dispatch]] = {"cut": cut, "zigzag": zigzag, "contiguous": contiguous, "items": items}
