"""Many short sequences: the time of a call grows with their number, and not with its square."""

import time

import numpy as np
import pytest

import blitz_attn
from blitz_attn import nsa, select

FEW, MANY = 4000, 32000  # sequences: with a time for each pair of them, the call of many would take 64 times as long as that of few
SEVERAL = 3.0  # times as long per sequence: caches that no longer hold everything, and other noise
HEADS, DIM, PAGE, BLOCK = 2, 8, 4, (16, 16)


def packed(count):
    """(queries, keys, cumulative lengths) of sequences of one token."""
    rng = np.random.default_rng(0)
    q, k = (rng.standard_normal((count, heads, DIM), np.float32) for heads in (HEADS, 1))
    return q, k, np.arange(count + 1)


def tnd(cu):
    return {"layout": "TND", "cu_seqlens_q": cu, "cu_seqlens_kv": cu, "num_threads": 1}


def one_block(count):
    return np.zeros((count, 1, 1, 1), np.int32)


def compress(count):
    _, k, cu = packed(count)
    return lambda: nsa.compress_kv(k, k, 1, cu_seqlens=cu, num_threads=1)


def compress_backward(count):
    _, k, cu = packed(count)
    return lambda: nsa.compress_kv_backward(k, k, k, k, 1, cu_seqlens=cu, num_threads=1)


def choose(count):
    q, k, cu = packed(count)
    options = {"init_blocks": 1, "local_blocks": 0, "lse": np.zeros(q.shape[:2], np.float32)}
    return lambda: nsa.score_and_select_blocks(q, k, 1, 1, cu_seqlens=cu, num_threads=1, **options)


def choose_by_tile(count):
    q, k, cu = packed(count)
    return lambda: nsa.score_and_select_blocks(q, k, 1, 1, mode="mslk", q_tile_size=1, cu_seqlens=cu, num_threads=1)


def native(count):
    q, k, cu = packed(count)
    return lambda: nsa.nsa(q, k, k, cu_seqlens=cu, compress_block_size=4, num_threads=1)


def native_backward(count):
    q, k, cu = packed(count)
    out, context = nsa.nsa(q, k, k, cu_seqlens=cu, compress_block_size=4, return_context=True)
    return lambda: nsa.nsa_backward(out, context, num_threads=1)


def attend(count):
    q, k, cu = packed(count)
    lists = one_block(count)
    return lambda: blitz_attn.block_sparse_attention(q, k, k, lists, block_shape=BLOCK, **tnd(cu))


def attend_backward(count):
    q, k, cu = packed(count)
    lists = one_block(count)
    out, lse = blitz_attn.block_sparse_attention(q, k, k, lists, block_shape=BLOCK, return_lse=True, **tnd(cu))
    return lambda: blitz_attn.block_sparse_attention_backward(out, q, k, k, out, lse, lists, block_shape=BLOCK, **tnd(cu))


def choose_for_prefill(count):
    q, k, cu = packed(count)
    return lambda: blitz_attn.select_blocks_prefill(q, k, top_k=1, block_shape=BLOCK, **tnd(cu))


def output_error(count):
    count //= 4  # a step in Python for each sequence
    q, k, cu = packed(count)
    v, lists = np.zeros((count, 1, 64), np.float32), one_block(count)
    return lambda: select.output_error(q, k, v, lists, block_shape=BLOCK, **tnd(cu))


def paged(count):
    q, _, _ = packed(2 * count)
    cache = np.zeros((count, PAGE, 1, DIM), np.float32)
    tables, lens, queries = np.arange(count, dtype=np.int32)[:, None], np.full(count, 3), np.full(count, 2)
    return lambda: blitz_attn.paged_attention(q, cache, cache, tables, lens, q_lens=queries, num_threads=1)


def append(count):
    _, k, _ = packed(2 * count)
    caches = [np.zeros((count, PAGE, 1, DIM), np.float32) for _ in range(2)]
    tables, lens, queries = np.arange(count, dtype=np.int32)[:, None], np.full(count, 3), np.full(count, 2)
    return lambda: blitz_attn.append_paged_kv(k, k, *caches, block_tables=tables, seq_lens=lens, q_lens=queries, num_threads=1)


def choose_pages(count):
    q, _, _ = packed(count)
    summaries = [np.zeros((count, PAGE, 1, DIM), np.float32) for _ in range(2)]
    tables, lens = np.arange(count, dtype=np.int32)[:, None], np.full(count, 3)
    return lambda: blitz_attn.select_blocks(q, tuple(summaries), tables, lens, k=1, block_size=PAGE, num_threads=1)


def seconds(call):
    """The least processor time of a few calls, in which other programs do not count."""
    times = []
    for _ in range(3):
        start = time.thread_time()
        call()
        times.append(time.thread_time() - start)
    return min(times)


@pytest.mark.parametrize(
    "make",
    [
        compress, compress_backward, choose, choose_by_tile, native, native_backward, attend, attend_backward, choose_for_prefill, output_error,
        paged, append, choose_pages,
    ],
)  # fmt: skip
def test_time_grows_with_their_number(make):
    few, many = (seconds(make(count)) for count in (FEW, MANY))
    assert many <= SEVERAL * MANY / FEW * max(few, 1e-3)
