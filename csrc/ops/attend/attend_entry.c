/* The entry to the forward drivers: decides which family's kernels attend each batch entry, and fills the outputs of padding. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "core/faults.h"
#include "core/pool.h"
#include "core/status.h"
#include "kernels/kernels.h"
#include "kernels/work_tuning.h"
#include "ops/attend/attend.h"
#include "ops/check.h"
#include "ops/reals.h"

/* The average number of queries that attend a key of this batch entry, without regard to lists: the tokens that see the key, by the causal rule and
 * the window, times the query heads of the KV group. Only the entry's own shape goes into this number, so that the entry's bits depend neither on
 * other entries of the batch nor on the padding of lists. A slice of the queries counts as all queries of its sequence do, as if the last of these
 * stood at the last key. */
static double pairs_per_key(const ba_problem *p, int64_t batch) {
    const double tokens = (double)ba_deciding_tokens(p, batch), keys = (double)ba_kv_span(p, batch).valid;
    if (tokens == 0 || keys == 0) return 0;
    double pairs = tokens; /* of one head */
    if (p->causal) pairs = tokens <= keys ? tokens - tokens * (tokens - 1) / (2 * keys) : (keys + 1) / 2;
    const int64_t right = p->causal ? 0 : p->window_right;
    if (p->window_left >= 0 && right >= 0) pairs = fmin(pairs, (double)p->window_left + (double)right + 1);
    return pairs * (double)p->group;
}

/* Runs the call in two passes, where some batch entries are for one family and the others for the other family. Each pass treats the other pass's
 * queries as padding. The first pass reads and checks all lists, so that nothing is written if a list is wrong. */
static ba_status attend_in_two_passes(ba_isa level, const ba_attend_family *packed, const ba_attend_family *vectors, const ba_problem *problem,
                                      int64_t least_pairs, int threads) {
    const size_t bytes = (size_t)problem->batch * sizeof(int64_t);
    int64_t *lens = ba_fault(BA_FAULT_MEMORY) ? NULL : malloc(bytes);
    if (!lens) return ba_fail(BA_ERROR_MEMORY, "scratch: expected %zu bytes of memory, got none", bytes);
    ba_status status = BA_OK;
    for (int pass = 0; pass < 2 && status == BA_OK; pass++) {
        ba_problem part = *problem;
        for (int64_t b = 0; b < problem->batch; b++) {
            const bool pays = pairs_per_key(problem, b) >= least_pairs;
            lens[b] = pays == (pass == 0) ? ba_q_span(problem, b).valid : 0;
        }
        part.q_lens = lens;
        status = ba_attend_with(level, pass == 0 ? packed : vectors, &part, threads);
    }
    free(lens);
    return status;
}

static ba_status attend_valid(ba_isa level, const ba_problem *problem, int threads) {
    const ba_kernels *kernels = ba_kernels_at(level);
    const ba_attend_family *family = kernels->attend[problem->dtype], *vectors = kernels->vector[problem->dtype];
    if (!ba_attends_kv_dtype(kernels, family, problem)) return ba_attend_with(level, vectors, problem, threads);
    const int64_t least_pairs = ba_tuning_at(family->isa)->least_pairs[problem->dtype];
    int64_t pay = 0;
    for (int64_t b = 0; least_pairs > 0 && b < problem->batch; b++) pay += pairs_per_key(problem, b) >= least_pairs;
    if (least_pairs == 0 || pay == problem->batch) return ba_attend_with(level, family, problem, threads);
    if (pay == 0) return ba_attend_with(level, vectors, problem, threads);
    return attend_in_two_passes(level, family, vectors, problem, least_pairs, threads);
}

/* Writes output 0 and log-sum-exp -inf for the queries behind the valid length. An item is one head of one batch entry. */
static void clear_padding(void *context, int64_t item, int worker) {
    (void)worker;
    const ba_problem *p = context;
    const int64_t batch = item / p->heads, head = item % p->heads, real_size = ba_dtype_size(ba_real_of(p->dtype));
    const ba_span q = ba_q_span(p, batch);
    for (int64_t query = q.valid; query < q.rows; query++) {
        memset(ba_result_row(p, &p->out, p->out_element_size, batch, head, query), 0, (size_t)(p->v_dim * p->out_element_size));
        if (p->lse.data) ba_set_real(ba_result_row(p, &p->lse, real_size, batch, head, query), 0, -INFINITY, real_size);
    }
}

ba_status ba_attend_at(ba_isa level, const ba_problem *problem, int num_threads) {
    const int threads = ba_threads_for(num_threads);
    if (problem->q_len == 0) return BA_OK; /* an empty array's other axes may be of any length, so no loop may run over them */
    BA_TRY(attend_valid(level, problem, threads));
    int64_t padding = 0;
    for (int64_t b = 0; b < problem->batch; b++) padding += ba_q_span(problem, b).rows - ba_q_span(problem, b).valid;
    if (padding) {
        const bool many = padding * problem->heads * problem->v_dim * problem->out_element_size >= ba_work.small_padding;
        BA_TRY(ba_parallel(many ? threads : 1, problem->batch * problem->heads, clear_padding, (void *)problem));
    }
    return BA_OK;
}

/* Reads the level in use, once: another thread may change it at any time, and the kernels of one call must be those of one level. */
ba_status ba_attend(const ba_problem *problem, int num_threads) { return ba_attend_at(ba_isa_active(), problem, num_threads); }
