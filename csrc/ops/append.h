/* Appending tokens to paged caches whose tables have been opened. Internal. */
#ifndef BA_OPS_APPEND_H
#define BA_OPS_APPEND_H

#include "ops/page_tables.h"

/* As ba_append_kv(); where `slots` is NULL, `tables` are the opened tables, and those of `args` are not read. */
ba_status ba_append_to(const ba_tensor *k, const ba_tensor *v, const int64_t *slots, const ba_page_tables *tables, const ba_paged_args *args);

#endif
