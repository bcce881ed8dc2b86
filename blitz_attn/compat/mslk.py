"""The interface of upstream's ``mslk.attention.sparse_attn`` package: ``from blitz_attn.compat import mslk as sparse_attn``.

Names, order of arguments, defaults and shapes are upstream's; results are those of upstream's reference, `blitz_attn.nsa` in mode
``"mslk"``. Tensors may be torch tensors, which may require gradients, or any array that `blitz_attn.nsa` takes. `n_block_size`,
`chunk_size` and `max_seqlen` say how upstream's kernels go about it and change nothing here.

What upstream's fast path does otherwise than its reference is not repeated: selected blocks are not widened to 128 tokens, the window
holds `window_size` keys and not one more, not causal it looks both ways, and no block counts twice. Where upstream repeats block 0 to
fill a selection up, there is -1. Lengths need not be multiples of anything. What builds block lists for upstream's GPU kernels
(``build_fa4_block_sparse_tensors`` and its like) has no counterpart.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np

from .. import _arrays, reference
from .._nsa.arrays import floats, number
from .._sentences import renamed, shown
from ..nsa import _check as _check_nsa
from ..nsa import compress_kv as _compress_kv
from ..nsa import compress_kv_backward as _compress_kv_backward
from ..nsa import compute_gates as _compute_gates
from ..nsa import gate_and_combine as _gate_and_combine
from ..nsa import gating_backward as _gating_backward
from ..nsa import nsa as _nsa
from ..nsa import score_and_select_blocks as _score_and_select_blocks

__all__ = [
    "compress_kv",
    "compute_block_indices_reference",
    "compute_gates",
    "fused_compress_kv",
    "fused_compress_kv_backward",
    "fused_gate_and_combine",
    "fused_gating_backward",
    "fused_score_and_select_blocks",
    "gate_and_combine",
    "nsa",
    "nsa_backward_reference",
    "nsa_forward",
    "nsa_forward_reference",
    "score_and_select_blocks",
]

_NAMES = {
    "q": "Q",
    "k": "K",
    "v": "V",
    "k_cmp": "K_cmp",
    "dk_cmp": "dK_cmp",
    "dv_cmp": "dV_cmp",
    "w_k": "W_k",
    "w_v": "W_v",
    "w_k_compress": "W_k_compress",
    "w_v_compress": "W_v_compress",
    "o_cmp": "O_cmp",
    "o_slc": "O_slc",
    "o_win": "O_sld",
    "dout": "dO",
    "scale": "softmax_scale",
    "block_indices": "_block_indices",
}


def _named(call: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """The call, its errors in upstream's names."""
    try:
        return call(*args, **options)
    except (TypeError, ValueError) as error:
        raise renamed(error, _NAMES) from error


# ---- The whole --------------------------------------------------------------------------------------------------------


def _wants_gradient(*tensors: Any) -> bool:
    """Whether torch would want the gradient of a call on these."""
    torch_tensors = [x for x in tensors if x is not None and _arrays.family_of(x) is _arrays.TORCH]
    if len(torch_tensors) < sum(x is not None for x in tensors) or not any(x.requires_grad for x in torch_tensors):
        return False
    import torch

    return torch.is_grad_enabled()


def nsa(
    Q: Any,
    K: Any,
    V: Any,
    compress_block_size: int = 64,
    num_selected_blocks: int = 16,
    window_size: int = 512,
    W_k_compress: Any = None,
    W_v_compress: Any = None,
    gate_proj_weight: Any = None,
    causal: bool = True,
    softmax_scale: float | None = None,
    q_tile_size: int = 256,
    n_block_size: int = 128,
    cu_seqlens: Any = None,
    max_seqlen: int | None = None,
    num_cmp_selected_blocks: int | None = None,
) -> Any:
    """Native sparse attention with upstream's names, order of arguments and defaults. Not strictly causal: see `blitz_attn.nsa`.

    Parameters
    ----------
    Q, K, V : array_like
        (B, N, H, D), (B, N, H_kv, D), (B, N, H_kv, D); (T, H, D) and so on with `cu_seqlens`. torch tensors may require gradients.
    compress_block_size, num_selected_blocks, window_size, q_tile_size, num_cmp_selected_blocks : int
        As in `blitz_attn.nsa`.
    W_k_compress, W_v_compress : array_like, optional
        (H_kv, D, D).
    gate_proj_weight : array_like, optional
        (H, 3, D).
    causal : bool
        Causal in the sense of upstream's reference.
    softmax_scale : float, optional
        Default: 1 / sqrt(D).
    n_block_size, max_seqlen : int
        Not looked at.
    cu_seqlens : sequence of int, optional
        (sequences + 1,) offsets from 0 to T.

    Returns
    -------
    array
        Like Q.

    Raises
    ------
    TypeError, ValueError
        As `blitz_attn.nsa`, in upstream's names.

    Examples
    --------
    >>> import numpy as np
    >>> from blitz_attn.compat import mslk
    >>> rng = np.random.default_rng(0)
    >>> Q, K, V = (rng.standard_normal((1, 512, heads, 32), dtype=np.float32) for heads in (4, 2, 2))
    >>> O = mslk.nsa(Q, K, V, num_selected_blocks=4, window_size=64)
    >>> bool(abs(O - mslk.nsa_forward_reference(Q, K, V, num_selected_blocks=4, window_size=64)).max() < 1e-5)
    True
    """
    options = {
        "compress_block_size": compress_block_size,
        "num_selected_blocks": num_selected_blocks,
        "window_size": window_size,
        "w_k_compress": W_k_compress,
        "w_v_compress": W_v_compress,
        "gate_proj_weight": gate_proj_weight,
        "causal": causal,
        "scale": softmax_scale,
        "q_tile_size": q_tile_size,
        "num_cmp_selected_blocks": num_cmp_selected_blocks,
        "cu_seqlens": cu_seqlens,
        "mode": "mslk",
    }
    if _wants_gradient(Q, K, V, W_k_compress, W_v_compress, gate_proj_weight):
        from ..integrations.torch import nsa as differentiable

        return _named(differentiable, Q, K, V, **options)
    return _named(_nsa, Q, K, V, **options)


def nsa_forward(
    Q: Any,
    K: Any,
    V: Any,
    compress_block_size: int = 64,
    num_selected_blocks: int = 16,
    window_size: int = 512,
    W_k_compress: Any = None,
    W_v_compress: Any = None,
    gate_proj_weight: Any = None,
    causal: bool = True,
    softmax_scale: float | None = None,
    q_tile_size: int = 256,
    n_block_size: int = 128,
    cu_seqlens: Any = None,
    max_seqlen: int | None = None,
    num_cmp_selected_blocks: int | None = None,
) -> Any:
    """`nsa` under the name of upstream's forward pass.

    Parameters
    ----------
    Q, K, V, compress_block_size, num_selected_blocks, window_size, W_k_compress, W_v_compress, gate_proj_weight, causal, softmax_scale
        See `nsa`.
    q_tile_size, n_block_size, cu_seqlens, max_seqlen, num_cmp_selected_blocks
        Likewise.

    Returns
    -------
    array
        Like Q.

    Raises
    ------
    TypeError, ValueError
        As `nsa`.

    Examples
    --------
    >>> import numpy as np
    >>> from blitz_attn.compat import mslk
    >>> x = np.random.default_rng(0).standard_normal((1, 300, 2, 16), dtype=np.float32)
    >>> bool((mslk.nsa_forward(x, x, x) == mslk.nsa(x, x, x)).all())
    True
    """
    return nsa(
        Q, K, V, compress_block_size, num_selected_blocks, window_size, W_k_compress, W_v_compress, gate_proj_weight, causal,
        softmax_scale, q_tile_size, n_block_size, cu_seqlens, max_seqlen, num_cmp_selected_blocks,
    )  # fmt: skip


# ---- Upstream's references --------------------------------------------------------------------------------------------


def _expect_right(Q: Any, K: Any, V: Any, **options: Any) -> None:
    """Refuses what `nsa` would: the reference looks at little by itself."""
    given = (_nsa.__kwdefaults__ or {}) | {"q": Q, "k": K, "v": V, "mode": "mslk"} | options
    _named(_check_nsa, {name: x.detach() if _arrays.family_of(x) is _arrays.TORCH else x for name, x in given.items()})


def _reference(
    Q, K, V, compress_block_size, num_selected_blocks, window_size, W_k_compress, W_v_compress, gate_proj_weight, causal, softmax_scale,
    q_tile_size, block_indices,
):  # fmt: skip
    """(result, context) of the float64 reference."""
    _expect_right(
        Q, K, V, compress_block_size=compress_block_size, num_selected_blocks=num_selected_blocks, window_size=window_size,
        w_k_compress=W_k_compress, w_v_compress=W_v_compress, gate_proj_weight=gate_proj_weight, causal=causal, scale=softmax_scale,
        q_tile_size=q_tile_size, block_indices=block_indices,
    )  # fmt: skip
    return _named(
        reference.nsa, Q, K, V, compress_block_size=compress_block_size, num_selected_blocks=num_selected_blocks,
        window_size=window_size, w_k_compress=W_k_compress, w_v_compress=W_v_compress, gate_proj_weight=gate_proj_weight, causal=causal,
        scale=softmax_scale, q_tile_size=q_tile_size, mode="mslk", block_indices=block_indices, return_context=True,
    )  # fmt: skip


def nsa_forward_reference(
    Q: Any,
    K: Any,
    V: Any,
    compress_block_size: int = 64,
    num_selected_blocks: int = 16,
    window_size: int = 512,
    W_k_compress: Any = None,
    W_v_compress: Any = None,
    gate_proj_weight: Any = None,
    causal: bool = True,
    softmax_scale: float | None = None,
    q_tile_size: int = 256,
    _block_indices: Any = None,
) -> np.ndarray:
    """Upstream's reference: `blitz_attn.reference.nsa` in mode ``"mslk"``. Slow.

    Parameters
    ----------
    Q, K, V, compress_block_size, num_selected_blocks, window_size, W_k_compress, W_v_compress, gate_proj_weight, causal, softmax_scale
        See `nsa`.
    q_tile_size : int
        See `nsa`.
    _block_indices : array_like of int, optional
        Blocks to use in place of the best: (B, H, tiles, n).

    Returns
    -------
    numpy.ndarray
        float64, the shape of Q. Rows that see no selected key get 0 from that branch, where upstream has NaN.

    Raises
    ------
    TypeError, ValueError
        As `nsa`.

    Examples
    --------
    >>> import numpy as np
    >>> from blitz_attn.compat import mslk
    >>> x = np.ones((1, 8, 1, 2))
    >>> mslk.nsa_forward_reference(x, x, x, compress_block_size=2, q_tile_size=4)[0, :, 0, 0].round(12).tolist()
    [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    """
    return _reference(
        Q, K, V, compress_block_size, num_selected_blocks, window_size, W_k_compress, W_v_compress, gate_proj_weight, causal,
        softmax_scale, q_tile_size, _block_indices,
    )[0]  # fmt: skip


def nsa_backward_reference(
    Q: Any,
    K: Any,
    V: Any,
    dO: Any,
    compress_block_size: int = 64,
    num_selected_blocks: int = 16,
    window_size: int = 512,
    W_k_compress: Any = None,
    W_v_compress: Any = None,
    gate_proj_weight: Any = None,
    causal: bool = True,
    softmax_scale: float | None = None,
    q_tile_size: int = 256,
    _block_indices: Any = None,
) -> dict[str, np.ndarray | None]:
    """Gradients of `nsa_forward_reference`: `blitz_attn.reference.nsa_backward` in mode ``"mslk"``. Slow.

    Parameters
    ----------
    Q, K, V, compress_block_size, num_selected_blocks, window_size, W_k_compress, W_v_compress, gate_proj_weight, causal, softmax_scale
        See `nsa`.
    dO : array_like
        Gradient of the result.
    q_tile_size, _block_indices
        See `nsa_forward_reference`.

    Returns
    -------
    dict
        float64 gradients ``dQ``, ``dK``, ``dV``, ``dW_k_compress``, ``dW_v_compress``, ``dgate_proj_weight``; None for what was not
        given.

    Raises
    ------
    TypeError, ValueError
        As `nsa`.

    Examples
    --------
    >>> import numpy as np
    >>> from blitz_attn.compat import mslk
    >>> x = np.ones((1, 8, 1, 2))
    >>> grads = mslk.nsa_backward_reference(x, x, x, x, compress_block_size=2, q_tile_size=4)
    >>> float(grads["dV"].sum().round(9)), grads["dW_k_compress"]
    (16.0, None)
    """
    _, context = _reference(
        Q, K, V, compress_block_size, num_selected_blocks, window_size, W_k_compress, W_v_compress, gate_proj_weight, causal,
        softmax_scale, q_tile_size, _block_indices,
    )  # fmt: skip
    given, _ = floats(dO.detach() if _arrays.family_of(dO) is _arrays.TORCH else dO, "dO", None, strided=True)
    if _arrays.shape_of(dO) != given.shape:  # it says what it holds only when it is asked as NumPy asks
        dO = given
    grads = _named(reference.nsa_backward, dO, context)
    names = ("dQ", "dK", "dV", "dW_k_compress", "dW_v_compress", "dgate_proj_weight")
    return dict(zip(names, grads, strict=False))


def compute_block_indices_reference(
    Q: Any,
    K: Any,
    compress_block_size: int = 64,
    num_selected_blocks: int = 16,
    W_k_compress: Any = None,
    causal: bool = True,
    softmax_scale: float | None = None,
    q_tile_size: int = 256,
) -> np.ndarray:
    """Blocks that `nsa_forward_reference` selects, for its `_block_indices`.

    Parameters
    ----------
    Q, K, compress_block_size, num_selected_blocks, W_k_compress, causal, softmax_scale, q_tile_size
        See `nsa`.

    Returns
    -------
    numpy.ndarray
        int64 (B, H, tiles, n), ascending, then -1.

    Raises
    ------
    TypeError, ValueError
        As `nsa`.

    Examples
    --------
    >>> import numpy as np
    >>> from blitz_attn.compat import mslk
    >>> x = np.ones((1, 8, 1, 2))
    >>> mslk.compute_block_indices_reference(x, x, 2, 2, q_tile_size=4)[0, 0].tolist()
    [[0, 1], [0, 1]]
    """
    _expect_right(
        Q, K, K, compress_block_size=compress_block_size, num_selected_blocks=num_selected_blocks, w_k_compress=W_k_compress, causal=causal,
        scale=softmax_scale, q_tile_size=q_tile_size,
    )  # fmt: skip
    k_cmp, _ = _named(reference.compress_kv, K, K, compress_block_size, W_k_compress)
    count = _places(num_selected_blocks, k_cmp)
    scale, options = softmax_scale, {"causal": causal, "q_tile_size": q_tile_size, "mode": "mslk"}
    chosen = _named(reference.score_and_select_blocks, Q, k_cmp, count, compress_block_size, scale=scale, **options)
    return chosen.astype(np.int64)


# ---- Sequences, padded as upstream has them -----------------------------------------------------------------------------


def _cuts(cu_seqlens: Any, step: Callable[[int], int]) -> np.ndarray:
    """Where each sequence's rows begin, when a sequence of n tokens has step(n) of them."""
    sums = _arrays.integers(cu_seqlens, "cu_seqlens")
    if sums.ndim != 1 or sums.size == 0 or sums[0] != 0 or (np.diff(sums) < 0).any():
        raise ValueError(f"cu_seqlens: expected numbers rising from 0, got {shown(sums.tolist())}")
    lengths = [int(b) - int(a) for a, b in pairwise(sums)]
    return np.cumsum([0, *map(step, lengths)])


def _stack(rows: Any, cuts: np.ndarray, fill: int) -> Any:
    """(sequences, most rows, ...) of rows that lie one sequence after the other."""
    most = int(np.diff(cuts).max(initial=0))
    shape = (len(cuts) - 1, most, *rows.shape[1:])
    stacked = rows.new_full(shape, fill) if _arrays.family_of(rows) is _arrays.TORCH else np.full(shape, fill, rows.dtype)
    for n, (a, b) in enumerate(pairwise(cuts)):
        stacked[n, : b - a] = rows[a:b]
    return stacked


def _unstack(stacked: Any, name: str, cuts: np.ndarray) -> Any:
    """The way back."""
    shape, sequences, most = _arrays.shape_of(stacked), len(cuts) - 1, int(np.diff(cuts).max(initial=0))
    if len(shape) != 4 or shape[0] != sequences or shape[1] < most:
        raise ValueError(f"{name}: expected shape ({sequences} sequences, {most} or more blocks, H, D), got {shape}")
    if _arrays.family_of(stacked) is not _arrays.TORCH:
        stacked = _arrays.array(stacked, name, "an array")
    parts = [stacked[n, : b - a] for n, (a, b) in enumerate(pairwise(cuts))]
    parts = parts or [stacked.reshape((0, *stacked.shape[2:]))]  # there are no sequences
    if _arrays.family_of(stacked) is _arrays.TORCH:
        import torch

        return torch.cat(parts)
    return np.concatenate(parts)


# ---- Compression ------------------------------------------------------------------------------------------------------


def compress_kv(K: Any, V: Any, block_size: int, W_k: Any = None, W_v: Any = None) -> tuple[Any, Any]:
    """Means of blocks of keys and values, each times its head's matrix.

    Parameters
    ----------
    K, V : array_like
        (B, N, H_kv, D).
    block_size : int
        Tokens a block.
    W_k, W_v : array_like, optional
        (H_kv, D, D).

    Returns
    -------
    K_cmp, V_cmp : array
        (B, N // block_size, H_kv, D).

    Raises
    ------
    TypeError, ValueError
        As `blitz_attn.nsa.compress_kv`, in upstream's names.

    Examples
    --------
    >>> import numpy as np
    >>> from blitz_attn.compat import mslk
    >>> K = np.arange(6, dtype=np.float32).reshape(1, 6, 1, 1)
    >>> mslk.compress_kv(K, K, 2)[0].ravel().tolist()
    [0.5, 2.5, 4.5]
    """
    return _named(_compress_kv, K, V, block_size, W_k, W_v)


def fused_compress_kv(
    K: Any, V: Any, block_size: int, W_k: Any = None, W_v: Any = None, cu_seqlens: Any = None, max_seqlen: int | None = None
) -> tuple[Any, Any]:
    """`compress_kv`, of packed sequences too.

    Parameters
    ----------
    K, V : array_like
        (B, N, H_kv, D), or (T, H_kv, D) with `cu_seqlens`.
    block_size, W_k, W_v
        See `compress_kv`.
    cu_seqlens : sequence of int, optional
        (sequences + 1,) offsets from 0 to T.
    max_seqlen : int, optional
        Not looked at.

    Returns
    -------
    K_cmp, V_cmp : array
        (B, N // block_size, H_kv, D); of packed sequences (sequences, most blocks, H_kv, D), 0 behind a sequence's blocks.

    Raises
    ------
    TypeError, ValueError
        As `compress_kv`.

    Examples
    --------
    >>> import numpy as np
    >>> from blitz_attn.compat import mslk
    >>> K = np.arange(7, dtype=np.float32).reshape(7, 1, 1)
    >>> mslk.fused_compress_kv(K, K, 2, cu_seqlens=[0, 3, 7])[0][..., 0, 0].tolist()
    [[0.5, 0.0], [3.5, 5.5]]
    """
    if cu_seqlens is None:
        return compress_kv(K, V, block_size, W_k, W_v)
    packed = _named(_compress_kv, K, V, block_size, W_k, W_v, cu_seqlens=cu_seqlens)
    size = number(block_size, "block_size")
    cuts = _cuts(cu_seqlens, lambda n: n // size)
    return _stack(packed[0], cuts, 0), _stack(packed[1], cuts, 0)


def fused_compress_kv_backward(
    dK_cmp: Any, dV_cmp: Any, K: Any, V: Any, block_size: int, W_k: Any = None, W_v: Any = None, cu_seqlens: Any = None
) -> tuple[Any, Any, Any, Any]:
    """Gradients of `fused_compress_kv`.

    Parameters
    ----------
    dK_cmp, dV_cmp : array_like
        Gradients of its results, in their shapes.
    K, V, block_size, W_k, W_v, cu_seqlens
        Its arguments.

    Returns
    -------
    dK, dV, dW_k, dW_v : array
        None for a weight that was not given.

    Raises
    ------
    TypeError, ValueError
        As `compress_kv`.

    Examples
    --------
    >>> import numpy as np
    >>> from blitz_attn.compat import mslk
    >>> K, dK_cmp = np.zeros((1, 5, 1, 1), np.float32), np.ones((1, 2, 1, 1), np.float32)
    >>> mslk.fused_compress_kv_backward(dK_cmp, dK_cmp, K, K, 2)[0].ravel().tolist()
    [0.5, 0.5, 0.5, 0.5, 0.0]
    """
    if cu_seqlens is None:
        return _named(_compress_kv_backward, dK_cmp, dV_cmp, K, V, block_size, W_k, W_v)
    size = number(block_size, "block_size")
    cuts = _cuts(cu_seqlens, lambda n: n // size)
    packed = _unstack(dK_cmp, "dK_cmp", cuts), _unstack(dV_cmp, "dV_cmp", cuts)
    return _named(_compress_kv_backward, *packed, K, V, block_size, W_k, W_v, cu_seqlens=cu_seqlens)


# ---- Selection --------------------------------------------------------------------------------------------------------


def _places(num_selected_blocks: Any, k_cmp: Any) -> int:
    """Places of a list: no more than there are blocks."""
    wanted, shape = number(num_selected_blocks, "num_selected_blocks"), _arrays.shape_of(k_cmp)
    return min(wanted, shape[1]) or wanted if len(shape) > 1 else wanted


def score_and_select_blocks(
    Q: Any,
    K_cmp: Any,
    num_selected_blocks: int,
    compress_block_size: int,
    causal: bool = True,
    q_tile_size: int = 256,
    softmax_scale: float | None = None,
) -> Any:
    """The blocks that each tile of queries attends to: those of the highest mean score.

    Parameters
    ----------
    Q : array_like
        (B, N, H, D).
    K_cmp : array_like
        (B, blocks, H_kv, D), of `compress_kv`.
    num_selected_blocks : int
        Blocks to select.
    compress_block_size, q_tile_size : int
        Tokens a block, queries a tile.
    causal : bool
        Only blocks that begin before the end of the tile.
    softmax_scale : float, optional
        Default: 1 / sqrt(D).

    Returns
    -------
    array of int32
        (B, H, tiles, min(num_selected_blocks, blocks)), ascending. -1, at the end, where upstream repeats block 0; all of
        num_selected_blocks places are -1 where there is no block.

    Raises
    ------
    TypeError, ValueError
        As `blitz_attn.nsa.score_and_select_blocks`, in upstream's names.

    Examples
    --------
    >>> import numpy as np
    >>> from blitz_attn.compat import mslk
    >>> Q, K_cmp = np.ones((1, 8, 1, 1), np.float32), np.array([1, 3, 2, 4], np.float32).reshape(1, 4, 1, 1)
    >>> mslk.score_and_select_blocks(Q, K_cmp, 2, 2, q_tile_size=4)[0, 0].tolist()
    [[0, 1], [1, 3]]
    """
    count = _places(num_selected_blocks, K_cmp)
    chosen = _named(
        _score_and_select_blocks, Q, K_cmp, count, compress_block_size, causal=causal, q_tile_size=q_tile_size, scale=softmax_scale,
        mode="mslk",
    )  # fmt: skip
    return _arrays.as_kind_of(chosen, Q)


def fused_score_and_select_blocks(
    Q: Any,
    K_cmp: Any,
    num_selected_blocks: int,
    compress_block_size: int,
    causal: bool = True,
    q_tile_size: int = 256,
    softmax_scale: float | None = None,
    cu_seqlens: Any = None,
    max_seqlen: int | None = None,
) -> Any:
    """`score_and_select_blocks`, of packed sequences too.

    Parameters
    ----------
    Q : array_like
        (B, N, H, D), or (T, H, D) with `cu_seqlens`.
    K_cmp : array_like
        (B, blocks, H_kv, D), of `fused_compress_kv`.
    num_selected_blocks, compress_block_size, causal, q_tile_size, softmax_scale
        See `score_and_select_blocks`.
    cu_seqlens : sequence of int, optional
        (sequences + 1,) offsets from 0 to T.
    max_seqlen : int, optional
        Not looked at.

    Returns
    -------
    array of int32
        (B, H, tiles, n); of packed sequences (sequences, H, most tiles, n) with -1 behind a sequence's tiles. The last tile of a
        sequence may have fewer queries than the others; upstream leaves it out.

    Raises
    ------
    TypeError, ValueError
        As `score_and_select_blocks`.

    Examples
    --------
    >>> import numpy as np
    >>> from blitz_attn.compat import mslk
    >>> Q, K_cmp = np.ones((6, 1, 1), np.float32), np.array([[1, 0], [1, 2]], np.float32).reshape(2, 2, 1, 1)
    >>> mslk.fused_score_and_select_blocks(Q, K_cmp, 1, 2, q_tile_size=4, cu_seqlens=[0, 2, 6])[:, 0].tolist()
    [[[0]], [[1]]]
    """
    if cu_seqlens is None:
        return score_and_select_blocks(Q, K_cmp, num_selected_blocks, compress_block_size, causal, q_tile_size, softmax_scale)
    size, tile = number(compress_block_size, "compress_block_size"), number(q_tile_size, "q_tile_size")
    packed = _unstack(K_cmp, "K_cmp", _cuts(cu_seqlens, lambda n: n // size))
    count = _places(num_selected_blocks, K_cmp)
    chosen = _named(
        _score_and_select_blocks, Q, packed, count, compress_block_size, causal=causal, q_tile_size=q_tile_size, scale=softmax_scale,
        mode="mslk", cu_seqlens=cu_seqlens,
    )  # fmt: skip
    stacked = _stack(chosen.swapaxes(0, 1), _cuts(cu_seqlens, lambda n: -(-n // tile)), -1).swapaxes(1, 2)
    return _arrays.as_kind_of(stacked, Q)


# ---- Gates ------------------------------------------------------------------------------------------------------------


def compute_gates(Q: Any, gate_proj_weight: Any = None, chunk_size: int | None = None) -> Any:
    """Three gates a query and head: sigmoids of the query times the head's weights, or a third each.

    Parameters
    ----------
    Q : array_like
        (..., H, D).
    gate_proj_weight : array_like, optional
        (H, 3, D).
    chunk_size : int, optional
        Not looked at.

    Returns
    -------
    array
        (..., H, 3): of the compressed, the selected and the window branch. They do not add up to 1.

    Raises
    ------
    TypeError, ValueError
        As `blitz_attn.nsa.compute_gates`, in upstream's names.

    Examples
    --------
    >>> import numpy as np
    >>> from blitz_attn.compat import mslk
    >>> mslk.compute_gates(np.ones((1, 1, 2), np.float32), np.zeros((1, 3, 2), np.float32)).tolist()
    [[[0.5, 0.5, 0.5]]]
    """
    return _named(_compute_gates, Q, gate_proj_weight)


def gate_and_combine(O_cmp: Any, O_slc: Any, O_sld: Any, gates: Any, chunk_size: int | None = None) -> Any:
    """The sum of the three branches, each times its gate.

    Parameters
    ----------
    O_cmp, O_slc, O_sld : array_like
        (..., H, D) results of the compressed, the selected and the window branch.
    gates : array_like
        (..., H, 3).
    chunk_size : int, optional
        Not looked at.

    Returns
    -------
    array
        (..., H, D).

    Raises
    ------
    TypeError, ValueError
        As `blitz_attn.nsa.gate_and_combine`, in upstream's names.

    Examples
    --------
    >>> import numpy as np
    >>> from blitz_attn.compat import mslk
    >>> x = np.ones((1, 1, 2), np.float32)
    >>> mslk.gate_and_combine(x, 2 * x, 4 * x, np.full((1, 1, 3), 0.5, np.float32)).tolist()
    [[[3.5, 3.5]]]
    """
    return _named(_gate_and_combine, O_cmp, O_slc, O_sld, gates)


def fused_gate_and_combine(Q: Any, O_cmp: Any, O_slc: Any, O_sld: Any, gate_proj_weight: Any = None) -> Any:
    """`gate_and_combine` with the gates of `compute_gates`.

    Parameters
    ----------
    Q, gate_proj_weight : array_like
        Arguments of `compute_gates`.
    O_cmp, O_slc, O_sld : array_like
        Arguments of `gate_and_combine`.

    Returns
    -------
    array
        (..., H, D).

    Raises
    ------
    TypeError, ValueError
        As the two.

    Examples
    --------
    >>> import numpy as np
    >>> from blitz_attn.compat import mslk
    >>> x = np.ones((1, 1, 2), np.float32)
    >>> mslk.fused_gate_and_combine(x, x, 2 * x, 4 * x, np.zeros((1, 3, 2), np.float32)).tolist()
    [[[3.5, 3.5]]]
    """
    gates, shape, expected = compute_gates(Q, gate_proj_weight), _arrays.shape_of(Q), _arrays.shape_of(O_cmp)
    if len(expected) in (3, 4) and shape[:-1] != expected[:-1]:
        raise ValueError(f"Q: expected the tokens and heads of O_cmp {expected}, got {shape}")
    return gate_and_combine(O_cmp, O_slc, O_sld, gates)


def fused_gating_backward(
    Q: Any, dO: Any, O_cmp: Any, O_slc: Any, O_sld: Any, gates: Any, gate_proj_weight: Any
) -> tuple[Any, Any, Any, Any, Any]:
    """Gradients of `fused_gate_and_combine`.

    Parameters
    ----------
    Q, O_cmp, O_slc, O_sld, gate_proj_weight : array_like
        Its arguments.
    dO : array_like
        Gradient of its result.
    gates : array_like
        Of `compute_gates`.

    Returns
    -------
    dO_cmp, dO_slc, dO_sld, dQ_gate, dW_gate : array
        The last two are None without weights.

    Raises
    ------
    TypeError, ValueError
        As `blitz_attn.nsa.gating_backward`, in upstream's names.

    Examples
    --------
    >>> import numpy as np
    >>> from blitz_attn.compat import mslk
    >>> x, w = np.ones((1, 1, 2), np.float32), np.zeros((1, 3, 2), np.float32)
    >>> mslk.fused_gating_backward(x, x, x, x, x, mslk.compute_gates(x, w), w)[4].tolist()
    [[[0.5, 0.5], [0.5, 0.5], [0.5, 0.5]]]
    """
    return _named(_gating_backward, Q, dO, O_cmp, O_slc, O_sld, gates, gate_proj_weight)
