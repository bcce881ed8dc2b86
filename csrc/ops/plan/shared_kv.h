/* K and V, packed once for all items of a call. Internal.
 *
 * Each tile whose list holds a key needs that key packed, and packing a key costs as much as attending it with about thirty queries. A family with
 * pack_groups packs whole groups of key_pad keys, and the bytes of a group do not depend on the chunk that it belongs to. Where blocks consist of
 * such groups, the driver packs K and V once, before the work on tiles begins, if that is less work. Some keys that no query sees are left out. */
#ifndef BA_OPS_SHARED_KV_H
#define BA_OPS_SHARED_KV_H

#include "ops/plan/plan.h"

/* K, or V, in packed form. */
typedef struct ba_shared_rows {
    ba_pack_rows_fn pack; /* NULL: the family reads the rows where they lie, and none are packed */
    char *data;           /* [batch][KV head][group of key_pad keys] */
    int64_t row_bytes;    /* bytes per packed key */
    int64_t *offset;      /* [batch][KV head]: bytes from `data` to where key 0 would begin; the first packed key may be a later one */
} ba_shared_rows;

typedef struct ba_sharing {
    /* set by the caller */
    const ba_plan *plan;
    const ba_attend_family *family;
    int64_t chunk_keys;  /* of tuning: the chunks of walks have this size, or one that divides it */
    int64_t pack_keys;   /* keys per item of the packing job; a multiple of key_pad */
    int64_t page_offset; /* of tuning */
    double least_pairs;  /* queries that must attend a key, on average, for sharing to pay */
    /* set by ba_sharing_lay_out() and ba_share_kv() */
    bool *shared;             /* [batch]: whether the keys of the entry are shared. NULL: none are */
    ba_shared_rows k, v;      /* `pack` is set by the caller */
    ba_shared_rows k_columns; /* gradients only: K once more, in the format of pack->values */
} ba_sharing;

/* Whether packed keys can be shared: the family packs whole groups of keys, the keys are not paged, and blocks consist of whole groups. */
bool ba_may_share(const ba_problem *problem, const ba_attend_family *family);

/* Hands out `memory` to the arrays of `s`, and returns the number of bytes that they take. The caller owns the memory. Where page_offset is set, the
 * memory must start at the beginning of a page. With memory NULL, only the size is computed. */
int64_t ba_sharing_lay_out(ba_sharing *s, char *memory);

/* Packs K and V on up to `threads` threads, if that is less work than packing the chunks of each item, because many queries attend each key. Else
 * sets s->shared to NULL. */
ba_status ba_share_kv(ba_sharing *s, int threads);

static inline bool ba_is_shared(const ba_sharing *s, int64_t batch) { return s->shared && s->shared[batch]; }

#endif
