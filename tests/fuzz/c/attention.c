/* Calls of block-sparse attention, forward and backward. */
#include <math.h>

#include "fuzz.h"

ba_dtype fz_float(void) { return (ba_dtype)fz_range(BA_FLOAT32, BA_FLOAT64); }

int64_t fz_head_dim(void) {
    static const int64_t rare[] = {64, 128, 80, 576, 96, 575, 127, 129, 65};
    return fz_once_in(12) ? fz_pick(rare, 9) : fz_range(1, 40);
}

double fz_scale(int64_t head_dim) {
    if (fz_unusual()) return fz_unusual_real();
    if (fz_once_in(8)) return 0.01 * (double)fz_range(-100, 100);
    return head_dim % 2 ? NAN : ba_default_scale(head_dim); /* both mean the usual scale; the choice takes no byte of the input */
}

static int64_t block_size(int64_t tokens) {
    static const int64_t usual[] = {16, 1, 2, 3, 4, 8, 32, 64, 128, 5, 7, 256};
    if (fz_unusual()) return fz_unusual_number();
    return fz_once_in(4) ? fz_range(1, tokens + 1) : fz_pick(usual, 12);
}

static fz_sizes draw_sizes(void) {
    fz_sizes s = {.layout = (ba_layout)fz_range(BA_BNSD, BA_TND), .dtype = fz_float(), .batch = fz_once_in(16) ? 0 : fz_range(1, 3)};
    static const int64_t groups[] = {1, 2, 3, 4, 8, 9, 16};
    s.kv_heads = fz_range(1, 3);
    s.heads = s.kv_heads * (fz_once_in(4) ? fz_pick(groups, 7) : fz_range(1, 2));
    s.q_len = fz_once_in(8) ? fz_range(0, 300) : fz_range(0, 40);
    s.kv_len = fz_once_in(6) ? fz_range(0, 700) : fz_range(0, 60);
    s.dim = fz_head_dim();
    s.v_dim = fz_once_in(3) ? fz_head_dim() : s.dim;
    while (s.kv_len > 8 && (double)(s.batch * s.heads * s.q_len * s.kv_len * (s.dim + s.v_dim)) > FZ_MOST_WORK) {
        s.kv_len /= 2;
        s.q_len = (s.q_len + 1) / 2;
    }
    return s;
}

static ba_tensor draw_array(fz_role role, const fz_sizes *s, ba_dtype dtype, int64_t heads, int64_t tokens, int64_t dim, int flags) {
    const int64_t dims[][4] = {{s->batch, heads, tokens, dim}, {s->batch, tokens, heads, dim}, {s->batch, tokens, heads * dim}, {tokens, heads, dim}};
    return fz_tensor(role, dtype, s->layout <= BA_BSND ? 4 : 3, dims[s->layout], flags);
}

/* Writes one row of a list: some of the columns, in rising or in any other order, and pads. */
static void fill_row(const ba_tensor *t, int64_t *at, int64_t columns) {
    const int last = t->ndim - 1;
    const int64_t width = t->dims[last], pad = t->dtype == BA_UINT16 ? 65535 : -1;
    int64_t order[64], n = columns < 64 ? columns : 64;
    for (int64_t i = 0; i < n; i++) order[i] = columns <= 64 ? i : columns / 64 * i + fz_below(columns / 64);
    const bool shuffled = fz_random() % 2;
    for (int64_t i = 0; shuffled && i < n; i++) {
        const int64_t other = i + fz_below(n - i), column = order[i];
        order[i] = order[other];
        order[other] = column;
    }
    int64_t kept = fz_random() % 3 ? n : fz_below(n + 1);
    if (!shuffled && kept < n && fz_random() % 2) /* keep the last columns instead of the first ones */
        for (int64_t i = 0; i < kept; i++) order[i] = order[n - kept + i];
    for (at[last] = 0; at[last] < width; at[last]++) fz_put(t, at, at[last] < kept ? order[at[last]] : pad);
    at[last] = 0;
}

/* Fills a tensor of 1 to 4 axes with list rows over `columns` columns. The input may choose wrong entries. */
void fz_fill_lists(const ba_tensor *t, int64_t columns) {
    if (!fz_backed(t) || t->ndim < 1 || t->dtype < BA_UINT16 || t->dtype > BA_INT64 || fz_elements(t) == 0 || fz_elements(t) > 1e5) return;
    int64_t at[BA_MAX_DIMS] = {0};
    fz_seed();
    do {
        fill_row(t, at, columns);
    } while (fz_next(at, t->dims, t->ndim - 1));
    for (int i = 0; i < t->ndim; i++) at[i] = fz_below(t->dims[i]);
    if (fz_unusual()) fz_put(t, at, fz_unusual_number());
    if (fz_unusual()) fz_put(t, at, columns);
}

static int64_t rows_of(int64_t tokens, int64_t block) { return block < 1 ? 1 : tokens / block + (tokens % block != 0); }

static void draw_blocks(ba_block_sparse_args *a, const fz_sizes *s) {
    static const int64_t dtypes[] = {BA_INT32, BA_INT64, BA_INT16, BA_UINT16};
    if (fz_once_in(4)) return;
    a->routed = fz_once_in(3);
    const int64_t columns = rows_of(s->kv_len, a->block_kv), width = fz_once_in(4) ? fz_range(0, columns + 3) : columns;
    const int64_t heads = fz_once_in(3) ? 1 : a->routed && fz_once_in(3) ? s->kv_heads : s->heads;
    int64_t rows = rows_of(s->q_len, a->block_q), most_columns = columns, longest = 0;
    if (s->layout == BA_TND && a->cu_q && a->cu_kv && a->batch >= 0 && a->batch < 100) { /* the longest sequence needs the most rows */
        int64_t *cu_rows = fz_numbers(a->batch + 1);
        rows = most_columns = 0;
        for (int64_t b = 0; b < a->batch; b++) {
            const int64_t tokens = a->cu_q[b + 1] - a->cu_q[b];
            const int64_t keys = a->cu_kv[b + 1] - a->cu_kv[b];
            cu_rows[b + 1] = cu_rows[b] + (tokens < 0 || tokens > 1000 ? 0 : rows_of(tokens, a->block_q));
            rows = rows_of(tokens, a->block_q) > rows ? rows_of(tokens, a->block_q) : rows;
            longest = keys > longest ? keys : longest;
        }
        most_columns = rows_of(longest, a->block_kv);
        if (fz_once_in(2)) {
            a->cu_rows = cu_rows;
            rows = cu_rows[a->batch];
            if (fz_unusual()) cu_rows[fz_below(a->batch + 1)] = fz_unusual_number();
        }
    }
    if (rows > 1000 || rows < 0) rows = 1000;
    const int64_t lists = s->layout == BA_TND ? a->batch : s->batch;
    const int64_t dims[] = {fz_once_in(3) ? 1 : lists < 0 || lists > 100 ? 1 : lists, heads, rows, width > 1000 ? 1000 : width};
    if (a->cu_rows) a->blocks = fz_tensor(FZ_INPUT, (ba_dtype)fz_pick(dtypes, 4), 3, dims + 1, FZ_FREE_LAST);
    else a->blocks = fz_tensor(FZ_INPUT, (ba_dtype)fz_pick(dtypes, 4), 4, dims, FZ_FREE_LAST);
    fz_fill_lists(&a->blocks, most_columns);
}

static int64_t sequences(const ba_block_sparse_args *a) { return a->layout == BA_TND ? a->batch : a->q.dims[0]; }

/* Makes the queries a slice of a longer sequence, in some calls. */
static void draw_slice(ba_block_sparse_args *a, const fz_sizes *s) {
    const int64_t batch = sequences(a), rows = a->layout == BA_TND ? a->q.dims[0] : s->q_len;
    if (fz_once_in(6)) a->q_begin = fz_numbers_from(batch, -20, 60);
    if (fz_once_in(6)) a->q_total = fz_numbers_from(batch, rows, rows + 20);
}

/* Fills a tensor of 2 or 3 axes with runs among `keys` keys. Most runs are not empty. */
void fz_fill_ranges(const ba_tensor *t, int64_t keys) {
    if (!fz_backed(t) || t->ndim < 2 || t->ndim > 3 || t->dtype < BA_UINT16 || t->dtype > BA_INT64 || fz_elements(t) == 0 || fz_elements(t) > 1e5)
        return;
    const int64_t entries = t->ndim == 3 ? t->dims[0] : 1, queries = t->dims[t->ndim - 2];
    fz_seed();
    for (int64_t b = 0; b < entries; b++)
        for (int64_t i = 0; i < queries; i++)
            for (int64_t end = 0; end < t->dims[t->ndim - 1]; end++) {
                const int64_t with_batch[] = {b, i, end}, first = fz_below(keys + 1) - 3;
                fz_put(t, t->ndim == 3 ? with_batch : with_batch + 1, end ? first + keys / 2 : first);
            }
    const int64_t at[] = {fz_below(entries), fz_below(queries), 0};
    if (fz_unusual()) fz_put(t, t->ndim == 3 ? at : at + 1, fz_unusual_number());
}

static void draw_ranges(ba_block_sparse_args *a, const fz_sizes *s) {
    if (!fz_once_in(6)) return;
    const bool shared = s->layout == BA_TND || fz_once_in(3);
    const int64_t dims[] = {s->batch, s->q_len, 2};
    a->kv_ranges = fz_tensor(FZ_INPUT, fz_once_in(2) ? BA_INT32 : BA_INT64, shared ? 2 : 3, shared ? dims + 1 : dims, FZ_FREE_LAST);
    fz_fill_ranges(&a->kv_ranges, s->kv_len);
}

ba_tensor fz_mask(const int64_t *sizes) {
    static const int64_t dtypes[] = {BA_BOOL, BA_FLOAT32, BA_FLOAT16, BA_BFLOAT16, BA_FLOAT64};
    int64_t dims[4];
    if (!fz_once_in(5)) return (ba_tensor){0};
    for (int i = 0; i < 4; i++) dims[i] = fz_once_in(i < 2 ? 2 : 6) ? 1 : sizes[i];
    const ba_tensor t = fz_tensor(FZ_INPUT, (ba_dtype)fz_pick(dtypes, 5), 4, dims, FZ_FREE_LAST);
    if (t.dtype != BA_BOOL || t.ndim != 4 || !fz_backed(&t) || fz_elements(&t) == 0 || fz_elements(&t) > 1e5) return t;
    fz_seed();
    int64_t at[4] = {0};
    do {
        const uint32_t hidden = fz_random() % 4; /* whether a row hides all keys, none, or about half */
        for (at[3] = 0; at[3] < t.dims[3]; at[3]++) fz_put(&t, at, hidden == 0 ? 0 : hidden == 1 ? 1 : fz_random() % 2 * 255);
    } while (fz_next(at, t.dims, 3));
    return t;
}

const float *fz_slopes(void) {
    const int64_t most = 4096; /* q may have an unusual number of heads */
    if (!fz_once_in(8)) return NULL;
    float *slopes = fz_array(most, sizeof(float));
    for (int64_t h = 0; slopes && h < most; h++) slopes[h] = (float)(fz_below(9) - 2) / 8;
    if (slopes && fz_unusual()) slopes[0] = (float)fz_unusual_real();
    return slopes;
}

static int64_t longest(const int64_t *cumulative, int64_t batch) {
    int64_t most = 0;
    for (int64_t b = 0; cumulative && b < batch && b < 100; b++)
        most = cumulative[b + 1] - cumulative[b] > most ? cumulative[b + 1] - cumulative[b] : most;
    return most < 1000 ? most : 1000;
}

static void draw_bias(ba_block_sparse_args *a, const fz_sizes *s) {
    const bool packed = s->layout == BA_TND;
    const int64_t batch = sequences(a), sizes[] = {batch < 0 || batch > 100 ? 1 : batch, s->heads, packed ? longest(a->cu_q, a->batch) : s->q_len,
                                                   packed ? longest(a->cu_kv, a->batch) : s->kv_len};
    a->attn_mask = fz_mask(sizes);
    a->alibi_slopes = fz_slopes();
}

static void draw_rules(ba_block_sparse_args *a, const fz_sizes *s) {
    a->scale = fz_scale(s->dim);
    if (fz_once_in(6)) a->softcap = fz_unusual() ? fz_unusual_real() : (double)fz_range(1, 50);
    if (fz_once_in(6)) {
        const int64_t most = 4096; /* q may have an unusual number of heads */
        float *sinks = fz_array(most, sizeof(float));
        for (int64_t h = 0; sinks && h < most; h++) sinks[h] = (float)fz_below(9) - 4;
        a->sinks = sinks;
    }
    a->causal = fz_once_in(3);
    for (int i = 0; i < 2; i++) a->window[i] = fz_unusual() ? fz_unusual_number() : fz_once_in(4) ? fz_range(0, 20) : -1;
    if (fz_once_in(8)) {
        a->key_stride = fz_unusual() ? fz_unusual_number() : fz_range(1, 8);
        a->key_last = fz_unusual() ? fz_unusual_number() : fz_range(0, 16);
        if (!a->q_begin && !fz_unusual()) a->q_begin = fz_numbers(sequences(a));
        if (!fz_unusual()) a->window[0] = a->window[1] = -1;
    }
    a->unrounded = fz_once_in(6);
    a->num_threads = fz_threads();
}

void fz_draw_forward(ba_block_sparse_args *a, fz_sizes *s) {
    *a = ba_block_sparse_args_init();
    *s = draw_sizes();
    a->layout = s->layout;
    a->q = draw_array(FZ_INPUT, s, s->dtype, s->heads, s->q_len, s->dim, 0);
    a->k = draw_array(FZ_INPUT, s, s->dtype, s->kv_heads, s->kv_len, s->dim, 0);
    a->v = draw_array(FZ_INPUT, s, s->dtype, s->kv_heads, s->kv_len, s->v_dim, 0);
    if (s->layout == BA_BSH || fz_unusual()) {
        a->num_heads = s->heads;
        a->num_kv_heads = s->heads == s->kv_heads && fz_once_in(2) ? 0 : s->kv_heads;
        if (fz_unusual()) a->num_heads = fz_unusual_number();
        if (fz_unusual()) a->num_kv_heads = fz_unusual_number();
    }
    const int64_t batch = a->q.dims[0]; /* may be unusual, as the input made it */
    if (s->layout == BA_TND || fz_unusual()) {
        a->batch = fz_unusual() ? fz_unusual_number() : fz_range(0, 4);
        if (a->batch == 0 && (s->q_len || s->kv_len) && !fz_unusual()) a->batch = 1;
        a->cu_q = fz_cumulative(a->batch, a->q.dims[0]);
        a->cu_kv = fz_cumulative(a->batch, a->k.dims[0]);
    }
    if (s->layout != BA_TND || fz_unusual()) {
        if (fz_once_in(3)) a->q_lens = fz_lengths(batch, s->q_len);
        if (fz_once_in(3)) a->kv_lens = fz_lengths(batch, s->kv_len);
    }
    a->block_q = block_size(s->q_len);
    a->block_kv = block_size(s->kv_len);
    draw_blocks(a, s);
    draw_slice(a, s);
    draw_ranges(a, s);
    draw_bias(a, s);
    draw_rules(a, s);
    if (fz_unusual()) a->layout = (ba_layout)fz_unusual_number();
}

static ba_dtype real_of(ba_dtype dtype) { return dtype == BA_FLOAT64 ? BA_FLOAT64 : BA_FLOAT32; }

static ba_tensor draw_lse(fz_role role, const fz_sizes *s) {
    const int64_t dims[] = {s->batch, s->heads, s->q_len}, packed[] = {s->q_len, s->heads};
    const ba_dtype dtype = real_of(s->dtype);
    return s->layout == BA_TND ? fz_tensor(role, dtype, 2, packed, FZ_FREE_LAST) : fz_tensor(role, dtype, 3, dims, FZ_FREE_LAST);
}

/* Axes of stride 0 need no memory, so they can have any length. */
bool fz_is_heavy(const ba_block_sparse_args *a) {
    const double q = fz_elements(&a->q), k = fz_elements(&a->k), v = fz_elements(&a->v);
    const int last = a->q.ndim >= 1 && a->q.ndim <= BA_MAX_DIMS ? a->q.ndim - 1 : 0;
    const double dim = a->q.dims[last] > 1 ? (double)a->q.dims[last] : 1;
    return q + k + v > 3e5 || q * (k + v) / dim > 2e7;
}

ba_status fz_check_forward(const void *args) {
    ba_tensor out, lse;
    return ba_block_sparse_check(args, &out, &lse);
}
ba_status fz_forward(const void *args) { return ba_block_sparse_attention(args); }

static ba_status check_backward(const void *args) {
    ba_tensor dq, dk, dv;
    return ba_block_sparse_backward_check(args, &dq, &dk, &dv);
}
static ba_status backward(const void *args) { return ba_block_sparse_attention_backward(args); }

static bool same_shape(const ba_tensor *a, const ba_tensor *b) {
    bool same = a->ndim == b->ndim && a->dtype == b->dtype;
    for (int i = 0; same && i < a->ndim; i++) same = a->dims[i] == b->dims[i];
    return same;
}

static void run_backward(ba_block_sparse_args *forward_args, const fz_sizes *s) {
    ba_block_sparse_backward_args a = {.forward = *forward_args, .accumulate = fz_once_in(3)};
    if (!fz_unusual()) a.forward.unrounded = 0;
    const ba_dtype sums = a.accumulate ? real_of(s->dtype) : s->dtype;
    fz_set_role(&a.forward.out, FZ_INPUT);
    if (!a.forward.lse.data && a.forward.lse.ndim == 0 && !fz_unusual()) a.forward.lse = draw_lse(FZ_INPUT, s);
    fz_set_role(&a.forward.lse, FZ_INPUT);
    a.dout = draw_array(FZ_INPUT, s, s->dtype, s->heads, s->q_len, s->v_dim, 0);
    if (fz_once_in(2)) a.dlse = draw_lse(FZ_INPUT, s);
    if (fz_run(FZ_BACKWARD_CHECK, check_backward, &a, &a.forward.num_threads)) {
        ba_tensor dq, dk, dv;
        ba_block_sparse_backward_check(&a, &dq, &dk, &dv);
        ba_tensor k = a.forward.k, v = a.forward.v;
        if (a.accumulate) k.dtype = v.dtype = real_of(k.dtype);
        if (!same_shape(&dq, &a.forward.q) || !same_shape(&dk, &k) || !same_shape(&dv, &v)) fz_fail("expected gradients like q, k and v");
    }
    a.dq = draw_array(FZ_OUTPUT, s, s->dtype, s->heads, s->q_len, s->dim, 0);
    a.dk = draw_array(FZ_OUTPUT, s, sums, s->kv_heads, s->kv_len, s->dim, 0);
    a.dv = draw_array(FZ_OUTPUT, s, sums, s->kv_heads, s->kv_len, s->v_dim, 0);
    const ba_tensor *mask = &a.forward.attn_mask;
    if (fz_once_in(2) && (mask->ndim == 4 || fz_unusual())) a.dattn_mask = fz_tensor(FZ_OUTPUT, mask->dtype, mask->ndim, mask->dims, 0);
    if (fz_once_in(2) && (a.forward.alibi_slopes || fz_unusual())) {
        const int64_t most = 4096; /* q may have an unusual number of heads */
        a.dalibi_slopes = fz_tensor(FZ_PARTIAL, BA_FLOAT32, 1, &most, FZ_PLAIN).data;
    }
    if (a.accumulate) fz_expect_any_order(); /* the two runs add to different numbers */
    fz_run(FZ_BACKWARD, backward, &a, &a.forward.num_threads);
}

void fz_attention(void) {
    ba_block_sparse_args a;
    fz_sizes s;
    fz_draw_forward(&a, &s);
    if (fz_is_heavy(&a)) {
        fz_count_skipped(FZ_FORWARD);
        return;
    }
    const bool good = fz_run(FZ_FORWARD_CHECK, fz_check_forward, &a, &a.num_threads);
    a.out = draw_array(FZ_OUTPUT, &s, a.unrounded ? real_of(s.dtype) : s.dtype, s.heads, s.q_len, s.v_dim, 0);
    if (!fz_once_in(4)) a.lse = draw_lse(FZ_OUTPUT, &s);
    const bool accepted = fz_run(FZ_FORWARD, fz_forward, &a, &a.num_threads);
    if (accepted && !good) fz_fail("expected what the check refuses to be refused, got a result");
    if (accepted && fz_once_in(3)) fz_compare_forward(&a);
    if (fz_once_in(3) && (!a.unrounded || fz_unusual())) run_backward(&a, &s);
}
