"""Writing new tokens into paged caches, by slots, tables and plans, with and without summaries: against the reference,
bit for bit except for means.

Dtypes, views, kinds of arrays, scales and pieces are drawn together in tests/fuzz/cache_problems.py.
"""

import numpy as np
import pytest

import blitz_attn
from blitz_attn import reference, testing
from cases import DTYPES, assert_same, bits_option, same_bits
from cases_paged import CACHE_DTYPES

KV_HEADS, DIM, V_DIM = 2, 24, 17
SUMMARIES = ("maxblocks", "minblocks", "meanblocks")


def empty_like(case, fill=7):
    """Caches and scales like the case's, without tokens. Scales that nothing writes keep `fill`."""
    caches = [np.zeros_like(x) for x in case[1:3]]
    scales = {name: np.full_like(case.options[name], fill) for name in ("k_scale", "v_scale") if name in case.options}
    return caches, scales


def names_of(case):
    return {name: case.options[name] for name in ("kv_layout", "kv_dtype") if name in case.options}


def new_tokens(count, dtype="float32", seed=0):
    rng = np.random.default_rng(seed)
    return [testing.round_to(rng.standard_normal((count, KV_HEADS, dim)), dtype) for dim in (DIM, V_DIM)]


def append_both(tokens, case, **options):
    """Caches and scales after the operation, which has been compared with the reference."""
    results = []
    for op in (blitz_attn.append_paged_kv, reference.append_paged_kv):
        caches, scales = empty_like(case)
        assert op(*tokens, *caches, **scales, **names_of(case), **options) is None
        results.append([*caches, *scales.values()])
    assert_same(*results)
    return results[0]


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("kv_dtype", [*CACHE_DTYPES, "float64"])
@pytest.mark.parametrize("q_lens", [[1, 0, 37, 20], [0, 0, 5, 1], [1, 0, 9, 0]], ids=str)
def test_by_tables(q_lens, kv_dtype, kv_layout):
    """The newest tokens of each request are written, and the rest of the cache stays."""
    case = testing.make_paged(4, 4, KV_HEADS, [1, 0, 37, 20], 8, DIM, V_DIM, kv_dtype=kv_dtype, kv_layout=kv_layout)
    where = {"block_tables": case.block_tables, "seq_lens": case.seq_lens, "q_lens": q_lens}
    written = append_both(new_tokens(sum(q_lens)), case, **where)
    assert any(x.any() for x in written[:2])
    assert_same(append_both(new_tokens(sum(q_lens)), case, block_tables=case.csr(), q_lens=q_lens), written)


@pytest.mark.parametrize("kv_dtype", CACHE_DTYPES)
@pytest.mark.parametrize("dtype", ["float32", "float16", "float64"])
def test_by_slots(dtype, kv_dtype):
    """New tokens may be of another dtype than the cache: float64 is rounded once. Tokens without a slot are not read."""
    case = testing.make_paged(2, 4, KV_HEADS, [9, 20], 8, DIM, V_DIM, kv_dtype=kv_dtype)
    slots, (k, v) = np.random.default_rng(2).permutation(len(case.k_cache) * 8)[:11], new_tokens(11, dtype)
    written = append_both((k, v), case, slot_mapping=slots.astype(np.int32))
    left_out = [0, 4, 7]
    expected = append_both((np.delete(k, left_out, 0), np.delete(v, left_out, 0)), case, slot_mapping=np.delete(slots, left_out))
    slots[left_out], k[left_out] = -1, np.nan
    assert_same(append_both((k, v), case, slot_mapping=slots), expected)
    assert not same_bits(written[0], expected[0])


@pytest.mark.parametrize("by", ["tables", "plan", "plan of a triple"])
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize(("kv_dtype", "as_bits"), [*((dtype, False) for dtype in DTYPES), ("bfloat16", True)])
def test_summaries_follow(kv_dtype, as_bits, kv_layout, by):
    """After every append, the summaries equal those of the whole cache, and, up to rounding of means, those of the reference."""
    case = testing.make_paged(2, 4, KV_HEADS, [30, 23], 4, DIM, V_DIM, kv_dtype, kv_dtype, kv_layout, poison=False)

    def given(x):
        return x.view(np.uint16) if as_bits else x

    caches, twins = ([given(x) for x in empty_like(case)[0]] for _ in range(2))
    bits, named = bits_option(caches[0]), names_of(case) | ({"kv_dtype": "bfloat16"} if as_bits else {})
    tables = np.array([[4, 0, 2], [1, 5, 3]], np.int32)
    empty = given(testing.round_to(np.full((6, 3, KV_HEADS, DIM), np.nan), kv_dtype))
    got, exact, twin = ({name: empty.copy() for name in SUMMARIES} for _ in range(3))
    ends = np.array([0, 0])
    for n, new in enumerate([[5, 4], [0, 1], [1, 0], [13, 7], [1, 1], [1, 1], [9, 9]]):
        ends = ends + new
        tokens = [given(x) for x in new_tokens(sum(new), kv_dtype, seed=n)]
        where = {"block_tables": case.block_tables, "seq_lens": ends, "q_lens": new}
        reference.append_paged_kv(*tokens, *twins, **twin, metadata_block_tables=tables, **where, **named)
        if by == "tables":
            blitz_attn.append_paged_kv(*tokens, *caches, **got, metadata_block_tables=tables, **where, **named)
        else:
            requests = (case.block_tables, ends) if by == "plan" else (case._replace(seq_lens=ends).csr(), None)
            plan = blitz_attn.PagedPlan(*requests, page_size=4, q_lens=new, **named)
            plan.append(*tokens, *caches, **got, metadata_block_tables=tables)
        blitz_attn.quest_prefill_metadata(caches[0], case.block_tables, ends, tables, **exact, kv_layout=kv_layout, **bits)
        assert_same([*caches, *got.values()], [*caches, *exact.values()])
        assert_same([*caches, got["maxblocks"], got["minblocks"]], [*twins, twin["maxblocks"], twin["minblocks"]])
        means = [testing.to_float64(x["meanblocks"], kv_dtype) for x in (got, twin)]
        np.testing.assert_allclose(*means, rtol={"float32": 1e-6, "float64": 1e-12, "float16": 1e-3, "bfloat16": 1e-2}[kv_dtype], atol=1e-6)


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
    """A given scale, or one per head, is used as it is: values beyond its range become the dtype's largest number. Attention takes such scales."""
    case = testing.make_paged(2, 4, KV_HEADS, [9, 20], 8, DIM, V_DIM, kv_dtype=kv_dtype, kv_layout=kv_layout)
    where = {"block_tables": case.block_tables, "seq_lens": case.seq_lens, "q_lens": [9, 20]} | names_of(case)
    tokens = [3 * x for x in new_tokens(29)]
    assert (np.abs(tokens[0]) > {"int8": 127, "float8_e4m3": 448}[kv_dtype] * np.broadcast_to(scale, KV_HEADS)[:, None]).any()
    caches, twins = empty_like(case)[0], empty_like(case)[0]
    for op, into in ((blitz_attn.append_paged_kv, caches), (reference.append_paged_kv, twins)):
        op(*tokens, *into, k_scale=scale, v_scale=scale, **where)
    assert_same(caches, twins)
    whole = np.empty_like(case.options["k_scale"])
    whole[...] = scale if kv_layout == "NHD" else np.reshape(scale, (-1, 1))
    for op in (blitz_attn.paged_attention, reference.paged_attention):
        each, one = (op(case.q, *caches, *case.arrays[3:], k_scale=x, v_scale=x, **names_of(case)) for x in (whole, scale))
        assert same_bits(each, one)


@pytest.mark.parametrize(("kv_dtype", "tie"), [("bfloat16", 2.0**-8), ("float16", 2.0**-11)])
def test_float64_is_rounded_once(kv_dtype, tie):
    """A float64 that float32 would round to a tie between two 16-bit numbers is no tie itself, and is rounded to the nearer of the two."""
    numbers = [1 + tie, 1 + tie + 2.0**-40, 1 + 3 * tie - 2.0**-40, -1 - tie - 2.0**-40, 2.0**-149, -(2.0**-149), 1e300, -1e-300, np.inf]
    k = np.resize(numbers, (3, KV_HEADS, DIM))
    cache = np.zeros((1, 8, KV_HEADS, DIM), np.uint16 if kv_dtype == "bfloat16" else np.float16)
    blitz_attn.append_paged_kv(k, k, cache, cache.copy(), slot_mapping=[5, 0, 7], kv_dtype=kv_dtype if kv_dtype == "bfloat16" else None)
    assert same_bits(cache[0, [5, 0, 7]].view(np.uint16), testing.round_to(k, kv_dtype).view(np.uint16))


def test_keys_alone():
    """Keys are appended without values, as in MLA, whose values are part of the keys."""
    k, cache = new_tokens(3)[0], np.zeros((4, 8, KV_HEADS, DIM), np.float32)
    blitz_attn.append_paged_kv(k, None, cache, None, slot_mapping=[3, 9, 12])
    assert same_bits(cache.reshape(-1, KV_HEADS, DIM)[[3, 9, 12]], k)
    assert np.count_nonzero(cache) == k.size
    with pytest.raises(ValueError, match="^v: expected values for v_cache, got none"):
        blitz_attn.append_paged_kv(k, None, cache, cache.copy(), slot_mapping=[3, 9, 12])


# How one array holds K and V: its shape, and the indices of K and of V.
IN_ONE_ARRAY = {
    "before pages": ((2, 4, 8, 2, 16), (0,), (1,)),
    "in pages": ((4, 2, 8, 2, 16), np.s_[:, 0], np.s_[:, 1]),
    "in tokens": ((4, 8, 2, 2, 16), np.s_[:, :, 0], np.s_[:, :, 1]),
    "in rows": ((4, 8, 2, 2, 16), np.s_[:, :, :, 0], np.s_[:, :, :, 1]),
    "behind": ((4, 8, 2, 32), np.s_[..., :16], np.s_[..., 16:]),
}


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("name", IN_ONE_ARRAY)
def test_caches_in_one_array(name, turned):
    shape, *places = IN_ONE_ARRAY[name]
    both, slots = np.zeros(shape, np.float32), np.array([3, 9, 12, 0, 31])
    caches = [both[at] for at in (places[::-1] if turned else places)]
    tokens = np.random.default_rng(0).standard_normal((2, 5, 2, 16), dtype=np.float32)
    blitz_attn.append_paged_kv(*tokens, *caches, slot_mapping=slots)
    for cache, written in zip(caches, tokens, strict=True):
        assert same_bits(np.ascontiguousarray(cache)[slots // 8, slots % 8], written)


def test_steps_by_plans_alone(isa_level):
    """Steps of a server over an 8-bit cache (new tokens and summaries, chosen pages, attention) give the same bits by plans as by functions."""
    tables, summary_tables = np.array([[4, 0, 6, 2, 9], [1, 3, 5, 7, 8]]), np.array([[2, 0], [1, 3]])
    by_call, by_plan = (
        {
            "caches": [np.zeros((10, 8, KV_HEADS, dim), np.int8) for dim in (DIM, V_DIM)],
            "scales": {name: np.zeros((10, 8, KV_HEADS), np.float32) for name in ("k_scale", "v_scale")},
            "summaries": {name: np.zeros((4, 3, KV_HEADS, DIM), np.float32) for name in SUMMARIES},
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
        for method, names in (("quest", SUMMARIES[:2]), ("mean", SUMMARIES[2:])):
            how = {"method": method, "k": 3, "return_lse": True, "return_selected": True}
            sources = [tuple(side["summaries"][name] for name in names) for side in (by_call, by_plan)]
            sources = [source if len(source) > 1 else source[0] for source in sources]
            expected = blitz_attn.select_and_attend(
                q, *call["caches"], tables, lens, sources[0], summary_tables, q_lens=new, **call["scales"], **how
            )
            assert_same(plan.select_and_attend(q, *by_plan["caches"], sources[1], summary_tables, **by_plan["scales"], **how), expected)
        for name in ("scales", "summaries"):
            assert_same(by_plan[name].values(), by_call[name].values())


@pytest.mark.parametrize("summarised", [False, True])
def test_a_plan_of_stretches_appends_nothing(summarised):
    high = np.zeros((2, 4, KV_HEADS, DIM), np.float32)
    summaries = {"maxblocks": high, "metadata_block_tables": np.array([[0], [1]])} if summarised else {}
    case = testing.make_paged(2, 4, KV_HEADS, [9, 20], 8, DIM, V_DIM)
    caches, plan = empty_like(case)[0], blitz_attn.PagedPlan(case.block_tables, case.seq_lens, page_size=8, q_begin=[8, 19])
    with pytest.raises(ValueError, match="^q_begin: expected none, since the tokens that are written are the last .*, got some"):
        plan.append(*new_tokens(2), *caches, **summaries)
    assert not any(x.any() for x in (*caches, high))


# ---- Parts of one array -------------------------------------------------------------------------------------------------


def parts_of_slots(parts, pages=5, heads=2):
    """Views of one array of bytes. Each page and head has a slot there, which holds the given parts (shape, dtype), one after the other."""
    sizes = [int(np.prod(shape)) * np.dtype(dtype).itemsize for shape, dtype in parts]
    slots = np.zeros((pages, heads, sum(sizes)), np.uint8)
    ends = np.cumsum(sizes)
    return [
        slots[:, :, end - size : end].view(dtype).reshape(pages, heads, *shape)
        for (shape, dtype), size, end in zip(parts, sizes, ends, strict=True)
    ]


def test_that_keys_values_scales_and_summaries_may_lie_in_one_array():
    rng = np.random.default_rng(0)
    rows, dim = 8, 16
    kinds = [((rows, dim), np.int8)] * 2 + [((rows,), np.float32)] * 2 + [((dim,), np.float32)] * 2
    views = parts_of_slots(kinds)
    assert all(np.shares_memory(x, views[0].base) for x in views)
    k, v = rng.standard_normal((2, 11, 2, dim), dtype=np.float32)
    tables = np.array([[3, 0, 4]])
    for k_cache, v_cache, k_scale, v_scale, largest, smallest in (views, [x.copy() for x in views]):
        summaries = {"maxblocks": largest[:, None], "minblocks": smallest[:, None], "metadata_block_tables": tables}
        blitz_attn.append_paged_kv(
            k, v, k_cache, v_cache, block_tables=tables, seq_lens=[19], q_lens=[11], kv_layout="HND", k_scale=k_scale, v_scale=v_scale, **summaries
        )
        written = blitz_attn.dequantize_kv(k_cache, k_scale)[[0, 4, 4, 4], :, [7, 0, 1, 2]]
        assert np.abs(written - k[[7, 8, 9, 10]]).max() < 0.05
        assert same_bits(largest[4], blitz_attn.dequantize_kv(k_cache, k_scale)[4, :, :3].max(axis=1))
        found = [x.copy() for x in (k_cache, v_cache, k_scale, v_scale, largest, smallest)]
        if k_cache is views[0]:
            first = found
    for mine, expected in zip(first, found, strict=True):
        assert same_bits(mine, expected)


def test_that_no_accepted_summaries_share_memory_with_keys():
    rng = np.random.default_rng(1)
    memory, accepted = np.zeros(4096, np.float32), 0
    for _ in range(400):
        steps = [int(rng.choice([8, 16, 24, 32, 64, 128, 256])) for _ in range(6)]
        begins = rng.integers(0, 256, 2) * 8
        k_cache = np.lib.stride_tricks.as_strided(memory[begins[0] :], (3, 2, 2, 8), [4 * x for x in (*steps[:3], 1)])
        largest = np.lib.stride_tricks.as_strided(memory[begins[1] :], (3, 1, 2, 8), [4 * x for x in (steps[3], 8, steps[4], 1)])
        try:
            blitz_attn.quest_prefill_metadata(k_cache, np.array([[0, 1, 2]]), [6], np.array([[2, 0, 1]]), largest, None)
        except ValueError:
            continue
        accepted += 1
        assert not np.shares_memory(k_cache, largest)
    assert accepted > 20
