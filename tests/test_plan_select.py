"""`select_and_attend`, as a function and as a method of a plan, gives the reference's results, and the bits of selecting and then attending.

Options of choosing and of attention, caches and KV splits are drawn together in tests/fuzz/quest_problems.py.
"""

import numpy as np
import pytest

import blitz_attn
from blitz_attn import reference, testing
from cases import bits_option, poisoned, same_bits
from cases_paged import plan_paged

SIZE, DIM, ROWS = 16, 32, 5
LENS, Q_LENS = [1, 0, 37, 130, 600], [1, 0, 5, 3, 20]
METHODS = ["quest", "mean", "max"]
BOTH = {"return_lse": True, "return_selected": True}
CHOICES = [
    {"k": 4},
    {"budget": 100, "per_query_head": True, "sink": 2},
    {"budget": [1, 16, 33, 64, 200], "recent": 0, "sink": 0},
    {"k": 2, "dense_below": 131},
    {"k": [1, 2, 3, 4, 5], "tokens_since_metadata_update": [0, 1, 2, 20, 33]},
]


class Step:
    """One layer of a step: caches, summaries of the keys before they are quantised, and tables."""

    def __init__(self, q_lens=None, seed=0, **options):
        self.case = case = testing.make_paged(len(LENS), 8, 2, LENS, SIZE, DIM, q_lens=q_lens, seed=seed, **options)
        self.q_lens, layout = q_lens, case.options["kv_layout"]
        floats = testing.make_paged(len(LENS), 8, 2, LENS, SIZE, DIM, dtype=case.dtype, q_lens=q_lens, seed=seed, kv_layout=layout)
        tables = np.random.default_rng(seed).permutation(len(LENS) * 9).reshape(len(LENS), 9)
        high, low, mean = (testing.round_to(np.full((tables.size, ROWS, 2, DIM), np.nan), case.dtype) for _ in range(3))
        keys = floats.k_cache, *case.arrays[3:], tables
        blitz_attn.quest_prefill_metadata(*keys, high, low, meanblocks=mean, kv_layout=layout, **bits_option(high))
        self.summaries = {"quest": ((high, low), tables), "mean": (mean, tables), "max": ()}

    def by_function(self, method, choice, op=blitz_attn, tables=None, **options):
        """The function's results (out, lse, selected, counts). `tables` replaces the case's tables and lengths."""
        given = {"method": method, **choice, **self.case.options, **options}
        arrays = *self.case.arrays[:3], *(tables or self.case.arrays[3:])
        return op.select_and_attend(*arrays, *self.summaries[method], **BOTH, **given)

    def by_plan(self, plan, method, choice, **options):
        return plan.select_and_attend(*self.case.arrays[:3], *self.summaries[method], method=method, **choice, **options)

    def apart(self, method, choice, **options):
        """(out, lse, selected, counts) by selecting and then attending."""
        case = self.case
        source, tables = self.summaries[method] or (case.k_cache, case.block_tables)
        named = {"kv_layout": case.options["kv_layout"], "q_lens": self.q_lens, **bits_option(case.q), **choice}
        if method == "max":
            named |= {name: case.options.get(name) for name in ("k_scale", "kv_dtype")}
        selected, counts = blitz_attn.select_blocks(case.q, source, tables, case.seq_lens, method=method, block_size=SIZE, **named)
        out, lse = blitz_attn.paged_select_attention(*case.arrays, selected, counts=counts, return_lse=True, **{**case.options, **options})
        return out, lse, selected, counts


def rules(name, q_lens):
    """Rules of attention. A mask has at least a row for each query of a request, and a column for each token of the request."""
    rng, queries, most = np.random.default_rng(3), sum(q_lens or [1] * len(LENS)), max(q_lens or [1])
    runs = np.sort(rng.integers(-5, np.repeat(LENS, q_lens or 1)[:, None] + 6, (queries, 2)), axis=-1)
    mask = np.where(rng.random((8, most, max(LENS))) < 0.8, rng.standard_normal((8, most, max(LENS))), -np.inf)
    return {
        "none": {},
        "ranges": {"kv_ranges": runs.astype(np.int32)},
        "mask": {"attn_mask": rng.random((len(LENS), 1, most + 1, max(LENS) + 3)) < 0.7},
        "numbers": {"attn_mask": mask.astype(np.float32), "alibi_slopes": np.linspace(0, 0.5, 8).astype(np.float32)},
        "all": {"window": 90, "softcap": 3.0, "sinks": np.linspace(-1, 1, 8).astype(np.float32), "kv_ranges": runs},
    }[name]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kv_split", [None, SIZE, 8 * SIZE])
@pytest.mark.parametrize("rule", ["none", "ranges", "mask", "numbers", "all"])
@pytest.mark.parametrize("choice", CHOICES, ids=str)
@pytest.mark.parametrize("q_lens", [None, Q_LENS], ids=["one", "several"])
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("form", ["matrix", "triple"])
@pytest.mark.parametrize("method", METHODS)
def test_the_reference_and_the_two_calls(method, form, kv_layout, q_lens, choice, rule, kv_split, isa_level):
    """Rules apply to attention and not to the choice of blocks."""
    step, given = Step(q_lens, dtype="float64", kv_layout=kv_layout), {"kv_split": kv_split, **rules(rule, q_lens)}
    tables = (step.case.csr(), None) if form == "triple" else None
    found = step.by_function(method, choice, tables=tables, **given)
    for got, right in zip(found, step.by_function(method, choice, reference, tables, **given), strict=True):
        np.testing.assert_allclose(got, right, rtol=1e-9, atol=1e-11)
    assert all(map(same_bits, found, step.apart(method, choice, **given)))
    plan, per_call = plan_paged(step.case, **given)
    assert all(map(same_bits, found, step.by_plan(plan, method, choice, **BOTH, **per_call)))


@pytest.mark.parametrize(
    ("dtype", "kv_dtype"), [("float32", "int8"), ("float16", "float32"), ("bfloat16", "bfloat16"), ("bfloat16", "float8_e4m3")]
)
@pytest.mark.parametrize("method", METHODS)
def test_other_dtypes_and_unrounded_results(method, dtype, kv_dtype, isa_level):
    step, options = Step(Q_LENS, dtype=dtype, kv_dtype=kv_dtype), {"out_dtype": "float32", "num_threads": 2}
    expected = step.apart(method, {"k": 4}, **options)
    plan, per_call = plan_paged(step.case, **options)
    out = poisoned(expected[0].shape, expected[0])
    got = step.by_plan(plan, method, {"k": 4}, out=out, **BOTH, **per_call)
    assert got[0] is out
    for found in (got, step.by_function(method, {"k": 4}, **options)):
        assert all(map(same_bits, found, expected))


@pytest.mark.parametrize("op", [blitz_attn.select_and_attend, reference.select_and_attend])
@pytest.mark.parametrize(
    ("lse", "lists", "places"), [(False, False, [0]), (True, False, [0, 1]), (False, True, [0, 2, 3]), (True, True, [0, 1, 2, 3])]
)
def test_returned_results(lse, lists, places, op):
    """The function and the method return the same results in the same order. Without options, they return only the output."""
    step = Step(Q_LENS, dtype="float64")
    plan, per_call = plan_paged(step.case)
    whole, flags = step.by_function("quest", {"k": 3}), {"return_lse": lse, "return_selected": lists}
    for got in (
        op(*step.case.arrays, *step.summaries["quest"], k=3, **flags, **step.case.options),
        step.by_plan(plan, "quest", {"k": 3}, **flags, **per_call),
    ):
        for part, place in zip(got if len(places) > 1 else (got,), places, strict=True):
            np.testing.assert_allclose(part, whole[place], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("form", ["matrix", "triple"])
def test_a_plan_serves_all_layers_of_a_step(form):
    """Each layer has its own caches and summaries. Later changes of the arrays that the plan was made from do not reach the plan."""
    layers, q_lens = [Step(Q_LENS, seed=seed) for seed in range(3)], np.array(Q_LENS)
    given = (layers[0].case.block_tables.copy(), layers[0].case.seq_lens.copy()) if form == "matrix" else (layers[0].case.csr(), None)
    plan = blitz_attn.PagedPlan(*given, page_size=SIZE, q_lens=q_lens)
    for array in (q_lens, *(given if form == "matrix" else given[0])):
        array[...] = 0
    for step in layers:
        assert all(map(same_bits, step.by_plan(plan, "quest", {"k": 4}, **BOTH), step.apart("quest", {"k": 4})))
        arrays = step.case.arrays[:3]  # with a budget above the length, attention is dense
        assert same_bits(plan.select_and_attend(*arrays, method="max", budget=10**6), plan.attention(*arrays))


def test_tensors():
    torch = pytest.importorskip("torch")
    step = Step(Q_LENS)
    plan, _ = plan_paged(step.case)
    (high, low), tables = step.summaries["quest"]
    arrays = *map(torch.from_numpy, step.case.arrays[:3]), (torch.from_numpy(high), torch.from_numpy(low)), tables
    got = plan.select_and_attend(*arrays, k=4, **BOTH)
    assert all(isinstance(x, torch.Tensor) for x in got)
    assert all(same_bits(a.numpy(), b) for a, b in zip(got, step.apart("quest", {"k": 4}), strict=True))


@pytest.mark.parametrize("method", METHODS)
def test_queries_that_are_not_the_last_tokens(method):
    step = Step()
    plan, _ = plan_paged(step.case, q_begin=[0, 0, 30, 100, 599])
    with pytest.raises(
        ValueError, match="^q_begin: expected none, because blocks are selected only for .* last tokens of their requests, got some"
    ):
        step.by_plan(plan, method, {"k": 3})
