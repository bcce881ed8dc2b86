/* Checks the kernels for rows of cells (q8_0, q4_0, q4_1): packing, quantisation, scores, and few queries over K and V of any two such dtypes.
 * (checkkernels.c says how to run the checks.) */
#include "checkkernels.h"

#include <math.h>
#include <string.h>

enum { MOST_HEADS = 4, MOST_KEYS = 144, STATE = BA_FEW_QUERIES * (BA_MAX_HEAD_DIM + 2) }; /* MOST_KEYS and all dims are multiples of 16 */

static const int64_t dims[] = {32, 64, 96, 128, 160, 576};

/* ---- Rows ----------------------------------------------------------------------------------------------------------- */

/* K or V of all heads: its bytes, and the numbers that these bytes stand for. */
typedef struct cell_rows {
    ba_dtype dtype;
    int64_t dim, bytes; /* of a head's row */
    double value[MOST_KEYS][MOST_HEADS][BA_MAX_HEAD_DIM];
    const void *row[MOST_KEYS];
} cell_rows;
static cell_rows keys_of, values_of;

static double half_at(const unsigned char *at) {
    uint16_t bits;
    memcpy(&bits, at, sizeof bits);
    return decode(BA_FLOAT16, bits);
}

/* The number at dim d of a row, by the definition of the format. */
static double number_at(ba_dtype dtype, const unsigned char *row, int64_t d) {
    const unsigned char *cell = row + d / 32 * ba_cell_bytes(dtype), *integers = cell + (dtype == BA_Q4_1 ? 4 : 2);
    const int64_t i = d % 32;
    if (dtype == BA_Q8_0) return half_at(cell) * (double)(signed char)integers[i];
    const int integer = i < 16 ? integers[i] % 16 : integers[i - 16] / 16;
    return dtype == BA_Q4_0 ? half_at(cell) * (integer - 8) : half_at(cell) * integer + half_at(cell + 2);
}

static void set_half(unsigned char *at, double value) {
    const uint16_t bits = (uint16_t)encode(BA_FLOAT16, value);
    memcpy(at, &bits, sizeof bits);
}

/* Draws the rows of `keys` keys, and marks in `bad` the keys with a factor or an offset that is not finite. */
static void draw_rows(cell_rows *x, row_pool pool, ba_dtype dtype, int64_t keys, int64_t heads, int64_t dim, bool *bad, bool draw_bad) {
    x->dtype = dtype;
    x->dim = dim;
    x->bytes = dim / 32 * ba_cell_bytes(dtype);
    for (int64_t j = 0; j < keys; j++) {
        unsigned char *row = place_row(pool, j, heads * x->bytes);
        x->row[j] = row;
        for (int64_t i = 0; i < heads * x->bytes; i++) row[i] = (unsigned char)pick(256);
        for (int64_t at = 0; at < heads * x->bytes; at += ba_cell_bytes(dtype)) {
            set_half(row + at, uniform() * (dtype == BA_Q8_0 ? 0.02 : 0.3));
            if (dtype == BA_Q4_1) set_half(row + at + 2, uniform() * 2);
        }
        if (draw_bad && pick(6) == 0) {
            bad[j] = true;
            for (int64_t h = 0; h < heads; h++)
                set_half(row + h * x->bytes + pick(dim / 32) * ba_cell_bytes(dtype) + (dtype == BA_Q4_1 && pick(2) ? 2 : 0), specials[pick(3)]);
        }
        for (int64_t h = 0; h < heads; h++)
            for (int64_t d = 0; d < dim; d++) x->value[j][h][d] = number_at(dtype, row + h * x->bytes, d);
    }
}

/* ---- Packing and quantisation ------------------------------------------------------------------------------------------ */

static void check_pack(const subject *s) {
    static bool bad[MOST_KEYS];
    for (int n = 0; n < 40; n++) {
        if (!is_drawn()) continue;
        flip_side();
        forget_places();
        const int64_t dim = dims[pick(6)], keys = 1 + pick(20);
        draw_rows(&keys_of, K_ROWS, s->kv_dtype, keys, 1, dim, bad, n % 4 == 0);
        float *packed = place(PACKED_K, keys * dim * (int64_t)sizeof *packed);
        const void *rows[MOST_KEYS];
        s->pack_k(packed, rows, keys_of.row, NULL, keys, dim);
        require(&records[PACK_K], neighbours_untouched(), "wrote beside a buffer", -1, -1);
        for (int64_t j = 0; j < keys; j++)
            for (int64_t d = 0; d < dim; d++) {
                const double want = keys_of.value[j][0][d];
                compare(&records[PACK_K], (double)((const float *)rows[j])[d], want, isfinite(want) ? (fabs(want) + 10) * 0x1p-23 : 0,
                        "number [key][dim]", j, d);
            }
    }
}

/* Quantises a cell as ggml's reference does, except that the sum of q4_0 is not rounded to float. */
static void quantise_plainly(ba_dtype dtype, const double *x, unsigned char *cell) {
    float low = (float)x[0], high = (float)x[0], most = 0;
    for (int i = 0; i < 32; i++) {
        low = (float)x[i] < low ? (float)x[i] : low; /* of 0 and -0, the first one counts */
        high = (float)x[i] > high ? (float)x[i] : high;
        if (fabsf((float)x[i]) > fabsf(most)) most = (float)x[i];
    }
    const float d = dtype == BA_Q8_0 ? fabsf(most) / 127 : dtype == BA_Q4_0 ? most / -8 : (high - low) / 15;
    const double inverse = d != 0 && isfinite(1 / d) ? (double)(1 / d) : 0;
    set_half(cell, (double)d);
    if (dtype == BA_Q4_1) set_half(cell + 2, (double)low);
    int integer[32];
    for (int i = 0; i < 32; i++) {
        const volatile float difference = (float)x[i] - low, scaled = (float)((double)difference * inverse), up = scaled + 0.5f;
        if (dtype == BA_Q8_0) integer[i] = (int)roundf((float)((double)(float)x[i] * inverse));
        else integer[i] = (int)fmin(15, dtype == BA_Q4_0 ? floor((double)(float)x[i] * inverse + 8.5) : floor((double)up));
    }
    for (int i = 0; dtype == BA_Q8_0 && i < 32; i++) cell[2 + i] = (unsigned char)integer[i];
    for (int i = 0; dtype != BA_Q8_0 && i < 16; i++) cell[(dtype == BA_Q4_1 ? 4 : 2) + i] = (unsigned char)(integer[i] + 16 * integer[i + 16]);
}

static void check_quantise_cells(const subject *s) {
    const double most = 65504 * (s->kv_dtype == BA_Q8_0 ? 127.0 : s->kv_dtype == BA_Q4_0 ? 8.0 : 1.0);
    for (int n = 0; n < 400; n++) {
        if (!is_drawn()) continue;
        flip_side();
        forget_places();
        const int64_t dim = dims[pick(6)], size = ba_cell_bytes(s->kv_dtype);
        double *row = place_tight(PANEL_Q, dim * (int64_t)sizeof *row, sizeof *row);
        for (int64_t d = 0; d < dim; d++) {
            const double ties = (double)(pick(33) - 16) / 2;
            row[d] = n % 5 == 0 ? ties : n % 5 == 1 ? uniform() * most : n % 5 == 2 ? uniform() * ldexp(1, -(int)pick(150)) : uniform();
            if (n % 7 == 0) row[d] = pick(2) ? 0 : -0.0;
        }
        unsigned char *to = place_row(OUT_ROWS, 0, dim / 32 * size), want[BA_Q8_0_BYTES];
        memset(to, 0x55, (size_t)(dim / 32 * size));
        s->cache->quantise(to, 0, row, dim);
        require(&records[QUANTISE], neighbours_untouched(), "wrote beside a buffer", n, -1);
        for (int64_t d = 0; d < dim; d += 32) {
            quantise_plainly(s->kv_dtype, row + d, want);
            for (int64_t i = 0; i < size; i++)
                require(&records[QUANTISE], to[d / 32 * size + i] == want[i], "byte [row][byte]", n, d / 32 * size + i);
        }
    }
}

/* ---- Few queries ----------------------------------------------------------------------------------------------------------- */

static float q_rows[MOST_HEADS][BA_FEW_QUERIES][BA_MAX_HEAD_DIM];

/* The results of plain arithmetic for one query of one head over the keys that it sees, and the errors that a kernel's results may have. */
static void attend_cells_plainly(const ba_chunk *chunk, const ba_panel *panel, int64_t h, int64_t g, int64_t v_dim, plain_row *out) {
    static double score[MOST_KEYS];
    double largest = -INFINITY, sum = 0, error = 0;
    for (int64_t j = 0; j < chunk->keys; j++) {
        double size = 0;
        score[j] = 0;
        if (panel->lo && (chunk->key_index[j] < panel->lo[g] || chunk->key_index[j] >= panel->hi[g])) {
            score[j] = -INFINITY;
            continue;
        }
        for (int64_t d = 0; d < keys_of.dim; d++) {
            score[j] += (double)q_rows[h][g][d] * keys_of.value[j][h][d];
            size += fabs((double)q_rows[h][g][d]) * (fabs(keys_of.value[j][h][d]) + 4); /* + 4: the integer and the offset of q4_1 may cancel */
        }
        error = fmax(error, ((double)keys_of.dim + 8) * 0x1p-24 * size);
        largest = fmax(largest, score[j]);
    }
    for (int64_t j = 0; j < chunk->keys; j++) sum += exp2(score[j] - largest);
    error = 2 * error + 64 * 0x1p-24; /* the relative error of a weight */
    out->lse = largest + log2(sum);
    out->lse_error = error + fabs(out->lse) * 0x1p-22;
    for (int64_t d = 0; d < v_dim; d++) {
        double value = 0, size = 0;
        for (int64_t j = 0; j < chunk->keys; j++) {
            const double weight = exp2(score[j] - largest) / sum;
            if (score[j] == -INFINITY) continue;
            value += weight * values_of.value[j][h][d];
            size += weight * (fabs(values_of.value[j][h][d]) + 4);
        }
        out->out[d] = value;
        out->out_error[d] = size * (2 * error + ((double)chunk->keys + 8) * 0x1p-24);
    }
}

static void check_scores_of(const subject *s, const void *packed, const ba_chunk *chunk, int64_t queries) {
    static float scores[BA_FEW_QUERIES * (MOST_KEYS + 16)];
    const int64_t stride = ba_round_up(chunk->keys, 16);
    s->cache->scores(packed, queries, chunk->k_rows, 0, pick(2) ? &chunk->k_prefetch : NULL, chunk->keys, keys_of.dim, scores, stride);
    for (int64_t g = 0; g < queries; g++)
        for (int64_t j = 0; j < chunk->keys; j++) {
            double want = 0, size = 0;
            for (int64_t d = 0; d < keys_of.dim; d++) {
                want += (double)q_rows[0][g][d] * keys_of.value[j][0][d];
                size += fabs((double)q_rows[0][g][d]) * (fabs(keys_of.value[j][0][d]) + 4);
            }
            if (isfinite(want))
                compare(&records[SCORES], (double)scores[g * stride + j], want, ((double)keys_of.dim + 8) * 0x1p-24 * size, "score [query][key]", g,
                        j);
        }
}

static void check_few_cells(const subject *s) {
    static float states[3][MOST_HEADS][STATE] __attribute__((aligned(BA_ALIGN)));
    static float scratch[MOST_HEADS][BA_FEW_QUERIES * (MOST_KEYS + BA_MAX_HEAD_DIM)] __attribute__((aligned(BA_ALIGN)));
    static float packed[MOST_HEADS][BA_FEW_QUERIES * BA_MAX_HEAD_DIM] __attribute__((aligned(BA_ALIGN)));
    static plain_row plain;
    const ba_few_kernels *family = s->f->few;
    for (int n = 0; n < 240; n++) {
        bool bad[MOST_KEYS] = {false};
        int32_t key_index[MOST_KEYS], lo[BA_FEW_QUERIES], hi[BA_FEW_QUERIES];
        if (!is_drawn()) continue;
        flip_side();
        forget_places();
        const ba_dtype v_dtype = (ba_dtype)(BA_Q8_0 + n % 3);
        const int64_t heads = 1 + pick(MOST_HEADS), queries = 1 + pick(BA_FEW_QUERIES), keys = 1 + pick(n % 4 ? 40 : MOST_KEYS);
        const int64_t k_dim = dims[pick(n % 5 ? 4 : 6)], v_dim = dims[pick(n % 5 ? 4 : 6)];
        const bool hides = pick(2);
        draw_rows(&keys_of, K_ROWS, s->kv_dtype, keys, heads, k_dim, bad, hides);
        draw_rows(&values_of, V_ROWS, v_dtype, keys, heads, v_dim, bad, hides);
        for (int64_t j = 0; j < keys; j++) key_index[j] = (int32_t)(3 * j + 5);
        for (int64_t g = 0; g < BA_FEW_QUERIES; g++) { /* all queries see the same run of keys with finite factors, and some see less of it */
            int64_t first = 0, end;
            while (hides && first < keys && bad[first]) first++;
            for (end = first; end < keys && !(hides && bad[end]);) end++;
            lo[g] = (int32_t)(3 * first + 5);
            hi[g] = (int32_t)(3 * ba_max(first, end - (g > 3 ? pick(3) : 0)) + 5);
        }
        const ba_attend_few_fn few = s->cache->few_beside[v_dtype - BA_Q8_0];
        ba_panel panels[3][MOST_HEADS];
        ba_chunk chunks[MOST_HEADS];
        for (int64_t h = 0; h < heads; h++) {
            const void *rows[BA_FEW_QUERIES];
            for (int64_t g = 0; g < queries; g++) {
                rows[g] = q_rows[h][g];
                for (int64_t d = 0; d < k_dim; d++) q_rows[h][g][d] = (float)(uniform() * 0.5);
            }
            family->pack_queries(packed[h], rows, queries, k_dim, 1);
            if (s->cache->order_few) s->cache->order_few(packed[h], queries, k_dim);
            chunks[h] = (ba_chunk){.keys = keys,
                                   .head_dim = k_dim,
                                   .v_dim = v_dim,
                                   .k_rows = keys_of.row,
                                   .v_rows = values_of.row,
                                   .k_offset = h * keys_of.bytes,
                                   .v_offset = h * values_of.bytes,
                                   .key_index = key_index,
                                   .scale = 1,
                                   .scratch = scratch[h]};
            for (int way = 0; way < 3; way++) {
                float *state = memset(states[way][h], 0, sizeof states[way][h]);
                panels[way][h] = (ba_panel){
                    .q = packed[h], .o = state, .m = state + BA_FEW_QUERIES * BA_FEW_PAD(v_dim), .lo = hides ? lo : NULL, .hi = hides ? hi : NULL};
                panels[way][h].l = (float *)panels[way][h].m + BA_FEW_QUERIES;
                for (int g = 0; g < BA_FEW_QUERIES; g++) ((float *)panels[way][h].m)[g] = -3.402823466e38f;
            }
        }
        if (pick(2)) {
            chunks->k_prefetch = pick_prefetch(keys_of.row, keys, heads * keys_of.bytes);
            chunks->v_prefetch = pick_prefetch(values_of.row, keys, heads * values_of.bytes);
        }
        few(panels[0], queries, chunks, heads);
        if (s->cache_into_l1) s->cache_into_l1->few_beside[v_dtype - BA_Q8_0](panels[2], queries, chunks, heads);
        for (int64_t h = 0; h < heads; h++) {
            ba_chunk alone = chunks[h];
            alone.k_prefetch.count = alone.v_prefetch.count = 0;
            if (pick(2)) alone.gathered = place(PACKED_K, keys * (keys_of.bytes + values_of.bytes));
            few(&panels[1][h], queries, &alone, 1);
            require(&records[TOGETHER], memcmp(states[0][h], states[1][h], sizeof states[0][h]) == 0, "a head alone gives another state of [.][head]",
                    n, h);
            require(&records[TOGETHER], !s->cache_into_l1 || memcmp(states[0][h], states[2][h], sizeof states[0][h]) == 0,
                    "the kernel that prefetches into L1 gives another state of [.][head]", n, h);
            for (int64_t g = 0; g < queries; g++) {
                const double l = (double)((float *)panels[0][h].l)[g], m = (double)((float *)panels[0][h].m)[g];
                if (hides && lo[g] >= hi[g]) {
                    require(&records[UNSEEN], l == 0, "a query that sees no key [head][query]", h, g);
                    continue;
                }
                attend_cells_plainly(chunks, &panels[0][h], h, g, v_dim, &plain);
                compare(&records[ATTEND], m + log2(l), plain.lse, plain.lse_error, "log-sum-exp [head][query]", h, g);
                for (int64_t d = 0; d < v_dim; d++)
                    compare(&records[ATTEND], (double)((float *)panels[0][h].o)[g * BA_FEW_PAD(v_dim) + d] / l, plain.out[d],
                            plain.out_error[d] + fabs(plain.out[d]) * 0x1p-22, "o [query][dim]", g, d);
            }
        }
        check_scores_of(s, packed[0], chunks, queries);
        require(&records[ATTEND], neighbours_untouched(), "wrote beside a buffer", -1, -1);
    }
}

void check_cells(void *context) {
    const subject *s = context;
    check_pack(s);
    check_quantise_cells(s);
    check_few_cells(s);
}
