/* A call of attention in two steps. Opening it checks its inputs, once, and fills its problem; running it computes the outputs. Between the
 * two steps, the outputs are made, or checked where the caller gives them. The functions of blitz_attn.h take both steps; the Python binding makes
 * its outputs in between. Internal.
 *
 * An opened call has copies of the shapes, strides and page tables that were checked. It reads lengths, counts and cumulative lengths from the
 * caller's memory, where they must not change. (The binding has made copies.) The entries of index lists (`blocks`) are not checked until the call
 * runs: its plan reads and checks them. */
#ifndef BA_OPS_OPEN_H
#define BA_OPS_OPEN_H

#include "ops/backward/backward.h"
#include "ops/kv_cache/page_tables.h"
#include "ops/problem.h"

/* An opened call. */
typedef struct ba_attention {
    ba_problem problem;
    ba_tensor out_shape, lse_shape; /* the dtypes and shapes that the outputs must have; data is NULL */
    int num_threads;
    int64_t kv_split;          /* 0: none. Else a paged call attends to KV splits of this many tokens */
    ba_page_tables own_tables; /* of a paged call that is not given opened tables */
} ba_attention;

/* Each function checks its arguments and fills `attention`. Where it fails, there is nothing to close. */
ba_status ba_open_block_sparse(const ba_block_sparse_args *args, ba_attention *attention);
ba_status ba_open_block_sparse_backward(const ba_block_sparse_backward_args *args, ba_attention *attention, ba_gradients *gradients);
/* opened: NULL, or opened tables that replace block_tables, indptr, seq_lens, cu_q, q_begin, kv_split and batch of `args`. The tables must stay open
 * until the call is closed. */
ba_status ba_open_paged(const ba_paged_args *args, const ba_page_tables *opened, ba_attention *attention);

/* Each function checks scale and softcap in `args`, and puts all rules of scores (rules.c) into a problem whose dtype and head_dim are set. */
ba_status ba_take_block_sparse_rules(const ba_block_sparse_args *args, ba_problem *problem);
ba_status ba_take_paged_rules(const ba_paged_args *args, ba_problem *problem);

/* Each function checks the outputs in `args`, and adds them to the opened call. */
ba_status ba_set_block_sparse_outputs(const ba_block_sparse_args *args, ba_attention *attention);
ba_status ba_set_paged_outputs(const ba_paged_args *args, ba_attention *attention);
/* The dtypes and shapes of dq, dk and dv of an opened call. */
void ba_gradient_shapes(const ba_block_sparse_backward_args *args, ba_tensor shapes[3]);
ba_status ba_set_gradients(const ba_block_sparse_backward_args *args, const ba_attention *attention, ba_gradients *gradients);

/* Run an opened call whose outputs are set. Both functions fail as ba_attend() does. */
ba_status ba_run_attention(const ba_attention *attention);
ba_status ba_run_attention_backward(const ba_attention *attention, const ba_gradients *gradients);

/* Frees what opening has allocated. Every opened call must be closed, whether it has run or not. Does nothing to an all-zero ba_attention. */
void ba_close_attention(ba_attention *attention);

#endif
