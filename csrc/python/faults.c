/* Functions for tests, in a build with BA_FAULTS alone: the n-th allocation, or the n-th start of a thread, fails. Python's allocator is asked
 * through a hook, which is no part of the limited API. It looks at what is allocated while one of the module's functions runs, by the binding or
 * by what this calls: the interpreter and NumPy around them do not outlive every failure (CPython 3.11 crashes in dict.items). */
#ifdef BA_FAULTS
#undef Py_LIMITED_API
#include <Python.h>

#include <stdatomic.h>

#include "core/faults.h"
#include "python/ops.h"

enum { DOMAINS = 2 }; /* of objects, and of other memory that the GIL guards */

static const PyMemAllocatorDomain domains[DOMAINS] = {PYMEM_DOMAIN_MEM, PYMEM_DOMAIN_OBJ};
static PyMemAllocatorEx below[DOMAINS];
static _Atomic int64_t live_blocks;
static _Thread_local int depth; /* functions of the module that run */

int enter_function(void) { return depth++; }
void leave_function(const int *unused) {
    (void)unused;
    depth--;
}

static bool fails(void) { return depth > 0 && ba_fault(BA_FAULT_MEMORY); }

static void *note(void *block) {
    if (block != NULL) atomic_fetch_add(&live_blocks, 1);
    return block;
}

static void *hooked_malloc(void *context, size_t size) {
    PyMemAllocatorEx *allocator = context;
    return fails() ? NULL : note(allocator->malloc(allocator->ctx, size));
}

static void *hooked_calloc(void *context, size_t count, size_t size) {
    PyMemAllocatorEx *allocator = context;
    return fails() ? NULL : note(allocator->calloc(allocator->ctx, count, size));
}

static void *hooked_realloc(void *context, void *block, size_t size) {
    PyMemAllocatorEx *allocator = context;
    if (fails()) return NULL;
    void *moved = allocator->realloc(allocator->ctx, block, size);
    return block == NULL ? note(moved) : moved;
}

static void hooked_free(void *context, void *block) {
    PyMemAllocatorEx *allocator = context;
    if (block != NULL) atomic_fetch_sub(&live_blocks, 1);
    allocator->free(allocator->ctx, block);
}

/* Once, and for good: blocks that were allocated before it are freed through it. */
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
    ba_faults_set(kind, n); /* after what was allocated here */
    return counted;
}

PyObject *py__fail_allocation(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    static const char *const names[] = {"n"};
    (void)module;
    SORT_ARGUMENTS(_fail_allocation, 1, 1);
    hook_allocators();
    return set_fault(BA_FAULT_MEMORY, values[0]);
}

PyObject *py__fail_thread(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    static const char *const names[] = {"n"};
    (void)module;
    SORT_ARGUMENTS(_fail_thread, 1, 1);
    return set_fault(BA_FAULT_THREAD, values[0]);
}

PyObject *py__live_blocks(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    NO_ARGUMENTS(_live_blocks);
    hook_allocators();
    return PyLong_FromLongLong(atomic_load(&live_blocks));
}
#else
typedef int ba_no_fault_functions; /* a file is not to be empty */
#endif
