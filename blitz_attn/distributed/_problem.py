"""One attention call over the whole sequence, as a plan sees it: the chain of its block rows, what each row sees, and what it costs."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from numpy import ndarray

from .._arrays import array as array_of
from .._arrays import choice, dtype_name, falls, flag, integer, integers
from .._names import LAYOUTS
from .._sabi.block_list import block_shape_for
from .._sabi.check import check as check_lists
from .._sabi.lists import PAD_UINT16, at_least_one, blocks_of, checked_shape, two_integers, with_four_axes
from ._dispatch import Cut
from ._lazy import computed_once

MOST_SIDE = 1 << 22  # most rows and most columns: 268 million tokens in blocks of 64
MOST_LISTED = 1 << 32  # most blocks of a grid with a list, which is held as bits
_STRIPE = 1 << 20  # blocks that are read at a time
ITEMSIZES = {"float32": 4, "float16": 2, "bfloat16": 2, "float64": 8}


class Problem:
    """The call that all ranks compute together, with checked arguments.

    Rows of blocks of queries form a chain. In the layouts with a batch axis, the chain has the rows of one sequence, each of which
    stands for that row of every batch entry. In TND, the chain has the rows of all sequences, one after the other. `entries` is the number
    of sequences that are looked at one by one. If all batch entries are alike, `entries` is 1, and that sequence counts `alike` times.

    Attributes
    ----------
    row_at : (rows + 1,)
        Where each row begins on the axis of query tokens.
    cell_at : (columns + 1,)
        Where each block of keys begins on the axis of key tokens.
    """

    def __init__(
        self, sabi: Any, s_q: Any, s_kv: Any, *, batch: Any, num_heads: Any, num_kv_heads: Any, head_dim: Any, head_dim_v: Any, dtype: Any,
        block_shape: Any, layout: Any, causal: Any, window: Any = None, q_lens: Any = None, kv_lens: Any = None, cu_seqlens_q: Any = None,
        cu_seqlens_kv: Any = None,
    ) -> None:  # fmt: skip
        self.layout = choice(layout, "layout", LAYOUTS)
        self.block_shape = checked_shape(block_shape_for(sabi, block_shape, (128, 128)))
        self.causal = flag(causal, "causal")
        expected = "two numbers of tokens (before, after), -1 for no bound"
        self.window = None if window is None else two_integers(window, "window", expected, -1)
        self.heads = at_least_one(num_heads, "num_heads")
        self.kv_heads = self.heads if num_kv_heads is None else at_least_one(num_kv_heads, "num_kv_heads")
        if self.heads % self.kv_heads:
            raise ValueError(f"num_heads: expected a multiple of num_kv_heads = {self.kv_heads}, got {self.heads}")
        self.group = self.heads // self.kv_heads
        self.head_dim = at_least_one(head_dim, "head_dim")
        self.head_dim_v = self.head_dim if head_dim_v is None else at_least_one(head_dim_v, "head_dim_v")
        name = dtype_name(dtype)
        self.dtype: str = name if name in ITEMSIZES else _dtype_name_of(dtype)
        if self.dtype not in ITEMSIZES:
            raise TypeError(f"dtype: expected float32, float16, bfloat16 or float64, got {self.dtype}")
        self.itemsize = ITEMSIZES[self.dtype]
        self.lse_itemsize = 8 if self.dtype == "float64" else 4
        if self.layout == "TND":
            self._read_packed(s_q, s_kv, batch, q_lens, kv_lens, cu_seqlens_q, cu_seqlens_kv)
        else:
            self._read_batched(s_q, s_kv, batch, q_lens, kv_lens, cu_seqlens_q, cu_seqlens_kv)
        block_q, block_kv = self.block_shape
        rows, columns = blocks_of(self.longest[0], block_q), blocks_of(self.longest[1], block_kv)
        if max(rows, columns) > MOST_SIDE:
            most = f"there are at most {MOST_SIDE} rows and columns"
            raise ValueError(f"block_shape: expected blocks so large that {most}, got {rows} x {columns}")
        if sabi is not None and rows * columns > MOST_LISTED:
            most = f"at most {MOST_LISTED} blocks with a list"
            raise ValueError(f"block_shape: expected blocks so large that a grid has {most}, got {rows} x {columns}")
        self.sabi = None if sabi is None else self._read_lists(sabi)
        each = np.array([blocks_of(n, block_q) for n in self.q_sizes]), np.array([blocks_of(n, block_kv) for n in self.kv_sizes])
        if self.layout == "TND":
            self.entries, self.alike = self.batch, 1
            self.row_begin = np.concatenate([[0], np.cumsum(each[0])]).astype(np.int64)
            self.row_at = _cells(self.cu_q, block_q)
            self.cell_at = _cells(self.cu_kv, block_kv)
        else:
            apart = self.q_lens is not None or self.kv_lens is not None or (self.sabi is not None and len(self.sabi) > 1)
            self.entries = self.batch if apart else 1
            self.alike = self.batch // self.entries
            self.row_begin = np.array([0, rows], np.int64)
            self.row_at = np.minimum(np.arange(rows + 1) * block_q, self.longest[0])
            self.cell_at = np.minimum(np.arange(columns + 1) * block_kv, self.longest[1])
        self.columns = each[1][: self.entries]
        self.column_begin = np.concatenate([[0], np.cumsum(self.columns)]).astype(np.int64)
        self.rows = len(self.row_at) - 1

    def _read_batched(self, s_q: Any, s_kv: Any, batch: Any, q_lens: Any, kv_lens: Any, cu_q: Any, cu_kv: Any) -> None:
        for name, given in (("cu_seqlens_q", cu_q), ("cu_seqlens_kv", cu_kv)):
            if given is not None:
                raise ValueError(f"{name}: expected none with layout {self.layout}, whose lengths are q_lens and kv_lens, got some")
        if s_q is None:
            raise TypeError(f"s_q: expected the number of queries of the whole sequence with layout {self.layout}, got None")
        self.batch = 1 if batch is None else at_least_one(batch, "batch")
        self.longest = at_least_one(s_q, "s_q"), at_least_one(s_q if s_kv is None else s_kv, "s_kv")
        self.q_lens = _lengths(q_lens, "q_lens", self.batch, self.longest[0])
        self.kv_lens = _lengths(kv_lens, "kv_lens", self.batch, self.longest[1])
        self.q_sizes = np.full(self.batch, self.longest[0])
        self.kv_sizes = np.full(self.batch, self.longest[1])
        self.q_valid = self.q_sizes if self.q_lens is None else self.q_lens
        self.kv_valid = self.kv_sizes if self.kv_lens is None else self.kv_lens
        self.tokens = self.longest

    def _read_packed(self, s_q: Any, s_kv: Any, batch: Any, q_lens: Any, kv_lens: Any, cu_q: Any, cu_kv: Any) -> None:
        for name, given in (("s_q", s_q), ("s_kv", s_kv), ("q_lens", q_lens), ("kv_lens", kv_lens)):
            if given is not None:
                raise ValueError(f"{name}: expected none with layout TND, whose lengths are cu_seqlens_q and cu_seqlens_kv, got some")
        self.cu_q = _cumulative(cu_q, "cu_seqlens_q")
        self.cu_kv = self.cu_q if cu_kv is None else _cumulative(cu_kv, "cu_seqlens_kv")
        self.batch = len(self.cu_q) - 1
        if len(self.cu_kv) != len(self.cu_q):
            raise ValueError(f"cu_seqlens_kv: expected {len(self.cu_q)} numbers like cu_seqlens_q, got {len(self.cu_kv)}")
        if batch is not None and integer(batch, "batch") != self.batch:
            raise ValueError(f"batch: expected {self.batch} as cu_seqlens_q says, got {batch}")
        self.q_lens = self.kv_lens = None
        self.q_sizes = self.q_valid = np.diff(self.cu_q)
        self.kv_sizes = self.kv_valid = np.diff(self.cu_kv)
        self.longest = int(self.q_sizes.max()), int(self.kv_sizes.max())
        self.tokens = int(self.cu_q[-1]), int(self.cu_kv[-1])

    def _read_lists(self, sabi: Any) -> ndarray:
        lists = with_four_axes(np.asarray(array_of(sabi, "sabi", "an integer array")))
        if lists.dtype.kind not in "iu":
            raise TypeError(f"sabi: expected an integer array, got {lists.dtype}")
        if lists.ndim != 4:
            raise ValueError(f"sabi: expected shape (B or 1, H, Hkv or 1, rows, width), got {lists.shape}")
        for axis, (name, sizes) in enumerate((("batch", [self.batch]), ("heads", sorted({self.heads, self.kv_heads}, reverse=True)))):
            if lists.shape[axis] not in (1, *sizes):
                allowed = "".join(f"{size} or " for size in sizes if size != 1)
                raise ValueError(f"sabi: expected {name} {allowed}1 on axis {axis}, got shape {lists.shape}")
        if not self.longest[0] and not lists.shape[2]:  # no queries
            return lists
        for at in np.ndindex(lists.shape[:2]):  # one by one: the check makes 64-bit copies
            try:
                check_lists(lists[at][None, None], max(1, self.longest[0]), max(1, self.longest[1]), self.block_shape)
            except ValueError as error:
                raise ValueError(str(error).replace("at [0, 0, ", f"at [{at[0]}, {at[1]}, ")) from None
        return lists

    def description(self) -> dict[str, Any]:
        """The arguments that must be the same on all ranks, by name."""
        packed = self.layout == "TND"
        return {
            "layout": self.layout, "dtype": self.dtype, "s_q": self.tokens[0], "s_kv": self.tokens[1], "batch": self.batch,
            "num_heads": self.heads, "num_kv_heads": self.kv_heads, "head_dim": self.head_dim, "head_dim_v": self.head_dim_v,
            "block_shape": self.block_shape, "causal": self.causal, "window": self.window, "q_lens": self.q_lens, "kv_lens": self.kv_lens,
            "cu_seqlens_q": self.cu_q if packed else None, "cu_seqlens_kv": self.cu_kv if packed else None, "sabi": self.sabi,
        }  # fmt: skip

    def call(self) -> dict[str, Any]:
        """The lists, rules, lengths and numbers of heads of one call over the whole sequence."""
        packed = self.layout == "TND"
        heads = {"num_heads": self.heads, "num_kv_heads": self.kv_heads} if self.layout == "BSH" else {}
        lengths = {"cu_seqlens_q": self.cu_q, "cu_seqlens_kv": self.cu_kv} if packed else {"q_lens": self.q_lens, "kv_lens": self.kv_lens}
        rules = {"layout": self.layout, "block_shape": self.block_shape, "causal": self.causal, "window": self.window}
        return {"sabi": self.sabi, **rules, **lengths, **heads}

    @property
    def self_attention(self) -> bool:
        """Whether queries and keys are of the same tokens, as far as lengths say."""
        return bool(np.array_equal(self.q_sizes, self.kv_sizes))

    # ---- What a row sees --------------------------------------------------------------------------------------------

    @property
    def classes(self) -> int:
        """Number of KV heads whose lists differ: all, or 1 where heads share their lists."""
        return self.kv_heads if self.sabi is not None and self.sabi.shape[1] > 1 else 1

    def lists_of(self, head: int) -> slice:
        """The lists of the query heads that share a KV head: one for each, or one for all of them."""
        assert self.sabi is not None
        count = self.sabi.shape[1]
        each = count // self.kv_heads
        return slice(head * each, (head + 1) * each) if count > 1 else slice(0, 1)

    def offset(self, entry: int) -> int:
        """The number of the key beside which query 0 of a sequence stands on the diagonal."""
        return int(self.kv_valid[entry] - self.q_valid[entry])

    def _seen(self, entry: int) -> tuple[ndarray, ndarray, ndarray]:
        """For each row of a sequence: its valid queries, and the first and the end of the key tokens that token rules let the row see."""
        block_q, _ = self.block_shape
        first = np.arange(self._rows_of(entry), dtype=np.int64) * block_q
        end = np.minimum(first + block_q, int(self.q_valid[entry]))
        low, high = np.zeros_like(first), np.full_like(first, int(self.kv_valid[entry]))
        offset = self.offset(entry)
        if self.causal:
            high = np.minimum(high, end + offset)
        if self.window is not None:
            left, right = self.window
            low = low if left < 0 else np.maximum(low, first + offset - left)
            high = high if right < 0 else np.minimum(high, end + offset + right)
        queries = np.maximum(end - first, 0)
        high = np.where(queries > 0, np.maximum(high, 0), 0)
        return queries, np.minimum(low, high), high

    def _rows_of(self, entry: int) -> int:
        return int(self.row_begin[entry + 1] - self.row_begin[entry]) if self.layout == "TND" else self.rows

    def _runs(self, entry: int) -> tuple[ndarray, ndarray]:
        """The first and the end of the columns that token rules let each row of a sequence see; 0 and 0 for a row that sees none."""
        _, block_kv = self.block_shape
        _, low, high = self._seen(entry)
        return np.where(high > low, low // block_kv, 0), np.where(high > low, -(-high // block_kv), 0)

    def _tokens_before(self, entry: int) -> ndarray:
        """(columns + 1,): valid tokens of a sequence's keys before each of its columns."""
        return np.minimum(np.arange(int(self.columns[entry]) + 1) * self.block_shape[1], int(self.kv_valid[entry]))

    def _mask(self, entry: int, group: int) -> tuple[ndarray, ndarray]:
        """The listed blocks that the rows of a sequence see for any head of a group, as packed bits; and for each row the tokens in these
        blocks, summed over the heads. Stripes of rows are packed one by one, since an unpacked mask would take eight times the memory."""
        assert self.sabi is not None
        rows, columns = self._rows_of(entry), int(self.columns[entry])
        first, end = self._runs(entry)
        sizes = np.append(np.diff(self._tokens_before(entry)), 0)  # one column more, for blocks that are not seen
        bits, tokens = np.empty((rows, -(-columns // 8)), np.uint8), np.zeros(rows)
        own = self.sabi[entry if len(self.sabi) > 1 else 0, self.lists_of(group)]
        step = max(1, _STRIPE // (columns + own.shape[-1] + 1))
        for top in range(0, rows, step):
            part = slice(top, min(top + step, rows))
            mask = np.zeros((part.stop - top, columns + 1), bool)
            for one in own:
                listed = one[part].astype(np.int64)
                pad = listed == PAD_UINT16 if one.dtype == np.uint16 else listed < 0
                kept = ~np.logical_or.accumulate(pad, axis=1) & (listed >= first[part, None]) & (listed < end[part, None])
                listed = np.where(kept, listed, columns)
                tokens[part] += sizes[listed].sum(axis=1) * (self.group // len(own))
                mask[np.arange(len(mask))[:, None], listed] = True
            bits[part] = np.packbits(mask[:, :columns], axis=1)
        return bits, tokens

    @computed_once
    def _masks(self) -> list[list[tuple[ndarray, ndarray]]]:
        return [[self._mask(entry, group) for group in range(self.classes)] for entry in range(self.entries)]

    def _tokens_seen(self, entry: int, group: int) -> ndarray:
        """Tokens of keys in the blocks that each row of a sequence sees, summed over the heads of a group."""
        if self.sabi is not None:
            return self._masks[entry][group][1]
        before, (first, end) = self._tokens_before(entry), self._runs(entry)
        return self.group * (before[end] - before[first]).astype(np.float64)

    @computed_once
    def work(self) -> ndarray:
        """(classes, rows): pairs of a query and a key in the blocks that a row sees, over the heads of a group and the batch entries."""
        found = np.zeros((self.classes, self.rows))
        for entry in range(self.entries):
            queries, _, _ = self._seen(entry)
            begin = int(self.row_begin[entry]) if self.layout == "TND" else 0
            for group in range(self.classes):
                found[group, begin : begin + len(queries)] += queries * self._tokens_seen(entry, group) * self.alike
        return found

    def needs(self, computed: tuple[Cut, ...], size: int) -> list[ndarray]:
        """For each KV head, (size, columns): whether a rank needs a block of keys. Heads that are alike share one array."""
        made: dict[tuple[int, int], ndarray] = {}
        found = []
        for head, cut in enumerate(computed):
            group = head % self.classes
            key = id(cut), group
            if key not in made:
                made[key] = np.concatenate([self._needed(entry, group, cut, size) for entry in range(self.entries)], axis=1)
            found.append(made[key])
        return found

    def _needed(self, entry: int, group: int, cut: Cut, size: int) -> ndarray:
        columns, begin = int(self.columns[entry]), int(self.row_begin[entry]) if self.layout == "TND" else 0
        begins = np.maximum(cut.at[:-1] - begin, 0)
        inside = begins < np.minimum(cut.at[1:] - begin, self._rows_of(entry))
        begins, ranks = begins[inside], cut.rank[inside]
        if self.sabi is None:
            found = np.zeros((size, columns), bool)
            if len(begins):  # the runs of neighbouring rows meet or overlap, so that the rows of a stretch see one run
                first, end = self._runs(entry)
                first = np.minimum.reduceat(np.where(end > first, first, columns), begins)
                for rank, low, high in zip(ranks, first, np.maximum.reduceat(end, begins), strict=True):
                    found[rank, low:high] = True
            return found
        mask, _ = self._masks[entry][group]
        bits = np.zeros((size, mask.shape[1]), np.uint8)
        if len(begins):
            np.bitwise_or.at(bits, ranks, np.bitwise_or.reduceat(mask, begins, axis=0))
        return np.unpackbits(bits, axis=1, count=columns).view(bool)

    def cell_tokens(self) -> tuple[ndarray, ndarray, ndarray]:
        """For each column of `needs`: its sequence, and the first and the end of its valid tokens on the axis of key tokens."""
        _, block_kv = self.block_shape
        entry = np.repeat(np.arange(self.entries), self.columns)
        column = np.arange(len(entry)) - self.column_begin[entry]
        start = self.cu_kv[entry] if self.layout == "TND" else np.zeros_like(entry)
        valid = self.kv_valid[entry]
        return entry, start + np.minimum(column * block_kv, valid), start + np.minimum((column + 1) * block_kv, valid)


def _dtype_name_of(dtype: Any) -> str:
    try:
        return np.dtype(dtype).name
    except TypeError as error:
        raise TypeError(f"dtype: expected float32, float16, bfloat16 or float64, got {dtype!r}") from error


def _lengths(given: Any, name: str, batch: int, most: int) -> ndarray | None:
    if given is None:
        return None
    numbers = integers(given, name)
    if numbers.shape != (batch,):
        raise ValueError(f"{name}: expected shape ({batch},), one per batch entry, got {numbers.shape}")
    if ((numbers < 0) | (numbers > most)).any():
        raise ValueError(f"{name}: expected lengths from 0 to {most}, got {numbers.tolist()}")
    return numbers


def _cumulative(given: Any, name: str) -> ndarray:
    if given is None:
        raise TypeError(f"{name}: expected cumulative lengths with layout TND, got None")
    numbers = integers(given, name)
    if numbers.ndim != 1 or len(numbers) < 2 or numbers[0] != 0 or falls(numbers).any():
        raise ValueError(f"{name}: expected at least two cumulative lengths that rise from 0, got {numbers.tolist()[:8]}")
    return numbers


def _cells(cu: ndarray, block: int) -> ndarray:
    """Where the blocks of sequences begin on their common axis, and its end."""
    begins = [np.arange(a, b, block, dtype=np.int64) for a, b in itertools.pairwise(cu)]
    return np.append(np.concatenate(begins), cu[-1])
