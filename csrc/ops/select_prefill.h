/* What the parts of choosing blocks for prefill share. Internal.
 *
 * A *list* is what one head, or one KV head, keeps of a sequence. A *row* is what scores: a few pooled queries, or one; a *group*
 * is what is scored: a few pooled keys, or one. Both begin at multiples of their size, so that blocks hold whole ones. */
#ifndef BA_OPS_SELECT_PREFILL_H
#define BA_OPS_SELECT_PREFILL_H

#include "kernels/kernels.h"
#include "ops/problem.h"

typedef struct ba_prefill {
    const ba_select_prefill_args *args;
    ba_problem p;
    ba_tensor kept_shape, counts_shape, scores_shape, lists_shape; /* of the outputs; of lists the width is 1, and follows from counts */
    int64_t lists, list_heads;                                     /* of a sequence; query heads that a list is for */
    int64_t row_tokens, group_tokens;                              /* a row stands for the queries of so many, a group for the keys */
    int64_t rows_a_block, groups_a_block;                          /* vertical_slash: 1, and all keys of a block */
    int64_t depth, pitch;                                          /* reals of a row or group that count, and that it has room for */
    int64_t words;
    const ba_kernels *kernels;
    const ba_attend_family *family; /* of reals */
    ba_dtype real;
    int64_t real_size, lanes, chunk; /* groups scored together */
    /* The (batch entry, KV head) pairs at hand, and where the groups of each begin. */
    int64_t first_pair, pairs, pair_bytes;
    char *groups;
    double *lines;              /* NULL but for BA_CHOOSER_VERTICAL_SLASH */
    int64_t *tails_begin;       /* [B], BA_BUDGET_DENSITY; else NULL, as the next */
    float *tails;               /* of each sequence [list][row][column]: -1 where always kept */
    int64_t strip_rows, strips; /* rows of blocks that an item scores; of a sequence at most */
    int64_t scratch_bytes;
    char *scratch;
} ba_prefill;

/* A call in two steps, as in open.h: opening checks all inputs; there is nothing to close. */
ba_status ba_open_prefill(const ba_select_prefill_args *args, ba_prefill *c);
ba_status ba_set_prefill_outputs(const ba_select_prefill_args *args, ba_prefill *c);
ba_status ba_run_prefill(ba_prefill *c);

/* Blocks of keys of a sequence. */
static inline int64_t ba_prefill_columns(const ba_prefill *c, int64_t batch) { return ba_ceil_div(ba_kv_span(&c->p, batch).valid, c->p.block_kv); }

/* Blocks of keys that a row of blocks may see: [lo, hi), [0, 0) for none. */
ba_range ba_prefill_blocks(const ba_prefill *c, int64_t batch, int64_t block_row);

/* Keys that the queries first .. last may see: those of the first to those of the last, which leave no gap. */
static inline ba_range ba_prefill_keys(const ba_prefill *c, int64_t batch, int64_t first, int64_t last) {
    const int64_t q_valid = ba_q_span(&c->p, batch).valid, kv_valid = ba_kv_span(&c->p, batch).valid;
    const ba_range end = ba_visible_keys(&c->p, last, q_valid, kv_valid);
    return (ba_range){end.hi ? ba_visible_keys(&c->p, first, q_valid, kv_valid).lo : 0, end.hi};
}

/* ---- Rows and groups as vectors whose product is the score (select_features.c) --------------------------------- */

typedef struct ba_features {
    char *wide, *extremes;
    const void **pointers, **wide_rows;
} ba_features;

int64_t ba_features_lay_out(const ba_prefill *c, char *base, ba_features *s);
/* Group `group` of a KV head, c->pitch reals. */
void ba_features_of_group(const ba_prefill *c, const ba_features *s, int64_t batch, int64_t kv_head, int64_t group, void *to);
/* Row `row` of a head, the same. */
void ba_features_of_row(const ba_prefill *c, const ba_features *s, int64_t batch, int64_t head, int64_t row, void *to);

/* ---- Scores of a strip (select_scores.c) ------------------------------------------------------------------------ */

typedef struct ba_strip {
    int64_t batch, list, first, rows; /* rows of blocks */
} ba_strip;

typedef struct ba_strip_scratch {
    ba_features features;
    char *rows, *q, *m, *l, *alpha, *row_max, *chunk;
    int32_t *lo, *hi, *key_index;
    const void **k_rows, **pointers;
    char *sums;      /* [column][lane] of a panel: shares relative to the maximum at the end of its chunk */
    char *factors;   /* [chunk][lane]: those maxima, then what makes them shares */
    int32_t *chunks; /* [column]: the last chunk of its groups */
    double *head;    /* [row of the strip][column]: scores of one head */
    float *scores;   /* the same of the list */
    /* of budgets */
    uint32_t *keys, *other_keys;
    int32_t *order, *other_order;
} ba_strip_scratch;

/* Rows of a sequence as a panel: they see groups [lo, hi) and, all of them, [all_lo, all_hi). */
typedef struct ba_panel_rows {
    int64_t lo, hi, all_lo, all_hi;
    bool known; /* s->m is the log-sum-exp already, and stays */
} ba_panel_rows;

/* Packs rows first .. first+rows-1 of a head into s->q, and says what they see. */
ba_panel_rows ba_panel_open(const ba_prefill *c, const ba_strip_scratch *s, int64_t batch, int64_t head, int64_t first, int64_t rows);
/* Weights of some groups of a pair, c->chunk at most, into s->chunk as [group][lane]. */
void ba_panel_score(const ba_prefill *c, const ba_strip_scratch *s, const ba_panel_rows *at, const char *groups, int64_t begin, int64_t end);

int64_t ba_strip_lay_out(const ba_prefill *c, char *base, ba_strip_scratch *s);
/* Fills s->scores. False where the call is to stop. */
bool ba_strip_score(const ba_prefill *c, const ba_strip_scratch *s, const ba_strip *strip);

/* ---- BA_CHOOSER_VERTICAL_SLASH (select_lines.c) ------------------------------------------------------------------ */

/* Reals of one head: c->lines has room for so many doubles a head of the pairs at hand. */
int64_t ba_lines_doubles(const ba_prefill *c);
/* Finds the mass of keys and distances of a head, its number `here` among those of the pairs at hand. False where the call is to stop. */
bool ba_lines_find(const ba_prefill *c, const ba_strip_scratch *s, int64_t batch, int64_t head, int64_t here);
/* Fills s->head with a head's scores of the strip. */
void ba_lines_score(const ba_prefill *c, const ba_strip_scratch *s, const ba_strip *strip, int64_t head);

/* ---- Budgets (select_budget.c) ---------------------------------------------------------------------------------- */

/* Decides what a row of blocks keeps from its scores and writes it; under BA_BUDGET_DENSITY only what it always keeps, and its tails. */
void ba_budget_row(const ba_prefill *c, const ba_strip_scratch *s, int64_t batch, int64_t list, int64_t block_row, const float *scores);
/* Under BA_BUDGET_DENSITY: the rest, of lists first .. first+lists-1 of a sequence, which share a density. `bins`: BA_BUDGET_BINS numbers. */
enum { BA_BUDGET_BINS = 1 << 16 };
void ba_budget_share(const ba_prefill *c, int64_t batch, int64_t first, int64_t lists, int64_t *bins);

#endif
