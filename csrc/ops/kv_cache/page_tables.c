#include "ops/kv_cache/page_tables.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "core/faults.h"
#include "core/pool.h"
#include "core/status.h"
#include "ops/check.h"
#include "ops/problem.h"

/* Checks the kind and shape of the tables and the length of each request. Adds the number of pages in use to *used. */
static ba_status check_requests(const ba_paged_args *args, int64_t page_size, int64_t *used) {
    const ba_tensor *tables = &args->block_tables;
    const int64_t *indptr = args->indptr, *seq_lens = args->seq_lens;
    if (tables->dtype != BA_INT32 && tables->dtype != BA_INT64)
        return ba_fail(BA_ERROR_TYPE, BA_ARG("block_tables") ": expected int32 or int64, got %s", ba_dtype_name(tables->dtype));
    if (tables->ndim != (indptr ? 1 : 2) || (!indptr && tables->dims[0] != args->batch))
        return ba_fail(BA_ERROR_VALUE, BA_ARG("block_tables") ": expected shape %s with %" PRId64 " requests, got %s", indptr ? "(N,)" : "(B, W)",
                       args->batch, ba_shape_text(tables).chars);
    BA_TRY(ba_check_extent("block_tables", tables));
    for (int64_t b = 0; indptr && b < args->batch; b++)
        if (indptr[b] < 0 || indptr[b + 1] < indptr[b] || indptr[b + 1] > tables->dims[0])
            return ba_fail(BA_ERROR_VALUE,
                           BA_ARG("indptr") ": expected rising numbers from 0 to %" PRId64 ", got %" PRId64 " and %" PRId64 " at [%" PRId64 "]",
                           tables->dims[0], indptr[b], indptr[b + 1], b);
    if (!seq_lens) return ba_fail(BA_ERROR_VALUE, BA_ARG("seq_lens") ": expected one length per request, got none");
    for (int64_t b = 0; b < args->batch; b++) {
        BA_TRY(ba_look_at_turn(b));
        const int64_t width = indptr ? indptr[b + 1] - indptr[b] : tables->dims[1];
        if (seq_lens[b] > BA_MOST_TOKENS)
            return ba_fail(BA_ERROR_VALUE, BA_ARG("seq_lens") ": expected lengths of at most %d tokens, got %" PRId64 " at [%" PRId64 "]",
                           BA_MOST_TOKENS, seq_lens[b], b);
        if (seq_lens[b] < 0 || ba_ceil_div(seq_lens[b], page_size) > width)
            return ba_fail(BA_ERROR_VALUE,
                           BA_ARG("seq_lens") ": expected lengths from 0 to what the table's %" PRId64 " pages of %" PRId64
                                              " tokens hold, got %" PRId64 " at [%" PRId64 "]",
                           width, page_size, seq_lens[b], b);
        *used += ba_ceil_div(seq_lens[b], page_size);
    }
    return BA_OK;
}

ba_status ba_check_queries(const int64_t *cu_q, const int64_t *seq_lens, const int64_t *q_begin, int64_t batch, int64_t all) {
    int64_t queries;
    if (!cu_q) return BA_OK;
    if (cu_q[0] != 0) return ba_fail(BA_ERROR_VALUE, BA_ARG("cu_q") ": expected 0 at [0], got %" PRId64, cu_q[0]);
    if (all >= 0 && cu_q[batch] != all)
        return ba_fail(BA_ERROR_VALUE, BA_ARG("q_lens") ": expected lengths that add up to " BA_ARG("q") "'s %" PRId64 " tokens, got %" PRId64, all,
                       cu_q[batch]);
    for (int64_t b = 0; b < batch; b++) {
        BA_TRY(ba_look_at_turn(b));
        if (__builtin_sub_overflow(cu_q[b + 1], cu_q[b], &queries))
            return ba_fail(BA_ERROR_VALUE, BA_ARG("cu_q") ": expected numbers that rise by at most 2**63 - 1, got %" PRId64 " after %" PRId64,
                           cu_q[b + 1], cu_q[b]);
        if (q_begin && queries < 0)
            return ba_fail(BA_ERROR_VALUE, BA_ARG("q_lens") ": expected at least 0, got %" PRId64 " at [%" PRId64 "]", queries, b);
        if (!q_begin && (queries < 0 || queries > seq_lens[b]))
            return ba_fail(BA_ERROR_VALUE,
                           BA_ARG("q_lens") ": expected 0 to " BA_ARG("seq_lens") "[%" PRId64 "] = %" PRId64 ", got %" PRId64 " at [%" PRId64 "]", b,
                           seq_lens[b], queries, b);
    }
    return BA_OK;
}

/* Copies n page numbers that stand `step` elements apart. Returns the largest of them and of `limit`, as unsigned numbers. */
#define DEFINE_COPY_PAGES(type)                                                                                                                      \
    static uint64_t copy_pages_##type(int64_t *to, const type *from, int64_t step, int64_t n, uint64_t limit) {                                      \
        for (int64_t i = 0; i < n; i++) {                                                                                                            \
            const int64_t page = from[i * step];                                                                                                     \
            to[i] = page;                                                                                                                            \
            limit = (uint64_t)page > limit ? (uint64_t)page : limit;                                                                                 \
        }                                                                                                                                            \
        return limit;                                                                                                                                \
    }
DEFINE_COPY_PAGES(int32_t)
DEFINE_COPY_PAGES(int64_t)
#undef DEFINE_COPY_PAGES

/* Copies the n page numbers of a request. `steps` counts the pages of all requests. */
static ba_status copy_pages(const ba_tensor *tables, int64_t at, int64_t step, int64_t n, int64_t *to, uint64_t *largest, int64_t *steps) {
    while (n > 0) {
        const int64_t now = ba_min(n, BA_TURNS_PER_LOOK);
        if (tables->dtype == BA_INT32) *largest = copy_pages_int32_t(to, (const int32_t *)tables->data + at, step, now, *largest);
        else *largest = copy_pages_int64_t(to, (const int64_t *)tables->data + at, step, now, *largest);
        at += now * step;
        to += now;
        n -= now;
        BA_TRY(ba_look_after(steps, now));
    }
    return BA_OK;
}

/* Fills the opened tables, whose memory is allocated. */
static ba_status copy_requests(const ba_paged_args *args, ba_page_tables *t) {
    const ba_tensor *tables = &args->block_tables;
    const int64_t step = tables->strides[tables->ndim - 1];
    uint64_t largest = 0;
    int64_t steps = 0;
    t->first[0] = 0;
    for (int64_t b = 0; b < t->batch; b++) {
        BA_TRY(ba_look_at_turn(b));
        const int64_t pages = ba_ceil_div(args->seq_lens[b], t->page_size);
        t->seq_lens[b] = args->seq_lens[b];
        t->longest = ba_max(t->longest, t->seq_lens[b]);
        t->first[b + 1] = t->first[b] + pages;
        if (!pages) continue; /* a table without pages may be a null pointer, and have any strides */
        const int64_t at = args->indptr ? args->indptr[b] * step : b * tables->strides[0];
        BA_TRY(copy_pages(tables, at, step, pages, t->page + t->first[b], &largest, &steps));
    }
    if (t->first[t->batch]) t->page_limit = largest < UINT64_MAX ? largest + 1 : largest;
    for (int64_t b = 0; t->q_begin && b < t->batch; b++) t->q_begin[b] = args->q_begin[b];
    t->queries = t->batch;
    t->most_queries = 1;
    if (!args->cu_q) return BA_OK;
    memcpy(t->cu_q, args->cu_q, (size_t)(t->batch + 1) * sizeof *t->cu_q);
    t->queries = t->cu_q[t->batch];
    t->most_queries = 0;
    for (int64_t b = 0; b < t->batch; b++) t->most_queries = ba_max(t->most_queries, t->cu_q[b + 1] - t->cu_q[b]);
    return BA_OK;
}

ba_status ba_refuse_page(int64_t page, int64_t pages, int64_t number, int64_t request) {
    return ba_fail(BA_ERROR_VALUE,
                   BA_ARG("block_tables") ": expected pages from 0 to %" PRId64 " within the request's length, got %" PRId64 " for page %" PRId64
                                          " of request %" PRId64,
                   pages - 1, page, number, request);
}

ba_status ba_check_page_numbers(const ba_page_tables *t, int64_t pages) {
    if (t->page_limit <= (uint64_t)pages) return BA_OK;
    for (int64_t b = 0; b < t->batch; b++)
        for (int64_t i = 0; i < t->first[b + 1] - t->first[b]; i++) {
            BA_TRY(ba_look_at_turn(t->first[b] + i));
            const int64_t page = t->page[t->first[b] + i];
            if (page < 0 || page >= pages) return ba_refuse_page(page, pages, i, b);
        }
    return BA_OK;
}

ba_status ba_open_page_tables(const ba_paged_args *args, int64_t page_size, int64_t pages, int64_t queries, ba_page_tables *t) {
    int64_t used = 0;
    if (args->batch < 0) return ba_fail(BA_ERROR_VALUE, BA_ARG("batch") ": expected at least 0 requests, got %" PRId64, args->batch);
    if (args->kv_split < 0 || args->kv_split % page_size)
        return ba_fail(BA_ERROR_VALUE, BA_ARG("kv_split") ": expected a positive multiple of the %" PRId64 " tokens of a page, got %" PRId64,
                       page_size, args->kv_split);
    BA_TRY(ba_check_begins(args->q_begin, args->batch));
    BA_TRY(check_requests(args, page_size, &used));
    BA_TRY(ba_check_queries(args->cu_q, args->seq_lens, args->q_begin, args->batch, queries));
    const int64_t numbers = args->batch + (args->batch + 1) + (args->cu_q ? args->batch + 1 : 0) + (args->q_begin ? args->batch : 0) + used;
    int64_t *memory = ba_fault(BA_FAULT_MEMORY) ? NULL : malloc((size_t)numbers * sizeof *memory);
    if (!memory)
        return ba_fail(BA_ERROR_MEMORY, BA_ARG("block_tables") ": expected %lld bytes of memory for a copy, got none", (long long)numbers * 8);
    ba_page_tables copied = {
        .batch = args->batch, .page_size = page_size, .kv_split = args->kv_split, .seq_lens = memory, .first = memory + args->batch};
    copied.page = copied.first + args->batch + 1;
    if (args->cu_q) {
        copied.cu_q = copied.page;
        copied.page += args->batch + 1;
    }
    if (args->q_begin) {
        copied.q_begin = copied.page;
        copied.page += args->batch;
    }
    ba_status status = copy_requests(args, &copied);
    if (status == BA_OK && pages >= 0) status = ba_check_page_numbers(&copied, pages);
    if (status == BA_OK) *t = copied;
    else ba_close_page_tables(&copied);
    return status;
}

void ba_close_page_tables(ba_page_tables *t) {
    free(t->seq_lens); /* the one allocation; all other arrays lie behind seq_lens in it */
    *t = (ba_page_tables){0};
}
