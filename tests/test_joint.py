"""Output and log-sum-exp of the same call, over upstream's grid.

``PYTHONPATH=. python tests/test_joint.py`` runs three cases as a smoke test.
"""

import itertools

import pytest

from blitz_attn.testing import BLOCK_SHAPES
from upstream import NO_FRAME, assert_close, call, cell, feasible_cells, inputs, lists_for, scaled

OUT_ATOL = {"bfloat16": 1e-3, "float16": 1e-2}
LSE_ATOL = {"bfloat16": 1e-5, "float16": 5e-3}
DTYPES = ["bfloat16", "float16"]
DENSE_SHAPES = [(1, h, s, 128) for s, h in [(1024, 1), (2048, 2), (4096, 4), (4096, 8), (8192, 4), (12288, 2), (16384, 8)]]
SPARSE_CASES = {4096: [0.3, 0.5], 8192: [0.3, 0.5, 0.7], 16384: [0.7]}

DENSE_CELLS = [
    cell(shape, dtype, block_shape, full=full)
    for (shape, full), dtype, block_shape in itertools.product(scaled(DENSE_SHAPES, 12), DTYPES, BLOCK_SHAPES)
]
SPARSE_CELLS = [
    case
    for s, sparsities in SPARSE_CASES.items()
    for case in feasible_cells(scaled([(1, 1, s, 128)], 4), sparsities, lambda block_shape: NO_FRAME)
]


@pytest.mark.sampled
@pytest.mark.parametrize(("shape", "dtype", "block_shape"), DENSE_CELLS)
def test_joint_dense(shape, dtype, block_shape):
    q, k, v = inputs(shape, dtype)
    out, lse = call(q, k, v, None, block_shape)
    assert_close(out, lse, shape, dtype, None, block_shape, out_atol=OUT_ATOL[dtype], lse_atol=LSE_ATOL[dtype])


@pytest.mark.sampled
@pytest.mark.parametrize(("shape", "sparsity", "block_shape"), SPARSE_CELLS)
def test_joint_sparse(shape, sparsity, block_shape):
    q, k, v = inputs(shape, "bfloat16")
    sabi = lists_for(shape, sparsity, block_shape, NO_FRAME)
    out, lse = call(q, k, v, sabi, block_shape)
    assert_close(out, lse, shape, "bfloat16", sabi, block_shape, out_atol=OUT_ATOL["bfloat16"], lse_atol=LSE_ATOL["bfloat16"])


if __name__ == "__main__":
    test_joint_dense((1, 2, 2048, 128), "bfloat16", (128, 128))
    test_joint_dense((1, 2, 2048, 128), "float16", (128, 128))
    test_joint_sparse((1, 1, 4096, 128), 0.5, (128, 128))
    print("Smoke test passed.")
