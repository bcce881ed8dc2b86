/* Scores of blocks. Rows are the lanes of a panel, as in attention, and are multiplied with one chunk of groups after the other. The weights of a
 * chunk are relative to the maximum so far. Each block keeps its sum of weights, and each chunk the maximum at its end; when all chunks are done, the
 * maxima and the sum of all weights turn the sums into shares. */
#include <math.h>
#include <string.h>

#include "core/pool.h"
#include "ops/scratch.h"
#include "ops/select_prefill.h"

#define LOG2_E 0x1.71547652b82fep+0

/* The end of the chunk of groups that begins at `begin`: a chunk is some whole blocks, or a part of one block. */
static int64_t chunk_end(const ba_prefill *c, int64_t begin) {
    const int64_t block = c->groups_per_block;
    if (block <= c->chunk) return begin + c->chunk - c->chunk % block;
    return ba_min(begin + c->chunk, (begin / block + 1) * block);
}

/* The largest number of chunks of a panel. */
static int64_t most_chunks(const ba_prefill *c) {
    const int64_t block = c->groups_per_block;
    if (block > c->chunk) return c->p.block_columns * ba_ceil_div(block, c->chunk);
    return ba_ceil_div(c->p.block_columns * block, c->chunk - c->chunk % block) + 1;
}

int64_t ba_strip_lay_out(const ba_prefill *c, char *base, ba_strip_scratch *s) {
    const int64_t real = c->real_size, lanes = c->lanes, columns = ba_max(1, c->p.block_columns);
    int64_t used = ba_round_up(ba_features_lay_out(c, base, &s->features), BA_ALIGN);
    s->rows = ba_take(base, &used, lanes * c->pitch * real);
    s->pointers = (const void **)ba_take(base, &used, lanes * (int64_t)sizeof(void *));
    s->q = ba_take(base, &used, lanes * ba_round_up(c->depth, c->family->dim_pad) * c->family->q_bytes);
    s->m = ba_take(base, &used, lanes * real);
    s->l = ba_take(base, &used, lanes * real);
    s->alpha = ba_take(base, &used, lanes * real);
    s->row_max = ba_take(base, &used, lanes * real);
    s->lo = (int32_t *)ba_take(base, &used, lanes * (int64_t)sizeof(int32_t));
    s->hi = (int32_t *)ba_take(base, &used, lanes * (int64_t)sizeof(int32_t));
    s->key_index = (int32_t *)ba_take(base, &used, c->chunk * (int64_t)sizeof(int32_t));
    s->k_rows = (const void **)ba_take(base, &used, c->chunk * (int64_t)sizeof(void *));
    s->chunk = ba_take(base, &used, c->chunk * ba_max(c->family->scratch_per_key, lanes * real));
    s->sums = ba_take(base, &used, columns * lanes * real);
    s->factors = ba_take(base, &used, most_chunks(c) * lanes * real);
    s->chunks = (int32_t *)ba_take(base, &used, columns * (int64_t)sizeof(int32_t));
    s->head = (double *)ba_take(base, &used, c->strip_rows * columns * (int64_t)sizeof(double));
    s->scores = (float *)ba_take(base, &used, c->strip_rows * columns * (int64_t)sizeof(float));
    s->keys = (uint32_t *)ba_take(base, &used, columns * (int64_t)sizeof(uint32_t));
    s->other_keys = (uint32_t *)ba_take(base, &used, columns * (int64_t)sizeof(uint32_t));
    s->order = (int32_t *)ba_take(base, &used, columns * (int64_t)sizeof(int32_t));
    s->other_order = (int32_t *)ba_take(base, &used, columns * (int64_t)sizeof(int32_t));
    return used;
}

/* ---- A panel ---------------------------------------------------------------------------------------------------- */

/* Sums the weights [group][lane] of groups [begin, end) over each block. The sum of a block that began in an earlier chunk is multiplied by alpha,
 * which makes it relative to the new maximum, and continued. */
#define DEFINE_ADD_BLOCKS(real, lanes_at_once)                                                                                                       \
    static void add_blocks_##real(real *restrict sums, const real *restrict weights, const real *alpha, int64_t lanes, int64_t begin, int64_t end,   \
                                  int64_t block, int64_t first_block) {                                                                              \
        enum { AT_ONCE = lanes_at_once }; /* divides the number of lanes of every panel */                                                           \
        for (int64_t from = begin; from < end;) {                                                                                                    \
            const int64_t to = ba_min(end, (from / block + 1) * block);                                                                              \
            real *sum = sums + (from / block - first_block) * lanes;                                                                                 \
            for (int64_t lane = 0; lane < lanes; lane += AT_ONCE) {                                                                                  \
                real acc[AT_ONCE] = {0};                                                                                                             \
                if (from % block)                                                                                                                    \
                    for (int i = 0; i < AT_ONCE; i++) acc[i] = sum[lane + i] * alpha[lane + i];                                                      \
                for (int64_t g = from; g < to; g++)                                                                                                  \
                    for (int i = 0; i < AT_ONCE; i++) acc[i] += weights[(g - begin) * lanes + lane + i];                                             \
                for (int i = 0; i < AT_ONCE; i++) sum[lane + i] = acc[i];                                                                            \
            }                                                                                                                                        \
            from = to;                                                                                                                               \
        }                                                                                                                                            \
    }
DEFINE_ADD_BLOCKS(float, 8)
DEFINE_ADD_BLOCKS(double, 4)

ba_panel_rows ba_panel_open(const ba_prefill *c, const ba_strip_scratch *s, int64_t batch, int64_t head, int64_t first, int64_t rows) {
    ba_panel_rows at = {.lo = INT64_MAX, .all_hi = INT64_MAX};
    const int64_t q_valid = ba_q_span(&c->p, batch).valid;
    for (int64_t i = 0; i < rows; i++) {
        const int64_t begin = (first + i) * c->row_tokens, last = ba_min(begin + c->row_tokens, q_valid) - 1;
        const ba_range keys = ba_prefill_keys(c, batch, c->args->chooser == BA_CHOOSER_SAMPLED_ROWS ? last : begin, last);
        const int64_t lo = keys.lo / c->group_tokens, hi = ba_ceil_div(keys.hi, c->group_tokens);
        s->lo[i] = (int32_t)lo;
        s->hi[i] = (int32_t)hi;
        if (hi > 0) at.lo = ba_min(at.lo, lo);
        at.hi = ba_max(at.hi, hi);
        at.all_lo = ba_max(at.all_lo, lo);
        at.all_hi = ba_min(at.all_hi, hi);
        char *row = s->rows + i * c->pitch * c->real_size;
        ba_features_of_row(c, &s->features, batch, head, first + i, row);
        s->pointers[i] = row;
    }
    for (int64_t i = 0; i < c->lanes; i++) {
        if (i >= rows) s->lo[i] = s->hi[i] = 0;
        ba_set_real(s->m, i, c->real_size == 4 ? -0x1.fffffep127 : -0x1.fffffffffffffp1023, c->real_size);
        ba_set_real(s->l, i, 0, c->real_size);
    }
    const double divisor = c->args->chooser == BA_CHOOSER_ANTIDIAGONAL ? (double)c->row_tokens : 1;
    c->family->pack->queries[0](s->q, s->pointers, rows, c->depth, c->p.scale / divisor * LOG2_E);
    return at;
}

void ba_panel_score(const ba_prefill *c, const ba_strip_scratch *s, const ba_panel_rows *at, const char *groups, int64_t begin, int64_t end) {
    for (int64_t g = begin; g < end; g++) {
        s->k_rows[g - begin] = groups + g * c->pitch * c->real_size;
        s->key_index[g - begin] = (int32_t)g;
    }
    const bool whole = begin >= at->all_lo && end <= at->all_hi;
    const ba_panel panel = {.q = s->q, .m = s->m, .l = s->l, .lo = whole ? NULL : s->lo, .hi = whole ? NULL : s->hi};
    const ba_chunk chunk = {.keys = end - begin,
                            .head_dim = c->depth,
                            .v_dim = 1,
                            .k_rows = s->k_rows,
                            .v_rows = s->k_rows,
                            .key_index = s->key_index,
                            .scale = 1,
                            .scratch = s->chunk};
    c->family->panel->scores[0](&panel, &chunk, s->row_max);
    if (at->known)
        for (int64_t i = 0; i < c->lanes; i++)
            ba_set_real(s->row_max, i, c->real_size == 4 ? -0x1.fffffep127 : -0x1.fffffffffffffp1023, c->real_size);
    c->family->panel->softmax[0](&panel, &chunk, s->row_max, s->alpha);
}

/* Replaces every chunk's maximum by the factor that turns the sums of its blocks into shares. */
static void close_panel(const ba_prefill *c, const ba_strip_scratch *s, int64_t chunks) {
    for (int64_t k = 0; k < chunks; k++)
        for (int64_t i = 0; i < c->lanes; i++) {
            const double m = ba_get_real(s->m, i, c->real_size), l = ba_get_real(s->l, i, c->real_size);
            const double then = ba_get_real(s->factors, k * c->lanes + i, c->real_size);
            const double share = !(l > 0) ? 0 : then == m ? 1 / l : exp2(then - m) / l; /* a NaN sum makes NaN shares */
            ba_set_real(s->factors, k * c->lanes + i, l == l ? share : NAN, c->real_size);
        }
}

/* Adds the shares of lanes [begin, end) to the scores of their row of blocks, or, where `largest`, takes the largest. */
#define DEFINE_FOLD(real)                                                                                                                            \
    static void fold_##real(const ba_strip_scratch *s, double *scores, int64_t lanes, int64_t begin, int64_t end, int64_t first_block,               \
                            int64_t end_block, bool largest) {                                                                                       \
        for (int64_t block = first_block; block < end_block; block++) {                                                                              \
            const real *sum = (const real *)s->sums + (block - first_block) * lanes;                                                                 \
            const real *factor = (const real *)s->factors + s->chunks[block - first_block] * lanes;                                                  \
            real joined = 0;                                                                                                                         \
            if (largest)                                                                                                                             \
                for (int64_t i = begin; i < end; i++) {                                                                                              \
                    const real share = sum[i] * factor[i];                                                                                           \
                    joined = share > joined ? share : joined;                                                                                        \
                }                                                                                                                                    \
            else                                                                                                                                     \
                for (int64_t i = begin; i < end; i++) {                                                                                              \
                    const real share = sum[i] * factor[i];                                                                                           \
                    joined += share > 0 ? share : 0;                                                                                                 \
                }                                                                                                                                    \
            scores[block] = largest ? ((double)joined > scores[block] ? (double)joined : scores[block]) : scores[block] + (double)joined;            \
        }                                                                                                                                            \
    }
DEFINE_FOLD(float)
DEFINE_FOLD(double)

/* Adds the scores of rows first .. first + rows - 1 of one query head, which lie in the strip, to s->head. */
static void score_panel(const ba_prefill *c, const ba_strip_scratch *s, const ba_strip *strip, int64_t head, int64_t first, int64_t rows) {
    const ba_panel_rows at = ba_panel_open(c, s, strip->batch, head, first, rows);
    if (at.hi == 0) return;
    const int64_t block = c->groups_per_block, first_block = at.lo / block, end_block = ba_ceil_div(at.hi, block), line = c->lanes * c->real_size;
    const int64_t pair = strip->batch * c->p.kv_heads + head / c->p.group - c->first_pair;
    int32_t chunks = 0;
    for (int64_t begin = first_block * block, end; begin < at.hi; begin = end, chunks++) {
        end = ba_min(chunk_end(c, begin), at.hi);
        ba_panel_score(c, s, &at, c->groups + pair * c->pair_bytes, begin, end);
        if (c->real_size == 4) add_blocks_float((float *)s->sums, (float *)s->chunk, (float *)s->alpha, c->lanes, begin, end, block, first_block);
        else add_blocks_double((double *)s->sums, (double *)s->chunk, (double *)s->alpha, c->lanes, begin, end, block, first_block);
        memcpy(s->factors + chunks * line, s->m, (size_t)line);
        for (int64_t b = begin / block; b < ba_ceil_div(end, block); b++) s->chunks[b - first_block] = chunks;
    }
    close_panel(c, s, chunks);
    for (int64_t lane = 0, end; lane < rows; lane = end) {
        const int64_t row = (first + lane) / c->rows_per_block;
        end = ba_min(rows, (row + 1) * c->rows_per_block - first);
        double *scores = s->head + (row - strip->first) * c->p.block_columns;
        (c->real_size == 4 ? fold_float : fold_double)(s, scores, c->lanes, lane, end, first_block, end_block, c->args->largest != 0);
    }
}

/* ---- A strip ----------------------------------------------------------------------------------------------------- */

/* Adds a query head's scores to those of its list, each row divided by its sum. Where the sum is not positive, all visible blocks score the same. */
static void add_head(const ba_prefill *c, const ba_strip_scratch *s, const ba_strip *strip) {
    for (int64_t r = 0; r < strip->rows; r++) {
        const ba_range seen = ba_prefill_blocks(c, strip->batch, strip->first + r);
        const double *head = s->head + r * c->p.block_columns;
        float *scores = s->scores + r * c->p.block_columns;
        double sum = 0;
        for (int64_t b = seen.lo; b < seen.hi; b++) sum += head[b];
        const double weight = 1 / (sum > 0 ? sum * (double)c->list_heads : (double)(seen.hi - seen.lo) * (double)c->list_heads);
        for (int64_t b = seen.lo; b < seen.hi; b++) scores[b] += (float)((sum > 0 ? head[b] : 1) * weight);
    }
}

bool ba_strip_score(const ba_prefill *c, const ba_strip_scratch *s, const ba_strip *strip) {
    const size_t places = (size_t)(strip->rows * c->p.block_columns);
    const int64_t q_rows = ba_ceil_div(ba_q_span(&c->p, strip->batch).valid, c->row_tokens);
    const int64_t begin = strip->first * c->rows_per_block, end = ba_min(q_rows, (strip->first + strip->rows) * c->rows_per_block);
    memset(s->scores, 0, places * sizeof *s->scores);
    for (int64_t h = 0; h < c->list_heads && begin < end; h++) {
        memset(s->head, 0, places * sizeof *s->head);
        if (c->lines) ba_lines_score(c, s, strip, strip->list * c->list_heads + h);
        for (int64_t first = begin; first < end && !c->lines; first += c->lanes) {
            if (ba_stopped()) return false;
            score_panel(c, s, strip, strip->list * c->list_heads + h, first, ba_min(c->lanes, end - first));
        }
        add_head(c, s, strip);
    }
    return true;
}
