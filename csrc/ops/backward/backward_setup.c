/* Sets a backward call up: the plan, the scratch memory, and the sums dK and dV. Kernels and numbers are looked up by the level in use and by dtype,
 * but no code branches on either.
 *
 * As in the forward pass, an item is a run of tiles of one (batch, KV head). The tiles walk their lists side by side, chunk by chunk. For each chunk,
 * every panel of a tile computes its P and dS and adds to its dQ; then the whole tile, or all tiles that walk the same list, add to the chunk's rows
 * of dK and dV. dQ belongs to the tile. dK and dV are shared by all items of the (batch, KV head), which add in turns (turns.h): into the outputs
 * themselves where these are reals, else into arrays of reals that are rounded into the outputs at the end. Where the caller wants gradients added,
 * the outputs are reals, and are not cleared first; if rows of sums need more room than the outputs have (needs_room), the sums have arrays of their
 * own here, too, and are added to the outputs at the end. */
#include <string.h>

#include "core/arena.h"
#include "core/pool.h"
#include "core/status.h"
#include "kernels/work_tuning.h"
#include "ops/backward/backward_call.h"

/* ---- dK and dV as a whole ----------------------------------------------------------------------------------------------- */

/* The number of runs of ba_work.gradient_keys keys that each (batch, KV head) is given, enough for the longest sequence. */
static int64_t runs(const ba_problem *p) { return ba_ceil_div(p->kv_len, ba_work.gradient_keys); }

typedef void (*key_fn)(const ba_backward_call *c, int64_t batch, int64_t kv_head, int64_t key);

/* Calls fn for every key of run number `index`. */
static void each_key(const ba_backward_call *c, int64_t index, key_fn fn) {
    const ba_problem *p = c->problem;
    const int64_t first = index % runs(p) * ba_work.gradient_keys, kv_head = index / runs(p) % p->kv_heads, batch = index / runs(p) / p->kv_heads;
    for (int64_t key = first; key < ba_min(first + ba_work.gradient_keys, ba_kv_span(p, batch).rows); key++) fn(c, batch, kv_head, key);
}

static void clear_key(const ba_backward_call *c, int64_t batch, int64_t kv_head, int64_t key) {
    const ba_problem *p = c->problem;
    const int64_t real = c->family->real_size;
    memset(ba_key_row(p, &c->dk, real, batch, kv_head, key), 0, (size_t)(p->head_dim * real));
    memset(ba_key_row(p, &c->dv, real, batch, kv_head, key), 0, (size_t)(p->v_dim * real));
}

static void round_key(const ba_backward_call *c, int64_t batch, int64_t kv_head, int64_t key) {
    const ba_problem *p = c->problem;
    const ba_gradients *g = c->gradients;
    const int64_t real = c->family->real_size, size = p->kv_element_size;
    c->family->gradient->store_row(ba_key_row(p, &g->dk, size, batch, kv_head, key), ba_key_row(p, &c->dk, real, batch, kv_head, key), p->head_dim);
    c->family->gradient->store_row(ba_key_row(p, &g->dv, size, batch, kv_head, key), ba_key_row(p, &c->dv, real, batch, kv_head, key), p->v_dim);
}

static bool is_zero(const char *row, int64_t bytes) { return bytes == 0 || (row[0] == 0 && memcmp(row, row + 1, (size_t)bytes - 1) == 0); }

/* Adds a key's sums to the outputs. Where all sums of a row are 0, as for a key that no query has seen, the output's row is left alone. */
static void add_key(const ba_backward_call *c, int64_t batch, int64_t kv_head, int64_t key) {
    const ba_problem *p = c->problem;
    const int64_t real = c->family->real_size, dims[] = {p->head_dim, p->v_dim};
    const ba_view *const to[] = {&c->gradients->dk, &c->gradients->dv}, *const from[] = {&c->dk, &c->dv};
    for (int i = 0; i < 2; i++) {
        const char *sums = ba_key_row(p, from[i], real, batch, kv_head, key);
        if (!is_zero(sums, dims[i] * real)) c->family->pack->add_reals(ba_key_row(p, to[i], real, batch, kv_head, key), sums, dims[i]);
    }
}

static void clear_run(void *context, int64_t index, int worker) {
    (void)worker;
    each_key(context, index, clear_key);
}

static void keep_run(void *context, int64_t index, int worker) {
    (void)worker;
    const ba_backward_call *c = context;
    each_key(c, index, c->gradients->accumulate ? add_key : round_key);
}

/* Whether rows of sums need more room than outputs have: families with gradient_tile add to whole multiples of BA_PACK_PAD dims. */
static bool needs_room(const ba_backward_call *c) {
    return c->family->gradient->gradient_tile && (c->problem->head_dim % BA_PACK_PAD || c->problem->v_dim % BA_PACK_PAD);
}

/* The number of rows per KV head in the arrays of sums. */
static int64_t sum_tokens(const ba_problem *p) { return p->cu_kv ? p->cu_kv[p->batch] : p->batch * p->kv_len; }

/* The view of an array of sums: rows by (KV head, token), each padded to a multiple of BA_PACK_PAD reals. */
static ba_view sum_view(const ba_backward_call *c, char *data, int64_t dim) {
    const ba_problem *p = c->problem;
    const int64_t row = ba_round_up(dim, BA_PACK_PAD);
    return (ba_view){data, p->kv_len * row, sum_tokens(p) * row, row};
}

static int64_t sum_bytes(const ba_backward_call *c, int64_t dim) {
    return c->apart ? c->problem->kv_heads * sum_tokens(c->problem) * ba_round_up(dim, BA_PACK_PAD) * c->family->real_size : 0;
}

/* ---- The call ---------------------------------------------------------------------------------------------------------- */

/* Decides whether items may share packed K and V, and how much memory that takes. Whether sharing pays is known once the plan has its cost
 * (ba_share_kv). Only families over tiles pack K here; those over pairs read K in place. V is packed like K; K is packed once more, in columns. */
static void choose_sharing(ba_backward_call *c, bool by_block) {
    const ba_problem *p = c->problem;
    const ba_pack_kernels *pack = c->family->pack;
    if (!pack->keys || !c->family->gradient->gradient_tile || !ba_may_share(p, c->family)) return;
    /* `queries`: the number of queries that attend each key that an item packs, on average */
    int64_t queries;
    if (by_block) {
        queries = c->plan.grouping.tiles * c->list_row_lanes * ba_min(p->block_columns, p->blocks.dims[3]) / ba_max(1, p->block_columns);
    } else {
        const int64_t heads = p->listed && p->blocks.dims[1] == p->heads ? 1 : p->group;
        const int64_t alike = (p->listed ? p->block_q : p->q_len) * heads; /* queries that see the same keys, or are in the same row of the lists */
        queries = ba_min(alike, ba_plan_tile_lanes(&c->plan) * c->plan.grouping.tiles);
    }
    c->sharing = (ba_sharing){.plan = &c->plan,
                              .family = c->family,
                              .chunk_keys = c->tuning->gradient_keys,
                              .pack_keys = c->tuning->gradient_keys,
                              .least_pairs = ba_work.gradient_packs * (double)queries,
                              .k.pack = pack->keys,
                              .v.pack = pack->keys,
                              .k_columns.pack = pack->values};
    c->shared_bytes = ba_sharing_lay_out(&c->sharing, NULL);
    if (c->shared_bytes > c->tuning->shared_bytes) c->shared_bytes = 0;
}

/* Lays out the memory of a call. Where the sums are not the outputs, makes the views of the sums, too. */
static int64_t lay_out_call(ba_backward_call *c, int threads, char *base) {
    const ba_problem *p = c->problem;
    int64_t used = 0;
    ba_plan_lay_out(&c->plan, threads, base, &used);
    c->last = ba_take(base, &used, p->batch * p->kv_heads * (int64_t)sizeof(int64_t));
    c->turns = ba_take(base, &used, c->plan.items * (int64_t)sizeof(ba_turn));
    c->scratch = ba_take(base, &used, threads * c->scratch_bytes);
    if (c->shared_bytes) ba_sharing_lay_out(&c->sharing, ba_take(base, &used, c->shared_bytes));
    char *dk = ba_take(base, &used, sum_bytes(c, p->head_dim)), *dv = ba_take(base, &used, sum_bytes(c, p->v_dim));
    if (c->apart) {
        c->dk = sum_view(c, dk, p->head_dim);
        c->dv = sum_view(c, dv, p->v_dim);
    }
    return used;
}

/* Sets the turns: the items of each (batch, KV head) add in the order that they have in the plan. */
static void set_turns(const ba_backward_call *c) {
    const ba_problem *p = c->problem;
    for (int64_t i = 0; i < p->batch * p->kv_heads; i++) c->last[i] = -1;
    for (int64_t i = 0; i < c->plan.items; i++) {
        const ba_item *item = &c->plan.item[i];
        int64_t *before = &c->last[item->batch * p->kv_heads + item->kv_head];
        atomic_init(&c->turns[i].past, 0);
        atomic_init(&c->turns[i].before, *before);
        *before = i;
    }
}

ba_status ba_attend_backward(const ba_problem *problem, const ba_gradients *gradients, int num_threads) {
    const ba_isa level = ba_isa_active();
    const ba_attend_family *family = ba_kernels_at(level)->attend[problem->dtype];
    ba_backward_call c = {.problem = problem,
                          .gradients = gradients,
                          .family = family->gradient && family->gradient->gradient_tile ? family : ba_kernels_at(level)->vector[problem->dtype],
                          .fill_bias = ba_kernels_at(level)->vector[problem->dtype]->panel->fill_bias,
                          .dk = gradients->dk,
                          .dv = gradients->dv};
    c.tuning = ba_tuning_at(c.family->isa);
    c.apart = gradients->accumulate ? needs_room(&c) : c.family->real_size != problem->kv_element_size;
    int threads = ba_threads_for(num_threads);
    const bool by_block = ba_runs_by_block(problem);
    c.plan = by_block ? ba_plan_gradients_by_block(problem, c.tuning) : ba_plan_gradients(problem, c.tuning);
    c.list_row_lanes = ba_min(problem->block_q, problem->q_len) * c.plan.tiling.shared_heads;
    choose_sharing(&c, by_block);
    threads = (int)ba_min(threads, ba_max(1, c.plan.items)); /* threads that would find no item need no scratch memory */
    c.scratch_bytes = by_block ? ba_backward_by_block_bytes(&c) : ba_backward_by_tile_bytes(&c);
    char *memory;
    BA_TRY(ba_get_scratch(lay_out_call(&c, threads, NULL), &memory));
    lay_out_call(&c, threads, memory);

    const int64_t sums = problem->batch * problem->kv_heads;
    ba_status status = ba_plan_make(&c.plan, threads);
    if (status == BA_OK) {
        if (ba_is_small(c.plan.cost * (double)(6 * problem->head_dim + 4 * problem->v_dim), c.tuning->inline_flops)) threads = 1;
        set_turns(&c);
        if (c.apart || !gradients->accumulate) status = ba_parallel(threads, sums * runs(problem), clear_run, &c);
    }
    if (status == BA_OK && c.shared_bytes) status = ba_share_kv(&c.sharing, threads);
    if (status == BA_OK) status = ba_parallel(threads, c.plan.items, by_block ? ba_backward_by_block : ba_backward_by_tile, &c);
    if (status == BA_OK && c.apart) status = ba_parallel(threads, sums * runs(problem), keep_run, &c);
    ba_arena_release();
    return status;
}
