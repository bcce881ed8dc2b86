#include "ops/kv_cache/pages.h"

#include <inttypes.h>

#include "core/pool.h"
#include "core/status.h"
#include "ops/check.h"
#include "ops/kv_cache/kv_cache.h"

ba_status ba_take_pages(const char *name, const ba_tensor *t, ba_kv_layout layout, ba_pages *out) {
    BA_TRY(ba_check_float(name, t));
    return ba_take_cache_pages(name, t, layout, out);
}

ba_status ba_take_cache_pages(const char *name, const ba_tensor *t, ba_kv_layout layout, ba_pages *out) {
    BA_TRY(ba_check_cache(name, t, layout));
    const int row = ba_token_axis(layout), head = ba_head_axis(layout);
    const int64_t size = ba_dtype_size(t->dtype);
    *out = (ba_pages){t->data,         t->dims[0],           t->dims[row],           t->dims[head],
                      ba_cache_dim(t), ba_step(t, 0) * size, ba_step(t, row) * size, ba_step(t, head) * size};
    return BA_OK;
}

ba_status ba_check_table(const char *name, const ba_tensor *t, int64_t batch, int64_t count, const char *lens_name, const int64_t *tokens,
                         int64_t unit, int64_t units) {
    int64_t page_tokens, most_tokens;
    if (__builtin_mul_overflow(unit, units, &page_tokens)) page_tokens = BA_MOST_TOKENS;
    if (t->dtype != BA_INT32 && t->dtype != BA_INT64)
        return ba_fail(BA_ERROR_TYPE, BA_ARG("%s") ": expected int32 or int64, got %s", name, ba_dtype_name(t->dtype));
    if (t->ndim != 2 || t->dims[0] != batch)
        return ba_fail(BA_ERROR_VALUE, BA_ARG("%s") ": expected shape (%" PRId64 ", W), got %s", name, batch, ba_shape_text(t).chars);
    BA_TRY(ba_check_extent(name, t));
    if (__builtin_mul_overflow(t->dims[1], page_tokens, &most_tokens)) most_tokens = BA_MOST_TOKENS;
    for (int64_t b = 0, turn = 0; b < batch; b++) {
        BA_TRY(ba_look_at_turn(b));
        if (tokens[b] > BA_MOST_TOKENS)
            return ba_fail(BA_ERROR_VALUE, BA_ARG("%s") ": expected at most %d tokens, got %" PRId64 " at [%" PRId64 "]", lens_name, BA_MOST_TOKENS,
                           tokens[b], b);
        const int64_t needed = ba_ceil_div(tokens[b], page_tokens);
        if (tokens[b] < 0 || needed > t->dims[1])
            return ba_fail(BA_ERROR_VALUE,
                           BA_ARG("%s") ": expected 0 to the %" PRId64 " tokens that the %" PRId64 " pages of " BA_ARG("%s") " cover, got %" PRId64
                                                                                                                             " at [%" PRId64 "]",
                           lens_name, most_tokens, t->dims[1], name, tokens[b], b);
        for (int64_t i = 0; i < needed; i++) {
            BA_TRY(ba_look_at_turn(turn++));
            const int64_t page = ba_table_page(t, b, i);
            if (page < 0 || page >= count)
                return ba_fail(BA_ERROR_VALUE,
                               BA_ARG("%s") ": expected pages from 0 to %" PRId64 " within the request's length, got %" PRId64 " at [%" PRId64
                                            ", %" PRId64 "]",
                               name, count - 1, page, b, i);
        }
    }
    return BA_OK;
}
