/* A call in two steps: it is opened, which checks all of its inputs once and fills its problem, and then run. Between the two its outputs are made,
 * or checked where the caller has them. Internal; the functions of blitz_attn.h do both steps, the Python binding makes its outputs in between.
 *
 * What was checked stays as it is until the problem has been run: shapes and strides are copied, page tables too. Lengths, counts and cumulative
 * lengths are read where they are: the binding has copied them before. The entries of index lists (`blocks`) are read, and checked, by the plan when
 * the problem is run. */
#ifndef BA_OPS_OPEN_H
#define BA_OPS_OPEN_H

#include "ops/backward.h"
#include "ops/page_tables.h"
#include "ops/problem.h"

/* An opened call. */
typedef struct ba_attention {
    ba_problem problem;
    ba_tensor out_shape, lse_shape; /* what the outputs have to be; data is NULL */
    int num_threads;
    ba_page_tables own_tables; /* of a paged call without a plan */
} ba_attention;

/* Each fills the call, or fails and leaves nothing to close. */
ba_status ba_open_block_sparse(const ba_block_sparse_args *args, ba_attention *attention);
ba_status ba_open_block_sparse_backward(const ba_block_sparse_backward_args *args, ba_attention *attention, ba_gradients *gradients);
/* plan: NULL, or tables that stand for block_tables, indptr, seq_lens, cu_q and batch of `args`. They have to outlive the call. */
ba_status ba_open_paged(const ba_paged_args *args, const ba_page_tables *plan, ba_attention *attention);

/* Checks the outputs in `args` and adds them to the opened call. */
ba_status ba_set_block_sparse_outputs(const ba_block_sparse_args *args, ba_attention *attention);
ba_status ba_set_paged_outputs(const ba_paged_args *args, ba_attention *attention);
ba_status ba_set_gradients(const ba_block_sparse_backward_args *args, const ba_attention *attention, ba_gradients *gradients);

/* Fail, before they write, only for a bad list entry or for want of memory. */
ba_status ba_run_attention(const ba_attention *attention);
ba_status ba_run_attention_backward(const ba_attention *attention, const ba_gradients *gradients);

/* Gives back what opening took; an opened call is closed once, run or not. Of zeros it does nothing. */
void ba_close_attention(ba_attention *attention);

#endif
