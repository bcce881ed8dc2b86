"""The memory of a call's arrays, in which `bad_calls` sees what the call has written."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from .arrays import CANARY

SIZE = 1 << 16


class Arena:
    """Memory for the arrays of a call, filled with a canary, with gaps between them."""

    def __init__(self, seed: int) -> None:
        self.memory = np.full(SIZE, CANARY, np.uint8)
        self.used = 64
        self.seed = seed

    def put(self, values: np.ndarray) -> np.ndarray:
        """An array of these values within the memory."""
        end = self.used + values.nbytes
        view = self.memory[self.used : end].view(values.dtype).reshape(values.shape)
        view[...] = values
        self.used = -(-end // 64) * 64 + 64
        return view

    def floats(self, *shape: int, dtype: str = "float32") -> np.ndarray:
        count = int(np.prod(shape))
        return self.put(_noise()[self.seed % 97 : self.seed % 97 + count].reshape(shape).astype(dtype))

    def poisoned(self, *shape: int, dtype: str = "float32") -> np.ndarray:
        return self.put(np.full(shape, np.nan if dtype.startswith("float") else 77, dtype))

    def kept(self, *shape: int) -> np.ndarray:
        """A mask that hides few elements."""
        return self.put(_noise()[: int(np.prod(shape))].reshape(shape) > -1)

    def integers(self, values: Any, dtype: str = "int32") -> np.ndarray:
        return self.put(np.array(values, dtype))


@cache
def _noise() -> np.ndarray:
    return np.random.default_rng(0).standard_normal(1 << 14)


def method(make: Callable[[], Any], name: str) -> Callable[..., Any]:
    """A method as a function for `good_calls`. Each call makes the object first."""

    def call(*args: Any, **options: Any) -> Any:
        return getattr(make(), name)(*args, **options)

    call.__signature__ = inspect.signature(getattr(make(), name))  # type: ignore[attr-defined]
    return call
