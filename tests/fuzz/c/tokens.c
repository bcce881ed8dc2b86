/* Calls that choose tokens by an indexer, and brute force for their rows, written from the header's text alone. */
#include <math.h>

#include "fuzz.h"

static bool given(const ba_tensor *t) { return t->data != NULL || t->ndim != 0; }

/* ---- Brute force ------------------------------------------------------------------------------------------------------------- */

enum { MOST_KEYS = 2000 };

typedef struct scored {
    double score[MOST_KEYS], slack[MOST_KEYS]; /* by key, pool or block: the exact score, and the allowed distance of a result */
    bool chosen[MOST_KEYS];
    int64_t count;
} scored;

static double key_element(const ba_select_tokens_args *a, int64_t b, int64_t key, int64_t d) {
    int64_t at[] = {b, key, d};
    const bool packed = a->cu_q && !given(&a->block_tables);
    if (given(&a->block_tables)) {
        const int64_t entry[] = {b, key / a->k.dims[1]};
        at[0] = (int64_t)fz_get(&a->block_tables, entry);
        at[1] = key % a->k.dims[1];
    } else if (packed) at[1] = a->cu_kv[b] + key;
    return fz_get(&a->k, at + packed) * (given(&a->k_scale) ? fz_get(&a->k_scale, at + packed) : 1);
}

static void score_keys(const ba_select_tokens_args *a, int64_t b, int64_t query, int64_t keys, scored *s) {
    const int packed = a->cu_q != NULL;
    const int64_t dim = a->q.dims[a->q.ndim - 1], heads = a->q.dims[a->q.ndim - 2], row = query + (packed ? a->cu_q[b] : 0);
    const double scale = isnan(a->scale) ? 1 / sqrt((double)dim) : a->scale;
    s->count = 0;
    for (int64_t j = 0; j < keys; j++) {
        double score = 0, size = 0;
        for (int64_t h = 0; h < heads; h++) {
            double product = 0, magnitude = 0;
            for (int64_t d = 0; d < dim; d++) {
                const int64_t at[] = {b, row, h, d};
                const double term = scale * fz_get(&a->q, at + packed) * key_element(a, b, j, d);
                product += term;
                magnitude += fabs(term);
            }
            const int64_t at[] = {b, row, h};
            const double weight = fz_get(&a->weights, at + packed);
            score += weight * (product > 0 ? product : 0);
            size += fabs(weight) * magnitude;
        }
        const int64_t place = j / a->block_size;
        const double unit = a->q.dtype == BA_FLOAT64 ? 0x1p-50 : 0x1p-21; /* beyond 1e30, a sum of floats may overflow */
        const double slack = size < 1e30 ? size * (double)(heads + dim) * unit + 1e-30 : INFINITY;
        if (place == s->count) s->score[place] = -INFINITY, s->slack[place] = 0, s->chosen[place] = false, s->count++;
        s->score[place] = fmax(s->score[place], score);
        s->slack[place] = fmax(s->slack[place], slack);
    }
}

static void compare_row(const ba_select_tokens_args *a, int64_t b, int64_t query, int64_t seen, scored *s) {
    const int last = a->selected.ndim - 1, packed = a->cu_q != NULL;
    const int64_t width = a->selected.dims[last], top_k = width - (a->keep_tail != 0), row = query + (packed ? a->cu_q[b] : 0);
    const bool tail = a->keep_tail && seen % a->pool_size;
    double least = INFINITY, before = INFINITY;
    int64_t n = 0, last_key = -1;
    score_keys(a, b, query, seen / a->pool_size, s);
    for (int64_t i = 0; i < width; i++) {
        const int64_t at[] = {b, row, i}, key = (int64_t)fz_get(&a->selected, at + packed);
        const double score = given(&a->scores) ? fz_get(&a->scores, at + packed) : 0;
        const bool is_tail = tail && key == seen / a->pool_size;
        if (key < 0 || is_tail) {
            if (i == n + 1 && tail && key < 0) continue;
            if (i == n && tail != is_tail) fz_fail("row: expected the tail %d behind %d keys, got %d", (int)(seen / a->pool_size), (int)n, (int)key);
            if (is_tail && i != n) fz_fail("row: expected one tail, got two");
            if (given(&a->scores) && score != (is_tail ? INFINITY : -INFINITY)) fz_fail("row: expected no score of a tail or a pad, got %g", score);
            continue;
        }
        if (i > n || i >= top_k || key >= s->count || s->chosen[key]) fz_fail("row: expected keys below %d once, got %d", (int)s->count, (int)key);
        if (a->ascending && key <= last_key) fz_fail("row: expected rising keys, got %d", (int)key);
        s->chosen[last_key = key] = true;
        n++;
        least = fmin(least, s->score[key] + s->slack[key]);
        if (s->score[key] + s->slack[key] < a->min_score) fz_fail("row: expected a score of at least %g, got %g", a->min_score, s->score[key]);
        if (!given(&a->scores)) continue;
        if (!(fabs(score - s->score[key]) <= s->slack[key])) fz_fail("score: expected %.9g, got %.9g for key %d", s->score[key], score, (int)key);
        if (!a->ascending && score > before) fz_fail("row: expected falling scores, got %g", score);
        before = score;
    }
    for (int64_t j = 0; j < s->count; j++) {
        if (s->chosen[j] || s->score[j] - s->slack[j] < a->min_score) continue;
        if (n < top_k || s->score[j] - s->slack[j] > least) fz_fail("row: expected key %d with %g, got others", (int)j, s->score[j]);
    }
}

static void compare(const ba_select_tokens_args *a) {
    static scored s;
    const bool packed = a->cu_q != NULL;
    const int64_t sequences = packed ? a->batch : a->q.dims[0];
    const double rows = fz_elements(&a->k) / (double)a->q.dims[a->q.ndim - 1];
    double most = rows;
    for (int64_t b = 0; a->kv_lens && b < sequences; b++) most = fmax(most, (double)a->kv_lens[b]);
    if (!fz_is_tame() || most > MOST_KEYS || fz_elements(&a->q) * most > 2e5 || fabs(a->scale) > 4) return;
    for (int64_t b = 0; b < sequences; b++) {
        const int64_t queries = packed ? a->cu_q[b + 1] - a->cu_q[b] : a->q.dims[1], valid = a->q_lens ? a->q_lens[b] : queries;
        int64_t tokens = (packed && a->cu_kv ? a->cu_kv[b + 1] - a->cu_kv[b] : a->k.dims[1]) * a->pool_size;
        if (a->kv_lens) tokens = a->kv_lens[b];
        for (int64_t i = 0; i < queries; i++) {
            int64_t seen = i < valid ? tokens : 0;
            const int64_t token = i + (a->q_begin ? a->q_begin[b] : tokens - valid);
            if (a->causal && token + 1 < seen) seen = token < 0 ? 0 : token + 1;
            compare_row(a, b, i, seen, &s);
        }
    }
    fz_count_compared(FZ_SELECT_TOKENS);
}

/* ---- The call ------------------------------------------------------------------------------------------------------------------ */

/* Fills in weights. They are finite unless the input makes one unusual, since calls with other weights are refused. */
static void fill_weights(const ba_tensor *t) {
    int64_t at[BA_MAX_DIMS] = {0};
    fz_seed();
    if (!fz_backed(t) || fz_elements(t) == 0 || fz_elements(t) > 1e5 || (t->dtype != BA_FLOAT32 && t->dtype != BA_FLOAT64)) return;
    do {
        int64_t place = 0;
        for (int i = 0; i < t->ndim; i++) place += at[i] * t->strides[i];
        const double weight = fz_unusual() ? fz_unusual_real() : (double)(fz_below(33) - 10) / 16;
        if (t->dtype == BA_FLOAT32) ((float *)t->data)[place] = (float)weight;
        else ((double *)t->data)[place] = weight;
    } while (fz_next(at, t->dims, t->ndim));
}

static int64_t size_of(void) {
    static const int64_t usual[] = {1, 4, 2, 3, 16, 64, 17};
    return fz_unusual() ? fz_unusual_number() : fz_pick(usual, 7);
}

static ba_status select_tokens(const void *args) { return ba_select_tokens(args); }

void fz_select_tokens(void) {
    static const int64_t eight_bits[] = {BA_INT8, BA_FLOAT8_E4M3}, all_heads[] = {1, 2, 3, 8, 64};
    ba_select_tokens_args a = ba_select_tokens_args_init();
    const bool packed = fz_once_in(3), paged = fz_once_in(3);
    const ba_dtype dtype = fz_float(), real = dtype == BA_FLOAT64 ? BA_FLOAT64 : BA_FLOAT32;
    const bool eight = fz_once_in(4) && (dtype != BA_FLOAT64 || fz_unusual());
    int64_t batch = fz_once_in(16) ? 0 : fz_range(1, 3), heads = fz_pick(all_heads, 5), dim = fz_head_dim();
    int64_t queries = fz_once_in(8) ? fz_range(0, 200) : fz_range(0, 12), keys = fz_once_in(6) ? fz_range(0, 700) : fz_range(0, 60);
    while (queries > 1 && (double)(queries * batch * heads * dim) * (double)(keys + 1) > 10 * FZ_MOST_WORK) queries /= 2, keys = (keys + 1) / 2;
    const int64_t page = fz_range(1, 20), width = fz_range(0, keys / page + 1), pages = width + fz_range(0, 4);
    if (fz_once_in(3)) a.pool_size = size_of();
    else if (fz_once_in(2)) a.block_size = size_of();
    if (fz_unusual()) a.block_size = size_of();
    a.batch = fz_unusual() ? fz_unusual_number() : batch;
    if (packed) a.cu_q = fz_cumulative(a.batch, queries);
    if (packed && paged == fz_unusual()) a.cu_kv = fz_cumulative(a.batch, keys);
    const int64_t q[] = {batch, queries, heads, dim}, weights[] = {batch, queries, heads}, k[] = {batch, keys, dim}, in_pages[] = {pages, page, dim};
    const int64_t *const of_keys = paged ? in_pages : k + packed, pool = a.pool_size;
    const int k_axes = packed && !paged ? 2 : 3;
    a.q = fz_tensor(FZ_INPUT, dtype, 4 - packed, q + packed, 0);
    const int64_t sequences = a.cu_q ? a.batch : a.q.dims[0];
    a.k = fz_tensor(FZ_INPUT, eight ? (ba_dtype)fz_pick(eight_bits, 2) : dtype, k_axes, of_keys, 0);
    if (eight != fz_unusual()) a.k_scale = fz_tensor(FZ_INPUT, BA_FLOAT32, k_axes - 1, of_keys, FZ_FREE_LAST);
    a.weights = fz_tensor(FZ_INPUT, real, 3 - packed, weights + packed, FZ_FREE_LAST);
    fill_weights(&a.weights);
    if (!packed && fz_once_in(2)) a.q_lens = fz_lengths(sequences, queries);
    const bool small = pool > 0 && pool < 1000;
    if (packed && !paged && pool != 1 && small && fz_once_in(2)) {
        int64_t *lens = fz_numbers(sequences);
        for (int64_t b = 0; lens && a.cu_q && a.cu_kv && b < sequences; b++) lens[b] = (a.cu_kv[b + 1] - a.cu_kv[b]) * pool + fz_range(0, pool - 1);
        a.kv_lens = lens;
    } else if (paged != fz_unusual() || (!packed && fz_once_in(2))) {
        a.kv_lens = fz_lengths(sequences, !small ? 1 : paged ? width * page * pool : keys * pool + pool - 1);
    }
    if (paged) {
        const int64_t table[] = {packed ? a.batch : batch, width};
        a.block_tables = fz_tensor(FZ_INPUT, fz_once_in(2) ? BA_INT64 : BA_INT32, 2, table, FZ_FREE_LAST);
        fz_fill_table(&a.block_tables, pages, false);
    }
    if (fz_once_in(3)) a.q_begin = fz_numbers_from(sequences, -5, 120);
    a.scale = fz_scale(dim);
    a.causal = fz_once_in(2);
    a.ascending = fz_once_in(2);
    a.keep_tail = fz_once_in(2);
    if (fz_once_in(3)) a.min_score = fz_unusual() ? fz_unusual_real() : 0.125 * (double)fz_range(-4, 12);
    const int64_t out[] = {batch, queries, fz_unusual() ? fz_range(0, 1) : 1 + a.keep_tail + fz_range(0, fz_once_in(2) ? 12 : 255)};
    a.selected = fz_tensor(FZ_OUTPUT, BA_INT32, 3 - packed, out + packed, FZ_FREE_LAST);
    if (fz_once_in(2)) a.scores = fz_tensor(FZ_OUTPUT, real, 3 - packed, out + packed, FZ_FREE_LAST);
    a.num_threads = fz_threads();
    const double pairs = fz_elements(&a.q) * fz_elements(&a.k) / (double)dim;
    if (fz_elements(&a.q) > 1e6 || fz_elements(&a.k) > 1e6 || fz_elements(&a.selected) > 1e6 || pairs > 20 * FZ_MOST_WORK)
        fz_count_skipped(FZ_SELECT_TOKENS);
    else if (fz_run(FZ_SELECT_TOKENS, select_tokens, &a, &a.num_threads)) compare(&a);
}
