/* The forward driver that block-sparse and paged attention share. Internal. */
#ifndef BA_OPS_ATTEND_H
#define BA_OPS_ATTEND_H

#include "kernels/kernels.h"
#include "ops/problem.h"

/* Computes out (and lse where wanted) of a checked problem. Fails, before it writes, only for a bad list entry or for want
 * of memory. num_threads 0: as set. */
ba_status ba_attend(const ba_problem *problem, int num_threads);

/* The same of valid queries alone, by the kernels of one family. */
ba_status ba_attend_with(const ba_attend_family *family, const ba_problem *problem, int threads);

#endif
