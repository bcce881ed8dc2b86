/* Gradients where lists route single queries. An item is a long run of list rows. Its lists are inverted. Then, block by block, the queries that list
 * the block form tiles, which exist for this block only; the dQ of such a tile is added to the dQ that each query keeps for the whole item. */
#include <string.h>

#include "core/pool.h"
#include "ops/backward/backward_call.h"
#include "ops/reals.h"

typedef struct rows_scratch {
    ba_backward_scratch common; /* for one tile at a time */
    /* [lane of the item]; the lanes of list row t begin at t * list_row_lanes */
    char *lane_lse, *lane_delta, *lane_dq;
    int32_t *lane_lo, *lane_hi;
    char *lane_q, *lane_dout; /* rows, side by side. In the caller's arrays, the rows of a head may compete for few lines of the cache */
    char *added;              /* the dQ of one panel, before it is added to lane_dq */
    int32_t *attending;       /* lanes that attend the current keys */
    int32_t *begin, *listed;  /* the inverted lists (ba_plan_invert_lists) */
} rows_scratch;

static int64_t row_bytes(const ba_backward_call *c, int64_t dim) { return dim * c->problem->element_size; }

/* Lays out the scratch memory of one worker. */
static int64_t lay_out_rows_scratch(const ba_backward_call *c, char *base, rows_scratch *r) {
    const ba_attend_family *f = c->family;
    const ba_problem *p = c->problem;
    const int64_t lanes = c->plan.grouping.tiles * c->list_row_lanes, opened = lanes + BA_MAX_LANES, pad_k = ba_padded(c, p->head_dim);
    int64_t used = ba_lay_out_backward_scratch(c, 1, base, &r->common);
    r->lane_lse = ba_take(base, &used, opened * f->real_size); /* open_rows() fills whole panels, which may reach beyond the last row */
    r->lane_delta = ba_take(base, &used, opened * f->real_size);
    r->lane_lo = ba_take(base, &used, opened * (int64_t)sizeof(int32_t));
    r->lane_hi = ba_take(base, &used, opened * (int64_t)sizeof(int32_t));
    r->lane_dq = ba_take(base, &used, lanes * pad_k * f->real_size);
    r->lane_q = ba_take(base, &used, lanes * row_bytes(c, p->head_dim));
    r->lane_dout = ba_take(base, &used, lanes * row_bytes(c, p->v_dim));
    r->added = ba_take(base, &used, BA_MAX_LANES * pad_k * f->real_size);
    r->attending = ba_take(base, &used, lanes * (int64_t)sizeof(int32_t));
    r->begin = ba_take(base, &used, (p->block_columns + 1) * (int64_t)sizeof(int32_t));
    r->listed = ba_take(base, &used, c->plan.grouping.tiles * p->blocks.dims[3] * (int64_t)sizeof(int32_t));
    return used;
}

int64_t ba_backward_by_block_bytes(const ba_backward_call *c) {
    rows_scratch unused;
    return lay_out_rows_scratch(c, NULL, &unused);
}

/* The list row that a lane of the item belongs to. */
static ba_tile row_of_lane(const ba_backward_call *c, const ba_item *item, int64_t lane) {
    return ba_plan_tile(&c->plan, item->batch, item->kv_head, item->first_tile + lane / c->list_row_lanes);
}

/* Copies the rows of all lanes of an item, sets the keys that the lanes see, their log-sum-exps and their deltas, and clears their dQ. */
static void open_rows(const ba_backward_call *c, const rows_scratch *r, const ba_item *item) {
    const ba_problem *p = c->problem;
    const int64_t real = c->family->real_size, lanes = item->tiles * c->list_row_lanes, bytes = row_bytes(c, p->head_dim),
                  v_bytes = row_bytes(c, p->v_dim);
    for (int64_t lane = 0; lane < lanes; lane += c->list_row_lanes) {
        ba_tile_state t = {.tile = row_of_lane(c, item, lane)};
        ba_panel_state s = {.width = BA_PANEL_NARROW};
        for (; s.lane < t.tile.lanes; s.lane += s.lanes) {
            s.lanes = ba_min(c->family->lanes[BA_PANEL_NARROW], t.tile.lanes - s.lane);
            s.gradient.lse = r->lane_lse + (lane + s.lane) * real;
            s.gradient.delta = r->lane_delta + (lane + s.lane) * real;
            s.gradient.lo = r->lane_lo + lane + s.lane;
            s.gradient.hi = r->lane_hi + lane + s.lane;
            ba_open_gradient_lanes(c, &r->common, item, &t, &s, p->scale);
            ba_find_lanes(p, &p->q, item->batch, &t.tile, s.lane, s.lanes, r->common.rows);
            ba_find_lanes(p, &c->gradients->dout, item->batch, &t.tile, s.lane, s.lanes, r->common.more_rows);
            for (int64_t i = 0; i < s.lanes; i++) {
                memcpy(r->lane_q + (lane + s.lane + i) * bytes, r->common.rows[i], (size_t)bytes);
                memcpy(r->lane_dout + (lane + s.lane + i) * v_bytes, r->common.more_rows[i], (size_t)v_bytes);
            }
        }
        for (int64_t i = t.tile.lanes; i < c->list_row_lanes; i++) r->lane_lo[lane + i] = r->lane_hi[lane + i] = 0;
    }
    memset(r->lane_dq, 0, (size_t)(lanes * ba_padded(c, p->head_dim) * real));
}

/* Forms a tile of n lanes of the item. */
static void gather_tile(const ba_backward_call *c, const rows_scratch *r, const int32_t *lanes, int64_t n, ba_tile_state *t) {
    const ba_backward_scratch *w = &r->common;
    const int64_t real = c->family->real_size;
    int64_t at = 0;
    t->tile = (ba_tile){.lanes = n};
    t->q = w->q_rows;
    t->dout = w->dout_rows;
    t->panels = 0;
    for (int64_t i = 0; i < n; i++) {
        w->rows[i] = r->lane_q + lanes[i] * row_bytes(c, c->problem->head_dim);
        w->more_rows[i] = r->lane_dout + lanes[i] * row_bytes(c, c->problem->v_dim);
    }
    for (int64_t lane = 0; lane < n; lane += t->panel[t->panels - 1].lanes) {
        ba_panel_state *s = ba_add_gradient_panel(c, w, t, lane, &at);
        ba_open_lanes(s);
        for (int64_t i = 0; i < c->family->lanes[s->width]; i++) {
            const int64_t from = lanes[lane + ba_min(i, s->lanes - 1)];
            const bool there = i < s->lanes; /* a lane without a query sees the keys that the last query sees, so that it needs no mask of its own */
            ba_set_lane(s, i, (ba_range){r->lane_lo[from], r->lane_hi[from]}, (int32_t *)s->gradient.lo, (int32_t *)s->gradient.hi);
            ba_set_real((void *)s->gradient.lse, i, there ? ba_get_real(r->lane_lse, from, real) : 0, real);
            ba_set_real((void *)s->gradient.delta, i, there ? ba_get_real(r->lane_delta, from, real) : 0, real);
        }
    }
    ba_pack_gradient_tile(c, w, t);
    ba_clear_dq(c, t);
}

/* Adds the tile's dQ to the dQ of its lanes. */
static void keep_dq(const ba_backward_call *c, const rows_scratch *r, const ba_tile_state *t, const int32_t *lanes) {
    const int64_t real = c->family->real_size, dim = c->problem->head_dim, pad = ba_padded(c, dim);
    for (int n = 0; n < t->panels; n++) {
        const ba_panel_state *s = &t->panel[n];
        void *rows[BA_MAX_LANES];
        for (int64_t i = 0; i < s->lanes; i++) rows[i] = r->added + i * pad * real;
        ba_finish_dq(c, &r->common, c->family->pack->finish_reals[s->width], s, rows);
        for (int64_t i = 0; i < s->lanes; i++) c->family->pack->add_reals(r->lane_dq + lanes[s->lane + i] * pad * real, rows[i], dim);
    }
}

/* Computes the gradients of keys [first, end) of a column and of the queries that list the column. */
static void attend_keys(const ba_backward_call *c, const rows_scratch *r, int64_t index, int64_t column, int64_t first, int64_t end) {
    const ba_item *item = &c->plan.item[index];
    int64_t n = 0;
    for (int64_t i = r->begin[column]; i < r->begin[column + 1]; i++)
        for (int64_t lane = r->listed[i] * c->list_row_lanes; lane < (r->listed[i] + 1) * c->list_row_lanes; lane++)
            if (r->lane_lo[lane] < end && r->lane_hi[lane] > first) r->attending[n++] = (int32_t)lane;
    if (n == 0) return;
    ba_turn_pass(c->turns, index, first);
    ba_gradient_rows rows = r->common.chunk_rows[0];
    rows.keys = end - first;
    for (int64_t j = 0; j < rows.keys; j++) rows.key_index[j] = (int32_t)(first + j);
    ba_find_gradient_rows(c, item, &rows);
    const ba_chunk chunk = ba_open_gradient_chunk(c, &r->common, item, &rows, NULL);
    bool turn = false;
    for (int64_t at = 0, some; at < n; at += some) {
        ba_tile_state t;
        some = ba_min(c->plan.tiling.tile_queries, n - at);
        gather_tile(c, r, r->attending + at, some, &t);
        ba_run_gradient_tiles(c, &r->common, index, &(const ba_tile_state *){&t}, 1, &chunk, &turn);
        keep_dq(c, r, &t, r->attending + at);
    }
}

void ba_backward_by_block(void *context, int64_t index, int worker) {
    const ba_backward_call *c = context;
    const ba_problem *p = c->problem;
    const ba_item *item = &c->plan.item[index];
    const int64_t columns = ba_list_columns(p, item->batch), keys = ba_kv_span(p, item->batch).valid, step = c->tuning->gradient_keys;
    rows_scratch r;
    lay_out_rows_scratch(c, c->scratch + worker * c->scratch_bytes, &r);
    open_rows(c, &r, item);
    ba_plan_invert_lists(&c->plan, item, columns, r.begin, r.listed);
    for (int64_t column = 0; column < columns && !ba_stopped(); column++) {
        const int64_t end = ba_min(keys, (column + 1) * p->block_kv);
        for (int64_t first = column * p->block_kv; first < end; first += step) attend_keys(c, &r, index, column, first, ba_min(end, first + step));
    }
    ba_turn_pass(c->turns, index, BA_TURN_OVER);
    for (int64_t row = 0; row < item->tiles; row++) {
        const ba_tile tile = row_of_lane(c, item, row * c->list_row_lanes);
        ba_find_lanes(p, &c->gradients->dq, item->batch, &tile, 0, tile.lanes, r.common.rows);
        for (int64_t i = 0; i < tile.lanes; i++)
            c->family->gradient->store_row((void *)r.common.rows[i],
                                           r.lane_dq + (row * c->list_row_lanes + i) * ba_padded(c, p->head_dim) * c->family->real_size, p->head_dim);
    }
}
