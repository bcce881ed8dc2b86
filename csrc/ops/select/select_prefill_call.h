/* What the files that choose blocks for prefill share. Internal.
 *
 * A *list* is what one query head, or one KV head, keeps of a sequence. A *row* is one query or a few pooled queries; a *group* is one key or a few
 * pooled keys. Rows and groups begin at multiples of their size, so that every block consists of whole ones. The product of a row and a group is the
 * score. A *row of blocks* (block_row, or a row of a strip) is one block of queries; a *column* is one block of keys.
 *
 * Sort the blocks of a row of blocks that are not always kept by falling score: the *tail* of a block is the sum of its score and of all scores
 * behind it. A top_p budget of p keeps the blocks with tails above 1 - p. With one density for several rows, the blocks with the largest tails of all
 * rows are kept, as if one p were applied to all of them. */
#ifndef BA_OPS_SELECT_PREFILL_CALL_H
#define BA_OPS_SELECT_PREFILL_CALL_H

#include "kernels/kernels.h"
#include "ops/problem.h"

/* What is known of the blocks of a row that are not always kept before they are sorted: see select_budget.c. */
enum { BA_OUTLINE_BUCKETS = 64 };
typedef struct ba_outline {
    int32_t highest, shift;                /* the bits of the highest score; a bucket takes 1 << shift different bits */
    int32_t in_middle;                     /* blocks in the middle of the row */
    double bounds[BA_OUTLINE_BUCKETS + 1]; /* tails of the blocks in bucket i are above bounds[i + 1] and at most bounds[i] */
} ba_outline;

/* The lists of a sequence that share one density: the least tail that is kept. */
typedef struct ba_share {
    int least_class, most_class; /* between which it is */
    uint32_t least;              /* the bits of this tail, as far as they are known: digits that are not are 0 */
    int64_t places;     /* how many of the blocks whose tails begin with these digits are kept; at the end, how many with exactly the least tail */
    bool none, has_all; /* no block is kept but the ones that always are; all blocks with exactly the least tail are kept */
} ba_share;

/* What rows of blocks see where queries have kv_ranges or q_begin, and what they always keep of it; NULL where they have neither: select_visible.c.
 */
typedef struct ba_rows {
    ba_range *seen; /* [B][row]: from the first block that some query of the row sees to the place after the last one; [0, 0) where there is none */
    uint64_t *visible; /* [B][row][word]: a bit for each block, 1 where some query of the row sees a key of the block */
    uint64_t *forced;  /* [B][row][word]: a bit for each block, 1 where it is always kept */
} ba_rows;

typedef struct ba_prefill {
    const ba_select_prefill_args *args;
    ba_problem p;
    ba_tensor kept_shape, counts_shape, scores_shape, lists_shape; /* of the outputs. The width of the lists, here 1, follows from counts */
    int64_t lists, list_heads;                                     /* lists per sequence; query heads per list */
    int64_t row_tokens, group_tokens;                              /* the queries that a row stands for, and the keys that a group stands for */
    int64_t rows_per_block, groups_per_block;                      /* with BA_CHOOSER_VERTICAL_SLASH, a row and a group are one token */
    int64_t depth, pitch;                                          /* numbers per row or group, and from one row or group to the next */
    double scale;                                                  /* of products, in log2 units */
    int64_t words;
    const ba_kernels *kernels;
    const ba_attend_family *family;
    ba_dtype real;
    int64_t real_size, number_size; /* a number of a row or group is a real, or bfloat16 where the family multiplies pairs of these */
    int64_t lanes, chunk;           /* groups scored together */
    /* The (batch entry, KV head) pairs whose groups are in memory, and the bytes of the groups of each. */
    int64_t first_pair, pairs, pair_bytes;
    char *groups;
    ba_rows rows;
    double *lines;        /* BA_CHOOSER_VERTICAL_SLASH only, else NULL */
    int64_t *tails_begin; /* [B], the first tail of each sequence. Of no size, like all up to bins, unless the budget is BA_BUDGET_DENSITY */
    float *tails;         /* of each sequence [list][row][column]: scores, -1 where a block does not compete; then tails of the middle of the row */
    ba_outline *outlines; /* [B][list][row] */
    uint64_t *middles;    /* [B][list][row][word]: a bit for each block, 1 in the middle of the row */
    ba_share *shares;     /* [B][lists, or 1 where all lists of a sequence share one density] */
    int64_t *bins;        /* [share][BA_BUDGET_BINS] */
    int digit;            /* by which tails are counted */
    int64_t panels, panel_rows; /* of a strip at most; rows of a panel */
    int64_t strip_rows, strips; /* rows of blocks that an item scores; the largest number of such strips in a sequence */
    int64_t scratch_bytes;
    char *scratch;
} ba_prefill;

/* The number of blocks of keys in a sequence. */
static inline int64_t ba_prefill_columns(const ba_prefill *c, int64_t batch) { return ba_ceil_div(ba_kv_span(&c->p, batch).valid, c->p.block_kv); }

/* From one row of a strip's scores to the next in `head`: not a multiple of 4096 bytes, because a column of such rows would take the same few places
 * of a cache. */
static inline int64_t ba_head_pitch(const ba_prefill *c) { return ba_round_up(c->p.block_columns, 16) + 8; }

/* ---- What rows see (select_visible.c) ------------------------------------------------------------------------------- */

/* From the first key that one of the queries first .. last may see to the place after the last one: [0, 0) where they see none. With kv_ranges, there
 * may be keys between that none of them sees. */
ba_range ba_prefill_keys(const ba_prefill *c, int64_t batch, int64_t first, int64_t last);
/* The blocks of keys that a row of blocks may see, likewise. */
ba_range ba_prefill_blocks(const ba_prefill *c, int64_t batch, int64_t block_row);

/* The bits of a word that stand for blocks of a range. */
static inline uint64_t ba_bits_within(int64_t word, ba_range blocks) {
    const int64_t lo = ba_max(blocks.lo - word * 64, 0), hi = ba_min(blocks.hi - word * 64, 64);
    return lo < hi ? ~(uint64_t)0 >> (64 - (hi - lo)) << lo : 0;
}

/* The bits of the blocks between the ends of ba_prefill_blocks() that the row may see: NULL where it may see all. */
static inline const uint64_t *ba_visible_blocks(const ba_prefill *c, int64_t batch, int64_t block_row) {
    return c->rows.visible ? c->rows.visible + (batch * c->p.block_rows + block_row) * c->words : NULL;
}
static inline bool ba_is_visible(const uint64_t *visible, int64_t block) { return !visible || visible[block / 64] >> block % 64 & 1; }

/* How many blocks a row of blocks may see. */
static inline int64_t ba_count_visible(const ba_prefill *c, const uint64_t *visible, ba_range seen) {
    if (!visible) return seen.hi - seen.lo;
    int64_t n = 0;
    for (int64_t word = 0; word < c->words; word++) n += __builtin_popcountll(visible[word]);
    return n;
}

/* Lays out the notes on rows; they take no memory where there are neither kv_ranges nor q_begin. */
int64_t ba_rows_lay_out(const ba_prefill *c, char *base, ba_rows *rows);
/* Notes what row item % c->p.block_rows of sequence item / c->p.block_rows sees. For ba_parallel(). */
void ba_note_row(void *context, int64_t item, int worker);

/* ---- Rows and groups as vectors whose product is the score (select_features.c) --------------------------------- */

typedef struct ba_features {
    char *wide, *pooled, *narrow;
    const void **pointers, **wide_rows;
} ba_features;

/* Lays out the scratch memory of the functions below. */
int64_t ba_features_lay_out(const ba_prefill *c, char *base, ba_features *s);
/* Writes group `group` of a KV head to `to`, which has room for c->pitch numbers. */
void ba_features_of_group(const ba_prefill *c, const ba_features *s, int64_t batch, int64_t kv_head, int64_t group, void *to);
/* Writes row `row` of a query head to `to`, in the same form. */
void ba_features_of_row(const ba_prefill *c, const ba_features *s, int64_t batch, int64_t head, int64_t row, void *to);

/* ---- A worker's scratch memory, and a panel of rows (select_panels.c) ------------------------------------------ */

enum { BA_STRIP_PANELS = 4 };

typedef struct ba_strip {
    int64_t batch, list, first, rows; /* rows of blocks */
} ba_strip;

typedef struct ba_strip_scratch {
    ba_features features;
    char *rows, *q, *m, *l, *row_max, *chunk;
    int32_t *lo, *hi, *key_index; /* key_index, k_rows: of consecutive groups, two chunks of them at most */
    const void **k_rows, **pointers;
    char *sums;      /* [column][lane] of a panel: sums of weights, relative to the maximum at the end of the column's last chunk */
    char *alphas;    /* [chunk][lane]: what a chunk has multiplied the sums before it with */
    int32_t *chunks; /* [column]: the last chunk with groups of the column */
    double *head;    /* [row of the strip][ba_head_pitch]: the scores of one query head */
    float *scores;   /* [row of the strip][column]: the scores of the list */
    /* for budgets: */
    uint64_t *places, *other_places, *middle;
    float *free_scores; /* [column]; -1 where a block does not compete: it is always kept, or not visible */
    int64_t *bins;      /* numbers of blocks by the class of the least tail that they may have, then by that of the largest */
} ba_strip_scratch;

/* Lays out the scratch memory of a worker, for the panels of a strip. */
int64_t ba_strip_lay_out(const ba_prefill *c, char *base, ba_strip_scratch *s);
/* The scratch memory of a worker as panel number `panel` of a strip sees it. */
ba_strip_scratch ba_strip_of_panel(const ba_prefill *c, const ba_strip_scratch *s, int64_t panel);

/* What the rows of a panel see: some row sees groups [lo, hi), and every row sees groups [all_lo, all_hi). */
typedef struct ba_panel_rows {
    int64_t lo, hi, all_lo, all_hi;
    bool known; /* s->m is the log-sum-exp already, so that weights are final */
} ba_panel_rows;

/* Packs rows first .. first + rows - 1 of a query head into s->q, and returns what they see. */
ba_panel_rows ba_panel_open(const ba_prefill *c, const ba_strip_scratch *s, int64_t batch, int64_t head, int64_t first, int64_t rows);
/* Groups [begin, end) of a pair, at most c->chunk of them, and groups [next, next_end) that the next chunk of some panel begins with. s->k_rows and
 * s->key_index begin with group `first`. */
typedef struct ba_group_range {
    int64_t first, begin, end, next, next_end;
} ba_group_range;
/* Sets s->k_rows and s->key_index for groups [begin, end) of a pair. */
void ba_point_to_groups(const ba_prefill *c, const ba_strip_scratch *s, const char *groups, int64_t begin, int64_t end);
/* Computes the weights of a range of groups, relative to the largest score so far or, where at->known, to s->m as it is, and adds them up by blocks
 * of `block` groups, whose sums begin at `sums`, [block][lane]: a block that began in an earlier chunk is continued. `alpha` is set, for each lane,
 * as the kernel sum_blocks says. */
void ba_panel_score(const ba_prefill *c, const ba_strip_scratch *s, const ba_panel_rows *at, const ba_group_range *range, int64_t block, void *sums,
                    void *alpha);

/* ---- Scores of a strip (select_scores.c) ------------------------------------------------------------------------ */

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
 * and notes the scores of the others. */
void ba_budget_row(const ba_prefill *c, const ba_strip_scratch *s, int64_t batch, int64_t list, int64_t block_row, const float *scores);
/* With BA_BUDGET_DENSITY, after the rows of a strip: counts the blocks that are in s->bins, which were 0 before the first row. */
enum { BA_BUDGET_BINS = 1 << 11, BA_SPARE_BINS = 8, BA_TAIL_CLASSES = 1 << 9 | 32 };
void ba_budget_count(const ba_prefill *c, const ba_strip_scratch *s, int64_t batch, int64_t list);
/* With BA_BUDGET_DENSITY: keeps the other blocks. */
ba_status ba_budget_share(ba_prefill *c, int threads);

#endif
