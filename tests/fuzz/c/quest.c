/* Calls that make summaries of pages, and that select pages. */
#include "fuzz.h"

typedef struct sizes {
    ba_dtype dtype;
    int64_t batch, pages, page_size, heads, kv_heads, dim, width; /* `width` is that of block tables */
    int64_t rows, summary_pages, summary_width;
} sizes;

static sizes draw_sizes(void) {
    static const int64_t page_sizes[] = {16, 1, 2, 3, 4, 8, 5, 32, 64}, groups[] = {1, 2, 3, 4, 9};
    sizes s = {.dtype = fz_float(), .batch = fz_once_in(16) ? 0 : fz_range(1, 4), .page_size = fz_pick(page_sizes, 9)};
    s.kv_heads = fz_range(1, 4);
    s.heads = s.kv_heads * fz_pick(groups, 5);
    s.width = fz_once_in(6) ? fz_range(0, 200) : fz_range(0, 12);
    s.dim = fz_head_dim();
    while (s.width > 1 && (double)(s.width * s.page_size * s.kv_heads * s.dim) > 4e4) s.width /= 2;
    s.rows = fz_once_in(4) ? fz_range(1, 40) : fz_pick(page_sizes, 9);
    s.summary_width = s.width / s.rows + 1;
    s.pages = s.width + fz_range(1, 5);
    s.summary_pages = s.summary_width * s.batch + fz_range(1, 3);
    while (s.summary_pages > s.summary_width && (double)(s.summary_pages * s.rows * s.kv_heads * s.dim) > 2e5) s.summary_pages /= 2;
    return s;
}

static ba_tensor draw_cache(const sizes *s, ba_dtype dtype, ba_kv_layout layout) {
    const bool hnd = layout == BA_HND;
    const int64_t dims[] = {s->pages, hnd ? s->kv_heads : s->page_size, hnd ? s->page_size : s->kv_heads, s->dim};
    return fz_tensor(FZ_INPUT, dtype, 4, dims, 0);
}

static ba_tensor draw_summaries(const sizes *s, fz_role role) {
    const int64_t dims[] = {s->summary_pages, s->rows, s->kv_heads, s->dim};
    return fz_tensor(role, s->dtype, 4, dims, 0);
}

static ba_tensor draw_table(const sizes *s, int64_t width, int64_t pages, bool distinct) {
    const int64_t dims[] = {s->batch, width};
    const ba_tensor t = fz_tensor(FZ_INPUT, fz_once_in(2) ? BA_INT64 : BA_INT32, 2, dims, FZ_FREE_LAST);
    fz_fill_table(&t, pages, distinct);
    return t;
}

static bool is_heavy(const ba_tensor *a, const ba_tensor *table, const int64_t *lengths, int64_t batch) {
    double tokens = 0;
    if (a->dims[1] > 1 << 20 || a->dims[2] > 1 << 20 || table->dims[1] > 1 << 20) return true;
    for (int64_t b = 0; lengths && b < batch && b < 100; b++) tokens += lengths[b] > 0 ? (double)lengths[b] : 0;
    return (fz_elements(a) > 1e6 && fz_elements(a) < 1e18) || fz_elements(table) > 1e6 || (tokens > 1e5 && tokens < 1e12);
}

static const int64_t eight_bits[] = {BA_INT8, BA_FLOAT8_E4M3};

static ba_status metadata(const void *args) { return ba_quest_metadata(args); }

void fz_quest_metadata(void) {
    sizes s = draw_sizes();
    ba_quest_metadata_args a = {.kv_layout = (ba_kv_layout)fz_range(BA_NHD, BA_HND), .batch = fz_unusual() ? fz_unusual_number() : s.batch};
    const bool eight = fz_once_in(4);
    a.k_cache = draw_cache(&s, eight ? (ba_dtype)fz_pick(eight_bits, 2) : s.dtype, a.kv_layout);
    if (eight) s.dtype = BA_FLOAT32; /* of the summaries */
    if (eight != fz_unusual()) a.k_scale = fz_scales(a.k_cache.dims, s.kv_heads, FZ_INPUT);
    if (fz_unusual()) a.kv_layout = (ba_kv_layout)fz_unusual_number();
    a.block_tables = draw_table(&s, s.width, s.pages, fz_once_in(2));
    a.end = fz_lengths(a.batch, s.width * s.page_size);
    if (fz_once_in(3)) a.begin = fz_lengths(a.batch, s.width * s.page_size);
    a.metadata_tables = draw_table(&s, s.summary_width, s.summary_pages, true);
    if (s.summary_pages < s.summary_width * s.batch || a.metadata_tables.strides[0] == 0 || a.metadata_tables.strides[1] == 0)
        fz_expect_any_order(); /* a summary page may be written for two requests */
    const int64_t wanted = fz_range(0, 6);
    if (wanted <= 4) a.maxblocks = draw_summaries(&s, FZ_PARTIAL);
    if (wanted <= 3) a.minblocks = draw_summaries(&s, FZ_PARTIAL);
    if (wanted == 0 || wanted == 5) a.meanblocks = draw_summaries(&s, FZ_PARTIAL);
    a.num_threads = fz_threads();
    const ba_tensor *const summaries[] = {&a.maxblocks, &a.minblocks, &a.meanblocks};
    bool heavy = is_heavy(&a.k_cache, &a.block_tables, a.end, a.batch) || fz_elements(&a.metadata_tables) > 1e6;
    for (int i = 0; i < 3; i++) heavy |= fz_elements(summaries[i]) > 1e6 || summaries[i]->dims[1] > 1 << 20;
    if (heavy) fz_count_skipped(FZ_QUEST_METADATA);
    else fz_run(FZ_QUEST_METADATA, metadata, &a, &a.num_threads);
}

/* Draws the number of queries of each request, `*queries` in all. */
static int64_t *draw_queries(const ba_select_args *a, int64_t *queries) {
    int64_t *cu = a->batch < INT64_MAX ? fz_numbers(a->batch + 1) : NULL;
    *queries = 0;
    fz_seed();
    for (int64_t b = 0; cu && a->seq_lens && b < a->batch; b++) {
        *queries += fz_below((a->seq_lens[b] < 0 ? 0 : a->seq_lens[b] < 5 ? a->seq_lens[b] : 5) + 1);
        cu[b + 1] = *queries;
    }
    if (cu && a->batch >= 0 && fz_unusual()) cu[fz_below(a->batch + 1)] = fz_unusual_number();
    else if (cu && a->batch >= 0 && fz_unusual()) cu[fz_below(a->batch + 1)] += fz_range(-1, 1);
    return cu;
}

static ba_status select_blocks(const void *args) { return ba_select_blocks(args); }

void fz_select(void) {
    static const fz_op ops[] = {FZ_SELECT_QUEST, FZ_SELECT_MEAN, FZ_SELECT_MAX};
    const sizes s = draw_sizes();
    ba_select_args a = {.method = (ba_select_method)fz_range(BA_SELECT_QUEST, BA_SELECT_MAX), .page_size = s.page_size};
    const bool tokens = a.method == BA_SELECT_MAX, eight = tokens && fz_once_in(4);
    fz_op op = ops[a.method];
    a.batch = fz_unusual() ? fz_unusual_number() : s.batch;
    a.kv_layout = (ba_kv_layout)fz_range(BA_NHD, BA_HND);
    int64_t q[] = {s.batch, s.heads, s.dim};
    a.seq_lens = fz_lengths(a.batch, s.width * s.page_size);
    if (fz_once_in(3)) a.cu_q = draw_queries(&a, &q[0]);
    a.q = fz_tensor(FZ_INPUT, s.dtype, 3, q, 0);
    a.a = tokens ? draw_cache(&s, eight ? (ba_dtype)fz_pick(eight_bits, 2) : s.dtype, a.kv_layout) : draw_summaries(&s, FZ_INPUT);
    if (eight != fz_unusual()) a.k_scale = fz_scales(a.a.dims, s.kv_heads, FZ_INPUT);
    if (a.method == BA_SELECT_QUEST) a.b = draw_summaries(&s, FZ_INPUT);
    if (fz_unusual()) a.kv_layout = (ba_kv_layout)fz_unusual_number();
    a.tables = draw_table(&s, tokens ? s.width : s.summary_width, tokens ? s.pages : s.summary_pages, fz_once_in(2));
    if (fz_unusual()) a.page_size = fz_range(-1, 100);
    a.per_query_head = fz_once_in(2);
    a.sink = fz_unusual() ? fz_unusual_number() : fz_once_in(2) ? fz_range(0, 4) : 0;
    if (fz_once_in(3)) a.recent = fz_lengths(a.batch, 5);
    if (fz_once_in(3)) a.budget = fz_lengths(a.batch, s.width + 1);
    a.ascending = fz_once_in(2);
    const int64_t dims[] = {s.batch, a.per_query_head ? s.heads : s.kv_heads, fz_once_in(2) ? fz_range(1, 12) : s.width + 1};
    a.selected = fz_tensor(FZ_OUTPUT, BA_INT32, 3, dims, FZ_FREE_LAST);
    if (fz_once_in(2)) a.counts = fz_tensor(FZ_OUTPUT, BA_INT32, 2, dims, FZ_FREE_LAST);
    if (fz_once_in(3)) a.scores = fz_tensor(FZ_OUTPUT, BA_FLOAT32, 3, dims, FZ_FREE_LAST);
    a.num_threads = fz_threads();
    if (fz_unusual()) {
        a.method = (ba_select_method)fz_unusual_number();
        op = FZ_SELECT_ODD;
        fz_unseen(&a.b);
    }
    if (is_heavy(&a.a, &a.tables, a.seq_lens, a.batch) || fz_elements(&a.q) > 1e6) fz_count_skipped(op);
    else fz_run(op, select_blocks, &a, &a.num_threads);
}
