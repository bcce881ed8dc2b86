"""How a video model attends: the record that `sparse_video` takes. Neither torch nor diffusers is imported."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ... import _arrays
from ..._sabi.lists import checked_shape
from ..._select.prefill import select_blocks_prefill
from ..._sentences import shown
from ..._video.order import refuse_plain
from ..._video.rules import Rule, rules_of
from ...video import Geometry, Schedule, cube_order

__all__ = ["SparseVideo"]


def _blocks_of(cube: tuple[int, int, int]) -> tuple[int, int]:
    """The usual block shape for a cube."""
    tokens = math.prod(cube)
    return (tokens, tokens) if 32 <= tokens <= 256 else (64, 64)


@dataclass(frozen=True)
class SparseVideo:
    """Which tokens of a video see each other in self-attention, in which steps and layers.

    A query sees the blocks of keys that `rule` lists, or those that the best rule of `choose_from` lists. With a
    `density`, or densities of the `schedule`, a query also sees the blocks that a chooser takes. Without a rule, it sees these blocks and
    those of its own cube. Text and other plain tokens see everything and are seen by everything.

    Attributes
    ----------
    rule : rule or sequence of rule, optional
        A `blitz_attn.video.Neighbourhood`, ``SlidingTiles`` or ``Radial``, or one for each head.
    choose_from : sequence of rule
        Rules in place of `rule`, for example ``(Neighbourhood.spatial(), Neighbourhood.temporal())``. Each head gets the rule that keeps
        the largest softmax mass of sampled queries, as in Sparse VideoGen. The choice is made in each layer and forward call, or
        at each step in which the `schedule` refreshes. The entries of a batch share the choice, and padding at the end of the text does
        not count: see `blitz_attn.video.choose_rules`.
    density : float, optional
        Share of the blocks that a chooser takes in each layer and head, above 0 and at most 1. The blocks are chosen in each layer and
        forward call, or when the `schedule` refreshes.
    schedule : blitz_attn.video.Schedule
        Dense first steps, densities by step, and how many steps use lists that were chosen once. If it has densities, `density` must be
        None.
    geometry : blitz_attn.video.Geometry, optional
        Which tokens of self-attention form grids, and which are plain. A forward call whose self-attention has another number of tokens is
        refused. Default: the geometry is found from the arguments of each forward call, for the classes that `sparse_video` names.
    cube : (int, int, int)
        Tokens of a cube along frames, height and width.
    block_shape : (int, int)
        Tokens in a block of queries and in a block of keys. Default: both are the number of tokens of a `cube`, before it is cut to the
        grid, if that is 32 to 256; else both are 64, since smaller blocks are slow and larger blocks are coarse.
    dense_frames : int
        How many first frames of each grid see all tokens and are seen by all.
    dense_layers : tuple of int
        Numbers, counted from 0, of the layers that keep everything. Single-stream blocks are counted after double-stream blocks, and blocks
        of a control branch (Wan VACE) last. A layer that a model uses twice is counted once.
    min_tokens : int
        Shorter sequences are attended densely.
    chooser : str or chooser
        How the chooser scores blocks: see `blitz_attn.select_blocks_prefill`.
    num_threads : int, optional
        Threads of each call. Default: see `blitz_attn.set_num_threads`.

    Raises
    ------
    TypeError, ValueError
        A field of the wrong kind or out of range; no rule and no density; both `rule` and `choose_from`; a `density` and a schedule that
        has densities; a `geometry` without a grid.

    References
    ----------
    P. Zhang et al., "VSA: Faster Video Diffusion with Trainable Sparse Attention", arXiv:2505.13389: chosen cubes. H. Xi et al., "Sparse
    VideoGen", arXiv:2502.01776: a rule for each head, by sampled queries.

    Examples
    --------
    >>> from blitz_attn.integrations.diffusers import SparseVideo
    >>> from blitz_attn.video import Neighbourhood, Schedule, SlidingTiles
    >>> SparseVideo(SlidingTiles((3, 3, 3)), cube=(3, 5, 4)).block_shape
    (60, 60)
    >>> local = SparseVideo(Neighbourhood((1, 1, 1)), density=0.1, schedule=Schedule(dense_steps=10, refresh_every=5))
    >>> SparseVideo()
    Traceback (most recent call last):
    ValueError: rule: expected a rule, rules to choose_from or a density, got none of them
    """

    rule: Rule | Sequence[Rule] | None = None
    choose_from: Sequence[Rule] = ()
    density: float | None = None
    schedule: Schedule = field(default_factory=Schedule)
    geometry: Geometry | None = None
    cube: tuple[int, int, int] = (4, 4, 4)
    block_shape: tuple[int, int] = None  # type: ignore[assignment]  # always two sizes after __post_init__
    dense_frames: int = 0
    dense_layers: tuple[int, ...] = ()
    min_tokens: int = 1024
    chooser: Any = "pooled"
    num_threads: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.schedule, Schedule):
            raise TypeError(f"schedule: expected a blitz_attn.video.Schedule, got {shown(self.schedule)}")
        if self.geometry is not None and not isinstance(self.geometry, Geometry):
            raise TypeError(f"geometry: expected a blitz_attn.video.Geometry or None, got {shown(self.geometry)}")
        if self.geometry is not None:
            refuse_plain(self.geometry, "geometry")
        given = self.rule is not None
        rules = tuple(rules_of(self.rule)) if given else ()
        if not isinstance(self.choose_from, (tuple, list)):
            raise TypeError(f"choose_from: expected a tuple of rules, got {type(self.choose_from).__name__}")
        candidates = tuple(rules_of(self.choose_from, "choose_from")) if self.choose_from else ()
        if given and candidates:
            raise ValueError("choose_from: expected no rules to choose from together with a rule, got both")
        if self.density is not None and self.schedule.densities is not None:
            raise ValueError(f"density: expected None with a schedule that has densities, got {self.density}")
        if not given and not candidates and self.density is None and self.schedule.densities is None:
            raise ValueError("rule: expected a rule, rules to choose_from or a density, got none of them")
        density = None if self.density is None else _arrays.number(self.density, "density")
        cube = cube_order(self.geometry or Geometry([1]), self.cube).cube
        own: dict[str, Any] = {
            "density": density,
            "rule": rules if isinstance(self.rule, (tuple, list)) else self.rule,
            "choose_from": candidates,
            "cube": cube,
            "block_shape": _blocks_of(cube) if self.block_shape is None else checked_shape(self.block_shape),
            "dense_frames": _arrays.integer(self.dense_frames, "dense_frames"),
            "min_tokens": _arrays.integer(self.min_tokens, "min_tokens"),
        }
        for name in ("dense_frames", "min_tokens"):
            if own[name] < 0:
                raise ValueError(f"{name}: expected at least 0, got {own[name]}")
        if not isinstance(self.dense_layers, (tuple, list, range, set, frozenset)):
            raise TypeError(f"dense_layers: expected a tuple of layer numbers, got {type(self.dense_layers).__name__}")
        own["dense_layers"] = tuple(_arrays.integer(n, "dense_layers") for n in self.dense_layers)
        if self.num_threads is not None and _arrays.integer(self.num_threads, "num_threads") < 1:
            raise ValueError(f"num_threads: expected at least 1, got {self.num_threads}")
        for name, value in own.items():
            object.__setattr__(self, name, value)
        nothing = np.empty((1, 1, 0, 1), np.float32)  # so that what the operation refuses is refused now
        select_blocks_prefill(nothing, nothing, num_threads=1, **self._options(1.0 if density is None else density))

    def _options(self, density: float) -> dict[str, Any]:
        """Options of `select_blocks_prefill` for a share of the blocks."""
        return {"density": density, "chooser": self.chooser, "block_shape": self.block_shape, "sink": 0, "recent": 0}

    def _density(self, step: int) -> float | None:
        """The share of the blocks that the chooser takes in a step: 1 where the step is dense; None: there is no chooser."""
        density = self.schedule.density(step)
        return self.density if density is None else density
