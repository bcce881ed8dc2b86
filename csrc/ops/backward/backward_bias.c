/* Gradients of the biases attn_mask and alibi_slopes. They take a pass of their own over all queries and keys, after the pass for dQ, dK and dV. An
 * element of a mask may belong to many heads and batch entries, and the dS of all of these are added up.
 *
 * An item of the mask's gradient is a rectangle of elements: the queries of one tile by one run of keys, at one index of the mask's batch axis and
 * one index of its head axis. One thread adds up the rectangle's dS over all batch entries and heads that these two indices stand for, in their
 * order. Where the mask's axis of queries, or of keys, has length 1, the item goes over all query tiles, or over all runs. An item of the slopes'
 * gradient is one head of one batch entry. So threads do not change the order of any sum. */
#include <stdlib.h>
#include <string.h>

#include "core/arena.h"
#include "core/pool.h"
#include "ops/backward/backward_call.h"
#include "ops/plan/bias.h"
#include "ops/reals.h"

typedef struct bias_call {
    ba_backward_call common; /* its family is a vector family, its tiles are of one head, and it has no sums dK and dV */
    double *slopes;          /* [batch entry][head]: the gradients of the slopes from each batch entry */
} bias_call;

typedef struct bias_scratch {
    ba_backward_scratch common; /* for one tile */
    char *sums;                 /* real [panel][key of the run][lane of the panel]: sums of dS */
    double *numbers;            /* elements of the mask's gradient that belong to one row or one column */
    float *floats;              /* these numbers as floats */
} bias_scratch;

/* How many numbers a rectangle may have in a row or in a column. */
static int64_t number_count(const bias_call *c) { return ba_max(ba_gradient_tile_room(&c->common), c->common.tuning->gradient_keys); }

static int64_t lay_out(const bias_call *c, char *base, bias_scratch *s) {
    const int64_t lanes = ba_gradient_tile_room(&c->common), keys = c->common.tuning->gradient_keys;
    int64_t used = ba_lay_out_backward_scratch(&c->common, 1, base, &s->common);
    s->sums = ba_take(base, &used, lanes * keys * c->common.family->real_size);
    s->numbers = ba_take(base, &used, number_count(c) * (int64_t)sizeof(double));
    s->floats = ba_take(base, &used, number_count(c) * (int64_t)sizeof(float));
    return used;
}

static bias_scratch scratch_of(const bias_call *c, int worker) {
    bias_scratch s;
    lay_out(c, c->common.scratch + worker * c->common.scratch_bytes, &s);
    return s;
}

/* ---- Rectangles -------------------------------------------------------------------------------------------------------- */

/* Tiles are of one head here, so that a token is one query. */
static int64_t tiles_per_row(const ba_tiling *t) { return ba_ceil_div(t->row_tokens, t->tile_queries); }

static int64_t tile_count(const bias_call *c) {
    const ba_tiling *t = &c->common.plan.tiling;
    return ba_ceil_div(c->common.problem->q_len, t->row_tokens) * tiles_per_row(t);
}

static int64_t run_count(const bias_call *c) { return ba_ceil_div(c->common.problem->kv_len, c->common.tuning->gradient_keys); }

/* The queries of tile number `index` in a sequence of `tokens` tokens. The range is empty where the tile lies behind the last token. */
static ba_range tile_at(const bias_call *c, int64_t index, int64_t tokens) {
    const ba_tiling *t = &c->common.plan.tiling;
    const int64_t row = index / tiles_per_row(t), first = row * t->row_tokens + index % tiles_per_row(t) * t->tile_queries;
    const int64_t end = ba_min(ba_min(first + t->tile_queries, (row + 1) * t->row_tokens), tokens);
    return (ba_range){first, ba_max(first, end)};
}

static ba_range run_at(const bias_call *c, int64_t index) {
    const int64_t keys = c->common.tuning->gradient_keys;
    return (ba_range){index * keys, ba_min((index + 1) * keys, c->common.problem->kv_len)};
}

static int64_t wide_lanes(const bias_call *c) { return c->common.family->lanes[BA_PANEL_WIDE]; }

/* The sums of one lane of a tile. The sum for key j of the run is number j * wide_lanes(). */
static char *sums_of_lane(const bias_call *c, const bias_scratch *s, int64_t lane) {
    const int64_t width = wide_lanes(c), panel = lane / width;
    return s->sums + (panel * c->common.tuning->gradient_keys * width + lane % width) * c->common.family->real_size;
}

/* Opens a tile, and packs its queries where they see some key. Returns the range of keys that they see. */
static ba_range open_tile(const bias_call *c, const bias_scratch *s, const ba_item *item, ba_tile_state *t) {
    const ba_backward_call *b = &c->common;
    const ba_backward_scratch *w = &s->common;
    int64_t at = 0;
    t->range = (ba_range){INT64_MAX, 0};
    t->panels = 0;
    for (int64_t lane = 0; lane < t->tile.lanes; lane += t->panel[t->panels - 1].lanes) {
        ba_panel_state *panel = ba_add_gradient_panel(b, w, t, lane, &at);
        panel->gradient.dq = NULL;
        ba_open_gradient_lanes(b, w, item, t, panel, 1);
    }
    if (t->range.lo >= t->range.hi) return t->range;
    ba_find_lanes(b->problem, &b->problem->q, item->batch, &t->tile, 0, t->tile.lanes, w->rows);
    ba_find_lanes(b->problem, &b->gradients->dout, item->batch, &t->tile, 0, t->tile.lanes, w->more_rows);
    ba_pack_gradient_panels(b, w, t, 1);
    return t->range;
}

/* Adds the dS of a tile and of some keys to the sums. The keys lie in the run of keys that begins with first_key. */
static void add_keys(const bias_call *c, const bias_scratch *s, const ba_item *item, const ba_tile_state *t, ba_gradient_rows *rows,
                     int64_t first_key) {
    const ba_backward_call *b = &c->common;
    const ba_backward_scratch *w = &s->common;
    const int64_t real = b->family->real_size;
    ba_find_gradient_rows(b, item, rows);
    const ba_chunk chunk = ba_open_gradient_chunk(b, w, item, rows, NULL);
    for (int n = 0; n < t->panels; n++) {
        const ba_panel_state *panel = &t->panel[n];
        const int64_t width = b->family->lanes[panel->width];
        const ba_range run = ba_run_gradient_panel(b, w, item->batch, &t->tile, panel, &chunk, w->weights, w->slopes);
        char *const sums = sums_of_lane(c, s, panel->lane);
        for (int64_t j = run.lo; j < run.hi; j++) /* lanes behind the last query have slopes of any kind, NaN included */
            b->family->pack->add_reals(sums + (rows->key_index[j] - first_key) * wide_lanes(c) * real, w->slopes + j * width * real, panel->lanes);
    }
}

/* Adds the dS of tile `index` of a head and of a run of keys to the sums. */
static void add_tile(const bias_call *c, const bias_scratch *s, int64_t batch, int64_t head, int64_t index, ba_range run) {
    const ba_problem *p = c->common.problem;
    const int64_t words = c->common.plan.bitmap_words;
    const ba_item item = {.batch = (int32_t)batch, .kv_head = (int32_t)(head / p->group), .kv_heads = 1};
    const ba_range queries = tile_at(c, index, ba_q_span(p, batch).rows);
    if (queries.lo == queries.hi) return;
    ba_tile_state t = {.tile = {.block_row = queries.lo / c->common.plan.tiling.row_tokens,
                                .head = head,
                                .heads = 1,
                                .lanes = queries.hi - queries.lo,
                                .first_query = queries.lo}};
    const ba_range seen = open_tile(c, s, &item, &t);
    const ba_range keys = {ba_max(seen.lo, run.lo), ba_min(seen.hi, run.hi)};
    if (keys.lo >= keys.hi) return;
    int64_t bad;
    if (p->listed) ba_list_to_bitmap(p, batch, head, t.tile.block_row, s->common.bitmaps, words, &bad); /* the lists are checked by now */
    ba_walk walk = ba_new_walk(&c->common.plan, &item, p->listed ? s->common.bitmaps : NULL, c->common.tuning->gradient_keys);
    walk.range = keys;
    ba_walk_begin(&walk, 0);
    ba_gradient_rows rows = s->common.chunk_rows[0];
    int32_t *const key_index = rows.key_index;
    for (int64_t n; (n = ba_walk_take(&walk, key_index)) > 0 && !ba_stopped();) {
        const int64_t first = ba_first_at_least(key_index, n, keys.lo), end = ba_first_at_least(key_index, n, keys.hi);
        rows.keys = end - first;
        memmove(key_index, key_index + first, (size_t)rows.keys * sizeof *key_index);
        if (first < end) add_keys(c, s, &item, &t, &rows, run.lo);
    }
}

static void clear_sums(const bias_call *c, const bias_scratch *s) {
    const int64_t lanes = ba_gradient_tile_room(&c->common), keys = c->common.tuning->gradient_keys;
    memset(s->sums, 0, (size_t)(lanes * keys * c->common.family->real_size));
}

/* ---- attn_mask ---------------------------------------------------------------------------------------------------------- */

/* An axis of the mask is `length` long, and the problem's axis is `count` long. Returns the indices on the problem's axis that the mask's index
 * `place` stands for. */
static ba_range places_of(int64_t length, int64_t place, int64_t count) { return length == 1 ? (ba_range){0, count} : (ba_range){place, place + 1}; }

/* Writes numbers to consecutive elements of the mask's gradient. */
static void write_numbers(const bias_call *c, const bias_scratch *s, const int64_t place[4], const double *numbers, int64_t n) {
    const ba_tensor *to = &c->common.gradients->attn_mask;
    char *row = to->data;
    for (int i = 0; i < 4; i++) row += place[i] * to->strides[i] * ba_dtype_size(to->dtype);
    if (to->dtype == BA_FLOAT64) {
        memcpy(row, numbers, (size_t)n * sizeof *numbers);
        return;
    }
    for (int64_t j = 0; j < n; j++) s->floats[j] = (float)numbers[j];
    ba_kernels_at(c->common.family->isa)->vector[to->dtype]->gradient->store_row(row, s->floats, n);
}

/* Writes a rectangle from its sums in the scratch memory. */
static void write_rectangle(const bias_call *c, const bias_scratch *s, int64_t place[4], ba_range queries, ba_range keys) {
    const int64_t n = keys.hi - keys.lo;
    place[3] = keys.lo;
    for (place[2] = queries.lo; place[2] < queries.hi; place[2]++) {
        const char *sums = sums_of_lane(c, s, place[2] - queries.lo);
        for (int64_t j = 0; j < n; j++) s->numbers[j] = ba_get_real(sums, j * wide_lanes(c), c->common.family->real_size);
        write_numbers(c, s, place, s->numbers, n);
    }
}

/* Adds the sums of a rectangle to s->numbers: to one number for each query, or to one for each key, or all to the first number. */
static void fold_rectangle(const bias_call *c, const bias_scratch *s, bool by_query, bool by_key, ba_range queries, ba_range keys) {
    for (int64_t lane = 0; lane < queries.hi - queries.lo; lane++) {
        const char *sums = sums_of_lane(c, s, lane);
        for (int64_t j = 0; j < keys.hi - keys.lo; j++)
            s->numbers[by_query ? lane : by_key ? j : 0] += ba_get_real(sums, j * wide_lanes(c), c->common.family->real_size);
    }
}

static void mask_item(void *context, int64_t index, int worker) {
    const bias_call *c = context;
    const ba_problem *p = c->common.problem;
    const int64_t *dims = c->common.gradients->attn_mask.dims;
    const bool by_query = dims[2] > 1, by_key = dims[3] > 1;
    const int64_t tile_items = by_query ? tile_count(c) : 1, run_items = by_key ? run_count(c) : 1;
    const int64_t run = index % run_items, tile = index / run_items % tile_items, place = index / run_items / tile_items;
    const ba_range batches = places_of(dims[0], place / dims[1], p->batch), heads = places_of(dims[1], place % dims[1], p->heads);
    const ba_range tiles = places_of(tile_items, tile, tile_count(c)), runs = places_of(run_items, run, run_count(c));
    const bias_scratch s = scratch_of(c, worker);
    int64_t at[4] = {place / dims[1], place % dims[1], 0, 0};
    memset(s.numbers, 0, (size_t)(number_count(c) * (int64_t)sizeof *s.numbers));
    for (int64_t t = tiles.lo; t < tiles.hi; t++) {
        const ba_range queries = tile_at(c, t, p->q_len);
        for (int64_t n = runs.lo; n < runs.hi && !ba_stopped(); n++) {
            const ba_range keys = run_at(c, n);
            clear_sums(c, &s);
            for (int64_t b = batches.lo; b < batches.hi; b++)
                for (int64_t h = heads.lo; h < heads.hi; h++) add_tile(c, &s, b, h, t, keys);
            if (by_query && by_key) write_rectangle(c, &s, at, queries, keys);
            else fold_rectangle(c, &s, by_query, by_key, queries, keys);
        }
    }
    if (by_query && !by_key) {
        const ba_range queries = tile_at(c, tile, p->q_len);
        for (at[2] = queries.lo; at[2] < queries.hi; at[2]++) write_numbers(c, &s, at, s.numbers + at[2] - queries.lo, 1);
    } else if (!by_query) {
        const ba_range keys = by_key ? run_at(c, run) : (ba_range){0, 1};
        at[3] = keys.lo;
        write_numbers(c, &s, at, s.numbers, keys.hi - keys.lo);
    }
}

static int64_t mask_items(const bias_call *c) {
    const int64_t *dims = c->common.gradients->attn_mask.dims;
    if (dims[2] == 0 || dims[3] == 0) return 0;
    return dims[0] * dims[1] * (dims[2] > 1 ? tile_count(c) : 1) * (dims[3] > 1 ? run_count(c) : 1);
}

/* ---- alibi_slopes ------------------------------------------------------------------------------------------------------- */

static void slope_item(void *context, int64_t index, int worker) {
    const bias_call *c = context;
    const ba_problem *p = c->common.problem;
    const int64_t batch = index / p->heads, head = index % p->heads, real = c->common.family->real_size;
    const bias_scratch s = scratch_of(c, worker);
    double total = 0;
    for (int64_t t = 0; t < tile_count(c); t++) {
        const ba_range queries = tile_at(c, t, ba_q_span(p, batch).rows);
        for (int64_t n = 0; n < run_count(c) && !ba_stopped(); n++) {
            const ba_range keys = run_at(c, n);
            clear_sums(c, &s);
            add_tile(c, &s, batch, head, t, keys);
            for (int64_t query = queries.lo; query < queries.hi; query++) {
                const char *sums = sums_of_lane(c, &s, query - queries.lo);
                const int64_t diagonal = ba_diagonal(p, batch, query);
                for (int64_t key = keys.lo; key < keys.hi; key++)
                    total -= (double)llabs(diagonal - key) * ba_get_real(sums, (key - keys.lo) * wide_lanes(c), real);
            }
        }
    }
    c->slopes[index] = total;
}

static void write_slopes(const bias_call *c) {
    const ba_problem *p = c->common.problem;
    for (int64_t h = 0; h < p->heads; h++) {
        double sum = 0;
        for (int64_t b = 0; b < p->batch; b++) sum += c->slopes[b * p->heads + h];
        c->common.gradients->alibi_slopes[h] = (float)sum;
    }
}

/* ---- The call ----------------------------------------------------------------------------------------------------------- */

static int64_t lay_out_call(bias_call *c, int threads, char *base) {
    int64_t used = 0;
    c->slopes = ba_take(base, &used, c->common.problem->batch * c->common.problem->heads * (int64_t)sizeof *c->slopes);
    c->common.scratch = ba_take(base, &used, threads * c->common.scratch_bytes);
    return used;
}

ba_status ba_attend_bias_backward(const ba_problem *problem, const ba_gradients *gradients, int num_threads) {
    if (!gradients->attn_mask.data && !gradients->alibi_slopes) return BA_OK;
    const ba_attend_family *family = ba_kernels_at(ba_isa_active())->vector[problem->dtype];
    const ba_tuning *tuning = ba_tuning_at(family->isa);
    bias_call c = {.common = {.problem = problem,
                              .gradients = gradients,
                              .family = family,
                              .fill_bias = family->panel->fill_bias,
                              .tuning = tuning,
                              .plan = ba_plan_gradients(problem, tuning)}};
    ba_tiling *tiling = &c.common.plan.tiling;
    tiling->row_tokens = ba_max(1, ba_min(tiling->row_tokens, problem->q_len));
    tiling->shared_heads = 1;
    c.common.scratch_bytes = lay_out(&c, NULL, &(bias_scratch){0});

    const int64_t masks = gradients->attn_mask.data ? mask_items(&c) : 0, slopes = gradients->alibi_slopes ? problem->batch * problem->heads : 0;
    const double pairs = (double)(problem->batch * problem->heads) * (double)problem->q_len * (double)problem->kv_len;
    const int threads =
        ba_threads_of_call(num_threads, pairs * (double)(2 * (problem->head_dim + problem->v_dim)), tuning->inline_flops, ba_max(masks, slopes));
    char *memory;
    BA_TRY(ba_get_scratch(lay_out_call(&c, threads, NULL), &memory));
    lay_out_call(&c, threads, memory);
    ba_status status = ba_parallel(threads, masks, mask_item, &c);
    if (status == BA_OK) status = ba_parallel(threads, slopes, slope_item, &c);
    if (status == BA_OK && gradients->alibi_slopes) write_slopes(&c);
    ba_arena_release();
    return status;
}
