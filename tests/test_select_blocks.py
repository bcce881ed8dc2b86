"""`select_blocks` with all methods, and `select_and_attend`, agree with their float64 twins."""

import numpy as np
import pytest

import blitz_attn
from blitz_attn import reference, testing
from cases import bits_option, dtype_of, same_bits
from cases_paged import attend_paged
from exporters import OnlyDlpack

SIZE, DIM = 16, 32
LENS = [1, 0, 37, 130, 600]
METHODS = ["quest", "mean", "max"]


class Problem:
    """A cache with summaries for every method."""

    def __init__(self, dtype="float32", kv_layout="NHD", heads=8, kv_heads=2, lens=LENS, rows=5, seed=0):
        self.case = case = testing.make_paged(len(lens), heads, kv_heads, lens, SIZE, DIM, dtype=dtype, kv_layout=kv_layout, seed=seed)
        pages = -(-case.seq_lens // SIZE)
        width = -(-int(pages.max()) // rows)
        self.tables = np.random.default_rng(seed).permutation(len(lens) * width).reshape(len(lens), width)
        self.bits = bits_option(case.k_cache)
        self.high, self.low, self.mean = (
            testing.round_to(np.full((self.tables.size, rows, kv_heads, DIM), np.nan), dtype_of(case.k_cache)) for _ in range(3)
        )
        blitz_attn.quest_prefill_metadata(
            case.k_cache,
            case.block_tables,
            case.seq_lens,
            self.tables,
            self.high,
            self.low,
            meanblocks=self.mean,
            kv_layout=kv_layout,
            **self.bits,
        )

    def source(self, method):
        return {
            "quest": ((self.high, self.low), self.tables),
            "mean": (self.mean, self.tables),
            "max": (self.case.k_cache, self.case.block_tables),
        }[method]

    def select(self, op, method, *args, **options):
        source, tables = self.source(method)
        layout = {"kv_layout": self.case.options["kv_layout"]}
        return op(self.case.q, source, tables, self.case.seq_lens, *args, method=method, block_size=SIZE, **layout, **self.bits, **options)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_select_and_attend(kv_layout, method, isa_level):
    """The call has the bits of selecting and then attending. If all blocks are selected, it has the bits of paged attention."""
    problem = Problem(kv_layout=kv_layout)
    case = problem.case
    summaries = () if method == "max" else problem.source(method)
    rules = {"scale": 0.3, "softcap": 5.0, "sinks": np.linspace(-1, 1, 8).astype(np.float32)}
    selected, counts = problem.select(blitz_attn.select_blocks, method, 5, sink=2)
    expected = attend_paged(case, selected, counts=counts, **rules)
    got = blitz_attn.select_and_attend(*case.arrays, *summaries, k=5, sink=2, method=method, return_lse=True, **case.options, **rules)
    assert all(same_bits(a, b) for a, b in zip(got, expected, strict=True))
    for everything in ({"budget": 10**6}, {"k": 3, "dense_below": 10**6}):
        got = blitz_attn.select_and_attend(*case.arrays, *summaries, method=method, return_lse=True, **everything, **case.options)
        assert all(same_bits(a, b) for a, b in zip(got, attend_paged(case), strict=True))


def test_decode_loop():
    """Tokens are appended with summaries, one at a time, and attend to selected blocks. A budget of at least the length gives dense decode."""
    rng = np.random.default_rng(3)
    k_cache, v_cache, high, low = np.full((4, 12, SIZE, 2, DIM), np.nan, np.float32)
    tables, summary_tables = np.array([[7, 2, 9], [1, 11, 4]]), np.array([[5], [8]])
    for step in range(1, 41):
        lens = [step, step]
        q, k, v = (rng.standard_normal((2, h, DIM), dtype=np.float32) for h in (8, 2, 2))
        summaries = {"maxblocks": high, "minblocks": low, "metadata_block_tables": summary_tables}
        blitz_attn.append_paged_kv(k, v, k_cache, v_cache, block_tables=tables, seq_lens=lens, **summaries)
        out = blitz_attn.select_and_attend(q, k_cache, v_cache, tables, lens, (high, low), summary_tables, budget=48)
        assert same_bits(out, blitz_attn.paged_attention(q, k_cache, v_cache, tables, lens))
        few = blitz_attn.select_and_attend(q, k_cache, v_cache, tables, lens, (high, low), summary_tables, budget=32)
        assert np.isfinite(few).all()
        assert same_bits(few, out) == (step <= 32)


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("method", METHODS)
def test_block_size_of_arrays_that_only_export_dlpack(method, kv_layout):
    """A block has as many tokens as there are rows in a page: of the source in select_blocks, of the cache in select_and_attend."""
    problem = Problem(kv_layout=kv_layout)
    case, (source, tables) = problem.case, problem.source(method)
    hidden = tuple(OnlyDlpack(x) for x in source) if method == "quest" else OnlyDlpack(source)
    for options in ({"budget": 5 * SIZE}, {"k": 2, "dense_below": 131}):
        options |= {"method": method, "kv_layout": kv_layout}
        lens = np.minimum(case.seq_lens, SIZE)  # a block of a source has as many tokens as a page has rows: longer requests need longer tables
        got, expected = (blitz_attn.select_blocks(case.q, x, tables, lens, **options) for x in (hidden, source))
        assert all(same_bits(a, b) for a, b in zip(got, expected, strict=True))
    options = {"k": 3, "method": method, "kv_layout": kv_layout}
    summaries = () if method == "max" else (source, tables)
    hidden = [case.q, OnlyDlpack(case.k_cache), OnlyDlpack(case.v_cache), case.block_tables, case.seq_lens]
    got, expected = (blitz_attn.select_and_attend(*x, *summaries, **options) for x in (hidden, case.arrays))
    assert same_bits(got, expected)


def test_selected_indices_of_a_query_that_only_exports_dlpack():
    problem = Problem(rows=SIZE)
    case, (source, tables) = problem.case, problem.source("quest")
    got, expected = np.full((2, len(LENS), 8, 3), -7, np.int32)
    for query, selected in ((OnlyDlpack(case.q), got), (case.q, expected)):
        blitz_attn.quest_block_select_paged_in_out(query, *source, tables, case.seq_lens, selected)
    assert same_bits(got, expected)


@pytest.mark.parametrize("per_query_head", [False, True])
def test_a_key_of_nan_makes_its_block_the_last_choice_of_max(per_query_head, isa_level):
    """The key may be at any position of the block."""
    for place in range(SIZE):
        problem = Problem(lens=[8 * SIZE])
        case = problem.case
        case.k_cache[case.block_tables[0, 3], place, :, DIM // 2] = np.nan
        options = {"method": "max", "sink": 0, "recent": 0, "ascending": False, "per_query_head": per_query_head}
        selected, _ = blitz_attn.select_blocks(case.q, case.k_cache, case.block_tables, case.seq_lens, 8, **options)
        assert (selected[..., -1] == 3).all(), place
        expected, _ = reference.select_blocks(case.q, case.k_cache, case.block_tables, case.seq_lens, 8, **options)
        np.testing.assert_array_equal(selected, expected)
