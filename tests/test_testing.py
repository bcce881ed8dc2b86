"""The helpers for tests round as exact arithmetic does, make inputs and upstream's lists, and compare results."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest

from blitz_attn import sabi, testing
from blitz_attn.testing import BLOCK_SHAPES, BlockGrid, FrameWidths

NO_FRAME = FrameWidths(0, 0, 0, 0)


# ---- Rounding ------------------------------------------------------------------------------------------------------


def nearest(value, mantissa_bits, least_exponent):
    """Round a finite float exactly, ties to even, by rational arithmetic (no overflow)."""
    if value == 0:
        return value
    exponent = max(math.frexp(value)[1] - 1, least_exponent)
    step = Fraction(2) ** (exponent - mantissa_bits)
    return float(round(Fraction(value) / step) * step)


def test_upstreams_generators_clamp_a_sparsity():
    drawn = [testing.generate_sparse_blocks_by_row(512, 512, 128, 128, sparsity, 1, None) for sparsity in (-0.5, 0.0, 1.0, 90)]
    assert drawn[0] == drawn[1]
    assert drawn[2] == drawn[3] == [[-1] * 4] * 4
    assert testing.is_block_sparse_pattern_feasible(testing.BlockGrid(512, 512, 128, 128), None, -0.5)
    with pytest.raises(ValueError, match="sparsity: expected a number from 0 to 1, got nan"):
        testing.generate_sparse_blocks_by_row(512, 512, 128, 128, float("nan"), 1, None)


@pytest.mark.parametrize(("dtype", "bits", "least"), [("bfloat16", 7, -126), ("float16", 10, -14), ("float32", 23, -126)])
def test_round_to_is_exact(dtype, bits, least):
    rng = np.random.default_rng(1)
    values = rng.standard_normal(300) * 2.0 ** rng.integers(-24, 15, 300)
    # Ties, values next to a tie by one bit of float64 (for which rounding twice is wrong), and small numbers.
    ties = (1 + (2 * np.arange(8) + 1) * 2.0 ** -(bits + 1)) * 2.0 ** np.arange(-4, 4)
    tiny = 2.0**least * np.array([1.0, 0.3, 2.0 ** -(bits + 1), 1.5 * 2.0**-bits])
    values = np.concatenate([values, ties, np.nextafter(ties, 0), np.nextafter(ties, 9), ties * (1 + 2.0**-40), tiny])
    values = np.concatenate([values, -values])
    got = testing.to_float64(testing.round_to(values, dtype), dtype)
    assert got.tolist() == [nearest(float(x), bits, least) for x in values]


def test_round_to_special_values():
    special = np.array([np.inf, -np.inf, np.nan, 0.0, -0.0, 1e300, -1e300, 3.4e38])
    for dtype in ("float16", "bfloat16", "float32"):
        got = testing.to_float64(testing.round_to(special, dtype), dtype)
        assert got[:2].tolist() == [np.inf, -np.inf]
        assert np.isnan(got[2])
        assert np.signbit(got[3:5]).tolist() == [False, True]
        assert got[5:7].tolist() == [np.inf, -np.inf]
    with pytest.raises(ValueError, match="dtype: expected float64, float32, float16 or bfloat16, got int8"):
        testing.round_to(special, "int8")


def test_to_float64_reads_every_kind():
    values = np.array([[1.0, -2.5], [0.0, 384.0]])
    for dtype in ("float64", "float32", "float16", "bfloat16"):
        assert (testing.to_float64(testing.round_to(values, dtype), dtype) == values).all()
    bits = np.array([[0x3F80, 0xC020], [0, 0x43C0]], np.uint16)
    assert (testing.to_float64(bits[:, ::-1], "bfloat16") == values[:, ::-1]).all()
    with pytest.raises(TypeError, match="dtype: expected .bfloat16. to read uint16 bits, got None"):
        testing.to_float64(bits)


def test_to_float64_reads_torch():
    torch = pytest.importorskip("torch")
    values = torch.tensor([[1.0, -2.5]], dtype=torch.bfloat16, requires_grad=True)
    assert testing.to_float64(values).tolist() == [[1.0, -2.5]]


# ---- Inputs --------------------------------------------------------------------------------------------------------


def test_make_qkv_values_do_not_depend_on_the_layout():
    sizes = (2, 4, 2, 5, 7, 8, 3)
    q, _, v = testing.make_qkv(*sizes, dtype="float16")
    assert q.shape == (2, 4, 5, 8)
    assert v.shape == (2, 2, 7, 3)
    for layout, back in {
        "BSND": lambda x, heads: x.swapaxes(1, 2),
        "BSH": lambda x, heads: x.reshape(*x.shape[:2], heads, -1).swapaxes(1, 2),
        "TND": lambda x, heads: x.reshape(2, -1, *x.shape[1:]).swapaxes(1, 2),
    }.items():
        other_q, _, other_v = testing.make_qkv(*sizes, dtype="float16", layout=layout)
        assert other_q.flags.c_contiguous
        assert (back(other_q, 4) == q).all()
        assert (back(other_v, 2) == v).all()
    with pytest.raises(ValueError, match="kv_layout: expected NHD or HND, got 'NDH'"):
        testing.make_paged(1, 2, 2, [3], 4, 8, kv_layout="NDH")
    with pytest.raises(ValueError, match=r"block_shape, tokens: expected positive numbers, got \(0, 4\) and 256"):
        testing.small_frame((0, 4))
    with pytest.raises(ValueError, match="layout: expected BNSD, BSND, BSH or TND, got 'NSD'"):
        testing.make_qkv(*sizes, layout="NSD")


def test_make_qkv_seeds():
    same, again, other = (testing.make_qkv(1, 1, 1, 4, 4, 4, seed=s)[0] for s in (1, 1, 2))
    assert (same == again).all()
    assert (same != other).any()


# ---- Upstream's lists and rule -------------------------------------------------------------------------------------


def feasible_cells(sizes, sparsities, frames):
    cells = itertools.product(sizes, sparsities, BLOCK_SHAPES, frames)
    return sum(testing.is_block_sparse_pattern_feasible(BlockGrid(s, s, *shape), frame(shape), p) for s, p, shape, frame in cells)


def test_feasibility_rule_gives_upstreams_test_counts():
    def none(_):
        return NO_FRAME

    tenths = [n / 10 for n in range(10)]
    some = [0.3, 0.5, 0.7, 0.9]
    assert 4 * feasible_cells([24000, 36000], tenths, [none, testing.small_frame]) == 2532
    assert feasible_cells([1024, 2048, 4096, 8192, 12288, 16384, 20480, 24000], some, [none]) == 494
    assert feasible_cells([16384, 24000], some, [testing.small_frame]) == 113
    assert 2 * feasible_cells([512, 1024], some, [none]) == 164


@pytest.mark.parametrize("frame", [None, NO_FRAME, FrameWidths(1, 1, 1, 1), FrameWidths(2, 0, 3, 1)])
@pytest.mark.parametrize("block_shape", [(128, 128), (128, 512), (512, 128), (1024, 1024)])
def test_feasible_means_that_a_list_without_empty_rows_can_be_drawn(block_shape, frame):
    for size, sparsity in itertools.product((256, 1000, 2048, 4096), (0.0, 0.3, 0.5, 0.7, 0.9, 1.0)):
        grid = BlockGrid(size, size, *block_shape)
        if testing.is_block_sparse_pattern_feasible(grid, frame, sparsity):
            drawn = testing.random_sabi(testing.MaskSpec(1, 2, size, size, 128, *block_shape, sparsity, frame))
            assert sabi.counts(drawn).min() > 0


def test_infeasible_cases():
    def feasible(*args, **options):
        return testing.is_block_sparse_pattern_feasible(BlockGrid(*args[:4]), *args[4:], **options)

    assert not feasible(0, 128, 128, 128, None, 0.0)
    assert not feasible(256, 256, 128, 128, FrameWidths(3, 0, 0, 0), 0.0)
    assert not feasible(1024, 1024, 1024, 1024, None, 0.5)
    assert feasible(1024, 1024, 1024, 1024, None, 0.5, require_nonempty_per_row=False)
    assert feasible(1024, 1024, 1024, 1024, FrameWidths(0, 0, 1, 0), 0.0)


def test_small_frame_is_that_of_upstreams_tests():
    left, top = {128: 2, 256: 1, 512: 1, 1024: 1}, {128: 3, 256: 2, 512: 1, 1024: 1}
    for block_q, block_kv in BLOCK_SHAPES:
        assert testing.small_frame((block_q, block_kv)) == (left[block_kv], 1, top[block_q], 1)


def test_generate_sparse_blocks_by_row():
    frame = FrameWidths(1, 1, 1, 0)
    rows = testing.generate_sparse_blocks_by_row(1000, 900, 128, 128, 0.5, 7, frame)
    assert len(rows) == 8
    assert {len(row) for row in rows} == {8}
    assert rows[0] == list(range(8))
    expected = sabi.random_with_frame(1000, 900, (128, 128), 0.5, frame=frame, seed=7, dtype="int32")
    assert [[c for c in row if c >= 0] for row in rows] == [[c for c in row if c >= 0] for row in expected[0, 0].tolist()]
    padded = testing.generate_sparse_blocks_by_row(1000, 900, 128, 128, 0.5, 7, frame, pad_value=65535)
    assert [[65535 if c == -1 else c for c in row] for row in rows] == padded
    heads = testing.generate_sparse_blocks_by_row_per_head(1000, 900, 128, 128, 0.5, 2, frame, 6)
    assert heads[1] == rows
    shuffled = testing.generate_sparse_blocks_by_row(1000, 900, 128, 128, 0.5, 7, frame, sort_within_row=False)
    assert shuffled[0] != rows[0]
    assert sorted(shuffled[0]) == rows[0]


# ---- Comparisons ---------------------------------------------------------------------------------------------------


def test_error_of():
    exact = np.array([3.0, -4.0, -np.inf])
    assert testing.error_of(exact, exact) == (0.0, 0.0, 4.0)
    assert testing.error_of([3.0, -4.5, -np.inf], exact) == (0.1, 0.5, 4.0)
    for wrong in ([3.0, np.nan, -np.inf], [3.0, -4.0, np.inf], [3.0, -4.0, 0.0], [np.inf, -4.0, -np.inf]):
        assert testing.error_of(wrong, exact)[:2] == (math.inf, math.inf)
    with pytest.raises(ValueError, match=r"values: expected shape \(3,\), got \(2,\)"):
        testing.error_of([0.0, 0.0], exact)


def test_error_rule_tells_good_from_bad():
    q, k, v = testing.make_qkv(1, 2, 1, 60, 60, 16)
    exact, _ = testing.reference_attention(q, k, v, causal=True)
    ours, dense = testing.error_rule(exact.astype(np.float32), q, k, v, causal=True)
    assert 0 < ours.relative < dense.relative < 1e-6
    assert testing.meets_error_rule(ours, dense, "float32")
    ours, dense = testing.error_rule(exact * (1 + 1e-5), q, k, v, causal=True)
    assert not testing.meets_error_rule(ours, dense, "float32")
    assert not testing.meets_error_rule(ours, dense, "float64")


def test_block_allclose_map(capsys):
    a = np.zeros((2, 1, 5, 4), np.float32)
    b = a.copy()
    b[1, 0, 4, 0] = 0.1
    b[0, 0, 0, 3] = 0.0005
    got = testing.block_allclose_map(a, b, 2, 3, print_map=True)
    assert got.shape == (2, 1, 3, 2)
    assert got.tolist() == [[[[True, True]] * 3], [[[True, True], [True, True], [False, True]]]]
    assert capsys.readouterr().out.splitlines() == ["batch 0, head 0", "1 1", "1 1", "1 1", "batch 1, head 0", "1 1", "1 1", "0 1"]
    assert not testing.block_allclose_map(a, b, 2, 3, atol=1e-4)[0, 0, 0, 1]
    with pytest.raises(ValueError, match="ref: expected a four-dimensional array of the shape of out"):
        testing.block_allclose_map(a, b[:1], 2, 3)
    with pytest.raises(ValueError, match="block_h, block_w: expected positive numbers, got 0 and 3"):
        testing.block_allclose_map(a, b, 0, 3)
