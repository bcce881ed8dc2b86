"""Rules that say which cubes of a grid see each other. Public through `blitz_attn.video`.

Every rule has the same form. The cubes of a grid lie in layers along the frames. In each layer, a cube sees either nothing, or a window of
rows and columns of cubes. `_levels` gives the level of the window in each layer, and `_window` the place of a level's window along one
axis.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from .. import _arrays
from .._float_mode import in_usual_mode
from .._sabi.lists import MOST_ROWS
from .._sentences import number_shown, shown
from .order import Triple

__all__ = ["Neighbourhood", "Radial", "SlidingTiles"]

Sizes = tuple[int | None, int | None, int | None]


def _three(given: Any, name: str, what: str, least: int) -> Sizes:
    """Three integers from `least` on, each of which may be None."""
    if not isinstance(given, (tuple, list)):
        raise TypeError(f"{name}: expected {what}, got {type(given).__name__}")
    if len(given) != 3:
        raise ValueError(f"{name}: expected {what}, got {shown(tuple(given))}")
    t, h, w = (None if n is None else _arrays.integer(n, name) for n in given)
    if any(n is not None and n < least for n in (t, h, w)):
        raise ValueError(f"{name}: expected {what}, got {(t, h, w)}")
    return t, h, w


@dataclass(frozen=True)
class Neighbourhood:
    """A cube sees the cubes that are near it along all three axes.

    Two cubes see each other if their distance, counted in cubes, is at most the radius on every axis.

    Attributes
    ----------
    radius : (int or None, int or None, int or None)
        Largest distance along frames, height and width, in cubes, at least 0. None: any distance.

    Raises
    ------
    TypeError, ValueError
        `radius` is not three numbers of at least 0.

    See Also
    --------
    SlidingTiles : the same in the middle of a grid, but cubes at the edges see as many cubes as all others.

    Examples
    --------
    >>> from blitz_attn import video
    >>> order = video.cube_order(video.Geometry([(8, 16, 16)]))
    >>> video.density(order, video.Neighbourhood((0, 1, 1))), video.density(order, video.Neighbourhood((None, None, None)))
    (0.1953125, 1.0)
    """

    radius: Sizes = (1, 1, 1)

    def __post_init__(self) -> None:
        what = "three distances from 0 on, or None (frames, height, width)"
        object.__setattr__(self, "radius", _three(self.radius, "radius", what, 0))

    @classmethod
    def spatial(cls, radius: int = 0) -> Neighbourhood:
        """The rule of a spatial head: a cube sees all cubes of its own frames, and of the frames near these.

        Parameters
        ----------
        radius : int
            Largest distance along the frames, in cubes.

        Returns
        -------
        Neighbourhood
            With the radius ``(radius, None, None)``.

        Raises
        ------
        TypeError, ValueError
            `radius` is not an integer of at least 0.

        References
        ----------
        H. Xi et al., "Sparse VideoGen: Accelerating Video Diffusion Transformers with Spatial-Temporal Sparsity", arXiv:2502.01776. There,
        a query of a spatial head sees a band of tokens around itself in raster order, as wide as a few frames, and the first frame. Here,
        it sees whole layers of cubes, and the first frame with ``dense_frames=1``.

        Examples
        --------
        >>> from blitz_attn import video
        >>> video.Neighbourhood.spatial()
        Neighbourhood(radius=(0, None, None))
        """
        return cls((radius, None, None))

    @classmethod
    def temporal(cls, radius: int = 0) -> Neighbourhood:
        """The rule of a temporal head: a cube sees the cubes at its place, and near it, in all frames.

        Parameters
        ----------
        radius : int
            Largest distance along height and width, in cubes.

        Returns
        -------
        Neighbourhood
            With the radius ``(None, radius, radius)``.

        Raises
        ------
        TypeError, ValueError
            `radius` is not an integer of at least 0.

        References
        ----------
        As in `spatial`. In Sparse VideoGen, a query of a temporal head sees a run of places in raster order, in all frames. Here, it sees a
        rectangle of cubes in all frames.

        Examples
        --------
        >>> from blitz_attn import video
        >>> video.Neighbourhood.temporal(1)
        Neighbourhood(radius=(None, 1, 1))
        """
        return cls((None, radius, radius))

    def _levels(self, t: int, counts: Triple, size: int) -> np.ndarray:
        return _listed(*_around(np.asarray(t), self.radius[0], counts[0]), counts[0])

    def _window(self, level: int, at: np.ndarray, axis: int, counts: Triple) -> tuple[np.ndarray, np.ndarray]:
        return _around(at, self.radius[axis], counts[axis])


def _listed(first: np.ndarray, end: np.ndarray, count: int) -> np.ndarray:
    """Level 0 for the layers from `first` to before `end`, and -1 for the others."""
    layers = np.arange(count)
    return np.where((first <= layers) & (layers < end), 0, -1)


def _around(at: np.ndarray, reach: int | None, count: int) -> tuple[np.ndarray, np.ndarray]:
    """For each of the cubes `at` on an axis of `count` cubes, the first cube within `reach` and the end of these cubes."""
    reach = count if reach is None else min(reach, count)
    return np.maximum(at - reach, 0), np.minimum(at + reach + 1, count)


@dataclass(frozen=True)
class SlidingTiles:
    """A cube sees a window of cubes around it. At the edges, the window is moved inwards, so that all cubes see equally many cubes.

    Attributes
    ----------
    window : (int or None, int or None, int or None)
        Number of cubes of the window along frames, height and width, at least 1. None, or a number above the grid's, means the whole axis.
        With an even number, the window has one cube more before the cube than after it.

    Raises
    ------
    TypeError, ValueError
        `window` is not three numbers of at least 1.

    See Also
    --------
    Neighbourhood : a window that is cut at the edges.

    Notes
    -----
    Near the edges, or with a window of an even number of cubes, a cube may see another cube that does not see it.

    References
    ----------
    P. Zhang et al., "Fast Video Generation with Sliding Tile Attention", arXiv:2502.04507, whose tiles are the cubes of this module, but
    always divide the grid. In the authors' mask, a window of an even number of tiles is as wide as a window of the next odd number. Here,
    it is not.

    Examples
    --------
    >>> from blitz_attn import sabi, video
    >>> order = video.cube_order(video.Geometry([(12, 16, 16)]))
    >>> sabi.counts(video.blocks(order, video.SlidingTiles((1, 3, 3)))).ravel()[:5].tolist()
    [9, 9, 9, 9, 9]
    """

    window: Sizes = (3, 3, 3)

    def __post_init__(self) -> None:
        what = "three numbers of cubes from 1 on, or None (frames, height, width)"
        object.__setattr__(self, "window", _three(self.window, "window", what, 1))

    def _levels(self, t: int, counts: Triple, size: int) -> np.ndarray:
        return _listed(*_moved_inwards(np.asarray(t), self.window[0], counts[0]), counts[0])

    def _window(self, level: int, at: np.ndarray, axis: int, counts: Triple) -> tuple[np.ndarray, np.ndarray]:
        return _moved_inwards(at, self.window[axis], counts[axis])


def _moved_inwards(at: np.ndarray, window: int | None, count: int) -> tuple[np.ndarray, np.ndarray]:
    """For each of the cubes `at` on an axis of `count` cubes, the first cube of the window around it and the end of the window."""
    window = count if window is None else min(window, count)
    first = np.clip(at - window // 2, 0, count - window)
    return first, first + window


@in_usual_mode
def _positive(x: Any) -> float:
    factor = _arrays.number(x, "decay_factor")
    if not 0 < factor < math.inf:
        raise ValueError(f"decay_factor: expected a positive number, got {number_shown(factor)}")
    return factor


_POWERS = 2 ** np.arange(MOST_ROWS.bit_length() + 1)


@dataclass(frozen=True)
class Radial:
    """A cube sees a window of each frame. The window shrinks with the distance of the frames.

    The distance d of two cubes is the number of frames from the first frame of one to the first frame of the other, and m is
    ``floor(log2(d))``. If d is at most 1, a cube sees the whole layer of cubes. Beyond, it sees the cubes whose distance along the height,
    plus 1, is at most ``sqrt(decay_factor / 2**m)`` times the height of the grid, and the same along the width, all in cubes. So each
    doubling of d halves the product of both limits. If one limit would be less than 1, it is 1, and the other limit is
    ``decay_factor / 2**m`` times the number of cubes in a layer, but at least 1. If ``2**m`` exceeds the number of cubes in a layer, only
    each n-th frame is seen, where n is the quotient of these two numbers, rounded up. A layer of cubes is then seen if a multiple of
    n is among the numbers from d to ``d + s - 1``, where s is the number of frames of a full cube.

    Attributes
    ----------
    decay_factor : float
        Factor of the window's area, above 0.

    Raises
    ------
    TypeError, ValueError
        `decay_factor` is not a positive, finite number.

    Notes
    -----
    Thin cubes, such as ``(1, 8, 8)``, follow the distance most closely.

    References
    ----------
    X. Li et al., "Radial Attention: O(n log n) Sparse Attention with Energy Decay for Long Video Generation", arXiv:2506.19852. There, the
    window is a run of tokens in raster order whose length halves, and frames are left out where the run would be shorter than a token.
    Here, the window is a rectangle of cubes whose area halves. For frames of one row and cubes of one token, both rules are the same. The
    keys of the first frame, which the paper keeps as an attention sink, are kept with ``dense_frames=1``; the queries of that frame then
    see everything, too. `decay_factor` has the meaning that it has in the authors' program.

    Examples
    --------
    >>> from blitz_attn import video
    >>> order = video.cube_order(video.Geometry([(21, 32, 48)]), (1, 8, 8))
    >>> round(video.density(order, video.Radial()), 3), round(video.density(order, video.Radial(0.25), dense_frames=1), 3)
    (0.384, 0.268)
    """

    decay_factor: float = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "decay_factor", _positive(self.decay_factor))

    def _levels(self, t: int, counts: Triple, size: int) -> np.ndarray:
        """The level of a distance is m + 1, and 0 for a distance of at most one frame."""
        distances = np.abs(np.arange(counts[0]) - t) * size
        levels = np.where(distances <= 1, 0, np.searchsorted(_POWERS, distances, side="right"))
        every = -(-_POWERS[np.maximum(levels - 1, 0)] // (counts[1] * counts[2]))
        return np.where(-distances % every < size, levels, -1)

    def _window(self, level: int, at: np.ndarray, axis: int, counts: Triple) -> tuple[np.ndarray, np.ndarray]:
        if level == 0:
            return _around(at, None, counts[axis])
        own, other = counts[axis], counts[3 - axis]
        share = Fraction(self.decay_factor) / 2 ** (level - 1)
        side = int(share * own * other) if share * other**2 < 1 else math.isqrt(int(share * own**2))
        return _around(at, max(side - 1, 0), counts[axis])


Rule = Neighbourhood | SlidingTiles | Radial
for _rule in (Neighbourhood, SlidingTiles, Radial):
    _rule.__module__ = "blitz_attn.video"  # where users and pickles find them


def rules_of(rule: Any, name: str = "rule") -> list[Rule]:
    """The rule, or the rules of all heads, as a list."""
    given = list(rule) if isinstance(rule, (tuple, list)) else [rule]
    for one in given:
        if not isinstance(one, (Neighbourhood, SlidingTiles, Radial)):
            what = "a Neighbourhood, a Radial or a SlidingTiles such as SlidingTiles((3, 3, 3)), or a list of them"
            within = "" if one is rule else f" in a {type(rule).__name__}"
            raise TypeError(f"{name}: expected {what}, got {type(one).__name__}{within}")
    if not given:
        raise ValueError(f"{name}: expected at least one rule, got none")
    return given
