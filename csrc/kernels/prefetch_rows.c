#include "kernels/prefetch_rows.h"

#include "kernels/kernels.h"

/* __builtin_prefetch takes constants only. */
#define PREFETCH_ALL(to_write, into)                                                                                                                 \
    for (int64_t i = 0; i < n; i++)                                                                                                                  \
        for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch((const char *)rows[i] + offset + at, to_write, into)

int ba_prefetch_level(ba_isa level) { return ba_kernels_at(level)->cache[BA_FLOAT32]->prefetch_level; }

void ba_prefetch_to_keep(int prefetch_level, const void *const *rows, int64_t n, int64_t offset, int64_t bytes, bool to_write) {
    if (prefetch_level == BA_INTO_L1) {
        if (to_write) PREFETCH_ALL(1, BA_INTO_L1);
        else PREFETCH_ALL(0, BA_INTO_L1);
    } else if (to_write) PREFETCH_ALL(1, BA_INTO_L2);
    else PREFETCH_ALL(0, BA_INTO_L2);
}
