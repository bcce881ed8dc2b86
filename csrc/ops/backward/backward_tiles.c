/* A worker's scratch memory, and gradients of some query tiles and one chunk of keys, for both backward drivers. (For tile registers see
 * csrc/kernels/tiles/.) */
#include <assert.h>
#include <math.h>
#include <string.h>

#include "kernels/prefetch_rows.h"
#include "ops/backward/backward_call.h"
#include "ops/plan/bias.h"
#include "ops/reals.h"

/* ---- Scratch ---------------------------------------------------------------------------------------------------------- */

int64_t ba_lay_out_backward_scratch(const ba_backward_call *c, int64_t tiles, char *base, ba_backward_scratch *w) {
    const ba_attend_family *f = c->family;
    const ba_problem *p = c->problem;
    const int64_t room = ba_gradient_tile_room(c), lanes = tiles * room, keys = c->tuning->gradient_keys;
    const int64_t weights = ba_gradient_room_at_once(c, tiles) * keys * (f->gradient->gradient_tile ? f->pack_bytes : f->real_size);
    const int64_t pad_k = ba_padded(c, p->head_dim), pad_v = ba_padded(c, p->v_dim), pointer = sizeof(void *);
    int64_t used = 0;
    w->q = ba_take(base, &used, lanes * pad_k * f->q_bytes);
    w->dout = ba_take(base, &used, lanes * pad_v * f->q_bytes);
    w->dq = ba_take(base, &used, lanes * pad_k * f->real_size);
    w->q_rows = ba_take(base, &used, lanes * pad_k * f->real_size);
    w->dout_rows = ba_take(base, &used, lanes * pad_v * f->real_size);
    w->lanes = ba_take(base, &used, lanes * 2 * f->real_size);
    w->bounds = ba_take(base, &used, lanes * 2 * (int64_t)sizeof(int32_t));
    w->bitmaps = ba_take(base, &used, tiles * c->plan.bitmap_words * (int64_t)sizeof(uint64_t));
    w->weights = ba_take(base, &used, weights);
    w->slopes = ba_take(base, &used, weights);
    w->bias = ba_take(base, &used, ba_has_bias(p) ? ba_gradient_room_at_once(c, tiles) * keys * f->real_size : 0);
    w->packed_k = ba_take(base, &used, f->pack->keys ? keys * pad_k * f->pack_bytes : 0);
    w->packed_v = ba_take(base, &used, f->pack->values ? keys * pad_v * f->pack_bytes : 0);
    w->packed_columns = ba_take(base, &used, f->gradient->gradient_tile ? keys * pad_k * f->pack_bytes : 0);
    w->reals = ba_take(base, &used, 2 * BA_MAX_LANES * f->real_size);
    for (int i = 0; i < 2; i++) {
        ba_gradient_rows *rows = &w->chunk_rows[i];
        rows->key_index = ba_take(base, &used, keys * (int64_t)sizeof(int32_t));
        rows->k_rows = ba_take(base, &used, keys * pointer);
        rows->v_rows = ba_take(base, &used, keys * pointer);
        rows->k_columns = ba_take(base, &used, keys * pointer);
    }
    w->ahead = ba_take(base, &used, BA_GRADIENT_AHEADS * (int64_t)sizeof *w->ahead);
    w->packed_k_rows = ba_take(base, &used, keys * pointer);
    w->packed_v_rows = ba_take(base, &used, keys * pointer);
    w->k_columns = ba_take(base, &used, keys * pointer);
    w->dk_rows = ba_take(base, &used, keys * pointer);
    w->dv_rows = ba_take(base, &used, keys * pointer);
    w->rows = ba_take(base, &used, room * pointer);
    w->more_rows = ba_take(base, &used, room * pointer);
    w->tiles = ba_take(base, &used, tiles * (int64_t)sizeof(ba_tile_state));
    return used;
}

/* ---- Tiles ------------------------------------------------------------------------------------------------------------ */

/* The number that an array of lse's shape holds for a query. */
static double query_real(const ba_backward_call *c, const ba_view *view, int64_t batch, int64_t head, int64_t query) {
    return ba_get_real(ba_query_row(c->problem, view, c->family->real_size, batch, head, query), 0, c->family->real_size);
}

void ba_open_gradient_lanes(const ba_backward_call *c, const ba_backward_scratch *w, const ba_item *item, ba_tile_state *t, ba_panel_state *s,
                            double scale) {
    const ba_problem *p = c->problem;
    const int64_t real = c->family->real_size, room = c->family->lanes[s->width];
    int32_t *lo = (int32_t *)s->gradient.lo, *hi = (int32_t *)s->gradient.hi;
    void *lse = (void *)s->gradient.lse, *delta = (void *)s->gradient.delta;
    ba_find_lanes(p, &c->gradients->dout, item->batch, &t->tile, s->lane, s->lanes, w->rows);
    ba_find_lanes(p, &p->out, item->batch, &t->tile, s->lane, s->lanes, w->more_rows);
    c->family->gradient->dot_rows(delta, w->rows, w->more_rows, s->lanes, p->v_dim);
    ba_open_lanes(s);
    for (int64_t i = 0; i < s->lanes; i++) {
        const int64_t query = ba_lane_query(&t->tile, s->lane + i), head = ba_lane_head(&t->tile, s->lane + i);
        const double sum = query_real(c, &p->lse, item->batch, head, query);
        const double dlse = c->gradients->dlse.data ? query_real(c, &c->gradients->dlse, item->batch, head, query) : 0;
        ba_range seen = ba_visible_keys(p, item->batch, query);
        if (sum == -INFINITY) seen = (ba_range){0, 0};
        ba_set_real(lse, i, sum == -INFINITY ? INFINITY : sum * BA_LOG2_E, real);
        ba_set_real(delta, i, (ba_get_real(delta, i, real) - dlse) * scale, real);
        ba_set_lane(s, i, seen, lo, hi);
    }
    for (int64_t i = s->lanes; i < room; i++) {
        ba_set_real(lse, i, 0, real);
        ba_set_real(delta, i, 0, real);
    }
    ba_close_lanes(s, room, lo, hi, t);
}

ba_panel_state *ba_add_gradient_panel(const ba_backward_call *c, const ba_backward_scratch *w, ba_tile_state *t, int64_t lane, int64_t *at) {
    const ba_attend_family *f = c->family;
    const int64_t real = f->real_size, pad_k = ba_padded(c, c->problem->head_dim), pad_v = ba_padded(c, c->problem->v_dim),
                  left = t->tile.lanes - lane;
    ba_panel_state *s = &t->panel[t->panels++];
    s->width = left <= f->lanes[BA_PANEL_NARROW] ? BA_PANEL_NARROW : BA_PANEL_WIDE;
    const int64_t room = f->lanes[s->width];
    s->lane = lane;
    s->lanes = ba_min(left, room);
    s->gradient.q = w->q + *at * pad_k * f->q_bytes;
    s->gradient.dout = w->dout + *at * pad_v * f->q_bytes;
    s->gradient.dq = w->dq + *at * pad_k * real;
    s->gradient.lse = w->lanes + *at * 2 * real;
    s->gradient.delta = w->lanes + (*at * 2 + room) * real;
    s->gradient.lo = w->bounds + *at * 2;
    s->gradient.hi = w->bounds + *at * 2 + room;
    s->gradient.bias = (ba_bias){NULL, false};
    *at += room;
    return s;
}

/* Packs one panel's rows of q and of dout as columns, dout times `scale`. */
static void pack_panel(const ba_backward_call *c, const ba_backward_scratch *w, const ba_panel_state *s, double scale) {
    const ba_problem *p = c->problem;
    const ba_pack_queries_fn pack = c->family->pack->queries[s->width];
    pack((void *)s->gradient.q, w->rows + s->lane, s->lanes, p->head_dim, p->scale * BA_LOG2_E);
    pack((void *)s->gradient.dout, w->more_rows + s->lane, s->lanes, p->v_dim, scale);
}

void ba_pack_gradient_panels(const ba_backward_call *c, const ba_backward_scratch *w, const ba_tile_state *t, double scale) {
    for (int n = 0; n < t->panels; n++) pack_panel(c, w, &t->panel[n], scale);
}

void ba_pack_gradient_tile(const ba_backward_call *c, const ba_backward_scratch *w, ba_tile_state *t) {
    const ba_problem *p = c->problem;
    const ba_gradient_kernels *f = c->family->gradient;
    /* add_tile takes rows that are packed panel by panel, add_rows takes rows that are packed for a whole tile */
    const int64_t some = f->gradient_tile ? c->family->lanes[BA_PANEL_WIDE] : t->tile.lanes, real = c->family->real_size;
    t->finite_q = t->finite_dout = true;
    int n = 0;
    for (int64_t lane = 0; lane < t->tile.lanes; lane += some) {
        const int64_t lanes = ba_min(some, t->tile.lanes - lane);
        t->finite_q &= f->pack_tile(t->q + lane * ba_padded(c, p->head_dim) * real, w->rows + lane, lanes, p->head_dim);
        t->finite_dout &= f->pack_tile(t->dout + lane * ba_padded(c, p->v_dim) * real, w->more_rows + lane, lanes, p->v_dim);
        for (; n < t->panels && t->panel[n].lane < lane + lanes; n++) pack_panel(c, w, &t->panel[n], p->scale); /* while the rows are in L1 */
    }
}

void ba_clear_dq(const ba_backward_call *c, const ba_tile_state *t) {
    const ba_attend_family *f = c->family;
    const int64_t dims = ba_round_up(c->problem->head_dim, f->dim_pad);
    for (int n = 0; n < t->panels; n++) memset(t->panel[n].gradient.dq, 0, (size_t)(f->lanes[t->panel[n].width] * dims * f->real_size));
}

void ba_finish_dq(const ba_backward_call *c, const ba_backward_scratch *w, ba_finish_fn finish, const ba_panel_state *s, void *const *rows) {
    const int64_t real = c->family->real_size;
    char *const zeros = w->reals, *const ones = zeros + BA_MAX_LANES * real;
    for (int64_t i = 0; i < c->family->lanes[BA_PANEL_WIDE]; i++) {
        ba_set_real(zeros, i, 0, real);
        ba_set_real(ones, i, 1, real);
    }
    const ba_panel panel = {.o = s->gradient.dq, .m = zeros, .l = ones};
    finish(&panel, s->lanes, c->problem->head_dim, rows, NULL);
}

/* ---- Chunks ----------------------------------------------------------------------------------------------------------- */

/* Finds the rows of some keys in an array of K's or V's shape. */
static void find_keys(const ba_problem *p, const ba_view *view, int64_t element_size, const ba_item *item, const int32_t *key_index, int64_t keys,
                      void **rows) {
    if (keys == 0) return; /* an array without keys may be a null pointer */
    char *const first = ba_key_row(p, view, element_size, item->batch, item->kv_head, 0);
    for (int64_t j = 0; j < keys; j++) rows[j] = first + key_index[j] * view->token_stride * element_size;
}

/* Finds the rows of the first `shared` keys of a chunk in the shared, packed K or V. The keys of a group have consecutive numbers. */
static void find_shared(const ba_shared_rows *s, int64_t head, int64_t group, const ba_gradient_rows *chunk, const void **rows) {
    for (int64_t at = 0; at < chunk->shared; at += group) {
        const char *row = s->data + s->offset[head] + chunk->key_index[at] * s->row_bytes;
        for (int64_t j = 0; j < group; j++) rows[at + j] = row + j * s->row_bytes;
    }
}

void ba_find_gradient_rows(const ba_backward_call *c, const ba_item *item, ba_gradient_rows *rows) {
    const ba_problem *p = c->problem;
    const int64_t head = item->batch * p->kv_heads + item->kv_head, group = c->family->key_pad;
    rows->shared = ba_is_shared(&c->sharing, item->batch) ? rows->keys - rows->keys % group : 0;
    find_shared(&c->sharing.k, head, group, rows, rows->k_rows);
    find_shared(&c->sharing.v, head, group, rows, rows->v_rows);
    find_shared(&c->sharing.k_columns, head, group, rows, rows->k_columns);
    const int64_t at = rows->shared, others = rows->keys - at;
    find_keys(p, &p->k, p->kv_element_size, item, rows->key_index + at, others, (void **)rows->k_rows + at);
    find_keys(p, &p->v, p->kv_element_size, item, rows->key_index + at, others, (void **)rows->v_rows + at);
    memcpy(rows->k_columns + at, rows->k_rows + at, (size_t)others * sizeof *rows->k_rows);
}

/* Packs all rows of the chunk except the first `shared`, which are packed already, and sets packed_rows to the pointers that the kernel is given. */
static void pack_others(ba_pack_rows_fn pack, char *packed, const void **packed_rows, const void *const *rows, int64_t shared, int64_t keys,
                        int64_t dim) {
    memcpy(packed_rows, rows, (size_t)shared * sizeof *rows);
    if (shared < keys) pack(packed, packed_rows + shared, rows + shared, NULL, keys - shared, dim);
}

/* The rows of the next chunk that a kernel may prefetch: shared, packed rows, or else `bytes` bytes of each row in the caller's array. */
static ba_prefetch_rows rows_of_next(const ba_gradient_rows *next, const void *const *rows, const ba_shared_rows *shared, int64_t bytes) {
    if (next->shared) return (ba_prefetch_rows){.rows = rows, .count = next->shared, .bytes = shared->row_bytes};
    return (ba_prefetch_rows){.rows = rows, .count = next->keys, .bytes = bytes};
}

/* Sets the rows that gradient_tile may prefetch: the rows that add_tile adds to, and the rows of the next chunk, where this is known. */
static void set_ahead(const ba_backward_call *c, const ba_backward_scratch *w, int64_t keys, const ba_gradient_rows *next) {
    const ba_problem *p = c->problem;
    const int64_t real = c->family->real_size, size = p->kv_element_size;
    memset(w->ahead, 0, BA_GRADIENT_AHEADS * sizeof *w->ahead);
    w->ahead[0] = (ba_prefetch_rows){.rows = (const void *const *)w->dk_rows, .count = keys, .bytes = p->head_dim * real};
    w->ahead[1] = (ba_prefetch_rows){.rows = (const void *const *)w->dv_rows, .count = keys, .bytes = p->v_dim * real};
    if (!next) return;
    w->ahead[2] = rows_of_next(next, next->k_rows, &c->sharing.k, p->head_dim * size);
    w->ahead[3] = rows_of_next(next, next->v_rows, &c->sharing.v, p->v_dim * size);
    if (next->shared) w->ahead[4] = rows_of_next(next, next->k_columns, &c->sharing.k_columns, 0);
}

ba_chunk ba_open_gradient_chunk(const ba_backward_call *c, const ba_backward_scratch *w, const ba_item *item, const ba_gradient_rows *rows,
                                const ba_gradient_rows *next) {
    const ba_problem *p = c->problem;
    const ba_attend_family *f = c->family;
    const int64_t keys = rows->keys, shared = rows->shared, k_dim = p->head_dim, v_dim = p->v_dim, real = f->real_size;
    ba_chunk chunk = {.keys = keys,
                      .head_dim = k_dim,
                      .v_dim = v_dim,
                      .key_index = rows->key_index,
                      .k_rows = rows->k_rows,
                      .v_rows = rows->v_rows,
                      .softcap = p->softcap * BA_LOG2_E};
    if (c->dk.data) find_keys(p, &c->dk, real, item, rows->key_index, keys, w->dk_rows);
    if (c->dv.data) find_keys(p, &c->dv, real, item, rows->key_index, keys, w->dv_rows);
    if (f->gradient->gradient_tile) {
        pack_others(f->pack->values, w->packed_columns, w->k_columns, rows->k_columns, shared, keys, k_dim);
        chunk.scale = p->scale * BA_LOG2_E;
        set_ahead(c, w, keys, next);
    }
    /* families with gradient_tile read V in the format of K */
    const ba_pack_rows_fn pack_values = f->gradient->gradient_tile ? f->pack->keys : f->pack->values;
    if (f->pack->keys) {
        pack_others(f->pack->keys, w->packed_k, w->packed_k_rows, rows->k_rows, shared, keys, k_dim);
        chunk.k_rows = w->packed_k_rows;
    }
    if (pack_values) {
        pack_others(pack_values, w->packed_v, w->packed_v_rows, rows->v_rows, shared, keys, v_dim);
        chunk.v_rows = w->packed_v_rows;
    }
    return chunk;
}

ba_range ba_run_gradient_panel(const ba_backward_call *c, const ba_backward_scratch *w, int64_t batch, const ba_tile *tile, const ba_panel_state *s,
                               const ba_chunk *whole, char *weights, char *slopes) {
    const ba_attend_family *f = c->family;
    const int64_t begin = ba_first_at_least(whole->key_index, whole->keys, s->any.lo);
    const int64_t end = ba_first_at_least(whole->key_index, whole->keys, s->any.hi), key_bytes = f->lanes[s->width] * f->real_size;
    ba_chunk chunk = *whole;
    chunk.keys = end - begin;
    chunk.k_rows += begin;
    chunk.v_rows += begin;
    chunk.key_index += begin;
    ba_gradient_panel panel = s->gradient;
    if (begin >= end || !ba_make_bias(c->problem, c->fill_bias, batch, tile, s, f->lanes[s->width], &chunk, w->bias, &panel.bias))
        return (ba_range){0, 0};
    if (ba_lanes_see_all(s, chunk.key_index, chunk.keys)) panel.lo = panel.hi = NULL;
    f->gradient->gradient[s->width](&panel, &chunk, weights + begin * key_bytes, slopes + begin * key_bytes);
    return (ba_range){begin, end};
}

/* Computes the weights and slopes of one panel, `at` bytes behind the beginning of their scratch memory, and adds to its dQ. If the panel sees some
 * keys of the chunk, the weights and slopes of the other keys become 0. */
static void run_panel(const ba_backward_call *c, const ba_backward_scratch *scratch, int64_t batch, const ba_tile *tile, const ba_panel_state *s,
                      const ba_chunk *whole, int64_t at, ba_weights *w, ba_weights *sl) {
    char *const weights = scratch->weights + at, *const slopes = scratch->slopes + at;
    const int64_t width = c->family->lanes[s->width], key_bytes = width * c->family->real_size;
    const ba_range keys = ba_run_gradient_panel(c, scratch, batch, tile, s, whole, weights, slopes);
    for (int n = 0; n < 2 && keys.lo < keys.hi; n++) {
        char *const data = n ? slopes : weights;
        memset(data, 0, (size_t)(keys.lo * key_bytes));
        memset(data + keys.hi * key_bytes, 0, (size_t)((whole->keys - keys.hi) * key_bytes));
    }
    *w = (ba_weights){.data = weights, .width = width, .lanes = s->lanes, .begin = keys.lo, .end = keys.hi};
    *sl = *w;
    sl->data = slopes;
}

/* Prefetches the rows of dK and dV of keys [first, end) of the chunk. Until the item has its turn, run_panels() calls this function after each
 * panel, for a part of the keys. */
static void prefetch_sums(const ba_backward_call *c, const ba_backward_scratch *w, int64_t first, int64_t end) {
    const int64_t real = c->family->real_size, n = end - first;
    const int level = ba_prefetch_level(c->family->isa);
    ba_prefetch_to_keep(level, (const void *const *)w->dk_rows + first, n, 0, c->problem->head_dim * real, true);
    ba_prefetch_to_keep(level, (const void *const *)w->dv_rows + first, n, 0, c->problem->v_dim * real, true);
}

/* Waits until the item may add to all keys of the chunk. */
static void wait_for_turn(const ba_backward_call *c, int64_t item, const ba_chunk *chunk, bool *turn) {
    if (!*turn) ba_turn_wait(c->turns, item, chunk->key_index[chunk->keys - 1]);
    *turn = true;
}

/* ba_run_gradient_tiles() for one tile of a vector family: panel by panel, then the sums of the whole tile. */
static void run_panels(const ba_backward_call *c, const ba_backward_scratch *w, int64_t item, const ba_tile_state *t, const ba_chunk *chunk,
                       bool *turn) {
    const ba_problem *p = c->problem;
    ba_weights weights[BA_TILE_PANELS], slopes[BA_TILE_PANELS];
    int64_t at = 0;
    bool some = false;
    for (int n = 0; n < t->panels; n++) {
        run_panel(c, w, c->plan.item[item].batch, &t->tile, &t->panel[n], chunk, at, &weights[n], &slopes[n]);
        const int64_t first = chunk->keys * n / t->panels, end = chunk->keys * (n + 1) / t->panels;
        if (!*turn) prefetch_sums(c, w, first, end);
        at += chunk->keys * weights[n].width * c->family->real_size;
        some |= weights[n].begin < weights[n].end;
    }
    if (!some) return;
    wait_for_turn(c, item, chunk, turn);
    ba_add_rows add = {.panels = t->panels, .lanes = t->tile.lanes, .keys = chunk->keys};
    add.weights = weights;
    add.packed = t->dout;
    add.finite = t->finite_dout;
    add.dim = p->v_dim;
    add.rows = w->dv_rows;
    c->family->gradient->add_rows(&add);
    add.weights = slopes;
    add.packed = t->q;
    add.finite = t->finite_q;
    add.dim = p->head_dim;
    add.rows = w->dk_rows;
    c->family->gradient->add_rows(&add);
}

/* Writes the panels of a tile to `panels`. `at`: the number of lanes that the panels of earlier tiles have room for. Returns whether some lane sees
 * some key. */
static bool take_panels(const ba_backward_call *c, const ba_backward_scratch *w, int64_t batch, const ba_tile_state *t, const ba_chunk *chunk,
                        int64_t at, ba_tile_panel *panels) {
    const int64_t real = c->family->real_size, wide = c->family->lanes[BA_PANEL_WIDE];
    bool some = false;
    for (int n = 0; n < t->panels; n++, at += wide) {
        const ba_panel_state *s = &t->panel[n];
        panels[n] = (ba_tile_panel){.panel = s->gradient,
                                    .q_rows = t->q + n * wide * ba_padded(c, c->problem->head_dim) * real,
                                    .dout_rows = t->dout + n * wide * ba_padded(c, c->problem->v_dim) * real,
                                    .width = c->family->lanes[s->width],
                                    .lanes = s->lanes,
                                    .begin = ba_first_at_least(chunk->key_index, chunk->keys, s->any.lo),
                                    .end = ba_first_at_least(chunk->key_index, chunk->keys, s->any.hi)};
        if (panels[n].begin < panels[n].end && !ba_make_bias(c->problem, c->fill_bias, batch, &t->tile, s, panels[n].width, chunk,
                                                             w->bias + at * chunk->keys * real, &panels[n].panel.bias))
            panels[n].end = panels[n].begin;
        some |= panels[n].begin < panels[n].end;
    }
    return some;
}

/* ba_run_gradient_tiles() for families that have gradient_tile: gives the tiles to the kernels as one tile. */
static void run_whole_tiles(const ba_backward_call *c, const ba_backward_scratch *w, int64_t item, const ba_tile_state *const *tiles, int64_t count,
                            const ba_chunk *chunk, bool *turn) {
    ba_tile_panel panels[BA_TILE_PANELS];
    ba_gradient_tile all = {.panel = panels,
                            .scale = c->problem->scale,
                            .k_columns = w->k_columns,
                            .weights = w->weights,
                            .slopes = w->slopes,
                            .finite_q = true,
                            .finite_dout = true,
                            .dk_rows = w->dk_rows,
                            .dv_rows = w->dv_rows,
                            .ahead = w->ahead,
                            .aheads =
                                *turn ? 0 : BA_GRADIENT_AHEADS}; /* once the item has its turn, an earlier call for this chunk has prefetched all */
    for (int64_t i = 0; i < count; i++) {
        const ba_tile_state *t = tiles[i];
        assert(all.panels + t->panels <= BA_TILE_PANELS);
        if (!take_panels(c, w, c->plan.item[item].batch, t, chunk, all.panels * c->family->lanes[BA_PANEL_WIDE], panels + all.panels)) continue;
        all.panels += t->panels;
        all.finite_q &= t->finite_q;
        all.finite_dout &= t->finite_dout;
    }
    if (!all.panels) return;
    c->family->gradient->gradient_tile(&all, chunk);
    wait_for_turn(c, item, chunk, turn);
    c->family->gradient->add_tile(&all, chunk);
}

void ba_run_gradient_tiles(const ba_backward_call *c, const ba_backward_scratch *w, int64_t item, const ba_tile_state *const *tiles, int64_t count,
                           const ba_chunk *chunk, bool *turn) {
    const int64_t panels = ba_ceil_div(ba_plan_tile_lanes(&c->plan), c->family->lanes[BA_PANEL_WIDE]);
    const int64_t together = c->family->joins_tiles ? BA_TILE_PANELS / panels : 1;
    for (int64_t i = 0; i < count; i += together) {
        if (c->family->gradient->gradient_tile) run_whole_tiles(c, w, item, tiles + i, ba_min(together, count - i), chunk, turn);
        else run_panels(c, w, item, tiles[i], chunk, turn);
    }
}
