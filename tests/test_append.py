"""Writing new tokens into paged caches: bit for bit against the twin, by slots and by tables, with and without summaries."""

import numpy as np
import pytest

import blitz_attn
from blitz_attn import reference, testing
from cases import DTYPES, bits_option, dtype_of, same_bits
from cases_paged import CACHE_DTYPES, attend_paged

KV_HEADS, DIM, V_DIM = 2, 24, 17


def empty_like(case, fill=7):
    """The case's caches and scales without their tokens; `fill` shows where nothing was written."""
    caches = [np.zeros_like(x) for x in case[1:3]]
    scales = {name: np.full_like(case.options[name], fill) for name in ("k_scale", "v_scale") if name in case.options}
    return caches, scales


def new_tokens(count, dtype="float32", seed=0):
    rng = np.random.default_rng(seed)
    return [testing.round_to(rng.standard_normal((count, KV_HEADS, dim)), dtype) for dim in (DIM, V_DIM)]


def assert_same(got, expected):
    assert all(same_bits(a, b) for a, b in zip(got, expected, strict=True))


def append_both(tokens, case, **options):
    """Caches and scales after the operation, held against the twin's."""
    named = {name: case.options[name] for name in ("kv_layout", "kv_dtype") if name in case.options}
    results = []
    for op in (blitz_attn.append_paged_kv, reference.append_paged_kv):
        caches, scales = empty_like(case)
        assert op(*tokens, *caches, **scales, **named, **options) is None
        results.append([*caches, *scales.values()])
    assert_same(*results)
    return results[0]


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("kv_dtype", [*CACHE_DTYPES, "float64"])
def test_by_tables(kv_dtype, kv_layout):
    """The newest tokens of each request; the rest of the cache stays."""
    case = testing.make_paged(4, 4, KV_HEADS, [1, 0, 37, 20], 8, DIM, V_DIM, kv_dtype=kv_dtype, kv_layout=kv_layout)
    tables = {"block_tables": case.block_tables, "seq_lens": case.seq_lens}
    for q_lens in ([1, 0, 37, 20], [0, 0, 5, 1], [1, 0, 9, 0]):
        written = append_both(new_tokens(sum(q_lens)), case, q_lens=q_lens, **tables)
        assert any(x.any() for x in written[:2])
    one = testing.make_paged(3, 4, KV_HEADS, [1, 17, 16], 8, DIM, V_DIM, kv_dtype=kv_dtype, kv_layout=kv_layout)
    append_both(new_tokens(3), one, block_tables=one.block_tables, seq_lens=one.seq_lens)
    indptr, indices, last = one.csr()
    append_both(new_tokens(3), one, block_tables=(indptr, indices, last))


@pytest.mark.parametrize("dtype", DTYPES)
def test_converts_to_the_cache(dtype):
    """float16 and bfloat16 tokens into every cache; float64 is rounded once."""
    for kv_dtype in CACHE_DTYPES:
        case = testing.make_paged(2, 4, KV_HEADS, [9, 20], 8, DIM, V_DIM, kv_dtype=kv_dtype)
        tokens = new_tokens(5, dtype)
        if bits_option(tokens[0]):
            continue
        append_both(tokens, case, slot_mapping=[3, 9, 12, 0, 30])


@pytest.mark.parametrize("kv_dtype", ["float32", "int8", "float8_e4m3"])
def test_by_slots(kv_dtype):
    case = testing.make_paged(2, 4, KV_HEADS, [9, 20], 8, DIM, V_DIM, kv_dtype=kv_dtype)
    slots = np.random.default_rng(2).permutation(len(case.k_cache) * 8)[:11]
    for dtype in ("int32", "int64"):
        written = append_both(new_tokens(11), case, slot_mapping=slots.astype(dtype))
    slots[[0, 4, 7]] = -1  # left out
    fewer = append_both(new_tokens(11), case, slot_mapping=slots)
    assert (fewer[0] != 0).any(axis=-1).sum() < (written[0] != 0).any(axis=-1).sum()
    nothing = append_both(new_tokens(2), case, slot_mapping=[-1, -1])
    assert not nothing[0].any()


@pytest.mark.parametrize("kv_dtype", [*CACHE_DTYPES, "float64"])
def test_step_by_step_is_the_whole(kv_dtype):
    """Prompt in chunks, then a token at a time, then attention: the cache that was made at once, bit for bit."""
    dtype = "float64" if kv_dtype == "float64" else "float32"
    case = testing.make_paged(2, 4, KV_HEADS, [30, 23], 8, DIM, V_DIM, dtype, kv_dtype, poison=False)
    tokens = new_tokens(53, dtype, seed=5)
    starts = np.array([0, 30])
    whole, whole_scales = empty_like(case)
    named = {name: case.options[name] for name in ("kv_layout", "kv_dtype") if name in case.options}
    blitz_attn.append_paged_kv(
        *tokens, *whole, block_tables=case.block_tables, seq_lens=case.seq_lens, q_lens=[30, 23], **whole_scales, **named
    )
    parts, part_scales = empty_like(case)
    ends = np.array([0, 0])
    for new in ([12, 20], [15, 0], [1, 1], [1, 1], [1, 1]):
        begins, ends = ends, ends + new
        rows = np.concatenate([starts[b] + np.arange(begins[b], ends[b]) for b in range(2)])
        chunk = [x[rows] for x in tokens]
        blitz_attn.append_paged_kv(*chunk, *parts, block_tables=case.block_tables, seq_lens=ends, q_lens=new, **part_scales, **named)
    assert_same([*parts, *part_scales.values()], [*whole, *whole_scales.values()])
    filled = case._replace(k_cache=parts[0], v_cache=parts[1], options={**case.options, **part_scales})
    for request, queries in ((0, slice(0, 30)), (1, slice(30, 53))):
        k, v = (testing.to_float64(x[queries], dtype).swapaxes(0, 1)[None] for x in tokens)
        exact, _ = testing.reference_attention(case.q[request, :, None][None].astype(np.float64), k, v)
        limit = {"int8": 0.02, "float8_e4m3": 0.1, "float16": 2e-3, "bfloat16": 1e-2}.get(kv_dtype, 1e-6)
        assert testing.error_of(attend_paged(filled)[0][request], exact[0, :, 0]).relative < limit


@pytest.mark.parametrize("by", ["tables", "plan", "plan of a triple"])
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("kv_dtype", DTYPES)
def test_summaries_follow(kv_dtype, kv_layout, by):
    """After every append, by the function or by a plan, the summaries are what summarising the whole gives."""
    case = testing.make_paged(2, 4, KV_HEADS, [30, 23], 4, DIM, V_DIM, kv_dtype, kv_dtype, kv_layout, poison=False)
    caches, _ = empty_like(case)
    named = {name: case.options[name] for name in ("kv_layout", "kv_dtype") if name in case.options}
    bits = {"dtype": "bfloat16"} if caches[0].dtype == np.uint16 else {}
    rows, tables = 3, np.array([[4, 0, 2], [1, 5, 3]], np.int32)
    empty = testing.round_to(np.full((6, rows, KV_HEADS, DIM), np.nan), dtype_of(caches[0]))
    high, low, mean, exact_high, exact_low, exact_mean = (empty.copy() for _ in range(6))
    kept = {"maxblocks": high, "minblocks": low, "meanblocks": mean, "metadata_block_tables": tables}
    ends = np.array([0, 0])
    for n, new in enumerate([[5, 4], [0, 1], [1, 0], [13, 7], [1, 1], [1, 1], [9, 9]]):
        ends = ends + new
        tokens = new_tokens(sum(new), kv_dtype, seed=n)
        if by == "tables":
            where = {"block_tables": case.block_tables, "seq_lens": ends, "q_lens": new}
            blitz_attn.append_paged_kv(*tokens, *caches, **kept, **where, **named)
        else:
            given = case.block_tables, ends
            if by == "plan of a triple":
                used = -(-ends // 4)
                pages = np.concatenate([row[:n] for row, n in zip(case.block_tables, used, strict=True)])
                given = (np.concatenate([[0], np.cumsum(used)]), pages, ends - 4 * np.maximum(used - 1, 0)), None
            blitz_attn.PagedPlan(*given, page_size=4, q_lens=new, **named).append(*tokens, *caches, **kept)
        whole = caches[0], case.block_tables, ends, tables
        reference.quest_prefill_metadata(*whole, exact_high, exact_low, kv_layout=kv_layout, **bits)
        blitz_attn.quest_prefill_metadata(*whole, None, None, meanblocks=exact_mean, kv_layout=kv_layout, **bits)
        assert same_bits(high, exact_high), new
        assert same_bits(low, exact_low), new
        assert same_bits(mean, exact_mean), new


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bits of bfloat16"])
def test_summaries_of_the_twin(dtype, kv_layout):
    """The operation and its twin fill caches and summaries alike, whether or not q_lens say how many tokens each request has."""
    rng = np.random.default_rng(5)
    kind, named = ("uint16", {"kv_dtype": "bfloat16"}) if dtype == "bits of bfloat16" else (dtype, {})
    axes = (8, 4, KV_HEADS) if kv_layout == "NHD" else (8, KV_HEADS, 4)
    block_tables, tables = np.array([[5, 1, 2], [0, 7, 3], [4, 0, 0]], np.int32), np.array([[3], [1], [0]], np.int32)
    got, expected = ([np.zeros((*axes, dim), kind) for dim in (DIM, V_DIM)] for _ in range(2))
    got_pages, expected_pages = ([np.zeros((4, 3, KV_HEADS, DIM), kind) for _ in range(3)] for _ in range(2))
    names = ("maxblocks", "minblocks", "meanblocks")
    for seq_lens, q_lens in (([9, 5, 0], [9, 5, 0]), ([10, 6, 1], None), ([10, 8, 3], [0, 2, 2])):
        tokens = [
            testing.round_to(rng.standard_normal((sum(q_lens or [1] * 3), KV_HEADS, dim)), "bfloat16" if named else dtype).view(kind)
            for dim in (DIM, V_DIM)
        ]
        where = {"block_tables": block_tables, "seq_lens": seq_lens, "q_lens": q_lens, "kv_layout": kv_layout}
        where["metadata_block_tables"] = tables
        blitz_attn.append_paged_kv(*tokens, *got, **dict(zip(names, got_pages, strict=True)), **where, **named)
        reference.append_paged_kv(*tokens, *expected, **dict(zip(names, expected_pages, strict=True)), **where, **named)
        assert_same(got + got_pages[:2], expected + expected_pages[:2])
        mean, exact = (testing.to_float64(x[2], "bfloat16" if named else dtype) for x in (got_pages, expected_pages))
        np.testing.assert_allclose(mean, exact, rtol={"float32": 1e-6, "float16": 1e-3}.get(dtype, 1e-2), atol=1e-6)
    assert all(x[[0, 1, 3]].any() for x in got_pages)


def test_torch_caches():
    torch = pytest.importorskip("torch")
    case = testing.make_paged(2, 4, KV_HEADS, [9, 20], 8, DIM, V_DIM)
    caches, tokens = [torch.zeros(x.shape) for x in case[1:3]], new_tokens(4)
    blitz_attn.append_paged_kv(*map(torch.from_numpy, tokens), *caches, slot_mapping=[3, 9, 12, 0])
    assert_same([x.numpy() for x in caches], append_both(tokens, case, slot_mapping=[3, 9, 12, 0]))


FIXED_SCALES = {"one": 0.02, "array of one": np.array(0.02, np.float32), "heads": np.array([0.02, 0.005], np.float32)}


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("kv_dtype", testing.QUANTIZED)
@pytest.mark.parametrize("scale", FIXED_SCALES.values(), ids=FIXED_SCALES)
def test_given_scales(scale, kv_dtype, kv_layout, isa_level):
    """One scale, or one per head, is read: what is too large becomes the dtype's largest number. Attention takes such scales, too."""
    case = testing.make_paged(2, 4, KV_HEADS, [9, 20], 8, DIM, V_DIM, kv_dtype=kv_dtype, kv_layout=kv_layout)
    named = {name: case.options[name] for name in ("kv_layout", "kv_dtype") if name in case.options}
    where = {"block_tables": case.block_tables, "seq_lens": case.seq_lens, "q_lens": [9, 20]}
    tokens = [3 * x for x in new_tokens(29)]
    results = []
    for op in (blitz_attn.append_paged_kv, reference.append_paged_kv):
        caches, _ = empty_like(case)
        op(*tokens, *caches, k_scale=scale, v_scale=scale, **where, **named)
        results.append(caches)
    assert_same(*results)
    largest = {"int8": 127, "float8_e4m3": 448}[kv_dtype]
    beyond = np.abs(tokens[0]) > largest * np.broadcast_to(scale, KV_HEADS)[:, None]
    assert beyond.any()
    whole = np.empty_like(case.options["k_scale"])
    whole[...] = scale if kv_layout == "NHD" else np.reshape(scale, (-1, 1))
    call = (case.q, *results[0], case.block_tables, case.seq_lens)
    for op, kind in ((blitz_attn.paged_attention, "float32"), (reference.paged_attention, "float64")):
        got = op(*call, k_scale=scale, v_scale=scale, **named)
        assert got.dtype == kind
        assert same_bits(got, op(*call, k_scale=whole, v_scale=whole, **named))


@pytest.mark.parametrize(("kv_dtype", "tie"), [("bfloat16", 2.0**-8), ("float16", 2.0**-11)])
def test_float64_is_rounded_once(kv_dtype, tie):
    """A float64 that rounds to a tie of 16 bits in float32 is no tie."""
    case = testing.make_paged(1, 4, KV_HEADS, [8], 8, DIM, V_DIM)
    numbers = np.array([1 + tie, 1 + tie + 2.0**-40, 1 + 3 * tie - 2.0**-40, -1 - tie - 2.0**-40, 2.0**-149, -(2.0**-149), 1e300, -1e-300, np.inf])
    k = np.resize(numbers, (3, KV_HEADS, DIM))
    cache = np.zeros(case.k_cache.shape, np.uint16 if kv_dtype == "bfloat16" else np.float16)
    blitz_attn.append_paged_kv(k, k, cache, cache.copy(), slot_mapping=[5, 0, 7], kv_dtype=kv_dtype if kv_dtype == "bfloat16" else None)
    assert same_bits(cache[0, [5, 0, 7]].view(np.uint16), testing.round_to(k, kv_dtype).view(np.uint16))


def test_keys_alone():
    """MLA: the values are part of the keys."""
    k, cache = new_tokens(3)[0], np.zeros((4, 8, KV_HEADS, DIM), np.float32)
    blitz_attn.append_paged_kv(k, None, cache, None, slot_mapping=[3, 9, 12])
    assert same_bits(cache.reshape(-1, KV_HEADS, DIM)[[3, 9, 12]], k)
    assert np.count_nonzero(cache) == k.size
    with pytest.raises(ValueError, match="^v: expected values for v_cache, got none"):
        blitz_attn.append_paged_kv(k, None, cache, cache.copy(), slot_mapping=[3, 9, 12])


# How one array holds K and V: (its shape, the axis that tells them apart)
IN_ONE_ARRAY = {"before pages": (2, 4, 8, 2, 16), "in pages": (4, 2, 8, 2, 16), "in tokens": (4, 8, 2, 2, 16), "in rows": (4, 8, 2, 2, 16), "behind": (4, 8, 2, 32)}


@pytest.mark.parametrize(("how", "shape"), IN_ONE_ARRAY.items(), ids=IN_ONE_ARRAY)
def test_caches_in_one_array(how, shape):
    rng = np.random.default_rng(0)
    k, v = (rng.standard_normal((5, 2, 16), dtype=np.float32) for _ in range(2))
    both, slots = np.zeros(shape, np.float32), np.array([3, 9, 12, 0, 31])
    axis = {"before pages": 0, "in pages": 1, "in tokens": 2, "in rows": 3}.get(how)
    index = [(slice(None),) * axis + (i,) for i in range(2)] if axis is not None else [(..., slice(16)), (..., slice(16, None))]
    k_cache, v_cache = both[index[0]], both[index[1]]
    for first, second in ((k_cache, v_cache), (v_cache, k_cache)):
        blitz_attn.append_paged_kv(k, v, first, second, slot_mapping=slots)
        for cache, tokens in ((first, k), (second, v)):
            assert same_bits(np.ascontiguousarray(cache)[slots // 8, slots % 8], tokens)


def test_a_plan_appends_its_queries_tokens():
    case = testing.make_paged(3, 4, KV_HEADS, [9, 20, 3], 8, DIM, V_DIM, kv_dtype="int8", kv_layout="HND")
    for options in ({"q_lens": [4, 0, 3]}, {}, {"kv_split": 16}):
        plan = blitz_attn.PagedPlan(case.block_tables, case.seq_lens, page_size=8, kv_layout="HND", **options)
        tokens = new_tokens(plan.num_queries)
        by_call, by_plan = empty_like(case), empty_like(case)
        where = {"block_tables": case.block_tables, "seq_lens": case.seq_lens, "q_lens": options.get("q_lens"), "kv_layout": "HND"}
        blitz_attn.append_paged_kv(*tokens, *by_call[0], **by_call[1], **where)
        plan.append(*tokens, *by_plan[0], **by_plan[1])
        assert_same([*by_plan[0], *by_plan[1].values()], [*by_call[0], *by_call[1].values()])
    caches, scales = empty_like(case)
    begun = blitz_attn.PagedPlan(case.block_tables, case.seq_lens, page_size=8, kv_layout="HND", q_begin=[0, 0, 0])
    with pytest.raises(ValueError, match="^q_begin: expected none where tokens are written"):
        begun.append(*new_tokens(3), *caches, **scales)
    plan = blitz_attn.PagedPlan(case.block_tables, case.seq_lens, page_size=8, kv_layout="HND")
    with pytest.raises(ValueError, match="^k: expected 3 tokens as the plan has them, got 2"):
        plan.append(*new_tokens(2), *caches, **scales)
    with pytest.raises(ValueError, match="^k_cache: expected pages of 4 tokens as the plan has them, got pages of 8"):
        blitz_attn.PagedPlan(np.array([[0]]), [3], page_size=4, kv_layout="HND").append(*new_tokens(1), *caches, **scales)


def test_steps_by_plans_alone(isa_level):
    """A server's steps over an 8-bit cache: new tokens and summaries, chosen pages, and attention, by the plan of a step as by the functions."""
    tables, summary_tables = np.array([[4, 0, 6, 2, 9], [1, 3, 5, 7, 8]]), np.array([[2, 0], [1, 3]])
    by_call, by_plan = (
        {
            "caches": [np.zeros((10, 8, KV_HEADS, dim), np.int8) for dim in (DIM, V_DIM)],
            "scales": {name: np.zeros((10, 8, KV_HEADS), np.float32) for name in ("k_scale", "v_scale")},
            "summaries": {name: np.zeros((4, 3, KV_HEADS, DIM), np.float32) for name in ("maxblocks", "minblocks", "meanblocks")},
        }
        for _ in range(2)
    )
    lens = np.array([0, 0])
    for new in ([29, 3], [1, 1], [3, 0], [1, 2]):
        lens = lens + new
        tokens = new_tokens(sum(new), seed=lens[0])
        q = np.random.default_rng(lens[0]).standard_normal((sum(new), 4, DIM), dtype=np.float32)
        call, plan = by_call, blitz_attn.PagedPlan(tables, lens, page_size=8, q_lens=new)
        where = {"block_tables": tables, "seq_lens": lens, "q_lens": new, "metadata_block_tables": summary_tables}
        blitz_attn.append_paged_kv(*tokens, *call["caches"], **call["scales"], **call["summaries"], **where)
        plan.append(*tokens, *by_plan["caches"], **by_plan["scales"], **by_plan["summaries"], metadata_block_tables=summary_tables)
        for method in ("quest", "mean"):
            how, sources = {"method": method, "k": 3, "return_lse": True, "return_selected": True}, []
            for side in (by_call, by_plan):
                high, low, mean = side["summaries"].values()
                sources.append(((high, low) if method == "quest" else mean, summary_tables))
            expected = blitz_attn.select_and_attend(q, *call["caches"], tables, lens, *sources[0], q_lens=new, **call["scales"], **how)
            assert_same(plan.select_and_attend(q, *by_plan["caches"], *sources[1], **by_plan["scales"], **how), expected)
        for name in ("scales", "summaries"):
            assert_same(by_plan[name].values(), by_call[name].values())


def test_a_plan_refuses_summaries_before_anything_is_written():
    case = testing.make_paged(2, 4, KV_HEADS, [9, 20], 8, DIM, DIM)
    caches, k = empty_like(case)[0], new_tokens(2)[0]
    high, tables = np.full((2, 4, KV_HEADS, DIM), 7, np.float32), np.array([[0], [1]])
    page = int(case.block_tables[1, 2])
    plan = blitz_attn.PagedPlan(case.block_tables, case.seq_lens, page_size=8)
    coarse = blitz_attn.PagedPlan(case.block_tables, case.seq_lens, page_size=16)
    begun = blitz_attn.PagedPlan(case.block_tables, case.seq_lens, page_size=8, q_begin=[8, 19])
    before, good = [x.copy() for x in caches], {"maxblocks": high, "metadata_block_tables": tables}
    for refused, error, sentence, given in (
        (plan, ValueError, "metadata_block_tables: expected the tables of maxblocks, minblocks and meanblocks, got None", {"meanblocks": high}),
        (plan, ValueError, "maxblocks: expected a summary to write, got none", {"metadata_block_tables": tables}),
        (plan, ValueError, r"metadata_block_tables: expected shape \(2, W\), got \(1, 1\)", good | {"metadata_block_tables": tables[1:]}),
        (plan, ValueError, "metadata_block_tables: expected pages that nothing else uses, got 1, which is listed twice", good | {"metadata_block_tables": tables * 0 + 1}),
        (plan, ValueError, f"metadata_block_tables: expected pages that nothing else uses, got {page}, which holds keys",
         {"maxblocks": caches[0], "metadata_block_tables": np.array([[page], [1]])}),
        (plan, ValueError, "meanblocks: expected memory of its own, got an array that overlaps k", {"meanblocks": k, "metadata_block_tables": tables}),
        (plan, TypeError, "maxblocks: expected dtype float32 like k_cache, got float64", good | {"maxblocks": high.astype(float)}),
        (coarse, ValueError, "k_cache: expected pages of 16 tokens as the plan has them, got pages of 8", good),
        (begun, ValueError, "q_begin: expected none where tokens are written, which are the last of their requests, got some", good),
    ):  # fmt: skip
        with pytest.raises(error, match=f"^{sentence}"):
            refused.append(k, k.copy(), *caches, **given)
        assert_same(caches, before)
        assert (high == 7).all()


def test_tokens_without_a_slot_are_not_read():
    case = testing.make_paged(2, 4, KV_HEADS, [9, 20], 8, DIM, V_DIM, kv_dtype="int8")
    k, v = new_tokens(3)
    k[1] = np.nan
    expected = append_both((np.delete(k, 1, 0), np.delete(v, 1, 0)), case, slot_mapping=[4, 1])
    caches, scales = empty_like(case)
    blitz_attn.append_paged_kv(k, v, *caches, slot_mapping=[4, -1, 1], **scales)
    assert_same([*caches, *scales.values()], expected)


# ---- Refusals -----------------------------------------------------------------------------------------------------

REFUSED = {
    "slot twice": ({"slot_mapping": [3, 4, 3]}, "slot_mapping: expected each slot once, got slot 3 twice"),
    "slot too large": ({"slot_mapping": [0, 1, 10**6]}, "slot_mapping: expected slots from 0 to "),
    "slot below -1": ({"slot_mapping": [0, 1, -2]}, "slot_mapping: expected slots from 0 to "),
    "slots too few": ({"slot_mapping": [0, 1]}, "slot_mapping: expected 3 entries"),
    "no place": ({}, "slot_mapping: expected exactly one of slot_mapping and block_tables, got neither"),
    "two places": ({"slot_mapping": [0, 1, 2], "block_tables": [[0]], "seq_lens": [3]}, "slot_mapping: expected exactly one of slot_mapping and block_tables, got both"),
    "page twice": ({"block_tables": [[1], [1]], "seq_lens": [1, 2], "q_lens": [1, 2]}, "block_tables: expected each slot once"),
    "page out of range": ({"block_tables": [[0, 99]], "seq_lens": [10], "q_lens": [3]}, "block_tables: expected pages from 0 to "),
    "page below 0": ({"block_tables": [[0, -1]], "seq_lens": [10], "q_lens": [3]}, "block_tables: expected pages from 0 to "),
    "length beyond the table": ({"block_tables": [[0, 1]], "seq_lens": [17], "q_lens": [3]}, "seq_lens: expected "),
    "more new than there are": ({"block_tables": [[0, 1]], "seq_lens": [2], "q_lens": [3]}, "q_lens: expected "),
    "sum of q_lens": ({"block_tables": [[0, 1]], "seq_lens": [9], "q_lens": [2]}, "q_lens: expected lengths that add up"),
}


def test_refuses_one_array_for_two():
    case = testing.make_paged(2, 4, KV_HEADS, [9, 20], 8, DIM, DIM, kv_dtype="int8")
    caches, scales = empty_like(case)
    k, k_scale, other = new_tokens(2)[0], scales["k_scale"], scales["v_scale"]
    with pytest.raises(ValueError, match="^v_scale: expected memory of its own, got an array that overlaps k_scale"):
        blitz_attn.append_paged_kv(k, k, *caches, slot_mapping=[3, 4], k_scale=k_scale, v_scale=k_scale)
    with pytest.raises(ValueError, match="^v_cache: expected memory of its own, got an array that overlaps k_cache"):
        blitz_attn.append_paged_kv(k, k, caches[0], caches[0], slot_mapping=[3, 4], k_scale=k_scale, v_scale=other)
    with pytest.raises(ValueError, match="^v_cache: expected memory of its own, got an array that overlaps k_cache"):
        blitz_attn.append_paged_kv(k[..., :20], k[..., :20], caches[0][..., :20], caches[0][..., 4:], slot_mapping=[3, 4], k_scale=k_scale, v_scale=other)
    assert not caches[0].any()
    assert (k_scale == 7).all()


def test_refuses_strides_whose_gaps_do_not_stay_gaps():
    """Token rows of one array lie in gaps of the other; those of another page do not."""
    memory = np.zeros(500, np.float32)
    k_cache, v_cache = (np.lib.stride_tricks.as_strided(memory[at:], (2, 2, 1, 10), (600, 400, 40, 4)) for at in (0, 50))
    assert np.shares_memory(k_cache, v_cache)
    new = np.ones((1, 1, 10), np.float32)
    with pytest.raises(ValueError, match="^v_cache: expected memory of its own, got an array that overlaps k_cache"):
        blitz_attn.append_paged_kv(new, new, k_cache, v_cache, slot_mapping=[0])


def test_refuses_given_scales_that_are_written():
    case = testing.make_paged(2, 4, KV_HEADS, [9, 20], 8, DIM, DIM, kv_dtype="int8")
    caches, scales = empty_like(case)
    k, written = new_tokens(2)[0], scales["v_scale"]
    with pytest.raises(ValueError, match="^v_scale: expected memory of its own, got an array that overlaps k_scale"):
        blitz_attn.append_paged_kv(k, k, *caches, slot_mapping=[3, 4], k_scale=written[0, 0], v_scale=written)
    within = caches[0].reshape(-1)[:8].view(np.float32)
    within[:] = 1
    with pytest.raises(ValueError, match="^k_scale: expected memory of its own, got an array that overlaps k_cache"):
        blitz_attn.append_paged_kv(k, k, *caches, slot_mapping=[3, 4], k_scale=within, v_scale=1.0)
    assert (written == 7).all()


SENTENCES = {
    "no cache for v": (lambda k, c: {"v": k, "v_cache": None}, ValueError, "^v_cache: expected a cache for v, got none"),
    "scale without v": (lambda k, c: {"v": None, "v_cache": None, "v_scale": 1.0}, ValueError, "^v_scale: expected none without v, got some"),
    "dtype of the cache": (lambda k, c: {"kv_dtype": "float16"}, TypeError, "^k_cache: expected float16 as kv_dtype says, got float32"),
}


@pytest.mark.parametrize("what", SENTENCES)
def test_sentences(what):
    changes, error, sentence = SENTENCES[what]
    k, cache = new_tokens(2)[0], np.zeros((4, 8, KV_HEADS, DIM), np.float32)
    arguments = {"k": k, "v": k, "k_cache": cache, "v_cache": cache.copy(), "slot_mapping": [3, 4]}
    with pytest.raises(error, match=sentence):
        blitz_attn.append_paged_kv(**arguments | changes(k, cache))
    assert not cache.any()


@pytest.mark.parametrize(
    ("changes", "error", "sentence"),
    [
        ({"seq_lens": [-1]}, ValueError, r"seq_lens: expected lengths from 0 to what the table's 3 pages of 8 tokens hold, got -1 at \[0\]"),
        ({"kv_dtype": "int8"}, TypeError, "k_cache: expected int8 as kv_dtype says, got float32"),
        ({"kv_dtype": "int9"}, ValueError, "kv_dtype: expected 'float32', .*, got 'int9'"),
        ({"dtype": "int9"}, ValueError, "dtype: expected 'float32', .*, got 'int9'"),
    ],
    ids=str,
)
def test_sentences_beside_summaries(changes, error, sentence):
    """By the caller's names, where the summaries are what refuses."""
    case = testing.make_paged(1, 4, KV_HEADS, [9], 8, DIM, DIM)
    caches, k = empty_like(case)[0], new_tokens(1)[0]
    where = {"block_tables": case.block_tables, "seq_lens": case.seq_lens, "metadata_block_tables": np.array([[0]])}
    before = [x.copy() for x in caches]
    with pytest.raises(error, match=f"^{sentence}$"):
        blitz_attn.append_paged_kv(k, k, *caches, maxblocks=np.zeros((1, 4, KV_HEADS, DIM), np.float32), **where | changes)
    assert_same(caches, before)


def test_refuses_summaries_over_values():
    case = testing.make_paged(1, 4, KV_HEADS, [9], 8, DIM, DIM)
    caches, k = empty_like(case)[0], new_tokens(1)[0]
    where = {"block_tables": case.block_tables, "seq_lens": case.seq_lens, "metadata_block_tables": np.array([[0]])}
    with pytest.raises(ValueError, match="^maxblocks: expected memory of its own, got an array that overlaps v_cache"):
        blitz_attn.append_paged_kv(k, k, *caches, maxblocks=caches[1], **where)


@pytest.mark.parametrize("kv_dtype", ["float32", "int8"])
@pytest.mark.parametrize("what", REFUSED)
def test_refusals_leave_the_cache(what, kv_dtype):
    options, sentence = REFUSED[what]
    options = {name: np.array(value) for name, value in options.items()}
    case = testing.make_paged(2, 4, KV_HEADS, [9, 20], 8, DIM, V_DIM, kv_dtype=kv_dtype)
    caches, scales = empty_like(case)
    before = [x.copy() for x in (*caches, *scales.values())]
    with pytest.raises(ValueError, match="^" + sentence):
        blitz_attn.append_paged_kv(*new_tokens(3), *caches, **scales, **options)
    assert_same([*caches, *scales.values()], before)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
@pytest.mark.parametrize("number", [np.nan, -np.nan, np.inf, -np.inf])
def test_refuses_what_is_not_finite(number, dtype):
    """The sentence names the first such number of the tokens that are written, whichever thread has found one."""
    tokens = 300
    case = testing.make_paged(2, 4, KV_HEADS, [256, 256], 8, DIM, V_DIM, kv_dtype="int8")
    caches, scales = empty_like(case)
    k, v = new_tokens(tokens, dtype)
    for place in [(3, 0, 0), (70, 1, 5), (70, 1, 7), (200, 0, 3), (299, 1, 1)]:
        v[place] = testing.round_to(np.array(number), dtype)  # bits, where ml_dtypes is missing
    slots = np.arange(tokens)
    slots[3] = -1
    for threads in (1, 3):
        with pytest.raises(ValueError, match=rf"^v: expected finite numbers to quantise, within float32's range, got {number} at \[70, 1, 5\]$"):
            blitz_attn.append_paged_kv(k, v, *caches, slot_mapping=slots, num_threads=threads, **scales, **bits_option(v))
        assert not caches[0].any()
