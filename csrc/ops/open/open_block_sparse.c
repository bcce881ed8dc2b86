/* Opens calls of block-sparse attention: checks every shape, relation and range before any work is done, except the entries of lists, which
 * are checked when the call runs. */
#include <inttypes.h>
#include <stdio.h>

#include "core/float_mode.h"
#include "core/status.h"
#include "kernels/kernels.h"
#include "ops/check.h"
#include "ops/open/open.h"

static const char *q_axes(ba_layout layout) {
    static const char *const axes[] = {"(B, H, Sq, D)", "(B, Sq, H, D)", "(B, Sq, H*D)", "(T, H, D)"};
    return axes[layout];
}

static const char *kv_axes(ba_layout layout, bool is_v) {
    static const char *const k[] = {"(B, Hkv, Skv, D)", "(B, Skv, Hkv, D)", "(B, Skv, Hkv*D)", "(Tkv, Hkv, D)"};
    static const char *const v[] = {"(B, Hkv, Skv, Dv)", "(B, Skv, Hkv, Dv)", "(B, Skv, Hkv*Dv)", "(Tkv, Hkv, Dv)"};
    return is_v ? v[layout] : k[layout];
}

/* ---- Tensors ---------------------------------------------------------------------------------------------------- */

/* The sizes and the view of a tensor, whatever its layout. For BA_TND, `batch` is 1 and `tokens` is T. */
typedef struct sized_view {
    int64_t batch, heads, tokens, dim;
    ba_view view;
} sized_view;

static ba_status check_kind(const char *name, const ba_tensor *t, const char *axes, ba_layout layout) {
    const int rank = layout == BA_BNSD || layout == BA_BSND ? 4 : 3;
    BA_TRY(ba_check_float(name, t));
    if (t->ndim != rank)
        return ba_fail(BA_ERROR_VALUE, BA_ARG("%s") ": expected shape %s for layout %s, got %s", name, axes, ba_layout_name(layout),
                       ba_shape_text(t).chars);
    BA_TRY(ba_check_last_axis(name, t));
    return ba_check_extent(name, t);
}

/* Checks a tensor of queries, keys or values and fills `out`. `heads` is used for BA_BSH only. */
static ba_status take_view(const char *name, const ba_tensor *t, const char *axes, ba_layout layout, int64_t heads, sized_view *out) {
    BA_TRY(check_kind(name, t, axes, layout));
    int64_t step[3]; /* the strides of the first three axes */
    for (int i = 0; i < 3 && i < t->ndim; i++) step[i] = ba_step(t, i);
    switch (layout) {
    case BA_BNSD: *out = (sized_view){t->dims[0], t->dims[1], t->dims[2], t->dims[3], {t->data, step[0], step[1], step[2]}}; break;
    case BA_BSND: *out = (sized_view){t->dims[0], t->dims[2], t->dims[1], t->dims[3], {t->data, step[0], step[2], step[1]}}; break;
    case BA_TND: *out = (sized_view){1, t->dims[1], t->dims[0], t->dims[2], {t->data, 0, step[1], step[0]}}; break;
    case BA_BSH:
        if (heads < 1)
            return ba_fail(BA_ERROR_VALUE, BA_ARG("num_heads") ": expected the number of heads in the last axis for layout BSH, got %" PRId64, heads);
        if (t->dims[2] % heads != 0)
            return ba_fail(BA_ERROR_VALUE, BA_ARG("%s") ": expected a last axis that %" PRId64 " heads divide, got %s", name, heads,
                           ba_shape_text(t).chars);
        *out = (sized_view){t->dims[0], heads, t->dims[1], t->dims[2] / heads, {t->data, step[0], t->dims[2] / heads, step[1]}};
        break;
    }
    return BA_OK;
}

/* Checks q, k and v. */
static ba_status take_inputs(const ba_block_sparse_args *args, sized_view *q, sized_view *k, sized_view *v) {
    const ba_layout layout = args->layout;
    if ((unsigned)layout > BA_TND) return ba_fail(BA_ERROR_VALUE, BA_ARG("layout") ": expected BNSD, BSND, BSH or TND, got %d", (int)layout);
    const int64_t kv_heads = args->num_kv_heads ? args->num_kv_heads : args->num_heads;
    BA_TRY(take_view("q", &args->q, q_axes(layout), layout, args->num_heads, q));
    if (q->dim < 1 || q->dim > BA_MAX_HEAD_DIM)
        return ba_fail(BA_ERROR_VALUE, BA_ARG("q") ": expected a head dim D from 1 to %d, got %" PRId64 " in %s", BA_MAX_HEAD_DIM, q->dim,
                       ba_shape_text(&args->q).chars);
    if (q->heads < 1) return ba_fail(BA_ERROR_VALUE, BA_ARG("q") ": expected at least one head, got %s", ba_shape_text(&args->q).chars);
    BA_TRY(take_view("k", &args->k, kv_axes(layout, false), layout, kv_heads, k));
    if (args->k.dtype != args->q.dtype)
        return ba_fail(BA_ERROR_TYPE, BA_ARG("k") ": expected dtype %s like " BA_ARG("q") ", got %s", ba_dtype_name(args->q.dtype),
                       ba_dtype_name(args->k.dtype));
    if (k->dim != q->dim)
        return ba_fail(BA_ERROR_VALUE, BA_ARG("k") ": expected shape %s with D = %" PRId64 " like " BA_ARG("q") ", got %s", kv_axes(layout, false),
                       q->dim, ba_shape_text(&args->k).chars);
    if (k->batch != q->batch)
        return ba_fail(BA_ERROR_VALUE, BA_ARG("k") ": expected shape %s with B = %" PRId64 " like " BA_ARG("q") ", got %s", kv_axes(layout, false),
                       q->batch, ba_shape_text(&args->k).chars);
    if (k->heads < 1 || q->heads % k->heads != 0)
        return ba_fail(BA_ERROR_VALUE, BA_ARG("k") ": expected a number of heads that divides " BA_ARG("q") "'s %" PRId64 ", got %" PRId64 " in %s",
                       q->heads, k->heads, ba_shape_text(&args->k).chars);
    BA_TRY(take_view("v", &args->v, kv_axes(layout, true), layout, kv_heads, v));
    if (args->v.dtype != args->q.dtype)
        return ba_fail(BA_ERROR_TYPE, BA_ARG("v") ": expected dtype %s like " BA_ARG("q") ", got %s", ba_dtype_name(args->q.dtype),
                       ba_dtype_name(args->v.dtype));
    if (v->batch != k->batch || v->heads != k->heads || v->tokens != k->tokens)
        return ba_fail(BA_ERROR_VALUE, BA_ARG("v") ": expected shape %s with the batch, heads and tokens of " BA_ARG("k") " %s, got %s",
                       kv_axes(layout, true), ba_shape_text(&args->k).chars, ba_shape_text(&args->v).chars);
    if (v->dim < 1 || v->dim > BA_MAX_HEAD_DIM)
        return ba_fail(BA_ERROR_VALUE, BA_ARG("v") ": expected a head dim Dv from 1 to %d, got %" PRId64 " in %s", BA_MAX_HEAD_DIM, v->dim,
                       ba_shape_text(&args->v).chars);
    return BA_OK;
}

/* Sets the dtypes and shapes that the outputs must have, and checks that their sizes do not overflow. */
static ba_status set_output_shapes(const ba_block_sparse_args *args, const ba_problem *p, int64_t q_tokens, ba_tensor *out_shape,
                                   ba_tensor *lse_shape) {
    *out_shape = args->q;
    out_shape->data = NULL;
    if (p->unrounded) out_shape->dtype = ba_real_of(p->dtype);
    out_shape->dims[out_shape->ndim - 1] = p->v_dim;
    if (args->layout == BA_BSH && __builtin_mul_overflow(p->heads, p->v_dim, &out_shape->dims[2])) out_shape->dims[2] = INT64_MAX;
    *lse_shape = (ba_tensor){.dtype = ba_real_of(p->dtype), .ndim = 3, .dims = {p->batch, p->heads, p->q_len}};
    if (args->layout == BA_TND) {
        lse_shape->ndim = 2;
        lse_shape->dims[0] = q_tokens;
        lse_shape->dims[1] = p->heads;
    }
    int64_t elements = 16; /* the product is in bytes: an element counts twice the size of a double */
    for (int i = 0; i < out_shape->ndim; i++)
        if (__builtin_mul_overflow(elements, ba_max(1, out_shape->dims[i]), &elements))
            return ba_fail(BA_ERROR_VALUE, BA_ARG("q") ": expected an output below 2^63 bytes, got shape %s", ba_shape_text(out_shape).chars);
    return BA_OK;
}

/* ---- Relations -------------------------------------------------------------------------------------------------- */

/* Checks the cumulative lengths of q and k, or the numbers of their valid tokens, and puts them into the problem. */
static ba_status check_sequences(const ba_block_sparse_args *args, int64_t q_tokens, int64_t kv_tokens, ba_problem *p) {
    if (args->layout == BA_TND) {
        if (args->batch < 0) return ba_fail(BA_ERROR_VALUE, BA_ARG("cu_seqlens_q") ": expected at least one number, got none");
        if (args->q_lens || args->kv_lens)
            return ba_fail(BA_ERROR_VALUE,
                           BA_ARG("%s") ": expected none with layout TND, whose lengths are " BA_ARG("cu_seqlens_q") " and " BA_ARG(
                               "cu_seqlens_kv") ", got some",
                           args->q_lens ? "q_lens" : "kv_lens");
        p->batch = args->batch;
        p->cu_q = args->cu_q;
        p->q_ends = args->cu_q ? args->cu_q + 1 : NULL;
        p->cu_kv = args->cu_kv;
        BA_TRY(ba_check_cumulative("cu_seqlens_q", args->cu_q, p->batch, q_tokens, &p->q_len));
        BA_TRY(ba_check_cumulative("cu_seqlens_kv", args->cu_kv, p->batch, kv_tokens, &p->kv_len));
    } else {
        if (args->cu_q || args->cu_kv)
            return ba_fail(BA_ERROR_VALUE,
                           BA_ARG("%s") ": expected none with layout %s, whose lengths are " BA_ARG("q_lens") " and " BA_ARG("kv_lens") ", got some",
                           args->cu_q ? "cu_seqlens_q" : "cu_seqlens_kv", ba_layout_name(args->layout));
        p->q_lens = args->q_lens;
        p->kv_lens = args->kv_lens;
        BA_TRY(ba_check_lengths("q_lens", args->q_lens, p->batch, p->q_len));
        BA_TRY(ba_check_lengths("kv_lens", args->kv_lens, p->batch, p->kv_len));
    }
    if (p->q_len > BA_MOST_TOKENS || p->kv_len > BA_MOST_TOKENS)
        return ba_fail(BA_ERROR_VALUE, BA_ARG("%s") ": expected at most %d tokens per sequence, got %" PRId64, p->q_len > p->kv_len ? "q" : "k",
                       BA_MOST_TOKENS, ba_max(p->q_len, p->kv_len));
    return BA_OK;
}

static ba_status check_options(const ba_block_sparse_args *args) {
    if (args->sinks && args->routed) return ba_fail(BA_ERROR_VALUE, BA_ARG("sinks") ": expected none with routed lists, got some");
    if (args->routed || args->key_stride != 0) {
        if (ba_given(&args->attn_mask))
            return ba_fail(BA_ERROR_VALUE, BA_ARG("attn_mask") ": expected none with routed lists or " BA_ARG("key_stride") ", got some");
        if (args->alibi_slopes)
            return ba_fail(BA_ERROR_VALUE, BA_ARG("alibi_slopes") ": expected none with routed lists or " BA_ARG("key_stride") ", got some");
    }
    if (args->window[0] < -1 || args->window[1] < -1)
        return ba_fail(BA_ERROR_VALUE, BA_ARG("window") ": expected token counts of at least 0, or -1 for no bound, got (%" PRId64 ", %" PRId64 ")",
                       args->window[0], args->window[1]);
    return ba_check_threads(args->num_threads);
}

static bool list_heads_fit(const ba_problem *p, int64_t heads) { return heads == 1 || heads == p->heads || heads == p->kv_heads; }

/* The numbers of list heads that fit, for a sentence. */
static ba_text list_heads_text(const ba_problem *p) {
    ba_text out;
    if (p->heads == 1) snprintf(out.chars, sizeof out.chars, "1");
    else if (p->heads == p->kv_heads || p->kv_heads == 1) snprintf(out.chars, sizeof out.chars, "%" PRId64 " or 1", p->heads);
    else snprintf(out.chars, sizeof out.chars, "%" PRId64 ", %" PRId64 " or 1", p->heads, p->kv_heads);
    return out;
}

/* Checks lists of BA_TND that have the rows of all sequences one after the other (cu_rows). */
static ba_status check_packed_rows(const ba_block_sparse_args *args, ba_problem *p) {
    const ba_tensor *t = &args->blocks;
    if (args->layout != BA_TND)
        return ba_fail(BA_ERROR_VALUE, BA_ARG("cu_rows") ": expected none with layout %s, whose lists have a batch axis, got some",
                       ba_layout_name(args->layout));
    int64_t rows = 0;
    for (int64_t b = 0; b <= p->batch; b++) {
        if (args->cu_rows[b] != rows)
            return ba_fail(BA_ERROR_VALUE,
                           BA_ARG("cu_rows") ": expected %" PRId64 ", the number of block rows in the sequences before this one, got %" PRId64
                                             " at [%" PRId64 "]",
                           rows, args->cu_rows[b], b);
        if (b < p->batch) rows += ba_ceil_div(ba_q_span(p, b).rows, p->block_q);
    }
    if (t->ndim != 3 || !list_heads_fit(p, t->dims[0]) || t->dims[1] != rows)
        return ba_fail(BA_ERROR_VALUE, BA_ARG("sabi") ": expected shape (%s, %" PRId64 ", W), got %s", list_heads_text(p).chars, rows,
                       ba_shape_text(t).chars);
    BA_TRY(ba_check_extent("sabi", t));
    p->blocks = (ba_tensor){.data = t->data,
                            .dtype = t->dtype,
                            .ndim = 4,
                            .dims = {1, t->dims[0], rows, t->dims[2]},
                            .strides = {0, t->strides[0], t->strides[1], t->strides[2]}};
    ba_drop_unused_strides(&p->blocks);
    p->cu_rows = args->cu_rows;
    return BA_OK;
}

/* Advice to a caller whose list does not fit, or no text. */
static const char *advice_on_list(const ba_block_sparse_args *args, const ba_problem *p, const ba_tensor *list) {
    const bool may_be_swapped = args->layout == BA_BNSD && list->ndim == 4 && p->heads > p->q_len;
    return may_be_swapped && list->dims[2] == ba_ceil_div(p->heads, p->block_q) ? " (it fits q of shape (B, S, H, D), which layout \"BSND\" takes)"
                                                                                : "";
}

static ba_status check_blocks(const ba_block_sparse_args *args, ba_problem *p) {
    const ba_tensor list = args->blocks.ndim == 2 || args->blocks.ndim == 3 ? ba_four_axes(&args->blocks) : args->blocks, *t = &list;
    if (args->block_q < 1 || args->block_kv < 1)
        return ba_fail(BA_ERROR_VALUE, BA_ARG("block_shape") ": expected two sizes of at least 1, got (%" PRId64 ", %" PRId64 ")", args->block_q,
                       args->block_kv);
    p->listed = ba_given(t);
    p->block_q = ba_min(args->block_q, BA_MOST_TOKENS); /* any size above the longest sequence means the same */
    p->block_kv = ba_min(args->block_kv, BA_MOST_TOKENS);
    p->block_rows = ba_ceil_div(p->q_len, p->block_q);
    p->block_columns = ba_ceil_div(p->kv_len, p->block_kv);
    if (!p->listed) return BA_OK;
    if (t->dtype != BA_UINT16 && t->dtype != BA_INT16 && t->dtype != BA_INT32 && t->dtype != BA_INT64)
        return ba_fail(BA_ERROR_TYPE, BA_ARG("sabi") ": expected uint16, int16, int32 or int64, got %s", ba_dtype_name(t->dtype));
    p->list_name = "sabi";
    p->routed = args->routed != 0;
    if (args->cu_rows) return check_packed_rows(args, p);
    if (t->ndim != 4 || (t->dims[0] != 1 && t->dims[0] != p->batch) || !list_heads_fit(p, t->dims[1]) || t->dims[2] != p->block_rows)
        return ba_fail(BA_ERROR_VALUE,
                       BA_ARG("sabi") ": expected shape (%" PRId64 "%s, %s, %" PRId64 ", W), with %" PRId64 " rows = ceil(%" PRId64
                                      " queries / " BA_ARG("block_shape") "[0] = %" PRId64 "), got %s%s",
                       p->batch, p->batch > 1 ? " or 1" : "", list_heads_text(p).chars, p->block_rows, p->block_rows, p->q_len, p->block_q,
                       ba_shape_text(&args->blocks).chars, advice_on_list(args, p, t));
    BA_TRY(ba_check_extent("sabi", t));
    p->blocks = *t;
    ba_drop_unused_strides(&p->blocks);
    return BA_OK;
}

static ba_status check_positions(const ba_block_sparse_args *args, ba_problem *p) {
    p->q_begin = args->q_begin;
    p->key_stride = args->key_stride;
    p->key_last = args->key_last;
    p->q_total = args->q_total;
    BA_TRY(ba_check_begins(args->q_begin, p->batch));
    for (int64_t b = 0; args->q_total && b < p->batch; b++)
        if (args->q_total[b] < ba_q_span(p, b).valid || args->q_total[b] > BA_MOST_TOKENS)
            return ba_fail(BA_ERROR_VALUE,
                           BA_ARG("q_total") ": expected at least the %" PRId64 " queries of the call and at most %d, got %" PRId64 " at [%" PRId64
                                             "]",
                           ba_q_span(p, b).valid, BA_MOST_TOKENS, args->q_total[b], b);
    if (args->key_stride < 0 || args->key_last < 0)
        return ba_fail(BA_ERROR_VALUE, BA_ARG("key_stride") ", " BA_ARG("key_last") ": expected at least 0, got %" PRId64 " and %" PRId64,
                       args->key_stride, args->key_last);
    if (args->key_stride == 0) return BA_OK;
    if (!args->q_begin)
        return ba_fail(BA_ERROR_VALUE,
                       BA_ARG("q_begin") ": expected the first query's token number where " BA_ARG("key_stride") " is given, got none");
    if (p->window_left >= 0 || p->window_right >= 0)
        return ba_fail(BA_ERROR_VALUE, BA_ARG("window") ": expected no bound where " BA_ARG("key_stride") " is given, got (%" PRId64 ", %" PRId64 ")",
                       args->window[0], args->window[1]);
    return BA_OK;
}

static ba_status check_inputs(const ba_block_sparse_args *args, ba_problem *p, ba_tensor *out_shape, ba_tensor *lse_shape) {
    sized_view q, k, v;
    BA_TRY(take_inputs(args, &q, &k, &v));

    *p = (ba_problem){
        .dtype = args->q.dtype,
        .k_dtype = args->q.dtype,
        .v_dtype = args->q.dtype,
        .element_size = ba_dtype_size(args->q.dtype),
        .kv_element_size = ba_dtype_size(args->q.dtype),
        .out_element_size = ba_dtype_size(args->unrounded ? ba_real_of(args->q.dtype) : args->q.dtype),
        .unrounded = args->unrounded != 0,
        .batch = q.batch,
        .heads = q.heads,
        .kv_heads = k.heads,
        .group = q.heads / k.heads,
        .q_len = q.tokens,
        .kv_len = k.tokens,
        .head_dim = q.dim,
        .v_dim = v.dim,
        .k_width = q.dim,
        .v_width = v.dim,
        .q = q.view,
        .k = k.view,
        .v = v.view,
        .causal = args->causal != 0,
        .window_left = ba_min(args->window[0], INT32_MAX),
        .window_right = ba_min(args->window[1], INT32_MAX),
    };
    BA_TRY(ba_take_block_sparse_rules(args, p));
    BA_TRY(check_options(args));
    BA_TRY(check_sequences(args, q.tokens, k.tokens, p));
    BA_TRY(check_blocks(args, p));
    BA_TRY(check_positions(args, p));
    BA_TRY(ba_check_kv_ranges(&args->kv_ranges, args->layout == BA_TND ? -1 : p->batch, q.tokens, &p->kv_ranges));
    BA_TRY(ba_check_attn_mask(&args->attn_mask, (const int64_t[]){p->batch, p->heads, p->q_len, p->kv_len}, false, &p->attn_mask));

    return set_output_shapes(args, p, q.tokens, out_shape, lse_shape);
}

/* The view of a tensor that has one number per query and head, such as lse. */
static ba_view query_numbers(ba_layout layout, const ba_tensor *t) {
    if (layout == BA_TND) return (ba_view){t->data, 0, t->strides[1], t->strides[0]};
    return (ba_view){t->data, t->strides[0], t->strides[1], t->strides[2]};
}

ba_status ba_open_block_sparse(const ba_block_sparse_args *args, ba_attention *a) {
    BA_IN_USUAL_MODE;
    *a = (ba_attention){.num_threads = args->num_threads};
    return check_inputs(args, &a->problem, &a->out_shape, &a->lse_shape);
}

ba_status ba_set_block_sparse_outputs(const ba_block_sparse_args *args, ba_attention *a) {
    BA_TRY(ba_check_output("out", &args->out, &a->out_shape, true));
    sized_view out;
    BA_TRY(take_view("out", &args->out, q_axes(args->layout), args->layout, a->problem.heads, &out));
    a->problem.out = out.view;
    if (!ba_given(&args->lse)) return BA_OK;
    BA_TRY(ba_check_output("lse", &args->lse, &a->lse_shape, false));
    a->problem.lse = query_numbers(args->layout, &args->lse);
    return BA_OK;
}

/* ---- Backward ---------------------------------------------------------------------------------------------------- */

/* Checks an input that has the shape of an output of the forward call. Its strides may be 0, because it is only read. */
static ba_status check_given(const char *name, const ba_tensor *t, const ba_tensor *expected, bool contiguous_last_axis) {
    if (!ba_given(t)) return ba_fail(BA_ERROR_VALUE, BA_ARG("%s") ": expected shape %s, got none", name, ba_shape_text(expected).chars);
    return ba_check_same(name, t, expected, contiguous_last_axis);
}

ba_status ba_open_block_sparse_backward(const ba_block_sparse_backward_args *args, ba_attention *a, ba_gradients *g) {
    BA_IN_USUAL_MODE;
    const ba_block_sparse_args *forward = &args->forward;
    const ba_layout layout = forward->layout;
    ba_problem *p = &a->problem;
    sized_view view;
    *g = (ba_gradients){0};
    BA_TRY(ba_open_block_sparse(forward, a));
    if (forward->unrounded)
        return ba_fail(BA_ERROR_VALUE, BA_ARG("unrounded") ": expected 0 where " BA_ARG("out") " is an input, got %d", forward->unrounded);
    BA_TRY(check_given("out", &forward->out, &a->out_shape, true));
    BA_TRY(take_view("out", &forward->out, q_axes(layout), layout, p->heads, &view));
    p->out = view.view;
    BA_TRY(check_given("lse", &forward->lse, &a->lse_shape, false));
    p->lse = query_numbers(layout, &forward->lse);
    BA_TRY(check_given("dout", &args->dout, &a->out_shape, true));
    BA_TRY(take_view("dout", &args->dout, q_axes(layout), layout, p->heads, &view));
    g->dout = view.view;
    if (!ba_given(&args->dlse)) return BA_OK;
    BA_TRY(check_given("dlse", &args->dlse, &a->lse_shape, false));
    g->dlse = query_numbers(layout, &args->dlse);
    return BA_OK;
}

void ba_gradient_shapes(const ba_block_sparse_backward_args *args, ba_tensor shapes[3]) {
    shapes[0] = args->forward.q;
    shapes[1] = args->forward.k;
    shapes[2] = args->forward.v;
    for (int i = 0; i < 3; i++) {
        shapes[i].data = NULL;
        if (i > 0 && args->accumulate) shapes[i].dtype = ba_real_of(shapes[i].dtype);
    }
}

static ba_status set_bias_gradients(const ba_block_sparse_backward_args *args, const ba_problem *p, ba_gradients *g) {
    if (args->dalibi_slopes && !p->alibi_slopes)
        return ba_fail(BA_ERROR_VALUE, BA_ARG("dalibi_slopes") ": expected none without " BA_ARG("alibi_slopes") ", got some");
    g->alibi_slopes = args->dalibi_slopes;
    if (!ba_given(&args->dattn_mask)) return BA_OK;
    const ba_tensor *mask = &args->forward.attn_mask;
    if (!ba_given(mask)) return ba_fail(BA_ERROR_VALUE, BA_ARG("dattn_mask") ": expected none without " BA_ARG("attn_mask") ", got some");
    if (mask->dtype == BA_BOOL)
        return ba_fail(BA_ERROR_TYPE, BA_ARG("dattn_mask") ": expected none where " BA_ARG("attn_mask") " is of bool, got some");
    BA_TRY(ba_check_output("dattn_mask", &args->dattn_mask, mask, mask->ndim > 0));
    g->attn_mask = ba_four_axes(&args->dattn_mask);
    return BA_OK;
}

ba_status ba_set_gradients(const ba_block_sparse_backward_args *args, const ba_attention *a, ba_gradients *g) {
    const ba_block_sparse_args *forward = &args->forward;
    const struct {
        const char *name;
        const ba_tensor *output;
        int64_t heads;
        ba_view *view;
    } outputs[] = {
        {"dq", &args->dq, a->problem.heads, &g->dq},
        {"dk", &args->dk, a->problem.kv_heads, &g->dk},
        {"dv", &args->dv, a->problem.kv_heads, &g->dv},
    };
    ba_tensor shapes[3];
    ba_gradient_shapes(args, shapes);
    g->accumulate = args->accumulate != 0;
    for (int i = 0; i < 3; i++) {
        sized_view view;
        BA_TRY(ba_check_output(outputs[i].name, outputs[i].output, &shapes[i], true));
        BA_TRY(take_view(outputs[i].name, outputs[i].output, "", forward->layout, outputs[i].heads, &view));
        *outputs[i].view = view.view;
    }
    return set_bias_gradients(args, &a->problem, g);
}
