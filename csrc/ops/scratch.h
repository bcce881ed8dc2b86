/* How drivers divide their scratch memory. Internal.
 *
 * A function that lays out scratch memory hands out the parts of the block at `base`, and computes the size of the block. Such a function is called
 * twice: with base NULL to learn the size, and then with the memory. A call's block holds one block for each worker, which is laid out anew for each
 * item. */
#ifndef BA_OPS_SCRATCH_H
#define BA_OPS_SCRATCH_H

#include "core/arena.h"
#include "core/common.h"
#include "core/guard.h"
#include "core/status.h"
#include "kernels/kernels.h"

/* Gets a block, which belongs to the call until ba_arena_release(). */
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

/* As ba_take(), but where page_offset (of tuning) is not 0, the part begins `offset` bytes behind the beginning of a page. `base` must then be the
 * beginning of a page. */
static inline void *ba_take_in_page(char *base, int64_t *used, int64_t bytes, int64_t page_offset, int64_t offset) {
    if (page_offset) *used = ba_round_up(ba_max(0, *used - offset), BA_PAGE) + offset;
    return ba_take(base, used, bytes);
}

#endif
