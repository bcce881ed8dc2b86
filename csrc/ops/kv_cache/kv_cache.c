#include "ops/kv_cache/kv_cache.h"

#include <inttypes.h>
#include <math.h>

#include "core/status.h"
#include "kernels/kernels.h"
#include "ops/check.h"

int64_t ba_cache_dim(const ba_tensor *t) {
    const int64_t cell = ba_cell_bytes(t->dtype);
    return cell ? t->dims[3] / cell * BA_CELL_DIMS : t->dims[3];
}

ba_status ba_check_cache(const char *name, const ba_tensor *t, ba_kv_layout layout) {
    if ((unsigned)layout > BA_HND) return ba_fail(BA_ERROR_VALUE, BA_ARG("kv_layout") ": expected NHD or HND, got %d", (int)layout);
    const int token_axis = ba_token_axis(layout), head_axis = ba_head_axis(layout);
    BA_TRY(ba_check_cache_dtype(name, t));
    if (t->ndim != 4)
        return ba_fail(BA_ERROR_VALUE, BA_ARG("%s") ": expected shape %s, got %s", name,
                       layout == BA_NHD ? "(pages, page_size, Hkv, D)" : "(pages, Hkv, page_size, D)", ba_shape_text(t).chars);
    const int64_t cell = ba_cell_bytes(t->dtype);
    if (cell && (t->dims[3] < cell || t->dims[3] % cell || ba_cache_dim(t) > BA_MAX_HEAD_DIM))
        return ba_fail(BA_ERROR_VALUE,
                       BA_ARG("%s") ": expected a last axis of %" PRId64 " bytes for each 32 dims of %s, and a head dim from 32 to %d, got %s", name,
                       cell, ba_dtype_name(t->dtype), BA_MAX_HEAD_DIM, ba_shape_text(t).chars);
    if (!cell && (t->dims[3] < 1 || t->dims[3] > BA_MAX_HEAD_DIM))
        return ba_fail(BA_ERROR_VALUE, BA_ARG("%s") ": expected a head dim from 1 to %d, got %s", name, BA_MAX_HEAD_DIM, ba_shape_text(t).chars);
    if (t->dims[token_axis] < 1)
        return ba_fail(BA_ERROR_VALUE, BA_ARG("%s") ": expected a page_size of at least 1, got %s", name, ba_shape_text(t).chars);
    if (t->dims[head_axis] < 1) return ba_fail(BA_ERROR_VALUE, BA_ARG("%s") ": expected at least one head, got %s", name, ba_shape_text(t).chars);
    BA_TRY(ba_check_last_axis(name, t));
    return ba_check_extent(name, t);
}

static ba_view cache_view(const ba_tensor *t, ba_kv_layout layout) {
    return (ba_view){t->data, ba_step(t, 0), ba_step(t, ba_head_axis(layout)), ba_step(t, ba_token_axis(layout))};
}

ba_status ba_check_cache_scale(const char *name, const ba_tensor *t, const char *cache_name, const ba_tensor *cache, ba_kv_layout layout,
                               int64_t heads, ba_view *view) {
    *view = (ba_view){0};
    if (!ba_is_quantised(cache->dtype)) {
        if (ba_given(t))
            return ba_fail(BA_ERROR_VALUE, BA_ARG("%s") ": expected none with %s " BA_ARG("%s") ", got shape %s", name, ba_dtype_name(cache->dtype),
                           cache_name, ba_shape_text(t).chars);
        return BA_OK;
    }
    const ba_tensor per_token = {.ndim = 3, .dims = {cache->dims[0], cache->dims[1], cache->dims[2]}};
    if (!ba_given(t))
        return ba_fail(BA_ERROR_VALUE, BA_ARG("%s") ": expected scales of shape %s, (%" PRId64 ",) or () for %s " BA_ARG("%s") ", got none", name,
                       ba_shape_text(&per_token).chars, heads, ba_dtype_name(cache->dtype), cache_name);
    if (t->dtype != BA_FLOAT32) return ba_fail(BA_ERROR_TYPE, BA_ARG("%s") ": expected float32, got %s", name, ba_dtype_name(t->dtype));
    bool fits = t->ndim == 0 || (t->ndim == 1 && t->dims[0] == heads) || t->ndim == 3;
    for (int i = 0; t->ndim == 3 && i < 3; i++) fits &= t->dims[i] == cache->dims[i];
    if (!fits)
        return ba_fail(BA_ERROR_VALUE,
                       BA_ARG("%s") ": expected shape %s like " BA_ARG("%s") ", (%" PRId64
                                                                             ",) for one number per KV head, or () for one number, got %s",
                       name, ba_shape_text(&per_token).chars, cache_name, heads, ba_shape_text(t).chars);
    BA_TRY(ba_check_extent(name, t));
    if (!ba_is_fixed_scale(t)) {
        *view = cache_view(t, layout);
        return BA_OK;
    }
    *view = (ba_view){.data = t->data, .head_stride = t->ndim ? ba_step(t, 0) : 0};
    for (int64_t i = 0; i < (t->ndim ? heads : 1); i++) {
        const float scale = ((const float *)t->data)[i * view->head_stride];
        if (!(scale > 0) || !isfinite(scale))
            return ba_fail(BA_ERROR_VALUE, BA_ARG("%s") ": expected positive numbers within the range of float32, got %s", name,
                           ba_number_text((double)scale, BA_FLOAT32).chars);
    }
    return BA_OK;
}

ba_status ba_check_caches(const ba_paged_args *args, ba_caches *c) {
    const ba_tensor *k = &args->k_cache, *v = &args->v_cache;
    const ba_kv_layout layout = args->kv_layout;
    BA_TRY(ba_check_cache("k_cache", k, layout));
    BA_TRY(ba_check_cache("v_cache", v, layout));
    if (v->dtype != k->dtype && ba_has_cells(k->dtype) && !ba_has_cells(v->dtype))
        return ba_fail(BA_ERROR_TYPE, BA_ARG("v_cache") ": expected q8_0, q4_0 or q4_1 with " BA_ARG("k_cache") " of %s, got %s",
                       ba_dtype_name(k->dtype), ba_dtype_name(v->dtype));
    if (v->dtype != k->dtype && !ba_has_cells(k->dtype))
        return ba_fail(BA_ERROR_TYPE, BA_ARG("v_cache") ": expected dtype %s like " BA_ARG("k_cache") ", got %s", ba_dtype_name(k->dtype),
                       ba_dtype_name(v->dtype));
    for (int i = 0; i < 3; i++)
        if (v->dims[i] != k->dims[i])
            return ba_fail(BA_ERROR_VALUE, BA_ARG("v_cache") ": expected the first three axes of " BA_ARG("k_cache") " %s, got %s",
                           ba_shape_text(k).chars, ba_shape_text(v).chars);
    *c = (ba_caches){.dtype = k->dtype,
                     .v_dtype = v->dtype,
                     .pages = k->dims[0],
                     .page_size = k->dims[ba_token_axis(layout)],
                     .heads = k->dims[ba_head_axis(layout)],
                     .k_dim = ba_cache_dim(k),
                     .v_dim = ba_cache_dim(v),
                     .k_width = k->dims[3],
                     .v_width = v->dims[3],
                     .k = cache_view(k, layout),
                     .v = cache_view(v, layout)};
    BA_TRY(ba_check_cache_scale("k_scale", &args->k_scale, "k_cache", k, layout, c->heads, &c->k_scale));
    return ba_check_cache_scale("v_scale", &args->v_scale, "v_cache", v, layout, c->heads, &c->v_scale);
}
