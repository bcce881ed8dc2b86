"""Masks as rules: what transformers' mask functions say, without a matrix of queries times keys.

transformers makes a mask once per forward pass and kind of layer, and hands it to the attention of each layer. `make_mask` is registered
for that. It reads the rule that the mask function stands for (causal, a window, packed sequences), and the padding, and returns a
`RuleMask`. Where there is no such rule, the mask says why, and attention falls back.

While torch traces a model (`torch.compile`), padding and packed sequences are tensors without elements. `make_mask` then returns a
`TracedMask`, which holds them, and the operator that is called in the graph makes the `RuleMask`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import FunctionType
from typing import Any

import numpy as np
import torch
from transformers import masking_utils

__all__ = ["Call", "RuleMask", "Rules", "TracedMask", "make_mask"]


@dataclass(frozen=True)
class Call:
    """What one call of the attention operation takes: a range of batch entries, their keys from `start` on, and their lengths."""

    entries: slice
    start: int
    q_lens: list[int]
    kv_lens: list[int]


@dataclass(frozen=True)
class Rules:
    """Which keys each query sees.

    Query i has position ``i + offset`` among the keys. `left` and `right` bound how many tokens before and after its position it sees, None
    does not. `starts` and `ends` bound the keys of each batch entry. With `sequences`, cumulative lengths over the tokens of all
    entries, queries see their own sequence only.
    """

    offset: int
    q_length: int
    causal: bool
    left: int | None
    right: int | None
    starts: tuple[int, ...]
    ends: tuple[int, ...]
    sequences: tuple[int, ...] | None = None

    @property
    def window(self) -> tuple[int, int] | None:
        """`left` and `right` as the operations take them."""
        if self.left is None and self.right is None:
            return None
        return tuple(-1 if n is None else n for n in (self.left, self.right))  # type: ignore[return-value]

    def calls(self) -> Iterator[Call]:
        """Calls that cover the batch: neighbours whose keys begin at the same place share one.

        The operations align the last valid query with the last valid key. Queries behind the last valid key are padding themselves: they
        are left out, and get 0.
        """
        aligned = self.causal or self.window is not None
        first = 0
        for b in range(1, len(self.starts) + 1):
            if b < len(self.starts) and self.starts[b] == self.starts[first]:
                continue
            start = self.starts[first]
            q_lens, kv_lens = [], []
            for end in self.ends[first:b]:
                end = min(end, self.offset + self.q_length) if aligned else end
                queries = end - self.offset if aligned else self.q_length
                nothing = queries <= 0 or end <= start
                q_lens.append(0 if nothing else queries)
                kv_lens.append(0 if nothing else end - start)
            yield Call(slice(first, b), start, q_lens, kv_lens)
            first = b


# ---- What a mask function says -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Said:
    """Rules of a mask function by itself, joined by `and`."""

    causal: bool = False
    left: int | None = None
    right: int | None = None
    packed: Any = None  # (B, S) numbers of sequences
    padding: tuple[Any, ...] = ()  # (B, keys) tensors of bool

    def __and__(self, other: _Said) -> _Said:
        def least(a: int | None, b: int | None) -> int | None:
            return a if b is None else b if a is None else min(a, b)

        packed = self.packed if other.packed is None else other.packed
        return _Said(
            self.causal or other.causal, least(self.left, other.left), least(self.right, other.right), packed, self.padding + other.padding
        )


class _NoRuleError(Exception):
    """A mask function that is none of those known here; the text says which."""


# Functions of `masking_utils` that return functions, and the names of their arguments.
_MAKERS = {
    "and_masks": ("mask_functions",),
    "packed_sequence_mask_function": ("packed_sequence_mask",),
    "remap_positions_for_packed_sequence": ("mask_function", "position_ids"),
    "sliding_window_bidirectional_overlay": ("sliding_window",),
    "sliding_window_overlay": ("sliding_window",),
}
_MADE_BY = "_blitz_attn_made_by"  # of a function that was made while torch traces: the function that made it, and its arguments


def _remember_variables(name: str) -> None:
    """torch.compile cannot trace code that reads the closure of a function. While it traces one of `_MAKERS`, it takes another
    function in its place, which does the same and leaves a note on the result."""
    original = getattr(masking_utils, name)
    copy = FunctionType(original.__code__, original.__globals__, name, original.__defaults__, original.__closure__)
    names = _MAKERS[name]

    def make(*arguments: Any) -> Any:
        made = copy(*arguments)
        by_name = {names[0]: arguments} if names == ("mask_functions",) else dict(zip(names, arguments, strict=True))
        setattr(made, _MADE_BY, (name, by_name))
        return made

    torch.compiler.substitute_in_graph(original, skip_signature_check=True)(make)


for _name in _MAKERS:
    _remember_variables(_name)


def _maker_of(function: Any) -> tuple[str, dict[str, Any]]:
    """The function of `masking_utils` that made a mask function, and the variables that it gave it."""
    if torch.compiler.is_compiling():
        noted: tuple[str, dict[str, Any]] | None = getattr(function, _MADE_BY, None)
        if noted is None:
            raise _NoRuleError("a mask function that cannot be traced")
        return noted
    name = getattr(function, "__qualname__", "")
    if getattr(function, "__module__", None) != masking_utils.__name__:
        raise _NoRuleError(f"a mask function of the model's own ({name or type(function).__name__})")
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    return name.partition(".<locals>.")[0], dict(zip(function.__code__.co_freevars, cells, strict=True))


def _said_by(function: Any, last: int) -> _Said:
    """What a mask function of `transformers.masking_utils` says; `last` is the largest position that it will be given."""
    if function is masking_utils.causal_mask_function:
        return _Said(causal=True)
    if function is masking_utils.bidirectional_mask_function:
        return _Said()
    outer, inside = _maker_of(function)
    if outer == "and_masks":
        said = _Said()
        for part in inside["mask_functions"]:
            said = said & _said_by(part, last)
        return said
    if outer == "sliding_window_overlay":
        return _Said(left=int(inside["sliding_window"]) - 1)
    if outer == "sliding_window_bidirectional_overlay":
        return _Said(left=int(inside["sliding_window"]), right=int(inside["sliding_window"]))
    if outer == "packed_sequence_mask_function":
        return _Said(packed=inside["packed_sequence_mask"])
    if outer == "remap_positions_for_packed_sequence":  # comes with the packed sequences, within which positions rise one by one
        return _said_by(inside["mask_function"], last)
    if outer == "padding_mask_function":
        return _Said(padding=(inside["padding_mask"],))
    if outer == "chunked_overlay" and last < int(inside["chunk_size"]):
        return _Said()  # one chunk holds all
    kinds = {"chunked_overlay": "chunks of tokens", "blockwise_overlay": "blocks without order", "or_masks": "a union of masks"}
    raise _NoRuleError(f"a mask of {kinds.get(outer, outer)}")


def _bounds(padding: Any, batch: int, kv_length: int, kv_offset: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """First valid key of each batch entry, and the place after the last one."""
    if padding is None:
        return (0,) * batch, (kv_length,) * batch
    valid = padding[:, kv_offset : kv_offset + kv_length].numpy().astype(bool)
    if len(valid) not in (1, batch):
        raise _NoRuleError(f"padding of {len(valid)} sequences for a batch of {batch}")
    valid = np.broadcast_to(valid, (batch, kv_length))
    count = valid.sum(axis=1)
    starts = np.where(count > 0, valid.argmax(axis=1), 0) if kv_length else count
    ends = np.where(count > 0, kv_length - valid[:, ::-1].argmax(axis=1), 0) if kv_length else count
    if (ends - starts != count).any():
        raise _NoRuleError("padding between the tokens of a sequence")
    return tuple(starts.tolist()), tuple(ends.tolist())


def _sequences(packed: Any, batch: int) -> tuple[int, ...]:
    """Cumulative lengths of packed sequences over all batch entries, from the number of each token's sequence."""
    numbers = np.broadcast_to(packed.numpy(), (batch, packed.shape[1]))
    begins = np.ones(numbers.shape, bool)
    begins[:, 1:] = numbers[:, 1:] != numbers[:, :-1]
    return (*np.flatnonzero(begins).tolist(), numbers.size)


# ---- The mask ------------------------------------------------------------------------------------------------------


class RuleMask(torch.Tensor):
    """A mask of shape (B, 1, Sq, Skv) that holds rules instead of elements.

    It is a tensor, so that transformers and models hand it on like any other mask. An operation of torch on it makes the elements,
    True where a query sees a key, and works on those.

    Attributes
    ----------
    rules : Rules or None
        What attention needs.
    reason : str
        Why there are no rules.
    """

    rules: Rules | None
    reason: str
    _arguments: dict[str, Any]
    _made: Any

    @staticmethod
    def __new__(cls, shape: tuple[int, int, int, int], rules: Rules | None, reason: str, arguments: dict[str, Any]) -> RuleMask:
        self = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bool, device="cpu")
        self.rules, self.reason, self._arguments, self._made = rules, reason, arguments, None
        return self

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        if function in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return arguments[0]

        def made(x: Any) -> Any:
            if isinstance(x, (tuple, list)):
                return type(x)(made(part) for part in x)
            return x.elements() if isinstance(x, RuleMask) else x

        return function(*made(arguments), **{name: made(x) for name, x in (options or {}).items()})

    def elements(self) -> Any:
        """The mask as transformers makes it for `sdpa`."""
        if self._made is None:
            skip = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
            made = masking_utils.sdpa_mask(**(self._arguments | skip))
            self._made = made.expand(self.shape)
        return self._made

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"RuleMask({tuple(self.shape)}, {self.rules or self.reason})"


@dataclass(frozen=True)
class TracedMask:
    """What stands for a `RuleMask` while torch traces.

    Attributes
    ----------
    shape : (int, int, int, int)
        (B, 1, Sq, Skv).
    causal, left, right
        As in `Rules`.
    packed : torch.Tensor or None
        (B, Sq) numbers of sequences.
    padding : torch.Tensor or None
        (B, Skv or more): which keys there are.
    q_offset : int or torch.Tensor
        The position of the first query.
    kv_offset : int
        The position of the first key.
    """

    shape: tuple[int, int, int, int]
    causal: bool
    left: int | None
    right: int | None
    packed: Any
    padding: Any
    q_offset: Any
    kv_offset: int

    def as_rules(self) -> RuleMask:
        """The mask, where the tensors have elements."""
        parts = [masking_utils.causal_mask_function if self.causal else masking_utils.bidirectional_mask_function]
        if self.right is not None:
            parts.append(masking_utils.sliding_window_bidirectional_overlay(self.right))
        if self.left is not None:
            parts.append(masking_utils.sliding_window_overlay(self.left + 1))
        if self.packed is not None and (self.packed != self.packed[:, :1]).any():
            parts.append(masking_utils.packed_sequence_mask_function(self.packed))
        function = masking_utils.and_masks(*parts)
        batch, _, queries, keys = self.shape
        return make_mask(batch, queries, keys, self.q_offset, self.kv_offset, function, self.padding)


def _trace_mask(arguments: dict[str, Any]) -> Any:
    """A `TracedMask`, or the elements of the mask where it has no rule."""
    keys, kv_offset = arguments["kv_length"], arguments["kv_offset"]
    try:
        said = _said_by(arguments["mask_function"], kv_offset + keys - 1)
        if said.padding:
            raise _NoRuleError("two masks of padding")
    except _NoRuleError:
        return masking_utils.sdpa_mask(**(arguments | {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}))
    shape = (arguments["batch_size"], 1, arguments["q_length"], keys)
    where = arguments["q_offset"]
    if isinstance(where, torch.Tensor):  # a copy, because a static cache adds to it before attention reads it
        where = where.clone()
    return TracedMask(shape, said.causal, said.left, said.right, said.packed, arguments["attention_mask"], where, kv_offset)


def make_mask(
    batch_size: int, q_length: int, kv_length: int, q_offset: Any = 0, kv_offset: int = 0,
    mask_function: Callable[..., Any] = masking_utils.causal_mask_function, attention_mask: Any = None, **options: Any,
) -> Any:  # fmt: skip
    """The mask function that is registered with transformers: arguments as `masking_utils.sdpa_mask` has them."""
    arguments = options | {
        "batch_size": batch_size, "q_length": q_length, "kv_length": kv_length, "q_offset": q_offset, "kv_offset": kv_offset,
        "mask_function": mask_function, "attention_mask": attention_mask,
    }  # fmt: skip
    if torch.compiler.is_compiling():
        return _trace_mask(arguments)
    arguments["q_offset"] = q_offset = int(q_offset)  # static caches have a tensor
    rules, reason = None, ""
    try:
        said = _said_by(mask_function, kv_offset + kv_length - 1)
        paddings = [*said.padding, *([] if attention_mask is None else [attention_mask])]
        if len(paddings) > 1:
            raise _NoRuleError("two masks of padding")
        padding = paddings[0] if paddings else None
        if padding is not None:  # entries that it lacks are no tokens
            padding = masking_utils.prepare_padding_mask(padding, kv_length, kv_offset)
        starts, ends = _bounds(padding, batch_size, kv_length, kv_offset)
        rules = Rules(q_offset - kv_offset, q_length, said.causal, said.left, said.right, starts, ends)
        if said.packed is not None:
            if padding is not None or q_length != kv_length or q_offset != kv_offset:
                raise _NoRuleError("packed sequences beside padding or a cache")
            rules = replace(rules, sequences=_sequences(said.packed, batch_size))
    except _NoRuleError as error:
        rules, reason = None, str(error)
    return RuleMask((batch_size, 1, q_length, kv_length), rules, reason, arguments)
