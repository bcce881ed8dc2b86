/* Reals, as drivers read and write them: float for most dtypes, double for float64. Internal. */
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

/* The m of a query that has seen no key yet: minus the largest finite number, so that differences of two m are never NaN. */
static inline double ba_initial_m(int64_t real_size) { return real_size == 4 ? -0x1.fffffep127 : -0x1.fffffffffffffp1023; }

#endif
