/* Page tables say which pages hold the tokens of each request, and at which tokens its queries stand. They are checked and copied once, for one call
 * or for all calls of a decode step. Calls use the copy, so the caller may change its arrays after the check. Internal. */
#ifndef BA_OPS_PAGE_TABLES_H
#define BA_OPS_PAGE_TABLES_H

#include "blitz_attn.h"
#include "core/common.h"

/* Opened tables, or closed ones, whose members are all zero. */
typedef struct ba_page_tables {
    int64_t batch, page_size;
    int64_t kv_split;     /* 0: none. Else requests are attended in KV splits of this many tokens */
    int64_t longest;      /* tokens of the longest request */
    int64_t queries;      /* of one head, of all requests */
    int64_t most_queries; /* of one head, of one request */
    uint64_t page_limit;  /* 1 + the largest page number, where a negative number counts as its unsigned value and so exceeds every cache */
    int64_t *seq_lens;    /* [batch] */
    int64_t *first;       /* [batch + 1]: request b's page numbers are page[first[b]] .. page[first[b + 1] - 1] */
    int64_t *cu_q;        /* [batch + 1], or NULL: one query per request */
    int64_t *q_begin;     /* [batch]: token number of each request's query 0, or NULL: the queries are the last tokens */
    int64_t *page;        /* the page numbers in use: ceil(seq_lens[b] / page_size) of each request */
} ba_page_tables;

/* Checks block_tables, indptr, seq_lens, cu_q, q_begin, kv_split and batch of `args` for pages of page_size >= 1 tokens, and copies them. `pages` is
 * the number of pages of the cache, and `queries` the number of all queries; each is -1 where it is not known yet. On failure there is nothing to
 * close. */
ba_status ba_open_page_tables(const ba_paged_args *args, int64_t page_size, int64_t pages, int64_t queries, ba_page_tables *tables);

/* Checks cumulative numbers of queries. Unless q_begin is given, request b has at most seq_lens[b] queries. `all` is the number of all queries, or -1
 * where it is not known. Does nothing where cu_q is NULL. */
ba_status ba_check_queries(const int64_t *cu_q, const int64_t *seq_lens, const int64_t *q_begin, int64_t batch, int64_t all);

/* Fails where a page number is beyond a cache of `pages` pages. */
ba_status ba_check_page_numbers(const ba_page_tables *tables, int64_t pages);

/* Fails because page `page`, entry `number` of a request's table, is beyond a cache of `pages` pages. */
ba_status ba_refuse_page(int64_t page, int64_t pages, int64_t number, int64_t request);

/* Frees the copies and sets `tables` to zero. Does nothing to closed tables. */
void ba_close_page_tables(ba_page_tables *tables);

#endif
