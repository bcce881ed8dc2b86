/* Reading Python arguments. No other file looks into a PyObject that a caller passed.
 *
 * Every arg_* function that returns int gives 0, or -1 with a Python exception set whose text is
 * `name: expected ..., got ...`: TypeError where the kind of thing is wrong, ValueError where its shape or value is. */
#ifndef BA_PYTHON_ARGS_H
#define BA_PYTHON_ARGS_H

#include <pyconfig.h>
#if !defined(Py_LIMITED_API) && !defined(Py_GIL_DISABLED) /* free-threaded builds have no stable ABI before 3.15 */
#define Py_LIMITED_API 0x030B0000
#endif
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdbool.h>
#include <stdint.h>

#include "blitz_attn.h"
#include "python/dlpack.h"

/* ---- Module state ------------------------------------------------------------------------------------------ */

typedef struct module_state {
    PyObject *dlpack_method;    /* "__dlpack__" */
    PyObject *dlpack_arguments; /* (): no positional arguments */
    PyObject *dlpack_keywords;  /* {"max_version": (1, 0)} */
} module_state;

/* ---- The call ---------------------------------------------------------------------------------------------- */

/* Sorts a METH_FASTCALL | METH_KEYWORDS call into values[count], in the order of `names`. Left-out optional arguments
 * become None; all values are borrowed. */
int arg_sort(const char *function, const char *const *names, int count, int required, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames,
             PyObject **values);

/* ---- Arrays ------------------------------------------------------------------------------------------------ */

typedef enum arg_role {
    ARG_FLOATS,  /* float32, float16, bfloat16, float64; the last axis contiguous */
    ARG_CACHE,   /* the same and int8, float8_e4m3 */
    ARG_LSE,     /* float32, float64 */
    ARG_SCALES,  /* float32 */
    ARG_INDICES, /* uint16, int16, int32, int64 */
    ARG_TABLES,  /* int32, int64 */
} arg_role;

/* An array that is held: its memory stays where it is until arg_release(). All zero: holds nothing. */
typedef struct arg_array {
    const char *name;
    ba_tensor tensor;
    uintptr_t low, high; /* the bytes that it reaches: [low, high); equal when it is empty */
    bool read_only;
    Py_buffer view; /* held through the buffer protocol when view.obj is set, else through one of the next two */
    dl_managed *managed;
    dl_managed_versioned *versioned;
} arg_array;

/* Holds `object`: an exporter of the buffer protocol or of DLPack (CPU), or the pair (array, "bfloat16") that says how 16-bit
 * integers are to be read, or (array, "float8_e4m3") for 8-bit ones. `bits_as` says the same for plain uint16 and uint8 arrays:
 * BA_BFLOAT16, BA_FLOAT8_E4M3, or BA_UINT16 for "as they are". */
int arg_hold(module_state *state, PyObject *object, const char *name, arg_role role, ba_dtype bits_as, arg_array *array);

/* The same for an array that will be written: it must be writable and must not reach any byte twice. */
int arg_hold_output(module_state *state, PyObject *object, const char *name, arg_role role, ba_dtype bits_as, arg_array *array);

/* The caller's array where one was given, else empty(shape, dtype name): outputs are made after all inputs were checked.
 * Returns a new reference to what the caller gets back; `array` holds its memory. */
PyObject *arg_hold_or_make_output(module_state *state, PyObject *given, PyObject *empty, const ba_tensor *shape, const char *name, arg_role role,
                                  ba_dtype bits_as, arg_array *array);

void arg_release(arg_array *array);

/* Refuses an output that shares memory with another array of the call. */
int arg_disjoint(const arg_array *output, const arg_array *other);

/* ---- Everything else --------------------------------------------------------------------------------------- */

int arg_int64(PyObject *object, const char *name, int64_t *value);
int arg_pair(PyObject *object, const char *name, int64_t value[2]);
int arg_double(PyObject *object, const char *name, double *value);
int arg_flag(PyObject *object, const char *name, int *value);
int arg_text(PyObject *object, const char *name, const char **value); /* borrowed from the object */
int arg_threads(PyObject *object, const char *name, int *value);      /* None: 0 */
int arg_layout(PyObject *object, const char *name, ba_layout *value);
int arg_kv_layout(PyObject *object, const char *name, ba_kv_layout *value);
int arg_isa(PyObject *object, const char *name, ba_isa *value);
int arg_dtype(PyObject *object, const char *name, arg_role role, ba_dtype *value); /* ARG_FLOATS or ARG_CACHE; None: BA_DTYPE_COUNT */

/* How uint16 and uint8 arrays are to be read when the caller's dtype argument is this. */
ba_dtype arg_bits(ba_dtype dtype);

/* A list of 64-bit integers read from any integer sequence or 1-d integer array. None gives values == NULL. */
typedef struct arg_list {
    int64_t *values; /* PyMem_Free */
    Py_ssize_t count;
} arg_list;

int arg_lengths(module_state *state, PyObject *object, const char *name, arg_list *list);

/* The same from a 2-d integer array, row by row; `dims` gets its shape. */
int arg_matrix(module_state *state, PyObject *object, const char *name, int64_t dims[2], arg_list *list);

/* `name: expected <count> entries, <meaning>, got ...` unless the list has them or was not given. */
int arg_expect_count(const arg_list *list, const char *name, int64_t count, const char *meaning);

/* The status of a library call as a return value: BA_OK gives 0, else the exception is set from ba_last_error(). */
int arg_check(ba_status status);

#endif
