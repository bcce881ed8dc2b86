/* The forward driver for lists that route single queries, for families that have routed kernels. Each query has a list of its own, so neighbouring
 * queries share few blocks; but among the queries of a longer run, most blocks are listed by several queries. An item is therefore a run of list rows
 * of one (batch, KV head), short enough that all its queries and their states stay in cache. Its lists are inverted. Then each block, in rising
 * order, is packed, and the queries that list it attend it. The result of a query depends on its own list alone. */
#include "ops/attend/attend_by_block.h"

#include <string.h>

#include "core/arena.h"
#include "core/status.h"
#include "kernels/work_tuning.h"
#include "ops/plan/plan.h"
#include "ops/reals.h"
#include "ops/scratch.h"

typedef struct call {
    const ba_problem *problem;
    const ba_attend_family *family;
    ba_plan plan;
    int64_t list_row_lanes;            /* the largest number of queries of a list row */
    int64_t chunk_keys, column_chunks; /* keys per chunk; the largest number of chunks in a block column */
    int64_t packed_k, packed_v;        /* bytes per packed chunk */
    char *shared;                      /* [batch][KV head][column][chunk]: K and V, packed once for all items. NULL: each item packs its chunks */
    int64_t shared_bytes, scratch_bytes;
    char *scratch;
} call;

typedef struct block_scratch {
    char *o, *m, *l;    /* the states of all lanes of an item. The lanes of list row t begin at t * list_row_lanes */
    int32_t *lo, *hi;   /* [lane]: the keys [lo, hi) that a lane sees; a lane without a query sees none */
    char *q;            /* the packed queries of all lanes. In the caller's array, the queries of a head may compete for few lines of the cache */
    int32_t *begin;     /* [columns + 1]: list_rows[begin[c] .. begin[c + 1] - 1] list column c */
    int32_t *list_rows; /* list rows of the item, ordered by column */
    int32_t *attended;  /* [list row]: chunks of its list so far, counted up to ba_work.by_block_young, also those of which it sees no key */
    int32_t *chosen;    /* lanes that attend the current chunk. From the front: lanes that see all its keys. From the back: lanes that see some */
    char *packed_k, *packed_v;
    const void **k_rows, **v_rows, **packed_k_rows, **packed_v_rows;
    int32_t *key_index;
    char *lse;
    void **out;
} block_scratch;

/* Bytes per element of packed rows. */
static int64_t row_element(const call *c) { return c->family->routed->pack_queries ? c->family->real_size : c->problem->element_size; }
/* Bytes per packed query, and per packed key. */
static int64_t q_bytes(const call *c) { return ba_round_up(c->problem->head_dim, c->family->dim_pad) * row_element(c); }

/* Lays out the scratch memory of one worker. */
static int64_t lay_out_by_block(const call *c, char *base, block_scratch *s) {
    const ba_problem *p = c->problem;
    const ba_attend_family *f = c->family;
    const int64_t lanes = c->plan.grouping.tiles * c->list_row_lanes, keys = c->chunk_keys;
    int64_t used = 0;
    s->o = ba_take(base, &used, lanes * BA_FEW_PAD(p->v_dim) * f->real_size);
    s->m = ba_take(base, &used, lanes * f->real_size);
    s->l = ba_take(base, &used, lanes * f->real_size);
    s->lo = ba_take(base, &used, lanes * (int64_t)sizeof(int32_t));
    s->hi = ba_take(base, &used, lanes * (int64_t)sizeof(int32_t));
    s->q = ba_take(base, &used, lanes * q_bytes(c));
    s->begin = ba_take(base, &used, (p->block_columns + 1) * (int64_t)sizeof(int32_t));
    s->list_rows = ba_take(base, &used, c->plan.grouping.tiles * p->blocks.dims[3] * (int64_t)sizeof(int32_t));
    s->attended = ba_take(base, &used, c->plan.grouping.tiles * (int64_t)sizeof(int32_t));
    s->chosen = ba_take(base, &used, lanes * (int64_t)sizeof(int32_t));
    s->packed_k = ba_take(base, &used, c->packed_k);
    s->packed_v = ba_take(base, &used, c->packed_v);
    s->k_rows = ba_take(base, &used, keys * (int64_t)sizeof(void *));
    s->v_rows = ba_take(base, &used, keys * (int64_t)sizeof(void *));
    s->packed_k_rows = ba_take(base, &used, keys * (int64_t)sizeof(void *));
    s->packed_v_rows = ba_take(base, &used, keys * (int64_t)sizeof(void *));
    s->key_index = ba_take(base, &used, keys * (int64_t)sizeof(int32_t));
    s->lse = ba_take(base, &used, c->list_row_lanes * f->real_size);
    s->out = ba_take(base, &used, c->list_row_lanes * (int64_t)sizeof(void *));
    return used;
}

/* ---- List rows --------------------------------------------------------------------------------------------------------- */

static ba_tile list_row_at(const call *c, const ba_item *item, int64_t row) {
    return ba_plan_tile(&c->plan, item->batch, item->kv_head, item->first_tile + row);
}

/* Packs the queries of all lanes of an item, sets the keys that each lane sees, and empties the states. */
static void open_list_rows(const call *c, const block_scratch *s, const ba_item *item) {
    const ba_problem *p = c->problem;
    const int64_t real = c->family->real_size, lanes = item->tiles * c->list_row_lanes, bytes = p->head_dim * p->element_size;
    memset(s->o, 0, (size_t)(lanes * BA_FEW_PAD(p->v_dim) * real));
    memset(s->l, 0, (size_t)(lanes * real));
    memset(s->attended, 0, (size_t)item->tiles * sizeof *s->attended);
    for (int64_t row = 0; row < item->tiles; row++) {
        const ba_tile tile = list_row_at(c, item, row);
        for (int64_t i = 0; i < c->list_row_lanes; i++) {
            const int64_t lane = row * c->list_row_lanes + i, query = ba_lane_query(&tile, i);
            s->lo[lane] = s->hi[lane] = 0;
            if (i >= tile.lanes) continue;
            const ba_range seen = ba_visible_keys(p, item->batch, query);
            s->lo[lane] = (int32_t)seen.lo;
            s->hi[lane] = (int32_t)seen.hi;
            char *to = s->q + lane * q_bytes(c);
            const void *from = ba_query_row(p, &p->q, p->element_size, item->batch, ba_lane_head(&tile, i), query), *unused;
            if (c->family->routed->pack_queries) {
                c->family->routed->pack_queries(to, &unused, &from, NULL, 1, p->head_dim);
            } else {
                memcpy(to, from, (size_t)bytes);
                memset(to + bytes, 0, (size_t)(q_bytes(c) - bytes));
            }
            ba_set_real(s->m, lane, ba_initial_m(real), real);
        }
    }
}

/* Writes out and lse of all queries of an item. */
static void finish_list_rows(const call *c, const block_scratch *s, const ba_item *item) {
    const ba_problem *p = c->problem;
    const int64_t real = c->family->real_size;
    for (int64_t row = 0; row < item->tiles; row++) {
        const ba_tile tile = list_row_at(c, item, row);
        const int64_t lane = row * c->list_row_lanes;
        const ba_panel panel = {.o = s->o + lane * BA_FEW_PAD(p->v_dim) * real, .m = s->m + lane * real, .l = s->l + lane * real};
        for (int64_t i = 0; i < tile.lanes; i++)
            s->out[i] = ba_result_row(p, &p->out, p->out_element_size, item->batch, ba_lane_head(&tile, i), ba_lane_query(&tile, i));
        const ba_finish_fn finish = p->unrounded ? c->family->few->finish_reals : c->family->few->finish;
        finish(&panel, tile.lanes, p->v_dim, s->out, p->lse.data ? s->lse : NULL);
        for (int64_t i = 0; p->lse.data && i < tile.lanes; i++)
            memcpy(ba_result_row(p, &p->lse, real, item->batch, ba_lane_head(&tile, i), ba_lane_query(&tile, i)), s->lse + i * real, (size_t)real);
    }
}

/* ---- Blocks ------------------------------------------------------------------------------------------------------------- */

/* Packs K and V of the keys [begin, end) of a KV head. */
static void pack_chunk(const call *c, const block_scratch *s, int64_t batch, int64_t kv_head, int64_t begin, int64_t end, char *packed_k,
                       char *packed_v) {
    const ba_problem *p = c->problem;
    const char *k = ba_key_row(p, &p->k, p->kv_element_size, batch, kv_head, begin),
               *v = ba_key_row(p, &p->v, p->kv_element_size, batch, kv_head, begin);
    for (int64_t j = 0; j < end - begin; j++) {
        s->k_rows[j] = k + j * p->k.token_stride * p->kv_element_size;
        s->v_rows[j] = v + j * p->v.token_stride * p->kv_element_size;
    }
    c->family->routed->pack_keys(packed_k, s->packed_k_rows, s->k_rows, NULL, end - begin, p->head_dim);
    c->family->routed->pack_values(packed_v, s->packed_v_rows, s->v_rows, NULL, end - begin, p->v_dim);
}

/* The place in c->shared of the column's chunk that begins with key `begin`. */
static char *shared_chunk(const call *c, int64_t batch, int64_t kv_head, int64_t column, int64_t begin) {
    const ba_problem *p = c->problem;
    const int64_t head = batch * p->kv_heads + kv_head, n = (begin - column * p->block_kv) / c->chunk_keys;
    return c->shared + ((head * p->block_columns + column) * c->column_chunks + n) * (c->packed_k + c->packed_v);
}

/* Packs one column of one (batch, KV head) for all items. */
static void share_item(void *context, int64_t index, int worker) {
    const call *c = context;
    const ba_problem *p = c->problem;
    const int64_t column = index % p->block_columns, head = index / p->block_columns, batch = head / p->kv_heads;
    const int64_t end = ba_min(ba_kv_span(p, batch).valid, (column + 1) * p->block_kv);
    block_scratch s;
    lay_out_by_block(c, c->scratch + worker * c->scratch_bytes, &s);
    for (int64_t begin = column * p->block_kv; begin < end; begin += c->chunk_keys) {
        char *to = shared_chunk(c, batch, head % p->kv_heads, column, begin);
        pack_chunk(c, &s, batch, head % p->kv_heads, begin, ba_min(end, begin + c->chunk_keys), to, to + c->packed_k);
    }
}

/* The chunk of the keys [begin, end) of a column, packed. */
static ba_chunk open_chunk(const call *c, const block_scratch *s, const ba_item *item, int64_t column, int64_t begin, int64_t end) {
    const ba_problem *p = c->problem;
    for (int64_t j = 0; j < end - begin; j++) s->key_index[j] = (int32_t)(begin + j);
    const char *k = s->packed_k, *v = s->packed_v;
    if (c->shared) {
        k = shared_chunk(c, item->batch, item->kv_head, column, begin);
        v = k + c->packed_k;
    } else {
        pack_chunk(c, s, item->batch, item->kv_head, begin, end, s->packed_k, s->packed_v);
    }
    s->packed_k_rows[0] = k;
    s->packed_v_rows[0] = v;
    return (ba_chunk){.keys = end - begin,
                      .head_dim = p->head_dim,
                      .v_dim = p->v_dim,
                      .k_rows = s->packed_k_rows,
                      .v_rows = s->packed_v_rows,
                      .key_index = s->key_index,
                      .scale = p->scale * BA_LOG2_E,
                      .softcap = p->softcap * BA_LOG2_E};
}

/* The list rows of the item that name a column attend its keys [begin, end). Rows that have attended little are taken last, so that their queries
 * stand side by side: their weights may need residuals (what rounding to bfloat16 leaves), and on tiles a whole set of queries gets residuals where
 * one of its queries needs them. */
static void attend_chunk(const call *c, const block_scratch *s, const ba_item *item, int64_t column, int64_t begin, int64_t end) {
    const int64_t room = item->tiles * c->list_row_lanes;
    int64_t unbounded = 0, bounded = 0;
    for (int young = 0; young < 2; young++)
        for (int64_t n = s->begin[column]; n < s->begin[column + 1]; n++) {
            const int32_t row = s->list_rows[n], first = row * (int32_t)c->list_row_lanes;
            if ((s->attended[row] < ba_work.by_block_young) != young) continue;
            s->attended[row] += young;
            for (int32_t lane = first; lane < first + (int32_t)c->list_row_lanes; lane++) {
                if (s->lo[lane] >= end || s->hi[lane] <= begin) continue;
                if (s->lo[lane] > begin || s->hi[lane] < end) s->chosen[room - ++bounded] = lane;
                else s->chosen[unbounded++] = lane;
            }
        }
    if (unbounded + bounded == 0) return;
    const ba_chunk chunk = open_chunk(c, s, item, column, begin, end);
    ba_panel panel = {.q = s->q, .o = s->o, .m = s->m, .l = s->l};
    if (unbounded) c->family->routed->attend(&panel, s->chosen, unbounded, &chunk);
    panel.lo = s->lo;
    panel.hi = s->hi;
    if (bounded) c->family->routed->attend(&panel, s->chosen + room - bounded, bounded, &chunk);
}

static void attend_item(void *context, int64_t index, int worker) {
    const call *c = context;
    const ba_problem *p = c->problem;
    const ba_item *item = &c->plan.item[index];
    const int64_t columns = ba_list_columns(p, item->batch), keys = ba_kv_span(p, item->batch).valid;
    block_scratch s;
    lay_out_by_block(c, c->scratch + worker * c->scratch_bytes, &s);
    open_list_rows(c, &s, item);
    ba_plan_invert_lists(&c->plan, item, columns, s.begin, s.list_rows);
    for (int64_t column = 0; column < columns && !ba_stopped(); column++) {
        if (s.begin[column] == s.begin[column + 1]) continue;
        const int64_t end = ba_min(keys, (column + 1) * p->block_kv);
        for (int64_t begin = column * p->block_kv; begin < end; begin += c->chunk_keys)
            attend_chunk(c, &s, item, column, begin, ba_min(end, begin + c->chunk_keys));
    }
    finish_list_rows(c, &s, item);
}

/* ---- The call ------------------------------------------------------------------------------------------------------------ */

/* Bytes of all K and V in packed form. 0 where each item packs its own chunks, because that is less work, or because the memory would exceed the
 * tuning's limit. */
static int64_t shared_bytes(const call *c, const ba_tuning *tuning) {
    const ba_problem *p = c->problem;
    const int64_t heads = p->batch * p->kv_heads, bytes = heads * p->block_columns * c->column_chunks * (c->packed_k + c->packed_v);
    const int64_t listed = ba_min(p->block_columns, c->plan.grouping.tiles * p->blocks.dims[3]); /* columns that an item may have to pack */
    return c->plan.items * listed < 2 * heads * p->block_columns || bytes > tuning->shared_bytes ? 0 : bytes;
}

/* Lays out the memory of a call. */
static int64_t lay_out_call(call *c, int threads, char *base) {
    int64_t used = 0;
    ba_plan_lay_out(&c->plan, threads, base, &used);
    c->scratch = ba_take(base, &used, threads * c->scratch_bytes);
    c->shared = c->shared_bytes ? ba_take(base, &used, c->shared_bytes) : NULL;
    return used;
}

ba_status ba_attend_by_block(const ba_problem *problem, const ba_attend_family *family, int threads) {
    const ba_tuning *tuning = ba_tuning_at(family->isa);
    call c = {.problem = problem, .family = family, .chunk_keys = BA_ROUTED_KEYS};
    c.plan = ba_plan_forward_by_block(problem, tuning, threads);
    c.list_row_lanes = ba_min(problem->block_q, problem->q_len) * c.plan.tiling.shared_heads;
    threads = (int)ba_min(threads, ba_max(1, c.plan.items));
    c.column_chunks = ba_ceil_div(problem->block_kv, c.chunk_keys);
    c.packed_k = c.chunk_keys * q_bytes(&c);
    c.packed_v = c.chunk_keys * ba_round_up(problem->v_dim, family->dim_pad) * row_element(&c);
    block_scratch unused;
    c.scratch_bytes = lay_out_by_block(&c, NULL, &unused);
    c.shared_bytes = shared_bytes(&c, tuning);
    char *memory;
    BA_TRY(ba_get_scratch(lay_out_call(&c, threads, NULL), &memory));
    lay_out_call(&c, threads, memory);
    ba_status status = ba_plan_make(&c.plan, threads);
    const double flops = c.plan.cost * 2 * (double)(problem->head_dim + problem->v_dim);
    if (ba_is_small(flops, tuning->inline_flops)) threads = 1;
    if (status == BA_OK && c.shared) status = ba_parallel(threads, problem->batch * problem->kv_heads * problem->block_columns, share_item, &c);
    if (status == BA_OK) status = ba_parallel(threads, c.plan.items, attend_item, &c);
    ba_arena_release();
    return status;
}
