"""Every docstring example runs, and every public function documents its parameters, results and exceptions.

A function with the contract of another function points to the other function instead: float64 twins point to their operations, and
functions of `compat.mslk` point to the functions that they call.
"""

import doctest
import importlib
import inspect
import pkgutil
import re

import pytest

import blitz_attn

NEED_FRAMEWORKS = re.compile(r"blitz_attn\.integrations\.(_transformers\.(?!config$)|_diffusers\.(?!config$)|_vllm\.(backend|pages)$)")
MODULES = sorted(
    info.name
    for info in pkgutil.walk_packages(blitz_attn.__path__, "blitz_attn.")
    if info.name.rpartition(".")[2] not in ("_core", "__main__") and not NEED_FRAMEWORKS.match(info.name)
)

PUBLIC = [
    "blitz_attn",
    "blitz_attn.compat.mslk",
    "blitz_attn.compat.select_attn_ops",
    "blitz_attn.compat.torch_bsa",
    "blitz_attn.distributed",
    "blitz_attn.integrations.diffusers",
    "blitz_attn.integrations.jax",
    "blitz_attn.integrations.torch",
    "blitz_attn.integrations.transformers",
    "blitz_attn.integrations.vllm",
    "blitz_attn.nsa",
    "blitz_attn.plot",
    "blitz_attn.reference",
    "blitz_attn.sabi",
    "blitz_attn.select",
    "blitz_attn.testing",
    "blitz_attn.video",
]


def public_functions():
    """(qualified name, function) of all functions in the ``__all__`` of the package's modules, and of all methods of their classes."""
    found = {}
    for name in ["blitz_attn", *MODULES]:
        module = importlib.import_module(name)
        for attribute in getattr(module, "__all__", ()):
            thing = getattr(module, attribute)
            members = [member for key, member in vars(thing).items() if not key.startswith("_")] if inspect.isclass(thing) else [thing]
            for function in filter(inspect.isfunction, members):
                found.setdefault(function, f"{function.__module__}.{function.__qualname__}")
    return sorted(((name, function) for function, name in found.items()), key=lambda pair: pair[0])


FUNCTIONS = public_functions()


def library_function(name):
    """The public function that a dotted name stands for, or None."""
    path, _, attribute = name.rpartition(".")
    try:
        module = importlib.import_module(path)
    except ModuleNotFoundError:
        return None
    function = getattr(module, attribute, None)
    return function if inspect.isfunction(function) and attribute in module.__all__ else None


def is_twin(function):
    """Whether a function is in `blitz_attn.reference` and has the name of an operation."""
    operations = (getattr(blitz_attn, function.__name__, None), getattr(blitz_attn.nsa, function.__name__, None))
    return getattr(blitz_attn.reference, function.__name__, None) is function and any(map(inspect.isfunction, operations))


SHORT = [(name, function) for name, function in FUNCTIONS if is_twin(function) or function.__module__ == "blitz_attn.compat.mslk"]
FULL = [pair for pair in FUNCTIONS if pair not in SHORT]


def sections(function):
    """A dictionary from the section titles of a numpydoc docstring to their texts."""
    parts = re.split(r"^(\w[\w ]+)\n-{3,}$", inspect.getdoc(function) or "", flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def documented_names(text):
    """The names in a Parameters section, which are at the margin before a colon. One line may have several names."""
    lines = [line.partition(" : ")[0] for line in text.splitlines() if line and not line.startswith(" ")]
    return [name.strip(" *") for line in lines for name in line.split(",")]


@pytest.mark.parametrize("name", PUBLIC)
def test_dir_shows_what_is_public(name):
    """dir() of a module shows the names of its ``__all__``, including modules imported on first use, and no imported helpers."""
    module = importlib.import_module(name)
    public = {shown for shown in module.__all__ if not shown.startswith("_")}
    packages = {"compat", "integrations"} if name == "blitz_attn" else set()
    assert {shown for shown in dir(module) if not shown.startswith("_")} == public | packages


@pytest.mark.parametrize("name", ["blitz_attn", *MODULES])
def test_examples_run(name):
    if name.startswith("blitz_attn.integrations."):
        pytest.importorskip(name.split(".")[2].strip("_"))
    module = importlib.import_module(name)
    results = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert results.failed == 0
    assert results.attempted > 0 or not any(function.__module__ == name for _, function in FULL)


@pytest.mark.parametrize("name", ["blitz_attn", *MODULES])
def test_module_has_a_docstring(name):
    assert importlib.import_module(name).__doc__


@pytest.mark.parametrize(("name", "function"), [pytest.param(*pair, id=pair[0]) for pair in FULL])
def test_every_argument_and_result_is_documented(name, function):
    found = sections(function)
    signature = inspect.signature(function)
    parameters = [parameter for parameter in signature.parameters if parameter != "self"]
    if parameters:
        assert sorted(documented_names(found.get("Parameters", ""))) == sorted(parameters)
    if signature.return_annotation not in (None, "None"):
        assert found.get("Returns", "").strip()
    assert ">>>" in found.get("Examples", "")


@pytest.mark.parametrize(("name", "function"), [pytest.param(*pair, id=pair[0]) for pair in FUNCTIONS])
def test_summary_is_one_sentence(name, function):
    summary = inspect.getdoc(function).split("\n\n")[0]
    assert summary.endswith((".", ":"))
    assert len(summary.splitlines()) <= 2


@pytest.mark.parametrize(("name", "function"), [pytest.param(*pair, id=pair[0]) for pair in SHORT])
def test_short_docstring_points_to_the_full_one(name, function):
    text = inspect.getdoc(function)
    assert not sections(function)
    assert len(text.splitlines()) <= 2
    seen = re.match(r"See `([\w.]+)`", text)
    assert seen, "expected to begin with See `blitz_attn...`"
    target = library_function(seen[1])
    assert target is not None, f"{seen[1]} is no public function"
    if is_twin(function):
        assert target.__name__ == function.__name__
    if is_twin(target):
        target = library_function(re.match(r"See `([\w.]+)`", inspect.getdoc(target))[1])
    assert target in [full for _, full in FULL]
