#include "core/status.h"

#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>

#include "core/thread.h"

static _Atomic bool refused; /* whether some thread found no memory for a sentence */

static const char *without_sentence(const ba_thread *thread) {
    return !thread && atomic_load_explicit(&refused, memory_order_relaxed) ? BA_NO_THREAD : "no error";
}

const char *ba_last_error(void) {
    const ba_thread *const thread = ba_thread_find();
    return thread && thread->error[0] ? thread->error : without_sentence(thread);
}

const char *ba_last_marked_error(void) {
    const ba_thread *const thread = ba_thread_find();
    return thread && thread->error[0] ? thread->marked : without_sentence(thread);
}

ba_status ba_fail(ba_status code, const char *format, ...) {
    ba_thread *const thread = ba_thread_make();
    if (!thread) {
        atomic_store_explicit(&refused, true, memory_order_relaxed);
        return BA_ERROR_MEMORY;
    }
    va_list args;
    va_start(args, format);
    vsnprintf(thread->marked, sizeof thread->marked, format, args);
    va_end(args);
    size_t length = 0;
    char *from = thread->marked;
    for (; *from && length < sizeof thread->error - 1; from++)
        if (*from != BA_ARG_BEGIN && *from != BA_ARG_END) thread->error[length++] = *from;
    thread->error[length] = *from = '\0'; /* both sentences are cut at the same place */
    return code;
}

int64_t ba_dtype_size(ba_dtype dtype) {
    switch (dtype) {
    case BA_FLOAT32:
    case BA_INT32: return 4;
    case BA_FLOAT64:
    case BA_INT64: return 8;
    case BA_FLOAT16:
    case BA_BFLOAT16:
    case BA_UINT16:
    case BA_INT16: return 2;
    case BA_INT8:
    case BA_FLOAT8_E4M3:
    case BA_BOOL:
    case BA_Q8_0:
    case BA_Q4_0:
    case BA_Q4_1: return 1;
    default: return 0;
    }
}

ba_tensor ba_contiguous(const void *data, ba_dtype dtype, int ndim, const int64_t *dims) {
    ba_tensor t = {.data = (void *)(uintptr_t)data, .dtype = dtype, .ndim = ndim};
    uint64_t stride = 1; /* unsigned: the sizes have not been checked yet, and their product may overflow */
    for (int i = ndim - 1; i >= 0 && ndim <= BA_MAX_DIMS; stride *= (uint64_t)dims[i--]) {
        t.dims[i] = dims[i];
        t.strides[i] = (int64_t)stride;
    }
    return t;
}

const char *ba_dtype_name(ba_dtype dtype) {
    static const char *const names[BA_DTYPE_COUNT] = {"float32", "float16", "bfloat16",    "float64", "uint16", "int16", "int32",
                                                      "int64",   "int8",    "float8_e4m3", "bool",    "q8_0",   "q4_0",  "q4_1"};
    return (unsigned)dtype < BA_DTYPE_COUNT ? names[dtype] : "unknown";
}

const char *ba_layout_name(ba_layout layout) {
    static const char *const names[] = {"BNSD", "BSND", "BSH", "TND"};
    return (unsigned)layout < 4 ? names[layout] : "unknown";
}
