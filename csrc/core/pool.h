/* Threads. One pool for the process, grown on demand; the caller takes part in every job. Internal. */
#ifndef BA_CORE_POOL_H
#define BA_CORE_POOL_H

#include <stdbool.h>
#include <stdint.h>

#include "blitz_attn.h"

enum { BA_MAX_THREADS = 1024 };

/* Called once an item. `worker` is 0 .. threads-1, and no two calls at a time have the same: it names scratch memory. */
typedef void (*ba_item_fn)(void *context, int64_t item, int worker);

/* Runs items 0 .. items-1 on up to `threads` threads, the caller among them, each taking the lowest item not yet taken.
 * Returns when all are done. When another caller has the pool, or a thread cannot be made, the caller does all by itself.
 * BA_INTERRUPTED where the caller's poll (ba_set_poll) stopped it: then some items were left out or left early, and none runs any more. */
ba_status ba_parallel(int threads, int64_t items, ba_item_fn fn, void *context) __attribute__((warn_unused_result));

/* True where the job that this thread takes part in is to stop. Items that may take longer than some milliseconds look at it as they go; so does
 * whoever waits for another item. */
bool ba_stopped(void);

/* For loops that wait for another thread of the same job: a moment's rest, and from some hundred spins on the CPU goes to others. */
void ba_pause(int spins);

/* The number of threads for a call that asks for `asked` (0: as set). */
int ba_threads_for(int asked);

/* Whether a call has too little work to wake threads for. In a build for checks none has, so that small problems reach the threads. */
static inline bool ba_is_small(double work, double least) {
#ifdef BA_NO_SMALL_CALLS
    (void)work, (void)least;
    return false;
#else
    return work < least;
#endif
}

#endif
