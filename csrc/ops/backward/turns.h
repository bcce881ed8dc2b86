/* Turns: items that run at the same time add to the same sums in a fixed order. Internal.
 *
 * The rounding of a floating-point sum depends on the order of its summands. The items of one (batch, KV head) therefore add to a key's dK
 * and dV in the order of the items, whichever threads run them. Every item visits its keys in rising order and publishes how far it has come.
 * Before it adds to a key, it waits until all earlier items have passed that key. There is no deadlock: the pool hands items out in their
 * order, so every item that another one waits for runs or is done, and the earliest item that runs waits for no other. */
#ifndef BA_OPS_TURNS_H
#define BA_OPS_TURNS_H

#include <stdatomic.h>

#include "core/common.h"

#define BA_TURN_OVER INT64_MAX

typedef struct ba_turn {
    _Atomic int64_t past;   /* the item adds nothing more to keys below this number; BA_TURN_OVER: the item is done */
    _Atomic int64_t before; /* the nearest earlier item that adds to the same sums and is not known to be done; -1: there is none */
} ba_turn;

/* Waits until all items before `item` that add to the same sums have passed `key`, or until the job is stopped. */
void ba_turn_wait(ba_turn *turns, int64_t item, int64_t key);

/* Publishes that `item` adds nothing more to keys below `key`. */
static inline void ba_turn_pass(ba_turn *turns, int64_t item, int64_t key) { atomic_store_explicit(&turns[item].past, key, memory_order_release); }

#endif
