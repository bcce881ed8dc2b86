"""The log-sum-exp over upstream's grid: dense, sparse, framed, with several heads, and of zero inputs. Its shape, and calls without it.

``PYTHONPATH=. python tests/test_lse.py`` runs one case of each test as a smoke test.
"""

import itertools
import math

import numpy as np
import pytest

from blitz_attn import testing
from blitz_attn.testing import BLOCK_SHAPES
from upstream import NO_FRAME, assert_close, call, cell, feasible_cells, inputs, lists_for, scaled

LSE_ATOL = {"bfloat16": 1e-2, "float16": 1e-2, "float32": 1e-3}
DTYPES = ["bfloat16", "float16"]
SPARSITIES = [0.3, 0.5, 0.7, 0.9]

DENSE_SHAPES = [
    *[(1, h, s, 128) for s, h in [(1024, 1), (1024, 2), (2048, 4), (4096, 4), (4096, 8), (8192, 2), (8192, 4), (12288, 2), (12288, 4)]],
    *[(1, h, s, 128) for s, h in [(16384, 2), (16384, 4), (24000, 1), (24000, 2), (24000, 4)]],
]
SPARSE_SHAPES = [(1, 1, s, 128) for s in (1024, 2048, 4096, 8192, 12288, 16384, 20480, 24000)]
FRAMED_SHAPES = [(1, 1, 16384, 128), (1, 1, 24000, 128)]
MULTIHEAD_SHAPES = [((1, h, s, 128), False) for s in (512, 1024) for h in (2, 4)]  # upstream's own shapes, small enough for the default run
ZERO_SHAPES = [(1, 1, 512, 128), (1, 2, 1024, 128), (1, 4, 4096, 128), (1, 4, 16384, 128), (1, 2, 24000, 128)]
SHAPE_SHAPES = [(1, 1, 512, 128), (1, 8, 8192, 128), (1, 4, 24000, 128)]

DENSE_CELLS = [
    cell(shape, dtype, block_shape, full=full)
    for (shape, full), dtype, block_shape in itertools.product(scaled(DENSE_SHAPES, 12), DTYPES, BLOCK_SHAPES)
    if dtype == "bfloat16" or block_shape == (128, 128)
]
SPARSE_CELLS = feasible_cells(scaled(SPARSE_SHAPES, 5), SPARSITIES, lambda block_shape: NO_FRAME)
FRAMED_CELLS = feasible_cells(scaled(FRAMED_SHAPES, 4), SPARSITIES, testing.small_frame)
MULTIHEAD_CELLS = feasible_cells(MULTIHEAD_SHAPES, SPARSITIES, lambda block_shape: NO_FRAME)
ZERO_CELLS = [
    cell(*c, full=full) for (s, full), d, b in itertools.product(scaled(ZERO_SHAPES, 12), DTYPES, BLOCK_SHAPES) for c in [(s, d, b)]
]
SHAPE_CELLS = [
    cell(shape, block_shape, full=full) for (shape, full), block_shape in itertools.product(scaled(SHAPE_SHAPES, 20), BLOCK_SHAPES)
]


@pytest.mark.parametrize(("shape", "dtype", "block_shape"), DENSE_CELLS)
def test_lse_dense(shape, dtype, block_shape):
    """With sabi=None, the block shape must not matter."""
    q, k, v = inputs(shape, dtype)
    _, lse = call(q, k, v, None, block_shape)
    assert_close(None, lse, shape, dtype, None, block_shape, lse_atol=LSE_ATOL[dtype])


def check_sparse(shape, sparsity, block_shape, frame):
    q, k, v = inputs(shape, "bfloat16")
    sabi = lists_for(shape, sparsity, block_shape, frame)
    _, lse = call(q, k, v, sabi, block_shape)
    assert_close(None, lse, shape, "bfloat16", sabi, block_shape, lse_atol=LSE_ATOL["bfloat16"])


@pytest.mark.sampled
@pytest.mark.parametrize(("shape", "sparsity", "block_shape"), SPARSE_CELLS)
def test_lse_sparse(shape, sparsity, block_shape):
    check_sparse(shape, sparsity, block_shape, NO_FRAME)


@pytest.mark.sampled
@pytest.mark.parametrize(("shape", "sparsity", "block_shape"), FRAMED_CELLS)
def test_lse_sparse_framed(shape, sparsity, block_shape):
    check_sparse(shape, sparsity, block_shape, testing.small_frame(block_shape))


@pytest.mark.sampled
@pytest.mark.parametrize(("shape", "sparsity", "block_shape"), MULTIHEAD_CELLS)
def test_lse_sparse_multihead(shape, sparsity, block_shape):
    check_sparse(shape, sparsity, block_shape, NO_FRAME)


@pytest.mark.sampled
@pytest.mark.parametrize(("shape", "dtype", "block_shape"), ZERO_CELLS)
def test_lse_zero_input(shape, dtype, block_shape):
    """If all scores are 0, the log-sum-exp is the log of the number of keys."""
    zeros = testing.round_to(np.zeros(shape), dtype)
    _, lse = call(zeros, zeros, zeros, None, block_shape)
    np.testing.assert_allclose(lse, math.log(shape[2]), atol=LSE_ATOL[dtype], rtol=1e-5)


@pytest.mark.parametrize(("shape", "block_shape"), SHAPE_CELLS)
def test_lse_shape_and_dtype(shape, block_shape):
    q, _, _ = inputs(shape, "bfloat16")
    _, lse = call(q, q, q, None, block_shape)
    assert lse.shape == shape[:3]
    assert lse.dtype == np.float32


@pytest.mark.parametrize(("shape", "block_shape"), SHAPE_CELLS)
def test_lse_disabled_returns_empty(shape, block_shape):
    q, _, _ = inputs(shape, "bfloat16")
    _, lse = call(q, q, q, None, block_shape, lse=False)
    assert lse.size == 0


if __name__ == "__main__":
    test_lse_shape_and_dtype((1, 2, 512, 128), (128, 128))
    test_lse_disabled_returns_empty((1, 2, 512, 128), (128, 128))
    test_lse_zero_input((1, 2, 1024, 128), "bfloat16", (128, 128))
    test_lse_dense((1, 1, 1024, 128), "bfloat16", (128, 128))
    test_lse_sparse((1, 1, 2048, 128), 0.5, (128, 128))
    test_lse_sparse_framed((1, 1, 16384, 128), 0.5, (128, 128))
    test_lse_sparse_multihead((1, 2, 1024, 128), 0.5, (128, 128))
    print("Smoke test passed.")
