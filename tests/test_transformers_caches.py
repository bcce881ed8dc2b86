"""A paged cache in place of transformers' own: everything that models and `generate` read from a cache, before, between and after steps."""

import random

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.0")

from transformers import cache_utils  # noqa: E402

from blitz_attn.integrations._transformers.cache import PagedLayer  # noqa: E402
from blitz_attn.integrations.transformers import SparseConfig, configure, paged_cache  # noqa: E402
from cases_transformers import SMALL, WINDOWED, tensors  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

# What models, masks and `generate` of transformers read from a cache, and from a layer of a cache.
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
    """Adds new keys of the model's own indexer to both caches."""

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
    """Both are compared after each of the changes, which follow each other. The window never fills, because a full one cannot be cropped."""
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
    """If its cache were not initialized after the first step, the model would count new tokens of the same kind as part of the prefix."""
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
    """Both self-attention and cross-attention do: otherwise on_unsupported="error" would raise."""
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
