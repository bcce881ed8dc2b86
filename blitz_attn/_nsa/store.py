"""The memory of `NsaCache`: keys, values and compressed blocks of sequences that grow."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from .. import _arrays
from .._floats import floats
from .arrays import Reals, check_heads, check_rank, leading, same_kind, storage
from .compression import check_weight, compress_into
from .rules import Rules
from .sequences import Sequences, block_count, lengths_within

MOST = (1 << 30) - 1  # queries of a call
LEAST = 64  # a store that holds any tokens has room for at least so many
COPIED_AT_A_TIME = 1 << 24  # bytes: a few milliseconds


class Held(NamedTuple):
    """The contents of a store at one moment. A record never changes, but the memory of its arrays does.

    In the newest record, memory behind the tokens may be written at any time. In an older record, tokens that have been cropped since may
    be overwritten, too.
    """

    lens: np.ndarray  # tokens of each sequence
    kind: str
    weights: tuple[Reals, ...]
    room: tuple[np.ndarray, ...]  # k, v, k_cmp, v_cmp, with room for more than they hold; empty before the first tokens

    @property
    def ragged_lens(self) -> np.ndarray | None:
        """Number of tokens of each sequence; None where all sequences have equally many."""
        return None if self.even else self.lens

    @property
    def even(self) -> bool:
        return bool((self.lens == self.lens[:1]).all())

    @property
    def longest(self) -> int:
        return int(self.lens.max(initial=0))


def copy(source: np.ndarray, into: np.ndarray) -> None:
    """Copies tokens, (B, N, H, D), some MB at a time, so that a signal need not wait until all are copied."""
    step = max(1, COPIED_AT_A_TIME // max(1, source[:, :1].nbytes))
    for at in range(0, source.shape[1], step):
        into[:, at : at + step] = source[:, at : at + step]


class Store:
    """Arrays of a batch that have room for more than they hold. Full arrays are copied into arrays of at least twice the size.

    Each method writes new data where they are not visible yet: in other arrays, or behind the tokens that are held. One assignment at the
    method's end makes the data visible. Any exception before this assignment leaves the store as it was.
    """

    def __init__(self, rules: Rules, w_k: Any, w_v: Any, dtype: str | None, threads: int | None) -> None:
        self.rules, self.dtype, self.threads = rules, dtype, threads
        self._given = {"w_k_compress": w_k, "w_v_compress": w_v}
        self._held = Held(np.zeros(0, np.int64), "", (), ())

    @property
    def lens(self) -> np.ndarray:
        return self._held.lens

    def held(self, queries: int) -> tuple[Held, list[np.ndarray]]:
        """The present record, and the keys, values and their compressed blocks up to the end of the longest sequence. Before the first
        tokens, there are no arrays.

        In a batch of 0 sequences, the arrays have `queries` tokens, so that the queries fit (unless they are more than MOST).
        """
        held = self._held
        longest = held.longest if len(held.lens) else min(queries, MOST)
        self._held = held = self._with_room(held, longest)
        return held, [x[:, :n] for x, n in zip(held.room, self._used(longest), strict=False)]

    def _blocks(self, tokens: int) -> int:
        return block_count(tokens, self.rules.size, self.rules.stride)

    def _used(self, tokens: int) -> list[int]:
        """How many places of each array are filled by `tokens` tokens of a sequence and their blocks."""
        return 2 * [tokens] + 2 * [self._blocks(tokens)]

    def append(self, k: Any, v: Any, lens: Any) -> None:
        held, new, counts = self._checked(k, v, lens)
        before, after = held.lens, held.lens + counts
        held = self._with_room(held, int(after.max(initial=0)))
        alike = held.even and len(counts) > 0 and (counts == counts[:1]).all()
        for b in [0] if alike else np.flatnonzero(counts).tolist():
            some, begin, end = slice(None) if alike else slice(b, b + 1), int(before[b]), int(after[b])
            for x, tokens in zip(held.room, new, strict=False):
                copy(tokens[some, : end - begin], x[some, begin:end])
            self._compress(held, some, begin, end)
        self._held = held._replace(lens=after)

    def refuse_queries(self, q: Any) -> None:
        """Refuses queries that do not fit the tokens. The sentence is about the queries, because the caller has given no keys."""
        held = self._held
        array, kind = floats(q, "q", "bfloat16" if held.kind == "bfloat16" else self.dtype)
        if kind != held.kind:
            raise TypeError(f"q: expected dtype {held.kind} like the tokens, got {kind}")
        batch, _, kv_heads, dim = held.room[0].shape
        if array.ndim != 4 or len(array) != batch or array.shape[-1] != dim:
            raise ValueError(f"q: expected shape ({batch}, N, H, {dim}) like the tokens, got {array.shape}")
        if array.shape[2] < 1 or array.shape[2] % kv_heads:
            expected = f"a number of heads that is a positive multiple of the {kv_heads} heads of the tokens"
            raise ValueError(f"q: expected {expected}, got {array.shape[2]}")
        if array.shape[1] > MOST:
            raise ValueError(f"q: expected at most {MOST} tokens, got {array.shape[1]}")

    def crop(self, lens: Any) -> None:
        """Each sequence keeps its first tokens, and the blocks that lie in them. Tokens that are appended next overwrite its other
        tokens."""
        held = self._held
        if isinstance(lens, (int, np.integer)) and not isinstance(lens, bool):
            most = _arrays.integer(lens, "lens")
            if most < 0:
                raise ValueError(f"lens: expected at least 0 tokens, got {most}")
            kept = np.minimum(held.lens, most)
        else:
            kept = lengths_within(lens, "lens", len(held.lens), 0, held.lens, "0 to the tokens that each sequence has")
        self._held = held._replace(lens=kept)

    def reorder(self, indices: Any) -> None:
        """Sequence n becomes a copy of the former sequence indices[n]. Nothing is copied if each sequence stays in its place."""
        held = self._held
        chosen, count = _arrays.integers(indices, "indices"), len(held.lens)
        if chosen.ndim != 1:
            raise ValueError(f"indices: expected one number per sequence, got shape {chosen.shape}")
        wrong = chosen[(chosen < 0) | (chosen >= count)]
        if wrong.size:
            expected = f"numbers from 0 to {count - 1}" if count else "no numbers for a cache without sequences"
            raise ValueError(f"indices: expected {expected}, got {wrong[0]}")
        if np.array_equal(chosen, np.arange(count)):
            return
        room = tuple(np.empty((len(chosen), *x.shape[1:]), x.dtype) for x in held.room)
        for to, source in enumerate(chosen.tolist()):
            for old, new, n in zip(held.room, room, self._used(int(held.lens[source])), strict=False):
                copy(old[source : source + 1, :n], new[to : to + 1, :n])
        self._held = held._replace(lens=held.lens[chosen], room=room)

    def _compress(self, held: Held, some: slice, before: int, after: int) -> None:
        """Computes the compressed blocks that become complete when each of the sequences `some` grows from `before` to `after` tokens."""
        rules, first, end = self.rules, self._blocks(before), self._blocks(after)
        if first == end:
            return
        tokens = slice(first * rules.stride, after)
        alone = Sequences.batch(after - tokens.start, after - tokens.start)
        for x, made, weight, name in zip(held.room[:2], held.room[2:], held.weights, "kv", strict=True):
            names = (name, f"w_{name}_compress")
            into = made[some, first:end]
            compress_into(x[some, tokens], weight.array, into, held.kind, rules.size, rules.stride, alone, self.threads, names)

    def _with_room(self, held: Held, tokens: int) -> Held:
        """`held` with arrays that have room for `tokens` tokens per sequence."""
        have = held.room[0].shape[1] if held.room else tokens
        if tokens <= have:
            return held
        room = tuple(
            np.empty((len(old), size, *old.shape[2:]), old.dtype)
            for old, size in zip(held.room, self._used(max(LEAST, tokens, 2 * have)), strict=True)
        )
        for b, filled in enumerate(held.lens.tolist()):
            for old, new, n in zip(held.room, room, self._used(filled), strict=True):
                copy(old[b : b + 1, :n], new[b : b + 1, :n])
        return held._replace(room=room)

    def _checked(self, k: Any, v: Any, lens: Any) -> tuple[Held, list[np.ndarray], np.ndarray]:
        """The present record, the new tokens, and how many of them each sequence gets. The first tokens set dtype and shapes."""
        keys, kind = leading(k, "k", self.dtype)
        values = same_kind(v, "v", self.dtype, kind, "k")
        for x, name in ((keys, "k"), (values, "v")):
            check_rank(x, name, False)
            check_heads(x, name)
        if values.shape[:-1] != keys.shape[:-1]:
            raise ValueError(f"v: expected the tokens and heads of k {keys.shape}, got {values.shape}")
        if lens is None:
            counts = np.full(len(keys), keys.shape[1], np.int64)
        else:
            counts = lengths_within(lens, "lens", len(keys), 0, keys.shape[1], f"0 to the {keys.shape[1]} tokens of k")
        return self._begun(keys, values, kind), [keys, values], counts

    def _begun(self, keys: np.ndarray, values: np.ndarray, kind: str) -> Held:
        """The present record, after a check that the new tokens fit. Before the first tokens, it is a new record of sequences without
        tokens."""
        held = self._held
        if not held.room:
            pairs = zip((keys, values), self._given.items(), strict=True)
            weights = tuple(check_weight(w, name, x.shape, self.dtype, kind) for x, (name, w) in pairs)
            room = tuple(np.empty((x.shape[0], 0, *x.shape[2:]), storage(kind)) for x in (keys, values) * 2)
            return Held(np.zeros(len(keys), np.int64), kind, weights, room)
        if kind != held.kind:
            raise TypeError(f"k: expected dtype {held.kind} like the tokens before, got {kind}")
        for x, old, name in zip((keys, values), held.room, "kv", strict=False):
            if len(x) != len(old) or x.shape[2:] != old.shape[2:]:
                expected = f"({len(old)}, N, {', '.join(map(str, old.shape[2:]))})"
                raise ValueError(f"{name}: expected shape {expected} like the tokens before, got {x.shape}")
        return held
