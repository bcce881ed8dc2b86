"""Calls of a few milliseconds, large enough to use several threads, for tests of events while calls run."""

import numpy as np

import blitz_attn
from blitz_attn import nsa, sabi, testing
from cases_operations import arrays_of


def bits(result):
    """The bytes of all arrays of a result."""
    return [x.tobytes() for x in arrays_of(result)]


def appended(case):
    """8-bit caches, to which the tokens of the case's first pages were appended."""
    tokens = case.k_cache[:8].reshape(-1, *case.k_cache.shape[2:])
    caches = [np.zeros(case.k_cache.shape, np.int8) for _ in range(2)]
    blitz_attn.append_paged_kv(tokens, tokens, *caches, slot_mapping=np.arange(len(tokens)), k_scale=0.03, v_scale=0.02)
    return tuple(caches)


def calls(threads):
    """A dictionary of calls without arguments, each of which returns new arrays."""
    options = {"block_shape": (32, 32), "causal": True, "num_threads": threads}
    q, k, v = testing.make_qkv(1, 4, 2, 400, 400, 32)
    halves = [x.astype(np.float16) for x in (q, k, v)]
    lists = sabi.random_with_frame(400, 400, (32, 32), 0.5, seed=1)
    out, lse = blitz_attn.block_sparse_attention(q, k, v, lists, return_lse=True, **options)
    paged = testing.make_paged(2, 8, 2, [3000, 700], 16, 32, seed=2, poison=False)
    tokens = [np.ascontiguousarray(x.transpose(0, 2, 1, 3)[:, :200]) for x in (q, k, v)]
    sizes = {"compress_block_size": 16, "num_selected_blocks": 4, "window_size": 32, "num_threads": threads}
    result, context = nsa.nsa(*tokens, return_context=True, **sizes)
    return {
        "forward": lambda: blitz_attn.block_sparse_attention(q, k, v, lists, return_lse=True, **options),
        "forward, halves": lambda: blitz_attn.block_sparse_attention(*halves, causal=True, num_threads=threads),
        "backward": lambda: blitz_attn.block_sparse_attention_backward(out, q, k, v, out, lse, lists, **options),
        "paged": lambda: blitz_attn.paged_attention(*paged.arrays, return_lse=True, num_threads=threads),
        "paged, kv_split": lambda: blitz_attn.paged_attention(*paged.arrays, kv_split=64, return_lse=True, num_threads=threads),
        "select": lambda: blitz_attn.select_blocks(
            paged.q, paged.k_cache, paged.block_tables, paged.seq_lens, 6, method="max", num_threads=threads
        ),
        "nsa": lambda: nsa.nsa(*tokens, **sizes),
        "nsa_backward": lambda: tuple(nsa.nsa_backward(result, context)),
        "append": lambda: appended(paged),
        "merge": lambda: blitz_attn.merge_states(out, lse, out, lse),
        "quantize": lambda: blitz_attn.quantize_kv(paged.k_cache, "float8_e4m3"),
    }
