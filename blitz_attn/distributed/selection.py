"""Choosing blocks of a cache whose tokens are spread over ranks. From a few candidates of each rank, ranks choose the blocks that one
process would choose."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy import ndarray

from .. import _arrays
from .._names import KVLayout, Method
from .._paged.selection import block_size_of, budgets
from .._sentences import shown
from ..quest import select_blocks
from ._comm import Agreement, communicator
from .decode import DecodePlan

if TYPE_CHECKING:
    from .._types import Array, DType, Integers, IntOrIntegers

__all__ = ["select_blocks_distributed"]

_CALL = "select_blocks_distributed"
_NOBODY = np.iinfo(np.int32).max  # stands for no block


def select_blocks_distributed(
    q: Array,
    source: Array | tuple[Array, ...],
    tables: Array,
    seq_lens: Integers,
    k: IntOrIntegers | None = None,
    *,
    comm: Any = None,
    interleave: int | None = None,
    plan: DecodePlan | None = None,
    budget: IntOrIntegers | None = None,
    method: Method = "quest",
    sink: int = 1,
    recent: IntOrIntegers = 1,
    per_query_head: bool = False,
    dense_below: int | None = None,
    tokens_since_metadata_update: IntOrIntegers = -1,
    ascending: bool = True,
    block_size: int | None = None,
    kv_layout: KVLayout = "NHD",
    dtype: DType | None = None,
    num_threads: int | None = None,
) -> tuple[ndarray, ndarray]:
    """The blocks of each request that `blitz_attn.select_blocks` chooses, where each rank scores the blocks that it holds.

    All ranks call this function together. Each rank sends the k best of its own blocks with their scores, 8 bytes per block, and every rank
    chooses among all of these. One process that holds all blocks would choose the same: the blocks of the highest scores, and of equal
    scores the lower block.

    Parameters
    ----------
    q : array
        ``(B, H, D)``, the same on all ranks: float32, float16, bfloat16 or float64.
    source : array or tuple of array
        This rank's summaries, or with ``method="max"`` its key cache, see `blitz_attn.select_blocks`.
    tables : array of int32 or int64
        ``(B, M)``: pages of `source`. In them, the blocks of a request that this rank holds follow one another in rising order.
    seq_lens : sequence of int
        ``(B,)``: number of tokens of each request, on all ranks together.
    k, budget : int or sequence of int, optional
        How many blocks (`k`) or tokens (`budget`) to select on all ranks together. Give exactly one of the two, see
        `blitz_attn.select_blocks`.
    comm : communicator, optional
        Any object with the methods of ``mpi4py.MPI.Comm``. Default: that of the plan, or without a plan ``MPI.COMM_WORLD``.
    interleave : int, optional
        Number of tokens, a multiple of the block size, after which the next rank takes its turn along each request.
    plan : DecodePlan, optional
        Says in place of `interleave` which rank holds which pages. The pages of the plan are the blocks. Where several ranks hold a page,
        only the lowest of these ranks counts.
    method, sink, recent, per_query_head, dense_below, tokens_since_metadata_update, ascending, block_size, kv_layout, dtype, num_threads
        See `blitz_attn.select_blocks`. The same on all ranks, except `num_threads`.

    Returns
    -------
    selected : ndarray
        int32 ``(B, Hkv, K)`` or, with `per_query_head`, ``(B, H, K)``: the blocks of each request, numbered through all ranks, and -1 in
        unused entries. The same on all ranks.
    counts : ndarray
        int32, ``(B, Hkv)`` or ``(B, H)``: number of entries in use.

    Raises
    ------
    TypeError, ValueError
        As `blitz_attn.select_blocks`, on all ranks, with the message of the lowest rank that raised; also where ranks disagree.
    ModuleNotFoundError
        `comm` is None and mpi4py is not installed.

    See Also
    --------
    decode_context_parallel_attention : attends to the selected blocks.

    Examples
    --------
    In one process. Under ``mpirun``, `comm` is left out, and each rank passes its own cache and tables:

    >>> import numpy as np
    >>> import blitz_attn
    >>> from blitz_attn.distributed import Alone, select_blocks_distributed
    >>> rng = np.random.default_rng(0)
    >>> q = rng.standard_normal((1, 4, 64), dtype=np.float32)
    >>> k_cache = rng.standard_normal((8, 16, 2, 64), dtype=np.float32)
    >>> tables, seq_lens = np.array([[3, 0, 6, 7, 1]]), [77]
    >>> selected, counts = select_blocks_distributed(q, k_cache, tables, seq_lens, 3, method="max", interleave=32, comm=Alone())
    >>> alone, alone_counts = blitz_attn.select_blocks(q, k_cache, tables, seq_lens, 3, method="max")
    >>> bool((selected == alone).all()), bool((counts == alone_counts).all())
    (True, True)
    """
    comm = communicator(plan.comm if plan is not None and comm is None else comm)
    with Agreement(comm, _CALL) as agreement:
        queries, _ = _arrays.host(q, "q", bits_as=_arrays.dtype_name(dtype))
        lengths = _arrays.integers(seq_lens, "seq_lens")
        if lengths.ndim != 1 or (lengths < 0).any():
            raise ValueError(f"seq_lens: expected lengths of at least 0, got {lengths.tolist()}")
        first = source[0] if isinstance(source, tuple) and source else source
        size = block_size_of(first, kv_layout if method == "max" else "NHD", "source") if block_size is None else block_size
        if size is None:
            raise ValueError(f"source: expected four axes, got shape {_arrays.shape_of(first)}")
        size = _arrays.integer(size, "block_size")
        if size < 1:
            raise ValueError(f"block_size: expected at least 1 token, got {size}")
        width, blocks = budgets(k, budget, dense_below, lengths, size)
        used = -(-lengths // size)
        wanted = np.minimum(used, width if blocks is None else np.minimum(blocks, width))
        forced = _forced(lengths, used, wanted, size, sink, recent, tokens_since_metadata_update)
        request, own = _own_blocks(agreement, lengths, used, size, interleave, plan)
        for name, value in (
            ("q", queries), ("seq_lens", lengths), ("k", wanted), ("K", width), ("sink", forced[0]), ("recent", forced[1]),
            ("method", method), ("block_size", size), ("interleave", interleave), ("per_query_head", bool(per_query_head)),
            ("ascending", _arrays.flag(ascending, "ascending")),
        ):  # fmt: skip
            agreement.same(name, value)
        held = np.bincount(request, minlength=len(lengths))
        own_lengths = held * size  # the last block of a request is also the last block of its holder
        last = np.zeros(len(lengths), bool)
        last[request[own == used[request] - 1]] = True
        own_lengths[last] -= (used * size - lengths)[last]
        chosen, _, scores = select_blocks(
            queries if isinstance(q, np.ndarray) and q.dtype.kind != "V" else q, source, tables, own_lengths,
            np.maximum(wanted, 1), method=method, sink=0, recent=0, per_query_head=per_query_head, ascending=False,
            block_size=block_size, kv_layout=kv_layout, dtype=dtype, num_threads=num_threads, return_scores=True,
        )  # fmt: skip
        chosen, scores = np.asarray(chosen), np.asarray(scores)
        agreement.same("rows of source", chosen.shape)
    first_own = np.cumsum(held) - held
    place = np.minimum(first_own[:, None, None] + np.maximum(chosen, 0), max(len(own) - 1, 0))
    number = np.where(chosen >= 0, own[place] if len(own) else 0, _NOBODY).astype(np.int32)
    mine = np.stack([number, scores.view(np.int32)])
    everyone = np.empty((comm.Get_size(), *mine.shape), np.int32)
    comm.Allgather(mine, everyone)
    numbers, scores = (np.moveaxis(x, 0, 2).reshape(*chosen.shape[:2], -1) for x in (everyone[:, 0], everyone[:, 1].view(np.float32)))
    return _choose(numbers, scores, used, wanted, forced, width, ascending)


def _forced(lengths: ndarray, used: ndarray, wanted: ndarray, size: int, sink: Any, recent: Any, since: Any) -> tuple[ndarray, ndarray]:
    """How many blocks at the start and how many at the end of each request are always selected."""
    sink = _arrays.integer(sink, "sink")
    if sink < 0:
        raise ValueError(f"sink: expected at least 0 pages, got {sink}")
    newest = _per_request(0 if recent is None else recent, "recent", lengths)
    if (newest < 0).any():
        raise ValueError(f"recent: expected at least 0 pages, got {newest.min()}")
    new_tokens = _per_request(since, "tokens_since_metadata_update", lengths)
    if (new_tokens < -1).any():
        raise ValueError(f"tokens_since_metadata_update: expected at least 0, or -1 for no window, got {new_tokens.min()}")
    without = used - np.maximum(lengths - new_tokens, 0) // size
    newest = np.where(new_tokens >= 0, np.maximum(newest, without), newest)
    newest = np.minimum(newest, wanted)
    return np.minimum(sink, wanted - newest), newest


def _per_request(x: Any, name: str, lengths: ndarray) -> ndarray:
    values = _arrays.integers(x, name)
    if values.shape not in ((), lengths.shape):
        raise ValueError(f"{name}: expected a number, or {len(lengths)} of them, one per request, got shape {values.shape}")
    return np.broadcast_to(values, lengths.shape)


def _own_blocks(
    agreement: Agreement, lengths: ndarray, used: ndarray, size: int, interleave: Any, plan: DecodePlan | None
) -> tuple[ndarray, ndarray]:
    """(request, block) of all blocks that this rank holds, in rising order."""
    if plan is not None:
        if interleave is not None:
            raise ValueError("interleave: expected None with plan, which says who holds what, got a number")
        if plan.page_size != size:
            raise ValueError(f"plan: expected one of pages of {size} tokens, got one of pages of {plan.page_size}")
        if not np.array_equal(plan.seq_lens, lengths):
            raise ValueError(f"plan: expected one of seq_lens {shown(lengths.tolist())}, got one of {shown(plan.seq_lens.tolist())}")
        return plan.own_pages()
    if interleave is None:
        if agreement.size > 1:
            raise ValueError("interleave: expected a number of tokens where plan is not given, got None")
        turn = max(1, int(used.max(initial=1)))
    else:
        tokens = _arrays.integer(interleave, "interleave")
        if tokens < 1 or tokens % size:
            raise ValueError(f"interleave: expected a multiple of the block size {size}, got {tokens}")
        turn = tokens // size
    request = np.arange(len(used)).repeat(used)
    block = np.arange(len(request)) - (np.cumsum(used) - used)[request]
    mine = block // turn % agreement.size == agreement.rank
    return request[mine], block[mine]


def _choose(
    numbers: ndarray, scores: ndarray, used: ndarray, wanted: ndarray, forced: tuple[ndarray, ndarray], width: int, ascending: bool
) -> tuple[ndarray, ndarray]:
    """The choice among all candidates: sinks, the newest blocks, and the best of the others."""
    sink, recent = forced
    batch, heads = numbers.shape[:2]
    per_row = [x[:, None, None] for x in (used, wanted, sink, recent)]
    used, wanted, sink, recent = per_row
    free = (numbers >= sink) & (numbers < used - recent)
    order = np.lexsort((numbers, np.where(np.isnan(scores), np.inf, -(scores + 0.0)), np.isnan(scores), ~free), axis=-1)
    best = np.take_along_axis(numbers, order, axis=-1)
    place = np.arange(width)
    rank = np.broadcast_to(np.clip(place - sink, 0, max(best.shape[2] - 1, 0)), (batch, heads, width))
    chosen = np.take_along_axis(best, rank, axis=-1) if best.shape[2] else np.zeros((batch, heads, width), np.int32)
    chosen = np.where(place < sink, place, np.where(place >= wanted - recent, used - wanted + place, chosen))
    chosen = np.where(place < wanted, chosen, _NOBODY).astype(np.int32)
    if ascending:
        chosen.sort(axis=-1)
    counts = np.broadcast_to(wanted[:, :, 0], (batch, heads)).astype(np.int32)
    return np.where(chosen == _NOBODY, np.int32(-1), chosen), counts
