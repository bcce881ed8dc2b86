/* Opens calls of paged attention: checks everything before any work is done, except the page numbers in `selected`, which are checked when the call
 * runs. */
#include <inttypes.h>

#include "core/float_mode.h"
#include "core/status.h"
#include "kernels/kernels.h"
#include "ops/check.h"
#include "ops/kv_cache/kv_cache.h"
#include "ops/open/open.h"

/* Puts lists with one row per query into the problem. Their blocks have selected_size tokens. */
static ba_status take_selected_of_queries(const ba_paged_args *args, ba_problem *p) {
    const ba_tensor *t = &args->selected;
    if (args->selected_counts)
        return ba_fail(BA_ERROR_VALUE, BA_ARG("selected_counts") ": expected none beside " BA_ARG("selected_size") ", got some");
    if (t->ndim != 3 || t->dims[0] != args->q.dims[0] || (t->dims[1] != 1 && t->dims[1] != p->kv_heads && t->dims[1] != p->heads))
        return ba_fail(BA_ERROR_VALUE,
                       BA_ARG("selected") ": expected shape (%" PRId64 ", %" PRId64 " or %" PRId64
                                          " or 1, K), a list per query for each KV head, each query head or all heads, got %s",
                       args->q.dims[0], p->kv_heads, p->heads, ba_shape_text(t).chars);
    p->blocks.strides[0] = p->cu_q ? 0 : t->strides[0];
    p->blocks.strides[2] = p->cu_q ? t->strides[0] : 0;
    p->blocks.dims[0] = p->cu_q ? 1 : t->dims[0];
    p->blocks.dims[2] = p->cu_q ? t->dims[0] : 1;
    p->cu_rows = p->cu_q;
    p->block_q = 1;
    p->block_rows = p->q_len;
    p->block_kv = ba_min(args->selected_size, BA_MOST_TOKENS);
    p->block_columns = ba_ceil_div(p->kv_len, p->block_kv);
    return BA_OK;
}

/* Checks the shape of the selected pages and their counts, and puts them into the problem as its lists. Without selected_size, a block is one page,
 * and one block row has all queries of a request. Without selected pages, the problem has no lists. The call checks the page numbers when it runs. */
static ba_status check_selected(const ba_paged_args *args, ba_problem *p) {
    const ba_tensor *t = &args->selected;
    p->list_name = "selected";
    p->block_kv = p->page_size;
    p->block_q = ba_max(1, p->q_len);
    p->block_rows = 1;
    p->block_columns = ba_ceil_div(p->kv_len, p->page_size);
    if (!ba_given(t)) {
        if (args->selected_counts)
            return ba_fail(BA_ERROR_VALUE, BA_ARG("selected_counts") ": expected none without " BA_ARG("selected") ", got some");
        return args->selected_size ? ba_fail(BA_ERROR_VALUE, BA_ARG("selected_size") ": expected none without " BA_ARG("selected") ", got one")
                                   : BA_OK;
    }
    if (t->dtype != BA_INT32 && t->dtype != BA_INT64 && t->dtype != BA_INT16)
        return ba_fail(BA_ERROR_TYPE, BA_ARG("selected") ": expected int16, int32 or int64, got %s", ba_dtype_name(t->dtype));
    if (args->selected_size < 0)
        return ba_fail(BA_ERROR_VALUE, BA_ARG("selected_size") ": expected at least 1 token, got %" PRId64, args->selected_size);
    if (!args->selected_size && (t->ndim != 3 || t->dims[0] != p->batch || (t->dims[1] != p->kv_heads && t->dims[1] != p->heads)))
        return ba_fail(BA_ERROR_VALUE,
                       BA_ARG("selected") ": expected shape (%" PRId64 ", %" PRId64 " or %" PRId64
                                          ", K), one row per request and KV head or query head, got %s",
                       p->batch, p->kv_heads, p->heads, ba_shape_text(t).chars);
    BA_TRY(ba_check_extent("selected", t));
    p->listed = true;
    p->blocks = (ba_tensor){.data = t->data,
                            .dtype = t->dtype,
                            .ndim = 4,
                            .dims = {t->dims[0], t->dims[1], 1, t->dims[2]},
                            .strides = {t->strides[0], t->strides[1], 0, t->strides[2]}};
    if (args->selected_size) BA_TRY(take_selected_of_queries(args, p));
    ba_drop_unused_strides(&p->blocks);
    p->block_counts = args->selected_counts;
    for (int64_t i = 0; args->selected_counts && i < t->dims[0] * t->dims[1]; i++)
        if (args->selected_counts[i] < 0 || args->selected_counts[i] > t->dims[2])
            return ba_fail(BA_ERROR_VALUE, BA_ARG("selected_counts") ": expected 0 to %" PRId64 ", got %" PRId64 " at [%" PRId64 ", %" PRId64 "]",
                           t->dims[2], args->selected_counts[i], i / t->dims[1], i % t->dims[1]);
    return BA_OK;
}

/* Checks q, which has shape (T, H, D) where `ragged`, and else has one query for each of `batch` requests. `reused`: the tables were opened before
 * this call. */
static ba_status check_q(const ba_tensor *q, bool reused, int64_t batch, bool ragged) {
    BA_TRY(ba_check_float("q", q));
    if (q->ndim != 3)
        return ba_fail(BA_ERROR_VALUE, BA_ARG("q") ": expected shape %s, got %s", ragged ? "(T, H, D)" : "(B, H, D)", ba_shape_text(q).chars);
    BA_TRY(ba_check_extent("q", q));
    if (q->dims[2] < 1 || q->dims[2] > BA_MAX_HEAD_DIM || q->dims[1] < 1)
        return ba_fail(BA_ERROR_VALUE, BA_ARG("q") ": expected at least one head and a head dim D from 1 to %d, got %s", BA_MAX_HEAD_DIM,
                       ba_shape_text(q).chars);
    BA_TRY(ba_check_last_axis("q", q));
    if (reused && !ragged && q->dims[0] != batch)
        return ba_fail(BA_ERROR_VALUE, BA_ARG("q") ": expected %" PRId64 " queries as the plan has them, got %s", batch, ba_shape_text(q).chars);
    if (batch < 0 || (!ragged && q->dims[0] != batch))
        return ba_fail(BA_ERROR_VALUE, BA_ARG("seq_lens") ": expected one length for each of " BA_ARG("q") "'s %" PRId64 " requests, got %" PRId64,
                       q->dims[0], batch);
    return BA_OK;
}

/* Checks the caches and their scales, and that they fit q. */
static ba_status check_caches(const ba_paged_args *args, ba_caches *c) {
    const ba_tensor *q = &args->q, *k = &args->k_cache;
    BA_TRY(ba_check_caches(args, c));
    if ((q->dtype == BA_FLOAT64) != (c->dtype == BA_FLOAT64))
        return ba_fail(BA_ERROR_TYPE, BA_ARG("k_cache") ": expected %s with a %s " BA_ARG("q") ", got %s",
                       q->dtype == BA_FLOAT64 ? "float64" : "float32, float16, bfloat16, int8, float8_e4m3, q8_0, q4_0 or q4_1",
                       ba_dtype_name(q->dtype), ba_dtype_name(c->dtype));
    if (c->k_dim != q->dims[2] && ba_has_cells(c->dtype))
        return ba_fail(BA_ERROR_VALUE,
                       BA_ARG("k_cache") ": expected rows of D = %" PRId64 " like " BA_ARG("q") ", got rows of D = %" PRId64 " in %s, %s", q->dims[2],
                       c->k_dim, ba_dtype_name(c->dtype), ba_shape_text(k).chars);
    if (c->k_dim != q->dims[2])
        return ba_fail(BA_ERROR_VALUE, BA_ARG("k_cache") ": expected a last axis D = %" PRId64 " like " BA_ARG("q") ", got %s", q->dims[2],
                       ba_shape_text(k).chars);
    if (q->dims[1] % c->heads != 0)
        return ba_fail(BA_ERROR_VALUE,
                       BA_ARG("k_cache") ": expected a number of heads that divides " BA_ARG("q") "'s %" PRId64 ", got %" PRId64 " in %s", q->dims[1],
                       c->heads, ba_shape_text(k).chars);
    return BA_OK;
}

/* Checks q, the caches and the options (kv_layout, rules, window, num_threads), and fills the problem with them. Page tables, lengths, the
 * positions of queries, selected pages and outputs are left to other functions. `reused` and `ragged`: see check_q(). */
static ba_status check_inputs(const ba_paged_args *args, bool reused, int64_t batch, bool ragged, ba_problem *p) {
    const ba_tensor *q = &args->q;
    ba_caches c;
    BA_TRY(check_q(q, reused, batch, ragged));
    BA_TRY(check_caches(args, &c));

    *p = (ba_problem){
        .dtype = q->dtype,
        .k_dtype = c.dtype,
        .v_dtype = c.v_dtype,
        .element_size = ba_dtype_size(q->dtype),
        .kv_element_size = ba_dtype_size(c.dtype),
        .out_element_size = ba_dtype_size(args->unrounded ? ba_real_of(q->dtype) : q->dtype),
        .unrounded = args->unrounded != 0,
        .batch = batch,
        .heads = q->dims[1],
        .kv_heads = c.heads,
        .group = q->dims[1] / c.heads,
        .q_len = 1,
        .head_dim = q->dims[2],
        .v_dim = c.v_dim,
        .k_width = c.k_width,
        .v_width = c.v_width,
        .q = ragged ? (ba_view){q->data, 0, ba_step(q, 1), ba_step(q, 0)} : (ba_view){q->data, ba_step(q, 0), ba_step(q, 1), 0},
        .k = c.k,
        .v = c.v,
        .k_scale = c.k_scale,
        .v_scale = c.v_scale,
        .page_size = c.page_size,
        .causal = !ba_given(&args->kv_ranges),
        .window_left = ba_min(args->window, INT32_MAX),
        .window_right = -1,
    };
    BA_TRY(ba_take_paged_rules(args, p));
    if (args->window < -1)
        return ba_fail(BA_ERROR_VALUE, BA_ARG("window") ": expected a token count of at least 0, or -1 for no bound, got %" PRId64, args->window);
    return ba_check_threads(args->num_threads);
}

/* Checks that page tables which were opened before this call, for all calls of a step, fit the call. In Python such tables belong to a PagedPlan,
 * which the sentences of errors call the plan. */
static ba_status check_tables(const ba_paged_args *args, const ba_problem *p, const ba_page_tables *t) {
    if (t->page_size != p->page_size)
        return ba_fail(BA_ERROR_VALUE, BA_ARG("k_cache") ": expected pages of %" PRId64 " tokens as the plan has them, got %s", t->page_size,
                       ba_shape_text(&args->k_cache).chars);
    if (t->cu_q && t->queries != args->q.dims[0])
        return ba_fail(BA_ERROR_VALUE, BA_ARG("q") ": expected %" PRId64 " queries as the plan has them, got %s", t->queries,
                       ba_shape_text(&args->q).chars);
    return ba_check_page_numbers(t, args->k_cache.dims[0]);
}

ba_status ba_open_paged(const ba_paged_args *args, const ba_page_tables *opened, ba_attention *a) {
    BA_IN_USUAL_MODE;
    const ba_tensor *q = &args->q;
    const bool ragged = opened ? opened->cu_q != NULL : args->cu_q != NULL;
    ba_problem *p = &a->problem;
    *a = (ba_attention){.num_threads = args->num_threads};
    BA_TRY(check_inputs(args, opened != NULL, opened ? opened->batch : args->batch, ragged, p));
    if (opened) BA_TRY(check_tables(args, p, opened));
    else BA_TRY(ba_open_page_tables(args, p->page_size, args->k_cache.dims[0], q->dims[0], &a->own_tables));
    const ba_page_tables *t = opened ? opened : &a->own_tables;
    a->kv_split = t->kv_split;
    p->page = t->page;
    p->first_page = t->first;
    p->kv_lens = t->seq_lens;
    p->kv_len = t->longest;
    p->cu_q = t->cu_q;
    p->q_ends = t->cu_q ? t->cu_q + 1 : NULL;
    p->q_begin = t->q_begin;
    p->q_len = t->most_queries;
    a->out_shape = *q;
    a->out_shape.data = NULL;
    if (p->unrounded) a->out_shape.dtype = ba_real_of(q->dtype);
    a->out_shape.dims[2] = p->v_dim;
    a->lse_shape = (ba_tensor){.dtype = ba_real_of(q->dtype), .ndim = 2, .dims = {q->dims[0], q->dims[1]}};
    ba_status status = ba_check_kv_ranges(&args->kv_ranges, -1, q->dims[0], &p->kv_ranges);
    if (!ragged) { /* one query per request */
        p->kv_ranges.strides[0] = p->kv_ranges.strides[1];
        p->kv_ranges.strides[1] = 0;
    }
    if (status == BA_OK)
        status = ba_check_attn_mask(&args->attn_mask, (const int64_t[]){p->batch, p->heads, p->q_len, p->kv_len}, true, &p->attn_mask);
    if (status == BA_OK) status = check_selected(args, p);
    if (status == BA_OK && args->selected_size && a->kv_split)
        status = ba_fail(BA_ERROR_VALUE, BA_ARG("selected_size") ": expected none beside " BA_ARG("kv_split") ", got %" PRId64, args->selected_size);
    if (status != BA_OK) ba_close_attention(a);
    return status;
}

void ba_close_attention(ba_attention *a) { ba_close_page_tables(&a->own_tables); }

ba_status ba_set_paged_outputs(const ba_paged_args *args, ba_attention *a) {
    ba_problem *p = &a->problem;
    BA_TRY(ba_check_output("out", &args->out, &a->out_shape, true));
    const int64_t *o = args->out.strides, *l = args->lse.strides;
    p->out = p->cu_q ? (ba_view){args->out.data, 0, o[1], o[0]} : (ba_view){args->out.data, o[0], o[1], 0};
    if (!ba_given(&args->lse)) return BA_OK;
    BA_TRY(ba_check_output("lse", &args->lse, &a->lse_shape, false));
    p->lse = p->cu_q ? (ba_view){args->lse.data, 0, l[1], l[0]} : (ba_view){args->lse.data, l[0], l[1], 0};
    return BA_OK;
}
