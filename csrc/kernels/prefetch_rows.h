/* Prefetches for drivers. A driver says which rows are used next. Only the kernels and this file know into which cache rows are prefetched. */
#ifndef BA_PREFETCH_ROWS_H
#define BA_PREFETCH_ROWS_H

#include "blitz_attn_types.h"
#include "core/common.h"

/* A cache to prefetch into, by its number in __builtin_prefetch. */
enum { BA_INTO_L2 = 2, BA_INTO_L1 = 3 };

/* The cache into which the kernels of a level prefetch. It may differ between cores of one level (ba_prefetches_reach_l2). */
int ba_prefetch_level(ba_isa level);

/* Prefetch a row that is read, or written, within the next few hundred instructions. */
static inline void ba_prefetch_to_read(const void *row, int64_t bytes) {
    for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch((const char *)row + at, 0, BA_INTO_L1);
}
/* Prefetches row number j + 8 while row number j of n is packed: where a head's rows lie among those of other heads, no hardware prefetcher follows
 * them. */
static inline void ba_prefetch_to_pack(const void *const *rows, int64_t j, int64_t n, int64_t bytes) {
    if (j + 8 < n) ba_prefetch_to_read(rows[j + 8], bytes);
}
static inline void ba_prefetch_to_write(const void *row, int64_t bytes) {
    for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch((const char *)row + at, 1, BA_INTO_L1);
}

/* Prefetches n rows that a kernel of this prefetch level reads (and writes, where to_write) after the work at hand: `bytes` bytes of each row, from
 * `offset` on. */
void ba_prefetch_to_keep(int prefetch_level, const void *const *rows, int64_t n, int64_t offset, int64_t bytes, bool to_write);

#endif
