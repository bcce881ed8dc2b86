#include "ops/plan/shared_kv.h"

#include <stdlib.h>

#include "core/pool.h"
#include "ops/scratch.h"

bool ba_may_share(const ba_problem *problem, const ba_attend_family *family) {
    return family->pack_groups && !problem->page_size && !(problem->listed && problem->block_kv % family->key_pad);
}

/* The keys that may be packed: those that any query of the batch entry may see, from the beginning of a chunk on. A slice of queries with a window
 * sees only few keys. */
static ba_range shared_range(const ba_sharing *s, int64_t batch) {
    const ba_problem *p = s->plan->problem;
    const int64_t tokens = ba_q_span(p, batch).valid, keys = ba_kv_span(p, batch).valid;
    if (tokens < 1) return (ba_range){0, keys};
    const ba_range first = ba_keys_in_place(p, batch, 0), last = ba_keys_in_place(p, batch, tokens - 1);
    /* With lists, chunks do not begin at multiples of chunk_keys, so the range begins at 0. Where the last query sees no key, an earlier one may
     * see the last key. */
    return (ba_range){p->listed ? 0 : first.lo - first.lo % s->chunk_keys, last.hi ? last.hi : keys};
}

/* The part of ba_sharing_lay_out() for K, for V or for K in columns. */
static void lay_out_rows(const ba_sharing *s, ba_shared_rows *rows, int64_t dim, char *memory, int64_t *used) {
    const ba_problem *p = s->plan->problem;
    const int64_t heads = p->batch * p->kv_heads;
    int64_t at = 0;
    rows->row_bytes = ba_round_up(dim, s->family->dim_pad) * s->family->pack_bytes;
    rows->offset = ba_take(memory, used, heads * (int64_t)sizeof *rows->offset);
    for (int64_t i = 0; i < heads; i++) {
        const ba_range range = shared_range(s, i / p->kv_heads);
        if (memory) rows->offset[i] = at - range.lo * rows->row_bytes;
        if (ba_plan_few_queries(s->plan, i / p->kv_heads) || !rows->pack) continue;
        /* room for whole chunks, but not for keys beyond the last group of the sequence */
        const int64_t there = ba_max(0, ba_kv_span(p, i / p->kv_heads).valid - range.lo);
        at += ba_min(ba_round_up(ba_max(0, range.hi - range.lo), s->chunk_keys), ba_round_up(there, s->family->key_pad)) * rows->row_bytes;
    }
    rows->data = ba_take_in_page(memory, used, at, s->page_offset, s->page_offset);
}

int64_t ba_sharing_lay_out(ba_sharing *s, char *memory) {
    const ba_problem *p = s->plan->problem;
    int64_t used = 0;
    s->shared = ba_take(memory, &used, p->batch * (int64_t)sizeof *s->shared);
    for (int64_t b = 0; memory && b < p->batch; b++) s->shared[b] = !ba_plan_few_queries(s->plan, b);
    lay_out_rows(s, &s->k, p->head_dim, memory, &used);
    lay_out_rows(s, &s->v, p->v_dim, memory, &used);
    lay_out_rows(s, &s->k_columns, p->head_dim, memory, &used);
    return used;
}

/* Packs `keys` keys, a whole number of groups, of one head (counted over the batch) from key `begin` on. */
static void pack_run(const ba_sharing *s, const ba_shared_rows *to, const ba_view *view, int64_t dim, int64_t head, int64_t begin, int64_t keys) {
    const ba_problem *p = s->plan->problem;
    const void *rows[BA_MAX_CHUNK], *packed_rows[BA_MAX_CHUNK];
    const char *row = ba_key_row(p, view, p->kv_element_size, head / p->kv_heads, head % p->kv_heads, begin);
    for (int64_t j = 0; j < keys; j++, row += view->token_stride * p->kv_element_size) rows[j] = row;
    to->pack(to->data + to->offset[head] + begin * to->row_bytes, packed_rows, rows, NULL, keys, dim);
}

static void share_item(void *context, int64_t index, int worker) {
    (void)worker;
    const ba_sharing *s = context;
    const ba_problem *p = s->plan->problem;
    const int64_t heads = p->batch * p->kv_heads, head = index % heads, valid = ba_kv_span(p, head / p->kv_heads).valid;
    const ba_range range = shared_range(s, head / p->kv_heads);
    const int64_t begin = range.lo + index / heads * s->pack_keys;
    int64_t keys = begin < range.hi ? ba_min(s->pack_keys, valid - begin) : 0;
    keys -= keys % s->family->key_pad; /* the last keys of a sequence may not fill a group; tiles pack these themselves */
    if (keys <= 0 || !s->shared[head / p->kv_heads]) return;
    if (s->k.pack) pack_run(s, &s->k, &p->k, p->head_dim, head, begin, keys);
    if (s->v.pack) pack_run(s, &s->v, &p->v, p->v_dim, head, begin, keys);
    if (s->k_columns.pack) pack_run(s, &s->k_columns, &p->k, p->head_dim, head, begin, keys);
}

ba_status ba_share_kv(ba_sharing *s, int threads) {
    const ba_problem *p = s->plan->problem;
    int64_t keys = 0, longest = 0;
    for (int64_t b = 0; b < p->batch; b++) {
        const ba_range range = shared_range(s, b);
        keys += p->kv_heads * ba_max(0, range.hi - range.lo);
        longest = ba_max(longest, range.hi - range.lo);
    }
    if (s->plan->cost < s->least_pairs * (double)keys) s->shared = NULL;
    return s->shared ? ba_parallel(threads, ba_ceil_div(longest, s->pack_keys) * p->batch * p->kv_heads, share_item, s) : BA_OK;
}
