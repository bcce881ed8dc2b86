/* The level whose kernels a driver takes. Internal. */
#ifndef BA_OPS_LEVELS_H
#define BA_OPS_LEVELS_H

#include "kernels/kernels.h"

/* The highest level, from `level` down, whose vector family for the dtype `real` has the separate kernels `scores` and `softmax`. Other families may
 * have the fused kernel only. */
static inline ba_isa ba_level_with_parts(ba_isa level, ba_dtype real) {
    while (level > BA_ISA_PORTABLE && !ba_kernels_at(level)->vector[real]->panel->scores[0]) level--;
    return level;
}

#endif
