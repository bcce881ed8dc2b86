"""Cases of context-parallel attention, run under mpirun: results have the bits of one process, and messages have the plan's bytes."""

import numpy as np
from mpi4py import MPI

import blitz_attn
from blitz_attn.distributed import ContextParallelPlan, _exchange, context_parallel_attention, dispatch, undispatch
from problems import DISPATCHES, Problem, lse_axis, raised, same_bits, same_everywhere


class Counting:
    """A communicator that counts the bytes that its rank sends."""

    def __init__(self, comm):
        self.comm, self.sent = comm, 0

    def __getattr__(self, name):
        return getattr(self.comm, name)

    def Isend(self, message, rank, tag):  # noqa: N802 - MPI's name
        self.sent += message[1] * message[2].Get_size()
        return self.comm.Isend(message, rank, tag)

    def Ialltoallw(self, send, receive):  # noqa: N802
        self.sent += sum(n * kind.Get_size() for n, kind in zip(send[1], send[3], strict=True))
        return self.comm.Ialltoallw(send, receive)


def check(comm, problem, dispatches=DISPATCHES, comm_types=("p2p",), **options):
    """Check that every dispatch gives each rank the bits of its part of one whole call, and sends as many bytes as the plan says."""
    out, lse = problem.whole()
    for name in dispatches:
        counting = Counting(comm)
        plan = ContextParallelPlan(problem.sabi, comm=counting, dispatch=name, **problem.plan)
        q, k, v = (dispatch(x, plan, keys=n > 0) for n, x in enumerate(problem.arrays))
        for comm_type in comm_types:
            counting.sent = 0
            mine = context_parallel_attention(q, k, v, plan, comm_type=comm_type, **problem.caps, **problem.bits, **options)
            assert same_bits(mine[0], dispatch(out, plan)), (name, comm_type, "out")
            assert same_bits(mine[1], dispatch(lse, plan, axis=lse_axis(problem))), (name, comm_type, "lse")
            if comm_type != "all_gather":
                assert counting.sent == plan.bytes[plan.rank].sum(), (name, comm_type, counting.sent, plan.bytes)


def case_softcap_and_sinks(comm):
    check(comm, Problem(7, 515, density=0.4, causal=True, softcap=3.0, sinks=[0.5, -3.0, 2.0, 9.0]))
    check(comm, Problem(8, 300, layout="BSH", batch=2, sinks=[0.5, -3.0, 2.0, 9.0]), ("cut",))


def case_large_blocks(comm):
    check(comm, Problem(18, 1500, dim=128, block_shape=(128, 128), causal=True, density=0.4, list_heads=4), ("cut", "items"))
    check(comm, Problem(19, 1500, dim=64, block_shape=(256, 512), dtype="float16", causal=True), ("cut", "items"))


def case_ways_to_send(comm):
    kinds = ("p2p", "a2a", "all_gather", "auto")
    check(comm, Problem(20, 515, density=0.3, list_heads=4, batch=2, causal=True), comm_types=kinds)
    check(comm, Problem(21, None, layout="TND", q_sizes=[100, 0, 333], causal=True), comm_types=kinds)
    check(comm, Problem(22, 300, layout="BSND", density=0.4, batch=2, kv_lens=[200, 300]), comm_types=kinds)


def case_layers_share_a_plan(comm):
    problem = Problem(24, 515, density=0.3, list_heads=4, causal=True)
    plan = ContextParallelPlan(problem.sabi, comm=comm, **problem.plan)
    before = None
    for layer, scale in enumerate((0.1, 0.5, None)):
        q, k, v = problem.arrays
        k = k * layer if layer else np.full_like(k, np.nan)  # NaN that the first layer leaves behind must not reach another layer
        out = blitz_attn.block_sparse_attention(q, k, v, problem.sabi, scale=scale, **problem.call)
        mine = context_parallel_attention(
            *(dispatch(x, plan) for x in (q, k, v)), plan, comm=comm, scale=scale, return_lse=False, num_threads=2
        )
        assert same_bits(mine, dispatch(out, plan))
        kept = sorted(id(x) for windows in plan._routes.windows.values() for x in windows)
        assert before in (None, kept)  # each layer reuses the memory of the previous one
        before = kept


def case_levels(comm):
    for level in blitz_attn.isa_levels(available=True):
        with blitz_attn.isa(level):
            check(comm, Problem(25, 300, density=0.4, dtype="bfloat16", causal=True), ("cut", "items"))


def case_dispatch_and_undispatch(comm):
    for layout in ("BNSD", "BSND", "TND"):
        problem = Problem(26, 200, 333, batch=2, layout=layout, q_sizes=[50, 0, 77], kv_sizes=[90, 10, 1])
        for name in DISPATCHES:
            plan = ContextParallelPlan(comm=comm, dispatch=name, **problem.plan)
            for n, x in enumerate(problem.arrays):
                assert same_bits(undispatch(dispatch(x, plan, keys=n > 0), plan, keys=n > 0), x)
    hidden = np.arange(200, dtype=np.int64)
    plan = ContextParallelPlan(None, 200, comm=comm, block_shape=(16, 16), dispatch="zigzag")
    assert (undispatch(dispatch(hidden, plan, axis=0), plan, axis=-1) == hidden).all()


def case_one_error_for_all(comm):
    """A mistake on one rank, or a difference between ranks, raises the same sentence on all ranks. A later call works."""
    rank, last = comm.Get_rank(), comm.Get_size() - 1
    problem = Problem(27, 200)
    plan = ContextParallelPlan(comm=comm, **problem.plan)
    shards = [dispatch(x, plan) for x in problem.arrays]

    def text(call):
        return same_everywhere(comm, raised(call))

    where = f" (on rank {last})" if last else ""
    bad = [shards[0][..., :5] if rank == last else shards[0], *shards[1:]]
    shape = (1, 4, sum(b - a for a, b in plan._routes.q_held.of(last)), 32)
    sentence = f"ValueError: q: expected shape {shape}, this rank's shard in layout BNSD, got {(*shape[:3], 5)}{where}"
    assert text(lambda: context_parallel_attention(*bad, plan)) == sentence
    bad = [*shards[:2], shards[2].astype(np.float64) if rank == last else shards[2]]
    assert text(lambda: context_parallel_attention(*bad, plan)) == f"TypeError: v: expected float32 as the plan says, got float64{where}"
    other = ContextParallelPlan(None, 200, size=1)
    sentence = "ValueError: plan: expected one that was made with a communicator, got one that was made with size"
    assert text(lambda: context_parallel_attention(*shards, other)) == sentence
    sentence = "ValueError: comm: expected the communicator that the plan was made with, got another"
    assert text(lambda: context_parallel_attention(*shards, plan, comm=MPI.COMM_SELF if last else 3)) == sentence
    sentence = "ValueError: comm_type: expected one of auto, p2p, all_gather, a2a, got 'ring'"
    assert text(lambda: context_parallel_attention(*shards, plan, comm_type="ring")) == sentence
    for given, sentence in (
        ({"softcap": -1.0 if rank == last else 2.0}, "ValueError: softcap: expected "), ({"sinks": [1.0] * (3 + (rank != last))}, "ValueError: sinks: expected "),
    ):  # fmt: skip
        assert text(lambda given=given: context_parallel_attention(*shards, plan, **given)).startswith(sentence)
    if last:
        sentence = f"ValueError: scale: expected the same on all ranks, got 1.0 on rank 0 and 2.0 on rank {last}"
        assert text(lambda: context_parallel_attention(*shards, plan, scale=2.0 if rank == last else 1.0)) == sentence
        sentence = f"ValueError: s_q: expected the same on all ranks, got 200 on rank 0 and 201 on rank {last}"
        assert text(lambda: ContextParallelPlan(None, 201 if rank == last else 200, comm=comm)) == sentence
        lists = np.zeros((1, 1, 4, 1), np.int32)
        lists[0, 0, 3] = rank == last
        sentence = f"ValueError: sabi: expected the same on all ranks, got int32 of shape (1, 1, 4, 1) on rank 0 and one with other values on rank {last}"
        assert text(lambda: ContextParallelPlan(lists, 200, block_shape=(64, 64), comm=comm)) == sentence
        sentence = f"ValueError: dtype: expected the same on all ranks, got 'float32' on rank 0 and 'float16' on rank {last}"
        assert text(lambda: ContextParallelPlan(None, 200, comm=comm, dtype="float16" if rank == last else "float32")) == sentence
        for name, given in (("softcap", (1.0, 2.0)), ("sinks", ([1.0] * 4, [2.0] * 4))):
            found = text(lambda name=name, given=given: context_parallel_attention(*shards, plan, **{name: given[rank == last]}))
            assert found.startswith(f"ValueError: {name}: expected the same on all ranks, got ")
        two = (
            ContextParallelPlan(comm=comm, dispatch="zigzag", **problem.plan),
            ContextParallelPlan(comm=comm, dispatch="items", **problem.plan),
        )
        assert text(
            lambda: context_parallel_attention(*(dispatch(x, two[rank == last]) for x in problem.arrays), two[rank == last])
        ).startswith("ValueError: plan: expected the same on all ranks, got ")
    check(comm, problem, ("cut",))


def case_addresses_beyond_two_gib(comm):
    """A message arrives at its place in a window of 6 GiB."""
    rank, size = comm.Get_rank(), comm.Get_size()
    room = _exchange.window((1, 1, 3 << 25, 16), "float32")
    sent = np.full((1, 1, 100, 16), rank, np.float32)
    begin, length = np.array([5, (3 << 25) - 60]), np.array([40, 60])
    out = _exchange.message([_exchange.Part(sent, range(1), None, np.array([0]), np.array([100]))])
    into = _exchange.message([_exchange.Part(room, range(1), None, begin, length)])
    requests = [comm.Isend([MPI.BOTTOM, 1, out], (rank + 1) % size, 3), comm.Irecv([MPI.BOTTOM, 1, into], (rank - 1) % size, 3)]
    MPI.Request.Waitall(requests)
    assert (room[0, 0, -60:] == (rank - 1) % size).all()
    assert (room[0, 0, 5:45] == (rank - 1) % size).all()
    assert not room[0, 0, 45:100].any()
    out.Free()
    into.Free()
