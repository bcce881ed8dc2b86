/* The forward driver: loops, plan and scratch; it knows neither an ISA nor an element type. attend_batch.c says which entries it is given. */
#include "ops/attend.h"

#include <assert.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "core/arena.h"
#include "core/status.h"
#include "ops/attend_by_block.h"
#include "ops/plan.h"
#include "ops/scratch.h"
#include "ops/shared_rows.h"
#include "ops/walk.h"

#define LOG2_E 0x1.71547652b82fep+0

/* ---- Scratch ------------------------------------------------------------------------------------------------------ */

enum { MAX_GROUP_TILES = 32, MAX_PANELS = 32, MANY = 16 /* panels that a kernel is given at once at most */ };

typedef enum panel_width { WIDE, NARROW, FEW } panel_width; /* the first two index a family's arrays */

typedef struct panel_state {
    ba_panel panel; /* lo and hi set here, shown to a kernel only where a chunk needs them */
    panel_width width;
    int64_t lane, lanes; /* of the tile: the first, and how many */
    ba_range any, all;   /* keys that some lane sees; keys that every lane sees */
} panel_state;

typedef struct tile_state {
    ba_tile tile;
    int64_t head;   /* KV head: the item's first, or so many after it */
    int walk;       /* index of the list it shares */
    ba_range range; /* keys that some query sees */
    int panels;
    panel_state panel[MAX_PANELS];
} tile_state;

/* One chunk of a list: which keys, and where they lie. */
typedef struct chunk_rows {
    int walk;
    int64_t keys;
    const void **k_rows, **v_rows;          /* of the item's first head, those before `whole` as they are shared; behind them is room for some that
                                               are wanted next (tell_ahead) */
    int64_t whole;                          /* keys of whole groups, where K and V are packed once for all items; else 0 */
    const float **k_scale_at, **v_scale_at; /* likewise */
    int32_t *key_index;
} chunk_rows;

typedef struct worker_scratch {
    char *q, *o, *ml; /* tiles one after the other */
    int32_t *bounds;
    uint64_t *bitmaps;
    char *packed_k, *packed_v, *scores, *lse, *gathered;
    const void **packed_k_rows, **packed_v_rows, **rows;
    float *k_scale, *v_scale;
    chunk_rows chunk[MANY + 2]; /* a ring: those whose panels are collected, the one at hand and the one after it */
    tile_state *tiles;
    ba_panel *panels; /* [MANY], with their chunks: to be given to the kernel together */
    ba_chunk *chunks;
} worker_scratch;

typedef struct call {
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
    bool gathers; /* rows are brought side by side before few queries meet them */
    ba_plan plan;
    int threads;
    char *scratch;
    int64_t scratch_bytes; /* a worker */
    ba_sharing sharing;
    char *parts;                /* states of parts that are to be joined */
    const int64_t *part_offset; /* [batch]: bytes, -1 where there is one part only */
} call;

/* Lanes that a tile's panels have room for: a few-query panel takes BA_FEW_QUERIES, the last of the others may be half empty. */
static int64_t tile_room(const call *c) {
    return ba_round_up(ba_min(c->plan.tile_queries, c->plan.row_queries * c->plan.shared_heads), c->family->lanes[WIDE]);
}

/* Queries a panel of the kernel for few queries has room for: one more than it takes, or those of several heads would lie in the same sets of L1. */
enum { FEW_ROOM = BA_FEW_QUERIES + 1 };

/* Bytes of scratch that a head needs of that kernel; the same for them. */
static int64_t few_scratch(const call *c) {
    const int64_t apart = BA_FEW_PAD(c->problem->v_dim);
    return ba_round_up((BA_FEW_SCRATCH(c->tuning->few.keys, c->problem->v_dim) + apart) * c->family->real_size, BA_ALIGN);
}

static int64_t lay_out_scratch(const call *c, char *base, worker_scratch *w) {
    const ba_attend_family *f = c->family;
    const ba_problem *p = c->problem;
    const int64_t tiles = c->plan.group_tiles, keys = ba_max(c->chunk_keys, c->tuning->few.keys), packed = ba_round_up(keys, f->key_pad);
    const int64_t lanes = tiles * ba_max(tile_room(c), c->plan.few_heads * FEW_ROOM);
    const int64_t pad_k = ba_round_up(p->head_dim, f->dim_pad), pad_v = ba_round_up(p->v_dim, f->dim_pad);
    const int64_t pack = ba_max(f->pack_bytes, f->real_size);
    int64_t used = 0;
    w->q = ba_take(base, &used, lanes * pad_k * f->q_bytes);
    w->o = ba_take(base, &used, lanes * pad_v * f->real_size);
    w->ml = ba_take(base, &used, lanes * 2 * f->real_size);
    w->bounds = (int32_t *)ba_take(base, &used, lanes * 2 * (int64_t)sizeof(int32_t));
    w->bitmaps = (uint64_t *)ba_take(base, &used, tiles * c->plan.bitmap_words * (int64_t)sizeof(uint64_t));
    w->packed_k = ba_take(base, &used, c->pack_k ? packed * pad_k * pack : 0);
    w->packed_v = ba_take(base, &used, c->pack_v ? packed * pad_v * pack : 0);
    w->scores = ba_take(base, &used, ba_max(keys * f->scratch_per_key, c->plan.few_heads * few_scratch(c)));
    w->lse = ba_take(base, &used, BA_MAX_LANES * f->real_size);
    w->packed_k_rows = (const void **)ba_take(base, &used, keys * (int64_t)sizeof(void *));
    w->packed_v_rows = (const void **)ba_take(base, &used, keys * (int64_t)sizeof(void *));
    w->gathered = ba_take(base, &used, c->gathers ? c->tuning->few.keys * (p->head_dim + p->v_dim) * p->kv_element_size : 0);
    w->rows = (const void **)ba_take(base, &used, BA_MAX_LANES * (int64_t)sizeof(void *));
    w->k_scale = (float *)ba_take(base, &used, c->plan.few_heads * keys * (int64_t)sizeof(float));
    w->v_scale = (float *)ba_take(base, &used, c->plan.few_heads * keys * (int64_t)sizeof(float));
    for (int i = 0; i < c->chunks; i++) {
        w->chunk[i].k_rows = (const void **)ba_take(base, &used, (keys + c->tuning->few.keys) * (int64_t)sizeof(void *));
        w->chunk[i].v_rows = (const void **)ba_take(base, &used, (keys + c->tuning->few.keys) * (int64_t)sizeof(void *));
        w->chunk[i].k_scale_at = (const float **)ba_take(base, &used, keys * (int64_t)sizeof(float *));
        w->chunk[i].v_scale_at = (const float **)ba_take(base, &used, keys * (int64_t)sizeof(float *));
        w->chunk[i].key_index = (int32_t *)ba_take(base, &used, keys * (int64_t)sizeof(int32_t));
    }
    w->tiles = (tile_state *)ba_take(base, &used, tiles * c->plan.few_heads * (int64_t)sizeof(tile_state));
    w->panels = (ba_panel *)ba_take(base, &used, MANY * (int64_t)sizeof(ba_panel));
    w->chunks = (ba_chunk *)ba_take(base, &used, MANY * (int64_t)sizeof(ba_chunk));
    return used;
}

/* ---- Queries ------------------------------------------------------------------------------------------------------ */

static int64_t panel_room(const call *c, panel_width width) { return width == FEW ? BA_FEW_QUERIES : c->family->lanes[width]; }

static void ask_for_row(const void *row, int64_t bytes, const bool to_write) {
    for (int64_t at = 0; at < bytes; at += BA_ALIGN) {
        if (to_write) __builtin_prefetch((const char *)row + at, 1, 3);
        else __builtin_prefetch((const char *)row + at, 0, 3);
    }
}

/* Packs the panel's queries, and sets its state and ranges. */
static void open_panel(const call *c, const worker_scratch *w, const ba_item *item, tile_state *t, panel_state *s) {
    const ba_problem *p = c->problem;
    const ba_attend_family *f = c->family;
    const ba_span q = ba_q_span(p, item->batch), kv = ba_kv_span(p, item->batch);
    const int64_t room = panel_room(c, s->width);
    int32_t *lo = (int32_t *)s->panel.lo, *hi = (int32_t *)s->panel.hi;
    s->any = (ba_range){INT64_MAX, 0};
    s->all = (ba_range){0, INT64_MAX};
    for (int64_t i = 0; i < room; i++) {
        if (i >= s->lanes) { /* no query: sees everything, so that it asks for no mask */
            lo[i] = 0;
            hi[i] = INT32_MAX;
            continue;
        }
        const int64_t query = ba_lane_query(&t->tile, s->lane + i);
        const ba_range seen = ba_visible_keys(p, query, q.valid, kv.valid);
        lo[i] = (int32_t)seen.lo;
        hi[i] = (int32_t)seen.hi;
        s->all.lo = ba_max(s->all.lo, seen.lo);
        s->all.hi = ba_min(s->all.hi, seen.hi);
        if (seen.lo < seen.hi) {
            s->any.lo = ba_min(s->any.lo, seen.lo);
            s->any.hi = ba_max(s->any.hi, seen.hi);
        }
        w->rows[i] = ba_query_row(p, &p->q, p->element_size, item->batch, ba_lane_head(&t->tile, s->lane + i), query);
        ask_for_row(w->rows[i], p->head_dim * p->element_size, false); /* rows of one head are far apart */
    }
    const int64_t o_dim = s->width == FEW ? BA_FEW_PAD(p->v_dim) : ba_round_up(p->v_dim, f->dim_pad);
    (s->width == FEW ? c->pack_few : f->pack->queries[s->width])(s->panel.q, w->rows, s->lanes, p->head_dim, p->scale * LOG2_E);
    if (s->width == FEW && c->order_few) c->order_few(s->panel.q, s->lanes, p->head_dim);
    memset(s->panel.o, 0, (size_t)(room * o_dim * f->real_size));
    memset(s->panel.l, 0, (size_t)(room * f->real_size));
    for (int64_t i = 0; i < room; i++) ba_set_real(s->panel.m, i, f->real_size == 4 ? -0x1.fffffep127 : -0x1.fffffffffffffp1023, f->real_size);
    t->range.lo = ba_min(t->range.lo, s->any.lo);
    t->range.hi = ba_max(t->range.hi, s->any.hi);
}

/* The item's tile number `index`: all tiles of its first head, then those of the next. */
static void open_tile(const call *c, const worker_scratch *w, const ba_item *item, int64_t index) {
    const ba_problem *p = c->problem;
    const ba_attend_family *f = c->family;
    const bool few = ba_plan_few(&c->plan, item->batch);
    tile_state *t = &w->tiles[index];
    t->head = index / item->tiles;
    t->tile = ba_plan_tile(&c->plan, item->batch, item->kv_head + t->head, item->first_tile + index % item->tiles);
    t->range = (ba_range){INT64_MAX, 0};
    t->panels = 0;
    const int64_t room_of_tile = few ? FEW_ROOM : tile_room(c);
    int64_t at = index * room_of_tile;
    for (int64_t lane = 0; lane < t->tile.lanes;) {
        panel_state *s = &t->panel[t->panels++];
        const int64_t left = t->tile.lanes - lane;
        s->width = few ? FEW : left <= f->lanes[NARROW] ? NARROW : WIDE;
        const int64_t room = panel_room(c, s->width);
        s->lane = lane;
        s->lanes = ba_min(left, room);
        s->panel.q = w->q + at * ba_round_up(p->head_dim, f->dim_pad) * f->q_bytes;
        s->panel.o = w->o + at * ba_round_up(p->v_dim, f->dim_pad) * f->real_size;
        s->panel.m = w->ml + at * 2 * f->real_size;
        s->panel.l = w->ml + (at * 2 + room) * f->real_size;
        s->panel.lo = w->bounds + at * 2;
        s->panel.hi = w->bounds + at * 2 + room;
        at += room;
        assert(at <= (index + 1) * room_of_tile); /* else the panel is the next tile's too */
        open_panel(c, w, item, t, s);
        lane += s->lanes;
    }
}

/* ---- Results ------------------------------------------------------------------------------------------------------ */

/* A sink takes part in the softmax as a key whose value is 0. */
static void add_sink(const call *c, const panel_state *s, int64_t lane, double sink) {
    const int64_t real_size = c->family->real_size, v_dim = c->problem->v_dim;
    const double m = ba_get_real(s->panel.m, lane, real_size), l = ba_get_real(s->panel.l, lane, real_size), above = sink * LOG2_E - m;
    if (!(above > 0)) {
        ba_set_real(s->panel.l, lane, l + exp2(above), real_size);
        return;
    }
    const double shrink = exp2(-above);
    for (int64_t d = 0; d < v_dim; d++) {
        const int64_t at = s->width == FEW ? lane * BA_FEW_PAD(v_dim) + d : d * c->family->lanes[s->width] + lane;
        ba_set_real(s->panel.o, at, ba_get_real(s->panel.o, at, real_size) * shrink, real_size);
    }
    ba_set_real(s->panel.m, lane, sink * LOG2_E, real_size);
    ba_set_real(s->panel.l, lane, l * shrink + 1, real_size);
}

/* Writes out and lse of a panel's first `lanes` lanes, which are lanes `lane` .. of the tile. */
static void write_lanes(const call *c, const worker_scratch *w, int64_t batch, const ba_tile *tile, const panel_state *s) {
    const ba_problem *p = c->problem;
    const ba_attend_family *f = c->family;
    for (int64_t i = 0; i < s->lanes; i++) {
        const int64_t query = ba_lane_query(tile, s->lane + i), head = ba_lane_head(tile, s->lane + i);
        w->rows[i] = ba_query_row(p, &p->out, p->element_size, batch, head, query);
        ask_for_row(w->rows[i], p->v_dim * p->element_size, true);
        if (p->sinks) add_sink(c, s, i, (double)p->sinks[head]);
    }
    (s->width == FEW ? f->few->finish : f->pack->finish[s->width])(&s->panel, s->lanes, p->v_dim, (void *const *)w->rows,
                                                                   p->lse.data ? w->lse : NULL);
    for (int64_t i = 0; p->lse.data && i < s->lanes; i++)
        memcpy(ba_query_row(p, &p->lse, f->real_size, batch, ba_lane_head(tile, s->lane + i), ba_lane_query(tile, s->lane + i)),
               w->lse + i * f->real_size, (size_t)f->real_size);
}

/* One (batch, KV head)'s states of one part: BA_FEW_QUERIES of o, then of m, then of l. */
static int64_t part_bytes(const call *c) {
    return ba_round_up(BA_FEW_QUERIES * (BA_FEW_PAD(c->problem->v_dim) + 2) * c->family->real_size, BA_ALIGN);
}

static ba_panel part_panel(const call *c, int64_t batch, int64_t kv_head, int64_t part, int64_t lane) {
    const int64_t real_size = c->family->real_size, pad = BA_FEW_PAD(c->problem->v_dim);
    char *base = c->parts + c->part_offset[batch] + (kv_head * ba_plan_parts(&c->plan, batch) + part) * part_bytes(c);
    return (ba_panel){.o = base + lane * pad * real_size,
                      .m = base + (BA_FEW_QUERIES * pad + lane) * real_size,
                      .l = base + (BA_FEW_QUERIES * (pad + 1) + lane) * real_size};
}

/* Puts a few-query panel's states where the joining finds them. */
static void keep_part(const call *c, const ba_item *item, const ba_tile *tile, const panel_state *s) {
    const int64_t real_size = c->family->real_size, pad = BA_FEW_PAD(c->problem->v_dim), group = c->problem->group;
    for (int64_t i = 0; i < s->lanes; i++) {
        const int64_t query = ba_lane_query(tile, s->lane + i), head = ba_lane_head(tile, s->lane + i);
        const ba_panel to = part_panel(c, item->batch, head / group, item->part, query * group + head % group);
        memcpy(to.o, (char *)s->panel.o + i * pad * real_size, (size_t)(pad * real_size));
        memcpy(to.m, (char *)s->panel.m + i * real_size, (size_t)real_size);
        memcpy(to.l, (char *)s->panel.l + i * real_size, (size_t)real_size);
    }
}

/* Joins the parts of one (batch, KV head) in their order. */
static void join_item(void *context, int64_t index, int worker) {
    const call *c = context;
    const ba_problem *p = c->problem;
    const int64_t batch = index / p->kv_heads, kv_head = index % p->kv_heads;
    if (c->part_offset[batch] < 0) return;
    const int64_t parts = ba_plan_parts(&c->plan, batch), lanes = ba_q_span(p, batch).valid * p->group;
    worker_scratch w;
    lay_out_scratch(c, c->scratch + worker * c->scratch_bytes, &w);
    panel_state s = {.panel = part_panel(c, batch, kv_head, 0, 0), .width = FEW, .lanes = lanes};
    for (int64_t part = 1; part < parts; part++) {
        const ba_panel from = part_panel(c, batch, kv_head, part, 0);
        c->family->few->join(&s.panel, &from, lanes, p->v_dim);
    }
    const ba_tile tile = {.head = kv_head * p->group, .heads = p->group, .lanes = lanes};
    write_lanes(c, &w, batch, &tile, &s);
}

/* ---- An item ------------------------------------------------------------------------------------------------------ */

/* Rows that the chunk after this one begins with, shared out among the panels that come before it. */
typedef struct share {
    const chunk_rows *rows; /* NULL: there is no such chunk */
    int64_t panels, panel;
} share;

static void share_out(share *s, ba_chunk *chunk) {
    if (!s->rows) return;
    const int64_t begin = s->rows->keys * s->panel / s->panels, end = s->rows->keys * (s->panel + 1) / s->panels;
    chunk->k_next = s->rows->k_rows + begin;
    chunk->v_next = s->rows->v_rows + begin;
    chunk->next_rows = end - begin;
    s->panel++;
}

/* Leaves out the first `keys` keys. */
static void skip_keys(ba_chunk *chunk, int64_t keys) {
    chunk->keys -= keys;
    chunk->place += keys;
    chunk->key_index += keys;
    chunk->k_rows += keys;
    chunk->v_rows += keys;
    if (chunk->k_next) chunk->k_next += keys;
    if (chunk->v_next) chunk->v_next += keys;
    if (chunk->k_scale) chunk->k_scale += keys;
    if (chunk->v_scale) chunk->v_scale += keys;
}

/* Panels of one width that are to meet their chunks together: each panel once. */
typedef struct batch {
    panel_width width;
    int64_t n;
    uint64_t walks; /* a bit each: whose panels they are */
    int older;      /* chunks that came before the one at hand, and are still waited for */
    ba_panel *panels;
    ba_chunk *chunks;
} batch;

static void flush(const call *c, batch *many) {
    const ba_attend_family *f = c->family;
    if (many->n && f->panel->attend_many[many->width]) f->panel->attend_many[many->width](many->panels, many->chunks, many->n);
    else
        for (int64_t i = 0; i < many->n; i++) f->panel->attend[many->width](&many->panels[i], &many->chunks[i]);
    many->n = 0;
    many->walks = 0;
    many->older = 0;
}

/* The panel as it meets the keys of the chunk that it sees, which are left of it: bounds are shown only where they matter. False: none are. */
static bool meet(const call *c, const panel_state *s, ba_panel *panel, ba_chunk *chunk) {
    const int64_t step = s->width == FEW ? ba_max(BA_FEW_KEY_ALIGN, c->family->key_align) : c->family->key_align;
    int64_t begin = 0, end = chunk->keys;
    if (chunk->key_index[0] < s->any.lo || chunk->key_index[end - 1] >= s->any.hi) {
        begin = ba_first_at_least(chunk->key_index, chunk->keys, s->any.lo);
        end = ba_first_at_least(chunk->key_index, chunk->keys, s->any.hi);
        if (begin >= end) return false;
        begin -= begin % step;
        end = ba_min(ba_round_up(end, step), chunk->keys);
    }
    skip_keys(chunk, begin);
    chunk->keys = end - begin;
    *panel = s->panel;
    if (chunk->key_index[0] >= s->all.lo && chunk->key_index[chunk->keys - 1] < s->all.hi) panel->lo = panel->hi = NULL;
    return true;
}

static void attend_tile(const call *c, const tile_state *t, const ba_chunk *whole, share *next, batch *many) {
    for (int n = 0; n < t->panels; n++) {
        const panel_state *s = &t->panel[n];
        ba_panel panel;
        ba_chunk chunk = *whole;
        if (!meet(c, s, &panel, &chunk)) continue;
        share_out(next, &chunk);
        if (many->n == MANY || many->width != s->width) flush(c, many);
        many->width = s->width;
        many->walks |= (uint64_t)1 << t->walk;
        many->panels[many->n] = panel;
        many->chunks[many->n++] = chunk;
    }
}

/* Where the chunk's rows of K (or V) lie, and their scales. */
static void find_rows(const ba_problem *p, int64_t batch, int64_t kv_head, const ba_view *view, const ba_view *scale, const int32_t *key_index,
                      int64_t keys, const void **rows, const float **scales) {
    const int64_t size = p->kv_element_size, step = view->token_stride * size, page_size = p->page_size ? p->page_size : INT64_MAX;
    /* key numbers rise, and come in stretches that lie side by side, each in one page where there are pages */
    for (int64_t j = 0, some; j < keys; j += some) {
        const int64_t token = key_index[j] % page_size, page = p->page_size ? ba_page(p, batch, key_index[j] / page_size) : 0;
        const char *row = p->page_size ? ba_row_of(view, size, page, kv_head, token) : ba_key_row(p, view, size, batch, kv_head, token);
        some = ba_min(keys - j, page_size - token);
        if (key_index[j + some - 1] != key_index[j] + some - 1)
            for (some = 1; key_index[j + some] == key_index[j] + some;) some++;
        for (int64_t i = 0; i < some; i++) rows[j + i] = row + i * step;
        if (!scale->data) continue;
        const float *at = (const float *)(void *)ba_row_of(scale, sizeof(float), page, kv_head, token);
        for (int64_t i = 0; i < some; i++) scales[j + i] = at + i * scale->token_stride;
    }
}

/* ---- An item's chunks ----------------------------------------------------------------------------------------------- */

/* Where the item's part of its list begins. */
static int64_t first_place(const call *c, const ba_item *item) { return item->part * ba_plan_part_keys(&c->plan, item->batch); }

/* A walk of the item's part that nobody sees a key of yet; not begun. */
static ba_walk new_walk(const call *c, const ba_item *item, const uint64_t *bitmap) {
    const bool whole = ba_plan_parts(&c->plan, item->batch) == 1;
    return (ba_walk){.bitmap = bitmap,
                     .words = c->plan.bitmap_words,
                     .block_kv = c->problem->block_kv,
                     .keys = ba_kv_span(c->problem, item->batch).valid,
                     .chunk_keys = ba_plan_few(&c->plan, item->batch) ? c->tuning->few.keys : c->chunk_keys,
                     .stop = whole ? INT64_MAX : first_place(c, item) + ba_plan_part_keys(&c->plan, item->batch),
                     .range = {INT64_MAX, 0}};
}

/* Tiles whose lists are equal share one walk. Returns the number of walks. */
static int make_walks(const call *c, const worker_scratch *w, const ba_item *item, ba_walk *walks) {
    const ba_problem *p = c->problem;
    const int64_t words = c->plan.bitmap_words;
    int n = 0;
    for (int64_t i = 0; i < item->tiles * item->kv_heads; i++) {
        tile_state *t = &w->tiles[i];
        uint64_t *bitmap = w->bitmaps + n * words;
        int64_t at;
        t->walk = n;
        if (t->head > 0) { /* heads of one item share their lists */
            t->walk = w->tiles[i - item->tiles].walk;
        } else if (p->listed) {
            const tile_state *before = i ? &w->tiles[i - 1] : NULL;
            if (before && before->tile.block_row == t->tile.block_row && before->tile.head == t->tile.head) {
                t->walk = before->walk;
            } else {
                ba_list_to_bitmap(p, item->batch, t->tile.head, t->tile.block_row, bitmap, words, &at);
                for (int k = 0; k < n; k++)
                    if (memcmp(w->bitmaps + k * words, bitmap, (size_t)words * sizeof *bitmap) == 0) t->walk = k;
            }
        } else if (n) {
            t->walk = 0;
        }
        if (t->walk == n) walks[n++] = new_walk(c, item, p->listed ? bitmap : NULL);
        ba_walk *l = &walks[t->walk];
        l->range.lo = ba_min(l->range.lo, t->range.lo);
        l->range.hi = ba_max(l->range.hi, t->range.hi);
    }
    for (int k = 0; k < n; k++) ba_walk_begin(&walks[k], first_place(c, item));
    return n;
}

/* Where the chunk's rows of K (or V) lie: those that are shared, and the others. */
static void take_rows(const call *c, const ba_item *item, const ba_view *view, const ba_view *scale, const ba_shared_rows *s, const chunk_rows *chunk,
                      const void **rows, const float **scales) {
    const ba_problem *p = c->problem;
    const int64_t head = item->batch * p->kv_heads + item->kv_head, group = c->family->key_pad;
    if (chunk->whole) {
        const bool in_place = s->in_place[head];
        const char *first = in_place ? ba_key_row(p, view, p->kv_element_size, item->batch, item->kv_head, 0) : s->data + s->offset[head];
        const int64_t step = in_place ? view->token_stride * p->kv_element_size : s->row_bytes;
        for (int64_t at = 0; at < chunk->whole; at += group) { /* keys of a group lie side by side */
            const char *row = first + chunk->key_index[at] * step;
            for (int64_t j = 0; j < group; j++) rows[at + j] = row + j * step;
        }
    }
    const int64_t at = chunk->whole;
    find_rows(p, item->batch, item->kv_head, view, scale, chunk->key_index + at, chunk->keys - at, rows + at, scales + at);
}

/* The next chunk of the list that is furthest behind: so lists that overlap meet in cache. False when all are at their end. */
static bool next_chunk(const call *c, const ba_item *item, ba_walk *walks, int lists, chunk_rows *chunk) {
    const ba_problem *p = c->problem;
    int next = 0;
    for (int n = 1; n < lists; n++)
        if (walks[n].key < walks[next].key) next = n;
    if (walks[next].key == BA_WALK_END) return false;
    chunk->walk = next;
    chunk->keys = ba_walk_take(&walks[next], chunk->key_index);
    chunk->whole =
        ba_is_shared(&c->sharing, item->batch) ? chunk->keys - chunk->keys % c->family->key_pad : 0; /* the last group has keys that no query sees */
    take_rows(c, item, &p->k, &p->k_scale, &c->sharing.k, chunk, chunk->k_rows, chunk->k_scale_at);
    take_rows(c, item, &p->v, &p->v_scale, &c->sharing.v, chunk, chunk->v_rows, chunk->v_scale_at);
    return true;
}

/* Whether a token's heads lie side by side: then those of an item meet a chunk together. */
static bool heads_are_beside(const ba_problem *p) {
    return ba_heads_are_beside(p->k.head_stride, p->k.token_stride, p->head_dim) &&
           ba_heads_are_beside(p->v.head_stride, p->v.token_stride, p->v_dim);
}

/* Bytes of K's rows, or of V's, of so many heads side by side. */
static int64_t rows_bytes(const ba_problem *p, const ba_view *view, int64_t dim, int64_t heads) {
    return ((heads - 1) * view->head_stride + dim) * p->kv_element_size;
}

/* Rows of `bytes` that a request wants that is `which` bytes ahead (ba_few_tuning), and the most that any wants. */
static int64_t rows_ahead(const ba_few_tuning *few, int which, int64_t bytes) { return ba_min(few->keys, ba_ceil_div(few->distances[which], bytes)); }

static int64_t most_rows_ahead(const ba_few_tuning *few, int64_t bytes) {
    int64_t most = 0;
    for (int i = 0; i < BA_MOST_REQUESTS; i++) most = ba_max(most, rows_ahead(few, i, bytes));
    return most;
}

/* The rows of K that the worker's next item is likely to begin with, as far as a request reaches ahead: where all keys are met, they are known before
 * that item is begun, and are not to be waited for there. */
static bool guess_next_item(const call *c, int64_t index, chunk_rows *chunk) {
    const ba_problem *p = c->problem;
    const int64_t next = index + c->threads;
    if (p->listed || next >= c->plan.items || !ba_plan_few(&c->plan, c->plan.item[next].batch)) return false;
    const ba_item *item = &c->plan.item[next];
    const ba_span q = ba_q_span(p, item->batch), kv = ba_kv_span(p, item->batch);
    ba_walk walk = new_walk(c, item, NULL);
    walk.range = (ba_range){ba_visible_keys(p, 0, q.valid, kv.valid).lo, ba_visible_keys(p, q.valid - 1, q.valid, kv.valid).hi};
    ba_walk_begin(&walk, first_place(c, item));
    if (walk.key == BA_WALK_END) return false;
    const int64_t bytes = rows_bytes(p, &p->k, p->head_dim, heads_are_beside(p) ? item->kv_heads : 1);
    walk.chunk_keys = ba_min(walk.chunk_keys, most_rows_ahead(&c->tuning->few, bytes));
    chunk->keys = ba_walk_take(&walk, chunk->key_index);
    chunk->whole = 0;
    take_rows(c, item, &p->k, &p->k_scale, &c->sharing.k, chunk, chunk->k_rows, chunk->k_scale_at);
    return true;
}

/* Scales of the keys of some heads, which lie side by side: [head][keys]. All are asked for first: a loop that waits for the first ones has few of
 * the others under way. */
static void fetch_scales(const ba_view *view, const float *const *at, int64_t first, int64_t heads, int64_t keys, float *scales) {
    if (!view->data) return;
    for (int64_t j = 0; j < keys; j++) __builtin_prefetch(at[j] + first * view->head_stride, 0, 3);
    for (int64_t j = 0; j < keys; j++) {
        const float *from = at[j] + first * view->head_stride;
        for (int64_t i = 0; i < heads; i++) scales[i * keys + j] = from[i * view->head_stride];
    }
}

static void fetch_both_scales(const call *c, const worker_scratch *w, int64_t first, int64_t heads, const chunk_rows *here) {
    fetch_scales(&c->problem->k_scale, here->k_scale_at, first, heads, here->keys, w->k_scale);
    fetch_scales(&c->problem->v_scale, here->v_scale_at, first, heads, here->keys, w->v_scale);
}

/* A chunk as one head of the item meets it, the `place`-th of those that meet theirs together, whose scales have been fetched. */
static ba_chunk head_chunk(const call *c, const worker_scratch *w, int64_t head, int64_t place, const chunk_rows *here) {
    const ba_problem *p = c->problem;
    return (ba_chunk){.keys = here->keys,
                      .head_dim = p->head_dim,
                      .v_dim = p->v_dim,
                      .key_index = here->key_index,
                      .k_rows = here->k_rows,
                      .v_rows = here->v_rows,
                      .k_offset = head * p->k.head_stride * p->kv_element_size,
                      .v_offset = head * p->v.head_stride * p->kv_element_size,
                      .k_next_bytes = p->head_dim * p->kv_element_size, /* those who share packed rows leave elements their size */
                      .v_next_bytes = p->v_dim * p->kv_element_size,
                      .k_scale = p->k_scale.data ? w->k_scale + place * here->keys : NULL,
                      .v_scale = p->v_scale.data ? w->v_scale + place * here->keys : NULL,
                      .scale = p->scale * LOG2_E,
                      .softcap = p->softcap * LOG2_E,
                      .scratch = w->scores + place * few_scratch(c)};
}

/* Rows of K, or of V, that a kernel for few meets one after the other. */
typedef struct stretch {
    const void **rows;
    int64_t keys, offset;
} stretch;

/* What is wanted after what is at hand: the rest of the stretch `now`, and behind its rows the first ones of that which is met `then`. */
static ba_prefetch_rows find_ahead(const ba_few_tuning *few, const stretch *now, const stretch *then, int64_t bytes) {
    const int64_t more = ba_min(then->keys, most_rows_ahead(few, bytes)), all = now->keys + more, nearest = rows_ahead(few, 0, bytes);
    for (int64_t j = 0; j < more; j++) now->rows[now->keys + j] = (const char *)then->rows[j] + then->offset - now->offset;
    ba_prefetch_rows ahead = {now->rows + ba_min(nearest, all), all - ba_min(nearest, all), now->offset, bytes, {0, -1, -1}};
    for (int i = 1; i < BA_MOST_REQUESTS; i++)
        if (few->distances[i]) ahead.skip[i] = rows_ahead(few, i, bytes) - nearest;
    return ahead;
}

/* Tells the heads' first chunk what is ahead: K's rows of `heads` heads side by side, V's, and then K's of the next heads or of the next chunk. */
static void tell_ahead(const call *c, const worker_scratch *w, const ba_item *item, int64_t first, int64_t heads, const chunk_rows *here,
                       const chunk_rows *next) {
    const ba_problem *p = c->problem;
    const ba_few_tuning *few = &c->tuning->few;
    const int64_t size = p->kv_element_size, k_step = p->k.head_stride * size;
    const bool more = first + heads < item->kv_heads;
    const stretch k = {here->k_rows, here->keys, first * k_step}, v = {here->v_rows, here->keys, first * p->v.head_stride * size};
    stretch then = {0};
    if (more) then = (stretch){here->k_rows, here->keys, (first + heads) * k_step};
    else if (next) then = (stretch){next->k_rows, next->keys, 0};
    w->chunks->k_prefetch = find_ahead(few, &k, &v, rows_bytes(p, &p->k, p->head_dim, heads));
    w->chunks->v_prefetch = find_ahead(few, &v, &then, rows_bytes(p, &p->v, p->v_dim, heads));
}

/* The same where the kernel for few queries serves them: one panel a tile; heads whose rows lie side by side meet the chunk together. */
static void attend_few(const call *c, const worker_scratch *w, const ba_item *item, const chunk_rows *here, const chunk_rows *next) {
    const ba_problem *p = c->problem;
    const int64_t size = p->kv_element_size;
    const bool beside = heads_are_beside(p);
    const int64_t together = beside ? item->kv_heads : 1;
    const bool apart = beside && ba_min(p->k.token_stride, p->v.token_stride) * size >= c->tuning->few.followed_bytes;
    for (int64_t i = 0; i < item->tiles; i++) {
        if (w->tiles[i].walk != here->walk) continue;
        for (int64_t first = 0; first < item->kv_heads; first += together) {
            int64_t n = 0, lanes = 0;
            fetch_both_scales(c, w, first, together, here);
            for (int64_t head = first; head < first + together; head++) {
                const panel_state *s = &w->tiles[head * item->tiles + i].panel[0];
                w->chunks[n] = head_chunk(c, w, head, n, here);
                n += meet(c, s, &w->panels[n], &w->chunks[n]); /* all or none: they see the same keys */
                lanes = s->lanes;
            }
            if (!n) continue;
            if (c->gathers) w->chunks->gathered = w->gathered;
            else if (!(apart && lanes <= c->tuning->few.followed_queries)) tell_ahead(c, w, item, first, together, here, next);
            c->few(w->panels, lanes, w->chunks, n);
        }
    }
}

/* The tiles of one head that walk this list, and see keys of `range`, meet the chunk. `next`: the chunk after it, or NULL. */
static void attend_head(const call *c, const worker_scratch *w, const ba_item *item, const ba_range *range, int64_t head, const chunk_rows *here,
                        const chunk_rows *next, batch *many) {
    const ba_problem *p = c->problem;
    fetch_both_scales(c, w, head, 1, here);
    ba_chunk chunk = head_chunk(c, w, head, 0, here);
    int64_t skip = 0;
    if (chunk.key_index[0] < range->lo) { /* keys before all that is seen need no packing */
        skip = ba_min(ba_first_at_least(chunk.key_index, chunk.keys, range->lo), chunk.keys - 1);
        skip -= skip % c->family->key_align;
        skip_keys(&chunk, skip);
    }
    const int64_t whole = ba_max(0, here->whole - skip), others = chunk.keys - whole;
    const bool alone = c->chunks == 2 || others; /* chunks that are packed here share the memory for it */
    if (alone || many->walks >> here->walk & 1) flush(c, many);
    if (c->pack_k && others) {
        memcpy(w->packed_k_rows, chunk.k_rows, (size_t)whole * sizeof *chunk.k_rows);
        c->pack_k(w->packed_k, w->packed_k_rows + whole, chunk.k_rows + whole, chunk.k_scale, others, p->head_dim);
        chunk.k_rows = w->packed_k_rows;
    }
    if (c->pack_v && others) {
        memcpy(w->packed_v_rows, chunk.v_rows, (size_t)whole * sizeof *chunk.v_rows);
        c->pack_v(w->packed_v, w->packed_v_rows + whole, chunk.v_rows + whole, chunk.v_scale, others, p->v_dim);
        chunk.v_rows = w->packed_v_rows;
    }
    share shares = {next, 0, 0};
    for (int64_t i = head * item->tiles; i < (head + 1) * item->tiles; i++)
        if (w->tiles[i].walk == here->walk) shares.panels += w->tiles[i].panels;
    for (int64_t i = head * item->tiles; i < (head + 1) * item->tiles; i++)
        if (w->tiles[i].walk == here->walk) attend_tile(c, &w->tiles[i], &chunk, &shares, many);
    if (alone) flush(c, many);
}

static void run_item(void *context, int64_t index, int worker) {
    const call *c = context;
    const ba_item *item = &c->plan.item[index];
    const int64_t tiles = item->tiles * item->kv_heads;
    const bool whole = ba_plan_parts(&c->plan, item->batch) == 1;
    worker_scratch w;
    lay_out_scratch(c, c->scratch + worker * c->scratch_bytes, &w);
    ba_walk walks[MAX_GROUP_TILES];
    for (int64_t i = 0; i < tiles; i++) open_tile(c, &w, item, i);
    const int lists = make_walks(c, &w, item, walks);

    batch many = {.panels = w.panels, .chunks = w.chunks};
    bool more = next_chunk(c, item, walks, lists, &w.chunk[0]);
    for (int at = 0; more && !ba_stopped(); many.older++) {
        const chunk_rows *here = &w.chunk[at];
        at = (at + 1) % c->chunks;
        if (many.older + 2 > c->chunks) flush(c, &many);
        more = next_chunk(c, item, walks, lists, &w.chunk[at]);
        const bool few = ba_plan_few(&c->plan, item->batch);
        const chunk_rows *next = more || (few && guess_next_item(c, index, &w.chunk[at])) ? &w.chunk[at] : NULL;
        if (few) attend_few(c, &w, item, here, next);
        else
            for (int64_t head = 0; head < item->kv_heads; head++) attend_head(c, &w, item, &walks[here->walk].range, head, here, next, &many);
    }
    flush(c, &many);
    for (int64_t i = 0; i < tiles; i++)
        for (int n = 0; n < w.tiles[i].panels; n++) {
            if (whole) write_lanes(c, &w, item->batch, &w.tiles[i].tile, &w.tiles[i].panel[n]);
            else keep_part(c, item, &w.tiles[i].tile, &w.tiles[i].panel[n]);
        }
}

/* ---- The call ----------------------------------------------------------------------------------------------------- */

static void choose_kernels(call *c, const ba_problem *p, ba_isa level) {
    const ba_kernels *kernels = ba_kernels_at(level);
    const ba_attend_family *f = c->family, *vectors = kernels->vector[p->dtype];
    const bool own = p->kv_dtype == p->dtype;
    c->pack_k = own ? f->pack->keys : kernels->cache[p->kv_dtype]->pack;
    c->pack_v = own ? f->pack->values : kernels->cache[p->kv_dtype]->pack;
    /* by the group and not by a panel's queries: lists of single heads shall give what shared ones give, to the bit */
    c->own_few = own && f->few->attend && f->few_least_heads > 0 && p->group >= f->few_least_heads;
    c->few = c->own_few ? f->few->attend : kernels->cache[p->kv_dtype]->few;
    c->pack_few = c->own_few ? f->few->pack_queries : vectors->few->pack_queries;
    c->order_few = c->own_few ? f->few->order_queries : kernels->cache[p->kv_dtype]->order_few;
}

/* Rows of one panel take small bites of their lists, so that rows side by side meet at a key while it is in cache; those of more take large ones,
 * since each bite fetches their state. */
static void choose_chunks(call *c) {
    c->chunk_keys = c->tuning->chunk_keys;
    c->chunks = 2;
    if (!c->problem->listed || !c->family->has_cuts) return;
    if (c->plan.row_queries * c->plan.shared_heads <= c->family->lanes[WIDE]) c->chunk_keys = c->tuning->list_keys;
    if (c->chunk_keys < c->tuning->chunk_keys) c->chunks = MANY + 2;
}

/* Whether few queries meet short rows that lie apart: of one head, since each has lists of its own, among those of all. */
static bool gathers(const call *c) {
    const ba_problem *p = c->problem;
    const bool apart = p->k.token_stride > p->head_dim && p->v.token_stride > p->v_dim;
    return apart && c->plan.few_heads == 1 && ba_max(p->head_dim, p->v_dim) * p->kv_element_size <= c->tuning->few.gathered_bytes;
}

/* Where each batch entry's parts begin; returns the bytes of all. */
static int64_t lay_out_parts(const call *c, int64_t *offset) {
    int64_t bytes = 0;
    for (int64_t b = 0; b < c->problem->batch; b++) {
        const int64_t parts = ba_plan_parts(&c->plan, b);
        if (offset) offset[b] = parts > 1 ? bytes : -1;
        if (parts > 1) bytes += parts * c->problem->kv_heads * part_bytes(c);
    }
    return bytes;
}

ba_status ba_attend_with(const ba_attend_family *family, const ba_problem *problem, int threads) {
    const ba_isa level = ba_isa_active();
    call c = {.problem = problem, .family = family};
    choose_kernels(&c, problem, level);
    ba_tuning tuning = *ba_tuning_at(c.family->isa);
    const ba_tuning *of_level = ba_tuning_at(level);
    tuning.few = c.own_few && of_level->tile_few.keys ? of_level->tile_few : of_level->few;
    c.tuning = &tuning;
    const ba_attend_family *rows = c.family->rows ? c.family : ba_kernels_at(level)->vector[problem->dtype];
    if (ba_attends_by_block(problem, rows)) return ba_attend_by_block(problem, rows, threads);

    ba_plan_lay_out(&c.plan, problem, c.tuning, c.family->lanes[WIDE], threads);
    choose_chunks(&c);
    c.gathers = gathers(&c);
    threads = (int)ba_min(threads, ba_max(1, c.plan.items)); /* no scratch for threads that would find no work */
    worker_scratch unused;
    c.scratch_bytes = lay_out_scratch(&c, NULL, &unused);
    int64_t used = 0;
    ba_take(NULL, &used, ba_plan_bytes(&c.plan, threads));
    ba_take(NULL, &used, problem->batch * (int64_t)sizeof(int64_t));
    ba_take(NULL, &used, lay_out_parts(&c, NULL));
    ba_take(NULL, &used, threads * c.scratch_bytes);
    c.sharing = (ba_sharing){
        .plan = &c.plan, .family = c.family, .chunk_keys = c.tuning->chunk_keys, .pack_keys = c.chunk_keys, .k.pack = c.pack_k, .v.pack = c.pack_v};
    /* what another dtype of K and V is packed by has scales, which sharing has not */
    int64_t shared_bytes = c.pack_k == c.family->pack->keys && ba_may_share(problem, c.family) ? ba_sharing_lay_out(&c.sharing, NULL) : 0;
    if (shared_bytes > c.tuning->shared_bytes) shared_bytes = 0;
    ba_take(NULL, &used, shared_bytes);
    char *memory = ba_arena_get((size_t)used);
    if (!memory) return ba_fail(BA_ERROR_MEMORY, "scratch: expected %lld bytes of memory, got none", (long long)used);
    used = 0;
    char *plan_memory = ba_take(memory, &used, ba_plan_bytes(&c.plan, threads));
    int64_t *part_offset = (int64_t *)ba_take(memory, &used, problem->batch * (int64_t)sizeof(int64_t));
    c.part_offset = part_offset;
    c.parts = ba_take(memory, &used, lay_out_parts(&c, part_offset));
    c.scratch = ba_take(memory, &used, threads * c.scratch_bytes);
    if (shared_bytes) ba_sharing_lay_out(&c.sharing, ba_take(memory, &used, shared_bytes));

    ba_status status = ba_plan_make(&c.plan, threads, plan_memory);
    if (status == BA_OK) {
        const double flops = c.plan.cost * 2 * (double)(problem->head_dim + problem->v_dim);
        if (ba_is_small(flops, c.tuning->inline_flops)) threads = 1;
        c.threads = threads;
        status = ba_share_rows(&c.sharing, threads);
    }
    if (status == BA_OK) status = ba_parallel(threads, c.plan.items, run_item, &c);
    if (status == BA_OK && c.plan.parts_most > 1) status = ba_parallel(threads, problem->batch * problem->kv_heads, join_item, &c);
    ba_arena_release();
    return status;
}
