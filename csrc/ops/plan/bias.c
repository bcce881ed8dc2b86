#include "ops/plan/bias.h"

bool ba_make_bias(const ba_problem *p, ba_fill_bias_fn fill, int64_t batch, const ba_tile *tile, const ba_panel_state *s, int64_t lanes,
                  const ba_chunk *chunk, void *memory, ba_bias *bias) {
    *bias = (ba_bias){NULL, false};
    if (!ba_has_bias(p)) return true;
    const ba_tensor *mask = &p->attn_mask;
    const ba_kv_split whole = {.request = batch}, *split = p->kv_splits ? &p->kv_splits[batch] : &whole;
    const int64_t corner = split->request * mask->strides[0] + split->first_query * mask->strides[2] + split->first_key * mask->strides[3];
    const void *rows[BA_MAX_LANES];
    int32_t places[BA_MAX_LANES];
    float slopes[BA_MAX_LANES];
    for (int64_t i = 0; i < lanes; i++) {
        const int64_t at = s->lane + ba_min(i, s->lanes - 1); /* a lane without a query gets the bias of the last lane that has a query */
        const int64_t head = ba_lane_head(tile, at), query = ba_lane_query(tile, at);
        if (mask->data) {
            const int64_t row = corner + head * mask->strides[1] + query * mask->strides[2];
            rows[i] = (const char *)mask->data + row * ba_dtype_size(mask->dtype);
        }
        if (p->alibi_slopes) {
            slopes[i] = p->alibi_slopes[head];
            /* Distances have 32 bits. A position that is clipped is so far from every key that one token more or less does not matter. */
            places[i] = (int32_t)ba_min(ba_diagonal(p, batch, query), INT32_MAX);
        }
    }
    const ba_bias_source source = {.rows = mask->data ? rows : NULL,
                                   .dtype = mask->dtype,
                                   .stride = mask->strides[3],
                                   .slopes = p->alibi_slopes ? slopes : NULL,
                                   .places = places};
    const ba_bias_effect effect = fill(memory, &source, lanes, chunk->key_index, chunk->keys);
    if (effect != BA_BIAS_NONE) *bias = (ba_bias){memory, effect != BA_BIAS_ADDS};
    return effect != BA_BIAS_HIDES_ALL;
}
