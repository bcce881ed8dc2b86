"""The plan of context-parallel attention: which rank holds which tokens, which rows it computes, and how many bytes travel for that."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy import ndarray

from .._arrays import choice, integer, number
from .._names import Layout
from ._comm import Agreement, communicator, digest, spans_hosts
from ._dispatch import DISPATCHES
from ._lazy import computed_once
from ._problem import Problem
from ._routes import Routes, best_of, made
from ._rows import RowCall

if TYPE_CHECKING:
    from .._types import ArrayLike, DType, Integers

__all__ = ["ContextParallelPlan", "Prediction"]

MOST_RANKS = 1 << 16
MOST_LINES = 32  # of a picture


class Prediction(NamedTuple):
    """The prediction of `ContextParallelPlan.predict` for one forward call. Times are in seconds."""

    compute: float
    """Arithmetic of the busiest rank."""
    transfer: float
    """Transfer of the bytes in or out, whichever are more, of the rank that has the most."""
    exposed: float
    """Time of the slowest rank beyond the arithmetic of the busiest."""
    total: float
    """Time of the slowest rank."""
    efficiency: float
    """Arithmetic of a rank if all ranks had the same share, divided by `total`."""


class ContextParallelPlan:
    """Which rank holds which tokens, computes which rows, and needs which blocks of keys.

    A plan is made from the sizes, rules and block lists of the call over the whole sequence, which are the same on all ranks. It serves
    every layer with the same sizes, rules and lists. Making a plan is collective: where ranks disagree, all raise the same error.

    Parameters
    ----------
    sabi : array_like of int, optional
        Block lists of the whole sequence, ``(B or 1; H, Hkv or 1; ceil(s_q / block_shape[0]); W)``: see
        `blitz_attn.block_sparse_attention`. None: every block that the token rules allow is listed.
    s_q, s_kv : int, optional
        Numbers of query and key tokens of the whole sequence. `s_kv` defaults to `s_q`. Layout TND has `cu_seqlens_q` instead.
    comm : communicator, optional
        Any object with the methods of ``mpi4py.MPI.Comm``. Default: ``MPI.COMM_WORLD``.
    size, rank : int, optional
        With `size`, the plan is made without MPI, for `size` ranks, as rank `rank` (default: 0) would make it. Such a plan says how many
        bytes would be sent, but cannot be used for a call.
    dispatch : {"auto", "cut", "zigzag", "contiguous", "items"}
        Which rows a rank computes. "cut": a run of equal work, whose queries and keys it holds. "zigzag": one run from the front and one
        from the back. "contiguous": a run of equally many rows. "items": rows of one or a few KV heads, of equal work; ranks hold equally
        many tokens, and queries and results travel. "auto": the dispatch with the least ``predict(link, rate).total``; among dispatches
        with nearly equal totals, the first in this order.
    batch, num_heads, num_kv_heads, head_dim, head_dim_v : int, optional
        Sizes of q, k and v. `num_kv_heads` defaults to `num_heads`, `head_dim_v` to `head_dim`, `batch` to 1.
    dtype : str or dtype
        The dtype of q, k and v: float32, float16, bfloat16 or float64.
    block_shape, layout, causal, window, q_lens, kv_lens, cu_seqlens_q, cu_seqlens_kv
        As in `blitz_attn.block_sparse_attention`, for the whole sequence. `cu_seqlens_kv` defaults to `cu_seqlens_q`.
    link : float
        Bytes per second that a rank can send and receive, for "auto". The default is 10 Gbit/s.
    rate : float
        Floating point operations per second of a rank, for "auto".

    Attributes
    ----------
    comm : communicator or None
        None for a plan that was made with `size`.
    size, rank : int
        Number of ranks, and the rank that this plan is of.
    dispatch : str
        The dispatch in use.
    q_ranges, kv_ranges : list of (int, int)
        Query and key tokens that this rank holds: stretches of the axis of tokens, in the order in which its shards hold them.
    loads : numpy.ndarray
        (size,): pairs of a query and a key that each rank computes, in the blocks that its rows see.
    balance : float
        Load of the busiest rank divided by the mean.
    bytes : numpy.ndarray
        (size, size) of int64: the exact number of bytes that the first rank sends to the second in one forward call.
    backward_bytes : numpy.ndarray
        Likewise for a backward call without `dlse`. Gradients of keys and values come back in float32 (float64 for float64).
    all_gather_bytes : numpy.ndarray
        (size,) of int64: bytes of all keys and values that each rank does not hold. An all-gather would bring these bytes.

    Raises
    ------
    TypeError, ValueError
        An argument of the wrong kind or out of range, or not the same on all ranks. Every rank raises the error.
    ImportError
        mpi4py or an MPI library is missing, and `size` was not given.

    See Also
    --------
    context_parallel_attention : runs a plan.

    Notes
    -----
    Where queries and keys have the same lengths, a rank holds the keys of its queries; else keys are held in equal runs of whole blocks.

    With "cut", where rows are too few for equal work, neighbouring ranks share the KV heads of the row of blocks at their border; queries
    and results of that row travel.

    Examples
    --------
    >>> from blitz_attn import sabi
    >>> from blitz_attn.distributed import ContextParallelPlan
    >>> lists = sabi.sliding_window(65536, window=(4096, 0))
    >>> plan = ContextParallelPlan(lists, 65536, size=8, num_heads=8, head_dim=128, causal=True, window=(4096, 0))
    >>> plan.dispatch, plan.balance < 1.02
    ('cut', True)
    >>> int(plan.bytes[:, 1].sum()), int(plan.all_gather_bytes[1])  # what rank 1 receives, and what an all-gather would bring
    (33554432, 471859200)
    """

    comm: Any
    size: int
    rank: int

    def __init__(
        self,
        sabi: ArrayLike | None = None,
        s_q: int | None = None,
        s_kv: int | None = None,
        *,
        comm: Any = None,
        size: int | None = None,
        rank: int | None = None,
        dispatch: str = "auto",
        batch: int | None = None,
        num_heads: int = 1,
        num_kv_heads: int | None = None,
        head_dim: int = 128,
        head_dim_v: int | None = None,
        dtype: DType = "float32",
        block_shape: tuple[int, int] | None = None,
        layout: Layout = "BNSD",
        causal: bool = False,
        window: tuple[int, int] | None = None,
        q_lens: Integers | None = None,
        kv_lens: Integers | None = None,
        cu_seqlens_q: Integers | None = None,
        cu_seqlens_kv: Integers | None = None,
        link: float = 1.25e9,
        rate: float = 1e12,
    ) -> None:
        given = locals()

        def problem() -> Problem:
            return Problem(**{name: given[name] for name in inspect.signature(Problem).parameters})

        def options() -> tuple[str, float, float]:
            return choice(dispatch, "dispatch", ("auto", *DISPATCHES)), _positive(link, "link"), _positive(rate, "rate")

        def routes(whole: Problem) -> Routes:
            wanted, *speeds = options()
            if wanted == "auto" and self.size > 1:
                return best_of(whole, self.size, *speeds)
            return made(whole, "cut" if wanted == "auto" else wanted, self.size)

        if size is not None:
            self.comm = None
            self.size, self.rank = _size_and_rank(comm, size, rank)
            self._routes = routes(problem())
        else:
            self.comm = communicator(comm)
            self.size, self.rank = self.comm.Get_size(), self.comm.Get_rank()
            with Agreement(self.comm, "ContextParallelPlan") as agreement:
                if rank is not None:
                    raise ValueError("rank: expected none without size, got one")
                whole = problem()
                for name, value in whole.description().items():
                    agreement.same(name, value)
                agreement.same("dispatch", options())
            with Agreement(self.comm, "ContextParallelPlan") as agreement:
                self._routes = routes(whole)
                agreement.same("plan", self._routes.cuts())
        self._problem = self._routes.problem
        self._calls: dict[tuple[int, int, int], RowCall] = {}  # of pieces of this rank, which all layers share
        self.dispatch = self._routes.dispatch
        self.loads, self.balance = self._routes.loads, self._routes.balance
        self.q_ranges = self._routes.q_held.of(self.rank)
        self.kv_ranges = self._routes.kv_held.of(self.rank)

    @computed_once
    def bytes(self) -> ndarray:
        return self._routes.bytes()

    @computed_once
    def backward_bytes(self) -> ndarray:
        return self._routes.backward_bytes()

    @computed_once
    def all_gather_bytes(self) -> ndarray:
        return self._routes.all_gather_bytes()

    @computed_once
    def _key(self) -> int:
        """The number by which ranks compare their plans in each call."""
        return digest(list(self._problem.description().values()), self._routes.cuts())

    @computed_once
    def _spans_hosts(self) -> bool:
        return spans_hosts(self.comm)

    def predict(self, link: float, rate: float) -> Prediction:
        """Times of one forward call by a simple model.

        A rank computes at `rate`, and sends and receives at `link`. Its stages, one per KV head, follow one another. The arithmetic of a
        stage overlaps with the transfers of the next. So the longer of both times, arithmetic or transfers, counts in full, and the shorter
        time counts for one stage only. Latency, contention and stragglers are not in the model.

        Parameters
        ----------
        link : float
            Bytes per second that a rank can send, and receive at the same time.
        rate : float
            Floating point operations per second of a rank.

        Returns
        -------
        Prediction
            Times in seconds, and the efficiency.

        Raises
        ------
        TypeError, ValueError
            `link` or `rate` is not a positive number.

        Examples
        --------
        >>> from blitz_attn.distributed import ContextParallelPlan
        >>> plan = ContextParallelPlan(None, 8192, size=2, num_heads=8, causal=True, dispatch="zigzag")
        >>> plan.predict(link=1.25e9, rate=1e12).efficiency > 0.8
        True
        """
        compute, transfer, both = self._routes.times(_positive(link, "link"), _positive(rate, "rate"))
        total, busiest = float(both.max()), float(compute.max())
        efficiency = float(compute.mean()) / total if total > 0 else 1.0
        return Prediction(busiest, float(transfer.max()), total - busiest, total, efficiency)

    def picture(self) -> str:
        """Text picture: one line per rank with its tokens, its load and the bytes that it receives.

        With more than 32 ranks, there is a line for every second, every third, ... rank, so that there are at most 32 lines.

        Returns
        -------
        str
            Lines without trailing blanks. A bar shows the load of a rank; a full bar is the load of the busiest rank.

        Examples
        --------
        >>> from blitz_attn.distributed import ContextParallelPlan
        >>> print(ContextParallelPlan(None, 1024, size=2, head_dim=64, causal=True, dispatch="contiguous").picture())
        contiguous, 2 ranks, balance 1.44, 262 kB sent, 0.50 of an all-gather
        rank 0  ███████            load 0.56  receives      0 B  queries 0:512
        rank 1  ██████████████████ load 1.44  receives   262 kB  queries 512:1024
        """
        received, every = self.bytes.sum(axis=0), int(self.all_gather_bytes.sum())
        share = f", {received.sum() / every:.2f} of an all-gather" if every else ""
        lines = [f"{self.dispatch}, {_ranks(self.size)}, balance {self.balance:.2f}, {_bytes(int(received.sum()))} sent{share}"]
        mean, most = float(self.loads.mean()) or 1.0, float(self.loads.max()) or 1.0
        for rank in range(0, self.size, -(-self.size // MOST_LINES)):
            bar = "█" * round(18 * self.loads[rank] / most)
            ranges = " ".join(f"{a}:{b}" for a, b in self._routes.q_held.of(rank)) or "none"
            load = f"load {self.loads[rank] / mean:.2f}  receives {_bytes(int(received[rank])):>8}"
            lines.append(f"rank {rank:<{len(str(self.size - 1))}}  {bar:<18} {load}  queries {ranges}")
        return "\n".join(lines)


def _size_and_rank(comm: Any, size: Any, rank: Any) -> tuple[int, int]:
    """The number of ranks and the rank of a plan without a communicator."""
    if comm is not None:
        raise ValueError("comm: expected none with size, got a communicator")
    count, own = integer(size, "size"), 0 if rank is None else integer(rank, "rank")
    if not 1 <= count <= MOST_RANKS:
        raise ValueError(f"size: expected 1 to {MOST_RANKS} ranks, got {count}")
    if not 0 <= own < count:
        raise ValueError(f"rank: expected 0 to {count - 1}, got {own}")
    return count, own


def _positive(x: Any, name: str) -> float:
    value = number(x, name)
    if not 0 < value < np.inf:
        raise ValueError(f"{name}: expected a positive number, got {value}")
    return value


def _ranks(count: int) -> str:
    return f"{count} rank{'s' * (count != 1)}"


def _bytes(count: int) -> str:
    size, unit = float(count), "B"
    for larger in ("kB", "MB", "GB", "TB", "PB"):
        if size < 1000:
            break
        size, unit = size / 1000, larger
    return f"{size:.0f} {unit}" if unit == "B" or size >= 100 else f"{size:.3g} {unit}"
