/* Summaries of pages for the requests of tables that were opened for all calls of a step. Internal. */
#ifndef BA_OPS_SUMMARISE_PAGES_H
#define BA_OPS_SUMMARISE_PAGES_H

#include "ops/kv_cache/page_tables.h"

/* As ba_quest_metadata(). `plan` replaces block_tables, `end` and batch of `args`. */
ba_status ba_quest_metadata_by_plan(const ba_quest_metadata_args *args, const ba_page_tables *plan);

#endif
