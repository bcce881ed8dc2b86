"""The float64 twins: against softmax written out an element at a time, and rules with results that are known."""

import inspect
import itertools
import math

import numpy as np
import pytest

import blitz_attn
from blitz_attn import reference, testing
from blitz_attn._reference import attend
from cases import DTYPES, LAYOUTS, bits_option, random_lists


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
    monkeypatch.setattr(attend, "_STRIP_ELEMENTS", 500)
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


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("batch", "queries", "keys"), [(0, 4, 5), (2, 0, 5), (2, 4, 0), (2, 0, 0), (0, 0, 0)])
def test_results_of_empty_problems_are_the_librarys(layout, batch, queries, keys):
    def array(tokens, heads, dim):
        shapes = {"BNSD": (batch, heads, tokens, dim), "BSND": (batch, tokens, heads, dim), "BSH": (batch, tokens, heads * dim)}
        return np.ones(shapes.get(layout, (batch * tokens, heads, dim)))

    q, k, v, options = array(queries, 4, 8), array(keys, 2, 8), array(keys, 2, 6), {"layout": layout}
    if layout == "BSH":
        options |= {"num_heads": 4, "num_kv_heads": 2}
    if layout == "TND":
        options |= {"cu_seqlens_q": np.arange(batch + 1) * queries, "cu_seqlens_kv": np.arange(batch + 1) * keys}
    results = []
    for functions in (blitz_attn, reference):
        out, lse = functions.block_sparse_attention(q, k, v, return_lse=True, **options)
        results.append((out, lse, *functions.block_sparse_attention_backward(out, q, k, v, out, lse, **options)))
    for ours, expected in zip(*results, strict=True):
        np.testing.assert_array_equal(ours, expected, strict=True)


@pytest.mark.parametrize("per_query_head", [False, True])
def test_selection_for_no_queries(per_query_head):
    k_cache, tables = np.ones((6, 16, 2, 8)), np.array([[0, 1, 2], [3, 4, 5]])
    call = (np.ones((0, 4, 8)), k_cache, tables, [40, 48], 2)
    options = {"block_size": 16, "method": "max", "q_lens": [0, 0], "per_query_head": per_query_head}
    for ours, expected in zip(*(f.select_blocks(*call, **options) for f in (blitz_attn, reference)), strict=True):
        np.testing.assert_array_equal(ours, expected)


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


# ---- Refusals ------------------------------------------------------------------------------------------------------


def dense(*shape, **options):
    x = np.zeros(shape)
    return reference.block_sparse_attention(x, x, x, **options)


def paged(**options):
    cache, q = np.zeros((4, 8, 2, 4)), np.zeros((2, 2, 4))
    return reference.paged_attention(q, cache, cache, np.array([[0, 1], [2, 3]]), options.pop("seq_lens", [9, 16]), **options)


def nsa(queries=12, **options):
    x = np.zeros((1, 12, 2, 4))
    return reference.nsa(x[:, :queries], x, x, compress_block_size=4, window_size=3, **options)


def nsa_gradient(*shape, **options):
    return reference.nsa_backward(np.zeros(shape), nsa(**options, return_context=True)[1])


@pytest.mark.parametrize(
    ("error", "sentence", "call"),
    [
        (ValueError, "layout: expected one of BNSD, BSND, BSH, TND, got 'NSD'", lambda: dense(1, 2, 12, 4, layout="NSD")),
        (ValueError, r"q_lens: expected 1 lengths within \[12\], got \[13\]", lambda: dense(1, 2, 12, 4, q_lens=[13])),
        (
            ValueError,
            r"cu_seqlens_q: expected lengths rising from 0 to 12, got \[0, 9, 5\]",
            lambda: dense(12, 2, 4, layout="TND", cu_seqlens_q=[0, 9, 5], cu_seqlens_kv=[0, 12]),
        ),
        (ValueError, "sabi: expected each block column once per row", lambda: dense(1, 2, 12, 4, sabi=np.zeros((1, 1, 1, 2), int))),
        (TypeError, "got an unexpected keyword argument 'windows'", lambda: paged(windows=3)),
        (ValueError, "kv_layout: expected 'NHD' or 'HND', got 'NDH'", lambda: paged(kv_layout="NDH")),
        (ValueError, r"seq_lens: expected 2 lengths within \[16, 16\], got \[9, 17\]", lambda: paged(seq_lens=[9, 17])),
        (ValueError, "num_selected_blocks: expected at least init_blocks", lambda: nsa(num_selected_blocks=2)),
        (ValueError, "block_indices: expected blocks from 0 to 2", lambda: nsa(block_indices=np.full((1, 2, 12, 1), 3))),
        (TypeError, "ctx: expected the context that nsa returned, got None", lambda: reference.nsa_backward(np.zeros((1, 12, 2, 4)), None)),
        (ValueError, "ctx: expected that of a call with as many queries as keys", lambda: nsa_gradient(1, 5, 2, 4, queries=5)),
        (ValueError, r"dout: expected shape \(1, 12, 2, 4\) of the result", lambda: nsa_gradient(1, 11, 2, 4)),
        (TypeError, 'dtype: expected "bfloat16" to read uint16 bits', lambda: reference.to_float64(np.zeros(1, np.uint16))),
        (ValueError, "dtype: expected float64, float32, float16 or bfloat16, got int8", lambda: reference.round_to([1.0], "int8")),
    ],
)
def test_refusals(error, sentence, call):
    """What would otherwise have a wrong result. Of other wrong arguments, NumPy's errors are enough."""
    with pytest.raises(error, match=sentence):
        call()


def test_options_of_a_twin_are_those_of_its_operation():
    for name, function in inspect.getmembers(blitz_attn, inspect.isfunction):
        twin = getattr(reference, name, None)
        if twin is not None:
            assert set(inspect.signature(function).parameters) - set(inspect.signature(twin).parameters) <= {"num_threads"}, name
