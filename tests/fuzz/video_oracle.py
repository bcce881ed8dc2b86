"""Orders and lists of videos by brute force over the coordinates of tokens, by the definitions in the docstrings of `blitz_attn.video`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

from blitz_attn import video


class Token(NamedTuple):
    """A token of the model: its grid (None: a plain token), the frames, height and width of that grid, and the token's place in it."""

    grid: int | None
    sizes: tuple[int, int, int]
    at: tuple[int, int, int]


def tokens_of(spans: Sequence[Any]) -> list[Token]:
    found: list[Token] = []
    grids = 0
    for span in spans:
        if isinstance(span, int):
            found += [Token(None, (0, 0, 0), (0, 0, 0))] * span
            continue
        for t in range(span[0]):
            for h in range(span[1]):
                found += [Token(grids, span, (t, h, w)) for w in range(span[2])]
        grids += 1
    return found


def cube_of(token: Token, cube: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """The place of the token's cube, the size of full cubes of its grid, and the size of this cube."""
    size = tuple(min(c, n) for c, n in zip(cube, token.sizes, strict=True))
    place = tuple(x // c for x, c in zip(token.at, size, strict=True))
    own = tuple(min(c, n - p * c) for c, n, p in zip(size, token.sizes, place, strict=True))
    return place, size, own


def order_of(spans: Sequence[Any], cube: Sequence[int]) -> list[int]:
    """Tokens of full cubes, then of ragged cubes, by falling size of their grid's full cubes and in raster order; then plain tokens."""
    keys = []
    for n, token in enumerate(tokens_of(spans)):
        if token.grid is None:
            keys.append(((2,), n))
        else:
            place, size, own = cube_of(token, cube)
            keys.append(((int(own != size), -(size[0] * size[1] * size[2]), token.grid, *place), n))
    return [n for _, n in sorted(keys)]


# ---- Rules ----------------------------------------------------------------------------------------------------------


def neighbourhood(radius: Sequence[int | None], a: Sequence[int], b: Sequence[int], *_: Any) -> bool:
    return all(r is None or abs(x - y) <= r for r, x, y in zip(radius, a, b, strict=True))


def sliding_tiles(window: Sequence[int | None], a: Sequence[int], b: Sequence[int], counts: Sequence[int], *_: Any) -> bool:
    for w, x, y, n in zip(window, a, b, counts, strict=True):
        many = n if w is None or w > n else w
        tiles = list(range(x - many // 2, x - many // 2 + many))
        while tiles[0] < 0:
            tiles = [tile + 1 for tile in tiles]
        while tiles[-1] >= n:
            tiles = [tile - 1 for tile in tiles]
        if y not in tiles:
            return False
    return True


def radial(factor: float, a: Sequence[int], b: Sequence[int], counts: Sequence[int], frames: int) -> bool:
    distance = abs(a[0] - b[0]) * frames
    if distance <= 1:
        return True
    power = 1
    while power * 2 <= distance:
        power *= 2
    every = -(-power // (counts[1] * counts[2]))
    if all(d % every for d in range(distance, distance + frames)):
        return False
    share = Fraction(factor) / power  # of the area of a layer
    square_limits = [share * n**2 for n in counts[1:]]
    if square_limits[0] < 1:
        square_limits = [Fraction(1), (share * counts[1] * counts[2]) ** 2]
    elif square_limits[1] < 1:
        square_limits = [(share * counts[1] * counts[2]) ** 2, Fraction(1)]
    return all(x == y or (abs(x - y) + 1) ** 2 <= most for x, y, most in zip(a[1:], b[1:], square_limits, strict=True))


def rule_of(rule: Any) -> Callable[..., bool]:
    """A function of the places of two cubes, the cubes along each axis, and the frames of a cube: whether the first cube sees the second."""
    if isinstance(rule, video.Neighbourhood):
        return lambda *cubes: neighbourhood(rule.radius, *cubes)
    if isinstance(rule, video.SlidingTiles):
        return lambda *cubes: sliding_tiles(rule.window, *cubes)
    return lambda *cubes: radial(rule.decay_factor, *cubes)


def seen(spans: Sequence[Any], cube: Sequence[int], rule: Any, dense_frames: int = 0, dense_tokens: Any = None) -> np.ndarray:
    """(S, S) bool over tokens in the order of the cubes: which query sees which key."""
    tokens, sees = tokens_of(spans), rule_of(rule)
    special = set() if dense_tokens is None else {int(n) for n in dense_tokens}
    dense = [token.grid is None or token.at[0] < dense_frames or n in special for n, token in enumerate(tokens)]
    known: dict[Any, bool] = {}
    mask = np.zeros((len(tokens), len(tokens)), np.bool_)
    cubes = [((), ()) if token.grid is None else cube_of(token, cube)[:2] for token in tokens]
    for i, one in enumerate(tokens):
        for j, other in enumerate(tokens):
            if dense[i] or dense[j] or one.grid != other.grid:
                mask[i, j] = True
                continue
            key = one.grid, cubes[i][0], cubes[j][0]
            if key not in known:
                size = cubes[i][1]
                counts = tuple(-(-n // c) for n, c in zip(one.sizes, size, strict=True))
                known[key] = sees(cubes[i][0], cubes[j][0], counts, size[0])
            mask[i, j] = known[key]
    order = order_of(spans, cube)
    return mask[np.ix_(order, order)]


def shares(q: np.ndarray, k: np.ndarray, mask: np.ndarray, scale: float, lens: Sequence[int]) -> np.ndarray:
    """The share (B, H, S) of each query's softmax over the first `lens[b]` keys that falls to the keys of `mask`, a bool array (S, S). Arrays
    are float64, of layout BNSD."""
    scores = scale * q @ np.repeat(k, q.shape[1] // k.shape[1], axis=1).swapaxes(-1, -2)
    scores = np.where(np.arange(k.shape[2]) < np.asarray(lens)[:, None, None, None], scores, -np.inf)
    weights = np.exp(scores - np.maximum(scores.max(axis=-1, keepdims=True), -1e300))  # without a key, all weights are 0
    return (weights * mask).sum(axis=-1) / np.maximum(weights.sum(axis=-1), 1e-300)
