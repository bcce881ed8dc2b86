/* Block-sparse attention, backward: loops, plan and scratch; it knows neither an ISA nor an element type.
 *
 * An item is a run of tiles of one (batch, KV head), as in the forward pass: they walk their lists side by side, chunk by
 * chunk. A chunk gives each panel its P, dS and dQ; then the whole tile adds its share to the chunk's rows of dK and dV.
 * dQ belongs to the tile. dK and dV are shared by all items of the (batch, KV head), which add in turns (turns.h): straight
 * into the outputs where these are reals, else into reals beside them that are rounded at the end.
 *
 * Where lists route single queries, an item is a longer run of rows: its lists are turned around, and block by block those that list the
 * block become tiles of their own, made for this block alone, whose dQ is added to what each query keeps. */
#include <assert.h>
#include <math.h>
#include <string.h>

#include "core/arena.h"
#include "core/status.h"
#include "ops/backward.h"
#include "ops/plan.h"
#include "ops/scratch.h"
#include "ops/turns.h"
#include "ops/walk.h"

#define LOG2_E 0x1.71547652b82fep+0

enum { MAX_GROUP_TILES = 16, MAX_PANELS = BA_MOST_TILE_PANELS, KEYS_AN_ITEM = 512, CACHE_LINE = 64 };

typedef enum panel_width { WIDE, NARROW } panel_width;

typedef struct panel_state {
    ba_gradient_panel panel; /* lo and hi set here, shown to a kernel only where a chunk needs them */
    panel_width width;
    int64_t lane, lanes; /* of the tile: the first, and how many */
    ba_range any, all;   /* keys that some lane sees; keys that every lane sees */
} panel_state;

typedef struct tile_state {
    ba_tile tile;
    int walk;       /* index of the list it shares */
    ba_range range; /* keys that some query sees */
    char *q, *dout; /* rows, by pack_tile */
    bool finite_q, finite_dout;
    int panels;
    panel_state panel[MAX_PANELS];
} tile_state;

typedef struct worker_scratch {
    char *q, *dout, *dq, *q_rows, *dout_rows, *lanes; /* tiles one after the other */
    int32_t *bounds;
    uint64_t *bitmaps;
    char *weights, *slopes, *packed_k, *packed_v, *packed_columns, *reals;
    const void **k_rows, **v_rows, **packed_k_rows, **packed_v_rows, **k_columns, **rows, **more_rows;
    void **dk_rows, **dv_rows;
    int32_t *key_index;
    tile_state *tiles;
    /* where rows meet block by block: by lane of the item, those of row t from t * row_lanes on */
    char *lane_lse, *lane_delta, *lane_dq, *added;
    int32_t *lane_lo, *lane_hi, *meeting;
    int32_t *begin, *listed; /* by ba_plan_invert_lists */
} worker_scratch;

typedef struct call {
    const ba_problem *problem;
    const ba_gradients *gradients;
    const ba_attend_family *family;
    const ba_tuning *tuning;
    ba_plan plan;
    ba_turn *turns;                /* [items] */
    ba_view dk, dv;                /* of reals: where the sums are */
    bool rounded;                  /* they are not the outputs */
    bool by_block;                 /* rows meet block by block */
    int64_t row_lanes;             /* (query, head) pairs of a row of lists at most */
    const ba_attend_family *reals; /* of the level that the family is of */
    char *scratch;
    int64_t scratch_bytes; /* a worker */
} call;

/* ---- Scratch ------------------------------------------------------------------------------------------------------ */

/* Lanes that a tile's panels have room for: the last may be half empty. */
static int64_t tile_room(const call *c) { return ba_round_up(c->plan.tile_queries, c->family->lanes[WIDE]); }

/* Reals of a row that is packed in any of the ways. */
static int64_t padded(const call *c, int64_t dim) { return ba_round_up(dim, ba_max(BA_PACK_PAD, c->family->lane_block)); }

static int64_t lay_out_scratch(const call *c, char *base, worker_scratch *w) {
    const ba_attend_family *f = c->family;
    const ba_problem *p = c->problem;
    const int64_t tiles = c->by_block ? 1 : c->plan.group_tiles, room = tile_room(c), lanes = tiles * room, keys = c->tuning->gradient_keys;
    const int64_t meeting = c->by_block ? c->plan.group_tiles * c->row_lanes : 0, opened = meeting ? meeting + BA_MAX_LANES : 0;
    const int64_t pad_k = padded(c, p->head_dim), pad_v = padded(c, p->v_dim), pointer = sizeof(void *);
    int64_t used = 0;
    w->q = ba_take(base, &used, lanes * pad_k * f->q_bytes);
    w->dout = ba_take(base, &used, lanes * pad_v * f->q_bytes);
    w->dq = ba_take(base, &used, lanes * pad_k * f->real_size);
    w->q_rows = ba_take(base, &used, lanes * pad_k * f->real_size);
    w->dout_rows = ba_take(base, &used, lanes * pad_v * f->real_size);
    w->lanes = ba_take(base, &used, lanes * 2 * f->real_size);
    w->bounds = (int32_t *)ba_take(base, &used, lanes * 2 * (int64_t)sizeof(int32_t));
    w->bitmaps = (uint64_t *)ba_take(base, &used, tiles * c->plan.bitmap_words * (int64_t)sizeof(uint64_t));
    w->weights = ba_take(base, &used, room * keys * f->real_size);
    w->slopes = ba_take(base, &used, room * keys * f->real_size);
    w->packed_k = ba_take(base, &used, f->pack->keys ? keys * pad_k * f->pack_bytes : 0);
    w->packed_v = ba_take(base, &used, f->pack->values ? keys * pad_v * f->pack_bytes : 0);
    w->packed_columns = ba_take(base, &used, f->gradient->gradient_tile ? keys * pad_k * f->pack_bytes : 0);
    w->reals = ba_take(base, &used, 4 * BA_MAX_LANES * f->real_size);
    w->k_rows = (const void **)ba_take(base, &used, keys * pointer);
    w->v_rows = (const void **)ba_take(base, &used, keys * pointer);
    w->packed_k_rows = (const void **)ba_take(base, &used, keys * pointer);
    w->packed_v_rows = (const void **)ba_take(base, &used, keys * pointer);
    w->k_columns = (const void **)ba_take(base, &used, keys * pointer);
    w->dk_rows = (void **)ba_take(base, &used, keys * pointer);
    w->dv_rows = (void **)ba_take(base, &used, keys * pointer);
    w->rows = (const void **)ba_take(base, &used, room * pointer);
    w->more_rows = (const void **)ba_take(base, &used, room * pointer);
    w->key_index = (int32_t *)ba_take(base, &used, keys * (int64_t)sizeof(int32_t));
    w->tiles = (tile_state *)ba_take(base, &used, tiles * (int64_t)sizeof(tile_state));
    w->lane_lse = ba_take(base, &used, opened * f->real_size); /* open_lanes fills a panel, of which all but a row's lanes are the next row's */
    w->lane_delta = ba_take(base, &used, opened * f->real_size);
    w->lane_lo = (int32_t *)ba_take(base, &used, opened * (int64_t)sizeof(int32_t));
    w->lane_hi = (int32_t *)ba_take(base, &used, opened * (int64_t)sizeof(int32_t));
    w->lane_dq = ba_take(base, &used, meeting * pad_k * f->real_size);
    w->added = ba_take(base, &used, meeting ? BA_MAX_LANES * pad_k * f->real_size : 0);
    w->meeting = (int32_t *)ba_take(base, &used, meeting * (int64_t)sizeof(int32_t));
    w->begin = (int32_t *)ba_take(base, &used, meeting ? (p->block_columns + 1) * (int64_t)sizeof(int32_t) : 0);
    w->listed = (int32_t *)ba_take(base, &used, meeting ? c->plan.group_tiles * p->blocks.dims[3] * (int64_t)sizeof(int32_t) : 0);
    return used;
}

/* ---- Tiles -------------------------------------------------------------------------------------------------------- */

/* A number a query of the shape of lse. */
static double query_real(const call *c, const ba_view *view, int64_t batch, int64_t head, int64_t query) {
    return ba_get_real(ba_query_row(c->problem, view, c->family->real_size, batch, head, query), 0, c->family->real_size);
}

/* Rows of q, dout, out or dq of a stretch of a tile's lanes. */
static void find_lanes(const ba_problem *p, const ba_view *view, int64_t batch, const ba_tile *tile, int64_t lane, int64_t lanes, const void **rows) {
    for (int64_t i = 0; i < lanes; i++)
        rows[i] = ba_query_row(p, view, p->element_size, batch, ba_lane_head(tile, lane + i), ba_lane_query(tile, lane + i));
}

/* What each lane sees, and its log-sum-exp and delta. A query that attended nothing sees nothing. */
static void open_lanes(const call *c, const worker_scratch *w, const ba_item *item, tile_state *t, panel_state *s) {
    const ba_problem *p = c->problem;
    const int64_t real = c->family->real_size, room = c->family->lanes[s->width];
    const ba_span q = ba_q_span(p, item->batch), kv = ba_kv_span(p, item->batch);
    int32_t *lo = (int32_t *)s->panel.lo, *hi = (int32_t *)s->panel.hi;
    void *lse = (void *)s->panel.lse, *delta = (void *)s->panel.delta;
    find_lanes(p, &c->gradients->dout, item->batch, &t->tile, s->lane, s->lanes, w->rows);
    find_lanes(p, &p->out, item->batch, &t->tile, s->lane, s->lanes, w->more_rows);
    c->family->gradient->dot_rows(delta, w->rows, w->more_rows, s->lanes, p->v_dim);
    s->any = (ba_range){INT64_MAX, 0};
    s->all = (ba_range){0, INT64_MAX};
    for (int64_t i = 0; i < room; i++) {
        if (i >= s->lanes) { /* no query: sees everything, so that it asks for no mask */
            lo[i] = 0;
            hi[i] = INT32_MAX;
            ba_set_real(lse, i, 0, real);
            ba_set_real(delta, i, 0, real);
            continue;
        }
        const int64_t query = ba_lane_query(&t->tile, s->lane + i), head = ba_lane_head(&t->tile, s->lane + i);
        const double sum = query_real(c, &p->lse, item->batch, head, query);
        const double dlse = c->gradients->dlse.data ? query_real(c, &c->gradients->dlse, item->batch, head, query) : 0;
        ba_range seen = ba_visible_keys(p, query, q.valid, kv.valid);
        if (sum == -INFINITY) seen = (ba_range){0, 0};
        ba_set_real(lse, i, sum == -INFINITY ? INFINITY : sum * LOG2_E, real);
        ba_set_real(delta, i, (ba_get_real(delta, i, real) - dlse) * p->scale, real);
        lo[i] = (int32_t)seen.lo;
        hi[i] = (int32_t)seen.hi;
        s->all.lo = ba_max(s->all.lo, seen.lo);
        s->all.hi = ba_min(s->all.hi, seen.hi);
        if (seen.lo < seen.hi) {
            s->any.lo = ba_min(s->any.lo, seen.lo);
            s->any.hi = ba_max(s->any.hi, seen.hi);
        }
    }
    t->range.lo = ba_min(t->range.lo, s->any.lo);
    t->range.hi = ba_max(t->range.hi, s->any.hi);
}

/* The tile's next panel, of its lanes from `lane` on; at: places of the scratch that are taken. */
static panel_state *add_panel(const call *c, const worker_scratch *w, tile_state *t, int64_t lane, int64_t *at) {
    const ba_attend_family *f = c->family;
    const int64_t real = f->real_size, pad_k = padded(c, c->problem->head_dim), pad_v = padded(c, c->problem->v_dim), left = t->tile.lanes - lane;
    panel_state *s = &t->panel[t->panels++];
    s->width = left <= f->lanes[NARROW] ? NARROW : WIDE;
    const int64_t room = f->lanes[s->width];
    s->lane = lane;
    s->lanes = ba_min(left, room);
    s->panel.q = w->q + *at * pad_k * f->q_bytes;
    s->panel.dout = w->dout + *at * pad_v * f->q_bytes;
    s->panel.dq = w->dq + *at * pad_k * real;
    s->panel.lse = w->lanes + *at * 2 * real;
    s->panel.delta = w->lanes + (*at * 2 + room) * real;
    s->panel.lo = w->bounds + *at * 2;
    s->panel.hi = w->bounds + *at * 2 + room;
    *at += room;
    return s;
}

static void open_tile(const call *c, const worker_scratch *w, const ba_item *item, int64_t index, tile_state *t) {
    const ba_problem *p = c->problem;
    const int64_t real = c->family->real_size, pad_k = padded(c, p->head_dim), pad_v = padded(c, p->v_dim);
    t->tile = ba_plan_tile(&c->plan, item->batch, item->kv_head, index);
    t->range = (ba_range){INT64_MAX, 0};
    t->panels = 0;
    int64_t at = (index - item->first_tile) * tile_room(c);
    t->q = w->q_rows + at * pad_k * real;
    t->dout = w->dout_rows + at * pad_v * real;
    for (int64_t lane = 0; lane < t->tile.lanes; lane += t->panel[t->panels - 1].lanes) open_lanes(c, w, item, t, add_panel(c, w, t, lane, &at));
    assert(at <= (index - item->first_tile + 1) * tile_room(c)); /* else the last panel is the next tile's too */
}

/* Packs a tile's queries, in both ways: their rows of q are w->rows, those of dout w->more_rows. */
static void pack_both_ways(const call *c, const worker_scratch *w, tile_state *t) {
    const ba_problem *p = c->problem;
    const ba_attend_family *f = c->family;
    t->finite_q = f->gradient->pack_tile(t->q, w->rows, t->tile.lanes, p->head_dim);
    t->finite_dout = f->gradient->pack_tile(t->dout, w->more_rows, t->tile.lanes, p->v_dim);
    for (int n = 0; n < t->panels; n++) {
        const panel_state *s = &t->panel[n];
        f->pack->queries[s->width]((void *)s->panel.q, w->rows + s->lane, s->lanes, p->head_dim, p->scale * LOG2_E);
        f->pack->queries[s->width]((void *)s->panel.dout, w->more_rows + s->lane, s->lanes, p->v_dim, p->scale);
    }
}

static void clear_dq(const call *c, const tile_state *t) {
    const ba_attend_family *f = c->family;
    for (int n = 0; n < t->panels; n++) memset(t->panel[n].panel.dq, 0, (size_t)(f->lanes[t->panel[n].width] * c->problem->head_dim * f->real_size));
}

/* A panel's dQ, to rows in the dtype of `family`: it is finished as an output whose weights add up to 1. */
static void finish_dq(const call *c, const worker_scratch *w, const ba_attend_family *family, const panel_state *s, void *const *rows) {
    const int64_t real = c->family->real_size;
    char *const zeros = w->reals, *const ones = zeros + BA_MAX_LANES * real, *const unused = ones + BA_MAX_LANES * real;
    for (int64_t i = 0; i < family->lanes[WIDE]; i++) {
        ba_set_real(zeros, i, 0, real);
        ba_set_real(ones, i, 1, real);
    }
    const ba_panel panel = {.o = s->panel.dq, .m = zeros, .l = ones};
    family->pack->finish[s->width](&panel, s->lanes, c->problem->head_dim, rows, unused);
}

static void write_dq(const call *c, const worker_scratch *w, const ba_item *item, const tile_state *t) {
    for (int n = 0; n < t->panels; n++) {
        const panel_state *s = &t->panel[n];
        find_lanes(c->problem, &c->gradients->dq, item->batch, &t->tile, s->lane, s->lanes, w->rows);
        finish_dq(c, w, c->family, s, (void *const *)w->rows);
    }
}

/* ---- An item ------------------------------------------------------------------------------------------------------ */

/* Blocks behind the last valid key: whether lists are equal does not depend on them, nor does the order of sums on padding then. */
static void forget_columns_from(uint64_t *bitmap, int64_t words, int64_t column) {
    if (column / 64 < words) bitmap[column / 64] &= ((uint64_t)1 << (column % 64)) - 1;
    for (int64_t i = column / 64 + 1; i < words; i++) bitmap[i] = 0;
}

/* Tiles whose lists are equal share one walk. Returns the number of walks. */
static int make_walks(const call *c, const worker_scratch *w, const ba_item *item, ba_walk *walks) {
    const ba_problem *p = c->problem;
    const int64_t words = c->plan.bitmap_words, keys = ba_kv_span(p, item->batch).valid;
    int n = 0;
    for (int64_t i = 0; i < item->tiles; i++) {
        tile_state *t = &w->tiles[i];
        uint64_t *bitmap = w->bitmaps + n * words;
        int64_t at;
        t->walk = n;
        if (p->listed) {
            ba_list_to_bitmap(p, item->batch, t->tile.head, t->tile.block_row, bitmap, words, &at);
            forget_columns_from(bitmap, words, ba_ceil_div(keys, p->block_kv));
        }
        for (int k = 0; k < n; k++)
            if (!p->listed || memcmp(w->bitmaps + k * words, bitmap, (size_t)words * sizeof *bitmap) == 0) t->walk = k;
        if (t->walk == n)
            walks[n++] = (ba_walk){.bitmap = p->listed ? bitmap : NULL,
                                   .words = words,
                                   .block_kv = p->block_kv,
                                   .keys = keys,
                                   .chunk_keys = c->tuning->gradient_keys,
                                   .stop = INT64_MAX,
                                   .range = {INT64_MAX, 0}};
        ba_walk *l = &walks[t->walk];
        l->range.lo = ba_min(l->range.lo, t->range.lo);
        l->range.hi = ba_max(l->range.hi, t->range.hi);
    }
    for (int k = 0; k < n; k++) ba_walk_begin(&walks[k], 0);
    return n;
}

/* The list that is furthest behind: so lists that overlap meet in cache. */
static int next_walk(const ba_walk *walks, int lists) {
    int next = 0;
    for (int n = 1; n < lists; n++)
        if (walks[n].key < walks[next].key) next = n;
    return next;
}

static void find_keys(const ba_problem *p, const ba_view *view, int64_t element_size, const ba_item *item, const int32_t *key_index, int64_t keys,
                      void **rows) {
    char *const first = ba_key_row(p, view, element_size, item->batch, item->kv_head, 0);
    for (int64_t j = 0; j < keys; j++) rows[j] = first + key_index[j] * view->token_stride * element_size;
}

/* Where the chunk's keys, values and their gradients lie; K and V as the kernels read them. */
static ba_chunk open_chunk(const call *c, const worker_scratch *w, const ba_item *item, int64_t keys) {
    const ba_problem *p = c->problem;
    const ba_attend_family *f = c->family;
    ba_chunk chunk = {.keys = keys, .head_dim = p->head_dim, .v_dim = p->v_dim, .key_index = w->key_index, .k_rows = w->k_rows, .v_rows = w->v_rows};
    find_keys(p, &p->k, p->kv_element_size, item, w->key_index, keys, (void **)w->k_rows);
    find_keys(p, &p->v, p->kv_element_size, item, w->key_index, keys, (void **)w->v_rows);
    find_keys(p, &c->dk, f->real_size, item, w->key_index, keys, w->dk_rows);
    find_keys(p, &c->dv, f->real_size, item, w->key_index, keys, w->dv_rows);
    if (f->gradient->gradient_tile) {
        f->pack->values(w->packed_columns, w->k_columns, w->k_rows, NULL, keys, p->head_dim);
        chunk.scale = p->scale * LOG2_E;
    }
    const ba_pack_rows_fn pack_values = f->gradient->gradient_tile ? f->pack->keys : f->pack->values; /* its products meet V as they do K */
    if (f->pack->keys) {
        f->pack->keys(w->packed_k, w->packed_k_rows, w->k_rows, NULL, keys, p->head_dim);
        chunk.k_rows = w->packed_k_rows;
    }
    if (pack_values) {
        pack_values(w->packed_v, w->packed_v_rows, w->v_rows, NULL, keys, p->v_dim);
        chunk.v_rows = w->packed_v_rows;
    }
    return chunk;
}

/* One panel: its weights and slopes, which are 0 for keys that it passes over, and its dQ. */
static void run_panel(const call *c, const panel_state *s, const ba_chunk *whole, char *weights, char *slopes, ba_weights *w, ba_weights *sl) {
    const ba_attend_family *f = c->family;
    const int64_t begin = ba_first_at_least(whole->key_index, whole->keys, s->any.lo);
    const int64_t end = ba_first_at_least(whole->key_index, whole->keys, s->any.hi), key_bytes = f->lanes[s->width] * f->real_size;
    *w = (ba_weights){.data = weights, .width = f->lanes[s->width], .lanes = s->lanes};
    if (begin < end) {
        ba_chunk chunk = *whole;
        chunk.keys = end - begin;
        chunk.k_rows += begin;
        chunk.v_rows += begin;
        chunk.key_index += begin;
        ba_gradient_panel panel = s->panel;
        if (chunk.key_index[0] >= s->all.lo && chunk.key_index[chunk.keys - 1] < s->all.hi) panel.lo = panel.hi = NULL;
        f->gradient->gradient[s->width](&panel, &chunk, weights + begin * key_bytes, slopes + begin * key_bytes);
        for (int n = 0; n < 2; n++) {
            char *const data = n ? slopes : weights;
            memset(data, 0, (size_t)(begin * key_bytes));
            memset(data + end * key_bytes, 0, (size_t)((whole->keys - end) * key_bytes));
        }
        w->begin = begin;
        w->end = end;
    }
    *sl = *w;
    sl->data = slopes;
}

/* The rows that the tile will add to soon: brought into L2 meanwhile, a few a panel. */
static void want_key(const call *c, const worker_scratch *w, int64_t j) {
    const int64_t real = c->family->real_size;
    for (int64_t at = 0; at < c->problem->head_dim * real; at += CACHE_LINE) __builtin_prefetch((const char *)w->dk_rows[j] + at, 1, 2);
    for (int64_t at = 0; at < c->problem->v_dim * real; at += CACHE_LINE) __builtin_prefetch((const char *)w->dv_rows[j] + at, 1, 2);
}

static void wait_for_turn(const call *c, int64_t item, const ba_chunk *chunk, bool *turn) {
    if (!*turn) ba_turn_wait(c->turns, item, chunk->key_index[chunk->keys - 1]);
    *turn = true;
}

static void run_panels(const call *c, const worker_scratch *w, int64_t item, const tile_state *t, const ba_chunk *chunk, bool *turn) {
    const ba_problem *p = c->problem;
    ba_weights weights[MAX_PANELS], slopes[MAX_PANELS];
    int64_t at = 0;
    bool some = false;
    for (int n = 0; n < t->panels; n++) {
        run_panel(c, &t->panel[n], chunk, w->weights + at, w->slopes + at, &weights[n], &slopes[n]);
        const int64_t first = chunk->keys * n / t->panels, end = chunk->keys * (n + 1) / t->panels;
        for (int64_t j = first; j < end && !*turn; j++) want_key(c, w, j);
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

/* The same in one go, by families over tiles. */
static void run_whole_tile(const call *c, const worker_scratch *w, int64_t item, const tile_state *t, const ba_chunk *chunk, bool *turn) {
    ba_tile_panel panels[MAX_PANELS];
    bool some = false;
    for (int n = 0; n < t->panels; n++) {
        const panel_state *s = &t->panel[n];
        panels[n] = (ba_tile_panel){.panel = s->panel,
                                    .width = c->family->lanes[s->width],
                                    .lanes = s->lanes,
                                    .begin = ba_first_at_least(chunk->key_index, chunk->keys, s->any.lo),
                                    .end = ba_first_at_least(chunk->key_index, chunk->keys, s->any.hi)};
        some |= panels[n].begin < panels[n].end;
    }
    if (!some) return;
    const ba_gradient_tile tile = {.panel = panels,
                                   .panels = t->panels,
                                   .scale = c->problem->scale,
                                   .k_columns = w->k_columns,
                                   .weights = w->weights,
                                   .slopes = w->slopes,
                                   .q_rows = t->q,
                                   .dout_rows = t->dout,
                                   .finite_q = t->finite_q,
                                   .finite_dout = t->finite_dout,
                                   .dk_rows = w->dk_rows,
                                   .dv_rows = w->dv_rows};
    c->family->gradient->gradient_tile(&tile, chunk);
    wait_for_turn(c, item, chunk, turn);
    c->family->gradient->add_tile(&tile, chunk);
}

/* `turn`: whether the item may add to the chunk's keys already. */
static void run_tile(const call *c, const worker_scratch *w, int64_t item, const tile_state *t, const ba_chunk *chunk, bool *turn) {
    if (c->family->gradient->gradient_tile) run_whole_tile(c, w, item, t, chunk, turn);
    else run_panels(c, w, item, t, chunk, turn);
}

static void run_item(void *context, int64_t index, int worker) {
    const call *c = context;
    const ba_item *item = &c->plan.item[index];
    worker_scratch w;
    lay_out_scratch(c, c->scratch + worker * c->scratch_bytes, &w);
    ba_walk walks[MAX_GROUP_TILES];
    for (int64_t i = 0; i < item->tiles; i++) open_tile(c, &w, item, item->first_tile + i, &w.tiles[i]);
    const int lists = make_walks(c, &w, item, walks);
    for (int64_t i = 0; i < item->tiles; i++) {
        clear_dq(c, &w.tiles[i]);
        if (walks[w.tiles[i].walk].key == BA_WALK_END) continue; /* it sees nothing */
        find_lanes(c->problem, &c->problem->q, item->batch, &w.tiles[i].tile, 0, w.tiles[i].tile.lanes, w.rows);
        find_lanes(c->problem, &c->gradients->dout, item->batch, &w.tiles[i].tile, 0, w.tiles[i].tile.lanes, w.more_rows);
        pack_both_ways(c, &w, &w.tiles[i]);
    }
    for (;;) {
        const int next = next_walk(walks, lists);
        if (walks[next].key == BA_WALK_END || ba_stopped()) break;
        ba_turn_pass(c->turns, index, walks[next].key);
        const ba_chunk chunk = open_chunk(c, &w, item, ba_walk_take(&walks[next], w.key_index));
        bool turn = false;
        for (int64_t i = 0; i < item->tiles; i++)
            if (w.tiles[i].walk == next) run_tile(c, &w, index, &w.tiles[i], &chunk, &turn);
    }
    ba_turn_pass(c->turns, index, BA_TURN_OVER);
    for (int64_t i = 0; i < item->tiles; i++) write_dq(c, &w, item, &w.tiles[i]);
}

/* ---- An item whose rows meet block by block ------------------------------------------------------------------------- */

static ba_tile row_of_lane(const call *c, const ba_item *item, int64_t lane) {
    return ba_plan_tile(&c->plan, item->batch, item->kv_head, item->first_tile + lane / c->row_lanes);
}

/* What all lanes of the item see, and their log-sum-exps and deltas. */
static void open_rows(const call *c, const worker_scratch *w, const ba_item *item) {
    const int64_t real = c->family->real_size, lanes = item->tiles * c->row_lanes;
    for (int64_t lane = 0; lane < lanes; lane += c->row_lanes) {
        tile_state t = {.tile = row_of_lane(c, item, lane)};
        panel_state s = {.width = NARROW};
        for (; s.lane < t.tile.lanes; s.lane += s.lanes) {
            s.lanes = ba_min(c->family->lanes[NARROW], t.tile.lanes - s.lane);
            s.panel.lse = w->lane_lse + (lane + s.lane) * real;
            s.panel.delta = w->lane_delta + (lane + s.lane) * real;
            s.panel.lo = w->lane_lo + lane + s.lane;
            s.panel.hi = w->lane_hi + lane + s.lane;
            open_lanes(c, w, item, &t, &s);
        }
        for (int64_t i = t.tile.lanes; i < c->row_lanes; i++) w->lane_lo[lane + i] = w->lane_hi[lane + i] = 0;
    }
    memset(w->lane_dq, 0, (size_t)(lanes * padded(c, c->problem->head_dim) * real));
}

/* A tile of the n lanes listed. */
static void gather_tile(const call *c, const worker_scratch *w, const ba_item *item, const int32_t *lanes, int64_t n, tile_state *t) {
    const ba_problem *p = c->problem;
    const int64_t real = c->family->real_size;
    int64_t at = 0;
    t->tile = (ba_tile){.lanes = n};
    t->q = w->q_rows;
    t->dout = w->dout_rows;
    t->panels = 0;
    for (int64_t i = 0; i < n; i++) {
        const ba_tile row = row_of_lane(c, item, lanes[i]);
        const int64_t head = ba_lane_head(&row, lanes[i] % c->row_lanes), query = ba_lane_query(&row, lanes[i] % c->row_lanes);
        w->rows[i] = ba_query_row(p, &p->q, p->element_size, item->batch, head, query);
        w->more_rows[i] = ba_query_row(p, &c->gradients->dout, p->element_size, item->batch, head, query);
    }
    for (int64_t lane = 0; lane < n; lane += t->panel[t->panels - 1].lanes) {
        panel_state *s = add_panel(c, w, t, lane, &at);
        s->any = (ba_range){INT64_MAX, 0};
        s->all = (ba_range){0, INT64_MAX};
        for (int64_t i = 0; i < c->family->lanes[s->width]; i++) {
            const int64_t from = lanes[lane + ba_min(i, s->lanes - 1)];
            const bool there = i < s->lanes; /* where there is no query, what the last one sees stands in, so that it asks for no mask */
            ((int32_t *)s->panel.lo)[i] = w->lane_lo[from];
            ((int32_t *)s->panel.hi)[i] = w->lane_hi[from];
            ba_set_real((void *)s->panel.lse, i, there ? ba_get_real(w->lane_lse, from, real) : 0, real);
            ba_set_real((void *)s->panel.delta, i, there ? ba_get_real(w->lane_delta, from, real) : 0, real);
            s->any.lo = ba_min(s->any.lo, w->lane_lo[from]);
            s->any.hi = ba_max(s->any.hi, w->lane_hi[from]);
            s->all.lo = ba_max(s->all.lo, w->lane_lo[from]);
            s->all.hi = ba_min(s->all.hi, w->lane_hi[from]);
        }
    }
    pack_both_ways(c, w, t);
    clear_dq(c, t);
}

/* The tile's dQ, added to what its lanes keep. */
static void keep_dq(const call *c, const worker_scratch *w, const tile_state *t, const int32_t *lanes) {
    const int64_t real = c->family->real_size, dim = c->problem->head_dim, pad = padded(c, dim);
    for (int n = 0; n < t->panels; n++) {
        const panel_state *s = &t->panel[n];
        void *rows[BA_MAX_LANES];
        for (int64_t i = 0; i < s->lanes; i++) rows[i] = w->added + i * pad * real;
        finish_dq(c, w, c->reals, s, rows);
        for (int64_t i = 0; i < s->lanes; i++) ba_add_reals(w->lane_dq + lanes[s->lane + i] * pad * real, rows[i], dim, real);
    }
}

/* The rows that list a column meet its keys [first, end). */
static void meet_keys(const call *c, const worker_scratch *w, int64_t index, int64_t column, int64_t first, int64_t end) {
    const ba_item *item = &c->plan.item[index];
    int64_t n = 0;
    for (int64_t i = w->begin[column]; i < w->begin[column + 1]; i++)
        for (int64_t lane = w->listed[i] * c->row_lanes; lane < (w->listed[i] + 1) * c->row_lanes; lane++)
            if (w->lane_lo[lane] < end && w->lane_hi[lane] > first) w->meeting[n++] = (int32_t)lane;
    if (n == 0) return;
    ba_turn_pass(c->turns, index, first);
    for (int64_t j = 0; j < end - first; j++) w->key_index[j] = (int32_t)(first + j);
    const ba_chunk chunk = open_chunk(c, w, item, end - first);
    bool turn = false;
    for (int64_t at = 0, some; at < n; at += some) {
        tile_state t;
        some = ba_min(c->plan.tile_queries, n - at);
        gather_tile(c, w, item, w->meeting + at, some, &t);
        run_tile(c, w, index, &t, &chunk, &turn);
        keep_dq(c, w, &t, w->meeting + at);
    }
}

static void run_rows(void *context, int64_t index, int worker) {
    const call *c = context;
    const ba_problem *p = c->problem;
    const ba_item *item = &c->plan.item[index];
    const int64_t columns = ba_list_columns(p, item->batch), keys = ba_kv_span(p, item->batch).valid, step = c->tuning->gradient_keys;
    worker_scratch w;
    lay_out_scratch(c, c->scratch + worker * c->scratch_bytes, &w);
    open_rows(c, &w, item);
    ba_plan_invert_lists(&c->plan, item, columns, w.begin, w.listed);
    for (int64_t column = 0; column < columns && !ba_stopped(); column++) {
        const int64_t end = ba_min(keys, (column + 1) * p->block_kv);
        for (int64_t first = column * p->block_kv; first < end; first += step) meet_keys(c, &w, index, column, first, ba_min(end, first + step));
    }
    ba_turn_pass(c->turns, index, BA_TURN_OVER);
    for (int64_t row = 0; row < item->tiles; row++) {
        const ba_tile tile = row_of_lane(c, item, row * c->row_lanes);
        find_lanes(p, &c->gradients->dq, item->batch, &tile, 0, tile.lanes, w.rows);
        for (int64_t i = 0; i < tile.lanes; i++)
            c->family->gradient->store_row((void *)w.rows[i], w.lane_dq + (row * c->row_lanes + i) * padded(c, p->head_dim) * c->family->real_size,
                                           p->head_dim);
    }
}

/* ---- dK and dV as a whole ----------------------------------------------------------------------------------------- */

/* Stretches of KEYS_AN_ITEM keys of a (batch, KV head); sequences have as many as the longest has. */
static int64_t stretches(const ba_problem *p) { return ba_ceil_div(p->kv_len, KEYS_AN_ITEM); }

typedef void (*key_fn)(const call *c, int64_t batch, int64_t kv_head, int64_t key);

static void each_key(const call *c, int64_t index, key_fn fn) {
    const ba_problem *p = c->problem;
    const int64_t first = index % stretches(p) * KEYS_AN_ITEM, kv_head = index / stretches(p) % p->kv_heads,
                  batch = index / stretches(p) / p->kv_heads;
    for (int64_t key = first; key < ba_min(first + KEYS_AN_ITEM, ba_kv_span(p, batch).rows); key++) fn(c, batch, kv_head, key);
}

static void clear_key(const call *c, int64_t batch, int64_t kv_head, int64_t key) {
    const ba_problem *p = c->problem;
    const int64_t real = c->family->real_size;
    memset(ba_key_row(p, &c->dk, real, batch, kv_head, key), 0, (size_t)(p->head_dim * real));
    memset(ba_key_row(p, &c->dv, real, batch, kv_head, key), 0, (size_t)(p->v_dim * real));
}

static void round_key(const call *c, int64_t batch, int64_t kv_head, int64_t key) {
    const ba_problem *p = c->problem;
    const ba_gradients *g = c->gradients;
    const int64_t real = c->family->real_size, size = p->kv_element_size;
    c->family->gradient->store_row(ba_key_row(p, &g->dk, size, batch, kv_head, key), ba_key_row(p, &c->dk, real, batch, kv_head, key), p->head_dim);
    c->family->gradient->store_row(ba_key_row(p, &g->dv, size, batch, kv_head, key), ba_key_row(p, &c->dv, real, batch, kv_head, key), p->v_dim);
}

static void clear_stretch(void *context, int64_t index, int worker) {
    (void)worker;
    each_key(context, index, clear_key);
}

static void round_stretch(void *context, int64_t index, int worker) {
    (void)worker;
    each_key(context, index, round_key);
}

/* Tokens of all sequences of one head, as the sums have them. */
static int64_t sum_tokens(const ba_problem *p) { return p->cu_kv ? p->cu_kv[p->batch] : p->batch * p->kv_len; }

/* Sums of (KV head, token) rows, token strides being padded. */
static ba_view sum_view(const call *c, char *data, int64_t dim) {
    const ba_problem *p = c->problem;
    const int64_t row = ba_round_up(dim, BA_PACK_PAD);
    return (ba_view){data, p->kv_len * row, sum_tokens(p) * row, row};
}

static int64_t sum_bytes(const call *c, int64_t dim) {
    return c->rounded ? c->problem->kv_heads * sum_tokens(c->problem) * ba_round_up(dim, BA_PACK_PAD) * c->family->real_size : 0;
}

/* ---- The call ----------------------------------------------------------------------------------------------------- */

/* The order in which the items of each (batch, KV head) have their turns is that of the plan. */
static void set_turns(const call *c, int64_t *last) {
    const ba_problem *p = c->problem;
    for (int64_t i = 0; i < p->batch * p->kv_heads; i++) last[i] = -1;
    for (int64_t i = 0; i < c->plan.items; i++) {
        const ba_item *item = &c->plan.item[i];
        int64_t *before = &last[item->batch * p->kv_heads + item->kv_head];
        atomic_init(&c->turns[i].past, 0);
        atomic_init(&c->turns[i].before, *before);
        *before = i;
    }
}

ba_status ba_attend_backward(const ba_problem *problem, const ba_gradients *gradients, int num_threads) {
    const ba_isa level = ba_isa_active();
    const ba_attend_family *family = ba_kernels_at(level)->attend[problem->dtype];
    call c = {.problem = problem,
              .gradients = gradients,
              .family = family->gradient && family->gradient->gradient_tile ? family : ba_kernels_at(level)->vector[problem->dtype],
              .tuning = ba_tuning_at(level),
              .dk = gradients->dk,
              .dv = gradients->dv};
    c.rounded = c.family->real_size != problem->kv_element_size;
    int threads = ba_threads_for(num_threads);
    c.reals = ba_kernels_at(level)->vector[ba_real_of(problem->dtype)];
    c.by_block = ba_plan_few_rows(problem);
    if (c.by_block) ba_plan_lay_out_gradient_rows(&c.plan, problem, ba_tuning_at(c.family->isa));
    else ba_plan_lay_out_gradients(&c.plan, problem, c.tuning);
    c.row_lanes = ba_min(problem->block_q, problem->q_len) * c.plan.shared_heads;
    threads = (int)ba_min(threads, ba_max(1, c.plan.items)); /* no scratch for threads that would find no work */
    worker_scratch unused;
    c.scratch_bytes = lay_out_scratch(&c, NULL, &unused);

    const int64_t plan_bytes = ba_plan_bytes(&c.plan, threads), sums = problem->batch * problem->kv_heads;
    char *memory = NULL, *plan_memory = NULL, *last = NULL;
    for (int pass = 0; pass < 2; pass++) { /* adds up, then hands out */
        int64_t used = 0;
        plan_memory = ba_take(memory, &used, plan_bytes);
        last = ba_take(memory, &used, sums * (int64_t)sizeof(int64_t));
        c.turns = (ba_turn *)ba_take(memory, &used, c.plan.items * (int64_t)sizeof(ba_turn));
        c.scratch = ba_take(memory, &used, threads * c.scratch_bytes);
        char *dk = ba_take(memory, &used, sum_bytes(&c, problem->head_dim)), *dv = ba_take(memory, &used, sum_bytes(&c, problem->v_dim));
        if (c.rounded) {
            c.dk = sum_view(&c, dk, problem->head_dim);
            c.dv = sum_view(&c, dv, problem->v_dim);
        }
        if (!memory) memory = ba_arena_get((size_t)used);
        if (!memory) return ba_fail(BA_ERROR_MEMORY, "scratch: expected %lld bytes of memory, got none", (long long)used);
    }
    ba_status status = ba_plan_make(&c.plan, threads, plan_memory);
    if (status == BA_OK) {
        if (ba_is_small(c.plan.cost * (double)(6 * problem->head_dim + 4 * problem->v_dim), c.tuning->inline_flops)) threads = 1;
        set_turns(&c, (int64_t *)last);
        status = ba_parallel(threads, sums * stretches(problem), clear_stretch, &c);
    }
    if (status == BA_OK) status = ba_parallel(threads, c.plan.items, c.by_block ? run_rows : run_item, &c);
    if (status == BA_OK && c.rounded) status = ba_parallel(threads, sums * stretches(problem), round_stretch, &c);
    ba_arena_release();
    return status;
}
