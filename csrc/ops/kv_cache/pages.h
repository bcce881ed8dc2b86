/* Pages of keys or of summaries, and the tables that list them, for the operations that select pages (Quest). Internal. */
#ifndef BA_OPS_PAGES_H
#define BA_OPS_PAGES_H

#include "ops/kv_cache/page_tables.h"
#include "ops/problem.h"

/* A cache, or an array of summaries, whose rows are found by (page, row, head), whatever its layout. */
typedef struct ba_pages {
    char *data;
    int64_t count, rows, heads, dim, page_stride, row_stride, head_stride; /* strides in bytes */
} ba_pages;

static inline char *ba_page_row(const ba_pages *p, int64_t page, int64_t row, int64_t head) {
    return p->data + page * p->page_stride + row * p->row_stride + head * p->head_stride;
}

/* Page number `index` of a request's table. */
static inline int64_t ba_table_page(const ba_tensor *table, int64_t batch, int64_t index) {
    return ba_list_entry(table, batch * table->strides[0] + index * table->strides[1]);
}

/* The same from `opened`, or, where that is NULL, from `table`. */
static inline int64_t ba_request_page(const ba_page_tables *opened, const ba_tensor *table, int64_t batch, int64_t index) {
    return opened ? opened->page[opened->first[batch] + index] : ba_table_page(table, batch, index);
}

/* Checks the dtype, the shape and the strides of a cache or an array of summaries, and fills `out`. */
ba_status ba_take_pages(const char *name, const ba_tensor *t, ba_kv_layout layout, ba_pages *out);

/* The same for a cache, whose dtype may also be quantised or have cells. */
ba_status ba_take_cache_pages(const char *name, const ba_tensor *t, ba_kv_layout layout, ba_pages *out);

/* Checks a table of pages. For each request b, it must name enough pages for tokens[b] tokens, all of them among the `count` pages of the array.
 * Sentences call the numbers of tokens `lens_name`. A page holds unit * units tokens; this product may exceed int64. */
ba_status ba_check_table(const char *name, const ba_tensor *t, int64_t batch, int64_t count, const char *lens_name, const int64_t *tokens,
                         int64_t unit, int64_t units);

#endif
