/* The rows of several heads that a driver prefetches. Internal. */
#ifndef BA_OPS_PREFETCH_HEADS_H
#define BA_OPS_PREFETCH_HEADS_H

#include "kernels/kernels.h"

/* Whether the heads of a token lie side by side, or nearly. `bytes` is the length of one head's row. All three numbers are in the same unit, bytes or
 * elements. */
static inline bool ba_heads_are_beside(int64_t head_step, int64_t row_step, int64_t bytes) {
    return head_step >= bytes && head_step <= 2 * bytes && head_step < row_step;
}

/* A request to prefetch `bytes` bytes of each of `count` rows, from `offset` on, in a single pass. */
static inline ba_prefetch_rows ba_prefetch_once(const void *const *rows, int64_t count, int64_t offset, int64_t bytes) {
    ba_prefetch_rows wanted = {.rows = rows, .count = count, .offset = offset, .bytes = bytes};
    for (int i = 1; i < BA_PREFETCH_PASSES; i++) wanted.skip[i] = -1;
    return wanted;
}

/* The share of the next rows that head number `head` prefetches. `heads` heads are scored or attended one after the other, and `rows` are the next
 * rows of head 0. Where the heads of a token lie side by side, each head prefetches some tokens of all heads, so that all heads together prefetch in
 * the order of memory; else each head prefetches its own rows. The steps, and the length `bytes` of a head's row, are in bytes. */
static inline ba_prefetch_rows ba_rows_ahead(int64_t head_step, int64_t row_step, int64_t heads, int64_t head, int64_t bytes, const void *const *rows,
                                             int64_t count) {
    if (!ba_heads_are_beside(head_step, row_step, bytes)) return ba_prefetch_once(rows, count, head * head_step, bytes);
    const int64_t begin = count * head / heads, end = count * (head + 1) / heads;
    return ba_prefetch_once(rows + begin, end - begin, 0, (heads - 1) * head_step + bytes);
}

#endif
