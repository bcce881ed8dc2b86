"""Public names, parameters and their order stay as they are (docs/promises.rst says what is promised).

``tests/data/public_api.txt`` has a line for each public name. ``=`` stands for any default. After an intended change,
``PYTHONPATH=. python tests/test_public_api.py --record`` writes the file anew.
"""

import importlib
import inspect
import sys
from dataclasses import is_dataclass
from pathlib import Path

import pytest

import blitz_attn
from test_docstrings import documented_names, sections

RECORD = Path(__file__).parent / "data" / "public_api.txt"
MODULES = (
    "blitz_attn", "block_sparse", "compat.mslk", "compat.select_attn_ops", "compat.torch_bsa", "config", "distributed", "integrations.diffusers",
    "integrations.jax", "integrations.torch", "integrations.transformers", "merge", "nsa", "paged", "plot", "quest", "reference", "sabi", "select", "testing",
    "video",
)  # fmt: skip
NOT_FOR_CALLERS = {"NSAContext": {"call", "branches", "groups", "like"}}  # the docstring of the class says so
POLICY = "docs/promises.rst asks for a DeprecationWarning in at least one minor version first"


def shown_parameters(function):
    """Parameters without annotations and without values of defaults, such as ``(q, k, v=, *, scale=, **options)``."""
    parameters = [
        parameter.replace(annotation=parameter.empty, default=parameter.empty if parameter.default is parameter.empty else Shown())
        for parameter in inspect.signature(function).parameters.values()
    ]
    return str(inspect.Signature(parameters))


class Shown:
    def __repr__(self):
        return ""


def members_of(cls):
    """Public attributes that a class or one of its bases in the package defines, or that the docstring of the class names."""
    defined = {name for base in cls.__mro__ if base.__module__.startswith("blitz_attn") for name in vars(base)}
    names = defined.union(documented_names(sections(cls).get("Attributes", ""))) - NOT_FOR_CALLERS.get(cls.__name__, set())
    return sorted(name for name in names if not name.startswith("_"))


def is_called(thing):
    """Whether programs may call `thing`. A dataclass with fields that its docstring does not name is made only by the library."""
    if not is_dataclass(thing):
        return inspect.isfunction(thing) or inspect.isclass(thing)
    return {*inspect.signature(thing).parameters} <= {*members_of(thing)}


def public_names(module):
    """A dictionary from every public name of a module to its parameters, or to an empty string if programs may not call it."""
    found = {}
    for name in module.__all__:
        thing = getattr(module, name)
        full = f"{module.__name__}.{name}"
        found[full] = shown_parameters(thing) if is_called(thing) else ""
        for member in members_of(thing) if inspect.isclass(thing) else ():
            method = getattr(thing, member, None)
            found[f"{full}.{member}"] = shown_parameters(method) if inspect.isfunction(method) or inspect.ismethod(method) else ""
    return found


def recorded():
    """A dictionary of names and parameters from the lines of the record."""
    lines = RECORD.read_text(encoding="utf-8").splitlines() if RECORD.exists() else []
    return {name: bracket + rest for name, bracket, rest in (line.partition("(") for line in lines)}


def names_of(module, record):
    """The part of the record that belongs to one module, without its submodules."""
    others = [f"blitz_attn.{name}." for name in MODULES if f"blitz_attn.{name}" != module]
    return {name: rest for name, rest in record.items() if name.startswith(f"{module}.") and not any(map(name.startswith, others))}


def signature_of(shown):
    namespace = {}
    exec(f"def function{shown.replace('=', '=0')}: pass", namespace)
    return inspect.signature(namespace["function"]).parameters


def broken(old, new):
    """Sentences that say how the new parameters break programs that were written for the old ones."""
    if not (old and new):
        return ["it was called, and is no longer"] if old else []
    old, new = signature_of(old), signature_of(new)
    places = {name: i for i, name in enumerate(new)}
    found = [f"parameter {name} has no default, and was not there before" for name in new if name not in old and is_needed(new[name])]
    for i, (name, before) in enumerate(old.items()):
        after = new.get(name)
        if after is None:
            found.append(f"parameter {name} was dropped or renamed")
        elif is_needed(after) and not is_needed(before):
            found.append(f"parameter {name} lost its default")
        elif before.kind != after.kind and (before.kind, after.kind) != (before.KEYWORD_ONLY, before.POSITIONAL_OR_KEYWORD):
            found.append(f"parameter {name} was {before.kind.description}, and is {after.kind.description}")
        elif before.kind in (before.POSITIONAL_ONLY, before.POSITIONAL_OR_KEYWORD) and places[name] != i:
            found.append(f"parameter {name} moved from place {i} to {places[name]}")
    return found


def is_needed(parameter):
    return parameter.default is parameter.empty and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)


def imported(name):
    full = name if name == "blitz_attn" else f"blitz_attn.{name}"
    if name.startswith("integrations."):
        pytest.importorskip(name.rpartition(".")[2])
    return importlib.import_module(full)


@pytest.mark.parametrize("name", MODULES)
def test_what_programs_use_is_still_there(name):
    module = imported(name)
    old, new = names_of(module.__name__, recorded()), public_names(module)
    problems = [f"{name}: dropped or renamed" for name in old if name not in new]
    problems += [f"{name}: {what}" for name in old if name in new for what in broken(old[name], new[name])]
    assert not problems, f"{'; '.join(problems)}: {POLICY}"
    unrecorded = [name for name in new if old.get(name) != new[name]]
    assert not unrecorded, f"{', '.join(unrecorded)}: new, or with new parameters: `PYTHONPATH=. python tests/test_public_api.py --record` records it"


def record():
    """Writes the record. Lines of a module whose packages are not installed stay as they are."""
    before, after = recorded(), {}
    for name in MODULES:
        try:
            after |= public_names(imported(name))
        except pytest.skip.Exception:
            after |= names_of(f"blitz_attn.{name}", before)
    RECORD.write_text("".join(f"{name}{rest}\n" for name, rest in sorted(after.items())), encoding="utf-8")
    print(f"{RECORD}: {len(after)} names of blitz_attn {blitz_attn.__version__}; git diff shows what changed")


if __name__ == "__main__":
    if sys.argv[1:] != ["--record"]:
        sys.exit("usage: PYTHONPATH=. python tests/test_public_api.py --record")
    record()
