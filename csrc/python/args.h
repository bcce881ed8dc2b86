/* Reading Python arguments. Except for arrays.c, which holds arrays, other files examine an object of the caller only where it is None, a tuple, a
 * capsule or a probe's memory.
 *
 * Every arg_* function that returns int returns 0 on success. On failure it returns -1 with an exception set, see sentences.h; the exceptions of
 * arg_sort() are worded like Python's own. `name` is the argument's name. */
#ifndef BA_PYTHON_ARGS_H
#define BA_PYTHON_ARGS_H

#include "python/arrays.h"

/* ---- The call ---------------------------------------------------------------------------------------------- */

/* What else the table says of an argument. */
enum {
    ARG_OPTIONAL = 1,       /* None: not given, and the library's arguments stay as they are */
    ARG_DIFFERENTIABLE = 2, /* results have gradients with respect to it */
    ARG_WRITTEN = 4,        /* an array that is written: it shares no memory with any other array, except as the next two allow */
    ARG_POOL = 8,           /* an array of pages or their scales: it may share memory with others of this kind, such as K and V of one cache */
    ARG_SUMMARISED = 16,    /* an array of pages in layout NHD: arrays that are written may be the same array, other pages of which they fill */
    ARG_NAMED = 32,         /* an array whose dtype must be the one that the argument of ARG_DTYPE (caches: of ARG_KV_DTYPE) names */
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

/* ---- Everything else --------------------------------------------------------------------------------------- */

int arg_int64(PyObject *object, const char *name, int64_t *value);
int arg_tokens_before(PyObject *object, const char *name, int64_t *value); /* a window of paged calls */
int arg_pair(PyObject *object, const char *name, int64_t value[2]);
int arg_double(PyObject *object, const char *name, double *value);
int arg_scale(PyObject *object, const char *name, double *value); /* a number that is not NaN, since NaN means the default in C; None leaves *value */
int arg_flag(PyObject *object, const char *name, int *value);
int arg_text(PyObject *object, const char *name, const char **value); /* borrowed from the object */
int arg_threads(PyObject *object, const char *name, int *value);      /* at least 1; None gives 0 */
int arg_layout(PyObject *object, const char *name, ba_layout *value);
int arg_kv_layout(PyObject *object, const char *name, ba_kv_layout *value);
int arg_isa(PyObject *object, const char *name, ba_isa *value);
int arg_dtype(PyObject *object, const char *name, arg_role role, ba_dtype *value); /* role: ARG_FLOATS or ARG_CACHE; None gives BA_DTYPE_COUNT */

/* The dtype of an output whose usual dtype is that of q: *unrounded becomes 0 for None or that dtype, and 1 for "float32" where q is float16 or
 * bfloat16. */
int arg_out_dtype(PyObject *object, ba_dtype q_dtype, int *unrounded);

/* A list of 64-bit integers that was copied from a Python argument. The caller frees `values` with PyMem_Free. */
typedef struct arg_list {
    int64_t *values; /* NULL: the argument was None */
    Py_ssize_t count;
} arg_list;

/* Copies a sequence of integers or a 1-d integer array. On failure, nothing is allocated. */
int arg_lengths(module_state *state, PyObject *object, const char *name, arg_list *list);

/* The same, where one integer stands for `count` equal ones. Fails unless there are `count` entries. */
int arg_numbers(module_state *state, PyObject *object, const char *name, int64_t count, const char *meaning, arg_list *list);

/* As arg_lengths, for a 2-d integer array, row by row. Writes its shape to `dims`, unless the argument is None. */
int arg_matrix(module_state *state, PyObject *object, const char *name, int64_t dims[2], arg_list *list);

/* Fails with `name: expected <count> entries, <meaning>, got ...` unless the list is NULL or has `count` entries. */
int arg_expect_count(const arg_list *list, const char *name, int64_t count, const char *meaning);

/* The numbers 0, values[0], values[0] + values[1] ... of a list of `count` lengths. A sum that exceeds 64 bits is the largest number, which the
 * library refuses. Returns NULL with an exception set where there is no memory. */
int64_t *arg_cumulative(const arg_list *lengths);

#endif
