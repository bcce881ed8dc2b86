/* Walks over a list of keys, chunk by chunk. Internal.
 *
 * The keys of all listed blocks form one sequence, in rising order, which is cut into chunks of chunk_keys keys. A key's position in this sequence
 * alone decides its chunk; neither the borders of blocks nor the keys that a tile sees have any influence. So of all lists, a query's result depends
 * on its own alone; threads, other batch entries and tile shapes change no bit. A list of all blocks gives the same bits as a call without a list.
 * (In families with has_cuts, whose chunks may be smaller with a list, weights below real's normal range may differ.) */
#ifndef BA_OPS_WALK_H
#define BA_OPS_WALK_H

#include "ops/problem.h"

#define BA_WALK_END INT64_MAX

typedef struct ba_walk {
    /* set by the caller */
    const uint64_t *bitmap; /* one bit per block column: whether the column is listed. NULL: all keys are listed */
    int64_t words;          /* of the bitmap */
    int64_t block_kv;       /* keys per column */
    int64_t keys;           /* of the batch entry, listed or not: key numbers are below this number */
    int64_t chunk_keys;
    int64_t stop;   /* position in the sequence of listed keys where the walk ends */
    ba_range range; /* from the first to the last key that some query of the walk's tiles sees. The walk skips whole chunks before range.lo and ends
                     * at range.hi */
    /* the state of the walk */
    int64_t column, key, end; /* the current column, the next key (BA_WALK_END: there is none), and the end of the column's keys */
    int64_t position;         /* of the next key in the sequence of listed keys */
} ba_walk;

/* Begins a walk at position `start` of the sequence of listed keys, a multiple of chunk_keys. The caller's members must be set. */
void ba_walk_begin(ba_walk *walk, int64_t start);
/* Writes the numbers of the keys up to the next border of chunks to key_index[chunk_keys], in rising order. Returns how many; 0: the walk is
 * over. */
int64_t ba_walk_take(ba_walk *walk, int32_t *key_index);

/* The index of the first of n rising numbers that is at least `value`; n where there is none. */
int64_t ba_first_at_least(const int32_t *rising, int64_t n, int64_t value);

#endif
