/* The checks of single arguments that all operations share. In each check, `name` is the argument's name in the sentence of a refusal. Internal. */
#ifndef BA_OPS_CHECK_H
#define BA_OPS_CHECK_H

#include "blitz_attn.h"
#include "core/common.h"

static inline bool ba_given(const ba_tensor *t) { return t->data != NULL || t->ndim != 0; }
static inline bool ba_is_float(ba_dtype dtype) { return dtype == BA_FLOAT32 || dtype == BA_FLOAT16 || dtype == BA_BFLOAT16 || dtype == BA_FLOAT64; }
/* Dtypes that need scales beside their numbers. */
static inline bool ba_is_quantised(ba_dtype dtype) { return dtype == BA_INT8 || dtype == BA_FLOAT8_E4M3; }
/* Formats of rows that consist of cells, which hold their factors themselves. */
static inline bool ba_has_cells(ba_dtype dtype) { return dtype >= BA_Q8_0 && dtype <= BA_Q4_1; }

/* The dtype of "reals", in which a dtype's sums are computed: float64 for float64, float32 for all others. */
static inline ba_dtype ba_real_of(ba_dtype dtype) { return dtype == BA_FLOAT64 ? BA_FLOAT64 : BA_FLOAT32; }

/* Refuses NULL where a function of the C API takes a pointer to a struct. */
ba_status ba_check_pointer(const char *name, const void *pointer);

/* A tensor's shape as text, for a sentence: (2, 8, 4096, 64). */
typedef struct ba_text {
    char chars[128];
} ba_text;
ba_text ba_shape_text(const ba_tensor *t);

/* A number as text, for a sentence. The number is rounded to six digits, or to more where six would be read as another number of `dtype`. */
ba_text ba_number_text(double number, ba_dtype dtype);

/* Checks that the array has at most BA_MAX_DIMS axes, that no axis is negative, that data is given unless the array is empty, and that its size
 * and its span are below 2^63 bytes, so that no later product of dims and strides overflows. */
ba_status ba_check_extent(const char *name, const ba_tensor *t);

/* Check that the dtype is a float dtype, or, for a cache, a float dtype, a quantised dtype or a dtype with cells. */
ba_status ba_check_float(const char *name, const ba_tensor *t);
ba_status ba_check_cache_dtype(const char *name, const ba_tensor *t);

/* Checks that the last axis, which must exist, is contiguous. */
ba_status ba_check_last_axis(const char *name, const ba_tensor *t);

/* The stride of an axis, in elements. 0 where the axis has length 1 or the array is empty: the stride may then be any number, and drivers must not
 * compute with it. */
static inline int64_t ba_step(const ba_tensor *t, int axis) {
    bool empty = false;
    for (int i = 0; i < t->ndim; i++) empty |= t->dims[i] == 0;
    return !empty && t->dims[axis] > 1 ? t->strides[axis] : 0;
}
/* Replaces the stride of each axis by ba_step(). Strides that are not used become 0: they have not been checked, and could overflow an offset. */
static inline void ba_drop_unused_strides(ba_tensor *t) {
    for (int i = 0; i < t->ndim; i++) t->strides[i] = ba_step(t, i);
}

/* An array of at most four axes, with its missing axes put in front, with length 1. */
static inline ba_tensor ba_four_axes(const ba_tensor *t) {
    ba_tensor four = {.data = t->data, .dtype = t->dtype, .ndim = BA_MAX_DIMS, .dims = {1, 1, 1, 1}};
    for (int i = 0; i < t->ndim; i++) {
        four.dims[BA_MAX_DIMS - t->ndim + i] = t->dims[i];
        four.strides[BA_MAX_DIMS - t->ndim + i] = t->strides[i];
    }
    return four;
}

bool ba_same_shape(const ba_tensor *a, const ba_tensor *b);

/* Checks that an array has the dtype and the shape of `expected`, which follow from other arguments. Where `contiguous_last_axis` is set, its last
 * axis must be contiguous, too. */
ba_status ba_check_same(const char *name, const ba_tensor *t, const ba_tensor *expected, bool contiguous_last_axis);

/* ba_check_same() and ba_check_places(), for an output. */
ba_status ba_check_output(const char *name, const ba_tensor *t, const ba_tensor *expected, bool contiguous_last_axis);

/* Whether two arrays share no memory. Two arrays may interleave, as the keys and the values of one array do. They are found apart if, modulo the step
 * of some axis, no address in one equals an address in the other. (The answer is false for all arrays that share memory, and also for some exotic
 * arrays that share none.) */
bool ba_are_apart(const ba_tensor *a, const ba_tensor *b);

/* Checks that no two elements of an output share memory. Call it after ba_check_extent(), which bounds the products of strides and lengths. */
ba_status ba_check_places(const char *name, const ba_tensor *t);

/* Checks cumulative lengths: batch + 1 numbers that never fall, from 0 to `tokens`. Sets *longest to the length of the longest sequence. */
ba_status ba_check_cumulative(const char *name, const int64_t *cu, int64_t batch, int64_t tokens, int64_t *longest);

/* Checks the numbers of valid tokens of `batch` entries, each of which has room for `limit` tokens. Accepts NULL. */
ba_status ba_check_lengths(const char *name, const int64_t *lens, int64_t batch, int64_t limit);

/* Check the scale and the softcap (0: none) of a call whose queries have the dtype q_dtype. Sums are made in float, or, for float64, in double. The
 * scale, the softcap and the reciprocal of the softcap must not overflow in these sums. *taken becomes the scale, or, where that is NaN, the default
 * for the head dim. */
ba_status ba_take_scale(ba_dtype q_dtype, int64_t head_dim, double scale, double *taken);
ba_status ba_check_softcap(ba_dtype q_dtype, double softcap);

/* Checks the num_threads of a call: 0 stands for the default. */
ba_status ba_check_threads(int num_threads);

/* Checks the token numbers of the first queries of `batch` sequences. Accepts NULL. */
ba_status ba_check_begins(const int64_t *q_begin, int64_t batch);

/* Checks the kv_ranges of a call, of shape (batch or 1, queries, 2) or (queries, 2); with batch -1, only the second shape is accepted. Sets *ranges
 * to them, with three axes and stride 0 where an axis has length 1. Leaves *ranges as it is where no kv_ranges are given. The entries may be any
 * numbers. */
ba_status ba_check_kv_ranges(const ba_tensor *t, int64_t batch, int64_t queries, ba_tensor *ranges);

/* Checks the attn_mask of a call, of shape (batch or 1, heads or 1, queries or 1, keys or 1), of which the first axes may be missing. Sets *mask to
 * it, with all four axes and stride 0 where an axis has length 1. Leaves *mask as it is where no attn_mask is given. `longer`: the last two axes may
 * be longer. */
ba_status ba_check_attn_mask(const ba_tensor *t, const int64_t sizes[4], bool longer, ba_tensor *mask);

#endif
