/* Arrays that have one row per token and head, and functions on them, which the operations of native sparse attention share. Internal. */
#ifndef BA_OPS_NSA_H
#define BA_OPS_NSA_H

#include "blitz_attn.h"
#include "core/common.h"
#include "kernels/kernels.h"
#include "ops/problem.h"

enum { BA_ROWS_AT_ONCE = 64 }; /* rows that ba_sum_rows() widens to reals before it adds them */

/* An array (B, N, H, D), or a packed array (T, H, D) as a single batch entry. Steps count bytes. data NULL: the array is not given. */
typedef struct ba_token_rows {
    char *data;
    ba_dtype dtype;
    int64_t batch, tokens, heads, dim, batch_step, token_step, head_step;
} ba_token_rows;

static inline char *ba_row(const ba_token_rows *r, int64_t batch, int64_t token, int64_t head) {
    return r->data + batch * r->batch_step + token * r->token_step + head * r->head_step;
}

/* Row `at` of a sequence, and the number of rows of a sequence. cu NULL: each batch entry is a sequence of `each` rows. Else the array is packed, and
 * cu has the cumulative numbers of its sequences' rows (tokens or blocks). */
static inline char *ba_sequence_row(const ba_token_rows *r, const int64_t *cu, int64_t sequence, int64_t at, int64_t head) {
    return cu ? ba_row(r, 0, cu[sequence] + at, head) : ba_row(r, sequence, at, head);
}
static inline int64_t ba_sequence_length(const int64_t *cu, int64_t each, int64_t sequence) { return cu ? cu[sequence + 1] - cu[sequence] : each; }

/* The number of complete blocks of `block` tokens, which begin `stride` tokens apart, among `tokens` tokens. */
static inline int64_t ba_complete_blocks(int64_t tokens, int64_t block, int64_t stride) { return tokens < block ? 0 : (tokens - block) / stride + 1; }

/* Checks the dtype (a float), the rank (3 where packed, else 4), D and the last axis of `t`, and fills `out`. `axes` is the expected shape in the
 * sentence of a refusal. */
ba_status ba_take_rows(const char *name, const ba_tensor *t, const char *axes, bool packed, ba_token_rows *out);

/* Checks that `r` has the batch, tokens and heads of `like`, an array that sentences call `like_name`, and, where dim > 0, `dim` elements per
 * row. */
ba_status ba_rows_like(const char *name, const ba_token_rows *r, const ba_token_rows *like, const char *like_name, int64_t dim);

/* out[d] += the sum over i < n of weights[i] * rows[i][d], computed in reals. `rows` are of `dtype`; `weights` and `out` are reals. BA_ROWS_AT_ONCE
 * rows at a time are widened into `wide`, which has room for BA_ROWS_AT_ONCE * round_up(dim, BA_PACK_PAD) reals. */
void ba_sum_rows(const ba_kernels *kernels, ba_dtype dtype, const void *const *rows, const void *weights, int64_t n, int64_t dim, void *wide,
                 void *out);

#endif
