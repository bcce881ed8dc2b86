/* The table of operations: their names, their arguments in order, and, in comments, their results. An operation whose comment names no result returns
 * None. The table decides how arguments are read, held, checked for shared memory, and released (call.c). It also tells the package
 * (blitz_attn/_operations.py) which arguments torch and JAX take as tensors, which have a gradient, and which belong to sequences or heads.
 *
 * A(T, name, role, traits, member) is an argument that goes to `member` of T, the library's arguments. O(T, name, role) is an argument that the
 * function's own code reads, or that says how other arguments are read. Where several operations share a list of arguments, the list is a macro of
 * its own; IN is the prefix, such as `forward.`, under which its members stand in T. `empty(shape, dtype name)` makes the results that the caller
 * does not give. An array may also be a pair (array of uint16, "bfloat16"). */
#ifndef BA_PYTHON_OPERATIONS_H
#define BA_PYTHON_OPERATIONS_H

#include <stddef.h>

#include "python/args.h"

enum { CALL_MOST_ARGUMENTS = 40 };

/* clang-format off */

/* All operations, in the order in which they stand below. */
#define CORE_OPERATIONS(X) \
    X(block_sparse_attention) X(block_sparse_attention_backward) X(select_prefill) X(merge_states) X(open_page_tables) X(paged_attention) \
    X(quantize_kv) X(append_paged_kv) X(quest_metadata) X(select_blocks) X(select_tokens) X(block_means) X(block_means_backward) X(gate) X(gate_backward) \
    X(nsa_select)

/* ---- Attention over sequences --------------------------------------------------------------------------------------------------- */

/* The arguments of block_sparse_attention that other operations share. BLOCK: the traits of block_shape. */
#define SEQUENCE_ARGUMENTS(A, O, T, IN, BLOCK) \
    O(T, empty, OWN) \
    A(T, q,             FLOATS,       ARG_DIFFERENTIABLE | ARG_NAMED, IN q) \
    A(T, k,             FLOATS,       ARG_DIFFERENTIABLE,             IN k) \
    A(T, v,             FLOATS,       ARG_DIFFERENTIABLE,             IN v) \
    A(T, sabi,          INDICES,      ARG_OPTIONAL,                   IN blocks) \
    A(T, block_shape,   PAIR,         BLOCK,                          IN block_q) /* and block_kv, the member behind block_q */ \
    A(T, scale,         SCALE,        ARG_OPTIONAL,                   IN scale) \
    A(T, layout,        LAYOUT,       0,                              IN layout) \
    A(T, causal,        FLAG,         0,                              IN causal) \
    A(T, window,        PAIR,         ARG_OPTIONAL,                   IN window) \
    A(T, q_lens,        LENGTHS,      ARG_OPTIONAL,                   IN q_lens) \
    A(T, kv_lens,       LENGTHS,      ARG_OPTIONAL,                   IN kv_lens) \
    A(T, cu_seqlens_q,  LIST,         ARG_OPTIONAL,                   IN cu_q) \
    A(T, cu_seqlens_kv, LIST,         ARG_OPTIONAL,                   IN cu_kv) \
    O(T, num_heads, INTEGER) \
    O(T, num_kv_heads, INTEGER) \
    O(T, dtype, DTYPE) \
    A(T, num_threads,   THREADS,      ARG_OPTIONAL,                   IN num_threads) \
    A(T, q_begin,       PER_SEQUENCE, ARG_OPTIONAL,                   IN q_begin) \
    A(T, kv_ranges,     TABLES,       ARG_OPTIONAL,                   IN kv_ranges)

/* The arguments that the forward and the backward function share. */
#define ATTENTION_ARGUMENTS(A, O, T, IN) \
    SEQUENCE_ARGUMENTS(A, O, T, IN, ARG_OPTIONAL) \
    A(T, q_total,       PER_SEQUENCE, ARG_OPTIONAL,                      IN q_total) \
    A(T, attn_mask,     MASK,         ARG_OPTIONAL | ARG_DIFFERENTIABLE, IN attn_mask) \
    A(T, alibi_slopes,  HEADS,        ARG_OPTIONAL | ARG_DIFFERENTIABLE, IN alibi_slopes) \
    A(T, softcap,       NUMBER,       ARG_OPTIONAL,                      IN softcap) \
    A(T, cu_rows,       LIST,         ARG_OPTIONAL,                      IN cu_rows) \
    A(T, routed,        FLAG,         ARG_OPTIONAL,                      IN routed) \
    A(T, key_stride,    INTEGER,      ARG_OPTIONAL,                      IN key_stride) \
    A(T, key_last,      INTEGER,      ARG_OPTIONAL,                      IN key_last)

/* Returns out, or with return_lse (out, lse). */
#define BLOCK_SPARSE_ATTENTION(A, O, T) \
    ATTENTION_ARGUMENTS(A, O, T, ) \
    A(T, sinks,         HEADS,        ARG_OPTIONAL | ARG_DIFFERENTIABLE, sinks) \
    O(T, return_lse, FLAG) O(T, out_dtype, OWN) O(T, out, OWN) O(T, lse_out, OWN)

/* The forward call has returned out and lse. Returns (dq, dk, dv). With bias_grads, a function that makes arrays as `empty` does, the gradients of
 * attn_mask and of alibi_slopes follow. Each of these two is None where its bias is not given, or is a mask of bool. */
#define BLOCK_SPARSE_ATTENTION_BACKWARD(A, O, T) \
    ATTENTION_ARGUMENTS(A, O, T, forward.) \
    A(T, dout,          FLOATS,       0,            dout) \
    A(T, out,           FLOATS,       0,            forward.out) \
    A(T, lse,           REALS,        0,            forward.lse) \
    A(T, dlse,          REALS,        ARG_OPTIONAL, dlse) \
    A(T, accumulate,    FLAG,         0,            accumulate) \
    O(T, dq, OWN) O(T, dk, OWN) O(T, dv, OWN) O(T, bias_grads, OWN)

/* Callers give k also as v, and None as sabi. Returns (scores or None, sabi). */
#define SELECT_PREFILL(A, O, T) \
    SEQUENCE_ARGUMENTS(A, O, T, call., 0) \
    O(T, chooser, OWN) \
    A(T, pool_q,        INTEGER,      0,            pool_q) \
    A(T, pool_k,        INTEGER,      0,            pool_k) \
    O(T, term, OWN) \
    A(T, largest,       FLAG,         0,            largest) \
    O(T, budget, OWN) O(T, budgets, REALS) \
    A(T, sink,          INTEGER,      0,            sink) \
    A(T, recent,        INTEGER,      0,            recent) \
    A(T, last_columns,  INTEGER,      0,            last_columns) \
    A(T, first_rows,    INTEGER,      0,            first_rows) \
    A(T, last_rows,     INTEGER,      0,            last_rows) \
    A(T, per_kv_head,   FLAG,         0,            per_kv_head) \
    O(T, index_dtype, OWN) O(T, return_scores, FLAG) O(T, scores, OWN)

/* outs and lses are tuples of arrays. Returns (out, lse). */
#define MERGE_STATES(A, O, T) O(T, empty, OWN) O(T, outs, OWN) O(T, lses, OWN) O(T, out, OWN) O(T, lse_out, OWN) O(T, dtype, OWN)

/* ---- Paged caches --------------------------------------------------------------------------------------------------------------- */

/* The requests of a call. With indptr, block_tables lists the pages of all requests one after the other, and last_page_len replaces seq_lens.
 * block_tables may be opened page tables; all other arguments of this list, and kv_split, are then None. */
#define REQUEST_ARGUMENTS(A, O, T, IN) \
    O(T, block_tables, TABLES) \
    A(T, seq_lens,      LIST,         ARG_OPTIONAL, IN seq_lens) \
    A(T, indptr,        LIST,         ARG_OPTIONAL, IN indptr) \
    O(T, last_page_len, LIST) O(T, q_lens, LIST) \
    A(T, q_begin,       LIST,         ARG_OPTIONAL, IN q_begin)

/* Checks and copies the requests. Returns (opened page tables, number of requests, number of queries). */
#define OPEN_PAGE_TABLES(A, O, T) \
    REQUEST_ARGUMENTS(A, O, T, ) \
    O(T, page_size, INTEGER) O(T, num_pages, INTEGER) O(T, kv_split, INTEGER)

/* The arguments behind `rules` may be given one by one, or all as a tuple in the place of `rules`: a PagedPlan makes one tuple for all of its calls
 * (blitz_attn/_paged/call.py). A shorter tuple leaves out the last arguments. Returns out, or with return_lse (out, lse). */
#define PAGED_ATTENTION(A, O, T) \
    O(T, empty, OWN) \
    A(T, q,             FLOATS,       ARG_OPTIONAL | ARG_NAMED, q) \
    A(T, k_cache,       CACHE,        ARG_OPTIONAL | ARG_NAMED, k_cache) \
    A(T, v_cache,       CACHE,        ARG_OPTIONAL,             v_cache) \
    REQUEST_ARGUMENTS(A, O, T, ) \
    O(T, kv_split, INTEGER) \
    A(T, selected,      PAGES,        ARG_OPTIONAL, selected) \
    O(T, counts, LIST) \
    A(T, selected_size, INTEGER,      ARG_OPTIONAL, selected_size) \
    A(T, sinks,         HEADS,        ARG_OPTIONAL, sinks) \
    A(T, k_scale,       SCALES,       ARG_OPTIONAL, k_scale) \
    A(T, v_scale,       SCALES,       ARG_OPTIONAL, v_scale) \
    A(T, kv_ranges,     TABLES,       ARG_OPTIONAL, kv_ranges) \
    A(T, attn_mask,     MASK,         ARG_OPTIONAL, attn_mask) \
    A(T, alibi_slopes,  HEADS,        ARG_OPTIONAL, alibi_slopes) \
    O(T, return_lse, FLAG) O(T, out, OWN) O(T, lse_out, OWN) \
    O(T, rules, OWN) O(T, out_dtype, OWN) O(T, dtype, DTYPE) O(T, kv_dtype, KV_DTYPE) \
    A(T, scale,         SCALE,        ARG_OPTIONAL, scale) \
    A(T, kv_layout,     KV_LAYOUT,    0,            kv_layout) \
    A(T, window,        TOKENS_BEFORE, ARG_OPTIONAL, window) \
    A(T, softcap,       NUMBER,       ARG_OPTIONAL, softcap) \
    A(T, num_threads,   THREADS,      ARG_OPTIONAL, num_threads)

#define QUANTIZE_KV(A, O, T) \
    A(T, x,             FLOATS,       0,            x) \
    A(T, values,        CACHE,        ARG_WRITTEN,  values) \
    A(T, scale,         SCALES,       ARG_WRITTEN | ARG_OPTIONAL, scale) \
    O(T, dtype, DTYPE) \
    O(T, kv_dtype, KV_DTYPE)

/* The slot of each token comes from slot_mapping, or, where slot_mapping is None, from the requests. q_begin is always None. Summaries are of the
 * cache's dtype, or of float32. */
#define APPEND_PAGED_KV(A, O, T) \
    A(T, k,             FLOATS,       0,                     k) \
    A(T, v,             FLOATS,       ARG_OPTIONAL,          v) \
    A(T, k_cache,       CACHE,        ARG_WRITTEN | ARG_POOL | ARG_SUMMARISED | ARG_NAMED, cache.k_cache) \
    A(T, v_cache,       CACHE,        ARG_WRITTEN | ARG_POOL | ARG_OPTIONAL, cache.v_cache) \
    A(T, slot_mapping,  LIST,         ARG_OPTIONAL,          slots) \
    REQUEST_ARGUMENTS(A, O, T, cache.) \
    A(T, kv_layout,     KV_LAYOUT,    0,                     cache.kv_layout) \
    A(T, k_scale,       SCALES,       ARG_POOL | ARG_OPTIONAL, cache.k_scale) \
    A(T, v_scale,       SCALES,       ARG_POOL | ARG_OPTIONAL, cache.v_scale) \
    A(T, metadata_block_tables, TABLES, ARG_OPTIONAL,          summaries.metadata_tables) \
    A(T, maxblocks,     CACHE,        ARG_WRITTEN | ARG_OPTIONAL, summaries.maxblocks) \
    A(T, minblocks,     CACHE,        ARG_WRITTEN | ARG_OPTIONAL, summaries.minblocks) \
    A(T, meanblocks,    CACHE,        ARG_WRITTEN | ARG_OPTIONAL, summaries.meanblocks) \
    O(T, dtype, DTYPE) \
    O(T, kv_dtype, KV_DTYPE) \
    A(T, num_threads,   THREADS,      ARG_OPTIONAL,          cache.num_threads)

/* ---- Choosing pages ------------------------------------------------------------------------------------------------------------- */

#define QUEST_METADATA(A, O, T) \
    A(T, k_cache,               CACHE,     ARG_POOL | ARG_SUMMARISED | ARG_NAMED, k_cache) \
    O(T, block_tables, TABLES) \
    A(T, seq_lens,              LIST,      ARG_OPTIONAL,               end) \
    A(T, metadata_block_tables, TABLES,    0,                          metadata_tables) \
    A(T, maxblocks,             FLOATS,    ARG_WRITTEN | ARG_OPTIONAL, maxblocks) \
    A(T, minblocks,             FLOATS,    ARG_WRITTEN | ARG_OPTIONAL, minblocks) \
    A(T, meanblocks,            FLOATS,    ARG_WRITTEN | ARG_OPTIONAL, meanblocks) \
    A(T, start_lens,            LIST,      ARG_OPTIONAL,               begin) \
    A(T, kv_layout,             KV_LAYOUT, 0,                          kv_layout) \
    O(T, dtype, KV_DTYPE) \
    A(T, num_threads,           THREADS,   ARG_OPTIONAL,               num_threads) \
    A(T, k_scale,               SCALES,    ARG_POOL | ARG_OPTIONAL,    k_scale)

/* Where selected_indices is None, k is the width of the result. budget counts blocks, one number per request. a and b are the arrays that the method
 * scores. recent is one number, or one per request. seq_lens may be opened page tables, which then also replace q_lens, block_size and, for the
 * method max, tables. Returns the selected blocks alone, or in a tuple with the counts and the scores that the caller wants. */
#define SELECT_BLOCKS(A, O, T) \
    O(T, empty, OWN) O(T, method, OWN) \
    A(T, query,          FLOATS,       0,            q) \
    O(T, a, OWN) O(T, b, OWN) O(T, tables, TABLES) \
    O(T, seq_lens, LIST) \
    O(T, k, INTEGER) O(T, block_size, INTEGER) \
    A(T, per_query_head, FLAG,         0,            per_query_head) \
    A(T, sink,           INTEGER,      0,            sink) \
    A(T, recent,         PER_SEQUENCE, ARG_OPTIONAL, recent) \
    O(T, tokens_since_metadata_update, PER_SEQUENCE) O(T, q_lens, LIST) \
    A(T, budget,         LIST,         ARG_OPTIONAL, budget) \
    A(T, ascending,      FLAG,         0,            ascending) \
    A(T, kv_layout,      KV_LAYOUT,    0,            kv_layout) \
    O(T, selected_indices, OWN) O(T, return_counts, FLAG) O(T, return_scores, FLAG) \
    O(T, dtype, DTYPE) \
    A(T, num_threads,    THREADS,      ARG_OPTIONAL, num_threads) \
    A(T, k_scale,        SCALES,       ARG_OPTIONAL, k_scale) \
    O(T, kv_dtype, KV_DTYPE)

/* ---- Choosing tokens ------------------------------------------------------------------------------------------------------------- */

/* Writes `selected` and, where it is given, `scores`. */
#define SELECT_TOKENS(A, O, T) \
    A(T, q,             FLOATS,       ARG_NAMED,                  q) \
    A(T, k,             CACHE,        0,                          k) \
    A(T, weights,       REALS,        0,                          weights) \
    A(T, selected,      TABLES,       ARG_WRITTEN,                selected) \
    A(T, scores,        REALS,        ARG_OPTIONAL | ARG_WRITTEN, scores) \
    A(T, scale,         SCALE,        ARG_OPTIONAL,               scale) \
    A(T, causal,        FLAG,         0,                          causal) \
    A(T, q_lens,        LENGTHS,      ARG_OPTIONAL,               q_lens) \
    A(T, kv_lens,       LENGTHS,      ARG_OPTIONAL,               kv_lens) \
    A(T, cu_seqlens_q,  LIST,         ARG_OPTIONAL,               cu_q) \
    A(T, cu_seqlens_kv, LIST,         ARG_OPTIONAL,               cu_kv) \
    A(T, block_tables,  TABLES,       ARG_OPTIONAL,               block_tables) \
    A(T, q_begin,       PER_SEQUENCE, ARG_OPTIONAL,               q_begin) \
    A(T, ascending,     FLAG,         0,                          ascending) \
    A(T, pool_size,     INTEGER,      0,                          pool_size) \
    A(T, block_size,    INTEGER,      0,                          block_size) \
    A(T, keep_tail,     FLAG,         0,                          keep_tail) \
    A(T, min_score,     SCALE,        ARG_OPTIONAL,               min_score) \
    A(T, k_scale,       SCALES,       ARG_OPTIONAL,               k_scale) \
    O(T, dtype, DTYPE) O(T, kv_dtype, KV_DTYPE) \
    A(T, num_threads,   THREADS,      ARG_OPTIONAL,               num_threads)

/* ---- Native sparse attention ------------------------------------------------------------------------------------------------------ */

#define BLOCK_ARGUMENTS(A, O, T) \
    A(T, block_size,    INTEGER,      0,            block_size) \
    A(T, stride,        INTEGER,      0,            stride) \
    A(T, cu_seqlens,    LIST,         ARG_OPTIONAL, cu) \
    A(T, cu_blocks,     LIST,         ARG_OPTIONAL, cu_blocks) \
    O(T, dtype, DTYPE) \
    A(T, num_threads,   THREADS,      ARG_OPTIONAL, num_threads)

#define BLOCK_MEANS(A, O, T) \
    A(T, x,             FLOATS,       ARG_OPTIONAL,               x) \
    A(T, weight,        FLOATS,       ARG_OPTIONAL,               weight) \
    A(T, out,           FLOATS,       ARG_OPTIONAL | ARG_WRITTEN, out) \
    BLOCK_ARGUMENTS(A, O, T)

#define BLOCK_MEANS_BACKWARD(A, O, T) \
    A(T, dout,          FLOATS,       ARG_OPTIONAL,               dout) \
    A(T, dx,            FLOATS,       ARG_OPTIONAL | ARG_WRITTEN, dx) \
    O(T, more, OWN) \
    BLOCK_ARGUMENTS(A, O, T)

/* `gates` are written where gate_proj_weight is given, and otherwise read. */
#define GATE(A, O, T) \
    A(T, q,                 FLOATS,   ARG_OPTIONAL,               q) \
    A(T, gate_proj_weight,  FLOATS,   ARG_OPTIONAL,               weight) \
    O(T, gates, REALS) O(T, branches, OWN) \
    A(T, out,               FLOATS,   ARG_OPTIONAL | ARG_WRITTEN, out) \
    O(T, dtype, DTYPE) \
    A(T, num_threads,       THREADS,  ARG_OPTIONAL,               num_threads)

#define GATE_BACKWARD(A, O, T) \
    A(T, q,                 FLOATS,   ARG_OPTIONAL,               q) \
    A(T, gate_proj_weight,  FLOATS,   ARG_OPTIONAL,               weight) \
    A(T, gates,             REALS,    ARG_OPTIONAL,               gates) \
    O(T, branches, OWN) \
    A(T, dout,              FLOATS,   ARG_OPTIONAL,               dout) \
    O(T, dbranches, OWN) \
    A(T, dgates,            REALS,    ARG_OPTIONAL | ARG_WRITTEN, dgates) \
    A(T, dq,                FLOATS,   ARG_OPTIONAL | ARG_WRITTEN, dq) \
    A(T, dgate_proj_weight, REALS,    ARG_OPTIONAL | ARG_WRITTEN, dweight) \
    O(T, dtype, DTYPE) \
    A(T, num_threads,       THREADS,  ARG_OPTIONAL,               num_threads)

#define NSA_SELECT(A, O, T) \
    A(T, q,                   FLOATS,       ARG_OPTIONAL,               q) \
    A(T, k_cmp,               FLOATS,       ARG_OPTIONAL,               k_cmp) \
    A(T, lse,                 REALS,        ARG_OPTIONAL,               lse) \
    A(T, block_indices,       TABLES,       ARG_OPTIONAL | ARG_WRITTEN, selected) \
    A(T, cmp_block_indices,   TABLES,       ARG_OPTIONAL | ARG_WRITTEN, selected_cmp) \
    A(T, scale,               SCALE,        ARG_OPTIONAL,               scale) \
    A(T, causal,              FLAG,         0,                          causal) \
    A(T, compress_block_size, INTEGER,      0,                          compress_block) \
    A(T, compress_stride,     INTEGER,      0,                          compress_stride) \
    A(T, select_block_size,   INTEGER,      0,                          select_block) \
    A(T, q_tile_size,         INTEGER,      0,                          tile) \
    A(T, init_blocks,         INTEGER,      0,                          init_blocks) \
    A(T, local_blocks,        INTEGER,      0,                          local_blocks) \
    A(T, q_begin,             PER_SEQUENCE, ARG_OPTIONAL,               q_begin) \
    A(T, tokens,              PER_SEQUENCE, ARG_OPTIONAL,               tokens) \
    A(T, cmp_group,           INTEGER,      0,                          cmp_group) \
    A(T, cu_seqlens,          LIST,         ARG_OPTIONAL,               cu_q) \
    A(T, cu_blocks,           LIST,         ARG_OPTIONAL,               cu_cmp) \
    O(T, dtype, DTYPE) \
    A(T, num_threads,         THREADS,      ARG_OPTIONAL,               num_threads)

/* clang-format on */

#define ARGUMENT_ROW(T, name, role, traits, member) {#name, ARG_##role, traits, offsetof(T, member)},
#define OWN_ROW(T, name, role) {#name, ARG_##role, 0, ARG_NO_MEMBER},
#define ARGUMENT_INDEX(T, name, role, traits, member) T##_##name,
#define OWN_INDEX(T, name, role) T##_##name,

/* Defines operation_<name>, whose arguments the table lists, and the indices INDEX_<argument> of call.values. `required` is the
 * index of the first argument that need not be given. */
#define OPERATION(name, T, ARGUMENTS, required, INDEX)                                                                                               \
    enum { ARGUMENTS(ARGUMENT_INDEX, OWN_INDEX, INDEX) INDEX##_COUNT };                                                                              \
    _Static_assert((int)INDEX##_COUNT <= (int)CALL_MOST_ARGUMENTS, "py_call has room for all arguments");                                            \
    static const argument rows_of_##name[] = {ARGUMENTS(ARGUMENT_ROW, OWN_ROW, T)};                                                                  \
    const operation operation_##name = {#name, rows_of_##name, INDEX##_COUNT, required};

#endif
