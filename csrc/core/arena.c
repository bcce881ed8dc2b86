#if defined(__linux__)
#define _GNU_SOURCE /* madvise */
#include <sys/mman.h>
#endif
#include "core/arena.h"

#include <stdlib.h>

#include "core/faults.h"
#include "core/guard.h"
#include "core/thread.h"

enum {
    ALIGN = 4096, /* a page: see ba_take_in_page */
    HUGE_PAGE = 2 << 20,
    LEAST_HUGE = 1 << 20, /* a request of more bytes than this is rounded up to whole huge pages, which costs up to 2 MiB */
};
#ifdef BA_FAULTS
static const size_t KEEP_BYTES = 0; /* so that every call allocates, and no call reads what an earlier call left in memory */
#else
static const size_t KEEP_BYTES = (size_t)32 << 20;
#endif

static void resize(ba_arena *arena, size_t bytes) {
    free(arena->data);
    const size_t align = bytes > LEAST_HUGE ? HUGE_PAGE : ALIGN;
    bytes = (bytes + align - 1) / align * align;
    arena->data = bytes && !ba_fault(BA_FAULT_MEMORY) ? aligned_alloc(align, bytes) : NULL;
#if defined(__linux__)
    if (arena->data && align == HUGE_PAGE) madvise(arena->data, bytes, MADV_HUGEPAGE); /* for fewer page faults and fewer TLB misses */
#endif
    arena->bytes = arena->data ? bytes : 0;
}

void *ba_arena_get(size_t bytes) {
    ba_thread *const thread = ba_thread_make();
    if (!thread) return NULL;
    ba_arena *const mine = &thread->arena;
    if (bytes > mine->bytes || !mine->data) resize(mine, bytes + 1);
    if (mine->data) ba_guard(mine->data, (int64_t)bytes, (int64_t)mine->bytes); /* moves the guard that an earlier call has set */
    return mine->data;
}

void ba_arena_release(void) {
    ba_thread *const thread = ba_thread_find();
    if (thread && (thread->arena.bytes > KEEP_BYTES || !ba_thread_is_freed())) resize(&thread->arena, 0);
}

ba_arena ba_arena_put_aside(ba_thread *thread) {
    const ba_arena arena = thread->arena;
    thread->arena = (ba_arena){0};
    return arena;
}

void ba_arena_put_back(ba_thread *thread, ba_arena arena) {
    free(thread->arena.data);
    thread->arena = arena;
}
