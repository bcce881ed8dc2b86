/* Merging the states of one query: results and log-sum-exps over disjoint sets of keys. Internal. */
#ifndef BA_OPS_MERGE_H
#define BA_OPS_MERGE_H

#include "kernels/kernels.h"

/* Merges the results of `parts` parts into `out`, and returns the log-sum-exp over all parts. A result is a row of v_dim elements of the family's
 * dtype, and `out` may be the row of one part. A part whose log-sum-exp is -inf is empty, and its row is not read. `rows` has room for a pointer per
 * part, and `weights` for a real per part. */
double ba_merge_row_states(const ba_attend_family *family, int64_t parts, const void *const *outs, const double *lses, const void **rows,
                           void *weights, void *out, int64_t v_dim);

#endif
