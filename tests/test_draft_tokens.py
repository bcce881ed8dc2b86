"""Requests of several new tokens over long caches, as in speculative decoding. A KV head then has more queries than the kernel for few queries
takes at once, so sets of queries take turns at each chunk of keys. Threads, other requests, layouts and pages are tested in
test_paged.py."""

import numpy as np
import pytest

from blitz_attn import testing
from cases import DTYPES, assert_same, attend, check, random_lists
from cases_paged import DRAFT_LENS, DRAFTS, PAIRS, attend_paged, check_paged

BAD = [np.nan, np.inf, -np.inf]
RULES = {
    "plain": {},
    "window": {"window": 300},
    "sinks": {"sinks": np.linspace(-2, 3, 8).astype(np.float32)},
    "softcap": {"softcap": 1.5},
    "all": {"window": 500, "sinks": np.linspace(-2, 3, 8).astype(np.float32), "softcap": 3.0, "scale": 0.4},
}


# ---- Against the reference ----------------------------------------------------------------------------------------


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize(("dtype", "kv_dtype"), PAIRS)
@pytest.mark.parametrize("rule", RULES)
def test_every_rule_is_right(rule, dtype, kv_dtype, kv_layout):
    dims = (64, 64) if rule == "plain" else (40, 24)
    check_paged(testing.make_paged(6, 8, 2, DRAFT_LENS, 32, *dims, dtype, kv_dtype, kv_layout, q_lens=DRAFTS), **RULES[rule])


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [("float32", "float32"), ("bfloat16", "bfloat16"), ("float16", "int8"), ("bfloat16", "int8"), ("float64", "float64")],
)
@pytest.mark.parametrize("heads", [(1, 1), (5, 1), (6, 2), (16, 2), (9, 1), (40, 2)], ids=lambda h: f"h{h[0]}x{h[1]}")
def test_numbers_of_queries(heads, dtype, kv_dtype):
    """More than 8 queries of a KV head take turns only over at least 64 keys per query. Requests have 64 per query, or one key less."""
    group = heads[0] // heads[1]
    drafts = sorted({max(1, n // group) for n in (8, 9, 15, 16, 17, 24, 25, 31, 32, 33, 40)})
    for more in (-1, 0):
        lens = [64 * n * group + more for n in drafts]
        check_paged(testing.make_paged(len(lens), *heads, lens, 16, 32, 48, dtype, kv_dtype, q_lens=drafts))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["tree", "numbers", "slopes"])
@pytest.mark.parametrize(("dtype", "kv_dtype"), PAIRS)
def test_a_tree_of_drafts_and_other_biases(dtype, kv_dtype, name):
    """A tree of drafted tokens hides other branches: each token sees the cache, its ancestors and itself."""
    lens, drafts = [1500, 800], [6, 3]
    case = testing.make_paged(2, 8, 2, lens, 32, 64, 64, dtype, kv_dtype, q_lens=drafts)
    if name == "slopes":
        check_paged(case, alibi_slopes=np.float32(2.0) ** -np.arange(1, 9))
        return
    rng = np.random.default_rng(0)
    if name == "tree":
        mask = np.ones((2, 1, max(drafts), max(lens)), bool)
        for b, (n, drawn) in enumerate(zip(lens, drafts, strict=True)):
            mask[b, 0, :drawn, n - drawn : n] = np.eye(drawn, dtype=bool) | (rng.random((drawn, drawn)) < 0.4)
    else:
        mask = rng.standard_normal((2, 8, max(drafts), max(lens))).astype(np.float32)
    check_paged(case, attn_mask=mask)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("q_len", [3, 4, 6])
@pytest.mark.parametrize(("block_q", "list_heads"), [(64, 2), (2, 8), (1, 1)])
def test_lists(q_len, dtype, block_q, list_heads):
    """Block lists for each KV head, for each query head and for all heads, with list rows of all, two and one queries."""
    q, k, v = testing.make_qkv(2, 8, 2, q_len, 1700, 32, 40, dtype=dtype)
    rows = -(-q_len // block_q)
    lists = random_lists(np.random.default_rng(q_len), 2, list_heads, rows, 54, share=0.6)
    check(q, k, v, lists, block_shape=(block_q, 32), causal=True)


# ---- Bits ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_lists_of_heads_have_the_bits_of_shared_ones(dtype, isa_level):
    q, k, v = testing.make_qkv(2, 8, 2, 4, 1200, 64, 64, dtype=dtype)
    lists = random_lists(np.random.default_rng(0), 2, 2, 1, 19)
    assert_same(attend(q, k, v, lists, block_shape=(64, 64)), attend(q, k, v, np.repeat(lists, 4, axis=1), block_shape=(64, 64)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_slice_has_the_bits_of_the_whole(dtype, isa_level):
    q, k, v = testing.make_qkv(2, 8, 2, 6, 1600, 64, 40, dtype=dtype)
    whole = attend(q, k, v, causal=True)
    for first, end in ((0, 1), (1, 4), (3, 6), (5, 6)):
        part = attend(np.ascontiguousarray(q[:, :, first:end]), k, v, causal=True, q_begin=1594 + first, q_total=6)
        assert_same(part, [np.ascontiguousarray(x[:, :, first:end]) for x in whole])


# ---- Non-finite values ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_reach_only_the_queries_that_see_them(dtype, bad, isa_level):
    """Query i of a request of five sees all but the last 4 - i keys. The first query does not see key 1596."""
    q, k, v = testing.make_qkv(1, 4, 1, 5, 1600, 20, dtype=dtype)
    clean = attend(q, k, v, causal=True)
    spoilt = testing.to_float64(v, dtype)
    spoilt[0, 0, 1596, 7] = bad
    got = attend(q, k, testing.round_to(spoilt, dtype), causal=True)
    assert_same([got[1], got[0][:, :, :1], np.delete(got[0], 7, -1)], [clean[1], clean[0][:, :, :1], np.delete(clean[0], 7, -1)])
    assert not np.isfinite(testing.to_float64(got[0], dtype)[:, :, 1:, 7]).any()


def test_a_slice_of_sixteen_queries_has_the_bits_of_the_whole(isa_level):
    """Sixteen queries take turns at every level. Two batch entries are mostly padding, and one has enough queries to be attended by panels."""
    q, k, v = testing.make_qkv(3, 4, 1, 40, 1500, 32, 40, dtype="float32")
    options = {"q_lens": [4, 40, 3], "kv_lens": [1400, 1500, 1024], "causal": True}
    whole = attend(q, k, v, **options)
    check(q, k, v, **options)
    for entry, (rows, keys) in enumerate(zip(options["q_lens"], options["kv_lens"], strict=True)):
        one = attend(*(x[entry : entry + 1, :, :n] for x, n in ((q, rows), (k, keys), (v, keys))), causal=True)
        assert_same(one, [np.ascontiguousarray(x[entry : entry + 1, :, :rows]) for x in whole])
    part = attend(np.ascontiguousarray(q[:1, :, 1:3]), k[:1], v[:1], causal=True, kv_lens=[1400], q_begin=1397, q_total=4)
    assert_same(part, [np.ascontiguousarray(x[:1, :, 1:3]) for x in whole])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_chunk_of_a_prompt_has_the_bits_of_one_thread(dtype, isa_level):
    """If all tiles take the same time, an item has several tiles even with several threads."""
    case = testing.make_paged(1, 16, 4, [1700], 32, 32, 32, dtype, dtype, q_lens=[128])
    expected = attend_paged(case, num_threads=1)
    for threads in (2, 4):
        assert_same(attend_paged(case, num_threads=threads), expected)
    check_paged(case)
