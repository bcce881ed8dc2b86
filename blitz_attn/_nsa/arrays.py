"""Arguments of native sparse attention: checked arrays and rules, and the pieces in which long calls are worked off.

Inside, every array is a NumPy view of the caller's memory, bfloat16 as its bits, beside the name of the dtype that the call has.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from .. import _arrays, _core
from .._formats import converted
from .._sentences import renamed, shown

FLOATS = ("float32", "float16", "bfloat16", "float64")
CMP_GROUP = 128  # compressed keys that num_cmp_selected_blocks counts as one block
PIECE_ELEMENTS = 1 << 22  # of one branch's output that are worked off at a time, where nobody wants them all
BRANCHES = ("compressed", "selected", "window")


# ---- Arrays -------------------------------------------------------------------------------------------------------


def floats(x: Any, name: str, dtype: Any, written: bool = False, strided: bool = False) -> tuple[np.ndarray, str]:
    """View of a floating-point array whose last axis is contiguous (any, where `strided`), and the name of its dtype."""
    array, kind = _arrays.host(x, name, dtype, written)
    if kind not in FLOATS:
        hint = ' (dtype="bfloat16" reads uint16 as bfloat16 bits)' if kind == "uint16" else ""
        raise TypeError(f"{name}: expected float32, float16, bfloat16 or float64, got {kind}{hint}")
    if not strided and array.size and array.ndim and array.shape[-1] > 1 and array.strides[-1] != array.itemsize:
        step = array.strides[-1] / array.itemsize
        raise ValueError(
            f"{name}: expected a contiguous last axis (numpy.ascontiguousarray makes one), got a stride of {step:g} elements"
        )
    return array, kind


def dtype_of(dtype: Any) -> str | None:
    """The name that a caller's dtype argument gives."""
    name = _arrays.dtype_name(dtype)
    if name is not None and name not in FLOATS:
        raise ValueError(f"dtype: expected 'float32', 'float16', 'bfloat16' or 'float64', got {shown(name)}")
    return name


def same_kind(x: Any, name: str, dtype: Any, kind: str, like: str, written: bool = False) -> np.ndarray:
    """The same, of dtype `kind` like another array."""
    array, own = floats(x, name, dtype, written)
    if own != kind:
        raise TypeError(f"{name}: expected dtype {kind} like {like}, got {own}")
    return array


def real_of(kind: str) -> str:
    """The dtype in which sums are made."""
    return "float64" if kind == "float64" else "float32"


def storage(kind: str) -> str:
    """The NumPy dtype that holds elements of dtype `kind`."""
    return "uint16" if kind == "bfloat16" else kind


def reals(x: Any, name: str, dtype: Any, kind: str) -> tuple[np.ndarray, str]:
    """Contiguous copy (or view) of an array in the dtype of sums for `kind`, and the name of its own dtype."""
    array, own = floats(x, name, dtype, strided=True)
    if (own == "float64") != (kind == "float64"):
        raise TypeError(f"{name}: expected {'float64' if kind == 'float64' else 'float32, float16 or bfloat16'} like q, got {own}")
    return np.ascontiguousarray(converted(array, own, real_of(kind))), own


def expect_shape(x: np.ndarray, name: str, shape: tuple[int, ...], text: str) -> None:
    if x.shape != shape:
        raise ValueError(f"{name}: expected shape {shape}, {text}, got {x.shape}")


class Result:
    """One output of a call: the caller's array, or a new one as the kind of array that the call's leading array is."""

    def __init__(self, shape: tuple[int, ...], kind: str, like: Any, given: Any = None, name: str = "out", dtype: Any = None) -> None:
        self.given, self.family = given, _arrays.family_of(like)
        self.made = self.family.empty(shape, kind) if given is None else given
        self.array = _arrays.host(self.made, name, kind, written=True)[0] if given is None else self._checked(shape, kind, name, dtype)

    def _checked(self, shape: tuple[int, ...], kind: str, name: str, dtype: Any) -> np.ndarray:
        array, own = floats(self.given, name, dtype, written=True)
        if own != kind:
            raise TypeError(f"{name}: expected dtype {kind}, got {own}")
        if array.shape != shape:
            raise ValueError(f"{name}: expected shape {shape}, got {array.shape}")
        if not array.flags.writeable:
            raise ValueError(f"{name}: expected a writable array, got a read-only one")
        return array

    def refuse_overlap(self, **others: np.ndarray | None) -> None:
        for name, other in others.items():
            if other is not None and np.may_share_memory(self.array, other):
                raise ValueError(f"out: expected memory of its own, got an array that overlaps {name}")

    @property
    def value(self) -> Any:
        """What the caller gets."""
        return _arrays.finished(self.made, self.given, self.family)


# ---- Sequences ----------------------------------------------------------------------------------------------------


def sums_of(cu_seqlens: Any) -> Any:
    """Cumulative lengths as an array, to be checked by `cuts`; None stays None."""
    return None if cu_seqlens is None else _arrays.integers(cu_seqlens, "cu_seqlens")


def cuts(cu_seqlens: Any, total: int) -> np.ndarray:
    """Checked cumulative lengths of `total` tokens, int64."""
    cu = sums_of(cu_seqlens)
    if cu.ndim != 1 or cu.size == 0:
        raise ValueError(f"cu_seqlens: expected numbers rising from 0 to {total}, got shape {cu.shape}")
    if cu[0] != 0 or cu[-1] != total:
        raise ValueError(f"cu_seqlens: expected numbers rising from 0 to {total}, got {cu[0]} to {cu[-1]}")
    if (np.diff(cu) < 0).any():
        raise ValueError(f"cu_seqlens: expected numbers rising from 0 to {total}, got {cu[1:][np.diff(cu) < 0][0]} after a larger one")
    return np.ascontiguousarray(cu)


def cumulative(counts: Any) -> np.ndarray:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64)])


def block_count(tokens: Any, block_size: int, stride: int) -> Any:
    """Complete blocks of sequences of so many tokens."""
    return np.where(np.asarray(tokens) < block_size, 0, (np.asarray(tokens) - block_size) // stride + 1)


class Sequences(NamedTuple):
    """Where each sequence lies in arrays of tokens, of compressed keys and of list rows. None: on a batch axis of their own."""

    tokens: np.ndarray | None
    blocks: np.ndarray | None
    rows: np.ndarray | None

    @classmethod
    def of(cls, cu: np.ndarray | None, block_size: int = 1, stride: int = 1, tile: int = 1) -> Sequences:
        if cu is None:
            return cls(None, None, None)
        return cls(cu, cumulative(block_count(np.diff(cu), block_size, stride)), cumulative(-(-np.diff(cu) // tile)))


class Piece(NamedTuple):
    """A part of a call that is worked off by itself: some sequences, or some heads of one of them and a stretch of its queries.

    The first four cut arrays of queries, of keys, of compressed keys and of gate weights down to it.
    """

    queries: tuple[Any, ...]
    keys: tuple[Any, ...]
    blocks: tuple[Any, ...]
    heads: tuple[slice, slice]  # query heads and KV heads
    rows: tuple[Any, ...]  # of lists: the axes before and after that of heads
    sequences: Sequences
    begin: int  # token number of the first query
    tokens: int  # of a whole sequence; packed: not looked at

    def lists(self, array: np.ndarray, kv_heads: int) -> np.ndarray:
        """Rows of the piece of lists that have an axis of query heads, or one of KV heads."""
        before, after = self.rows
        return array[(*before, self.heads[array.shape[-3] == kv_heads], after)]


ALL = slice(None)


def _pieces_of_one(tokens: int, tile: int, most: int, heads: tuple[int, int]) -> Iterator[tuple[tuple[slice, slice], int, int]]:
    """Heads and queries of the pieces of one sequence: as many heads as a piece has room for all queries of, but at least one KV head.

    Stretches of queries are of one length, or a tile more: none is a few queries.
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

    A piece goes over all keys of its heads, each time anew: so heads are parted first, and queries only where one head has too many.
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


# ---- Rules ----------------------------------------------------------------------------------------------------------


def number(x: Any, name: str, least: int = 1) -> int:
    value = _arrays.integer(x, name)
    if value < least:
        raise ValueError(f"{name}: expected {'a positive number' if least == 1 else f'{least} or more'}, got {value}")
    if value > 2**30:
        raise ValueError(f"{name}: expected at most {2**30}, got {value}")
    return value


def scale_of(scale: Any, dim: int) -> float:
    if scale is None:
        return 1 / math.sqrt(max(1, dim))
    value = _arrays.number(scale, "scale")
    if not math.isfinite(value):
        raise ValueError(f"scale: expected a finite number, got {value}")
    return value


def threads_of(num_threads: Any) -> int | None:
    return None if num_threads is None else number(num_threads, "num_threads")


def mode_of(mode: Any) -> str:
    return _arrays.choice(mode, "mode", ("paper", "mslk"))


@dataclass(frozen=True)
class Rules:
    """How blocks are compressed, seen and selected."""

    mode: str
    size: int  # l: tokens of a compressed block
    stride: int  # d: from one to the next
    select: int  # l': tokens of a selected block
    count: int  # n: places of a selection
    tile: int  # queries that share a selection
    init: int
    local: int
    causal: bool

    @property
    def by_query(self) -> bool:
        return self.mode == "paper"

    @property
    def last(self) -> int:
        """Tokens from a compressed block's beginning to the first query that sees it."""
        return self.size - 1 if self.by_query else 0

    def rows(self, tokens: int) -> int:
        return -(-tokens // self.tile)


def rules_of(
    mode: Any, compress_block_size: Any, num_selected_blocks: Any, q_tile_size: Any, compress_stride: Any, select_block_size: Any,
    init_blocks: Any, local_blocks: Any, causal: Any,
) -> Rules:  # fmt: skip
    """Checked rules, with the defaults of the mode."""
    mode, causal = mode_of(mode), _arrays.flag(causal, "causal")
    size, count = number(compress_block_size, "compress_block_size"), number(num_selected_blocks, "num_selected_blocks")
    tile = number(q_tile_size, "q_tile_size")
    stride = None if compress_stride is None else number(compress_stride, "compress_stride")
    select = None if select_block_size is None else number(select_block_size, "select_block_size")
    init, local = number(init_blocks, "init_blocks", 0), number(local_blocks, "local_blocks", 0)
    if mode == "mslk":
        for name, value in (("compress_stride", stride), ("select_block_size", select)):
            if value is not None and value != size:
                raise ValueError(f'{name}: expected None or compress_block_size = {size} in mode "mslk", got {value}')
        return Rules(mode, size, size, size, count, tile, 0, 0, causal)
    stride, select = stride or max(1, size // 2), select or size
    for name, value in (("compress_block_size", size), ("select_block_size", select)):
        if value % stride:
            raise ValueError(f"compress_stride: expected a divisor of {name} = {value}, got {stride}")
    if init + local > count:
        raise ValueError(f"num_selected_blocks: expected at least init_blocks + local_blocks = {init + local}, got {count}")
    return Rules(mode, size, stride, select, count, 1, init, local, causal)


# ---- The core's operations over such arrays -----------------------------------------------------------------------------


def attend(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, out: np.ndarray, lse: np.ndarray | None, kind: str, scale: float, causal: bool,
    threads: int | None, names: dict[str, str], *, cu: np.ndarray | None = None, cu_kv: np.ndarray | None = None, lists: Any = None,
    cu_rows: np.ndarray | None = None, block_shape: tuple[int, int] = (128, 128), window: tuple[int, int] | None = None, begin: int = 0,
    stride: int = 0, last: int = 0,
) -> None:  # fmt: skip
    """One branch: fills `out`, and `lse` of shape (B, N, H) or (T, H) where it is wanted."""
    packed = cu is not None
    turned = lse if lse is None or packed else lse.swapaxes(1, 2)
    try:
        _core.block_sparse_attention(
            np.empty, q, k, v, lists, block_shape, scale, "TND" if packed else "BSND", causal, window, None, None, cu,
            cu if packed and cu_kv is None else cu_kv, None, None, kind, threads, lse is not None, out, turned, cu_rows, lists is not None,
            begin, stride, last,
        )  # fmt: skip
    except (TypeError, ValueError) as error:
        raise renamed(error, names) from error


def attend_backward(
    dout: np.ndarray, q: np.ndarray, k: np.ndarray, v: np.ndarray, out: np.ndarray, lse: np.ndarray, grads: tuple[np.ndarray, ...],
    kind: str, scale: float, causal: bool, threads: int | None, names: dict[str, str], *, cu: np.ndarray | None = None,
    cu_kv: np.ndarray | None = None, lists: Any = None, cu_rows: np.ndarray | None = None, block_shape: tuple[int, int] = (128, 128),
    window: tuple[int, int] | None = None, begin: int = 0, stride: int = 0, last: int = 0,
) -> None:  # fmt: skip
    """The gradient of `attend`: fills the three arrays of `grads`."""
    packed = cu is not None
    try:
        _core.block_sparse_attention_backward(
            np.empty, q, k, v, lists, block_shape, scale, "TND" if packed else "BSND", causal, window, None, None, cu,
            cu if packed and cu_kv is None else cu_kv, None, None, kind, threads, dout, out, lse if packed else lse.swapaxes(1, 2), None,
            grads[0], grads[1], grads[2], cu_rows, lists is not None, begin, stride, last,
        )  # fmt: skip
    except (TypeError, ValueError) as error:
        raise renamed(error, names) from error


COMPRESSED_NAMES = {"k": "k_cmp", "v": "v_cmp", "sabi": "cmp_block_indices"}
SELECTED_NAMES = {"sabi": "block_indices"}


def window_of(window_size: int, causal: bool) -> tuple[int, int]:
    """Keys before and after a query."""
    return (window_size - 1, 0) if causal else (window_size // 2, window_size // 2)


def lists_of(block_indices: Any, rules: Rules, heads: tuple[int, ...], batch: int, lengths: list[int], packed: bool) -> np.ndarray:
    """A given selection, found to have rows for all queries and to name only blocks that there are, each once a row."""
    lists = _arrays.array(block_indices, "block_indices", "an integer array")
    if lists.dtype.kind not in "iu" or lists.dtype.itemsize < 2:
        raise TypeError(f"block_indices: expected int16, int32 or int64, got {lists.dtype}")
    rows = sum(map(rules.rows, lengths))
    shapes = [(head, rows) if packed else (batch, head, rows) for head in heads]
    if lists.ndim != len(shapes[0]) + 1 or lists.shape[:-1] not in shapes:
        raise ValueError(f"block_indices: expected shape {' or '.join(map(str, shapes))} with n more, got {lists.shape}")
    lists = lists.astype(np.int32 if lists.dtype.itemsize < 8 else np.int64, copy=False)
    if ((lists[..., 1:] != -1) & (lists[..., :-1] == -1)).any():  # what comes behind the first -1 is in no row
        lists = np.where(np.logical_or.accumulate(lists == -1, axis=-1), lists.dtype.type(-1), lists)
    for begin, end, tokens in row_ranges(rules, lengths):
        blocks = -(-tokens // rules.select)
        for at in range(begin, end, 1 << 14):
            part = lists[..., at : min(at + (1 << 14), end), :]
            if part.size and (part.min() < -1 or part.max() >= blocks):
                odd = part[(part < -1) | (part >= blocks)][0]
                raise ValueError(f"block_indices: expected blocks from 0 to {blocks - 1}, or -1 behind them, got {odd}")
            ordered = np.sort(part, axis=-1)
            twice = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)
            if twice.any():
                raise ValueError(f"block_indices: expected every block once in a row, got {ordered[..., 1:][twice][0]} twice")
    return lists


def row_ranges(rules: Rules, lengths: list[int]) -> Iterator[tuple[int, int, int]]:
    """First row, end and tokens of each sequence; without packing, of the one length that all have."""
    edges = [0, *np.cumsum([rules.rows(n) for n in lengths], dtype=np.int64).tolist()]
    return ((a, b, n) for (a, b), n in zip(pairwise(edges), lengths, strict=True))
