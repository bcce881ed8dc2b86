"""The time of a call grows with the number of its sequences, and not with the square of that number."""

import time

import numpy as np
import pytest

import blitz_attn
from blitz_attn import nsa, select

FEW, MANY = 4000, 32000  # numbers of sequences; with work for each pair of sequences, a call of MANY would take 64 times as long as a call of FEW
SEVERAL = 3.0  # factor by which the time per sequence may grow: caches no longer hold everything, and times are noisy
ONE = {"num_threads": 1}
NATIVE = {"compress_block_size": 4}


class Sequences:
    """`count` sequences of one token: queries, keys, cumulative lengths, and for each sequence a list of one block and a page of the caches."""

    def __init__(self, count):
        rng = np.random.default_rng(0)
        self.q, self.k = (rng.standard_normal((count, heads, 8), np.float32) for heads in (2, 1))
        self.cu, self.lse = np.arange(count + 1), np.zeros((count, 2), np.float32)
        self.packed = {"cu_seqlens": self.cu, **ONE}
        self.tnd = {"layout": "TND", "cu_seqlens_q": self.cu, "cu_seqlens_kv": self.cu, "block_shape": (16, 16), **ONE}
        self.lists = np.zeros((count, 1, 1, 1), np.int32)
        self.caches = [np.zeros((count, 4, 1, 8), np.float32) for _ in range(2)]
        self.pages, self.lens = np.arange(count, dtype=np.int32)[:, None], np.full(count, 3)


def native_backward(x):
    out, context = nsa.nsa(x.q, x.k, x.k, cu_seqlens=x.cu, return_context=True, **NATIVE)
    return lambda: nsa.nsa_backward(out, context, **ONE)


def attend_backward(x):
    out, lse = blitz_attn.block_sparse_attention(x.q, x.k, x.k, x.lists, return_lse=True, **x.tnd)
    return lambda: blitz_attn.block_sparse_attention_backward(out, x.q, x.k, x.k, out, lse, x.lists, **x.tnd)


def paged(x):
    q, queries = np.repeat(x.q, 2, axis=0), np.full(len(x.q), 2)
    return lambda: blitz_attn.paged_attention(q, *x.caches, x.pages, x.lens, q_lens=queries, **ONE)


def append(x):
    k, where = np.repeat(x.k, 2, axis=0), {"block_tables": x.pages, "seq_lens": x.lens, "q_lens": np.full(len(x.q), 2)}
    return lambda: blitz_attn.append_paged_kv(k, k, *x.caches, **where, **ONE)


BY_TOKEN, BY_TILE = {"init_blocks": 1, "local_blocks": 0}, {"mode": "mslk", "q_tile_size": 1}
CALLS = {
    "compress": lambda x: lambda: nsa.compress_kv(x.k, x.k, 1, **x.packed),
    "compress_backward": lambda x: lambda: nsa.compress_kv_backward(x.k, x.k, x.k, x.k, 1, **x.packed),
    "choose": lambda x: lambda: nsa.score_and_select_blocks(x.q, x.k, 1, 1, lse=x.lse, **BY_TOKEN, **x.packed),
    "choose_by_tile": lambda x: lambda: nsa.score_and_select_blocks(x.q, x.k, 1, 1, **BY_TILE, **x.packed),
    "native": lambda x: lambda: nsa.nsa(x.q, x.k, x.k, **NATIVE, **x.packed),
    "native_backward": native_backward,
    "attend": lambda x: lambda: blitz_attn.block_sparse_attention(x.q, x.k, x.k, x.lists, **x.tnd),
    "attend_backward": attend_backward,
    "choose_for_prefill": lambda x: lambda: blitz_attn.select_blocks_prefill(x.q, x.k, top_k=1, **x.tnd),
    "output_error": lambda x: lambda: select.output_error(x.q, x.k, x.k.repeat(8, 2), x.lists, **x.tnd),
    "paged": paged,
    "append": append,
    "choose_pages": lambda x: lambda: blitz_attn.select_blocks(x.q, tuple(x.caches), x.pages, x.lens, k=1, block_size=4, **ONE),
}


def seconds(call):
    """The least processor time of three calls. Other programs do not lengthen processor time."""
    times = []
    for _ in range(3):
        start = time.thread_time()
        call()
        times.append(time.thread_time() - start)
    return min(times)


@pytest.mark.parametrize("name", CALLS)
def test_time_is_linear_in_the_number_of_sequences(name):
    less = 4 if name == "output_error" else 1  # output_error runs a step in Python for each sequence
    few, many = (seconds(CALLS[name](Sequences(count // less))) for count in (FEW, MANY))
    assert many <= SEVERAL * MANY / FEW * max(few, 1e-3)


def test_requests_beyond_the_first_look_for_signals():
    """Loops over requests check for signals in every 2**16th turn, and then go on."""
    x = Sequences(70_000)
    caches, pages, lens = [x.k[:, None].repeat(2, 1) * 0 for _ in range(2)], x.pages, np.ones(70_000, np.int64)
    k, v = x.k, x.k + 1
    blitz_attn.append_paged_kv(k, v, *caches, block_tables=pages, seq_lens=lens)
    assert (caches[0][:, 0] == k).all()
    blitz_attn.append_paged_kv(k, v, *caches, slot_mapping=2 * x.cu[:-1] + 1)
    assert (caches[1] == v[:, None]).all()
    assert (blitz_attn.paged_attention(x.q, *caches, pages, lens, q_lens=lens) == v).all()
    largest = np.empty((70_000, 1, 1, 8), np.float32)
    blitz_attn.quest_prefill_metadata(caches[0], pages, lens, pages, largest, None)
    assert (largest[:, 0] == k).all()
    assert (blitz_attn.quantize_kv(k[..., :0], "int8")[1] == 1).all()
