"""Common parts of the tests of `integrations.transformers`: small models, calls of attention functions, and dense attention in float64."""

import functools
import itertools
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.0")

from blitz_attn.integrations._transformers import attention  # noqa: E402
from blitz_attn.integrations._transformers.fallbacks import TOLD  # noqa: E402
from blitz_attn.integrations.transformers import SparseConfig, configure, paged_cache, register  # noqa: E402

register()  # once, for all tests that import this file
pytestmark = [pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"), pytest.mark.usefixtures("one_torch_thread")]

SMALL = {
    "vocab_size": 97, "hidden_size": 48, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
WINDOWED = {**SMALL, "sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"]}
MODELS = {
    "llama": ("Llama", SMALL),
    "qwen3": ("Qwen3", SMALL),
    "mistral": ("Mistral", {**SMALL, "sliding_window": 9}),
    "gemma2": ("Gemma2", {**WINDOWED, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 16}),
    "gemma3": ("Gemma3", {**WINDOWED, "query_pre_attn_scalar": 16}),
    "gpt_oss": ("GptOss", {**WINDOWED, "num_local_experts": 2, "num_experts_per_tok": 1}),
    "llama4": ("Llama4", {**SMALL, "attention_chunk_size": 6, "num_local_experts": 2, "intermediate_size_mlp": 32, "no_rope_layers": [1, 0]}),
    "minimax_m3": ("MiniMaxM3VL", {
        **SMALL, "num_local_experts": 2, "num_experts_per_tok": 1, "dense_intermediate_size": 32, "shared_intermediate_size": 32,
        "index_n_heads": 2, "index_head_dim": 16, "index_block_size": 4, "index_topk_blocks": 3, "index_local_blocks": 1, "rotary_dim": 16,
        "layer_types": ["minimax_m3_sparse", "full_attention"], "mlp_layer_types": ["dense", "dense"],
    }),
}  # fmt: skip


@functools.cache
def small_model(name):
    """A model with random weights, which are so large that attention is far from uniform."""
    kind, options = MODELS[name]
    suffix = "Text" if name in ("gemma3", "llama4", "minimax_m3") else ""
    prefix = {"gemma3": "Gemma3ForCausalLM", "minimax_m3": "MiniMaxM3SparseForCausalLM"}.get(name, f"{kind}ForCausalLM")
    if name == "minimax_m3":
        from transformers.models.minimax_m3_vl import modeling_minimax_m3_vl as module

        model_class = module.MiniMaxM3VLTextModel
    else:
        model_class = getattr(transformers, prefix, None)
    config_class = getattr(transformers, f"{kind}{suffix}Config", None)
    if model_class is None or config_class is None:
        pytest.skip(f"transformers {transformers.__version__} has no {kind}")
    torch.manual_seed(0)
    with torch.no_grad():
        model = model_class(config_class(**options)).eval()
        for parameter_name, parameter in model.named_parameters():
            if "norm" not in parameter_name:
                parameter.normal_(std=0.3)
    return model


def reset_configurations():
    TOLD.clear()
    configure(SparseConfig())


@pytest.fixture(autouse=True)
def _defaults():
    reset_configurations()
    yield
    reset_configurations()


def forward(model, implementation, ids, **options):
    model.set_attn_implementation(implementation)
    with torch.no_grad():
        found = model(ids, **options)
    return found.logits if hasattr(found, "logits") else found.last_hidden_state


def padded(rng, side, batch, tokens):
    """The 2-D padding mask of a batch; None without padding."""
    if side == "none":
        return None
    mask = torch.ones(batch, tokens, dtype=torch.long)
    for row in mask[1:]:
        count = rng.randrange(max(1, tokens // 2))
        row[: count] = 0 if side == "left" else 1
        row[tokens - count :] = 0 if side == "right" else 1
    return mask


def positions(mask, batch, tokens):
    return torch.arange(tokens).expand(batch, -1) if mask is None else (mask.cumsum(-1) - 1).clamp(min=0)


def make_cache(kind, model, tokens):
    if kind == "none":
        return None
    if kind == "static":
        return transformers.StaticCache(config=model.config, max_cache_len=tokens + 5)
    return paged_cache(model, page_size=4) if kind == "paged" else transformers.DynamicCache(config=model.config)


def in_chunks(model, implementation, ids, mask, cache, sizes):
    """Logits of a prompt that is read in chunks through a cache, or at once without a cache."""
    where = positions(mask, *ids.shape)
    parts, begin = [], 0
    for size in sizes if cache is not None else [ids.shape[1]]:
        end = begin + size
        options = {"attention_mask": None if mask is None else mask[:, :end], "position_ids": where[:, begin:end]}
        if cache is not None:
            options |= {"past_key_values": cache, "use_cache": True}
        parts.append(forward(model, implementation, ids[:, begin:end], **options))
        begin = end
    return torch.cat(parts, dim=1)


def draw_sizes(rng, tokens):
    """Sizes of chunks that cover the tokens: one chunk, one chunk and then single tokens, or random sizes."""
    kind = rng.choice(("whole", "decode", "any"))
    if kind == "whole":
        return [tokens]
    if kind == "decode":
        return [tokens - 3, 1, 1, 1]
    cuts = sorted(rng.sample(range(1, tokens), 3))
    return [b - a for a, b in itertools.pairwise([0, *cuts, tokens])]


def call(q, k, v, mask, implementation="dense", **options):
    module = SimpleNamespace(layer_idx=0, is_causal=True, training=False)
    if q.shape[1] != k.shape[1]:
        module.num_key_value_groups = q.shape[1] // k.shape[1]
    function = attention.attend_dense if implementation == "dense" else attention.attend_sparse
    with torch.no_grad():
        return function(module, q, k, v, mask, **options)[0]


def tensors(*shape, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape, dtype=np.float32))


def eager(q, k, v, mask, bias=0.0, scale=None, softcap=None, sinks=None):
    """Attention in float64 with a bool mask, a bias that is added to scores, and sinks: for each head, a score without a value."""
    k, v = (x.double().repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = q.double() @ k.transpose(2, 3) * (q.shape[3] ** -0.5 if scale is None else scale)
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    scores = (scores + bias).masked_fill(~mask, -torch.inf)
    sink = torch.full(scores.shape[1:2], -torch.inf) if sinks is None else sinks
    scores = torch.cat([scores, sink.double()[:, None, None].expand(*scores.shape[:3], 1)], -1)
    return (scores.softmax(-1)[..., :-1].nan_to_num() @ v).transpose(1, 2)


def seen_by_calls(mask):
    """The keys that each query sees in the calls that stand for a mask, if calls are aligned as the operations' docstrings say."""
    batch, _, queries, keys = mask.shape
    rules, seen = mask.rules, np.zeros((batch, queries, keys), bool)
    left, right = rules.window or (-1, -1)
    for call in rules.calls():
        for b, q_len, kv_len in zip(range(call.entries.start, call.entries.stop), call.q_lens, call.kv_lens, strict=True):
            for i in range(q_len):
                for j in range(kv_len):
                    distance = j - (i + kv_len - q_len)
                    inside = not (rules.causal and distance > 0) and not (left >= 0 and -distance > left) and not 0 <= right < distance
                    if rules.ranges is not None:
                        first, end = rules.ranges[b % len(rules.ranges), i]
                        inside = inside and first <= call.start + j < end
                    seen[b, i, call.start + j] = inside
    return seen
