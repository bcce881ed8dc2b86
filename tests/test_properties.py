"""A law of two operations on random problems. Those of one are checked by tests/test_problems.py."""

import numpy as np
import pytest

import blitz_attn
from blitz_attn import sabi, testing
from cases import attend

hypothesis = pytest.importorskip("hypothesis")
st = hypothesis.strategies

# Derandomised: a run is the same on every machine.
examples = hypothesis.settings(max_examples=40, deadline=None, derandomize=True, database=None)


@st.composite
def problems(draw):
    """(q, k, v, list, block shape) in BNSD, with at least one key."""
    batch, kv_heads, group = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(1, 3))
    q_len, kv_len = draw(st.integers(1, 70)), draw(st.integers(1, 150))
    head_dim, v_dim = draw(st.sampled_from([1, 7, 16, 40, 64])), draw(st.sampled_from([1, 5, 32, 64]))
    block_shape = draw(st.sampled_from([(16, 16), (8, 32), (32, 8), (5, 7), (64, 64), (128, 128)]))
    heads, seed = kv_heads * group, draw(st.integers(0, 999))
    dtype = draw(st.sampled_from(["float32", "float64"]))
    arrays = testing.make_qkv(batch, heads, kv_heads, q_len, kv_len, head_dim, v_dim, dtype=dtype, seed=seed)
    rows, columns = -(-q_len // block_shape[0]), -(-kv_len // block_shape[1])
    mask = np.random.default_rng(seed).random((batch, heads, rows, columns)) < draw(st.sampled_from([0.2, 0.6, 1.0]))
    return (*arrays, sabi.from_block_mask(mask, dtype="int32"), block_shape)


@examples
@hypothesis.given(problems(), st.integers(0, 150))
def test_split_keys_merge_to_the_whole(problem, cut):
    *arrays, lists, block_shape = problem
    (q, k, v), columns = arrays, -(-arrays[1].shape[2] // block_shape[1])
    left = sabi.dense(q.shape[2], k.shape[2], block_shape)[..., : cut % (columns + 1)].astype(np.int32)
    left = np.pad(left, [(0, 0)] * 3 + [(0, 1)], constant_values=-1)
    parts = sabi.intersection(lists, left, columns, dtype="int32"), sabi.difference(lists, left, columns, dtype="int32")
    whole, whole_lse = attend(*arrays, lists, block_shape=block_shape)
    states = [attend(*arrays, part, block_shape=block_shape) for part in parts]
    merged, merged_lse = blitz_attn.merge_states(*states[0], *states[1])
    tolerance = 1e-12 if q.dtype == np.float64 else 2e-6
    np.testing.assert_allclose(merged, whole, rtol=tolerance, atol=tolerance * max(1.0, float(np.abs(v).max())))
    np.testing.assert_allclose(merged_lse, whole_lse, rtol=tolerance, atol=tolerance * 4)
