/* Paged attention with kv_split. A KV split, here split for short, is kv_split consecutive tokens of a request. Each split is attended as a sequence
 * of its own, and the states of a request's splits are merged by a fixed tree. (In documents for users, a split is called a chunk.)
 *
 * Node i of level l covers splits i * 2^l to (i + 1) * 2^l - 1, as far as the request has them. Its state is the merge of the states of its two
 * halves, or, where its right half has no split, the state of its left half. So the result depends on the splits alone: merge_states_tree() of
 * blitz_attn/merge.py gives the same bits from the states of single splits, whoever has computed them.
 *
 * Queries are attended in slices; a slice is some queries of one request. Slices are attended in *rounds*, so that memory holds the states of one
 * round at a time. A round goes through its splits in *waves*. A wave attends `width` neighbouring splits of every slice, where `width` is a power of
 * two, and merges them to one node of the tree. Nodes that wait for the right half of their parent are kept in a stack with one slot per level, as in
 * a binary counter: before wave n, slot l is in use where bit l of n is set. */
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "core/faults.h"
#include "core/pool.h"
#include "core/status.h"
#include "kernels/kernels.h"
#include "kernels/work_tuning.h"
#include "ops/attend/attend.h"
#include "ops/attend/merge.h"
#include "ops/check.h"
#include "ops/plan/plan.h"
#include "ops/reals.h"

typedef struct slice {
    int64_t request, first_query, queries; /* which queries of the request */
    int64_t row;                           /* of the first of these queries, among the rows of the round */
    int64_t splits;
} slice;

/* The size of a round: how many slices it has, how many rows, and how many splits the longest of its requests has. Here a row is one token of the
 * queries, with all of its heads. */
typedef struct round_size {
    int64_t slices, rows, splits;
} round_size;

/* Where in the call a round begins: at a query of a request. */
typedef struct cursor {
    int64_t request, query;
} cursor;

typedef struct split_call {
    const ba_problem *whole;
    int64_t split_tokens; /* kv_split */
    ba_isa level;
    int num_threads;
    const ba_attend_family *merging, *writing; /* the families whose kernels merge states, and write results */
    int64_t real_size, pad;                    /* of a state: bytes per real, and reals per row */
    int64_t most_rows;                         /* the most rows of queries in a round; a request with more queries is cut into slices */
    int64_t *first_word;                       /* [batch]: where the bitmaps of a request's lists begin in `listed` */
    uint64_t *listed;                          /* NULL: no lists */
    bool refused;                              /* an entry of the lists is wrong; `bad` says where the first wrong one is */
    int64_t bad[4];
    /* of the round */
    slice *slices;
    round_size size;
    int32_t *slice_of_row;
    int64_t width, wave;
    char *outs, *lses; /* [slot][row][head]: states. The first `width` slots are those of the wave, the others the stack */
    char *nothing;     /* a row of zeros: the value of a sink */
} split_call;

static void *get_memory(int64_t bytes) { return ba_fault(BA_FAULT_MEMORY) ? NULL : malloc((size_t)ba_max(1, bytes)); }

static ba_status no_memory(int64_t bytes) { return ba_fail(BA_ERROR_MEMORY, "scratch: expected %" PRId64 " bytes of memory, got none", bytes); }

/* ---- Requests -------------------------------------------------------------------------------------------------------- */

static int64_t queries_of(const ba_problem *p, int64_t request) { return p->cu_q ? p->cu_q[request + 1] - p->cu_q[request] : 1; }
static int64_t pages_of(const ba_problem *p, int64_t request) { return ba_ceil_div(p->kv_lens[request], p->page_size); }
static int64_t words_of(const ba_problem *p, int64_t request) { return ba_ceil_div(pages_of(p, request), 64); }

/* Reads one list of a request. An item is one (request, head of the lists). The items run one after the other, on one thread. */
static void mark_list(void *context, int64_t item, int worker) {
    (void)worker;
    split_call *c = context;
    const ba_problem *p = c->whole;
    const int64_t list_heads = p->blocks.dims[1], request = item / list_heads, head = item % list_heads, words = words_of(p, request);
    int64_t at = 0;
    if (c->refused || ba_list_to_bitmap(p, request, head * (p->heads / list_heads), 0, c->listed + c->first_word[request] + head * words, words, &at))
        return;
    c->refused = true;
    memcpy(c->bad, (const int64_t[]){ba_list_batch(p, request), head, 0, at}, sizeof c->bad);
}

/* Reads and checks all lists, once for all splits. */
static ba_status mark_lists(split_call *c) {
    const ba_problem *p = c->whole;
    if (!p->listed) return BA_OK;
    int64_t words = 0;
    for (int64_t b = 0; b < p->batch; b++) words += words_of(p, b) * p->blocks.dims[1];
    const int64_t bytes = (p->batch + words) * (int64_t)sizeof(int64_t);
    c->first_word = get_memory(bytes);
    if (!c->first_word) return no_memory(bytes);
    c->listed = (uint64_t *)(c->first_word + p->batch);
    words = 0;
    for (int64_t b = 0; b < p->batch; b++) {
        c->first_word[b] = words;
        words += words_of(p, b) * p->blocks.dims[1];
    }
    BA_TRY(ba_parallel(1, p->batch * p->blocks.dims[1], mark_list, c));
    return c->refused ? ba_refuse_list_entry(p, c->bad) : BA_OK;
}

/* ---- States ---------------------------------------------------------------------------------------------------------- */

static int64_t state_index(const split_call *c, int64_t slot, int64_t row, int64_t head) {
    return (slot * c->size.rows + row) * c->whole->heads + head;
}
static char *state_out(const split_call *c, int64_t state) { return c->outs + state * c->pad * c->real_size; }
static double state_lse(const split_call *c, int64_t state) { return ba_get_real(c->lses, state, c->real_size); }

/* Merges another state into state number `state`. */
static void merge_state(const split_call *c, int64_t state, const void *other_out, double other_lse) {
    char *out = state_out(c, state);
    const void *rows[2];
    double weights[2];
    const double lse = ba_merge_row_states(c->merging, 2, (const void *const[]){out, other_out}, (const double[]){state_lse(c, state), other_lse},
                                           rows, weights, out, c->whole->v_dim);
    ba_set_real(c->lses, state, lse, c->real_size);
}

/* Lets a sink, which has a score but no value, take part in a state. A sink counts as infinite where it overflows in log2 units, as in a call without
 * splits. Beside a sink of plus infinity, keys with finite scores have weight 0. */
static void add_sink(const split_call *c, int64_t state, double sink) {
    double exponent = sink * BA_LOG2_E;
    if (c->real_size == 4) exponent = (double)(float)exponent;
    const double score = isinf(exponent) ? exponent : sink;
    if (!(score == INFINITY && state_lse(c, state) < INFINITY)) {
        merge_state(c, state, c->nothing, score);
        return;
    }
    /* A merge would take the difference of two infinities. The output is multiplied by 0, and not set to 0, so that it becomes NaN where it is not
     * finite. */
    char *out = state_out(c, state);
    for (int64_t d = 0; d < c->whole->v_dim; d++) ba_set_real(out, d, ba_get_real(out, d, c->real_size) * 0, c->real_size);
    ba_set_real(c->lses, state, INFINITY, c->real_size);
}

/* Writes the final state of a query. */
static void write_result(const split_call *c, const slice *s, int64_t query, int64_t head, int64_t state) {
    const ba_problem *p = c->whole;
    if (p->sinks) add_sink(c, state, (double)p->sinks[head]);
    const double zero = 0, one = 1;
    const float zero_float = 0, one_float = 1;
    const ba_panel panel = {.o = state_out(c, state),
                            .m = c->real_size == 4 ? (void *)&zero_float : (void *)&zero,
                            .l = c->real_size == 4 ? (void *)&one_float : (void *)&one};
    void *const row = ba_query_row(p, &p->out, p->out_element_size, s->request, head, query);
    (p->unrounded ? c->writing->few->finish_reals : c->writing->few->finish)(&panel, 1, p->v_dim, &row, NULL);
    if (p->lse.data) ba_set_real(ba_query_row(p, &p->lse, c->real_size, s->request, head, query), 0, state_lse(c, state), c->real_size);
}

/* Merges the states that a wave has left for one query of one head, then merges the result with the nodes that wait in the stack. Writes the final
 * result after the last wave. */
static void merge_wave(const split_call *c, int64_t row, int64_t head) {
    const slice *s = &c->slices[c->slice_of_row[row]];
    const int64_t splits = ba_min(c->width, s->splits - c->wave * c->width);
    if (splits <= 0) return;
    const bool last = (c->wave + 1) * c->width >= s->splits;
    for (int64_t step = 1; step < splits; step *= 2)
        for (int64_t left = 0; left + step < splits; left += 2 * step) {
            const int64_t right = state_index(c, left + step, row, head);
            merge_state(c, state_index(c, left, row, head), state_out(c, right), state_lse(c, right));
        }
    int64_t node = state_index(c, 0, row, head), level = 0;
    for (; c->wave >> level; level++) {
        if (c->wave >> level & 1) {
            const int64_t left = state_index(c, c->width + level, row, head);
            merge_state(c, left, state_out(c, node), state_lse(c, node));
            node = left;
        } else if (!last) {
            break;
        }
    }
    if (last) {
        write_result(c, s, s->first_query + row - s->row, head, node);
        return;
    }
    const int64_t to = state_index(c, c->width + level, row, head);
    memcpy(state_out(c, to), state_out(c, node), (size_t)(c->whole->v_dim * c->real_size));
    ba_set_real(c->lses, to, state_lse(c, node), c->real_size);
}

static void merge_rows(void *context, int64_t item, int worker) {
    (void)worker;
    const split_call *c = context;
    const int64_t heads = c->whole->heads, states = c->size.rows * heads;
    for (int64_t i = item * ba_work.merge_rows; i < ba_min(states, (item + 1) * ba_work.merge_rows); i++) merge_wave(c, i / heads, i % heads);
}

/* ---- Rounds ---------------------------------------------------------------------------------------------------------- */

/* Returns the round that begins at *at, and moves *at to the next round. Writes the round's slices to `slices`, unless that is NULL. */
static round_size next_round(const split_call *c, cursor *at, slice *slices) {
    const ba_problem *p = c->whole;
    round_size size = {0, 0, 0};
    while (at->request < p->batch) {
        const int64_t all = queries_of(p, at->request), queries = ba_min(all - at->query, c->most_rows);
        if (size.slices && size.rows + queries > c->most_rows) break;
        if (queries) {
            const int64_t splits = ba_max(1, ba_ceil_div(p->kv_lens[at->request], c->split_tokens));
            if (slices) slices[size.slices] = (slice){at->request, at->query, queries, size.rows, splits};
            size = (round_size){size.slices + 1, size.rows + queries, ba_max(size.splits, splits)};
        }
        at->query += queries;
        if (at->query < all) continue;
        *at = (cursor){at->request + 1, 0};
    }
    return size;
}

/* The arrays of the batch entries of a wave. */
typedef struct entries {
    ba_kv_split *split;
    int64_t *kv_len, *first_page, *q_begin, *q_total, *q_row, *q_end;
} entries;

enum { NUMBERS_OF_ENTRY = 6 };

/* Fills the batch entries of a wave: one for each split of each slice. */
static void fill_entries(const split_call *c, const entries *e, ba_problem *wave) {
    const ba_problem *p = c->whole;
    wave->batch = wave->kv_len = wave->q_len = 0;
    for (const slice *s = c->slices; s < c->slices + c->size.slices; s++) {
        const int64_t b = s->request, queries = queries_of(p, b), row = (p->cu_q ? p->cu_q[b] : b) + s->first_query;
        const int64_t begin = p->q_begin ? p->q_begin[b] : p->kv_lens[b] - queries;
        for (int64_t i = 0; i < c->width && c->wave * c->width + i < s->splits; i++) {
            const int64_t n = wave->batch++, first_key = (c->wave * c->width + i) * c->split_tokens;
            e->split[n] = (ba_kv_split){.request = b,
                                        .first_query = s->first_query,
                                        .result_row = i * c->size.rows + s->row,
                                        .first_key = first_key,
                                        .listed = c->listed ? c->listed + c->first_word[b] : NULL,
                                        .listed_words = words_of(p, b)};
            e->kv_len[n] = ba_min(p->kv_lens[b] - first_key, c->split_tokens);
            e->first_page[n] = p->first_page[b] + first_key / p->page_size;
            /* The position of the request's first query is limited to BA_MOST_TOKENS before or behind the first key of the split: a query beyond that
             * sees the same tokens as a query at the limit. */
            e->q_begin[n] = ba_max(-BA_MOST_TOKENS, ba_min(begin - first_key, BA_MOST_TOKENS)) + s->first_query;
            e->q_total[n] = queries;
            e->q_row[n] = row;
            e->q_end[n] = row + s->queries;
            wave->kv_len = ba_max(wave->kv_len, e->kv_len[n]);
            wave->q_len = ba_max(wave->q_len, s->queries);
        }
    }
    wave->block_q = ba_max(1, wave->q_len);
    wave->block_columns = ba_ceil_div(wave->kv_len, p->page_size);
}

/* The problem of a wave, without the members that fill_entries() sets for each wave. */
static ba_problem problem_of_waves(const split_call *c, const entries *e) {
    const ba_problem *p = c->whole;
    ba_problem wave = *p;
    wave.unrounded = p->dtype == BA_FLOAT16 || p->dtype == BA_BFLOAT16;
    wave.out_element_size = c->real_size;
    wave.sinks = NULL; /* sinks take part once, at the end */
    wave.kv_splits = e->split;
    wave.kv_lens = e->kv_len;
    wave.first_page = e->first_page;
    wave.q_begin = e->q_begin;
    wave.q_total = e->q_total;
    wave.q = (ba_view){p->q.data, 0, p->q.head_stride, p->cu_q ? p->q.token_stride : p->q.batch_stride};
    wave.out = (ba_view){c->outs, 0, c->pad, p->heads * c->pad};
    wave.lse = (ba_view){c->lses, 0, 1, p->heads};
    wave.kv_ranges.strides[1] = p->kv_ranges.strides[p->cu_q ? 1 : 0];
    wave.cu_q = e->q_row;
    wave.q_ends = e->q_end;
    return wave;
}

static ba_status attend_waves(split_call *c, int64_t waves, const entries *e) {
    ba_problem wave = problem_of_waves(c, e);
    const int64_t states = c->size.rows * c->whole->heads, items = ba_ceil_div(states, ba_work.merge_rows);
    const int threads = ba_threads_of_call(c->num_threads, (double)states * (double)(c->width * c->whole->v_dim), ba_work.small_work, items);
    for (c->wave = 0; c->wave < waves; c->wave++) {
        fill_entries(c, e, &wave);
        BA_TRY(ba_attend_at(c->level, &wave, c->num_threads));
        BA_TRY(ba_parallel(threads, items, merge_rows, c));
    }
    return BA_OK;
}

/* Attends the round of this size that begins at *at, in memory of its own. */
static ba_status attend_round(split_call *c, round_size size, cursor *at) {
    const ba_problem *p = c->whole;
    /* The width is the largest power of two for which the states of a wave are at most most_rows rows. But it is at least 1, and no larger than
     * needed for all splits to fit in one wave. */
    for (c->width = 1; c->width < size.splits && 2 * c->width * size.rows <= c->most_rows;) c->width *= 2;
    const int64_t waves = ba_ceil_div(size.splits, c->width), entry_count = ba_min(size.splits, c->width) * size.slices; /* of a wave, at most */
    int64_t levels = 0;
    while ((waves - 1) >> levels) levels++;
    const int64_t states = (c->width + levels) * size.rows * p->heads, rows_bytes = ba_round_up(size.rows * (int64_t)sizeof(int32_t), 8);
    const int64_t of_entries = entry_count * (int64_t)(sizeof(ba_kv_split) + NUMBERS_OF_ENTRY * sizeof(int64_t)),
                  lse_bytes = ba_round_up(states * c->real_size, 8);
    const int64_t bytes =
        of_entries + size.slices * (int64_t)sizeof(slice) + rows_bytes + states * c->pad * c->real_size + lse_bytes + c->pad * c->real_size;
    char *memory = get_memory(bytes);
    if (!memory) return no_memory(bytes);
    entries e = {.split = (ba_kv_split *)(void *)memory};
    e.kv_len = (int64_t *)(void *)(e.split + entry_count);
    e.first_page = e.kv_len + entry_count;
    e.q_begin = e.first_page + entry_count;
    e.q_total = e.q_begin + entry_count;
    e.q_row = e.q_total + entry_count;
    e.q_end = e.q_row + entry_count;
    c->slices = (slice *)(void *)(e.q_end + entry_count);
    c->slice_of_row = (int32_t *)(void *)(c->slices + size.slices);
    c->outs = (char *)c->slice_of_row + rows_bytes;
    c->lses = c->outs + states * c->pad * c->real_size;
    c->nothing = c->lses + lse_bytes;
    memset(c->nothing, 0, (size_t)(c->pad * c->real_size));
    c->size = next_round(c, at, c->slices);
    for (int64_t i = 0; i < size.slices; i++)
        for (int64_t n = 0; n < c->slices[i].queries; n++) c->slice_of_row[c->slices[i].row + n] = (int32_t)i;
    const ba_status status = attend_waves(c, waves, &e);
    free(memory);
    return status;
}

ba_status ba_attend_kv_split(const ba_problem *problem, int64_t kv_split, int num_threads) {
    const ba_isa level = ba_isa_active(); /* read once, for all waves: another thread may change the level at any time */
    const ba_kernels *kernels = ba_kernels_at(level);
    const ba_dtype real = ba_real_of(problem->dtype);
    split_call c = {.whole = problem,
                    .split_tokens = kv_split,
                    .level = level,
                    .num_threads = num_threads,
                    .merging = kernels->vector[real],
                    .writing = kernels->vector[problem->dtype],
                    .real_size = ba_dtype_size(real),
                    .pad = BA_FEW_PAD(problem->v_dim)};
    c.most_rows = ba_max(ba_work.round_queries, ba_work.round_bytes / (problem->heads * c.pad * c.real_size));
    ba_status status = mark_lists(&c);
    for (cursor at = {0, 0}; status == BA_OK;) {
        cursor next = at;
        const round_size size = next_round(&c, &next, NULL);
        if (size.slices == 0) break;
        status = attend_round(&c, size, &at);
    }
    free(c.first_word);
    return status;
}
