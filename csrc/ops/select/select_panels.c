/* A worker's scratch memory, and the step that the scoring of bands and of lines have in common: pooled queries as the lanes of a panel, which are
 * multiplied by a run of pooled keys. */
#include "ops/reals.h"
#include "ops/scratch.h"
#include "ops/select/select_prefill_call.h"

/* ---- Scratch ---------------------------------------------------------------------------------------------------- */

/* The largest number of chunks of a panel. Where a block is longer than a chunk, all blocks together have at most as many whole chunks as fit into
 * the pooled keys of the sequence (which may be shorter than one block), and each block has at most one chunk that is not whole. Where chunks consist
 * of whole blocks, the panel's first chunk may be shorter than the others, so that there is one more. */
static int64_t most_chunks(const ba_prefill *c) {
    const int64_t per_block = c->k_per_block;
    if (c->align > 1) return ba_ceil_div(ba_ceil_div(c->p.kv_len, c->k_tokens), c->chunk);
    if (per_block > c->chunk) return ba_ceil_div(c->p.kv_len, c->k_tokens) / c->chunk + c->p.block_columns;
    return ba_ceil_div(c->p.block_columns * per_block, c->chunk - c->chunk % per_block) + 1;
}

/* Bytes of the arrays that each panel of a band has for itself. */
typedef struct panel_sizes {
    int64_t q, reals, bounds, sums, alphas, chunks;
} panel_sizes;

static panel_sizes sizes_of(const ba_prefill *c) {
    const int64_t lanes = c->lanes, columns = ba_max(1, c->p.block_columns), reals = ba_round_up(lanes * c->real_size, BA_ALIGN);
    return (panel_sizes){.q = ba_round_up(lanes * ba_round_up(c->depth, c->family->dim_pad) * c->family->q_bytes, BA_ALIGN),
                         .reals = reals,
                         .bounds = ba_round_up(lanes * (int64_t)sizeof(int32_t), BA_ALIGN),
                         .sums = ba_round_up(columns * lanes * c->real_size, BA_ALIGN),
                         .alphas = ba_round_up(most_chunks(c) * lanes * c->real_size, BA_ALIGN),
                         .chunks = ba_round_up(columns * (int64_t)sizeof(int32_t), BA_ALIGN)};
}

ba_band_scratch ba_band_of_panel(const ba_prefill *c, const ba_band_scratch *s, int64_t panel) {
    const panel_sizes sizes = sizes_of(c);
    ba_band_scratch own = *s;
    own.q += panel * sizes.q;
    own.m += panel * sizes.reals;
    own.l += panel * sizes.reals;
    own.lo = (int32_t *)((char *)s->lo + panel * sizes.bounds);
    own.hi = (int32_t *)((char *)s->hi + panel * sizes.bounds);
    own.sums += panel * sizes.sums;
    own.alphas += panel * sizes.alphas;
    own.chunks = (int32_t *)((char *)s->chunks + panel * sizes.chunks);
    return own;
}

int64_t ba_band_lay_out(const ba_prefill *c, char *base, ba_band_scratch *s) {
    const int64_t real = c->real_size, lanes = c->lanes, columns = ba_max(1, c->p.block_columns);
    int64_t used = ba_round_up(ba_features_lay_out(c, base, &s->features), BA_ALIGN);
    s->queries = ba_take(base, &used, lanes * c->pitch * c->number_size);
    s->pointers = ba_take(base, &used, lanes * (int64_t)sizeof(void *));
    const panel_sizes sizes = sizes_of(c);
    s->q = ba_take(base, &used, c->panels * sizes.q);
    s->m = ba_take(base, &used, c->panels * sizes.reals);
    s->l = ba_take(base, &used, c->panels * sizes.reals);
    s->lo = ba_take(base, &used, c->panels * sizes.bounds);
    s->hi = ba_take(base, &used, c->panels * sizes.bounds);
    s->key_index = ba_take(base, &used, 2 * c->chunk * (int64_t)sizeof(int32_t));
    s->k_rows = ba_take(base, &used, 2 * c->chunk * (int64_t)sizeof(void *));
    s->chunk = ba_take(base, &used, c->chunk * ba_max(c->family->scratch_per_key, lanes * real));
    s->sums = ba_take(base, &used, c->panels * sizes.sums);
    s->alphas = ba_take(base, &used, c->panels * sizes.alphas);
    s->chunks = ba_take(base, &used, c->panels * sizes.chunks);
    s->head = ba_take(base, &used, c->band_rows * ba_head_pitch(c) * (int64_t)sizeof(double));
    s->scores = ba_take(base, &used, c->band_rows * columns * (int64_t)sizeof(float));
    s->sort_keys = ba_take(base, &used, columns * (int64_t)sizeof(uint64_t));
    s->other_sort_keys = ba_take(base, &used, columns * (int64_t)sizeof(uint64_t));
    s->middle = ba_take(base, &used, ba_max(1, c->words) * (int64_t)sizeof(uint64_t));
    s->free_scores = ba_take(base, &used, columns * (int64_t)sizeof(float));
    s->bins = ba_take(base, &used, (BA_BUDGET_BINS + BA_SPARE_BINS) * (int64_t)sizeof(int64_t)); /* for ba_budget_share, too */
    return used;
}

/* ---- A panel ---------------------------------------------------------------------------------------------------- */

ba_panel_sight ba_panel_open(const ba_prefill *c, const ba_band_scratch *s, int64_t batch, int64_t head, int64_t first, int64_t queries) {
    ba_panel_sight at = {.lo = INT64_MAX, .all_hi = INT64_MAX};
    const int64_t q_valid = ba_q_span(&c->p, batch).valid;
    for (int64_t i = 0; i < queries; i++) {
        const int64_t begin = (first + i) * c->q_tokens, last = ba_min(begin + c->q_tokens, q_valid) - 1;
        const ba_range keys = ba_prefill_keys(c, batch, c->args->chooser == BA_CHOOSER_SAMPLED_ROWS ? last : begin, last);
        const int64_t lo = keys.lo / c->k_tokens, hi = ba_ceil_div(keys.hi, c->k_tokens);
        s->lo[i] = (int32_t)lo;
        s->hi[i] = (int32_t)hi;
        if (hi > 0) at.lo = ba_min(at.lo, lo);
        at.hi = ba_max(at.hi, hi);
        at.all_lo = ba_max(at.all_lo, lo);
        at.all_hi = ba_min(at.all_hi, hi);
        char *query = s->queries + i * c->pitch * c->number_size;
        ba_features_of_query(c, &s->features, batch, head, first + i, query);
        s->pointers[i] = query;
    }
    for (int64_t i = 0; i < c->lanes; i++) {
        if (i >= queries) s->lo[i] = s->hi[i] = 0;
        ba_set_real(s->m, i, ba_initial_m(c->real_size), c->real_size);
        ba_set_real(s->l, i, 0, c->real_size);
    }
    c->family->pack->queries[0](s->q, s->pointers, queries, c->depth, c->scale);
    return at;
}

void ba_point_to_pooled_keys(const ba_prefill *c, const ba_band_scratch *s, const char *pooled_keys, int64_t begin, int64_t end) {
    const int64_t bytes = c->pitch * c->number_size;
    for (int64_t g = begin; g < end; g++) {
        s->k_rows[g - begin] = pooled_keys + g * bytes;
        s->key_index[g - begin] = (int32_t)g;
    }
}

void ba_panel_score(const ba_prefill *c, const ba_band_scratch *s, const ba_panel_sight *at, const ba_pooled_range *range,
                    const ba_block_sums *blocks) {
    const int64_t begin = range->begin, end = range->end;
    const bool all_see = begin >= at->all_lo && end <= at->all_hi;
    const ba_panel panel = {.q = s->q, .m = s->m, .l = s->l, .lo = all_see ? NULL : s->lo, .hi = all_see ? NULL : s->hi};
    const ba_chunk chunk = {.keys = end - begin,
                            .head_dim = c->depth,
                            .v_dim = 1,
                            .k_rows = s->k_rows + (begin - range->first),
                            .v_rows = s->k_rows,
                            .k_next = s->k_rows + (range->next - range->first),
                            .v_next = s->k_rows,
                            .next_rows = range->next_end - range->next,
                            .k_next_bytes = c->depth * c->number_size,
                            .next_level = c->kernels->cache[BA_FLOAT32]->prefetch_level,
                            .key_index = s->key_index + (begin - range->first),
                            .scale = c->scale,
                            .scratch = s->chunk};
    c->family->panel->sum_blocks(&panel, &chunk, blocks);
}
