/* The gates of native sparse attention: three sigmoids per token and query head, the gated sum of the branches, and the gradients of the gates and of
 * the sum. */
#include <math.h>
#include <string.h>

#include "core/arena.h"
#include "core/float_mode.h"
#include "core/pool.h"
#include "core/status.h"
#include "kernels/work_tuning.h"
#include "ops/check.h"
#include "ops/nsa/nsa.h"
#include "ops/reals.h"
#include "ops/scratch.h"

enum {
    GATES = 3,
    TOKENS_AT_ONCE = 8, /* tokens whose logits are computed by one call of the kernel */
    LOGITS_STRIDE = 16, /* reals per gate in `logits`: the kernel needs room for TOKENS_AT_ONCE rounded up to 16 */
};

typedef struct gate_call {
    ba_token_rows q, branch[GATES], out, gates; /* data NULL: not given */
    ba_token_rows dout, dbranch[GATES], dgates, dq;
    bool weighted; /* the weight is given */
    bool backward;
    int64_t batch, tokens, heads, dim;
    const ba_kernels *kernels;
    const ba_attend_family *family; /* for the dtype of q, the branches and out */
    int64_t real_size;
    const ba_tensor *weight;
    char *packed_weight; /* forward, where weighted: [head][3 x BA_FEW_PAD(dim)] reals */
    char *dweights;      /* backward, where weighted: [item][head][3][dim] reals */
    int64_t items_per_batch, scratch_bytes;
    char *scratch;
} gate_call;

typedef struct gate_scratch {
    /* Forward: [BA_FEW_QUERIES][LOGITS_STRIDE] reals; row g has the logits of gate g. Backward: the gradients of the three gates of one token and
     * head. */
    char *logits;
    char *gates;       /* forward: [TOKENS_AT_ONCE][head][3] reals; backward: up to three weights for merge_row */
    char *row;         /* one row of dq, as reals */
    char *dlogits;     /* [head][3][ba_work.nsa.gradient_tokens] reals */
    char *wide;        /* rows of q as reals, for ba_sum_rows() */
    const void **rows; /* rows of several tokens */
} gate_scratch;

/* Lays out the scratch memory of one worker. */
static int64_t lay_out_gate(const gate_call *c, char *base, gate_scratch *s) {
    const int64_t real = c->real_size, widest = BA_FEW_PAD(BA_MAX_HEAD_DIM);
    const bool sums_dweights = c->weighted && c->backward;
    int64_t used = 0;
    s->logits = ba_take(base, &used, BA_FEW_QUERIES * LOGITS_STRIDE * real);
    s->gates = ba_take(base, &used, TOKENS_AT_ONCE * c->heads * GATES * real);
    s->row = ba_take(base, &used, widest * real);
    s->dlogits = ba_take(base, &used, sums_dweights ? c->heads * GATES * ba_work.nsa.gradient_tokens * real : 0);
    s->wide = ba_take(base, &used, sums_dweights ? BA_ROWS_AT_ONCE * widest * real : 0);
    s->rows = ba_take(base, &used, ba_work.nsa.gradient_tokens * (int64_t)sizeof(void *));
    return used;
}

static char *weight_row(const ba_tensor *weight, int64_t head, int64_t gate) {
    return (char *)weight->data + (head * weight->strides[0] + gate * weight->strides[1]) * ba_dtype_size(weight->dtype);
}

static double sigmoid(double x, int64_t real_size) {
    const double e = real_size == 4 ? (double)expf(-fabsf((float)x)) : exp(-fabs(x));
    return x >= 0 ? 1 / (1 + e) : e / (1 + e); /* NaN for NaN */
}

/* ---- Forward ---------------------------------------------------------------------------------------------------------- */

/* Computes the gates of n tokens, the first of which is `begin`, and writes them to s->gates. Gates that are computed from weights are also written
 * to the caller's array, if there is one. */
static void make_gates(const gate_call *c, const gate_scratch *s, int64_t batch, int64_t begin, int64_t n) {
    const int64_t real = c->real_size;
    for (int64_t head = 0; head < c->heads; head++) {
        if (c->weighted) {
            for (int64_t t = 0; t < n; t++) s->rows[t] = ba_row(&c->q, batch, begin + t, head);
            c->kernels->cache[c->q.dtype]->scores(c->packed_weight + head * GATES * BA_FEW_PAD(c->dim) * real, GATES, s->rows, 0, NULL, n, c->dim,
                                                  s->logits, LOGITS_STRIDE);
        }
        for (int64_t t = 0; t < n; t++) {
            char *gates = c->gates.data ? ba_row(&c->gates, batch, begin + t, head) : NULL;
            for (int64_t g = 0; g < GATES; g++) {
                double gate = 1 / 3.0;
                if (c->weighted) gate = sigmoid(ba_get_real(s->logits, g * LOGITS_STRIDE + t, real), real);
                else if (gates) gate = ba_get_real(gates, g, real);
                ba_set_real(s->gates, (t * c->heads + head) * GATES + g, gate, real);
                if (c->weighted && gates) ba_set_real(gates, g, gate, real);
            }
        }
    }
}

static void gate_item(void *context, int64_t item, int worker) {
    const gate_call *c = context;
    const int64_t batch = item / c->items_per_batch, first = item % c->items_per_batch * ba_work.nsa.gate_tokens;
    gate_scratch s;
    lay_out_gate(c, c->scratch + worker * c->scratch_bytes, &s);
    for (int64_t begin = first; begin < ba_min(c->tokens, first + ba_work.nsa.gate_tokens); begin += TOKENS_AT_ONCE) {
        const int64_t n = ba_min(TOKENS_AT_ONCE, c->tokens - begin);
        make_gates(c, &s, batch, begin, n);
        for (int64_t row = 0; c->out.data && row < n * c->heads; row++) { /* token by token, in the order of memory */
            const int64_t token = begin + row / c->heads, head = row % c->heads;
            const void *rows[GATES];
            for (int g = 0; g < GATES; g++) rows[g] = ba_row(&c->branch[g], batch, token, head);
            c->family->pack->merge_row(ba_row(&c->out, batch, token, head), rows, s.gates + row * GATES * c->real_size, GATES, c->out.dim);
        }
    }
}

/* ---- Backward ----------------------------------------------------------------------------------------------------------- */

/* The gradients of one (token, head). `place` is the token's number in its item: s->dlogits keeps the gradients of the logits for the sum over the
 * item's tokens. */
static void backward_token(const gate_call *c, const gate_scratch *s, int64_t batch, int64_t token, int64_t head, int64_t place) {
    const int64_t real = c->real_size, v_dim = c->dout.dim;
    const void *dout = ba_row(&c->dout, batch, token, head), *rows[GATES];
    double gate[GATES], dlogit[GATES];
    for (int g = 0; g < GATES; g++) {
        gate[g] = c->gates.data ? ba_get_real(ba_row(&c->gates, batch, token, head), g, real) : 1 / 3.0;
        ba_set_real(s->gates, 0, gate[g], real);
        c->family->pack->merge_row(ba_row(&c->dbranch[g], batch, token, head), &dout, s->gates, 1, v_dim);
    }
    if (!c->weighted && !c->dgates.data) return;
    for (int g = 0; g < GATES; g++) rows[g] = ba_row(&c->branch[g], batch, token, head);
    const void *const same[GATES] = {dout, dout, dout};
    c->family->gradient->dot_rows(s->logits, same, rows, GATES, v_dim);
    for (int g = 0; g < GATES; g++) {
        const double dgate = ba_get_real(s->logits, g, real);
        if (c->dgates.data) ba_set_real(ba_row(&c->dgates, batch, token, head), g, dgate, real);
        dlogit[g] = dgate * gate[g] * (1 - gate[g]);
    }
    if (!c->weighted) return;
    for (int g = 0; g < GATES; g++) {
        ba_set_real(s->gates, g, dlogit[g], real);
        ba_set_real(s->dlogits, (head * GATES + g) * ba_work.nsa.gradient_tokens + place, dlogit[g], real);
        rows[g] = weight_row(c->weight, head, g);
    }
    c->kernels->vector[ba_real_of(c->q.dtype)]->pack->merge_row(s->row, rows, s->gates, GATES, c->dim);
    c->family->gradient->store_row(ba_row(&c->dq, batch, token, head), s->row, c->dim);
}

static void backward_item(void *context, int64_t item, int worker) {
    const gate_call *c = context;
    const int64_t batch = item / c->items_per_batch, begin = item % c->items_per_batch * ba_work.nsa.gradient_tokens,
                  n = ba_min(ba_work.nsa.gradient_tokens, c->tokens - begin);
    gate_scratch s;
    lay_out_gate(c, c->scratch + worker * c->scratch_bytes, &s);
    for (int64_t t = 0; t < n; t++)
        for (int64_t head = 0; head < c->heads; head++) backward_token(c, &s, batch, begin + t, head, t);
    for (int64_t head = 0; c->weighted && head < c->heads; head++) {
        for (int64_t t = 0; t < n; t++) s.rows[t] = ba_row(&c->q, batch, begin + t, head);
        for (int64_t g = 0; g < GATES; g++) {
            char *sum = c->dweights + ((item * c->heads + head) * GATES + g) * c->dim * c->real_size;
            memset(sum, 0, (size_t)(c->dim * c->real_size));
            ba_sum_rows(c->kernels, c->q.dtype, s.rows, s.dlogits + (head * GATES + g) * ba_work.nsa.gradient_tokens * c->real_size, n, c->dim,
                        s.wide, sum);
        }
    }
}

/* ---- The calls ------------------------------------------------------------------------------------------------------------ */

/* Checks an array (.., H, 3) of reals that has the tokens and heads of `like`. */
static ba_status take_reals(const char *name, const ba_tensor *t, bool packed, const ba_token_rows *like, ba_dtype real, ba_token_rows *out) {
    BA_TRY(ba_take_rows(name, t, packed ? "(T, H, 3)" : "(B, N, H, 3)", packed, out));
    if (t->dtype != real)
        return ba_fail(BA_ERROR_TYPE, BA_ARG("%s") ": expected dtype %s, got %s", name, ba_dtype_name(real), ba_dtype_name(t->dtype));
    return ba_rows_like(name, out, like, "the other arrays", GATES);
}

/* Checks an array (.., H, D) that has the dtype, tokens and heads of `like`, and, where dim > 0, `dim` elements per row. */
static ba_status take_like(const char *name, const ba_tensor *t, bool packed, const ba_token_rows *like, int64_t dim, ba_token_rows *out) {
    BA_TRY(ba_take_rows(name, t, packed ? "(T, H, D)" : "(B, N, H, D)", packed, out));
    if (t->dtype != like->dtype)
        return ba_fail(BA_ERROR_TYPE, BA_ARG("%s") ": expected dtype %s like the other arrays, got %s", name, ba_dtype_name(like->dtype),
                       ba_dtype_name(t->dtype));
    return ba_rows_like(name, out, like, "the other arrays", dim);
}

/* The dtype and the shape of the weight, and of its gradient. */
static ba_tensor weight_shape(const ba_token_rows *q) {
    return (ba_tensor){.dtype = ba_real_of(q->dtype), .ndim = 3, .dims = {q->heads, GATES, q->dim}};
}

static ba_status check_weight(const ba_tensor *t, const ba_token_rows *q) {
    const ba_tensor expected = weight_shape(q);
    return ba_check_same("gate_proj_weight", t, &expected, true);
}

/* Sets the sizes and the kernels of a call whose arrays have the batch, tokens, heads and dtype of `like`. */
static void set_sizes(gate_call *c, const ba_token_rows *like) {
    c->batch = like->batch;
    c->tokens = like->tokens;
    c->heads = like->heads;
    c->dim = ba_max(1, c->q.dim); /* q.dim is 0 where q is not given */
    c->kernels = ba_kernels_active();
    c->family = c->kernels->vector[like->dtype];
    c->real_size = c->family->real_size;
}

/* Lays out the memory of a call. */
static int64_t lay_out_call(gate_call *c, int threads, char *base) {
    const int64_t rows = c->weighted ? c->heads * GATES : 0, items = c->batch * c->items_per_batch;
    int64_t used = 0;
    c->packed_weight = ba_take(base, &used, c->backward ? 0 : rows * BA_FEW_PAD(c->dim) * c->real_size);
    c->dweights = ba_take(base, &used, c->backward ? items * rows * c->dim * c->real_size : 0);
    c->scratch = ba_take(base, &used, threads * c->scratch_bytes);
    return used;
}

static ba_status get_memory(gate_call *c, int threads) {
    char *memory;
    BA_TRY(ba_get_scratch(lay_out_call(c, threads, NULL), &memory));
    lay_out_call(c, threads, memory);
    return BA_OK;
}

/* Packs the three weight rows of each head as the kernel for few queries takes its queries. */
static void pack_weight(const gate_call *c) {
    for (int64_t head = 0; c->weighted && head < c->heads; head++) {
        const void *rows[GATES];
        for (int64_t g = 0; g < GATES; g++) rows[g] = weight_row(c->weight, head, g);
        char *packed = c->packed_weight + head * GATES * BA_FEW_PAD(c->dim) * c->real_size;
        const ba_order_few_fn order_few = c->kernels->cache[c->q.dtype]->order_few;
        c->kernels->vector[c->weight->dtype]->few->pack_queries(packed, rows, GATES, c->dim, 1);
        if (order_few) order_few(packed, GATES, c->dim);
    }
}

ba_status ba_gate(const ba_gate_args *a) {
    BA_IN_USUAL_MODE;
    BA_TRY(ba_check_pointer("args", a));
    gate_call c = {.weighted = ba_given(&a->weight), .backward = false, .weight = &a->weight};
    const bool combine = ba_given(&a->out);
    const ba_tensor *leading = c.weighted || !combine ? &a->q : &a->branch[0];
    const bool packed = leading->ndim == 3;
    const char *axes = packed ? "(T, H, D)" : "(B, N, H, D)";
    const ba_token_rows *like = leading == &a->q ? &c.q : &c.branch[0];
    if (leading == &a->q) BA_TRY(ba_take_rows("q", &a->q, axes, packed, &c.q));
    else BA_TRY(ba_take_rows("o_cmp", &a->branch[0], axes, packed, &c.branch[0]));
    if (c.weighted) BA_TRY(check_weight(&a->weight, &c.q));
    if (ba_given(&a->gates)) BA_TRY(take_reals("gates", &a->gates, packed, like, ba_real_of(like->dtype), &c.gates));
    static const char *const names[] = {"o_cmp", "o_slc", "o_win"};
    for (int g = 0; combine && g < GATES; g++) BA_TRY(take_like(names[g], &a->branch[g], packed, like, g ? c.branch[0].dim : 0, &c.branch[g]));
    if (combine) BA_TRY(take_like("out", &a->out, packed, like, c.branch[0].dim, &c.out));
    if (combine) BA_TRY(ba_check_places("out", &a->out));
    if (c.weighted && ba_given(&a->gates)) BA_TRY(ba_check_places("gates", &a->gates));
    BA_TRY(ba_check_threads(a->num_threads));
    if (like->batch == 0 || like->tokens == 0) return BA_OK;

    set_sizes(&c, like);
    c.items_per_batch = ba_max(1, ba_ceil_div(c.tokens, ba_work.nsa.gate_tokens));
    gate_scratch unused;
    c.scratch_bytes = lay_out_gate(&c, NULL, &unused);
    const double work = (double)(c.batch * c.tokens) * (double)(c.heads * ba_max(c.dim, c.out.dim));
    const int64_t items = c.batch * c.items_per_batch;
    const int threads = ba_threads_of_call(a->num_threads, work, ba_work.small_work, items);
    BA_TRY(get_memory(&c, threads));
    pack_weight(&c);
    const ba_status status = ba_parallel(threads, items, gate_item, &c);
    ba_arena_release();
    return status;
}

static ba_status check_backward(const ba_gate_backward_args *a, gate_call *c) {
    static const char *const names[] = {"o_cmp", "o_slc", "o_win"}, *const gradient_names[] = {"do_cmp", "do_slc", "do_win"};
    const bool packed = a->dout.ndim == 3, reads_branches = c->weighted || ba_given(&a->dgates);
    BA_TRY(ba_take_rows("dout", &a->dout, packed ? "(T, H, D)" : "(B, N, H, D)", packed, &c->dout));
    for (int g = 0; g < GATES; g++) {
        BA_TRY(take_like(gradient_names[g], &a->dbranch[g], packed, &c->dout, c->dout.dim, &c->dbranch[g]));
        BA_TRY(ba_check_places(gradient_names[g], &a->dbranch[g]));
        if (reads_branches) BA_TRY(take_like(names[g], &a->branch[g], packed, &c->dout, c->dout.dim, &c->branch[g]));
    }
    const ba_dtype real = ba_real_of(c->dout.dtype);
    if (ba_given(&a->gates)) BA_TRY(take_reals("gates", &a->gates, packed, &c->dout, real, &c->gates));
    if (ba_given(&a->dgates)) BA_TRY(take_reals("dgates", &a->dgates, packed, &c->dout, real, &c->dgates));
    if (ba_given(&a->dgates)) BA_TRY(ba_check_places("dgates", &a->dgates));
    if (c->weighted) {
        BA_TRY(take_like("q", &a->q, packed, &c->dout, 0, &c->q));
        BA_TRY(check_weight(&a->weight, &c->q));
        BA_TRY(take_like("dq", &a->dq, packed, &c->dout, c->q.dim, &c->dq));
        BA_TRY(ba_check_places("dq", &a->dq));
        const ba_tensor expected = weight_shape(&c->q);
        BA_TRY(ba_check_output("dgate_proj_weight", &a->dweight, &expected, false));
    }
    return ba_check_threads(a->num_threads);
}

/* Adds the items' sums up, in the order of the items and in double. */
static void sum_dweights(const gate_call *c, const ba_tensor *dweight) {
    const int64_t items = c->batch * c->items_per_batch;
    for (int64_t head = 0; head < c->heads; head++)
        for (int64_t g = 0; g < GATES; g++)
            for (int64_t d = 0; d < c->dim; d++) {
                double sum = 0;
                for (int64_t item = 0; item < items; item++)
                    sum += ba_get_real(c->dweights, ((item * c->heads + head) * GATES + g) * c->dim + d, c->real_size);
                ba_set_real(dweight->data, head * dweight->strides[0] + g * dweight->strides[1] + d * dweight->strides[2], sum, c->real_size);
            }
}

ba_status ba_gate_backward(const ba_gate_backward_args *a) {
    BA_IN_USUAL_MODE;
    BA_TRY(ba_check_pointer("args", a));
    gate_call c = {.weighted = ba_given(&a->weight), .backward = true, .weight = &a->weight};
    BA_TRY(check_backward(a, &c));
    if (!c.weighted && (c.dout.batch == 0 || c.dout.tokens == 0)) return BA_OK;
    set_sizes(&c, &c.dout);
    c.items_per_batch = ba_ceil_div(c.tokens, ba_work.nsa.gradient_tokens);
    const int64_t items = c.batch * c.items_per_batch;
    gate_scratch unused;
    c.scratch_bytes = lay_out_gate(&c, NULL, &unused);
    const double work = (double)(c.batch * c.tokens) * (double)(c.heads * c.dout.dim);
    const int threads = ba_threads_of_call(a->num_threads, work, ba_work.small_work, items);
    BA_TRY(get_memory(&c, threads));
    const ba_status status = ba_parallel(threads, items, backward_item, &c);
    if (c.weighted && status == BA_OK) sum_dweights(&c, &a->dweight);
    ba_arena_release();
    return status;
}
