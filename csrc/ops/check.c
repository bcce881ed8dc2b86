#include "ops/check.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "core/pool.h"
#include "core/status.h"
#include "ops/problem.h"

ba_status ba_check_pointer(const char *name, const void *pointer) {
    return pointer ? BA_OK : ba_fail(BA_ERROR_VALUE, BA_ARG("%s") ": expected a pointer, got NULL", name);
}

ba_text ba_shape_text(const ba_tensor *t) {
    ba_text out;
    if (t->ndim < 0 || t->ndim > BA_MAX_DIMS) { /* dims holds no more axes than BA_MAX_DIMS */
        snprintf(out.chars, sizeof out.chars, "%d axes", t->ndim);
        return out;
    }
    size_t used = (size_t)snprintf(out.chars, sizeof out.chars, "(");
    for (int i = 0; i < t->ndim; i++) used += (size_t)snprintf(out.chars + used, sizeof out.chars - used, i ? ", %" PRId64 : "%" PRId64, t->dims[i]);
    snprintf(out.chars + used, sizeof out.chars - used, t->ndim == 1 ? ",)" : ")");
    return out;
}

ba_text ba_number_text(double number, ba_dtype dtype) {
    ba_text out;
    int digits = 6;
    do {
        snprintf(out.chars, sizeof out.chars, "%.*g", digits, isnan(number) ? (double)NAN : number); /* some NaN would print as -nan */
        const double read = strtod(out.chars, NULL);
        if (dtype == BA_FLOAT64 ? read == number : (float)read == (float)number) break;
    } while (isfinite(number) && ++digits <= 17);
    return out;
}

ba_status ba_check_extent(const char *name, const ba_tensor *t) {
    const int64_t size = ba_dtype_size(t->dtype);
    int64_t extent = size, elements = size;
    bool overflow = false, empty = false;
    if (t->ndim < 0 || t->ndim > BA_MAX_DIMS)
        return ba_fail(BA_ERROR_VALUE, BA_ARG("%s") ": expected at most %d axes, got %d", name, BA_MAX_DIMS, t->ndim);
    for (int i = 0; i < t->ndim; i++) {
        if (t->dims[i] < 0) return ba_fail(BA_ERROR_VALUE, BA_ARG("%s") ": expected no negative axis, got shape %s", name, ba_shape_text(t).chars);
        if (t->dims[i] == 0) empty = true;
        else overflow |= __builtin_mul_overflow(elements, t->dims[i], &elements); /* also in an empty array: drivers multiply its other axes */
    }
    for (int i = 0; i < t->ndim && !empty; i++) {
        int64_t reach;
        if (t->dims[i] == 1) continue; /* its stride is not used */
        overflow |= __builtin_mul_overflow(t->strides[i], t->dims[i] - 1, &reach) || __builtin_mul_overflow(reach, size, &reach) ||
                    reach == INT64_MIN || __builtin_add_overflow(extent, reach < 0 ? -reach : reach, &extent);
    }
    if (overflow) return ba_fail(BA_ERROR_VALUE, BA_ARG("%s") ": expected a size below 2^63 bytes, got shape %s", name, ba_shape_text(t).chars);
    if (!empty && !t->data) return ba_fail(BA_ERROR_VALUE, BA_ARG("%s") ": expected an array, got none", name);
    return BA_OK;
}

ba_status ba_check_float(const char *name, const ba_tensor *t) {
    if (ba_is_float(t->dtype)) return BA_OK;
    return ba_fail(BA_ERROR_TYPE, BA_ARG("%s") ": expected float32, float16, bfloat16 or float64, got %s", name, ba_dtype_name(t->dtype));
}

ba_status ba_check_cache_dtype(const char *name, const ba_tensor *t) {
    if (ba_is_float(t->dtype) || ba_is_quantised(t->dtype) || ba_has_cells(t->dtype)) return BA_OK;
    return ba_fail(BA_ERROR_TYPE, BA_ARG("%s") ": expected float32, float16, bfloat16, float64, int8, float8_e4m3, q8_0, q4_0 or q4_1, got %s", name,
                   ba_dtype_name(t->dtype));
}

ba_status ba_check_last_axis(const char *name, const ba_tensor *t) {
    const int last = t->ndim - 1;
    if (t->dims[last] <= 1 || t->strides[last] == 1) return BA_OK;
    return ba_fail(BA_ERROR_VALUE, BA_ARG("%s") ": expected a contiguous last axis, got stride %" PRId64 " elements", name, t->strides[last]);
}

bool ba_same_shape(const ba_tensor *a, const ba_tensor *b) {
    bool same = a->ndim == b->ndim;
    for (int i = 0; same && i < a->ndim; i++) same = a->dims[i] == b->dims[i];
    return same;
}

ba_status ba_check_same(const char *name, const ba_tensor *t, const ba_tensor *expected, bool contiguous_last_axis) {
    if (t->dtype != expected->dtype)
        return ba_fail(BA_ERROR_TYPE, BA_ARG("%s") ": expected dtype %s, got %s", name, ba_dtype_name(expected->dtype), ba_dtype_name(t->dtype));
    if (!ba_same_shape(t, expected))
        return ba_fail(BA_ERROR_VALUE, BA_ARG("%s") ": expected shape %s, got %s", name, ba_shape_text(expected).chars, ba_shape_text(t).chars);
    if (contiguous_last_axis) BA_TRY(ba_check_last_axis(name, t));
    return ba_check_extent(name, t);
}

ba_status ba_check_output(const char *name, const ba_tensor *t, const ba_tensor *expected, bool contiguous_last_axis) {
    BA_TRY(ba_check_same(name, t, expected, contiguous_last_axis));
    return ba_check_places(name, t);
}

/* Whether two elements may share memory. With the axes sorted by stride, that is so where the stride of an axis is no larger than the distance that
 * all axes of smaller strides span together. (The answer is true for every array that overlaps, and also for some exotic arrays that do not.) */
static bool overlaps_itself(const ba_tensor *t) {
    int64_t steps[BA_MAX_DIMS], reaches[BA_MAX_DIMS];
    int count = 0;
    for (int i = 0; i < t->ndim; i++) /* the strides of an array without elements are not checked, and may be any numbers */
        if (t->dims[i] == 0) return false;
    for (int i = 0; i < t->ndim; i++) {
        if (t->dims[i] == 1) continue;
        const int64_t step = t->strides[i] < 0 ? -t->strides[i] : t->strides[i];
        int at = count++;
        for (; at > 0 && steps[at - 1] > step; at--) {
            steps[at] = steps[at - 1];
            reaches[at] = reaches[at - 1];
        }
        steps[at] = step;
        reaches[at] = step * (t->dims[i] - 1);
    }
    int64_t inside = 0;
    for (int i = 0; i < count; i++) {
        if (steps[i] <= inside) return true;
        inside += reaches[i];
    }
    return false;
}

/* The stride of an axis in bytes, without its sign; 0 where the axis has length 1, since its stride has then not been checked. */
static int64_t step_bytes(const ba_tensor *t, int axis) { return llabs(ba_step(t, axis)) * ba_dtype_size(t->dtype); }

/* The lowest byte of an array that has elements. */
static uintptr_t lowest_byte(const ba_tensor *t) {
    uintptr_t low = (uintptr_t)t->data;
    for (int i = 0; i < t->ndim; i++)
        if (ba_step(t, i) < 0) low -= (uintptr_t)((t->dims[i] - 1) * step_bytes(t, i));
    return low;
}

/* The number of bytes that one element and all axes whose steps are no multiples of `step` span together. Where `step` is 0, all axes count. */
static int64_t span_within(const ba_tensor *t, int64_t step) {
    int64_t span = ba_dtype_size(t->dtype);
    for (int i = 0; i < t->ndim; i++)
        if (step == 0 || step_bytes(t, i) % step != 0) span += (t->dims[i] - 1) * step_bytes(t, i);
    return span;
}

bool ba_are_apart(const ba_tensor *a, const ba_tensor *b) {
    for (int i = 0; i < a->ndim; i++)
        if (a->dims[i] == 0) return true;
    for (int i = 0; i < b->ndim; i++)
        if (b->dims[i] == 0) return true;
    if (lowest_byte(b) < lowest_byte(a)) return ba_are_apart(b, a);
    const int64_t distance = (int64_t)(lowest_byte(b) - lowest_byte(a));
    if (distance >= span_within(a, 0)) return true;
    for (int i = 0; i < a->ndim + b->ndim; i++) {
        const int64_t step = i < a->ndim ? step_bytes(a, i) : step_bytes(b, i - a->ndim);
        if (step == 0) continue;
        const int64_t begin = distance % step;
        if (begin >= span_within(a, step) && begin + span_within(b, step) <= step) return true;
    }
    return false;
}

ba_status ba_check_places(const char *name, const ba_tensor *t) {
    if (overlaps_itself(t))
        return ba_fail(BA_ERROR_VALUE, BA_ARG("%s") ": expected an array whose elements each have their own memory, got one that overlaps itself",
                       name);
    return BA_OK;
}

ba_status ba_check_cumulative(const char *name, const int64_t *cu, int64_t batch, int64_t tokens, int64_t *longest) {
    if (!cu)
        return ba_fail(BA_ERROR_VALUE, BA_ARG("%s") ": expected cumulative lengths (B + 1,) from 0 to %" PRId64 " with packed arrays, got none", name,
                       tokens);
    if (batch < 0) return ba_fail(BA_ERROR_VALUE, BA_ARG("%s") ": expected at least one number, got none", name);
    if (cu[0] != 0) return ba_fail(BA_ERROR_VALUE, BA_ARG("%s") ": expected 0 at [0], got %" PRId64, name, cu[0]);
    *longest = 0;
    for (int64_t b = 0; b < batch; b++) {
        if (cu[b + 1] < cu[b])
            return ba_fail(BA_ERROR_VALUE, BA_ARG("%s") ": expected rising numbers, got %" PRId64 " after %" PRId64 " at [%" PRId64 "]", name,
                           cu[b + 1], cu[b], b + 1);
        *longest = ba_max(*longest, cu[b + 1] - cu[b]);
    }
    if (cu[batch] != tokens)
        return ba_fail(BA_ERROR_VALUE, BA_ARG("%s") ": expected the last number to be the token count %" PRId64 ", got %" PRId64, name, tokens,
                       cu[batch]);
    return BA_OK;
}

ba_status ba_check_lengths(const char *name, const int64_t *lens, int64_t batch, int64_t limit) {
    for (int64_t b = 0; lens && b < batch; b++)
        if (lens[b] < 0 || lens[b] > limit)
            return ba_fail(BA_ERROR_VALUE, BA_ARG("%s") ": expected lengths from 0 to %" PRId64 ", got %" PRId64 " at [%" PRId64 "]", name, limit,
                           lens[b], b);
    return BA_OK;
}

/* The largest number that a scale or a cap may be. Its reciprocal is the smallest cap. */
static double most_of(ba_dtype q_dtype) { return q_dtype == BA_FLOAT64 ? 1e300 : 1e37; }

ba_status ba_take_scale(ba_dtype q_dtype, int64_t head_dim, double scale, double *taken) {
    *taken = isnan(scale) ? ba_default_scale(head_dim) : scale;
    if (isinf(scale)) return ba_fail(BA_ERROR_VALUE, BA_ARG("scale") ": expected a finite number, got %s", ba_number_text(scale, BA_FLOAT64).chars);
    const double most = most_of(q_dtype);
    if (fabs(*taken) <= most) return BA_OK;
    return ba_fail(BA_ERROR_VALUE, BA_ARG("scale") ": expected a number from %g to %g with a %s " BA_ARG("q") ", got %s", -most, most,
                   ba_dtype_name(q_dtype), ba_number_text(scale, BA_FLOAT64).chars);
}

ba_status ba_check_softcap(ba_dtype q_dtype, double softcap) {
    if (!isfinite(softcap) || softcap < 0)
        return ba_fail(BA_ERROR_VALUE, BA_ARG("softcap") ": expected a positive finite number, or 0 for none, got %s",
                       ba_number_text(softcap, BA_FLOAT64).chars);
    const double most = most_of(q_dtype);
    if (softcap == 0 || (softcap >= 1 / most && softcap <= most)) return BA_OK;
    return ba_fail(BA_ERROR_VALUE, BA_ARG("softcap") ": expected a number from %g to %g with a %s " BA_ARG("q") ", or 0 for none, got %s", 1 / most,
                   most, ba_dtype_name(q_dtype), ba_number_text(softcap, BA_FLOAT64).chars);
}

ba_status ba_check_threads(int num_threads) {
    if (num_threads >= 0 && num_threads <= BA_MAX_THREADS) return BA_OK;
    const char *or_default = num_threads < 0 ? ", or 0 for the default" : ""; /* Python, which refuses 0, passes no negative number */
    return ba_fail(BA_ERROR_VALUE, BA_ARG("num_threads") ": expected 1 to %d%s, got %d", BA_MAX_THREADS, or_default, num_threads);
}

ba_status ba_check_begins(const int64_t *q_begin, int64_t batch) {
    for (int64_t b = 0; q_begin && b < batch; b++)
        if (q_begin[b] < -BA_MOST_TOKENS || q_begin[b] > BA_MOST_TOKENS)
            return ba_fail(BA_ERROR_VALUE, BA_ARG("q_begin") ": expected token numbers from %d to %d, got %" PRId64 " at [%" PRId64 "]",
                           -BA_MOST_TOKENS, BA_MOST_TOKENS, q_begin[b], b);
    return BA_OK;
}

ba_status ba_check_kv_ranges(const ba_tensor *t, int64_t batch, int64_t queries, ba_tensor *ranges) {
    const bool batched = t->ndim == 3 && batch >= 0 && (t->dims[0] == 1 || t->dims[0] == batch);
    if (!ba_given(t)) return BA_OK;
    if (t->dtype != BA_INT32 && t->dtype != BA_INT64)
        return ba_fail(BA_ERROR_TYPE, BA_ARG("kv_ranges") ": expected int32 or int64, got %s", ba_dtype_name(t->dtype));
    if ((!batched && t->ndim != 2) || t->dims[t->ndim - 2] != queries || t->dims[t->ndim - 1] != 2) {
        if (batch < 0)
            return ba_fail(BA_ERROR_VALUE, BA_ARG("kv_ranges") ": expected shape (%" PRId64 ", 2), got %s", queries, ba_shape_text(t).chars);
        return ba_fail(BA_ERROR_VALUE, BA_ARG("kv_ranges") ": expected shape (%" PRId64 ", %" PRId64 ", 2) or (%" PRId64 ", 2), got %s", batch,
                       queries, queries, ba_shape_text(t).chars);
    }
    BA_TRY(ba_check_extent("kv_ranges", t));
    *ranges = (ba_tensor){.data = t->data,
                          .dtype = t->dtype,
                          .ndim = 3,
                          .dims = {batched ? t->dims[0] : 1, queries, 2},
                          .strides = {batched ? ba_step(t, 0) : 0, ba_step(t, t->ndim - 2), ba_step(t, t->ndim - 1)}};
    return BA_OK;
}

/* The shapes that a mask may have, for a sentence: (2 or 1, 8 or 1, 1, 4096 or 1). */
static ba_text mask_shape_text(const int64_t sizes[4]) {
    ba_text out;
    size_t used = 0;
    for (int i = 0; i < 4; i++) /* four numbers of 19 digits fit */
        used += (size_t)snprintf(out.chars + used, sizeof out.chars - used, "%s%" PRId64 "%s%s", i ? ", " : "(", sizes[i],
                                 sizes[i] == 1 ? "" : " or 1", i == 3 ? ")" : "");
    return out;
}

ba_status ba_check_attn_mask(const ba_tensor *t, const int64_t sizes[4], bool longer, ba_tensor *mask) {
    if (!ba_given(t)) return BA_OK;
    if (t->dtype != BA_BOOL && !ba_is_float(t->dtype))
        return ba_fail(BA_ERROR_TYPE, BA_ARG("attn_mask") ": expected bool, float32, float16, bfloat16 or float64, got %s", ba_dtype_name(t->dtype));
    bool fits = t->ndim >= 0 && t->ndim <= 4;
    const ba_tensor four = fits ? ba_four_axes(t) : (ba_tensor){0};
    for (int i = 0; fits && i < 4; i++) fits = four.dims[i] == 1 || four.dims[i] == sizes[i] || (longer && i >= 2 && four.dims[i] > sizes[i]);
    if (!fits)
        return ba_fail(BA_ERROR_VALUE, BA_ARG("attn_mask") ": expected shape %s%s, got %s", mask_shape_text(sizes).chars,
                       longer ? ", or more queries and keys" : "", ba_shape_text(t).chars);
    BA_TRY(ba_check_extent("attn_mask", t));
    *mask = four;
    ba_drop_unused_strides(mask);
    return BA_OK;
}
