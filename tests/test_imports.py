"""Modules of the package import only modules on their own floor or below it, and never in circles."""

import ast
import os
import shutil
import subprocess
import sys
from functools import cache
from graphlib import CycleError, TopologicalSorter
from importlib.util import resolve_name
from pathlib import Path

import pytest

import blitz_attn

PACKAGE = Path(blitz_attn.__file__).parent
PATHS = {path.relative_to(PACKAGE).with_suffix("").parts: path for path in PACKAGE.rglob("*.py")}
MODULES = {".".join(("blitz_attn", *parts)).removesuffix(".__init__"): path for parts, path in PATHS.items()}

# Files and folders of the package, from the lowest floor: modules that all others use, a folder for each subject, the public modules, and
# frameworks and ranks.
FLOORS = (
    {"_core", "_arrays", "_float_mode", "_floats", "_formats", "_names", "_operations", "_options", "_sentences", "_types", "_unbuilt"},
    {"_block_sparse", "_nsa", "_paged", "_reference", "_sabi", "_select", "_testing", "_video"},
    {"", "block_sparse", "config", "merge", "nsa", "paged", "plot", "quest", "reference", "sabi", "select", "testing", "video"},
    {"__main__", "compat", "distributed", "integrations"},
)


def floor(module):
    first = (module + ".").split(".")[1]
    found = [i for i, names in enumerate(FLOORS) if first in names]
    assert len(found) == 1, f"FLOORS has {first} {len(found)} times"
    return found[0]


def statements(tree):
    """All nodes except those below ``if TYPE_CHECKING:``, which do not run."""
    yield tree
    if not (isinstance(tree, ast.If) and isinstance(tree.test, ast.Name) and tree.test.id == "TYPE_CHECKING"):
        for node in ast.iter_child_nodes(tree):
            yield from statements(node)


@cache
def imports_of(module):
    """The modules of the package that a module imports, including imports within functions."""
    path = MODULES[module]
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    found = set()
    for node in statements(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            source = resolve_name("." * node.level + (node.module or ""), package)
            inside = {f"{source}.{name.name}" for name in node.names}
            found |= {name if name in MODULES or name == "blitz_attn._core" else source for name in inside}
    return {name for name in found if name.partition(".")[0] == "blitz_attn"}


@pytest.mark.parametrize("module", sorted(MODULES))
def test_imports_run_downwards(module):
    own = floor(module)
    assert [name for name in imports_of(module) if floor(name) > own] == []


def test_no_imports_go_in_circles():
    try:
        TopologicalSorter({module: imports_of(module) for module in MODULES}).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


def test_a_checkout_without_its_extension_takes_the_installed_package_or_says_what_to_do(tmp_path):
    checkout = tmp_path / "checkout" / "blitz_attn"
    shutil.copytree(PACKAGE, checkout, ignore=shutil.ignore_patterns("_core*", "__pycache__"))
    for path, expected in (("", "Run `make build` or `pip install .` in " + str(checkout.parent)), (str(PACKAGE.parent), "version")):
        command = [sys.executable, "-m", "blitz_attn"]
        environment = {**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": ""}
        result = subprocess.run(command, cwd=checkout.parent, env=environment, capture_output=True, text=True, check=False)
        assert expected in (result.stdout if path else result.stderr)
