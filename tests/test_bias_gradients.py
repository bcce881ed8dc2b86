"""Gradients of what is added to scores, `attn_mask` and `alibi_slopes`, against softmax attention in plain NumPy."""

import numpy as np
import pytest

import blitz_attn
from blitz_attn import reference, sabi, testing
from cases import DTYPES, bits_option, same_bits
from cases_masks import (
    BFLOAT16,
    KV,
    MASKS,
    SLOPES,
    UNIT,
    B,
    D,
    H,
    Q,
    attend,
    bias_of,
    distances,
    laid_out,
    mask_of,
    problem,
    score_gradients,
    slope_bias,
    softmax_of,
)

NUMBERS = [name for name in MASKS if not name.startswith("bool")]


def exact_gradient(q, k, v, dout, bias, softcap=None, dlse=0.0):
    """The gradient of what is added to each score, (B, H, Sq, Skv)."""
    k, v = (np.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
    p, out, _ = softmax_of(q, k, v, bias, softcap)
    return score_gradients(p, out, v, dout, dlse)


def of_mask(exact, shape):
    """The gradient of a mask of this shape: what its numbers are added to is summed."""
    four = (1,) * (4 - len(shape)) + tuple(shape)
    return exact.sum(axis=tuple(axis for axis, n in enumerate(four) if n == 1), keepdims=True).reshape(shape)


def of_slopes(exact, begin=None):
    return -(exact * distances(*exact.shape[2:], begin)).sum(axis=(0, 2, 3))


def upstream(dtype, q_len=Q, seed=9):
    dout = testing.make_qkv(B, H, H, q_len, q_len, D, dtype=dtype, seed=seed)[0]
    return dout, testing.to_float64(dout, dtype)


def near(found, right, dtype, terms=1):
    """`dtype`: that of the arrays; gradients have that of the mask. `terms`: how many numbers of one size are summed, roughly."""
    size = np.abs(right).max(initial=0)
    if dtype == "float64" and found.dtype == np.float32:
        dtype = "float32"
    np.testing.assert_allclose(testing.to_float64(found), right, rtol=2 * UNIT[dtype], atol=4 * UNIT[dtype] * max(size, np.sqrt(terms)))


@pytest.mark.sampled
@pytest.mark.parametrize("layout", ["BNSD", "BSND", "BSH", "TND"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NUMBERS)
def test_against_softmax(name, dtype, layout, isa_level):
    arrays, exact, options = problem(dtype, layout)
    mask = mask_of(name)
    dout, dout_exact = upstream(dtype)
    pairs = exact_gradient(*exact, dout_exact, bias_of(mask))
    result = attend(arrays, options, attn_mask=mask)
    given = {**options, "attn_mask": mask, "bias_grads": True}
    found = blitz_attn.block_sparse_attention_backward(laid_out(dout, layout), *arrays, *result, **given)
    twin = reference.block_sparse_attention_backward(laid_out(dout, layout), *arrays, *result, **given)
    usual = blitz_attn.block_sparse_attention_backward(laid_out(dout, layout), *arrays, *result, attn_mask=mask, **options)
    assert all(map(same_bits, found[:3], usual))
    for got in (found, twin):
        assert len(got) == 5
        assert got[3].shape == mask.shape
        assert got[4] is None
        near(got[3], of_mask(pairs, mask.shape), dtype, pairs.size / mask.size)
    assert found[3].dtype == mask.dtype


@pytest.mark.sampled
@pytest.mark.parametrize("given", ["slopes", "both"])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_slopes_and_a_softcap(dtype, softcap, given, isa_level):
    arrays, exact, options = problem(dtype, "BNSD")
    mask = mask_of("per head") if given == "both" else None
    dout, dout_exact = upstream(dtype)
    bias = slope_bias(Q, KV, SLOPES / 8) + (0 if mask is None else bias_of(mask))
    dlse = np.random.default_rng(4).standard_normal((B, H, Q)).astype("float64" if dtype == "float64" else "float32")
    pairs = exact_gradient(*exact, dout_exact, bias, softcap, dlse[..., None])
    options |= {"attn_mask": mask, "alibi_slopes": SLOPES / 8, "softcap": softcap}
    result = blitz_attn.block_sparse_attention(*arrays, return_lse=True, **options)
    for module in (blitz_attn, reference):
        *_, dmask, dslopes = module.block_sparse_attention_backward(dout, *arrays, *result, dlse=dlse, bias_grads=True, **options)
        assert dslopes.shape == (H,)
        near(dslopes, of_slopes(pairs), dtype, B * Q * KV * 50)
        assert (dmask is None) == (mask is None)
        if mask is not None:
            near(dmask, of_mask(pairs, mask.shape), dtype, B)


@pytest.mark.sampled
@pytest.mark.parametrize("block_shape", [(1, 1), (16, 32), (64, 64), (300, 300)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("name", ["per head", "per head and key", "per query", "a number"])
def test_beside_lists_and_other_rules(name, dtype, block_shape, isa_level):
    q_len = 60 if block_shape == (1, 1) else Q
    arrays, exact, options = problem(dtype, "BNSD", q_len)
    mask = mask_of(name, q_len=q_len)
    lists = sabi.random_with_frame(q_len, KV, block_shape, 0.4, seed=3)
    options |= {"causal": True, "window": (90, 0), "q_lens": [q_len, q_len // 2], "kv_lens": [KV, 150], "block_shape": block_shape}
    bias = np.zeros((B, H, q_len, KV))
    for b, (n, kv_len) in enumerate(zip(options["q_lens"], options["kv_lens"], strict=True)):
        i, j = np.arange(q_len)[:, None], np.arange(KV)
        away = j - (i + kv_len - n)
        seen = (away <= 0) & (away >= -90) & (j < kv_len) & (i < n)
        bias[b] = np.where(seen & testing.token_mask(lists, q_len, KV, block_shape)[0], 0, -np.inf)
    dout, dout_exact = upstream(dtype, q_len)
    pairs = exact_gradient(*exact, dout_exact, bias + bias_of(mask))
    result = blitz_attn.block_sparse_attention(*arrays, lists, attn_mask=mask, return_lse=True, **options)
    for module in (blitz_attn, reference):
        found = module.block_sparse_attention_backward(dout, *arrays, *result, lists, attn_mask=mask, bias_grads=True, **options)
        near(found[3], of_mask(pairs, mask.shape), dtype, pairs.size / mask.size)


@pytest.mark.sampled
@pytest.mark.parametrize("mask_dtype", ["float32", "float16", BFLOAT16, "float64"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_of_a_mask(dtype, mask_dtype):
    arrays, exact, options = problem(dtype, "BSND", 70)
    mask = testing.round_to(mask_of("all axes", q_len=70), mask_dtype)
    dout, dout_exact = upstream(dtype, 70)
    right = of_mask(exact_gradient(*exact, dout_exact, bias_of(mask)), mask.shape)
    result = attend(arrays, options, attn_mask=mask)
    found = blitz_attn.block_sparse_attention_backward(laid_out(dout, "BSND"), *arrays, *result, attn_mask=mask, bias_grads=True, **options)[3]
    assert found.dtype == mask.dtype
    near(found, right, max(dtype, mask_dtype, key=UNIT.__getitem__))
    assert not testing.to_float64(found)[testing.to_float64(mask) == -np.inf].any()


@pytest.mark.parametrize("shape", [(1, 1, 7, 9), (1, 1, 1, 9), (1, 1, 7, 1), (2, 7, 9), (1,)])
def test_finite_differences(shape):
    """The loss changes with a number of the mask, and with a slope, as the gradients say."""
    rng = np.random.default_rng(1)
    q, dout = rng.standard_normal((2, 1, 2, 7, 5))
    k, v = rng.standard_normal((2, 1, 1, 9, 5))
    direction, slopes = rng.standard_normal(shape), np.float32([0.3, 0.1])
    mask = rng.standard_normal(shape)
    rules = {"softcap": 2.0, "causal": True}

    def loss(step, slope=slopes):
        return (blitz_attn.block_sparse_attention(q, k, v, attn_mask=mask + step * direction, alibi_slopes=slope, **rules) * dout).sum()

    options = rules | {"attn_mask": mask, "alibi_slopes": slopes}
    result = blitz_attn.block_sparse_attention(q, k, v, return_lse=True, **options)
    dmask, dslopes = blitz_attn.block_sparse_attention_backward(dout, q, k, v, *result, bias_grads=True, **options)[3:]
    assert (loss(1e-6) - loss(-1e-6)) / 2e-6 == pytest.approx((dmask * direction).sum(), abs=1e-7)
    up, down = (slopes + np.float32([s, 0]) for s in (2**-12, -(2**-12)))
    assert (loss(0, up) - loss(0, down)) * 2**11 == pytest.approx(float(dslopes[0]), rel=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(1, 1, 300, 700), (3, 1, 1, 700), (1, 4, 300, 1), (4, 300, 700), ()])
def test_bits_depend_on_no_thread(shape, dtype, isa_level):
    q, k, v = testing.make_qkv(3, 4, 2, 300, 700, 16, dtype=dtype)
    dout = testing.make_qkv(3, 4, 2, 300, 700, 16, dtype=dtype, seed=1)[0]
    rng = np.random.default_rng(0)
    options = bits_option(q) | {"attn_mask": rng.standard_normal(shape or (1,), dtype=np.float32), "alibi_slopes": [0.1, 0.2, 0.0, -0.1]}
    result = blitz_attn.block_sparse_attention(q, k, v, return_lse=True, **options)
    one, three = (
        blitz_attn.block_sparse_attention_backward(dout, q, k, v, *result, bias_grads=True, num_threads=n, **options) for n in (1, 3)
    )
    assert all(map(same_bits, one, three))


def test_what_is_not_seen_adds_nothing(isa_level):
    """NaN in keys and values that no query sees, in queries behind the last one, and in places of the mask that other rules hide."""
    rng = np.random.default_rng(0)
    q, dout = rng.standard_normal((2, 2, 4, 90, 24), dtype=np.float32)
    k, v = rng.standard_normal((2, 2, 2, 140, 24), dtype=np.float32)
    mask = rng.standard_normal((1, 4, 90, 140), dtype=np.float32)
    options = {"causal": True, "q_lens": [90, 40], "kv_lens": [140, 100]}
    hidden = mask.copy()
    hidden[:, :, :, 30:50] = -np.inf
    hidden[:, :, :40, 137:] = np.nan  # behind the diagonal of every query
    poisoned = [x.copy() for x in (q, k, v, dout)]
    for x, last in zip(poisoned, (40, 100, 100, 40), strict=True):
        x[1, :, last:] = np.nan
    for x in poisoned[1:3]:
        x[:, :, 30:50] = np.nan
    results = []
    for arrays, given in (((q, k, v, dout), np.where(np.isnan(hidden), 0, hidden)), (poisoned, hidden)):
        out, lse = blitz_attn.block_sparse_attention(*arrays[:3], attn_mask=given, return_lse=True, **options)
        results.append(
            blitz_attn.block_sparse_attention_backward(arrays[3], *arrays[:3], out, lse, attn_mask=given, bias_grads=True, **options)[3]
        )
    assert np.isfinite(results[1]).all()
    assert same_bits(*results)
    assert not results[0][..., 30:50].any()


@pytest.mark.parametrize("shape", [(16, 8), (2, 16, 8), (16, 1), (1, 8)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_places_behind_short_sequences_add_nothing(shape, dtype, isa_level):
    """Packed sequences of different lengths: a large bias of the last query of the short one, and NaN in a key that it does not see."""
    q_cuts, kv_cuts = [0, 16, 19, 19], [0, 8, 16, 20]
    q, k, v = testing.make_qkv(1, 2, 1, 19, 20, 16, 16, dtype=dtype)
    dout = testing.make_qkv(1, 2, 2, 19, 19, 16, dtype=dtype, seed=9)[0]
    q, k, v, dout = (np.ascontiguousarray(x[0].swapaxes(0, 1)) for x in (q, k, v, dout))
    mask = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    mask[..., min(2, shape[-2] - 1), :] += 100
    ranges = np.tile([0, 20], (19, 1))
    ranges[16], ranges[17:] = [0, 5], [6, 8]

    def gradients(layout, mask, ranges, arrays, **rules):
        *arrays, dout = arrays
        rules |= {"layout": layout, "attn_mask": mask, "alibi_slopes": -SLOPES[:2], "kv_ranges": ranges} | bits_option(q)
        out, lse = blitz_attn.block_sparse_attention(*arrays, return_lse=True, **rules)
        return blitz_attn.block_sparse_attention_backward(dout, *arrays, out, lse, bias_grads=True, **rules)

    expected, slopes = np.zeros(shape), np.zeros(2)
    for n in range(2):
        queries, keys = slice(*q_cuts[n : n + 2]), slice(*kv_cuts[n : n + 2])
        count = queries.stop - queries.start
        part = (..., slice(count), slice(None))
        arrays = [x[at].swapaxes(0, 1)[None] for x, at in zip((q, k, v, dout), (queries, keys, keys, queries), strict=True)]
        found = gradients("BNSD", mask[part], ranges[queries], arrays)
        expected[part] += found[3]
        slopes += found[4]
    k[13] = v[13] = np.array(np.nan, np.float32) if dtype == "float32" else 0x7FC0
    found = gradients("TND", mask, ranges, (q, k, v, dout), cu_seqlens_q=q_cuts, cu_seqlens_kv=kv_cuts)
    np.testing.assert_allclose(found[3], expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found[4], slopes, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("sizes", [(0, 5, 7), (2, 0, 7), (2, 5, 0), (0, 0, 0)])
def test_no_pair(sizes):
    """Where there is no query or no key, gradients are 0."""
    batch, queries, keys = sizes
    q, k, v = (np.ones((batch, n, s, 4), np.float32) for n, s in ((2, queries), (1, keys), (1, keys)))
    options = {"attn_mask": np.ones((1, 2, 1, 1), np.float32), "alibi_slopes": [1.0, 2.0]}
    out, lse = blitz_attn.block_sparse_attention(q, k, v, return_lse=True, **options)
    dmask, dslopes = blitz_attn.block_sparse_attention_backward(q, q, k, v, out, lse, bias_grads=True, **options)[3:]
    assert (dmask == 0).all()
    assert (dslopes == 0).all()
    full = np.zeros((batch, 2, queries, keys), np.float32)
    found = blitz_attn.block_sparse_attention_backward(q, q, k, v, out, lse, attn_mask=full, bias_grads=True)
    assert found[3].shape == full.shape


def test_what_has_no_gradient_is_none():
    q = np.ones((1, 2, 5, 4), np.float32)
    for options in ({}, {"attn_mask": np.ones((5, 5), bool)}):
        result = blitz_attn.block_sparse_attention(q, q, q, return_lse=True, **options)
        for module in (blitz_attn, reference):
            assert module.block_sparse_attention_backward(q, q, q, q, *result, bias_grads=True, **options)[3:] == (None, None)
    with pytest.raises(TypeError, match="^bias_grads: expected"):
        blitz_attn.block_sparse_attention_backward(q, q, q, q, *result, bias_grads="yes")


def test_a_view_of_a_mask_has_a_gradient_of_its_shape():
    """Also where the view repeats one row: the caller adds up what it has repeated."""
    q, k, v = testing.make_qkv(1, 2, 1, 40, 60, 8)
    row = np.random.default_rng(0).standard_normal((1, 60), dtype=np.float32)
    result = blitz_attn.block_sparse_attention(q, k, v, attn_mask=row, return_lse=True)
    views = row, np.broadcast_to(row, (40, 60)), np.repeat(row, 80, axis=0)[::2]
    found = [blitz_attn.block_sparse_attention_backward(q, q, k, v, *result, attn_mask=x, bias_grads=True)[3] for x in views]
    assert [x.shape for x in found] == [x.shape for x in views]
    np.testing.assert_allclose(found[1].sum(axis=0, keepdims=True), found[0], atol=1e-5)
    assert same_bits(found[1], found[2])
