/* Attention by brute force in double, for small problems with tame contents. The code follows the text of blitz_attn.h and nothing else. */
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>

#include "fuzz.h"

/* The number that the mask and the slopes, if given, add to a score, or -infinity if the key is hidden. */
static double bias_of(const ba_tensor *mask, const float *slopes, int64_t batch, int64_t head, int64_t query, int64_t key, int64_t token) {
    const int64_t whole[] = {batch, head, query, key};
    int64_t at[4];
    double bias = slopes ? -(double)slopes[head] * fabs((double)token - (double)key) : 0;
    if (!mask->data) return bias;
    for (int i = 0; i < mask->ndim; i++) at[i] = mask->dims[i] == 1 ? 0 : whole[4 - mask->ndim + i]; /* leading axes may be left out */
    const double number = fz_get(mask, at);
    if (mask->dtype == BA_BOOL) return number != 0 ? bias : -INFINITY;
    return number + bias;
}

typedef struct sums {
    double top, sum;
    double out[576];
} sums;

static void add_score(sums *s, double score) {
    if (score > s->top) {
        const double factor = exp(s->top - score);
        s->sum *= factor;
        for (int64_t d = 0; d < 576; d++) s->out[d] *= factor;
        s->top = score;
    }
}

/* The tolerance for values of about 2: it covers the roundings of the products, of the probabilities and of the result in the given dtype. */
static double tolerance(ba_dtype dtype) { return dtype == BA_FLOAT64 ? 1e-11 : dtype == BA_FLOAT32 ? 2e-4 : dtype == BA_FLOAT16 ? 2e-2 : 8e-2; }

static void compare(const char *what, double got, double expected, double within, int64_t query, int64_t head, int64_t d) {
    if (got == expected || fabs(got - expected) <= within * (1 + fabs(expected))) return;
    fz_fail("%s: expected %.9g, got %.9g for query %" PRId64 ", head %" PRId64 ", channel %" PRId64, what, expected, got, query, head, d);
}

/* ---- Block-sparse attention ---------------------------------------------------------------------------------------------------- */

typedef struct axes {
    int batch, head, token;
} axes;

static axes axes_of(ba_layout layout) {
    static const axes all[] = {{0, 1, 2}, {0, 2, 1}, {0, -1, 1}, {-1, 1, 0}};
    return all[layout];
}

static double element(const ba_block_sparse_args *a, const ba_tensor *t, int64_t heads, int64_t batch, int64_t head, int64_t token, int64_t d) {
    const axes x = axes_of(a->layout);
    int64_t at[BA_MAX_DIMS] = {0};
    if (x.batch >= 0) at[x.batch] = batch;
    at[x.token] = token;
    at[t->ndim - 1] = x.head < 0 ? head * (t->dims[2] / heads) + d : d;
    if (x.head >= 0) at[x.head] = head;
    return fz_get(t, at);
}

static bool is_listed(const ba_block_sparse_args *a, int64_t heads, int64_t kv_heads, int64_t batch, int64_t head, int64_t query, int64_t key) {
    const ba_tensor *t = &a->blocks;
    if (!t->data && t->ndim == 0) return true;
    const int last = t->ndim - 1; /* the axis of columns, behind that of rows; the axes of heads and of batch entries may be missing */
    const int64_t row = query / a->block_q + (a->cu_rows ? a->cu_rows[batch] : 0), list_heads = last >= 2 ? t->dims[last - 2] : 1;
    const int64_t list_head = list_heads == heads ? head : list_heads == 1 ? 0 : head / (heads / kv_heads);
    for (int64_t i = 0; i < t->dims[last]; i++) {
        const int64_t at[] = {last < 3 || t->dims[0] == 1 ? 0 : batch, list_head, row, i};
        const double entry = fz_get(t, at + 3 - last);
        if (entry < 0) return false;
        if ((int64_t)entry == key / a->block_kv) return true;
    }
    return false;
}

static double scale_of(double scale, int64_t dim) { return isnan(scale) ? 1 / sqrt((double)dim) : scale; }

/* Whether a key is in the range of a query. In packed calls, `row` counts the queries of all sequences. */
static bool is_in_range(const ba_tensor *ranges, int64_t batch, int64_t row, int64_t key) {
    double ends[2];
    for (int64_t end = 0; end < 2; end++) {
        const int64_t with_batch[] = {ranges->dims[0] == 1 ? 0 : batch, row, end}, without[] = {row, end};
        ends[end] = fz_get(ranges, ranges->ndim == 3 ? with_batch : without);
    }
    return ends[0] <= (double)key && (double)key < ends[1];
}

void fz_compare_forward(const ba_block_sparse_args *a) {
    const axes x = axes_of(a->layout);
    const bool packed = a->layout == BA_TND;
    const int64_t heads = x.head < 0 ? a->num_heads : a->q.dims[x.head];
    const int64_t kv_heads = x.head < 0 ? (a->num_kv_heads ? a->num_kv_heads : heads) : a->k.dims[x.head];
    const int64_t batches = packed ? a->batch : a->q.dims[0], last = a->q.ndim - 1;
    const int64_t dim = a->q.dims[last] / (x.head < 0 ? heads : 1), v_dim = a->v.dims[last] / (x.head < 0 ? kv_heads : 1);
    const double scale = scale_of(a->scale, dim);
    if (!fz_is_tame() || fz_elements(&a->q) * fz_elements(&a->k) / (double)dim > 2e5 || fabs(scale) > 2) return;
    if (a->alibi_slopes && !(fabsf(a->alibi_slopes[0]) < 2)) return;
    if (fabs(scale) * 4 * (double)dim > 300) return; /* rounding errors of scores would be as large as the errors to find */
    const double within = tolerance(a->q.dtype) * (1 + fabs(scale) * (double)dim / 8);
    static sums s;
    for (int64_t b = 0; b < batches; b++) {
        const int64_t q_begin = packed ? a->cu_q[b] : 0, kv_begin = packed ? a->cu_kv[b] : 0;
        const int64_t q_rows = packed ? a->cu_q[b + 1] - q_begin : a->q.dims[x.token],
                      kv_rows = packed ? a->cu_kv[b + 1] - kv_begin : a->k.dims[x.token];
        const int64_t q_len = a->q_lens ? a->q_lens[b] : q_rows, kv_len = a->kv_lens ? a->kv_lens[b] : kv_rows;
        for (int64_t h = 0; h < heads; h++)
            for (int64_t i = 0; i < q_rows; i++) {
                s = (sums){.top = -INFINITY};
                if (a->sinks && i < q_len) s.top = (double)a->sinks[h], s.sum = 1;
                const int64_t token = i + (a->q_begin ? a->q_begin[b] : kv_len - q_len);
                for (int64_t j = 0; j < kv_len && i < q_len; j++) {
                    if (a->key_stride ? a->causal && (double)token < (double)j * (double)a->key_stride + (double)a->key_last : a->causal && j > token)
                        continue;
                    if (a->window[0] >= 0 && (double)j < (double)token - (double)a->window[0]) continue;
                    if (a->window[1] >= 0 && (double)j > (double)token + (double)a->window[1]) continue;
                    if (a->kv_ranges.data && !is_in_range(&a->kv_ranges, b, q_begin + i, j)) continue;
                    if (!is_listed(a, heads, kv_heads, b, h, i, j)) continue;
                    const int64_t kv_head = h / (heads / kv_heads);
                    double score = 0;
                    for (int64_t d = 0; d < dim; d++)
                        score += element(a, &a->q, heads, b, h, q_begin + i, d) * element(a, &a->k, kv_heads, b, kv_head, kv_begin + j, d);
                    score *= scale;
                    if (a->softcap > 0) score = a->softcap * tanh(score / a->softcap);
                    score += bias_of(&a->attn_mask, a->alibi_slopes, b, h, i, j, token);
                    if (score == -INFINITY) continue;
                    add_score(&s, score);
                    const double weight = exp(score - s.top);
                    s.sum += weight;
                    for (int64_t d = 0; d < v_dim; d++) s.out[d] += weight * element(a, &a->v, kv_heads, b, kv_head, kv_begin + j, d);
                }
                for (int64_t d = 0; d < v_dim; d++)
                    compare("out", element(a, &a->out, heads, b, h, q_begin + i, d), s.sum > 0 ? s.out[d] / s.sum : 0, s.sum > 0 ? within : 0, i, h,
                            d);
                if (!a->lse.data) continue;
                const int64_t at[] = {packed ? q_begin + i : b, h, i};
                compare("lse", fz_get(&a->lse, at), s.sum > 0 ? s.top + log(s.sum) : -INFINITY, within, i, h, 0);
            }
    }
    fz_count_compared(FZ_FORWARD);
}

/* ---- Paged attention -------------------------------------------------------------------------------------------------------------- */

static double cached(const ba_paged_args *a, const ba_tensor *t, const ba_tensor *scale, int64_t page, int64_t row, int64_t head, int64_t d) {
    const bool hnd = a->kv_layout == BA_HND;
    const int64_t at[] = {page, hnd ? head : row, hnd ? row : head, d};
    const int64_t *const scale_at = scale->ndim == 1 ? &head : at; /* one scale per head; without axes, `scale_at` is not read */
    return fz_get(t, at) * (scale->data ? fz_get(scale, scale_at) : 1);
}

/* Whether a list names a token. Each request has a list of pages; with selected_size, each query has a list of blocks instead. */
static bool is_selected(const ba_paged_args *a, int64_t kv_heads, int64_t request, int64_t query, int64_t head, int64_t token, int64_t page_size) {
    const ba_tensor *t = &a->selected;
    if (!t->data && t->ndim == 0) return true;
    const int64_t heads = a->q.dims[1], block = token / (a->selected_size ? a->selected_size : page_size), row = a->selected_size ? query : request;
    const int64_t list_head = t->dims[1] == heads ? head : t->dims[1] == kv_heads ? head / (heads / kv_heads) : 0;
    const int64_t entries = a->selected_counts ? a->selected_counts[row * t->dims[1] + list_head] : t->dims[2];
    for (int64_t i = 0; i < entries; i++) {
        const int64_t at[] = {row, list_head, i};
        const double entry = fz_get(t, at);
        if (entry < 0) return false;
        if ((int64_t)entry == block) return true;
    }
    return false;
}

void fz_compare_paged(const ba_paged_args *a) {
    const bool hnd = a->kv_layout == BA_HND;
    const int64_t heads = a->q.dims[1], dim = a->q.dims[2], v_dim = a->v_cache.dims[3];
    const int64_t page_size = a->k_cache.dims[hnd ? 2 : 1], kv_heads = a->k_cache.dims[hnd ? 1 : 2];
    const double scale = scale_of(a->scale, dim);
    double work = 0, size = a->k_cache.dtype == BA_INT8 ? 128 : 2;
    for (int64_t b = 0; b < a->batch; b++) work += (double)(a->seq_lens[b] * heads * dim) * (double)(a->cu_q ? a->cu_q[b + 1] - a->cu_q[b] : 1);
    for (int64_t h = 0; a->sinks && h < heads; h++)
        if (!(fabsf(a->sinks[h]) < 1000)) return;
    if (a->k_scale.data) size *= 2;
    if (a->alibi_slopes && !(fabsf(a->alibi_slopes[0]) < 2)) return;
    if (!fz_is_tame() || work > 2e5 || fabs(scale) * 2 * size * (double)dim > 300) return;
    if (a->softcap != 0 && !(a->softcap > 0.1 && a->softcap < 1e6)) return;
    const double within = tolerance(a->q.dtype < a->k_cache.dtype && a->k_cache.dtype <= BA_BFLOAT16 ? a->k_cache.dtype : a->q.dtype) *
                          (1 + fabs(scale) * size * (double)dim / 16);
    static sums s;
    for (int64_t b = 0; b < a->batch; b++) {
        const int64_t q_begin = a->cu_q ? a->cu_q[b] : b, q_len = a->cu_q ? a->cu_q[b + 1] - a->cu_q[b] : 1;
        for (int64_t h = 0; h < heads; h++)
            for (int64_t i = 0; i < q_len; i++) {
                s = (sums){.top = -INFINITY};
                if (a->sinks) s.top = (double)a->sinks[h], s.sum = 1;
                const int64_t token = i + (a->q_begin ? a->q_begin[b] : a->seq_lens[b] - q_len);
                for (int64_t j = 0; j < a->seq_lens[b]; j++) {
                    if (a->kv_ranges.data ? !is_in_range(&a->kv_ranges, 0, q_begin + i, j) : j > token) continue;
                    if (a->window >= 0 && j < token - a->window) continue;
                    if (!is_selected(a, kv_heads, b, q_begin + i, h, j, page_size)) continue;
                    const int64_t in_table[] = {b, j / page_size}, in_run[] = {a->indptr ? a->indptr[b] + j / page_size : 0};
                    const int64_t page = (int64_t)fz_get(&a->block_tables, a->indptr ? in_run : in_table), kv_head = h / (heads / kv_heads);
                    double score = 0;
                    for (int64_t d = 0; d < dim; d++) {
                        const int64_t at[] = {q_begin + i, h, d};
                        score += fz_get(&a->q, at) * cached(a, &a->k_cache, &a->k_scale, page, j % page_size, kv_head, d);
                    }
                    score *= scale;
                    if (a->softcap > 0) score = a->softcap * tanh(score / a->softcap);
                    score += bias_of(&a->attn_mask, a->alibi_slopes, b, h, i, j, token);
                    if (score == -INFINITY) continue;
                    add_score(&s, score);
                    const double weight = exp(score - s.top);
                    s.sum += weight;
                    for (int64_t d = 0; d < v_dim; d++) s.out[d] += weight * cached(a, &a->v_cache, &a->v_scale, page, j % page_size, kv_head, d);
                }
                for (int64_t d = 0; d < v_dim; d++) {
                    const int64_t at[] = {q_begin + i, h, d};
                    compare("out", fz_get(&a->out, at), s.sum > 0 ? s.out[d] / s.sum : 0, s.sum > 0 ? within * size / 2 : 0, i, h, d);
                }
                if (!a->lse.data) continue;
                const int64_t at[] = {q_begin + i, h};
                compare("lse", fz_get(&a->lse, at), s.sum > 0 ? s.top + log(s.sum) : -INFINITY, within, i, h, 0);
            }
    }
    fz_count_compared(FZ_PAGED);
}
