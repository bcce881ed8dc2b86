/* Scratch memory of a call. Internal. */
#ifndef BA_CORE_ARENA_H
#define BA_CORE_ARENA_H

#include <stddef.h>

/* At least `bytes`, aligned to 64, contents unspecified; NULL where there is none to be had. Belongs to the calling thread,
 * which may hand parts to its workers, and stays valid until the thread's next call. One that is small is kept for that
 * call, so that repeated calls do not go to the system for memory. */
void *ba_arena_get(size_t bytes);
/* Says that the call is over: a large arena goes back to the system. */
void ba_arena_release(void);

/* While a call waits for a program's handler, which may make calls of its own in the same thread, its arena is put aside. */
typedef struct ba_arena {
    void *data;
    size_t bytes;
} ba_arena;
ba_arena ba_arena_put_aside(void);
void ba_arena_put_back(ba_arena arena);

#endif
