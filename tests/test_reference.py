"""The float64 twins: against softmax written out an element at a time, and rules with results that are known."""

import itertools
import math

import numpy as np
import pytest

import blitz_attn
from blitz_attn import reference, testing
from blitz_attn._reference import dense
from cases import DTYPES, bits_option, random_lists


def by_element(q, k, v, scale, sees):
    """(out, lse) of BNSD arrays, one product at a time. `sees(b, h, i, j)` says which keys a query may use."""
    batch, heads, q_len, _ = q.shape
    group = heads // k.shape[1]
    out, lse = np.zeros((*q.shape[:3], v.shape[3])), np.full(q.shape[:3], -np.inf)
    for b, h, i in itertools.product(range(batch), range(heads), range(q_len)):
        keys = [j for j in range(k.shape[2]) if sees(b, h, i, j)]
        if not keys:
            continue
        weights = [math.exp(scale * sum(x * y for x, y in zip(q[b, h, i], k[b, h // group, j], strict=True))) for j in keys]
        lse[b, h, i] = math.log(math.fsum(weights))
        for w, j in zip(weights, keys, strict=True):
            out[b, h, i] += w / math.fsum(weights) * v[b, h // group, j]
    return out, lse


RULES = {
    "dense": {},
    "causal": {"causal": True},
    "window": {"window": (3, 2)},
    "left": {"window": (2, -1)},
    "right": {"window": (-1, 1)},
    "causal window": {"window": (4, 5), "causal": True},
    "lengths": {"q_lens": [5, 9], "kv_lens": [13, 0], "causal": True},
    "scale": {"scale": -0.7},
}


@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("rule", RULES)
def test_against_elements(rule, listed):
    options = RULES[rule]
    q, k, v = testing.make_qkv(2, 4, 2, 9, 13, 5, v_dim=3, dtype="float64", seed=3)
    lists = random_lists(np.random.default_rng(0), 2, 4, 3, 4, empty=0.2) if listed else None
    q_lens, kv_lens = options.get("q_lens", [9, 9]), options.get("kv_lens", [13, 13])
    left, right = options.get("window", (-1, -1))

    def sees(b, h, i, j):
        away = j - (i + kv_lens[b] - q_lens[b])
        kept = not listed or j // 4 in lists[b, h, i // 4].tolist()
        inside = i < q_lens[b] and j < kv_lens[b]
        return kept and inside and not (options.get("causal") and away > 0) and (left < 0 or away >= -left) and (right < 0 or away <= right)

    out, lse = reference.block_sparse_attention(q, k, v, lists, block_shape=(4, 4), return_lse=True, **options)
    expected, expected_lse = by_element(q, k, v, options.get("scale", 1 / math.sqrt(5)), sees)
    np.testing.assert_allclose(out, expected, rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("dtype", DTYPES)
def test_inputs_are_taken_at_their_exact_values(dtype):
    arrays = testing.make_qkv(1, 1, 1, 6, 6, 4, dtype=dtype)
    option = bits_option(arrays[0])
    wide = [testing.to_float64(x, dtype) for x in arrays]
    np.testing.assert_array_equal(reference.block_sparse_attention(*arrays, **option), reference.block_sparse_attention(*wide))


def test_strips_do_not_show(monkeypatch):
    q, k, v = testing.make_qkv(1, 2, 1, 70, 90, 8, dtype="float64")
    lists = random_lists(np.random.default_rng(0), 1, 2, 3, 3)
    calls = [
        {"sabi": None},
        {"sabi": lists, "block_shape": (32, 32)},
        {"sabi": lists, "block_shape": (32, 32), "causal": True, "window": (20, -1)},
    ]
    whole = [reference.block_sparse_attention(q, k, v, return_lse=True, **c) for c in calls]
    monkeypatch.setattr(dense, "_STRIP_ELEMENTS", 500)
    for (out, lse), call in zip(whole, calls, strict=True):
        narrow, narrow_lse = reference.block_sparse_attention(q, k, v, return_lse=True, **call)
        np.testing.assert_allclose(narrow, out, rtol=1e-13, atol=1e-14)
        np.testing.assert_allclose(narrow_lse, lse, rtol=1e-13)


def test_memory_is_bounded():
    """8192 x 8192 scores would be 512 MiB."""
    tracemalloc = pytest.importorskip("tracemalloc")
    q, k, v = testing.make_qkv(1, 1, 1, 8192, 8192, 4)
    tracemalloc.start()
    try:
        reference.block_sparse_attention(q, k, v)
        assert tracemalloc.get_traced_memory()[1] < 256 << 20
    finally:
        tracemalloc.stop()


def test_nothing_to_attend():
    q, k, v = testing.make_qkv(2, 2, 2, 5, 0, 4)
    out, lse = reference.block_sparse_attention(q, k, v, return_lse=True)
    assert (out == 0).all()
    assert (lse == -np.inf).all()
    q, k, v = testing.make_qkv(0, 2, 2, 5, 5, 4)
    assert reference.block_sparse_attention(q, k, v).shape == (0, 2, 5, 4)
    q, k, v = testing.make_qkv(1, 2, 2, 0, 5, 4)
    assert reference.block_sparse_attention(q, k, v, return_lse=True)[1].shape == (1, 2, 0)


@pytest.mark.parametrize("layout", ["BNSD", "BSND", "BSH", "TND"])
@pytest.mark.parametrize(("batch", "queries", "keys"), [(0, 4, 5), (2, 0, 5), (2, 4, 0), (2, 0, 0), (0, 0, 0)])
def test_shapes_of_empty_problems_are_the_librarys(layout, batch, queries, keys):
    def array(tokens, heads, dim):
        shapes = {"BNSD": (batch, heads, tokens, dim), "BSND": (batch, tokens, heads, dim), "BSH": (batch, tokens, heads * dim)}
        return np.ones(shapes.get(layout, (batch * tokens, heads, dim)))

    q, k, v, options = array(queries, 4, 8), array(keys, 2, 8), array(keys, 2, 6), {"layout": layout}
    if layout == "BSH":
        options |= {"num_heads": 4, "num_kv_heads": 2}
    if layout == "TND":
        options |= {"cu_seqlens_q": np.arange(batch + 1) * queries, "cu_seqlens_kv": np.arange(batch + 1) * keys}
    shapes = []
    for functions in (blitz_attn, reference):
        out, lse = functions.block_sparse_attention(q, k, v, return_lse=True, **options)
        grads = functions.block_sparse_attention_backward(out, q, k, v, out, lse, **options)
        shapes.append([x.shape for x in (out, lse, *grads)])
    assert shapes[0] == shapes[1]


def test_selection_for_no_queries():
    k_cache, tables = np.ones((6, 16, 2, 8)), np.array([[0, 1, 2], [3, 4, 5]])
    for per_query_head in (False, True):
        found = [
            functions.select_blocks(
                np.ones((0, 4, 8)), k_cache, tables, [40, 48], 2, block_size=16, method="max", q_lens=[0, 0], per_query_head=per_query_head
            )
            for functions in (blitz_attn, reference)
        ]
        for ours, expected in zip(*found, strict=True):
            assert np.array_equal(ours, expected)


def test_slopes_and_sinks_of_float64_calls_are_read_as_float32():
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 1, 2, 20, 8))
    options = {"alibi_slopes": [0.1, 0.3], "sinks": [0.1, 0.7], "return_lse": True}
    for ours, expected in zip(*(f.block_sparse_attention(q, k, v, **options) for f in (blitz_attn, reference)), strict=True):
        np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-13)


def test_out_is_written_and_returned():
    q, k, v = testing.make_qkv(1, 1, 1, 3, 3, 2)
    out = np.full((1, 1, 3, 2), np.nan)
    assert reference.block_sparse_attention(q, k, v, out=out) is out
    np.testing.assert_array_equal(out, reference.block_sparse_attention(q, k, v))


# ---- Same precision ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "low", "high"), [("float32", 1e-9, 1e-6), ("float16", 1e-5, 3e-3), ("bfloat16", 1e-4, 3e-2)])
def test_same_precision_errs_as_its_dtype_does(dtype, low, high):
    q, k, v = testing.make_qkv(1, 2, 1, 200, 200, 64, dtype=dtype)
    _, dense = testing.error_rule(np.zeros((1, 2, 200, 64)), q, k, v, causal=True, **bits_option(q))
    assert low < dense.relative < high


def test_same_precision_of_float64_is_the_reference():
    q, k, v = testing.make_qkv(1, 1, 1, 20, 20, 8, dtype="float64")
    np.testing.assert_array_equal(reference.dense_same_precision(q, k, v), reference.block_sparse_attention(q, k, v))


def test_same_precision_of_bfloat16_against_torch():
    """Products summed in float32; scores, probabilities and result rounded: what an eager framework does."""
    torch = pytest.importorskip("torch")
    q, k, v = testing.make_qkv(1, 1, 1, 64, 64, 16, dtype="bfloat16")
    q_t, k_t, v_t = (torch.from_numpy(testing.to_float64(x, "bfloat16")).to(torch.bfloat16) for x in (q, k, v))
    scores = (q_t @ k_t.transpose(-1, -2)).float() * 0.25  # a power of two: rounding before or after it is the same
    expected = (torch.softmax(scores.to(torch.bfloat16), -1) @ v_t).double().numpy()
    got = reference.dense_same_precision(q, k, v, **bits_option(q))
    assert (got == expected).mean() > 0.97  # the rest: a float32 sum in another order, rounded the other way
    np.testing.assert_allclose(got, expected, rtol=2**-7, atol=1e-3)


# ---- NaN and inf ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_bad_values_stay_in_rows_that_see_them(bad):
    q, k, v = testing.make_qkv(1, 1, 1, 8, 8, 4, dtype="float64")
    clean = reference.block_sparse_attention(q, k, v, causal=True)
    v[0, 0, 5, 2] = bad
    out = reference.block_sparse_attention(q, k, v, causal=True)
    np.testing.assert_allclose(out[0, 0, :5], clean[0, 0, :5], rtol=1e-14)
    np.testing.assert_allclose(out[0, 0, 5:, [0, 1, 3]], clean[0, 0, 5:, [0, 1, 3]], rtol=1e-13)
    assert (~np.isfinite(out[0, 0, 5:, 2])).all()
    k[0, 0, 6, 0] = np.nan
    out, lse = reference.block_sparse_attention(q, k, v, causal=True, return_lse=True)
    np.testing.assert_allclose(out[0, 0, :5], clean[0, 0, :5], rtol=1e-14)
    assert np.isnan(out[0, 0, 6:]).all()
    assert np.isnan(lse[0, 0]).tolist() == [False] * 6 + [True] * 2


# ---- Merging -------------------------------------------------------------------------------------------------------


def test_merge_of_shards_is_the_whole():
    q, k, v = testing.make_qkv(2, 3, 3, 10, 30, 8, dtype="float64")
    out, lse = reference.block_sparse_attention(q, k, v, return_lse=True)
    shards = [
        reference.block_sparse_attention(q, k[:, :, a:b], v[:, :, a:b], return_lse=True) for a, b in ((0, 7), (7, 7), (7, 29), (29, 30))
    ]
    merged, merged_lse = reference.merge_states_n([o for o, _ in shards], [m for _, m in shards])
    np.testing.assert_allclose(merged, out, rtol=1e-12)
    np.testing.assert_allclose(merged_lse, lse, rtol=1e-13)
    two, two_lse = reference.merge_states(*reference.merge_states(*shards[0], *shards[2]), *shards[3])
    np.testing.assert_allclose(two, out, rtol=1e-12)
    np.testing.assert_allclose(two_lse, lse, rtol=1e-13)


def test_merge_of_nothing():
    empty = np.full((1, 1, 2, 3), np.nan), np.full((1, 1, 2), -np.inf)
    out, lse = reference.merge_states(*empty, *empty)
    assert (out == 0).all()
    assert (lse == -np.inf).all()


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda x: reference.block_sparse_attention(x, x, x, layout="NSD"), "layout: expected BNSD, BSND, BSH or TND, got 'NSD'"),
        (lambda x: reference.block_sparse_attention(x, x, x, block_shape=(0, 1)), "block_shape: expected two positive numbers"),
        (lambda x: reference.block_sparse_attention(x, x, x, window=(-2, 0)), "window: expected two counts of tokens or -1"),
        (lambda x: reference.block_sparse_attention(x, x, x, q_lens=[5]), "q_lens: expected 1 lengths within"),
        (lambda x: reference.block_sparse_attention(x, x[:, :, :2], x), "v: expected heads and tokens of k"),
        (lambda x: reference.block_sparse_attention(x, x[:, :0], x[:, :0]), "k: expected a number of heads that divides 2, got 0"),
        (lambda x: reference.block_sparse_attention(x[0], x[0], x[0], layout="BSH"), "num_heads: expected a number of heads"),
        (lambda x: reference.block_sparse_attention(x[0], x[0], x[0], layout="TND"), "cu_seqlens_q: expected cumulative lengths"),
        (lambda x: reference.merge_states_n([], []), "lses: expected as many as outs and at least one, got 0 for 0"),
        (lambda x: reference.merge_states(x, x, x, x), "lses: expected shape"),
    ],
)
def test_refusals(call, sentence):
    with pytest.raises(ValueError, match=sentence):
        call(np.zeros((1, 2, 4, 3)))
