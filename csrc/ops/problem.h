/* A checked call: its shapes, strides and rules, in one form for all layouts. The functions of ops/open/open.h make it, and drivers start from it.
 * Internal. */
#ifndef BA_OPS_PROBLEM_H
#define BA_OPS_PROBLEM_H

#include "blitz_attn.h"
#include "core/common.h"

/* The most tokens of a sequence, and the largest token number of its first query. Positions within this bound, and the distance between any two of
 * them, fit into the int32_t that kernels take. */
enum { BA_MOST_TOKENS = INT32_MAX / 2 };

/* A (batch, head, token, dim) view of an array of any layout. Strides count elements; the dim axis is contiguous. */
typedef struct ba_view {
    char *data;
    int64_t batch_stride, head_stride, token_stride;
} ba_view;

/* A batch entry of a paged call with kv_split (attend_kv_split.c): a slice of a request's queries, and one KV split of its tokens. The split counts
 * as a sequence of its own: `kv_lens`, `first_page` and `q_begin` of the problem describe the split, whose tokens are counted from its first one. */
typedef struct ba_kv_split {
    int64_t request;        /* the request's index on the batch axes of attn_mask and of the lists */
    int64_t first_query;    /* the number of the slice's first query among the queries of the request */
    int64_t result_row;     /* the row of that query in out and lse */
    int64_t first_key;      /* the token of the request with which the split begins */
    const uint64_t *listed; /* one bitmap over all pages of the request for each head of the lists, one after the other; NULL: no lists */
    int64_t listed_words;   /* of each bitmap */
} ba_kv_split;

typedef struct ba_problem {
    ba_dtype dtype, k_dtype, v_dtype; /* of q, and of out unless `unrounded`; of k; of v, which may differ from k's only where both have cells */
    int64_t element_size, kv_element_size, out_element_size;
    bool unrounded;                        /* out holds reals, whatever the dtype of q */
    int64_t batch, heads, kv_heads, group; /* group = heads / kv_heads */
    int64_t q_len, kv_len;                 /* the length of the batch entries (BA_TND and paged: of the longest sequence) */
    int64_t head_dim, v_dim;
    int64_t k_width, v_width; /* elements of kv_element_size bytes in a row of k and v: the dims, or, where rows have cells, the bytes of these */
    double scale;
    double softcap;     /* 0: none. Else it bounds the scaled scores */
    const float *sinks; /* NULL: none. Else [heads]: one score per head that takes part in the softmax without a value */
    ba_view q, k, v, out;
    /* Paged K and V: token t of sequence b is token t % page_size of page number page[first_page[b] + t / page_size]. The batch strides of k, v and
     * their scales are then strides from one page to the next. */
    int64_t page_size; /* 0: not paged */
    const int64_t *page, *first_page;
    const ba_kv_split *kv_splits; /* NULL: a batch entry is a whole sequence. Else [batch], and all batch entries share one axis of rows of q, out and
                                   * lse */
    ba_view k_scale, v_scale;     /* data NULL: none. Else one float per token and head, for quantised K and V */
    ba_view lse;                  /* data NULL: not written. Its elements are reals */
    const int64_t *q_lens, *kv_lens, *cu_kv;
    const int64_t *cu_q, *q_ends; /* NULL: queries have a batch axis. Else the rows of q where each sequence's queries begin and end */
    bool causal;
    int64_t window_left, window_right; /* -1: no bound */
    const int64_t *q_begin;       /* NULL: the queries are the last tokens of their sequences. Else the token number of each sequence's query 0 */
    const int64_t *q_total;       /* NULL, or where queries are a slice: the number of queries of each whole sequence, by which kernels are chosen */
    ba_tensor kv_ranges;          /* data NULL: none. Else (batch or 1, queries, 2); see ba_visible_keys() */
    ba_tensor attn_mask;          /* data NULL: none. Else (batch, heads, queries, keys), with stride 0 where an axis has length 1 */
    const float *alibi_slopes;    /* NULL: none. Else [heads] */
    int64_t key_stride, key_last; /* 0: a key is a token. Else, in causal calls, queries from token j * key_stride + key_last on see key j */
    bool listed;                  /* `blocks` holds lists. false: every block is attended */
    bool routed;                  /* lists are of single queries or small tiles: routed kernels attend list rows of few queries */
    const char *list_name;        /* the name of the argument that holds the lists, for sentences */
    ba_tensor blocks;             /* (batch or 1, heads or kv_heads or 1, rows, entries) */
    int64_t block_q, block_kv;
    int64_t block_rows, block_columns; /* blocks of queries and of keys in a sequence of q_len queries and kv_len keys */
    const int64_t *block_counts;       /* NULL: a list row ends at its first pad. Else [batch][head axis of blocks]: how many entries are in use */
    const int64_t *cu_rows;            /* NULL: the lists have a batch axis. Else where each sequence's list rows begin on the axis of rows */
} ba_problem;

/* The tokens of one batch entry: the row where they begin, how many rows there are, and how many of these, from the first on, are valid. */
typedef struct ba_span {
    int64_t begin, rows, valid;
} ba_span;

static inline ba_span ba_q_span(const ba_problem *p, int64_t batch) {
    const int64_t begin = p->cu_q ? p->cu_q[batch] : 0, rows = p->cu_q ? p->q_ends[batch] - begin : p->q_len;
    return (ba_span){begin, rows, p->q_lens ? p->q_lens[batch] : rows};
}

static inline ba_span ba_kv_span(const ba_problem *p, int64_t batch) {
    if (p->cu_kv) return (ba_span){p->cu_kv[batch], p->cu_kv[batch + 1] - p->cu_kv[batch], p->cu_kv[batch + 1] - p->cu_kv[batch]};
    return (ba_span){0, p->kv_len, p->kv_lens ? p->kv_lens[batch] : p->kv_len};
}

static inline char *ba_row_of(const ba_view *view, int64_t element_size, int64_t batch, int64_t head, int64_t token) {
    return view->data + (batch * view->batch_stride + head * view->head_stride + token * view->token_stride) * element_size;
}

/* The row of a query of a sequence; ba_key_row() is the same for keys. Sequences of BA_TND share one batch entry, in which each sequence begins at
 * `begin` of its span. */
static inline char *ba_query_row(const ba_problem *p, const ba_view *view, int64_t element_size, int64_t batch, int64_t head, int64_t query) {
    return ba_row_of(view, element_size, p->cu_q ? 0 : batch, head, ba_q_span(p, batch).begin + query);
}

/* The row of out or lse of a query. */
static inline char *ba_result_row(const ba_problem *p, const ba_view *view, int64_t element_size, int64_t batch, int64_t head, int64_t query) {
    if (p->kv_splits) return ba_row_of(view, element_size, 0, head, p->kv_splits[batch].result_row + query);
    return ba_query_row(p, view, element_size, batch, head, query);
}

static inline char *ba_key_row(const ba_problem *p, const ba_view *view, int64_t element_size, int64_t batch, int64_t kv_head, int64_t key) {
    return ba_row_of(view, element_size, p->cu_kv ? 0 : batch, kv_head, ba_kv_span(p, batch).begin + key);
}

/* The number of tokens with queries that decides which kernels attend a batch entry. It is the same for a slice of the queries as for all of them. */
static inline int64_t ba_deciding_tokens(const ba_problem *p, int64_t batch) {
    const int64_t valid = ba_q_span(p, batch).valid;
    return p->q_total && valid ? p->q_total[batch] : valid;
}

/* The entry at `offset` elements in an array of lists, of page numbers or of kv_ranges. 65535 of uint16 becomes -1. In lists, negative entries are
 * pads; but in lists of paged calls only -1 is a pad, and other negative entries are errors (ba_list_to_bitmap). */
static inline int64_t ba_list_entry(const ba_tensor *blocks, int64_t offset) {
    switch (blocks->dtype) {
    case BA_UINT16: {
        const uint16_t entry = ((const uint16_t *)blocks->data)[offset];
        return entry == UINT16_MAX ? -1 : entry;
    }
    case BA_INT16: return ((const int16_t *)blocks->data)[offset];
    case BA_INT32: return ((const int32_t *)blocks->data)[offset];
    default: return ((const int64_t *)blocks->data)[offset];
    }
}

/* Keys from lo to hi - 1. */
typedef struct ba_range {
    int64_t lo, hi;
} ba_range;

/* The position of a query among the keys of its sequence. */
static inline int64_t ba_diagonal(const ba_problem *p, int64_t batch, int64_t query) {
    const int64_t q_valid = ba_q_span(p, batch).valid, kv_valid = ba_kv_span(p, batch).valid;
    return query + (p->q_begin ? p->q_begin[batch] : kv_valid - q_valid);
}

/* The keys that a query sees by its position, without regard to kv_ranges: [0, 0) where it sees none. From one query to the next, neither end of the
 * range falls, unless the range becomes [0, 0). */
static inline ba_range ba_keys_in_place(const ba_problem *p, int64_t batch, int64_t query) {
    const int64_t q_valid = ba_q_span(p, batch).valid, kv_valid = ba_kv_span(p, batch).valid, diagonal = ba_diagonal(p, batch, query);
    ba_range range = {0, kv_valid};
    if (p->key_stride) range.hi = p->causal ? ba_min(kv_valid, diagonal < p->key_last ? 0 : (diagonal - p->key_last) / p->key_stride + 1) : kv_valid;
    else if (p->causal) range.hi = ba_min(range.hi, diagonal + 1);
    if (p->window_right >= 0) range.hi = ba_min(range.hi, diagonal + 1 + p->window_right);
    if (p->window_left >= 0) range.lo = ba_max(range.lo, diagonal - p->window_left);
    if (query >= q_valid || range.lo >= range.hi) range = (ba_range){0, 0};
    return range;
}

/* One end of a query's range in kv_ranges: 0 for its first key, 1 for the key after its last one. The problem must have kv_ranges. */
static inline int64_t ba_range_end(const ba_problem *p, int64_t batch, int64_t query, int end) {
    const int64_t *step = p->kv_ranges.strides, row = ba_q_span(p, batch).begin + query;
    if (!p->kv_splits) return ba_list_entry(&p->kv_ranges, batch * step[0] + row * step[1] + end * step[2]);
    /* Ends are clamped so that the difference does not overflow. All ends beyond the tokens mean the same. */
    const int64_t token = ba_list_entry(&p->kv_ranges, row * step[1] + end * step[2]);
    return ba_max(-1, ba_min(token, INT32_MAX)) - p->kv_splits[batch].first_key;
}

/* The keys that a query sees by its position and by kv_ranges: [0, 0) where it sees none. With kv_ranges, the ends may rise and fall from one query
 * to the next. */
static inline ba_range ba_visible_keys(const ba_problem *p, int64_t batch, int64_t query) {
    ba_range range = ba_keys_in_place(p, batch, query);
    if (!p->kv_ranges.data) return range;
    range.lo = ba_max(range.lo, ba_range_end(p, batch, query, 0));
    range.hi = ba_min(range.hi, ba_range_end(p, batch, query, 1));
    return range.lo < range.hi ? range : (ba_range){0, 0};
}

/* The index of a query head on the lists' head axis, and of a batch entry on their batch axis. The head axis has length 1, kv_heads or heads. */
static inline int64_t ba_list_head(const ba_problem *p, int64_t head) {
    return p->blocks.dims[1] == p->heads ? head : p->blocks.dims[1] == 1 ? 0 : head / p->group;
}
static inline int64_t ba_list_batch(const ba_problem *p, int64_t batch) { return p->blocks.dims[0] == 1 ? 0 : batch; }
/* The index of a sequence's block row on the lists' axis of rows. */
static inline int64_t ba_list_row(const ba_problem *p, int64_t batch, int64_t row) { return p->cu_rows ? p->cu_rows[batch] + row : row; }

/* The sequence that holds row, item or panel `at`: sequence n begins at begin[n], the last one ends at begin[sequences], and some may be empty. */
static inline int64_t ba_sequence_at(const int64_t *begin, int64_t sequences, int64_t at) {
    int64_t low = 0, end = sequences; /* begin[low] <= at < begin[end] */
    while (end - low > 1) {
        const int64_t middle = low + (end - low) / 2;
        if (begin[middle] <= at) low = middle;
        else end = middle;
    }
    return low;
}

/* The number of block columns that the lists of a batch entry may name: by its own tokens where keys are paged, else by the padded length. */
static inline int64_t ba_list_columns(const ba_problem *p, int64_t batch) {
    return p->page_size ? ba_ceil_div(ba_kv_span(p, batch).valid, p->block_kv) : p->block_columns;
}

/* The number of the page that holds a sequence's tokens from page * page_size on. */
static inline int64_t ba_page(const ba_problem *p, int64_t batch, int64_t page) { return p->page[p->first_page[batch] + page]; }

#endif
