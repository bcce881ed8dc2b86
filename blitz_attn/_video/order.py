"""The geometry of the tokens of a sequence, and the order in which the tokens of a cube are neighbours. Public through
`blitz_attn.video`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from .. import _arrays
from .._floats import refuse_overlaps
from .._names import LAYOUTS, Layout
from .._sabi.lists import MOST_ROWS, some_integers
from .._sentences import shown

__all__ = ["Geometry", "TokenOrder", "cube_order"]

Triple = tuple[int, int, int]
_SPAN = "a number of tokens or a grid (frames, height, width)"
_TOKEN_AXES: dict[Layout, int] = {"BNSD": 2, "BSND": 1, "BSH": 1, "TND": 0}


def three_sizes(sizes: Any, name: str, what: str) -> Triple:
    """The three integers of `sizes`, each at least 1."""
    t, h, w = some_integers(sizes, name, what, 3)
    if min(t, h, w) < 1:
        raise ValueError(f"{name}: expected {what}, got {(t, h, w)}")
    return t, h, w


def checked_arrays(arrays: Mapping[str, Any], layout: Any, tokens: int) -> int:
    """The axis of the tokens in a layout, after a check that each of the named arrays has this many `tokens`."""
    axis = _TOKEN_AXES[_arrays.choice(layout, "layout", LAYOUTS)]  # type: ignore[index]
    for name, x in arrays.items():
        shape = _arrays.shape_to_take(x, name)
        if len(shape) <= axis or shape[axis] != tokens:
            fit = _layouts_that_fit(arrays, tokens)
            hint = f' (layout="{fit[0]}" fits)' if fit else ""
            raise ValueError(f"{name}: expected {tokens} tokens on axis {axis} (layout {layout}), got shape {shown(shape)}{hint}")
    return axis


def _layouts_that_fit(arrays: Mapping[str, Any], tokens: int) -> list[Layout]:
    """The layouts in which all arrays have this many tokens. Arrays (B, S, n) have layout BSH and not BSND."""
    shapes = [_arrays.shape_of(x) for x in arrays.values()]
    fit = [name for name, axis in _TOKEN_AXES.items() if all(len(shape) > axis and shape[axis] == tokens for shape in shapes)]
    return [name for name in fit if name != "BSND" or all(len(shape) > 3 for shape in shapes)]


def _checked_span(span: Any) -> int | Triple:
    if isinstance(span, (tuple, list)) or (isinstance(span, np.ndarray) and span.ndim):
        return three_sizes(span, "spans", "grids of at least one frame, row and column")
    try:
        count = _arrays.integer(span, "spans")
    except TypeError as error:
        raise TypeError(f"spans: expected {_SPAN} for each span, got {type(span).__name__}") from error
    if count < 0:
        raise ValueError(f"spans: expected at least 0 plain tokens, got {count}")
    return count


@dataclass(frozen=True)
class Geometry:
    """The tokens of a sequence, as spans in the order of the model.

    Attributes
    ----------
    spans : sequence of int or (int, int, int)
        An integer stands for this number of plain tokens (text, audio, registers), which have no place in the picture. Three integers
        (frames, height, width) stand for a grid of latent tokens in raster order: the frame changes slowest, the column fastest. Several
        grids, such as a reference image and a clip, are several spans.
    grids : tuple of (int, int, int)
        The grids among the spans.
    num_tokens : int
        Number of tokens of all spans, from 1 to 2**24.

    Raises
    ------
    TypeError, ValueError
        Spans that are something else, grids with an empty axis, or too many tokens.

    Notes
    -----
    The spans of known models: ``[226, (13, 30, 45)]`` for 49 frames of 480 x 720 by CogVideoX, which has the text first;
    ``[(33, 30, 52), 256]`` for 129 frames of 480 x 832 by HunyuanVideo, which has the text last, and ``[(33, 45, 80), 256]`` for its 129
    frames of 720 x 1280; ``[(21, 30, 52)]`` for 81 frames of 480 x 832 by Wan, whose text is in a call of its own; ``[512, (1, 64, 64)]``
    for images of 1024 x 1024 by Flux. The sizes of a grid are the sizes of the latents divided by the patch size.

    Mind the brackets: ``Geometry((9, 10, 16))`` is three spans of plain tokens, which see everything. Lists need a grid.

    Examples
    --------
    >>> from blitz_attn import video
    >>> geometry = video.Geometry([226, (13, 30, 45)])
    >>> geometry.num_tokens, geometry.grids
    (17776, ((13, 30, 45),))
    """

    spans: tuple[int | Triple, ...]

    def __init__(self, spans: Sequence[int | Sequence[int]]) -> None:
        if not isinstance(spans, (tuple, list)):
            raise TypeError(f"spans: expected a list of spans, each of them {_SPAN}, got {type(spans).__name__}")
        checked = tuple(_checked_span(span) for span in spans)
        total = sum(span if isinstance(span, int) else math.prod(span) for span in checked)
        if not 1 <= total <= MOST_ROWS:
            raise ValueError(f"spans: expected 1 to {MOST_ROWS} tokens in all, got {total}")
        object.__setattr__(self, "spans", checked)

    @property
    def grids(self) -> tuple[Triple, ...]:
        """The grids among the spans."""
        return tuple(span for span in self.spans if not isinstance(span, int))

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all spans."""
        return sum(span if isinstance(span, int) else math.prod(span) for span in self.spans)


class Cubes(NamedTuple):
    """The cubes of an order, in the order of the sequence. Plain tokens, which come last, belong to no cube."""

    grid: np.ndarray  # (N,) int64: the number of the cube's grid
    place: np.ndarray  # (N, 3) int64: the cube's place in its grid, along frames, height and width, in cubes
    start: np.ndarray  # (N + 1,) int64: the position of the first token of each cube, and the end of the last cube
    sizes: tuple[Triple, ...]  # for each grid, the size of a full cube
    counts: tuple[Triple, ...]  # for each grid, the number of cubes along each axis


def _along(length: int, size: int) -> np.ndarray:
    """The sizes of the cubes along an axis, of which the last may be smaller."""
    return np.minimum(size, length - np.arange(0, length, size))


def _of_grid(grid: Triple, size: Triple) -> tuple[np.ndarray, np.ndarray]:
    """How many tokens each cube of a grid has, in raster order of cubes; and the numbers of the grid's tokens, cube by cube."""
    t, h, w = (_along(length, n) for length, n in zip(grid, size, strict=True))
    held = (t[:, None, None] * h[:, None] * w).reshape(-1)
    ct, ch, cw = (np.arange(length) // n for length, n in zip(grid, size, strict=True))
    cube_of_token = ((ct[:, None, None] * len(h) + ch[:, None]) * len(w) + cw).reshape(-1)
    return held, np.argsort(cube_of_token, kind="stable")  # stable: within a cube, tokens stay in raster order


def _cubes_of(geometry: Geometry, cube: Triple) -> tuple[Cubes, np.ndarray]:
    """The cubes, and the order of the tokens."""
    grids, first, begins, plain = geometry.grids, 0, [], []
    for span in geometry.spans:
        if isinstance(span, int):
            plain.append(np.arange(first, first + span))
        else:
            begins.append(first)
        first += span if isinstance(span, int) else math.prod(span)
    sizes: list[Triple] = [(min(cube[0], t), min(cube[1], h), min(cube[2], w)) for t, h, w in grids]
    parts = [_of_grid(grid, size) for grid, size in zip(grids, sizes, strict=True)]
    counts: list[Triple] = [(-(-t // a), -(-h // b), -(-w // c)) for (t, h, w), (a, b, c) in zip(grids, sizes, strict=True)]
    none = np.zeros(0, np.int64)
    held = np.concatenate([none, *(held for held, _ in parts)])
    tokens = np.concatenate([none, *(begin + own for begin, (_, own) in zip(begins, parts, strict=True))])
    of_grid = np.repeat(np.arange(len(grids)), [math.prod(count) for count in counts])
    place = np.concatenate([np.zeros((0, 3), np.int64), *(np.argwhere(np.ones(count, np.bool_)) for count in counts)])
    full = np.array([math.prod(size) for size in sizes], np.int64)[of_grid]
    # Where grids have cubes of several sizes, larger cubes come first, so that smaller cubes whose size divides the larger size are
    # aligned, too.
    order = np.lexsort((np.arange(len(full)), -full, held < full))
    start = np.concatenate([[0], np.cumsum(held[order])])
    moved = np.repeat((np.cumsum(held) - held)[order] - start[:-1], held[order]) + np.arange(start[-1])
    cubes = Cubes(of_grid[order], place[order], start, tuple(sizes), tuple(counts))
    return cubes, np.concatenate([tokens[moved], *plain])


@dataclass(frozen=True)
class TokenOrder:
    """An order in which the tokens of one cube are neighbours, made by `cube_order`.

    Attributes
    ----------
    geometry : Geometry
        The geometry of the tokens.
    cube : (int, int, int)
        Tokens of a cube along frames, height and width, as given to `cube_order`.
    indices : numpy.ndarray
        int64 (num_tokens,), read-only: ``indices[n]`` is the token of the model at position n of this order.
    inverse : numpy.ndarray
        int64 (num_tokens,), read-only: ``inverse[m]`` is the position of the model's token m.

    Examples
    --------
    >>> from blitz_attn import video
    >>> order = video.cube_order(video.Geometry([(1, 2, 4)]), (1, 2, 2))
    >>> order.indices.tolist(), order.inverse.tolist()
    ([0, 1, 4, 5, 2, 3, 6, 7], [0, 1, 4, 5, 2, 3, 6, 7])
    """

    geometry: Geometry
    cube: Triple
    indices: np.ndarray = field(init=False, repr=False, compare=False)
    inverse: np.ndarray = field(init=False, repr=False, compare=False)
    _cubes: Cubes = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.geometry, Geometry):
            raise TypeError(f"geometry: expected a Geometry, got {type(self.geometry).__name__}")
        cube = three_sizes(self.cube, "cube", "three positive numbers of tokens (frames, height, width)")
        cubes, indices = _cubes_of(self.geometry, cube)
        inverse = np.empty_like(indices)
        inverse[indices] = np.arange(len(indices))
        for array in (indices, inverse, *cubes[:3]):
            array.flags.writeable = False
        for name, value in (("cube", cube), ("indices", indices), ("inverse", inverse), ("_cubes", cubes)):
            object.__setattr__(self, name, value)

    def permute(self, *arrays: Any, layout: Layout = "BNSD", out: Any = None) -> Any:
        """Copies of arrays, with the tokens in this order.

        Parameters
        ----------
        *arrays : array
            Queries, keys and values, or other arrays whose tokens are in the model's order: NumPy arrays of numbers, torch tensors or JAX
            arrays. Gradients of torch pass through.
        layout : {"BNSD", "BSND", "BSH", "TND"}
            The layout says which axis has the tokens: the third axis in BNSD, the second in BSND and BSH, the first in TND. The axes after
            this axis may be missing, so that ``"BNSD"`` also fits a log-sum-exp (B, H, S).
        out : array or tuple of array, optional
            NumPy arrays or torch tensors that get the results, one for each array, in memory that no other array shares. Default: new
            arrays.

        Returns
        -------
        array or tuple of array
            Contiguous arrays of the kinds, shapes and dtypes of the given arrays; a single array if one was given.

        Raises
        ------
        TypeError, ValueError
            No array, an argument that is not an array, a number of tokens other than the geometry's, an unknown layout, or an `out` that
            does not fit or overlaps an array.

        Examples
        --------
        >>> import numpy as np
        >>> from blitz_attn import video
        >>> order = video.cube_order(video.Geometry([(1, 2, 4)]), (1, 2, 2))
        >>> x = np.arange(8).reshape(1, 1, 8, 1)
        >>> order.permute(x).ravel().tolist()
        [0, 1, 4, 5, 2, 3, 6, 7]
        """
        return self._taken(self.indices, arrays, layout, out)

    def restore(self, *arrays: Any, layout: Layout = "BNSD", out: Any = None) -> Any:
        """Copies of arrays, with the tokens back in the model's order: the inverse of `permute`.

        Parameters
        ----------
        *arrays : array
            Outputs of attention, log-sum-exps, or other arrays whose tokens are in this order.
        layout, out
            As in `permute`. A log-sum-exp is (B, H, S) also for queries in BSND and BSH: restore it with ``"BNSD"``.

        Returns
        -------
        array or tuple of array
            As from `permute`.

        Raises
        ------
        TypeError, ValueError
            As from `permute`.

        Examples
        --------
        >>> import numpy as np
        >>> from blitz_attn import video
        >>> order = video.cube_order(video.Geometry([3, (2, 5, 7)]), (2, 2, 2))
        >>> x = np.arange(73)[:, None]
        >>> bool((order.restore(order.permute(x, layout="TND"), layout="TND") == x).all())
        True
        """
        return self._taken(self.inverse, arrays, layout, out)

    def _taken(self, indices: np.ndarray, arrays: tuple[Any, ...], layout: Any, out: Any) -> Any:
        axis = checked_arrays({f"arrays[{n}]": x for n, x in enumerate(arrays)}, layout, len(indices))
        if not arrays:
            raise TypeError("arrays: expected at least one array, got none")
        outs = [None] * len(arrays) if out is None else list(out) if isinstance(out, (tuple, list)) else [out]
        if len(outs) != len(arrays):
            raise ValueError(f"out: expected {len(arrays)} arrays, one for each array, got {len(outs)}")
        for n, (x, given) in enumerate(zip(arrays, outs, strict=True)):
            if given is not None:
                _arrays.check_taken(given, x, "out", f"arrays[{n}]")
                others = {f"arrays[{m}]": y for m, y in enumerate(arrays)} | {f"out[{m}]": y for m, y in enumerate(outs) if m != n}
                refuse_overlaps({"out": given}, **others)
        made = [_arrays.take(x, indices, axis, given) for x, given in zip(arrays, outs, strict=True)]
        return made[0] if len(made) == 1 else tuple(made)


def refuse_plain(geometry: Geometry, name: str) -> None:
    """Refuses a geometry without a grid, where all tokens would see each other: `Geometry((9, 10, 16))` is three spans of plain tokens."""
    if not geometry.grids:
        raise ValueError(f"{name}: expected a geometry with a grid, such as Geometry([(9, 10, 16)]), got spans {shown(geometry.spans)}")


def order_of_grids(order: Any) -> TokenOrder:
    """`order`, after a check that it is a `TokenOrder` whose geometry has a grid."""
    if not isinstance(order, TokenOrder):
        raise TypeError(f"order: expected a TokenOrder, from cube_order(geometry), got {type(order).__name__}")
    refuse_plain(order.geometry, "order")
    return order


Geometry.__module__ = TokenOrder.__module__ = "blitz_attn.video"  # where users and pickles find them


def cube_order(geometry: Geometry, cube: Sequence[int] = (4, 4, 4)) -> TokenOrder:
    """The order in which the tokens of a cube of a few frames, rows and columns are neighbours.

    Sliding Tile Attention and VSA order tokens in this way: a block of tokens then is a compact piece of the video, and neither a stripe of
    one frame, as in raster order, nor a mixture of distant places.

    Each grid is cut into cubes by itself, from its first token on; cubes at the far edges are smaller (ragged) where the cube's size does
    not divide the grid's. The order has the full cubes first, in raster order of cubes, so that blocks of a cube's size, or of a multiple,
    begin where cubes begin. The ragged cubes follow in the same order, and the plain tokens come last, in the model's order. Within a cube,
    tokens are in raster order. Where grids have full cubes of several sizes, larger cubes come first.

    Parameters
    ----------
    geometry : Geometry
        The geometry of the tokens.
    cube : (int, int, int)
        Tokens of a cube along frames, height and width, each at least 1. A size larger than the grid's is cut to the grid's: ``(1, h, w)``
        with the grid's height and width makes a cube of each frame.

    Returns
    -------
    TokenOrder
        The order, its inverse, and methods that permute arrays and restore their order.

    Raises
    ------
    TypeError, ValueError
        `geometry` is not a `Geometry`, or `cube` is not three sizes of at least 1.

    Notes
    -----
    Blocks of ragged cubes hold tokens of several cubes, and list the blocks that any of these cubes sees. So do blocks of several full
    cubes. If sizes from 3 to 8 divide the axes, as ``(3, 5, 4)`` divide (21, 30, 52), take these sizes, and blocks with the number of
    tokens of a cube.

    References
    ----------
    P. Zhang et al., "Fast Video Generation with Sliding Tile Attention", arXiv:2502.04507. P. Zhang et al., "VSA: Faster Video Diffusion
    with Trainable Sparse Attention", arXiv:2505.13389.

    Examples
    --------
    >>> import numpy as np
    >>> import blitz_attn
    >>> from blitz_attn import video
    >>> order = video.cube_order(video.Geometry([20, (4, 8, 8)]), (4, 4, 4))
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = (rng.standard_normal((1, 2, 276, 32), dtype=np.float32) for _ in range(3))
    >>> sabi = video.blocks(order, video.Neighbourhood((1, 1, 0)))
    >>> out = order.restore(blitz_attn.block_sparse_attention(*order.permute(q, k, v), sabi))
    >>> out.shape
    (1, 2, 276, 32)
    """
    return TokenOrder(geometry, cube)  # type: ignore[arg-type]
