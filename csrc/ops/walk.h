/* Walking a list of keys chunk by chunk. Internal.
 *
 * The keys of a list stand one after the other and are cut into chunks by their place in that row: not by block, nor by
 * what a tile sees of them. A query's result then depends on nothing but its own list, so that all blocks listed equals no
 * list, and neither threads nor batch mates nor tile shapes change a bit. */
#ifndef BA_OPS_WALK_H
#define BA_OPS_WALK_H

#include "ops/problem.h"

#define BA_WALK_END INT64_MAX

typedef struct ba_walk {
    const uint64_t *bitmap;        /* listed columns; NULL: all keys */
    int64_t words, block_kv, keys; /* of the bitmap; of a column; of the sequence */
    int64_t chunk_keys;
    int64_t stop;             /* place in the list where the walk ends */
    ba_range range;           /* keys that somebody sees: whole chunks before it are passed over */
    int64_t column, key, end; /* where it stands: the next key (BA_WALK_END: none), and the end of its column */
    int64_t position;         /* of the next key in the list */
} ba_walk;

/* Begins at place `start` (a multiple of chunk_keys) of the list. The fields above `column` are set before. */
void ba_walk_begin(ba_walk *walk, int64_t start);
/* Takes the keys up to the next chunk boundary; returns how many. Key numbers rise. */
int64_t ba_walk_take(ba_walk *walk, int32_t *key_index);

/* Place of the first of n rising numbers that is at least `value`; n where none is. */
int64_t ba_first_at_least(const int32_t *rising, int64_t n, int64_t value);

#endif
