"""Page summaries and selections of pages are compared with the float64 twins.

The selected pages and the largest and smallest keys must be equal. Scores of small integers must be equal, too, since their sums are exact in
every dtype. Scores over quantised keys, and means of keys, must be within a tolerance.

Values of all kinds, including NaN, forced and stale blocks, views and batch mates are drawn together in tests/fuzz/quest_problems.py, whose
oracle knows all right selections. This file also has upstream's grids, and the cases in which upstream's own rule is wrong.
"""

import itertools

import numpy as np
import pytest

import blitz_attn
from blitz_attn import reference, testing
from cases import DTYPES, bits_option, dtype_of, same_bits

METHODS = ["quest", "mean", "max"]
SUMMARIES = ("maxblocks", "minblocks", "meanblocks")


def table_of(needed, rng, spare=2, index_dtype="int32"):
    """(B, W) tables of distinct pages, and the number of pages in the pool. Unused entries name no existing page."""
    order = rng.permutation(int(sum(needed)) + spare)
    table = np.full((len(needed), int(max(needed, default=0)) + 1), 10**6, index_dtype)
    for row, end, n in zip(table, np.cumsum(needed), needed, strict=True):
        row[:n] = order[end - n : end]
    return table, len(order)


class Whole:
    """Requests with summaries and keys that are integers, on pages in random order. Pages of no request hold NaN."""

    def __init__(self, lens, q_lens=None, dtype="float32", *, dim=24, group=2, kv_heads=2, size=4, rows=3, hnd=False, seed=0):
        rng = np.random.default_rng(seed)
        self.lens, self.size, self.q_lens, self.hnd = np.asarray(lens), size, q_lens, hnd
        blocks = -(-self.lens // size)
        queries = len(lens) if q_lens is None else sum(q_lens)
        q = group * rng.integers(-2, 3, (queries, kv_heads * group, dim))  # so that means over a group are integers, too
        self.q = testing.round_to(q.astype(np.float32), dtype)
        self.tables, sources = {}, {}
        for method, needed, entries in (("max", blocks, size), ("quest", -(-blocks // rows), rows)):
            self.tables[method], count = table_of(needed, rng)
            used = np.isin(np.arange(count), self.tables[method])
            for name in ("keys",) if method == "max" else SUMMARIES:
                x = rng.integers(-2, 3, (count, entries, kv_heads, dim)).astype(np.float32)
                x[~used] = np.nan
                sources[name] = testing.round_to(x.swapaxes(1, 2).copy() if hnd and method == "max" else x, dtype)
        self.tables["mean"] = self.tables["quest"]
        self.sources = {"quest": (sources["maxblocks"], sources["minblocks"]), "mean": sources["meanblocks"], "max": sources["keys"]}
        self.bits = bits_option(self.q)

    def arrays(self):
        """The first arguments of Quest's functions."""
        return self.q, *self.sources["quest"], self.tables["quest"], self.lens

    def select(self, method, k, **options):
        """(selected, counts, scores), after a check that the twin returns equal arrays."""
        given = {"method": method, "q_lens": self.q_lens, "block_size": self.size, "kv_layout": "HND" if self.hnd else "NHD"} | self.bits
        call = self.q, self.sources[method], self.tables[method], self.lens, k
        found, twin = (op.select_blocks(*call, return_scores=True, **given | options) for op in (blitz_attn, reference))
        for one, other in zip(found, twin, strict=True):
            np.testing.assert_array_equal(one, other)
        return found


# ---- Summaries ----------------------------------------------------------------------------------------------------


def check_metadata(k_cache, block_tables, lens, size, rows, **options):
    """Compare the largest and smallest keys bit for bit, and the means of keys, in all summary pages. Other rows must stay as they are."""
    kv_heads, dim = k_cache.shape[1 if options.get("kv_layout") == "HND" else 2], k_cache.shape[3]
    blocks = -(-lens // size)
    tables, count = table_of(-(-blocks // rows), np.random.default_rng(2))
    dtype = "float32" if "k_scale" in options else dtype_of(k_cache)
    results = []
    for op in (blitz_attn, reference):
        outputs = {name: testing.round_to(np.full((count, rows, kv_heads, dim), np.nan), dtype) for name in SUMMARIES}
        assert op.quest_prefill_metadata(k_cache, block_tables, lens, tables, **outputs, **options) is None
        results.append(list(outputs.values()))
    assert all(map(same_bits, results[0][:2], results[1][:2]))
    means = [testing.to_float64(x[2], dtype) for x in results]
    rtol, atol = {"float64": 1e-15, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}[dtype], 1e-15 if dtype == "float64" else 2e-7
    if "k_scale" in options:
        rtol, atol = 2.0**-22, 2.0**-20 * np.nanmax(np.abs(testing.to_float64(results[1][0], dtype)), initial=1)
    np.testing.assert_allclose(*means, rtol=rtol, atol=atol)


SIZES = [(16, 16, 64), (1, 3, 1), (7, 64, 33), (128, 8, 128), (64, 5, 17), (256, 1, 40)]  # tokens per page, rows per summary page, dim


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("page_size", "rows", "dim"), SIZES)
def test_metadata(page_size, rows, dim, dtype, kv_layout, isa_level):
    """Summaries cover the tokens in use, and zeros follow up to the end of the last summary page. Nothing else is written."""
    lens = [1, 0, page_size, page_size + 1, 5 * page_size - 1, 9 * page_size + 3]
    case = testing.make_paged(6, 2, 2, lens, page_size, dim, dtype=dtype, kv_layout=kv_layout)
    check_metadata(case.k_cache, *case.arrays[3:], page_size, rows, kv_layout=kv_layout, **bits_option(case.k_cache))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("scales", ["tokens", "heads", "one"])
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("kv_dtype", testing.QUANTIZED)
@pytest.mark.parametrize(("page_size", "rows", "dim"), SIZES)
def test_metadata_of_eight_bits(page_size, rows, dim, kv_dtype, kv_layout, scales, isa_level):
    """Summaries are those of the dequantised float32 keys."""
    case = testing.make_paged(3, 2, 2, [1, 0, 5 * page_size + 3], page_size, dim, kv_dtype=kv_dtype, kv_layout=kv_layout)
    scale = {"tokens": case.options["k_scale"], "heads": np.float32([0.5, 0.02]), "one": 0.02}[scales]
    named = {"dtype": kv_dtype} if kv_dtype == "float8_e4m3" else {}
    check_metadata(case.k_cache, *case.arrays[3:], page_size, rows, kv_layout=kv_layout, k_scale=scale, **named)


# ---- Selection ----------------------------------------------------------------------------------------------------

SHAPES = [  # KV heads, query heads per group, tokens per page, rows per summary page, dim
    (4, 1, 16, 16, 64), (2, 3, 7, 3, 33), (1, 8, 128, 128, 128), (4, 3, 1, 50, 1), (2, 10, 32, 5, 80),
    (1, 2, 2, 7, 576), (5, 2, 2, 7, 576), (20, 2, 2, 7, 128), (67, 2, 2, 7, 8),  # more heads than are scored together against one row
]  # fmt: skip


def test_keys_whose_scales_lie_behind_them_in_each_page():
    pool = np.zeros((6, 16 * 2 * 8 + 16 * 2 * 4), np.int8)  # each page holds its keys, then their scales
    keys, scales = pool[:, :256].reshape(6, 16, 2, 8), pool[:, 256:].view(np.float32).reshape(6, 16, 2)
    keys[:], scales[:] = blitz_attn.quantize_kv(np.random.default_rng(0).standard_normal(keys.shape, np.float32), "int8")
    rest = np.array([[4, 1, 0]], np.int32), [41], np.zeros((1, 1), np.int32)
    found, expected = (tuple(np.zeros((1, 16, 2, 8), np.float32) for _ in range(2)) for _ in range(2))
    blitz_attn.quest_prefill_metadata(keys, *rest, *found, k_scale=scales)
    blitz_attn.quest_prefill_metadata(keys.copy(), *rest, *expected, k_scale=scales.copy())
    assert expected[0].any()
    assert all(map(same_bits, found, expected))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("ascending", [False, True])
@pytest.mark.parametrize("per_query_head", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [1, 2, 8, 40])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_selection(shape, k, dtype, per_query_head, ascending, isa_level):
    """Ties go to the lower page, and pages come in the order of falling scores, or ascending."""
    kv_heads, group, size, rows, dim = shape
    lens = [1, 0, size * 3, size * 17 - size // 2, size * 270 + 1]
    problem = Whole(lens, dtype=dtype, dim=dim, group=group, kv_heads=kv_heads, size=size, rows=rows, seed=k)
    options = {"per_query_head": per_query_head, "ascending": ascending, "block_size": size, **problem.bits}
    found, twin = (op.quest_block_select_paged(*problem.arrays(), k, **options) for op in (blitz_attn, reference))
    assert found.dtype == np.int32
    np.testing.assert_array_equal(found, twin)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("q_lens", [None, [3, 6, 1, 20, 0]], ids=["one", "several"])
@pytest.mark.parametrize("per_query_head", [False, True])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("k", "sink", "recent", "dim", "hnd"),
    [(1, 0, 0, 24, False), (4, 0, 0, 1, True), (6, 1, 1, 33, False), (9, 2, 3, 64, True), (3, 2, 2, 128, False), (30, 0, 0, 40, True)],
)
def test_one_list_for_all_queries_of_a_request(k, sink, recent, dim, hnd, dtype, method, per_query_head, q_lens, isa_level):
    """A request's blocks are chosen by the largest score that any of its queries gives them."""
    problem = Whole([41, 6, 1, 90, 5], q_lens, dtype, hnd=hnd, dim=dim, seed=k)
    problem.select(method, k, sink=sink, recent=recent, per_query_head=per_query_head)


CHOICES = {
    "one": ((1,), {}),
    "four": ((4,), {}),
    "by score": ((6,), {"ascending": False}),
    "more than there are": ((50,), {}),
    "none forced": ((6,), {"sink": 0, "recent": 0}),
    "some forced": ((6,), {"sink": 2, "recent": 3}),
    "more forced than k": ((3,), {"sink": 5, "recent": 2}),
    "recent per request": ((5,), {"recent": [0, 1, 2, 3, 4]}),
    "k per request": (([1, 2, 3, 4, 5],), {}),
    "budget": ((), {"budget": 100}),
    "budget per request": ((), {"budget": [1, 16, 33, 64, 200]}),
    "short ones dense": ((4,), {"dense_below": 130}),
    "stale summaries": ((4,), {"tokens_since_metadata_update": 40}),
    "stale per request": ((4,), {"tokens_since_metadata_update": [0, 1, 2, 20, 33], "recent": 0}),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("hnd", [False, True])
@pytest.mark.parametrize("per_query_head", [False, True])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_choice(dtype, method, per_query_head, hnd, choice, isa_level):
    problem, (args, options) = Whole([1, 0, 37, 130, 600], dtype=dtype, dim=32, group=4, size=16, rows=5, hnd=hnd), CHOICES[choice]
    problem.select(method, *(args or (None,)), per_query_head=per_query_head, **options)


@pytest.mark.sampled
@pytest.mark.parametrize("per_query_head", [False, True])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("group", "dim", "lens", "q_lens"), [(1, 16, [2800, 40], [9, 17]), (4, 576, [50], [7])])
def test_more_queries_than_a_pass_takes(group, dim, lens, q_lens, method, per_query_head, isa_level):
    """There are so many queries, heads and dims that entries are scored in several passes, and rows in several chunks."""
    Whole(lens, q_lens, dim=dim, group=group).select(method, 7, sink=0, recent=0, per_query_head=per_query_head)


@pytest.mark.parametrize("recent", [1, 2, 3])
@pytest.mark.parametrize("tokens", range(1, 14))
def test_forced_blocks_of_every_length(tokens, recent):
    """Each query forces the blocks that it would force if it were decoded alone, and no other block is forced."""
    for queries in range(1, tokens + 1):
        problem = Whole([tokens], [queries], dim=2)
        expected = {i for t in range(tokens - queries, tokens) for i in range(max(0, t // 4 + 1 - recent), t // 4 + 1)}
        high, low = problem.sources["quest"]
        high[:], low[:] = np.nan, np.nan  # with equal scores, blocks that are not forced would be chosen from the lowest on
        selected, counts, _ = problem.select("quest", len(expected), sink=0, recent=recent)
        assert counts[0, 0] == len(expected)
        assert selected[0, 0].tolist() == sorted(expected)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("per_query_head", [False, True])
@pytest.mark.parametrize("q_lens", [None, [1, 0, 9, 3]], ids=["one", "several"])
@pytest.mark.parametrize("q_dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("scales", ["tokens", "heads", "one"])
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("kv_dtype", testing.QUANTIZED)
@pytest.mark.parametrize(("size", "dim", "lens"), [(16, 24, [1, 0, 16, 77]), (1, 64, [1, 0, 16, 77]), (5, 7, [3, 0, 40, 1300])])
def test_best_keys_of_eight_bits(size, dim, lens, kv_dtype, kv_layout, scales, q_dtype, q_lens, per_query_head, isa_level):
    """Scores and lists of the method max over quantised keys are those of the twin, with the same bits on any number of threads."""
    case = testing.make_paged(4, 6, 3, lens, size, dim, dim, q_dtype, kv_dtype, kv_layout, q_lens=q_lens)
    scale = {"tokens": case.options["k_scale"], "heads": np.float32([0.5, 0.02, 0.1]), "one": 0.02}[scales]
    options = {"method": "max", "k": 300, "per_query_head": per_query_head, "sink": 0, "recent": 0, "return_scores": True}
    options |= {name: x for name, x in case.options.items() if name not in ("k_scale", "v_scale", "window")} | {"k_scale": scale}
    call = case.q, case.k_cache, case.block_tables, case.seq_lens
    found, again = (blitz_attn.select_blocks(*call, num_threads=n, **options) for n in (1, 3))
    assert all(map(same_bits, found, again))
    selected, counts, scores = reference.select_blocks(*call, **options)
    assert same_bits(found[0], selected.astype(np.int32))
    assert same_bits(found[1], counts.astype(np.int32))
    used = selected >= 0
    assert np.isneginf(found[2][~used]).all()
    largest = np.abs(scores[used]).max(initial=0)
    np.testing.assert_allclose(found[2][used], scores[used], rtol=2.0**-20, atol=2.0**-20 * largest * dim)


@pytest.mark.parametrize("cache", ["float32", "int8", "bfloat16"])
def test_bfloat16_tokens_for_a_cache_of_another_dtype(cache):
    """`dtype` names the dtype of the new tokens, and that of the cache only if the cache holds bits."""
    bits = np.full((1, 1, 8), 0x3F80, np.uint16)  # 1.0
    k_cache = np.zeros((2, 4, 1, 8), {"bfloat16": np.uint16}.get(cache, cache))
    maxima, minima = np.zeros((2, 1, 2, 1, 8), np.uint16 if cache == "bfloat16" else np.float32)
    scales = dict.fromkeys(("k_scale", "v_scale"), np.ones((2, 4, 1), np.float32)) if cache == "int8" else {}
    scales = {name: x.copy() for name, x in scales.items()}
    blitz_attn.append_paged_kv(
        bits, bits, k_cache, k_cache.copy(), block_tables=np.array([[1]]), seq_lens=[1], maxblocks=maxima, minblocks=minima,
        metadata_block_tables=np.array([[0]]), dtype="bfloat16", **scales,
    )  # fmt: skip
    np.testing.assert_allclose(reference.to_float64(maxima[0, 0, 0], "bfloat16"), 1, rtol=1e-6)


# ---- Selection into given arrays, and the window ------------------------------------------------------------------


def into(arrays, k, since=None, rows=None, op=blitz_attn):
    """The selection by upstream's functions that write into a given array. This array is a view of a larger one, whose other elements must stay."""
    batch, rows, bits = len(arrays[0]), rows or arrays[1].shape[2], bits_option(arrays[0])
    wide = np.full((2 * batch, 2 * rows, 2 * k), 77, np.int32)
    selected = wide[::2, ::2, 1::2] if op is blitz_attn else np.full((batch, rows, k), 77, np.int32)
    if since is None:
        assert op.quest_block_select_paged_in_out(*arrays, selected, **bits) is None
    else:
        assert op.quest_block_select_paged_in_out_w(*arrays, since, selected, **bits) is None
    found = selected.copy()
    selected[...] = 77
    assert (wide == 77).all()
    return found


@pytest.mark.parametrize("rows", [2, 8])
@pytest.mark.parametrize("since", [None, -1, np.int64(0), 1, 7, 40, [33, 0, 5, -1]], ids=str)
@pytest.mark.parametrize("k", [1, 5, 8, 40])
def test_writing_forms(k, since, rows):
    """`since` is a number of new tokens for all requests, or one for each. The result's shape decides between rows per query head and per KV head."""
    arrays = Whole([900, 77, 0, 1], group=4, size=16, rows=16, dim=64).arrays()
    found = into(arrays, k, since, rows)
    np.testing.assert_array_equal(found, into(arrays, k, since, rows, reference))
    if since in (None, -1):
        np.testing.assert_array_equal(found, blitz_attn.quest_block_select_paged(*arrays, k, per_query_head=rows == 8))


@pytest.mark.parametrize("since", range(0, 129, 4))
def test_every_refresh_length_and_step(since):
    """By upstream's window rule, all pages that got tokens since the last refresh of the summaries must be chosen, and page 0.

    Upstream's own rule leaves the newest page out if the length at the refresh is a multiple of the page size and the length now is not. It takes
    one page too many if the length now is a multiple and the length at the refresh is not. It also names a page twice.
    """
    size, refreshed = 128, np.arange(641)
    for step in range(since, since + 4):
        lens = refreshed + step
        pages = -(-lens // size)
        real = np.arange(size) < pages[:, None]
        ends = np.where(real, -1.0 - np.arange(size), np.nan).astype(np.float32)[..., None, None]
        selected = np.full((len(lens), 1, 8), 77, np.int32)
        arrays = np.ones((len(lens), 1, 1), np.float32), ends, ends, np.arange(len(lens), dtype=np.int32)[:, None], lens
        blitz_attn.quest_block_select_paged_in_out_w(*arrays, step, selected)
        selected = selected[:, 0]
        first = refreshed // size  # the first page that is not complete at the refresh
        for page in range(7):
            must = (page >= first) & (page < pages) | (page == 0) & (pages > 0)
            assert ((selected == page).sum(axis=1) >= must).all(), page
        assert ((selected >= 0).sum(axis=1) == np.minimum(pages, 8)).all()
        assert (selected < pages[:, None]).all()
        ordered = np.sort(selected, axis=1)
        assert ((ordered[:, 1:] != ordered[:, :-1]) | (ordered[:, 1:] < 0)).all()


# ---- Upstream's grids ---------------------------------------------------------------------------------------------


def grid(cells, quick):
    """Cells with marks that decide which of them run by default."""
    return [pytest.param(*c, id="-".join(map(str, c)), marks=[] if c in quick else [pytest.mark.full]) for c in cells]


W_CELLS = list(itertools.product(["float16", "bfloat16"], [1, 8, 32], [(1, 1), (32, 8), (64, 64), (128, 1)], [1, 2, 4], [8, 32, 64]))
W_QUICK = [("bfloat16", 1, (32, 8), 2, 8), ("float16", 8, (1, 1), 1, 64), ("float16", 1, (64, 64), 1, 32), ("bfloat16", 1, (128, 1), 4, 8)]


@pytest.mark.parametrize(("dtype", "batch", "heads", "summary_pages", "k"), grid(W_CELLS, W_QUICK))
def test_quest_block_select_paged_in_out_w(dtype, batch, heads, summary_pages, k):
    """Pages have 128 tokens, and D is 128. Every chosen page must be right; upstream allows 2 % wrong ones. All requests share six summary pages."""
    rng = np.random.default_rng(9)
    q, high, low = (rng.integers(-2, 3, shape) for shape in ((batch, heads[1], 128), *[(6, 128, heads[1], 128)] * 2))
    q = np.repeat(q, heads[0] // heads[1], axis=1)  # the mean of equal queries is exact
    floats = [testing.round_to(x.astype(np.float32), dtype) for x in (q, high, low)]
    arrays = *floats, rng.integers(0, 6, (batch, summary_pages)), rng.integers(1, summary_pages * 128 * 128 + 1, batch)
    for since in (-1, 0, 127):
        np.testing.assert_array_equal(into(arrays, k, since), into(arrays, k, since, op=reference))


PREFILL_BLOCKS = [1, 2, 63, 64, 65, 127, 128, 129, 255, 256, 257, 512]
PREFILL_CELLS = list(itertools.product(["float16", "bfloat16"], [1, 8, 32], [1, 8, 33], PREFILL_BLOCKS, ["equal", "ragged"]))
PREFILL_QUICK = [("float16", 1, 8, 2, "equal"), ("bfloat16", 8, 1, 1, "ragged"), ("bfloat16", 1, 1, 129, "ragged")]


@pytest.mark.parametrize(("dtype", "batch", "kv_heads", "blocks", "lengths"), grid(PREFILL_CELLS, PREFILL_QUICK))
def test_quest_prefill_metadata(dtype, batch, kv_heads, blocks, lengths):
    """Pages have 128 tokens, summary pages 128 rows, and D is 128. All requests share a small pool of pages."""
    rng = np.random.default_rng(11)
    pool = testing.make_qkv(1, 1, 1, 1, 24 * 128 * kv_heads, 128, dtype=dtype)[1].reshape(24, 128, kv_heads, 128)
    block_tables = rng.integers(0, 24, (batch, blocks)).astype(np.int32)
    lens = rng.integers(1, blocks * 128 + 1, batch) if lengths == "ragged" else np.full(batch, blocks * 128)
    check_metadata(pool, block_tables, lens, 128, 128, **bits_option(pool))
