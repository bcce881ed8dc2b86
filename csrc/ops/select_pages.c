/* Selects pages by their summaries (Quest), or by their keys. */
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "core/arena.h"
#include "core/pool.h"
#include "core/status.h"
#include "kernels/kernels.h"
#include "kernels/prefetch_rows.h"
#include "kernels/work_tuning.h"
#include "ops/check.h"
#include "ops/pages.h"
#include "ops/scratch.h"

/* Selection takes two jobs. The items of the first are stretches of pages, each scored for all heads, because the heads of a page lie close
 * together in memory. The items of the second are the rows of the result, each chosen from the scores of all its pages. */
typedef struct select_call {
    const ba_select_args *args;
    ba_pages a, b;
    int64_t heads, kv_heads, group, dim, most_pages;
    int64_t rows;                   /* rows of the result per request */
    int64_t stretch, stretches;     /* pages per stretch; the largest number of stretches in a request */
    int64_t chunk_rows;             /* rows of `a` that are scored for every head before the next rows are */
    int64_t heads_at_once;          /* 0: the kernel for few queries scores one head after the other. Else so many heads read each row together */
    int64_t ahead;                  /* where heads read rows together: rows that are prefetched ahead */
    int64_t queries_at_once;        /* queries of each head that are scored in one pass over the rows */
    const ba_attend_family *family; /* for the queries' dtype */
    const ba_cache_kernels *cache;
    int64_t scratch_bytes;
    char *scratch;
    float *page_scores; /* [request][row][most_pages] */
} select_call;

typedef struct select_scratch {
    int64_t *loaded; /* [2]: the request, and the first query of each group, that `q` holds; -1: none yet */
    char *q;         /* [KV head][query], packed */
    char *one_query; /* one query of a group, while the group's mean is made */
    char *scores;
    struct rows_at {
        const void **a, **b;
        int64_t count;
    } rows[2];      /* the rows of the current chunk, and of the next one */
    float *largest; /* [most_pages]: for best_keys() */
    uint64_t *keys; /* [most_pages]: order_key() of the pages that compete */
    int32_t *chosen;
} select_scratch;

/* Hands out the parts of one worker's scratch memory at `base` and returns their size; with base NULL, only the size counts. */
static int64_t lay_out_select(const select_call *c, char *base, select_scratch *s) {
    const int64_t real = c->family->real_size, queries = c->queries_at_once, rows = c->chunk_rows + c->ahead;
    int64_t used = 0;
    s->loaded = (int64_t *)ba_take(base, &used, 2 * (int64_t)sizeof(int64_t));
    s->q = ba_take(base, &used, c->kv_heads * queries * BA_FEW_PAD(c->dim) * real);
    s->one_query = ba_take(base, &used, BA_FEW_PAD(c->dim) * real);
    s->scores = ba_take(base, &used, (ba_max(1, c->heads_at_once) * queries * rows + 16) * real);
    for (int i = 0; i < 2; i++) {
        s->rows[i].a = (const void **)ba_take(base, &used, rows * (int64_t)sizeof(void *));
        s->rows[i].b = (const void **)ba_take(base, &used, rows * (int64_t)sizeof(void *));
    }
    s->largest = (float *)ba_take(base, &used, c->most_pages * (int64_t)sizeof(float));
    s->keys = (uint64_t *)ba_take(base, &used, c->most_pages * (int64_t)sizeof(uint64_t));
    s->chosen = (int32_t *)ba_take(base, &used, c->most_pages * (int64_t)sizeof(int32_t));
    return used;
}

/* Bytes from one head's packed queries to the next head's. The kernel for few queries needs room for BA_FEW_QUERIES whatever their number. */
static int64_t head_bytes(const select_call *c, int64_t queries) {
    return (c->heads_at_once ? queries : BA_FEW_QUERIES) * BA_FEW_PAD(c->dim) * c->family->real_size;
}

/* Packs `queries` queries of a (request, KV head)'s group, from query `first` of the group on; without per_query_head, the mean of the group. */
static void load_queries(const select_call *c, const select_scratch *s, int64_t batch, int64_t kv_head, int64_t first, int64_t queries) {
    const ba_tensor *q = &c->args->q;
    const int64_t real = c->family->real_size, pad = BA_FEW_PAD(c->dim), size = ba_dtype_size(q->dtype), bytes = head_bytes(c, queries);
    const char *row = (const char *)q->data + (batch * q->strides[0] + (kv_head * c->group + first) * q->strides[1]) * size;
    char *packed = s->q + kv_head * bytes;
    const void *rows[BA_FEW_QUERIES];
    memset(packed, 0, (size_t)bytes);
    if (!c->args->per_query_head) {
        for (int64_t g = 0; g < c->group; g++) {
            rows[0] = row + g * q->strides[1] * size;
            c->family->few->pack_queries(s->one_query, rows, 1, c->dim, 1 / (double)c->group);
            ba_add_reals(packed, s->one_query, c->dim, real);
        }
        return;
    }
    for (int64_t g = 0; g < queries; g++) {
        rows[g] = row + g * q->strides[1] * size;
        if (c->heads_at_once) c->family->few->pack_queries(packed + g * pad * real, rows + g, 1, c->dim, 1);
    }
    if (c->heads_at_once) return;
    c->family->few->pack_queries(packed, rows, queries, c->dim, 1);
    if (c->cache->order_few) c->cache->order_few(packed, queries, c->dim);
}

/* The same for all KV heads, unless this thread's previous item has left the same queries there. */
static void load_all_queries(const select_call *c, const select_scratch *s, int64_t batch, int64_t first, int64_t queries) {
    if (s->loaded[0] == batch && s->loaded[1] == first) return;
    for (int64_t head = 0; head < c->kv_heads; head++) load_queries(c, s, batch, head, first, queries);
    s->loaded[0] = batch;
    s->loaded[1] = first;
}

/* Finds where the rows from `begin` to `end` of a request lie, for head 0. */
static void find_rows(const select_call *c, int64_t batch, int64_t begin, int64_t end, struct rows_at *rows) {
    rows->count = ba_max(0, end - begin);
    for (int64_t at = begin; at < end;) { /* page by page, because a division per row would cost time */
        const int64_t page = ba_table_page(&c->args->tables, batch, at / c->a.rows), row = at % c->a.rows, some = ba_min(end - at, c->a.rows - row);
        const char *a = ba_page_row(&c->a, page, row, 0), *b = c->args->method == BA_SELECT_QUEST ? ba_page_row(&c->b, page, row, 0) : NULL;
        for (int64_t i = at - begin; i < at - begin + some; i++, a += c->a.row_stride) rows->a[i] = a;
        for (int64_t i = at - begin; b && i < at - begin + some; i++, b += c->b.row_stride) rows->b[i] = b;
        at += some;
    }
}

static ba_prefetch_rows rows_ahead(const select_call *c, const ba_pages *p, int64_t head, const void *const *rows, int64_t count) {
    return ba_rows_ahead(p->head_stride, p->row_stride, c->kv_heads, head, c->dim * ba_dtype_size(c->args->a.dtype), rows, count);
}

/* Scores one head's rows, and prefetches its share of the next rows meanwhile. */
static void score_rows(const select_call *c, const ba_pages *p, const char *q, int64_t queries, int64_t head, const void *const *rows, int64_t count,
                       const void *const *next, int64_t next_count, char *scores) {
    const ba_prefetch_rows ahead = rows_ahead(c, p, head, next, next_count);
    c->cache->scores(q + head * head_bytes(c, queries), queries, rows, head * p->head_stride, &ahead, count, c->dim, scores, c->chunk_rows);
}

/* Prefetches the first rows of a stretch for all heads. (Later rows are prefetched while the rows before them are scored.) */
static void prefetch_rows(const select_call *c, const ba_pages *p, const void *const *rows, int64_t count) {
    for (int64_t head = 0; head < c->kv_heads; head++) {
        const ba_prefetch_rows ahead = rows_ahead(c, p, head, rows, count);
        ba_prefetch_to_keep(c->cache->prefetch_level, ahead.rows, ahead.count, ahead.offset, ahead.bytes, false);
    }
}

/* Turns the scores of one query with `count` rows from row `at` on, which stand `step` apart, into scores of pages. A row of summaries is a page.
 * For BA_SELECT_MAX a row is a token, and a page's score is the largest of its tokens' scores, NaN where one of them is NaN. */
static void keep_scores(const select_call *c, int64_t at, int64_t count, const char *scores, int64_t step, float *pages) {
    const int64_t real = c->family->real_size, size = c->args->page_size;
    if (c->args->method == BA_SELECT_MAX) {
        for (int64_t i = 0; i < count; i++) {
            const double score = ba_get_real(scores, i * step, real);
            float *page = &pages[(at + i) / size];
            if ((at + i) % size == 0 || score > (double)*page || score != score) *page = (float)score;
        }
    } else if (real == 4) {
        for (int64_t i = 0; i < count; i++) pages[at + i] = ((const float *)scores)[i * step];
    } else {
        for (int64_t i = 0; i < count; i++) pages[at + i] = (float)ba_get_real(scores, i * step, real);
    }
}

/* Scores the loaded queries of every head with the rows from `begin` to `end`, one head after the other. Writes to `out`, [query][most_pages] of
 * head 0; the other heads' follow at a distance of rows_per_head rows. */
static void score_stretch(const select_call *c, select_scratch *s, int64_t batch, int64_t queries, int64_t begin, int64_t end, float *out) {
    const int64_t real = c->family->real_size, row_step = c->rows / c->kv_heads * c->most_pages;
    find_rows(c, batch, begin, ba_min(end, begin + c->chunk_rows), &s->rows[0]);
    prefetch_rows(c, &c->a, s->rows[0].a, s->rows[0].count);
    for (int64_t at = begin, here = 0; at < end; at += c->chunk_rows, here = !here) {
        const struct rows_at *rows = &s->rows[here], *next = &s->rows[!here];
        find_rows(c, batch, at + c->chunk_rows, ba_min(end, at + 2 * c->chunk_rows), &s->rows[!here]);
        for (int64_t head = 0; head < c->kv_heads; head++) {
            score_rows(c, &c->a, s->q, queries, head, rows->a, rows->count, next->a, next->count, s->scores);
            for (int64_t g = 0; g < queries; g++)
                keep_scores(c, at, rows->count, s->scores + g * c->chunk_rows * real, 1, out + head * row_step + g * c->most_pages);
        }
    }
}

/* The same, where several heads read each row together. */
static void score_heads(const select_call *c, select_scratch *s, int64_t batch, int64_t queries, int64_t begin, int64_t end, float *out) {
    const int64_t real = c->family->real_size, row_step = c->rows / c->kv_heads * c->most_pages;
    const int64_t sides = c->args->method == BA_SELECT_QUEST ? 2 : 1;
    struct rows_at *rows = &s->rows[0];
    for (int64_t at = begin; at < end; at += c->chunk_rows) {
        const int64_t count = ba_min(c->chunk_rows, end - at);
        find_rows(c, batch, at, ba_min(end, at + count + c->ahead), rows);
        for (int64_t first = 0; first < c->kv_heads; first += c->heads_at_once) {
            const int64_t heads = ba_min(c->heads_at_once, c->kv_heads - first);
            const ba_side side[2] = {{rows->a, first * c->a.head_stride, c->a.head_stride}, {rows->b, first * c->b.head_stride, c->b.head_stride}};
            c->cache->score_heads(side, sides, s->q + first * head_bytes(c, queries), queries, heads, count, rows->count, c->ahead, c->dim,
                                  s->scores);
            for (int64_t h = 0; h < heads; h++)
                for (int64_t g = 0; g < queries; g++)
                    keep_scores(c, at, count, s->scores + (h * queries + g) * real, heads * queries,
                                out + (first + h) * row_step + g * c->most_pages);
        }
    }
}

/* Scores one stretch of pages of one request, for all heads. */
static void score_item(void *context, int64_t item, int worker) {
    const select_call *c = context;
    const ba_select_args *args = c->args;
    const int64_t batch = item / c->stretches, n = ba_ceil_div(args->seq_lens[batch], args->page_size);
    const int64_t first_page = item % c->stretches * c->stretch, end_page = ba_min(n, first_page + c->stretch);
    const int64_t rows_per_page = args->method == BA_SELECT_MAX ? args->page_size : 1, rows_per_head = c->rows / c->kv_heads;
    const int64_t rows = rows_per_page == 1 ? n : args->seq_lens[batch];
    if (first_page >= end_page) return;
    select_scratch s;
    lay_out_select(c, c->scratch + worker * c->scratch_bytes, &s);
    for (int64_t first = 0; first < rows_per_head; first += c->queries_at_once) {
        const int64_t queries = ba_min(c->queries_at_once, rows_per_head - first);
        load_all_queries(c, &s, batch, first, queries);
        const int64_t begin = first_page * rows_per_page, end = ba_min(rows, end_page * rows_per_page);
        float *out = c->page_scores + (batch * c->rows + first) * c->most_pages;
        if (c->heads_at_once) score_heads(c, &s, batch, queries, begin, end, out);
        else score_stretch(c, &s, batch, queries, begin, end, out);
    }
}

/* An integer that is larger for a higher score and, of equal scores, for the lower page. NaN gives the smallest. The low half holds ~page. */
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

/* Writes the keys of some of the n pages from `first` on, among them the `count` best, and returns how many it has written. Most pages are ruled
 * out by a bound: page i belongs to group i mod `groups`, and each group has a largest score. The count-th highest of these largest scores is
 * reached by at least `count` pages, so no page below it can be among the best. */
static int64_t best_keys(const float *scores, int64_t first, int64_t n, int64_t count, float *largest, uint64_t *keys) {
    const int64_t groups = ba_max(2 * count, n / 16);
    if (count > 0 && 2 * groups <= n) {
        for (int64_t i = 0; i < groups; i++) largest[i] = scores[i] == scores[i] ? scores[i] : -INFINITY;
        for (int64_t begin = groups; begin < n; begin += groups)
            for (int64_t i = 0; i < ba_min(groups, n - begin); i++) largest[i] = scores[begin + i] > largest[i] ? scores[begin + i] : largest[i];
        for (int64_t i = 0; i < groups; i++) keys[i] = order_key(largest[i], i);
        largest_first(keys, groups, count);
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
static void choose(const select_call *c, const select_scratch *s, int64_t batch, int64_t row, const float *scores, int64_t n) {
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
    const select_call *c = context;
    const int64_t batch = item / c->rows, n = ba_ceil_div(c->args->seq_lens[batch], c->args->page_size);
    select_scratch s;
    lay_out_select(c, c->scratch + worker * c->scratch_bytes, &s);
    choose(c, &s, batch, item % c->rows, c->page_scores + item * c->most_pages, n);
}

static ba_status check_select(const ba_select_args *a, select_call *c) {
    const ba_tensor *q = &a->q, *out = &a->selected;
    const bool quest = a->method == BA_SELECT_QUEST, tokens = a->method == BA_SELECT_MAX;
    const char *a_name = quest ? "maxblocks" : tokens ? "k_cache" : "meanblocks", *table_name = tokens ? "block_tables" : "metadata_block_tables";
    if ((unsigned)a->method > BA_SELECT_MAX) return ba_fail(BA_ERROR_VALUE, "method: expected quest, mean or max, got %d", (int)a->method);
    if (!ba_is_float(q->dtype))
        return ba_fail(BA_ERROR_TYPE, "query: expected float32, float16, bfloat16 or float64, got %s", ba_dtype_name(q->dtype));
    if (q->ndim != 3 || q->dims[0] != a->batch || q->dims[1] < 1)
        return ba_fail(BA_ERROR_VALUE, "query: expected shape (%" PRId64 ", H, D), got %s", a->batch, ba_shape_text(q).chars);
    if (q->dims[2] > 1 && q->strides[2] != 1)
        return ba_fail(BA_ERROR_VALUE, "query: expected a contiguous last axis, got stride %" PRId64 " elements", q->strides[2]);
    BA_TRY(ba_check_extent("query", q));
    BA_TRY(ba_take_pages(a_name, &a->a, tokens ? a->kv_layout : BA_NHD, &c->a));
    if ((a->a.dtype == BA_FLOAT64) != (q->dtype == BA_FLOAT64))
        return ba_fail(BA_ERROR_TYPE, "%s: expected %s with query of %s, got %s", a_name,
                       q->dtype == BA_FLOAT64 ? "float64" : "float32, float16 or bfloat16", ba_dtype_name(q->dtype), ba_dtype_name(a->a.dtype));
    if (c->a.dim != q->dims[2] || q->dims[1] % c->a.heads != 0)
        return ba_fail(BA_ERROR_VALUE, "%s: expected D = %" PRId64 " and a number of heads that divides %" PRId64 " like query, got %s", a_name,
                       q->dims[2], q->dims[1], ba_shape_text(&a->a).chars);
    if (quest) {
        BA_TRY(ba_take_pages("minblocks", &a->b, BA_NHD, &c->b));
        bool same = a->b.dtype == a->a.dtype;
        for (int i = 0; i < 4; i++) same = same && a->b.dims[i] == a->a.dims[i];
        if (!same)
            return ba_fail(BA_ERROR_VALUE, "minblocks: expected shape %s and dtype %s like maxblocks, got %s of %s", ba_shape_text(&a->a).chars,
                           ba_dtype_name(a->a.dtype), ba_shape_text(&a->b).chars, ba_dtype_name(a->b.dtype));
    }
    if (a->page_size < 1) return ba_fail(BA_ERROR_VALUE, "block_size: expected at least 1 token per page, got %" PRId64, a->page_size);
    if (tokens && a->page_size != c->a.rows)
        return ba_fail(BA_ERROR_VALUE, "block_size: expected the %" PRId64 " tokens per page of k_cache, got %" PRId64, c->a.rows, a->page_size);
    if (!a->seq_lens) return ba_fail(BA_ERROR_VALUE, "seq_lens: expected one length per request, got none");
    BA_TRY(ba_check_table(table_name, &a->tables, a->batch, c->a.count, a->seq_lens, a->page_size, tokens ? 1 : c->a.rows));
    if (a->sink < 0) return ba_fail(BA_ERROR_VALUE, "sink: expected at least 0 pages, got %" PRId64, a->sink);
    for (int64_t b = 0; b < a->batch; b++) {
        if (a->recent && a->recent[b] < 0)
            return ba_fail(BA_ERROR_VALUE, "recent: expected at least 0 pages, got %" PRId64 " at [%" PRId64 "]", a->recent[b], b);
        if (a->budget && a->budget[b] < 0)
            return ba_fail(BA_ERROR_VALUE, "budget: expected at least 0 pages, got %" PRId64 " at [%" PRId64 "]", a->budget[b], b);
    }
    const int64_t rows = a->per_query_head ? q->dims[1] : c->a.heads;
    ba_tensor expected = {.dtype = BA_INT32, .ndim = 3, .dims = {a->batch, rows, out->ndim == 3 ? out->dims[2] : 0}};
    BA_TRY(ba_check_output("selected_indices", out, &expected, false));
    if (out->dims[2] < 1) return ba_fail(BA_ERROR_VALUE, "k: expected at least 1 place per row, got %" PRId64, out->dims[2]);
    expected.dtype = BA_FLOAT32;
    if (ba_given(&a->scores)) BA_TRY(ba_check_output("scores", &a->scores, &expected, false));
    expected.dtype = BA_INT32;
    expected.ndim = 2;
    if (ba_given(&a->counts)) BA_TRY(ba_check_output("counts", &a->counts, &expected, false));
    BA_TRY(ba_check_threads(a->num_threads));
    c->heads = q->dims[1];
    c->kv_heads = c->a.heads;
    c->group = c->heads / c->kv_heads;
    c->dim = q->dims[2];
    return BA_OK;
}

/* Decides how many heads and queries read each row together. Quest's bound has only a kernel in which several heads and queries share one pass over
 * the rows. For products, that kernel serves single queries; the kernel for few queries is faster for more. Where the heads of a row do not lie
 * side by side, one head reads all rows before the next head does. */
static void share_rows_among_heads(select_call *c) {
    const int64_t most = BA_HEADS_REALS / ba_round_up(c->dim, 32), queries = c->rows / c->kv_heads;
    c->heads_at_once = 0;
    c->queries_at_once = BA_FEW_QUERIES;
    if (queries > 1 && c->args->method != BA_SELECT_QUEST) return;
    c->queries_at_once = ba_min(queries, ba_min(most, BA_FEW_QUERIES));
    c->heads_at_once = c->a.head_stride >= c->a.row_stride ? 1 : ba_max(1, ba_min(c->kv_heads, most / c->queries_at_once));
}

ba_status ba_select_blocks(const ba_select_args *args) {
    select_call c = {.args = args, .most_pages = 1};
    BA_TRY(check_select(args, &c));
    if (args->batch == 0) return BA_OK;
    const ba_kernels *kernels = ba_kernels_active();
    c.family = kernels->vector[args->q.dtype];
    c.cache = kernels->cache[args->a.dtype];
    double work = 0;
    int64_t pages = 0;
    for (int64_t b = 0; b < args->batch; b++) {
        const int64_t own = ba_ceil_div(args->seq_lens[b], args->page_size);
        c.most_pages = ba_max(c.most_pages, own);
        pages += own;
        work += (double)args->seq_lens[b] / (double)(args->method == BA_SELECT_MAX ? 1 : args->page_size) * (double)(c.kv_heads * c.dim);
    }
    c.rows = args->per_query_head ? c.heads : c.kv_heads;
    const int64_t rows_per_page = args->method == BA_SELECT_MAX ? args->page_size : 1;
    const int64_t most_items = args->batch * ba_max(c.rows, 1) + pages * rows_per_page / ba_work.quest.stretch_rows;
    const int threads = ba_threads_of_call(args->num_threads, work, ba_work.quest.small_products, most_items);
    share_rows_among_heads(&c);
    c.ahead = c.heads_at_once
                  ? ba_min(ba_work.quest.ahead_rows, ba_ceil_div(ba_work.quest.ahead_bytes, c.heads_at_once * c.dim * ba_dtype_size(args->a.dtype)))
                  : 0;
    c.chunk_rows = c.heads_at_once ? ba_work.quest.chunk_rows : ba_work.quest.single_chunk_rows;
    c.stretch = ba_ceil_div(ba_max(ba_work.quest.stretch_rows, pages * rows_per_page / (ba_work.quest.thread_stretches * threads)), rows_per_page);
    c.stretches = ba_ceil_div(c.most_pages, c.stretch);
    select_scratch unused;
    c.scratch_bytes = lay_out_select(&c, NULL, &unused);
    char *memory = NULL;
    for (int pass = 0; pass < 2; pass++) { /* the first pass adds up the bytes, the second hands out memory */
        int64_t used = 0;
        c.page_scores = (float *)ba_take(memory, &used, args->batch * c.rows * c.most_pages * (int64_t)sizeof(float));
        c.scratch = ba_take(memory, &used, threads * c.scratch_bytes);
        if (!memory) memory = ba_arena_get((size_t)used);
        if (!memory) return ba_fail(BA_ERROR_MEMORY, "scratch: expected %lld bytes of memory, got none", (long long)used);
    }
    for (int worker = 0; worker < threads; worker++) {
        select_scratch s;
        lay_out_select(&c, c.scratch + worker * c.scratch_bytes, &s);
        s.loaded[0] = -1;
    }
    ba_status status = ba_parallel(threads, args->batch * c.stretches, score_item, &c);
    if (status == BA_OK) status = ba_parallel(threads, args->batch * c.rows, choose_item, &c);
    ba_arena_release();
    return status;
}
