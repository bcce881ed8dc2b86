/* A property of the CPU that, besides the level, decides which kernels are used. The functions for levels are in blitz_attn.h. */
#ifndef BA_CORE_CPU_H
#define BA_CORE_CPU_H

#include <stdbool.h>

#include "blitz_attn_types.h"

/* Whether calls at this level use kernels that prefetch into L2. The answer matters only at levels that also have kernels that prefetch into L1. */
bool ba_prefetches_reach_l2(ba_isa level);

#endif
