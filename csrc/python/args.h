/* Reading Python arguments. Other files examine an object of the caller themselves only where it is None, a tuple, a capsule or a probe's memory.
 *
 * Every arg_* function that returns int returns 0 on success. On failure it returns -1 with a Python exception set, whose text is
 * `name: expected ..., got ...`: a TypeError where the argument is of a wrong kind, a ValueError where its shape or value is wrong.
 * `name` is the argument's name. The string must outlive the arg_array that it goes into. */
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
#include "core/status.h"
#include "python/dlpack.h"

/* ---- Sentences --------------------------------------------------------------------------------------------- */

/* Raises an exception whose text has the form of PyUnicode_FromFormat(), and returns -1. Names of arguments are marked in it as for ba_fail(), by
 * BA_ARG(). Where a text begins with a name, the exception has the attribute `sentence`, a tuple of str that joined are the text: names at even
 * places, and what stands between them at odd ones. Wrappers in Python put their own names in the place of these. */
int arg_fail(PyObject *exception, const char *format, ...);

/* Returns 0 for BA_OK. For any other status, raises the exception that belongs to it with the text of ba_last_error(), as arg_fail() does, and
 * returns -1. For BA_INTERRUPTED the exception of the signal handler is already set. */
int arg_check(ba_status status);

/* ---- Module state ------------------------------------------------------------------------------------------ */

enum { MODULE_MOST_FUNCTIONS = 40 };

typedef struct module_state {
    PyObject *dlpack_method;                 /* "__dlpack__" */
    PyObject *dlpack_arguments;              /* (): no positional arguments */
    PyObject *dlpack_keywords;               /* {"max_version": (1, 0)} */
    PyTypeObject *masked;                    /* the type of arrays with a mask, whose memory must not be read without it; NULL: not known */
    PyObject **names[MODULE_MOST_FUNCTIONS]; /* [function]: the interned names of its arguments; NULL: it has none */
} module_state;

/* ---- The call ---------------------------------------------------------------------------------------------- */

/* What an argument is. The first ones are arrays of certain dtypes. */
typedef enum arg_role {
    ARG_FLOATS,        /* float32, float16, bfloat16, float64; the last axis contiguous */
    ARG_CACHE,         /* the dtypes of ARG_FLOATS, int8 and float8_e4m3; the last axis contiguous */
    ARG_LSE,           /* float32, float64 */
    ARG_SCALES,        /* float32 */
    ARG_INDICES,       /* uint16, int16, int32, int64 */
    ARG_PAGES,         /* int16, int32, int64 */
    ARG_TABLES,        /* int32, int64 */
    ARG_MASK,          /* bool, float32, float16, bfloat16, float64; at most four axes */
    ARG_HEADS,         /* float32, one per query head */
    ARG_LIST,          /* integers; None: not given */
    ARG_LENGTHS,       /* the same, one per sequence */
    ARG_PER_SEQUENCE,  /* the same, or one integer for all sequences */
    ARG_INTEGER,       /* an integer */
    ARG_TOKENS_BEFORE, /* an integer: the window of paged calls */
    ARG_PAIR,          /* two integers */
    ARG_NUMBER,        /* a number */
    ARG_SCALE,         /* a number; None: the default */
    ARG_FLAG,          /* True or False */
    ARG_LAYOUT,        /* "BNSD", "BSND", "BSH", "TND" */
    ARG_KV_LAYOUT,     /* "NHD", "HND" */
    ARG_DTYPE,         /* the name of a dtype of ARG_FLOATS; None: not said */
    ARG_KV_DTYPE,      /* the name of a dtype of ARG_CACHE; None: not said */
    ARG_THREADS,       /* a number of threads; None: the default */
    ARG_OWN,           /* anything that is not in this list */
    ARG_ROLES
} arg_role;

/* What else the table says of an argument. */
enum {
    ARG_OPTIONAL = 1,       /* None: not given, and the library's arguments stay as they are */
    ARG_DIFFERENTIABLE = 2, /* results have gradients in it */
    ARG_WRITTEN = 4,        /* an array that is written: it shares no memory with any other array, but see below */
    ARG_POOL = 8,           /* an array of pages or their scales: it may share memory with others of this kind, such as K and V of one cache */
    ARG_SUMMARISED = 32,    /* an array of pages in layout NHD: arrays that are written may be the same array, other pages of which they fill */
    ARG_NAMED = 16,         /* an array whose dtype must be the one that the argument of ARG_DTYPE (caches: of ARG_KV_DTYPE) names */
};

typedef struct argument {
    const char *name;
    arg_role role;
    int traits;
    size_t member; /* where the value goes: an offset in the library's arguments */
} argument;

#define ARG_NO_MEMBER SIZE_MAX /* it goes nowhere: the function's own code reads it */

/* A function of the module and its arguments. The first `required` ones must be given. */
typedef struct operation {
    const char *name;
    const argument *arguments; /* [count] */
    int count, required;
} operation;

/* Interns the names of the arguments of function number `index` of the module. arg_forget() releases them. */
int arg_intern(module_state *state, int index, const operation *function);
void arg_forget(module_state *state, int index, const operation *function);

/* Sorts the arguments of a METH_FASTCALL | METH_KEYWORDS call into values[count], in the order of the names. The first `required`
 * arguments must be given; any other that is not given becomes None. All values are borrowed references. */
int arg_sort(const module_state *state, int index, const operation *function, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames,
             PyObject **values);

/* ---- Arrays ------------------------------------------------------------------------------------------------ */

/* An array that is held: its memory stays valid and in place until arg_release(). An all-zero arg_array holds nothing. */
typedef struct arg_array {
    const char *name;
    ba_tensor tensor;
    uintptr_t low, high; /* the bytes that the array spans: [low, high); low == high where it is empty */
    bool read_only;
    Py_buffer view; /* view.obj not NULL: held through the buffer protocol. Else through DLPack, by one of the next two */
    dl_managed *managed;
    dl_managed_versioned *versioned;
} arg_array;

/* Holds `object` in `array`; on failure, `array` holds nothing. `object` exports the buffer protocol or DLPack (CPU memory), or is a pair
 * (array of 16-bit integers, "bfloat16") or (array of 8-bit integers, "float8_e4m3"). `bits_as` says how plain uint16 or uint8 arrays are
 * read: as BA_BFLOAT16, as BA_FLOAT8_E4M3, or, with BA_UINT16, as the integers that they are. */
int arg_hold(module_state *state, PyObject *object, const char *name, arg_role role, ba_dtype bits_as, arg_array *array);

/* The same for an array that will be written. It must be writable. (The library refuses one whose elements share memory.) */
int arg_hold_output(module_state *state, PyObject *object, const char *name, arg_role role, ba_dtype bits_as, arg_array *array);

/* Holds the caller's output `given`, or, where that is None, a new array: the result of empty(shape, dtype name), with the dims and the dtype
 * of `shape`. Call it after all inputs are checked, so that a refused call makes no array. Returns a new reference to the output, or NULL with
 * an exception set. */
PyObject *arg_hold_or_make_output(module_state *state, PyObject *given, PyObject *empty, const ba_tensor *shape, const char *name, arg_role role,
                                  ba_dtype bits_as, arg_array *array);

/* Lets go of what `array` holds, and sets `array` to zero. Keeps a pending exception. */
void arg_release(arg_array *array);

/* Refuses an output whose span, from its first byte to its last, overlaps that of another array of the call: interleaved views, too. */
int arg_disjoint(const arg_array *output, const arg_array *other);

/* ---- Everything else --------------------------------------------------------------------------------------- */

int arg_int64(PyObject *object, const char *name, int64_t *value);
int arg_tokens_before(PyObject *object, const char *name, int64_t *value); /* a window of paged calls */
int arg_pair(PyObject *object, const char *name, int64_t value[2]);
int arg_double(PyObject *object, const char *name, double *value);
int arg_scale(PyObject *object, const char *name, double *value); /* a number that is no NaN, which means a default in C; None leaves *value */
int arg_flag(PyObject *object, const char *name, int *value);
int arg_text(PyObject *object, const char *name, const char **value); /* borrowed from the object */
int arg_threads(PyObject *object, const char *name, int *value);      /* at least 1; None gives 0 */
int arg_layout(PyObject *object, const char *name, ba_layout *value);
int arg_kv_layout(PyObject *object, const char *name, ba_kv_layout *value);
int arg_isa(PyObject *object, const char *name, ba_isa *value);
int arg_dtype(PyObject *object, const char *name, arg_role role, ba_dtype *value); /* role: ARG_FLOATS or ARG_CACHE; None gives BA_DTYPE_COUNT */

/* The dtype of an output whose usual dtype is that of q: None and that dtype set *unrounded to 0, "float32" with float16 and bfloat16 to 1. */
int arg_out_dtype(PyObject *object, ba_dtype q_dtype, int *unrounded);

/* The `bits_as` of arg_hold() for a call whose dtype argument is this. */
ba_dtype arg_bits(ba_dtype dtype);

/* A list of 64-bit integers that was copied from a Python argument. The caller frees `values` with PyMem_Free. */
typedef struct arg_list {
    int64_t *values; /* NULL: the argument was None */
    Py_ssize_t count;
} arg_list;

/* Copies a sequence of integers or a 1-d integer array. On failure, nothing is allocated. */
int arg_lengths(module_state *state, PyObject *object, const char *name, arg_list *list);

/* The same, where one integer stands for `count` equal ones. Fails unless there are `count` entries. */
int arg_numbers(module_state *state, PyObject *object, const char *name, int64_t count, const char *meaning, arg_list *list);

/* Checks that an array has the dtype that the caller has named in an argument; BA_DTYPE_COUNT: none. */
int arg_expect_dtype(const char *name, ba_dtype dtype, const char *argument, ba_dtype named);

/* Holds one float32 per head, [heads], or nothing where `object` is None: *numbers is then unchanged. */
int arg_head_numbers(module_state *state, PyObject *object, const char *name, int64_t heads, arg_array *array, const float **numbers);

/* Holds a mask of at most four axes, or nothing where `object` is None. */
int arg_mask(module_state *state, PyObject *object, const char *name, arg_array *array, ba_tensor *mask);

/* As arg_lengths, for a 2-d integer array, row by row. Writes its shape to `dims`, unless the argument is None. */
int arg_matrix(module_state *state, PyObject *object, const char *name, int64_t dims[2], arg_list *list);

/* Fails with `name: expected <count> entries, <meaning>, got ...` unless the list is NULL or has `count` entries. */
int arg_expect_count(const arg_list *list, const char *name, int64_t count, const char *meaning);

/* The numbers 0, values[0], values[0] + values[1] ... of a list of `count` lengths. A sum that exceeds 64 bits is the largest number, which the
 * library refuses. Returns NULL with an exception set where there is no memory. */
int64_t *arg_cumulative(const arg_list *lengths);

#endif
