#include "core/arena.h"

#include <pthread.h>
#include <stdlib.h>

enum { ALIGN = 64 };
static const size_t KEEP_BYTES = (size_t)8 << 20;

typedef struct arena {
    void *data;
    size_t bytes;
} arena;

static pthread_key_t key;
static pthread_once_t key_made = PTHREAD_ONCE_INIT;
static _Thread_local arena mine;

static void free_at_thread_exit(void *data) { free(data); }
static void make_key(void) { pthread_key_create(&key, free_at_thread_exit); }

static void resize(size_t bytes) {
    pthread_once(&key_made, make_key);
    free(mine.data);
    mine.data = bytes ? aligned_alloc(ALIGN, bytes) : NULL;
    mine.bytes = mine.data ? bytes : 0;
    pthread_setspecific(key, mine.data);
}

void *ba_arena_get(size_t bytes) {
    if (bytes > mine.bytes || !mine.data) resize((bytes + ALIGN) / ALIGN * ALIGN);
    return mine.data;
}

void ba_arena_release(void) {
    if (mine.bytes > KEEP_BYTES) resize(0);
}
