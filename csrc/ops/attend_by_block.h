/* The forward driver for lists that route single queries, block by block. Internal. */
#ifndef BA_OPS_ATTEND_BY_BLOCK_H
#define BA_OPS_ATTEND_BY_BLOCK_H

#include "kernels/kernels.h"
#include "ops/problem.h"

/* Whether this driver can serve the problem with the kernels of this family. */
bool ba_attends_by_block(const ba_problem *problem, const ba_attend_family *family);

/* Computes out and lse of the problem's valid queries. Keeps the promises of ba_attend(). */
ba_status ba_attend_by_block(const ba_problem *problem, const ba_attend_family *family, int threads);

#endif
