"""Draws the options of a problem.

The value of an option depends only on the problem's seed and on the option's name, and not on what was drawn before. So one option can be
fixed to another value while all others stay as they are. In this way a failure is replayed and shrunk.
"""

from __future__ import annotations

import hashlib
import math
import struct
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np


class Discard(Exception):  # noqa: N818 - not an error
    """A combination of options is not a valid problem. It is skipped, and counts neither as a pass nor as a failure."""


class Draw:
    """Draws named options from a seed; `fixed` overrides some of them.

    After a run, `options` holds every option's value in the order of drawing, and `simpler` the values that shrinking may try.
    """

    def __init__(self, seed: int, fixed: dict[str, Any] | None = None):
        self.seed = seed
        self.fixed = fixed or {}
        self.options: dict[str, Any] = {}
        self.simpler: dict[str, list[Any]] = {}

    def rng(self, name: str) -> np.random.Generator:
        """A random generator for this name, for the contents of arrays and lists, which are not options."""
        return np.random.default_rng([self.seed, zlib.crc32(name.encode())])

    def _fractions(self, name: str) -> tuple[float, float, float]:
        """Three numbers in [0, 1). They are random enough for options, and much faster to make than a generator."""
        digest = hashlib.blake2b(f"{self.seed}:{name}".encode(), digest_size=24).digest()
        first, second, third = struct.unpack("QQQ", digest)
        return (first >> 11) / 2**53, (second >> 11) / 2**53, (third >> 11) / 2**53

    def pick(self, name: str, choices: Sequence[Any], weights: Sequence[float] | None = None) -> Any:
        """One of `choices`, which are JSON values (str, int, float, bool, None), the simplest first."""
        if name in self.options:
            raise KeyError(f"option {name} is drawn twice")
        if name in self.fixed:
            value = self.fixed[name]
            same = [one for one in choices if one == value or (one != one and value != value)]  # NaN
            if not same:
                raise Discard(f"{name}={value!r}")
            value = same[0]
        elif weights is None:
            value = choices[int(self._fractions(name)[0] * len(choices))]
        else:
            value, left = choices[0], self._fractions(name)[0] * sum(weights)
            for choice, weight in zip(choices, weights, strict=True):
                if weight > 0:
                    value = choice
                    if left < weight:
                        break
                left -= weight
        self.options[name] = value
        self.simpler[name] = list(choices[: list(choices).index(value)])[:4]
        return value

    def flag(self, name: str, probability: float = 0.5) -> bool:
        return self.pick(name, (False, True), (1 - probability, probability))

    def integer(self, name: str, low: int, high: int, *, likely: Sequence[int] = ()) -> int:
        """An integer from `low` to `high` inclusive: half of the time one of `likely` that is in range, otherwise mostly a small one."""
        if high < low:
            raise Discard(f"{name}: nothing from {low} to {high}")
        if name in self.options:
            raise KeyError(f"option {name} is drawn twice")
        if name in self.fixed:
            value = self.fixed[name]
            if type(value) is not int or not low <= value <= high:
                raise Discard(f"{name}={value!r}")
        else:
            near = [x for x in likely if low <= x <= high]
            how, which, more = self._fractions(name)
            if near and how < 0.5:
                value = near[int(which * len(near))]
            elif how < 0.85:  # log-uniform above the lower bound
                value = low + int(math.exp(which * math.log(high - low + 1.0))) - 1
                value = min(value + int(more * 2), high)
            else:
                value = low + int(which * (high - low + 1))
        self.options[name] = value
        steps = [low, low + 1, low + (value - low) // 2, value - 1]
        self.simpler[name] = [x for x in dict.fromkeys(steps) if low <= x < value]
        return value
