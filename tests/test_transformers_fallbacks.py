"""Calls of the attention functions that are registered with transformers, with unusual masks and options: they fall back to torch, or to the
elements of the mask, and compute what the model's own attention computes."""

import logging
import sys
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.0")

from transformers import masking_utils as masks  # noqa: E402

from blitz_attn import select  # noqa: E402
from blitz_attn.integrations._transformers import attention  # noqa: E402
from blitz_attn.integrations._transformers.fallbacks import TOLD  # noqa: E402
from blitz_attn.integrations._transformers.masks import RuleMask, TracedMask, make_mask  # noqa: E402
from blitz_attn.integrations.transformers import SparseConfig, configure, paged_cache  # noqa: E402
from cases_transformers import (  # noqa: E402
    _defaults,  # noqa: F401
    call,
    eager,
    forward,
    positions,
    pytestmark,  # noqa: F401
    seen_by_calls,
    small_model,
    tensors,
)


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


ELEMENTS = {  # masks without rules, and the reasons
    "holes": (holes, "padding between the tokens of a sequence"),
    "matrix": (matrix, None),
    "blocks in two parts": (lambda: blocks([0, 0, -1, 0, 0, 1, 1, -1, -1]), "blocks of tokens with other tokens between them"),
    "sequences or blocks": (lambda: blocks([0] * 9, with_sequences()), "a union of masks with packed sequences or padding"),
    "own": (own, "a mask function of the model's own (own)"),
    "two paddings": (lambda: make_mask(1, 9, 9, mask_function=with_padding(), attention_mask=ones(9)), "two masks of padding"),
}
if hasattr(masks, "remap_positions_for_packed_sequence"):  # transformers 5.20 has no such masks
    ELEMENTS["chunks in sequences"] = (chunks_in_sequences, "chunks or blocks that are counted in packed sequences")


@pytest.mark.parametrize("name", list(ELEMENTS))
@pytest.mark.parametrize("form", ["bool", "numbers", "bias"])
@pytest.mark.parametrize("implementation", ["dense", "sparse"])
def test_masks_without_rules_are_computed_by_their_elements(name, form, implementation):
    make, reason = ELEMENTS[name]
    mask = make()
    assert reason is None or (mask.rules is None and mask.reason.startswith(reason.removesuffix(")")))
    density = 1.0 if name == "sequences or blocks" else 0.2  # this mask shows all keys: each query sees a run of keys, among which blocks are chosen
    configure(SparseConfig(on_unsupported="error", min_tokens=1, density=density, block_shape=(4, 4), chooser=select.Pooled(pool=2)))
    q, k, v = tensors(2, 4, 9, 8), tensors(2, 2, 9, 8, seed=1), tensors(2, 2, 9, 8, seed=2)
    seen = mask.elements() if isinstance(mask, RuleMask) else mask
    bias = 3 * tensors(1, 4, 9, 9, seed=3) if form == "bias" else torch.zeros(1, 1, 9, 9)
    if form == "numbers":
        mask = masks_as_numbers(seen)
    options = {"position_bias": bias} if form == "bias" else {}
    assert (call(q, k, v, mask, implementation, **options) - eager(q, k, v, seen, bias)).abs().max() < 1e-5
    last = mask if isinstance(mask, RuleMask) and mask.rules is not None else (seen if isinstance(mask, RuleMask) else mask)[:, :, -1:]
    options = {name: x[:, :, -1:] for name, x in options.items()}
    assert (call(q[:, :, -1:], k, v, last, implementation, **options) - eager(q, k, v, seen, bias)[:, -1:]).abs().max() < 1e-5


def masks_as_numbers(seen):
    """A mask of numbers, as made by models that do not use the masks of transformers."""
    return torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(2, 4, 9, 11), (1, 4, 9, 11), (2, 1, 9, 11), (2, 1, 1, 11), (4, 1, 11), (9, 11)], ids=str)
def test_masks_of_any_numbers(shape, dtype):
    """Results and gradients are those of the SDPA function of transformers."""
    module = SimpleNamespace(layer_idx=0, is_causal=True, training=False, num_key_value_groups=2)
    bias = (3 * tensors(*shape, seed=3)).to(dtype)
    bias[..., 3] = -torch.inf
    found = []
    for function, wide in ((attention.attend_dense, dtype), (attention.sdpa_attention_forward, torch.float64)):
        given = [tensors(2, heads, n, 16, seed=n).to(dtype).to(wide).requires_grad_() for heads, n in ((4, 9), (2, 11), (2, 11))]
        out = function(module, *given, bias.to(wide))[0]
        found.append([out, *torch.autograd.grad(out.square().sum(), given)])
    assert not TOLD
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(
            ours.double(), theirs, **({"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 0.05, "atol": 0.1})
        )


@pytest.mark.parametrize("padding", ["none", "left", "right"])
@pytest.mark.parametrize("rule", [masks.causal_mask_function, masks.bidirectional_mask_function, masks.sliding_window_causal_mask_function(4)],
                         ids=["causal", "all", "window"])  # fmt: skip
@pytest.mark.parametrize("cached", [0, 5])
@pytest.mark.parametrize("shape", ["all", "heads", "keys"])
def test_a_position_bias_with_rules(padding, rule, cached, shape):
    """The rules of the mask apply once, and if padding on the left is cut off, the bias of the remaining keys is used."""
    valid = None if padding == "none" else torch.ones(2, 12, dtype=torch.bool)
    if valid is not None:
        valid[1, slice(4) if padding == "left" else slice(8, None)] = False
    mask = make_mask(2, 12 - cached, 12, cached, mask_function=rule, attention_mask=valid)
    assert mask.rules is not None
    bias = 3 * tensors(*{"all": (2, 4), "heads": (1, 4), "keys": (1, 1)}[shape], 12 - cached if shape != "keys" else 1, 12)
    q, k, v = tensors(2, 4, 12 - cached, 8), tensors(2, 2, 12, 8, seed=1), tensors(2, 2, 12, 8, seed=2)
    configure(SparseConfig(on_unsupported="error"))
    seen = mask.elements()
    rows = seen.any(-1)[:, 0] & (torch.ones(2, 12) if valid is None else valid)[:, cached:].bool()
    assert (call(q, k, v, mask, position_bias=bias) - eager(q, k, v, seen, bias))[rows].abs().max() < 1e-5
    if rule is masks.causal_mask_function and padding == "none" and not cached:  # equals a call without a mask
        assert torch.equal(call(q, k, v, None, position_bias=bias), call(q, k, v, mask, position_bias=bias))


@pytest.mark.parametrize("learned", ["mask", "position_bias"])
def test_a_mask_that_learns(learned):
    module = SimpleNamespace(layer_idx=0, is_causal=True, training=True)
    q, k, v, bias = (tensors(1, 2, 9, n, seed=n) for n in (8, 8, 8, 9))
    bias.requires_grad_()
    mask, options = (bias, {}) if learned == "mask" else (make_mask(1, 9, 9), {"position_bias": bias})
    out = attention.attend_dense(module, q, k, v, mask, **options)[0]
    seen = torch.ones(1, 1, 9, 9, dtype=torch.bool)
    seen = seen.tril() if learned == "position_bias" else seen
    right = eager(q, k, v, seen, bias)
    found, expected = (torch.autograd.grad(x.square().sum(), bias)[0] for x in (out, right))
    assert (out - right).abs().max() < 1e-5
    assert (found - expected).abs().max() < 1e-5
    with torch.no_grad():
        assert (attention.attend_dense(module, q, k, v, mask, **options)[0] - out).abs().max() < 1e-5
    assert not TOLD


def packed(mask):
    seen = torch.block_diag(torch.ones(3, 3), torch.ones(6, 6)).bool()
    return mask, seen & (mask.elements() if isinstance(mask, RuleMask) else mask)


CU = {name: torch.tensor([0, 3, 9]) for name in ("cu_seq_lens_q", "cu_seq_lens_k")}
FALLS_BACK = {
    "matrix": (lambda: packed(matrix()), CU, "because of packed sequences beside a mask that was made as a matrix"),
    "holes": (lambda: packed(holes()), CU, "because of packed sequences beside padding between the tokens of a sequence"),
    "position bias": (lambda: packed(make_mask(1, 9, 9, mask_function=with_sequences())), {"position_bias": torch.zeros(1, 4, 9, 9)},
        "because of packed sequences beside a position bias"),
}  # fmt: skip


@pytest.mark.parametrize("name", list(FALLS_BACK))
def test_what_is_not_supported_is_computed_by_torch_and_reported_once(name, caplog):
    make, options, reason = FALLS_BACK[name]
    q, k, v = tensors(1, 4, 9, 8), tensors(1, 2, 9, 8, seed=1), tensors(1, 2, 9, 8, seed=2)
    mask, elements = make()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            found = call(q, k, v, mask, **options)
            rows = elements.any(-1)[:, 0]
            assert (found - eager(q, k, v, elements))[rows].abs().max() < 1e-5
    assert len(caplog.records) == 1
    assert caplog.records[0].name == "blitz_attn.integrations.transformers"
    configure(SparseConfig(on_unsupported="error"))
    with pytest.raises(ValueError, match="expected attention that blitz_attn computes, got .*" + reason.removeprefix("because of ")):
        call(q, k, v, mask, **options)


def test_keys_that_the_model_chose_are_those_of_its_eager_attention():
    """DeepSeek-V3.2 and similar models pass the chosen keys of each query, and a mask that does not contain the choice."""
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
    with pytest.raises(
        ValueError, match="an eager attention function to fall back to because of the model's argument strange_bias, got none$"
    ):
        call(q, k, v, make_mask(1, 9, 9), strange_bias=3)


def test_masks_of_padding_and_of_one_chunk_have_rules():
    """A mask function of padding becomes padding of the batch, and one chunk over all tokens becomes no rule."""
    for function, options in ((with_padding(7), {}), (masks.chunked_causal_mask_function(9, torch.zeros(1, dtype=torch.long)), {})):
        mask = make_mask(1, 9, 9, mask_function=function, **options)
        assert mask.rules is not None, mask.reason
        expected = masks.sdpa_mask(1, 9, 9, mask_function=function, allow_is_causal_skip=False)
        assert (seen_by_calls(mask)[0, :7] == expected[0, 0, :7].numpy()).all()
        q, k, v = tensors(1, 4, 9, 8), tensors(1, 2, 9, 8, seed=1), tensors(1, 2, 9, 8, seed=2)
        assert (call(q, k, v, mask) - eager(q, k, v, expected))[:, :7].abs().max() < 1e-5
    assert not TOLD


def test_images_before_all_queries_need_no_ranges():
    """Queries of text after an image see what causal queries see, so that blocks and pages can be chosen as for text."""
    numbers = torch.tensor([[-1, 0, 0, 0, -1, -1, -1, -1, -1]])
    function = masks.or_masks(masks.causal_mask_function, masks.blockwise_overlay(numbers))
    for first, text in ((0, False), (4, True)):
        rules = make_mask(1, 9 - first, 9, q_offset=first, mask_function=function).rules
        assert (rules.ranges is None, rules.causal) == (text, text)


NO_CALLS = {
    "blocks of tokens that end before the queries": lambda: blocks([0, 0, 0]),
    "padding of 3 sequences for a batch of 2": lambda: make_mask(2, 9, 9, attention_mask=torch.ones(3, 9, dtype=torch.bool)),
}


@pytest.mark.parametrize("reason", NO_CALLS)
def test_masks_that_have_no_rules(reason):
    mask = NO_CALLS[reason]()
    assert (mask.rules, mask.reason) == (None, reason)


def test_a_mask_that_is_cut_nowhere_keeps_its_rules():
    """A slice that cuts nothing shares the mask's rules and elements. It is no view, which torch would refuse if gradients are recorded."""
    mask = make_mask(1, 9, 9)
    found = mask[:, :, :, :9]
    assert found.rules == mask.rules
    assert found.elements() is mask.elements()


@pytest.mark.parametrize(
    "rules", [{"causal": True, "left": 3}, {"causal": False, "left": 3, "right": 3}, {"causal": True}, {"causal": False}], ids=str
)
@pytest.mark.parametrize("packed", [None, [0] * 9, [0, 0, 0, 1, 1, 1, 2, 2, 2]], ids=["plain", "one", "packed"])
def test_a_traced_mask_keeps_its_rules(rules, packed):
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
    "a mask of integers": (lambda q, k, v: {"mask": torch.ones(1, 1, 9, 9, dtype=torch.int64)}, "a mask of torch.int64 on cpu"),
    "a mask for more keys": (lambda q, k, v: {"mask": torch.zeros(1, 1, 9, 10)},
        r"a mask of shape \(1, 1, 9, 10\) where the layer has \(1, 4, 9, 9\)"),
    "packed and padded": (
        lambda q, k, v: {
            "mask": make_mask(1, 9, 9, attention_mask=ones(9)), "cu_seq_lens_q": torch.tensor([0, 3, 9]),
                "cu_seq_lens_k": torch.tensor([0, 3, 9])
        },
        "packed sequences beside padding or a cache",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", list(UNSUPPORTED))
def test_what_is_not_supported_is_refused_on_request(name):
    change, reason = UNSUPPORTED[name]
    arguments = {"q": tensors(1, 4, 9, 8), "k": tensors(1, 2, 9, 8, seed=1), "v": tensors(1, 2, 9, 8, seed=2), "mask": make_mask(1, 9, 9)}
    arguments |= change(arguments["q"], arguments["k"], arguments["v"])
    configure(SparseConfig(on_unsupported="error"))
    with pytest.raises(ValueError, match=f"expected attention that blitz_attn computes, got {reason}$"):
        call(**arguments)


def test_gradients_with_a_softcap():
    """Gradients are computed without a fallback. No mask means a causal mask."""
    configure(SparseConfig(on_unsupported="error"))
    layer = small_model("gemma2").model.layers[0].self_attn
    q, k, v = tensors(1, 4, 9, 16).requires_grad_(), tensors(1, 2, 9, 16, seed=1), tensors(1, 2, 9, 16, seed=2)
    out = attention.attend_dense(layer, q, k, v, None, softcap=2.0, scaling=0.3)[0]
    wide = q.detach().double().requires_grad_()
    expected = eager(wide, k, v, torch.ones(9, 9, dtype=torch.bool).tril(), scale=0.3, softcap=2.0)
    assert (out - expected).abs().max() < 1e-5
    rest = tensors(*out.shape, seed=3)
    out.backward(rest)
    expected.backward(rest.double())
    assert (q.grad - wide.grad).abs().max() < 1e-5


@pytest.mark.parametrize("how", ["both sides", "packed"])
@pytest.mark.parametrize("sinks", [False, True])
def test_softcaps_without_a_causal_mask(how, sinks):
    """Encoders and packed sequences are compared with float64."""
    q, k, v = (tensors(1, n, 9, 8, seed=n) for n in (4, 2, 1))
    v = v.expand(1, 2, 9, 8)
    s_aux = tensors(4, seed=7) if sinks else None
    cu = torch.tensor([0, 4, 9], dtype=torch.int32)
    packed = {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu} if how == "packed" else {"is_causal": False}
    out = call(q, k, v, None, softcap=1.5, s_aux=s_aux, **packed)
    part = torch.tensor([0] * 4 + [1] * 5)
    seen = (part[:, None] == part) & torch.ones(9, 9).tril().bool() if how == "packed" else torch.ones(9, 9, dtype=torch.bool)
    assert (out - eager(q, k, v, seen, softcap=1.5, sinks=s_aux)).abs().max() < 1e-5
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
    for name in ("sdpa", "blitz_attn"):  # both draw the same random numbers
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
    """There may be pads between the blocks, and blocks that no query can see."""
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


BATCHES = {  # batch sizes of queries, keys, values and mask
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
    """In a mask without a cache, the first query has the position of the first key, even if there are more keys or queries."""
    mask = make_mask(1, queries, keys, mask_function=masks.sliding_window_bidirectional_mask_function(3))
    q, k, v = tensors(1, 2, queries, 8), tensors(1, 2, keys, 8, seed=1), tensors(1, 2, keys, 8, seed=2)
    found = call(q, k, v, mask)
    rows = mask.elements().any(-1)[:, 0]
    assert (found - eager(q, k, v, mask.elements()))[rows].abs().max() < 1e-5
    assert len(TOLD) == (queries != keys)


def test_given_values_replace_those_of_pages():
    """DiffLlama passes the keys of its cache together with other values."""
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
