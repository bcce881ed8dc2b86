/* One call of an operation. Its arguments are read as the table of operations says, the library runs, and all held arrays are released. */
#ifndef BA_PYTHON_CALL_H
#define BA_PYTHON_CALL_H

#include "python/ops.h"

#include "ops/kv_cache/page_tables.h"

enum { CALL_MOST_ARRAYS = 24, CALL_MOST_LISTS = 8, CALL_MOST_RESULTS = 5 };

typedef struct py_call {
    module_state *state;
    const operation *operation;
    void *args;                             /* the library's arguments, whose members the table names */
    PyObject *values[CALL_MOST_ARGUMENTS];  /* [argument] */
    signed char place[CALL_MOST_ARGUMENTS]; /* [argument]: the index of the argument in `array` or `list`; -1: it is in neither */
    ba_dtype dtype, kv_dtype;               /* the dtypes that the arguments of ARG_DTYPE and ARG_KV_DTYPE name; BA_DTYPE_COUNT: none */
    ba_dtype bits, kv_bits;                 /* how plain integers in arrays of ARG_FLOATS and in caches are read, see arg_hold() */
    int arrays, lists, results;
    arg_array array[CALL_MOST_ARRAYS];
    int traits[CALL_MOST_ARRAYS]; /* [array] */
    arg_list list[CALL_MOST_LISTS];
    PyObject *result[CALL_MOST_RESULTS];
    int64_t *cumulative; /* of call_cumulative() */
    bool each;           /* false: no argument of ARG_HEADS or ARG_PER_SEQUENCE is given */
    bool pages_by_token; /* the caches are in layout NHD: see ARG_SUMMARISED. Summaries are then checked by call_expect_summary_pages() */
} py_call;

/* Begins py_<name>: declares `call` and `a`, the library's arguments, and sorts the caller's arguments, or returns NULL. call_end() ends
 * py_<name>. */
#define BEGIN_CALL(name, T, ...)                                                                                                                     \
    WITHIN_FUNCTION;                                                                                                                                 \
    T a = __VA_ARGS__;                                                                                                                               \
    py_call call;                                                                                                                                    \
    if (call_begin(&call, module, CORE_##name, &operation_##name, &a, args, nargs, kwnames) < 0) return NULL

int call_begin(py_call *call, PyObject *module, int index, const operation *operation, void *args, PyObject *const *given, Py_ssize_t nargs,
               PyObject *kwnames);

/* Ends a py_<name> that makes no results. Unless reading has `failed`, checks that outputs overlap no other array, and runs `statement`. Returns
 * None, or NULL on failure. */
#define RUN_AND_END(failed, statement)                                                                                                               \
    do {                                                                                                                                             \
        ba_status status = BA_OK;                                                                                                                    \
        bool ended = (failed) || call_expect_disjoint(&call) < 0;                                                                                    \
        if (!ended) {                                                                                                                                \
            INTERRUPTIBLE(status, statement);                                                                                                        \
            ended = arg_check(status) < 0;                                                                                                           \
        }                                                                                                                                            \
        return call_end(&call, ended);                                                                                                               \
    } while (0)

/* Releases everything that the call holds. Returns None where there are no results, a single result by itself, and several results as a tuple.
 * Returns NULL, with the exception set, where the call failed. */
PyObject *call_end(py_call *call, int failed);

/* Where argument `index` is a tuple, its entries become the values of the arguments behind it. Where it is None, nothing changes. */
int call_spread(py_call *call, int index);

/* Reads all arguments that have a member, except those of ARG_HEADS and ARG_PER_SEQUENCE, which call_read_each() reads. With `either`, a kv_dtype of
 * bfloat16 also applies to arrays of ARG_FLOATS where dtype is not given. */
int call_read(py_call *call, bool either);

/* Reads the arguments of ARG_HEADS, one number for each of `heads` heads, and the arguments of ARG_PER_SEQUENCE. With 0 heads, which the library
 * refuses later, ARG_HEADS are skipped. `meaning`, such as "one per request", stands in sentences. */
int call_read_each(py_call *call, int64_t heads, int64_t sequences, const char *meaning);

/* Fails unless each list of ARG_LENGTHS has `sequences` entries. */
int call_expect_lengths(const py_call *call, int64_t sequences, const char *meaning);

/* Holds an array for which the table has no member. Where `object` is None and `traits` has ARG_OPTIONAL, holds nothing. `name` stands in
 * sentences. */
int call_hold(py_call *call, PyObject *object, const char *name, arg_role role, int traits, ba_tensor *tensor);

/* Holds the caller's result `given`. Where `given` is None, holds a new array that the call's `empty` makes, with the dims and the dtype of `shape`.
 * The array becomes one of the results that call_end() returns. Call this function after all inputs are checked. */
int call_result(py_call *call, PyObject *given, const ba_tensor *shape, const char *name, arg_role role, ba_tensor *tensor);
void call_no_result(py_call *call); /* None is one of the results */

/* The list of integers of an argument; its `values` are NULL where the argument is not given. call_read_list() reads the list of an argument that has
 * no member. call_add_list() gives the argument an empty list, which the caller fills. */
const arg_list *call_list(const py_call *call, int index);
int call_read_list(py_call *call, int index);
arg_list *call_add_list(py_call *call, int index);

/* The numbers 0, n[0], n[0] + n[1] ... of a list of lengths, which the call frees. NULL with an exception set where there is no memory. */
const int64_t *call_cumulative(py_call *call, const arg_list *lengths);

/* The array of an argument; where the argument is not given, an array without memory and axes. */
const arg_array *call_array(const py_call *call, int index);

/* Fails where an array of ARG_WRITTEN or ARG_POOL overlaps another array that is held by now, results included. But arrays of ARG_POOL may overlap
 * one another, and in layout NHD summaries may be the same array as the one of ARG_SUMMARISED. */
int call_expect_disjoint(const py_call *call);

/* Fails where a summary page is listed twice or, if summaries and keys lie in one array, holds keys. */
int call_expect_summary_pages(const ba_quest_metadata_args *a, const ba_page_tables *opened);

/* Whether `a` and `b` are the same elements of the same memory. */
bool call_same_array(const ba_tensor *a, const ba_tensor *b);

#endif
