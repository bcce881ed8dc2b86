/* The forward driver that block-sparse and paged attention share. Internal. */
#ifndef BA_OPS_ATTEND_H
#define BA_OPS_ATTEND_H

#include "kernels/kernels.h"
#include "ops/problem.h"

/* Computes out, and lse where its data is given, of a checked problem. Fails for a bad list entry or for want of memory, before anything is written.
 * (A call in two passes may find no memory for its second pass.) Also fails where the caller's poll function stops it. num_threads 0 stands for
 * ba_get_num_threads(). */
ba_status ba_attend(const ba_problem *problem, int num_threads);

/* The same with the kernels of `level`, which the caller has read once for a call of several steps. */
ba_status ba_attend_at(ba_isa level, const ba_problem *problem, int num_threads);

/* The same for a paged problem whose requests are attended in KV splits of kv_split tokens, a multiple of page_size (attend_kv_split.c). Memory grows
 * with the tokens or the queries, and not with their product. The function may have written some outputs before it finds no memory. */
ba_status ba_attend_kv_split(const ba_problem *problem, int64_t kv_split, int num_threads);

/* As ba_attend(), but for valid queries alone, with the kernels of one family of this level. Does not write the outputs of padding. The caller passes
 * the level from which it took the family, because the level in use may have changed since. */
ba_status ba_attend_with(ba_isa level, const ba_attend_family *family, const ba_problem *problem, int threads);

/* Whether a family of these kernels attends K and V of the problem's k_dtype itself. Otherwise the level's vector family does. */
bool ba_attends_kv_dtype(const ba_kernels *kernels, const ba_attend_family *family, const ba_problem *problem);

#endif
