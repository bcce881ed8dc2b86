/* Threads. The process has one pool of worker threads, which grows on demand. The calling thread takes part in every job. Internal. */
#ifndef BA_CORE_POOL_H
#define BA_CORE_POOL_H

#include <stdbool.h>
#include <stdint.h>

#include "blitz_attn.h"

enum { BA_MAX_THREADS = 1024 };

/* Called once per item. `worker` is a number from 0 to threads - 1 that no other running call of the job has, so a function may use it as the
 * index of its scratch memory. */
typedef void (*ba_item_fn)(void *context, int64_t item, int worker);

/* Runs items 0 .. items-1 on up to `threads` threads, the caller included. Each thread takes the lowest item that nobody has taken yet.
 * Returns when no item runs any more. When another caller uses the pool, or the system has no memory for a fork handler, the caller runs
 * all items itself; when the system refuses to start a thread, the job runs on the threads that there are. Returns BA_INTERRUPTED where the
 * caller's poll function (ba_set_poll) stopped the job: some items may then not have run, or not have finished. Items run in the usual float mode
 * (float_mode.h), whatever the caller's mode. */
ba_status ba_parallel(int threads, int64_t items, ba_item_fn fn, void *context) __attribute__((warn_unused_result));

/* Whether the job that this thread takes part in must stop. An item that may take longer than some milliseconds calls this function again and again,
 * and returns early where the answer is true. So does every loop that waits for another item. */
bool ba_stopped(void);

/* For a loop that runs outside of jobs, and may take longer than some milliseconds: returns BA_INTERRUPTED where the caller's poll function stopped
 * the call.
 * ba_look_at_turn(i), called in turn i of a loop, looks in every 2^16-th turn only, so that short loops never look. */
ba_status ba_look_for_stop(void) __attribute__((warn_unused_result));
enum { BA_TURNS_PER_LOOK = 1 << 16 };
static inline ba_status ba_look_at_turn(int64_t i) { return i % BA_TURNS_PER_LOOK == BA_TURNS_PER_LOOK - 1 ? ba_look_for_stop() : BA_OK; }

/* For a loop whose turns differ in length: adds the n steps of a turn to *steps, and looks where *steps reaches or passes a multiple of 2^16. */
static inline ba_status ba_look_after(int64_t *steps, int64_t n) {
    const int64_t before = *steps / BA_TURNS_PER_LOOK;
    *steps += n;
    return *steps / BA_TURNS_PER_LOOK != before ? ba_look_for_stop() : BA_OK;
}

/* Called by a loop that waits for another thread of the same job, with the number of times that it has waited so far. Pauses for a moment; from
 * 256 `spins` on, yields the CPU to other threads instead. */
void ba_pause(int spins);

/* The number of threads of a call with this num_threads argument: the argument itself, or ba_get_num_threads() where it is 0. */
int ba_threads_for(int num_threads);

/* Whether a call has so little work (less than `least`, in a unit that the caller chooses) that the calling thread does it alone. In a build with
 * BA_NO_SMALL_CALLS (for fuzzers, tsan and check-tiles), no call is small, so that small problems, too, use threads. */
static inline bool ba_is_small(double work, double least) {
#ifdef BA_NO_SMALL_CALLS
    (void)work, (void)least;
    return false;
#else
    return work < least;
#endif
}

/* The number of threads of a call that hands out `items` items: one for a small call, and never more threads than items, because each thread takes
 * scratch memory. */
static inline int ba_threads_of_call(int num_threads, double work, double least, int64_t items) {
    const int threads = ba_is_small(work, least) ? 1 : ba_threads_for(num_threads);
    return items < 1 ? 1 : threads < items ? threads : (int)items;
}

#endif
