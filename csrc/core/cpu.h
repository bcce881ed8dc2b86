/* What kernels are chosen by beside the level. The functions on levels are in blitz_attn.h. */
#ifndef BA_CORE_CPU_H
#define BA_CORE_CPU_H

#include <stdbool.h>

#include "blitz_attn.h"

/* Whether cores that run this level carry out a prefetch into L2 of a line that no cache holds. */
bool ba_prefetches_reach_l2(ba_isa level);

#endif
