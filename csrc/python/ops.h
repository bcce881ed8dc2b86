/* The functions of the module blitz_attn._core, which are defined in the files ops*.c: the operations of operations.h, and other functions, which
 * _core.pyi declares. */
#ifndef BA_PYTHON_OPS_H
#define BA_PYTHON_OPS_H

#include "python/operations.h"

/* The names of all functions. */
/* clang-format off */
#define CORE_FUNCTIONS(X) CORE_OPERATIONS(X) \
    X(page_table_lengths) X(read_integer) X(read_number) X(read_flag) X(refuse_masked) X(in_usual_mode) \
    X(get_num_threads) X(set_num_threads) X(num_threads_source) X(isa_levels) X(isa_detected) X(isa_active) X(isa_set_cap) X(isa_note) \
    X(cpu_model) X(kernels) X(probe_flops) X(probe_tile_flops) X(probe_read) X(operations) FAULT_FUNCTIONS(X)
#ifdef BA_FAULTS /* faults.c, for tests; not in _core.pyi. _fail_allocation(n) and _fail_thread(n) make the n-th allocation, or the n-th start of a thread
                    of the pool, fail (0: none), and return how many there were since the last call. _live_blocks() returns the number of blocks that
                    Python has allocated, up to a constant */
#define FAULT_FUNCTIONS(X) X(_fail_allocation) X(_fail_thread) X(_live_blocks)
#else
#define FAULT_FUNCTIONS(X)
#endif
/* clang-format on */

#define DECLARE_FUNCTION(name)                                                                                                                       \
    PyObject *py_##name(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames);                                               \
    extern const operation operation_##name;
CORE_FUNCTIONS(DECLARE_FUNCTION)
#undef DECLARE_FUNCTION

#define CORE_INDEX(name) CORE_##name,
enum { CORE_FUNCTIONS(CORE_INDEX) CORE_COUNT };
#undef CORE_INDEX

extern const operation *const core_operations[CORE_COUNT];

_Static_assert((int)CORE_COUNT <= (int)MODULE_MOST_FUNCTIONS, "module_state has room for the names of all functions");

#ifdef BA_FAULTS /* faults.c counts the allocations between these two calls */
int enter_function(void);
void leave_function(const int *unused);
#define WITHIN_FUNCTION const int entered __attribute__((cleanup(leave_function))) = enter_function()
#else
#define WITHIN_FUNCTION (void)0
#endif

#define COUNT_OF(array) (sizeof(array) / sizeof *(array))

/* Stands before a py_<function> that is not in the table of operations, and lists its arguments in order. The first `required` ones must be given. */
#define TAKES(function, required, ...)                                                                                                               \
    static const argument rows_of_##function[] = {__VA_ARGS__};                                                                                      \
    const operation operation_##function = {#function, rows_of_##function, COUNT_OF(rows_of_##function), required}
#define TAKES_NOTHING(function) const operation operation_##function = {#function, NULL, 0, 0}

/* Declares values[count] and sorts the arguments of py_<name> into this array, or returns NULL from the function. */
#define SORT_ARGUMENTS(name, count)                                                                                                                  \
    WITHIN_FUNCTION;                                                                                                                                 \
    PyObject *values[count];                                                                                                                         \
    if (arg_sort(PyModule_GetState(module), CORE_##name, &operation_##name, args, nargs, kwnames, values) < 0) return NULL

#define NO_ARGUMENTS(name)                                                                                                                           \
    (void)module;                                                                                                                                    \
    WITHIN_FUNCTION;                                                                                                                                 \
    if (arg_sort(NULL, CORE_##name, &operation_##name, args, nargs, kwnames, NULL) < 0) return NULL

/* Runs a library call without the GIL. The arrays that it reads and writes must be held. */
#define WITHOUT_GIL(statement)                                                                                                                       \
    do {                                                                                                                                             \
        PyThreadState *const thread_state = PyEval_SaveThread();                                                                                     \
        statement;                                                                                                                                   \
        PyEval_RestoreThread(thread_state);                                                                                                          \
    } while (0)

/* Runs a library call that may take long without the GIL. In the main thread, where Python runs signal handlers, a handler that raises (as the
 * handler of Ctrl-C does) ends the call: the status is then BA_INTERRUPTED, and the handler's exception is set. */
#define INTERRUPTIBLE(status, call)                                                                                                                  \
    do {                                                                                                                                             \
        PyThreadState *thread_state = PyEval_SaveThread();                                                                                           \
        status = ba_set_poll(run_signal_handlers, &thread_state);                                                                                    \
        if (status == BA_OK) status = (call);                                                                                                        \
        ba_set_poll(NULL, NULL);                                                                                                                     \
        PyEval_RestoreThread(thread_state);                                                                                                          \
    } while (0)

/* The opened page tables in a capsule of open_page_tables(); NULL where `object` is something else. The capsule, to which the call has a reference,
 * owns the tables. */
const struct ba_page_tables *page_tables_of(PyObject *object);

/* A ba_poll_fn. `context` is the address of the PyThreadState * that PyEval_SaveThread() gave to this thread. */
int run_signal_handlers(void *context);

#endif
