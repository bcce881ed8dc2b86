"""Native sparse attention over a sequence that is spread over ranks: by KV heads, and by rows where whole heads are uneven work."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, Unpack, overload

import numpy as np
from numpy import ndarray

from .. import _arrays
from .._arrays import choice, flag
from .._floats import floats
from .._nsa.arrays import Reals
from .._nsa.call import Call, Options, Room, checked, compress, run
from .._nsa.rules import Rules
from .._nsa.sequences import Piece as Part
from .._nsa.sequences import Sequences
from ..nsa import PIECE_ELEMENTS
from ._comm import Agreement, communicator, has_threads, spans_hosts
from ._dispatch import cut_of, items
from ._exchange import Piece, Stages
from ._problem import Problem
from ._routes import Routes

if TYPE_CHECKING:
    from .._options import DistributedNSAOptions
    from .._types import Array, Kind

__all__ = ["nsa"]

ROWS = 128  # blocks of this many queries, rounded up to whole tiles, go to ranks


@overload
def nsa(q: Kind, k: Array, v: Array, **options: Unpack[DistributedNSAOptions]) -> Kind: ...
@overload
def nsa(q: Array, k: Array, v: Array, **options: Unpack[DistributedNSAOptions]) -> ndarray: ...
def nsa(
    q: Any,
    k: Any,
    v: Any,
    *,
    comm: Any = None,
    compress_block_size: int = 64,
    num_selected_blocks: int = 16,
    window_size: int = 512,
    w_k_compress: Any = None,
    w_v_compress: Any = None,
    gate_proj_weight: Any = None,
    gates: Any = None,
    causal: bool = True,
    scale: float | None = None,
    q_tile_size: int = 256,
    num_cmp_selected_blocks: int | None = None,
    mode: str = "paper",
    compress_stride: int | None = None,
    select_block_size: int | None = None,
    init_blocks: int = 1,
    local_blocks: int = 2,
    comm_type: str = "auto",
    overlap: bool = True,
    dtype: Any = None,
    num_threads: int | None = None,
) -> Any:
    """`blitz_attn.nsa.nsa` over sequences whose tokens are spread over the ranks of a communicator. Collective.

    The result is bit-identical to that of one call over the whole sequence, for any number of ranks.

    Parameters
    ----------
    q, k, v : array
        This rank's tokens of ``(B, N, H, D)``, ``(B, N, Hkv, D)`` and ``(B, N, Hkv, Dv)``. Rank 0 has the first tokens, rank 1 the tokens
        that follow, and so on. The caller decides how many tokens each rank has.
    comm : communicator, optional
        Any object with the methods of ``mpi4py.MPI.Comm``. Default: ``MPI.COMM_WORLD``.
    gates : array, optional
        This rank's tokens of ``(B, N, H, 3)``, given by all ranks or by none.
    comm_type, overlap
        As in `context_parallel_attention`, but without the values "all_gather" and "thread".
    compress_block_size, num_selected_blocks, window_size, w_k_compress, w_v_compress, gate_proj_weight, causal, scale, q_tile_size
        As in `blitz_attn.nsa.nsa`, the same on all ranks, weights included.
    num_cmp_selected_blocks, mode, compress_stride, select_block_size, init_blocks, local_blocks, dtype, num_threads
        As in `blitz_attn.nsa.nsa`.

    Returns
    -------
    out : array
        This rank's tokens of the result, of the dtype and kind of `q`.

    Raises
    ------
    TypeError, ValueError
        An argument of any rank is of the wrong kind or shape, or differs between ranks although it must not. All ranks raise the error,
        and no tokens have been sent.

    See Also
    --------
    blitz_attn.nsa.nsa : the operation.

    Notes
    -----
    A rank computes runs of queries of one or a few KV heads, such that all ranks have about equal work. It receives the queries of its
    runs, and the keys and values of their KV heads: in causal calls of mode "paper" up to the last query of a run, otherwise all of them.
    Results go back. If there are at most as many ranks as KV heads, runs end where heads end, as far as that keeps the work even.

    Examples
    --------
    One rank, which needs no MPI. Under ``mpirun`` leave `comm` out:

    >>> import numpy as np
    >>> from blitz_attn.distributed import Alone, nsa
    >>> q, k, v = (np.ones((1, 256, heads, 64), np.float32) for heads in (4, 2, 2))
    >>> nsa(q, k, v, comm=Alone(), window_size=64).shape
    (1, 256, 4, 64)
    """
    given = locals()
    options = Options(**{field.name: given.get(field.name) for field in fields(Options) if field.name != "gates"}, gates=None)
    comm = communicator(comm)
    size = int(comm.Get_size())
    with Agreement(comm, "nsa") as agreement:
        own = checked(q, k, v, replace(options, gates=gates))
        wanted, ahead = choice(comm_type, "comm_type", ("auto", "p2p", "a2a")), flag(overlap, "overlap")
        for name, array in (("q", own.q), ("k", own.k), ("v", own.v)):
            agreement.same(name, ("tokens of shape", own.common.kind, array.shape[:1], array.shape[2:]))
        for field in fields(options):
            if field.name not in ("dtype", "num_threads"):
                agreement.same(field.name, _plain(getattr(options, field.name), field.name))
        agreement.same("gates", "none" if own.gates.array is None else "given")
        agreement.same("comm_type", (wanted, ahead))
    counts = np.empty(size, np.int64)
    comm.Allgather(np.array([own.q.shape[1]], np.int64), counts)
    with Agreement(comm, "nsa"):
        whole = _whole(own, options, int(counts.sum()))
        routes = _routes(whole, counts) if whole.q.size else None
        family = _arrays.family_of(q)
        out = family.empty((*own.q.shape[:-1], own.v.shape[-1]), own.common.kind)
        result = floats(out, "out", own.common.kind, True)[0]

    if routes is None:  # no tokens on any rank
        return _arrays.finished(out, None, family)
    inputs = [own.q] if own.gates.array is None else [own.q, own.gates.array]
    thread = ahead and spans_hosts(comm) and has_threads()
    stages = Stages(
        routes, comm, [x.swapaxes(1, 2) for x in (own.k, own.v)], [x.swapaxes(1, 2) for x in inputs], [result.swapaxes(1, 2)],
        comm_type=wanted, thread=thread, ahead=ahead,
    )  # fmt: skip

    def compute(piece: Piece, windows: list[ndarray]) -> None:
        _run(whole, piece, *(x.swapaxes(1, 2) for x in windows))

    stages.run(compute)
    return _arrays.finished(out, None, family)


def _plain(value: Any, name: str) -> Any:
    """An option as ranks compare it."""
    return value if value is None or isinstance(value, (bool, int, float, str)) else _arrays.host(value, name)[0]


def _whole(own: Call, options: Options, tokens: int) -> Call:
    """The call over the whole sequence, whose arrays take no memory and are never read."""
    q, k, v = (np.broadcast_to(np.zeros(x.shape[-1], x.dtype), (x.shape[0], tokens, *x.shape[2:])) for x in (own.q, own.k, own.v))
    return checked(q, k, v, replace(options, dtype=own.common.kind))


def _routes(whole: Call, counts: ndarray) -> Routes:
    """Routes by the dispatch "items", where rank r holds a run of ``counts[r]`` tokens."""
    rules, (batch, tokens, heads, dim) = whole.rules, whole.q.shape
    kv_heads, dim_v = whole.v.shape[-2:]
    rows = rules.tile * max(1, -(-ROWS // rules.tile))
    problem = Problem(
        None, max(1, tokens), None, batch=batch, num_heads=heads, num_kv_heads=kv_heads, head_dim=dim, head_dim_v=dim_v,
        dtype=whole.common.kind, block_shape=(rows, ROWS), layout="BSND", causal=_looks_back(rules),
    )  # fmt: skip
    first = problem.row_at[:-1]
    seen = first / rules.stride if rules.causal else np.full(len(first), tokens / rules.stride)
    work = np.diff(problem.row_at) * (seen + rules.count * rules.select + whole.window)
    size = len(counts)
    held = cut_of(np.concatenate([[0], np.cumsum(counts)]), np.arange(size))
    return Routes(problem, items(work[None], kv_heads, size), size, held)


def _looks_back(rules: Rules) -> bool:
    """Whether no result depends on a later token."""
    return rules.causal and rules.by_query


def _run(whole: Call, piece: Piece, k: ndarray, v: ndarray) -> None:
    """Computes the rows of a piece, some at a time."""
    head = piece.head
    q, *gates = (x.swapaxes(1, 2) for x in piece.inputs)
    (out,) = (x.swapaxes(1, 2) for x in piece.outputs)
    batch, tokens, group, _ = q.shape
    heads = slice(head * group, (head + 1) * group)
    weights = [Reals(None if w.array is None else w.array[part], w.kind) for w, part in (
        (whole.w_k, slice(head, head + 1)), (whole.w_v, slice(head, head + 1)), (whole.w_gate, heads),
    )]  # fmt: skip
    made = [np.empty((*whole_x.shape[:2], 1, x.shape[-1]), whole_x.dtype) for whole_x, x in ((whole.k_cmp, k), (whole.v_cmp, v))]
    of_head = replace(whole, k=k, v=v, k_cmp=made[0], v_cmp=made[1], w_k=weights[0], w_v=weights[1], w_gate=weights[2])
    compress(of_head)
    most = max(1, PIECE_ELEMENTS // (out.shape[-1] * group * whole.rules.tile)) * whole.rules.tile
    room = Room(None)
    for b in range(batch):
        one = slice(b, b + 1)
        for first in range(0, tokens, most):
            stretch = slice(first, min(first + most, tokens))
            part = replace(
                of_head, q=q[one, stretch], k=k[one], v=v[one], k_cmp=made[0][one], v_cmp=made[1][one],
                gates=Reals(gates[0][one, stretch] if gates else None, whole.gates.kind),
                sequences=Sequences.stretch(piece.begin + first, whole.q.shape[1]),
            )  # fmt: skip
            place = Part((one, stretch), (one,), (one,), (heads, slice(0, 1)), ((one,), slice(None)), part.sequences)
            run(part, room.results(part, place, 1), out[one, stretch])
