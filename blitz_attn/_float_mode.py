"""Arithmetic of Python and NumPy whose results do not depend on how the calling thread rounds.

The core computes in the usual mode by itself. What this package computes outside of it stands in functions that `in_usual_mode` decorates.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from . import _core

_Result = TypeVar("_Result")


def in_usual_mode(function: Callable[..., _Result]) -> Callable[..., _Result]:
    """`function`, which then rounds to the nearest and keeps subnormal numbers whatever the caller's mode is, which is back afterwards."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> _Result:
        return _core.in_usual_mode(function, args, kwargs)

    return call
