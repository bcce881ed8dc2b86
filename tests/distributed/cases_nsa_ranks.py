"""Cases of native sparse attention over ranks, run under mpirun: results have the bits of one process."""

import numpy as np

import blitz_attn
from blitz_attn import testing
from blitz_attn.distributed import nsa as distributed_nsa
from problems import raised, same_bits, same_everywhere

SIZES = {"compress_block_size": 16, "num_selected_blocks": 4, "window_size": 40}


def shards_of(comm, tokens, seed):
    """The slice of this rank's tokens. Some ranks may have none."""
    rng = np.random.default_rng(seed)
    ends = np.sort(rng.integers(0, tokens + 1, comm.Get_size() - 1))
    bounds = [0, *ends.tolist(), tokens]
    return slice(bounds[comm.Get_rank()], bounds[comm.Get_rank() + 1])


def check(comm, tokens, seed=0, batch=1, heads=(4, 2), dims=(32, 32), dtype="float32", weights=False, gates=False, comm_type="auto", **options):
    rng = np.random.default_rng(seed)
    q, k, v = (
        testing.round_to(rng.standard_normal((batch, tokens, h, d)), dtype) for h, d in ((heads[0], dims[0]), (heads[1], dims[0]), (heads[1], dims[1]))
    )
    bits = {"dtype": "bfloat16"} if q.dtype == np.uint16 else {}
    options = SIZES | options | bits
    real = np.float64 if dtype == "float64" else np.float32
    if weights:
        options |= {
            "w_k_compress": rng.standard_normal((heads[1], dims[0], dims[0])).astype(real),
            "w_v_compress": rng.standard_normal((heads[1], dims[1], dims[1])).astype(real),
            "gate_proj_weight": rng.standard_normal((heads[0], 3, dims[0])).astype(real),
        }
    whole_gates = rng.random((batch, tokens, heads[0], 3)).astype(np.float32) if gates else None
    whole = blitz_attn.nsa.nsa(q, k, v, gates=whole_gates, **options)
    mine = shards_of(comm, tokens, seed)
    own_gates = None if whole_gates is None else whole_gates[:, mine]
    out = distributed_nsa(q[:, mine], k[:, mine], v[:, mine], comm=comm, gates=own_gates, comm_type=comm_type, **options)
    assert same_bits(out, whole[:, mine]), (tokens, seed)


def case_paper(comm):
    check(comm, 700)
    check(comm, 515, 1, batch=2, heads=(6, 3), dims=(16, 24))
    check(comm, 1040, 2, heads=(4, 1))
    check(comm, 130, 3, causal=False)


def case_upstream(comm):
    check(comm, 900, 4, mode="mslk", q_tile_size=64)
    check(comm, 600, 5, mode="mslk", q_tile_size=100, num_cmp_selected_blocks=1, heads=(8, 4))
    check(comm, 300, 6, mode="mslk", causal=False)


def case_weights_and_gates(comm):
    check(comm, 400, 7, weights=True, heads=(8, 4))
    check(comm, 400, 8, gates=True, batch=2, comm_type="a2a")


def case_dtypes(comm):
    for n, dtype in enumerate(("float16", "bfloat16", "float64")):
        check(comm, 333, 9 + n, dtype=dtype, weights=dtype == "float64")


def case_short(comm):
    check(comm, 1, 12)
    check(comm, 20, 13)
    check(comm, 0, 14)
    check(comm, 10, 15, batch=0)


def case_one_error_for_all(comm):
    rank, last = comm.Get_rank(), comm.Get_size() - 1

    def text(call):
        return same_everywhere(comm, raised(call))

    x = np.ones((1, 64, 2, 16), np.float32)
    bad = x[..., :8] if rank == last else x
    assert text(lambda: distributed_nsa(x, bad, x, comm=comm)).startswith("ValueError: k: expected shape (B, N, H, D) with Hkv heads")
    if last:
        sentence = f"ValueError: window_size: expected the same on all ranks, got 8 on rank 0 and 9 on rank {last}"
        assert text(lambda: distributed_nsa(x, x, x, comm=comm, window_size=9 if rank == last else 8)) == sentence
        weight = np.full((2, 16, 16), float(rank == last), np.float32)
        assert text(lambda: distributed_nsa(x, x, x, comm=comm, w_k_compress=weight)).startswith(
            "ValueError: w_k_compress: expected the same on all ranks, got float32 of shape (2, 16, 16) on rank 0 and "
        )
    sentence = "ValueError: comm_type: expected one of auto, p2p, a2a, got 'all_gather'"
    assert text(lambda: distributed_nsa(x, x, x, comm=comm, comm_type="all_gather")) == sentence
