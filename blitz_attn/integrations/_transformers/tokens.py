"""Tokens that a model chose itself for each query: DeepSeek-V3.2 and its kin give attention `indices`, (B, Sq, K), for all heads.

Where a query sees fewer than K tokens, its list may also name tokens that the mask hides from it: so the rules of the mask hold as well.

Some models (GLM-5.3, Qwen4, DeepSeek-V4) give attention their choice in the mask instead. The mask then holds `Listed` or `Appended`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from .masks import AdditiveMask, Call, Rules, additive

__all__ = [
    "Appended", "Listed", "all_seen", "as_lists", "as_mask", "check_indices", "is_exact", "mark_exact", "pays_as_blocks", "pays_as_lists",
    "pieces",
]  # fmt: skip

_MOST_BYTES = 1 << 26  # of the mask of one call and the arrays from which it is made, unless `_ROWS` queries need more
_ROWS = 128  # pieces between the first and the last have a multiple of this many queries, since masks are read in blocks of 128


@dataclass(frozen=True)
class Listed:
    """Keys that a model chose for each query among those of a mask: numbers of blocks of `size` keys, int32 (B, Sq, K), counted from the
    first key of each batch entry. A row ends at its first -1. The row of a query that sees at most `covers` keys names all of them."""

    blocks: Any
    size: int
    covers: int = 0

    def elements(self, starts: tuple[int, ...], keys: int) -> Any:
        """Where queries see keys, (B, 1, Sq, keys)."""
        seen = as_mask(self.blocks, -(-keys // self.size)).repeat_interleave(self.size, dim=-1)[..., :keys]
        # Columns that wrap around from the end land before the entry's first key.
        return torch.stack([x.roll(begin, -1) for x, begin in zip(seen, starts, strict=True)]) if any(starts) else seen


@dataclass(frozen=True)
class Appended:
    """Keys of another source, which follow those of a mask. The model appends this object to the mask in place of columns. `keys` is the
    number of these keys. A query sees those that its row of `chosen` names, int32 (B, Sq, K), where a row ends at its first -1; or, without
    `chosen`, the first ones, as many as its number in `count`, (B, Sq)."""

    keys: int
    chosen: Any = None
    count: Any = None

    def to(self, dtype: Any) -> Appended:
        return self

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        match function, arguments:
            case torch.cat, ([AdditiveMask(appended=None) as mask, Appended() as appended],):
                return mask.followed_by(appended)
            case torch.cat, ([torch.Tensor() as mask, Appended() as appended],) if mask.is_floating_point():
                return torch.cat([mask, additive(appended.elements(), mask.dtype)], **(options or {}))
        raise TypeError(f"attention_mask: expected columns that are appended to a mask, got {function}")

    def elements(self) -> Any:
        """Where queries see these keys, (B, 1, Sq, keys)."""
        if self.chosen is not None:
            return as_mask(self.chosen, self.keys)
        return (torch.arange(self.keys) < self.count[..., None]).unsqueeze(1)


def check_indices(indices: Any, batch: int, queries: int, keys: int) -> None:
    """Refuse lists of another dtype or shape, or with numbers that are neither tokens nor -1."""
    shape = tuple(indices.shape)
    if indices.dtype not in (torch.int32, torch.int64) or len(shape) != 3 or shape[:2] not in ((batch, queries), (1, queries)):
        expected = f"int32 or int64 of shape ({batch}, {queries}, tokens per query)"
        raise ValueError(f"indices: expected {expected}, got {indices.dtype} of {shape}")
    if indices.numel():
        for found in indices.aminmax():
            if not -1 <= found < keys:
                raise ValueError(f"indices: expected tokens from 0 to {keys - 1}, or -1 for none, got {int(found)}")


def pieces(rules: Rules, call: Call, most: int) -> Iterator[tuple[slice, Call]]:
    """Cuts a call into ranges of its queries: first those that see at most `most` keys, then as many at a time as one mask has room for.

    In causal calls, the keys after the last query of a piece are left out of it. A call with a window and without the causal rule is not
    divided, since its window is counted from the last query and the last key.
    """
    row = (call.entries.stop - call.entries.start) * (max(call.kv_lens) + 2 * 8 * most)  # bytes per query: a mask of bool, and int64 lists
    rows = max(_ROWS, _MOST_BYTES // max(1, row) // _ROWS * _ROWS)
    if rules.window is not None and not rules.causal:
        rows = max(1, rules.q_length)
    few = min(max(0, most - rules.offset + call.start), rules.q_length) if rules.causal else 0
    begins = sorted({0, few, *range(few, rules.q_length, rows)} - {rules.q_length}) or [0]
    for begin, end in zip(begins, [*begins[1:], rules.q_length], strict=True):
        q_lens, kv_lens = [], []
        for q_len, kv_len in zip(call.q_lens, call.kv_lens, strict=True):
            queries = min(max(q_len - begin, 0), end - begin)
            keys = kv_len - (q_len - begin - queries) if rules.causal else kv_len
            nothing = queries == 0 or keys <= 0
            q_lens.append(0 if nothing else queries)
            kv_lens.append(0 if nothing else keys)
        yield slice(begin, end), replace(call, q_lens=q_lens, kv_lens=kv_lens)


def as_mask(indices: Any, keys: int) -> Any:
    """Where queries see keys, (B, 1, Sq, keys), by lists that name some of the first `keys` keys; other entries name no key."""
    places = indices.long()
    places = places.masked_fill((places < 0) | (places >= keys), keys)
    seen = torch.zeros((*indices.shape[:2], keys + 1), dtype=torch.bool).scatter_(-1, places, True)
    return seen[..., :keys].unsqueeze(1)


def all_seen(seen: Any, call: Call, causal: bool) -> bool:
    """Whether a mask hides nothing except what the lengths and the causal rule of a call hide anyway."""
    for mask, q_len, kv_len in zip(seen[:, 0], call.q_lens, call.kv_lens, strict=True):
        part = mask[:q_len, :kv_len]
        future = torch.ones_like(part).triu(kv_len - q_len + 1) if causal else torch.zeros_like(part)
        if not (part | future).all():
            return False
    return True


def pays_as_lists(queries: int, keys: int, listed: int, group: int = 1) -> bool:
    """Whether attention over lists of single tokens costs less than attention to all keys with a mask. `group`: heads that share a key.

    Where each head has keys and values of its own, a list gathers them anew for each query. Measured with head dims 192 and 128, in float32
    and bfloat16, a listed pair of query and key costs 1.3 times as much as a masked pair for 1 query, 5 to 7 times as much for 4 queries,
    18 to 26 times for 16, and 38 to 47 times for prompts. With 128 heads that share one key of head dim 576, both pairs cost the same.
    """
    return 2 * keys >= listed * max(2, min(3 * queries, 80) // group)


def pays_as_blocks(queries: int, keys: int, listed: int, group: int) -> bool:
    """Whether attention over lists of blocks costs less than attention to all keys with a mask, for blocks of 4 and more tokens and `group`
    query heads per key head. Measured in float32 and bfloat16, a listed pair costs 1.2 to 2 times as much as a masked pair for 1 query, and
    1.3 to 4.8 times for 4 queries. For prompts, it costs 2.2 to 2.6 times as much in groups of 8 heads (blocks of 4 tokens), 18 to 31 times
    for single heads, and 1 to 1.3 times in groups of 64 heads (blocks of 16 tokens)."""
    return keys >= listed * min(1 + queries / 2, max(1.3, 20 / group))


def as_lists(indices: Any, keys: int) -> Any:
    """Lists as the operations take them, (B, 1, Sq, K): without entries that name none of the first `keys` keys, and each token once."""
    chosen = indices.to(torch.int32)
    chosen = chosen.masked_fill((chosen < 0) | (chosen >= keys), keys).sort(dim=-1).values
    again = (chosen[..., 1:] == chosen[..., :-1]) & (chosen[..., 1:] < keys)
    if again.any():
        chosen[..., 1:] = chosen[..., 1:].masked_fill(again, keys)
        chosen = chosen.sort(dim=-1).values
    return chosen.masked_fill(chosen == keys, -1).unsqueeze(1).contiguous()


_EXACT = "_blitz_attn_exact"


def mark_exact(indices: Any) -> Any:
    """Marks lists as made by this library. Either each list names all tokens. Or each rises, names no token twice and only tokens that its
    query sees, and names all of these if it has room for them."""
    setattr(indices, _EXACT, True)
    return indices


def is_exact(indices: Any) -> bool:
    """Whether `mark_exact` has marked the lists."""
    return getattr(indices, _EXACT, False)
