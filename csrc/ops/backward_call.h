/* A backward call at work: what all of its items share, a worker's scratch, and what its two drivers have in common. Internal.
 *
 * backward.c makes the call, and clears and rounds dK and dV. backward_by_tile.c runs items whose tiles walk their lists; backward_by_block.c runs
 * items of lists that route single queries, block by block. backward_tiles.c computes one tile and one chunk for both. */
#ifndef BA_OPS_BACKWARD_CALL_H
#define BA_OPS_BACKWARD_CALL_H

#include "ops/backward.h"
#include "ops/scratch.h"
#include "ops/tiles.h"
#include "ops/turns.h"

typedef struct ba_backward_scratch {
    char *q, *dout, *dq, *q_rows, *dout_rows, *lanes; /* tiles one after the other */
    int32_t *bounds;
    uint64_t *bitmaps;
    char *weights, *slopes, *packed_k, *packed_v, *packed_columns, *reals;
    const void **k_rows, **v_rows, **packed_k_rows, **packed_v_rows, **k_columns, **rows, **more_rows;
    void **dk_rows, **dv_rows;
    int32_t *key_index;
    ba_tile_state *tiles;
} ba_backward_scratch;

typedef struct ba_backward_call {
    const ba_problem *problem;
    const ba_gradients *gradients;
    const ba_attend_family *family;
    const ba_tuning *tuning;
    ba_plan plan;
    ba_turn *turns;                /* [items] */
    ba_view dk, dv;                /* of reals: where the sums are */
    bool rounded;                  /* they are not the outputs */
    int64_t row_lanes;             /* (query, head) pairs of a row of lists at most */
    const ba_attend_family *reals; /* of the level that the family is of */
    char *scratch;
    int64_t scratch_bytes; /* a worker */
} ba_backward_call;

/* Lanes that a tile's panels have room for: the last may be half empty. */
static inline int64_t ba_gradient_tile_room(const ba_backward_call *c) {
    return ba_round_up(c->plan.tiling.tile_queries, c->family->lanes[BA_PANEL_WIDE]);
}

/* Reals of a row that is packed in any of the ways. */
static inline int64_t ba_padded(const ba_backward_call *c, int64_t dim) { return ba_round_up(dim, ba_max(BA_PACK_PAD, c->family->lane_block)); }

/* A worker's scratch for so many tiles: hands out its parts, or with base NULL counts the bytes. */
int64_t ba_lay_out_backward_scratch(const ba_backward_call *c, int64_t tiles, char *base, ba_backward_scratch *w);

/* ---- backward_tiles.c ------------------------------------------------------------------------------------------------ */

/* Adds the tile's next panel, of its lanes from `lane` on. *at: places of the scratch that are taken. */
ba_panel_state *ba_add_gradient_panel(const ba_backward_call *c, const ba_backward_scratch *w, ba_tile_state *t, int64_t lane, int64_t *at);

/* What each lane of a panel sees, and its log-sum-exp and delta. A query that attended nothing sees nothing. */
void ba_open_gradient_lanes(const ba_backward_call *c, const ba_backward_scratch *w, const ba_item *item, ba_tile_state *t, ba_panel_state *s);

/* Packs a tile's queries as columns and as rows: their rows of q are w->rows, those of dout w->more_rows. */
void ba_pack_gradient_tile(const ba_backward_call *c, const ba_backward_scratch *w, ba_tile_state *t);

void ba_clear_dq(const ba_backward_call *c, const ba_tile_state *t);

/* A panel's dQ, to rows in the dtype of `family`. */
void ba_finish_dq(const ba_backward_call *c, const ba_backward_scratch *w, const ba_attend_family *family, const ba_panel_state *s,
                  void *const *rows);

/* Where the rows of the `keys` keys in w->key_index lie, and those of their gradients; K and V as the kernels read them. */
ba_chunk ba_open_gradient_chunk(const ba_backward_call *c, const ba_backward_scratch *w, const ba_item *item, int64_t keys);

/* Adds what the tile and the chunk give to dQ, dK and dV. *turn: whether the item may add to the chunk's keys already. */
void ba_run_gradient_tile(const ba_backward_call *c, const ba_backward_scratch *w, int64_t item, const ba_tile_state *t, const ba_chunk *chunk,
                          bool *turn);

/* ---- The drivers: a ba_item_fn each, and the bytes of a worker's scratch -------------------------------------------------- */

void ba_backward_by_tile(void *context, int64_t index, int worker);
void ba_backward_by_block(void *context, int64_t index, int worker);
int64_t ba_backward_by_tile_bytes(const ba_backward_call *c);
int64_t ba_backward_by_block_bytes(const ba_backward_call *c);

#endif
