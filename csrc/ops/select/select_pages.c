/* Selects pages by their summaries (Quest's bounds or mean keys), or by their keys. */
#include "ops/select/select_pages.h"

#include <assert.h>
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "core/arena.h"
#include "core/float_mode.h"
#include "core/pool.h"
#include "core/status.h"
#include "kernels/kernels.h"
#include "kernels/prefetch_rows.h"
#include "kernels/work_tuning.h"
#include "ops/check.h"
#include "ops/kv_cache/kv_cache.h"
#include "ops/kv_cache/pages.h"
#include "ops/reals.h"
#include "ops/prefetch_heads.h"
#include "ops/scratch.h"

/* Selection takes two jobs. The items of the first are runs of pages, each scored for all heads, because the heads of a page lie close
 * together in memory. The items of the second are the rows of the result, each chosen from the scores of all its pages.
 *
 * An entry is one query of one row of the result: the query of one query head, or the mean of a group's queries. The entries of a KV head are
 * numbered in this order: those of all its rows for the request's query 0, then those of all its rows for query 1, and so on. A row's score of a
 * page is the largest of the scores of the row's entries. */
typedef struct select_pages_call {
    const ba_select_args *args;
    const ba_page_tables *opened; /* opened tables, or NULL */
    ba_pages a, b;
    ba_view k_scale; /* of quantised keys; data NULL: none */
    int64_t heads, kv_heads, group, dim, most_pages;
    int64_t rows;                   /* rows of the result per request */
    int64_t run_pages, runs;        /* pages per run; the largest number of runs in a request */
    const ba_attend_family *family; /* for the queries' dtype */
    const ba_attend_family *reals;  /* for means of queries */
    const ba_cache_kernels *cache;
    int64_t most_rows, most_q, most_scores; /* room in the scratch memory, for all requests: rows of a chunk, packed queries, scores */
    int64_t scratch_bytes;
    char *scratch;
    float *page_scores; /* [request][row][most_pages] */
} select_pages_call;

/* The passes over the rows of a request, which the entries of its KV heads share. They depend on the number of entries alone. */
typedef struct row_passes {
    int64_t heads_at_once;   /* 0: the kernel for few queries scores one head after the other. Else this many heads read each row together */
    int64_t entries_at_once; /* entries of each head that are scored in one pass over the rows */
    int64_t chunk_rows;      /* rows of `a` that are scored for every head before the next rows are */
    int64_t ahead;           /* where heads read rows together: rows that are prefetched ahead */
} row_passes;

typedef struct select_pages_scratch {
    int64_t *loaded; /* [2]: the request, and the first entry of each KV head, that `q` holds; -1: none yet */
    char *q;         /* [KV head][entry], packed */
    char *one_query; /* one query of a group, while the group's mean is made */
    char *means;     /* [entry]: means that wait to be packed */
    char *scores;
    struct rows_at {
        const void **a, **b; /* b: the rows of the call's b, or the scales of quantised keys */
        int64_t count;
    } rows[2];      /* the rows of the current chunk, and of the next one */
    float *largest; /* [most_pages]: for best_keys() */
    uint64_t *keys; /* [most_pages]: order_key() of the pages that compete */
    int32_t *chosen;
} select_pages_scratch;

/* Lays out the memory of a call. */
static int64_t lay_out_call(select_pages_call *c, int threads, char *base) {
    int64_t used = 0;
    c->page_scores = ba_take(base, &used, c->args->batch * c->rows * c->most_pages * (int64_t)sizeof(float));
    c->scratch = ba_take(base, &used, threads * c->scratch_bytes);
    return used;
}

/* Lays out the scratch memory of one worker. */
static int64_t lay_out_select_pages(const select_pages_call *c, char *base, select_pages_scratch *s) {
    const int64_t real = c->family->real_size;
    int64_t used = 0;
    s->loaded = ba_take(base, &used, 2 * (int64_t)sizeof(int64_t));
    s->q = ba_take(base, &used, c->most_q * BA_FEW_PAD(c->dim) * real);
    s->one_query = ba_take(base, &used, BA_FEW_PAD(c->dim) * real);
    s->means = ba_take(base, &used, BA_FEW_QUERIES * BA_FEW_PAD(c->dim) * real);
    s->scores = ba_take(base, &used, (c->most_scores + 16) * real);
    for (int i = 0; i < 2; i++) {
        s->rows[i].a = ba_take(base, &used, c->most_rows * (int64_t)sizeof(void *));
        s->rows[i].b = ba_take(base, &used, c->most_rows * (int64_t)sizeof(void *));
    }
    s->largest = ba_take(base, &used, c->most_pages * (int64_t)sizeof(float));
    s->keys = ba_take(base, &used, c->most_pages * (int64_t)sizeof(uint64_t));
    s->chosen = ba_take(base, &used, c->most_pages * (int64_t)sizeof(int32_t));
    return used;
}

/* The first query of a request, as a row of q, and how many queries it has. */
static int64_t first_query(const select_pages_call *c, int64_t batch) { return c->args->cu_q ? c->args->cu_q[batch] : batch; }
static int64_t queries_of(const select_pages_call *c, int64_t batch) { return c->args->cu_q ? c->args->cu_q[batch + 1] - c->args->cu_q[batch] : 1; }

/* Decides how many heads and entries read each row together. In the kernel score_heads, several heads and entries share one pass over the rows.
 * Quest's bound has no other kernel. Products are computed by score_heads where each KV head has one entry; for several entries, the kernel for few
 * queries is faster. Quantised keys have no score_heads, and are left to the kernel for few queries. Where the heads of a row do not lie side by
 * side, each head reads all rows of a chunk before the next head does. */
static row_passes choose_row_passes(const select_pages_call *c, int64_t entries) {
    const int64_t most = BA_HEADS_REALS / ba_round_up(c->dim, 32);
    if (!c->cache->score_heads || (entries > 1 && c->args->method != BA_SELECT_QUEST))
        return (row_passes){0, BA_FEW_QUERIES, ba_work.quest.single_chunk_rows, 0};
    row_passes h = {.entries_at_once = ba_min(entries, ba_min(most, BA_FEW_QUERIES)), .chunk_rows = ba_work.quest.chunk_rows};
    h.heads_at_once = c->a.head_stride >= c->a.row_stride ? 1 : ba_max(1, ba_min(c->kv_heads, most / h.entries_at_once));
    h.ahead = ba_min(ba_work.quest.ahead_rows, ba_ceil_div(ba_work.quest.ahead_bytes, h.heads_at_once * c->dim * ba_dtype_size(c->args->a.dtype)));
    return h;
}

/* Makes room for requests whose KV heads have `entries` entries each. */
static void make_room(select_pages_call *c, int64_t entries) {
    const row_passes h = choose_row_passes(c, entries);
    c->most_rows = ba_max(c->most_rows, h.chunk_rows + h.ahead);
    c->most_q = ba_max(c->most_q, c->kv_heads * h.entries_at_once);
    c->most_scores = ba_max(c->most_scores, ba_max(1, h.heads_at_once) * h.entries_at_once * (h.chunk_rows + h.ahead));
}

/* Bytes from one head's packed entries to the next head's. The kernel for few queries needs room for BA_FEW_QUERIES whatever their number. */
static int64_t head_bytes(const select_pages_call *c, const row_passes *h, int64_t entries) {
    return (h->heads_at_once ? entries : BA_FEW_QUERIES) * BA_FEW_PAD(c->dim) * c->family->real_size;
}

/* Adds the mean of a KV head's group to `to`, for the query in row `row` of q. */
static void add_mean(const select_pages_call *c, const select_pages_scratch *s, int64_t row, int64_t kv_head, char *to) {
    const ba_tensor *q = &c->args->q;
    const char *first = (const char *)q->data + (row * q->strides[0] + kv_head * c->group * q->strides[1]) * ba_dtype_size(q->dtype);
    for (int64_t g = 0; g < c->group; g++) {
        const void *query = first + g * q->strides[1] * ba_dtype_size(q->dtype);
        c->family->few->pack_queries(s->one_query, &query, 1, c->dim, 1 / (double)c->group);
        c->family->pack->add_reals(to, s->one_query, c->dim);
    }
}

/* Packs `entries` entries of a (request, KV head), from entry `first` on. */
static void load_entries(const select_pages_call *c, const select_pages_scratch *s, const row_passes *h, int64_t batch, int64_t kv_head,
                         int64_t first, int64_t entries) {
    const ba_tensor *q = &c->args->q;
    const bool means = !c->args->per_query_head;
    const int64_t real = c->family->real_size, pad = BA_FEW_PAD(c->dim), size = ba_dtype_size(q->dtype), bytes = head_bytes(c, h, entries);
    const int64_t rows_per_head = c->rows / c->kv_heads;
    const ba_attend_family *family = means ? c->reals : c->family;
    char *packed = s->q + kv_head * bytes;
    const void *rows[BA_FEW_QUERIES];
    memset(packed, 0, (size_t)bytes);
    if (means && !h->heads_at_once) memset(s->means, 0, (size_t)(entries * pad * real));
    for (int64_t e = 0; e < entries; e++) {
        const int64_t row = first_query(c, batch) + (first + e) / rows_per_head, head = kv_head * c->group + (first + e) % rows_per_head;
        char *mean = (h->heads_at_once ? packed : s->means) + e * pad * real;
        if (means) add_mean(c, s, row, kv_head, mean);
        rows[e] = means ? mean : (const char *)q->data + (row * q->strides[0] + head * q->strides[1]) * size;
        if (h->heads_at_once && !means) family->few->pack_queries(packed + e * pad * real, rows + e, 1, c->dim, 1);
    }
    if (h->heads_at_once) return;
    family->few->pack_queries(packed, rows, entries, c->dim, 1);
    if (c->cache->order_few) c->cache->order_few(packed, entries, c->dim);
}

/* The same for all KV heads, unless s->q still holds these entries from this worker's previous item. */
static void load_all_entries(const select_pages_call *c, const select_pages_scratch *s, const row_passes *h, int64_t batch, int64_t first,
                             int64_t entries) {
    if (s->loaded[0] == batch && s->loaded[1] == first) return;
    for (int64_t head = 0; head < c->kv_heads; head++) load_entries(c, s, h, batch, head, first, entries);
    s->loaded[0] = batch;
    s->loaded[1] = first;
}

/* The number of page `index` of a request in the array c->a: a page of keys for BA_SELECT_MAX, a page of summaries otherwise. */
static int64_t page_of(const select_pages_call *c, int64_t batch, int64_t index) {
    return ba_request_page(c->args->method == BA_SELECT_MAX ? c->opened : NULL, &c->args->tables, batch, index);
}

/* Finds where the rows from `begin` to `end` of a request lie, for head 0. */
static void find_rows(const select_pages_call *c, int64_t batch, int64_t begin, int64_t end, struct rows_at *rows) {
    rows->count = ba_max(0, end - begin);
    for (int64_t at = begin; at < end;) { /* page by page, because a division per row would cost time */
        const int64_t page = page_of(c, batch, at / c->a.rows), row = at % c->a.rows, some = ba_min(end - at, c->a.rows - row);
        const char *a = ba_page_row(&c->a, page, row, 0), *b = c->args->method == BA_SELECT_QUEST ? ba_page_row(&c->b, page, row, 0) : NULL;
        for (int64_t i = at - begin; i < at - begin + some; i++, a += c->a.row_stride) rows->a[i] = a;
        for (int64_t i = at - begin; b && i < at - begin + some; i++, b += c->b.row_stride) rows->b[i] = b;
        const ba_view *scales = &c->k_scale;
        const float *scale = scales->data ? (const float *)scales->data + page * scales->batch_stride + row * scales->token_stride : NULL;
        for (int64_t i = at - begin; scale && i < at - begin + some; i++, scale += scales->token_stride) rows->b[i] = scale;
        at += some;
    }
}

static ba_prefetch_rows rows_ahead(const select_pages_call *c, const ba_pages *p, int64_t head, const void *const *rows, int64_t count) {
    return ba_rows_ahead(p->head_stride, p->row_stride, c->kv_heads, head, c->dim * ba_dtype_size(c->args->a.dtype), rows, count);
}

/* Scores one head's rows, and meanwhile prefetches the head's share of the next rows. */
static void score_rows(const select_pages_call *c, const ba_pages *p, const row_passes *h, const char *q, int64_t entries, int64_t head,
                       const void *const *rows, int64_t count, const void *const *next, int64_t next_count, char *scores) {
    const ba_prefetch_rows ahead = rows_ahead(c, p, head, next, next_count);
    c->cache->scores(q + head * head_bytes(c, h, entries), entries, rows, head * p->head_stride, &ahead, count, c->dim, scores, h->chunk_rows);
}

/* Prefetches the first rows of a run for all heads. (Later rows are prefetched while the rows before them are scored.) */
static void prefetch_rows(const select_pages_call *c, const ba_pages *p, const void *const *rows, int64_t count) {
    for (int64_t head = 0; head < c->kv_heads; head++) {
        const ba_prefetch_rows ahead = rows_ahead(c, p, head, rows, count);
        ba_prefetch_to_keep(c->cache->prefetch_level, ahead.rows, ahead.count, ahead.offset, ahead.bytes, false);
    }
}

/* Multiplies scores of one head's quantised keys by the scales of these keys. */
static void scale_scores(const select_pages_call *c, const struct rows_at *rows, int64_t head, float *scores) {
    for (int64_t i = 0; i < rows->count; i++) scores[i] *= ((const float *)rows->b[i])[head * c->k_scale.head_stride];
}

/* Raises a page's score to its score for another query, where that is higher. Where either score is NaN, the result is NaN. */
static inline void keep_higher(float *page, float score) {
    if (score > *page || score != score) *page = score;
}

/* Turns one entry's scores of `count` rows, from row `at` on, into scores of pages. The scores of rows stand `step` apart. A row of summaries is a
 * page. For BA_SELECT_MAX a row is a token, and a page's score is the largest of its tokens' scores, NaN where one of them is NaN. `fresh`: the pages
 * have no score for other queries of this request yet. */
static void keep_scores(const select_pages_call *c, int64_t at, int64_t count, const char *scores, int64_t step, bool fresh, float *pages) {
    const int64_t real = c->family->real_size, size = c->args->page_size;
    if (c->args->method == BA_SELECT_MAX) {
        for (int64_t i = 0; i < count; i++) {
            const double score = ba_get_real(scores, i * step, real);
            float *page = &pages[(at + i) / size];
            if ((fresh && (at + i) % size == 0) || score > (double)*page || score != score) *page = (float)score;
        }
    } else if (!fresh) {
        for (int64_t i = 0; i < count; i++) keep_higher(&pages[at + i], (float)ba_get_real(scores, i * step, real));
    } else if (real == 4) {
        for (int64_t i = 0; i < count; i++) pages[at + i] = ((const float *)scores)[i * step];
    } else {
        for (int64_t i = 0; i < count; i++) pages[at + i] = (float)ba_get_real(scores, i * step, real);
    }
}

/* Keeps the scores of one of a KV head's entries. `pages`: the scores of the request's pages, [row][most_pages]. */
static void keep_entry(const select_pages_call *c, int64_t head, int64_t entry, int64_t at, int64_t count, const char *scores, int64_t step,
                       float *pages) {
    const int64_t rows_per_head = c->rows / c->kv_heads, row = head * rows_per_head + entry % rows_per_head;
    keep_scores(c, at, count, scores, step, entry < rows_per_head, pages + row * c->most_pages);
}

/* Scores the loaded entries, from entry `first` of every head on, with the rows from `begin` to `end`, one head after the other. */
static void score_head_by_head(const select_pages_call *c, select_pages_scratch *s, const row_passes *h, int64_t batch, int64_t first,
                               int64_t entries, int64_t begin, int64_t end, float *pages) {
    const int64_t real = c->family->real_size;
    find_rows(c, batch, begin, ba_min(end, begin + h->chunk_rows), &s->rows[0]);
    prefetch_rows(c, &c->a, s->rows[0].a, s->rows[0].count);
    for (int64_t at = begin, here = 0; at < end; at += h->chunk_rows, here = !here) {
        const struct rows_at *rows = &s->rows[here], *next = &s->rows[!here];
        find_rows(c, batch, at + h->chunk_rows, ba_min(end, at + 2 * h->chunk_rows), &s->rows[!here]);
        for (int64_t head = 0; head < c->kv_heads; head++) {
            score_rows(c, &c->a, h, s->q, entries, head, rows->a, rows->count, next->a, next->count, s->scores);
            for (int64_t e = 0; e < entries; e++) {
                char *scores = s->scores + e * h->chunk_rows * real;
                if (c->k_scale.data) scale_scores(c, rows, head, (float *)(void *)scores);
                keep_entry(c, head, first + e, at, rows->count, scores, 1, pages);
            }
        }
    }
}

/* The same, where several heads read each row together. */
static void score_heads(const select_pages_call *c, select_pages_scratch *s, const row_passes *h, int64_t batch, int64_t first, int64_t entries,
                        int64_t begin, int64_t end, float *pages) {
    const int64_t real = c->family->real_size, sides = c->args->method == BA_SELECT_QUEST ? 2 : 1;
    assert(!c->k_scale.data);
    struct rows_at *rows = &s->rows[0];
    for (int64_t at = begin; at < end; at += h->chunk_rows) {
        const int64_t count = ba_min(h->chunk_rows, end - at);
        find_rows(c, batch, at, ba_min(end, at + count + h->ahead), rows);
        for (int64_t head = 0; head < c->kv_heads; head += h->heads_at_once) {
            const int64_t heads = ba_min(h->heads_at_once, c->kv_heads - head);
            const ba_side side[2] = {{rows->a, head * c->a.head_stride, c->a.head_stride}, {rows->b, head * c->b.head_stride, c->b.head_stride}};
            c->cache->score_heads(side, sides, s->q + head * head_bytes(c, h, entries), entries, heads, count, rows->count, h->ahead, c->dim,
                                  s->scores);
            for (int64_t i = 0; i < heads; i++)
                for (int64_t e = 0; e < entries; e++)
                    keep_entry(c, head + i, first + e, at, count, s->scores + (i * entries + e) * real, heads * entries, pages);
        }
    }
}

/* Scores one run of pages of one request, for all heads. */
static void score_item(void *context, int64_t item, int worker) {
    const select_pages_call *c = context;
    const ba_select_args *args = c->args;
    const int64_t batch = item / c->runs, n = ba_ceil_div(args->seq_lens[batch], args->page_size);
    const int64_t first_page = item % c->runs * c->run_pages, end_page = ba_min(n, first_page + c->run_pages);
    const int64_t rows_per_page = args->method == BA_SELECT_MAX ? args->page_size : 1, all = c->rows / c->kv_heads * queries_of(c, batch);
    const int64_t rows = rows_per_page == 1 ? n : args->seq_lens[batch];
    if (first_page >= end_page || !all) return;
    const row_passes h = choose_row_passes(c, all);
    select_pages_scratch s;
    lay_out_select_pages(c, c->scratch + worker * c->scratch_bytes, &s);
    for (int64_t first = 0; first < all; first += h.entries_at_once) {
        const int64_t entries = ba_min(h.entries_at_once, all - first);
        load_all_entries(c, &s, &h, batch, first, entries);
        const int64_t begin = first_page * rows_per_page, end = ba_min(rows, end_page * rows_per_page);
        float *pages = c->page_scores + batch * c->rows * c->most_pages;
        if (h.heads_at_once) score_heads(c, &s, &h, batch, first, entries, begin, end, pages);
        else score_head_by_head(c, &s, &h, batch, first, entries, begin, end, pages);
    }
}

/* An integer that is larger for a higher score and, of equal scores, for the lower page. NaN counts as the lowest score. The low half holds ~page. */
static uint64_t order_key(float score, int64_t page) {
    uint32_t bits;
    if (score == 0) score = 0; /* -0 counts as 0 */
    memcpy(&bits, &score, sizeof bits);
    bits = score != score ? 0 : bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    return (uint64_t)bits << 32 | (uint32_t) ~(uint32_t)page;
}

static int by_falling_key(const void *left, const void *right) {
    const uint64_t a = *(const uint64_t *)left, b = *(const uint64_t *)right;
    return a < b ? 1 : a > b ? -1 : 0;
}

static void sort_falling(uint64_t *keys, int64_t n) {
    if (n > ba_work.quest.insertion_keys) {
        qsort(keys, (size_t)n, sizeof *keys, by_falling_key);
        return;
    }
    for (int64_t i = 1; i < n; i++) { /* qsort's call per comparison would cost more */
        const uint64_t key = keys[i];
        int64_t at = i;
        for (; at > 0 && keys[at - 1] < key; at--) keys[at] = keys[at - 1];
        keys[at] = key;
    }
}

static void swap_keys(uint64_t *a, uint64_t *b) {
    const uint64_t key = *a;
    *a = *b;
    *b = key;
}

/* Moves the `count` largest of n keys, all of which differ, to the front, in any order. This is quickselect; the loop over the keys partitions
 * them after Lomuto, without a branch that random keys would make the CPU mispredict. */
static void largest_first(uint64_t *keys, int64_t n, int64_t count) {
    for (int64_t low = 0, high = n; high - low > 1;) {
        uint64_t *last = &keys[high - 1], *middle = &keys[low + (high - low) / 2];
        if (keys[low] > *middle) swap_keys(&keys[low], middle); /* the median of three goes last */
        if (keys[low] > *last) swap_keys(&keys[low], last);
        if (*middle < *last) swap_keys(middle, last);
        const uint64_t pivot = *last;
        int64_t larger = low;
        for (int64_t i = low; i < high - 1; i++) {
            const uint64_t key = keys[i];
            keys[i] = keys[larger];
            keys[larger] = key;
            larger += key > pivot;
        }
        swap_keys(&keys[larger], last);
        if (larger == count || larger + 1 == count) return;
        if (larger > count) high = larger;
        else low = larger + 1;
    }
}

/* Writes the order_key() of some of the n pages from `first` on, among them the `count` best, and returns how many it has written. Most pages are
 * ruled out by a bound: page i belongs to class i mod `classes`, and each class has a largest score. The count-th highest of these largest scores is
 * reached by at least `count` pages, so no page below it can be among the best. */
static int64_t best_keys(const float *scores, int64_t first, int64_t n, int64_t count, float *largest, uint64_t *keys) {
    const int64_t classes = ba_max(2 * count, n / 16);
    if (count > 0 && 2 * classes <= n) {
        for (int64_t i = 0; i < classes; i++) largest[i] = scores[i] == scores[i] ? scores[i] : -INFINITY;
        for (int64_t begin = classes; begin < n; begin += classes)
            for (int64_t i = 0; i < ba_min(classes, n - begin); i++) largest[i] = scores[begin + i] > largest[i] ? scores[begin + i] : largest[i];
        for (int64_t i = 0; i < classes; i++) keys[i] = order_key(largest[i], i);
        largest_first(keys, classes, count);
        float least = INFINITY;
        for (int64_t i = 0; i < count; i++) {
            const float score = largest[(uint32_t) ~(uint32_t)keys[i]];
            least = score < least ? score : least;
        }
        int64_t used = 0;
        for (int64_t i = 0; i < n; i++)
            if (scores[i] >= least) keys[used++] = order_key(scores[i], first + i);
        if (used >= count) return used; /* fewer than `count` are left where scores are NaN: then all pages are written */
    }
    for (int64_t i = 0; i < n; i++) keys[i] = order_key(scores[i], first + i);
    return n;
}

static int by_rising_number(const void *left, const void *right) {
    const int32_t a = *(const int32_t *)left, b = *(const int32_t *)right;
    return a < b ? -1 : a > b;
}

/* Chooses the pages of one row of the result from the scores of the request's n pages, and writes the row. */
static void choose(const select_pages_call *c, const select_pages_scratch *s, int64_t batch, int64_t row, const float *scores, int64_t n) {
    const ba_select_args *args = c->args;
    const ba_tensor *out = &args->selected;
    const int64_t width = out->dims[2];
    const int64_t slots = ba_min(n, args->budget ? ba_min(width, args->budget[batch]) : width);
    const int64_t recent = ba_min(slots, ba_min(n, args->recent ? args->recent[batch] : 0));
    const int64_t sink = ba_min(slots - recent, ba_min(args->sink, n - recent));
    const int64_t free_slots = slots - recent - sink, candidates = n - recent - sink;
    int32_t *chosen = s->chosen;
    int64_t used = 0;
    for (int64_t i = 0; i < sink; i++) chosen[used++] = (int32_t)i;
    const int64_t keys = best_keys(scores + sink, sink, candidates, free_slots, s->largest, s->keys);
    if (free_slots > 0 && free_slots < keys) largest_first(s->keys, keys, free_slots);
    if (!args->ascending) sort_falling(s->keys, ba_min(free_slots, keys));
    for (int64_t i = 0; i < free_slots; i++) chosen[used++] = (int32_t)(uint32_t) ~(uint32_t)s->keys[i];
    for (int64_t i = recent; i > 0; i--) chosen[used++] = (int32_t)(n - i);
    if (args->ascending) qsort(chosen, (size_t)used, sizeof *chosen, by_rising_number);
    for (int64_t i = 0; i < width; i++)
        ((int32_t *)out->data)[batch * out->strides[0] + row * out->strides[1] + i * out->strides[2]] = i < used ? chosen[i] : -1;
    for (int64_t i = 0; ba_given(&args->scores) && i < width; i++)
        ((float *)args->scores.data)[batch * args->scores.strides[0] + row * args->scores.strides[1] + i * args->scores.strides[2]] =
            i < used ? scores[chosen[i]] : -INFINITY;
    if (ba_given(&args->counts)) ((int32_t *)args->counts.data)[batch * args->counts.strides[0] + row * args->counts.strides[1]] = (int32_t)used;
}

static void choose_item(void *context, int64_t item, int worker) {
    const select_pages_call *c = context;
    const int64_t batch = item / c->rows, n = queries_of(c, batch) ? ba_ceil_div(c->args->seq_lens[batch], c->args->page_size) : 0;
    select_pages_scratch s;
    lay_out_select_pages(c, c->scratch + worker * c->scratch_bytes, &s);
    choose(c, &s, batch, item % c->rows, c->page_scores + item * c->most_pages, n);
}

/* The name of the argument that the queries are compared with. */
static const char *summaries_name(const ba_select_args *a) {
    return a->method == BA_SELECT_QUEST ? "maxblocks" : a->method == BA_SELECT_MAX ? "k_cache" : "meanblocks";
}

static ba_status check_query(const ba_select_args *a, const ba_page_tables *opened) {
    const ba_tensor *q = &a->q;
    BA_TRY(ba_check_float("query", q));
    if (a->cu_q && (q->ndim != 3 || q->dims[1] < 1))
        return ba_fail(BA_ERROR_VALUE, BA_ARG("query") ": expected shape (T, H, D), got %s", ba_shape_text(q).chars);
    if (!a->cu_q && (q->ndim != 3 || (q->dims[0] != a->batch && !opened) || q->dims[1] < 1))
        return ba_fail(BA_ERROR_VALUE, BA_ARG("query") ": expected shape (%" PRId64 ", H, D), got %s", a->batch, ba_shape_text(q).chars);
    BA_TRY(ba_check_last_axis("query", q));
    if (opened && q->dims[0] != opened->queries)
        return ba_fail(BA_ERROR_VALUE, BA_ARG("query") ": expected %" PRId64 " queries as the plan has them, got %s", opened->queries,
                       ba_shape_text(q).chars);
    return ba_check_extent("query", q);
}

/* Checks the summaries or keys that queries are compared with, and puts them into `c`. */
static ba_status check_summaries(const ba_select_args *a, select_pages_call *c) {
    const ba_tensor *q = &a->q;
    const bool tokens = a->method == BA_SELECT_MAX;
    const char *name = summaries_name(a);
    BA_TRY(tokens ? ba_take_cache_pages(name, &a->a, a->kv_layout, &c->a) : ba_take_pages(name, &a->a, BA_NHD, &c->a));
    if ((a->a.dtype == BA_FLOAT64) != (q->dtype == BA_FLOAT64))
        return ba_fail(BA_ERROR_TYPE, BA_ARG("%s") ": expected %s with " BA_ARG("query") " of %s, got %s", name,
                       q->dtype == BA_FLOAT64 ? "float64" : "float32, float16 or bfloat16", ba_dtype_name(q->dtype), ba_dtype_name(a->a.dtype));
    if (c->a.dim != q->dims[2] || q->dims[1] % c->a.heads != 0)
        return ba_fail(BA_ERROR_VALUE,
                       BA_ARG("%s") ": expected D = %" PRId64
                                    ", as " BA_ARG("query") " has, and a number of heads that divides " BA_ARG("query") "'s %" PRId64 ", got %s",
                       name, q->dims[2], q->dims[1], ba_shape_text(&a->a).chars);
    BA_TRY(ba_check_cache_scale("k_scale", &a->k_scale, name, &a->a, tokens ? a->kv_layout : BA_NHD, c->a.heads, &c->k_scale));
    if (a->method != BA_SELECT_QUEST) return BA_OK;
    BA_TRY(ba_take_pages("minblocks", &a->b, BA_NHD, &c->b));
    if (a->b.dtype != a->a.dtype || !ba_same_shape(&a->b, &a->a))
        return ba_fail(BA_ERROR_VALUE, BA_ARG("minblocks") ": expected shape %s and dtype %s like " BA_ARG("maxblocks") ", got %s of %s",
                       ba_shape_text(&a->a).chars, ba_dtype_name(a->a.dtype), ba_shape_text(&a->b).chars, ba_dtype_name(a->b.dtype));
    return BA_OK;
}

/* Checks the page size, and the pages and queries of every request. */
static ba_status check_requests(const ba_select_args *a, const select_pages_call *c) {
    const bool tokens = a->method == BA_SELECT_MAX;
    if (c->opened && tokens && a->page_size != c->a.rows)
        return ba_fail(BA_ERROR_VALUE, BA_ARG("k_cache") ": expected pages of %" PRId64 " tokens as the plan has them, got pages of %" PRId64,
                       a->page_size, c->a.rows);
    if (a->page_size < 1) return ba_fail(BA_ERROR_VALUE, BA_ARG("block_size") ": expected at least 1 token per page, got %" PRId64, a->page_size);
    if (tokens && a->page_size != c->a.rows)
        return ba_fail(BA_ERROR_VALUE, BA_ARG("block_size") ": expected the %" PRId64 " tokens per page of " BA_ARG("k_cache") ", got %" PRId64,
                       c->a.rows, a->page_size);
    if (!a->seq_lens) return ba_fail(BA_ERROR_VALUE, BA_ARG("seq_lens") ": expected one length per request, got none");
    if (c->opened && tokens) BA_TRY(ba_check_page_numbers(c->opened, c->a.count));
    else
        BA_TRY(ba_check_table(tokens ? "block_tables" : "metadata_block_tables", &a->tables, a->batch, c->a.count, "seq_lens", a->seq_lens,
                              a->page_size, tokens ? 1 : c->a.rows));
    return c->opened ? BA_OK : ba_check_queries(a->cu_q, a->seq_lens, NULL, a->batch, a->q.dims[0]);
}

/* Checks the numbers of forced pages, and the budgets. */
static ba_status check_budgets(const ba_select_args *a) {
    if (a->sink < 0) return ba_fail(BA_ERROR_VALUE, BA_ARG("sink") ": expected at least 0 pages, got %" PRId64, a->sink);
    for (int64_t b = 0; b < a->batch; b++) {
        if (a->recent && a->recent[b] < 0)
            return ba_fail(BA_ERROR_VALUE, BA_ARG("recent") ": expected at least 0 pages, got %" PRId64 " at [%" PRId64 "]", a->recent[b], b);
        if (a->budget && a->budget[b] < 0)
            return ba_fail(BA_ERROR_VALUE, BA_ARG("budget") ": expected at least 0 pages, got %" PRId64 " at [%" PRId64 "]", a->budget[b], b);
    }
    return BA_OK;
}

/* `rows`: rows of the result per request. */
static ba_status check_outputs(const ba_select_args *a, int64_t rows) {
    const ba_tensor *out = &a->selected;
    ba_tensor expected = {.dtype = BA_INT32, .ndim = 3, .dims = {a->batch, rows, out->ndim == 3 ? out->dims[2] : 0}};
    BA_TRY(ba_check_output("selected_indices", out, &expected, false));
    if (out->dims[2] < 1) return ba_fail(BA_ERROR_VALUE, BA_ARG("k") ": expected at least 1 place per row, got %" PRId64, out->dims[2]);
    expected.dtype = BA_FLOAT32;
    if (ba_given(&a->scores)) BA_TRY(ba_check_output("scores", &a->scores, &expected, false));
    expected.dtype = BA_INT32;
    expected.ndim = 2;
    return ba_given(&a->counts) ? ba_check_output("counts", &a->counts, &expected, false) : BA_OK;
}

/* Checks a call, and fills `c` with its shape. */
static ba_status check_select(const ba_select_args *a, select_pages_call *c) {
    if ((unsigned)a->method > BA_SELECT_MAX) return ba_fail(BA_ERROR_VALUE, BA_ARG("method") ": expected quest, mean or max, got %d", (int)a->method);
    BA_TRY(check_query(a, c->opened));
    BA_TRY(check_summaries(a, c));
    BA_TRY(check_requests(a, c));
    BA_TRY(check_budgets(a));
    c->heads = a->q.dims[1];
    c->kv_heads = c->a.heads;
    c->group = c->heads / c->kv_heads;
    c->dim = a->q.dims[2];
    c->rows = a->per_query_head ? c->heads : c->kv_heads;
    BA_TRY(check_outputs(a, c->rows));
    return ba_check_threads(a->num_threads);
}

static ba_status select_blocks(const ba_select_args *args, const ba_page_tables *opened) {
    BA_IN_USUAL_MODE;
    select_pages_call c = {.args = args, .opened = opened, .most_pages = 1};
    BA_TRY(check_select(args, &c));
    if (args->batch == 0) return BA_OK;
    const ba_kernels *kernels = ba_kernels_active();
    c.family = kernels->vector[args->q.dtype];
    c.reals = kernels->vector[ba_real_of(args->q.dtype)];
    c.cache = kernels->cache[args->a.dtype];
    double work = 0;
    int64_t pages = 0, roomy = 0;
    for (int64_t b = 0; b < args->batch; b++) {
        const int64_t own = ba_ceil_div(args->seq_lens[b], args->page_size);
        c.most_pages = ba_max(c.most_pages, own);
        pages += own;
        const int64_t queries = queries_of(&c, b), entries = c.rows / c.kv_heads * queries;
        const double rows = (double)args->seq_lens[b] / (double)(args->method == BA_SELECT_MAX ? 1 : args->page_size);
        work += rows * (double)(c.kv_heads * c.dim) * (double)queries;
        if (entries != roomy && entries) make_room(&c, roomy = entries);
    }
    const int64_t rows_per_page = args->method == BA_SELECT_MAX ? args->page_size : 1;
    const int64_t most_items = args->batch * ba_max(c.rows, 1) + pages * rows_per_page / ba_work.quest.run_rows;
    const int threads = ba_threads_of_call(args->num_threads, work, ba_work.quest.small_products, most_items);
    c.run_pages = ba_ceil_div(ba_max(ba_work.quest.run_rows, pages * rows_per_page / (ba_work.quest.thread_runs * threads)), rows_per_page);
    c.runs = ba_ceil_div(c.most_pages, c.run_pages);
    select_pages_scratch unused;
    c.scratch_bytes = lay_out_select_pages(&c, NULL, &unused);
    char *memory;
    BA_TRY(ba_get_scratch(lay_out_call(&c, threads, NULL), &memory));
    lay_out_call(&c, threads, memory);
    for (int worker = 0; worker < threads; worker++) {
        select_pages_scratch s;
        lay_out_select_pages(&c, c.scratch + worker * c.scratch_bytes, &s);
        s.loaded[0] = -1;
    }
    ba_status status = ba_parallel(threads, args->batch * c.runs, score_item, &c);
    if (status == BA_OK) status = ba_parallel(threads, args->batch * c.rows, choose_item, &c);
    ba_arena_release();
    return status;
}

ba_status ba_select_blocks(const ba_select_args *args) {
    BA_TRY(ba_check_pointer("args", args));
    return select_blocks(args, NULL);
}

ba_status ba_select_by_tables(const ba_select_args *args, const ba_page_tables *opened) {
    ba_select_args reused = *args;
    if (opened->q_begin)
        return ba_fail(
            BA_ERROR_VALUE,
            BA_ARG("q_begin") ": expected none, because blocks are selected only for queries that are the last tokens of their requests, got some");
    reused.seq_lens = opened->seq_lens;
    reused.cu_q = opened->cu_q;
    reused.batch = opened->batch;
    reused.page_size = opened->page_size;
    return select_blocks(&reused, opened);
}
