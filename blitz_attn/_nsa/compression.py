"""Compressed keys and values of native sparse attention, and their gradient. Public through `blitz_attn.nsa`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, overload

import numpy as np

from .. import _core
from .._float_mode import in_usual_mode
from .._floats import Result, real_of
from .._formats import widened
from .._sentences import refusal, rename
from .arrays import Reals, check_rank, dtype_of, expect_shape, leading, reals, round_into, rounded, same_kind, sums_for
from .rules import number, threads_of
from .sequences import Sequences, block_count, cuts, sums_of

if TYPE_CHECKING:
    from .._types import Array, DType, Integers, Kind

__all__ = ["compress_kv", "compress_kv_backward"]


def compressed_shape(x: np.ndarray, size: int, stride: int, sequences: Sequences) -> tuple[int, ...]:
    """Shape of the blocks that `compress_kv` makes from tokens `x`."""
    if sequences.blocks is not None:
        return (int(sequences.blocks[-1]), *x.shape[1:])
    return (x.shape[0], block_count(x.shape[1], size, stride), *x.shape[2:])


def check_compressed(x: np.ndarray, size: int, stride: int, sequences: Sequences, name: str = "k_cmp") -> None:
    """Refuses compressed keys that are not as many as `compress_kv` makes from the tokens of the sequences; only arrays with room for more
    tokens may have more. Other numbers of keys could belong to another stride, and the result would be silently wrong."""
    if sequences.blocks is not None:
        expected = int(sequences.blocks[-1])
    else:
        expected = block_count(sequences.longest, size, stride)
    if x.shape[-3] != expected and (sequences.kv_lens is None or x.shape[-3] < expected):
        least = "" if sequences.kv_lens is None else "at least "
        raise ValueError(f"{name}: expected {least}{expected} blocks of compress_block_size = {size}, got {x.shape}")


def _sequences(x: np.ndarray, cu_seqlens: Any, size: int = 1, stride: int = 1) -> Sequences:
    """The sequences of tokens `x`."""
    if cu_seqlens is None:
        return Sequences.batch(x.shape[1], x.shape[1])
    return Sequences.packed(cuts(cu_seqlens, x.shape[0]), size, stride)


def compress_into(
    x: np.ndarray, weight: np.ndarray | None, out: np.ndarray, kind: str, size: int, stride: int, sequences: Sequences,
    threads: int | None, names: tuple[str, str],
) -> None:  # fmt: skip
    """Fills `out` with the block means of `x`, times `weight`. `names` are the caller's names of `x` and `weight`, for errors."""
    try:
        _core.block_means(
            x, weight, out, block_size=size, stride=stride, cu_seqlens=sequences.tokens, cu_blocks=sequences.blocks, dtype=kind,
            num_threads=threads,
        )  # fmt: skip
    except (TypeError, ValueError) as error:
        rename(error, {"x": names[0], "weight": names[1]})
        raise


def check_weight(w: Any, name: str, shape: tuple[int, ...], dtype: Any, kind: str) -> Reals:
    """The compression weight `w`, checked for an array of this shape."""
    if w is None:
        return Reals(None, kind)
    array, own = reals(w, name, dtype, kind)
    heads, dim = shape[-2:]
    expect_shape(array, name, (heads, dim, dim), "(Hkv, D, D)")
    return Reals(array, own)


@overload
def compress_kv(
    k: Kind, v: Array, block_size: int, w_k: Array | None = None, w_v: Array | None = None, *, stride: int | None = None,
    cu_seqlens: Integers | None = None, dtype: DType | None = None, num_threads: int | None = None,
) -> tuple[Kind, Kind]: ...  # fmt: skip
@overload
def compress_kv(
    k: Array, v: Array, block_size: int, w_k: Array | None = None, w_v: Array | None = None, *, stride: int | None = None,
    cu_seqlens: Integers | None = None, dtype: DType | None = None, num_threads: int | None = None,
) -> tuple[np.ndarray, np.ndarray]: ...  # fmt: skip
def compress_kv(
    k: Any, v: Any, block_size: int, w_k: Any = None, w_v: Any = None, *, stride: int | None = None, cu_seqlens: Any = None,
    dtype: Any = None, num_threads: int | None = None,
) -> tuple[Any, Any]:  # fmt: skip
    """Block means of keys and values, each times the matrix of its head: the keys and values of the compressed branch.

    Parameters
    ----------
    k, v : array
        ``(B, N, Hkv, D)`` and ``(B, N, Hkv, Dv)``: float32, float16, bfloat16 or float64, both of one dtype; with `cu_seqlens`
        ``(T, Hkv, D)`` and ``(T, Hkv, Dv)``.
    block_size : int
        Number of tokens per block, at least 1. Tokens after the last complete block are in no block.
    w_k, w_v : array, optional
        ``(Hkv, D, D)`` and ``(Hkv, Dv, Dv)``: each mean, as a row, is multiplied by its head's matrix.
    stride : int, optional
        Number of tokens from the start of one block to the start of the next. Default: `block_size`, so that blocks do not overlap.
    cu_seqlens : sequence of int, optional
        ``(sequences + 1,)`` numbers that rise from 0 to T: the sequences lie one after the other, and no block spans two.
    dtype : str or dtype, optional
        ``"bfloat16"`` says that uint16 arrays hold bfloat16 bits. Any other value is only checked against the arrays.
    num_threads : int, optional
        Threads for this call. Default: see `set_num_threads`. The result does not depend on it.

    Returns
    -------
    k_cmp, v_cmp : array
        ``(B, blocks, Hkv, D)`` and ``(B, blocks, Hkv, Dv)``, with `cu_seqlens` ``(all blocks, ...)``, of the dtype and kind of `k`.
        A sequence of n tokens has ``(n - block_size) // stride + 1`` blocks, or none where n is less than `block_size`.

    Raises
    ------
    TypeError, ValueError
        An argument of the wrong kind, shape or range.

    Notes
    -----
    Means and products are made in float32 (float64 for float64) and rounded once. No position encoding is added.

    A mean depends on the tokens of its block alone. So the blocks that new tokens complete can be made by themselves, bit-identical to
    those of a call over all tokens. If ``m`` blocks of a sequence are known, ``compress_kv(k[:, m * stride :], v[:, m * stride :], ...)``
    returns its other blocks. `NsaCache` makes blocks in this way.

    References
    ----------
    .. [1] J. Yuan et al., "Native Sparse Attention: Hardware-Aligned and Natively Trainable Sparse Attention", 2025, Eq. 7.

    Examples
    --------
    >>> import numpy as np
    >>> from blitz_attn import nsa
    >>> k = np.arange(10.0).reshape(1, 10, 1, 1)
    >>> nsa.compress_kv(k, k, 4, stride=2)[0].ravel().tolist()
    [1.5, 3.5, 5.5, 7.5]

    The last two blocks, where the first two are known:

    >>> nsa.compress_kv(k[:, 2 * 2 :], k[:, 2 * 2 :], 4, stride=2)[0].ravel().tolist()
    [5.5, 7.5]
    """
    size = number(block_size, "block_size")
    step = size if stride is None else number(stride, "stride")
    threads = threads_of(num_threads)
    dtype, cu_seqlens = dtype_of(dtype), sums_of(cu_seqlens)
    keys, kind = leading(k, "k", dtype)
    values = same_kind(v, "v", dtype, kind, "k")
    packed = cu_seqlens is not None
    check_rank(keys, "k", packed)
    check_rank(values, "v", packed)
    if values.shape[:-1] != keys.shape[:-1]:
        raise refusal(ValueError, "v", ": expected the tokens and heads of ", "k", f" {keys.shape}, got {values.shape}")
    sequences = _sequences(keys, cu_seqlens, size, step)
    pairs = [(x, check_weight(w, name, x.shape, dtype, kind).array) for x, w, name in ((keys, w_k, "w_k"), (values, w_v, "w_v"))]
    results = [Result(compressed_shape(x, size, step, sequences), kind, k) for x, _ in pairs]
    for (x, w), result, names in zip(pairs, results, (("k", "w_k"), ("v", "w_v")), strict=True):
        compress_into(x, w, result.array, kind, size, step, sequences, threads, names)
    return results[0].value, results[1].value


ROWS_AT_A_TIME = 64  # blocks whose means and gradients stay in a cache


@in_usual_mode
def _weight_gradient(means: np.ndarray, dy: np.ndarray) -> np.ndarray:
    """The sum over all blocks of the outer product of a mean and its gradient, (Hkv, D, D), in a fixed order of blocks. The operator ``@``
    would leave the order to BLAS and its number of threads."""
    heads = means.shape[-2]
    rows, douts = (x.reshape(-1, heads, x.shape[-1]) for x in (means, dy))
    total = np.zeros((heads, rows.shape[-1], douts.shape[-1]), rows.dtype)
    for head in range(heads):
        for at in range(0, len(rows), ROWS_AT_A_TIME):
            some = slice(at, at + ROWS_AT_A_TIME), head
            total[head] += np.einsum("nd,ne->de", rows[some], douts[some], optimize=False)
    return total


def compress_gradients(
    dy: np.ndarray, x: np.ndarray, weight: np.ndarray | None, dx: np.ndarray, kind: str, size: int, stride: int, sequences: Sequences,
    threads: int | None, names: tuple[str, str, str] = ("dout", "x", "weight"),
) -> np.ndarray | None:  # fmt: skip
    """Fills `dx` with the gradient of `x`, and returns the gradient of the weight. `dy` and all gradients are in the dtype of sums: the
    gradient of a mean is as large as those of all its tokens together, and may overflow float16.

    `names` are the caller's names of `dy`, `x` and `weight`, for errors."""
    dweight, real = None, real_of(kind)
    if weight is not None:
        means = np.empty((*dy.shape[:-1], x.shape[-1]), real)
        compress_into(x, None, means, kind, size, stride, sequences, threads, names[1:])
        dweight = _weight_gradient(means, dy)
        turned = np.ascontiguousarray(weight.swapaxes(1, 2))
        dmeans = means  # in the same memory, since the means are not needed any more
        alone = _sequences(dy, [0, dy.shape[0]] if dy.ndim == 3 else None)
        compress_into(dy, turned, dmeans, real, 1, 1, alone, threads, (names[0], names[2]))
        dy = dmeans
    try:
        _core.block_means_backward(
            dy, dx, (), block_size=size, stride=stride, cu_seqlens=sequences.tokens, cu_blocks=sequences.blocks, dtype=real,
            num_threads=threads,
        )  # fmt: skip
    except (TypeError, ValueError) as error:
        rename(error, {"dout": names[0], "dx": names[1]})
        raise
    return dweight


@overload
def compress_kv_backward(
    dk_cmp: Array, dv_cmp: Array, k: Kind, v: Array, block_size: int, w_k: Array | None = None, w_v: Array | None = None, *,
    stride: int | None = None, cu_seqlens: Integers | None = None, dtype: DType | None = None, num_threads: int | None = None,
) -> tuple[Kind, Kind, Kind | None, Kind | None]: ...  # fmt: skip
@overload
def compress_kv_backward(
    dk_cmp: Array, dv_cmp: Array, k: Array, v: Array, block_size: int, w_k: Array | None = None, w_v: Array | None = None, *,
    stride: int | None = None, cu_seqlens: Integers | None = None, dtype: DType | None = None, num_threads: int | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None, np.ndarray | None]: ...  # fmt: skip
def compress_kv_backward(
    dk_cmp: Any, dv_cmp: Any, k: Any, v: Any, block_size: int, w_k: Any = None, w_v: Any = None, *, stride: int | None = None,
    cu_seqlens: Any = None, dtype: Any = None, num_threads: int | None = None,
) -> tuple[Any, Any, Any, Any]:  # fmt: skip
    """Gradients of `compress_kv`.

    Parameters
    ----------
    dk_cmp, dv_cmp : array
        Gradients of the results of `compress_kv`, of the same shapes and dtype.
    k, v, block_size, w_k, w_v, stride, cu_seqlens, dtype, num_threads
        The arguments of `compress_kv`.

    Returns
    -------
    dk, dv : array
        Of the shapes of `k` and `v`, and of the dtype and kind of `k`.
    dw_k, dw_v : array or None
        Of the shape and dtype of `w_k` and `w_v`; None for a weight that was not given.

    Raises
    ------
    TypeError, ValueError
        As `compress_kv`.

    Notes
    -----
    The gradient of a token is summed over its blocks in a fixed order, so the result does not depend on the number of threads.

    Examples
    --------
    >>> import numpy as np
    >>> from blitz_attn import nsa
    >>> k = np.zeros((1, 7, 1, 1))
    >>> dy = np.ones((1, 2, 1, 1))
    >>> nsa.compress_kv_backward(dy, dy, k, k, 4, stride=2)[0].ravel().tolist()
    [0.25, 0.25, 0.5, 0.5, 0.25, 0.25, 0.0]
    """
    size = number(block_size, "block_size")
    step = size if stride is None else number(stride, "stride")
    threads = threads_of(num_threads)
    dtype, cu_seqlens = dtype_of(dtype), sums_of(cu_seqlens)
    packed = cu_seqlens is not None
    grads, weight_grads = [], []
    kind = leading(k, "k", dtype)[1]
    for dy_given, x_given, w_given, names in ((dk_cmp, k, w_k, ("dk_cmp", "k", "w_k")), (dv_cmp, v, w_v, ("dv_cmp", "v", "w_v"))):
        x = same_kind(x_given, names[1], dtype, kind, "k")
        dy = same_kind(dy_given, names[0], dtype, kind, "k")
        check_rank(x, names[1], packed)
        sequences = _sequences(x, cu_seqlens, size, step)
        expect_shape(dy, names[0], compressed_shape(x, size, step, sequences), "as compress_kv gives it")
        w, own = check_weight(w_given, names[2], x.shape, dtype, kind)
        dx = Result(x.shape, kind, k)
        sums = sums_for(dx.array, kind)
        dw = compress_gradients(widened(dy, kind), x, w, sums, kind, size, step, sequences, threads, names)
        round_into(dx.array, sums, kind)
        grads.append(dx.value)
        weight_grads.append(None if dw is None else rounded(dw, real_of(kind), own, w_given))
    return grads[0], grads[1], weight_grads[0], weight_grads[1]
