/* blitz_attn: sparse attention on CPUs. The whole C API. (The Python extension also uses functions of csrc/ops, which check a call or its page tables
 * first and run the call later.)
 *
 * A program begins with ba_block_sparse_args_init(), sets what its call needs, calls ba_block_sparse_attention(), and reads `out` and `lse`:
 *
 *     ba_block_sparse_args a = ba_block_sparse_args_init();
 *     a.q = ...; a.k = ...; a.v = ...; a.out = ...;          // tensors: pointer, dtype, dims, element strides
 *     if (ba_block_sparse_attention(&a) != BA_OK) puts(ba_last_error());
 *
 * examples/c/attention.c is a whole program, with the commands that compile it. `make lib` builds the libraries that it is linked with.
 *
 * A struct that has a function ba_..._args_init() must not begin as zeros: a window of {0, 0} shows each query one key at most, and a scale of 0
 * makes all scores equal. All other structs begin as zeros.
 *
 * Before a function does any work or writes any output, it checks every dtype, shape, stride and number, and every entry of lists, tables and lengths
 * that the call needs. It also checks that no pointer to a struct is NULL where NULL has no meaning, and that no two elements of one output share
 * memory. Entries that no query reads, such as the list row of a request without queries, need not be valid, though some of them are checked, too.
 *
 * The caller promises four things that a function cannot check. Every pointer is valid for all elements that the dims, strides and counts describe.
 * An array of numbers is as long as its comment says. Nothing changes or frees the arrays before the function returns. No output shares memory with
 * another array of the call. (ba_append_kv() checks a part of this last promise.) Where a promise is broken, the results are undefined.
 *
 * Every function may be called from several threads at once. The calling thread needs 128 KiB of stack, at the level amx 256 KiB, and more where its
 * poll function (see ba_set_poll) needs more. For each thread that calls it, the library keeps up to 32 MiB of scratch memory, which is freed when
 * the thread ends. Inputs are never written. The caller owns all arrays and lists; the library keeps no pointer to them.
 */
#ifndef BLITZ_ATTN_H
#define BLITZ_ATTN_H

#include "blitz_attn_types.h"

#ifdef __cplusplus
extern "C" {
#endif

#define BA_VERSION "0.1.0"

/* ---- Status ------------------------------------------------------------------------------------------------ */

/* One sentence about the last failure in this thread: `name: expected ..., got ...`. Never NULL. The text belongs to the library and is
 * valid until the next failure in this thread. It calls arguments by their names in Python. Some of these differ from the names of the members: sabi
 * is `blocks` here, block_shape is block_q and block_kv, cu_seqlens_q is cu_q, and num_selected_blocks is the last dim of `selected`, for
 * instance. */
BA_API const char *ba_last_error(void);

/* ---- Tensors ----------------------------------------------------------------------------------------------- */

/* The functions that return a name return "unknown" for a number that is not in their enum. */
BA_API int64_t ba_dtype_size(ba_dtype dtype); /* bytes per element; 0 for a number that is not a dtype */
BA_API const char *ba_dtype_name(ba_dtype dtype);

/* The tensor of an array of up to BA_MAX_DIMS axes that lies in memory row by row: ba_contiguous(q, BA_FLOAT32, 4, (int64_t[]){B, H, S, D}). With any
 * other ndim, the result is a tensor that every function refuses. */
BA_API ba_tensor ba_contiguous(const void *data, ba_dtype dtype, int ndim, const int64_t *dims);

typedef enum ba_layout {
    BA_BNSD, /* (B, H, S, D) */
    BA_BSND, /* (B, S, H, D) */
    BA_BSH,  /* (B, S, H*D) */
    BA_TND,  /* (T, H, D): the sequences lie one after the other, and cumulative lengths say where each begins */
} ba_layout;

BA_API const char *ba_layout_name(ba_layout layout);

/* ---- Block-sparse attention (forward) ---------------------------------------------------------------------- */

/* out = softmax(scale * q k^T restricted to the listed blocks and the token rules) v, and its log-sum-exp.
 *
 * Query head h reads key/value head h / (H / H_kv). Query i of a sequence sees key j of the same sequence when all of these hold:
 * j lies in a block that is listed for the query; j < kv_len; with `causal`, j <= d, where d = i + kv_len - q_len is the position of the
 * diagonal in row i (or d = i + q_begin[b], where that is given); d - window[0] <= j <= d + window[1], where -1 in `window` sets no bound;
 * kv_ranges[b][i][0] <= j < kv_ranges[b][i][1], where kv_ranges is given; attn_mask, where it is given, does not hide j. A query that sees no key
 * gets output 0 and, unless its head has a sink, lse -inf. */
typedef struct ba_block_sparse_args {
    ba_tensor q, k, v; /* float32, float16, bfloat16 or float64; all three have the same dtype */
    ba_tensor out;     /* written: the shape of q with v's last dim; the dtype of q, or as `unrounded` says */
    ba_tensor lse;     /* not given, or written: the natural log-sum-exp, (B, H, Sq), for BA_TND (T, H); float32, or float64 where q is float64 */
    ba_layout layout;
    int64_t num_heads, num_kv_heads; /* BA_BSH only: heads in q, and in k and v (0: as many as in q) */
    ba_tensor blocks;             /* not given: every block is attended. Else the lists, (B or 1, heads, ceil(Sq / block_q), W), where `heads` is H,
                                   * H_kv or 1; the first axis, or the first two, may be missing and are 1 then. There is one row per block of
                                   * queries: the columns of its key blocks, in any order and without repetition. A row ends at its first pad: 65535
                                   * in uint16, any negative number in the signed types */
    const int64_t *cu_rows;       /* BA_TND only: NULL, or batch + 1 cumulative numbers of block rows. `blocks` is then (heads, rows, W) and
                                   * holds the rows of the sequences one after the other */
    int64_t block_q, block_kv;    /* tokens per block of queries, and per block of keys */
    int routed;                   /* the lists route single queries, or small tiles of queries, as in native sparse attention. Rows of few queries are
                                   * then attended by kernels that sum in another order, so lists of all blocks give the results of a call without
                                   * lists only up to rounding */
    double scale;                 /* multiplies q k^T; finite, or NAN for 1 / sqrt(D) */
    double softcap;               /* 0: none. Else scores become softcap * tanh(score / softcap) */
    const float *sinks;           /* NULL, or [H]: one score per head that takes part in the softmax without a value, and counts in lse. So gradients,
                                   * which are computed from lse, need no sinks. Unless q is float64, a sink beyond about +-2.3e38 counts as infinite.
                                   * NULL where the lists are routed */
    int causal;                   /* 0 or 1 */
    int64_t window[2];            /* tokens that a query sees before and after the diagonal; -1: no bound */
    const int64_t *q_begin;       /* NULL: the queries are the last tokens of their sequences. Else the token number of each sequence's query 0,
                                   * which may be negative: the queries are then a slice of a longer sequence */
    const int64_t *q_total;       /* NULL, unless this call has only a slice of the queries of a larger call. Then: how many valid queries each
                                   * sequence has in the larger call, at least as many as in this one. Kernels are chosen as for the larger call, so
                                   * that a slice of complete block rows gets the same bits in both calls */
    int64_t key_stride, key_last; /* 0, 0: a key is a token. Else key j summarises tokens from j * key_stride on, and with `causal`, the queries from
                                   * token j * key_stride + key_last on see key j. q_begin must then be given, and `window` must set no bound */
    ba_tensor kv_ranges; /* not given, or int32 or int64, (B or 1, Sq, 2) or (Sq, 2), for BA_TND (T, 2): the first key that each query may see, and
                          * the key after the last, counted within the query's sequence. Any number is valid: numbers beyond the keys are clipped */
    ba_tensor attn_mask; /* not given, or (B or 1, H or 1, Sq or 1, Skv or 1), of which the first axes may be missing; for BA_TND, Sq and Skv are the
                          * lengths of the longest sequences. Numbers of float32, float16, bfloat16 or float64 are added to the scores after the
                          * softcap. A false of BA_BOOL hides the key from the query, and so does a number of -inf and, unless q is float64, any
                          * number below about -2.3e38. Any strides. Not given where the lists are routed, or key_stride is given */
    const float *alibi_slopes;       /* NULL, or [H]: -slope * |d - j| is added to the scores. NULL where attn_mask must not be given */
    int unrounded;                   /* 1: out is float32 where q is float16 or bfloat16. Rounded to the dtype of q, it has the bits that 0 gives */
    const int64_t *q_lens, *kv_lens; /* NULL, or B valid lengths */
    const int64_t *cu_q, *cu_kv;     /* BA_TND only: batch + 1 cumulative lengths, from 0 to T */
    int64_t batch;                   /* BA_TND only: number of sequences */
    int num_threads;                 /* threads that the call may use; 0: as many as ba_get_num_threads() returns */
} ba_block_sparse_args;

/* Arguments with blocks of 128 tokens, a window without bounds, and a scale of NAN; the rest is 0. */
BA_API ba_block_sparse_args ba_block_sparse_args_init(void);

BA_API double ba_default_scale(int64_t head_dim); /* 1 / sqrt(head_dim) */

/* Checks all inputs except the entries of lists of blocks, and does not check out and lse. Writes the dtypes and shapes that the outputs must have
 * (data NULL, strides unspecified). */
BA_API ba_status ba_block_sparse_check(const ba_block_sparse_args *args, ba_tensor *out_shape, ba_tensor *lse_shape);

BA_API ba_status ba_block_sparse_attention(const ba_block_sparse_args *args);

/* ---- Block-sparse attention (backward) --------------------------------------------------------------------- */

/* Gradients of a loss with respect to q, k and v, from its gradients with respect to out and lse. P is recomputed from lse:
 *
 *     dS = P (dout v^T - dout . out + dlse)    dq = scale dS k    dk = scale dS^T q    dv = P^T dout
 *
 * With a softcap, the dS in dq and dk is multiplied by the softcap's derivative. The gradient of attn_mask is a sum of dS, and the gradient of
 * alibi_slopes is a sum of -|d - j| dS. dk and dv are sums over the query heads of a KV head. A query that sees no key, or whose lse is -inf,
 * contributes 0. A query and a key that it does not see add exactly nothing to each other's gradients, whatever values they hold. The bits of all
 * gradients are the same for any number of threads. */
typedef struct ba_block_sparse_backward_args {
    ba_block_sparse_args forward; /* the arguments of the forward call. out and lse are required: the forward call wrote them, and they are read here.
                                   * `unrounded` must be 0 */
    ba_tensor dout;               /* the shape and dtype of out */
    ba_tensor dlse;               /* not given: the loss does not depend on lse. Else the shape and dtype of lse */
    ba_tensor dq, dk, dv;         /* written: the shapes and dtypes of q, k and v */
    int accumulate;               /* 1: the gradients of k and v are added to the contents of dk and dv, which are then float32, or float64 where q is
                                   * float64. Only their rows of listed blocks are read and written */
    ba_tensor dattn_mask;         /* not given: not wanted. Else written: the shape and dtype of forward.attn_mask, which may not be BA_BOOL, with a
                                   * contiguous last axis. An element that several heads or queries share gets the sum of their gradients */
    float *dalibi_slopes;         /* NULL: not wanted. Else written, [H] */
} ba_block_sparse_backward_args;

BA_API ba_block_sparse_backward_args ba_block_sparse_backward_args_init(void); /* `forward` as from ba_block_sparse_args_init(); the rest is 0 */

/* Checks all inputs except the entries of lists of blocks, and does not check the gradients. Writes the dtypes and shapes that dq, dk and dv must
 * have (data NULL, strides unspecified). */
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
    ba_tensor q;                /* (B, H, D), one query per request; with cu_q (T, H, D). float32, float16, bfloat16 or float64 */
    ba_tensor k_cache, v_cache; /* both float64 where q is float64. Else both of one dtype, float32, float16, bfloat16, int8 or float8_e4m3; or each
                                 * of q8_0, q4_0 or q4_1, whose last axis counts bytes (see BA_Q8_0) */
    ba_tensor k_scale, v_scale; /* float32, the factors of K and of V: one per token and head, in the cache's axes without the last; one per head,
                                 * (H_kv,); or a single one, (). Required with int8 and float8_e4m3, else not given */
    ba_kv_layout kv_layout;
    ba_tensor block_tables;    /* int32 or int64, (B, W): the pages of each request in the order of its tokens; with indptr, (N,) */
    const int64_t *indptr;     /* NULL, or batch + 1: request b's pages are block_tables[indptr[b] .. indptr[b + 1] - 1] */
    const int64_t *seq_lens;   /* [batch]: tokens of each request in the cache, including the tokens of its queries */
    const int64_t *cu_q;       /* NULL: one query per request. Else batch + 1 cumulative numbers of queries */
    const int64_t *q_begin;    /* NULL, or the token number of each request's query 0, which may be negative, where the cache holds a stretch of
                                * a longer request: query i then sees token j when j <= i + q_begin. There may be more queries than tokens */
    ba_tensor kv_ranges;       /* not given, or int32 or int64, (B, 2), with cu_q (T, 2): query i then sees tokens kv_ranges[i][0] to kv_ranges[i][1]
                                * - 1 of its request, instead of the tokens up to its own. Any number is valid, as in ba_block_sparse_args */
    ba_tensor attn_mask;       /* not given, or as in ba_block_sparse_args, (B or 1, H or 1, Q or 1, T or 1), where Q and T are at least the largest
                                * numbers of queries and of tokens of a request */
    const float *alibi_slopes; /* NULL, or [H], as in ba_block_sparse_args */
    int64_t batch;             /* number of requests */
    int64_t kv_split;          /* 0: requests are cut as suits the machine. Else each request is attended in KV splits of this many tokens, a multiple
                                * of the page size. Their states are merged by a fixed tree, so that the bits are the same whoever attends which KV
                                * split */
    ba_tensor selected;        /* not given: all pages are attended. Else (B, H_kv or H, K) int16, int32 or int64: the pages to attend, counted from 0
                                * within the request (whereas block_tables has numbers of the cache's pages) */
    const int64_t *selected_counts; /* NULL: a row of `selected` ends at its first -1. Else [B][H_kv or H]: how many entries of each row are in use */
    int64_t selected_size;          /* 0: `selected` lists pages. Else tokens per block: `selected` is (B, H_kv or H or 1, K), with cu_q (T, H_kv or H
                                     * or 1, K). Each query has rows of its own, which list blocks of this many tokens of its request. selected_counts
                                     * is then NULL */
    double scale;                   /* as in ba_block_sparse_args */
    int64_t window;                 /* tokens that a query sees before itself; -1: no bound */
    double softcap;                 /* 0: none. Else scores become softcap * tanh(score / softcap) */
    const float *sinks;             /* NULL, or [H], as in ba_block_sparse_args */
    int unrounded;                  /* as in ba_block_sparse_args */
    ba_tensor out;                  /* written: the shape of q with v's last dim; the dtype of q, or as `unrounded` says */
    ba_tensor lse;   /* not given, or written: the natural log-sum-exp, (B, H), with cu_q (T, H); float32, or float64 where q is float64 */
    int num_threads; /* 0: as many as ba_get_num_threads() returns */
} ba_paged_args;

BA_API ba_paged_args ba_paged_args_init(void); /* a window of -1 and a scale of NAN; the rest is 0 */

/* Checks all inputs except the page numbers in `selected`, and does not check out and lse. Writes the dtypes and shapes that the outputs must have
 * (data NULL, strides unspecified). */
BA_API ba_status ba_paged_check(const ba_paged_args *args, ba_tensor *out_shape, ba_tensor *lse_shape);

BA_API ba_status ba_paged_attention(const ba_paged_args *args);

/* Quantises rows for an 8-bit cache. x is (N, D), of float32, float16, bfloat16 or float64; D is at most 2^24. `scale`, (N) of float32, becomes the
 * largest magnitude of each row, divided by the largest number of the dtype of `values` (127 or 448), but 1 where this quotient or D is 0. `values`,
 * (N, D) of int8 or float8_e4m3, become the numbers of their dtype nearest to x / scale, ties to even. Fails, and writes nothing, where a number of x
 * is NaN or infinite, or too large for a float32 scale. num_threads 0: as many as ba_get_num_threads() returns.
 *
 * `values` may also be q8_0, q4_0 or q4_1, (N, D / 32 times 34, 18 or 20). Then `scale` is not given, and D is a multiple of 32. From x rounded to
 * float32, ggml's reference (quantize_row_q8_0_ref and so on) makes the same bytes, except that it rounds x / d + 8.5 of q4_0 to float32 before
 * it rounds down, so that an integer is larger by 1 where the rounded sum is the next whole number. ba_quantize_kv() then fails where a magnitude is
 * above 65504 times 127 (q8_0), 8 (q4_0) or 1 (q4_1). */
BA_API ba_status ba_quantize_kv(const ba_tensor *x, const ba_tensor *values, const ba_tensor *scale, int num_threads);

/* Writes new tokens, k (T, H_kv, D) and v (T, H_kv, D_v) in float32, float16, bfloat16 or float64, into the caches of `args`, in their dtype. Token t
 * goes to slot slots[t], which is page * page_size + row of the page; -1 leaves the token out. With slots NULL, the new tokens are the last of their
 * requests: cu_q says how many each request gets (NULL: one), and block_tables, indptr, seq_lens and batch say where they go, as for
 * ba_paged_attention(). In 8-bit caches, scales per token and head are written, as ba_quantize_kv() computes them. Scales of fewer axes are read, and
 * quotients beyond the largest number of the dtype become that number. Where v is NULL, and v_cache and v_scale are not given, K alone is written.
 * Fails, and writes nothing, where two tokens have the same slot, where two arrays that are written share memory, and where a number for an 8-bit
 * cache is not finite, or is too large for a scale that is written. Rows of q8_0, q4_0 and q4_1 are as ba_quantize_kv() makes them. Of the other
 * members of `args`, kv_layout and num_threads are read. k_cache and v_cache may be views of one array. */
BA_API ba_status ba_append_kv(const ba_tensor *k, const ba_tensor *v, const int64_t *slots, const ba_paged_args *args);

/* ---- Selecting blocks of a paged cache ---------------------------------------------------------------------- */

/* Summarises pages. The summaries lie in pages of their own: row r of summary page metadata_tables[b][j] describes page j * rows + r of request b,
 * where `rows` is the number of rows per summary page. In the last of a request's summary pages, rows beyond the request's last page become 0. No
 * summary page may be listed twice; this is not checked. */
typedef struct ba_quest_metadata_args {
    ba_tensor k_cache; /* (pages, page_size, H_kv, D), for BA_HND (pages, H_kv, page_size, D); any dtype of ba_paged_args */
    ba_tensor k_scale; /* as in ba_paged_args. int8 and float8_e4m3 keys are multiplied by their scales, in float32, before they are summarised */
    ba_kv_layout kv_layout;
    ba_tensor block_tables;     /* (B, W) int32 or int64 */
    const int64_t *begin, *end; /* [batch]: a page with tokens in [begin, end) is summarised, over its tokens before `end`; begin NULL: 0 */
    int64_t batch;
    ba_tensor metadata_tables;      /* (B, M) int32 or int64 */
    ba_tensor maxblocks, minblocks; /* not given, or written: the largest and the smallest value of each channel;
                                     * (summary pages, rows, H_kv, D), dtype of k_cache, or float32 where k_cache has 8 bits or fewer */
    ba_tensor meanblocks;           /* not given, or written: the mean of each channel, in the same shape and dtype. At least one of the three is
                                     * given */
    int num_threads;
} ba_quest_metadata_args;

BA_API ba_status ba_quest_metadata(const ba_quest_metadata_args *args);

typedef enum ba_select_method {
    BA_SELECT_QUEST, /* sum over channels of max(q * max, q * min), an upper bound of q . k; a = maxblocks, b = minblocks */
    BA_SELECT_MEAN,  /* q . mean; a = meanblocks, b not given */
    BA_SELECT_MAX,   /* the largest q . k of the page's tokens, NaN where one of these products is NaN; a = k_cache, b not given */
} ba_select_method;

/* Selects the K pages with the highest scores for each request and each KV head (or query head). The first `sink` and the newest
 * `recent` pages are always selected, as far as there is room. Only pages of the request itself compete; of equal scores, the lower page wins. The
 * queries of a request share its rows: a page's score is the largest of its scores for these queries, NaN where one of these scores is NaN. */
typedef struct ba_select_args {
    ba_select_method method;
    ba_tensor q;             /* (B, H, D), one query per request; with cu_q (T, H, D) */
    ba_tensor a, b;          /* what the method scores: summaries, (summary pages, rows, H_kv, D); for BA_SELECT_MAX a cache in kv_layout */
    ba_tensor k_scale;       /* BA_SELECT_MAX: as in ba_paged_args, for a quantised cache */
    ba_kv_layout kv_layout;  /* of `a`, for BA_SELECT_MAX; summaries are always BA_NHD */
    ba_tensor tables;        /* (B, M) int32 or int64: metadata_tables; for BA_SELECT_MAX block_tables */
    const int64_t *seq_lens; /* [batch]: tokens of each request */
    const int64_t *cu_q;     /* NULL: one query per request. Else batch + 1 cumulative numbers of queries, 0 to seq_lens[b] each; a request without
                              * queries selects no page */
    int64_t batch, page_size;
    int per_query_head;    /* 0: one row per KV head, for which the mean of its group's queries is scored. 1: one row per query head */
    int64_t sink;          /* how many of the first pages (sinks) are always selected */
    const int64_t *recent; /* NULL: none. Else [batch]: how many of each request's newest pages are always selected (one number per request, with
                            * cu_q, too). Where K is too small for both, the newest pages are selected before the sinks */
    const int64_t *budget; /* NULL: K. Else [batch]: how many pages are selected at most */
    int ascending;         /* 1: page numbers rise in each row. 0: sinks first, then pages by falling score, then the newest pages, of which the
                            * newest is last */
    ba_tensor selected;    /* written: (B, H_kv or H, K) int32; -1 in unused places */
    ba_tensor counts;      /* not given, or written: (B, H_kv or H) int32, how many places of each row are in use */
    ba_tensor scores;      /* not given, or written: the shape of `selected`, float32: the score of each page, also of those that are always
                            * selected; -inf in unused places */
    int num_threads;
} ba_select_args;

BA_API ba_status ba_select_blocks(const ba_select_args *args);

/* ---- Choosing blocks for block-sparse attention --------------------------------------------------------------- */

/* How blocks of keys are scored for a block of queries. A row is one query or a few pooled queries, and a group is one key or a few pooled keys. Each
 * row has a product with each group. For each row, a softmax over the groups that the row may see turns the products into weights; the share of a
 * block of keys is the sum of the weights of its groups. The score of a block of keys is its largest share, or its mean share, among the rows of the
 * block of queries. Finally, the scores for each block of queries are divided by their sum. With bfloat16 inputs, means and the elements of bounds
 * are rounded to bfloat16. */
typedef enum ba_chooser {
    BA_CHOOSER_POOLED,         /* a row is pool_q queries, and a group is pool_k keys; ba_chooser_term defines their product */
    BA_CHOOSER_ANTIDIAGONAL,   /* rows and groups have pool_q = pool_k tokens; the product of a row and a group is the mean of the products of tokens
                                * along their antidiagonal */
    BA_CHOOSER_SAMPLED_ROWS,   /* a block of queries is cut into pool_q equal parts; a row is the last query of a part, and a group is a key */
    BA_CHOOSER_VERTICAL_SLASH, /* the last pool_q queries of a sequence against every key. A block's score is the attention mass of its keys, plus, as
                                * a mean over its queries, the attention mass of the distances from the query to these keys */
    BA_CHOOSER_GIVEN,          /* scores come with the call: `given_scores` */
} ba_chooser;

typedef enum ba_chooser_term {
    BA_TERM_MEAN,  /* mean query . mean key */
    BA_TERM_BOUND, /* max(mean query, 0) . largest + min(mean query, 0) . smallest, with the largest and smallest element of each channel of the
                    * keys */
    BA_TERM_BOTH,  /* the mean of BA_TERM_MEAN and BA_TERM_BOUND */
} ba_chooser_term;

/* Which further blocks are kept, besides those that are always kept. Let the further blocks of a row be sorted by falling score: the tail of a block
 * is the sum of its score and of all scores behind it. */
typedef enum ba_budget {
    BA_BUDGET_DENSITY,   /* the blocks with the largest tails among all rows of a sequence, so many that this share of the visible blocks is kept */
    BA_BUDGET_TOP_P,     /* the blocks whose tail is above 1 - p, which are the fewest that hold p of the row's scores */
    BA_BUDGET_THRESHOLD, /* the blocks with at least this score */
    BA_BUDGET_TOP_K,     /* the blocks with the highest scores, so many that each row keeps this number of blocks in all */
} ba_budget;

typedef struct ba_select_prefill_args {
    ba_block_sparse_args call; /* the call that the blocks are for; v, out, lse, blocks, cu_rows, attn_mask, alibi_slopes, q_total, key_stride,
                                * key_last are not read; softcap, sinks and routed are checked, but change no choice.
                                * BA_CHOOSER_VERTICAL_SLASH takes no kv_ranges */
    ba_chooser chooser;
    int64_t pool_q, pool_k; /* tokens or rows, as ba_chooser says; 1 where ba_chooser does not name them. Except for BA_CHOOSER_VERTICAL_SLASH, pool_q
                             * must divide block_q, and pool_k must divide block_kv */
    ba_chooser_term term;   /* BA_CHOOSER_POOLED only */
    int largest;            /* 1: the largest share of a block's rows is its score. 0: their mean */
    ba_budget budget;
    ba_tensor budgets; /* float64 (1,), or (lists,), one number per list */
    int64_t sink, last_columns, first_rows,
        last_rows;    /* always kept: the first and last columns of a sequence; all visible blocks of its first and last rows */
    int64_t recent;   /* always kept: with 1 the columns that the diagonal crosses, with more also recent - 1 columns before them */
    int per_kv_head;  /* 1: one list per KV head, from the mean score of its query heads. 0: one list per query head */
    ba_tensor kept;   /* written: int64 (B, lists, rows, words), with ceil(columns / 64) words: column c of a row is kept where bit c % 64 of word
                       * c / 64 is set */
    ba_tensor counts; /* written: int32 (B, lists, rows), how many blocks each row keeps */
    ba_tensor scores; /* not given, or written: float32 (B, lists, rows, columns); 0 where a row sees no key of the column */
    ba_tensor given_scores; /* for BA_CHOOSER_GIVEN only, which does not read pool_q, pool_k, term and largest: float32 (B, H, rows, columns), or one
                             * per list (B, lists, rows, columns). At least 0; NaN and minus infinity count as 0. Each row is divided by the sum of
                             * the scores of blocks that it sees. Where the sum differs from 1 by at most 1e-4, the row is not divided, so that scores
                             * of this library stay as they are, bit for bit */
} ba_select_prefill_args;

/* `call` as ba_block_sparse_args_init() returns it, pool_q, pool_k and `largest` 1; the rest is 0. */
BA_API ba_select_prefill_args ba_select_prefill_args_init(void);
/* With kv_ranges, the first columns are counted from where the range of a query begins. With kv_ranges or q_begin, recent columns are counted back
 * from the last key that a query sees at or before the diagonal. */
BA_API ba_status ba_select_prefill(const ba_select_prefill_args *args);

/* Writes the blocks that are `kept` as index lists, for `blocks` of ba_block_sparse_args: `lists` is (B, H, rows, W), of uint16, int16, int32 or
 * int64; the dtype must be able to hold the columns. H is a multiple of the number of lists in `kept`; W is at least the largest number of blocks
 * that a row has. */
BA_API ba_status ba_list_kept(const ba_tensor *kept, const ba_tensor *lists);

/* Chooses, for each query, the keys with the highest scores of an indexer: small heads that share one key per token (the "lightning indexer" of
 * DeepSeek-V3.2). The score of query i and key j is the sum over heads h of weights[i, h] * max(0, scale * q[i, h] . k[j]). No array of all scores is
 * made. Of equal scores the lower key wins, and NaN counts as minus infinity.
 *
 * With a pool_size above 1, a key stands for a pool of this many tokens, and results are pool numbers. Lengths, q_begin and causal still count
 * tokens. A query may choose only pools of which it sees all tokens. The pool that it sees in part, if there is one, is its tail.
 *
 * With a block_size above 1, results are numbers of blocks of this many keys. The score of a block is the largest score among its keys that the query
 * sees. */
typedef struct ba_select_tokens_args {
    ba_tensor q;                     /* (B, Sq, H, D), or packed (T, H, D): float32, float16, bfloat16 or float64; at most 512 heads, D up to 576 */
    ba_tensor k;                     /* (B, Skv, D), or packed (T, D), of the dtype of q, or int8 or float8_e4m3. Incomplete pools need no row */
    ba_tensor k_scale;               /* float32, the axes of k without D: the factor of each int8 or float8_e4m3 key; not given with other keys */
    ba_tensor weights;               /* (B, Sq, H), or packed (T, H): real, that is float32, and float64 where q is float64; finite */
    ba_tensor block_tables;          /* not given, or (B, W) int32 or int64: k is (num_blocks, page_size, D), and key j of sequence b lies in page
                                      * block_tables[b][j / page_size], at j % page_size there. kv_lens must be given, and the pages of all its tokens
                                      * must be listed. cu_kv is NULL */
    const int64_t *cu_q, *cu_kv;     /* NULL, or with packed arrays batch + 1 cumulative numbers of the sequences' queries and keys */
    int64_t batch;                   /* number of sequences, with cu_q */
    const int64_t *q_lens, *kv_lens; /* NULL, or valid queries and tokens of each batch entry. Other queries get no key. With packed arrays, q_lens is
                                      * NULL. kv_lens is NULL, too, unless keys are pools or lie in pages: then it counts the tokens of each sequence.
                                      * Where kv_lens is NULL, all keys are valid, and all pools are complete */
    const int64_t *q_begin;          /* NULL: the last query stands at the last key. Else the token number of each sequence's query 0 */
    double scale;                    /* NAN: 1 / sqrt(D) */
    int causal;                      /* 1: a query sees the keys up to its own token */
    ba_tensor selected;              /* written: int32 (B, Sq, n), or packed (T, n): for each query the n best keys that it sees, then -1 */
    ba_tensor scores;                /* not given, or written: real, the shape of `selected`: the scores of the selected keys, then minus infinity */
    int ascending;                   /* 1: key numbers rise in each row. 0: scores fall in each row */
    double min_score;                /* NAN, or the least score of a key, pool or block that may be chosen */
    int64_t pool_size;               /* tokens per key, at least 1 */
    int64_t block_size;              /* keys per block, at least 1; 1 with a pool_size above 1 */
    int keep_tail;                   /* 1: a query gets the n - 1 best keys and then its tail, if it has one, with a score of infinity */
    int num_threads;
} ba_select_tokens_args;

BA_API ba_select_tokens_args ba_select_tokens_args_init(void); /* scale and min_score NAN, pool_size and block_size 1; the rest is 0 */
BA_API ba_status ba_select_tokens(const ba_select_tokens_args *args);

/* ---- Native sparse attention: the steps around its three attention branches ----------------------------------- */

/* The branches themselves are calls of ba_block_sparse_attention: the compressed branch with key_stride, the selected branch with routed
 * lists, the window branch with a window. Arrays are (B, N, H, D), or packed, (T, H, D), with cumulative lengths. "real" below means
 * float32, and float64 where the arrays are float64. */

enum { BA_MOST_SUMMANDS = 4 };

/* Means of blocks of tokens: block i of a sequence is its block_size tokens from i * stride on. Only complete blocks count. */
typedef struct ba_block_means_args {
    ba_tensor x;
    ba_tensor weight;              /* not given, or (H, D, E) real: each mean, as a row vector, is multiplied by the matrix of its head. The
                                    * result is rounded to out's dtype once, after the product */
    ba_tensor out;                 /* written: (B, blocks, H, D or E), packed (blocks, H, D or E); dtype of x, or real */
    const int64_t *cu, *cu_blocks; /* NULL, or batch + 1 cumulative numbers of the sequences' tokens and blocks */
    int64_t batch;                 /* number of sequences, with cu */
    int64_t block_size, stride;
    int num_threads;
} ba_block_means_args;

BA_API ba_status ba_block_means(const ba_block_means_args *args);

/* The gradient of ba_block_means without a weight: dx of a token is the sum of dout / block_size over the blocks that hold the token.
 * The arrays of `more` are added to dx. */
typedef struct ba_block_means_backward_args {
    ba_tensor dout;                   /* the shape of ba_block_means' out, dtype of dx; not given: 0 */
    ba_tensor dx;                     /* written: the shape and dtype of x */
    ba_tensor more[BA_MOST_SUMMANDS]; /* further summands of dx, of its shape and dtype. The list ends at the first summand that is not given */
    const int64_t *cu, *cu_blocks;
    int64_t batch;
    int64_t block_size, stride;
    int num_threads;
} ba_block_means_backward_args;

BA_API ba_status ba_block_means_backward(const ba_block_means_backward_args *args);

/* gates = sigmoid(q . weight), three per token and query head, and out = the sum of gates[c] * branch[c]. Without weight, `gates` is an input; where
 * neither is given, each gate is 1/3. */
typedef struct ba_gate_args {
    ba_tensor q, weight; /* not given, or (.., H, D) and (H, 3, D) real */
    ba_tensor gates;     /* not given, or (.., H, 3) real: written with weight, read without */
    ba_tensor branch[3]; /* (.., H, D_v), all of one dtype; not read where out is not given */
    ba_tensor out;       /* written: the shape and dtype of a branch. Not given: only the gates are computed */
    int num_threads;
} ba_gate_args;

BA_API ba_status ba_gate(const ba_gate_args *args);

/* Gradients of ba_gate, from dout, the inputs of ba_gate and its gates. */
typedef struct ba_gate_backward_args {
    ba_tensor q, weight; /* not given: dq and dweight are not computed */
    ba_tensor gates;     /* not given: each gate is 1/3 */
    ba_tensor branch[3]; /* read where weight or dgates is given */
    ba_tensor dout;
    ba_tensor dbranch[3];  /* written: gates[c] * dout */
    ba_tensor dgates;      /* not given, or written: (.., H, 3) real, dout . branch[c] */
    ba_tensor dq, dweight; /* written where weight is given: the shape and dtype of q; (H, 3, D) real */
    int num_threads;
} ba_gate_backward_args;

BA_API ba_status ba_gate_backward(const ba_gate_backward_args *args);

/* Selects the blocks that each query, or each tile of queries, attends in the selected branch. Of equal scores, the lower block wins. Block numbers
 * rise in each row of the result, and unused places hold -1.
 *
 * tile = 0: one row per query and KV head. The overlap of a compressed key and a block is the number of stretches of compress_stride tokens that both
 * contain. The score of a block is the sum, over the heads of the group and over the compressed keys, of the key's probability times its overlap with
 * the block. The first init_blocks blocks and local_blocks blocks around the query's own block are always selected. With `causal`, these local blocks
 * end with the query's own, and no later block is selected. A row of the result has room for at least init_blocks + local_blocks blocks.
 * compress_stride divides compress_block and select_block.
 *
 * tile > 0: one row per tile of queries and query head. The score of a block is the product of its compressed key and the mean query of the
 * tile. With `causal`, only blocks that begin before the end of the tile compete. compress_stride and select_block must equal
 * compress_block. */
typedef struct ba_nsa_select_args {
    ba_tensor q, k_cmp; /* (B, N, H, D) and (B, blocks, H_kv, D), or packed; one dtype */
    ba_tensor lse;      /* with tile = 0: (B, N, H) or (T, H) real, the natural log-sum-exp of each query over the compressed keys that it sees */
    const int64_t *cu_q, *cu_cmp; /* NULL, or batch + 1 cumulative numbers of the sequences' queries and compressed keys */
    int64_t batch;                /* number of sequences, with cu_q */
    const int64_t *q_begin;       /* NULL, or the token number of each sequence's query 0, where the queries are a stretch of their sequence */
    const int64_t *tokens;        /* NULL, or the length of each sequence, including tokens that have no query in this call. k_cmp has the complete
                                   * blocks of this many tokens; further compressed keys of a batch entry are not read */
    double scale;                 /* as in ba_block_sparse_args */
    int causal;
    int64_t compress_block, compress_stride, select_block, tile; /* in tokens */
    int64_t init_blocks, local_blocks;
    ba_tensor selected;     /* written: int32, (B, H_kv, N, n) or (B, H, tiles, n); packed (heads, rows of all sequences, n) */
    ba_tensor selected_cmp; /* not given, or (only with tile > 0) written in the form of `selected`: the stretches of cmp_group compressed keys with
                             * the highest mean scores */
    int64_t cmp_group;
    int num_threads;
} ba_nsa_select_args;

BA_API ba_nsa_select_args ba_nsa_select_args_init(void); /* a scale of NAN; the rest is 0 */

BA_API ba_status ba_nsa_select(const ba_nsa_select_args *args);

/* ---- Merging partial attention ----------------------------------------------------------------------------- */

/* Computes the exact attention over the union of disjoint sets of keys. For each i < parts, outs[i] and lses[i] are the output (B, H, S, D_v) and the
 * log-sum-exp (B, H, S) of the attention over set i. All outs and `out` have one dtype; all lses and `lse` are float32, or float64 where the outs are
 * float64. Where the lse of a part is -inf, the part is empty, and its output is not read. */
BA_API ba_status ba_merge_states(int64_t parts, const ba_tensor *outs, const ba_tensor *lses, const ba_tensor *out, const ba_tensor *lse);

/* ---- Threads and instruction sets -------------------------------------------------------------------------- */

/* The number of threads of calls whose num_threads is 0. It is the first of these numbers that exists: the number that ba_set_num_threads() has set,
 * BLITZ_ATTN_NUM_THREADS, OMP_NUM_THREADS, and the number of CPUs that affinity and the cgroup quota leave. ba_set_num_threads(0) unsets the number
 * that was set. */
BA_API int ba_get_num_threads(void);
BA_API ba_status ba_set_num_threads(int num_threads);
BA_API const char *ba_num_threads_source(void); /* which of these rules decided, as a short text */

/* Makes long calls of this thread stoppable. While a call runs, the library calls `poll(context)` about twenty times a second, in the thread
 * that made the call. No other call waits for a lock that this thread then holds. When `poll` returns a value other than 0, all threads of the call
 * stop within some milliseconds and the call returns BA_INTERRUPTED. `poll` may itself call the library. Every thread starts with NULL, with which
 * calls run to their end. Returns BA_ERROR_MEMORY, and sets nothing, where this is the thread's first call and there is no memory. */
typedef int (*ba_poll_fn)(void *context);
BA_API ba_status ba_set_poll(ba_poll_fn poll, void *context);

BA_API const char *ba_isa_name(ba_isa level);
BA_API int ba_isa_parse(const char *name);     /* the level of that name; -1: there is none */
BA_API ba_isa ba_isa_detected(void);           /* the highest level that this CPU, this system and this build have and that is fast on this CPU */
BA_API ba_isa ba_isa_active(void);             /* the highest level in use: the detected level, or the cap where that is lower */
BA_API ba_status ba_isa_set_cap(ba_isa level); /* BLITZ_ATTN_ISA is the first cap; a cap above the detected level has no effect */
BA_API const char *ba_isa_note(void);          /* one sentence that says why the active level is what it is; valid until this thread calls it again */
BA_API const char *ba_cpu_model(void);         /* the CPU's own name for itself, or "unknown CPU" */

/* The list of kernels that a level uses: attention (attend_..., with the sizes of its panels), a few queries (few_...) and gradients (gradient_...)
 * by dtype of the queries, and decoding and selection over caches (cache_...) by dtype of keys and values. Writes the name of entry `index`, and the
 * level whose instructions this kernel uses. Returns 0 past the end of the list, else 1. */
BA_API int ba_kernel_info(ba_isa level, int64_t index, const char **name, ba_isa *implemented_at);

/* ---- Probes: the machine's limits, measured with the instructions that the kernels use ----------------------- */

/* Measures fp32 multiply-adds on a level's widest vectors for about `seconds`, on num_threads threads at once (0: as many as ba_get_num_threads()
 * returns). Returns FLOP/s of all threads together; 0 where the level is not available, or for a num_threads that calls refuse. */
BA_API double ba_probe_flops(ba_isa level, double seconds, int num_threads);
/* Measures bfloat16 tile products as ba_probe_flops() measures multiply-adds, at the rate that the CPU sustains: every four products load four tiles
 * of changing operands from the first-level cache, and the first quarter of the time is not counted. 0 where the level has no tiles. */
BA_API double ba_probe_tile_flops(ba_isa level, double seconds, int num_threads);
/* Reads memory over and over for about `seconds`, and returns the bytes/s of all threads together. The threads share out the `bytes` bytes of `data`;
 * where `data` is NULL, each thread reads `bytes` bytes of its own. Returns 0 where ba_probe_flops() does, where `data` has fewer than 512 bytes per
 * thread, and where there is no memory. With seconds = 0, `data` is read only once, so that data in no cache is measured as it comes from memory. */
BA_API double ba_probe_read(ba_isa level, const void *data, int64_t bytes, double seconds, int num_threads);

#ifdef __cplusplus
}
#endif
#endif
