"""Cases of gradients of context-parallel attention, run under mpirun: dq has the bits of one process, and dk and dv differ by rounding."""

import numpy as np

import blitz_attn
from blitz_attn import testing
from blitz_attn._formats import widened
from blitz_attn.distributed import (
    ContextParallelPlan,
    context_parallel_attention,
    context_parallel_attention_backward,
    dispatch,
)  # fmt: skip
from cases import dtype_of
from cases_attention import Counting
from problems import DISPATCHES, Problem, lse_axis, same_bits

ROUNDING = {"float64": 1e-13, "float32": 2e-6, "float16": 2e-3, "bfloat16": 1.6e-2}  # relative to the largest element


def values(x, kind):
    return widened(x.view(np.uint16) if kind == "bfloat16" else x, kind)


def check(comm, problem, dispatches=DISPATCHES, comm_types=("p2p",), with_dlse=False, **options):
    rng = np.random.default_rng(0)
    out, lse = problem.whole()
    dout = testing.round_to(rng.standard_normal(out.shape), dtype_of(out))
    dlse = rng.standard_normal(lse.shape).astype(lse.dtype) if with_dlse else None
    cap = {name: x for name, x in problem.caps.items() if name == "softcap"}  # not the sinks, which the log-sum-exp contains
    whole = blitz_attn.block_sparse_attention_backward(
        dout, *problem.arrays, out, lse, problem.sabi, dlse=dlse, **problem.call, **problem.heads, **cap, **problem.bits
    )
    for name in dispatches:
        counting = Counting(comm)
        plan = ContextParallelPlan(problem.sabi, comm=counting, dispatch=name, **problem.plan)
        q, k, v = (dispatch(x, plan, keys=n > 0) for n, x in enumerate(problem.arrays))
        o, one = context_parallel_attention(q, k, v, plan, **problem.caps, **problem.bits)
        given = dispatch(dout, plan), q, k, v, o, one, plan
        more = cap if dlse is None else cap | {"dlse": dispatch(dlse, plan, axis=lse_axis(problem))}
        for comm_type in comm_types:
            counting.sent = 0
            mine = context_parallel_attention_backward(*given, comm_type=comm_type, **more, **problem.bits, **options)
            assert same_bits(mine[0], dispatch(whole[0], plan)), (name, comm_type)
            if dlse is None and comm_type != "all_gather":
                assert counting.sent == plan.backward_bytes[plan.rank].sum(), (name, comm_type, counting.sent, plan.backward_bytes)
            for got, expected in zip(mine[1:], whole[1:], strict=True):
                kind = dtype_of(expected)
                a, b = (values(x, kind) for x in (got, dispatch(expected, plan, keys=True)))
                largest = np.abs(values(expected, kind)).max(initial=0)
                assert np.abs(a - b).max(initial=0) <= ROUNDING[kind] * largest, (name, comm_type, np.abs(a - b).max() / largest)
            again = context_parallel_attention_backward(*given, comm_type=comm_type, overlap=False, **more, **problem.bits)
            assert all(same_bits(a, b) for a, b in zip(mine, again, strict=True)), (name, comm_type)


def case_lists_of_heads(comm):
    check(comm, Problem(1, 515, density=0.3, list_heads=4, causal=True), with_dlse=True)
    check(comm, Problem(3, 515, density=0.3, list_heads=2, causal=True), ("items",))  # one list per KV head


def case_softcap_and_sinks(comm):
    check(comm, Problem(9, 515, density=0.4, causal=True, softcap=3.0, sinks=[0.5, -3.0, 2.0, 9.0]), ("cut", "items"))


def case_ways_to_send(comm):
    check(
        comm,
        Problem(20, 515, heads=8, kv_heads=4, density=0.3, list_heads=8, batch=2, causal=True),
        comm_types=("p2p", "a2a", "all_gather"),
    )
