/* How drivers divide and access their scratch memory. Internal.
 *
 * The functions that lay out scratch memory hand out the parts of the block at `base` and return its size; with base NULL, only the size counts. They
 * are called once to learn the size, and again with the memory. A call's block holds one block for each worker, which is laid out anew for each
 * item. */
#ifndef BA_OPS_SCRATCH_H
#define BA_OPS_SCRATCH_H

#include "core/arena.h"
#include "core/common.h"
#include "core/guard.h"
#include "core/status.h"
#include "kernels/kernels.h"

/* Gets a block for a call, to which it belongs until ba_arena_release(). */
static inline ba_status ba_get_scratch(int64_t bytes, char **memory) {
    *memory = ba_arena_get((size_t)bytes);
    return *memory ? BA_OK : ba_fail(BA_ERROR_MEMORY, "scratch: expected %lld bytes of memory, got none", (long long)bytes);
}

/* Hands out the next part of the block at `base`, aligned to BA_ALIGN, and adds its size to *used. With base NULL it returns NULL and only adds up.
 * Under AddressSanitizer, a guard follows the `bytes` of each part. */
static inline void *ba_take(char *base, int64_t *used, int64_t bytes) {
    char *part = base ? base + *used : NULL;
    const int64_t room = ba_round_up(bytes, BA_ALIGN) + BA_GUARD;
    if (part) ba_guard(part, bytes, room);
    *used += room;
    return part;
}

/* The same, but where tuning has a page_offset, the part begins `offset` bytes behind the beginning of a page. `base` must begin a page then. */
static inline void *ba_take_in_page(char *base, int64_t *used, int64_t bytes, int64_t page_offset, int64_t offset) {
    if (page_offset) *used = ba_round_up(ba_max(0, *used - offset), BA_PAGE) + offset;
    return ba_take(base, used, bytes);
}

/* The highest level up to this one whose family has the separate kernels `scores` and `softmax`: some families have the fused kernel only. */
static inline ba_isa ba_level_with_parts(ba_isa level, ba_dtype real) {
    while (level > BA_ISA_PORTABLE && !ba_kernels_at(level)->vector[real]->panel->scores[0]) level--;
    return level;
}

/* Element `at` of an array of reals: float where real_size is 4, else double. */
static inline double ba_get_real(const void *data, int64_t at, int64_t real_size) {
    return real_size == 4 ? (double)((const float *)data)[at] : ((const double *)data)[at];
}

static inline void ba_set_real(void *data, int64_t at, double value, int64_t real_size) {
    if (real_size == 4) ((float *)data)[at] = (float)value;
    else ((double *)data)[at] = value;
}

/* Whether the heads of a token lie side by side, or nearly. All three numbers are in the same unit, bytes or elements; `bytes` is one head's row. */
static inline bool ba_heads_are_beside(int64_t head_step, int64_t row_step, int64_t bytes) {
    return head_step >= bytes && head_step <= 2 * bytes && head_step < row_step;
}

/* The share of the next rows that head number `head` prefetches, where `heads` heads are scored or attended one after the other and `rows` are the
 * next rows of head 0. Where the heads of a token lie side by side, each head prefetches some tokens of all heads, so that all heads together
 * prefetch in the order of memory; else each prefetches its own rows. Steps, and `bytes` of a head's row, are in bytes. */
static inline ba_prefetch_rows ba_rows_ahead(int64_t head_step, int64_t row_step, int64_t heads, int64_t head, int64_t bytes, const void *const *rows,
                                             int64_t count) {
    if (!ba_heads_are_beside(head_step, row_step, bytes)) return (ba_prefetch_rows){rows, count, head * head_step, bytes, {0, -1, -1}};
    const int64_t begin = count * head / heads, end = count * (head + 1) / heads;
    return (ba_prefetch_rows){rows + begin, end - begin, 0, (heads - 1) * head_step + bytes, {0, -1, -1}};
}

/* What m is before a query has seen a key, minus the largest finite number, so that differences of two m are never NaN. */
static inline double ba_initial_m(int64_t real_size) { return real_size == 4 ? -0x1.fffffep127 : -0x1.fffffffffffffp1023; }

#define BA_DEFINE_ADD(real)                                                                                                                          \
    static inline void ba_add_##real(real *restrict to, const real *restrict from, int64_t n) {                                                      \
        for (int64_t i = 0; i < n; i++) to[i] += from[i];                                                                                            \
    }
BA_DEFINE_ADD(float)
BA_DEFINE_ADD(double)
#undef BA_DEFINE_ADD

static inline void ba_add_reals(void *to, const void *from, int64_t n, int64_t real_size) {
    if (real_size == 4) ba_add_float(to, from, n);
    else ba_add_double(to, from, n);
}

#endif
