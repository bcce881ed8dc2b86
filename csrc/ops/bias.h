/* The bias of a panel: what attn_mask and alibi_slopes add to the scores of its lanes. Internal. */
#ifndef BA_OPS_BIAS_H
#define BA_OPS_BIAS_H

#include "ops/plan.h"

static inline bool ba_has_bias(const ba_problem *p) { return p->attn_mask.data || p->alibi_slopes; }

/* Writes the bias of `lanes` lanes of the tile from `lane` on, `width` numbers for each key, as kernels take it (ba_chunk.bias). fill is that of the
 * vector family of the call's dtype. */
ba_bias_effect ba_make_bias(const ba_problem *p, ba_fill_bias_fn fill, int64_t batch, const ba_tile *tile, int64_t lane, int64_t lanes, int64_t width,
                            const int32_t *key_index, int64_t keys, void *bias);

#endif
