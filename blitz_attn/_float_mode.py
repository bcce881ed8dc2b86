"""Arithmetic of Python and NumPy whose results do not depend on the rounding mode of the calling thread.

The core computes in the usual mode by itself. Where operations compute outside the core, they do so in functions that `in_usual_mode`
decorates. The twins in `reference`, `testing` and `plot` compute in the mode of their caller.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from . import _core

_Result = TypeVar("_Result")


def in_usual_mode(function: Callable[..., _Result]) -> Callable[..., _Result]:
    """`function`, made to round to nearest and to keep subnormal numbers in any mode of its caller. The caller's mode is then restored."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> _Result:
        return _core.in_usual_mode(function, args, kwargs)

    return call
