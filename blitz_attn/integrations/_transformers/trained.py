"""Models that were trained to choose what they attend to: on single modules, functions of this library replace the models' own methods.

A table has a function for each known class of attention, by the class's file and name. The function looks at a module, and returns
replacements of its methods, by name: ``"expand_kv"``, or ``"indexer.forward"`` for the method of a module inside. The function raises
`UnsuitedError` for a module whose code or weights it does not know.

A replacement is called as ``replacement(own, module, *arguments, **options)``, where ``own`` is the module's own method. It is not called
while torch.compile traces, nor while the model's ``attn_implementation`` is not one of `_NAMES`.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from types import MethodType, TracebackType
from typing import Any

import torch

from .._torch.tensors import autocast_dtype
from .config import config_of
from .fallbacks import tell

__all__ = ["Table", "Trained", "UnsuitedError", "check_code", "leave", "replace_methods", "why_not_states"]

Adapters = Callable[[Any], dict[str, Callable[..., Any]]]
Table = dict[tuple[str, str], Adapters]  # a key: the last part of the name of a class's Python module, and the name of the class
_NAMES = ("blitz_attn", "blitz_attn_sparse")
_RECORD = "_blitz_attn_trained"


class UnsuitedError(Exception):
    """A module is left to its own code. The text of the error follows "because of" in the log."""


def check_code(known: dict[str, str], *modules: Any) -> None:
    """Refuse modules whose code is not the code that a replacement was written for. `known` has digests of the code of classes, without
    comments and spaces."""
    for kind in map(type, modules):
        try:
            text = re.sub(r"#.*|\s+", "", inspect.getsource(kind))
        except (OSError, TypeError):  # there is no source
            text = ""
        if hashlib.sha256(text.encode()).hexdigest()[:16] != known.get(kind.__name__):
            raise UnsuitedError(f"a release of transformers whose {kind.__name__} differs from that of 5.24")


def why_not_states(hidden: Any) -> str | None:
    """Why an indexer with these hidden states is left to the model's code, whatever its mask; None where they are no reason."""
    if hidden.device.type != "cpu":
        return f"tensors on {hidden.device}"
    return None if autocast_dtype() is None else "torch.autocast, which rounds its scores"


def leave(indexer: Any, reason: str | None) -> bool:
    """Log that a call is left to the model's own code, if there is a reason. Returns whether there is a reason."""
    if reason is None:
        return False
    if config_of(indexer).on_unsupported == "error":
        raise ValueError(f"{type(indexer).__name__}: expected an indexer that blitz_attn can compute, got {reason}")
    tell(f"{type(indexer).__name__}: tokens chosen by the model's own code instead of blitz_attn, because of {reason}")
    return True


@dataclass
class _Record:
    """The notes of a module about its replaced methods."""

    config: Any  # of the attention that the module belongs to: modules inside of it may have an older copy
    uses: int = 0
    before: dict[str, Any] = field(default_factory=dict)  # what the instance had in place of the methods of its class
    put: dict[str, Any] = field(default_factory=dict)


def _own(module: Any, name: str) -> Any:
    """A method as it was before it was replaced."""
    before = getattr(module, _RECORD).before
    return before[name] if name in before else functools.partial(getattr(type(module), name), module)


def _method(name: str, replacement: Callable[..., Any]) -> Callable[..., Any]:
    """A method that takes its module as an argument, so that in a copy of the module it calls the methods of the copy."""

    def method(module: Any, *arguments: Any, **options: Any) -> Any:
        own, record = _own(module, name), getattr(module, _RECORD)
        if torch.compiler.is_compiling() or not record.uses or record.config._attn_implementation not in _NAMES:
            return own(*arguments, **options)
        return replacement(own, module, *arguments, **options)

    return method


def _put(attention: Any, methods: dict[str, Callable[..., Any]]) -> None:
    vars(attention)[_RECORD] = _Record(attention.config)
    for path, replacement in methods.items():
        place, _, name = path.rpartition(".")
        module = attention.get_submodule(place)
        record = vars(module).setdefault(_RECORD, _Record(attention.config))
        if name in record.put:  # the replacement is still there, beneath a method that something else has put there since
            continue
        if name in vars(module):
            record.before[name] = vars(module)[name]
        record.put[name] = vars(module)[name] = MethodType(_method(name, replacement), module)


def _take_away(module: Any) -> None:
    """Gives a module its own methods back when its last use ends. If something else has replaced them in the meantime, all stay, and call
    the module's own from then on."""
    record: _Record = vars(module)[_RECORD]
    record.uses -= 1
    if record.uses or any(vars(module).get(name) is not method for name, method in record.put.items()):
        return
    for name in record.put:
        del vars(module)[name]
    vars(module).update(record.before)
    del vars(module)[_RECORD]


class Trained:
    """Modules whose methods are replaced until `undo`, or until a ``with`` statement over this object ends."""

    def __init__(self, modules: list[Any]) -> None:
        self._modules = modules

    def undo(self) -> None:
        """Give the modules their own methods back. If several `Trained` replace the same methods, these come back when the last of them is
        undone. A second call of `undo` changes nothing."""
        while self._modules:
            _take_away(self._modules.pop())

    def __enter__(self) -> Trained:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.undo()


def replace_methods(model: Any, known: Table) -> Trained:
    """Replace the methods of all modules of a model whose classes are known. Modules that do not suit are named in the log."""
    found = {}
    counts: dict[str, list[int]] = {}
    for module in model.modules():
        adapters = known.get((type(module).__module__.rpartition(".")[2], type(module).__name__))
        if adapters is None:
            continue
        count = counts.setdefault(type(module).__name__, [0, 0])
        count[1] += 1
        try:
            found[module] = {} if _RECORD in vars(module) else adapters(module)
        except UnsuitedError as error:
            tell(f"{type(module).__name__}: the model's own code instead of blitz_attn, because of {error}")
            continue
        count[0] += 1
    if not counts:
        expected = "a model that was trained to choose its tokens, of a family that is known here"
        raise ValueError(f"model: expected {expected}, got {type(model).__name__}")
    replaced = []
    for module, methods in found.items():
        if _RECORD not in vars(module):
            _put(module, methods)
        for part in module.modules():
            if _RECORD in vars(part):
                vars(part)[_RECORD].uses += 1
                replaced.append(part)
    text = ", ".join(f"{some} of {count} {name}" for name, (some, count) in counts.items())
    tell(f"{type(model).__name__}: tokens that the model chooses are chosen and attended by blitz_attn ({text})")
    return Trained(replaced)
