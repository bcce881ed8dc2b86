"""Context-parallel attention and its gradients against one process. Cases run under mpirun (launcher.py)."""

import importlib.util

import numpy as np
import pytest

import blitz_attn
import launcher
from blitz_attn.distributed import ContextParallelPlan, _exchange, dispatch
from blitz_attn.distributed._rows import RowCall
from problems import DISPATCHES, Problem, lse_axis, same_bits

MODULES = ("cases_attention", "cases_backward", "cases_random", "cases_nsa_ranks")


@pytest.mark.parametrize(("module", "case"), [(module, case) for module in MODULES for case in launcher.names_of(module)])
@pytest.mark.parametrize(("library", "ranks"), launcher.jobs())
def test_cases(library, ranks, module, case):
    launcher.passes(case, module, ranks, library)


@pytest.mark.long
@pytest.mark.parametrize("case", launcher.names_of("cases_torch"))
def test_torch(case):
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed")
    launcher.passes(case, "cases_torch", 2, "openmpi")


class Place:
    """A communicator that only knows its rank."""

    def __init__(self, rank):
        self.rank = rank

    def Get_rank(self):  # noqa: N802 - MPI's name
        return self.rank


@pytest.mark.parametrize("dispatching", DISPATCHES)
@pytest.mark.parametrize("size", [5, 16, 64])
def test_many_ranks_in_one_process(size, dispatching):
    """Without MPI, the contents of messages are copied. Results of all ranks have the bits of one process, and messages have the plan's sizes."""
    problem = Problem(30, 900, heads=6, kv_heads=3, dim=16, block_shape=(16, 16), density=0.2, list_heads=6, batch=2, causal=True, kv_lens=[900, 700])
    out, lse = problem.whole()
    plans = [ContextParallelPlan(problem.sabi, size=size, rank=r, dispatch=dispatching, **problem.plan) for r in range(size)]
    routes = plans[0]._routes
    stages = []
    for rank, plan in enumerate(plans):
        q, *keys = (dispatch(x, plan) for x in problem.arrays)
        empty = [np.full_like(dispatch(out, plan), np.nan), np.full_like(dispatch(lse, plan), np.nan)[..., None]]
        stages.append(_exchange.Stages(routes, Place(rank), keys, [q], empty, comm_type="p2p", thread=False, ahead=True))
    sent = np.zeros((size, size), int)

    def nbytes(parts):
        return sum(p.stretch(n).nbytes for p in parts for n in range(len(p.length)))

    def move(source, target, parts, places):
        assert nbytes(parts) == nbytes(places)
        sent[source, target] += nbytes(parts) * (source != target)
        _exchange.copy(parts, places)

    for worker, one in enumerate(stages):
        for step, head in enumerate(routes.stages(worker)):
            windows = one.windows[step % 2]
            one._make_pieces(head)
            for holder, other in enumerate(stages):
                move(holder, worker, other._held_keys(worker, head), one._window_keys(holder, head, windows))
                for piece in one.pieces[head]:
                    if not piece.held and holder != worker:
                        move(holder, worker, other._held_rows(worker, head, other.inputs), one._piece_rows(holder, piece, piece.inputs))
            for piece in one.pieces[head]:
                call = RowCall(routes.problem, head, piece.first, piece.end)
                blitz_attn.block_sparse_attention(
                    piece.inputs[0], *windows, **call.arguments, return_lse=True, out=(piece.outputs[0], piece.outputs[1][..., 0])
                )
                if piece.held:
                    continue
                one._store_own(piece)
                for holder, other in enumerate(stages):
                    if holder != worker:
                        move(worker, holder, one._piece_rows(holder, piece, piece.outputs), other._held_rows(worker, head, other.outputs))
    for plan, one in zip(plans, stages, strict=True):
        assert same_bits(one.outputs[0], dispatch(out, plan))
        assert same_bits(one.outputs[1][..., 0], dispatch(lse, plan, axis=lse_axis(problem)))
    assert (sent == plans[0].bytes).all()
