/* Makes summaries of pages: the largest, the smallest and the mean element of each channel of their keys. */
#include "ops/kv_cache/summarise_pages.h"

#include <inttypes.h>
#include <string.h>

#include "core/arena.h"
#include "core/float_mode.h"
#include "core/pool.h"
#include "core/status.h"
#include "kernels/kernels.h"
#include "kernels/work_tuning.h"
#include "ops/check.h"
#include "ops/kv_cache/kv_cache.h"
#include "ops/kv_cache/pages.h"
#include "ops/scratch.h"

/* Checks one of the three summaries. *rows is the number of rows per summary page, and *count the number of summary pages; both are 0 before the
 * first summary, and must be the same for all given summaries. */
static ba_status take_summary(const ba_summary_call *c, const char *name, const ba_tensor *t, ba_pages *out, int64_t *rows, int64_t *count) {
    const ba_pages *k = &c->k;
    const ba_dtype cache = c->args->k_cache.dtype;
    if (!ba_given(t)) return BA_OK;
    BA_TRY(ba_take_pages(name, t, BA_NHD, out));
    BA_TRY(ba_check_places(name, t));
    if (t->dtype != c->dtype && c->dtype != cache)
        return ba_fail(BA_ERROR_TYPE, BA_ARG("%s") ": expected dtype float32 with " BA_ARG("k_cache") " of %s, got %s", name, ba_dtype_name(cache),
                       ba_dtype_name(t->dtype));
    if (t->dtype != c->dtype)
        return ba_fail(BA_ERROR_TYPE, BA_ARG("%s") ": expected dtype %s like " BA_ARG("k_cache") ", got %s", name, ba_dtype_name(c->dtype),
                       ba_dtype_name(t->dtype));
    if (out->heads != k->heads || out->dim != k->dim || (*rows && (out->rows != *rows || out->count != *count)))
        return ba_fail(BA_ERROR_VALUE,
                       BA_ARG("%s") ": expected shape (summary pages, rows, %" PRId64 ", %" PRId64 "), the same for each summary, got %s", name,
                       k->heads, k->dim, ba_shape_text(t).chars);
    *rows = out->rows;
    *count = out->count;
    return BA_OK;
}

/* Treats all heads as one wide head where they lie side by side in every array, so that a token's row is read in one piece. Keys that need `widen`
 * keep their heads, because their scales may differ from head to head. */
static void join_heads(ba_summary_call *c) {
    if (c->widen) return;
    const int64_t step = c->k.dim * ba_dtype_size(c->args->k_cache.dtype);
    ba_pages *const all[] = {&c->k, &c->largest, &c->smallest, &c->mean};
    for (int i = 0; i < 4; i++)
        if (all[i]->data && all[i]->head_stride != step) return;
    c->k.dim *= c->k.heads;
    c->k.heads = 1;
}

/* Makes float32 rows of the quantised keys of a page, times their scales where they have some, and sets `rows` to the new rows. */
static void widen_rows(const ba_summary_call *c, int64_t page, int64_t head, int64_t tokens, const void **rows, int worker) {
    int64_t used = 0;
    float scales[1024];
    for (int64_t t = 0; t < tokens && c->scale.data; t++) scales[t] = *(const float *)(void *)ba_row_of(&c->scale, sizeof(float), page, head, t);
    const void *packed[1024];
    c->widen(ba_take(c->scratch + worker * c->scratch_bytes, &used, c->wide_bytes), packed, rows, c->scale.data ? scales : NULL, tokens, c->k.dim);
    memcpy(rows, packed, (size_t)tokens * sizeof *rows);
}

/* Summarises one run of pages of one (request, KV head). */
static void summarise_item(void *context, int64_t item, int worker) {
    const ba_summary_call *c = context;
    const ba_quest_metadata_args *a = c->args;
    const int64_t batch = item / c->runs / c->k.heads, head = item / c->runs % c->k.heads, size = c->k.rows;
    const int64_t rows_per_page = c->largest.data ? c->largest.rows : c->smallest.data ? c->smallest.rows : c->mean.rows;
    const int64_t begin = a->begin ? a->begin[batch] : 0, end = a->end[batch];
    if (end <= begin) return;
    const void *rows[1024];
    const int64_t first = begin / size + item % c->runs * ba_work.quest.pages, stop = ba_round_up(ba_ceil_div(end, size), rows_per_page);
    for (int64_t page = first; page < ba_min(stop, first + ba_work.quest.pages); page++) {
        const int64_t summary = ba_table_page(&a->metadata_tables, batch, page / rows_per_page), row = page % rows_per_page;
        const int64_t tokens = ba_min(size, end - page * size);
        char *high = c->largest.data ? ba_page_row(&c->largest, summary, row, head) : NULL,
             *low = c->smallest.data ? ba_page_row(&c->smallest, summary, row, head) : NULL;
        char *mean = c->mean.data ? ba_page_row(&c->mean, summary, row, head) : NULL;
        if (tokens <= 0) { /* the rest of the last summary page becomes 0 */
            const size_t bytes = (size_t)(c->k.dim * ba_dtype_size(c->dtype));
            if (high) memset(high, 0, bytes);
            if (low) memset(low, 0, bytes);
            if (mean) memset(mean, 0, bytes);
            continue;
        }
        const int64_t physical = ba_request_page(c->opened, &a->block_tables, batch, page);
        for (int64_t t = 0; t < tokens; t++) rows[t] = ba_page_row(&c->k, physical, t, head);
        if (c->widen) widen_rows(c, physical, head, tokens, rows, worker);
        c->summarise(rows, tokens, c->k.dim, high, low, mean);
    }
}

/* Checks everything, so that ba_run_summaries() fails only for want of memory or where it is interrupted. */
ba_status ba_open_summaries(const ba_quest_metadata_args *a, const ba_page_tables *opened, ba_summary_call *c) {
    *c = (ba_summary_call){.args = a, .opened = opened};
    BA_TRY(ba_take_cache_pages("k_cache", &a->k_cache, a->kv_layout, &c->k));
    if (c->k.rows > 1024)
        return ba_fail(BA_ERROR_VALUE, BA_ARG("k_cache") ": expected pages of at most 1024 tokens, got %s", ba_shape_text(&a->k_cache).chars);
    BA_TRY(ba_check_cache_scale("k_scale", &a->k_scale, "k_cache", &a->k_cache, a->kv_layout, c->k.heads, &c->scale));
    c->dtype = ba_is_float(a->k_cache.dtype) ? a->k_cache.dtype : BA_FLOAT32;
    int64_t rows = 0, count = 0;
    BA_TRY(take_summary(c, "maxblocks", &a->maxblocks, &c->largest, &rows, &count));
    BA_TRY(take_summary(c, "minblocks", &a->minblocks, &c->smallest, &rows, &count));
    BA_TRY(take_summary(c, "meanblocks", &a->meanblocks, &c->mean, &rows, &count));
    if (!rows) return ba_fail(BA_ERROR_VALUE, BA_ARG("maxblocks") ": expected a summary to write, got none");
    if (!a->end) return ba_fail(BA_ERROR_VALUE, BA_ARG("seq_lens") ": expected one length per request, got none");
    for (int64_t b = 0; a->begin && b < a->batch; b++)
        if (a->begin[b] < 0)
            return ba_fail(BA_ERROR_VALUE, BA_ARG("start_lens") ": expected lengths of at least 0, got %" PRId64 " at [%" PRId64 "]", a->begin[b], b);
    BA_TRY(ba_check_threads(a->num_threads));
    if (opened) BA_TRY(ba_check_page_numbers(opened, c->k.count));
    else BA_TRY(ba_check_table("block_tables", &a->block_tables, a->batch, c->k.count, "seq_lens", a->end, c->k.rows, 1));
    BA_TRY(ba_check_table("metadata_block_tables", &a->metadata_tables, a->batch, count, "seq_lens", a->end, c->k.rows, rows));
    c->rows = rows;
    return BA_OK;
}

ba_status ba_run_summaries(ba_summary_call *c) {
    const ba_quest_metadata_args *const a = c->args;
    const ba_kernels *kernels = ba_kernels_active();
    c->summarise = kernels->cache[c->dtype]->summarise;
    if (!ba_is_float(a->k_cache.dtype)) c->widen = kernels->cache[a->k_cache.dtype]->pack;
    double tokens = 0;
    for (int64_t b = 0; b < a->batch; b++) {
        const int64_t begin = a->begin ? a->begin[b] : 0;
        tokens += (double)ba_max(0, a->end[b] - begin);
        c->runs = ba_max(c->runs, ba_ceil_div(ba_round_up(ba_ceil_div(a->end[b], c->k.rows), c->rows) - begin / c->k.rows, ba_work.quest.pages));
    }
    if (tokens == 0) return BA_OK;
    const double work = tokens * (double)(c->k.heads * c->k.dim);
    join_heads(c);
    const int64_t items = a->batch * c->k.heads * c->runs;
    const int threads = ba_threads_of_call(a->num_threads, work, ba_work.small_work, items);
    if (!c->widen) return ba_parallel(threads, items, summarise_item, c);
    c->wide_bytes = c->k.rows * ba_round_up(c->k.dim, BA_PACK_PAD) * (int64_t)sizeof(float);
    ba_take(NULL, &c->scratch_bytes, c->wide_bytes);
    BA_TRY(ba_get_scratch(threads * c->scratch_bytes, &c->scratch));
    const ba_status status = ba_parallel(threads, items, summarise_item, c);
    ba_arena_release();
    return status;
}

ba_status ba_quest_metadata(const ba_quest_metadata_args *args) {
    BA_IN_USUAL_MODE;
    ba_summary_call c;
    BA_TRY(ba_check_pointer("args", args));
    BA_TRY(ba_open_summaries(args, NULL, &c));
    return ba_run_summaries(&c);
}
