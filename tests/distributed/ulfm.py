"""Ranks that die while they decode: survivors go on from copies, with the bits of one process.

    mpirun --with-ft ulfm -n P python ulfm.py DEATHS [SEED]

Each rank holds a run of the tokens, and a copy of its successor's. Some ranks kill themselves in the middle of a step, one after the other;
the last line of each survivor says whether its result has the bits of one process.
"""

import os
import signal
import sys
import time

import numpy as np
from mpi4py import MPI

from blitz_attn import testing
from blitz_attn.distributed import Alone, DecodePlan, finish, run_with_survivors
from ranks import Shared

SPLIT, STEPS = 32, 6


def main():
    deaths, seed = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0
    size, me = MPI.COMM_WORLD.Get_size(), MPI.COMM_WORLD.Get_rank()
    rng = np.random.default_rng(seed)
    paged = testing.make_paged(3, 4, 2, [1500, 33, 700], 16, 64, seed=seed)
    layers = [paged.q * (1 + i) for i in range(STEPS)]
    everything = Shared(paged, 1, 0, "runs", SPLIT)
    whole = DecodePlan(everything.tables, paged.seq_lens, page_size=16, kv_split=SPLIT, comm=Alone())
    expected = [whole.attention(q, everything.k_cache, everything.v_cache) for q in layers]
    # no two neighbours die: the copy of a dead rank's tokens lives with its predecessor
    start = int(rng.integers(0, size))
    dying = {(start + 2 * i) % size: int(rng.integers(0, STEPS)) for i in range(deaths)}
    assert len(dying) == deaths
    assert all((rank + 1) % size not in dying for rank in dying)

    def held_by(rank):
        return lambda request, chunk, chunks: me if chunk * size // chunks == rank else size

    own = {rank: Shared(paged, size + 1, me, held_by(rank), SPLIT) for rank in (me, (me + 1) % size)}

    def decode(comm, ranks):
        held = [own[me]] + ([own[(me + 1) % size]] if (me + 1) % size not in ranks else [])
        tables, count = np.full_like(held[0].tables, -1), 0
        for share in held:
            tables = np.where(share.tables >= 0, share.tables + count, tables)
            count += len(share.k_cache)
        k_cache, v_cache = (np.concatenate([getattr(share, name) for share in held]) for name in ("k_cache", "v_cache"))
        plan = DecodePlan(tables, paged.seq_lens, page_size=16, kv_split=SPLIT, comm=comm)
        outs = []
        for step, q in enumerate(layers):
            if dying.get(me) == step:
                os.kill(os.getpid(), signal.SIGKILL)
            outs.append(plan.attention(q, k_cache, v_cache))
        return outs

    started = time.monotonic()
    outs, comm = run_with_survivors(decode)
    same = all(a.tobytes() == b.tobytes() for a, b in zip(outs, expected, strict=True))
    print(f"survivor {me}: {comm.Get_size()} of {size} ranks, {'same bits' if same else 'OTHER BITS'}, {time.monotonic() - started:.2f} s", flush=True)
    finish(comm)


if __name__ == "__main__":
    main()
