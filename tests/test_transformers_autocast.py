"""Models of transformers under torch.autocast, in which rotary embeddings leave queries and keys in float32 while values have 16 bits."""

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.0")

from blitz_attn.integrations._transformers.cache import PagedLayer  # noqa: E402
from blitz_attn.integrations._transformers.fallbacks import TOLD  # noqa: E402
from blitz_attn.integrations.transformers import SparseConfig, configure, paged_cache  # noqa: E402
from cases_transformers import MODELS, _defaults, call, eager, forward, in_chunks, pytestmark, small_model, tensors  # noqa: E402, F401

LOW = [torch.bfloat16, torch.float16]
STEP = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
IDS = torch.arange(3, 43)[None] + torch.tensor([[0], [17]])


def far(found, expected):
    """The largest difference of logits, relative to the largest logit."""
    return ((found.float() - expected).abs().max() / expected.abs().max()).item()


def is_close(model, found, low):
    """Whether the error of the logits, against float32, is at most about twice the error of the model's own attention under autocast."""
    exact = forward(model, "eager", IDS)
    with torch.autocast("cpu", dtype=low):
        expected = forward(model, "eager", IDS)
    return found.dtype == expected.dtype and far(found, exact) < 2 * far(expected, exact) + 2 * STEP[low]


@pytest.mark.parametrize("low", LOW, ids=str)
@pytest.mark.parametrize("implementation", ["blitz_attn", "blitz_attn_sparse"])
@pytest.mark.parametrize("name", list(MODELS))
def test_models_do_not_fall_back(name, implementation, low):
    model = small_model(name)
    configure(SparseConfig(on_unsupported="error"), model)
    with torch.autocast("cpu", dtype=low):
        found = forward(model, implementation, IDS)
    assert is_close(model, found, low)
    assert not TOLD
    configure(None, model)


@pytest.mark.parametrize("low", LOW, ids=str)
@pytest.mark.parametrize("sparse", [False, True])
def test_one_call(sparse, low):
    """The result has the same bits as with tensors that are cast before the call. The values are already of autocast's dtype."""
    q, k, v = tensors(1, 4, 40, 8), tensors(1, 2, 40, 8, seed=1), tensors(1, 2, 40, 8, seed=2)
    configure(SparseConfig(density=0.4, block_shape=(8, 8), min_tokens=1, sink=0, recent=1, on_unsupported="error"))
    name = "sparse" if sparse else "dense"
    bias = 20 + tensors(1, 4, 40, 40, seed=3)
    for given in ({}, {} if sparse else {"position_bias": bias}):
        with torch.autocast("cpu", dtype=low):
            found = call(q, k, v.to(low), None, name, **given)
        assert torch.equal(found, call(*(x.to(low) for x in (q, k, v)), None, name, **{n: x.to(low) for n, x in given.items()}))
    with torch.autocast("cpu", dtype=low):
        with torch.autocast("cpu", enabled=False):
            assert call(q, k, v, None, name).dtype == torch.float32
        mask = (torch.rand(1, 1, 40, 40) < 0.7) | torch.eye(40, dtype=torch.bool)
        masked = call(q, k, v, torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min), name)
    assert (masked - eager(q, k, v, mask)).abs().max() < 8 * STEP[low]


@pytest.mark.parametrize("low", LOW, ids=str)
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
def test_training(name, low):
    """Gradients differ from those in float32 by hardly more than with the model's own attention."""
    model = small_model(name)
    configure(SparseConfig(on_unsupported="error"), model)

    def gradients(implementation, enabled):
        model.set_attn_implementation(implementation)
        model.zero_grad()
        with torch.autocast("cpu", dtype=low, enabled=enabled):
            loss = model(IDS, labels=IDS).loss
        loss.backward()
        return torch.cat([x.grad.flatten() for x in model.parameters() if x.grad is not None])

    exact, expected, found = (gradients(*x) for x in (("eager", False), ("eager", True), ("blitz_attn", True)))
    model.zero_grad()
    assert found.dtype == torch.float32
    assert (found - exact).norm() < 1.2 * (expected - exact).norm()
    assert not TOLD
    configure(None, model)


# ---- Caches -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("low", LOW, ids=str)
@pytest.mark.parametrize("implementation", ["blitz_attn", "blitz_attn_sparse", "sdpa"])
@pytest.mark.parametrize("kind", ["paged", "dynamic"])
def test_decoding(kind, implementation, low, monkeypatch):
    """Pages hold keys and values in autocast's dtype, so that steps do not cast them again."""
    model = small_model("llama")
    budget = 1000 if kind == "paged" else None
    configure(SparseConfig(on_unsupported="error", min_tokens=8, decode_budget=budget, top_p=1.0), model)
    steps, chosen = [30, *[1] * 10], []
    choose = PagedLayer.select_and_attend
    monkeypatch.setattr(
        PagedLayer, "select_and_attend", lambda self, q, *given, **options: chosen.append(q.dtype) or choose(self, q, *given, **options)
    )
    cache = paged_cache(model, page_size=4) if kind == "paged" else transformers.DynamicCache(config=model.config)
    with torch.autocast("cpu", dtype=low):
        found = in_chunks(model, implementation, IDS, None, cache, steps)
    if kind == "paged":
        assert all(x.dtype == low for layer in cache.layers for x in (layer.keys, layer.values))
    by_pages = kind == "paged" and implementation == "blitz_attn_sparse"
    assert chosen == ([low] * 20 if by_pages else [])
    assert is_close(model, found, low)
    assert not TOLD
    configure(None, model)


def test_a_cache_with_and_without_autocast():
    """Pages follow the dtype in which attention is computed."""
    model = small_model("llama")
    configure(SparseConfig(on_unsupported="error", min_tokens=8, decode_budget=1000), model)
    cache, parts, at = paged_cache(model, page_size=4), [], 0
    for size, enabled in ((20, True), (1, False), (9, False), (1, True), (1, True), (8, False)):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            parts.append(forward(model, "blitz_attn_sparse", IDS[:, at : at + size], past_key_values=cache, use_cache=True))
        assert {layer.keys.dtype for layer in cache.layers} == {torch.bfloat16 if enabled else torch.float32}
        at += size
    assert cache.get_seq_length() == 40
    assert is_close(model, torch.cat([x.bfloat16() for x in parts], 1), torch.bfloat16)
    assert not TOLD
    configure(None, model)


# ---- In a graph -------------------------------------------------------------------------------------------------------------


@pytest.mark.sampled("options")
@pytest.mark.parametrize("low", LOW, ids=str)
@pytest.mark.parametrize("implementation", ["blitz_attn", "blitz_attn_sparse"])
@pytest.mark.parametrize("around", [False, True], ids=["within", "around"])
def test_no_graph_break(implementation, low, around):
    torch.compiler.reset()
    model = small_model("llama")
    model.set_attn_implementation(implementation)

    def run(ids):
        with torch.autocast("cpu", dtype=low):
            return model(ids, use_cache=False).logits

    plain = lambda ids: model(ids, use_cache=False).logits  # noqa: E731
    compiled = torch.compile(plain if around else run, backend="aot_eager", fullgraph=True)
    with torch.no_grad(), torch.autocast("cpu", dtype=low, enabled=around):
        found = compiled(IDS)
    with torch.no_grad():
        assert torch.equal(found, run(IDS))
    assert is_close(model, found, low)
    assert not TOLD
