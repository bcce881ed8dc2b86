"""The three branches of native sparse attention, each by itself, and their gradients. Public through `blitz_attn.nsa`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Unpack, overload

import numpy as np

from .._arrays import flag
from .._floats import Result, real_of
from .._sentences import refusal
from .arrays import check_rank, dtype_of, expect_shape, leading, reals, same_kind
from .attend import Branch, Common, attend, attend_backward, compressed_branch, selected_branch, window_branch
from .compression import check_compressed
from .rules import Rules, mode_of, number, scale_of, threads_of
from .selection import last_tokens, lists_of
from .sequences import Sequences, packed_cuts, refuse_cuts_of_queries, sums_of

if TYPE_CHECKING:
    from .._options import BranchOptions
    from .._types import Array, ArrayLike, Integers, Kind

__all__ = [
    "compressed_attention",
    "compressed_attention_backward",
    "selected_attention",
    "selected_attention_backward",
    "window_attention",
    "window_attention_backward",
]


class Checked(NamedTuple):
    """Checked arguments of one branch."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    common: Common
    branch: Branch


def _arrays_of(
    q: Any, k: Any, v: Any, names: tuple[str, str], scale: Any, packed: bool, dtype: Any, num_threads: Any
) -> tuple[np.ndarray, np.ndarray, np.ndarray, Common]:
    """Queries, keys, values, and their `Common`. `names` are the caller's names of keys and values."""
    dtype = dtype_of(dtype)
    queries, kind = leading(q, "q", dtype)
    keys, values = (same_kind(x, name, dtype, kind, "q") for x, name in zip((k, v), names, strict=True))
    for x, name in ((queries, "q"), (keys, names[0]), (values, names[1])):
        check_rank(x, name, packed)
    return queries, keys, values, Common(kind, scale_of(scale, queries.shape[-1]), threads_of(num_threads))


def _tokens_of(q: np.ndarray, k: np.ndarray, cu_seqlens: Any, cu_seqlens_q: Any, whole: bool, tile: int = 1) -> Sequences:
    """The sequences of queries `q`, which are the last of the tokens `k`. With `whole`, `q` must have all tokens of `k`."""
    if cu_seqlens is not None:
        if cu_seqlens_q is None:
            _same_tokens(k, q)
        cu, own = packed_cuts(cu_seqlens, cu_seqlens_q, q.shape[0], k.shape[0])
        return Sequences.packed(cu, tile=tile, queries=own)
    refuse_cuts_of_queries(cu_seqlens_q)
    if whole or len(k) != len(q):
        _same_tokens(k, q)
    if k.shape[1] < q.shape[1]:
        raise refusal(
            ValueError, "k", f": expected at least the {q.shape[1]} tokens of ", "q", f" (layout (B, tokens, heads, D)), got {k.shape}"
        )
    return Sequences.batch(q.shape[1], k.shape[1])


def _same_tokens(k: np.ndarray, q: np.ndarray) -> None:
    if k.shape[:-2] != q.shape[:-2]:
        raise refusal(ValueError, "k", ": expected the tokens of ", "q", f" {q.shape}, got {k.shape}")


def _compressed(
    q: Any, k_cmp: Any, v_cmp: Any, compress_block_size: Any, stride: Any, causal: bool, scale: Any, cu_seqlens: Any, mode: Any, dtype: Any,
    num_threads: Any, tokens: Any = None, cu_seqlens_q: Any = None,
) -> Checked:  # fmt: skip
    size = number(compress_block_size, "compress_block_size")
    step = size if stride is None else number(stride, "stride")
    causal, mode, cu_seqlens = flag(causal, "causal"), mode_of(mode), sums_of(cu_seqlens)
    names = ("k_cmp", "v_cmp")
    queries, keys, values, common = _arrays_of(q, k_cmp, v_cmp, names, scale, cu_seqlens is not None, dtype, num_threads)
    rules = Rules(mode, size, step, size, 1, 1, 0, 0, causal)
    sequences = last_tokens(queries, tokens, cu_seqlens, cu_seqlens_q, rules)
    check_compressed(keys, size, step, sequences)
    return Checked(queries, keys, values, common, compressed_branch(rules, sequences))


def _selected(
    q: Any, k: Any, v: Any, block_indices: Any, block_size: Any, q_tile_size: Any, causal: bool, scale: Any, cu_seqlens: Any, dtype: Any,
    num_threads: Any, cu_seqlens_q: Any = None, whole: bool = True,
) -> Checked:  # fmt: skip
    size, tile, causal = number(block_size, "block_size"), number(q_tile_size, "q_tile_size"), flag(causal, "causal")
    cu_seqlens = sums_of(cu_seqlens)
    queries, keys, values, common = _arrays_of(q, k, v, ("k", "v"), scale, cu_seqlens is not None, dtype, num_threads)
    sequences = _tokens_of(queries, keys, cu_seqlens, cu_seqlens_q, whole, tile)
    rules = Rules("mslk", size, size, size, 1, tile, 0, 0, causal)
    heads = tuple(dict.fromkeys((queries.shape[-2], keys.shape[-2])))
    lists = lists_of(block_indices, rules, heads, queries, sequences)
    return Checked(queries, keys, values, common, selected_branch(rules, sequences, lists))


def _window(
    q: Any, k: Any, v: Any, window_size: Any, causal: bool, scale: Any, cu_seqlens: Any, dtype: Any, num_threads: Any,
    cu_seqlens_q: Any = None, whole: bool = True,
) -> Checked:  # fmt: skip
    causal, size, cu_seqlens = flag(causal, "causal"), number(window_size, "window_size"), sums_of(cu_seqlens)
    queries, keys, values, common = _arrays_of(q, k, v, ("k", "v"), scale, cu_seqlens is not None, dtype, num_threads)
    sequences = _tokens_of(queries, keys, cu_seqlens, cu_seqlens_q, whole)
    return Checked(queries, keys, values, common, window_branch(size, causal, sequences))


def _forward(given: Checked, like: Any, return_lse: bool) -> Any:
    q, k, v, common, branch = given
    return_lse = flag(return_lse, "return_lse")
    out = Result((*q.shape[:-1], v.shape[-1]), common.kind, like)
    lse = Result(q.shape[:-1], real_of(common.kind), like) if return_lse else None
    attend(q, k, v, out.array, None if lse is None else lse.array, common, branch)
    return out.value if lse is None else (out.value, lse.value)


def _backward(given: Checked, dout: Any, out: Any, lse: Any, dtype: Any, like: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
    q, k, v, common, branch = given
    shape = (*q.shape[:-1], v.shape[-1])
    results = [same_kind(x, name, dtype_of(dtype), common.kind, "q") for x, name in ((dout, "dout"), (out, "out"))]
    for x, name in zip(results, ("dout", "out"), strict=True):
        expect_shape(x, name, shape, "of the result")
    known, _ = reals(lse, "lse", None, common.kind)
    expect_shape(known, "lse", q.shape[:-1], "of ", "q", " without D")
    grads = [Result(x.shape, common.kind, y) for x, y in zip((q, k, v), like, strict=True)]
    attend_backward(results[0], q, k, v, results[1], known, tuple(x.array for x in grads), common, branch)
    return grads[0].value, grads[1].value, grads[2].value


@overload
def compressed_attention(
    q: Kind, k_cmp: Array, v_cmp: Array, compress_block_size: int, *, return_lse: Literal[False] = False, stride: int | None = None,
    mode: str = "paper", tokens: int | None = None, cu_seqlens_q: Integers | None = None, **options: Unpack[BranchOptions],
) -> Kind: ...  # fmt: skip
@overload
def compressed_attention(
    q: Kind, k_cmp: Array, v_cmp: Array, compress_block_size: int, *, return_lse: Literal[True], stride: int | None = None,
    mode: str = "paper", tokens: int | None = None, cu_seqlens_q: Integers | None = None, **options: Unpack[BranchOptions],
) -> tuple[Kind, Kind]: ...  # fmt: skip
@overload
def compressed_attention(
    q: Array, k_cmp: Array, v_cmp: Array, compress_block_size: int, *, return_lse: Literal[False] = False, stride: int | None = None,
    mode: str = "paper", tokens: int | None = None, cu_seqlens_q: Integers | None = None, **options: Unpack[BranchOptions],
) -> np.ndarray: ...  # fmt: skip
@overload
def compressed_attention(
    q: Array, k_cmp: Array, v_cmp: Array, compress_block_size: int, *, return_lse: Literal[True], stride: int | None = None,
    mode: str = "paper", tokens: int | None = None, cu_seqlens_q: Integers | None = None, **options: Unpack[BranchOptions],
) -> tuple[np.ndarray, np.ndarray]: ...  # fmt: skip
@overload
def compressed_attention(
    q: Array, k_cmp: Array, v_cmp: Array, compress_block_size: int, *, return_lse: bool, stride: int | None = None, mode: str = "paper",
    tokens: int | None = None, cu_seqlens_q: Integers | None = None, **options: Unpack[BranchOptions],
) -> Any: ...  # fmt: skip
def compressed_attention(
    q: Any, k_cmp: Any, v_cmp: Any, compress_block_size: int, *, stride: int | None = None, causal: bool = True, scale: float | None = None,
    cu_seqlens: Any = None, mode: str = "paper", tokens: int | None = None, cu_seqlens_q: Any = None, return_lse: bool = False,
    dtype: Any = None, num_threads: int | None = None,
) -> Any:  # fmt: skip
    """The compressed branch: attention over compressed keys and values.

    Parameters
    ----------
    q : array
        ``(B, N, H, D)``, with `cu_seqlens` ``(T, H, D)``: float32, float16, bfloat16 or float64.
    k_cmp, v_cmp : array
        The results of `compress_kv` for the tokens of the sequences, of the dtype of `q`: all complete blocks of each sequence, no fewer
        and no more.
    compress_block_size, stride : int
        The sizes that `compress_kv` was called with, in tokens. Default of `stride`: `compress_block_size`.
    causal : bool
        A query sees blocks that end at or before it (paper mode), or that begin at or before it (mslk mode). False: it sees all blocks.
    scale : float, optional
        Factor of the products. Default: ``1 / sqrt(D)``.
    cu_seqlens : sequence of int, optional
        ``(sequences + 1,)`` numbers of tokens that rise from 0 to T.
    mode : {"paper", "mslk"}
        The causal rule. The rule of mslk looks up to ``compress_block_size - 1`` tokens ahead.
    tokens : int, optional
        Number of tokens of each sequence, of which `q` has the last. Default: the number of tokens of `q`. With `cu_seqlens`, it must be
        None.
    cu_seqlens_q : sequence of int, optional
        For packed sequences of which `q` has only the last tokens: ``(sequences + 1,)`` numbers of queries that rise from 0. `cu_seqlens`
        then counts all tokens.
    return_lse : bool
        Also return the log-sum-exp.
    dtype : str or dtype, optional
        ``"bfloat16"`` says that uint16 arrays hold bfloat16 bits. Any other value is only checked against the arrays.
    num_threads : int, optional
        Threads for this call. Default: see `set_num_threads`. The result does not depend on it.

    Returns
    -------
    out : array
        An array like `q` with the last dimension of `v_cmp`; 0 for queries that see no block.
    lse : array
        With `return_lse`: ``(B, N, H)`` or ``(T, H)``, float32 (float64 for float64); -inf for queries that see no block.

    Raises
    ------
    TypeError, ValueError
        An argument of the wrong kind, shape or range.

    Examples
    --------
    >>> import numpy as np
    >>> from blitz_attn import nsa
    >>> q = np.zeros((1, 4, 1, 1))
    >>> kv = np.array([2.0, 4.0]).reshape(1, 2, 1, 1)
    >>> [nsa.compressed_attention(q, kv, kv, 2, mode=mode).ravel().tolist() for mode in ("paper", "mslk")]
    [[0.0, 2.0, 2.0, 3.0], [2.0, 2.0, 3.0, 3.0]]
    """
    checked = _compressed(
        q, k_cmp, v_cmp, compress_block_size, stride, causal, scale, cu_seqlens, mode, dtype, num_threads, tokens, cu_seqlens_q
    )
    return _forward(checked, q, return_lse)


@overload
def compressed_attention_backward(
    dout: Array, q: Kind, k_cmp: Array, v_cmp: Array, out: Array, lse: Array, compress_block_size: int, *, stride: int | None = None,
    mode: str = "paper", **options: Unpack[BranchOptions],
) -> tuple[Kind, Kind, Kind]: ...  # fmt: skip
@overload
def compressed_attention_backward(
    dout: Array, q: Array, k_cmp: Array, v_cmp: Array, out: Array, lse: Array, compress_block_size: int, *, stride: int | None = None,
    mode: str = "paper", **options: Unpack[BranchOptions],
) -> tuple[np.ndarray, np.ndarray, np.ndarray]: ...  # fmt: skip
def compressed_attention_backward(
    dout: Any, q: Any, k_cmp: Any, v_cmp: Any, out: Any, lse: Any, compress_block_size: int, *, stride: int | None = None,
    causal: bool = True, scale: float | None = None, cu_seqlens: Any = None, mode: str = "paper", dtype: Any = None,
    num_threads: int | None = None,
) -> tuple[Any, Any, Any]:  # fmt: skip
    """Gradients of `compressed_attention`.

    Parameters
    ----------
    dout : array
        Gradient of `out`.
    q, k_cmp, v_cmp, compress_block_size, stride, causal, scale, cu_seqlens, mode, dtype, num_threads
        The arguments of the forward call.
    out, lse : array
        The results of the forward call.

    Returns
    -------
    dq, dk_cmp, dv_cmp : array
        Of the shapes and dtype of `q`, `k_cmp` and `v_cmp`.

    Raises
    ------
    TypeError, ValueError
        As `compressed_attention`.

    Examples
    --------
    >>> import numpy as np
    >>> from blitz_attn import nsa
    >>> q = np.zeros((1, 4, 1, 1))
    >>> kv = np.array([2.0, 4.0]).reshape(1, 2, 1, 1)
    >>> out, lse = nsa.compressed_attention(q, kv, kv, 2, return_lse=True)
    >>> nsa.compressed_attention_backward(np.ones_like(out), q, kv, kv, out, lse, 2)[2].ravel().tolist()
    [2.5, 0.5]
    """
    checked = _compressed(q, k_cmp, v_cmp, compress_block_size, stride, causal, scale, cu_seqlens, mode, dtype, num_threads)
    return _backward(checked, dout, out, lse, dtype, (q, k_cmp, v_cmp))


@overload
def selected_attention(
    q: Kind, k: Array, v: Array, block_indices: ArrayLike, block_size: int, *, return_lse: Literal[False] = False, q_tile_size: int = 1,
    cu_seqlens_q: Integers | None = None, **options: Unpack[BranchOptions],
) -> Kind: ...  # fmt: skip
@overload
def selected_attention(
    q: Kind, k: Array, v: Array, block_indices: ArrayLike, block_size: int, *, return_lse: Literal[True], q_tile_size: int = 1,
    cu_seqlens_q: Integers | None = None, **options: Unpack[BranchOptions],
) -> tuple[Kind, Kind]: ...  # fmt: skip
@overload
def selected_attention(
    q: Array, k: Array, v: Array, block_indices: ArrayLike, block_size: int, *, return_lse: Literal[False] = False, q_tile_size: int = 1,
    cu_seqlens_q: Integers | None = None, **options: Unpack[BranchOptions],
) -> np.ndarray: ...  # fmt: skip
@overload
def selected_attention(
    q: Array, k: Array, v: Array, block_indices: ArrayLike, block_size: int, *, return_lse: Literal[True], q_tile_size: int = 1,
    cu_seqlens_q: Integers | None = None, **options: Unpack[BranchOptions],
) -> tuple[np.ndarray, np.ndarray]: ...  # fmt: skip
@overload
def selected_attention(
    q: Array, k: Array, v: Array, block_indices: ArrayLike, block_size: int, *, return_lse: bool, q_tile_size: int = 1,
    cu_seqlens_q: Integers | None = None, **options: Unpack[BranchOptions],
) -> Any: ...  # fmt: skip
def selected_attention(
    q: Any, k: Any, v: Any, block_indices: Any, block_size: int, *, q_tile_size: int = 1, causal: bool = True, scale: float | None = None,
    cu_seqlens: Any = None, cu_seqlens_q: Any = None, return_lse: bool = False, dtype: Any = None, num_threads: int | None = None,
) -> Any:  # fmt: skip
    """The selected branch: attention over the tokens of listed blocks.

    Parameters
    ----------
    q, k, v : array
        ``(B, N, H, D)``, ``(B, N, Hkv, D)`` and ``(B, N, Hkv, Dv)``; with `cu_seqlens`, B is left out. float32, float16, bfloat16 or
        float64. A `q` with fewer tokens than `k` and `v` has the last of these tokens.
    block_indices : array_like of int
        ``(B, H or Hkv, tiles, n)``, with `cu_seqlens` ``(H or Hkv, all tiles, n)``. A row names no block twice and ends at its first -1.
    block_size : int
        Number of tokens per block, at least 1.
    q_tile_size : int
        Number of queries that share a row, counted from the first query of `q`: 1 for a selection of ``mode="paper"``.
    causal : bool
        A query sees no token after itself.
    scale, cu_seqlens, cu_seqlens_q, return_lse, dtype, num_threads
        See `compressed_attention`.

    Returns
    -------
    out : array
        An array like `q` with the last dimension of `v`; 0 for queries that see no token.
    lse : array
        With `return_lse`: ``(B, N, H)`` or ``(T, H)``; -inf for queries that see no token.

    Raises
    ------
    TypeError, ValueError
        An argument of the wrong kind, shape or range.

    Examples
    --------
    >>> import numpy as np
    >>> from blitz_attn import nsa
    >>> q = np.zeros((1, 4, 1, 1))
    >>> v = np.arange(4.0).reshape(1, 4, 1, 1)
    >>> listed = np.array([[[[0, -1], [0, -1], [1, -1], [0, 1]]]])
    >>> nsa.selected_attention(q, q, v, listed, 2).ravel().tolist()
    [0.0, 0.5, 2.0, 1.5]
    """
    checked = _selected(
        q, k, v, block_indices, block_size, q_tile_size, causal, scale, cu_seqlens, dtype, num_threads, cu_seqlens_q, whole=False
    )
    return _forward(checked, q, return_lse)


@overload
def selected_attention_backward(
    dout: Array, q: Kind, k: Array, v: Array, out: Array, lse: Array, block_indices: ArrayLike, block_size: int, *, q_tile_size: int = 1,
    **options: Unpack[BranchOptions],
) -> tuple[Kind, Kind, Kind]: ...  # fmt: skip
@overload
def selected_attention_backward(
    dout: Array, q: Array, k: Array, v: Array, out: Array, lse: Array, block_indices: ArrayLike, block_size: int, *, q_tile_size: int = 1,
    **options: Unpack[BranchOptions],
) -> tuple[np.ndarray, np.ndarray, np.ndarray]: ...  # fmt: skip
def selected_attention_backward(
    dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, block_indices: Any, block_size: int, *, q_tile_size: int = 1,
    causal: bool = True, scale: float | None = None, cu_seqlens: Any = None, dtype: Any = None, num_threads: int | None = None,
) -> tuple[Any, Any, Any]:  # fmt: skip
    """Gradients of `selected_attention`. The selection counts as constant.

    Parameters
    ----------
    dout : array
        Gradient of `out`.
    q, k, v, block_indices, block_size, q_tile_size, causal, scale, cu_seqlens, dtype, num_threads
        The arguments of the forward call.
    out, lse : array
        The results of the forward call.

    Returns
    -------
    dq, dk, dv : array
        Of the shapes and dtype of `q`, `k` and `v`.

    Raises
    ------
    TypeError, ValueError
        As `selected_attention`.

    Examples
    --------
    >>> import numpy as np
    >>> from blitz_attn import nsa
    >>> q = np.zeros((1, 4, 1, 1))
    >>> v = np.arange(4.0).reshape(1, 4, 1, 1)
    >>> listed = np.array([[[[0], [0], [1], [0]]]])
    >>> out, lse = nsa.selected_attention(q, q, v, listed, 2, return_lse=True)
    >>> nsa.selected_attention_backward(np.ones_like(out), q, q, v, out, lse, listed, 2)[2].ravel().tolist()
    [2.0, 1.0, 1.0, 0.0]
    """
    checked = _selected(q, k, v, block_indices, block_size, q_tile_size, causal, scale, cu_seqlens, dtype, num_threads)
    return _backward(checked, dout, out, lse, dtype, (q, k, v))


@overload
def window_attention(
    q: Kind, k: Array, v: Array, window_size: int, *, return_lse: Literal[False] = False, cu_seqlens_q: Integers | None = None,
    **options: Unpack[BranchOptions],
) -> Kind: ...  # fmt: skip
@overload
def window_attention(
    q: Kind, k: Array, v: Array, window_size: int, *, return_lse: Literal[True], cu_seqlens_q: Integers | None = None,
    **options: Unpack[BranchOptions],
) -> tuple[Kind, Kind]: ...  # fmt: skip
@overload
def window_attention(
    q: Array, k: Array, v: Array, window_size: int, *, return_lse: Literal[False] = False, cu_seqlens_q: Integers | None = None,
    **options: Unpack[BranchOptions],
) -> np.ndarray: ...  # fmt: skip
@overload
def window_attention(
    q: Array, k: Array, v: Array, window_size: int, *, return_lse: Literal[True], cu_seqlens_q: Integers | None = None,
    **options: Unpack[BranchOptions],
) -> tuple[np.ndarray, np.ndarray]: ...  # fmt: skip
@overload
def window_attention(
    q: Array, k: Array, v: Array, window_size: int, *, return_lse: bool, cu_seqlens_q: Integers | None = None,
    **options: Unpack[BranchOptions],
) -> Any: ...  # fmt: skip
def window_attention(
    q: Any, k: Any, v: Any, window_size: int, *, causal: bool = True, scale: float | None = None, cu_seqlens: Any = None,
    cu_seqlens_q: Any = None, return_lse: bool = False, dtype: Any = None, num_threads: int | None = None,
) -> Any:  # fmt: skip
    """The window branch: attention over the tokens near each query.

    Parameters
    ----------
    q, k, v : array
        ``(B, N, H, D)``, ``(B, N, Hkv, D)`` and ``(B, N, Hkv, Dv)``; with `cu_seqlens`, B is left out. float32, float16, bfloat16 or
        float64. A `q` with fewer tokens than `k` and `v` has the last of these tokens.
    window_size : int
        Number W of keys in the window, at least 1. The last is the query's own key.
    causal : bool
        False: a query sees ``W // 2`` keys before it, as many after it, and its own key.
    scale, cu_seqlens, cu_seqlens_q, return_lse, dtype, num_threads
        See `compressed_attention`.

    Returns
    -------
    out : array
        An array like `q` with the last dimension of `v`.
    lse : array
        With `return_lse`: ``(B, N, H)`` or ``(T, H)``.

    Raises
    ------
    TypeError, ValueError
        An argument of the wrong kind, shape or range.

    Examples
    --------
    >>> import numpy as np
    >>> from blitz_attn import nsa
    >>> q = np.zeros((1, 4, 1, 1))
    >>> v = np.arange(4.0).reshape(1, 4, 1, 1)
    >>> [nsa.window_attention(q, q, v, 2, causal=causal).ravel().tolist() for causal in (True, False)]
    [[0.0, 0.5, 1.5, 2.5], [0.5, 1.0, 2.0, 2.5]]
    """
    checked = _window(q, k, v, window_size, causal, scale, cu_seqlens, dtype, num_threads, cu_seqlens_q, whole=False)
    return _forward(checked, q, return_lse)


@overload
def window_attention_backward(
    dout: Array, q: Kind, k: Array, v: Array, out: Array, lse: Array, window_size: int, **options: Unpack[BranchOptions]
) -> tuple[Kind, Kind, Kind]: ...
@overload
def window_attention_backward(
    dout: Array, q: Array, k: Array, v: Array, out: Array, lse: Array, window_size: int, **options: Unpack[BranchOptions]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]: ...
def window_attention_backward(
    dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, window_size: int, *, causal: bool = True, scale: float | None = None,
    cu_seqlens: Any = None, dtype: Any = None, num_threads: int | None = None,
) -> tuple[Any, Any, Any]:  # fmt: skip
    """Gradients of `window_attention`.

    Parameters
    ----------
    dout : array
        Gradient of `out`.
    q, k, v, window_size, causal, scale, cu_seqlens, dtype, num_threads
        The arguments of the forward call.
    out, lse : array
        The results of the forward call.

    Returns
    -------
    dq, dk, dv : array
        Of the shapes and dtype of `q`, `k` and `v`.

    Raises
    ------
    TypeError, ValueError
        As `window_attention`.

    Examples
    --------
    >>> import numpy as np
    >>> from blitz_attn import nsa
    >>> q = np.zeros((1, 4, 1, 1))
    >>> v = np.arange(4.0).reshape(1, 4, 1, 1)
    >>> out, lse = nsa.window_attention(q, q, v, 2, return_lse=True)
    >>> nsa.window_attention_backward(np.ones_like(out), q, q, v, out, lse, 2)[2].ravel().tolist()
    [1.5, 1.0, 1.0, 0.5]
    """
    return _backward(_window(q, k, v, window_size, causal, scale, cu_seqlens, dtype, num_threads), dout, out, lse, dtype, (q, k, v))
