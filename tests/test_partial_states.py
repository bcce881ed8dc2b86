"""Computations in parts need unrounded results, gradients that are added up, and scores of candidates."""

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
@pytest.mark.parametrize(("heads", "dims"), [("gqa", "40x24"), ("mha", "7x33"), ("mqa", "64x64")])
def test_unrounded_results_round_to_the_usual(heads, dims, dtype, layout, rule, isa_level):
    (q, k, v, lists), options = combination(dtype, layout, heads, rule, "empty rows", dims)
    assert_rounds_to_the_usual(q, k, v, lists, options)


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize(("q_len", "kv_len", "group"), [(1, 3000, 8), (2, 900, 3), (1, 40, 1), (300, 300, 2)])
def test_unrounded_results_of_few_and_of_many_queries(q_len, kv_len, group, dtype, isa_level):
    q, k, v = testing.make_qkv(2, 2 * group, 2, q_len, kv_len, 128, 72, dtype=dtype)
    wide = assert_rounds_to_the_usual(q, k, v, None, {"causal": True})
    exact = testing.reference_attention(q, k, v, causal=True, **bits_option(q))[0]
    np.testing.assert_allclose(wide, exact, rtol=2e-2 if dtype == "bfloat16" else 3e-3, atol=2e-2 if dtype == "bfloat16" else 3e-3)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_out_dtype_of_wide_inputs(dtype):
    q, k, v = testing.make_qkv(1, 2, 2, 40, 50, 16, dtype=dtype)
    assert same_bits(blitz_attn.block_sparse_attention(q, k, v, out_dtype=dtype), blitz_attn.block_sparse_attention(q, k, v))


# ---- Gradients that are added up ------------------------------------------------------------------------------------


@pytest.mark.sampled
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "rule", "kind", "dims"),
    [("gqa", "causal", "empty rows", "40x24"), ("mqa", "lengths", "lists", "64x64"), ("mha", "none", "all blocks", "7x33")],
)
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
    """Rows of unlisted blocks hold signaling NaNs, which any arithmetic would turn into other NaNs."""
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


def best(candidates, k):
    """The blocks of the k candidates (score, block) with the highest scores. Of equal scores, the lower block is taken."""
    return sorted(block for _, block in sorted(candidates, key=lambda c: (-c[0], c[1]))[:k])


@pytest.mark.parametrize("shares", [2, 3, 5])
def test_the_best_of_all_are_among_the_best_of_each_share(shares):
    """Blocks are distributed to shares, each with tables of its own. Many scores are equal."""
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
