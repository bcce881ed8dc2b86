/* Appending tokens to paged caches, also by tables that were opened for all calls of a step, and updating the summaries of their pages. Internal. */
#ifndef BA_OPS_APPEND_H
#define BA_OPS_APPEND_H

#include "ops/kv_cache/page_tables.h"

/* As ba_append_kv(). `opened`: NULL, or opened tables that replace those of `args`. `summaries`: NULL, or the summaries to update for the pages that
 * get new tokens, which needs tables, not slots; its metadata_tables, maxblocks, minblocks and meanblocks are read. All that can be refused is
 * refused before anything is written. */
ba_status ba_append(const ba_tensor *k, const ba_tensor *v, const int64_t *slots, const ba_page_tables *opened, const ba_paged_args *args,
                    const ba_quest_metadata_args *summaries);

#endif
