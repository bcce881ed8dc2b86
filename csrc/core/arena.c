#if defined(__linux__)
#define _GNU_SOURCE /* madvise */
#include <sys/mman.h>
#endif
#include "core/arena.h"

#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>

#include "core/faults.h"
#include "core/guard.h"

enum { ALIGN = 4096 /* a page: see ba_take_in_page */, HUGE_PAGE = 2 << 20 };
#ifdef BA_FAULTS
static const size_t KEEP_BYTES = 0; /* every call allocates, and no call reads what another one left in memory */
#else
static const size_t KEEP_BYTES = (size_t)32 << 20;
#endif

static pthread_key_t key;
static bool has_key; /* false: the program has taken all keys */
static pthread_once_t key_made = PTHREAD_ONCE_INIT;
static _Thread_local ba_arena mine;
static _Thread_local bool is_freed_at_exit; /* whether the thread's end frees `mine` */

static void free_at_thread_exit(void *data) { free(data); }
static void make_key(void) { has_key = pthread_key_create(&key, free_at_thread_exit) == 0; }

/* Lets the thread's end free this memory, and no other. */
static void free_later(void *data) {
    pthread_once(&key_made, make_key);
    is_freed_at_exit = has_key && pthread_setspecific(key, data) == 0;
}

static void resize(size_t bytes) {
    free(mine.data);
    const size_t align = bytes > 2 * HUGE_PAGE ? HUGE_PAGE : ALIGN;
    bytes = (bytes + align - 1) / align * align;
    mine.data = bytes && !ba_fault(BA_FAULT_MEMORY) ? aligned_alloc(align, bytes) : NULL;
#if defined(__linux__)
    if (mine.data && align == HUGE_PAGE) madvise(mine.data, bytes, MADV_HUGEPAGE); /* for fewer page faults and fewer TLB misses */
#endif
    mine.bytes = mine.data ? bytes : 0;
    free_later(mine.data);
}

void *ba_arena_get(size_t bytes) {
    if (bytes > mine.bytes || !mine.data) resize(bytes + 1);
    if (mine.data) ba_guard(mine.data, (int64_t)bytes, (int64_t)mine.bytes); /* moves the guard that an earlier call has set */
    return mine.data;
}

void ba_arena_release(void) {
    if (mine.bytes > KEEP_BYTES || !is_freed_at_exit) resize(0);
}

ba_arena ba_arena_put_aside(void) {
    const ba_arena arena = mine;
    mine = (ba_arena){0};
    free_later(NULL);
    return arena;
}

void ba_arena_put_back(ba_arena arena) {
    if (mine.data) resize(0);
    mine = arena;
    free_later(mine.data);
}
