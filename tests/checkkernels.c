/* Checks every kernel that kernels.inc lists against plain arithmetic in double precision.
 *
 *     checkkernels [NAME...]                      checks the kernels whose names contain one of the NAMEs; without NAMEs, all kernels
 *     checkkernels --sample N SEED [NAME...]      checks only one case in N, which SEED draws
 *     checkkernels --bench [NAME...]              times attend, and checks nothing
 *
 * checkkernels_promises.c checks the promises that hold to the bit, checkkernels_backward.c checks the backward pass, checkkernels_case.c makes the
 * cases, and checkkernels_base.c has guarded memory, number formats and the report. */
#define _POSIX_C_SOURCE 200809L /* clock_gettime */
#include "checkkernels.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "core/cpu.h"

/* ---- The kernels -------------------------------------------------------------------------------------------------- */

enum { BA_DTYPE_NUMBERS };

typedef struct listed {
    const char *name;
    const ba_attend_family *family; /* for a cache: the family of the dtype of its queries, float32 or float64 */
    const ba_cache_kernels *cache;
    ba_dtype dtype;
    /* for kernels that prefetch into L2: the kernels that they replace */
    const ba_attend_family *family_into_l1;
    const ba_cache_kernels *cache_into_l1;
} listed;

static const listed list[] = {
#define BA_FAMILY(level, dtype) {"attend_" #dtype "_" #level, &ba_attend_##level##_##dtype, NULL, (ba_dtype)dtype, NULL, NULL},
#define BA_CACHE_OF(level, family, dtype, into_l1)                                                                                                   \
    {"cache_" #dtype "_" #level,                                                                                                                     \
     dtype == float64 ? &ba_attend_portable_float64 : &ba_attend_##family##_float32,                                                                 \
     &ba_cache_##level##_##dtype,                                                                                                                    \
     (ba_dtype)dtype,                                                                                                                                \
     NULL,                                                                                                                                           \
     into_l1},
#define BA_CACHE(level, dtype) BA_CACHE_OF(level, level, dtype, NULL)
#define BA_FAMILY_L2(level, dtype)                                                                                                                   \
    {"attend_" #dtype "_" #level "_l2", &ba_attend_##level##_l2_##dtype, NULL, (ba_dtype)dtype, &ba_attend_##level##_##dtype, NULL},
#define BA_CACHE_L2(level, dtype) BA_CACHE_OF(level##_l2, level, dtype, &ba_cache_##level##_##dtype)
#define BA_PROBE(level)
#include "kernels/kernels.inc"
#undef BA_FAMILY
#undef BA_CACHE_OF
#undef BA_CACHE
#undef BA_FAMILY_L2
#undef BA_CACHE_L2
#undef BA_PROBE
};
static const struct {
    const char *name;
    const ba_probes *probes;
} probe_list[] = {
#define BA_FAMILY(level, dtype)
#define BA_CACHE(level, dtype)
#define BA_FAMILY_L2(level, dtype)
#define BA_CACHE_L2(level, dtype)
#define BA_PROBE(level) {"probe_" #level, &ba_probes_##level},
#include "kernels/kernels.inc"
#undef BA_FAMILY
#undef BA_CACHE
#undef BA_FAMILY_L2
#undef BA_CACHE_L2
#undef BA_PROBE
};
enum { LISTED = sizeof list / sizeof *list, PROBES = sizeof probe_list / sizeof *probe_list };

/* Fails to compile when a table gets a new kernel. Whoever raises the number here adds a check of that kernel. */
#define FUNCTIONS(entry, first) ((sizeof(entry) - offsetof(entry, first)) / sizeof(void (*)(void)))
_Static_assert(FUNCTIONS(ba_pack_kernels, keys) == 10 && FUNCTIONS(ba_panel_kernels, attend) == 18 &&
                   FUNCTIONS(ba_few_kernels, attend) == BA_DTYPE_COUNT + 5 && FUNCTIONS(ba_routed_kernels, attend) == 5 &&
                   FUNCTIONS(ba_gradient_kernels, gradient) == 8 && FUNCTIONS(ba_cache_kernels, pack) == 10 + BA_CELL_DTYPES &&
                   FUNCTIONS(ba_probes, flops) == 3,
               "a kernel that is not checked");

static subject subject_of(const listed *l) {
    const ba_attend_family *f = l->family;
    subject s = {.name = l->name,
                 .f = f,
                 .cache = l->cache,
                 .dtype = l->cache ? real_of(f) : l->dtype,
                 .kv_dtype = l->dtype,
                 .pack_k = l->cache ? l->cache->pack : f->pack->keys,
                 .pack_v = l->cache ? l->cache->pack : f->pack->values,
                 .pack_bytes = l->cache ? f->real_size : f->pack_bytes,
                 .few = l->cache ? l->cache->few : f->few->attend[l->dtype],
                 .cache_into_l1 = l->cache_into_l1};
    if (l->family_into_l1) s.few_into_l1 = l->family_into_l1->few->attend[l->dtype];
    if (l->cache_into_l1) s.few_into_l1 = l->cache_into_l1->few;
    return s;
}

/* Sets `over` to the family's own kernels over a cache of another dtype: the kernel for few queries, if the family has one, and the panel kernels, if
 * they take scales. Returns whether the family has any such kernel. */
static bool subject_over(const listed *l, ba_dtype kv_dtype, subject *over) {
    static char name[80];
    subject s = subject_of(l);
    const ba_cache_kernels *cache = ba_kernels_at(l->family->isa)->cache[kv_dtype];
    if (l->cache || kv_dtype == l->dtype) return false;
    s.few = l->family->few->attend[kv_dtype];
    s.widen =
        l->family->takes_scales && cache && !l->family_into_l1 ? cache->widen : NULL; /* families with prefetches into L2 share their panel kernels */
    if (!s.few && !s.widen) return false;
    if (!s.pack_k) s.pack_k = s.widen;
    snprintf(name, sizeof name, "%s_over_%s", l->name, kv_dtype == BA_INT8 ? "int8" : kv_dtype == BA_FLOAT8_E4M3 ? "float8_e4m3" : "another");
    s.name = name;
    s.kv_dtype = kv_dtype;
    if (l->family_into_l1) s.few_into_l1 = l->family_into_l1->few->attend[kv_dtype];
    *over = s;
    return true;
}

/* Whether `s` holds a family's own kernels over a cache of another dtype. */
static bool is_over(const subject *s) { return s->kv_dtype != s->dtype && !s->cache; }

static const char *const variant_names[VARIANTS] = {"wide", "narrow", "few", "routed"};

record records[KERNELS];

static void clear_records(void) {
    static const char *const names[KERNELS] = {
        [PACK_QUERIES] = "pack_queries",
        [PACK_K] = "pack_k",
        [PACK_V] = "pack_v",
        [PROBABILITIES] = "add_probabilities",
        [SCORES] = "scores",
        [BLOCK_SUMS] = "sum_blocks",
        [JOIN_LANES] = "join_lanes",
        [HEAD_SUMS] = "sum_heads",
        [APPEND_KEYS] = "append_keys",
        [MOVE_BETTER] = "move_better",
        [SOFTMAX] = "softmax",
        [VALUES] = "values",
        [COMPOSED] = "its parts one by one",
        [ATTEND] = "attend",
        [JOIN] = "join",
        [FINISH] = "finish",
        [CHOOSE] = "choose",
        [SUMMARISE] = "summarise",
        [POOL] = "pool",
        [SCORE_HEADS] = "score_heads",
        [QUANTISE] = "magnitude, quantise",
        [FILL_BIAS] = "fill_bias",
        [UNSEEN] = "promise: unseen keys",
        [CUT] = "promise: cut chunks",
        [ALONE] = "promise: lanes alone",
        [TOGETHER] = "together",
    };
    for (int i = 0; i < KERNELS; i++) records[i] = (record){.name = names[i]};
}

/* ---- attend, and its parts one after the other -------------------------------------------------------------------- */

/* The inputs of a part's check: the state before the chunk, and the scores or weights that the part before has computed. */
static double scores[BA_MAX_CHUNK][BA_MAX_LANES], old_o[BA_MAX_HEAD_DIM][BA_MAX_LANES], old_m[BA_MAX_LANES], old_l[BA_MAX_LANES];

static void check_scores(const test_case *c, const ba_chunk *chunk, int64_t first, const void *row_max) {
    for (int64_t i = 0; i < c->lanes; i++) {
        double top = -largest_of(real_dtype(c));
        for (int64_t j = 0; j < chunk->keys; j++) {
            scores[j][i] = real_at(c, chunk->scratch, j * c->lanes + i);
            if (!sees(c, i, first + j)) continue;
            const plain_number want = score_of(c, i, first + j);
            compare(&records[SCORES], scores[j][i], want.value, want.error, "score [key][lane]", j, i);
            if (scores[j][i] > top) top = scores[j][i];
        }
        compare(&records[SCORES], real_at(c, row_max, i), top, 0, "row_max [.][lane]", 0, i);
    }
}

static void check_softmax(const test_case *c, const ba_panel *panel, const ba_chunk *chunk, int64_t first, const void *row_max, const void *alpha) {
    record *r = &records[SOFTMAX];
    for (int64_t i = 0; i < c->lanes; i++) {
        const double m = real_at(c, panel->m, i), shrink = real_at(c, alpha, i), top = real_at(c, row_max, i);
        const bool stands = m == old_m[i];
        compare(r, m, fmax(old_m[i], top), 0, "m [.][lane]", 0, i);
        compare(r, shrink, stands ? 1 : exp2(old_m[i] - m), stands ? 0 : weight_error(c, old_m[i] - m), "alpha [.][lane]", 0, i);
        double sum = old_l[i] * shrink;
        for (int64_t j = 0; j < chunk->keys; j++) {
            const double p = real_at(c, chunk->scratch, j * c->lanes + i), x = sees(c, i, first + j) ? scores[j][i] - m : -INFINITY;
            compare(r, p, exp2(x), x == -INFINITY ? 0 : weight_error(c, x), "weight [key][lane]", j, i);
            sum += scores[j][i] = p;
        }
        compare(r, real_at(c, panel->l, i), sum, sum_error(c, chunk->keys) * sum + tiny(c), "l [.][lane]", 0, i);
    }
}

static void check_values(const test_case *c, const ba_panel *panel, const ba_chunk *chunk, int64_t first, const void *alpha) {
    for (int64_t i = 0; i < c->lanes; i++)
        for (int64_t d = 0; d < c->v_dim; d++) {
            double sum = old_o[d][i] * real_at(c, alpha, i), size = fabs(sum);
            for (int64_t j = 0; j < chunk->keys; j++) {
                if (!sees(c, i, first + j)) continue;
                const double term = scores[j][i] * v.value[first + j][d] * v_factor(c, first + j);
                sum += term;
                size += fabs(term);
            }
            compare(&records[VALUES], real_at(c, panel->o, o_index(c, d, i)), sum,
                    sum_error(c, chunk->keys) * size + tiny(c) * (double)(chunk->keys + 5), "o [dim][lane]", d, i);
        }
}

static void run_parts(const test_case *c, const ba_panel *panel, const ba_chunk *chunk, int64_t first) {
    const ba_attend_family *f = c->s.f;
    void *row_max = place(ROW_MAX, c->lanes * f->real_size), *alpha = place(ALPHA, c->lanes * f->real_size);
    for (int64_t i = 0; i < c->lanes; i++) {
        old_m[i] = real_at(c, panel->m, i);
        old_l[i] = real_at(c, panel->l, i);
        for (int64_t d = 0; d < c->v_dim; d++) old_o[d][i] = real_at(c, panel->o, o_index(c, d, i));
    }
    f->panel->scores[c->variant](panel, chunk, row_max);
    check_scores(c, chunk, first, row_max);
    f->panel->softmax[c->variant](panel, chunk, row_max, alpha);
    check_softmax(c, panel, chunk, first, row_max, alpha);
    f->panel->values[c->variant](panel, chunk, alpha);
    check_values(c, panel, chunk, first, alpha);
}

/* Checks that the numbers of finish_reals, once rounded, have the bits that `finish` has written to `out_rows`. */
static void check_finish_reals(const test_case *c, const ba_panel *panel, void *const *out_rows) {
    static double reals[BA_MAX_LANES][BA_MAX_HEAD_DIM];
    void *rows[BA_MAX_LANES];
    const ba_finish_fn fn = in_rows(c) ? c->s.f->few->finish_reals : c->s.f->pack->finish_reals[c->variant];
    const size_t size = (size_t)ba_dtype_size(c->s.dtype);
    for (int64_t i = 0; i < c->queries; i++) rows[i] = reals[i];
    fn(panel, c->queries, c->v_dim, rows, NULL);
    for (int64_t i = 0; i < c->queries; i++)
        for (int64_t d = 0; d < c->v_dim; d++) {
            const double value = real_at(c, rows[i], d);
            double rounded[1];
            set_element(c->s.dtype, rounded, 0, value);
            if (isnan(value)) require(&records[FINISH], isnan(get_element(c->s.dtype, out_rows[i], d)), "real [dim][lane]", d, i);
            else require(&records[FINISH], memcmp(rounded, (char *)out_rows[i] + d * (int64_t)size, size) == 0, "real [dim][lane]", d, i);
        }
}

static void finish(const test_case *c, const ba_panel *panel, void **out_rows, void *lse) {
    const ba_finish_fn fn = in_rows(c) ? c->s.f->few->finish : c->s.f->pack->finish[c->variant];
    fn(panel, c->queries, c->v_dim, out_rows, lse);
    check_finish_reals(c, panel, out_rows);
    require(&records[FINISH], neighbours_untouched(), "wrote beside a buffer", -1, -1);
}

static void check_end(const test_case *c, const ba_panel *panel, record *r, const plain_row *want) {
    void **rows = place_out_rows(c), *lse = place_tight(LSE, c->queries * c->s.f->real_size, c->s.f->real_size);
    finish(c, panel, rows, lse);
    for (int64_t i = 0; i < c->queries; i++) {
        compare(r, real_at(c, lse, i), want[i].lse, want[i].lse_error, "lse [.][lane]", 0, i);
        for (int64_t d = 0; d < c->v_dim; d++)
            compare(r, get_element(c->s.dtype, rows[i], d), want[i].out[d], want[i].out_error[d], "out [dim][lane]", d, i);
    }
}

/* Runs the case in chunks of chunk_keys keys: with the fused kernel; with its separate parts, if the family has them; and for FEW also as two states
 * that are joined. */
static void check_case(const test_case *c, int64_t chunk_keys) {
    static plain_row want[BA_MAX_LANES];
    for (int64_t i = 0; i < c->queries; i++) attend_plainly(c, i, &want[i]);
    const ba_attend_family *f = c->s.f;
    const bool has_parts = !in_rows(c) && f->panel->scores[c->variant] && f->panel->softmax[c->variant] && f->panel->values[c->variant];
    for (int way = ATTEND; way <= JOIN; way++) {
        const bool by_parts = way == JOIN && has_parts, joined = way == JOIN && c->variant == FEW;
        record *r = &records[by_parts ? COMPOSED : way];
        if (way == JOIN && !by_parts && !joined) continue;
        ba_panel panel = open_panel(c);
        if (!by_parts) refresh(c, &panel);
        ba_panel other = panel;
        if (joined) {
            other = empty_state(c, OTHER_O, OTHER_M, OTHER_L);
            other.q = panel.q;
            other.lo = panel.lo;
            other.hi = panel.hi;
        }
        for (int64_t first = 0; first < c->keys; first += chunk_keys) {
            const ba_chunk chunk = open_chunk(c, first, ba_min(chunk_keys, c->keys - first));
            if (by_parts) run_parts(c, &panel, &chunk, first);
            else attend(c, first && joined ? &other : &panel, &chunk);
            require(r, neighbours_untouched(), "wrote beside a buffer", first, -1);
        }
        if (joined) f->few->join(&panel, &other, c->queries, c->v_dim);
        check_end(c, &panel, r, want);
    }
}

static void check_attend(test_case *c) {
    const int64_t lanes = most_queries(c), step = c->s.f->key_align;
    int64_t n = 0;
    for (int64_t i = 0; i < DIMS; i++) /* every head dim, each with a different v_dim, every fill and every mask */
        for (int fill = 0; fill < FILLS; fill++, n++) {
            if (!is_drawn()) continue;
            const bool is_long = dim_at(i) > 128;
            make_case(c, fill, n % MASKS, 1 + pick(lanes), 1 + pick(is_long ? 9 : 24), dim_at(i),
                      dim_at((i * 29 + 7 * fill) % (is_long ? SHORT_DIMS : DIMS)));
            check_case(c, 1 + pick(c->keys));
        }
    for (int64_t keys = 1; keys <= BA_MAX_CHUNK; n++) { /* every length up to 70, then some larger ones */
        if (is_drawn()) {
            make_case(c, n % FILLS, pick(MASKS), lanes, keys, 1 + pick(6), 1 + pick(6));
            check_case(c, keys);
        }
        keys += keys < 70 || keys == BA_MAX_CHUNK ? 1 : ba_min(31, BA_MAX_CHUNK - keys);
    }
    for (int64_t queries = 1; queries <= lanes; queries++, n++) { /* several chunks in sequence */
        if (!is_drawn()) continue;
        make_case(c, n % FILLS, pick(MASKS), queries, 40 + pick(60), 1 + pick(24), 1 + pick(24));
        check_case(c, ba_round_up(c->keys / 3, step) + step);
    }
    for (int i = 0; i < 12; i++) { /* non-finite numbers in the middle of a chunk, in whole groups of keys that all lanes see */
        if (!is_drawn()) continue;
        make_case(c, SPECIAL, NO_MASK, lanes, 64, 1 + pick(6), 1 + pick(40));
        check_case(c, c->keys);
    }
    if (is_drawn()) {
        make_case(c, RANDOM, STAIRS, lanes, MAX_KEYS, 7, 5);
        check_case(c, BA_MAX_CHUNK);
    }
}

/* ---- Formats ------------------------------------------------------------------------------------------------------ */

/* Makes a case of one key, and one query whose only element is 1: the largest score is the element of K, and the output is V. */
static void make_single(test_case *c, int64_t v_dim) {
    make_case(c, EQUAL, NO_MASK, 1, 1, 1, v_dim);
    c->scale = 1;
    drop_options(c);
    set_operand(c, &q, 0, 0, 1);
}

static double visible_number(const test_case *c, double x) { return fabs(x) < tiny(c) ? 0 : x; }

/* Checks that every bit pattern of K and V is read as the number that it stands for. Where m is the maximum, it equals the element of K, and the
 * weight of V is 1. */
static void check_patterns_in(test_case *c) {
    const int64_t patterns = patterns_of(c->s.kv_dtype), size = ba_dtype_size(c->s.kv_dtype);
    const bool packs = c->variant != FEW && c->s.pack_k;
    const bool is_whole = c->variant != FEW && c->s.f->has_cuts; /* m is an integer near the maximum instead of the maximum */
    make_single(c, 1);
    ba_panel panel = open_panel(c);
    for (int64_t bits = 0; bits < patterns; bits++) {
        if (!is_drawn()) continue;
        memcpy(k.raw[0], &bits, (size_t)size); /* this needs a little-endian machine */
        set_element(real_dtype(c), panel.m, 0, -largest_of(real_dtype(c)));
        set_element(real_dtype(c), panel.l, 0, 0);
        const ba_chunk chunk = open_chunk(c, 0, 1);
        attend(c, &panel, &chunk);
        const double want = visible_number(c, get_element(c->s.kv_dtype, k.raw[0], 0));
        record *r = &records[packs ? PACK_K : ATTEND];
        if (isnan(want)) require(r, isnan(real_at(c, panel.l, 0)), "a NaN that does not show in l [pattern]", bits, -1);
        else if (isfinite(want) && !is_whole) compare(r, real_at(c, panel.m, 0), want, 0, "key [pattern]", bits, -1);
        else if (isfinite(want))
            compare(r, real_at(c, panel.m, 0) + log2(real_at(c, panel.l, 0)), want, 2 * exp_unit(c) + unit(c) * (6 + fabs(want)), "key [pattern]",
                    bits, -1);
    }
    for (int64_t bits = 0; bits < patterns; bits += ba_min(512, patterns)) {
        if (patterns > 512 && !is_drawn()) continue;
        make_single(c, ba_min(512, patterns));
        for (int64_t d = 0; d < c->v_dim; d++) {
            const int64_t pattern = bits + d;
            memcpy(v.raw[0] + d * size, &pattern, (size_t)size);
        }
        panel = open_panel(c);
        const ba_chunk chunk = open_chunk(c, 0, 1);
        attend(c, &panel, &chunk);
        for (int64_t d = 0; d < c->v_dim; d++) {
            const double want = visible_number(c, get_element(c->s.kv_dtype, v.raw[0], d));
            compare(&records[packs ? PACK_V : ATTEND], real_at(c, panel.o, o_index(c, d, 0)) / real_at(c, panel.l, 0), want,
                    (4 * unit(c) + exp_unit(c) + (is_whole ? weight_unit(c) : 0)) * fabs(want) + 2 * tiny(c), "value [pattern]", bits + d, -1);
        }
    }
}

/* The place where the kernels for few queries put element d when they pack and order a query. They take groups of 8, 4, 2 or 1 queries together; in
 * a group, the vectors of its queries alternate. With order_few, the even-numbered elements of every two whole vectors come first. */
static int64_t place_of_few(const test_case *c, int64_t query, int64_t d) {
    const int64_t vector = c->s.f->lanes[1];
    for (int64_t first = 0, together;; first += together) {
        const int64_t left = c->queries - first;
        together = vector >= 16 && left >= 8 ? 8 : vector >= 4 && left >= 4 ? 4 : left >= 2 ? 2 : 1;
        if (query >= first + together) continue;
        const int64_t in_two = d % (2 * vector);
        const bool ordered = (c->s.cache ? c->s.cache->order_few : c->s.f->few->order_queries) && d - in_two + 2 * vector <= c->head_dim;
        const int64_t place = ordered ? d - in_two + in_two % 2 * vector + in_two / 2 : d;
        return first * BA_FEW_PAD(c->head_dim) + place / vector * vector * together + (query - first) * vector + place % vector;
    }
}

/* Checks pack_queries. Queries that are packed for the kernel for few queries are read in place. Packed panels are read by way of `scores`, with
 * unit vectors as keys: each score is then one packed element, in whatever format the family packs. */
static void check_pack_queries(test_case *c) {
    record *r = &records[PACK_QUERIES];
    const int64_t lanes = most_queries(c);
    for (int64_t n = 0; n < 2 * DIMS; n++) {
        if (!is_drawn()) continue;
        make_case(c, n % 2 ? TINY : SPREAD, NO_MASK, 1 + n % lanes, ba_min(dim_at(n / 2), BA_MAX_CHUNK), dim_at(n / 2), 1);
        drop_options(c);
        for (int64_t j = 0; j < c->keys; j++)
            for (int64_t d = 0; d < c->head_dim; d++) set_operand(c, &k, j, d, d == j);
        const ba_panel panel = open_panel(c);
        const ba_chunk chunk = open_chunk(c, 0, c->keys);
        const double *got = NULL;
        if (few_are_own(c)) {
            got = NULL; /* the format is the family's own: only the check of attend can tell whether the packing is right */
        } else if (c->variant == FEW) {
            for (int64_t i = 0; i < c->queries; i++)
                for (int64_t d = 0; d < c->keys; d++) scores[d][i] = real_at(c, panel.q, place_of_few(c, i, d));
            got = scores[0];
        } else if (c->variant != ROUTED && c->s.f->panel->scores[c->variant]) {
            c->s.f->panel->scores[c->variant](&panel, &chunk, place(ROW_MAX, c->lanes * c->s.f->real_size));
            for (int64_t d = 0; d < c->keys; d++)
                for (int64_t i = 0; i < c->lanes; i++) scores[d][i] = real_at(c, chunk.scratch, d * c->lanes + i);
            got = scores[0];
        }
        for (int64_t d = 0; got && d < c->keys; d++)
            for (int64_t i = 0; i < c->lanes; i++) {
                const double want = i < c->queries ? q.value[i][d] * c->scale : 0;
                compare(r, scores[d][i], want, fabs(want) * 3 * unit(c) + (want != 0 ? tiny(c) : 0), "packed query [dim][lane]", d, i);
            }
        require(r, neighbours_untouched(), "wrote beside a buffer", -1, -1);
    }
}

/* Returns number n of a sequence with four numbers for each bit pattern: the pattern's own number, the midpoint to the next pattern's number, and the
 * floats just above and just below the midpoint. */
static double near_pattern(ba_dtype dtype, int64_t n) {
    const int patterns = patterns_of(dtype), bits = (int)(n / 4 % patterns);
    const double here = decode(dtype, bits), next = decode(dtype, (bits + 1) % patterns);
    const double step = isfinite(here) && !isfinite(next) ? here - decode(dtype, bits - 1) : next - here;
    const float middle = (float)(here + step / 2);
    return n % 4 == 0 ? here : n % 4 == 1 ? (double)middle : (double)nextafterf(middle, n % 4 == 2 ? INFINITY : -INFINITY);
}

/* Checks `finish` by itself. With l = 1 the output is o, rounded to the output's dtype; the numbers include ties, their neighbours, subnormal
 * numbers, overflow and NaN. */
static void check_finish(test_case *c) {
    record *r = &records[FINISH];
    const ba_dtype dtype = c->s.dtype;
    const int64_t lanes = most_queries(c);
    int64_t left = ba_max(patterns_of(dtype), 1 << 14) * 4, n = 0;
    while (left > 0) {
        const int64_t queries = 1 + pick(lanes), v_dim = 1 + pick(BA_MAX_HEAD_DIM);
        left -= queries * v_dim;
        if (!is_drawn()) {
            n += queries * v_dim;
            continue;
        }
        make_case(c, EQUAL, NO_MASK, queries, 1, 1, v_dim);
        const ba_panel panel = open_panel(c);
        for (int64_t i = 0; i < c->queries; i++) {
            set_element(real_dtype(c), panel.m, i, uniform() * 100);
            set_element(real_dtype(c), panel.l, i, 1);
            for (int64_t d = 0; d < c->v_dim; d++, n++)
                set_element(real_dtype(c), panel.o, o_index(c, d, i),
                            patterns_of(dtype) ? near_pattern(dtype, n) : uniform() * exp2(uniform() * 160));
        }
        void **rows = place_out_rows(c), *lse = place_tight(LSE, c->queries * c->s.f->real_size, c->s.f->real_size);
        finish(c, &panel, rows, lse);
        for (int64_t i = 0; i < c->queries; i++)
            for (int64_t d = 0; d < c->v_dim; d++) {
                const double o = real_at(c, panel.o, o_index(c, d, i)) + 0.0 /* -0 becomes +0 */, got = get_element(dtype, rows[i], d);
                double want[1];
                set_element(dtype, want, 0, o);
                compare(r, got, get_element(dtype, want, 0), 0, "rounded [dim][lane]", d, i);
                if (!isnan(o))
                    require(r, memcmp(want, (char *)rows[i] + d * ba_dtype_size(dtype), (size_t)ba_dtype_size(dtype)) == 0, "bits [dim][lane]", d, i);
            }
    }
    for (n = 0; n < 200; n++) { /* any l */
        if (!is_drawn()) continue;
        make_case(c, EQUAL, NO_MASK, 1 + pick(lanes), 1, 1, 1 + pick(40));
        const ba_panel panel = open_panel(c);
        for (int64_t i = 0; i < c->queries; i++) {
            const double l[] = {0, NAN, INFINITY, exp2(uniform() * 100), 1 + fabs(uniform()) * 1e6, 3};
            set_element(real_dtype(c), panel.l, i, l[pick(6)]);
            set_element(real_dtype(c), panel.m, i, uniform() * (pick(2) ? 1 : 1e30));
            for (int64_t d = 0; d < c->v_dim; d++)
                set_element(real_dtype(c), panel.o, o_index(c, d, i),
                            real_at(c, panel.l, i) == 0 ? 0 : uniform() * 8 * fmin(real_at(c, panel.l, i), 1e10));
        }
        void **rows = place_out_rows(c), *lse = place_tight(LSE, c->queries * c->s.f->real_size, c->s.f->real_size);
        finish(c, &panel, rows, lse);
        for (int64_t i = 0; i < c->queries; i++) {
            const double l = real_at(c, panel.l, i), m = real_at(c, panel.m, i), want = l == 0 ? -INFINITY : (m + log2(l)) * 0.6931471805599453;
            compare(r, real_at(c, lse, i), want, 4 * unit(c) * (fabs(want) + fabs(m)), "lse [.][lane]", 0, i);
            for (int64_t d = 0; d < c->v_dim; d++) {
                const double value = l == 0 ? 0 : real_at(c, panel.o, o_index(c, d, i)) / l;
                compare(r, get_element(dtype, rows[i], d), value, fabs(value) * (4 * unit(c) + unit_of(dtype)) + smallest_of(dtype),
                        "out [dim][lane]", d, i);
            }
        }
    }
}

static void check_merge(test_case *c, record *r) {
    const ba_dtype dtype = c->s.dtype;
    for (int64_t n = 0; n < 60 * FILLS; n++) {
        if (!is_drawn()) continue;
        const int64_t parts = pick(6), dim = dim_at(n % DIMS);
        c->variant = WIDE;
        make_case(c, n / DIMS % FILLS, NO_MASK, 1, ba_max(parts, 1), 1, dim);
        const void **rows = place_rows(c, V_ROWS, ROW_POINTERS, &v, 0, parts, dim);
        void *weights = place_tight(WEIGHTS, parts * c->s.f->real_size, c->s.f->real_size);
        for (int64_t i = 0; i < parts; i++) set_element(real_dtype(c), weights, i, fabs(uniform()));
        void *out = place_row(OUT_ROWS, 0, dim * ba_dtype_size(dtype));
        c->s.f->pack->merge_row(out, rows, weights, parts, dim);
        require(r, neighbours_untouched(), "wrote beside a buffer", -1, -1);
        for (int64_t d = 0; d < dim; d++) {
            double sum = 0, size = 0;
            for (int64_t i = 0; i < parts; i++) {
                sum += real_at(c, weights, i) * v.value[i][d];
                size += fabs(real_at(c, weights, i) * v.value[i][d]);
            }
            compare(r, get_element(dtype, out, d), sum,
                    sum_error(c, parts) * size + tiny(c) * (double)parts + unit_of(dtype) * fabs(sum) + (parts ? smallest_of(dtype) : 0),
                    "merged [.][dim]", 0, d);
        }
    }
    for (int64_t bits = 0; bits < patterns_of(dtype); bits += 512) { /* one part with weight 1: each pattern comes out as it went in */
        if (!is_drawn()) continue;
        make_case(c, EQUAL, NO_MASK, 1, 1, 1, 512);
        for (int64_t d = 0; d < 512; d++) ((uint16_t *)(void *)v.raw[0])[d] = (uint16_t)(bits + d);
        const void **rows = place_rows(c, V_ROWS, ROW_POINTERS, &v, 0, 1, 512);
        void *weights = place_tight(WEIGHTS, c->s.f->real_size, c->s.f->real_size), *out = place_row(OUT_ROWS, 0, 1024);
        set_element(real_dtype(c), weights, 0, 1);
        c->s.f->pack->merge_row(out, rows, weights, 1, 512);
        for (int64_t d = 0; d < 512; d++) compare(r, get_element(dtype, out, d), decode(dtype, (int)(bits + d)), 0, "copied [pattern]", bits + d, -1);
    }
}

static void check_add(test_case *c, record *r) {
    const double odd[] = {0, NAN, INFINITY, -INFINITY, 1e-45, 3.4e38, -1, 0.1};
    const int64_t real = c->s.f->real_size;
    for (int64_t n = 0; n < 200; n++) {
        if (!is_drawn()) continue;
        c->variant = WIDE;
        make_case(c, RANDOM, NO_MASK, 1, 1, 1, 1);
        void *to = place_tight(LSE, n * real, real), *from = place_tight(WEIGHTS, n * real, real);
        double before[200];
        for (int64_t i = 0; i < n; i++) {
            before[i] = set_element(real_dtype(c), to, i, pick(4) ? uniform() : odd[pick(8)]);
            set_element(real_dtype(c), from, i, pick(4) ? uniform() : odd[pick(8)]);
        }
        c->s.f->pack->add_reals(to, from, n);
        require(r, neighbours_untouched(), "wrote beside a buffer", -1, -1);
        for (int64_t i = 0; i < n; i++) {
            unsigned char rounded[8];
            compare(r, real_at(c, to, i), set_element(real_dtype(c), rounded, 0, before[i] + real_at(c, from, i)), 0, "sum [.][i]", n, i);
        }
    }
}

/* ---- Kernels that only caches have -------------------------------------------------------------------------------- */

/* Compares element `at` of the results of a kernel that prefetches into L2 (`got`), and of the kernel that it replaces (`replaced`). */
static void compare_with_replaced(record *r, ba_dtype dtype, const void *got, const void *replaced, int64_t at) {
    const double a = get_element(dtype, got, at), b = get_element(dtype, replaced, at);
    require(r, (isnan(a) && isnan(b)) || (a == b && !signbit(a) == !signbit(b)), "the kernel that prefetches into L1 gives another number [.][at]",
            -1, at);
}

static void check_few_scores(test_case *c) {
    static double replaced[BA_FEW_QUERIES * 128];
    for (int64_t n = 0; n < 2 * DIMS * FILLS; n++) {
        if (!is_drawn()) continue;
        make_case(c, n % FILLS, NO_MASK, 1 + pick(BA_FEW_QUERIES), 1 + pick(40), dim_at(n / FILLS % DIMS), 1);
        drop_options(c);
        const ba_panel panel = open_panel(c);
        const void **rows = place_rows(c, K_ROWS, K_POINTERS, &k, 0, c->keys, c->head_dim);
        const int64_t room = ba_round_up(c->keys, 16), stride = room + pick(20);
        const void *got = place(SCRATCH, ((c->queries - 1) * stride + room) * c->s.f->real_size);
        c->s.cache->scores(panel.q, c->queries, rows, 0, NULL, c->keys, c->head_dim, (void *)(uintptr_t)got, stride);
        require(&records[SCORES], neighbours_untouched(), "wrote beside a buffer", -1, -1);
        if (c->s.cache_into_l1) c->s.cache_into_l1->scores(panel.q, c->queries, rows, 0, NULL, c->keys, c->head_dim, replaced, stride);
        for (int64_t i = 0; i < c->queries; i++)
            for (int64_t j = 0; j < c->keys; j++) {
                if (c->s.cache_into_l1) compare_with_replaced(&records[SCORES], real_dtype(c), got, replaced, i * stride + j);
                const plain_number want = score_of(c, i, j);
                compare(&records[SCORES], real_at(c, got, i * stride + j), want.value, want.error, "score [key][query]", j, i);
            }
    }
}

static void check_probabilities(test_case *c) {
    record *r = &records[PROBABILITIES];
    for (int64_t n = 0; n < 2 * DIMS * FILLS; n++) {
        if (!is_drawn()) continue;
        make_case(c, n % FILLS, n % MASKS, 1 + pick(c->s.f->lanes[WIDE]), 1 + pick(n % 7 ? 100 : BA_MAX_CHUNK), dim_at(n / FILLS % DIMS), 1);
        drop_options(c);
        const ba_panel panel = open_panel(c);
        const ba_chunk chunk = open_chunk(c, 0, c->keys);
        float *sums = place(ALPHA, c->keys * c->lanes * (int64_t)sizeof *sums);
        for (int64_t i = 0; i < c->keys * c->lanes; i++) sums[i] = 1;
        double m[BA_MAX_LANES];
        for (int64_t i = 0; i < c->lanes; i++) {
            m[i] = pick(9) ? score_of(c, i, pick(c->keys)).value + 4 * uniform() : INFINITY;
            set_element(BA_FLOAT32, panel.m, i, isnan(m[i]) ? 0 : m[i]);
            m[i] = real_at(c, panel.m, i);
        }
        c->s.f->panel->add_probabilities(&panel, &chunk, sums);
        require(r, neighbours_untouched(), "wrote beside a buffer", -1, -1);
        for (int64_t i = 0; i < c->queries; i++)
            for (int64_t j = 0; j < c->keys; j++) {
                const plain_number s = score_of(c, i, j);
                const double x = s.value - m[i], got = (double)sums[j * c->lanes + i];
                if (!sees(c, i, j)) compare(r, got, 1, 0, "unseen [key][lane]", j, i);
                else if (isnan(x)) require(r, isnan(got), "NaN [key][lane]", j, i);
                else if (x < 60) /* above 60, even a small error of the score makes a large error of 2^score */
                    compare(r, got, 1 + exp2(x), unit(c) * (1 + exp2(x)) + 2 * weight_error(c, x) + exp2(x) * expm1(0.7 * fmin(s.error, 100)),
                            "sum [key][lane]", j, i);
            }
    }
}

/* The keys are cut into two chunks: anywhere if the family has the kernel `scores`, otherwise at a multiple of key_align. The second chunk continues
 * a block that the cut divides. In a family without `scores`, m is not the largest score, but a reference that no score exceeds by much; lanes with a
 * score that is not finite are left out then. */
static void check_block_sums(test_case *c) {
    static double errors[BA_MAX_CHUNK][BA_MAX_LANES];
    record *r = &records[BLOCK_SUMS];
    const ba_panel_kernels *kernels = c->s.f->panel;
    const bool has_scores = kernels->scores[WIDE];
    for (int64_t n = 0; n < 2 * DIMS * FILLS; n++) {
        make_case(c, n % FILLS, n % MASKS, 1 + pick(c->s.f->lanes[WIDE]), 2 + pick(n % 7 ? 100 : BA_MAX_CHUNK - 1), dim_at(n / FILLS % DIMS), 1);
        if (!has_scores) drop_options(c);
        const int64_t block = 1 + pick(n % 2 ? 8 : 200), real = c->s.f->real_size;
        const int64_t cut = ba_min(c->keys, ba_round_up(1 + pick(c->keys - 1), has_scores ? 1 : c->s.f->key_align));
        const ba_panel panel = open_panel(c);
        void *row_max = place(ROW_MAX, c->lanes * real), *alpha = place(ALPHA, c->lanes * real);
        char *sums = place(WEIGHTS, ba_ceil_div(c->keys, block) * c->lanes * real);
        for (int64_t first = 0, keys = cut; keys > 0; first += keys, keys = c->keys - first) {
            const ba_chunk chunk = open_chunk(c, first, keys);
            const ba_block_sums blocks = {.sums = sums + first / block * c->lanes * real, .block = block, .begun = first % block, .alpha = alpha};
            double begun[BA_MAX_LANES], m_before[BA_MAX_LANES], l_before[BA_MAX_LANES];
            if (has_scores) {
                kernels->scores[WIDE](&panel, &chunk, row_max);
                check_scores(c, &chunk, first, row_max);
            }
            for (int64_t i = 0; i < c->lanes; i++) {
                begun[i] = blocks.begun ? real_at(c, blocks.sums, i) : 0;
                m_before[i] = real_at(c, panel.m, i);
                l_before[i] = real_at(c, panel.l, i);
                for (int64_t j = 0; j < keys; j++) {
                    const plain_number s = has_scores || i >= c->queries ? (plain_number){scores[j][i], 0} : score_of(c, i, first + j);
                    scores[j][i] = s.value;
                    errors[j][i] = s.error;
                }
            }
            kernels->sum_blocks(&panel, &chunk, &blocks);
            require(r, neighbours_untouched(), "wrote beside a buffer", -1, -1);
            for (int64_t i = 0; i < (has_scores ? c->lanes : c->queries); i++) {
                const double m = real_at(c, panel.m, i), shrink = real_at(c, alpha, i);
                const bool stands = m == m_before[i];
                const double raised = stands ? 0 : weight_error(c, m_before[i] - m) * (has_scores ? 1 : 16); /* m may rise more than once */
                bool finite = true;
                for (int64_t j = 0; j < c->keys && !has_scores; j++) finite &= isfinite(score_of(c, i, j).value);
                if (!finite) continue;
                if (has_scores) compare(r, m, fmax(m_before[i], real_at(c, row_max, i)), 0, "m [.][lane]", 0, i);
                compare(r, shrink, stands ? 1 : exp2(m_before[i] - m), raised, "alpha [.][lane]", 0, i);
                double all = l_before[i] * shrink, slack = l_before[i] * raised;
                for (int64_t j = 0, end, b = 0; j < keys; j = end, b++) {
                    end = ba_min(keys, (b + 1) * block - blocks.begun);
                    double sum = b == 0 && blocks.begun ? begun[i] * shrink : 0, own = sum > 0 ? begun[i] * raised : 0;
                    for (int64_t k = j; k < end; k++) {
                        const double x = sees(c, i, first + k) ? scores[k][i] - m : -INFINITY;
                        require(r, has_scores || x <= 10 + errors[k][i] + 1e-3, "large weight [key][lane]", first + k, i);
                        sum += exp2(x);
                        all += exp2(x);
                        own += x == -INFINITY ? 0 : weight_error(c, x) + exp2(x) * expm1(0.7 * fmin(errors[k][i], 100));
                    }
                    own += has_scores || stands ? 0 : sum * (exp2(weight_error(c, 0) * 16) - 1);
                    slack += own;
                    compare(r, real_at(c, blocks.sums, b * c->lanes + i), sum, own + sum_error(c, end - j) * sum + tiny(c), "sum [block][lane]", b,
                            i);
                }
                compare(r, real_at(c, panel.l, i), all, slack + sum_error(c, keys) * all + tiny(c), "l [.][lane]", 0, i);
            }
        }
    }
}

static void check_join_lanes(test_case *c) {
    record *r = &records[JOIN_LANES];
    const int64_t real = c->s.f->real_size, lanes = c->s.f->lanes[WIDE];
    for (int64_t n = 0; n < 50; n++) {
        const int64_t blocks = 1 + pick(40), together = INT64_C(1) << pick(63 - __builtin_clzll((uint64_t)lanes) + 1);
        const bool largest = pick(2);
        make_case(c, 0, NO_MASK, 1, 1, 1, 1);
        void *sums = place(WEIGHTS, blocks * lanes * real), *factor = place(ALPHA, lanes * real);
        static double shares[40 * BA_MAX_LANES];
        for (int64_t i = 0; i < lanes; i++) set_element(real_dtype(c), factor, i, fabs(uniform()));
        for (int64_t i = 0; i < blocks * lanes; i++) {
            set_element(real_dtype(c), sums, i, pick(9) ? fabs(uniform()) : NAN);
            shares[i] = fmax(0, real_at(c, sums, i) * real_at(c, factor, i % lanes)); /* fmax ignores NaN */
        }
        c->s.f->panel->join_lanes(sums, factor, blocks, lanes, together, largest);
        require(r, neighbours_untouched(), "wrote beside a buffer", -1, -1);
        for (int64_t at = 0; at < blocks * lanes / together; at++) {
            double joined = 0;
            for (int64_t i = at * together; i < (at + 1) * together; i++) joined = largest ? fmax(joined, shares[i]) : joined + shares[i];
            compare(r, real_at(c, sums, at), joined, sum_error(c, together) * joined + tiny(c), "joined [share]", -1, at);
        }
    }
}

/* The lanes are the keys of an indexer, and the keys of the case are the heads of the indexer's queries. */
static void check_head_sums(test_case *c) {
    record *r = &records[HEAD_SUMS];
    const int64_t real = c->s.f->real_size;
    for (int64_t n = 0; n < DIMS * FILLS; n++) {
        if (!is_drawn()) continue;
        const int64_t heads = 1 + pick(n % 2 ? 70 : 5), queries = 1 + pick(n % 7 ? 7 : BA_MAX_CHUNK / heads);
        make_case(c, n % FILLS, NO_MASK, 1 + pick(c->s.f->lanes[WIDE]), queries * heads, dim_at(n / FILLS), 1);
        drop_options(c);
        const ba_panel panel = open_panel(c);
        ba_chunk chunk = open_chunk(c, 0, c->keys);
        chunk.k_next = chunk.v_next = chunk.v_rows; /* any rows, since they are only prefetched */
        chunk.next_rows = pick(c->keys + 1);
        chunk.k_next_bytes = 1 + pick(300);
        const bool scaled = pick(2);
        void *w = place_tight(WEIGHTS, queries * heads * real, real), *sums = place(ALPHA, queries * c->lanes * real),
             *scales = place(ROW_MAX, c->lanes * real);
        for (int64_t i = 0; i < queries * heads; i++) set_element(real_dtype(c), w, i, uniform());
        for (int64_t i = 0; i < c->lanes; i++) set_element(real_dtype(c), scales, i, (pick(8) ? 1 : -1) * (0.02 + 0.01 * uniform()));
        c->s.f->panel->sum_heads(&panel, &chunk, &(ba_head_sums){sums, w, scaled ? scales : NULL, queries, heads});
        require(r, neighbours_untouched(), "wrote beside a buffer", -1, -1);
        for (int64_t q = 0; q < queries; q++)
            for (int64_t i = 0; i < c->queries; i++) {
                const double scale = scaled ? real_at(c, scales, i) : 1;
                double want = 0, size = 0, error = 0;
                for (int64_t h = 0; h < heads; h++) {
                    const plain_number s = score_of(c, i, q * heads + h);
                    const double score = scale * s.value, weight = real_at(c, w, q * heads + h);
                    want += weight * (score < 0 ? 0 : score);
                    size += fabs(weight * score);
                    error += fabs(weight) * (fabs(scale) * s.error + 2 * unit(c) * fabs(score) + tiny(c));
                }
                const double got = real_at(c, sums, q * c->lanes + i);
                if (isfinite(want)) compare(r, got, want, error + sum_error(c, heads) * size + tiny(c), "sum [query][lane]", q, i);
                else require(r, isnan(want) ? isnan(got) : got == want, "not finite [query][lane]", q, i);
            }
    }
}

static void check_append_keys(test_case *c) {
    record *r = &records[APPEND_KEYS];
    const int64_t real = c->s.f->real_size;
    for (int64_t round = 0; round < 200; round++) {
        const int64_t n = pick(3 * BA_MAX_LANES), first = pick(1000000);
        void *scores = place_tight(ALPHA, ba_max(1, n) * real, real);
        ba_scored_key *to = place_tight(WEIGHTS, ba_max(1, n) * (int64_t)sizeof *to, (int64_t)sizeof *to);
        for (int64_t i = 0; i < n; i++) set_element(real_dtype(c), scores, i, pick(9) ? floor(8 * uniform()) / 8 : pick(2) ? NAN : -INFINITY);
        const double bounds[] = {NAN, -INFINITY, floor(8 * uniform()) / 8, uniform(), nextafter(0.125, -1)}, least = bounds[pick(5)];
        const int64_t count = c->s.f->panel->append_keys(to, scores, n, first, least);
        require(r, neighbours_untouched(), "wrote beside a buffer", -1, -1);
        int64_t at = 0;
        for (int64_t i = 0; i < n; i++) {
            const double score = real_at(c, scores, i), known = isnan(score) ? -INFINITY : score;
            if (known <= least) continue;
            require(r, at < count && to[at].score == known && to[at].key == first + i, "is not the next key [.][place]", -1, at);
            at++;
        }
        require(r, at == count, "number of keys", -1, count);
    }
}

static bool is_better(ba_scored_key a, ba_scored_key b) { return a.score > b.score || (a.score == b.score && a.key < b.key); }

static void check_move_better(const test_case *c) {
    record *r = &records[MOVE_BETTER];
    for (int64_t round = 0; round < 200; round++) {
        enum { MOST = 100 };
        const int64_t n = pick(MOST), bytes = ba_max(1, n) * (int64_t)sizeof(ba_scored_key), align = (int64_t)sizeof(ba_scored_key);
        ba_scored_key *all = place_tight(WEIGHTS, bytes, align), *spare = place_tight(ALPHA, bytes, align);
        ba_scored_key pivot = {floor(4 * uniform()) / 4, (int32_t)pick(n + 1)};
        double score[MOST + 1];
        int64_t expected = 0;
        bool seen[MOST + 1] = {false};
        memset(all, 0xff, (size_t)bytes); /* the bytes between the members may be anything */
        for (int64_t i = 0; i < n; i++) { /* all keys except the pivot's */
            all[i].key = (int32_t)(i + (i >= pivot.key));
            all[i].score = score[all[i].key] = pick(9) ? floor(4 * uniform()) / 4 : -INFINITY;
            expected += is_better(all[i], pivot);
        }
        const int64_t better = c->s.f->panel->move_better(all, n, pivot, spare);
        require(r, neighbours_untouched(), "wrote beside a buffer", -1, -1);
        require(r, better == expected, "number of keys", -1, better);
        for (int64_t i = 0; i < n; i++) {
            const int32_t key = all[i].key;
            const bool is_one = key >= 0 && key <= n && key != pivot.key && !seen[key];
            require(r, is_one && all[i].score == score[key] && is_better(all[i], pivot) == (i < better), "key [.][place]", -1, i);
            if (is_one) seen[key] = true;
        }
    }
}

/* Returns the next block to choose among those that are not taken yet: a block that is always chosen, or else the block with the highest score.
 * Returns -1 if no block is left. */
static int64_t next_choice(const ba_choice *choice, const double *score, const bool *taken, int64_t row) {
    int64_t best = -1;
    for (int64_t b = 0; b < choice->hi[row]; b++) {
        const bool always = b < choice->init[row] || (b >= choice->local_lo[row] && b < choice->local_hi[row]);
        if (taken[b] || (score[b] == -INFINITY && !always)) continue;
        if (always) return b;
        if (best < 0 || score[b] > score[best]) best = b;
    }
    return best;
}

static void check_choose(test_case *c) {
    record *r = &records[CHOOSE];
    enum { MOST_BLOCKS = 200 };
    const double odd[] = {0, -0.0, INFINITY, -INFINITY, NAN, 1, -1, largest_of(real_dtype(c)), -largest_of(real_dtype(c)), 1e-40};
    for (int n = 0; n < 600; n++) {
        if (!is_drawn()) continue;
        static double score[BA_CHOOSE_LIST_ROWS][MOST_BLOCKS];
        ba_choice choice = {.list_rows = 1 + pick(BA_CHOOSE_LIST_ROWS), .blocks = pick(MOST_BLOCKS + 1)};
        choice.stride = choice.list_rows + pick(9);
        choice.width = 1 + pick(n % 5 ? 20 : MOST_BLOCKS);
        flip_side();
        forget_places();
        void *scores = place(WEIGHTS, ba_max(1, choice.blocks * choice.stride) * c->s.f->real_size);
        for (int64_t i = 0; i < choice.list_rows; i++) {
            choice.hi[i] = (int32_t)(pick(3) ? choice.blocks : pick(choice.blocks + 1));
            choice.init[i] = (int32_t)ba_min(pick(3), ba_min(choice.width, choice.hi[i]));
            choice.local_hi[i] = (int32_t)(pick(2) ? choice.hi[i] : choice.init[i] + pick(choice.hi[i] - choice.init[i] + 1));
            choice.local_lo[i] = (int32_t)ba_max(choice.init[i], choice.local_hi[i] - ba_min(pick(3), choice.width - choice.init[i]));
            for (int64_t b = 0; b < choice.blocks; b++) {
                set_element(real_dtype(c), scores, b * choice.stride + i, n % 3 == 0 ? uniform() : n % 3 == 1 ? (double)pick(4) : odd[pick(10)]);
                score[i][b] = real_at(c, scores, b * choice.stride + i);
                if (isnan(score[i][b])) score[i][b] = -largest_of(real_dtype(c));
            }
        }
        choice.scores = scores;
        choice.keys = place(SCRATCH, ba_max(1, choice.blocks * BA_CHOOSE_LIST_ROWS) * c->s.f->real_size);
        choice.lists = place(TILE_ROWS, BA_CHOOSE_LIST_ROWS * (choice.width + 1) * (int64_t)sizeof *choice.lists);
        c->s.f->routed->choose(&choice);
        require(r, neighbours_untouched(), "wrote beside a buffer", -1, -1);
        for (int64_t i = 0; i < choice.list_rows; i++) {
            bool taken[MOST_BLOCKS] = {false};
            int64_t length = 0, block;
            for (; length < choice.width && (block = next_choice(&choice, score[i], taken, i)) >= 0; length++) taken[block] = true;
            compare(r, choice.lengths[i], (double)length, 0, "length [.][row]", 0, i);
            const int32_t *list = choice.lists + i * (choice.width + 1);
            for (int64_t b = 0, at = 0; b < choice.blocks && length == choice.lengths[i]; b++)
                if (taken[b]) {
                    compare(r, list[at], (double)b, 0, "block [place][row]", at, i);
                    at++;
                }
        }
    }
}

/* Rows of q and k hold their heads side by side. The first half of k's rows is the first side, and the second half is the second side. With two
 * sides, each element contributes the larger of its two products, or NaN if either product is NaN. */
static void check_score_heads(test_case *c) {
    static double replaced[20 * 20 * BA_FEW_QUERIES + 16];
    record *r = &records[SCORE_HEADS];
    for (int64_t n = 0; n < 4 * DIMS * FILLS; n++) {
        if (!is_drawn()) continue;
        const int64_t dim = dim_at(n / FILLS % DIMS), sides = 1 + pick(2), room = BA_HEADS_REALS / ba_round_up(dim, 32);
        const int64_t queries = sides == 1 ? 1 : 1 + pick(ba_min(room, BA_FEW_QUERIES));
        const int64_t heads = 1 + pick(ba_min(ba_min(BA_MAX_HEAD_DIM / dim, room / queries), 20)), rows = 1 + pick(20);
        const int64_t real = c->s.f->real_size, step = dim * ba_dtype_size(c->s.kv_dtype), pad = BA_FEW_PAD(dim);
        make_case(c, n % FILLS, NO_MASK, queries, 2 * rows, heads * dim, 1);
        char *packed = memset(place(PANEL_Q, heads * queries * pad * real), 0xff, (size_t)(heads * queries * pad * real)); /* NaN behind dim */
        for (int64_t i = 0; i < heads * queries; i++)
            for (int64_t d = 0; d < dim; d++) set_element(real_dtype(c), packed, i * pad + d, q.value[i % queries][i / queries * dim + d]);
        const ba_side side[2] = {{place_rows(c, K_ROWS, K_POINTERS, &k, 0, rows, heads * dim), 0, step},
                                 {sides > 1 ? place_rows(c, V_ROWS, V_POINTERS, &k, rows, rows, heads * dim) : NULL, 0, step}};
        const void *got = place(SCRATCH, ba_round_up(rows * heads * queries, 16) * real);
        c->s.cache->score_heads(side, sides, packed, queries, heads, rows, rows, pick(5), dim, (void *)(uintptr_t)got);
        require(r, neighbours_untouched(), "wrote beside a buffer", -1, -1);
        if (c->s.cache_into_l1) c->s.cache_into_l1->score_heads(side, sides, packed, queries, heads, rows, rows, 0, dim, replaced);
        for (int64_t i = 0; c->s.cache_into_l1 && i < rows * heads * queries; i++) compare_with_replaced(r, real_dtype(c), got, replaced, i);
        for (int64_t i = 0; i < heads * queries; i++)
            for (int64_t j = 0; j < rows; j++) {
                double sum = 0, size = 0, other_size = 0;
                bool defined = true; /* the result is not defined if one side's product is 0 times infinity */
                for (int64_t d = i / queries * dim; d < (i / queries + 1) * dim; d++) {
                    const double query = q.value[i % queries][d], first = query * k.value[j][d];
                    const double second = sides == 1 ? first : query * k.value[rows + j][d];
                    defined &= sides == 1 || isnan(query) || isnan(k.value[j][d]) || isnan(k.value[rows + j][d]) || !(isnan(first) || isnan(second));
                    const double term = isnan(first) || isnan(second) ? NAN : fmax(first, second);
                    sum += term;
                    size += fmax(fabs(first), fabs(second));
                    other_size += fabs(k.value[j][d]) + (sides == 1 ? 0 : fabs(k.value[rows + j][d]));
                }
                const double error = sum_error(c, dim) * size + tiny(c) * ((double)dim + other_size);
                if (defined)
                    compare(r, real_at(c, got, j * heads * queries + i), sum, c->fill == EXACT_HUGE ? 0 : error, "score [row][head, query]", j, i);
            }
    }
}

/* Checks the pooled numbers of rows. `known` has the mean, the largest and the smallest element of each dim, and the error of the mean. */
static void check_pool(const test_case *c, const void *const *rows, const double (*known)[BA_MAX_HEAD_DIM]) {
    record *r = &records[POOL];
    const ba_dtype dtype = c->s.kv_dtype;
    for (int form = BA_POOLED_MEAN; form <= BA_POOLED_BOTH; form++) {
        const int64_t dim = c->v_dim, parts = form == BA_POOLED_MEAN ? 1 : 2;
        void *to = place_tight(WEIGHTS, parts * dim * ba_dtype_size(dtype), ba_dtype_size(dtype));
        c->s.cache->pool(rows, c->keys, dim, (ba_pooled)form, to);
        require(r, neighbours_untouched(), "wrote beside a buffer", -1, -1);
        for (int64_t d = 0; d < dim; d++) {
            const double mean = known[0][d], high = known[1][d], low = known[2][d], middle = (high + low) / 2, size = (high - low) / 2;
            const double want[][2] = {{mean}, {mean, fabs(mean)}, {middle, size}, {mean / 2 + middle / 2, size / 2}};
            const double error = form == BA_POOLED_BOUND ? 0 : known[3][d];
            for (int64_t i = 0; i < parts; i++) {
                const double x = want[form][i], got = get_element(dtype, to, i * dim + d);
                const double slack =
                    error + unit_of(dtype) * (fabs(x) + fabs(mean) + error) + 8 * unit(c) * (fabs(high) + fabs(low)) + 4 * smallest_of(dtype);
                if (isfinite(x) && isfinite(slack)) compare(r, got, x, slack, "pooled [part][dim]", i, d);
                else require(r, !isfinite(got) || !isfinite(slack), "finite [part][dim]", i, d);
            }
        }
    }
}

static void check_summarise(test_case *c) {
    static double known[4][BA_MAX_HEAD_DIM];
    static double replaced[3][BA_MAX_HEAD_DIM];
    record *r = &records[SUMMARISE];
    const ba_dtype dtype = c->s.kv_dtype;
    for (int64_t n = 0; n < 2 * DIMS * FILLS; n++) {
        if (!is_drawn()) continue;
        make_case(c, n % FILLS, NO_MASK, 1, 1 + pick(n % 7 ? 20 : 200), 1, dim_at(n / FILLS % DIMS));
        const void **rows = place_rows(c, V_ROWS, V_POINTERS, &v, 0, c->keys, c->v_dim);
        void *to[3]; /* largest, smallest and mean; NULL: not computed */
        for (int i = 0; i < 3; i++) to[i] = pick(8) ? place_row(OUT_ROWS, i, c->v_dim * ba_dtype_size(dtype)) : NULL;
        c->s.cache->summarise(rows, c->keys, c->v_dim, to[0], to[1], to[2]);
        require(r, neighbours_untouched(), "wrote beside a buffer", -1, -1);
        if (c->s.cache_into_l1) c->s.cache_into_l1->summarise(rows, c->keys, c->v_dim, replaced[0], replaced[1], replaced[2]);
        for (int i = 0; c->s.cache_into_l1 && i < 3; i++)
            for (int64_t d = 0; to[i] && d < c->v_dim; d++) compare_with_replaced(r, dtype, to[i], replaced[i], d);
        for (int64_t d = 0; d < c->v_dim; d++) {
            double largest = NAN, smallest = NAN, sum = 0, size = 0;
            for (int64_t j = 0; j < c->keys; j++) {
                largest = fmax(largest, v.value[j][d]); /* fmax and fmin ignore NaN */
                smallest = fmin(smallest, v.value[j][d]);
                sum += v.value[j][d];
                size += fabs(v.value[j][d]);
            }
            const double mean = sum / (double)c->keys, error = (sum_error(c, c->keys) * size + tiny(c)) / (double)c->keys;
            known[0][d] = mean;
            known[1][d] = largest;
            known[2][d] = smallest;
            known[3][d] = error;
            if (to[0] && !isnan(largest)) compare(r, get_element(dtype, to[0], d), largest, 0, "largest [.][dim]", 0, d);
            if (to[1] && !isnan(smallest)) compare(r, get_element(dtype, to[1], d), smallest, 0, "smallest [.][dim]", 0, d);
            if (to[0] && isnan(largest)) require(r, isnan(get_element(dtype, to[0], d)), "NaN as the largest [dim]", -1, d);
            if (to[1] && isnan(smallest)) require(r, isnan(get_element(dtype, to[1], d)), "NaN as the smallest [dim]", -1, d);
            if (to[2])
                compare(r, get_element(dtype, to[2], d), mean, error + unit_of(dtype) * (fabs(mean) + error) + smallest_of(dtype), "mean [.][dim]", 0,
                        d);
        }
        if (c->s.cache->pool) check_pool(c, rows, known);
    }
}

/* ---- All of one kernel -------------------------------------------------------------------------------------------- */

static void check_variant(void *context) {
    test_case *c = context;
    check_pack_queries(c);
    check_attend(c);
    check_promises(c);
    check_patterns_in(c);
    const bool over = is_over(&c->s);
    if (!c->s.cache && c->variant != ROUTED) check_finish(c);
    if (c->variant <= 1 && c->s.f->panel->attend_many[c->variant]) check_together(c);
    if (c->variant == WIDE && !c->s.cache && !over && c->s.f->panel->add_probabilities) check_probabilities(c);
    if (c->variant == WIDE && !c->s.cache && !over && c->s.f->panel->sum_blocks) check_block_sums(c);
    if (c->variant == WIDE && !c->s.cache && !over && c->s.f->panel->join_lanes) check_join_lanes(c);
    if (c->variant == WIDE && !c->s.cache && !over && c->s.f->panel->sum_heads) check_head_sums(c);
    if (c->variant == WIDE && !c->s.cache && !over && c->s.f->panel->append_keys) check_append_keys(c);
    if (c->variant == WIDE && !c->s.cache && !over && c->s.f->panel->move_better) check_move_better(c);
    if (c->variant == WIDE && !c->s.cache && !over && c->s.f->routed && c->s.f->routed->choose) check_choose(c);
    if (c->variant == WIDE && !c->s.cache && c->s.f->panel->fill_bias) check_fill_bias(c);
    if (c->variant == FEW) check_empty_join(c);
    if (c->variant == FEW) check_heads(c);
    if (c->variant == FEW && c->s.cache) check_few_scores(c);
    if (c->variant == FEW && c->s.cache && c->s.cache->score_heads) check_score_heads(c);
    if (c->variant == FEW && c->s.cache && c->s.cache->summarise) check_summarise(c);
    if (c->variant == FEW && c->s.cache && c->s.cache->quantise) check_quantise(c);
}

static void check_rows_of_family(void *context) {
    test_case *c = context;
    check_merge(c, &records[0]);
    check_add(c, &records[1]);
}

static void check_subject(const subject *s) {
    static test_case c;
    seed_by_name(s->name);
    if (ba_cell_bytes(s->kv_dtype)) {
        clear_records();
        guarded_run(check_cells, (void *)(uintptr_t)s, &records[ATTEND]);
        report(s->name, "", records, KERNELS);
        return;
    }
    for (int variant = WIDE; variant < VARIANTS; variant++) {
        if (variant != FEW && s->cache && !s->pack_k) continue; /* this variant would only repeat the check of the family's kernels */
        if (variant == FEW && !s->few) continue;
        const bool over = is_over(s);
        if (over && variant != FEW && !s->widen) continue;
        if (variant != FEW && s->few_into_l1 && !s->cache) continue; /* all other kernels are those of the family that it replaces */
        if (variant == ROUTED && (s->cache || over || !s->f->routed)) continue;
        clear_records();
        c = (test_case){.s = *s, .variant = variant};
        guarded_run(check_variant, &c, &records[ATTEND]);
        report(s->name, variant_names[variant], records, KERNELS);
    }
    if (s->cache || s->few_into_l1 || s->kv_dtype != s->dtype) return;
    clear_records();
    records[0] = (record){.name = "merge_row"};
    records[1] = (record){.name = "add_reals"};
    c = (test_case){.s = *s};
    guarded_run(check_rows_of_family, &c, &records[0]);
    report(s->name, "", records, 2);
    check_backward(s);
}

static void check_probe(void *context) {
    const ba_probes *p = context;
    record *r = &records[0];
    for (int64_t bytes = 512; bytes <= 8192; bytes += 512) {
        flip_side();
        forget_places();
        float *data = place(PROBE, bytes), sink[BA_MAX_LANES];
        int words = 0, word;
        for (int64_t i = 0; i < bytes / 4; i++) {
            data[i] = (float)(0.6 + 0.1 * uniform()); /* usable as multipliers, too, because their powers do not grow */
            memcpy(&word, &data[i], sizeof word);
            words ^= word;
        }
        compare(r, p->read((const char *)data, bytes), words, 0, "words read [.][bytes]", 0, bytes);
        for (int i = 0; i < BA_MAX_LANES; i++) sink[i] = NAN;
        const double once = p->flops(data, 1, sink);
        require(r, once > 0 && p->flops(data, 3, sink) == 3 * once && isfinite(sink[0]), "operations counted", -1, -1);
        if (!p->tile_flops || bytes > 512) continue;
        for (int i = 0; i < BA_MAX_LANES; i++) sink[i] = NAN;
        const double tiles = p->tile_flops(data, 1, sink), four_products = 4 * 2.0 * 16 * 16 * 32;
        require(r,
                tiles > 0 && fmod(tiles, four_products) == 0 && isfinite(sink[0]) && p->tile_flops(data, 2, sink) == 2 * tiles && isfinite(sink[0]),
                "tile operations counted", -1, -1);
    }
}

/* Checks that each level's table has, for each dtype, the highest kernel of the list that the level and the CPU allow. Kernels that prefetch into L2
 * are in the table only if the CPU carries such prefetches out. */
static void check_dispatch(void) {
    clear_records();
    record *r = &records[0];
    r->name = "tables";
    for (int level = 0; level < BA_ISA_COUNT; level++) {
        const ba_attend_family *families[BA_DTYPE_COUNT] = {0};
        const ba_attend_family *vectors[BA_DTYPE_COUNT] = {0};
        const ba_cache_kernels *caches[BA_DTYPE_COUNT] = {0};
        for (int i = 0; i < LISTED; i++) {
            const listed *l = &list[i];
            const ba_isa isa = l->cache ? l->cache->isa : l->family->isa;
            if ((int)isa > level || isa > ba_isa_detected()) continue;
            if ((l->family_into_l1 || l->cache_into_l1) && !ba_prefetches_reach_l2((ba_isa)level)) continue;
            if (l->cache) caches[l->dtype] = l->cache;
            else families[l->dtype] = l->family;
            if (!l->cache && is_vector(l->family)) vectors[l->dtype] = l->family;
        }
        require(r, ba_tuning_at((ba_isa)level)->chunk_keys > 0 && ba_tuning_at((ba_isa)level)->few.keys > 0, "no block in tuning.c [.][level]", -1,
                level);
        for (int dtype = 0; dtype < BA_DTYPE_COUNT; dtype++) {
            require(r, ba_kernels_at((ba_isa)level)->cache[dtype] == caches[dtype], "cache kernel [dtype][level]", dtype, level);
            if (dtype < BA_FLOAT_DTYPES)
                require(r,
                        ba_kernels_at((ba_isa)level)->attend[dtype] == families[dtype] &&
                            ba_kernels_at((ba_isa)level)->vector[dtype] == vectors[dtype],
                        "family [dtype][level]", dtype, level);
        }
    }
    report("dispatch", "", r, 1);
}

/* ---- Benchmark ---------------------------------------------------------------------------------------------------- */

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

enum { SLICES = 10 }; /* the fastest slice counts, because other work of the machine can only slow a slice down */

/* Times attend over one chunk that stays in cache, on one thread. No driver can be faster. */
static void bench(const subject *s) {
    static test_case c;
    if (ba_cell_bytes(s->kv_dtype)) return; /* make_case() draws elements */
    for (int variant = WIDE; variant < VARIANTS; variant++)
        for (int64_t dim = 64; dim <= 128; dim *= 2) {
            if (variant != FEW && s->cache) continue; /* packed rows of a cache are like the family's own */
            if (variant == FEW && !s->few) continue;
            if (variant != FEW && (s->few_into_l1 || (s->kv_dtype != s->dtype && !s->widen))) continue;
            if (variant == ROUTED && (s->widen || !s->f->routed)) continue;
            c = (test_case){.s = *s, .variant = variant};
            make_case(&c, RANDOM, NO_MASK, most_queries(&c), ba_tuning_at(s->f->isa)->chunk_keys, dim, dim);
            c.softcap = 0;
            c.biased = false;
            ba_panel panel = open_panel(&c);
            const ba_chunk chunk = open_chunk(&c, 0, c.keys);
            double rate = 0, limit = 0;
            for (int slice = 0; slice < SLICES; slice++) {
                limit = fmax(limit, ba_probe_flops(s->f->isa, 0.01, 1));
                int calls = 0;
                double elapsed;
                const double begin = now();
                do {
                    attend(&c, &panel, &chunk);
                    calls++;
                    elapsed = now() - begin;
                } while (elapsed < 0.01);
                rate = fmax(rate, calls * 4 * (double)(c.keys * c.queries * dim) / elapsed);
            }
            printf("%-28s %-6s dim %3d  %7.1f GFLOP/s  %5.3f of the level's multiply-adds\n", s->name, variant_names[variant], (int)dim, rate * 1e-9,
                   rate / limit);
        }
}

/* Each argument is a part of the names of kernels to check or, after a dash, of kernels to leave out. Without a name to check, all kernels are
 * checked. */
int main(int argc, char **argv) {
    const bool timing = argc > 1 && strcmp(argv[1], "--bench") == 0;
    const bool sampled = argc > 3 && strcmp(argv[1], "--sample") == 0;
    const int first_name = timing ? 2 : sampled ? 4 : 1;
    if (sampled) sample_cases(ba_max(1, atoll(argv[2])), argv[3]);
    int named = 0;
    for (int a = first_name; a < argc; a++) named += argv[a][0] != '-';
    for (int i = 0; i < LISTED + PROBES; i++) {
        const char *name = i < LISTED ? list[i].name : probe_list[i - LISTED].name;
        bool wanted = named == 0, left_out = false;
        for (int a = first_name; a < argc; a++) {
            if (argv[a][0] == '-') left_out |= strstr(name, argv[a] + 1) != NULL;
            else wanted |= strstr(name, argv[a]) != NULL;
        }
        if (!wanted || left_out) continue;
        if ((i < LISTED ? list[i].family->isa : probe_list[i - LISTED].probes->isa) > ba_isa_detected()) {
            printf("%-64s skipped: this CPU has not got it\n", name);
        } else if (i < LISTED) {
            const subject s = subject_of(&list[i]);
            if (timing) bench(&s);
            else check_subject(&s);
            for (int kv_dtype = 0; kv_dtype < BA_DTYPE_COUNT; kv_dtype++) {
                subject over;
                if (!subject_over(&list[i], (ba_dtype)kv_dtype, &over)) continue;
                if (timing) bench(&over);
                else check_subject(&over);
            }
        } else if (!timing) {
            clear_records();
            records[0] = (record){.name = "flops and read"};
            guarded_run(check_probe, (void *)(uintptr_t)probe_list[i - LISTED].probes, &records[0]);
            report(name, "", records, 1);
        }
    }
    if (timing) return 0;
    check_dispatch();
#ifdef BA_HAVE_avx512_bf16
    if (ba_isa_detected() >= BA_ISA_AVX512_BF16) check_dot_pairs();
#endif
    return report_total();
}
