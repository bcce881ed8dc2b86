"""Arrays in and out: this file tells the arrays of NumPy, ml_dtypes, torch and JAX apart.

The compiled core reads whatever exports the buffer protocol or DLPack. This module adds what neither protocol can express:
ml_dtypes arrays go in as their bits with the name of their dtype, and results come back as arrays of the caller's kind. Neither torch nor
JAX is imported: a framework that is not in ``sys.modules`` cannot have made the array.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from . import _core
from ._float_mode import in_usual_mode
from ._formats import CELL_BYTES
from ._sentences import refusal, shown

_core.refuse_masked(np.ma.MaskedArray)  # the memory of such an array has numbers even where its mask hides them


class Family(NamedTuple):
    """The functions that make results for one kind of input array."""

    empty: Callable[[tuple[int, ...], str], Any]  # (shape, dtype name) -> an array that the core can write
    finish: Callable[[Any], Any] | None  # turns such an array into what the caller gets; None: nothing to do


# ---- Making results -----------------------------------------------------------------------------------------------


def _empty_bits(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    return np.empty(shape, "uint16" if dtype == "bfloat16" else dtype)


def _torch_empty(shape: tuple[int, ...], dtype: str) -> Any:
    torch = sys.modules["torch"]
    return torch.empty(shape, dtype=getattr(torch, dtype), device="cpu")


def _bits_to_ml_dtypes(array: np.ndarray) -> np.ndarray:
    return array.view(sys.modules["ml_dtypes"].bfloat16) if array.dtype == np.uint16 else array


def _bits_to_ml_dtypes_if_installed(array: np.ndarray) -> np.ndarray:
    if array.dtype == np.uint16:
        try:
            import ml_dtypes
        except ImportError:
            return array
        return array.view(ml_dtypes.bfloat16)
    return array


def _to_jax(array: np.ndarray) -> Any:
    return sys.modules["jax"].numpy.asarray(_bits_to_ml_dtypes(array))


NUMPY = Family(_empty_bits, None)  # bfloat16 comes and goes back as uint16 bits
ML_DTYPES = Family(_empty_bits, _bits_to_ml_dtypes)
TORCH = Family(_torch_empty, None)
JAX = Family(_empty_bits, _to_jax)
FOREIGN = Family(_empty_bits, _bits_to_ml_dtypes_if_installed)  # any other exporter of DLPack


# ---- Recognising what came in -------------------------------------------------------------------------------------


# for each dtype that neither protocol can name: the integers that hold its bits, and its name in the core
_BITS = {"bfloat16": ("uint16", "bfloat16"), "float8_e4m3fn": ("uint8", "float8_e4m3")}


@cache
def _plain_name(dtype: np.dtype) -> str:
    """The name of a dtype. It is kept, because NumPy takes microseconds to make it."""
    return dtype.name


def _is_ml_dtypes(x: np.ndarray) -> bool:
    return x.dtype.kind == "V" and _plain_name(x.dtype) == "bfloat16"


def is_registered(x: np.ndarray) -> bool:
    """Whether the array has a dtype that another library has registered with NumPy."""
    return x.dtype.num >= 256


def _bits_of(x: np.ndarray) -> tuple[np.ndarray, str] | None:
    """An array of a dtype in `_BITS` as its bits, with the core's name of the dtype; None for an array of any other dtype."""
    entry = _BITS.get(_plain_name(x.dtype)) if x.dtype.kind == "V" else None
    return None if entry is None else (x.view(entry[0]), entry[1])


def _is_torch(x: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor)


def _is_jax(x: Any) -> bool:
    jax = sys.modules.get("jax")
    return jax is not None and isinstance(x, jax.Array)


def family_of(x: Any) -> Family:
    """The family of the results of a call whose leading array is `x`."""
    if isinstance(x, np.ndarray):
        return ML_DTYPES if _is_ml_dtypes(x) else NUMPY
    if _is_torch(x):
        return TORCH
    if _is_jax(x):
        return JAX
    return FOREIGN if hasattr(x, "__dlpack__") else NUMPY


def readable(x: Any, name: str, cache: bool = False) -> Any:
    """The input array `x` as the core takes it: `x` itself, or its bits with the name of their dtype. With `cache`, float8 is allowed."""
    if type(x) is np.ndarray and not is_registered(x):
        return x
    found = _as_bits(x, name)
    refused = found[1] == "float8_e4m3" and not cache if type(found) is tuple else isinstance(found, np.ndarray) and is_registered(found)
    if refused:  # the core's sentence would name the integers that hold the bits, or say that no memory can be read
        floats = "float32, float16, bfloat16, float64, int8 or float8_e4m3" if cache else "float32, float16, bfloat16 or float64"
        raise TypeError(f"{name}: expected {floats}, got {x.dtype}")
    return found


def _as_bits(x: Any, name: str) -> Any:
    """An input array of any dtype: `x` itself (a tensor detached, without torch's negative bit), or its bits with the name of their dtype.
    Refuses masked arrays, tuples, lists, block masks, tracers of JAX, and tensors whose gradient or tangent would be lost."""
    if isinstance(x, np.ndarray):
        if isinstance(x, np.ma.MaskedArray):
            raise TypeError(f"{name}: expected an array without a mask, got MaskedArray")
        return x if x.dtype.kind != "V" else _bits_of(x) or x
    if isinstance(x, (tuple, list)):
        raise TypeError(f"{name}: expected an array, got {type(x).__name__}")
    if _is_torch(x):
        return _tensor_as_bits(x, name)
    refuse_block_mask(x, name)
    if _is_jax(x) and isinstance(x, sys.modules["jax"].core.Tracer):
        raise TypeError(
            f"{name}: expected an array of numbers, got a tracer of JAX, whose jit, grad and vmap cannot see into this call: "
            "blitz_attn.integrations.jax has functions for them"
        )
    return x


def refuse_block_mask(x: Any, name: str) -> None:
    """Refuses FlexAttention's BlockMask and the FunctionMask of `sabi.from_function`, in a sentence that says how to make arguments from
    them."""
    if type(x).__name__ == "FunctionMask":
        raise TypeError(f"{name}: expected an array, got a FunctionMask: its _asdict() has the list and the arguments that go with it")
    if type(x).__name__ == "BlockMask":
        raise TypeError(
            f"{name}: expected an array, got a BlockMask: blitz_attn.integrations.torch.from_flex_block_mask makes arguments from it"
        )


def _tensor_as_bits(x: Any, name: str) -> Any:
    torch = sys.modules["torch"]
    refuse_tangent(x, name)
    refuse_gradient(x, name)
    x = x.detach() if x.requires_grad else x
    if x.is_neg():
        x = x.resolve_neg()
    return (x.view(torch.uint8), "float8_e4m3") if x.dtype == torch.float8_e4m3fn else x


def detached(*arrays: Any) -> list[Any]:
    """The arrays, with torch tensors detached. It is for calls whose results have no gradients, such as block lists and measures. Returns a
    list, because CPython leaks a reference if memory runs out while it makes a tuple from a generator."""
    return [x.detach() if _is_torch(x) and x.requires_grad else x for x in arrays]


def refuse_gradient(x: Any, name: str) -> None:
    """Refuses a torch tensor whose gradient is wanted."""
    if x.requires_grad and sys.modules["torch"].is_grad_enabled():
        raise ValueError(
            f"{name}: expected a tensor that needs no gradient, got one with requires_grad=True, whose gradient would be lost: "
            "detach it or call under torch.no_grad()"
        )


def refuse_tangent(x: Any, name: str) -> None:
    """Refuses a torch tensor that forward-mode differentiation follows."""
    forward_ad = sys.modules["torch"].autograd.forward_ad
    if forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None:
        raise ValueError(
            f"{name}: expected a tensor without a forward-mode tangent, got one of torch.func.jvp or a dual tensor, whose tangent would be "
            "lost: detach it, or use torch's backward mode"
        )


def writable(x: Any, name: str, cache: bool = False) -> Any:
    """`readable` for an array that will be written; None stays None. After writing, call `count_writes`, which tells torch."""
    if x is None:
        return None
    if _is_jax(x):
        raise TypeError(f"{name}: expected an array that can be written, got a JAX array, which cannot")
    if _is_torch(x) and x.is_neg():
        raise ValueError(f"{name}: expected a tensor whose memory holds its numbers, got one with torch's negative bit")
    return readable(x, name, cache)


def count_writes(*arrays: Any) -> None:
    """Gives a new version to torch tensors whose memory has been written: torch then refuses a gradient for which it has saved their
    earlier contents. Other arrays and None have no version. A refused call has written nothing and must not get here."""
    for x in arrays:
        if _is_torch(x):
            sys.modules["torch"].autograd.graph.increment_version(x)


def finished(result: Any, given: Any, family: Family) -> Any:
    """One output that has been written, as the caller gets it: the array that the caller gave, or the new array as the caller's kind of
    array."""
    if given is not None:
        count_writes(given)
        return given
    return result if family.finish is None else family.finish(result)


def split_out(out: Any, return_lse: bool) -> tuple[Any, Any]:
    """The caller's arrays for the result and for the log-sum-exp, from `out`, which may be a pair of both."""
    if not isinstance(out, tuple):
        return out, None
    if not flag(return_lse, "return_lse") or len(out) != 2:
        raise ValueError(f"out: expected an array, or a pair (out, lse) with return_lse=True, got a tuple of {len(out)}")
    return out


def host(x: Any, name: str, bits_as: Any = None, written: bool = False) -> tuple[np.ndarray, str]:
    """NumPy view of an array's memory, and the name of its dtype. Dtypes that NumPy lacks come as bits.

    `bits_as` names the dtype whose bits plain uint8 and uint16 arrays hold. With `written`, the array will be written.
    """
    x = writable(x, name, cache=True) if written else _as_bits(x, name)
    tag = None
    if isinstance(x, tuple):
        x, tag = x
    if _is_torch(x) and dtype_name(x.dtype) == "bfloat16":
        x, tag = x.view(sys.modules["torch"].int16), "bfloat16"
    if not isinstance(x, np.ndarray):
        foreign = not _is_torch(x)
        if foreign and (written or not (hasattr(x, "__array__") or hasattr(x, "__dlpack__"))):
            raise TypeError(f"{name}: expected {'a NumPy array or a torch tensor' if written else 'an array'}, got {type(x).__name__}")
        x = _memory(x, name, "an array whose memory can be read")
        if tag == "bfloat16":
            x = x.view(np.uint16)
        bits = _bits_of(x)
        x, tag = (x, tag) if bits is None else bits
    _of_a_size(x, name)
    if not x.dtype.isnative:
        raise TypeError(f"{name}: expected native byte order, got {x.dtype}")
    if tag is None and bits_as in ("bfloat16", "float8_e4m3") and x.dtype == (np.uint16 if bits_as == "bfloat16" else np.uint8):
        tag = bits_as
    return x, tag or _plain_name(x.dtype)


def as_kind_of(result: np.ndarray, given: Any) -> Any:
    """A NumPy array as the kind of array that `given` is: a torch tensor, a JAX array, or unchanged. Here uint16
    means numbers, such as those of a block list; in results of the core it means bits of bfloat16."""
    if _is_torch(given):
        return sys.modules["torch"].from_numpy(np.ascontiguousarray(result))
    return sys.modules["jax"].numpy.asarray(result) if _is_jax(given) else result


def _memory(x: Any, name: str, expected: str) -> np.ndarray:
    """NumPy's view of an exporter's memory, or a NumPy array of the items of a sequence."""
    try:
        if _is_torch(x):
            return x.numpy()
        return np.from_dlpack(x) if hasattr(x, "__dlpack__") and not hasattr(x, "__array__") else np.asarray(x)
    except MemoryError:
        raise
    except Exception as error:  # an exporter's methods may raise anything
        why = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"{name}: expected {expected}, got {type(x).__name__} that raises: {why}") from error


def _exports_buffer(x: Any) -> bool:
    try:
        memoryview(x).release()
    except TypeError:
        return False
    except (BufferError, ValueError):
        return True  # it exports a buffer; NumPy says what is wrong with it
    return True


def array(x: Any, name: str, expected: str) -> np.ndarray:
    """An array of any kind, or a sequence of numbers or of sequences, as a NumPy array. `expected` is for the error sentence."""
    if isinstance(x, np.ma.MaskedArray):
        raise TypeError(f"{name}: expected an array without a mask, got MaskedArray")
    if isinstance(x, np.ndarray):
        return _of_a_size(x, name)
    if hasattr(type(x), "__getitem__") and not isinstance(x, (Sequence, np.generic)):
        exports = hasattr(x, "__array__") or hasattr(x, "__dlpack__") or hasattr(x, "__array_interface__")
        if not exports and not _exports_buffer(x):  # NumPy might go on reading items forever
            raise TypeError(f"{name}: expected {expected}, got {type(x).__name__}")
    made = _memory(x, name, expected)
    if made.dtype == object:
        raise TypeError(f"{name}: expected {expected}, got {type(x).__name__}")
    return _of_a_size(made, name)


def _of_a_size(x: np.ndarray, name: str) -> np.ndarray:
    """Returns `x`. Refuses shapes of more than 2**48 entries, which strides of 0 make possible: their bytes might not fit in 64 bits. In an
    empty array, an axis of length 0 counts as 1."""
    if x.size > 1 << 48 or (not x.size and math.prod(max(1, n) for n in x.shape) > 1 << 48):
        raise ValueError(f"{name}: expected axes of at most 2**48 entries in all, got shape {x.shape}")
    return x


def integer(x: Any, name: str) -> int:
    """The integer that `x` is."""
    return _core.read_integer(x, name)


def number(x: Any, name: str) -> float:
    """The number that `x` is."""
    return _core.read_number(x, name)


def flag(x: Any, name: str) -> bool:
    """Whether `x` is true."""
    return _core.read_flag(x, name)


def choice(x: Any, name: str, choices: tuple[str, ...]) -> str:
    """`x`, which is one of the strings `choices`."""
    if not isinstance(x, str):
        raise TypeError(f"{name}: expected a string, got {type(x).__name__}")
    if x not in choices:
        expected = " or ".join(map(repr, choices)) if len(choices) == 2 else f"one of {', '.join(choices)}"
        raise ValueError(f"{name}: expected {expected}, got {shown(x)}")
    return x


def dtype_of(x: Any) -> Any:
    """The dtype of an array of any kind; None for an object that has none or raises, which is refused later."""
    try:
        return x.dtype if hasattr(x, "dtype") or not hasattr(x, "__dlpack__") else np.from_dlpack(x).dtype
    except Exception:  # such as a released memoryview, or a dtype that NumPy lacks
        return None


def shape_of(x: Any) -> tuple[int, ...]:
    """The shape of an array of any kind, including objects that export only DLPack; () for an object without a shape, which is refused
    later."""
    try:
        shape = x.shape if hasattr(x, "shape") or not hasattr(x, "__dlpack__") else np.from_dlpack(x).shape
    except Exception:  # such as a released memoryview, or a dtype that NumPy lacks
        return ()
    return tuple(shape) if isinstance(shape, tuple) and all(isinstance(n, int) and n >= 0 for n in shape) else ()


def integers(x: Any, name: str) -> np.ndarray:
    """int64 array of the integers of a sequence or an array."""
    given = array(x, name, "integers")
    if given.dtype.kind not in "iu" and (given.size or given.dtype != np.float64):  # NumPy makes an empty list float64
        raise TypeError(f"{name}: expected integers, got {given.dtype}")
    if given.dtype.kind == "u" and given.dtype.itemsize == 8:
        given = np.minimum(given, np.uint64(2**63 - 1))  # later checks refuse it as too large
    return given.astype(np.int64, copy=False)


def pieces(shape: tuple[int, ...]) -> Iterator[tuple[slice, ...]]:
    """Cuts an array of this shape into pieces of at most 2**18 elements, in C order. The last axis is never cut: a longer row is one piece.
    NumPy cannot be interrupted while it goes through an array; between pieces, Python runs signal handlers."""
    below = math.prod(shape[1:])
    if len(shape) < 2 or shape[0] * below <= _PIECE:
        yield tuple(slice(0, n) for n in shape)
    elif below <= _PIECE or len(shape) == 2:
        step = max(1, _PIECE // max(1, below))
        for n in range(0, shape[0], step):
            yield (slice(n, min(n + step, shape[0])), *(slice(0, m) for m in shape[1:]))
    else:
        for n in range(shape[0]):
            yield from ((slice(n, n + 1), *rest) for rest in pieces(shape[1:]))


_PIECE = 1 << 18


def falls(numbers: np.ndarray) -> np.ndarray:
    """For each entry of a one-dimensional array except the first: whether it is smaller than the entry before. Entries are compared,
    because differences might wrap around."""
    return numbers[1:] < numbers[:-1]


@in_usual_mode
def _rounded_to_float32(x: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):  # numbers that are too large become infinite, as in any conversion
        return np.asarray(x, np.float32, order="C")


def float32_numbers(x: Any, name: str) -> np.ndarray:
    """Contiguous float32 array of the numbers of a sequence or an array."""
    if _is_torch(x):
        x = (readable(x, name) if x.requires_grad else x).resolve_neg()
        x = x.float() if dtype_name(x.dtype) == "bfloat16" else x
    given = array(x, name, "numbers")
    if given.dtype.kind not in "fiub" and _bits_of(given) is None:
        raise TypeError(f"{name}: expected numbers, got {given.dtype if hasattr(x, 'dtype') else type(x).__name__}")
    return given if type(given) is np.ndarray and given.dtype == np.float32 and given.flags.c_contiguous else _rounded_to_float32(given)


# ---- Taking tokens ------------------------------------------------------------------------------------------------


def shape_to_take(x: Any, name: str) -> tuple[int, ...]:
    """The shape of an array from which `take` can take. Refuses other objects."""
    if isinstance(x, np.ma.MaskedArray):
        raise TypeError(f"{name}: expected an array without a mask, got MaskedArray")
    if not (isinstance(x, np.ndarray) or _is_torch(x) or _is_jax(x)):
        raise TypeError(f"{name}: expected a NumPy array, a torch tensor or a JAX array, got {type(x).__name__}")
    if isinstance(x, np.ndarray) and (x.dtype.kind not in "fiubcV" or x.dtype.hasobject):
        raise TypeError(f"{name}: expected numbers, got {x.dtype}")
    return tuple(x.shape)


def check_taken(out: Any, x: Any, name: str, like: str) -> None:
    """Refuses an `out` that is not writable, or not of the kind of array, shape and dtype of `x`. `like` is the name of `x`."""
    if isinstance(out, np.ma.MaskedArray):
        raise TypeError(f"{name}: expected an array without a mask, got MaskedArray")
    if _is_jax(x):
        raise refusal(TypeError, name, ": expected none for the JAX array ", like, f", got {type(out).__name__}")
    if not (_is_torch(out) if _is_torch(x) else isinstance(out, np.ndarray)):
        kind = "a torch tensor" if _is_torch(x) else "a NumPy array"
        raise refusal(TypeError, name, f": expected {kind} like ", like, f", got {type(out).__name__}")
    if out.dtype != x.dtype:
        raise refusal(TypeError, name, f": expected dtype {x.dtype} like ", like, f", got {out.dtype}")
    if tuple(out.shape) != tuple(x.shape):
        raise refusal(ValueError, name, f": expected shape {tuple(x.shape)} like ", like, f", got {tuple(out.shape)}")
    if _is_torch(x):
        for tensor, own in ((x, like), (out, name)):
            refuse_gradient(tensor, own)
            refuse_tangent(tensor, own)
    elif not out.flags.writeable:
        raise ValueError(f"{name}: expected a writable array, got a read-only one")


def take(x: Any, indices: np.ndarray, axis: int, out: Any = None) -> Any:
    """The entries `indices` of an axis, as a contiguous array of the kind of `x`, or in `out`. All arguments have been checked."""
    if _is_jax(x):
        return sys.modules["jax"].numpy.take(x, indices, axis)
    memory, made = (_plain_memory(y) for y in (x, out)) if _is_torch(x) else (x, out)
    if memory is None or (made is None and out is not None):
        torch = sys.modules["torch"]
        return torch.index_select(x, axis, torch.from_numpy(indices.copy()).to(x.device), out=out)
    if made is None:
        made = np.empty((*memory.shape[:axis], len(indices), *memory.shape[axis + 1 :]), memory.dtype)
    # NumPy makes a copy of `out` with the mode "raise", and a copy of `x` unless `x` is contiguous
    places = [()] if memory.flags.c_contiguous else np.ndindex(memory.shape[:axis])
    for place in places:
        np.take(memory[place], indices, axis - len(place), out=made[place], mode="clip")
    if out is not None:
        count_writes(out)
        return out
    return sys.modules["torch"].from_numpy(made).view(x.dtype) if _is_torch(x) else made


def _plain_memory(x: Any) -> np.ndarray | None:
    """NumPy's view of a tensor's memory, as integers of the size of its elements. NumPy takes from this view several times as fast as torch
    from the tensor. None where there is no tensor, and where torch must take, because it follows the tensor (for gradients, say) or because
    the tensor is not a plain strided one in CPU memory with elements of at most 8 bytes."""
    torch = sys.modules["torch"]
    if x is None or torch.compiler.is_compiling() or type(x) not in (torch.Tensor, torch.nn.Parameter) or x.device.type != "cpu":
        return None
    followed = (torch.is_grad_enabled() and x.requires_grad) or torch.autograd.forward_ad._current_level >= 0
    if followed or x.layout != torch.strided or x.is_neg() or x.is_conj() or x.dtype.itemsize > 8:
        return None
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.dtype.itemsize]
    try:
        return x.detach().view(bits).numpy()
    except RuntimeError:  # a transform of torch.func follows the tensor
        return None


def bias_for_core(attn_mask: Any, alibi_slopes: Any) -> tuple[Any, Any]:
    """attn_mask and alibi_slopes as the core takes them."""
    mask = None if attn_mask is None else readable(attn_mask, "attn_mask")
    return mask, None if alibi_slopes is None else float32_numbers(alibi_slopes, "alibi_slopes")


def kv_dtype_name(kv_dtype: Any) -> Any:
    """`dtype_name` of the argument kv_dtype, which may be a pair: the names of the formats of keys and of values. Two equal names become
    one."""
    if not isinstance(kv_dtype, (tuple, list)):
        return dtype_name(kv_dtype, "kv_dtype")
    names = tuple(dtype_name(x, "kv_dtype") for x in kv_dtype)
    if len(names) != 2 or any(x not in CELL_BYTES for x in names):
        raise ValueError(f"kv_dtype: expected one dtype, or a pair of 'q8_0', 'q4_0' and 'q4_1' for keys and values, got {shown(kv_dtype)}")
    return names[0] if names[0] == names[1] else names


def of_format(v_cache: Any, kv_dtype: Any) -> tuple[Any, Any]:
    """The cache of values and kv_dtype as the core takes them. `v_cache` comes from `readable` or `writable`. Where `kv_dtype` is a pair,
    the core gets the format of keys as kv_dtype, and a pair of the array of values and its format."""
    if type(kv_dtype) is not tuple:
        return v_cache, kv_dtype
    return (v_cache if v_cache is None or type(v_cache) is tuple else (v_cache, kv_dtype[1])), kv_dtype[0]


def dtype_name(dtype: Any, argument: str = "dtype") -> Any:
    """Plain name of a NumPy, ml_dtypes, torch or JAX dtype, such as ``"bfloat16"``. Strings and None are returned unchanged, except that
    the e4m3 without infinity, which frameworks call float8_e4m3fn, is always ``"float8_e4m3"`` here."""
    if dtype is None or isinstance(dtype, str):
        name = dtype
    else:
        if isinstance(dtype, np.dtype) and not dtype.isnative:
            raise TypeError(f"{argument}: expected native byte order, got {dtype}")
        name = getattr(dtype, "name", None) or getattr(dtype, "__name__", None)
        if name is None and type(dtype).__module__ == "torch" and type(dtype).__name__ == "dtype":
            name = str(dtype).rpartition(".")[2]
        if not isinstance(name, str):
            raise TypeError(f"{argument}: expected a dtype or its name, got {type(dtype).__name__}")
    return "float8_e4m3" if name == "float8_e4m3fn" else name
