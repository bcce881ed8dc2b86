"""Values that an object computes when they are first read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

T = TypeVar("T")


class computed_once(Generic[T]):  # noqa: N801 (a decorator)
    """`functools.cached_property` without a lock.

    On Python 3.11, `cached_property` has one lock for all objects of a class: if another thread holds the lock while the process forks, the
    child waits for the lock for ever. Here, two threads that read a value for the first time at the same time both compute it, and both get
    the value that was stored first. An exception during the computation stores nothing.
    """

    def __init__(self, function: Callable[[Any], T]) -> None:
        self.function, self.__doc__ = function, function.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, instance: None, owner: type | None = None) -> computed_once[T]: ...
    @overload
    def __get__(self, instance: object, owner: type | None = None) -> T: ...
    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return self
        return instance.__dict__.setdefault(self.name, self.function(instance))
