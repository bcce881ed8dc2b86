/* K and V packed once for all items of a forward call. Internal.
 *
 * Tiles meet a key as often as their lists hold it, and packing it costs as much as meeting it with some thirty queries. Where packing leaves whole
 * groups of keys that do not depend on the chunk that they are part of, and blocks are made of such groups, all keys are packed before the work
 * begins. */
#ifndef BA_OPS_SHARED_ROWS_H
#define BA_OPS_SHARED_ROWS_H

#include "ops/plan.h"

/* K (or V) as its pack leaves it. */
typedef struct ba_shared_rows {
    ba_pack_rows_fn pack; /* NULL: it is not packed at all */
    char *data;           /* [batch][KV head][group of key_pad keys] */
    int64_t row_bytes;    /* of a packed key */
    int64_t *offset;      /* [batch][KV head]: where its key 0 would begin in data, in bytes */
    bool *in_place;       /* [batch][KV head]: its keys were left where they are */
} ba_shared_rows;

typedef struct ba_sharing {
    const ba_plan *plan;
    const ba_attend_family *family;
    int64_t chunk_keys; /* tuning's */
    int64_t pack_keys;  /* of a piece of work: what the walks take at a time */
    bool *shared;       /* [batch]: whether its keys are; NULL: none are */
    ba_shared_rows k, v;
} ba_sharing;

/* Whether what pack_k and pack_v of the family leave can be shared. */
bool ba_may_share(const ba_problem *problem, const ba_attend_family *family);

/* Lays it out in memory (NULL: counts the bytes). */
int64_t ba_sharing_lay_out(ba_sharing *s, char *memory);

/* Packs K and V if that is less work than packing chunks: whether tiles meet a key several times. */
ba_status ba_share_rows(ba_sharing *s, int threads);

static inline bool ba_is_shared(const ba_sharing *s, int64_t batch) { return s->shared && s->shared[batch]; }

#endif
