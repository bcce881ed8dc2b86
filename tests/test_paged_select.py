"""Paged attention over listed blocks: against the reference, and bit for bit against attention over all of them."""

import numpy as np
import pytest

import blitz_attn
from blitz_attn import testing
from cases import DTYPES, same_bits
from cases_paged import CACHE_DTYPES, attend_paged, check_paged

LENS = [1, 0, 37, 130, 16]


def random_selection(case, rows, width, seed=0, empty=0.15):
    """(B, rows, width) unsorted random blocks of each request, -1 padded; some rows are empty."""
    rng = np.random.default_rng(seed)
    selected = np.full((len(case.seq_lens), rows, width), -1)
    for b, r in np.ndindex(*selected.shape[:2]):
        blocks = -(-int(case.seq_lens[b]) // case.page_size)
        some = 0 if rng.random() < empty else int(rng.integers(0, min(width, blocks) + 1))
        selected[b, r, :some] = rng.permutation(blocks)[:some]
    return selected


def everything(case, rows, width=None):
    """All blocks of each request, in a random order."""
    blocks = -(-case.seq_lens // case.page_size)
    selected = np.full((len(blocks), rows, int(blocks.max(initial=1)) if width is None else width), -1)
    rng = np.random.default_rng(5)
    for b, r in np.ndindex(*selected.shape[:2]):
        selected[b, r, : blocks[b]] = rng.permutation(blocks[b])
    return selected


def assert_same(got, expected):
    assert all(same_bits(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("per_query_head", [False, True])
@pytest.mark.parametrize(("dtype", "kv_dtype"), [(d, c) for d in DTYPES for c in (["float64"] if d == "float64" else CACHE_DTYPES)])
def test_every_combination_is_right(dtype, kv_dtype, per_query_head):
    rules = [{}, {"window": 50}, {"softcap": 2.0, "scale": 0.3}, {"sinks": np.linspace(-1, 2, 6).astype(np.float32)}]
    for n, (kv_layout, q_lens) in enumerate([("NHD", None), ("HND", None), ("NHD", [1, 0, 4, 20, 16]), ("HND", [0, 0, 1, 2, 3])]):
        case = testing.make_paged(5, 6, 2, LENS, 16, (40, 7, 64, 24)[n], (24, 33, 64, 40)[n], dtype, kv_dtype, kv_layout, q_lens=q_lens)
        selected = random_selection(case, 6 if per_query_head else 2, 7, seed=n)
        check_paged(case, selected, **rules[n])


@pytest.mark.parametrize("page_size", [1, 5, 16, 64, 256])
def test_page_sizes(page_size):
    case = testing.make_paged(3, 4, 2, [300, page_size, 77], page_size, 32)
    check_paged(case, random_selection(case, 2, 20))


@pytest.mark.sampled
@pytest.mark.parametrize("q_lens", [None, [1, 3, 2, 40]])
@pytest.mark.parametrize("per_query_head", [False, True])
@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [("float32", "float32"), ("bfloat16", "bfloat16"), ("float16", "float16"), ("float32", "int8"), ("float64", "float64")],
)
def test_all_blocks_are_paged_attention(dtype, kv_dtype, per_query_head, q_lens, isa_level):
    """Bit for bit, in any order, beyond the length at which work is split too."""
    case = testing.make_paged(4, 8, 2, [31, 5000, 64, 2100], 32, 48, 40, dtype, kv_dtype, q_lens=q_lens)
    rows = 8 if per_query_head else 2
    expected = attend_paged(case)
    assert_same(attend_paged(case, everything(case, rows)), expected)
    assert_same(attend_paged(case, everything(case, rows, width=200)), expected)
    counts = np.repeat(-(-case.seq_lens // 32)[:, None], rows, axis=1)
    assert_same(attend_paged(case, everything(case, rows), counts=counts), expected)


@pytest.mark.parametrize("index_dtype", ["int32", "int64"])
def test_order_counts_and_pads(index_dtype, isa_level):
    """A list is a set: its order, what follows its end, and how its end is told do not matter."""
    case = testing.make_paged(5, 6, 2, LENS, 16, 32)
    selected = random_selection(case, 6, 9).astype(index_dtype)
    expected = attend_paged(case, selected)
    counts = (selected >= 0).sum(axis=-1)
    turned = np.where(
        np.arange(9) < counts[..., None], np.take_along_axis(selected, np.maximum(counts[..., None] - 1 - np.arange(9), 0), axis=-1), -1
    )
    assert_same(attend_paged(case, turned), expected)
    junk = np.where(np.arange(9) < counts[..., None], selected, 10**6).astype(index_dtype)
    for count_dtype in ("int32", "int64"):
        assert_same(attend_paged(case, junk, counts=counts.astype(count_dtype)), expected)
    after = selected.copy()
    for row, n in zip(after.reshape(-1, 9), counts.reshape(-1), strict=True):
        row[n + 1 :] = 0  # behind the first pad nothing is looked at, though block 0 may be listed before
    assert_same(attend_paged(case, after), expected)
    wide = np.repeat(np.repeat(selected, 2, axis=-1), 2, axis=1)[:, ::2, ::2]
    assert_same(attend_paged(case, wide), expected)


def test_one_list_a_kv_head_is_that_list_for_each_of_its_query_heads(isa_level):
    case = testing.make_paged(5, 6, 2, LENS, 16, 32)
    selected = random_selection(case, 2, 9)
    assert_same(attend_paged(case, np.repeat(selected, 3, axis=1)), attend_paged(case, selected))


def test_the_last_page_is_cut_to_its_tokens(isa_level):
    """Wherever it stands in the list; a page of one valid token gives that token's value."""
    case = testing.make_paged(2, 2, 1, [33, 40], 16, 24)
    out, _ = attend_paged(case, np.array([[[2, -1]], [[2, 0]]]))
    np.testing.assert_allclose(out[0], np.broadcast_to(case.v_cache[case.block_tables[0, 2], 0, 0], (2, 24)), rtol=1e-6)
    k, v = (np.concatenate([x[case.block_tables[1, 0]], x[case.block_tables[1, 2], :8]])[:, 0] for x in case[1:3])  # 16 and 8 tokens
    weights = np.exp(case.q[1] @ k.T / np.sqrt(24))
    np.testing.assert_allclose(out[1], weights @ v / weights.sum(axis=1, keepdims=True), rtol=1e-5, atol=1e-6)


def test_only_listed_pages_are_read(isa_level):
    """All other pages hold NaN."""
    case = testing.make_paged(3, 4, 2, [100, 37, 130], 16, 24)
    selected = random_selection(case, 2, 5, empty=0.0)
    expected = attend_paged(case, selected)
    for cache in (case.k_cache, case.v_cache):
        for b, head in np.ndindex(3, 2):
            listed = selected[b, head][selected[b, head] >= 0]
            others = np.setdiff1d(np.arange(-(-case.seq_lens[b] // 16)), listed)
            cache[case.block_tables[b, others], :, head] = np.nan
    assert_same(attend_paged(case, selected), expected)


def test_nothing_selected(isa_level):
    case = testing.make_paged(3, 4, 2, [100, 37, 0], 16, 24)
    out, lse = attend_paged(case, np.full((3, 2, 4), -1))
    assert (out == 0).all()
    assert (lse == -np.inf).all()
    out, lse = attend_paged(case, np.zeros((3, 4, 2), int), counts=np.zeros((3, 4), int))
    assert (out == 0).all()
    assert (lse == -np.inf).all()


def test_parts_merge_to_the_whole():
    """Two lists that share no block, merged by their log-sum-exps."""
    case = testing.make_paged(3, 4, 2, [100, 37, 1300], 16, 24)
    blocks = -(-case.seq_lens // 16)
    even, odd = (np.where(np.arange(s, 100, 2) < blocks[:, None], np.arange(s, 100, 2), -1)[:, None].repeat(2, axis=1) for s in (0, 1))
    states = [attend_paged(case, part) for part in (even, odd)]
    (out, lse), (whole, whole_lse) = merged(states), attend_paged(case)
    np.testing.assert_allclose(out, whole, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(lse, whole_lse, rtol=1e-6)


def merged(states):
    """`merge_states_n` for the (B, H, D) form: one query is S = 1."""
    out, lse = blitz_attn.merge_states_n([o[:, :, None] for o, _ in states], [m[:, :, None] for _, m in states])
    return out[:, :, 0], lse[:, :, 0]
