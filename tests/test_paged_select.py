"""Paged attention over listed blocks is compared with the reference. Where all blocks are listed, it has the bits of attention without
lists. Results over parts merge to the whole."""

import numpy as np
import pytest

import blitz_attn
from blitz_attn import reference, testing
from cases import DTYPES, assert_same
from cases_paged import CACHE_DTYPES, attend_paged, check_paged, every_block

LENS = [1, 0, 37, 130, 16]


def random_selection(case, rows, width, seed=0, empty=0.15):
    """An array (B, rows, width) of unsorted random blocks of each request, padded with -1. Some rows are empty."""
    rng = np.random.default_rng(seed)
    selected = np.full((len(case.seq_lens), rows, width), -1)
    for b, r in np.ndindex(*selected.shape[:2]):
        blocks = -(-int(case.seq_lens[b]) // case.page_size)
        some = 0 if rng.random() < empty else int(rng.integers(0, min(width, blocks) + 1))
        selected[b, r, :some] = rng.permutation(blocks)[:some]
    return selected


@pytest.mark.sampled(2)
@pytest.mark.parametrize("rows", [2, 6])
@pytest.mark.parametrize("q_lens", [None, [1, 0, 4, 20, 16], [0, 0, 1, 2, 3]], ids=["one", "many", "few"])
@pytest.mark.parametrize(("rule", "dims"), [({}, (40, 24)), ({"window": 50}, (7, 33)), ({"softcap": 2.0, "scale": 0.3}, (64, 64))], ids=str)
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize(("dtype", "kv_dtype"), [(d, c) for d in DTYPES for c in (["float64"] if d == "float64" else CACHE_DTYPES)])
def test_every_combination_is_right(dtype, kv_dtype, kv_layout, rule, dims, q_lens, rows):
    case = testing.make_paged(5, 6, 2, LENS, 16, *dims, dtype, kv_dtype, kv_layout, q_lens=q_lens)
    check_paged(case, random_selection(case, rows, 7), sinks=np.linspace(-1, 2, 6).astype(np.float32), **rule)


@pytest.mark.sampled
@pytest.mark.parametrize("q_lens", [None, [1, 3, 2, 40]])
@pytest.mark.parametrize("rows", [2, 8])
@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [("float32", "float32"), ("bfloat16", "bfloat16"), ("float16", "float16"), ("float32", "int8"), ("float64", "float64")],
)
def test_all_blocks_are_paged_attention(dtype, kv_dtype, rows, q_lens, isa_level):
    """The bits are the same with the blocks in any order, also at lengths at which a request is split into parts."""
    case = testing.make_paged(4, 8, 2, [31, 5000, 64, 2100], 32, 48, 40, dtype, kv_dtype, q_lens=q_lens)
    expected = attend_paged(case)
    assert_same(attend_paged(case, every_block(case, rows, width=200)), expected)
    counts = np.repeat(-(-case.seq_lens // 32)[:, None], rows, axis=1)
    assert_same(attend_paged(case, every_block(case, rows), counts=counts), expected)


@pytest.mark.parametrize("index_dtype", ["int32", "int64"])
def test_order_counts_and_pads(index_dtype, isa_level):
    """A list is a set. Its order, the entries behind its end, the mark of its end, and the number of heads that share it do not matter."""
    case = testing.make_paged(5, 6, 2, LENS, 16, 32)
    selected = random_selection(case, 2, 9).astype(index_dtype)
    expected, counts = attend_paged(case, selected), (selected >= 0).sum(axis=-1)
    listed = np.arange(9) < counts[..., None]
    turned = np.where(listed, np.take_along_axis(selected, np.maximum(counts[..., None] - 1 - np.arange(9), 0), axis=-1), -1)
    after = np.where(np.arange(9) > counts[..., None], 0, selected)  # entries behind the first pad are not read
    wide = np.repeat(np.repeat(selected, 2, axis=-1), 2, axis=1)[:, ::2, ::2]
    for same in (turned, after.astype(index_dtype), wide, np.repeat(selected, 3, axis=1)):
        assert_same(attend_paged(case, same), expected)
    junk = np.where(listed, selected, 10**6).astype(index_dtype)
    for count_dtype in ("int32", "int64"):
        assert_same(attend_paged(case, junk, counts=counts.astype(count_dtype)), expected)


@pytest.mark.sampled
@pytest.mark.parametrize("size", [1, 4, 16, 50])
@pytest.mark.parametrize("q_lens", [None, [1, 0, 4, 20, 16]], ids=["one", "many"])
@pytest.mark.parametrize("rows", [1, 2, 6])
@pytest.mark.parametrize(("dtype", "kv_dtype"), [("float32", "float32"), ("bfloat16", "int8"), ("float16", "float16"), ("float64", "float64")])
def test_each_query_has_its_own_blocks(dtype, kv_dtype, rows, q_lens, size):
    """Blocks are single tokens, parts of pages, as long as pages, or longer."""
    case = testing.make_paged(5, 6, 2, LENS, 16, 40, 24, dtype, kv_dtype, q_lens=q_lens)
    rng = np.random.default_rng(1)
    lens = case.seq_lens.repeat([1] * 5 if q_lens is None else q_lens)
    selected = np.full((len(lens), rows, 9), -1, np.int32)
    for i, h in np.ndindex(len(lens), rows):
        chosen = rng.permutation(-(-lens[i] // size))[: rng.integers(0, 10)]
        selected[i, h, : len(chosen)] = chosen
    check_paged(case, selected, selected_size=size, sinks=np.linspace(-1, 2, 6).astype(np.float32))


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_tokens_of_a_prompt_are_those_of_contiguous_keys(kv_layout):
    case = testing.make_paged(1, 8, 1, [300], 16, 32, kv_layout=kv_layout, q_lens=[120])
    selected = np.stack([np.random.default_rng(i).permutation(300)[:40] for i in range(120)]).astype(np.int32)
    pages = case.block_tables[0, :19]
    k, v = ((x if kv_layout == "NHD" else x.swapaxes(1, 2))[pages].reshape(1, -1, 1, 32)[:, :300] for x in (case.k_cache, case.v_cache))
    contiguous = blitz_attn.block_sparse_attention(case.q[None], k, v, selected[None, None], block_shape=(1, 1), causal=True, layout="BSND")
    assert np.array_equal(attend_paged(case, selected[:, None], selected_size=1)[0], contiguous[0])


def test_only_listed_pages_are_read(isa_level):
    """All pages that are not listed hold NaN."""
    case = testing.make_paged(3, 4, 2, [100, 37, 130], 16, 24)
    selected = random_selection(case, 2, 5, empty=0.0)
    expected = attend_paged(case, selected)
    for cache in (case.k_cache, case.v_cache):
        for b, head in np.ndindex(3, 2):
            listed = selected[b, head][selected[b, head] >= 0]
            others = np.setdiff1d(np.arange(-(-case.seq_lens[b] // 16)), listed)
            cache[case.block_tables[b, others], :, head] = np.nan
    assert_same(attend_paged(case, selected), expected)


def test_parts_merge_to_the_whole():
    """Results over two lists without a common block are merged by their log-sum-exps."""
    case = testing.make_paged(3, 4, 2, [100, 37, 1300], 16, 24)
    blocks = -(-case.seq_lens // 16)
    even, odd = (np.where(np.arange(s, 100, 2) < blocks[:, None], np.arange(s, 100, 2), -1)[:, None].repeat(2, axis=1) for s in (0, 1))
    merged = blitz_attn.merge_states_n(*zip(*(attend_paged(case, part) for part in (even, odd)), strict=True))
    for got, whole in zip(merged, attend_paged(case), strict=True):
        np.testing.assert_allclose(got, whole, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_levels_of_a_cascade_merge_to_the_whole(dtype, isa_level):
    """System prompt, document and turn are attended separately and merged. One call over plain keys attends the system prompt, which all
    requests share. A turn may be empty."""
    case = testing.make_paged(4, 4, 2, [200, 160, 220, 161], 32, 32, dtype=dtype)
    case.block_tables[:, :2] = case.block_tables[0, :2]  # all share the first two pages
    for pair in ((0, 1), (2, 3)):
        case.block_tables[pair[1], 2:5] = case.block_tables[pair[0], 2:5]  # pairs share the next three
    k, v = (np.ascontiguousarray(x[case.block_tables[0, :2]].reshape(64, 2, 32)) for x in (case.k_cache, case.v_cache))
    out, lse = blitz_attn.block_sparse_attention(case.q[None], k[None], v[None], layout="BSND", return_lse=True)
    states = [(out[0], np.ascontiguousarray(lse[0].T))]
    for first, last in ((2, 5), (5, None)):
        end = case.seq_lens if last is None else np.full(4, last * 32)
        states.append(attend_paged(case._replace(block_tables=case.block_tables[:, first:], seq_lens=end - first * 32)))
    exact = reference.paged_attention(*case.arrays, return_lse=True)
    for got, right in zip(blitz_attn.merge_states_n(*zip(*states, strict=True)), exact, strict=True):
        tolerance = 1e-12 if dtype == "float64" else 2e-6
        np.testing.assert_allclose(got, right, rtol=tolerance, atol=tolerance)
