"""Sequences of native sparse attention, and the pieces that a long call is cut into."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from .. import _arrays


def sums_of(cu_seqlens: Any, name: str = "cu_seqlens") -> Any:
    """Cumulative lengths as an array, which `cuts` checks; None stays None."""
    return None if cu_seqlens is None else _arrays.integers(cu_seqlens, name)


def cuts(cu_seqlens: Any, total: int | None, name: str = "cu_seqlens") -> np.ndarray:
    """Checked cumulative lengths of `total` tokens, int64. If `total` is None, the last length is the number of tokens."""
    cu = sums_of(cu_seqlens, name)
    expected = f"{name}: expected numbers rising from 0{'' if total is None else f' to {total}'}"
    if cu.ndim != 1 or cu.size == 0:
        raise ValueError(f"{expected}, got shape {cu.shape}")
    if cu[0] != 0 or (total is not None and cu[-1] != total):
        raise ValueError(f"{expected}, got {cu[0]} to {cu[-1]}")
    smaller = _arrays.falls(cu)
    if smaller.any():
        raise ValueError(f"{expected}, got {cu[1:][smaller][0]} after a larger one")
    return cu.copy()  # a context keeps the result


def cumulative(counts: Any) -> np.ndarray:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64)])


def block_count(tokens: Any, block_size: int, stride: int) -> Any:
    """Number of complete blocks of sequences of `tokens` tokens: a number or an array, as `tokens` is."""
    if isinstance(tokens, int):
        return 0 if tokens < block_size else (tokens - block_size) // stride + 1
    return np.where(np.asarray(tokens) < block_size, 0, (np.asarray(tokens) - block_size) // stride + 1)


class Sequences(NamedTuple):
    """The beginning of each sequence in packed arrays, and the place of its queries among its tokens. Queries are the last tokens of a
    sequence, or in a piece of a call any stretch of its tokens.

    The first four fields are cumulative numbers of queries, tokens, compressed keys and list rows. They are None where sequences have a
    batch axis.
    """

    queries: np.ndarray | None
    tokens: np.ndarray | None
    blocks: np.ndarray | None
    rows: np.ndarray | None
    begin: int | np.ndarray  # token number of each sequence's first query; one number where it is the same for all
    lengths: int | np.ndarray  # tokens of each sequence; one number where it is the same for all

    @classmethod
    def packed(cls, cu: np.ndarray, block_size: int = 1, stride: int = 1, tile: int = 1, queries: np.ndarray | None = None) -> Sequences:
        """Sequences one after the other. `queries` are cumulative numbers of queries, given where sequences have fewer queries than
        tokens."""
        own, lengths = cu if queries is None else queries, np.diff(cu)
        rows = cumulative(-(-np.diff(own) // tile))
        return cls(own, cu, cumulative(block_count(lengths, block_size, stride)), rows, lengths - np.diff(own), lengths)

    @classmethod
    def batch(cls, queries: int | np.ndarray, lengths: int | np.ndarray) -> Sequences:
        """Sequences with a batch axis. The numbers of queries and of tokens are the same for all sequences, or arrays with one number for
        each."""
        return cls.stretch(lengths - queries, lengths)

    @classmethod
    def stretch(cls, begin: int | np.ndarray, lengths: int | np.ndarray) -> Sequences:
        """Sequences with a batch axis whose queries are any stretch of their tokens, from token `begin` on."""
        return cls(None, None, None, None, begin, lengths)

    def runs(self, batch: int) -> list[tuple[int, int, int]]:
        """(first, end, number of queries) of each run of sequences, in a batch, that have equally many queries. Queries must be the last
        tokens."""
        counts = np.broadcast_to(np.asarray(self.lengths) - self.begin, batch)
        ends = [*(np.flatnonzero(np.diff(counts)) + 1).tolist(), batch]
        return [(first, end, int(counts[first])) for first, end in pairwise([0, *ends]) if first < end]

    @property
    def whole(self) -> bool:
        """Whether all tokens are queries."""
        return self.begin == 0 if isinstance(self.begin, int) else not self.begin.any()

    @property
    def longest(self) -> int:
        """Number of tokens of the longest sequence."""
        return self.lengths if isinstance(self.lengths, int) else int(self.lengths.max(initial=0))

    @property
    def kv_lens(self) -> np.ndarray | None:
        """Number of tokens of each entry of a batch whose arrays have room for more tokens; None for other sequences."""
        return None if self.tokens is not None or isinstance(self.lengths, int) else self.lengths


def lengths_within(x: Any, name: str, count: int, least: int, most: int | np.ndarray, expected: str) -> np.ndarray:
    """Checked lengths of `count` sequences, int64. `most` is one bound, or a bound for each sequence; `expected` states the bounds in a
    sentence."""
    lengths = _arrays.integers(x, name)
    if lengths.shape != (count,):
        raise ValueError(f"{name}: expected one number per sequence, ({count},), got {lengths.shape}")
    wrong = lengths[(lengths < least) | (lengths > most)]
    if wrong.size:
        raise ValueError(f"{name}: expected numbers from {expected}, got {wrong[0]}")
    return lengths.astype(np.int64)


def refuse_cuts_of_queries(cu_seqlens_q: Any) -> None:
    """Refuses `cu_seqlens_q` in a call without `cu_seqlens`."""
    if cu_seqlens_q is not None:
        raise ValueError("cu_seqlens_q: expected None without cu_seqlens, got some")


def check_queries(queries: Any, lengths: Any, name: str) -> None:
    """Refuses a sequence that has more queries than tokens."""
    more = np.atleast_1d(np.asarray(queries) > np.asarray(lengths))
    if more.any():
        n = int(more.argmax())
        count, most = (int(np.atleast_1d(x)[n if np.ndim(x) else 0]) for x in (queries, lengths))
        raise ValueError(f"{name}: expected at most the {most} tokens of the sequence, got {count} queries")


def packed_cuts(cu_seqlens: Any, cu_seqlens_q: Any, queries: int, tokens: int | None) -> tuple[np.ndarray, np.ndarray | None]:
    """Checked cumulative lengths of packed tokens and, where they are given, of queries. `tokens` is the number of tokens of all sequences;
    None if it is not known."""
    if cu_seqlens_q is None:
        return cuts(cu_seqlens, queries), None
    own, cu = cuts(cu_seqlens_q, queries, "cu_seqlens_q"), cuts(cu_seqlens, tokens)
    if len(own) != len(cu):
        raise ValueError(f"cu_seqlens_q: expected {len(cu)} numbers like cu_seqlens, got {len(own)}")
    check_queries(np.diff(own), np.diff(cu), "cu_seqlens_q")
    return cu, own


class Piece(NamedTuple):
    """A part of a call that is computed by itself: some sequences, or some heads and consecutive queries of one sequence.

    The first three fields are the indices of the piece in arrays of queries, of keys and of compressed keys.
    """

    queries: tuple[Any, ...]
    keys: tuple[Any, ...]
    blocks: tuple[Any, ...]
    heads: tuple[slice, slice]  # query heads and KV heads
    rows: tuple[Any, ...]  # indices of lists, on the axes before and after the axis of heads
    sequences: Sequences

    def lists(self, array: np.ndarray, kv_heads: int) -> np.ndarray:
        """The piece's rows of lists that have query heads or KV heads."""
        before, after = self.rows
        return array[(*before, self.heads[array.shape[-3] == kv_heads], after)]


ALL = slice(None)


def _pieces_of_one(tokens: int, tile: int, most: int, heads: tuple[int, int]) -> Iterator[tuple[tuple[slice, slice], int, int]]:
    """(heads, first query, end of queries) of the pieces of one sequence.

    A piece has as many heads as fit with all of their queries, but at least one KV head. Where queries are cut, the numbers of tiles of the
    pieces differ by at most one, so that no piece has only a few queries.
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


def pieces_of_heads(sequences: Sequences, rows: int, most: int, heads: tuple[int, int]) -> Iterator[Piece]:
    """The whole call in pieces of some KV heads with all of their queries: about `most` rows of queries, of which each head has `rows`."""
    kv_heads, group = heads[1], heads[0] // heads[1]
    once = min(max(1, most // max(1, group * rows)), kv_heads)
    before = (ALL,) if sequences.queries is None else ()
    for head in range(0, kv_heads, once):
        end = min(head + once, kv_heads)
        cut = (slice(head * group, end * group), slice(head, end))
        keys = (*before, ALL, cut[1])
        yield Piece((*before, ALL, cut[0]), keys, keys, cut, (before, ALL), sequences)


def pieces(batch: int, sequences: Sequences, tile: int, most: int, heads: tuple[int, int]) -> Iterator[Piece]:
    """The whole call in pieces of about `most` rows of queries, cut between sequences, heads and tiles.

    Each piece reads all keys of its heads. So heads are separated first, and queries are cut last. The cuts of a sequence, and with
    them the bits of its result, depend on its own shape alone, never on other sequences of the batch.
    """
    if sequences.queries is None:
        begins, lengths = sequences.begin, sequences.lengths
        for first, last, queries in sequences.runs(batch):
            fit = most // max(1, queries * heads[0])  # sequences that fit into one piece; 0: each sequence is cut
            for b in range(first, last, max(1, fit)):
                some = slice(b, min(b + max(1, fit), last))
                at, long = (x if isinstance(x, int) else x[some] for x in (begins, lengths))
                if fit:
                    yield Piece((some, slice(queries)), (some,), (some,), (ALL, ALL), ((some,), ALL), Sequences.stretch(at, long))
                    continue
                for cut, begin, end in _pieces_of_one(queries, tile, most, heads):
                    rows, keys = slice(begin // tile, -(-end // tile)), (some, ALL, cut[1])
                    here = Sequences.stretch(at + begin, long)
                    yield Piece((some, slice(begin, end), cut[0]), keys, keys, cut, ((some,), rows), here)
        return
    cu_q, cu, cu_blocks, cu_rows = (np.asarray(x) for x in sequences[:4])
    begins, lengths = (np.asarray(x) for x in sequences[4:])
    at, count, together = 0, len(cu_q) - 1, max(1, most // heads[0])
    while at < count:
        length = int(cu_q[at + 1] - cu_q[at])
        if length > together:
            own, whole, inner, listed = (slice(int(x[at]), int(x[at + 1])) for x in (cu_q, cu, cu_blocks, cu_rows))
            for cut, begin, end in _pieces_of_one(length, tile, most, heads):
                rows = slice(listed.start + begin // tile, listed.start - (-end // tile))
                stretch = slice(own.start + begin, own.start + end)
                tokens_of, blocks_of = (None, whole, cut[1]), (None, inner, cut[1])
                here = Sequences.stretch(int(begins[at]) + begin, int(lengths[at]))
                yield Piece((None, stretch, cut[0]), tokens_of, blocks_of, cut, ((None,), rows), here)
            at += 1
            continue
        last = int(np.searchsorted(cu_q, cu_q[at] + together, "right")) - 1
        last = min(max(last, at + 1), count)
        queries_, tokens_, blocks_, rows_ = (slice(int(x[at]), int(x[last])) for x in (cu_q, cu, cu_blocks, cu_rows))
        q, k, blocks, lists = (np.ascontiguousarray(x[at : last + 1] - x[at]) for x in (cu_q, cu, cu_blocks, cu_rows))
        local = Sequences(q, k, blocks, lists, begins[at:last], lengths[at:last])
        yield Piece((queries_,), (tokens_,), (blocks_,), (ALL, ALL), ((), rows_), local)
        at = last
