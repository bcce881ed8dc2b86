"""Page tables and lengths of a batch of requests, from either form that callers may give."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy import ndarray

from . import _arrays
from ._state_tree import ranges


def tables_for_core(block_tables: Any, seq_lens: Any) -> tuple[Any, Any, Any, Any]:
    """(tables, seq_lens, indptr, last_page_len) as the core takes them, from either form of tables."""
    if isinstance(block_tables, tuple):
        if len(block_tables) != 3:
            raise ValueError(f"block_tables: expected an array or (indptr, indices, last_page_len), got a tuple of {len(block_tables)}")
        if seq_lens is not None:
            raise ValueError("seq_lens: expected None with (indptr, indices, last_page_len), which give the lengths, got lengths as well")
        indptr, indices, last_page_len = block_tables
        for part, name in ((indptr, "indptr"), (indices, "indices"), (last_page_len, "last_page_len")):
            if part is None:
                raise TypeError(f"{name}: expected an array of (indptr, indices, last_page_len), got NoneType")
        return indices, None, indptr, last_page_len
    if seq_lens is None:
        if isinstance(block_tables, list):  # of the three, most likely
            raise TypeError("block_tables: expected an array or a tuple (indptr, indices, last_page_len), got list")
        raise ValueError("seq_lens: expected one length per request with an array of block_tables, got None")
    return block_tables, seq_lens, None, None


def cache_shape(cache: Any, name: str, kv_layout: str) -> tuple[int, ...]:
    """The shape of k_cache or v_cache, which has four axes."""
    shape = _arrays.shape_of(cache)
    if len(shape) != 4:
        axes = "page_size, Hkv" if kv_layout == "NHD" else "Hkv, page_size"
        raise ValueError(f"{name}: expected shape (pages, {axes}, D), got {shape}")
    return shape


def cache_sizes(k_cache: Any, kv_layout: Any) -> tuple[int, int, int]:
    """Pages, tokens per page and KV heads of a cache."""
    layout = _arrays.choice(kv_layout, "kv_layout", ("NHD", "HND"))
    shape = cache_shape(k_cache, "k_cache", layout)
    return (shape[0], shape[1], shape[2]) if layout == "NHD" else (shape[0], shape[2], shape[1])


_FARTHEST = 2**30 - 1  # token number, and most tokens of a request
_MOST_QUERIES = 2**30  # of a request that has q_begin


def query_lengths(q_lens: Any, seq_lens: ndarray, within: bool = True) -> ndarray:
    """int64 numbers of queries. `within`: they are among the tokens of their request, as they are without `q_begin`."""
    lengths = _arrays.integers(q_lens, "q_lens")
    if lengths.shape != seq_lens.shape:
        raise ValueError(f"q_lens: expected {len(seq_lens)} entries, one per request, got shape {lengths.shape}")
    for b in ((lengths < 0) | (lengths > (seq_lens if within else _MOST_QUERIES))).nonzero()[0]:
        expected = f"0 to seq_lens[{b}] = {seq_lens[b]}" if within else "at least 0" if lengths[b] < 0 else f"at most {_MOST_QUERIES}"
        raise ValueError(f"q_lens: expected {expected}, got {lengths[b]} at [{b}]")
    return lengths


def sinks_of(sinks: Any, heads: int) -> ndarray | None:
    """float32 sinks, one per query head."""
    if sinks is None:
        return None
    numbers = _arrays.float32_numbers(sinks, "sinks")
    if numbers.shape != (heads,):
        raise ValueError(f"sinks: expected shape ({heads},), one number per query head, got {numbers.shape}")
    return numbers


def refuse_mask_shape(mask: Any, sizes: tuple[int, int, int, int]) -> None:
    """Refuses a mask that does not fit so many requests and heads, and at most so many queries and tokens of a request, by the core's
    sentences. Masks of more than four axes are left to the core."""
    given = (1,) * (4 - len(mask.shape)) + tuple(mask.shape)
    fits = [n in (1, size) or (axis > 1 and n > size) for axis, (n, size) in enumerate(zip(given, sizes, strict=False))]
    if len(given) == 4 and not all(fits):
        expected = ", ".join("1" if size == 1 else f"{size} or 1" for size in sizes)
        raise ValueError(f"attn_mask: expected shape ({expected}), or more queries and keys, got {tuple(mask.shape)}")
    batch, _, queries, tokens = sizes
    if len(mask.shape) == 1 and mask.shape[0] > max(1, tokens):
        raise ValueError(
            f"attn_mask: expected {tokens} tokens in a mask of one axis, or shape ({batch}, 1, {queries}, {tokens}), a matrix of queries "
            f"and tokens for each request, got ({mask.shape[0]},)"
        )


def query_begins(q_begin: Any, batch: int) -> ndarray:
    """int64 token number of each request's query 0."""
    begins = _arrays.integers(q_begin, "q_begin")
    if begins.shape != (batch,):
        raise ValueError(f"q_begin: expected {batch} entries, one per request, got shape {begins.shape}")
    for b in ((begins < -_FARTHEST) | (begins > _FARTHEST)).nonzero()[0]:
        raise ValueError(f"q_begin: expected token numbers from {-_FARTHEST} to {_FARTHEST}, got {begins[b]} at [{b}]")
    return begins


def nearest_begin(q_begin: ndarray) -> ndarray:
    """Token numbers of queries 0 as the core takes them. So far before the first token, no query sees one, however far it is."""
    return np.maximum(q_begin, -_FARTHEST)


class Listed(NamedTuple):
    """The blocks that the lists of a call name: one entry for each, one list after the other."""

    rows: int  # lists per request
    request: ndarray
    head: ndarray  # the list's number within its request
    place: ndarray  # within the list
    block: ndarray

    def refuse_repeated(self) -> None:
        """Refuses a block that a list names twice."""
        row = self.request * self.rows + self.head
        order = np.lexsort((self.block, row))
        again = (np.diff(row[order]) == 0) & (np.diff(self.block[order]) == 0)
        for i in np.sort(order[1:][again]):
            raise ValueError(f"selected: expected each block once per row, got {self.block[i]} again at {self._at(i)}") from None

    def refuse_missing(self, pages: ndarray) -> None:
        """Refuses blocks that a request of so many pages does not have."""
        for i in ((self.block < 0) | (self.block >= pages[self.request])).nonzero()[0]:
            last = pages[self.request[i]] - 1
            expected = "no block" if last < 0 else f"blocks from 0 to {last}"
            raise ValueError(f"selected: expected {expected} of request {self.request[i]}, got {self.block[i]} at {self._at(i)}")

    def _at(self, i: int) -> list[int]:
        return [int(x[i]) for x in (self.request, self.head, self.place)]


def listed_blocks(selected: Any, counts: Any, pages: ndarray, heads: tuple[int, ...]) -> Listed:
    """The blocks of `selected` and `counts`, see `paged_select_attention`. `pages`: of each request; `heads`: of keys, and of queries."""
    lists, kind = _arrays.host(selected, "selected")
    if kind not in ("int16", "int32", "int64"):
        raise TypeError(f"selected: expected int16, int32 or int64, got {kind}")
    if lists.ndim != 3 or len(lists) != len(pages) or lists.shape[1] not in heads:
        raise ValueError(
            f"selected: expected shape ({len(pages)}, {' or '.join(map(str, heads))}, K), one row per request and KV head or query head, "
            f"got {lists.shape}"
        )
    if counts is None:
        used = np.logical_and.accumulate(lists != -1, axis=2)
    else:
        numbers = _arrays.integers(counts, "counts")
        if numbers.shape != lists.shape[:2]:
            raise ValueError(f"counts: expected shape {lists.shape[:2]} like the rows of selected, got {numbers.shape}")
        for b, h in np.argwhere((numbers < 0) | (numbers > lists.shape[2])):
            raise ValueError(f"counts: expected 0 to {lists.shape[2]}, got {numbers[b, h]} at [{b}, {h}]")
        used = np.arange(lists.shape[2]) < numbers[:, :, None]
    request, head, place = used.nonzero()
    listed = Listed(lists.shape[1], request, head, place, lists[request, head, place].astype(np.int64))
    listed.refuse_missing(pages)
    return listed


def lists_by_unit(unit: ndarray, head: ndarray, block: ndarray, shape: tuple[int, int]) -> tuple[ndarray, ndarray]:
    """(selected, counts) for the core. `shape`: the number of units, and of lists per unit. The arrays have an entry per listed block: its
    unit, its list within the unit, and the block's number within the unit."""
    row = unit * shape[1] + head
    counts = np.bincount(row, minlength=shape[0] * shape[1])
    order = np.argsort(row, kind="stable")
    selected = np.full((len(counts), max(1, int(counts.max(initial=0)))), -1, np.int32)
    selected[row[order], ranges(np.zeros_like(counts), counts)] = block[order]
    return selected.reshape(*shape, selected.shape[1]), counts.reshape(shape)


class Tables:
    """Either form of tables as arrays, with lengths that have been checked against them."""

    def __init__(self, block_tables: Any, seq_lens: Any, page_size: int) -> None:
        pages, lengths, indptr, last = tables_for_core(block_tables, seq_lens)
        self.page_size = page_size = _arrays.integer(page_size, "page_size")
        if page_size < 1:
            raise ValueError(f"page_size: expected at least 1 token, got {page_size}")
        self.pages = self._page_numbers(pages)
        if indptr is None:
            if self.pages.ndim != 2:
                raise ValueError(f"block_tables: expected shape (B, W), got {self.pages.shape}")
            self.indptr = None
            self.seq_lens = _arrays.integers(lengths, "seq_lens").copy()
            widths = np.full(len(self.pages), self.pages.shape[1])
            if self.seq_lens.shape != (len(self.pages),):
                raise ValueError(f"seq_lens: expected {len(self.pages)} entries, one per request, got shape {self.seq_lens.shape}")
        else:
            self.indptr, last = _arrays.integers(indptr, "indptr").copy(), _arrays.integers(last, "last_page_len")
            self._check_indptr()
            widths = np.diff(self.indptr)
            if last.shape != widths.shape:
                raise ValueError(f"last_page_len: expected {len(widths)} entries, one per request, got shape {last.shape}")
            for b in ((last < (widths > 0)) | (last > page_size)).nonzero()[0]:
                raise ValueError(f"last_page_len: expected 1 to the {page_size} tokens of a page, got {last[b]} at [{b}]")
            self.seq_lens = np.where(widths > 0, (widths - 1) * page_size + last, 0)
        for b in (self.seq_lens > _FARTHEST).nonzero()[0]:
            raise ValueError(f"seq_lens: expected at most {_FARTHEST} tokens, got {self.seq_lens[b]} at [{b}]")
        self.used = -(-self.seq_lens // page_size)
        for b in ((self.seq_lens < 0) | (self.used > widths)).nonzero()[0]:
            raise ValueError(
                f"seq_lens: expected lengths from 0 to what the table's {widths[b]} pages of {page_size} tokens hold, "
                f"got {self.seq_lens[b]} at [{b}]"
            )

    @staticmethod
    def _page_numbers(pages: Any) -> ndarray:
        array, kind = _arrays.host(pages, "block_tables")
        if kind not in ("int32", "int64"):
            raise TypeError(f"block_tables: expected int32 or int64, got {array.dtype}")
        return array

    def _check_indptr(self) -> None:
        assert self.indptr is not None
        if self.pages.ndim != 1:
            raise ValueError(f"block_tables: expected indices of shape (N,), got {self.pages.shape}")
        if self.indptr.ndim != 1 or not len(self.indptr):
            raise ValueError(f"indptr: expected B + 1 entries, got shape {self.indptr.shape}")
        if self.indptr[0] < 0 or self.indptr[-1] > len(self.pages) or _arrays.falls(self.indptr).any():
            raise ValueError(f"indptr: expected rising numbers from 0 to {len(self.pages)}, got {self.indptr.tolist()}")

    def at(self, requests: ndarray, blocks: ndarray) -> ndarray:
        """Page of each (request, block)."""
        return self.pages[requests, blocks] if self.indptr is None else self.pages[self.indptr[requests] + blocks]

    @staticmethod
    def refuse_missing(pages: ndarray, num_pages: int, requests: ndarray, blocks: ndarray) -> None:
        """Refuses pages that a cache does not have. `requests` and `blocks` say which table entries they are, for the error sentence."""
        for i in ((pages < 0) | (pages >= num_pages)).nonzero()[0]:
            raise ValueError(
                f"block_tables: expected pages from 0 to {num_pages - 1} within the request's length, got {pages[i]} for page "
                f"{blocks[i]} of request {requests[i]}"
            )
