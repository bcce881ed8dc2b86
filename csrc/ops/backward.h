/* The backward driver. Internal. */
#ifndef BA_OPS_BACKWARD_H
#define BA_OPS_BACKWARD_H

#include "ops/problem.h"

/* What a backward call has beside the problem, whose out and lse are then what the forward call gave. dlse: data NULL: 0. */
typedef struct ba_gradients {
    ba_view dout, dlse, dq, dk, dv;
} ba_gradients;

ba_status ba_check_block_sparse_backward(const ba_block_sparse_backward_args *args, bool with_outputs, ba_problem *problem, ba_gradients *gradients);

#endif
