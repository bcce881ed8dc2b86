/* Checks the promises of kernels that hold to the bit. (checkkernels.c says how to run the checks.) */
#include "checkkernels.h"

#include <math.h>
#include <string.h>

typedef struct lane_state {
    unsigned char bytes[(BA_MAX_HEAD_DIM + 2) * sizeof(double)];
} lane_state;

typedef struct key_range {
    int64_t begin, end;
} key_range;

/* Returns a number of keys; a chunk may be cut at any multiple of it. */
static int64_t step_of(const test_case *c) {
    return c->variant == ROUTED ? BA_ROUTED_KEYS : c->variant == FEW ? ba_max(BA_FEW_KEY_ALIGN, c->s.f->key_align) : c->s.f->key_align;
}

static void attend_ranges(const test_case *c, const key_range *ranges, int n, lane_state *state) {
    const int64_t real = c->s.f->real_size;
    ba_panel panel = open_panel(c);
    refresh(c, &panel);
    for (int i = 0; i < n; i++) {
        if (ranges[i].begin >= ranges[i].end) continue;
        const ba_chunk chunk = open_chunk(c, ranges[i].begin, ranges[i].end - ranges[i].begin);
        attend(c, &panel, &chunk);
    }
    close_fresh(c, &panel);
    for (int64_t lane = 0; lane < c->lanes; lane++) {
        unsigned char *to = state[lane].bytes;
        memset(to, 0, sizeof *state);
        memcpy(to, (char *)panel.m + lane * real, (size_t)real);
        memcpy(to + real, (char *)panel.l + lane * real, (size_t)real);
        for (int64_t d = 0; d < c->v_dim; d++) {
            char *o = (char *)panel.o + o_index(c, d, lane) * real;
            if (real_at(c, o, 0) == 0) set_element(real_dtype(c), o, 0, 0); /* -0 and +0 count as the same */
            if (rounding_of(c->s.f)->flushes && isnan(real_at(c, o, 0))) set_element(real_dtype(c), o, 0, NAN);
            memcpy(to + (2 + d) * real, o, (size_t)real);
        }
    }
}

static lane_state whole[BA_MAX_LANES], changed[BA_MAX_LANES];

static void same_bits(record *r, int64_t lane, const char *what) {
    require(r, memcmp(&whole[lane], &changed[lane], sizeof *whole) == 0, what, -1, lane);
}

/* Promise: the contents of a key do not matter to a lane that does not see the key. */
static void check_unseen(test_case *c, const key_range *ranges) {
    static const double worst[] = {NAN, INFINITY, -INFINITY, 0x1.fcp127, -0x1.fcp127};
    const int64_t j = pick(c->keys), some = pick(c->head_dim), some_v = pick(c->v_dim);
    static unsigned char k_row[ROW_BYTES], v_row[ROW_BYTES];
    memcpy(k_row, k.raw[j], ROW_BYTES);
    memcpy(v_row, v.raw[j], ROW_BYTES);
    const double value = worst[pick(5)];
    const float k_scale = c->k_scale[j], v_scale = c->v_scale[j];
    if (pick(2)) c->k_scale[j] = pick(4) ? (float)value : 0;
    if (pick(2)) c->v_scale[j] = pick(4) ? (float)value : 0;
    for (int64_t d = some; d < c->head_dim; d++) set_element(c->s.kv_dtype, k.raw[j], d, value);
    for (int64_t d = some_v; d < c->v_dim; d++) set_element(c->s.kv_dtype, v.raw[j], d, value);
    attend_ranges(c, ranges, 2, changed);
    for (int64_t i = 0; i < c->lanes; i++)
        if (!sees(c, i, j)) same_bits(&records[UNSEEN], i, "[.][lane] depends on the contents of a key that the lane does not see");
    memcpy(k.raw[j], k_row, ROW_BYTES);
    memcpy(v.raw[j], v_row, ROW_BYTES);
    c->k_scale[j] = k_scale;
    c->v_scale[j] = v_scale;
}

/* Two promises. Keys that no lane sees may be left out of a chunk: any number of keys at its end, and a multiple of step_of() at its beginning. And
 * if a chunk is cut in two at a multiple of step_of(), no bit changes in a lane whose visible keys are all on one side of the cut. */
static void check_cuts(const test_case *c, const key_range *ranges) {
    const int64_t step = step_of(c), begin = ranges[1].begin;
    int64_t first = c->keys, end = begin;
    for (int64_t j = begin; j < c->keys; j++)
        for (int64_t i = 0; i < c->lanes; i++)
            if (sees(c, i, j)) {
                first = ba_min(first, j);
                end = j + 1;
            }
    const key_range seen[] = {ranges[0], {begin + (first - begin) / step * step, end}};
    attend_ranges(c, seen, 2, changed);
    for (int64_t i = 0; i < c->lanes; i++) same_bits(&records[CUT], i, "[.][lane] changes when keys that no lane sees are left out");

    const int64_t cut = ba_min(begin + step * (1 + pick(ba_ceil_div(c->keys - begin, step))), c->keys);
    const key_range halves[] = {ranges[0], {begin, cut}, {cut, c->keys}};
    attend_ranges(c, halves, 3, changed);
    for (int64_t i = 0; i < c->lanes; i++) {
        bool before = false, after = false;
        for (int64_t j = begin; j < c->keys; j++)
            if (sees(c, i, j)) *(j < cut ? &before : &after) = true;
        if (!before || !after) same_bits(&records[CUT], i, "[.][lane] changes with a cut that has all keys of the lane on one side");
    }
}

/* Promise: a lane's result does not depend on the other lanes, on the width of the panel, on the contents of scratch memory, or on a mask that hides
 * no key. */
static void check_alone(test_case *c, const key_range *ranges) {
    record *r = &records[ALONE];
    const int64_t lane = pick(c->queries);
    const double kept = q.value[lane][0];
    set_operand(c, &q, lane, 0, specials[pick(3)]);
    attend_ranges(c, ranges, 2, changed);
    for (int64_t i = 0; i < c->lanes; i++)
        if (i != lane) same_bits(r, i, "[.][lane] depends on another lane's query");
    set_operand(c, &q, lane, 0, kept);

    const int32_t lo = c->lo[lane], hi = c->hi[lane];
    draw_range(c, lane);
    attend_ranges(c, ranges, 2, changed);
    for (int64_t i = 0; i < c->lanes; i++)
        if (i != lane) same_bits(r, i, "[.][lane] depends on another lane's mask");
    c->lo[lane] = lo;
    c->hi[lane] = hi;

    test_case other = *c;
    other.scratch_fill = 0x3f;
    if (in_rows(c)) set_variant(&other, c->variant, 1 + pick(c->queries));
    else set_variant(&other, c->variant == WIDE ? NARROW : WIDE, ba_min(c->queries, ba_min(c->s.f->lanes[WIDE], c->s.f->lanes[NARROW])));
    attend_ranges(&other, ranges, 2, changed);
    for (int64_t i = 0; i < other.queries; i++) same_bits(r, i, "[.][lane] depends on the width of the panel");

    if (!in_rows(c)) {
        other = *c;
        other.named_lanes = c->queries;
        attend_ranges(&other, ranges, 2, changed);
        for (int64_t i = 0; i < c->queries; i++) same_bits(r, i, "[.][lane] changes when other lanes are left out");
    }

    other = *c;
    other.mask = NO_MASK;
    attend_ranges(&other, ranges, 2, whole);
    other.mask = ALL_SEEN;
    for (int64_t i = 0; i < c->lanes; i++) draw_range(&other, i);
    attend_ranges(&other, ranges, 2, changed);
    for (int64_t i = 0; i < c->lanes; i++) same_bits(r, i, "[.][lane] changes with a mask that hides nothing");
}

/* Promise of families with has_cuts: a chunk may be cut in two after BA_CUT_KEYS keys, even if lanes see keys on both sides of the cut. */
static void check_long_cuts(test_case *c) {
    for (int n = 0; n < 12; n++) {
        if (!is_drawn()) continue;
        make_case(c, n % FILLS, n % 3 ? pick(MASKS) : NO_MASK, most_queries(c), BA_CUT_KEYS + 1 + pick(BA_MAX_CHUNK - BA_CUT_KEYS),
                  n % 2 ? 64 : 1 + pick(40), n % 2 ? 64 : 1 + pick(40));
        const key_range all[] = {{0, c->keys}}, halves[] = {{0, BA_CUT_KEYS}, {BA_CUT_KEYS, c->keys}};
        attend_ranges(c, all, 1, whole);
        attend_ranges(c, halves, 2, changed);
        for (int64_t i = 0; i < c->lanes; i++) same_bits(&records[CUT], i, "[.][lane] changes with a cut after BA_CUT_KEYS keys");
    }
}

void check_promises(test_case *c) {
    const int64_t lanes = most_queries(c), step = step_of(c);
    if (c->variant <= 1 && c->s.f->has_cuts) check_long_cuts(c);
    for (int n = 0; n < 120; n++) {
        if (!is_drawn()) continue;
        const int64_t before = pick(2) * step; /* keys of a chunk that is attended first */
        const int64_t keys = before + 1 + pick(ba_min(5 * step, BA_MAX_CHUNK - before));
        make_case(c, n % 4 ? RANDOM : TINY, n % 2 ? RANGES : STAIRS, 1 + pick(lanes), keys, n % 3 ? 1 + pick(40) : 32 * (1 + pick(2)), 1 + pick(40));
        const key_range ranges[] = {{0, before}, {before, c->keys}};
        attend_ranges(c, ranges, 2, whole);
        check_unseen(c, ranges);
        check_cuts(c, ranges);
        check_alone(c, ranges);
    }
}

/* Whether two results have the same bits. All NaN count as equal, because the compiler's order of operands decides which of two NaN a sum keeps. */
static bool same_state(const test_case *c, const void *a, const void *b, int64_t reals) {
    const int64_t real = c->s.f->real_size;
    for (int64_t i = 0; i < reals; i++)
        if (memcmp((const char *)a + i * real, (const char *)b + i * real, (size_t)real) != 0 &&
            !(isnan(real_at(c, a, i)) && isnan(real_at(c, b, i))))
            return false;
    return true;
}

/* Promise of attend_many: several panels, each with keys of its own, get the same bits in one call as in calls of attend, one after the other. */
void check_together(test_case *c) {
    enum { PANELS = 5, STATE = (BA_MAX_HEAD_DIM + 2) * BA_MAX_LANES };
    static float states[2][PANELS][STATE] __attribute__((aligned(BA_ALIGN)));
    const ba_attend_family *f = c->s.f;
    for (int n = 0; n < 60; n++) {
        if (!is_drawn()) continue;
        make_case(c, n % FILLS, pick(MASKS), 1 + pick(most_queries(c)), n % 2 ? 1 + pick(40) : 1 + pick(BA_MAX_CHUNK), dim_at(pick(SHORT_DIMS)),
                  dim_at(pick(SHORT_DIMS)));
        if (n % 3 == 0) c->head_dim = c->v_dim = n % 2 ? 128 : 64; /* the usual dims */
        if (n % 3 == 0)
            make_case(c, n % FILLS, n % 4 ? NO_MASK : pick(MASKS), most_queries(c), BA_MAX_CHUNK - pick(2) * (16 + pick(16)), c->head_dim, c->v_dim);
        const ba_panel empty = open_panel(c);
        const ba_chunk all = open_chunk(c, 0, c->keys);
        const int64_t o_size = ba_round_up(c->v_dim, f->dim_pad) * c->lanes;
        ba_panel panels[2][PANELS];
        for (int way = 0; way < 2; way++)
            for (int i = 0; i < PANELS; i++) {
                float *state = states[way][i];
                panels[way][i] =
                    (ba_panel){.q = empty.q, .lo = empty.lo, .hi = empty.hi, .o = state, .m = state + o_size, .l = state + o_size + c->lanes};
                memcpy(panels[way][i].o, empty.o, (size_t)o_size * sizeof(float));
                memcpy(panels[way][i].m, empty.m, (size_t)c->lanes * sizeof(float));
                memcpy(panels[way][i].l, empty.l, (size_t)c->lanes * sizeof(float));
                if (way == 0) refresh(c, &panels[way][i]);
            }
        for (int round = 0; round < 3; round++) {
            ba_chunk chunks[PANELS];
            for (int i = 0; i < PANELS; i++) {
                const int64_t begin = (i > 0) * pick(2) * pick(ba_ceil_div(c->keys, f->key_align)) * f->key_align;
                chunks[i] = all;
                chunks[i].k_rows += begin;
                chunks[i].v_rows += begin;
                if (all.key_index) chunks[i].key_index += begin;
                if (all.bias.numbers) chunks[i].bias.numbers = (const char *)all.bias.numbers + begin * c->lanes * f->real_size;
                if (all.k_scale) chunks[i].k_scale += begin;
                if (all.v_scale) chunks[i].v_scale += begin;
                chunks[i].keys = i == 0 || pick(2) ? c->keys - begin : 1 + pick(c->keys - begin);
            }
            const int64_t used = 1 + pick(PANELS);
            f->panel->attend_many[c->variant](panels[0], chunks, used);
            for (int64_t i = 0; i < used; i++) {
                panels[0][i].fresh = false;
                f->panel->attend[c->variant](&panels[1][i], &chunks[i]);
            }
        }
        for (int i = 0; i < PANELS; i++) {
            close_fresh(c, &panels[0][i]);
            require(&records[TOGETHER], same_state(c, states[0][i], states[1][i], o_size + 2 * c->lanes), "attend gives another state of [.][panel]",
                    -1, i);
        }
    }
}

/* Promise of the kernel for few queries: heads that attend a chunk together have the same bits as each head alone. The bits do not
 * depend on the bytes between the heads' rows, on prefetches or the cache that they go into, or on whether the rows are gathered first. */
void check_heads(test_case *c) {
    enum { HEADS = 5, STATE = BA_FEW_QUERIES * (BA_MAX_HEAD_DIM + 2) };
    static double states[3][HEADS][STATE] __attribute__((aligned(BA_ALIGN)));
    static double scratch[HEADS][BA_FEW_QUERIES * (BA_MAX_CHUNK + BA_MAX_HEAD_DIM)] __attribute__((aligned(BA_ALIGN)));
    const int64_t real = c->s.f->real_size;
    for (int n = 0; n < 60; n++) {
        if (!is_drawn()) continue;
        const bool common = n % 4 == 0; /* dims of 127 to 129: kernels may have code of their own for 128 */
        const int64_t heads = 2 + pick(common ? 2 : HEADS - 1), keys = n % 3 ? 1 + pick(70) : 1 + pick(BA_MAX_CHUNK);
        const int64_t k_dim = common ? 128 + pick(2) : 1 + pick(SHORT_DIMS), v_dim = common ? 128 + pick(2) : 1 + pick(SHORT_DIMS);
        make_case(c, n % FILLS, pick(MASKS), 1 + pick(BA_FEW_QUERIES), keys, heads * k_dim, heads * v_dim);
        const int64_t k_step = c->head_dim / heads,
                      v_step = c->v_dim / heads; /* a row holds all heads; in half of the cases, each head has an unused element behind it */
        c->head_dim = k_step - (k_step > 1 ? pick(2) : 0);
        c->v_dim = v_step - (v_step > 1 ? pick(2) : 0);
        const ba_panel empty = open_panel(c);
        const ba_chunk all = open_chunk_of(c, 0, c->keys, heads * k_step, heads * v_step);
        const int64_t o_size = BA_FEW_QUERIES * BA_FEW_PAD(c->v_dim) * real, ml_size = BA_FEW_QUERIES * real;
        ba_panel panels[3][HEADS];
        ba_chunk chunks[HEADS];
        for (int i = 0; i < heads; i++) {
            chunks[i] = all;
            chunks[i].k_offset = i * k_step * ba_dtype_size(c->s.kv_dtype);
            chunks[i].v_offset = i * v_step * ba_dtype_size(c->s.kv_dtype);
            chunks[i].scratch = scratch[i];
            for (int way = 0; way < 3; way++) {
                char *state = (char *)states[way][i];
                panels[way][i] =
                    (ba_panel){.q = empty.q, .lo = empty.lo, .hi = empty.hi, .o = state, .m = state + o_size, .l = state + o_size + ml_size};
                memset(state, 0, (size_t)(o_size + 2 * ml_size));
                memcpy(panels[way][i].m, empty.m, (size_t)ml_size);
            }
        }
        for (int round = 0; round < 2; round++) {
            if (pick(2)) {
                chunks->k_prefetch = pick_prefetch(all.k_rows, all.keys, heads * k_step * ba_dtype_size(c->s.kv_dtype));
                chunks->v_prefetch = pick_prefetch(all.v_rows, all.keys, heads * v_step * ba_dtype_size(c->s.kv_dtype));
            }
            c->s.few(panels[0], c->queries, chunks, heads);
            if (c->s.few_into_l1) c->s.few_into_l1(panels[2], c->queries, chunks, heads);
            for (int i = 0; i < heads; i++) {
                ba_chunk alone = chunks[i];
                if (pick(2)) alone.gathered = place(PACKED_K, c->keys * (c->head_dim + c->v_dim) * ba_dtype_size(c->s.kv_dtype));
                c->s.few(&panels[1][i], c->queries, &alone, 1);
            }
        }
        require(&records[TOGETHER], neighbours_untouched(), "wrote beside a buffer", -1, -1);
        for (int i = 0; i < heads; i++)
            require(&records[TOGETHER], same_state(c, states[0][i], states[1][i], (o_size + 2 * ml_size) / real),
                    "a head alone gives another state of [.][head]", -1, i);
        for (int i = 0; i < heads && c->s.few_into_l1; i++)
            require(&records[TOGETHER], same_state(c, states[0][i], states[2][i], (o_size + 2 * ml_size) / real),
                    "the kernel that prefetches into L1 gives another state of [.][head]", -1, i);
    }
}

/* Promise of `join`: joining with an empty state changes no bit of the other state, whichever of the two is the target. */
void check_empty_join(test_case *c) {
    for (int n = 0; n < 20; n++) {
        if (!is_drawn()) continue;
        make_case(c, RANDOM, NO_MASK, 1 + pick(BA_FEW_QUERIES), 1 + pick(20), 1 + pick(20), 1 + pick(40));
        const ba_panel empty = empty_state(c, OTHER_O, OTHER_M, OTHER_L);
        const ba_chunk chunk = open_chunk(c, 0, c->keys);
        ba_panel full = open_panel(c);
        attend(c, &full, &chunk);
        const size_t bytes = (size_t)(c->queries * o_stride(c) * c->s.f->real_size);
        static unsigned char kept[BA_FEW_QUERIES * BA_MAX_HEAD_DIM * sizeof(double)];
        memcpy(kept, full.o, bytes);
        c->s.f->few->join(&full, &empty, c->queries, c->v_dim);
        for (int64_t i = 0; i < c->queries; i++)
            for (int64_t d = 0; d < c->v_dim; d++)
                compare(&records[JOIN], real_at(c, full.o, o_index(c, d, i)), real_at(c, kept, o_index(c, d, i)), 0,
                        "o joined with nothing [dim][lane]", d, i);
        const ba_panel into = empty_state(c, OTHER_O, OTHER_M, OTHER_L);
        c->s.f->few->join(&into, &full, c->queries, c->v_dim);
        for (int64_t i = 0; i < c->queries; i++)
            for (int64_t d = 0; d < c->v_dim; d++)
                compare(&records[JOIN], real_at(c, into.o, o_index(c, d, i)), real_at(c, kept, o_index(c, d, i)), 0,
                        "o joined into nothing [dim][lane]", d, i);
        require(&records[JOIN], neighbours_untouched(), "wrote beside a buffer", -1, -1);
    }
}
