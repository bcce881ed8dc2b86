/* Paged caches of K and V, and the checks of them that all operations share. Internal. */
#ifndef BA_OPS_KV_CACHE_H
#define BA_OPS_KV_CACHE_H

#include "ops/problem.h"

/* Caches that have been checked. The batch stride of a view is the stride from one page to the next. */
typedef struct ba_caches {
    ba_dtype dtype, v_dtype;                       /* of K; of V, which may differ only where both have cells */
    int64_t pages, page_size, heads, k_dim, v_dim; /* page_size, heads and dims are at least 1 */
    int64_t k_width, v_width;                      /* the last axes: dims, or the bytes of cells */
    ba_view k, v, k_scale, v_scale;                /* a scale's data is NULL for dtypes that are not quantised */
} ba_caches;

/* The axes of a cache along which its tokens and its heads lie. */
static inline int ba_token_axis(ba_kv_layout layout) { return layout == BA_NHD ? 1 : 2; }
static inline int ba_head_axis(ba_kv_layout layout) { return layout == BA_NHD ? 2 : 1; }

/* The head dim of a cache that has been checked. */
int64_t ba_cache_dim(const ba_tensor *t);

/* Checks kv_layout, and the dtype, the shape and the strides of one cache, or of summaries of its pages. */
ba_status ba_check_cache(const char *name, const ba_tensor *t, ba_kv_layout layout);

/* Checks kv_layout, k_cache, v_cache, k_scale and v_scale of `args`. */
ba_status ba_check_caches(const ba_paged_args *args, ba_caches *caches);

/* Checks the scales `t` of one cache with `heads` KV heads. Scales are required where the cache's dtype is quantised, and refused elsewhere. Without
 * scales, the view has no data. */
ba_status ba_check_cache_scale(const char *name, const ba_tensor *t, const char *cache_name, const ba_tensor *cache, ba_kv_layout layout,
                               int64_t heads, ba_view *view);

/* Whether the scales are a single number or one number per KV head, instead of one per token and head. Writing tokens does not change such scales. */
static inline bool ba_is_fixed_scale(const ba_tensor *scale) { return scale->ndim < 2; }

#endif
