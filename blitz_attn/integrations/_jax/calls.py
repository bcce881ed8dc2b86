"""The library's functions as steps of a computation of JAX, on the memory of its arrays.

A call that JAX traces (jit, vmap, scan) becomes a call back into Python, which gets the buffers of the compiled computation as NumPy
arrays and writes the results into other buffers. Where nothing is traced, or only for a gradient outside of jit, the library's function is
called directly: no computation is compiled, and the function's errors are raised as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..._operations import OPERATIONS, OWN, arguments_of, unexpected
from ..._sabi.block_list import with_block_shape

try:
    import jax
except ModuleNotFoundError:  # without JAX, the module can be imported and documented, but its functions cannot be called
    jax = None

Run = Callable[..., Any]

# Arguments of the library's functions that attention for JAX does not take; and those that it does not take if it chooses blocks or reads
# pages.
NOT_TAKEN = ("kv_split", "out", "out_dtype", "dtype", "kv_dtype", "return_sabi")
BEYOND_LISTS = (*NOT_TAKEN, "q_begin", "q_total")


def read(function: Callable[..., Any], without: Sequence[str], given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arguments of a call of the library's `function`: its arrays, as arrays of JAX, and all other arguments, frozen."""
    taken = {name: x for name, x in arguments_of(function).items() if x.role not in OWN and name not in (*without, "return_lse")}
    for name in given:
        if name not in taken:
            raise unexpected(function.__name__, name)
    given = with_block_shape(given)
    required = [name for name, x in taken.items() if x.role in ("floats", "cache")]
    arrays = arrays_of(required, **{name: given.get(name) for name, x in taken.items() if x.is_array})
    return arrays, frozen({name: given.get(name, x.default) for name, x in taken.items() if not x.is_array})


def arrays_of(required: Sequence[str], **given: Any) -> dict[str, Any]:
    """The arguments that are not None, as arrays of JAX. The `required` arguments must be arrays already."""
    import jax  # raises an error that names JAX where it is not installed

    arrays = {}
    for name, x in given.items():
        if name in required and not isinstance(x, (jax.Array, np.ndarray)):
            raise TypeError(f"{name}: expected a JAX array, got {type(x).__name__}")
        if x is not None:
            try:
                arrays[name] = x if isinstance(x, jax.Array) else jax.numpy.asarray(_in_range(np.asarray(x), name))
            except (TypeError, OverflowError) as error:
                raise TypeError(f"{name}: expected an array that JAX can hold, got {type(x).__name__}") from error
    return arrays


def _in_range(x: np.ndarray, name: str) -> np.ndarray:
    """The array. Integers that need more bits than JAX holds are refused, since JAX would silently drop their upper bits."""
    if x.size == 0 and x.dtype == np.float64:  # an empty list
        return x.astype(np.int32)
    if x.dtype.kind not in "iu" or x.dtype.itemsize < 8 or jax.config.jax_enable_x64:
        return x
    wrong = x[(x > 2**31 - 1) | (x < -(2**31))]
    if wrong.size:
        raise ValueError(f"{name}: expected integers of 32 bits, which is what JAX has without jax_enable_x64, got {wrong.flat[0]}")
    return x


def frozen(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options with tuples in place of lists and arrays, so that the caller cannot change them later. Refuses what JAX traces."""
    return {name: _frozen(x, name) for name, x in options.items()}


def _frozen(x: Any, name: str) -> Any:
    if isinstance(x, jax.core.Tracer):
        raise TypeError(f"{name}: expected a Python value, got a tracer of JAX")
    if isinstance(x, (np.ndarray, np.generic, jax.Array)):
        x = np.asarray(x).tolist()
    return tuple(_frozen(part, name) for part in x) if type(x) in (list, tuple) else x


def is_traced(arrays: Mapping[str, Any]) -> bool:
    """Whether one of the arrays is a tracer of JAX, which has no numbers."""
    return any(isinstance(x, jax.core.Tracer) for x in arrays.values())


@dataclass(frozen=True)
class _OnBuffers:
    """The function that JAX calls back. JAX compiles a computation anew, unless this object equals that of an earlier call.

    Two objects are equal if their `run`, `axes` and `key` are equal.
    """

    run: Run
    axes: int  # number of axes of the first result, without the axes that vmap adds
    key: Hashable
    options: Mapping[str, Any] = field(compare=False)

    def __call__(self, context: Any, out: Any, given: Any) -> None:
        results, arrays = tuple(map(np.asarray, out)), {name: np.asarray(x) for name, x in given.items()}
        for entry in np.ndindex(results[0].shape[: results[0].ndim - self.axes]):
            of_entry = {name: x[_index_of(entry, x)] for name, x in arrays.items()}
            self.run(tuple(x[entry] for x in results), **plain(of_entry), **self.options)


# Arguments that may be a single number.
_NUMBERS = frozenset(x.name for rows in OPERATIONS.values() for x in rows if x.role in ("per_sequence", "scales"))


def plain(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """The arrays as the library takes them: an array without axes becomes a number where the library takes one."""
    return {name: x.item() if name in _NUMBERS and x.ndim == 0 else x for name, x in arrays.items()}


def _index_of(entry: tuple[int, ...], x: np.ndarray) -> tuple[int, ...]:
    """The index in `x` of an entry of the axes that vmap adds. Such an axis has length 1 in an array that is the same for all entries."""
    return tuple(i if n > 1 else 0 for i, n in zip(entry, x.shape, strict=False))


def call(run: Run, results: Sequence[Any], arrays: Mapping[str, Any], options: Mapping[str, Any]) -> tuple[Any, ...]:
    """``run(out, **arrays, **options)``, which writes its results into the NumPy arrays of the tuple `out`. The options are `frozen`.

    `results` has the shapes and dtypes of the results. Where JAX maps the call, `run` is called for each entry of the mapped axes, in turn.
    """
    from jax.experimental.buffer_callback import buffer_callback

    if not is_traced(arrays):  # a gradient outside of jit
        out = tuple(np.empty(x.shape, x.dtype) for x in results)
        run(out, **plain({name: np.asarray(x) for name, x in arrays.items()}), **options)
        return tuple(map(jax.numpy.asarray, out))
    step = _OnBuffers(run, len(results[0].shape), _key_of(options), options)
    return tuple(buffer_callback(step, tuple(results), vmap_method="expand_dims")(dict(arrays)))


def _key_of(options: Mapping[str, Any]) -> Hashable:
    """A key that is equal for frozen options of equal values and types. (Types count, because 4.0 may be refused where 4 is not.)"""
    return tuple((name, _typed(x)) for name, x in options.items())


def _typed(x: Any) -> Hashable:
    if isinstance(x, tuple):
        return (type(x), *map(_typed, x))
    return (type(x), x) if isinstance(x, Hashable) else object()  # the library will refuse it


def without_gradient(function: Callable[..., Any], sentence: str) -> Callable[..., Any]:
    """`function`, whose arguments are arrays alone, with a sentence that refuses requests for its derivative."""
    guarded = jax.custom_jvp(function)

    @guarded.defjvp
    def refuse(primals: Any, tangents: Any) -> Any:
        raise TypeError(sentence)

    return guarded


def no_second(name: str) -> str:
    """The sentence that refuses to differentiate a gradient."""
    return f"{name}: expected to be differentiated once, got a request for the gradient of its gradient, which it does not have"


def shape_like(shape: Sequence[int], dtype: Any) -> Any:
    """JAX's description of an array by its shape and dtype."""
    return jax.ShapeDtypeStruct(tuple(shape), dtype)


def shapes_like(q: Any, shapes: tuple[Any, Any]) -> tuple[Any, Any]:
    """The output and the log-sum-exp of these shapes, for queries `q`."""
    return shape_like(shapes[0], q.dtype), shape_like(shapes[1], np.float64 if q.dtype == np.float64 else np.float32)
