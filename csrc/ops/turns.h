/* Turns: items of work that run side by side and add to the same sums, in one order. Internal.
 *
 * Floating-point sums depend on their order, so items of one (batch, KV head) add to a key's dK and dV in the order of the
 * items, whoever runs them and when. Every item goes over its keys in rising order and says as it goes how far it has come;
 * before it adds to a key it waits until all earlier items are past that key. The pool hands items out in their order, so
 * every item that is waited for is running or done, and the earliest one waits for nobody. */
#ifndef BA_OPS_TURNS_H
#define BA_OPS_TURNS_H

#include <stdatomic.h>

#include "core/common.h"

#define BA_TURN_OVER INT64_MAX

typedef struct ba_turn {
    _Atomic int64_t past;   /* this item adds nothing more to keys below; BA_TURN_OVER when it is done */
    _Atomic int64_t before; /* the nearest earlier item of the same sums that may not be done; -1: none */
} ba_turn;

/* Waits until all items before `item` are past `key`, or the job is stopped. */
void ba_turn_wait(ba_turn *turns, int64_t item, int64_t key);

static inline void ba_turn_pass(ba_turn *turns, int64_t item, int64_t key) { atomic_store_explicit(&turns[item].past, key, memory_order_release); }

#endif
