/* What the argument checkers of all operations share. Internal. */
#ifndef BA_OPS_CHECK_H
#define BA_OPS_CHECK_H

#include "blitz_attn.h"
#include "core/common.h"

static inline bool ba_given(const ba_tensor *t) { return t->data != NULL || t->ndim != 0; }
static inline bool ba_is_float(ba_dtype dtype) { return dtype == BA_FLOAT32 || dtype == BA_FLOAT16 || dtype == BA_BFLOAT16 || dtype == BA_FLOAT64; }

/* A shape as a person writes it, for a sentence: (2, 8, 4096, 64). */
typedef struct ba_text {
    char chars[128];
} ba_text;
ba_text ba_shape_text(const ba_tensor *t);

/* No axis is negative, and every byte of the array has an address: nothing later can overflow. */
ba_status ba_check_extent(const char *name, const ba_tensor *t);

/* Elements from one place of an axis to the next: 0 where there is no next one, since a stride may be any number there. */
static inline int64_t ba_step(const ba_tensor *t, int axis) {
    bool empty = false;
    for (int i = 0; i < t->ndim; i++) empty |= t->dims[i] == 0;
    return !empty && t->dims[axis] > 1 ? t->strides[axis] : 0;
}

/* The dtype and shape that the other arguments ask of an array, and on request that its last axis is contiguous. */
ba_status ba_check_same(const char *name, const ba_tensor *t, const ba_tensor *expected, bool contiguous_last_axis);

/* An output's dtype and shape, and that each element has a place of its own. */
ba_status ba_check_output(const char *name, const ba_tensor *t, const ba_tensor *expected, bool contiguous_last_axis);

/* That alone, for outputs whose shape other arguments follow. */
ba_status ba_check_places(const char *name, const ba_tensor *t);

/* Cumulative lengths: batch + 1 numbers that rise from 0 to `tokens`. Sets *longest to the longest sequence. */
ba_status ba_check_cumulative(const char *name, const int64_t *cu, int64_t batch, int64_t tokens, int64_t *longest);

#endif
