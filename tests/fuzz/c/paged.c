/* Calls of attention over a paged cache, of writing into it, of merging, and of quantisation. */
#include <math.h>

#include "fuzz.h"

typedef struct sizes {
    ba_dtype dtype, cache;
    int64_t batch, queries, heads, kv_heads, pages, page_size, width, most_tokens, dim, v_dim;
} sizes;

static sizes draw_sizes(void) {
    static const int64_t caches[] = {BA_FLOAT32, BA_BFLOAT16, BA_FLOAT16, BA_INT8, BA_FLOAT8_E4M3}, groups[] = {1, 2, 3, 4, 8, 9, 16};
    static const int64_t page_sizes[] = {16, 1, 2, 3, 4, 8, 5, 32, 64, 128};
    sizes s = {.dtype = fz_float(), .batch = fz_once_in(16) ? 0 : fz_range(1, 4)};
    s.cache = s.dtype == BA_FLOAT64 ? BA_FLOAT64 : fz_once_in(2) ? s.dtype : (ba_dtype)fz_pick(caches, 5);
    s.kv_heads = fz_range(1, 3);
    s.heads = s.kv_heads * fz_pick(groups, 7);
    s.page_size = fz_pick(page_sizes, 10);
    s.width = fz_once_in(8) ? fz_range(0, 60) : fz_range(0, 8);
    s.dim = fz_head_dim();
    s.v_dim = fz_once_in(3) ? fz_head_dim() : s.dim;
    while (s.width > 1 && (double)(s.width * s.page_size * s.kv_heads * (s.dim + s.v_dim)) > 4e4) s.width /= 2;
    s.pages = fz_range(1, 4) * s.width + fz_range(0, 3);
    while (s.pages > 1 && (double)(s.pages * s.page_size * s.kv_heads * (s.dim + s.v_dim)) > 2e5) s.pages /= 2;
    s.most_tokens = s.width * s.page_size;
    return s;
}

ba_tensor fz_scales(const int64_t *cache, int64_t kv_heads, fz_role role) {
    if (!fz_once_in(4)) return fz_tensor(role, BA_FLOAT32, 3, cache, FZ_FREE_LAST);
    const ba_tensor t = fz_tensor(FZ_INPUT, BA_FLOAT32, fz_once_in(2) ? 0 : 1, &kv_heads, FZ_FREE_LAST);
    const int64_t numbers = t.ndim == 1 ? t.dims[0] : 1;
    const bool filled = t.data && fz_backed(&t) && t.dtype == BA_FLOAT32 && t.ndim < 2;
    for (int64_t n = 0; filled && n < numbers && n < 100; n++)
        ((float *)t.data)[t.ndim ? n * t.strides[0] : 0] = fz_unusual() ? (float)fz_unusual_real() : 0.25f;
    return t;
}

static void draw_cache(ba_paged_args *a, const sizes *s, fz_role role) {
    const bool hnd = a->kv_layout == BA_HND;
    const int64_t k[] = {s->pages, hnd ? s->kv_heads : s->page_size, hnd ? s->page_size : s->kv_heads, s->dim}, v[] = {k[0], k[1], k[2], s->v_dim};
    a->k_cache = fz_tensor(role, s->cache, 4, k, 0);
    a->v_cache = fz_tensor(role, s->cache, 4, v, 0);
    if ((s->cache == BA_INT8 || s->cache == BA_FLOAT8_E4M3) == fz_unusual()) return;
    a->k_scale = fz_scales(k, s->kv_heads, role);
    a->v_scale = fz_scales(k, s->kv_heads, role);
}

/* Fills a table with numbers of existing pages, in any order. Without `distinct`, pages may belong to several requests. */
void fz_fill_table(const ba_tensor *t, int64_t pages, bool distinct) {
    if (!fz_backed(t) || t->ndim < 1 || t->ndim > 2 || fz_elements(t) == 0 || fz_elements(t) > 1e5 || t->dtype < BA_UINT16 || t->dtype > BA_INT64)
        return;
    const int64_t rows = t->ndim == 2 ? t->dims[0] : 1, width = t->dims[t->ndim - 1];
    fz_seed();
    int64_t next = fz_below(pages);
    for (int64_t row = 0; row < rows; row++)
        for (int64_t i = 0; i < width; i++) {
            const int64_t at[] = {t->ndim == 2 ? row : i, i};
            fz_put(t, at, distinct ? next++ % (pages > 0 ? pages : 1) : fz_below(pages));
        }
    const int64_t at[] = {t->ndim == 2 ? fz_below(rows) : fz_below(width), fz_below(width)};
    if (fz_unusual()) fz_put(t, at, fz_unusual_number());
    if (fz_unusual()) fz_put(t, at, pages);
}

static void draw_requests(ba_paged_args *a, const sizes *s, int64_t *total) {
    const ba_dtype dtype = fz_once_in(2) ? BA_INT64 : BA_INT32;
    a->batch = fz_unusual() ? fz_unusual_number() : s->batch;
    int64_t *seq_lens = fz_numbers(a->batch), *cu_q = NULL, *indptr = NULL;
    const bool ragged = fz_once_in(3), in_a_run = fz_once_in(3);
    const int64_t most_queries = fz_once_in(4) ? 20 : 5;
    if (ragged && a->batch < INT64_MAX) a->cu_q = cu_q = fz_numbers(a->batch + 1);
    if (in_a_run && a->batch < INT64_MAX) a->indptr = indptr = fz_numbers(a->batch + 1);
    a->seq_lens = seq_lens;
    fz_seed();
    *total = s->batch;
    if (!seq_lens || a->batch < 0) return;
    if (cu_q) *total = 0;
    for (int64_t b = 0; b < a->batch; b++) {
        seq_lens[b] = fz_random() % 4 ? s->most_tokens - fz_below(s->most_tokens < 20 ? s->most_tokens + 1 : 20) : fz_below(s->most_tokens + 1);
        if (indptr) indptr[b + 1] = indptr[b] + (seq_lens[b] + s->page_size - 1) / s->page_size + (fz_random() % 4 == 0);
        if (cu_q) *total += fz_below((seq_lens[b] < most_queries ? seq_lens[b] : most_queries) + 1);
        if (cu_q) cu_q[b + 1] = *total;
    }
    const int64_t entries = indptr && a->batch < 100 ? indptr[a->batch] : 0;
    if (a->batch > 0 && fz_unusual()) seq_lens[fz_below(a->batch)] = fz_unusual_number();
    else if (a->batch > 0 && fz_unusual()) seq_lens[fz_below(a->batch)] += fz_range(-1, 1) * s->page_size;
    if (indptr && fz_unusual()) indptr[fz_below(a->batch + 1)] = fz_unusual_number();
    else if (indptr && fz_unusual()) indptr[fz_below(a->batch + 1)] += fz_range(-1, 1);
    if (cu_q && fz_unusual()) cu_q[fz_below(a->batch + 1)] = fz_unusual_number();
    else if (cu_q && fz_unusual()) cu_q[fz_below(a->batch + 1)] += fz_range(-1, 1);
    if (fz_unusual()) a->seq_lens = NULL;
    const int64_t dims[] = {a->batch, s->width};
    if (indptr) a->block_tables = fz_tensor(FZ_INPUT, dtype, 1, &entries, FZ_FREE_LAST);
    else a->block_tables = fz_tensor(FZ_INPUT, dtype, 2, dims, FZ_FREE_LAST);
    fz_fill_table(&a->block_tables, s->pages, fz_once_in(2));
}

static void draw_selected(ba_paged_args *a, const sizes *s) {
    static const int64_t dtypes[] = {BA_INT32, BA_INT64, BA_INT16};
    if (!fz_once_in(3)) return;
    const int64_t least = fz_once_in(2) ? 1 : s->width; /* of unusual lists: 1: page 0 alone; else also pages that a request lacks */
    if (fz_once_in(3)) a->selected_size = fz_unusual() ? fz_unusual_number() : fz_range(1, 40);
    const int64_t size = a->selected_size > 0 ? a->selected_size : s->page_size;
    const int64_t list_heads = a->selected_size && fz_once_in(3) ? 1 : fz_once_in(2) ? s->heads : s->kv_heads;
    const int64_t dims[] = {a->selected_size ? s->queries : s->batch, list_heads, fz_range(0, s->width + 1)};
    a->selected = fz_tensor(FZ_INPUT, (ba_dtype)fz_pick(dtypes, 3), 3, dims, FZ_FREE_LAST);
    int64_t pages = a->selected_size ? 1000 : s->width;
    for (int64_t b = 0; a->seq_lens && b < a->batch && b < 100; b++) {
        const int64_t own = a->seq_lens[b] < 0 ? 0 : a->seq_lens[b] / size + (a->seq_lens[b] % size != 0);
        pages = own < pages ? own : pages;
    }
    fz_fill_lists(&a->selected, fz_unusual() ? least : pages);
    if (!(a->selected_size ? fz_unusual() : fz_once_in(3))) return;
    const ba_tensor *t = &a->selected;
    const bool counted = t->ndim == 3 && t->dims[0] >= 0 && t->dims[0] < 100 && t->dims[1] >= 0 && t->dims[1] < 100;
    int64_t *counts = counted ? fz_numbers(t->dims[0] * t->dims[1]) : NULL;
    fz_seed();
    for (int64_t i = 0; counts && i < t->dims[0] * t->dims[1]; i++) counts[i] = fz_below((t->dims[2] < pages ? t->dims[2] : pages) + 1);
    if (counts && t->dims[0] * t->dims[1] > 0 && fz_unusual()) counts[fz_below(t->dims[0] * t->dims[1])] = fz_unusual_number();
    a->selected_counts = counts;
}

static ba_status check(const void *args) {
    ba_tensor out, lse;
    return ba_paged_check(args, &out, &lse);
}
static ba_status attend(const void *args) { return ba_paged_attention(args); }

static bool is_heavy(const ba_paged_args *a) {
    double tokens = 0;
    for (int64_t b = 0; a->seq_lens && b < a->batch && b < 100; b++) tokens += a->seq_lens[b] > 0 ? (double)a->seq_lens[b] : 0;
    const double q = fz_elements(&a->q);
    return q > 3e5 || fz_elements(&a->block_tables) > 3e5 || (tokens > 1e5 && tokens < 1e10) || (tokens < 1e10 && q * tokens > 1e7);
}

void fz_paged(void) {
    ba_paged_args a = ba_paged_args_init();
    sizes s = draw_sizes();
    a.kv_layout = fz_unusual() ? (ba_kv_layout)fz_unusual_number() : (ba_kv_layout)fz_range(BA_NHD, BA_HND);
    draw_cache(&a, &s, FZ_INPUT);
    draw_requests(&a, &s, &s.queries);
    draw_selected(&a, &s);
    const int64_t q[] = {s.queries, s.heads, s.dim}, out[] = {s.queries, s.heads, s.v_dim};
    a.q = fz_tensor(FZ_INPUT, s.dtype, 3, q, 0);
    a.scale = fz_scale(s.dim);
    a.window = fz_unusual() ? fz_unusual_number() : fz_once_in(3) ? fz_range(0, 40) : -1;
    a.softcap = fz_unusual() ? fz_unusual_real() : fz_once_in(4) ? (double)fz_range(1, 50) : 0;
    if (fz_once_in(4)) {
        float *sinks = fz_array(a.q.dims[1], sizeof(float));
        for (int64_t h = 0; sinks && h < a.q.dims[1]; h++) sinks[h] = (float)fz_below(9) - 4;
        if (sinks && a.q.dims[1] > 0 && fz_unusual()) sinks[fz_below(a.q.dims[1])] = (float)fz_unusual_real();
        a.sinks = sinks;
    }
    if (fz_once_in(5)) a.q_begin = fz_numbers_from(a.batch, -10, 60);
    if (fz_once_in(6)) {
        const int64_t ranges[] = {s.queries, 2};
        a.kv_ranges = fz_tensor(FZ_INPUT, fz_once_in(2) ? BA_INT32 : BA_INT64, 2, ranges, FZ_FREE_LAST);
        fz_fill_ranges(&a.kv_ranges, 60);
    }
    int64_t most_queries = 1, most_tokens = fz_range(0, 2);
    for (int64_t b = 0; b < a.batch && b < 100; b++) {
        if (a.cu_q && a.cu_q[b + 1] - a.cu_q[b] > most_queries) most_queries = a.cu_q[b + 1] - a.cu_q[b];
        if (a.seq_lens && a.seq_lens[b] > most_tokens) most_tokens = a.seq_lens[b];
    }
    const int64_t mask[] = {a.batch, s.heads, most_queries, most_tokens};
    if (a.batch >= 0 && a.batch < 100 && most_queries < 1000 && most_tokens < 1000) a.attn_mask = fz_mask(mask);
    a.alibi_slopes = fz_slopes();
    a.unrounded = fz_once_in(6);
    a.num_threads = fz_threads();
    if (fz_once_in(4)) a.kv_split = fz_unusual() ? fz_unusual_number() : s.page_size * fz_range(1, 4);
    if (is_heavy(&a)) {
        fz_count_skipped(FZ_PAGED);
        return;
    }
    const bool good = fz_run(FZ_PAGED_CHECK, check, &a, &a.num_threads);
    const ba_dtype real = s.dtype == BA_FLOAT64 ? BA_FLOAT64 : BA_FLOAT32;
    a.out = fz_tensor(FZ_OUTPUT, a.unrounded ? real : s.dtype, 3, out, 0);
    if (!fz_once_in(3)) a.lse = fz_tensor(FZ_OUTPUT, real, 2, out, FZ_FREE_LAST);
    const bool accepted = fz_run(FZ_PAGED, attend, &a, &a.num_threads);
    if (accepted && !good) fz_fail("expected what the check refuses to be refused, got a result");
    if (accepted && fz_once_in(2)) fz_compare_paged(&a);
}

/* ---- Merging ----------------------------------------------------------------------------------------------------------------- */

typedef struct merge_args {
    int64_t parts;
    ba_tensor *outs, *lses, out, lse;
} merge_args;

static ba_status merge(const void *args) {
    const merge_args *a = args;
    return ba_merge_states(a->parts, a->outs, a->lses, &a->out, &a->lse);
}

void fz_merge(void) {
    merge_args a = {.parts = fz_range(1, 6)};
    const int64_t dims[] = {fz_range(0, 3), fz_range(1, 3), fz_once_in(8) ? fz_range(0, 300) : fz_range(0, 20), fz_head_dim()};
    const ba_dtype dtype = fz_float(), real = dtype == BA_FLOAT64 ? BA_FLOAT64 : BA_FLOAT32;
    a.outs = fz_array(a.parts, sizeof *a.outs);
    a.lses = fz_array(a.parts, sizeof *a.lses);
    double elements = 0;
    for (int64_t i = 0; i < a.parts; i++) {
        a.outs[i] = fz_tensor(FZ_INPUT, dtype, 4, dims, 0);
        a.lses[i] = fz_tensor(FZ_INPUT, real, 3, dims, FZ_FREE_LAST);
        elements += fz_elements(&a.outs[i]) + fz_elements(&a.lses[i]);
    }
    a.out = fz_tensor(FZ_OUTPUT, dtype, 4, dims, 0);
    a.lse = fz_tensor(FZ_OUTPUT, real, 3, dims, FZ_FREE_LAST);
    if (fz_unusual()) a.parts = fz_range(INT64_MIN, 0);
    if (elements > 1e6 && elements < 1e15) fz_count_skipped(FZ_MERGE);
    else fz_run(FZ_MERGE, merge, &a, NULL);
}

/* ---- New tokens -------------------------------------------------------------------------------------------------------------- */

typedef struct append_args {
    ba_tensor k, v;
    const int64_t *slots;
    ba_paged_args paged;
} append_args;

static ba_status append(const void *args) {
    const append_args *a = args;
    return ba_append_kv(&a->k, a->v.ndim ? &a->v : NULL, a->slots, &a->paged);
}

void fz_append(void) {
    append_args a = {.paged = ba_paged_args_init()};
    sizes s = draw_sizes();
    a.paged.kv_layout = fz_unusual() ? (ba_kv_layout)fz_unusual_number() : (ba_kv_layout)fz_range(BA_NHD, BA_HND);
    draw_cache(&a.paged, &s, FZ_PARTIAL);
    const bool alone = fz_once_in(8); /* appends only K */
    ba_tensor *const of_v[] = {&a.paged.v_cache, &a.paged.v_scale};
    for (int i = 0; alone && i < 2; i++) { /* the call does not get these */
        fz_set_role(of_v[i], FZ_INPUT);
        fz_unseen(of_v[i]);
        *of_v[i] = (ba_tensor){0};
    }
    int64_t tokens = s.batch;
    if (fz_once_in(2)) {
        draw_requests(&a.paged, &s, &tokens);
    } else {
        tokens = fz_range(0, 40);
        int64_t *slots = fz_numbers(tokens);
        fz_seed();
        for (int64_t i = 0; slots && i < tokens; i++) slots[i] = fz_below(4) ? i * 3 % (s.pages * s.page_size + 1) : -1;
        if (tokens > 0 && fz_unusual()) slots[fz_below(tokens)] = fz_unusual_number();
        a.slots = slots;
    }
    const int64_t k[] = {tokens, s.kv_heads, s.dim}, v[] = {tokens, s.kv_heads, s.v_dim};
    a.k = fz_tensor(FZ_INPUT, fz_once_in(2) ? s.dtype : fz_float(), 3, k, 0);
    if (!alone) a.v = fz_tensor(FZ_INPUT, fz_once_in(2) ? s.dtype : fz_float(), 3, v, 0);
    a.paged.num_threads = fz_threads();
    const double elements = fz_elements(&a.k) + fz_elements(&a.v);
    if ((elements > 1e6 && elements < 1e15) || is_heavy(&a.paged)) fz_count_skipped(FZ_APPEND);
    else fz_run(FZ_APPEND, append, &a, &a.paged.num_threads);
}

/* ---- 8-bit rows -------------------------------------------------------------------------------------------------------------- */

typedef struct quantise_args {
    ba_tensor x, values, scale;
    int num_threads;
} quantise_args;

static ba_status quantise(const void *args) {
    const quantise_args *a = args;
    return ba_quantize_kv(&a->x, &a->values, &a->scale, a->num_threads);
}

void fz_quantise(void) {
    quantise_args a = {.num_threads = fz_threads()};
    const int64_t dims[] = {fz_once_in(8) ? fz_range(0, 2000) : fz_range(0, 20), fz_once_in(8) ? fz_range(0, 600) : fz_head_dim()};
    a.x = fz_tensor(FZ_INPUT, fz_float(), 2, dims, 0);
    a.values = fz_tensor(FZ_OUTPUT, fz_once_in(2) ? BA_INT8 : BA_FLOAT8_E4M3, 2, dims, 0);
    a.scale = fz_tensor(FZ_OUTPUT, BA_FLOAT32, 1, dims, FZ_FREE_LAST);
    const double elements = fz_elements(&a.x);
    if (elements > 1e6 && elements < 1e15) fz_count_skipped(FZ_QUANTISE);
    else fz_run(FZ_QUANTISE, quantise, &a, &a.num_threads);
}
