/* Selecting pages for the requests of tables that were opened for all calls of a step. Internal. */
#ifndef BA_OPS_SELECT_PAGES_H
#define BA_OPS_SELECT_PAGES_H

#include "ops/kv_cache/page_tables.h"

/* As ba_select_blocks(). The opened tables replace seq_lens, cu_q, batch and page_size of `args`, and for BA_SELECT_MAX its `tables`, too. Opened
 * tables with q_begin are refused. */
ba_status ba_select_by_tables(const ba_select_args *args, const ba_page_tables *opened);

#endif
