"""How models compute attention: the configuration, and where models keep it. Neither torch nor transformers is imported."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass, field, fields
from typing import Any, cast

import numpy as np

from ... import _arrays
from ..._select.choosers import budget_of, chooser_of, fields_of
from ..._select.prefill import select_blocks_prefill
from ..._select.profile import Profile, fields_of_profile, profile_of

__all__ = ["SparseConfig", "configure"]

_ATTRIBUTE = "_blitz_attn_config"
_BUDGETS = ("density", "top_p", "threshold", "top_k")
_FORCED = ("sink", "recent", "first_rows", "last_rows", "last_columns")


@dataclass(frozen=True)
class SparseConfig:
    """How models that run with ``attn_implementation="blitz_attn_sparse"`` compute attention.

    At most one of `density`, `top_p`, `threshold`, `top_k` and `profile` says how many blocks a prompt keeps. Without any, each row of
    blocks keeps the fewest that hold 0.93 of its estimated softmax mass.

    Attributes
    ----------
    density, top_p, threshold, top_k : float or int, optional
        The budget of every layer: see `blitz_attn.select_blocks_prefill`.
    profile : blitz_attn.select.Profile, optional
        A budget for each layer and head. The chooser and the block shape of the profile replace `chooser` and `block_shape`.
    chooser : str or chooser
        How blocks are scored: see `blitz_attn.select_blocks_prefill`. With ``"vertical_slash"``, layers with chunks of tokens or with
        images that see themselves keep all blocks.
    block_shape : (int, int)
        Tokens in a block of queries and in a block of keys.
    sink, recent, first_rows, last_rows, last_columns : int
        Blocks that are always kept: see `blitz_attn.select_blocks_prefill`.
    per_kv_head : bool
        Heads that share keys share a list.
    dense_layers : tuple of int
        Numbers of layers that keep everything, from 0.
    min_tokens : int
        Calls whose longest sequence has fewer keys than this are computed densely.
    decode_budget : int, optional
        How many tokens of a `paged_cache`, rounded down to whole pages but at least one page, each KV head attends to for each new token,
        in steps of up to 32 new tokens; Quest chooses the pages. Where this is not possible, new tokens attend to all keys, or a ValueError
        says so, depending on `on_unsupported`. Default: all tokens.
    on_unsupported : {"fallback", "error"}
        Where a model needs something that the operations lack, either torch computes attention and the reason is logged once, or there
        is a ValueError. This holds for ``"blitz_attn"`` too.
    num_threads : int, optional
        Threads of each call. Default: see `blitz_attn.set_num_threads`. This holds for ``"blitz_attn"`` too.

    Raises
    ------
    TypeError, ValueError
        A field of the wrong kind or out of range: a density or mass outside (0, 1], two budgets, a pool that does not divide the block.

    Examples
    --------
    >>> from blitz_attn.integrations.transformers import SparseConfig
    >>> SparseConfig(density=0.25, decode_budget=1024).top_p is None, SparseConfig().top_p
    (True, 0.93)
    >>> SparseConfig(density=2)
    Traceback (most recent call last):
    ValueError: density: expected a number above 0 and at most 1, got 2
    """

    density: float | None = None
    top_p: float | None = None
    threshold: float | None = None
    top_k: int | None = None
    profile: Profile | None = None
    chooser: Any = "pooled"
    block_shape: tuple[int, int] = (64, 64)
    sink: int = 1
    recent: int = 2
    first_rows: int = 0
    last_rows: int = 0
    last_columns: int = 0
    per_kv_head: bool = False
    dense_layers: tuple[int, ...] = ()
    min_tokens: int = 1024
    decode_budget: int | None = None
    on_unsupported: str = "fallback"
    num_threads: int | None = None
    _text: str = field(default="", init=False, repr=False, compare=False)  # what graphs of torch hold; see `config_of_text`

    def __post_init__(self) -> None:
        given = {name: x for name in _BUDGETS if (x := getattr(self, name)) is not None}
        if self.profile is not None:
            if not isinstance(self.profile, Profile):
                raise TypeError(f"profile: expected a blitz_attn.select.Profile, got {type(self.profile).__name__}")
            if given:
                raise ValueError(f"profile: expected no other budget with a profile, got {next(iter(given))}")
        elif not given:
            object.__setattr__(self, "top_p", 0.93)
        self._check_by_use()
        if _arrays.integer(self.min_tokens, "min_tokens") < 0:
            raise ValueError(f"min_tokens: expected at least 0, got {self.min_tokens}")
        if not isinstance(self.dense_layers, (tuple, list, range, set, frozenset)):
            raise TypeError(f"dense_layers: expected a tuple of layer numbers, got {type(self.dense_layers).__name__}")
        object.__setattr__(self, "dense_layers", tuple(_arrays.integer(n, "dense_layers") for n in self.dense_layers))
        for name in ("decode_budget", "num_threads"):
            if getattr(self, name) is not None and _arrays.integer(getattr(self, name), name) < 1:
                raise ValueError(f"{name}: expected at least 1, got {getattr(self, name)}")
        _arrays.choice(self.on_unsupported, "on_unsupported", ("fallback", "error"))
        object.__setattr__(self, "_text", self._as_text())

    def _as_text(self) -> str:
        own = {x.name: getattr(self, x.name) for x in fields(self) if x.init}
        if not isinstance(self.chooser, str):
            own["chooser"] = fields_of(self.chooser)
        if self.profile is not None:
            own["profile"] = fields_of_profile(self.profile)
        return json.dumps(own, default=lambda x: x.tolist())  # numbers and arrays of NumPy

    def _check_by_use(self) -> None:
        """Choose blocks of no tokens with these options, so that what the operation refuses is refused now."""
        if self.profile is None:
            heads = budget_of(**{name: getattr(self, name) for name in _BUDGETS})[1].size
            calls = [self._options(None, heads, heads, 1)]
        else:
            shape = (heads, _, _) = self.profile.heads, self.profile.kv_heads, self.profile.head_dim
            calls = [self._options(n, *shape) for n in range(len(self.profile.numbers))]
        nothing = np.empty((1, heads, 0, 1), np.float32)
        for options in calls:
            select_blocks_prefill(nothing, nothing, num_threads=1, **options)

    def _sparse_in(self, layer: int | None) -> bool:
        """Whether a layer leaves keys out."""
        return layer is None or layer not in self.dense_layers

    def _options(self, layer: int | None, heads: int, kv_heads: int, head_dim: int) -> dict[str, Any]:
        """Options of `select_blocks_prefill` for a layer."""
        options = {name: getattr(self, name) for name in (*_FORCED, "per_kv_head")}
        if self.profile is None:
            budget = {name: x for name in _BUDGETS if (x := getattr(self, name)) is not None}
            return options | budget | {"chooser": self.chooser, "block_shape": self.block_shape}
        if layer is None:
            raise ValueError("profile: expected a model whose attention layers have a layer_idx, got one without")
        return options | self.profile.options(layer, heads=heads, kv_heads=kv_heads, head_dim=head_dim)


@functools.lru_cache(maxsize=256)
def config_of_text(text: str) -> SparseConfig:
    """The configuration whose `_text` is given."""
    own = json.loads(text)
    if isinstance(own["chooser"], dict):
        own["chooser"] = chooser_of(own["chooser"])
    if own["profile"] is not None:
        own["profile"] = profile_of(own["profile"])
    return SparseConfig(**own | {"block_shape": tuple(own["block_shape"])})


_global = SparseConfig()


def config_of(module: Any) -> SparseConfig:
    """The configuration of an attention layer: that of its model, or else that of all models."""
    config: SparseConfig = getattr(module, _ATTRIBUTE, _global)
    return config


def expect_model(config: SparseConfig, text: Any) -> None:
    """Raises ValueError where a configuration is not for models with the configuration `text` of transformers."""
    layers = getattr(text, "num_hidden_layers", None)
    if layers is None:
        return
    wrong = [n for n in config.dense_layers if not 0 <= n < layers]
    if wrong:
        raise ValueError(f"dense_layers: expected layers from 0 to {layers - 1}, got {wrong[0]}")
    if config.profile is not None:
        heads = text.num_attention_heads
        kv_heads = getattr(text, "num_key_value_heads", None) or heads
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
        config.profile.options(0, heads=heads, kv_heads=kv_heads, head_dim=head_dim)
        if len(config.profile.numbers) != layers:
            raise ValueError(f"profile: expected one of a model with {layers} layers, got one with {len(config.profile.numbers)}")


def configure(config: SparseConfig | None, model: Any = None) -> None:
    """Set how models compute attention: one model, or all that have no configuration of their own.

    Parameters
    ----------
    config : SparseConfig or None
        The configuration from now on. None removes the model's own configuration, so that the configuration for all models holds.
    model : torch.nn.Module, optional
        The model, or a part of it. Default: all models.

    Raises
    ------
    TypeError
        `config` is not a SparseConfig, or is None without a model; or `model` is not a module of torch.
    ValueError
        The profile in `config` was found with a model of another shape, or `dense_layers` names a layer that the model does not have.

    Examples
    --------
    >>> from blitz_attn.integrations.transformers import SparseConfig, configure
    >>> configure(SparseConfig(top_p=0.9, min_tokens=2048))
    """
    global _global
    if not isinstance(config, SparseConfig) and (config is not None or model is None):
        raise TypeError(f"config: expected a SparseConfig, got {type(config).__name__}")
    if model is None:
        _global = cast(SparseConfig, config)
        return
    if not hasattr(model, "modules"):
        raise TypeError(f"model: expected a module of torch, got {type(model).__name__}")
    if config is None:
        for module in model.modules():
            vars(module).pop(_ATTRIBUTE, None)
        return
    own: Any = getattr(model, "config", None)
    expect_model(config, own.get_text_config() if hasattr(own, "get_text_config") else own)
    for module in model.modules():
        setattr(module, _ATTRIBUTE, config)
