/* What kernels are chosen by beside the level. The functions on levels are in blitz_attn.h. */
#ifndef BA_CORE_CPU_H
#define BA_CORE_CPU_H

#include <stdbool.h>

#include "blitz_attn.h"

/* Whether calls at this level use the kernels that prefetch into L2, where the level has those that prefetch into L1, too. */
bool ba_prefetches_reach_l2(ba_isa level);

#endif
