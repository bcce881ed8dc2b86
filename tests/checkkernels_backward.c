/* Checks the kernels of the backward pass against plain double arithmetic: weights and slopes of a panel, rows of dK and dV, whole tiles, and the
 * kernels that pack, multiply and store rows. */
#include "checkkernels.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

enum { GRADIENT_WEIGHTS, GRADIENT_SLOPES, GRADIENT_DQ, GRADIENT_UNSEEN, PARTS };
static record gradient_records[PARTS];

static operand dout;
static double lse[BA_MAX_LANES], delta[BA_MAX_LANES];

/* An element of dout. Where the operands are huge, dout is small, so that their products with dout stay in range. */
static double random_like(const test_case *c) {
    const double small = c->s.dtype == BA_FLOAT64 ? 0x1p-400 : c->s.dtype == BA_FLOAT16 ? 0x1p-10 : 0x1p-60;
    return c->fill == TINY ? uniform() * 1e-3 : c->fill == EXACT_HUGE ? (double)(pick(5) - 2) * small : uniform() * 2;
}

static void fill_dout(const test_case *c, operand *x, int64_t rows, int64_t dim) {
    for (int64_t i = 0; i < rows; i++)
        for (int64_t d = 0; d < dim; d++) set_operand(c, x, i, d, random_like(c));
    if (c->fill == SPECIAL && pick(2)) set_operand(c, x, pick(rows), pick(dim), specials[pick(3)]);
}

/* ---- A panel ------------------------------------------------------------------------------------------------------ */

/* The log-sum-exp of the scores that a lane sees, in log2 units, as gradient kernels read it. One lane in 16 gets the value of a lane that has
 * attended no key. */
static double lane_lse(const test_case *c, int64_t lane) {
    double top = -INFINITY, sum = 0;
    for (int pass = 0; pass < 2; pass++)
        for (int64_t j = 0; j < c->keys; j++) {
            if (!sees(c, lane, j)) continue;
            const double s = score_of(c, lane, j).value;
            if (isnan(s) || s == INFINITY) return NAN;
            if (pass) sum += exp2(s - top);
            else top = fmax(top, s);
        }
    return sum == 0 || !pick(16) ? INFINITY : top + log2(sum);
}

static plain_number slope_sum(const test_case *c, int64_t lane, int64_t key) { /* scale * dout . v */
    double sum = 0, size = 0;
    for (int64_t d = 0; d < c->v_dim; d++) {
        const double term = dout.value[lane][d] * c->scale * v.value[key][d];
        sum += term;
        size += fabs(term);
    }
    return (plain_number){sum, sum_error(c, c->v_dim) * size + tiny(c) * (double)(c->v_dim + 5)};
}

static void *place_reals(const test_case *c, buffer which, const double *values, int64_t n) {
    const int64_t real = c->s.f->real_size;
    void *to = place(which, n * real);
    for (int64_t i = 0; i < n; i++) set_element(real_dtype(c), to, i, values[i]);
    return to;
}

static ba_gradient_panel open_gradients(const test_case *c) {
    const ba_attend_family *f = c->s.f;
    const ba_panel forward = open_panel(c);
    ba_gradient_panel panel = {.q = forward.q, .lo = forward.lo, .hi = forward.hi};
    const void **rows = place_rows(c, OUT_ROWS, ROW_POINTERS, &dout, 0, c->queries, c->v_dim);
    void *packed = place(PANEL_DOUT, c->lanes * ba_round_up(c->v_dim, f->dim_pad) * f->q_bytes);
    f->pack->queries[c->variant](packed, rows, c->queries, c->v_dim, c->scale);
    panel.dout = packed;
    panel.lse = place_reals(c, PANEL_LSE, lse, c->lanes);
    panel.delta = place_reals(c, PANEL_DELTA, delta, c->lanes);
    panel.bias = place_bias(c, 0, c->keys);
    panel.dq = place(PANEL_DQ, c->lanes * c->head_dim * f->real_size);
    for (int64_t i = 0; i < c->lanes * c->head_dim; i++) set_element(real_dtype(c), panel.dq, i, (double)(i % 7) - 3);
    return panel;
}

static void draw_numbers(test_case *c) {
    c->scaled = false;
    fill_dout(c, &dout, c->queries, c->v_dim);
    for (int64_t i = 0; i < c->lanes; i++) {
        lse[i] = i < c->queries ? lane_lse(c, i) : 0;
        delta[i] = i < c->queries ? random_like(c) : 0;
        if (c->s.f->real_size == 4) { /* rounded as the kernel gets them */
            lse[i] = (double)(float)lse[i];
            delta[i] = (double)(float)delta[i];
        }
    }
}

/* With `of_bias`, the panel has no dq, and the slopes are those for the gradient of the bias. */
static void check_panel(const test_case *c, bool of_bias) {
    const int64_t real = c->s.f->real_size, keys = c->keys;
    ba_gradient_panel panel = open_gradients(c);
    if (of_bias) panel.dq = NULL;
    ba_chunk chunk = open_chunk(c, 0, keys);
    chunk.bias = (ba_bias){NULL, false};
    void *weights = chunk.scratch, *slopes = place(SLOPES, keys * c->lanes * real);
    chunk.scratch = NULL;
    c->s.f->gradient->gradient[c->variant](&panel, &chunk, weights, slopes);
    require(&gradient_records[GRADIENT_DQ], neighbours_untouched(), "wrote beside a buffer", -1, -1);
    for (int64_t i = 0; i < c->queries; i++) {
        for (int64_t j = 0; j < keys; j++) {
            const double p = real_at(c, weights, j * c->lanes + i), slope = real_at(c, slopes, j * c->lanes + i);
            if (!sees(c, i, j)) {
                require(&gradient_records[GRADIENT_UNSEEN], p == 0 && slope == 0, "an unseen key has a weight [key][lane]", j, i);
                continue;
            }
            const plain_number s = score_of(c, i, j), dp = slope_sum(c, i, j), rate = of_bias ? (plain_number){1, 0} : rate_of(c, i, j);
            const double x = s.value - lse[i];
            compare(&gradient_records[GRADIENT_WEIGHTS], p, exp2(x),
                    2 * weight_error(c, x) + exp2(x) * fmin(expm1(0.6931471805599453 * s.error), 1e6), "weight [key][lane]", j, i);
            const double change = p * (dp.value - delta[i]);
            const double error = fabs(p) * (dp.error + 3 * unit(c) * (fabs(dp.value) + fabs(delta[i]))) + fabs(change) * rate.error + tiny(c);
            compare(&gradient_records[GRADIENT_SLOPES], slope, change * rate.value, error, "slope [key][lane]", j, i);
        }
        for (int64_t d = 0; d < c->head_dim && !of_bias; d++) {
            double sum = (double)((d * c->lanes + i) % 7) - 3, size = fabs(sum);
            for (int64_t j = 0; j < keys; j++) {
                if (!sees(c, i, j)) continue;
                const double term = real_at(c, slopes, j * c->lanes + i) * k.value[j][d];
                sum += term;
                size += fabs(term);
            }
            compare(&gradient_records[GRADIENT_DQ], real_at(c, panel.dq, d * c->lanes + i), sum,
                    sum_error(c, keys) * size + tiny(c) * (double)(keys + 5), "dq [dim][lane]", d, i);
        }
    }
}

static void check_panels(void *context) {
    test_case *c = context;
    static const int64_t dims[] = {1, 2, 7, 16, 17, 33, 64, 72, 80, 128, 576};
    enum { DIMS = sizeof dims / sizeof *dims };
    const int64_t lanes = most_queries(c);
    for (int64_t n = 0; n < DIMS * FILLS; n++) {
        if (!is_drawn()) continue;
        const int64_t dim = dims[n % DIMS];
        make_case(c, (fill)(n / DIMS), (mask)(n % MASKS), 1 + pick(lanes), 1 + pick(dim > 100 ? 9 : 40), dim, dims[(n * 5 + 3) % DIMS]);
        draw_numbers(c);
        check_panel(c, !pick(4));
    }
    for (int64_t keys = 1; keys <= BA_MAX_CHUNK; keys += keys < 40 ? 1 : 59) {
        if (!is_drawn()) continue;
        make_case(c, (fill)(keys % FILLS), (mask)pick(MASKS), lanes, keys, 1 + pick(6), 1 + pick(6));
        draw_numbers(c);
        check_panel(c, !pick(4));
    }
}

/* ---- Rows of dK and dV -------------------------------------------------------------------------------------------- */

enum { MAX_PANELS = 3 };

/* Checks add_rows, and pack_tile, on a tile of up to MAX_PANELS panels. The last panel is wide or narrow, and the others are wide. Some panels have
 * weights for only a part of the keys. */
static void check_add_rows(test_case *c, record *r, record *packing, int64_t keys, int64_t dim, bool careful) {
    const ba_attend_family *f = c->s.f;
    const int64_t real = f->real_size;
    make_case(c, careful ? SPECIAL : RANDOM, NO_MASK, 1, 1, 1, 1);
    ba_weights weights[MAX_PANELS];
    const buffer places[MAX_PANELS] = {SCRATCH, SLOPES, PANEL_Q};
    const int64_t panels = 1 + pick(MAX_PANELS);
    int64_t lanes = 0;
    for (int64_t n = 0; n < panels; n++) {
        const int64_t width = f->lanes[n == panels - 1 ? pick(2) : 0], used = n == panels - 1 ? 1 + pick(width) : width;
        void *data = place(places[n], keys * width * real);
        weights[n] = (ba_weights){data, width, used, 0, keys};
        if (!pick(3)) weights[n].end = pick(keys + 1);
        if (!pick(3)) weights[n].begin = pick(weights[n].end + 1);
        const bool none = weights[n].begin == weights[n].end; /* no key has weights: the panel's array stays NaN, and must not be read */
        for (int64_t at = 0; !none && at < keys * width; at++) {
            const bool inside = at / width >= weights[n].begin && at / width < weights[n].end;
            set_element(real_dtype(c), data, at, inside && pick(4) ? uniform() : 0);
        }
        lanes += used;
    }
    for (int64_t i = 0; i < lanes; i++)
        for (int64_t d = 0; d < dim; d++) set_operand(c, &q, i, d, careful && !pick(dim * 8) ? specials[pick(3)] : uniform());
    bool finite = true;
    for (int64_t i = 0; i < lanes; i++)
        for (int64_t d = 0; d < dim; d++) finite &= isfinite(q.value[i][d]);
    const void **rows = place_rows(c, Q_ROWS, ROW_POINTERS, &q, 0, lanes, dim);
    const int64_t padded = ba_round_up(dim, f->lane_block);
    void *packed = place(TILE_ROWS, lanes * padded * real);
    require(packing, f->gradient->pack_tile(packed, rows, lanes, dim) == finite, "finite or not", -1, -1);
    for (int64_t i = 0; i < lanes; i++)
        for (int64_t d = 0; d < padded; d++) {
            const int64_t at = d / f->lane_block * f->lane_block * lanes + i * f->lane_block + d % f->lane_block;
            compare(packing, real_at(c, packed, at), d < dim ? q.value[i][d] : 0, 0, "packed [lane][dim]", i, d);
        }
    void **to = place_tight(K_POINTERS, keys * (int64_t)sizeof *to, sizeof *to);
    for (int64_t j = 0; j < keys; j++) {
        to[j] = place_row(OUT_ROWS, j, dim * real);
        for (int64_t d = 0; d < dim; d++) set_element(real_dtype(c), to[j], d, (double)((j + d) % 5) - 2);
    }
    snprintf(case_text, sizeof case_text, "keys=%d dim=%d panels=%d lanes=%d finite=%d", (int)keys, (int)dim, (int)panels, (int)lanes, finite);
    f->gradient->add_rows(&(ba_add_rows){
        .weights = weights, .panels = panels, .packed = packed, .lanes = lanes, .finite = finite, .keys = keys, .dim = dim, .rows = to});
    require(r, neighbours_untouched(), "wrote beside a buffer", -1, -1);
    for (int64_t j = 0; j < keys; j++)
        for (int64_t d = 0; d < dim; d++) {
            double sum = (double)((j + d) % 5) - 2, size = fabs(sum);
            int64_t lane = 0;
            for (int64_t n = 0; n < panels; n++)
                for (int64_t i = 0; i < weights[n].lanes; i++, lane++) {
                    if (j < weights[n].begin || j >= weights[n].end) continue;
                    const double weight = real_at(c, weights[n].data, j * weights[n].width + i);
                    if (weight == 0) continue;
                    sum += weight * q.value[lane][d];
                    size += fabs(weight * q.value[lane][d]);
                }
            compare(r, real_at(c, to[j], d), sum, sum_error(c, lanes) * size, "row [key][dim]", j, d);
        }
}

/* ---- A tile at a time --------------------------------------------------------------------------------------------- */

enum { TILE_DQ, TILE_DK, TILE_DV, TILE_PARTS };
static record tile_records[TILE_PARTS], joined_record;

/* The right value of a sum, and the error that a kernel's sum may have. Weights below the range of float count as 0. */
typedef struct plain_sum {
    double value, size, error;
} plain_sum;

static void add_term(plain_sum *sum, plain_number weight, double x) {
    if (fabs(weight.value) < 0x1p-149) return; /* even where x is not finite */
    sum->value += weight.value * x;
    sum->size += fabs(weight.value * x);
    sum->error += weight.error * fabs(x);
}

static void compare_sum(const test_case *c, record *r, double got, const plain_sum *sum, int64_t terms, const char *what, int64_t row,
                        int64_t column) {
    compare(r, got, sum->value, sum->error + sum_error(c, terms) * sum->size + tiny(c) * (double)(terms + 5), what, row, column);
}

/* Places rows of sums: each row apart from the others, or all rows side by side. */
static void **place_sums(const test_case *c, bool apart, buffer pointers, int64_t dim) {
    void **to = place_tight(pointers, c->keys * (int64_t)sizeof *to, sizeof *to);
    const int64_t bytes = ba_round_up(dim, BA_PACK_PAD) * c->s.f->real_size;
    char *const together = place(WEIGHTS, c->keys * bytes);
    for (int64_t j = 0; j < c->keys; j++) {
        to[j] = apart ? place_row(OUT_ROWS, j, bytes) : together + j * bytes;
        for (int64_t d = 0; d < dim; d++) set_element(real_dtype(c), to[j], d, (double)((j + d) % 5) - 2);
    }
    return to;
}

static const void **pack_for_tile(const test_case *c, ba_pack_rows_fn pack, const void **rows, buffer packed, buffer pointers, int64_t dim) {
    const ba_attend_family *f = c->s.f;
    if (!pack) return rows;
    const void **to = place_tight(pointers, c->keys * (int64_t)sizeof *to, sizeof *to);
    pack(place(packed, ba_round_up(c->keys, f->key_pad) * ba_round_up(dim, f->dim_pad) * f->pack_bytes), to, rows, NULL, c->keys, dim);
    return to;
}

/* Places the rows of K and V, packs them as the family wants them, and returns their chunk, without key_index. */
static ba_chunk open_tile_chunk(const test_case *c, ba_gradient_tile *tile) {
    const ba_pack_kernels *pack = c->s.f->pack;
    const void **k_rows = place_rows(c, K_ROWS, K_POINTERS, &k, 0, c->keys, c->head_dim);
    const void **v_rows = place_rows(c, V_ROWS, V_POINTERS, &v, 0, c->keys, c->v_dim);
    tile->k_columns = pack_for_tile(c, pack->values, k_rows, OTHER_O, ROW_MAX, c->head_dim);
    return (ba_chunk){.keys = c->keys,
                      .head_dim = c->head_dim,
                      .v_dim = c->v_dim,
                      .scale = c->scale,
                      .softcap = c->softcap,
                      .k_rows = pack_for_tile(c, pack->keys, k_rows, PACKED_K, PACKED_K_POINTERS, c->head_dim),
                      .v_rows = pack_for_tile(c, pack->keys, v_rows, PACKED_V, PACKED_V_POINTERS, c->v_dim)};
}

static void check_tile(const test_case *c) {
    static plain_number weight[MAX_KEYS][BA_MAX_LANES], slope[MAX_KEYS][BA_MAX_LANES];
    const ba_attend_family *f = c->s.f;
    const int64_t real = f->real_size, keys = c->keys, padded = ba_round_up(c->head_dim, f->dim_pad);
    const int64_t bytes = f->lanes[WIDE] * ba_round_up(keys, f->key_pad) * f->pack_bytes;
    ba_tile_panel panel = {.panel = open_gradients(c), .width = c->lanes, .lanes = c->queries, .begin = 0, .end = keys};
    panel.panel.dq = place(PANEL_O, c->lanes * padded * real);
    for (int64_t i = 0; i < c->lanes * padded; i++)
        set_element(real_dtype(c), panel.panel.dq, ba_o_place(f, c->lanes, i / c->lanes, i % c->lanes), (double)(i % 7) - 3);
    const void **rows = place_rows(c, Q_ROWS, ROW_POINTERS, &q, 0, c->queries, c->head_dim);
    ba_gradient_tile tile = {.panel = &panel, .panels = 1, .scale = c->scale, .weights = place(SCRATCH, bytes), .slopes = place(SLOPES, bytes)};
    void *packed = place(TILE_ROWS, f->lanes[WIDE] * ba_round_up(c->head_dim, f->lane_block) * real);
    tile.finite_q = f->gradient->pack_tile(packed, rows, c->queries, c->head_dim);
    panel.q_rows = packed;
    rows = place_rows(c, Q_ROWS, ROW_POINTERS, &dout, 0, c->queries, c->v_dim);
    packed = place(PROBE, f->lanes[WIDE] * ba_round_up(c->v_dim, f->lane_block) * real);
    tile.finite_dout = f->gradient->pack_tile(packed, rows, c->queries, c->v_dim);
    panel.dout_rows = packed;
    ba_chunk chunk = open_tile_chunk(c, &tile);
    if (c->mask != NO_MASK) chunk.key_index = memcpy(place_tight(KEY_INDEX, keys * 4, 4), c->key_index, (size_t)keys * 4);
    const ba_prefetch_rows ahead[] = {{.count = 0}, {.rows = chunk.k_rows, .count = keys, .bytes = c->head_dim}};
    tile.ahead = ahead;
    tile.aheads = 2;
    f->gradient->gradient_tile(&tile, &chunk);
    tile.dk_rows = place_sums(c, true, ALPHA, c->head_dim);
    tile.dv_rows = place_sums(c, false, LSE, c->v_dim);
    f->gradient->add_tile(&tile, &chunk);
    require(&tile_records[TILE_DQ], neighbours_untouched(), "wrote beside a buffer", -1, -1);
    for (int64_t i = 0; i < c->queries; i++)
        for (int64_t j = 0; j < keys; j++) {
            weight[j][i] = slope[j][i] = (plain_number){0, 0};
            if (!sees(c, i, j)) continue;
            const plain_number s = score_of(c, i, j), dp = slope_sum(c, i, j), rate = rate_of(c, i, j);
            const double x = s.value - lse[i], w = exp2(x), t = dp.value - delta[i];
            const double error = 2 * weight_error(c, x) + w * fmin(expm1(0.6931471805599453 * s.error), 1e6);
            weight[j][i] = (plain_number){w, error + weight_unit(c) * w};
            slope[j][i] = (plain_number){w * t * rate.value, error * fabs(t) + w * (dp.error + 3 * unit(c) * (fabs(dp.value) + fabs(delta[i]))) +
                                                                 (weight_unit(c) + rate.error) * fabs(w * t) + tiny(c)};
        }
    for (int64_t i = 0; i < c->queries; i++)
        for (int64_t d = 0; d < c->head_dim; d++) {
            const double start = (double)((d * c->lanes + i) % 7) - 3;
            plain_sum sum = {start, fabs(start), 0};
            for (int64_t j = 0; j < keys; j++) {
                if (!sees(c, i, j)) continue;
                sum.value += slope[j][i].value * k.value[j][d];
                sum.size += fabs(slope[j][i].value * k.value[j][d]);
                sum.error += slope[j][i].error * fabs(k.value[j][d]);
            }
            compare_sum(c, &tile_records[TILE_DQ], real_at(c, panel.panel.dq, ba_o_place(f, c->lanes, d, i)), &sum, keys, "dq [dim][lane]", d, i);
        }
    for (int64_t j = 0; j < keys; j++)
        for (int64_t d = 0; d < ba_max(c->head_dim, c->v_dim); d++) {
            const double start = (double)((j + d) % 5) - 2;
            plain_sum dk = {start, fabs(start), 0}, dv_sum = dk;
            for (int64_t i = 0; i < c->queries; i++) {
                if (!sees(c, i, j)) continue;
                add_term(&dk, slope[j][i], q.value[i][d]);
                add_term(&dv_sum, weight[j][i], dout.value[i][d]);
            }
            if (d < c->head_dim) compare_sum(c, &tile_records[TILE_DK], real_at(c, tile.dk_rows[j], d), &dk, c->queries, "dk [key][dim]", j, d);
            if (d < c->v_dim) compare_sum(c, &tile_records[TILE_DV], real_at(c, tile.dv_rows[j], d), &dv_sum, c->queries, "dv [key][dim]", j, d);
        }
}

static void check_tiles(void *context) {
    test_case *c = context;
    static const int64_t dims[] = {1, 2, 7, 16, 17, 33, 64, 72, 80, 128, 576};
    enum { DIMS = sizeof dims / sizeof *dims };
    for (int64_t n = 0; n < DIMS * FILLS; n++) {
        if (!is_drawn()) continue;
        const int64_t dim = dims[n % DIMS];
        make_case(c, (fill)(n / DIMS), (mask)(n % MASKS), 1 + pick(most_queries(c)), 1 + pick(dim > 100 ? 9 : 70), dim, dims[(n * 5 + 3) % DIMS]);
        draw_numbers(c);
        check_tile(c);
    }
    for (int64_t keys = 1; keys <= BA_MAX_CHUNK; keys += keys < 70 ? 1 : 59) {
        if (!is_drawn()) continue;
        make_case(c, (fill)(keys % FILLS), (mask)pick(MASKS), most_queries(c), keys, 1 + pick(6), 1 + pick(6));
        draw_numbers(c);
        check_tile(c);
    }
}

/* ---- Several query tiles as one ------------------------------------------------------------------------------------ */

enum { JOINED = 5, JOINED_KEYS = 100, JOINED_DIM = 144, JOINED_PLACE = BA_MAX_LANES * JOINED_DIM * sizeof(double) };

/* The operands of the panels that are joined. Unlike in the other checks of these kernels, they are not in guarded memory: only bits are compared. */
static struct {
    char q[JOINED][JOINED_PLACE], dout[JOINED][JOINED_PLACE], q_rows[JOINED][JOINED_PLACE], dout_rows[JOINED][JOINED_PLACE];
    char bias[JOINED][JOINED_KEYS * BA_MAX_LANES * sizeof(double)];
    double lse[JOINED][BA_MAX_LANES], delta[JOINED][BA_MAX_LANES];
    int32_t lo[JOINED][BA_MAX_LANES], hi[JOINED][BA_MAX_LANES];
    ba_tile_panel panel[JOINED];
    bool finite_q[JOINED], finite_dout[JOINED];
} joined __attribute__((aligned(BA_ALIGN)));

typedef struct joined_sums {
    char dq[JOINED][JOINED_PLACE], dk[JOINED_KEYS * JOINED_DIM * sizeof(double)], dv[JOINED_KEYS * JOINED_DIM * sizeof(double)];
} joined_sums;
static joined_sums together __attribute__((aligned(BA_ALIGN))), one_by_one __attribute__((aligned(BA_ALIGN)));

/* Draws a panel of some of the case's queries, wide or narrow, which sees all keys, a part of them, or none. */
static void draw_joined_panel(const test_case *c, int n, const void *const *q_rows, const void *const *dout_rows) {
    const ba_attend_family *f = c->s.f;
    const int variant = (int)pick(2);
    const int64_t width = f->lanes[variant], lanes = 1 + pick(ba_min(width, c->queries)), first = pick(c->queries - lanes + 1);
    ba_tile_panel *panel = &joined.panel[n];
    *panel = (ba_tile_panel){.width = width, .lanes = lanes, .begin = 0, .end = c->keys};
    f->pack->queries[variant](joined.q[n], q_rows + first, lanes, c->head_dim, c->scale);
    f->pack->queries[variant](joined.dout[n], dout_rows + first, lanes, c->v_dim, c->scale);
    joined.finite_q[n] = f->gradient->pack_tile(joined.q_rows[n], q_rows + first, lanes, c->head_dim);
    joined.finite_dout[n] = f->gradient->pack_tile(joined.dout_rows[n], dout_rows + first, lanes, c->v_dim);
    for (int64_t i = 0; i < width; i++) {
        set_element(real_dtype(c), joined.lse[n], i, i < lanes ? lse[first + i] : 0);
        set_element(real_dtype(c), joined.delta[n], i, i < lanes ? delta[first + i] : 0);
    }
    panel->panel = (ba_gradient_panel){.q = joined.q[n], .dout = joined.dout[n], .lse = joined.lse[n], .delta = joined.delta[n]};
    panel->q_rows = joined.q_rows[n];
    panel->dout_rows = joined.dout_rows[n];
    if (pick(3)) { /* bounds for each lane; no lane sees keys outside [begin, end) */
        panel->begin = pick(c->keys);
        panel->end = panel->begin + pick(c->keys - panel->begin + 1);
        const int32_t least = c->key_index[panel->begin], most = panel->end ? c->key_index[panel->end - 1] + 1 : 0;
        for (int64_t i = 0; i < width; i++) {
            joined.lo[n][i] = i < lanes && pick(2) ? c->key_index[pick(c->keys)] : least;
            joined.lo[n][i] = i < lanes ? ba_max(joined.lo[n][i], least) : 0;
            joined.hi[n][i] = i < lanes ? most : INT32_MAX;
        }
        panel->panel.lo = joined.lo[n];
        panel->panel.hi = joined.hi[n];
    }
    if (pick(4)) return;
    for (int64_t i = 0; i < c->keys * width; i++) set_element(real_dtype(c), joined.bias[n], i, pick(4) ? uniform() : -INFINITY);
    panel->panel.bias = (ba_bias){joined.bias[n], true};
}

/* Sets the numbers that sums start from. The rows are evenly spaced or not. */
static void start_rows(const test_case *c, char *data, void **rows, int64_t dim, bool even) {
    const int64_t room = ba_round_up(dim, BA_PACK_PAD);
    for (int64_t j = 0; j < c->keys; j++) {
        rows[j] = data + (even || j % 3 ? j : c->keys - 1 - (c->keys - 1) % 3 - j) * room * c->s.f->real_size;
        for (int64_t d = 0; d < room; d++) set_element(real_dtype(c), rows[j], d, (double)((j + d) % 5) - 2);
    }
}

/* Runs the kernels over panels [first, end) as one tile. */
static void run_joined(const test_case *c, joined_sums *to, ba_gradient_tile tile, const ba_chunk *chunk, int first, int end) {
    for (int n = first; n < end; n++) {
        joined.panel[n].panel.dq = to->dq[n];
        tile.finite_q &= joined.finite_q[n];
        tile.finite_dout &= joined.finite_dout[n];
    }
    const int64_t bytes = (end - first) * c->s.f->lanes[WIDE] * ba_round_up(c->keys, c->s.f->key_pad) * c->s.f->pack_bytes;
    tile.panel = joined.panel + first;
    tile.panels = end - first;
    tile.weights = place(SCRATCH, bytes);
    tile.slopes = place(SLOPES, bytes);
    c->s.f->gradient->gradient_tile(&tile, chunk);
    c->s.f->gradient->add_tile(&tile, chunk);
}

static void same_sums(const test_case *c, record *r, void *a, void *b, int64_t n, const char *what, int64_t row) {
    for (int64_t i = 0; i < n; i++) {
        const double x = real_at(c, a, i), y = real_at(c, b, i);
        require(r, (x == y && signbit(x) == signbit(y)) || (isnan(x) && isnan(y)), what, row, i);
    }
}

/* Promise of families with joins_tiles: panels of several query tiles get the same bits in one tile as in tiles of their own, one after another. */
static void check_joined(const test_case *c, record *r) {
    const ba_attend_family *f = c->s.f;
    const int panels = 2 + (int)pick(JOINED - 1);
    void *dk_rows[JOINED_KEYS], *dv_rows[JOINED_KEYS];
    const void **q_rows = place_rows(c, Q_ROWS, ROW_POINTERS, &q, 0, c->queries, c->head_dim);
    const void **dout_rows = place_rows(c, OUT_ROWS, ROW_LANES, &dout, 0, c->queries, c->v_dim);
    for (int n = 0; n < panels; n++) draw_joined_panel(c, n, q_rows, dout_rows);
    ba_gradient_tile tile = {.scale = c->scale, .finite_q = true, .finite_dout = true, .dk_rows = dk_rows, .dv_rows = dv_rows};
    ba_chunk chunk = open_tile_chunk(c, &tile);
    chunk.key_index = c->key_index;
    const int64_t dq_reals = f->lanes[WIDE] * ba_round_up(c->head_dim, f->dim_pad);
    const bool even = pick(2);
    for (int apart = 0; apart < 2; apart++) {
        joined_sums *to = apart ? &one_by_one : &together;
        for (int n = 0; n < panels; n++)
            for (int64_t i = 0; i < dq_reals; i++) set_element(real_dtype(c), to->dq[n], i, (double)(i % 7) - 3);
        start_rows(c, to->dk, dk_rows, c->head_dim, even);
        start_rows(c, to->dv, dv_rows, c->v_dim, even);
        for (int n = 0; n < (apart ? panels : 1); n++) run_joined(c, to, tile, &chunk, n, apart ? n + 1 : panels);
    }
    for (int n = 0; n < panels; n++)
        same_sums(c, r, together.dq[n], one_by_one.dq[n], joined.panel[n].width * ba_round_up(c->head_dim, f->dim_pad), "dq [panel][.]", n);
    same_sums(c, r, together.dk, one_by_one.dk, c->keys * ba_round_up(c->head_dim, BA_PACK_PAD), "dk [.][.]", 0);
    same_sums(c, r, together.dv, one_by_one.dv, c->keys * ba_round_up(c->v_dim, BA_PACK_PAD), "dv [.][.]", 0);
}

static void check_joined_tiles(void *context) {
    test_case *c = context;
    static const int64_t dims[] = {1, 17, 33, 64, 80, 128};
    enum { DIMS = sizeof dims / sizeof *dims };
    for (int64_t n = 0; n < 4 * DIMS * FILLS; n++) {
        if (!is_drawn()) continue;
        make_case(c, (fill)(n / DIMS % FILLS), (mask)pick(MASKS), 1 + pick(most_queries(c)), 1 + pick(JOINED_KEYS), dims[n % DIMS], dims[pick(DIMS)]);
        draw_numbers(c);
        check_joined(c, &joined_record);
    }
}

/* ---- Products of rows, and storing rows --------------------------------------------------------------------------- */

static void check_dots(test_case *c, record *r, int64_t dim) {
    const ba_attend_family *f = c->s.f;
    make_case(c, (fill)pick(FILLS), NO_MASK, 1 + pick(f->lanes[WIDE]), 1, dim, 1);
    for (int64_t i = 0; i < c->queries; i++)
        for (int64_t d = 0; d < dim; d++) set_operand(c, &dout, i, d, random_like(c));
    const void **a = place_rows(c, Q_ROWS, ROW_POINTERS, &q, 0, c->queries, dim), **b = place_rows(c, V_ROWS, V_POINTERS, &dout, 0, c->queries, dim);
    void *sums = place_tight(LSE, c->queries * f->real_size, f->real_size);
    f->gradient->dot_rows(sums, a, b, c->queries, dim);
    require(r, neighbours_untouched(), "wrote beside a buffer", -1, -1);
    for (int64_t i = 0; i < c->queries; i++) {
        double sum = 0, size = 0;
        for (int64_t d = 0; d < dim; d++) {
            sum += q.value[i][d] * dout.value[i][d];
            size += fabs(q.value[i][d] * dout.value[i][d]);
        }
        compare(r, real_at(c, sums, i), sum, sum_error(c, dim) * size + tiny(c) * (double)dim, "sum [.][lane]", 0, i);
    }
}

static void check_store(test_case *c, record *r, int64_t dim) {
    static const double odd[] = {0, NAN, INFINITY, -INFINITY, 1e-45, 6e-8, 65519, 65520, 3.4e38, -1.00390625, 1.01171875};
    make_case(c, RANDOM, NO_MASK, 1, 1, 1, 1);
    void *from = place_tight(TILE_ROWS, dim * c->s.f->real_size, c->s.f->real_size), *to = place_row(OUT_ROWS, 0, dim * ba_dtype_size(c->s.dtype));
    for (int64_t d = 0; d < dim; d++) set_element(real_dtype(c), from, d, pick(3) ? uniform() * exp2((double)pick(40) - 30) : odd[pick(11)]);
    c->s.f->gradient->store_row(to, from, dim);
    require(r, neighbours_untouched(), "wrote beside a buffer", -1, -1);
    for (int64_t d = 0; d < dim; d++) {
        unsigned char rounded[8];
        compare(r, get_element(c->s.dtype, to, d), set_element(c->s.dtype, rounded, 0, real_at(c, from, d)), 0, "stored [.][dim]", 0, d);
    }
}

enum { ADD_ROWS, PACK_TILE, DOT_ROWS, STORE_ROW, OTHERS };
static record others[OTHERS];

static void check_others(void *context) {
    test_case *c = context;
    static const int64_t dims[] = {1, 3, 8, 15, 16, 17, 31, 32, 33, 48, 64, 72, 80, 96, 128, 192, 255, 576};
    for (size_t i = 0; i < sizeof dims / sizeof *dims; i++) {
        if (!is_drawn()) continue;
        for (int careful = 0; careful < 2; careful++) check_add_rows(c, &others[ADD_ROWS], &others[PACK_TILE], 1 + pick(70), dims[i], careful);
        check_dots(c, &others[DOT_ROWS], dims[i]);
        check_store(c, &others[STORE_ROW], dims[i]);
    }
    for (int64_t keys = 1; keys <= BA_MAX_CHUNK; keys += keys < 80 ? 1 : 61)
        if (is_drawn()) check_add_rows(c, &others[ADD_ROWS], &others[PACK_TILE], keys, 1 + pick(40), false);
}

void check_backward(const subject *s) {
    static const char *const names[PARTS] = {"gradient: weights", "gradient: slopes", "gradient: dq", "promise: unseen keys"};
    static const char *const other_names[OTHERS] = {"add_rows", "pack_tile", "dot_rows", "store_row"};
    static test_case c;
    static const char *const tile_names[TILE_PARTS] = {"gradient_tile: dq", "add_tile: dk", "add_tile: dv"};
    for (int variant = WIDE; variant <= NARROW && s->f->gradient && s->f->gradient->gradient_tile; variant++) {
        for (int i = 0; i < TILE_PARTS; i++) tile_records[i] = (record){.name = tile_names[i]};
        c = (test_case){.s = *s, .variant = variant};
        guarded_run(check_tiles, &c, &tile_records[TILE_DQ]);
        report(s->name, variant == WIDE ? "wide" : "narrow", tile_records, TILE_PARTS);
    }
    if (s->f->gradient && s->f->joins_tiles) {
        joined_record = (record){.name = "promise: joined tiles"};
        c = (test_case){.s = *s, .variant = WIDE};
        guarded_run(check_joined_tiles, &c, &joined_record);
        report(s->name, "", &joined_record, 1);
    }
    if (!is_vector(s->f)) return; /* the family has no kernels for gradients by panel */
    for (int variant = WIDE; variant <= NARROW; variant++) {
        for (int i = 0; i < PARTS; i++) gradient_records[i] = (record){.name = names[i]};
        c = (test_case){.s = *s, .variant = variant};
        guarded_run(check_panels, &c, &gradient_records[GRADIENT_DQ]);
        report(s->name, variant == WIDE ? "wide" : "narrow", gradient_records, PARTS);
    }
    for (int i = 0; i < OTHERS; i++) others[i] = (record){.name = other_names[i]};
    c = (test_case){.s = *s, .variant = WIDE};
    guarded_run(check_others, &c, &others[ADD_ROWS]);
    report(s->name, "", others, OTHERS);
}
