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
    const int64_t whole = c->chunk - c->chunk % block;
    if (block <= c->chunk) return (begin / whole + 1) * whole; /* the same borders for every panel */
    return ba_min(begin + c->chunk, (begin / block + 1) * block);
}

/* The largest number of chunks of a panel. A block may be much longer than the sequence. */
static int64_t most_chunks(const ba_prefill *c) {
    const int64_t block = c->groups_per_block;
    if (block > c->chunk) return ba_ceil_div(c->p.kv_len, c->group_tokens) / c->chunk + c->p.block_columns;
    return ba_ceil_div(c->p.block_columns * block, c->chunk - c->chunk % block) + 1;
}

/* Bytes of what each panel of a strip has for itself. */
typedef struct panel_sizes {
    int64_t q, reals, bounds, sums, factors, chunks;
} panel_sizes;

static panel_sizes sizes_of(const ba_prefill *c) {
    const int64_t lanes = c->lanes, columns = ba_max(1, c->p.block_columns), reals = ba_round_up(lanes * c->real_size, BA_ALIGN);
    return (panel_sizes){.q = ba_round_up(lanes * ba_round_up(c->depth, c->family->dim_pad) * c->family->q_bytes, BA_ALIGN),
                         .reals = reals,
                         .bounds = ba_round_up(lanes * (int64_t)sizeof(int32_t), BA_ALIGN),
                         .sums = ba_round_up(columns * lanes * c->real_size, BA_ALIGN),
                         .factors = ba_round_up(most_chunks(c) * lanes * c->real_size, BA_ALIGN),
                         .chunks = ba_round_up(columns * (int64_t)sizeof(int32_t), BA_ALIGN)};
}

/* The scratch of a worker as panel number `panel` of a strip sees it. */
static ba_strip_scratch of_panel(const ba_prefill *c, const ba_strip_scratch *s, int64_t panel) {
    const panel_sizes sizes = sizes_of(c);
    ba_strip_scratch own = *s;
    own.q += panel * sizes.q;
    own.m += panel * sizes.reals;
    own.l += panel * sizes.reals;
    own.lo = (int32_t *)((char *)s->lo + panel * sizes.bounds);
    own.hi = (int32_t *)((char *)s->hi + panel * sizes.bounds);
    own.sums += panel * sizes.sums;
    own.factors += panel * sizes.factors;
    own.chunks = (int32_t *)((char *)s->chunks + panel * sizes.chunks);
    return own;
}

int64_t ba_strip_lay_out(const ba_prefill *c, char *base, ba_strip_scratch *s) {
    const int64_t real = c->real_size, lanes = c->lanes, columns = ba_max(1, c->p.block_columns);
    int64_t used = ba_round_up(ba_features_lay_out(c, base, &s->features), BA_ALIGN);
    s->rows = ba_take(base, &used, lanes * c->pitch * real);
    s->pointers = (const void **)ba_take(base, &used, lanes * (int64_t)sizeof(void *));
    const panel_sizes sizes = sizes_of(c);
    s->q = ba_take(base, &used, c->panels * sizes.q);
    s->m = ba_take(base, &used, c->panels * sizes.reals);
    s->l = ba_take(base, &used, c->panels * sizes.reals);
    s->alpha = ba_take(base, &used, lanes * real);
    s->row_max = ba_take(base, &used, lanes * real);
    s->lo = (int32_t *)ba_take(base, &used, c->panels * sizes.bounds);
    s->hi = (int32_t *)ba_take(base, &used, c->panels * sizes.bounds);
    s->key_index = (int32_t *)ba_take(base, &used, c->chunk * (int64_t)sizeof(int32_t));
    s->k_rows = (const void **)ba_take(base, &used, c->chunk * (int64_t)sizeof(void *));
    s->chunk = ba_take(base, &used, c->chunk * ba_max(c->family->scratch_per_key, lanes * real));
    s->sums = ba_take(base, &used, c->panels * sizes.sums);
    s->factors = ba_take(base, &used, c->panels * sizes.factors);
    s->chunks = (int32_t *)ba_take(base, &used, c->panels * sizes.chunks);
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

/* A panel while its strip is scored. */
typedef struct scored_panel {
    ba_strip_scratch s;
    ba_panel_rows at;
    int64_t first, rows; /* of the head */
    int64_t first_block, end_block;
    int32_t chunks;
} scored_panel;

/* Scores groups [begin, end), or those of them that the panel sees, and adds up their blocks. */
static void score_chunk(const ba_prefill *c, scored_panel *p, const char *groups, int64_t begin, int64_t end) {
    const int64_t block = c->groups_per_block, line = c->lanes * c->real_size;
    const ba_strip_scratch *s = &p->s;
    begin = ba_max(begin, p->first_block * block);
    end = ba_min(end, p->at.hi);
    if (begin >= end) return;
    ba_panel_score(c, s, &p->at, groups, begin, end);
    if (c->real_size == 4) add_blocks_float((float *)s->sums, (float *)s->chunk, (float *)s->alpha, c->lanes, begin, end, block, p->first_block);
    else add_blocks_double((double *)s->sums, (double *)s->chunk, (double *)s->alpha, c->lanes, begin, end, block, p->first_block);
    memcpy(s->factors + p->chunks * line, s->m, (size_t)line);
    for (int64_t b = begin / block; b < ba_ceil_div(end, block); b++) s->chunks[b - p->first_block] = p->chunks;
    p->chunks++;
}

/* Adds the scores of rows first .. first + rows - 1 of one query head, which lie in the strip, to s->head. The panels score one chunk of groups after
 * the other, so that a chunk is read from memory once. */
static void score_panels(const ba_prefill *c, const ba_strip_scratch *s, const ba_strip *strip, int64_t head, int64_t first, int64_t rows) {
    const int64_t block = c->groups_per_block, pair = strip->batch * c->p.kv_heads + head / c->p.group - c->first_pair;
    const char *groups = c->groups + pair * c->pair_bytes;
    scored_panel panels[BA_STRIP_PANELS];
    int64_t n = 0, lo = INT64_MAX, hi = 0;
    for (int64_t at = 0; at < rows; at += c->panel_rows, n++) {
        scored_panel *p = &panels[n];
        *p = (scored_panel){.s = of_panel(c, s, n), .first = first + at, .rows = ba_min(c->panel_rows, rows - at)};
        p->at = ba_panel_open(c, &p->s, strip->batch, head, p->first, p->rows);
        if (p->at.hi == 0) continue;
        p->first_block = p->at.lo / block;
        p->end_block = ba_ceil_div(p->at.hi, block);
        lo = ba_min(lo, p->first_block * block);
        hi = ba_max(hi, p->at.hi);
    }
    for (int64_t begin = lo, end; begin < hi; begin = end) {
        end = ba_min(chunk_end(c, begin), hi);
        for (int64_t i = 0; i < n; i++) score_chunk(c, &panels[i], groups, begin, end);
    }
    for (int64_t i = 0; i < n; i++) {
        const scored_panel *p = &panels[i];
        close_panel(c, &p->s, p->chunks);
        for (int64_t lane = 0, end; lane < p->rows; lane = end) {
            const int64_t row = (p->first + lane) / c->rows_per_block;
            end = ba_min(p->rows, (row + 1) * c->rows_per_block - p->first);
            double *scores = s->head + (row - strip->first) * c->p.block_columns;
            (c->real_size == 4 ? fold_float : fold_double)(&p->s, scores, c->lanes, lane, end, p->first_block, p->end_block, c->args->largest != 0);
        }
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
        for (int64_t first = begin; first < end && !c->lines; first += c->panels * c->panel_rows) {
            if (ba_stopped()) return false;
            score_panels(c, s, strip, strip->list * c->list_heads + h, first, ba_min(c->panels * c->panel_rows, end - first));
        }
        add_head(c, s, strip);
    }
    return true;
}
