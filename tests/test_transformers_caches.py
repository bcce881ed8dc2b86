"""A paged cache replaces transformers' own: all that models and `generate` read from it is the same before, between and after steps."""

import copy
import pickle
import random

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.0")

from transformers import cache_utils  # noqa: E402

import blitz_attn  # noqa: E402
from blitz_attn.integrations._transformers import steps  # noqa: E402
from blitz_attn.integrations._transformers.cache import PagedLayer  # noqa: E402
from blitz_attn.integrations.transformers import SparseConfig, configure, paged_cache  # noqa: E402
from cases_transformers import SMALL, WINDOWED, in_chunks, pytestmark, small_model, tensors  # noqa: E402, F401

# Everything that models, masks and `generate` of transformers read from a cache, and from a layer of a cache.
READ = {
    "get_seq_length": lambda cache: [cache.get_seq_length(), *map(cache.get_seq_length, range(len(cache)))],
    "get_mask_sizes": lambda cache: [cache.get_mask_sizes(queries, n) for queries in (1, 5) for n in range(len(cache))],
    "get_max_length": lambda cache: [cache.get_max_length(), *map(cache.get_max_length, range(len(cache)))],
    "get_query_offset": lambda cache: list(map(cache.get_query_offset, range(len(cache)))),
    "is_recording_past": lambda cache: list(map(cache.is_recording_past, range(len(cache)))),
    "iter": lambda cache: [[getattr(x, "shape", x) for x in parts] for parts in cache if parts[0] is None or parts[0].numel()],
    "len": len,
} | {name: lambda cache, name=name: getattr(cache, name) for name in (
    "batch_size", "is_compileable", "is_croppable", "is_dummy", "is_initialized", "is_linear", "is_sliding", "offloading",
)}  # fmt: skip
READ_OF_LAYER = ("is_initialized", "is_compileable", "is_croppable", "is_sliding", "supports_early_init", "device")
METHODS = (
    "activate_past_recording", "batch_repeat_interleave", "batch_select_indices", "crop", "early_initialization", "get_conv_state",
    "get_recurrent_state", "has_previous_state", "offload", "prefetch", "reorder_cache", "reset", "update", "update_conv_state",
    "update_indexer", "update_recurrent_state",
)  # fmt: skip


def step(tokens, batch=2):
    """A change that appends the same keys and values to both layers of both caches."""

    def change(caches, rng):
        for layer in range(2):
            new = tensors(2, batch, 2, tokens, 8, seed=rng.randrange(1000))
            found, expected = (cache.update(*new, layer) for cache in caches)
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))

    return change


def each(name, *arguments):
    return lambda caches, rng: [getattr(cache, name)(*arguments) for cache in caches]


CHANGES = {
    "nothing": lambda caches, rng: None,
    "early": each("early_initialization", 2, 2, 8, torch.float32, torch.device("cpu")),
    "reorder of nothing": each("reorder_cache", torch.tensor([1, 0])),
    "a prompt": step(5),
    "a token": step(1),
    "crop": each("crop", -2),
    "crop of nothing": each("crop", 0),
    "draft tokens": step(3),
    "reorder": each("reorder_cache", torch.tensor([1, 1])),
    "repeat": each("batch_repeat_interleave", 2),
    "select": each("batch_select_indices", torch.tensor([3, 0])),
    "crop of all": each("crop", -7),
    "a token after all": step(1),
    "reset": each("reset"),
    "a prompt of another batch": step(4, batch=3),
}


def index_keys(batch, tokens):
    """A change that adds new keys of the model's own indexer to both caches."""

    def change(caches, rng):
        for layer in range(2):
            new = tensors(1, batch, 1, tokens, 6, seed=rng.randrange(1000))[0][:, 0]
            found, expected = (cache.update_indexer(new, layer) for cache in caches)
            assert torch.equal(found, expected)

    return change


# Changes of the caches of a model that chooses its own tokens: each step also brings keys of the model's indexer.
INDEXED = {
    "a prompt": step(5), "its keys": index_keys(2, 5), "a token": step(1), "its key": index_keys(2, 1), "crop": each("crop", -2),
    "crop of nothing": each("crop", 0), "drafts": step(9), "their keys": index_keys(2, 9), "reorder": each("reorder_cache", torch.tensor([1, 1])),
    "repeat": each("batch_repeat_interleave", 2), "select": each("batch_select_indices", torch.tensor([3, 0])), "reset": each("reset"),
    "keys first": index_keys(3, 4), "another prompt": step(4, batch=3), "crop of all": each("crop", -4),
}  # fmt: skip


def test_keys_of_an_indexer_are_kept_as_a_dynamic_cache_keeps_them():
    if not hasattr(transformers, "DeepseekV32Config"):
        pytest.skip(f"transformers {transformers.__version__} has no deepseek_v32")
    config = transformers.DeepseekV32Config(num_hidden_layers=2)
    ours, theirs = caches = paged_cache(config, page_size=4), transformers.DynamicCache(config=config)
    rng = random.Random(0)
    for name, change in INDEXED.items():
        for cache in caches:
            for layer in cache.layers:
                if layer.indexer_position_ids is None and layer.is_indexer_initialized:
                    batch, tokens = layer.indexer_keys.shape[:2]
                    layer.indexer_position_ids = torch.arange(3 * batch * tokens).reshape(3, batch, tokens)
        change(caches, rng)
        for a, b in zip(ours.layers, theirs.layers, strict=True):
            assert a.is_indexer_initialized == b.is_indexer_initialized, name
            for what in ("keys", "values", "indexer_keys", "indexer_position_ids"):
                x, y = getattr(a, what), getattr(b, what)
                assert (x is None) == (y is None), (name, what)
                if x is not None:
                    assert x.shape == y.shape, (name, what)
                    assert torch.equal(x, y), (name, what)


@pytest.mark.parametrize("kind", ["Llama", "Gemma2"])
def test_a_paged_cache_is_read_like_a_dynamic_cache(kind):
    """Both caches are compared after each of many changes in a row. The window never fills, because a cache with a full window cannot be cropped."""
    options = {**SMALL, "sliding_window": None} if kind == "Llama" else {**WINDOWED, "sliding_window": 20}
    config = getattr(transformers, f"{kind}Config")(**options)
    ours, theirs = caches = paged_cache(config, page_size=4), transformers.DynamicCache(config=config)
    assert any(isinstance(layer, PagedLayer) for layer in ours.layers)
    assert all(callable(getattr(ours, name)) for name in METHODS if hasattr(theirs, name))  # older versions have fewer
    rng = random.Random(0)
    for name, change in CHANGES.items():
        change(caches, rng)
        for what, read in READ.items():
            assert not (what in ("iter", "len") or hasattr(theirs, what)) or read(ours) == read(theirs), (name, what)
        for a, b in zip(ours.layers, theirs.layers, strict=True):
            for what in READ_OF_LAYER:
                assert getattr(a, what, None) == getattr(b, what, None) or name == "reset", (name, what)
            assert (a.keys is None) == (b.keys is None), name
            for x, y in ((a.keys, b.keys), (a.values, b.values)):
                if y is not None:
                    assert x.numel() == y.numel(), name
                    assert (x.dtype, x.device) == (y.dtype, y.device), name
                    assert y.numel() == 0 or torch.equal(x, y), name


def test_values_may_be_longer_than_an_early_initialization_says():
    """early_initialization gets only one head dim, for keys and values."""
    cache = paged_cache(transformers.LlamaConfig(**SMALL), page_size=4)
    cache.early_initialization(2, 2, 8, torch.float32, torch.device("cpu"))
    keys, values = tensors(2, 2, 3, 8), tensors(2, 2, 3, 12)
    found = cache.update(keys, values, 0)
    assert torch.equal(found[0], keys)
    assert torch.equal(found[1], values)


def test_a_prefix_that_sees_itself_is_the_first_step_alone():
    """If the cache were not initialized after the first step, the model would take later tokens of the prefix's kind for a part of the prefix."""
    config_class = getattr(transformers, "HrmTextConfig", None)
    if config_class is None:
        pytest.skip(f"transformers {transformers.__version__} has no HrmText")
    torch.manual_seed(0)
    model = transformers.HrmTextForCausalLM(config_class(**{**SMALL, "num_key_value_heads": 4}, H_cycles=1, L_cycles=1)).eval()
    ids = torch.arange(3, 12)[None]
    kinds = torch.ones(1, 11, dtype=torch.int64)
    logits = []
    for make in (lambda: transformers.DynamicCache(config=model.config), lambda: paged_cache(model, page_size=4)):
        cache = make()
        for implementation in ("eager", "blitz_attn"):
            model.set_attn_implementation(implementation)
            with torch.no_grad():
                model(ids, token_type_ids=kinds[:, :9], use_cache=True, past_key_values=cache)
                logits.append(model(ids[:, :2], token_type_ids=kinds, use_cache=True, past_key_values=cache).logits)
            cache.reset()
    for found in logits[1:]:
        assert (found - logits[0]).abs().max() < 1e-5


# ---- Models of encoder and decoder ----------------------------------------------------------------------------------------

OF_T5 = {
    "vocab_size": 97, "d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 4, "pad_token_id": 0,
    "decoder_start_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
OF_BART = {
    "vocab_size": 97, "d_model": 32, "encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "decoder_start_token_id": 1, "forced_eos_token_id": None,
}  # fmt: skip
OF_ENCODERS = {"T5": OF_T5, "UMT5": OF_T5, "Bart": OF_BART}
IDS = torch.arange(3, 43).reshape(2, 20)


def encoder_decoder(kind):
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(getattr(transformers, f"{kind}Config")(**OF_ENCODERS[kind])).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.normal_(std=0.3)
    return model


@pytest.mark.parametrize("beams", [1, 2])
@pytest.mark.parametrize("kind", OF_ENCODERS)
def test_a_paged_cache_of_an_encoder_decoder(kind, beams):
    """The cache is used by itself, and as either part of an `EncoderDecoderCache`."""
    model = encoder_decoder(kind)
    options = {"max_new_tokens": 7, "min_new_tokens": 7, "do_sample": False, "num_beams": beams}
    told = {"return_dict_in_generate": True, "output_logits": True}
    model.set_attn_implementation("eager")
    expected = model.generate(IDS, **options, **told)
    model.set_attn_implementation("blitz_attn")
    paged, dynamic = lambda: paged_cache(model, page_size=4), lambda: transformers.DynamicCache(config=model.config)
    pair = transformers.EncoderDecoderCache
    for cache in (paged(), pair(paged(), paged()), *([pair(paged(), dynamic()), pair(dynamic(), paged())] if beams == 1 else [])):
        found = model.generate(IDS, past_key_values=cache, **options, **told)
        assert torch.equal(found.sequences, expected.sequences)
        assert (torch.stack(found.logits) - torch.stack(expected.logits)).abs().nan_to_num(0).max() < 1e-3
        assert cache.get_seq_length() == 7


def test_a_paged_cache_of_an_encoder_decoder_is_read_as_one():
    model = encoder_decoder("Bart")
    cache = paged_cache(model, page_size=4)
    assert isinstance(cache, cache_utils.EncoderDecoderCache)
    assert not cache.is_initialized
    with torch.no_grad():
        model(IDS, decoder_input_ids=IDS[:, :5], use_cache=True, past_key_values=cache)
    assert cache.is_initialized
    assert cache.is_croppable
    assert (len(cache), cache.get_seq_length(), cache.get_max_length(), cache.get_query_offset()) == (3, 5, -1, 5)
    cache.crop(-2)
    assert cache.get_seq_length() == 3
    assert cache.cross_attention_cache.get_seq_length() == 20
    cache.batch_select_indices(torch.tensor([1]))
    assert {len(layer.keys) for part in (cache.self_attention_cache, cache.cross_attention_cache) for layer in part.layers} == {1}
    cache.reset()
    assert not cache.is_initialized
    assert cache.is_updated == dict.fromkeys(range(3), False)


def test_new_tokens_of_an_encoder_decoder_attend_to_chosen_pages():
    """Self-attention and cross-attention both attend to chosen pages: otherwise on_unsupported="error" would raise."""
    model = encoder_decoder("Bart")
    model.set_attn_implementation("blitz_attn_sparse")
    logits = []
    for budget in (8, 1000):
        configure(SparseConfig(density=1.0, min_tokens=1, decode_budget=budget, on_unsupported="error"))
        cache = paged_cache(model, page_size=4)
        with torch.no_grad():
            for n in range(16):
                found = model(IDS, decoder_input_ids=IDS[:, n : n + 1], use_cache=True, past_key_values=cache).logits
        logits.append(found)
    assert not torch.equal(*logits)


# ---- Chosen pages, and memory -----------------------------------------------------------------------------------------------


def by_hand(layer, q, starts, ends, budget, dense_below, rules):
    """The result of a layer's `select_and_attend`, query by query, by the library's functions over pages that are cut anew."""
    rows = []
    for b, t in np.ndindex(*q.shape[:2]):
        length = min(layer.length - q.shape[1] + t + 1, ends[b])
        if length <= starts[b] or layer.length - q.shape[1] + t >= ends[b]:  # padding
            rows.append(q.new_zeros(1, q.shape[2], layer.values.shape[3]))
            continue
        keys, values = (x[b, :, starts[b] : length].transpose(0, 1) for x in (layer.keys, layer.values))
        count = -(-len(keys) // layer.page_size)
        caches = []
        for x in (keys, values):
            cache = x.new_zeros(count * layer.page_size, *x.shape[1:])
            cache[: len(x)] = x
            caches.append(cache.unflatten(0, (count, layer.page_size)))
        tables, summary_tables, lens = np.arange(count)[None], np.array([[0]]), [len(keys)]
        source = tuple(caches[0].new_zeros(1, count, *caches[0].shape[2:]) for _ in range(2))
        blitz_attn.quest_prefill_metadata(caches[0], tables, lens, summary_tables, *source)
        blocks = count if len(keys) < dense_below - starts[b] else max(1, budget // layer.page_size)
        rows.append(blitz_attn.select_and_attend(q[b, t][None], *caches, tables, lens, source, summary_tables, k=blocks, **rules))
    return torch.cat(rows).unflatten(0, q.shape[:2])


@pytest.mark.parametrize("seed", range(12))
def test_chosen_pages_have_the_bits_of_the_library(seed):
    """All options are drawn together. Steps, drafts, crops and copies follow one another, so that buffers grow and summaries are kept."""
    rng = random.Random(seed)
    numbers = np.random.default_rng(seed)
    dtype = rng.choice([torch.float32, torch.bfloat16, torch.float16, torch.float64])
    (batch, kv_heads, group), (dim, value_dim) = (rng.randint(1, 3) for _ in range(3)), (rng.choice([8, 24]) for _ in range(2))
    layer = PagedLayer(rng.choice([4, 16]))
    starts, padded = ([rng.choice(choice) for _ in range(batch)] for choice in ([0, 0, 5, 90], [0, 0, 2]))
    draw = lambda tokens, heads, dim: torch.from_numpy(numbers.standard_normal((batch, tokens, heads, dim))).to(dtype)  # noqa: E731
    tokens = rng.randint(7, 50)
    with torch.no_grad():
        for _ in range(12):
            layer.update(*(draw(tokens, kv_heads, d).transpose(1, 2) for d in (dim, value_dim)))
            q = draw(min(tokens, rng.choice([1, 3])), kv_heads * group, dim)
            rules = {"scale": rng.choice([None, 0.3]), "softcap": rng.choice([None, 5.0])}
            rules["sinks"] = rng.choice([None, draw(1, q.shape[2], 1).flatten(1)[0].float()])
            budget, dense_below, ends = rng.choice([4, 16, 32]), rng.choice([0, layer.length - 1]), [layer.length - n for n in padded]
            begins = [min(n, layer.length) for n in starts]  # an entry may be padding to its end
            bounds, limits = list(zip(begins, ends, strict=True)), {"budget": budget, "dense_below": dense_below}
            found = layer.select_and_attend(q, bounds, **limits, num_threads=1, **rules)
            expected = by_hand(layer, q, begins, ends, budget, dense_below, rules)
            assert found.dtype == dtype
            assert torch.equal(found, expected)
            tokens = rng.choice([1, 1, 1, 4, 20])
            if rng.random() < 0.3:
                layer.crop(-rng.randint(1, 5))
            if rng.random() < 0.3:
                layer = rng.choice([copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])(layer)
            if rng.random() < 0.2:
                layer.reorder_cache(torch.tensor([rng.randrange(batch) for _ in range(batch)]))


def test_a_deep_copy_shares_nothing():
    layer = PagedLayer(4)
    q, new = tensors(1, 1, 4, 8), tensors(2, 1, 2, 1, 8)
    layer.update(*tensors(2, 1, 2, 30, 8, seed=1))
    attend = lambda x: x.select_and_attend(q, [(0, x.length)], budget=8, dense_below=0)  # noqa: E731
    attend(layer)
    copied = copy.deepcopy(layer)
    layer.update(*new)
    expected = attend(layer)
    layer.crop(-1)
    copied.update(*new)
    layer.update(*(-x for x in new))
    assert torch.equal(attend(copied), expected)
    assert not torch.equal(attend(layer), expected)


def test_layers_share_the_plan_of_a_step(monkeypatch):
    made = []
    plan = steps.PagedPlan
    monkeypatch.setattr(steps, "PagedPlan", lambda *a, **k: made.append(1) or plan(*a, **k))
    steps._step_of.cache_clear()
    model = small_model("llama")
    configure(SparseConfig(density=1.0, min_tokens=1, decode_budget=8, on_unsupported="error"))
    ids = torch.arange(3, 33)[None]
    in_chunks(model, "blitz_attn_sparse", ids, None, paged_cache(model, page_size=4), [20, *[1] * 10])
    assert len(model.model.layers) == 2
    assert len(made) == 10


def bytes_held(layer):
    """Bytes of all arrays that a layer holds. Memory that arrays share counts once."""
    pages = layer._pages
    held = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in (pages.keys, pages.values, *pages.views)}
    for group in pages.groups:
        for x in group:
            if isinstance(x, np.ndarray):
                begin, end = np.lib.array_utils.byte_bounds(x)
                if not any(a <= begin and end <= a + n for a, n in held.items()):
                    base = x.base if isinstance(x.base, np.ndarray) else x
                    held[base.ctypes.data] = base.nbytes
    return sum(held.values())


@pytest.mark.parametrize("prompt", [1024, 1025, 1087, 1090, 4000, 8100])
def test_pages_and_summaries_take_little_more_memory_than_a_dynamic_cache(prompt):
    """Pages of 64 tokens and their summaries take at most a tenth more memory than a dynamic cache, in each step."""
    layer, other = PagedLayer(64), cache_utils.DynamicLayer()
    new = [tensors(1, 1, prompt, 2, seed=n) for n in range(2)]
    other.update(*new)
    each_token = other.keys[:, :, :1].numel() * 4 * 2
    rooms = set()
    with torch.no_grad():
        for _ in range(200):
            layer.update(*new)
            assert bytes_held(layer) <= 1.1 * each_token * layer.length
            layer.select_and_attend(new[0][:, :, -1:], [(0, layer.length)], budget=64, dense_below=0)
            held = bytes_held(layer)
            assert held >= each_token * layer.length + layer._pages.groups[0].largest.nbytes * 2
            assert held <= 1.1 * each_token * layer.length
            rooms.add(layer._pages.keys.shape[1])
            new = [x[:, :, :1] for x in new]
    assert len(rooms) <= 5  # the room for pages has grown a few times: pages are not copied at every step
