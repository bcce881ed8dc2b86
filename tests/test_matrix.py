"""Attention equals the reference for every dtype, layout, head ratio, tail, rule and level, in outputs that were filled with NaN."""

import numpy as np
import pytest

from blitz_attn import sabi, testing
from cases import DTYPES, assert_same, attend, check, random_lists, same_bits
from cases_grid import combination, every_combination

HEAD_DIMS = [1, 2, 3, 8, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 80, 96, 112, 127, 128, 129, 160, 192, 200, 256, 320, 512, 575, 576]
LENGTHS = [1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257]


@pytest.mark.sampled(4)
@every_combination
def test_every_combination_is_right(dtype, layout, heads, rule, kind, dims):
    arrays, options = combination(dtype, layout, heads, rule, kind, dims)
    check(*arrays, **options)


@pytest.mark.parametrize("n", range(len(HEAD_DIMS)), ids=[f"d{dim}" for dim in HEAD_DIMS])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_head_dim_is_right(dtype, n):
    v_dim = HEAD_DIMS[(n * 5 + 3) % len(HEAD_DIMS)]
    check(*testing.make_qkv(1, 2, 1, 35, 70, HEAD_DIMS[n], v_dim, dtype=dtype, seed=n), causal=True)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (5, 0)}], ids=["dense", "causal", "window"])
@pytest.mark.parametrize("n", range(len(LENGTHS)), ids=[f"q{length}" for length in LENGTHS])
@pytest.mark.parametrize("dtype", DTYPES)
def test_lengths_around_tile_sizes_are_right(dtype, n, options):
    kv_len = LENGTHS[(n * 8 + 5) % len(LENGTHS)]
    check(*testing.make_qkv(1, 1, 1, LENGTHS[n], kv_len, 64, dtype=dtype, seed=n), **options)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("block_shape", [(1, 1), (3, 5), (7, 64), (64, 7), (32, 32), (64, 64), (100, 300), (1000, 1)])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (30, 30)}])
def test_any_block_shape_is_right(block_shape, dtype, options):
    q_len, kv_len = 150, 170
    rows, columns = -(-q_len // block_shape[0]), -(-kv_len // block_shape[1])
    lists = random_lists(np.random.default_rng(1), 1, 2, rows, columns, share=0.4, empty=0.1)
    check(*testing.make_qkv(1, 2, 2, q_len, kv_len, 32, dtype=dtype), lists, block_shape=block_shape, **options)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rising_and_falling_scores_are_right(dtype):
    """Scores rise along the keys, so that the running maximum changes up to the last key. Then scores fall along the keys."""
    q, k, v = testing.make_qkv(1, 1, 1, 40, 500, 8, dtype="float64")
    q, k = 1.0 + q / 50, np.linspace(0, 30, 500)[:, None] * (1.0 + k / 50)
    check(*(testing.round_to(x, dtype) for x in (q, k, v)), scale=0.5)
    check(*(testing.round_to(x, dtype) for x in (q, -k, v)), scale=0.5)


def backwards(lists):
    """The lists with the entries of each row in reverse, and pads still last."""
    kept = sabi.counts(lists)[..., None]
    place = np.arange(lists.shape[-1])
    return np.where(place < kept, np.take_along_axis(lists, np.maximum(kept - 1 - place, 0), axis=-1), -1)


@pytest.mark.sampled
@pytest.mark.parametrize("rule", [{}, {"causal": True}, {"window": (100, 20)}])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("size", [64, 32])
def test_threads_batch_order_and_full_lists_change_no_bit(size, dtype, rule, isa_level):
    """No bit depends on the number of threads, on the batch, or on the order within list rows, and a list of all blocks changes no bit."""
    q, k, v = testing.make_qkv(2, 4, 2, 700, 900, 64, dtype=dtype)
    lists = sabi.random_with_frame(700, 900, (size, size), 0.5, batch=2, heads=4, dtype="int32")
    options = {"block_shape": (size, size), **rule}

    out, lse = attend(q, k, v, lists, num_threads=1, **options)
    for threads in (2, 3, 8):
        assert_same(attend(q, k, v, lists, num_threads=threads, **options), (out, lse))
    assert_same(attend(q[1:], k[1:], v[1:], lists[1:], **options), (out[1:], lse[1:]))
    assert_same(attend(q, k, v, backwards(lists), **options), (out, lse))
    dense = attend(q, k, v, **options)
    for block_shape in ((64, 64), (100, 7), (1024, 1024), (16, 32)):
        assert_same(attend(q, k, v, sabi.dense(700, 900, block_shape), **{**options, "block_shape": block_shape}), dense)


@pytest.mark.parametrize("tokens", [320, 384, 1100])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("listed", [False, True])
def test_threads_that_cut_smaller_tiles_change_no_bit(listed, dtype, tokens, isa_level):
    """If there are few tiles, they are cut smaller where smaller tiles give the threads equal shares."""
    q, k, v = testing.make_qkv(1, 1, 1, tokens, tokens, 64, dtype=dtype)
    lists = sabi.random_with_frame(tokens, tokens, (128, 64), 0.4) if listed else None
    one, *others = (attend(q, k, v, lists, block_shape=(128, 64), causal=not listed, num_threads=threads) for threads in (1, 2, 3, 5))
    assert all(same_bits(a, b) for other in others for a, b in zip(other, one, strict=True))


@pytest.mark.parametrize("dims", [(64, 72), (320, 40), (40, 8)], ids=str)
@pytest.mark.parametrize("heads", [3, 8, 16])
@pytest.mark.parametrize("dtype", DTYPES)
def test_lists_of_single_queries_change_no_bit(dtype, heads, dims, isa_level):
    """Panels that are half empty multiply in another way than full ones, and prefetch other rows."""
    q, k, v = testing.make_qkv(1, heads, 1, 70, 300, *dims, dtype=dtype)
    whole = attend(q, k, v, causal=True)
    assert_same(attend(q, k, v, sabi.dense(70, 300, (1, 4)), block_shape=(1, 4), causal=True), whole)
    lists = random_lists(np.random.default_rng(1), 1, 1, 70, 75, share=0.4, empty=0.1)
    some = attend(q, k, v, lists, block_shape=(1, 4), num_threads=1)
    assert_same(attend(q, k, v, lists, block_shape=(1, 4), num_threads=2), some)
    rows = slice(31, 34)
    part = attend(q[:, :, rows], k, v, lists[:, :, rows], block_shape=(1, 4), q_begin=261, q_total=70)
    assert_same(part, (some[0][:, :, rows], some[1][:, :, rows]))
    check(q, k, v, lists, block_shape=(1, 4))
