"""The options of the plug-in: the environment variable that turns it on and holds its options. vLLM is not imported."""

from __future__ import annotations

import functools
import json
import os
from dataclasses import dataclass, fields
from typing import Any

from ..._arrays import kv_dtype_name
from ..._formats import CELL_BYTES
from ..._select.profile import Profile
from ..._sentences import shown
from .._transformers.config import SparseConfig

VARIABLE = "BLITZ_ATTN_VLLM"
_ON, _OFF = ("1", "on", "true", "yes"), ("", "0", "off", "false", "no")
_BUDGETS = ("density", "top_p", "threshold", "top_k", "profile")
_NAMES = tuple(x.name for x in fields(SparseConfig) if x.init and x.name not in ("on_unsupported", "num_threads"))


@dataclass(frozen=True)
class Options:
    """How layers attend. `sparse` has budgets and dense layers; `prompts` says whether blocks are left out of prompts. `kv_dtype` names the
    formats of keys and of values where the cache holds rows of llama.cpp's blocks."""

    sparse: SparseConfig
    prompts: bool
    kv_dtype: tuple[str, str] | None = None

    @property
    def prompts_from(self) -> int | None:
        """The least number of tokens of a prompt that leaves blocks out; None where all blocks are kept."""
        return self.sparse.min_tokens if self.prompts else None

    @property
    def decode_budget(self) -> int | None:
        """Tokens that a KV head attends to for each new token; None for all."""
        return self.sparse.decode_budget


def _read(text: str) -> Options | None:
    if text.strip().lower() in _OFF:
        return None
    if text.strip().lower() in _ON:
        return Options(SparseConfig(), False)
    try:
        given = json.loads(text)
    except json.JSONDecodeError:
        given = None
    if not isinstance(given, dict):
        raise ValueError(f"{VARIABLE}: expected 1, 0 or a JSON object with options, got {shown(text)}")
    unknown = [name for name in given if name not in (*_NAMES, "kv_dtype")]
    if unknown:
        raise ValueError(f"{VARIABLE}: expected options among {', '.join(_NAMES)} and kv_dtype, got {shown(unknown[0])}")
    formats = given.pop("kv_dtype", None)
    own: dict[str, Any] = {name: tuple(x) if isinstance(x, list) else x for name, x in given.items()}
    if own.get("profile") is not None:
        own["profile"] = Profile.load(own["profile"])
    try:
        return Options(SparseConfig(**own), any(own.get(name) is not None for name in _BUDGETS), _formats_of(formats))
    except (TypeError, ValueError) as error:
        raise type(error)(f"{VARIABLE}: {error}") from None


def _formats_of(kv_dtype: Any) -> tuple[str, str] | None:
    """The formats of keys and of values that an option names: one name for both, or two."""
    if kv_dtype is None:
        return None
    names = kv_dtype_name(kv_dtype)
    both = names if isinstance(names, tuple) else (names, names)
    if both[0] not in CELL_BYTES:  # `kv_dtype_name` has checked pairs
        raise ValueError(f"kv_dtype: expected 'q8_0', 'q4_0', 'q4_1' or a pair of them, got {shown(kv_dtype)}")
    return both


@functools.lru_cache(maxsize=8)
def _cached(text: str) -> Options | None:
    return _read(text)


def options() -> Options | None:
    """The options of this process; None where the plug-in is off.

    Raises
    ------
    TypeError, ValueError, OSError
        The variable holds something other than options, an option is out of range, or the profile cannot be read.
    """
    return _cached(os.environ.get(VARIABLE, ""))
