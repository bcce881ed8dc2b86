"""Quantising, appending, attention and summaries equal the reference for caches whose rows are llama.cpp's blocks (q8_0, q4_0, q4_1)."""

import itertools

import numpy as np
import pytest

import blitz_attn
from blitz_attn import reference, testing
from cases import DTYPES, assert_same, bits_option, same_bits
from cases_paged import attend_paged, check_paged, every_block, plan_paged

FORMATS = testing.ROW_FORMATS
BOTH = [*FORMATS, *(pair for pair in itertools.product(FORMATS, repeat=2) if pair[0] != pair[1])]
MOST = {"q8_0": 127 * 65504.0, "q4_0": 8 * 65504.0, "q4_1": 65504.0}
RULES = {"plain": {}, "all": {"window": 40, "softcap": 3.0, "scale": 0.4}}


def rule_options(rule, heads):
    return RULES[rule] | ({"sinks": np.linspace(-2, 3, heads).astype(np.float32)} if rule == "all" else {})


# ---- Quantising ---------------------------------------------------------------------------------------------------


def blocks_of_all_kinds():
    """Rows of shape (n, 2, 96): normal numbers of many sizes, ties, zeros, equal numbers, tiny numbers, and blocks with a single huge number."""
    rng = np.random.default_rng(5)
    x = rng.standard_normal((300, 2, 96)) * 2.0 ** rng.integers(-20, 12, (300, 2, 1))
    x[:20] = rng.integers(-16, 17, (20, 2, 96)) / 2  # the scale is such that many quotients are half-way between two integers
    x[20], x[21], x[22], x[23] = 0, -0.0, 3.5, -3.5
    x[24, :, ::32] = 65280  # a number that bfloat16 has, too
    x[25] = rng.standard_normal((2, 96)) * 1e-8  # factors below float16's normal numbers, or 0
    x[26] = rng.standard_normal((2, 96)) * 1e-42
    x[27, :, 1::32], x[27, :, 2::32] = 9, -9  # both signs have the largest magnitude
    x[28] = -np.abs(x[28])
    return x


@pytest.mark.parametrize("kv_dtype", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_quantize_rows(dtype, kv_dtype, isa_level):
    x = testing.round_to(blocks_of_all_kinds(), dtype)
    rows = blitz_attn.quantize_rows(x, kv_dtype, **bits_option(x))
    assert same_bits(rows, reference.quantize_rows(x, kv_dtype, **bits_option(x)))
    exact = testing.to_float64(x, dtype)
    blocks = exact.reshape(*exact.shape[:-1], 3, 32)
    step = np.ptp(blocks, axis=-1) / 15 if kv_dtype == "q4_1" else np.abs(blocks).max(axis=-1) / (127 if kv_dtype == "q8_0" else 8)
    error = np.abs(reference.dequantize_rows(rows, kv_dtype) - exact).reshape(blocks.shape).max(axis=-1)
    most = 1.0 if kv_dtype == "q4_0" else 0.5  # in steps: a number of the other sign than the largest one may be clipped by one step
    assert (error <= most * step + np.abs(blocks).max(axis=-1) * 2.0**-9 + 2.0**-18).all()


@pytest.mark.parametrize("kv_dtype", FORMATS)
def test_ggml_makes_the_same_blocks(kv_dtype):
    quants = pytest.importorskip("gguf.quants")
    x = blocks_of_all_kinds().astype(np.float32)
    x = np.delete(x, [21, 26], axis=0)  # left out: blocks of -0, which ggml keeps, and blocks of numbers below 2^-126, whose reciprocals are infinite
    with np.errstate(all="ignore"):
        expected = quants.quantize(x, getattr(quants.GGMLQuantizationType, kv_dtype.upper()))
    rows = blitz_attn.quantize_rows(x, kv_dtype)
    assert same_bits(rows, expected)
    numbers = quants.dequantize(expected, getattr(quants.GGMLQuantizationType, kv_dtype.upper()))
    assert same_bits(blitz_attn.dequantize_rows(rows, kv_dtype), numbers)


@pytest.mark.parametrize("kv_dtype", FORMATS)
def test_dequantize_rows(kv_dtype):
    rows = np.random.default_rng(0).integers(0, 256, (50, 3, 4 * {"q8_0": 34, "q4_0": 18, "q4_1": 20}[kv_dtype]), np.uint8)
    numbers = blitz_attn.dequantize_rows(rows, kv_dtype)
    assert (numbers.shape, numbers.dtype) == ((50, 3, 128), np.float32)
    with np.errstate(invalid="ignore"):
        np.testing.assert_allclose(numbers, reference.dequantize_rows(rows, kv_dtype), rtol=2.0**-23, atol=2.0**-10)
    assert np.isnan(numbers).any()


SHAPES = {
    "strided": lambda x: x[:, 1],
    "reversed": lambda x: x[::-1, :, ::-3],
    "no rows": lambda x: x[:0],
    "empty rows": lambda x: x[:, :, :0],
    "one row": lambda x: x[7, 0],
    "long rows": lambda x: x[:2].reshape(2, -1),
}


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("kv_dtype", FORMATS)
def test_rows_of_any_shape_on_any_threads(kv_dtype, name):
    x = SHAPES[name](blocks_of_all_kinds())
    try:
        for threads in (1, 3):
            blitz_attn.set_num_threads(threads)
            rows = blitz_attn.quantize_rows(x, kv_dtype)
            assert same_bits(rows, reference.quantize_rows(x, kv_dtype))
            assert blitz_attn.dequantize_rows(rows, kv_dtype).shape == x.shape
    finally:
        blitz_attn.set_num_threads(None)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, "large"])
@pytest.mark.parametrize("kv_dtype", FORMATS)
def test_numbers_that_no_block_holds(kv_dtype, bad, isa_level):
    """Such numbers are refused by quantize_rows, and by append_paged_kv, which then writes no token."""
    x = np.random.default_rng(1).standard_normal((6, 2, 64))
    x[4, 1, 33] = np.nextafter(MOST[kv_dtype], np.inf) if bad == "large" else bad
    with pytest.raises(ValueError, match=rf"^x: expected numbers from -{MOST[kv_dtype]:.0f} to {MOST[kv_dtype]:.0f} to quantise to {kv_dtype}, got"):
        blitz_attn.quantize_rows(x, kv_dtype)
    caches = [np.full((2, 4, 2, 2 * {"q8_0": 34, "q4_0": 18, "q4_1": 20}[kv_dtype]), 0x55, np.uint8) for _ in range(2)]
    good = np.zeros_like(x)
    for k, v, name in ((x, good, "k"), (good, x, "v")):
        with pytest.raises(ValueError, match=rf"^{name}: expected numbers .* at \[4, 1, 33\]$"):
            blitz_attn.append_paged_kv(k, v, *caches, slot_mapping=range(6), kv_dtype=kv_dtype)
    assert all((x == 0x55).all() for x in caches)
    x[4, 1, 33] = MOST[kv_dtype]
    assert np.isfinite(blitz_attn.dequantize_rows(blitz_attn.quantize_rows(x, kv_dtype), kv_dtype)).all()


# ---- Attention ----------------------------------------------------------------------------------------------------


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("kv_dtype", BOTH, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(("heads", "dims"), [((3, 3), (64, 64)), ((8, 2), (32, 96)), ((5, 1), (128, 128)), ((8, 1), (96, 32)), ((6, 3), (576, 512))])
@pytest.mark.parametrize(("rule", "q_lens"), list(itertools.product(RULES, [None, [1, 0, 5, 3], [0, 0, 37, 1]])), ids=str)
def test_every_combination_is_right(rule, q_lens, heads, dims, dtype, kv_dtype, kv_layout):
    case = testing.make_paged(4, *heads, [1, 0, 37, 130], 16, *dims, dtype, kv_dtype, kv_layout, q_lens=q_lens)
    check_paged(case, **rule_options(rule, heads[0]))


SIZES = [
    *((2 * group, 2, [50, 131], q_lens) for group in (1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 40) for q_lens in (None, [1, 20])),
    *((8, 2, [n, 140, n + 1, 3], [n, n, 1, 0]) for n in (2, 3, 5, 9, 16, 33, 100)),
    (8, 2, [1023, 1025, 2048, 2049, 4096, 6145, 10], None),
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kv_dtype", ["q8_0", "q4_0", "q4_1", ("q8_0", "q4_1")], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_every_size_is_right(size, dtype, kv_dtype, rule):
    heads, kv_heads, lens, q_lens = size
    case = testing.make_paged(len(lens), heads, kv_heads, lens, 16, 64, 32, dtype, kv_dtype, q_lens=q_lens)
    check_paged(case, **rule_options(rule, heads))


@pytest.mark.parametrize("kv_dtype", ["q8_0", ("q8_0", "q4_0"), "q4_1"], ids=str)
@pytest.mark.parametrize("q_lens", [None, [3, 1, 40]])
def test_biases_and_ranges(q_lens, kv_dtype):
    lens = [70, 20, 133]
    case = testing.make_paged(3, 8, 2, lens, 16, 64, kv_dtype=kv_dtype, q_lens=q_lens)
    rng = np.random.default_rng(2)
    rows = sum([1, 1, 1] if q_lens is None else q_lens)
    ranges = np.sort(rng.integers(0, 140, (rows, 2)), axis=1)
    mask = rng.standard_normal((3, 8, 1 if q_lens is None else 40, 133)).astype(np.float32)
    mask[rng.random(mask.shape) < 0.2] = -np.inf
    check_paged(case, attn_mask=mask, alibi_slopes=np.linspace(0, 0.3, 8).astype(np.float32), kv_ranges=ranges)


@pytest.mark.parametrize("kv_dtype", ["q8_0", ("q8_0", "q4_0"), "q4_1"], ids=str)
@pytest.mark.parametrize("heads", [(4, 4), (8, 2)])
def test_plans_splits_and_lists(heads, kv_dtype, isa_level):
    """A plan gives the bits of single calls, a list of all pages those of a call without lists, and a view those of a copy."""
    case = testing.make_paged(3, *heads, [40, 133, 1], 16, 64, kv_dtype=kv_dtype)
    whole = attend_paged(case)
    plan, per_call = plan_paged(case)
    assert_same(plan.attention(*case.arrays[:3], return_lse=True, **per_call), whole)
    assert_same(attend_paged(case, every_block(case, heads[1])), whole)
    check_paged(case, every_block(case, heads[1])[:, :, :4])
    check_paged(case, kv_split=32)
    split = attend_paged(case, kv_split=32)
    plan, _ = plan_paged(case, kv_split=32)
    assert_same(plan.attention(*case.arrays[:3], return_lse=True), split)
    wide = [np.full((*x.shape[:2], 3, *x.shape[2:]), 0x7F, np.uint8) for x in case[1:3]]
    for x, cache in zip(wide, case[1:3], strict=True):
        x[:, :, 1] = cache
    assert_same(attend_paged(case._replace(k_cache=wide[0][:, :, 1], v_cache=wide[1][:, :, 1])), whole)


@pytest.mark.parametrize("q_lens", [[1, 1], [3, 2], [40, 17]])
@pytest.mark.parametrize("kv_dtype", [*FORMATS, ("q8_0", "q4_1"), ("q4_1", "q8_0")], ids=str)
def test_bad_factors_reach_only_the_rows_that_see_them(kv_dtype, q_lens, isa_level):
    """A factor that is NaN or infinite reaches only the queries that see its token."""
    case = testing.make_paged(2, 4, 2, [45, 50], 16, 64, kv_dtype=kv_dtype, q_lens=q_lens)
    clean = attend_paged(case, window=10)
    for which, bits in itertools.product((1, 2), (0x7E00, 0x7C00, 0xFC00)):
        caches = [x.copy() for x in case[1:3]]
        cell = caches[which - 1][case.block_tables[0, 2], 44 % 16, :, :2]  # the newest token of the first request
        cell[...] = np.frombuffer(np.uint16(bits).tobytes(), np.uint8)
        out, lse = attend_paged(case._replace(k_cache=caches[0], v_cache=caches[1]), window=10)
        seen = q_lens[0] - 1  # only the last query of the request sees this token
        assert not np.isfinite(out[seen]).all()
        assert_same((np.delete(out, seen, 0), np.delete(lse, seen, 0)), (np.delete(clean[0], seen, 0), np.delete(clean[1], seen, 0)))


# ---- Appending and summaries --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("kv_dtype", BOTH, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_append(dtype, kv_dtype, kv_layout, isa_level):
    """Appended tokens become the rows that quantize_rows makes, and summaries are updated."""
    case = testing.make_paged(2, 4, 2, [30, 23], 4, 64, 32, "float32", kv_dtype, kv_layout)
    rng = np.random.default_rng(4)
    named = {"kv_dtype": kv_dtype, "kv_layout": kv_layout} | ({"dtype": "bfloat16"} if dtype == "bfloat16" else {})
    tables = np.array([[4, 0, 2], [1, 5, 3]], np.int32)
    caches, twins = ([np.full_like(x, 0x7F) for x in case[1:3]] for _ in range(2))
    got, twin = ({name: np.full((6, 3, 2, 64), np.nan, np.float32) for name in ("maxblocks", "minblocks", "meanblocks")} for _ in range(2))
    ends = np.array([0, 0])
    for new in ([5, 4], [0, 1], [13, 7], [1, 1], [9, 9]):
        ends = ends + new
        k, v = (testing.round_to(rng.standard_normal((sum(new), 2, dim)), dtype) for dim in (64, 32))
        where = {"block_tables": case.block_tables, "seq_lens": ends, "q_lens": new, "metadata_block_tables": tables}
        blitz_attn.append_paged_kv(k, v, *caches, **got, **where, **named)
        reference.append_paged_kv(k, v, *twins, **twin, **where, **named)
        assert_same(caches, twins)
        for name in ("maxblocks", "minblocks"):
            np.testing.assert_array_equal(got[name], twin[name])  # of 0 and -0, either may be the larger
        np.testing.assert_allclose(got["meanblocks"], twin["meanblocks"], rtol=1e-5, atol=1e-5)
    plan = blitz_attn.PagedPlan(case.block_tables, ends, page_size=4, q_lens=new, kv_dtype=kv_dtype, kv_layout=kv_layout)
    again = [x.copy() for x in caches]
    for x in again:
        x[case.block_tables[0, 6]] = 0
    plan.append(k, v, *again, dtype="bfloat16" if dtype == "bfloat16" else None)
    assert same_bits(again[0][case.block_tables[1, :6]], caches[0][case.block_tables[1, :6]])


def test_keys_and_values_in_one_array():
    pool = np.full((3, 4, 2, 2, 68 + 36), 7, np.uint8)  # each token has its keys and values side by side
    k, v = np.random.default_rng(0).standard_normal((2, 6, 2, 64))
    caches = pool[:, :, 0, :, :68], pool[:, :, 0, :, 68:]
    blitz_attn.append_paged_kv(k, v, *caches, slot_mapping=[3, 0, 11, 5, 6, 7], kv_dtype=("q8_0", "q4_0"))
    assert (pool[:, :, 1] == 7).all()
    at = np.divmod([3, 0, 11, 5, 6, 7], 4)
    assert same_bits(caches[0][at], blitz_attn.quantize_rows(k, "q8_0"))
    assert same_bits(caches[1][at], blitz_attn.quantize_rows(v, "q4_0"))
    with pytest.raises(ValueError, match="^v_cache: expected memory of its own, got an array that overlaps k_cache$"):
        blitz_attn.append_paged_kv(k, v, caches[0], pool[:, :, 0, :, 67:103], slot_mapping=[3, 0, 11, 5, 6, 7], kv_dtype=("q8_0", "q4_0"))


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("kv_dtype", FORMATS)
def test_summaries_and_best_keys(kv_dtype, kv_layout, isa_level):
    case = testing.make_paged(4, 6, 3, [1, 0, 16, 77], 8, 64, 64, "float32", kv_dtype, kv_layout)
    tables = np.arange(8, dtype=np.int32).reshape(4, 2)
    found, exact = ([np.full((8, 5, 3, 64), np.nan, np.float32) for _ in range(3)] for _ in range(2))
    for op, into in ((blitz_attn.quest_prefill_metadata, found), (reference.quest_prefill_metadata, exact)):
        op(case.k_cache, *case.arrays[3:], tables, *into[:2], meanblocks=into[2], kv_layout=kv_layout, dtype=kv_dtype)
    np.testing.assert_array_equal(found[:2], exact[:2])
    np.testing.assert_allclose(found[2], exact[2], rtol=1e-5, atol=1e-5)
    options = {"method": "max", "k": 4, "sink": 0, "recent": 0, "return_scores": True, "kv_layout": kv_layout, "kv_dtype": kv_dtype}
    call = case.q, case.k_cache, case.block_tables, case.seq_lens
    ours, theirs = blitz_attn.select_blocks(*call, **options), reference.select_blocks(*call, **options)
    assert np.array_equal(ours[0], theirs[0])
    np.testing.assert_allclose(ours[2], theirs[2], rtol=1e-5, atol=1e-4)
    both = blitz_attn.select_and_attend(case.q, *case.arrays[1:3], *case.arrays[3:], k=4, method="max", kv_layout=kv_layout, kv_dtype=kv_dtype)
    assert np.isfinite(both).all()


@pytest.mark.parametrize("kv_dtype", [*FORMATS, ("q8_0", "q4_1")], ids=str)
def test_error_of_the_formats(kv_dtype):
    """For normal K and V, the error of quantisation itself is below a limit of the format."""
    exact = reference.paged_attention(*testing.make_paged(2, 8, 2, [1000, 3000], 32, 128).arrays)
    case = testing.make_paged(2, 8, 2, [1000, 3000], 32, 128, kv_dtype=kv_dtype)
    error = testing.error_of(attend_paged(case)[0], exact)
    assert error.relative < {"q8_0": 0.01, "q4_0": 0.2, "q4_1": 0.15}.get(kv_dtype, 0.1)


# ---- Sentences ----------------------------------------------------------------------------------------------------


def test_refusals():
    case = testing.make_paged(2, 4, 2, [9, 20], 8, 64, kv_dtype="q4_0")
    call = dict(zip(("q", "k_cache", "v_cache", "block_tables", "seq_lens"), case.arrays, strict=True)) | {"kv_dtype": "q4_0"}
    for error, sentence, change in (
        (ValueError, "k_cache: expected a last axis of 18 bytes for each 32 dims of q4_0, and a head dim from 32 to 576, got (9, 8, 2, 35)",
         {"k_cache": case.k_cache[..., :35].copy()}),
        (ValueError, "k_cache: expected rows of D = 64 like q, got rows of D = 32 in q4_0, (9, 8, 2, 18)", {"k_cache": case.k_cache[..., :18]}),
        (ValueError, "k_cache: expected a last axis of 34 bytes for each 32 dims of q8_0, and a head dim from 32 to 576, got (9, 8, 2, 36)",
         {"kv_dtype": "q8_0"}),
        (ValueError, "v_cache: expected a last axis of 20 bytes for each 32 dims of q4_1, and a head dim from 32 to 576, got (9, 8, 2, 36)",
         {"kv_dtype": ("q4_0", "q4_1")}),
        (ValueError, "k_scale: expected none with q4_0 k_cache, got shape ()", {"k_scale": 1.0}),
        (TypeError, "k_cache: expected q4_0 as kv_dtype says, got float32", {"k_cache": case.k_cache.astype(np.float32)}),
        (TypeError, "v_cache: expected q8_0, q4_0 or q4_1 with k_cache of q4_0, got float32", {"v_cache": case.v_cache.astype(np.float32)}),
        (TypeError, "k_cache: expected float64 with a float64 q, got q4_0", {"q": case.q.astype(np.float64)}),
        (ValueError, "kv_dtype: expected one dtype, or a pair of 'q8_0', 'q4_0' and 'q4_1' for keys and values, got ('q8_0', 'int8')",
         {"kv_dtype": ("q8_0", "int8")}),
        (ValueError, "kv_dtype: expected one dtype, or a pair of 'q8_0', 'q4_0' and 'q4_1' for keys and values, got ('q8_0',)",
         {"kv_dtype": ("q8_0",)}),
    ):  # fmt: skip
        with pytest.raises(error) as caught:
            blitz_attn.paged_attention(**call | change)
        assert str(caught.value) == sentence
    for error, sentence, function, arguments in (
        (ValueError, "x: expected a last axis of a multiple of 32 for q4_0, got (3, 40)", blitz_attn.quantize_rows, (np.ones((3, 40)), "q4_0")),
        (ValueError, "kv_dtype: expected 'q8_0', 'q4_0' or 'q4_1', got 'int8'", blitz_attn.quantize_rows, (np.ones((3, 32)), "int8")),
        (ValueError, "rows: expected a last axis of a multiple of 18 bytes for q4_0, got (3, 34)", blitz_attn.dequantize_rows,
         (np.ones((3, 34), np.uint8), "q4_0")),
        (TypeError, "rows: expected uint8, got int8", blitz_attn.dequantize_rows, (np.ones((3, 34), np.int8), "q8_0")),
    ):  # fmt: skip
        with pytest.raises(error) as caught:
            function(*arguments)
        assert str(caught.value) == sentence


@pytest.mark.parametrize("kv_dtype", ["q8_0", ("q8_0", "q4_1")], ids=str)
def test_torch_operator(kv_dtype):
    """The operator takes tensors of bytes and gives the bits of the library's function. A fake call gives the shape."""
    torch = pytest.importorskip("torch")
    from blitz_attn.integrations import torch as integration

    case = testing.make_paged(2, 4, 2, [20, 33], 16, 64, 32, kv_dtype=kv_dtype)
    tensors = [torch.from_numpy(x) for x in case.arrays]
    out = integration.paged_attention(*tensors, kv_dtype=kv_dtype)
    assert same_bits(out.numpy(), blitz_attn.paged_attention(*case.arrays, **case.options))
    lists = torch.from_numpy(every_block(case, 2).astype(np.int32))
    assert torch.equal(integration.paged_select_attention(*tensors, lists, kv_dtype=kv_dtype), out)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = integration.paged_attention(*(mode.from_tensor(x) for x in tensors), kv_dtype=kv_dtype)
    assert fake.shape == out.shape
    with pytest.raises(ValueError, match=r"^kv_dtype: expected 'q8_0', 'q4_0', 'q4_1', or a pair of them for keys and values, got 'int8'$"):
        integration.paged_attention(*tensors, kv_dtype="int8")
