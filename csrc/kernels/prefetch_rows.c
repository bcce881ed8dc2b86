#include "kernels/prefetch_rows.h"

/* Levels whose CPUs ignore a prefetch into L2 of a line that no cache has: theirs go into L1, as BA_PREFETCH_LEVEL of traits.h says for kernels. */
static bool goes_to_l1(ba_isa level) {
#ifdef __aarch64__
    (void)level;
    return false;
#else
    return level == BA_ISA_AVX512 || level == BA_ISA_AVX512_BF16;
#endif
}

/* __builtin_prefetch takes constants only. */
#define PREFETCH_ALL(to_write, into)                                                                                                                 \
    for (int64_t i = 0; i < n; i++)                                                                                                                  \
        for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch((const char *)rows[i] + offset + at, to_write, into)

void ba_prefetch_to_keep(ba_isa level, const void *const *rows, int64_t n, int64_t offset, int64_t bytes, bool to_write) {
    if (goes_to_l1(level)) {
        if (to_write) PREFETCH_ALL(1, 3);
        else PREFETCH_ALL(0, 3);
    } else if (to_write) PREFETCH_ALL(1, 2);
    else PREFETCH_ALL(0, 2);
}
