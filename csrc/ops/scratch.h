/* What drivers do with their scratch memory. Internal. */
#ifndef BA_OPS_SCRATCH_H
#define BA_OPS_SCRATCH_H

#include "core/common.h"
#include "kernels/kernels.h"

/* Hands out parts of a memory block; with base NULL it only adds up. */
static inline char *ba_take(char *base, int64_t *used, int64_t bytes) {
    char *part = base ? base + *used : NULL;
    *used += ba_round_up(bytes, BA_ALIGN);
    return part;
}

/* Reals are float or double, as the kernel family says. */
static inline double ba_get_real(const void *data, int64_t at, int64_t real_size) {
    return real_size == 4 ? (double)((const float *)data)[at] : ((const double *)data)[at];
}

static inline void ba_set_real(void *data, int64_t at, double value, int64_t real_size) {
    if (real_size == 4) ((float *)data)[at] = (float)value;
    else ((double *)data)[at] = value;
}

#endif
