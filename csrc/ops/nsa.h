/* What the operations of native sparse attention share: arrays with a row a token and head. Internal. */
#ifndef BA_OPS_NSA_H
#define BA_OPS_NSA_H

#include "blitz_attn.h"
#include "core/common.h"
#include "kernels/kernels.h"

enum { BA_ROWS_AT_ONCE = 64 }; /* rows that are widened before they are added */

/* (B, N, H, D), or packed (T, H, D) as one batch entry. Steps in bytes. data NULL: not given. */
typedef struct ba_rows {
    char *data;
    ba_dtype dtype;
    int64_t batch, tokens, heads, dim, batch_step, token_step, head_step;
} ba_rows;

static inline char *ba_row(const ba_rows *r, int64_t batch, int64_t token, int64_t head) {
    return r->data + batch * r->batch_step + token * r->token_step + head * r->head_step;
}

/* Checks kind, rank (3 where packed, else 4), D and the last axis. `axes` names the shape in sentences. */
ba_status ba_take_rows(const char *name, const ba_tensor *t, const char *axes, bool packed, ba_rows *out);

/* The same tokens and heads as `like`, whose name is `of`, and (dim > 0) that many elements a row. */
ba_status ba_rows_like(const char *name, const ba_rows *r, const ba_rows *like, const char *of, int64_t dim);

ba_status ba_check_threads(int num_threads);

/* out[d] += weight[i] * row i of n, all in real: the rows are widened BA_ROWS_AT_ONCE at a time into `wide`, which takes
 * BA_ROWS_AT_ONCE * round_up(dim, BA_PACK_PAD) reals. `kernels` are of one level; weights are real. */
void ba_sum_rows(const ba_kernels *kernels, ba_dtype dtype, const void *const *rows, const void *weights, int64_t n, int64_t dim, void *wide,
                 void *out);

#endif
