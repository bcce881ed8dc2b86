/* The forward driver for lists that route single queries, where the family has attend_rows. Each query has a list of its own, so
 * that queries side by side have little in common; but the queries of a longer stretch meet at blocks. So an item is a stretch of
 * rows of one (batch, KV head), whose states all stay in cache: its lists are turned around, and block by block, in rising order,
 * the block is packed and the queries that list it meet it in panels. What a query computes depends on its own list alone. */
#include "ops/attend_by_block.h"

#include <string.h>

#include "core/arena.h"
#include "core/status.h"
#include "ops/plan.h"
#include "ops/scratch.h"

#define LOG2_E 0x1.71547652b82fep+0

typedef struct call {
    const ba_problem *problem;
    const ba_attend_family *family;
    ba_plan plan;
    int64_t row_lanes; /* (query, head) pairs of a row of lists at most */
    int64_t chunk_keys;
    int64_t scratch_bytes;
    char *scratch;
} call;

typedef struct block_scratch {
    char *o, *m, *l;  /* states of all lanes of an item: those of row t from t * row_lanes on */
    int32_t *lo, *hi; /* keys that they see; lanes that are not there see none */
    const void **q;   /* their queries */
    int32_t *begin;   /* [columns + 1]: where the rows that list a column begin in `rows` */
    int32_t *rows;    /* rows of the item, by column */
    char *packed_k, *packed_v;
    const void **k_rows, **v_rows, **packed_k_rows, **packed_v_rows;
    int32_t *key_index;
    char *lse;
    void **out;
} block_scratch;

/* A chunk and the lanes that are still to meet it. */
typedef struct meeting {
    ba_chunk chunk;
    bool packed;
    int64_t lanes, lane[BA_ROW_QUERIES];
    const void *q[BA_ROW_QUERIES];
    void *o[BA_ROW_QUERIES];
    double m[BA_ROW_QUERIES], l[BA_ROW_QUERIES]; /* room for any real */
    int32_t lo[BA_ROW_QUERIES], hi[BA_ROW_QUERIES];
    bool bounded;
} meeting;

static int64_t lay_out(const call *c, char *base, block_scratch *s) {
    const ba_problem *p = c->problem;
    const ba_attend_family *f = c->family;
    const int64_t lanes = c->plan.group_tiles * c->row_lanes, keys = c->chunk_keys, packed = ba_round_up(keys, f->key_pad);
    int64_t used = 0;
    s->o = ba_take(base, &used, lanes * BA_FEW_PAD(p->v_dim) * f->real_size);
    s->m = ba_take(base, &used, lanes * f->real_size);
    s->l = ba_take(base, &used, lanes * f->real_size);
    s->lo = (int32_t *)ba_take(base, &used, lanes * (int64_t)sizeof(int32_t));
    s->hi = (int32_t *)ba_take(base, &used, lanes * (int64_t)sizeof(int32_t));
    s->q = (const void **)ba_take(base, &used, lanes * (int64_t)sizeof(void *));
    s->begin = (int32_t *)ba_take(base, &used, (p->block_columns + 1) * (int64_t)sizeof(int32_t));
    s->rows = (int32_t *)ba_take(base, &used, c->plan.group_tiles * p->blocks.dims[3] * (int64_t)sizeof(int32_t));
    s->packed_k = ba_take(base, &used, packed * ba_round_up(p->head_dim, f->dim_pad) * f->pack_bytes);
    s->packed_v = ba_take(base, &used, packed * ba_round_up(p->v_dim, f->dim_pad) * f->pack_bytes);
    s->k_rows = (const void **)ba_take(base, &used, keys * (int64_t)sizeof(void *));
    s->v_rows = (const void **)ba_take(base, &used, keys * (int64_t)sizeof(void *));
    s->packed_k_rows = (const void **)ba_take(base, &used, keys * (int64_t)sizeof(void *));
    s->packed_v_rows = (const void **)ba_take(base, &used, keys * (int64_t)sizeof(void *));
    s->key_index = (int32_t *)ba_take(base, &used, keys * (int64_t)sizeof(int32_t));
    s->lse = ba_take(base, &used, c->row_lanes * f->real_size);
    s->out = (void **)ba_take(base, &used, c->row_lanes * (int64_t)sizeof(void *));
    return used;
}

/* ---- Rows -------------------------------------------------------------------------------------------------------------- */

static ba_tile row_at(const call *c, const ba_item *item, int64_t row) {
    return ba_plan_tile(&c->plan, item->batch, item->kv_head, item->first_tile + row);
}

static void open_rows(const call *c, const block_scratch *s, const ba_item *item) {
    const ba_problem *p = c->problem;
    const ba_span q = ba_q_span(p, item->batch), kv = ba_kv_span(p, item->batch);
    const int64_t real = c->family->real_size, lanes = item->tiles * c->row_lanes;
    memset(s->o, 0, (size_t)(lanes * BA_FEW_PAD(p->v_dim) * real));
    memset(s->l, 0, (size_t)(lanes * real));
    for (int64_t row = 0; row < item->tiles; row++) {
        const ba_tile tile = row_at(c, item, row);
        for (int64_t i = 0; i < c->row_lanes; i++) {
            const int64_t lane = row * c->row_lanes + i, query = ba_lane_query(&tile, i);
            s->lo[lane] = s->hi[lane] = 0;
            if (i >= tile.lanes) continue;
            const ba_range seen = ba_visible_keys(p, query, q.valid, kv.valid);
            s->lo[lane] = (int32_t)seen.lo;
            s->hi[lane] = (int32_t)seen.hi;
            s->q[lane] = ba_query_row(p, &p->q, p->element_size, item->batch, ba_lane_head(&tile, i), query);
            ba_set_real(s->m, lane, real == 4 ? -0x1.fffffep127 : -0x1.fffffffffffffp1023, real);
        }
    }
}

/* Turns the rows' lists around. */
static void turn_lists(const call *c, const block_scratch *s, const ba_item *item, int64_t columns) {
    const ba_problem *p = c->problem;
    const int64_t *steps = p->blocks.strides;
    memset(s->begin, 0, (size_t)(columns + 1) * sizeof *s->begin);
    for (int pass = 0; pass < 2; pass++) {
        for (int64_t row = item->tiles - 1; row >= 0; row--) {
            const ba_tile tile = row_at(c, item, row);
            const int64_t at = ba_list_batch(p, item->batch) * steps[0] + ba_list_head(p, tile.head) * steps[1] +
                               ba_list_row(p, item->batch, tile.block_row) * steps[2];
            for (int64_t i = 0, column; i < p->blocks.dims[3] && (column = ba_list_entry(&p->blocks, at + i * steps[3])) >= 0; i++) {
                if (pass == 0) s->begin[column]++;
                else s->rows[--s->begin[column]] = (int32_t)row;
            }
        }
        if (pass == 0) /* where each column's rows end: the second pass fills them from there */
            for (int64_t column = 1; column <= columns; column++) s->begin[column] += s->begin[column - 1];
    }
}

static void finish_rows(const call *c, const block_scratch *s, const ba_item *item) {
    const ba_problem *p = c->problem;
    const int64_t real = c->family->real_size;
    for (int64_t row = 0; row < item->tiles; row++) {
        const ba_tile tile = row_at(c, item, row);
        const int64_t lane = row * c->row_lanes;
        const ba_panel panel = {.o = s->o + lane * BA_FEW_PAD(p->v_dim) * real, .m = s->m + lane * real, .l = s->l + lane * real};
        for (int64_t i = 0; i < tile.lanes; i++)
            s->out[i] = ba_query_row(p, &p->out, p->element_size, item->batch, ba_lane_head(&tile, i), ba_lane_query(&tile, i));
        c->family->finish_few(&panel, tile.lanes, p->v_dim, s->out, p->lse.data ? s->lse : NULL);
        for (int64_t i = 0; p->lse.data && i < tile.lanes; i++)
            memcpy(ba_query_row(p, &p->lse, real, item->batch, ba_lane_head(&tile, i), ba_lane_query(&tile, i)), s->lse + i * real, (size_t)real);
    }
}

/* ---- Blocks ------------------------------------------------------------------------------------------------------------- */

/* The keys [begin, end) of the item's KV head. */
static void open_meeting(const call *c, const block_scratch *s, const ba_item *item, int64_t begin, int64_t end, meeting *at) {
    const ba_problem *p = c->problem;
    const char *k = ba_key_row(p, &p->k, p->kv_element_size, item->batch, item->kv_head, 0);
    const char *v = ba_key_row(p, &p->v, p->kv_element_size, item->batch, item->kv_head, 0);
    for (int64_t j = 0; j < end - begin; j++) {
        s->k_rows[j] = k + (begin + j) * p->k.token_stride * p->kv_element_size;
        s->v_rows[j] = v + (begin + j) * p->v.token_stride * p->kv_element_size;
        s->key_index[j] = (int32_t)(begin + j);
    }
    at->chunk = (ba_chunk){.keys = end - begin,
                           .head_dim = p->head_dim,
                           .v_dim = p->v_dim,
                           .k_rows = s->packed_k_rows,
                           .v_rows = s->packed_v_rows,
                           .key_index = s->key_index,
                           .scale = p->scale * LOG2_E,
                           .softcap = p->softcap * LOG2_E};
    at->packed = at->bounded = false;
    at->lanes = 0;
}

static void meet(const call *c, const block_scratch *s, meeting *at) {
    const ba_problem *p = c->problem;
    const int64_t real = c->family->real_size;
    if (at->lanes == 0) return;
    if (!at->packed) {
        c->family->pack_row_keys(s->packed_k, s->packed_k_rows, s->k_rows, NULL, at->chunk.keys, p->head_dim);
        c->family->pack_row_values(s->packed_v, s->packed_v_rows, s->v_rows, NULL, at->chunk.keys, p->v_dim);
        at->packed = true;
    }
    for (int64_t i = 0; i < at->lanes; i++) {
        const int64_t lane = at->lane[i];
        at->q[i] = s->q[lane];
        at->o[i] = s->o + lane * BA_FEW_PAD(p->v_dim) * real;
        at->lo[i] = s->lo[lane];
        at->hi[i] = s->hi[lane];
        memcpy((char *)at->m + i * real, s->m + lane * real, (size_t)real);
        memcpy((char *)at->l + i * real, s->l + lane * real, (size_t)real);
    }
    const ba_panel panel = {.q = at->q, .o = at->o, .m = at->m, .l = at->l, .lo = at->bounded ? at->lo : NULL, .hi = at->bounded ? at->hi : NULL};
    c->family->attend_rows(&panel, at->lanes, &at->chunk);
    for (int64_t i = 0; i < at->lanes; i++) {
        memcpy(s->m + at->lane[i] * real, (char *)at->m + i * real, (size_t)real);
        memcpy(s->l + at->lane[i] * real, (char *)at->l + i * real, (size_t)real);
    }
    at->lanes = 0;
    at->bounded = false;
}

static void run_item(void *context, int64_t index, int worker) {
    const call *c = context;
    const ba_problem *p = c->problem;
    const ba_item *item = &c->plan.item[index];
    const int64_t columns = ba_list_columns(p, item->batch), keys = ba_kv_span(p, item->batch).valid;
    block_scratch s;
    lay_out(c, c->scratch + worker * c->scratch_bytes, &s);
    open_rows(c, &s, item);
    turn_lists(c, &s, item, columns);
    for (int64_t column = 0; column < columns; column++) {
        if (s.begin[column] == s.begin[column + 1]) continue;
        const int64_t end = ba_min(keys, (column + 1) * p->block_kv);
        for (int64_t begin = column * p->block_kv; begin < end; begin += c->chunk_keys) {
            const int64_t stop = ba_min(end, begin + c->chunk_keys);
            meeting at;
            open_meeting(c, &s, item, begin, stop, &at);
            for (int64_t n = s.begin[column]; n < s.begin[column + 1]; n++)
                for (int64_t i = 0; i < c->row_lanes; i++) {
                    const int64_t lane = s.rows[n] * c->row_lanes + i;
                    if (s.lo[lane] >= stop || s.hi[lane] <= begin) continue;
                    at.bounded |= s.lo[lane] > begin || s.hi[lane] < stop;
                    at.lane[at.lanes++] = lane;
                    if (at.lanes == BA_ROW_QUERIES) meet(c, &s, &at);
                }
            meet(c, &s, &at);
        }
    }
    finish_rows(c, &s, item);
}

/* ---- The call ------------------------------------------------------------------------------------------------------------ */

bool ba_attends_by_block(const ba_problem *problem, const ba_attend_family *family) {
    return family->attend_rows && problem->kv_dtype == problem->dtype && !problem->page_size && !problem->sinks && ba_plan_few_rows(problem);
}

ba_status ba_attend_by_block(const ba_problem *problem, const ba_attend_family *family, int threads) {
    const ba_tuning *tuning = ba_tuning_at(family->isa);
    call c = {.problem = problem, .family = family, .chunk_keys = BA_ROW_KEYS};
    ba_plan_lay_out_rows(&c.plan, problem, tuning, threads);
    c.row_lanes = ba_min(problem->block_q, problem->q_len) * c.plan.shared_heads;
    threads = (int)ba_min(threads, ba_max(1, c.plan.items));
    block_scratch unused;
    c.scratch_bytes = lay_out(&c, NULL, &unused);
    int64_t used = 0;
    ba_take(NULL, &used, ba_plan_bytes(&c.plan, threads));
    ba_take(NULL, &used, threads * c.scratch_bytes);
    char *memory = ba_arena_get((size_t)used);
    if (!memory) return ba_fail(BA_ERROR_MEMORY, "scratch: expected %lld bytes, the system has none", (long long)used);
    used = 0;
    char *plan_memory = ba_take(memory, &used, ba_plan_bytes(&c.plan, threads));
    c.scratch = ba_take(memory, &used, threads * c.scratch_bytes);
    const ba_status status = ba_plan_make(&c.plan, threads, plan_memory);
    if (status == BA_OK) {
        const double flops = c.plan.cost * 2 * (double)(problem->head_dim + problem->v_dim);
        ba_parallel(flops < tuning->inline_flops ? 1 : threads, c.plan.items, run_item, &c);
    }
    ba_arena_release();
    return status;
}
