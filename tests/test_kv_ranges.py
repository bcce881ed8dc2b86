"""`kv_ranges`, a run of keys for each query, forward and backward, against softmax attention under the same mask."""

import numpy as np
import pytest

import blitz_attn
from blitz_attn import reference, testing
from cases import DTYPES, ISA_LEVELS, bits_option, same_bits
from cases_masks import KV, Q, attend, expected, gradients, laid_out, problem, to_heads
from cases_paged import attend_paged, check_paged

UNIT = {"float64": 1e-11, "float32": 3e-5, "float16": 6e-3, "bfloat16": 5e-2}
AT = np.arange(Q)


def scattered():
    """Runs in random order. Some are empty, and some reach beyond the keys."""
    rng = np.random.default_rng(5)
    runs = np.sort(rng.integers(-10, KV + 10, (Q, 2)), axis=-1)
    runs[rng.random(Q) < 0.2] = (40, 40)
    return runs


KINDS = {
    "documents": np.stack([AT // 50 * 50, AT // 50 * 50 + 50], axis=-1),  # documents of 50 tokens; a query sees its own document
    "prefix": np.stack([0 * AT, np.maximum(AT + 1, 70)], axis=-1),  # the first 70 tokens see one another, and the others are causal
    "scattered": scattered(),
}


def bias_of(ranges, kv_len=KV):
    keys = np.arange(kv_len)
    return np.where((keys >= ranges[..., :1]) & (keys < ranges[..., 1:]), 0, -np.inf)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("layout", ["BNSD", "BSND", "BSH", "TND"])
@pytest.mark.parametrize("index_dtype", [np.int32, np.int64])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_against_the_mask(kind, dtype, index_dtype, layout, isa_level):
    """The operation and the reference are right, forward and backward."""
    arrays, exact, options = problem(dtype, layout)
    runs = KINDS[kind].astype(index_dtype)
    options["kv_ranges"] = np.concatenate([runs, runs]) if layout == "TND" else runs
    result = attend(arrays, options)
    right = expected(*exact, bias_of(runs))
    out, lse = (to_heads(x, layout, 4) for x in (testing.to_float64(result[0], dtype), result[1]))
    for found, x in zip((out, lse), right, strict=True):
        np.testing.assert_allclose(found, x, rtol=UNIT[dtype], atol=UNIT[dtype])
    twin = reference.block_sparse_attention(*arrays, **options)
    assert np.abs(to_heads(twin, layout, 4) - right[0]).max() < 1e-12
    dout = testing.make_qkv(2, 4, 4, Q, Q, 32, dtype=dtype, seed=9)[0]
    right, dout = expected(*exact, bias_of(runs), testing.to_float64(dout, dtype)), laid_out(dout, layout)
    found = gradients(dout, arrays, result, options)
    twin = reference.block_sparse_attention_backward(dout, *arrays, *result, **options)
    for x, y, z in zip(found, twin, right, strict=True):
        for got in (testing.to_float64(x, dtype), y):
            np.testing.assert_allclose(to_heads(got, layout, z.shape[1]), z, rtol=2 * UNIT[dtype], atol=4 * UNIT[dtype])


@pytest.mark.parametrize("first", [16, 32, 64])
def test_gradients_of_queries_before_and_behind_others_that_see_no_key(first, isa_level):
    """Queries that see no key may lie between other queries of the same tile."""
    arrays, exact, options = problem("bfloat16", "BNSD")
    runs = np.where((AT[:, None] >= first) & (AT[:, None] < 2 * first), 0, [0, KV])
    options["kv_ranges"] = runs
    found = gradients(arrays[0], arrays, attend(arrays, options), options)
    for x, z in zip(found, expected(*exact, bias_of(runs), exact[0]), strict=True):
        np.testing.assert_allclose(testing.to_float64(x, "bfloat16"), z, rtol=2 * UNIT["bfloat16"], atol=4 * UNIT["bfloat16"])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_keys_that_neither_the_first_nor_the_last_query_sees(dtype):
    """With so many queries, keys are packed once for all of them, and every key that any of these queries sees must be packed."""
    q, k, v = testing.make_qkv(1, 8, 2, 700, 2600, 32, dtype=dtype)
    runs = np.broadcast_to([0, 2600], (700, 2)).copy()
    runs[:9], runs[-9:] = (1400, 1410), (1200, 1205)
    right = expected(*(testing.to_float64(x, dtype) for x in (q, k, v)), bias_of(runs, 2600))[0]
    for level in ISA_LEVELS:
        with blitz_attn.isa(level):
            out = blitz_attn.block_sparse_attention(q, k, v, kv_ranges=runs, **bits_option(q))
        np.testing.assert_allclose(testing.to_float64(out, dtype), right, rtol=UNIT[dtype], atol=UNIT[dtype], err_msg=level)


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_ranges_of_any_size(dtype, isa_level):
    """A range from the least to the largest number of the dtype has all keys, and its reverse has none. Arrays may have any strides."""
    arrays, _, options = problem("float32", "BNSD")
    all_keys = blitz_attn.block_sparse_attention(*arrays, return_lse=True, **options)
    info = np.iinfo(dtype)
    wide = np.broadcast_to(np.array([info.min, info.max], dtype), (2, Q, 2))
    found = blitz_attn.block_sparse_attention(*arrays, kv_ranges=wide, return_lse=True, **options)
    assert all(same_bits(a, b) for a, b in zip(found, all_keys, strict=True))
    out, lse = blitz_attn.block_sparse_attention(*arrays, kv_ranges=wide[..., ::-1], return_lse=True, **options)
    assert not out.any()
    assert (lse == -np.inf).all()


def test_what_a_range_hides_is_not_read():
    """NaN outside all ranges reaches no result and no gradient."""
    (q, k, v), _, options = problem("float32", "BNSD")
    runs = np.broadcast_to([20, 150], (Q, 2))
    clean = blitz_attn.block_sparse_attention(q, k, v, kv_ranges=runs, return_lse=True, **options)
    for x in (k, v):
        x[:, :, :20] = x[:, :, 150:] = np.nan
    found = blitz_attn.block_sparse_attention(q, k, v, kv_ranges=runs, return_lse=True, **options)
    assert all(same_bits(a, b) for a, b in zip(found, clean, strict=True))
    dq, dk, dv = blitz_attn.block_sparse_attention_backward(q, q, k, v, *found, kv_ranges=runs, **options)
    assert np.isfinite(dq).all()
    assert not np.any([dk[:, :, :20].any(), dv[:, :, 150:].any()])


@pytest.mark.parametrize("kv_split", [None, 16, 32])
@pytest.mark.parametrize("window", [None, 12])
@pytest.mark.parametrize(("dtype", "kv_dtype"), [*((x, x) for x in DTYPES), ("bfloat16", "int8"), ("float32", "float8_e4m3")])
def test_an_image_in_a_paged_prompt(dtype, kv_dtype, window, kv_split):
    """Request 0 is a chunk of a prompt with an image, whose tokens see one another. Request 1 has no queries, request 2 one new token."""
    case = testing.make_paged(3, 4, 2, [70, 33, 1], 16, 32, 32, dtype, kv_dtype, q_lens=[20, 0, 1])
    place = 50 + np.arange(20)  # positions of request 0's queries; tokens 55 to 64 are the image
    runs = np.stack([np.zeros(21, int), np.r_[np.where((place >= 55) & (place < 65), 65, place + 1), 1]], axis=-1)
    seen, _ = check_paged(case, kv_ranges=runs, window=window, kv_split=kv_split)
    causal = np.stack([np.zeros(21, int), np.r_[place + 1, 1]], axis=-1)  # calls without ranges may take other kernels for short splits
    without_image, _ = attend_paged(case, kv_ranges=causal, window=window, kv_split=kv_split)
    differ = (without_image != seen).any(axis=(1, 2))
    assert np.flatnonzero(differ).tolist() == list(range(5, 14))  # the image's last token sees the same keys in both calls
