/* Stores rows in caches. ba_quantize_kv() stores quantised rows in arrays of their own. */
#include "ops/kv_cache/store_rows.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "core/arena.h"
#include "core/float_mode.h"
#include "core/pool.h"
#include "core/status.h"
#include "kernels/work_tuning.h"
#include "ops/check.h"
#include "ops/scratch.h"

enum { MOST_NUMBERS = 1 << 24 }; /* of a row, which bounds the scratch memory of a worker */

/* ---- A row ---------------------------------------------------------------------------------------------------------- */

/* Scratch memory of a worker, for one row. */
typedef struct row_scratch {
    float *floats;
    double *doubles;
} row_scratch;

static bool is_quantised(const ba_stored_rows *r) { return r->quantise != NULL; }
static bool is_copied(const ba_stored_rows *r) { return r->from_dtype == r->to_dtype; }

/* Lays out the scratch memory of one worker. */
static int64_t lay_out(const ba_store_call *c, char *base, row_scratch *w) {
    int64_t used = 0, floats = 0, doubles = 0;
    for (int i = 0; i < c->arrays; i++) {
        const ba_stored_rows *r = &c->rows[i];
        const bool to_doubles = is_quantised(r) || r->to_dtype == BA_FLOAT64;
        if (is_copied(r)) continue;
        if (r->pack || r->from_dtype == BA_FLOAT64) floats = ba_max(floats, ba_round_up(r->dim, BA_PACK_PAD));
        if (to_doubles && r->from_dtype != BA_FLOAT64) doubles = ba_max(doubles, r->dim);
    }
    w->floats = ba_take(base, &used, floats * (int64_t)sizeof *w->floats);
    w->doubles = ba_take(base, &used, doubles * (int64_t)sizeof *w->doubles);
    return used;
}

static const void *find_row(const ba_stored_rows *r, int64_t token, int64_t head) {
    return r->from + (token * r->token_stride + head * r->head_stride) * ba_dtype_size(r->from_dtype);
}

static const float *widen(const ba_stored_rows *r, const row_scratch *w, const void *row) {
    const void *packed;
    if (!r->pack) return row;
    r->pack(w->floats, &packed, &row, NULL, 1, r->dim);
    return w->floats;
}

static const double *as_doubles(const ba_stored_rows *r, const row_scratch *w, const void *row) {
    if (r->from_dtype == BA_FLOAT64) return row;
    const float *floats = widen(r, w, row);
    for (int64_t d = 0; d < r->dim; d++) w->doubles[d] = floats[d];
    return w->doubles;
}

/* A float that rounds to the same 16-bit number as x: x itself where x is a float, else whichever of the two floats around x has the last bit 1. */
static float round_to_odd(double x) {
    const float near = (float)x;
    uint32_t bits;
    if ((double)near == x || isnan(x)) return near;
    memcpy(&bits, &near, sizeof bits);
    bits = (bits - (fabs((double)near) > fabs(x))) | 1;
    float odd;
    memcpy(&odd, &bits, sizeof odd);
    return odd;
}

static const void *as_reals(const ba_stored_rows *r, const row_scratch *w, const void *row) {
    if (r->to_dtype == BA_FLOAT64) return as_doubles(r, w, row);
    if (r->from_dtype != BA_FLOAT64) return widen(r, w, row);
    const double *numbers = row;
    for (int64_t d = 0; d < r->dim; d++) w->floats[d] = r->to_dtype == BA_FLOAT32 ? (float)numbers[d] : round_to_odd(numbers[d]);
    return w->floats;
}

/* The scale of a row whose largest magnitude is `magnitude`. The scale is not finite where the row cannot be quantised. */
static float scale_for(const ba_stored_rows *r, double magnitude) {
    const float scale = (float)(magnitude / (r->to_dtype == BA_INT8 ? 127 : 448));
    return scale == 0 ? 1 : scale;
}

/* Whether all numbers of the row are finite, by the bits of their exponents. */
#define DEFINE_ALL_FINITE(type)                                                                                                                      \
    static bool all_finite_##type(const void *row, int64_t dim, type exponent) {                                                                     \
        type found = 0, bits;                                                                                                                        \
        for (int64_t d = 0; d < dim; d++) {                                                                                                          \
            memcpy(&bits, (const char *)row + d * (int64_t)sizeof bits, sizeof bits);                                                                \
            found |= (bits & exponent) == exponent;                                                                                                  \
        }                                                                                                                                            \
        return !found;                                                                                                                               \
    }
DEFINE_ALL_FINITE(uint32_t)
DEFINE_ALL_FINITE(uint16_t)
#undef DEFINE_ALL_FINITE

/* The largest magnitude that a cell can hold, since its factor is a float16. */
static double most_of_cells(ba_dtype dtype) { return 65504 * (dtype == BA_Q8_0 ? 127.0 : dtype == BA_Q4_0 ? 8.0 : 1.0); }

/* Whether a row with this largest magnitude can be quantised. */
static bool is_fit_magnitude(const ba_stored_rows *r, double magnitude) {
    if (ba_has_cells(r->to_dtype)) return magnitude <= most_of_cells(r->to_dtype);
    return r->scale_is_fixed ? isfinite(magnitude) : isfinite(scale_for(r, magnitude));
}

/* Whether the row can be quantised. Every finite float32 can be scaled. A float64 may be too large and, for cells, so may a float32 or a bfloat16. */
static bool is_fit(const ba_stored_rows *r, const row_scratch *w, const void *row) {
    switch (ba_has_cells(r->to_dtype) ? BA_FLOAT64 : r->from_dtype) {
    case BA_FLOAT32: return all_finite_uint32_t(row, r->dim, 0x7f800000);
    case BA_FLOAT16: return all_finite_uint16_t(row, r->dim, 0x7c00);
    case BA_BFLOAT16: return all_finite_uint16_t(row, r->dim, 0x7f80);
    default: break;
    }
    return is_fit_magnitude(r, r->magnitude(as_doubles(r, w, row), r->dim));
}

static void store_row(const ba_stored_rows *r, const row_scratch *w, const void *row, int64_t page, int64_t place, int64_t head) {
    const int64_t size = ba_dtype_size(r->to_dtype);
    char *to = r->to.data + (page * r->to.batch_stride + place * r->to.token_stride + head * r->to.head_stride) * size;
    if (is_copied(r)) {
        memcpy(to, row, (size_t)(r->dim * size));
    } else if (is_quantised(r)) {
        const double *numbers = as_doubles(r, w, row);
        if (ba_has_cells(r->to_dtype)) {
            r->quantise(to, 0, numbers, r->dim);
            return;
        }
        float *scale = (float *)r->scale.data + page * r->scale.batch_stride + place * r->scale.token_stride + head * r->scale.head_stride;
        if (!r->scale_is_fixed) *scale = scale_for(r, r->magnitude(numbers, r->dim));
        r->quantise(to, (double)*scale, numbers, r->dim);
    } else {
        r->convert(to, as_reals(r, w, row), r->dim);
    }
}

/* ---- All rows ------------------------------------------------------------------------------------------------------- */

typedef bool visit_fn(const ba_store_call *, ba_stored_rows *, const row_scratch *, int64_t token, int64_t head);
/* Calls `visit` for each row of an item's tokens that have a slot, until `visit` returns false. An item is some tokens of one array. */
static inline void visit_rows(ba_store_call *c, int64_t item, int worker, visit_fn *visit) {
    ba_stored_rows *r = &c->rows[item % c->arrays];
    const int64_t begin = item / c->arrays * c->item_tokens, end = ba_min(c->tokens, begin + c->item_tokens);
    row_scratch w;
    lay_out(c, c->scratch + worker * c->scratch_bytes, &w);
    for (int64_t token = begin; token < end; token++)
        for (int64_t head = 0; head < c->heads && !(c->slots && c->slots[token] < 0); head++)
            if (!visit(c, r, &w, token, head)) return;
}

static bool check_one(const ba_store_call *c, ba_stored_rows *r, const row_scratch *w, int64_t token, int64_t head) {
    (void)c;
    if (is_fit(r, w, find_row(r, token, head))) return true;
    atomic_store_explicit(&r->unfit, true, memory_order_relaxed);
    return false;
}

static bool store_one(const ba_store_call *c, ba_stored_rows *r, const row_scratch *w, int64_t token, int64_t head) {
    const int64_t slot = c->slots ? c->slots[token] : token;
    store_row(r, w, find_row(r, token, head), slot / c->page_size, slot % c->page_size, head);
    return true;
}

static void check_rows(void *context, int64_t item, int worker) { visit_rows(context, item, worker, check_one); }
static void store_rows(void *context, int64_t item, int worker) { visit_rows(context, item, worker, store_one); }

/* Refuses the first number of an array that cannot be quantised, whichever thread has found such a number first. */
static ba_status refuse_number(const ba_store_call *c, const ba_stored_rows *r) {
    row_scratch w;
    lay_out(c, c->scratch, &w);
    int64_t steps = 0;
    for (int64_t token = 0; token < c->tokens; token++)
        for (int64_t head = 0; head < c->heads && !(c->slots && c->slots[token] < 0); head++) {
            BA_TRY(ba_look_after(&steps, r->dim));
            const double *numbers = as_doubles(r, &w, find_row(r, token, head));
            int64_t d = 0;
            while (d < r->dim && is_fit_magnitude(r, fabs(numbers[d]))) d++;
            if (d == r->dim) continue;
            char place[80];
            if (c->slots) snprintf(place, sizeof place, "at [%" PRId64 ", %" PRId64 ", %" PRId64 "]", token, head, d);
            else snprintf(place, sizeof place, "at place %" PRId64 " of row %" PRId64, d, token); /* ba_quantize_kv() */
            if (ba_has_cells(r->to_dtype))
                return ba_fail(BA_ERROR_VALUE, BA_ARG("%s") ": expected numbers from -%.0f to %.0f to quantise to %s, got %s %s", r->name,
                               most_of_cells(r->to_dtype), most_of_cells(r->to_dtype), ba_dtype_name(r->to_dtype),
                               ba_number_text(numbers[d], r->from_dtype).chars, place);
            return ba_fail(BA_ERROR_VALUE, BA_ARG("%s") ": expected finite numbers to quantise, within float32's range, got %s %s", r->name,
                           ba_number_text(numbers[d], r->from_dtype).chars, place);
        }
    return ba_fail(BA_ERROR_VALUE, BA_ARG("%s") ": expected numbers that nothing else writes during the call, got some that changed", r->name);
}

static void choose_kernels(ba_stored_rows *r, const ba_kernels *kernels) {
    r->pack = kernels->cache[r->from_dtype]->pack;
    r->magnitude = kernels->cache[r->to_dtype]->magnitude;
    r->quantise = kernels->cache[r->to_dtype]->quantise;
    r->convert = is_quantised(r) ? NULL : kernels->vector[r->to_dtype]->gradient->store_row;
}

ba_status ba_store_rows(ba_store_call *c, int num_threads) {
    const ba_kernels *kernels = ba_kernels_active();
    for (int i = 0; i < c->arrays; i++) choose_kernels(&c->rows[i], kernels);
    const bool quantised = is_quantised(&c->rows[0]);
    const int64_t token_numbers = c->heads * ba_max(c->rows[0].dim, c->rows[c->arrays - 1].dim);
    c->item_tokens = ba_max(1, ba_work.stored_numbers / token_numbers);
    const int64_t items = c->arrays * ba_ceil_div(c->tokens, c->item_tokens);
    if (items == 0) return BA_OK;
    const double work = (double)token_numbers * (double)c->tokens * c->arrays, least = quantised ? ba_work.small_quantised : ba_work.small_work;
    const int threads = ba_threads_of_call(num_threads, work, least, items);
    row_scratch unused;
    c->scratch_bytes = lay_out(c, NULL, &unused);
    BA_TRY(ba_get_scratch(threads * c->scratch_bytes, &c->scratch));
    ba_status status = quantised ? ba_parallel(threads, items, check_rows, c) : BA_OK;
    for (int i = 0; i < c->arrays && status == BA_OK; i++)
        if (c->rows[i].unfit) status = refuse_number(c, &c->rows[i]);
    if (status == BA_OK) status = ba_parallel(threads, items, store_rows, c);
    ba_arena_release();
    return status;
}

/* ---- Quantising rows ------------------------------------------------------------------------------------------------ */

static ba_status check_quantise(const ba_tensor *x, const ba_tensor *values, const ba_tensor *scale, int num_threads) {
    BA_TRY(ba_check_float("x", x));
    if (x->ndim != 2) return ba_fail(BA_ERROR_VALUE, BA_ARG("x") ": expected shape (N, D), got %s", ba_shape_text(x).chars);
    BA_TRY(ba_check_same("x", x, x, true));
    if (x->dims[1] > MOST_NUMBERS)
        return ba_fail(BA_ERROR_VALUE, BA_ARG("x") ": expected rows of at most %d numbers, got shape %s", MOST_NUMBERS, ba_shape_text(x).chars);
    const bool cells = ba_has_cells(values->dtype);
    if (!ba_is_quantised(values->dtype) && !cells)
        return ba_fail(BA_ERROR_TYPE, BA_ARG("values") ": expected int8, float8_e4m3, q8_0, q4_0 or q4_1, got %s", ba_dtype_name(values->dtype));
    if (cells && x->dims[1] % BA_CELL_DIMS)
        return ba_fail(BA_ERROR_VALUE, BA_ARG("x") ": expected a last axis of a multiple of %d for %s, got %s", BA_CELL_DIMS,
                       ba_dtype_name(values->dtype), ba_shape_text(x).chars);
    const int64_t width = cells ? x->dims[1] / BA_CELL_DIMS * ba_cell_bytes(values->dtype) : x->dims[1];
    const ba_tensor like_x = {.dtype = values->dtype, .ndim = 2, .dims = {x->dims[0], width}};
    const ba_tensor rows_of_x = {.dtype = BA_FLOAT32, .ndim = 1, .dims = {x->dims[0]}};
    BA_TRY(ba_check_output("values", values, &like_x, true));
    if (cells && ba_given(scale))
        return ba_fail(BA_ERROR_VALUE, BA_ARG("scale") ": expected none with " BA_ARG("values") " of %s, got shape %s", ba_dtype_name(values->dtype),
                       ba_shape_text(scale).chars);
    if (!cells) BA_TRY(ba_check_output("scale", scale, &rows_of_x, false));
    return ba_check_threads(num_threads);
}

ba_status ba_quantize_kv(const ba_tensor *x, const ba_tensor *values, const ba_tensor *scale, int num_threads) {
    BA_IN_USUAL_MODE;
    BA_TRY(ba_check_pointer("x", x));
    BA_TRY(ba_check_pointer("values", values));
    BA_TRY(ba_check_pointer("scale", scale));
    BA_TRY(check_quantise(x, values, scale, num_threads));
    const int64_t rows = x->dims[0], dim = x->dims[1];
    for (int64_t i = 0; i < rows && dim == 0 && ba_given(scale); i++) { /* x and values have no memory */
        BA_TRY(ba_look_at_turn(i));
        ((float *)scale->data)[i * ba_step(scale, 0)] = 1;
    }
    if (dim == 0) return BA_OK;
    ba_store_call c = {.arrays = 1, .tokens = rows, .heads = 1, .page_size = 1};
    c.rows[0] = (ba_stored_rows){.name = "x",
                                 .from_dtype = x->dtype,
                                 .to_dtype = values->dtype,
                                 .dim = dim,
                                 .from = x->data,
                                 .token_stride = ba_step(x, 0),
                                 .to = {.data = values->data, .batch_stride = ba_step(values, 0)},
                                 .scale = {.data = scale->data, .batch_stride = ba_step(scale, 0)}};
    return ba_store_rows(&c, num_threads);
}
