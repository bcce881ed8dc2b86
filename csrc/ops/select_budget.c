/* Decides from the scores which blocks are kept. ba_budget_row() does it for one row of blocks: first the forced blocks, which are always kept, then
 * the others as the budget says. Where rows share a density, it only notes how each of the other blocks competes, its tail (select_prefill.h), and
 * ba_budget_share() keeps the best of all rows together. */
#include <math.h>
#include <string.h>

#include "core/pool.h"
#include "kernels/work_tuning.h"
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

/* Keeps the forced blocks of a row of blocks: those that are always kept. `seen` are the blocks that it may see. */
static void keep_forced(const ba_prefill *c, const kept_row *r, int64_t batch, int64_t block_row, ba_range seen) {
    const ba_select_prefill_args *a = c->args;
    const int64_t q_valid = ba_q_span(&c->p, batch).valid, kv_valid = ba_kv_span(&c->p, batch).valid;
    const int64_t rows = ba_ceil_div(q_valid, c->p.block_q), columns = ba_prefill_columns(c, batch);
    if (block_row < a->first_rows || block_row >= rows - ba_min(rows, a->last_rows)) {
        keep_run(r, seen.lo, seen.hi);
        return;
    }
    keep_run(r, seen.lo, ba_min(seen.hi, a->sink));
    keep_run(r, ba_max(seen.lo, columns - ba_min(columns, a->last_columns)), seen.hi);
    /* Query i stands beside key i + kv_valid - q_valid, on the diagonal. The row's diagonal goes from key `first` to key `last`; the first of these
     * may lie before key 0. `recent` keeps the blocks that it crosses and recent - 1 blocks before them. */
    const int64_t begin = block_row * c->p.block_q, diagonal = kv_valid - q_valid;
    const int64_t first = ba_max(0, begin + diagonal), last = ba_min(begin + c->p.block_q, q_valid) - 1 + diagonal;
    if (a->recent == 0 || last < 0) return;
    const int64_t crossed = first / c->p.block_kv;
    keep_run(r, ba_max(seen.lo, crossed - ba_min(crossed, a->recent - 1)), ba_min(seen.hi, last / c->p.block_kv + 1));
}

/* ---- Order ------------------------------------------------------------------------------------------------------
 *
 * A place is a block as one number that sorts by falling score, and by column where scores are equal: the bits of a score that is not negative, read
 * as an integer, rise with the score. */

static uint64_t place_in_order(float score, int64_t column) {
    uint32_t bits;
    memcpy(&bits, &score, sizeof bits);
    return (uint64_t)~bits << 32 | (uint64_t)column;
}

static int64_t column_of(uint64_t place) { return (int64_t)(place & 0xffffffff); }

enum {
    MOST_BUCKETS = 1 << 11, /* by a range of scores each, for twice as many places at least */
    BYTE = 256,             /* values of a byte */
};

/* Sorts n places of which few are far from where they belong: every place moves past the higher ones before it. Returns false where that would take
 * many moves; places with equal scores are then still in order. */
static bool settle(uint64_t *places, int64_t n) {
    for (int64_t i = 1, moves = 0; i < n; i++) {
        const uint64_t place = places[i];
        int64_t at = i;
        for (; at > 0 && places[at - 1] > place; at--) places[at] = places[at - 1];
        places[at] = place;
        moves += i - at;
        if (moves > ba_work.choose.moves * n) return false;
    }
    return true;
}

/* Sorts n places, of which those with equal scores are in order, byte by byte of their scores: after four passes the result is back in the array
 * that it began in. */
static void sort_by_bytes(uint64_t *places, uint64_t *other, int64_t n) {
    int32_t counts[4][BYTE] = {{0}};
    for (int64_t i = 0; i < n; i++)
        for (int byte = 0; byte < 4; byte++) counts[byte][places[i] >> (32 + 8 * byte) & 255]++;
    uint64_t *from = places, *to = other;
    for (int byte = 0; byte < 4; byte++) {
        int32_t begin = 0;
        for (int i = 0; i < BYTE; i++) {
            const int32_t count = counts[byte][i];
            counts[byte][i] = begin;
            begin += count;
        }
        for (int64_t i = 0; i < n; i++) to[counts[byte][from[i] >> (32 + 8 * byte) & 255]++] = from[i];
        uint64_t *const sorted = to;
        to = from;
        from = sorted;
    }
}

/* Sorts n places whose columns rise. `other` has room for as many. */
static void sort_places(uint64_t *places, uint64_t *other, int64_t n) {
    if (n > ba_work.choose.bucket_keys) {
        uint64_t lowest = places[0], highest = places[0];
        for (int64_t i = 1; i < n; i++) {
            lowest = places[i] < lowest ? places[i] : lowest;
            highest = places[i] > highest ? places[i] : highest;
        }
        int log_buckets = 5;
        while ((1 << log_buckets) < ba_min(MOST_BUCKETS, 2 * n)) log_buckets++;
        const int shift = (int)ba_max(0, 64 - __builtin_clzll((highest - lowest) | 1) - log_buckets);
        int32_t counts[MOST_BUCKETS], begin = 0;
        memset(counts, 0, sizeof *counts << log_buckets);
        for (int64_t i = 0; i < n; i++) counts[(places[i] - lowest) >> shift]++;
        for (int64_t i = 0; i < (int64_t)1 << log_buckets; i++) {
            const int32_t count = counts[i];
            counts[i] = begin;
            begin += count;
        }
        for (int64_t i = 0; i < n; i++) other[counts[(places[i] - lowest) >> shift]++] = places[i];
        memcpy(places, other, (size_t)n * sizeof *places);
    }
    if (!settle(places, n)) sort_by_bytes(places, other, n);
}

/* ---- Digits of a tail -------------------------------------------------------------------------------------------
 *
 * With BA_BUDGET_DENSITY, a share keeps a certain number of blocks, those with the largest tails, and the least tail among them is to be found
 * without sorting all tails. The bits of a tail, which is not negative, read as an integer, rise with it. Such an integer has three digits of 11, 11
 * and 10 bits. Counting the tails by their first digit tells with which digit the least tail begins, and how many blocks are still to be found among
 * the tails that begin so. Counting these by their second digit, and those that are left by their third, tells the rest. */

enum { DIGITS = 3 };
static const struct {
    int shift, bits;
} digits[DIGITS] = {{21, 11}, {10, 11}, {0, 10}};

static uint32_t bits_of(float tail) {
    uint32_t bits;
    memcpy(&bits, &tail, sizeof bits);
    return bits;
}

/* ---- Budgets of a row ------------------------------------------------------------------------------------------- */

/* The budget of a list: the list's own number, or the one that all lists share. */
static double budget_of(const ba_prefill *c, int64_t list) {
    const ba_tensor *t = &c->args->budgets;
    return ((const double *)t->data)[t->dims[0] > 1 ? list * t->strides[0] : 0];
}

void ba_budget_row(const ba_prefill *c, const ba_strip_scratch *s, int64_t batch, int64_t list, int64_t row, const float *scores) {
    /* 1. Empty the row, and copy its scores to the caller's array. */
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
    /* 2. Keep the forced blocks; where there are none, the best, so that no row is empty. */
    keep_forced(c, &r, batch, row, seen);
    if (*r.count == 0) {
        int64_t best = seen.lo;
        for (int64_t b = seen.lo + 1; b < seen.hi; b++) best = scores[b] > scores[best] ? b : best;
        keep(&r, best);
    }
    /* 3. The others: a threshold decides at once, and any other budget needs them by falling score. */
    float *tails = a->budget == BA_BUDGET_DENSITY ? tails_of(c, batch, list, row) : NULL;
    const double budget = tails ? 0 : budget_of(c, list);
    int64_t n = 0;
    for (int64_t b = seen.lo; b < seen.hi; b++) {
        if (is_kept(&r, b)) {
            if (tails) tails[b] = -1;
        } else if (a->budget == BA_BUDGET_THRESHOLD) {
            if ((double)scores[b] >= budget) keep(&r, b);
        } else {
            s->places[n++] = place_in_order(scores[b], b);
        }
    }
    if (n == 0) return;
    sort_places(s->places, s->other_places, n);
    /* 4. Keep the first of the sorted blocks (top_k, top_p), or note the tails of all of them (density). */
    int64_t kept = 0; /* how many of the n sorted blocks, from the first on, are kept */
    double tail = 0;
    if (a->budget == BA_BUDGET_TOP_K) kept = ba_min(n, ba_max(0, (int64_t)fmin(budget, INT32_MAX) - *r.count));
    else
        for (int64_t i = n - 1; i >= 0; i--) { /* from the lowest score on, so that a small score is not lost in the rounding of a large sum */
            const int64_t b = column_of(s->places[i]);
            tail += (double)scores[b];
            if (tails) {
                tails[b] = (float)tail;
                s->bins[bits_of(tails[b]) >> digits[0].shift]++;
            } else if (kept == 0 && tail > 1 - budget) kept = i + 1;
        }
    for (int64_t i = 0; i < kept; i++) keep(&r, column_of(s->places[i]));
}

/* ---- Density ----------------------------------------------------------------------------------------------------
 *
 * A share is the lists of a sequence that share one density: all of them, or each by itself. */

/* The number of shares of a sequence. */
static int64_t shares_of(const ba_prefill *c) { return c->args->budgets.dims[0]; }

static ba_share *share_of(const ba_prefill *c, int64_t batch, int64_t list) {
    return c->shares + batch * shares_of(c) + (shares_of(c) > 1 ? list : 0);
}

/* Adds the counts of one thread to those of a share. */
static void add_to_bins(int64_t *all, const int64_t *bins) {
    for (int64_t i = 0; i < BA_BUDGET_BINS; i++)
        if (bins[i]) __atomic_fetch_add(&all[i], bins[i], __ATOMIC_RELAXED);
}

void ba_budget_count(const ba_prefill *c, const ba_strip_scratch *s, int64_t batch, int64_t list) {
    add_to_bins(c->bins + (share_of(c, batch, list) - c->shares) * BA_BUDGET_BINS, s->bins);
}

/* Adds the tails of a list that begin with the digits that are known to the bins of its share, by the digit in turn. The others are counted in spare
 * bins, because a branch would be mispredicted: in several ones, because an addition waits for the one before. */
enum { SPARE = 8 };
static void count_tails(void *context, int64_t item, int worker) {
    const ba_prefill *c = context;
    const int64_t batch = item / c->lists, list = item % c->lists;
    const ba_share *share = share_of(c, batch, list);
    if (share->none) return;
    int64_t used = 0;
    int64_t *bins = (int64_t *)ba_take(c->scratch + worker * c->scratch_bytes, &used, (BA_BUDGET_BINS + SPARE) * (int64_t)sizeof *bins);
    memset(bins, 0, (BA_BUDGET_BINS + SPARE) * sizeof *bins);
    const int shift = digits[c->digit].shift;
    const uint32_t least = share->least, end = (uint32_t)1 << digits[c->digit].bits;
    for (int64_t row = 0; row < c->p.block_rows; row++) {
        const ba_range seen = ba_prefill_blocks(c, batch, row);
        const float *tails = tails_of(c, batch, list, row);
        for (int64_t b = seen.lo; b < seen.hi; b++) {
            const uint32_t bin = (bits_of(tails[b]) - least) >> shift; /* `end` or more where the tail begins with other digits, or is -1 */
            bins[bin < end ? bin : BA_BUDGET_BINS + (b & (SPARE - 1))]++;
        }
    }
    add_to_bins(c->bins + (share - c->shares) * BA_BUDGET_BINS, bins);
}

/* Finds one more digit of the least tail. The tails in the highest bins are kept: going down from the last bin, they use up places, until a bin holds
 * at least as many as are left. Its number is the digit. */
static void find_digit(const ba_prefill *c, ba_share *share) {
    const int64_t *bins = c->bins + (share - c->shares) * BA_BUDGET_BINS;
    uint32_t bin = ((uint32_t)1 << digits[c->digit].bits) - 1;
    for (; bin > 0 && bins[bin] < share->places; bin--) /* there are bins enough, unless elements of the caller's `counts` overlap in memory */
        share->places -= bins[bin];
    share->least |= bin << digits[c->digit].shift;
    share->has_all = bins[bin] == share->places;
}

/* Keeps the blocks of a list whose tails are above the least, and where all blocks with exactly the least are kept, also these. */
static void keep_tails(void *context, int64_t item, int worker) {
    const ba_prefill *c = context;
    const int64_t batch = item / c->lists, list = item % c->lists;
    const ba_share *share = share_of(c, batch, list);
    const int32_t least = (int32_t)(share->least + !share->has_all); /* the bits of -1 are below */
    (void)worker;
    if (share->none) return;
    for (int64_t row = 0; row < c->p.block_rows; row++) {
        const ba_range seen = ba_prefill_blocks(c, batch, row);
        const float *tails = tails_of(c, batch, list, row);
        const kept_row r = kept_row_of(c, batch, list, row);
        for (int64_t word = seen.lo / 64; word * 64 < seen.hi; word++) { /* without branches, which would be mispredicted */
            const int64_t from = ba_max(seen.lo, word * 64), to = ba_min(seen.hi, word * 64 + 64);
            uint64_t kept = 0;
            for (int64_t b = from; b < to; b++) kept |= (uint64_t)((int32_t)bits_of(tails[b]) >= least) << (b - word * 64);
            r.words[word * r.step] |= kept;
            *r.count += __builtin_popcountll(kept);
        }
    }
}

/* Keeps the first blocks of a list with exactly the least tail, as long as the share has places left. */
static void keep_ties(const ba_prefill *c, ba_share *share, int64_t batch, int64_t list) {
    for (int64_t row = 0; row < c->p.block_rows && share->places > 0; row++) {
        const ba_range seen = ba_prefill_blocks(c, batch, row);
        const float *tails = tails_of(c, batch, list, row);
        const kept_row r = kept_row_of(c, batch, list, row);
        for (int64_t b = seen.lo; b < seen.hi && share->places > 0; b++) {
            if (tails[b] < 0 || bits_of(tails[b]) != share->least) continue;
            keep(&r, b);
            share->places--;
        }
    }
}

/* Sets how many blocks a share keeps beside the ones that always are. */
static void open_share(const ba_prefill *c, int64_t batch, int64_t first, int64_t lists) {
    int64_t all = 0, kept = 0;
    for (int64_t row = 0; row < c->p.block_rows; row++) {
        const ba_range seen = ba_prefill_blocks(c, batch, row);
        all += (seen.hi - seen.lo) * lists;
        for (int64_t list = first; list < first + lists; list++) kept += *kept_row_of(c, batch, list, row).count;
    }
    ba_share *share = share_of(c, batch, first);
    *share = (ba_share){.places = ba_min((int64_t)(budget_of(c, first) * (double)all + 0.5), all) - kept};
    share->none = share->places <= 0;
}

ba_status ba_budget_share(ba_prefill *c, int threads) {
    const int64_t shares = c->p.batch * shares_of(c), lists = c->lists / shares_of(c), items = c->p.batch * c->lists;
    ba_status status = BA_OK;
    for (int64_t i = 0; i < shares; i++) open_share(c, i / shares_of(c), i % shares_of(c) * lists, lists);
    for (c->digit = 0; status == BA_OK && c->digit < DIGITS; c->digit++) {
        if (c->digit > 0) { /* ba_budget_row has counted the first digits */
            memset(c->bins, 0, (size_t)shares * BA_BUDGET_BINS * sizeof *c->bins);
            status = ba_parallel(threads, items, count_tails, c);
        }
        for (int64_t i = 0; status == BA_OK && i < shares; i++)
            if (!c->shares[i].none) find_digit(c, &c->shares[i]);
    }
    if (status == BA_OK) status = ba_parallel(threads, items, keep_tails, c);
    for (int64_t i = 0; status == BA_OK && i < items; i++) {
        ba_share *share = share_of(c, i / c->lists, i % c->lists);
        if (!share->none && !share->has_all) keep_ties(c, share, i / c->lists, i % c->lists);
    }
    return status;
}
