"""Masks of transformers as rules: each rule is compared with the elements that transformers makes."""

import random

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.0")

from transformers import masking_utils as masks  # noqa: E402

from blitz_attn.integrations._transformers.fallbacks import TOLD  # noqa: E402
from blitz_attn.integrations._transformers.masks import RuleMask, make_mask  # noqa: E402
from blitz_attn.integrations.transformers import SparseConfig, configure  # noqa: E402
from cases_transformers import (  # noqa: E402
    _defaults,  # noqa: F401
    call,
    eager,
    padded,
    pytestmark,  # noqa: F401
    seen_by_calls,
    tensors,
)

# ---- Masks ---------------------------------------------------------------------------------------------------------


def draw_runs(rng, kind, batch, tokens, room):
    """A mask function of chunks, of packed sequences, or of images in a text, possibly within a window. No image reaches into the `room` of a
    cache behind the last token, which calls do not see."""
    numbers = torch.tensor([sorted(rng.randint(0, 3) for _ in range(tokens)) for _ in range(batch)])
    causal = rng.choice([masks.causal_mask_function, masks.sliding_window_causal_mask_function(rng.randint(1, 6))])
    if kind == "chunks":
        return masks.chunked_causal_mask_function(rng.randint(1, 5), torch.tensor([rng.randint(0, 3) for _ in range(batch)]))
    if kind == "packed":
        return masks.and_masks(causal, masks.packed_sequence_mask_function(numbers))
    numbers = torch.where((numbers % 2 == rng.randint(0, 1)) & (torch.arange(tokens) < tokens - room), numbers, -1)
    images = masks.or_masks(causal, masks.blockwise_overlay(numbers))
    return images if rng.random() < 0.5 else masks.and_masks(masks.sliding_window_overlay(rng.randint(1, 6)), images)


@pytest.mark.parametrize("seed", range(40))
def test_runs_of_keys_equal_the_mask_of_sdpa(seed):
    rng = random.Random(seed)
    batch, queries = rng.randint(1, 3), rng.randint(1, 8)
    past, room = rng.choice([(0, 0), (rng.randint(1, 7), 0), (rng.randint(0, 4), rng.randint(1, 5))])
    kind = rng.choice(["chunks", "images", "packed"])
    if kind == "packed":  # packed sequences have no cache
        past = room = 0
    function = draw_runs(rng, kind, batch, past + queries + room, room)
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
def test_rules_equal_the_mask_of_sdpa(seed):
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


def test_padding_with_the_number_of_the_prefix():
    """In PaliGemma, the padding on the right has the same block number as the prefix, with the suffix between them."""
    numbers, valid = torch.tensor([[0, 0, 0, -1, -1, 0, 0], [0, 0, -1, -1, -1, -1, 0]]), torch.arange(7) < torch.tensor([[5], [6]])
    function = masks.or_masks(masks.causal_mask_function, masks.blockwise_overlay(numbers))
    mask = make_mask(2, 7, 7, mask_function=function, attention_mask=valid)
    expected = masks.sdpa_mask(2, 7, 7, mask_function=function, attention_mask=valid, allow_is_causal_skip=False)
    assert mask.rules is not None, mask.reason
    assert (seen_by_calls(mask) == expected[:, 0].numpy())[valid.numpy()].all()
