/* The means of blocks of tokens, and their gradient, to which some whole arrays may be added. Both only sum rows. This file also has the functions of
 * nsa.h that check arrays and sum rows for all operations of native sparse attention. */
#include <inttypes.h>
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

/* ---- Rows --------------------------------------------------------------------------------------------------------- */

ba_status ba_take_rows(const char *name, const ba_tensor *t, const char *axes, bool packed, ba_token_rows *out) {
    const int rank = packed ? 3 : 4;
    BA_TRY(ba_check_float(name, t));
    if (t->ndim != rank) return ba_fail(BA_ERROR_VALUE, BA_ARG("%s") ": expected shape %s, got %s", name, axes, ba_shape_text(t).chars);
    const int first = packed ? 0 : 1;
    const int64_t *dims = t->dims + first, size = ba_dtype_size(t->dtype);
    if (dims[2] < 1 || dims[2] > BA_MAX_HEAD_DIM || dims[1] < 1)
        return ba_fail(BA_ERROR_VALUE, BA_ARG("%s") ": expected shape %s with at least one head and a last axis from 1 to %d, got %s", name, axes,
                       BA_MAX_HEAD_DIM, ba_shape_text(t).chars);
    BA_TRY(ba_check_last_axis(name, t));
    BA_TRY(ba_check_extent(name, t));
    *out = (ba_token_rows){.data = t->data,
                           .dtype = t->dtype,
                           .batch = packed ? 1 : t->dims[0],
                           .tokens = dims[0],
                           .heads = dims[1],
                           .dim = dims[2],
                           .batch_step = packed ? 0 : ba_step(t, 0) * size,
                           .token_step = ba_step(t, first) * size,
                           .head_step = ba_step(t, first + 1) * size};
    return BA_OK;
}

ba_status ba_rows_like(const char *name, const ba_token_rows *r, const ba_token_rows *like, const char *like_name, int64_t dim) {
    if (r->batch == like->batch && r->tokens == like->tokens && r->heads == like->heads && (dim == 0 || r->dim == dim)) return BA_OK;
    return ba_fail(BA_ERROR_VALUE,
                   BA_ARG("%s") ": expected %" PRId64 " x %" PRId64 " tokens and %" PRId64 " heads like %s, and a last axis of %" PRId64
                                ", got %" PRId64 " x %" PRId64 " tokens, %" PRId64 " heads and a last axis of %" PRId64,
                   name, like->batch, like->tokens, like->heads, like_name, dim ? dim : r->dim, r->batch, r->tokens, r->heads, r->dim);
}

void ba_sum_rows(const ba_kernels *kernels, ba_dtype dtype, const void *const *rows, const void *weights, int64_t n, int64_t dim, void *wide,
                 void *out) {
    const ba_dtype real = ba_real_of(dtype);
    const ba_attend_family *family = kernels->vector[real];
    const ba_pack_rows_fn widen = kernels->cache[dtype]->pack;
    const void *summands[BA_ROWS_AT_ONCE + 1];
    double factors[BA_ROWS_AT_ONCE + 1]; /* reals: room for doubles is also room for floats */
    summands[0] = out;                   /* with factor 1, so that each round adds to the sum so far */
    ba_set_real(factors, 0, 1, family->real_size);
    for (int64_t at = 0; at < n; at += BA_ROWS_AT_ONCE) {
        const int64_t some = ba_min(BA_ROWS_AT_ONCE, n - at);
        if (widen) widen(wide, summands + 1, rows + at, NULL, some, dim);
        else memcpy(summands + 1, rows + at, (size_t)some * sizeof *rows);
        memcpy((char *)factors + family->real_size, (const char *)weights + at * family->real_size, (size_t)(some * family->real_size));
        family->pack->merge_row(out, summands, factors, some + 1, dim);
    }
}

/* ---- Sequences ------------------------------------------------------------------------------------------------------ */

/* How the arrays are divided into sequences, and each sequence into blocks of tokens. */
typedef struct sequences {
    int64_t count;                 /* number of sequences */
    const int64_t *cu, *cu_blocks; /* NULL: each batch entry is a sequence. Else cumulative numbers of tokens and of blocks */
    int64_t tokens, blocks;        /* of every sequence, where cu is NULL; else not read */
    int64_t block, stride;         /* tokens per block, and from one block to the next */
    int64_t run_length;            /* tokens or blocks of an item: see count_runs() */
    int64_t *first_item;           /* [count + 1], where cu is given: where the items of each sequence begin */
} sequences;

static ba_status check_sequences(sequences *s, const ba_token_rows *tokens, const ba_tensor *blocks, const char *blocks_name) {
    if (s->block < 1) return ba_fail(BA_ERROR_VALUE, BA_ARG("block_size") ": expected at least 1 token, got %" PRId64, s->block);
    if (s->stride < 1) return ba_fail(BA_ERROR_VALUE, BA_ARG("stride") ": expected at least 1 token, got %" PRId64, s->stride);
    s->tokens = tokens->tokens;
    s->blocks = ba_complete_blocks(s->tokens, s->block, s->stride);
    int64_t expected = s->blocks;
    if (s->cu) {
        int64_t longest;
        BA_TRY(ba_check_cumulative("cu_seqlens", s->cu, s->count, tokens->tokens, &longest));
        if (!s->cu_blocks) return ba_fail(BA_ERROR_VALUE, BA_ARG("cu_blocks") ": expected the cumulative numbers of the sequences' blocks, got none");
        expected = 0;
        for (int64_t b = 0; b <= s->count; b++) {
            if (s->cu_blocks[b] != expected)
                return ba_fail(BA_ERROR_VALUE,
                               BA_ARG("cu_blocks") ": expected %" PRId64 ", the number of blocks in the sequences before this one, got %" PRId64
                                                   " at [%" PRId64 "]",
                               expected, s->cu_blocks[b], b);
            if (b < s->count) expected += ba_complete_blocks(s->cu[b + 1] - s->cu[b], s->block, s->stride);
        }
    } else {
        s->count = tokens->batch;
    }
    if (blocks->dims[s->cu ? 0 : 1] == expected) return BA_OK;
    return ba_fail(BA_ERROR_VALUE, BA_ARG("%s") ": expected %" PRId64 " blocks, got %s", blocks_name, expected, ba_shape_text(blocks).chars);
}

static int64_t tokens_of(const sequences *s, int64_t n) { return ba_sequence_length(s->cu, s->tokens, n); }
static int64_t blocks_of(const sequences *s, int64_t n) { return ba_sequence_length(s->cu_blocks, s->blocks, n); }

typedef int64_t length_fn(const sequences *s, int64_t n);

/* Items are runs of at most s->run_length tokens, or blocks, of one sequence. `length` gives the number of tokens, or of blocks, of a sequence.
 * Returns the number of items. */
static int64_t count_runs(const sequences *s, length_fn *length) {
    int64_t total = 0;
    if (!s->cu) return s->count ? s->count * ba_ceil_div(length(s, 0), s->run_length) : 0;
    for (int64_t n = 0; n < s->count; n++) total += ba_ceil_div(length(s, n), s->run_length);
    return total;
}

/* Gets scratch memory, with `bytes` bytes for each of `threads` workers at *scratch, and notes down where each sequence's items begin. */
static ba_status get_memory(sequences *s, length_fn *length, int threads, int64_t bytes, char **scratch) {
    const int64_t places = s->cu ? s->count + 1 : 0;
    int64_t used = 0;
    ba_take(NULL, &used, places * (int64_t)sizeof *s->first_item);
    char *memory;
    BA_TRY(ba_get_scratch(used + threads * bytes, &memory));
    *scratch = memory + used;
    used = 0;
    s->first_item = ba_take(memory, &used, places * (int64_t)sizeof *s->first_item);
    for (int64_t n = 0, item = 0; n < places; n++) {
        s->first_item[n] = item;
        if (n < s->count) item += ba_ceil_div(length(s, n), s->run_length);
    }
    return BA_OK;
}

/* Returns where item `index` begins in its sequence, and sets *sequence. */
static int64_t find_run(const sequences *s, length_fn *length, int64_t index, int64_t *sequence) {
    if (!s->cu) {
        const int64_t each = ba_ceil_div(length(s, 0), s->run_length);
        *sequence = index / each;
        return index % each * s->run_length;
    }
    *sequence = ba_sequence_at(s->first_item, s->count, index);
    return (index - s->first_item[*sequence]) * s->run_length;
}

/* ---- Block means ------------------------------------------------------------------------------------------------------ */

typedef struct means_call {
    sequences s;
    ba_token_rows x, out;
    const ba_tensor *weight; /* NULL: not given */
    const ba_kernels *kernels;
    int64_t scratch_bytes;
    char *scratch;
} means_call;

typedef struct means_scratch {
    const void **rows;        /* [block]: rows of x */
    const void **weight_rows; /* [dim]: rows of a head's matrix */
    char *weights;            /* [block] reals, each 1 / block */
    char *wide;               /* rows as reals, for ba_sum_rows() */
    char *mean, *mapped;      /* one row of reals each: a mean, and its product with the matrix */
} means_scratch;

/* Lays out the scratch memory of one worker. */
static int64_t lay_out_means(const means_call *c, char *base, means_scratch *w) {
    const int64_t real_size = ba_dtype_size(ba_real_of(c->x.dtype));
    int64_t used = 0;
    w->rows = ba_take(base, &used, c->s.block * (int64_t)sizeof(void *));
    w->weights = ba_take(base, &used, c->s.block * real_size);
    w->wide = ba_take(base, &used, BA_ROWS_AT_ONCE * ba_round_up(c->x.dim, BA_PACK_PAD) * real_size);
    w->weight_rows = ba_take(base, &used, c->x.dim * (int64_t)sizeof(void *));
    w->mean = ba_take(base, &used, c->x.dim * real_size);
    w->mapped = ba_take(base, &used, BA_FEW_PAD(c->out.dim) * real_size);
    return used;
}

/* out = the mean, as a row vector, times the matrix of the head. That is the sum of the matrix's rows, each times an element of the mean. */
static void map_mean(const means_call *c, const means_scratch *w, int64_t head, char *out) {
    const ba_attend_family *real = c->kernels->vector[ba_real_of(c->x.dtype)];
    const int64_t *steps = c->weight->strides;
    for (int64_t d = 0; d < c->x.dim; d++) w->weight_rows[d] = (const char *)c->weight->data + (head * steps[0] + d * steps[1]) * real->real_size;
    if (c->out.dtype == ba_real_of(c->x.dtype)) {
        real->pack->merge_row(out, w->weight_rows, w->mean, c->x.dim, c->out.dim);
        return;
    }
    real->pack->merge_row(w->mapped, w->weight_rows, w->mean, c->x.dim, c->out.dim);
    c->kernels->vector[c->out.dtype]->gradient->store_row(out, w->mapped, c->out.dim);
}

static void means_item(void *context, int64_t index, int worker) {
    const means_call *c = context;
    const int64_t real_size = ba_dtype_size(ba_real_of(c->x.dtype)), size = c->s.block;
    int64_t sequence;
    const int64_t first = find_run(&c->s, blocks_of, index, &sequence);
    const int64_t end = ba_min(first + c->s.run_length, blocks_of(&c->s, sequence));
    means_scratch w;
    lay_out_means(c, c->scratch + worker * c->scratch_bytes, &w);
    for (int64_t t = 0; t < size; t++) ba_set_real(w.weights, t, 1 / (double)size, real_size);
    for (int64_t block = first; block < end; block++)
        for (int64_t head = 0; head < c->x.heads; head++) {
            char *out = ba_sequence_row(&c->out, c->s.cu_blocks, sequence, block, head);
            for (int64_t t = 0; t < size; t++) w.rows[t] = ba_sequence_row(&c->x, c->s.cu, sequence, block * c->s.stride + t, head);
            if (c->weight) {
                memset(w.mean, 0, (size_t)(c->x.dim * real_size));
                ba_sum_rows(c->kernels, c->x.dtype, w.rows, w.weights, size, c->x.dim, w.wide, w.mean);
                map_mean(c, &w, head, out);
            } else if (c->out.dtype == c->x.dtype) {
                c->kernels->vector[c->x.dtype]->pack->merge_row(out, w.rows, w.weights, size, c->x.dim);
            } else {
                memset(out, 0, (size_t)(c->x.dim * real_size));
                ba_sum_rows(c->kernels, c->x.dtype, w.rows, w.weights, size, c->x.dim, w.wide, out);
            }
        }
}

ba_status ba_block_means(const ba_block_means_args *a) {
    BA_IN_USUAL_MODE;
    BA_TRY(ba_check_pointer("args", a));
    means_call c = {.s = {.count = a->batch, .cu = a->cu, .cu_blocks = a->cu ? a->cu_blocks : NULL, .block = a->block_size, .stride = a->stride},
                    .kernels = ba_kernels_active()};
    const bool packed = a->cu != NULL;
    BA_TRY(ba_take_rows("x", &a->x, packed ? "(T, H, D)" : "(B, N, H, D)", packed, &c.x));
    BA_TRY(ba_take_rows("out", &a->out, packed ? "(blocks, H, D)" : "(B, blocks, H, D)", packed, &c.out));
    BA_TRY(ba_check_places("out", &a->out));
    BA_TRY(check_sequences(&c.s, &c.x, &a->out, "out"));
    if (a->out.dtype != a->x.dtype && a->out.dtype != ba_real_of(a->x.dtype))
        return ba_fail(BA_ERROR_TYPE, BA_ARG("out") ": expected dtype %s like " BA_ARG("x") ", or %s, got %s", ba_dtype_name(a->x.dtype),
                       ba_dtype_name(ba_real_of(a->x.dtype)), ba_dtype_name(a->out.dtype));
    if (ba_given(&a->weight)) {
        const ba_tensor expected = {.dtype = ba_real_of(a->x.dtype), .ndim = 3, .dims = {c.x.heads, c.x.dim, c.out.dim}};
        c.weight = &a->weight;
        BA_TRY(ba_check_same("weight", c.weight, &expected, true));
    }
    if (c.out.batch != c.x.batch || c.out.heads != c.x.heads || (!c.weight && c.out.dim != c.x.dim))
        return ba_fail(BA_ERROR_VALUE, BA_ARG("out") ": expected batch, heads and last axis of " BA_ARG("x") " %s, got %s",
                       ba_shape_text(&a->x).chars, ba_shape_text(&a->out).chars);
    BA_TRY(ba_check_threads(a->num_threads));
    if (c.out.batch == 0 || c.out.tokens == 0) return BA_OK;
    c.s.run_length = ba_max(1, ba_work.nsa.mean_tokens / c.s.block);
    means_scratch unused;
    c.scratch_bytes = lay_out_means(&c, NULL, &unused);
    const double work = (double)a->x.dims[0] * (double)(packed ? 1 : c.x.tokens) * (double)(c.x.heads * c.x.dim);
    const int64_t items = count_runs(&c.s, blocks_of);
    const int threads = ba_threads_of_call(a->num_threads, work, ba_work.small_work, items);
    BA_TRY(get_memory(&c.s, blocks_of, threads, c.scratch_bytes, &c.scratch));
    const ba_status status = ba_parallel(threads, items, means_item, &c);
    ba_arena_release();
    return status;
}

/* ---- The gradient of block means, and plain sums ---------------------------------------------------------------------------- */

typedef struct means_backward_call {
    sequences s;
    ba_token_rows dout, dx, more[BA_MOST_SUMMANDS];
    int64_t summands; /* arrays of `more` that are given */
    ba_merge_row_fn merge_row;
    int64_t scratch_bytes;
    char *scratch;
} means_backward_call;

/* The largest number of rows that are added up to a token's gradient. */
static int64_t most_rows(const means_backward_call *c) { return BA_MOST_SUMMANDS + ba_ceil_div(c->s.block, c->s.stride); }

typedef struct means_backward_scratch {
    const void **rows; /* [most_rows()]: the rows that are summed */
    char *weights;     /* [most_rows()] reals */
} means_backward_scratch;

/* Lays out the scratch memory of one worker. */
static int64_t lay_out_means_backward(const means_backward_call *c, char *base, means_backward_scratch *w) {
    int64_t used = 0;
    w->rows = ba_take(base, &used, most_rows(c) * (int64_t)sizeof(void *));
    w->weights = ba_take(base, &used, most_rows(c) * ba_dtype_size(ba_real_of(c->dx.dtype)));
    return used;
}

/* Each token sums its rows of `more`, in their order, and then the rows of the blocks that it lies in, from the lowest block on. Blocks do not add to
 * tokens, so no sum depends on the order in which threads run. */
static void means_backward_item(void *context, int64_t index, int worker) {
    const means_backward_call *c = context;
    const int64_t real_size = ba_dtype_size(ba_real_of(c->dx.dtype));
    int64_t sequence;
    const int64_t begin = find_run(&c->s, tokens_of, index, &sequence);
    const int64_t end = ba_min(begin + c->s.run_length, tokens_of(&c->s, sequence)), blocks = c->dout.data ? blocks_of(&c->s, sequence) : 0;
    means_backward_scratch w;
    lay_out_means_backward(c, c->scratch + worker * c->scratch_bytes, &w);
    for (int64_t i = 0; i < most_rows(c); i++) ba_set_real(w.weights, i, i < c->summands ? 1 : 1 / (double)c->s.block, real_size);
    for (int64_t t = begin; t < end; t++) {
        const int64_t first = t < c->s.block ? 0 : (t - c->s.block) / c->s.stride + 1, last = ba_min(t / c->s.stride, blocks - 1);
        for (int64_t head = 0; head < c->dx.heads; head++) {
            int64_t n = 0;
            for (; n < c->summands; n++) w.rows[n] = ba_sequence_row(&c->more[n], c->s.cu, sequence, t, head);
            for (int64_t block = first; block <= last; block++) w.rows[n++] = ba_sequence_row(&c->dout, c->s.cu_blocks, sequence, block, head);
            c->merge_row(ba_sequence_row(&c->dx, c->s.cu, sequence, t, head), w.rows, w.weights, n, c->dx.dim);
        }
    }
}

ba_status ba_block_means_backward(const ba_block_means_backward_args *a) {
    BA_IN_USUAL_MODE;
    BA_TRY(ba_check_pointer("args", a));
    means_backward_call c = {
        .s = {.count = a->batch, .cu = a->cu, .cu_blocks = a->cu ? a->cu_blocks : NULL, .block = a->block_size, .stride = a->stride}};
    const bool packed = a->cu != NULL;
    const char *axes = packed ? "(T, H, D)" : "(B, N, H, D)";
    BA_TRY(ba_take_rows("dx", &a->dx, axes, packed, &c.dx));
    BA_TRY(ba_check_places("dx", &a->dx));
    if (ba_given(&a->dout)) {
        BA_TRY(ba_take_rows("dout", &a->dout, packed ? "(blocks, H, D)" : "(B, blocks, H, D)", packed, &c.dout));
        BA_TRY(check_sequences(&c.s, &c.dx, &a->dout, "dout"));
        if (a->dout.dtype != a->dx.dtype || c.dout.batch != c.dx.batch || c.dout.heads != c.dx.heads || c.dout.dim != c.dx.dim)
            return ba_fail(BA_ERROR_VALUE, BA_ARG("dout") ": expected batch, heads, last axis and dtype of " BA_ARG("dx") " %s, got %s",
                           ba_shape_text(&a->dx).chars, ba_shape_text(&a->dout).chars);
    } else {
        c.s = (sequences){.count = c.dx.batch, .tokens = c.dx.tokens, .block = 1, .stride = 1};
    }
    /* Where there are no blocks, block_size may be any number, and scratch memory for ceil(block / stride) rows could be too much. */
    if (c.dout.tokens == 0) {
        c.dout.data = NULL;
        c.s.block = c.s.stride = 1;
    }
    for (; c.summands < BA_MOST_SUMMANDS && ba_given(&a->more[c.summands]); c.summands++) {
        BA_TRY(ba_take_rows("more", &a->more[c.summands], axes, packed, &c.more[c.summands]));
        BA_TRY(ba_rows_like("more", &c.more[c.summands], &c.dx, BA_ARG("dx"), c.dx.dim));
        if (a->more[c.summands].dtype != a->dx.dtype)
            return ba_fail(BA_ERROR_TYPE, BA_ARG("more") ": expected dtype %s like " BA_ARG("dx") ", got %s", ba_dtype_name(a->dx.dtype),
                           ba_dtype_name(a->more[c.summands].dtype));
    }
    BA_TRY(ba_check_threads(a->num_threads));
    c.merge_row = ba_kernels_active()->vector[a->dx.dtype]->pack->merge_row;
    if (c.dx.batch == 0 || c.dx.tokens == 0) return BA_OK;
    means_backward_scratch unused;
    c.scratch_bytes = lay_out_means_backward(&c, NULL, &unused);
    const double work = (double)(c.dx.batch * c.dx.tokens) * (double)(c.dx.heads * c.dx.dim);
    c.s.run_length = ba_work.nsa.mean_tokens;
    const int64_t items = count_runs(&c.s, tokens_of);
    const int threads = ba_threads_of_call(a->num_threads, work, ba_work.small_work, items);
    BA_TRY(get_memory(&c.s, tokens_of, threads, c.scratch_bytes, &c.scratch));
    const ba_status status = ba_parallel(threads, items, means_backward_item, &c);
    ba_arena_release();
    return status;
}
