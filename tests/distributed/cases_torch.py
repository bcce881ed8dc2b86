"""Cases of torch tensors over ranks, run under mpirun. They have a file of their own because torch takes seconds to import."""

import torch

import blitz_attn
from blitz_attn.distributed import (
    ContextParallelPlan,
    context_parallel_attention,
    context_parallel_attention_backward,
    dispatch,
    undispatch,
)


def case_tensors(comm):
    plan = ContextParallelPlan(None, 256, comm=comm, num_heads=2, head_dim=16, dtype=torch.bfloat16, causal=True)
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(1, 2, 256, 16).bfloat16() for _ in range(4))
    out, lse = blitz_attn.block_sparse_attention(q, k, v, causal=True, return_lse=True)
    whole = blitz_attn.block_sparse_attention_backward(dout, q, k, v, out, lse, causal=True)
    shards = [dispatch(x, plan) for x in (q, k, v)]
    mine = context_parallel_attention(*shards, plan)
    assert mine[0].dtype == torch.bfloat16
    assert torch.equal(undispatch(mine[0], plan), out)
    assert torch.equal(undispatch(mine[1], plan), lse)
    grads = context_parallel_attention_backward(dispatch(dout, plan), *shards, *mine, plan)
    assert all(x.dtype == torch.bfloat16 for x in grads)
    assert torch.equal(undispatch(grads[0], plan), whole[0])
