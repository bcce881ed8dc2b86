"""The blocks that each denoising step attends to. Public through `blitz_attn.video`.

>>> from blitz_attn import video
>>> video.Schedule(dense_steps=10, densities=0.3)
Schedule(dense_steps=10, densities=(0.3,), refresh_every=1)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .. import _arrays
from .._float_mode import in_usual_mode
from .._sabi.lists import at_least_one
from .._sentences import number_shown

__all__ = ["Schedule"]


@in_usual_mode
def _share(x: Any) -> float:
    value = _arrays.number(x, "densities")
    if not 0 < value <= 1:
        raise ValueError(f"densities: expected numbers above 0 and at most 1, got {number_shown(value)}")
    return value


def _step(step: Any) -> int:
    value = _arrays.integer(step, "step")
    if value < 0:
        raise ValueError(f"step: expected the number of a step, from 0 on, got {value}")
    return value


@dataclass(frozen=True)
class Schedule:
    """The blocks that each denoising step attends to: all blocks in the first steps, then the blocks of lists.

    The first steps decide the content of the video, and lose the most by sparse attention. Later steps need fewer blocks, and these blocks
    change little from one step to the next.

    Attributes
    ----------
    dense_steps : int
        How many of the first steps attend to all blocks.
    densities : sequence of float, float or None
        Share of the blocks that a chooser may keep, above 0 and at most 1, in each step after the dense steps. The last number holds for
        all further steps. None: there is no chooser, and steps attend to the blocks of a rule alone.
    refresh_every : int
        Number of steps after which a chooser chooses again, at least 1.

    Raises
    ------
    TypeError, ValueError
        A number of a wrong kind or out of range.

    Examples
    --------
    >>> from blitz_attn import video
    >>> schedule = video.Schedule(dense_steps=2, densities=(0.5, 0.3), refresh_every=3)
    >>> [schedule.density(step) for step in range(6)]
    [1.0, 1.0, 0.5, 0.3, 0.3, 0.3]
    >>> [step for step in range(10) if schedule.refreshes(step)]
    [2, 5, 8]
    """

    dense_steps: int = 0
    densities: tuple[float, ...] | Sequence[float] | float | None = None
    refresh_every: int = 1

    def __post_init__(self) -> None:
        dense, every = _arrays.integer(self.dense_steps, "dense_steps"), at_least_one(self.refresh_every, "refresh_every")
        if dense < 0:
            raise ValueError(f"dense_steps: expected a number of steps from 0 on, got {dense}")
        given = self.densities
        if given is not None:
            given = tuple(map(_share, given if isinstance(given, (tuple, list)) else [given]))
            if not given:
                raise ValueError("densities: expected at least one number, got none")
        for name, value in (("dense_steps", dense), ("densities", given), ("refresh_every", every)):
            object.__setattr__(self, name, value)

    def density(self, step: int) -> float | None:
        """Share of the blocks that a step may attend to.

        Parameters
        ----------
        step : int
            Number of the denoising step, from 0 on.

        Returns
        -------
        float or None
            1.0 in dense steps. None where there is no chooser, and the rule alone says which blocks are attended. A density takes effect
            only in steps that refresh: any other step uses the lists of the last choice, which have the density of the step that chose
            them.

        Raises
        ------
        TypeError, ValueError
            `step` is not an integer of at least 0.

        Examples
        --------
        >>> from blitz_attn import video
        >>> schedule = video.Schedule(dense_steps=1)
        >>> schedule.density(0), schedule.density(1)
        (1.0, None)
        """
        after = _step(step) - self.dense_steps
        if after < 0:
            return 1.0
        return None if self.densities is None else self.densities[min(after, len(self.densities) - 1)]  # type: ignore[arg-type,index]

    def refreshes(self, step: int) -> bool:
        """Whether a chooser chooses in this step. Other steps use the lists of the last choice.

        Parameters
        ----------
        step : int
            Number of the denoising step, from 0 on.

        Returns
        -------
        bool
            True for the first step that is not dense, and for every `refresh_every`-th step after it.

        Raises
        ------
        TypeError, ValueError
            `step` is not an integer of at least 0.

        Examples
        --------
        >>> from blitz_attn import video
        >>> [video.Schedule(dense_steps=2, refresh_every=2).refreshes(step) for step in range(6)]
        [False, False, True, False, True, False]
        """
        after = _step(step) - self.dense_steps
        return after >= 0 and after % self.refresh_every == 0


Schedule.__module__ = "blitz_attn.video"  # where users and pickles find it
