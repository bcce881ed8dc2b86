/* Calls that choose blocks for prefill, as the binding makes them. Internal. */
#ifndef BA_OPS_SELECT_PREFILL_H
#define BA_OPS_SELECT_PREFILL_H

#include "ops/select/select_prefill_call.h"

/* A call in two steps, as in open.h. Opening checks all inputs except given_scores: setting the outputs checks their shape, and running checks
 * their numbers. There is nothing to close. */
ba_status ba_open_prefill(const ba_select_prefill_args *args, ba_prefill *c);
ba_status ba_set_prefill_outputs(const ba_select_prefill_args *args, ba_prefill *c);
ba_status ba_run_prefill(ba_prefill *c);

#endif
