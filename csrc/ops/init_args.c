/* The arguments that a caller begins with, and the scale that NAN stands for. */
#include <math.h>

#include "blitz_attn.h"
#include "core/float_mode.h"

ba_block_sparse_args ba_block_sparse_args_init(void) {
    return (ba_block_sparse_args){.block_q = 128, .block_kv = 128, .scale = NAN, .window = {-1, -1}};
}

ba_block_sparse_backward_args ba_block_sparse_backward_args_init(void) {
    return (ba_block_sparse_backward_args){.forward = ba_block_sparse_args_init()};
}

ba_paged_args ba_paged_args_init(void) { return (ba_paged_args){.scale = NAN, .window = -1}; }

ba_select_prefill_args ba_select_prefill_args_init(void) {
    return (ba_select_prefill_args){.call = ba_block_sparse_args_init(), .pool_q = 1, .pool_k = 1, .largest = 1};
}

ba_nsa_select_args ba_nsa_select_args_init(void) { return (ba_nsa_select_args){.scale = NAN}; }

ba_select_tokens_args ba_select_tokens_args_init(void) {
    return (ba_select_tokens_args){.scale = NAN, .pool_size = 1, .block_size = 1, .min_score = NAN};
}

double ba_default_scale(int64_t head_dim) {
    BA_IN_USUAL_MODE;
    const volatile double dim = (double)head_dim; /* volatile keeps the compiler from computing before the mode changes, or after it is restored */
    const volatile double scale = head_dim > 0 ? 1 / sqrt(dim) : 1;
    return scale;
}
