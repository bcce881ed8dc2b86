/* Calls of the steps around the branches of native sparse attention: block means, gates, the selection of blocks. */
#include "fuzz.h"

typedef struct sizes {
    bool packed;
    ba_dtype dtype, real;
    int64_t batch, tokens, heads, kv_heads, dim, v_dim; /* for packed arrays, `tokens` counts those of all sequences */
} sizes;

static sizes draw_sizes(void) {
    sizes s = {.packed = fz_once_in(3), .dtype = fz_float(), .batch = fz_once_in(16) ? 0 : fz_range(1, 3)};
    s.real = s.dtype == BA_FLOAT64 ? BA_FLOAT64 : BA_FLOAT32;
    s.tokens = fz_once_in(8) ? fz_range(0, 700) : fz_range(0, 60);
    s.kv_heads = fz_range(1, 3);
    s.heads = s.kv_heads * fz_range(1, 3);
    s.dim = fz_head_dim();
    s.v_dim = fz_once_in(3) ? fz_head_dim() : s.dim;
    while (s.tokens > 4 && (double)(s.batch * s.tokens * s.heads * (s.dim + s.v_dim)) > 5e4) s.tokens /= 2;
    return s;
}

static ba_tensor draw_rows(fz_role role, const sizes *s, ba_dtype dtype, int64_t tokens, int64_t heads, int64_t dim) {
    const int64_t dims[] = {s->batch, tokens, heads, dim};
    return fz_tensor(role, dtype, 4 - s->packed, dims + s->packed, 0);
}

static const int64_t *draw_sequences(const sizes *s, int64_t *batch) {
    *batch = fz_unusual() ? fz_unusual_number() : fz_range(1, 4);
    return fz_cumulative(*batch, s->tokens);
}

static int64_t draw_block(int64_t tokens) {
    static const int64_t usual[] = {4, 1, 2, 3, 8, 16, 32, 64};
    if (fz_unusual()) return fz_unusual_number();
    return fz_once_in(4) ? fz_range(1, tokens + 1) : fz_pick(usual, 8);
}

static int64_t complete_blocks(int64_t tokens, int64_t block, int64_t stride) {
    return tokens < block || block < 1 || stride < 1 ? 0 : (tokens - block) / stride + 1;
}

static int64_t ceil_div(int64_t a, int64_t b) { return b < 1 ? 0 : a / b + (a % b != 0); }

/* The cumulative number of blocks of sequences. *total is the number for all sequences together. */
static const int64_t *count_all(const int64_t *cu, int64_t batch, int64_t block, int64_t stride, int64_t *total) {
    int64_t *counts = cu && batch < INT64_MAX ? fz_numbers(batch + 1) : NULL;
    *total = 0;
    for (int64_t b = 0; counts && b < batch; b++) {
        const int64_t tokens = cu[b + 1] - cu[b], blocks = complete_blocks(tokens, block, stride);
        counts[b + 1] = *total += blocks < 1000 ? blocks : 0;
    }
    if (counts && batch >= 0 && fz_unusual()) counts[fz_below(batch + 1)] = fz_unusual_number();
    return counts;
}

static bool too_many(const ba_tensor *t) { return fz_elements(t) > 1e6 && fz_elements(t) < 1e18; }

/* ---- Block means ----------------------------------------------------------------------------------------------------------- */

static ba_status means(const void *args) { return ba_block_means(args); }
static ba_status means_backward(const void *args) { return ba_block_means_backward(args); }

void fz_block_means(void) {
    const sizes s = draw_sizes();
    ba_block_means_args a = {.block_size = draw_block(s.tokens)};
    a.stride = fz_once_in(2) ? a.block_size : draw_block(s.tokens);
    if (s.packed) a.cu = draw_sequences(&s, &a.batch);
    int64_t blocks = complete_blocks(s.tokens, a.block_size, a.stride), most = s.tokens + 1;
    if (s.packed) a.cu_blocks = count_all(a.cu, a.batch, a.block_size, a.stride, &blocks);
    const bool mapped = fz_once_in(3);
    a.x = draw_rows(FZ_INPUT, &s, s.dtype, s.tokens, s.heads, s.dim);
    const int64_t weight[] = {s.heads, s.dim, s.v_dim};
    if (mapped && (double)(blocks * s.heads * s.dim * s.v_dim) < FZ_MOST_WORK) a.weight = fz_tensor(FZ_INPUT, s.real, 3, weight, 0);
    a.out = draw_rows(FZ_OUTPUT, &s, fz_once_in(3) ? s.real : s.dtype, blocks < most ? blocks : most, s.heads, mapped ? s.v_dim : s.dim);
    a.num_threads = fz_threads();
    const double work = (double)(blocks * s.batch * s.heads * s.dim) * (a.block_size < 1000 ? (double)a.block_size : 1000);
    if (too_many(&a.x) || too_many(&a.out) || work > 3e6) fz_count_skipped(FZ_BLOCK_MEANS);
    else fz_run(FZ_BLOCK_MEANS, means, &a, &a.num_threads);
}

void fz_block_means_backward(void) {
    const sizes s = draw_sizes();
    ba_block_means_backward_args a = {.block_size = draw_block(s.tokens)};
    a.stride = fz_once_in(2) ? a.block_size : draw_block(s.tokens);
    if (s.packed) a.cu = draw_sequences(&s, &a.batch);
    int64_t blocks = complete_blocks(s.tokens, a.block_size, a.stride);
    if (s.packed) a.cu_blocks = count_all(a.cu, a.batch, a.block_size, a.stride, &blocks);
    a.dx = draw_rows(FZ_OUTPUT, &s, s.dtype, s.tokens, s.heads, s.dim);
    if (!fz_once_in(6)) a.dout = draw_rows(FZ_INPUT, &s, s.dtype, blocks < s.tokens ? blocks : s.tokens + 1, s.heads, s.dim);
    const int64_t more = fz_once_in(3) ? fz_range(0, BA_MOST_SUMMANDS) : 0;
    for (int64_t i = 0; i < more; i++) {
        a.more[i] = draw_rows(FZ_INPUT, &s, s.dtype, s.tokens, s.heads, s.dim);
        fz_unseen(&a.more[i]); /* the call reads no summand behind the first one that is not given */
    }
    a.num_threads = fz_threads();
    if (too_many(&a.dx) || too_many(&a.dout)) fz_count_skipped(FZ_BLOCK_MEANS_BACKWARD);
    else fz_run(FZ_BLOCK_MEANS_BACKWARD, means_backward, &a, &a.num_threads);
}

/* ---- Gates ------------------------------------------------------------------------------------------------------------------- */

static ba_status gate(const void *args) { return ba_gate(args); }
static ba_status gate_backward(const void *args) { return ba_gate_backward(args); }

void fz_gate(void) {
    const sizes s = draw_sizes();
    ba_gate_args a = {0};
    const bool weighted = fz_once_in(2), combine = !fz_once_in(4);
    const int64_t weight[] = {s.heads, 3, s.dim};
    if (weighted || fz_once_in(2)) a.q = draw_rows(FZ_INPUT, &s, s.dtype, s.tokens, s.heads, s.dim);
    if (weighted) a.weight = fz_tensor(FZ_INPUT, s.real, 3, weight, 0);
    if (fz_once_in(2)) a.gates = draw_rows(weighted ? FZ_OUTPUT : FZ_INPUT, &s, s.real, s.tokens, s.heads, 3);
    for (int g = 0; g < 3 && (combine || fz_unusual()); g++) a.branch[g] = draw_rows(FZ_INPUT, &s, s.dtype, s.tokens, s.heads, s.v_dim);
    if (combine) a.out = draw_rows(FZ_OUTPUT, &s, s.dtype, s.tokens, s.heads, s.v_dim);
    const bool no_weight = !a.weight.data && a.weight.ndim == 0, no_out = !a.out.data && a.out.ndim == 0;
    if (no_weight && !no_out) fz_unseen(&a.q);
    for (int g = 0; no_out && g < 3; g++) fz_unseen(&a.branch[g]);
    if (no_weight) fz_set_role(&a.gates, FZ_INPUT); /* an unusual weight may count as not given */
    else fz_set_role(&a.gates, FZ_OUTPUT);
    a.num_threads = fz_threads();
    if (too_many(&a.q) || too_many(&a.branch[0])) fz_count_skipped(FZ_GATE);
    else fz_run(FZ_GATE, gate, &a, &a.num_threads);
}

void fz_gate_backward(void) {
    const sizes s = draw_sizes();
    ba_gate_backward_args a = {0};
    const bool weighted = fz_once_in(2), wants = weighted || fz_once_in(2);
    const int64_t weight[] = {s.heads, 3, s.dim};
    if (weighted || fz_unusual()) a.q = draw_rows(FZ_INPUT, &s, s.dtype, s.tokens, s.heads, s.dim);
    if (weighted) a.weight = fz_tensor(FZ_INPUT, s.real, 3, weight, 0);
    if (weighted || fz_once_in(2)) a.gates = draw_rows(FZ_INPUT, &s, s.real, s.tokens, s.heads, 3);
    a.dout = draw_rows(FZ_INPUT, &s, s.dtype, s.tokens, s.heads, s.v_dim);
    for (int g = 0; g < 3; g++) {
        if (wants || fz_unusual()) a.branch[g] = draw_rows(FZ_INPUT, &s, s.dtype, s.tokens, s.heads, s.v_dim);
        a.dbranch[g] = draw_rows(FZ_OUTPUT, &s, s.dtype, s.tokens, s.heads, s.v_dim);
    }
    if (wants && (!weighted || fz_once_in(2))) a.dgates = draw_rows(FZ_OUTPUT, &s, s.real, s.tokens, s.heads, 3);
    if (weighted) {
        a.dq = draw_rows(FZ_OUTPUT, &s, s.dtype, s.tokens, s.heads, s.dim);
        a.dweight = fz_tensor(FZ_OUTPUT, s.real, 3, weight, FZ_FREE_LAST);
    }
    if (!a.weight.data && a.weight.ndim == 0) {
        fz_unseen(&a.q);
        fz_set_role(&a.dq, FZ_PARTIAL);
        fz_set_role(&a.dweight, FZ_PARTIAL);
        fz_unseen(&a.dq);
        fz_unseen(&a.dweight);
        for (int g = 0; !a.dgates.data && a.dgates.ndim == 0 && g < 3; g++) fz_unseen(&a.branch[g]);
    }
    a.num_threads = fz_threads();
    if (too_many(&a.q) || too_many(&a.dout) || fz_elements(&a.dweight) > 1e6) fz_count_skipped(FZ_GATE_BACKWARD);
    else fz_run(FZ_GATE_BACKWARD, gate_backward, &a, &a.num_threads);
}

/* ---- Selection ----------------------------------------------------------------------------------------------------------------- */

static ba_status nsa_select(const void *args) { return ba_nsa_select(args); }

/* Sizes that fit together, unless the input says otherwise. */
static void draw_blocks(ba_nsa_select_args *a) {
    a->compress_stride = fz_range(1, 8);
    a->compress_block = a->compress_stride * fz_range(1, 4);
    a->select_block = a->compress_stride * fz_range(1, 8);
    a->tile = fz_once_in(2) ? fz_range(1, 20) : 0;
    if (a->tile) a->compress_stride = a->select_block = a->compress_block;
    if (!a->tile) a->init_blocks = fz_range(0, 2);
    if (!a->tile) a->local_blocks = fz_range(0, 3);
    int64_t *const sizes[] = {&a->compress_block, &a->compress_stride, &a->select_block, &a->tile, &a->init_blocks, &a->local_blocks};
    if (fz_unusual()) *sizes[fz_range(0, 5)] = fz_unusual_number();
    if (fz_unusual()) a->compress_block = a->select_block = a->compress_stride = fz_unusual_number();
}

void fz_nsa_select(void) {
    sizes s = draw_sizes();
    ba_nsa_select_args a = {.scale = fz_scale(s.dim), .causal = fz_once_in(2), .cmp_group = 1};
    draw_blocks(&a);
    const int64_t list_heads = a.tile ? s.heads : s.kv_heads;
    int64_t keys, rows = a.tile > 0 ? ceil_div(s.tokens, a.tile) : s.tokens;
    a.q = draw_rows(FZ_INPUT, &s, s.dtype, s.tokens, s.heads, s.dim);
    int64_t most = s.tokens; /* tokens of the longest sequence */
    if (s.packed) {
        a.cu_q = draw_sequences(&s, &a.batch);
        a.cu_cmp = count_all(a.cu_q, a.batch, a.compress_block, a.compress_stride, &keys);
        for (int64_t b = rows = 0; a.cu_q && b < a.batch && b < 100; b++) rows += a.tile > 0 ? ceil_div(a.cu_q[b + 1] - a.cu_q[b], a.tile) : 0;
        if (a.tile <= 0) rows = s.tokens;
    } else {
        const int64_t batch = a.q.dims[0];
        int64_t *begin = fz_once_in(2) ? fz_numbers(batch) : NULL, *tokens = begin || fz_once_in(2) ? fz_numbers(batch) : NULL;
        for (int64_t b = 0; (begin || tokens) && b < batch; b++) {
            if (begin) begin[b] = fz_unusual() ? fz_unusual_number() : fz_range(0, 40);
            if (tokens) tokens[b] = fz_unusual() ? fz_unusual_number() : (begin ? begin[b] : 0) + s.tokens + (fz_once_in(4) ? fz_range(0, 40) : 0);
            if (tokens && tokens[b] > most) most = tokens[b];
        }
        a.q_begin = begin;
        a.tokens = tokens;
        keys = complete_blocks(most, a.compress_block, a.compress_stride);
    }
    if (rows > 1000 || rows < 0) rows = 1000;
    a.k_cmp = draw_rows(FZ_INPUT, &s, s.dtype, keys < 1000 || fz_unusual() ? keys : 1000, s.kv_heads, s.dim);
    const int64_t lse[] = {s.batch, s.tokens, s.heads};
    if (a.tile == 0 || fz_unusual()) a.lse = fz_tensor(FZ_INPUT, s.real, 3 - s.packed, lse + s.packed, FZ_FREE_LAST);
    if (a.tile) fz_unseen(&a.lse);
    const int64_t forced = a.init_blocks + a.local_blocks;
    int64_t out[] = {s.batch, list_heads, rows, fz_range(0, 12) + (forced > -100 && forced < 100 ? forced : 0)};
    a.selected = fz_tensor(FZ_OUTPUT, BA_INT32, 4 - s.packed, out + s.packed, FZ_FREE_LAST);
    if (a.tile ? fz_once_in(2) : fz_unusual()) {
        out[3] = fz_range(0, 6);
        a.selected_cmp = fz_tensor(FZ_OUTPUT, BA_INT32, 4 - s.packed, out + s.packed, FZ_FREE_LAST);
        a.cmp_group = fz_unusual() ? fz_unusual_number() : fz_range(1, 5);
    }
    a.num_threads = fz_threads();
    const double pairs = fz_elements(&a.q) * fz_elements(&a.k_cmp) / (double)s.dim;
    const double blocks = a.select_block > 0 && !s.packed ? (double)most / (double)a.select_block : 0;
    if (too_many(&a.q) || too_many(&a.k_cmp) || too_many(&a.selected) || (pairs > 3e6 && pairs < 1e18) || (blocks > 1e5 && blocks < 1e10))
        fz_count_skipped(FZ_NSA_SELECT);
    else fz_run(FZ_NSA_SELECT, nsa_select, &a, &a.num_threads);
}
