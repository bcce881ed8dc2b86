"""Models of transformers whose attention runs here: dense, or over blocks that are chosen for each prompt.

>>> from blitz_attn.integrations.transformers import SparseConfig, configure, register
>>> register()  # "blitz_attn" and "blitz_attn_sparse" are now names that attn_implementation= takes
>>> configure(SparseConfig(density=0.25, dense_layers=(0, 1)))

torch and transformers are imported by `register` and by what needs them, not with this module.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass, field, fields
from typing import Any, cast

import numpy as np

from .. import _arrays
from .._select.choosers import budget_of, chooser_of, fields_of
from .._select.prefill import select_blocks_prefill
from .._select.profile import Profile, fields_of_profile, profile_of
from .._sentences import shown

__all__ = ["SparseConfig", "configure", "paged_cache", "register"]

_ATTRIBUTE = "_blitz_attn_config"
_BUDGETS = ("density", "top_p", "threshold", "top_k")
_FORCED = ("sink", "recent", "first_rows", "last_rows", "last_columns")


def __dir__() -> list[str]:
    return __all__


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
        A budget for each layer and head, with the chooser and the block shape that it was found with, which replace those given here.
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
        Sequences of fewer keys than this are computed densely.
    decode_budget : int, optional
        How many tokens of the cache each KV head attends to, for each new token, when up to 32 are decoded over a `paged_cache`; Quest
        chooses their pages. Where that cannot be, new tokens attend to all keys; `on_unsupported` holds. Default: all.
    on_unsupported : {"fallback", "error"}
        What happens where a model needs what the operations lack: torch computes it, and the reason is logged once; or ValueError.
        This holds for ``"blitz_attn"`` too.
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
    _text: str = field(default="", init=False, repr=False, compare=False)  # `_config_of_text` reads it: what graphs of torch hold

    def __post_init__(self) -> None:
        given = {name: x for name in _BUDGETS if (x := getattr(self, name)) is not None}
        if self.profile is not None:
            if not isinstance(self.profile, Profile):
                raise TypeError(f"profile: expected a blitz_attn.select.Profile, got {type(self.profile).__name__}")
            if given:
                raise ValueError(f"profile: expected no other budget beside a profile, got {next(iter(given))}")
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
        """Choose blocks of one token with these options, so that what the operation refuses is refused now."""
        if self.profile is None:
            heads = budget_of(**{name: getattr(self, name) for name in _BUDGETS})[1].size
            calls = [self._options(None, heads, heads, 1)]
        else:
            shape = (heads, _, _) = self.profile.heads, self.profile.kv_heads, self.profile.head_dim
            calls = [self._options(n, *shape) for n in range(len(self.profile.numbers))]
        token = np.zeros((1, heads, 1, 1), np.float32)
        for options in calls:
            select_blocks_prefill(token, token, num_threads=1, **options)

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
def _config_of_text(text: str) -> SparseConfig:
    """The configuration whose `_text` is given."""
    own = json.loads(text)
    if isinstance(own["chooser"], dict):
        own["chooser"] = chooser_of(own["chooser"])
    if own["profile"] is not None:
        own["profile"] = profile_of(own["profile"])
    return SparseConfig(**own | {"block_shape": tuple(own["block_shape"])})


_global = SparseConfig()


def _config_of(module: Any) -> SparseConfig:
    """The configuration of an attention layer: its model's, or that of all models."""
    config: SparseConfig = getattr(module, _ATTRIBUTE, _global)
    return config


def configure(config: SparseConfig | None, model: Any = None) -> None:
    """Set how models compute attention: one model, or all that have no configuration of their own.

    Parameters
    ----------
    config : SparseConfig or None
        What holds from now on. None takes the model's own configuration away, so that the one of all models holds.
    model : torch.nn.Module, optional
        The model, or a part of it. Default: all models.

    Raises
    ------
    TypeError
        `config` is no SparseConfig, or is None without a model; or `model` is no module of torch.
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
    text = own.get_text_config() if hasattr(own, "get_text_config") else own
    layers = getattr(text, "num_hidden_layers", None)
    if layers is not None:
        wrong = [n for n in config.dense_layers if not 0 <= n < layers]
        if wrong:
            raise ValueError(f"dense_layers: expected layers from 0 to {layers - 1}, got {wrong[0]}")
    if config.profile is not None and layers is not None:
        heads = text.num_attention_heads
        kv_heads = getattr(text, "num_key_value_heads", None) or heads
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
        config.profile.options(0, heads=heads, kv_heads=kv_heads, head_dim=head_dim)
        if len(config.profile.numbers) != layers:
            raise ValueError(f"profile: expected one of a model with {layers} layers, got one with {len(config.profile.numbers)}")
    for module in model.modules():
        setattr(module, _ATTRIBUTE, config)


def register() -> None:
    """Make ``"blitz_attn"`` and ``"blitz_attn_sparse"`` names that ``attn_implementation=`` takes.

    Both read the mask of a model as a rule (causal, a window, padding, packed sequences), so that no matrix of queries times keys is made.
    A mask without such a rule, and a position bias, are added to the scores as they are. Layers with a position bias keep all blocks and
    pages. So do layers with such a mask, unless it shows each query one run of keys: they choose blocks.
    ``"blitz_attn"`` attends to all keys that the rule allows. ``"blitz_attn_sparse"`` does so while it decodes, and leaves blocks of
    keys out of prompts; see `SparseConfig`. Calling this again changes nothing.

    Raises
    ------
    ImportError
        torch or transformers is not installed, or transformers is too old.

    Notes
    -----
    Sinks and softcaps are exact; blocks are chosen by scores without the softcap. Packed sequences are taken
    from ``position_ids`` that begin again, as transformers does, or from ``cu_seq_lens_q`` and ``cu_seq_lens_k``. Blocks that a model
    chooses itself (``block_indices`` of MiniMax-M3) are used as they are, whatever the configuration.

    Under `torch.compile`, the attention of a layer is one operator in the graph, which reads padding, packed sequences and the length of a
    static cache when the graph runs. The graph ends at attention that is differentiated, and at a `paged_cache`.

    Where a model needs something else (dropout, gradients of a position bias, returned weights, packed sequences beside a position
    bias), torch computes it, and the reason is logged once, on the logger ``blitz_attn.integrations.transformers``.
    Models with attention code of their own (BLOOM, XGLM, RoFormer) run it: a mask that they add to scores becomes the numbers that they
    add with ``"eager"``, and whatever else needs numbers in the mask (MPT, DeepSeek-V4; under `torch.compile` all of them) is a ValueError.
    For the first of these, `on_unsupported` of the configuration for all models counts. transformers itself refuses some (Falcon,
    GPT-Neo).

    Examples
    --------
    >>> from blitz_attn.integrations.transformers import register
    >>> register()
    """
    import inspect

    from transformers import AttentionInterface, __version__
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    if "q_offset" not in inspect.signature(sdpa_mask).parameters:
        raise ImportError(f"transformers: expected a version whose masks have a q_offset, such as 5.24, got {__version__}")

    from ._transformers.attention import attend_dense, attend_sparse
    from ._transformers.masks import make_mask

    for name, function in (("blitz_attn", attend_dense), ("blitz_attn_sparse", attend_sparse)):
        AttentionInterface.register(name, function)
        AttentionMaskInterface.register(name, make_mask)


def paged_cache(model: Any, *, page_size: int = 64) -> Any:
    """A cache for a model's `generate` and forward calls that keeps keys and values in pages, which Quest can choose from.

    It grows without copying what it holds at every step. Every attention implementation can read it. Layers with a sliding window,
    and layers with another mechanism than attention, alone or beside it, get the same layers as in transformers' `DynamicCache`. Under
    torch.autocast, keys and values are kept in its dtype, in which attention is computed. For a model of encoder and decoder, it is an
    `EncoderDecoderCache`, which has pages for cross-attention, too.

    Parameters
    ----------
    model : transformers.PreTrainedModel or transformers.PretrainedConfig
        The model that the cache is for.
    page_size : int
        Tokens in a page, from 1 to 1024: what Quest keeps or leaves out as a whole.

    Returns
    -------
    transformers.Cache
        For ``cache=`` of a call or of ``generate``, which is ``past_key_values=`` in earlier versions of transformers.

    Raises
    ------
    TypeError
        `model` is neither a model nor a configuration.
    ValueError
        `page_size` is out of range.

    Examples
    --------
    >>> from transformers import LlamaConfig
    >>> from blitz_attn.integrations.transformers import paged_cache
    >>> cache = paged_cache(LlamaConfig(num_hidden_layers=2), page_size=32)
    >>> len(cache.layers), cache.get_seq_length()
    (2, 0)
    """
    page_size = _arrays.integer(page_size, "page_size")
    if not 1 <= page_size <= 1024:
        raise ValueError(f"page_size: expected 1 to 1024, got {page_size}")
    config = getattr(model, "config", model)
    if not hasattr(config, "get_text_config"):
        raise TypeError(f"model: expected a model of transformers or its configuration, got {shown(model)}")
    from ._transformers.cache import PagedCache, PagedPair

    return (PagedPair if getattr(config, "is_encoder_decoder", False) else PagedCache)(config, page_size)
