"""Parts of native sparse attention: compression with its gradient, and selection. Public through `blitz_attn.nsa`."""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import _core
from .._formats import converted, widened
from .._sentences import renamed
from .arrays import (
    CMP_GROUP,
    COMPRESSED_NAMES,
    Result,
    Rules,
    Sequences,
    attend,
    block_count,
    cuts,
    dtype_of,
    expect_shape,
    floats,
    number,
    real_of,
    reals,
    rules_of,
    same_kind,
    scale_of,
    storage,
    sums_of,
    threads_of,
)

__all__ = ["compress_kv", "compress_kv_backward", "score_and_select_blocks"]


def _rank(x: np.ndarray, name: str, packed: bool, text: str = "D") -> None:
    axes = f"(T, H, {text})" if packed else f"(B, N, H, {text})"
    if x.ndim != (3 if packed else 4):
        raise ValueError(f"{name}: expected shape {axes}, got {x.shape}")


# ---- Compression --------------------------------------------------------------------------------------------------


def compressed_shape(x: np.ndarray, size: int, stride: int, sequences: Sequences) -> tuple[int, ...]:
    if sequences.blocks is not None:
        return (int(sequences.blocks[-1]), *x.shape[1:])
    return (x.shape[0], int(block_count(x.shape[1], size, stride)), *x.shape[2:])


def compress_into(
    x: np.ndarray, weight: np.ndarray | None, out: np.ndarray, kind: str, size: int, stride: int, sequences: Sequences,
    threads: int | None, names: tuple[str, str],
) -> None:  # fmt: skip
    """`names`: what the caller knows `x` and `weight` by."""
    try:
        _core.block_means(x, weight, out, size, stride, sequences.tokens, sequences.blocks, kind, threads)
    except (TypeError, ValueError) as error:
        raise renamed(error, {"x": names[0], "weight": names[1]}) from error


def check_weight(w: Any, name: str, shape: tuple[int, ...], dtype: Any, kind: str) -> tuple[np.ndarray | None, str]:
    """A compression weight of an array of this shape in the dtype of sums, and its own dtype."""
    if w is None:
        return None, kind
    array, own = reals(w, name, dtype, kind)
    heads, dim = shape[-2:]
    expect_shape(array, name, (heads, dim, dim), "(Hkv, D, D)")
    return array, own


def compress_kv(
    k: Any, v: Any, block_size: int, w_k: Any = None, w_v: Any = None, *, stride: int | None = None, cu_seqlens: Any = None,
    dtype: Any = None, num_threads: int | None = None,
) -> tuple[Any, Any]:  # fmt: skip
    """Block means of keys and values, each times a matrix a head: the keys and values of the compressed branch.

    Parameters
    ----------
    k, v : array_like
        ``(B, N, Hkv, D)`` and ``(B, N, Hkv, Dv)``: float32, float16, bfloat16 or float64, both the same; with `cu_seqlens`
        ``(T, Hkv, D)`` and ``(T, Hkv, Dv)``.
    block_size : int
        Tokens a block, at least 1. Only complete blocks count: the tokens behind the last one are in none.
    w_k, w_v : array_like, optional
        ``(Hkv, D, D)`` and ``(Hkv, Dv, Dv)``: a mean, as a row, is multiplied by its head's matrix.
    stride : int, optional
        Tokens from one block's beginning to the next one's. Default: `block_size`, so that blocks do not overlap.
    cu_seqlens : sequence of int, optional
        ``(sequences + 1,)`` numbers that rise from 0 to T: sequences one after the other. No block spans two.
    dtype : str or dtype, optional
        ``"bfloat16"`` says that uint16 arrays hold bfloat16 bits.
    num_threads : int, optional
        Threads for this call. Default: see `set_num_threads`. The result does not depend on it.

    Returns
    -------
    k_cmp, v_cmp : array
        ``(B, blocks, Hkv, D)`` and ``(B, blocks, Hkv, Dv)``, with `cu_seqlens` ``(all blocks, ...)``, of the dtype and kind of `k`.
        A sequence of n tokens has ``(n - block_size) // stride + 1`` blocks, or none where it is shorter than one.

    Raises
    ------
    TypeError, ValueError
        An argument of the wrong kind, shape or range.

    Notes
    -----
    Means and products are made in float32 (float64 for float64) and rounded once. There is no position encoding.

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
    """
    size = number(block_size, "block_size")
    step = size if stride is None else number(stride, "stride")
    threads = threads_of(num_threads)
    dtype, cu_seqlens = dtype_of(dtype), sums_of(cu_seqlens)
    keys, kind = floats(k, "k", dtype)
    values = same_kind(v, "v", dtype, kind, "k")
    packed = cu_seqlens is not None
    _rank(keys, "k", packed)
    _rank(values, "v", packed)
    if values.shape[:-1] != keys.shape[:-1]:
        raise ValueError(f"v: expected the tokens and heads of k {keys.shape}, got {values.shape}")
    sequences = Sequences.of(cuts(cu_seqlens, keys.shape[0]) if packed else None, size, step)
    pairs = [
        (x, check_weight(w, name, x.shape, dtype, kind)[0]) for x, w, name in ((keys, w_k, "w_k"), (values, w_v, "w_v"))
    ]
    results = [Result(compressed_shape(x, size, step, sequences), kind, k) for x, _ in pairs]
    for (x, w), result, names in zip(pairs, results, (("k", "w_k"), ("v", "w_v")), strict=True):
        compress_into(x, w, result.array, kind, size, step, sequences, threads, names)
    return results[0].value, results[1].value


def compress_gradients(
    dy: np.ndarray, x: np.ndarray, weight: np.ndarray | None, dx: np.ndarray, more: tuple[np.ndarray, ...], kind: str, size: int,
    stride: int, sequences: Sequences, threads: int | None, names: tuple[str, str, str] = ("dout", "x", "weight"),
) -> np.ndarray | None:  # fmt: skip
    """Fills dx, to which the arrays of `more` are added; returns the gradient of the weight in the dtype of sums. `names`: what the caller
    knows `dy`, `x` and `weight` by."""
    dweight = None
    if weight is not None:
        real = real_of(kind)
        means = np.empty((*dy.shape[:-1], x.shape[-1]), real)
        compress_into(x, None, means, kind, size, stride, sequences, threads, names[1:])
        wide = widened(dy, kind)
        flat = [np.moveaxis(y, -2, 0).reshape(y.shape[-2], -1, y.shape[-1]) for y in (means, wide)]
        dweight = flat[0].swapaxes(1, 2) @ flat[1]
        turned = np.ascontiguousarray(weight.swapaxes(1, 2))
        dmeans = np.empty((*dy.shape[:-1], x.shape[-1]), storage(kind))
        alone = Sequences.of(np.array([0, dy.shape[0]])) if dy.ndim == 3 else Sequences(None, None, None)
        compress_into(dy, turned, dmeans, kind, 1, 1, alone, threads, (names[0], names[2]))
        dy = dmeans
    try:
        _core.block_means_backward(dy, dx, more, size, stride, sequences.tokens, sequences.blocks, kind, threads)
    except (TypeError, ValueError) as error:
        raise renamed(error, {"dout": names[0]}) from error
    return dweight


def compress_kv_backward(
    dk_cmp: Any, dv_cmp: Any, k: Any, v: Any, block_size: int, w_k: Any = None, w_v: Any = None, *, stride: int | None = None,
    cu_seqlens: Any = None, dtype: Any = None, num_threads: int | None = None,
) -> tuple[Any, Any, Any, Any]:  # fmt: skip
    """Gradients of `compress_kv`.

    Parameters
    ----------
    dk_cmp, dv_cmp : array_like
        Gradients of its results, of their shapes and dtype.
    k, v, block_size, w_k, w_v, stride, cu_seqlens, dtype, num_threads
        Its arguments.

    Returns
    -------
    dk, dv : array
        Of the shape, dtype and kind of `k` and `v`.
    dw_k, dw_v : array or None
        Of the shape and dtype of `w_k` and `w_v`; None for one that was not given.

    Raises
    ------
    TypeError, ValueError
        As `compress_kv`.

    Notes
    -----
    A token gathers from every block that it is in, so nothing depends on the number of threads.

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
    kind = floats(k, "k", dtype)[1]
    for dy_given, x_given, w_given, names in ((dk_cmp, k, w_k, ("dk_cmp", "k", "w_k")), (dv_cmp, v, w_v, ("dv_cmp", "v", "w_v"))):
        x = same_kind(x_given, names[1], dtype, kind, "k")
        dy = same_kind(dy_given, names[0], dtype, kind, "k")
        _rank(x, names[1], packed)
        sequences = Sequences.of(cuts(cu_seqlens, x.shape[0]) if packed else None, size, step)
        expect_shape(dy, names[0], compressed_shape(x, size, step, sequences), "as compress_kv gives it")
        w, own = check_weight(w_given, names[2], x.shape, dtype, kind)
        dx = Result(x.shape, kind, k)
        dw = compress_gradients(dy, x, w, dx.array, (), kind, size, step, sequences, threads, names)
        grads.append(dx.value)
        weight_grads.append(None if dw is None else rounded(dw, real_of(kind), own, w_given))
    return grads[0], grads[1], weight_grads[0], weight_grads[1]


def rounded(x: np.ndarray, kind: str, to: str, like: Any) -> Any:
    """An array of sums in dtype `to`, as the kind of array that `like` is."""
    result = Result(x.shape, to, like)
    result.array[...] = converted(x, kind, to)
    return result.value


# ---- Selection ----------------------------------------------------------------------------------------------------


def select_into(
    q: np.ndarray, k_cmp: np.ndarray, lse: np.ndarray | None, out: np.ndarray, groups: np.ndarray | None, kind: str, rules: Rules,
    scale: float, begin: int, tokens: int, sequences: Sequences, threads: int | None,
) -> None:  # fmt: skip
    _core.nsa_select(
        q, k_cmp, lse, out, groups, scale, rules.causal, rules.size, rules.stride, rules.select, 0 if rules.by_query else rules.tile,
        rules.init, rules.local, begin, tokens, CMP_GROUP, sequences.tokens, sequences.blocks, kind, threads,
    )  # fmt: skip


def list_shape(q: np.ndarray, kv_heads: int, rules: Rules, sequences: Sequences, width: int) -> tuple[int, ...]:
    heads = kv_heads if rules.by_query else q.shape[-2]
    if sequences.rows is not None:
        return (heads, int(sequences.rows[-1]), width)
    return (q.shape[0], heads, rules.rows(q.shape[1]), width)


def lse_into(
    q: np.ndarray, k_cmp: np.ndarray, kind: str, rules: Rules, scale: float, sequences: Sequences, threads: int | None
) -> np.ndarray:
    """Log-sum-exp of the compressed branch, without its output for more than one dim."""
    out, lse = np.empty((*q.shape[:-1], 1), storage(kind)), np.empty(q.shape[:-1], real_of(kind))
    attend(
        q, k_cmp, k_cmp[..., :1], out, lse, kind, scale, rules.causal, threads, COMPRESSED_NAMES, cu=sequences.tokens,
        cu_kv=sequences.blocks, stride=rules.stride, last=rules.last,
    )  # fmt: skip
    return lse


def score_and_select_blocks(
    q: Any, k_cmp: Any, num_selected_blocks: int, compress_block_size: int, *, causal: bool = True, q_tile_size: int = 256,
    scale: float | None = None, cu_seqlens: Any = None, mode: str = "paper", compress_stride: int | None = None,
    select_block_size: int | None = None, init_blocks: int = 1, local_blocks: int = 2, lse: Any = None, dtype: Any = None,
    num_threads: int | None = None,
) -> Any:  # fmt: skip
    """The blocks that the selected branch attends to.

    Parameters
    ----------
    q : array_like
        ``(B, N, H, D)``, with `cu_seqlens` ``(T, H, D)``: float32, float16, bfloat16 or float64.
    k_cmp : array_like
        Compressed keys of all of its tokens, as `compress_kv` makes them, same dtype.
    num_selected_blocks : int
        Places n of a row of the result.
    compress_block_size : int
        Tokens l of a compressed block.
    causal : bool
        Paper mode: only blocks that begin at or before the query; mslk mode: before the end of its tile.
    q_tile_size : int
        mslk mode: queries that share a row. The last tile of a sequence is averaged over the queries that it has.
    scale : float, optional
        Factor of the products. Default: ``1 / sqrt(D)``.
    cu_seqlens : sequence of int, optional
        ``(sequences + 1,)`` numbers that rise from 0 to T.
    mode : {"paper", "mslk"}
        Paper: a row a query and KV head; a block's score is the sum of its compressed keys' probabilities, over the heads of the group
        and as often as they overlap it (Eq. 9 and 10). mslk: a row a tile and query head; the score is the compressed key's product
        with the tile's mean query.
    compress_stride, select_block_size, init_blocks, local_blocks : int
        Paper mode, see `nsa`.
    lse : array_like, optional
        Paper mode: ``(B, N, H)`` or ``(T, H)`` log-sum-exp of the compressed branch, as `compressed_attention` returns it: spares
        computing it anew.
    dtype : str or dtype, optional
        ``"bfloat16"`` says that uint16 arrays hold bfloat16 bits.
    num_threads : int, optional
        Threads for this call. Default: see `set_num_threads`. The result does not depend on it.

    Returns
    -------
    numpy.ndarray
        int32, blocks in rising order, then -1: paper ``(B, Hkv, N, n)``, mslk ``(B, H, tiles, n)``; with `cu_seqlens`
        ``(Hkv, T, n)`` and ``(H, all tiles, n)``. Of equal scores the lower block is taken. A score that is NaN comes last.

    Raises
    ------
    TypeError, ValueError
        An argument of the wrong kind, shape or range.

    Notes
    -----
    A thread holds the scores of some dozens of rows at a time: memory is linear in the number of tokens.

    Examples
    --------
    >>> import numpy as np
    >>> from blitz_attn import nsa
    >>> q = np.ones((1, 4, 1, 1))
    >>> k_cmp = np.array([1.0, 3.0]).reshape(1, 2, 1, 1)
    >>> nsa.score_and_select_blocks(q, k_cmp, 1, 2, q_tile_size=2, mode="mslk")[0, 0].tolist()
    [[0], [1]]
    """
    rules = rules_of(
        mode, compress_block_size, num_selected_blocks, q_tile_size, compress_stride, select_block_size, init_blocks, local_blocks, causal
    )
    threads = threads_of(num_threads)
    dtype, cu_seqlens = dtype_of(dtype), sums_of(cu_seqlens)
    queries, kind = floats(q, "q", dtype)
    keys = same_kind(k_cmp, "k_cmp", dtype, kind, "q")
    packed = cu_seqlens is not None
    _rank(queries, "q", packed)
    _rank(keys, "k_cmp", packed)
    sequences = Sequences.of(cuts(cu_seqlens, queries.shape[0]) if packed else None, rules.size, rules.stride, rules.tile)
    if sequences.blocks is not None and keys.shape[0] != sequences.blocks[-1]:
        raise ValueError(f"k_cmp: expected {sequences.blocks[-1]} blocks of compress_block_size = {rules.size}, got {keys.shape}")
    factor = scale_of(scale, queries.shape[-1])
    known = None
    if rules.by_query and lse is not None:
        known = reals(lse, "lse", None, kind)[0]
        expect_shape(known, "lse", queries.shape[:-1], "of q without D")
    elif rules.by_query:
        known = lse_into(queries, keys, kind, rules, factor, sequences, threads)
    chosen = np.empty(list_shape(queries, keys.shape[-2], rules, sequences, rules.count), np.int32)
    select_into(
        queries, keys, known, chosen, None, kind, rules, factor, 0, 0 if packed else queries.shape[1], sequences, threads
    )
    return chosen
