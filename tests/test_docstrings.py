"""Every docstring example runs, and every public function says what it takes, returns and raises."""

import doctest
import importlib
import inspect
import pkgutil
import re

import pytest

import blitz_attn

MODULES = sorted(
    info.name
    for info in pkgutil.walk_packages(blitz_attn.__path__, "blitz_attn.")
    if info.name.rpartition(".")[2] not in ("_core", "__main__")
)


def public_functions():
    """(qualified name, function) of everything that a module of the package offers in its ``__all__``."""
    found = {}
    for name in ["blitz_attn", *MODULES]:
        module = importlib.import_module(name)
        for attribute in getattr(module, "__all__", ()):
            thing = getattr(module, attribute)
            if inspect.isfunction(thing):
                found.setdefault(thing, f"{thing.__module__}.{thing.__qualname__}")
    return sorted(((name, function) for function, name in found.items()), key=lambda pair: pair[0])


FUNCTIONS = public_functions()


def sections(function):
    """Section title to text of a numpydoc docstring."""
    parts = re.split(r"^(\w[\w ]+)\n-{3,}$", inspect.getdoc(function) or "", flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def documented_names(text):
    """Names of a Parameters section: the lines at the margin, up to the colon; one line may name several."""
    lines = [line.partition(" : ")[0] for line in text.splitlines() if line and not line.startswith(" ")]
    return [name.strip(" *") for line in lines for name in line.split(",")]


def test_there_is_something_to_check():
    names = [name for name, _ in FUNCTIONS]
    assert "blitz_attn.block_sparse.block_sparse_attention" in names
    assert "blitz_attn.compat.torch_bsa.blitz_sparse_attention" in names
    assert len(names) > 30


@pytest.mark.parametrize("name", ["blitz_attn", *MODULES])
def test_examples_run(name):
    package, _, framework = name.rpartition(".")
    if package == "blitz_attn.integrations":
        pytest.importorskip(framework)
    module = importlib.import_module(name)
    results = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert results.failed == 0


@pytest.mark.parametrize("name", ["blitz_attn", *MODULES])
def test_module_says_what_it_is_for(name):
    assert importlib.import_module(name).__doc__


@pytest.mark.parametrize(("name", "function"), [pytest.param(*pair, id=pair[0]) for pair in FUNCTIONS])
def test_sections(name, function):
    found = sections(function)
    signature = inspect.signature(function)
    if signature.parameters:
        assert sorted(documented_names(found.get("Parameters", ""))) == sorted(signature.parameters)
    if signature.return_annotation not in (None, "None"):
        assert found.get("Returns", "").strip()
    assert ">>>" in found.get("Examples", "")


@pytest.mark.parametrize(("name", "function"), [pytest.param(*pair, id=pair[0]) for pair in FUNCTIONS])
def test_summary_is_one_sentence(name, function):
    summary = inspect.getdoc(function).split("\n\n")[0]
    assert summary.endswith((".", ":"))
    assert len(summary.splitlines()) <= 2
