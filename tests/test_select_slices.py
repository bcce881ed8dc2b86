"""Choosers of blocks for prefill where the queries are a slice of a longer sequence (`q_begin`)."""

import numpy as np
import pytest

import blitz_attn
from blitz_attn import reference, select, testing
from cases import DTYPES, bits_option, same_bits

CHOOSERS = {
    "pooled": select.Pooled(),
    "mean": select.Pooled((4, 16), "mean", "mean"),
    "antidiagonal": select.Antidiagonal(8),
    "sampled_rows": select.SampledRows(4),
    "vertical_slash": select.VerticalSlash(24),
}
BY_ROW = [{"top_p": 0.8}, {"threshold": 0.05}, {"top_k": 4}]
BUDGETS = [{"density": 0.4}, *BY_ROW]
Q, KV = 150, 170
BEGINS = [[20, 3], [-40, 100], [-500, 165], [200, 7], [2**30 - 1, -30]]  # the last of them show some queries, or all, no key in a window
RULES = {"all": {}, "causal": {"causal": True}, "window": {"window": (40, 12)}, "both": {"causal": True, "window": (70, 0)}}


def make(*sizes, seed=0, **options):
    return testing.make_qkv(*sizes, seed=seed, **options)[:2]


@pytest.mark.sampled("options")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("begins", range(len(BEGINS)))
@pytest.mark.parametrize("name", CHOOSERS)
def test_reference(isa_level, name, begins, rule, dtype):
    q, k = make(2, 4, 2, Q, KV, 24, dtype=dtype, seed=3)
    shared = {"chooser": CHOOSERS[name], "q_begin": BEGINS[begins], "kv_lens": [170, 120], "q_lens": [140, 150], "block_shape": (32, 32)}
    shared |= {"return_scores": True} | RULES[rule] | bits_option(q)
    for budget in BUDGETS:
        for frame in ({}, {"sink": 0, "recent": 3}, {"recent": 0, "first_rows": 1, "last_columns": 1}):
            sabi, scores = blitz_attn.select_blocks_prefill(q, k, **shared, **budget, **frame)
            expected_sabi, expected = reference.select_blocks_prefill(q, k, **shared, **budget, **frame)
            assert np.abs(scores - expected).max() < 1e-5
            assert ((scores > 0) <= (expected > 0)).all()
            assert ((sabi >= 0).sum() == (expected_sabi >= 0).sum()) or "density" not in budget
            if "top_k" in budget and dtype == "float64":
                assert same_bits(sabi, expected_sabi)


@pytest.mark.parametrize("budget", BUDGETS, ids=lambda x: next(iter(x)))
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", CHOOSERS)
def test_the_usual_place_changes_no_bit(name, rule, budget):
    q, k = make(2, 4, 2, Q, KV, 24, seed=6)
    options = {"chooser": CHOOSERS[name], "block_shape": (32, 32), "sink": 2, "last_columns": 1, "last_rows": 1, "return_scores": True}
    options |= budget | RULES[rule] | {"q_lens": [150, 90], "kv_lens": [170, 40]}
    usual = blitz_attn.select_blocks_prefill(q, k, **options)
    assert all(map(same_bits, blitz_attn.select_blocks_prefill(q, k, q_begin=[20, -50], **options), usual))


@pytest.mark.parametrize("budget", BY_ROW, ids=lambda x: next(iter(x)))
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", [name for name in CHOOSERS if name != "vertical_slash"])
def test_a_slice_has_the_lists_of_its_rows(name, rule, budget, isa_level):
    q, k = make(1, 4, 2, 290, 330, 32, dtype="bfloat16" if rule == "both" else "float32", seed=8)
    options = {"chooser": CHOOSERS[name], "block_shape": (32, 16), "return_scores": True} | budget | RULES[rule] | bits_option(q)
    lists, scores = blitz_attn.select_blocks_prefill(q, k, **options)
    for first, end in ((0, 32), (32, 288), (96, 290), (288, 290)):
        own, own_scores = blitz_attn.select_blocks_prefill(q[:, :, first:end], k, q_begin=first + 40, num_threads=2, **options)
        rows = slice(first // 32, -(-end // 32))
        assert same_bits(own_scores, scores[:, :, rows])
        assert same_bits(own, np.ascontiguousarray(lists[:, :, rows, : own.shape[3]]))
        assert (lists[:, :, rows, own.shape[3] :] == -1).all()


@pytest.mark.parametrize("name", CHOOSERS)
@pytest.mark.parametrize("budget", BUDGETS, ids=lambda x: next(iter(x)))
def test_same_bits(name, budget):
    """Whatever the number of threads, the layout, and what else is in the batch."""
    q, k = make(2, 4, 2, Q, KV, 32, seed=7)
    options = {"chooser": CHOOSERS[name], "block_shape": (32, 32), "causal": True, "return_scores": True} | budget
    begins = np.array([5, 60])
    lists, scores = blitz_attn.select_blocks_prefill(q, k, q_begin=begins, num_threads=1, **options)
    assert all(map(same_bits, (lists, scores), blitz_attn.select_blocks_prefill(q, k, q_begin=begins, num_threads=3, **options)))
    rows, keys = (np.ascontiguousarray(x.swapaxes(1, 2)) for x in (q, k))
    others = {
        "BSND": ((rows, keys), {}),
        "BSH": ((rows.reshape(2, Q, -1), keys.reshape(2, KV, -1)), {"num_heads": 4, "num_kv_heads": 2}),
        "TND": ((rows.reshape(-1, 4, 32), keys.reshape(-1, 2, 32)), {"cu_seqlens_q": [0, Q, 2 * Q], "cu_seqlens_kv": [0, KV, 2 * KV]}),
    }
    for layout, (arrays, sizes) in others.items():
        found = blitz_attn.select_blocks_prefill(*arrays, q_begin=begins, layout=layout, **sizes, **options)
        assert all(map(same_bits, (lists, scores), found))
    for b, begin in enumerate((5, 60)):
        own, own_scores = blitz_attn.select_blocks_prefill(q[b : b + 1], k[b : b + 1], q_begin=begin, **options)
        assert same_bits(own_scores, scores[b : b + 1])
        assert same_bits(own, np.ascontiguousarray(lists[b : b + 1, ..., : own.shape[3]]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_choosing_and_attending(dtype, isa_level):
    """The bits of the two calls with the same arguments; slices have those of the whole, rounded or not."""
    q, k, v = testing.make_qkv(2, 4, 2, 290, 330, 32, 16, dtype=dtype, seed=9)
    shared = {"causal": True, "block_shape": (32, 16), "return_lse": True} | bits_option(q)
    accumulated = {"out_dtype": None if dtype == "float64" else "float32"}
    whole = blitz_attn.select_and_attend_prefill(q, k, v, top_k=5, **shared, **accumulated)
    assert whole[0].dtype == (np.float64 if dtype == "float64" else np.float32)
    for first, end in ((0, 32), (32, 288), (288, 290)):
        part, given = q[:, :, first:end], {"q_begin": first + 40, "q_total": 290}
        *found, sabi = blitz_attn.select_and_attend_prefill(part, k, v, top_k=5, return_sabi=True, **given, **shared, **accumulated)
        assert all(same_bits(a, np.ascontiguousarray(b[:, :, first:end])) for a, b in zip(found, whole, strict=True))
        again = blitz_attn.block_sparse_attention(part, k, v, sabi, **given, **shared, **accumulated)
        assert all(map(same_bits, found, again))
        rounded = blitz_attn.select_and_attend_prefill(part, k, v, top_k=5, **given, **shared)
        assert same_bits(rounded[0], testing.round_to(testing.to_float64(found[0], str(found[0].dtype)), dtype))
        if dtype == "float64":
            twin = reference.select_and_attend_prefill(part, k, v, top_k=5, return_sabi=True, **given, **shared)
            assert same_bits(twin[2], sabi)
            np.testing.assert_allclose(twin[0], found[0], atol=1e-12)


def test_a_shift_for_each_sequence():
    q, k, v = testing.make_qkv(2, 4, 2, 64, 160, 32, 16)
    options = {"causal": True, "block_shape": (16, 16), "density": 0.5}
    both = blitz_attn.select_and_attend_prefill(q, k, v, q_begin=[10, 90], q_total=[160, 70], **options)
    for b, (begin, total) in enumerate(((10, 160), (90, 70))):
        own = blitz_attn.select_and_attend_prefill(*(x[b : b + 1] for x in (q, k, v)), q_begin=begin, q_total=total, **options)
        assert same_bits(own, both[b : b + 1])


@pytest.mark.parametrize(
    ("error", "sentence", "given"),
    [
        (ValueError, r"q_begin: expected 2 entries, one per batch entry, got 3", {"q_begin": [1, 2, 3]}),
        (ValueError, r"q_begin: expected token numbers from -1073741823 to 1073741823, got 1073741824 at \[1\]", {"q_begin": [1, 2**30]}),
        (TypeError, r"q_begin: expected", {"q_begin": 1.5}),
        (ValueError, r"q_total: expected .* got 63", {"q_total": 63}),
        (ValueError, r"out_dtype: expected 'float32' like q, got 'float16'", {"out_dtype": "float16"}),
    ],
)
def test_refusals(error, sentence, given):
    q, k, v = testing.make_qkv(2, 4, 2, 64, 160, 32, 32)
    out = np.full(q.shape, 7, np.float32)
    with pytest.raises(error, match=f"^{sentence}"):
        blitz_attn.select_and_attend_prefill(q, k, v, density=0.5, block_shape=(16, 16), out=out, **given)
    if "q_begin" in given:
        with pytest.raises(error, match=f"^{sentence}"):
            blitz_attn.select_blocks_prefill(q, k, density=0.5, block_shape=(16, 16), **given)
    assert (out == 7).all()
