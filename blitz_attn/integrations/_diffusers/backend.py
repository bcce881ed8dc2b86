"""The backend ``"blitz_attn"`` of diffusers: how it gets its name there, and what it leaves to torch."""

from __future__ import annotations

import importlib
import inspect
import sys
from typing import Any

import torch

from .._transformers.fallbacks import tell
from . import sparse
from .dense import computed, why_not

__all__ = ["attend", "put_in_registry"]

_NAME = "blitz_attn"
_DISPATCH = "diffusers.models.attention_dispatch"
_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa", "attention_kwargs", "backend")
_TABLES = ("_backends", "_constraints", "_supported_arg_names", "_active_backend", "register", "set_active_backend")


def put_in_registry() -> None:
    """Add the backend to those of diffusers, and use it from now on if the environment variable of diffusers names it."""
    dispatch, named = _import_dispatch()
    names, registry = dispatch.AttentionBackendName, dispatch._AttentionBackendRegistry
    if _NAME not in names._value2member_map_:
        # An Enum has no way to take a member later, so these lines do what a class statement does for each of its members.
        member = str.__new__(names, _NAME)
        member._name_, member._value_, member._sort_order_ = _NAME.upper(), _NAME, len(names._member_names_)
        setattr(names, member._name_, member)
        names._member_map_[member._name_] = names._value2member_map_[_NAME] = member
        names._member_names_.append(member._name_)
    if names(_NAME) not in registry._backends:
        registry.register(names(_NAME))(attend)
    if named:
        registry.set_active_backend(names(_NAME))


def _import_dispatch() -> tuple[Any, bool]:
    """The module of diffusers that knows its backends; and whether this call imports it while the environment names ``"blitz_attn"`` as
    the default backend. diffusers reads that name during the import, and would refuse it, because the backend cannot be there yet."""
    from diffusers import __version__
    from diffusers.utils import constants

    named = getattr(constants, "DIFFUSERS_ATTN_BACKEND", None) == _NAME and _DISPATCH not in sys.modules
    if named:
        constants.DIFFUSERS_ATTN_BACKEND = "native"
    try:
        dispatch: Any = importlib.import_module(_DISPATCH)
    except ModuleNotFoundError:
        dispatch = None
    finally:
        if named:
            constants.DIFFUSERS_ATTN_BACKEND = _NAME
    function, registry = getattr(dispatch, "dispatch_attention_fn", None), getattr(dispatch, "_AttentionBackendRegistry", None)
    known = (
        function is not None
        and {*_ARGUMENTS} <= {*inspect.signature(function).parameters}
        and all(hasattr(registry, name) for name in _TABLES)
        and hasattr(getattr(dispatch, "AttentionBackendName", None), "NATIVE")
    )
    if not known:
        raise ImportError(f"diffusers: expected a release that has a registry of attention backends, such as 0.42.1, got {__version__}")
    return dispatch, named


def attend(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    _parallel_config: Any = None,
) -> Any:
    """The backend, as diffusers calls it: tensors (B, S, H, D)."""
    lacks = "context parallelism" if _parallel_config is not None else "a returned log-sum-exp" if return_lse else None
    if not torch.compiler.is_compiling():
        if lacks is not None:
            sparse.leave_here(lacks)
        elif (out := sparse.attend_here(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)) is not None:
            return out
    reason = lacks or why_not(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)
    if reason is None:
        return computed(query, key, value, attn_mask, is_causal, scale)
    tell(f"attention by torch instead of blitz_attn, because of {reason}", "diffusers")
    dispatch = sys.modules[_DISPATCH]
    native = dispatch._AttentionBackendRegistry._backends[dispatch.AttentionBackendName.NATIVE]
    given = {"attn_mask": attn_mask, "dropout_p": dropout_p, "is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
    return native(query, key, value, **given, return_lse=return_lse, _parallel_config=_parallel_config)
