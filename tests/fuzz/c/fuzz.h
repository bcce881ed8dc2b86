/* The fuzzer of the C API (make fuzz-c). Bytes become the arguments of one call, or of a few that belong together; each runs under ASan and UBSan,
 * on memory that ends where its tensor ends, and is held to what the header promises of every call: a refusal is one sentence and touches nothing,
 * inputs stay, every element of an output is written and nothing beside it, and the bits are the same for any number of threads. */
#ifndef BA_FUZZ_H
#define BA_FUZZ_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "blitz_attn.h"

/* ---- Choices (reader.c) ------------------------------------------------------------------------------------------ */

/* Choices come from the input, one or a few bytes each; after its end all of them are 0, which stands for what is usual. */
void fz_open(const uint8_t *data, size_t size);
int64_t fz_range(int64_t lo, int64_t hi);
int64_t fz_pick(const int64_t *values, int64_t count);
bool fz_once_in(int n);
/* Whether this argument is to be an odd one. Half of all inputs have none, the others some. */
bool fz_odd(void);
int64_t fz_odd_number(void);
double fz_odd_real(void);
/* Numbers that no choice is spent on: contents, entries of lists. A new row of them begins with each seed. */
void fz_seed(void);
uint32_t fz_random(void);
int64_t fz_below(int64_t n); /* 0 .. n-1; 0 for n < 1 */

/* ---- Memory of a call (memory.c) ----------------------------------------------------------------------------------- */

typedef enum fz_role {
    FZ_INPUT,
    FZ_OUTPUT,  /* every element is written */
    FZ_PARTIAL, /* some elements are */
} fz_role;

enum {
    FZ_FREE_LAST = 1, /* the last axis need not be contiguous */
    FZ_PLAIN = 2,     /* nothing odd: what another call has just written */
};

void fz_release_all(void);
/* How contents are drawn; values are small and finite where fz_is_tame(). */
void fz_draw_contents(void);
bool fz_is_tame(void);

/* A tensor about as asked: strides by choice, and where the input says so an odd dtype, rank, axis, stride or pointer. Its memory has exactly the
 * bytes that its axes address. Where these are more than the fuzzer gives, or than there can be, the call must be refused. */
ba_tensor fz_tensor(fz_role role, ba_dtype dtype, int ndim, const int64_t *dims, int flags);
/* `count` elements by themselves, or NULL where that is no count. */
void *fz_array(int64_t count, size_t size);
int64_t *fz_numbers(int64_t count);
/* NULL, or a row of rising numbers from 0 to total, batch + 1 of them; odd ones where the input says so. */
int64_t *fz_cumulative(int64_t batch, int64_t total);
/* NULL, or a length from 0 to most for each; odd ones where the input says so. */
int64_t *fz_lengths(int64_t count, int64_t most);

void fz_set_role(const ba_tensor *t, fz_role role);
void fz_unseen(const ba_tensor *t); /* the call does not look at it, so it may be anything */
bool fz_backed(const ba_tensor *t); /* it has the memory that its axes address */
/* Elements that the axes say, as far as that can be worked through: huge where they are negative or too many. */
double fz_elements(const ba_tensor *t);
void fz_put(const ba_tensor *t, const int64_t *at, int64_t value); /* into a tensor of integers */
double fz_get(const ba_tensor *t, const int64_t *at);              /* of floats */

/* ---- Calls (calls.c) --------------------------------------------------------------------------------------------------- */

typedef enum fz_op {
    FZ_FORWARD_CHECK,
    FZ_FORWARD,
    FZ_BACKWARD_CHECK,
    FZ_BACKWARD,
    FZ_PAGED_CHECK,
    FZ_PAGED,
    FZ_QUEST_METADATA,
    FZ_SELECT_QUEST,
    FZ_SELECT_MEAN,
    FZ_SELECT_MAX,
    FZ_SELECT_ODD,
    FZ_BLOCK_MEANS,
    FZ_BLOCK_MEANS_BACKWARD,
    FZ_GATE,
    FZ_GATE_BACKWARD,
    FZ_NSA_SELECT,
    FZ_MERGE,
    FZ_SETTINGS,
    FZ_OPS
} fz_op;

typedef ba_status (*fz_fn)(const void *args);

/* Runs the call and looks at what it did; num_threads, where not NULL, lies in args. True where it was accepted: outputs then hold its results. */
bool fz_run(fz_op op, fz_fn fn, const void *args, int *num_threads);
void fz_expect_any_order(void); /* of this call: results may depend on the order of work, two outputs share a place */
void fz_count_skipped(fz_op op);
void fz_count_compared(fz_op op);
void fz_print_counts(void);
void fz_fail(const char *format, ...) __attribute__((format(printf, 1, 2), noreturn));
/* Multiply-adds that one call may take; what takes more is left out. */
#define FZ_MOST_WORK 3e5
int fz_threads(void);

/* ---- Operations, by file ------------------------------------------------------------------------------------------------ */

ba_dtype fz_float(void);
double fz_scale(int64_t head_dim);
int64_t fz_head_dim(void);

/* Rows of lists over so many columns, in a tensor of 1 to 4 axes of integers; now and then with an entry that may not stand there. */
void fz_fill_lists(const ba_tensor *t, int64_t columns);

/* The same for tables: pages that there are; distinct: none twice as long as there are enough. */
void fz_fill_table(const ba_tensor *t, int64_t pages, bool distinct);

void fz_attention(void);
void fz_paged(void);
void fz_merge(void);
void fz_quest_metadata(void);
void fz_select(void);
void fz_block_means(void);
void fz_block_means_backward(void);
void fz_gate(void);
void fz_gate_backward(void);
void fz_nsa_select(void);
void fz_settings(void);

/* ---- Oracles (oracle.c): by brute force, from the header's text alone ----------------------------------------------------- */

void fz_compare_forward(const ba_block_sparse_args *args);
void fz_compare_paged(const ba_paged_args *args);

#endif
