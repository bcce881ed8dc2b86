"""Merged results of partial attention are compared with the reference and with attention over all keys."""

import numpy as np
import pytest

import blitz_attn
from blitz_attn import reference, sabi, testing
from cases import DTYPES, attend, bits_option, dtype_of, poisoned, same_bits


def states(parts, shape, dtype, empty=0.3, seed=0):
    """Random outputs and log-sum-exps. If a row of a part is empty, its output is NaN, which must not be read."""
    rng = np.random.default_rng(seed)
    lses = rng.normal(0, 5, (parts, *shape[:-1]))
    lses[rng.random(lses.shape) < empty] = -np.inf
    outs = np.where(np.isinf(lses)[..., None], np.nan, rng.standard_normal((parts, *shape)))
    real = np.float64 if dtype == "float64" else np.float32
    return list(testing.round_to(outs, dtype)), [np.asarray(x) for x in lses.astype(real)]


def assert_merged(results, outs, lses):
    out, lse = results
    dtype = dtype_of(outs[0])
    exact, exact_lse = reference.merge_states_n(outs, lses, **bits_option(outs[0]))
    rounding = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}[dtype]
    sums = 2.0**-53 if dtype == "float64" else 2.0**-24
    largest = max(np.nanmax(np.abs(testing.to_float64(o, dtype)), initial=1.0) for o in outs)
    np.testing.assert_allclose(testing.to_float64(out, dtype), exact, rtol=rounding, atol=32 * sums * largest)
    np.testing.assert_allclose(lse, exact_lse, rtol=8 * sums, atol=8 * sums)
    assert (out.dtype, np.asarray(lse).dtype) == (outs[0].dtype, lses[0].dtype)


SHAPES = [(1, 1, 1, 1), (2, 3, 7, 5), (1, 2, 33, 64), (2, 1, 5, 576), (1, 1, 100, 17), (5,), (3, 5), (3, 8, 64), (0, 4, 8)]


@pytest.mark.parametrize("parts", [1, 2, 3, 9])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_against_the_reference(dtype, shape, parts, isa_level):
    """States may have fewer axes, like results of paged calls, and outputs may be views."""
    outs, lses = states(parts, shape, dtype)
    named = bits_option(outs[0])
    merged = blitz_attn.merge_states_n(outs, lses, **named)
    assert_merged(merged, outs, lses)
    wide, wide_lse = poisoned((*shape[:-1], 2, shape[-1]), outs[0]), np.full((*shape[:-1], 3), np.nan, lses[0].dtype)
    given = {"out": wide[..., 1, :], "lse_out": wide_lse[..., 2]}
    again = blitz_attn.merge_states_n(outs, lses, **given, **named)
    assert all(x is y for x, y in zip(again, given.values(), strict=True))
    assert all(same_bits(np.ascontiguousarray(x), np.ascontiguousarray(y)) for x, y in zip(again, merged, strict=True))
    assert np.isnan(wide_lse[..., :2]).all()
    if parts == 2:
        assert all(map(same_bits, blitz_attn.merge_states(outs[0], lses[0], outs[1], lses[1], **named), merged))
    if dtype in ("float32", "float64"):
        assert_merged(blitz_attn.merge_states_tree(outs, lses), outs, lses)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("parts", [1, 3])
def test_one_part_is_itself(parts, dtype, isa_level):
    """One part, alone or with empty parts, is returned bit for bit. The result of only empty parts is empty."""
    outs, lses = states(parts, (2, 2, 8, 33), dtype, empty=0.0)
    for lse in lses[1:]:
        lse[...] = -np.inf
    out, lse = blitz_attn.merge_states_n(outs, lses, **bits_option(outs[0]))
    assert same_bits(out, outs[0])
    assert same_bits(lse, lses[0])
    lses[0][...] = -np.inf
    out, lse = blitz_attn.merge_states_n(outs, lses, **bits_option(outs[0]))
    assert (testing.to_float64(out, dtype) == 0).all()
    assert (lse == -np.inf).all()


def test_extreme_log_sum_exps():
    ones = np.ones((1, 1, 4, 2), np.float32)
    lse_a = np.array([[[3e4, -3e4, 1e30, 100.0]]], np.float32)
    lse_b = np.array([[[3e4, -3e4, -1e30, 0.0]]], np.float32)
    out, lse = blitz_attn.merge_states(ones, lse_a, 3 * ones, lse_b)
    np.testing.assert_allclose(out[0, 0, :, 0], [2, 2, 1, 1], rtol=1e-6)
    np.testing.assert_allclose(lse[0, 0], [3e4 + np.log(2), -3e4 + np.log(2), 1e30, 100.0], rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("heads", "dims"), [((4, 2), (32, 24)), ((3, 1), (7, 1)), ((2, 2), (1, 64)), ((6, 2), (40, 5))], ids=str)
def test_shards_of_keys_merge_to_the_whole(heads, dims, dtype, isa_level):
    q, k, v = testing.make_qkv(2, *heads, 50, 230, *dims, dtype=dtype)
    lists = sabi.random_with_frame(50, 230, (16, 16), 0.5, batch=2, heads=heads[0])
    whole, shards = attend(q, k, v, lists, block_shape=(16, 16)), []
    for first, last in ((0, 3), (3, 3), (3, 10), (10, 15)):
        mask = sabi.to_block_mask(lists, 15)
        mask[..., :first] = mask[..., last:] = False
        shards.append(attend(q, k, v, sabi.from_block_mask(mask), block_shape=(16, 16)))
    merged = blitz_attn.merge_states_n(*zip(*shards, strict=True))
    for got, right in zip(merged, whole, strict=True):
        tolerance = 1e-12 if dtype == "float64" else 2e-6
        np.testing.assert_allclose(got, right, rtol=tolerance, atol=tolerance)
    assert all(map(same_bits, blitz_attn.merge_states_n(*map(np.stack, zip(*shards, strict=True))), merged))


def test_results_of_paged_calls_in_tensors():
    torch = pytest.importorskip("torch")
    outs, lses = states(2, (3, 8, 64), "float32")
    merged = blitz_attn.merge_states(*(torch.from_numpy(x) for pair in zip(outs, lses, strict=True) for x in pair))
    expected = blitz_attn.merge_states(outs[0], lses[0], outs[1], lses[1])
    assert all(same_bits(x.numpy(), y) for x, y in zip(merged, expected, strict=True))


def test_a_nan_stays_in_its_row():
    outs, lses = states(2, (1, 2, 6, 8), "float32", empty=0.0)
    clean, clean_lse = blitz_attn.merge_states_n(outs, lses)
    outs[1][0, 1, 3, 5] = np.nan
    lses[0][0, 0, 2] = np.nan
    out, lse = blitz_attn.merge_states_n(outs, lses)
    assert np.isnan(out[0, 1, 3]).tolist() == [d == 5 for d in range(8)]
    assert np.isnan(out[0, 0, 2]).all()
    assert np.isnan(lse[0, 0, 2])
    out[0, 1, 3, 5], out[0, 0, 2], lse[0, 0, 2] = clean[0, 1, 3, 5], clean[0, 0, 2], clean_lse[0, 0, 2]
    assert same_bits(out, clean)
    assert same_bits(lse, clean_lse)


# ---- Trees of states ------------------------------------------------------------------------------------------------


def node(outs, lses, level, index):
    """A node of the tree, by the definition of the tree."""
    first, middle = index << level, ((index << level) + (index + 1 << level)) // 2
    if level == 0:
        return outs[first], lses[first]
    left = node(outs, lses, level - 1, 2 * index)
    return left if middle >= len(outs) else blitz_attn.merge_states(*left, *node(outs, lses, level - 1, 2 * index + 1))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 6, 7, 8, 9, 21])
def test_trees(count, dtype):
    outs, lses = states(count, (2, 3, 5, 16), dtype)
    got = blitz_attn.merge_states_tree(outs, lses)
    expected = node(outs, lses, 5, 0) if count > 1 else blitz_attn.merge_states_n(outs, lses)
    assert all(map(same_bits, got, expected))
    tolerance = 1e-5 if dtype == "float32" else 1e-13
    for ours, theirs in zip(got, reference.merge_states_tree(outs, lses), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=tolerance, atol=tolerance)


def test_a_tree_of_one_part_makes_new_arrays_with_zeros_in_empty_rows():
    out, lse = np.full((1, 1, 2, 3), np.nan, np.float32), np.array([[[-np.inf, 0.5]]], np.float32)
    out[:, :, 1] = 1
    got, got_lse = blitz_attn.merge_states_tree([out], [lse])
    assert got.tolist() == [[[[0, 0, 0], [1, 1, 1]]]]
    assert same_bits(got_lse, lse)
    assert not np.shares_memory(got, out)
    assert not np.shares_memory(got_lse, lse)
