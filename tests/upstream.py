"""Helpers for the suites that are named after upstream's suites: the cells of their grids, the call by upstream's interface, the comparison.

Upstream's sizes take hours on two cores, so each suite runs at a fraction of these sizes by default, and at the full sizes with ``-m full``. Of the
largest grids only a sample runs, in which every block shape occurs at every shape and at every sparsity. Problems of up to 1024 tokens are
compared completely. For longer problems, some query tokens of every block row are compared with the float64 reference, and the whole output
must be finite.
"""

import functools
import itertools
import math

import numpy as np
import pytest

import blitz_attn
from blitz_attn import testing
from blitz_attn.compat import torch_bsa
from blitz_attn.testing import BLOCK_SHAPES, BlockGrid, FrameWidths, MaskSpec
from cases import bits_option

NO_FRAME = FrameWidths(0, 0, 0, 0)
SEED = 42


def scaled(shapes, fraction):
    """(B, H, S, D) shapes: those with a fraction of S run by default, and those of full size with ``-m full``."""
    small = dict.fromkeys((b, h, max(64, s // fraction), d) for b, h, s, d in shapes)
    return [(shape, False) for shape in small] + [(shape, True) for shape in shapes]


def cell(*values, full):
    """One parametrised case."""
    return pytest.param(*values, id="-".join(map(label, values)), marks=[pytest.mark.full] if full else [])


def label(value):
    if isinstance(value, tuple) and len(value) == 4:
        return "b{}-h{}-s{}-d{}".format(*value)
    if isinstance(value, tuple):
        return "bs{}x{}".format(*value)
    return f"sp{round(value * 100):02d}pct" if isinstance(value, float) else str(value)


def feasible_cells(shapes, sparsities, frame_of):
    """The (shape, sparsity, block_shape) for which lists without empty rows can be drawn. Others are never collected."""
    return [
        cell(shape, sparsity, block_shape, full=full)
        for (shape, full), sparsity, block_shape in itertools.product(shapes, sparsities, BLOCK_SHAPES)
        if testing.is_block_sparse_pattern_feasible(BlockGrid(shape[2], shape[2], *block_shape), frame_of(block_shape), sparsity)
    ]


@functools.lru_cache(maxsize=2)
def inputs(shape, dtype):
    b, h, s, d = shape
    return testing.make_qkv(b, h, h, s, s, d, dtype=dtype, seed=SEED)


@functools.lru_cache(maxsize=2)
def wide_inputs(shape, dtype):
    """The same values in float64, for the reference."""
    return [testing.to_float64(x, dtype) for x in inputs(shape, dtype)]


def lists_for(shape, sparsity, block_shape, frame):
    b, h, s, d = shape
    return testing.random_sabi(MaskSpec(b, h, s, s, d, *block_shape, sparsity, frame), dtype="uint16")


def call(q, k, v, sabi, block_shape, lse=True):
    """(attention_out, softmax_lse) by upstream's interface, or by ours if bfloat16 is plain bits, which upstream's interface cannot name."""
    b, h, s, d = q.shape
    if bits_option(q):
        result = blitz_attn.block_sparse_attention(q, k, v, sabi, block_shape=block_shape, return_lse=lse, **bits_option(q))
        return result if lse else (result, np.empty(0, np.float32))
    return torch_bsa.blitz_sparse_attention(
        q,
        k,
        v,
        sabi=sabi,
        actual_seq_lengths=[s] * b,
        actual_seq_lengths_kv=[s] * b,
        num_heads=h,
        num_key_value_heads=h,
        input_layout="BNSD",
        scale_value=1.0 / math.sqrt(d),
        sparse_mode=0,
        softmax_lse_flag=lse,
        block_shape=list(block_shape),
    )


def sample(tokens, block_q, budget=256):
    """Query tokens to compare, and how many of them each block of queries has. Every block has the same number."""
    blocks = -(-tokens // block_q)
    each = min(block_q, max(2, budget // blocks))
    inside = np.linspace(0, block_q - 1, each).astype(int)
    return np.minimum(np.arange(blocks)[:, None] * block_q + inside, tokens - 1).reshape(-1), each


def expected(shape, dtype, sabi, block_shape):
    """(tokens, out, lse): the query tokens to compare, and the reference's results for them."""
    q, k, v = wide_inputs(shape, dtype)
    tokens = shape[2]
    if tokens <= 1024:
        picked, each = np.arange(tokens), block_shape[0]
    else:
        picked, each = sample(tokens, block_shape[0])
    return picked, *testing.reference_attention(q[:, :, picked], k, v, None if sabi is None else np.asarray(sabi), block_shape=(each, block_shape[1]))


@functools.lru_cache(maxsize=2)
def expected_dense(shape, dtype):
    """The reference without a list. One result serves all block shapes, because without a list the block shape must not matter."""
    return expected(shape, dtype, None, (128, 128))


def assert_close(out, lse, shape, dtype, sabi, block_shape, *, out_atol=None, lse_atol=None, lse_rtol=1e-3):
    """Upstream's comparison with the given tolerances. An output whose tolerance is None is not compared."""
    picked, exact, exact_lse = expected_dense(shape, dtype) if sabi is None else expected(shape, dtype, sabi, block_shape)
    if out_atol is not None:
        values = testing.to_float64(out, dtype)
        assert values.shape == shape
        assert np.isfinite(values).all()
        np.testing.assert_allclose(values[:, :, picked], exact, rtol=testing.OUT_RTOL, atol=out_atol)
    if lse_atol is not None:
        assert lse.shape == shape[:3]
        assert lse.dtype == np.float32
        assert np.isfinite(lse).all()
        np.testing.assert_allclose(lse[:, :, picked], exact_lse, rtol=lse_rtol, atol=lse_atol)
