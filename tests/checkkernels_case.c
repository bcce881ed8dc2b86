/* The cases: their inputs are drawn, placed in guarded memory, and attended in plain arithmetic in double precision. */
#include "checkkernels.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

/* ---- Inputs ------------------------------------------------------------------------------------------------------- */

static const char *const fill_names[FILLS] = {"random", "spread", "tiny", "huge", "equal", "special"};
static const char *const mask_names[MASKS] = {"none", "all seen", "ranges", "stairs", "none seen"};

operand q, k, v;

ba_dtype real_dtype(const test_case *c) { return real_of(c->s.f); }
double real_at(const test_case *c, const void *data, int64_t index) { return get_element(real_dtype(c), data, index); }
static ba_dtype dtype_of(const test_case *c, const operand *x) { return x == &q ? c->s.dtype : c->s.kv_dtype; }

bool sees(const test_case *c, int64_t lane, int64_t key) {
    if (c->biased && c->bias[key][lane] == -INFINITY) return false;
    return c->mask == NO_MASK || (c->lo[lane] <= c->key_index[key] && c->key_index[key] < c->hi[lane]);
}

void set_operand(const test_case *c, operand *x, int64_t row, int64_t d, double value) {
    x->value[row][d] = set_element(dtype_of(c, x), x->raw[row], d, value);
}

static double draw(const test_case *c, const operand *x) {
    const ba_dtype dtype = dtype_of(c, x);
    if (dtype == BA_INT8) return c->fill == EXACT_HUGE ? (double)(pick(5) - 2) * 32 : c->fill == TINY ? (double)pick(3) - 1 : uniform() * 130;
    switch (c->fill) {
    case SPREAD: return uniform() * (x == &v && dtype != BA_FLOAT8_E4M3 ? 1000 : 12);
    case TINY: return (double)(pick(2047) - 1023) * smallest_of(dtype);
    case EXACT_HUGE: /* small integers times a power of two: every sum is exact, and all weights are 0 or 1 */
        switch (dtype) {
        case BA_FLOAT64: return (double)(pick(5) - 2) * (x == &v ? 0x1p900 : 0x1p400);
        case BA_FLOAT16: return (double)(pick(5) - 2) * (x == &v ? 0x1p13 : 0x1p12);
        case BA_FLOAT8_E4M3: return (double)(pick(5) - 2) * 0x1p7;
        default: return (double)(pick(5) - 2) * (x == &v ? 0x1p100 : 0x1p55);
        }
    case EQUAL: return x == &v ? -1.3 : 0.7;
    default: return pick(8) ? uniform() * 2 : 0;
    }
}

const double specials[3] = {NAN, INFINITY, -INFINITY};

static void fill_operand(const test_case *c, operand *x, int64_t rows, int64_t dim) {
    for (int64_t i = 0; i < rows; i++)
        for (int64_t d = 0; d < dim; d++) set_operand(c, x, i, d, draw(c, x));
    for (int n = 0; c->fill == SPECIAL && rows && n < 2; n++)
        if (pick(2)) set_operand(c, x, pick(rows), pick(dim), specials[pick(3)]);
}

void draw_range(test_case *c, int64_t lane) {
    const int32_t first = c->key_index[0], span = c->key_index[c->keys - 1] - first + 1;
    int32_t lo = INT32_MIN, hi = INT32_MAX;
    if (c->mask == RANGES) {
        if (pick(8)) lo = first - 2 + (int32_t)pick(span + 2);
        if (pick(8)) hi = ba_max(lo, first - 2) + (int32_t)pick(span + 3); /* some ranges are empty */
    } else if (c->mask == STAIRS) {                                        /* the first lanes see no key, and later lanes see more and more keys */
        lo = 0;
        hi = first + (int32_t)((lane - 2) * ba_max(1, span / c->lanes));
    } else if (c->mask == NONE_SEEN) {
        if (pick(2)) hi = first;
        else lo = first + span;
    }
    c->lo[lane] = lo;
    c->hi[lane] = hi;
}

int64_t dim_at(int64_t i) {
    static const int64_t long_dims[DIMS - SHORT_DIMS] = {48, 64, 80, 96, 128, 192, 255, 576};
    return i < SHORT_DIMS ? i + 1 : long_dims[i - SHORT_DIMS];
}

bool in_rows(const test_case *c) { return c->variant == FEW || c->variant == ROUTED; }
int64_t most_queries(const test_case *c) {
    return c->variant == FEW ? BA_FEW_QUERIES : c->variant == ROUTED ? BA_MAX_LANES : c->s.f->lanes[c->variant];
}

static void describe(const test_case *c) {
    snprintf(case_text, sizeof case_text,
             "queries=%d keys=%d head_dim=%d v_dim=%d fill=%s mask=%s scale=%.9g softcap=%g scaled=%d biased=%d key_index[0]=%d", (int)c->queries,
             (int)c->keys, (int)c->head_dim, (int)c->v_dim, fill_names[c->fill], mask_names[c->mask], c->scale, c->softcap, c->scaled, c->biased,
             (int)c->key_index[0]);
}

void set_variant(test_case *c, int variant, int64_t queries) {
    c->variant = variant;
    c->lanes = in_rows(c) ? queries : c->s.f->lanes[variant];
    c->queries = queries;
}

void drop_options(test_case *c) {
    c->softcap = 0;
    c->scaled = false;
    c->biased = false;
}

/* Draws biases for all lanes: numbers in log2 units, and -inf. If sums must be exact, all numbers are 0. */
static void draw_bias(test_case *c, bool exact) {
    c->biased = c->variant != ROUTED && pick(4) == 0;
    const bool hides = pick(3) > 0;
    for (int64_t j = 0; c->biased && j < c->keys; j++)
        for (int64_t i = 0; i < BA_MAX_LANES; i++)
            c->bias[j][i] = hides && pick(4) == 0 ? -INFINITY : exact ? 0 : (float)(uniform() * (pick(16) ? 4 : 100));
}

void make_case(test_case *c, fill fill, mask mask, int64_t queries, int64_t keys, int64_t head_dim, int64_t v_dim) {
    c->fill = fill;
    c->mask = mask;
    c->keys = keys;
    c->head_dim = head_dim;
    c->v_dim = v_dim;
    c->scratch_fill = 0xff;
    set_variant(c, c->variant, queries);
    const bool exact = fill == EXACT_HUGE || fill == SPECIAL;
    const double scales[] = {1, 0.125, 1.4426950408889634 / sqrt((double)head_dim), -0.3, 0, 0.7};
    c->scale = exact ? 0.125 : scales[pick(6)];
    c->softcap = pick(4) ? 0 : pick(3) ? pick(2) ? 8 : 50 : 1e6;
    const bool packs_scaled = c->s.pack_k && c->s.pack_v && c->s.pack_bytes == c->s.f->real_size && c->s.f->key_pad == 1;
    c->scaled =
        (c->variant == FEW || (c->variant != ROUTED && (packs_scaled || c->s.f->takes_scales))) && pick(4) >= (c->s.dtype == c->s.kv_dtype ? 3 : 1);
    int64_t index = pick(4) ? pick(1000) : INT32_MAX - 4 * MAX_KEYS;
    for (int64_t j = 0; j < keys; j++) {
        c->key_index[j] = (int32_t)(index += 1 + (pick(4) == 0 ? pick(3) : 0));
        c->k_scale[j] = (pick(16) ? 1 : -1) * (exact ? 0.5f : (float)(0.02 + 0.01 * uniform()));
        c->v_scale[j] = (pick(16) ? 1 : -1) * (exact ? 0.25f : (float)(0.02 + 0.01 * uniform()));
    }
    for (int64_t i = 0; i < c->lanes; i++) draw_range(c, i);
    draw_bias(c, exact);
    fill_operand(c, &q, queries, head_dim);
    fill_operand(c, &k, keys, head_dim);
    fill_operand(c, &v, keys, v_dim);
    describe(c);
    flip_side();
    forget_places();
}

/* ---- Operands in guarded memory ----------------------------------------------------------------------------------- */

const void **place_rows(const test_case *c, row_pool pool, buffer pointers, const operand *x, int64_t first, int64_t rows, int64_t dim) {
    const int64_t bytes = dim * ba_dtype_size(dtype_of(c, x));
    const void **row = place_tight(pointers, rows * (int64_t)sizeof *row, sizeof *row);
    for (int64_t i = 0; i < rows; i++) row[i] = memcpy(place_row(pool, i, bytes), x->raw[first + i], (size_t)bytes);
    return row;
}

/* Bytes per element of the packed rows of variant ROUTED. */
static int64_t row_element(const test_case *c) {
    return c->s.f->routed && c->s.f->routed->pack_queries ? c->s.f->real_size : ba_dtype_size(c->s.dtype);
}

static const void **place_packed(const test_case *c, ba_pack_rows_fn pack, buffer packed, buffer pointers, const void **rows, const float *scales,
                                 int64_t keys, int64_t dim) {
    const void **row = place_tight(pointers, keys * (int64_t)sizeof *row, sizeof *row);
    const bool in_rows = c->variant == ROUTED;
    const int64_t room = ba_round_up(keys, in_rows ? BA_ROUTED_KEYS : c->s.f->key_pad) * ba_round_up(dim, c->s.f->dim_pad);
    char *to = place(packed, room * (in_rows ? row_element(c) : c->s.pack_bytes));
    if (c->s.widen && pack != c->s.widen) { /* some groups at a time, as drivers do */
        static const void *wide[BA_MAX_CHUNK];
        const int64_t step = c->s.f->key_pad * (1 + pick(4)), row_bytes = ba_round_up(dim, c->s.f->dim_pad) * c->s.pack_bytes;
        void *wide_rows = place(WIDE_ROWS, ba_min(step, keys) * ba_round_up(dim, BA_PACK_PAD) * c->s.pack_bytes);
        for (int64_t j = 0; j < keys; j += step) {
            const int64_t some = ba_min(step, keys - j);
            c->s.widen(wide_rows, wide, rows + j, NULL, some, dim);
            pack(to + j * row_bytes, row + j, wide, NULL, some, dim);
        }
        return row;
    }
    pack(to, row, rows, scales, keys, dim);
    return row;
}

static void *place_copy(buffer which, const void *data, int64_t n, int64_t element) {
    return memcpy(place_tight(which, n * element, element), data, (size_t)(n * element));
}

int64_t o_stride(const test_case *c) { return in_rows(c) ? BA_FEW_PAD(c->v_dim) : 1; }
int64_t o_index(const test_case *c, int64_t d, int64_t lane) { return in_rows(c) ? lane * o_stride(c) + d : ba_o_place(c->s.f, c->lanes, d, lane); }

ba_panel empty_state(const test_case *c, buffer o, buffer m, buffer l) {
    const int64_t real = c->s.f->real_size, o_bytes = (in_rows(c) ? BA_FEW_PAD(c->v_dim) : ba_round_up(c->v_dim, c->s.f->dim_pad)) * c->lanes * real;
    const int64_t lanes = c->variant == FEW ? BA_FEW_QUERIES : c->lanes;
    ba_panel panel = {.o = place(o, o_bytes), .m = place(m, lanes * real), .l = place(l, lanes * real)};
    memset(panel.o, 0, (size_t)o_bytes);
    memset(panel.l, 0, (size_t)(lanes * real));
    for (int64_t i = 0; i < lanes; i++) set_element(real_dtype(c), panel.m, i, -largest_of(real_dtype(c)));
    return panel;
}

static int64_t o_bytes_of(const test_case *c) { return ba_round_up(c->v_dim, c->s.f->dim_pad) * c->lanes * c->s.f->real_size; }

void refresh(const test_case *c, ba_panel *panel) {
    if (in_rows(c) || !c->s.f->takes_fresh || pick(4) == 0) return;
    memset(panel->o, 0xff, (size_t)o_bytes_of(c)); /* NaN */
    panel->fresh = true;
}

void close_fresh(const test_case *c, ba_panel *panel) {
    if (panel->fresh) memset(panel->o, 0, (size_t)o_bytes_of(c));
    panel->fresh = false;
}

ba_panel open_panel(const test_case *c) {
    const ba_attend_family *f = c->s.f;
    ba_panel panel = empty_state(c, PANEL_O, PANEL_M, PANEL_L);
    const void **rows = place_rows(c, Q_ROWS, ROW_POINTERS, &q, 0, c->queries, c->head_dim); /* the array of pointers touches a guard page */
    if (c->variant == FEW) {
        panel.q = place(PANEL_Q, BA_FEW_QUERIES * ba_round_up(c->head_dim, f->dim_pad) * f->q_bytes);
        const ba_order_few_fn order_few = c->s.cache ? c->s.cache->order_few : f->few->order_queries;
        f->few->pack_queries(panel.q, rows, c->queries, c->head_dim, c->scale);
        if (order_few) order_few(panel.q, c->queries, c->head_dim);
    } else if (c->variant == ROUTED) {
        const int64_t bytes = ba_round_up(c->head_dim, f->dim_pad) * row_element(c);
        const void *unused[BA_MAX_LANES];
        panel.q = memset(place(PANEL_Q, c->queries * bytes), 0, (size_t)(c->queries * bytes));
        if (f->routed->pack_queries) f->routed->pack_queries(panel.q, unused, rows, NULL, c->queries, c->head_dim);
        for (int64_t i = 0; !f->routed->pack_queries && i < c->queries; i++)
            memcpy((char *)panel.q + i * bytes, rows[i], (size_t)(c->head_dim * row_element(c)));
    } else {
        panel.q = place(PANEL_Q, c->lanes * ba_round_up(c->head_dim, f->dim_pad) * f->q_bytes);
        f->pack->queries[c->variant](panel.q, rows, c->queries, c->head_dim, c->scale);
        panel.lanes = c->named_lanes;
    }
    if (c->mask == NO_MASK) return panel;
    int32_t lo[BA_MAX_LANES] = {0}, hi[BA_MAX_LANES]; /* places of few queries that hold no query see all keys */
    for (int i = 0; i < BA_MAX_LANES; i++) hi[i] = INT32_MAX;
    memcpy(lo, c->lo, (size_t)c->lanes * sizeof *lo);
    memcpy(hi, c->hi, (size_t)c->lanes * sizeof *hi);
    panel.lo = place_copy(PANEL_LO, lo, c->variant == FEW ? BA_FEW_QUERIES : c->lanes, sizeof *lo);
    panel.hi = place_copy(PANEL_HI, hi, c->variant == FEW ? BA_FEW_QUERIES : c->lanes, sizeof *hi);
    return panel;
}

ba_bias place_bias(const test_case *c, int64_t first, int64_t keys) {
    if (!c->biased) return (ba_bias){NULL, false};
    const int64_t stride = BA_FEW_PAD(keys);
    void *numbers = place(BIAS, (c->variant == FEW ? stride : keys) * c->lanes * c->s.f->real_size);
    bool hides = false;
    for (int64_t j = 0; j < keys; j++)
        for (int64_t i = 0; i < c->lanes; i++) {
            const double number = (double)c->bias[first + j][i];
            set_element(real_dtype(c), numbers, c->variant == FEW ? i * stride + j : j * c->lanes + i, number);
            hides |= number == -INFINITY;
        }
    return (ba_bias){numbers, hides};
}

ba_chunk open_chunk(const test_case *c, int64_t first, int64_t keys) { return open_chunk_of(c, first, keys, c->head_dim, c->v_dim); }

ba_chunk open_chunk_of(const test_case *c, int64_t first, int64_t keys, int64_t k_dim, int64_t v_dim) {
    const subject *s = &c->s;
    ba_chunk chunk = {.keys = keys, .head_dim = c->head_dim, .v_dim = c->v_dim, .scale = c->scale, .softcap = c->softcap, .place = first};
    const void **k_rows = place_rows(c, K_ROWS, K_POINTERS, &k, first, keys, k_dim);
    const void **v_rows = place_rows(c, V_ROWS, V_POINTERS, &v, first, keys, v_dim);
    const float *k_scale = c->scaled ? place_copy(K_SCALES, c->k_scale + first, keys, sizeof *k_scale) : NULL;
    const float *v_scale = c->scaled ? place_copy(V_SCALES, c->v_scale + first, keys, sizeof *v_scale) : NULL;
    const bool packs = c->variant != FEW;
    const ba_pack_rows_fn pack_k = c->variant == ROUTED ? s->f->routed->pack_keys : s->pack_k,
                          pack_v = c->variant == ROUTED ? s->f->routed->pack_values : s->pack_v;
    chunk.k_rows = packs && pack_k ? place_packed(c, pack_k, PACKED_K, PACKED_K_POINTERS, k_rows, k_scale, keys, c->head_dim) : k_rows;
    chunk.v_rows = packs && pack_v ? place_packed(c, pack_v, PACKED_V, PACKED_V_POINTERS, v_rows, v_scale, keys, c->v_dim) : v_rows;
    if (!packs || s->f->takes_scales) {
        chunk.k_scale = k_scale;
        chunk.v_scale = v_scale;
    }
    const int64_t bytes = packs ? keys * s->f->scratch_per_key : BA_FEW_SCRATCH(keys, c->v_dim) * s->f->real_size;
    chunk.scratch = memset(place(SCRATCH, bytes), c->scratch_fill, (size_t)bytes);
    chunk.bias = place_bias(c, first, keys);
    if (c->mask != NO_MASK) chunk.key_index = place_copy(KEY_INDEX, c->key_index + first, keys, sizeof *c->key_index);
    return chunk;
}

void attend(const test_case *c, ba_panel *panel, const ba_chunk *chunk) {
    if (c->variant == FEW) {
        c->s.few(panel, c->queries, chunk, 1);
    } else if (c->variant == ROUTED) {
        int32_t lanes[BA_MAX_LANES]; /* in reverse order */
        for (int64_t i = 0; i < c->queries; i++) lanes[i] = (int32_t)(c->queries - 1 - i);
        c->s.f->routed->attend(panel, place_copy(ROW_LANES, lanes, c->queries, sizeof *lanes), c->queries, chunk);
    } else c->s.f->panel->attend[c->variant](panel, chunk);
    panel->fresh = false;
}

void **place_out_rows(const test_case *c) { /* one row for each query, and none for unused lanes */
    void **rows = place_tight(ROW_POINTERS, c->queries * (int64_t)sizeof *rows, sizeof *rows);
    for (int64_t i = 0; i < c->queries; i++) rows[i] = place_row(OUT_ROWS, i, c->v_dim * ba_dtype_size(c->s.dtype));
    return rows;
}

/* ---- The results of plain arithmetic ------------------------------------------------------------------------------ */

/* For double, twice the unit: plain arithmetic rounds, too. */
double unit(const test_case *c) { return unit_of(real_dtype(c)) * (real_dtype(c) == BA_FLOAT64 ? 2 : 1); }
/* Whether the kernel for few queries packs queries in a format of its own. A cache's kernels take queries that are packed as reals. */
bool few_are_own(const test_case *c) { return c->variant == FEW && !c->s.cache && ba_tuning_at(c->s.f->isa)->few_least_heads[c->s.kv_dtype] > 0; }
double tiny(const test_case *c) {
    return (c->variant != FEW || few_are_own(c)) && rounding_of(c->s.f)->flushes ? 0x1p-126 : smallest_of(real_dtype(c));
}
/* The relative errors of weights when they multiply values, and of exp2, in addition to the roundings of reals. A cache's kernels for few queries
 * compute in reals. */
double weight_unit(const test_case *c) {
    return c->variant != FEW ? rounding_of(c->s.f)->weight_unit : few_are_own(c) ? rounding_of(c->s.f)->few_weight_unit : 0;
}
double exp_unit(const test_case *c) { return c->variant != FEW ? rounding_of(c->s.f)->exp_unit : 0; }

/* In any order of summation, a sum of n terms is wrong by at most n - 1 units of the sum of the terms' absolute values. Each term may be wrong by a
 * few more units. */
double sum_error(const test_case *c, int64_t n) { return (double)(n + 5) * unit(c); }

static double k_factor(const test_case *c, int64_t key) { return c->scaled ? c->k_scale[key] : 1; }
double v_factor(const test_case *c, int64_t key) { return c->scaled ? c->v_scale[key] : 1; }

/* The score before the softcap. */
static plain_number product_of(const test_case *c, int64_t lane, int64_t key) {
    double sum = 0, size = 0, other_size = 0;
    for (int64_t d = 0; d < c->head_dim; d++) {
        const double query =
            lane < c->queries ? q.value[lane][d] * c->scale : 0; /* an unused lane's query is 0, so its score is NaN where the key is not finite */
        const double term = query * k.value[key][d] * k_factor(c, key);
        sum += term;
        size += fabs(term);
        other_size += fabs(k.value[key][d]);
        if (rounding_of(c->s.f)->flushes) other_size += fabs(query) + fabs(c->scale * k.value[key][d]);
    }
    return (plain_number){sum, c->fill == EXACT_HUGE ? 0 : sum_error(c, c->head_dim) * size + tiny(c) * ((double)c->head_dim + other_size)};
}

plain_number score_of(const test_case *c, int64_t lane, int64_t key) {
    plain_number s = product_of(c, lane, key);
    if (c->softcap != 0) {
        s.value = c->softcap * tanh(s.value / c->softcap);
        s.error += fabs(s.value) * 8 * unit(c) + c->softcap * tiny(c); /* the quotient may be below the normal range */
    }
    if (c->biased) {
        s.value += (double)c->bias[key][lane];
        s.error += c->fill == EXACT_HUGE ? 0 : fabs(s.value) * unit(c);
    }
    return s;
}

plain_number rate_of(const test_case *c, int64_t lane, int64_t key) {
    if (c->softcap == 0) return (plain_number){1, 0};
    const plain_number s = product_of(c, lane, key);
    const double t = tanh(s.value / c->softcap);
    return (plain_number){1 - t * t, fmin(2 * fabs(t) * s.error / c->softcap, 2) + 32 * unit(c)}; /* the error of an infinite score is infinite */
}

/* The error of a weight 2^x, where x is a score minus the maximum: the errors of the polynomial and of the subtraction. */
double weight_error(const test_case *c, double x) {
    return exp2(x) * (unit(c) * (4 + fmin(fabs(x), 2000)) + exp_unit(c)) + (c->s.f->real_size == 4 ? 0x1p-126 : 0x1p-1022);
}

/* The largest additional error of a weight that is multiplied by the scale of its value: tile products read a subnormal result as 0. */
static double flushed_weight(const test_case *c) { return c->scaled ? tiny(c) : 0; }

/* Computes the attention of one lane over all keys of the case, and the errors that a kernel's result may have. An error of a score becomes a
 * relative error of its weight, and errors of weights change the weighted mean of the values. */
void attend_plainly(const test_case *c, int64_t lane, plain_row *r) {
    static double weight[MAX_KEYS], slack[MAX_KEYS];
    static int64_t seen[MAX_KEYS];
    static plain_number score[MAX_KEYS];
    int64_t n = 0;
    double top = -largest_of(real_dtype(c)), top_error = 0, sum = 0, sum_slack = 0;
    for (int64_t j = 0; j < c->keys; j++) {
        if (!sees(c, lane, j)) continue;
        seen[n] = j;
        score[n] = score_of(c, lane, j);
        top_error = fmax(top_error, score[n].error);
        if (score[n].value > top) top = score[n].value;
        n++;
    }
    for (int64_t j = 0; j < n; j++) {
        const double x = score[j].value - top;
        weight[j] = exp2(x);
        slack[j] = 2 * weight_error(c, x) + weight[j] * (fmin(expm1(0.6931471805599453 * (score[j].error + top_error)), 1e6) + sum_error(c, n));
        sum += weight[j];
        sum_slack += slack[j];
    }
    r->lse = sum == 0 ? -INFINITY : (top + log2(sum)) * 0.6931471805599453;
    r->lse_error = sum_slack / fmin(sum, 1) + 4 * unit(c) * (fabs(r->lse) + fabs(top)) + top_error;
    for (int64_t d = 0; d < c->v_dim; d++) {
        double total = 0, size = 0, moved = 0;
        for (int64_t j = 0; j < n; j++) {
            const double value = v.value[seen[j]][d] * v_factor(c, seen[j]);
            total += weight[j] * value;
            size += weight[j] * fabs(value);
            moved += slack[j] * fabs(value) + flushed_weight(c) * fabs(v.value[seen[j]][d]);
        }
        r->out[d] = sum == 0 && total == 0 ? 0 : total / sum;
        moved += sum_slack * fabs(r->out[d]) + (sum_error(c, n) + weight_unit(c)) * size + tiny(c) * (double)(n + 5);
        const double error = moved / fmax(sum, 1e-300);
        r->out_error[d] = error + unit_of(c->s.dtype) * (fabs(r->out[d]) + error) + smallest_of(c->s.dtype);
    }
}
