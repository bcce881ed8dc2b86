/* The words, structs and functions that all files for choosing blocks of prefill share. Internal.
 *
 * A *list head* is one query head, or one KV head, for which lists of blocks are made. A *pooled query* is one query, or the vector that a few
 * queries become; a *pooled key* likewise. Pooled queries and keys begin at multiples of their size in tokens, so that every block consists of whole
 * ones. The product of a pooled query and a pooled key is the score. A *block row* is one block of queries, a *column* one block of keys, and a
 * *band* some neighbouring block rows, which are scored together.
 *
 * Let those blocks of a block row that are not always kept be sorted by falling score. The *tail* of a block is then the sum of its score and of all
 * scores behind it. A top_p budget of p keeps the blocks with tails above 1 - p. With one density for several block rows, the blocks with the largest
 * tails of all block rows are kept, as if one p were applied to all of them. */
#ifndef BA_OPS_SELECT_PREFILL_CALL_H
#define BA_OPS_SELECT_PREFILL_CALL_H

#include "kernels/kernels.h"
#include "ops/problem.h"

/* An outline of those blocks of a block row that are not always kept, made before they are sorted (select_budget.c). */
enum { BA_OUTLINE_BUCKETS = 64 };
typedef struct ba_outline {
    int32_t highest, shift; /* the bits of the highest score, as an integer; every bucket but the last takes 1 << shift such integers */
    int32_t in_middle;      /* blocks in the middle of the block row */
    double bounds[BA_OUTLINE_BUCKETS + 1]; /* tails of the blocks in bucket i are at least bounds[i + 1] and at most bounds[i] */
} ba_outline;

/* The least tail that is kept, among all list heads of a sequence that share one density, and the number of blocks to keep. */
typedef struct ba_share {
    int least_class, most_class; /* the lowest and the highest class that this tail may have */
    uint32_t least;              /* the bits of this tail, as far as they are known: digits that are not known are 0 */
    int64_t to_keep;    /* how many of the blocks whose tails begin with these digits are kept; at the end, how many with exactly the least tail */
    bool none, has_all; /* no further block is to be kept; all blocks with exactly the least tail are kept */
} ba_share;

/* The blocks that block rows see, and those that they always keep. Both are noted where queries have kv_ranges or q_begin; the pointers are NULL
 * where queries have neither (select_visible.c). */
typedef struct ba_notes {
    ba_range *seen;    /* [B][block row]: from the first block that some query sees to the one after the last; [0, 0) where none is seen */
    uint64_t *visible; /* [B][block row][word]: a bit for each block, 1 where some query of the block row sees a key of the block */
    uint64_t *forced;  /* [B][block row][word]: a bit for each block, 1 where it is always kept */
} ba_notes;

typedef struct ba_prefill {
    const ba_select_prefill_args *args;
    ba_problem p;
    ba_tensor kept_shape, counts_shape, scores_shape, lists_shape; /* of the outputs. The width of the lists, here 1, follows from counts */
    int64_t list_heads, shared_heads;                              /* list heads of a sequence; query heads that share one */
    int64_t q_tokens, k_tokens;                                    /* tokens of a pooled query, and of a pooled key */
    int64_t q_per_block, k_per_block;                              /* pooled queries and keys; with BA_CHOOSER_VERTICAL_SLASH, each is one token */
    int64_t depth, pitch;                                          /* numbers of a pooled query or key; numbers from one to the next */
    double scale;                                                  /* of products, in log2 units */
    int64_t words;
    const ba_kernels *kernels;
    const ba_attend_family *family;
    ba_dtype real;
    int64_t real_size, number_size; /* a number of a pooled query or key is a real, or bfloat16 where the family multiplies pairs of these */
    int64_t lanes, chunk;           /* pooled queries, and pooled keys, that are scored together */
    int64_t align;                  /* pooled keys of a panel, and of a chunk, begin at a multiple of this; 1: they may begin anywhere */
    /* The KV heads, counted over the batch, whose pooled keys are in memory: the first, their number, and the bytes of the pooled keys of one. */
    int64_t first_batch_head, batch_heads, batch_head_bytes;
    char *pooled_keys;
    ba_notes notes;
    double *lines;        /* BA_CHOOSER_VERTICAL_SLASH only, else NULL */
    int64_t *tails_begin; /* [B], the first tail of each sequence. This and the next arrays, down to `bins`, are empty unless the budget is
                           * BA_BUDGET_DENSITY */
    float *tails;         /* of each sequence [list head][block row][column]: scores, -1 where a block does not compete; later tails of the middle */
    ba_outline *outlines; /* [B][list head][block row] */
    uint64_t *middles;    /* [B][list head][block row][word]: a bit for each block, 1 in the middle */
    ba_share *shares;     /* [B][list heads, or 1 where all of a sequence share one density] */
    int64_t *bins;        /* [share][BA_BUDGET_BINS] */
    int digit;            /* the digit by which tails are counted */
    int64_t panels, panel_queries; /* the most panels of a band; pooled queries of a panel */
    int64_t band_rows, bands;      /* block rows of a band, which an item scores; the largest number of bands in a sequence */
    int64_t scratch_bytes;
    char *scratch;
} ba_prefill;

/* The number of blocks of keys in a sequence. */
static inline int64_t ba_prefill_columns(const ba_prefill *c, int64_t batch) { return ba_ceil_div(ba_kv_span(&c->p, batch).valid, c->p.block_kv); }

/* The distance in ba_band_scratch.head from the scores of one block row to those of the next. It is not a multiple of 4096 bytes, because the scores
 * of a column would then compete for a few lines of the cache. */
static inline int64_t ba_head_pitch(const ba_prefill *c) { return ba_round_up(c->p.block_columns, 16) + 8; }

/* ---- What block rows see (select_visible.c) ------------------------------------------------------------------------ */

/* The range from the first to the last key that some of the queries first .. last see: [0, 0) where they see none. With kv_ranges, this range may
 * hold keys that none of these queries sees. */
ba_range ba_prefill_keys(const ba_prefill *c, int64_t batch, int64_t first, int64_t last);
/* The range from the first to the last block of keys that a block row sees, likewise. */
ba_range ba_prefill_blocks(const ba_prefill *c, int64_t batch, int64_t block_row);

/* The bits of a word that stand for blocks of a range. */
static inline uint64_t ba_bits_within(int64_t word, ba_range blocks) {
    const int64_t lo = ba_max(blocks.lo - word * 64, 0), hi = ba_min(blocks.hi - word * 64, 64);
    return lo < hi ? ~(uint64_t)0 >> (64 - (hi - lo)) << lo : 0;
}

/* The bits of the blocks between the ends of ba_prefill_blocks() that the block row sees. NULL: it sees all of these. */
static inline const uint64_t *ba_visible_blocks(const ba_prefill *c, int64_t batch, int64_t block_row) {
    return c->notes.visible ? c->notes.visible + (batch * c->p.block_rows + block_row) * c->words : NULL;
}
static inline bool ba_is_visible(const uint64_t *visible, int64_t block) { return !visible || visible[block / 64] >> block % 64 & 1; }

/* How many blocks a block row sees. */
static inline int64_t ba_count_visible(const ba_prefill *c, const uint64_t *visible, ba_range seen) {
    if (!visible) return seen.hi - seen.lo;
    int64_t n = 0;
    for (int64_t word = 0; word < c->words; word++) n += __builtin_popcountll(visible[word]);
    return n;
}

/* Lays out the notes; they take no memory where there are neither kv_ranges nor q_begin. */
int64_t ba_notes_lay_out(const ba_prefill *c, char *base, ba_notes *notes);
/* Notes the blocks that block row item % c->p.block_rows of sequence item / c->p.block_rows sees and always keeps. For ba_parallel(). */
void ba_note_block_row(void *context, int64_t item, int worker);

/* ---- Pooled queries and keys, whose product is the score (select_features.c) ---------------------------------- */

typedef struct ba_features {
    char *wide, *narrow;
    const void **pointers, **wide_rows;
} ba_features;

/* Lays out the scratch memory of the functions below. */
int64_t ba_features_lay_out(const ba_prefill *c, char *base, ba_features *s);
/* Writes a pooled key of a KV head to `to`, which has room for c->pitch numbers. */
void ba_features_of_key(const ba_prefill *c, const ba_features *s, int64_t batch, int64_t kv_head, int64_t pooled_key, void *to);
/* Writes a pooled query of a query head to `to`, in the same form. */
void ba_features_of_query(const ba_prefill *c, const ba_features *s, int64_t batch, int64_t head, int64_t pooled_query, void *to);

/* ---- A worker's scratch memory, and a panel of pooled queries (select_panels.c) -------------------------------- */

enum { BA_BAND_PANELS = 8 };

typedef struct ba_band {
    int64_t batch, list_head, first, block_rows; /* the first block row, and the number of block rows */
} ba_band;

typedef struct ba_band_scratch {
    ba_features features;
    char *queries, *q, *m, *l, *chunk;
    int32_t *lo, *hi, *key_index; /* key_index, k_rows: of consecutive pooled keys, two chunks of them at most */
    const void **k_rows, **pointers;
    char *sums;      /* [column][lane] of a panel: sums of weights, relative to the reference at the end of the column's last chunk */
    char *alphas;    /* [chunk][lane]: the factor by which a chunk has multiplied the sums before it */
    int32_t *chunks; /* [column]: the last chunk with pooled keys of the column */
    double *head;    /* [block row of the band][ba_head_pitch]: the scores of one query head */
    float *scores;   /* [block row of the band][column]: the scores of the list head */
    /* for budgets: */
    uint64_t *sort_keys, *other_sort_keys, *middle;
    float *free_scores; /* [column]; -1 where a block does not compete: it is always kept, or not visible */
    int64_t *bins;      /* numbers of blocks by the class of the least tail that they may have, then by the class of the largest */
} ba_band_scratch;

/* Lays out the scratch memory of a worker, for the panels of a band. */
int64_t ba_band_lay_out(const ba_prefill *c, char *base, ba_band_scratch *s);
/* The scratch memory of a worker, with the parts that belong to panel number `panel` of a band. */
ba_band_scratch ba_band_of_panel(const ba_prefill *c, const ba_band_scratch *s, int64_t panel);

/* The pooled keys that the pooled queries of a panel see: no query sees one outside [lo, hi), and all queries see all of [all_lo, all_hi). */
typedef struct ba_panel_sight {
    int64_t lo, hi, all_lo, all_hi;
} ba_panel_sight;

/* Packs pooled queries first .. first + queries - 1 of a query head into s->q, and returns the pooled keys that they see. */
ba_panel_sight ba_panel_open(const ba_prefill *c, const ba_band_scratch *s, int64_t batch, int64_t head, int64_t first, int64_t queries);
/* Pooled keys [begin, end) of a KV head, at most c->chunk of them, and the pooled keys [next, next_end) of the next chunk, which are prefetched
 * meanwhile. s->k_rows and s->key_index begin with pooled key `first`. */
typedef struct ba_pooled_range {
    int64_t first, begin, end, next, next_end;
} ba_pooled_range;
/* Sets s->k_rows and s->key_index for pooled keys [begin, end) of a KV head. */
void ba_point_to_pooled_keys(const ba_prefill *c, const ba_band_scratch *s, const char *pooled_keys, int64_t begin, int64_t end);
/* Computes the weights of a range of pooled keys, and adds them up by blocks, as the kernel sum_blocks says. The range begins at a multiple of
 * c->align. */
void ba_panel_score(const ba_prefill *c, const ba_band_scratch *s, const ba_panel_sight *at, const ba_pooled_range *range,
                    const ba_block_sums *blocks);

/* ---- Scores of a band (select_scores.c) ------------------------------------------------------------------------ */

/* Fills s->scores. Returns false where the call must stop. */
bool ba_band_score(const ba_prefill *c, const ba_band_scratch *s, const ba_band *band);

/* ---- BA_CHOOSER_VERTICAL_SLASH (select_lines.c) ------------------------------------------------------------------ */

/* The number of doubles in c->lines for each query head. */
int64_t ba_lines_doubles(const ba_prefill *c);
/* Computes the attention mass of the keys and of the distances of a query head. `here` is the head's number among those whose pooled keys are in
 * memory. Returns false where the call must stop. */
bool ba_lines_find(const ba_prefill *c, const ba_band_scratch *s, int64_t batch, int64_t head, int64_t here);
/* Fills s->head with the band's scores of one query head. */
void ba_lines_score(const ba_prefill *c, const ba_band_scratch *s, const ba_band *band, int64_t head);

/* ---- Budgets (select_budget.c) ---------------------------------------------------------------------------------- */

/* Decides from its scores which blocks a block row keeps, and writes them. With BA_BUDGET_DENSITY, writes only the blocks that are always kept,
 * or the best block where there are none, and notes the scores of the others. */
void ba_budget_block_row(const ba_prefill *c, const ba_band_scratch *s, int64_t batch, int64_t list_head, int64_t block_row, const float *scores);
/* With BA_BUDGET_DENSITY, after the block rows of a band: adds s->bins, which were 0 before the first block row, to the bins of the share. */
enum { BA_BUDGET_BINS = 1 << 11, BA_SPARE_BINS = 8, BA_TAIL_CLASSES = 1 << 9 | 32 };
void ba_budget_count(const ba_prefill *c, const ba_band_scratch *s, int64_t batch, int64_t list_head);
/* With BA_BUDGET_DENSITY: keeps the best of the other blocks. */
ba_status ba_budget_share(ba_prefill *c, int threads);

#endif
