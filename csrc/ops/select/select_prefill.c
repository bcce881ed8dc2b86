/* Selects the blocks of keys that each block of queries attends. Pooled keys are made first; then pooled queries are multiplied by them, one band
 * of block rows after the other; then the budget of each block row, or of a whole sequence, decides which blocks are kept. */
#include <float.h>
#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "core/arena.h"
#include "core/float_mode.h"
#include "core/pool.h"
#include "core/status.h"
#include "kernels/work_tuning.h"
#include "ops/check.h"
#include "ops/levels.h"
#include "ops/open/open.h"
#include "ops/scratch.h"
#include "ops/select/select_prefill.h"

enum { MOST_DEPTH = 1 << 16 }; /* numbers of a pooled query or key */

/* ---- Checks ------------------------------------------------------------------------------------------------------- */

static ba_status check_sizes(const ba_select_prefill_args *a) {
    const struct {
        const char *name;
        int64_t value;
    } counts[] = {
        {"sink", a->sink}, {"recent", a->recent}, {"last_columns", a->last_columns}, {"first_rows", a->first_rows}, {"last_rows", a->last_rows}};
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++)
        if (counts[i].value < 0)
            return ba_fail(BA_ERROR_VALUE, BA_ARG("%s") ": expected at least 0 blocks, got %" PRId64, counts[i].name, counts[i].value);
    if ((unsigned)a->chooser > BA_CHOOSER_GIVEN)
        return ba_fail(BA_ERROR_VALUE, BA_ARG("chooser") ": expected pooled, antidiagonal, sampled_rows, vertical_slash or given, got %d",
                       (int)a->chooser);
    if (a->chooser == BA_CHOOSER_GIVEN) return BA_OK;
    if ((unsigned)a->term > BA_TERM_BOTH) return ba_fail(BA_ERROR_VALUE, BA_ARG("term") ": expected mean, bound or both, got %d", (int)a->term);
    const bool pooled = a->chooser == BA_CHOOSER_POOLED;
    const char *name = pooled ? "pool" : a->chooser == BA_CHOOSER_ANTIDIAGONAL ? "stride" : "rows";
    const int64_t group = pooled ? a->pool_k : a->chooser == BA_CHOOSER_ANTIDIAGONAL ? a->pool_q : 1;
    if (a->pool_k != group)
        return ba_fail(BA_ERROR_VALUE, BA_ARG("pool_k") ": expected %" PRId64 " with this chooser, got %" PRId64, group, a->pool_k);
    if (a->chooser == BA_CHOOSER_VERTICAL_SLASH && ba_given(&a->call.kv_ranges))
        return ba_fail(BA_ERROR_VALUE,
                       BA_ARG("kv_ranges") ": expected None with the chooser vertical_slash, whose lines run through all keys, got ranges");
    if (a->chooser == BA_CHOOSER_VERTICAL_SLASH)
        return a->pool_q < 1 ? ba_fail(BA_ERROR_VALUE, BA_ARG("rows") ": expected at least 1 query, got %" PRId64, a->pool_q) : BA_OK;
    if (a->pool_q < 1 || a->call.block_q % a->pool_q != 0)
        return ba_fail(BA_ERROR_VALUE, BA_ARG("%s") ": expected a divisor of " BA_ARG("block_shape") "[0] = %" PRId64 ", got %" PRId64, name,
                       a->call.block_q, a->pool_q);
    if (a->pool_k < 1 || a->call.block_kv % a->pool_k != 0)
        return ba_fail(BA_ERROR_VALUE, BA_ARG("%s") ": expected a divisor of " BA_ARG("block_shape") "[1] = %" PRId64 ", got %" PRId64, name,
                       a->call.block_kv, a->pool_k);
    return BA_OK;
}

static ba_status check_budgets(const ba_select_prefill_args *a, int64_t lists) {
    static const char *const names[] = {"density", "top_p", "threshold", "top_k"};
    if ((unsigned)a->budget > BA_BUDGET_TOP_K)
        return ba_fail(BA_ERROR_VALUE, BA_ARG("budget") ": expected density, top_p, threshold or top_k, got %d", (int)a->budget);
    const char *name = names[a->budget];
    const ba_tensor *t = &a->budgets;
    if (t->dtype != BA_FLOAT64) return ba_fail(BA_ERROR_TYPE, BA_ARG("%s") ": expected float64, got %s", name, ba_dtype_name(t->dtype));
    if (t->ndim != 1 || (t->dims[0] != 1 && t->dims[0] != lists))
        return ba_fail(BA_ERROR_VALUE, BA_ARG("%s") ": expected one number, or one for each of %" PRId64 " lists, got %s", name, lists,
                       ba_shape_text(t).chars);
    BA_TRY(ba_check_extent(name, t));
    for (int64_t i = 0; i < t->dims[0]; i++) {
        const double budget = ((const double *)t->data)[i * ba_step(t, 0)];
        if (a->budget == BA_BUDGET_TOP_K ? !(budget >= 1) : !(budget > 0 && budget <= 1))
            return ba_fail(BA_ERROR_VALUE,
                           a->budget == BA_BUDGET_TOP_K ? BA_ARG("%s") ": expected at least 1 block, got %s"
                                                        : BA_ARG("%s") ": expected a number above 0 and at most 1, got %s",
                           name, ba_number_text(budget, BA_FLOAT64).chars);
    }
    return BA_OK;
}

ba_status ba_open_prefill(const ba_select_prefill_args *a, ba_prefill *c) {
    BA_IN_USUAL_MODE;
    ba_block_sparse_args call = a->call;
    call.v = call.k;
    call.blocks = call.attn_mask = call.out = call.lse = (ba_tensor){0};
    call.alibi_slopes = NULL;
    call.cu_rows = NULL;
    call.q_total = NULL;
    call.key_stride = call.key_last = 0;
    *c = (ba_prefill){.args = a};
    ba_attention attention = {0};
    BA_TRY(ba_open_block_sparse(&call, &attention));
    c->p = attention.problem;
    ba_close_attention(&attention);
    BA_TRY(check_sizes(a));
    c->list_heads = a->per_kv_head ? c->p.kv_heads : c->p.heads;
    c->shared_heads = c->p.heads / c->list_heads;
    BA_TRY(check_budgets(a, c->list_heads));
    c->words = ba_ceil_div(c->p.block_columns, 64);
    c->kept_shape = (ba_tensor){.dtype = BA_INT64, .ndim = 4, .dims = {c->p.batch, c->list_heads, c->p.block_rows, c->words}};
    c->counts_shape = (ba_tensor){.dtype = BA_INT32, .ndim = 3, .dims = {c->p.batch, c->list_heads, c->p.block_rows}};
    c->scores_shape = (ba_tensor){.dtype = BA_FLOAT32, .ndim = 4, .dims = {c->p.batch, c->list_heads, c->p.block_rows, c->p.block_columns}};
    c->lists_shape = (ba_tensor){.dtype = BA_INT32, .ndim = 4, .dims = {c->p.batch, c->p.heads, c->p.block_rows, 1}};
    int64_t bytes = (int64_t)sizeof(float);
    for (int i = 0; i < 4; i++)
        if (__builtin_mul_overflow(bytes, ba_max(1, c->scores_shape.dims[i]), &bytes))
            return ba_fail(BA_ERROR_VALUE, BA_ARG("q") ": expected scores below 2^63 bytes, got shape %s", ba_shape_text(&c->scores_shape).chars);
    if (a->chooser == BA_CHOOSER_GIVEN) { /* whole blocks are scored */
        c->q_tokens = c->p.block_q;
        c->k_tokens = c->p.block_kv;
        c->q_per_block = c->k_per_block = 1;
        c->depth = c->p.head_dim;
        return BA_OK;
    }
    const int64_t q_tokens = a->chooser == BA_CHOOSER_SAMPLED_ROWS ? a->call.block_q / a->pool_q : a->pool_q;
    c->q_tokens = a->chooser == BA_CHOOSER_VERTICAL_SLASH ? 1 : ba_min(q_tokens, c->p.block_q);
    c->k_tokens = ba_min(a->pool_k, c->p.block_kv);
    c->q_per_block = ba_max(1, c->p.block_q / c->q_tokens);
    c->k_per_block = ba_max(1, c->p.block_kv / c->k_tokens);
    const bool ranges = a->chooser == BA_CHOOSER_POOLED && a->term != BA_TERM_MEAN;
    c->depth = c->p.head_dim * (ranges ? 2 : a->chooser == BA_CHOOSER_ANTIDIAGONAL ? c->q_tokens : 1);
    if (c->depth > MOST_DEPTH)
        return ba_fail(BA_ERROR_VALUE, BA_ARG("stride") ": expected at most %" PRId64 " tokens with D = %" PRId64 ", got %" PRId64,
                       MOST_DEPTH / c->p.head_dim, c->p.head_dim, c->q_tokens);
    return BA_OK;
}

static ba_status check_given(const ba_prefill *c) {
    const ba_tensor *t = &c->args->given_scores, *expected = &c->scores_shape;
    if (t->dtype != BA_FLOAT32) return ba_fail(BA_ERROR_TYPE, BA_ARG("scores") ": expected float32, got %s", ba_dtype_name(t->dtype));
    ba_tensor one_each = *expected;
    if (t->ndim == 4 && t->dims[1] == c->p.heads) one_each.dims[1] = c->p.heads;
    if (!ba_same_shape(t, &one_each))
        return ba_fail(BA_ERROR_VALUE, BA_ARG("scores") ": expected shape %s, a score for each block of queries and block of keys, got %s",
                       ba_shape_text(expected).chars, ba_shape_text(t).chars);
    return ba_check_extent("scores", t);
}

ba_status ba_set_prefill_outputs(const ba_select_prefill_args *a, ba_prefill *c) {
    c->args = a;
    if (a->chooser == BA_CHOOSER_GIVEN) BA_TRY(check_given(c));
    BA_TRY(ba_check_output("kept", &a->kept, &c->kept_shape, false));
    BA_TRY(ba_check_output("counts", &a->counts, &c->counts_shape, false));
    return ba_given(&a->scores) ? ba_check_output("scores", &a->scores, &c->scores_shape, false) : BA_OK;
}

/* Checks the numbers in given_scores. */
static ba_status check_given_numbers(const ba_prefill *c) {
    ba_tensor t = c->args->given_scores;
    ba_drop_unused_strides(&t);
    int64_t steps = 0;
    for (int64_t b = 0; b < t.dims[0]; b++)
        for (int64_t h = 0; h < t.dims[1]; h++)
            for (int64_t r = 0; r < t.dims[2]; r++) {
                BA_TRY(ba_look_after(&steps, t.dims[3]));
                const int64_t at = b * t.strides[0] + h * t.strides[1] + r * t.strides[2];
                for (int64_t n = 0; n < t.dims[3]; n++) {
                    const float score = ((const float *)t.data)[at + n * t.strides[3]];
                    if (!(score < 0 && score >= -FLT_MAX) && !(score > FLT_MAX)) continue;
                    return ba_fail(BA_ERROR_VALUE,
                                   BA_ARG("scores") ": expected finite numbers of at least 0, or NaN or -inf, which count as 0, got %s at [%" PRId64
                                                    ", %" PRId64 ", %" PRId64 ", %" PRId64 "]",
                                   ba_number_text((double)score, BA_FLOAT32).chars, b, h, r, n);
                }
            }
    return BA_OK;
}

/* ---- Items ---------------------------------------------------------------------------------------------------------- */

static int64_t pooled_keys_of(const ba_prefill *c, int64_t batch) { return ba_ceil_div(ba_kv_span(&c->p, batch).valid, c->k_tokens); }

/* Makes ba_work.choose.pooled_keys pooled keys of one KV head of a batch entry. */
static void make_pooled_keys(void *context, int64_t item, int worker) {
    const ba_prefill *c = context;
    const int64_t here = item % c->batch_heads, batch_head = c->first_batch_head + here, batch = batch_head / c->p.kv_heads;
    const int64_t begin = item / c->batch_heads * ba_work.choose.pooled_keys,
                  end = ba_min(begin + ba_work.choose.pooled_keys, pooled_keys_of(c, batch));
    ba_band_scratch s;
    ba_band_lay_out(c, c->scratch + worker * c->scratch_bytes, &s);
    const int64_t bytes = c->pitch * c->number_size;
    char *to = c->pooled_keys + here * c->batch_head_bytes + begin * bytes;
    const ba_pack_rows_fn pack = c->family->pack->keys;
    for (int64_t g = begin, n; g < end; g += n, to += n * bytes) {
        n = pack ? ba_min(c->family->key_pad, end - g) : 1;
        for (int64_t i = 0; i < n; i++) {
            char *key = pack ? s.queries + i * bytes : to;
            ba_features_of_key(c, &s.features, batch, batch_head % c->p.kv_heads, g + i, key);
            s.pointers[i] = key;
        }
        if (pack) pack(to, s.k_rows, s.pointers, NULL, n, c->depth);
    }
}

/* Scores one band of a list head and decides what its block rows keep. The last bands come first, because they take the longest in causal calls. */
static void score_band(void *context, int64_t item, int worker) {
    const ba_prefill *c = context;
    /* item = (bands behind this one * KV heads in memory + KV head) * list heads per KV head + list head */
    const int64_t list_heads = c->list_heads / c->p.kv_heads, list_head = item % list_heads,
                  batch_head = c->first_batch_head + item / list_heads % c->batch_heads;
    const int64_t behind = item / list_heads / c->batch_heads;
    ba_band band = {.batch = batch_head / c->p.kv_heads, .list_head = batch_head % c->p.kv_heads * list_heads + list_head};
    band.first = (c->bands - 1 - behind) * c->band_rows;
    band.block_rows = ba_min(c->band_rows, c->p.block_rows - band.first);
    ba_band_scratch s;
    ba_band_lay_out(c, c->scratch + worker * c->scratch_bytes, &s);
    if (!ba_band_score(c, &s, &band)) return;
    const bool counts_tails = c->args->budget == BA_BUDGET_DENSITY;
    if (counts_tails) memset(s.bins, 0, 2 * BA_TAIL_CLASSES * sizeof *s.bins);
    for (int64_t r = 0; r < band.block_rows; r++)
        ba_budget_block_row(c, &s, band.batch, band.list_head, band.first + r, s.scores + r * c->p.block_columns);
    if (counts_tails) ba_budget_count(c, &s, band.batch, band.list_head);
}

/* Finds the lines of one query head. */
static void find_lines(void *context, int64_t item, int worker) {
    const ba_prefill *c = context;
    const int64_t batch_head = c->first_batch_head + item / c->p.group;
    ba_band_scratch s;
    ba_band_lay_out(c, c->scratch + worker * c->scratch_bytes, &s);
    ba_lines_find(c, &s, batch_head / c->p.kv_heads, batch_head % c->p.kv_heads * c->p.group + item % c->p.group, item);
}

/* ---- The call ------------------------------------------------------------------------------------------------------- */

/* Sets where the tails of each sequence begin, unless `begin` is NULL. Returns the number of all tails. */
static int64_t lay_out_tails(const ba_prefill *c, int64_t *begin) {
    int64_t all = 0;
    for (int64_t b = 0; b < c->p.batch; b++) {
        if (begin) begin[b] = all;
        all += c->list_heads * ba_ceil_div(ba_q_span(&c->p, b).valid, c->p.block_q) * ba_prefill_columns(c, b);
    }
    return all;
}

/* Bytes of the lines of one KV head of a batch entry. */
static int64_t lines_bytes(const ba_prefill *c) {
    return c->args->chooser == BA_CHOOSER_VERTICAL_SLASH ? c->p.group * ba_lines_doubles(c) * (int64_t)sizeof(double) : 0;
}

/* The number of shares of a call. */
static int64_t shares_in(const ba_prefill *c) { return c->args->budget == BA_BUDGET_DENSITY ? c->p.batch * c->args->budgets.dims[0] : 0; }

/* Lays out the memory of a call. */
static int64_t lay_out_call(ba_prefill *c, int threads, char *base) {
    const int64_t lines = lines_bytes(c), shares = shares_in(c), block_rows = shares ? c->p.batch * c->list_heads * c->p.block_rows : 0;
    int64_t used = 0;
    c->scratch = ba_take(base, &used, threads * c->scratch_bytes);
    used += ba_notes_lay_out(c, base ? base + used : NULL, &c->notes);
    c->pooled_keys = ba_take(base, &used, c->batch_heads * c->batch_head_bytes);
    c->lines = lines ? ba_take(base, &used, c->batch_heads * lines) : NULL;
    c->tails_begin = ba_take(base, &used, shares ? c->p.batch * (int64_t)sizeof(int64_t) : 0);
    c->tails = ba_take(base, &used, shares ? lay_out_tails(c, c->tails_begin) * (int64_t)sizeof(float) : 0);
    c->outlines = ba_take(base, &used, block_rows * (int64_t)sizeof(ba_outline));
    c->middles = ba_take(base, &used, block_rows * c->words * (int64_t)sizeof(uint64_t));
    c->shares = ba_take(base, &used, shares * (int64_t)sizeof(ba_share));
    c->bins = ba_take(base, &used, shares * BA_BUDGET_BINS * (int64_t)sizeof(int64_t));
    return used;
}

static ba_status run(ba_prefill *c, int threads) {
    ba_status status = c->notes.seen ? ba_parallel(threads, c->p.batch * c->p.block_rows, ba_note_block_row, c) : BA_OK;
    /* The KV heads of all batch entries take turns. Each round takes as many as have room in memory for their pooled keys. c->batch_heads becomes
     * the number of KV heads in the round. */
    const int64_t all = c->p.batch * c->p.kv_heads, at_once = c->batch_heads, list_heads = c->list_heads / c->p.kv_heads; /* per KV head */
    const int64_t runs = ba_ceil_div(ba_ceil_div(c->p.kv_len, c->k_tokens), ba_work.choose.pooled_keys);
    for (c->first_batch_head = 0; status == BA_OK && c->first_batch_head < all; c->first_batch_head += at_once) {
        c->batch_heads = ba_min(at_once, all - c->first_batch_head);
        if (c->batch_head_bytes) status = ba_parallel(threads, c->batch_heads * runs, make_pooled_keys, c);
        if (status == BA_OK && c->lines) status = ba_parallel(threads, c->batch_heads * c->p.group, find_lines, c);
        if (status == BA_OK) status = ba_parallel(threads, c->batch_heads * list_heads * c->bands, score_band, c);
    }
    if (status == BA_OK && c->args->budget == BA_BUDGET_DENSITY) status = ba_budget_share(c, threads);
    return status;
}

/* Writes the outputs where no block can be kept: `kept` and `scores` have no elements, and all counts are 0. */
static void keep_nothing(const ba_prefill *c) {
    const ba_tensor *counts = &c->args->counts;
    for (int64_t b = 0; b < c->p.batch; b++)
        for (int64_t l = 0; l < c->list_heads; l++)
            for (int64_t r = 0; r < c->p.block_rows; r++)
                ((int32_t *)counts->data)[b * counts->strides[0] + l * counts->strides[1] + r * counts->strides[2]] = 0;
}

ba_status ba_run_prefill(ba_prefill *c) {
    BA_IN_USUAL_MODE;
    const bool given = c->args->chooser == BA_CHOOSER_GIVEN;
    if (given) BA_TRY(check_given_numbers(c));
    if (c->p.block_columns == 0) keep_nothing(c);
    if (c->p.batch == 0 || c->p.block_rows == 0 || c->p.block_columns == 0) return BA_OK;
    c->real = ba_real_of(c->p.dtype);
    const ba_isa level = ba_level_with_parts(ba_isa_active(), c->real);
    c->kernels = ba_kernels_at(level);
    const ba_attend_family *own = c->kernels->attend[c->p.dtype];
    const bool pairs = c->p.dtype == BA_BFLOAT16 && own->panel->sum_blocks && (!own->pack->keys || own->pack_bytes == sizeof(uint16_t));
    c->family = pairs ? own : c->kernels->vector[c->real];
    c->real_size = c->family->real_size;
    c->number_size = pairs ? (int64_t)sizeof(uint16_t) : c->real_size;
    c->scale = c->p.scale / (c->args->chooser == BA_CHOOSER_ANTIDIAGONAL ? (double)c->q_tokens : 1) * BA_LOG2_E;
    c->lanes = c->family->lanes[0];
    c->chunk = ba_tuning_at(level)->chunk_keys;
    c->align = c->family->pack->keys ? c->family->key_align : 1;
    c->pitch = ba_round_up(c->depth, ba_max(BA_PACK_PAD, c->family->dim_pad));
    const int64_t pooled_keys = ba_ceil_div(c->p.kv_len, c->k_tokens), pooled_queries = ba_ceil_div(c->p.q_len, c->q_tokens);
    c->batch_head_bytes = given ? 0 : ba_round_up(pooled_keys, c->family->key_pad) * c->pitch * c->number_size;
    c->batch_heads = ba_min(c->p.batch * c->p.kv_heads, ba_max(1, ba_work.choose.pooled_bytes / ba_max(1, c->batch_head_bytes + lines_bytes(c))));
    const double work = (double)c->p.batch * (double)c->p.heads *
                        ((double)pooled_queries * (double)pooled_keys * (double)c->depth + (double)c->p.q_len * (double)c->p.head_dim);
    const int64_t most_items =
        ba_max(c->p.batch * c->list_heads * c->p.block_rows, ba_ceil_div(c->batch_heads * pooled_keys, ba_work.choose.pooled_keys));
    const int threads = ba_threads_of_call(c->args->call.num_threads, work, ba_work.small_products, most_items);
    /* The number of whole block rows that fit into a panel. 0: a block row takes several panels, and the next block row begins with a new panel. */
    const int64_t panel_blocks = c->lanes / c->q_per_block;
    c->panel_queries = panel_blocks ? panel_blocks * c->q_per_block : c->lanes;
    /* Several panels read a chunk of pooled keys together, where there are bands enough for all threads. The number of panels changes no bit. */
    for (c->panels = BA_BAND_PANELS;; c->panels /= 2) {
        c->band_rows = ba_min(c->p.block_rows, panel_blocks ? c->panels * panel_blocks : 1);
        c->bands = ba_ceil_div(c->p.block_rows, c->band_rows);
        if (c->panels == 1 || c->p.batch * c->list_heads * c->bands >= ba_work.choose.bands * threads) break;
    }
    ba_band_scratch unused;
    c->scratch_bytes = ba_band_lay_out(c, NULL, &unused);
    char *memory;
    BA_TRY(ba_get_scratch(lay_out_call(c, threads, NULL), &memory));
    lay_out_call(c, threads, memory);
    memset(c->bins, 0, (size_t)shares_in(c) * BA_BUDGET_BINS * sizeof *c->bins);
    const ba_status status = run(c, threads);
    ba_arena_release();
    return status;
}

ba_status ba_select_prefill(const ba_select_prefill_args *args) {
    ba_prefill c;
    BA_TRY(ba_check_pointer("args", args));
    BA_TRY(ba_open_prefill(args, &c));
    BA_TRY(ba_set_prefill_outputs(args, &c));
    return ba_run_prefill(&c);
}

/* ---- Lists ------------------------------------------------------------------------------------------------------------ */

static void set_entry(const ba_tensor *lists, int64_t at, int64_t column) {
    switch (lists->dtype) {
    case BA_UINT16: ((uint16_t *)lists->data)[at] = (uint16_t)column; break;
    case BA_INT16: ((int16_t *)lists->data)[at] = (int16_t)column; break;
    case BA_INT32: ((int32_t *)lists->data)[at] = (int32_t)column; break;
    default: ((int64_t *)lists->data)[at] = column; break;
    }
}

static int64_t largest_entry(ba_dtype dtype) {
    switch (dtype) {
    case BA_UINT16: return UINT16_MAX - 1; /* UINT16_MAX is the pad */
    case BA_INT16: return INT16_MAX;
    case BA_INT32: return INT32_MAX;
    default: return INT64_MAX;
    }
}

/* The words of a block row; NULL where there are none. */
static const uint64_t *words_of(const ba_tensor *kept, int64_t batch, int64_t list_head, int64_t block_row) {
    if (kept->dims[3] == 0) return NULL;
    return (const uint64_t *)kept->data + batch * kept->strides[0] + list_head * kept->strides[1] + block_row * kept->strides[2];
}

/* Checks that the lists have room for the fullest block row, and a dtype that holds the last column of all. */
static ba_status check_room(const ba_tensor *kept, const ba_tensor *lists) {
    int64_t fullest = 0, last = -1;
    for (int64_t b = 0; b < kept->dims[0]; b++)
        for (int64_t l = 0; l < kept->dims[1]; l++)
            for (int64_t r = 0; r < kept->dims[2]; r++) {
                const uint64_t *words = words_of(kept, b, l, r);
                int64_t n = 0;
                for (int64_t w = 0; w < kept->dims[3]; w++) {
                    const uint64_t word = words[w * kept->strides[3]];
                    n += __builtin_popcountll(word);
                    if (word) last = ba_max(last, w * 64 + 63 - __builtin_clzll(word));
                }
                fullest = ba_max(fullest, n);
            }
    if (fullest > lists->dims[3])
        return ba_fail(BA_ERROR_VALUE, BA_ARG("sabi") ": expected at least %" PRId64 " places per row, got %" PRId64, fullest, lists->dims[3]);
    if (last <= largest_entry(lists->dtype)) return BA_OK;
    return ba_fail(BA_ERROR_VALUE, BA_ARG("sabi") ": expected a dtype that holds column %" PRId64 ", got %s", last, ba_dtype_name(lists->dtype));
}

ba_status ba_list_kept(const ba_tensor *kept, const ba_tensor *lists) {
    BA_TRY(ba_check_pointer("kept", kept));
    BA_TRY(ba_check_pointer("lists", lists));
    if (kept->dtype != BA_INT64 || kept->ndim != 4)
        return ba_fail(BA_ERROR_VALUE, BA_ARG("kept") ": expected int64 (B, lists, rows, words), got %s", ba_shape_text(kept).chars);
    BA_TRY(ba_check_extent("kept", kept));
    if (lists->dtype != BA_UINT16 && lists->dtype != BA_INT16 && lists->dtype != BA_INT32 && lists->dtype != BA_INT64)
        return ba_fail(BA_ERROR_TYPE, BA_ARG("sabi") ": expected uint16, int16, int32 or int64, got %s", ba_dtype_name(lists->dtype));
    if (lists->ndim != 4 || lists->dims[0] != kept->dims[0] || lists->dims[2] != kept->dims[2] ||
        (kept->dims[1] ? lists->dims[1] % kept->dims[1] : lists->dims[1]))
        return ba_fail(BA_ERROR_VALUE, BA_ARG("sabi") ": expected lists of %s, got %s", ba_shape_text(kept).chars, ba_shape_text(lists).chars);
    BA_TRY(ba_check_extent("sabi", lists));
    BA_TRY(ba_check_places("sabi", lists));
    ba_tensor from = *kept, to = *lists;
    ba_drop_unused_strides(&from);
    ba_drop_unused_strides(&to);
    BA_TRY(check_room(&from, &to));
    const int64_t shared_heads = kept->dims[1] ? lists->dims[1] / kept->dims[1] : 1, width = lists->dims[3];
    int64_t steps = 0;
    for (int64_t b = 0; b < kept->dims[0]; b++)
        for (int64_t l = 0; l < kept->dims[1]; l++)
            for (int64_t r = 0; r < kept->dims[2]; r++) {
                BA_TRY(ba_look_after(&steps, width * shared_heads));
                const uint64_t *words = words_of(&from, b, l, r);
                const int64_t at = b * to.strides[0] + l * shared_heads * to.strides[1] + r * to.strides[2];
                int64_t n = 0;
                for (int64_t w = 0; w < kept->dims[3]; w++)
                    for (uint64_t word = words[w * from.strides[3]]; word; word &= word - 1, n++)
                        for (int64_t g = 0; g < shared_heads; g++)
                            set_entry(&to, at + g * to.strides[1] + n * to.strides[3], w * 64 + __builtin_ctzll(word));
                for (; n < width; n++)
                    for (int64_t g = 0; g < shared_heads; g++) set_entry(&to, at + g * to.strides[1] + n * to.strides[3], -1);
            }
    return BA_OK;
}
