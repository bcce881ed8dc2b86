"""`PagedPlan.select_and_attend`: the bits of selecting, then attending, over tables that were opened before."""

import numpy as np
import pytest

import blitz_attn
from blitz_attn import reference, testing
from cases import DTYPES, bits_option, poisoned, same_bits
from cases_paged import CACHE_DTYPES, plan_paged

SIZE, DIM, ROWS = 16, 32, 5
LENS = [1, 0, 37, 130, 600]
METHODS = ["quest", "mean", "max"]


class Step:
    """One layer of a step: caches, summaries of the values, and tables."""

    def __init__(self, q_lens=None, seed=0, **options):
        self.case = case = testing.make_paged(len(LENS), 8, 2, LENS, SIZE, DIM, q_lens=q_lens, seed=seed, **options)
        self.q_lens = q_lens
        floats = testing.make_paged(len(LENS), 8, 2, LENS, SIZE, DIM, dtype=case.dtype, q_lens=q_lens, seed=seed, kv_layout=case.options["kv_layout"])
        width = -(-max(LENS) // SIZE // ROWS) + 1
        self.tables = np.random.default_rng(seed).permutation(len(LENS) * width).reshape(len(LENS), width)
        summaries = [testing.round_to(np.full((self.tables.size, ROWS, 2, DIM), np.nan), case.dtype) for _ in range(3)]
        blitz_attn.quest_prefill_metadata(
            floats.k_cache, floats.block_tables, floats.seq_lens, self.tables, *summaries[:2], meanblocks=summaries[2],
            kv_layout=case.options["kv_layout"], **bits_option(floats.k_cache),
        )  # fmt: skip
        self.summaries = {"quest": (tuple(summaries[:2]), self.tables), "mean": (summaries[2], self.tables), "max": ()}

    def apart(self, method, choice, **options):
        """(out, lse, selected, counts) by the two calls one after the other."""
        case = self.case
        source, tables = self.summaries[method] or (case.k_cache, case.block_tables)
        layout = {"kv_layout": case.options["kv_layout"], **bits_option(case.q)}
        if method == "max":
            layout |= {name: case.options.get(name) for name in ("k_scale", "kv_dtype")}
        selected, counts = blitz_attn.select_blocks(
            case.q, source, tables, case.seq_lens, method=method, block_size=SIZE, q_lens=self.q_lens, **choice, **layout
        )
        out, lse = blitz_attn.paged_select_attention(*case.arrays, selected, counts=counts, return_lse=True, **{**case.options, **options})
        return out, lse, selected, counts

    def together(self, plan, method, choice, **options):
        return plan.select_and_attend(*self.case.arrays[:3], *self.summaries[method], method=method, **choice, **options)


CHOICES = [
    {"k": 4},
    {"budget": 100, "per_query_head": True, "sink": 2},
    {"k": [1, 2, 3, 4, 5], "recent": [0, 1, 2, 3, 4]},
    {"budget": [1, 16, 33, 64, 200], "recent": 0, "sink": 0},
    {"k": 2, "dense_below": 131},
    {"k": 4, "tokens_since_metadata_update": [0, 1, 2, 20, 33]},
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("choice", range(len(CHOICES)))
@pytest.mark.parametrize("q_lens", [None, [1, 0, 5, 3, 20]])
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_of_the_two_calls(dtype, method, kv_layout, q_lens, choice, isa_level):
    step, choice = Step(q_lens, dtype=dtype, kv_layout=kv_layout), CHOICES[choice]
    expected = step.apart(method, choice)
    plan, per_call = plan_paged(step.case)
    for given in (None, poisoned(expected[0].shape, step.case.q)):
        got = step.together(plan, method, choice, return_lse=True, return_selected=True, out=given, **per_call)
        assert len(got) == 4
        assert given is None or got[0] is given
        assert all(same_bits(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("tables", ["matrix", "triple"])
@pytest.mark.parametrize("method", METHODS)
def test_both_forms_of_tables(method, tables, isa_level):
    """The plan has copies: later changes of the caller's arrays do not reach it."""
    step = Step([1, 0, 5, 3, 20])
    given = (step.case.block_tables.copy(), step.case.seq_lens.copy()) if tables == "matrix" else (step.case.csr(), None)
    q_lens = np.array(step.q_lens)
    plan = blitz_attn.PagedPlan(*given, page_size=SIZE, q_lens=q_lens)
    call = {"method": method, "q_lens": q_lens.copy(), "return_lse": True, "return_selected": True} | step.case.options
    for split in (None, 4 * SIZE) if tables == "triple" else ():
        got = blitz_attn.select_and_attend(*step.case.arrays[:3], *given, *step.summaries[method], k=4, kv_split=split, **call)
        assert all(same_bits(a, b) for a, b in zip(got, step.apart(method, {"k": 4}, kv_split=split), strict=True))
        exact = reference.select_and_attend(*step.case.arrays[:3], *given, *step.summaries[method], k=4, **call)
        assert np.abs(got[0] - exact[0]).max() < 1e-5
    for array in (q_lens, *(given if tables == "matrix" else given[0])):
        array[...] = 0
    for choice in CHOICES:
        got = step.together(plan, method, choice, return_lse=True, return_selected=True)
        assert all(same_bits(a, b) for a, b in zip(got, step.apart(method, choice), strict=True))


@pytest.mark.parametrize(("method", "q_lens"), [("quest", None), ("mean", [1, 0, 5, 3, 20])])
def test_options_of_the_plan_and_of_the_call(method, q_lens, isa_level):
    step = Step(q_lens, dtype="bfloat16")
    options = {"scale": 0.3, "kv_split": 4 * SIZE, "out_dtype": "float32", "num_threads": 2} | rules("all", q_lens, np.random.default_rng(6))
    plan, per_call = plan_paged(step.case, **options)
    expected = step.apart(method, {"k": 4}, **options)
    both = {"return_lse": True, "return_selected": True}
    call = both | step.case.options | options | {"k": 4, "method": method}
    for got in (
        step.together(plan, method, {"k": 4}, **both, **per_call),
        blitz_attn.select_and_attend(*step.case.arrays, *step.summaries[method], **call),
    ):
        assert got[0].dtype == np.float32
        assert all(same_bits(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("out_dtype", [None, "float32"])
@pytest.mark.parametrize("kv_split", [SIZE, 8 * SIZE])
@pytest.mark.parametrize("q_lens", [None, [1, 0, 5, 3, 20]])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_chunks_and_accumulated_results(dtype, method, q_lens, kv_split, out_dtype, isa_level):
    """`kv_split` and `out_dtype` of the call and of the twin, as of attention over lists."""
    step, choice = Step(q_lens, dtype=dtype), {"k": 4}
    options = {"kv_split": kv_split, "out_dtype": None if dtype == "float64" else out_dtype}
    expected = step.apart(method, choice, **options)
    call = {"method": method, "return_lse": True, "return_selected": True} | choice | step.case.options | options
    arguments = (*step.case.arrays, *step.summaries[method])
    out = poisoned(expected[0].shape, expected[0])
    got = blitz_attn.select_and_attend(*arguments, out=out, **call)
    assert got[0] is out
    assert all(map(same_bits, got, expected))
    if dtype == "float64":
        for found, right in zip(got, reference.select_and_attend(*arguments, **call), strict=True):
            np.testing.assert_allclose(found, right, rtol=1e-9, atol=1e-11)


def rules(name, q_lens, rng):
    """Rules of attention for the queries of a step. Rows of a mask are those of a request's queries, its columns all of the request's tokens."""
    queries, most = sum(q_lens or [1] * len(LENS)), max(q_lens or [1])
    runs = np.sort(rng.integers(-5, np.repeat(LENS, q_lens or 1)[:, None] + 6, (queries, 2)), axis=-1)
    return {
        "ranges": {"kv_ranges": runs.astype(np.int32)},
        "mask": {"attn_mask": rng.random((len(LENS), 1, most + 1, max(LENS) + 3)) < 0.7},
        "numbers": {"attn_mask": np.where(rng.random((8, most, max(LENS))) < 0.8, rng.standard_normal((8, most, max(LENS))), -np.inf).astype(np.float32)},
        "slopes": {"alibi_slopes": np.linspace(0, 0.5, 8).astype(np.float32)},
        "all": {
            "kv_ranges": runs, "attn_mask": rng.standard_normal((1, 1, 1, max(LENS))), "alibi_slopes": np.linspace(-0.1, 0.5, 8).astype(np.float32),
            "window": 90, "softcap": 3.0, "sinks": np.linspace(-1, 1, 8).astype(np.float32),
        },
    }[name]  # fmt: skip


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["ranges", "mask", "numbers", "slopes", "all"])
@pytest.mark.parametrize("q_lens", [None, [1, 0, 5, 3, 20]])
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("method", METHODS)
def test_rules_against_the_twin(method, kv_layout, q_lens, name, isa_level):
    """Blocks are chosen without the rules, and attention has them."""
    step, choice = Step(q_lens, dtype="float64", kv_layout=kv_layout), CHOICES[1]
    given = rules(name, q_lens, np.random.default_rng(3))
    both = {"method": method, "return_lse": True, "return_selected": True} | choice
    arguments = (*step.case.arrays, *step.summaries[method])
    got = blitz_attn.select_and_attend(*arguments, **both, **step.case.options | given)
    for found, right in zip(got, reference.select_and_attend(*arguments, **both, **step.case.options | given), strict=True):
        np.testing.assert_allclose(found, right, rtol=1e-9, atol=1e-11)
    plain = blitz_attn.select_and_attend(*arguments, **both, **step.case.options)
    assert [same_bits(a, b) for a, b in zip(got, plain, strict=True)] == [False, False, True, True]
    assert all(map(same_bits, got, step.apart(method, choice, **given)))
    plan, per_call = plan_paged(step.case, **given)
    assert all(map(same_bits, got, step.together(plan, method, choice, return_lse=True, return_selected=True, **per_call)))


@pytest.mark.parametrize(("dtype", "kv_dtype"), [("float32", None), ("float16", "int8"), ("bfloat16", None), ("bfloat16", "float8_e4m3")])
def test_rules_with_other_dtypes(dtype, kv_dtype, isa_level):
    q_lens = [1, 0, 5, 3, 20]
    step, given = Step(q_lens, dtype=dtype, kv_dtype=kv_dtype), {}
    for name in ("ranges", "numbers", "slopes"):
        given |= rules(name, q_lens, np.random.default_rng(4))
    plan, per_call = plan_paged(step.case, **given)
    for method in METHODS:
        expected = step.apart(method, {"k": 4}, **given)
        how = {"k": 4, "method": method, "return_lse": True, "return_selected": True} | step.case.options | given
        for n in (1, 3):
            got = blitz_attn.select_and_attend(*step.case.arrays, *step.summaries[method], num_threads=n, **how)
            assert all(map(same_bits, got, expected))
        got = step.together(plan, method, {"k": 4}, return_lse=True, return_selected=True, **per_call)
        assert all(map(same_bits, got, expected))


def test_refused_rules():
    """Before anything is written, by the call that is given them."""
    step = Step([1, 0, 5, 3, 20])
    plan, per_call = plan_paged(step.case)
    room = np.full(step.case.q.size, 7, np.float32)
    out = room.reshape(step.case.q.shape)
    for error, sentence, given in (
        (ValueError, r"kv_ranges: expected shape \(29, 2\), got \(5, 2\)", {"kv_ranges": np.zeros((5, 2), int)}),
        (TypeError, "kv_ranges: expected (an array of )?int32 or int64, got int16", {"kv_ranges": np.zeros((29, 2), np.int16)}),
        (ValueError, r"attn_mask: expected shape \(5 or 1, 8 or 1, 20 or 1, 600 or 1\), or more queries and keys, got \(29, 64\)",
         {"attn_mask": np.ones((29, 64), bool)}),  # the tokens of four blocks
        (TypeError, "attn_mask: expected bool, ", {"attn_mask": np.ones((20, 600), int)}),
        (ValueError, "alibi_slopes: expected ", {"alibi_slopes": [0.5, 0.25]}),
        (ValueError, "out: expected memory of its own, got an array that overlaps kv_ranges", {"kv_ranges": room.view(np.int32)[:58].reshape(29, 2)}),
        (ValueError, "out: expected memory of its own, got an array that overlaps attn_mask", {"attn_mask": room[:600]}),
    ):  # fmt: skip
        calls = [lambda given: step.together(plan, "quest", {"k": 4}, out=out, **per_call | given)]
        for options in (step.case.options, step.case.options | {"kv_split": 3 * SIZE}):
            calls.append(lambda given, o=options: blitz_attn.select_and_attend(*step.case.arrays, *step.summaries["quest"], k=4, out=out, **o | given))
        for call in calls:
            with pytest.raises(error, match=f"^{sentence}"):
                call(given)
            assert (room == 7).all()
    for sentence, options in (
        ("kv_split: expected a positive multiple of the 16 tokens of a page, got 24", {"kv_split": 24}),
        ("out_dtype: expected 'float32' like q, got 'float16'", {"out_dtype": "float16"}),
        ("out_dtype: expected 'float32' like q, got 'float16'", {"out_dtype": "float16", "kv_split": SIZE}),
    ):
        with pytest.raises(ValueError, match=f"^{sentence}$"):
            blitz_attn.select_and_attend(*step.case.arrays, *step.summaries["quest"], k=4, out=out, **step.case.options | options)
        assert (room == 7).all()


@pytest.mark.parametrize("kv_dtype", CACHE_DTYPES)
def test_caches_of_every_dtype(kv_dtype, isa_level):
    for method in METHODS:
        step = Step([1, 0, 5, 3, 20], kv_dtype=kv_dtype)
        plan, per_call = plan_paged(step.case)
        got = step.together(plan, method, {"k": 4}, return_lse=True, return_selected=True, **per_call)
        assert all(same_bits(a, b) for a, b in zip(got, step.apart(method, {"k": 4}), strict=True))


@pytest.mark.parametrize("op", [blitz_attn.select_and_attend, reference.select_and_attend])
def test_what_comes_back(op):
    """The function and the method return the same things in the same order; without options, the result alone."""
    step = Step([1, 0, 5, 3, 20], dtype="float64")
    plan, per_call = plan_paged(step.case)
    whole = step.together(plan, "quest", {"k": 3}, return_lse=True, return_selected=True, **per_call)
    for lse, lists, places in ((False, False, [0]), (True, False, [0, 1]), (False, True, [0, 2, 3]), (True, True, [0, 1, 2, 3])):
        flags = {"return_lse": lse, "return_selected": lists}
        for got in (
            op(*step.case.arrays, *step.summaries["quest"], k=3, **flags, **step.case.options),
            step.together(plan, "quest", {"k": 3}, **flags, **per_call),
        ):
            parts = got if len(places) > 1 else (got,)
            assert isinstance(parts, tuple)
            for part, place in zip(parts, places, strict=True):
                np.testing.assert_allclose(part, whole[place], rtol=1e-9, atol=1e-12)


def test_tensors():
    torch = pytest.importorskip("torch")
    step = Step([1, 0, 5, 3, 20])
    plan, _ = plan_paged(step.case)
    arrays = [torch.from_numpy(x) for x in step.case.arrays[:3]]
    (high, low), tables = step.summaries["quest"]
    got = plan.select_and_attend(*arrays, (torch.from_numpy(high), torch.from_numpy(low)), tables, k=4, return_lse=True, return_selected=True)
    assert all(isinstance(x, torch.Tensor) for x in got)
    assert all(same_bits(a.numpy(), b) for a, b in zip(got, step.apart("quest", {"k": 4}), strict=True))


def test_whole_layers_of_a_step():
    """Several layers by one plan, each with caches and summaries of its own; a budget over the length is dense attention."""
    layers = [Step([1, 0, 5, 3, 20], seed=seed) for seed in range(3)]
    plan, _ = plan_paged(layers[0].case)
    for step in layers:
        assert same_bits(step.case.block_tables, layers[0].case.block_tables)
        got = step.together(plan, "quest", {"k": 4}, return_lse=True, return_selected=True)
        assert all(same_bits(a, b) for a, b in zip(got, step.apart("quest", {"k": 4}), strict=True))
        out = plan.select_and_attend(*step.case.arrays[:3], method="max", budget=10**6)
        assert same_bits(out, plan.attention(*step.case.arrays[:3]))


def refusals():
    step = Step([1, 0, 5, 3, 20])
    q, k, v = step.case.arrays[:3]
    pair, tables = step.summaries["quest"]
    good = {"q": q, "k_cache": k, "v_cache": v, "source": pair, "metadata_block_tables": tables, "k": 3}
    most = {"source": None, "metadata_block_tables": None, "method": "max"}
    return good, [
        (ValueError, r"^q: expected 29 queries as the plan has them, got \(28, 8, 32\)", {"q": q[1:]}),
        (ValueError, r"^q: expected shape \(T, H, D\), got", {"q": q[0]}),
        (ValueError, r"^source: expected summaries and their tables for method 'quest', got None", {"source": None}),
        (ValueError, r"^source: expected None for method 'max', which reads k_cache itself, got tuple", {"method": "max"}),
        (ValueError, r"^method: expected 'quest', 'mean' or 'max', got 'best'", {"method": "best", "source": pair[0]}),
        (ValueError, r"^budget: expected exactly one of budget and k, got both", {"budget": 3}),
        (ValueError, r"^k: expected a number, or 5 of them, one per request, got shape \(2,\)", {"k": [1, 2]}),
        (ValueError, r"^recent: expected 5 entries, one per request, got 1", {"recent": [1]}),
        (ValueError, r"^metadata_block_tables: expected shape \(5, W\), got \(4, 9\)", {"metadata_block_tables": tables[1:]}),
        (TypeError, r"^metadata_block_tables: expected", {"metadata_block_tables": "x"}),
        (ValueError, r"^k_cache: expected pages of 16 tokens as the plan has them, got pages of 8", most | {"k_cache": k.reshape(-1, 8, 2, 32)}),
        (ValueError, r"^block_tables: expected pages from 0 to 1 within the request's length, got", most | {"k_cache": k[:2]}),
        (ValueError, r"^k_cache: expected pages of 16 tokens as the plan has them, got", {"k_cache": k.reshape(-1, 8, 2, 32), "v_cache": v.reshape(-1, 8, 2, 32)}),
        (TypeError, r"^return_selected: expected", {"return_selected": np.ones(2)}),
    ]  # fmt: skip


@pytest.mark.parametrize("number", range(14))
def test_refusals(number):
    good, cases = refusals()
    assert len(cases) == 14
    error, pattern, changes = cases[number]
    plan = blitz_attn.PagedPlan(*Step([1, 0, 5, 3, 20]).case.arrays[3:], page_size=SIZE, q_lens=[1, 0, 5, 3, 20])
    out = np.full(good["q"].shape, 7, np.float32)
    with pytest.raises(error, match=pattern):
        plan.select_and_attend(**good | changes, out=out)
    assert (out == 7).all()


def test_a_plan_of_one_query_each_counts_queries():
    step = Step()
    plan, _ = plan_paged(step.case)
    with pytest.raises(ValueError, match=r"^q: expected 5 queries as the plan has them, got \(4, 8, 32\)"):
        plan.select_and_attend(step.case.q[1:], *step.case.arrays[1:3], *step.summaries["quest"], k=3)


@pytest.mark.parametrize("method", METHODS)
def test_queries_that_are_not_the_last_tokens(method):
    step = Step()
    plan, _ = plan_paged(step.case, q_begin=[0, 0, 30, 100, 599])
    with pytest.raises(ValueError, match="^q_begin: expected none where blocks are selected, for queries that are the last tokens of their requests, got some"):
        step.together(plan, method, {"k": 3})
