/* Summaries of pages. A call is first opened and then run, also with page tables that were opened for all calls of a step. Internal. */
#ifndef BA_OPS_SUMMARISE_PAGES_H
#define BA_OPS_SUMMARISE_PAGES_H

#include "kernels/kernels.h"
#include "ops/kv_cache/page_tables.h"
#include "ops/kv_cache/pages.h"
#include "ops/problem.h"

typedef struct ba_summary_call {
    const ba_quest_metadata_args *args;
    const ba_page_tables *opened;        /* opened tables, or NULL */
    ba_pages k, largest, smallest, mean; /* data NULL: not given */
    int64_t rows;                        /* per summary page */
    ba_dtype dtype;                      /* of the summaries */
    ba_view scale;                       /* of quantised keys; data NULL: none */
    /* The rest is set by ba_run_summaries(). */
    ba_pack_rows_fn widen;             /* for keys of 8 bits or fewer: makes float32 rows, times the scales, if any. Else NULL */
    int64_t wide_bytes, scratch_bytes; /* bytes per worker: of the rows of a page; of these rows with a guard */
    char *scratch;
    ba_summarise_fn summarise;
    int64_t runs; /* the largest number of runs of ba_work.quest.pages pages in a request, from the page of its token `begin` on */
} ba_summary_call;

/* Checks a call of ba_quest_metadata(). `opened`: NULL, or opened tables that replace block_tables. `end` and `batch` of `args` must then be those of
 * the opened tables, and the page size of these tables must be that of the cache. `args` must not change until the call has run; the call may run
 * more than once. */
ba_status ba_open_summaries(const ba_quest_metadata_args *args, const ba_page_tables *opened, ba_summary_call *c);

/* Writes the summaries of an opened call. Fails for want of memory, or where it is interrupted. */
ba_status ba_run_summaries(ba_summary_call *c);

#endif
