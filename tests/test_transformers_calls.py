"""Calls of the attention functions that are registered with transformers: the blocks and pages that they leave out, and refusals."""

from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.0")

from transformers import masking_utils as masks  # noqa: E402

from blitz_attn import reference, sabi, select  # noqa: E402
from blitz_attn.integrations import transformers as integration  # noqa: E402
from blitz_attn.integrations._transformers import attention  # noqa: E402
from blitz_attn.integrations._transformers.fallbacks import TOLD  # noqa: E402
from blitz_attn.integrations._transformers.masks import make_mask  # noqa: E402
from blitz_attn.integrations.transformers import SparseConfig, configure, paged_cache  # noqa: E402
from cases_transformers import (  # noqa: E402
    _defaults,  # noqa: F401
    call,
    eager,
    forward,
    pytestmark,  # noqa: F401
    small_model,
    tensors,
)

# ---- One call of the attention function ----------------------------------------------------------------------------


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 23])
@pytest.mark.parametrize("sides", ["none", "left", "right"])
def test_blocks_that_are_not_chosen_are_left_out(sides, window, softcap):
    """The result is float64 attention over the blocks that the chooser lists for the sequence without its padding."""
    q, k, v = tensors(1, 4, 37, 8), tensors(1, 2, 48, 8, seed=1), tensors(1, 2, 48, 8, seed=2)
    begin, end = {"none": (0, 48), "left": (5, 48), "right": (0, 43)}[sides]
    valid = torch.zeros(1, 48, dtype=torch.bool)
    valid[:, begin:end] = True
    function = masks.causal_mask_function if window is None else masks.sliding_window_causal_mask_function(window)
    mask = make_mask(1, 37, 48, 11, mask_function=function, attention_mask=valid)
    options = {"density": 0.4, "block_shape": (8, 4), "chooser": select.Pooled(pool=4), "sink": 0, "recent": 1}
    configure(SparseConfig(**options, min_tokens=1))
    capped = {"scaling": 1.5} | ({} if softcap is None else {"softcap": softcap})
    found = call(q, k, v, mask, "sparse", **capped)[0].double().numpy()
    queries = 37 - (48 - end)
    own_q, own_k, own_v = q[:, :, :queries], k[:, :, begin:end], v[:, :, begin:end]
    rules = {"causal": True, "window": None if window is None else (window - 1, -1), "scale": 1.5}
    lists = select.select_blocks_prefill(own_q.numpy(), own_k.numpy(), **options, **rules)
    seen = torch.from_numpy(sabi.to_token_mask(lists, queries, end - begin, (8, 4)))
    seen &= mask.elements()[:, :, :queries, begin:end]
    expected = eager(own_q, own_k, own_v, seen, scale=1.5, softcap=softcap)[0].numpy()
    assert np.abs(found[:queries] - expected).max() < 1e-5
    assert not found[queries:].any()
    dense = call(q, k, v, mask, **capped)[0].double().numpy()
    assert np.abs(dense[:queries] - expected).max() > 1e-3


def runs_of_tokens(kind, queries, keys, padding):
    """A mask in which each query sees a run of keys: chunks (Llama 4), an image in a text (Gemma 3, PaliGemma), or documents with padding."""
    valid = torch.ones(1, keys, dtype=torch.bool)
    valid[:, :padding] = False
    numbers = torch.full((1, keys), -1)
    numbers[:, 19:33] = 0
    parts = torch.arange(keys)[None] // 17
    function = {
        "chunks": lambda: masks.chunked_causal_mask_function(13, torch.tensor([padding])),
        "images": lambda: masks.or_masks(masks.causal_mask_function, masks.blockwise_overlay(numbers)),
        "documents": lambda: masks.and_masks(masks.causal_mask_function, masks.packed_sequence_mask_function(parts)),
    }[kind]()
    return make_mask(1, queries, keys, keys - queries, mask_function=function, attention_mask=valid)


@pytest.mark.parametrize(
    ("form", "kind", "past", "padding"),
    [
        ("rules", "chunks", 0, 0), ("rules", "chunks", 0, 5), ("rules", "chunks", 11, 5), ("rules", "images", 0, 0), ("rules", "documents", 0, 4),
        ("elements", "chunks", 0, 0), ("elements", "chunks", 11, 0), ("elements", "images", 0, 0),
    ],
)  # fmt: skip
def test_blocks_are_chosen_among_runs_of_keys(form, kind, past, padding):
    """The result is float64 attention over the blocks that the chooser lists for the runs of keys in the mask."""
    queries, keys = 48, 48 + past
    mask = runs_of_tokens(kind, queries, keys, padding)
    assert mask.rules.ranges is not None
    q, k, v = tensors(1, 4, queries, 8), tensors(1, 2, keys, 8, seed=1), tensors(1, 2, keys, 8, seed=2)
    seen = mask.elements()
    begin = padding  # padding is not part of the expected call
    options = {"density": 0.5, "block_shape": (8, 4), "chooser": select.Pooled(pool=4), "sink": 0, "recent": 1}
    configure(SparseConfig(**options, min_tokens=1, on_unsupported="error"))
    found = call(q, k, v, seen if form == "elements" else mask, "sparse").transpose(1, 2).numpy()
    real = slice(max(0, padding - past), None)
    arrays = [x.double().numpy() for x in (q, k[:, :, begin:], v[:, :, begin:])]
    ranges = mask.rules.ranges - begin if form == "rules" else sabi.kv_ranges_from_token_mask(seen[:, 0].numpy())
    rules = {"kv_ranges": np.where(np.arange(queries)[:, None] < padding - past, 0, ranges)}  # queries that are padding see nothing
    lists = select.select_blocks_prefill(q.numpy(), k[:, :, begin:].numpy(), **options, **rules)
    expected = reference.block_sparse_attention(*arrays, lists, block_shape=(8, 4), **rules)
    assert np.abs(found - expected)[:, :, real].max() < 1e-5
    dense = eager(q, k, v, seen).transpose(1, 2).numpy()
    assert np.abs(dense - expected)[:, :, real].max() > 1e-3
    configure(SparseConfig(**options | {"chooser": "vertical_slash"}, min_tokens=1, on_unsupported="error"))  # takes no ranges: dense
    found = call(q, k, v, mask, "sparse").transpose(1, 2).numpy()
    assert np.abs(dense - found)[:, :, real].max() < 1e-5


@pytest.mark.parametrize("budget", [{"top_k": 1, "sink": 0}, {"top_p": 0.6}, {"density": 0.4}, {"density": 0.3, "last_rows": 1}])
@pytest.mark.parametrize("kind", ["chunks", "images", "bidirectional"])
def test_padding_on_the_right_changes_no_choice(kind, budget):
    """For a short text, the same blocks are chosen with and without padding. In bidirectional models, padding attends the text, so that rows of
    padding count in a density: these cases are skipped."""
    if kind == "bidirectional" and "density" in budget:
        pytest.skip("rows of padding count")
    tokens, short = 64, 40
    q, k, v = tensors(2, 4, tokens, 8), tensors(2, 2, tokens, 8, seed=1), tensors(2, 2, tokens, 8, seed=2)

    def attend(entries, tokens, valid):
        numbers = torch.full((entries, tokens), -1)
        numbers[:, 19:33] = 0
        function = {
            "chunks": lambda: masks.chunked_causal_mask_function(13, torch.zeros(entries, dtype=torch.int64)),
            "images": lambda: masks.or_masks(masks.causal_mask_function, masks.blockwise_overlay(numbers)),
            "bidirectional": lambda: masks.bidirectional_mask_function,
        }[kind]()
        mask = make_mask(entries, tokens, tokens, mask_function=function, attention_mask=valid)
        return call(*(x[:entries, :, :tokens] for x in (q, k, v)), mask, "sparse", is_causal=kind != "bidirectional")

    valid = torch.ones(2, tokens, dtype=torch.bool)
    valid[0, short:] = False
    configure(SparseConfig(**budget, block_shape=(8, 8), chooser=select.Pooled(pool=4), recent=1, min_tokens=1, on_unsupported="error"))
    together, alone = attend(2, tokens, valid), attend(1, short, None)
    torch.testing.assert_close(together[:1, :short], alone, rtol=1e-5, atol=1e-6)
    configure(SparseConfig(density=1.0, block_shape=(8, 8), chooser=select.Pooled(pool=4), min_tokens=1, on_unsupported="error"))
    assert (attend(1, short, None) - alone).abs().max() > 1e-3


@pytest.mark.parametrize("starts", [(0, 0), (3, 0), (3, 3), (0, 9)])
def test_pages_that_quest_does_not_choose_are_left_out(starts):
    """A cache grows token by token, with padding on the left. Each step is compared with the float64 twin over pages without the padding."""
    cache = paged_cache(transformers.LlamaConfig(num_hidden_layers=1), page_size=4)
    keys, values = tensors(2, 2, 40, 8), tensors(2, 2, 40, 8, seed=1)
    configure(SparseConfig(min_tokens=1, decode_budget=12))
    valid = torch.ones(2, 40, dtype=torch.bool)
    for b, start in enumerate(starts):
        valid[b, :start] = False
    sinks = tensors(4, seed=3)
    cache.update(keys[:, :, :20], values[:, :, :20], 0)
    for length in [*range(21, 31), *range(25, 41)]:
        if cache.get_seq_length() == length + 5:  # six tokens are cropped, and replaced by others
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


@pytest.mark.parametrize("starts", [(0, 0), (3, 0), (3, 9)])
@pytest.mark.parametrize("tokens", [2, 5, 32])
def test_draft_tokens_attend_as_in_single_steps(tokens, starts):
    """Draft tokens have the bits of single steps, except a first draft below `min_tokens`, which attends all keys. Tokens after a prompt do
    not count as part of the prompt."""
    config = transformers.LlamaConfig(num_hidden_layers=1)
    total = 60
    keys, values, q = tensors(2, 2, total, 8), tensors(2, 2, total, 8, seed=1), tensors(2, 4, total, 8, seed=2)
    valid = torch.ones(2, total, dtype=torch.bool)
    for b, start in enumerate(starts):
        valid[b, :start] = False
    begin = total - tokens
    configure(SparseConfig(min_tokens=begin + 2, decode_budget=12, on_unsupported="error"))

    def step(cache, first, end):
        k, v = cache.update(keys[:, :, first:end], values[:, :, first:end], 0)
        return call(q[:, :, first:end], k, v, make_mask(2, end - first, end, first, attention_mask=valid[:, :end]), "sparse")

    one, many = (paged_cache(config, page_size=4) for _ in range(2))
    for cache in (one, many):
        cache.update(keys[:, :, :begin], values[:, :, :begin], 0)
    alone = torch.cat([step(one, n, n + 1) for n in range(begin, total)], 1)
    together = step(many, begin, total)
    assert torch.equal(alone[:, 1:], together[:, 1:])
    assert (alone[:, :1] - together[:, :1]).abs().max() < 1e-5  # the first token attends all keys
    many.crop(-(tokens - 1))  # one draft token is kept, and the others are replaced
    keys[:, :, begin + 1 :], values[:, :, begin + 1 :] = tensors(2, 2, 2, tokens - 1, 8, seed=5)
    one.crop(-(tokens - 1))
    alone = torch.cat([step(one, n, n + 1) for n in range(begin + 1, total)], 1)
    assert torch.equal(alone, step(many, begin + 1, total))


def test_a_budget_that_no_step_can_keep_is_reported():
    q, k, v = tensors(1, 4, 1, 8), tensors(1, 2, 20, 8, seed=1), tensors(1, 2, 20, 8, seed=2)
    mask = make_mask(1, 1, 20, 19)
    configure(SparseConfig(min_tokens=1, decode_budget=8))
    TOLD.clear()
    call(q, k, v, mask, "sparse")
    (text,) = TOLD
    assert text.endswith(
        "new tokens attend to all keys instead of decode_budget = 8, because of keys and values that are in no paged_cache"
    )
    configure(SparseConfig(min_tokens=1, decode_budget=8, on_unsupported="error"))
    with pytest.raises(
        ValueError, match=r"expected new tokens that can attend to decode_budget = 8 tokens, got keys and values that are in no"
    ):
        call(q, k, v, mask, "sparse")


# ---- Refusals ---------------------------------------------------------------------------------------------------------


def cached_layer():
    return paged_cache(small_model("llama")).layers[0]


def layer_without_number():
    configure(SparseConfig(profile=PROFILE, min_tokens=1))
    module = SimpleNamespace(is_causal=True, training=False, num_key_value_groups=2)
    return attention.attend_sparse(module, tensors(1, 4, 9, 16), tensors(1, 2, 9, 16), tensors(1, 2, 9, 16), make_mask(1, 9, 9))


PROFILE = select.Profile(4, 2, 16, select.Pooled(), (64, 64), "top_p", ((0.9,) * 4,) * 2, "mass", 0.9)
REFUSED = {
    "profile and budget": (
        lambda: SparseConfig(profile=PROFILE, top_p=0.9),
        "profile: expected no other budget with a profile, got top_p",
    ),
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
    "layer": (lambda: configure(SparseConfig(dense_layers=(2,)), small_model("llama")), "dense_layers: expected layers from 0 to 1, got 2"),
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


def test_a_profile_of_another_model_is_refused_in_the_call():
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
    assert seen[len(profile.numbers) :] == [0.9, 0.9]  # the model has the configuration of all models again


def test_a_version_whose_masks_have_no_offset_is_refused(monkeypatch):
    monkeypatch.setattr(masks, "sdpa_mask", lambda batch_size, cache_position: None)
    with pytest.raises(ImportError, match=r"^transformers: expected a version whose masks have a q_offset, such as 5\.24, got \d"):
        integration.register()


def test_a_paged_cache_keeps_no_gradients():
    model = small_model("llama")
    model.set_attn_implementation("blitz_attn")
    with pytest.raises(ValueError, match="expected a call under torch.no_grad"):
        model(torch.arange(3, 9)[None], past_key_values=paged_cache(model))


def test_a_cache_of_a_smaller_model():
    """The cache of a draft model is given to the larger model."""
    model = small_model("llama")
    cache = paged_cache(transformers.LlamaConfig(num_hidden_layers=1))
    sentence = (
        "^past_key_values: expected a paged_cache of the model itself, got one of a model with 1 layers for layer number 1, counted from 0$"
    )
    with pytest.raises(ValueError, match=sentence):
        forward(model, "blitz_attn", torch.arange(3, 9)[None], past_key_values=cache, use_cache=True)
