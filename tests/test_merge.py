"""Merging partial attention against the reference, and against attention over all the keys."""

import itertools

import numpy as np
import pytest

import blitz_attn
from blitz_attn import reference, sabi, testing
from cases import DTYPES, attend, bits_option, dtype_of, poisoned, same_bits


def states(rng, parts, shape, dtype, empty=0.3):
    """Random outputs and log-sum-exps; where a part is empty its output is NaN, which must not be looked at."""
    kind = np.float64 if dtype == "float64" else np.float32
    outs, lses = [], []
    for _ in range(parts):
        lse = rng.normal(0, 5, shape[:-1])
        lse[rng.random(lse.shape) < empty] = -np.inf
        out = np.where(np.isinf(lse)[..., None], np.nan, rng.standard_normal(shape))
        outs.append(testing.round_to(out, dtype))
        lses.append(lse.astype(kind))
    return outs, lses


def assert_merged(out, lse, outs, lses):
    dtype = dtype_of(outs[0])
    exact, exact_lse = reference.merge_states_n(outs, lses, **bits_option(outs[0]))
    got = testing.to_float64(out, dtype)
    rounding = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}[dtype]
    sums = 2.0**-53 if dtype == "float64" else 2.0**-24
    largest = max(np.nanmax(np.abs(testing.to_float64(o, dtype)), initial=1.0) for o in outs)
    np.testing.assert_allclose(got, exact, rtol=rounding, atol=32 * sums * largest)
    np.testing.assert_allclose(lse, exact_lse, rtol=8 * sums, atol=8 * sums)
    assert out.dtype == outs[0].dtype
    assert lse.dtype == lses[0].dtype


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (2, 3, 7, 5), (1, 2, 33, 64), (2, 1, 5, 576), (1, 1, 100, 17)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_against_the_reference(dtype, shape, isa_level):
    rng = np.random.default_rng(0)
    for parts in (1, 2, 3, 9):
        outs, lses = states(rng, parts, shape, dtype)
        assert_merged(*blitz_attn.merge_states_n(outs, lses, **bits_option(outs[0])), outs, lses)
    assert_merged(*blitz_attn.merge_states(outs[0], lses[0], outs[1], lses[1], **bits_option(outs[0])), outs[:2], lses[:2])


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_empty_and_poisoned_outputs(dtype, isa_level):
    outs, lses = states(np.random.default_rng(1), 3, (1, 2, 9, 20), dtype, empty=1.0)
    out, lse_out = poisoned((1, 2, 9, 20), outs[0]), np.full((1, 2, 9), np.nan, lses[0].dtype)
    results = blitz_attn.merge_states_n(outs, lses, out=out, lse_out=lse_out, **bits_option(outs[0]))
    assert results[0] is out
    assert results[1] is lse_out
    assert (testing.to_float64(out, dtype) == 0).all()
    assert (lse_out == -np.inf).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_part_is_itself(dtype, isa_level):
    """A part alone, or beside empty ones, comes back bit for bit."""
    outs, lses = states(np.random.default_rng(2), 3, (2, 2, 8, 33), dtype, empty=0.0)
    for other in (1, 2):
        outs[other], lses[other] = outs[other], np.full_like(lses[other], -np.inf)
    for n in (1, 3):
        out, lse = blitz_attn.merge_states_n(outs[:n], lses[:n], **bits_option(outs[0]))
        assert same_bits(out, outs[0])
        assert same_bits(lse, lses[0])


def test_extreme_log_sum_exps():
    ones = np.ones((1, 1, 4, 2), np.float32)
    lse_a = np.array([[[3e4, -3e4, 1e30, 100.0]]], np.float32)
    lse_b = np.array([[[3e4, -3e4, -1e30, 0.0]]], np.float32)
    out, lse = blitz_attn.merge_states(ones, lse_a, 3 * ones, lse_b)
    np.testing.assert_allclose(out[0, 0, :, 0], [2, 2, 1, 1], rtol=1e-6)
    np.testing.assert_allclose(lse[0, 0], [3e4 + np.log(2), -3e4 + np.log(2), 1e30, 100.0], rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_shards_of_keys_merge_to_the_whole(dtype, isa_level):
    q, k, v = testing.make_qkv(2, 4, 2, 50, 230, 32, 24, dtype=dtype)
    lists = sabi.random_with_frame(50, 230, (16, 16), 0.5, batch=2, heads=4)
    out, lse = attend(q, k, v, lists, block_shape=(16, 16))
    shards = []
    for first, last in ((0, 3), (3, 3), (3, 10), (10, 15)):
        mask = sabi.to_block_mask(lists, 15)
        mask[..., :first] = mask[..., last:] = False
        shards.append(attend(q, k, v, sabi.from_block_mask(mask), block_shape=(16, 16)))
    merged, merged_lse = blitz_attn.merge_states_n([o for o, _ in shards], [m for _, m in shards])
    tolerance = 1e-12 if dtype == "float64" else 2e-6
    np.testing.assert_allclose(merged, out, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(merged_lse, lse, rtol=tolerance)
    stacked = blitz_attn.merge_states_n(np.stack([o for o, _ in shards]), np.stack([m for _, m in shards]))
    assert same_bits(stacked[0], merged)
    assert same_bits(stacked[1], merged_lse)


@pytest.mark.parametrize("dtype", DTYPES)
def test_strided_parts(dtype):
    outs, lses = states(np.random.default_rng(3), 2, (2, 6, 10, 12), dtype)
    views = [o[:, ::2, ::-1, 3:9] for o in outs], [m[:, ::2, ::-1] for m in lses]
    plain = [[np.ascontiguousarray(x) for x in group] for group in views]
    for got, expected in zip(
        blitz_attn.merge_states_n(*views, **bits_option(outs[0])), blitz_attn.merge_states_n(*plain, **bits_option(outs[0])), strict=True
    ):
        assert same_bits(np.ascontiguousarray(got), np.ascontiguousarray(expected))


@pytest.mark.parametrize("shape", [(5,), (3, 5), (3, 8, 64), (0, 4, 8)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_fewer_axes(dtype, shape):
    """The bits of the same rows with more axes; results of paged calls are (n, H, D). Outputs may be views."""
    outs, lses = states(np.random.default_rng(6), 3, shape, dtype)
    lses = [np.asarray(x) for x in lses]
    more = (None,) * (4 - len(shape))
    named = bits_option(outs[0])
    expected = blitz_attn.merge_states_n([x[more] for x in outs], [x[more] for x in lses], **named)
    wide, wide_lse = poisoned((*shape[:-1], 2, shape[-1]), outs[0]), np.full((*shape[:-1], 3), np.nan, lses[0].dtype)
    for given in ({}, {"out": wide[..., 1, :], "lse_out": wide_lse[..., 2]}):
        out, lse = blitz_attn.merge_states_n(outs, lses, **given, **named)
        assert out.shape == shape
        assert lse.shape == shape[:-1]
        assert same_bits(np.ascontiguousarray(out[more]), expected[0])
        assert same_bits(np.ascontiguousarray(lse[more]), expected[1])
        assert_merged(out, np.asarray(lse), outs, lses)
    assert np.isnan(wide_lse[..., :2]).all()
    pair = blitz_attn.merge_states(outs[0], lses[0], outs[1], lses[1], **named)
    assert_merged(pair[0], np.asarray(pair[1]), outs[:2], lses[:2])
    if dtype in ("float32", "float64"):
        tree = blitz_attn.merge_states_tree(outs, lses)
        assert_merged(tree[0], np.asarray(tree[1]), outs, lses)


def test_results_of_paged_calls_in_tensors():
    torch = pytest.importorskip("torch")
    outs, lses = states(np.random.default_rng(7), 2, (3, 8, 64), "float32")
    out, lse = blitz_attn.merge_states(*(torch.from_numpy(x) for pair in zip(outs, lses, strict=True) for x in pair))
    expected, expected_lse = blitz_attn.merge_states(outs[0], lses[0], outs[1], lses[1])
    assert same_bits(out.numpy(), expected)
    assert same_bits(lse.numpy(), expected_lse)


def test_a_nan_stays_in_its_row():
    outs, lses = states(np.random.default_rng(4), 2, (1, 2, 6, 8), "float32", empty=0.0)
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


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda o, m: (o[:1], m), "lses"),
        (lambda o, m: ([], []), "outs: expected"),
        (lambda o, m: ([o[0], o[1][..., :2]], m), r"outs\[1\]: expected"),
        (lambda o, m: (o, [m[0], m[1][..., :2]]), r"lses\[1\]: expected"),
        (lambda o, m: (itertools.repeat(o[0]), m), "outs: expected at most 65536 arrays, got more"),
    ],
)
def test_refusals(change, sentence):
    outs, lses = states(np.random.default_rng(5), 2, (1, 2, 3, 4), "float32")
    with pytest.raises(ValueError, match=sentence):
        blitz_attn.merge_states_n(*change(outs, lses))


class Unending:
    """A sequence that gives items for ever."""

    def __getitem__(self, i):
        return i


def test_sentences():
    out, lse = np.ones((1, 2, 8, 8), np.float32), np.zeros((1, 2, 8), np.float32)
    with pytest.raises(TypeError, match="^lses: expected a sequence of arrays, got Unending$"):
        blitz_attn.merge_states_n([], Unending())
    with pytest.raises(TypeError, match="^outs: expected a sequence of arrays, got NoneType$"):
        blitz_attn.merge_states_n(None, None)
    with pytest.raises(ValueError, match=r"^lses\[1\]: expected shape \(1, 2, 8\) like the leading axes of outs\[0\], got \(1, 2\)$"):
        blitz_attn.merge_states_n([out, out], [lse, lse[..., 0]])
    with pytest.raises(TypeError, match=r"^lses\[1\]: expected dtype float32 with outs\[0\] of 32 bits or fewer, got float64$"):
        blitz_attn.merge_states_n([out, out], [lse, lse.astype(np.float64)])
    with pytest.raises(ValueError, match=r"^outs\[1\]: expected shape \(2, 8, 8\) like outs\[0\], got \(2, 8, 7\)$"):
        blitz_attn.merge_states_n([out[0], out[0, ..., :7]], [lse[0], lse[0]])
    with pytest.raises(ValueError, match=r"^lse_out: expected shape \(2, 8\) like the leading axes of outs\[0\], got \(1, 2, 8\)$"):
        blitz_attn.merge_states_n([out[0]], [lse[0]], lse_out=lse.copy())
    with pytest.raises(ValueError, match=r"^out_a: expected shape \(..., Dv\), got \(\)$"):
        blitz_attn.merge_states(np.float32(1), np.float32(1), out, lse)
    with pytest.raises(ValueError, match=r"^outs\[0\]: expected at most 4 dimensions, got 5$"):
        blitz_attn.merge_states_n([out[None]], [lse[None]])


def test_overlaps_are_named_as_the_caller_names_its_arguments():
    out, lse = np.ones((2, 8), np.float32), np.zeros(2, np.float32)
    with pytest.raises(ValueError, match="^out: expected memory of its own, got an array that overlaps out_a$"):
        blitz_attn.merge_states(out, lse, out.copy(), lse.copy(), out=out)
    with pytest.raises(ValueError, match="^lse_out: expected memory of its own, got an array that overlaps lse_b$"):
        blitz_attn.merge_states(out, lse.copy(), out.copy(), lse, out=np.empty_like(out), lse_out=lse)
