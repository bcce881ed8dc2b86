/* The functions of the module that are not operations: reading of arguments for the package's Python code, threads, instruction sets, and probes. */
#include "python/ops.h"

#include <fenv.h>
#include <math.h>
#include <string.h>

#include "core/float_mode.h"
#include "core/status.h"
#include "ops/check.h"

/* ---- Arguments that the package's Python code reads itself ---------------------------------------------------- */

TAKES(read_integer, 2, {.name = "value"}, {.name = "name"});
PyObject *py_read_integer(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    (void)module;
    SORT_ARGUMENTS(read_integer, 2);
    const char *name;
    int64_t value;
    if (arg_text(values[1], "name", &name) < 0 || arg_int64(values[0], name, &value) < 0) return NULL;
    return PyLong_FromLongLong(value);
}

TAKES(read_number, 2, {.name = "value"}, {.name = "name"});
PyObject *py_read_number(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    (void)module;
    SORT_ARGUMENTS(read_number, 2);
    const char *name;
    double value;
    if (arg_text(values[1], "name", &name) < 0 || arg_double(values[0], name, &value) < 0) return NULL;
    return PyFloat_FromDouble(value);
}

TAKES(read_flag, 2, {.name = "value"}, {.name = "name"});
PyObject *py_read_flag(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    (void)module;
    SORT_ARGUMENTS(read_flag, 2);
    const char *name;
    int value;
    if (arg_text(values[1], "name", &name) < 0 || arg_flag(values[0], name, &value) < 0) return NULL;
    return PyBool_FromLong(value);
}

TAKES(refuse_masked, 1, {.name = "masked"});
PyObject *py_refuse_masked(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    SORT_ARGUMENTS(refuse_masked, 1);
    if (!PyType_Check(values[0])) {
        arg_fail(PyExc_TypeError, BA_ARG("masked") ": expected a type, got %R", values[0]);
        return NULL;
    }
    module_state *state = PyModule_GetState(module);
    PyObject *const before = (PyObject *)state->masked;
    state->masked = (PyTypeObject *)Py_NewRef(values[0]);
    Py_XDECREF(before);
    return Py_NewRef(Py_None);
}

/* Calls a Python function in the usual float mode, and restores the mode however the function ends. SORT_ARGUMENTS does not stand here: in builds
 * with BA_FAULTS, the Python function's allocations must not count as this module's. */
TAKES(in_usual_mode, 3, {.name = "function"}, {.name = "args"}, {.name = "kwargs"});
PyObject *py_in_usual_mode(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    PyObject *values[3];
    if (arg_sort(PyModule_GetState(module), CORE_in_usual_mode, &operation_in_usual_mode, args, nargs, kwnames, values) < 0) return NULL;
    if (!PyTuple_Check(values[1])) {
        arg_fail(PyExc_TypeError, BA_ARG("args") ": expected a tuple, got %R", values[1]);
        return NULL;
    }
    if (!PyDict_Check(values[2])) {
        arg_fail(PyExc_TypeError, BA_ARG("kwargs") ": expected a dict, got %R", values[2]);
        return NULL;
    }
    const int rounding = fegetround(); /* fesetround() also sets the rounding of x86-64's x87 unit, which computes numpy.longdouble */
    BA_IN_USUAL_MODE;
    fesetround(FE_TONEAREST);
    PyObject *const result = PyObject_Call(values[0], values[1], values[2]);
    fesetround(rounding);
    return result;
}

/* ---- Threads and instruction sets -------------------------------------------------------------------------- */

TAKES_NOTHING(get_num_threads);
PyObject *py_get_num_threads(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    NO_ARGUMENTS(get_num_threads);
    return PyLong_FromLong(ba_get_num_threads());
}

TAKES(set_num_threads, 1, {.name = "num_threads"});
PyObject *py_set_num_threads(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    (void)module;
    SORT_ARGUMENTS(set_num_threads, 1);
    int num_threads;
    if (arg_threads(values[0], "num_threads", &num_threads) < 0 || arg_check(ba_set_num_threads(num_threads)) < 0) return NULL;
    return Py_NewRef(Py_None);
}

TAKES_NOTHING(num_threads_source);
PyObject *py_num_threads_source(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    NO_ARGUMENTS(num_threads_source);
    return PyUnicode_FromString(ba_num_threads_source());
}

TAKES_NOTHING(isa_levels);
PyObject *py_isa_levels(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    NO_ARGUMENTS(isa_levels);
    PyObject *levels = PyTuple_New(BA_ISA_COUNT);
    for (int i = 0; levels != NULL && i < BA_ISA_COUNT; i++) {
        PyObject *name = PyUnicode_FromString(ba_isa_name((ba_isa)i));
        if (name == NULL || PyTuple_SetItem(levels, i, name) < 0) Py_CLEAR(levels);
    }
    return levels;
}

TAKES_NOTHING(isa_detected);
PyObject *py_isa_detected(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    NO_ARGUMENTS(isa_detected);
    return PyUnicode_FromString(ba_isa_name(ba_isa_detected()));
}

TAKES_NOTHING(isa_active);
PyObject *py_isa_active(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    NO_ARGUMENTS(isa_active);
    return PyUnicode_FromString(ba_isa_name(ba_isa_active()));
}

TAKES(isa_set_cap, 1, {.name = "level"});
PyObject *py_isa_set_cap(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    (void)module;
    SORT_ARGUMENTS(isa_set_cap, 1);
    ba_isa level;
    if (arg_isa(values[0], "level", &level) < 0 || arg_check(ba_isa_set_cap(level)) < 0) return NULL;
    return Py_NewRef(Py_None);
}

TAKES_NOTHING(isa_note);
PyObject *py_isa_note(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    NO_ARGUMENTS(isa_note);
    return PyUnicode_FromString(ba_isa_note());
}

TAKES_NOTHING(cpu_model);
PyObject *py_cpu_model(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    NO_ARGUMENTS(cpu_model);
    return PyUnicode_DecodeUTF8(ba_cpu_model(), (Py_ssize_t)strlen(ba_cpu_model()), "replace");
}

TAKES(kernels, 0, {.name = "level"});
PyObject *py_kernels(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    (void)module;
    SORT_ARGUMENTS(kernels, 1);
    ba_isa level = ba_isa_active();
    if (values[0] != Py_None && arg_isa(values[0], "level", &level) < 0) return NULL;
    PyObject *list = PyList_New(0);
    const char *name;
    ba_isa implemented_at;
    for (int64_t i = 0; list != NULL && ba_kernel_info(level, i, &name, &implemented_at); i++) {
        PyObject *entry = Py_BuildValue("(ss)", name, ba_isa_name(implemented_at));
        if (entry == NULL || PyList_Append(list, entry) < 0) Py_CLEAR(list);
        Py_XDECREF(entry);
    }
    return list;
}

/* ---- Probes ------------------------------------------------------------------------------------------------ */

/* Reads the arguments of a probe. With may_be_once, seconds may be None, which gives duration 0, for a single pass. */
static int read_probe(PyObject *level, PyObject *seconds, bool may_be_once, PyObject *num_threads, ba_isa *isa, double *duration, int *threads) {
    const bool once = may_be_once && seconds == Py_None;
    *duration = 0;
    if (arg_isa(level, "level", isa) < 0 || (!once && arg_double(seconds, "seconds", duration) < 0)) return -1;
    if (!once && !(*duration > 0.0 && isfinite(*duration))) {
        arg_fail(PyExc_ValueError, BA_ARG("seconds") ": expected a positive number, got %S", seconds);
        return -1;
    }
    return arg_threads(num_threads, "num_threads", threads);
}

TAKES(probe_flops, 2, {.name = "level"}, {.name = "seconds"}, {.name = "num_threads"});
PyObject *py_probe_flops(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    (void)module;
    SORT_ARGUMENTS(probe_flops, 3);
    ba_isa level;
    double seconds, rate;
    int threads;
    if (read_probe(values[0], values[1], false, values[2], &level, &seconds, &threads) < 0) return NULL;
    WITHOUT_GIL(rate = ba_probe_flops(level, seconds, threads));
    return PyFloat_FromDouble(rate * 1e-9);
}

TAKES(probe_tile_flops, 2, {.name = "level"}, {.name = "seconds"}, {.name = "num_threads"});
PyObject *py_probe_tile_flops(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    (void)module;
    SORT_ARGUMENTS(probe_tile_flops, 3);
    ba_isa level;
    double seconds, rate;
    int threads;
    if (read_probe(values[0], values[1], false, values[2], &level, &seconds, &threads) < 0) return NULL;
    WITHOUT_GIL(rate = ba_probe_tile_flops(level, seconds, threads));
    return PyFloat_FromDouble(rate * 1e-9);
}

TAKES(probe_read, 3, {.name = "level"}, {.name = "memory"}, {.name = "seconds"}, {.name = "num_threads"});
PyObject *py_probe_read(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    (void)module;
    SORT_ARGUMENTS(probe_read, 4);
    ba_isa level;
    int64_t bytes;
    double seconds, rate = 0;
    int threads;
    Py_buffer data = {0};
    if (read_probe(values[0], values[2], true, values[3], &level, &seconds, &threads) < 0) return NULL;
    if (PyObject_CheckBuffer(values[1])) {
        if (PyObject_GetBuffer(values[1], &data, PyBUF_SIMPLE) < 0) return NULL;
        bytes = data.len;
    } else if (arg_int64(values[1], "memory", &bytes) < 0) return NULL;
    if (bytes < 1) arg_fail(PyExc_ValueError, BA_ARG("memory") ": expected a positive number of bytes, got %lld", (long long)bytes);
    else WITHOUT_GIL(rate = ba_probe_read(level, data.buf, bytes, seconds, threads));
    PyBuffer_Release(&data);
    if (bytes < 1) return NULL;
    return PyFloat_FromDouble(rate * 1e-9);
}

/* ---- The table of operations ------------------------------------------------------------------------------- */

/* The names of roles in Python. */
static const char *const role_names[ARG_ROLES] = {[ARG_FLOATS] = "floats",     [ARG_CACHE] = "cache",
                                                  [ARG_REALS] = "reals",       [ARG_SCALES] = "scales",
                                                  [ARG_INDICES] = "indices",   [ARG_PAGES] = "pages",
                                                  [ARG_TABLES] = "tables",     [ARG_MASK] = "mask",
                                                  [ARG_HEADS] = "heads",       [ARG_LIST] = "list",
                                                  [ARG_LENGTHS] = "lengths",   [ARG_INTEGER] = "integer",
                                                  [ARG_PAIR] = "pair",         [ARG_PER_SEQUENCE] = "per_sequence",
                                                  [ARG_NUMBER] = "number",     [ARG_SCALE] = "scale",
                                                  [ARG_FLAG] = "flag",         [ARG_TOKENS_BEFORE] = "tokens_before",
                                                  [ARG_LAYOUT] = "layout",     [ARG_DTYPE] = "dtype",
                                                  [ARG_KV_DTYPE] = "kv_dtype", [ARG_KV_LAYOUT] = "kv_layout",
                                                  [ARG_THREADS] = "threads",   [ARG_OWN] = "own"};

/* The arguments of one function: ((name, role, whether it is differentiable), ...). */
static PyObject *arguments_of(const operation *function) {
    PyObject *arguments = PyTuple_New(function->count);
    for (int i = 0; arguments != NULL && i < function->count; i++) {
        const argument *const a = &function->arguments[i];
        PyObject *row = Py_BuildValue("(ssO)", a->name, role_names[a->role], a->traits & ARG_DIFFERENTIABLE ? Py_True : Py_False);
        if (row == NULL || PyTuple_SetItem(arguments, i, row) < 0) Py_CLEAR(arguments);
    }
    return arguments;
}

TAKES_NOTHING(operations);
PyObject *py_operations(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    NO_ARGUMENTS(operations);
    PyObject *table = PyDict_New();
    for (int i = 0; table != NULL && i < CORE_COUNT; i++) {
        PyObject *arguments = arguments_of(core_operations[i]);
        if (arguments == NULL || PyDict_SetItemString(table, core_operations[i]->name, arguments) < 0) Py_CLEAR(table);
        Py_XDECREF(arguments);
    }
    return table;
}
