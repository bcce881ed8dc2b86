"""Models that choose tokens themselves, as DeepSeek-V3.2 does: only the chosen tokens are attended, as in the model's eager attention."""

import functools
import importlib
import random

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.0")

from transformers import masking_utils  # noqa: E402

from blitz_attn.integrations._transformers import attention, tokens  # noqa: E402
from blitz_attn.integrations._transformers.fallbacks import TOLD  # noqa: E402
from blitz_attn.integrations._transformers.masks import TracedMask, make_mask  # noqa: E402
from blitz_attn.integrations.transformers import SparseConfig, configure, paged_cache  # noqa: E402
from cases_transformers import (  # noqa: E402
    _defaults,  # noqa: F401
    call,
    draw_sizes,
    eager,
    forward,
    in_chunks,
    make_cache,
    padded,
    positions,
    pytestmark,  # noqa: F401
    tensors,
)

SMALL = {
    "vocab_size": 97, "hidden_size": 48, "intermediate_size": 32, "moe_intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 12,
    "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "mlp_layer_types": ["dense", "dense"],
    "index_topk": 6, "index_head_dim": 16, "index_n_heads": 8, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
SHARED = {"indexer_types": ["full", "shared"]}  # the second layer uses the lists of the first
FAMILIES = {
    "deepseek_v32": ("DeepseekV32Config", "DeepseekV32ForCausalLM", {}),
    "glm_moe_dsa": ("GlmMoeDsaConfig", "GlmMoeDsaForCausalLM", SHARED),
    "mistral_large4": ("MistralLarge4TextConfig", "MistralLarge4TextModel", {**SHARED, "q_lora_rank": None}),
    "hy_v4": ("HYV4Config", "HYV4ForCausalLM", {**SHARED, "learnable_sink_init": 0.5}),
    "hy_v4_vl": ("HYV4VLTextConfig", "HYV4VLTextModel", {
        **SHARED, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]},
    }),
    "axk2": ("AXK2Config", "AXK2ForCausalLM", {"gated_norm_rank": 4}),
    "dots3_note": ("Dots3NoteTextConfig", "Dots3NoteForCausalLM", {"layer_types": ["indexed_attention", "sliding_attention"], "sliding_window": 9}),
}  # fmt: skip


@functools.cache
def small_model(name, topk=6, index_heads=8):
    """A model with random weights, which are so large that attention and the choice of tokens are far from uniform. With many heads of the
    indexer, no score is 0."""
    config, kind, options = FAMILIES[name]
    try:
        module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
        config = getattr(importlib.import_module(f"transformers.models.{name}.configuration_{name}"), config)
    except ImportError:
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    given = {**SMALL, **options, "index_topk": topk, "index_n_heads": index_heads}
    torch.manual_seed(0)
    with torch.no_grad():
        model = getattr(module, kind)(config(**{key: x for key, x in given.items() if x is not None})).eval()
        for parameter_name, parameter in model.named_parameters():
            if "norm" not in parameter_name and "sinks" not in parameter_name:
                parameter.normal_(std=0.3)
    return model


def prompt(batch, length, seed=1):
    return torch.from_numpy(np.random.default_rng(seed).integers(3, 97, (batch, length)))


# ---- Small models against eager attention --------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", ["blitz_attn", "blitz_attn_sparse"])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", list(FAMILIES))
def test_logits_are_those_of_eager_attention(name, seed, implementation, monkeypatch):
    """All options are drawn together. The model chooses tokens, and the configuration does not. Chunks are the same in both runs, because the
    choice among tokens of equal scores (often 0) depends on the other tokens of a chunk."""
    rng = random.Random(f"{name} {seed} {implementation}")
    model = small_model(name)
    batch, length = rng.randint(1, 3), rng.randint(12, 40)
    side, cache = rng.choice(("none", "left", "right")), rng.choice(("none", "dynamic", "static", "paged"))
    sizes = draw_sizes(rng, length)
    as_lists = rng.choice((True, False, None))
    if as_lists is not None:  # None keeps the usual rule
        monkeypatch.setattr(attention, "pays_as_lists", lambda *_: as_lists)
    configure(SparseConfig(density=0.1, block_shape=(8, 4), min_tokens=1, sink=0, recent=0, dense_layers=(1,) if name == "dots3_note" else ()))
    print(side, cache, sizes, as_lists, (batch, length))
    ids = prompt(batch, length, seed)
    mask = padded(rng, side, batch, length)
    expected = in_chunks(model, "eager", ids, mask, make_cache(cache, model, length), sizes)
    found = in_chunks(model, implementation, ids, mask, make_cache(cache, model, length), sizes)
    keep = torch.ones_like(ids) if mask is None else mask
    assert ((found - expected).abs() * keep[..., None]).max() < 1e-4
    assert not TOLD


@pytest.mark.parametrize("name", list(FAMILIES))
def test_a_dense_run_differs(name):
    """The test above relies on this: even in so short prompts, the models leave tokens out."""
    ids = prompt(2, 24)
    sparse, dense = (forward(small_model(name, topk), "blitz_attn", ids) for topk in (6, 64))
    assert (sparse - dense)[:, :6].abs().max() < 1e-4  # the first six queries see at most six tokens
    assert (sparse - dense)[:, 6:].abs().max() > 0.1
    assert (dense - forward(small_model(name, 64), "eager", ids)).abs().max() < 1e-4


def generated(model, ids, mask, cache, count):
    """Greedy tokens. A model without a head uses its embeddings as a head."""
    options = {"do_sample": False, "eos_token_id": None}
    if hasattr(model, "lm_head"):
        return model.generate(ids, attention_mask=mask, past_key_values=cache, max_new_tokens=count, **options)[:, ids.shape[1] :]
    found, new = [], ids
    with torch.no_grad():
        for _ in range(count):
            where = positions(mask, *mask.shape)[:, -new.shape[1] :]
            out = model(new, attention_mask=mask, position_ids=where, past_key_values=cache, use_cache=True).last_hidden_state
            new = (out[:, -1:] @ model.embed_tokens.weight.T).argmax(-1)
            mask = torch.cat([mask, torch.ones_like(new)], dim=1)
            found.append(new)
    return torch.cat(found, dim=1)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", list(FAMILIES))
def test_generated_tokens_are_those_of_eager_attention(name, cache):
    model = small_model(name)
    ids = prompt(2, 14)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    found = []
    for implementation in ("eager", "blitz_attn"):
        model.set_attn_implementation(implementation)
        found.append(generated(model, ids, mask, make_cache(cache, model, 48), 32))
    assert found[0].shape == (2, 32)
    assert (found[1] == found[0]).all()
    assert not TOLD


@pytest.mark.parametrize("name", list(FAMILIES))
def test_gradients_are_those_of_eager_attention(name):
    """Gradients of the weights are compared, with chosen tokens as lists and as masks."""
    model = small_model(name)
    ids = prompt(2, 20)
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        for implementation, as_lists in (("eager", False), ("blitz_attn", False), ("blitz_attn", True)):
            patch.setattr(attention, "pays_as_lists", lambda *_, x=as_lists: x)
            model.set_attn_implementation(implementation)
            model.zero_grad()
            out = model(ids)
            (out.logits if hasattr(out, "logits") else out.last_hidden_state)[..., 5].sum().backward()
            found[implementation, as_lists] = {key: x.grad.clone() for key, x in model.named_parameters() if x.grad is not None}
    model.zero_grad()
    expected = found.pop(("eager", False))
    for grads in found.values():
        assert grads.keys() == expected.keys()
        assert all((grads[key] - x).abs().max() <= 1e-3 * max(1, x.abs().max()) for key, x in expected.items())
    assert not TOLD


@pytest.mark.parametrize("name", list(FAMILIES))
def test_a_compiled_model_is_one_graph(name):
    model = small_model(name)
    ids = prompt(2, 16)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    options = {"attention_mask": mask, "position_ids": positions(mask, 2, 16)}
    expected = forward(model, "eager", ids, **options)
    torch._dynamo.reset()
    model.set_attn_implementation("blitz_attn")
    with torch.no_grad():
        found = torch.compile(model, fullgraph=True, backend="eager")(ids, **options)
    found = found.logits if hasattr(found, "logits") else found.last_hidden_state
    assert ((found - expected).abs() * mask[..., None]).max() < 1e-4
    assert not TOLD


def test_a_slice_of_a_traced_mask_can_only_be_added():
    mask = TracedMask((2, 1, 3, 4), True, None, None, None, torch.tensor([[1, 1, 1, 1], [0, 1, 1, 1]]).bool(), 1, 0)
    hidden = torch.finfo(torch.float32).min
    expected = torch.zeros(2, 3, 4).masked_fill(~mask.elements()[:, 0], hidden)
    for part in (mask[:, 0], mask[:, 0, :, :]):
        assert part.dtype == torch.float32
        assert torch.equal(torch.zeros(2, 3, 4) + part, expected)
        with pytest.raises(ValueError, match="here by mul"):
            torch.zeros(2, 3, 4) * part
        with pytest.raises(AttributeError, match="here by masked_fill"):
            part.masked_fill(torch.ones(2, 3, 4).bool(), 0)
    with pytest.raises(ValueError, match="here by indexing"):
        mask[:, :, 1:]


# ---- Calls ---------------------------------------------------------------------------------------------------------


def draw(rng, batch, queries, keys, count):
    """Lists of distinct keys, in random order."""
    return torch.from_numpy(rng.permuted(np.tile(np.arange(keys, dtype=np.int32), (batch, queries, 1)), axis=2)[..., :count].copy())


def listed(indices, keys):
    return (indices[..., None] == torch.arange(keys)).any(2).unsqueeze(1)


IMAGES = torch.where((torch.arange(50) > 20) & (torch.arange(50) < 40), 0, -1).expand(3, -1)
RULES = {
    "causal": masking_utils.causal_mask_function,
    "a window": masking_utils.sliding_window_causal_mask_function(17),
    "a window on both sides": masking_utils.sliding_window_bidirectional_mask_function(12),
    "an image that sees itself": masking_utils.or_masks(masking_utils.causal_mask_function, masking_utils.blockwise_overlay(IMAGES)),
}


@pytest.mark.parametrize("rule", list(RULES))
@pytest.mark.parametrize("as_lists", [True, False])
@pytest.mark.parametrize("most", [1, 1 << 26])
def test_pieces_of_a_call_are_the_call(monkeypatch, rule, as_lists, most):
    """Queries are attended in several calls, with padding on both sides, and with pads and repeated tokens in the lists."""
    monkeypatch.setattr(attention, "pays_as_lists", lambda *_: as_lists)
    monkeypatch.setattr(tokens, "_MOST_BYTES", most)
    monkeypatch.setattr(tokens, "_ROWS", 8)
    rng = np.random.default_rng(0)
    padding = torch.ones(3, 50, dtype=torch.bool)
    padding[0, :9] = 0
    if rule != "a window on both sides":  # that window is counted from the last token
        padding[1, 41:] = 0
    q, k, v = tensors(3, 4, 40, 8), tensors(3, 2, 50, 8, seed=1), tensors(3, 2, 50, 8, seed=2)
    indices = draw(rng, 3, 40, 50, 20)
    indices[:, :, 3] = -1
    indices[:, ::2, 4] = indices[:, ::2, 0]
    mask = make_mask(3, 40, 50, 10, mask_function=RULES[rule], attention_mask=padding)
    seen = mask.elements() & listed(indices, 50)
    rows = padding[:, 10:] & seen.any(-1)[:, 0]
    for sinks in (None, torch.tensor([0.5, -1.0, 2.0, 0.0])):
        found = call(q, k, v, mask, indices=indices, **({} if sinks is None else {"s_aux": sinks}))
        assert (found - eager(q, k, v, seen, sinks=sinks))[rows].abs().max() < 1e-5
    assert not TOLD


def test_queries_that_may_see_all_tokens_are_attended_densely(monkeypatch):
    given = []
    original = attention.block_sparse_attention
    monkeypatch.setattr(attention, "block_sparse_attention", lambda *a, **k: given.append(k) or original(*a, **k))
    rng = np.random.default_rng(0)
    q, k, v = (tensors(2, 2, 30, 8, seed=n) for n in range(3))
    order = draw(rng, 2, 30, 30, 30)
    score = (order > torch.arange(30)[:, None]).int()  # tokens that a query sees come first, as in the models
    order = order.gather(-1, score.argsort(dim=-1, stable=True))
    mask = make_mask(2, 30, 30)
    for count, dense in ((30, [True]), (12, [True, False]), (1, [True, False])):
        given.clear()
        indices = order[..., :count]
        expected = eager(q, k, v, mask.elements() & listed(indices, 30))
        assert (call(q, k, v, mask, indices=indices) - expected).abs().max() < 1e-5
        assert [not ("attn_mask" in x or x["sabi"] is not None or "kv_ranges" in x) for x in given] == dense
    given.clear()
    step = make_mask(2, 1, 30, 29)
    indices = order[:, -1:, :12]
    assert (call(q[:, :, -1:], k, v, step, indices=indices) - eager(q[:, :, -1:], k, v, listed(indices, 30))).abs().max() < 1e-5
    assert [x["block_shape"] for x in given] == [(1, 1)]  # lists of single tokens


def test_lists_for_the_whole_batch_and_empty_lists():
    q, k, v = tensors(2, 2, 6, 8), tensors(2, 2, 9, 8, seed=1), tensors(2, 2, 9, 8, seed=2)
    indices = draw(np.random.default_rng(0), 1, 6, 9, 4).long()
    mask = make_mask(2, 6, 9, 3)
    seen = mask.elements() & listed(indices, 9)
    rows = seen.any(-1)[:, 0]
    assert (call(q, k, v, mask, indices=indices) - eager(q, k, v, seen))[rows].abs().max() < 1e-5
    assert (call(q, k, v, mask, indices=indices[..., :0]) == 0).all()
    assert call(q[:, :, :0], k, v, make_mask(2, 0, 9, 9), indices=indices[:, :0]).shape == (2, 0, 2, 8)


WRONG = {
    "shape": (lambda x: x[:, :4], r"of shape \(2, 6, tokens per query\), got torch.int32 of \(2, 4, 5\)$"),
    "a list for each head": (lambda x: x[:, None], r"of shape \(2, 6, tokens per query\), got torch.int32 of \(2, 1, 6, 5\)$"),
    "dtype": (lambda x: x.float(), r"expected int32 or int64 .*, got torch.float32 of \(2, 6, 5\)$"),
    "a token beyond the last": (lambda x: x + 4, "expected tokens from 0 to 8, or -1 for none, got 12$"),
    "a negative one": (lambda x: x - 2, "expected tokens from 0 to 8, or -1 for none, got -2$"),
}


@pytest.mark.parametrize("name", list(WRONG))
@pytest.mark.parametrize("dropout", [0.0, 0.5])  # with dropout, torch computes
def test_wrong_lists_of_tokens_are_refused(name, dropout):
    change, sentence = WRONG[name]
    q, k, v = tensors(2, 2, 6, 8), tensors(2, 2, 9, 8, seed=1), tensors(2, 2, 9, 8, seed=2)
    indices = draw(np.random.default_rng(0), 2, 6, 9, 9).sort(dim=-1).values[..., [0, 3, 8, 1, 5]]
    with pytest.raises(ValueError, match="^indices: .*" + sentence):
        call(q, k, v, make_mask(2, 6, 9, 3), indices=change(indices), dropout=dropout)


@pytest.mark.parametrize("kind", ["matrix", "bias"])
def test_with_a_mask_of_numbers_torch_computes(kind):
    q, k, v = (tensors(2, 2, 9, 8, seed=n) for n in range(3))
    indices = draw(np.random.default_rng(0), 2, 9, 9, 5)
    hidden = torch.zeros(2, 1, 9, 9).masked_fill(torch.ones(9, 9, dtype=torch.bool).triu(1), torch.finfo(torch.float32).min)
    expected = eager(q, k, v, (hidden == 0) & listed(indices, 9))
    rows = ((hidden == 0) & listed(indices, 9)).any(-1)[:, 0]
    if kind == "matrix":
        assert (call(q, k, v, hidden, indices=indices) - expected)[rows].abs().max() < 1e-5
        assert any("tokens chosen by the model beside a mask that was made as a matrix" in x for x in TOLD)
    else:
        configure(SparseConfig(on_unsupported="error"))
        with pytest.raises(ValueError, match="got tokens chosen by the model beside a position bias$"):
            call(q, k, v, make_mask(2, 9, 9), indices=indices, position_bias=torch.zeros(1, 2, 9, 9))


def test_a_budget_for_decoding_leaves_the_model_its_choice():
    model = small_model("deepseek_v32")
    configure(SparseConfig(density=1.0, min_tokens=1, decode_budget=4))
    ids = prompt(1, 24)
    expected = in_chunks(model, "eager", ids, None, None, None)
    found = in_chunks(model, "blitz_attn_sparse", ids, None, paged_cache(model, page_size=4), [20, 1, 1, 1, 1])
    assert (found - expected).abs().max() < 1e-4
    assert not TOLD
