/* The scratch memory of a call. Internal. */
#ifndef BA_CORE_ARENA_H
#define BA_CORE_ARENA_H

#include <stddef.h>

/* Returns at least `bytes` bytes, aligned to 4096, with unspecified contents; NULL where the system has no memory. Each thread has one arena.
 * The memory is valid until the thread's next ba_arena_get() or ba_arena_release(); the thread may let its workers use parts of it. The
 * arena owns the memory: callers never free it. It is freed by a later get or release, or when the thread ends. (Where the program has taken all
 * pthread keys, the arena cannot be found when the thread ends, so each release frees it.)
 *
 * Some memory comes from malloc instead, and its owner frees it. Opened page tables outlive a call (ops/kv_cache/page_tables.c). Other memory must
 * outlive one use of the arena: the lengths for two runs of a driver (ops/attend/attend_entry.c), the slots for ba_store_rows()
 * (ops/kv_cache/append.c), and the lists and states of KV splits (ops/attend/attend_kv_split.c). Sorting items (ops/plan/plan.c) and probes
 * (ops/probe.c) also allocate memory of their own. */
void *ba_arena_get(size_t bytes);
/* Ends the use of the arena. A large arena goes back to the system; a small one is kept for the thread's next call, so that repeated
 * calls do not ask the system for memory. */
void ba_arena_release(void);

typedef struct ba_arena {
    void *data;
    size_t bytes;
} ba_arena;

/* While a call polls, a handler of the program may make further calls in the same thread. So a call puts its arena aside before it polls.
 * Putting the arena back afterwards frees the arena that the further calls may have left. */
struct ba_thread;
ba_arena ba_arena_put_aside(struct ba_thread *thread);
void ba_arena_put_back(struct ba_thread *thread, ba_arena arena);

#endif
