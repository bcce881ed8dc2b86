/* The bias of a panel: what attn_mask and alibi_slopes add to the scores of its lanes. Internal. */
#ifndef BA_OPS_BIAS_H
#define BA_OPS_BIAS_H

#include "ops/plan/tiles.h"

static inline bool ba_has_bias(const ba_problem *p) { return p->attn_mask.data || p->alibi_slopes; }

/* Makes, in `memory`, the bias of a panel of `lanes` lanes for the keys of the chunk, and sets *bias for the panel's kernel. *bias has no numbers
 * where the call has no bias, or where all numbers are 0. Returns false where the bias hides all keys from all lanes, so that the panel need not
 * attend them. `fill` is fill_bias, or fill_few_bias, of the vector family of the call's dtype. */
bool ba_make_bias(const ba_problem *p, ba_fill_bias_fn fill, int64_t batch, const ba_tile *tile, const ba_panel_state *s, int64_t lanes,
                  const ba_chunk *chunk, void *memory, ba_bias *bias);

#endif
