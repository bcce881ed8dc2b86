/* Decides from the scores which blocks are kept. */
#include <string.h>

#include "ops/check.h"
#include "ops/scratch.h"
#include "ops/select_prefill.h"

ba_range ba_prefill_blocks(const ba_prefill *c, int64_t batch, int64_t block_row) {
    const int64_t q_valid = ba_q_span(&c->p, batch).valid, first = block_row * c->p.block_q;
    if (first >= q_valid) return (ba_range){0, 0};
    const ba_range keys = ba_prefill_keys(c, batch, first, ba_min(first + c->p.block_q, q_valid) - 1);
    return (ba_range){keys.lo / c->p.block_kv, ba_ceil_div(keys.hi, c->p.block_kv)};
}

/* ---- Rows ------------------------------------------------------------------------------------------------------- */

/* The offset of a row's first element in kept, counts or scores. */
static int64_t place_of(const ba_tensor *t, int64_t batch, int64_t list, int64_t row) {
    return batch * t->strides[0] + list * t->strides[1] + row * t->strides[2];
}

/* The tails of a row, [column]. */
static float *tails_of(const ba_prefill *c, int64_t batch, int64_t list, int64_t row) {
    const int64_t rows = ba_ceil_div(ba_q_span(&c->p, batch).valid, c->p.block_q);
    return c->tails + c->tails_begin[batch] + (list * rows + row) * ba_prefill_columns(c, batch);
}

typedef struct kept_row {
    uint64_t *words;
    int64_t step; /* from one word to the next */
    int32_t *count;
} kept_row;

static kept_row kept_row_of(const ba_prefill *c, int64_t batch, int64_t list, int64_t row) {
    const ba_tensor *kept = &c->args->kept, *counts = &c->args->counts;
    return (kept_row){(uint64_t *)kept->data + place_of(kept, batch, list, row), kept->strides[3],
                      (int32_t *)counts->data + place_of(counts, batch, list, row)};
}

static bool is_kept(const kept_row *r, int64_t column) { return r->words[column / 64 * r->step] >> column % 64 & 1; }

static void keep(const kept_row *r, int64_t column) {
    r->words[column / 64 * r->step] |= (uint64_t)1 << column % 64;
    ++*r->count;
}

static void keep_run(const kept_row *r, int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; b++)
        if (!is_kept(r, b)) keep(r, b);
}

/* Keeps the blocks of a row that are always kept. */
static void keep_forced(const ba_prefill *c, const kept_row *r, int64_t batch, int64_t row, ba_range seen) {
    const ba_select_prefill_args *a = c->args;
    const int64_t q_valid = ba_q_span(&c->p, batch).valid, kv_valid = ba_kv_span(&c->p, batch).valid;
    const int64_t rows = ba_ceil_div(q_valid, c->p.block_q), columns = ba_prefill_columns(c, batch);
    if (row < a->first_rows || row >= rows - ba_min(rows, a->last_rows)) {
        keep_run(r, seen.lo, seen.hi);
        return;
    }
    keep_run(r, seen.lo, ba_min(seen.hi, a->sink));
    keep_run(r, ba_max(seen.lo, columns - ba_min(columns, a->last_columns)), seen.hi);
    const int64_t first = row * c->p.block_q, diagonal = kv_valid - q_valid, last = ba_min(first + c->p.block_q, q_valid) - 1 + diagonal;
    if (a->recent == 0 || last < 0) return;
    const int64_t oldest = ba_max(0, first + diagonal) / c->p.block_kv;
    keep_run(r, ba_max(seen.lo, oldest - ba_min(oldest, a->recent - 1)), ba_min(seen.hi, last / c->p.block_kv + 1));
}

/* ---- Order ------------------------------------------------------------------------------------------------------ */

enum { FEW = 32, BYTE = 256 }; /* keys that are sorted by insertion; values of a byte */

/* A key that is smaller for a higher score: the bits of a number that is not negative, read as an integer, rise with the number. */
static uint32_t falling_key(float score) {
    uint32_t bits;
    memcpy(&bits, &score, sizeof bits);
    return ~bits;
}

static void sort_few(uint32_t *keys, int32_t *order, int64_t n) {
    for (int64_t i = 1; i < n; i++) {
        const uint32_t key = keys[i];
        const int32_t place = order[i];
        int64_t at = i;
        for (; at > 0 && keys[at - 1] > key; at--) {
            keys[at] = keys[at - 1];
            order[at] = order[at - 1];
        }
        keys[at] = key;
        order[at] = place;
    }
}

/* Sorts s->order by rising s->keys; blocks with equal keys stay in order. It is a radix sort, byte by byte: after four passes the result is back in
 * the arrays that it began in. */
static void sort_by_keys(const ba_strip_scratch *s, int64_t n) {
    if (n <= FEW) {
        sort_few(s->keys, s->order, n);
        return;
    }
    int32_t counts[4][BYTE] = {{0}};
    for (int64_t i = 0; i < n; i++)
        for (int byte = 0; byte < 4; byte++) counts[byte][s->keys[i] >> 8 * byte & 255]++;
    uint32_t *from = s->keys, *to = s->other_keys;
    int32_t *from_order = s->order, *to_order = s->other_order;
    for (int byte = 0; byte < 4; byte++) {
        int32_t begin = 0;
        for (int i = 0; i < BYTE; i++) {
            const int32_t count = counts[byte][i];
            counts[byte][i] = begin;
            begin += count;
        }
        for (int64_t i = 0; i < n; i++) {
            const int32_t place = counts[byte][from[i] >> 8 * byte & 255]++;
            to[place] = from[i];
            to_order[place] = from_order[i];
        }
        uint32_t *const keys = from;
        int32_t *const order = from_order;
        from = to;
        to = keys;
        from_order = to_order;
        to_order = order;
    }
}

/* ---- Budgets of a row ------------------------------------------------------------------------------------------- */

/* The budget of a list: the list's own number, or the one that all lists share. */
static double budget_of(const ba_prefill *c, int64_t list) {
    const ba_tensor *t = &c->args->budgets;
    return ((const double *)t->data)[t->dims[0] > 1 ? list * t->strides[0] : 0];
}

void ba_budget_row(const ba_prefill *c, const ba_strip_scratch *s, int64_t batch, int64_t list, int64_t row, const float *scores) {
    const ba_select_prefill_args *a = c->args;
    const kept_row r = kept_row_of(c, batch, list, row);
    const ba_range seen = ba_prefill_blocks(c, batch, row);
    for (int64_t w = 0; w < c->words; w++) r.words[w * r.step] = 0;
    *r.count = 0;
    if (ba_given(&a->scores)) {
        float *to = (float *)a->scores.data + place_of(&a->scores, batch, list, row);
        for (int64_t b = 0; b < c->p.block_columns; b++) to[b * a->scores.strides[3]] = scores[b];
    }
    if (seen.lo == seen.hi) return;
    keep_forced(c, &r, batch, row, seen);
    if (*r.count == 0) {
        int64_t best = seen.lo;
        for (int64_t b = seen.lo + 1; b < seen.hi; b++) best = scores[b] > scores[best] ? b : best;
        keep(&r, best);
    }
    float *tails = a->budget == BA_BUDGET_DENSITY ? tails_of(c, batch, list, row) : NULL;
    const double budget = tails ? 0 : budget_of(c, list);
    int64_t n = 0;
    for (int64_t b = seen.lo; b < seen.hi; b++) {
        if (is_kept(&r, b)) {
            if (tails) tails[b] = -1;
        } else if (a->budget == BA_BUDGET_THRESHOLD) {
            if ((double)scores[b] >= budget) keep(&r, b);
        } else {
            s->keys[n] = falling_key(scores[b]);
            s->order[n++] = (int32_t)b;
        }
    }
    if (n == 0) return;
    sort_by_keys(s, n);
    int64_t kept = 0; /* how many of the n sorted blocks, from the first on, are kept */
    double tail = 0;
    if (a->budget == BA_BUDGET_TOP_K) kept = ba_min(n, ba_max(0, (int64_t)budget - *r.count));
    else
        for (int64_t i = n - 1; i >= 0; i--) { /* from the lowest score on, so that a small score is not lost in the rounding of a large sum */
            tail += (double)scores[s->order[i]];
            if (tails) tails[s->order[i]] = (float)tail;
            else if (kept == 0 && tail > 1 - budget) kept = i + 1;
        }
    for (int64_t i = 0; i < kept; i++) keep(&r, s->order[i]);
}

/* ---- Density ---------------------------------------------------------------------------------------------------- */

static uint32_t bits_of(float tail) {
    uint32_t bits;
    memcpy(&bits, &tail, sizeof bits);
    return bits;
}

/* Runs `statement`, with `bits`, `list`, `row` and `b` set, for every block of the lists that is not always kept, in the order of memory. */
#define EACH_TAIL(statement)                                                                                                                         \
    for (int64_t list = first; list < first + lists; list++)                                                                                         \
        for (int64_t row = 0; row < c->p.block_rows; row++) {                                                                                        \
            const ba_range seen = ba_prefill_blocks(c, batch, row);                                                                                  \
            const float *tails = tails_of(c, batch, list, row);                                                                                      \
            for (int64_t b = seen.lo; b < seen.hi; b++) {                                                                                            \
                if (tails[b] < 0) continue;                                                                                                          \
                const uint32_t bits = bits_of(tails[b]);                                                                                             \
                statement;                                                                                                                           \
            }                                                                                                                                        \
        }

/* Counting from the last bin down, the bin that holds number *places. *places becomes how many numbers of that bin are needed. */
static uint32_t bin_of(const int64_t *bins, int64_t *places) {
    uint32_t bin = BA_BUDGET_BINS - 1;
    for (; bins[bin] < *places; bin--) *places -= bins[bin];
    return bin;
}

void ba_budget_share(const ba_prefill *c, int64_t batch, int64_t first, int64_t lists, int64_t *bins) {
    int64_t all = 0, kept = 0;
    for (int64_t list = first; list < first + lists; list++)
        for (int64_t row = 0; row < c->p.block_rows; row++) {
            const ba_range seen = ba_prefill_blocks(c, batch, row);
            all += seen.hi - seen.lo;
            kept += *kept_row_of(c, batch, list, row).count;
        }
    int64_t places = ba_min((int64_t)(budget_of(c, first) * (double)all + 0.5), all) - kept;
    if (places <= 0) return;
    memset(bins, 0, BA_BUDGET_BINS * sizeof *bins);
    EACH_TAIL(bins[bits >> 16]++);
    const uint32_t high = bin_of(bins, &places);
    memset(bins, 0, BA_BUDGET_BINS * sizeof *bins);
    EACH_TAIL(if (bits >> 16 == high) bins[bits & 0xffff]++);
    const uint32_t least = high << 16 | bin_of(bins, &places);
    int64_t ties = places; /* how many blocks with exactly the least tail are kept */
    EACH_TAIL({
        if (bits < least || (bits == least && ties-- <= 0)) continue;
        const kept_row r = kept_row_of(c, batch, list, row);
        keep(&r, b);
    });
}
