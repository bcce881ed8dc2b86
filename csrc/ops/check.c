#include "ops/check.h"

#include <inttypes.h>
#include <stdio.h>

#include "core/status.h"

ba_text ba_shape_text(const ba_tensor *t) {
    ba_text out;
    size_t used = (size_t)snprintf(out.chars, sizeof out.chars, "(");
    for (int i = 0; i < t->ndim; i++)
        used += (size_t)snprintf(out.chars + used, sizeof out.chars - used, i ? ", %" PRId64 : "%" PRId64, t->dims[i]);
    snprintf(out.chars + used, sizeof out.chars - used, t->ndim == 1 ? ",)" : ")");
    return out;
}

ba_status ba_check_extent(const char *name, const ba_tensor *t) {
    int64_t extent = ba_dtype_size(t->dtype), elements = extent;
    bool overflow = false, empty = false;
    for (int i = 0; i < t->ndim; i++) {
        if (t->dims[i] < 0) return ba_fail(BA_ERROR_VALUE, "%s: expected no negative axis, got shape %s", name, ba_shape_text(t).chars);
        if (t->dims[i] == 0) empty = true;
    }
    for (int i = 0; i < t->ndim && !empty; i++) {
        int64_t step = t->strides[i] < 0 ? -t->strides[i] : t->strides[i], reach;
        overflow |= __builtin_mul_overflow(elements, t->dims[i], &elements);
        overflow |= __builtin_mul_overflow(step, t->dims[i] - 1, &reach) || __builtin_mul_overflow(reach, ba_dtype_size(t->dtype), &reach) ||
                    __builtin_add_overflow(extent, reach, &extent);
    }
    if (overflow) return ba_fail(BA_ERROR_VALUE, "%s: expected a size below 2^63 bytes, got shape %s", name, ba_shape_text(t).chars);
    if (!empty && !t->data) return ba_fail(BA_ERROR_VALUE, "%s: expected an array, got none", name);
    return BA_OK;
}
