/* Pools queries and keys: turns one or a few of them into one vector of reals or, for families that multiply pairs, of bfloat16. The product of a
 * pooled query and a pooled key is the score. For bfloat16 inputs, the elements of both vectors are rounded to bfloat16, because kernels for pairs
 * multiply such numbers, and every level must choose by the same numbers. */
#include <string.h>

#include "kernels/prefetch_rows.h"
#include "kernels/work_tuning.h"
#include "ops/scratch.h"
#include "ops/select/select_prefill_call.h"

int64_t ba_features_lay_out(const ba_prefill *c, char *base, ba_features *s) {
    const int64_t step = ba_round_up(c->p.head_dim, BA_PACK_PAD), tokens = ba_max(ba_min(c->q_tokens, c->p.q_len), ba_min(c->k_tokens, c->p.kv_len));
    const bool widens = c->args->chooser == BA_CHOOSER_POOLED && c->p.dtype == BA_FLOAT16;
    int64_t used = 0;
    s->wide = ba_take(base, &used, (widens ? tokens : 1) * step * c->real_size);
    s->wide_rows = ba_take(base, &used, tokens * (int64_t)sizeof(void *));
    s->narrow = ba_take(base, &used, 2 * step * (int64_t)sizeof(uint16_t));
    s->pointers = ba_take(base, &used, tokens * (int64_t)sizeof(void *));
    return used;
}

/* Writes a row of the input as head_dim numbers. Where these must be widened, they go to s->wide first: pack writes up to a multiple of BA_PACK_PAD
 * reals, for which `to` may have no room. */
static void copy_row(const ba_prefill *c, const ba_features *s, void *to, const void *row) {
    const ba_pack_rows_fn pack = c->kernels->cache[c->p.dtype]->pack;
    const void *packed = row;
    if (pack && c->number_size == c->real_size) pack(s->wide, &packed, &row, NULL, 1, c->p.head_dim);
    memcpy(to, packed, (size_t)(c->p.head_dim * c->number_size));
}

/* Prefetches the rows of n tokens that will be pooled later. The array is read only once, so waiting for memory takes most of the time. */
static void prefetch_tokens(const char *row, int64_t step, int64_t n, int64_t bytes) {
    for (int64_t i = 0; i < n; i++, row += step) ba_prefetch_to_read(row, bytes);
}

/* Pools the n rows in s->pointers. */
static void pool_tokens(const ba_prefill *c, const ba_features *s, int64_t n, ba_pooled form, void *to) {
    const void **rows = s->pointers;
    if (c->p.dtype == BA_FLOAT16) {
        c->kernels->cache[c->p.dtype]->pack(s->wide, s->wide_rows, rows, NULL, n, c->p.head_dim);
        rows = s->wide_rows;
    }
    const bool narrow = c->p.dtype == BA_BFLOAT16, widens = narrow && c->number_size == c->real_size;
    const void *numbers = widens ? s->narrow : to, *packed;
    c->kernels->cache[narrow ? BA_BFLOAT16 : c->real]->pool(rows, n, c->p.head_dim, form, widens ? s->narrow : to);
    if (widens) c->kernels->cache[BA_BFLOAT16]->pack(to, &packed, &numbers, NULL, 1, c->depth);
}

void ba_features_of_key(const ba_prefill *c, const ba_features *s, int64_t batch, int64_t kv_head, int64_t pooled_key, void *to) {
    const int64_t dim = c->p.head_dim, begin = pooled_key * c->k_tokens;
    const int64_t n = ba_min(c->k_tokens, ba_kv_span(&c->p, batch).valid - begin);
    for (int64_t i = 0; i < n; i++) s->pointers[i] = ba_key_row(&c->p, &c->p.k, c->p.kv_element_size, batch, kv_head, begin + i);
    if (c->args->chooser == BA_CHOOSER_ANTIDIAGONAL) {
        for (int64_t i = 0; i < n; i++) copy_row(c, s, (char *)to + i * dim * c->number_size, s->pointers[i]);
        memset((char *)to + n * dim * c->number_size, 0, (size_t)((c->k_tokens - n) * dim * c->number_size));
        return;
    }
    if (c->args->chooser != BA_CHOOSER_POOLED) {
        copy_row(c, s, to, s->pointers[0]);
        return;
    }
    const int64_t ahead = begin + ba_max(n, ba_work.choose.ahead_tokens);
    prefetch_tokens(ba_key_row(&c->p, &c->p.k, c->p.kv_element_size, batch, kv_head, ahead), c->p.k.token_stride * c->p.kv_element_size,
                    ba_min(n, ba_kv_span(&c->p, batch).valid - ahead), dim * c->p.kv_element_size);
    pool_tokens(c, s, n, c->args->term == BA_TERM_MEAN ? BA_POOLED_MEAN : c->args->term == BA_TERM_BOUND ? BA_POOLED_BOUND : BA_POOLED_BOTH, to);
}

void ba_features_of_query(const ba_prefill *c, const ba_features *s, int64_t batch, int64_t head, int64_t pooled_query, void *to) {
    const int64_t dim = c->p.head_dim, begin = pooled_query * c->q_tokens;
    const int64_t n = ba_min(c->q_tokens, ba_q_span(&c->p, batch).valid - begin);
    for (int64_t i = 0; i < n; i++) s->pointers[i] = ba_query_row(&c->p, &c->p.q, c->p.element_size, batch, head, begin + i);
    switch (c->args->chooser) {
    case BA_CHOOSER_ANTIDIAGONAL: /* in reverse order, so that the last query is multiplied by the first key */
        memset(to, 0, (size_t)(c->q_tokens * dim * c->number_size));
        for (int64_t i = 0; i < n; i++) copy_row(c, s, (char *)to + (c->q_tokens - 1 - i) * dim * c->number_size, s->pointers[i]);
        return;
    case BA_CHOOSER_SAMPLED_ROWS:
    case BA_CHOOSER_VERTICAL_SLASH: copy_row(c, s, to, s->pointers[n - 1]); return;
    case BA_CHOOSER_POOLED:
    case BA_CHOOSER_GIVEN: break; /* BA_CHOOSER_GIVEN has no pooled queries */
    }
    const int64_t ahead = begin + ba_max(n, ba_work.choose.ahead_tokens);
    prefetch_tokens(ba_query_row(&c->p, &c->p.q, c->p.element_size, batch, head, ahead), c->p.q.token_stride * c->p.element_size,
                    ba_min(n, ba_q_span(&c->p, batch).valid - ahead), dim * c->p.element_size);
    pool_tokens(c, s, n, c->args->term == BA_TERM_MEAN ? BA_POOLED_MEAN : BA_POOLED_QUERY, to);
}
