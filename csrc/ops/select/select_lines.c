/* Vertical and slash lines. The attention of the last queries of a sequence is summed up for each block of keys (vertical) and for each distance
 * between a query and a key (slash); the scores of blocks are computed from these sums. For a block, the masses of the distances of all its pairs of
 * a query and a key are added up by four reads from an array of sums of sums. */
#include <math.h>
#include <string.h>

#include "core/pool.h"
#include "ops/reals.h"
#include "ops/select/select_prefill_call.h"

/* The sums of one query head. Distance d, from a query back to a key, has index d + behind. */
typedef struct lines {
    double *columns;    /* [block of keys]: the mass of the block's keys */
    double *slash;      /* [distance]: first the mass of each distance, then the sum of all masses up to this distance */
    double *slash_sums; /* [distance]: the sum of all elements of slash up to this distance */
    int64_t behind, distances;
    int64_t shift; /* query i stands at token i + shift */
} lines;

int64_t ba_lines_doubles(const ba_prefill *c) { return c->p.block_columns + 2 * (c->p.kv_len + ba_min(c->args->pool_q, c->p.q_len)); }

static lines lines_of(const ba_prefill *c, int64_t batch, int64_t here) {
    const int64_t q_valid = ba_q_span(&c->p, batch).valid, queries = ba_min(c->args->pool_q, q_valid), keys = ba_kv_span(&c->p, batch).valid;
    double *begin = c->lines + here * ba_lines_doubles(c);
    lines l = {.columns = begin, .slash = begin + c->p.block_columns, .distances = keys + queries - 1, .shift = ba_diagonal(&c->p, batch, 0)};
    l.slash_sums = l.slash + l.distances;
    l.behind = keys - 1 - (q_valid - queries + l.shift); /* how many tokens after the first of these queries the last key stands */
    return l;
}

/* Adds `weight` times the weights [key][lane] of keys [begin, end). Lane i is the query at token first_token + i. */
static void add_weights(const ba_prefill *c, const ba_band_scratch *s, const lines *l, int64_t lanes, int64_t first_token, int64_t begin, int64_t end,
                        double weight) {
    for (int64_t key = begin; key < end; key++) {
        double mass = 0;
        for (int64_t i = 0; i < lanes; i++) {
            const double p = ba_get_real(s->chunk, (key - begin) * c->lanes + i, c->real_size) * weight;
            if (!(p > 0)) continue;
            mass += p;
            l->slash[first_token + i - key + l->behind] += p;
        }
        l->columns[key / c->p.block_kv] += mass;
    }
}

/* Weights need a query's log-sum-exp, so the last queries are scored against all keys in two passes: the first finds the log-sum-exps and leaves them
 * in s->m, and the second adds up the weights. */
bool ba_lines_find(const ba_prefill *c, const ba_band_scratch *s, int64_t batch, int64_t head, int64_t here) {
    const int64_t q_valid = ba_q_span(&c->p, batch).valid, keys = ba_kv_span(&c->p, batch).valid, queries = ba_min(c->args->pool_q, q_valid);
    const char *pooled_keys = c->pooled_keys + here / c->p.group * c->batch_head_bytes;
    if (queries == 0 || keys == 0) return true;
    const lines l = lines_of(c, batch, here);
    memset(l.columns, 0, (size_t)c->p.block_columns * sizeof *l.columns);
    memset(l.slash, 0, (size_t)l.distances * sizeof *l.slash);
    for (int64_t first = q_valid - queries; first < q_valid; first += c->lanes) {
        const int64_t lanes = ba_min(c->lanes, q_valid - first);
        const ba_panel_sight at = ba_panel_open(c, s, batch, head, first, lanes);
        for (int pass = 0; pass < 2 && at.hi > 0; pass++) {
            for (int64_t begin = at.lo - at.lo % c->align, end; begin < at.hi; begin = end) {
                if (ba_stopped()) return false;
                end = ba_min(begin + c->chunk, at.hi);
                ba_point_to_pooled_keys(c, s, pooled_keys, begin, end);
                ba_panel_score(c, s, &at, &(ba_pooled_range){begin, begin, end, end, end},
                               &(ba_block_sums){.sums = s->chunk, .block = 1, .alpha = s->alphas, .keeps_m = pass == 1});
                if (pass == 1) add_weights(c, s, &l, lanes, first + l.shift, begin, end, 1 / (double)queries);
            }
            if (pass == 0)
                for (int64_t i = 0; i < c->lanes; i++) {
                    const double sum = ba_get_real(s->l, i, c->real_size), m = ba_get_real(s->m, i, c->real_size);
                    ba_set_real(s->m, i, sum > 0 ? m + log2(sum) : INFINITY, c->real_size);
                }
        }
    }
    double sum = 0, sums = 0;
    for (int64_t d = 0; d < l.distances; d++) {
        sum += l.slash[d];
        sums += sum;
        l.slash[d] = sum;
        l.slash_sums[d] = sums;
    }
    return true;
}

/* The sum, over all distances x up to d, of the mass of all distances up to x. */
static double sums_to(const lines *l, int64_t d) {
    const int64_t at = d + l->behind, last = l->distances - 1;
    return at < 0 ? 0 : at <= last ? l->slash_sums[at] : l->slash_sums[last] + (double)(at - last) * l->slash[last];
}

/* A block's score is the mass of its keys and, as the mean over its queries, the mass of the distances from a query to the block's keys.
 *
 * Query i stands at token i + l.shift, and key j lies at the distance i + l.shift - j from it. Let M(d) be the mass of all distances up to d. For
 * one query at token t, the distances to keys from .. to - 1 have the mass M(t - from) - M(t - to). Let S(d) = sums_to(d) be the sum of M(x) over
 * all x up to d. For all queries first .. end - 1 together, with shift = l.shift - 1, the mass is
 *
 *     S(end + shift - from) - S(first + shift - from) - S(end + shift - to) + S(first + shift - to). */
void ba_lines_score(const ba_prefill *c, const ba_band_scratch *s, const ba_band *band, int64_t head) {
    const int64_t q_valid = ba_q_span(&c->p, band->batch).valid, keys = ba_kv_span(&c->p, band->batch).valid;
    const lines l = lines_of(c, band->batch, band->batch * c->p.heads + head - c->first_batch_head * c->p.group);
    for (int64_t r = 0; r < band->block_rows; r++) {
        const int64_t first = (band->first + r) * c->p.block_q, end = ba_min(first + c->p.block_q, q_valid), shift = l.shift - 1;
        const ba_range seen = ba_prefill_blocks(c, band->batch, band->first + r);
        for (int64_t b = seen.lo; b < seen.hi; b++) {
            const int64_t from = b * c->p.block_kv, to = ba_min(from + c->p.block_kv, keys);
            const double slash =
                sums_to(&l, end + shift - from) - sums_to(&l, first + shift - from) - sums_to(&l, end + shift - to) + sums_to(&l, first + shift - to);
            s->head[r * ba_head_pitch(c) + b] = l.columns[b] + (slash > 0 ? slash : 0) / (double)(end - first);
        }
    }
}
