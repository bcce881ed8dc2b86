"""Floating-point arrays that callers give and get, in operations that are composed in Python.

Inside such an operation, every array is a NumPy view of the caller's memory, and the name of its dtype goes with it. The view of a bfloat16
array holds bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from . import _arrays
from ._sentences import number_shown, refusal

FLOATS = ("float32", "float16", "bfloat16", "float64")


def floats(x: Any, name: str, dtype: Any, written: bool = False, strided: bool = False) -> tuple[np.ndarray, str]:
    """View of a floating-point array whose last axis is contiguous (with `strided`, it need not be), and the name of its dtype."""
    array, kind = _arrays.host(x, name, dtype, written)
    if kind not in FLOATS:
        hint = ' (dtype="bfloat16" reads uint16 as bfloat16 bits)' if kind == "uint16" else ""
        raise TypeError(f"{name}: expected float32, float16, bfloat16 or float64, got {kind}{hint}")
    if not strided and array.size and array.ndim and array.shape[-1] > 1 and array.strides[-1] != array.itemsize:
        step = array.strides[-1] / array.itemsize
        raise ValueError(
            f"{name}: expected a contiguous last axis (numpy.ascontiguousarray makes one), got a stride of {number_shown(step)} elements"
        )
    return array, kind


def real_of(kind: str) -> str:
    """The dtype in which numbers of dtype `kind` are summed."""
    return "float64" if kind == "float64" else "float32"


def refuse_overlap(name: str, array: np.ndarray, **others: np.ndarray | None) -> None:
    """Refuses an array that may share memory with one of `others`."""
    for other_name, other in others.items():
        if other is not None and np.may_share_memory(array, other):
            raise refusal(ValueError, name, ": expected memory of its own, got an array that overlaps ", other_name)


def memory_of(x: Any, name: str) -> np.ndarray | None:
    """View of the memory of an argument that is an array or exports a buffer. None for other arguments, for memory that cannot be read
    (other code refuses it), and for an object that exports only DLPack: such an object is asked for its memory only once, by the core."""
    try:
        if isinstance(x, np.ndarray):
            return x
        if hasattr(x, "__array__"):
            return _arrays.host(x, name, "bfloat16")[0]
        return None if isinstance(x, (list, tuple, int)) else np.asarray(memoryview(x))
    except (BufferError, TypeError, ValueError):
        return None


def refuse_overlaps(outputs: dict[str, Any], **inputs: Any) -> None:
    """Refuses outputs of the caller that may share memory with one of `inputs`. None stands for an output or input that was not given."""
    views = {name: memory_of(x, name) for name, x in inputs.items() if x is not None}
    for name, x in outputs.items():
        array = memory_of(x, name) if views and x is not None else None
        if array is not None:
            refuse_overlap(name, array, **views)


class Result:
    """One output of a call: the caller's array, or a new array of the same kind (NumPy, torch, JAX) as the call's leading array."""

    def __init__(
        self, shape: tuple[int, ...], kind: str, like: Any, given: Any = None, name: str = "out", dtype: Any = None, strided: bool = False
    ) -> None:  # fmt: skip
        self.name, self.given, self.family = name, given, _arrays.family_of(like)
        if given is None:
            self.made = self.family.empty(shape, kind)
            self.array = _arrays.host(self.made, name, kind, written=True)[0]
        else:
            self.made = given
            self.array = self._checked(shape, kind, dtype, strided)

    def _checked(self, shape: tuple[int, ...], kind: str, dtype: Any, strided: bool) -> np.ndarray:
        name = self.name
        array, own = floats(self.given, name, dtype, True, strided)
        if own != kind:
            raise TypeError(f"{name}: expected dtype {kind}, got {own}")
        if array.shape != shape:
            raise ValueError(f"{name}: expected shape {shape}, got {array.shape}")
        if not array.flags.writeable:
            raise ValueError(f"{name}: expected a writable array, got a read-only one")
        return array

    def refuse_overlap(self, **others: np.ndarray | None) -> None:
        """Refuses a caller's array that may share memory with one of `others`."""
        if self.given is not None:
            refuse_overlap(self.name, self.array, **others)

    @property
    def value(self) -> Any:
        """The array that the caller gets."""
        return _arrays.finished(self.made, self.given, self.family)


def attention_results(
    q: Any, shape: tuple[int, ...], kind: str, out: Any, return_lse: bool, dtype: str | None, inputs: dict[str, Any]
) -> list[Result]:  # fmt: skip
    """The `Result` for attention's output of this shape and dtype, and with `return_lse` a second one for its log-sum-exp.

    Both go into the caller's `out`, which must not overlap the arrays in `inputs`, or into new arrays of the kind of `q`.
    Unlike `refuse_overlaps`, this function also asks exporters of DLPack for their memory, because its callers pass no `out` to the core,
    which therefore cannot compare `out` with the inputs.
    """
    given, given_lse = _arrays.split_out(out, return_lse)
    results = [Result(shape, kind, q, given, "out", dtype)]
    if return_lse:
        results.append(Result(shape[:-1], real_of(kind), q, given_lse, "lse", dtype, strided=True))
        results[1].refuse_overlap(out=results[0].array)
    if given is not None or given_lse is not None:
        arrays = {name: x for name, x in inputs.items() if hasattr(x, "__array__") or hasattr(x, "__dlpack__")}
        views = {name: _arrays.host(x, name, "bfloat16")[0] for name, x in arrays.items()}
        for result in results:
            result.refuse_overlap(**views)
    return results


def written(results: list[Result], *values: np.ndarray) -> Any:
    """Writes `values` into the results, and returns what the caller gets: one array, or a pair."""
    for result, numbers in zip(results, values, strict=False):
        result.array[...] = numbers
    return results[0].value if len(results) == 1 else tuple(result.value for result in results)
