"""Finds the installed package, which takes the place of an imported source folder without a compiled extension."""

from __future__ import annotations

import sys
from importlib.machinery import PathFinder
from pathlib import Path


def installed_folder(folder: str) -> str:
    """The folder of the installed package. If no package is installed, raises an ImportError that says what to do."""
    parent = Path(folder).resolve().parent
    spec = PathFinder.find_spec("blitz_attn", [path for path in sys.path if Path(path).resolve() != parent])
    for found in (spec and spec.submodule_search_locations) or ():
        if any(Path(found).glob("_core.*")):
            return found
    raise ImportError(
        f"blitz_attn: expected the compiled extension in {folder}, found none. Run `make build` or `pip install .` in {parent}, or leave "
        "that folder if the package is installed for another Python"
    )
