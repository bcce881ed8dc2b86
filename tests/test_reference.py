"""Tests of the float64 twins by themselves.

tests/test_problems.py compares the twins of attention with the fuzzer's oracle, which follows the formulas element by element. test_nsa.py
compares the twins of native sparse attention with the library.
"""

import inspect

import numpy as np
import pytest

import blitz_attn
from blitz_attn import reference, testing
from blitz_attn._reference import attend
from cases import LAYOUTS, bits_option
from cases_nsa import MODES, MSLK, WEIGHTS, every_mode, problem, tensors


@every_mode
def test_results_do_not_depend_on_strips(mode, monkeypatch):
    """Scores of listed blocks, of a window and of compressed keys are computed in strips."""
    q, k, v, _ = problem(40, 4, 2, 5, 3, dtype="float64")
    dout, results = tensors((2, 40, 4, 3), dtype="float64"), []
    for elements in (attend._STRIP_ELEMENTS, 600):
        monkeypatch.setattr(attend, "_STRIP_ELEMENTS", elements)
        out, context = reference.nsa(q, k, v, return_context=True, **MODES[mode])
        results.append([out, *reference.nsa_backward(dout, context)[:3]])
    np.testing.assert_allclose(results[1][0], results[0][0], rtol=1e-12, atol=1e-14)
    for a, b in zip(*results, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-13)


def test_memory_is_bounded():
    """8192 x 8192 scores would take 512 MiB."""
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


@pytest.mark.parametrize("causal", [True, False])
def test_groups_of_compressed_keys_where_there_are_none(causal):
    """A sequence that is shorter than a block has no compressed keys, so that only the branch of the window is not 0."""
    q, k, v, _ = problem(3, 4, 2, 5, 3, batch=1, dtype="float64")
    out = reference.nsa(q, k, v, **MSLK, causal=causal, num_cmp_selected_blocks=1)
    window = reference.window_attention(q, k, v, MSLK["window_size"], causal=causal)
    np.testing.assert_allclose(out, window / 3, rtol=1e-12, atol=1e-13)


@every_mode
@pytest.mark.parametrize(("tokens", "batch"), [(0, 2), (5, 0)])
def test_nsa_of_nothing(tokens, batch, mode):
    q, k, v, _ = problem(tokens, 4, 2, 5, 3, batch=batch, dtype="float64")
    out, context = reference.nsa(q, k, v, return_context=True, **MODES[mode])
    assert out.shape == (batch, tokens, 4, 3)
    assert [x.shape for x in reference.nsa_backward(out, context)[:3]] == [q.shape, k.shape, v.shape]


def test_shapes_of_no_sequences():
    """Results for a batch without entries still have axes for the blocks and rows of its length. Packed arrays without sequences have neither."""
    x = np.ones((0, 5, 2, 4))
    k_cmp, _ = reference.compress_kv(x, x, 2)
    assert k_cmp.shape == (0, 2, 2, 4)
    assert reference.score_and_select_blocks(x, k_cmp, 3, 2, compress_stride=2, init_blocks=0).shape == (0, 2, 5, 3)
    assert reference.score_and_select_blocks(x, k_cmp, 3, 2, mode="mslk", q_tile_size=4).shape == (0, 2, 2, 3)
    for empty, packed in ((x, {}), (np.ones((0, 2, 4)), {"cu_seqlens": [0]})):
        out, lse = reference.window_attention(empty, empty, empty, 3, return_lse=True, **packed)
        grads = reference.window_attention_backward(empty, empty, empty, empty, out, lse, 3, **packed)
        assert [g.shape for g in grads] == [empty.shape] * 3


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


@pytest.mark.parametrize(("dtype", "low", "high"), [("float32", 1e-9, 1e-6), ("float16", 1e-5, 3e-3), ("bfloat16", 1e-4, 3e-2)])
@pytest.mark.parametrize("mode", ["paper", "mslk"])
def test_same_precision_of_nsa_errs_as_its_dtype_does(mode, dtype, low, high):
    q, k, v, options = problem(60, 4, 2, 16, dtype=dtype, weights=WEIGHTS[:3])
    bits = {"dtype": "bfloat16"} if q.dtype == np.uint16 else {}
    options = {**MODES[mode], **options, **bits}
    exact, context = reference.nsa(q, k, v, return_context=True, **options)
    options["block_indices"] = context.block_indices
    rough, rough_context = reference.nsa_same_precision(q, k, v, **options)
    assert low < testing.error_of(rough, exact).relative < high
    dout = tensors(exact.shape, seed=3)
    for ours, true in zip(*(reference.nsa_backward(dout, c) for c in (rough_context, context)), strict=True):
        if true is not None:
            assert low < testing.error_of(ours, true).relative < 4 * high


def test_same_precision_of_float64_is_the_reference():
    q, k, v = testing.make_qkv(1, 1, 1, 20, 20, 8, dtype="float64")
    np.testing.assert_array_equal(reference.dense_same_precision(q, k, v), reference.block_sparse_attention(q, k, v))
    q, k, v, _ = problem(20, dtype="float64")
    np.testing.assert_array_equal(reference.nsa_same_precision(q, k, v, **MSLK)[0], reference.nsa(q, k, v, **MSLK))


def test_same_precision_of_bfloat16_against_torch():
    """Products are summed in float32, and scores, probabilities and results are rounded, as in an eager framework."""
    torch = pytest.importorskip("torch")
    q, k, v = testing.make_qkv(1, 1, 1, 64, 64, 16, dtype="bfloat16")
    q_t, k_t, v_t = (torch.from_numpy(testing.to_float64(x, "bfloat16")).to(torch.bfloat16) for x in (q, k, v))
    scores = (q_t @ k_t.transpose(-1, -2)).float() * 0.25  # a power of two, so that it may come before or after rounding
    expected = (torch.softmax(scores.to(torch.bfloat16), -1) @ v_t).double().numpy()
    got = reference.dense_same_precision(q, k, v, **bits_option(q))
    assert (got == expected).mean() > 0.97  # the others are summed in another order, and round differently
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
        (
            ValueError,
            r"attn_mask: expected shape .*, got \(13, 12\)",
            lambda: dense(1, 2, 12, 4, attn_mask=np.zeros((13, 12), np.bool_)),
        ),
        (TypeError, "attn_mask: expected bool, float32, .*, got int64", lambda: dense(1, 2, 12, 4, attn_mask=np.zeros((12, 12), int))),
        (ValueError, r"alibi_slopes: expected shape \(2,\), .*, got \(1, 2\)", lambda: dense(1, 2, 12, 4, alibi_slopes=np.zeros((1, 2)))),
        (TypeError, "alibi_slopes: expected numbers, got complex64", lambda: dense(1, 2, 12, 4, alibi_slopes=np.zeros(2, np.complex64))),
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
    """The twins refuse arguments that would give a wrong result. For other wrong arguments, NumPy's errors are enough."""
    with pytest.raises(error, match=sentence):
        call()


def test_options_of_a_twin_are_those_of_its_operation():
    for name, function in inspect.getmembers(blitz_attn, inspect.isfunction):
        twin = getattr(reference, name, None)
        if twin is not None:
            assert set(inspect.signature(function).parameters) - set(inspect.signature(twin).parameters) <= {"num_threads"}, name
