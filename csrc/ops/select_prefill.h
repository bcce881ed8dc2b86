/* What the files that choose blocks for prefill share. Internal.
 *
 * A *list* is what one query head, or one KV head, keeps of a sequence. A *row* is one query or a few pooled queries; a *group* is one key or a few
 * pooled keys. Rows and groups begin at multiples of their size, so that every block consists of whole ones. The product of a row and a group is the
 * score. */
#ifndef BA_OPS_SELECT_PREFILL_H
#define BA_OPS_SELECT_PREFILL_H

#include "kernels/kernels.h"
#include "ops/problem.h"

typedef struct ba_prefill {
    const ba_select_prefill_args *args;
    ba_problem p;
    ba_tensor kept_shape, counts_shape, scores_shape, lists_shape; /* of the outputs. The width of the lists, here 1, follows from counts */
    int64_t lists, list_heads;                                     /* lists per sequence; query heads per list */
    int64_t row_tokens, group_tokens;                              /* the queries that a row stands for, and the keys that a group stands for */
    int64_t rows_per_block, groups_per_block;                      /* with BA_CHOOSER_VERTICAL_SLASH, a row and a group are one token */
    int64_t depth, pitch;                                          /* reals per row or group, and from one row or group to the next */
    int64_t words;
    const ba_kernels *kernels;
    const ba_attend_family *family; /* of reals */
    ba_dtype real;
    int64_t real_size, lanes, chunk; /* groups scored together */
    /* The (batch entry, KV head) pairs whose groups are in memory, and the bytes of the groups of each. */
    int64_t first_pair, pairs, pair_bytes;
    char *groups;
    double *lines;              /* BA_CHOOSER_VERTICAL_SLASH only, else NULL */
    int64_t *tails_begin;       /* [B], the first tail of each sequence; `tails` and this are NULL unless the budget is BA_BUDGET_DENSITY */
    float *tails;               /* of each sequence [list][row][column]; -1 where a block is always kept */
    int64_t panels, panel_rows; /* of a strip at most; rows of a panel */
    int64_t strip_rows, strips; /* rows of blocks that an item scores; the largest number of such strips in a sequence */
    int64_t scratch_bytes;
    char *scratch;
} ba_prefill;

/* A call in two steps, as in open.h. Opening checks all inputs. There is nothing to close. */
ba_status ba_open_prefill(const ba_select_prefill_args *args, ba_prefill *c);
ba_status ba_set_prefill_outputs(const ba_select_prefill_args *args, ba_prefill *c);
ba_status ba_run_prefill(ba_prefill *c);

/* The number of blocks of keys in a sequence. */
static inline int64_t ba_prefill_columns(const ba_prefill *c, int64_t batch) { return ba_ceil_div(ba_kv_span(&c->p, batch).valid, c->p.block_kv); }

/* The blocks of keys that a row of blocks may see: [lo, hi), which is [0, 0) where it sees none. */
ba_range ba_prefill_blocks(const ba_prefill *c, int64_t batch, int64_t block_row);

/* The keys that queries first .. last may see: from the first key of the first query to the last key of the last. There is no gap between. */
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

/* Hands out the parts of the scratch memory at `base` and returns their size; with base NULL, only the size counts. */
int64_t ba_features_lay_out(const ba_prefill *c, char *base, ba_features *s);
/* Writes group `group` of a KV head to `to`, which has room for c->pitch reals. */
void ba_features_of_group(const ba_prefill *c, const ba_features *s, int64_t batch, int64_t kv_head, int64_t group, void *to);
/* Writes row `row` of a query head to `to`, in the same form. */
void ba_features_of_row(const ba_prefill *c, const ba_features *s, int64_t batch, int64_t head, int64_t row, void *to);

/* ---- Scores of a strip (select_scores.c) ------------------------------------------------------------------------ */

enum { BA_STRIP_PANELS = 4 };

typedef struct ba_strip {
    int64_t batch, list, first, rows; /* rows of blocks */
} ba_strip;

typedef struct ba_strip_scratch {
    ba_features features;
    char *rows, *q, *m, *l, *alpha, *row_max, *chunk;
    int32_t *lo, *hi, *key_index;
    const void **k_rows, **pointers;
    char *sums;      /* [column][lane] of a panel: sums of weights, relative to the maximum at the end of the column's last chunk */
    char *factors;   /* [chunk][lane]: first these maxima, then the factors that turn the sums into shares */
    int32_t *chunks; /* [column]: the last chunk with groups of the column */
    double *head;    /* [row of the strip][column]: the scores of one query head */
    float *scores;   /* [row of the strip][column]: the scores of the list */
    /* for budgets: */
    uint32_t *keys, *other_keys;
    int32_t *order, *other_order;
} ba_strip_scratch;

/* What the rows of a panel see: some row sees groups [lo, hi), and every row sees groups [all_lo, all_hi). */
typedef struct ba_panel_rows {
    int64_t lo, hi, all_lo, all_hi;
    bool known; /* s->m is the log-sum-exp already, so that weights are final */
} ba_panel_rows;

/* Packs rows first .. first + rows - 1 of a query head into s->q, and returns what they see. */
ba_panel_rows ba_panel_open(const ba_prefill *c, const ba_strip_scratch *s, int64_t batch, int64_t head, int64_t first, int64_t rows);
/* Computes the weights of groups [begin, end) of a pair, at most c->chunk groups, into s->chunk, [group][lane]. */
void ba_panel_score(const ba_prefill *c, const ba_strip_scratch *s, const ba_panel_rows *at, const char *groups, int64_t begin, int64_t end);

int64_t ba_strip_lay_out(const ba_prefill *c, char *base, ba_strip_scratch *s);
/* Fills s->scores. Returns false where the call must stop. */
bool ba_strip_score(const ba_prefill *c, const ba_strip_scratch *s, const ba_strip *strip);

/* ---- BA_CHOOSER_VERTICAL_SLASH (select_lines.c) ------------------------------------------------------------------ */

/* The number of doubles in c->lines for each query head. */
int64_t ba_lines_doubles(const ba_prefill *c);
/* Computes the attention mass of the keys and of the distances of a query head. `here` is the head's number among those of the pairs in memory.
 * Returns false where the call must stop. */
bool ba_lines_find(const ba_prefill *c, const ba_strip_scratch *s, int64_t batch, int64_t head, int64_t here);
/* Fills s->head with the strip's scores of one query head. */
void ba_lines_score(const ba_prefill *c, const ba_strip_scratch *s, const ba_strip *strip, int64_t head);

/* ---- Budgets (select_budget.c) ---------------------------------------------------------------------------------- */

/* Decides from its scores which blocks a row of blocks keeps, and writes them. With BA_BUDGET_DENSITY, writes only the blocks that are always kept,
 * and the tails of the others. */
void ba_budget_row(const ba_prefill *c, const ba_strip_scratch *s, int64_t batch, int64_t list, int64_t block_row, const float *scores);
/* With BA_BUDGET_DENSITY: keeps the other blocks, in lists first .. first + lists - 1 of a sequence, which share one density. `bins` is scratch
 * memory for BA_BUDGET_BINS numbers. */
enum { BA_BUDGET_BINS = 1 << 16 };
void ba_budget_share(const ba_prefill *c, int64_t batch, int64_t first, int64_t lists, int64_t *bins);

#endif
