"""Selection for several queries per request: one list for all of them, by the largest score that any of them gives a block.

The oracle works in whole numbers, whose sums are exact in every dtype, so that there is one right answer.
"""

import itertools

import numpy as np
import pytest

import blitz_attn
from blitz_attn import reference, testing
from cases import DTYPES, bits_option, same_bits
from cases_paged import CACHE_DTYPES

METHODS = ["quest", "mean", "max"]
SIZE, ROWS, GROUP, KV_HEADS = 4, 3, 2, 2
LENS, Q_LENS = np.array([41, 6, 1, 90, 5]), np.array([3, 6, 1, 20, 0])


class Whole:
    """Requests, summaries and keys in whole numbers, on pages in any order."""

    def __init__(self, dtype="float32", lens=LENS, q_lens=Q_LENS, dim=24, group=GROUP, kv_heads=KV_HEADS, hnd=False, seed=0):
        rng = np.random.default_rng(seed)
        self.lens, self.q_lens, self.group, self.hnd = np.asarray(lens), np.asarray(q_lens), group, hnd
        self.blocks = -(-self.lens // SIZE)
        self.numbers_q = group * rng.integers(-2, 3, (int(self.q_lens.sum()), kv_heads * group, dim))  # so that means are whole, too
        self.q = testing.round_to(self.numbers_q.astype(np.float32), dtype)
        self.numbers = {"max": [rng.integers(-2, 3, (n * SIZE, kv_heads, dim)) for n in self.blocks]}
        self.numbers |= {name: [rng.integers(-2, 3, (n, kv_heads, dim)) for n in self.blocks] for name in ("mean", "high", "low")}
        self.dtype = dtype
        self.bits = bits_option(self.q)
        order = rng.permutation(int(self.blocks.sum()) + 2)
        own = [order[end - n : end] for end, n in zip(np.cumsum(self.blocks), self.blocks, strict=True)]
        self.block_tables = self._table(own, np.int32)
        keys = np.full((len(order), SIZE, kv_heads, dim), np.nan, np.float32)
        for pages, values in zip(own, self.numbers["max"], strict=True):
            keys[pages] = values.reshape(-1, SIZE, kv_heads, dim)
        needed = -(-self.blocks // ROWS)
        order = rng.permutation(int(needed.sum()) + 2)
        own = [order[end - n : end] for end, n in zip(np.cumsum(needed), needed, strict=True)]
        self.tables = self._table(own, np.int64)
        held = {name: self._laid_out(own, len(order), name) for name in ("mean", "high", "low")}
        self.keys = testing.round_to(keys.swapaxes(1, 2).copy() if hnd else keys, dtype)
        self.sources = {"quest": (held["high"], held["low"]), "mean": held["mean"], "max": self.keys}

    def _table(self, own, dtype):
        table = np.full((len(own), max(map(len, own)) + 1), 10**6, dtype)
        for row, pages in zip(table, own, strict=True):
            row[: len(pages)] = pages
        return table

    def _laid_out(self, own, count, name):
        array = np.full((count, ROWS, *self.numbers[name][0].shape[1:]), np.nan, np.float32)
        for pages, values in zip(own, self.numbers[name], strict=True):
            i = np.arange(len(values))
            array[pages[i // ROWS], i % ROWS] = values
        return testing.round_to(array, self.dtype)

    def select(self, method, *args, rows=None, op=blitz_attn.select_blocks, **options):
        """The call for all requests, or for those of `rows` alone."""
        at = np.arange(len(self.lens)) if rows is None else np.asarray(rows)
        ends = np.cumsum(self.q_lens)
        q = np.concatenate([self.q[ends[b] - self.q_lens[b] : ends[b]] for b in at])
        tables = (self.block_tables if method == "max" else self.tables)[at]
        given = {"q_lens": self.q_lens[at], "method": method, "block_size": SIZE, "kv_layout": "HND" if self.hnd else "NHD"} | self.bits
        return op(q, self.sources[method], tables, self.lens[at], *args, **given | options)

    def score(self, method, b, row, per_query_head):
        """(queries, blocks) of one row of the result: each query's score of each block."""
        end = int(np.cumsum(self.q_lens)[b])
        q = self.numbers_q[end - self.q_lens[b] : end]
        if not per_query_head:
            q = q.reshape(len(q), -1, self.group, q.shape[2]).sum(axis=2) // self.group
        q, head = q[:, row], row // self.group if per_query_head else row
        if method == "max":
            keys = self.numbers["max"][b][: self.lens[b], head]
            return np.array([[max(keys[i : i + SIZE] @ one) for i in range(0, len(keys), SIZE)] for one in q])
        if method == "mean":
            return q @ self.numbers["mean"][b][:, head].T
        high, low = (self.numbers[name][b][:, head] for name in ("high", "low"))
        return np.array([[sum(max(x * h, x * m) for x, h, m in zip(one, *ends, strict=True)) for ends in zip(high, low, strict=True)] for one in q])

    def expected(self, method, k, per_query_head, sink=1, recent=1):
        """(selected, scores) in rising order, written out."""
        heads = KV_HEADS * self.group if per_query_head else KV_HEADS
        selected, scores = np.full((len(self.lens), heads, k), -1), np.full((len(self.lens), heads, k), -np.inf)
        for b, row in np.ndindex(*selected.shape[:2]):
            if not self.q_lens[b]:
                continue
            best = self.score(method, b, row, per_query_head).max(axis=0)
            n = len(best)
            newest = set()
            for token in range(self.lens[b] - self.q_lens[b], self.lens[b]):  # what each query, decoded alone, would have forced
                newest |= set(range(max(0, token // SIZE + 1 - recent), token // SIZE + 1))
            newest |= set(range(min(newest, default=n), n))
            picked = sorted(newest)[-k:]
            picked += [i for i in range(min(sink, n)) if i not in picked][: k - len(picked)]
            picked += [int(i) for i in np.lexsort((np.arange(n), -best)) if i not in picked][: k - len(picked)]
            selected[b, row, : len(picked)] = sorted(picked)
            scores[b, row, : len(picked)] = best[sorted(picked)]
        return selected, scores


@pytest.mark.sampled(2)
@pytest.mark.parametrize("per_query_head", [False, True])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("k", "sink", "recent", "dim", "hnd"),
    [(1, 0, 0, 24, False), (4, 0, 0, 1, True), (6, 1, 1, 33, False), (9, 2, 3, 64, True), (3, 2, 2, 128, False), (30, 0, 0, 40, True)],
)
def test_one_list_for_all_queries_of_a_request(k, sink, recent, dim, hnd, dtype, method, per_query_head, isa_level):
    problem = Whole(dtype, hnd=hnd, dim=dim, seed=k)
    options = {"sink": sink, "recent": recent, "per_query_head": per_query_head, "return_scores": True}
    selected, counts, scores = problem.select(method, k, **options)
    expected, exact = problem.expected(method, k, per_query_head, sink, recent)
    np.testing.assert_array_equal(selected, expected)
    np.testing.assert_array_equal(scores, exact)
    np.testing.assert_array_equal(counts, (expected >= 0).sum(axis=2))
    twin = problem.select(method, k, op=reference.select_blocks, **options)
    for one, other in zip(twin, (expected, counts, exact), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.sampled
@pytest.mark.parametrize("per_query_head", [False, True])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("group", "dim", "lens", "q_lens"), [(1, 16, [700 * SIZE, 40], [9, 17]), (4, 576, [50], [7])])
def test_more_queries_than_a_pass_takes(group, dim, lens, q_lens, method, per_query_head, isa_level):
    """Many queries, heads and dims, so that entries are scored in several passes, and rows in several chunks."""
    problem = Whole(lens=lens, q_lens=q_lens, dim=dim, group=group)
    selected, _ = problem.select(method, 7, sink=0, recent=0, per_query_head=per_query_head)
    np.testing.assert_array_equal(selected, problem.expected(method, 7, per_query_head, 0, 0)[0])


@pytest.mark.parametrize("per_query_head", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_one_query_each_is_the_usual_call(method, per_query_head, isa_level):
    rng = np.random.default_rng(1)
    problem = Whole(q_lens=[1] * 5)
    problem.q = rng.standard_normal(problem.q.shape, dtype=np.float32)
    options = {"per_query_head": per_query_head, "return_scores": True}
    usual, given = problem.select(method, 6, q_lens=None, **options), problem.select(method, 6, **options)
    assert all(same_bits(a, b) for a, b in zip(usual, given, strict=True))


@pytest.mark.parametrize("per_query_head", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_bits_depend_on_the_request_alone(method, per_query_head, isa_level):
    """Whatever the batch and the threads, scores included, although requests with one query and with several are scored by different kernels."""
    problem = Whole(lens=[900, 40, 1, 300, 8], q_lens=[3, 1, 1, 20, 0])
    problem.q = np.random.default_rng(2).standard_normal(problem.q.shape, dtype=np.float32)
    options = {"per_query_head": per_query_head, "return_scores": True, "ascending": False}
    whole = problem.select(method, 9, **options)
    for threads in (1, 2, 5):
        again = problem.select(method, 9, num_threads=threads, **options)
        assert all(same_bits(a, b) for a, b in zip(again, whole, strict=True))
    for rows in ([0], [1], [3], [4], [3, 2, 0]):
        part = problem.select(method, 9, rows=rows, **options)
        assert all(same_bits(a, b[rows]) for a, b in zip(part, whole, strict=True))


def test_equal_queries_choose_as_one_of_them(isa_level):
    """Repeating a query adds nothing but newest blocks; a query that is added can only raise scores."""
    problem = Whole(lens=[200], q_lens=[1])
    one = problem.select("quest", 50, sink=0, recent=0, return_scores=True)
    problem.q, problem.q_lens = np.repeat(problem.q, 4, axis=0), np.array([4])
    four = problem.select("quest", 50, sink=0, recent=0, return_scores=True)
    assert all(same_bits(a, b) for a, b in zip(one, four, strict=True))
    problem.q = np.concatenate([problem.q[:1], -problem.q[:1], problem.q[:2]])
    more = problem.select("quest", 50, sink=0, recent=0, return_scores=True)
    assert (more[2] >= one[2]).all()


@pytest.mark.parametrize("query", [0, 1, 2])
@pytest.mark.parametrize("method", METHODS)
def test_a_score_of_nan_by_any_query_comes_last(method, query, isa_level):
    problem = Whole(lens=[80], q_lens=[3], group=1)
    problem.q[:, 0, 0] = 0  # 0 times infinity, but for one of the queries
    problem.q[query, 0, 0] = np.inf
    source = problem.sources[method]
    for array in source if method == "quest" else (source,):
        array[..., 0] = 1
    at = (problem.block_tables[0, 5],) if method == "max" else (problem.tables[0, 5 // ROWS], 5 % ROWS)
    for array in source if method == "quest" else (source,):
        array[at][..., 0] = 0
    selected, _, scores = problem.select(method, 20, sink=0, recent=0, ascending=False, return_scores=True)
    assert selected[0, 0, -1] == 5
    assert np.argwhere(np.isnan(scores)).tolist() == [[0, 0, 19]]


def test_stale_blocks_and_dense_requests(isa_level):
    """They count from the end of the request; a request without queries selects nothing even so."""
    problem = Whole()
    selected, counts = problem.select("quest", 6, recent=0, sink=0, tokens_since_metadata_update=[9, -1, 0, 9, 4])
    assert {8, 9, 10} <= set(selected[0, 0].tolist())
    assert {20, 21, 22} <= set(selected[3, 0].tolist())
    assert counts.tolist() == [[6, 6], [2, 2], [1, 1], [6, 6], [0, 0]]
    _, counts = problem.select("quest", 2, dense_below=42)
    assert counts.tolist() == [[11, 11], [2, 2], [1, 1], [2, 2], [0, 0]]


def test_no_queries_at_all():
    problem = Whole(q_lens=[0] * 5)
    selected, counts, scores = problem.select("mean", 3, return_scores=True)
    assert (selected == -1).all()
    assert not counts.any()
    assert np.isneginf(scores).all()


@pytest.mark.parametrize("kv_dtype", CACHE_DTYPES)
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize(("method", "per_query_head"), [("quest", False), ("mean", True)])
def test_select_and_attend_several_queries(kv_layout, kv_dtype, method, per_query_head, isa_level):
    """Selecting, then attending to what was selected, bit for bit; with all blocks, paged attention."""
    lens, q_lens = [300, 17, 0, 129], [4, 17, 0, 1]
    case = testing.make_paged(4, 8, 2, lens, 16, 32, kv_dtype=kv_dtype, kv_layout=kv_layout, q_lens=q_lens)
    exact = testing.make_paged(4, 8, 2, lens, 16, 32, kv_layout=kv_layout, q_lens=q_lens)
    high, low, mean = np.zeros((3, 8, 16, 2, 32), np.float32)
    tables = np.array([[5, 2], [1, 0], [0, 0], [7, 3]])
    keys = exact.k_cache, exact.block_tables, exact.seq_lens
    blitz_attn.quest_prefill_metadata(*keys, tables, high, low, meanblocks=mean, kv_layout=kv_layout)
    attend, options = blitz_attn.select_and_attend, {**case.options, "return_lse": True}
    source = mean if method == "mean" else (high, low)
    choice = {"method": method, "per_query_head": per_query_head, "recent": 2}
    selected, counts = blitz_attn.select_blocks(case.q, source, tables, lens, 6, block_size=16, q_lens=q_lens, **choice)
    expected = blitz_attn.paged_select_attention(*case.arrays, selected, counts=counts, **options)
    got = attend(*case.arrays, source, tables, k=6, **choice, **options)
    assert all(same_bits(a, b) for a, b in zip(got, expected, strict=True))
    every = attend(*case.arrays, source, tables, budget=10**6, **choice, **options)
    assert all(same_bits(a, b) for a, b in zip(every, blitz_attn.paged_attention(*case.arrays, **options), strict=True))
    twin = reference.select_and_attend(*case.arrays, source, tables, k=6, **choice, **options)
    np.testing.assert_allclose(got[0], twin[0], atol=1e-4)
    np.testing.assert_allclose(got[1], twin[1], atol=1e-4)


BAD = [
    (ValueError, r"^q_lens: expected 5 entries, one per request, got 2", {"q_lens": [1, 2]}),
    (ValueError, r"^q_lens: expected lengths that add up to q's 30 tokens, got 29", {"q_lens": [3, 6, 1, 19, 0]}),
    (ValueError, r"^q_lens: expected 0 to seq_lens\[1\] = 6, got 7 at \[1\]", {"q_lens": [3, 7, 1, 19, 0]}),
    (ValueError, r"^q_lens: expected 0 to seq_lens\[0\] = 41, got -1 at \[0\]", {"q_lens": [-1, 6, 1, 24, 0]}),
    (ValueError, r"^q_lens: expected lengths that add up to q's 30 tokens", {"q_lens": [2**63 - 1, 2**63 - 1, 1, 24, 0]}),
    (TypeError, r"^q_lens: expected", {"q_lens": 3}),
    (TypeError, r"^q_lens: expected", {"q_lens": [1.0, 6, 1, 20, 0]}),
    (ValueError, r"^q: expected shape \(5, H, D\), got \(30, 4, 24\)", {"q_lens": None}),
]


@pytest.mark.parametrize(("error", "pattern", "changes"), BAD)
def test_bad_lengths(error, pattern, changes):
    problem = Whole()
    for method in METHODS:
        with pytest.raises(error, match=pattern):
            problem.select(method, 3, **changes)


def test_forced_blocks_of_every_length():
    """Each query forces the blocks that it would force if it were decoded alone. Nothing else is forced."""
    for tokens, recent in itertools.product(range(1, 14), (1, 2, 3)):
        for queries in range(1, tokens + 1):
            problem = Whole(lens=[tokens], q_lens=[queries], dim=2)
            blocks = -(-tokens // SIZE)
            expected = {i for t in range(tokens - queries, tokens) for i in range(max(0, t // SIZE + 1 - recent), t // SIZE + 1)}
            high, low = problem.sources["quest"]
            high[:], low[:] = np.nan, np.nan  # of blocks that are not forced, the lowest come first
            selected, counts = problem.select("quest", len(expected), sink=0, recent=recent)
            assert counts[0, 0] == len(expected) <= blocks
            assert selected[0, 0].tolist() == sorted(expected), (tokens, queries, recent)
