"""Exporters of the buffer protocol and of DLPack that misbehave on purpose, or record what their consumer did."""

import collections
import ctypes
import weakref

import numpy as np

CPU, CUDA = 1, 2
INT, UINT, FLOAT, COMPLEX = 0, 1, 2, 5
READ_ONLY, IS_COPIED = 1, 2


class DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


DELETER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class DLManaged(ctypes.Structure):
    _fields_ = (("tensor", DLTensor), ("context", ctypes.c_void_p), ("deleter", DELETER))


class DLManagedVersioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", DELETER),
        ("flags", ctypes.c_uint64),
        ("tensor", DLTensor),
    )


_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
_capsule_name = ctypes.pythonapi.PyCapsule_GetName
_capsule_name.restype = ctypes.c_char_p
_capsule_name.argtypes = (ctypes.py_object,)

_exported = collections.deque(maxlen=1000)  # kept alive: a consumer may still read them

_KINDS = {"f": FLOAT, "i": INT, "u": UINT, "c": COMPLEX}


class Dlpack:
    """Exports a NumPy array by ``__dlpack__`` only, and counts calls of its deleter. Further keyword arguments overwrite fields of the tensor.

    `deletes=False` exports no deleter. NumPy might call a deleter while an exception is set, when Python code must not run.
    `version=None` exports the structure from before DLPack 1.0 and, as exporters of that time do, does not accept ``max_version``.
    """

    def __init__(self, array, *, version=(1, 0), flags=0, compact_strides=False, deletes=True, **changes):
        self.array = array
        self.version = version
        self.flags = flags
        self.deleted = 0
        self.capsules = []
        self.structs = []
        fields = {
            "data": array.ctypes.data,
            "device_type": CPU,
            "ndim": array.ndim,
            "code": _KINDS[array.dtype.kind],
            "bits": array.dtype.itemsize * 8,
            "lanes": 1,
            "shape": array.shape,
            "strides": tuple(stride // array.dtype.itemsize for stride in array.strides),
        } | changes
        self.shape = fields["shape"]
        for name in ("shape", "strides"):
            fields[name] = (ctypes.c_int64 * len(fields[name]))(*fields[name])
        if compact_strides:
            fields["strides"] = None
        self.tensor = DLTensor(**fields)
        this = weakref.ref(self)

        def delete(_pointer):
            this().deleted += 1  # still alive, because _exported holds it

        self.deleter = DELETER(delete) if deletes else DELETER()  # none

    def _export(self, name, struct):
        _exported.append(self)
        self.structs.append(struct)
        capsule = _new_capsule(ctypes.addressof(struct), name, None)
        self.capsules.append(capsule)
        return capsule

    def __dlpack__(self, **options):
        if self.version is None:
            if options:
                raise TypeError("__dlpack__() got an unexpected keyword argument 'max_version'")
            return self._export(b"dltensor", DLManaged(self.tensor, None, self.deleter))
        major, minor = self.version
        return self._export(b"dltensor_versioned", DLManagedVersioned(major, minor, None, self.deleter, self.flags, self.tensor))

    def __dlpack_device__(self):
        return (self.tensor.device_type, 0)

    @property
    def names(self):
        """The present names of the capsules that were handed out. A consumer renames the capsules that it takes."""
        return [_capsule_name(capsule).decode() for capsule in self.capsules]


class OnlyDlpack:
    """An array that exports only DLPack, and cannot be sliced."""

    def __init__(self, array):
        self._array = array

    def __dlpack__(self, **options):
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self._array.__dlpack_device__()


class StoppedDlpack:
    """Raises when asked for its memory."""

    def __init__(self, error):
        self.error = error

    def __dlpack__(self, **options):
        raise self.error

    def __dlpack_device__(self):
        return (CPU, 0)


class StoppedBuffer:
    """Raises when asked for its memory by the buffer protocol, which Python classes can export from 3.12 on."""

    def __buffer__(self, flags):
        raise BufferError("the exporter has stopped")


class NotACapsule:
    def __dlpack__(self, **options):
        return 7


def released_view():
    view = memoryview(np.zeros((1, 1, 4, 4), np.float32))
    view.release()
    return view
