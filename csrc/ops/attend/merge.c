/* Merges partial attention over disjoint sets of keys: out = sum of exp(lse_i - lse) * out_i, where lse = log of the sum of exp(lse_i). */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "core/arena.h"
#include "core/float_mode.h"
#include "core/pool.h"
#include "core/status.h"
#include "kernels/kernels.h"
#include "kernels/work_tuning.h"
#include "ops/attend/merge.h"
#include "ops/check.h"
#include "ops/reals.h"
#include "ops/scratch.h"

typedef struct merge_call {
    const ba_attend_family *family;
    int64_t parts;
    const ba_tensor *outs, *lses, *out, *lse;
    int64_t rows; /* batch * heads * tokens */
    char *scratch;
    int64_t scratch_bytes;
} merge_call;

/* Checks that a tensor has the shape and the dtype of `expected`. `like` names the array that the shape comes from, and `with` ends the sentence
 * about the dtype. */
static ba_status check_like(const char *name, const ba_tensor *t, const ba_tensor *expected, const char *like, const char *with) {
    if (!ba_same_shape(t, expected))
        return ba_fail(BA_ERROR_VALUE, BA_ARG("%s") ": expected shape %s like %s, got %s", name, ba_shape_text(expected).chars, like,
                       ba_shape_text(t).chars);
    if (t->dtype != expected->dtype)
        return ba_fail(BA_ERROR_TYPE, BA_ARG("%s") ": expected dtype %s %s, got %s", name, ba_dtype_name(expected->dtype), with,
                       ba_dtype_name(t->dtype));
    return ba_check_extent(name, t);
}

static ba_status check_merge(int64_t parts, const ba_tensor *outs, const ba_tensor *lses, const ba_tensor *out, const ba_tensor *lse) {
    if (parts < 1) return ba_fail(BA_ERROR_VALUE, BA_ARG("outs") ": expected at least one part, got %" PRId64, parts);
    const ba_tensor *first = &outs[0];
    BA_TRY(ba_check_float("outs[0]", first));
    if (first->ndim != 4) return ba_fail(BA_ERROR_VALUE, BA_ARG("outs[0]") ": expected shape (B, H, S, Dv), got %s", ba_shape_text(first).chars);
    ba_tensor lse_shape = {.dtype = ba_real_of(first->dtype), .ndim = 3, .dims = {first->dims[0], first->dims[1], first->dims[2]}};
    char name[32];
    for (int64_t i = 0; i <= parts; i++) {
        const bool is_output = i == parts;
        const ba_tensor *o = is_output ? out : &outs[i], *s = is_output ? lse : &lses[i];
        snprintf(name, sizeof name, is_output ? "out" : "outs[%" PRId64 "]", i);
        BA_TRY(check_like(name, o, first, BA_ARG("outs[0]"), "like " BA_ARG("outs[0]")));
        BA_TRY(ba_check_last_axis(name, o));
        snprintf(name, sizeof name, is_output ? "lse" : "lses[%" PRId64 "]", i);
        const char *with = first->dtype == BA_FLOAT64 ? "with " BA_ARG("outs[0]") " of float64" : "with " BA_ARG("outs[0]") " of 32 bits or fewer";
        BA_TRY(check_like(name, s, &lse_shape, "the first three axes of " BA_ARG("outs[0]"), with));
    }
    BA_TRY(ba_check_places("out", out));
    BA_TRY(ba_check_places("lse", lse));
    return BA_OK;
}

/* The offset, in elements, of row number `row` in a tensor whose first three axes are batch, head and token. Rows are counted in the order of these
 * axes. */
static int64_t row_offset(const ba_tensor *t, int64_t row) {
    if (t->dims[t->ndim - 1] == 0) return 0; /* the strides of an array without elements have not been checked */
    const int64_t token = row % t->dims[2], head = row / t->dims[2] % t->dims[1], batch = row / t->dims[2] / t->dims[1];
    return batch * t->strides[0] + head * t->strides[1] + token * t->strides[2];
}

double ba_merge_row_states(const ba_attend_family *family, int64_t parts, const void *const *outs, const double *lses, const void **rows,
                           void *weights, void *out, int64_t v_dim) {
    double top = -INFINITY, sum = 0;
    bool is_nan = false;
    for (int64_t n = 0; n < parts; n++) {
        is_nan |= isnan(lses[n]);
        top = lses[n] > top ? lses[n] : top;
    }
    int64_t used = 0;
    for (int64_t n = 0; n < parts && (is_nan || top > -INFINITY); n++) {
        if (lses[n] == -INFINITY) continue;
        sum += exp(lses[n] - top);
        rows[used++] = outs[n];
    }
    for (int64_t n = 0, at = 0; n < parts && used; n++)
        if (lses[n] != -INFINITY) ba_set_real(weights, at++, exp(lses[n] - top) / sum, family->real_size);
    family->pack->merge_row(out, rows, weights, used, v_dim);
    return used ? top + log(sum) : -INFINITY;
}

typedef struct merge_scratch {
    const void **outs, **rows; /* [part]: the rows of all parts, and those that are merged */
    double *lses;              /* [part] */
    char *weights;             /* [part] reals */
} merge_scratch;

/* Lays out the scratch memory of one worker. */
static int64_t lay_out_merge(const merge_call *c, char *base, merge_scratch *s) {
    int64_t used = 0;
    s->outs = ba_take(base, &used, c->parts * (int64_t)sizeof(void *));
    s->rows = ba_take(base, &used, c->parts * (int64_t)sizeof(void *));
    s->lses = ba_take(base, &used, c->parts * (int64_t)sizeof(double));
    s->weights = ba_take(base, &used, c->parts * c->family->real_size);
    return used;
}

static void merge_rows(void *context, int64_t item, int worker) {
    const merge_call *c = context;
    merge_scratch s;
    lay_out_merge(c, c->scratch + worker * c->scratch_bytes, &s);
    const int64_t real_size = ba_dtype_size(c->lse->dtype);
    const int64_t element = ba_dtype_size(c->out->dtype);
    for (int64_t row = item * ba_work.merge_rows; row < ba_min(c->rows, (item + 1) * ba_work.merge_rows); row++) {
        for (int64_t n = 0; n < c->parts; n++) {
            s.lses[n] = ba_get_real(c->lses[n].data, row_offset(&c->lses[n], row), real_size);
            s.outs[n] = (const char *)c->outs[n].data + row_offset(&c->outs[n], row) * element;
        }
        const double lse = ba_merge_row_states(c->family, c->parts, s.outs, s.lses, s.rows, s.weights,
                                               (char *)c->out->data + row_offset(c->out, row) * element, c->out->dims[3]);
        ba_set_real(c->lse->data, row_offset(c->lse, row), lse, real_size);
    }
}

ba_status ba_merge_states(int64_t parts, const ba_tensor *outs, const ba_tensor *lses, const ba_tensor *out, const ba_tensor *lse) {
    BA_IN_USUAL_MODE;
    BA_TRY(ba_check_pointer("outs", outs));
    BA_TRY(ba_check_pointer("lses", lses));
    BA_TRY(ba_check_pointer("out", out));
    BA_TRY(ba_check_pointer("lse", lse));
    BA_TRY(check_merge(parts, outs, lses, out, lse));
    for (int i = 0; i < 3; i++)
        if (lse->dims[i] == 0) return BA_OK;
    merge_call c = {.family = ba_kernels_active()->vector[out->dtype], .parts = parts, .outs = outs, .lses = lses, .out = out, .lse = lse};
    c.rows = out->dims[0] * out->dims[1] * out->dims[2];
    merge_scratch unused;
    c.scratch_bytes = lay_out_merge(&c, NULL, &unused);
    const int64_t items = ba_ceil_div(c.rows, ba_work.merge_rows);
    const double work = (double)c.rows * (double)(parts * out->dims[3]);
    const int threads = ba_threads_of_call(0, work, ba_work.small_work, items);
    BA_TRY(ba_get_scratch(threads * c.scratch_bytes, &c.scratch));
    const ba_status status = ba_parallel(threads, items, merge_rows, &c);
    ba_arena_release();
    return status;
}
