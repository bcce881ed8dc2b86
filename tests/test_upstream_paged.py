"""Paged decode over the shapes of upstream's accuracy test, with its tolerance, and with its later long ones."""

import numpy as np
import pytest

from blitz_attn import reference, testing
from cases_paged import attend_paged

RTOL, ATOL = 5e-3, 2e-2  # upstream's, for float16 against another half-precision operator; the reference here is float64

# batch, query heads, KV heads, tokens; head dim and page size are 128
SHAPES = [(1, 32, 8, 128), (4, 32, 8, 512), (2, 8, 8, 256), (8, 32, 8, 1024), (1, 32, 8, 2048), (4, 64, 8, 1024)]
LONG_SHAPES = [
    (1, 32, 8, 4096),
    (1, 32, 8, 8192),
    (1, 32, 8, 16384),
    (1, 16, 8, 4096),
    (1, 40, 8, 2048),
    (1, 64, 8, 2048),
    (1, 32, 32, 2048),
]
CELLS = [
    *[pytest.param(shape, id="b{}-h{}-kv{}-s{}".format(*shape)) for shape in SHAPES],
    *[pytest.param(shape, id="b{}-h{}-kv{}-s{}".format(*shape), marks=pytest.mark.full) for shape in LONG_SHAPES],
]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("shape", CELLS)
def test_paged_attention_accuracy(shape, dtype):
    batch, heads, kv_heads, tokens = shape
    case = testing.make_paged(batch, heads, kv_heads, tokens, 128, 128, dtype=dtype)
    out, _ = attend_paged(case)
    # the reference takes its time: of large batches, the first and the last request stand for all
    some = sorted({0, batch - 1})
    options = {name: value for name, value in case.options.items() if name != "q_lens"}
    exact = reference.paged_attention(case.q[some], *case.arrays[1:3], case.block_tables[some], case.seq_lens[some], **options)
    values = testing.to_float64(out, dtype)
    assert np.isfinite(values).all()
    np.testing.assert_allclose(values[some], exact, rtol=RTOL, atol=ATOL)


def test_unlike_lengths():
    """What upstream leaves out: lengths that are no multiple of the page, and differ."""
    case = testing.make_paged(4, 32, 8, [1, 129, 1000, 0], 128, 128, dtype="float16")
    out, _ = attend_paged(case)
    np.testing.assert_allclose(out, reference.paged_attention(*case.arrays, **case.options), rtol=RTOL, atol=ATOL)
