"""The geometry of the tokens of self-attention, from the arguments of a model's forward call.

For each known class of diffusers, a function takes the model's configuration and the arguments by name, and returns the spans in the
model's order.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np

from ...video import Geometry

__all__ = ["UnknownError", "finder_of", "names_known"]

Spans = list[int | tuple[int, int, int]]


class UnknownError(Exception):
    """A geometry cannot be found. The text of the error follows "because of" in the log."""


def _wan(config: Any, given: dict[str, Any]) -> Spans:
    return [_grid(given["hidden_states"].shape[2:], config.patch_size)]


def _hunyuan_video(config: Any, given: dict[str, Any]) -> Spans:
    grid = _grid(given["hidden_states"].shape[2:], (config.patch_size_t, config.patch_size, config.patch_size))
    return [grid, given["encoder_hidden_states"].shape[1]]


def _cog_video(config: Any, given: dict[str, Any]) -> Spans:
    frames, _, height, width = given["hidden_states"].shape[1:]
    grid = _grid((frames, height, width), (config.patch_size_t or 1, config.patch_size, config.patch_size))
    return [given["encoder_hidden_states"].shape[1], grid]


def _ltx_video(config: Any, given: dict[str, Any]) -> Spans:
    frames, height, width = (given.get(name) for name in ("num_frames", "height", "width"))
    tokens = given["hidden_states"].shape[1]
    if frames is None or height is None or width is None or frames * height * width != tokens:
        raise UnknownError(f"num_frames, height and width of {(frames, height, width)} for {tokens} tokens: give a geometry")
    return [(frames, height, width)]


def _flux(config: Any, given: dict[str, Any]) -> Spans:
    """Text, then images that follow one another. In `img_ids`, a token's first number tells images apart; the others are row and column."""
    places = given["img_ids"]
    places = (places[0] if places.ndim == 3 else places).detach().double().cpu().numpy()
    spans: Spans = [given["encoder_hidden_states"].shape[1]]
    begins = [0, *(np.flatnonzero(np.diff(places[:, 0])) + 1), len(places)]
    for begin, end in itertools.pairwise(map(int, begins)):
        rows, columns = (places[begin:end, 1:] - places[begin, 1:]).T
        width = int((rows != 0).argmax()) or end - begin
        where = np.arange(end - begin)
        if (end - begin) % width or (rows != where // width).any() or (columns != where % width).any():
            raise UnknownError("img_ids that are not the rows of images: give a geometry")
        spans.append((1, (end - begin) // width, width))
    return spans


def _grid(sizes: Any, patch: Any) -> tuple[int, int, int]:
    """The sizes of a grid of tokens, from the sizes of the latents."""
    t, h, w = (n // p for n, p in zip(sizes, patch, strict=True))
    return t, h, w


_FINDERS: dict[str, Callable[[Any, dict[str, Any]], Spans]] = {
    "WanTransformer3DModel": _wan,
    "HunyuanVideoTransformer3DModel": _hunyuan_video,
    "CogVideoXTransformer3DModel": _cog_video,
    "LTXVideoTransformer3DModel": _ltx_video,
    "FluxTransformer2DModel": _flux,
}


def names_known() -> str:
    """The classes whose geometry can be found, in words."""
    *some, last = _FINDERS
    return f"{', '.join(some)} or {last}"


def finder_of(model: Any) -> Callable[[dict[str, Any]], Geometry] | None:
    """The function that finds the geometry from the arguments of a model's forward call; None for classes that are not known."""
    find = next((_FINDERS[kind.__name__] for kind in type(model).__mro__ if kind.__name__ in _FINDERS), None)
    if find is None:
        return None

    def geometry_of(given: dict[str, Any]) -> Geometry:
        try:
            return Geometry(find(model.config, given))
        except (AttributeError, IndexError, KeyError, TypeError, ValueError, ZeroDivisionError) as error:
            # The model itself will refuse such arguments.
            raise UnknownError(f"arguments that do not say what the tokens are ({type(error).__name__})") from error

    return geometry_of
