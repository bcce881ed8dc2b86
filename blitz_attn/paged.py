"""Attention over a paged key/value cache, for decoding and chunked prefill, and the functions that fill the cache."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy import ndarray

from . import _arrays, _core, _formats
from ._float_mode import in_usual_mode
from ._floats import FLOATS, floats
from ._names import KVLayout
from ._paged.append import Summaries, append_tokens
from ._paged.call import paged_attention, paged_select_attention
from ._paged.plan import PagedPlan
from ._paged.tables import tables_for_core
from ._sentences import shown

if TYPE_CHECKING:
    from ._types import Array, ArrayLike, DType, Integers, KVDType, Scale, Tables

__all__ = [
    "PagedPlan", "append_paged_kv", "dequantize_kv", "dequantize_rows", "paged_attention", "paged_select_attention", "quantize_kv",
    "quantize_rows",
]  # fmt: skip

_QUANTISED = ("int8", "float8_e4m3")


# ---- Quantisation -------------------------------------------------------------------------------------------------


def quantize_kv(x: Array, kv_dtype: DType, *, dtype: DType | None = None) -> tuple[ndarray, ndarray]:
    """Keys or values in 8 bits, with one scale per token and head.

    Parameters
    ----------
    x : array
        ``(..., D)``: float32, float16, bfloat16 or float64, finite.
    kv_dtype : {"int8", "float8_e4m3"} or dtype
        The format: integers from -127 to 127, or floats of one sign bit, 4 exponent bits and 3 mantissa bits.
    dtype : str or dtype, optional
        ``"bfloat16"`` says that a uint16 `x` holds bfloat16 bits. Any other value is only checked against the array.

    Returns
    -------
    values : numpy.ndarray
        ``(..., D)``: int8, or uint8 that hold the bits of float8 e4m3. Each is ``x / scale`` rounded to the nearest number of the format,
        ties to even.
    scale : numpy.ndarray
        ``(...)`` float32: the largest magnitude of a row divided by the largest number of the format, 127 or 448. It is 1 where this
        quotient would be 0.

    Raises
    ------
    TypeError
        `x` is not an array of floats, or not of `dtype`.
    ValueError
        `kv_dtype` names another format, `x` has a NaN, an infinity or a number too large for a float32 scale, or D is above ``2**24``.
        The sentence says where such a number is; its row number counts over all axes except the last.

    Notes
    -----
    Let M be the largest magnitude of a row. In int8, the error of an element x is at most M / 254, up to the rounding of the scale. In
    float8 e4m3, the error is at most the larger of ``abs(x) / 16`` and M / 458752.

    Examples
    --------
    >>> import numpy as np
    >>> import blitz_attn
    >>> x = np.random.default_rng(0).standard_normal((4, 2, 64), dtype=np.float32)
    >>> values, scale = blitz_attn.quantize_kv(x, "int8")
    >>> values.dtype.name, scale.shape
    ('int8', (4, 2))
    >>> error = np.abs(blitz_attn.dequantize_kv(values, scale) - x)
    >>> bool((error <= 0.501 * scale[..., None]).all())
    True
    """
    to = _arrays.dtype_name(kv_dtype, "kv_dtype")
    if to not in _QUANTISED:
        raise ValueError(f"kv_dtype: expected 'int8' or 'float8_e4m3', got {shown(to)}")
    array, named = _to_quantise(x, dtype)
    values, scale = np.empty(array.shape, np.int8 if to == "int8" else np.uint8), np.empty(array.shape[:-1], np.float32)
    rows = scale.size, array.shape[-1]
    _core.quantize_kv(
        array.reshape(rows), values.reshape(rows), scale.reshape(-1), dtype=named,
        kv_dtype="float8_e4m3" if to == "float8_e4m3" else None,
    )  # fmt: skip
    return values, scale


def _to_quantise(x: Array, dtype: DType | None) -> tuple[ndarray, str | None]:
    """The array as the core takes it, with at least one axis, and the `dtype` argument that the core then needs."""
    own = _arrays.dtype_name(dtype)
    if own is not None and own not in FLOATS:
        raise ValueError(f"dtype: expected 'float32', 'float16', 'bfloat16' or 'float64', got {shown(own)}")
    array, kind = floats(x, "x", own, strided=True)
    if own not in (None, kind):
        raise TypeError(f"x: expected {own} as dtype says, got {kind}")
    if array.ndim < 1:
        raise ValueError(f"x: expected shape (..., D), got {array.shape}")
    return np.require(array, requirements=("C", "A")), "bfloat16" if kind == "bfloat16" else None


def dequantize_kv(values: Array, scale: ArrayLike) -> ndarray:
    """The numbers that quantised keys or values stand for: ``values * scale``.

    Parameters
    ----------
    values : array
        ``(..., D)``: int8, or float8 e4m3 as an array of that dtype or as uint8 bits.
    scale : array_like
        ``(...)``: the factor of each row, or an array that NumPy broadcasts to this shape. One number per head is ``(Hkv,)`` where heads
        are the last axis of `scale`, and ``(Hkv, 1)`` in layout HND.

    Returns
    -------
    numpy.ndarray
        ``(..., D)`` float32.

    Raises
    ------
    TypeError
        `values` has another dtype.
    ValueError
        `scale` has a shape that does not fit `values`.

    See Also
    --------
    quantize_kv : the inverse, up to rounding.

    Examples
    --------
    >>> import numpy as np
    >>> import blitz_attn
    >>> blitz_attn.dequantize_kv(np.array([[127, -64]], np.int8), np.array([0.5])).tolist()
    [[63.5, -32.0]]
    >>> blitz_attn.dequantize_kv(np.array([[0x38, 0xC0]], np.uint8), np.array([2.0])).tolist()
    [[2.0, -4.0]]
    """
    array, kind = _arrays.host(values, "values", "float8_e4m3")
    if kind not in _QUANTISED:
        raise TypeError(f"values: expected int8, float8_e4m3 or uint8 bits of it, got {kind}")
    factors = _arrays.float32_numbers(scale, "scale")
    rows = array.shape[:-1]
    if array.ndim < 1 or factors.ndim > len(rows) or any(n not in (1, m) for n, m in zip(factors.shape[::-1], rows[::-1], strict=False)):
        raise ValueError(f"scale: expected shape {rows}, that of values without D, or the last axes of this shape, got {factors.shape}")
    return _products(array, kind, np.broadcast_to(factors, rows)[..., None])


def quantize_rows(x: Array, kv_dtype: str, *, dtype: DType | None = None) -> ndarray:
    """Keys or values as rows of llama.cpp's blocks, which hold their scales themselves: 8.5, 4.5 or 5 bits per number.

    A block holds 32 numbers of a row. It consists of a float16 factor d, then for q4_1 a float16 offset m, and then 32 integers n.

    ======  ==============================  ==================  =====
    format  integers                        number              bytes
    ======  ==============================  ==================  =====
    q8_0    -127 to 127, one byte each      ``d * n``           34
    q4_0    0 to 15, two in each byte       ``d * (n - 8)``     18
    q4_1    0 to 15, two in each byte       ``d * n + m``       20
    ======  ==============================  ==================  =====

    The 32 4-bit integers of a block take 16 bytes: byte i has integer i in its lower half and integer i + 16 in its upper half.

    Parameters
    ----------
    x : array
        ``(..., D)``: float32, float16, bfloat16 or float64; D a multiple of 32. Magnitudes are at most 65504 for q4_1, 8 * 65504 for q4_0,
        and 127 * 65504 for q8_0, since d and m are float16.
    kv_dtype : {"q8_0", "q4_0", "q4_1"}
        The format.
    dtype : str or dtype, optional
        ``"bfloat16"`` says that a uint16 `x` holds bfloat16 bits. Any other value is only checked against the array.

    Returns
    -------
    numpy.ndarray
        ``(..., D // 32 * bytes)`` uint8: rows of a cache with this `kv_dtype`.

    Raises
    ------
    TypeError
        `x` is not an array of floats, or not of `dtype`.
    ValueError
        `kv_dtype` names another format, D is not a multiple of 32 or is above ``2**24``, or `x` has a NaN or a number that is too large.

    See Also
    --------
    dequantize_rows : the inverse, up to rounding.
    quantize_kv : 8 bits with one scale per token and head.

    Notes
    -----
    The integers of q8_0 and q4_1 are those of ggml's reference. Numbers are first rounded to float32, and the arithmetic is in float32, but
    the sum of q4_0 is in float64. q8_0: d is the largest magnitude of the block divided by 127, and n is ``x * (1 / d)`` rounded to
    nearest, halves away from 0. q4_0: d is the number of the largest magnitude, with its sign, divided by -8 (the first such number, if
    several have this magnitude), and n is ``x * (1 / d) + 8.5`` rounded down, at most 15. ggml first rounds this sum to float32, so that
    its n is larger by 1 where the sum is rounded up to a whole number below 16. q4_1: m is the smallest number, d the difference of the
    largest and the smallest divided by 15, and n is ``(x - m) * (1 / d) + 0.5`` rounded down, at most 15. d and m are rounded to
    float16 after that.

    References
    ----------
    ggml, ggml-quants.c, quantize_row_q8_0_ref, quantize_row_q4_0_ref and quantize_row_q4_1_ref.

    Examples
    --------
    >>> import numpy as np
    >>> import blitz_attn
    >>> x = np.random.default_rng(0).standard_normal((4, 2, 64), dtype=np.float32)
    >>> rows = blitz_attn.quantize_rows(x, "q4_0")
    >>> rows.dtype.name, rows.shape
    ('uint8', (4, 2, 36))
    >>> error = np.abs(blitz_attn.dequantize_rows(rows, "q4_0") - x)
    >>> bool(error.max() < np.abs(x).max() / 8)
    True
    """
    to = _format_of_rows(kv_dtype)
    array, named = _to_quantise(x, dtype)
    if array.shape[-1] % _formats.CELL_DIMS:
        raise ValueError(f"x: expected a last axis of a multiple of 32 for {to}, got {array.shape}")
    width = array.shape[-1] // _formats.CELL_DIMS * _formats.CELL_BYTES[to]
    rows, count = np.empty((*array.shape[:-1], width), np.uint8), math.prod(array.shape[:-1])
    _core.quantize_kv(array.reshape(count, array.shape[-1]), rows.reshape(count, width), None, dtype=named, kv_dtype=to)
    return rows


def dequantize_rows(rows: Array, kv_dtype: str) -> ndarray:
    """The numbers that rows of llama.cpp's blocks stand for.

    Parameters
    ----------
    rows : array of uint8
        ``(..., D // 32 * bytes)``: see `quantize_rows`.
    kv_dtype : {"q8_0", "q4_0", "q4_1"}
        The format.

    Returns
    -------
    numpy.ndarray
        ``(..., D)`` float32.

    Raises
    ------
    TypeError
        `rows` has another dtype.
    ValueError
        `kv_dtype` names another format, or the last axis is not a multiple of the bytes of a block.

    See Also
    --------
    quantize_rows : the inverse, up to rounding.

    Examples
    --------
    >>> import numpy as np
    >>> import blitz_attn
    >>> x = np.arange(-16, 16, dtype=np.float32)
    >>> blitz_attn.dequantize_rows(blitz_attn.quantize_rows(x, "q4_0"), "q4_0")[::8].tolist()
    [-16.0, -8.0, 0.0, 8.0]
    """
    of = _format_of_rows(kv_dtype)
    array, kind = _arrays.host(rows, "rows")
    size = _formats.CELL_BYTES[of]
    if kind != "uint8":
        raise TypeError(f"rows: expected uint8, got {kind}")
    if array.ndim < 1 or array.shape[-1] % size:
        raise ValueError(f"rows: expected a last axis of a multiple of {size} bytes for {of}, got {array.shape}")
    numbers = np.empty((*array.shape[:-1], array.shape[-1] // size * _formats.CELL_DIMS), np.float32)
    for at in _arrays.pieces(array.shape):
        numbers[at[:-1]] = _numbers(array[at], of)
    return numbers


def _format_of_rows(kv_dtype: Any) -> str:
    name: str = _arrays.dtype_name(kv_dtype, "kv_dtype")
    if name not in _formats.CELL_BYTES:
        raise ValueError(f"kv_dtype: expected 'q8_0', 'q4_0' or 'q4_1', got {shown(name)}")
    return name


_numbers = in_usual_mode(_formats.cells_to_float32)


@in_usual_mode
def _products(values: ndarray, kind: str, factors: ndarray) -> ndarray:
    numbers = np.empty(values.shape, np.float32)
    with np.errstate(over="ignore", invalid="ignore"):  # scales may be infinite, or make products too large
        for at in _arrays.pieces(values.shape):
            np.multiply(_formats.widened(values[at], kind), factors[at[:-1]], out=numbers[at])
    return numbers


# ---- Filling the cache --------------------------------------------------------------------------------------------


def append_paged_kv(
    k: Array,
    v: Array | None,
    k_cache: Array,
    v_cache: Array | None,
    *,
    slot_mapping: Integers | None = None,
    block_tables: Tables | None = None,
    seq_lens: Integers | None = None,
    q_lens: Integers | None = None,
    kv_layout: KVLayout = "NHD",
    k_scale: Scale | None = None,
    v_scale: Scale | None = None,
    maxblocks: Array | None = None,
    minblocks: Array | None = None,
    meanblocks: Array | None = None,
    metadata_block_tables: Array | None = None,
    dtype: DType | None = None,
    kv_dtype: KVDType | None = None,
    num_threads: int | None = None,
) -> None:
    """Write the keys and values of new tokens into a paged cache, and update its summaries.

    Numbers are rounded once, to the nearest number of the cache's dtype, ties to even; for caches of llama.cpp's blocks, `quantize_rows`
    says how. Either `slot_mapping` says where each token goes, or `block_tables` and `seq_lens` do, as in `paged_attention`: call this
    function, then `paged_attention` with the same tables and lengths.

    Parameters
    ----------
    k, v : array
        ``(T, Hkv, D)`` and ``(T, Hkv, Dv)``: float32, float16, bfloat16 or float64, in memory that no written array shares.
    k_cache, v_cache : array
        See `paged_attention`. NumPy arrays or torch tensors, written in place. They may be views of one array, if no element is in both.
        Where the values are part of the keys, as in MLA, `v` and `v_cache` are None.
    slot_mapping : sequence of int, optional
        ``(T,)``: the slot of each token, ``page * page_size + place``; -1 leaves a token out.
    block_tables, seq_lens : optional
        See `paged_attention`. The lengths include the new tokens, which are the last tokens of their requests.
    q_lens : sequence of int, optional
        ``(B,)``: number of new tokens of each request. Default: 1 for each.
    kv_layout : {"NHD", "HND"}
        See `paged_attention`.
    k_scale, v_scale : array of float32, or float, optional
        Required with int8 and float8 e4m3 caches, see `paged_attention`. An array with one scale per token and head is written in place:
        each row gets the scale that `quantize_kv` computes. A scale that is one number, or one per head, is only read: ``x / scale`` is
        rounded, and a quotient beyond the dtype's largest number, 127 or 448, becomes that number.
    maxblocks, minblocks, meanblocks, metadata_block_tables : array, optional
        See `quest_prefill_metadata`. The summaries of blocks that get new tokens are computed again. In caches of 8 bits and fewer, they
        are computed from the quantised keys, in float32. Summaries need `block_tables`, which must then be an array.
    dtype, kv_dtype : str or dtype, optional
        ``"bfloat16"`` says that uint16 arrays hold bfloat16 bits; for the caches, see `paged_attention`.
        If `dtype` or `kv_dtype` is bfloat16, it is the default of the other argument.
    num_threads : int, optional
        Threads for this call. Default: see `set_num_threads`.

    Raises
    ------
    TypeError, ValueError
        An argument of the wrong kind, shape or range, or two tokens for one slot. For a cache of 8 bits or fewer also a NaN, an infinity,
        or a number that is too large for a scale that is written or for a block of llama.cpp. Nothing has been written then.

    Notes
    -----
    A call that Ctrl-C or another signal handler interrupts has written the slots of some of the new tokens, and no other slots: earlier
    tokens are unchanged. The summaries of blocks that get new tokens may then not fit these blocks. Repeating the call completes it, with
    the result of an uninterrupted call.

    Examples
    --------
    >>> import numpy as np
    >>> import blitz_attn
    >>> rng = np.random.default_rng(0)
    >>> k, v = (rng.standard_normal((5, 2, 64), dtype=np.float32) for _ in range(2))
    >>> k_cache, v_cache = (np.zeros((4, 16, 2, 64), np.int8) for _ in range(2))
    >>> k_scale, v_scale = (np.zeros((4, 16, 2), np.float32) for _ in range(2))
    >>> tables, seq_lens, q_lens = np.array([[2, 3], [1, 0]]), [18, 2], [3, 2]  # 15 tokens of the first request are there
    >>> blitz_attn.append_paged_kv(k, v, k_cache, v_cache, block_tables=tables, seq_lens=seq_lens, q_lens=q_lens,
    ...                            k_scale=k_scale, v_scale=v_scale)
    >>> written = blitz_attn.dequantize_kv(k_cache, k_scale)
    >>> bool(np.abs(written[[2, 3, 3, 1, 1], [15, 0, 1, 0, 1]] - k).max() < 0.02)
    True
    """
    if (slot_mapping is None) == (block_tables is None):
        given = "neither" if slot_mapping is None else "both"
        raise ValueError(f"slot_mapping: expected exactly one of slot_mapping and block_tables, got {given}")
    requests: tuple[Any, ...] = (None,) * 7
    if slot_mapping is None:
        requests = (*tables_for_core(block_tables, seq_lens), q_lens, None, None)
    else:
        of_requests = {"seq_lens": seq_lens, "q_lens": q_lens, "metadata_block_tables": metadata_block_tables}
        for name, x in {**of_requests, "maxblocks": maxblocks, "minblocks": minblocks, "meanblocks": meanblocks}.items():
            if x is not None:
                raise ValueError(f"{name}: expected None with slot_mapping, got {type(x).__name__}")
    summaries = Summaries(maxblocks, minblocks, meanblocks, metadata_block_tables)
    if isinstance(block_tables, tuple) and metadata_block_tables is not None:
        raise ValueError("block_tables: expected an array (B, W) with metadata_block_tables, got (indptr, indices, last_page_len)")
    append_tokens(
        k, v, k_cache, v_cache, slot_mapping, requests, kv_layout, k_scale, v_scale, summaries, dtype, kv_dtype, num_threads
    )  # fmt: skip
