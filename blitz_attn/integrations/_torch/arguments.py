"""The arguments of the library's functions as torch's operators take them, read by their roles in the table of operations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..._arrays import choice
from ..._formats import CELL_BYTES
from ..._names import KV_LAYOUTS, LAYOUTS
from ..._operations import OWN, Argument, arguments_of, unexpected
from ..._sabi.block_list import BlockList, with_block_shape
from ..._select.choosers import CHOOSERS, fields_of, rules_of
from ..._select.prefill import select_and_attend_prefill
from ..._sentences import shown
from ...block_sparse import block_sparse_attention
from .tensors import (
    flag_of,
    integer_of,
    integers_of,
    lists_of,
    mask_of,
    number_of,
    numbers_list_of,
    numbers_of,
    pair_of,
    ranges_of,
    tensor_of,
    text_of,
    torch,
)

Reader = Callable[[Any, str], Any]

# Arguments of the library's functions that the functions for torch do not take. (`select_tokens` takes `q_begin`, and functions over pages
# take `kv_dtype`.)
NOT_TAKEN = ("q_begin", "q_total", "kv_split", "out", "out_dtype", "dtype", "kv_dtype", "return_sabi")


# Caches of q8_0, q4_0 and q4_1 are tensors of bytes, whose dtype does not say the format: functions over pages take the format's name.
KV_FORMAT = Argument("kv_dtype", "kv_format", default=None)
NOT_TAKEN_OF_PAGES = tuple(name for name in NOT_TAKEN if name != KV_FORMAT.name)


def kv_format_of(kv_dtype: Any, name: str) -> str | None:
    """The format of a cache as the operator takes it: a name, two names joined by a comma, or None."""
    if kv_dtype is None:
        return None
    names = tuple(kv_dtype) if isinstance(kv_dtype, (tuple, list)) else (kv_dtype,)
    if len(names) not in (1, 2) or any(not isinstance(x, str) or x not in CELL_BYTES for x in names):
        expected = f"{name}: expected 'q8_0', 'q4_0', 'q4_1', or a pair of them for keys and values, got {shown(kv_dtype)}"
        raise (ValueError if isinstance(kv_dtype, (str, tuple, list)) else TypeError)(expected)
    return ",".join(names)


def _json(x: Any) -> str:
    return f"[{', '.join(str(int(n)) for n in x)}]" if isinstance(x, (tuple, list)) else f'"{x}"' if isinstance(x, str) else str(int(x))


def chooser_text(chooser: Any, name: str) -> str:
    """A chooser as the operator takes it: its name, or its attributes as JSON, by code that `torch.compile` can trace."""
    if isinstance(chooser, str):
        return chooser if chooser in CHOOSERS else choice(chooser, name, tuple(CHOOSERS))
    if not torch.compiler.is_compiling():
        rules_of(chooser)  # refuses what is not a chooser; in a graph, the operator does so
    return "{" + ", ".join(f'"{field}": {_json(x)}' for field, x in fields_of(chooser).items()) + "}"


_READERS: dict[str, Reader] = {
    **dict.fromkeys(("floats", "cache", "reals"), tensor_of),
    **dict.fromkeys(("list", "lengths", "per_sequence", "pages"), integers_of),
    **dict.fromkeys(("heads", "scales"), numbers_of),
    **dict.fromkeys(("integer", "threads", "tokens_before"), integer_of),
    **dict.fromkeys(("number", "scale"), number_of),
    "indices": lists_of,
    "tables": ranges_of,
    "mask": mask_of,
    "pair": pair_of,
    "flag": flag_of,
    "layout": lambda x, name: text_of(x, name, LAYOUTS),
    "kv_layout": lambda x, name: text_of(x, name, KV_LAYOUTS),
    "chooser": chooser_text,
    "kv_format": kv_format_of,
    "budget": numbers_list_of,
    "counts": lambda x, name: numbers_list_of(x, name, integers_only=True),
}


def taken(function: Callable[..., Any], without: tuple[str, ...] = NOT_TAKEN) -> dict[str, Argument]:
    """The arguments of the library's function that an operator has."""
    found = {name: x for name, x in arguments_of(function).items() if x.role not in OWN and name not in (*without, "return_lse")}
    if "sabi" in found:  # the list is a tensor, which knows no block shape
        found["block_shape"] = found["block_shape"]._replace(default=(128, 128))
    return found


# The default block_shape of an operator that chooses blocks is that of attention, and not that of the library's function.
_ATTENTION = taken(block_sparse_attention)
CHOICE = {name: _ATTENTION.get(name, x) for name, x in taken(select_and_attend_prefill).items()}


def _reader(argument: Argument) -> Reader:
    if argument.role != "pair" or argument.default is None:
        return _READERS[argument.role]
    default = list(argument.default)
    return lambda x, name: pair_of(x, name) or default


_READERS_OF: dict[str, dict[str, Reader]] = {}
_TOLD: dict[str, dict[str, Any]] = {}


def takes(function: Callable[..., Any], arguments: Mapping[str, Argument] | None = None, **told: Any) -> None:
    """Registers the library's function for `read`. `arguments`: the operator's arguments, where they differ from those of the function.
    `told`: arguments that the operator gets if the caller does not give them."""
    arguments = taken(function) if arguments is None else arguments
    _READERS_OF[function.__name__] = {name: _reader(x) for name, x in arguments.items()}
    _TOLD[function.__name__] = told


def read(function: str, rules: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords of a call of a public function, as the operator takes them."""
    readers, told = _READERS_OF[function], dict(_TOLD[function])
    if not torch.compiler.is_compiling():
        rules = with_block_shape(rules)
    elif isinstance(rules.get("sabi"), BlockList):
        raise TypeError("sabi: expected a tensor and its block_shape in a graph of torch.compile, got a BlockList")
    for name, x in rules.items():
        if name not in readers:
            raise unexpected(function, name)
        told[name] = readers[name](x, name)
    return told
