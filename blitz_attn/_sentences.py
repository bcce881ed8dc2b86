"""Error sentences with the argument names of the function that was called."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_OTHERS = re.compile(r"(?:(?<=\blike )|(?<=\bwith )|(?<=\bof )|(?<=\bas )|(?<=\boverlaps ))[\w\[\]]+|\b\w+(?='s )")
LONGEST = 200  # characters of a value that a sentence quotes


def renamed(error: Exception, names: Mapping[str, str]) -> Exception:
    """The same error with the caller's names of arguments: at the start of the sentence, after "like", "with", "of", "as" and
    "overlaps", and before "'s".

    Sentences have the form ``name: expected ..., got ...``; `names` maps the core's names to the caller's.
    """
    name, colon, rest = str(error).partition(":")
    kind = TypeError if isinstance(error, TypeError) else ValueError  # subclasses may take other arguments than a sentence
    rest = _OTHERS.sub(lambda match: names.get(match[0], match[0]), rest)
    return kind(names.get(name, name) + colon + rest)


def number_shown(value: float) -> str:
    """A number as a sentence quotes it: with six digits, or with as many more as it takes to read the same number from them."""
    texts = (f"{value:.{digits}g}" for digits in range(6, 18))
    return next((x for x in texts if float(x) == value), "nan")


def shown(value: Any) -> str:
    """A value of any kind as a sentence quotes it: on one line, and cut where it is long."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # raised by the object, or by Python for very long integers
        return type(value).__name__
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."
