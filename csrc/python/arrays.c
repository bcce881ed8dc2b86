/* Holds the arrays of the caller: first as the buffer protocol or DLPack describes them, then as the library takes them. */
#include "python/raw_array.h"

#include <string.h>

#include "ops/check.h"

/* ---- Arrays: as the exporter describes them ---------------------------------------------------------------- */

static bool is_little_endian(void) {
    const uint16_t one = 1;
    return *(const uint8_t *)&one == 1;
}

/* Sets `kind` and `swapped` from the buffer protocol's format string. */
static void read_format(const char *format, raw_array *raw) {
    raw->swapped = false;
    raw->kind = KIND_OTHER;
    if (format == NULL) format = "B"; /* the buffer protocol's default: unsigned bytes */
    if (*format != '\0' && strchr("@=^<>!", *format) != NULL) {
        const bool little = *format == '<', big = *format == '>' || *format == '!';
        raw->swapped = raw->size > 1 && (is_little_endian() ? big : little);
        format++;
    }
    if (format[0] == '\0' || format[1] != '\0') return; /* structures, complex numbers, repeats */
    if (strchr("efdg", *format) != NULL) raw->kind = KIND_FLOAT;
    if (strchr("bhilqn", *format) != NULL) raw->kind = KIND_INT;
    if (strchr("BHILQN", *format) != NULL) raw->kind = KIND_UINT;
    if (*format == '?') raw->kind = KIND_BOOL;
}

static int check_rank(const char *name, int64_t ndim) {
    if (ndim >= 0 && ndim <= BA_MAX_DIMS) return 0;
    return arg_fail(PyExc_ValueError, BA_ARG("%s") ": expected at most %d dimensions, got %lld", name, BA_MAX_DIMS, (long long)ndim);
}

int arg_check_dims(const char *name, const raw_array *raw) {
    int64_t bytes = raw->size;
    for (int i = 0; i < raw->ndim; i++) {
        const int64_t dim = raw->dims[i];
        if (dim < 0 || __builtin_mul_overflow(bytes, dim > 1 ? dim : 1, &bytes))
            return arg_fail(PyExc_ValueError, BA_ARG("%s") ": expected axes of at least 0 and fewer than 2^63 bytes in all, got %lld on axis %d",
                            name, (long long)dim, i);
    }
    return 0;
}

static int read_view(arg_array *array, raw_array *raw) {
    const Py_buffer *view = &array->view;
    array->read_only = view->readonly;
    raw->data = view->buf;
    raw->size = view->itemsize;
    raw->ndim = view->ndim;
    read_format(view->format, raw);
    if (check_rank(array->name, view->ndim) < 0) return -1;
    if (view->ndim > 0 && (view->shape == NULL || view->strides == NULL)) /* PyBUF_RECORDS_RO requests both, but NumPy's datetime scalars give none */
        return arg_fail_kind(array->name, "an array that has a shape and strides", view->obj);
    for (int i = 0; i < view->ndim; i++) {
        raw->dims[i] = view->shape[i];
        raw->strides[i] = view->strides[i];
    }
    return 0;
}

static int read_dl_tensor(const dl_tensor *tensor, const char *name, raw_array *raw) {
    if (tensor->device.type != DL_DEVICE_CPU)
        return arg_fail(PyExc_TypeError, BA_ARG("%s") ": expected an array in CPU memory, got one on DLPack device type %d", name,
                        (int)tensor->device.type);
    if (check_rank(name, tensor->ndim) < 0) return -1;
    raw->data = tensor->data != NULL ? (char *)tensor->data + tensor->byte_offset : NULL;
    raw->size = tensor->dtype.bits / 8;
    raw->ndim = tensor->ndim;
    raw->swapped = false;
    raw->kind = KIND_OTHER;
    if (tensor->dtype.lanes == 1 && tensor->dtype.bits % 8 == 0) {
        if (tensor->dtype.code == DL_CODE_FLOAT) raw->kind = KIND_FLOAT;
        if (tensor->dtype.code == DL_CODE_BFLOAT) raw->kind = KIND_BFLOAT;
        if (tensor->dtype.code == DL_CODE_FLOAT8_E4M3FN) raw->kind = KIND_FLOAT8;
        if (tensor->dtype.code == DL_CODE_INT) raw->kind = KIND_INT;
        if (tensor->dtype.code == DL_CODE_UINT) raw->kind = KIND_UINT;
        if (tensor->dtype.code == DL_CODE_BOOL) raw->kind = KIND_BOOL;
    }
    int64_t compact = raw->size;
    for (int i = raw->ndim - 1; i >= 0; i--) {
        raw->dims[i] = tensor->shape[i];
        raw->strides[i] = compact;
        bool overflow = __builtin_mul_overflow(compact, tensor->shape[i], &compact);
        if (tensor->strides != NULL) overflow = __builtin_mul_overflow(tensor->strides[i], raw->size, &raw->strides[i]);
        if (overflow)
            return arg_fail(PyExc_ValueError, BA_ARG("%s") ": expected an array of fewer than 2^63 bytes, got %lld elements %lld apart on axis %d",
                            name, (long long)raw->dims[i], (long long)(tensor->strides != NULL ? tensor->strides[i] : raw->strides[i] / raw->size),
                            i);
    }
    return 0;
}

/* Moves the tensor from a DLPack capsule into `array`. From then on arg_release(), and not the capsule, calls the deleter. */
static int take_capsule(PyObject *capsule, arg_array *array, raw_array *raw) {
    if (PyCapsule_IsValid(capsule, "dltensor_versioned")) {
        dl_managed_versioned *versioned = PyCapsule_GetPointer(capsule, "dltensor_versioned");
        if (versioned == NULL || PyCapsule_SetName(capsule, "used_dltensor_versioned") < 0) return -1;
        array->versioned = versioned;
        if (versioned->version.major != DL_MAJOR_VERSION)
            return arg_fail(PyExc_ValueError, BA_ARG("%s") ": expected DLPack version 1, got version %u", array->name,
                            (unsigned)versioned->version.major);
        /* writing into a copy would not change the caller's array, so a copy counts as read-only */
        array->read_only = versioned->flags & (DL_FLAG_READ_ONLY | DL_FLAG_IS_COPIED);
        return read_dl_tensor(&versioned->tensor, array->name, raw);
    }
    if (PyCapsule_IsValid(capsule, "dltensor")) {
        dl_managed *managed = PyCapsule_GetPointer(capsule, "dltensor");
        if (managed == NULL || PyCapsule_SetName(capsule, "used_dltensor") < 0) return -1;
        array->managed = managed;
        return read_dl_tensor(&managed->tensor, array->name, raw);
    }
    return arg_fail_kind(array->name, "an unused DLPack capsule from __dlpack__()", capsule);
}

static int hold_dlpack(module_state *state, PyObject *object, arg_array *array, raw_array *raw) {
    PyObject *method = PyObject_GetAttr(object, state->dlpack_method);
    if (method == NULL) {
        if (!PyErr_ExceptionMatches(PyExc_AttributeError)) return arg_fail_unreadable(array->name, object);
        PyErr_Clear();
        return arg_fail_kind(array->name, "an array", object);
    }
    PyObject *capsule = PyObject_Call(method, state->dlpack_arguments, state->dlpack_keywords);
    if (capsule == NULL && PyErr_ExceptionMatches(PyExc_TypeError)) { /* exporters older than DLPack 1.0 do not know max_version */
        PyErr_Clear();
        capsule = PyObject_Call(method, state->dlpack_arguments, NULL);
    }
    Py_DECREF(method);
    if (capsule == NULL) return arg_fail_unreadable(array->name, object);
    const int status = take_capsule(capsule, array, raw);
    Py_DECREF(capsule);
    return status;
}

int arg_hold_raw(module_state *state, PyObject *object, const char *name, arg_array *array, raw_array *raw) {
    memset(array, 0, sizeof *array);
    array->name = name;
    if (state->masked != NULL && PyObject_TypeCheck(object, state->masked))
        return arg_fail(PyExc_TypeError, BA_ARG("%s") ": expected an array without a mask, got MaskedArray", name);
    if (!PyObject_CheckBuffer(object)) return hold_dlpack(state, object, array, raw);
    if (PyObject_GetBuffer(object, &array->view, PyBUF_RECORDS_RO) < 0) {
        array->view.obj = NULL; /* an exporter that fails may have left a dangling pointer here */
        /* JAX's arrays export the buffer protocol, but JAX's arrays of bfloat16 raise a BufferError and export DLPack only */
        if (!PyErr_ExceptionMatches(PyExc_BufferError)) return arg_fail_unreadable(name, object);
        PyObject *type, *error, *traceback;
        PyErr_Fetch(&type, &error, &traceback);
        if (!PyObject_HasAttr(object, state->dlpack_method)) {
            PyErr_Restore(type, error, traceback);
            return arg_fail_unreadable(name, object);
        }
        Py_XDECREF(type);
        Py_XDECREF(error);
        Py_XDECREF(traceback);
        return hold_dlpack(state, object, array, raw);
    }
    return read_view(array, raw);
}

void arg_release(arg_array *array) {
    if (array->view.obj != NULL) PyBuffer_Release(&array->view);
    if (array->managed != NULL || array->versioned != NULL) { /* a deleter may run Python code, which must not see the pending exception */
        PyObject *type, *value, *traceback;
        PyErr_Fetch(&type, &value, &traceback);
        if (array->managed != NULL && array->managed->deleter != NULL) array->managed->deleter(array->managed);
        if (array->versioned != NULL && array->versioned->deleter != NULL) array->versioned->deleter(array->versioned);
        PyErr_Restore(type, value, traceback);
    }
    memset(array, 0, sizeof *array);
}

/* ---- Arrays: as the library takes them --------------------------------------------------------------------- */

/* The library's dtype for an array's elements; BA_DTYPE_COUNT where the library has no such dtype. */
static ba_dtype dtype_of(const raw_array *raw, ba_dtype bits_as) {
    switch (raw->kind) {
    case KIND_FLOAT: return raw->size == 4 ? BA_FLOAT32 : raw->size == 2 ? BA_FLOAT16 : raw->size == 8 ? BA_FLOAT64 : BA_DTYPE_COUNT;
    case KIND_BFLOAT: return raw->size == 2 ? BA_BFLOAT16 : BA_DTYPE_COUNT;
    case KIND_FLOAT8: return raw->size == 1 ? BA_FLOAT8_E4M3 : BA_DTYPE_COUNT;
    case KIND_INT:
        return raw->size == 2 ? BA_INT16 : raw->size == 4 ? BA_INT32 : raw->size == 8 ? BA_INT64 : raw->size == 1 ? BA_INT8 : BA_DTYPE_COUNT;
    case KIND_BOOL: return raw->size == 1 ? BA_BOOL : BA_DTYPE_COUNT;
    case KIND_UINT: return raw->size == ba_dtype_size(bits_as) ? bits_as : raw->size == 2 ? BA_UINT16 : BA_DTYPE_COUNT;
    default: return BA_DTYPE_COUNT;
    }
}

static const char *const role_text[] = {
    [ARG_FLOATS] = "float32, float16, bfloat16 or float64",
    [ARG_CACHE] = "float32, float16, bfloat16, float64, int8 or float8_e4m3",
    [ARG_REALS] = "float32 or float64",
    [ARG_SCALES] = "float32",
    [ARG_INDICES] = "uint16, int16, int32 or int64",
    [ARG_PAGES] = "int16, int32 or int64",
    [ARG_TABLES] = "int32 or int64",
    [ARG_MASK] = "bool, float32, float16, bfloat16 or float64",
};

bool arg_role_takes(arg_role role, ba_dtype dtype) {
    switch (role) {
    case ARG_FLOATS: return dtype <= BA_FLOAT64;
    case ARG_CACHE: return dtype <= BA_FLOAT64 || ba_is_quantised(dtype) || ba_has_cells(dtype);
    case ARG_REALS: return dtype == BA_FLOAT32 || dtype == BA_FLOAT64;
    case ARG_SCALES: return dtype == BA_FLOAT32;
    case ARG_MASK: return dtype <= BA_FLOAT64 || dtype == BA_BOOL;
    case ARG_TABLES: return dtype == BA_INT32 || dtype == BA_INT64;
    case ARG_PAGES: return dtype > BA_UINT16 && dtype <= BA_INT64;
    default: return dtype >= BA_UINT16 && dtype <= BA_INT64;
    }
}

ba_dtype arg_bits(ba_dtype dtype) { return dtype == BA_BFLOAT16 || dtype == BA_FLOAT8_E4M3 || ba_has_cells(dtype) ? dtype : BA_UINT16; }

/* The name of the array's element type, for a sentence: str(object.dtype), or the buffer format where there is no dtype. */
static PyObject *element_text(PyObject *object, const arg_array *array) {
    PyObject *dtype = PyObject_GetAttrString(object, "dtype");
    PyObject *text = dtype != NULL ? PyObject_Str(dtype) : NULL;
    Py_XDECREF(dtype);
    if (text != NULL) return text;
    PyErr_Clear();
    return PyUnicode_FromFormat("buffer format '%s'", array->view.format != NULL ? array->view.format : "B");
}

int arg_fail_elements(PyObject *object, const arg_array *array, const char *expected, const char *hint) {
    PyObject *got = element_text(object, array);
    if (got != NULL) arg_fail(PyExc_TypeError, BA_ARG("%s") ": expected %s, got %U%s", array->name, expected, got, hint);
    Py_XDECREF(got);
    return -1;
}

/* Fills array->tensor, with strides in elements, and sets array->low and array->high. Strides of axes of length 1, and of empty arrays, mean nothing,
 * so harmless strides replace them: in empty arrays, compact strides; elsewhere, 1 on the last axis and 0 on others. */
static int set_tensor(arg_array *array, const raw_array *raw, ba_dtype dtype, bool contiguous_last) {
    ba_tensor *tensor = &array->tensor;
    tensor->data = raw->data;
    tensor->dtype = dtype;
    tensor->ndim = raw->ndim;

    if (arg_check_dims(array->name, raw) < 0) return -1;
    bool empty = false;
    for (int i = 0; i < raw->ndim; i++) {
        tensor->dims[i] = raw->dims[i];
        empty |= raw->dims[i] == 0;
    }

    int64_t below = 0, above = raw->size, compact = 1;
    for (int i = raw->ndim - 1; i >= 0; i--) {
        const int64_t dim = raw->dims[i];
        const bool last = i == raw->ndim - 1;
        tensor->strides[i] = empty ? compact : last ? 1 : 0;
        compact *= dim > 1 ? dim : 1;
        if (empty || dim == 1) continue;
        if (raw->strides[i] % raw->size != 0)
            return arg_fail(PyExc_ValueError,
                            BA_ARG("%s") ": expected strides of whole elements (numpy.ascontiguousarray makes them), got %lld bytes on axis %d",
                            array->name, (long long)raw->strides[i], i);
        tensor->strides[i] = raw->strides[i] / raw->size;
        if (last && contiguous_last && tensor->strides[i] != 1)
            return arg_fail(PyExc_ValueError,
                            BA_ARG("%s") ": expected a contiguous last axis (numpy.ascontiguousarray makes one), got a stride of %lld elements",
                            array->name, (long long)tensor->strides[i]);
        int64_t reach;
        int64_t *const side = raw->strides[i] < 0 ? &below : &above;
        if (__builtin_mul_overflow(dim - 1, raw->strides[i], &reach) || __builtin_add_overflow(*side, reach, side))
            return arg_fail(PyExc_ValueError, BA_ARG("%s") ": expected an array of fewer than 2^63 bytes, got a stride of %lld bytes on axis %d",
                            array->name, (long long)raw->strides[i], i);
    }
    const uintptr_t start = (uintptr_t)raw->data;
    if (!empty && start % (uintptr_t)raw->size != 0)
        return arg_fail(PyExc_ValueError,
                        BA_ARG("%s") ": expected memory aligned to %lld bytes (numpy.ascontiguousarray makes a copy), got an address that is not",
                        array->name, (long long)raw->size);
    array->low = empty ? start : start + (uintptr_t)below;
    array->high = empty ? start : start + (uintptr_t)above;
    return 0;
}

int arg_hold(module_state *state, PyObject *object, const char *name, arg_role role, ba_dtype bits_as, arg_array *array) {
    const bool is_value = role == ARG_FLOATS || role == ARG_CACHE;
    if ((is_value || role == ARG_MASK) && PyTuple_Check(object) && PyTuple_Size(object) == 2) { /* (bits, dtype name) */
        static const ba_dtype tags[] = {BA_BFLOAT16, BA_FLOAT8_E4M3, BA_Q8_0, BA_Q4_0, BA_Q4_1};
        PyObject *pair = object, *tag = PyTuple_GetItem(pair, 1);
        for (size_t i = 0; PyUnicode_Check(tag) && i < sizeof tags / sizeof *tags; i++) {
            if (PyUnicode_CompareWithASCIIString(tag, ba_dtype_name(tags[i])) != 0) continue;
            bits_as = tags[i];
            object = PyTuple_GetItem(pair, 0);
        }
    }
    raw_array raw;
    if (arg_hold_raw(state, object, name, array, &raw) < 0) goto error;
    const ba_dtype dtype = dtype_of(&raw, bits_as);
    if (raw.swapped) {
        arg_fail_elements(object, array, "native byte order", "");
        goto error;
    }
    if (!arg_role_takes(role, dtype)) {
        const char *hint = "";
        if (is_value && dtype == BA_UINT16) hint = " (dtype=\"bfloat16\" reads uint16 as bfloat16 bits)";
        if (role == ARG_CACHE && raw.kind == KIND_UINT && raw.size == 1)
            hint = " (kv_dtype=, or dtype= where there is no kv_dtype, says what uint8 holds, such as \"float8_e4m3\" or \"q8_0\")";
        if (role == ARG_INDICES && dtype == BA_BOOL)
            hint = " (blitz_attn.sabi.from_block_mask makes a list from a mask over blocks, from_token_mask from one over tokens)";
        arg_fail_elements(object, array, role_text[role], hint);
        goto error;
    }
    if (set_tensor(array, &raw, dtype, is_value) < 0) goto error;
    return 0;
error:
    arg_release(array);
    return -1;
}

int arg_hold_output(module_state *state, PyObject *object, const char *name, arg_role role, ba_dtype bits_as, arg_array *array) {
    if (arg_hold(state, object, name, role, bits_as, array) < 0) return -1;
    if (!array->read_only) return 0;
    arg_fail(PyExc_ValueError, BA_ARG("%s") ": expected a writable array, got a read-only one", name);
    arg_release(array);
    return -1;
}

PyObject *arg_hold_or_make_output(module_state *state, PyObject *given, PyObject *empty, const ba_tensor *shape, const char *name, arg_role role,
                                  ba_dtype bits_as, arg_array *array) {
    PyObject *output = NULL;
    if (given != Py_None) {
        output = Py_NewRef(given);
    } else {
        PyObject *dims = PyTuple_New(shape->ndim);
        if (dims == NULL) return NULL;
        for (int i = 0; i < shape->ndim; i++) {
            PyObject *dim = PyLong_FromLongLong(shape->dims[i]);
            if (dim == NULL || PyTuple_SetItem(dims, i, dim) < 0) {
                Py_DECREF(dims);
                return NULL;
            }
        }
        PyObject *dtype = PyUnicode_FromString(ba_dtype_name(shape->dtype));
        if (dtype != NULL) output = PyObject_CallFunctionObjArgs(empty, dims, dtype, NULL);
        Py_XDECREF(dtype);
        Py_DECREF(dims);
        if (shape->dtype == BA_BFLOAT16) bits_as = BA_BFLOAT16;
    }
    if (output != NULL && arg_hold_output(state, output, name, role, bits_as, array) < 0) Py_CLEAR(output);
    return output;
}

int arg_disjoint(const arg_array *output, const arg_array *other) {
    const bool both = output->low < output->high && other->low < other->high;
    if (!both || output->high <= other->low || other->high <= output->low) return 0;
    return arg_fail(PyExc_ValueError, BA_ARG("%s") ": expected memory of its own, got an array that overlaps " BA_ARG("%s"), output->name,
                    other->name);
}

int arg_expect_dtype(const char *name, ba_dtype dtype, const char *argument, ba_dtype named) {
    if (named == BA_DTYPE_COUNT || named == dtype) return 0;
    return arg_fail(PyExc_TypeError, BA_ARG("%s") ": expected %s as " BA_ARG("%s") " says, got %s", name, ba_dtype_name(named), argument,
                    ba_dtype_name(dtype));
}

int arg_head_numbers(module_state *state, PyObject *object, const char *name, int64_t heads, arg_array *array, const float **numbers) {
    if (object == Py_None) return 0;
    if (arg_hold(state, object, name, ARG_SCALES, BA_UINT16, array) < 0) return -1;
    const ba_tensor *t = &array->tensor;
    if (t->ndim != 1 || t->dims[0] != heads)
        return arg_fail(PyExc_ValueError, BA_ARG("%s") ": expected shape (%lld,), one number per head, got %s", name, (long long)heads,
                        ba_shape_text(t).chars);
    if (t->strides[0] != 1)
        return arg_fail(PyExc_ValueError, BA_ARG("%s") ": expected a contiguous array, got a stride of %lld elements", name,
                        (long long)t->strides[0]);
    *numbers = t->data;
    return 0;
}
