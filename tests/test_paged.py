"""Paged attention equals the reference for all caches, layouts, rules and sizes, with NaN in unused pages and in outputs beforehand.

Plans and quantised caches are tested, too. Tables of any form, views, numbers of threads, positions of queries, plans and KV splits are drawn
together in tests/fuzz/paged_problems.py.
"""

import itertools

import numpy as np
import pytest

import blitz_attn
from blitz_attn import _core, reference, testing
from cases import DTYPES, assert_same, bits_option, same_bits
from cases_paged import DRAFT_LENS, DRAFTS, PAIRS, attend_paged, check_paged, plan_paged

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
    return RULES[rule] | ({"sinks": np.linspace(-2, 3, heads).astype(np.float32)} if "sinks" in RULES[rule] else {})


# ---- Against the reference ----------------------------------------------------------------------------------------


# Each rule comes with one query per request and with ragged numbers of queries. Head ratios, and dims with and without tails, take turns.
COMBINATIONS = list(
    zip(
        itertools.product(RULES, [None, [1, 0, 5, 3], [0, 0, 37, 1]]),
        itertools.cycle([(3, 3), (8, 2), (5, 1)]),
        itertools.cycle([(40, 24), (64, 64), (7, 33), (128, 128)]),
    )
)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize(("dtype", "kv_dtype"), PAIRS)
@pytest.mark.parametrize(("rule", "heads", "dims"), COMBINATIONS, ids=str)
def test_every_combination_is_right(rule, heads, dims, dtype, kv_dtype, kv_layout):
    case = testing.make_paged(4, *heads, [1, 0, 37, 130], 16, *dims, dtype, kv_dtype, kv_layout, q_lens=rule[1])
    check_paged(case, **rule_options(rule[0], heads[0]))


LONG_LENS = [1023, 1024, 1025, 2047, 2048, 2049, 4096, 6145, 10]  # around the numbers of keys at which a request is split into parts
# (heads, KV heads, lengths, queries), with groups, queries and lengths around the sizes at which other kernels take over
SIZES = [
    *((2 * group, 2, [50, 131], q_lens) for group in (1, 2, 3, 5, 6, 7, 8, 9, 12, 16, 17, 32, 40) for q_lens in (None, [1, 20])),
    *((heads, 2, [n, 140, n + 1, 3], [n, n, 1, 0]) for heads in (4, 8) for n in (2, 3, 4, 5, 8, 9, 15, 16, 17, 33, 64, 100)),
    *((8, 2, LONG_LENS, q_lens) for q_lens in (None, [1, 2, 3, 1, 2, 1, 3, 1, 1])),
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("rule", ["plain", "all"])
@pytest.mark.parametrize(("dtype", "kv_dtype"), PAIRS)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_every_size_is_right(size, dtype, kv_dtype, rule):
    heads, kv_heads, lens, q_lens = size
    case = testing.make_paged(len(lens), heads, kv_heads, lens, 16, 40, 32, dtype, kv_dtype, q_lens=q_lens)
    check_paged(case, **rule_options(rule, heads))


@pytest.mark.parametrize("dtype", DTYPES)
def test_results_without_out(dtype):
    """Results are new arrays of q's dtype and kind. The log-sum-exp is returned only on request."""
    case = testing.make_paged(3, 4, 2, [20, 33, 64], 16, 24, 8, dtype)
    out, lse = attend_paged(case)
    assert same_bits(blitz_attn.paged_attention(*case.arrays, **case.options), out)
    assert_same(blitz_attn.paged_attention(*case.arrays, return_lse=True, **case.options), (out, lse))


@pytest.mark.parametrize("kv_split", [None, 16])
@pytest.mark.parametrize("library", ["ml_dtypes", "torch"])
def test_dtypes_of_libraries_name_bits(library, kv_split):
    """The dtypes of a library may name the bits of caches and of outputs."""
    module = pytest.importorskip(library)
    case = testing.make_paged(2, 4, 2, [20, 33], 16, 24, kv_dtype="float8_e4m3")
    expected = blitz_attn.paged_attention(*case.arrays, kv_split=kv_split, **case.options)
    caches = [case.k_cache, case.v_cache]
    if library == "torch":
        caches = [module.from_numpy(x) for x in caches]
    caches = [x.view(module.float8_e4m3fn) for x in caches]
    options = {name: x for name, x in case.options.items() if name != "kv_dtype"}
    assert same_bits(blitz_attn.paged_attention(case.q, *caches, *case.arrays[3:], kv_split=kv_split, **options), expected)
    case = testing.make_paged(2, 4, 2, [30, 40], 16, 32, 32, "bfloat16", "bfloat16")
    out = np.zeros((2, 4, 32), np.uint16)
    blitz_attn.paged_attention(*case.arrays, kv_split=kv_split, dtype=module.bfloat16, out=out)
    expected = blitz_attn.paged_attention(*case.arrays, kv_split=kv_split, dtype="bfloat16")
    assert np.array_equal(out, np.asarray(expected).view(np.uint16))


def test_torch_tensors():
    torch = pytest.importorskip("torch")
    case = testing.make_paged(3, 4, 2, [100, 33, 7], 16, 32, 32)
    q, k_cache, v_cache = (torch.from_numpy(x).bfloat16() for x in case.arrays[:3])
    arrays = q, k_cache, v_cache, case.block_tables, case.seq_lens
    out, lse = blitz_attn.paged_attention(*arrays, kv_split=32, return_lse=True)
    plan = blitz_attn.PagedPlan(case.block_tables, torch.from_numpy(case.seq_lens), page_size=16, kv_split=32)
    assert torch.equal(plan.attention(q, k_cache, v_cache), out)
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    wide = blitz_attn.paged_attention(*arrays, kv_split=32, out_dtype=torch.float32)
    assert wide.dtype == torch.float32
    assert torch.equal(wide.bfloat16(), out)


# ---- Upstream's shapes --------------------------------------------------------------------------------------------

# (batch, query heads, KV heads, tokens); head dim and page size are 128. Upstream's long shapes run with the marker `full`.
SHAPES = [
    (1, 32, 8, 128),
    (4, 32, 8, 512),
    (2, 8, 8, 256),
    (8, 32, 8, 1024),
    (1, 32, 8, 2048),
    (4, 64, 8, 1024),
    (4, 32, 8, [1, 129, 1000, 0]),
]
LONG = [(1, 32, 8, 4096), (1, 32, 8, 8192), (1, 32, 8, 16384), (1, 16, 8, 4096), (1, 40, 8, 2048), (1, 64, 8, 2048), (1, 32, 32, 2048)]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("shape", [*SHAPES, *(pytest.param(shape, marks=pytest.mark.full) for shape in LONG)], ids=str)
def test_upstream_accuracy(shape, dtype):
    """The tolerance is that of upstream, which compares float16 with another half-precision operator. The reference here is in float64."""
    case = testing.make_paged(*shape, 128, 128, dtype=dtype)
    some = sorted({0, shape[0] - 1})  # only the first and last request, because the reference is slow
    options = {name: value for name, value in case.options.items() if name != "q_lens"}
    exact = reference.paged_attention(case.q[some], *case.arrays[1:3], case.block_tables[some], case.seq_lens[some], **options)
    np.testing.assert_allclose(testing.to_float64(attend_paged(case)[0], dtype)[some], exact, rtol=5e-3, atol=2e-2)


# ---- The same bits ------------------------------------------------------------------------------------------------


FORMS = {
    "one query": ([5000, 31, 2100, 700, 64], None),
    "ragged": ([5000, 31, 2100, 700, 64], [1, 31, 2, 100, 3]),
    "drafts": (DRAFT_LENS, DRAFTS),
}  # fmt: skip


@pytest.mark.sampled
@pytest.mark.parametrize("form", [*FORMS, "selected"])
@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [
        ("float32", "float32"), ("float32", "bfloat16"), ("float32", "int8"), ("float16", "int8"), ("bfloat16", "bfloat16"), ("bfloat16", "int8"),
        ("bfloat16", "float8_e4m3"),
    ],
)  # fmt: skip
def test_same_bits(dtype, kv_dtype, form, isa_level):
    """The bits are the same for any number of threads, any other requests in the batch, and any pages that hold the tokens."""
    lens, q_lens = FORMS.get(form, FORMS["one query"])
    count = len(lens)
    case, moved = (testing.make_paged(count, 8, 2, lens, 32, 64, 64, dtype, kv_dtype, q_lens=q_lens, table_seed=n) for n in range(2))
    selected = None
    if form == "selected":
        selected = np.full((5, 2, 70), -1)
        for b, n in enumerate(lens):
            pages = np.arange(-(-n // 32))[-69:]
            selected[b, 0, : pages.size], selected[b, 1, : pages[::2].size] = pages, pages[::2]
    expected = attend_paged(case, selected, num_threads=1)
    for threads in (2, 3, 8):
        assert_same(attend_paged(case, selected, num_threads=threads), expected)
    assert_same(attend_paged(moved, selected), expected)
    cuts = np.cumsum([0, *(q_lens or [1] * count)])
    for some in (*([b] for b in range(count)), [4, 2], [1, 3, 4]):
        rows = np.concatenate([np.arange(cuts[b], cuts[b + 1]) for b in some])
        part = case._replace(q=case.q[rows], block_tables=case.block_tables[some], seq_lens=case.seq_lens[some])
        if q_lens:
            part = part._replace(options={**case.options, "q_lens": case.options["q_lens"][some]})
        lists = selected
        if selected is not None:  # lists no wider than needed
            lists = selected[some, :, : max((selected[b] >= 0).sum(-1).max() for b in some)]
        assert_same(attend_paged(part, lists), [x[rows] for x in expected])


@pytest.mark.parametrize(("page_size", "kv_layout"), [(16, "HND"), (1, "NHD"), (23, "HND"), (256, "NHD")])
@pytest.mark.parametrize(
    ("dtype", "kv_dtype"), [("float32", "float32"), ("bfloat16", "bfloat16"), ("float32", "int8"), ("bfloat16", "int8")]
)
@pytest.mark.parametrize(("lens", "q_lens"), [([2500, 31, 700], None), (DRAFT_LENS, DRAFTS)], ids=["one query", "drafts"])
def test_layouts_and_page_sizes_give_the_same_bits(lens, q_lens, dtype, kv_dtype, page_size, kv_layout, isa_level):
    """No bit depends on how tokens are divided into pages."""
    sizes, kinds = (len(lens), 8, 2, lens), (40, 40, dtype, kv_dtype)
    one, other = (testing.make_paged(*sizes, n, *kinds, x, q_lens=q_lens) for n, x in ((16, "NHD"), (page_size, kv_layout)))
    assert_same(attend_paged(other), attend_paged(one))


# ---- Plans --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv_split", [None, 32])
@pytest.mark.parametrize("form", ["matrix", "triple"])
def test_a_plan_reads_what_it_was_made_from_once(form, kv_split):
    """A plan does not depend on later changes of the arrays that it was made from."""
    case = testing.make_paged(6, 6, 2, [1, 0, 37, 130, 16, 257], 16, 40, 24, q_lens=[1, 0, 4, 20, 16, 33])
    begins, csr = np.array([3, 0, -2, 100, 5, 300]), case.csr()
    expected = attend_paged(case, q_begin=begins, kv_split=kv_split)
    plan = plan_paged(case, (csr, None) if form == "triple" else None, q_begin=begins, kv_split=kv_split)[0]
    for x in (case.block_tables, case.seq_lens, case.options["q_lens"], begins, *csr):
        x[...] = 1
    for _ in range(2):
        assert_same(plan.attention(*case.arrays[:3], return_lse=True), expected)


def test_what_a_plan_shows():
    case = testing.make_paged(3, 4, 2, [20, 33, 64], 16, 24)
    plan = blitz_attn.PagedPlan(case.block_tables, case.seq_lens, page_size=np.int32(16), q_lens=[1, 30, 3], kv_split=32)
    assert repr(plan) == "PagedPlan(batch=3, num_queries=34, page_size=16)"
    assert (plan.batch, plan.num_queries) == (3, 34)


@pytest.mark.parametrize("kv_split", [None, 32])
@pytest.mark.parametrize("page", [-1, 99])
def test_a_plan_names_pages_that_a_cache_lacks(page, kv_split):
    """The sentence has the caller's number of the request. The constructor raises the error if it knows the number of pages, else the call does."""
    case = testing.make_paged(3, 4, 2, [100, 33, 64], 16, 24)
    case.block_tables[0, 5] = page
    sentence = rf"^block_tables: expected pages from 0 to {len(case.k_cache) - 1} within .*, got {page} for page 5 of request 0$"
    plan, out = blitz_attn.PagedPlan(*case.arrays[3:], page_size=16, kv_split=kv_split), np.zeros_like(case.q)
    for call in (
        lambda: plan.attention(*case.arrays[:3], out=out),
        lambda: blitz_attn.paged_attention(*case.arrays, kv_split=kv_split, out=out),
        lambda: blitz_attn.PagedPlan(*case.arrays[3:], page_size=16, num_pages=len(case.k_cache), kv_split=kv_split),
    ):
        with pytest.raises(ValueError, match=sentence):
            call()
    assert not out.any()
    coarse = blitz_attn.PagedPlan(*case.arrays[3:], page_size=8 * 16, kv_split=kv_split and 8 * 16)
    with pytest.raises(ValueError, match=r"^k_cache: expected pages of 128 tokens as the plan has them, got \("):
        coarse.attention(*case.arrays[:3])


@pytest.mark.parametrize("kv_split", [None, 16])
def test_a_plan_allocates_nothing_for_queries_before_a_call(kv_split):
    case = testing.make_paged(2, 4, 2, [30, 40], 16, 32, 32)
    plan = blitz_attn.PagedPlan(*case.arrays[3:], page_size=16, q_lens=[1 << 30, 1 << 30], q_begin=[0, 0], kv_split=kv_split)
    with pytest.raises(ValueError, match=r"^q: expected 2147483648 queries as the plan has them, got \(2, 4, 32\)$"):
        plan.attention(*case.arrays[:3])


def test_tables_are_used_as_they_were_checked():
    """The function that makes the output changes the tables after they were checked, but the call has its own copy of them."""
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

# Half a step of an int8 row is 1 / 254 of its largest magnitude; half a step of float8 e4m3 is at most 1 / 16 of the value itself.
STEP = {"int8": 1 / 254, "float8_e4m3": 1 / 16}


@pytest.mark.parametrize("kv_dtype", testing.QUANTIZED)
@pytest.mark.parametrize("dtype", DTYPES)
def test_quantize(dtype, kv_dtype, isa_level):
    x = testing.make_qkv(2, 3, 3, 5, 7, 33, dtype=dtype, seed=1)[1]
    x[0, 0, 0] = 0
    values, scale = blitz_attn.quantize_kv(x, kv_dtype, **bits_option(x))
    assert_same((values, scale), reference.quantize_kv(x, kv_dtype, **bits_option(x)))
    exact, restored = testing.to_float64(x, dtype), reference.dequantize_kv(values, scale)
    np.testing.assert_allclose(testing.to_float64(blitz_attn.dequantize_kv(values, scale)), restored, rtol=1e-6, atol=0)
    largest = np.abs(exact).max(axis=-1, keepdims=True)
    limit = STEP[kv_dtype] * largest if kv_dtype == "int8" else STEP[kv_dtype] * np.abs(exact) + largest * 2.0**-10 / 448
    assert (np.abs(restored - exact) <= limit * (1 + 1e-6)).all()
    np.testing.assert_allclose(np.abs(restored).max(axis=-1), largest[..., 0], rtol=1e-6)  # the largest element is restored exactly


SHAPES_TO_QUANTISE = {
    "many rows": lambda x: x,
    "strided rows": lambda x: x[:, 1],
    "reversed": lambda x: x[::-1, :, ::-3],
    "one element of a row": lambda x: x[:, :, 0],
    "no rows": lambda x: x[:0],
    "empty rows": lambda x: x[:, :, :0],
    "one row": lambda x: x[0, 0],
    "long rows": lambda x: x[:2].reshape(2, -1),
}


@pytest.mark.parametrize("name", SHAPES_TO_QUANTISE)
@pytest.mark.parametrize("kv_dtype", testing.QUANTIZED)
def test_quantize_any_shape_on_any_threads(kv_dtype, name, isa_level):
    rng = np.random.default_rng(3)
    wide = rng.standard_normal((700, 3, 256), dtype=np.float32) * rng.choice([1e-40, 1e-3, 1, 1e30], (700, 3, 1)).astype(np.float32)
    x = SHAPES_TO_QUANTISE[name](wide)
    expected = reference.quantize_kv(x, kv_dtype)
    try:
        for threads in (1, 2, 5):
            blitz_attn.set_num_threads(threads)
            assert_same(blitz_attn.quantize_kv(x, kv_dtype), expected)
    finally:
        blitz_attn.set_num_threads(None)


def test_e4m3_values():
    """All 256 bit patterns against the format's definition by ml_dtypes."""
    ml_dtypes = pytest.importorskip("ml_dtypes")
    bits = np.arange(256, dtype=np.uint8)
    numbers = bits.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    np.testing.assert_array_equal(reference.dequantize_kv(bits[:, None], np.ones(256))[:, 0], numbers)
    finite = np.isfinite(numbers)
    case = testing.make_paged(1, 1, 1, [1], 1, finite.sum(), kv_dtype="float8_e4m3")
    case.v_cache[case.block_tables[0, 0], 0, 0] = bits[finite]
    case.options["v_scale"][...] = 3.0
    np.testing.assert_allclose(attend_paged(case)[0][0, 0], 3.0 * numbers[finite], rtol=1e-6)


@pytest.mark.parametrize("kv_dtype", testing.QUANTIZED)
def test_error_of_quantised_caches(kv_dtype):
    """For normal K and V, the error of quantisation itself is below a limit of the format."""
    exact = reference.paged_attention(*testing.make_paged(2, 8, 2, [1000, 3000], 32, 128).arrays)
    case = testing.make_paged(2, 8, 2, [1000, 3000], 32, 128, kv_dtype=kv_dtype)
    error = testing.error_of(attend_paged(case)[0], exact)
    assert error.relative < {"int8": 0.01, "float8_e4m3": 0.05}[kv_dtype]


@pytest.mark.sampled
@pytest.mark.parametrize("kv_dtype", testing.QUANTIZED)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("q_lens", [[1, 1], [3, 2], [40, 17]])  # few queries, few queries with bounds of their own, and panels
@pytest.mark.parametrize(
    ("name", "bits"),
    [("k_scale", 0xFFFFFFFF), ("k_scale", 0), *(("v_scale", x) for x in (0xFFFFFFFF, 0x7FFF8000, 0x7FC00000, 0x7F800000, 0))],
)
def test_bad_scales_of_seen_tokens_reach_results(name, bits, q_lens, dtype, kv_dtype, isa_level):
    """The newest token of each request has the scale NaN, inf or 0. Rounding would turn the bits of two of the NaNs into 0 or -0."""
    case = testing.make_paged(2, 8, 2, [90, 77], 16, 64, 48, dtype, kv_dtype, q_lens=q_lens)
    at = tuple(np.array([(case.block_tables[b, t // 16], t % 16) for b, t in enumerate([89, 76])]).T)
    scale = case.options[name].copy()
    scale.view(np.uint32)[at] = bits
    with np.errstate(all="ignore"):
        exact = reference.paged_attention(*case.arrays, **{**case.options, name: scale}, return_lse=True)
    for x, y in zip(attend_paged(case, **{name: scale}), exact, strict=True):
        np.testing.assert_array_equal(np.isfinite(testing.to_float64(x, dtype) if x.dtype == np.uint16 else x), np.isfinite(y))


@pytest.mark.parametrize("kv_dtype", testing.QUANTIZED)
@pytest.mark.parametrize("real", ["float64", "float16"])
@pytest.mark.parametrize("scales", ["tokens", "heads", "one"])
def test_scales_of_other_floats_are_converted(scales, real, kv_dtype):
    case = testing.make_paged(2, 4, 2, [40, 17], 16, 32, 32, "float32", kv_dtype)
    shape = {"tokens": case.k_cache.shape[:3], "heads": (2,), "one": ()}[scales]
    given = {name: np.random.default_rng(n).uniform(0.3, 0.9, shape).astype(real) for n, name in enumerate(("k_scale", "v_scale"))}
    assert_same(attend_paged(case, **given), attend_paged(case, **{name: np.asarray(x, np.float32) for name, x in given.items()}))


@pytest.mark.parametrize("one", [1, 1.0, np.float32(1), np.array(1.0)], ids=repr)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_scale_of_one_is_none(dtype, one):
    """A scale of 1 is accepted for caches of 16 bits and more, which have no scales, because layers of vLLM always have one."""
    case = testing.make_paged(2, 4, 2, [40, 17], 16, 32, 32, dtype, dtype)
    named, tokens = bits_option(case.k_cache), [x[0, :2].copy() for x in case.arrays[1:3]]
    plan = blitz_attn.PagedPlan(case.block_tables, case.seq_lens, page_size=16, **named)
    where, results = {"block_tables": case.block_tables, "seq_lens": case.seq_lens}, []
    for given in ({}, {"k_scale": one, "v_scale": one}):
        attended = *attend_paged(case, **given), plan.attention(*case.arrays[:3], **given)
        caches, summaries = [x.copy() for x in case.arrays[1:3]], [np.zeros((2, 16, 2, 32), case.k_cache.dtype) for _ in range(2)]
        blitz_attn.append_paged_kv(*tokens, *caches, **where, **given, **named)
        scale = {"k_scale": one} if given else {}
        blitz_attn.quest_prefill_metadata(case.k_cache, *case.arrays[3:], np.array([[0], [1]]), *summaries, **scale, **named)
        results.append([*attended, *caches, *summaries])
    assert_same(*results)


def test_a_scale_of_one_in_tensors():
    torch = pytest.importorskip("torch")
    from blitz_attn.integrations.torch import paged_attention

    case = testing.make_paged(2, 4, 2, [40, 17], 16, 32)
    given = [torch.from_numpy(np.array(x)) for x in (*case.arrays[:3], case.block_tables, case.seq_lens)]
    expected = paged_attention(*given)
    for one, call in itertools.product((1.0, torch.tensor(1.0)), (paged_attention, blitz_attn.paged_attention)):
        assert torch.equal(call(*given, k_scale=one, v_scale=one), expected)
    with pytest.raises(ValueError, match="^k_scale: expected none with float32 k_cache"):
        paged_attention(*given, k_scale=torch.tensor(2.0))


# ---- Numbers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("softcap", [5.0, 50.0, 1e3, 1e6, 1e30])
def test_a_cap_far_above_the_scores_costs_no_accuracy(softcap, isa_level):
    """The error of capped scores is relative to the scores, and not to the cap."""
    rng = np.random.default_rng(0)
    q, k_cache, v_cache = 0.1 * rng.standard_normal((8, 1, 128)), *rng.standard_normal((2, 64, 16, 1, 128))
    call = [x.astype(np.float32) for x in (q, k_cache, v_cache)] + [np.arange(64)[None], [1024]]
    options = {"q_begin": [1024], "q_lens": [8], "return_lse": True}
    exact, exact_lse = reference.paged_attention(*call, softcap=softcap, **options)
    capped, lse = blitz_attn.paged_attention(*call, softcap=softcap, **options)
    plain = blitz_attn.paged_attention(*call, **options)[0] - reference.paged_attention(*call, **options)[0]
    assert np.abs(capped - exact).max() < 2 * np.abs(plain).max()
    assert np.abs(lse - exact_lse).max() < 2e-6


@pytest.mark.parametrize("kv_dtype", ["float32", "float16", "bfloat16", "float8_e4m3"])
def test_a_nan_reaches_only_its_request(kv_dtype, isa_level):
    """A NaN in a page that is in use reaches the rows that see it, and no others. So poison in unused pages would show if it were read."""
    case = testing.make_paged(3, 4, 2, [40, 50, 30], 16, 24, kv_dtype=kv_dtype)
    clean = attend_paged(case)
    case.v_cache[case.block_tables[1, 2], 3, 1] = 0x7F if kv_dtype == "float8_e4m3" else testing.round_to(np.nan, kv_dtype)
    out, lse = attend_paged(case)
    assert np.isnan(out[1, 2:]).all()
    out[1, 2:] = clean[0][1, 2:]
    assert_same((out, lse), clean)
