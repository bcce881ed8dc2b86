/* Lays out a worker's scratch memory in a forward call, opens query tiles, finds rows of K and V, and writes results. (For tile registers see
 * csrc/kernels/tiles/.) */
#include "kernels/prefetch_rows.h"
#include "ops/attend/attend_call.h"
#include "ops/plan/bias.h"
#include "ops/reals.h"

#include <assert.h>
#include <math.h>
#include <string.h>

/* ---- Scratch -------------------------------------------------------------------------------------------------------- */

int64_t ba_lay_out_attend_scratch(const ba_attend_call *c, char *base, ba_attend_scratch *w) {
    const ba_attend_family *f = c->family;
    const ba_problem *p = c->problem;
    const int64_t tiles = c->plan.grouping.tiles, keys = ba_max(c->chunk_keys, c->tuning->few.keys), packed = ba_round_up(keys, f->key_pad);
    const int64_t lanes = tiles * ba_max(ba_tile_room(c), c->plan.grouping.few_heads * ba_few_tile_room(c));
    const int64_t pad_k = ba_round_up(p->head_dim, f->dim_pad), pad_v = ba_round_up(p->v_dim, f->dim_pad);
    /* Room for a packed element of K or V. Where rows are widened to the family's dtype first, they are packed in the family's own format
     * (pack_bytes). Otherwise there is also room for a real, because rows of other dtypes are packed as reals. */
    const int64_t pack = c->widen ? f->pack_bytes : ba_max(f->pack_bytes, f->real_size);
    const int64_t in_page = c->tuning->page_offset;
    int64_t used = 0;
    w->q = ba_take_in_page(base, &used, lanes * ba_query_room(c), in_page, 0);
    w->o = ba_take_in_page(base, &used, lanes * pad_v * f->real_size, in_page, in_page);
    w->ml = ba_take(base, &used, lanes * 2 * f->real_size);
    w->bounds = ba_take(base, &used, lanes * 2 * (int64_t)sizeof(int32_t));
    w->bitmaps = ba_take(base, &used, tiles * c->plan.bitmap_words * (int64_t)sizeof(uint64_t));
    w->packed_k = ba_take_in_page(base, &used, c->pack_k ? packed * pad_k * pack : 0, in_page, in_page);
    w->packed_v = ba_take_in_page(base, &used, c->pack_v ? packed * pad_v * pack : 0, in_page, in_page);
    w->wide = ba_take(base, &used, c->widen ? BA_WIDE_KEYS * ba_round_up(ba_max(p->head_dim, p->v_dim), BA_PACK_PAD) * f->pack_bytes : 0);
    w->scores = ba_take(base, &used, ba_max(keys * f->scratch_per_key, c->plan.grouping.few_heads * ba_few_scratch(c)));
    w->bias = ba_take(base, &used,
                      ba_has_bias(p) ? ba_max(keys * f->lanes[BA_PANEL_WIDE], c->plan.grouping.few_heads * BA_FEW_BIAS(keys)) * f->real_size : 0);
    w->lse = ba_take(base, &used, BA_MAX_LANES * f->real_size);
    w->packed_k_rows = ba_take(base, &used, keys * (int64_t)sizeof(void *));
    w->packed_v_rows = ba_take(base, &used, keys * (int64_t)sizeof(void *));
    w->gathered = ba_take(base, &used, c->gathers ? c->tuning->few.keys * (p->k_width + p->v_width) * p->kv_element_size : 0);
    w->rows = ba_take(base, &used, BA_MAX_LANES * (int64_t)sizeof(void *));
    w->k_scale = ba_take(base, &used, c->plan.grouping.few_heads * keys * (int64_t)sizeof(float));
    w->v_scale = ba_take(base, &used, c->plan.grouping.few_heads * keys * (int64_t)sizeof(float));
    for (int i = 0; i < c->chunks; i++) {
        w->chunk[i].k_rows = ba_take(base, &used, (keys + c->tuning->few.keys) * (int64_t)sizeof(void *));
        w->chunk[i].v_rows = ba_take(base, &used, (keys + c->tuning->few.keys) * (int64_t)sizeof(void *));
        w->chunk[i].k_scale_at = ba_take(base, &used, keys * (int64_t)sizeof(float *));
        w->chunk[i].v_scale_at = ba_take(base, &used, keys * (int64_t)sizeof(float *));
        w->chunk[i].key_index = ba_take(base, &used, keys * (int64_t)sizeof(int32_t));
    }
    w->tiles = ba_take(base, &used, tiles * c->plan.grouping.few_heads * (int64_t)sizeof(ba_tile_state));
    w->panels = ba_take(base, &used, BA_MANY_PANELS * (int64_t)sizeof(ba_panel));
    w->chunks = ba_take(base, &used, BA_MANY_PANELS * (int64_t)sizeof(ba_chunk));
    return used;
}

/* ---- Queries -------------------------------------------------------------------------------------------------------- */

static int64_t panel_room(const ba_attend_call *c, ba_panel_width width) { return width == BA_PANEL_FEW ? BA_FEW_QUERIES : c->family->lanes[width]; }

/* Packs the panel's queries, empties its state, and sets the keys that its lanes see. */
static void open_panel(const ba_attend_call *c, const ba_attend_scratch *w, const ba_item *item, ba_tile_state *t, ba_panel_state *s) {
    const ba_problem *p = c->problem;
    const ba_attend_family *f = c->family;
    const int64_t room = panel_room(c, s->width);
    int32_t *lo = (int32_t *)s->panel.lo, *hi = (int32_t *)s->panel.hi;
    const char *const first_row = ba_query_row(p, &p->q, p->element_size, item->batch, 0, 0);
    ba_open_lanes(s);
    for (int64_t i = 0; i < s->lanes; i++) {
        const int64_t query = ba_lane_query(&t->tile, s->lane + i), head = ba_lane_head(&t->tile, s->lane + i);
        ba_set_lane(s, i, ba_visible_keys(p, item->batch, query), lo, hi);
        w->rows[i] = first_row + (head * p->q.head_stride + query * p->q.token_stride) * p->element_size;
        /* In layouts where a token's heads lie side by side, the rows of one head lie far apart, and the CPU does not prefetch them itself. */
        ba_prefetch_to_read(w->rows[i], p->head_dim * p->element_size);
    }
    ba_close_lanes(s, room, lo, hi, t);
    const int64_t o_dim = s->width == BA_PANEL_FEW ? BA_FEW_PAD(p->v_dim) : ba_round_up(p->v_dim, f->dim_pad);
    (s->width == BA_PANEL_FEW ? c->pack_few : f->pack->queries[s->width])(s->panel.q, w->rows, s->lanes, p->head_dim, p->scale * BA_LOG2_E);
    if (s->width == BA_PANEL_FEW && c->order_few) c->order_few(s->panel.q, s->lanes, p->head_dim);
    s->panel.lanes = s->lanes;
    s->panel.fresh = f->takes_fresh && s->width != BA_PANEL_FEW;
    if (!s->panel.fresh) memset(s->panel.o, 0, (size_t)(room * o_dim * f->real_size));
    memset(s->panel.l, 0, (size_t)(room * f->real_size));
    for (int64_t i = 0; i < room; i++) ba_set_real(s->panel.m, i, ba_initial_m(f->real_size), f->real_size);
}

void ba_open_tile(const ba_attend_call *c, const ba_attend_scratch *w, const ba_item *item, int64_t index) {
    const ba_problem *p = c->problem;
    const ba_attend_family *f = c->family;
    const bool few = ba_plan_few_queries(&c->plan, item->batch);
    ba_tile_state *t = &w->tiles[index];
    t->head = index / item->tiles;
    t->tile = ba_plan_tile(&c->plan, item->batch, item->kv_head + t->head, item->first_tile + index % item->tiles);
    t->range = (ba_range){INT64_MAX, 0};
    t->panels = 0;
    const int64_t room_of_tile = few ? ba_few_tile_room(c) : ba_tile_room(c);
    int64_t at = index * room_of_tile;
    for (int64_t lane = 0; lane < t->tile.lanes;) {
        ba_panel_state *s = &t->panel[t->panels++];
        const int64_t left = t->tile.lanes - lane;
        s->width = few ? BA_PANEL_FEW : left <= f->lanes[BA_PANEL_NARROW] ? BA_PANEL_NARROW : BA_PANEL_WIDE;
        const int64_t room = panel_room(c, s->width);
        s->lane = lane;
        s->lanes = ba_min(left, room);
        s->panel.q = w->q + at * ba_query_room(c);
        s->panel.o = w->o + at * ba_round_up(p->v_dim, f->dim_pad) * f->real_size;
        s->panel.m = w->ml + at * 2 * f->real_size;
        s->panel.l = w->ml + (at * 2 + room) * f->real_size;
        s->panel.lo = w->bounds + at * 2;
        s->panel.hi = w->bounds + at * 2 + room;
        at += few ? BA_FEW_ROOM : room;
        assert(at <= (index + 1) * room_of_tile); /* or the panel would reach into the next tile's memory */
        open_panel(c, w, item, t, s);
        lane += s->lanes;
    }
}

/* ---- Results -------------------------------------------------------------------------------------------------------- */

/* Adds a sink, which takes part in the softmax as a key whose value is 0, to the state of a lane. */
static void add_sink(const ba_attend_call *c, const ba_panel_state *s, int64_t lane, double sink) {
    const ba_attend_family *f = c->family;
    const int64_t real_size = f->real_size, v_dim = c->problem->v_dim;
    const double m = ba_get_real(s->panel.m, lane, real_size), l = ba_get_real(s->panel.l, lane, real_size), above = sink * BA_LOG2_E - m;
    if (!(above > 0)) {
        ba_set_real(s->panel.l, lane, l + exp2(above), real_size);
        return;
    }
    const double shrink = exp2(-above);
    for (int64_t d = 0; d < v_dim; d++) {
        const int64_t at = s->width == BA_PANEL_FEW ? lane * BA_FEW_PAD(v_dim) + d : ba_o_place(f, f->lanes[s->width], d, lane);
        ba_set_real(s->panel.o, at, ba_get_real(s->panel.o, at, real_size) * shrink, real_size);
    }
    ba_set_real(s->panel.m, lane, sink * BA_LOG2_E, real_size);
    ba_set_real(s->panel.l, lane, l * shrink + 1, real_size);
}

void ba_write_lanes(const ba_attend_call *c, const ba_attend_scratch *w, int64_t batch, const ba_tile *tile, const ba_panel_state *s) {
    const ba_problem *p = c->problem;
    const ba_attend_family *f = c->family;
    if (s->panel.fresh) memset(s->panel.o, 0, (size_t)(f->lanes[s->width] * ba_round_up(p->v_dim, f->dim_pad) * f->real_size));
    char *const first_row = ba_result_row(p, &p->out, p->out_element_size, batch, 0, 0);
    for (int64_t i = 0; i < s->lanes; i++) {
        const int64_t query = ba_lane_query(tile, s->lane + i), head = ba_lane_head(tile, s->lane + i);
        w->rows[i] = first_row + (head * p->out.head_stride + query * p->out.token_stride) * p->out_element_size;
        ba_prefetch_to_write(w->rows[i], p->v_dim * p->out_element_size);
        if (p->sinks) add_sink(c, s, i, (double)p->sinks[head]);
    }
    ba_finish_fn finish;
    if (s->width == BA_PANEL_FEW) finish = p->unrounded ? c->few_family->few->finish_reals : c->few_family->few->finish;
    else finish = p->unrounded ? f->pack->finish_reals[s->width] : f->pack->finish[s->width];
    finish(&s->panel, s->lanes, p->v_dim, (void *const *)w->rows, p->lse.data ? w->lse : NULL);
    for (int64_t i = 0; p->lse.data && i < s->lanes; i++)
        memcpy(ba_result_row(p, &p->lse, f->real_size, batch, ba_lane_head(tile, s->lane + i), ba_lane_query(tile, s->lane + i)),
               w->lse + i * f->real_size, (size_t)f->real_size);
}

/* ---- Rows of keys ----------------------------------------------------------------------------------------------------- */

/* Finds the rows of K (or V) of some keys, and their scales, where they lie in the caller's arrays. */
static void find_rows(const ba_problem *p, int64_t batch, int64_t kv_head, const ba_view *view, const ba_view *scale, const int32_t *key_index,
                      int64_t keys, const void **rows, const float **scales) {
    const int64_t size = p->kv_element_size, step = view->token_stride * size, page_size = p->page_size ? p->page_size : INT64_MAX;
    /* Key numbers rise. Keys with consecutive numbers, in one page where there are pages, form a run whose rows are equally far apart. */
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

/* Finds the rows of K (or V) of a chunk. Those of its first `shared` keys lie in the shared, packed K (or V) if there is one (`s->pack`); all others
 * lie in the caller's array. */
static void take_rows(const ba_attend_call *c, const ba_item *item, const ba_view *view, const ba_view *scale, const ba_shared_rows *s,
                      const ba_chunk_rows *chunk, const void **rows, const float **scales) {
    const ba_problem *p = c->problem;
    const int64_t head = item->batch * p->kv_heads + item->kv_head, group = c->family->key_pad;
    if (chunk->shared) {
        const char *first = s->pack ? s->data + s->offset[head] : ba_key_row(p, view, p->kv_element_size, item->batch, item->kv_head, 0);
        const int64_t step = s->pack ? s->row_bytes : view->token_stride * p->kv_element_size;
        for (int64_t at = 0; at < chunk->shared; at += group) { /* the keys of a group have consecutive numbers */
            const char *row = first + chunk->key_index[at] * step;
            for (int64_t j = 0; j < group; j++) rows[at + j] = row + j * step;
        }
    }
    const int64_t at = chunk->shared;
    find_rows(p, item->batch, item->kv_head, view, scale, chunk->key_index + at, chunk->keys - at, rows + at, scales + at);
}

void ba_find_k_rows(const ba_attend_call *c, const ba_item *item, ba_chunk_rows *chunk) {
    take_rows(c, item, &c->problem->k, &c->problem->k_scale, &c->sharing.k, chunk, chunk->k_rows, chunk->k_scale_at);
}

bool ba_next_chunk(const ba_attend_call *c, const ba_item *item, ba_walk *walks, int walk_count, ba_chunk_rows *chunk) {
    const ba_problem *p = c->problem;
    const int next = ba_next_walk(walks, walk_count);
    if (next < 0) return false;
    chunk->walk = next;
    chunk->keys = ba_walk_take(&walks[next], chunk->key_index);
    chunk->shared = ba_is_shared(&c->sharing, item->batch) ? chunk->keys - chunk->keys % c->family->key_pad
                                                           : 0; /* the last group of a sequence may be incomplete; its keys are not shared */
    ba_find_k_rows(c, item, chunk);
    take_rows(c, item, &p->v, &p->v_scale, &c->sharing.v, chunk, chunk->v_rows, chunk->v_scale_at);
    return true;
}

/* The number itself, or NAN for any NaN: kernels that round by bits would round some other NaNs, and what they compute from these, to 0. */
static float one_nan(float x) { return isnan(x) ? NAN : x; }

/* Copies the scales of the keys of some neighbouring heads to `scales`, [head][key]. Those of the first head are prefetched before the copy, because
 * a loop that waits for one scale has only few other loads under way. */
static void fetch_scales(const ba_view *view, const float *const *at, int64_t first, int64_t heads, int64_t keys, float *scales) {
    if (!view->data) return;
    for (int64_t j = 0; j < keys; j++) ba_prefetch_to_read(at[j] + first * view->head_stride, (int64_t)sizeof(float));
    for (int64_t j = 0; j < keys; j++) {
        const float *from = at[j] + first * view->head_stride;
        for (int64_t i = 0; i < heads; i++) scales[i * keys + j] = one_nan(from[i * view->head_stride]);
    }
}

void ba_fetch_scales(const ba_attend_call *c, const ba_attend_scratch *w, int64_t first, int64_t heads, const ba_chunk_rows *here) {
    fetch_scales(&c->problem->k_scale, here->k_scale_at, first, heads, here->keys, w->k_scale);
    fetch_scales(&c->problem->v_scale, here->v_scale_at, first, heads, here->keys, w->v_scale);
}

/* ---- Chunks ----------------------------------------------------------------------------------------------------------- */

ba_chunk ba_head_chunk(const ba_attend_call *c, const ba_attend_scratch *w, int64_t head, int64_t place, const ba_chunk_rows *here) {
    const ba_problem *p = c->problem;
    return (ba_chunk){.keys = here->keys,
                      .head_dim = p->head_dim,
                      .v_dim = p->v_dim,
                      .key_index = here->key_index,
                      .k_rows = here->k_rows,
                      .v_rows = here->v_rows,
                      .k_offset = head * p->k.head_stride * p->kv_element_size,
                      .v_offset = head * p->v.head_stride * p->kv_element_size,
                      /* The bytes of a row in the caller's array. A shared, packed row has about as many. In families that split elements into
                       * pieces, a shared row has more bytes, but their kernels do not read k_next_bytes and v_next_bytes. */
                      .k_next_bytes = p->k_width * p->kv_element_size,
                      .v_next_bytes = p->v_width * p->kv_element_size,
                      .next_level = c->prefetch_level,
                      .k_scale = p->k_scale.data ? w->k_scale + place * here->keys : NULL,
                      .v_scale = p->v_scale.data ? w->v_scale + place * here->keys : NULL,
                      .scale = p->scale * BA_LOG2_E,
                      .softcap = p->softcap * BA_LOG2_E,
                      .scratch = w->scores + place * ba_few_scratch(c)};
}

bool ba_bias_chunk(const ba_attend_call *c, const ba_attend_scratch *w, int64_t batch, const ba_tile *tile, const ba_panel_state *s, int64_t place,
                   ba_chunk *chunk) {
    char *const memory = w->bias + place * BA_FEW_BIAS(c->tuning->few.keys) * c->family->real_size;
    if (s->width == BA_PANEL_FEW) return ba_make_bias(c->problem, c->fill_few_bias, batch, tile, s, s->lanes, chunk, memory, &chunk->bias);
    return ba_make_bias(c->problem, c->fill_bias, batch, tile, s, c->family->lanes[s->width], chunk, memory, &chunk->bias);
}

void ba_skip_keys(ba_chunk *chunk, int64_t keys) {
    assert(!chunk->k_next); /* the rows of the next chunk are set afterwards: they have nothing to do with this chunk's keys */
    chunk->keys -= keys;
    chunk->place += keys;
    chunk->key_index += keys;
    chunk->k_rows += keys;
    chunk->v_rows += keys;
    if (chunk->k_scale) chunk->k_scale += keys;
    if (chunk->v_scale) chunk->v_scale += keys;
}

bool ba_cut_to_seen(const ba_attend_call *c, const ba_panel_state *s, ba_panel *panel, ba_chunk *chunk) {
    const int64_t step = s->width == BA_PANEL_FEW ? ba_max(BA_FEW_KEY_ALIGN, c->few_family->key_align) : c->family->key_align;
    int64_t begin = 0, end = chunk->keys;
    if (chunk->key_index[0] < s->any.lo || chunk->key_index[end - 1] >= s->any.hi) {
        begin = ba_first_at_least(chunk->key_index, chunk->keys, s->any.lo);
        end = ba_first_at_least(chunk->key_index, chunk->keys, s->any.hi);
        if (begin >= end) return false;
        begin -= begin % step;
        end = ba_min(ba_round_up(end, step), chunk->keys);
    }
    ba_skip_keys(chunk, begin);
    chunk->keys = end - begin;
    *panel = s->panel;
    if (ba_lanes_see_all(s, chunk->key_index, chunk->keys)) panel->lo = panel->hi = NULL;
    return true;
}
