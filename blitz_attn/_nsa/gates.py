"""The gates of native sparse attention and their gradient. Public through `blitz_attn.nsa`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, overload

import numpy as np

from .. import _core
from .._float_mode import in_usual_mode
from .._floats import Result, floats, real_of
from .._formats import converted
from .._sentences import refusal
from .arrays import Reals, dtype_of, expect_shape, leading, reals, rounded, same_kind
from .rules import threads_of

if TYPE_CHECKING:
    from .._types import Array, DType, Kind

__all__ = ["compute_gates", "gate_and_combine", "gating_backward"]


def _leading(x: np.ndarray, name: str, text: str) -> None:
    if x.ndim not in (3, 4):
        raise ValueError(f"{name}: expected shape (B, N, H, {text}) or (T, H, {text}), got {x.shape}")


def weight_of(w: Any, q: np.ndarray, dtype: Any, kind: str) -> Reals:
    """The gate weights `w`, checked for queries `q`."""
    if w is None:
        return Reals(None, kind)
    array, own = reals(w, "gate_proj_weight", dtype, kind)
    expect_shape(array, "gate_proj_weight", (q.shape[-2], 3, q.shape[-1]), "(H, 3, D)")
    return Reals(array, own)


def check_gate_weight(w: Any, dtype: Any) -> None:
    """Refuses gate weights that fit no queries."""
    array, _ = floats(w, "gate_proj_weight", dtype, strided=True)
    if array.ndim != 3 or array.shape[1] != 3:
        raise ValueError(f"gate_proj_weight: expected shape (H, 3, D), got {array.shape}")


@overload
def compute_gates(
    q: Kind, gate_proj_weight: Array | None = None, *, dtype: DType | None = None, num_threads: int | None = None
) -> Kind: ...
@overload
def compute_gates(
    q: Array, gate_proj_weight: Array | None = None, *, dtype: DType | None = None, num_threads: int | None = None
) -> np.ndarray: ...
def compute_gates(q: Any, gate_proj_weight: Any = None, *, dtype: Any = None, num_threads: int | None = None) -> Any:
    """Three gates per query head: the sigmoid of ``q`` times the head's weights. Gates are not normalised.

    Parameters
    ----------
    q : array
        ``(B, N, H, D)`` or ``(T, H, D)``: float32, float16, bfloat16 or float64.
    gate_proj_weight : array, optional
        ``(H, 3, D)``: float64 for float64 queries, else any of the other three dtypes. Default: every gate is 1/3.
    dtype : str or dtype, optional
        ``"bfloat16"`` says that uint16 arrays hold bfloat16 bits. Any other value is only checked against the arrays.
    num_threads : int, optional
        Threads for this call. Default: see `set_num_threads`.

    Returns
    -------
    array
        ``(..., H, 3)``: the gates of the compressed, the selected and the window branch; float32 (float64 for float64), of the kind of `q`.

    Raises
    ------
    TypeError, ValueError
        An argument of the wrong kind or shape.

    Examples
    --------
    >>> import numpy as np
    >>> from blitz_attn import nsa
    >>> nsa.compute_gates(np.ones((1, 1, 2)), np.array([[[0.0, 0], [50, 50], [-50, -50]]])).round(6).tolist()
    [[[0.5, 1.0, 0.0]]]
    """
    threads = threads_of(num_threads)
    dtype = dtype_of(dtype)
    queries, kind = leading(q, "q", dtype)
    _leading(queries, "q", "D")
    weight, _ = weight_of(gate_proj_weight, queries, dtype, kind)
    result = Result((*queries.shape[:-1], 3), real_of(kind), q)
    if weight is None:
        _fill_with_thirds(result.array)
    else:
        _core.gate(queries, weight, gates=result.array, branches=None, out=None, dtype=kind, num_threads=threads)
    return result.value


@in_usual_mode
def _fill_with_thirds(gates: np.ndarray) -> None:
    gates[...] = 1 / 3


def gates_as_reals(gates: Any, shape: tuple[int, ...], dtype: Any, kind: str) -> Reals:
    """The caller's gates, of any floating dtype, converted to the dtype of sums."""
    array, own = floats(gates, "gates", dtype, strided=True)
    expect_shape(array, "gates", (*shape[:-1], 3), "(..., H, 3)")
    return Reals(np.ascontiguousarray(converted(array, own, real_of(kind))), own)


def _branches(o_cmp: Any, o_slc: Any, o_win: Any, dtype: Any) -> tuple[list[np.ndarray], str]:
    first, kind = leading(o_cmp, "o_cmp", dtype)
    _leading(first, "o_cmp", "Dv")
    others = [same_kind(x, name, dtype, kind, "o_cmp") for x, name in ((o_slc, "o_slc"), (o_win, "o_win"))]
    for x, name in zip(others, ("o_slc", "o_win"), strict=True):
        expect_shape(x, name, first.shape, "of ", "o_cmp")
    return [first, *others], kind


@overload
def gate_and_combine(
    o_cmp: Kind, o_slc: Array, o_win: Array, gates: Array, *, dtype: DType | None = None, num_threads: int | None = None
) -> Kind: ...
@overload
def gate_and_combine(
    o_cmp: Array, o_slc: Array, o_win: Array, gates: Array, *, dtype: DType | None = None, num_threads: int | None = None
) -> np.ndarray: ...
def gate_and_combine(o_cmp: Any, o_slc: Any, o_win: Any, gates: Any, *, dtype: Any = None, num_threads: int | None = None) -> Any:
    """The sum of the three branches, each times its gate.

    Parameters
    ----------
    o_cmp, o_slc, o_win : array
        ``(B, N, H, Dv)`` or ``(T, H, Dv)``: float32, float16, bfloat16 or float64, all of one dtype.
    gates : array
        ``(..., H, 3)``, any of these dtypes.
    dtype : str or dtype, optional
        ``"bfloat16"`` says that uint16 arrays hold bfloat16 bits. Any other value is only checked against the arrays.
    num_threads : int, optional
        Threads for this call. Default: see `set_num_threads`.

    Returns
    -------
    array
        An array of the shape, dtype and kind of `o_cmp`, summed in float32 (float64 for float64) and rounded once.

    Raises
    ------
    TypeError, ValueError
        An argument of the wrong kind or shape.

    Examples
    --------
    >>> import numpy as np
    >>> from blitz_attn import nsa
    >>> one = np.ones((1, 1, 2))
    >>> nsa.gate_and_combine(one, 2 * one, 4 * one, np.array([[[0.5, 0.25, 1.0]]])).tolist()
    [[[5.0, 5.0]]]
    """
    threads = threads_of(num_threads)
    dtype = dtype_of(dtype)
    branches, kind = _branches(o_cmp, o_slc, o_win, dtype)
    wide, _ = gates_as_reals(gates, branches[0].shape, dtype, kind)
    result = Result(branches[0].shape, kind, o_cmp)
    _core.gate(None, None, gates=wide, branches=tuple(branches), out=result.array, dtype=kind, num_threads=threads)
    return result.value


@overload
def gating_backward(
    q: Kind, dout: Array, o_cmp: Array, o_slc: Array, o_win: Array, gates: Array, gate_proj_weight: Array | None = None, *,
    dtype: DType | None = None, num_threads: int | None = None,
) -> tuple[Kind, Kind, Kind, Kind | None, Kind | None]: ...  # fmt: skip
@overload
def gating_backward(
    q: Array, dout: Array, o_cmp: Array, o_slc: Array, o_win: Array, gates: Array, gate_proj_weight: Array | None = None, *,
    dtype: DType | None = None, num_threads: int | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray | None, np.ndarray | None]: ...  # fmt: skip
def gating_backward(
    q: Any, dout: Any, o_cmp: Any, o_slc: Any, o_win: Any, gates: Any, gate_proj_weight: Any = None, *, dtype: Any = None,
    num_threads: int | None = None,
) -> tuple[Any, Any, Any, Any, Any]:  # fmt: skip
    """Gradients of `gate_and_combine` with gates from `compute_gates`.

    Parameters
    ----------
    q : array
        The queries from which the gates were computed.
    dout : array
        Gradient of the result of `gate_and_combine`, with the same shape and dtype.
    o_cmp, o_slc, o_win, gates : array
        Arguments of `gate_and_combine`.
    gate_proj_weight : array, optional
        Argument of `compute_gates`.
    dtype, num_threads
        See `compute_gates`.

    Returns
    -------
    do_cmp, do_slc, do_win : array
        Gradients of the branches.
    dq : array or None
        Gradient of the queries, through the gates; None without weights.
    dgate_proj_weight : array or None
        Gradient of the weights, with the dtype of the weights; None without weights.

    Raises
    ------
    TypeError, ValueError
        An argument of the wrong kind or shape.

    Examples
    --------
    >>> import numpy as np
    >>> from blitz_attn import nsa
    >>> x, w = np.ones((1, 1, 2)), np.zeros((1, 3, 2))
    >>> results = nsa.gating_backward(x, x, x, x, x, nsa.compute_gates(x, w), w)
    >>> results[0].tolist(), results[4].tolist()
    ([[[0.5, 0.5]]], [[[0.5, 0.5], [0.5, 0.5], [0.5, 0.5]]])
    """
    threads = threads_of(num_threads)
    dtype = dtype_of(dtype)
    branches, kind = _branches(o_cmp, o_slc, o_win, dtype)
    gradient = same_kind(dout, "dout", dtype, kind, "o_cmp")
    expect_shape(gradient, "dout", branches[0].shape, "of ", "o_cmp")
    queries = same_kind(q, "q", dtype, kind, "o_cmp")
    if queries.shape[:-1] != gradient.shape[:-1]:
        raise refusal(ValueError, "q", ": expected the tokens and heads of ", "o_cmp", f" {gradient.shape}, got {queries.shape}")
    wide, _ = gates_as_reals(gates, gradient.shape, dtype, kind)
    weight, own = weight_of(gate_proj_weight, queries, dtype, kind)
    results = [Result(gradient.shape, kind, o_cmp) for _ in range(3)]
    dq = None if weight is None else Result(queries.shape, kind, q)
    dweight = None if weight is None else np.empty(weight.shape, real_of(kind))
    _core.gate_backward(
        None if weight is None else queries, weight, gates=wide, branches=tuple(branches), dout=gradient,
        dbranches=tuple(x.array for x in results), dgates=None, dq=None if dq is None else dq.array, dgate_proj_weight=dweight, dtype=kind,
        num_threads=threads,
    )  # fmt: skip
    made = None if dweight is None else rounded(dweight, real_of(kind), own, gate_proj_weight)
    return results[0].value, results[1].value, results[2].value, None if dq is None else dq.value, made
