"""The interface of upstream's ``mslk.attention.sparse_attn`` package: ``from blitz_attn.compat import mslk as sparse_attn``.

Names, order of arguments, defaults and shapes are upstream's. Results are those of upstream's reference, as `blitz_attn.nsa` computes them
in mode ``"mslk"``. This mode is not strictly causal. Each function names the function of this library that it calls: shapes, dtypes and
errors are described there, and errors name upstream's arguments. Arrays are ``(B, N, H, D)``, or ``(T, H, D)`` with `cu_seqlens`, an
integer array ``(sequences + 1,)`` of offsets from 0 to T. They may be torch tensors or any other array that `blitz_attn.nsa` takes. Tensors
may require gradients in `nsa` and `nsa_forward`. `n_block_size`, `chunk_size` and `max_seqlen` tune upstream's kernels, and are ignored
here.

Upstream's fast path differs from its own reference, and this module follows the reference: selected blocks are not widened to 128 tokens,
the window holds `window_size` keys and not one more, the window of a call that is not causal reaches both ways, and no block counts twice.
Unused places of a selection are -1, where upstream repeats block 0. Lengths need not be multiples of anything. The functions that build
block lists for upstream's GPU kernels (``build_fa4_block_sparse_tensors`` and its like) have no counterpart.

>>> import numpy as np
>>> from blitz_attn.compat import mslk
>>> rng = np.random.default_rng(0)
>>> Q, K, V = (rng.standard_normal((1, 512, heads, 32), dtype=np.float32) for heads in (4, 2, 2))
>>> O = mslk.nsa(Q, K, V, num_selected_blocks=4, window_size=64)
>>> bool(abs(O - mslk.nsa_forward_reference(Q, K, V, num_selected_blocks=4, window_size=64)).max() < 1e-5)
True
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np

from .. import _arrays, reference
from .. import nsa as _library
from .._floats import floats
from .._nsa.call import Options, checked
from .._nsa.rules import number
from .._sentences import rename, shown

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

# From the library's names of arguments to upstream's.
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
_NOT_OPTIONS = ("Q", "K", "V", "dO", "n_block_size", "max_seqlen")  # arguments of the functions below that are not options of `nsa`


def __dir__() -> list[str]:
    return __all__


def _named(call: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """The result of `call`. Its errors name upstream's arguments."""
    try:
        return call(*args, **options)
    except (TypeError, ValueError) as error:
        rename(error, _NAMES)
        raise


def _is_torch(x: Any) -> bool:
    return _arrays.family_of(x) is _arrays.TORCH


def _detached(x: Any) -> Any:
    """A torch tensor without its history; anything else unchanged."""
    return x.detach() if _is_torch(x) else x


# ---- The whole operation --------------------------------------------------------------------------------------------------------


def _options(given: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments of `blitz_attn.nsa.nsa` from the arguments of one of the functions below."""
    own = {upstream: name for name, upstream in _NAMES.items()}
    return {own.get(name, name): x for name, x in given.items() if name not in _NOT_OPTIONS} | {"mode": "mslk"}


def _wants_gradient(*tensors: Any) -> bool:
    """Whether torch records a gradient for a call on these tensors."""
    given = [x for x in tensors if x is not None]
    if not all(map(_is_torch, given)) or not any(x.requires_grad for x in given):
        return False
    import torch

    return torch.is_grad_enabled()


def nsa(
    Q: Any, K: Any, V: Any, compress_block_size: int = 64, num_selected_blocks: int = 16, window_size: int = 512, W_k_compress: Any = None,
    W_v_compress: Any = None, gate_proj_weight: Any = None, causal: bool = True, softmax_scale: float | None = None, q_tile_size: int = 256,
    n_block_size: int = 128, cu_seqlens: Any = None, max_seqlen: int | None = None, num_cmp_selected_blocks: int | None = None,
) -> Any:  # fmt: skip
    """See `blitz_attn.nsa.nsa` with ``mode="mslk"``. Torch tensors that require gradients get them."""
    options = _options(locals())
    if _wants_gradient(Q, K, V, W_k_compress, W_v_compress, gate_proj_weight):
        from ..integrations.torch import nsa as differentiable

        return _named(differentiable, Q, K, V, **options)
    return _named(_library.nsa, Q, K, V, **options)


def nsa_forward(
    Q: Any, K: Any, V: Any, compress_block_size: int = 64, num_selected_blocks: int = 16, window_size: int = 512, W_k_compress: Any = None,
    W_v_compress: Any = None, gate_proj_weight: Any = None, causal: bool = True, softmax_scale: float | None = None, q_tile_size: int = 256,
    n_block_size: int = 128, cu_seqlens: Any = None, max_seqlen: int | None = None, num_cmp_selected_blocks: int | None = None,
) -> Any:  # fmt: skip
    """See `blitz_attn.nsa.nsa`: this is `nsa` under the name of upstream's forward pass."""
    return nsa(
        Q, K, V, compress_block_size, num_selected_blocks, window_size, W_k_compress, W_v_compress, gate_proj_weight, causal,
        softmax_scale, q_tile_size, n_block_size, cu_seqlens, max_seqlen, num_cmp_selected_blocks,
    )  # fmt: skip


# ---- Upstream's references --------------------------------------------------------------------------------------------


def _refuse_wrong(Q: Any, K: Any, V: Any, options: dict[str, Any]) -> None:
    """Refuses the arguments that `nsa` refuses: the float64 reference checks little by itself."""
    given = {name: _detached(x) for name, x in (_library.USUAL | options).items()}
    _named(checked, _detached(Q), _detached(K), _detached(V), Options(**given))


def _reference(Q: Any, K: Any, V: Any, options: dict[str, Any]) -> tuple[np.ndarray, reference.NSAContext]:
    _refuse_wrong(Q, K, V, options)
    return _named(reference.nsa, Q, K, V, **options, return_context=True)


def nsa_forward_reference(
    Q: Any, K: Any, V: Any, compress_block_size: int = 64, num_selected_blocks: int = 16, window_size: int = 512, W_k_compress: Any = None,
    W_v_compress: Any = None, gate_proj_weight: Any = None, causal: bool = True, softmax_scale: float | None = None, q_tile_size: int = 256,
    _block_indices: Any = None,
) -> np.ndarray:  # fmt: skip
    """See `blitz_attn.reference.nsa` with ``mode="mslk"``: float64 and slow. A branch without keys gives 0, where upstream has NaN."""
    return _reference(Q, K, V, _options(locals()))[0]


def nsa_backward_reference(
    Q: Any, K: Any, V: Any, dO: Any, compress_block_size: int = 64, num_selected_blocks: int = 16, window_size: int = 512,
    W_k_compress: Any = None, W_v_compress: Any = None, gate_proj_weight: Any = None, causal: bool = True,
    softmax_scale: float | None = None, q_tile_size: int = 256, _block_indices: Any = None,
) -> dict[str, np.ndarray | None]:  # fmt: skip
    """See `blitz_attn.reference.nsa_backward`. Returns a dict of the float64 gradients ``dQ``, ``dK``, ``dV``, ``dW_k_compress``,
    ``dW_v_compress`` and ``dgate_proj_weight``; None for a weight that was not given."""
    _, context = _reference(Q, K, V, _options(locals()))
    given, _ = floats(_detached(dO), "dO", None, strided=True)
    if _arrays.shape_of(dO) != given.shape:  # an exporter may show its shape only when NumPy asks for the array
        dO = given
    grads = _named(reference.nsa_backward, dO, context)
    names = ("dQ", "dK", "dV", "dW_k_compress", "dW_v_compress", "dgate_proj_weight")
    return dict(zip(names, grads, strict=False))


def compute_block_indices_reference(
    Q: Any, K: Any, compress_block_size: int = 64, num_selected_blocks: int = 16, W_k_compress: Any = None, causal: bool = True,
    softmax_scale: float | None = None, q_tile_size: int = 256,
) -> np.ndarray:  # fmt: skip
    """See `blitz_attn.reference.score_and_select_blocks`: int64 (B, H, tiles, n), for `_block_indices` of `nsa_forward_reference`."""
    _refuse_wrong(Q, K, K, _options(locals()) | {"window_size": 1})  # a selection has no window, so that any size will do
    k_cmp, _ = _named(reference.compress_kv, K, K, compress_block_size, W_k_compress)
    how = {"scale": softmax_scale, "causal": causal, "q_tile_size": q_tile_size, "mode": "mslk"}
    count = _entries(num_selected_blocks, k_cmp)
    return _named(reference.score_and_select_blocks, Q, k_cmp, count, compress_block_size, **how).astype(np.int64)


# ---- Sequences, padded as upstream has them -----------------------------------------------------------------------------


def _cuts(cu_seqlens: Any, step: Callable[[int], int]) -> np.ndarray:
    """The row at which each sequence begins, and the end of the last: a sequence of n tokens has step(n) rows."""
    sums = _arrays.integers(cu_seqlens, "cu_seqlens")
    if sums.ndim != 1 or sums.size == 0 or sums[0] != 0 or _arrays.falls(sums).any():
        raise ValueError(f"cu_seqlens: expected numbers rising from 0, got {shown(sums.tolist())}")
    lengths = [int(b) - int(a) for a, b in pairwise(sums)]
    return np.cumsum([0, *map(step, lengths)])


def _stack(rows: Any, cuts: np.ndarray, fill: int) -> Any:
    """The rows, which lie one sequence after the other, as an array (sequences, most rows, ...) padded with `fill`."""
    most = int(np.diff(cuts).max(initial=0))
    shape = (len(cuts) - 1, most, *rows.shape[1:])
    stacked = rows.new_full(shape, fill) if _is_torch(rows) else np.full(shape, fill, rows.dtype)
    for n, (a, b) in enumerate(pairwise(cuts)):
        stacked[n, : b - a] = rows[a:b]
    return stacked


def _unstack(stacked: Any, name: str, cuts: np.ndarray) -> Any:
    """The inverse of `_stack`: the rows of all sequences, one sequence after the other."""
    shape, sequences, most = _arrays.shape_of(stacked), len(cuts) - 1, int(np.diff(cuts).max(initial=0))
    if len(shape) != 4 or shape[0] != sequences or shape[1] < most:
        raise ValueError(f"{name}: expected shape ({sequences} sequences, {most} or more blocks, H, D), got {shape}")
    if not _is_torch(stacked):
        stacked = _arrays.array(stacked, name, "an array")
    parts = [stacked[n, : b - a] for n, (a, b) in enumerate(pairwise(cuts))]
    parts = parts or [stacked.reshape((0, *stacked.shape[2:]))]  # if there are no sequences
    if _is_torch(stacked):
        import torch

        return torch.cat(parts)
    return np.concatenate(parts)


# ---- Compression ------------------------------------------------------------------------------------------------------


def compress_kv(K: Any, V: Any, block_size: int, W_k: Any = None, W_v: Any = None) -> tuple[Any, Any]:
    """See `blitz_attn.nsa.compress_kv`."""
    return _named(_library.compress_kv, K, V, block_size, W_k, W_v)


def fused_compress_kv(
    K: Any, V: Any, block_size: int, W_k: Any = None, W_v: Any = None, cu_seqlens: Any = None, max_seqlen: int | None = None
) -> tuple[Any, Any]:
    """See `blitz_attn.nsa.compress_kv`. Packed sequences give (sequences, most blocks, H_kv, D), with 0 after a sequence's own blocks."""
    if cu_seqlens is None:
        return compress_kv(K, V, block_size, W_k, W_v)
    packed = _named(_library.compress_kv, K, V, block_size, W_k, W_v, cu_seqlens=cu_seqlens)
    size = number(block_size, "block_size")
    cuts = _cuts(cu_seqlens, lambda n: n // size)
    return _stack(packed[0], cuts, 0), _stack(packed[1], cuts, 0)


def fused_compress_kv_backward(
    dK_cmp: Any, dV_cmp: Any, K: Any, V: Any, block_size: int, W_k: Any = None, W_v: Any = None, cu_seqlens: Any = None
) -> tuple[Any, Any, Any, Any]:
    """See `blitz_attn.nsa.compress_kv_backward`. `dK_cmp` and `dV_cmp` have the shapes that `fused_compress_kv` returns."""
    if cu_seqlens is None:
        return _named(_library.compress_kv_backward, dK_cmp, dV_cmp, K, V, block_size, W_k, W_v)
    size = number(block_size, "block_size")
    cuts = _cuts(cu_seqlens, lambda n: n // size)
    packed = _unstack(dK_cmp, "dK_cmp", cuts), _unstack(dV_cmp, "dV_cmp", cuts)
    return _named(_library.compress_kv_backward, *packed, K, V, block_size, W_k, W_v, cu_seqlens=cu_seqlens)


# ---- Selection --------------------------------------------------------------------------------------------------------


def _entries(num_selected_blocks: Any, k_cmp: Any) -> int:
    """The number of entries in a row of the selection: `num_selected_blocks`, or the number of blocks if it is smaller and not 0."""
    wanted, shape = number(num_selected_blocks, "num_selected_blocks"), _arrays.shape_of(k_cmp)
    return min(wanted, shape[1]) or wanted if len(shape) > 1 else wanted


def score_and_select_blocks(
    Q: Any, K_cmp: Any, num_selected_blocks: int, compress_block_size: int, causal: bool = True, q_tile_size: int = 256,
    softmax_scale: float | None = None,
) -> Any:  # fmt: skip
    """See `blitz_attn.nsa.score_and_select_blocks`: rows have min(num_selected_blocks, blocks) entries (num_selected_blocks if there are
    no blocks), and unused entries are -1. A block whose score is -inf is not selected, even where a row has entries left."""
    return fused_score_and_select_blocks(Q, K_cmp, num_selected_blocks, compress_block_size, causal, q_tile_size, softmax_scale)


def fused_score_and_select_blocks(
    Q: Any, K_cmp: Any, num_selected_blocks: int, compress_block_size: int, causal: bool = True, q_tile_size: int = 256,
    softmax_scale: float | None = None, cu_seqlens: Any = None, max_seqlen: int | None = None,
) -> Any:  # fmt: skip
    """See `blitz_attn.nsa.score_and_select_blocks`. For packed sequences, `K_cmp` comes from `fused_compress_kv`, and the result is
    (sequences, H, most tiles, n), -1 after a sequence's own tiles. A sequence's last tile may be short; upstream leaves it out."""
    keys = K_cmp
    if cu_seqlens is not None:
        size, tile = number(compress_block_size, "compress_block_size"), number(q_tile_size, "q_tile_size")
        keys = _unstack(K_cmp, "K_cmp", _cuts(cu_seqlens, lambda n: n // size))
    chosen = _named(
        _library.score_and_select_blocks, Q, keys, _entries(num_selected_blocks, K_cmp), compress_block_size, causal=causal,
        q_tile_size=q_tile_size, scale=softmax_scale, mode="mslk", cu_seqlens=cu_seqlens,
    )  # fmt: skip
    if cu_seqlens is not None:
        chosen = _stack(chosen.swapaxes(0, 1), _cuts(cu_seqlens, lambda n: -(-n // tile)), -1).swapaxes(1, 2)
    return _arrays.as_kind_of(chosen, Q)


# ---- Gates ------------------------------------------------------------------------------------------------------------


def compute_gates(Q: Any, gate_proj_weight: Any = None, chunk_size: int | None = None) -> Any:
    """See `blitz_attn.nsa.compute_gates`."""
    return _named(_library.compute_gates, Q, gate_proj_weight)


def gate_and_combine(O_cmp: Any, O_slc: Any, O_sld: Any, gates: Any, chunk_size: int | None = None) -> Any:
    """See `blitz_attn.nsa.gate_and_combine`."""
    return _named(_library.gate_and_combine, O_cmp, O_slc, O_sld, gates)


def fused_gate_and_combine(Q: Any, O_cmp: Any, O_slc: Any, O_sld: Any, gate_proj_weight: Any = None) -> Any:
    """See `blitz_attn.nsa.gate_and_combine`. The gates are those of `compute_gates`."""
    gates, shape, expected = compute_gates(Q, gate_proj_weight), _arrays.shape_of(Q), _arrays.shape_of(O_cmp)
    if len(expected) in (3, 4) and shape[:-1] != expected[:-1]:
        raise ValueError(f"Q: expected the tokens and heads of O_cmp {expected}, got {shape}")
    return gate_and_combine(O_cmp, O_slc, O_sld, gates)


def fused_gating_backward(
    Q: Any, dO: Any, O_cmp: Any, O_slc: Any, O_sld: Any, gates: Any, gate_proj_weight: Any
) -> tuple[Any, Any, Any, Any, Any]:
    """See `blitz_attn.nsa.gating_backward`."""
    return _named(_library.gating_backward, Q, dO, O_cmp, O_slc, O_sld, gates, gate_proj_weight)
