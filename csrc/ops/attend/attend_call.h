/* A running forward call: the state that all of its items share, a worker's scratch memory, and the functions that the drivers for panels and for few
 * queries have in common. Internal.
 *
 * attend_setup.c sets the call up: it chooses the kernels, makes the plan, and hands out memory. attend_panels.c runs items whose tiles are panels;
 * attend_few.c runs items of few queries, and attend_join.c joins their parts. For both kinds of items, attend_tiles.c lays out scratch memory, opens
 * tiles, finds rows and writes results. */
#ifndef BA_OPS_ATTEND_CALL_H
#define BA_OPS_ATTEND_CALL_H

#include "ops/attend/attend.h"
#include "ops/plan/shared_kv.h"
#include "ops/plan/tiles.h"
#include "ops/prefetch_heads.h"
#include "ops/scratch.h"

enum {
    BA_MANY_PANELS = 16, /* the largest number of panels of one kernel call */
    BA_WIDE_KEYS = 32,   /* keys whose rows are widened together, so that they are in cache when they are packed: a multiple of every key_pad */
};

/* One chunk of a list: its keys, and where their rows lie. */
typedef struct ba_chunk_rows {
    int walk; /* the walk that the chunk was taken from */
    int64_t keys;
    const void **k_rows, **v_rows; /* [keys]: rows of the item's first head; the first `shared` are rows of the shared, packed K and V. There is
                                    * room behind them for further rows that are to be prefetched (attend_few.c) */
    int64_t shared;                /* how many keys, from the first on, belong to whole groups of shared K and V; 0 where none are shared */
    const float **k_scale_at, **v_scale_at; /* [keys]: where the scales of the item's first head lie */
    int32_t *key_index;
} ba_chunk_rows;

typedef struct ba_attend_scratch {
    char *q, *o, *ml;  /* packed queries, and the states o, m and l, of one tile after the other */
    int32_t *bounds;   /* lo and hi of all panels */
    uint64_t *bitmaps; /* [walk]: the listed columns */
    char *packed_k, *packed_v, *wide, *scores, *lse, *gathered;
    char *bias; /* of one panel, or of the heads of an item of few queries */
    const void **packed_k_rows, **packed_v_rows, **rows;
    float *k_scale, *v_scale;
    ba_chunk_rows chunk[BA_MANY_PANELS + 2]; /* a ring: chunks whose panels are still collected, the current chunk, and the next one */
    ba_tile_state *tiles;
    ba_panel *panels; /* [BA_MANY_PANELS]: panels that are collected for one kernel call */
    ba_chunk *chunks; /* [BA_MANY_PANELS]: the chunk of each of these panels */
} ba_attend_scratch;

typedef struct ba_attend_call {
    const ba_problem *problem;
    const ba_attend_family *family;
    ba_pack_rows_fn pack_k, pack_v;     /* NULL: kernels read the rows where they lie */
    ba_pack_rows_fn widen;              /* NULL: rows are packed where they lie. Otherwise rows of a quantised cache first become rows of the queries'
                                         * dtype */
    bool own_few;                       /* few queries are attended by a kernel of their own dtype's family, and not by one for the cache's dtype */
    const ba_attend_family *few_family; /* the family that writes the results of few queries: with own_few their dtype's family, else `family` */
    ba_attend_few_fn few;
    ba_pack_queries_fn pack_few;
    ba_order_few_fn order_few;
    ba_fill_bias_fn fill_bias, fill_few_bias;
    const ba_tuning *tuning;
    const ba_prefetch_tuning *few_prefetch; /* the numbers of tuning->few for the cache that this level prefetches into */
    int prefetch_level;                     /* which cache that is: see ba_prefetch_level */
    int64_t chunk_keys;
    int chunks;   /* slots of the ring in use; 2 where a kernel call takes panels of one chunk only */
    bool gathers; /* rows are copied side by side before few queries attend them */
    ba_plan plan;
    int threads;
    char *scratch;
    int64_t scratch_bytes; /* per worker */
    ba_sharing sharing;
    int64_t shared_bytes;       /* of packed K and V that items share; 0: each item packs its own */
    char *parts;                /* the states of parts, which are joined at the end */
    const int64_t *part_offset; /* [batch]: where the entry's parts begin in `parts`, in bytes; -1: its lists are not cut */
} ba_attend_call;

/* ---- attend_setup.c ------------------------------------------------------------------------------------------------- */

/* The number of lanes that the scratch memory of a tile has room for. The last panel of a tile may be half empty. */
static inline int64_t ba_tile_room(const ba_attend_call *c) { return ba_round_up(ba_plan_tile_lanes(&c->plan), c->family->lanes[BA_PANEL_WIDE]); }

/* The bytes reserved for a packed query, enough for a panel of either kind. */
static inline int64_t ba_query_room(const ba_attend_call *c) {
    const ba_attend_family *f = c->family, *few = c->few_family;
    const int64_t dim = c->problem->head_dim;
    return ba_max(ba_round_up(dim, f->dim_pad) * f->q_bytes, ba_round_up(dim, few->dim_pad) * few->q_bytes);
}

/* The number of queries that a panel of the kernel for few queries has room for. It is one more than the kernel takes, so that the panels of several
 * heads do not compete for the same sets of the L1 cache. */
enum { BA_FEW_ROOM = BA_FEW_QUERIES + 1 };

/* The same for a tile of few queries, which may have several panels; 0 where the call has no such tile. */
static inline int64_t ba_few_tile_room(const ba_attend_call *c) { return ba_plan_few_panels(&c->plan) * BA_FEW_ROOM; }

/* Bytes of scratch memory per head of the kernel for few queries. Some unused bytes lie between two heads, so that these do not compete for the same
 * sets of the L1 cache. */
static inline int64_t ba_few_scratch(const ba_attend_call *c) {
    const int64_t between = BA_FEW_PAD(c->problem->v_dim);
    return ba_round_up((BA_FEW_SCRATCH(c->tuning->few.keys, c->problem->v_dim) + between) * c->family->real_size, BA_ALIGN);
}

/* ---- attend_tiles.c -------------------------------------------------------------------------------------------------- */

/* Lays out the scratch memory of one worker (scratch.h), which begins at a page where tuning has a page_offset. */
int64_t ba_lay_out_attend_scratch(const ba_attend_call *c, char *base, ba_attend_scratch *w);

/* Opens tile number `index` of the item: packs the tile's queries and empties its states. The tiles of the item's first KV head come first, then
 * those of the next head, and so on. */
void ba_open_tile(const ba_attend_call *c, const ba_attend_scratch *w, const ba_item *item, int64_t index);

/* Writes the outputs and the log-sum-exps of the queries of a panel of the tile. */
void ba_write_lanes(const ba_attend_call *c, const ba_attend_scratch *w, int64_t batch, const ba_tile *tile, const ba_panel_state *s);

/* Takes the next chunk of the walk that is furthest behind, of `walk_count` walks. Returns false when all of them are at their end. */
bool ba_next_chunk(const ba_attend_call *c, const ba_item *item, ba_walk *walks, int walk_count, ba_chunk_rows *chunk);

/* Finds the rows of K, and their scales, of a chunk whose keys are set. */
void ba_find_k_rows(const ba_attend_call *c, const ba_item *item, ba_chunk_rows *chunk);

/* Copies the scales of a chunk's keys, for `heads` heads of the item from `first` on, to the scratch memory. */
void ba_fetch_scales(const ba_attend_call *c, const ba_attend_scratch *w, int64_t first, int64_t heads, const ba_chunk_rows *here);

/* The chunk in the form that kernels take, for one head of the item. `place` is the number of the head among those of the last ba_fetch_scales(). */
ba_chunk ba_head_chunk(const ba_attend_call *c, const ba_attend_scratch *w, int64_t head, int64_t place, const ba_chunk_rows *here);

/* Makes the bias of a panel of the tile for the chunk, where the call has a bias. Its scratch memory lies behind the biases of `place` heads. Returns
 * false where the bias hides all keys from all lanes. */
bool ba_bias_chunk(const ba_attend_call *c, const ba_attend_scratch *w, int64_t batch, const ba_tile *tile, const ba_panel_state *s, int64_t place,
                   ba_chunk *chunk);

/* Leaves out the chunk's first `keys` keys. */
void ba_skip_keys(ba_chunk *chunk, int64_t keys);

/* Cuts off keys at both ends of the chunk that no lane of the panel sees, and sets *panel, with bounds only where some lane does not see all keys of
 * the cut chunk. Returns false where no lane sees a key. */
bool ba_cut_to_seen(const ba_attend_call *c, const ba_panel_state *s, ba_panel *panel, ba_chunk *chunk);

/* ---- attend_panels.c and attend_few.c: one item each ------------------------------------------------------------------ */

void ba_attend_panels(const ba_attend_call *c, int64_t index, int worker);
void ba_attend_few(const ba_attend_call *c, int64_t index, int worker);

/* ---- attend_join.c --------------------------------------------------------------------------------------------------- */

/* Sets where the parts of each batch entry begin, unless `offset` is NULL. Returns the bytes of all parts. */
int64_t ba_lay_out_parts(const ba_attend_call *c, int64_t *offset);

/* Copies the states of a panel of few queries to the place where ba_join_parts() finds the states of the item's part. */
void ba_keep_part(const ba_attend_call *c, const ba_item *item, const ba_tile *tile, const ba_panel_state *s);

/* A ba_item_fn over (batch, KV head): joins the parts in their order and writes the result. */
void ba_join_parts(void *context, int64_t index, int worker);

#endif
