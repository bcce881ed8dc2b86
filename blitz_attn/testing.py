"""Inputs, grids, tolerances and comparisons for tests and benchmarks of attention operations.

Upstream, here, is BlitzSparseAttention in CANN. The names of its benchmark helpers keep their meaning: `FrameWidths`, `MaskSpec`,
`BlockGrid`, `generate_sparse_blocks_by_row`, `generate_sparse_blocks_by_row_per_head`, `is_block_sparse_pattern_feasible`,
`block_allclose_map`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from . import reference
from . import sabi as lists
from ._arrays import dtype_name, integer, number
from ._testing.paged import QUANTIZED, ROW_FORMATS, Paged, make_paged
from .reference import round_to, to_float64
from .sabi import FrameWidths

if TYPE_CHECKING:
    from ._sabi.block_list import BlockList
    from ._types import ArrayLike, DType

__all__ = [
    "BLOCK_SHAPES",
    "LSE_ATOL",
    "LSE_RTOL",
    "OUT_ATOL",
    "OUT_RTOL",
    "QUANTIZED",
    "ROW_FORMATS",
    "BlockGrid",
    "Errors",
    "FrameWidths",
    "MaskSpec",
    "Paged",
    "block_allclose_map",
    "error_of",
    "error_rule",
    "generate_sparse_blocks_by_row",
    "generate_sparse_blocks_by_row_per_head",
    "is_block_sparse_pattern_feasible",
    "make_paged",
    "make_qkv",
    "meets_error_rule",
    "random_sabi",
    "reference_attention",
    "round_to",
    "small_frame",
    "to_float64",
    "to_layout",
    "token_mask",
]

BLOCK_SHAPES = [(block_q, block_kv) for block_q in (128, 256, 512, 1024) for block_kv in (128, 256, 512, 1024)]
"""The 16 (queries, keys) block shapes of upstream."""

OUT_RTOL, OUT_ATOL = 1e-2, 1e-3
"""Upstream's tolerance for the attention output."""

LSE_RTOL, LSE_ATOL = 1e-2, 1e-3
"""Upstream's documented tolerance for the log-sum-exp. Its tests use rtol 1e-3 with atol 1e-2, or 1e-5 for bfloat16 in test_joint.py."""


def __dir__() -> list[str]:
    return __all__


class MaskSpec(NamedTuple):
    """One random block list and the problem to which it belongs; `frame` may be None."""

    b: int
    h: int
    s_q: int
    s_kv: int
    d: int
    block_size_q: int
    block_size_kv: int
    sparsity: float
    frame: FrameWidths | None


class BlockGrid(NamedTuple):
    """Tokens and block sizes of a grid of blocks."""

    s_q: int
    s_kv: int
    block_size_q: int
    block_size_kv: int


# ---- Block lists --------------------------------------------------------------------------------------------------


def small_frame(block_shape: tuple[int, int], tokens: int = 256) -> FrameWidths:
    """Frame of about `tokens` tokens at the left, a quarter more at the top, and one block at the right and the bottom.

    At 256 tokens, the widths are those of upstream's tests.

    Parameters
    ----------
    block_shape : (int, int)
        Number of tokens per block of queries and of keys.
    tokens : int
        Width of the frame at the left.

    Returns
    -------
    FrameWidths

    Raises
    ------
    ValueError
        A size is below 1.

    Examples
    --------
    >>> from blitz_attn.testing import small_frame
    >>> tuple(small_frame((128, 128))), tuple(small_frame((256, 1024)))
    ((2, 1, 3, 1), (1, 1, 2, 1))
    """
    block_q, block_kv = (int(n) for n in block_shape)
    if min(block_q, block_kv, tokens) < 1:
        raise ValueError(f"block_shape, tokens: expected positive numbers, got {tuple(block_shape)} and {tokens}")
    left = -(-tokens // block_kv)
    top = -(-(tokens + tokens // 4) // block_q)
    return FrameWidths(left, 1, top, 1)


def random_sabi(spec: MaskSpec, *, seed: int = 1234, dtype: DType | None = None) -> BlockList:
    """The random block list of a `MaskSpec`: `sabi.random_with_frame` with its fields.

    Parameters
    ----------
    spec : MaskSpec
        `d` is not used.
    seed : int
        Base of the seeds.
    dtype : dtype, optional
        As in `sabi.random_with_frame`.

    Returns
    -------
    numpy.ndarray
        (b, h, R, W).

    Raises
    ------
    ValueError
        The frame does not fit the grid or the sparsity.

    Examples
    --------
    >>> from blitz_attn.testing import MaskSpec, random_sabi
    >>> random_sabi(MaskSpec(1, 2, 1024, 1024, 64, 128, 128, 0.5, None)).shape
    (1, 2, 8, 4)
    """
    shape = (spec.block_size_q, spec.block_size_kv)
    return lists.random_with_frame(
        spec.s_q, spec.s_kv, shape, spec.sparsity, frame=spec.frame, batch=spec.b, heads=spec.h, seed=seed, dtype=dtype
    )


def _clamped(sparsity: Any) -> float:
    """The sparsity clamped to 0..1, as upstream clamps it. NaN stays NaN, and is refused later."""
    return min(max(number(sparsity, "sparsity"), 0.0), 1.0)


def generate_sparse_blocks_by_row(
    s_q: int,
    s_kv: int,
    block_size_q: int,
    block_size_kv: int,
    sparsity: float,
    seed: int,
    frame: FrameWidths | None,
    pad_value: int = -1,
    sort_within_row: bool = True,
) -> list[list[int]]:
    """Random block list of one head as nested lists, padded to the full number of columns.

    Parameters
    ----------
    s_q, s_kv : int
        Numbers of query and key tokens.
    block_size_q, block_size_kv : int
        Number of tokens per block of queries and of keys.
    sparsity : float
        Share of blocks to drop, clamped to 0..1. Blocks of the frame count as kept blocks.
    seed : int
        Seed of this head.
    frame : FrameWidths or None
        Border that is always kept.
    pad_value : int
        The value of unused entries of a row.
    sort_within_row : bool
        Columns rise in each row. False: they are shuffled.

    Returns
    -------
    list of list of int
        [R][C].

    Raises
    ------
    ValueError
        The frame does not fit the grid or the sparsity.

    Examples
    --------
    >>> from blitz_attn.testing import generate_sparse_blocks_by_row
    >>> generate_sparse_blocks_by_row(256, 256, 128, 128, 0.0, 1234, None)
    [[0, 1], [0, 1]]
    """
    columns = math.ceil(s_kv / block_size_kv)
    shape = (block_size_q, block_size_kv)
    drawn = lists.random_with_frame(
        s_q, s_kv, shape, _clamped(sparsity), frame=frame, seed=seed, sort=sort_within_row, dtype=np.int64, width=columns
    )[0, 0]
    return np.where(drawn < 0, pad_value, drawn).tolist()


def generate_sparse_blocks_by_row_per_head(
    s_q: int,
    s_kv: int,
    block_size_q: int,
    block_size_kv: int,
    sparsity: float,
    num_heads: int,
    frame: FrameWidths | None,
    base_seed: int,
    sort_within_row: bool = True,
) -> list[list[list[int]]]:
    """`generate_sparse_blocks_by_row` for each head, with seeds ``base_seed + head``.

    Parameters
    ----------
    s_q, s_kv, block_size_q, block_size_kv, sparsity, frame, sort_within_row
        As in `generate_sparse_blocks_by_row`.
    num_heads : int
        Number of heads.
    base_seed : int
        Seed of head 0.

    Returns
    -------
    list of list of list of int
        [H][R][C], padded with -1.

    Raises
    ------
    ValueError
        The frame does not fit the grid or the sparsity.

    Examples
    --------
    >>> from blitz_attn.testing import generate_sparse_blocks_by_row_per_head
    >>> len(generate_sparse_blocks_by_row_per_head(256, 256, 128, 128, 0.5, 3, None, 1234))
    3
    """
    return [
        generate_sparse_blocks_by_row(
            s_q, s_kv, block_size_q, block_size_kv, sparsity, base_seed + head, frame, sort_within_row=sort_within_row
        )
        for head in range(num_heads)
    ]


def is_block_sparse_pattern_feasible(
    grid: BlockGrid, frame: FrameWidths | None, sparsity: float, *, require_nonempty_per_row: bool = True
) -> bool:
    """True where `generate_sparse_blocks_by_row` can reach the sparsity on this grid.

    Parameters
    ----------
    grid : BlockGrid
        Tokens and block sizes.
    frame : FrameWidths or None
        Border that is always kept.
    sparsity : float
        Share of blocks to drop, clamped to 0..1.
    require_nonempty_per_row : bool
        Also require at least one random block, so that no row outside the frame's rows is empty.

    Returns
    -------
    bool

    Examples
    --------
    >>> from blitz_attn.testing import BlockGrid, FrameWidths, is_block_sparse_pattern_feasible
    >>> [is_block_sparse_pattern_feasible(BlockGrid(1024, 1024, 128, 128), FrameWidths(1, 1, 1, 1), s) for s in (0.5, 0.9)]
    [True, False]
    """
    rows, columns = math.ceil(grid.s_q / grid.block_size_q), math.ceil(grid.s_kv / grid.block_size_kv)
    try:
        plan = lists.frame_plan(rows, columns, _clamped(sparsity), frame)
    except ValueError:
        return False
    if plan.forced_blocks > plan.kept_blocks:
        return False
    loose_rows = rows - len(plan.dense_rows)
    return not (require_nonempty_per_row and loose_rows and plan.kept_blocks == plan.forced_blocks)


def token_mask(sabi: ArrayLike, s_q: int, s_kv: int | None = None, block_shape: tuple[int, int] | None = None) -> np.ndarray:
    """Boolean (..., s_q, s_kv) mask of a block list, True where a query attends to a key: `sabi.to_token_mask`.

    Parameters
    ----------
    sabi : array_like of int
        Block list (..., R, W).
    s_q, s_kv : int
        Numbers of query and key tokens.
    block_shape : (int, int), optional
        Number of tokens per block of queries and of keys. Default: the block shape that the list knows; (128, 128) for plain arrays.

    Returns
    -------
    numpy.ndarray

    Raises
    ------
    TypeError, ValueError
        As in `sabi.to_token_mask`.

    Examples
    --------
    >>> import numpy as np
    >>> from blitz_attn.testing import token_mask
    >>> token_mask(np.array([[1]]), 1, 4, (1, 2)).tolist()
    [[False, False, True, True]]
    """
    return lists.to_token_mask(sabi, s_q, s_kv, block_shape)


# ---- Arrays -------------------------------------------------------------------------------------------------------


def make_qkv(
    batch: int,
    heads: int,
    kv_heads: int,
    q_len: int,
    kv_len: int,
    head_dim: int,
    v_dim: int | None = None,
    dtype: str = "float32",
    layout: str = "BNSD",
    seed: int = 0,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Normally distributed q, k, v.

    Parameters
    ----------
    batch, heads, kv_heads, q_len, kv_len, head_dim : int
        Sizes.
    v_dim : int, optional
        Last dimension of v; default `head_dim`.
    dtype : str
        float32, float16, bfloat16 or float64. Arrays of bfloat16 are those that `round_to` returns.
    layout : str
        BNSD, BSND, BSH, or TND: `batch` sequences of equal lengths one after the other. The values do not depend on the layout.
    seed : int
        Seed of the generator.

    Returns
    -------
    q, k, v : numpy.ndarray
        Contiguous arrays in that layout and dtype.

    Raises
    ------
    ValueError
        The layout or the dtype is unknown.

    Examples
    --------
    >>> from blitz_attn.testing import make_qkv
    >>> [x.shape for x in make_qkv(2, 4, 2, 5, 7, 8, v_dim=3, layout="BSND")]
    [(2, 5, 4, 8), (2, 7, 2, 8), (2, 7, 2, 3)]
    """
    rng = np.random.default_rng(integer(seed, "seed"))
    v_dim = head_dim if v_dim is None else v_dim
    shapes = [(batch, heads, q_len, head_dim), (batch, kv_heads, kv_len, head_dim), (batch, kv_heads, kv_len, v_dim)]
    q, k, v = (to_layout(round_to(rng.standard_normal(shape, dtype=np.float32), dtype), layout) for shape in shapes)
    return q, k, v


def to_layout(x: np.ndarray, layout: str) -> np.ndarray:
    """Contiguous copy of a (B, H, S, D) array in another layout.

    Parameters
    ----------
    x : numpy.ndarray
        (B, H, S, D).
    layout : str
        BNSD, BSND, BSH, or TND: the batch entries one after the other.

    Returns
    -------
    numpy.ndarray

    Raises
    ------
    ValueError
        The layout is unknown.

    Examples
    --------
    >>> import numpy as np
    >>> from blitz_attn.testing import to_layout
    >>> [to_layout(np.zeros((2, 3, 4, 5)), name).shape for name in ("BSND", "BSH", "TND")]
    [(2, 4, 3, 5), (2, 4, 15), (8, 3, 5)]
    """
    if layout == "BNSD":
        return np.ascontiguousarray(x)
    if layout not in ("BSND", "BSH", "TND"):
        raise ValueError(f"layout: expected BNSD, BSND, BSH or TND, got {layout!r}")
    x = np.ascontiguousarray(x.swapaxes(1, 2))
    batch, tokens, heads, dim = x.shape
    return x.reshape({"BSND": x.shape, "BSH": (batch, tokens, heads * dim), "TND": (batch * tokens, heads, dim)}[layout])


# ---- Comparisons --------------------------------------------------------------------------------------------------


def reference_attention(q: Any, k: Any, v: Any, sabi: Any = None, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    """`reference.block_sparse_attention` with the log-sum-exp. It always returns (out, lse) in float64.

    Parameters
    ----------
    q, k, v, sabi
        As in `blitz_attn.block_sparse_attention`.
    **options
        Keyword arguments of `blitz_attn.block_sparse_attention`; `return_lse` and `out` are ignored.

    Returns
    -------
    out, lse : numpy.ndarray

    Raises
    ------
    ValueError
        As the reference does.

    Examples
    --------
    >>> from blitz_attn.testing import make_qkv, reference_attention
    >>> [x.shape for x in reference_attention(*make_qkv(1, 2, 1, 3, 3, 4))]
    [(1, 2, 3, 4), (1, 2, 3)]
    """
    options = {**options, "return_lse": True, "out": None}
    return reference.block_sparse_attention(q, k, v, sabi, **options)


class Errors(NamedTuple):
    """Distance from the float64 result: the relative error in the Frobenius norm, the largest absolute error, and the result's largest
    magnitude."""

    relative: float
    largest: float
    peak: float


def error_of(values: Any, exact: np.ndarray, dtype: Any = None) -> Errors:
    """Error of `values` against `exact`.

    Equal infinities at the same index count as equal. Any other infinity, and any NaN, makes the error infinite.

    Parameters
    ----------
    values : array_like
        The computed result, of any dtype that `to_float64` reads.
    exact : numpy.ndarray
        The exact result, in float64.
    dtype : str, optional
        As in `to_float64`.

    Returns
    -------
    Errors

    Raises
    ------
    ValueError
        The shapes differ.

    Examples
    --------
    >>> import numpy as np
    >>> from blitz_attn.testing import error_of
    >>> error_of([3.0, 4.5], np.array([3.0, 4.0]))
    Errors(relative=0.1, largest=0.5, peak=4.0)
    """
    got = to_float64(values, dtype)
    if got.shape != exact.shape:
        raise ValueError(f"values: expected shape {exact.shape}, got {got.shape}")
    same = got == exact
    known = np.where(np.isfinite(exact), exact, 0.0)
    norm, peak = float(np.linalg.norm(known)), float(np.abs(known).max(initial=0.0))
    with np.errstate(invalid="ignore"):
        apart = np.where(same, 0.0, np.abs(got - exact))
    if not np.isfinite(apart).all():
        return Errors(math.inf, math.inf, peak)
    total = float(np.linalg.norm(apart))
    return Errors(total / norm if norm else total, float(apart.max(initial=0.0)), peak)


def error_rule(out: Any, q: Any, k: Any, v: Any, sabi: Any = None, **options: Any) -> tuple[Errors, Errors]:
    """The error of an attention output, and the error of a dense computation in the same precision.

    The rule of the test suites bounds the first error by the second: see `meets_error_rule`.

    Parameters
    ----------
    out : array_like
        Result of `blitz_attn.block_sparse_attention` on the other arguments.
    q, k, v, sabi
        The inputs of that call.
    **options
        The keyword arguments of that call, with `dtype` among them where the arrays are bfloat16 bits.

    Returns
    -------
    ours, dense : Errors
        Two errors against `reference.block_sparse_attention`: of `out`, and of `reference.dense_same_precision`.

    Raises
    ------
    ValueError
        As the reference does.

    Examples
    --------
    >>> from blitz_attn import reference
    >>> from blitz_attn.testing import error_rule, make_qkv
    >>> q, k, v = make_qkv(1, 1, 1, 4, 4, 8)
    >>> ours, dense = error_rule(reference.dense_same_precision(q, k, v), q, k, v)
    >>> ours == dense, 0 < dense.relative < 1e-6
    (True, True)
    """
    options = {**options, "return_lse": False, "out": None}
    exact = reference.block_sparse_attention(q, k, v, sabi, **options)
    dense = reference.dense_same_precision(q, k, v, sabi, **options)
    return error_of(out, exact, options.get("dtype")), error_of(dense, exact)


def meets_error_rule(ours: Errors, dense: Errors, dtype: Any, factor: float = 2.0) -> bool:
    """True where an error is at most `factor` times the error of a dense computation in the same precision.

    The factor holds for the relative error in the Frobenius norm. The largest single error is a matter of chance in both computations. It
    may be twice as large as the factor allows, which still catches a wild element that the norm would hide. Four roundings of float32, and
    for results of 16 bits one rounding of the result, are always allowed, since the dense result of a small problem can be exact or lucky.
    For float64, the reference is no more precise than the result, so the error must stay within 1000 roundings.

    Parameters
    ----------
    ours, dense : Errors
        From `error_rule`.
    dtype : str or dtype
        Precision of the inputs and the result.
    factor : float
        2 for results, 3 for gradients.

    Returns
    -------
    bool

    Raises
    ------
    KeyError
        `dtype` is none of float64, float32, float16 and bfloat16.

    Examples
    --------
    >>> from blitz_attn.testing import Errors, meets_error_rule
    >>> [meets_error_rule(Errors(e, e, 1.0), Errors(0.1, 0.1, 1.0), "float32") for e in (0.19, 0.21)]
    [True, False]
    """
    name = dtype_name(dtype)
    rounding = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}[name]
    if name == "float64":
        return ours.relative <= 1000 * rounding and ours.largest <= 1000 * rounding * max(1.0, ours.peak)
    always = 4 * 2.0**-24 + (rounding if name != "float32" else 0.0)
    return ours.relative <= max(factor * dense.relative, always) and ours.largest <= max(2 * factor * dense.largest, always * ours.peak)


def block_allclose_map(
    out: Any, ref: Any, block_h: int, block_w: int, rtol: float = OUT_RTOL, atol: float = OUT_ATOL, print_map: bool = False
) -> np.ndarray:
    """The blocks in which two (B, H, S, D) arrays agree.

    Parameters
    ----------
    out, ref : array_like
        Arrays of one shape. Their last two axes are cut into blocks.
    block_h, block_w : int
        Numbers of rows and columns of a block. The last block of an axis may be smaller.
    rtol, atol : float
        As in `numpy.isclose`.
    print_map : bool
        Print a grid of 0 and 1 for each batch entry and head.

    Returns
    -------
    numpy.ndarray
        bool (B, H, ceil(S / block_h), ceil(D / block_w)): True where all elements of the block are close.

    Raises
    ------
    ValueError
        The shapes differ or are not four-dimensional, or a block size is below 1.

    Examples
    --------
    >>> import numpy as np
    >>> from blitz_attn.testing import block_allclose_map
    >>> a = np.zeros((1, 1, 3, 2)); b = a.copy(); b[0, 0, 2, 1] = 1
    >>> block_allclose_map(a, b, 2, 1).astype(int).tolist()
    [[[[1, 1], [1, 0]]]]
    """
    left, right = to_float64(out), to_float64(ref)
    if left.shape != right.shape or left.ndim != 4:
        raise ValueError(f"ref: expected a four-dimensional array of the shape of out, {left.shape}, got {right.shape}")
    if min(block_h, block_w) < 1:
        raise ValueError(f"block_h, block_w: expected positive numbers, got {block_h} and {block_w}")
    close = np.isclose(left, right, rtol=rtol, atol=atol)
    tall = np.logical_and.reduceat(close, np.arange(0, close.shape[2], block_h), axis=2)
    cells = np.logical_and.reduceat(tall, np.arange(0, close.shape[3], block_w), axis=3)
    if print_map:
        print("\n".join(_map_lines(cells)))
    return cells


def _map_lines(cells: np.ndarray) -> Iterable[str]:
    for b, h in np.ndindex(*cells.shape[:2]):
        yield f"batch {b}, head {h}"
        yield from (" ".join(str(int(ok)) for ok in row) for row in cells[b, h])
