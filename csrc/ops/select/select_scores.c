/* Scores of blocks. Pooled queries are the lanes of a panel, as queries are in attention, and are multiplied by one chunk of pooled keys after the
 * other. The weights of a chunk are relative to a reference, such as the maximum so far. Each block has its sum of weights. Each chunk has the factor
 * by which earlier weights become smaller where the chunk raises the reference. When all chunks are done, these factors and the sum of all weights
 * turn the blocks' sums into shares. */
#include <math.h>
#include <string.h>

#include "core/pool.h"
#include "ops/reals.h"
#include "ops/select/select_prefill_call.h"

/* The end of the chunk of pooled keys that begins at `begin`. A chunk is some whole blocks, or a part of one block. Where pooled keys are packed in
 * groups, a chunk is some whole groups instead. */
static int64_t chunk_end(const ba_prefill *c, int64_t begin) {
    const int64_t per_block = c->k_per_block;
    if (c->align > 1) return (begin / c->chunk + 1) * c->chunk;
    const int64_t in_blocks = c->chunk - c->chunk % per_block;
    if (per_block <= c->chunk) return (begin / in_blocks + 1) * in_blocks; /* the same borders for every panel */
    return ba_min(begin + c->chunk, (begin / per_block + 1) * per_block);
}

/* A panel while its band is scored. */
typedef struct scored_panel {
    ba_band_scratch s;
    ba_panel_sight at;
    int64_t first, queries; /* pooled queries of the head */
    int64_t begin;          /* the first pooled key that is scored */
    int64_t first_block, end_block;
    int32_t chunks;
} scored_panel;

/* Two shares of a block become one: their sum or, if `largest`, the larger one. */
static double join(bool largest, double a, double b) { return !largest ? a + b : b > a ? b : a; }

/* Joins the shares that a panel's block rows have of some blocks to the scores of these blocks. Each block row has `size` shares of block b, side by
 * side in shares[b * pitch ..], as reals. First, these shares are joined in the place of the first of them. (The sum of two floats has the same bits
 * if it is rounded to a double before it is rounded to a float.) */
static void join_rows(const ba_prefill *c, int64_t rows, int64_t size, void *shares, int64_t pitch, int64_t blocks, double *scores) {
    const bool largest = c->args->largest != 0;
    const int64_t real_size = c->real_size;
    for (int64_t b = 0; b < blocks && size > 1; b++)
        for (int64_t row = 0; row < rows; row++)
            for (int64_t first = b * pitch + row * size, i = first + 1; i < first + size; i++)
                ba_set_real(shares, first, join(largest, ba_get_real(shares, first, real_size), ba_get_real(shares, i, real_size)), real_size);
    for (int64_t row = 0; row < rows; row++, scores += ba_head_pitch(c))
        for (int64_t b = 0; b < blocks; b++) scores[b] = join(largest, scores[b], ba_get_real(shares, b * pitch + row * size, real_size));
}

/* Turns the sums of a panel into shares, and joins the shares of each block row's lanes to the scores of the band. The function goes backwards,
 * because the factor of a chunk's sums is the product of the alphas of all chunks behind it, divided by the sum of all weights. */
static void close_panel(const ba_prefill *c, const scored_panel *p, const ba_band *band, double *scores) {
    const int64_t lanes = c->lanes, line = lanes * c->real_size, together = ba_min(c->q_per_block, lanes); /* together: lanes of a block row */
    const int64_t joined = together & -together, rows = ba_ceil_div(p->queries, together);
    const int32_t *last = p->s.chunks - p->first_block;
    double factor[BA_MAX_LANES]; /* reals */
    for (int64_t i = 0; i < lanes; i++) {
        const double l = ba_get_real(p->s.l, i, c->real_size);
        ba_set_real(factor, i, i >= p->queries || l == 0 ? 0 : c->real_size == 4 ? (double)(1 / (float)l) : 1 / l, c->real_size);
    }
    scores += (p->first / c->q_per_block - band->first) * ba_head_pitch(c);
    int32_t chunk = p->chunks - 1;
    for (int64_t end = p->end_block, begin; end > p->first_block; end = begin) { /* blocks that end in the same chunk */
        for (begin = end - 1; begin > p->first_block && last[begin - 1] == last[end - 1];) begin--;
        for (; chunk > last[begin]; chunk--)
            for (int64_t i = 0; i < lanes; i++) {
                const double alpha = ba_get_real(p->s.alphas, chunk * lanes + i, c->real_size);
                ba_set_real(factor, i, ba_get_real(factor, i, c->real_size) * alpha, c->real_size);
            }
        char *sums = p->s.sums + (begin - p->first_block) * line;
        c->kernels->vector[c->real]->panel->join_lanes(sums, factor, end - begin, lanes, joined, c->args->largest != 0);
        join_rows(c, rows, together / joined, sums, lanes / joined, end - begin, scores + begin);
    }
}

/* Scores those pooled keys of a range that the panel sees, and adds up their weights by blocks. */
static void score_chunk(const ba_prefill *c, scored_panel *p, const ba_pooled_range *range) {
    const int64_t per_block = c->k_per_block, line = c->lanes * c->real_size;
    ba_pooled_range own = *range;
    own.begin = ba_max(own.begin, p->begin);
    own.end = ba_min(own.end, p->at.hi);
    if (own.begin >= own.end) return;
    ba_panel_score(c, &p->s, &p->at, &own,
                   &(ba_block_sums){.sums = p->s.sums + (own.begin / per_block - p->first_block) * line,
                                    .block = per_block,
                                    .begun = own.begin % per_block,
                                    .alpha = p->s.alphas + p->chunks * line});
    for (int64_t b = own.begin / per_block; b < ba_ceil_div(own.end, per_block); b++) p->s.chunks[b - p->first_block] = p->chunks;
    p->chunks++;
}

/* Adds the scores of pooled queries first .. first + queries - 1 of one query head, which lie in the band, to s->head. The panels score one chunk of
 * pooled keys after the other, so that a chunk is read from memory once. */
static void score_panels(const ba_prefill *c, const ba_band_scratch *s, const ba_band *band, int64_t head, int64_t first, int64_t queries) {
    const int64_t per_block = c->k_per_block, batch_head = band->batch * c->p.kv_heads + head / c->p.group - c->first_batch_head;
    const char *pooled_keys = c->pooled_keys + batch_head * c->batch_head_bytes;
    scored_panel panels[BA_BAND_PANELS];
    int64_t n = 0, lo = INT64_MAX, hi = 0;
    for (int64_t at = 0; at < queries; at += c->panel_queries, n++) {
        scored_panel *p = &panels[n];
        *p = (scored_panel){.s = ba_band_of_panel(c, s, n), .first = first + at, .queries = ba_min(c->panel_queries, queries - at)};
        p->at = ba_panel_open(c, &p->s, band->batch, head, p->first, p->queries);
        if (p->at.hi == 0) continue;
        p->begin = p->at.lo - p->at.lo % (c->align > 1 ? c->align : per_block);
        p->first_block = p->begin / per_block;
        p->end_block = ba_ceil_div(p->at.hi, per_block);
        if (p->begin % per_block) memset(p->s.sums, 0, (size_t)(c->lanes * c->real_size)); /* the kernel adds to a block that has begun */
        lo = ba_min(lo, p->begin);
        hi = ba_max(hi, p->at.hi);
    }
    for (int64_t begin = lo, end; begin < hi; begin = end) {
        end = ba_min(chunk_end(c, begin), hi);
        const int64_t next_end = end < hi ? ba_min(chunk_end(c, end), hi) : end;
        ba_point_to_pooled_keys(c, s, pooled_keys, begin, next_end);
        for (int64_t i = 0; i < n; i++) { /* each panel prefetches a share of the next chunk */
            const int64_t next = end + (next_end - end) * i / n;
            score_chunk(c, &panels[i], &(ba_pooled_range){begin, begin, end, next, end + (next_end - end) * (i + 1) / n});
        }
    }
    for (int64_t i = 0; i < n; i++) close_panel(c, &panels[i], band, s->head);
}

/* ---- A band ----------------------------------------------------------------------------------------------------- */

/* Fills s->head with the scores that are given for one of the heads of given_scores. */
static void take_given(const ba_prefill *c, const ba_band_scratch *s, const ba_band *band, int64_t head) {
    const ba_tensor *t = &c->args->given_scores;
    for (int64_t r = 0; r < band->block_rows; r++) {
        const float *from = (const float *)t->data + band->batch * t->strides[0] + head * t->strides[1] + (band->first + r) * t->strides[2];
        for (int64_t b = 0; b < c->p.block_columns; b++) {
            const float score = from[b * t->strides[3]];
            s->head[r * ba_head_pitch(c) + b] = score > 0 ? (double)score : 0; /* NaN and -inf count as 0 */
        }
    }
}

/* Adds the scores of a head to the scores of its list head, which `shared_heads` heads share. The scores of each block row are first divided by their
 * sum. Where the sum is not positive, all visible blocks score the same. Given scores whose sum is 1 already are not divided by it. */
static void add_head(const ba_prefill *c, const ba_band_scratch *s, const ba_band *band, int64_t shared_heads) {
    for (int64_t r = 0; r < band->block_rows; r++) {
        const ba_range seen = ba_prefill_blocks(c, band->batch, band->first + r);
        const uint64_t *visible = ba_visible_blocks(c, band->batch, band->first + r);
        const int64_t blocks = ba_count_visible(c, visible, seen);
        double *head = s->head + r * ba_head_pitch(c);
        float *scores = s->scores + r * c->p.block_columns;
        double sum = 0;
        for (int64_t b = seen.lo; b < seen.hi && visible; b++) head[b] = ba_is_visible(visible, b) ? head[b] : 0;
        for (int64_t b = seen.lo; b < seen.hi; b++) sum += head[b];
        if (c->args->chooser == BA_CHOOSER_GIVEN && fabs(sum - 1) <= 1e-4) sum = 1; /* the sum differs from 1 by rounding to float32 alone */
        const double weight = 1 / (sum > 0 ? sum * (double)shared_heads : (double)blocks * (double)shared_heads);
        for (int64_t b = seen.lo; b < seen.hi; b++) scores[b] += (float)((sum > 0 ? head[b] : ba_is_visible(visible, b)) * weight);
    }
}

bool ba_band_score(const ba_prefill *c, const ba_band_scratch *s, const ba_band *band) {
    const size_t numbers = (size_t)(band->block_rows * c->p.block_columns);
    const int64_t pooled_queries = ba_ceil_div(ba_q_span(&c->p, band->batch).valid, c->q_tokens);
    const int64_t begin = band->first * c->q_per_block, end = ba_min(pooled_queries, (band->first + band->block_rows) * c->q_per_block);
    memset(s->scores, 0, numbers * sizeof *s->scores);
    const bool given = c->args->chooser == BA_CHOOSER_GIVEN;
    const int64_t shared_heads = given ? c->args->given_scores.dims[1] / c->list_heads : c->shared_heads;
    for (int64_t h = 0; h < shared_heads && begin < end; h++) {
        memset(s->head, 0, (size_t)(band->block_rows * ba_head_pitch(c)) * sizeof *s->head);
        if (c->lines) ba_lines_score(c, s, band, band->list_head * c->shared_heads + h);
        if (given) take_given(c, s, band, band->list_head * shared_heads + h);
        for (int64_t first = begin; first < end && !c->lines && !given; first += c->panels * c->panel_queries) {
            if (ba_stopped()) return false;
            score_panels(c, s, band, band->list_head * c->shared_heads + h, first, ba_min(c->panels * c->panel_queries, end - first));
        }
        add_head(c, s, band, shared_heads);
    }
    return true;
}
