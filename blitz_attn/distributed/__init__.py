"""Attention over several processes, on one machine or many, by MPI: context parallelism, bit-identical for any number of ranks.

Needs mpi4py (``pip install '.[mpi]'`` in a checkout) and an MPI library; both are imported on first use. A communicator is any object
with the methods of ``mpi4py.MPI.Comm``.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ._comm import Alone as Alone
    from ._nsa import nsa as nsa
    from .attention import context_parallel_attention as context_parallel_attention
    from .attention import context_parallel_attention_backward as context_parallel_attention_backward
    from .attention import dispatch as dispatch
    from .attention import undispatch as undispatch
    from .decode import DecodePlan as DecodePlan
    from .decode import decode_context_parallel_attention as decode_context_parallel_attention
    from .faults import finish as finish
    from .faults import is_failure as is_failure
    from .faults import run_with_survivors as run_with_survivors
    from .plan import ContextParallelPlan as ContextParallelPlan
    from .plan import Prediction as Prediction
    from .selection import select_blocks_distributed as select_blocks_distributed

_HOMES: dict[str, str] = {  # public name -> the module of this package that has it
    "Alone": "_comm",
    "ContextParallelPlan": "plan",
    "DecodePlan": "decode",
    "Prediction": "plan",
    "context_parallel_attention": "attention",
    "context_parallel_attention_backward": "attention",
    "decode_context_parallel_attention": "decode",
    "dispatch": "attention",
    "finish": "faults",
    "is_failure": "faults",
    "nsa": "_nsa",
    "redistribute": "faults",
    "run_with_survivors": "faults",
    "select_blocks_distributed": "selection",
    "undispatch": "attention",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> object:
    """Import the module of a public name on the first use of that name."""
    if name in _HOMES:
        return getattr(import_module(f".{_HOMES[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
