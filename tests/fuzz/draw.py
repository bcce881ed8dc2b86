"""How the options of a problem are drawn.

The value of an option depends on the problem's seed and on the option's name alone, not on what was drawn before it. One
option can therefore be fixed to another value while all others stay as they are: that is how a failure is replayed and shrunk.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np


class Discard(Exception):  # noqa: N818 - it is no error
    """This combination of options makes no problem: it is left out, which is neither a pass nor a failure."""


class Draw:
    """Draws named options from a seed; `fixed` overrides some of them.

    After a run, `options` holds every option's value in the order of drawing, and `simpler` the values that shrinking may try.
    """

    def __init__(self, seed: int, fixed: dict[str, Any] | None = None):
        self.seed = seed
        self.fixed = fixed or {}
        self.options: dict[str, Any] = {}
        self.simpler: dict[str, list[Any]] = {}
        self.bounds: dict[str, tuple[int, int]] = {}

    def rng(self, name: str) -> np.random.Generator:
        """A generator of this name's own, for what is no option: the contents of arrays and lists."""
        return np.random.default_rng([self.seed, zlib.crc32(name.encode())])

    def pick(self, name: str, choices: Sequence[Any], weights: Sequence[float] | None = None) -> Any:
        """One of `choices`, which are JSON values (str, int, bool, None), the simplest first."""
        if name in self.options:
            raise KeyError(f"option {name} is drawn twice")
        if name in self.fixed:
            value = self.fixed[name]
            if value not in choices:
                raise Discard(f"{name}={value!r}")
        elif weights is None:
            value = choices[int(self.rng(name).integers(len(choices)))]
        else:
            probabilities = np.asarray(weights, float) / sum(weights)
            value = choices[int(self.rng(name).choice(len(choices), p=probabilities))]
        self.options[name] = value
        self.simpler[name] = list(choices[: list(choices).index(value)])[:4]
        return value

    def flag(self, name: str, probability: float = 0.5) -> bool:
        return self.pick(name, (False, True), (1 - probability, probability))

    def integer(self, name: str, low: int, high: int, *, likely: Sequence[int] = ()) -> int:
        """An integer from `low` to `high` inclusive: one of `likely` (those in range) half of the time, else mostly small ones."""
        if high < low:
            raise Discard(f"{name}: nothing from {low} to {high}")
        if name in self.options:
            raise KeyError(f"option {name} is drawn twice")
        if name in self.fixed:
            value = self.fixed[name]
            if type(value) is not int or not low <= value <= high:
                raise Discard(f"{name}={value!r}")
        else:
            rng = self.rng(name)
            near = [x for x in likely if low <= x <= high]
            how = rng.random()
            if near and how < 0.5:
                value = int(near[rng.integers(len(near))])
            elif how < 0.85:  # log-uniform above the lower bound
                value = low + int(np.exp(rng.random() * np.log(high - low + 1.0))) - 1
                value = min(value + int(rng.integers(2)), high)
            else:
                value = int(rng.integers(low, high, endpoint=True))
        self.options[name] = value
        self.bounds[name] = (low, high)
        steps = [low, low + 1, low + (value - low) // 2, value - 1]
        self.simpler[name] = [x for x in dict.fromkeys(steps) if low <= x < value]
        return value


def bucket(name: str, value: Any, bounds: dict[str, tuple[int, int]]) -> str:
    """What stands for a value where pairs of options are counted: integers by their order of magnitude and their bounds."""
    if name not in bounds:
        return str(value)
    low, high = bounds[name]
    if value in (low, high):
        return "low" if value == low else "high"
    return next((f"<={limit}" for limit in (1, 4, 16, 64, 256) if value <= limit), ">256")
