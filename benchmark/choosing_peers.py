"""Choosers of blocks as users of torch write them, for comparison: one list per query head, from q and k in torch tensors.

Both follow published definitions; the code is this repository's own. Each works on one KV head at a time, so that memory stays bounded.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from _peers import Step, imported_torch, torch_tensor

STRIDE = 16  # of the antidiagonals
BLOCK_MEANS, ANTIDIAGONAL = "torch_block_means", "torch_antidiagonal16"
PEERS = (BLOCK_MEANS, ANTIDIAGONAL)


def _visible(torch: Any, rows: int, columns: int) -> Any:
    """Which column each row sees, causally; both count the same number of tokens."""
    return torch.ones((rows, columns), dtype=torch.bool).tril(columns - rows)


def block_means(q: Any, k: Any, block: int, density: float) -> Any:
    """The blocks of keys with the highest products of mean query and mean key, as many per row as `density` of those that it sees:
    (H, R, K) indices in rising order, -1 behind the last. It is the usual way to make a BlockMask for FlexAttention."""
    torch = imported_torch()
    heads, kv_heads, rows = q.shape[1], k.shape[1], q.shape[2] // block
    means_q, means_k = (x[0].unflatten(1, (-1, block)).mean(2) for x in (q, k))
    scores = torch.matmul(means_q.unflatten(0, (kv_heads, -1)), means_k.unsqueeze(1).mT).flatten(0, 1).float()
    scores.masked_fill_(~_visible(torch, rows, scores.shape[2]), -math.inf)
    wanted = (torch.arange(1, rows + 1) * density).ceil().long()
    chosen = scores.topk(int(wanted.max()), dim=-1).indices
    unused = torch.arange(chosen.shape[2]) >= wanted[:, None]
    listed = chosen.masked_fill(unused, scores.shape[2]).sort(dim=-1).values
    return listed.masked_fill(listed == scores.shape[2], -1).expand(heads, -1, -1)


def antidiagonal_scores(q: Any, k: Any, block: int, stride: int = STRIDE) -> Any:
    """XAttention's scores (H, R, C), each row adding up to 1: the queries of a stride, taken backwards, are one long query, the keys of a
    stride one long key, so that their product is the sum along the antidiagonals; the softmax over all keys is added up by blocks."""
    torch = imported_torch()
    group = q.shape[1] // k.shape[1]
    scale = 1 / (math.sqrt(q.shape[3]) * stride)
    every = []
    for head in range(k.shape[1]):
        long_q = q[0, head * group : (head + 1) * group].unflatten(1, (-1, stride)).flip(2).flatten(2)
        long_k = k[0, head].unflatten(0, (-1, stride)).flatten(1)
        scores = torch.matmul(long_q, long_k.T).float() * scale
        scores.masked_fill_(~_visible(torch, scores.shape[1], scores.shape[2]), -math.inf)
        shares = scores.softmax(dim=-1)
        every.append(shares.unflatten(2, (-1, block // stride)).sum(3).unflatten(1, (-1, block // stride)).mean(2))
    return torch.cat(every)


def antidiagonal(q: Any, k: Any, block: int, mass: float) -> Any:
    """The fewest blocks of each row that hold `mass` of its scores: (H, R, C) bool."""
    scores = antidiagonal_scores(q, k, block)
    ordered = scores.sort(dim=-1, descending=True)
    before = ordered.values.cumsum(dim=-1) - ordered.values
    return (before < mass).new_zeros(scores.shape).scatter_(2, ordered.indices, before < mass)


def peer(name: str, q: np.ndarray, k: np.ndarray, dtype: str, block: int, density: float, threads: int) -> Step:
    """A call of the peer. Raises `UnavailableError` where there is no torch."""
    torch = imported_torch()
    torch.set_num_threads(threads)
    tensors = (torch_tensor(q, dtype), torch_tensor(k, dtype))
    if name == BLOCK_MEANS:
        return lambda: block_means(*tensors, block, density)
    return lambda: antidiagonal(*tensors, block, 0.9)
