"""Overloads for type checkers take exactly the arguments of their function, by name and order. `make lint` checks the types."""

import ast
import importlib
import inspect
import re
import typing
from pathlib import Path

import pytest

import blitz_attn
from test_docstrings import FUNCTIONS

OVERLOADED = [(name, function, typing.get_overloads(function)) for name, function in FUNCTIONS if typing.get_overloads(function)]


def options_by_class():
    """The names in each TypedDict of the package and in its bases, from the sources, because some of them exist only for type checkers."""
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in Path(blitz_attn.__file__).parent.rglob("*.py*") if path.suffix in (".py", ".pyi")]
    nodes = (node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    classes = {node.name: node for node in nodes if any(word.arg == "total" for word in node.keywords)}

    def names(node):
        bases = [classes[base.id] for base in node.bases if base.id != "TypedDict"]
        return {line.target.id for line in node.body if isinstance(line, ast.AnnAssign)}.union(*map(names, bases))

    return {name: names(node) for name, node in classes.items()}


OPTIONS = options_by_class()


def names_of(overload):
    """The positional arguments in order, and the names of all arguments."""
    own = inspect.signature(overload).parameters
    positional = [name for name, p in own.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    of_options = OPTIONS[own["options"].annotation[len("Unpack[") : -1]] if "options" in own else set()
    named = [name for name in own if name != "options"]
    assert not of_options & set(named)
    return positional, {*named, *of_options}


@pytest.mark.parametrize(("name", "function", "overloads"), [pytest.param(*row, id=row[0]) for row in OVERLOADED])
def test_overloads_take_the_arguments_of_the_function(name, function, overloads):
    parameters = inspect.signature(function).parameters
    positional = [name for name, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    for overload in overloads:
        assert names_of(overload) == (positional, set(parameters)), overload.__code__.co_firstlineno


@pytest.mark.parametrize("name", ["", ".distributed", ".integrations.jax", ".integrations.torch", ".nsa", ".sabi", ".select"])
def test_no_public_function_returns_any_array(name):
    """Functions with overloads may return Any, because type checkers read only the overloads."""
    module = importlib.import_module(f"blitz_attn{name}")
    functions = [f for f in map(module.__dict__.get, module.__all__) if inspect.isfunction(f) and not typing.get_overloads(f)]
    assert [f.__name__ for f in functions if re.search(r"\bAny\b(?!\])", str(f.__annotations__["return"]))] == []  # dict[str, Any] is allowed
