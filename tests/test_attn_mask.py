"""`attn_mask` and `alibi_slopes`: what is added to scores, forward and backward, against softmax attention in plain NumPy."""

import re
from functools import partial

import numpy as np
import pytest

import blitz_attn
from blitz_attn import reference, sabi, testing
from cases import DTYPES, ISA_LEVELS, bits_option, poisoned, same_bits
from cases_masks import (
    BFLOAT16,
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
    expected,
    gradients,
    hiding,
    holes,
    kept,
    laid_out,
    mask_of,
    numbers,
    problem,
    slope_bias,
    to_heads,
)

# ---- Attention ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("first", "last", "key", "window"), [(300, 362, 300, 289), (450, 512, 450, 301), (96, 128, 512, 90), (64, 96, 512, 37), (64, 96, 512, 5)]
)
def test_gradients_beside_queries_that_see_nothing_of_a_chunk(first, last, key, window, dtype, isa_level):
    """A mask hides from some queries all keys of a chunk that others of their tile see; a sink leaves them a log-sum-exp."""
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
@pytest.mark.parametrize("layout", ["BNSD", "BSND", "BSH", "TND"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", MASKS)
def test_against_softmax(name, dtype, layout, isa_level):
    arrays, exact, options = problem(dtype, layout)
    mask = mask_of(name)
    right = expected(*exact, bias_of(mask))
    out, lse = attend(arrays, options, attn_mask=mask)
    close([to_heads(out, layout, H), to_heads(lse, layout, H)], right, dtype)
    twin = reference.block_sparse_attention(*arrays, attn_mask=mask, return_lse=True, **options)
    close([to_heads(x, layout, H) for x in twin], right, "float64")


@pytest.mark.sampled
@pytest.mark.parametrize("layout", ["BNSD", "BSND", "BSH", "TND"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", MASKS)
def test_gradients_against_softmax(name, dtype, layout, isa_level):
    arrays, exact, options = problem(dtype, layout)
    mask = mask_of(name)
    dout = testing.make_qkv(B, H, H, Q, Q, D, dtype=dtype, seed=9)[0]
    right = expected(*exact, bias_of(mask), testing.to_float64(dout, dtype))
    result = attend(arrays, options, attn_mask=mask)
    found = gradients(laid_out(dout, layout), arrays, result, options, attn_mask=mask)
    twin = reference.block_sparse_attention_backward(laid_out(dout, layout), *arrays, *result, attn_mask=mask, **options)
    for got in (found, twin):
        got = [to_heads(testing.to_float64(x, dtype), layout, y.shape[1]) for x, y in zip(got, right, strict=True)]
        np.testing.assert_allclose(got[0], right[0], rtol=2 * UNIT[dtype], atol=4 * UNIT[dtype])
        for a, b in zip(got[1:], right[1:], strict=True):
            np.testing.assert_allclose(a, b, rtol=2 * UNIT[dtype], atol=8 * UNIT[dtype])


@pytest.mark.sampled
@pytest.mark.parametrize("mask_dtype", ["bool", "float32", "float16", BFLOAT16, "float64"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_of_a_mask(dtype, mask_dtype, isa_level):
    arrays, exact, options = problem(dtype, "BSND", 70)
    mask = mask_of("all axes", q_len=70)
    mask = mask > -np.inf if mask_dtype == "bool" else testing.round_to(mask, mask_dtype)
    right = expected(*exact, bias_of(mask))
    out, lse = attend(arrays, options, attn_mask=mask)
    close([out.swapaxes(1, 2)], right[:1], dtype)
    close([lse], right[1:], "float64" if dtype == "float64" else "float32")
    twin = reference.block_sparse_attention(*arrays, attn_mask=mask, return_lse=True, **options)
    np.testing.assert_allclose(twin[0].swapaxes(1, 2), right[0], rtol=1e-12, atol=1e-12)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "name", ["bool, one for all", "bool, per entry", "bool, keys", "all axes", "per head and key", "per query", "slopes", "both"]
)
@pytest.mark.parametrize("kv_len", [210, 5000])
@pytest.mark.parametrize("q_len", [1, 3, 8])
@pytest.mark.parametrize("dtype", DTYPES)
def test_few_queries(dtype, q_len, kv_len, name, isa_level):
    """Kernels for few queries, and the parts of a long row of keys that are joined."""
    arrays, exact, options = problem(dtype, "BSND", q_len, kv_len)
    mask = None if name == "slopes" else mask_of("all axes" if name == "both" else name, q_len=q_len, kv_len=kv_len)
    slopes = SLOPES / 8 if name in ("slopes", "both") else None
    bias = (0 if mask is None else bias_of(mask)) + (0 if slopes is None else slope_bias(q_len, kv_len, slopes))
    right = expected(*exact, bias)
    out, lse = attend(arrays, options, attn_mask=mask, alibi_slopes=slopes)
    close([out.swapaxes(1, 2), lse], right, dtype)
    twin = reference.block_sparse_attention(*arrays, attn_mask=mask, alibi_slopes=slopes, **options)
    np.testing.assert_allclose(twin.swapaxes(1, 2), right[0], rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_many_queries_of_half_precision(dtype):
    """Where there are this many queries, keys are packed once for all queries, and heads of a group go together."""
    q, k, v = testing.make_qkv(1, 8, 2, 700, 900, D, dtype=dtype)
    rng = np.random.default_rng(3)
    slopes = np.float32(2.0 ** -np.arange(1, 9))
    for mask in (kept(rng, 1, 8, 700, 900), numbers(rng, 700, 900)):
        right = expected(*(testing.to_float64(x, dtype) for x in (q, k, v)), bias_of(mask) + slope_bias(700, 900, slopes))
        for level in ISA_LEVELS:
            with blitz_attn.isa(level):
                close(attend((q, k, v), bits_option(q), attn_mask=mask, alibi_slopes=slopes), right, dtype)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("given", ["mask", "slopes", "both"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("block_shape", [(1, 1), (16, 32), (64, 64)])
def test_beside_lists_and_other_rules(block_shape, dtype, given, isa_level):
    """A key is seen where the list, the rules, the range and the mask allow it."""
    q_len = 60 if block_shape == (1, 1) else Q
    arrays, exact, options = problem(dtype, "BNSD", q_len)
    lists = sabi.random_with_frame(q_len, KV, block_shape, 0.4, seed=3)
    ranges = np.stack([np.arange(q_len) // 3, np.arange(q_len) // 3 + 150], axis=-1)
    options |= {"causal": True, "window": (90, 0), "q_lens": [q_len, q_len // 2], "kv_lens": [KV, 150], "kv_ranges": ranges[None]}
    options |= {"block_shape": block_shape}
    bias = np.zeros((B, H, q_len, KV))
    for b, (n, kv_len) in enumerate(zip(options["q_lens"], options["kv_lens"], strict=True)):
        i, j = np.arange(q_len)[:, None], np.arange(KV)
        away = j - (i + kv_len - n)
        seen = (away <= 0) & (away >= -90) & (j < kv_len) & (i < n) & (j >= ranges[:, :1]) & (j < ranges[:, 1:])
        bias[b] = np.where(seen & testing.token_mask(lists, q_len, KV, block_shape)[0], 0, -np.inf)
        if given != "mask":
            bias[b] -= np.float64(SLOPES)[:, None, None] * np.abs(away)
            options["alibi_slopes"] = SLOPES
    if given != "slopes":
        options["attn_mask"] = mask = mask_of("all axes", q_len=q_len)
        bias = bias + bias_of(mask)
    result = attend([*arrays, lists], options)
    inside = np.arange(q_len) < np.array(options["q_lens"])[:, None, None]
    dout = testing.make_qkv(B, H, H, q_len, q_len, D, dtype=dtype, seed=9)[0]
    dout_exact = np.where(inside[..., None], testing.to_float64(dout, dtype), 0)
    right = expected(*exact, bias)
    close(result, right, dtype)
    found = blitz_attn.block_sparse_attention_backward(dout, *arrays, *result, lists, **options)
    close(found, expected(*exact, bias, dout_exact), dtype, times=4)
    twin = reference.block_sparse_attention(*arrays, lists, return_lse=True, **options)
    close(twin, right, "float64")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("q_len", [2, Q])
def test_after_the_softcap_and_beside_sinks(q_len, dtype, isa_level):
    arrays, exact, options = problem(dtype, "BNSD", q_len)
    mask, sinks = mask_of("all axes", q_len=q_len), np.float32([1, -np.inf, 0.3, 4])
    right = expected(*exact, bias_of(mask) + slope_bias(q_len, KV), softcap=1.5, sinks=sinks)
    options |= {"softcap": 1.5, "sinks": sinks, "attn_mask": mask, "alibi_slopes": SLOPES}
    close(attend(arrays, options), right, dtype)
    twin = reference.block_sparse_attention(*arrays, **options)
    assert np.abs(twin - right[0]).max() < 1e-12


# ---- Distances ------------------------------------------------------------------------------------------------------


@pytest.mark.sampled(2)
@pytest.mark.parametrize("layout", ["BSH", "TND"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("begin", [None, 0, -7, 100])
@pytest.mark.parametrize("dtype", DTYPES)
def test_slopes(dtype, begin, causal, layout, isa_level):
    arrays, exact, options = problem(dtype, layout)
    options |= {"causal": causal, "alibi_slopes": SLOPES} | ({} if begin is None else {"q_begin": begin})
    diagonal = np.arange(Q)[:, None] + (KV - Q if begin is None else begin)
    bias = slope_bias(Q, KV, begin=begin) + (np.where(np.arange(KV) <= diagonal, 0, -np.inf) if causal else 0)
    result = attend(arrays, options)
    close([to_heads(x, layout, H) for x in result], expected(*exact, bias), dtype)
    dout = testing.make_qkv(B, H, H, Q, Q, D, dtype=dtype, seed=9)[0]
    found = gradients(laid_out(dout, layout), arrays, result, options)
    right = expected(*exact, bias, testing.to_float64(dout, dtype))
    close([to_heads(x, layout, y.shape[1]) for x, y in zip(found, right, strict=True)], right, dtype, times=8)


def test_slopes_are_a_mask_of_distances(isa_level):
    """The same numbers given as a mask; lengths move the diagonal."""
    arrays, _, options = problem("float64")
    options |= {"q_lens": [Q, 40], "kv_lens": [KV, 170]}
    mask = np.stack([slope_bias(Q, KV), slope_bias(Q, KV, begin=130)])
    close(attend(arrays, options, alibi_slopes=SLOPES), attend(arrays, options, attn_mask=mask), "float64")


def test_slopes_of_any_sign_and_size(isa_level):
    arrays, exact, options = problem("float32")
    slopes = np.float32([0, -0.25, 30, 1e-20])
    close(attend(arrays, options, alibi_slopes=slopes), expected(*exact, slope_bias(Q, KV, slopes)))


# ---- Packed sequences -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", ["mask", "keys", "slopes", "both"])
def test_packed_sequences_have_the_numbers_of_sequences_alone(given, isa_level):
    """Rows and columns of a mask are counted from the beginning of each sequence."""
    q_ends, kv_ends = [0, 70, 70, 71, 130], [0, 40, 90, 110, 210]
    q, k, v = (x[0].swapaxes(0, 1).copy() for x in testing.make_qkv(1, H, HKV, 130, 210, D))
    rng = np.random.default_rng(2)
    mask = {"mask": holes(rng, 4, H, 70, 100), "both": numbers(rng, H, 70, 100), "keys": kept(rng, 4, 1, 1, 100)}.get(given)
    slopes = SLOPES if given in ("slopes", "both") else None
    lens = {"layout": "TND", "cu_seqlens_q": q_ends, "cu_seqlens_kv": kv_ends, "alibi_slopes": slopes}
    result = attend((q, k, v), lens, attn_mask=mask)
    dout = rng.standard_normal(q.shape).astype(np.float32)
    found = gradients(dout, (q, k, v), result, lens, attn_mask=mask)
    twin = reference.block_sparse_attention(q, k, v, attn_mask=mask, **lens)
    np.testing.assert_allclose(result[0], twin, rtol=1e-4, atol=1e-5)
    for b in range(4):
        rows, keys = slice(q_ends[b], q_ends[b + 1]), slice(kv_ends[b], kv_ends[b + 1])
        n, kv_len = rows.stop - rows.start, keys.stop - keys.start
        one = [x[part].swapaxes(0, 1)[None].copy() for x, part in ((q, rows), (k, keys), (v, keys))]
        part = mask if mask is None or mask.ndim < 4 else mask[b : b + 1]
        options = {"alibi_slopes": slopes, "attn_mask": None if part is None else part[..., :n, :kv_len]}
        alone = attend(one, options)
        assert all(map(same_bits, alone, (result[0][rows].swapaxes(0, 1)[None].copy(), result[1][rows].T[None].copy())))
        again = gradients(dout[rows].swapaxes(0, 1)[None].copy(), one, alone, options)
        for x, y in zip(again, (found[0][rows], found[1][keys], found[2][keys]), strict=True):
            assert same_bits(x, y.swapaxes(0, 1)[None].copy())


# ---- What is hidden -------------------------------------------------------------------------------------------------


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["bool", "-inf", "least"])
@pytest.mark.parametrize("q_len", [1, 5, Q])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_what_a_mask_hides_is_not_read(dtype, q_len, kind, isa_level):
    """NaN in keys and values that every query hides reaches no result and no gradient; the keys come in whole blocks and alone."""
    if kind == "least" and dtype == "float64":
        kind = "-inf"  # a number like others there
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


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["bool", "-inf"])
@pytest.mark.parametrize("q_len", [3, Q])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_bad_key_reaches_the_queries_that_see_it(dtype, q_len, kind, isa_level):
    """A NaN that some queries hide, and others see, is in the results of these alone."""
    (q, k, v), _, options = problem(dtype, "BNSD", q_len)
    bad = (5, 64, 150)
    hidden = np.random.default_rng(8).random((B, H, q_len, KV)) < 0.3
    hidden[:, :, ::3, bad] = True
    hidden[:, :, 1::3, bad] = False
    mask = hiding(kind, hidden)
    clean = attend((q, k, v), options, attn_mask=mask)
    for x in (k, v):
        x[:, :, bad] = poisoned((1,), x)[0]
    found = attend((q, k, v), options, attn_mask=mask)
    saw = ~hidden[..., bad].all(axis=-1)
    for a, b in zip(found, clean, strict=True):
        assert same_bits(a[~saw], b[~saw])
        assert np.isnan(testing.to_float64(a, dtype if a.ndim == 4 else "float32")[saw]).all()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["bool", "-inf"])
@pytest.mark.parametrize("q_len", [1, 4, Q])
@pytest.mark.parametrize("dtype", DTYPES)
def test_queries_without_keys(dtype, q_len, kind, isa_level):
    (q, k, v), _, options = problem(dtype, "BNSD", q_len)
    hidden = np.random.default_rng(8).random((B, H, q_len, 1)) < 0.4
    hidden[0, 0] = True
    mask = hiding(kind, np.broadcast_to(hidden, (B, H, q_len, KV)))
    out, lse = attend((q, k, v), options, attn_mask=mask)
    assert not testing.to_float64(out, dtype)[hidden[..., 0]].any()
    assert np.array_equal(lse == -np.inf, hidden[..., 0])
    dq, *rest = gradients(q, (q, k, v), (out, lse), options, attn_mask=mask)
    assert not testing.to_float64(dq, dtype)[hidden[..., 0]].any()
    assert all(np.isfinite(testing.to_float64(x, dtype)).all() for x in rest)
    all_hidden = attend((q, k, v), options, attn_mask=np.zeros((1, 1), bool), sinks=np.zeros(H, np.float32))
    assert not testing.to_float64(all_hidden[0], dtype).any()
    assert not all_hidden[1].any()


def test_numbers_that_are_as_good_as_infinite(isa_level):
    """The least numbers of float32 and float64 hide their keys where scores are float32, and are numbers where scores are float64."""
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
    """Two tokens away, such a slope adds more than float32 holds, but the mask hides that token. What it adds to the others is finite."""
    if kind == "least" and dtype == "float64":
        kind = "-inf"  # a number like others there
    q, k, v = testing.make_qkv(1, 1, 1, q_len, 3, D, dtype=dtype)
    mask = hiding(kind, np.array([True, False, False]))
    options = {"attn_mask": mask, "alibi_slopes": np.float32([-1.5e38]), "q_begin": [2]} | bits_option(q)
    result = blitz_attn.block_sparse_attention(q, k, v, return_lse=True, **options)
    assert np.array_equal(testing.to_float64(result[0][:, :, 0], dtype), testing.to_float64(v[:, :, 1], dtype))
    np.testing.assert_allclose(result[1][0, 0, 0], 1.5e38, rtol=1e-5)
    found = blitz_attn.block_sparse_attention_backward(q, q, k, v, *result, **options | {"q_lens": [1]})
    assert not any(testing.to_float64(x, dtype)[:, :, 0].any() for x in found[1:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("q_len", [2, Q])
def test_nan_in_a_mask(q_len, dtype, isa_level):
    """It is in the results of queries that see its key by the other rules; what these hide is not read."""
    (q, k, v), _, options = problem(dtype, "BNSD", q_len)
    mask = mask_of("per head", q_len=q_len)
    options |= {"causal": True, "kv_lens": [KV, 190], "q_lens": [q_len, q_len - 1]}
    clean = attend((q, k, v), options, attn_mask=mask)
    whole = np.broadcast_to(mask, (B, *mask.shape)).copy()
    i, j = np.arange(q_len)[:, None], np.arange(KV)
    for b in range(B):
        diagonal = i + options["kv_lens"][b] - options["q_lens"][b]
        whole[b, :, (j > diagonal) | (i >= options["q_lens"][b]) | (j >= options["kv_lens"][b])] = np.nan
    found = attend((q, k, v), options, attn_mask=whole)
    assert all(map(same_bits, found, clean))
    again = gradients(q, (q, k, v), found, options, attn_mask=whole)
    assert all(map(same_bits, again, gradients(q, (q, k, v), clean, options, attn_mask=mask)))
    whole[0, 2, 1, 17] = np.nan
    out, lse = (testing.to_float64(x, dtype if x.ndim == 4 else "float32") for x in attend((q, k, v), options, attn_mask=whole))
    spoilt = np.zeros(lse.shape, bool)
    spoilt[0, 2, 1] = True
    assert np.array_equal(np.isnan(lse), spoilt)
    assert np.array_equal(np.isnan(out).any(axis=-1), spoilt)
    assert np.isnan(out[spoilt]).all()


# ---- The same mask otherwise ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_causal_mask_has_the_numbers_of_the_causal_rule(dtype, isa_level):
    (q, k, v), _, options = problem(dtype)
    mask = np.tri(Q, KV, KV - Q, dtype=bool)
    masked, causal = (attend((q, k, v), options, **rule) for rule in ({"attn_mask": mask}, {"causal": True}))
    close(masked, [testing.to_float64(x, dtype) for x in causal], dtype)
    found = [gradients(q, (q, k, v), causal, options, **rule) for rule in ({"attn_mask": mask}, {"causal": True})]
    close(found[0], [testing.to_float64(x, dtype) for x in found[1]], dtype, times=4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("q_len", [4, Q])
def test_masks_of_any_strides(q_len, dtype, isa_level):
    """Views of a mask, and masks whose axes of 1 are repeated, have the bits of a whole mask in C order."""
    (q, k, v), _, options = problem(dtype, "BNSD", q_len)
    rng = np.random.default_rng(5)
    whole = holes(rng, B, H, q_len, KV)
    views = [
        whole[::-1, ::-1, ::-1, ::-1].copy()[::-1, ::-1, ::-1, ::-1],
        np.ascontiguousarray(whole.transpose(3, 1, 0, 2)).transpose(2, 1, 3, 0),
        np.repeat(np.repeat(whole, 2, axis=3), 3, axis=2)[:, :, ::3, ::2],
    ]
    right = attend((q, k, v), options, attn_mask=whole)
    slopes = gradients(q, (q, k, v), right, options, attn_mask=whole)
    for view in views:
        assert all(map(same_bits, attend((q, k, v), options, attn_mask=view), right))
        assert all(map(same_bits, gradients(q, (q, k, v), right, options, attn_mask=view), slopes))
    for shape in ((1, 1, q_len, KV), (B, 1, 1, KV), (1, H, q_len, 1), (1, 1, 1, 1)):
        mask = numbers(rng, *shape)
        repeated = np.broadcast_to(mask, whole.shape)
        right = attend((q, k, v), options, attn_mask=repeated.copy())
        for given in (repeated, mask, mask > -1):
            found = attend((q, k, v), options, attn_mask=given)
            if given.dtype == bool:
                right = attend((q, k, v), options, attn_mask=(repeated > -1).copy())
            assert all(map(same_bits, found, right))
    keys = kept(rng, KV)
    assert all(map(same_bits, *(attend((q, k, v), options, attn_mask=x) for x in (keys, keys[None, None, None]))))


@pytest.mark.parametrize("given", ["bool", "numbers", "slopes"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("q_len", [33, 65, 100])
def test_rows_without_a_bias_beside_others(q_len, dtype, given, isa_level):
    """Queries to whose scores nothing is added have the same bits whichever queries a thread or a call computes them with."""
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


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("first", [16, 32, 64])
def test_gradients_of_queries_before_and_behind_others_that_see_no_key(first, dtype, isa_level):
    """Queries that see no key may stand between others of the same tile."""
    (q, k, v), exact, options = problem(dtype, "BNSD", Q, 70)
    hidden = (np.arange(Q) >= first) & (np.arange(Q) < 2 * first)
    options["attn_mask"] = np.broadcast_to(~hidden[:, None], (Q, 70))
    result = attend((q, k, v), options)
    found = gradients(q, (q, k, v), result, options)
    close(found, expected(*exact, np.where(hidden, -np.inf, 0)[:, None], exact[0]), dtype, times=4)


def test_tensors_and_other_arrays():
    torch = pytest.importorskip("torch")
    (q, k, v), _, options = problem()
    for mask in (mask_of("bool, per entry"), mask_of("all axes"), mask_of("per head").astype(np.float16)):
        right = attend((q, k, v), options, attn_mask=mask)
        assert all(map(same_bits, attend((q, k, v), options, attn_mask=torch.from_numpy(mask)), right))
        twin = reference.block_sparse_attention(q, k, v, attn_mask=torch.from_numpy(mask))
        assert np.array_equal(twin, reference.block_sparse_attention(q, k, v, attn_mask=mask))
    halves = torch.from_numpy(mask_of("per head")).to(torch.bfloat16)
    right = attend((q, k, v), options, attn_mask=halves.float().numpy())
    assert all(map(same_bits, attend((q, k, v), options, attn_mask=halves), right))


@pytest.mark.parametrize("rule", [{}, {"alibi_slopes": SLOPES}, {"causal": True, "alibi_slopes": SLOPES}])
def test_a_loss_goes_down(rule):
    """A step against the gradient lowers a loss as far as the gradient says."""
    (q, k, v), _, options = problem("float64")
    weights = np.random.default_rng(1).standard_normal(q.shape)
    options |= {"attn_mask": mask_of("all axes")} | rule

    def loss(q, k, v):
        return (blitz_attn.block_sparse_attention(q, k, v, **options) * weights).sum()

    result = attend((q, k, v), options)
    found = gradients(weights, (q, k, v), result, options)
    step = 1e-6
    moved = loss(*(x + step * g for x, g in zip((q, k, v), found, strict=True)))
    back = loss(*(x - step * g for x, g in zip((q, k, v), found, strict=True)))
    assert (moved - back) / (2 * step) == pytest.approx(sum((g * g).sum() for g in found), rel=1e-6)


# ---- Refusals -------------------------------------------------------------------------------------------------------


MASK_REFUSED = {
    "batch": (np.zeros((3, 1, Q, KV), bool), ValueError),
    "heads": (np.zeros((HKV, Q, KV), bool), ValueError),
    "rows": (np.zeros((Q + 1, KV), np.float32), ValueError),
    "columns": (np.zeros((Q, KV - 1), np.float32), ValueError),
    "axes": (np.zeros((1, 1, 1, Q, KV), bool), ValueError),
    "nothing": (np.zeros((Q, 0), bool), ValueError),
    "int64": (np.zeros((Q, KV), np.int64), TypeError),
    "bits": (np.zeros((Q, KV), np.uint16), TypeError),
    "uint8": (np.zeros((Q, KV), np.uint8), TypeError),
    "complex": (np.zeros((Q, KV), np.complex64), TypeError),
    "a number": (0.5, TypeError),
    "a list": ([[True] * KV] * Q, TypeError),
}
SLOPES_REFUSED = {
    "heads": (np.zeros(HKV, np.float32), ValueError),
    "axes": (np.zeros((1, H), np.float32), ValueError),
    "a number": (0.5, (TypeError, ValueError)),
    "complex": (np.zeros(H, np.complex64), TypeError),
    "words": (np.array(["a"] * H), TypeError),
}


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(("argument", "name"), [("attn_mask", x) for x in MASK_REFUSED] + [("alibi_slopes", x) for x in SLOPES_REFUSED])
def test_refusals(argument, name, backward):
    (q, k, v), _, options = problem()
    given, error = (MASK_REFUSED if argument == "attn_mask" else SLOPES_REFUSED)[name]
    out, lse = np.full_like(q, 7), np.zeros(q.shape[:3], np.float32)
    call = blitz_attn.block_sparse_attention
    if backward:
        call = partial(blitz_attn.block_sparse_attention_backward, out=q, lse=lse, dout=q)
        options["grads"] = (out, None, None)
    else:
        options["out"] = out
    with pytest.raises(error, match=f"^{argument}: expected"):
        call(q=q, k=k, v=v, **{argument: given}, **options)
    assert (out == 7).all()


def test_an_output_over_a_mask_is_refused():
    (q, k, v), _, options = problem()
    room = np.zeros(max(q.size, Q * KV), np.float32)
    with pytest.raises(ValueError, match="overlaps attn_mask"):
        blitz_attn.block_sparse_attention(q, k, v, attn_mask=room[: Q * KV].reshape(Q, KV), out=room[: q.size].reshape(q.shape), **options)


def test_packed_refusals():
    (q, k, v), _, options = problem("float32", "TND")
    for shape in ((2 * Q, KV), (Q, 2 * KV), (3, 1, Q, KV)):
        with pytest.raises(ValueError, match="^attn_mask: expected shape"):
            blitz_attn.block_sparse_attention(q, k, v, attn_mask=np.zeros(shape, bool), **options)


@pytest.mark.parametrize("shape", [(3,), (2, 4), (2, 4, 4), (Q, KV + 1), (1, 2, Q, KV)], ids=str)
@pytest.mark.parametrize("layout", ["BNSD", "BSND"])
def test_sentences_name_the_shape_that_was_given(shape, layout):
    arrays, _, options = problem("float32", layout)
    given = np.zeros(shape, np.float32)
    sentence = rf"^attn_mask: expected shape \(2 or 1, 4 or 1, {Q} or 1, {KV} or 1\), got {re.escape(str(shape))}$"
    with pytest.raises(ValueError, match=sentence):
        blitz_attn.block_sparse_attention(*arrays, attn_mask=given, **options)
    out, lse = blitz_attn.block_sparse_attention(*arrays, return_lse=True, **options)
    with pytest.raises(ValueError, match=sentence):
        blitz_attn.block_sparse_attention_backward(out, *arrays, out, lse, attn_mask=given, **options)
    with pytest.raises(ValueError, match=sentence):
        reference.block_sparse_attention(*arrays, attn_mask=given, **options)


TWIN_REFUSED = {
    "rows": (
        np.zeros((Q + 1, KV)),
        ValueError,
        r"attn_mask: expected shape \(2 or 1, 4 or 1, 130 or 1, 210 or 1\), got \(131, 210\)",
    ),
    "axes": (np.zeros((1, 1, 1, Q, KV)), ValueError, "attn_mask: expected shape"),
    "integers": (np.zeros((Q, KV), int), TypeError, "attn_mask: expected bool, float32, float16, bfloat16 or float64, got int64"),
    "slopes": (SLOPES[:2], ValueError, r"alibi_slopes: expected shape \(4,\), one number per head, got \(2,\)"),
}


@pytest.mark.parametrize("name", TWIN_REFUSED)
def test_the_twin_refuses(name):
    arrays, _, options = problem()
    given, error, sentence = TWIN_REFUSED[name]
    with pytest.raises(error, match=f"^{sentence}"):
        reference.block_sparse_attention(*arrays, **{sentence.partition(":")[0]: given}, **options)


@pytest.mark.parametrize(("dtype", "most"), [("float32", 1e-5), ("bfloat16", 0.1), ("float64", 1e-12)])
def test_the_same_precision_rounds_what_is_added(dtype, most):
    """The error of a plain computation with a mask is that of its dtype."""
    arrays, _, options = problem(dtype)
    options |= {"attn_mask": mask_of("all axes"), "alibi_slopes": SLOPES}
    exact, rounded = (f(*arrays, **options) for f in (reference.block_sparse_attention, reference.dense_same_precision))
    assert 0 <= np.abs(exact - rounded).max() < most
    result = reference.block_sparse_attention(*arrays, return_lse=True, **options)
    both = (reference.block_sparse_attention_backward, reference.dense_same_precision_backward)
    for x, y in zip(*(f(arrays[0], *arrays, *result, **options) for f in both), strict=True):
        assert np.abs(x - y).max() < 4 * most
