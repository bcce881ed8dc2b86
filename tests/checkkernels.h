/* The common parts of the kernel checks: guarded memory, element types in plain arithmetic, random numbers, the report, and cases. */
#ifndef CHECKKERNELS_H
#define CHECKKERNELS_H

#include "blitz_attn.h"
#include "kernels/tables.h"

/* ---- Guarded memory ----------------------------------------------------------------------------------------------- */

/* Every buffer lies between two protected pages, at the end or the beginning of the memory between them; flip_side() changes the side. The buffer,
 * and up to 64 unprotected bytes on either side of it, are filled with bits of 1 (NaN, -1, or an invalid pointer). */
typedef enum buffer {
    PANEL_Q,
    PANEL_O,
    PANEL_M,
    PANEL_L,
    OTHER_O,
    OTHER_M,
    OTHER_L,
    PANEL_LO,
    ROW_LANES,
    PANEL_HI,
    SCRATCH,
    ROW_MAX,
    ALPHA,
    LSE,
    WEIGHTS,
    KEY_INDEX,
    BIAS,
    PROBE,
    PACKED_K,
    PACKED_V,
    WIDE_ROWS,
    K_SCALES,
    V_SCALES,
    K_POINTERS,
    V_POINTERS,
    PACKED_K_POINTERS,
    PACKED_V_POINTERS,
    ROW_POINTERS,
    PANEL_DOUT,
    PANEL_DQ,
    PANEL_LSE,
    PANEL_DELTA,
    SLOPES,
    TILE_ROWS,
    BUFFERS
} buffer;
void *place(buffer which, int64_t bytes);                      /* aligned to BA_ALIGN */
void *place_tight(buffer which, int64_t bytes, int64_t align); /* aligned to `align` only, so that no gap is left before the guard page */

/* Rows, each between guard pages of its own. Of two neighbouring rows, one touches the page behind it, and the other touches the page before it. */
typedef enum row_pool { Q_ROWS, K_ROWS, V_ROWS, OUT_ROWS, ROW_POOLS } row_pool;
void *place_row(row_pool pool, int64_t index, int64_t bytes);

void flip_side(void);
bool neighbours_untouched(void); /* whether the bytes beside the buffers and output rows placed since forget_places() are unchanged */
void forget_places(void);

/* ---- Elements ----------------------------------------------------------------------------------------------------- */

/* Conversions from and to float16, bfloat16 and float8_e4m3, by the definitions of the formats, without the shortcuts that the library takes. */
double decode(ba_dtype dtype, int bits);
int encode(ba_dtype dtype, double value); /* to nearest, ties to even */
int patterns_of(ba_dtype dtype);          /* how many bit patterns the dtype has; 0: too many to try all of them */

double get_element(ba_dtype dtype, const void *data, int64_t index);
double set_element(ba_dtype dtype, void *data, int64_t index, double value); /* returns the rounded value */

/* Unit roundoff, smallest positive and largest finite number of a dtype. real_of() is float32 or float64: the type in which a family computes. */
double unit_of(ba_dtype dtype);
double smallest_of(ba_dtype dtype);
double largest_of(ba_dtype dtype);
ba_dtype real_of(const ba_attend_family *family);
bool is_vector(const ba_attend_family *family); /* whether its packed rows are reals; only such families have gradients by panel */

/* How a family rounds, which bounds the errors that its checks allow. */
typedef struct rounding {
    double weight_unit;     /* largest relative error of weights that multiply values; 0: only roundings of reals */
    double few_weight_unit; /* weight_unit in the family's own kernels for few queries */
    double exp_unit;        /* largest relative error of exp2, except in kernels for few queries */
    bool flushes;           /* inputs, products and o below real's normal range count as 0 */
} rounding;
const rounding *rounding_of(const ba_attend_family *family);

/* ---- Random numbers, and samples ------------------------------------------------------------------------------------ */

/* After this call, one case in `one_in` is checked, and `seed` draws these cases and their numbers. Without this call, all cases are checked, with
 * the same numbers in every run. */
void sample_cases(int64_t one_in, const char *seed);
bool is_drawn(void); /* whether the next case is in the sample */

void seed_by_name(const char *name);
uint64_t random_bits(void);
int64_t pick(int64_t n);                                                              /* 0 .. n-1 */
ba_prefetch_rows pick_prefetch(const void *const *rows, int64_t keys, int64_t bytes); /* up to `keys` rows of `bytes` bytes, and random passes */
double uniform(void);                                                                 /* [-1, 1) */

/* ---- The report --------------------------------------------------------------------------------------------------- */

/* The result of checking one kernel or one promise. */
typedef struct record {
    const char *name;
    double worst; /* largest error, in units of its tolerance */
    int64_t compared;
    int64_t failures;
} record;

extern char case_text[256]; /* the parameters of the current case, printed with a failure */

/* Fails unless `got` and `want` are both NaN, or are the same infinity, or are numbers that differ by no more than the tolerance. */
void compare(record *r, double got, double want, double tolerance, const char *what, int64_t row, int64_t lane);
void require(record *r, bool holds, const char *what, int64_t row, int64_t lane);

/* Prints the records that have compared something, and adds them to the total. */
void report(const char *family, const char *variant, record *records, int count);
int report_total(void); /* prints the last line; returns 0 where all checks passed */

/* Runs `run(context)`. A fault in it is a failure of `r`. */
void guarded_run(void (*run)(void *context), void *context, record *r);

/* ---- A case (checkkernels_case.c) --------------------------------------------------------------------------------- */

/* The kernels to check: a family's kernels, with K and V of its own dtype; or kernels over a cache of another dtype, the cache's or the family's. */
typedef struct subject {
    const char *name;
    const ba_attend_family *f;
    const ba_cache_kernels *cache; /* NULL: the family's kernels */
    ba_dtype dtype, kv_dtype;      /* of queries and output; of K and V */
    ba_pack_rows_fn pack_k, pack_v;
    ba_pack_rows_fn widen; /* widens the rows of a quantised cache before they are packed; NULL: rows are packed as they are */
    int64_t pack_bytes;
    ba_attend_few_fn few;
    ba_attend_few_fn few_into_l1;          /* if `few` prefetches into L2: the kernel that it replaces, whose bits it returns */
    const ba_cache_kernels *cache_into_l1; /* likewise, for all kernels of a cache */
} subject;

/* The variants of attention: WIDE and NARROW are panels of the two widths in kernels.h, FEW is the kernel for few queries, and
 * ROUTED is the kernel for routed lists, in which every query has a state of its own. */
enum { WIDE, NARROW, FEW, ROUTED, VARIANTS };

enum { MAX_CHUNKS = 3, MAX_KEYS = MAX_CHUNKS * BA_MAX_CHUNK, ROW_BYTES = BA_MAX_HEAD_DIM * sizeof(double) };

typedef enum fill { RANDOM, SPREAD, TINY, EXACT_HUGE, EQUAL, SPECIAL, FILLS } fill;
typedef enum mask { NO_MASK, ALL_SEEN, RANGES, STAIRS, NONE_SEEN, MASKS } mask;

typedef struct test_case {
    subject s;
    int variant;
    int64_t lanes, queries; /* lanes of the panel, and how many of these hold queries */
    int64_t named_lanes;    /* `lanes` of the panel: see ba_panel */
    int64_t head_dim, v_dim, keys;
    fill fill;
    mask mask;
    double scale, softcap;
    bool scaled; /* K and V have one scale per key */
    float k_scale[MAX_KEYS], v_scale[MAX_KEYS];
    int32_t lo[BA_MAX_LANES], hi[BA_MAX_LANES];
    int32_t key_index[MAX_KEYS];
    bool biased; /* scores have a bias, which hides some keys from some lanes */
    float bias[MAX_KEYS][BA_MAX_LANES];
    unsigned char scratch_fill;
} test_case;

/* An input: its rows as elements (raw), and as the numbers that these elements stand for (value). */
typedef struct operand {
    unsigned char raw[MAX_KEYS][ROW_BYTES];
    double value[MAX_KEYS][BA_MAX_HEAD_DIM];
} operand;
extern operand q, k, v;

extern const double specials[3]; /* NaN and the infinities */

bool in_rows(const test_case *c); /* whether the variant is FEW or ROUTED, whose o is [query][dim] */
/* Draws everything of a case except the kernel, the variant and what the arguments say. Forgets all placed buffers. */
void make_case(test_case *c, fill fill, mask mask, int64_t queries, int64_t keys, int64_t head_dim, int64_t v_dim);
void set_variant(test_case *c, int variant, int64_t queries);
void drop_options(test_case *c); /* removes the softcap, the scales and the bias */
void set_operand(const test_case *c, operand *x, int64_t row, int64_t d, double value);
void draw_range(test_case *c, int64_t lane);
bool sees(const test_case *c, int64_t lane, int64_t key);
int64_t most_queries(const test_case *c);

/* Places operands in guarded memory for a kernel. The arrays of pointers to rows touch a guard page, as the rows do. */
const void **place_rows(const test_case *c, row_pool pool, buffer pointers, const operand *x, int64_t first, int64_t rows, int64_t dim);
void **place_out_rows(const test_case *c);
ba_panel empty_state(const test_case *c, buffer o, buffer m, buffer l);
ba_panel open_panel(const test_case *c);
ba_chunk open_chunk(const test_case *c, int64_t first, int64_t keys);
/* Like open_chunk(), but with rows of k_dim and v_dim elements, of which the kernel reads the first. */
ba_chunk open_chunk_of(const test_case *c, int64_t first, int64_t keys, int64_t k_dim, int64_t v_dim);
ba_bias place_bias(const test_case *c, int64_t first, int64_t keys); /* without numbers if the case has no bias */
void attend(const test_case *c, ba_panel *panel, const ba_chunk *chunk);

/* Marks a panel with an empty state as fresh and fills its sums with NaN, in most cases, if the variant and the family take fresh
 * panels. */
void refresh(const test_case *c, ba_panel *panel);
/* Sets the sums of a panel that is still fresh to 0, as the driver does for a panel that has attended nothing. */
void close_fresh(const test_case *c, ba_panel *panel);

ba_dtype real_dtype(const test_case *c);
double real_at(const test_case *c, const void *data, int64_t index);
int64_t o_stride(const test_case *c);
int64_t o_index(const test_case *c, int64_t d, int64_t lane);

/* The head dims that checks go through: all short dims, then some long ones. */
enum { SHORT_DIMS = 40, DIMS = SHORT_DIMS + 8 };
int64_t dim_at(int64_t i);

/* The results of plain arithmetic, and the errors that a kernel's results may have. */
double unit(const test_case *c);                       /* the relative error of one operation in real */
bool few_are_own(const test_case *c);                  /* whether the variant is FEW, and packs queries in a format of its own */
double tiny(const test_case *c);                       /* a number below this may count as 0 */
double exp_unit(const test_case *c);                   /* the relative error of exp2, in addition to unit */
double weight_unit(const test_case *c);                /* the relative error of a weight when it multiplies a value, in addition to unit */
double sum_error(const test_case *c, int64_t n);       /* the error of a sum of n terms, relative to the sum of their absolute values */
double weight_error(const test_case *c, double score); /* the absolute error of a weight 2^score */
double v_factor(const test_case *c, int64_t key);

typedef struct plain_number {
    double value, error;
} plain_number;
plain_number score_of(const test_case *c, int64_t lane, int64_t key); /* in units of log2 */
plain_number rate_of(const test_case *c, int64_t lane,
                     int64_t key); /* the derivative of the score by the score before the softcap; 1 without a softcap */

typedef struct plain_row {
    double lse, lse_error;
    double out[BA_MAX_HEAD_DIM], out_error[BA_MAX_HEAD_DIM];
} plain_row;
void attend_plainly(const test_case *c, int64_t lane, plain_row *r);

/* ---- The records of one kernel (checkkernels.c) ----------------------------------------------------------------------- */

enum {
    PACK_QUERIES,
    PACK_K,
    PACK_V,
    PROBABILITIES,
    BLOCK_SUMS,
    JOIN_LANES,
    HEAD_SUMS,
    APPEND_KEYS,
    MOVE_BETTER,
    SCORES,
    SOFTMAX,
    VALUES,
    COMPOSED,
    ATTEND,
    JOIN,
    FINISH,
    CHOOSE,
    SUMMARISE,
    POOL,
    SCORE_HEADS,
    QUANTISE,
    FILL_BIAS,
    UNSEEN,
    CUT,
    ALONE,
    TOGETHER,
    KERNELS
};
extern record records[KERNELS];

/* ---- Quantisation (checkkernels_quantise.c) --------------------------------------------------------------------------- */

void check_quantise(test_case *c);

/* ---- Rows of cells (checkkernels_cells.c) ----------------------------------------------------------------------------- */

/* Checks the kernels of a cache whose dtype has cells; `context` is a subject. */
void check_cells(void *context);

/* ---- Biases (checkkernels_bias.c) ------------------------------------------------------------------------------------ */

void check_fill_bias(test_case *c);

/* ---- Promises that hold to the bit (checkkernels_promises.c) -------------------------------------------------------- */

void check_promises(test_case *c);
void check_together(test_case *c);
void check_heads(test_case *c);
void check_empty_join(test_case *c);

/* ---- The backward pass (checkkernels_backward.c) ------------------------------------------------------------------ */

/* Checks and reports a family's kernels for gradients. */
void check_backward(const subject *s);

/* ---- Dot products of pairs (checkkernels_pairs.c) ---------------------------------------------------------------------- */

/* Checks that the emulation of VDPBF16PS gives the instruction's bits. The CPU must have the instruction. Does nothing in builds without it. */
void check_dot_pairs(void);

#endif
