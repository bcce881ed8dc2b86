/* Decides from the scores which blocks are kept. ba_budget_block_row() decides for one block row: it keeps the forced blocks first, and then the
 * further blocks that the budget asks for. Where block rows share a density, it only notes the scores of the other blocks and draws an outline of
 * their tails (select_prefill_call.h). Later, ba_budget_share() compares the tails of all block rows, and keeps the blocks with the largest. */
#include <math.h>
#include <string.h>

#include "core/pool.h"
#include "kernels/work_tuning.h"
#include "ops/check.h"
#include "ops/select/select_prefill_call.h"

/* ---- Block rows ------------------------------------------------------------------------------------------------- */

/* The offset of a block row's first element in kept, counts or scores. */
static int64_t offset_of(const ba_tensor *t, int64_t batch, int64_t list_head, int64_t block_row) {
    return batch * t->strides[0] + list_head * t->strides[1] + block_row * t->strides[2];
}

/* The tails of a block row, [column]. */
static float *tails_of(const ba_prefill *c, int64_t batch, int64_t list_head, int64_t block_row) {
    const int64_t block_rows = ba_ceil_div(ba_q_span(&c->p, batch).valid, c->p.block_q);
    return c->tails + c->tails_begin[batch] + (list_head * block_rows + block_row) * ba_prefill_columns(c, batch);
}

/* The number of a block row among the block rows of all list heads of the call. */
static int64_t number_of(const ba_prefill *c, int64_t batch, int64_t list_head, int64_t block_row) {
    return (batch * c->list_heads + list_head) * c->p.block_rows + block_row;
}

static ba_outline *outline_of(const ba_prefill *c, int64_t batch, int64_t list_head, int64_t block_row) {
    return c->outlines + number_of(c, batch, list_head, block_row);
}

static uint64_t *middle_of(const ba_prefill *c, int64_t batch, int64_t list_head, int64_t block_row) {
    return c->middles + number_of(c, batch, list_head, block_row) * c->words;
}

typedef struct kept_words {
    uint64_t *words;
    int64_t step; /* from one word to the next */
    int32_t *count;
} kept_words;

static kept_words kept_words_of(const ba_prefill *c, int64_t batch, int64_t list_head, int64_t block_row) {
    const ba_tensor *kept = &c->args->kept, *counts = &c->args->counts;
    return (kept_words){(uint64_t *)kept->data + offset_of(kept, batch, list_head, block_row), kept->strides[3],
                        (int32_t *)counts->data + offset_of(counts, batch, list_head, block_row)};
}

static bool is_kept(const kept_words *r, int64_t column) { return r->words[column / 64 * r->step] >> column % 64 & 1; }

static void keep(const kept_words *r, int64_t column) {
    r->words[column / 64 * r->step] |= (uint64_t)1 << column % 64;
    ++*r->count;
}

static void keep_run(const kept_words *r, int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; b++)
        if (!is_kept(r, b)) keep(r, b);
}

/* Keeps the forced blocks of a block row, which are always kept. `seen` runs from the first to the last block that the block row sees. */
static void keep_forced(const ba_prefill *c, const kept_words *r, int64_t batch, int64_t block_row, ba_range seen) {
    const ba_select_prefill_args *a = c->args;
    const int64_t q_valid = ba_q_span(&c->p, batch).valid, kv_valid = ba_kv_span(&c->p, batch).valid;
    const int64_t block_rows = ba_ceil_div(q_valid, c->p.block_q), columns = ba_prefill_columns(c, batch);
    if (c->notes.forced) {
        const uint64_t *forced = c->notes.forced + (batch * c->p.block_rows + block_row) * c->words;
        for (int64_t word = 0; word < c->words; word++) {
            r->words[word * r->step] = forced[word];
            *r->count += __builtin_popcountll(forced[word]);
        }
        return;
    }
    if (block_row < a->first_rows || block_row >= block_rows - ba_min(block_rows, a->last_rows)) {
        keep_run(r, seen.lo, seen.hi);
        return;
    }
    keep_run(r, seen.lo, ba_min(seen.hi, a->sink));
    keep_run(r, ba_max(seen.lo, columns - ba_min(columns, a->last_columns)), seen.hi);
    /* Query i stands beside key i + kv_valid - q_valid, on the diagonal. The block row's diagonal goes from key `first` to key `last`, without its
     * part before key 0. `recent` keeps the blocks that the diagonal crosses, and recent - 1 blocks before them. */
    const int64_t begin = block_row * c->p.block_q, diagonal = kv_valid - q_valid;
    const int64_t first = ba_max(0, begin + diagonal), last = ba_min(begin + c->p.block_q, q_valid) - 1 + diagonal;
    if (a->recent == 0 || last < 0) return;
    const int64_t crossed = first / c->p.block_kv;
    keep_run(r, ba_max(seen.lo, crossed - ba_min(crossed, a->recent - 1)), ba_min(seen.hi, last / c->p.block_kv + 1));
}

/* ---- Order ------------------------------------------------------------------------------------------------------
 *
 * A sort key is one number that stands for a block. In rising order of sort keys, scores fall, and columns rise where scores are equal. The bits of a
 * score that is not negative, read as an integer, rise with the score; the sort key has their complement. */

static uint64_t sort_key_of(float score, int64_t column) {
    uint32_t bits;
    memcpy(&bits, &score, sizeof bits);
    return (uint64_t)~bits << 32 | (uint64_t)column;
}

static int64_t column_of(uint64_t sort_key) { return (int64_t)(sort_key & 0xffffffff); }

enum {
    MOST_BUCKETS = 1 << 11, /* The most buckets, each of which holds a range of scores. Below this limit there are at least two per sort key. */
    BYTE = 256,             /* values of a byte */
};

/* Sorts n sort keys, few of which are far from their final places: each moves past the higher sort keys before it. Returns false where that would
 * take many moves; sort keys with equal scores are then still in order. */
static bool settle(uint64_t *sort_keys, int64_t n) {
    for (int64_t i = 1, moves = 0; i < n; i++) {
        const uint64_t sort_key = sort_keys[i];
        int64_t at = i;
        for (; at > 0 && sort_keys[at - 1] > sort_key; at--) sort_keys[at] = sort_keys[at - 1];
        sort_keys[at] = sort_key;
        moves += i - at;
        if (moves > ba_work.choose.moves * n) return false;
    }
    return true;
}

/* Sorts n sort keys by the four bytes of their scores, the lowest byte first. Sort keys with equal scores must already be in order. After four passes
 * the result is back in the array that it began in. */
static void sort_by_bytes(uint64_t *sort_keys, uint64_t *other, int64_t n) {
    int32_t counts[4][BYTE] = {{0}};
    for (int64_t i = 0; i < n; i++)
        for (int byte = 0; byte < 4; byte++) counts[byte][sort_keys[i] >> (32 + 8 * byte) & 255]++;
    uint64_t *from = sort_keys, *to = other;
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

/* Sorts n sort keys whose columns rise. `other` has room for as many. */
static void sort_by_key(uint64_t *sort_keys, uint64_t *other, int64_t n) {
    if (n > ba_work.choose.bucket_keys) {
        uint64_t lowest = sort_keys[0], highest = sort_keys[0];
        for (int64_t i = 1; i < n; i++) {
            lowest = sort_keys[i] < lowest ? sort_keys[i] : lowest;
            highest = sort_keys[i] > highest ? sort_keys[i] : highest;
        }
        int log_buckets = 5;
        while ((1 << log_buckets) < ba_min(MOST_BUCKETS, 2 * n)) log_buckets++;
        const int shift = (int)ba_max(0, 64 - __builtin_clzll((highest - lowest) | 1) - log_buckets);
        int32_t counts[MOST_BUCKETS], begin = 0;
        memset(counts, 0, sizeof *counts << log_buckets);
        for (int64_t i = 0; i < n; i++) counts[(sort_keys[i] - lowest) >> shift]++;
        for (int64_t i = 0; i < (int64_t)1 << log_buckets; i++) {
            const int32_t count = counts[i];
            counts[i] = begin;
            begin += count;
        }
        for (int64_t i = 0; i < n; i++) other[counts[(sort_keys[i] - lowest) >> shift]++] = sort_keys[i];
        memcpy(sort_keys, other, (size_t)n * sizeof *sort_keys);
    }
    if (!settle(sort_keys, n)) sort_by_bytes(sort_keys, other, n);
}

/* ---- Outline of a block row ----------------------------------------------------------------------------------------
 *
 * Few blocks of a block row have tails near the least kept tail. So the block row is not sorted as a whole. Its blocks are put into buckets by the
 * bits of their scores, from the highest score down. Sums of whole buckets bound the tails of the blocks in each bucket. Where blocks are kept by
 * their mass, the bound of the kept tails is given; where they share a density, the sums tell in which range the least kept tail lies. Blocks of
 * buckets whose tails are all above this bound or range are kept, and blocks of buckets whose tails are all below are not. Only the blocks of the
 * buckets between, the *middle* of the block row, are sorted. */

enum {
    BUCKETS = BA_OUTLINE_BUCKETS,
    /* In units of the bits of scores: the buckets divide the range of the scores, or its upper 16 octaves where it is larger. Scores below these
     * octaves go into the last bucket, too. */
    RANGE = (16 << 23) - 1,
};

static int32_t bits_of(float x) {
    int32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static inline void raise_and_lower(float score, int32_t *high, int32_t *low) {
    const int32_t bits = bits_of(score), free_bits = bits < 0 ? INT32_MAX : bits;
    *high = bits > *high ? bits : *high;
    *low = free_bits < *low ? free_bits : *low;
}

/* The outline of the blocks [lo, hi) with these scores; blocks that do not compete have score -1. `counts` is set to the numbers of blocks in the
 * buckets. */
static void draw_outline(ba_outline *o, const float *scores, int64_t lo, int64_t hi, int32_t *counts) {
    enum { APART = 8 }; /* extremes that are found side by side, so that a compiler can use vectors */
    int32_t high[APART] = {0}, low[APART], out = 0;
    for (int i = 0; i < APART; i++) low[i] = INT32_MAX;
    int64_t b = lo;
    for (; b + APART <= hi; b += APART)
        for (int i = 0; i < APART; i++) raise_and_lower(scores[b + i], &high[i], &low[i]);
    for (; b < hi; b++) raise_and_lower(scores[b], &high[0], &low[0]);
    int32_t highest = 0, lowest = INT32_MAX;
    for (int i = 0; i < APART; i++) {
        highest = high[i] > highest ? high[i] : highest;
        lowest = low[i] < lowest ? low[i] : lowest;
    }
    const int32_t range = lowest < highest ? (int32_t)ba_min(highest - lowest, RANGE) : 0;
    o->highest = highest;
    for (o->shift = 0; range >> o->shift >= BUCKETS;) o->shift++;
    double sums[BUCKETS] = {0}, sum = 0;
    memset(counts, 0, BUCKETS * sizeof *counts);
    for (b = lo; b < hi; b++) { /* without branches, which would be mispredicted */
        const int32_t bits = bits_of(scores[b]), is_out = bits < 0;
        const uint32_t below = ((uint32_t)highest - (uint32_t)bits) >> o->shift, bucket = below < BUCKETS - 1 ? below : BUCKETS - 1;
        sums[bucket] += is_out ? 0 : (double)scores[b];
        counts[bucket]++;
        out += is_out;
    }
    counts[BUCKETS - 1] -= out;
    o->bounds[BUCKETS] = 0;
    for (int i = BUCKETS - 1; i >= 0; i--) o->bounds[i] = sum += sums[i];
}

/* The bits of the least score that bucket `bucket` takes. */
static int32_t least_bits(const ba_outline *o, int bucket) {
    return bucket < BUCKETS - 1 ? (int32_t)ba_max(0, o->highest - ((int64_t)(bucket + 1) << o->shift) + 1) : 0;
}

/* A bit for each of n scores, at most 64: 1 where the bits of the score are at least `least`. */
static uint64_t compare(const float *scores, int64_t n, int32_t least) {
    uint8_t is[64] = {0};
    for (int64_t i = 0; i < n; i++) is[i] = bits_of(scores[i]) >= least;
    uint64_t word = 0;
    for (int i = 0; i < 8; i++) { /* eight bytes of 0 or 1 become eight bits */
        uint64_t eight;
        memcpy(&eight, is + 8 * i, sizeof eight);
        word |= (eight * 0x0102040810204080) >> 56 << 8 * i;
    }
    return word;
}

/* Keeps the blocks of [lo, hi) in the buckets before `first`, and marks those in the buckets first .. last in `middle`, a bit for each block. Returns
 * how many are kept. */
static int64_t split_block_row(const ba_outline *o, const float *scores, int64_t lo, int64_t hi, int first, int last, const kept_words *r,
                               uint64_t *middle) {
    const int32_t keep_from = first > 0 ? least_bits(o, first - 1) : INT32_MAX;
    const int32_t mark_from = last >= 0 ? least_bits(o, last) : INT32_MAX;
    int64_t all = 0;
    for (int64_t word = lo / 64; word * 64 < hi; word++) {
        const int64_t from = ba_max(lo, word * 64), n = ba_min(hi, word * 64 + 64) - from;
        const uint64_t kept = compare(scores + from, n, keep_from) << (from - word * 64);
        middle[word] = compare(scores + from, n, mark_from) << (from - word * 64) & ~kept;
        r->words[word * r->step] |= kept;
        all += __builtin_popcountll(kept);
    }
    *r->count += (int32_t)all;
    return all;
}

/* Sorts the blocks of [lo, hi) that are marked in `middle`, and returns how many there are. */
static int64_t sort_middle(const ba_band_scratch *s, const float *scores, int64_t lo, int64_t hi, const uint64_t *middle) {
    int64_t n = 0;
    for (int64_t word = lo / 64; word * 64 < hi; word++)
        for (uint64_t left = middle[word]; left; left &= left - 1) {
            const int64_t b = word * 64 + __builtin_ctzll(left);
            s->sort_keys[n++] = sort_key_of(scores[b], b);
        }
    if (n > 1) sort_by_key(s->sort_keys, s->other_sort_keys, n);
    return n;
}

/* ---- Budgets of a block row ------------------------------------------------------------------------------------- */

/* The budget of a list head: its own number, or the one that all list heads share. */
static double budget_of(const ba_prefill *c, int64_t list_head) {
    const ba_tensor *t = &c->args->budgets;
    return ((const double *)t->data)[t->dims[0] > 1 ? list_head * t->strides[0] : 0];
}

/* The tails from one power of two to the next fall into 32 classes of equal width. Class 0 also holds all tails below 2^-OCTAVES. */
enum { OCTAVES = 16, CLASS_SHIFT = 18, CLASS_ZERO = (127 - OCTAVES) << (23 - CLASS_SHIFT) };

static int class_of(double tail) { return (int)ba_min(BA_TAIL_CLASSES - 1, ba_max(0, (bits_of((float)tail) >> CLASS_SHIFT) - CLASS_ZERO)); }

/* Counts each block of a block row twice: in the first BA_TAIL_CLASSES bins by the class of the least tail that it may have, and in as many bins
 * behind these by the class of the largest tail that it may have. */
static void count_buckets(int64_t *bins, const ba_outline *o, const int32_t *counts) {
    for (int i = 0, class = class_of(o->bounds[0]); i < BUCKETS; i++) {
        const int below = class_of(o->bounds[i + 1]);
        bins[below] += counts[i];
        bins[BA_TAIL_CLASSES + class] += counts[i];
        class = below;
    }
}

/* Empties a block row, and copies its scores to the caller's array. */
static void begin_block_row(const ba_prefill *c, const kept_words *r, int64_t batch, int64_t list_head, int64_t block_row, const float *scores) {
    const ba_tensor *t = &c->args->scores;
    for (int64_t w = 0; w < c->words; w++) r->words[w * r->step] = 0;
    *r->count = 0;
    if (!ba_given(t)) return;
    float *to = (float *)t->data + offset_of(t, batch, list_head, block_row);
    for (int64_t b = 0; b < c->p.block_columns; b++) to[b * t->strides[3]] = scores[b];
}

static void keep_best(const kept_words *r, const float *scores, ba_range seen) {
    int64_t best = seen.lo;
    for (int64_t b = seen.lo + 1; b < seen.hi; b++) best = scores[b] > scores[best] ? b : best;
    keep(r, best);
}

static void keep_by_threshold(const kept_words *r, const float *scores, ba_range seen, double threshold) {
    for (int64_t b = seen.lo; b < seen.hi; b++)
        if ((double)scores[b] >= threshold && !is_kept(r, b)) keep(r, b);
}

/* Keeps the best of the visible blocks until `number` are kept, the forced ones included. */
static void keep_by_number(const kept_words *r, const ba_band_scratch *s, const float *scores, ba_range seen, const uint64_t *visible,
                           double number) {
    int64_t n = 0;
    for (int64_t b = seen.lo; b < seen.hi; b++)
        if (!is_kept(r, b) && ba_is_visible(visible, b)) s->sort_keys[n++] = sort_key_of(scores[b], b);
    if (n) sort_by_key(s->sort_keys, s->other_sort_keys, n);
    const int64_t kept = ba_min(n, ba_max(0, (int64_t)fmin(number, INT32_MAX) - *r->count));
    for (int64_t i = 0; i < kept; i++) keep(r, column_of(s->sort_keys[i]));
}

/* Copies the scores of the blocks that compete for what the forced blocks leave; the other blocks get the score -1. */
static void find_free_scores(const kept_words *r, const float *scores, ba_range seen, const uint64_t *visible, float *free_scores) {
    memcpy(free_scores + seen.lo, scores + seen.lo, (size_t)(seen.hi - seen.lo) * sizeof *scores);
    for (int64_t word = seen.lo / 64; word * 64 < seen.hi; word++)
        for (uint64_t left = r->words[word * r->step] | (visible ? ba_bits_within(word, seen) & ~visible[word] : 0); left; left &= left - 1)
            free_scores[word * 64 + __builtin_ctzll(left)] = -1;
}

/* Keeps the blocks of the highest scores, and so many of them that the scores of the others sum up to at most `least`. */
static void keep_by_mass(const kept_words *r, const ba_band_scratch *s, const ba_outline *o, const float *free_scores, ba_range seen, double least) {
    int first = 0, last = BUCKETS - 1; /* the buckets whose tails may be on either side of `least` */
    while (first < BUCKETS && o->bounds[first + 1] > least) first++;
    while (last >= first && o->bounds[last] <= least) last--;
    split_block_row(o, free_scores, seen.lo, seen.hi, first, last, r, s->middle);
    double tail = o->bounds[last + 1];
    for (int64_t i = sort_middle(s, free_scores, seen.lo, seen.hi, s->middle) - 1; i >= 0; i--) {
        const int64_t b = column_of(s->sort_keys[i]); /* from the lowest score on, so that a small score is not lost in the rounding of a large sum */
        tail += (double)free_scores[b];
        if (tail > least) keep(r, b);
    }
}

void ba_budget_block_row(const ba_prefill *c, const ba_band_scratch *s, int64_t batch, int64_t list_head, int64_t block_row, const float *scores) {
    const ba_budget budget = c->args->budget;
    const kept_words r = kept_words_of(c, batch, list_head, block_row);
    const ba_range seen = ba_prefill_blocks(c, batch, block_row);
    const uint64_t *visible = ba_visible_blocks(c, batch, block_row);
    begin_block_row(c, &r, batch, list_head, block_row, scores);
    if (seen.lo == seen.hi) return;
    keep_forced(c, &r, batch, block_row, seen);
    if (*r.count == 0) keep_best(&r, scores, seen); /* so that no block row is empty */
    if (budget == BA_BUDGET_THRESHOLD) {
        keep_by_threshold(&r, scores, seen, budget_of(c, list_head));
        return;
    }
    if (budget == BA_BUDGET_TOP_K) {
        keep_by_number(&r, s, scores, seen, visible, budget_of(c, list_head));
        return;
    }
    /* The other budgets look at tails. A density is shared later, when the outlines of all block rows are known. */
    const bool shares = budget == BA_BUDGET_DENSITY;
    float *free_scores = shares ? tails_of(c, batch, list_head, block_row) : s->free_scores;
    ba_outline own, *o = shares ? outline_of(c, batch, list_head, block_row) : &own;
    int32_t counts[BUCKETS];
    find_free_scores(&r, scores, seen, visible, free_scores);
    draw_outline(o, free_scores, seen.lo, seen.hi, counts);
    if (shares) count_buckets(s->bins, o, counts);
    else keep_by_mass(&r, s, o, free_scores, seen, 1 - budget_of(c, list_head));
}

/* ---- Density ----------------------------------------------------------------------------------------------------
 *
 * A share is the list heads of a sequence that share one density: all of them, or each by itself. A share keeps a certain number of blocks, those
 * with the largest tails. The outlines of all block rows bound the least tail that is kept: it is in the range of classes [least_class, most_class].
 * Each block row is then split by this range, and the tails of the blocks in the middle are computed. The least tail that is kept is found without
 * sorting these tails. A tail is not negative, so that its bits, read as an integer, rise with it. Such an integer has three digits of 11, 11 and 10
 * bits. Counting the tails by their first digit tells with which digit the least tail that is kept begins, and how many blocks are still to be found
 * among the tails that begin with this digit. Counting these by their second digit, and those that are left by their third, tells the rest. */

enum { DIGITS = 3 };
static const struct {
    int shift, bits;
} digits[DIGITS] = {{21, 11}, {10, 11}, {0, 10}};

/* The number of shares of a sequence. */
static int64_t shares_of(const ba_prefill *c) { return c->args->budgets.dims[0]; }

static ba_share *share_of(const ba_prefill *c, int64_t batch, int64_t list_head) {
    return c->shares + batch * shares_of(c) + (shares_of(c) > 1 ? list_head : 0);
}

static int64_t *bins_of(const ba_prefill *c, const ba_share *share) { return c->bins + (share - c->shares) * BA_BUDGET_BINS; }

/* Adds the counts that one item has made to those of a share. */
static void add_to_bins(int64_t *all, const int64_t *bins, int64_t n) {
    for (int64_t i = 0; i < n; i++)
        if (bins[i]) __atomic_fetch_add(&all[i], bins[i], __ATOMIC_RELAXED);
}

void ba_budget_count(const ba_prefill *c, const ba_band_scratch *s, int64_t batch, int64_t list_head) {
    add_to_bins(bins_of(c, share_of(c, batch, list_head)), s->bins, 2 * BA_TAIL_CLASSES);
}

/* The largest class that has, together with the classes above it, at least `tails` tails. */
static int largest_class(const int64_t *counts, int64_t tails) {
    int n = BA_TAIL_CLASSES - 1;
    for (int64_t above = counts[n]; n > 0 && above < tails; above += counts[n]) n--;
    return n;
}

/* Splits the block rows of a list head, and sets the tails of the blocks in the middle. */
static void split_list_head(void *context, int64_t item, int worker) {
    const ba_prefill *c = context;
    const int64_t batch = item / c->list_heads, list_head = item % c->list_heads;
    ba_share *share = share_of(c, batch, list_head);
    if (share->none) return;
    ba_band_scratch s;
    ba_band_lay_out(c, c->scratch + worker * c->scratch_bytes, &s);
    int64_t all = 0;
    for (int64_t block_row = 0; block_row < c->p.block_rows; block_row++) {
        const ba_range seen = ba_prefill_blocks(c, batch, block_row);
        if (seen.lo == seen.hi) continue;
        ba_outline *o = outline_of(c, batch, list_head, block_row);
        const kept_words r = kept_words_of(c, batch, list_head, block_row);
        float *tails = tails_of(c, batch, list_head, block_row);
        uint64_t *middle = middle_of(c, batch, list_head, block_row);
        int first = 0, last = BUCKETS - 1;
        while (first < BUCKETS && class_of(o->bounds[first + 1]) > share->most_class) first++;
        while (last >= first && class_of(o->bounds[last]) < share->least_class) last--;
        all += split_block_row(o, tails, seen.lo, seen.hi, first, last, &r, middle);
        double tail = o->bounds[last + 1];
        const float most = (float)o->bounds[first]; /* rounding must not raise a tail above this, or the tail might be in another class */
        for (int64_t i = sort_middle(&s, tails, seen.lo, seen.hi, middle) - 1; i >= 0; i--) {
            const int64_t b = column_of(s.sort_keys[i]);
            tail += (double)tails[b];
            tails[b] = fminf((float)tail, most);
            const int class = class_of((double)tails[b]);
            if (class >= share->least_class && class <= share->most_class) continue;
            middle[b / 64] &= ~((uint64_t)1 << b % 64);
            if (class > share->most_class) keep(&r, b), all++;
        }
        int64_t n = 0; /* the tails move together, in the order of columns, so that later passes over them read little memory */
        for (int64_t word = seen.lo / 64; word * 64 < seen.hi; word++)
            for (uint64_t left = middle[word]; left; left &= left - 1) tails[seen.lo + n++] = tails[word * 64 + __builtin_ctzll(left)];
        o->in_middle = (int32_t)n;
    }
    __atomic_fetch_sub(&share->to_keep, all, __ATOMIC_RELAXED);
}

/* Counts the tails of a list head that begin with the known digits, by their next digit, in the bins of its share. The others are counted in spare
 * bins, because a branch would be mispredicted; there are several spare bins, because additions to one bin wait for each other. */
static void count_tails(void *context, int64_t item, int worker) {
    const ba_prefill *c = context;
    const int64_t batch = item / c->list_heads, list_head = item % c->list_heads;
    const ba_share *share = share_of(c, batch, list_head);
    if (share->none) return;
    ba_band_scratch s;
    ba_band_lay_out(c, c->scratch + worker * c->scratch_bytes, &s);
    int64_t *bins = s.bins;
    memset(bins, 0, (BA_BUDGET_BINS + BA_SPARE_BINS) * sizeof *bins);
    const int shift = digits[c->digit].shift;
    const uint32_t least = share->least, end = (uint32_t)1 << digits[c->digit].bits;
    for (int64_t block_row = 0; block_row < c->p.block_rows; block_row++) {
        const ba_range seen = ba_prefill_blocks(c, batch, block_row);
        if (seen.lo == seen.hi) continue;
        const float *tails = tails_of(c, batch, list_head, block_row) + seen.lo;
        const int32_t n = outline_of(c, batch, list_head, block_row)->in_middle;
        for (int32_t i = 0; i < n; i++) {
            const uint32_t bin = ((uint32_t)bits_of(tails[i]) - least) >> shift; /* `end` or more where the tail begins with other digits */
            bins[bin < end ? bin : (uint32_t)BA_BUDGET_BINS + (i & (BA_SPARE_BINS - 1))]++;
        }
    }
    add_to_bins(bins_of(c, share), bins, BA_BUDGET_BINS);
}

/* Finds one more digit of the least tail. Goes down from the last bin: all tails of a bin are kept, and their number is taken off the number that is
 * still to be kept, until a bin holds at least as many tails as are still to be kept. The index of this bin is the digit. */
static void find_digit(const ba_prefill *c, ba_share *share) {
    const int64_t *bins = bins_of(c, share);
    uint32_t bin = ((uint32_t)1 << digits[c->digit].bits) - 1;
    /* bin 0 has too few tails only where the caller's `counts` shares memory with another array */
    for (; bin > 0 && bins[bin] < share->to_keep; bin--) share->to_keep -= bins[bin];
    share->least |= bin << digits[c->digit].shift;
    share->has_all = bins[bin] == share->to_keep;
}

/* Keeps the blocks in the middle of a list head's block rows whose tails are above the least tail and, where the share has_all, those whose tails
 * equal it. */
static void keep_tails(void *context, int64_t item, int worker) {
    const ba_prefill *c = context;
    const int64_t batch = item / c->list_heads, list_head = item % c->list_heads;
    const ba_share *share = share_of(c, batch, list_head);
    const int32_t least = (int32_t)(share->least + !share->has_all);
    (void)worker;
    if (share->none) return;
    for (int64_t block_row = 0; block_row < c->p.block_rows; block_row++) {
        const ba_range seen = ba_prefill_blocks(c, batch, block_row);
        const float *tails = tails_of(c, batch, list_head, block_row) + seen.lo;
        const uint64_t *middle = middle_of(c, batch, list_head, block_row);
        const kept_words r = kept_words_of(c, batch, list_head, block_row);
        for (int64_t word = seen.lo / 64; word * 64 < seen.hi; word++) { /* without branches, which would be mispredicted */
            uint64_t kept = 0;
            for (uint64_t left = middle[word]; left; left &= left - 1) kept |= bits_of(*tails++) >= least ? left & -left : 0;
            r.words[word * r.step] |= kept;
            *r.count += __builtin_popcountll(kept);
        }
    }
}

/* Keeps the first blocks of a list head with exactly the least tail, as many as the share still has to keep. */
static void keep_ties(const ba_prefill *c, ba_share *share, int64_t batch, int64_t list_head) {
    for (int64_t block_row = 0; block_row < c->p.block_rows && share->to_keep > 0; block_row++) {
        const ba_range seen = ba_prefill_blocks(c, batch, block_row);
        const float *tails = tails_of(c, batch, list_head, block_row) + seen.lo;
        const uint64_t *middle = middle_of(c, batch, list_head, block_row);
        const kept_words r = kept_words_of(c, batch, list_head, block_row);
        for (int64_t word = seen.lo / 64; word * 64 < seen.hi; word++)
            for (uint64_t left = middle[word]; left && share->to_keep > 0; left &= left - 1) {
                if ((uint32_t)bits_of(*tails++) != share->least) continue;
                keep(&r, word * 64 + __builtin_ctzll(left));
                share->to_keep--;
            }
    }
}

/* Sets the number of blocks that a share keeps in addition to those that ba_budget_block_row() has kept, and the classes that its least tail may
 * have. */
static void open_share(const ba_prefill *c, int64_t batch, int64_t first, int64_t list_heads) {
    int64_t all = 0, kept = 0;
    for (int64_t block_row = 0; block_row < c->p.block_rows; block_row++) {
        const ba_range seen = ba_prefill_blocks(c, batch, block_row);
        all += ba_count_visible(c, ba_visible_blocks(c, batch, block_row), seen) * list_heads;
        for (int64_t list_head = first; list_head < first + list_heads; list_head++) kept += *kept_words_of(c, batch, list_head, block_row).count;
    }
    ba_share *share = share_of(c, batch, first);
    *share = (ba_share){.to_keep = ba_min((int64_t)(budget_of(c, first) * (double)all + 0.5), all) - kept};
    share->none = share->to_keep <= 0;
    const int64_t *bins = bins_of(c, share);
    share->least_class = largest_class(bins, share->to_keep);
    share->most_class = largest_class(bins + BA_TAIL_CLASSES, share->to_keep);
}

ba_status ba_budget_share(ba_prefill *c, int threads) {
    const int64_t shares = c->p.batch * shares_of(c), list_heads = c->list_heads / shares_of(c), items = c->p.batch * c->list_heads;
    ba_status status = BA_OK;
    for (int64_t i = 0; i < shares; i++) open_share(c, i / shares_of(c), i % shares_of(c) * list_heads, list_heads);
    status = ba_parallel(threads, items, split_list_head, c);
    for (c->digit = 0; status == BA_OK && c->digit < DIGITS; c->digit++) {
        memset(c->bins, 0, (size_t)shares * BA_BUDGET_BINS * sizeof *c->bins);
        status = ba_parallel(threads, items, count_tails, c);
        for (int64_t i = 0; status == BA_OK && i < shares; i++)
            if (!c->shares[i].none) find_digit(c, &c->shares[i]);
    }
    if (status == BA_OK) status = ba_parallel(threads, items, keep_tails, c);
    for (int64_t i = 0; status == BA_OK && i < items; i++) {
        ba_share *share = share_of(c, i / c->list_heads, i % c->list_heads);
        if (!share->none && !share->has_all) keep_ties(c, share, i / c->list_heads, i % c->list_heads);
    }
    return status;
}
