/* The micro-kernels: what each one reads, writes and promises, stated once. Kernels know registers and tiles. They do not allocate, fail, log or
 * start threads, and they know nothing of layouts and index lists.
 *
 * Queries that attend the same keys stand side by side in a panel: element [d][lane] of a panel is dim d of query `lane`. Keys come in chunks, each
 * key as a pointer to its row, so that blocks, pages and strides look the same to a kernel. For one panel and one chunk:
 *
 *     S^T[key][lane]  = K Q^T           Q carries scale * log2(e), so that exp is exp2
 *     P^T             = exp2(S^T - m)   m: the running maximum of each lane; all of it is vertical, nothing is reduced across lanes
 *     O^T[d][lane]    = O^T * exp2(m_old - m) + V^T P^T
 *
 * Glossary. The kernels use each word in this sense only.
 *
 *     real           the accumulator's type: double for float64, float for every other dtype
 *     element        one number of a tensor, in the dtype that it has in memory
 *     row            the elements of one token and head in memory: head_dim elements of Q or K, v_dim of V, the output or a gradient
 *     query tile     the queries of one list row, at most tuning's tile_queries, that share packed keys and keep their state in cache. It is made of
 *                    panels
 *     panel          queries side by side as lanes, with their state (m, l, o). A family has a wide and a narrow width
 *     lane           the place of one query in a panel. The lanes of a vector register are called vector lanes where both occur
 *     state          m, l and o of a query: the largest score so far (or another reference), the sum of weights, and the sum of weighted values
 *     weight         exp2(score - m): what a value is multiplied with
 *     few            1 to 8 queries of each KV head (decode). Few kernels have dims as vector lanes, and read K and V in place
 *     set            the queries of a few or a row kernel that are computed together, as many as the registers hold sums for
 *     unit           the rows of K that a few kernel scores together, for one head and one set
 *     row kernel     attends queries that share one chunk only: each query is a row, and no panel is packed
 *     block          of a list: the block_q queries by block_kv keys that one entry of the index list keeps
 *     page           of a paged cache: block_size consecutive tokens of one request
 *     list           the KV blocks that one block row of queries attends, in rising order
 *     walk           the pass of a query tile over the keys of its list
 *     chunk          the keys that one kernel call attends, at most BA_MAX_CHUNK: a walk is cut into chunks by key counts, not by block borders
 *     group          key_pad keys that are packed, and multiplied, as a unit
 *     key stretch    consecutive keys whose weights are summed before the sum is added to l
 *     part           the share of the keys of one query that one thread takes, where keys are split among threads. Parts are merged by their states
 *     item           what one thread takes from the plan: one or several query tiles, or a part
 *     prefetcher     issues the prefetches of a few call, a little at every step of its work; a request is one pass of it over the rows to come
 *     tile           (tiles/) one tile register: 16 rows of 64 bytes
 *     piece          (tiles/) one of the bfloat16 numbers whose sum is a float16 or float32 element
 *     bundle         (tiles/) 2 to 4 consecutive groups whose weighted values are added to o together
 *     strip          (tiles/) the 32 dims of V whose sums stand in tile registers at a time
 *     heavy          (tiles/) a group whose weights need a second piece, since they are a large share of a lane's sum so far
 *     family         the kernels of one dtype at one level, which share their packed formats; a level is one instruction set (ba_isa) */
#ifndef BA_KERNELS_H
#define BA_KERNELS_H

#include "blitz_attn.h"
#include "core/common.h"

enum {
    BA_MAX_HEAD_DIM = 576,
    BA_PANEL_WIDTHS = 2,    /* a wide panel, and a narrow one for what is left over */
    BA_MAX_LANES = 64,      /* no panel is wider */
    BA_FEW_QUERIES = 8,     /* queries that the kernel for few queries takes at most */
    BA_MOST_FEW_HEADS = 16, /* heads that it takes at most */
    BA_FEW_KEY_ALIGN = 16,  /* it may be given any part of a chunk that begins at a multiple of this, and of key_align where that is more */
    BA_CHOOSE_ROWS = 16,    /* whose best are found together */
    BA_ROW_KEYS = 64,       /* a chunk may be cut at a multiple of this many keys, and none of its bits change */
    BA_MAX_CHUNK = 512,     /* keys; tuning.c chooses at most this */
    BA_CUT_KEYS = 256,      /* a chunk may be cut at a multiple of this many keys, and none of its bits change, where a family has cuts */
    BA_PACK_PAD = 16,       /* packed rows are padded to a multiple of this many elements */
    BA_ALIGN = 64,          /* bytes: panels, accumulators and scratch start on such a boundary */
    BA_FLOAT_DTYPES = 4,    /* BA_FLOAT32 .. BA_FLOAT64 */
};

/* One panel's queries and state. All arrays are [..][lanes], lanes being the width of the kernel called. */
typedef struct ba_panel {
    void *q;           /* packed by pack_queries; its format is the family's own */
    void *o;           /* real [round_up(v_dim, dim_pad)][lanes], starts as 0 */
    void *m;           /* real [lanes], log2 units: what weights are relative to; starts as minus the largest finite number */
    void *l;           /* real [lanes], starts as 0 */
    const int32_t *lo; /* NULL: every lane sees every key of the chunk. Else lane sees key j when lo <= key_index[j] < hi */
    const int32_t *hi;
} ba_panel;

/* Rows that are wanted after those at hand: `bytes` bytes from `offset` on of each. The kernels for few ask for them while they
 * work, a little at every step, and up to three times: request i goes on from row skip[i], rising from 0; -1: there is no such request. */
enum { BA_MOST_REQUESTS = 3 };
typedef struct ba_prefetch_rows {
    const void *const *rows;
    int64_t count, offset, bytes, skip[BA_MOST_REQUESTS];
} ba_prefetch_rows;

typedef struct ba_chunk {
    int64_t keys;              /* 1 .. BA_MAX_CHUNK */
    int64_t head_dim, v_dim;   /* 1 .. BA_MAX_HEAD_DIM */
    const void *const *k_rows; /* [keys]; in the input dtype where the family reads in place, else what pack_k set */
    const void *const *v_rows; /* [keys] */
    int64_t k_offset;          /* few only: a row begins so many bytes behind k_rows[j]; the heads of a token share its pointer */
    int64_t v_offset;
    ba_prefetch_rows k_prefetch, v_prefetch; /* few only */
    void *gathered; /* few only, of one head: room for its rows of K and V, which a kernel may bring there before it meets them; NULL: none */
    const void *const *k_next; /* the others: [next_rows] rows that are wanted next, as they lie, which they may prefetch; NULL: none */
    const void *const *v_next;
    int64_t next_rows, k_next_bytes, v_next_bytes; /* bytes: of such a row */
    int64_t place;                                 /* where the chunk is a part of one that is cut: of its first key in that one */
    const int32_t *key_index;                      /* [keys], rising; looked at only where the panel has lo and hi */
    const float *k_scale;                          /* few only: [keys], what K's rows are to be multiplied with; NULL: 1 */
    const float *v_scale;                          /* few only: the same of V */
    double scale;   /* what pack_queries was given: a family whose packed queries do not carry it multiplies scores with it */
    double softcap; /* log2 units: scores become softcap * tanh(score / softcap); 0: they stay */
    void *scratch;  /* keys * scratch_per_key bytes; what is in it on entry does not matter */
} ba_chunk;

/* Lanes n .. lanes-1 of the panel become zero queries. The panel has room for lanes * round_up(dim, dim_pad) * q_bytes. */
#define BA_PACK_QUERIES(name) void name(void *panel, const void *const *q_rows, int64_t n, int64_t dim, double scale)
typedef BA_PACK_QUERIES((*ba_pack_queries_fn));

/* Brings rows of K (or V) into the form that attend reads. Fills packed (round_up(keys, key_pad) * round_up(dim, dim_pad) *
 * pack_bytes bytes) and sets packed_rows[0 .. keys-1] to what attend must be given as its rows; rows that will do as they
 * are may stay. Row j is multiplied with scales[j] (NULL: with 1); only where rows become reals may there be scales. */
#define BA_PACK_ROWS(name) void name(void *packed, const void **packed_rows, const void *const *rows, const float *scales, int64_t keys, int64_t dim)
typedef BA_PACK_ROWS((*ba_pack_rows_fn));

/* The fused kernel: one chunk's scores, softmax and values added to one panel's state.
 * Promises: a lane's result depends on nothing but its own query, its own visible keys and where the chunk begins;
 * keys that a lane does not see add exactly nothing, whatever is in their rows (NaN and infinity included).
 * Where the family flushes, the sign of a zero or of a NaN in o may differ; finish writes such a zero as +0. */
#define BA_ATTEND(name) void name(const ba_panel *panel, const ba_chunk *chunk)
typedef BA_ATTEND((*ba_attend_fn));

/* The same for n different panels of one width, panel i with chunk i, and to the bit with the same result: a family that has it works ahead across
 * their borders. The chunks agree in all but keys, rows and what is wanted next. */
#define BA_ATTEND_MANY(name) void name(const ba_panel *panels, const ba_chunk *chunks, int64_t n)
typedef BA_ATTEND_MANY((*ba_attend_many_fn));

/* The same for a few queries (1 .. BA_FEW_QUERIES), where a panel would be nearly empty, of one or several heads (1 .. BA_MOST_FEW_HEADS) whose keys
 * lie side by side, head i's panel with its chunk: panel->q has room for BA_FEW_QUERIES * round_up(head_dim, dim_pad) * q_bytes, as pack_few and
 * order_few left them, o is [query][BA_FEW_PAD(v_dim)], m, l, lo and hi are [BA_FEW_QUERIES], and K and V are read in place in the dtype they have.
 * Needs BA_FEW_SCRATCH reals of scratch a head. The chunks agree in all but offsets, scales and scratch, the panels in lo and hi; what is ahead is
 * told by the first chunk. Offsets, scratch, q and o are evenly spaced, so that none need be fetched on the way to a row: behind loads that wait for
 * memory that would wait too, and the row with it. A head's bits do not depend on those beside it. */
#define BA_FEW_PAD(dim) ba_round_up(dim, 16)
#define BA_FEW_SCRATCH(keys, v_dim) (BA_FEW_QUERIES * (ba_round_up(keys, 16) + BA_FEW_PAD(v_dim)))
#define BA_ATTEND_FEW(name) void name(const ba_panel *panels, int64_t queries, const ba_chunk *chunks, int64_t heads)
typedef BA_ATTEND_FEW((*ba_attend_few_fn));

/* Brings n queries that pack_few left into the order in which few, and scores of a cache, read a row's elements. */
#define BA_ORDER_FEW(name) void name(void *q, int64_t n, int64_t dim)
typedef BA_ORDER_FEW((*ba_order_few_fn));

/* The same for any number of queries that meet at this chunk alone, each of which keeps its state for itself: `lanes` says which of the
 * panel's they are, none twice. panel->q is [lane][round_up(head_dim, dim_pad)]: reals, as pack_row_queries makes them, or where there is none, rows
 * in the input dtype, filled up with 0. o is [lane][BA_FEW_PAD(v_dim)], m, l, lo and hi are [lane]. Rows of K and V are what pack_row_keys and
 * pack_row_values set, which have room for round_up(keys, BA_ROW_KEYS) * round_up(dim, dim_pad) elements of the size of q's: of each BA_ROW_KEYS
 * keys only the first row's pointer is looked at, which is where their room begins. No scratch, offsets, scales or next rows are looked at. */
#define BA_ATTEND_ROWS(name) void name(const ba_panel *panel, const int32_t *lanes, int64_t queries, const ba_chunk *chunk)
typedef BA_ATTEND_ROWS((*ba_attend_rows_fn));

/* Joins states of the same queries over other keys: into += from. */
#define BA_JOIN_FEW(name) void name(const ba_panel *into, const ba_panel *from, int64_t queries, int64_t v_dim)
typedef BA_JOIN_FEW((*ba_join_few_fn));

/* The parts of attend, for checking, timing and for operations that need one of them alone.
 * scores:  scratch = S^T as real [keys][lanes], and row_max[lanes] = the largest visible score (log2 units).
 * softmax: scratch = P^T in place; updates m and l of the panel; alpha[lanes] = exp2(m_old - m_new).
 * values:  o = o * alpha + V^T P^T. */
#define BA_SCORES(name) void name(const ba_panel *panel, const ba_chunk *chunk, void *row_max)
typedef BA_SCORES((*ba_scores_fn));
#define BA_SOFTMAX(name) void name(const ba_panel *panel, const ba_chunk *chunk, const void *row_max, void *alpha)
typedef BA_SOFTMAX((*ba_softmax_fn));
#define BA_VALUES(name) void name(const ba_panel *panel, const ba_chunk *chunk, const void *alpha)
typedef BA_VALUES((*ba_values_fn));

/* sums[key][lane] += exp2(S^T - m) of the keys that the lane sees: its probabilities, where m is the log-sum-exp (log2 units; +infinity: they are 0).
 * A wide panel's, whose o and l are not looked at; softcap is not either. */
#define BA_ADD_PROBABILITIES(name) void name(const ba_panel *panel, const ba_chunk *chunk, float *sums)
typedef BA_ADD_PROBABILITIES((*ba_add_probabilities_fn));

/* Writes the n first lanes: out_rows[i][d] = o[d][i] / l[i] in the input dtype (0 where l is 0), and, unless lse is NULL,
 * lse[i] = (m + log2 l) * ln 2 as real (-inf where l is 0). */
#define BA_FINISH(name) void name(const ba_panel *panel, int64_t n, int64_t v_dim, void *const *out_rows, void *lse)
typedef BA_FINISH((*ba_finish_fn));

/* The best `width` blocks of each of up to BA_CHOOSE_ROWS rows. A score of -infinity cannot be chosen; NaN is as minus the largest finite number;
 * of equal scores the lower block comes first. */
typedef struct ba_choice {
    const void *scores; /* real: block b of row i at [b * stride + i] */
    int64_t stride, rows, blocks, width;
    int32_t init[BA_CHOOSE_ROWS], local_lo[BA_CHOOSE_ROWS], local_hi[BA_CHOOSE_ROWS]; /* always chosen: [0, init) and [local_lo, local_hi), `width` at
                                                                                         most */
    int32_t hi[BA_CHOOSE_ROWS];                                                       /* no block from there on; 0 of rows that are not there */
    void *keys;                                                                       /* scratch: real [blocks][BA_CHOOSE_ROWS] */
    int32_t *lists;                  /* [BA_CHOOSE_ROWS][width + 1]: set to what is chosen, in rising order, and one place more */
    int32_t lengths[BA_CHOOSE_ROWS]; /* set to how many those are */
} ba_choice;

#define BA_CHOOSE(name) void name(ba_choice *c)
typedef BA_CHOOSE((*ba_choose_fn));

/* out[d] = sum over parts of weights[part] * rows[part][d], in the input dtype; weights are real. */
#define BA_MERGE_ROW(name) void name(void *out, const void *const *rows, const void *weights, int64_t parts, int64_t dim)
typedef BA_MERGE_ROW((*ba_merge_row_fn));

/* ---- Gradients. P is recomputed from the log-sum-exp, a tile of panels at a time:
 *
 *     dS^T = P^T (V dO^T - delta)    dQ^T += K^T dS^T    dV += P^T dO    dK += dS^T Q
 *
 * The first two are a panel's, as in attend; the others are a tile's, whose panels stand one after the other. */
typedef struct ba_gradient_panel {
    const void *q;          /* packed by pack_queries, with scale * log2(e) */
    const void *dout;       /* the gradient of the output, packed by pack_queries, with scale */
    const void *lse;        /* real [lanes], log2 units; +inf where nothing was attended: all weights are 0 then */
    const void *delta;      /* real [lanes]: scale * (dO . O - gradient of the log-sum-exp) */
    void *dq;               /* real [head_dim][lanes], added to */
    const int32_t *lo, *hi; /* as in ba_panel */
} ba_gradient_panel;

/* weights = P^T and slopes = scale * dS^T, both real [keys][lanes] and exactly 0 where a lane does not see a key; dq += K^T dS^T.
 * Promises what attend does. softcap and scales are not looked at. */
#define BA_GRADIENT(name) void name(const ba_gradient_panel *panel, const ba_chunk *chunk, void *weights, void *slopes)
typedef BA_GRADIENT((*ba_gradient_fn));

/* Rows of a tile's lanes: packed[block][lane][i] = rows[lane][block * lane_block + i], as real, the last block filled up with 0; for
 * add_tile in a format of the family's own, of no more than round_up(lanes, lanes[0]) * round_up(dim, lane_block) * real_size bytes.
 * Returns whether all are finite. */
#define BA_PACK_TILE(name) bool name(void *packed, const void *const *rows, int64_t lanes, int64_t dim)
typedef BA_PACK_TILE((*ba_pack_tile_fn));

/* Weights (or slopes) of one panel of a tile. */
typedef struct ba_weights {
    const void *data;   /* real [keys][width] */
    int64_t width;      /* lanes of the panel */
    int64_t lanes;      /* of them in use */
    int64_t begin, end; /* keys outside have no weight. Inside [0, keys) they are 0 there, but where begin == end: never looked at */
} ba_weights;

typedef struct ba_add_rows {
    const ba_weights *weights; /* [panels] */
    int64_t panels;
    const void *packed; /* the rows of all lanes of all panels, by pack_tile */
    int64_t lanes;      /* how many that are */
    bool finite;        /* all of packed. Else a weight of 0 adds nothing, whatever the row holds */
    int64_t keys, dim;
    void *const *rows; /* [keys]: real [dim] each, added to */
} ba_add_rows;

/* rows[key][d] += sum over lanes of weight[key][lane] * packed row [lane][d]. A key's sum depends on nothing but its own weights
 * and the lanes' rows, and goes over the lanes in their order. */
#define BA_ADD_ROWS(name) void name(const ba_add_rows *a)
typedef BA_ADD_ROWS((*ba_add_rows_fn));

/* Where products want a tile's panels together, a family has these two instead of gradient and add_rows: all panels' weights, slopes
 * and dQ, then all that the tile adds to rows of dK and dV. Both promise what those do. weights and slopes are as the
 * family rounds them, by weight_unit. */
typedef struct ba_tile_panel {
    ba_gradient_panel panel; /* q and dout as pack_queries leaves them */
    int64_t width, lanes;    /* of the panel, and in use; only the last may be narrow, or not full */
    int64_t begin, end;      /* keys of the chunk that some lane sees lie in between */
} ba_tile_panel;

enum { BA_MOST_TILE_PANELS = 32 };

typedef struct ba_gradient_tile {
    const ba_tile_panel *panel; /* [panels] */
    int64_t panels;
    double scale;                          /* what pack_queries was given for dout: a family whose packed rows do not carry it multiplies with it */
    const void *const *k_columns;          /* [keys]: K by pack_v; the chunk's k_rows and v_rows are by pack_k, or as they lie where there is none */
    void *weights, *slopes;                /* panels * lanes[0] * round_up(keys, key_pad) * pack_bytes each, from one to the other */
    const void *q_rows, *dout_rows;        /* of all lanes of all panels, by pack_tile. The rest is for add_tile only */
    bool finite_q, finite_dout;            /* all of them, as pack_tile says */
    void *const *dk_rows, *const *dv_rows; /* [keys]: real [round_up(dim, BA_PACK_PAD)] each, added to */
} ba_gradient_tile;

#define BA_GRADIENT_TILE(name) void name(const ba_gradient_tile *tile, const ba_chunk *chunk)
typedef BA_GRADIENT_TILE((*ba_gradient_tile_fn));

/* sums[i] = a_rows[i] . b_rows[i], as real, of rows in the input dtype. */
#define BA_DOT_ROWS(name) void name(void *sums, const void *const *a_rows, const void *const *b_rows, int64_t n, int64_t dim)
typedef BA_DOT_ROWS((*ba_dot_rows_fn));

/* A row of reals in the input dtype. */
#define BA_STORE_ROW(name) void name(void *to, const void *from, int64_t dim)
typedef BA_STORE_ROW((*ba_store_row_fn));

/* All that a driver needs to attend in one dtype. A rung replaces a family as a whole, since its members share formats;
 * parts may be NULL where a family has only the fused kernel. */
typedef struct ba_attend_family {
    const char *name;
    ba_isa isa;
    int64_t lanes[BA_PANEL_WIDTHS]; /* [0] wide, [1] narrow */
    int64_t dim_pad, key_pad;       /* dims of packed queries, rows and o, and keys of packed rows, have room up to a multiple of these */
    int64_t real_size;              /* bytes of an accumulator element: 4 or 8 */
    int64_t q_bytes;                /* bytes of a packed query element */
    int64_t scratch_per_key;        /* bytes of scratch a key of the chunk, for a wide panel */
    int64_t pack_bytes;             /* bytes a K or V element takes once packed; 0: both are read in place */
    int64_t lane_block;             /* dims that pack_tile keeps together */
    bool pack_groups;        /* packing leaves each key_pad keys as a whole of their own, which does not depend on the chunk; its rows follow each
                              * other, and attend may be given their pointers. Of evenly spaced rows it leaves all such groups in place, or none */
    int64_t key_align;       /* attend may be given any part of a chunk that begins at a multiple of this */
    bool has_cuts;           /* it may be cut at multiples of BA_CUT_KEYS, and no lane's bits change (but for weights below real's normal range) */
    int64_t few_least_heads; /* few and pack_few are for so many query heads a KV head and more; below, or where few is NULL, those of the vector
                          family serve, whose packed queries find room here */
    int64_t least_pairs; /* queries that a key is to meet, on the average, for this family's packing of K and V to pay: an entry of fewer is for the
                          * vector family. 0: always */
    double weight_unit;  /* weights are off by up to this, relative, before they meet values; 0: by reals' roundings only */
    double exp_unit;     /* the same of exp2 */
    bool flushes;        /* inputs, products and o count as 0 below real's normal range */
    ba_pack_rows_fn pack_k, pack_v; /* NULL: read in place */
    ba_pack_queries_fn pack_queries[BA_PANEL_WIDTHS];
    ba_attend_fn attend[BA_PANEL_WIDTHS];
    ba_attend_many_fn attend_many[BA_PANEL_WIDTHS]; /* NULL: nothing is gained by it */
    ba_scores_fn scores[BA_PANEL_WIDTHS];
    ba_softmax_fn softmax[BA_PANEL_WIDTHS];
    ba_values_fn values[BA_PANEL_WIDTHS];
    ba_add_probabilities_fn add_probabilities; /* NULL: scores and softmax will do */
    ba_finish_fn finish[BA_PANEL_WIDTHS];
    ba_attend_few_fn few;
    ba_pack_queries_fn pack_few;
    ba_order_few_fn order_few; /* NULL: they are in order */
    ba_finish_fn finish_few;
    ba_join_few_fn join_few;
    ba_attend_rows_fn attend_rows; /* NULL, as the next three: the vector family's, or else few, will do */
    ba_pack_rows_fn pack_row_queries, pack_row_keys, pack_row_values;
    ba_choose_fn choose; /* NULL but in families whose rows are reals */
    ba_merge_row_fn merge_row;
    ba_gradient_fn gradient[BA_PANEL_WIDTHS];
    ba_add_rows_fn add_rows;
    ba_gradient_tile_fn gradient_tile, add_tile;
    ba_pack_tile_fn pack_tile;
    ba_dot_rows_fn dot_rows;
    ba_store_row_fn store_row;
} ba_attend_family;

/* scores[query * stride + key] = q . row, in real: q is packed and in order as for few; room for round_up(keys, 16) keys a query. Offset
 * and ahead are those of ba_chunk. */
#define BA_SCORES_FEW(name)                                                                                                                          \
    void name(const void *q, int64_t queries, const void *const *rows, int64_t offset, const ba_prefetch_rows *prefetch, int64_t keys, int64_t dim,  \
              void *scores, int64_t stride)
typedef BA_SCORES_FEW((*ba_scores_few_fn));

/* scores[(row * heads + head) * queries + query], in real, with room for round_up(rows * heads * queries, 16). With one side (and one query per
 * head) the product of the query and the head's row; with two the sum over channels of max(q * a, q * b), where a and b are the rows of the two
 * sides, in either order: NaN in any factor makes the score NaN, 0 times infinity makes it NaN or counts nothing. A head's rows lie offset + head *
 * head_step bytes behind those that are given. q is [head][query][BA_FEW_PAD(dim)] reals, each query packed alone, and heads * queries *
 * round_up(dim, 32) is at most BA_HEADS_REALS. Row r + ahead is prefetched while row r is read, as far as row pointers are `known`. */
enum { BA_HEADS_REALS = 2048 };
typedef struct ba_side {
    const void *const *rows;
    int64_t offset, head_stride;
} ba_side;
#define BA_SCORE_HEADS(name)                                                                                                                         \
    void name(const ba_side *side, int64_t sides, const void *q, int64_t queries, int64_t heads, int64_t rows, int64_t known_rows, int64_t distance, \
              int64_t dim, void *scores)
typedef BA_SCORE_HEADS((*ba_score_heads_fn));

/* Largest, smallest and mean element of each column of n >= 1 rows, in the rows' dtype; NULL: not wanted. Largest and smallest
 * are exact elements; NaN is passed over by them. */
#define BA_SUMMARISE(name) void name(const void *const *rows, int64_t n, int64_t dim, void *largest, void *smallest, void *mean)
typedef BA_SUMMARISE((*ba_summarise_fn));

/* What differs where K and V have another dtype than the queries (a quantised cache, or a half-precision one under float32
 * queries). Such calls use the float families of a level, whose attend reads floats: pack gives it those. */
typedef struct ba_cache_kernels {
    ba_isa isa;
    ba_pack_rows_fn pack; /* NULL: read in place */
    ba_attend_few_fn few;
    ba_order_few_fn order_few; /* NULL: queries are in order */
    ba_scores_few_fn scores;
    ba_score_heads_fn score_heads; /* NULL, as the next: quantised */
    ba_summarise_fn summarise;
} ba_cache_kernels;

/* Probes of the machine. flops: about `rounds` passes over independent multiply-add chains, returns FLOP done.
 * tile_flops: the same of products of bfloat16 tiles that stay where they are; NULL where there are no tiles.
 * read: the exclusive or of the 32-bit words of n bytes (a multiple of 512). */
#define BA_PROBE_FLOPS(name) double name(const float *operands, int64_t rounds, float *sink)
typedef BA_PROBE_FLOPS((*ba_probe_flops_fn));
#define BA_PROBE_READ(name) int name(const char *data, int64_t bytes)
typedef BA_PROBE_READ((*ba_probe_read_fn));

typedef struct ba_probes {
    ba_isa isa;
    ba_probe_flops_fn flops, tile_flops;
    ba_probe_read_fn read;
} ba_probes;

/* ---- The table --------------------------------------------------------------------------------------------- */

typedef struct ba_kernels {
    const ba_attend_family *attend[BA_FLOAT_DTYPES]; /* by dtype */
    const ba_attend_family *vector[BA_FLOAT_DTYPES]; /* the highest family with gradients, whose rows are reals: also for K and V of another dtype */
    const ba_cache_kernels *cache[BA_DTYPE_COUNT];   /* by dtype of K and V; NULL where they cannot have it */
    const ba_probes *probes;
} ba_kernels;

/* The table of a level: portable first, then overlaid rung by rung. A level above what the CPU has gives the highest
 * rung below it that it does have. */
const ba_kernels *ba_kernels_at(ba_isa level);
/* The table that calls use now. */
const ba_kernels *ba_kernels_active(void);

/* ---- Numbers that tune speed (tuning.c, a row a level) -------------------------------------------------------- */

/* Of calls of few queries, which memory binds: they go by the machine. */
typedef struct ba_few_tuning {
    int64_t part_keys;        /* keys a part at most, where keys are split among threads: least_part_keys times a power of two */
    int64_t least_part_keys;  /* the same at least: a multiple of `keys` */
    int64_t keys;             /* keys a chunk, where few queries meet the keys of several heads side by side */
    int64_t bytes;            /* of such a chunk's K and V at most: it, and what is prefetched meanwhile, stay in cache */
    int64_t followed_bytes;   /* tokens so far apart, of all heads side by side, are not asked for: the hardware's prefetcher follows them */
    int64_t followed_queries; /* where a head has so many queries at most; for more they are asked for all the same */
    int64_t gathered_bytes;   /* rows of up to so many bytes that lie apart, of one head among others', are brought side by side first; 0: never */
    int64_t distances[BA_MOST_REQUESTS]; /* bytes of K, or of V, between a request and the use, rising; `keys` keys at most; 0: no such request */
} ba_few_tuning;

typedef struct ba_tuning {
    int64_t chunk_keys; /* keys a chunk */
    int64_t list_keys;  /* the same of a list whose row has one panel, for a family that has cuts: a multiple of BA_CUT_KEYS, as chunk_keys is then */
    int64_t tile_queries;     /* queries that share a packed chunk and one state in cache: a multiple of the wide panel */
    int64_t item_tiles;       /* tiles that walk their lists side by side, so that they meet K and V in cache */
    int64_t most_item_tiles;  /* the same where rows of the grid are so short that tiles have fewer queries: their queries are to be as many, in tiles
                            up to  this */
    int64_t gradient_keys;    /* keys a chunk of the backward pass */
    int64_t gradient_queries; /* queries of one of its tiles */
    int64_t gradient_item_tiles; /* of its tiles that walk side by side */
    int64_t by_block_lanes;      /* queries whose states stay in L2 while they meet block by block */
    int64_t by_block_most_lanes; /* so many at most, where a block is to meet `by_block_least_lanes` of them: fewer would not pay for fetching it */
    int64_t by_block_least_lanes;
    double inline_flops;    /* calls with less work than this run in the caller's thread */
    int64_t shared_bytes;   /* of packed K and V at most, where they are packed once for all items; 0: they are not */
    ba_few_tuning few;      /* of the kernels for few queries */
    ba_few_tuning tile_few; /* of one over tiles, where the level has it; keys 0: as above */
} ba_tuning;

/* The row of the level that a family belongs to is the family's, but for `few`, where the level in use counts. */
const ba_tuning *ba_tuning_at(ba_isa level);

#endif
