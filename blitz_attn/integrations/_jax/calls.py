"""The library's functions as steps of a computation of JAX, on the memory of its arrays.

What JAX traces (jit, grad, vmap, scan) becomes a call back into Python, which gets the buffers of the compiled computation as NumPy arrays
and writes the results into others. Where nothing is traced, the library's function is called directly: no computation is compiled then,
and what it refuses is raised as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

try:
    import jax
except ModuleNotFoundError:  # the module can be imported then, and documented; its functions cannot be called
    jax = None

Run = Callable[..., Any]


def arrays_of(required: Sequence[str], **given: Any) -> dict[str, Any]:
    """The arguments that are not None, as arrays of JAX. Those that are `required` must be arrays already."""
    import jax  # an error that names it, where it is not installed

    arrays = {}
    for name, x in given.items():
        if name in required and not isinstance(x, (jax.Array, np.ndarray)):
            raise TypeError(f"{name}: expected a JAX array, got {type(x).__name__}")
        if x is not None:
            try:
                arrays[name] = jax.numpy.asarray(x, int if isinstance(x, (list, tuple)) and not x else None)  # lengths of no sequences
            except (TypeError, ValueError) as error:
                raise TypeError(f"{name}: expected an array that JAX can hold, got {type(x).__name__}") from error
    return arrays


def is_traced(arrays: Mapping[str, Any]) -> bool:
    """Whether JAX follows one of the arrays instead of having its numbers."""
    return any(isinstance(x, jax.core.Tracer) for x in arrays.values())


@dataclass(frozen=True)
class _OnBuffers:
    """What JAX calls back. Equal ones are the same step to JAX, which then compiles a computation once; `key` is what makes them equal."""

    run: Run
    axes: int  # of the first result, apart from those that JAX maps over
    key: Hashable
    options: Mapping[str, Any] = field(compare=False)

    def __call__(self, context: Any, out: Any, given: Any) -> None:
        results, arrays = tuple(map(np.asarray, out)), {name: np.asarray(x) for name, x in given.items()}
        for entry in np.ndindex(results[0].shape[: results[0].ndim - self.axes]):
            of_entry = {name: x[_place(entry, x)] for name, x in arrays.items()}
            self.run(tuple(x[entry] for x in results), **plain(of_entry), **self.options)


def plain(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """The arrays as the library takes them: one without axes is a number."""
    return {name: x.item() if x.ndim == 0 else x for name, x in arrays.items()}


def _place(entry: tuple[int, ...], x: np.ndarray) -> tuple[int, ...]:
    """Where an array has the entry of mapped axes; it has axes of length 1 where it is the same for all."""
    return tuple(i if n > 1 else 0 for i, n in zip(entry, x.shape, strict=False))


def call(run: Run, results: Sequence[Any], arrays: Mapping[str, Any], options: Mapping[str, Any]) -> tuple[Any, ...]:
    """``run(out, **arrays, **options)``, which writes its results into the NumPy arrays of the tuple `out`.

    `results` are their shapes and dtypes. Where JAX maps the call, there is one after the other for the entries of the mapped axes.
    """
    from jax.experimental.buffer_callback import buffer_callback

    if not is_traced(arrays):  # a gradient outside of jit
        out = tuple(np.empty(x.shape, x.dtype) for x in results)
        run(out, **plain({name: np.asarray(x) for name, x in arrays.items()}), **options)
        return tuple(map(jax.numpy.asarray, out))
    step = _OnBuffers(run, len(results[0].shape), _key_of(options), options)
    return tuple(buffer_callback(step, tuple(results), vmap_method="expand_dims")(dict(arrays)))


def _key_of(options: Mapping[str, Any]) -> Hashable:
    """Equal for options that are equal; an object of its own where they cannot be compared, such as arrays."""
    key = tuple((name, tuple(x) if isinstance(x, list) else x) for name, x in options.items())
    try:
        hash(key)
    except TypeError:
        return object()
    return key


def without_gradient(function: Callable[..., Any], sentence: str) -> Callable[..., Any]:
    """`function`, of arrays alone, where a request for its derivative is refused with a sentence."""
    guarded = jax.custom_jvp(function)

    @guarded.defjvp
    def refuse(primals: Any, tangents: Any) -> Any:
        raise TypeError(sentence)

    return guarded


def no_second(name: str) -> str:
    """What is said where a gradient is to be differentiated."""
    return f"{name}: expected to be differentiated once, got a request for the gradient of its gradient, which it does not have"


def shape_like(shape: Sequence[int], dtype: Any) -> Any:
    """What JAX calls an array of which it knows the shape and the dtype only."""
    return jax.ShapeDtypeStruct(tuple(shape), dtype)


def real_of(q: Any) -> Any:
    """The dtype of the log-sum-exp."""
    return np.float64 if q.dtype == np.float64 else np.float32
