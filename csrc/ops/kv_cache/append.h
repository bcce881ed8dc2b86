/* Appending tokens to paged caches by tables that were opened for all calls of a step. Internal. */
#ifndef BA_OPS_APPEND_H
#define BA_OPS_APPEND_H

#include "ops/kv_cache/page_tables.h"

/* As ba_append_kv() by tables; `plan` replaces those of `args`. */
ba_status ba_append_by_plan(const ba_tensor *k, const ba_tensor *v, const ba_page_tables *plan, const ba_paged_args *args);

#endif
