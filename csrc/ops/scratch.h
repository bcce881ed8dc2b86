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

/* Which of the next rows are asked for while a head meets its own: next[head][row], so that all heads together ask for the rows
 * of all heads in the order in which these lie. Steps are bytes; rows are those of the first head. */
static inline void ba_rows_ahead(int64_t head_step, int64_t row_step, int64_t heads, int64_t count, const void *const *rows, int64_t rows_count,
                                 const void **next) {
    const bool heads_side_by_side = head_step < row_step;
    for (int64_t j = 0; j < count; j++) {
        const char *row = rows[ba_min(j, rows_count - 1)];
        const void **to = next + (heads_side_by_side ? j * heads : j);
        for (int64_t head = 0; head < heads; head++) to[heads_side_by_side ? head : head * count] = row + head * head_step;
    }
}

#endif
