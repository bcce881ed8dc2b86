/* The functions of the module blitz_attn._core. Those on paged caches are in ops_paged.c, those of native sparse attention in ops_nsa.c, all
 * others in ops.c, in the order below. _core.pyi says what each function takes and returns. */
#ifndef BA_PYTHON_OPS_H
#define BA_PYTHON_OPS_H

#include "python/args.h"

#define DECLARE_FUNCTION(name) PyObject *py_##name(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)

#ifdef BA_FAULTS /* faults.c counts the allocations that happen between these two calls */
int enter_function(void);
void leave_function(const int *unused);
#define WITHIN_FUNCTION const int entered __attribute__((cleanup(leave_function))) = enter_function()
#else
#define WITHIN_FUNCTION (void)0
#endif

/* Declares `values` and sorts the arguments of py_<name> into it, or returns NULL from the function. */
#define SORT_ARGUMENTS(name, count, required)                                                                                                        \
    WITHIN_FUNCTION;                                                                                                                                 \
    PyObject *values[count];                                                                                                                         \
    if (arg_sort(#name, names, count, required, args, nargs, kwnames, values) < 0) return NULL

#define NO_ARGUMENTS(name)                                                                                                                           \
    (void)module;                                                                                                                                    \
    WITHIN_FUNCTION;                                                                                                                                 \
    if (arg_sort(#name, NULL, 0, 0, args, nargs, kwnames, NULL) < 0) return NULL

/* Runs a library call without the GIL. The arrays that it reads and writes must be held. */
#define WITHOUT_GIL(statement)                                                                                                                       \
    do {                                                                                                                                             \
        PyThreadState *const thread_state = PyEval_SaveThread();                                                                                     \
        statement;                                                                                                                                   \
        PyEval_RestoreThread(thread_state);                                                                                                          \
    } while (0)

/* The same for a call that may take long. In the main thread, where Python runs signal handlers, a handler that raises (as that of Ctrl-C does)
 * ends the call: the status is then BA_INTERRUPTED, and the handler's exception is set. */
#define INTERRUPTIBLE(status, call)                                                                                                                  \
    do {                                                                                                                                             \
        PyThreadState *thread_state = PyEval_SaveThread();                                                                                           \
        ba_set_poll(run_signal_handlers, &thread_state);                                                                                             \
        status = (call);                                                                                                                             \
        ba_set_poll(NULL, NULL);                                                                                                                     \
        PyEval_RestoreThread(thread_state);                                                                                                          \
    } while (0)

/* A ba_poll_fn. `context` is the address of the PyThreadState * that PyEval_SaveThread() gave to this thread. */
int run_signal_handlers(void *context);

DECLARE_FUNCTION(block_sparse_attention);
DECLARE_FUNCTION(block_sparse_attention_backward);
DECLARE_FUNCTION(select_prefill);
DECLARE_FUNCTION(merge_states);
DECLARE_FUNCTION(open_page_tables);
DECLARE_FUNCTION(paged_attention);
DECLARE_FUNCTION(quest_metadata);
DECLARE_FUNCTION(select_blocks);
DECLARE_FUNCTION(block_means);
DECLARE_FUNCTION(block_means_backward);
DECLARE_FUNCTION(gate);
DECLARE_FUNCTION(gate_backward);
DECLARE_FUNCTION(nsa_select);
DECLARE_FUNCTION(read_integer);
DECLARE_FUNCTION(read_number);
DECLARE_FUNCTION(read_flag);
DECLARE_FUNCTION(get_num_threads);
DECLARE_FUNCTION(set_num_threads);
DECLARE_FUNCTION(num_threads_source);
DECLARE_FUNCTION(isa_levels);
DECLARE_FUNCTION(isa_detected);
DECLARE_FUNCTION(isa_active);
DECLARE_FUNCTION(isa_set_cap);
DECLARE_FUNCTION(isa_note);
DECLARE_FUNCTION(cpu_model);
DECLARE_FUNCTION(kernels);
DECLARE_FUNCTION(probe_flops);
DECLARE_FUNCTION(probe_tile_flops);
DECLARE_FUNCTION(probe_read);
#ifdef BA_FAULTS                    /* faults.c: for tests; not in _core.pyi */
DECLARE_FUNCTION(_fail_allocation); /* (n): the n-th allocation from here on fails; 0: none does. Returns the number since the last call */
DECLARE_FUNCTION(_fail_thread);     /* the same for threads that the pool starts */
DECLARE_FUNCTION(_live_blocks);     /* blocks that Python has allocated, up to a constant */
#endif

#endif
