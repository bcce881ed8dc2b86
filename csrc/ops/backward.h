/* The backward driver. Internal. */
#ifndef BA_OPS_BACKWARD_H
#define BA_OPS_BACKWARD_H

#include "ops/problem.h"

/* What a backward call has beside the problem, whose out and lse are then what the forward call gave. dlse: data NULL: 0. */
typedef struct ba_gradients {
    ba_view dout, dlse, dq, dk, dv;
} ba_gradients;

/* Computes the gradients of a checked problem. Fails, before it writes, only for a bad list entry or for want of memory. num_threads 0: as set. */
ba_status ba_attend_backward(const ba_problem *problem, const ba_gradients *gradients, int num_threads);

#endif
