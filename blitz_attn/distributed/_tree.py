"""Which rank merges which nodes of the tree of states (_states.py), and which nodes ranks send, when ranks share the chunks of requests.

A rank merges the nodes of which it has all chunks. It sends such a node if the node is the root, or if its parent has chunks on other
ranks. Every rank merges the rest of the tree.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy import ndarray


class Level(NamedTuple):
    """Merges of one level. Nodes are named by their first chunk, numbered through all requests."""

    left: ndarray
    right: ndarray
    owner: ndarray
    """The rank that has all chunks of both halves; -1 where no rank has them all."""


class Tree(NamedTuple):
    """Which rank merges which nodes, and which nodes are sent."""

    levels: list[Level]
    sent: ndarray
    """First chunk of each node that is sent, in rising order by rank, then by chunk."""
    sender: ndarray
    """The rank that sends it."""
    after: ndarray
    """The chunk after the last one of each node that is sent."""


def build(counts: ndarray, owner: ndarray) -> Tree:
    """The tree of requests of ``counts[b]`` chunks. `owner` has the rank of each chunk, one request after the other."""
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
