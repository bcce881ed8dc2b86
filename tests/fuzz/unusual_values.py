"""Unusual values for any argument: wrong kinds, extreme numbers, objects whose methods raise or lie, and changed copies of a valid value.

A function makes each value anew, because a call may use up or change some of them.
"""

from __future__ import annotations

import array
import collections
import ctypes
import decimal
import fractions
import functools
import io
import itertools
import pathlib
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from exporters import COMPLEX, CUDA, NotACapsule, StoppedDlpack, released_view
from exporters import Dlpack as _Dlpack

from .arrays import HAS_ML_DTYPES, HAS_TORCH

Dlpack = functools.partial(_Dlpack, deletes=False)

# ---- Objects whose methods raise, lie or return another kind ------------------------------------------------------


def _raises(error: type[Exception]) -> Callable[..., Any]:
    def method(self: Any, *args: Any, **options: Any) -> Any:
        raise error("the object has stopped")

    return method


def _gives(value: Any) -> Callable[..., Any]:
    return lambda self, *args, **options: value


def _object(bases: tuple[type, ...] = (), /, **methods: Any) -> Callable[[], Any]:
    """A function that makes objects with these special methods, whose names are given without underscores."""
    return type("Odd", bases, {f"__{name}__": method for name, method in methods.items()})


def _number(text: str) -> Any:
    """The value of an expression of numbers and quoted words, which names of unusual values contain."""
    return eval(text, {"nan": float("nan"), "inf": float("inf")})


class Plain:
    """An object that is valid as no argument."""


class Whole(int):
    """A subclass of int."""


class Real(float):
    """A subclass of float."""


class Word(str):
    """A subclass of str."""


class Matrix(np.ndarray):
    """A subclass of ndarray."""


def _strange_shape(shape: Any) -> Callable[[], Any]:
    return type("Odd", (), {"shape": shape, "ndim": 4, "dtype": np.dtype("float32")})


OBJECTS: dict[str, Callable[[], Any]] = {
    "object": object,
    "plain": Plain,
    "a class": lambda: Plain,
    "a function": lambda: len,
    "a lambda": lambda: lambda *args: 0,
    "a module": lambda: itertools,
    "a file": lambda: io.BytesIO(b"12"),
    "a path": lambda: pathlib.PurePosixPath("keys"),
    "Ellipsis": lambda: Ellipsis,
    "NotImplemented": lambda: NotImplemented,
    "a slice": lambda: slice(0, 2),
    "a range": lambda: range(2),
    "a generator": lambda: (x for x in (1, 2)),
    "an endless iterator": lambda: _object(iter=lambda self: itertools.repeat(1, 10**6))(),
    "an exception": lambda: ValueError("q: expected"),
    **{
        f"{name} raises": _object(**{name: _raises(RuntimeError)})
        for name in ("index", "float", "bool", "iter", "hash", "repr", "str", "getattr", "array")
    },
    **{f"index raises {error.__name__}": _object(index=_raises(error)) for error in (TypeError, ValueError, OverflowError)},
    "float raises KeyError": _object(float=_raises(KeyError)),
    "array raises TypeError": _object(array=_raises(TypeError)),
    **{f"index gives {text}": _object(index=_gives(_number(text))) for text in ("'1'", "2", "2**70")},
    **{f"float gives {text}": _object(float=_gives(_number(text))) for text in ("'1'", "0.5", "nan")},
    "int gives 2": _object(int=_gives(2)),
    "bool gives 2": _object(bool=_gives(2)),
    "len raises": _object(len=_raises(RuntimeError), getitem=_gives(1)),
    "len is negative": _object(len=_gives(-1), getitem=_gives(1)),
    "len is huge": _object(len=_gives(2**62), getitem=_gives(1)),
    "len is beyond": _object(len=_gives(2**70), getitem=_gives(1)),
    "getitem raises": _object(len=_gives(2), getitem=_raises(RuntimeError)),
    "getitem raises IndexError": _object(len=_gives(2), getitem=_raises(IndexError)),
    "getitem gives itself": _object(len=_gives(2), getitem=lambda self, i: self),
    "getitem gives strings": _object(len=_gives(2), getitem=_gives("1")),
    "next raises": _object(iter=lambda self: self, next=_raises(KeyError)),
    "eq raises": _object(eq=_raises(RuntimeError), hash=_gives(1)),
    "lt raises": _object(lt=_raises(RuntimeError), index=_gives(1)),
    "repr has two lines": _object(repr=_gives("two\nlines"), str=_gives("two\nlines")),
    "array gives a list": _object(array=_gives([1, 2])),
    "array gives an array": _object(array=_gives(np.zeros((1, 2, 16, 8), np.float32))),
    "array gives objects": _object(array=_gives(np.array([None, "x"], object))),
    "interface is wrong": lambda: type("Odd", (), {"__array_interface__": {"shape": (2,), "typestr": "??"}})(),
    "interface is no dict": lambda: type("Odd", (), {"__array_interface__": 3})(),
    "dlpack raises": lambda: StoppedDlpack(RuntimeError("gone")),
    "dlpack raises BufferError": lambda: StoppedDlpack(BufferError("gone")),
    "dlpack raises in two lines": lambda: StoppedDlpack(RuntimeError("gone\nfor good")),
    "dlpack gives 7": NotACapsule,
    "dlpack is no method": lambda: type("Odd", (), {"__dlpack__": 3})(),
    "dlpack raises when looked at": lambda: type("Odd", (), {"__dlpack__": property(_raises(RuntimeError))})(),
    "shape is a number": _strange_shape(3),
    "shape is None": _strange_shape(None),
    "shape of strings": _strange_shape(("a", "b", "c", "d")),
    "shape is negative": _strange_shape((-1, -1, -1, -1)),
    "dict subclass": collections.OrderedDict,
    "a deque": lambda: collections.deque([1, 2]),
    "a released view": released_view,
}

# ---- Numbers, words and containers --------------------------------------------------------------------------------

_INTEGERS = (
    "0", "1", "-1", "2", "-2", "3", "65535", "2**15", "2**31-1", "2**31", "2**32", "2**33+1", "2**40", "2**53+1", "2**62", "2**63-1",
    "2**63", "2**64", "2**64+2", "-2**31", "-2**63", "-2**63-1", "10**400", "10**5000",
)  # fmt: skip
_FLOATS = ("0.0", "-0.0", "0.5", "2.0", "-1.5", "nan", "inf", "-inf", "1e300", "1e-320", "2.0**63")
_WORDS = ("", "x", "1", "nan", "BNSD", "bsnd", "TND", "HND", "quest", "max", "paper", "mslk", "float32", "float16", "bfloat16", "int8", "float8_e4m3", "uint16", "int64",
          "complex64", "portable", "dict", "two\nlines", "\x00", "\ud800", "\u00e9\u4e2d" * 30, "%s%n{}")  # fmt: skip

NUMBERS: dict[str, Callable[[], Any]] = {
    **{f"int {text}": functools.partial(_number, text) for text in _INTEGERS},
    **{f"float {text}": functools.partial(_number, text) for text in _FLOATS},
    "True": lambda: True,
    "False": lambda: False,
    "complex": lambda: 1 + 2j,
    "Fraction": lambda: fractions.Fraction(1, 2),
    "whole Fraction": lambda: fractions.Fraction(2),
    "Decimal": lambda: decimal.Decimal("1.5"),
    "Decimal nan": lambda: decimal.Decimal("sNaN"),
    "an int subclass": lambda: Whole(2),
    "a float subclass": lambda: Real(0.5),
    "an int subclass whose index raises": _object((int,), index=_raises(RuntimeError)),
    "an int subclass that compares oddly": _object((int,), lt=_raises(RuntimeError), gt=_raises(RuntimeError)),
    "a float subclass whose float raises": _object((float,), float=_raises(RuntimeError)),
    "numpy timedelta64": lambda: np.timedelta64(3, "s"),
    "numpy datetime64": lambda: np.datetime64("2020-01-01"),
    "numpy timedelta64 NaT": lambda: np.timedelta64("NaT"),
    "numpy datetime64 NaT": lambda: np.datetime64("NaT"),
    "numpy void": lambda: np.void(b"abcd"),
    "numpy str": lambda: np.str_("x"),
    "numpy bytes": lambda: np.bytes_(b"x"),
    **{
        f"numpy {name}": (lambda name=name: np.dtype(name).type(2))
        for name in (
            "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64", "longdouble",
            "complex64", "complex128", "clongdouble",
        )
    },
    "numpy float32 nan": lambda: np.float32("nan"),
    "numpy uint64 2**64-1": lambda: np.uint64(2**64 - 1),
    "ctypes int": lambda: ctypes.c_int(2),
}  # fmt: skip

WORDS: dict[str, Callable[[], Any]] = {
    **{f"str {word!a}": (lambda word=word: word) for word in _WORDS},
    "a str subclass": lambda: Word("BNSD"),
    "bytes": lambda: b"float32",
    "empty bytes": lambda: b"",
    "bytearray": lambda: bytearray(b"ab"),
    "a dtype": lambda: np.dtype("int32"),
    "a dtype class": lambda: np.float64,
    "a structured dtype": lambda: np.dtype([("a", "f4"), ("b", "i2")]),
    "type int": lambda: int,
}

CONTAINERS: dict[str, Callable[[], Any]] = {
    "list empty": list,
    **{
        f"list {text}": functools.partial(_number, f"[{text}]")
        for text in (
            "0", "1", "-1", "1, 2", "0, 1", "2, 1", "0, 8, 16", "0, 16, 8", "1, 1, 1", "0, 0", "-1, -1", "16, 16", "2**31, 2**31",
            "2**62, 2**62", "2**63, 1", "2**64, 2**64", "2**63-1, 2**63-1", "1.0, 2.0", "0.5, 0.5", "nan, nan", "inf, 1", "1e300, 1",
            "'a', 'b'", "None, None", "True, False", "[1, 2], [3]", "[1, 2], [3, 4]", "[[[1]]]", "1j, 2", "[], []", "{}, {}",
        )
    },
    "list of objects": lambda: [object(), object()],
    "list of 100 numbers": lambda: list(range(100)),
    "list of times": lambda: [np.timedelta64(1, "s")] * 2,
    "list of itself": lambda: (lambda x: (x.append(x), x)[1])([]),
    "list of objects that raise": lambda: [OBJECTS["index raises"](), OBJECTS["float raises"]()],
    "list of arrays": lambda: [np.zeros((1, 2, 16, 8), np.float32), np.zeros((1, 2, 16, 8), np.float32)],
    "tuple empty": tuple,
    **{
        f"tuple {text}": functools.partial(_number, f"({text},)")
        for text in (
            "1", "1, 2", "2, 2", "0, 0", "-1, -1", "-2, 0", "1, 2, 3", "1, 1, 1, 1", "2**31, 2**31", "2**62, 2**62", "2**63-1, 1",
            "2**64, 2**64", "2.0, 2.0", "nan, 1", "None, None", "None, None, None", "'a', 'b'", "'x', 'bfloat16'",
        )
    },
    "tuple of 100 numbers": lambda: tuple(range(100)),
    "tuple of arrays": lambda: (np.zeros((1, 2, 16, 8), np.float32), np.zeros((1, 2, 16), np.float32)),
    "three arrays": lambda: (np.array([0, 1, 2]), np.array([0, 1]), np.array([1, 1])),
    "three arrays without the last": lambda: (np.array([0, 1, 2]), np.array([0, 1]), None),
    "three arrays without the middle": lambda: (np.array([0, 1, 2]), None, np.array([1, 1])),
    "three arrays without the first": lambda: (None, np.array([0, 1]), np.array([1, 1])),
    "three falling arrays": lambda: (np.array([2, 1, 0]), np.array([0, 1]), np.array([1, 1])),
    "dict": lambda: {"a": 1},
    "empty dict": dict,
    "set": lambda: {1, 2},
    "frozenset": lambda: frozenset((1, 2)),
    "array.array ints": lambda: array.array("i", [1, 2]),
    "array.array longs": lambda: array.array("q", [1, 2]),
    "array.array doubles": lambda: array.array("d", [1, 2]),
    "ctypes ints": lambda: (ctypes.c_int64 * 2)(1, 2),
    "ctypes floats": lambda: (ctypes.c_float * 4)(),
    "ctypes matrix": lambda: ((ctypes.c_float * 4) * 2)(),
    "ctypes structures": lambda: (ctypes.c_char * 4)(),
    "memoryview": lambda: memoryview(b"abcd"),
    "memoryview of floats": lambda: memoryview(np.zeros((1, 2, 16, 8), np.float32)),
    "memoryview of a number": lambda: memoryview(np.float32(1)),
}  # fmt: skip

# ---- Arrays -------------------------------------------------------------------------------------------------------


_SHAPES = ((4,), (4, 4), (4, 2, 8), (1, 2, 16, 8), (1, 1, 2, 4, 8), (1,) * 20, (0,), (2, 0, 4), (1, 2, 0, 8))

_DLPACK: dict[str, dict[str, Any]] = {  # the options of `Dlpack` for q
    "": {}, "of CUDA": {"device_type": CUDA}, "complex": {"code": COMPLEX}, "with lanes": {"lanes": 4}, "of -1 axes": {"ndim": -1},
    "of a negative size": {"shape": (1, 2, -16, 8)}, "of a huge size": {"shape": (2**40, 2**40, 16, 8)}, "of odd bits": {"bits": 12},
    "of huge strides": {"strides": (2**62, 2**62, 8, 1)}, "of version 2": {"version": (2, 0)}, "of old": {"version": None},
    "of no bits": {"bits": 0},
}  # fmt: skip


def _structured(fields: Any) -> Callable[[], Any]:
    return lambda: np.zeros((2, 2), fields)


ARRAYS: dict[str, Callable[[], Any]] = {
    **{f"0-d {dtype}": functools.partial(np.array, 1, dtype) for dtype in ("float64", "float32", "int64", "bool", "U4", "object", "m8[s]")},
    **{f"{len(shape)}-d {shape}": functools.partial(np.zeros, shape, np.float32) for shape in _SHAPES},
    **{f"1-d {dtype}": functools.partial(np.array, [1, 2], dtype) for dtype in ("int64", "int8", "bool", "object", "U1", "S1", ">i8")},
    "1-d timedelta64": lambda: np.array([1, 2], "m8[s]"),
    **{f"4-d {dtype}": functools.partial(np.zeros, (1, 2, 16, 8), dtype) for dtype in ("object", "complex64", "longdouble")},
    "0-d None": lambda: np.array(None),
    "empty": lambda: np.zeros(0),
    "empty int": lambda: np.zeros(0, np.int64),
    "empty rows": lambda: np.zeros((1, 1, 2, 0), np.int32),
    "empty huge": lambda: as_strided(np.zeros(1, np.float32), (2**28, 0, 2**29, 8), (0, 0, 0, 4)),
    "huge bytes": lambda: as_strided(np.zeros(1, np.int8), (2**62,), (0,)),
    "huge": lambda: as_strided(np.zeros(8, np.float32), (2**20, 2**10, 2**20, 8), (0, 0, 0, 4)),
    "huge ints": lambda: as_strided(np.zeros(1, np.int32), (2**40,), (0,)),
    "huge lists": lambda: as_strided(np.zeros(1, np.int32), (2**20, 2**20, 2, 1), (0, 0, 0, 4)),
    "1-d uint64": lambda: np.array([2**64 - 1, 1], np.uint64),
    "1-d of both signs": lambda: np.array([1, -1], np.int8),
    "1-d int64 extremes": lambda: np.array([-(2**63), 2**63 - 1]),
    "1-d halves": lambda: np.array([1.5, 2.5]),
    "1-d nan": lambda: np.array([np.nan, np.nan]),
    "1-d reversed": lambda: np.arange(4)[::-1],
    "1-d raising objects": lambda: np.array([OBJECTS["index raises"](), OBJECTS["float raises"]()], object),
    "1-d datetime64": lambda: np.array(["2020-01-01", "NaT"], "M8[s]"),
    "2-d ints": lambda: np.array([[0, 1], [1, 0]], np.int32),
    "4-d ints": lambda: np.zeros((1, 2, 2, 2), np.int32),
    "4-d ints beyond": lambda: np.full((1, 2, 2, 2), 99, np.int32),
    "4-d ints below": lambda: np.full((1, 2, 2, 2), -(2**31), np.int32),
    "4-d uint16": lambda: np.full((1, 2, 2, 2), 65534, np.uint16),
    "2-d bool": lambda: np.ones((2, 2), bool),
    "2-d bool without columns": lambda: np.ones((2, 0), bool),
    "4-d bool without rows": lambda: np.ones((1, 2, 0, 4), bool),
    "structured": _structured([("a", "f4"), ("b", "i4")]),
    "structured with a subarray": _structured([("a", "f4", (2, 2))]),
    "structured without fields": _structured([]),
    "void": lambda: np.zeros((2, 2), "V4"),
    "masked": lambda: np.ma.masked_array([1.0, 2.0], [True, False]),
    "the masked constant": lambda: np.ma.masked,
    "matrix subclass": lambda: np.zeros((1, 2, 16, 8), np.float32).view(Matrix),
    "record array": lambda: np.rec.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f4")]),
    "a flat iterator": lambda: np.zeros(4).flat,
    **{
        f"dlpack {name}": (lambda options=options: Dlpack(np.zeros((1, 2, 16, 8), np.float32), **options))
        for name, options in _DLPACK.items()
    },
    "dlpack of 6 axes": lambda: Dlpack(np.zeros((1, 1, 1, 2, 16, 8), np.float32)),
    "dlpack of lengths": lambda: Dlpack(np.array([1, 2])),
    "dlpack of negative lengths": lambda: Dlpack(np.array([1, 2]), shape=(-2,)),
}

if HAS_ML_DTYPES:

    def _of_ml_dtypes(name: str, shape: tuple[int, ...]) -> Callable[[], Any]:
        def make() -> Any:
            import ml_dtypes

            return np.zeros(shape, getattr(ml_dtypes, name))

        return make

    ARRAYS |= {f"ml_dtypes {name}": _of_ml_dtypes(name, (1, 2, 16, 8)) for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2", "int4")}

if HAS_TORCH:

    def _torch(make: Callable[[Any], Any]) -> Callable[[], Any]:
        def tensor() -> Any:
            import torch

            return make(torch)

        return tensor

    def _quantised(torch: Any) -> Any:
        with warnings.catch_warnings():  # torch deprecates quantised tensors
            warnings.simplefilter("ignore")
            return torch.quantize_per_tensor(torch.zeros(2, 2), 0.1, 0, torch.qint8)

    ARRAYS |= {
        **{
            f"torch {name}": _torch(lambda t, name=name: t.zeros(1, 2, 16, 8).to(getattr(t, name)))
            for name in ("float32", "bfloat16", "complex64", "bool", "float8_e5m2")
        },
        "torch number": _torch(lambda t: t.tensor(2)),
        "torch half number": _torch(lambda t: t.tensor(0.5)),
        "torch ints": _torch(lambda t: t.tensor([1, 2])),
        "torch that needs a gradient": _torch(lambda t: t.zeros(1, 2, 16, 8, requires_grad=True)),
        "torch on meta": _torch(lambda t: t.zeros(1, 2, 16, 8, device="meta")),
        "torch ints on meta": _torch(lambda t: t.zeros(2, dtype=t.int64, device="meta")),
        "torch sparse": _torch(lambda t: t.zeros(1, 2, 16, 8).to_sparse()),
        "torch conjugate": _torch(lambda t: t.zeros(1, 2, 16, 8, dtype=t.complex64).conj()),
        "torch expanded": _torch(lambda t: t.zeros(1, 1, 1, 8).expand(1, 2, 16, 8)),
        "torch transposed": _torch(lambda t: t.zeros(1, 2, 8, 16).transpose(2, 3)),
        "torch empty": _torch(lambda t: t.zeros(0)),
        "torch quantised": _torch(_quantised),
        "torch nested list": _torch(lambda t: [t.zeros(1, 2, 16, 8), t.zeros(1, 2, 16)]),
        "a torch dtype": _torch(lambda t: t.float16),
        "a torch layout": _torch(lambda t: t.strided),
        "a torch parameter": _torch(lambda t: t.nn.Parameter(t.zeros(1, 2, 16, 8))),
    }

ANY: dict[str, Callable[[], Any]] = {"None": lambda: None} | NUMBERS | WORDS | CONTAINERS | ARRAYS | OBJECTS

# ---- Changed copies of a valid value ------------------------------------------------------------------------------


def _astype(dtype: Any) -> Callable[[np.ndarray], Any]:
    def cast(x: np.ndarray) -> Any:
        with np.errstate(all="ignore"):
            return np.nan_to_num(x).astype(dtype) if x.dtype.kind == "f" else x.astype(dtype)

    return cast


def _read_only(x: np.ndarray) -> np.ndarray:
    view = x[...]
    view.flags.writeable = False
    return view


def _misaligned(x: np.ndarray) -> np.ndarray:
    memory = np.zeros(x.nbytes + 1, np.uint8)
    moved = memory[1:].view(x.dtype).reshape(x.shape)
    moved[...] = x
    return moved


def _filled(x: np.ndarray, value: Any) -> np.ndarray:
    return np.full_like(x, value)


def _with_entry(x: np.ndarray, value: Any) -> np.ndarray:
    copy = x.copy()
    if copy.size:
        copy.flat[copy.size // 2] = value
    return copy


def _half_stepped(x: np.ndarray) -> Any:
    """An array whose strides are not multiples of its element size."""
    return as_strided(x, x.shape, (*x.strides[:-1], x.itemsize // 2)) if x.ndim and x.itemsize > 1 else x


_PARTS = {"reversed": np.s_[::-1], "every second": np.s_[::2], "cut short": np.s_[:-1], "cut to nothing": np.s_[:0]}

OF_ARRAYS: dict[str, Callable[[np.ndarray], Any]] = {
    **{
        f"as {name}": _astype(name)
        for name in (
            "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64", "longdouble",
            "complex64", "object", "S4", "U4",
        )
    },
    "swapped bytes": lambda x: x.astype(x.dtype.newbyteorder()),
    "as datetime64": lambda x: _astype("int64")(x).astype("m8[s]"),
    "as a list": lambda x: x.tolist(),
    "as a tuple": lambda x: tuple(x) if x.ndim else (x,),
    "as bytes": lambda x: x.tobytes(),
    "as a memoryview": lambda x: memoryview(x),
    "as a memoryview of bytes": lambda x: memoryview(np.ascontiguousarray(x)).cast("B") if x.size else b"",
    "as a pair": lambda x: (x, "bfloat16"),
    "masked": np.ma.array,
    "read-only": _read_only,
    "misaligned": _misaligned,
    "half steps": _half_stepped,
    "one axis less": lambda x: x[0] if x.ndim and len(x) else x.reshape(-1),
    "one axis more": lambda x: x[None],
    "one axis more at the end": lambda x: x[..., None],
    "flat": lambda x: x.reshape(-1),
    "turned": lambda x: x.T,
    **{name: (lambda x, part=part: x[part] if x.ndim else x) for name, part in _PARTS.items()},
    **{f"{name} inside": (lambda x, part=part: x[..., part] if x.ndim else x) for name, part in _PARTS.items()},
    "twice as long": lambda x: np.concatenate([x, x]) if x.ndim else x,
    "twice as long inside": lambda x: np.concatenate([x, x], -1) if x.ndim else x,
    "one element for all": lambda x: as_strided(x, x.shape, (0,) * x.ndim),
    "rows that overlap": lambda x: as_strided(x, x.shape, (*(x.itemsize,) * (x.ndim - 1), x.itemsize)) if x.ndim > 1 else x,
    "broadcast": lambda x: np.broadcast_to(x[:1], x.shape) if x.ndim and len(x) else x,
    "all -1": lambda x: _filled(x.astype(np.int64) if x.dtype.kind == "u" else x, -1),
    **{f"all {n}": (lambda x, n=n: _filled(x, n)) for n in (0, 1, 99)},
    "all huge": lambda x: _filled(x, np.iinfo(x.dtype).max if x.dtype.kind in "iu" else 1),
    "all least": lambda x: _filled(x, np.iinfo(x.dtype).min if x.dtype.kind in "iu" else -1),
    "all nan": lambda x: _filled(x, np.nan) if x.dtype.kind == "f" else x,
    "an entry of 99": lambda x: _with_entry(x, 99),
    "an entry of nan": lambda x: _with_entry(x, np.nan) if x.dtype.kind == "f" else x,
    "dlpack": lambda x: Dlpack(np.ascontiguousarray(x)) if x.dtype.kind in "fiu" else x,
    "dlpack, read-only": lambda x: Dlpack(np.ascontiguousarray(x), flags=1) if x.dtype.kind in "fiu" else x,
}  # fmt: skip

OF_SEQUENCES: dict[str, Callable[[Any], Any]] = {
    "cut short": lambda x: x[:-1],
    "twice as long": lambda x: x + x,
    "in a list": lambda x: [x],
    "reversed": lambda x: x[::-1],
    "without the first": lambda x: (None, *x[1:]),
    "without the last": lambda x: (*x[:-1], None),
    "first two alike": lambda x: (x[0], x[0], *x[2:]) if len(x) > 1 else x,
    "as the other": lambda x: list(x) if isinstance(x, tuple) else tuple(x),
    "as a generator": lambda x: (i for i in x),
    "as floats": lambda x: [float(i) for i in x] if all(isinstance(i, int) for i in x) else x,
    "as an array": lambda x: np.array(x) if all(isinstance(i, int) for i in x) else x,
    "one more": lambda x: [i + 1 for i in x] if all(isinstance(i, int) for i in x) else x,
    **{f"last {text}": (lambda x, text=text: [*x[:-1], _number(text)]) for text in ("2**62", "-1", "nan", "None", "'x'")},
}

OF_INTEGERS: dict[str, Callable[[Any], Any]] = {
    "one more": lambda x: x + 1,
    "one less": lambda x: x - 1,
    "negated": lambda x: -x,
    "as a float": float,
    "as a string": str,
    "as numpy int16": lambda x: np.int16(x % 2**15),
    "in a list": lambda x: [x],
}


def table(value: Any) -> dict[str, Callable[[Any], Any]]:
    """The functions that make unusual values from this valid value, by name."""
    if isinstance(value, np.ndarray):
        return {f"this {name}": make for name, make in OF_ARRAYS.items()}
    if isinstance(value, (list, tuple)) and len(value):
        return {f"this {name}": make for name, make in OF_SEQUENCES.items()}
    if type(value) is int:
        return {f"this {name}": make for name, make in OF_INTEGERS.items()}
    return {}


def is_huge(name: str) -> bool:
    """Whether a call with this value may fail because memory is short."""
    return "2**" in name or "huge" in name or "10**" in name or "1e300" in name or "all 99" in name


# Values that are valid only as text, as a dtype, or as an option that is read as true or false: a refusal of them must name the argument.
# Objects that behave as arrays, numbers or sequences, but have another class, are not among them.
ALIEN = (frozenset(OBJECTS) - {"array gives an array", "index gives 2", "lt raises", "float gives 0.5", "a range", "a deque"}) | {"dict", "empty dict", "set", "complex", "bytes"}

# Endless sequences, which NumPy reads until memory runs out.
ENDLESS = frozenset(name for name in OBJECTS if name.startswith(("len ", "getitem gives ")))
