/* Gathers the rows of K and V of one head, which lie among the rows of other heads, so that a few kernel attends rows that lie side by side.
 *
 * In a token-major cache, the rows of all other heads lie between one row of a head and the next. So a head's rows fall into few sets of the
 * first-level cache, where they evict each other, and the hardware's prefetcher does not follow short rows at such distances. A loop that only copies
 * rows keeps more cache misses in flight than the kernel does, and the most if it takes rows of K and V in turns. The kernel then reads contiguous
 * memory that is in cache. */
#ifndef BA_GATHER_H
#define BA_GATHER_H

#include <string.h>

#include "kernels/traits.h"
#include "kernels/prefetch.h"

/* Copies the row `from` of `bytes` bytes, and prefetches the row `upcoming`, which will be copied BA_GATHER_DISTANCE rows later. The distance is so
 * short that the row goes into L1 on any core. */
static inline __attribute__((always_inline)) void ba_gather_row(char *to, const char *from, const char *upcoming, const int64_t bytes) {
    int64_t at = 0;
#pragma GCC unroll 4
    for (; at + BA_LINE_BYTES <= bytes; at += BA_LINE_BYTES) {
        __builtin_prefetch(upcoming + at, 0, 3);
        memcpy(to + at, from + at, BA_LINE_BYTES);
    }
    if (at == bytes) return;
    __builtin_prefetch(upcoming + at, 0, 3);
    memcpy(to + at, from + at, (size_t)(bytes - at));
}

static inline __attribute__((always_inline)) void ba_gather_of(const ba_chunk *chunk, const int64_t k_bytes, const int64_t v_bytes,
                                                               const void **k_rows, const void **v_rows) {
    const int64_t keys = chunk->keys, k_offset = chunk->k_offset, v_offset = chunk->v_offset;
    const char *const *k_from = (const char *const *)chunk->k_rows, *const *v_from = (const char *const *)chunk->v_rows;
    char *k = chunk->gathered, *v = k + keys * k_bytes;
    for (int64_t j = 0; j < keys; j++, k += k_bytes, v += v_bytes) {
        const int64_t upcoming = ba_min(j + BA_GATHER_DISTANCE, keys - 1);
        ba_gather_row(k, k_from[j] + k_offset, k_from[upcoming] + k_offset, k_bytes);
        ba_gather_row(v, v_from[j] + v_offset, v_from[upcoming] + v_offset, v_bytes);
        k_rows[j] = k;
        v_rows[j] = v;
    }
}

/* Copies the chunk's rows of K and V, of k_bytes and v_bytes bytes each, to chunk->gathered, where all rows of K come before those of V. Returns the
 * chunk with the copied rows. k_rows and v_rows have room for chunk->keys pointers each, and are set to the copies. */
static __attribute__((noinline, unused)) ba_chunk ba_gather(const ba_chunk *chunk, int64_t k_bytes, int64_t v_bytes, const void **k_rows,
                                                            const void **v_rows) {
    ba_chunk side_by_side = *chunk;
    if (k_bytes == BA_GATHER_COMMON_BYTES && v_bytes == k_bytes) ba_gather_of(chunk, BA_GATHER_COMMON_BYTES, BA_GATHER_COMMON_BYTES, k_rows, v_rows);
    else ba_gather_of(chunk, k_bytes, v_bytes, k_rows, v_rows);
    side_by_side.k_rows = k_rows;
    side_by_side.v_rows = v_rows;
    side_by_side.k_offset = side_by_side.v_offset = 0;
    return side_by_side;
}

#endif
