"""Counts the calls of public functions that problems make. A call that the package makes within another one does not count."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import threading
import types
from collections.abc import Callable
from typing import Any

MODULES = ("", ".config", ".nsa", ".sabi", ".testing", ".compat.mslk", ".compat.select_attn_ops", ".compat.torch_bsa")
SETTINGS = ("isa", "set_num_threads")  # which problems make around their calls: these do not count
PLAN = ("__init__", "append", "attention", "select_attention")  # calls that a PagedPlan takes

_inside = threading.local()
_made = 0
_counted: dict[Callable[..., Any], Callable[..., Any]] = {}


def made() -> int:
    """Calls since this process, or the process that it was forked from, has started."""
    return _made


def _counting(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        global _made
        if getattr(_inside, "call", False):
            return function(*args, **options)
        _made += 1
        _inside.call = True
        try:
            return function(*args, **options)
        finally:
            _inside.call = False

    return call


def count() -> None:
    """Replaces the functions of the public modules by counting ones. It happens once, before any problem imports them."""
    if _counted:
        return
    names = (*MODULES, *([".integrations.torch"] if importlib.util.find_spec("torch") else []))
    modules = [importlib.import_module(f"blitz_attn{name}") for name in names]  # all first: they take functions from one another
    for module in modules:
        for public in module.__all__:
            function = getattr(module, public)
            if isinstance(function, types.FunctionType) and public not in SETTINGS:
                setattr(module, public, _counted.setdefault(function, _counting(function)))
    plan = importlib.import_module("blitz_attn").PagedPlan
    for name in PLAN:
        setattr(plan, name, _counting(getattr(plan, name)))
