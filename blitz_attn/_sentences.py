"""Error sentences with the argument names of the function that was called."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

LONGEST = 200  # characters of a value that a sentence quotes
Error = TypeVar("Error", TypeError, ValueError)


def refusal(kind: type[Error], *parts: str) -> Error:
    """The exception for a sentence in parts: parts with an even index are names of arguments, the others are the text between these names.
    Use it where a sentence names more arguments than the one at its beginning, so that `rename` can replace them all.

    Like exceptions of the core, the exception has the parts as its attribute `sentence`.
    """
    error = kind("".join(parts))
    error.sentence = parts  # type: ignore[attr-defined]
    return error


def rename(error: Exception, names: Mapping[str, str]) -> None:
    """Puts the caller's names of arguments into an exception. `names` maps the names in the exception to those of the caller.

    In an exception without the attribute `sentence`, only the name at the beginning is replaced, as in ``name: expected ..., got ...``.
    """
    name, colon, rest = str(error).partition(":")
    parts = getattr(error, "sentence", (name, colon + rest))
    own = tuple(part if i % 2 else names.get(part, part) for i, part in enumerate(parts))
    if own != parts:
        error.args = ("".join(own),)
        error.sentence = own  # type: ignore[attr-defined]


def number_shown(value: float) -> str:
    """A number as a sentence quotes it: with up to six digits, or with as many more as it takes to read back the same number."""
    texts = (f"{value:.{digits}g}" for digits in range(6, 18))
    return next((x for x in texts if float(x) == value), "nan")


def shown(value: Any) -> str:
    """A value of any kind as a sentence quotes it: on one line, and cut where it is long."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # raised by the object, or by Python for very long integers
        return type(value).__name__
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."
