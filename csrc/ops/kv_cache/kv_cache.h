/* Paged caches of K and V, as all operations on them check them. Internal. */
#ifndef BA_OPS_KV_CACHE_H
#define BA_OPS_KV_CACHE_H

#include "ops/problem.h"

/* Caches that have been checked. The batch stride of a view is the one from one page to the next. */
typedef struct ba_caches {
    ba_dtype dtype, v_dtype;                       /* of K; of V, which is that of K unless both have cells */
    int64_t pages, page_size, heads, k_dim, v_dim; /* page_size, heads and dims are at least 1 */
    int64_t k_width, v_width;                      /* the last axes: dims, or the bytes of cells */
    ba_view k, v, k_scale, v_scale;                /* data of the scales NULL: none, for float dtypes */
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

/* Checks the scales `t` of one cache with `heads` KV heads: required where its dtype is quantised, else refused. The view has no data where there are
 * none. */
ba_status ba_check_cache_scale(const char *name, const ba_tensor *t, const char *cache_name, const ba_tensor *cache, ba_kv_layout layout,
                               int64_t heads, ba_view *view);

/* Whether a scale is a number, or one number per KV head, and not one per token and head. Such scales do not change when tokens are written. */
static inline bool ba_is_fixed_scale(const ba_tensor *scale) { return scale->ndim < 2; }

#endif
