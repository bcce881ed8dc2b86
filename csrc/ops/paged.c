/* Paged attention: checks, then the shared forward driver. */
#include "ops/paged.h"

#include "core/status.h"
#include "ops/attend.h"

ba_status ba_paged_attention(const ba_paged_args *args) {
    ba_problem problem;
    BA_TRY(ba_check_paged(args, true, &problem));
    if (problem.batch == 0 || problem.q_len == 0) return BA_OK; /* nothing to write, however many heads there are */
    return ba_attend(&problem, args->num_threads);
}
