#include "core/status.h"

#include <stdarg.h>
#include <stdio.h>

static _Thread_local char last_error[512] = "no error";

const char *ba_last_error(void) { return last_error; }

ba_status ba_fail(ba_status code, const char *format, ...) {
    va_list args;
    va_start(args, format);
    vsnprintf(last_error, sizeof last_error, format, args);
    va_end(args);
    return code;
}

int64_t ba_dtype_size(ba_dtype dtype) {
    switch (dtype) {
    case BA_FLOAT32:
    case BA_INT32: return 4;
    case BA_FLOAT64:
    case BA_INT64: return 8;
    case BA_INT8:
    case BA_FLOAT8_E4M3:
    case BA_BOOL: return 1;
    default: return 2;
    }
}

const char *ba_dtype_name(ba_dtype dtype) {
    static const char *const names[BA_DTYPE_COUNT] = {"float32", "float16", "bfloat16", "float64",     "uint16", "int16",
                                                      "int32",   "int64",   "int8",     "float8_e4m3", "bool"};
    return (unsigned)dtype < BA_DTYPE_COUNT ? names[dtype] : "unknown";
}

const char *ba_layout_name(ba_layout layout) {
    static const char *const names[] = {"BNSD", "BSND", "BSH", "TND"};
    return (unsigned)layout < 4 ? names[layout] : "unknown";
}
