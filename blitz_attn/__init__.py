"""Block-sparse attention on CPUs: NumPy in and out, C kernels underneath.

What docstrings call an ``array`` is a NumPy array, a torch tensor or a JAX array in CPU memory, or any other object that exports the
buffer protocol or DLPack; lists are refused, because they have no dtype. An ``array_like`` may also be a list, or a list of lists, and a
``sequence of int`` a list, a tuple or an array with one axis.

>>> import numpy as np
>>> import blitz_attn
>>> q = k = v = np.ones((1, 1, 256, 64), np.float32)
>>> blitz_attn.block_sparse_attention(q, k, v).shape
(1, 1, 256, 64)
"""

from typing import TYPE_CHECKING

from . import nsa, sabi, select
from ._core import __version__
from .block_sparse import block_sparse_attention, block_sparse_attention_backward
from .config import get_num_threads, isa, isa_levels, kernels, set_num_threads, show_config
from .merge import merge_states, merge_states_n, merge_states_tree
from .paged import PagedPlan, append_paged_kv, dequantize_kv, paged_attention, paged_select_attention, quantize_kv
from .quest import (
    quest_block_select_paged,
    quest_block_select_paged_in_out,
    quest_block_select_paged_in_out_w,
    quest_prefill_metadata,
    select_and_attend,
    select_blocks,
)
from .select import select_and_attend_prefill, select_blocks_prefill

if TYPE_CHECKING:
    from . import distributed, plot, reference, testing

__all__ = [
    "PagedPlan",
    "__version__",
    "append_paged_kv",
    "block_sparse_attention",
    "block_sparse_attention_backward",
    "dequantize_kv",
    "distributed",
    "get_num_threads",
    "isa",
    "isa_levels",
    "kernels",
    "merge_states",
    "merge_states_n",
    "merge_states_tree",
    "nsa",
    "paged_attention",
    "paged_select_attention",
    "plot",
    "quantize_kv",
    "quest_block_select_paged",
    "quest_block_select_paged_in_out",
    "quest_block_select_paged_in_out_w",
    "quest_prefill_metadata",
    "reference",
    "sabi",
    "select",
    "select_and_attend",
    "select_and_attend_prefill",
    "select_blocks",
    "select_blocks_prefill",
    "set_num_threads",
    "show_config",
    "testing",
]

_LAZY = ("distributed", "plot", "reference", "testing")  # programs that only run the operations never need these modules


def __getattr__(name: str) -> object:
    """Import the module ``distributed``, ``plot``, ``reference`` or ``testing`` on its first use."""
    if name in _LAZY:
        from importlib import import_module

        return import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "compat", "integrations"]  # which are imported by name, because they need other packages
