/* Reads the arguments of a call: their names, numbers, texts and lists. (arrays.c holds arrays.) */
#include "python/args.h"
#include "python/raw_array.h"

#include <limits.h>
#include <math.h>
#include <string.h>

#include "ops/check.h"

/* ---- The call ---------------------------------------------------------------------------------------------- */

void arg_forget(module_state *state, int index, const operation *function) {
    PyObject **names = state->names[index];
    state->names[index] = NULL;
    for (int i = 0; names != NULL && i < function->count; i++) Py_XDECREF(names[i]);
    PyMem_Free(names);
}

int arg_intern(module_state *state, int index, const operation *function) {
    if (function->count == 0) return 0;
    state->names[index] = PyMem_Calloc((size_t)function->count, sizeof(PyObject *));
    if (state->names[index] == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (int i = 0; i < function->count; i++)
        if ((state->names[index][i] = PyUnicode_InternFromString(function->arguments[i].name)) == NULL) return -1;
    return 0;
}

/* The index of a keyword among the names, or -1 where it is no name. Keywords in a program's text are interned, and so are the names, so that
 * comparing pointers is enough for them. Most callers give keywords in the order of the names, so the search begins at `likely`. */
static int keyword_index(PyObject *const *interned, const operation *a, PyObject *keyword, int likely) {
    for (int i = likely; i < a->count; i++)
        if (interned[i] == keyword) return i;
    for (int i = 0; i < likely; i++)
        if (interned[i] == keyword) return i;
    for (int i = 0; i < a->count; i++)
        if (PyUnicode_CompareWithASCIIString(keyword, a->arguments[i].name) == 0) return i;
    return -1;
}

int arg_sort(const module_state *state, int index, const operation *a, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames,
             PyObject **values) {
    if (nargs > a->count) return arg_fail(PyExc_TypeError, "%s() takes at most %d arguments, got %zd", a->name, a->count, nargs);
    for (int i = 0; i < a->count; i++) values[i] = i < nargs ? args[i] : NULL;

    const Py_ssize_t keywords = kwnames != NULL ? PyTuple_Size(kwnames) : 0;
    int at = (int)nargs - 1;
    for (Py_ssize_t i = 0; i < keywords; i++) {
        PyObject *keyword = PyTuple_GetItem(kwnames, i);
        at = a->count > 0 ? keyword_index(state->names[index], a, keyword, at + 1) : -1;
        if (at < 0) return arg_fail(PyExc_TypeError, "%s() got an unexpected keyword argument %R", a->name, keyword);
        if (values[at] != NULL) return arg_fail(PyExc_TypeError, "%s() got multiple values for argument %R", a->name, keyword);
        values[at] = args[nargs + i];
    }
    for (int i = 0; i < a->count; i++) {
        if (values[i] != NULL) continue;
        if (i < a->required) return arg_fail(PyExc_TypeError, "%s() is missing the argument '%s'", a->name, a->arguments[i].name);
        values[i] = Py_None;
    }
    return 0;
}

/* ---- Numbers and names ------------------------------------------------------------------------------------- */

static bool is_sequence(PyObject *object) {
    return PySequence_Check(object) && !PyUnicode_Check(object) && !PyBytes_Check(object) && !PyByteArray_Check(object);
}

/* Reads an int or anything with __index__. `expected` is what the sentence says where the value is not an integer. */
static int read_int64(PyObject *object, const char *name, const char *expected, int64_t *value) {
    PyObject *index = PyNumber_Index(object);
    if (index == NULL) {
        if (!PyErr_ExceptionMatches(PyExc_TypeError)) return arg_fail_raising(name, expected, object);
        PyErr_Clear();
        return arg_fail_kind(name, expected, object);
    }
    int overflow = 0;
    const long long result = PyLong_AsLongLongAndOverflow(index, &overflow);
    if (overflow != 0) {
        PyObject *digits = PyObject_Str(index);
        PyErr_Clear(); /* str() refuses integers of more than some thousand digits */
        if (digits != NULL) arg_fail(PyExc_ValueError, BA_ARG("%s") ": expected an integer of 64 bits, got %U", name, digits);
        else arg_fail(PyExc_ValueError, BA_ARG("%s") ": expected an integer of 64 bits, got a larger one", name);
        Py_XDECREF(digits);
    }
    Py_DECREF(index);
    if (overflow != 0 || (result == -1 && PyErr_Occurred())) return -1;
    *value = result;
    return 0;
}

int arg_int64(PyObject *object, const char *name, int64_t *value) { return read_int64(object, name, "an integer", value); }
int arg_tokens_before(PyObject *object, const char *name, int64_t *value) {
    return read_int64(object, name, "one integer, the number of tokens before itself that a query sees", value);
}

/* Item i of a sequence, as an integer. */
static int read_item(PyObject *sequence, Py_ssize_t i, const char *name, int64_t *value) {
    PyObject *item = PySequence_GetItem(sequence, i);
    if (item == NULL) return arg_fail_unreadable(name, sequence);
    const int status = read_int64(item, name, "integers", value);
    Py_DECREF(item);
    return status;
}

int arg_pair(PyObject *object, const char *name, int64_t value[2]) {
    if (!is_sequence(object)) return arg_fail_kind(name, "a pair of integers", object);
    const Py_ssize_t count = PySequence_Size(object);
    if (count < 0) return arg_fail_unreadable(name, object);
    if (count != 2) return arg_fail(PyExc_ValueError, BA_ARG("%s") ": expected a pair of integers, got %zd of them", name, count);
    return read_item(object, 0, name, &value[0]) < 0 ? -1 : read_item(object, 1, name, &value[1]);
}

/* Whether `object` is a complex number of Python or of NumPy. Reading one of NumPy's as a double would drop its imaginary part. */
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
    if (is_complex(object)) return arg_fail_kind(name, "a number", object);
    *value = PyFloat_AsDouble(object);
    if (*value != -1.0 || !PyErr_Occurred()) return 0;
    if (PyLong_Check(object) && PyErr_ExceptionMatches(PyExc_OverflowError)) {
        PyErr_Clear();
        return arg_fail(PyExc_ValueError, BA_ARG("%s") ": expected a finite number, got an integer beyond a double's range", name);
    }
    if (!PyErr_ExceptionMatches(PyExc_TypeError) && !PyErr_ExceptionMatches(PyExc_ValueError)) return arg_fail_raising(name, "a number", object);
    PyErr_Clear();
    return arg_fail_kind(name, "a number", object);
}

int arg_scale(PyObject *object, const char *name, double *value) {
    if (object == Py_None) return 0;
    if (arg_double(object, name, value) < 0) return -1;
    return isnan(*value) ? arg_fail(PyExc_ValueError, BA_ARG("%s") ": expected a finite number, got nan", name) : 0;
}

int arg_flag(PyObject *object, const char *name, int *value) {
    if (object == Py_None || PySequence_Check(object)) return arg_fail_kind(name, "True or False", object);
    *value = PyObject_IsTrue(object);
    return *value < 0 ? arg_fail_raising(name, "True or False", object) : 0;
}

int arg_text(PyObject *object, const char *name, const char **value) {
    if (!PyUnicode_Check(object)) return arg_fail_kind(name, "a string", object);
    Py_ssize_t size;
    *value = PyUnicode_AsUTF8AndSize(object, &size);
    if (*value == NULL) return arg_fail_raising(name, "a string", object);
    return strlen(*value) == (size_t)size
               ? 0
               : arg_fail(PyExc_ValueError, BA_ARG("%s") ": expected a string without null characters, got %R", name, object);
}

int arg_threads(PyObject *object, const char *name, int *value) {
    *value = 0;
    if (object == Py_None) return 0;
    int64_t number = 0;
    if (arg_int64(object, name, &number) < 0) return -1;
    if (number < 1 || number > INT_MAX)
        return arg_fail(PyExc_ValueError, BA_ARG("%s") ": expected a positive number of threads or None, got %lld", name, (long long)number);
    *value = (int)number;
    return 0;
}

int arg_layout(PyObject *object, const char *name, ba_layout *value) {
    const char *text = NULL;
    if (arg_text(object, name, &text) < 0) return -1;
    for (int layout = BA_BNSD; layout <= BA_TND; layout++) {
        if (strcmp(text, ba_layout_name((ba_layout)layout)) != 0) continue;
        *value = (ba_layout)layout;
        return 0;
    }
    return arg_fail(PyExc_ValueError, BA_ARG("%s") ": expected 'BNSD', 'BSND', 'BSH' or 'TND', got %R", name, object);
}

int arg_kv_layout(PyObject *object, const char *name, ba_kv_layout *value) {
    const char *text = NULL;
    if (arg_text(object, name, &text) < 0) return -1;
    *value = strcmp(text, "HND") == 0 ? BA_HND : BA_NHD;
    return *value == BA_HND || strcmp(text, "NHD") == 0 ? 0
                                                        : arg_fail(PyExc_ValueError, BA_ARG("%s") ": expected 'NHD' or 'HND', got %R", name, object);
}

int arg_isa(PyObject *object, const char *name, ba_isa *value) {
    const char *text = NULL;
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
    return arg_fail(PyExc_ValueError, BA_ARG("%s") ": expected %s, got %R", name, names, object);
}

int arg_dtype(PyObject *object, const char *name, arg_role role, ba_dtype *value) {
    *value = BA_DTYPE_COUNT;
    if (object == Py_None) return 0;
    const char *text = NULL;
    if (arg_text(object, name, &text) < 0) return -1;
    for (int dtype = 0; dtype < BA_DTYPE_COUNT; dtype++) {
        if (!arg_role_takes(role, (ba_dtype)dtype) || strcmp(text, ba_dtype_name((ba_dtype)dtype)) != 0) continue;
        *value = (ba_dtype)dtype;
        return 0;
    }
    const char *rest = role == ARG_CACHE ? ", 'float64', 'int8', 'float8_e4m3', 'q8_0', 'q4_0' or 'q4_1'" : " or 'float64'";
    return arg_fail(PyExc_ValueError, BA_ARG("%s") ": expected 'float32', 'float16', 'bfloat16'%s, got %R", name, rest, object);
}

int arg_out_dtype(PyObject *object, ba_dtype q_dtype, int *unrounded) {
    ba_dtype dtype;
    if (arg_dtype(object, "out_dtype", ARG_FLOATS, &dtype) < 0) return -1;
    const bool narrow = q_dtype == BA_FLOAT16 || q_dtype == BA_BFLOAT16;
    *unrounded = narrow && dtype == BA_FLOAT32;
    if (*unrounded || dtype == BA_DTYPE_COUNT || dtype == q_dtype) return 0;
    return arg_fail(PyExc_ValueError, BA_ARG("out_dtype") ": expected '%s'%s like " BA_ARG("q") ", got '%s'", ba_dtype_name(q_dtype),
                    narrow ? " or 'float32'" : "", ba_dtype_name(dtype));
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

/* Reads one integer of any width. Unsigned values of 2^63 and more become INT64_MAX: later checks refuse this number, except in arguments
 * that only set an upper limit, such as a budget. */
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

/* Called in turn i of a loop that may be long. Runs Python's signal handlers in every 2^20-th turn; returns -1 where a handler raises. */
static int look_for_signals(Py_ssize_t i) { return i % (1 << 20) == (1 << 20) - 1 ? PyErr_CheckSignals() : 0; }

static int free_list(arg_list *list) {
    PyMem_Free(list->values);
    list->values = NULL;
    return -1;
}

/* Copies an integer array of `ndim` dimensions, 1 or 2, row by row. With ndim 2, writes its shape to `dims`; with ndim 1, `dims` is NULL. */
static int read_array_list(module_state *state, PyObject *object, const char *name, int ndim, int64_t *dims, arg_list *list) {
    arg_array array;
    raw_array raw;
    int status = arg_hold_raw(state, object, name, &array, &raw);
    if (status == 0 && raw.swapped) status = arg_fail_elements(object, &array, "native byte order", "");
    const bool is_integer =
        status == 0 && (raw.kind == KIND_INT || raw.kind == KIND_UINT) && (raw.size == 1 || raw.size == 2 || raw.size == 4 || raw.size == 8);
    if (status == 0 && !is_integer) status = arg_fail_elements(object, &array, "integers", "");
    if (status == 0) status = arg_check_dims(name, &raw);
    if (status == 0 && raw.ndim != ndim)
        status = arg_fail(PyExc_ValueError, BA_ARG("%s") ": expected %d dimension%s, got %d", name, ndim, ndim == 1 ? "" : "s", raw.ndim);
    const int64_t rows = status == 0 && ndim == 2 ? raw.dims[0] : 1, columns = status == 0 ? raw.dims[ndim - 1] : 0;
    if (status == 0) status = allocate_list(list, (Py_ssize_t)(rows * columns));
    for (Py_ssize_t i = 0; status == 0 && i < list->count; i++) {
        const char *row = ndim == 2 ? raw.data + i / columns * raw.strides[0] : raw.data;
        list->values[i] = read_element(&raw, row + i % columns * raw.strides[ndim - 1]);
        if (look_for_signals(i) < 0) status = free_list(list);
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
    return arg_fail(PyExc_ValueError, BA_ARG("%s") ": expected %lld %s, %s, got %zd", name, (long long)count, count == 1 ? "entry" : "entries",
                    meaning, list->count);
}

static int read_lengths(module_state *state, PyObject *object, const char *name, const char *expected, arg_list *list) {
    list->values = NULL;
    list->count = 0;
    if (object == Py_None) return 0;
    if (PyBytes_Check(object) || PyByteArray_Check(object)) return arg_fail_kind(name, expected, object); /* bytes are taken for text and refused */
    if (PyObject_CheckBuffer(object) || PyObject_HasAttr(object, state->dlpack_method)) return read_array_list(state, object, name, 1, NULL, list);
    if (!is_sequence(object)) return arg_fail_kind(name, expected, object);
    const Py_ssize_t count = PySequence_Size(object);
    if (count < 0) return arg_fail_unreadable(name, object);
    if (allocate_list(list, count) < 0) return -1;
    for (Py_ssize_t i = 0; i < count; i++) {
        if (read_item(object, i, name, &list->values[i]) < 0 || look_for_signals(i) < 0) return free_list(list);
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
        return arg_expect_count(list, name, count, meaning) == 0 ? 0 : free_list(list);
    }
    list->values = NULL;
    if (arg_int64(object, name, &value) < 0 || allocate_list(list, (Py_ssize_t)(count > 0 ? count : 0)) < 0) return -1;
    for (Py_ssize_t i = 0; i < list->count; i++) list->values[i] = value;
    return 0;
}
