#include "core/thread.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "core/faults.h"

static pthread_key_t key;
static pthread_once_t key_tried = PTHREAD_ONCE_INIT;
static _Atomic enum { NOT_TRIED, HAS_KEY, HAS_NO_KEY } found;
static _Thread_local ba_thread without_key = {.program_mode = BA_USUAL_FLOAT_MODE}; /* used where there is no key, and nowhere else */

static void free_at_thread_exit(void *data) {
    ba_thread *thread = data;
    free(thread->arena.data);
    free(thread);
}

static void make_key(void) {
    const bool made = pthread_key_create(&key, free_at_thread_exit) == 0;
    atomic_store_explicit(&found, made ? HAS_KEY : HAS_NO_KEY, memory_order_release);
}

ba_thread *ba_thread_find(void) {
    switch (atomic_load_explicit(&found, memory_order_acquire)) {
    case HAS_KEY: return pthread_getspecific(key);
    case HAS_NO_KEY: return &without_key;
    default: return NULL;
    }
}

bool ba_thread_adopt(ba_thread *own) {
    pthread_once(&key_tried, make_key);
    return !ba_thread_is_freed() || pthread_setspecific(key, own) == 0;
}

ba_thread *ba_thread_make(void) {
    ba_thread *const there = ba_thread_find();
    if (there) return there;
    ba_thread *const made = ba_fault(BA_FAULT_MEMORY) ? NULL : calloc(1, sizeof *made);
    if (made) made->program_mode = BA_USUAL_FLOAT_MODE;
    if (made && ba_thread_adopt(made) && ba_thread_is_freed()) return made;
    free(made);
    return ba_thread_find(); /* without_key where there is no key, else NULL */
}

bool ba_thread_is_freed(void) { return atomic_load_explicit(&found, memory_order_relaxed) == HAS_KEY; }
