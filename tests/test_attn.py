"""The output of attention over upstream's grid: heads, lengths, frames, sparsities and the 16 block shapes.

``PYTHONPATH=. python tests/test_attn.py`` runs one case as a smoke test.
"""

import itertools

import pytest

from blitz_attn import testing
from blitz_attn.testing import BLOCK_SHAPES, BlockGrid
from upstream import NO_FRAME, assert_close, call, cell, inputs, lists_for, scaled

DTYPE = "bfloat16"
FRAMES = {"no_frame": lambda block_shape: NO_FRAME, "small_frame": testing.small_frame}
SPARSITIES = [0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9]
UPSTREAM_SHAPES = [(1, h, s, 128) for h in (1, 2, 3, 4) for s in (24000, 36000)]
SHAPES = [((1, 1, 3300, 128), False), ((1, 3, 2100, 128), False)] + [s for s in scaled(UPSTREAM_SHAPES, 1) if s[1]]

CELLS = [
    cell(shape, frame_kind, sparsity, block_shape, full=full)
    for (shape, full), frame_kind, sparsity, block_shape in itertools.product(SHAPES, FRAMES, SPARSITIES, BLOCK_SHAPES)
    if testing.is_block_sparse_pattern_feasible(BlockGrid(shape[2], shape[2], *block_shape), FRAMES[frame_kind](block_shape), sparsity)
]


@pytest.mark.sampled
@pytest.mark.parametrize(("shape", "frame_kind", "sparsity", "block_shape"), CELLS)
def test_blitz_sparse_attention_correctness(shape, frame_kind, sparsity, block_shape):
    q, k, v = inputs(shape, DTYPE)
    sabi = lists_for(shape, sparsity, block_shape, FRAMES[frame_kind](block_shape))
    out, lse = call(q, k, v, sabi, block_shape, lse=False)
    assert lse.size == 0
    assert_close(out, lse, shape, DTYPE, sabi, block_shape, out_atol=testing.OUT_ATOL)


if __name__ == "__main__":
    test_blitz_sparse_attention_correctness((1, 3, 10_000, 128), "small_frame", 0.5, (128, 128))
    print("Smoke test passed.")
