"""Block lists for each key head: the lists that its query heads share."""

import numpy as np
import pytest

from blitz_attn import testing
from cases import DTYPES, LAYOUTS, attend, dtype_of, random_lists, same_bits
from cases_grid import BLOCK_SHAPE, COLUMNS, KV_LEN, Q_LEN, ROWS, B, rule_options, trimmed
from test_backward import gradients, rest_of

HEADS, KV_HEADS = 6, 2


def case(dtype, layout, rule):
    """(q, k, v, lists, options), with a list for each key head."""
    options = {"block_shape": BLOCK_SHAPE, **rule_options(rule, layout, HEADS, KV_HEADS)}
    arrays = trimmed(*testing.make_qkv(B, HEADS, KV_HEADS, Q_LEN, KV_LEN, 40, 24, dtype=dtype, layout=layout), options)
    return *arrays, random_lists(np.random.default_rng(3), B, KV_HEADS, ROWS, COLUMNS, empty=0.2), options


@pytest.mark.sampled
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rule", ["none", "causal"])
def test_repeated_for_each_query_head_they_give_the_same_bits(dtype, layout, rule, isa_level):
    q, k, v, lists, options = case(dtype, layout, rule)
    repeated = np.repeat(lists, HEADS // KV_HEADS, axis=1)
    out, lse = attend(q, k, v, lists, **options)
    assert all(map(same_bits, (out, lse), attend(q, k, v, repeated, **options)))
    dout, _ = rest_of(q, v, **options)
    ours, theirs = (gradients(dout, q, k, v, out, lse, x, **options) for x in (lists, repeated))
    assert same_bits(ours[0], theirs[0])
    tolerance = {"float64": 1e-12, "float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}[dtype_of(q)]
    for a, b in zip(ours[1:], theirs[1:], strict=True):  # sums in another order
        a, b = (testing.to_float64(x, "bfloat16") for x in (a, b))
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * max(1, np.abs(b).max()))
