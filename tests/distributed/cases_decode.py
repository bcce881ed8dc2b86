"""Cases of decoding over a cache that ranks share, run under mpirun: results have the bits of one process."""

import numpy as np

import blitz_attn
from blitz_attn import testing
from blitz_attn.distributed.decode import decode_context_parallel_attention
from ranks import Shared, check_selection

KV_SPLIT, INTERLEAVE = 64, 128


def same_bits(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and np.array_equal(a.view(np.uint8), b.view(np.uint8))


def check(comm, paged, **options):
    """Check that results have the bits of one process, however ranks share the KV splits."""
    alone = dict(options)
    lists = [alone.pop("selected")] if "selected" in alone else []
    attend = blitz_attn.paged_select_attention if lists else blitz_attn.paged_attention
    whole = attend(*paged.arrays, *lists, kv_split=KV_SPLIT, return_lse=True, **paged.options, **alone)
    for owner in ("turns", "runs", "random"):
        own = Shared(paged, comm.Get_size(), comm.Get_rank(), owner, KV_SPLIT, INTERLEAVE)
        shared = decode_context_parallel_attention(
            paged.q, own.k_cache, own.v_cache, own.tables, paged.seq_lens, comm=comm, return_lse=True, **own.options, **options
        )
        assert same_bits(shared[0], whole[0]), owner
        assert same_bits(shared[1], whole[1]), owner


def paged(lengths=(1500, 0, 777, 17), **options):
    return testing.make_paged(len(lengths), 6, 2, lengths, 16, 64, **options)


def case_one_query_per_request(comm):
    check(comm, paged())


def case_several_queries(comm):
    check(comm, paged((1500, 5, 777, 17), q_lens=[3, 0, 80, 17]))


def case_rules(comm):
    check(comm, paged(), window=200, sinks=np.linspace(-2, 2, 6), softcap=5.0)
    check(comm, paged((1500, 5, 777, 17), q_lens=[3, 0, 80, 17]), window=100)


def case_dtypes(comm):
    for dtype, kv_dtype in (("float16", None), ("bfloat16", None), ("float64", None), ("float32", "int8"), ("bfloat16", "float8_e4m3")):
        check(comm, paged(dtype=dtype, kv_dtype=kv_dtype, kv_layout="HND" if kv_dtype else "NHD"))


def case_listed_blocks(comm):
    rng = np.random.default_rng(1)
    p = paged()
    used = -(-p.seq_lens // 16)
    for heads in (2, 6):
        selected = np.full((4, heads, 20), -1, np.int32)
        for row, pages in zip(selected, used, strict=True):
            for head in row:
                some = rng.permutation(pages)[: rng.integers(0, 21)]
                head[: len(some)] = some
        check(comm, p, selected=selected)
        check(comm, p, selected=selected, window=300)


def case_selection(comm):
    """Ranks choose the blocks that one process chooses, from summaries and from keys, and attend them with the same bits."""
    p = paged((1500, 5, 777, 17), poison=False)
    for method in ("quest", "mean", "max"):
        check_selection(comm, p, 6, method, 16)
        check_selection(comm, p, [3, 1, 9, 40], method, 16, per_query_head=True, ascending=False, recent=[0, 1, 2, 3])


def case_more_ranks_than_chunks(comm):
    check(comm, paged((1, 0, 3, 64)))
