"""The binary tree over the chunks of a request, by which states of attention are merged: the same for any number of ranks.

Node i of level l covers the chunks from ``i * 2**l`` up to ``(i + 1) * 2**l``, as far as the request has them. Where its right half has no
chunk, it is its left half; else its state is the merge of both halves' states. So the result depends on the chunks alone, and not on who
computed which. A rank merges the nodes of which it has all chunks; of those, nodes whose parent it does not have whole are sent.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy import ndarray

from .._state_tree import Merges as Merges
from .._state_tree import ranges as ranges
from .._state_tree import rounded as rounded


class Level(NamedTuple):
    """Merges of one level. Nodes are named by their first chunk, numbered through all requests."""

    left: ndarray
    right: ndarray
    owner: ndarray
    """The rank that has both halves whole; -1 where no rank has."""


class Tree(NamedTuple):
    """Who merges what, and what is sent."""

    levels: list[Level]
    sent: ndarray
    """First chunk of each node that is sent, in rising order by rank, then by chunk."""
    sender: ndarray
    """The rank that sends it."""
    after: ndarray
    """The chunk behind the last one of each node that is sent."""


def build(counts: ndarray, owner: ndarray) -> Tree:
    """The tree of requests of ``counts[b]`` chunks, of which ``owner`` has all requests' chunks' ranks, one request after the other."""
    first = np.cumsum(counts) - counts
    request = np.arange(len(counts)).repeat(counts)
    place = np.arange(len(owner))
    index = place - first[request]
    number = counts.astype(np.int64)
    levels: list[Level] = []
    sent: list[ndarray] = []
    sender: list[ndarray] = []
    after: list[ndarray] = []

    def send(nodes: ndarray) -> None:
        nodes = nodes[owner[nodes] >= 0]
        sent.append(place[nodes])
        sender.append(owner[nodes])
        ends = np.minimum((index[nodes] + 1) << len(levels), counts[request[nodes]])
        after.append(first[request[nodes]] + ends)

    while len(number) and number.max() > 1:
        left = (index % 2 == 0).nonzero()[0]
        paired = index[left] + 1 < number[request[left]]
        a = left[paired]
        b = a + 1
        whole = owner[left].copy()
        whole[paired] = np.where(owner[a] == owner[b], owner[a], -1)
        apart = whole[paired] < 0
        send(np.concatenate([a[apart], b[apart]]))
        levels.append(Level(place[a], place[b], whole[paired]))
        request, place, index, owner, number = request[left], place[left], index[left] // 2, whole, -(-number // 2)
    send(np.arange(len(owner)))
    nodes, ranks, ends = (np.concatenate(x) for x in (sent, sender, after))
    order = np.lexsort((nodes, ranks))
    return Tree(levels, nodes[order], ranks[order], ends[order])
