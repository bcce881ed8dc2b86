"""Ranks die while they attend, and the survivors go on from copies, with the bits of one process.

    mpirun --with-ft ulfm -n P python ulfm.py prefill|decode DEATHS [SEED]

Each rank holds its own tokens, and a copy of its successor's tokens. Some ranks kill themselves in the middle of the work, but never two
neighbours. The last line of each survivor says whether its result has the bits of one process.
"""

import os
import signal
import sys
import time

import numpy as np
from mpi4py import MPI

import blitz_attn
from blitz_attn import sabi, testing
from blitz_attn.distributed import (
    ContextParallelPlan,
    DecodePlan,
    context_parallel_attention,
    dispatch,
    finish,
    redistribute,
    run_with_survivors,
)  # fmt: skip
from ranks import Shared

SPLIT, STEPS = 32, 6
ME, SIZE = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()


def after(rank):
    return (rank + 1) % SIZE


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def decoding(seed, step_of_death):
    """(work, check) of decoding steps over a cache. Each rank has a run of each request's tokens."""
    paged = testing.make_paged(3, 4, 2, [1500, 33, 700], 16, 64, seed=seed)
    layers = [paged.q * (1 + i) for i in range(STEPS)]
    expected = [blitz_attn.paged_attention(q, *paged.arrays[1:], kv_split=SPLIT, **paged.options) for q in layers]

    def held_by(rank):
        return lambda request, chunk, chunks: ME if chunk * SIZE // chunks == rank else SIZE

    own = {rank: Shared(paged, SIZE + 1, ME, held_by(rank), SPLIT) for rank in (ME, after(ME))}

    def work(comm, ranks):
        held = [own[ME]] + ([own[after(ME)]] if after(ME) not in ranks else [])
        tables, count = np.full_like(held[0].tables, -1), 0
        for share in held:
            tables = np.where(share.tables >= 0, share.tables + count, tables)
            count += len(share.k_cache)
        k_cache, v_cache = (np.concatenate([getattr(share, name) for share in held]) for name in ("k_cache", "v_cache"))
        plan = DecodePlan(tables, paged.seq_lens, page_size=16, kv_split=SPLIT, comm=comm)
        outs = []
        for step, q in enumerate(layers):
            if step == step_of_death:
                die()
            outs.append(plan.attention(q, k_cache, v_cache))
        return outs

    return work, lambda comm, outs: all(a.tobytes() == b.tobytes() for a, b in zip(outs, expected, strict=True))


def prefill(seed, step_of_death):
    """(work, check) of attention over a sequence. Survivors make a new plan, and redistribute the tokens for it."""
    tokens, shape = 1500, {"num_heads": 4, "num_kv_heads": 2, "head_dim": 64, "block_shape": (64, 64), "causal": True, "dispatch": "cut"}
    rng = np.random.default_rng(seed)
    whole = [rng.standard_normal((1, heads, tokens, 64), dtype=np.float32) for heads in (4, 2, 2)]
    lists = sabi.sliding_window(tokens, block_shape=(64, 64), window=(400, 0))
    expected = blitz_attn.block_sparse_attention(*whole, lists, block_shape=(64, 64), causal=True)
    first = [ContextParallelPlan(lists, tokens, size=SIZE, rank=rank, **shape).q_ranges for rank in range(SIZE)]
    own = {rank: [np.concatenate([x[:, :, a:b] for a, b in first[rank]] or [x[:, :, :0]], axis=2) for x in whole] for rank in (ME, after(ME))}

    def work(comm, ranks):
        lost = [after(rank) not in ranks for rank in ranks]
        before = [[*first[rank], *(first[after(rank)] if copy else [])] for rank, copy in zip(ranks, lost, strict=True)]
        plan = ContextParallelPlan(lists, tokens, comm=comm, **shape)
        ranges = [ContextParallelPlan(lists, tokens, size=len(ranks), rank=i, **shape).q_ranges for i in range(len(ranks))]
        held = [
            np.concatenate([x, copy], axis=2) if after(ME) not in ranks else x for x, copy in zip(own[ME], own[after(ME)], strict=True)
        ]  # fmt: skip
        q, k, v = (redistribute(x, before, ranges, comm=comm) for x in held)
        for step in range(STEPS):
            if step == step_of_death:
                die()
            out = context_parallel_attention(q, k, v, plan=plan, return_lse=False)
        return out, dispatch(expected, plan)

    return work, lambda comm, outs: outs[0].tobytes() == np.ascontiguousarray(outs[1]).tobytes()


def main():
    what, deaths, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 0
    rng = np.random.default_rng(seed)
    start = int(rng.integers(0, SIZE))
    dying = {(start + 2 * i) % SIZE: int(rng.integers(0, STEPS)) for i in range(deaths)}
    assert len(dying) == deaths
    assert all(after(rank) not in dying for rank in dying)
    work, check = {"decode": decoding, "prefill": prefill}[what](seed, dying.get(ME))
    started = time.monotonic()
    result, comm = run_with_survivors(work)
    bits = "same bits" if check(comm, result) else "OTHER BITS"
    print(f"survivor {ME}: {comm.Get_size()} of {SIZE} ranks, {bits}, {time.monotonic() - started:.2f} s", flush=True)
    finish(comm)


if __name__ == "__main__":
    main()
