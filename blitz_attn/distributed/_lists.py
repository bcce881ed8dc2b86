"""The blocks that the lists of a call over selected pages name, and new lists of these blocks for the chunks that a rank computes."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy import ndarray

from .. import _arrays
from ._states import ranges


class Listed(NamedTuple):
    """The blocks that the lists of a call name: arrays with an entry per named block, one list after the other."""

    rows: int  # lists per request
    request: ndarray
    head: ndarray  # the list's number within its request
    place: ndarray  # within the list
    block: ndarray

    def refuse_repeated(self) -> None:
        """Refuses a block that a list names twice."""
        row = self.request * self.rows + self.head
        order = np.lexsort((self.block, row))
        again = (np.diff(row[order]) == 0) & (np.diff(self.block[order]) == 0)
        for i in np.sort(order[1:][again]):
            raise ValueError(f"selected: expected each page once per row, got {self.block[i]} again at {self._at(i)}") from None

    def refuse_missing(self, pages: ndarray, counted: bool) -> None:
        """Refuses blocks that a request with ``pages[request]`` pages does not have, with the core's sentence. `counted`: the lists have
        counts, and no pads. The core reads one list after the other, so a block that an earlier list names twice is reported first."""
        for i in ((self.block < 0) | (self.block >= pages[self.request])).nonzero()[0]:
            request = self.request[i]
            earlier = (self.request < request) | (self.request == request) & (self.head < self.head[i])
            Listed(self.rows, *(x[earlier] for x in self[1:])).refuse_repeated()
            expected = f"pages from 0 to {pages[request] - 1}{'' if counted else ', or a pad'}"
            if pages[request] == 0:
                expected = f"no page, since request {request} has no tokens"
            raise ValueError(f"selected: expected {expected}, got {self.block[i]} at {self._at(i)}")

    def _at(self, i: int) -> list[int]:
        return [int(x[i]) for x in (self.request, self.head, self.place)]


def listed_blocks(selected: Any, counts: Any, pages: ndarray, heads: tuple[int, ...]) -> Listed:
    """The blocks of `selected` and `counts`, see `paged_select_attention`. `pages`: the number of pages of each request. `heads`: the
    numbers of KV heads and of query heads."""
    lists, kind = _arrays.host(selected, "selected")
    if kind not in ("int16", "int32", "int64"):
        raise TypeError(f"selected: expected int16, int32 or int64, got {kind}")
    if lists.ndim != 3 or len(lists) != len(pages) or lists.shape[1] not in heads:
        raise ValueError(
            f"selected: expected shape ({len(pages)}, {' or '.join(map(str, heads))}, K), one row per request and KV head or query head, "
            f"got {lists.shape}"
        )
    if counts is None:
        used = np.logical_and.accumulate(lists != -1, axis=2)
    else:
        numbers = _arrays.integers(counts, "counts")
        if numbers.shape != lists.shape[:2]:
            raise ValueError(f"counts: expected shape {lists.shape[:2]} like the rows of selected, got {numbers.shape}")
        for b, h in np.argwhere((numbers < 0) | (numbers > lists.shape[2])):
            raise ValueError(f"counts: expected 0 to {lists.shape[2]}, got {numbers[b, h]} at [{b}, {h}]")
        used = np.arange(lists.shape[2]) < numbers[:, :, None]
    request, head, place = used.nonzero()
    listed = Listed(lists.shape[1], request, head, place, lists[request, head, place].astype(np.int64))
    listed.refuse_missing(pages, counts is not None)
    return listed


def lists_by_unit(unit: ndarray, head: ndarray, block: ndarray, shape: tuple[int, int]) -> tuple[ndarray, ndarray]:
    """(selected, counts) for the core. `shape`: the number of units, and of lists per unit. The arrays have an entry per listed block: its
    unit, its list within the unit, and the block's number within the unit."""
    row = unit * shape[1] + head
    counts = np.bincount(row, minlength=shape[0] * shape[1])
    order = np.argsort(row, kind="stable")
    selected = np.full((len(counts), max(1, int(counts.max(initial=0)))), -1, np.int32)
    selected[row[order], ranges(np.zeros_like(counts), counts)] = block[order]
    return selected.reshape(*shape, selected.shape[1]), counts.reshape(shape)
