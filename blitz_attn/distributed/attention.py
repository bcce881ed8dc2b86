"""Context-parallel attention: the calls of `blitz_attn.block_sparse`, with queries, keys and values spread over ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

import numpy as np
from numpy import ndarray

from .. import _arrays
from .._arrays import choice, flag, number
from .._floats import floats, real_of
from .._formats import converted
from ..block_sparse import block_sparse_attention, block_sparse_attention_backward
from ._comm import Agreement, has_threads, import_mpi
from ._exchange import COMM_TYPES, Piece, Stages, Sums
from ._rows import RowCall
from .plan import ContextParallelPlan

if TYPE_CHECKING:
    from .._options import ContextOptions
    from .._types import Array, ArrayLike, Kind

__all__ = ["context_parallel_attention", "context_parallel_attention_backward", "dispatch", "undispatch"]


# ---- What callers give ----------------------------------------------------------------------------------------------


class _Call:
    """A call on one rank: its plan, its options and its shards as (entries, heads, tokens, dims)."""

    def __init__(self, plan: Any, comm: Any, name: str) -> None:
        if not isinstance(plan, ContextParallelPlan):
            raise TypeError(f"plan: expected a ContextParallelPlan, got {type(plan).__name__}")
        if plan.comm is None:
            raise ValueError("plan: expected one that was made with a communicator, got one that was made with size")
        self.plan, self.problem, self.routes = plan, plan._problem, plan._routes
        self.agreement = Agreement(plan.comm, name)
        self._comm = comm
        self.bits = "bfloat16" if self.problem.dtype == "bfloat16" else None  # what 16-bit integers hold
        self.tokens = [sum(b - a for a, b in ranges) for ranges in (plan.q_ranges, plan.kv_ranges)]

    def read(self, *, scale: Any, comm_type: Any, overlap: Any, dtype: Any, num_threads: Any) -> None:
        """Checks the arguments that forward and backward calls share. Call this method, and all checks of arrays, inside the agreement."""
        if self._comm is not None and self._comm != self.plan.comm:
            raise ValueError("comm: expected the communicator that the plan was made with, got another")
        self.scale = None if scale is None else number(scale, "scale")
        self.dtype, self.num_threads = dtype, num_threads
        wanted = choice(comm_type, "comm_type", COMM_TYPES)
        if overlap != "thread":
            overlap = flag(overlap, "overlap")
        elif not has_threads():
            raise ValueError('overlap: expected MPI initialised with MPI_THREAD_MULTIPLE for "thread", got a lower level')
        self.overlap = overlap
        for name, value in (("plan", self.plan._key), ("scale", self.scale), ("comm_type", wanted), ("overlap", overlap)):
            self.agreement.same(name, value)
        self.comm_type = wanted

    def shard(self, x: Any, name: str, *, keys: bool = False, values: bool = False, written: bool = False) -> ndarray:
        """A shard of queries, keys, values or results."""
        array, kind = floats(x, name, self.dtype, written)
        if kind != self.problem.dtype:
            raise TypeError(f"{name}: expected {self.problem.dtype} as the plan says, got {kind}")
        heads = self.problem.kv_heads if keys else self.problem.heads
        dims = self.problem.head_dim_v if values else self.problem.head_dim
        expected = self.shape(self.tokens[keys], heads, dims)
        if array.shape != expected:
            raise ValueError(f"{name}: expected shape {expected}, this rank's shard in layout {self.problem.layout}, got {array.shape}")
        return by_head(array, self.problem.layout, heads)

    def lse_shard(self, x: Any, name: str, written: bool = False) -> ndarray:
        """A shard of the log-sum-exp, with an axis of length 1 at its end."""
        array, kind = floats(x, name, None, written)
        if kind != real_of(self.problem.dtype):
            raise TypeError(f"{name}: expected {real_of(self.problem.dtype)}, got {kind}")
        if array.shape != self.lse_shape():
            raise ValueError(f"{name}: expected shape {self.lse_shape()}, this rank's shard, got {array.shape}")
        return (array.T[None] if self.problem.layout == "TND" else array)[..., None]

    def shape(self, tokens: int, heads: int, dims: int) -> tuple[int, ...]:
        batch, layout = self.problem.batch, self.problem.layout
        shapes = {"BNSD": (batch, heads, tokens, dims), "BSND": (batch, tokens, heads, dims), "BSH": (batch, tokens, heads * dims)}
        return shapes.get(layout, (tokens, heads, dims))

    def lse_shape(self) -> tuple[int, ...]:
        p = self.problem
        return (self.tokens[0], p.heads) if p.layout == "TND" else (p.batch, p.heads, self.tokens[0])

    # ---- Running ------------------------------------------------------------------------------------------------------

    def stages(self, keys: list[ndarray], inputs: list[ndarray], outputs: list[ndarray]) -> Stages:
        thread = self.overlap == "thread" or bool(self.overlap and self.plan._spans_hosts and has_threads())
        return Stages(
            self.routes, self.plan.comm, keys, inputs, outputs, comm_type=self.comm_type, thread=thread, ahead=bool(self.overlap)
        )  # fmt: skip

    def rows(self, piece: Piece) -> RowCall:
        calls = self.plan._calls
        key = piece.head % self.problem.classes, piece.first, piece.end
        if key not in calls:
            calls[key] = RowCall(self.problem, *key)
        return calls[key]

    def caps(self, sinks: Any, softcap: Any) -> dict[str, Any]:
        """The sinks and the softcap, checked. To be called inside the agreement."""
        p = self.problem
        given: dict[str, Any] = {"softcap": None if softcap is None else number(softcap, "softcap") or None, "sinks": None}
        if sinks is not None:
            given["sinks"] = _arrays.float32_numbers(sinks, "sinks")
        nothing = np.empty((0, p.heads, 0, 1), "float64" if p.dtype == "float64" else "float32")
        block_sparse_attention(nothing, nothing, nothing, **given)  # refuses what any call would refuse
        for name, value in given.items():
            self.agreement.same(name, value if name == "softcap" or value is None else tuple(value.tolist()))
        return given

    def options(self) -> dict[str, Any]:
        return {"scale": self.scale, "dtype": self.bits, "num_threads": self.num_threads}


def by_head(array: ndarray, layout: str, heads: int) -> ndarray:
    """An array of a layout as (entries, heads, tokens, dims): a view."""
    if layout == "BSH":
        array = array.reshape(*array.shape[:2], heads, array.shape[2] // heads)
    return array if layout == "BNSD" else (array[None] if layout == "TND" else array).swapaxes(1, 2)


@overload
def context_parallel_attention(
    q: Kind, k: Array, v: Array, plan: ContextParallelPlan, *, return_lse: Literal[True] = True, sinks: ArrayLike | None = None,
    **options: Unpack[ContextOptions],
) -> tuple[Kind, Kind]: ...  # fmt: skip
@overload
def context_parallel_attention(
    q: Kind, k: Array, v: Array, plan: ContextParallelPlan, *, return_lse: Literal[False], sinks: ArrayLike | None = None,
    **options: Unpack[ContextOptions],
) -> Kind: ...  # fmt: skip
@overload
def context_parallel_attention(
    q: Array, k: Array, v: Array, plan: ContextParallelPlan, *, return_lse: Literal[True] = True, sinks: ArrayLike | None = None,
    **options: Unpack[ContextOptions],
) -> tuple[ndarray, ndarray]: ...  # fmt: skip
@overload
def context_parallel_attention(
    q: Array, k: Array, v: Array, plan: ContextParallelPlan, *, return_lse: Literal[False], sinks: ArrayLike | None = None,
    **options: Unpack[ContextOptions],
) -> ndarray: ...  # fmt: skip
@overload
def context_parallel_attention(
    q: Array, k: Array, v: Array, plan: ContextParallelPlan, *, return_lse: bool, sinks: ArrayLike | None = None,
    **options: Unpack[ContextOptions],
) -> Any: ...  # fmt: skip
def context_parallel_attention(
    q: Any,
    k: Any,
    v: Any,
    plan: ContextParallelPlan,
    *,
    comm: Any = None,
    scale: float | None = None,
    sinks: Any = None,
    softcap: float | None = None,
    comm_type: str = "auto",
    overlap: bool | str = True,
    return_lse: bool = True,
    dtype: Any = None,
    num_threads: int | None = None,
) -> Any:
    """Block-sparse attention over a sequence that is spread over the ranks of a communicator. Collective.

    The results are, bit for bit, those of one call of `blitz_attn.block_sparse_attention` over the whole sequence, for any number of ranks.
    For each KV head, one rank computes a row of blocks in one call, after it has received all keys that the row lists: nothing is merged.

    Parameters
    ----------
    q : array
        This rank's shard of the queries: the tokens of `plan.q_ranges`, in the layout of the plan. `dispatch` takes a shard from a whole
        array.
    k, v : array
        This rank's shards of the keys and values: the tokens of `plan.kv_ranges`.
    plan : ContextParallelPlan
        Made by all ranks for the call over the whole sequence. It holds the block lists and the rules.
    comm : communicator, optional
        The communicator of the plan. It is only checked.
    scale : float, optional
        Factor of ``q k^T``. Default: ``1 / sqrt(D)``.
    sinks, softcap
        See `blitz_attn.block_sparse_attention`; the same on all ranks. Gradients need the same `softcap`, but not the sinks, which
        the log-sum-exp includes.
    comm_type : {"auto", "p2p", "all_gather", "a2a"}
        How keys and values travel. "p2p": messages between pairs of ranks, of the blocks that the receiver needs. "a2a": the same bytes in
        one collective per stage. "all_gather": all keys and values to all ranks. "auto": "p2p" up to 64 ranks, then "a2a".
    overlap : bool or "thread"
        Whether the keys and values of a KV head travel while the previous head is computed. If ranks run on several machines and MPI allows
        calls from several threads, a thread then waits for them. With "thread", there is such a thread even if all ranks run on one
        machine.
    return_lse : bool
        Also return the log-sum-exp.
    dtype : str or dtype, optional
        ``"bfloat16"`` says that uint16 arrays hold bfloat16 bits. Otherwise only checked.
    num_threads : int, optional
        Threads of this rank's kernels. The result does not depend on it.

    Returns
    -------
    out : array
        Results of this rank's queries, in the layout and dtype of `q`, and the same kind of array.
    lse : array
        With `return_lse`: ``(B, H, tokens)``, for layout TND ``(tokens, H)``; float32 (float64 for float64 inputs).

    Raises
    ------
    TypeError, ValueError
        An argument of any rank is of the wrong kind or shape, or differs between ranks although it must not. All ranks raise the error,
        and no tokens have been sent.

    See Also
    --------
    ContextParallelPlan : decides what travels and who computes what.
    context_parallel_attention_backward : its gradients.

    Notes
    -----
    A rank reserves addresses for the keys of the whole sequence, and each block that it receives goes to its own place there. Only blocks
    that arrive use memory, those of two KV heads at a time. The plan keeps this memory for its next call.

    Examples
    --------
    One rank, which needs no MPI. Under ``mpirun`` leave `comm` out:

    >>> import numpy as np
    >>> import blitz_attn
    >>> from blitz_attn.distributed import Alone, ContextParallelPlan, context_parallel_attention, dispatch
    >>> plan = ContextParallelPlan(None, 1024, comm=Alone(), num_heads=2, head_dim=64, causal=True)
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = (rng.standard_normal((1, 2, 1024, 64), dtype=np.float32) for _ in range(3))
    >>> out, lse = context_parallel_attention(*(dispatch(x, plan) for x in (q, k, v)), plan)
    >>> bool((out == blitz_attn.block_sparse_attention(q, k, v, causal=True)).all())
    True
    """
    call = _Call(plan, comm, "context_parallel_attention")
    with call.agreement:
        call.read(scale=scale, comm_type=comm_type, overlap=overlap, dtype=dtype, num_threads=num_threads)
        queries, keys, values = call.shard(q, "q"), call.shard(k, "k", keys=True), call.shard(v, "v", keys=True, values=True)
        with_lse = flag(return_lse, "return_lse")
        family, p = _arrays.family_of(q), call.problem
        caps = call.caps(sinks, softcap)
        out = family.empty(call.shape(call.tokens[0], p.heads, p.head_dim_v), p.dtype)
        lse = family.empty(call.lse_shape(), real_of(p.dtype))
        results = [by_head(_arrays.host(out, "out", call.bits, True)[0], p.layout, p.heads), call.lse_shard(lse, "lse", True)]

    def compute(piece: Piece, windows: list[ndarray]) -> None:
        rows = call.rows(piece)
        one_q, (one_k, one_v) = rows.given(piece.inputs[0]), (rows.given(x, keys=True) for x in windows)
        one_out, one_lse = (rows.given(x) for x in piece.outputs)
        group = p.heads // p.kv_heads
        mine = caps if caps["sinks"] is None else caps | {"sinks": caps["sinks"][piece.head * group : (piece.head + 1) * group]}
        block_sparse_attention(
            one_q, one_k, one_v, return_lse=True, out=(one_out, one_lse[..., 0]), **rows.arguments, **call.options(), **mine
        )  # fmt: skip

    if plan.size == 1:
        block_sparse_attention(q, k, v, return_lse=True, out=(out, lse), **p.call(), **call.options(), **caps)
    else:
        call.stages([keys, values], [queries], results).run(compute)
    out = _arrays.finished(out, None, family)
    return (out, _arrays.finished(lse, None, family)) if with_lse else out


@overload
def context_parallel_attention_backward(
    dout: Array, q: Kind, k: Array, v: Array, out: Array, lse: Array, plan: ContextParallelPlan, *, dlse: Array | None = None,
    **options: Unpack[ContextOptions],
) -> tuple[Kind, Kind, Kind]: ...  # fmt: skip
@overload
def context_parallel_attention_backward(
    dout: Array, q: Array, k: Array, v: Array, out: Array, lse: Array, plan: ContextParallelPlan, *, dlse: Array | None = None,
    **options: Unpack[ContextOptions],
) -> tuple[ndarray, ndarray, ndarray]: ...  # fmt: skip
def context_parallel_attention_backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    plan: ContextParallelPlan,
    *,
    dlse: Any = None,
    comm: Any = None,
    scale: float | None = None,
    softcap: float | None = None,
    comm_type: str = "auto",
    overlap: bool | str = True,
    dtype: Any = None,
    num_threads: int | None = None,
) -> tuple[Any, Any, Any]:
    """Gradients of `context_parallel_attention`, each on the rank that holds its tokens. Collective.

    Keys and values travel once more as in the forward call. Their gradients are summed in float32 (float64 for float64): each rank sends
    its part of the sums to the rank that holds the keys, which adds the parts in a fixed order and rounds once.

    Parameters
    ----------
    dout : array
        Gradient of the loss with respect to this rank's `out`, of its shape and dtype.
    q, k, v : array
        This rank's shards, as in the forward call.
    out, lse : array
        The results of the forward call.
    plan : ContextParallelPlan
        The plan of the forward call.
    dlse : array, optional
        Gradient of the loss with respect to `lse`, of its shape and dtype, given by all ranks or by none. Default: 0.
    comm, scale, softcap, comm_type, overlap, dtype, num_threads
        As in `context_parallel_attention`.

    Returns
    -------
    dq, dk, dv : array
        Of the shapes, layout and dtype of this rank's q, k and v, and the same kind of array as `q`. `dq` is bit-identical to that of one
        call over the whole sequence, for any number of ranks. `dk` and `dv` are the same from run to run for a given number of ranks,
        dispatch and `comm_type`. If one of these three changes, they may differ by rounding.

    Raises
    ------
    TypeError, ValueError
        As in `context_parallel_attention`.

    See Also
    --------
    blitz_attn.block_sparse_attention_backward : the same in one process.

    Examples
    --------
    >>> import numpy as np
    >>> from blitz_attn.distributed import Alone, ContextParallelPlan, context_parallel_attention, context_parallel_attention_backward
    >>> plan = ContextParallelPlan(None, 256, comm=Alone(), num_heads=2, head_dim=64, causal=True)
    >>> q = k = v = np.ones((1, 2, 256, 64), np.float32)
    >>> out, lse = context_parallel_attention(q, k, v, plan)
    >>> dq, dk, dv = context_parallel_attention_backward(np.ones_like(out), q, k, v, out, lse, plan)
    >>> dq.shape, dk.shape, dv.shape
    ((1, 2, 256, 64), (1, 2, 256, 64), (1, 2, 256, 64))
    """
    call = _Call(plan, comm, "context_parallel_attention_backward")
    with call.agreement:
        call.read(scale=scale, comm_type=comm_type, overlap=overlap, dtype=dtype, num_threads=num_threads)
        call.agreement.same("dlse", "none" if dlse is None else "given")
        softcap = call.caps(None, softcap)["softcap"]
        p, real = call.problem, real_of(call.problem.dtype)
        keys, values = call.shard(k, "k", keys=True), call.shard(v, "v", keys=True, values=True)
        inputs = [call.shard(q, "q"), call.shard(dout, "dout", values=True), call.shard(out, "out", values=True)]
        inputs += [call.lse_shard(x, name) for x, name in ((lse, "lse"), (dlse, "dlse")) if x is not None]
        family, (own_q, own_kv) = _arrays.family_of(q), call.tokens
        sizes = ((own_q, p.heads, p.head_dim), (own_kv, p.kv_heads, p.head_dim), (own_kv, p.kv_heads, p.head_dim_v))
        grads = [family.empty(call.shape(*size), p.dtype) for size in sizes]
        dq, dk, dv = (by_head(_arrays.host(x, "grads", call.bits, True)[0], p.layout, n) for x, (_, n, _) in zip(grads, sizes, strict=True))

    if plan.size == 1:
        block_sparse_attention_backward(
            dout, q, k, v, out, lse, dlse=dlse, grads=tuple(grads), softcap=softcap, **p.call(), **call.options()
        )
        return _finished(grads, family)

    stages = call.stages([keys, values], inputs, [dq])
    sums = Sums(stages, [np.zeros(x.shape, real) for x in (dk, dv)])

    def compute(piece: Piece, windows: list[ndarray]) -> None:
        rows = call.rows(piece)
        one, grad, result, *per_query = (rows.given(x) for x in piece.inputs)
        states: tuple[Any, ...] = (*(x[..., 0] for x in per_query), None)
        one_lse, one_dlse = states[:2]
        one_k, one_v = (rows.given(x, keys=True) for x in windows)
        into = (rows.given(piece.outputs[0]), *(rows.given(x, keys=True) for x in sums.parts))
        block_sparse_attention_backward(
            grad, one, one_k, one_v, result, one_lse, dlse=one_dlse, grads=into, accumulate=True, softcap=softcap, **rows.arguments,
            **call.options(),
        )  # fmt: skip

    stages.run(compute, sums)
    for array, total in zip((dk, dv), sums.totals, strict=True):
        array[...] = converted(total, real, p.dtype)
    return _finished(grads, family)


def _finished(grads: list[Any], family: _arrays.Family) -> tuple[Any, Any, Any]:
    dq, dk, dv = (_arrays.finished(x, None, family) for x in grads)
    return dq, dk, dv


@overload
def dispatch(x: Kind, plan: ContextParallelPlan, *, keys: bool = False, axis: int | None = None) -> Kind: ...
@overload
def dispatch(x: Array, plan: ContextParallelPlan, *, keys: bool = False, axis: int | None = None) -> ndarray: ...
def dispatch(x: Any, plan: ContextParallelPlan, *, keys: bool = False, axis: int | None = None) -> Any:
    """This rank's shard of an array of the whole sequence.

    Parameters
    ----------
    x : array
        Anything with an axis of tokens, such as q, k, v or hidden states.
    plan : ContextParallelPlan
    keys : bool
        Whether the tokens are those of keys, where keys have lengths of their own.
    axis : int, optional
        The axis of tokens. Default: that of the plan's layout.

    Returns
    -------
    array
        The tokens of `plan.q_ranges`, or of `plan.kv_ranges`, one after the other: the same kind of array, and a copy.

    Raises
    ------
    TypeError, ValueError
        `x` is not an array, or has another number of tokens.

    Examples
    --------
    >>> import numpy as np
    >>> from blitz_attn.distributed import ContextParallelPlan, dispatch
    >>> plan = ContextParallelPlan(None, 1024, size=2, rank=1, causal=True, dispatch="zigzag")
    >>> dispatch(np.arange(1024), plan, axis=0)[[0, -1]].tolist()
    [256, 767]
    """
    array, axis = _with_tokens(x, "x", plan, keys, axis, None)
    ranges = plan.kv_ranges if keys else plan.q_ranges
    pieces = [array[(slice(None),) * axis + (slice(a, b),)] for a, b in ranges]
    whole = np.concatenate(pieces, axis=axis) if pieces else array[(slice(None),) * axis + (slice(0, 0),)].copy()
    return _as_given(whole, x)


@overload
def undispatch(x: Kind, plan: ContextParallelPlan, *, keys: bool = False, axis: int | None = None) -> Kind: ...
@overload
def undispatch(x: Array, plan: ContextParallelPlan, *, keys: bool = False, axis: int | None = None) -> ndarray: ...
def undispatch(x: Any, plan: ContextParallelPlan, *, keys: bool = False, axis: int | None = None) -> Any:
    """The array of the whole sequence, on every rank, from the shards of all ranks. Collective.

    Parameters
    ----------
    x : array
        This rank's shard. Its dtype and its other axes are the same on all ranks.
    plan : ContextParallelPlan
        Made with a communicator.
    keys : bool
        Whether the tokens are those of keys.
    axis : int, optional
        The axis of tokens. Default: that of the plan's layout.

    Returns
    -------
    array
        The same kind of array, with all tokens in their order.

    Raises
    ------
    TypeError, ValueError
        A shard has another number of tokens, or dtype or other axes differ between ranks. All ranks raise the error.

    Examples
    --------
    >>> import numpy as np
    >>> from blitz_attn.distributed import Alone, ContextParallelPlan, dispatch, undispatch
    >>> plan = ContextParallelPlan(None, 1024, comm=Alone())
    >>> undispatch(dispatch(np.arange(1024), plan, axis=0), plan, axis=0).shape
    (1024,)
    """
    call = _Call(plan, None, "undispatch")
    with call.agreement as agreement:
        ranges = plan.kv_ranges if keys else plan.q_ranges
        array, place = _with_tokens(x, "x", plan, keys, axis, sum(b - a for a, b in ranges))
        agreement.same("plan", plan._key)
        agreement.same("x", (array.dtype.str, place, array.shape[:place], array.shape[place + 1 :]))
    held = call.routes.kv_held if keys else call.routes.q_held
    mine = np.ascontiguousarray(np.moveaxis(array, place, 0))
    every = np.empty((call.problem.tokens[keys], *mine.shape[1:]), mine.dtype)
    size, counts = int(np.prod(mine.shape[1:])) * mine.itemsize, held.counts(plan.size)
    if plan.size == 1:
        every = mine
    elif size:
        token = import_mpi().BYTE.Create_contiguous(size).Commit()
        plan.comm.Allgatherv([mine, len(mine), token], [every, counts.tolist(), (np.cumsum(counts) - counts).tolist(), token])
        token.Free()
    whole = np.empty_like(every)
    held.put_in_order(every, whole)
    return _as_given(np.ascontiguousarray(np.moveaxis(whole, 0, place)), x)


def _with_tokens(x: Any, name: str, plan: Any, keys: Any, axis: Any, tokens: int | None) -> tuple[ndarray, int]:
    """An array as NumPy sees it, and its axis of tokens, whose length must be `tokens` (None: the whole sequence)."""
    if not isinstance(plan, ContextParallelPlan):
        raise TypeError(f"plan: expected a ContextParallelPlan, got {type(plan).__name__}")
    problem = plan._problem
    array, _ = _arrays.host(x, name)
    place = {"BNSD": 2, "BSND": 1, "BSH": 1, "TND": 0}[problem.layout] if axis is None else _arrays.integer(axis, "axis")
    if not -array.ndim <= place < array.ndim:
        raise ValueError(f"axis: expected one of the {array.ndim} axes of {name}, got {place}")
    tokens = problem.tokens[flag(keys, "keys")] if tokens is None else tokens
    if array.shape[place] != tokens:
        raise ValueError(f"{name}: expected {tokens} tokens on axis {place}, got shape {array.shape}")
    return array, place % array.ndim


def _as_given(result: ndarray, given: Any) -> Any:
    """A NumPy array, in which bfloat16 is bits, as the kind of array that was given."""
    if isinstance(given, np.ndarray):
        return result.view(given.dtype)
    made = _arrays.as_kind_of(result, given)
    return made.view(given.dtype) if made.dtype != given.dtype else made
