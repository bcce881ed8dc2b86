/* What the operations on paged caches share. Internal. */
#ifndef BA_OPS_PAGED_H
#define BA_OPS_PAGED_H

#include "ops/problem.h"

/* As ba_check_block_sparse. */
ba_status ba_check_paged(const ba_paged_args *args, bool with_outputs, ba_problem *problem);

/* Tables' kind and shape, lengths within what the tables hold, and every page number within a request's length. */
ba_status ba_check_tables(const ba_tensor *tables, const int64_t *indptr, const int64_t *seq_lens, int64_t batch, int64_t page_size, int64_t pages,
                          int64_t most_tokens);

#endif
