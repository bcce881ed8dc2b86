/* Turns rows of queries and groups of keys into vectors of reals whose product is the score.
 *
 * For a mean query q, and the largest and the smallest element of each channel of a group of keys, the bound is
 *
 *     max(q, 0) . largest + min(q, 0) . smallest = q . (largest + smallest) / 2 + |q| . (largest - smallest) / 2,
 *
 * so that the bound, or the mean of it and of q . mean key, is one product of [q, |q|] and a vector of the group. */
#include <math.h>
#include <string.h>

#include "kernels/prefetch_rows.h"
#include "ops/scratch.h"
#include "ops/select_prefill.h"

enum { TOKENS_AHEAD = 32 }; /* how far ahead of the tokens that are pooled other tokens are prefetched, at least */

int64_t ba_features_lay_out(const ba_prefill *c, char *base, ba_features *s) {
    const int64_t dim = ba_round_up(c->p.head_dim, BA_PACK_PAD);
    const int64_t tokens = ba_max(ba_min(c->row_tokens, c->p.q_len), ba_min(c->group_tokens, c->p.kv_len));
    const bool pooled = c->args->chooser == BA_CHOOSER_POOLED;
    int64_t used = 0;
    s->wide = ba_take(base, &used, pooled ? tokens * dim * c->real_size : 0);
    s->wide_rows = (const void **)ba_take(base, &used, tokens * (int64_t)sizeof(void *));
    s->extremes = ba_take(base, &used, 2 * dim * c->real_size);
    s->pointers = (const void **)ba_take(base, &used, tokens * (int64_t)sizeof(void *));
    return used;
}

/* Writes a row of the input as head_dim reals. */
static void widen(const ba_prefill *c, const ba_features *s, void *to, const void *row) {
    const ba_pack_rows_fn pack = c->kernels->cache[c->p.dtype]->pack;
    const void *packed = row;
    if (pack)
        pack(s->extremes, &packed, &row, NULL, 1,
             c->p.head_dim); /* pack writes up to a multiple of BA_PACK_PAD reals, for which `to` may have no room */
    memcpy(to, packed, (size_t)(c->p.head_dim * c->real_size));
}

/* Prefetches the rows of n tokens that will be pooled later. The array is read once, so reading it from memory is what the time goes into. */
static void prefetch_tokens(const char *row, int64_t step, int64_t n, int64_t bytes) {
    for (int64_t i = 0; i < n; i++, row += step) ba_prefetch_to_read(row, bytes);
}

/* Writes the mean and, where not NULL, the largest and the smallest element of each channel of the n rows in s->pointers. */
static void pool(const ba_prefill *c, const ba_features *s, int64_t n, void *mean, void *largest, void *smallest) {
    const ba_pack_rows_fn pack = c->kernels->cache[c->p.dtype]->pack;
    const void **rows = s->pointers;
    if (pack) {
        pack(s->wide, s->wide_rows, rows, NULL, n, c->p.head_dim);
        rows = s->wide_rows;
    }
    c->kernels->cache[c->real]->summarise(rows, n, c->p.head_dim, largest, smallest, mean);
}

#define DEFINE_JOIN(real, absolute)                                                                                                                  \
    /* to = [mean * of_mean + (a + b) * of_bound / 2, (a - b) * of_bound / 2], where `to` holds the mean before. */                                  \
    static void join_range_##real(real *restrict to, const real *restrict a, const real *restrict b, real of_mean, real of_bound, int64_t dim) {     \
        for (int64_t d = 0; d < dim; d++) {                                                                                                          \
            to[d] = (of_mean != 0 ? to[d] * of_mean : 0) + (a[d] + b[d]) * (of_bound / 2);                                                           \
            to[dim + d] = (a[d] - b[d]) * (of_bound / 2);                                                                                            \
        }                                                                                                                                            \
    }                                                                                                                                                \
    static void add_sizes_##real(real *to, int64_t dim) {                                                                                            \
        for (int64_t d = 0; d < dim; d++) to[dim + d] = absolute(to[d]);                                                                             \
    }
DEFINE_JOIN(float, fabsf)
DEFINE_JOIN(double, fabs)

void ba_features_of_group(const ba_prefill *c, const ba_features *s, int64_t batch, int64_t kv_head, int64_t group, void *to) {
    const int64_t dim = c->p.head_dim, begin = group * c->group_tokens;
    const int64_t n = ba_min(c->group_tokens, ba_kv_span(&c->p, batch).valid - begin);
    const ba_chooser_term term = c->args->term;
    for (int64_t i = 0; i < n; i++) s->pointers[i] = ba_key_row(&c->p, &c->p.k, c->p.kv_element_size, batch, kv_head, begin + i);
    if (c->args->chooser == BA_CHOOSER_ANTIDIAGONAL) {
        for (int64_t i = 0; i < n; i++) widen(c, s, (char *)to + i * dim * c->real_size, s->pointers[i]);
        memset((char *)to + n * dim * c->real_size, 0, (size_t)((c->group_tokens - n) * dim * c->real_size));
        return;
    }
    if (c->args->chooser != BA_CHOOSER_POOLED) {
        widen(c, s, to, s->pointers[0]);
        return;
    }
    const int64_t step = ba_round_up(dim, BA_PACK_PAD) * c->real_size, ahead = begin + ba_max(n, TOKENS_AHEAD);
    const bool ranges = term != BA_TERM_MEAN;
    prefetch_tokens(ba_key_row(&c->p, &c->p.k, c->p.kv_element_size, batch, kv_head, ahead), c->p.k.token_stride * c->p.kv_element_size,
                    ba_min(n, ba_kv_span(&c->p, batch).valid - ahead), dim * c->p.kv_element_size);
    pool(c, s, n, to, ranges ? s->extremes : NULL, ranges ? s->extremes + step : NULL);
    if (!ranges) return;
    const double of_mean = term == BA_TERM_BOTH ? 0.5 : 0, of_bound = term == BA_TERM_BOTH ? 0.5 : 1;
    if (c->real_size == 4) join_range_float(to, (float *)s->extremes, (float *)(s->extremes + step), (float)of_mean, (float)of_bound, dim);
    else join_range_double(to, (double *)s->extremes, (double *)(s->extremes + step), of_mean, of_bound, dim);
}

void ba_features_of_row(const ba_prefill *c, const ba_features *s, int64_t batch, int64_t head, int64_t row, void *to) {
    const int64_t dim = c->p.head_dim, begin = row * c->row_tokens;
    const int64_t n = ba_min(c->row_tokens, ba_q_span(&c->p, batch).valid - begin);
    for (int64_t i = 0; i < n; i++) s->pointers[i] = ba_query_row(&c->p, &c->p.q, c->p.element_size, batch, head, begin + i);
    switch (c->args->chooser) {
    case BA_CHOOSER_ANTIDIAGONAL: /* in reverse order, so that the last query is multiplied with the first key */
        memset(to, 0, (size_t)(c->row_tokens * dim * c->real_size));
        for (int64_t i = 0; i < n; i++) widen(c, s, (char *)to + (c->row_tokens - 1 - i) * dim * c->real_size, s->pointers[i]);
        return;
    case BA_CHOOSER_SAMPLED_ROWS:
    case BA_CHOOSER_VERTICAL_SLASH: widen(c, s, to, s->pointers[n - 1]); return;
    case BA_CHOOSER_POOLED: break;
    }
    const int64_t ahead = begin + ba_max(n, TOKENS_AHEAD);
    prefetch_tokens(ba_query_row(&c->p, &c->p.q, c->p.element_size, batch, head, ahead), c->p.q.token_stride * c->p.element_size,
                    ba_min(n, ba_q_span(&c->p, batch).valid - ahead), dim * c->p.element_size);
    pool(c, s, n, to, NULL, NULL);
    if (c->args->term == BA_TERM_MEAN) return;
    if (c->real_size == 4) add_sizes_float(to, dim);
    else add_sizes_double(to, dim);
}
