/* The forward driver for lists that route single queries, block by block. Internal. */
#ifndef BA_OPS_ATTEND_BY_BLOCK_H
#define BA_OPS_ATTEND_BY_BLOCK_H

#include "kernels/kernels.h"
#include "ops/problem.h"

/* Computes out and lse of the valid queries of a problem for which ba_runs_by_block() is true. The family has routed kernels. (Routed lists come from
 * block-sparse calls alone: K and V have the dtype of Q, and there are neither pages nor sinks.) Keeps the promises of ba_attend(). */
ba_status ba_attend_by_block(const ba_problem *problem, const ba_attend_family *family, int threads);

#endif
