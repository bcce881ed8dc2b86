"""Models of transformers over this library: equal to eager attention, whatever the padding, the cache, the chunks and the window."""

import functools
import itertools
import random

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.0")

from blitz_attn import select  # noqa: E402
from blitz_attn.integrations import transformers as integration  # noqa: E402
from blitz_attn.integrations.transformers import SparseConfig, configure, paged_cache  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

integration.register()

from blitz_attn.integrations._transformers import attention  # noqa: E402

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
    "minimax_m3": ("MiniMaxM3VL", {
        **SMALL, "num_local_experts": 2, "num_experts_per_tok": 1, "dense_intermediate_size": 32, "shared_intermediate_size": 32,
        "index_n_heads": 2, "index_head_dim": 16, "index_block_size": 4, "index_topk_blocks": 3, "index_local_blocks": 1, "rotary_dim": 16,
        "layer_types": ["full_attention", "minimax_m3_sparse"], "mlp_layer_types": ["dense", "dense"],
    }),
}  # fmt: skip


@functools.cache
def small_model(name):
    """A model with random weights, large enough for attention to be far from uniform."""
    kind, options = MODELS[name]
    suffix = "Text" if name in ("gemma3", "minimax_m3") else ""
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
    attention._TOLD.clear()
    configure(SparseConfig())


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """Threads of small models wait for each other more than they compute."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


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
    """2-D mask of a batch, None without padding."""
    if side == "none":
        return None
    mask = torch.ones(batch, tokens, dtype=torch.long)
    for row in mask[1:]:
        count = rng.randrange(tokens // 2)
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
    """Logits of a prompt that is read in chunks through a cache; without a cache at once."""
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
    """Chunks that cover the tokens: at once, a chunk and single tokens, or any."""
    kind = rng.choice(("whole", "decode", "any"))
    if kind == "whole":
        return [tokens]
    if kind == "decode":
        return [tokens - 3, 1, 1, 1]
    cuts = sorted(rng.sample(range(1, tokens), 3))
    return [b - a for a, b in itertools.pairwise([0, *cuts, tokens])]


# ---- Small models against eager attention --------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", ["blitz_attn", "blitz_attn_sparse"])
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", list(MODELS))
def test_logits_are_those_of_eager_attention(name, seed, implementation):
    """All options are drawn together. The sparse implementation keeps all blocks here."""
    rng = random.Random(f"{name} {seed} {implementation}")
    configure(SparseConfig(density=1.0, block_shape=(8, 4), chooser=select.Pooled(pool=4), min_tokens=1, decode_budget=1000))
    model = small_model(name)
    batch, tokens = rng.randint(1, 3), rng.randint(12, 40)
    side = rng.choice(("none", "right") if name == "minimax_m3" else ("none", "left", "right"))
    cache = rng.choice(("none", "dynamic", "static", "paged"))
    sizes = draw_sizes(rng, tokens)
    print(side, cache, sizes, (batch, tokens))
    ids = torch.from_numpy(np.random.default_rng(seed).integers(3, 97, (batch, tokens)))
    mask = padded(rng, side, batch, tokens)
    expected = in_chunks(model, "eager", ids, mask, None, None)
    found = in_chunks(model, implementation, ids, mask, make_cache(cache, model, tokens), sizes)
    keep = torch.ones_like(ids) if mask is None else mask
    error = ((found - expected).abs() * keep[..., None]).max()
    assert error < 2e-4 * expected.abs().max()
    assert not attention._TOLD
