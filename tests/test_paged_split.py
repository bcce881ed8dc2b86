"""Paged attention in fixed chunks: the bits of chunks that are attended one by one and merged by the tree, and right by the reference."""

import numpy as np
import pytest

import blitz_attn
from blitz_attn import _formats, testing
from cases import bits_option, read_only_zeros, same_bits
from cases_paged import attend_by_plan, attend_paged, check_paged, plan_paged

LENS = [1, 0, 37, 130, 16, 257]
KINDS = [("float32", "float32"), ("float16", "float16"), ("bfloat16", "bfloat16"), ("bfloat16", "int8"), ("float64", "float64")]
RULES = [{}, {"window": 20}, {"softcap": 2.0, "scale": 0.3}, {"window": 0}]


def chunk_states(case, b, first, split, queries, begin, **options):
    """(out, lse) of each chunk of request b, attended as a request of its own, in the layout of merge_states."""
    tokens, size = int(case.seq_lens[b]), case.page_size
    outs, lses = [], []
    for c in range(max(1, -(-tokens // split))):
        here = min(split, tokens - c * split)
        pages = case.block_tables[b : b + 1, c * split // size : c * split // size + max(1, -(-here // size))]
        out, lse = blitz_attn.paged_attention(
            np.ascontiguousarray(case.q[first : first + queries]), case.k_cache, case.v_cache, np.ascontiguousarray(pages), [here],
            q_lens=[queries], q_begin=[begin - c * split], out_dtype=None if case.dtype == "float64" else "float32", return_lse=True, **options,
        )  # fmt: skip
        outs.append(np.ascontiguousarray(out.swapaxes(0, 1)[None]))
        lses.append(np.ascontiguousarray(lse.T[None]))
    return outs, lses


def by_hand(case, split, q_begin=None, sinks=None, **options):
    """(out, lse) of the call, chunk by chunk."""
    options = {**case.options, **options}
    q_lens = options.pop("q_lens", None)
    q_lens = [1] * len(case.seq_lens) if q_lens is None else q_lens
    results = []
    for b, (first, n) in enumerate(zip(np.cumsum([0, *q_lens]), q_lens, strict=False)):
        begin = int(case.seq_lens[b]) - n if q_begin is None else q_begin[b]
        out, lse = blitz_attn.merge_states_tree(*chunk_states(case, b, first, split, n, begin, **options))
        if sinks is not None:
            shares = np.ascontiguousarray(np.broadcast_to(sinks[None, :, None], lse.shape).astype(lse.dtype))
            out, lse = blitz_attn.merge_states(out, lse, np.zeros_like(out), shares)
        results.append((out[0].swapaxes(0, 1), lse[0].T))
    outs, lses = (np.concatenate(x) for x in zip(*results, strict=True))
    return outs, lses


def assert_same_as_by_hand(case, split, **options):
    got, lse = attend_paged(case, kv_split=split, **options)
    exact, exact_lse = by_hand(case, split, **options)
    assert same_bits(lse, np.ascontiguousarray(exact_lse))
    usual = exact if case.dtype == "float64" else _formats.converted(exact, "float32", case.dtype)
    assert got.tobytes() == np.ascontiguousarray(usual).tobytes()
    if case.dtype != "float64":
        wide = blitz_attn.paged_attention(*case.arrays, kv_split=split, out_dtype="float32", **{**case.options, **options})
        assert same_bits(wide, np.ascontiguousarray(exact))


@pytest.mark.sampled
@pytest.mark.parametrize("rules", RULES, ids=str)
@pytest.mark.parametrize("q_lens", [None, [1, 0, 4, 20, 16, 33]], ids=["one", "ragged"])
@pytest.mark.parametrize(("dtype", "kv_dtype"), KINDS)
def test_chunks_by_hand_give_the_same_bits(dtype, kv_dtype, q_lens, rules, isa_level):
    for n, split in enumerate((16, 64, 48, 512)):
        case = testing.make_paged(6, 6, 2, LENS, 16, (40, 64)[n % 2], (24, 64)[n % 2], dtype, kv_dtype, ("NHD", "HND")[n % 2], q_lens=q_lens)
        sinks = np.linspace(-1, 2, 6).astype(np.float32) if n % 2 else None
        assert_same_as_by_hand(case, split, sinks=sinks, **rules)


@pytest.mark.parametrize("rules", RULES[:2], ids=str)
def test_stretches_of_longer_requests(rules, isa_level):
    """q_begin: queries before, inside and behind the tokens of the cache, more of them than tokens."""
    case = testing.make_paged(6, 4, 2, LENS, 16, 32, 32, "bfloat16", "bfloat16", q_lens=[1, 2, 4, 20, 0, 9])
    begins = [3, 0, -2, 100, 5, 300]
    assert_same_as_by_hand(case, 32, q_begin=begins, **rules)
    check_paged(case, q_begin=begins, **rules)
    check_paged(case, q_begin=begins, kv_split=32, **rules)


@pytest.mark.parametrize(("dtype", "kv_dtype"), [*KINDS, ("float32", "float8_e4m3")])
def test_splits_are_right(dtype, kv_dtype):
    sinks = np.linspace(-1, 2, 6).astype(np.float32)
    for split, q_lens, rules in ((16, None, {}), (32, [1, 0, 4, 20, 16, 33], {"window": 25}), (64, [0, 0, 1, 2, 3, 9], {"sinks": sinks})):
        case = testing.make_paged(6, 6, 2, LENS, 16, 40, 24, dtype, kv_dtype, q_lens=q_lens)
        check_paged(case, kv_split=split, **rules)


def everything(case, rows):
    blocks = -(-case.seq_lens // case.page_size)
    selected = np.full((len(blocks), rows, int(blocks.max())), -1)
    rng = np.random.default_rng(5)
    for b, r in np.ndindex(*selected.shape[:2]):
        selected[b, r, : blocks[b]] = rng.permutation(blocks[b])
    return selected


@pytest.mark.parametrize("rows", [2, 6])
@pytest.mark.parametrize("q_lens", [None, [1, 0, 4, 20, 16, 33]], ids=["one", "ragged"])
def test_selected_blocks(q_lens, rows, isa_level):
    case = testing.make_paged(6, 6, 2, LENS, 16, 40, 24, "bfloat16", "bfloat16", q_lens=q_lens)
    whole = attend_paged(case, kv_split=48, window=60)
    got = attend_paged(case, everything(case, rows), kv_split=48, window=60)
    assert all(map(same_bits, got, whole))
    some = everything(case, rows)[:, :, ::2].copy()
    check_paged(case, some, kv_split=48)
    counts = (some >= 0).sum(axis=2)
    assert all(map(same_bits, attend_paged(case, some, kv_split=48), attend_paged(case, np.abs(some), counts=counts, kv_split=48)))


@pytest.mark.parametrize("q_lens", [[600, 0], [100, 31], [1, 2]], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_many_queries_and_chunks_give_the_same_bits(dtype, q_lens, isa_level):
    """Of so many heads, only some hundred queries have states at once: requests are cut, and chunks wait in the stack of their tree."""
    case = testing.make_paged(2, 64, 2, [600, 1170], 16, 16, 256, dtype, q_lens=q_lens)
    assert_same_as_by_hand(case, 64, sinks=np.linspace(-1, 2, 64).astype(np.float32))
    case.options["kv_ranges"] = np.sort(np.random.default_rng(1).integers(0, 1200, (sum(q_lens), 2)))
    some = everything(case, 2)[:, :, ::3].copy()
    got, whole = (attend_paged(case, some, kv_split=split) for split in (64, None))
    for a, b in zip(got, whole, strict=True):
        numbers = [testing.to_float64(x, "bfloat16") if x.dtype == np.uint16 else np.float64(x) for x in (a, b)]
        np.testing.assert_allclose(*numbers, atol=0.02 if dtype == "bfloat16" else 1e-4)


def test_one_chunk_is_the_usual_call():
    case = testing.make_paged(6, 6, 2, LENS, 16, 40, 24, "bfloat16", "bfloat16")
    assert all(map(same_bits, attend_paged(case, kv_split=512), attend_paged(case)))


@pytest.mark.parametrize("begin", [-(2**30) + 1, -(2**30) + 40, 2**30 - 1])
def test_queries_stand_as_far_away_as_without_chunks(begin):
    case = testing.make_paged(2, 2, 1, [32, 50], 16, 8)
    usual, split_up = (attend_paged(case, kv_split=split, q_begin=[begin, 3]) for split in (None, 16))
    for a, b in zip(usual, split_up, strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("q_begin", [None, [-5, 3]], ids=["last", "before the keys"])
@pytest.mark.parametrize("value", [1, np.inf])
@pytest.mark.parametrize("dtype", ["float32", "float16", "float64"])
def test_extreme_sinks_are_those_of_the_usual_call(dtype, value, q_begin):
    case = testing.make_paged(2, 2, 1, [32, 20], 16, 8, 8, dtype)
    case.v_cache[case.block_tables[0, 0]] *= value
    sinks = [np.inf, -np.inf, np.nan, 3.4e38, 3e38, 2.3e38, 1e30, -1e30, -2.3e38, -3e38]
    for sink in np.array(sinks, np.float32):
        for split in (16, 64):
            options = {"sinks": np.array([sink, 0], np.float32), "q_begin": q_begin, "return_lse": True}
            usual, split_up = (blitz_attn.paged_attention(*case.arrays, kv_split=n, **{**case.options, **options}) for n in (None, split))
            for a, b in zip(usual, split_up, strict=True):
                np.testing.assert_allclose(b, a, rtol=1e-2 if dtype == "float16" else 1e-5, atol=1e-5, err_msg=f"{sink} {split}")


def test_other_requests_and_threads_change_nothing(isa_level):
    case = testing.make_paged(6, 6, 2, LENS, 16, 64, 64, "float16", "float16")
    whole = attend_paged(case, kv_split=32)
    assert all(map(same_bits, whole, attend_paged(case, kv_split=32, num_threads=2)))
    for b in (2, 5):
        alone = blitz_attn.paged_attention(
            case.q[b : b + 1], case.k_cache, case.v_cache, case.block_tables[b : b + 1], case.seq_lens[b : b + 1], kv_split=32
        )
        assert same_bits(alone, whole[0][b : b + 1])


def test_tables_of_both_forms():
    case = testing.make_paged(6, 6, 2, LENS, 16, 32, 32, "float32", "float32")
    used = -(-case.seq_lens // 16)
    indptr, last = np.cumsum([0, *used]), np.where(used > 0, case.seq_lens - (used - 1) * 16, 0)
    indices = np.concatenate([row[:n] for row, n in zip(case.block_tables, used, strict=True)])
    whole = attend_paged(case, kv_split=32)
    assert all(map(same_bits, whole, attend_paged(case, tables=((indptr, indices, last),), kv_split=32)))


# ---- Plans --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rules", RULES, ids=str)
@pytest.mark.parametrize("q_lens", [None, [1, 0, 4, 20, 16, 33]], ids=["one", "ragged"])
@pytest.mark.parametrize(("dtype", "kv_dtype"), [*KINDS, ("float32", "float8_e4m3")])
def test_plans_give_the_same_bits(dtype, kv_dtype, q_lens, rules):
    for n, begins in enumerate((None, [3, 0, -2, 100, 5, 300])):
        case = testing.make_paged(6, 6, 2, LENS, 16, 40, 24, dtype, kv_dtype, ("NHD", "HND")[n], q_lens=q_lens)
        options = {"kv_split": (32, 48)[n], "sinks": np.linspace(-1, 2, 6).astype(np.float32) if n else None, **rules}
        if begins:
            options["q_begin"] = begins
        expected = attend_paged(case, **options)
        assert all(map(same_bits, attend_by_plan(case, **options), expected))
        assert all(map(same_bits, attend_by_plan(case, tables=(case.csr(),), **options), expected))
        some = everything(case, 2 + 4 * n)[:, :, ::2].copy()
        options["counts"] = (some >= 0).sum(axis=2)
        assert all(map(same_bits, attend_by_plan(case, some, **options), attend_paged(case, some, **options)))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_plans_give_unrounded_results(dtype):
    case = testing.make_paged(6, 6, 2, LENS, 16, 40, 24, dtype)
    options = {"kv_split": 32, "q_begin": np.arange(6) * 20, "out_dtype": "float32", **bits_option(case.q)}
    expected = blitz_attn.paged_attention(*case.arrays, **options)
    assert expected.dtype == np.float32
    assert same_bits(blitz_attn.PagedPlan(*case.arrays[3:], page_size=16, **options).attention(*case.arrays[:3]), expected)


def test_plans_of_nothing():
    for case in (
        testing.make_paged(0, 4, 2, [], 16, 24, 8),
        testing.make_paged(3, 4, 2, [0, 0, 0], 16, 24, 8),
        testing.make_paged(3, 4, 2, [5, 0, 7], 16, 24, 8, q_lens=[0, 0, 0]),
    ):
        for begin in ({}, {"q_begin": np.full(len(case.seq_lens), 4)}):
            assert all(map(same_bits, attend_by_plan(case, kv_split=32, **begin), attend_paged(case, kv_split=32, **begin)))


def test_a_plan_reads_what_it_was_made_from_once():
    """What becomes of the arrays that it was made from does not matter."""
    case = testing.make_paged(6, 6, 2, LENS, 16, 40, 24, q_lens=[1, 0, 4, 20, 16, 33])
    begins = np.array([3, 0, -2, 100, 5, 300])
    expected = attend_paged(case, q_begin=begins, kv_split=32)
    indptr, indices, last = case.csr()
    plans = [plan_paged(case, tables, q_begin=begins, kv_split=32)[0] for tables in (None, ((indptr, indices, last), None))]
    for x in (case.block_tables, case.seq_lens, case.options["q_lens"], begins, indptr, indices, last):
        x[...] = 1
    for plan in plans:
        assert all(map(same_bits, plan.attention(*case.arrays[:3], return_lse=True), expected))


def test_a_plan_names_pages_that_a_cache_lacks():
    """By the numbers of the caller's requests, not by those of chunks: in the constructor where the number of pages is known, else in the call."""
    case = testing.make_paged(3, 4, 2, [100, 33, 64], 16, 24)
    for page in (-1, len(case.k_cache)):
        wrong = case.block_tables.copy()
        wrong[0, 5] = page
        sentence = rf"^block_tables: expected pages from 0 to {len(case.k_cache) - 1} within .*, got {page} for page 5 of request 0$"
        with pytest.raises(ValueError, match=sentence):
            blitz_attn.paged_attention(*case.arrays[:3], wrong, case.seq_lens, kv_split=32)
        plan = blitz_attn.PagedPlan(wrong, case.seq_lens, page_size=16, kv_split=32)
        out = np.zeros_like(case.q)
        with pytest.raises(ValueError, match=sentence):
            plan.attention(*case.arrays[:3], out=out)
        assert not out.any()
        with pytest.raises(ValueError, match=sentence):
            blitz_attn.PagedPlan(wrong, case.seq_lens, page_size=16, num_pages=len(case.k_cache), kv_split=32)


def test_a_plan_has_pages_of_one_size():
    case = testing.make_paged(3, 4, 2, [20, 33, 64], 16, 24)
    plan = blitz_attn.PagedPlan(case.block_tables, case.seq_lens, page_size=8 * 16, kv_split=8 * 16)
    with pytest.raises(ValueError, match=r"^k_cache: expected pages of 128 tokens as the plan has them, got \("):
        plan.attention(*case.arrays[:3])


def test_a_plan_allocates_nothing_for_queries_that_no_call_brings():
    case = testing.make_paged(2, 4, 2, [30, 40], 16, 32, 32)
    plan = blitz_attn.PagedPlan(*case.arrays[3:], page_size=16, q_lens=[1 << 30, 1 << 30], q_begin=[0, 0], kv_split=16)
    assert plan.num_queries == 1 << 31
    with pytest.raises(ValueError, match=r"^q: expected 2147483648 queries as the plan has them, got \(2, 4, 32\)$"):
        plan.attention(*case.arrays[:3])


# ---- Refused ------------------------------------------------------------------------------------------------------


BAD = [
    ({"kv_split": 24}, ValueError, "kv_split: expected a positive multiple of the 16 tokens of a page, got 24"),
    ({"kv_split": 0}, ValueError, "kv_split: expected a positive multiple"),
    ({"kv_split": "16"}, TypeError, "kv_split: expected an integer, got str"),
    ({"q_begin": [1]}, ValueError, "q_begin: expected 2 entries, one per request, got"),
    ({"q_begin": [1, 2**40]}, ValueError, "q_begin: expected token numbers from"),
    ({"q_begin": [1, 2**30], "kv_split": 16}, ValueError,
     r"q_begin: expected token numbers from -1073741823 to 1073741823, got 1073741824 at \[1\]"),
    ({"q_begin": [1, -(2**30)]}, ValueError, r"q_begin: expected token numbers from -1073741823 to 1073741823, got -1073741824 at \[1\]"),
    ({"q_begin": [1.5, 2.0]}, TypeError, "q_begin: expected "),
    ({"q_begin": np.zeros(2), "kv_split": 16}, TypeError, "q_begin: expected integers, got float64"),
    ({"q_begin": "12", "kv_split": 16}, TypeError, "q_begin: expected a sequence of integers, got str$"),
    ({"q_begin": 3}, TypeError, "q_begin: expected a sequence of integers, got int"),
    ({"q_lens": [3, -1], "q_begin": [0, 0], "kv_split": 16}, ValueError, "q_lens: expected at least 0, got -1 at \\[1\\]"),
    ({"sinks": [1.0], "kv_split": 16}, ValueError, "sinks: expected "),
    ({"window": -2, "kv_split": 16}, ValueError, "window: expected a token count"),
    ({"out": np.zeros((2, 4, 31), np.float32), "kv_split": 16}, ValueError, "out: expected shape \\(2, 4, 32\\), got \\(2, 4, 31\\)"),
    ({"out": np.zeros((2, 4, 32), np.float16), "kv_split": 16}, TypeError, "out: expected dtype float32, got float16"),
    ({"out": read_only_zeros(2, 4, 32), "kv_split": 16}, ValueError, "out: expected a writable array, got a read-only one"),
    ({"out": np.zeros((2, 4, 64), np.float32)[..., ::2], "kv_split": 16}, ValueError, "out: expected a contiguous last axis"),
    ({"q_begin": [1], "kv_split": 16}, ValueError, "q_begin: expected 2 entries, one per request, got 1$"),
    ({"q_lens": [2], "kv_split": 16}, ValueError, "q_lens: expected 2 entries, one per request, got 1$"),
]


def call_by_plan(case, wrong, out=None, **options):
    """A plan is made only where what is wrong needs the arrays of a call to be found."""
    plan, per_call = plan_paged(case, **options)
    assert wrong not in ("kv_split", "q_begin", "q_lens")
    plan.attention(*case.arrays[:3], out=out, **per_call)


@pytest.mark.parametrize(("options", "kind", "sentence"), BAD, ids=lambda x: str(x)[:50])
def test_refused(options, kind, sentence):
    case = testing.make_paged(2, 4, 2, [30, 40], 16, 32, 32, "float32", "float32")
    with pytest.raises(kind, match=f"^{sentence}") as refused:
        blitz_attn.paged_attention(*case.arrays, **options)
    with pytest.raises(kind) as refused_by_plan:
        call_by_plan(case, sentence.partition(":")[0], **options)
    assert str(refused_by_plan.value) == str(refused.value)


@pytest.mark.parametrize(("tables", "seq_lens"), [(np.zeros((2, 4), int), [30, 2**30]), ((np.array([0, 1, 5]), np.zeros(5, int), np.array([30, 2**28])), None)])
def test_a_request_has_fewer_than_2_to_the_30_tokens(tables, seq_lens):
    with pytest.raises(ValueError, match=r"^seq_lens: expected lengths of at most 1073741823 tokens, got 1073741824 at \[1\]$"):
        blitz_attn.PagedPlan(tables, seq_lens, page_size=2**28, kv_split=2**28)


def test_outputs_have_memory_of_their_own():
    case = testing.make_paged(2, 4, 2, [30, 40], 16, 32, 32, "float32", "float32")
    with pytest.raises(ValueError, match="out: expected memory of its own"):
        blitz_attn.paged_attention(*case.arrays, kv_split=16, out=case.q)
    memory = np.zeros((2, 4, 33), np.float32)
    with pytest.raises(ValueError, match="lse: expected memory of its own, got an array that overlaps out"):
        blitz_attn.paged_attention(*case.arrays, kv_split=16, return_lse=True, out=(memory[..., :32], memory[..., 31]))


@pytest.mark.parametrize("name", ["k_scale", "v_scale", "sinks", "selected"])
@pytest.mark.parametrize("kv_split", [None, 16])
def test_no_output_lies_in_an_input(name, kv_split):
    case = testing.make_paged(2, 4, 2, [30, 40], 16, 32, 32, "float32", "int8")
    memory = np.zeros(4096, np.float32)
    scales = {x: np.ones(case.k_cache.shape[:3], np.float32) for x in ("k_scale", "v_scale")}
    inputs = {**scales, "sinks": memory[4:8], "selected": memory[16:20].view(np.int32).reshape(2, 2, 1)}
    place = {"sinks": memory[:8], "selected": memory[14:22]}.get(name, scales.get(name, memory).reshape(-1)[:8])
    with pytest.raises(ValueError, match=f"^lse: expected memory of its own, got an array that overlaps {name}$"):
        blitz_attn.paged_select_attention(
            *case.arrays, **inputs, kv_split=kv_split, return_lse=True, out=(np.zeros((2, 4, 32), np.float32), place.reshape(2, 4))
        )


@pytest.mark.parametrize("library", ["ml_dtypes", "torch"])
def test_dtype_objects_say_what_bits_of_outputs_are(library):
    bfloat16 = pytest.importorskip(library).bfloat16
    case = testing.make_paged(2, 4, 2, [30, 40], 16, 32, 32, "bfloat16", "bfloat16")
    expected, out = blitz_attn.paged_attention(*case.arrays, kv_split=16, dtype="bfloat16"), np.zeros((2, 4, 32), np.uint16)
    blitz_attn.paged_attention(*case.arrays, kv_split=16, dtype=bfloat16, out=out)
    assert np.array_equal(out, np.asarray(expected).view(np.uint16))


def test_torch_tensors():
    torch = pytest.importorskip("torch")
    case = testing.make_paged(3, 4, 2, [100, 33, 7], 16, 32, 32, "float32", "float32")
    q, k_cache, v_cache = (torch.from_numpy(x).bfloat16() for x in case.arrays[:3])
    out, lse = blitz_attn.paged_attention(q, k_cache, v_cache, case.block_tables, case.seq_lens, kv_split=32, return_lse=True)
    plan = blitz_attn.PagedPlan(case.block_tables, torch.from_numpy(case.seq_lens), page_size=16, kv_split=32)
    assert torch.equal(plan.attention(q, k_cache, v_cache), out)
    assert out.dtype == torch.bfloat16
    assert lse.dtype == torch.float32
    wide = blitz_attn.paged_attention(q, k_cache, v_cache, case.block_tables, case.seq_lens, kv_split=32, out_dtype=torch.float32)
    assert wide.dtype == torch.float32
    assert torch.equal(wide.bfloat16(), out)


def test_queries_that_lengths_do_not_have():
    case = testing.make_paged(2, 4, 2, [30, 40], 16, 32, 32, "float32", "float32")
    for kv_split in (None, 16):
        with pytest.raises(ValueError, match="^q_lens: expected lengths that add up to q's 2 tokens, got 3$"):
            blitz_attn.paged_attention(*case.arrays, q_lens=[1, 2], kv_split=kv_split)
        plan = blitz_attn.PagedPlan(*case.arrays[3:], page_size=16, q_lens=[1, 2], kv_split=kv_split)
        with pytest.raises(ValueError, match=r"^q: expected 3 queries as the plan has them, got \(2, 4, 32\)$"):
            plan.attention(*case.arrays[:3])


TRIPLES = [
    ({"indptr": [0, 3, 2]}, r"indptr: expected rising numbers from 0 to 5, got 3 and 2 at \[1\]"),
    ({"indptr": [2**63 - 1, -(2**63), -1]}, r"indptr: expected rising numbers from 0 to 5, got 9223372036854775807 and -9223372036854775808 at \[0\]"),
    ({"indptr": [0, 2, 6]}, r"indptr: expected rising numbers from 0 to 5, got 2 and 6 at \[1\]"),
    ({"indptr": np.zeros(0, int)}, r"indptr: expected B \+ 1 entries, got 0"),
    ({"indptr": np.zeros((1, 3), int)}, "indptr: expected 1 dimension, got 2"),
    ({"indices": np.zeros((5, 1), int)}, r"block_tables: expected shape \(N,\) with 2 requests, got \(5, 1\)"),
    ({"last": [14]}, "last_page_len: expected 2 entries, one per request, got 1"),
    ({"last": [14, 17]}, r"last_page_len: expected 1 to the 16 tokens of a page, got 17 at \[1\]"),
    ({"last": [0, 8]}, r"last_page_len: expected 1 to the 16 tokens of a page, got 0 at \[0\]"),
]


@pytest.mark.parametrize(("changes", "sentence"), TRIPLES, ids=lambda x: str(x)[:50])
def test_refused_triples(changes, sentence):
    case = testing.make_paged(2, 4, 2, [30, 40], 16, 32, 32, "float32", "float32")
    pages = np.concatenate([case.block_tables[0, :2], case.block_tables[1, :3]])
    triple = tuple(map(np.asarray, ({"indptr": [0, 2, 5], "indices": pages, "last": [14, 8]} | changes).values()))
    for kv_split in (16, None):
        with pytest.raises(ValueError, match=f"^{sentence}$"):
            blitz_attn.paged_attention(case.q, case.k_cache, case.v_cache, triple, None, kv_split=kv_split)
    with pytest.raises(ValueError, match=f"^{sentence}$"):
        blitz_attn.PagedPlan(triple, page_size=16, kv_split=16)


LISTS = [
    ({"selected": np.zeros((2, 2, 1))}, TypeError, "selected: expected int16, int32 or int64, got float64"),
    ({"selected": np.zeros((2, 2), int)}, ValueError, r"selected: expected shape \(2, 2 or 4, K\), one row per .*, got \(2, 2\)"),
    ({"selected": np.zeros((2, 3, 1), int)}, ValueError, r"selected: expected shape \(2, 2 or 4, K\), one row per .*, got \(2, 3, 1\)"),
    ({"selected": np.zeros((1, 2, 1), int)}, ValueError, r"selected: expected shape \(2, 2 or 4, K\), one row per .*, got \(1, 2, 1\)"),
    ({"selected": np.array([[[1, 0], [0, 2]], [[0, 1], [1, 2]]])}, ValueError,
     r"selected: expected pages from 0 to 1, or a pad, got 2 at \[0, 1, 1\]"),
    ({"selected": np.array([[[1, 0], [0, 1]], [[0, -2], [1, 2]]])}, ValueError,
     r"selected: expected pages from 0 to 2, or a pad, got -2 at \[1, 0, 1\]"),
    ({"selected": np.array([[[1, 0], [0, 1]], [[0, 1], [2, 2]]])}, ValueError,
     r"selected: expected each page once per row, got 2 again at \[1, 1, 1\]"),
    ({"seq_lens": [30, 0]}, ValueError, r"selected: expected no page, since request 1 has no tokens, got 0 at \[1, 0, 0\]"),
    ({"seq_lens": [30, 0], "counts": np.array([[1, 1], [0, 1]])}, ValueError,
     r"selected: expected no page, since request 1 has no tokens, got 2 at \[1, 1, 0\]"),
    ({"counts": np.ones((2, 4), int)}, ValueError, r"counts: expected shape \(2, 2\) like the rows of selected, got \(2, 4\)"),
    ({"counts": np.array([[1, 1], [3, 1]])}, ValueError, r"counts: expected 0 to 2, got 3 at \[1, 0\]"),
    ({"counts": np.array([[1, -1], [2, 1]])}, ValueError, r"counts: expected 0 to 2, got -1 at \[0, 1\]"),
    ({"k_cache": np.zeros((5, 16, 32), np.float32)}, ValueError, r"k_cache: expected shape \(pages, page_size, Hkv, D\), got \(5, 16, 32\)"),
    ({"q": np.zeros((2, 4, 32), np.int16), "out": np.zeros((2, 4, 32), np.float32)}, TypeError,
     "q: expected float32, float16, bfloat16 or float64, got int16"),
    ({"v_cache": np.zeros((5, 16, 32), np.float32)}, ValueError, r"v_cache: expected shape \(pages, page_size, Hkv, D\), got \(5, 16, 32\)"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "kind", "sentence"), LISTS, ids=lambda x: str(x)[:50])
def test_refused_lists(changes, kind, sentence):
    """By the numbers that the caller gave, not by those of chunks, and by the sentence of the call without chunks."""
    case = testing.make_paged(2, 4, 2, [30, 40], 16, 32, 32, "float32", "float32")
    call = dict(zip(("q", "k_cache", "v_cache", "block_tables", "seq_lens"), case.arrays, strict=True))
    call |= {"selected": np.array([[[1, 0], [0, 1]], [[0, 1], [2, 1]]]), "kv_split": 16}
    blitz_attn.paged_select_attention(**call)
    call |= changes
    for kv_split in (16, None):
        with pytest.raises(kind, match=f"^{sentence}$"):
            blitz_attn.paged_select_attention(**call | {"kv_split": kv_split})
    plan = blitz_attn.PagedPlan(*(call.pop(name) for name in ("block_tables", "seq_lens")), page_size=16, kv_split=call.pop("kv_split"))
    with pytest.raises(kind, match=f"^{sentence}$"):
        plan.select_attention(**call)
