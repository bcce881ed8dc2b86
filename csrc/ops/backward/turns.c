#include "ops/backward/turns.h"

#include "core/pool.h"

static bool is_past(const ba_turn *turn, int64_t key) { return atomic_load_explicit(&turn->past, memory_order_acquire) > key; }

void ba_turn_wait(ba_turn *turns, int64_t item, int64_t key) {
    int64_t before = atomic_load(&turns[item].before);
    while (before >= 0 && is_past(&turns[before], BA_TURN_OVER - 1)) before = atomic_load(&turns[before].before);
    atomic_store(&turns[item].before, before); /* from now on, this item skips the items that are done already */
    for (; before >= 0; before = atomic_load(&turns[before].before))
        for (int spins = 0; !is_past(&turns[before], key) && !ba_stopped(); spins++) ba_pause(spins);
}
