/* The backward driver. Internal. */
#ifndef BA_OPS_BACKWARD_H
#define BA_OPS_BACKWARD_H

#include "ops/problem.h"

/* The arrays of a backward call that the problem does not have. The problem's out and lse are the results of the forward call. Where dlse.data is
 * NULL, dlse is 0. */
typedef struct ba_gradients {
    ba_view dout, dlse, dq, dk, dv;
    bool accumulate;     /* dk and dv hold reals, to which the gradients are added */
    ba_tensor attn_mask; /* data NULL: not wanted. Else of the shape of the problem's attn_mask, and of a float dtype */
    float *alibi_slopes; /* NULL: not wanted. Else [heads] */
} ba_gradients;

/* Computes the gradients of a checked problem. Fails as ba_attend() does. num_threads 0 stands for ba_get_num_threads(). */
ba_status ba_attend_backward(const ba_problem *problem, const ba_gradients *gradients, int num_threads);

/* Computes the gradients of attn_mask and alibi_slopes, as far as they are wanted, after ba_attend_backward() has checked the lists. */
ba_status ba_attend_bias_backward(const ba_problem *problem, const ba_gradients *gradients, int num_threads);

#endif
