"""Page summaries bit for bit, and the selection of pages by its invariants, over upstream's grids and the cases in which
upstream's own rule goes wrong.

A selection is right when no page is named twice, only pages of the request are, forced ones are in, every other selected
page scores at least as high as every page left out, and equal scores go to the lower page.
"""

import itertools

import numpy as np
import pytest

import blitz_attn
from blitz_attn import reference, testing
from cases import DTYPES, bits_option, dtype_of, same_bits

# Scores are sums in float32 of products of the inputs: so near to each other, either order is right.
NEAR = {"float32": 1e-5, "float16": 1e-5, "bfloat16": 1e-5, "float64": 1e-6}


def summary_tables(pages, rows, seed=0, spare=2, index_dtype="int32"):
    """(B, M) tables of distinct summary pages, and how many the pool has; entries that are not used name no page."""
    used = -(-np.asarray(pages) // rows)
    count = int(used.sum()) + spare
    order = np.random.default_rng([seed, 2]).permutation(count)
    tables = np.full((len(used), int(used.max(initial=0)) + 1), 10**6, index_dtype)
    for row, end, n in zip(tables, np.cumsum(used), used, strict=True):
        row[:n] = order[end - n : end]
    return tables, count


def blank(count, rows, like, kv_heads, dim):
    """A summary array of NaN in the dtype of `like`."""
    return np.full((count, rows, kv_heads, dim), testing.round_to(np.nan, dtype_of(like)))


def drawn(batch, heads, kv_heads, lens, size, dim, dtype="float32", rows=None, seed=0):
    """(query, maxblocks, minblocks, tables, seq_lens) with random summaries, NaN where no page is summarised."""
    rng = np.random.default_rng(seed)
    rows = size if rows is None else rows
    lens = np.broadcast_to(np.asarray(lens), (batch,)).copy()
    pages = -(-lens // size)
    tables, count = summary_tables(pages, rows, seed)
    high, low = np.full((2, count, rows, kv_heads, dim), np.nan, np.float32)
    for b, page in itertools.chain.from_iterable(((b, p) for p in range(pages[b])) for b in range(batch)):
        values = np.sort(rng.standard_normal((2, kv_heads, dim), dtype=np.float32), axis=0)
        low[tables[b, page // rows], page % rows], high[tables[b, page // rows], page % rows] = values
    query = rng.standard_normal((batch, heads, dim), dtype=np.float32)
    return (*(testing.round_to(x, dtype) for x in (query, high, low)), tables, lens)


def scores_of(problem, size, per_query_head=False):
    """(rows, pages) float64 scores of each request, written out."""
    query, high, low, tables, lens = problem
    q, high, low = (testing.to_float64(x, "bfloat16") for x in (query, high, low))
    rows, kv_heads = high.shape[1:3]
    if not per_query_head:
        q = q.reshape(len(q), kv_heads, -1, q.shape[2]).mean(axis=2)
    per_kv = q.shape[1] // kv_heads
    result = []
    for b, n in enumerate(-(-lens // size)):
        at = np.arange(n)
        ends = [x[tables[b, at // rows], at % rows].swapaxes(0, 1).repeat(per_kv, axis=0) for x in (high, low)]
        result.append(np.maximum(q[b][:, None] * ends[0], q[b][:, None] * ends[1]).sum(axis=-1))
    return result


def check_row(row, scores, forced=(), near=1e-5, k=None):
    """The invariants of one row of a selection. `forced` are the pages that must be in."""
    n, k = len(scores), len(row) if k is None else k
    used = min(n, k)
    picked = row[:used]
    assert (row[used:] == -1).all(), f"unused places hold {row[used:]}"
    assert ((picked >= 0) & (picked < n)).all(), f"not all of {n} pages: {row}"
    assert len(set(picked.tolist())) == used, f"a page twice: {row}"
    assert set(forced) <= set(picked.tolist()), f"{forced} not all in {row}"
    free, left = np.setdiff1d(picked, list(forced)), np.setdiff1d(np.arange(n), picked)
    if free.size and left.size:
        assert scores[free].min() >= scores[left].max() - near * max(1.0, np.abs(scores).max())


def check_selection(selected, problem, size, *, forced=None, per_query_head=False):
    """Every row; `forced` gives the pages that must be in by request."""
    scores = scores_of(problem, size, per_query_head)
    near = NEAR[dtype_of(problem[0])]
    assert selected.dtype == np.int32
    assert selected.shape[:2] == (len(scores), scores[0].shape[0])
    for b, r in np.ndindex(*selected.shape[:2]):
        check_row(selected[b, r], scores[b][r], () if forced is None else forced[b], near)


def select(problem, k, **options):
    return blitz_attn.quest_block_select_paged(*problem, k, **bits_option(problem[0]), **options)


# ---- Summaries ----------------------------------------------------------------------------------------------------


def summarised(case, op, high, low, tables, seq_lens=None, start_lens=None):
    bits = {"dtype": "bfloat16"} if case.k_cache.dtype == np.uint16 else {}
    options = {"start_lens": start_lens, "kv_layout": case.options["kv_layout"], **bits}
    result = op(case.k_cache, case.block_tables, case.seq_lens if seq_lens is None else seq_lens, tables, high, low, **options)
    assert result is None
    return high, low


def check_metadata(case, rows, kv_heads, dim):
    tables, count = summary_tables(-(-case.seq_lens // case.page_size), rows)
    pairs = [[blank(count, rows, case.k_cache, kv_heads, dim) for _ in range(2)] for _ in range(2)]
    expected = summarised(case, reference.quest_prefill_metadata, *pairs[0], tables)
    got = summarised(case, blitz_attn.quest_prefill_metadata, *pairs[1], tables)
    for one, other in zip(got, expected, strict=True):
        assert same_bits(one, other)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("page_size", "rows", "dim"), [(16, 16, 64), (1, 3, 1), (7, 64, 33), (128, 8, 128), (64, 5, 17), (256, 1, 40)])
def test_metadata(page_size, rows, dim, dtype, kv_layout, isa_level):
    """Exact elements of K over the tokens in use; zeros up to the end of the last summary page; nothing else is touched."""
    lens = [1, 0, page_size, page_size + 1, 5 * page_size - 1, 9 * page_size + 3]
    check_metadata(testing.make_paged(6, 2, 2, lens, page_size, dim, dtype=dtype, kv_layout=kv_layout), rows, 2, dim)


def test_metadata_of_equal_and_negative_values(isa_level):
    case = testing.make_paged(2, 1, 1, [20, 33], 16, 8)
    case.k_cache[case.block_tables[0, 0]] = -3.5
    check_metadata(case, 4, 1, 8)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_metadata_token_by_token(dtype, isa_level):
    """Refreshing from any earlier length gives what a refresh of the whole gives."""
    page_size, rows, last = 4, 3, 40
    case = testing.make_paged(2, 2, 2, [last, last - 5], page_size, 16, dtype=dtype)
    tables, count = summary_tables([last // page_size] * 2, rows)
    whole = [blank(count, rows, case.k_cache, 2, 16) for _ in range(2)]
    summarised(case, reference.quest_prefill_metadata, *whole, tables)
    for steps in ([1] * 35, [3, 1, 4, 9, 1, 17], [4] * 8 + [3], [35]):
        parts = [blank(count, rows, case.k_cache, 2, 16) for _ in range(2)]
        ends = np.array([0, 0])
        for step in steps:
            begins, ends = ends, np.minimum(ends + step, [last, last - 5])
            summarised(case, blitz_attn.quest_prefill_metadata, *parts, tables, ends, begins)
        begins, ends = ends, np.array([last, last - 5])
        summarised(case, blitz_attn.quest_prefill_metadata, *parts, tables, ends, begins)
        for one, other in zip(parts, whole, strict=True):
            assert same_bits(one, other), steps


def test_metadata_start_at_or_behind_the_end_is_no_work(isa_level):
    case = testing.make_paged(2, 2, 2, [30, 17], 8, 16)
    tables, count = summary_tables([4, 3], 4)
    high, low = (blank(count, 4, case.k_cache, 2, 16) for _ in range(2))
    summarised(case, blitz_attn.quest_prefill_metadata, high, low, tables, start_lens=[30, 40])
    assert np.isnan(high).all()
    assert np.isnan(low).all()


def test_metadata_in_spare_pages_of_the_cache(isa_level):
    """Upstream's documented use: summaries of K in pages of the K and V pools that hold no tokens."""
    case = testing.make_paged(2, 2, 2, [40, 61], 16, 16, poison=False)
    free = np.setdiff1d(np.arange(len(case.k_cache)), case.block_tables[case.block_tables < len(case.k_cache)][:7])
    used = np.concatenate([case.block_tables[0, :3], case.block_tables[1, :4]])
    free = np.setdiff1d(np.arange(len(case.k_cache)), used)
    tables = free[:2].astype(np.int32)[:, None]
    expected = [x.copy() for x in (case.k_cache, case.v_cache)]
    reference.quest_prefill_metadata(case.k_cache.copy(), case.block_tables, case.seq_lens, tables, *expected)
    blitz_attn.quest_prefill_metadata(case.k_cache, case.block_tables, case.seq_lens, tables, case.k_cache, case.v_cache)
    assert same_bits(case.k_cache, expected[0])
    assert same_bits(case.v_cache, expected[1])


# ---- Selection ----------------------------------------------------------------------------------------------------


@pytest.mark.sampled(2)
@pytest.mark.parametrize("per_query_head", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [1, 2, 5, 8, 40])
@pytest.mark.parametrize("shape", [(4, 4, 16, 16, 64), (6, 2, 7, 3, 33), (8, 1, 128, 128, 128), (12, 4, 1, 50, 1), (20, 2, 32, 5, 80)], ids=str)
def test_selection(shape, k, dtype, per_query_head, isa_level):
    """Any dim, page size, rows a summary page, number of pages and k."""
    heads, kv_heads, size, rows, dim = shape
    lens = [1, 0, size * 3, size * 17 - size // 2, size * 40 + 1]
    problem = drawn(5, heads, kv_heads, lens, size, dim, dtype, rows, seed=dim + k)
    selected = select(problem, k, per_query_head=per_query_head, block_size=size)
    check_selection(selected, problem, size, per_query_head=per_query_head)
    ascending = select(problem, k, per_query_head=per_query_head, block_size=size, ascending=True)
    for one, other in zip(selected.reshape(-1, k), ascending.reshape(-1, k), strict=True):
        used = one[one >= 0]
        assert other.tolist() == [*sorted(used.tolist()), *[-1] * (k - used.size)]


def whole_numbers(seed, batch=3, heads=4, kv_heads=2, lens=(900, 77, 500), size=16, dim=8, spread=2):
    """A problem whose scores are small whole numbers, exact in every dtype, with many equal ones."""
    rng = np.random.default_rng(seed)
    query, high, low, tables, lens = drawn(batch, heads, kv_heads, lens, size, dim, seed=seed)
    group = heads // kv_heads
    query = np.repeat(rng.integers(-1, 2, (batch, kv_heads, dim)), group, axis=1).astype(np.float32)
    ends = np.sort(rng.integers(-spread, spread + 1, (2, *high.shape)), axis=0).astype(np.float32)
    return query, np.where(np.isnan(high), np.nan, ends[1]), np.where(np.isnan(low), np.nan, ends[0]), tables, lens


@pytest.mark.parametrize("dtype", DTYPES)
def test_ties_go_to_the_lower_page(dtype, isa_level):
    """With exact scores the selection is the reference's, order included."""
    for seed in range(10):
        query, high, low, tables, lens = whole_numbers(seed)
        problem = (*(testing.round_to(x, dtype) for x in (query, high, low)), tables, lens)
        for k in (1, 3, 8, 30):
            expected = reference.quest_block_select_paged(query, high, low, tables, lens, k)
            np.testing.assert_array_equal(select(problem, k), expected)
    flat = np.zeros_like(high)
    assert select((query, flat, flat, tables, lens), 4)[0, 0].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("nan_share", [0, 0.02, 0.9])
@pytest.mark.parametrize("n", [1, 31, 64, 257, 1000])
def test_a_few_of_many_pages(nan_share, n):
    """Scores that are small integers, so exact and often equal: one right answer whatever k, NaN being chosen last."""
    rng = np.random.default_rng(3)
    rows, kv_heads, dim = 4, 2, 4
    summary_pages = -(-n // rows)
    shape = (summary_pages, rows, kv_heads, dim)
    high = rng.integers(-2, 3, shape).astype(np.float32)
    high[rng.random(shape) < nan_share] = np.nan
    low = high - rng.integers(0, 2, shape).astype(np.float32)
    query = rng.integers(-1, 2, (1, kv_heads, dim)).astype(np.float32)
    tables = np.arange(summary_pages, dtype=np.int32)[None]
    pages = [x.reshape(-1, kv_heads, dim)[:n] for x in (high, low)]
    scores = (np.maximum(query, 0) * pages[0] + np.minimum(query, 0) * pages[1]).sum(axis=-1).T
    for k in {1, min(n, 2), min(n, 7), max(1, n // 9), n}:
        selected = blitz_attn.quest_block_select_paged(query, high, low, tables, np.array([n * rows]), k)
        for row, score in zip(selected[0], scores, strict=True):
            best = np.lexsort((np.arange(n), -np.nan_to_num(score), np.isnan(score)))[:k]
            assert row.tolist() == best.tolist()


@pytest.mark.parametrize("per_query_head", [False, True])
@pytest.mark.parametrize("kv_layout", ["beside", "apart"])
def test_summaries_in_either_order(kv_layout, per_query_head, isa_level):
    """A channel's bound is the larger product, whichever summary it comes from; NaN in either makes a page the last choice, infinity the first."""
    rng = np.random.default_rng(5)
    rows, size, n = 4, 2, 40
    for group, kv_heads, dim in [(1, 3, 16), (3, 2, 33), (4, 2, 128), (9, 1, 64), (5, 2, 576)]:
        shape = (n // rows, rows, kv_heads, dim)
        one, other = rng.integers(-3, 4, (2, *shape)).astype(np.float32)
        one[rng.integers(0, n // rows), 1], other[rng.integers(0, n // rows), 2, :, 0] = np.nan, np.nan
        one[0, 3, :, 1] = np.inf
        if kv_layout == "apart":  # a head's rows side by side
            one, other = (np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2) for x in (one, other))
        query = rng.integers(1, 4, (1, kv_heads * group, dim)).astype(np.float32) * rng.choice([-1, 1], (1, kv_heads * group, dim)).astype(np.float32)
        if not per_query_head:  # the mean of equal queries is exact
            query = np.repeat(query[:, ::group], group, axis=1)
        tables = np.arange(n // rows, dtype=np.int32)[None]
        selected = blitz_attn.quest_block_select_paged(
            query, one, other, tables, np.array([n * size]), n, block_size=size, per_query_head=per_query_head
        )
        for r, row in enumerate(selected[0]):
            head = r // group if per_query_head else r
            vector = query[0, r if per_query_head else r * group]
            pages = [x.reshape(n, kv_heads, dim)[:, head] for x in (one, other)]
            score = np.maximum(vector * pages[0], vector * pages[1]).sum(axis=-1)
            assert row.tolist() == np.lexsort((np.arange(n), -np.where(np.isnan(score), 0, score), np.isnan(score))).tolist()


def test_order_is_by_falling_score(isa_level):
    problem = drawn(2, 4, 2, [700, 300], 16, 32)
    selected, scores = select(problem, 12), scores_of(problem, 16)
    for b, r in np.ndindex(2, 2):
        assert (np.diff(scores[b][r][selected[b, r]]) <= 1e-5).all()


@pytest.mark.parametrize("k", [4, 8, 16])
def test_negative_scores_lose_to_no_padding(k, isa_level):
    """All real pages score below 0, rows behind them are zeros: upstream selects those, which are no pages."""
    query, high, low, tables, lens = drawn(2, 4, 2, [5 * 16, 9 * 16 - 3], 16, 32)
    query = np.abs(query)
    high, low = -np.abs(low), -np.abs(low) - np.abs(high)
    high, low = np.nan_to_num(high), np.nan_to_num(low)  # zeros where there is no page
    problem = (query, high, low, tables, lens)
    assert all((s < 0).all() for s in scores_of(problem, 16))
    check_selection(select(problem, k), problem, 16)


@pytest.mark.sampled
@pytest.mark.parametrize(("kv_heads", "dim"), [(1, 576), (5, 576), (20, 128), (3, 129), (67, 8)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_more_heads_than_meet_a_row_together(dtype, kv_heads, dim, isa_level):
    """Heads meet a row as many at a time as their queries find room, and rows a few hundred at a time; heads have bits of their own all the same."""
    problem = drawn(1, 2 * kv_heads, kv_heads, 2 * 270, 2, dim, dtype)
    selected = select(problem, 12)
    check_selection(selected, problem, 2)
    query, high, low, *rest = problem
    for head in {0, kv_heads // 2, kv_heads - 1}:
        one = slice(head, head + 1)
        alone = select((query[:, 2 * head : 2 * head + 2], high[:, :, one], low[:, :, one], *rest), 12, num_threads=1)
        np.testing.assert_array_equal(alone, selected[:, one])


def test_the_smallest_counts_where_the_query_is_negative(isa_level):
    problem = drawn(2, 4, 2, [400, 700], 16, 32)
    query = -np.abs(problem[0])
    selected = select((query, *problem[1:]), 6)
    check_selection(selected, (query, *problem[1:]), 16)
    assert (selected != select((np.abs(query), *problem[1:]), 6)).any()


def test_a_channel_of_nan_makes_a_page_the_last(isa_level):
    """A summary ignores NaN among numbers. A channel of NaN alone is NaN in it, and so is the page's score."""
    k = np.random.default_rng(0).standard_normal((4, 16, 1, 24), dtype=np.float32)
    k[1, 3], k[2, :, :, 5] = np.nan, np.nan
    tables, high, low = np.arange(4)[None], np.zeros((1, 4, 1, 24), np.float32), np.zeros((1, 4, 1, 24), np.float32)
    blitz_attn.quest_prefill_metadata(k, tables, [64], np.array([[0]]), maxblocks=high, minblocks=low)
    np.testing.assert_array_equal(high[0], np.fmax.reduce(k, axis=1))
    np.testing.assert_array_equal(low[0], np.fmin.reduce(k, axis=1))
    assert np.argwhere(np.isnan(high)).tolist() == np.argwhere(np.isnan(low)).tolist() == [[0, 2, 0, 5]]
    q = np.ones((1, 1, 24), np.float32)
    pages, _, scores = blitz_attn.select_blocks(
        q, (high, low), np.array([[0]]), [64], 4, block_size=16, sink=0, recent=0, ascending=False, return_scores=True
    )
    assert pages[0, 0, 3] == 2
    assert np.argwhere(np.isnan(scores)).tolist() == [[0, 0, 3]]


def test_same_bits(isa_level):
    """Whatever the batch, the order of summary pages, and the threads; inputs are not written."""
    problem = drawn(4, 8, 2, [900, 77, 500, 1], 16, 64)
    before = [x.copy() for x in problem]
    selected = select(problem, 8)
    assert all(same_bits(a, b) for a, b in zip(problem, before, strict=True))
    query, high, low, tables, lens = problem
    for some in ([0], [2, 1], [3, 2, 1, 0]):
        np.testing.assert_array_equal(select((query[some], high, low, tables[some], lens[some]), 8), selected[some])
    order = np.random.default_rng(0).permutation(len(high))
    moved = np.where(tables < len(high), np.argsort(order)[np.minimum(tables, len(high) - 1)], tables)
    np.testing.assert_array_equal(select((query, high[order], low[order], moved, lens), 8), selected)
    np.testing.assert_array_equal(select((query, high, low, tables.astype(np.int64), lens.astype(np.int32)), 8), selected)
    try:
        for threads in (1, 2, 5):
            blitz_attn.set_num_threads(threads)
            np.testing.assert_array_equal(select(problem, 8), selected)
    finally:
        blitz_attn.set_num_threads(None)


# ---- Into given arrays, and the window ----------------------------------------------------------------------------


def into(problem, k, since=None, rows=None):
    """The selection by upstream's writing forms, over junk."""
    selected = np.full((len(problem[4]), problem[1].shape[2] if rows is None else rows, k), 77, np.int32)
    if since is None:
        result = blitz_attn.quest_block_select_paged_in_out(*problem, selected, **bits_option(problem[0]))
    else:
        result = blitz_attn.quest_block_select_paged_in_out_w(*problem, since, selected, **bits_option(problem[0]))
    assert result is None
    return selected


@pytest.mark.parametrize("k", [1, 5, 8])
def test_writing_forms_equal_the_returning_one(k, isa_level):
    problem = drawn(4, 8, 2, [900, 77, 0, 1], 16, 64)
    selected = select(problem, k)
    np.testing.assert_array_equal(into(problem, k), selected)
    np.testing.assert_array_equal(into(problem, k, since=-1), selected)
    np.testing.assert_array_equal(into(problem, k, since=np.int64(-1)), selected)
    np.testing.assert_array_equal(into(problem, k, rows=8), select(problem, k, per_query_head=True))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_writing_forms_of_the_twin(dtype):
    """Numbers of new tokens for all requests or for each, and rows per head of the queries or of the keys."""
    problem = drawn(4, 8, 2, [900, 77, 0, 1], 16, 64, dtype)
    plain = np.full((4, 2, 5), 77, np.int32)
    reference.quest_block_select_paged_in_out(*problem, plain)
    np.testing.assert_array_equal(plain, into(problem, 5))
    for rows, since in itertools.product((2, 8), (-1, 0, 40, [33, 0, 5, -1])):
        selected = np.full((4, rows, 5), 77, np.int32)
        reference.quest_block_select_paged_in_out_w(*problem, since, selected)
        np.testing.assert_array_equal(selected, into(problem, 5, since, rows))


def test_strided_result(isa_level):
    """A result inside a larger array; its surroundings stay."""
    problem = drawn(4, 8, 2, [900, 77, 0, 1], 16, 64)
    wide = np.full((8, 4, 30), 77, np.int32)
    blitz_attn.quest_block_select_paged_in_out(*problem, wide[::2, 1:3, 5:25:2])
    np.testing.assert_array_equal(wide[::2, 1:3, 5:25:2], select(problem, 10))
    wide[::2, 1:3, 5:25:2] = 77
    assert (wide == 77).all()


def newest(seq_len, since, size):
    """Pages that were not complete, or not there, when the summaries were made."""
    return range(max(0, seq_len - since) // size, -(-seq_len // size))


@pytest.mark.parametrize("k", [2, 3, 8, 40])
def test_window(k, isa_level):
    """Page 0 first, the newest last, the best of the others between, in falling order; nothing twice."""
    size, lens = 16, [1, 16, 17, 100, 255, 256, 257, 600]
    problem = drawn(8, 4, 2, lens, size, 32)
    scores = scores_of(problem, size)
    for since in (0, 1, 7, 15, 16):
        selected = into(problem, k, since)
        for b, r in np.ndindex(8, 2):
            row, fresh = selected[b, r], list(newest(lens[b], since, size))
            pages = -(-lens[b] // size)
            used = min(k, pages)
            assert row[:used].tolist()[-min(used, len(fresh)) :] == fresh[-used:] or not fresh
            room = used > len(fresh)
            assert not room or row[0] == 0
            check_row(row, scores[b][r], {*fresh[-k:], *([0] if room else [])})
            middle = row[1 : used - len(fresh)]
            assert (np.diff(scores[b][r][middle]) <= 1e-5).all()


def test_every_refresh_length_and_step():
    """Upstream's window rule, enumerated: the newest page must be in wherever summaries were made and tokens came since.

    Its rule leaves it out where the length at the refresh is a multiple of the page and the length now is not, names a page
    twice, and takes one too many where it is the other way round.
    """
    size, refreshed, steps = 128, np.arange(641), np.arange(129)
    for since in steps:
        lens = refreshed + since
        pages = -(-lens // size)
        batch = len(lens)
        tables = np.arange(batch, dtype=np.int32)[:, None]
        ends = np.full((batch, size, 1, 1), np.nan, np.float32)
        ends[np.arange(size) < pages[:, None]] = (
            -1.0 - np.arange(size)[None].repeat(batch, 0)[np.arange(size) < pages[:, None]][:, None, None]
        )
        selected = into((np.ones((batch, 1, 1), np.float32), ends, ends, tables, lens), 8, int(since))[:, 0]
        first = refreshed // size  # the first page that is not complete at the refresh
        for page in range(7):
            must = (page >= first) & (page < pages) | (page == 0) & (pages > 0)
            assert ((selected == page).sum(axis=1) >= must).all(), (since, page)
        assert ((selected >= 0).sum(axis=1) == np.minimum(pages, 8)).all()
        assert (selected < pages[:, None]).all()
        ordered = np.sort(selected, axis=1)
        assert ((ordered[:, 1:] != ordered[:, :-1]) | (ordered[:, 1:] < 0)).all()


def test_window_of_each_request(isa_level):
    """One number for all is that number for each."""
    problem = drawn(4, 4, 2, [100, 257, 3, 600], 16, 32)
    alone = [into((problem[0][b : b + 1], *problem[1:3], *(x[b : b + 1] for x in problem[3:])), 6, n) for b, n in enumerate((0, 30, 3, 17))]
    np.testing.assert_array_equal(into(problem, 6, [0, 30, 3, 17]), np.concatenate(alone))
    np.testing.assert_array_equal(into(problem, 6, np.array([20] * 4)), into(problem, 6, 20))


def test_window_wider_than_k(isa_level):
    """The newest pages win over the first one, the very newest over all."""
    problem = drawn(1, 2, 1, [100], 16, 8)
    assert into(problem, 1, 20)[0, 0].tolist() == [6]
    assert into(problem, 2, 20)[0, 0].tolist() == [5, 6]
    assert into(problem, 3, 20)[0, 0].tolist() == [0, 5, 6]


# ---- Upstream's grids ---------------------------------------------------------------------------------------------


def grid(cells, quick):
    """Cells whose marks say which of them run by default."""
    return [pytest.param(*c, id="-".join(map(str, c)), marks=[] if c in quick else [pytest.mark.full]) for c in cells]


W_CELLS = list(itertools.product(["float16", "bfloat16"], [1, 8, 32], [(1, 1), (32, 8), (64, 64), (128, 1)], [1, 2, 4], [8, 32, 64]))
W_QUICK = [("bfloat16", 1, (32, 8), 2, 8), ("float16", 8, (1, 1), 1, 64), ("float16", 1, (64, 64), 1, 32), ("bfloat16", 1, (128, 1), 4, 8)]


@pytest.mark.parametrize(("dtype", "batch", "heads", "summary_pages", "k"), grid(W_CELLS, W_QUICK))
def test_quest_block_select_paged_in_out_w(dtype, batch, heads, summary_pages, k):
    """Random summaries, pages of 128 tokens, D 128; checked to the score and not, as upstream does, to 2 % of the indices."""
    rng = np.random.default_rng(9)
    lens = rng.integers(1, summary_pages * 128 * 128 + 1, batch)
    lens[0] = summary_pages * 128 * 128
    query, high, low, pool, _ = drawn(1, batch * heads[0], heads[1], 6 * 128 * 128, 128, 128, dtype, seed=9)
    tables = pool[0, rng.integers(0, 6, (batch, summary_pages))]  # all requests share six summary pages
    problem = (query.reshape(batch, heads[0], 128), high, low, tables, lens)
    for since in (-1, 0, 127):
        selected = into(problem, k, since)
        forced = [[] if since < 0 else sorted({0, *newest(int(n), since, 128)}) for n in lens]
        check_selection(selected, problem, 128, forced=forced)


PREFILL_CELLS = list(
    itertools.product(
        ["float16", "bfloat16"], [1, 8, 32], [1, 8, 33], [1, 2, 63, 64, 65, 127, 128, 129, 255, 256, 257, 512], ["equal", "ragged"]
    )
)
PREFILL_QUICK = [("float16", 1, 8, 2, "equal"), ("bfloat16", 8, 1, 1, "ragged"), ("bfloat16", 1, 1, 129, "ragged")]


@pytest.mark.parametrize(("dtype", "batch", "kv_heads", "blocks", "lengths"), grid(PREFILL_CELLS, PREFILL_QUICK))
def test_quest_prefill_metadata(dtype, batch, kv_heads, blocks, lengths):
    """Pages and summary pages of 128, D 128, bit for bit. Values come from a small pool of pages that all requests share."""
    rng = np.random.default_rng(11)
    pool = testing.make_qkv(1, 1, 1, 1, 24 * 128 * kv_heads, 128, dtype=dtype)[1].reshape(24, 128, kv_heads, 128)
    block_tables = rng.integers(0, 24, (batch, blocks)).astype(np.int32)
    lens = rng.integers(1, blocks * 128 + 1, batch) if lengths == "ragged" else np.full(batch, blocks * 128)
    tables, count = summary_tables(-(-lens // 128), 128)
    bits = bits_option(pool)
    pairs = [[blank(count, 128, pool, kv_heads, 128) for _ in range(2)] for _ in range(2)]
    reference.quest_prefill_metadata(pool, block_tables, lens, tables, *pairs[0], **bits)
    blitz_attn.quest_prefill_metadata(pool, block_tables, lens, tables, *pairs[1], **bits)
    for one, other in zip(*pairs, strict=True):
        assert same_bits(one, other)


@pytest.mark.parametrize("name", ["seq_lens", "tokens_since_metadata_update"])
def test_lengths_in_the_memory_of_the_result_are_refused(name):
    """They would be overwritten."""
    q, blocks = np.ones((1, 1, 8), np.float32), np.zeros((2, 4, 1, 8), np.float32)
    selected = np.full((1, 1, 4), 7, np.int32)
    given = {"seq_lens": [7], "tokens_since_metadata_update": [1]} | {name: selected.reshape(-1)[:1]}
    with pytest.raises(ValueError, match=f"^selected_indices: expected memory of its own, got an array that overlaps {name}$"):
        blitz_attn.quest_block_select_paged_in_out_w(q, blocks, blocks, np.array([[0, 1]]), *given.values(), selected)
    assert (selected == 7).all()
