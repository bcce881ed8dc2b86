/* Functions for tests, in builds with BA_FAULTS only: they make the n-th allocation, or the n-th start of a thread, fail. A hook in Python's
 * allocators counts allocations, but only while a function of this module runs: the interpreter and NumPy do not survive every failure (CPython 3.11
 * crashes in dict.items). The limited API offers no such hooks, so this file does not use it. */
#ifdef BA_FAULTS
#undef Py_LIMITED_API
#include <Python.h>

#include <stdatomic.h>

#include "core/faults.h"
#include "python/ops.h"

enum { DOMAINS = 2 }; /* allocators of objects, and of other memory that needs the GIL */

static const PyMemAllocatorDomain domains[DOMAINS] = {PYMEM_DOMAIN_MEM, PYMEM_DOMAIN_OBJ};
static PyMemAllocatorEx below[DOMAINS];
static _Atomic int64_t live_blocks;
static _Thread_local int depth; /* how many functions of the module run in this thread, nested in one another */

int enter_function(void) { return depth++; }
void leave_function(const int *unused) {
    (void)unused;
    depth--;
}

/* Counts an allocation that a function of the module makes, and says whether it must fail. */
static bool fails(void) { return depth > 0 && ba_fault(BA_FAULT_MEMORY); }

static void *count_block(void *block) {
    if (block != NULL) atomic_fetch_add(&live_blocks, 1);
    return block;
}

static void *hooked_malloc(void *context, size_t size) {
    PyMemAllocatorEx *allocator = context;
    return fails() ? NULL : count_block(allocator->malloc(allocator->ctx, size));
}

static void *hooked_calloc(void *context, size_t count, size_t size) {
    PyMemAllocatorEx *allocator = context;
    return fails() ? NULL : count_block(allocator->calloc(allocator->ctx, count, size));
}

static void *hooked_realloc(void *context, void *block, size_t size) {
    PyMemAllocatorEx *allocator = context;
    if (fails()) return NULL;
    void *moved = allocator->realloc(allocator->ctx, block, size);
    return block == NULL ? count_block(moved) : moved;
}

static void hooked_free(void *context, void *block) {
    PyMemAllocatorEx *allocator = context;
    if (block != NULL) atomic_fetch_sub(&live_blocks, 1);
    allocator->free(allocator->ctx, block);
}

/* Sets the hooks on the first call. They are never removed. Blocks that were allocated before the first call are freed through the hooks, too, so
 * live_blocks is right only up to a constant. */
static void hook_allocators(void) {
    static bool hooked;
    for (int i = 0; !hooked && i < DOMAINS; i++) {
        PyMem_GetAllocator(domains[i], &below[i]);
        PyMemAllocatorEx hook = {&below[i], hooked_malloc, hooked_calloc, hooked_realloc, hooked_free};
        PyMem_SetAllocator(domains[i], &hook);
    }
    hooked = true;
}

static PyObject *set_fault(ba_fault_kind kind, PyObject *number) {
    int64_t n;
    if (arg_int64(number, "n", &n) < 0) return NULL;
    PyObject *counted = PyLong_FromLongLong(ba_faults_set(kind, 0));
    ba_faults_set(kind, n); /* after the allocation of `counted`, which must not count */
    return counted;
}

TAKES(_fail_allocation, 1, {.name = "n"});
PyObject *py__fail_allocation(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    (void)module;
    SORT_ARGUMENTS(_fail_allocation, 1);
    hook_allocators();
    return set_fault(BA_FAULT_MEMORY, values[0]);
}

TAKES(_fail_thread, 1, {.name = "n"});
PyObject *py__fail_thread(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    (void)module;
    SORT_ARGUMENTS(_fail_thread, 1);
    return set_fault(BA_FAULT_THREAD, values[0]);
}

TAKES_NOTHING(_live_blocks);
PyObject *py__live_blocks(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    NO_ARGUMENTS(_live_blocks);
    hook_allocators();
    return PyLong_FromLongLong(atomic_load(&live_blocks));
}
#else
typedef int ba_no_fault_functions; /* ISO C forbids an empty file */
#endif
