/* Pools queries and keys: turns one or a few of them into one vector of reals or, for families that multiply pairs, of bfloat16. The product of a
 * pooled query and a pooled key is the score.
 *
 * For a mean query q, and the largest and the smallest element of each channel of some keys, the bound is
 *
 *     max(q, 0) . largest + min(q, 0) . smallest = q . (largest + smallest) / 2 + |q| . (largest - smallest) / 2,
 *
 * so that the bound, or the mean of it and of q . mean key, is one product of [q, |q|] and the pooled key. For bfloat16 inputs, means are rounded
 * to bfloat16, and the pooled key is, too: these are the numbers that kernels for pairs multiply, and every level chooses by them. */
#include <math.h>
#include <string.h>

#include "kernels/prefetch_rows.h"
#include "kernels/work_tuning.h"
#include "ops/scratch.h"
#include "ops/select/select_prefill_call.h"

/* Keys are pooled to three rows: their mean, largest and smallest elements. This is how many reals a row takes, room for packing included. */
static int64_t pooled_step(const ba_prefill *c) { return ba_round_up(c->p.head_dim, BA_PACK_PAD); }

static bool is_bfloat16(const ba_prefill *c) { return c->p.dtype == BA_BFLOAT16; }

int64_t ba_features_lay_out(const ba_prefill *c, char *base, ba_features *s) {
    const int64_t step = pooled_step(c), tokens = ba_max(ba_min(c->q_tokens, c->p.q_len), ba_min(c->k_tokens, c->p.kv_len));
    const bool widens = c->args->chooser == BA_CHOOSER_POOLED && c->p.dtype == BA_FLOAT16;
    int64_t used = 0;
    s->wide = ba_take(base, &used, ba_max(2, widens ? tokens : 0) * step * c->real_size);
    s->wide_rows = ba_take(base, &used, ba_max(3, tokens) * (int64_t)sizeof(void *));
    s->pooled = ba_take(base, &used, 3 * step * c->real_size);
    s->narrow = ba_take(base, &used, 3 * step * (int64_t)sizeof(uint16_t));
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

/* Prefetches the rows of n tokens that will be pooled later. The array is read once, so reading it from memory takes most of the time. */
static void prefetch_tokens(const char *row, int64_t step, int64_t n, int64_t bytes) {
    for (int64_t i = 0; i < n; i++, row += step) ba_prefetch_to_read(row, bytes);
}

/* Computes the mean and, where not NULL, the largest and the smallest element of each channel of the n rows in s->pointers: as reals, or for bfloat16
 * inputs in bfloat16. */
static void pool_tokens(const ba_prefill *c, const ba_features *s, int64_t n, void *mean, void *largest, void *smallest) {
    const void **rows = s->pointers;
    if (c->p.dtype == BA_FLOAT16) {
        c->kernels->cache[c->p.dtype]->pack(s->wide, s->wide_rows, rows, NULL, n, c->p.head_dim);
        rows = s->wide_rows;
    }
    c->kernels->cache[is_bfloat16(c) ? BA_BFLOAT16 : c->real]->summarise(rows, n, c->p.head_dim, largest, smallest, mean);
}

#define DEFINE_RANGES(real, absolute)                                                                                                                \
    /* to = [mean * of_mean + (a + b) * of_bound / 2, (a - b) * of_bound / 2]; `mean` may be the beginning of `to`. */                               \
    static void join_ranges_##real(real *to, const real *mean, const real *a, const real *b, real of_mean, real of_bound, int64_t dim) {             \
        for (int64_t d = 0; d < dim; d++) {                                                                                                          \
            const real high = a[d], low = b[d];                                                                                                      \
            /* not 0 * mean, which is NaN where the mean is infinite */                                                                              \
            to[d] = (of_mean != 0 ? mean[d] * of_mean : 0) + (high + low) * (of_bound / 2);                                                          \
            to[dim + d] = (high - low) * (of_bound / 2);                                                                                             \
        }                                                                                                                                            \
    }                                                                                                                                                \
    /* Puts the magnitudes of the first dim numbers behind them. */                                                                                  \
    static void add_magnitudes_##real(real *to, int64_t dim) {                                                                                       \
        for (int64_t d = 0; d < dim; d++) to[dim + d] = absolute(to[d]);                                                                             \
    }
DEFINE_RANGES(float, fabsf)
DEFINE_RANGES(double, fabs)

static void add_magnitudes_bfloat16(uint16_t *to, int64_t dim) {
    for (int64_t d = 0; d < dim; d++) to[dim + d] = to[d] & 0x7fff;
}

/* Widens the c->depth bfloat16 numbers of a pooled query or key into `to`. */
static void widen_numbers(const ba_prefill *c, void *to, const void *numbers) {
    const void *packed;
    c->kernels->cache[BA_BFLOAT16]->pack(to, &packed, &numbers, NULL, 1, c->depth);
}

/* The numbers of a pooled key from the keys' mean, largest and smallest elements, reals at mean, mean + step and mean + 2 * step. */
static void join_ranges(const ba_prefill *c, void *to, const char *mean) {
    const int64_t step = pooled_step(c) * c->real_size, dim = c->p.head_dim;
    const bool both = c->args->term == BA_TERM_BOTH;
    const double of_mean = both ? 0.5 : 0, of_bound = both ? 0.5 : 1;
    const void *a = mean + step, *b = mean + 2 * step;
    if (c->real_size == 4) join_ranges_float(to, (const float *)mean, a, b, (float)of_mean, (float)of_bound, dim);
    else join_ranges_double(to, (const double *)mean, a, b, of_mean, of_bound, dim);
}

/* Pools n bfloat16 keys. */
static void pooled_key_of_bfloat16(const ba_prefill *c, const ba_features *s, int64_t n, void *to) {
    const int64_t dim = c->p.head_dim, step = pooled_step(c);
    uint16_t *narrow = (uint16_t *)s->narrow;
    if (c->args->term == BA_TERM_MEAN) {
        void *mean = c->number_size == c->real_size ? narrow : to;
        pool_tokens(c, s, n, mean, NULL, NULL);
        if (mean != to) widen_numbers(c, to, mean);
        return;
    }
    pool_tokens(c, s, n, narrow, narrow + step, narrow + 2 * step);
    const void *rows[] = {narrow, narrow + step, narrow + 2 * step};
    c->kernels->cache[BA_BFLOAT16]->pack(s->pooled, s->wide_rows, rows, NULL, 3, dim);
    join_ranges(c, s->wide, s->pooled);
    void *numbers = c->number_size == c->real_size ? narrow : to;
    c->kernels->vector[BA_BFLOAT16]->gradient->store_row(numbers, s->wide, c->depth);
    if (numbers != to) widen_numbers(c, to, numbers);
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
    if (is_bfloat16(c)) pooled_key_of_bfloat16(c, s, n, to);
    else if (c->args->term == BA_TERM_MEAN) pool_tokens(c, s, n, to, NULL, NULL);
    else {
        const int64_t step = pooled_step(c) * c->real_size;
        pool_tokens(c, s, n, s->pooled, s->pooled + step, s->pooled + 2 * step);
        join_ranges(c, to, s->pooled);
    }
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
    const bool ranges = c->args->term != BA_TERM_MEAN;
    if (is_bfloat16(c)) {
        void *numbers = c->number_size == c->real_size ? s->narrow : to;
        pool_tokens(c, s, n, numbers, NULL, NULL);
        if (ranges) add_magnitudes_bfloat16(numbers, dim);
        if (numbers != to) widen_numbers(c, to, numbers);
        return;
    }
    pool_tokens(c, s, n, to, NULL, NULL);
    if (ranges && c->real_size == 4) add_magnitudes_float(to, dim);
    else if (ranges) add_magnitudes_double(to, dim);
}
