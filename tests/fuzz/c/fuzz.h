/* The fuzzer of the C API (make fuzz-c). It turns input bytes into the arguments of one call, or of a few calls that belong together, and runs them
 * under ASan and UBSan. The memory of each tensor ends where the tensor ends. It checks the promises that the header makes for every call: a
 * refusal is one sentence and writes nothing; inputs do not change; every element of an output is written, and nothing next to it; the bits are the
 * same for any number of threads. A tensor that lacks the memory it describes must be refused, and so must an output whose elements share memory. A
 * small problem must not run out of memory. Small, tame results are compared with brute force in double (oracle.c). */
#ifndef BA_FUZZ_H
#define BA_FUZZ_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "blitz_attn.h"

/* ---- Choices (reader.c) ------------------------------------------------------------------------------------------ */

/* Each choice takes one or a few bytes of the input. After the end of the input all bytes are 0, which stands for the usual choice. */
void fz_open(const uint8_t *data, size_t size);
int64_t fz_range(int64_t lo, int64_t hi);
int64_t fz_pick(const int64_t *values, int64_t count);
bool fz_once_in(int n);
/* Whether the next argument is to be unusual, so that the call may have to refuse it. Half of all inputs have no unusual arguments. */
bool fz_unusual(void);
int64_t fz_unusual_number(void);
double fz_unusual_real(void);
/* Pseudo-random numbers for contents and entries of lists. Only fz_seed(), which starts a new sequence, takes a byte of the input. */
void fz_seed(void);
uint32_t fz_random(void);
int64_t fz_below(int64_t n); /* 0 .. n-1; 0 for n < 1 */

/* ---- Memory of a call (memory.c) ----------------------------------------------------------------------------------- */

typedef enum fz_role {
    FZ_INPUT,
    FZ_OUTPUT,  /* every element is written */
    FZ_PARTIAL, /* some elements are written */
} fz_role;

enum {
    FZ_FREE_LAST = 1, /* the last axis need not be contiguous */
    FZ_PLAIN = 2,     /* nothing unusual: the tensor has exactly the given form */
};

void fz_release_all(void);
/* Chooses how contents are drawn from here on. Values are small and finite if fz_is_tame(). */
void fz_draw_contents(void);
bool fz_is_tame(void);

/* A tensor with these axes and with strides that the input chooses. The input may also choose an unusual dtype, rank, axis, stride or pointer. Its
 * memory has exactly the bytes that its axes address. If these are more than the fuzzer allocates, or than can exist, the call must refuse the
 * tensor. */
ba_tensor fz_tensor(fz_role role, ba_dtype dtype, int ndim, const int64_t *dims, int flags);
/* An array of `count` elements in memory of its own; NULL if `count` is negative or too large. */
void *fz_array(int64_t count, size_t size);
int64_t *fz_numbers(int64_t count);
/* NULL, or `count` numbers from lo to hi. The input may choose an unusual one. */
int64_t *fz_numbers_from(int64_t count, int64_t lo, int64_t hi);
/* NULL, or batch + 1 cumulative numbers from 0 to total. The input may choose unusual ones. */
int64_t *fz_cumulative(int64_t batch, int64_t total);
/* NULL, or `count` lengths from 0 to most. The input may choose unusual ones. */
int64_t *fz_lengths(int64_t count, int64_t most);

void fz_set_role(const ba_tensor *t, fz_role role);
void fz_unseen(const ba_tensor *t); /* declares that the call does not read, and so need not refuse, this tensor */
bool fz_backed(const ba_tensor *t); /* whether the tensor has the memory that its axes address */
/* The number of elements; infinity if an axis is negative and none is 0, and 1 if there cannot be so many axes. */
double fz_elements(const ba_tensor *t);
void fz_put(const ba_tensor *t, const int64_t *at, int64_t value); /* sets an element of a tensor of integers, or of BA_BOOL */
double fz_get(const ba_tensor *t, const int64_t *at);              /* an element */
bool fz_next(int64_t *at, const int64_t *dims, int ndim);          /* moves to the next place in C order; false after the last one */

/* ---- Calls (calls.c) --------------------------------------------------------------------------------------------------- */

/* The calls that are counted, and their names in reports. */
#define FZ_EACH_OP(OP)                                                                                                                               \
    OP(FORWARD_CHECK, "block_sparse_check")                                                                                                          \
    OP(FORWARD, "block_sparse_attention")                                                                                                            \
    OP(BACKWARD_CHECK, "block_sparse_backward_check")                                                                                                \
    OP(BACKWARD, "block_sparse_attention_backward")                                                                                                  \
    OP(PAGED_CHECK, "paged_check")                                                                                                                   \
    OP(PAGED, "paged_attention")                                                                                                                     \
    OP(QUEST_METADATA, "quest_metadata")                                                                                                             \
    OP(SELECT_QUEST, "select_blocks quest")                                                                                                          \
    OP(SELECT_MEAN, "select_blocks mean")                                                                                                            \
    OP(SELECT_MAX, "select_blocks max")                                                                                                              \
    OP(SELECT_ODD, "select_blocks other")                                                                                                            \
    OP(BLOCK_MEANS, "block_means")                                                                                                                   \
    OP(BLOCK_MEANS_BACKWARD, "block_means_backward")                                                                                                 \
    OP(GATE, "gate")                                                                                                                                 \
    OP(GATE_BACKWARD, "gate_backward")                                                                                                               \
    OP(NSA_SELECT, "nsa_select")                                                                                                                     \
    OP(CHOOSE, "select_prefill")                                                                                                                     \
    OP(SELECT_TOKENS, "select_tokens")                                                                                                               \
    OP(LIST_KEPT, "list_kept")                                                                                                                       \
    OP(MERGE, "merge_states")                                                                                                                        \
    OP(APPEND, "append_kv")                                                                                                                          \
    OP(QUANTISE, "quantize_kv")                                                                                                                      \
    OP(SETTINGS, "settings")

typedef enum fz_op {
#define FZ_NUMBER(op, name) FZ_##op,
    FZ_EACH_OP(FZ_NUMBER) FZ_OPS
} fz_op;

typedef ba_status (*fz_fn)(const void *args);

/* Runs the call and checks its promises. num_threads is NULL or points to the number of threads in args. Returns whether the call was accepted; if
 * so, its outputs hold its results. */
bool fz_run(fz_op op, fz_fn fn, const void *args, int *num_threads);
void fz_expect_any_order(void); /* for the next call: its results are not compared with those of another run, because two outputs share
                                 * memory, or because the call adds to outputs */
void fz_count_skipped(fz_op op);
void fz_count_compared(fz_op op);
void fz_print_counts(void);
void fz_fail(const char *format, ...) __attribute__((format(printf, 1, 2), noreturn));
/* Drawn sizes are halved until a call has about this many multiply-adds at most (of select_tokens, ten times as many). */
#define FZ_MOST_WORK 3e5
int fz_threads(void);

/* ---- Operations, by file ------------------------------------------------------------------------------------------------ */

ba_dtype fz_float(void);
double fz_scale(int64_t head_dim);
int64_t fz_head_dim(void);

typedef struct fz_sizes {
    ba_layout layout;
    ba_dtype dtype;
    int64_t batch, heads, kv_heads, q_len, kv_len, dim, v_dim; /* for BA_TND, the lengths of all sequences together */
} fz_sizes;

/* Draws all arguments of a call of block-sparse attention except out and lse, and the sizes that they have if nothing is unusual. */
void fz_draw_forward(ba_block_sparse_args *a, fz_sizes *s);
bool fz_is_heavy(const ba_block_sparse_args *a); /* whether the call might take long */
ba_status fz_forward(const void *args);          /* of ba_block_sparse_args */
ba_status fz_check_forward(const void *args);

/* Fills a tensor of integers, of 1 to 4 axes, with list rows over `columns` columns. The input may choose wrong entries. */
void fz_fill_lists(const ba_tensor *t, int64_t columns);
void fz_fill_ranges(const ba_tensor *t, int64_t keys);

/* A mask for calls of these sizes, (batch, heads, queries, keys), or none. Axes of the mask may have length 1. fz_slopes: slopes, or NULL. */
ba_tensor fz_mask(const int64_t *sizes);
const float *fz_slopes(void);

/* Scales of an 8-bit cache with these axes: one per token and head, in any role; or, as an input, one per head, or a single one. */
ba_tensor fz_scales(const int64_t *cache, int64_t kv_heads, fz_role role);
/* Fills a table with numbers of existing pages. With `distinct`, no page occurs twice, if there are enough pages. */
void fz_fill_table(const ba_tensor *t, int64_t pages, bool distinct);

void fz_attention(void);
void fz_paged(void);
void fz_merge(void);
void fz_append(void);
void fz_quantise(void);
void fz_quest_metadata(void);
void fz_select(void);
void fz_block_means(void);
void fz_block_means_backward(void);
void fz_gate(void);
void fz_gate_backward(void);
void fz_nsa_select(void);
void fz_choose(void);
void fz_select_tokens(void);
void fz_settings(void);

/* ---- Oracles (oracle.c): brute force, written from the header's text alone ------------------------------------------------ */

void fz_compare_forward(const ba_block_sparse_args *args);
void fz_compare_paged(const ba_paged_args *args);

#endif
