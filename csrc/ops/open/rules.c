/* The rules of scores: scale, softcap, sinks and alibi_slopes, which block-sparse and paged calls have under the same names. Scale and softcap are
 * checked here, and all rules are put into the problem of the call. */
#include "core/status.h"
#include "ops/check.h"
#include "ops/open/open.h"

typedef struct rules {
    double scale, softcap;
    const float *sinks, *alibi_slopes;
} rules;

/* The rules in the arguments of a call of either kind. */
#define RULES_OF(args)                                                                                                                               \
    &(rules) { .scale = (args)->scale, .softcap = (args)->softcap, .sinks = (args)->sinks, .alibi_slopes = (args)->alibi_slopes }

static ba_status take(const rules *r, ba_problem *p) {
    BA_TRY(ba_take_scale(p->dtype, p->head_dim, r->scale, &p->scale));
    BA_TRY(ba_check_softcap(p->dtype, r->softcap));
    p->softcap = r->softcap;
    p->sinks = r->sinks;
    p->alibi_slopes = r->alibi_slopes;
    return BA_OK;
}

ba_status ba_take_block_sparse_rules(const ba_block_sparse_args *args, ba_problem *p) { return take(RULES_OF(args), p); }
ba_status ba_take_paged_rules(const ba_paged_args *args, ba_problem *p) { return take(RULES_OF(args), p); }
