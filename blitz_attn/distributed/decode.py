"""Decoding over a cache whose tokens are spread over ranks: bit-identical for any number of ranks, whichever rank holds which tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Unpack, overload

import numpy as np
from numpy import ndarray

from .. import _arrays, _core
from .._floats import Result, attention_results, real_of, written
from .._names import KVLayout
from .._paged.call import Rules, attend_requests, open_requests
from .._paged.tables import cache_sizes
from . import _tree
from ._comm import Agreement, communicator
from ._lazy import computed_once
from ._lists import Listed, listed_blocks, lists_by_unit
from ._states import Merges, ranges, rounded, sinks_of, with_sinks

if TYPE_CHECKING:
    from .._options import DecodeCallOptions, DecodeOptions
    from .._types import Array, DType, Integers, Kind

__all__ = ["DecodePlan", "decode_context_parallel_attention"]

KV_SPLIT = 1024  # tokens per chunk
_MOST_TOKENS = 2**30 - 1  # most tokens, and so queries, of a request in the core; all ranks together may hold more tokens
_CALL = "decode_context_parallel_attention"


# ---- Who holds what -----------------------------------------------------------------------------------------------


class Shards:
    """The pages that ranks hold of each request, from tables of either form, see `DecodePlan`.

    A `Shards` must be made within a block of `Agreement`, and its `agree_owners` must be called after the block.
    """

    def __init__(self, agreement: Agreement, block_tables: Any, seq_lens: Any, page_size: Any, interleave: Any, kv_split: Any) -> None:
        self.rank, self.size = agreement.rank, agreement.size
        self.page_size = _positive(page_size() if callable(page_size) else page_size, "page_size")
        self.kv_split = _multiple(kv_split, "kv_split", self.page_size, "page_size")
        self.interleave = None if interleave is None else _multiple(interleave, "interleave", self.kv_split, "kv_split")
        if isinstance(block_tables, (tuple, list)):
            raise TypeError(f"block_tables: expected an array, got {type(block_tables).__name__}")
        self.lengths = _arrays.integers(seq_lens, "seq_lens").copy()
        agreement.same("seq_lens", self.lengths)
        for name in ("page_size", "kv_split", "interleave"):
            agreement.same(name, getattr(self, name))
        self.tables, kind = _arrays.host(block_tables, "block_tables")
        if kind not in ("int32", "int64"):
            raise TypeError(f"block_tables: expected int32 or int64, got {self.tables.dtype}")
        if self.tables.ndim != 2 or self.lengths.shape != self.tables.shape[:1]:
            raise ValueError(f"block_tables: expected shape (B, W) with one row per entry of seq_lens, got {self.tables.shape}")
        for b in (self.lengths < 0).nonzero()[0]:
            raise ValueError(f"seq_lens: expected at least 0, got {self.lengths[b]} at [{b}]")
        self.split_pages = self.kv_split // self.page_size
        self.used = -(-self.lengths // self.page_size)  # pages of each request, over all ranks
        self.chunks = -(-self.used // self.split_pages)
        self.first = np.cumsum(self.chunks) - self.chunks
        self.request = np.arange(len(self.chunks)).repeat(self.chunks)
        self.index = np.arange(len(self.request)) - self.first[self.request]
        self.owner = self._owners_by_turns() if self.interleave else self._own_chunks()

    def _turn(self, pages: ndarray) -> tuple[ndarray, ndarray]:
        """(rank, index among the rank's own pages) of a request's pages where ranks take turns."""
        assert self.interleave is not None
        turn = self.interleave // self.page_size
        group = pages // turn
        return group % self.size, group // self.size * turn + pages % turn

    def _owners_by_turns(self) -> ndarray:
        for b, used in enumerate(self.used.tolist()):
            ranks, places = self._turn(np.arange(used))
            mine = places[ranks == self.rank]
            if len(mine) > self.tables.shape[1]:
                raise ValueError(
                    f"block_tables: expected the {len(mine)} pages that this rank holds of request {b}, got rows of {self.tables.shape[1]}"
                )
        return self._turn(self.index * self.split_pages)[0]

    def _own_chunks(self) -> ndarray:
        """For each chunk, the number of this rank if it holds the chunk, else -1."""
        for b in (self.used > self.tables.shape[1]).nonzero()[0]:
            raise ValueError(
                f"seq_lens: expected lengths from 0 to what the table's {self.tables.shape[1]} pages of {self.page_size} tokens hold, "
                f"got {self.lengths[b]} at [{b}]"
            )
        pages = np.minimum(self.split_pages, self.used[self.request] - self.index * self.split_pages)
        starts = np.cumsum(pages) - pages
        held = self.tables[self.request.repeat(pages), ranges(self.index * self.split_pages, pages)] >= 0
        number = np.add.reduceat(held, starts, dtype=np.int64) if len(starts) else np.zeros(0, np.int64)
        for i in ((number > 0) & (number < pages)).nonzero()[0]:
            a = self.index[i] * self.split_pages
            raise ValueError(
                f"block_tables: expected all pages or none of each chunk of kv_split = {self.kv_split} tokens on a rank, "
                f"got {number[i]} of pages {a} to {a + pages[i] - 1} of request {self.request[i]}"
            )
        return np.where(number > 0, self.rank, -1)

    def agree_owners(self, comm: Any) -> None:
        """Learn which rank holds each chunk. Of several holders, the lowest computes the chunk. Raises the same error on all ranks if a
        chunk has no holder."""
        if self.interleave is not None or not len(self.owner):
            return
        held = np.empty((self.size, -(-len(self.owner) // 8)), np.uint8)
        comm.Allgather(np.packbits(self.owner >= 0), held)
        everyone = np.unpackbits(held, axis=1, count=len(self.owner))
        for i in np.flatnonzero(~everyone.any(axis=0)):
            a = self.index[i] * self.kv_split
            raise ValueError(
                f"block_tables: expected every page on some rank, got tokens {a} to "
                f"{min(a + self.kv_split, self.lengths[self.request[i]]) - 1} of request {self.request[i]} on none"
            )
        self.owner = everyone.argmax(axis=0).astype(np.int64)

    def numbers(self, requests: ndarray, pages: ndarray) -> ndarray:
        """The page numbers in this rank's cache of pages that it holds."""
        return self.tables[requests, pages if self.interleave is None else self._turn(pages)[1]]

    def own_pages(self) -> tuple[ndarray, ndarray]:
        """(request, page) of all pages that this rank holds and attends to, in rising order."""
        chunk = (self.owner == self.rank).nonzero()[0]
        starts = self.index[chunk] * self.split_pages
        pages = np.minimum(self.split_pages, self.used[self.request[chunk]] - starts)
        return self.request[chunk].repeat(pages), ranges(starts, pages)


def _positive(x: Any, name: str) -> int:
    value = _arrays.integer(x, name)
    if value < 1:
        raise ValueError(f"{name}: expected at least 1 token, got {value}")
    return value


def _multiple(x: Any, name: str, of: int, whose: str) -> int:
    value = _positive(x, name)
    if value % of:
        raise ValueError(f"{name}: expected a multiple of {whose} = {of}, got {value}")
    return value


def _query_lengths(q_lens: Any, seq_lens: ndarray) -> ndarray:
    """int64 numbers of queries, checked by the core. The core gets tables of one page per request, since a rank's tables are incomplete."""
    lengths = np.minimum(seq_lens, _MOST_TOKENS)
    tables, size = np.zeros((len(lengths), 1), np.int32), int(lengths.max(initial=1))
    opened = open_requests(tables, lengths, None, None, q_lens, None, size)[0]
    return np.asarray(_core.page_table_lengths(opened[0])[1], np.int64)


# ---- The plan -----------------------------------------------------------------------------------------------------


class _Units(NamedTuple):
    """Chunks of this rank that some query may see, each as a request of its own."""

    place: ndarray  # number of the chunk, through all requests
    request: ndarray
    queries: ndarray
    q_begin: ndarray
    tables: tuple[ndarray, ndarray, ndarray]  # indptr, indices and last_page_len


class DecodePlan:
    """Page tables and lengths of one decoding step, and which rank holds which pages. Ranks agree on the holders once, for all layers.

    All ranks make the plan together (this is collective), each with the page tables of its own cache.

    Parameters
    ----------
    block_tables : array of int32 or int64
        ``(B, W)``, in one of two forms. With `interleave`: this rank's own pages of each request, in order. Without: all pages of each
        request, where -1 stands for pages of other ranks; any rank may hold any chunk. Where several ranks hold a chunk, as
        copies, the lowest of them computes attention over it.
    seq_lens : sequence of int
        ``(B,)``: number of tokens of each request, on all ranks together. This argument and all that follow, except `num_threads`, are the
        same on all ranks.
    page_size : int
        Number of tokens per page of the caches that calls pass.
    comm : communicator, optional
        Any object with the methods of ``mpi4py.MPI.Comm``. Default: ``MPI.COMM_WORLD``.
    interleave : int, optional
        Ranks take turns along each request: the first `interleave` tokens are rank 0's, the next ones are rank 1's, and so on. A multiple
        of `kv_split`.
    kv_split : int
        Number of tokens per chunk, a multiple of `page_size`. Attention over each chunk is computed by itself, and the results of chunks
        are merged by a fixed tree.
    q_lens, scale, kv_layout, window, softcap, dtype, kv_dtype, num_threads
        See `blitz_attn.paged_attention`. They hold for all calls of the plan.

    Attributes
    ----------
    batch : int
        Number of requests.
    num_queries : int
        Number of queries in the `q` that calls take: `batch`, or the sum of `q_lens`.
    states : ndarray
        ``(ranks,)``: number of rows that each rank sends in a call, one per query of each state.
    page_size : int
        Number of tokens per page.
    seq_lens : ndarray
        ``(B,)``: number of tokens of each request.
    comm : communicator
        The ranks that made the plan.

    Raises
    ------
    TypeError, ValueError
        As `blitz_attn.paged_attention`, on all ranks, with the message of the lowest rank that raised; also where ranks disagree, and where
        some page is on no rank.

    See Also
    --------
    decode_context_parallel_attention : one call without a plan.

    Examples
    --------
    >>> import numpy as np
    >>> from blitz_attn.distributed import Alone, DecodePlan
    >>> rng = np.random.default_rng(0)
    >>> layers = [rng.standard_normal((2, 6, 16, 2, 64), dtype=np.float32) for _ in range(3)]
    >>> plan = DecodePlan(np.array([[4, 1, 0], [2, 5, 3]]), [40, 48], page_size=16, kv_split=16, comm=Alone())
    >>> q = rng.standard_normal((2, 8, 64), dtype=np.float32)
    >>> for k_cache, v_cache in layers:
    ...     q = plan.attention(q, k_cache, v_cache)
    >>> q.shape, plan.states
    ((2, 8, 64), array([2]))
    """

    def __init__(
        self,
        block_tables: Array,
        seq_lens: Integers,
        *,
        page_size: Any,
        comm: Any = None,
        interleave: int | None = None,
        kv_split: int = KV_SPLIT,
        q_lens: Integers | None = None,
        scale: float | None = None,
        kv_layout: KVLayout = "NHD",
        window: int | None = None,
        softcap: float | None = None,
        dtype: DType | None = None,
        kv_dtype: DType | None = None,
        num_threads: int | None = None,
    ) -> None:
        self.comm = comm = communicator(comm)
        with Agreement(comm, _CALL) as agreement:
            self._shards = shards = Shards(agreement, block_tables, seq_lens, page_size, interleave, kv_split)
            self.batch: int = len(shards.lengths)
            self.page_size: int = shards.page_size
            self.seq_lens: ndarray = shards.lengths
            self._one_query = q_lens is None
            self._queries = np.ones(self.batch, np.int64) if q_lens is None else _query_lengths(q_lens, shards.lengths)
            self._window = None if window is None else _arrays.integer(window, "window")
            if self._window == -1:  # means no window
                self._window = None
            self._dtype, self._kv_dtype = _arrays.dtype_name(dtype), _arrays.dtype_name(kv_dtype, "kv_dtype")
            agreement.same("q_lens", self._queries)
            for name, value in (
                ("scale", scale), ("kv_layout", kv_layout), ("window", self._window), ("softcap", softcap), ("dtype", self._dtype),
                ("kv_dtype", self._kv_dtype),
            ):  # fmt: skip
                agreement.same(name, value)
        shards.agree_owners(comm)
        self.num_queries: int = int(self._queries.sum())
        self._first_query = np.cumsum(self._queries) - self._queries
        self._rules = Rules(None, self._dtype, self._kv_dtype, scale, kv_layout, self._window, softcap, num_threads)
        self._lay_out()

    def _lay_out(self) -> None:
        shards, rank, size = self._shards, self._shards.rank, self._shards.size
        tree = _tree.build(shards.chunks, shards.owner)
        rows = self._queries[shards.request]  # of each chunk's state
        own = (shards.owner == rank).nonzero()[0]
        place = np.zeros(len(rows), np.int64)  # first row of each state, in the rank's own array
        place[own] = np.cumsum(rows[own]) - rows[own]
        self._own_rows = int(rows[own].sum())
        self._own_merges = Merges([(t.left[t.owner == rank], t.right[t.owner == rank]) for t in tree.levels], place, rows)
        mine = tree.sent[tree.sender == rank]
        self._sent_rows = ranges(place[mine], rows[mine])
        everyone = np.zeros(len(rows), np.int64)  # first row of each state, in the array of all states that are sent
        everyone[tree.sent] = np.cumsum(rows[tree.sent]) - rows[tree.sent]
        self.states = np.bincount(tree.sender, weights=rows[tree.sent], minlength=size).astype(np.int64)
        self._all_merges = Merges([(t.left[t.owner < 0], t.right[t.owner < 0]) for t in tree.levels], everyone, rows)
        some = shards.chunks.nonzero()[0]
        self._results = (
            ranges(self._first_query[some], self._queries[some]),
            ranges(everyone[shards.first[some]], self._queries[some]),
        )
        self._units = units = self._make_units(own)
        self._query_rows = ranges(self._first_query[units.request], units.queries)
        self._state_rows = ranges(place[units.place], units.queries)

    def _make_units(self, own: ndarray) -> _Units:
        shards, size = self._shards, self._shards.page_size
        request, begin = shards.request[own], shards.index[own] * shards.split_pages
        queries, ends = self._queries[request], shards.lengths[request]
        after = np.minimum((begin + shards.split_pages) * size, ends)
        seen = queries > 0
        if self._window is not None:
            seen &= after > ends - queries - self._window
        place, request, begin, queries, ends, after = (x[seen] for x in (own, request, begin, queries, ends, after))
        pages = -(-after // size) - begin
        indices = shards.numbers(request.repeat(pages), ranges(begin, pages))
        indptr = np.concatenate([[0], np.cumsum(pages)])
        last = after - (begin + pages - 1) * size
        return _Units(place, request, queries, ends - queries - begin * size, (indptr, indices, last))

    def own_pages(self) -> tuple[ndarray, ndarray]:
        """The pages that this rank holds and attends to.

        Returns
        -------
        request, page : ndarray
            In rising order: the request and the page, numbered through all ranks.

        Examples
        --------
        >>> import numpy as np
        >>> from blitz_attn.distributed import Alone, DecodePlan
        >>> plan = DecodePlan(np.array([[4, 1, 0]]), [40], page_size=16, kv_split=16, comm=Alone())
        >>> plan.own_pages()
        (array([0, 0, 0]), array([0, 1, 2]))
        """
        return self._shards.own_pages()

    # ---- A layer ----

    @overload
    def attention(
        self, q: Kind, k_cache: Array, v_cache: Array, *, return_lse: Literal[False] = False, **options: Unpack[DecodeCallOptions]
    ) -> Kind: ...
    @overload
    def attention(
        self, q: Kind, k_cache: Array, v_cache: Array, *, return_lse: Literal[True], **options: Unpack[DecodeCallOptions]
    ) -> tuple[Kind, Kind]: ...
    @overload
    def attention(
        self, q: Array, k_cache: Array, v_cache: Array, *, return_lse: Literal[False] = False, **options: Unpack[DecodeCallOptions]
    ) -> ndarray: ...
    @overload
    def attention(
        self, q: Array, k_cache: Array, v_cache: Array, *, return_lse: Literal[True], **options: Unpack[DecodeCallOptions]
    ) -> tuple[ndarray, ndarray]: ...
    @overload
    def attention(self, q: Array, k_cache: Array, v_cache: Array, *, return_lse: bool, **options: Unpack[DecodeCallOptions]) -> Any: ...
    def attention(
        self, q: Any, k_cache: Any, v_cache: Any, *, selected: Any = None, counts: Any = None, sinks: Any = None, k_scale: Any = None,
        v_scale: Any = None, return_lse: bool = False, out: Any = None,
    ) -> Any:  # fmt: skip
        """Attention of one layer. All ranks call it together.

        Parameters
        ----------
        q : array
            ``(num_queries, H, D)``: the queries of all requests one after the other, the same on all ranks.
        k_cache, v_cache : array
            This rank's caches of one layer, with the `page_size` of the plan.
        selected : array of int16, int32 or int64, optional
            ``(B, Hkv, K)`` or ``(B, H, K)``: the blocks that are seen, as in `blitz_attn.paged_select_attention`. The pages of a request
            are numbered through all ranks. The lists are the same on all ranks. Default: all pages.
        counts, sinks, return_lse, out
            See `blitz_attn.paged_select_attention`.
        k_scale, v_scale : array of float32, optional
            The factors of this rank's caches, see `blitz_attn.paged_attention`.

        Returns
        -------
        out : array
            ``(num_queries, H, Dv)``, dtype and kind of `q`, the same on all ranks.
        lse : array
            With `return_lse`: ``(num_queries, H)``, see `blitz_attn.paged_attention`.

        Raises
        ------
        TypeError, ValueError, MemoryError
            As `blitz_attn.paged_select_attention`, on all ranks, with the message of the lowest rank that raised. No output has been
            written then.

        Examples
        --------
        >>> import numpy as np
        >>> from blitz_attn.distributed import Alone, DecodePlan
        >>> q, k_cache, v_cache = np.ones((1, 4, 64)), np.ones((6, 16, 2, 64)), np.ones((6, 16, 2, 64))
        >>> plan = DecodePlan(np.array([[4, 1, 0]]), [40], page_size=16, comm=Alone())
        >>> bool((plan.attention(q, k_cache, v_cache) == 1).all())
        True
        """
        with Agreement(self.comm, _CALL) as agreement:
            queries, kind = _arrays.host(q, "q", bits_as=self._dtype)
            if queries.ndim != 3 or len(queries) != self.num_queries:
                raise ValueError(f"q: expected shape ({self.num_queries}, H, D), got {queries.shape}")
            heads, v_dim = queries.shape[1], (_arrays.shape_of(v_cache) or (0,))[-1]
            return_lse = _arrays.flag(return_lse, "return_lse")
            scales = {"k_scale": k_scale, "v_scale": v_scale}
            sinks = sinks_of(sinks, heads)
            inputs = {"q": q, "k_cache": k_cache, "v_cache": v_cache, **scales, "selected": selected, "sinks": sinks}
            results = attention_results(q, (self.num_queries, heads, v_dim), kind, out, return_lse, self._dtype, inputs)
            lists = None
            if selected is not None:
                kv_heads = cache_sizes(k_cache, self._rules.kv_layout)[2]
                lists = listed_blocks(selected, counts, self._shards.used, (kv_heads, heads))
            for name, value in (("q", queries), ("v_cache", v_dim), ("sinks", sinks), ("return_lse", return_lse)):
                agreement.same(name, value)
            agreement.same("selected", None if lists is None else tuple(lists))
            shape, state_kind = (self._own_rows, heads), real_of(kind)
            state = np.zeros((*shape, v_dim), state_kind), np.full(shape, -np.inf, state_kind)
            self._attend(queries, kind, k_cache, v_cache, lists, scales, *state)
            self._own_merges.run(*state)
        return self._finish(self._exchange(*state), kind, sinks, results)

    @computed_once
    def _requests(self) -> tuple[Any, ...]:
        """This rank's units as requests, in the form that `attend_requests` takes. They are made within a call's `Agreement`, so that an
        error reaches all ranks."""
        units, queries = self._units, None if self._one_query else self._units.queries
        indptr, indices, last_page_len = units.tables
        return open_requests(indices, None, indptr, last_page_len, queries, units.q_begin, self.page_size)[0]

    def _attend(
        self, q: ndarray, kind: str, k_cache: Any, v_cache: Any, lists: Listed | None, scales: dict[str, Any], out: ndarray, lse: ndarray
    ) -> None:
        """Fills `out` and `lse` with the states of this rank's chunks. Even without chunks, the call is made, because of its checks."""
        rules = self._rules._replace(out_dtype="float32" if kind in ("float16", "bfloat16") else None)
        if kind == "bfloat16":
            rules = rules._replace(dtype=kind)
        chosen = (None, None) if lists is None else self._lists_of_units(lists)
        try:
            state = attend_requests(
                q[self._query_rows], k_cache, v_cache, self._requests, rules, chosen[0], chosen[1], return_lse=True, **scales
            )
        except ValueError:
            if lists is not None:
                lists.refuse_repeated()  # this names the caller's block numbers; those of the call count within chunks
            raise
        out[self._state_rows], lse[self._state_rows] = state

    def _lists_of_units(self, lists: Listed) -> tuple[ndarray, ndarray]:
        units, shards = self._units, self._shards
        unit_of = np.full(len(shards.owner), -1, np.int64)
        unit_of[units.place] = np.arange(len(units.place))
        unit = unit_of[shards.first[lists.request] + lists.block // shards.split_pages]
        own = unit >= 0
        return lists_by_unit(unit[own], lists.head[own], lists.block[own] % shards.split_pages, (len(units.place), lists.rows))

    def _exchange(self, out: ndarray, lse: ndarray) -> tuple[ndarray, ndarray]:
        """The states that all ranks send, in the order of ranks."""
        heads, v_dim = out.shape[1:]
        mine = np.empty((len(self._sent_rows), heads, v_dim + 1), out.dtype)
        mine[..., :v_dim], mine[..., v_dim] = out[self._sent_rows], lse[self._sent_rows]
        everyone = np.empty((int(self.states.sum()), heads, v_dim + 1), out.dtype)
        numbers = self.states * heads * (v_dim + 1)
        self.comm.Allgatherv(mine, [everyone, (numbers.tolist(), (np.cumsum(numbers) - numbers).tolist())])
        return np.ascontiguousarray(everyone[..., :v_dim]), np.ascontiguousarray(everyone[..., v_dim])

    def _finish(self, states: tuple[ndarray, ndarray], kind: str, sinks: ndarray | None, results: list[Result]) -> Any:
        """Merge the states that all ranks sent, and write the results."""
        self._all_merges.run(*states)
        heads, v_dim = states[0].shape[1:]
        out, lse = np.zeros((self.num_queries, heads, v_dim), states[0].dtype), np.full((self.num_queries, heads), -np.inf, states[0].dtype)
        to, source = self._results
        out[to], lse[to] = states[0][source], states[1][source]
        if sinks is not None:
            out, lse = with_sinks(out, lse, sinks)
        return written(results, rounded(out, kind), lse)


@overload
def decode_context_parallel_attention(
    q: Kind, k_cache: Array, v_cache: Array, block_tables: Array, seq_lens: Integers, *, return_lse: Literal[False] = False,
    **options: Unpack[DecodeOptions],
) -> Kind: ...  # fmt: skip
@overload
def decode_context_parallel_attention(
    q: Kind, k_cache: Array, v_cache: Array, block_tables: Array, seq_lens: Integers, *, return_lse: Literal[True],
    **options: Unpack[DecodeOptions],
) -> tuple[Kind, Kind]: ...  # fmt: skip
@overload
def decode_context_parallel_attention(
    q: Array, k_cache: Array, v_cache: Array, block_tables: Array, seq_lens: Integers, *, return_lse: Literal[False] = False,
    **options: Unpack[DecodeOptions],
) -> ndarray: ...  # fmt: skip
@overload
def decode_context_parallel_attention(
    q: Array, k_cache: Array, v_cache: Array, block_tables: Array, seq_lens: Integers, *, return_lse: Literal[True],
    **options: Unpack[DecodeOptions],
) -> tuple[ndarray, ndarray]: ...  # fmt: skip
@overload
def decode_context_parallel_attention(
    q: Array, k_cache: Array, v_cache: Array, block_tables: Array, seq_lens: Integers, *, return_lse: bool, **options: Unpack[DecodeOptions]
) -> Any: ...
def decode_context_parallel_attention(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    block_tables: Any,
    seq_lens: Any,
    *,
    comm: Any = None,
    interleave: int | None = None,
    kv_split: int = KV_SPLIT,
    selected: Any = None,
    counts: Any = None,
    scale: float | None = None,
    kv_layout: KVLayout = "NHD",
    q_lens: Any = None,
    window: int | None = None,
    sinks: Any = None,
    softcap: float | None = None,
    k_scale: Any = None,
    v_scale: Any = None,
    return_lse: bool = False,
    out: Any = None,
    dtype: Any = None,
    kv_dtype: Any = None,
    num_threads: int | None = None,
) -> Any:
    """Attention of each request's newest queries over a paged cache whose tokens several ranks hold. All ranks call it together.

    Each rank attends to its own chunks of `kv_split` tokens. It merges the chunks that form complete nodes of a fixed binary tree over the
    chunks of a request, and sends the largest of these nodes; then every rank merges the rest. The result is bit-identical for any number
    of ranks, whichever rank holds which chunks.

    Parameters
    ----------
    q : array
        ``(B, H, D)``, or with `q_lens` ``(T, H, D)``: the same on all ranks.
    k_cache, v_cache : array
        This rank's caches, see `blitz_attn.paged_attention`. A rank that holds nothing passes caches of 0 pages.
    block_tables : array of int32 or int64
        ``(B, W)``: with `interleave`, this rank's own pages of each request, in order; without, all pages of each request, with -1 in place
        of other ranks' pages.
    seq_lens : sequence of int
        ``(B,)``: number of tokens of each request, on all ranks together.
    comm : communicator, optional
        Any object with the methods of ``mpi4py.MPI.Comm``. Default: ``MPI.COMM_WORLD``.
    interleave : int, optional
        Number of tokens, a multiple of `kv_split`, after which the next rank takes its turn along each request. Default: any rank may
        hold any chunk, as `block_tables` says.
    kv_split : int
        Number of tokens per chunk, a multiple of the page size.
    selected : array of int16, int32 or int64, optional
        ``(B, Hkv, K)`` or ``(B, H, K)``: only these blocks are seen, as in `blitz_attn.paged_select_attention`. Blocks are numbered
        through all ranks.
    counts, scale, kv_layout, q_lens, window, sinks, softcap, return_lse, out, dtype, kv_dtype, num_threads
        See `blitz_attn.paged_select_attention`. The same on all ranks, except `out` and `num_threads`.
    k_scale, v_scale : array of float32, optional
        The factors of this rank's caches, see `blitz_attn.paged_attention`.

    Returns
    -------
    out : array
        ``(B, H, Dv)`` or ``(T, H, Dv)``, dtype and kind of `q`, the same on all ranks.
    lse : array
        With `return_lse`: ``(B, H)`` or ``(T, H)``, see `blitz_attn.paged_attention`.

    Raises
    ------
    TypeError, ValueError, MemoryError
        As `blitz_attn.paged_select_attention`, on all ranks, with the message of the lowest rank that raised; also where ranks disagree,
        where some page is on no rank, or where ranks use different instruction sets.
    ModuleNotFoundError
        `comm` is None and mpi4py is not installed.

    See Also
    --------
    DecodePlan : agrees on tables and lengths once for all layers of a step.
    select_blocks_distributed : chooses the blocks.

    Notes
    -----
    Rank r sends ``plan.states[r]`` rows of ``H * (Dv + 1)`` numbers to all others: float32 (float64 for float64). If each rank holds one
    run of chunks of a request, it sends at most two nodes per level of the tree. If ranks take turns of 1, 2, 4 or another power of two
    chunks, each rank sends at most one node per turn; with other turns, it may send more nodes.

    Examples
    --------
    In one process. Under ``mpirun``, `comm` is left out, and each rank passes its own caches and tables:

    >>> import numpy as np
    >>> import blitz_attn
    >>> from blitz_attn.distributed import Alone, decode_context_parallel_attention
    >>> rng = np.random.default_rng(0)
    >>> q = rng.standard_normal((1, 8, 64), dtype=np.float32)
    >>> k_cache, v_cache = (rng.standard_normal((6, 16, 2, 64), dtype=np.float32) for _ in range(2))
    >>> tables, seq_lens = np.array([[3, 0, 1, 5, 2]]), [75]
    >>> out = decode_context_parallel_attention(q, k_cache, v_cache, tables, seq_lens, kv_split=32, comm=Alone())
    >>> bool(np.abs(out - blitz_attn.paged_attention(q, k_cache, v_cache, tables, seq_lens)).max() < 1e-5)
    True
    """
    plan = DecodePlan(
        block_tables, seq_lens, page_size=lambda: cache_sizes(k_cache, kv_layout)[1], comm=comm, interleave=interleave, kv_split=kv_split,
        q_lens=q_lens, scale=scale, kv_layout=kv_layout, window=window, softcap=softcap, dtype=dtype, kv_dtype=kv_dtype,
        num_threads=num_threads,
    )  # fmt: skip
    return plan.attention(
        q, k_cache, v_cache, selected=selected, counts=counts, sinks=sinks, k_scale=k_scale, v_scale=v_scale, return_lse=return_lse, out=out
    )
