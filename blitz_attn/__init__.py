"""Block-sparse attention on CPUs: NumPy in and out, C kernels underneath.

>>> import numpy as np
>>> import blitz_attn
>>> q = k = v = np.ones((1, 1, 256, 64), np.float32)
>>> blitz_attn.block_sparse_attention(q, k, v).shape
(1, 1, 256, 64)
"""

from . import plot, reference, sabi, testing
from ._core import __version__
from .block_sparse import block_sparse_attention
from .config import get_num_threads, isa, isa_levels, kernels, set_num_threads, show_config
from .merge import merge_states, merge_states_n

__all__ = [
    "__version__",
    "block_sparse_attention",
    "get_num_threads",
    "isa",
    "isa_levels",
    "kernels",
    "merge_states",
    "merge_states_n",
    "plot",
    "reference",
    "sabi",
    "set_num_threads",
    "show_config",
    "testing",
]
