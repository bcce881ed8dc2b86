"""For GLM-5.3's pools, Qwen4's blocks of four tokens and DeepSeek-V4's compressed entries, results are those of the models' eager attention."""

import contextlib
import copy
import functools
import importlib
import random
import re

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.0")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from blitz_attn.integrations._transformers import attention, compressed, pools  # noqa: E402
from blitz_attn.integrations._transformers.fallbacks import TOLD  # noqa: E402
from blitz_attn.integrations.transformers import SparseConfig, configure, trained_sparse  # noqa: E402
from cases_transformers import (  # noqa: E402
    _defaults,  # noqa: F401
    draw_sizes,
    forward,
    in_chunks,
    make_cache,
    padded,
    positions,
    pytestmark,  # noqa: F401
)

SMALL = {
    "vocab_size": 97, "hidden_size": 48, "moe_intermediate_size": 16, "num_attention_heads": 4, "max_position_embeddings": 256,
    "num_experts_per_tok": 2, "hidden_act": "silu", "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GLM = {
    "num_hidden_layers": 3, "num_key_value_heads": 4, "intermediate_size": 32, "kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 0,
    "qk_nope_head_dim": 16, "v_head_dim": 12, "n_routed_experts": 4, "n_shared_experts": 1, "mlp_layer_types": ["dense"] * 3,
    "index_topk": 8, "index_head_dim": 16, "index_n_heads": 16, "index_kpool": 4, "linear_head_dim": 16, "linear_num_heads": 2,
    "layer_types": ["indexed_attention", "indexed_attention", "linear_attention"], "indexer_types": ["full", "shared", "full"],
    "hc_mult": 2, "hc_sinkhorn_iters": 4,
}  # fmt: skip
FAMILIES = {
    "glm5_next": ("Glm5NextTextConfig", "Glm5NextTextModel", GLM),
    "glm5_next without tails": ("Glm5NextTextConfig", "Glm5NextTextModel", {**GLM, "index_kpool_always_select_tail": False}),
    "qwen4_exp": ("Qwen4ExpTextConfig", "Qwen4ExpForCausalLM", {
        "num_hidden_layers": 2, "num_key_value_heads": 2, "head_dim": 16, "layer_types": ["linear_attention", "indexed_attention"],
        "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 2, "num_experts": 4,
        "shared_expert_intermediate_size": 16, "hc_count": 2, "hc_lowrank": 16, "indexer_n_heads": 16, "indexer_kv_heads": 1,
        "indexer_head_dim": 16, "indexer_budget": 8, "indexer_compress_ratio": 4,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1], "mrope_interleaved": True,
        },
    }),
    "deepseek_v4": ("DeepseekV4Config", "DeepseekV4ForCausalLM", {
        "num_hidden_layers": 3, "head_dim": 32, "q_lora_rank": 24, "n_routed_experts": 4, "mlp_layer_types": ["moe"] * 3,
        "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"], "sliding_window": 9,
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8}, "hc_mult": 2, "hc_sinkhorn_iters": 4,
        "o_groups": 2, "o_lora_rank": 8, "index_n_heads": 16, "index_head_dim": 16, "index_topk": 3, "partial_rotary_factor": 0.25,
    }),
}  # fmt: skip

# The implementation to compare with. It is "sdpa" where the first tokens see nothing, because "eager" gives such tokens the mean of all values.
OWN = dict.fromkeys(FAMILIES, "eager") | {"glm5_next without tails": "sdpa"}


@functools.cache
def small_model(name):
    """A model with random weights, which are so large that attention and the choice of tokens are far from uniform."""
    config, kind, options = FAMILIES[name]
    name = name.split()[0]
    try:
        module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
        config = getattr(importlib.import_module(f"transformers.models.{name}.configuration_{name}"), config)
    except ImportError:
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    torch.manual_seed(0)
    with torch.no_grad():
        model = getattr(module, kind)(config(**{**SMALL, **options})).eval()
        for parameter_name, parameter in model.named_parameters():
            if "norm" not in parameter_name:
                parameter.normal_(std=0.3)
    return model


def prompt(batch, length, seed=1):
    return torch.from_numpy(np.random.default_rng(seed).integers(3, 97, (batch, length)))


def computed_here():
    """Whether nothing was left to torch or to the model's own code. A first chunk of one token is excepted: GLM-5.3 takes the padding of such a
    chunk for a token."""
    return all("are chosen and attended by blitz_attn" in text or "padding between the tokens" in text for text in TOLD)


@contextlib.contextmanager
def as_trained(model, sparse):
    with trained_sparse(model) if sparse else contextlib.nullcontext():
        yield


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("name", list(FAMILIES))
def test_logits_are_those_of_eager_attention(name, sparse, seed, monkeypatch):
    """All options are drawn together. Chunks are the same in both runs, because the choice among tokens of equal scores (often 0) depends on the
    other tokens of a chunk."""
    rng = random.Random(f"{name} {seed}")
    as_lists = rng.choice((True, False, None))
    if as_lists is not None:  # None: by the rule
        monkeypatch.setattr(attention, "pays_as_blocks", lambda *_: as_lists)
    model = small_model(name)
    batch, length = rng.randint(1, 3), rng.randint(20, 50)
    caches = ("none", "dynamic") if name == "deepseek_v4" else ("none", "dynamic", "static", "paged")
    side, cache, sizes = rng.choice(("none", "left", "right")), rng.choice(caches), draw_sizes(rng, length)
    print(side, cache, sizes, (batch, length))
    ids, mask = prompt(batch, length, seed), padded(rng, side, batch, length)
    expected = in_chunks(model, OWN[name], ids, mask, make_cache(cache, model, length), sizes)
    with as_trained(model, sparse):
        found = in_chunks(model, "blitz_attn", ids, mask, make_cache(cache, model, length), sizes)
    keep = torch.ones_like(ids) if mask is None else mask
    assert ((found - expected).abs() * keep[..., None]).max() < 1e-4
    assert computed_here()


def generated(model, ids, mask, count):
    """Greedy tokens. A model without a head uses its embeddings as a head."""
    found, new, cache = [], ids, transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        for _ in range(count):
            where = positions(mask, *mask.shape)[:, -new.shape[1] :]
            out = model(new, attention_mask=mask, position_ids=where, past_key_values=cache, use_cache=True)
            logits = out.logits if hasattr(out, "logits") else out.last_hidden_state @ model.embed_tokens.weight.T
            new = logits[:, -1:].argmax(-1)
            mask = torch.cat([mask, torch.ones_like(new)], dim=1)
            found.append(new)
    return torch.cat(found, dim=1)


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("name", list(FAMILIES))
def test_generated_tokens_are_those_of_eager_attention(name, sparse):
    model, ids = small_model(name), prompt(2, 14)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    found = []
    for implementation in (OWN[name], "blitz_attn"):
        model.set_attn_implementation(implementation)
        with as_trained(model, sparse and implementation == "blitz_attn"):
            found.append(generated(model, ids, mask, 32))
    assert (found[1] == found[0]).all()
    assert computed_here()


def move(layer):
    """Gives tokens other positions, if the layer keeps positions."""
    if layer.indexer_position_ids is not None:
        layer.indexer_position_ids = 3 * layer.indexer_position_ids


CHANGES = {
    "none": lambda model, layer: None,
    "cropped": lambda model, layer: layer.crop(-3),
    "reordered": lambda model, layer: layer.reorder_cache(torch.tensor([1, 1, 0])),
    "written to": lambda model, layer: layer.indexer_keys[:, :5, :8].mul_(-1) if layer.is_indexer_initialized else None,
    "moved": lambda model, layer: move(layer),
    "other weights": lambda model, layer: [x.normal_(std=3) for name, x in model.named_parameters() if re.search("k_layernorm|ape", name)],
}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", ["dynamic", "static", "paged"])
@pytest.mark.parametrize("name", ["glm5_next", "qwen4_exp"])
def test_pools_that_are_kept_are_those_made_anew(name, kind, seed, monkeypatch):
    """Results are those with a copy of the cache, for which no pools are kept. Between calls, CHANGES are made to the cache and the model."""
    rng, tokens_of, own = random.Random(f"{name} {kind} {seed}"), [], pools._Pools.of

    def of(self, make, *arguments):
        return own(self, lambda entries, part: tokens_of.append(part.stop - part.start) or make(entries, part), *arguments)

    monkeypatch.setattr(pools._Pools, "of", of)
    model = copy.deepcopy(small_model(name))
    cache, kept = make_cache(kind, model, 200), 0
    with torch.no_grad(), trained_sparse(model):
        for step in range(16):
            change = rng.choice(list(CHANGES)) if step % 2 else "none"
            for layer in cache.layers:
                if getattr(layer, "keys", None) is not None:  # layers of linear attention have none
                    CHANGES[change](model, layer)
            ids = prompt(3, 20 if step == 0 else rng.randint(1, 6), step)
            expected = forward(model, "blitz_attn", ids, past_key_values=copy.deepcopy(cache), use_cache=True)
            tokens_of.clear()
            found = forward(model, "blitz_attn", ids, past_key_values=cache, use_cache=True)
            assert torch.equal(found, expected)
            if step and change == "none":
                assert max(tokens_of, default=0) < 4 + ids.shape[1]
                kept += 1
    assert kept
    assert computed_here()


@pytest.mark.parametrize("name", list(FAMILIES))
def test_gradients_are_those_of_eager_attention(name):
    model, ids, found = small_model(name), prompt(2, 40), []
    for implementation in (OWN[name], "blitz_attn"):
        model.set_attn_implementation(implementation)
        model.zero_grad()
        with as_trained(model, implementation == "blitz_attn"):
            out = model(ids)
            (out.logits if hasattr(out, "logits") else out.last_hidden_state)[..., 5].sum().backward()
        found.append({key: x.grad.clone() for key, x in model.named_parameters() if x.grad is not None})
    model.zero_grad()
    expected, grads = found
    assert grads.keys() == expected.keys()
    assert all((grads[key] - x).abs().max() <= 1e-3 * max(1, x.abs().max()) for key, x in expected.items())


@pytest.mark.long  # 10 seconds each
@pytest.mark.parametrize("name", ["glm5_next", "qwen4_exp", "deepseek_v4"])
def test_a_compiled_model_runs_its_own_code(name):
    model, ids = small_model(name), prompt(2, 12)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    expected = forward(model, "eager", ids, attention_mask=mask)
    torch._dynamo.reset()
    model.set_attn_implementation("blitz_attn")
    with torch.no_grad(), as_trained(model, True):
        found = torch.compile(model, backend="eager")(ids, attention_mask=mask)
    found = found.logits if hasattr(found, "logits") else found.last_hidden_state
    assert ((found - expected).abs() * mask[..., None]).max() < 1e-4


class Largest(TorchDispatchMode):
    """Counts the numbers of the largest tensor that attention of these families makes."""

    numbers = depth = 0

    def __init__(self, model):
        super().__init__()
        for module in model.modules():
            if hasattr(module, "indexer") or hasattr(module, "compressor"):
                module.register_forward_pre_hook(lambda *_: self.enter(1))
                module.register_forward_hook(lambda *_: self.enter(-1))

    def enter(self, step):
        self.depth += step

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        made = function(*arguments, **(options or {}))
        for x in made if isinstance(made, (tuple, list)) else [made]:
            if self.depth > 0 and type(x) is torch.Tensor:
                self.numbers = max(self.numbers, x.untyped_storage().nbytes() // x.element_size())
        return made


@pytest.mark.parametrize("name", list(FAMILIES))
def test_no_tensor_has_a_number_for_each_query_and_key(name, monkeypatch):
    monkeypatch.setattr(attention, "pays_as_blocks", lambda *_: True)
    model, tokens = small_model.__wrapped__(name), 4096
    with Largest(model) as largest, as_trained(model, True):
        forward(model, "blitz_attn", prompt(1, tokens))
    assert 0 < largest.numbers < 300 * tokens  # 256 for queries of an indexer


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("name", list(FAMILIES))
def test_a_configuration_chooses_nothing_there(name, sparse):
    other = (0,) if name == "deepseek_v4" else ()  # a layer with a window alone
    configure(SparseConfig(density=0.1, block_shape=(8, 4), min_tokens=1, sink=0, recent=0, decode_budget=4, dense_layers=other))
    model = small_model(name)
    for length in (11, 40):  # all tokens that are seen may be chosen, or only some
        ids, sizes = prompt(2, length), [length - 2, 1, 1]
        expected = in_chunks(model, OWN[name], ids, None, make_cache("dynamic", model, length), sizes)
        with as_trained(model, sparse):
            found = in_chunks(model, "blitz_attn_sparse", ids, None, make_cache("paged", model, length), sizes)
        assert (found - expected).abs().max() < 1e-4


@pytest.mark.parametrize("name", list(FAMILIES))
def test_another_release_runs_its_own_code(name, monkeypatch):
    for known in (compressed._KNOWN, pools._KNOWN):
        for kind in known:
            monkeypatch.setitem(known, kind, "0" * 16)
    model, ids = small_model(name), prompt(2, 30)
    with as_trained(model, True):
        found = forward(model, "blitz_attn", ids)
    assert any("Attention: the model's own code instead of blitz_attn, because of a release of transformers whose" in x for x in TOLD)
    assert (found - forward(model, OWN[name], ids)).abs().max() < 1e-4


@pytest.mark.parametrize("name", ["qwen4_exp", "deepseek_v4"])
def test_a_mask_that_the_caller_made(name):
    model, ids = small_model(name), prompt(2, 30)
    mask = torch.zeros(2, 1, 30, 30).masked_fill(torch.ones(30, 30).tril().roll(3, 0) == 0, torch.finfo(torch.float32).min)
    mask[..., :4, :] = 0
    expected = forward(model, "eager", ids, attention_mask=mask)
    with as_trained(model, True):
        found = forward(model, "blitz_attn", ids, attention_mask=mask)
    assert (found - expected).abs().max() < 1e-4


@pytest.mark.parametrize("name", list(FAMILIES))
def test_positions_that_begin_again(name):
    """Positions begin again, as in packed sequences, and skip numbers. The positions decide which of DeepSeek-V4's entries a query may see."""
    model, ids = small_model(name), prompt(1, 60)
    where = torch.cat([torch.arange(22), torch.arange(30), torch.arange(8) * 3])[None]
    for options in ({"use_cache": False}, {}):
        expected = forward(model, OWN[name], ids, position_ids=where, **options)
        with as_trained(model, True):
            found = forward(model, "blitz_attn", ids, position_ids=where, **options)
        assert (found - expected).abs().max() < 1e-4


@pytest.mark.parametrize("name", list(FAMILIES))
def test_under_autocast_the_model_chooses(name):
    with as_trained(small_model(name), True), torch.autocast("cpu", dtype=torch.bfloat16):
        forward(small_model(name), "blitz_attn", prompt(2, 30))
    assert any(text.endswith("because of torch.autocast, which rounds its scores") for text in TOLD)
