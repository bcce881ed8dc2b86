/* Block-sparse and paged attention: calls are opened, given their outputs, and run by the drivers. */
#include "core/float_mode.h"
#include "core/status.h"
#include "ops/attend/attend.h"
#include "ops/check.h"
#include "ops/open/open.h"

ba_status ba_run_attention(const ba_attention *a) {
    BA_IN_USUAL_MODE;
    if (a->problem.batch == 0 || a->problem.q_len == 0) return BA_OK; /* nothing to write, however many heads there are */
    return a->kv_split ? ba_attend_kv_split(&a->problem, a->kv_split, a->num_threads) : ba_attend(&a->problem, a->num_threads);
}

ba_status ba_run_attention_backward(const ba_attention *a, const ba_gradients *gradients) {
    BA_IN_USUAL_MODE;
    if (a->problem.batch > 0 && (a->problem.q_len > 0 || a->problem.kv_len > 0)) BA_TRY(ba_attend_backward(&a->problem, gradients, a->num_threads));
    return ba_attend_bias_backward(&a->problem, gradients, a->num_threads);
}

/* ---- The C API ------------------------------------------------------------------------------------------------------------- */

ba_status ba_block_sparse_check(const ba_block_sparse_args *args, ba_tensor *out_shape, ba_tensor *lse_shape) {
    ba_attention a;
    BA_TRY(ba_check_pointer("args", args));
    BA_TRY(ba_check_pointer("out_shape", out_shape));
    BA_TRY(ba_check_pointer("lse_shape", lse_shape));
    BA_TRY(ba_open_block_sparse(args, &a));
    *out_shape = a.out_shape;
    *lse_shape = a.lse_shape;
    return BA_OK;
}

ba_status ba_block_sparse_attention(const ba_block_sparse_args *args) {
    ba_attention a;
    BA_TRY(ba_check_pointer("args", args));
    BA_TRY(ba_open_block_sparse(args, &a));
    BA_TRY(ba_set_block_sparse_outputs(args, &a));
    return ba_run_attention(&a);
}

ba_status ba_block_sparse_backward_check(const ba_block_sparse_backward_args *args, ba_tensor *dq_shape, ba_tensor *dk_shape, ba_tensor *dv_shape) {
    ba_attention a;
    ba_gradients gradients;
    BA_TRY(ba_check_pointer("args", args));
    BA_TRY(ba_check_pointer("dq_shape", dq_shape));
    BA_TRY(ba_check_pointer("dk_shape", dk_shape));
    BA_TRY(ba_check_pointer("dv_shape", dv_shape));
    BA_TRY(ba_open_block_sparse_backward(args, &a, &gradients));
    ba_tensor shapes[3];
    ba_gradient_shapes(args, shapes);
    *dq_shape = shapes[0];
    *dk_shape = shapes[1];
    *dv_shape = shapes[2];
    return BA_OK;
}

ba_status ba_block_sparse_attention_backward(const ba_block_sparse_backward_args *args) {
    ba_attention a;
    ba_gradients gradients;
    BA_TRY(ba_check_pointer("args", args));
    BA_TRY(ba_open_block_sparse_backward(args, &a, &gradients));
    BA_TRY(ba_set_gradients(args, &a, &gradients));
    return ba_run_attention_backward(&a, &gradients);
}

ba_status ba_paged_check(const ba_paged_args *args, ba_tensor *out_shape, ba_tensor *lse_shape) {
    ba_attention a;
    BA_TRY(ba_check_pointer("args", args));
    BA_TRY(ba_check_pointer("out_shape", out_shape));
    BA_TRY(ba_check_pointer("lse_shape", lse_shape));
    BA_TRY(ba_open_paged(args, NULL, &a));
    *out_shape = a.out_shape;
    *lse_shape = a.lse_shape;
    ba_close_attention(&a);
    return BA_OK;
}

ba_status ba_paged_attention(const ba_paged_args *args) {
    ba_attention a;
    BA_TRY(ba_check_pointer("args", args));
    BA_TRY(ba_open_paged(args, NULL, &a));
    ba_status status = ba_set_paged_outputs(args, &a);
    if (status == BA_OK) status = ba_run_attention(&a);
    ba_close_attention(&a);
    return status;
}
