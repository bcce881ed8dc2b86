"""Block-sparse attention on CPUs: NumPy in and out, C kernels underneath.

In docstrings, an ``array`` is a NumPy array, a torch tensor or a JAX array in CPU memory, or any other object that exports the buffer
protocol or DLPack; Python lists are refused, because they have no dtype. An ``array_like`` may also be a list, or a list of lists. A
``sequence of int`` is a list, a tuple or an array with one axis.

>>> import numpy as np
>>> import blitz_attn
>>> q = k = v = np.ones((1, 1, 256, 64), np.float32)
>>> blitz_attn.block_sparse_attention(q, k, v).shape
(1, 1, 256, 64)
"""

from importlib.util import find_spec
from typing import TYPE_CHECKING

if find_spec(f"{__name__}._core") is None:  # a checkout in which nothing was built in place, as after `pip install .`
    from ._unbuilt import installed_folder

    __path__ = [installed_folder(__path__[0])]

from . import block_sparse, config, merge, nsa, paged, quest, sabi, select, video
from ._core import __version__
from .block_sparse import *
from .config import *
from .merge import *
from .paged import *
from .quest import *
from .select import select_and_attend_prefill, select_blocks_prefill, select_tokens

if TYPE_CHECKING:
    from . import distributed, plot, reference, testing

__all__ = [
    "__version__",
    "distributed",
    "nsa",
    "plot",
    "reference",
    "sabi",
    "select",
    "select_and_attend_prefill",
    "select_blocks_prefill",
    "select_tokens",
    "testing",
    "video",
]
__all__ += block_sparse.__all__
__all__ += config.__all__
__all__ += merge.__all__
__all__ += paged.__all__
__all__ += quest.__all__

_LAZY = ("distributed", "plot", "reference", "testing")  # programs that only run the operations never need these modules


def __getattr__(name: str) -> object:
    """Import the module ``distributed``, ``plot``, ``reference`` or ``testing`` on its first use."""
    if name in _LAZY:
        from importlib import import_module

        return import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "compat", "integrations"]  # these two are imported by name, because few programs need them
