/* Checks quantisation of rows. (checkkernels.c says how to run the checks.) */
#include "checkkernels.h"

#include <math.h>
#include <string.h>

enum { ANY, HALVES, STEPS, SMALL, LARGE, ZEROS, NOT_FINITE, ROWS_DRAWN };

static double draw(int kind, double limit) {
    switch (kind) {
    /* With a scale of 1, HALVES have ties of int8 and of normal numbers of e4m3. STEPS have ties of e4m3's subnormal numbers, whose step is 2^-9. */
    case HALVES: return (double)(pick(2 * (int64_t)limit + 1) - (int64_t)limit) / 2;
    case STEPS: return (double)(pick(64) - 32) * 0x1p-10;
    case SMALL: return uniform() * (pick(2) ? 0x1p-140 : 0x1p-1060); /* the scale is subnormal, or would be 0 */
    case LARGE: return uniform() * (pick(2) ? 0x1p127 : 0x1p1000);
    case ZEROS: return pick(2) ? 0 : -0.0;
    default: return uniform() * ldexp(1, (int)pick(24) - 12);
    }
}

/* Checks the quantisation of rows with scales that keep them within the dtype's range, and with smaller scales. */
void check_quantise(test_case *c) {
    record *r = &records[QUANTISE];
    const ba_dtype dtype = c->s.kv_dtype;
    const double limit = dtype == BA_INT8 ? 127 : 448;
    for (int64_t n = 0; n < ROWS_DRAWN * DIMS * 4; n++) {
        if (!is_drawn()) continue;
        const int64_t dim = dim_at(n / ROWS_DRAWN % DIMS);
        const int kind = (int)(n % ROWS_DRAWN);
        flip_side();
        forget_places();
        double *row = place_tight(PANEL_Q, dim * (int64_t)sizeof *row, sizeof *row), largest = 0;
        for (int64_t d = 0; d < dim; d++) row[d] = draw(kind, limit);
        if (kind == HALVES || kind == STEPS) row[pick(dim)] = limit; /* the scale is 1 */
        if (kind == NOT_FINITE) row[pick(dim)] = specials[pick(3)];
        for (int64_t d = 0; d < dim; d++) largest = !(fabs(row[d]) <= largest) && !isnan(largest) ? fabs(row[d]) : largest;
        const double magnitude = c->s.cache->magnitude(row, dim);
        require(r, magnitude == largest || (isnan(magnitude) && isnan(largest)), "largest magnitude [row]", n, -1);
        float scale = (float)(largest / limit) * (pick(4) ? 1 : (float)ldexp(1, -(int)pick(12)));
        if (!isfinite(scale) && kind == NOT_FINITE) continue;
        if (!isfinite(scale)) scale = 1;
        if (scale == 0) scale = pick(2) ? 1 : 0x1p-149f;
        unsigned char *to = place_row(OUT_ROWS, 0, dim), want;
        memset(to, 0x55, (size_t)dim);
        c->s.cache->quantise(to, (double)scale, row, dim);
        require(r, neighbours_untouched(), "wrote beside a buffer", n, -1);
        for (int64_t d = 0; d < dim; d++) {
            set_element(dtype, &want, 0, fmax(-limit, fmin(limit, row[d] / (double)scale)));
            require(r, to[d] == want, "number [row][dim]", n, d);
        }
    }
}
