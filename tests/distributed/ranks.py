"""Ranks that are threads of one process: a communicator with the methods that decoding and selection call, for tests without MPI."""

import threading

import numpy as np

import blitz_attn
from blitz_attn.distributed.decode import decode_context_parallel_attention
from blitz_attn.distributed.selection import select_blocks_distributed


class Group:
    def __init__(self, size):
        self.size = size
        self.barrier = threading.Barrier(size, timeout=60)
        self.given = [None] * size


class Rank:
    """The communicator of one thread. It sends copies, so that no rank sees another rank's memory."""

    def __init__(self, group, rank):
        self.group, self.rank, self.sent = group, rank, 0

    def Get_rank(self):  # noqa: N802 - MPI's names
        return self.rank

    def Get_size(self):  # noqa: N802
        return self.group.size

    def _everyone(self, value):
        self.group.given[self.rank] = value
        self.group.barrier.wait()
        values = list(self.group.given)
        self.group.barrier.wait()
        return values

    def Allgather(self, send, receive):  # noqa: N802
        self.sent += send.nbytes
        for place, value in zip(receive.reshape(self.group.size, -1), self._everyone(send.copy()), strict=True):
            place[...] = value.reshape(-1)

    def Allgatherv(self, send, receive):  # noqa: N802
        self.sent += send.nbytes
        into, (counts, places) = receive
        into = into.reshape(-1)
        for first, count, value in zip(places, counts, self._everyone(send.copy()), strict=True):
            assert value.size == count
            into[first : first + count] = value.reshape(-1)

    def Alltoallv(self, send, receive):  # noqa: N802
        values, (counts, places) = send
        values = values.reshape(-1)
        self.sent += sum(counts) * values.itemsize
        parts = self._everyone([values[a : a + n].copy() for a, n in zip(places, counts, strict=True)])
        into, (counts, places) = receive
        into = into.reshape(-1)
        for first, count, part in zip(places, counts, (p[self.rank] for p in parts), strict=True):
            assert part.size == count
            into[first : first + count] = part

    def Isend(self, *arguments):  # noqa: N802
        raise NotImplementedError

    Irecv = Isend


def run(size, work):
    """The results of ``work(comm)`` on `size` ranks. If a rank raises, all ranks end, and its error is raised."""
    group = Group(size)
    results = [None] * size

    def one(rank):
        try:
            results[rank] = work(Rank(group, rank))
        except Exception as error:
            results[rank] = error
            if isinstance(error, AssertionError):
                group.barrier.abort()

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in sorted((r for r in results if isinstance(r, Exception)), key=lambda e: isinstance(e, threading.BrokenBarrierError)):
        raise result
    return results


def sentences(size, work):
    """The error that each rank's ``work(comm)`` raises, as text; None if it raises nothing."""

    def one(comm):
        try:
            work(comm)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return None

    return run(size, one)


# ---- Caches that ranks share --------------------------------------------------------------------------------------


class Shared:
    """One rank's share of a `blitz_attn.testing.Paged`: arguments for `decode_context_parallel_attention`.

    The caches have only the rank's own pages, in another order.

    Parameters
    ----------
    p : Paged
    owner : str or callable
        "turns" (with `interleave`), "runs", "random", or a function (request, chunk, chunks) -> rank.
    """

    def __init__(self, p, size, rank, owner, kv_split, interleave=None, seed=0):
        rng = np.random.default_rng(seed)
        size_of_page = p.page_size
        used = -(-p.seq_lens // size_of_page)
        split = kv_split // size_of_page
        tables = np.full((len(used), int(used.max(initial=0))), -1, p.block_tables.dtype)
        for b, pages in enumerate(used):
            page = np.arange(pages)
            chunks = -(-pages // split)
            if owner == "turns":
                holds = page // (interleave // size_of_page) % size
            elif owner == "runs":
                holds = page // split * size // max(1, chunks)
            elif owner == "random":
                holds = rng.integers(0, size, chunks)[page // split]
            else:
                holds = np.array([owner(b, c, chunks) for c in range(chunks)], np.int64)[page // split]
            mine = page[holds == rank]
            tables[b, mine] = p.block_tables[b, mine]
        self.pages = tables[tables >= 0]  # numbers of the rank's pages in the whole cache
        order = np.random.default_rng(seed + rank + 1).permutation(len(self.pages))
        number = np.full(len(p.k_cache), -1)
        number[self.pages] = order
        self.k_cache, self.v_cache = (self._own(x, order) for x in (p.k_cache, p.v_cache))
        self.options = {k: self._own(x, order) if k in ("k_scale", "v_scale") else x for k, x in p.options.items()}
        self.tables = np.where(tables >= 0, number[tables], -1).astype(tables.dtype)
        if owner == "turns":
            rows = [row[row >= 0] for row in self.tables]
            holds_last = [pages > 0 and self.tables[b, pages - 1] >= 0 for b, pages in enumerate(used)]
            self.lengths = np.array([len(row) * size_of_page for row in rows]) - (used * size_of_page - p.seq_lens) * holds_last
            self.own = np.zeros((len(used), max([len(row) for row in rows], default=0)), tables.dtype)
            self.tables = np.full_like(self.own, 1 << 20)
            for b, row in enumerate(rows):
                self.own[b, : len(row)] = self.tables[b, : len(row)] = row
            self.options["interleave"] = interleave
        self.options["kv_split"] = kv_split

    def _own(self, cache, order):
        own = np.empty((len(self.pages), *cache.shape[1:]), cache.dtype)
        own[order] = cache[self.pages]
        return own


    def rows(self):
        """(tables, lengths) of the rank's own pages, if ranks take turns."""
        return self.own, self.lengths


# ---- Selection ----------------------------------------------------------------------------------------------------


def source_of(method, k_cache, tables, lengths):
    """The source that `select_blocks` computes scores from, and its tables."""
    if method == "max":
        return k_cache, tables
    pages, rows = tables.shape[1], 16
    per_request = -(-max(1, pages) // rows)
    summary_tables = np.arange(len(tables) * per_request, dtype=np.int32).reshape(-1, per_request)
    largest, smallest, means = (np.full((summary_tables.size, rows, *k_cache.shape[2:]), np.nan, k_cache.dtype) for _ in range(3))
    blitz_attn.quest_prefill_metadata(k_cache, tables, lengths, summary_tables, largest, smallest, meanblocks=means)
    return ((largest, smallest) if method == "quest" else means), summary_tables


def check_selection(comm, p, k, method, turn, **options):
    """Assert that ranks that hold pages in turns choose the blocks of one process, and attend these blocks with the same bits."""
    tables = np.maximum(p.block_tables, 0)
    source, source_tables = source_of(method, p.k_cache, tables, p.seq_lens)
    selected, counts = blitz_attn.select_blocks(p.q, source, source_tables, p.seq_lens, k, method=method, **options)
    size, rank = comm.Get_size(), comm.Get_rank()
    own = Shared(p, size, rank, "turns", turn, turn)
    pages, lengths = own.rows()
    source, source_tables = source_of(method, own.k_cache, pages, lengths)
    got = select_blocks_distributed(p.q, source, source_tables, p.seq_lens, k, method=method, comm=comm, interleave=turn, **options)
    for a, b in zip(got, (selected, counts), strict=True):
        assert a.dtype == b.dtype
        assert np.array_equal(a, b), (method, a.tolist(), b.tolist())
    out = decode_context_parallel_attention(p.q, own.k_cache, own.v_cache, own.tables, p.seq_lens, comm=comm, selected=got[0], **own.options)
    whole = blitz_attn.paged_select_attention(*p.arrays, selected, kv_split=turn, **p.options)
    assert out.tobytes() == whole.tobytes()
