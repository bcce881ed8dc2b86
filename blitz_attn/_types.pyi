"""The types of arguments and results, as type checkers see them.

A function whose result is of the kind of its first array has overloads: with a `Kind` it returns a `Kind`, with any other array a NumPy
array. Most other arguments of its overloads are a TypedDict: see `_options`. At run time there are no overloads, and the function keeps its
signature and its defaults. No framework is imported: a framework's arrays are recognised by a method that no other library's arrays have.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, SupportsFloat, SupportsIndex, TypeVar

from numpy.typing import ArrayLike as NumpyArrayLike

# ---- Arrays -------------------------------------------------------------------------------------------------------


class ExportsDLPack(Protocol):
    """An array of NumPy, torch, JAX or another library."""

    def __dlpack__(self) -> Any:
        """Export the array's memory."""


class ExportsBuffer(Protocol):
    """A memoryview and the like. This is `collections.abc.Buffer` of Python 3.12."""

    def __buffer__(self, flags: int, /) -> memoryview:
        """Export the array's memory."""


class TorchTensor(ExportsDLPack, Protocol):
    """`torch.Tensor`."""

    def requires_grad_(self) -> Any:
        """No other library's arrays have this method."""


class JaxArray(ExportsDLPack, Protocol):
    """`jax.Array`."""

    def block_until_ready(self) -> Any:
        """No other library's arrays have this method."""


class HasItemsize(Protocol):
    """A dtype of NumPy, ml_dtypes or torch."""

    @property
    def itemsize(self) -> int:
        """Bytes of a number."""


# The types that docstrings call "array", "array_like", "sequence of int", "int or sequence of int", "sequence of float" and "str or dtype".
Array = ExportsDLPack | ExportsBuffer
ArrayLike = NumpyArrayLike | ExportsDLPack
Integers = Array | Sequence[SupportsIndex]
IntOrIntegers = SupportsIndex | Integers
Numbers = Array | Sequence[SupportsFloat]
DType = str | type | HasItemsize
KVDType = DType | tuple[str, str]  # of a cache: one dtype for both arrays, or the formats of keys and of values

Tables = Array | tuple[Integers, Integers, Integers]
Scale = float | Array
Source = Array | tuple[Array, ...] | None

Kind = TypeVar("Kind", bound=TorchTensor | JaxArray)  # of an argument, and of the result
Tensor = TypeVar("Tensor", bound=TorchTensor)  # as Kind, for functions that return a NumPy array for a JAX array
