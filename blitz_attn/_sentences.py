"""Error sentences in the words of the function that was called."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_LIKE = re.compile(r"(?:(?<=\blike )|(?<=\bwith ))[\w\[\]]+")
LONGEST = 200  # characters of a value that a sentence quotes


def renamed(error: Exception, names: Mapping[str, str]) -> Exception:
    """The same error, its sentence beginning with the name that the caller knows the argument by, and comparing it with such a name.

    Sentences have the form ``name: expected ..., got ...``; `names` maps the core's names to the caller's.
    """
    name, colon, rest = str(error).partition(":")
    kind = TypeError if isinstance(error, TypeError) else ValueError  # subclasses of these take other arguments than a sentence
    rest = _LIKE.sub(lambda match: names.get(match[0], match[0]), rest)
    return kind(names.get(name, name) + colon + rest)


def shown(value: Any) -> str:
    """A value of any kind as a sentence quotes it: on one line, and cut where it is long."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # of the object's own, or for want of patience with very long integers
        return type(value).__name__
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."
