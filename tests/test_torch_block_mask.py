"""Conversion of FlexAttention's BlockMask to and from block lists. flex_attention itself is the oracle, and similar rules are told apart."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch.nn.attention import flex_attention as flex  # noqa: E402

import blitz_attn  # noqa: E402
from blitz_attn import sabi  # noqa: E402
from blitz_attn.integrations.torch import (  # noqa: E402
    block_sparse_attention,
    from_flex_block_mask,
    scaled_dot_product_attention,
    to_flex_block_mask,
)

ENDS = torch.tensor([0, 19, 19, 50, 90])
DOCUMENTS = torch.searchsorted(ENDS[1:], torch.arange(90), right=True)
LENGTHS = torch.tensor([61, 90])


@pytest.fixture
def eager(monkeypatch):
    """Run flex_attention without its compiler, which takes seconds for each mask."""
    monkeypatch.setattr(flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)


def problem(queries=90, keys=90, batch=2, heads=2):
    torch.manual_seed(0)
    return [torch.randn(batch, heads, tokens, 16) for tokens in (queries, keys, keys)]


def seen_by(mask, batch, heads, queries, keys):
    """bool (B, H, Sq, Skv): the keys that a BlockMask shows each query, by its blocks and its function."""
    rows, columns = (-(-n // size) for n, size in zip((queries, keys), mask.BLOCK_SIZE, strict=True))
    full = torch.zeros(batch, heads, rows, columns, dtype=torch.bool)
    partial = full.clone()
    for blocks, count, index in ((partial, mask.kv_num_blocks, mask.kv_indices), (full, mask.full_kv_num_blocks, mask.full_kv_indices)):
        for b, h, r in np.ndindex(batch, heads, rows) if count is not None else ():
            at = b % count.shape[0], h % count.shape[1], r
            blocks[b, h, r, index[at][: count[at]].long()] = True

    def tokens(blocks):
        wide = blocks.repeat_interleave(mask.BLOCK_SIZE[0], 2).repeat_interleave(mask.BLOCK_SIZE[1], 3)
        return wide[:, :, :queries, :keys]

    return tokens(full) | (tokens(partial) & flex.create_mask(mask.mask_mod, batch, heads, queries, keys, device="cpu"))


def attended(options, q, k, v):
    """`block_sparse_attention` with the options made from a mask. If these have the layout TND, the arrays are packed."""
    if options.get("layout") == "TND":
        q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
        return block_sparse_attention(q, k, v, **options).transpose(0, 1)[None]
    return block_sparse_attention(q, k, v, **options)


def expected(q, k, v, seen):
    """Dense attention in float64 over the keys in `seen`; 0 for a query that sees none."""
    scores = (q.double() @ k.double().transpose(2, 3) / 4).masked_fill(~seen, -torch.inf)
    return torch.softmax(scores, -1).nan_to_num() @ v.double()


# ---- From a BlockMask -------------------------------------------------------------------------------------------------------


RULES = {  # the function of a mask, and arguments with the same meaning
    "causal": (lambda b, h, i, j: i >= j, {"causal": True, "window": None}),
    "window": (lambda b, h, i, j: (i >= j) & (i - j <= 21), {"causal": True, "window": (21, 0)}),
    "both sides": (lambda b, h, i, j: (i - j).abs() <= 21, {"causal": False, "window": (21, 21)}),
    "right alone": (lambda b, h, i, j: j - i <= 5, {"causal": False, "window": (-1, 5)}),
    "left alone": (lambda b, h, i, j: i - j <= 5, {"causal": False, "window": (5, -1)}),
    "all": (lambda b, h, i, j: i >= 0, {"causal": False, "window": None}),
    "padding": (lambda b, h, i, j: (i < LENGTHS[b]) & (j < LENGTHS[b]), {"causal": False, "window": None, "kv_lens": [61, 90]}),
    "causal padding": (lambda b, h, i, j: (i >= j) & (i < LENGTHS[b]), {"causal": True, "window": None, "q_lens": [61, 90]}),
    "strictly causal": (lambda b, h, i, j: i > j, {"causal": True, "window": None, "kv_lens": [89, 89]}),  # no query sees the last key
    "far keys": (lambda b, h, i, j: (i - j >= 9) & (i - j <= 20), {"causal": True, "window": (11, 0), "kv_lens": [81, 81]}),
    "heads": (lambda b, h, i, j: (i >= j) & ((j // 16 + h) % 2 == 0), {"causal": True, "window": None}),
}
RUNS = {
    "prefix": lambda b, h, i, j: (i >= j) | (j < 9),
    "a band before the diagonal": lambda b, h, i, j: (i - j >= 9) & (i - j < 20) & (i < LENGTHS[b]) & (j < 70),
    "two windows": lambda b, h, i, j: torch.where(i < 48, i - j <= 5, i - j <= 33) & (i >= j),
    "full blocks beyond the window": lambda b, h, i, j: torch.where(i < 48, i - j <= 5, i >= 0),
    "padding of keys alone, causal": lambda b, h, i, j: (i >= j) & (j < LENGTHS[b]),
    "documents that are not given": lambda b, h, i, j: (DOCUMENTS[i] == DOCUMENTS[j]) & (i >= j),
    "heads with lists of their own": lambda b, h, i, j: ((i >= j) | (j < 9)) & ((j // 16 + h) % 2 == 0),
}
NO_RULE = {
    "dilated": lambda b, h, i, j: (i - j) % 2 == 0,
    "by token": lambda b, h, i, j: (i >= j) & (j != 5),
    "beside whole blocks": lambda b, h, i, j: (i >= j) & ((j != 5) | (i > 40)),
    "runs that heads do not share": lambda b, h, i, j: (i >= j) & (i - j < 9 + 3 * h),
}


def arguments_of(mask_mod, block, batch=2):
    """A mask and the arguments made from it, after a check that attention with these arguments equals flex_attention and `expected`."""
    q, k, v = problem()
    mask = flex.create_block_mask(mask_mod, batch, 2, 90, 90, device="cpu", BLOCK_SIZE=block)
    options = from_flex_block_mask(mask)
    ours = attended(options, q, k, v)
    right = expected(q, k, v, flex.create_mask(mask_mod, 2, 2, 90, 90, device="cpu"))
    torch.testing.assert_close(ours.double(), right, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours, flex.flex_attention(q, k, v, block_mask=mask))
    return mask, options


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("block", [16, (32, 16)], ids=str)
def test_rules_are_recognised(name, block, eager):
    mask_mod, found = RULES[name]
    _, options = arguments_of(mask_mod, block)
    assert {key: x.tolist() if isinstance(x := options[key], torch.Tensor) else x for key in found} == found


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("block", [16, (32, 16)], ids=str)
def test_runs_of_keys_are_recognised(name, block, eager):
    mask, options = arguments_of(RUNS[name], block)
    assert options.keys() == {"sabi", "block_shape", "kv_ranges"}
    again = to_flex_block_mask(options["sabi"], 90, block_shape=options["block_shape"], kv_ranges=options["kv_ranges"])
    assert torch.equal(seen_by(again, 2, 2, 90, 90), seen_by(mask, 2, 2, 90, 90))


@pytest.mark.parametrize("name", NO_RULE)
@pytest.mark.parametrize("block", [16, (32, 16)], ids=str)
def test_masks_without_a_rule(name, block, eager):
    batch = None if "heads" in name else 2
    mask, options = arguments_of(NO_RULE[name], block, batch)
    assert options.keys() == {"sabi", "block_shape", "attn_mask"}
    assert (options["attn_mask"].dtype, options["attn_mask"].shape) == (torch.bool, (batch or 1, 2, 90, 90))
    sentence = "block_mask: expected partial blocks that causal and window cut exactly together with the given lengths or documents"
    with pytest.raises(ValueError, match=f"^{sentence}, got a mask_mod that cuts them otherwise$"):
        from_flex_block_mask(mask, kv_lens=[90] * mask.kv_num_blocks.shape[0])


def test_a_mask_without_a_function():
    """Partial blocks of such a mask count as full."""
    count, index = (torch.from_numpy(x) for x in sabi.to_num_idx(sabi.causal(96, block_shape=(16, 16)), 6))
    options = from_flex_block_mask(flex.BlockMask.from_kv_blocks(count, index, BLOCK_SIZE=16))
    assert (options["causal"], options["window"]) == (False, None)
    assert sabi.to_block_mask(options["sabi"], 6).tolist() == np.tri(6, dtype=bool)[None, None].tolist()


@pytest.mark.parametrize("block", [16, 10])
def test_documents(block, eager):
    def mask_mod(b, h, i, j):
        return (DOCUMENTS[i] == DOCUMENTS[j]) & (i >= j)

    mask = flex.create_block_mask(mask_mod, 1, 1, 90, 90, device="cpu", BLOCK_SIZE=block)
    options = from_flex_block_mask(mask, cu_seqlens_q=ENDS, cu_seqlens_kv=ENDS)
    assert options["causal"]
    assert options["window"] is options["sabi"] is None
    q, k, v = problem(batch=1)
    torch.testing.assert_close(attended(options, q, k, v), flex.flex_attention(q, k, v, block_mask=mask))


def test_documents_with_a_list():
    """If documents begin at block borders, each keeps its own listed blocks."""
    ends = torch.tensor([0, 64, 64, 112, 150])
    numbers = torch.searchsorted(ends[1:], torch.arange(150), right=True)
    first = torch.tensor([0, 0, 64, 112])  # the first token of each document

    def mask_mod(b, h, i, j):
        return (numbers[i] == numbers[j]) & (i >= j) & ((i // 16 == j // 16) | (j < first[numbers[j]] + 16))

    mask = flex.create_block_mask(mask_mod, 1, 1, 150, 150, device="cpu", BLOCK_SIZE=16)
    q, k, v = problem(150, 150, batch=1)
    options = from_flex_block_mask(mask, cu_seqlens_q=ends, cu_seqlens_kv=ends)
    assert options["sabi"].shape == (4, 1, 4, 2)
    torch.testing.assert_close(attended(options, q, k, v).double(), expected(q, k, v, seen_by(mask, 1, 2, 150, 150)), rtol=1e-5, atol=1e-5)
    cut = flex.create_block_mask(lambda b, h, i, j: mask_mod(b, h, i, j) & (i - j <= 20), 1, 1, 150, 150, device="cpu", BLOCK_SIZE=16)
    assert from_flex_block_mask(cut, cu_seqlens_q=ends, cu_seqlens_kv=ends)["window"] == (20, 0)


@pytest.mark.parametrize("mask_mod", [lambda b, h, i, j: i + 20 >= j, lambda b, h, i, j: i >= j, lambda b, h, i, j: (i >= j) | (j < 50)])
def test_a_mask_for_any_batch(mask_mod, eager):
    """The arguments fit any batch, even if no query sees the last keys. Lengths, which would hide these keys, need a given batch."""
    q, k, v = problem(70)
    mask = flex.create_block_mask(mask_mod, None, None, 70, 90, device="cpu", BLOCK_SIZE=16)
    ours = block_sparse_attention(q, k, v, **from_flex_block_mask(mask))
    torch.testing.assert_close(ours, flex.flex_attention(q, k, v, block_mask=mask))


def test_a_mask_that_hides_everything():
    mask = flex.create_block_mask(lambda b, h, i, j: i < 0, 1, 1, 90, 90, device="cpu", BLOCK_SIZE=16)
    options = from_flex_block_mask(mask)
    assert (options["causal"], options["window"]) == (False, None)
    q, k, v = problem(batch=1)
    assert (attended(options, q, k, v) == 0).all()


def test_a_mask_that_begins_beyond_the_diagonal():
    """The last queries see nothing. The diagonal fits only with fewer valid queries than keys, so that q_lens with all queries is refused."""
    mask = flex.create_block_mask(lambda b, h, i, j: j >= i + 3, 1, 1, 90, 90, device="cpu", BLOCK_SIZE=16)
    options = from_flex_block_mask(mask)
    q, k, v = problem(batch=1)
    ours = attended(options, q, k, v)
    torch.testing.assert_close(ours.double(), expected(q, k, v, seen_by(mask, 1, 2, 90, 90)), rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="^block_mask: expected partial blocks"):
        from_flex_block_mask(mask, q_lens=[90], kv_lens=[90])


def test_whole_blocks_beyond_the_lengths():
    """The mask shows all keys, including padding, which the given lengths would leave out."""
    mask = flex.create_block_mask(lambda b, h, i, j: i >= 0, 2, 1, 96, 96, device="cpu", BLOCK_SIZE=16)
    assert mask.kv_num_blocks.sum() == 0
    with pytest.raises(ValueError, match="^block_mask: expected "):
        from_flex_block_mask(mask, q_lens=[96, 96], kv_lens=[60, 96])


def test_padded_keys_of_a_mask_with_lengths():
    """A query that sees keys is not padding, wherever it is."""
    mask = flex.create_block_mask(lambda b, h, i, j: j < LENGTHS[b], 2, 1, 90, 90, device="cpu", BLOCK_SIZE=16)
    options = from_flex_block_mask(mask)
    assert (options["q_lens"].tolist(), options["kv_lens"].tolist()) == ([90, 90], [61, 90])
    with pytest.raises(ValueError, match="^block_mask: expected partial blocks"):
        from_flex_block_mask(mask, q_lens=[61, 90], kv_lens=[61, 90])


@pytest.mark.parametrize(
    ("options", "error", "sentence"),
    [
        ({"q_lens": [1]}, ValueError, r"q_lens: expected 2 lengths, got shape \(1,\)"),
        ({"kv_lens": [91, 0]}, ValueError, "kv_lens: expected lengths from 0 to 90, got 0 to 91"),
        ({"cu_seqlens_q": [0, 90]}, ValueError, "cu_seqlens_kv: expected the documents of both queries and keys, got None"),
        ({"cu_seqlens_q": [0, 90], "cu_seqlens_kv": [0, 80]}, ValueError, r"cu_seqlens_kv: expected numbers rising from 0 to 90, got \[0, 80\]"),
        ({"cu_seqlens_q": [0, 2**63 - 1, -(2**63), -1, 90], "cu_seqlens_kv": [0, 90]}, ValueError, r"cu_seqlens_q: expected numbers rising from 0 to 90, got \[0, 9"),
        ({"cu_seqlens_q": [0, 90], "cu_seqlens_kv": [0, 40, 90]}, ValueError, "cu_seqlens_kv: expected 2 numbers like cu_seqlens_q, got 3"),
        ({"cu_seqlens_q": [0, 90], "cu_seqlens_kv": [0, 90]}, ValueError, "block_mask: expected a mask of one packed sequence with documents, got one of a batch of 2"),
    ],
)  # fmt: skip
def test_bad_calls(options, error, sentence):
    mask = flex.create_block_mask(lambda b, h, i, j: i >= j, 2, 1, 90, 90, device="cpu", BLOCK_SIZE=16)
    with pytest.raises(error, match=f"^{sentence}"):
        from_flex_block_mask(mask, **options)


def test_other_bad_calls():
    with pytest.raises(TypeError, match="^block_mask: expected a BlockMask of torch.nn.attention.flex_attention, got int$"):
        from_flex_block_mask(3)

    def stubborn(b, h, i, j):
        return i >= j if i > 3 else j < 3

    mask = flex.create_block_mask(lambda b, h, i, j: i >= j, 1, 1, 90, 90, device="cpu", BLOCK_SIZE=16)
    mask.mask_mod = stubborn
    with pytest.raises(ValueError, match="^block_mask: expected a mask_mod that torch.vmap can evaluate, got one that raises: "):
        from_flex_block_mask(mask)
    ends = torch.tensor([0, 40, 90])
    numbers = torch.searchsorted(ends[1:], torch.arange(90), right=True)
    mask = flex.create_block_mask(
        lambda b, h, i, j: (numbers[i] == numbers[j]) & (i // 16 == j // 16), 1, 1, 90, 90, device="cpu", BLOCK_SIZE=16
    )
    with pytest.raises(
        ValueError,
        match="^block_mask: expected documents that begin with a block, or every block of them listed, got a list that leaves out",
    ):
        from_flex_block_mask(mask, cu_seqlens_q=ends, cu_seqlens_kv=ends)


# ---- To a BlockMask -------------------------------------------------------------------------------------------------------------

OPTIONS = {
    "lists": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window": (30, 0)},
    "both sides": {"window": (9, 40)},
    "lengths": {"causal": True, "q_lens": [50, 90], "kv_lens": [61, 90]},
    "dense, lengths": {"sabi": None, "kv_lens": [61, 90]},
}


@pytest.mark.parametrize("name", list(OPTIONS))
@pytest.mark.parametrize("lead", [(1, 1), (2, 2), (1, 2)], ids=str)
def test_lists_become_masks(name, lead, eager):
    """flex_attention with the mask gives the same result, the mask's blocks and function show the same tokens, and the mask can be converted back."""
    options = {"sabi": sabi.from_block_mask(np.random.default_rng(3).random((*lead, 6, 3)) < 0.5, dtype="int32")} | OPTIONS[name]
    q, k, v = problem()
    mask = to_flex_block_mask(s_q=90, block_shape=(16, 32), **options)
    ours = block_sparse_attention(q, k, v, block_shape=(16, 32), **options)
    torch.testing.assert_close(flex.flex_attention(q, k, v, block_mask=mask), ours)
    seen = seen_by(mask, 2, 2, 90, 90)
    torch.testing.assert_close(ours.double(), expected(q, k, v, seen), rtol=1e-5, atol=1e-5)
    assert torch.equal(seen, flex.create_mask(mask.mask_mod, 2, 2, 90, 90, device="cpu"))
    lengths = {name: options[name] for name in ("q_lens", "kv_lens") if name in options}
    if lengths.get("kv_lens") is None or mask.kv_num_blocks.shape[0] == 2:
        again = from_flex_block_mask(mask, **lengths)
        torch.testing.assert_close(block_sparse_attention(q, k, v, **again), ours)


def test_full_blocks_are_full():
    mask = to_flex_block_mask(None, 96, block_shape=(16, 16), causal=True)
    assert mask.full_kv_num_blocks.tolist() == [[[0, 1, 2, 3, 4, 5]]]
    assert mask.kv_num_blocks.tolist() == [[[1] * 6]]


@pytest.mark.parametrize("listed", [False, True])
def test_documents_become_masks(listed, eager):
    lists = sabi.from_block_mask(np.random.default_rng(4).random((4, 2, 3, 3)) < 0.6, dtype="int32") if listed else None
    rules = {"block_shape": (16, 16), "causal": True, "window": (20, 0), "cu_seqlens_q": ENDS, "cu_seqlens_kv": ENDS}
    mask = to_flex_block_mask(lists, 90, **rules)
    q, k, v = problem(batch=1)
    ours = attended({"sabi": lists, "layout": "TND", **rules}, q, k, v)
    torch.testing.assert_close(flex.flex_attention(q, k, v, block_mask=mask), ours)
    torch.testing.assert_close(ours.double(), expected(q, k, v, seen_by(mask, 1, 2, 90, 90)), rtol=1e-5, atol=1e-5)


def test_bad_lists():
    with pytest.raises(ValueError, match=r"^sabi: expected block columns from 0 to 5, or a pad, got 6 at \[0, 0, 0, 0\]"):
        to_flex_block_mask(np.full((1, 1, 6, 1), 6), 90, block_shape=(16, 16))
    with pytest.raises(ValueError, match=r"^kv_lens: expected the batch of sabi, q_lens and kv_ranges, got batches of \[2, 3\]"):
        to_flex_block_mask(np.zeros((3, 1, 6, 1), np.int32), 90, block_shape=(16, 16), kv_lens=[1, 2])
    with pytest.raises(ValueError, match="^q_lens: expected None with documents, got lengths$"):
        to_flex_block_mask(None, 90, q_lens=[3], cu_seqlens_q=ENDS, cu_seqlens_kv=ENDS)
    with pytest.raises(ValueError, match="^kv_ranges: expected None with documents, got ranges$"):
        to_flex_block_mask(None, 90, kv_ranges=np.zeros((90, 2), int), cu_seqlens_q=ENDS, cu_seqlens_kv=ENDS)
    with pytest.raises(ValueError, match=r"^kv_ranges: expected shape \(B, 90, 2\) or \(90, 2\), got \(9, 2\)"):
        to_flex_block_mask(None, 90, kv_ranges=np.zeros((9, 2), int))


def test_a_block_mask_as_an_argument_is_refused():
    """The sentence names the function that makes arguments from a BlockMask."""
    mask = flex.create_block_mask(lambda b, h, i, j: i >= j, None, None, 64, 64, device="cpu")
    q = torch.randn(1, 2, 64, 16)
    sentence = "expected an array, got a BlockMask: blitz_attn.integrations.torch.from_flex_block_mask makes arguments from it$"
    for call in (block_sparse_attention, scaled_dot_product_attention, blitz_attn.block_sparse_attention):
        for name in ("sabi", "attn_mask"):
            with pytest.raises(TypeError, match=f"^{name}: {sentence}"):
                call(q, q, q, **{name: mask})
    with pytest.raises(TypeError, match=f"^sabi: {sentence}"):
        blitz_attn.block_sparse_attention(q.numpy(), q.numpy(), q.numpy(), mask)
