"""The interface of upstream's ``torch_bsa`` package: ``from blitz_attn.compat import torch_bsa`` in place of ``import torch_bsa``.

Tensors may be torch tensors or any array that `blitz_attn.block_sparse_attention` takes; results are of the same kind.
Cases that upstream leaves undefined are defined here. Block lists also work with batches, grouped heads and lengths; an empty row gives
output 0 and log-sum-exp ``-inf``; and lists are checked and need no order.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

from .. import _arrays
from .._sabi.block_list import block_shape_for
from .._sentences import rename, shown
from ..block_sparse import block_sparse_attention

__all__ = ["blitz_sparse_attention"]

_BLOCK_SIZES = (128, 256, 512, 1024)
_LAYOUTS = ("BSH", "BSND", "BNSD", "BNSD_BSND", "TND")
_NO_BOUND = 2147473647  # upstream's default of pre_tokens
_UPSTREAM_NAMES = {
    "q": "query",
    "k": "key",
    "v": "value",
    "scale": "scale_value",
    "q_lens": "actual_seq_lengths",
    "kv_lens": "actual_seq_lengths_kv",
    "cu_seqlens_q": "actual_seq_lengths",
    "cu_seqlens_kv": "actual_seq_lengths_kv",
    "num_kv_heads": "num_key_value_heads",
    "return_lse": "softmax_lse_flag",
}


def __dir__() -> list[str]:
    return __all__


class _Sizes(NamedTuple):
    batch: int
    q_len: int
    kv_len: int


def _sizes(query: Any, key: Any, layout: str) -> _Sizes:
    """Batch and lengths; zeros for arguments that are not arrays of the right rank, which the core refuses."""
    rank, q_shape, kv_shape = 3 if layout in ("BSH", "TND") else 4, _arrays.shape_of(query), _arrays.shape_of(key)
    if len(q_shape) != rank or len(kv_shape) != rank:
        return _Sizes(0, 0, 0)
    if layout != "TND" and q_shape[0] != kv_shape[0]:
        raise ValueError(f"key: expected the {q_shape[0]} batch entries of query, got shape {kv_shape}")
    token_axis = 0 if layout == "TND" else 2 if layout.startswith("BNSD") else 1
    return _Sizes(q_shape[0], q_shape[token_axis], kv_shape[token_axis])


def _sums(value: Any, name: str) -> list[int]:
    """Upstream's cumulative sums of lengths, with the leading 0 that upstream leaves out."""
    if value is None:
        raise ValueError(f"{name}: expected cumulative sums of lengths with layout TND, got None")
    sums = [0, *_list(value, name)]
    for i, (before, here) in enumerate(pairwise(sums)):
        if here < before:
            raise ValueError(f"{name}: expected sums that rise from 0 on, got {here} after {before} at [{i}]")
    return sums


def _list(value: Any, name: str) -> list[int]:
    numbers = _arrays.integers(value, name)
    if numbers.ndim != 1:
        raise ValueError(f"{name}: expected one axis, got shape {numbers.shape}")
    return numbers.tolist()


def _lengths(value: Any, name: str, batch: int) -> list[int] | None:
    """The lengths by upstream's rule: a single length is for all batch entries, and of more lengths than batch entries, the first lengths
    count."""
    if value is None:
        return None
    lengths = _list(value, name)
    if len(lengths) == 1:
        return lengths * batch
    if len(lengths) < batch:
        raise ValueError(f"{name}: expected 1 or at least {batch} lengths, got {len(lengths)}")
    return lengths[:batch]


def _token_rules(mode: int, layout: str, sizes: _Sizes, pre_tokens: int, next_tokens: int) -> dict[str, Any]:
    """The keyword arguments of `block_sparse_attention` for a sparse mode."""
    if mode == 2:
        if layout == "TND":
            raise ValueError("sparse_mode: expected 0, 3 or 4 with layout TND, got 2")
        return {"causal": True, "q_begin": 0}  # query i sees keys 0 .. i
    if mode == 3:
        return {"causal": True}
    if mode == 4:
        if pre_tokens < 0 or next_tokens < 0:
            raise ValueError(f"pre_tokens, next_tokens: expected 0 or more with sparse_mode 4, got {pre_tokens} and {next_tokens}")
        reach = sizes.q_len + sizes.kv_len
        return {"window": tuple(-1 if n >= reach else n for n in (pre_tokens, next_tokens))}
    return {}


def _check_mode(sparse_mode: Any, atten_mask: Any) -> int:
    """The mode from 0 to 4: modes 10 to 14 are these in high precision. Refuses modes that need a full mask."""
    sparse_mode = 0 if sparse_mode is None else _arrays.integer(sparse_mode, "sparse_mode")
    mode = sparse_mode - 10 if 10 <= sparse_mode <= 14 else sparse_mode  # 10 to 14: the modes in high precision
    if not 0 <= mode <= 4:
        raise ValueError(f"sparse_mode: expected 0 to 4 or 10 to 14, got {sparse_mode}")
    if mode == 1:
        raise ValueError("sparse_mode: expected 0, 2, 3 or 4, got 1, which needs a full mask: list the blocks in sabi instead")
    if atten_mask is not None:
        dtype = _arrays.dtype_of(atten_mask)
        dtype = type(atten_mask) if dtype is None else dtype
        if _arrays.dtype_name(dtype, "atten_mask") not in ("bool", "bool_"):
            raise TypeError(f"atten_mask: expected a bool array, got {_arrays.dtype_name(dtype, 'atten_mask')}")
        if mode == 0:
            raise ValueError(
                "atten_mask: expected None with sparse_mode 0, got a mask: list blocks in sabi, which blitz_attn.sabi.from_token_mask "
                "makes from one, or use sparse_mode 2 or 3 (causal) or 4 (band)"
            )
    return mode


def _check_block_shape(block_shape: Any) -> tuple[int, int]:
    shape = _list(block_shape, "block_shape")
    if len(shape) != 2 or any(n not in _BLOCK_SIZES for n in shape):
        raise ValueError(f"block_shape: expected two of {_BLOCK_SIZES}, got {shown(shape)} (blitz_attn.block_sparse_attention takes any)")
    return shape[0], shape[1]


def blitz_sparse_attention(
    query: Any,
    key: Any,
    value: Any,
    atten_mask: Any = None,
    sabi: Any = None,
    actual_seq_lengths: Any = None,
    actual_seq_lengths_kv: Any = None,
    num_heads: int | None = None,
    scale_value: float | None = None,
    pre_tokens: int | None = None,
    next_tokens: int | None = None,
    input_layout: str | None = None,
    num_key_value_heads: int | None = None,
    sparse_mode: int | None = None,
    softmax_lse_flag: bool | None = None,
    block_shape: Any = None,
) -> tuple[Any, Any]:
    """Block-sparse attention with upstream's names, order of arguments and defaults.

    Parameters
    ----------
    query, key, value : array
        In the layout that `input_layout` names.
    atten_mask : array of bool, optional
        Only its dtype is checked with sparse modes 2, 3 and 4, which state the rule of upstream's compressed mask by themselves. Refused
        with other modes.
    sabi : array of int, optional
        ``(B, N, ceil(Sq / block_shape[0]), W)`` or, for one batch entry, ``(N, ceil(Sq / block_shape[0]), W)``: columns of kept key blocks,
        padded with 65535 (uint16) or -1 (signed). None: attention is dense.
    actual_seq_lengths, actual_seq_lengths_kv : sequence of int, optional
        Number of valid tokens of each batch entry, or one number for all. Layout TND needs cumulative sums, without the leading 0.
    num_heads : int, optional
        Number of query heads. Default: 1 with layout BSH, else the heads of `query`.
    scale_value : float, optional
        Factor of the products. Default: 1.0, as in upstream's function, and not ``1 / sqrt(D)``.
    pre_tokens, next_tokens : int, optional
        For sparse mode 4: the numbers of tokens that are seen before (default: no bound) and after (default: 0) the diagonal.
    input_layout : {"BSH", "BSND", "BNSD", "BNSD_BSND", "TND"}, optional
        Default: BSH. With BNSD_BSND, inputs are BNSD and the output is BSND.
    num_key_value_heads : int, optional
        Number of key/value heads. Default: 0, which stands for the number of query heads.
    sparse_mode : int, optional
        0 (default): no token rule. 2: causal from the top left (not with layout TND). 3: causal to the bottom right. 4: band around the
        diagonal to the bottom right. 10, 12, 13 and 14: these modes in high precision, which all modes have here. Modes 1 and 11, which
        need a full mask, are refused.
    softmax_lse_flag : bool, optional
        Default: False.
    block_shape : sequence of int, optional
        Number of tokens per block of queries and of keys, each 128, 256, 512 or 1024. Default: ``[128, 128]``.

    Returns
    -------
    attention_out : array
        As `blitz_attn.block_sparse_attention` returns it; with BNSD_BSND, in layout BSND.
    softmax_lse : array
        float32 (float64 for float64) ``(B, N, Sq)``, by the natural log; float32 ``(0,)`` without `softmax_lse_flag`, and with layout TND.

    Raises
    ------
    TypeError, ValueError
        As `blitz_attn.block_sparse_attention`, with upstream's names of arguments, and for a mask or a mode that is not supported.

    References
    ----------
    CANN ops-transformer, experimental/attention/blitz_sparse_attention, torch_interface.

    Examples
    --------
    >>> import numpy as np
    >>> import blitz_attn
    >>> from blitz_attn.compat import torch_bsa
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = (rng.standard_normal((1, 2, 256, 64), dtype=np.float32) for _ in range(3))
    >>> sabi = np.array([[[[1, 65535], [0, 1]]] * 2], dtype=np.uint16).reshape(1, 2, 2, 2)
    >>> attention_out, softmax_lse = torch_bsa.blitz_sparse_attention(
    ...     q, k, v, sabi=sabi, num_heads=2, scale_value=0.125, input_layout="BNSD", softmax_lse_flag=True)
    >>> exact, exact_lse = blitz_attn.reference.block_sparse_attention(q, k, v, sabi, scale=0.125, return_lse=True)
    >>> bool(np.abs(attention_out - exact).max() < 1e-5), bool(np.abs(softmax_lse - exact_lse).max() < 1e-5)
    (True, True)
    """
    layout = "BSH" if input_layout is None else _arrays.choice(input_layout, "input_layout", _LAYOUTS)
    mode = _check_mode(sparse_mode, atten_mask)
    shape = _check_block_shape(block_shape_for(sabi, block_shape, (128, 128)))
    sizes = _sizes(query, key, layout)
    ragged = layout == "TND"
    want_lse = softmax_lse_flag is not None and _arrays.flag(softmax_lse_flag, "softmax_lse_flag") and not ragged

    options: dict[str, Any] = {"block_shape": shape, "layout": layout.partition("_")[0]}
    options["scale"] = 1.0 if scale_value is None else scale_value
    options["num_heads"] = 1 if num_heads is None and layout == "BSH" else num_heads
    kv_heads = 0 if num_key_value_heads is None else _arrays.integer(num_key_value_heads, "num_key_value_heads")
    options["num_kv_heads"] = kv_heads or None  # upstream's 0 stands for the number of query heads
    if ragged:
        options["cu_seqlens_q"] = _sums(actual_seq_lengths, "actual_seq_lengths")
        options["cu_seqlens_kv"] = _sums(actual_seq_lengths_kv, "actual_seq_lengths_kv")
        sums, sums_kv = (len(options[name]) - 1 for name in ("cu_seqlens_q", "cu_seqlens_kv"))
        if sums != sums_kv:
            raise ValueError(f"actual_seq_lengths_kv: expected {sums} sums like actual_seq_lengths, got {sums_kv}")
    else:
        options["q_lens"] = _lengths(actual_seq_lengths, "actual_seq_lengths", sizes.batch)
        options["kv_lens"] = _lengths(actual_seq_lengths_kv, "actual_seq_lengths_kv", sizes.batch)
    before = _NO_BOUND if pre_tokens is None else _arrays.integer(pre_tokens, "pre_tokens")
    after = 0 if next_tokens is None else _arrays.integer(next_tokens, "next_tokens")
    options |= _token_rules(mode, layout, sizes, before, after)

    try:
        result = block_sparse_attention(query, key, value, sabi, return_lse=want_lse, **options)
    except (TypeError, ValueError) as error:
        rename(error, _UPSTREAM_NAMES)
        raise
    attention_out, softmax_lse = result if want_lse else (result, None)
    if layout == "BNSD_BSND":
        turned = attention_out.swapaxes(1, 2)
        attention_out = turned.contiguous() if hasattr(turned, "contiguous") else turned.copy()
    if softmax_lse is None:
        family = _arrays.family_of(query)
        softmax_lse = _arrays.finished(family.empty((0,), "float32"), None, family)
    return attention_out, softmax_lse
