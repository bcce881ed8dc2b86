"""What parts of a computation need from one another: unrounded results, gradients added up, scores of candidates, trees of states."""

import numpy as np
import pytest

import blitz_attn
from blitz_attn import _formats, reference, testing
from cases import DTYPES, LAYOUTS, attend, bits_option, dtype_of, random_lists, same_bits
from cases_grid import combination
from test_backward import gradients, rest_of

NARROW = ["float16", "bfloat16"]


def bits(x):
    return x.view(np.uint16) if x.dtype.itemsize == 2 else x


def rounded(x, like):
    """float32 values rounded once to the dtype of `like`, as bits."""
    return bits(_formats.converted(x, "float32", dtype_of(like)))


# ---- Unrounded results ----------------------------------------------------------------------------------------------


def assert_rounds_to_the_usual(q, k, v, lists, options):
    usual, usual_lse = attend(q, k, v, lists, **options)
    options |= bits_option(q)
    wide, lse = blitz_attn.block_sparse_attention(q, k, v, lists, out_dtype="float32", return_lse=True, **options)
    assert wide.dtype == np.float32
    assert same_bits(lse, usual_lse)
    assert same_bits(rounded(wide, q), bits(usual))
    mine = np.full(wide.shape, np.nan, np.float32)
    assert blitz_attn.block_sparse_attention(q, k, v, lists, out_dtype=np.float32, out=mine, **options) is mine
    assert same_bits(mine, wide)
    return wide


@pytest.mark.sampled
@pytest.mark.parametrize("rule", ["none", "causal window", "causal lengths", "no keys"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", NARROW)
def test_unrounded_results_round_to_the_usual(dtype, layout, rule, isa_level):
    for heads, dims in (("gqa", "40x24"), ("mha", "7x33"), ("mqa", "64x64")):
        (q, k, v, lists), options = combination(dtype, layout, heads, rule, "empty rows", dims)
        assert_rounds_to_the_usual(q, k, v, lists, options)


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize(("q_len", "kv_len", "group"), [(1, 3000, 8), (2, 900, 3), (1, 40, 1), (300, 300, 2)])
def test_unrounded_results_of_few_and_of_many_queries(q_len, kv_len, group, dtype, isa_level):
    q, k, v = testing.make_qkv(2, 2 * group, 2, q_len, kv_len, 128, 72, dtype=dtype)
    wide = assert_rounds_to_the_usual(q, k, v, None, {"causal": True})
    exact = testing.reference_attention(q, k, v, causal=True, **bits_option(q))[0]
    np.testing.assert_allclose(wide, exact, rtol=2e-2 if dtype == "bfloat16" else 3e-3, atol=2e-2 if dtype == "bfloat16" else 3e-3)


def test_out_dtype_of_wide_inputs():
    for dtype in ("float32", "float64"):
        q, k, v = testing.make_qkv(1, 2, 2, 40, 50, 16, dtype=dtype)
        assert same_bits(blitz_attn.block_sparse_attention(q, k, v, out_dtype=dtype), blitz_attn.block_sparse_attention(q, k, v))


BAD_DTYPES = [
    ("float32", "float16", "out_dtype: expected 'float32' like q, got 'float16'"),
    ("float16", "float64", "out_dtype: expected 'float16' or 'float32' like q, got 'float64'"),
    ("float16", "bfloat16", "out_dtype: expected 'float16' or 'float32' like q, got 'bfloat16'"),
    ("float64", "float32", "out_dtype: expected 'float64' like q, got 'float32'"),
    ("float32", "double", "out_dtype: expected 'float32', 'float16', 'bfloat16' or 'float64', got 'double'"),
]


@pytest.mark.parametrize(("dtype", "out_dtype", "sentence"), BAD_DTYPES)
def test_refused_dtypes(dtype, out_dtype, sentence):
    q, k, v = testing.make_qkv(1, 2, 2, 40, 50, 16, dtype=dtype)
    with pytest.raises(ValueError, match=sentence):
        blitz_attn.block_sparse_attention(q, k, v, out_dtype=out_dtype)
    cache = np.zeros((3, 16, 2, 16), q.dtype)
    for more in ({}, {"kv_split": 16}):
        with pytest.raises(ValueError, match=sentence if out_dtype != "double" else "out_dtype: expected"):
            blitz_attn.paged_attention(q[0, :, :2], cache, cache, np.array([[0, 1], [2, 1]]), [20, 20], out_dtype=out_dtype, **more)


def test_an_output_must_have_the_dtype_that_was_wanted():
    q, k, v = testing.make_qkv(1, 2, 2, 40, 50, 16, dtype="float16")
    with pytest.raises(TypeError, match="out: expected dtype float32, got float16"):
        blitz_attn.block_sparse_attention(q, k, v, out_dtype="float32", out=np.empty_like(q))
    with pytest.raises(TypeError, match="out: expected dtype float16, got float32"):
        blitz_attn.block_sparse_attention(q, k, v, out=np.empty(q.shape, np.float32))


@pytest.mark.parametrize(("dtype", "kv_dtype", "q_lens"), [("bfloat16", "bfloat16", None), ("float16", "int8", [1, 0, 4]), ("bfloat16", "float32", None)])
def test_unrounded_results_of_paged_attention(dtype, kv_dtype, q_lens, isa_level):
    case = testing.make_paged(3, 6, 2, [700, 3, 64], 16, 64, 40, dtype, kv_dtype, q_lens=q_lens)
    sinks = np.linspace(-1, 1, 6).astype(np.float32)
    usual, usual_lse = blitz_attn.paged_attention(*case.arrays, sinks=sinks, return_lse=True, **case.options)
    wide, lse = blitz_attn.paged_attention(*case.arrays, sinks=sinks, out_dtype="float32", return_lse=True, **case.options)
    assert wide.dtype == np.float32
    assert same_bits(rounded(wide, case.q), bits(usual))
    assert same_bits(lse, usual_lse)


# ---- Gradients that are added up ------------------------------------------------------------------------------------


@pytest.mark.sampled
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "rule", "kind", "dims"), [("gqa", "causal", "empty rows", "40x24"), ("mqa", "lengths", "lists", "64x64"), ("mha", "none", "all blocks", "7x33")])
def test_accumulated_gradients(dtype, layout, heads, rule, kind, dims, isa_level):
    (q, k, v, lists), options = combination(dtype, layout, heads, rule, kind, dims)
    out, lse = attend(q, k, v, lists, **options)
    dout, _ = rest_of(q, v, **options)
    usual = gradients(dout, q, k, v, out, lse, lists, **options)
    real = np.float64 if dtype == "float64" else np.float32
    sums = [np.zeros(x.shape, real) for x in (k, v)]
    options |= bits_option(q)
    got = blitz_attn.block_sparse_attention_backward(dout, q, k, v, out, lse, lists, grads=(None, *sums), accumulate=True, **options)
    assert got[1] is sums[0]
    assert got[2] is sums[1]
    assert same_bits(bits(got[0]), bits(usual[0]))
    for ours, theirs in zip(sums, usual[1:], strict=True):
        assert same_bits(ours if dtype.endswith(("32", "64")) else rounded(ours, q), bits(theirs))
    once = [x.copy() for x in sums]
    blitz_attn.block_sparse_attention_backward(dout, q, k, v, out, lse, lists, grads=(None, *sums), accumulate=True, **options)
    for ours, single in zip(sums, once, strict=True):
        np.testing.assert_allclose(ours, 2 * single, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dims", [(32, 48), (40, 7)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_only_listed_blocks_are_touched(dtype, dims, isa_level):
    """Rows of unlisted blocks hold NaN that signals, of which any arithmetic makes another."""
    q, k, v = testing.make_qkv(2, 4, 2, 64, 320, *dims, dtype=dtype)
    lists = np.array([[[[0, 7, -1], [7, 3, -1]]]], np.int32)
    options = {"block_shape": (32, 32)}
    out, lse = attend(q, k, v, lists, **options)
    dout, _ = rest_of(q, v)
    real, word = (np.float64, np.uint64) if dtype == "float64" else (np.float32, np.uint32)
    marked = word(0x7FF0000000000123) if dtype == "float64" else word(0x7F800123)
    listed = np.isin(np.arange(320) // 32, [0, 3, 7])
    sums = [np.zeros(x.shape, real) for x in (k, v)]
    for x in sums:
        x.view(word)[:, :, ~listed] = marked
    blitz_attn.block_sparse_attention_backward(
        dout, q, k, v, out, lse, lists, grads=(None, *sums), accumulate=True, **options, **bits_option(q)
    )
    usual = gradients(dout, q, k, v, out, lse, lists, **options)
    for x, theirs in zip(sums, usual[1:], strict=True):
        assert (x.view(word)[:, :, ~listed] == marked).all()
        np.testing.assert_allclose(
            x[:, :, listed], testing.to_float64(theirs, "bfloat16")[:, :, listed], rtol=1e-2, atol=2e-2 if dtype in NARROW else 1e-6
        )


@pytest.mark.parametrize("threads", [1, 2])
def test_slices_accumulate_to_the_whole(threads):
    q, k, v = testing.make_qkv(1, 4, 2, 256, 256, 32, dtype="bfloat16", seed=4)
    lists = random_lists(np.random.default_rng(1), 1, 4, 8, 8)
    options = {"block_shape": (32, 32), "causal": True, "num_threads": threads}
    out, lse = attend(q, k, v, lists, **options)
    dout, _ = rest_of(q, v)
    usual = gradients(dout, q, k, v, out, lse, lists, **options)
    sums = [np.zeros(x.shape, np.float32) for x in (k, v)]
    for a in range(0, 256, 64):
        rows = slice(a, a + 64)
        dq = blitz_attn.block_sparse_attention_backward(
            *(np.ascontiguousarray(x) for x in (dout[:, :, rows], q[:, :, rows])), k, v,
            *(np.ascontiguousarray(x) for x in (out[:, :, rows], lse[:, :, rows], lists[:, :, a // 32 : a // 32 + 2])),
            grads=(None, *sums), accumulate=True, q_begin=a, q_total=256, **options, **bits_option(q),
        )[0]  # fmt: skip
        assert same_bits(bits(dq), bits(np.ascontiguousarray(usual[0][:, :, rows])))
    for ours, theirs in zip(sums, usual[1:], strict=True):
        wide = testing.to_float64(theirs, "bfloat16")
        np.testing.assert_allclose(ours, wide, rtol=2**-8, atol=1e-4)


def test_refused_sums():
    q, k, v = testing.make_qkv(1, 2, 2, 40, 50, 16, dtype="float16")
    out, lse = attend(q, k, v)
    call = (out, q, k, v, out, lse)
    wide = [np.zeros(x.shape, np.float32) for x in (k, v)]
    with pytest.raises(ValueError, match="dk: expected an array to add to with accumulate=True, got None"):
        blitz_attn.block_sparse_attention_backward(*call, accumulate=True)
    with pytest.raises(ValueError, match="dv: expected an array to add to with accumulate=True, got None"):
        blitz_attn.block_sparse_attention_backward(*call, grads=(None, wide[0], None), accumulate=True)
    with pytest.raises(TypeError, match="dk: expected dtype float32, got float16"):
        blitz_attn.block_sparse_attention_backward(*call, grads=(None, k.copy(), wide[1]), accumulate=True)
    for flag in ("yes", None):
        with pytest.raises(TypeError, match=f"accumulate: expected True or False, got {type(flag).__name__}"):
            blitz_attn.block_sparse_attention_backward(*call, grads=(None, *wide), accumulate=flag)


def test_reference_adds():
    q, k, v = testing.make_qkv(1, 2, 2, 20, 30, 16, dtype="float64")
    out, lse = reference.block_sparse_attention(q, k, v, return_lse=True)
    usual = reference.block_sparse_attention_backward(out, q, k, v, out, lse)
    sums = np.ones(k.shape), np.ones(v.shape)
    got = reference.block_sparse_attention_backward(out, q, k, v, out, lse, grads=(None, *sums), accumulate=True)
    assert got[1] is sums[0]
    for x, single in zip(sums, usual[1:], strict=True):
        np.testing.assert_allclose(x, 1 + single)


# ---- Scores of candidates -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["quest", "mean", "max"])
@pytest.mark.parametrize("per_query_head", [False, True])
@pytest.mark.parametrize("ascending", [False, True])
def test_scores_of_selected_blocks(method, per_query_head, ascending, isa_level):
    rng = np.random.default_rng(0)
    q = rng.standard_normal((3, 6, 40), dtype=np.float32)
    k_cache = rng.standard_normal((40, 8, 2, 40), dtype=np.float32)
    seq_lens = np.array([150, 7, 90])
    tables = rng.permutation(40)[:38].reshape(2, 19)[[0, 1, 1]]
    summaries = np.array([[0, 1, 2], [3, 4, 5], [6, 7, 8]])
    maxblocks, minblocks, meanblocks = (np.zeros((9, 8, 2, 40), np.float32) for _ in range(3))
    blitz_attn.quest_prefill_metadata(k_cache, tables, seq_lens, summaries, maxblocks, minblocks, meanblocks=meanblocks)
    source = {"quest": (maxblocks, minblocks), "mean": meanblocks, "max": k_cache}[method]
    call = (q, source, tables if method == "max" else summaries, seq_lens, 6)
    options = {"method": method, "per_query_head": per_query_head, "ascending": ascending, "block_size": 8}
    usual = blitz_attn.select_blocks(*call, **options)
    selected, counts, scores = blitz_attn.select_blocks(*call, return_scores=True, **options)
    assert same_bits(selected, usual[0])
    assert same_bits(counts, usual[1])
    exact = reference.select_blocks(*call, return_scores=True, **options)
    assert (selected == exact[0]).all()
    assert (scores[selected < 0] == -np.inf).all()
    np.testing.assert_allclose(scores, exact[2], rtol=1e-5, atol=1e-5)


def best(candidates, k):
    """The k candidates (score, block) with the highest scores; of equal scores the lower block."""
    return sorted(block for _, block in sorted(candidates, key=lambda c: (-c[0], c[1]))[:k])


@pytest.mark.parametrize("shares", [2, 3, 5])
def test_the_best_of_all_are_among_the_best_of_each_share(shares):
    """Blocks are dealt out to shares, each with tables of its own. Many scores are equal."""
    rng = np.random.default_rng(shares)
    q = rng.integers(-1, 2, (1, 4, 8)).astype(np.float32)
    k_cache = rng.integers(-1, 2, (60, 4, 2, 8)).astype(np.float32)
    tables, k = rng.permutation(60)[None, :53], 9
    whole = blitz_attn.select_blocks(q, k_cache, tables, [53 * 4], k, method="max", sink=0, recent=0)[0]
    owner = rng.integers(0, shares, 53)
    candidates = [[], []]
    for share in range(shares):
        mine = (owner == share).nonzero()[0]
        picked, counts, scores = blitz_attn.select_blocks(
            q, k_cache, tables[:, mine], [4 * len(mine)], k, method="max", sink=0, recent=0, return_scores=True
        )
        for h in range(2):
            candidates[h] += [(scores[0, h, i], int(mine[picked[0, h, i]])) for i in range(counts[0, h])]
    assert [best(c, k) for c in candidates] == whole[0].tolist()


# ---- Trees of states ------------------------------------------------------------------------------------------------


def states(count, dtype=np.float32, seed=0):
    rng = np.random.default_rng(seed)
    outs = rng.standard_normal((count, 2, 3, 5, 16)).astype(dtype)
    lses = rng.standard_normal((count, 2, 3, 5)).astype(dtype) * 3
    lses[rng.random(lses.shape) < 0.2] = -np.inf
    return outs, lses


def node(outs, lses, level, index):
    """A node of the tree by its definition."""
    first, middle = index << level, ((index << level) + (index + 1 << level)) // 2
    if level == 0:
        return outs[first], lses[first]
    left = node(outs, lses, level - 1, 2 * index)
    return left if middle >= len(outs) else blitz_attn.merge_states(*left, *node(outs, lses, level - 1, 2 * index + 1))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 6, 7, 8, 9, 21])
def test_trees(count, dtype):
    outs, lses = states(count, dtype)
    got = blitz_attn.merge_states_tree(outs, lses)
    expected = node(outs, lses, 5, 0) if count > 1 else blitz_attn.merge_states_n(outs, lses)
    assert all(map(same_bits, got, expected))
    for ours, theirs in zip(got, reference.merge_states_tree(outs, lses), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5 if dtype == np.float32 else 1e-13, atol=1e-5 if dtype == np.float32 else 1e-13)


def test_a_tree_of_one_part_makes_new_arrays_without_what_empty_rows_held():
    out, lse = np.full((1, 1, 2, 3), np.nan, np.float32), np.array([[[-np.inf, 0.5]]], np.float32)
    out[:, :, 1] = 1
    got, got_lse = blitz_attn.merge_states_tree([out], [lse])
    assert got.tolist() == [[[[0, 0, 0], [1, 1, 1]]]]
    assert same_bits(got_lse, lse)
    assert not np.shares_memory(got, out)
    assert not np.shares_memory(got_lse, lse)


def test_refused_trees():
    outs, lses = states(3)
    with pytest.raises(ValueError, match="outs: expected at least 1 array, got 0"):
        blitz_attn.merge_states_tree([], [])
    with pytest.raises(ValueError, match="lses: expected 3 arrays, one for each of outs, got 2"):
        blitz_attn.merge_states_tree(outs, lses[:2])
    with pytest.raises(TypeError, match=r"outs\[0\]: expected float32 or float64, got float16, which each merge would round"):
        blitz_attn.merge_states_tree(outs.astype(np.float16), lses)
