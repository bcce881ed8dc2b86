"""The attention backend that vLLM's CPU engine runs in place of its own. vLLM imports this module by name, in each of its processes.

Layers that need something that the operations lack are computed by vLLM's own backend, from which `Backend` and `Layer` are derived.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import torch
from vllm.config import get_current_vllm_config, get_layers_from_vllm_config
from vllm.forward_context import get_forward_context
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.models.utils import extract_layer_index
from vllm.utils.torch_utils import kv_cache_dtype_str_to_dtype
from vllm.v1.attention.backend import AttentionMetadataBuilder, AttentionType
from vllm.v1.attention.backends import cpu_attn

from ... import _core, config
from ..._block_sparse.call import block_sparse_attention
from ..._formats import CELL_BYTES, CELL_DIMS
from ..._select.prefill import select_and_attend_prefill
from ...paged import append_paged_kv, dequantize_rows
from ...quest import quest_prefill_metadata
from .._transformers.config import expect_model
from .options import VARIABLE, Options, options
from .pages import KV_DTYPES, Pages, Views
from .step import MOST_NEW_TOKENS, Run, Step
from .threads import start_threads

_LOG = init_logger("vllm.blitz_attn")
_MOST_HEAD_DIM = 576
_ENCODERS = (AttentionType.ENCODER_ONLY, AttentionType.ENCODER)


def _own() -> Options:
    """The options. Without them, the plug-in does not register this backend, so that None is an error."""
    own = options()
    if own is None:
        raise RuntimeError(f"{VARIABLE}: expected options in each process of vLLM, got none")
    return own


def _pages(block_size: int, head_dim: int, kv_cache_dtype: str, stored: torch.dtype) -> Pages:
    own, widths, dtype, summary = _own(), (head_dim, head_dim), stored, torch.float32
    quantised, scaled = KV_DTYPES.get(kv_cache_dtype, (None, False))
    if own.kv_dtype is not None:
        if head_dim % CELL_DIMS:
            raise ValueError(f"{VARIABLE}: kv_dtype: expected a model whose head dim is a multiple of {CELL_DIMS}, got {head_dim}")
        of_key, of_value = (head_dim // CELL_DIMS * CELL_BYTES[x] for x in own.kv_dtype)
        widths, dtype = (of_key, of_value), torch.uint8
    elif quantised is not None:
        dtype = {"int8": torch.int8, "float8_e4m3": torch.uint8}[quantised]
    else:
        summary = stored
    return Pages(block_size, head_dim, widths, dtype, scaled, None if own.decode_budget is None else summary)


def _pages_of_spec(spec: Any) -> Pages:
    """The pages of a layer from what vLLM knows of its cache."""
    mode = spec.kv_quant_mode.name.lower()
    name = "fp8" if mode == "fp8_per_tensor" else mode if mode in KV_DTYPES else "auto"
    return _pages(spec.block_size, spec.head_size, name, spec.dtype)


class Backend(cpu_attn.CPUAttentionBackend):
    """Names the classes below to vLLM, and says which models and caches they take."""

    supported_kv_cache_dtypes: ClassVar[list[Any]] = [*KV_DTYPES]

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return [cpu_attn.MultipleOf(1)]

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return []

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_per_head_quant_scales(cls) -> bool:
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """True where each prompt is attended in one piece. (Bits depend on how a prompt is cut into chunks, which depends on the batch.)"""
        found = get_current_vllm_config()
        return not (found.scheduler_config.enable_chunked_prefill or found.cache_config.enable_prefix_caching)

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        if spec.state_content_bytes is not None:
            return spec
        size = _pages_of_spec(spec).bytes_per_token
        return spec if size == spec.state_content_size_bytes else replace(spec, state_content_bytes=size)

    @staticmethod
    def get_impl_cls() -> type[Layer]:
        return Layer

    @staticmethod
    def get_builder_cls() -> type[Builder]:
        return Builder


class Builder(AttentionMetadataBuilder[cpu_attn.CPUAttentionMetadata]):
    """Makes in each step the metadata that the layers of a group share: a `Step`, and vLLM's own metadata if some layer runs in vLLM's
    own backend."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: Any) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        _expect_model(vllm_config, kv_cache_spec)
        layers = get_layers_from_vllm_config(vllm_config, Attention, layer_names)
        reasons = {name: layer.impl.reason for name, layer in layers.items() if getattr(layer.impl, "reason", "another class")}
        self._theirs = None
        if reasons:
            name, reason = next(iter(reasons.items()))
            is_encoder = isinstance(kv_cache_spec, cpu_attn.EncoderOnlyAttentionSpec)
            if not is_encoder and Backend.customize_spec(kv_cache_spec) != replace(kv_cache_spec, state_content_bytes=None):
                raise ValueError(
                    f"{VARIABLE}: expected layers that blitz_attn can all compute, since it lays out the cache that they share, "
                    f"got {name} with {reason}"
                )
            _LOG.warning_once(
                "blitz_attn: vLLM's own attention runs %d of %d layers of a group, because of %s", len(reasons), len(layers), reason
            )
            self._theirs = cpu_attn.CPUAttentionMetadataBuilder(kv_cache_spec, layer_names, vllm_config, device)
        if len(reasons) < len(layers):
            start_threads()
            _tell(vllm_config)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        common = common_attn_metadata
        causal = common.causal
        if self._theirs is not None:
            metadata = self._theirs.build(common_prefix_len, common, fast_build)
        else:
            dynamic = isinstance(causal, torch.Tensor)
            metadata = cpu_attn.CPUAttentionMetadata(
                common.num_actual_tokens, common.max_query_len, common.query_start_loc, common.max_seq_len, common.seq_lens,
                common.block_table_tensor, common.slot_mapping, None, not dynamic and causal, causal if dynamic else None,
            )  # fmt: skip
        n = common.num_reqs
        metadata.step = Step(  # the object of vLLM, a plain dataclass, takes a further attribute
            common.query_start_loc[: n + 1].numpy().astype("int64"), common.seq_lens[:n].numpy().astype("int64"),
            common.block_table_tensor[:n].numpy().copy(), self.kv_cache_spec.block_size, _prefilling(common),
            causal[:n].numpy().copy() if isinstance(causal, torch.Tensor) else bool(causal),
        )  # fmt: skip
        return metadata


def _expect_model(vllm_config: Any, spec: Any) -> None:
    """Refuses options that the model or its cache cannot have."""
    own = _own()
    budget, block_size = own.decode_budget, spec.block_size
    if own.kv_dtype is not None:
        cache = vllm_config.cache_config.cache_dtype
        if cache != "auto":
            raise ValueError(f"{VARIABLE}: kv_dtype: expected an engine with the cache dtype auto, got {cache}")
    if budget is not None and budget < block_size:
        raise ValueError(f"{VARIABLE}: decode_budget: expected at least the {block_size} tokens of a block of the cache, got {budget}")
    try:
        expect_model(own.sparse, vllm_config.model_config.hf_text_config)
    except ValueError as error:
        raise ValueError(f"{VARIABLE}: {error}") from None


def _prefilling(common: Any) -> np.ndarray:
    """Whether each request computes tokens of its prompt. If vLLM does not say, requests with more than MOST_NEW_TOKENS new tokens do."""
    if common.is_prefilling is not None:
        found: np.ndarray = common.is_prefilling[: common.num_reqs].numpy().copy()
        return found
    return np.diff(common.query_start_loc[: common.num_reqs + 1].numpy()) > MOST_NEW_TOKENS


def _tell(vllm_config: Any) -> None:
    own, parts = _own(), ["dense attention"]
    cache = vllm_config.cache_config.cache_dtype if own.kv_dtype is None else " and ".join(dict.fromkeys(own.kv_dtype))
    if own.prompts:
        parts.append(f"blocks chosen for prompts of at least {own.sparse.min_tokens} tokens")
    if own.decode_budget is not None:
        parts.append(f"pages chosen for new tokens beyond {own.decode_budget} tokens")
    _LOG.info_once(
        "blitz_attn %s computes attention: %s (level %s, %d threads, cache %s)", _core.__version__, ", ".join(parts), config.isa(),
        config.get_num_threads(), cache,
    )  # fmt: skip


class Layer(cpu_attn.CPUAttentionBackendImpl):
    """The attention of one layer. `reason` says why vLLM's own backend computes it; None where this library does."""

    def __init__(
        self, num_heads: int, head_size: int, scale: float, num_kv_heads: int, alibi_slopes: list[float] | None, sliding_window: int | None,
        kv_cache_dtype: str, logits_soft_cap: float | None = None, attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None, sinks: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        super().__init__(
            num_heads, head_size, scale, num_kv_heads, alibi_slopes, sliding_window, kv_cache_dtype, logits_soft_cap, attn_type,
            kv_sharing_target_layer_name, sinks,
        )  # fmt: skip
        self.reason = self._why_not()
        self._quantised, self._scaled = KV_DTYPES.get(kv_cache_dtype, (None, False))
        self._options = _own()
        self._rows = self._options.kv_dtype
        kv_dtype: Any = self._rows or (self._quantised if self._quantised == "float8_e4m3" else None)
        self._kv_dtype: dict[str, Any] = {} if kv_dtype is None else {"kv_dtype": kv_dtype}
        self._leaves_out: bool | None = None  # whether this layer leaves keys out; None until the first call, which names the layer
        self._window = None if sliding_window is None else sliding_window - 1
        self._rules = {"scale": self.scale, "softcap": self.logits_soft_cap or None}
        self.sinks: torch.Tensor | None
        self._views: Views | None = None
        self._seen: Any = None  # the cache of which `_views` are the parts

    def _why_not(self) -> str | None:
        if self.attn_type not in (AttentionType.DECODER, *_ENCODERS):
            return f"attention of type {self.attn_type}"
        if self.head_size > _MOST_HEAD_DIM:
            return f"a head dim of {self.head_size}, above {_MOST_HEAD_DIM}"
        if self.kv_cache_dtype not in KV_DTYPES:
            return f"a cache of {self.kv_cache_dtype}"
        return None

    # ---- The cache ----------------------------------------------------------------------------------------------------

    def _views_of(self, cache: torch.Tensor, dtype: torch.dtype) -> Views:
        if self._views is None or self._seen is not cache:
            stored = dtype if self.kv_cache_dtype == "auto" else kv_cache_dtype_str_to_dtype(self.kv_cache_dtype, None)
            pages = _pages(cache.shape[2], self.head_size, self.kv_cache_dtype, stored)
            self._views, self._seen = pages.views(cache), cache
        return self._views

    def _of_cache(self, layer: Any, views: Views) -> dict[str, Any]:
        """The scales of a cache of 8 bits."""
        if self._quantised is None:
            return {}
        if self._scaled:
            return {"k_scale": views.k_scale, "v_scale": views.v_scale}
        return {"k_scale": layer._k_scale_float, "v_scale": layer._v_scale_float}

    def do_kv_cache_update(
        self, layer: Any, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        """Writes new tokens into the cache, and their blocks' summaries."""
        if self.reason is not None:
            super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)
            return
        if self.attn_type in _ENCODERS:
            return
        views, n = self._views_of(kv_cache, key.dtype), len(slot_mapping)
        scales = self._of_cache(layer, views)
        append_paged_kv(key[:n], value[:n], views.k, views.v, slot_mapping=slot_mapping, kv_layout="HND", **scales, **self._kv_dtype)
        metadata = get_forward_context().attn_metadata
        if views.largest is None or metadata is None:
            return
        metadata = metadata[0] if isinstance(metadata, list) else metadata
        tables, lens = metadata[layer.layer_name].step.touched()
        quest_prefill_metadata(
            views.k, tables, lens, tables, views.largest, views.smallest, kv_layout="HND", k_scale=scales.get("k_scale"),
            dtype=self._rows[0] if self._rows else self._kv_dtype.get("kv_dtype"),
        )  # fmt: skip

    # ---- Attention ----------------------------------------------------------------------------------------------------

    def forward(
        self, layer: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, attn_metadata: Any,
        output: torch.Tensor, output_scale: torch.Tensor | None = None, output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Attention of a step's queries (T, H, D), written into `output`. While vLLM warms up, it calls this without metadata."""
        if self.reason is not None or output_scale is not None or output_block_scale is not None:
            return super().forward(layer, query, key, value, kv_cache, attn_metadata, output, output_scale, output_block_scale)
        if attn_metadata is None:
            return output
        step: Step = attn_metadata.step
        n = attn_metadata.num_actual_tokens
        out = output[:n].view(n, self.num_heads, -1)
        if self.attn_type in _ENCODERS:
            self._encode(step, query[:n], key[:n], value[:n], out)
            return output
        views = self._views_of(kv_cache, query.dtype)
        if self._leaves_out is None:
            self._leaves_out = self._window is None and self._options.sparse._sparse_in(extract_layer_index(layer.layer_name))
        own = self._options
        for run in step.runs(*((own.prompts_from, own.decode_budget) if self._leaves_out else (None, None))):
            part = step.queries(run)
            if run.how == "sparse":
                self._attend_prompt(layer, step, run, query[part], views, out[part])
            else:
                self._attend(layer, step, run, query[part], views, out[part])
        return output

    def _extras(self) -> dict[str, Any]:
        sinks = self.sinks  # weights of the model, which are loaded after __init__
        return {"sinks": None if sinks is None else sinks.float(), "alibi_slopes": self.alibi_slopes}

    def _attend(self, layer: Any, step: Step, run: Run, q: torch.Tensor, views: Views, out: torch.Tensor) -> None:
        ranges = step.ranges(self._window)
        window = self._window if ranges is None else None
        plan = step.plan(run, window=window, **self._rules, **self._kv_dtype)
        scales = self._of_cache(layer, views)
        if run.how == "dense":
            plan.attention(q, views.k, views.v, kv_ranges=ranges, out=out, **scales, **self._extras())
            return
        tables = step.tables[run.first : run.end]
        plan.select_and_attend(
            q, views.k, views.v, (views.largest, views.smallest), tables, budget=self._options.decode_budget, out=out, **scales,
            **self._extras(),
        )  # fmt: skip

    def _attend_prompt(self, layer: Any, step: Step, run: Run, q: torch.Tensor, views: Views, out: torch.Tensor) -> None:
        """A prompt, or a chunk of one, over blocks that are chosen for it."""
        tokens, queries = int(step.seq_lens[run.first]), len(q)
        pages = torch.from_numpy(step.tables[run.first, : -(-tokens // step.block_size)]).long()
        scales = self._of_cache(layer, views)
        k, v = (self._contiguous(views, n, scales, pages, q.dtype)[:, :, :tokens] for n in range(2))
        choice = self._options.sparse._options(
            extract_layer_index(layer.layer_name), heads=self.num_heads, kv_heads=self.num_kv_heads, head_dim=self.head_size
        )
        result = select_and_attend_prefill(
            q.transpose(0, 1).unsqueeze(0), k, v, causal=True, q_begin=[tokens - queries], **self._rules, **self._extras(), **choice
        )
        out.copy_(result[0].transpose(0, 1))

    def _contiguous(self, views: Views, part: int, scales: dict[str, Any], pages: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Keys (part 0) or values (part 1) of the pages of one request, as numbers: (1, Hkv, tokens, D)."""
        stored = views[part]
        if self._quantised == "float8_e4m3":
            stored = stored.view(torch.float8_e4m3fn)
        found, scale = stored[pages], scales.get(("k_scale", "v_scale")[part])
        if self._rows is not None:
            found = torch.from_numpy(dequantize_rows(found, self._rows[part])).to(dtype)
        elif scale is not None:
            factors = scale[pages].unsqueeze(-1) if isinstance(scale, torch.Tensor) else scale
            found = (found.float() * factors).to(dtype)
        return found.transpose(0, 1).flatten(1, 2).unsqueeze(0)

    def _encode(self, step: Step, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> None:
        """Attention of tokens of packed sequences, each to all tokens of its own sequence, or to those in its window."""
        window = None if self._window is None else (self._window, self._window)
        block_sparse_attention(
            q, k, v, layout="TND", cu_seqlens_q=step.begins, cu_seqlens_kv=step.begins, window=window, out=out, **self._rules,
            **self._extras(),
        )  # fmt: skip
