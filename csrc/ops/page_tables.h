/* Page tables: which pages hold each request's tokens. They are checked and copied once, for one call or for all calls of a decode step, so that
 * what was checked is what is used, whatever becomes of the caller's arrays meanwhile. Internal. */
#ifndef BA_OPS_PAGE_TABLES_H
#define BA_OPS_PAGE_TABLES_H

#include "blitz_attn.h"
#include "core/common.h"

/* All zero: closed. */
typedef struct ba_page_tables {
    int64_t batch, page_size;
    int64_t longest;      /* tokens of the longest request */
    int64_t queries;      /* of all requests */
    int64_t most_queries; /* of one request */
    uint64_t page_limit;  /* all page numbers, taken as unsigned, are smaller: a negative number is out of every cache's range */
    int64_t *seq_lens;    /* [batch] */
    int64_t *first;       /* [batch + 1]: request b's page numbers are page[first[b]] .. page[first[b + 1] - 1] */
    int64_t *cu_q;        /* [batch + 1], or NULL: one query per request */
    int64_t *page;        /* those in use: ceil(seq_lens[b] / page_size) of each request */
} ba_page_tables;

/* Checks the requests of `args` (block_tables, indptr, seq_lens, cu_q, batch) for pages of page_size >= 1 tokens, and copies them. `pages`: how many
 * pages the cache has, `queries`: how many queries the call has; -1: not known yet. Only on success is there something to close. */
ba_status ba_open_page_tables(const ba_paged_args *args, int64_t page_size, int64_t pages, int64_t queries, ba_page_tables *tables);

/* Refuses page numbers that a cache of `pages` pages does not have. */
ba_status ba_check_page_numbers(const ba_page_tables *tables, int64_t pages);

void ba_close_page_tables(ba_page_tables *tables);

#endif
