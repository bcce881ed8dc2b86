"""The memory of `NsaCache`: keys, values and compressed blocks of sequences that grow."""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import _arrays
from .arrays import Reals, check_rank, leading, same_kind, storage
from .compression import check_weight, compress_into
from .rules import Rules
from .sequences import Sequences, block_count, lengths_within

MOST = 1 << 30  # more queries than a call takes
LEAST = 64  # tokens that a store has room for from the first one on


class Store:
    """Arrays of a batch that have room for more than they hold. A full array is copied into one of twice the size."""

    def __init__(self, rules: Rules, w_k: Any, w_v: Any, dtype: str | None, threads: int | None) -> None:
        self.rules, self.dtype, self.threads = rules, dtype, threads
        self.kind = ""
        self.lens = np.zeros(0, np.int64)
        self._given = {"w_k_compress": w_k, "w_v_compress": w_v}
        self._weights: list[Reals] = []
        self._room: list[np.ndarray] = []  # k, v, k_cmp, v_cmp

    @property
    def ragged_lens(self) -> np.ndarray | None:
        """Tokens of each sequence; None where all have as many."""
        return None if self._even else self.lens

    def held(self, queries: int) -> list[np.ndarray]:
        """Keys, values and their compressed blocks, up to the last of the longest sequence; nothing before the first tokens.

        Where there are no sequences, none has fewer tokens than `queries`, and the arrays have as many.
        """
        longest = self._longest if len(self.lens) else min(queries, MOST)
        self._make_room(longest)
        return [x[:, :n] for x, n in zip(self._room, 2 * [longest] + 2 * [self._blocks(longest)], strict=False)]

    @property
    def _even(self) -> bool:
        return bool((self.lens == self.lens[:1]).all())

    @property
    def _longest(self) -> int:
        return int(self.lens.max(initial=0))

    def _blocks(self, tokens: int) -> int:
        return block_count(tokens, self.rules.size, self.rules.stride)

    def append(self, k: Any, v: Any, lens: Any) -> None:
        new, counts = self._checked(k, v, lens)
        before, after = self.lens, self.lens + counts
        self._make_room(int(after.max(initial=0)))
        if self._even and (counts == counts[:1]).all() and len(counts):
            for held, x in zip(self._room, new, strict=False):
                held[:, before[0] : after[0]] = x[:, : counts[0]]
            self._compress(slice(None), int(before[0]), int(after[0]))
        else:
            for b in np.flatnonzero(counts).tolist():
                for held, x in zip(self._room, new, strict=False):
                    held[b, before[b] : after[b]] = x[b, : counts[b]]
                self._compress(slice(b, b + 1), int(before[b]), int(after[b]))
        self.lens = after

    def crop(self, lens: Any) -> None:
        """Each sequence keeps its first tokens, and the blocks that lie in them. What is appended next is written over the others."""
        if isinstance(lens, (int, np.integer)) and not isinstance(lens, bool):
            most = _arrays.integer(lens, "lens")
            if most < 0:
                raise ValueError(f"lens: expected at least 0 tokens, got {most}")
            self.lens = np.minimum(self.lens, most)
        else:
            self.lens = lengths_within(lens, "lens", len(self.lens), 0, self.lens, "0 to the tokens that each sequence has")

    def reorder(self, indices: Any) -> None:
        """Sequence n becomes what sequence indices[n] was."""
        chosen, count = _arrays.integers(indices, "indices"), len(self.lens)
        if chosen.ndim != 1:
            raise ValueError(f"indices: expected one number per sequence, got shape {chosen.shape}")
        wrong = chosen[(chosen < 0) | (chosen >= count)]
        if wrong.size:
            expected = f"numbers from 0 to {count - 1}" if count else "no numbers for a cache without sequences"
            raise ValueError(f"indices: expected {expected}, got {wrong[0]}")
        lens, same = self.lens[chosen], len(chosen) == count
        longest = int(lens.max(initial=0))
        used = 2 * [longest] + 2 * [self._blocks(longest)]
        moved = np.flatnonzero(chosen != np.arange(count)) if same else np.arange(len(chosen))
        taken = [x[chosen[moved], :n] for x, n in zip(self._room, used, strict=False)]  # all, before the first is written
        if same:
            for x, new in zip(self._room, taken, strict=True):
                x[moved, : new.shape[1]] = new
        else:
            self._room = taken
        self.lens = lens

    def _compress(self, some: slice, before: int, after: int) -> None:
        """Makes the blocks of some sequences that become complete when `before` tokens become `after`."""
        rules, first, end = self.rules, self._blocks(before), self._blocks(after)
        if first == end:
            return
        tokens = slice(first * rules.stride, after)
        alone = Sequences.batch(after - tokens.start, after - tokens.start)
        for x, made, weight, name in zip(self._room[:2], self._room[2:], self._weights, "kv", strict=True):
            names = (name, f"w_{name}_compress")
            into = made[some, first:end]
            compress_into(x[some, tokens], weight.array, into, self.kind, rules.size, rules.stride, alone, self.threads, names)

    def _make_room(self, tokens: int) -> None:
        have = self._room[0].shape[1] if self._room else tokens
        if tokens <= have:
            return
        room, longest = max(LEAST, tokens, 2 * have), self._longest
        for n, old in enumerate(self._room):
            size, used = (room, longest) if n < 2 else (self._blocks(room), self._blocks(longest))
            self._room[n] = np.empty((old.shape[0], size, *old.shape[2:]), old.dtype)
            self._room[n][:, :used] = old[:, :used]

    def _checked(self, k: Any, v: Any, lens: Any) -> tuple[list[np.ndarray], np.ndarray]:
        """The new tokens, and how many of them each sequence gets. The first ones say what the store holds."""
        keys, kind = leading(k, "k", self.dtype)
        values = same_kind(v, "v", self.dtype, kind, "k")
        for x, name in ((keys, "k"), (values, "v")):
            check_rank(x, name, False)
        if values.shape[:-1] != keys.shape[:-1]:
            raise ValueError(f"v: expected the tokens and heads of k {keys.shape}, got {values.shape}")
        if lens is None:
            counts = np.full(len(keys), keys.shape[1], np.int64)
        else:
            counts = lengths_within(lens, "lens", len(keys), 0, keys.shape[1], f"0 to the {keys.shape[1]} tokens of k")
        self._begin(keys, values, kind)
        return [keys, values], counts

    def _begin(self, keys: np.ndarray, values: np.ndarray, kind: str) -> None:
        """Makes the arrays when the first tokens come, and checks later tokens against them."""
        if not self._room:
            pairs = zip((keys, values), self._given.items(), strict=True)
            self._weights = [check_weight(w, name, x.shape, self.dtype, kind) for x, (name, w) in pairs]
            self._room = [np.empty((x.shape[0], 0, *x.shape[2:]), storage(kind)) for x in (keys, values) * 2]
            self.kind, self.lens = kind, np.zeros(len(keys), np.int64)
            return
        if kind != self.kind:
            raise TypeError(f"k: expected dtype {self.kind} like the tokens before, got {kind}")
        for x, held, name in zip((keys, values), self._room, "kv", strict=False):
            if len(x) != len(held) or x.shape[2:] != held.shape[2:]:
                expected = f"({len(held)}, N, {', '.join(map(str, held.shape[2:]))})"
                raise ValueError(f"{name}: expected shape {expected} like the tokens before, got {x.shape}")
