/* Quantises rows of K or V for 8-bit caches: one scale per row, which maps its largest magnitude to the largest number of the dtype. */
#include "core/arena.h"
#include "core/pool.h"
#include "core/status.h"
#include "kernels/kernels.h"
#include "kernels/work_tuning.h"
#include "ops/check.h"
#include "ops/scratch.h"

enum { MOST_NUMBERS = 1 << 24 }; /* of a row, which bounds the scratch memory of a worker */

typedef struct quantise_call {
    const ba_tensor *x, *values, *scale;
    ba_pack_rows_fn pack; /* makes floats; NULL: rows are float32 or float64 */
    ba_quantise_fn quantise;
    int64_t item_rows;
    char *scratch;
    int64_t scratch_bytes; /* per worker */
} quantise_call;

static ba_status check_quantise(const ba_tensor *x, const ba_tensor *values, const ba_tensor *scale, int num_threads) {
    if (!ba_is_float(x->dtype)) return ba_fail(BA_ERROR_TYPE, "x: expected float32, float16, bfloat16 or float64, got %s", ba_dtype_name(x->dtype));
    if (x->ndim != 2) return ba_fail(BA_ERROR_VALUE, "x: expected shape (N, D), got %s", ba_shape_text(x).chars);
    BA_TRY(ba_check_same("x", x, x, true));
    if (x->dims[1] > MOST_NUMBERS)
        return ba_fail(BA_ERROR_VALUE, "x: expected rows of at most %d numbers, got shape %s", MOST_NUMBERS, ba_shape_text(x).chars);
    if (!ba_is_quantised(values->dtype)) return ba_fail(BA_ERROR_TYPE, "values: expected int8 or float8_e4m3, got %s", ba_dtype_name(values->dtype));
    const ba_tensor like_x = {.dtype = values->dtype, .ndim = 2, .dims = {x->dims[0], x->dims[1]}};
    const ba_tensor rows_of_x = {.dtype = BA_FLOAT32, .ndim = 1, .dims = {x->dims[0]}};
    BA_TRY(ba_check_output("values", values, &like_x, true));
    BA_TRY(ba_check_output("scale", scale, &rows_of_x, false));
    if (num_threads < 0 || num_threads > BA_MAX_THREADS)
        return ba_fail(BA_ERROR_VALUE, "num_threads: expected 0 to %d, got %d", BA_MAX_THREADS, num_threads);
    return BA_OK;
}

/* Hands out the parts of one worker's scratch memory at `base` and returns their size; with base NULL, only the size counts. */
static int64_t lay_out_quantise(const quantise_call *c, char *base, float **floats, double **doubles) {
    const int64_t dim = ba_round_up(c->x->dims[1], BA_PACK_PAD);
    int64_t used = 0;
    *floats = (float *)ba_take(base, &used, c->pack ? dim * (int64_t)sizeof **floats : 0);
    *doubles = (double *)ba_take(base, &used, c->x->dtype == BA_FLOAT64 ? 0 : dim * (int64_t)sizeof **doubles);
    return used;
}

static void quantise_rows(void *context, int64_t item, int worker) {
    const quantise_call *c = context;
    const int64_t rows = c->x->dims[0], dim = c->x->dims[1], element = ba_dtype_size(c->x->dtype);
    float *floats;
    double *doubles;
    lay_out_quantise(c, c->scratch + worker * c->scratch_bytes, &floats, &doubles);
    for (int64_t i = item * c->item_rows; i < ba_min(rows, (item + 1) * c->item_rows) && !ba_stopped(); i++) {
        float *scale = (float *)c->scale->data + i * ba_step(c->scale, 0);
        if (dim == 0) { /* x and values have no memory */
            *scale = 1;
            continue;
        }
        const void *row = (const char *)c->x->data + i * ba_step(c->x, 0) * element, *packed;
        if (c->pack) {
            c->pack(floats, &packed, &row, NULL, 1, dim);
            row = floats;
        }
        if (c->x->dtype != BA_FLOAT64) {
            for (int64_t d = 0; d < dim; d++) doubles[d] = ((const float *)row)[d];
            row = doubles;
        }
        c->quantise((char *)c->values->data + i * ba_step(c->values, 0), scale, row, dim);
    }
}

ba_status ba_quantize_kv(const ba_tensor *x, const ba_tensor *values, const ba_tensor *scale, int num_threads) {
    BA_TRY(check_quantise(x, values, scale, num_threads));
    const ba_kernels *kernels = ba_kernels_active();
    quantise_call c = {
        .x = x, .values = values, .scale = scale, .pack = kernels->cache[x->dtype]->pack, .quantise = kernels->cache[values->dtype]->quantise};
    c.item_rows = ba_max(1, ba_work.quantised_numbers / ba_max(1, x->dims[1]));
    const int64_t items = ba_ceil_div(x->dims[0], c.item_rows);
    if (items == 0) return BA_OK;
    const bool small = ba_is_small((double)x->dims[0] * (double)x->dims[1], ba_work.small_quantised);
    const int threads = small ? 1 : (int)ba_min(ba_threads_for(num_threads), items);
    float *no_floats;
    double *no_doubles;
    c.scratch_bytes = lay_out_quantise(&c, NULL, &no_floats, &no_doubles);
    c.scratch = ba_arena_get((size_t)(threads * c.scratch_bytes));
    if (!c.scratch) return ba_fail(BA_ERROR_MEMORY, "scratch: expected %lld bytes of memory, got none", (long long)(threads * c.scratch_bytes));
    const ba_status status = ba_parallel(threads, items, quantise_rows, &c);
    ba_arena_release();
    return status;
}
