"""Laws of the operation on random problems, beside those that tests/test_problems.py checks: results that follow from other results."""

import numpy as np
import pytest

import blitz_attn
from blitz_attn import sabi, testing
from cases import DTYPES, ISA_LEVELS, attend, dtype_of, same_bits

hypothesis = pytest.importorskip("hypothesis")
st = hypothesis.strategies

# Derandomised: a run is the same on every machine. Levels are walked inside a test, since fixtures outlive examples.
examples = hypothesis.settings(max_examples=40, deadline=None, derandomize=True, database=None)


@st.composite
def problems(draw, dtypes=tuple(DTYPES), rules=True):
    """(q, k, v, list, options) in BNSD, with at least one key."""
    batch, kv_heads, group = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(1, 3))
    q_len, kv_len = draw(st.integers(1, 70)), draw(st.integers(1, 150))
    head_dim, v_dim = draw(st.sampled_from([1, 7, 16, 40, 64])), draw(st.sampled_from([1, 5, 32, 64]))
    block_shape = draw(st.sampled_from([(16, 16), (8, 32), (32, 8), (5, 7), (64, 64), (128, 128)]))
    heads, seed = kv_heads * group, draw(st.integers(0, 999))
    arrays = testing.make_qkv(batch, heads, kv_heads, q_len, kv_len, head_dim, v_dim, dtype=draw(st.sampled_from(dtypes)), seed=seed)
    options = {"block_shape": block_shape}
    if rules:
        options["causal"] = draw(st.booleans())
        options["window"] = draw(st.sampled_from([None, (10, 3), (-1, 5), (20, -1)]))
    rows, columns = -(-q_len // block_shape[0]), -(-kv_len // block_shape[1])
    mask = np.random.default_rng(seed).random((batch, heads, rows, columns)) < draw(st.sampled_from([0.2, 0.6, 1.0]))
    return (*arrays, sabi.from_block_mask(mask, dtype="int32"), options)


def each_level():
    for level in ISA_LEVELS:
        with blitz_attn.isa(level):
            yield level


def close(a, b):
    """Equal to a few roundings: the number of queries that share keys may choose another kernel, which sums in another order."""
    rounding = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}[dtype_of(a[0])]
    sums = min(rounding, 2.0**-24)
    out_a, out_b = (testing.to_float64(x[0], "bfloat16") for x in (a, b))
    np.testing.assert_allclose(out_a, out_b, rtol=2 * rounding, atol=64 * sums)
    np.testing.assert_allclose(a[1], b[1], rtol=16 * sums, atol=16 * sums)


@examples
@hypothesis.given(problems(rules=False), st.integers(0, 150))
def test_split_keys_merge_to_the_whole(problem, cut):
    q, k, v, lists, options = problem
    columns = -(-k.shape[2] // options["block_shape"][1])
    left = sabi.dense(q.shape[2], k.shape[2], options["block_shape"])[..., : cut % (columns + 1)].astype(np.int32)
    left = np.pad(left, [(0, 0)] * 3 + [(0, 1)], constant_values=-1)
    parts = sabi.intersection(lists, left, columns, dtype="int32"), sabi.difference(lists, left, columns, dtype="int32")
    wide = [testing.round_to(testing.to_float64(x, "bfloat16"), "float64" if x.dtype == np.float64 else "float32") for x in (q, k, v)]
    whole, whole_lse = attend(*wide, lists, **options)
    states = [attend(*wide, part, **options) for part in parts]
    merged, merged_lse = blitz_attn.merge_states(*states[0], *states[1])
    tolerance = 1e-12 if wide[0].dtype == np.float64 else 2e-6
    scale = max(1.0, float(np.abs(wide[2]).max()))
    np.testing.assert_allclose(merged, whole, rtol=tolerance, atol=tolerance * scale)
    np.testing.assert_allclose(merged_lse, whole_lse, rtol=tolerance, atol=tolerance * 4)


@examples
@hypothesis.given(problems())
def test_a_head_does_not_know_the_others(problem):
    q, k, v, lists, options = problem
    group = q.shape[1] // k.shape[1]
    for _ in each_level():
        out, lse = attend(q, k, v, lists, **options)
        for h in range(q.shape[1]):
            kv = slice(h // group, h // group + 1)
            alone = attend(q[:, h : h + 1], k[:, kv], v[:, kv], lists[:, h : h + 1], **options)
            close(alone, (out[:, h : h + 1], lse[:, h : h + 1]))


@examples
@hypothesis.given(problems(dtypes=("float32", "float64")), st.integers(-20, 20))
def test_a_power_of_two_on_v_goes_through(problem, power):
    q, k, v, lists, options = problem
    out, lse = attend(q, k, v, lists, **options)
    scaled, scaled_lse = attend(q, k, v * v.dtype.type(2.0**power), lists, **options)
    assert same_bits(scaled, out * out.dtype.type(2.0**power))
    assert same_bits(scaled_lse, lse)
