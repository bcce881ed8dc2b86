"""Video models whose self-attention is sparse: wrappers around the forward methods of models and layers, and the attention inside.

While `sparse_video` holds, the wrapper of the model finds out which tokens and which step a call has. The wrapper of each layer of
self-attention then takes over the one call of attention inside the layer. The layer may make this call through diffusers' dispatch with the
backend ``"blitz_attn"``, or as torch's own `scaled_dot_product_attention`, which other backends for CPUs end up calling. In the
call that is taken over, queries, keys and values are put into the order of cubes, and the output back into the model's order. To put
the hidden states into the order of cubes once, before the first layer, would save at most a fiftieth of a layer's time, and one would have
to know where each model uses the positions of its tokens.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import MethodType, TracebackType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from ... import video
from ..._sabi.combine import union
from ..._sabi.measure import density as sabi_density
from ..._select.prefill import select_blocks_prefill
from ..._sentences import shown
from .._transformers.fallbacks import tell
from . import dense
from .config import SparseVideo
from .geometries import UnknownError, finder_of, names_known
from .steps import Call, Job, ListKey

__all__ = ["Handle", "make_sparse"]

# The names that models of diffusers give to their lists of blocks.
_LISTS_OF_BLOCKS = ("blocks", "transformer_blocks", "single_transformer_blocks", "vace_blocks")
_MARK = "_blitz_attn_video"


@dataclass
class _Now:
    """The forward call that a thread is in."""

    handle: Handle
    job: Job
    call: Call
    order: video.TokenOrder | None  # None: attention is left as it is, and the reason was logged
    fits: bool = False  # whether a call of self-attention had as many tokens as the order
    other: int | None = None  # number of queries of the last call that did not fit
    shares: dict[int, float] = field(default_factory=dict)  # [sparse layer]: the share of the blocks that it has attended to


class _Lists(NamedTuple):
    """The lists of blocks of a layer."""

    lists: Any  # a tensor (B or 1, H or 1, R, W); None: all blocks
    share: float  # of all blocks


_ALL = _Lists(None, 1.0)


class _Here(threading.local):
    """The forward call and the layer that a thread is in."""

    now: _Now | None = None
    layer: int | None = None  # of self-attention
    reached: bool = False  # whether this layer has come to its attention


_here = _Here()


# ---- Around the forward methods ----------------------------------------------------------------------------------------


class _OwnAttention(TorchFunctionMode):
    """Takes over torch's own attention."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = _attend_sdpa(*args, **kwargs) if func is scaled_dot_product_attention else None
        return func(*args, **kwargs) if out is None else out


def _attend_sdpa(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    if query.dim() != 4 or key.dim() != 4 or value.dim() != 4:
        return None
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    out = attend_here(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    return None if out is None else out.transpose(1, 2)


def _put(module: Any, around: Callable[..., Any], before: dict[Any, Any]) -> None:
    """Replace a module's forward method by one that calls `around` with the replaced method and the module. A copy of the module passes
    itself in place of the module."""
    own = vars(module).get("forward")

    @functools.wraps(type(module).forward)
    def forward(this: Any, *arguments: Any, **options: Any) -> Any:
        return around(functools.partial(type(this).forward, this) if own is None else own, this, *arguments, **options)

    before[module] = (own, MethodType(forward, module))  # noted before the change, so that every changed module is known
    vars(module)["forward"] = before[module][1]


class Handle:
    """A model whose self-attention is sparse until `undo`, or until a ``with`` statement over this object ends.

    Each thread that calls the model counts its own steps, and keeps its own lists.
    """

    def __init__(self, model: Any, config: SparseVideo, layers: Sequence[Any]) -> None:
        self._config, self._kind, self._local = config, type(model).__name__, threading.local()
        self._layers, self._told, self._said = len(layers), set[str](), False
        self._find, self._signature = finder_of(model), inspect.signature(type(model).forward)
        self._order = functools.lru_cache(maxsize=4)(functools.partial(video.cube_order, cube=config.cube))
        self._lists_of_rules = functools.lru_cache(maxsize=4)(self._make_lists_of_rules)
        self._before: dict[Any, Any] = {}
        self._holds = True
        try:
            _put(model, self._around_model, self._before)
            for number, layer in enumerate(layers):
                _put(layer, functools.partial(self._around_layer, number), self._before)
                vars(layer)[_MARK] = self
        except BaseException:
            self.undo()
            raise

    @property
    def step(self) -> int | None:
        """The number of the step that this thread has begun last, from 0; None before the first one."""
        call = self._job().call
        return None if call is None else call.step

    def __repr__(self) -> str:
        share = getattr(self._local, "share", None)
        return f"Handle({self._kind}, step={self.step}, density={None if share is None else round(share, 4)})"

    def reset(self) -> None:
        """Let the next forward call of this thread begin a new video. Without `reset`, only a timestep that is larger than the last one
        does so."""
        self._local.job, self._local.share = Job(), None

    def undo(self) -> None:
        """Give the model its own attention back, and drop the lists that are kept. Calling this again changes nothing."""
        self._holds = False  # wrappers that something else has wrapped in the meantime stay in place, and read this flag
        for module, (own, put) in self._before.items():
            vars(module).pop(_MARK, None)
            if vars(module).get("forward") is not put:
                continue
            if own is None:
                del vars(module)["forward"]
            else:
                vars(module)["forward"] = own
        if self._before:
            self._forget()
        self._before = {}

    def _forget(self) -> None:
        """Drop the lists of all threads, and with them the steps of all threads but this one."""
        local, job = threading.local(), self._job()
        job.state = job.state._replace(lists={})
        local.job, local.share = job, getattr(self._local, "share", None)
        self._local = local
        self._order.cache_clear()
        self._lists_of_rules.cache_clear()

    def __deepcopy__(self, copied: dict[int, Any]) -> Handle:
        """A copy of the model is sparse as long as the model is."""
        return self

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.undo()

    def _job(self) -> Job:
        if not hasattr(self._local, "job"):
            self._local.job = Job()
        job: Job = self._local.job
        return job

    def _around_model(self, own: Callable[..., Any], model: Any, *arguments: Any, **options: Any) -> Any:
        if torch.compiler.is_compiling():
            tell(f"{self._kind}: attention left as it is, because of torch.compile", "diffusers", self._told)
            return own(*arguments, **options)
        if not self._holds:
            return own(*arguments, **options)
        try:
            given = self._signature.bind(model, *arguments, **options).arguments
        except TypeError:  # the method itself will raise it, too
            return own(*arguments, **options)
        before = _here.now, _here.layer
        job = self._job()
        state = job.state
        try:
            now = _Now(self, job, job.begin(_timestep_of(given)), self._order_of(model, given))
            if job.rises == 2 and self._config.schedule.dense_steps:
                self._tell("timesteps rise, and each larger one begins a new video: these calls are all of step 0, which is dense")
            _here.now, _here.layer = now, None
            out = own(*arguments, **options)
        except BaseException:  # if the call is made again, it has the same step and number
            job.state = state
            raise
        finally:
            _here.now, _here.layer = before
        self._end(now)
        return out

    def _around_layer(self, number: int, own: Callable[..., Any], layer: Any, *arguments: Any, **options: Any) -> Any:
        now = None if torch.compiler.is_compiling() else _here.now
        if now is None or now.handle is not self or now.order is None or not self._holds:
            return own(*arguments, **options)
        _here.layer, _here.reached = number, False
        try:
            with _OwnAttention():
                out = own(*arguments, **options)
        finally:
            _here.layer = None
        if not _here.reached:
            self._log_dense("another backend than torch's own attention and blitz_attn")
        if now.other is not None and not now.fits and self._config.geometry is not None:
            geometry, what = now.order.geometry, f"the {now.other} tokens that self-attention of {self._kind} has"
            raise ValueError(f"geometry: expected {what}, got {geometry.num_tokens} in spans {shown(geometry.spans)}")
        return out

    def _end(self, now: _Now) -> None:
        """Keep the share of the blocks that a forward call has attended to, and log it after the first sparse call."""
        shares, config = list(now.shares.values()), self._config
        self._local.share = sum(shares) / len(shares) if shares else 1.0 if now.fits else None
        if not shares or self._said or now.order is None:
            return
        self._said = True
        dense = config.schedule.dense_steps
        steps = "" if not dense else "the first step is dense, " if dense == 1 else f"the first {dense} steps are dense, "
        self._tell(
            f"{len(shares)} of {self._layers} layers {'is' if len(shares) == 1 else 'are'} sparse: {_shown_rules(config)}, "
            f"cubes of {config.cube}, blocks of {config.block_shape}; {steps}step {now.call.step} attends to {self._local.share:.1%} "
            f"of the blocks of {now.order.geometry.num_tokens} tokens"
        )

    def _log_dense(self, reason: str) -> None:
        """Log why attention is not sparse."""
        self._tell(f"attention not sparse, because of {reason}")

    def _tell(self, text: str) -> None:
        """Log something about the model, once."""
        tell(f"{self._kind}: {text}", "diffusers", self._told)

    # ---- The order and the attention of a forward call -------------------------------------------------------------------

    def _order_of(self, model: Any, given: dict[str, Any]) -> video.TokenOrder | None:
        """The order of the tokens of a forward call; None where its attention is left as it is."""
        if torch.is_grad_enabled() and getattr(model, "gradient_checkpointing", False):
            self._log_dense("gradient checkpointing, which computes layers again after the forward call")
            return None
        if self._config.geometry is not None:
            return self._order(self._config.geometry)
        assert self._find is not None  # else a geometry is given
        try:
            return self._order(self._find(given))
        except UnknownError as error:
            self._log_dense(str(error))
            return None

    def _attend(self, now: _Now, layer: int, query: Any, key: Any, value: Any, mask: Any, scale: float | None) -> Any:
        """The attention of a layer whose tokens are those of the geometry, in the model's order: (B, S, H, D)."""
        config, order = self._config, now.order
        rules: dict[str, Any] = {"scale": scale, "num_threads": config.num_threads}
        assert order is not None
        tokens = order.geometry.num_tokens
        if tokens < config.min_tokens:
            self._log_dense(f"{tokens} tokens, which are fewer than min_tokens = {config.min_tokens}")
        list_key, made_for = ListKey(layer, now.call.number), (order, query.shape[0])
        is_dense = tokens < config.min_tokens or layer in config.dense_layers or now.call.step < config.schedule.dense_steps
        known = _ALL if is_dense else self._known(now, list_key, made_for)
        if known is not None and known.lists is None:
            return dense.computed(query, key, value, mask, **rules)
        q, k, v = order.permute(query, key, value, layout="BSND")
        seen = _keys_seen(mask, q.shape[0], order)
        if known is None:
            known = self._chosen(now, q.detach(), k.detach(), {"scale": scale, "kv_lens": seen.get("kv_lens")})
            self._keep(now, list_key, made_for, known)
        lists, share = known
        out = dense.computed(q, k, v, **seen, **rules, sabi=lists, block_shape=config.block_shape)
        now.shares[layer] = share
        return order.restore(out, layout="BSND")

    # ---- Lists -------------------------------------------------------------------------------------------------------------

    def _make_lists_of_rules(self, order: video.TokenOrder) -> tuple[np.ndarray, _Lists]:
        """The lists of all rules, (1, rules, R, W), as an array and as a tensor. Without rules, a query sees its own cube."""
        rules = self._config.choose_from or self._config.rule or video.Neighbourhood((0, 0, 0))
        dense_frames, dtype = self._config.dense_frames, self._dtype(order)
        lists = np.asarray(video.blocks(order, rules, self._config.block_shape, dense_frames=dense_frames, dtype=dtype))
        return lists, self._listed(lists, order)

    def _listed(self, lists: np.ndarray, order: video.TokenOrder) -> _Lists:
        return _Lists(torch.from_numpy(lists), sabi_density(lists, self._columns(order)))

    def _columns(self, order: video.TokenOrder) -> int:
        """The number of blocks of keys."""
        return -(-order.geometry.num_tokens // self._config.block_shape[1])

    def _dtype(self, order: video.TokenOrder) -> str:
        """The smallest dtype that the lists can have, because lists of all layers and heads may be kept."""
        return "int16" if self._columns(order) < 1 << 15 else "int32"

    def _known(self, now: _Now, list_key: ListKey, made_for: Any) -> _Lists | None:
        """The lists of a layer; None if they must be chosen now."""
        config, step, order = self._config, now.call.step, now.order
        assert order is not None
        density = config._density(step)
        if density is None and not config.choose_from:
            return self._lists_of_rules(order)[1]
        kept = now.job.lists.get(list_key)
        if kept is not None and kept[0] == made_for and not config.schedule.refreshes(step):
            found: _Lists = kept[1]
            return found
        if density != 1:
            return None
        self._keep(now, list_key, made_for, _ALL)
        return _ALL

    def _keep(self, now: _Now, list_key: ListKey, made_for: Any, lists: _Lists) -> None:
        """Keep the lists of a layer, if a later step may use them."""
        if self._config.schedule.refresh_every > 1:
            now.job.keep(list_key, (made_for, lists))

    def _chosen(self, now: _Now, q: Any, k: Any, rules: dict[str, Any]) -> _Lists:
        """New lists for a layer. Queries and keys are in the order of cubes."""
        config, order = self._config, now.order
        assert order is not None
        density, lists = config._density(now.call.step), self._lists_of_rules(order)[0]
        if config.choose_from:
            lists = lists[:, self._best_rules(q, k, order, rules)]
        if density is not None:
            chosen = select_blocks_prefill(q, k, layout="BSND", num_threads=config.num_threads, **config._options(density), **rules)
            lists = np.asarray(union(lists, chosen, dtype=self._dtype(order)))
        return self._listed(lists, order)

    def _best_rules(self, q: Any, k: Any, order: video.TokenOrder, rules: dict[str, Any]) -> list[int]:
        """The number of the rule that each head gets."""
        config = self._config
        options: dict[str, Any] = {"dense_frames": config.dense_frames, "layout": "BSND", "num_threads": config.num_threads}
        return video.choose_rules(q, k, order, config.choose_from, config.block_shape, **options, **rules)


def _timestep_of(given: dict[str, Any]) -> float | None:
    """The timestep of a forward call. If each token has its own, this is the largest, because frames that are given have smaller ones."""
    timestep = given.get("timestep")
    return None if timestep is None else float(torch.as_tensor(timestep).detach().max())


# ---- Inside a layer --------------------------------------------------------------------------------------------------------


def attend_here(
    query: Any, key: Any, value: Any, attn_mask: Any, dropout_p: float, is_causal: bool, scale: float | None, enable_gqa: bool
) -> Any:
    """Attention (B, S, H, D) of the layer that this thread is in; None if it is in no layer, or if this call is left as it is."""
    now, layer = _here.now, _here.layer
    if now is None or layer is None or now.order is None:
        return None
    _here.reached = True
    tokens = now.order.geometry.num_tokens
    reason = dense.why_not(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)
    if reason is None and is_causal:
        reason = "a causal rule"
    if reason is None and attn_mask is not None and _as_keys(attn_mask, query.shape[0], tokens) is None:
        reason = "a mask that is not the same for all queries and heads"
    if (query.shape[1], key.shape[1]) == (tokens, tokens):
        now.fits = True
    else:
        now.other = query.shape[1]
        reason = f"{query.shape[1]} queries and {key.shape[1]} keys where the geometry has {tokens} tokens"
    if reason is not None:
        now.handle._log_dense(reason)
        return None
    return now.handle._attend(now, layer, query, key, value, attn_mask, scale)


def leave_here(reason: str) -> None:
    """Leave attention unchanged up to the end of the layer that this thread is in."""
    now, layer = _here.now, _here.layer
    if now is None or layer is None or now.order is None:
        return
    _here.layer, _here.reached = None, True  # else torch's own attention, which the backend may call, would be taken over
    now.handle._log_dense(reason)


def _as_keys(mask: Any, batch: int, tokens: int) -> Any:
    """A mask that hides keys, whatever the query, as a tensor of bool, (B or 1, S); None for other masks."""
    if mask.dtype != torch.bool:
        return None
    if mask.dim() == 2 and mask.shape == (batch, tokens) and batch != tokens:
        return mask
    shape = (1,) * (4 - mask.dim()) + tuple(mask.shape)
    return mask.reshape(shape[0], tokens) if shape[1:] == (1, 1, tokens) else None


def _keys_seen(mask: Any, batch: int, order: video.TokenOrder) -> dict[str, Any]:
    """The arguments of attention that hide the keys that a mask in the model's order hides: lengths, where these suffice."""
    if mask is None:
        return {}
    keys = order.permute(_as_keys(mask, batch, order.geometry.num_tokens), layout="BSH")
    lengths = keys.sum(1)
    if (keys != (torch.arange(keys.shape[1]) < lengths[:, None])).any():
        return {"attn_mask": keys[:, None, None]}
    return {"kv_lens": lengths.expand(batch).tolist()}


# ---- Models ----------------------------------------------------------------------------------------------------------------


def make_sparse(model: Any, config: SparseVideo) -> Handle:
    """Check a model and the options, and make the model's self-attention sparse. Returns its handle."""
    kind = type(model).__name__
    if any(getattr(module, "_compiled_call_impl", None) is not None or hasattr(module, "_orig_mod") for module in model.modules()):
        raise ValueError(f"model: expected one that is not compiled, got {kind}: graphs of torch.compile would leave it dense")
    if config.geometry is None and finder_of(model) is None:
        raise ValueError(f"geometry: expected one for {kind}, because it is known only for {names_known()}, got None")
    blocks = [block for name in _LISTS_OF_BLOCKS for block in getattr(model, name, ())]
    layers = list(dict.fromkeys(layer for block in blocks if (layer := _self_attention(block)) is not None))  # each one once
    if not layers:
        raise ValueError(f"model: expected a transformer whose blocks have attn1 or attn, got {kind}")
    if any(getattr(vars(layer).get(_MARK), "_holds", False) for layer in layers):
        raise ValueError(f"model: expected one that is not in a sparse_video yet, got {kind}")
    rules = config.rule if isinstance(config.rule, tuple) else ()
    if len(rules) > 1:
        heads: set[Any] = {getattr(layer, "heads", None) for layer in layers}
        if None in heads:
            raise ValueError(f"rule: expected one rule, because layers of {kind} do not say how many heads they have, got {len(rules)}")
        if heads != {len(rules)}:
            raise ValueError(f"rule: expected one rule or one for each of {max(heads)} heads, got {len(rules)}")
    wrong = [n for n in config.dense_layers if not 0 <= n < len(layers)]
    if wrong:
        raise ValueError(f"dense_layers: expected layers from 0 to {len(layers) - 1}, got {wrong[0]}")
    return Handle(model, config, layers)


def _shown_rules(config: SparseVideo) -> str:
    """The rules and the chooser, in words."""
    what = [f"a rule for each of {len(config.rule)} heads" if isinstance(config.rule, tuple) else str(config.rule)] if config.rule else []
    if config.choose_from:
        what.append(f"for each head the best of {shown(config.choose_from)}")
    if config.density is not None or config.schedule.densities is not None:
        what.append("chosen blocks")
    return " and ".join(what)


def _self_attention(block: Any) -> Any:
    """The attention of a block to its own tokens."""
    return getattr(block, "attn1", None) or getattr(block, "attn", None)
