#include "python/ops.h"

#include <fenv.h>
#include <math.h>
#include <string.h>

#include "core/float_mode.h"
#include "core/status.h"
#include "ops/check.h"
#include "ops/open/open.h"
#include "ops/select/select_prefill.h"

/* ---- Block-sparse attention -------------------------------------------------------------------------------- */

typedef struct block_sparse_call {
    arg_array q, k, v, blocks, kv_ranges, attn_mask, alibi_slopes, sinks, out, lse;
    arg_list q_lens, kv_lens, cu_q, cu_kv, cu_rows, q_begin, q_total;
    ba_block_sparse_args args;
} block_sparse_call;

static void release_block_sparse(block_sparse_call *call) {
    arg_array *const arrays[] = {&call->q,     &call->k,   &call->v,  &call->blocks, &call->kv_ranges, &call->attn_mask, &call->alibi_slopes,
                                 &call->sinks, &call->out, &call->lse};
    arg_list *const lists[] = {&call->q_lens, &call->kv_lens, &call->cu_q, &call->cu_kv, &call->cu_rows, &call->q_begin, &call->q_total};
    for (size_t i = 0; i < sizeof arrays / sizeof *arrays; i++) arg_release(arrays[i]);
    for (size_t i = 0; i < sizeof lists / sizeof *lists; i++) PyMem_Free(lists[i]->values);
}

/* Reads the arguments that say which queries these are, for `batch` sequences. */
static int read_positions(module_state *state, PyObject *q_begin, PyObject *q_total, int64_t batch, const char *meaning, block_sparse_call *call) {
    if (arg_numbers(state, q_begin, "q_begin", batch, meaning, &call->q_begin) < 0) return -1;
    if (arg_numbers(state, q_total, "q_total", batch, meaning, &call->q_total) < 0) return -1;
    call->args.q_begin = call->q_begin.values;
    call->args.q_total = call->q_total.values;
    return 0;
}

/* Sets the lists of lengths. The C API takes them as bare pointers, so their number is checked here. The library checks whether they belong to the
 * layout and are in range. */
static int set_lengths(module_state *state, PyObject *q_begin, PyObject *q_total, block_sparse_call *call) {
    ba_block_sparse_args *a = &call->args;
    a->cu_q = call->cu_q.values;
    a->cu_kv = call->cu_kv.values;
    a->q_lens = call->q_lens.values;
    a->kv_lens = call->kv_lens.values;
    a->cu_rows = call->cu_rows.values;
    if (a->layout == BA_TND) {
        a->batch = call->cu_q.count - 1; /* without entries this is -1, which the library refuses */
        /* Any other q is refused by the library, before it reads lengths. */
        if (a->q.ndim == 3 && (a->cu_q == NULL || a->cu_kv == NULL)) {
            const char *const missing = a->cu_q == NULL ? "cu_seqlens_q" : "cu_seqlens_kv";
            PyErr_Format(PyExc_ValueError, "%s: expected cu_seqlens_q= and cu_seqlens_kv= with layout TND, got no %s", missing, missing);
            return -1;
        }
        if (a->cu_q == NULL) return 0;
        if (arg_expect_count(&call->cu_rows, "cu_rows", call->cu_q.count, "as many as cu_seqlens_q has") < 0) return -1;
        if (arg_expect_count(&call->cu_kv, "cu_seqlens_kv", call->cu_q.count, "as many as cu_seqlens_q has") < 0) return -1;
        return read_positions(state, q_begin, q_total, a->batch, "one per sequence", call);
    }
    const int64_t batch = a->q.ndim > 0 ? a->q.dims[0] : 0;
    if (a->q.ndim != (a->layout == BA_BSH ? 3 : 4)) { /* q has no batch axis to compare with; the library refuses q before it reads lengths */
        a->q_lens = a->kv_lens = NULL;
        return 0;
    }
    if (arg_expect_count(&call->q_lens, "q_lens", batch, "one per batch entry") < 0) return -1;
    if (arg_expect_count(&call->kv_lens, "kv_lens", batch, "one per batch entry") < 0) return -1;
    return read_positions(state, q_begin, q_total, batch, "one per batch entry", call);
}

/* Reads num_heads or num_kv_heads. In a layout that has an axis of heads, it may be given, too, but must agree with that axis. None leaves 0 for the
 * library, which is no number that a caller may give. */
static int read_heads(const ba_block_sparse_args *a, PyObject *object, const ba_tensor *tensor, const char *name, const char *tensor_name,
                      int64_t *heads) {
    if (object == Py_None) return 0;
    if (arg_int64(object, name, heads) < 0) return -1;
    const int axis = a->layout == BA_BNSD ? 1 : a->layout == BA_BSND ? 2 : 1;
    const bool has_axis = a->layout != BA_BSH && axis < tensor->ndim;
    if (has_axis && tensor->dims[axis] != *heads)
        PyErr_Format(PyExc_ValueError, "%s: expected %lld like %s, got %lld", name, (long long)tensor->dims[axis], tensor_name, (long long)*heads);
    else if (*heads == 0 && !has_axis) PyErr_Format(PyExc_ValueError, "%s: expected at least 1, got 0", name);
    else return 0;
    return -1;
}

/* The arguments of the forward and the backward function, in order. Those that both have come first. Each gets an index and a name. */
/* clang-format off */
#define BSA_ARGUMENTS(X) \
    X(empty) X(q) X(k) X(v) X(sabi) X(block_shape) X(scale) X(layout) X(causal) X(window) X(q_lens) X(kv_lens) X(cu_seqlens_q) \
    X(cu_seqlens_kv) X(num_heads) X(num_kv_heads) X(dtype) X(num_threads)
#define TOKEN_ARGUMENTS(X) X(q_begin) X(q_total) X(kv_ranges) X(attn_mask) X(alibi_slopes)
#define ROUTING_ARGUMENTS(X) X(cu_rows) X(routed) X(key_stride) X(key_last)
#define FORWARD_ARGUMENTS(X) BSA_ARGUMENTS(X) TOKEN_ARGUMENTS(X) X(return_lse) X(out_dtype) X(out) X(lse_out) ROUTING_ARGUMENTS(X) X(softcap) X(sinks)
#define BACKWARD_ARGUMENTS(X) BSA_ARGUMENTS(X) TOKEN_ARGUMENTS(X) X(dout) X(out) X(lse) X(dlse) X(dq) X(dk) X(dv) X(accumulate) ROUTING_ARGUMENTS(X) \
    X(softcap) X(bias_grads)
/* clang-format on */
#define AS_INDEX(name) BSA_##name,
#define AS_ROUTING_INDEX(name) ROUTING_##name,
#define AS_FORWARD_INDEX(name) FORWARD_##name,
#define AS_BACKWARD_INDEX(name) BACKWARD_##name,
enum { BSA_ARGUMENTS(AS_INDEX) BSA_COUNT };
enum { ROUTING_ARGUMENTS(AS_ROUTING_INDEX) ROUTING_COUNT };
enum { FORWARD_ARGUMENTS(AS_FORWARD_INDEX) FORWARD_COUNT };
enum { BACKWARD_ARGUMENTS(AS_BACKWARD_INDEX) BACKWARD_COUNT };

static int read_optional_int64(PyObject *object, const char *name, int64_t *value) { return object == Py_None ? 0 : arg_int64(object, name, value); }

/* The number of query heads where q fits the layout, else 0: the library refuses q then. */
static int64_t query_heads(const ba_block_sparse_args *a) {
    const int axis = a->layout == BA_BNSD || a->layout == BA_TND ? 1 : 2;
    return a->layout == BA_BSH ? a->num_heads : a->q.ndim > axis ? a->q.dims[axis] : 0;
}

/* Reads all inputs of a call. `values` begins with the arguments of BSA_ARGUMENTS, `tokens` with those of TOKEN_ARGUMENTS, and `routing` with those
 * of ROUTING_ARGUMENTS. */
static int read_block_sparse(module_state *state, PyObject *const *values, PyObject *const *tokens, PyObject *const *routing, block_sparse_call *call,
                             ba_dtype *bits_as) {
    ba_block_sparse_args *a = &call->args;
    int64_t block_shape[2];
    ba_dtype dtype;
    if (arg_dtype(values[BSA_dtype], "dtype", ARG_FLOATS, &dtype) < 0) return -1;
    *bits_as = arg_bits(dtype);
    if (arg_hold(state, values[BSA_q], "q", ARG_FLOATS, *bits_as, &call->q) < 0) return -1;
    if (arg_hold(state, values[BSA_k], "k", ARG_FLOATS, *bits_as, &call->k) < 0) return -1;
    if (arg_hold(state, values[BSA_v], "v", ARG_FLOATS, *bits_as, &call->v) < 0) return -1;
    a->q = call->q.tensor;
    a->k = call->k.tensor;
    a->v = call->v.tensor;
    if (arg_expect_dtype("q", a->q.dtype, "dtype", dtype) < 0) return -1;
    if (values[BSA_sabi] != Py_None) {
        if (arg_hold(state, values[BSA_sabi], "sabi", ARG_INDICES, BA_UINT16, &call->blocks) < 0) return -1;
        a->blocks = call->blocks.tensor;
    }
    if (tokens[2] != Py_None) {
        if (arg_hold(state, tokens[2], "kv_ranges", ARG_TABLES, BA_UINT16, &call->kv_ranges) < 0) return -1;
        a->kv_ranges = call->kv_ranges.tensor;
    }
    if (arg_mask(state, tokens[3], "attn_mask", &call->attn_mask, &a->attn_mask) < 0) return -1;
    if (arg_pair(values[BSA_block_shape], "block_shape", block_shape) < 0) return -1;
    a->block_q = block_shape[0];
    a->block_kv = block_shape[1];
    if (arg_layout(values[BSA_layout], "layout", &a->layout) < 0) return -1;
    if (arg_flag(values[BSA_causal], "causal", &a->causal) < 0) return -1;
    if (values[BSA_window] != Py_None && arg_pair(values[BSA_window], "window", a->window) < 0) return -1;
    if (read_heads(a, values[BSA_num_heads], &a->q, "num_heads", "q", &a->num_heads) < 0) return -1;
    if (read_heads(a, values[BSA_num_kv_heads], &a->k, "num_kv_heads", "k", &a->num_kv_heads) < 0) return -1;
    if (a->layout == BA_BSH && values[BSA_num_heads] == Py_None) {
        PyErr_SetString(PyExc_ValueError, "num_heads: expected num_heads= with layout BSH, whose last axis holds all heads, got no num_heads");
        return -1;
    }
    if (arg_threads(values[BSA_num_threads], "num_threads", &a->num_threads) < 0) return -1;
    if (arg_scale(values[BSA_scale], "scale", &a->scale) < 0) return -1;
    if (arg_lengths(state, values[BSA_q_lens], "q_lens", &call->q_lens) < 0) return -1;
    if (arg_lengths(state, values[BSA_kv_lens], "kv_lens", &call->kv_lens) < 0) return -1;
    if (arg_lengths(state, values[BSA_cu_seqlens_q], "cu_seqlens_q", &call->cu_q) < 0) return -1;
    if (arg_lengths(state, values[BSA_cu_seqlens_kv], "cu_seqlens_kv", &call->cu_kv) < 0) return -1;
    if (arg_lengths(state, routing[ROUTING_cu_rows], "cu_rows", &call->cu_rows) < 0) return -1;
    if (routing[ROUTING_routed] != Py_None && arg_flag(routing[ROUTING_routed], "routed", &a->routed) < 0) return -1;
    if (read_optional_int64(routing[ROUTING_key_stride], "key_stride", &a->key_stride) < 0) return -1;
    if (read_optional_int64(routing[ROUTING_key_last], "key_last", &a->key_last) < 0) return -1;
    const int64_t heads = query_heads(a);
    if (heads > 0 && arg_head_numbers(state, tokens[4], "alibi_slopes", heads, &call->alibi_slopes, &a->alibi_slopes) < 0) return -1;
    return set_lengths(state, tokens[0], tokens[1], call);
}

static int check_disjoint(const block_sparse_call *call) {
    const arg_array *const inputs[] = {&call->q,    &call->k, &call->v, &call->blocks, &call->kv_ranges, &call->attn_mask, &call->alibi_slopes,
                                       &call->sinks};
    for (size_t i = 0; i < sizeof inputs / sizeof *inputs; i++)
        if (arg_disjoint(&call->out, inputs[i]) < 0 || arg_disjoint(&call->lse, inputs[i]) < 0) return -1;
    return arg_disjoint(&call->lse, &call->out);
}

static int read_softcap(PyObject *object, ba_block_sparse_args *a) { return object == Py_None ? 0 : arg_double(object, "softcap", &a->softcap); }

/* Reads what the forward function alone takes, and the softcap. */
static int read_forward(module_state *state, PyObject *const *values, block_sparse_call *call, int *return_lse) {
    ba_block_sparse_args *a = &call->args;
    const int64_t heads = query_heads(a);
    if (arg_flag(values[FORWARD_return_lse], "return_lse", return_lse) < 0) return -1;
    if (arg_out_dtype(values[FORWARD_out_dtype], a->q.dtype, &a->unrounded) < 0) return -1;
    if (read_softcap(values[FORWARD_softcap], a) < 0) return -1;
    return heads > 0 ? arg_head_numbers(state, values[FORWARD_sinks], "sinks", heads, &call->sinks, &a->sinks) : 0;
}

TAKES(block_sparse_attention, BSA_sabi, FORWARD_ARGUMENTS(AS_TEXT));
PyObject *py_block_sparse_attention(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    SORT_ARGUMENTS(block_sparse_attention, FORWARD_COUNT);
    module_state *state = PyModule_GetState(module);
    block_sparse_call call = {.args = ba_block_sparse_args_init()};
    ba_attention attention = {.num_threads = 0};
    ba_dtype bits_as;
    int return_lse;
    ba_status status;
    PyObject *out = NULL, *lse = NULL, *result = NULL;

    if (read_block_sparse(state, values, values + FORWARD_q_begin, values + FORWARD_cu_rows, &call, &bits_as) < 0 ||
        read_forward(state, values, &call, &return_lse) < 0)
        goto done;
    if (arg_check_masked(ba_open_block_sparse(&call.args, &attention), &call.attn_mask) < 0) goto done;

    out = arg_hold_or_make_output(state, values[FORWARD_out], values[BSA_empty], &attention.out_shape, "out", ARG_FLOATS, bits_as, &call.out);
    if (out == NULL) goto done;
    call.args.out = call.out.tensor;
    if (return_lse) {
        lse = arg_hold_or_make_output(state, values[FORWARD_lse_out], values[BSA_empty], &attention.lse_shape, "lse", ARG_LSE, BA_UINT16, &call.lse);
        if (lse == NULL) goto done;
        call.args.lse = call.lse.tensor;
    }
    if (check_disjoint(&call) < 0 || arg_check(ba_set_block_sparse_outputs(&call.args, &attention)) < 0) goto done;

    INTERRUPTIBLE(status, ba_run_attention(&attention));
    if (arg_check(status) < 0) goto done;
    result = return_lse ? PyTuple_Pack(2, out, lse) : Py_NewRef(out);
done:
    ba_close_attention(&attention);
    release_block_sparse(&call);
    Py_XDECREF(out);
    Py_XDECREF(lse);
    return result;
}

/* ---- Gradients of block-sparse attention --------------------------------------------------------------------- */

enum { GRADIENTS = 3, BIAS_GRADIENTS = 2 };

/* Makes the arrays for the gradients of attn_mask and alibi_slopes, by empty(): None for one that is not given, or is a mask of bool. */
static int make_bias_gradients(module_state *state, PyObject *empty, const block_sparse_call *call, ba_block_sparse_backward_args *a,
                               arg_array held[BIAS_GRADIENTS], PyObject *made[BIAS_GRADIENTS]) {
    const bool wanted[BIAS_GRADIENTS] = {ba_given(&a->forward.attn_mask) && a->forward.attn_mask.dtype != BA_BOOL, a->forward.alibi_slopes != NULL};
    const ba_tensor shapes[BIAS_GRADIENTS] = {call->attn_mask.tensor, call->alibi_slopes.tensor};
    static const char *const names[BIAS_GRADIENTS] = {"dattn_mask", "dalibi_slopes"};
    for (int i = 0; i < BIAS_GRADIENTS; i++) {
        made[i] =
            wanted[i] ? arg_hold_or_make_output(state, Py_None, empty, &shapes[i], names[i], ARG_FLOATS, BA_UINT16, &held[i]) : Py_NewRef(Py_None);
        if (made[i] == NULL) return -1;
    }
    if (wanted[0]) a->dattn_mask = arg_four_axes(&held[0].tensor);
    if (wanted[1]) a->dalibi_slopes = held[1].tensor.data;
    return 0;
}

TAKES(block_sparse_attention_backward, BSA_sabi, BACKWARD_ARGUMENTS(AS_TEXT));
PyObject *py_block_sparse_attention_backward(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    static const char *const output_names[GRADIENTS] = {"dq", "dk", "dv"};
    SORT_ARGUMENTS(block_sparse_attention_backward, BACKWARD_COUNT);
    module_state *state = PyModule_GetState(module);
    block_sparse_call call = {.args = ba_block_sparse_args_init()};
    ba_block_sparse_backward_args a = ba_block_sparse_backward_args_init();
    arg_array dout = {0}, dlse = {0}, outputs[GRADIENTS] = {{0}}, bias_outputs[BIAS_GRADIENTS] = {{0}};
    const arg_array *const inputs[] = {&call.q,   &call.k,   &call.v, &call.blocks, &call.kv_ranges, &call.attn_mask, &call.alibi_slopes,
                                       &call.out, &call.lse, &dout,   &dlse};
    ba_tensor shapes[GRADIENTS];
    ba_tensor *const tensors[GRADIENTS] = {&a.dq, &a.dk, &a.dv};
    ba_attention attention = {.num_threads = 0};
    ba_gradients gradients;
    ba_dtype bits_as;
    ba_status status;
    const bool bias_grads = values[BACKWARD_bias_grads] != Py_None;
    PyObject *made[GRADIENTS] = {NULL}, *bias_made[BIAS_GRADIENTS] = {NULL}, *result = NULL;

    if (read_block_sparse(state, values, values + BACKWARD_q_begin, values + BACKWARD_cu_rows, &call, &bits_as) < 0 ||
        read_softcap(values[BACKWARD_softcap], &call.args) < 0)
        goto done;
    if (arg_flag(values[BACKWARD_accumulate], "accumulate", &a.accumulate) < 0) goto done;
    for (int i = 1; i < GRADIENTS && a.accumulate; i++)
        if (values[BACKWARD_dq + i] == Py_None) {
            PyErr_Format(PyExc_ValueError, "%s: expected an array to add to with accumulate=True, got None", output_names[i]);
            goto done;
        }
    if (arg_hold(state, values[BACKWARD_out], "out", ARG_FLOATS, bits_as, &call.out) < 0) goto done;
    if (arg_hold(state, values[BACKWARD_lse], "lse", ARG_LSE, BA_UINT16, &call.lse) < 0) goto done;
    if (arg_hold(state, values[BACKWARD_dout], "dout", ARG_FLOATS, bits_as, &dout) < 0) goto done;
    if (values[BACKWARD_dlse] != Py_None && arg_hold(state, values[BACKWARD_dlse], "dlse", ARG_LSE, BA_UINT16, &dlse) < 0) goto done;
    a.forward = call.args;
    a.forward.out = call.out.tensor;
    a.forward.lse = call.lse.tensor;
    a.dout = dout.tensor;
    a.dlse = dlse.tensor;
    if (arg_check_masked(ba_open_block_sparse_backward(&a, &attention, &gradients), &call.attn_mask) < 0) goto done;

    ba_gradient_shapes(&a, shapes);
    for (int i = 0; i < GRADIENTS; i++) {
        PyObject *given = values[BACKWARD_dq + i];
        made[i] = arg_hold_or_make_output(state, given, values[BSA_empty], &shapes[i], output_names[i], ARG_FLOATS, bits_as, &outputs[i]);
        if (made[i] == NULL) goto done;
        *tensors[i] = outputs[i].tensor;
        for (size_t k = 0; k < sizeof inputs / sizeof *inputs; k++)
            if (arg_disjoint(&outputs[i], inputs[k]) < 0) goto done;
        for (int k = 0; k < i; k++)
            if (arg_disjoint(&outputs[i], &outputs[k]) < 0) goto done;
    }
    if (bias_grads && make_bias_gradients(state, values[BACKWARD_bias_grads], &call, &a, bias_outputs, bias_made) < 0) goto done;
    if (arg_check(ba_set_gradients(&a, &attention, &gradients)) < 0) goto done;
    INTERRUPTIBLE(status, ba_run_attention_backward(&attention, &gradients));
    if (arg_check(status) < 0) goto done;
    if (bias_grads) result = PyTuple_Pack(GRADIENTS + BIAS_GRADIENTS, made[0], made[1], made[2], bias_made[0], bias_made[1]);
    else result = PyTuple_Pack(GRADIENTS, made[0], made[1], made[2]);
done:
    ba_close_attention(&attention);
    release_block_sparse(&call);
    arg_release(&dout);
    arg_release(&dlse);
    for (int i = 0; i < GRADIENTS; i++) {
        arg_release(&outputs[i]);
        Py_XDECREF(made[i]);
    }
    for (int i = 0; i < BIAS_GRADIENTS; i++) {
        arg_release(&bias_outputs[i]);
        Py_XDECREF(bias_made[i]);
    }
    return result;
}

/* ---- Choosing blocks --------------------------------------------------------------------------------------- */

/* clang-format off */
#define CHOICE_ARGUMENTS(X) \
    BSA_ARGUMENTS(X) X(chooser) X(pool_q) X(pool_k) X(term) X(largest) X(budget) X(budgets) X(sink) X(recent) X(last_columns) X(first_rows) \
    X(last_rows) X(per_kv_head) X(index_dtype) X(return_scores) X(kv_ranges) X(q_begin)
/* clang-format on */
#define AS_CHOICE_INDEX(name) CHOICE_##name,
enum { CHOICE_ARGUMENTS(AS_CHOICE_INDEX) CHOICE_COUNT };

/* Reads an argument that must be one of the given texts, as its index among them. */
static int read_text(PyObject *const *values, int index, const char *const *texts, int count, int *place) {
    const char *text;
    if (arg_text(values[index], arguments_select_prefill.names[index], &text) < 0) return -1;
    for (*place = 0; *place < count; ++*place)
        if (strcmp(text, texts[*place]) == 0) return 0;
    PyErr_Format(PyExc_ValueError, "%s: expected %s or another of that kind, got '%s'", arguments_select_prefill.names[index], texts[0], text);
    return -1;
}

static int read_choice(module_state *state, PyObject *const *values, ba_select_prefill_args *a, arg_array *budgets, int *index_dtype, int *scores) {
    static const char *const choosers[] = {"pooled", "antidiagonal", "sampled_rows", "vertical_slash"}, *const terms[] = {"mean", "bound", "both"};
    static const char *const budget_names[] = {"density", "top_p", "threshold", "top_k"}, *const dtypes[] = {"uint16", "int16", "int32", "int64"};
    const struct {
        int index;
        int64_t *value;
    } numbers[] = {{CHOICE_pool_q, &a->pool_q},
                   {CHOICE_pool_k, &a->pool_k},
                   {CHOICE_sink, &a->sink},
                   {CHOICE_recent, &a->recent},
                   {CHOICE_last_columns, &a->last_columns},
                   {CHOICE_first_rows, &a->first_rows},
                   {CHOICE_last_rows, &a->last_rows}};
    int chooser, term, budget;
    if (read_text(values, CHOICE_chooser, choosers, 4, &chooser) < 0 || read_text(values, CHOICE_term, terms, 3, &term) < 0 ||
        read_text(values, CHOICE_budget, budget_names, 4, &budget) < 0 || read_text(values, CHOICE_index_dtype, dtypes, 4, index_dtype) < 0)
        return -1;
    a->chooser = (ba_chooser)chooser;
    a->term = (ba_chooser_term)term;
    a->budget = (ba_budget)budget;
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++)
        if (arg_int64(values[numbers[i].index], arguments_select_prefill.names[numbers[i].index], numbers[i].value) < 0) return -1;
    if (arg_flag(values[CHOICE_largest], "largest", &a->largest) < 0 || arg_flag(values[CHOICE_per_kv_head], "per_kv_head", &a->per_kv_head) < 0 ||
        arg_flag(values[CHOICE_return_scores], "return_scores", scores) < 0 ||
        arg_hold(state, values[CHOICE_budgets], budget_names[budget], ARG_LSE, BA_UINT16, budgets) < 0)
        return -1;
    a->budgets = budgets->tensor;
    return 0;
}

/* Allocates a row-major array of the tensor's shape. */
static int make_tensor(const ba_tensor *shape, ba_tensor *tensor) {
    int64_t elements = 1;
    *tensor = *shape;
    for (int i = shape->ndim - 1; i >= 0; elements *= shape->dims[i--]) tensor->strides[i] = elements;
    tensor->data = PyMem_Malloc((size_t)(elements * ba_dtype_size(shape->dtype)));
    if (tensor->data == NULL) PyErr_NoMemory();
    return tensor->data == NULL ? -1 : 0;
}

/* Makes the index lists. Their width is that of the longest, so they are made when all rows are known. */
static PyObject *make_lists(module_state *state, PyObject *empty, const ba_select_prefill_args *a, ba_tensor shape) {
    const int32_t *counts = a->counts.data;
    for (int64_t i = 0; i < a->counts.dims[0] * a->counts.dims[1] * a->counts.dims[2]; i++)
        if (counts[i] > shape.dims[3]) shape.dims[3] = counts[i];
    arg_array lists = {0};
    ba_status status;
    PyObject *made = arg_hold_or_make_output(state, Py_None, empty, &shape, "sabi", ARG_INDICES, BA_UINT16, &lists);
    if (made == NULL) return NULL;
    INTERRUPTIBLE(status, ba_list_kept(&a->kept, &lists.tensor));
    arg_release(&lists);
    if (arg_check(status) < 0) Py_CLEAR(made);
    return made;
}

TAKES(select_prefill, CHOICE_kv_ranges, CHOICE_ARGUMENTS(AS_TEXT));
PyObject *py_select_prefill(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    SORT_ARGUMENTS(select_prefill, CHOICE_COUNT);
    PyObject *const none[] = {Py_None, Py_None, Py_None, Py_None};                                            /* as ROUTING_ARGUMENTS */
    PyObject *const tokens[] = {values[CHOICE_q_begin], Py_None, values[CHOICE_kv_ranges], Py_None, Py_None}; /* as TOKEN_ARGUMENTS */
    module_state *state = PyModule_GetState(module);
    block_sparse_call call = {.args = ba_block_sparse_args_init()};
    ba_select_prefill_args a = ba_select_prefill_args_init();
    arg_array budgets = {0}, scores = {0};
    ba_prefill prefill;
    ba_dtype bits_as;
    ba_status status;
    int index_dtype, return_scores;
    PyObject *made = NULL, *lists = NULL, *result = NULL;

    if (read_block_sparse(state, values, tokens, none, &call, &bits_as) < 0 ||
        read_choice(state, values, &a, &budgets, &index_dtype, &return_scores) < 0)
        goto done;
    a.call = call.args;
    if (arg_check(ba_open_prefill(&a, &prefill)) < 0) goto done;
    prefill.lists_shape.dtype = (ba_dtype)(BA_UINT16 + index_dtype);
    if (prefill.p.block_columns > (index_dtype == 0 ? UINT16_MAX : index_dtype == 1 ? INT16_MAX + 1 : INT32_MAX)) {
        PyErr_Format(PyExc_ValueError, "index_dtype: expected one that holds %lld columns, got %s", (long long)prefill.p.block_columns,
                     ba_dtype_name(prefill.lists_shape.dtype));
        goto done;
    }
    if (make_tensor(&prefill.kept_shape, &a.kept) < 0 || make_tensor(&prefill.counts_shape, &a.counts) < 0) goto done;
    if (return_scores) {
        made = arg_hold_or_make_output(state, Py_None, values[BSA_empty], &prefill.scores_shape, "scores", ARG_LSE, BA_UINT16, &scores);
        if (made == NULL) goto done;
        a.scores = scores.tensor;
    }
    if (arg_check(ba_set_prefill_outputs(&a, &prefill)) < 0) goto done;
    INTERRUPTIBLE(status, ba_run_prefill(&prefill));
    if (arg_check(status) < 0) goto done;
    lists = make_lists(state, values[BSA_empty], &a, prefill.lists_shape);
    if (lists != NULL) result = PyTuple_Pack(2, lists, made ? made : Py_None);
done:
    release_block_sparse(&call);
    arg_release(&budgets);
    arg_release(&scores);
    PyMem_Free(a.kept.data);
    PyMem_Free(a.counts.data);
    Py_XDECREF(made);
    Py_XDECREF(lists);
    return result;
}

/* ---- Merging ----------------------------------------------------------------------------------------------- */

enum { PART_NAME_SIZE = 32 };

/* The arrays of one merge: outs[0 .. parts-1], then lses[0 .. parts-1]. */
typedef struct merge_call {
    Py_ssize_t parts;
    arg_array *arrays;
    ba_tensor *tensors;
    char (*names)[PART_NAME_SIZE];
    arg_array out, lse;
} merge_call;

static void release_merge(merge_call *call) {
    for (Py_ssize_t i = 0; call->arrays != NULL && i < 2 * call->parts; i++) arg_release(&call->arrays[i]);
    arg_release(&call->out);
    arg_release(&call->lse);
    PyMem_Free(call->arrays);
    PyMem_Free(call->tensors);
    PyMem_Free(call->names);
}

static int read_parts(module_state *state, PyObject *outs, PyObject *lses, ba_dtype bits_as, merge_call *call) {
    if (!PyTuple_Check(outs) || !PyTuple_Check(lses)) {
        PyErr_SetString(PyExc_TypeError, "outs, lses: expected tuples");
        return -1;
    }
    call->parts = PyTuple_Size(outs);
    if (PyTuple_Size(lses) != call->parts) {
        PyErr_Format(PyExc_ValueError, "lses: expected %zd arrays, one for each of outs, got %zd", call->parts, PyTuple_Size(lses));
        return -1;
    }
    if (call->parts == 0) {
        PyErr_SetString(PyExc_ValueError, "outs: expected at least 1 array, got 0");
        return -1;
    }
    call->arrays = PyMem_Calloc(2 * (size_t)call->parts, sizeof *call->arrays);
    call->tensors = PyMem_Calloc(2 * (size_t)call->parts, sizeof *call->tensors);
    call->names = PyMem_Calloc(2 * (size_t)call->parts, sizeof *call->names);
    if (call->arrays == NULL || call->tensors == NULL || call->names == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t i = 0; i < 2 * call->parts; i++) {
        const bool is_lse = i >= call->parts;
        const Py_ssize_t part = is_lse ? i - call->parts : i;
        PyOS_snprintf(call->names[i], PART_NAME_SIZE, "%s[%lld]", is_lse ? "lses" : "outs", (long long)part);
        PyObject *object = PyTuple_GetItem(is_lse ? lses : outs, part);
        if (arg_hold(state, object, call->names[i], is_lse ? ARG_LSE : ARG_FLOATS, bits_as, &call->arrays[i]) < 0) return -1;
        call->tensors[i] = call->arrays[i].tensor;
    }
    return 0;
}

/* Whether an array has the shape of outs[0], or that of its leading axes. */
static ba_status check_merge_shape(const char *name, const ba_tensor *t, const ba_tensor *first, bool is_lse) {
    ba_tensor expected = *first;
    expected.ndim -= is_lse;
    if (ba_same_shape(t, &expected)) return BA_OK;
    return ba_fail(BA_ERROR_VALUE, "%s: expected shape %s like %s, got %s", name, ba_shape_text(&expected).chars,
                   is_lse ? "the leading axes of outs[0]" : "outs[0]", ba_shape_text(t).chars);
}

/* Axes of length 1 in front, up to `ndim` axes: the library merges tensors of four. */
static void add_axes(ba_tensor *t, int ndim) {
    const int added = ndim - t->ndim;
    for (int i = ndim - 1; i >= 0; i--) {
        t->dims[i] = i < added ? 1 : t->dims[i - added];
        t->strides[i] = i < added ? 0 : t->strides[i - added];
    }
    t->ndim = ndim;
}

/* Checks the shapes that the caller gave, and gives all arrays the numbers of axes that the library takes. */
static ba_status fit_merge(merge_call *call) {
    const ba_tensor first = call->tensors[0];
    if (first.ndim == 0) return ba_fail(BA_ERROR_VALUE, "outs[0]: expected shape (..., Dv), got ()");
    for (Py_ssize_t i = 0; i < 2 * call->parts; i++) BA_TRY(check_merge_shape(call->names[i], &call->tensors[i], &first, i >= call->parts));
    BA_TRY(check_merge_shape("out", &call->out.tensor, &first, false));
    BA_TRY(check_merge_shape("lse", &call->lse.tensor, &first, true));
    for (Py_ssize_t i = 0; i < 2 * call->parts; i++) add_axes(&call->tensors[i], i < call->parts ? 4 : 3);
    add_axes(&call->out.tensor, 4);
    add_axes(&call->lse.tensor, 3);
    return BA_OK;
}

TAKES(merge_states, 3, "empty", "outs", "lses", "out", "lse_out", "dtype");
PyObject *py_merge_states(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    SORT_ARGUMENTS(merge_states, 6);
    module_state *state = PyModule_GetState(module);
    merge_call call = {0};
    ba_dtype dtype;
    ba_status status;
    PyObject *out = NULL, *lse = NULL, *result = NULL;

    if (arg_dtype(values[5], "dtype", ARG_FLOATS, &dtype) < 0) return NULL;
    const ba_dtype bits_as = arg_bits(dtype);
    if (read_parts(state, values[1], values[2], bits_as, &call) < 0) goto done;
    out = arg_hold_or_make_output(state, values[3], values[0], &call.tensors[0], "out", ARG_FLOATS, bits_as, &call.out);
    if (out == NULL) goto done;
    lse = arg_hold_or_make_output(state, values[4], values[0], &call.tensors[call.parts], "lse_out", ARG_LSE, BA_UINT16, &call.lse);
    if (lse == NULL || arg_disjoint(&call.lse, &call.out) < 0) goto done;
    for (Py_ssize_t i = 0; i < 2 * call.parts; i++)
        if (arg_disjoint(&call.out, &call.arrays[i]) < 0 || arg_disjoint(&call.lse, &call.arrays[i]) < 0) goto done;

    if (arg_check(fit_merge(&call)) < 0) goto done;
    INTERRUPTIBLE(status, ba_merge_states(call.parts, call.tensors, call.tensors + call.parts, &call.out.tensor, &call.lse.tensor));
    if (arg_check(status) < 0) goto done;
    result = PyTuple_Pack(2, out, lse);
done:
    release_merge(&call);
    Py_XDECREF(out);
    Py_XDECREF(lse);
    return result;
}

/* ---- Arguments that the package's Python code reads itself ---------------------------------------------------- */

TAKES(read_integer, 2, "value", "name");
PyObject *py_read_integer(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    (void)module;
    SORT_ARGUMENTS(read_integer, 2);
    const char *name;
    int64_t value;
    if (arg_text(values[1], "name", &name) < 0 || arg_int64(values[0], name, &value) < 0) return NULL;
    return PyLong_FromLongLong(value);
}

TAKES(read_number, 2, "value", "name");
PyObject *py_read_number(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    (void)module;
    SORT_ARGUMENTS(read_number, 2);
    const char *name;
    double value;
    if (arg_text(values[1], "name", &name) < 0 || arg_double(values[0], name, &value) < 0) return NULL;
    return PyFloat_FromDouble(value);
}

TAKES(read_flag, 2, "value", "name");
PyObject *py_read_flag(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    (void)module;
    SORT_ARGUMENTS(read_flag, 2);
    const char *name;
    int value;
    if (arg_text(values[1], "name", &name) < 0 || arg_flag(values[0], name, &value) < 0) return NULL;
    return PyBool_FromLong(value);
}

TAKES(refuse_masked, 1, "masked");
PyObject *py_refuse_masked(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    SORT_ARGUMENTS(refuse_masked, 1);
    if (!PyType_Check(values[0])) return PyErr_Format(PyExc_TypeError, "masked: expected a type, got %R", values[0]);
    module_state *state = PyModule_GetState(module);
    PyObject *const before = (PyObject *)state->masked;
    state->masked = (PyTypeObject *)Py_NewRef(values[0]);
    Py_XDECREF(before);
    return Py_NewRef(Py_None);
}

/* Calls a function of Python, and restores the mode however it ends. It does not begin with SORT_ARGUMENTS: in builds with BA_FAULTS, allocations of
 * that function do not count as this module's. */
TAKES(in_usual_mode, 3, "function", "args", "kwargs");
PyObject *py_in_usual_mode(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    PyObject *values[3];
    if (arg_sort(PyModule_GetState(module), CORE_in_usual_mode, &arguments_in_usual_mode, args, nargs, kwnames, values) < 0) return NULL;
    if (!PyTuple_Check(values[1])) return PyErr_Format(PyExc_TypeError, "args: expected a tuple, got %R", values[1]);
    if (!PyDict_Check(values[2])) return PyErr_Format(PyExc_TypeError, "kwargs: expected a dict, got %R", values[2]);
    const int rounding = fegetround(); /* of x86-64's other unit, too, which computes with numpy.longdouble */
    BA_IN_USUAL_MODE;
    fesetround(FE_TONEAREST);
    PyObject *const result = PyObject_Call(values[0], values[1], values[2]);
    fesetround(rounding);
    return result;
}

/* ---- Threads and instruction sets -------------------------------------------------------------------------- */

TAKES_NOTHING(get_num_threads);
PyObject *py_get_num_threads(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    NO_ARGUMENTS(get_num_threads);
    return PyLong_FromLong(ba_get_num_threads());
}

TAKES(set_num_threads, 1, "num_threads");
PyObject *py_set_num_threads(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    (void)module;
    SORT_ARGUMENTS(set_num_threads, 1);
    int num_threads;
    if (arg_threads(values[0], "num_threads", &num_threads) < 0 || arg_check(ba_set_num_threads(num_threads)) < 0) return NULL;
    return Py_NewRef(Py_None);
}

TAKES_NOTHING(num_threads_source);
PyObject *py_num_threads_source(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    NO_ARGUMENTS(num_threads_source);
    return PyUnicode_FromString(ba_num_threads_source());
}

TAKES_NOTHING(isa_levels);
PyObject *py_isa_levels(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    NO_ARGUMENTS(isa_levels);
    PyObject *levels = PyTuple_New(BA_ISA_COUNT);
    for (int i = 0; levels != NULL && i < BA_ISA_COUNT; i++) {
        PyObject *name = PyUnicode_FromString(ba_isa_name((ba_isa)i));
        if (name == NULL || PyTuple_SetItem(levels, i, name) < 0) Py_CLEAR(levels);
    }
    return levels;
}

TAKES_NOTHING(isa_detected);
PyObject *py_isa_detected(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    NO_ARGUMENTS(isa_detected);
    return PyUnicode_FromString(ba_isa_name(ba_isa_detected()));
}

TAKES_NOTHING(isa_active);
PyObject *py_isa_active(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    NO_ARGUMENTS(isa_active);
    return PyUnicode_FromString(ba_isa_name(ba_isa_active()));
}

TAKES(isa_set_cap, 1, "level");
PyObject *py_isa_set_cap(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    (void)module;
    SORT_ARGUMENTS(isa_set_cap, 1);
    ba_isa level;
    if (arg_isa(values[0], "level", &level) < 0 || arg_check(ba_isa_set_cap(level)) < 0) return NULL;
    return Py_NewRef(Py_None);
}

TAKES_NOTHING(isa_note);
PyObject *py_isa_note(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    NO_ARGUMENTS(isa_note);
    return PyUnicode_FromString(ba_isa_note());
}

TAKES_NOTHING(cpu_model);
PyObject *py_cpu_model(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    NO_ARGUMENTS(cpu_model);
    return PyUnicode_DecodeUTF8(ba_cpu_model(), (Py_ssize_t)strlen(ba_cpu_model()), "replace");
}

TAKES(kernels, 0, "level");
PyObject *py_kernels(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    (void)module;
    SORT_ARGUMENTS(kernels, 1);
    ba_isa level = ba_isa_active();
    if (values[0] != Py_None && arg_isa(values[0], "level", &level) < 0) return NULL;
    PyObject *list = PyList_New(0);
    const char *name;
    ba_isa implemented_at;
    for (int64_t i = 0; list != NULL && ba_kernel_info(level, i, &name, &implemented_at); i++) {
        PyObject *entry = Py_BuildValue("(ss)", name, ba_isa_name(implemented_at));
        if (entry == NULL || PyList_Append(list, entry) < 0) Py_CLEAR(list);
        Py_XDECREF(entry);
    }
    return list;
}

/* ---- Probes ------------------------------------------------------------------------------------------------ */

/* Reads the arguments of a probe. Where may_be_once, seconds may be None, which gives duration 0: a single pass. */
static int read_probe(PyObject *level, PyObject *seconds, bool may_be_once, PyObject *num_threads, ba_isa *isa, double *duration, int *threads) {
    const bool once = may_be_once && seconds == Py_None;
    *duration = 0;
    if (arg_isa(level, "level", isa) < 0 || (!once && arg_double(seconds, "seconds", duration) < 0)) return -1;
    if (!once && !(*duration > 0.0 && isfinite(*duration))) {
        PyErr_Format(PyExc_ValueError, "seconds: expected a positive number, got %S", seconds);
        return -1;
    }
    return arg_threads(num_threads, "num_threads", threads);
}

TAKES(probe_flops, 2, "level", "seconds", "num_threads");
PyObject *py_probe_flops(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    (void)module;
    SORT_ARGUMENTS(probe_flops, 3);
    ba_isa level;
    double seconds, rate;
    int threads;
    if (read_probe(values[0], values[1], false, values[2], &level, &seconds, &threads) < 0) return NULL;
    WITHOUT_GIL(rate = ba_probe_flops(level, seconds, threads));
    return PyFloat_FromDouble(rate * 1e-9);
}

TAKES(probe_tile_flops, 2, "level", "seconds", "num_threads");
PyObject *py_probe_tile_flops(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    (void)module;
    SORT_ARGUMENTS(probe_tile_flops, 3);
    ba_isa level;
    double seconds, rate;
    int threads;
    if (read_probe(values[0], values[1], false, values[2], &level, &seconds, &threads) < 0) return NULL;
    WITHOUT_GIL(rate = ba_probe_tile_flops(level, seconds, threads));
    return PyFloat_FromDouble(rate * 1e-9);
}

TAKES(probe_read, 3, "level", "memory", "seconds", "num_threads");
PyObject *py_probe_read(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    (void)module;
    SORT_ARGUMENTS(probe_read, 4);
    ba_isa level;
    int64_t bytes;
    double seconds, rate = 0;
    int threads;
    Py_buffer data = {0};
    if (read_probe(values[0], values[2], true, values[3], &level, &seconds, &threads) < 0) return NULL;
    if (PyObject_CheckBuffer(values[1])) {
        if (PyObject_GetBuffer(values[1], &data, PyBUF_SIMPLE) < 0) return NULL;
        bytes = data.len;
    } else if (arg_int64(values[1], "memory", &bytes) < 0) return NULL;
    if (bytes < 1) PyErr_Format(PyExc_ValueError, "memory: expected a positive number of bytes, got %lld", (long long)bytes);
    else WITHOUT_GIL(rate = ba_probe_read(level, data.buf, bytes, seconds, threads));
    PyBuffer_Release(&data);
    if (bytes < 1) return NULL;
    return PyFloat_FromDouble(rate * 1e-9);
}
