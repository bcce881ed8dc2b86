/* Block-sparse attention, forward: checks, then the shared driver. */
#include "core/status.h"
#include "ops/attend.h"

ba_status ba_block_sparse_attention(const ba_block_sparse_args *args) {
    ba_problem problem;
    BA_TRY(ba_check_block_sparse(args, true, &problem));
    if (problem.batch == 0 || problem.q_len == 0) return BA_OK; /* nothing to write, however many heads there are */
    return ba_attend(&problem, args->num_threads);
}
