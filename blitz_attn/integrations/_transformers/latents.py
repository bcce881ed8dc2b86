"""Keys and values that a model keeps as latents, of a few hundred numbers for all heads (MLA): attended as they are, or expanded.

Where latents are attended as they are ("absorbed"), the projection that would expand them is folded into queries and outputs, and all heads
share one key and value. A pair of query and key then costs about three times as much as with expanded keys. But no key is expanded, and a
list gathers each row once for all heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["Latents", "latents_of", "plain_weight"]

_NAME = "_blitz_attn_latents"
_BY_TORCH = 2  # cost of a product of torch, in products of attention: measured as 2.5 to 3.5 in float32, 1.3 to 2.5 in bfloat16
_TURNED_FROM = 128  # queries for which it pays, in bfloat16, to turn the projection of values: products then take a third of the time
_MOST_BYTES = 1 << 26  # of the folded queries of one call, unless 64 queries need more


def latents_of(key: Any) -> Latents | None:
    """The latents that a key stands for; None where it is an ordinary key."""
    return getattr(key, _NAME, None)


def plain_weight(linear: Any) -> Any:
    """The weight of a linear layer that multiplies by it and does nothing else; None for others."""
    hooks = ("forward", "_forward_hooks", "_forward_pre_hooks")
    if type(linear) is not torch.nn.Linear or linear.bias is not None or any(vars(linear).get(name) for name in hooks):
        return None
    if type(linear.weight) is not torch.nn.Parameter:  # quantised
        return None
    return linear.weight


@dataclass
class Latents:
    """The latents of one call.

    Attributes
    ----------
    expand : callable
        The model's own method, (nope, rope) to keys and values of all heads.
    nope : torch.Tensor
        (B, 1, T, C): the numbers from which values, and the parts of keys that know no position, are made.
    rope : torch.Tensor
        (B, 1, T, R): the parts of keys that know their position.
    of_keys, of_values : torch.Tensor
        (H, D, C): the projection.
    turned : torch.Tensor, optional
        `of_values` as (H, C, D), once it has been made.
    """

    expand: Any
    nope: Any
    rope: Any
    of_keys: Any
    of_values: Any
    turned: Any = None

    def as_key(self) -> Any:
        """A tensor that stands for the expanded keys until it reaches attention."""
        key = self.rope.detach()
        setattr(key, _NAME, self)
        return key

    @property
    def width(self) -> int:
        """How many numbers an absorbed key has."""
        return self.nope.shape[3] + self.rope.shape[3]

    def expanded(self, keys: int) -> tuple[Any, Any]:
        """The first `keys` keys and their values, of all heads."""
        return self.expand(self.nope[:, :, :keys], self.rope[:, :, :keys])

    def rows_expanded(self, first: int, rows: int, most: int) -> int:
        """How many of the `rows` queries, from the first on, cost less with expanded keys. The first query sees `first` keys, and a list
        has at most `most`.

        All operations are counted. Their counts can be compared: measured with 128 heads, attention reaches 0.8 of the processor's peak
        both over lists of absorbed keys and over expanded keys with a mask.
        """
        _, of_key, latent = self.of_keys.shape
        of_value = self.of_values.shape[1]
        absorbed, expanded = self.width + latent, of_key + self.rope.shape[3] + of_value  # operations of a pair, per head
        folding = _BY_TORCH * latent * (of_key + of_value)  # operations per head of folding a query, or of expanding a key
        end = min(rows, (most * absorbed + folding) // expanded - first + 1)  # from here on, lists cost less
        if end <= 0:
            return 0
        seen = torch.arange(first, first + end)
        saved = int((seen.clamp(max=most) * absorbed + folding - seen * expanded).sum())
        return end if saved > (first + end - 1) * folding else 0

    def rows_at_once(self) -> int:
        """Queries whose folded form is made at once."""
        return max(64, _MOST_BYTES // (self.nope.shape[0] * len(self.of_keys) * self.width * self.nope.element_size()))

    def folded(self, query: Any) -> Any:
        """Queries (B, H, Sq, D + R) in the form in which they meet absorbed keys: (B, H, Sq, C + R)."""
        split = self.of_keys.shape[1]
        rows = query[..., :split].transpose(0, 1)
        products = torch.bmm(rows.flatten(1, 2), self.of_keys).unflatten(1, rows.shape[1:3]).transpose(0, 1)
        return torch.cat([products, query[..., split:]], dim=-1)

    def unfolded(self, out: Any) -> Any:
        """The result of attention to latents, (B, Sq, H, C), expanded to the dims of values: (B, Sq, H, D)."""
        rows = out.flatten(0, 1)
        if rows.dtype == torch.bfloat16 and len(rows) >= _TURNED_FROM:
            if self.turned is None:
                self.turned = self.of_values.transpose(1, 2).contiguous()
            return torch.bmm(rows.transpose(0, 1), self.turned).transpose(0, 1).unflatten(0, out.shape[:2])
        products = torch.bmm(self.of_values, rows.permute(1, 2, 0))  # in this order torch is quicker, above all for one query
        return products.permute(2, 0, 1).unflatten(0, out.shape[:2])

    def joined(self, keys: int) -> Any:
        """The first `keys` keys, (B, 1, keys, C + R). The first C numbers of a key are its value."""
        return torch.cat([self.nope[:, :, :keys], self.rope[:, :, :keys]], dim=-1)

    def gathered(self, lists: Any) -> Any:
        """The keys of lists (B, Sq, K): (B * Sq, K, 1, C + R)."""
        batch, queries, count = lists.shape
        keys = self.nope.new_empty(batch, queries * count, self.width)
        for places, rows, nope, rope in zip(lists.clamp(min=0).flatten(1), keys, self.nope[:, 0], self.rope[:, 0], strict=True):
            for source, part in zip((nope, rope), rows.split([nope.shape[1], rope.shape[1]], dim=1), strict=True):
                torch.index_select(source, 0, places, out=part)  # an advanced index takes four times as long
        return keys.view(batch * queries, count, 1, -1)
