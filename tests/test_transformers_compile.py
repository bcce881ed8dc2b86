"""Models of transformers under torch.compile: attention is part of the graph, and results are those without a graph."""

import functools
import logging
import random

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.0")

from blitz_attn import select  # noqa: E402
from blitz_attn.integrations._transformers.attention import attend_dense  # noqa: E402
from blitz_attn.integrations._transformers.config import config_of_text  # noqa: E402
from blitz_attn.integrations._transformers.fallbacks import TOLD  # noqa: E402
from blitz_attn.integrations.transformers import SparseConfig, configure, paged_cache  # noqa: E402
from cases_transformers import eager, make_cache, padded, pytestmark, small_model  # noqa: E402

pytestmark = [*pytestmark, pytest.mark.filterwarnings("ignore::UserWarning")]
SPARSE = SparseConfig(density=0.5, block_shape=(8, 8), chooser=select.Pooled(pool=4), min_tokens=1)


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    TOLD.clear()
    configure(SPARSE)
    yield
    configure(SparseConfig())
    torch._dynamo.reset()


def tokens_of(batch=2, tokens=40, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).integers(3, 97, (batch, tokens)))


def both(model, implementation, ids, **options):
    """Logits without a graph, and with one graph of the whole model."""
    model.set_attn_implementation(implementation)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        found = compiled(ids, **options).logits
        return model(ids, **options).logits, found


SPARSE_OR_DENSE = [("blitz_attn_sparse", x) for x in ("none", "left", "right", "no cache")] + [("blitz_attn", "left")]


@pytest.mark.parametrize(("implementation", "padding"), SPARSE_OR_DENSE)
def test_a_model_is_one_graph(implementation, padding):
    ids = tokens_of()
    mask = padded(random.Random(3), padding, *ids.shape) if padding in ("left", "right") else None
    expected, found = both(small_model("llama"), implementation, ids, attention_mask=mask, use_cache=padding == "none")
    assert torch.equal(found, expected)
    assert not TOLD
    dense = small_model("llama")
    dense.set_attn_implementation("blitz_attn")
    with torch.no_grad():
        all_keys = dense(ids, attention_mask=mask).logits
    assert torch.equal(found, all_keys) == (implementation == "blitz_attn")  # the sparse implementation leaves blocks out


@pytest.mark.long
@pytest.mark.parametrize("name", ["qwen3", "mistral", "gemma2", "gemma3", "gpt_oss"])
def test_windows_softcaps_and_sinks_stand_in_the_graph(name):
    model, ids = small_model(name), tokens_of(seed=1)
    expected, found = both(model, "blitz_attn_sparse", ids, attention_mask=torch.ones_like(ids))
    assert torch.equal(found, expected)


def test_packed_sequences_are_found_when_the_graph_runs():
    """One graph serves sequences of any lengths, because their borders are elements of a tensor."""
    model, ids = small_model("llama"), tokens_of(1)
    model.set_attn_implementation("blitz_attn_sparse")
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        for lengths in ((40,), (13, 27), (1, 30, 9)):
            where = torch.cat([torch.arange(n) for n in lengths])[None]
            found = compiled(ids, position_ids=where, use_cache=False).logits
            assert torch.equal(found, model(ids, position_ids=where, use_cache=False).logits)


def test_steps_over_a_static_cache_are_one_graph():
    model, ids = small_model("llama"), tokens_of(2, 20)
    model.set_attn_implementation("blitz_attn_sparse")
    logits = []
    for compiles in (False, True):
        cache, got = make_cache("static", model, 20), []
        run = torch.compile(model, backend="eager", fullgraph=True) if compiles else model
        with torch.no_grad():
            for begin, end in ((0, 17), (17, 18), (18, 19), (19, 20)):
                got.append(run(ids[:, begin:end], past_key_values=cache).logits)
        logits.append(torch.cat(got, 1))
    assert torch.equal(*logits)


@pytest.mark.long
def test_layers_may_be_compiled_by_themselves():
    """If layers are compiled by themselves, the model makes the mask outside the graphs."""
    model, ids = small_model("llama"), tokens_of()
    model.set_attn_implementation("blitz_attn_sparse")
    mask = padded(random.Random(3), "left", *ids.shape)
    with torch.no_grad():
        expected = model(ids, attention_mask=mask).logits
        layers = list(model.model.layers)
        try:
            for layer in layers:
                layer.compile(backend="eager")
            found = model(ids, attention_mask=mask).logits
        finally:
            for layer in layers:
                layer._compiled_call_impl = None
    assert torch.equal(found, expected)


def test_shapes_are_known_to_later_compiler_passes():
    """aot_eager traces the operator with tensors without elements, and relies on the shapes that the operator returns."""
    model, ids = small_model("llama"), tokens_of()
    model.set_attn_implementation("blitz_attn_sparse")
    with torch.no_grad():
        expected = model(ids).logits
        found = torch.compile(model, backend="aot_eager", fullgraph=True)(ids).logits
    assert (found - expected).abs().max() < 1e-5


# ---- Graph breaks, and masks without rules ------------------------------------------------------------------------------


def reasons():
    """The reasons for graph breaks since the test began."""
    return list(torch._dynamo.utils.counters["graph_break"])


@pytest.mark.parametrize("holes", [False, True])
def test_a_model_that_adds_its_mask_says_so(holes):
    ids = tokens_of(2, 9)
    mask = torch.ones_like(ids)
    mask[:, 4] = not holes
    model = transformers.BloomForCausalLM(
        transformers.BloomConfig(vocab_size=97, hidden_size=48, n_layer=1, n_head=4, attn_implementation="blitz_attn")
    )
    sentence = '^attn_implementation: expected "eager", or another that the model supports, for a model with attention code of its own, '
    with torch.no_grad(), pytest.raises(ValueError, match=sentence):
        torch.compile(model, backend="eager")(ids, attention_mask=mask)


def test_a_traced_mask_cannot_be_used_as_a_tensor():
    from blitz_attn.integrations._transformers.masks import TracedMask

    mask = TracedMask((1, 1, 9, 9), True, None, None, None, None, 0, 0)
    for use in (lambda: torch.zeros(9) + mask, lambda: torch.zeros(9).masked_fill(mask, 0.0), lambda: mask[0], lambda: mask.dtype):
        with pytest.raises((ValueError, AttributeError), match='expected "eager", or another that the model supports, for a model with attention code of its own'):
            use()
    assert (mask.elements()[0, 0] == torch.ones(9, 9).tril()).all()


@pytest.mark.parametrize("form", ["holes", "bool", "numbers"])
def test_a_mask_without_rules_stands_in_the_graph(form):
    """Padding inside a sequence is noticed when the graph runs. A matrix as a mask is noticed when the graph is made."""
    model, ids = small_model("llama"), tokens_of(2, 9)
    mask = torch.ones_like(ids)
    mask[:, 4] = 0
    if form != "holes":
        mask = torch.ones(9, 9).tril().bool() & mask[:, None, None].bool()
    if form == "numbers":
        mask = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    expected, found = both(model, "blitz_attn", ids, attention_mask=mask)
    assert torch.equal(found, expected)
    model.set_attn_implementation("sdpa")
    with torch.no_grad():
        theirs = model(ids, attention_mask=mask).logits
    keep = torch.arange(9) != 4
    assert (found - theirs)[:, keep].abs().max() < 1e-4
    assert not TOLD


@pytest.mark.parametrize("masked", [False, True])
def test_a_position_bias_stands_in_the_graph(masked):
    layer = small_model("llama").model.layers[0].self_attn
    q, k, v, bias = (torch.randn(2, *shape) for shape in ((4, 9, 8), (2, 9, 8), (2, 9, 8), (4, 9, 9)))
    mask = torch.rand(2, 1, 9, 9) < 0.8 if masked else None
    run = lambda *x: attend_dense(layer, *x[:4], position_bias=x[4])[0]  # noqa: E731
    with torch.no_grad():
        found = torch.compile(run, backend="aot_eager", fullgraph=True)(q, k, v, mask, bias)
    assert torch.equal(found, run(q, k, v, mask, bias))
    seen = torch.ones(9, 9).tril().bool() if mask is None else mask
    assert (found - eager(q, k, v, seen, bias)).abs().max() < 1e-5
    assert not TOLD


@pytest.mark.long
def test_attention_that_is_differentiated_says_so_and_is_right():
    model, ids = small_model("llama"), tokens_of()
    model.set_attn_implementation("blitz_attn")
    grads = []
    for run in (model, torch.compile(model, backend="eager")):
        model.zero_grad()
        run(ids).logits.square().sum().backward()
        grads.append([p.grad.clone() for p in model.parameters()])
    assert all(torch.equal(*pair) for pair in zip(*grads, strict=True))
    assert any("blitz_attn: attention that is differentiated stands in no graph" in text for text in reasons())


@pytest.mark.long
def test_quest_over_a_paged_cache_says_so_and_is_right():
    model, ids = small_model("llama"), tokens_of(1, 30)
    configure(SparseConfig(density=0.5, block_shape=(8, 8), min_tokens=1, decode_budget=8))
    model.set_attn_implementation("blitz_attn_sparse")
    logits = []
    for run in (model, torch.compile(model, backend="eager")):
        cache = paged_cache(model, page_size=4)
        with torch.no_grad():
            run(ids[:, :29], past_key_values=cache)
            logits.append(run(ids[:, 29:], past_key_values=cache).logits)
    assert torch.equal(*logits)
    assert any("blitz_attn: the pages of a paged cache are no tensors of a graph" in text for text in reasons())


@pytest.mark.long
def test_what_falls_back_is_traced_and_said_once(caplog):
    """Differentiated attention with a matrix as its mask falls back to torch without breaking the graph."""
    model, ids = small_model("llama"), tokens_of()
    matrix = torch.ones(40, 40, dtype=torch.bool).tril()[None, None].expand(2, 1, -1, -1)
    model.set_attn_implementation("blitz_attn")
    with caplog.at_level(logging.WARNING, logger="blitz_attn.integrations.transformers"):
        found = torch.compile(model, backend="eager", fullgraph=True)(ids, attention_mask=matrix).logits
        assert (found - model(ids, attention_mask=matrix).logits).abs().max() < 1e-4
    assert [x.getMessage() for x in caplog.records] == [
        "LlamaAttention: attention by torch instead of blitz_attn, because of gradients beside a mask that was made as a matrix"
    ]


@pytest.mark.long
@pytest.mark.parametrize("name", ["gemma2", "gpt_oss"])
def test_softcaps_and_sinks_beside_holes_stand_in_the_graph(name):
    model, ids = small_model(name), tokens_of()
    holes = torch.ones_like(ids)
    holes[:, 5] = 0
    model.set_attn_implementation("blitz_attn")
    with torch.no_grad():
        expected = model(ids, attention_mask=holes).logits
        found = torch.compile(model, backend="eager")(ids, attention_mask=holes).logits
    keep = holes[..., None]
    assert ((found - expected) * keep).abs().max() < 1e-5


def test_unsupported_calls_may_be_errors_in_a_graph_too():
    model, ids = small_model("llama"), tokens_of()
    configure(SparseConfig(on_unsupported="error"))
    model.set_attn_implementation("blitz_attn")
    holes = torch.ones_like(ids)
    holes[:, 5] = 0
    packed = {name: torch.tensor([0, 30, 80]) for name in ("cu_seq_lens_q", "cu_seq_lens_k")}
    sentence = "expected attention that blitz_attn computes, got packed sequences beside padding between the tokens of a sequence"
    with torch.no_grad(), pytest.raises(ValueError, match=sentence):
        torch.compile(model, backend="eager")(ids, attention_mask=holes, **packed)


# ---- Configurations as text -----------------------------------------------------------------------------------------------


def test_a_new_configuration_holds_in_graphs_that_were_made_before():
    model, ids = small_model("llama"), tokens_of()
    model.set_attn_implementation("blitz_attn_sparse")
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        first = compiled(ids).logits
        configure(SparseConfig(density=1.0, block_shape=(8, 8), min_tokens=1))
        second = compiled(ids).logits
        model.set_attn_implementation("blitz_attn")
        assert torch.equal(second, model(ids).logits)
    assert not torch.equal(first, second)


PROFILE = select.Profile(4, 2, 16, (select.Pooled(4), select.SampledRows(2)), (8, 8), "top_p", ((0.5,) * 4, (1.0,) * 4), "mass", 0.9)


@pytest.mark.parametrize(
    "make",
    [
        SparseConfig,
        functools.partial(SparseConfig, density=np.float32(0.5), chooser="sampled_rows", block_shape=[16, 8], dense_layers=range(2)),
        functools.partial(SparseConfig, top_k=[3, 4], chooser=select.Pooled((4, 8), "bound", "mean"), decode_budget=7, num_threads=2),
        functools.partial(SparseConfig, profile=PROFILE, last_rows=1, on_unsupported="error"),
    ],
)
def test_a_configuration_is_its_text(make):
    config = make()
    again = config_of_text(config._text)
    assert again._text == config._text
    for layer in (0, 1):
        ours, theirs = (x._options(layer, 4, 2, 16) for x in (config, again))
        assert ours.keys() == theirs.keys()
        assert all(np.array_equal(ours[name], theirs[name]) if name != "chooser" else ours[name] == theirs[name] for name in ours)
