"""Attention over several processes, on one machine or many, by MPI: context parallelism. Results, and gradients of queries, are
bit-identical for any number of ranks.

Needs mpi4py (``pip install '.[mpi]'`` in a checkout) and an MPI library; both are imported when a call first needs them. A communicator
is any object with the methods of ``mpi4py.MPI.Comm``.
"""

from ._comm import Alone
from ._nsa import nsa
from .attention import context_parallel_attention, context_parallel_attention_backward, dispatch, undispatch
from .decode import DecodePlan, decode_context_parallel_attention
from .faults import finish, is_failure, redistribute, run_with_survivors
from .plan import ContextParallelPlan, Prediction
from .selection import select_blocks_distributed

__all__ = [
    "Alone",
    "ContextParallelPlan",
    "DecodePlan",
    "Prediction",
    "context_parallel_attention",
    "context_parallel_attention_backward",
    "decode_context_parallel_attention",
    "dispatch",
    "finish",
    "is_failure",
    "nsa",
    "redistribute",
    "run_with_survivors",
    "select_blocks_distributed",
    "undispatch",
]


def __dir__() -> list[str]:
    return __all__
