"""Figures: block lists, blocks over the frames of a video, and speed-up over sparsity from a benchmark table.

matplotlib is imported when a figure is drawn, and never through pyplot. So figures open no window, need no display and change no global
state.
"""

from __future__ import annotations

import io
import math
import re
from typing import TYPE_CHECKING, Any

import numpy as np

from ._arrays import integer, number
from ._sabi.block_list import block_shape_for
from ._sabi.lists import at_least_one, checked_shape, two_integers
from ._sentences import number_shown, shown
from ._video.order import TokenOrder, order_of_grids
from .sabi import check, to_block_mask

if TYPE_CHECKING:
    from ._types import ArrayLike

__all__ = ["COLUMNS", "parse_table", "plot_cubes", "plot_mask", "plot_speedup", "speedups"]

COLUMNS = (
    "block_shape",
    "H",
    "B",
    "s_q",
    "s_kv",
    "D",
    "frame(L,R,T,B)",
    "sparsity",
    "Outputs_equal",
    "Ref_Latency_[usec]",
    "Our_Latency_[usec]",
)
"""Columns of upstream's benchmark table, which come first in ours."""

_PROBLEM = ("B", "H", "s_q", "s_kv", "D")
_LATENCIES = ("Ref_Latency_[usec]", "Our_Latency_[usec]")

# Okabe and Ito's palette: distinguishable with any common kind of colour vision, and in grey.
_COLOURS = {32: "#882255", 64: "#CC79A7", 128: "#D55E00", 256: "#E69F00", 512: "#009E73", 1024: "#0072B2"}
_LINES = {32: (0, (1, 3)), 64: (0, (5, 1, 1, 1, 1, 1)), 128: "-", 256: "--", 512: "-.", 1024: ":"}
_MARKERS = "osD^vP*X"
_OTHER = "#666666"


def __dir__() -> list[str]:
    return __all__


# ---- Tables -------------------------------------------------------------------------------------------------------


def _cell(name: str, text: str) -> Any:
    if text in ("N/A", "-"):
        return None
    as_tuple = text.split("x") if name == "block_shape" else text.strip("()").split(",") if text.startswith("(") else None
    for kind in (int, float):
        try:
            return kind(text.rstrip("%")) if as_tuple is None else tuple(kind(n) for n in as_tuple)
        except ValueError:
            pass
    return text


def _row(row: Any, name: str) -> tuple[tuple, float, float | None, float | None]:
    """The values of a row that a figure needs: the problem with its block shape, the sparsity, and the latencies of the reference and of
    ours."""
    if not isinstance(row, dict):
        raise TypeError(f"{name}: expected a dict of parse_table, got {type(row).__name__}")
    for column in (*_PROBLEM, "block_shape", "sparsity", *_LATENCIES):
        if column not in row:
            raise ValueError(f"{name}: expected a column {column}, got {shown(list(row))}")
    problem = tuple(integer(row[column], name) for column in _PROBLEM)
    block_shape = two_integers(row["block_shape"], name, "a block_shape of two integers")
    reference, ours = (None if row[column] is None else number(row[column], name) for column in _LATENCIES)
    return (*problem, block_shape), number(row["sparsity"], name), reference, ours


def _rows_of(rows: Any) -> list[Any]:
    if not isinstance(rows, (tuple, list)):
        raise TypeError(f"rows: expected a list of dicts of parse_table, got {type(rows).__name__}")
    return list(rows)


def parse_table(text: str) -> list[dict[str, Any]]:
    """Rows of a benchmark table, found among any other output.

    A row starts with a block shape such as ``128x512``. A header line, which starts with ``block_shape``, names the columns of the rows
    between it and the next header line. Rows above the first header line have upstream's columns, `COLUMNS`.

    Parameters
    ----------
    text : str
        The table, as printed.

    Returns
    -------
    list of dict
        A dict for each row, from columns to values: ``block_shape`` and ``frame(L,R,T,B)`` as tuples, numbers as int or float, ``N/A`` and
        ``-`` as None, anything else as text. A percent sign after a number is dropped. Lines with more or fewer cells than the header are
        not rows.

    Raises
    ------
    TypeError
        `text` is not a string.

    Examples
    --------
    >>> from blitz_attn.plot import parse_table
    >>> row = parse_table("128x512 3 1 4096 4096 128 (8,1,29,1) 0.50 N/A N/A 85403.20")[0]
    >>> row["block_shape"], row["frame(L,R,T,B)"], row["sparsity"], row["Ref_Latency_[usec]"], row["Our_Latency_[usec]"]
    ((128, 512), (8, 1, 29, 1), 0.5, None, 85403.2)
    """
    if not isinstance(text, str):
        raise TypeError(f"text: expected a string, got {type(text).__name__}")
    header = list(COLUMNS)
    rows = []
    for line in text.splitlines():
        cells = line.split()
        if cells and cells[0] == "block_shape":
            header = cells
        elif cells and re.fullmatch(r"\d+x\d+", cells[0]) and len(cells) == len(header):
            rows.append({name: _cell(name, cell) for name, cell in zip(header, cells, strict=True)})
    return rows


def speedups(rows: list[dict[str, Any]]) -> tuple[dict[tuple, list[tuple[float, float]]], list[tuple]]:
    """Speed-up over the dense reference, a curve for each problem and block shape.

    Parameters
    ----------
    rows : list of dict
        From `parse_table`.

    Returns
    -------
    curves : dict
        From (B, H, s_q, s_kv, D, block_shape) to points (sparsity, reference latency at sparsity 0 / latency), by rising sparsity.
    skipped : list of tuple
        The keys that have no reference latency at sparsity 0, or no latency of ours.

    Raises
    ------
    TypeError, ValueError
        `rows` is not a list of dicts, or a row lacks a column that curves need, or has a value of another kind in such a column.

    Examples
    --------
    >>> from blitz_attn.plot import parse_table, speedups
    >>> table = "64x64 1 1 512 512 64 - 0.00 yes 90.0 100.0\\n64x64 1 1 512 512 64 - 0.50 yes N/A 50.0"
    >>> speedups(parse_table(table))
    ({(1, 1, 512, 512, 64, (64, 64)): [(0.0, 0.9), (0.5, 1.8)]}, [])
    """
    groups: dict[tuple, list[tuple[float, float | None, float | None]]] = {}
    for n, row in enumerate(_rows_of(rows)):
        key, sparsity, reference, latency = _row(row, f"rows[{n}]")
        groups.setdefault(key, []).append((sparsity, reference, latency))
    curves, skipped = {}, []
    for key, group in groups.items():
        base = [reference for sparsity, reference, _ in group if sparsity == 0 and reference]
        points = [(sparsity, latency) for sparsity, _, latency in group if latency]
        if base and points:
            curves[key] = [(s, base[0] / latency) for s, latency in sorted(points)]
        else:
            skipped.append(key)
    return curves, skipped


# ---- Figures ------------------------------------------------------------------------------------------------------


def _figure(size: tuple[float, float], dpi: float) -> Any:
    """A figure that pyplot does not know, and that a notebook shows as the value of a cell."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, dpi=dpi, layout="constrained")
    figure._repr_png_ = lambda: _png(figure)  # type: ignore[attr-defined]
    return figure


def _png(figure: Any) -> bytes:
    memory = io.BytesIO()
    figure.savefig(memory, format="png")
    return memory.getvalue()


def _resolution(title: Any, ax: Any, dpi: Any) -> float:
    """`dpi` as a number, after the checks of the arguments that all figures take."""
    from matplotlib.axes import Axes

    if title is not None and not isinstance(title, str):
        raise TypeError(f"title: expected a string, got {type(title).__name__}")
    if ax is not None and not isinstance(ax, Axes):
        raise TypeError(f"ax: expected matplotlib's Axes, got {type(ax).__name__}")
    resolution = number(dpi, "dpi")
    if not 0 < resolution < math.inf:
        raise ValueError(f"dpi: expected a positive number, got {number_shown(resolution)}")
    return resolution


def plot_speedup(rows: list[dict[str, Any]], *, title: str | None = None, ax: Any = None, dpi: float = 120) -> Any:
    """Speed-up over dense attention against sparsity, one line per problem and block shape.

    Colour stands for the keys per block, line style for the queries per block, marker for the sequence length. A dashed line marks parity
    with dense attention, a grey curve the ideal 1 / (1 - sparsity).

    Parameters
    ----------
    rows : list of dict
        From `parse_table`.
    title : str, optional
        Title of the figure. By default, it has the problem's sizes if all rows share them.
    ax : matplotlib.axes.Axes, optional
        Axes to draw into. Default: the axes of a new figure.
    dpi : float
        Resolution of a new figure.

    Returns
    -------
    matplotlib.figure.Figure
        Save it with ``savefig``.

    Raises
    ------
    TypeError, ValueError
        As in `speedups`; also without rows, without a reference latency at sparsity 0, and for another argument of a wrong kind.
    ImportError
        matplotlib is missing.

    Examples
    --------
    >>> from blitz_attn.plot import plot_speedup
    >>> plot_speedup([])
    Traceback (most recent call last):
    ...
    ValueError: rows: expected at least one row of a benchmark table, got none
    """
    if not _rows_of(rows):
        raise ValueError("rows: expected at least one row of a benchmark table, got none")
    curves, skipped = speedups(rows)
    if not curves:
        raise ValueError(f"rows: expected a reference latency at sparsity 0, got none in any of {len(skipped)} groups")
    dpi = _resolution(title, ax, dpi)
    if ax is None:
        ax = _figure((12, 7), dpi).add_subplot()
    problems = list(dict.fromkeys(key[:5] for key in curves))
    lengths = list(dict.fromkeys(key[2:4] for key in curves))
    for key, points in curves.items():
        block_q, block_kv = key[5]
        label = f"block_shape=({block_q}, {block_kv})"
        if len(problems) > 1:
            label += f" {_problem_name(key)}"
        ax.plot(
            *zip(*points, strict=True),
            label=label,
            color=_COLOURS.get(block_kv, _OTHER),
            linestyle=_LINES.get(block_q, "-"),
            marker=_MARKERS[lengths.index(key[2:4]) % len(_MARKERS)],
            markersize=4,
            linewidth=1.6,
            alpha=0.9,
        )
    least, most = (f(s for points in curves.values() for s, _ in points) for f in (min, max))
    grid = np.linspace(least, min(most, 0.999), 200)
    ax.plot(grid, 1 / (1 - grid), color="#999999", linewidth=3, alpha=0.5, zorder=1, label="ideal 1 / (1 - sparsity)")
    ax.axhline(1.0, color="black", linestyle="--", linewidth=1, zorder=1, label="dense reference")
    ax.set_xlabel("sparsity (share of blocks dropped)")
    ax.set_ylabel("speed-up over dense attention")
    ax.set_ylim(bottom=0)
    ax.grid(True, alpha=0.3)
    if title is None:
        title = "Block-sparse attention" + (f", {_problem_name(next(iter(curves)))}" if len(problems) == 1 else "")
    ax.set_title(title)
    ax.legend(fontsize=8, ncols=2 if len(curves) > 8 else 1, loc="upper left", handlelength=4)
    return ax.figure


def _problem_name(key: tuple) -> str:
    b, h, s_q, s_kv, d = key[:5]
    return f"BNSD=({b}, {h}, {s_q if s_q == s_kv else f'{s_q}/{s_kv}'}, {d})"


def plot_mask(
    sabi: ArrayLike,
    columns: int | None = None,
    *,
    block_shape: tuple[int, int] | None = None,
    max_heads: int = 6,
    title: str | None = None,
    ax: Any = None,
    dpi: float = 120,
) -> Any:
    """Picture of a block list, one panel per head.

    Parameters
    ----------
    sabi : array_like of int
        Block list (..., R, W).
    columns : int, optional
        Number of key blocks. Default: one more than the largest entry.
    block_shape : (int, int), optional
        Number of tokens per block of queries and of keys: the axes then count tokens. Default: the block shape that the list knows; without
        one, the axes count blocks.
    max_heads : int
        Largest number of panels, at least 1.
    title : str, optional
        Title of the figure.
    ax : matplotlib.axes.Axes, optional
        Axes to draw the first head into. Default: all heads are drawn into a new figure.
    dpi : float
        Resolution of a new figure.

    Returns
    -------
    matplotlib.figure.Figure
        A notebook shows the figure if it is the last value of a cell. Save it with ``savefig``.

    Raises
    ------
    TypeError, ValueError
        As in `blitz_attn.sabi.to_block_mask`, and for an empty list or another argument of a wrong kind or out of range.
    ImportError
        matplotlib is missing.

    Examples
    --------
    >>> from blitz_attn import plot, sabi
    >>> figure = plot.plot_mask(sabi.causal(2048), block_shape=(128, 128))  # doctest: +SKIP
    >>> figure.savefig("mask.png")  # doctest: +SKIP
    """
    mask, most = to_block_mask(sabi, columns), at_least_one(max_heads, "max_heads")
    block_shape = block_shape_for(sabi, block_shape)
    tall, wide = (1, 1) if block_shape is None else checked_shape(block_shape)
    dpi = _resolution(title, ax, dpi)
    heads = list(np.ndindex(*mask.shape[:-2]))[: 1 if ax is not None else most]
    rows, count = mask.shape[-2:]
    if not heads or not rows or not count:
        raise ValueError(f"sabi: expected at least one head, row and column, got a mask of shape {mask.shape}")
    if ax is None:
        across = min(3, len(heads))
        down = math.ceil(len(heads) / across)
        figure = _figure((4.5 * across, 4.5 * down + 0.4), dpi)
        panels = [figure.add_subplot(down, across, n + 1) for n in range(len(heads))]
    else:
        figure, panels = ax.figure, [ax]
    unit = "blocks" if block_shape is None else "tokens"
    for head, panel in zip(heads, panels, strict=True):
        picture = mask[head]
        panel.imshow(
            picture,
            cmap="Blues",
            vmin=0,
            vmax=1.4,  # kept blocks in a mid blue
            interpolation="nearest" if max(rows, count) <= 512 else "antialiased",
            aspect="equal" if rows * tall == count * wide else "auto",
            extent=(0.0, float(count * wide), float(rows * tall), 0.0),
        )
        name = f"batch {head[0]}, head {head[1]}: " if len(head) == 2 and mask[..., 0, 0].size > 1 else ""
        panel.set_title(f"{name}{picture.mean():.1%} of blocks kept", fontsize=9)
        panel.set_xlabel(f"keys ({unit})")
        panel.set_ylabel(f"queries ({unit})")
    if title and ax is None:
        figure.suptitle(title)
    elif title:
        ax.set_title(title)
    return figure


def _shown_frames(frames: int, own: int, most: int) -> range:
    """At most `most` frames at equal distances, with the frame `own` among them."""
    step = -(-frames // most)
    return range(own % step, frames, step)


def plot_cubes(
    order: TokenOrder,
    sabi: ArrayLike,
    row: int | None = None,
    *,
    head: int = 0,
    block_shape: tuple[int, int] | None = None,
    max_frames: int = 24,
    title: str | None = None,
    dpi: float = 120,
) -> Any:
    """Picture of the part of a video that one block of queries sees, one panel per frame.

    Tokens of the block itself are orange, the other tokens that it sees are blue, and lines show the cubes.

    Parameters
    ----------
    order : TokenOrder
        The order of the tokens, from `blitz_attn.video.cube_order`.
    sabi : array_like of int
        Block list of four axes over tokens in this order. The first axis, or the first two, may be missing.
    row : int, optional
        The block of queries. A token of the model lies in block ``order.inverse[token] // block_shape[0]``. Default: the block that holds
        the token in the middle of the first grid.
    head : int
        The head of the list, in its first batch entry. A list with one head has only head 0.
    block_shape : (int, int), optional
        Number of tokens per block of queries and of keys. Default: the block shape that the list knows; (128, 128) for plain arrays.
    max_frames : int
        Largest number of panels for each grid, at least 1. If a grid has more frames, some frames at equal distances are shown.
    title : str, optional
        Title of the figure. Default: how many of all tokens are seen, and how many of the plain tokens.
    dpi : float
        Resolution.

    Returns
    -------
    matplotlib.figure.Figure
        A notebook shows the figure if it is the last value of a cell. Save it with ``savefig``.

    Raises
    ------
    TypeError, ValueError
        `order` is not a `TokenOrder` of a geometry with a grid, the list does not fit it, a row or head is out of range, or another
        argument is of a wrong kind.
    ImportError
        matplotlib is missing.

    Examples
    --------
    >>> from blitz_attn import plot, video
    >>> order = video.cube_order(video.Geometry([(8, 16, 16)]))
    >>> figure = plot.plot_cubes(order, video.blocks(order, video.SlidingTiles((1, 3, 3))))  # doctest: +SKIP
    >>> figure.savefig("cubes.png")  # doctest: +SKIP
    """
    order = order_of_grids(order)
    tokens, shape = order.geometry.num_tokens, checked_shape(block_shape_for(sabi, block_shape, (128, 128)))
    lists = check(sabi, tokens, tokens, shape)
    head, most, dpi = integer(head, "head"), at_least_one(max_frames, "max_frames"), _resolution(title, None, dpi)
    if not 0 <= head < lists.shape[1] or not lists.shape[0]:
        raise ValueError(f"head: expected a head of the list, from 0 to {lists.shape[1] - 1}, got {head}")
    starts, first = {}, 0  # the first token of each grid
    for span in order.geometry.spans:
        if not isinstance(span, int):
            starts[first] = span
        first += span if isinstance(span, int) else math.prod(span)
    if row is None:
        start, (t, h, w) = next(iter(starts.items()))
        row = int(order.inverse[start + (t // 2 * h + h // 2) * w + w // 2]) // shape[0]
    row = integer(row, "row")
    if not 0 <= row < lists.shape[2]:
        raise ValueError(f"row: expected a row of the list, from 0 to {lists.shape[2] - 1}, got {row}")
    columns = np.asarray(lists[0, head, row])
    listed = np.zeros(-(-tokens // shape[1]), np.bool_)
    listed[columns[columns >= 0]] = True
    seen, own = listed[order.inverse // shape[1]], order.inverse // shape[0] == row
    return _frames_figure(order, starts, seen, own, most, title, dpi)


def _frames_figure(
    order: TokenOrder, starts: dict[int, Any], seen: np.ndarray, own: np.ndarray, most: int, title: str | None, dpi: float
) -> Any:  # fmt: skip
    """The figure of `plot_cubes` from masks over the model's tokens."""
    from matplotlib.colors import ListedColormap

    panels = []
    for grid, (start, span) in enumerate(starts.items()):
        end = start + math.prod(span)
        kinds = np.where(own[start:end], 2, seen[start:end]).reshape(span)
        held = np.flatnonzero((kinds == 2).any(axis=(1, 2)))
        name = f"grid {grid}, " if len(starts) > 1 else ""
        frames = _shown_frames(span[0], int(held[0]) if held.size else 0, most)
        panels += [(f"{name}frame {t}", kinds[t], [min(c, n) for c, n in zip(order.cube[1:], span[1:], strict=True)]) for t in frames]
    across = min(6, len(panels))
    down = math.ceil(len(panels) / across)
    height, width = (max(picture.shape[n] for _, picture, _ in panels) for n in (0, 1))
    colours = ListedColormap(["#F2F2F2", "#6BAED6", _COLOURS[128]])
    figure = _figure((2.2 * across, (2.2 * min(2.0, max(0.3, height / width)) + 0.35) * down + 0.5), dpi)
    for n, (name, picture, (tall, wide)) in enumerate(panels):
        panel = figure.add_subplot(down, across, n + 1)
        extent = (0.0, float(picture.shape[1]), float(picture.shape[0]), 0.0)
        panel.imshow(picture, cmap=colours, vmin=0, vmax=2, interpolation="nearest", extent=extent)
        panel.set_xticks(range(0, picture.shape[1] + 1, wide), [])
        panel.set_yticks(range(0, picture.shape[0] + 1, tall), [])
        panel.tick_params(length=0)
        panel.grid(True, color="white", linewidth=0.6)
        panel.set_title(name, fontsize=8, pad=3)
    plain = np.ones(len(seen), np.bool_)
    for start, span in starts.items():
        plain[start : start + math.prod(span)] = False
    colour = "blue and orange" if seen[own].all() else "blue and some of the orange" if seen[own].any() else "blue"
    text = f"{int(own.sum())} queries (orange) see {int(seen.sum())} of {len(seen)} tokens ({seen.mean():.1%}: {colour}"
    text += f", and {int((seen & plain).sum())} of {int(plain.sum())} plain tokens, which are not drawn)" if plain.any() else ")"
    figure.suptitle(text if title is None else title, fontsize=10)
    return figure
