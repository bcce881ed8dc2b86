"""The arguments of each operation, from the core's table (csrc/python/operations.h), with the defaults and shapes that Python adds.

Functions that pass arguments on, such as those for torch and JAX, take names, roles and order from here. So a new argument needs no line of
code in them, once it stands in that table and in the signature of the NumPy function.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any, NamedTuple, TypeVar

from . import _core
from ._formats import CELL_BYTES, CELL_DIMS

_Function = TypeVar("_Function", bound=Callable[..., Any])

REQUIRED = inspect.Parameter.empty  # takes the place of a default: the argument must be given

# Roles of arguments that are arrays. An argument of the role `own` may be anything; those of all other roles are options: Python values.
ARRAYS = frozenset({
    "floats", "cache", "reals", "scales", "indices", "pages", "tables", "mask", "heads", "list", "lengths", "per_sequence",
})  # fmt: skip
READ_IN_PLACE = frozenset({"floats", "cache", "reals"})  # roles of arrays whose last axis torch operators make contiguous
OWN = frozenset({"own", "dtype", "kv_dtype"})  # roles that frameworks do not pass on: they make results and know dtypes themselves


class Argument(NamedTuple):
    """One argument of an operation."""

    name: str
    role: str  # see arg_role in csrc/python/arrays.h; _MADE_OF adds chooser, budget and counts
    differentiable: bool = False
    default: Any = REQUIRED

    @property
    def is_array(self) -> bool:
        """Whether the argument is an array, or a sequence or a number in place of an array."""
        return self.role in ARRAYS


OPERATIONS = {name: tuple(Argument(*row) for row in rows) for name, rows in _core.operations().items()}

# The operations that a public function calls, unless it calls just the operation of its own name.
_CALLED = {
    "paged_select_attention": ("paged_attention",),
    "select_and_attend_prefill": ("block_sparse_attention", "select_prefill"),
    "select_blocks_prefill": ("select_prefill",),
}

# Arguments of the core, and the arguments of the public function that Python makes them from.
_MADE_OF = {
    ("select_tokens", "selected"): (Argument("top_k", "integer"),),
    ("select_prefill", "chooser"): (Argument("chooser", "chooser"),),
    ("select_prefill", "budget"): (*(Argument(name, "budget") for name in ("density", "top_p", "threshold")), Argument("top_k", "counts")),
}


@cache
def arguments_of(function: Callable[..., Any]) -> dict[str, Argument]:
    """The arguments of a public function that go to the core, in the order of the table, with the function's defaults."""
    parameters = inspect.signature(function).parameters
    found: dict[str, Argument] = {}
    for operation in _CALLED.get(function.__name__, (function.__name__,)):
        for row in OPERATIONS[operation]:
            for argument in _MADE_OF.get((operation, row.name), (row,)):
                if argument.name in parameters:
                    found.setdefault(argument.name, argument._replace(default=parameters[argument.name].default))
    return found


def like(function: Callable[..., Any], without: tuple[str, ...]) -> Callable[[_Function], _Function]:
    """A decorator for a function that passes its keywords on to `function`. It gives the decorated function the signature of `function`,
    less the arguments in `without`, and adds to its docstring the arguments that are missing there."""

    def decorate(decorated: _Function) -> _Function:
        signature = inspect.signature(function)
        shown = [parameter for name, parameter in signature.parameters.items() if name not in without]
        decorated.__doc__ = naming_all(decorated.__doc__, [parameter.name for parameter in shown], function.__name__)
        decorated.__signature__ = signature.replace(parameters=shown)  # type: ignore[attr-defined]
        return decorated

    return decorate


def naming_all(docstring: str | None, names: Iterable[str], function: str) -> str | None:
    """The docstring with all `names` among its Parameters: missing names are added at the end, with a reference to `function`."""
    head, returns, rest = inspect.cleandoc(docstring or "").partition("\n\nReturns\n")
    named = {name.strip() for line in head.splitlines() if line[:1] != " " for name in line.partition(" : ")[0].split(",")}
    missing = ", ".join(name for name in names if name not in named)
    return f"{head}\n{missing}\n    See `blitz_attn.{function}`.{returns}{rest}" if returns and missing else docstring


def options_of(function: Callable[..., Any], without: tuple[str, ...], given: Mapping[str, Any]) -> dict[str, Any]:
    """All arguments of `function` except those in `without`, in its order: the given values, and defaults for the others."""
    taken = {name: x.default for name, x in inspect.signature(function).parameters.items() if name not in without}
    for name in given:
        if name not in taken:
            raise unexpected(function.__name__, name)
    return taken | dict(given)


def unexpected(function: str, name: str) -> TypeError:
    """The error that Python raises for a keyword that a function does not take."""
    return TypeError(f"{function}() got an unexpected keyword argument {name!r}")


# ---- Results --------------------------------------------------------------------------------------------------------


def sequence_shapes(q: Any, v: Any, layout: str, num_heads: Any, num_kv_heads: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of the output and of the log-sum-exp of attention over sequences. The numbers of heads matter only in layout BSH."""
    if layout == "BSH":
        return (*q.shape[:2], v.shape[2] // (num_kv_heads or num_heads) * num_heads), (q.shape[0], num_heads, q.shape[1])
    return (*q.shape[:-1], v.shape[-1]), (q.shape[0], q.shape[2], q.shape[1]) if layout == "BSND" else tuple(q.shape[:-1])


def result_shapes(given: Mapping[str, Any]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of the output and of the log-sum-exp, of attention over sequences or over pages. The output has the dtype of q."""
    q = given["q"]
    if "v_cache" in given:
        width, cell = given["v_cache"].shape[-1], CELL_BYTES.get((given.get("kv_dtype") or "").rpartition(",")[2])
        return (*q.shape[:-1], width // cell * CELL_DIMS if cell else width), tuple(q.shape[:-1])
    return sequence_shapes(q, given["v"], given.get("layout", "BNSD"), given.get("num_heads") or 1, given.get("num_kv_heads"))
