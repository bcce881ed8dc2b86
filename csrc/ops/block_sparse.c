/* Block-sparse attention, forward. The driver: loops, plan and scratch; it knows neither an ISA nor an element type.
 *
 * The keys of a list stand one after the other and are cut into chunks of chunk_keys by their place in that row, not by
 * block or by what a tile sees of them. A query's result then depends on nothing but its own list, so that all blocks
 * listed equals no list, and neither threads nor batch mates nor tile shapes change a bit. */
#include <stdlib.h>
#include <string.h>

#include "core/arena.h"
#include "core/status.h"
#include "ops/plan.h"

/* ---- Scratch ------------------------------------------------------------------------------------------------------ */

enum { MAX_GROUP_TILES = 16, MAX_PANELS = 32 };

typedef struct panel_state {
    ba_panel panel;    /* lo and hi set here, shown to a kernel only where a chunk needs them */
    int width;         /* 0 wide, 1 narrow */
    int64_t lanes;     /* in use */
    ba_range any, all; /* keys that some lane sees; keys that every lane sees */
} panel_state;

typedef struct tile_state {
    ba_tile tile;
    int list;       /* index of its walk */
    ba_range range; /* keys that some query sees */
    int panels;
    panel_state panel[MAX_PANELS];
} tile_state;

/* One list being walked, for all tiles of the item whose lists are equal. */
typedef struct walk {
    const uint64_t *bitmap; /* NULL: all keys */
    ba_range range;         /* what its tiles see of it */
    int64_t column, key, end, position;
} walk;

typedef struct worker_scratch {
    char *q, *o, *ml; /* tiles one after the other */
    int32_t *bounds;
    uint64_t *bitmaps;
    char *packed_k, *packed_v, *scores, *lse;
    const void **k_rows, **v_rows, **packed_k_rows, **packed_v_rows, **rows;
    int32_t *key_index;
    tile_state *tiles;
} worker_scratch;

typedef struct call {
    const ba_problem *problem;
    const ba_attend_family *family;
    const ba_tuning *tuning;
    ba_plan plan;
    char *scratch;
    int64_t scratch_bytes; /* a worker */
} call;

/* Hands out parts of a worker's scratch; with base NULL it only adds up. */
static char *take(char *base, int64_t *used, int64_t bytes) {
    char *part = base ? base + *used : NULL;
    *used += ba_round_up(bytes, BA_ALIGN);
    return part;
}

static int64_t lay_out_scratch(const call *c, char *base, worker_scratch *w) {
    const ba_attend_family *f = c->family;
    const ba_problem *p = c->problem;
    /* lanes are padded to whole panels, of which the last may be wide */
    const int64_t tiles = c->plan.group_tiles, lanes = tiles * ba_round_up(c->plan.tile_queries, f->lanes[0]), keys = c->tuning->chunk_keys;
    const int64_t pad_k = ba_round_up(p->head_dim, BA_PACK_PAD), pad_v = ba_round_up(p->v_dim, BA_PACK_PAD);
    int64_t used = 0;
    w->q = take(base, &used, lanes * p->head_dim * f->q_bytes);
    w->o = take(base, &used, lanes * p->v_dim * f->real_size);
    w->ml = take(base, &used, lanes * 2 * f->real_size);
    w->bounds = (int32_t *)take(base, &used, lanes * 2 * (int64_t)sizeof(int32_t));
    w->bitmaps = (uint64_t *)take(base, &used, tiles * c->plan.bitmap_words * (int64_t)sizeof(uint64_t));
    w->packed_k = take(base, &used, f->pack_k ? keys * pad_k * f->pack_bytes : 0);
    w->packed_v = take(base, &used, f->pack_v ? keys * pad_v * f->pack_bytes : 0);
    w->scores = take(base, &used, keys * f->scratch_per_key);
    w->lse = take(base, &used, BA_MAX_LANES * f->real_size);
    w->k_rows = (const void **)take(base, &used, keys * (int64_t)sizeof(void *));
    w->v_rows = (const void **)take(base, &used, keys * (int64_t)sizeof(void *));
    w->packed_k_rows = (const void **)take(base, &used, keys * (int64_t)sizeof(void *));
    w->packed_v_rows = (const void **)take(base, &used, keys * (int64_t)sizeof(void *));
    w->rows = (const void **)take(base, &used, BA_MAX_LANES * (int64_t)sizeof(void *));
    w->key_index = (int32_t *)take(base, &used, keys * (int64_t)sizeof(int32_t));
    w->tiles = (tile_state *)take(base, &used, tiles * (int64_t)sizeof(tile_state));
    return used;
}

/* ---- A tile's queries --------------------------------------------------------------------------------------------- */

static int64_t lane_query(const ba_tile *tile, int64_t lane) { return tile->first_query + (tile->first_lane + lane) / tile->heads; }
static int64_t lane_head(const ba_tile *tile, int64_t lane) { return tile->head + (tile->first_lane + lane) % tile->heads; }

static char *row_of(const ba_view *view, int64_t element_size, int64_t batch, int64_t head, int64_t token) {
    return view->data + (batch * view->batch_stride + head * view->head_stride + token * view->token_stride) * element_size;
}

/* Batch entries of BA_TND lie on the token axis, at their span's begin; those of the others on an axis of their own. */
static int64_t batch_axis(const ba_problem *p, int64_t batch) { return p->cu_q ? 0 : batch; }

static void fill_real(char *data, int64_t n, double value, int64_t real_size) {
    for (int64_t i = 0; i < n; i++) {
        if (real_size == 4) ((float *)data)[i] = (float)value;
        else ((double *)data)[i] = value;
    }
}

/* Packs queries from `lane` on into one panel and sets its state and ranges. */
static void open_panel(const call *c, const worker_scratch *w, const ba_item *item, tile_state *t, panel_state *s, int64_t lane) {
    const ba_problem *p = c->problem;
    const ba_attend_family *f = c->family;
    const ba_span q = ba_q_span(p, item->batch), kv = ba_kv_span(p, item->batch);
    const int64_t width = f->lanes[s->width];
    int32_t *lo = (int32_t *)s->panel.lo, *hi = (int32_t *)s->panel.hi;
    s->any = (ba_range){INT64_MAX, 0};
    s->all = (ba_range){0, INT64_MAX};
    for (int64_t i = 0; i < width; i++) {
        if (i >= s->lanes) { /* no query: sees everything, so that it asks for no mask */
            lo[i] = 0;
            hi[i] = INT32_MAX;
            continue;
        }
        const int64_t query = lane_query(&t->tile, lane + i);
        const ba_range seen = ba_visible_keys(p, query, q.valid, kv.valid);
        lo[i] = (int32_t)seen.lo;
        hi[i] = (int32_t)seen.hi;
        s->all.lo = ba_max(s->all.lo, seen.lo);
        s->all.hi = ba_min(s->all.hi, seen.hi);
        if (seen.lo < seen.hi) {
            s->any.lo = ba_min(s->any.lo, seen.lo);
            s->any.hi = ba_max(s->any.hi, seen.hi);
        }
        w->rows[i] = row_of(&p->q, p->element_size, batch_axis(p, item->batch), lane_head(&t->tile, lane + i), q.begin + query);
    }
    f->pack_queries[s->width](s->panel.q, w->rows, s->lanes, p->head_dim, p->scale * 0x1.71547652b82fep+0 /* log2(e) */);
    memset(s->panel.o, 0, (size_t)(width * p->v_dim * f->real_size));
    memset(s->panel.l, 0, (size_t)(width * f->real_size));
    fill_real(s->panel.m, width, f->real_size == 4 ? -0x1.fffffep127 : -0x1.fffffffffffffp1023, f->real_size);
    t->range.lo = ba_min(t->range.lo, s->any.lo);
    t->range.hi = ba_max(t->range.hi, s->any.hi);
}

static void open_tile(const call *c, const worker_scratch *w, const ba_item *item, int64_t index, tile_state *t) {
    const ba_problem *p = c->problem;
    const ba_attend_family *f = c->family;
    const int64_t slot = index - item->first_tile, first = slot * ba_round_up(c->plan.tile_queries, f->lanes[0]);
    t->tile = ba_plan_tile(&c->plan, item->batch, item->kv_head, index);
    t->range = (ba_range){INT64_MAX, 0};
    t->panels = 0;
    for (int64_t lane = 0; lane < t->tile.lanes;) {
        panel_state *s = &t->panel[t->panels++];
        const int64_t left = t->tile.lanes - lane, at = first + lane;
        s->width = left <= f->lanes[1];
        s->lanes = ba_min(left, f->lanes[s->width]);
        const int64_t width = f->lanes[s->width];
        s->panel.q = w->q + at * p->head_dim * f->q_bytes;
        s->panel.o = w->o + at * p->v_dim * f->real_size;
        s->panel.m = w->ml + at * 2 * f->real_size;
        s->panel.l = w->ml + (at * 2 + width) * f->real_size;
        s->panel.lo = w->bounds + at * 2;
        s->panel.hi = w->bounds + at * 2 + width;
        open_panel(c, w, item, t, s, lane);
        lane += width;
    }
}

static void close_tile(const call *c, const worker_scratch *w, const ba_item *item, const tile_state *t) {
    const ba_problem *p = c->problem;
    const ba_attend_family *f = c->family;
    const int64_t begin = ba_q_span(p, item->batch).begin, batch = batch_axis(p, item->batch);
    int64_t lane = 0;
    for (int n = 0; n < t->panels; n++) {
        const panel_state *s = &t->panel[n];
        for (int64_t i = 0; i < s->lanes; i++)
            w->rows[i] = row_of(&p->out, p->element_size, batch, lane_head(&t->tile, lane + i), begin + lane_query(&t->tile, lane + i));
        f->finish[s->width](&s->panel, s->lanes, p->v_dim, (void *const *)w->rows, w->lse);
        for (int64_t i = 0; p->lse.data && i < s->lanes; i++)
            memcpy(row_of(&p->lse, f->real_size, batch, lane_head(&t->tile, lane + i), begin + lane_query(&t->tile, lane + i)),
                   w->lse + i * f->real_size, (size_t)f->real_size);
        lane += f->lanes[s->width];
    }
}

/* ---- Walking a list ----------------------------------------------------------------------------------------------- */

/* Goes to the next listed column. False at the end of the list. */
static bool next_column(walk *l, const ba_problem *p, int64_t words, int64_t kv_valid) {
    int64_t column = l->column + 1;
    if (!l->bitmap) { /* all keys: one column */
        l->key = 0;
        l->end = kv_valid;
    } else {
        int64_t word = column / 64;
        uint64_t bits = word < words ? l->bitmap[word] >> (column % 64) << (column % 64) : 0;
        while (!bits && ++word < words) bits = l->bitmap[word];
        column = bits ? word * 64 + __builtin_ctzll(bits) : words * 64;
        l->key = column * p->block_kv;
        l->end = ba_min(l->key + p->block_kv, kv_valid);
    }
    l->column = column;
    return l->bitmap ? l->key < kv_valid && column < words * 64 : column == 0 && l->end > 0;
}

/* The next key is INT64_MAX once there is none that a tile sees. Keys before the range are passed over but keep their places. */
static void skip_unseen(walk *l, const ba_problem *p, int64_t words, int64_t kv_valid) {
    while (l->key != INT64_MAX) {
        if (l->key < l->end) {
            const int64_t skipped = ba_max(0, ba_min(l->range.lo, l->end) - l->key);
            l->key += skipped;
            l->position += skipped;
        }
        if (l->key >= l->range.hi) l->key = INT64_MAX;
        else if (l->key < l->end) return;
        else if (!next_column(l, p, words, kv_valid)) l->key = INT64_MAX;
    }
}

/* Takes the keys up to the next chunk boundary. */
static int64_t take_chunk(walk *l, const ba_problem *p, int64_t words, int64_t kv_valid, int64_t chunk_keys, int32_t *key_index) {
    const int64_t room = chunk_keys - l->position % chunk_keys;
    int64_t n = 0;
    while (n < room && l->key != INT64_MAX) {
        const int64_t some = ba_min(room - n, l->end - l->key);
        for (int64_t i = 0; i < some; i++) key_index[n + i] = (int32_t)(l->key + i);
        n += some;
        l->key += some;
        l->position += some;
        skip_unseen(l, p, words, kv_valid);
    }
    return n;
}

static int64_t first_at_least(const int32_t *sorted, int64_t n, int64_t value) {
    int64_t low = 0;
    while (low < n) {
        const int64_t middle = (low + n) / 2;
        if (sorted[middle] < value) low = middle + 1;
        else n = middle;
    }
    return low;
}

/* ---- An item ------------------------------------------------------------------------------------------------------ */

static void attend_tile(const call *c, const tile_state *t, const ba_chunk *whole) {
    const ba_attend_family *f = c->family;
    for (int n = 0; n < t->panels; n++) {
        const panel_state *s = &t->panel[n];
        int64_t begin = first_at_least(whole->key_index, whole->keys, s->any.lo), end = first_at_least(whole->key_index, whole->keys, s->any.hi);
        if (begin >= end) continue;
        begin -= begin % f->key_step;
        end = ba_min(ba_round_up(end, f->key_step), whole->keys);
        ba_chunk chunk = *whole;
        chunk.keys = end - begin;
        chunk.k_rows += begin;
        chunk.v_rows += begin;
        chunk.key_index += begin;
        ba_panel panel = s->panel;
        if (chunk.key_index[0] >= s->all.lo && chunk.key_index[chunk.keys - 1] < s->all.hi) panel.lo = panel.hi = NULL;
        f->attend[s->width](&panel, &chunk);
    }
}

/* Tiles whose lists are equal share one walk. Returns the number of walks. */
static int make_walks(const call *c, const worker_scratch *w, const ba_item *item, walk *walks) {
    const int64_t words = c->plan.bitmap_words;
    int n = 0;
    for (int64_t i = 0; i < item->tiles; i++) {
        tile_state *t = &w->tiles[i];
        uint64_t *bitmap = w->bitmaps + n * words;
        int64_t at;
        t->list = n;
        if (c->problem->listed) {
            const tile_state *before = i ? &w->tiles[i - 1] : NULL;
            if (before && before->tile.block_row == t->tile.block_row && before->tile.head == t->tile.head) {
                t->list = before->list;
            } else {
                ba_list_to_bitmap(c->problem, item->batch, t->tile.head, t->tile.block_row, bitmap, words, &at);
                for (int k = 0; k < n; k++)
                    if (memcmp(w->bitmaps + k * words, bitmap, (size_t)words * sizeof *bitmap) == 0) t->list = k;
            }
        } else if (n) {
            t->list = 0;
        }
        if (t->list == n) walks[n++] = (walk){.bitmap = c->problem->listed ? bitmap : NULL, .range = {INT64_MAX, 0}, .column = -1};
        walk *l = &walks[t->list];
        l->range.lo = ba_min(l->range.lo, t->range.lo);
        l->range.hi = ba_max(l->range.hi, t->range.hi);
    }
    return n;
}

static void run_item(void *context, int64_t index, int worker) {
    const call *c = context;
    const ba_problem *p = c->problem;
    const ba_attend_family *f = c->family;
    const ba_item *item = &c->plan.item[index];
    const ba_span kv = ba_kv_span(p, item->batch);
    const int64_t words = c->plan.bitmap_words;
    worker_scratch w;
    lay_out_scratch(c, c->scratch + worker * c->scratch_bytes, &w);

    walk walks[MAX_GROUP_TILES];
    for (int64_t i = 0; i < item->tiles; i++) open_tile(c, &w, item, item->first_tile + i, &w.tiles[i]);
    const int lists = make_walks(c, &w, item, walks);
    for (int n = 0; n < lists; n++) skip_unseen(&walks[n], p, words, kv.valid);

    const char *k = row_of(&p->k, p->element_size, batch_axis(p, item->batch), item->kv_head, kv.begin);
    const char *v = row_of(&p->v, p->element_size, batch_axis(p, item->batch), item->kv_head, kv.begin);
    const int64_t k_step = p->k.token_stride * p->element_size, v_step = p->v.token_stride * p->element_size;
    for (;;) {
        int next = 0; /* the list that is furthest behind: so lists that overlap meet in cache */
        for (int n = 1; n < lists; n++)
            if (walks[n].key < walks[next].key) next = n;
        if (walks[next].key == INT64_MAX) break;
        const int64_t keys = take_chunk(&walks[next], p, words, kv.valid, c->tuning->chunk_keys, w.key_index);
        for (int64_t j = 0; j < keys; j++) {
            w.k_rows[j] = k + w.key_index[j] * k_step;
            w.v_rows[j] = v + w.key_index[j] * v_step;
        }
        if (f->pack_k) f->pack_k(w.packed_k, w.packed_k_rows, w.k_rows, keys, p->head_dim);
        if (f->pack_v) f->pack_v(w.packed_v, w.packed_v_rows, w.v_rows, keys, p->v_dim);
        const ba_chunk chunk = {.keys = keys, .head_dim = p->head_dim, .v_dim = p->v_dim, .key_index = w.key_index, .scratch = w.scores,
                                .k_rows = f->pack_k ? w.packed_k_rows : w.k_rows, .v_rows = f->pack_v ? w.packed_v_rows : w.v_rows};
        for (int64_t i = 0; i < item->tiles; i++)
            if (w.tiles[i].list == next) attend_tile(c, &w.tiles[i], &chunk);
    }
    for (int64_t i = 0; i < item->tiles; i++) close_tile(c, &w, item, &w.tiles[i]);
}

/* ---- The call ----------------------------------------------------------------------------------------------------- */

ba_status ba_block_sparse_attention(const ba_block_sparse_args *args) {
    ba_problem problem;
    BA_TRY(ba_check_block_sparse(args, true, &problem));
    const ba_isa level = ba_isa_active();
    call c = {.problem = &problem, .family = ba_kernels_at(level)->attend[problem.dtype], .tuning = ba_tuning_at(level)};
    int threads = ba_threads_for(args->num_threads);

    const int64_t plan_bytes = ba_round_up(ba_plan_bytes(&problem, c.tuning, threads), BA_ALIGN);
    c.plan.group_tiles = c.tuning->group_tiles;
    c.plan.tile_queries = c.tuning->tile_queries;
    c.plan.bitmap_words = problem.listed ? ba_ceil_div(problem.block_columns, 64) : 0;
    worker_scratch unused;
    c.scratch_bytes = lay_out_scratch(&c, NULL, &unused);
    char *memory = ba_arena_get((size_t)(plan_bytes + threads * c.scratch_bytes));
    if (!memory) return ba_fail(BA_ERROR_MEMORY, "scratch: expected %lld bytes, the system has none", (long long)(plan_bytes + threads * c.scratch_bytes));
    const ba_status status = ba_plan_make(&c.plan, &problem, c.tuning, threads, memory);
    if (status == BA_OK) {
        c.scratch = memory + plan_bytes;
        const double flops = c.plan.cost * 2 * (double)(problem.head_dim + problem.v_dim);
        if (flops < c.tuning->inline_flops) threads = 1;
        ba_parallel(threads, c.plan.items, run_item, &c);
    }
    ba_arena_release();
    return status;
}
