"""Random problems over ranks, run under mpirun: results and the gradient of queries have the bits of one process, and the other gradients
differ by rounding."""

import numpy as np

import blitz_attn
from blitz_attn import testing
from blitz_attn.distributed import (
    ContextParallelPlan,
    _comm,
    context_parallel_attention,
    context_parallel_attention_backward,
    dispatch,
)
from cases import dtype_of
from cases_backward import ROUNDING, values
from problems import DISPATCHES, same_bits
from test_distributed_plans import problem_of

SEEDS = 60


def arrays_of(given, rng):
    """Queries, keys, values and a gradient for the arguments of a plan."""
    heads, kv_heads, dim, dim_v = given["num_heads"], given["num_kv_heads"], given["head_dim"], given["head_dim_v"]
    packed = given["layout"] == "TND"
    tokens = [int(given[f"cu_seqlens_{x}"][-1]) for x in ("q", "kv")] if packed else [given["s_q"], given["s_kv"]]
    shapes = [(tokens[0], heads, dim), (tokens[1], kv_heads, dim), (tokens[1], kv_heads, dim_v), (tokens[0], heads, dim_v)]
    arrays = [testing.round_to(rng.standard_normal(s if packed else (given["batch"], *s)), given["dtype"]) for s in shapes]
    if given["layout"] == "BNSD":
        return [np.ascontiguousarray(x.swapaxes(1, 2)) for x in arrays]
    return [x.reshape(*x.shape[:2], -1) for x in arrays] if given["layout"] == "BSH" else arrays


def check(comm, seed):
    given, rng = problem_of(seed), np.random.default_rng(seed)
    lists = given.pop("sabi", None)
    if given["layout"] == "BNSD":
        given["layout"] = str(rng.choice(["BNSD", "BSND", "BSH"]))
    *arrays, dout = arrays_of(given, rng)
    call = {
        name: given[name]
        for name in given
        if name not in ("s_q", "s_kv", "batch", "num_heads", "num_kv_heads", "head_dim", "head_dim_v", "dtype")
    }
    call |= {name: given[name] for name in ("num_heads", "num_kv_heads")} if given["layout"] == "BSH" else {}
    call |= {"dtype": "bfloat16"} if arrays[0].dtype == np.uint16 else {}
    bits = {"dtype": call["dtype"]} if "dtype" in call else {}
    out, lse = blitz_attn.block_sparse_attention(*arrays, lists, return_lse=True, **call)
    whole = blitz_attn.block_sparse_attention_backward(dout, *arrays, out, lse, lists, **call)
    how = {
        "comm_type": str(rng.choice(["p2p", "a2a", "all_gather"])),
        "overlap": [True, False, "thread" if _comm.has_threads() else True][rng.integers(3)],
    }
    plan = ContextParallelPlan(lists, comm=comm, dispatch=str(rng.choice(["auto", *DISPATCHES])), **given)
    shards = [dispatch(x, plan, keys=n > 0) for n, x in enumerate(arrays)]
    mine = context_parallel_attention(*shards, plan, **how, **bits)
    assert same_bits(mine[0], dispatch(out, plan)), (seed, plan.dispatch, how)
    assert same_bits(mine[1], dispatch(lse, plan, axis=0 if given["layout"] == "TND" else 2)), (seed, plan.dispatch, how)
    grads = context_parallel_attention_backward(dispatch(dout, plan), *shards, *mine, plan, **how, **bits)
    assert same_bits(grads[0], dispatch(whole[0], plan)), (seed, plan.dispatch, how)
    for got, expected in zip(grads[1:], whole[1:], strict=True):
        kind = dtype_of(expected)
        error = np.abs(values(got, kind) - values(dispatch(expected, plan, keys=True), kind)).max(initial=0)
        assert error <= ROUNDING[kind] * np.abs(values(expected, kind)).max(initial=0), (seed, plan.dispatch, how)


def case_random_problems(comm):
    for seed in range(SEEDS):
        check(comm, seed)
