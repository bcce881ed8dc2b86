"""The registry of problems.

A problem is a function of a `Draw`: it draws all options together, makes the arguments, calls the package and checks what comes
back. It returns when all is well and raises `Finding` (or anything else that the package should not have raised) when not.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from .draw import Draw


class Finding(AssertionError):  # noqa: N818 - the name that a report shows
    """The package did what it promises not to do."""


class Problem(NamedTuple):
    name: str
    run: Callable[[Draw], None]
    weight: float  # how often it is drawn, beside the others


REGISTRY: dict[str, Problem] = {}


def problem(name: str, weight: float = 1.0) -> Callable[[Callable[[Draw], None]], Callable[[Draw], None]]:
    """Registers the function as the problems of the operation `name`."""

    def register(run: Callable[[Draw], None]) -> Callable[[Draw], None]:
        if name in REGISTRY:
            raise KeyError(f"two problems are named {name}")
        REGISTRY[name] = Problem(name, run, weight)
        return run

    return register


def load() -> dict[str, Problem]:
    """All problems: those of the files named so, as far as the frameworks are here."""
    from .arrays import HAS_JAX, HAS_TORCH

    missing = ["torch_problems"] * (not HAS_TORCH) + ["jax_problems"] * (not HAS_JAX)
    for module in [*sorted(path.stem for path in Path(__file__).parent.glob("*_problems.py")), "bad_calls"]:
        if module not in missing:
            importlib.import_module(f"{__package__}.{module}")
    return REGISTRY
