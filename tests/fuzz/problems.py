"""The registry of problems.

A problem is a function of a `Draw`. It draws all options together, makes the arguments, calls the package and checks the results. If
something is wrong, it raises `Finding`, or passes on an exception that the package should not have raised.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from .draw import Draw


class Finding(AssertionError):  # noqa: N818 - the name that a report shows
    """The package broke a promise."""


class Problem(NamedTuple):
    name: str
    run: Callable[[Draw], None]
    weight: float  # how often it is drawn, relative to the other problems


REGISTRY: dict[str, Problem] = {}


def problem(name: str, weight: float = 1.0) -> Callable[[Callable[[Draw], None]], Callable[[Draw], None]]:
    """Registers a function that makes the problems of the operation `name`."""

    def register(run: Callable[[Draw], None]) -> Callable[[Draw], None]:
        if name in REGISTRY:
            raise KeyError(f"two problems are named {name}")
        REGISTRY[name] = Problem(name, run, weight)
        return run

    return register


def load() -> dict[str, Problem]:
    """All problems, from `bad_calls` and the files named ``*_problems``, as far as their frameworks are installed."""
    from .arrays import HAS_JAX, HAS_TORCH

    missing = ["torch_problems"] * (not HAS_TORCH) + ["jax_problems"] * (not HAS_JAX)
    for module in [*sorted(path.stem for path in Path(__file__).parent.glob("*_problems.py")), "bad_calls"]:
        if module not in missing:
            importlib.import_module(f"{__package__}.{module}")
    return REGISTRY
