"""`attn_mask` and `alibi_slopes`, which add to scores, forward and backward, against softmax attention in plain NumPy."""

from functools import partial

import numpy as np
import pytest

import blitz_attn
from blitz_attn import reference, testing
from cases import DTYPES, ISA_LEVELS, LAYOUTS, bits_option, poisoned, same_bits
from cases_masks import (
    HKV,
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
    close,
    distances,
    expected,
    gradients,
    hiding,
    kept,
    laid_out,
    mask_of,
    numbers,
    problem,
    score_gradients,
    slope_bias,
    softmax_of,
    to_heads,
)

# ---- Attention ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("first", "last", "key", "window"),
    [(300, 362, 300, 289), (450, 512, 450, 301), (96, 128, 512, 90), (64, 96, 512, 37), (64, 96, 512, 5)],
)
def test_gradients_beside_queries_that_see_nothing_of_a_chunk(first, last, key, window, dtype, isa_level):
    """A mask hides all keys of a chunk from some queries of a tile. With a sink, queries that see no key have a finite log-sum-exp."""
    q, k, v = testing.make_qkv(1, 1, 1, 512, 512, 32, dtype=dtype)
    dout = testing.make_qkv(1, 1, 1, 512, 512, 32, dtype=dtype, seed=1)[0]
    mask = np.ones((512, 512), bool)
    mask[first:last, :key] = False
    rules = {"causal": True, "window": (window, 0), "attn_mask": mask} | bits_option(q)
    for sinks in (None, np.zeros(1, np.float32)):
        out, lse = blitz_attn.block_sparse_attention(q, k, v, sinks=sinks, return_lse=True, **rules)
        found = blitz_attn.block_sparse_attention_backward(dout, q, k, v, out, lse, **rules)
        right = reference.block_sparse_attention_backward(dout, q, k, v, out, lse, **rules)
        for mine, exact in zip(found, right, strict=True):
            error = np.linalg.norm(reference.to_float64(mine, dtype) - exact) / np.linalg.norm(exact)
            assert error < {"float64": 1e-12, "float32": 1e-5, "float16": 2e-3, "bfloat16": 1e-2}[dtype]


@pytest.mark.sampled
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", MASKS)
def test_against_softmax(name, dtype, layout, isa_level):
    """Results, and gradients of all inputs, are those of softmax attention."""
    arrays, exact, options = problem(dtype, layout)
    mask = mask_of(name)
    options |= {"attn_mask": mask, "alibi_slopes": SLOPES / 8}
    bias = bias_of(mask) + slope_bias(Q, KV, SLOPES / 8)
    dout = testing.make_qkv(B, H, H, Q, Q, D, dtype=dtype, seed=9)[0]
    result = attend(arrays, options)
    close([to_heads(x, layout, H) for x in result], expected(*exact, bias), dtype)
    found = blitz_attn.block_sparse_attention_backward(laid_out(dout, layout), *arrays, *result, bias_grads=True, **options)
    wide = testing.to_float64(dout, dtype)
    for got, right in zip(found[:3], expected(*exact, bias, wide), strict=True):
        got = to_heads(testing.to_float64(got, dtype), layout, right.shape[1])
        np.testing.assert_allclose(got, right, rtol=2 * UNIT[dtype], atol=8 * UNIT[dtype])
    k, v = (np.repeat(x, H // HKV, axis=1) for x in exact[1:])
    p, out, _ = softmax_of(exact[0], k, v, bias)
    pairs = score_gradients(p, out, v, wide)
    unit = UNIT["float32" if dtype == "float64" else dtype]  # gradients of slopes are float32
    right = -(pairs * distances(Q, KV)).sum(axis=(0, 2, 3))
    np.testing.assert_allclose(found[4], right, rtol=2 * unit, atol=4 * unit * np.sqrt(B * Q * KV * 50))
    if mask.dtype == bool:
        assert found[3] is None
        return
    shape = (1,) * (4 - mask.ndim) + mask.shape
    right = pairs.sum(axis=tuple(axis for axis, n in enumerate(shape) if n == 1), keepdims=True).reshape(mask.shape)
    assert found[3].dtype == mask.dtype
    np.testing.assert_allclose(found[3], right, rtol=2 * unit, atol=4 * unit * max(np.abs(right).max(), np.sqrt(pairs.size / mask.size)))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["bool, per entry", "per query", "all axes"])
@pytest.mark.parametrize("q_len", [1, 3, 8])
@pytest.mark.parametrize("dtype", DTYPES)
def test_few_queries_of_many_keys(dtype, q_len, name, isa_level):
    """Many keys are attended in parts, whose states are joined."""
    arrays, exact, options = problem(dtype, "BSND", q_len, 5000)
    mask = mask_of(name, q_len=q_len, kv_len=5000)
    out, lse = attend(arrays, options, attn_mask=mask, alibi_slopes=SLOPES / 8)
    close([out.swapaxes(1, 2), lse], expected(*exact, bias_of(mask) + slope_bias(q_len, 5000, SLOPES / 8)), dtype)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_many_queries_of_16_bits(dtype):
    """With so many queries, keys are packed once for all queries, and the heads of a group are computed together."""
    q, k, v = testing.make_qkv(1, 8, 2, 700, 900, D, dtype=dtype)
    rng = np.random.default_rng(3)
    slopes = np.float32(2.0 ** -np.arange(1, 9))
    for mask in (kept(rng, 1, 8, 700, 900), numbers(rng, 700, 900)):
        right = expected(*(testing.to_float64(x, dtype) for x in (q, k, v)), bias_of(mask) + slope_bias(700, 900, slopes))
        for level in ISA_LEVELS:
            with blitz_attn.isa(level):
                close(attend((q, k, v), bits_option(q), attn_mask=mask, alibi_slopes=slopes), right, dtype)


# ---- What is hidden -------------------------------------------------------------------------------------------------


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["bool", "-inf", "least"])
@pytest.mark.parametrize("q_len", [1, 5, Q])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_what_a_mask_hides_is_not_read(dtype, q_len, kind, isa_level):
    """NaN in keys and values that are hidden from every query reaches no result and no gradient. Whole blocks of keys are hidden, and single keys."""
    if kind == "least" and dtype == "float64":
        kind = "-inf"  # in float64, the least float32 is a number like others
    (q, k, v), _, options = problem(dtype, "BNSD", q_len, 700)
    hidden = np.zeros((B, 1, 1, 700), bool)
    hidden[..., 128:384] = hidden[..., 690:] = hidden[..., 7] = hidden[0, ..., 450] = True
    mask = hiding(kind, hidden)
    clean = attend((q, k, v), options, attn_mask=mask)
    finite = gradients(q, (q, k, v), clean, options, attn_mask=mask)
    for x in (k, v):
        x[np.broadcast_to(hidden[:, 0, 0, None], x.shape[:3])] = poisoned((1,), x)[0]
    assert all(map(same_bits, attend((q, k, v), options, attn_mask=mask), clean))
    found = gradients(q, (q, k, v), clean, options, attn_mask=mask)
    for x, y in zip(found, finite, strict=True):
        np.testing.assert_array_equal(testing.to_float64(x, dtype), testing.to_float64(y, dtype))
    assert not any(testing.to_float64(x, dtype)[np.broadcast_to(hidden[:, 0, 0, None], x.shape[:3])].any() for x in found[1:])


def test_numbers_that_are_as_good_as_infinite(isa_level):
    """The least finite numbers in a mask hide their keys if scores are float32, and are ordinary numbers if scores are float64."""
    for dtype in ("float32", "float16"):
        (q, k, v), _, options = problem(dtype)
        hidden = np.random.default_rng(4).random((Q, KV)) < 0.5
        hidden[3] = True
        right = attend((q, k, v), options, attn_mask=~hidden)
        for least in (np.finfo(np.float32).min, np.float64(-1e300)):
            mask = np.where(hidden, least, 0).astype(least.dtype)
            assert all(map(same_bits, attend((q, k, v), options, attn_mask=mask), right))
            twin = reference.block_sparse_attention(q, k, v, attn_mask=mask, **options)
            assert not twin[:, :, 3].any()
    (q, k, v), exact, options = problem("float64")
    mask = np.full((Q, 1), np.finfo(np.float32).min)
    out, lse = attend((q, k, v), options, attn_mask=mask)
    np.testing.assert_allclose(lse, mask[0, 0], rtol=1e-12)
    np.testing.assert_allclose(out, np.broadcast_to(np.repeat(exact[2], 2, axis=1).mean(axis=2, keepdims=True), out.shape), atol=1e-10)


@pytest.mark.parametrize("kind", ["bool", "-inf", "least"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("q_len", [1, 40])
def test_a_hidden_key_stays_hidden_whatever_its_distance_adds(q_len, dtype, kind, isa_level):
    """To a token at distance 2, the slope adds more than float32 holds, but the mask hides that token."""
    if kind == "least" and dtype == "float64":
        kind = "-inf"  # in float64, the least float32 is a number like others
    q, k, v = testing.make_qkv(1, 1, 1, q_len, 3, D, dtype=dtype)
    mask = hiding(kind, np.array([True, False, False]))
    options = {"attn_mask": mask, "alibi_slopes": np.float32([-1.5e38]), "q_begin": [2]} | bits_option(q)
    result = blitz_attn.block_sparse_attention(q, k, v, return_lse=True, **options)
    assert np.array_equal(testing.to_float64(result[0][:, :, 0], dtype), testing.to_float64(v[:, :, 1], dtype))
    np.testing.assert_allclose(result[1][0, 0, 0], 1.5e38, rtol=1e-5)
    found = blitz_attn.block_sparse_attention_backward(q, q, k, v, *result, **options | {"q_lens": [1]})
    assert not any(testing.to_float64(x, dtype)[:, :, 0].any() for x in found[1:])


# ---- Same bits, and shapes of gradients -----------------------------------------------------------------------------


@pytest.mark.parametrize("given", ["bool", "numbers", "slopes"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("q_len", [33, 65, 100])
def test_rows_without_a_bias_beside_others(q_len, dtype, given, isa_level):
    """Queries without a bias have the same bits, whichever other queries a thread or a call computes together with them."""
    (q, k, v), options = testing.make_qkv(1, 8, 1, q_len, 64, D, dtype=dtype, seed=3), {"block_shape": (8, 64)}
    options |= bits_option(q) | {"q_begin": 0}
    mask = np.ones((q_len, 64), bool)
    mask[np.arange(q_len) % 16 < 8, 5] = False
    if given == "slopes":
        options |= {
            "alibi_slopes": np.float32(2.0 ** -np.arange(8)),
            "kv_ranges": np.stack([np.arange(q_len) % 64, np.arange(q_len) % 64 + 1], axis=-1),
        }
        mask = None
    elif given == "numbers":
        mask = np.where(mask, 0, 0.3).astype(np.float32)
    whole = [blitz_attn.block_sparse_attention(q, k, v, attn_mask=mask, return_lse=True, num_threads=n, **options) for n in (1, 2, 3, 7)]
    assert all(same_bits(*pair) for other in whole[1:] for pair in zip(whole[0], other, strict=True))
    first = q_len // 8 * 8 - 8
    options |= {"q_begin": first, "q_total": q_len}
    if given == "slopes":
        options["kv_ranges"] = options["kv_ranges"][first:]
    part = None if mask is None else mask[first:]
    found = blitz_attn.block_sparse_attention(q[:, :, first:].copy(), k, v, attn_mask=part, return_lse=True, **options)
    assert all(same_bits(a, b[:, :, first:].copy()) for a, b in zip(found, whole[0], strict=True))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(1, 1, 300, 700), (3, 1, 1, 700), (1, 4, 300, 1), (4, 300, 700), (1,)])
def test_gradients_of_biases_depend_on_no_thread(shape, dtype, isa_level):
    q, k, v = testing.make_qkv(3, 4, 2, 300, 700, 16, dtype=dtype)
    dout = testing.make_qkv(3, 4, 2, 300, 700, 16, dtype=dtype, seed=1)[0]
    mask = np.random.default_rng(0).standard_normal(shape, dtype=np.float32)
    options = bits_option(q) | {"attn_mask": mask, "alibi_slopes": [0.1, 0.2, 0.0, -0.1]}
    result = blitz_attn.block_sparse_attention(q, k, v, return_lse=True, **options)
    call = partial(blitz_attn.block_sparse_attention_backward, dout, q, k, v, *result, bias_grads=True, **options)
    assert all(map(same_bits, call(num_threads=1), call(num_threads=3)))


def test_a_view_of_a_mask_has_a_gradient_of_its_shape():
    """The gradient has the shape of the mask even if the mask is a view that repeats one row: the caller adds up the repeated rows."""
    q, k, v = testing.make_qkv(1, 2, 1, 40, 60, 8)
    row = np.random.default_rng(0).standard_normal((1, 60), dtype=np.float32)
    result = blitz_attn.block_sparse_attention(q, k, v, attn_mask=row, return_lse=True)
    views = row, np.broadcast_to(row, (40, 60)), np.repeat(row, 80, axis=0)[::2]
    found = [blitz_attn.block_sparse_attention_backward(q, q, k, v, *result, attn_mask=x, bias_grads=True)[3] for x in views]
    assert [x.shape for x in found] == [x.shape for x in views]
    np.testing.assert_allclose(found[1].sum(axis=0, keepdims=True), found[0], atol=1e-5)
    assert same_bits(found[1], found[2])


@pytest.mark.parametrize("shape", [(16, 8), (2, 16, 8), (16, 1), (1, 8)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_places_behind_short_sequences_add_nothing(shape, dtype, isa_level):
    """Packed sequences differ in length. The last query of a short one has a large bias, and no query sees the key that holds NaN."""
    q_cuts, kv_cuts = [0, 16, 19, 19], [0, 8, 16, 20]
    q, k, v = testing.make_qkv(1, 2, 1, 19, 20, 16, 16, dtype=dtype)
    dout = testing.make_qkv(1, 2, 2, 19, 19, 16, dtype=dtype, seed=9)[0]
    q, k, v, dout = (np.ascontiguousarray(x[0].swapaxes(0, 1)) for x in (q, k, v, dout))
    mask = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    mask[..., min(2, shape[-2] - 1), :] += 100
    ranges = np.tile([0, 20], (19, 1))
    ranges[16], ranges[17:] = [0, 5], [6, 8]

    def gradients_of(layout, mask, ranges, arrays, **rules):
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
        found = gradients_of("BNSD", mask[part], ranges[queries], arrays)
        expected[part] += found[3]
        slopes += found[4]
    k[13] = v[13] = np.array(np.nan, np.float32) if dtype == "float32" else 0x7FC0
    found = gradients_of("TND", mask, ranges, (q, k, v, dout), cu_seqlens_q=q_cuts, cu_seqlens_kv=kv_cuts)
    np.testing.assert_allclose(found[3], expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found[4], slopes, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("dtype", "most"), [("float32", 1e-5), ("bfloat16", 0.1), ("float64", 1e-12)])
def test_the_same_precision_rounds_what_is_added(dtype, most):
    """The error of the plain computation in the same precision, with a mask, is no larger than its dtype suggests."""
    arrays, _, options = problem(dtype)
    options |= {"attn_mask": mask_of("all axes"), "alibi_slopes": SLOPES}
    exact, rounded = (f(*arrays, **options) for f in (reference.block_sparse_attention, reference.dense_same_precision))
    assert 0 <= np.abs(exact - rounded).max() < most
    result = reference.block_sparse_attention(*arrays, return_lse=True, **options)
    both = (reference.block_sparse_attention_backward, reference.dense_same_precision_backward)
    for x, y in zip(*(f(arrays[0], *arrays, *result, **options) for f in both), strict=True):
        assert np.abs(x - y).max() < 4 * most


@pytest.mark.parametrize("options", [{}, {"attn_mask": np.ones((5, 5), bool)}], ids=["no mask", "bool"])
@pytest.mark.parametrize("module", [blitz_attn, reference])
def test_what_has_no_gradient_is_none(module, options):
    q = np.ones((1, 2, 5, 4), np.float32)
    result = blitz_attn.block_sparse_attention(q, q, q, return_lse=True, **options)
    assert module.block_sparse_attention_backward(q, q, q, q, *result, bias_grads=True, **options)[3:] == (None, None)
