/* Arrays of the caller, held through the buffer protocol or DLPack. Functions that return int return 0 on success; on failure they return -1 with an
 * exception set (sentences.h). `name` is the argument's name. The string `name` must outlive the arg_array that points to it. */
#ifndef BA_PYTHON_ARRAYS_H
#define BA_PYTHON_ARRAYS_H

#include "python/sentences.h"

#include "blitz_attn.h"
#include "python/dlpack.h"

/* ---- Module state ------------------------------------------------------------------------------------------ */

enum { MODULE_MOST_FUNCTIONS = 40 };

typedef struct module_state {
    PyObject *dlpack_method;                 /* "__dlpack__" */
    PyObject *dlpack_arguments;              /* (): no positional arguments */
    PyObject *dlpack_keywords;               /* {"max_version": (1, 0)} */
    PyTypeObject *masked;                    /* the type of arrays with a mask: their memory must not be read without the mask. NULL: not known */
    PyObject **names[MODULE_MOST_FUNCTIONS]; /* [function]: the interned names of the function's arguments; NULL: it has no arguments */
} module_state;

/* ---- Arrays ------------------------------------------------------------------------------------------------ */

/* The kind of an argument. Up to ARG_MASK, arguments are arrays of the dtypes that are named. */
typedef enum arg_role {
    ARG_FLOATS,        /* float32, float16, bfloat16, float64; the last axis contiguous */
    ARG_CACHE,         /* the dtypes of ARG_FLOATS, int8, float8_e4m3 and those of cells; the last axis contiguous */
    ARG_REALS,         /* float32, float64 */
    ARG_SCALES,        /* float32 */
    ARG_INDICES,       /* uint16, int16, int32, int64 */
    ARG_PAGES,         /* int16, int32, int64 */
    ARG_TABLES,        /* int32, int64 */
    ARG_MASK,          /* bool, float32, float16, bfloat16, float64; at most four axes */
    ARG_HEADS,         /* float32, one per query head */
    ARG_LIST,          /* integers; None: not given */
    ARG_LENGTHS,       /* integers, one per sequence; None: not given */
    ARG_PER_SEQUENCE,  /* integers, one per sequence, or one integer for all sequences; None: not given */
    ARG_INTEGER,       /* an integer */
    ARG_TOKENS_BEFORE, /* an integer: the window of paged calls */
    ARG_PAIR,          /* two integers */
    ARG_NUMBER,        /* a number */
    ARG_SCALE,         /* a number; None: the default */
    ARG_FLAG,          /* True or False */
    ARG_LAYOUT,        /* "BNSD", "BSND", "BSH", "TND" */
    ARG_KV_LAYOUT,     /* "NHD", "HND" */
    ARG_DTYPE,         /* the name of a dtype of ARG_FLOATS; None: not given */
    ARG_KV_DTYPE,      /* the name of a dtype of ARG_CACHE; None: not given */
    ARG_THREADS,       /* a number of threads; None: the default */
    ARG_OWN,           /* anything that is not in this list */
    ARG_ROLES
} arg_role;

/* An array that is held: its memory stays valid and in place until arg_release(). An all-zero arg_array holds nothing. */
typedef struct arg_array {
    const char *name;
    ba_tensor tensor;
    uintptr_t low, high; /* the bytes that the array spans: [low, high); low == high where it is empty */
    bool read_only;
    Py_buffer view; /* view.obj not NULL: held through the buffer protocol. Else held through DLPack, by `managed` or `versioned` */
    dl_managed *managed;
    dl_managed_versioned *versioned;
} arg_array;

/* Holds `object` in `array`; on failure, `array` holds nothing. `object` exports the buffer protocol or DLPack (CPU memory), or is a pair of such an
 * array and the dtype that its integers stand for: (array of uint16, "bfloat16") or (array of uint8, "float8_e4m3", "q8_0", "q4_0" or "q4_1").
 * `bits_as` says how plain uint16 or uint8 arrays are read: as numbers of this dtype, or, with BA_UINT16, as the integers that they are. */
int arg_hold(module_state *state, PyObject *object, const char *name, arg_role role, ba_dtype bits_as, arg_array *array);

/* Like arg_hold(), for an array that will be written. The array must be writable. (The library refuses an array whose elements share memory.) */
int arg_hold_output(module_state *state, PyObject *object, const char *name, arg_role role, ba_dtype bits_as, arg_array *array);

/* Holds the caller's output `given`. Where `given` is None, holds a new array instead: the result of empty(dims, dtype name), with the dims and the
 * dtype of `shape`. Call this function after all inputs are checked, so that a refused call makes no array. Returns a new reference to the output, or
 * NULL with an exception set. */
PyObject *arg_hold_or_make_output(module_state *state, PyObject *given, PyObject *empty, const ba_tensor *shape, const char *name, arg_role role,
                                  ba_dtype bits_as, arg_array *array);

/* Lets go of what `array` holds, and sets `array` to zero. Keeps a pending exception. */
void arg_release(arg_array *array);

/* Refuses an output whose span, from its first byte to its last, overlaps the span of another array of the call. Interleaved views are refused,
 * too. */
int arg_disjoint(const arg_array *output, const arg_array *other);

/* The `bits_as` of arg_hold() for a call whose dtype argument is `dtype`. */
ba_dtype arg_bits(ba_dtype dtype);

/* Checks that `dtype`, the dtype of array `name`, is the dtype `named`, which the caller gave as `argument`. BA_DTYPE_COUNT: the caller named no
 * dtype, and nothing is checked. */
int arg_expect_dtype(const char *name, ba_dtype dtype, const char *argument, ba_dtype named);

/* Holds an array of one float32 per head, and sets *numbers to it. Where `object` is None, holds nothing and leaves *numbers unchanged. */
int arg_head_numbers(module_state *state, PyObject *object, const char *name, int64_t heads, arg_array *array, const float **numbers);

#endif
