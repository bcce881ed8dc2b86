/* blitz_attn: sparse attention on CPUs. The whole C API; the Python extension uses it and ops/open.h, whose calls are opened first and then run.
 *
 * A program fills a ba_block_sparse_args, calls ba_block_sparse_attention(), and reads `out` and `lse`:
 *
 *     ba_block_sparse_args a = BA_BLOCK_SPARSE_ARGS_INIT;
 *     a.q = ...; a.k = ...; a.v = ...; a.out = ...;          // tensors: pointer, dtype, dims, element strides
 *     if (ba_block_sparse_attention(&a) != BA_OK) puts(ba_last_error());
 *
 * Every function checks all of its arguments before any work and before any output is touched. All are safe to call
 * from several threads at once. Inputs are never written.
 */
#ifndef BLITZ_ATTN_H
#define BLITZ_ATTN_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define BA_VERSION "0.1.0"

#if defined(_WIN32)
#define BA_API
#else
#define BA_API __attribute__((visibility("default")))
#endif

/* ---- Status ------------------------------------------------------------------------------------------------ */

typedef enum ba_status {
    BA_OK = 0,
    BA_ERROR_TYPE,   /* an argument of the wrong kind: dtype, rank of the wrong nature (Python: TypeError) */
    BA_ERROR_VALUE,  /* a shape or a value out of range (Python: ValueError) */
    BA_ERROR_MEMORY, /* scratch memory could not be had (Python: MemoryError) */
    BA_ERROR_SYSTEM, /* a thread could not be made, or the platform refused something (Python: RuntimeError) */
    BA_INTERRUPTED,  /* the function of ba_set_poll stopped the call: what its outputs hold is undefined (Python: the handler's exception) */
} ba_status;

/* One sentence about the last failure in this thread: `name: expected ..., got ...`. Never NULL. */
BA_API const char *ba_last_error(void);

/* ---- Tensors ----------------------------------------------------------------------------------------------- */

typedef enum ba_dtype {
    BA_FLOAT32,
    BA_FLOAT16,
    BA_BFLOAT16,
    BA_FLOAT64,
    BA_UINT16, /* index lists only: padded with 65535; the signed types pad with any negative entry, lists of pages with -1 */
    BA_INT16,
    BA_INT32,
    BA_INT64,
    BA_INT8,        /* caches of K and V only, with scales */
    BA_FLOAT8_E4M3, /* the same: sign, 4 bits of exponent, 3 of mantissa, NaN but no infinity */
    BA_DTYPE_COUNT
} ba_dtype;

BA_API int64_t ba_dtype_size(ba_dtype dtype); /* bytes an element */
BA_API const char *ba_dtype_name(ba_dtype dtype);

enum { BA_MAX_DIMS = 4 };

/* A strided view. Strides count elements, not bytes; they may be 0 or negative on every axis but the last, which must
 * be contiguous in q, k, v and out. `data == NULL && ndim == 0` means "not given". */
typedef struct ba_tensor {
    void *data;
    ba_dtype dtype;
    int ndim;
    int64_t dims[BA_MAX_DIMS];
    int64_t strides[BA_MAX_DIMS];
} ba_tensor;

typedef enum ba_layout {
    BA_BNSD, /* (B, H, S, D) */
    BA_BSND, /* (B, S, H, D) */
    BA_BSH,  /* (B, S, H*D) */
    BA_TND,  /* (T, H, D): sequences one after the other, cut by cumulative lengths */
} ba_layout;

BA_API const char *ba_layout_name(ba_layout layout);

/* ---- Block-sparse attention (forward) ---------------------------------------------------------------------- */

/* out = softmax(scale * q k^T restricted to the listed blocks and the token rules) v, and its log-sum-exp.
 *
 * Query head h reads key/value head h / (H / H_kv). A query sees key j of its own sequence when j lies in a listed
 * block, j < kv_len, j <= i + kv_len - q_len where `causal`, and window[0] / window[1] bound how far j lies before /
 * after that diagonal. A query that sees nothing gets output 0 and lse -inf. */
typedef struct ba_block_sparse_args {
    ba_tensor q, k, v; /* float32, float16, bfloat16 or float64, all the same */
    ba_tensor out;     /* the shape of q with v's last dim; dtype of q */
    ba_tensor lse;     /* not given, or float32 (float64 for float64): (B, H, Sq), for BA_TND (T, H); natural log */
    ba_layout layout;
    int64_t num_heads, num_kv_heads; /* BA_BSH only: heads in q, and in k and v (0: the same as num_heads) */
    ba_tensor blocks;                /* not given: every block. Else (B or 1, H or 1, ceil(Sq / block_q), W): columns of kept
                                      * key blocks, in any order, no column twice, the row ends at the first pad */
    const int64_t *cu_rows;          /* BA_TND only: NULL, or batch + 1 cumulative numbers of block rows; blocks is then (H or 1, rows, W), the
                                      * rows of the sequences one after the other */
    int64_t block_q, block_kv;
    int routed;   /* the lists route single queries, or tiles of them (NSA): H_kv is taken as their head axis too, and rows of few
                   * queries go by the kernel for few, whose sums have another order: all blocks listed then equals no list only
                   * up to rounding */
    double scale; /* finite; ba_default_scale(D) is the usual one */
    int causal;
    int64_t window[2];               /* tokens before, tokens after; -1: no bound */
    int64_t q_begin;                 /* token number of query 0, where the queries are a stretch of a sequence; -1: they are its last */
    int64_t key_stride, key_last;    /* 0, 0: a key is a token. Else key j stands for tokens from j * key_stride on, and is seen (causal) from token
                                      * j * key_stride + key_last on, whose numbers q_begin gives; no window then */
    const int64_t *q_lens, *kv_lens; /* NULL, or B valid lengths */
    const int64_t *cu_q, *cu_kv;     /* BA_TND only: batch + 1 cumulative lengths, from 0 to T */
    int64_t batch;                   /* BA_TND only: number of sequences */
    int num_threads;                 /* 0: as set (ba_set_num_threads) */
} ba_block_sparse_args;

#define BA_BLOCK_SPARSE_ARGS_INIT {.block_q = 128, .block_kv = 128, .window = {-1, -1}, .q_begin = -1}

BA_API double ba_default_scale(int64_t head_dim);

/* Checks all inputs (not out and lse) and tells the shapes that the outputs must have. */
BA_API ba_status ba_block_sparse_check(const ba_block_sparse_args *args, ba_tensor *out_shape, ba_tensor *lse_shape);

BA_API ba_status ba_block_sparse_attention(const ba_block_sparse_args *args);

/* ---- Block-sparse attention (backward) --------------------------------------------------------------------- */

/* Gradients of a loss with respect to q, k and v, from those with respect to out and lse. P is recomputed from lse:
 *
 *     dS = P (dout v^T - dout . out + dlse)    dq = scale dS k    dk = scale dS^T q    dv = P^T dout
 *
 * dk and dv are sums over the query heads of a KV head. A query that sees nothing, or whose lse is -inf, gives 0. What a
 * query does not see adds exactly nothing. All gradients are the same bits for any number of threads. */
typedef struct ba_block_sparse_backward_args {
    ba_block_sparse_args forward; /* as they were in the forward call; out and lse, both required, are what it wrote, and are read here */
    ba_tensor dout;               /* the shape and dtype of out */
    ba_tensor dlse;               /* not given: 0. Else the shape and dtype of lse */
    ba_tensor dq, dk, dv;         /* written: the shapes and dtypes of q, k and v */
} ba_block_sparse_backward_args;

#define BA_BLOCK_SPARSE_BACKWARD_ARGS_INIT {.forward = BA_BLOCK_SPARSE_ARGS_INIT}

/* Checks all inputs (not dq, dk and dv) and tells the shapes that the outputs must have. */
BA_API ba_status ba_block_sparse_backward_check(const ba_block_sparse_backward_args *args, ba_tensor *dq_shape, ba_tensor *dk_shape,
                                                ba_tensor *dv_shape);

BA_API ba_status ba_block_sparse_attention_backward(const ba_block_sparse_backward_args *args);

/* ---- Paged attention: decode and chunked prefill over a paged cache ------------------------------------------ */

typedef enum ba_kv_layout {
    BA_NHD, /* caches (pages, page_size, H_kv, D), scales (pages, page_size, H_kv) */
    BA_HND, /* caches (pages, H_kv, page_size, D), scales (pages, H_kv, page_size) */
} ba_kv_layout;

/* Attention of each request's newest queries over its own pages: token t of request b lies in page
 * block_tables[b][t / page_size], at t % page_size there. The queries are the last of the request's seq_lens[b] tokens
 * (right-aligned causal), so that query i of q_len sees token j when j <= i + seq_len - q_len. */
typedef struct ba_paged_args {
    ba_tensor q;                /* (B, H, D): a query a request; with cu_q (T, H, D). float32, float16, bfloat16 or float64 */
    ba_tensor k_cache, v_cache; /* dtype of q, or any other of float32, float16, bfloat16, int8, float8_e4m3 (float64 only with float64) */
    ba_tensor k_scale, v_scale; /* float32, what a token's K or V is to be multiplied with; required with int8 and float8_e4m3, else not given */
    ba_kv_layout kv_layout;
    ba_tensor block_tables;  /* int32 or int64, (B, W); with indptr (N,) */
    const int64_t *indptr;   /* NULL, or batch + 1: request b's pages are block_tables[indptr[b] .. indptr[b + 1]] */
    const int64_t *seq_lens; /* [batch]: tokens in the cache, the new queries' among them */
    const int64_t *cu_q;     /* NULL, or batch + 1 cumulative numbers of queries */
    int64_t batch;
    ba_tensor selected;             /* not given: all pages. Else (B, H_kv or H, K) int: logical pages of each request that are attended */
    const int64_t *selected_counts; /* NULL: rows of `selected` end at a -1. Else entries in use, by (request, head axis) */
    double scale;
    int64_t window;     /* tokens before a query that it sees, itself not counted; -1: all */
    double softcap;     /* 0: none. Else scores become softcap * tanh(score / softcap) */
    const float *sinks; /* NULL, or H: a score a head that takes part in the softmax without a value, and counts in lse */
    ba_tensor out;      /* the shape of q with v's last dim; dtype of q */
    ba_tensor lse;      /* not given, or (B, H), with cu_q (T, H); float32 (float64 for float64); natural log */
    int num_threads;
} ba_paged_args;

#define BA_PAGED_ARGS_INIT {.window = -1}

BA_API ba_status ba_paged_check(const ba_paged_args *args, ba_tensor *out_shape, ba_tensor *lse_shape);
BA_API ba_status ba_paged_attention(const ba_paged_args *args);

/* ---- Selecting blocks of a paged cache ---------------------------------------------------------------------- */

/* Summaries of pages, in pages of their own: row r of request b's summary page j, metadata_tables[b][j], describes the
 * request's page j * rows + r, where rows is summaries.dims[1]. */
typedef struct ba_quest_metadata_args {
    ba_tensor k_cache; /* (pages, page_size, H_kv, D), for BA_HND (pages, H_kv, page_size, D) */
    ba_kv_layout kv_layout;
    ba_tensor block_tables;     /* (B, W) int32 or int64 */
    const int64_t *begin, *end; /* [batch]: pages with tokens in [begin, end) are summarised; begin NULL: from 0 on */
    int64_t batch;
    ba_tensor metadata_tables;      /* (B, M) int32 or int64 */
    ba_tensor maxblocks, minblocks; /* written: (summary pages, rows, H_kv, D), dtype of k_cache: largest and smallest of each channel over
                                     * the page's tokens before `end`. NULL data: not wanted */
    ba_tensor meanblocks;           /* the same: the mean of each channel */
    int num_threads;
} ba_quest_metadata_args;

BA_API ba_status ba_quest_metadata(const ba_quest_metadata_args *args);

typedef enum ba_select_method {
    BA_SELECT_QUEST, /* sum over channels of max(q max, q min): an upper bound of q.k; a = maxblocks, b = minblocks */
    BA_SELECT_MEAN,  /* q . mean; a = meanblocks */
    BA_SELECT_MAX,   /* the largest q.k of the page's tokens, NaN where one is; a = k_cache */
} ba_select_method;

/* The k best pages of each (request, KV head or query head), the first sink pages and the newest ones always among them.
 * Ties go to the lower page; only pages of the request compete. */
typedef struct ba_select_args {
    ba_select_method method;
    ba_tensor q;             /* (B, H, D) */
    ba_tensor a, b;          /* by method; BA_SELECT_MAX: (pages, page_size, H_kv, D) or BA_HND, else (summary pages, rows, H_kv, D) */
    ba_kv_layout kv_layout;  /* of a for BA_SELECT_MAX */
    ba_tensor tables;        /* (B, M): metadata_tables; block_tables for BA_SELECT_MAX */
    const int64_t *seq_lens; /* [batch] */
    int64_t batch, page_size;
    int per_query_head;    /* 0: the mean of a group's queries is scored, a row a KV head */
    int64_t sink;          /* first pages that are always selected */
    const int64_t *recent; /* NULL: none. [batch]: newest pages that are always selected, before sinks where both do not fit */
    const int64_t *budget; /* NULL: the width of selected. [batch]: pages selected at most */
    int ascending;         /* 0: sinks, then by falling score, then the newest ones, the very newest in the last place used */
    ba_tensor selected;    /* written: (B, H_kv or H, K) int32; unused places -1 */
    ba_tensor counts;      /* not given, or written: (B, H_kv or H) int32 */
    int num_threads;
} ba_select_args;

BA_API ba_status ba_select_blocks(const ba_select_args *args);

/* ---- Native sparse attention: what stands around its three attention branches -------------------------------- */

/* The branches themselves are block-sparse attention: the compressed one with key_stride, the selected one with routed lists, the
 * window. Arrays are (B, N, H, D), or packed (T, H, D) with cumulative lengths; "real" is float32, for float64 float64. */

enum { BA_MOST_SUMMANDS = 4 };

/* Means of blocks of tokens: block i of a sequence is its tokens from i * stride on; only complete blocks count. */
typedef struct ba_block_means_args {
    ba_tensor x;
    ba_tensor weight;              /* not given, or (H, D, E) real: a mean, as a row, times its head's matrix; rounded once, afterwards */
    ba_tensor out;                 /* written: (B, blocks, H, D or E), packed (blocks, H, D or E); dtype of x, or real */
    const int64_t *cu, *cu_blocks; /* NULL, or batch + 1 cumulative numbers of the sequences' tokens and blocks */
    int64_t batch;                 /* number of sequences, with cu */
    int64_t block_size, stride;
    int num_threads;
} ba_block_means_args;

BA_API ba_status ba_block_means(const ba_block_means_args *args);

/* Its gradient, dx = what dout gives to each token, plus the arrays of `more`. */
typedef struct ba_block_means_backward_args {
    ba_tensor dout;                   /* like ba_block_means' out, dtype of dx; not given: 0 */
    ba_tensor dx;                     /* written */
    ba_tensor more[BA_MOST_SUMMANDS]; /* arrays like dx; the first that is not given ends them */
    const int64_t *cu, *cu_blocks;
    int64_t batch;
    int64_t block_size, stride;
    int num_threads;
} ba_block_means_backward_args;

BA_API ba_status ba_block_means_backward(const ba_block_means_backward_args *args);

/* gates = sigmoid(q . weight), three a query head, and out = sum of gates[c] * branch[c]. */
typedef struct ba_gate_args {
    ba_tensor q, weight; /* (.., H, D) and (H, 3, D) real; not given: the gates are read, or a third each where they are not given either */
    ba_tensor gates;     /* (.., H, 3) real: read without weight; written with it, where given */
    ba_tensor branch[3]; /* (.., H, D_v) all of one dtype; not given: only the gates are wanted */
    ba_tensor out;       /* written: like a branch */
    int num_threads;
} ba_gate_args;

BA_API ba_status ba_gate(const ba_gate_args *args);

/* Gradients of ba_gate from dout, its inputs and its gates. */
typedef struct ba_gate_backward_args {
    ba_tensor q, weight; /* not given: no dq, no dweight */
    ba_tensor gates;     /* not given: a third each */
    ba_tensor branch[3]; /* needed for all but dbranch */
    ba_tensor dout;
    ba_tensor dbranch[3];  /* written: gates[c] * dout */
    ba_tensor dgates;      /* not given, or written: (.., H, 3) real, dout . branch[c] */
    ba_tensor dq, dweight; /* written, with weight: like q; (H, 3, D) real */
    int num_threads;
} ba_gate_backward_args;

BA_API ba_status ba_gate_backward(const ba_gate_backward_args *args);

/* Which blocks each query, or tile of queries, attends in the selected branch. Ties go to the lower block; rows are written in
 * rising order and end with -1.
 *
 * tile 0: a row a query and KV head. A block's score is the sum of the compressed keys' probabilities, each as often as its
 * stretches of compress_stride tokens and the block's meet, over the heads of the group; the first init_blocks and the last
 * local_blocks up to the query's own are always selected; causal: no block after the query's own.
 * Else: a row a tile of queries and query head. A block's score is its compressed key's product with the mean query; causal:
 * blocks that begin before the tile's end. compress_stride and select_block are compress_block then. */
typedef struct ba_nsa_select_args {
    ba_tensor q, k_cmp; /* (B, N, H, D) and (B, blocks, H_kv, D), or packed; one dtype */
    ba_tensor lse;      /* tile 0 only: (B, N, H) or (T, H) real: natural log-sum-exp of each query over the k_cmp that it sees */
    const int64_t *cu_q, *cu_cmp;
    int64_t batch;   /* number of sequences, with cu_q */
    int64_t q_begin; /* token number of query 0; 0 with cu_q */
    int64_t tokens;  /* of each whole sequence; with cu_q not looked at */
    double scale;
    int causal;
    int64_t compress_block, compress_stride, select_block, tile, init_blocks, local_blocks;
    ba_tensor selected;     /* written int32: (B, H_kv, N, n) or (B, H, tiles, n); packed (heads, all rows, n) */
    ba_tensor selected_cmp; /* with a tile: not given, or written likewise: the best stretches of cmp_group compressed keys, by their mean score */
    int64_t cmp_group;
    int num_threads;
} ba_nsa_select_args;

BA_API ba_status ba_nsa_select(const ba_nsa_select_args *args);

/* ---- Merging partial attention ----------------------------------------------------------------------------- */

/* The exact attention over the union of disjoint key sets, from each part's (B, H, S, D_v) output and (B, H, S) lse.
 * A part with lse -inf is empty and its output is not looked at. outs: one dtype; lses: float32 (float64 for float64). */
BA_API ba_status ba_merge_states(int64_t parts, const ba_tensor *outs, const ba_tensor *lses, const ba_tensor *out, const ba_tensor *lse);

/* ---- Threads and instruction sets -------------------------------------------------------------------------- */

/* Threads for calls that do not name a number: what was set, else BLITZ_ATTN_NUM_THREADS, else OMP_NUM_THREADS, else
 * what affinity and the cgroup quota leave. Setting 0 goes back to the environment. */
BA_API int ba_get_num_threads(void);
BA_API ba_status ba_set_num_threads(int num_threads);
BA_API const char *ba_num_threads_source(void); /* which of those rules decided, as a short text */

/* A way to stop calls that take long. While a call of this thread runs, `poll` is called by this thread, with no lock held, some ten times a second;
 * when it returns other than 0, the call's threads stop soon and the call returns BA_INTERRUPTED. NULL, as in every new thread: calls run to their
 * end. */
typedef int (*ba_poll_fn)(void *context);
BA_API void ba_set_poll(ba_poll_fn poll, void *context);

/* Levels in rising order, of the architecture that this is compiled for; a CPU (and a cap) allows a level and all below it. */
#ifdef __aarch64__
typedef enum ba_isa { BA_ISA_PORTABLE, BA_ISA_NEON, BA_ISA_NEON_BF16, BA_ISA_COUNT } ba_isa;
#else
typedef enum ba_isa { BA_ISA_PORTABLE, BA_ISA_AVX2, BA_ISA_AVX512, BA_ISA_AVX512_BF16, BA_ISA_AMX, BA_ISA_COUNT } ba_isa;
#endif

BA_API const char *ba_isa_name(ba_isa level);
BA_API int ba_isa_parse(const char *name);     /* -1: no such level */
BA_API ba_isa ba_isa_detected(void);           /* the highest level that this CPU, this system and this build have */
BA_API ba_isa ba_isa_active(void);             /* the highest level in use: detected, or the cap where that is lower */
BA_API ba_status ba_isa_set_cap(ba_isa level); /* also BLITZ_ATTN_ISA at load time; a cap above the CPU changes nothing */
BA_API const char *ba_isa_note(void);          /* why the active level is what it is, as one sentence */
BA_API const char *ba_cpu_model(void);

/* The kernels in use at a level: writes `name` and `isa` of entry i, returns 0 past the end. */
BA_API int ba_kernel_info(ba_isa level, int64_t index, const char **name, ba_isa *implemented_at);

/* ---- Probes: the machine's limits, through the same kernels' instructions ----------------------------------- */

/* fp32 multiply-adds of a level's widest vectors, all threads together, in FLOP/s. 0 where the level is not available. */
BA_API double ba_probe_flops(ba_isa level, double seconds, int num_threads);
/* The same of bfloat16 tile products. 0 where the level has no tiles. */
BA_API double ba_probe_tile_flops(ba_isa level, double seconds, int num_threads);
/* Reads over and over, in bytes/s, all threads together: the `bytes` of `data`, shared out among the threads, or, where it is NULL,
 * `bytes` a thread of memory of its own. 0 where data has fewer than 512 bytes a thread. Where `seconds` is 0, it is read once: what was not in a
 * cache before is measured from memory. */
BA_API double ba_probe_read(ba_isa level, const void *data, int64_t bytes, double seconds, int num_threads);

#ifdef __cplusplus
}
#endif
#endif
