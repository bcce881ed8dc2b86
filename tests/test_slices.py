"""`q_begin` sets the position of a slice of queries. (tests/test_problems.py checks that slices have the bits of the whole call.)"""

import numpy as np
import pytest

from blitz_attn import testing
from cases import DTYPES, ISA_LEVELS, attend, check, random_lists, same_bits
from test_backward import check as check_gradients

RULES = [
    {"causal": True},
    {"causal": True, "window": (20, -1)},
    {"window": (9, 4)},
    {"causal": True, "window": (3, 0)},
    {"window": (-1, 6)},
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("rules", RULES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("begin", [[0, 50, 90], [-30, 129, 200], 64, np.int32(7), np.array([5, 5, -39])], ids=str)
def test_queries_stand_where_q_begin_says(begin, dtype, rules):
    q, k, v = testing.make_qkv(3, 4, 2, 40, 130, 32, 24, dtype=dtype)
    lists = random_lists(np.random.default_rng(1), 3, 4, 3, 9, share=0.7, empty=0.1)
    options = {"q_begin": begin, "kv_lens": [130, 100, 60], "q_lens": [40, 33, 40], "block_shape": (16, 16), **rules}
    check(q, k, v, lists, **options)
    check(q, k, v, **options)
    check_gradients(q, k, v, lists, levels=ISA_LEVELS[-1:], **options)


def test_few_queries_of_many_take_the_path_of_many():
    """With q_total, a query of 300 has the bits of the whole call. Without, a kernel for few queries sums in another order."""
    q, k, v = testing.make_qkv(1, 4, 1, 300, 500, 64, dtype="float32", seed=3)
    whole = attend(q, k, v, causal=True)[0]
    one = {n: attend(q[:, :, 77:78], k, v, causal=True, q_begin=277, **n_total)[0] for n, n_total in ((1, {}), (300, {"q_total": 300}))}
    assert same_bits(one[300], np.ascontiguousarray(whole[:, :, 77:78]))
    np.testing.assert_allclose(one[1], whole[:, :, 77:78], rtol=1e-5, atol=1e-6)
