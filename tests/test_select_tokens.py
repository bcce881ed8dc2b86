"""Tokens that an indexer chooses are compared with the float64 twin at every level. Other tests check changes that must
change no bit, and refusals. Random problems with all options are in tests/fuzz/token_problems.py."""

import numpy as np
import pytest

import blitz_attn
from blitz_attn import reference, select

DTYPES = ("float32", "float16", "bfloat16", "float64")


def problem(dtype="float32", queries=37, keys=150, heads=5, dim=24, batch=2, seed=0):
    rng = np.random.default_rng(seed)
    q, k = rng.standard_normal((batch, queries, heads, dim)), rng.standard_normal((batch, keys, dim))
    weights = rng.standard_normal((batch, queries, heads))
    if dtype == "bfloat16":
        q, k = (np.asarray(x, np.float32).view(np.uint32) >> 16 for x in (q, k))
        return q.astype(np.uint16), k.astype(np.uint16), weights.astype(np.float32), {"dtype": "bfloat16"}
    return q.astype(dtype), k.astype(dtype), weights.astype("float64" if dtype == "float64" else "float32"), {}


def check(q, k, weights, top_k, **options):
    """The chosen keys and their scores, after a check that these scores are the best scores of the twin."""
    found, scores = select.select_tokens(q, k, weights, top_k, return_scores=True, **options)
    exact_keys, exact = reference.select_tokens(q, k, weights, top_k, return_scores=True, **options)
    bound = 1e-12 if q.dtype == np.float64 else 2e-5
    by_score = -np.sort(-scores, axis=-1) if options.get("ascending") or options.get("keep_tail") else scores
    expected = -np.sort(-exact, axis=-1)
    assert (np.isfinite(by_score) == np.isfinite(expected)).all()
    some = np.isfinite(expected)
    assert np.abs(by_score[some] - expected[some]).max(initial=0) <= bound * (1 + np.abs(expected[some]).max(initial=0))
    assert ((found >= 0) == (exact_keys >= 0)).all()
    return found, scores


@pytest.mark.parametrize("level", blitz_attn.isa_levels(available=True))
@pytest.mark.parametrize("dtype", DTYPES)
def test_levels_and_dtypes(dtype, level):
    q, k, weights, options = problem(dtype)
    with blitz_attn.isa(level):
        for causal in (False, True):
            check(q, k, weights, 16, causal=causal, **options)


@pytest.mark.parametrize(("queries", "heads", "dim"), [(37, 64, 128), (40, 70, 40), (5, 300, 64), (3, 512, 20)])
@pytest.mark.parametrize("level", blitz_attn.isa_levels(available=True))
def test_many_rows(level, queries, heads, dim):
    """Kernels on tiles score more rows together than other kernels do."""
    q, k, weights, options = problem("bfloat16", queries, 150, heads, dim, 1)
    with blitz_attn.isa(level):
        found, scores = check(q, k, weights, 16, causal=True, **options)
        for one in range(0, queries, 7):
            alone = select.select_tokens(q[:, one : one + 1], k[:, : 150 - queries + one + 1], weights[:, one : one + 1], 16, return_scores=True, **options)
            assert np.array_equal(alone[0][0, 0], found[0, one])
            assert np.array_equal(alone[1][0, 0], scores[0, one])


@pytest.mark.parametrize(("queries", "keys", "heads", "dim", "top_k"), [
    (1, 1, 1, 1, 1), (3, 700, 64, 128, 256), (70, 33, 1, 16, 40), (2, 2000, 3, 64, 1999), (1, 5000, 16, 32, 64), (9, 40, 512, 8, 7),
    (5, 64, 2, 576, 64), (40, 40, 300, 3, 1),
])  # fmt: skip
def test_sizes(queries, keys, heads, dim, top_k):
    q, k, weights, _ = problem("float32", queries, keys, heads, dim, 1)
    found, scores = check(q, k, weights, top_k, causal=True)
    for threads in (1, 2, 7):
        again = select.select_tokens(q, k, weights, top_k, causal=True, return_scores=True, num_threads=threads)
        assert np.array_equal(again[0], found)
        assert np.array_equal(again[1], scores)
    rising, theirs = select.select_tokens(q, k, weights, top_k, causal=True, ascending=True, return_scores=True)
    assert np.array_equal(rising, select.select_tokens(q, k, weights, top_k, causal=True, ascending=True))
    for row, by_score, own, by_key in zip(rising.reshape(-1, top_k), found.reshape(-1, top_k), theirs.reshape(-1, top_k), scores.reshape(-1, top_k), strict=True):
        n = (row >= 0).sum()
        order = np.argsort(by_score[:n])
        assert np.array_equal(row[:n], by_score[:n][order])
        assert np.array_equal(own[:n], by_key[:n][order])


def test_equal_scores_take_the_lower_key():
    q, k, weights = np.ones((1, 2, 3, 4), np.float32), np.ones((1, 900, 4), np.float32), np.ones((1, 2, 3), np.float32)
    k[0, 500:600] = 2
    for threads in (1, 4):
        found = select.select_tokens(q, k, weights, 150, num_threads=threads)
        assert np.array_equal(found, np.broadcast_to([*range(500, 600), *range(50)], (1, 2, 150)))


def test_what_is_not_finite():
    q, k, weights = np.ones((1, 1, 1, 2), np.float32), np.ones((1, 6, 2), np.float32), np.ones((1, 1, 1), np.float32)
    k[0, 1], k[0, 3], k[0, 4] = np.nan, np.inf, [np.inf, -np.inf]
    found, scores = select.select_tokens(q, k, weights, 6, return_scores=True)
    assert found[0, 0].tolist() == [3, 0, 2, 5, 1, 4]
    assert scores[0, 0, 0] == np.inf
    assert (scores[0, 0, 4:] == -np.inf).all()
    assert select.select_tokens(q, k, weights, 6, causal=True, q_begin=0)[0, 0].tolist() == [0, -1, -1, -1, -1, -1]  # the query sees no other key


def test_lengths_slices_and_packed_arrays_are_the_whole_call_cut():
    q, k, weights, _ = problem(batch=3)
    q_lens, kv_lens = [37, 5, 0], [150, 20, 77]
    found, scores = check(q, k, weights, 12, causal=True, q_lens=q_lens, kv_lens=kv_lens)
    assert (found[1, 5:] == -1).all()
    assert (found[2] == -1).all()
    cu_q, cu_kv = (np.concatenate([[0], np.cumsum(x)]) for x in (q_lens, kv_lens))
    packed = [np.concatenate([x[b, :n] for b, n in enumerate(lens)]) for x, lens in ((q, q_lens), (k, kv_lens), (weights, q_lens))]
    rows = check(*packed, 12, causal=True, cu_seqlens_q=cu_q, cu_seqlens_kv=cu_kv)
    for b, n in enumerate(q_lens):
        assert np.array_equal(rows[0][cu_q[b] : cu_q[b + 1]], found[b, :n])
        assert np.array_equal(rows[1][cu_q[b] : cu_q[b + 1]], scores[b, :n])
    whole = select.select_tokens(q, k, weights, 12, causal=True)
    part = select.select_tokens(q[:, 10:30], k, weights[:, 10:30], 12, causal=True, q_begin=150 - 37 + 10)
    assert np.array_equal(part, whole[:, 10:30])


def test_strides():
    q, k, weights, _ = problem()
    expected = select.select_tokens(q, k, weights, 9)
    views = q[:, :, ::-1].copy()[:, :, ::-1], np.repeat(k, 2, axis=1)[:, ::2], np.asfortranarray(weights)
    assert np.array_equal(select.select_tokens(*views, 9), expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tensors_give_tensors(dtype):
    torch = pytest.importorskip("torch")
    q, k, weights, _ = problem()
    q, k, weights = (torch.from_numpy(x) for x in (q, k, weights))
    found, scores = select.select_tokens(q.to(getattr(torch, dtype)), k.to(getattr(torch, dtype)), weights.double(), 9, return_scores=True)
    assert (found.dtype, scores.dtype) == (torch.int32, torch.float32)
    if dtype == "float32":
        assert np.array_equal(found.numpy(), select.select_tokens(q.numpy(), k.numpy(), weights.numpy(), 9))


def test_attention_over_what_is_chosen():
    rng = np.random.default_rng(1)
    q, k, weights, _ = problem(queries=60, keys=60, batch=1)
    selected = select.select_tokens(q, k, weights, 8, causal=True)
    heads = [rng.standard_normal((1, 4, 60, 16), dtype=np.float32) for _ in range(3)]
    out = blitz_attn.block_sparse_attention(*heads, selected[:, None], block_shape=(1, 1), causal=True)
    mask = np.zeros((60, 61), bool)
    np.put_along_axis(mask, np.where(selected[0] < 0, 60, selected[0]), True, axis=1)
    expected = blitz_attn.block_sparse_attention(*heads, attn_mask=mask[:, :60], causal=True)
    np.testing.assert_allclose(out, expected, atol=1e-5)


@pytest.mark.parametrize("packed", [False, True])
def test_pools_and_their_tail(packed):
    """A query at token t may choose the pools that end by t, and its tail is the tokens after the last of these pools."""
    q, k, weights, _ = problem(queries=23, keys=6, batch=1)
    options = {"causal": True, "pool_size": 4, "kv_lens": [27]}  # 6 complete pools, and 3 tokens that have no row
    if packed:
        q, k, weights = (x[0] for x in (q, k, weights))
        options |= {"cu_seqlens_q": [0, 23], "cu_seqlens_kv": [0, 6]}
    found, scores = (x.reshape(23, -1) for x in check(q, k, weights, 3, keep_tail=True, **options))
    rising = select.select_tokens(q, k, weights, 3, keep_tail=True, ascending=True, **options).reshape(23, -1)
    chosen = select.select_tokens(q, k, weights, 3, **options).reshape(23, -1)
    for i, row in enumerate(found):
        tokens = 5 + i  # tokens that the query sees
        n = min(3, tokens // 4)
        assert (row[:n] < tokens // 4).all()
        assert np.array_equal(np.delete(row, n if tokens % 4 else 3), chosen[i])
        assert row[n] == (tokens // 4 if tokens % 4 else -1)
        assert scores[i, n] == (np.inf if tokens % 4 else -np.inf)
        assert np.array_equal(rising[i, : n + 1], [*np.sort(row[:n]), row[n]])
    if not packed:
        part = select.select_tokens(q[:, 5:9], k, weights[:, 5:9], 3, keep_tail=True, q_begin=9, **options)
        assert np.array_equal(part[0], found[5:9])


def test_attention_over_pools_and_their_tail():
    rng = np.random.default_rng(2)
    q, k, weights, _ = problem(queries=30, keys=7, batch=1)
    selected = select.select_tokens(q, k, weights, 3, causal=True, pool_size=4, kv_lens=[30], keep_tail=True)
    heads = [rng.standard_normal((1, 2, 30, 16), dtype=np.float32) for _ in range(3)]
    out = blitz_attn.block_sparse_attention(*heads, selected[:, None], block_shape=(1, 4), causal=True)
    mask = np.zeros((30, 9), bool)
    np.put_along_axis(mask, selected[0], True, axis=1)
    mask = np.repeat(mask[:, :8], 4, axis=1)[:, :30] & np.tri(30, dtype=bool)
    np.testing.assert_allclose(out, blitz_attn.block_sparse_attention(*heads, attn_mask=mask), atol=1e-5)


@pytest.mark.parametrize("size", [5, 16, 64, 1000])
def test_the_score_of_a_block_is_its_largest(size):
    q, k, weights, _ = problem(queries=9, keys=3000, batch=1)
    keys, every = select.select_tokens(q, k, weights, 3000, causal=True, ascending=True, return_scores=True)  # scores of single keys
    found, scores = check(q, k, weights, 12, causal=True, block_size=size)
    for i in range(9):
        own = every[0, i][keys[0, i] >= 0]
        largest = np.array([own[j : j + size].max() for j in range(0, len(own), size)])
        n = min(12, len(largest))
        assert np.array_equal(found[0, i, :n], np.argsort(-largest, kind="stable")[:12])
        assert np.array_equal(scores[0, i, :n], largest[found[0, i, :n]])
    for threads in (2, 7):
        assert np.array_equal(select.select_tokens(q, k, weights, 12, causal=True, block_size=size, num_threads=threads), found)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_two_heads_make_products_as_they_are(dtype):
    q, k, _, options = problem(dtype, heads=1)
    other = q ^ np.uint16(0x8000) if dtype == "bfloat16" else -q
    weights = np.broadcast_to(np.float32([1, -1]), (2, 37, 2))
    found, scores = select.select_tokens(np.concatenate([q, other], axis=2), k, weights, 38, block_size=4, scale=1.0, return_scores=True, **options)
    exact_q, exact_k = (reference.to_float64(x, dtype) for x in (q[:, :, 0], k))
    largest = np.maximum.reduceat(exact_q @ exact_k.swapaxes(1, 2), np.arange(0, 150, 4), axis=2)
    assert (largest < 0).any()
    assert np.array_equal(found, np.argsort(-largest, axis=2))
    np.testing.assert_allclose(scores, -np.sort(-largest, axis=2), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("level", blitz_attn.isa_levels(available=True))
@pytest.mark.parametrize("dtype", DTYPES)
def test_pages_give_the_bits_of_the_keys_side_by_side(dtype, level):
    q, k, weights, options = problem(dtype, keys=144, batch=2)
    pages = np.random.default_rng(0).permutation(20)[:18].reshape(2, 9)
    cache = np.zeros((20, 16, 24), k.dtype)
    cache[pages] = k.reshape(2, 9, 16, 24)
    options |= {"kv_lens": [144, 77], "causal": True, "return_scores": True}
    with blitz_attn.isa(level):
        expected = select.select_tokens(q, k, weights, 12, **options)
        check(q, cache, weights, 12, block_tables=pages, **{name: x for name, x in options.items() if name != "return_scores"})
        packed = [x.reshape(-1, *x.shape[2:]) for x in (q, weights)]
        found = (select.select_tokens(q, cache, weights, 12, block_tables=pages, **options),
                 select.select_tokens(packed[0], cache, packed[1], 12, block_tables=pages, cu_seqlens_q=[0, 37, 74], **options))  # fmt: skip
        for one in found:
            assert all(x.tobytes() == y.tobytes() for x, y in zip(one, expected, strict=True))


@pytest.mark.parametrize("level", blitz_attn.isa_levels(available=True))
@pytest.mark.parametrize("kv_dtype", ["int8", "float8_e4m3"])
def test_keys_of_8_bits_give_what_their_float32_keys_give(kv_dtype, level):
    q, k, weights, _ = problem()
    values, scale = blitz_attn.quantize_kv(k, kv_dtype)
    options = {"causal": True, "return_scores": True}
    with blitz_attn.isa(level):
        expected = select.select_tokens(q, blitz_attn.dequantize_kv(values, scale), weights, 12, **options)
        found = select.select_tokens(q, values, weights, 12, k_scale=scale, kv_dtype=kv_dtype, **options)
        assert all(x.tobytes() == y.tobytes() for x, y in zip(found, expected, strict=True))
        for dtype in ("float16", "bfloat16"):
            half, _, _, named = problem(dtype)
            check(half, values, weights, 12, causal=True, k_scale=scale, kv_dtype=kv_dtype, **named)


@pytest.mark.parametrize("level", blitz_attn.isa_levels(available=True))
@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8", "float8_e4m3"])
@pytest.mark.parametrize(("queries", "keys", "heads", "dim"), [(1, 70, 1, 1), (40, 33, 3, 31), (20, 100, 40, 33), (9, 65, 70, 100), (2, 40, 512, 64)])
def test_bfloat16_queries_at_once_and_one_by_one(queries, keys, heads, dim, kv_dtype, level):
    """The kernels over pairs and tiles fill up heads and dims with zeros, and multiply scores by the scales of 8-bit keys."""
    q, k, weights, options = problem("bfloat16", queries, keys, heads, dim)
    if kv_dtype != "bfloat16":
        k, scale = blitz_attn.quantize_kv(np.random.default_rng(1).standard_normal(k.shape, dtype=np.float32), kv_dtype)
        scale[:, ::5] *= -1
        scale[:, 3::7] = 0
        options |= {"k_scale": scale, "kv_dtype": kv_dtype}
    options |= {"causal": True}
    with blitz_attn.isa(level):
        found, scores = check(q, k, weights, 20, **options)
        for i in range(queries):
            one = slice(i, i + 1)
            alone = select.select_tokens(q[:, one], k, weights[:, one], 20, q_begin=keys - queries + i, return_scores=True, **options)
            assert alone[0].tobytes() == found[:, one].tobytes()
            assert alone[1].tobytes() == scores[:, one].tobytes()


@pytest.mark.parametrize("more", [{}, {"block_size": 7}, {"pool_size": 3, "keep_tail": True}])
def test_a_least_score(more):
    q, k, weights, _ = problem(keys=2000, batch=1)
    found, scores = (x.reshape(37, -1) for x in select.select_tokens(q, k, weights, 40, causal=True, return_scores=True, **more))
    least = float(np.median(scores[np.isfinite(scores)]))
    fewer, their = (x.reshape(37, -1) for x in select.select_tokens(q, k, weights, 40, causal=True, return_scores=True, min_score=least, **more))
    for row, own, part, theirs in zip(found, scores, fewer, their, strict=True):
        kept = own >= least  # also where the score equals the least one
        assert np.array_equal(part, np.pad(row[kept], (0, (~kept).sum()), constant_values=-1))
        assert np.array_equal(theirs, np.pad(own[kept], (0, (~kept).sum()), constant_values=-np.inf))
    assert 0 < (fewer < 0).sum() < fewer.size


def test_weights_that_are_not_read_may_be_anything():
    q, k, weights, _ = problem()
    expected = select.select_tokens(q, k, weights, 9, q_lens=[37, 4])
    weights[1, 4:] = np.nan
    assert np.array_equal(select.select_tokens(q, k, weights, 9, q_lens=[37, 4]), expected)
    with pytest.raises(ValueError, match="weights: expected finite numbers, got nan for head 0 of query 4 of sequence 1"):
        select.select_tokens(q, k, weights, 9, q_lens=[37, 5])
