/* A running backward call: the state that all of its items share, a worker's scratch memory, and the functions that its two drivers have in common.
 * Internal.
 *
 * backward_setup.c sets the call up, and clears and rounds dK and dV. backward_by_tile.c runs items whose tiles walk their lists. backward_by_block.c
 * runs items of lists that route single queries, block by block. For both, backward_tiles.c lays out scratch memory and computes the gradients of
 * some tiles and one chunk. backward_bias.c, a pass of its own for gradients of biases, uses this header, too. */
#ifndef BA_OPS_BACKWARD_CALL_H
#define BA_OPS_BACKWARD_CALL_H

#include "ops/backward/backward.h"
#include "ops/backward/turns.h"
#include "ops/plan/shared_kv.h"
#include "ops/plan/tiles.h"
#include "ops/scratch.h"

/* The keys of one chunk and their rows of K and V. */
typedef struct ba_gradient_rows {
    int walk; /* number of the walk that the chunk belongs to; backward_by_block.c has no walks */
    int64_t keys;
    int64_t shared; /* how many keys, from the first on, belong to whole groups of shared K and V; 0 where none are shared */
    int32_t *key_index;
    const void **k_rows, **v_rows, **k_columns; /* the first `shared` pointers lead to the shared, packed K and V, the others to K and V themselves */
} ba_gradient_rows;

enum { BA_GRADIENT_AHEADS = 5 }; /* dK, dV, and the next chunk's K, V and K in columns */

typedef struct ba_backward_scratch {
    char *q, *dout, *dq, *q_rows, *dout_rows, *lanes; /* of one tile after the other; `lanes`: lse and delta */
    int32_t *bounds;
    uint64_t *bitmaps;
    char *weights, *slopes, *bias, *packed_k, *packed_v, *packed_columns, *reals;
    ba_gradient_rows chunk_rows[2]; /* of this chunk and of the next; drivers that do not look ahead use the first alone */
    const void **packed_k_rows, **packed_v_rows, **k_columns, **rows, **more_rows;
    void **dk_rows, **dv_rows;
    ba_prefetch_rows *ahead; /* [BA_GRADIENT_AHEADS] */
    ba_tile_state *tiles;
} ba_backward_scratch;

typedef struct ba_backward_call {
    const ba_problem *problem;
    const ba_gradients *gradients;
    const ba_attend_family *family;
    ba_fill_bias_fn fill_bias;
    const ba_tuning *tuning;
    ba_plan plan;
    ba_sharing sharing;
    int64_t shared_bytes;   /* reserved for packed K and V that items share; 0: items share none */
    ba_turn *turns;         /* [items] */
    int64_t *last;          /* [batch][KV head]: scratch memory of backward_setup.c */
    ba_view dk, dv;         /* the sums, as reals */
    bool apart;             /* the sums are not the outputs themselves; at the end, they are rounded into the outputs, or added to them */
    int64_t list_row_lanes; /* the largest number of queries of a list row */
    char *scratch;
    int64_t scratch_bytes; /* per worker */
} ba_backward_call;

/* The number of lanes that the scratch memory of a tile has room for. The last panel of a tile may be half empty. */
static inline int64_t ba_gradient_tile_room(const ba_backward_call *c) {
    return ba_round_up(c->plan.tiling.tile_queries, c->family->lanes[BA_PANEL_WIDE]);
}

/* The number of lanes whose weights over a chunk are in memory at a time: those of one tile, or of `tiles` tiles where the family joins the tiles of
 * an item. */
static inline int64_t ba_gradient_room_at_once(const ba_backward_call *c, int64_t tiles) {
    return ba_gradient_tile_room(c) * (c->family->joins_tiles ? tiles : 1);
}

/* The number of reals for which a packed row has room, whatever its form. */
static inline int64_t ba_padded(const ba_backward_call *c, int64_t dim) { return ba_round_up(dim, ba_max(BA_PACK_PAD, c->family->lane_block)); }

/* ---- backward_tiles.c ------------------------------------------------------------------------------------------------ */

/* Lays out the scratch memory of one worker, for `tiles` tiles (scratch.h). */
int64_t ba_lay_out_backward_scratch(const ba_backward_call *c, int64_t tiles, char *base, ba_backward_scratch *w);

/* Adds a panel to the tile, for its lanes from `lane` on. *at counts the lanes of the scratch memory that are in use. */
ba_panel_state *ba_add_gradient_panel(const ba_backward_call *c, const ba_backward_scratch *w, ba_tile_state *t, int64_t lane, int64_t *at);

/* Sets the keys that each lane of a panel sees, its log-sum-exp, and its delta times `scale`, the factor that dout is packed with. A query whose
 * log-sum-exp is -inf sees no key. */
void ba_open_gradient_lanes(const ba_backward_call *c, const ba_backward_scratch *w, const ba_item *item, ba_tile_state *t, ba_panel_state *s,
                            double scale);

/* Packs a tile's rows of q and of dout as columns, dout times `scale`. w->rows are the rows of q, w->more_rows the rows of dout. */
void ba_pack_gradient_panels(const ba_backward_call *c, const ba_backward_scratch *w, const ba_tile_state *t, double scale);

/* Packs a tile's rows of q and of dout both as columns and as rows. w->rows and w->more_rows are as above. */
void ba_pack_gradient_tile(const ba_backward_call *c, const ba_backward_scratch *w, ba_tile_state *t);

/* Clears the dQ of all panels of a tile. */
void ba_clear_dq(const ba_backward_call *c, const ba_tile_state *t);

/* Writes a panel's dQ to `rows`, by the family's `finish` or finish_reals for panels of this width: dQ is passed as an output whose weights add
 * up to 1, so that it is not scaled. */
void ba_finish_dq(const ba_backward_call *c, const ba_backward_scratch *w, ba_finish_fn finish, const ba_panel_state *s, void *const *rows);

/* Finds the rows of K and V of the keys in rows->key_index: shared, packed rows where there are any. */
void ba_find_gradient_rows(const ba_backward_call *c, const ba_item *item, ba_gradient_rows *rows);

/* Finds the rows of the keys' gradients, and packs the rows of K and V that are not shared. Returns the chunk as kernels take it. `next` is NULL, or
 * the chunk that follows, whose rows the kernels may prefetch. */
ba_chunk ba_open_gradient_chunk(const ba_backward_call *c, const ba_backward_scratch *w, const ba_item *item, const ba_gradient_rows *rows,
                                const ba_gradient_rows *next);

/* Runs the kernel `gradient` for a panel of a vector family. Returns the keys, by their indices in the chunk, whose weights and slopes it has
 * written: no lane sees the other keys. */
ba_range ba_run_gradient_panel(const ba_backward_call *c, const ba_backward_scratch *w, int64_t batch, const ba_tile *tile, const ba_panel_state *s,
                               const ba_chunk *whole, char *weights, char *slopes);

/* Adds the contributions of some tiles of an item and of one chunk to dQ, dK and dV. The tiles walk the same list. *turn says whether the item's turn
 * for the keys of the chunk has come; if not, the function waits for the turn before it adds to dK and dV. */
void ba_run_gradient_tiles(const ba_backward_call *c, const ba_backward_scratch *w, int64_t item, const ba_tile_state *const *tiles, int64_t count,
                           const ba_chunk *chunk, bool *turn);

/* ---- The two drivers: each has a ba_item_fn, and the bytes of a worker's scratch memory ------------------------------------- */

void ba_backward_by_tile(void *context, int64_t index, int worker);
void ba_backward_by_block(void *context, int64_t index, int worker);
int64_t ba_backward_by_tile_bytes(const ba_backward_call *c);
int64_t ba_backward_by_block_bytes(const ba_backward_call *c);

#endif
