"""Masks as rules: what transformers' mask functions say, without a matrix of queries times keys.

transformers makes a mask once per forward pass and kind of layer, and hands it to the attention of each layer. For that, it calls
`make_mask`, which reads the rule that the mask function stands for (causal, a window, packed sequences, chunks, images whose tokens see one
another), and the padding, and returns a `RuleMask`. Where there is no such rule, the mask says why, and attention takes its elements.

While torch traces a model (`torch.compile`), padding and packed sequences are tensors without elements. `make_mask` then returns a
`TracedMask`, which holds these tensors, and the operator that is called in the graph makes the `RuleMask`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import reduce
from types import FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from transformers import masking_utils

from .config import config_of
from .fallbacks import tell

if TYPE_CHECKING:
    from .tokens import Appended, Listed

__all__ = ["MATRIX", "AdditiveMask", "Call", "RuleMask", "Rules", "TracedMask", "additive", "make_mask"]


@dataclass(frozen=True)
class Call:
    """The part of a batch that one call of the attention operation takes: some entries, their keys from `start` on, and their lengths."""

    entries: slice
    start: int
    q_lens: list[int]
    kv_lens: list[int]


@dataclass(frozen=True)
class Rules:
    """Which keys each query sees.

    Query i has position ``i + offset`` among the keys. `left` and `right` bound how many tokens before and after its position it sees; None
    sets no bound. `starts` and `ends` bound the keys of each batch entry. With `sequences`, cumulative lengths over the tokens of all
    entries, queries see their own sequence only. `ranges`, (B or 1, Sq, 2), bounds the keys of each query: the first, and the place after
    the last.
    """

    offset: int
    q_length: int
    causal: bool
    left: int | None
    right: int | None
    starts: tuple[int, ...]
    ends: tuple[int, ...]
    sequences: tuple[int, ...] | None = None
    ranges: Any = None

    @property
    def window(self) -> tuple[int, int] | None:
        """`left` and `right` as the operations take them."""
        if self.left is None and self.right is None:
            return None
        return tuple(-1 if n is None else n for n in (self.left, self.right))  # type: ignore[return-value]

    @property
    def aligned(self) -> bool:
        """Whether positions of queries and keys are compared. Otherwise, as in bidirectional and cross attention, queries see all keys."""
        return self.causal or self.window is not None or self.ranges is not None

    def of_batch(self, batch: int) -> Rules:
        """The rules with `starts` and `ends` for each of `batch` entries. If they are given for one entry, they hold for all."""
        return self if len(self.starts) == batch else replace(self, starts=self.starts * batch, ends=self.ends * batch)

    def calls(self) -> Iterator[Call]:
        """Calls that cover the batch: neighbouring entries whose keys begin at the same place share a call.

        The operations align the last valid query with the last valid key. Where the rules are `aligned`, queries after the last valid key
        are padding themselves: they are left out, and get 0. Keys after the last query are left out, too, since no query sees them. (A
        window without causal might show such keys to queries; where there are such keys, torch computes the call.)
        """
        aligned = self.aligned
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


# ---- The rule of a mask function -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Said:
    """The rule of a mask function, without the offset and lengths of the call: a query sees a key that all fields allow."""

    causal: bool = False
    left: int | None = None
    right: int | None = None
    packed: Any = None  # (B, S) numbers of sequences
    padding: tuple[Any, ...] = ()  # (B, keys) tensors of bool
    runs: Any = None  # int64 (B or 1, Sq, 2): the position of the first key that each query may see, and the one after the last

    def __and__(self, other: _Said) -> _Said:
        def least(a: int | None, b: int | None) -> int | None:
            return a if b is None else b if a is None else min(a, b)

        packed = self.packed if other.packed is None else other.packed
        runs = self.runs if other.runs is None else other.runs
        if self.runs is not None and other.runs is not None:
            runs = _common(self.runs, other.runs)
        return _Said(
            self.causal or other.causal, least(self.left, other.left), least(self.right, other.right), packed, self.padding + other.padding,
            runs,
        )  # fmt: skip

    def as_runs(self, positions: np.ndarray) -> np.ndarray:
        """The whole rule, as a run of keys for each query."""
        if self.packed is not None or self.padding:
            raise _NoRuleError("a union of masks with packed sequences or padding")
        first = np.full_like(positions, 0) if self.left is None else positions - self.left
        end = np.full_like(positions, _ENDLESS) if self.right is None else positions + self.right + 1
        if self.causal:
            end = np.minimum(end, positions + 1)
        runs = np.stack([first, end], axis=-1)[None]
        return runs if self.runs is None else _common(runs, self.runs)


_ENDLESS = 1 << 40  # a position beyond all keys


def _common(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The keys that are in both runs."""
    return np.stack([np.maximum(a[..., 0], b[..., 0]), np.minimum(a[..., 1], b[..., 1])], axis=-1)


def _joined_runs(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The keys that are in either run. The runs must overlap or touch."""
    a, b = np.broadcast_arrays(a, b)
    a, b = (np.where((x[..., :1] < x[..., 1:]), x, y) for x, y in ((a, b), (b, a)))  # an empty run adds nothing
    if (np.maximum(a[..., 0], b[..., 0]) > np.minimum(a[..., 1], b[..., 1])).any():
        raise _NoRuleError("a union of masks that leaves gaps between the keys of a query")
    return np.stack([np.minimum(a[..., 0], b[..., 0]), np.maximum(a[..., 1], b[..., 1])], axis=-1)


def _either(parts: list[_Said], positions: np.ndarray) -> _Said:
    """Masks joined by `or`. Masks that show nothing, such as those of image blocks where the queries are text, are left out."""
    runs = [part.as_runs(positions) for part in parts]
    some = [n for n, run in enumerate(runs) if (run[..., 0] < run[..., 1]).any()]
    return parts[some[0]] if len(some) == 1 else _Said(runs=reduce(_joined_runs, runs))


def _runs_of_chunks(size: int, padding: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Chunks of tokens, which begin after the padding of each batch entry."""
    begin = padding.astype(np.int64).reshape(-1, 1)
    first = begin + (positions - begin) // size * size
    return np.stack([first, first + size], axis=-1)


def _runs_of_blocks(numbers: Any, queries: _Queries) -> np.ndarray:
    """Each token sees all tokens that have its number. A token with a negative number sees none; padding gets a negative number here."""
    numbers, positions = numbers.numpy(), queries.positions
    tokens = numbers.shape[1]
    if positions.size and positions[-1] >= tokens:
        raise _NoRuleError("blocks of tokens that end before the queries")
    if queries.padding is not None and len(numbers) in (1, len(queries.padding)):
        valid = queries.padding[:, :tokens].numpy().astype(bool)
        numbers = np.repeat(numbers, len(valid) // len(numbers), axis=0)
        numbers[:, : valid.shape[1]][~valid] = -1
    begins, ends = np.ones((2, *numbers.shape), bool)
    begins[:, 1:] = ends[:, :-1] = numbers[:, 1:] != numbers[:, :-1]
    for row, starts in zip(numbers, begins, strict=True):
        named = row[starts & (row >= 0)]
        if np.unique(named).size != named.size:
            raise _NoRuleError("blocks of tokens with other tokens between them")
    place = np.arange(tokens)
    first = np.maximum.accumulate(np.where(begins, place, 0), axis=1)
    end = np.minimum.accumulate(np.where(ends, place + 1, tokens)[:, ::-1], axis=1)[:, ::-1]
    end = np.where(numbers >= 0, end, first)
    return np.stack([first[:, positions], end[:, positions]], axis=-1)


class _NoRuleError(Exception):
    """A mask function without a rule that is known here. The text of the error describes the mask."""


# Functions of `masking_utils` that return functions, and the names of their arguments.
_MAKERS = {
    "and_masks": ("mask_functions",),
    "blockwise_overlay": ("block_sequence_ids",),
    "chunked_overlay": ("chunk_size", "left_padding"),
    "or_masks": ("mask_functions",),
    "packed_sequence_mask_function": ("packed_sequence_mask",),
    "remap_positions_for_packed_sequence": ("mask_function", "position_ids"),
    "sliding_window_bidirectional_overlay": ("sliding_window",),
    "sliding_window_overlay": ("sliding_window",),
}
_MADE_BY = "_blitz_attn_made_by"  # of a mask function that was made while torch traces: the name of its maker, and the maker's arguments


def _remember_variables(name: str) -> None:
    """torch.compile cannot trace code that reads the closure of a function. So it traces a substitute for each of `_MAKERS`, which makes
    the same mask function and notes on it by which maker and arguments it was made."""
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
    if hasattr(masking_utils, _name):  # older versions have fewer
        _remember_variables(_name)


def _maker_of(function: Any) -> tuple[str, dict[str, Any]]:
    """The function of `masking_utils` that made a mask function, and the variables that the mask function has from it."""
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


class _Queries(NamedTuple):
    """The queries for which runs of keys are made."""

    positions: np.ndarray  # of the queries
    padding: Any = None  # (B, tokens): True for tokens that are not padding


def _said_by(function: Any, last: int, queries: _Queries | None = None) -> _Said:
    """The rule of a mask function of `transformers.masking_utils`. `last` is the largest position that the function will be given. While
    torch traces, there are no `queries`, and no runs of keys are made."""
    if function is masking_utils.causal_mask_function:
        return _Said(causal=True)
    if function is masking_utils.bidirectional_mask_function:
        return _Said()
    outer, inside = _maker_of(function)
    if outer == "and_masks":
        said = _Said()
        for part in inside["mask_functions"]:
            said = said & _said_by(part, last, queries)
        return said
    if outer == "sliding_window_overlay":
        return _Said(left=int(inside["sliding_window"]) - 1)
    if outer == "sliding_window_bidirectional_overlay":
        return _Said(left=int(inside["sliding_window"]), right=int(inside["sliding_window"]))
    if outer == "packed_sequence_mask_function":
        return _Said(packed=inside["packed_sequence_mask"])
    if outer == "remap_positions_for_packed_sequence":  # comes with packed sequences, in which positions rise by one
        said = _said_by(inside["mask_function"], last, queries)
        if said.runs is not None:
            raise _NoRuleError("chunks or blocks that are counted in packed sequences")
        return said
    if outer == "padding_mask_function":
        return _Said(padding=(inside["padding_mask"],))
    if outer == "chunked_overlay" and last < int(inside["chunk_size"]) and (queries is None or not inside["left_padding"].any()):
        return _Said()  # one chunk holds all tokens, except perhaps (while torch traces) padding on the left, which they do not see
    if queries is not None and outer == "chunked_overlay":
        return _Said(runs=_runs_of_chunks(int(inside["chunk_size"]), inside["left_padding"].numpy(), queries.positions))
    if queries is not None and outer == "blockwise_overlay":
        return _Said(runs=_runs_of_blocks(inside["block_sequence_ids"], queries))
    if queries is not None and outer == "or_masks":
        return _either([_said_by(part, last, queries) for part in inside["mask_functions"]], queries.positions)
    kinds = {"chunked_overlay": "chunks of tokens", "blockwise_overlay": "blocks of tokens", "or_masks": "a union of masks"}
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


MATRIX = "a mask that was made as a matrix"

_aten = torch.ops.aten
# Operations that a model may apply to a mask whose elements are True where a query sees a key, and that give a mask again. Operations that
# neither these sets nor `RuleMask.__torch_dispatch__` name are refused, since most models with attention code of their own expect numbers
# that are added to scores, and would get wrong results without an error.
_STILL_A_MASK = frozenset({  # views, copies, and masks joined with others
    _aten._unsafe_view, _aten.bitwise_and, _aten.bitwise_or, _aten.clone, _aten.diagonal, _aten.expand, _aten.flip, _aten.gather,
    _aten.index, _aten.index_select, _aten.logical_and, _aten.logical_or, _aten.permute, _aten.repeat, _aten.select, _aten.slice,
    _aten.split, _aten.split_with_sizes, _aten.squeeze, _aten.t, _aten.transpose, _aten.tril, _aten.unbind, _aten.unfold,
    _aten.unsqueeze, _aten.view,
})  # fmt: skip
_NO_MASK = frozenset({  # questions that make sense for True and False alone; their answers are ordinary tensors or numbers
    _aten._local_scalar_dense, _aten.all, _aten.any, _aten.argmax, _aten.bitwise_not, _aten.count_nonzero, _aten.equal, _aten.item,
    _aten.logical_not, _aten.max, _aten.nonzero, _aten.sum,
})  # fmt: skip
_SHAPE_ALONE = frozenset({_aten.empty_like, _aten.full_like, _aten.ones_like, _aten.zeros_like})  # where a dtype is given


class RuleMask(torch.Tensor):
    """A mask of shape (B, 1, Sq, Skv), or (B, Sq, Skv) as indexers take it, that holds rules instead of elements.

    It is a tensor, so that transformers and models hand it on like any other mask. Four operations of torch on it keep the rules: `detach`,
    `alias`, ``mask[:, 0]`` of a mask without `listed`, and ``mask & mask.among(listed)``. Other operations make the elements, True where a
    query sees a key, and work on those elements. Where a model adds the mask to scores or to a position bias, 0 and the smallest finite
    number are added in place of True and False. Operations whose meaning depends on the numbers that a model expects in its mask are
    refused.

    Attributes
    ----------
    rules : Rules or None
        Which keys each query sees.
    reason : str
        Why there are no rules.
    listed : tokens.Listed or None
        Keys that the model chose among those that the rules show.
    """

    rules: Rules | None
    reason: str
    listed: Listed | None = None
    _arguments: dict[str, Any]
    _made: list[Any]  # the elements, once they have been made; shared with aliases

    @staticmethod
    def __new__(cls, shape: tuple[int, ...], rules: Rules | None, reason: str, arguments: dict[str, Any], made: list[Any]) -> RuleMask:
        self = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bool, device=made[0].device if made else "cpu")
        self.rules, self.reason, self._arguments, self._made = rules, reason, arguments, made
        return self

    @classmethod
    def of(cls, made: Any, reason: str = MATRIX) -> RuleMask:
        """A mask of these elements, without rules."""
        return cls(tuple(made.shape), None, reason, {}, [made])

    def among(self, listed: Listed) -> RuleMask:
        """This mask, joined by `and` with the keys that the model chose. If the model itself then joins this mask and the result by `and`,
        it gets the result unchanged."""
        mask = RuleMask(tuple(self.shape), self.rules, self.reason, self._arguments, [])
        mask.listed = listed
        return mask

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        if function is _aten.detach.default:
            return arguments[0]
        if function is _aten.alias.default:
            mask = arguments[0]
            alias = RuleMask(tuple(mask.shape), mask.rules, mask.reason, mask._arguments, mask._made)
            alias.listed = mask.listed
            return alias
        if function is _aten.bitwise_and.Tensor and all(isinstance(x, RuleMask) for x in arguments):
            chosen = [x for x in arguments if x.listed is not None]
            if len(chosen) == 1 and arguments[0]._arguments is arguments[1]._arguments and arguments[0].shape == arguments[1].shape:
                return chosen[0]
        if function is _aten.select.int and arguments[0].dim() == 4 and arguments[1:] == (1, 0) and arguments[0].listed is None:
            mask = arguments[0]
            return RuleMask((mask.shape[0], *mask.shape[2:]), mask.rules, mask.reason, mask._arguments, mask._made)
        options = options or {}

        def made(x: Any) -> Any:
            if isinstance(x, (tuple, list)):
                return type(x)(made(part) for part in x)
            return x.elements() if isinstance(x, RuleMask) else x

        name, given = function.overloadpacket, made(arguments)
        if name in (_aten.add, _aten.add_) and not options:
            return _added(function, arguments)
        if name is _aten.where and not any(isinstance(x, RuleMask) for x in arguments[1:]):
            return function(*given, **options)
        if name in (_aten.eq, _aten.ne) and all(isinstance(x, torch.Tensor) and x.dtype == torch.bool for x in arguments):
            return function(*given, **options)
        if name is _aten._to_copy and (to := options.get("dtype")) is not None and to != torch.bool:
            if to.is_floating_point or to.is_complex:
                raise _misread(function)
            return function(*given, **options)
        if name in _NO_MASK or (name in _SHAPE_ALONE and options.get("dtype") is not None):
            return function(*given, **options)
        if name in (_aten.cat, _aten.stack):
            if not all(isinstance(x, RuleMask) for x in arguments[0]):  # models append numbers, converted to the mask's dtype: here bool
                raise _misread(function)
        elif name not in _STILL_A_MASK and name is not _aten._to_copy:
            raise _misread(function)
        if name is _aten.view:
            return RuleMask.of(given[0].reshape(given[1]))
        result = function(*given, **options)
        return [RuleMask.of(x) for x in result] if isinstance(result, (tuple, list)) else RuleMask.of(result)

    def elements(self) -> Any:
        """The mask as transformers makes it for `sdpa`, joined by `and` with `listed`."""
        if not self._made:
            skip = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
            shape = (self.shape[0], 1, *self.shape[-2:])
            made = masking_utils.sdpa_mask(**(self._arguments | skip)).expand(shape)
            if self.listed is not None and self.rules is not None:
                made = made & self.listed.elements(self.rules.starts, self.shape[-1])
            self._made.append(made)
        made = self._made[0]
        return made if made.dim() == self.dim() else made[:, 0]

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"RuleMask({tuple(self.shape)}, {self.rules or self.reason})"


class AdditiveMask(RuleMask):
    """A `RuleMask` for models that append columns to their mask, which is a tensor of numbers for them. Operations of torch on it, except
    detach and alias, make the numbers that the model's eager attention adds to scores, and work on those. If the columns are
    `tokens.Appended`, the result is again a mask with rules.

    Attributes
    ----------
    appended : tokens.Appended or None
        Keys after those of the rules.
    """

    appended: Appended | None = None

    @staticmethod
    def __new__(cls, shape: tuple[int, ...], rules: Rules | None, reason: str, arguments: dict[str, Any], made: list[Any]) -> AdditiveMask:
        self = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=arguments.get("dtype", torch.float32), device="cpu")
        self.rules, self.reason, self._arguments, self._made = rules, reason, arguments, made
        return self

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        if function in (_aten.detach.default, _aten.alias.default):
            return arguments[0]

        def made(x: Any) -> Any:
            if isinstance(x, (tuple, list)):
                return type(x)(made(part) for part in x)
            return additive(x.elements(), x.dtype) if isinstance(x, AdditiveMask) else x

        return function(*made(arguments), **(options or {}))

    def followed_by(self, appended: Appended) -> AdditiveMask:
        """This mask with more columns."""
        mask = AdditiveMask((*self.shape[:3], self.shape[3] + appended.keys), self.rules, self.reason, self._arguments, [])
        mask.appended = appended
        return mask

    def elements(self) -> Any:
        if self.appended is not None and not self._made:
            shape = (*self.shape[:3], self.shape[3] - self.appended.keys)
            own = AdditiveMask(shape, self.rules, self.reason, self._arguments, []).elements()
            behind = self.appended.elements()
            self._made.append(torch.cat([x.expand(len(behind), *x.shape[1:]) for x in (own, behind)], dim=-1))
        return super().elements()


def _added(function: Any, arguments: Any) -> Any:
    """The sum of a mask and of scores or a position bias, for a model whose own code adds the mask."""
    if len(arguments) != 2 or not any(type(x) is not RuleMask and isinstance(x, torch.Tensor) and x.is_floating_point() for x in arguments):
        raise _misread(function)
    if function.overloadpacket is _aten.add_ and isinstance(arguments[0], RuleMask):
        raise _misread(function)
    reason = "a model that adds its mask to scores by itself"
    if config_of(None).on_unsupported == "error":
        raise ValueError(f"attention_mask: expected attention that blitz_attn computes, got {reason}")
    tell(f"attention by torch instead of blitz_attn, because of {reason}")
    (dtype,) = (x.dtype for x in arguments if not isinstance(x, RuleMask))
    return function(*(additive(x.elements(), dtype) if isinstance(x, RuleMask) else x for x in arguments))


def additive(seen: Any, dtype: Any) -> Any:
    """The numbers that are added to scores: 0 where a query sees a key, the smallest finite number elsewhere."""
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill(~seen, torch.finfo(dtype).min)


def _misread(function: Any) -> ValueError:
    return ValueError(
        'attn_implementation: expected "eager", or another that the model supports, for a model with attention code of its own, which '
        f"computes with the numbers in its mask (here by {function}), got a name of blitz_attn, whose masks have no such numbers"
    )


@dataclass(frozen=True)
class _TracedPart:
    """Stands for a mask (B, Sq, Skv) while torch traces. A model may add it to scores of its own; anything else is refused."""

    seen: Any

    @property
    def dtype(self) -> Any:
        return torch.float32

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        name = getattr(function, "__name__", function)
        if name not in ("add", "__add__") or len(arguments) != 2 or options or not isinstance(arguments[1], _TracedPart):
            raise _misread(name)
        scores = arguments[0]
        return scores + additive(arguments[1].seen, scores.dtype)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(str(_misread(name)))


@dataclass(frozen=True)
class TracedMask:
    """Stands for a `RuleMask` while torch traces. It is not a tensor: a model whose own code works on its mask gets an error, unless it
    only takes ``mask[:, 0]`` and adds that to scores (`_TracedPart`).

    Attributes
    ----------
    shape : (int, int, int, int)
        (B, 1, Sq, Skv).
    causal, left, right
        As in `Rules`.
    packed : torch.Tensor or None
        (B, Sq) numbers of sequences.
    padding : torch.Tensor or None
        (B, tokens): True for keys that are not padding. Keys after its end are padding.
    q_offset : int or torch.Tensor
        The position of the first query.
    kv_offset : int
        The position of the first key.
    made : torch.Tensor or None
        The elements of a mask without rules.
    reason : str
        Why there are no rules.
    """

    shape: tuple[int, int, int, int]
    causal: bool
    left: int | None
    right: int | None
    packed: Any
    padding: Any
    q_offset: Any
    kv_offset: int
    made: Any = None
    reason: str = ""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        raise _misread(getattr(function, "__name__", function))

    def __getitem__(self, where: Any) -> Any:
        everything = slice(None)
        if where in ((everything, 0), (everything, 0, everything, everything)):  # what indexers of DeepSeek-V3.2 and its kin take
            return _TracedPart(self.elements()[:, 0])
        raise _misread("indexing")

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(str(_misread(name)))

    def _function(self, packed: bool) -> Any:
        parts = [masking_utils.causal_mask_function if self.causal else masking_utils.bidirectional_mask_function]
        if self.right is not None:
            parts.append(masking_utils.sliding_window_bidirectional_overlay(self.right))
        if self.left is not None:
            parts.append(masking_utils.sliding_window_overlay(self.left + 1))
        if packed:
            parts.append(masking_utils.packed_sequence_mask_function(self.packed))
        return masking_utils.and_masks(*parts)

    def elements(self) -> Any:
        """The mask as transformers makes it for `sdpa`."""
        if self.made is not None:
            return self.made
        batch, _, queries, keys = self.shape
        function = self._function(self.packed is not None)
        skip = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        return masking_utils.sdpa_mask(batch, queries, keys, self.q_offset, self.kv_offset, function, self.padding, **skip)

    def as_rules(self) -> RuleMask:
        """The mask as a `RuleMask`, once the tensors have elements."""
        if self.made is not None:
            return RuleMask.of(self.made, self.reason)
        function = self._function(self.packed is not None and bool((self.packed != self.packed[:, :1]).any()))
        batch, _, queries, keys = self.shape
        return make_mask(batch, queries, keys, self.q_offset, self.kv_offset, function, self.padding)


def _trace_mask(arguments: dict[str, Any]) -> Any:
    """The `TracedMask` of a mask function, with its rules, or with its elements where it has no rules."""
    keys, kv_offset = arguments["kv_length"], arguments["kv_offset"]
    shape = (arguments["batch_size"], 1, arguments["q_length"], keys)
    try:
        said = _said_by(arguments["mask_function"], kv_offset + keys - 1)
        if said.padding:
            raise _NoRuleError("two masks of padding")
    except _NoRuleError as error:
        made = masking_utils.sdpa_mask(**(arguments | {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}))
        return TracedMask(shape, False, None, None, None, None, 0, 0, made.expand(shape), str(error))
    where = arguments["q_offset"]
    if isinstance(where, torch.Tensor):  # a copy, because a static cache adds to it before attention reads it
        where = where.clone()
    return TracedMask(shape, said.causal, said.left, said.right, said.packed, arguments["attention_mask"], where, kv_offset)


_APPENDING = ("deepseek_v4",)  # the model types that append columns of numbers to their mask
# Model types whose own code works on the mask, which a `TracedMask` does not allow; and what makes their masks while torch traces.
_USED_BY_MODEL = {"deepseek_v4": masking_utils.eager_mask, "qwen4_exp_text": masking_utils.sdpa_mask}


def make_mask(
    batch_size: int, q_length: int, kv_length: int, q_offset: Any = 0, kv_offset: int = 0,
    mask_function: Callable[..., Any] = masking_utils.causal_mask_function, attention_mask: Any = None, **options: Any,
) -> Any:  # fmt: skip
    """The mask function that is registered with transformers. It takes the arguments of `masking_utils.sdpa_mask`."""
    arguments = options | {
        "batch_size": batch_size, "q_length": q_length, "kv_length": kv_length, "q_offset": q_offset, "kv_offset": kv_offset,
        "mask_function": mask_function, "attention_mask": attention_mask,
    }  # fmt: skip
    kind = getattr(options.get("config"), "model_type", None)
    appends = kind in _APPENDING
    if torch.compiler.is_compiling():
        return _trace_mask(arguments) if kind not in _USED_BY_MODEL else _USED_BY_MODEL[kind](**arguments)
    arguments["q_offset"] = q_offset = int(q_offset)  # static caches have a tensor
    rules, reason = None, ""
    try:
        queries = _Queries(q_offset + np.arange(q_length), attention_mask)
        said = _said_by(mask_function, kv_offset + kv_length - 1, queries)
        paddings = [*said.padding, *([] if attention_mask is None else [attention_mask])]
        if len(paddings) > 1:
            raise _NoRuleError("two masks of padding")
        padding = paddings[0] if paddings else None
        if padding is not None:  # if it is too short, the tokens beyond its end count as padding
            padding = masking_utils.prepare_padding_mask(padding, kv_length, kv_offset)
        starts, ends = _bounds(padding, batch_size, kv_length, kv_offset)
        rules = Rules(q_offset - kv_offset, q_length, said.causal, said.left, said.right, starts, ends)
        if said.packed is not None:
            if q_length != kv_length or q_offset != kv_offset:
                raise _NoRuleError("packed sequences beside a cache")
            if padding is None and said.runs is None:
                rules = replace(rules, sequences=_sequences(said.packed, batch_size))
            else:
                said = said & _Said(runs=_runs_of_blocks(said.packed, queries._replace(padding=None)))
        # Runs replace causal and window: attention takes a window without causal only where queries and keys end at the same token.
        if said.runs is not None:
            runs = replace(said, packed=None, padding=()).as_runs(queries.positions) - kv_offset
            rules = replace(rules, causal=False, left=None, right=None, ranges=runs)
    except _NoRuleError as error:
        rules, reason = None, str(error)
    return (AdditiveMask if appends else RuleMask)((batch_size, 1, q_length, kv_length), rules, reason, arguments, [])
