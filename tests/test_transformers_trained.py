"""Under `trained_sparse`, models that choose tokens themselves use `select_tokens`, attend to latents, and agree with their eager attention."""

import copy
import random
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.0")

from blitz_attn.integrations._transformers import dsa  # noqa: E402
from blitz_attn.integrations._transformers.fallbacks import TOLD  # noqa: E402
from blitz_attn.integrations._transformers.latents import Latents  # noqa: E402
from blitz_attn.integrations._transformers.masks import make_mask  # noqa: E402
from blitz_attn.integrations.transformers import trained_sparse  # noqa: E402
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
from test_transformers_dsa import FAMILIES, generated, prompt  # noqa: E402
from test_transformers_dsa import small_model as any_small_model  # noqa: E402


def small_model(name, topk=6):
    return any_small_model(name, topk, 32)


def attentions(model):
    return [module for module in model.modules() if hasattr(module, "expand_kv")]


def logged():
    """The logged lines, without the line that says what runs."""
    return [text for text in TOLD if "are chosen and attended by blitz_attn" not in text]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", list(FAMILIES))
def test_logits_are_those_of_eager_attention(name, seed, monkeypatch):
    """All options are drawn together: how many queries have expanded keys, how many are folded at once, padding, caches and chunks."""
    rng = random.Random(f"{name} {seed}")
    model = small_model(name)
    batch, length = rng.randint(1, 3), rng.randint(12, 60)
    side, cache = rng.choice(("none", "left", "right")), rng.choice(("none", "dynamic", "static", "paged"))
    implementation, sizes = rng.choice(("blitz_attn", "blitz_attn_sparse")), draw_sizes(rng, length)
    split, step = rng.choice((0, 5, 30, 1000, None)), rng.choice((1, 7, 1000))
    if split is not None:  # None: by the rule
        monkeypatch.setattr(Latents, "rows_expanded", lambda self, first, rows, most: min(max(0, split - first + 1), rows))
    monkeypatch.setattr(Latents, "rows_at_once", lambda self: step)
    print(side, cache, sizes, split, step, (batch, length), implementation)
    ids = prompt(batch, length, seed)
    mask = padded(rng, side, batch, length)
    expected = in_chunks(model, "eager", ids, mask, make_cache(cache, model, length), sizes)
    with trained_sparse(model):
        found = in_chunks(model, implementation, ids, mask, make_cache(cache, model, length), sizes)
    keep = torch.ones_like(ids) if mask is None else mask
    assert ((found - expected).abs() * keep[..., None]).max() < 1e-4
    assert not logged()


@pytest.mark.parametrize("name", list(FAMILIES))
def test_tokens_are_those_that_the_model_chooses(name, monkeypatch):
    """The scores of the chosen tokens are those of the model's best tokens. The tokens themselves may differ where scores are equal."""
    model, pairs = small_model(name), []
    original = dsa._Selection.choose

    def choose(self, steps, count, dim):
        found = original(self, steps, count, dim)
        (_, _, _, (_, q), *_, (_, weights), _, _) = steps
        scale = next((step[1] for step in steps if step[0] == "mul"), 1.0)
        pairs.append((found, (torch.relu(q.double() @ self.keys.double().mT.unsqueeze(1) * scale) * weights.double().mT).sum(2), self.mask.rules))
        return found

    monkeypatch.setattr(dsa._Selection, "choose", choose)
    with trained_sparse(model):
        forward(model, "blitz_attn", prompt(2, 40))
    layers = sum(module.indexer is not None for module in attentions(model))
    assert len(pairs) == layers
    for found, scores, rules in pairs:
        seen = torch.ones(40, 40, dtype=torch.bool).tril(rules.offset)
        best = scores.masked_fill(~seen, -torch.inf).topk(6).values
        own = torch.where(found >= 0, scores.gather(-1, found.clamp(min=0).long()), -torch.inf).sort(descending=True).values
        assert torch.allclose(own, best, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", list(FAMILIES))
def test_generated_tokens_are_those_of_eager_attention(name, cache):
    model = small_model(name)
    ids = prompt(2, 14)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    model.set_attn_implementation("eager")
    expected = generated(model, ids, mask, make_cache(cache, model, 48), 32)
    model.set_attn_implementation("blitz_attn")
    with trained_sparse(model):
        found = generated(model, ids, mask, make_cache(cache, model, 48), 32)
    assert found.shape == (2, 32)
    assert (found == expected).all()
    assert not logged()


@pytest.mark.parametrize("name", list(FAMILIES))
def test_gradients_and_graphs_are_those_of_eager_attention(name):
    """Keys and values are expanded where gradients are recorded. A compiled graph has the model's own code."""
    model = small_model(name)
    ids = prompt(2, 20)
    grads = []
    for implementation in ("eager", "blitz_attn"):
        model.set_attn_implementation(implementation)
        with trained_sparse(model):
            out = model(ids)
        (out.logits if hasattr(out, "logits") else out.last_hidden_state)[..., 5].sum().backward()
        grads.append({key: x.grad.clone() for key, x in model.named_parameters() if x.grad is not None})
        model.zero_grad()
    assert grads[0].keys() == grads[1].keys()
    assert all((grads[1][key] - x).abs().max() <= 1e-3 * max(1, x.abs().max()) for key, x in grads[0].items())
    expected = forward(model, "eager", ids, position_ids=positions(None, 2, 20))
    model.set_attn_implementation("blitz_attn")
    torch._dynamo.reset()
    with trained_sparse(model), torch.no_grad():
        found = torch.compile(model, fullgraph=True, backend="eager")(ids, position_ids=positions(None, 2, 20))
    found = found.logits if hasattr(found, "logits") else found.last_hidden_state
    assert (found - expected).abs().max() < 1e-4
    assert not logged()


@pytest.mark.parametrize("name", ["deepseek_v32", "mistral_large4"])
def test_chunks_of_a_prompt_are_the_whole(name):
    model, ids = small_model(name), prompt(2, 50)
    with trained_sparse(model):
        whole, parts = (in_chunks(model, "blitz_attn", ids, None, make_cache("dynamic", model, 50), sizes) for sizes in ([50], [20, 1, 13, 16]))
    assert (whole - parts).abs().max() < 1e-4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    """Indexers score 16-bit keys as they are: the products of 16-bit numbers are exact in float32."""
    model = copy.deepcopy(small_model("deepseek_v32")).to(dtype)
    ids = prompt(2, 40)
    expected = forward(copy.deepcopy(model).float(), "eager", ids)
    error = (forward(model, "eager", ids) - expected).norm() / expected.norm()
    with trained_sparse(model):
        assert (forward(model, "blitz_attn", ids) - expected).norm() / expected.norm() < 2 * error
    assert not logged()


# ---- What is replaced, and undone ------------------------------------------------------------------------------------


@pytest.fixture
def model():
    return copy.deepcopy(small_model("glm_moe_dsa"))


def test_undone_the_model_is_as_before(model):
    ids, before = prompt(2, 24), [dict(vars(module)) for module in model.modules()]
    own = {name: forward(model, name, ids) for name in ("eager", "sdpa", "blitz_attn")}
    first, second = trained_sparse(model), trained_sparse(model)
    assert vars(attentions(model)[0])["expand_kv"].__self__ is attentions(model)[0]
    assert all(torch.equal(forward(model, name, ids), own[name]) for name in ("eager", "sdpa"))
    replaced = forward(model, "blitz_attn", ids)
    assert not torch.equal(replaced, own["blitz_attn"])  # sums in another order
    first.undo()
    first.undo()
    assert torch.equal(forward(model, "blitz_attn", ids), replaced)
    second.undo()
    assert torch.equal(forward(model, "blitz_attn", ids), own["blitz_attn"])
    assert [vars(module).keys() for module in model.modules()] == [x.keys() for x in before]
    with pytest.raises(ZeroDivisionError), trained_sparse(model):
        raise ZeroDivisionError
    assert "expand_kv" not in vars(attentions(model)[0])


def test_a_copy_calls_its_own_modules(model):
    ids = prompt(2, 24)
    with trained_sparse(model):
        other = copy.deepcopy(model)
    with torch.no_grad():
        attentions(other)[0].kv_b_proj.weight.mul_(2)
    expected = forward(other, "eager", ids)
    assert (forward(other, "blitz_attn", ids) - expected).abs().max() < 1e-4


def test_methods_that_something_else_replaces_stay(model):
    """Hooks of accelerate, for example, replace methods, and call what they found."""
    ids, module = prompt(2, 24), attentions(model)[0].indexer
    own = forward(model, "blitz_attn", ids)
    handle = trained_sparse(model)
    inner, calls = module.forward, []
    module.forward = outer = lambda *given, **options: calls.append(1) or inner(*given, **options)
    replaced = forward(model, "blitz_attn", ids)
    handle.undo()
    assert module.forward is outer
    assert torch.equal(forward(model, "blitz_attn", ids), own)
    with trained_sparse(model):
        assert torch.equal(forward(model, "blitz_attn", ids), replaced)
    assert len(calls) == 3


def test_one_line_says_what_runs(model):
    with trained_sparse(model):
        (line,) = TOLD
    assert line == "GlmMoeDsaForCausalLM: tokens that the model chooses are chosen and attended by blitz_attn (2 of 2 GlmMoeDsaAttention)"


def test_other_models_are_refused():
    with pytest.raises(ValueError, match=r"^model: expected a model that was trained to choose its tokens, .*, got Linear$"):
        trained_sparse(torch.nn.Linear(2, 2))
    with pytest.raises(TypeError, match=r"^model: expected a model of transformers, got 3$"):
        trained_sparse(3)


# ---- What is left to the model ---------------------------------------------------------------------------------------


class Doubled(torch.nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class Squared:
    """An indexer with another formula, behind the same names."""

    def forward(self, hidden_states, q_resid, position_embeddings, attention_mask, position_ids, cache=None):
        q = self.wq_b(q_resid).unflatten(-1, (self.n_heads, self.head_dim))
        k = self.wk(hidden_states)
        k = k if cache is None else cache.update_indexer(k, self.layer_idx)
        scores = torch.matmul(q.float(), k.transpose(-1, -2).float().unsqueeze(1)).square().sum(2)
        hidden = ~attention_mask if attention_mask.dtype == torch.bool else attention_mask < 0
        return scores.masked_fill(hidden, float("-inf")).topk(min(6, k.shape[1]), dim=-1).indices.to(torch.int32)


def projection(model, monkeypatch):
    for module in attentions(model):
        new = Doubled(*module.kv_b_proj.weight.T.shape, bias=False)
        new.weight = module.kv_b_proj.weight
        module.kv_b_proj = new
    return "a projection that is no plain linear layer"


def expansion(model, monkeypatch):
    kind = type(attentions(model)[0])
    own = kind.expand_kv
    monkeypatch.setattr(kind, "expand_kv", lambda self, kv_nope, k_rot: own(self, 2 * kv_nope, k_rot))
    return "an expansion of its latents that is not known here"


def renamed(model, monkeypatch):
    for module in attentions(model):
        module.latent_dim = vars(module).pop("v_head_dim")
    monkeypatch.setattr(type(module), "expand_kv", _expand_renamed)
    return "an expansion of its latents that is not known here (AttributeError)"


def _expand_renamed(self, latent, k_rot):
    made = self.kv_b_proj(latent).unflatten(-1, (self.num_heads, -1))[:, 0].transpose(1, 2)
    key, value = made.split([self.qk_nope_head_dim, self.latent_dim], dim=-1)
    return torch.cat([key, k_rot.expand(-1, self.num_heads, -1, -1)], dim=-1), value


def formula(model, monkeypatch):
    monkeypatch.setattr(type(attentions(model)[0].indexer), "forward", Squared.forward)
    return "a step of its indexer that is not known here (square)"


@pytest.mark.parametrize("change", [projection, expansion, renamed, formula])
def test_what_is_not_known_is_left_to_the_model(model, change, monkeypatch):
    """The log names the unknown part, and the results are the model's own, also where the indexer's cache has its keys already."""
    reason = change(model, monkeypatch)
    ids = prompt(2, 24)
    expected = in_chunks(model, "eager", ids, None, make_cache("dynamic", model, 24), [16, 1, 7])
    with trained_sparse(model):
        found = in_chunks(model, "blitz_attn", ids, None, make_cache("dynamic", model, 24), [16, 1, 7])
    assert (found - expected).abs().max() < 1e-4
    assert any(text.endswith(f"because of {reason}") for text in logged())


def test_a_matrix_as_a_mask_is_left_to_the_model(model):
    ids = prompt(2, 24)
    expected = forward(model, "eager", ids)
    mask = torch.ones(2, 1, 24, 24, dtype=torch.bool).tril()
    with trained_sparse(model):
        found = forward(model, "blitz_attn", ids, attention_mask={"indexed_attention": mask})
    assert (found - expected).abs().max() < 1e-4
    assert any("because of a mask that was made as a matrix" in text for text in logged())


def test_under_autocast_the_model_chooses(model):
    with trained_sparse(model), torch.autocast("cpu", dtype=torch.bfloat16):
        forward(model, "blitz_attn", prompt(2, 24))
    assert any(text.endswith("because of torch.autocast, which rounds its scores") for text in logged())
    assert dsa.why_not(torch.empty(1, device="meta"), None) == "tensors on meta"


def test_the_part_of_a_mask_that_indexers_take_stays_a_rule():
    padding = torch.tensor([[1, 1, 1, 1], [0, 1, 1, 1]]).bool()
    mask = make_mask(2, 3, 4, 1, attention_mask=padding)
    for part in (mask[:, 0], mask[:, 0, :, :]):
        assert part.rules is mask.rules
        assert part.shape == (2, 3, 4)
        assert not mask._made
    assert torch.equal(part.elements(), mask.elements()[:, 0])
    assert torch.equal(~part, ~mask.elements()[:, 0])
    assert mask[:, :, 0].rules is None
    assert mask[0].rules is None


# ---- The cheaper way to compute -------------------------------------------------------------------------------------


def test_what_is_expanded_is_what_costs_less():
    """The sizes are those of DeepSeek-V3.2: 128 heads, latents of 512 and 64 numbers, keys and values of 128, and 2048 chosen tokens."""
    latents = Latents(None, torch.empty(1, 1, 1, 512), torch.empty(1, 1, 1, 64), *torch.empty(2, 128, 128, 512))
    edge = latents.rows_expanded(1, 1 << 20, 2048)
    assert 5000 < edge < 9000
    assert latents.rows_expanded(1, 4096, 2048) == 4096  # a prompt
    assert latents.rows_expanded(100, 1, 2048) == 0  # new tokens
    assert latents.rows_expanded(4000, 16, 2048) == 0
    assert latents.rows_expanded(edge, 4096, 2048) == latents.rows_expanded(2 * edge, 4096, 2048) == 0
    assert latents.rows_expanded(2049, 2048, 2048) == 2048  # a chunk


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("queries", [1, 3, 100])
def test_folded_queries_and_expanded_outputs(queries, dtype):
    """Two batch entries; in bfloat16, 200 outputs are expanded by another product than 2 or 6."""
    draw = torch.Generator().manual_seed(queries)
    of_keys, of_values = (torch.randn(5, n, 24, generator=draw).to(dtype) for n in (16, 12))
    latents = Latents(None, torch.empty(2, 1, 1, 24), torch.empty(2, 1, 1, 8), of_keys, of_values)
    query, out = torch.randn(2, 5, queries, 24, generator=draw).to(dtype), torch.randn(2, queries, 5, 24, generator=draw).to(dtype)
    folded = torch.einsum("bhqd,hdc->bhqc", query[..., :16].double(), of_keys.double())
    expected = torch.einsum("bqhc,hdc->bqhd", out.double(), of_values.double())
    tolerance = {"rtol": 0, "atol": 30 * torch.finfo(dtype).eps}
    torch.testing.assert_close(latents.folded(query).double(), torch.cat([folded, query[..., 16:].double()], dim=-1), **tolerance)
    torch.testing.assert_close(latents.unfolded(out).double(), expected, **tolerance)


# ---- Memory ----------------------------------------------------------------------------------------------------------

MEMORY = """
import resource, torch
from transformers.models.deepseek_v32 import modeling_deepseek_v32 as family, configuration_deepseek_v32 as configurations
from blitz_attn.integrations.transformers import register, trained_sparse
register()
torch.set_num_threads(1)
config = configurations.DeepseekV32Config(
    vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=8, num_key_value_heads=8, kv_lora_rank=16,
    q_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8, index_topk=32, index_n_heads=16, index_head_dim=16,
    mlp_layer_types=["dense"], attn_implementation="blitz_attn", max_position_embeddings=32768,
)
model = family.DeepseekV32Model(config).eval()
with torch.no_grad(), trained_sparse(model):
    for tokens in (8192, 16384):
        model(torch.zeros(1, tokens, dtype=torch.long), use_cache=False)
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def test_memory_is_linear_in_tokens():
    """At 16384 tokens, a mask of bool takes 256 MiB, the scores of one head take 1 GiB, and those of all heads of the indexer 16 GiB."""
    out = subprocess.run([sys.executable, "-W", "ignore", "-c", MEMORY], capture_output=True, text=True, timeout=300, check=True).stdout
    before, after = map(int, out.split())
    assert after - before < 100 << 10
