"""Merging the results of attention over parts of the keys, such as shards, pages, chunks or the steps of ring attention."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import TYPE_CHECKING, Any, overload

from . import _arrays, _core
from ._sentences import rename

if TYPE_CHECKING:
    from numpy import ndarray

    from ._types import Array, DType, Kind

__all__ = ["merge_states", "merge_states_n", "merge_states_tree"]

_MOST_PARTS = 1 << 16
_PAIR_NAMES = {"outs[0]": "out_a", "outs[1]": "out_b", "lses[0]": "lse_a", "lses[1]": "lse_b"}


@overload
def merge_states(
    out_a: Kind, lse_a: Array, out_b: Array, lse_b: Array, *, out: Array | None = None, lse_out: Array | None = None,
    dtype: DType | None = None,
) -> tuple[Kind, Kind]: ...  # fmt: skip
@overload
def merge_states(
    out_a: Array, lse_a: Array, out_b: Array, lse_b: Array, *, out: Array | None = None, lse_out: Array | None = None,
    dtype: DType | None = None,
) -> tuple[ndarray, ndarray]: ...  # fmt: skip
def merge_states(
    out_a: Any, lse_a: Any, out_b: Any, lse_b: Any, *, out: Any = None, lse_out: Any = None, dtype: Any = None
) -> tuple[Any, Any]:
    """Attention over the union of two disjoint sets of keys, from the results over each set.

    Parameters
    ----------
    out_a, out_b : array
        Attention outputs, ``(..., Dv)`` with up to three leading axes, such as ``(B, H, S, Dv)``, or ``(T, H, Dv)`` of paged calls. Both
        have one dtype: float32, float16, bfloat16 or float64.
    lse_a, lse_b : array
        The log-sum-exp of each output, with the natural log, ``(...)``: float32 (float64 for float64). ``-inf`` marks a row whose part saw
        no key; the output of such a row is not read.
    out, lse_out : array, optional
        Where to write the results; they may share no memory with an input.
    dtype : str or dtype, optional
        ``"bfloat16"`` says that uint16 arrays hold bfloat16 bits.

    Returns
    -------
    out : array
        ``(..., Dv)``, with the dtype and the kind of array of `out_a`. Rows that are empty in both parts are 0.
    lse : array
        ``(...)``; ``-inf`` where both parts are empty.

    Raises
    ------
    TypeError
        An argument of the wrong kind or dtype.
    ValueError
        Shapes differ, or an output cannot be written.

    See Also
    --------
    merge_states_n : the same for any number of parts.

    Notes
    -----
    With ``w = exp(lse - logaddexp(lse_a, lse_b))`` for each part, the result is the sum of ``w * out`` [1]_. Merging is exact: the results
    over two halves of the keys give the result of attention over all keys, up to rounding.

    References
    ----------
    .. [1] M. N. Rabe and C. Staats, "Self-attention Does Not Need O(n^2) Memory", 2021.

    Examples
    --------
    >>> import numpy as np
    >>> import blitz_attn
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = (rng.standard_normal((1, 2, 96, 32), dtype=np.float32) for _ in range(3))
    >>> first = blitz_attn.block_sparse_attention(q, k[:, :, :40], v[:, :, :40], return_lse=True)
    >>> second = blitz_attn.block_sparse_attention(q, k[:, :, 40:], v[:, :, 40:], return_lse=True)
    >>> out, lse = blitz_attn.merge_states(*first, *second)
    >>> bool(np.abs(out - blitz_attn.block_sparse_attention(q, k, v)).max() < 1e-5)
    True
    """
    try:
        return merge_states_n((out_a, out_b), (lse_a, lse_b), out=out, lse_out=lse_out, dtype=dtype)
    except (TypeError, ValueError) as error:
        rename(error, _PAIR_NAMES)
        raise


@overload
def merge_states_n(
    outs: Kind, lses: Array | Iterable[Array], *, out: Array | None = None, lse_out: Array | None = None, dtype: DType | None = None
) -> tuple[Kind, Kind]: ...
@overload
def merge_states_n(
    outs: Array, lses: Array | Iterable[Array], *, out: Array | None = None, lse_out: Array | None = None, dtype: DType | None = None
) -> tuple[ndarray, ndarray]: ...
@overload
def merge_states_n(
    outs: Iterable[Kind], lses: Array | Iterable[Array], *, out: Array | None = None, lse_out: Array | None = None,
    dtype: DType | None = None,
) -> tuple[Kind, Kind]: ...  # fmt: skip
@overload
def merge_states_n(
    outs: Iterable[Array], lses: Array | Iterable[Array], *, out: Array | None = None, lse_out: Array | None = None,
    dtype: DType | None = None,
) -> tuple[ndarray, ndarray]: ...  # fmt: skip
def merge_states_n(outs: Any, lses: Any, *, out: Any = None, lse_out: Any = None, dtype: Any = None) -> tuple[Any, Any]:
    """Attention over the union of any number of disjoint sets of keys, from the results over each set.

    Parameters
    ----------
    outs : iterable of array
        Attention outputs, each ``(..., Dv)`` with up to three leading axes, all of one dtype; or one array with the parts along its first
        axis.
    lses : iterable of array
        The log-sum-exp of each output, ``(...)``, in the same order.
    out, lse_out : array, optional
        Where to write the results; they may share no memory with an input.
    dtype : str or dtype, optional
        ``"bfloat16"`` says that uint16 arrays hold bfloat16 bits.

    Returns
    -------
    out : array
        ``(..., Dv)``, with the dtype and the kind of array of ``outs[0]``. Rows that are empty in every part are 0.
    lse : array
        ``(...)``; ``-inf`` where every part is empty.

    Raises
    ------
    TypeError
        An argument of the wrong kind or dtype.
    ValueError
        There are no parts, numbers of parts or shapes differ, or an output cannot be written.

    See Also
    --------
    merge_states : the same for two parts; its notes have the formula.

    Examples
    --------
    >>> import numpy as np
    >>> import blitz_attn
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = (rng.standard_normal((1, 2, 96, 32), dtype=np.float32) for _ in range(3))
    >>> parts = [slice(0, 10), slice(10, 64), slice(64, 96)]
    >>> states = [blitz_attn.block_sparse_attention(q, k[:, :, p], v[:, :, p], return_lse=True) for p in parts]
    >>> out, lse = blitz_attn.merge_states_n([o for o, _ in states], [m for _, m in states])
    >>> bool(np.abs(out - blitz_attn.block_sparse_attention(q, k, v)).max() < 1e-5)
    True
    """
    outs, lses = _parts(outs, "outs"), _parts(lses, "lses")
    family = _arrays.family_of(outs[0]) if outs else _arrays.NUMPY
    outs = tuple(_arrays.readable(x, f"outs[{i}]") for i, x in enumerate(outs))
    lses = tuple(_arrays.readable(x, f"lses[{i}]") for i, x in enumerate(lses))
    given_out, given_lse, kind = _arrays.writable(out, "out"), _arrays.writable(lse_out, "lse_out"), _arrays.dtype_name(dtype)
    try:
        result = _core.merge_states(family.empty, outs, lses, out=given_out, lse_out=given_lse, dtype=kind)
    except (TypeError, ValueError) as error:
        rename(error, {"lse": "lse_out"})
        raise
    return _arrays.finished(result[0], out, family), _arrays.finished(result[1], lse_out, family)


@overload
def merge_states_tree(outs: Kind, lses: Array | Iterable[Array]) -> tuple[Kind, Kind]: ...
@overload
def merge_states_tree(outs: Array, lses: Array | Iterable[Array]) -> tuple[ndarray, ndarray]: ...
@overload
def merge_states_tree(outs: Iterable[Kind], lses: Array | Iterable[Array]) -> tuple[Kind, Kind]: ...
@overload
def merge_states_tree(outs: Iterable[Array], lses: Array | Iterable[Array]) -> tuple[ndarray, ndarray]: ...
def merge_states_tree(outs: Any, lses: Any) -> tuple[Any, Any]:
    """`merge_states_n` in a fixed order: pairs of neighbours are merged, then pairs of the results, and so on.

    Indices alone decide which parts are merged. So the nodes of the tree may be computed by different processes, and the result is still
    bit-identical. A node is the state of 2**l neighbouring parts (of fewer at the end), where 2**l divides the index of the first of them.

    Parameters
    ----------
    outs : iterable of array
        Attention outputs, each ``(..., Dv)`` with up to three leading axes, all of one dtype, float32 or float64 (``out_dtype="float32"``
        gives such outputs from 16-bit inputs); or one array with the parts along its first axis.
    lses : iterable of array
        The log-sum-exp of each output, ``(...)``, in the same order.

    Returns
    -------
    out : array
        ``(..., Dv)``, with the dtype and the kind of array of ``outs[0]``. Rows that are empty in every part are 0.
    lse : array
        ``(...)``; ``-inf`` where every part is empty.

    Raises
    ------
    TypeError
        An argument of the wrong kind or dtype, such as outputs of 16 bits, which each merge would round.
    ValueError
        There are no parts, or numbers of parts or shapes differ.

    See Also
    --------
    merge_states : merges one pair.
    blitz_attn.paged_attention : with `kv_split` merges the states of chunks in this way.

    Notes
    -----
    Node i of level l is the state of the parts ``i * 2**l`` to ``(i + 1) * 2**l - 1``, as far as there are parts. It is
    ``merge_states(left, right)`` of its two halves, or its left half unchanged where its right half has no part.

    Examples
    --------
    >>> import numpy as np
    >>> import blitz_attn
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = (rng.standard_normal((1, 2, 96, 32), dtype=np.float32) for _ in range(3))
    >>> parts = [slice(at, at + 20) for at in range(0, 96, 20)]
    >>> states = [blitz_attn.block_sparse_attention(q, k[:, :, p], v[:, :, p], return_lse=True) for p in parts]
    >>> out, lse = blitz_attn.merge_states_tree(*zip(*states))
    >>> first, rest = blitz_attn.merge_states_tree(*zip(*states[:4])), states[4]
    >>> bool((blitz_attn.merge_states(*first, *rest)[0] == out).all())
    True
    """
    outs, lses = list(_parts(outs, "outs")), list(_parts(lses, "lses"))
    at_once = merge_states_n(outs, lses)  # refuses what cannot be merged
    for i, x in enumerate(outs):
        kind = _arrays.host(x, f"outs[{i}]")[1]
        if kind not in ("float32", "float64"):
            raise TypeError(f"outs[{i}]: expected float32 or float64, got {kind}, which each merge would round")
    if len(outs) == 1:  # new arrays, with 0 in empty rows, as any merge gives
        return at_once
    while len(outs) > 1:
        merged = [merge_states(outs[i], lses[i], outs[i + 1], lses[i + 1]) for i in range(0, len(outs) - 1, 2)]
        if len(outs) % 2:
            merged.append((outs[-1], lses[-1]))
        outs, lses = [out for out, _ in merged], [lse for _, lse in merged]
    return outs[0], lses[0]


def _parts(arrays: Any, name: str) -> tuple[Any, ...]:
    try:
        if not hasattr(type(arrays), "__iter__"):  # an object with __getitem__ alone may have no end
            raise TypeError("it cannot be iterated over")
        parts = tuple(islice(arrays, _MOST_PARTS + 1))
    except Exception as error:
        raise TypeError(f"{name}: expected a sequence of arrays, got {type(arrays).__name__}") from error
    if len(parts) > _MOST_PARTS:
        raise ValueError(f"{name}: expected at most {_MOST_PARTS} arrays, got more")
    return parts
