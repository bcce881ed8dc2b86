/* Reals, as drivers read, write and add them: float for most dtypes, double for float64. Internal. */
#ifndef BA_OPS_REALS_H
#define BA_OPS_REALS_H

#include <stdint.h>

/* Element `at` of an array of reals: float where real_size is 4, else double. */
static inline double ba_get_real(const void *data, int64_t at, int64_t real_size) {
    return real_size == 4 ? (double)((const float *)data)[at] : ((const double *)data)[at];
}

static inline void ba_set_real(void *data, int64_t at, double value, int64_t real_size) {
    if (real_size == 4) ((float *)data)[at] = (float)value;
    else ((double *)data)[at] = value;
}

/* What m is before a query has seen a key, minus the largest finite number, so that differences of two m are never NaN. */
static inline double ba_initial_m(int64_t real_size) { return real_size == 4 ? -0x1.fffffep127 : -0x1.fffffffffffffp1023; }

#define BA_DEFINE_ADD(real)                                                                                                                          \
    static inline void ba_add_##real(real *restrict to, const real *restrict from, int64_t n) {                                                      \
        for (int64_t i = 0; i < n; i++) to[i] += from[i];                                                                                            \
    }
BA_DEFINE_ADD(float)
BA_DEFINE_ADD(double)
#undef BA_DEFINE_ADD

static inline void ba_add_reals(void *to, const void *from, int64_t n, int64_t real_size) {
    if (real_size == 4) ba_add_float(to, from, n);
    else ba_add_double(to, from, n);
}

#endif
