"""Paged attention: every dtype, cache, layout, table form and rule against the reference, over poisoned pages and outputs."""

import itertools

import numpy as np
import pytest

import blitz_attn
from blitz_attn import _core, reference, testing
from cases import DTYPES, ISA_LEVELS, bits_option, same_bits
from cases_paged import CACHE_DTYPES, attend_by_plan, attend_paged, check_paged

LENS = [1, 0, 37, 130]
RULES = {
    "plain": {},
    "scale": {"scale": -0.7},
    "window": {"window": 20},
    "window of 0": {"window": 0},
    "sinks": {"sinks": "drawn"},
    "softcap": {"softcap": 1.5},
    "all": {"window": 40, "sinks": "drawn", "softcap": 3.0, "scale": 0.4},
}


def rule_options(rule, heads):
    options = dict(RULES[rule])
    if "sinks" in options:
        options["sinks"] = np.linspace(-2, 3, heads).astype(np.float32)
    return options


def cache_dtypes(dtype):
    """The caches that queries of a dtype may read."""
    return ["float64"] if dtype == "float64" else CACHE_DTYPES


def assert_same(got, expected):
    assert all(same_bits(a, b) for a, b in zip(got, expected, strict=True))


# ---- Against the reference ----------------------------------------------------------------------------------------


# Rules, one query per request and ragged ones, with head ratios and dims with and without tails in turn.
COMBINATIONS = [
    pytest.param(rule, q_lens, *heads, *dims, id=f"{rule}-{'ragged' if q_lens else 'one'}-h{heads[0]}x{heads[1]}-d{dims[0]}x{dims[1]}-{n}")
    for n, ((rule, q_lens), heads, dims) in enumerate(
        zip(
            itertools.product(RULES, [None, [1, 0, 5, 3], [0, 0, 37, 1]]),
            itertools.cycle([(3, 3), (8, 2), (5, 1)]),
            itertools.cycle([(40, 24), (64, 64), (7, 33), (128, 128)]),
        )
    )
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize(("dtype", "kv_dtype"), [(d, c) for d in DTYPES for c in cache_dtypes(d)])
@pytest.mark.parametrize(("rule", "q_lens", "heads", "kv_heads", "dim", "v_dim"), COMBINATIONS)
def test_every_combination_is_right(rule, q_lens, heads, kv_heads, dim, v_dim, dtype, kv_dtype, kv_layout):
    case = testing.make_paged(4, heads, kv_heads, LENS, 16, dim, v_dim, dtype, kv_dtype, kv_layout, q_lens=q_lens)
    check_paged(case, **rule_options(rule, heads))


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("page_size", [1, 2, 3, 7, 16, 17, 31, 64, 100, 128, 200, 256])
def test_page_sizes(page_size, kv_dtype):
    lens = [page_size - 1, page_size, page_size + 1, 2 * page_size + page_size // 2, 300]
    for kv_layout in ("NHD", "HND"):
        check_paged(testing.make_paged(5, 4, 2, lens, page_size, 32, 48, "float32", kv_dtype, kv_layout))


HEAD_DIMS = [1, 2, 3, 8, 15, 16, 17, 31, 33, 64, 65, 80, 96, 112, 127, 128, 129, 192, 256, 320, 512, 575, 576]


@pytest.mark.parametrize("n", range(len(HEAD_DIMS)), ids=[f"d{dim}" for dim in HEAD_DIMS])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_head_dim_is_right(dtype, n):
    v_dim, kv_dtype = HEAD_DIMS[(n * 5 + 3) % len(HEAD_DIMS)], cache_dtypes(dtype)[n % len(cache_dtypes(dtype))]
    check_paged(testing.make_paged(2, 4, 2, [45, 70], 16, HEAD_DIMS[n], v_dim, dtype, kv_dtype, seed=n))


@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [("float32", "float32"), ("float32", "float16"), ("float32", "int8"), ("bfloat16", "int8"), ("bfloat16", "float8_e4m3")],
)
@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 17, 32, 40])
def test_group_sizes(group, dtype, kv_dtype):
    """Also beside a request of so many queries that other kernels attend them."""
    check_paged(testing.make_paged(2, 2 * group, 2, [50, 131], 16, 64, 64, dtype, kv_dtype))
    check_paged(testing.make_paged(2, 2 * group, 2, [50, 131], 16, 80, 48, dtype, kv_dtype, q_lens=[1, 20]))


@pytest.mark.parametrize("queries", [2, 3, 4, 5, 8, 9, 15, 16, 17, 33, 64, 100])
def test_numbers_of_queries(queries):
    """Around the sizes at which other kernels take over; requests with another number share the call."""
    lens = [queries, 140, queries + 1, 3]
    dtypes = (("float32", "float32"), ("bfloat16", "bfloat16"), ("float16", "int8"), ("float32", "float8_e4m3"), ("bfloat16", "float8_e4m3"))
    for dtype, kv_dtype in dtypes:
        check_paged(testing.make_paged(4, 4, 2, lens, 16, 32, 32, dtype, kv_dtype, q_lens=[queries, queries, 1, 0]))
    check_paged(testing.make_paged(4, 8, 2, lens, 16, 40, 32, "bfloat16", "int8", q_lens=[queries, queries, 1, 0]))  # by pairs from four heads on


@pytest.mark.parametrize(
    ("dtype", "kv_dtype"), [("float32", "float32"), ("bfloat16", "bfloat16"), ("float16", "int8"), ("float64", "float64")]
)
def test_long_contexts(dtype, kv_dtype):
    """Lengths around multiples of 1024 and 2048 keys, at which the work of a request is split."""
    lens = [1023, 1024, 1025, 2047, 2048, 2049, 4096, 6145, 10]
    for q_lens, rule in itertools.product((None, [1, 2, 3, 1, 2, 1, 3, 1, 1]), ("plain", "all")):
        case = testing.make_paged(len(lens), 4, 2, lens, 64, 32, 16, dtype, kv_dtype, q_lens=q_lens)
        check_paged(case, **rule_options(rule, 4))
    check_paged(case, window=2100)


@pytest.mark.parametrize("index_dtype", ["int32", "int64"])
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_table_forms(index_dtype, kv_layout):
    """int32 and int64, strided, and as (indptr, indices, last_page_len): all the same bits."""
    case = testing.make_paged(4, 4, 2, LENS, 16, 24, 24, kv_layout=kv_layout, index_dtype=index_dtype, q_lens=[1, 0, 5, 2])
    expected = check_paged(case)
    assert_same(attend_paged(case, tables=(case.csr(), None)), expected)
    indptr, indices, last = case.csr()
    narrow = indptr.astype(np.int32), indices, last.astype(np.int32)
    assert_same(attend_paged(case, tables=(narrow, None)), expected)
    spread = np.repeat(np.repeat(case.block_tables, 2, axis=0), 3, axis=1)[::2, ::3]
    assert_same(attend_paged(case, tables=(spread, case.seq_lens.astype(np.int32))), expected)
    assert_same(attend_paged(case, tables=(spread, [int(n) for n in case.seq_lens])), expected)


def test_shared_pages():
    """Two requests may name the same page."""
    case = testing.make_paged(3, 2, 1, [32, 40, 24], 16, 16)
    case.block_tables[1, 0] = case.block_tables[2, 1] = case.block_tables[0, 1]
    check_paged(case)


@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_to_attend(dtype, isa_level):
    case = testing.make_paged(3, 4, 2, [0, 0, 20], 16, 24, 8, dtype)
    out, lse = attend_paged(case)
    assert (testing.to_float64(out[:2], dtype) == 0).all()
    assert (lse[:2] == -np.inf).all()
    sinks = np.array([0.5, -1.0, 2.0, 0.0], np.float32)
    out, lse = attend_paged(case, sinks=sinks)
    assert (testing.to_float64(out[:2], dtype) == 0).all()
    np.testing.assert_allclose(lse[:2], np.broadcast_to(sinks, (2, 4)), rtol=1e-6)  # a sink counts
    empty = testing.make_paged(0, 4, 2, [], 16, 24, 8, dtype)
    assert attend_paged(empty)[0].shape == (0, 4, 8)
    none = testing.make_paged(3, 4, 2, [5, 0, 7], 16, 24, 8, dtype, q_lens=[0, 0, 0])
    assert attend_paged(none)[0].shape == (0, 4, 8)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_strided_arrays(dtype, isa_level):
    case = testing.make_paged(3, 4, 2, [20, 33, 64], 16, 24, dtype=dtype)

    def spread(x):
        """The same values, every second entry of a larger array with rows apart."""
        wide = np.zeros((*(2 * n for n in x.shape[:-1]), x.shape[-1] + 5), x.dtype)
        view = wide[(*(slice(None, None, 2) for _ in x.shape[:-1]), slice(2, 2 + x.shape[-1]))]
        view[...] = x
        return view

    views = case._replace(q=spread(case.q), k_cache=spread(case.k_cache), v_cache=spread(case.v_cache))
    assert not any(x.flags.c_contiguous for x in views[:3])
    assert_same(attend_paged(views), attend_paged(case))


@pytest.mark.parametrize("dtype", DTYPES)
def test_results_without_out(dtype):
    """New arrays: dtype and kind of q; the log-sum-exp only where it was asked for."""
    case = testing.make_paged(3, 4, 2, [20, 33, 64], 16, 24, 8, dtype)
    out, lse = attend_paged(case)
    alone = blitz_attn.paged_attention(*case.arrays, **case.options)
    assert same_bits(alone, out)
    assert_same(blitz_attn.paged_attention(*case.arrays, return_lse=True, **case.options), (out, lse))
    given = np.empty_like(out)
    assert blitz_attn.paged_attention(*case.arrays, out=given, **case.options) is given
    assert same_bits(given, out)


@pytest.mark.parametrize("kv_dtype", CACHE_DTYPES)
def test_inputs_are_not_written(kv_dtype):
    case = testing.make_paged(3, 4, 2, [20, 33, 64], 16, 24, kv_dtype=kv_dtype)
    arrays = [*case.arrays, *(x for x in case.options.values() if isinstance(x, np.ndarray))]
    before = [x.copy() for x in arrays]
    for x in arrays:
        x.flags.writeable = False
    attend_paged(case)
    assert_same(arrays, before)


def test_ml_dtypes_caches():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    case = testing.make_paged(2, 4, 2, [20, 33], 16, 24, kv_dtype="float8_e4m3")
    expected = attend_paged(case)
    typed = case._replace(k_cache=case.k_cache.view(ml_dtypes.float8_e4m3fn), v_cache=case.v_cache.view(ml_dtypes.float8_e4m3fn))
    assert_same(attend_paged(typed, kv_dtype=None), expected)


def test_torch_caches_of_eight_bits():
    """torch's own dtype says what the bits of a cache are, in whole calls and in chunks."""
    torch = pytest.importorskip("torch")
    case = testing.make_paged(2, 4, 2, [20, 33], 16, 24, kv_dtype="float8_e4m3")
    caches = [torch.from_numpy(x).view(torch.float8_e4m3fn) for x in (case.k_cache, case.v_cache)]
    typed = case._replace(q=torch.from_numpy(case.q), k_cache=caches[0], v_cache=caches[1])
    options = {name: x for name, x in case.options.items() if name != "kv_dtype"}
    for split in ({}, {"kv_split": 16}):
        expected = blitz_attn.paged_attention(*case.arrays, **case.options, **split)
        assert same_bits(blitz_attn.paged_attention(*typed.arrays, **options, **split).numpy(), expected)


# ---- The same bits ------------------------------------------------------------------------------------------------


@pytest.mark.sampled
@pytest.mark.parametrize("form", ["one query", "ragged", "selected"])
@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [("float32", "float32"), ("float32", "bfloat16"), ("float32", "int8"), ("bfloat16", "int8"), ("bfloat16", "float8_e4m3")],
)
def test_same_bits(dtype, kv_dtype, form, isa_level):
    """Whatever the number of threads, the other requests of the batch, and the pages that hold the tokens."""
    lens = [5000, 31, 2100, 700, 64]
    q_lens = [1, 31, 2, 100, 3] if form == "ragged" else None

    def make(table_seed=0):
        return testing.make_paged(5, 8, 2, lens, 32, 64, 64, dtype, kv_dtype, q_lens=q_lens, table_seed=table_seed)

    case, selected = make(), None
    if form == "selected":
        selected = np.full((5, 2, 70), -1)
        for b, n in enumerate(lens):
            pages = np.arange(-(-n // 32))[-69:]
            selected[b, 0, : pages.size], selected[b, 1, : pages[::2].size] = pages, pages[::2]
    expected = attend_paged(case, selected, num_threads=1)
    for threads in (2, 3, 8):
        assert_same(attend_paged(case, selected, num_threads=threads), expected)
    assert_same(attend_paged(make(table_seed=1), selected), expected)
    cuts = np.cumsum([0, *(q_lens or [1] * 5)])
    for some in ([0], [1], [3], [4, 2], [1, 3, 4]):
        rows = np.concatenate([np.arange(cuts[b], cuts[b + 1]) for b in some])
        part = case._replace(q=case.q[rows], block_tables=case.block_tables[some], seq_lens=case.seq_lens[some])
        if q_lens:
            part = part._replace(options={**case.options, "q_lens": case.options["q_lens"][some]})
        lists = None if selected is None else selected[some, :, : max((selected[b] >= 0).sum(-1).max() for b in some)]  # no wider than they must be
        assert_same(attend_paged(part, lists), [x[rows] for x in expected])


@pytest.mark.parametrize(("dtype", "kv_dtype"), [("float32", "float32"), ("bfloat16", "bfloat16"), ("float32", "int8"), ("bfloat16", "int8")])
def test_layouts_and_page_sizes_give_the_same_bits(dtype, kv_dtype, isa_level):
    """No value depends on how tokens are cut into pages."""
    lens = [2500, 31, 700]
    heads = 8 if (dtype, kv_dtype) == ("bfloat16", "int8") else 4  # such queries multiply pairs from four heads per KV head on
    expected = attend_paged(testing.make_paged(3, heads, 2, lens, 16, 40, 40, dtype, kv_dtype))
    for page_size, kv_layout in ((16, "HND"), (1, "NHD"), (23, "HND"), (256, "NHD")):
        assert_same(attend_paged(testing.make_paged(3, heads, 2, lens, page_size, 40, 40, dtype, kv_dtype, kv_layout)), expected)


def test_one_page_for_all_is_the_contiguous_operation(isa_level):
    """The same attention by another door, up to rounding."""
    q, k, v = testing.make_qkv(2, 4, 2, 7, 90, 32)
    expected = blitz_attn.block_sparse_attention(q, k, v, causal=True, kv_lens=[90, 60], return_lse=True)
    ragged = q.swapaxes(1, 2).reshape(14, 4, 32)
    tables = np.array([[0], [1]], np.int32)
    out, lse = blitz_attn.paged_attention(ragged, k, v, tables, [90, 60], kv_layout="HND", q_lens=[7, 7], return_lse=True)
    np.testing.assert_allclose(out.reshape(2, 7, 4, 32).swapaxes(1, 2), expected[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(lse.reshape(2, 7, 4).swapaxes(1, 2), expected[1], rtol=1e-5, atol=1e-6)


# ---- Plans --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("q_lens", [None, [1, 0, 5, 3]])
@pytest.mark.parametrize("kv_dtype", ["float32", "int8"])
def test_plan_equals_direct_calls(kv_dtype, q_lens):
    layers = [testing.make_paged(4, 4, 2, LENS, 16, 24, 8, "float32", kv_dtype, seed=n, q_lens=q_lens) for n in range(3)]
    first = layers[0]
    for tables in ((first.block_tables, first.seq_lens), (first.csr(), None)):
        plan = blitz_attn.PagedPlan(*tables, page_size=16, q_lens=first.options.get("q_lens"), window=30, scale=0.2)
        assert plan.batch == 4
        assert plan.num_queries == len(first.q)
        for case in layers:
            per_layer = {name: case.options[name] for name in ("k_scale", "v_scale") if name in case.options}
            per_layer["sinks"] = np.float32([1, 2, 3, 4])
            rules = {"sinks": per_layer["sinks"], "window": 30, "scale": 0.2}
            assert_same(plan.attention(*case.arrays[:3], return_lse=True, **per_layer), attend_paged(case, **rules))
            blocks = -(-case.seq_lens[:, None, None] // 16)
            selected = np.where(np.arange(2) < blocks, np.arange(2), -1).repeat(2, axis=1)
            got = plan.select_attention(*case.arrays[:3], selected, return_lse=True, **per_layer)
            assert_same(got, attend_paged(case, selected, **rules))


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("q_lens", [None, [4, 7, 0, 33]], ids=["one", "ragged"])
@pytest.mark.parametrize(("dtype", "kv_dtype"), [(d, d) for d in DTYPES] + [("float32", "int8"), ("bfloat16", "float8_e4m3")])
def test_plan_of_stretches(dtype, kv_dtype, q_lens, kv_layout):
    """q_begin: queries before, inside and behind the tokens of the cache, more of them than tokens."""
    case = testing.make_paged(4, 4, 2, LENS, 16, 24, 8, dtype, kv_dtype, kv_layout, q_lens=q_lens)
    selected, counts = np.array([[[0]] * 2, [[9]] * 2, [[2], [0]], [[8], [3]]]), np.array([[1, 0], [0, 0], [1, 1], [1, 1]])
    for rules in ({}, {"window": 30, "softcap": 1.5, "scale": 0.3, "sinks": np.linspace(-2, 3, 4).astype(np.float32)}):
        begins = [0, 5, -3, 120]
        expected = attend_paged(case, q_begin=begins, **rules)
        assert_same(attend_by_plan(case, q_begin=begins, **rules), expected)
        assert_same(attend_by_plan(case, tables=(case.csr(), None), q_begin=np.array(begins, np.int32), **rules), expected)
        options = {"q_begin": begins, "counts": counts, **rules}
        assert_same(attend_by_plan(case, selected, **options), attend_paged(case, selected, **options))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_plan_gives_unrounded_results(dtype):
    case = testing.make_paged(3, 4, 2, [20, 33, 64], 16, 24, dtype=dtype)
    bits = bits_option(case.q)
    plan = blitz_attn.PagedPlan(case.block_tables, case.seq_lens, page_size=16, out_dtype="float32", **bits)
    expected = blitz_attn.paged_attention(*case.arrays, out_dtype="float32", **bits)
    assert expected.dtype == np.float32
    assert same_bits(plan.attention(*case.arrays[:3]), expected)


def test_plan_keeps_its_own_tables():
    """What becomes of the arrays that it was made from does not matter."""
    case = testing.make_paged(3, 4, 2, [20, 33, 64], 16, 24)
    expected = attend_paged(case)[0]
    plan = blitz_attn.PagedPlan(case.block_tables, case.seq_lens, page_size=16, num_pages=len(case.k_cache))
    case.block_tables[...], case.seq_lens[...] = 0, 1
    assert same_bits(plan.attention(*case.arrays[:3]), expected)


def test_what_a_plan_shows():
    case = testing.make_paged(3, 4, 2, [20, 33, 64], 16, 24)
    assert repr(blitz_attn.PagedPlan(case.block_tables, case.seq_lens, page_size=16)) == "PagedPlan(batch=3, num_queries=3, page_size=16)"
    plan = blitz_attn.PagedPlan(case.block_tables, case.seq_lens, page_size=np.int32(16), q_lens=[1, 30, 3], kv_split=32)
    assert repr(plan) == "PagedPlan(batch=3, num_queries=34, page_size=16)"


def test_plan_keeps_its_own_places_of_queries():
    case = testing.make_paged(3, 4, 2, [20, 33, 64], 16, 24, q_lens=[1, 40, 3])
    q_begin, q_lens = np.array([30, -1, 61]), case.options["q_lens"]
    expected = attend_paged(case, q_begin=q_begin)[0]
    plan = blitz_attn.PagedPlan(case.block_tables, case.seq_lens, page_size=16, q_lens=q_lens, q_begin=q_begin)
    q_begin[...], q_lens[...] = 0, 0
    assert same_bits(plan.attention(*case.arrays[:3]), expected)


def test_plan_has_pages_of_one_size():
    case = testing.make_paged(3, 4, 2, [20, 33, 64], 16, 24)
    plan = blitz_attn.PagedPlan(case.block_tables, case.seq_lens, page_size=8 * 16)
    with pytest.raises(ValueError, match=r"^k_cache: expected pages of 128 tokens as the plan has them, got \("):
        plan.attention(*case.arrays[:3])


def test_plan_names_pages_that_a_cache_lacks():
    """The plan does not know its caches: each call compares the page numbers with its own."""
    case = testing.make_paged(3, 4, 2, [20, 33, 64], 16, 24)
    wrong = case.block_tables.copy()
    for page in (-1, len(case.k_cache)):
        wrong[1, 2] = page
        plan = blitz_attn.PagedPlan(wrong, case.seq_lens, page_size=16)
        with pytest.raises(ValueError, match=rf"^block_tables: expected pages from 0 to .*, got {page} for page 2 of request 1"):
            plan.attention(*case.arrays[:3])
        with pytest.raises(ValueError, match=rf"^block_tables: expected pages from 0 to .*, got {page} for page 2 of request 1"):
            blitz_attn.PagedPlan(wrong, case.seq_lens, page_size=16, num_pages=len(case.k_cache))


def test_tables_are_used_as_they_were_checked():
    """Whoever makes the output changes the tables after they were checked: the call has its own copy of them."""
    case = testing.make_paged(3, 4, 2, [20, 33, 64], 16, 24)
    expected = attend_paged(case)[0]
    tables = case.block_tables.copy()

    def empty(shape, dtype):
        tables[...] = 1 << 30
        return np.empty(shape, dtype)

    got = _core.paged_attention(empty, *case.arrays[:3], tables, case.seq_lens, kv_layout="NHD", return_lse=False)
    assert (tables == 1 << 30).all()
    assert same_bits(got, expected)


# ---- Quantised caches ---------------------------------------------------------------------------------------------

# Half a step of an int8 row is 1 / 254 of its largest magnitude; half a step of float8 e4m3 is 1 / 16 of the value itself.
STEP = {"int8": 1 / 254, "float8_e4m3": 1 / 16}


@pytest.mark.parametrize("softcap", [5.0, 50.0, 1e3, 1e6, 1e30])
def test_a_cap_far_above_the_scores_costs_no_accuracy(softcap, isa_level):
    """Capped scores have the relative error of plain ones, not an error relative to the cap."""
    rng = np.random.default_rng(0)
    q, k_cache, v_cache = 0.1 * rng.standard_normal((8, 1, 128)), *rng.standard_normal((2, 64, 16, 1, 128))
    call = [x.astype(np.float32) for x in (q, k_cache, v_cache)] + [np.arange(64)[None], [1024]]
    options = {"q_begin": [1024], "q_lens": [8], "return_lse": True}
    exact, exact_lse = reference.paged_attention(*call, softcap=softcap, **options)
    capped, lse = blitz_attn.paged_attention(*call, softcap=softcap, **options)
    plain = blitz_attn.paged_attention(*call, **options)[0] - reference.paged_attention(*call, **options)[0]
    assert np.abs(capped - exact).max() < 2 * np.abs(plain).max()
    assert np.abs(lse - exact_lse).max() < 2e-6


@pytest.mark.parametrize("kv_dtype", testing.QUANTIZED)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
def test_quantize(dtype, kv_dtype, isa_level):
    x = testing.make_qkv(2, 3, 3, 5, 7, 33, dtype=dtype, seed=1)[1]
    x[0, 0, 0] = 0
    values, scale = blitz_attn.quantize_kv(x, kv_dtype, **bits_option(x))
    assert_same((values, scale), reference.quantize_kv(x, kv_dtype, **bits_option(x)))
    assert scale.dtype == np.float32
    assert scale.shape == x.shape[:-1]
    exact = testing.to_float64(x, dtype)
    restored = reference.dequantize_kv(values, scale)
    np.testing.assert_allclose(testing.to_float64(blitz_attn.dequantize_kv(values, scale)), restored, rtol=1e-6, atol=0)
    largest = np.abs(exact).max(axis=-1, keepdims=True)
    limit = STEP[kv_dtype] * largest if kv_dtype == "int8" else STEP[kv_dtype] * np.abs(exact) + largest * 2.0**-10 / 448
    assert (np.abs(restored - exact) <= limit * (1 + 1e-6)).all()
    assert (restored[0, 0, 0] == 0).all()
    np.testing.assert_allclose(np.abs(restored).max(axis=-1), largest[..., 0], rtol=1e-6)  # the largest comes back as it was


@pytest.mark.parametrize("kv_dtype", testing.QUANTIZED)
def test_quantize_bits(kv_dtype):
    """bfloat16 bits as uint16, in strides too, are quantised as the float32 numbers that they stand for; dtype= says nothing new elsewhere."""
    wide = testing.round_to(np.random.default_rng(0).standard_normal((6, 5, 40), np.float32), "float32")
    bits = (wide.view(np.uint32) >> 16).astype(np.uint16)
    exact = (bits.astype(np.uint32) << 16).view(np.float32)
    expected = blitz_attn.quantize_kv(exact, kv_dtype, dtype="float32")
    assert_same(blitz_attn.quantize_kv(bits, kv_dtype, dtype="bfloat16"), expected)
    assert_same(blitz_attn.quantize_kv(np.repeat(bits, 2, axis=-1)[..., ::2], kv_dtype=kv_dtype, dtype="bfloat16"), expected)
    assert_same(blitz_attn.quantize_kv(exact, kv_dtype), expected)


@pytest.mark.parametrize("kv_dtype", testing.QUANTIZED)
def test_quantize_any_shape_on_any_threads(kv_dtype, isa_level):
    """Many rows and few, long and empty ones, views, memory that is not aligned; the same bits on any number of threads."""
    rng = np.random.default_rng(3)
    wide = rng.standard_normal((700, 3, 256), dtype=np.float32) * rng.choice([1e-40, 1e-3, 1, 1e30], (700, 3, 1)).astype(np.float32)
    misaligned = np.zeros(wide[:50].nbytes + 1, np.uint8)[1:].view(np.float32).reshape(50, 3, 256)
    misaligned[...] = wide[:50]
    assert not misaligned.flags.aligned
    shapes = (wide, wide[:, 1], wide[::-1, :, ::-3], wide[:, :, 0], wide[:0], wide[:, :, :0], wide[0, 0], wide[:2].reshape(2, -1), misaligned)
    try:
        for x in shapes:
            expected = reference.quantize_kv(x, kv_dtype)
            for threads in (1, 2, 5):
                blitz_attn.set_num_threads(threads)
                assert_same(blitz_attn.quantize_kv(x, kv_dtype), expected)
    finally:
        blitz_attn.set_num_threads(None)


def test_e4m3_values():
    """All 256 bit patterns against the format's definition by ml_dtypes."""
    ml_dtypes = pytest.importorskip("ml_dtypes")
    bits = np.arange(256, dtype=np.uint8)
    np.testing.assert_array_equal(
        reference.dequantize_kv(bits[:, None], np.ones(256))[:, 0], bits.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    )
    finite = bits[np.isfinite(bits.view(ml_dtypes.float8_e4m3fn).astype(np.float64))]
    case = testing.make_paged(1, 1, 1, [1], 1, finite.size, kv_dtype="float8_e4m3")
    case.v_cache[case.block_tables[0, 0], 0, 0] = finite
    case.options["v_scale"][...] = 3.0
    np.testing.assert_allclose(attend_paged(case)[0][0, 0], 3.0 * finite.view(ml_dtypes.float8_e4m3fn).astype(np.float64), rtol=1e-6)


@pytest.mark.parametrize("kv_dtype", testing.QUANTIZED)
def test_error_of_quantised_caches(kv_dtype):
    """What quantisation itself costs: the errors that the documentation states, for normal K and V."""
    exact = reference.paged_attention(*testing.make_paged(2, 8, 2, [1000, 3000], 32, 128).arrays)
    case = testing.make_paged(2, 8, 2, [1000, 3000], 32, 128, kv_dtype=kv_dtype)
    error = testing.error_of(attend_paged(case)[0], exact)
    assert error.relative < {"int8": 0.01, "float8_e4m3": 0.05}[kv_dtype]


@pytest.mark.sampled
@pytest.mark.parametrize("kv_dtype", testing.QUANTIZED)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("q_lens", [[1, 1], [3, 2], [40, 17]])  # few queries, also with bounds of their own, and panels
def test_scales_of_hidden_tokens_do_not_matter(dtype, kv_dtype, q_lens, isa_level):
    """What a window has left behind may hold anything, and the newest token is not seen by the queries before it."""
    window, lens = 20, [90, 77]
    case = testing.make_paged(2, 8, 2, lens, 16, 64, 48, dtype, kv_dtype, q_lens=q_lens)
    clean = attend_paged(case, window=window)
    newest = np.cumsum(q_lens) - 1
    left_behind = [(b, t) for b in range(2) for t in range(lens[b] - q_lens[b] - window)]
    for tokens, seeing in ((left_behind, []), ([(b, lens[b] - 1) for b in range(2)], newest)):
        at = tuple(np.array([(case.block_tables[b, t // 16], t % 16) for b, t in tokens]).T)
        for name, bad in itertools.product(("k_scale", "v_scale"), (np.nan, np.inf, -1.0, 0.0)):
            scale = case.options[name].copy()
            scale[at] = bad
            got = attend_paged(case, window=window, **{name: scale})
            assert_same([np.delete(x, seeing, 0) for x in got], [np.delete(x, seeing, 0) for x in clean])


@pytest.mark.sampled
@pytest.mark.parametrize("kv_dtype", testing.QUANTIZED)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("q_lens", [[1, 1], [3, 2], [40, 17]])
def test_scales_of_seen_tokens_show(dtype, kv_dtype, q_lens, isa_level):
    """The newest token has a bad scale, also a NaN whose bits become those of 0 where they are rounded."""
    case = testing.make_paged(2, 8, 2, [90, 77], 16, 64, 48, dtype, kv_dtype, q_lens=q_lens)
    at = tuple(np.array([(case.block_tables[b, t // 16], t % 16) for b, t in enumerate([89, 76])]).T)
    for name, bits in (("k_scale", 0xFFFFFFFF), ("k_scale", 0), *(("v_scale", x) for x in (0xFFFFFFFF, 0x7FFF8000, 0x7FC00000, 0x7F800000, 0))):
        scale = case.options[name].copy()
        scale.view(np.uint32)[at] = bits
        with np.errstate(all="ignore"):
            exact = reference.paged_attention(*case.arrays, **{**case.options, name: scale}, return_lse=True)
        for x, y in zip(attend_paged(case, **{name: scale}), exact, strict=True):
            np.testing.assert_array_equal(np.isfinite(testing.to_float64(x, dtype) if x.dtype == np.uint16 else x), np.isfinite(y), f"{name} {bits:x}")


@pytest.mark.parametrize("kv_dtype", ["int8", "float8_e4m3"])
@pytest.mark.parametrize("real", ["float64", "float16"])
def test_scales_of_other_floats_are_converted(kv_dtype, real):
    case = testing.make_paged(2, 4, 2, [40, 17], 16, 32, 32, "float32", kv_dtype)
    for shape in (case.k_cache.shape[:3], (2,), ()):
        given = {name: np.random.default_rng(n).uniform(0.3, 0.9, shape).astype(real) for n, name in enumerate(("k_scale", "v_scale"))}
        rounded = {name: np.asarray(x, np.float32) for name, x in given.items()}
        assert_same(attend_paged(case, **given), attend_paged(case, **rounded))


@pytest.mark.parametrize("one", [1, 1.0, np.float32(1), np.array(1.0)], ids=repr)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_scale_of_one_is_none(dtype, one):
    """Layers of vLLM always have a scale. Caches of 16 bits and more have none."""
    case = testing.make_paged(2, 4, 2, [40, 17], 16, 32, 32, dtype, dtype)
    assert_same(attend_paged(case, k_scale=one, v_scale=one), attend_paged(case))
    named = bits_option(case.k_cache)
    plan = blitz_attn.PagedPlan(case.block_tables, case.seq_lens, page_size=16, **named)
    assert_same([plan.attention(*case.arrays[:3], k_scale=one, v_scale=one)], [plan.attention(*case.arrays[:3])])
    tokens = [case.k_cache[0, :2].copy(), case.v_cache[0, :2].copy()]
    caches = [[x.copy() for x in case.arrays[1:3]] for _ in range(2)]
    for own, given in zip(caches, ({}, {"k_scale": one, "v_scale": one}), strict=True):
        blitz_attn.append_paged_kv(*tokens, *own, block_tables=case.block_tables, seq_lens=case.seq_lens, **given, **named)
    assert_same(*caches)
    summaries = [[np.zeros((2, 16, 2, 32), case.k_cache.dtype) for _ in range(2)] for _ in range(2)]
    for own, given in zip(summaries, ({}, {"k_scale": one}), strict=True):
        blitz_attn.quest_prefill_metadata(case.k_cache, case.block_tables, case.seq_lens, np.array([[0], [1]], np.int32), *own, **given, **named)
    assert_same(*summaries)


def test_a_scale_of_one_in_tensors():
    torch = pytest.importorskip("torch")
    from blitz_attn.integrations.torch import paged_attention

    case = testing.make_paged(2, 4, 2, [40, 17], 16, 32)
    given = [torch.from_numpy(np.array(x)) for x in (*case.arrays[:3], case.block_tables, case.seq_lens)]
    expected = paged_attention(*given)
    for one in (1.0, torch.tensor(1.0)):
        for call in (paged_attention, blitz_attn.paged_attention):
            assert torch.equal(call(*given, k_scale=one, v_scale=one), expected)
    with pytest.raises(ValueError, match="^k_scale: expected none with float32 k_cache"):
        paged_attention(*given, k_scale=torch.tensor(2.0))


# ---- Bad pages ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv_dtype", ["float32", "float16", "bfloat16", "float8_e4m3"])
def test_a_nan_reaches_only_its_request(kv_dtype, isa_level):
    """The poison would show if it were read: a NaN in a page in use does, in the rows that see it alone."""
    clean_case = testing.make_paged(3, 4, 2, [40, 50, 30], 16, 24, kv_dtype=kv_dtype)
    clean = attend_paged(clean_case)
    case = testing.make_paged(3, 4, 2, [40, 50, 30], 16, 24, kv_dtype=kv_dtype)
    page = case.block_tables[1, 2]
    case.v_cache[page, 3, 1] = 0x7F if kv_dtype == "float8_e4m3" else testing.round_to(np.nan, kv_dtype)
    out, lse = attend_paged(case)
    assert np.isnan(out[1, 2:]).all()
    out[1, 2:] = clean[0][1, 2:]
    assert_same((out, lse), clean)


@pytest.mark.parametrize("level", [level for level in ISA_LEVELS if level != "portable"])
def test_every_level_agrees_with_portable(level):
    case = testing.make_paged(3, 4, 2, [40, 2500, 30], 16, 64)
    with blitz_attn.isa(level):
        out, lse = attend_paged(case)
    with blitz_attn.isa("portable"):
        expected = attend_paged(case)
    np.testing.assert_allclose(out, expected[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(lse, expected[1], rtol=1e-6)
