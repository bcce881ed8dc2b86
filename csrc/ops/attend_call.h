/* A forward call at work: what all of its items share, a worker's scratch, and what the drivers for panels and for few queries have in common.
 * Internal.
 *
 * attend.c makes the call: it chooses the kernels, plans, and hands out memory. Items whose tiles are panels are run by attend_panels.c, those of few
 * queries by attend_few.c, whose parts attend_join.c joins. attend_tiles.c opens tiles, finds rows and writes results for both. */
#ifndef BA_OPS_ATTEND_CALL_H
#define BA_OPS_ATTEND_CALL_H

#include "ops/attend.h"
#include "ops/scratch.h"
#include "ops/shared_rows.h"
#include "ops/tiles.h"

enum { BA_MANY_PANELS = 16 /* panels that a kernel is given at once at most */ };

/* One chunk of a list: which keys, and where they lie. */
typedef struct ba_chunk_rows {
    int walk;
    int64_t keys;
    const void **k_rows, **v_rows;          /* of the item's first head; keys before `whole` as they are shared. Behind them is room for rows that
                                               are prefetched after them (attend_few.c) */
    int64_t whole;                          /* keys of whole groups, where K and V are packed once for all items; else 0 */
    const float **k_scale_at, **v_scale_at; /* likewise */
    int32_t *key_index;
} ba_chunk_rows;

typedef struct ba_attend_scratch {
    char *q, *o, *ml; /* tiles one after the other */
    int32_t *bounds;
    uint64_t *bitmaps;
    char *packed_k, *packed_v, *scores, *lse, *gathered;
    const void **packed_k_rows, **packed_v_rows, **rows;
    float *k_scale, *v_scale;
    ba_chunk_rows chunk[BA_MANY_PANELS + 2]; /* a ring: chunks whose panels are collected, the one at hand and the one after it */
    ba_tile_state *tiles;
    ba_panel *panels; /* [BA_MANY_PANELS], with their chunks: to be given to the kernel together */
    ba_chunk *chunks;
} ba_attend_scratch;

typedef struct ba_attend_call {
    const ba_problem *problem;
    const ba_attend_family *family;
    ba_pack_rows_fn pack_k, pack_v; /* NULL: read in place */
    bool own_few;                   /* the family's kernel for few queries, and not the cache's */
    ba_attend_few_fn few;
    ba_pack_queries_fn pack_few;
    ba_order_few_fn order_few;
    const ba_tuning *tuning;
    int64_t chunk_keys;
    int chunks;   /* of the ring: 2 where panels of one chunk only are collected */
    bool gathers; /* rows are copied side by side before few queries attend them */
    ba_plan plan;
    int threads;
    char *scratch;
    int64_t scratch_bytes; /* per worker */
    ba_sharing sharing;
    char *parts;                /* states of parts that are to be joined */
    const int64_t *part_offset; /* [batch]: bytes, -1 where there is one part only */
} ba_attend_call;

/* ---- attend.c ------------------------------------------------------------------------------------------------------- */

/* Lanes that a tile's panels have room for: a few-query panel takes BA_FEW_QUERIES, the last of the others may be half empty. */
static inline int64_t ba_tile_room(const ba_attend_call *c) {
    return ba_round_up(ba_min(c->plan.tiling.tile_queries, c->plan.tiling.row_queries * c->plan.tiling.shared_heads),
                       c->family->lanes[BA_PANEL_WIDE]);
}

/* Queries that a panel of the kernel for few queries has room for: one more than it takes, so that panels of several heads do not share sets of L1.
 */
enum { BA_FEW_ROOM = BA_FEW_QUERIES + 1 };

/* Bytes of that kernel's scratch per head, with some between two heads for the same reason. */
static inline int64_t ba_few_scratch(const ba_attend_call *c) {
    const int64_t apart = BA_FEW_PAD(c->problem->v_dim);
    return ba_round_up((BA_FEW_SCRATCH(c->tuning->few.keys, c->problem->v_dim) + apart) * c->family->real_size, BA_ALIGN);
}

/* A worker's scratch: hands out its parts, or with base NULL counts the bytes. */
int64_t ba_lay_out_attend_scratch(const ba_attend_call *c, char *base, ba_attend_scratch *w);

/* ---- attend_tiles.c -------------------------------------------------------------------------------------------------- */

/* Opens the item's tile number `index`, of all tiles of its first head, then those of the next: packs its queries and clears its states. */
void ba_open_tile(const ba_attend_call *c, const ba_attend_scratch *w, const ba_item *item, int64_t index);

/* Writes out and lse of a panel, whose lanes are lanes of the tile. */
void ba_write_lanes(const ba_attend_call *c, const ba_attend_scratch *w, int64_t batch, const ba_tile *tile, const ba_panel_state *s);

/* The next chunk of the list that is furthest behind. False when all are at their end. */
bool ba_next_chunk(const ba_attend_call *c, const ba_item *item, ba_walk *walks, int lists, ba_chunk_rows *chunk);

/* Finds where the rows of K of a chunk lie whose keys are set. */
void ba_find_k_rows(const ba_attend_call *c, const ba_item *item, ba_chunk_rows *chunk);

/* Fetches the scales of a chunk's keys for `heads` heads of the item from `first` on. */
void ba_fetch_scales(const ba_attend_call *c, const ba_attend_scratch *w, int64_t first, int64_t heads, const ba_chunk_rows *here);

/* The chunk as a kernel takes it, for one head of the item; that head is the `place`-th of those whose scales were fetched together. */
ba_chunk ba_head_chunk(const ba_attend_call *c, const ba_attend_scratch *w, int64_t head, int64_t place, const ba_chunk_rows *here);

/* Leaves out the chunk's first `keys` keys. */
void ba_skip_keys(ba_chunk *chunk, int64_t keys);

/* Cuts the chunk to the keys that the panel sees, and gives the panel its bounds where they matter. False: it sees none. */
bool ba_cut_to_seen(const ba_attend_call *c, const ba_panel_state *s, ba_panel *panel, ba_chunk *chunk);

/* ---- attend_panels.c and attend_few.c: one item each ------------------------------------------------------------------ */

void ba_attend_panels(const ba_attend_call *c, int64_t index, int worker);
void ba_attend_few(const ba_attend_call *c, int64_t index, int worker);

/* ---- attend_join.c --------------------------------------------------------------------------------------------------- */

/* Where the parts of each batch entry begin (offset NULL: not wanted yet); returns the bytes of all. */
int64_t ba_lay_out_parts(const ba_attend_call *c, int64_t *offset);

/* Keeps the states of a panel for few queries as a part's. */
void ba_keep_part(const ba_attend_call *c, const ba_item *item, const ba_tile *tile, const ba_panel_state *s);

/* A ba_item_fn over (batch, KV head): joins the parts in their order and writes the result. */
void ba_join_parts(void *context, int64_t index, int worker);

#endif
