/* Reading Python arguments. Other files leave the caller's objects to args.c and arrays.c. They examine an object themselves only where it is None, a
 * tuple, a dict, a type, a capsule or a probe's memory.
 *
 * Every arg_* function that returns int returns 0 on success. On failure it returns -1 with an exception set (sentences.h). arg_sort() words its
 * exceptions like Python's own. `name` is the argument's name. */
#ifndef BA_PYTHON_ARGS_H
#define BA_PYTHON_ARGS_H

#include "python/arrays.h"

/* ---- The call ---------------------------------------------------------------------------------------------- */

/* Traits of an argument in the table of operations. */
enum {
    ARG_OPTIONAL = 1,       /* None: not given, and the library's arguments stay as they are */
    ARG_DIFFERENTIABLE = 2, /* results have gradients with respect to it */
    ARG_WRITTEN = 4,        /* an array that is written: it shares no memory with any other array, unless ARG_POOL or ARG_SUMMARISED allows it */
    ARG_POOL = 8,           /* an array of pages or of their scales: arrays with this trait, such as K and V of one cache, may share memory */
    ARG_SUMMARISED = 16,    /* an array of pages. In layout NHD, an array that is written may be this same array, and then fills other pages of it */
    ARG_NAMED = 32,         /* an array of the dtype that the argument of ARG_DTYPE (for caches, of ARG_KV_DTYPE) names */
};

typedef struct argument {
    const char *name;
    arg_role role;
    int traits;
    size_t member; /* where the value goes: an offset in the library's arguments */
} argument;

#define ARG_NO_MEMBER SIZE_MAX /* no member: the function's own code reads the argument */

/* A function of the module and its arguments. The first `required` arguments must be given. */
typedef struct operation {
    const char *name;
    const argument *arguments; /* [count] */
    int count, required;
} operation;

/* Interns the names of the arguments of function number `index` of the module. arg_forget() releases them. */
int arg_intern(module_state *state, int index, const operation *function);
void arg_forget(module_state *state, int index, const operation *function);

/* Sorts the arguments of a METH_FASTCALL | METH_KEYWORDS call into values[count], in the order of the names. The first `required` arguments must be
 * given; any later argument that is not given becomes None. All values are borrowed references. */
int arg_sort(const module_state *state, int index, const operation *function, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames,
             PyObject **values);

/* ---- Everything else --------------------------------------------------------------------------------------- */

int arg_int64(PyObject *object, const char *name, int64_t *value);
int arg_tokens_before(PyObject *object, const char *name, int64_t *value); /* a window of paged calls */
int arg_pair(PyObject *object, const char *name, int64_t value[2]);
int arg_double(PyObject *object, const char *name, double *value);
int arg_scale(PyObject *object, const char *name, double *value); /* NaN is refused, since it means the default in C; None leaves *value unchanged */
int arg_flag(PyObject *object, const char *name, int *value);
int arg_text(PyObject *object, const char *name, const char **value); /* borrowed from the object */
int arg_threads(PyObject *object, const char *name, int *value);      /* at least 1; None gives 0 */
int arg_layout(PyObject *object, const char *name, ba_layout *value);
int arg_kv_layout(PyObject *object, const char *name, ba_kv_layout *value);
int arg_isa(PyObject *object, const char *name, ba_isa *value);
int arg_dtype(PyObject *object, const char *name, arg_role role, ba_dtype *value); /* role: ARG_FLOATS or ARG_CACHE; None gives BA_DTYPE_COUNT */

/* The dtype of an output whose usual dtype is the dtype of q. *unrounded becomes 0 where `object` is None or names the dtype of q, and 1 for
 * "float32" where q is float16 or bfloat16. */
int arg_out_dtype(PyObject *object, ba_dtype q_dtype, int *unrounded);

/* A list of 64-bit integers that was copied from a Python argument. The caller frees `values` with PyMem_Free. */
typedef struct arg_list {
    int64_t *values; /* NULL: the argument was None */
    Py_ssize_t count;
} arg_list;

/* Copies a sequence of integers or a 1-d integer array. On failure, nothing is allocated. */
int arg_lengths(module_state *state, PyObject *object, const char *name, arg_list *list);

/* Like arg_lengths(), but one integer stands for `count` equal ones. Fails unless there are `count` entries. */
int arg_numbers(module_state *state, PyObject *object, const char *name, int64_t count, const char *meaning, arg_list *list);

/* Copies a 2-d integer array row by row. Writes its shape to `dims`, unless the argument is None. */
int arg_matrix(module_state *state, PyObject *object, const char *name, int64_t dims[2], arg_list *list);

/* Fails with `name: expected <count> entries, <meaning>, got ...` unless the list is NULL or has `count` entries. */
int arg_expect_count(const arg_list *list, const char *name, int64_t count, const char *meaning);

/* The numbers 0, values[0], values[0] + values[1] ... of a list of `count` lengths. A sum that exceeds 64 bits becomes INT64_MAX, which the library
 * refuses. Returns NULL with an exception set where there is no memory. */
int64_t *arg_cumulative(const arg_list *lengths);

#endif
