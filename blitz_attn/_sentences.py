"""Error sentences in the words of the function that was called."""

from __future__ import annotations

from collections.abc import Mapping


def renamed(error: Exception, names: Mapping[str, str]) -> Exception:
    """The same error, its sentence beginning with the name that the caller knows the argument by.

    Sentences have the form ``name: expected ..., got ...``; `names` maps the core's names to the caller's.
    """
    name, colon, rest = str(error).partition(":")
    return type(error)(names.get(name, name) + colon + rest)
