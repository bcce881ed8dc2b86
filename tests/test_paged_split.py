"""Paged attention in KV splits is compared with the reference. It has the bits of splits that are attended one by one and merged as a tree."""

import numpy as np
import pytest

import blitz_attn
from blitz_attn import _formats, testing
from cases import same_bits
from cases_paged import attend_paged, check_paged, every_block

LENS = [1, 0, 37, 130, 16, 257]
KINDS = [("float32", "float32"), ("float16", "float16"), ("bfloat16", "bfloat16"), ("bfloat16", "int8"), ("float64", "float64")]
RULES = [{}, {"window": 20}, {"softcap": 2.0, "scale": 0.3}, {"window": 0}]


def split_states(case, b, first, split, queries, begin, **options):
    """(out, lse) of each KV split of request b, attended as a request of its own."""
    tokens, size = int(case.seq_lens[b]), case.page_size
    states = []
    for c in range(max(1, -(-tokens // split))):
        here = min(split, tokens - c * split)
        pages = case.block_tables[b : b + 1, c * split // size : c * split // size + max(1, -(-here // size))]
        states.append(blitz_attn.paged_attention(
            np.ascontiguousarray(case.q[first : first + queries]), case.k_cache, case.v_cache, np.ascontiguousarray(pages), [here],
            q_lens=[queries], q_begin=[begin - c * split], return_lse=True,
            out_dtype=None if case.dtype == "float64" else "float32", **options,
        ))  # fmt: skip
    return zip(*states, strict=True)


def assert_same_as_by_hand(case, split, q_begin=None, sinks=None, **rules):
    options = {**case.options, **rules}
    q_lens = options.pop("q_lens", None)
    q_lens = [1] * len(case.seq_lens) if q_lens is None else q_lens
    results = []
    for b, (first, n) in enumerate(zip(np.cumsum([0, *q_lens]), q_lens, strict=False)):
        begin = int(case.seq_lens[b]) - n if q_begin is None else q_begin[b]
        out, lse = blitz_attn.merge_states_tree(*map(list, split_states(case, b, first, split, n, begin, **options)))
        if sinks is not None:
            shares = np.ascontiguousarray(np.broadcast_to(sinks, lse.shape).astype(lse.dtype))
            out, lse = blitz_attn.merge_states(out, lse, np.zeros_like(out), shares)
        results.append((out, lse))
    exact, exact_lse = (np.concatenate(x) for x in zip(*results, strict=True))
    got, lse = attend_paged(case, kv_split=split, q_begin=q_begin, sinks=sinks, **rules)
    assert same_bits(lse, exact_lse)
    assert got.tobytes() == (exact if case.dtype == "float64" else _formats.converted(exact, "float32", case.dtype)).tobytes()


@pytest.mark.sampled
@pytest.mark.parametrize("rules", RULES, ids=str)
@pytest.mark.parametrize("q_lens", [None, [1, 0, 4, 20, 16, 33]], ids=["one", "ragged"])
@pytest.mark.parametrize(("dtype", "kv_dtype"), KINDS)
@pytest.mark.parametrize(
    ("split", "dims", "kv_layout"), [(16, (40, 24), "NHD"), (64, (64, 64), "HND"), (48, (40, 24), "NHD"), (512, (64, 64), "HND")]
)
@pytest.mark.parametrize("sinks", [None, np.linspace(-1, 2, 6).astype(np.float32)], ids=["plain", "sinks"])
def test_splits_by_hand_give_the_same_bits(sinks, split, dims, kv_layout, dtype, kv_dtype, q_lens, rules, isa_level):
    case = testing.make_paged(6, 6, 2, LENS, 16, *dims, dtype, kv_dtype, kv_layout, q_lens=q_lens)
    assert_same_as_by_hand(case, split, sinks=sinks, **rules)
    if split > max(LENS) and sinks is None:  # a single split is the usual call
        assert all(map(same_bits, attend_paged(case, kv_split=split, **rules), attend_paged(case, **rules)))


@pytest.mark.parametrize("rules", RULES[:2], ids=str)
def test_stretches_of_longer_requests(rules, isa_level):
    """With q_begin, queries are before, among and behind the tokens of the cache, and may outnumber the tokens."""
    case = testing.make_paged(6, 4, 2, LENS, 16, 32, 32, "bfloat16", "bfloat16", q_lens=[1, 2, 4, 20, 0, 9])
    begins = [3, 0, -2, 100, 5, 300]
    assert_same_as_by_hand(case, 32, q_begin=begins, **rules)
    check_paged(case, q_begin=begins, **rules)
    check_paged(case, q_begin=begins, kv_split=32, **rules)


@pytest.mark.parametrize("rows", [2, 6])
@pytest.mark.parametrize("q_lens", [None, [1, 0, 4, 20, 16, 33]], ids=["one", "ragged"])
def test_selected_blocks(q_lens, rows, isa_level):
    case = testing.make_paged(6, 6, 2, LENS, 16, 40, 24, "bfloat16", "bfloat16", q_lens=q_lens)
    whole = attend_paged(case, kv_split=48, window=60)
    assert all(map(same_bits, attend_paged(case, every_block(case, rows), kv_split=48, window=60), whole))
    some = every_block(case, rows)[:, :, ::2].copy()
    check_paged(case, some, kv_split=48)
    counts = (some >= 0).sum(axis=2)
    assert all(map(same_bits, attend_paged(case, some, kv_split=48), attend_paged(case, np.abs(some), counts=counts, kv_split=48)))


@pytest.mark.parametrize("q_lens", [[600, 0], [100, 31], [1, 2]], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_many_queries_and_splits_give_the_same_bits(dtype, q_lens, isa_level):
    """With so many heads, only a few hundred queries have states at a time: requests are cut, and states of splits wait in the stack of the tree."""
    case = testing.make_paged(2, 64, 2, [600, 1170], 16, 16, 256, dtype, q_lens=q_lens)
    assert_same_as_by_hand(case, 64, sinks=np.linspace(-1, 2, 64).astype(np.float32))
    case.options["kv_ranges"] = np.sort(np.random.default_rng(1).integers(0, 1200, (sum(q_lens), 2)))
    some = every_block(case, 2)[:, :, ::3].copy()
    got, whole = (attend_paged(case, some, kv_split=split) for split in (64, None))
    for a, b in zip(got, whole, strict=True):
        numbers = [testing.to_float64(x, "bfloat16") if x.dtype == np.uint16 else np.float64(x) for x in (a, b)]
        np.testing.assert_allclose(*numbers, atol=0.02 if dtype == "bfloat16" else 1e-4)


@pytest.mark.parametrize("begin", [-(2**30) + 1, -(2**30) + 40, 2**30 - 1])
def test_far_positions_of_queries_are_those_of_the_usual_call(begin):
    case = testing.make_paged(2, 2, 1, [32, 50], 16, 8)
    for a, b in zip(*(attend_paged(case, kv_split=split, q_begin=[begin, 3]) for split in (None, 16)), strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("q_begin", [None, [-5, 3]], ids=["last", "before the keys"])
@pytest.mark.parametrize("value", [1, np.inf])
@pytest.mark.parametrize("dtype", ["float32", "float16", "float64"])
@pytest.mark.parametrize("sink", [np.inf, -np.inf, np.nan, 3.4e38, 3e38, 2.3e38, 1e30, -1e30, -2.3e38, -3e38])
def test_extreme_sinks_are_those_of_the_usual_call(sink, dtype, value, q_begin):
    case = testing.make_paged(2, 2, 1, [32, 20], 16, 8, 8, dtype)
    case.v_cache[case.block_tables[0, 0]] *= value
    options = {"sinks": np.array([sink, 0], np.float32), "q_begin": q_begin, "return_lse": True, **case.options}
    usual, *split_up = (blitz_attn.paged_attention(*case.arrays, kv_split=n, **options) for n in (None, 16, 64))
    for found in split_up:
        for a, b in zip(usual, found, strict=True):
            np.testing.assert_allclose(b, a, rtol=1e-2 if dtype == "float16" else 1e-5, atol=1e-5)
