"""Sequences of native sparse attention, and the pieces that a long call is cut into."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from .. import _arrays


def sums_of(cu_seqlens: Any) -> Any:
    """Cumulative lengths as an array, which `cuts` checks; None stays None."""
    return None if cu_seqlens is None else _arrays.integers(cu_seqlens, "cu_seqlens")


def cuts(cu_seqlens: Any, total: int) -> np.ndarray:
    """Checked cumulative lengths of `total` tokens, int64."""
    cu = sums_of(cu_seqlens)
    if cu.ndim != 1 or cu.size == 0:
        raise ValueError(f"cu_seqlens: expected numbers rising from 0 to {total}, got shape {cu.shape}")
    if cu[0] != 0 or cu[-1] != total:
        raise ValueError(f"cu_seqlens: expected numbers rising from 0 to {total}, got {cu[0]} to {cu[-1]}")
    smaller = _arrays.falls(cu)
    if smaller.any():
        raise ValueError(f"cu_seqlens: expected numbers rising from 0 to {total}, got {cu[1:][smaller][0]} after a larger one")
    return cu.copy()  # a context keeps it


def cumulative(counts: Any) -> np.ndarray:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64)])


def block_count(tokens: Any, block_size: int, stride: int) -> Any:
    """Number of complete blocks of sequences of `tokens` tokens."""
    return np.where(np.asarray(tokens) < block_size, 0, (np.asarray(tokens) - block_size) // stride + 1)


class Sequences(NamedTuple):
    """Where each sequence begins in arrays of tokens, of compressed keys and of list rows. None: sequences have a batch axis."""

    tokens: np.ndarray | None
    blocks: np.ndarray | None
    rows: np.ndarray | None

    @classmethod
    def of(cls, cu: np.ndarray | None, block_size: int = 1, stride: int = 1, tile: int = 1) -> Sequences:
        if cu is None:
            return cls(None, None, None)
        return cls(cu, cumulative(block_count(np.diff(cu), block_size, stride)), cumulative(-(-np.diff(cu) // tile)))


class Piece(NamedTuple):
    """A part of a call that is computed by itself: some sequences, or some heads and consecutive queries of one sequence.

    The first four fields are the indices of its part of arrays of queries, of keys, of compressed keys and of gate weights.
    """

    queries: tuple[Any, ...]
    keys: tuple[Any, ...]
    blocks: tuple[Any, ...]
    heads: tuple[slice, slice]  # query heads and KV heads
    rows: tuple[Any, ...]  # indices of lists, on the axes before and after that of heads
    sequences: Sequences
    begin: int  # token number of the first query
    tokens: int  # of the whole sequence; 0 for packed sequences

    def lists(self, array: np.ndarray, kv_heads: int) -> np.ndarray:
        """The piece's rows of lists whose axis of heads has query heads or KV heads."""
        before, after = self.rows
        return array[(*before, self.heads[array.shape[-3] == kv_heads], after)]

ALL = slice(None)


def _pieces_of_one(tokens: int, tile: int, most: int, heads: tuple[int, int]) -> Iterator[tuple[tuple[slice, slice], int, int]]:
    """(heads, first query, end of queries) of the pieces of one sequence.

    A piece has as many heads as fit with all of their queries, but at least one KV head. Where queries are cut, the pieces have
    equal numbers of tiles, or one more, so that no piece has only a few queries.
    """
    kv_heads, group = heads[1], heads[0] // heads[1]
    once = min(max(1, most // max(1, group * tokens)), kv_heads)
    rows = -(-tokens // tile)
    stretches = -(-rows // max(1, most // (group * once * tile)))
    for head in range(0, kv_heads, once):
        end = min(head + once, kv_heads)
        for n in range(stretches):
            begin, stop = (rows * (n + i) // stretches * tile for i in range(2))
            yield (slice(head * group, end * group), slice(head, end)), begin, min(stop, tokens)


def pieces(batch: int, tokens: int, sequences: Sequences, tile: int, most: int, heads: tuple[int, int]) -> Iterator[Piece]:
    """The whole call in pieces of about `most` rows of queries, cut between heads and between tiles.

    Each piece reads all keys of its heads, so heads are separated first, and queries are cut only where one head has too many.
    How a sequence is cut depends on its own shape alone, never on its batch mates, and so do the bits of its result.
    """
    alone = Sequences(None, None, None)
    if sequences.tokens is None:
        fit = most // max(1, tokens * heads[0])  # sequences that fit into one piece; 0: each sequence is cut
        for b in range(0, batch, max(1, fit)):
            some = slice(b, min(b + max(1, fit), batch))
            if fit:
                yield Piece((some,), (some,), (some,), (ALL, ALL), ((some,), ALL), alone, 0, tokens)
                continue
            for cut, begin, end in _pieces_of_one(tokens, tile, most, heads):
                rows, keys = slice(begin // tile, -(-end // tile)), (some, ALL, cut[1])
                yield Piece((some, slice(begin, end), cut[0]), keys, keys, cut, ((some,), rows), alone, begin, tokens)
        return
    cu, cu_blocks, cu_rows = (np.asarray(x) for x in sequences)
    at, count, together = 0, len(cu) - 1, max(1, most // heads[0])
    while at < count:
        length = int(cu[at + 1] - cu[at])
        if length > together:
            whole, inner, lists = (slice(int(x[at]), int(x[at + 1])) for x in (cu, cu_blocks, cu_rows))
            for cut, begin, end in _pieces_of_one(length, tile, most, heads):
                rows = slice(lists.start + begin // tile, lists.start - (-end // tile))
                stretch = slice(whole.start + begin, whole.start + end)
                tokens_of, blocks_of = (None, whole, cut[1]), (None, inner, cut[1])
                yield Piece((None, stretch, cut[0]), tokens_of, blocks_of, cut, ((None,), rows), alone, begin, length)
            at += 1
            continue
        last = int(np.searchsorted(cu, cu[at] + together, "right")) - 1
        last = min(max(last, at + 1), count)
        tokens_, blocks_, rows_ = (slice(int(x[at]), int(x[last])) for x in (cu, cu_blocks, cu_rows))
        local = Sequences(*(np.ascontiguousarray(x[at : last + 1] - x[at]) for x in (cu, cu_blocks, cu_rows)))
        yield Piece((tokens_,), (tokens_,), (blocks_,), (ALL, ALL), ((), rows_), local, 0, 0)
        at = last
