/* The micro-kernels: what each one reads, writes and promises, stated once. Kernels know registers and tiles. They do not allocate, fail, log or
 * start threads, and they know nothing of layouts and index lists.
 *
 * Queries that attend the same keys stand side by side in a panel: element [d][lane] of a panel is dim d of query `lane`. Keys come in chunks, each
 * key as a pointer to its row, so that blocks, pages and strides look the same to a kernel. For one panel and one chunk:
 *
 *     S^T[key][lane]  = K Q^T           Q carries scale * log2(e), so that exp is exp2
 *     P^T             = exp2(S^T - m)   m: the number that is subtracted from a lane's scores
 *     O^T[d][lane]    = O^T * exp2(m_old - m) + V^T P^T
 *
 * Panel kernels compute all of this vertically: they reduce nothing across lanes. On vectors, m is the running maximum of each lane. On tiles, m is
 * the lane's largest score in the first group of which it sees a key, rounded up to a whole number, so that rescaling is exact. Later scores may be
 * larger than m, which is raised only where the weights of a group would have too large a sum.
 *
 * Glossary of csrc/kernels and csrc/ops: words with a sense of their own. Files that choose blocks for prefill have some more
 * (ops/select/select_prefill_call.h).
 *
 *     cell         32 dims of a row of q8_0, q4_0 or q4_1, which share one factor (BA_Q8_0 in blitz_attn_types.h). ggml calls a cell a block
 *     real         the type of accumulators: double for float64, float for every other dtype
 *     row          the elements of one token and head: head_dim elements in Q and K, v_dim in V and the output, likewise in their gradients. Rows of
 *                  anything else are named in full: list rows, block rows, rows of accumulators
 *     pack         to copy rows into the order and the dtype in which a kernel reads them
 *     pair         two bfloat16 elements in one 32-bit lane. One instruction multiplies two pairs, and adds both products
 *     level        one instruction set (ba_isa), which includes those of all lower levels of the same architecture
 *     family       the kernels of one dtype at one level, which share their packed formats
 *     driver       the code in csrc/ops that runs an operation: it finds rows, calls kernels and writes results
 *
 *     query        one token of one query head
 *     KV group     the query heads that share a KV head. A KV head's queries are the queries of its whole group
 *     slice        the consecutive queries of a sequence to which a call is limited (q_begin, q_total)
 *     panel        queries side by side as lanes, with their states. Queries that would not fill a wide panel make a narrow one
 *     lane         one query's column of a panel. Lanes of a vector register are called vector lanes where both occur
 *     query tile   at most tile_queries queries that walk the same list and keep their states in cache. It consists of panels. csrc/ops, which knows
 *                  no tile registers, says tile (ba_tile)
 *     few          said of a KV head's queries that are so few, as in decode, that the kernels for few queries attend them (ba_plan_few_queries).
 *                  These "few kernels" take up to BA_FEW_QUERIES queries at a time, have dims as vector lanes, and read K and V in place
 *     set          the queries that a few or a routed kernel computes together: as many as the registers hold sums for
 *     state        m, l and o of a query: the reference, the sum of weights, and the sum of weighted values
 *     reference    m: the number that is subtracted from a query's scores, so that its weights neither overflow nor all vanish
 *     weight       exp2(score - m): the factor by which a value is multiplied
 *     slope        scale * dS: the factor by which a row of Q or K is multiplied in gradients. (The slopes of a bias are those of alibi_slopes.)
 *     bounds       lo and hi of a query: it sees the keys from lo to hi - 1
 *     bias         the numbers that attn_mask and alibi_slopes add to scores, one for each query and key; -inf hides the key
 *
 *     block        block_q queries by block_kv keys, which are attended or left out together: a block row by a block column
 *     list         the block columns that one block row attends, in any order
 *     list row     one list, as a row of the array of lists
 *     run          consecutive keys, rows, pages or tiles
 *     routed       said of lists that have one query or a small tile of queries each, and little in common with the lists beside them. Routed kernels
 *                  attend any number of queries that have just one chunk in common, and pack no panels
 *     walk         going once over the keys of a list, in rising order
 *     position     of a key in a walk: how many keys of the list come before this key (ba_chunk.place counts within a chunk). Of a query: the number
 *                  of the key that stands beside the query on the diagonal
 *     chunk        the keys that one kernel call attends, at most BA_MAX_CHUNK. A walk is cut into chunks by positions, not at the borders of blocks
 *     group        key_pad consecutive keys that are packed and multiplied together
 *     key stretch  consecutive keys whose weights are summed before the sum is added to l
 *     unit         the rows of K that a few kernel scores together, for one head and one set
 *     bundle       consecutive keys whose weighted values a kernel (for few queries or on tiles) adds up before it turns to other keys
 *     part         in decode, some of a sequence's keys, which are attended separately. The states of all parts are joined
 *     KV split     kv_split consecutive tokens of a request, attended as a sequence of its own
 *
 *     plan         of a call: its items, and how the items are cut and sorted (ba_plan)
 *     item         the work that a thread takes from the plan at a time: some query tiles, or a part
 *     opened       said of a call or of page tables that have been checked, and that hold copies of everything that must not change (ops/open/open.h,
 *                  ops/kv_cache/page_tables.h)
 *     pass         of a prefetcher: going once over the rows to come. At every step, a few kernel prefetches a little in each of its passes
 *
 * In csrc/kernels/tiles/ alone:
 *     tile         one tile register: 16 rows of 64 bytes
 *     piece        one of the bfloat16 numbers whose sum is a float16 or float32 element
 *     strip        the dims of V whose sums stand in tile registers at a time: 32, or up to 64 for few queries
 *     cell         in the backward pass: one group of keys of one panel
 *     heavy        said of a group whose weights need a second piece, since they are a large share of a query's sum so far */
#ifndef BA_KERNELS_H
#define BA_KERNELS_H

#include "blitz_attn_types.h"
#include "core/common.h"

enum {
    BA_MAX_HEAD_DIM = 576,
    BA_PANEL_WIDTHS = 2,      /* a wide panel, and a narrow one for the queries that do not fill a wide one */
    BA_MAX_LANES = 64,        /* of a panel */
    BA_FEW_QUERIES = 8,       /* the most queries of a few call */
    BA_MOST_FEW_HEADS = 16,   /* the most heads of a few call */
    BA_FEW_KEY_ALIGN = 16,    /* a few kernel may be given a chunk without its first keys, if their number is a multiple of this and of key_align */
    BA_CHOOSE_LIST_ROWS = 16, /* list rows whose best blocks are chosen together */
    BA_ROUTED_KEYS = 64,      /* cutting the chunk of a routed kernel at a multiple of this many keys changes no bit */
    BA_MAX_CHUNK = 512,       /* the most keys of a chunk */
    BA_CUT_KEYS = 256,        /* a chunk of a family with has_cuts may be cut at a multiple of this many keys; has_cuts says which bits change */
    BA_PACK_PAD = 16,         /* packed rows have room up to a multiple of this many elements */
    BA_ALIGN = 64,            /* bytes: panels, accumulators and scratch start at a multiple of this */
    BA_PAGE = 4096,           /* bytes: addresses that lie a multiple of this apart compete for the same lines of the first-level cache */
    BA_FLOAT_DTYPES = 4,      /* BA_FLOAT32 .. BA_FLOAT64 */
    BA_CELL_DIMS = 32,
    BA_CELL_DTYPES = BA_Q4_1 + 1 - BA_Q8_0, /* BA_Q8_0 .. BA_Q4_1 */
    BA_Q8_0_BYTES = 34,                     /* of a cell */
    BA_Q4_0_BYTES = 18,
    BA_Q4_1_BYTES = 20,
};

/* The bytes of a cell; 0 for dtypes without cells. */
static inline int64_t ba_cell_bytes(ba_dtype dtype) {
    return dtype == BA_Q8_0 ? BA_Q8_0_BYTES : dtype == BA_Q4_0 ? BA_Q4_0_BYTES : dtype == BA_Q4_1 ? BA_Q4_1_BYTES : 0;
}

/* Scores are in log2 units: natural scores times this factor. */
#define BA_LOG2_E 0x1.71547652b82fep+0

/* The queries and the state of one panel. All arrays are [..][lanes], where lanes is the width of the kernel that is called. */
typedef struct ba_panel {
    void *q;           /* packed by pack_queries; its format is the family's own */
    void *o;           /* real [round_up(v_dim, dim_pad)][lanes], initially 0; see ba_o_place for the order */
    int64_t lanes;     /* how many of the first lanes hold queries: kernels may leave out the other lanes. 0: any lane may hold a query */
    bool fresh;        /* o is undefined instead of 0, since the panel has attended nothing: see takes_fresh. The caller clears this after the call */
    void *m;           /* real [lanes], in log2 units: the reference of the weights; initially minus the largest finite number */
    void *l;           /* real [lanes], initially 0 */
    const int32_t *lo; /* NULL: bounds hide no key of the chunk from any lane. Otherwise a lane sees key j only where lo <= key_index[j] < hi */
    const int32_t *hi;
} ba_panel;

/* Rows to prefetch: `bytes` bytes of each row, from `offset` on, but `other_bytes` bytes of each of the last `others` rows. A few kernel prefetches
 * the rows while it works, a little at every step, in up to BA_PREFETCH_PASSES passes. Pass i begins at row skip[i]: skip[0] is 0, and later passes
 * begin farther on. Where skip[i] is -1, there is no pass i. */
enum { BA_PREFETCH_PASSES = 3 };
typedef struct ba_prefetch_rows {
    const void *const *rows;
    int64_t count, offset, bytes, skip[BA_PREFETCH_PASSES];
    int64_t others, other_bytes; /* few */
} ba_prefetch_rows;

/* The numbers that are added to the scores of a panel over a chunk, after the softcap. */
typedef struct ba_bias {
    const void *numbers; /* in log2 units: real [keys of the chunk][lanes], for few kernels [queries][BA_FEW_PAD(keys)]. NULL: nothing is added */
    bool hides;          /* some number is -inf, so that its lane does not see its key */
} ba_bias;

/* One chunk of keys. Fields marked "few" are for the few kernels alone, and fields marked "panel" for the panel kernels alone; but the panel
 * kernels of families with takes_scales read scales, too. */
typedef struct ba_chunk {
    int64_t keys;              /* 1 .. BA_MAX_CHUNK */
    int64_t head_dim, v_dim;   /* 1 .. BA_MAX_HEAD_DIM; pack_queries and scores of families whose rows are reals take any head_dim */
    const void *const *k_rows; /* [keys]: in the input dtype where the family reads K in place, otherwise as pack->keys has set them */
    const void *const *v_rows; /* [keys], likewise */
    int64_t k_offset;          /* few: bytes from k_rows[j] to the head's row; all heads of a token share the pointer */
    int64_t v_offset;
    ba_prefetch_rows k_prefetch, v_prefetch; /* few */
    void *gathered;            /* few, where there is one head: room for its rows of K and V, which the kernel may copy there first. NULL: none */
    const void *const *k_next; /* panel: [next_rows]: rows (packed, if shared) that will be used next: the kernel may prefetch them. NULL: none */
    const void *const *v_next;
    int64_t next_rows, k_next_bytes, v_next_bytes; /* panel: the number of these rows, and the bytes of each */
    bool fetch_values;        /* panel: v_rows are read in place, and no panel has read them yet: a narrow panel may prefetch v_rows, not v_next */
    int next_level;           /* panel: the cache into which rows are prefetched: see ba_prefetch_level */
    int64_t place;            /* panel: how many keys come before this chunk's first key in the chunk that it was cut from */
    const int32_t *key_index; /* [keys], rising; read only where the panel has lo and hi */
    const float *k_scale;     /* few: [keys]: factors of K's rows; every NaN among them is NAN, the usual NaN. NULL: all factors are 1 */
    const float *v_scale;     /* the same for V */
    double scale;             /* as given to pack_queries. A family whose packed queries do not contain this factor multiplies the scores by it */
    double softcap;           /* in log2 units: scores become softcap * tanh(score / softcap). 0: they stay as they are */
    ba_bias bias;             /* panel, few */
    void *scratch;            /* keys * scratch_per_key bytes, of any content */
} ba_chunk;

/* Where the bias of a panel comes from: numbers of a mask, and -slope * |place - key_index|. */
typedef struct ba_bias_source {
    const void *const *rows; /* [lanes]: the numbers of each lane from key 0 on, not in log2 units. NULL: there is no mask */
    ba_dtype dtype;          /* of these numbers. In BA_BOOL, 0 hides the key */
    int64_t stride;          /* elements from the number of one key to that of the next */
    const float *slopes;     /* [lanes], or NULL: there are none */
    const int32_t *places;   /* [lanes]: where each query stands among the keys */
} ba_bias_source;

typedef enum ba_bias_effect {
    BA_BIAS_NONE, /* all numbers are 0, so that the chunk needs no bias */
    BA_BIAS_ADDS, /* no number is -inf */
    BA_BIAS_HIDES_SOME,
    BA_BIAS_HIDES_ALL, /* all numbers are -inf, so that no lane sees a key */
} ba_bias_effect;

/* Writes the numbers of a bias for the keys of key_index. fill_bias does so for a panel of `lanes` lanes, fill_few_bias for `lanes` queries of a few
 * call. */
#define BA_FILL_BIAS(name) ba_bias_effect name(void *numbers, const ba_bias_source *source, int64_t lanes, const int32_t *key_index, int64_t keys)
typedef BA_FILL_BIAS((*ba_fill_bias_fn));

/* ---- Packing ------------------------------------------------------------------------------------------------------------ */

/* Packs n queries into a panel, times scale unless the family multiplies the scores by it (ba_chunk.scale). Lanes n .. lanes-1 become queries of
 * zeros. The panel has room for lanes * round_up(dim, dim_pad) * q_bytes bytes. */
#define BA_PACK_QUERIES(name) void name(void *panel, const void *const *q_rows, int64_t n, int64_t dim, double scale)
typedef BA_PACK_QUERIES((*ba_pack_queries_fn));

/* Packs rows of K or V into the format that attend reads. Writes to `packed`, of round_up(keys, key_pad) * round_up(dim, dim_pad) * pack_bytes bytes,
 * and sets packed_rows[0 .. keys-1] to the pointers that attend is to be given. Row j is multiplied by scales[j] (NULL: by 1); only packing into
 * reals takes scales. */
#define BA_PACK_ROWS(name) void name(void *packed, const void **packed_rows, const void *const *rows, const float *scales, int64_t keys, int64_t dim)
typedef BA_PACK_ROWS((*ba_pack_rows_fn));

/* Writes the first n lanes: out_rows[i][d] = o[d][i] / l[i] in the input dtype, 0 where l is 0, and +0 for -0. Unless lse is NULL, lse[i] = (m + log2
 * l) * ln 2 as real, -inf where l is 0. */
#define BA_FINISH(name) void name(const ba_panel *panel, int64_t n, int64_t v_dim, void *const *out_rows, void *lse)
typedef BA_FINISH((*ba_finish_fn));

/* out[d] = sum over parts of weights[part] * rows[part][d], in the input dtype; weights are real. */
#define BA_MERGE_ROW(name) void name(void *out, const void *const *rows, const void *weights, int64_t parts, int64_t dim)
typedef BA_MERGE_ROW((*ba_merge_row_fn));

/* to[i] += from[i] for n reals. The arrays do not overlap. */
#define BA_ADD_REALS(name) void name(void *to, const void *from, int64_t n)
typedef BA_ADD_REALS((*ba_add_reals_fn));

typedef struct ba_pack_kernels {
    ba_pack_rows_fn keys, values; /* NULL: attend reads K (or V) in place */
    ba_pack_queries_fn queries[BA_PANEL_WIDTHS];
    ba_finish_fn finish[BA_PANEL_WIDTHS], finish_reals[BA_PANEL_WIDTHS]; /* finish_reals writes reals, without the rounding to the input dtype */
    ba_merge_row_fn merge_row;
    ba_add_reals_fn add_reals;
} ba_pack_kernels;

/* ---- Panels ------------------------------------------------------------------------------------------------------------- */

/* The fused kernel: adds the scores, softmax and values of one chunk to the state of one panel.
 * A lane's result depends only on its own query, the keys that it sees, and where the chunk begins. Keys that a lane does not see add exactly
 * nothing, even where their rows or scales hold NaN or infinity. The sign of a zero in o is not defined, and finish writes each zero as +0. Where a
 * family flushes small numbers to zero, the sign of a NaN is not defined either. */
#define BA_ATTEND(name) void name(const ba_panel *panel, const ba_chunk *chunk)
typedef BA_ATTEND((*ba_attend_fn));

/* attend for n different panels of one width, panel i with chunk i. The bits are those of n calls of attend. A family has this kernel where it can
 * overlap the work of consecutive panels. The chunks differ only in keys, rows, scales and the rows that will be used next. Either all chunks have
 * scales, or none has. */
#define BA_ATTEND_MANY(name) void name(const ba_panel *panels, const ba_chunk *chunks, int64_t n)
typedef BA_ATTEND_MANY((*ba_attend_many_fn));

/* The three steps of attend, for checks, for timing, and for operations that need one of them.
 * scores:  scratch = S^T as real [keys][lanes], and row_max[lanes] = the largest score that the lane sees (in log2 units).
 * softmax: scratch = P^T in place; updates m and l of the panel; alpha[lanes] = exp2(m_old - m_new).
 * values:  o = o * alpha + V^T P^T. */
#define BA_SCORES(name) void name(const ba_panel *panel, const ba_chunk *chunk, void *row_max)
typedef BA_SCORES((*ba_scores_fn));
#define BA_SOFTMAX(name) void name(const ba_panel *panel, const ba_chunk *chunk, const void *row_max, void *alpha)
typedef BA_SOFTMAX((*ba_softmax_fn));
#define BA_VALUES(name) void name(const ba_panel *panel, const ba_chunk *chunk, const void *alpha)
typedef BA_VALUES((*ba_values_fn));

/* sums[key][lane] += exp2(S^T - m) for the keys that the lane sees. Where m is the log-sum-exp in log2 units, the added numbers are the
 * probabilities; where m is +infinity, they are 0. The panel is wide. Neither o, l, softcap nor scales are read. */
#define BA_ADD_PROBABILITIES(name) void name(const ba_panel *panel, const ba_chunk *chunk, float *sums)
typedef BA_ADD_PROBABILITIES((*ba_add_probabilities_fn));

/* Makes scores and weights as attend does, but keeps only the sums of weights over blocks of keys. m and l become those of all keys so far, and
 * alpha[lanes] = exp2(m_old - m_new). The chunk begins `begun` keys after the beginning of a block; where begun is not 0, sums[0] holds the block's
 * sum so far, which is multiplied by alpha and continued. The panel is wide. Families on tiles read neither softcap, biases nor scales. */
typedef struct ba_block_sums {
    void *sums; /* real [block][lanes]; with block 1, it may be the chunk's scratch */
    int64_t block, begun;
    void *alpha;
    bool keeps_m; /* m stays as it is: the caller promises that no score is larger than m, except by rounding */
} ba_block_sums;
#define BA_SUM_BLOCKS(name) void name(const ba_panel *panel, const ba_chunk *chunk, const ba_block_sums *blocks)
typedef BA_SUM_BLOCKS((*ba_sum_blocks_fn));

/* Turns the sums of blocks into shares, and joins the shares of every `together` lanes that stand side by side: joined[block][lanes / together] = the
 * largest, or the sum, of max(0, sum * factor). NaN counts as 0. `joined` overwrites the beginning of `sums`. `together` is a power of two, and
 * `lanes` a multiple of two vectors. */
#define BA_JOIN_LANES(name) void name(void *sums, const void *factor, int64_t blocks, int64_t lanes, int64_t together, bool largest)
typedef BA_JOIN_LANES((*ba_join_lanes_fn));

/* The scores of an indexer. Its keys are the lanes of the panel; its heads, [query][head], take the place of the keys of the chunk.
 * sums[query][lane] = the sum over heads of weights[query][head] * max(0, scales[lane] * S^T[query][head][lane]). NaN stays NaN. The panel is wide.
 * Bounds, biases, softcap and scales of the chunk are not read. In families without scratch_per_key the chunk may have any number of keys. */
typedef struct ba_head_sums {
    void *sums;          /* real [queries][lanes] */
    const void *weights; /* real [queries][heads] */
    const void *scales;  /* real [lanes]. NULL: 1 */
    int64_t queries, heads;
} ba_head_sums;
#define BA_SUM_HEADS(name) void name(const ba_panel *panel, const ba_chunk *chunk, const ba_head_sums *heads)
typedef BA_SUM_HEADS((*ba_sum_heads_fn));

/* A key of an indexer, and its score: a real, which a double holds exactly, and minus infinity for NaN. */
typedef struct ba_scored_key {
    double score;
    int32_t key;
} ba_scored_key;

/* Of the keys `first` to first + n - 1, writes those whose scores are above `least` to `to`, in rising order, and returns their number. NaN counts as
 * minus infinity; with NaN as `least`, all keys are written. `to` has room for n keys. */
#define BA_APPEND_KEYS(name) int64_t name(ba_scored_key *to, const void *scores, int64_t n, int64_t first, double least)
typedef BA_APPEND_KEYS((*ba_append_keys_fn));

/* Moves those of the n keys that are better than `pivot` to the front, and returns their number. `pivot` is none of the n keys. Of two keys, the one
 * with the higher score is better and, if the scores are equal, the lower key. No score is NaN. `spare` has room for n keys. */
#define BA_MOVE_BETTER(name) int64_t name(ba_scored_key *all, int64_t n, ba_scored_key pivot, ba_scored_key *spare)
typedef BA_MOVE_BETTER((*ba_move_better_fn));

typedef struct ba_panel_kernels {
    ba_attend_fn attend[BA_PANEL_WIDTHS];
    ba_attend_many_fn attend_many[BA_PANEL_WIDTHS]; /* NULL: the family gains nothing by it */
    ba_sum_heads_fn sum_heads;                      /* NULL: that of the vector family */
    ba_sum_blocks_fn sum_blocks;                    /* NULL in families whose elements are several pieces */
    ba_join_lanes_fn join_lanes;                    /* NULL: that of the vector family, which takes any family's panels */
    ba_append_keys_fn append_keys;                  /* NULL, like move_better: that of the vector family */
    ba_move_better_fn move_better;
    ba_scores_fn scores[BA_PANEL_WIDTHS];   /* NULL, like softmax and values, where a family has the fused kernel only */
    ba_softmax_fn softmax[BA_PANEL_WIDTHS]; /* NULL, like values, also where weights are kept in another format */
    ba_values_fn values[BA_PANEL_WIDTHS];
    ba_add_probabilities_fn add_probabilities; /* NULL: scores and softmax do this work */
    ba_fill_bias_fn fill_bias, fill_few_bias;  /* NULL: those of the vector family */
} ba_panel_kernels;

/* ---- Few queries -------------------------------------------------------------------------------------------------------- */

/* attend for 1 .. BA_FEW_QUERIES queries of each of 1 .. BA_MOST_FEW_HEADS heads whose rows lie side by side. Panel i and chunk i belong to head i.
 *
 * panel->q has room for BA_FEW_QUERIES * round_up(head_dim, dim_pad) * q_bytes bytes, as pack_queries and order_queries have left it; o is
 * [query][BA_FEW_PAD(v_dim)]; m, l, lo and hi are [BA_FEW_QUERIES]; K and V are read in place, in their own dtype. Each head's scratch has
 * BA_FEW_SCRATCH reals. The chunks differ only in offsets, scales, scratch and the numbers of their bias. All panels have the same lo and hi.
 * The first chunk says what to prefetch. Offsets, scratch, q and o are evenly spaced, so that a row's address is computed from the head's number. A
 * load of the address would wait behind loads of rows from memory, and delay the row. A head's bits do not depend on the heads beside it.
 *
 * A kernel may use a head's scratch as it likes. Kernels on vectors keep scores there and, behind the scores, sums of V. Kernels on tiles keep scores
 * of whole groups of 32 keys, for which the room is just enough. */
#define BA_FEW_PAD(dim) ba_round_up(dim, 16)
#define BA_FEW_BIAS(keys) (BA_FEW_QUERIES * BA_FEW_PAD(keys)) /* reals that the numbers of a bias need at most */
#define BA_FEW_SCRATCH(keys, v_dim) (BA_FEW_QUERIES * (ba_round_up(keys, 16) + BA_FEW_PAD(v_dim)))
#define BA_ATTEND_FEW(name) void name(const ba_panel *panels, int64_t queries, const ba_chunk *chunks, int64_t heads)
typedef BA_ATTEND_FEW((*ba_attend_few_fn));

/* Reorders n packed queries in place, to the order in which attend, and scores of a cache, read a row's elements. */
#define BA_ORDER_FEW(name) void name(void *q, int64_t n, int64_t dim)
typedef BA_ORDER_FEW((*ba_order_few_fn));

/* Adds the states `from` to the states `into`. Both belong to the same queries, but to different keys. */
#define BA_JOIN_FEW(name) void name(const ba_panel *into, const ba_panel *from, int64_t queries, int64_t v_dim)
typedef BA_JOIN_FEW((*ba_join_few_fn));

typedef struct ba_few_kernels {
    /* By the dtype of K and V, which may differ from that of the queries. NULL: such calls use the kernels of the cache, and the vector family's
     * packing */
    ba_attend_few_fn attend[BA_DTYPE_COUNT];
    ba_pack_queries_fn pack_queries;
    ba_order_few_fn order_queries; /* NULL: pack_queries leaves them in order */
    ba_finish_fn finish, finish_reals;
    ba_join_few_fn join;
} ba_few_kernels;

/* ---- Routed lists ------------------------------------------------------------------------------------------------------- */

/* attend for any number of queries that have just this one chunk in common. Each query keeps a state of its own, and no panel is packed. `lanes` are
 * the indices of the queries, all different, in the arrays of the panel.
 *
 * panel->q is [lane][round_up(head_dim, dim_pad)]: reals, as pack_queries makes them, or, where there is no pack_queries, rows in the input dtype
 * followed by zeros. o is [lane][BA_FEW_PAD(v_dim)]; m, l, lo and hi are [lane]. Rows of K and V are as routed->pack_keys and routed->pack_values
 * have set them, with room for round_up(keys, BA_ROUTED_KEYS) * round_up(dim, dim_pad) elements of the size of q's. Of each BA_ROUTED_KEYS keys only
 * the first row's pointer is read: it is where the room of these keys begins. Scratch, offsets, scales and next rows are not read. */
#define BA_ATTEND_ROUTED(name) void name(const ba_panel *panel, const int32_t *lanes, int64_t queries, const ba_chunk *chunk)
typedef BA_ATTEND_ROUTED((*ba_attend_routed_fn));

/* Chooses the best `width` blocks of each of up to BA_CHOOSE_LIST_ROWS list rows. A block of score -infinity is chosen only if it is one of those
 * that are always chosen. NaN counts as minus the largest finite number. Of blocks with equal scores the lower one comes first. */
typedef struct ba_choice {
    const void *scores; /* real: block b of list row i at [b * stride + i] */
    int64_t stride, list_rows, blocks, width;
    /* blocks that are always chosen, `width` at most: [0, init) and [local_lo, local_hi) */
    int32_t init[BA_CHOOSE_LIST_ROWS], local_lo[BA_CHOOSE_LIST_ROWS], local_hi[BA_CHOOSE_LIST_ROWS];
    int32_t hi[BA_CHOOSE_LIST_ROWS];      /* blocks from this number on are not chosen; 0 for list rows that do not exist */
    void *keys;                           /* scratch: real [blocks][BA_CHOOSE_LIST_ROWS] */
    int32_t *lists;                       /* [BA_CHOOSE_LIST_ROWS][width + 1]: set to the chosen blocks in rising order, with one entry to spare */
    int32_t lengths[BA_CHOOSE_LIST_ROWS]; /* set to the number of chosen blocks */
} ba_choice;

#define BA_CHOOSE(name) void name(ba_choice *c)
typedef BA_CHOOSE((*ba_choose_fn));

typedef struct ba_routed_kernels {
    ba_attend_routed_fn attend;
    ba_pack_rows_fn pack_queries; /* NULL: queries stay in the input dtype */
    ba_pack_rows_fn pack_keys, pack_values;
    ba_choose_fn choose; /* NULL in families whose packed rows are not reals */
} ba_routed_kernels;

/* ---- Gradients. P is recomputed from the log-sum-exp, for all panels of a query tile:
 *
 *     dS^T = P^T (V dO^T - delta)    dQ^T += scale K^T dS^T    dV += P^T dO    dK += scale dS^T Q
 *
 * where the elements of dS are multiplied by the derivatives of their scores' softcap, if there is one. A bias, which is added to a score after the
 * softcap, has the gradient dS without this factor.
 * The first two products belong to a panel, as in attend; the other two belong to a query tile, whose panels stand one after the other. */
typedef struct ba_gradient_panel {
    const void *q;          /* packed by pack_queries, with scale * log2(e) */
    const void *dout;       /* the gradient of the output, packed by pack_queries, with scale */
    const void *lse;        /* real [lanes], in log2 units; +inf where nothing was attended, so that all weights are 0 */
    const void *delta;      /* real [lanes]: scale * delta, where delta = dO . O - gradient of the log-sum-exp */
    void *dq;               /* real [round_up(head_dim, dim_pad)][lanes], in the order of o; the kernel adds to it. Only `gradient` takes NULL */
    const int32_t *lo, *hi; /* as in ba_panel */
    ba_bias bias;           /* the bias of the chunk is not read */
} ba_gradient_panel;

/* weights = P^T and slopes = scale * dS^T, both real [keys][lanes] and exactly 0 where a lane does not see a key; dq += K^T slopes. Promises what
 * attend promises. There are no scales. Where dq is NULL, slopes are those for the gradient of the bias, which are not multiplied by the derivative
 * of the softcap. */
#define BA_GRADIENT(name) void name(const ba_gradient_panel *panel, const ba_chunk *chunk, void *weights, void *slopes)
typedef BA_GRADIENT((*ba_gradient_fn));

/* Packs the rows of a query tile's lanes: packed[block][lane][i] = rows[lane][block * lane_block + i], as real, zeros after the last dim. For
 * add_tile it packs the lanes of one panel, in a format of the family's own, of at most lanes[0] * round_up(dim, lane_block) * real_size bytes.
 * Returns whether all elements are finite. */
#define BA_PACK_TILE(name) bool name(void *packed, const void *const *rows, int64_t lanes, int64_t dim)
typedef BA_PACK_TILE((*ba_pack_tile_fn));

/* The weights, or slopes, of one panel of a query tile. */
typedef struct ba_weights {
    const void *data;   /* real [keys][width] */
    int64_t width;      /* lanes of the panel */
    int64_t lanes;      /* lanes in use */
    int64_t begin, end; /* the weights of keys outside [begin, end) are 0 or, where begin == end, never read */
} ba_weights;

typedef struct ba_add_rows {
    const ba_weights *weights; /* [panels] */
    int64_t panels;
    const void *packed; /* the rows of all lanes of all panels, by pack_tile */
    int64_t lanes;      /* of all panels */
    bool finite;        /* whether all of `packed` is finite. If not, a weight of 0 still adds nothing, whatever the row holds */
    int64_t keys, dim;
    void *const *rows; /* [keys]: real [dim] each; the kernel adds to them */
} ba_add_rows;

/* rows[key][d] += sum over lanes of weight[key][lane] * packed row [lane][d]. A key's sum depends only on its own weights and the lanes' rows, and
 * adds the lanes in their order. */
#define BA_ADD_ROWS(name) void name(const ba_add_rows *a)
typedef BA_ADD_ROWS((*ba_add_rows_fn));

/* Families whose products combine the panels of a query tile have the kernels gradient_tile and add_tile instead of gradient and add_rows.
 * gradient_tile makes the weights, slopes and dQ of all panels; add_tile then adds to the rows of dK and dV. Both promise what gradient and add_rows
 * promise. weights and slopes are rounded as the family rounds weights. With joins_tiles, the panels may be those of several query tiles. */
typedef struct ba_tile_panel {
    ba_gradient_panel panel;        /* q and dout as pack_queries leaves them */
    const void *q_rows, *dout_rows; /* add_tile only: the rows of the panel's lanes, by pack_tile */
    int64_t width, lanes;           /* of the panel, and in use */
    int64_t begin, end; /* no lane sees a key of the chunk outside [begin, end). Where begin == end, whatever their value, add_tile reads no weight */
} ba_tile_panel;

enum { BA_MOST_TILE_PANELS = 32 };

typedef struct ba_gradient_tile {
    const ba_tile_panel *panel; /* [panels] */
    int64_t panels;
    double scale;                          /* as given to pack_queries for dout. Families whose packed rows do not contain it multiply by it */
    const void *const *k_columns;          /* [keys]: K packed by pack->values. The chunk's k_rows and v_rows are packed by pack->keys, if any */
    void *weights, *slopes;                /* of panels * lanes[0] * round_up(keys, key_pad) * pack_bytes bytes each */
    bool finite_q, finite_dout;            /* add_tile only: whether pack_tile has returned true for all panels */
    void *const *dk_rows, *const *dv_rows; /* add_tile only. [keys]: real [round_up(dim, BA_PACK_PAD)] each; the kernel adds to them */
    const ba_prefetch_rows *ahead; /* gradient_tile only. [aheads]: rows for later use; the kernel may prefetch each once. `skip` is not read */
    int aheads;
} ba_gradient_tile;

#define BA_GRADIENT_TILE(name) void name(const ba_gradient_tile *tile, const ba_chunk *chunk)
typedef BA_GRADIENT_TILE((*ba_gradient_tile_fn));

/* sums[i] = a_rows[i] . b_rows[i], as real, of rows in the input dtype. */
#define BA_DOT_ROWS(name) void name(void *sums, const void *const *a_rows, const void *const *b_rows, int64_t n, int64_t dim)
typedef BA_DOT_ROWS((*ba_dot_rows_fn));

/* Converts a row of reals to the input dtype. */
#define BA_STORE_ROW(name) void name(void *to, const void *from, int64_t dim)
typedef BA_STORE_ROW((*ba_store_row_fn));

typedef struct ba_gradient_kernels {
    ba_gradient_fn gradient[BA_PANEL_WIDTHS]; /* NULL, like add_rows, where the family has gradient_tile and add_tile */
    ba_add_rows_fn add_rows;
    ba_gradient_tile_fn gradient_tile, add_tile; /* NULL where the family has gradient and add_rows */
    ba_pack_tile_fn pack_tile;
    ba_dot_rows_fn dot_rows;
    ba_store_row_fn store_row;
} ba_gradient_kernels;

/* ---- Families ----------------------------------------------------------------------------------------------------------- */

/* The kernels of one dtype at one level, by job, and the formats that they share. A job that a family does not do is NULL: the driver takes the
 * kernels of the vector family. A higher level replaces a family as a whole. */
typedef struct ba_attend_family {
    const char *name;
    ba_isa isa;
    const ba_pack_kernels *pack;         /* never NULL */
    const ba_panel_kernels *panel;       /* never NULL */
    const ba_few_kernels *few;           /* never NULL, but entries of its attend may be */
    const ba_routed_kernels *routed;     /* NULL: by the vector family */
    const ba_gradient_kernels *gradient; /* NULL: by the vector family */
    int64_t lanes[BA_PANEL_WIDTHS];      /* [0] wide, [1] narrow */
    int64_t dim_pad, key_pad;            /* room: packed queries, rows and o: a multiple of dim_pad dims; packed rows: a multiple of key_pad keys */
    int64_t real_size;                   /* bytes of a real: 4 or 8 */
    int64_t q_bytes;                     /* bytes of a packed query element */
    int64_t scratch_per_key;             /* bytes of scratch per key of the chunk, for a wide panel */
    int64_t pack_bytes;                  /* bytes of a packed K or V element; 0: both are read in place */
    int64_t lane_block;                  /* dims that pack_tile keeps together */
    int64_t o_block;   /* o and dq stand in blocks [dim][lane] of so many dims and lanes, all blocks of the same dims side by side; 0: o is
                          [dim][lane] as a whole */
    bool takes_fresh;  /* attend may be given fresh panels: it sets their o instead of adding to it */
    bool takes_scales; /* attend and scores read the scales of a chunk: scores are multiplied by those of K, weights by those of V. Such a family,
                          which is always of bfloat16, may therefore be given rows of a quantised cache that `widen` has turned into bfloat16 */
    bool joins_tiles;  /* add_tile starts from the sums in memory and adds one panel after another. So several query tiles may be given to it, and
                          to gradient_tile, as one: no bit changes */
    bool pack_groups;  /* a packed group of key_pad keys does not depend on the chunk. It takes the bytes of key_pad packed rows, groups follow each
                          other, and attend reads only the pointer of a group's first key */
    int64_t key_align; /* attend may be given a chunk without its first keys, if their number is a multiple of this */
    bool has_cuts;     /* cutting a chunk at multiples of BA_CUT_KEYS changes no lane's bits, except those of weights below real's normal range */
} ba_attend_family;

/* Where element [row][lane] stands among blocks of `block` rows and lanes: [row block][lane block][row][lane]. */
static inline int64_t ba_place_in_blocks(int64_t block, int64_t lanes, int64_t row, int64_t lane) {
    return (row - row % block) * lanes + (lane - lane % block + row % block) * block + lane % block;
}
/* Where dim d of a lane stands in the o, or dq, of a panel with `lanes` lanes. */
static inline int64_t ba_o_place(const ba_attend_family *f, int64_t lanes, int64_t d, int64_t lane) {
    return f->o_block ? ba_place_in_blocks(f->o_block, lanes, d, lane) : d * lanes + lane;
}

/* scores[query * stride + key] = q . row, in real, with room for round_up(keys, 16) keys per query. q is packed and ordered as for few.attend. offset
 * and prefetch are those of ba_chunk; prefetch may be NULL. */
#define BA_SCORES_FEW(name)                                                                                                                          \
    void name(const void *q, int64_t queries, const void *const *rows, int64_t offset, const ba_prefetch_rows *prefetch, int64_t keys, int64_t dim,  \
              void *scores, int64_t stride)
typedef BA_SCORES_FEW((*ba_scores_few_fn));

/* scores[(row * heads + head) * queries + query], in real, with room for round_up(rows * heads * queries, 16).
 * With one side (and one query per head) a score is the product of the query and the head's row. With two sides it is the sum over channels of
 * max(q * a, q * b), where a and b are the rows of the two sides, in either order: NaN in any factor makes the score NaN; 0 times infinity makes it
 * NaN or adds nothing. A head's row lies offset + head * head_stride bytes after the given pointer. q is [head][query][BA_FEW_PAD(dim)] reals, each
 * query packed alone, and heads * queries * round_up(dim, 32) is at most BA_HEADS_REALS. Row r + distance is prefetched while row r is read, as far
 * as rows are known: `known_rows` pointers are valid. */
enum { BA_HEADS_REALS = 2048 };
typedef struct ba_side {
    const void *const *rows;
    int64_t offset, head_stride;
} ba_side;
#define BA_SCORE_HEADS(name)                                                                                                                         \
    void name(const ba_side *side, int64_t sides, const void *q, int64_t queries, int64_t heads, int64_t rows, int64_t known_rows, int64_t distance, \
              int64_t dim, void *scores)
typedef BA_SCORE_HEADS((*ba_score_heads_fn));

/* The largest, smallest and mean element of each column of n >= 1 rows, in the rows' dtype. Outputs that are NULL are not computed. Largest and
 * smallest are exact elements. They ignore NaN, unless all elements are NaN: then both are NaN. */
#define BA_SUMMARISE(name) void name(const void *const *rows, int64_t n, int64_t dim, void *largest, void *smallest, void *mean)
typedef BA_SUMMARISE((*ba_summarise_fn));

/* Pools n >= 1 rows into `dim` or 2 * dim elements of the rows' dtype: their mean, or a pooled query or key. The product of both is a score. For a
 * mean query q, and the largest and the smallest elements of some keys, no product of q and a key is above
 *
 *     max(q, 0) . largest + min(q, 0) . smallest = q . (largest + smallest) / 2 + |q| . (largest - smallest) / 2,
 *
 * so that one product gives this bound, or the mean of the bound and of q . mean key. Means are rounded to the dtype before they are used. Largest
 * and smallest are as for summarise. */
typedef enum ba_pooled {
    BA_POOLED_MEAN,  /* mean */
    BA_POOLED_QUERY, /* mean, |mean| */
    BA_POOLED_BOUND, /* (largest + smallest) / 2, (largest - smallest) / 2 */
    BA_POOLED_BOTH,  /* mean / 2 + (largest + smallest) / 4, (largest - smallest) / 4 */
} ba_pooled;
#define BA_POOL(name) void name(const void *const *rows, int64_t n, int64_t dim, ba_pooled form, void *to)
typedef BA_POOL((*ba_pool_fn));

/* The largest magnitude of a row; NaN where the row has one. */
#define BA_MAGNITUDE(name) double name(const double *row, int64_t dim)
typedef BA_MAGNITUDE((*ba_magnitude_fn));

/* Quantises a row of finite numbers. Without cells: to[d] = the number of the dtype nearest to row[d] / scale, ties to even. Quotients beyond the
 * dtype's largest number, 127 or 448, or beyond its negative become that number. scale is a positive float. With cells, the numbers are first rounded
 * to float, and then quantised as ggml's reference does, except that the sum of q4_0 is not rounded to float; scale is not read. No number may be so
 * large that d or m overflows float16. */
#define BA_QUANTISE(name) void name(void *to, double scale, const double *row, int64_t dim)
typedef BA_QUANTISE((*ba_quantise_fn));

/* The kernels for a dtype of K and V that may differ from that of the queries: a quantised cache, or a half-precision one under float32 queries. Such
 * calls use a level's float families, whose attend reads floats, which `pack` makes. Families that take scales attend rows that `widen` has made.
 * Calls of few queries use `few`, unless the family of the queries' dtype has a kernel of its own for this dtype. */
typedef struct ba_cache_kernels {
    ba_isa isa;
    int prefetch_level;    /* BA_PREFETCH_LEVEL of traits.h */
    ba_pack_rows_fn pack;  /* NULL: K and V are read in place */
    ba_pack_rows_fn widen; /* makes rows of bfloat16, padded to a multiple of BA_PACK_PAD dims, without scales and without rounding. NULL: for float
                              dtypes and those with cells, and at levels whose vectors do not have 16 lanes */
    ba_magnitude_fn magnitude; /* NULL, like quantise, in float dtypes */
    ba_quantise_fn quantise;
    ba_attend_few_fn few;
    ba_attend_few_fn few_beside[BA_CELL_DTYPES]; /* dtypes with cells: the few kernels, by dtype of V minus BA_Q8_0; else NULL */
    ba_order_few_fn order_few;                   /* NULL: packed queries are in order */
    ba_scores_few_fn scores;
    ba_score_heads_fn score_heads; /* NULL, like summarise, for quantised dtypes */
    ba_summarise_fn summarise;
    ba_pool_fn pool; /* NULL for float16, too */
} ba_cache_kernels;

/* Probes of the machine. flops makes about `rounds` passes over independent chains of multiply-adds, and returns the number of floating-point
 * operations. tile_flops does the same with products of bfloat16 tiles, whose operands it loads from L1; NULL where there are no tiles. read returns
 * the exclusive or of the 32-bit words of `bytes` bytes, a multiple of 512. */
#define BA_PROBE_FLOPS(name) double name(const float *operands, int64_t rounds, float *sink)
typedef BA_PROBE_FLOPS((*ba_probe_flops_fn));
#define BA_PROBE_READ(name) int name(const char *data, int64_t bytes)
typedef BA_PROBE_READ((*ba_probe_read_fn));

typedef struct ba_probes {
    ba_isa isa;
    ba_probe_flops_fn flops, tile_flops;
    ba_probe_read_fn read;
} ba_probes;

/* ---- The table of a level ----------------------------------------------------------------------------------------------- */

typedef struct ba_kernels {
    const ba_attend_family *attend[BA_FLOAT_DTYPES]; /* by dtype */
    const ba_attend_family *vector[BA_FLOAT_DTYPES]; /* the highest family that has gradient[0]. It packs rows as reals, and also attends caches */
    const ba_cache_kernels *cache[BA_DTYPE_COUNT];   /* by dtype of K and V; NULL for dtypes that K and V cannot have */
    const ba_probes *probes;
} ba_kernels;

/* The table of a level. For each dtype, it has the kernels of the highest level, up to this one, that has kernels for the dtype and is supported by
 * the CPU. */
const ba_kernels *ba_kernels_at(ba_isa level);
/* The table of the level in use. Another thread may change the level at any time, so a call reads it once: by this function or by ba_isa_active(). */
const ba_kernels *ba_kernels_active(void);

/* ---- Numbers that tune speed (tuning.c has a column for each level) ----------------------------------------------------- */

/* How a few kernel prefetches the rows that it reads later. It changes no bit of a result. */
typedef struct ba_prefetch_tuning {
    int64_t followed_queries;              /* for up to so many queries per head, rows are left to the hardware's prefetcher: see followed_bytes */
    int64_t distances[BA_PREFETCH_PASSES]; /* of each pass, in rising order: the bytes of K, or of V, between a prefetch and the use, but at
                                              most the rows of `keys` keys. 0: there is no such pass */
} ba_prefetch_tuning;

/* For calls of few queries. Memory bounds them, so these numbers depend on the machine more than on the instruction set. */
typedef struct ba_few_tuning {
    int64_t part_keys;       /* the most keys of a part, where keys are split among threads: least_part_keys times a power of two */
    int64_t least_part_keys; /* the fewest keys of a part: a multiple of `keys` */
    int64_t keys;            /* keys of a chunk where several heads are attended side by side */
    int64_t bytes;           /* the most bytes of such a chunk's K and V: the chunk then stays in cache beside the rows that are prefetched */
    int64_t followed_bytes;  /* where all heads of a token lie side by side, and tokens lie at least so many bytes apart, nothing is prefetched for up
                                to followed_queries queries: the hardware's prefetcher follows such rows */
    int64_t gathered_bytes;  /* rows of up to so many bytes, of one head among others, are copied side by side first; 0: never */
    ba_prefetch_tuning into_l1, into_l2; /* for kernels that prefetch into L1, and for those that prefetch into L2; ba_prefetch_level says which kind
                                            runs. A level that has only one kind fills in only one of the two */
} ba_few_tuning;

typedef struct ba_tuning {
    int64_t chunk_keys;          /* keys of a chunk */
    int64_t list_keys;           /* the same where a list row has one panel and the family has_cuts: both numbers are then multiples of BA_CUT_KEYS */
    int64_t tile_queries;        /* queries of a query tile: a multiple of the wide panel */
    int64_t item_tiles;          /* query tiles of an item, which walk their lists side by side and find K and V in cache */
    int64_t most_item_tiles;     /* the most query tiles of an item where short list rows make them smaller: an item keeps its number of queries */
    int64_t gradient_keys;       /* keys of a chunk of the backward pass */
    int64_t gradient_queries;    /* queries of a query tile of the backward pass */
    int64_t gradient_item_tiles; /* query tiles of an item of the backward pass */
    int64_t gradient_list_tiles; /* query tiles of such an item where they would have different lists */
    int64_t by_block_lanes;      /* queries of an item that is attended block by block: their states stay in L2 */
    int64_t by_block_most_lanes; /* the most queries of such an item where otherwise fewer than by_block_least_lanes of them would attend a block */
    int64_t by_block_least_lanes;            /* queries that must attend a block for fetching it to pay */
    double inline_flops;                     /* calls of fewer floating-point operations run in the caller's thread */
    int64_t shared_bytes;                    /* the most bytes of K and V that are packed once for all items; 0: each item packs its own */
    int64_t few_least_heads[BA_DTYPE_COUNT]; /* by dtype of K and V: the level's own few.attend and few.pack_queries run calls of at least so many
                                                query heads per KV head. The kernels of the cache run all other calls. Their queries are packed by the
                                                vector family, and fit panel->q, too. 0: the kernels of the cache run all calls */
    int64_t few_queries;     /* few kernels attend the batch entries with at most so many queries (tokens times heads) per KV head. More than
                                BA_FEW_QUERIES queries take turns at each chunk */
    int64_t own_few_queries; /* the same limit for calls whose entries of more queries are attended by panels of the level's own family, which are
                                faster than other panels (choose_tuning in ops/attend/attend_setup.c) */
    int64_t page_offset;     /* packed queries begin at a page; o and packed K and V begin so many bytes after the start of a page. 0: anywhere */
    int64_t least_pairs[BA_FLOAT_DTYPES]; /* by dtype: queries that must attend a key, on average, for packing K and V to pay. Batch entries with
                                             fewer queries per key use the vector family. 0: packing always pays */
    ba_few_tuning few;                    /* for calls of few queries */
    ba_few_tuning tile_few; /* for calls of few queries on tiles, where the level has tiles. Where tile_few.keys is 0, `few` applies to them */
} ba_tuning;

/* The numbers of a level. A family is tuned by the numbers of its own level, even where a higher level uses the family. Calls of few queries
 * are tuned by the numbers of the level in use. */
const ba_tuning *ba_tuning_at(ba_isa level);

#endif
