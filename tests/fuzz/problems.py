"""The registry of problems.

A problem is a function of a `Draw`: it draws all options together, makes the arguments, calls the package and checks what comes
back. It returns when all is well and raises `Finding` (or anything else that the package should not have raised) when not.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import NamedTuple

from .draw import Draw

MODULES = (
    "attention_problems",
    "backward_problems",
    "merge_problems",
    "sabi_problems",
    "paged_problems",
    "cache_problems",
    "quest_problems",
    "select_problems",
    "nsa_problems",
    "nsa_cache_problems",
    "compat_problems",
    "bad_calls",
)


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
    for module in MODULES:
        importlib.import_module(f"{__package__}.{module}")
    return REGISTRY
