#include "python/args.h"

#include <limits.h>
#include <math.h>
#include <string.h>

#include "ops/check.h"

/* ---- Sentences --------------------------------------------------------------------------------------------- */

static int fail(PyObject *exception, const char *format, ...) {
    va_list args;
    va_start(args, format);
    PyErr_FormatV(exception, format, args);
    va_end(args);
    return -1;
}

/* Raises a TypeError `name: expected <expected>, got <the type of object>`. */
static int fail_kind(const char *name, const char *expected, PyObject *object) {
    PyObject *type = PyType_GetName(Py_TYPE(object));
    if (type != NULL) PyErr_Format(PyExc_TypeError, "%s: expected %s, got %U", name, expected, type);
    Py_XDECREF(type);
    return -1;
}

/* The first line of an exception's text, or the name of its type where it has no text. Returns a new reference, or NULL with an exception set. */
static PyObject *first_line(PyObject *exception) {
    PyObject *text = PyObject_Str(exception);
    PyObject *lines = text != NULL ? PyUnicode_Splitlines(text, 0) : NULL;
    Py_XDECREF(text);
    PyObject *line = NULL;
    if (lines != NULL && PyList_Size(lines) > 0) line = Py_NewRef(PyList_GetItem(lines, 0));
    Py_XDECREF(lines);
    PyErr_Clear(); /* str() of the exception may have raised */
    return line != NULL ? line : PyType_GetName(Py_TYPE(exception));
}

/* Called when one of the object's own methods has raised an exception: replaces it by a ValueError that names the argument and has the first
 * exception as its cause. Exceptions that are no fault of the argument (KeyboardInterrupt, MemoryError) stay as they are. */
static int fail_raising(const char *name, const char *expected, PyObject *object) {
    if (!PyErr_ExceptionMatches(PyExc_Exception) || PyErr_ExceptionMatches(PyExc_MemoryError)) return -1;
    PyObject *type, *cause, *traceback;
    PyErr_Fetch(&type, &cause, &traceback);
    PyErr_NormalizeException(&type, &cause, &traceback);
    if (traceback != NULL) PyException_SetTraceback(cause, traceback);
    PyObject *object_type = PyType_GetName(Py_TYPE(object));
    PyObject *why = object_type != NULL ? first_line(cause) : NULL;
    if (why != NULL) PyErr_Format(PyExc_ValueError, "%s: expected %s, got %U that raises: %U", name, expected, object_type, why);
    Py_XDECREF(why);
    Py_XDECREF(object_type);
    Py_XDECREF(type);
    Py_XDECREF(traceback);

    PyObject *new_type, *error, *new_traceback;
    PyErr_Fetch(&new_type, &error, &new_traceback);
    PyErr_NormalizeException(&new_type, &error, &new_traceback);
    PyException_SetCause(error, cause); /* steals cause */
    PyErr_Restore(new_type, error, new_traceback);
    return -1;
}

static int fail_unreadable(const char *name, PyObject *object) { return fail_raising(name, "an array whose memory can be read", object); }

int arg_check(ba_status status) {
    switch (status) {
    case BA_OK: return 0;
    case BA_ERROR_TYPE: PyErr_SetString(PyExc_TypeError, ba_last_error()); return -1;
    case BA_ERROR_VALUE: PyErr_SetString(PyExc_ValueError, ba_last_error()); return -1;
    case BA_ERROR_MEMORY: PyErr_SetString(PyExc_MemoryError, ba_last_error()); return -1;
    case BA_INTERRUPTED: return -1; /* the signal handler's exception is set */
    default: PyErr_SetString(PyExc_RuntimeError, ba_last_error()); return -1;
    }
}

int arg_check_masked(ba_status status, const arg_array *mask) {
    static const char begin[] = "attn_mask: expected shape ", rest[] = ", got (";
    const char *const sentence = ba_last_error(), *got = NULL;
    if (status != BA_ERROR_VALUE || mask->tensor.ndim == BA_MAX_DIMS || strncmp(sentence, begin, sizeof begin - 1) != 0) return arg_check(status);
    for (const char *at = sentence; (at = strstr(at, rest)) != NULL; at++) got = at;
    if (got == NULL) return arg_check(status);
    char text[1024]; /* PyErr_Format() knows no %.*s */
    PyOS_snprintf(text, sizeof text, "%.*s, got %s", (int)(got - sentence), sentence, ba_shape_text(&mask->tensor).chars);
    PyErr_SetString(PyExc_ValueError, text);
    return -1;
}

/* ---- The call ---------------------------------------------------------------------------------------------- */

void arg_forget(module_state *state, int index, const arg_names *arguments) {
    PyObject **names = state->names[index];
    state->names[index] = NULL;
    for (int i = 0; names != NULL && i < arguments->count; i++) Py_XDECREF(names[i]);
    PyMem_Free(names);
}

int arg_intern(module_state *state, int index, const arg_names *arguments) {
    if (arguments->count == 0) return 0;
    state->names[index] = PyMem_Calloc((size_t)arguments->count, sizeof(PyObject *));
    if (state->names[index] == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (int i = 0; i < arguments->count; i++)
        if ((state->names[index][i] = PyUnicode_InternFromString(arguments->names[i])) == NULL) return -1;
    return 0;
}

/* The index of a keyword among the names; -1: it is none of them. A keyword in a program's text is interned, as the names are, so that comparing
 * pointers is enough. Most callers give keywords in the order of the names, so the search begins at `likely`. */
static int keyword_index(PyObject *const *interned, const arg_names *a, PyObject *keyword, int likely) {
    for (int i = likely; i < a->count; i++)
        if (interned[i] == keyword) return i;
    for (int i = 0; i < a->count; i++)
        if (PyUnicode_CompareWithASCIIString(keyword, a->names[i]) == 0) return i;
    return -1;
}

int arg_sort(const module_state *state, int function, const arg_names *a, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames,
             PyObject **values) {
    if (nargs > a->count) return fail(PyExc_TypeError, "%s() takes at most %d arguments, got %zd", a->function, a->count, nargs);
    for (int i = 0; i < a->count; i++) values[i] = i < nargs ? args[i] : NULL;

    const Py_ssize_t keywords = kwnames != NULL ? PyTuple_Size(kwnames) : 0;
    int index = (int)nargs - 1;
    for (Py_ssize_t i = 0; i < keywords; i++) {
        PyObject *keyword = PyTuple_GetItem(kwnames, i);
        index = a->count > 0 ? keyword_index(state->names[function], a, keyword, index + 1) : -1;
        if (index < 0) return fail(PyExc_TypeError, "%s() got an unexpected keyword argument %R", a->function, keyword);
        if (values[index] != NULL) return fail(PyExc_TypeError, "%s() got multiple values for argument %R", a->function, keyword);
        values[index] = args[nargs + i];
    }
    for (int i = 0; i < a->count; i++) {
        if (values[i] != NULL) continue;
        if (i < a->required) return fail(PyExc_TypeError, "%s() is missing the argument '%s'", a->function, a->names[i]);
        values[i] = Py_None;
    }
    return 0;
}

/* ---- Arrays: as the exporter describes them ---------------------------------------------------------------- */

/* The kind of an element in the terms that both protocols share. */
typedef enum element_kind { KIND_FLOAT, KIND_BFLOAT, KIND_FLOAT8, KIND_INT, KIND_UINT, KIND_BOOL, KIND_OTHER } element_kind;

typedef struct raw_array {
    char *data;
    element_kind kind;
    bool swapped; /* the elements are not in this machine's byte order */
    int64_t size; /* bytes per element */
    int ndim;
    int64_t dims[BA_MAX_DIMS], strides[BA_MAX_DIMS]; /* strides in bytes */
} raw_array;

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
    return fail(PyExc_ValueError, "%s: expected at most %d dimensions, got %lld", name, BA_MAX_DIMS, (long long)ndim);
}

/* Refuses dimensions whose product overflows, before anything is computed from them. */
static int check_dims(const char *name, const raw_array *raw) {
    int64_t bytes = raw->size;
    for (int i = 0; i < raw->ndim; i++) {
        const int64_t dim = raw->dims[i];
        if (dim < 0 || __builtin_mul_overflow(bytes, dim > 1 ? dim : 1, &bytes))
            return fail(PyExc_ValueError, "%s: expected dimensions of fewer than 2^63 bytes, got %lld on axis %d", name, (long long)dim, i);
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
        return fail_kind(array->name, "an array that has a shape and strides", view->obj);
    for (int i = 0; i < view->ndim; i++) {
        raw->dims[i] = view->shape[i];
        raw->strides[i] = view->strides[i];
    }
    return 0;
}

static int read_dl_tensor(const dl_tensor *tensor, const char *name, raw_array *raw) {
    if (tensor->device.type != DL_DEVICE_CPU)
        return fail(PyExc_TypeError, "%s: expected an array in CPU memory, got one on DLPack device type %d", name, (int)tensor->device.type);
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
            return fail(PyExc_ValueError, "%s: expected an array of fewer than 2^63 bytes, got %lld elements %lld apart on axis %d", name,
                        (long long)raw->dims[i], (long long)(tensor->strides != NULL ? tensor->strides[i] : raw->strides[i] / raw->size), i);
    }
    return 0;
}

/* Takes the tensor out of a DLPack capsule and into `array`. From here on arg_release(), and not the capsule, calls the deleter. */
static int take_capsule(PyObject *capsule, arg_array *array, raw_array *raw) {
    if (PyCapsule_IsValid(capsule, "dltensor_versioned")) {
        dl_managed_versioned *versioned = PyCapsule_GetPointer(capsule, "dltensor_versioned");
        if (versioned == NULL || PyCapsule_SetName(capsule, "used_dltensor_versioned") < 0) return -1;
        array->versioned = versioned;
        if (versioned->version.major != DL_MAJOR_VERSION)
            return fail(PyExc_ValueError, "%s: expected DLPack version 1, got version %u", array->name, (unsigned)versioned->version.major);
        /* what is written into a copy does not reach the caller's array, so a copy counts as read-only */
        array->read_only = versioned->flags & (DL_FLAG_READ_ONLY | DL_FLAG_IS_COPIED);
        return read_dl_tensor(&versioned->tensor, array->name, raw);
    }
    if (PyCapsule_IsValid(capsule, "dltensor")) {
        dl_managed *managed = PyCapsule_GetPointer(capsule, "dltensor");
        if (managed == NULL || PyCapsule_SetName(capsule, "used_dltensor") < 0) return -1;
        array->managed = managed;
        return read_dl_tensor(&managed->tensor, array->name, raw);
    }
    return fail_kind(array->name, "an unused DLPack capsule from __dlpack__()", capsule);
}

static int hold_dlpack(module_state *state, PyObject *object, arg_array *array, raw_array *raw) {
    PyObject *method = PyObject_GetAttr(object, state->dlpack_method);
    if (method == NULL) {
        if (!PyErr_ExceptionMatches(PyExc_AttributeError)) return fail_unreadable(array->name, object);
        PyErr_Clear();
        return fail_kind(array->name, "an array", object);
    }
    PyObject *capsule = PyObject_Call(method, state->dlpack_arguments, state->dlpack_keywords);
    if (capsule == NULL && PyErr_ExceptionMatches(PyExc_TypeError)) { /* exporters older than DLPack 1.0 do not know max_version */
        PyErr_Clear();
        capsule = PyObject_Call(method, state->dlpack_arguments, NULL);
    }
    Py_DECREF(method);
    if (capsule == NULL) return fail_unreadable(array->name, object);
    const int status = take_capsule(capsule, array, raw);
    Py_DECREF(capsule);
    return status;
}

/* Holds `object` in `array` and describes it in `raw`. On failure, `array` may hold something, and the caller releases it. */
static int hold_raw(module_state *state, PyObject *object, const char *name, arg_array *array, raw_array *raw) {
    memset(array, 0, sizeof *array);
    array->name = name;
    if (state->masked != NULL && PyObject_TypeCheck(object, state->masked))
        return fail(PyExc_TypeError, "%s: expected an array without a mask, got MaskedArray", name);
    if (!PyObject_CheckBuffer(object)) return hold_dlpack(state, object, array, raw);
    if (PyObject_GetBuffer(object, &array->view, PyBUF_RECORDS_RO) < 0) {
        array->view.obj = NULL; /* an exporter that fails may have left a dangling pointer here */
        /* JAX's arrays export the buffer protocol, but those of bfloat16 raise a BufferError and export DLPack only */
        if (!PyErr_ExceptionMatches(PyExc_BufferError)) return fail_unreadable(name, object);
        PyObject *type, *error, *traceback;
        PyErr_Fetch(&type, &error, &traceback);
        if (!PyObject_HasAttr(object, state->dlpack_method)) {
            PyErr_Restore(type, error, traceback);
            return fail_unreadable(name, object);
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

/* The library's dtype for an array's elements; BA_DTYPE_COUNT where it has none. */
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
    [ARG_LSE] = "float32 or float64",
    [ARG_SCALES] = "float32",
    [ARG_INDICES] = "uint16, int16, int32 or int64",
    [ARG_PAGES] = "int16, int32 or int64",
    [ARG_TABLES] = "int32 or int64",
    [ARG_MASK] = "bool, float32, float16, bfloat16 or float64",
};

static bool role_takes(arg_role role, ba_dtype dtype) {
    switch (role) {
    case ARG_FLOATS: return dtype <= BA_FLOAT64;
    case ARG_CACHE: return dtype <= BA_FLOAT64 || dtype == BA_INT8 || dtype == BA_FLOAT8_E4M3;
    case ARG_LSE: return dtype == BA_FLOAT32 || dtype == BA_FLOAT64;
    case ARG_SCALES: return dtype == BA_FLOAT32;
    case ARG_MASK: return dtype <= BA_FLOAT64 || dtype == BA_BOOL;
    case ARG_TABLES: return dtype == BA_INT32 || dtype == BA_INT64;
    case ARG_PAGES: return dtype > BA_UINT16 && dtype <= BA_INT64;
    default: return dtype >= BA_UINT16 && dtype <= BA_INT64;
    }
}

ba_dtype arg_bits(ba_dtype dtype) { return dtype == BA_BFLOAT16 || dtype == BA_FLOAT8_E4M3 ? dtype : BA_UINT16; }

/* The name of the array's element type in a sentence: str(object.dtype), or the buffer format where there is no dtype. */
static PyObject *element_text(PyObject *object, const arg_array *array) {
    PyObject *dtype = PyObject_GetAttrString(object, "dtype");
    PyObject *text = dtype != NULL ? PyObject_Str(dtype) : NULL;
    Py_XDECREF(dtype);
    if (text != NULL) return text;
    PyErr_Clear();
    return PyUnicode_FromFormat("buffer format '%s'", array->view.format != NULL ? array->view.format : "B");
}

static int fail_elements(PyObject *object, const arg_array *array, const char *expected, const char *hint) {
    PyObject *got = element_text(object, array);
    if (got != NULL) PyErr_Format(PyExc_TypeError, "%s: expected %s, got %U%s", array->name, expected, got, hint);
    Py_XDECREF(got);
    return -1;
}

/* Fills array->tensor, with strides in elements, and the bytes that the array spans. The strides of axes of length 1, and of empty arrays, mean
 * nothing; they are replaced by harmless ones: 1 on the last axis, else 0, and compact strides in an empty array. */
static int set_tensor(arg_array *array, const raw_array *raw, ba_dtype dtype, bool contiguous_last) {
    ba_tensor *tensor = &array->tensor;
    tensor->data = raw->data;
    tensor->dtype = dtype;
    tensor->ndim = raw->ndim;

    if (check_dims(array->name, raw) < 0) return -1;
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
            return fail(PyExc_ValueError, "%s: expected strides of whole elements (numpy.ascontiguousarray makes them), got %lld bytes on axis %d",
                        array->name, (long long)raw->strides[i], i);
        tensor->strides[i] = raw->strides[i] / raw->size;
        if (last && contiguous_last && tensor->strides[i] != 1)
            return fail(PyExc_ValueError, "%s: expected a contiguous last axis (numpy.ascontiguousarray makes one), got a stride of %lld elements",
                        array->name, (long long)tensor->strides[i]);
        int64_t reach;
        int64_t *const side = raw->strides[i] < 0 ? &below : &above;
        if (__builtin_mul_overflow(dim - 1, raw->strides[i], &reach) || __builtin_add_overflow(*side, reach, side))
            return fail(PyExc_ValueError, "%s: expected an array of fewer than 2^63 bytes, got a stride of %lld bytes on axis %d", array->name,
                        (long long)raw->strides[i], i);
    }
    const uintptr_t start = (uintptr_t)raw->data;
    if (!empty && start % (uintptr_t)raw->size != 0)
        return fail(PyExc_ValueError, "%s: expected memory aligned to %lld bytes (numpy.ascontiguousarray makes a copy), got an address that is not",
                    array->name, (long long)raw->size);
    array->low = empty ? start : start + (uintptr_t)below;
    array->high = empty ? start : start + (uintptr_t)above;
    return 0;
}

int arg_hold(module_state *state, PyObject *object, const char *name, arg_role role, ba_dtype bits_as, arg_array *array) {
    const bool is_value = role == ARG_FLOATS || role == ARG_CACHE;
    if ((is_value || role == ARG_MASK) && PyTuple_Check(object) && PyTuple_Size(object) == 2) { /* (bits, dtype name) */
        static const ba_dtype tags[] = {BA_BFLOAT16, BA_FLOAT8_E4M3};
        PyObject *pair = object, *tag = PyTuple_GetItem(pair, 1);
        for (size_t i = 0; PyUnicode_Check(tag) && i < sizeof tags / sizeof *tags; i++) {
            if (PyUnicode_CompareWithASCIIString(tag, ba_dtype_name(tags[i])) != 0) continue;
            bits_as = tags[i];
            object = PyTuple_GetItem(pair, 0);
        }
    }
    raw_array raw;
    if (hold_raw(state, object, name, array, &raw) < 0) goto error;
    const ba_dtype dtype = dtype_of(&raw, bits_as);
    if (raw.swapped) {
        fail_elements(object, array, "native byte order", "");
        goto error;
    }
    if (!role_takes(role, dtype)) {
        const char *hint = "";
        if (is_value && dtype == BA_UINT16) hint = " (dtype=\"bfloat16\" reads uint16 as bfloat16 bits)";
        if (role == ARG_CACHE && raw.kind == KIND_UINT && raw.size == 1)
            hint = " (for uint8 that holds float8 bits, pass kv_dtype=\"float8_e4m3\", or dtype= where there is no kv_dtype)";
        fail_elements(object, array, role_text[role], hint);
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
    fail(PyExc_ValueError, "%s: expected a writable array, got a read-only one", name);
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
    return fail(PyExc_ValueError, "%s: expected memory of its own, got an array that overlaps %s", output->name, other->name);
}

int arg_expect_dtype(const char *name, ba_dtype dtype, const char *argument, ba_dtype named) {
    if (named == BA_DTYPE_COUNT || named == dtype) return 0;
    return fail(PyExc_TypeError, "%s: expected %s as %s says, got %s", name, ba_dtype_name(named), argument, ba_dtype_name(dtype));
}

int arg_head_numbers(module_state *state, PyObject *object, const char *name, int64_t heads, arg_array *array, const float **numbers) {
    if (object == Py_None) return 0;
    if (arg_hold(state, object, name, ARG_SCALES, BA_UINT16, array) < 0) return -1;
    const ba_tensor *t = &array->tensor;
    if (t->ndim != 1 || t->dims[0] != heads)
        return fail(PyExc_ValueError, "%s: expected shape (%lld,), one number per head, got %s", name, (long long)heads, ba_shape_text(t).chars);
    if (t->strides[0] != 1)
        return fail(PyExc_ValueError, "%s: expected a contiguous array, got a stride of %lld elements", name, (long long)t->strides[0]);
    *numbers = t->data;
    return 0;
}

int arg_mask(module_state *state, PyObject *object, const char *name, arg_array *array, ba_tensor *mask) {
    if (object == Py_None) return 0;
    if (arg_hold(state, object, name, ARG_MASK, BA_UINT16, array) < 0) return -1;
    *mask = arg_four_axes(&array->tensor);
    return 0;
}

/* ---- Numbers and names ------------------------------------------------------------------------------------- */

static bool is_sequence(PyObject *object) {
    return PySequence_Check(object) && !PyUnicode_Check(object) && !PyBytes_Check(object) && !PyByteArray_Check(object);
}

/* Reads an int or anything with __index__. `expected` stands in the sentence about a value that is not an integer. */
static int read_int64(PyObject *object, const char *name, const char *expected, int64_t *value) {
    PyObject *index = PyNumber_Index(object);
    if (index == NULL) {
        if (!PyErr_ExceptionMatches(PyExc_TypeError)) return fail_raising(name, expected, object);
        PyErr_Clear();
        return fail_kind(name, expected, object);
    }
    int overflow = 0;
    const long long result = PyLong_AsLongLongAndOverflow(index, &overflow);
    if (overflow != 0) {
        PyObject *digits = PyObject_Str(index);
        PyErr_Clear(); /* str() refuses integers of more than some thousand digits */
        if (digits != NULL) fail(PyExc_ValueError, "%s: expected an integer of 64 bits, got %U", name, digits);
        else fail(PyExc_ValueError, "%s: expected an integer of 64 bits, got a larger one", name);
        Py_XDECREF(digits);
    }
    Py_DECREF(index);
    if (overflow != 0 || (result == -1 && PyErr_Occurred())) return -1;
    *value = result;
    return 0;
}

int arg_int64(PyObject *object, const char *name, int64_t *value) { return read_int64(object, name, "an integer", value); }

/* Item i of a sequence, as an integer. */
static int read_item(PyObject *sequence, Py_ssize_t i, const char *name, int64_t *value) {
    PyObject *item = PySequence_GetItem(sequence, i);
    if (item == NULL) return fail_unreadable(name, sequence);
    const int status = read_int64(item, name, "integers", value);
    Py_DECREF(item);
    return status;
}

int arg_pair(PyObject *object, const char *name, int64_t value[2]) {
    if (!is_sequence(object)) return fail_kind(name, "a pair of integers", object);
    const Py_ssize_t count = PySequence_Size(object);
    if (count < 0) return fail_unreadable(name, object);
    if (count != 2) return fail(PyExc_ValueError, "%s: expected a pair of integers, got %zd of them", name, count);
    return read_item(object, 0, name, &value[0]) < 0 ? -1 : read_item(object, 1, name, &value[1]);
}

/* Python's complex numbers, and NumPy's of any size, which would drop their imaginary part. */
static bool is_complex(PyObject *object) {
    Py_buffer view;
    if (PyFloat_Check(object) || PyLong_Check(object)) return false;
    if (PyComplex_Check(object)) return true;
    if (!PyObject_CheckBuffer(object)) return false;
    if (PyObject_GetBuffer(object, &view, PyBUF_RECORDS_RO) < 0) {
        PyErr_Clear();
        return false;
    }
    const bool found = view.format != NULL && strchr(view.format, 'Z') != NULL;
    PyBuffer_Release(&view);
    return found;
}

int arg_double(PyObject *object, const char *name, double *value) {
    if (is_complex(object)) return fail_kind(name, "a number", object);
    *value = PyFloat_AsDouble(object);
    if (*value != -1.0 || !PyErr_Occurred()) return 0;
    if (PyLong_Check(object) && PyErr_ExceptionMatches(PyExc_OverflowError)) {
        PyErr_Clear();
        return fail(PyExc_ValueError, "%s: expected a finite number, got an integer beyond a double's range", name);
    }
    if (!PyErr_ExceptionMatches(PyExc_TypeError) && !PyErr_ExceptionMatches(PyExc_ValueError)) return fail_raising(name, "a number", object);
    PyErr_Clear();
    return fail_kind(name, "a number", object);
}

int arg_scale(PyObject *object, const char *name, double *value) {
    if (object == Py_None) return 0;
    if (arg_double(object, name, value) < 0) return -1;
    return isnan(*value) ? fail(PyExc_ValueError, "%s: expected a finite number, got nan", name) : 0;
}

int arg_flag(PyObject *object, const char *name, int *value) {
    if (object == Py_None || PySequence_Check(object)) return fail_kind(name, "True or False", object);
    *value = PyObject_IsTrue(object);
    return *value < 0 ? fail_raising(name, "True or False", object) : 0;
}

int arg_text(PyObject *object, const char *name, const char **value) {
    if (!PyUnicode_Check(object)) return fail_kind(name, "a string", object);
    Py_ssize_t size;
    *value = PyUnicode_AsUTF8AndSize(object, &size);
    if (*value == NULL) return fail_raising(name, "a string", object);
    return strlen(*value) == (size_t)size ? 0 : fail(PyExc_ValueError, "%s: expected a string without null characters, got %R", name, object);
}

int arg_threads(PyObject *object, const char *name, int *value) {
    *value = 0;
    if (object == Py_None) return 0;
    int64_t number;
    if (arg_int64(object, name, &number) < 0) return -1;
    if (number < 1 || number > INT_MAX)
        return fail(PyExc_ValueError, "%s: expected a positive number of threads or None, got %lld", name, (long long)number);
    *value = (int)number;
    return 0;
}

int arg_layout(PyObject *object, const char *name, ba_layout *value) {
    const char *text;
    if (arg_text(object, name, &text) < 0) return -1;
    for (int layout = BA_BNSD; layout <= BA_TND; layout++) {
        if (strcmp(text, ba_layout_name((ba_layout)layout)) != 0) continue;
        *value = (ba_layout)layout;
        return 0;
    }
    return fail(PyExc_ValueError, "%s: expected 'BNSD', 'BSND', 'BSH' or 'TND', got %R", name, object);
}

int arg_kv_layout(PyObject *object, const char *name, ba_kv_layout *value) {
    const char *text;
    if (arg_text(object, name, &text) < 0) return -1;
    *value = strcmp(text, "HND") == 0 ? BA_HND : BA_NHD;
    return *value == BA_HND || strcmp(text, "NHD") == 0 ? 0 : fail(PyExc_ValueError, "%s: expected 'NHD' or 'HND', got %R", name, object);
}

int arg_isa(PyObject *object, const char *name, ba_isa *value) {
    const char *text;
    if (arg_text(object, name, &text) < 0) return -1;
    const int level = ba_isa_parse(text);
    if (level >= 0) {
        *value = (ba_isa)level;
        return 0;
    }
    char names[128] = "";
    for (int i = 0; i < BA_ISA_COUNT; i++) {
        const size_t used = strlen(names);
        PyOS_snprintf(names + used, sizeof names - used, "%s'%s'", i == 0 ? "" : i == BA_ISA_COUNT - 1 ? " or " : ", ", ba_isa_name((ba_isa)i));
    }
    return fail(PyExc_ValueError, "%s: expected %s, got %R", name, names, object);
}

int arg_dtype(PyObject *object, const char *name, arg_role role, ba_dtype *value) {
    *value = BA_DTYPE_COUNT;
    if (object == Py_None) return 0;
    const char *text;
    if (arg_text(object, name, &text) < 0) return -1;
    for (int dtype = 0; dtype < BA_DTYPE_COUNT; dtype++) {
        if (!role_takes(role, (ba_dtype)dtype) || strcmp(text, ba_dtype_name((ba_dtype)dtype)) != 0) continue;
        *value = (ba_dtype)dtype;
        return 0;
    }
    const char *rest = role == ARG_CACHE ? ", 'float64', 'int8' or 'float8_e4m3'" : " or 'float64'";
    return fail(PyExc_ValueError, "%s: expected 'float32', 'float16', 'bfloat16'%s, got %R", name, rest, object);
}

int arg_out_dtype(PyObject *object, ba_dtype q_dtype, int *unrounded) {
    ba_dtype dtype;
    if (arg_dtype(object, "out_dtype", ARG_FLOATS, &dtype) < 0) return -1;
    const bool narrow = q_dtype == BA_FLOAT16 || q_dtype == BA_BFLOAT16;
    *unrounded = narrow && dtype == BA_FLOAT32;
    if (*unrounded || dtype == BA_DTYPE_COUNT || dtype == q_dtype) return 0;
    return fail(PyExc_ValueError, "out_dtype: expected '%s'%s like q, got '%s'", ba_dtype_name(q_dtype), narrow ? " or 'float32'" : "",
                ba_dtype_name(dtype));
}

/* ---- Lists of lengths -------------------------------------------------------------------------------------- */

static int allocate_list(arg_list *list, Py_ssize_t count) {
    const bool fits = count <= PY_SSIZE_T_MAX / (Py_ssize_t)sizeof *list->values; /* with stride 0, a small array may have 2^62 elements */
    list->values = fits ? PyMem_Malloc((size_t)(count > 0 ? count : 1) * sizeof *list->values) : NULL;
    list->count = count;
    if (list->values != NULL) return 0;
    PyErr_NoMemory();
    return -1;
}

/* Reads one integer of any width. Unsigned values of 2^63 and more become INT64_MAX, which every later check finds too large. */
static int64_t read_element(const raw_array *raw, const char *at) {
    const bool is_signed = raw->kind == KIND_INT;
    switch (raw->size) {
    case 1: return is_signed ? *(const int8_t *)at : *(const uint8_t *)at;
    case 2: {
        uint16_t bits;
        memcpy(&bits, at, sizeof bits);
        return is_signed ? (int16_t)bits : bits;
    }
    case 4: {
        uint32_t bits;
        memcpy(&bits, at, sizeof bits);
        return is_signed ? (int32_t)bits : (int64_t)bits;
    }
    default: {
        uint64_t bits;
        memcpy(&bits, at, sizeof bits);
        return !is_signed && bits > INT64_MAX ? INT64_MAX : (int64_t)bits;
    }
    }
}

/* Copies an integer array of `ndim` dimensions, 1 or 2, row by row. Writes its shape to `dims` where that is not NULL (ndim 2). */
static int read_array_list(module_state *state, PyObject *object, const char *name, int ndim, int64_t *dims, arg_list *list) {
    arg_array array;
    raw_array raw;
    int status = hold_raw(state, object, name, &array, &raw);
    if (status == 0 && raw.swapped) status = fail_elements(object, &array, "native byte order", "");
    const bool is_integer =
        status == 0 && (raw.kind == KIND_INT || raw.kind == KIND_UINT) && (raw.size == 1 || raw.size == 2 || raw.size == 4 || raw.size == 8);
    if (status == 0 && !is_integer) status = fail_elements(object, &array, "integers", "");
    if (status == 0) status = check_dims(name, &raw);
    if (status == 0 && raw.ndim != ndim)
        status = fail(PyExc_ValueError, "%s: expected %d dimension%s, got %d", name, ndim, ndim == 1 ? "" : "s", raw.ndim);
    const int64_t rows = status == 0 && ndim == 2 ? raw.dims[0] : 1, columns = status == 0 ? raw.dims[ndim - 1] : 0;
    int64_t count = 0;
    if (status == 0 && __builtin_mul_overflow(rows, columns, &count)) status = fail(PyExc_ValueError, "%s: expected fewer than 2^63 entries", name);
    if (status == 0) status = allocate_list(list, (Py_ssize_t)count);
    for (Py_ssize_t i = 0; status == 0 && i < list->count; i++) {
        const char *row = ndim == 2 ? raw.data + i / columns * raw.strides[0] : raw.data;
        list->values[i] = read_element(&raw, row + i % columns * raw.strides[ndim - 1]);
    }
    if (dims != NULL) {
        dims[0] = rows;
        dims[1] = columns;
    }
    arg_release(&array);
    return status;
}

int arg_matrix(module_state *state, PyObject *object, const char *name, int64_t dims[2], arg_list *list) {
    list->values = NULL;
    list->count = 0;
    return object == Py_None ? 0 : read_array_list(state, object, name, 2, dims, list);
}

int64_t *arg_cumulative(const arg_list *lengths) {
    int64_t *sums = PyMem_Malloc((size_t)(lengths->count + 1) * sizeof *sums);
    if (sums == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    sums[0] = 0;
    for (Py_ssize_t i = 0; i < lengths->count; i++)
        if (__builtin_add_overflow(sums[i], lengths->values[i], &sums[i + 1])) sums[i + 1] = INT64_MAX;
    return sums;
}

int arg_expect_count(const arg_list *list, const char *name, int64_t count, const char *meaning) {
    if (list->values == NULL || list->count == count) return 0;
    return fail(PyExc_ValueError, "%s: expected %lld entries, %s, got %zd", name, (long long)count, meaning, list->count);
}

static int read_lengths(module_state *state, PyObject *object, const char *name, const char *expected, arg_list *list) {
    list->values = NULL;
    list->count = 0;
    if (object == Py_None) return 0;
    if (PyBytes_Check(object) || PyByteArray_Check(object)) return fail_kind(name, expected, object); /* bytes are text here and not lengths */
    if (PyObject_CheckBuffer(object) || PyObject_HasAttr(object, state->dlpack_method)) return read_array_list(state, object, name, 1, NULL, list);
    if (!is_sequence(object)) return fail_kind(name, expected, object);
    const Py_ssize_t count = PySequence_Size(object);
    if (count < 0) return fail_unreadable(name, object);
    if (allocate_list(list, count) < 0) return -1;
    for (Py_ssize_t i = 0; i < count; i++) {
        if (read_item(object, i, name, &list->values[i]) == 0) continue;
        PyMem_Free(list->values);
        list->values = NULL;
        return -1;
    }
    return 0;
}

int arg_lengths(module_state *state, PyObject *object, const char *name, arg_list *list) {
    return read_lengths(state, object, name, "a sequence of integers", list);
}

int arg_numbers(module_state *state, PyObject *object, const char *name, int64_t count, const char *meaning, arg_list *list) {
    int64_t value;
    if (!PyIndex_Check(object) || PySequence_Check(object) || PyObject_HasAttr(object, state->dlpack_method)) { /* arrays have __index__, too */
        if (read_lengths(state, object, name, "an integer or a sequence of integers", list) < 0) return -1;
        if (arg_expect_count(list, name, count, meaning) == 0) return 0;
        PyMem_Free(list->values);
        list->values = NULL;
        return -1;
    }
    list->values = NULL;
    if (arg_int64(object, name, &value) < 0 || allocate_list(list, (Py_ssize_t)(count > 0 ? count : 0)) < 0) return -1;
    for (Py_ssize_t i = 0; i < list->count; i++) list->values[i] = value;
    return 0;
}
