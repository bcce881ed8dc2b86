/* Summaries of pages may lie in the same pool as the pages of keys that they describe. This file checks that no page holds both, and that no summary
 * page is listed twice. */
#include "python/call.h"

static int64_t table_entry(const ba_tensor *table, int64_t row, int64_t column) {
    const int64_t at = row * table->strides[0] + column * table->strides[1];
    return table->dtype == BA_INT64 ? ((const int64_t *)table->data)[at] : ((const int32_t *)table->data)[at];
}

/* Marks the pages that a table uses with `mark`. Stops at a page that already has a mark of `taken`: returns -1 and sets *page to its number. Skips
 * numbers out of range, which the library refuses. */
static int mark_pages(uint8_t *marks, int64_t count, const ba_tensor *table, const ba_quest_metadata_args *a, int64_t page_size, uint8_t mark,
                      uint8_t taken, int64_t *page) {
    if (table->ndim != 2 || table->dims[0] != a->batch) return 0;
    for (int64_t b = 0; b < table->dims[0]; b++) {
        const int64_t length = a->end[b] < INT32_MAX ? a->end[b] : INT32_MAX; /* the library refuses such long requests */
        for (int64_t i = 0; i < table->dims[1] && i <= (length - 1) / page_size && length > 0; i++) {
            *page = table_entry(table, b, i);
            if (*page < 0 || *page >= count) continue;
            if (marks[*page] & taken) return -1;
            marks[*page] |= mark;
        }
    }
    return 0;
}

/* Marks the pages of opened tables, all of which are in use. */
static void mark_opened(uint8_t *marks, int64_t count, const ba_page_tables *tables, uint8_t mark) {
    for (int64_t i = 0; i < tables->first[tables->batch]; i++)
        if (tables->page[i] >= 0 && tables->page[i] < count) marks[tables->page[i]] |= mark;
}

int call_expect_summary_pages(const ba_quest_metadata_args *a, const ba_page_tables *opened) {
    const ba_tensor *summary = a->maxblocks.ndim ? &a->maxblocks : a->minblocks.ndim ? &a->minblocks : &a->meanblocks;
    if (a->k_cache.ndim != 4 || summary->ndim != 4) return 0; /* the library refuses these */
    const int64_t size = a->k_cache.dims[a->kv_layout == BA_NHD ? 1 : 2], rows = summary->dims[1], count = summary->dims[0];
    if (size < 1 || rows < 1 || count < 1 || rows > INT64_MAX / size) return 0;
    const bool pool =
        call_same_array(&a->k_cache, &a->maxblocks) || call_same_array(&a->k_cache, &a->minblocks) || call_same_array(&a->k_cache, &a->meanblocks);
    uint8_t *marks = PyMem_Calloc((size_t)count, 1);
    if (marks == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    int64_t page = 0;
    if (pool && opened) mark_opened(marks, count, opened, 1);
    else if (pool) mark_pages(marks, count, &a->block_tables, a, size, 1, 0, &page);
    const int status = mark_pages(marks, count, &a->metadata_tables, a, size * rows, 2, 1 | 2, &page);
    if (status < 0)
        arg_fail(PyExc_ValueError, BA_ARG("metadata_block_tables") ": expected pages that nothing else uses, got %lld, which %s", (long long)page,
                 marks[page] & 1 ? "holds keys" : "is listed twice");
    PyMem_Free(marks);
    return status;
}
