/* Appends tokens to paged caches, also by page tables that were opened for all calls of a step, and updates the summaries of the pages. Internal. */
#ifndef BA_OPS_APPEND_H
#define BA_OPS_APPEND_H

#include "ops/kv_cache/page_tables.h"

/* As ba_append_kv(). `opened`: NULL, or opened tables that replace those of `args`. `summaries`: NULL, or the summaries to update for the pages that
 * get new tokens. Only its metadata_tables, maxblocks, minblocks and meanblocks are read, and `slots` must be NULL. A call that is refused has
 * written nothing. */
ba_status ba_append(const ba_tensor *k, const ba_tensor *v, const int64_t *slots, const ba_page_tables *opened, const ba_paged_args *args,
                    const ba_quest_metadata_args *summaries);

#endif
