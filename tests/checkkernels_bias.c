/* Checks the biases that masks and slopes add to scores. (checkkernels.c says how to run the checks.) */
#include "checkkernels.h"

#include <math.h>

enum { MASK_KEYS = 200, MASK_STRIDE = 3, ROW_ELEMENTS = MASK_KEYS * MASK_STRIDE };

/* The numbers of a mask: of any size, all 0, all -inf, -inf with few other numbers, or mostly not finite. */
typedef enum kind { ANY, ZEROS, HIDDEN, FEW_NUMBERS, SPECIALS, KINDS } kind;

static double draw(kind kind) {
    switch (kind) {
    case ZEROS: return pick(2) ? 0 : -0.0;
    case HIDDEN: return -INFINITY;
    case FEW_NUMBERS: return pick(60) ? -INFINITY : uniform();
    case SPECIALS: return pick(3) ? specials[pick(3)] : uniform() * 0x1p-20; /* for float16, subnormal */
    default: return uniform() * ldexp(1, (int)pick(20) - 8);
    }
}

static double mask_element(ba_dtype dtype, const void *row, int64_t at) {
    if (dtype == BA_BOOL) return ((const unsigned char *)row)[at] ? 0 : -INFINITY;
    return get_element(dtype, row, at);
}

void check_fill_bias(test_case *c) {
    static const ba_dtype dtypes[] = {BA_FLOAT32, BA_FLOAT16, BA_BFLOAT16, BA_FLOAT64, BA_BOOL};
    record *r = &records[FILL_BIAS];
    const double least = c->s.f->real_size == 4 ? 0x1p-126 : 0x1p-1022, most = largest_of(real_dtype(c));
    for (int n = 0; n < 60 * KINDS; n++) {
        if (!is_drawn()) continue;
        flip_side();
        forget_places();
        const ba_dtype dtype = dtypes[n % 5];
        const kind kind = (enum kind)(n / 5 % KINDS);
        const bool few = pick(3) == 0;
        const int64_t width = few ? 1 + pick(BA_FEW_QUERIES) : c->s.f->lanes[pick(2)], keys = 1 + pick(MASK_KEYS / 2), bytes = ba_dtype_size(dtype);
        const int64_t stride = pick(3) ? 1 : pick(MASK_STRIDE + 1);
        const bool masked = pick(5) > 0, sloped = !masked || pick(3) == 0;
        int32_t *key_index = place_tight(KEY_INDEX, keys * (int64_t)sizeof *key_index, sizeof *key_index);
        int32_t index = (int32_t)pick(20);
        for (int64_t j = 0; j < keys; j++, index++) key_index[j] = index += pick(30) == 0 && index < MASK_KEYS - keys ? (int32_t)pick(3) : 0;
        for (int64_t j = 0; j < keys; j++) key_index[j] = (int32_t)ba_min(key_index[j], MASK_KEYS - keys + j);
        const int64_t elements = key_index[keys - 1] * stride + 1; /* the row ends behind the last number that is read */
        const void **rows = place_tight(ROW_POINTERS, width * (int64_t)sizeof *rows, sizeof *rows);
        float *slopes = place_tight(K_SCALES, width * (int64_t)sizeof *slopes, sizeof *slopes);
        int32_t *places = place_tight(ROW_LANES, width * (int64_t)sizeof *places, sizeof *places);
        for (int64_t i = 0; i < width; i++) {
            unsigned char *row = place_row(K_ROWS, i, elements * bytes);
            for (int64_t d = 0; d < elements; d++)
                if (dtype == BA_BOOL) row[d] = kind == ZEROS ? 1 : kind == HIDDEN ? 0 : (unsigned char)(pick(2) * (1 + pick(255)));
                else set_element(dtype, row, d, draw(kind));
            rows[i] = row;
            slopes[i] = (float)(pick(8) ? uniform() : pick(2) ? 0 : -1.5e38); /* two tokens away, the slope -1.5e38 adds more than float holds */
            places[i] = (int32_t)(pick(4) ? pick(2 * MASK_KEYS) - 20 : INT32_MAX - pick(2));
        }
        const ba_bias_source source = {
            .rows = masked ? rows : NULL, .dtype = dtype, .stride = stride, .slopes = sloped ? slopes : NULL, .places = places};
        const int64_t row = BA_FEW_PAD(keys);
        void *bias = place(WEIGHTS, (few ? row : keys) * width * c->s.f->real_size);
        const ba_bias_effect effect = (few ? c->s.f->panel->fill_few_bias : c->s.f->panel->fill_bias)(bias, &source, width, key_index, keys);
        require(r, neighbours_untouched(), "wrote beside a buffer", -1, -1);
        bool zero = true, all_hidden = true, some_hidden = false;
        for (int64_t j = 0; j < keys; j++)
            for (int64_t i = 0; i < width; i++) {
                const double number = masked ? mask_element(dtype, rows[i], key_index[j] * stride) : 0,
                             got = real_at(c, bias, few ? i * row + j : j * width + i);
                const double distance = fabs((double)places[i] - key_index[j]), slope = sloped ? (double)slopes[i] * distance : 0;
                double want = (number - slope) * BA_LOG2_E;
                if (fabs(want) > most * 1.0001) want = copysign(INFINITY, want);
                if (fabs(fabs(want) - most) > most * 0.0001)
                    compare(r, got, want, 4 * unit(c) * BA_LOG2_E * (fabs(number) + fabs(slope)) + least, "bias [key][lane]", j, i);
                zero &= got == 0;
                all_hidden &= got == -INFINITY;
                some_hidden |= got == -INFINITY;
            }
        const ba_bias_effect right = zero ? BA_BIAS_NONE : all_hidden ? BA_BIAS_HIDES_ALL : some_hidden ? BA_BIAS_HIDES_SOME : BA_BIAS_ADDS;
        require(r, effect == right, "effect", n, -1);
    }
}
