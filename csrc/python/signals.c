/* Ctrl-C within a call: lets Python's signal handlers run while the library works. INTERRUPTIBLE (ops.h) makes run_signal_handlers the poll function,
 * which core/pool.c calls about twenty times a second on the calling thread. Where a handler raises, the loops of all drivers stop (ba_stopped), the
 * call returns BA_INTERRUPTED, and the handler's exception reaches the caller. */
#if defined(__linux__)
#define _GNU_SOURCE /* syscall */
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__APPLE__)
#include <pthread.h>
#endif
#include "python/ops.h"

/* Whether the calling thread is the one that the program started with. Python runs signal handlers in that thread only. */
static int on_main_thread(void) {
#if defined(__linux__)
    return syscall(SYS_gettid) == getpid();
#elif defined(__APPLE__)
    return pthread_main_np();
#else
    return 1;
#endif
}

int run_signal_handlers(void *context) {
    PyThreadState **const thread_state = context;
    if (!on_main_thread()) return 0;
    PyEval_RestoreThread(*thread_state);
    const int raised = PyErr_CheckSignals() < 0;
    *thread_state = PyEval_SaveThread();
    return raised;
}
