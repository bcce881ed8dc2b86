/* Block-sparse attention, its gradients, and the choice of blocks for it. */
#include "python/call.h"

#include <string.h>

#include "ops/check.h"
#include "ops/open/open.h"
#include "ops/select/select_prefill.h"

/* ---- Arguments that the three functions share ---------------------------------------------------------------- */

/* The shared arguments come first in all three functions, so that they have the same indices in each. */
OPERATION(block_sparse_attention, ba_block_sparse_args, BLOCK_SPARSE_ATTENTION, FORWARD_sabi, FORWARD)
OPERATION(block_sparse_attention_backward, ba_block_sparse_backward_args, BLOCK_SPARSE_ATTENTION_BACKWARD, BACKWARD_sabi, BACKWARD)
OPERATION(select_prefill, ba_select_prefill_args, SELECT_PREFILL, CHOICE_q_begin, CHOICE)
_Static_assert((int)FORWARD_num_kv_heads == (int)BACKWARD_num_kv_heads && (int)FORWARD_num_kv_heads == (int)CHOICE_num_kv_heads,
               "read_sequences() finds its arguments in all three");

/* Reads num_heads or num_kv_heads. In a layout with an axis of heads, the number may be given, too, but must agree with that axis. None leaves 0,
 * which means "not given" to the library, so a caller may not give 0. */
static int read_heads(const ba_block_sparse_args *a, PyObject *object, const ba_tensor *tensor, const char *name, const char *tensor_name,
                      int64_t *heads) {
    if (object == Py_None) return 0;
    if (arg_int64(object, name, heads) < 0) return -1;
    const int axis = a->layout == BA_BNSD ? 1 : a->layout == BA_BSND ? 2 : 1;
    const bool has_axis = a->layout != BA_BSH && axis < tensor->ndim;
    if (has_axis && tensor->dims[axis] != *heads)
        arg_fail(PyExc_ValueError, BA_ARG("%s") ": expected %lld like " BA_ARG("%s") ", got %lld", name, (long long)tensor->dims[axis], tensor_name,
                 (long long)*heads);
    else if (*heads == 0 && !has_axis) arg_fail(PyExc_ValueError, BA_ARG("%s") ": expected at least 1, got 0", name);
    else return 0;
    return -1;
}

/* The number of query heads. It is 0 where q has too few axes: the library then refuses q. */
static int64_t query_heads(const ba_block_sparse_args *a) {
    const int axis = a->layout == BA_BNSD || a->layout == BA_TND ? 1 : 2;
    return a->layout == BA_BSH ? a->num_heads : a->q.ndim > axis ? a->q.dims[axis] : 0;
}

/* Sets the number of packed sequences. The C API takes lists as bare pointers, so the number of their entries is checked here. The library checks
 * that the layout takes such lists, and that their entries are in range. */
static int read_packed(py_call *call, ba_block_sparse_args *a) {
    const arg_list *const cu_q = call_list(call, FORWARD_cu_seqlens_q), *const cu_kv = call_list(call, FORWARD_cu_seqlens_kv);
    a->batch = cu_q->count - 1; /* without entries, the batch is -1, which the library refuses */
    /* The library refuses a q of another number of axes before it reads lengths. */
    if (a->q.ndim == 3 && (a->cu_q == NULL || a->cu_kv == NULL)) {
        const char *const missing = a->cu_q == NULL ? "cu_seqlens_q" : "cu_seqlens_kv";
        arg_fail(PyExc_ValueError,
                 BA_ARG("%s") ": expected " BA_ARG("cu_seqlens_q") "= and " BA_ARG("cu_seqlens_kv") "= with layout TND, got no " BA_ARG("%s"),
                 missing, missing);
        return -1;
    }
    if (a->cu_q == NULL) return 0;
    if (arg_expect_count(cu_kv, "cu_seqlens_kv", cu_q->count, "as many as " BA_ARG("cu_seqlens_q") " has") < 0) return -1;
    return call_read_each(call, query_heads(a), a->batch, "one per sequence");
}

/* Reads all arguments that have a member, and checks those that all three functions share, which `a` holds. */
static int read_sequences(py_call *call, ba_block_sparse_args *a) {
    if (call_read(call, false) < 0) return -1;
    if (read_heads(a, call->values[FORWARD_num_heads], &a->q, "num_heads", "q", &a->num_heads) < 0) return -1;
    if (read_heads(a, call->values[FORWARD_num_kv_heads], &a->k, "num_kv_heads", "k", &a->num_kv_heads) < 0) return -1;
    if (a->layout == BA_BSH && call->values[FORWARD_num_heads] == Py_None) {
        arg_fail(PyExc_ValueError, BA_ARG("num_heads") ": expected " BA_ARG(
                                       "num_heads") "= with layout BSH, whose last axis holds all heads, got no " BA_ARG("num_heads"));
        return -1;
    }
    if (a->layout == BA_TND) return read_packed(call, a);
    if (a->q.ndim != (a->layout == BA_BSH ? 3 : 4)) { /* q has no batch axis to compare with; the library refuses q before it reads lengths */
        a->q_lens = a->kv_lens = NULL;
        return 0;
    }
    if (call_expect_lengths(call, a->q.dims[0], "one per batch entry") < 0) return -1;
    return call_read_each(call, query_heads(a), a->q.dims[0], "one per batch entry");
}

/* ---- Attention ----------------------------------------------------------------------------------------------- */

/* Checks the number of entries of cu_rows, the cumulative numbers of block rows of packed sequences. */
static int expect_rows(py_call *call, const ba_block_sparse_args *a, int cu_rows) {
    if (a->layout != BA_TND || a->cu_q == NULL) return 0;
    return arg_expect_count(call_list(call, cu_rows), "cu_rows", a->batch + 1, "as many as " BA_ARG("cu_seqlens_q") " has");
}

static int open_forward(py_call *call, ba_block_sparse_args *a, ba_attention *attention, int *return_lse) {
    PyObject *const *const values = call->values;
    if (read_sequences(call, a) < 0 || expect_rows(call, a, FORWARD_cu_rows) < 0) return -1;
    if (arg_flag(values[FORWARD_return_lse], "return_lse", return_lse) < 0) return -1;
    if (arg_out_dtype(values[FORWARD_out_dtype], a->q.dtype, &a->unrounded) < 0) return -1;
    if (arg_check(ba_open_block_sparse(a, attention)) < 0) return -1;
    if (call_result(call, values[FORWARD_out], &attention->out_shape, "out", ARG_FLOATS, &a->out) < 0) return -1;
    if (*return_lse && call_result(call, values[FORWARD_lse_out], &attention->lse_shape, "lse", ARG_REALS, &a->lse) < 0) return -1;
    return call_expect_disjoint(call) < 0 ? -1 : arg_check(ba_set_block_sparse_outputs(a, attention));
}

PyObject *py_block_sparse_attention(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    BEGIN_CALL(block_sparse_attention, ba_block_sparse_args, ba_block_sparse_args_init());
    ba_attention attention = {.num_threads = 0};
    ba_status status;
    int return_lse, failed = open_forward(&call, &a, &attention, &return_lse);
    if (!failed) {
        INTERRUPTIBLE(status, ba_run_attention(&attention));
        failed = arg_check(status);
    }
    ba_close_attention(&attention);
    return call_end(&call, failed);
}

/* ---- Gradients ------------------------------------------------------------------------------------------------ */

/* Makes the arrays for the gradients of attn_mask and alibi_slopes. The result is None for a bias that is not given, and for a mask of bool. */
static int make_bias_gradients(py_call *call, ba_block_sparse_backward_args *a) {
    const ba_tensor *const mask = &call_array(call, BACKWARD_attn_mask)->tensor, *const slopes = &call_array(call, BACKWARD_alibi_slopes)->tensor;
    ba_tensor made;
    call->values[BACKWARD_empty] = call->values[BACKWARD_bias_grads]; /* makes arrays of the kind of the biases */
    if (!ba_given(mask) || mask->dtype == BA_BOOL) call_no_result(call);
    else if (call_result(call, Py_None, mask, "dattn_mask", ARG_FLOATS, &made) < 0) return -1;
    else a->dattn_mask = made;
    if (!ba_given(slopes)) call_no_result(call);
    else if (call_result(call, Py_None, slopes, "dalibi_slopes", ARG_FLOATS, &made) < 0) return -1;
    else a->dalibi_slopes = made.data;
    return 0;
}

static int open_backward(py_call *call, ba_block_sparse_backward_args *a, ba_attention *attention, ba_gradients *gradients) {
    static const char *const names[] = {"dq", "dk", "dv"};
    ba_tensor shapes[COUNT_OF(names)], *const outputs[] = {&a->dq, &a->dk, &a->dv};
    if (read_sequences(call, &a->forward) < 0 || expect_rows(call, &a->forward, BACKWARD_cu_rows) < 0) return -1;
    for (size_t i = 1; i < COUNT_OF(names) && a->accumulate; i++)
        if (call->values[BACKWARD_dq + i] == Py_None) {
            arg_fail(PyExc_ValueError, BA_ARG("%s") ": expected an array to add to with " BA_ARG("accumulate") "=True, got None", names[i]);
            return -1;
        }
    if (arg_check(ba_open_block_sparse_backward(a, attention, gradients)) < 0) return -1;
    ba_gradient_shapes(a, shapes);
    for (size_t i = 0; i < COUNT_OF(names); i++)
        if (call_result(call, call->values[BACKWARD_dq + i], &shapes[i], names[i], ARG_FLOATS, outputs[i]) < 0) return -1;
    if (call_expect_disjoint(call) < 0) return -1;
    if (call->values[BACKWARD_bias_grads] != Py_None && make_bias_gradients(call, a) < 0) return -1;
    return arg_check(ba_set_gradients(a, attention, gradients));
}

PyObject *py_block_sparse_attention_backward(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    BEGIN_CALL(block_sparse_attention_backward, ba_block_sparse_backward_args, ba_block_sparse_backward_args_init());
    ba_attention attention = {.num_threads = 0};
    ba_gradients gradients;
    ba_status status;
    int failed = open_backward(&call, &a, &attention, &gradients);
    if (!failed) {
        INTERRUPTIBLE(status, ba_run_attention_backward(&attention, &gradients));
        failed = arg_check(status);
    }
    ba_close_attention(&attention);
    return call_end(&call, failed);
}

/* ---- Choosing blocks -------------------------------------------------------------------------------------------- */

/* Reads an argument that must be one of `texts`, as an index of `texts`. */
static int read_text(const py_call *call, int index, const char *const *texts, int count, int *place) {
    const char *const name = call->operation->arguments[index].name, *text;
    if (arg_text(call->values[index], name, &text) < 0) return -1;
    for (*place = 0; *place < count; ++*place)
        if (strcmp(text, texts[*place]) == 0) return 0;
    arg_fail(PyExc_ValueError, BA_ARG("%s") ": expected %s or another of that kind, got '%s'", name, texts[0], text);
    return -1;
}

static int read_choice(py_call *call, ba_select_prefill_args *a, int *index_dtype, int *scores) {
    static const char *const choosers[] = {"pooled", "antidiagonal", "sampled_rows", "vertical_slash", "given"}, *const terms[] = {"mean", "bound",
                                                                                                                                   "both"};
    static const char *const budget_names[] = {"density", "top_p", "threshold", "top_k"}, *const dtypes[] = {"uint16", "int16", "int32", "int64"};
    int chooser, term, budget;
    if (read_sequences(call, &a->call) < 0) return -1;
    if (read_text(call, CHOICE_chooser, choosers, 5, &chooser) < 0 || read_text(call, CHOICE_term, terms, 3, &term) < 0 ||
        read_text(call, CHOICE_budget, budget_names, 4, &budget) < 0 || read_text(call, CHOICE_index_dtype, dtypes, 4, index_dtype) < 0)
        return -1;
    a->chooser = (ba_chooser)chooser;
    a->term = (ba_chooser_term)term;
    a->budget = (ba_budget)budget;
    if (arg_flag(call->values[CHOICE_return_scores], "return_scores", scores) < 0) return -1;
    return call_hold(call, call->values[CHOICE_budgets], budget_names[budget], ARG_REALS, 0, &a->budgets);
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

/* Makes the index lists. The longest list decides their width, so they are made when all rows are known. */
static int make_lists(py_call *call, const ba_select_prefill_args *a, ba_tensor shape) {
    const int32_t *counts = a->counts.data;
    for (int64_t i = 0; i < a->counts.dims[0] * a->counts.dims[1] * a->counts.dims[2]; i++)
        if (counts[i] > shape.dims[3]) shape.dims[3] = counts[i];
    ba_tensor lists;
    ba_status status;
    if (call_result(call, Py_None, &shape, "sabi", ARG_INDICES, &lists) < 0) return -1;
    INTERRUPTIBLE(status, ba_list_kept(&a->kept, &lists));
    return arg_check(status);
}

/* With the chooser `given`, calls the caller's function `scores`, and holds the scores that it returns. All other arguments have been checked
 * before. */
static int read_scores(py_call *call, ba_select_prefill_args *a) {
    if (a->chooser != BA_CHOOSER_GIVEN) return 0;
    PyObject *const scores = PyObject_CallNoArgs(call->values[CHOICE_scores]);
    const int failed = scores == NULL ? -1 : call_hold(call, scores, "scores", ARG_SCALES, 0, &a->given_scores);
    Py_XDECREF(scores);
    return failed;
}

static int choose(py_call *call, ba_select_prefill_args *a) {
    ba_prefill prefill;
    ba_status status;
    int index_dtype, return_scores;
    if (read_choice(call, a, &index_dtype, &return_scores) < 0 || arg_check(ba_open_prefill(a, &prefill)) < 0) return -1;
    prefill.lists_shape.dtype = (ba_dtype)(BA_UINT16 + index_dtype);
    if (prefill.p.block_columns > (index_dtype == 0 ? UINT16_MAX : index_dtype == 1 ? INT16_MAX + 1 : INT32_MAX)) {
        arg_fail(PyExc_ValueError, BA_ARG("index_dtype") ": expected one that holds %lld columns, got %s", (long long)prefill.p.block_columns,
                 ba_dtype_name(prefill.lists_shape.dtype));
        return -1;
    }
    if (read_scores(call, a) < 0) return -1;
    if (make_tensor(&prefill.kept_shape, &a->kept) < 0 || make_tensor(&prefill.counts_shape, &a->counts) < 0) return -1;
    if (!return_scores) call_no_result(call);
    else if (call_result(call, Py_None, &prefill.scores_shape, "scores", ARG_REALS, &a->scores) < 0) return -1;
    if (arg_check(ba_set_prefill_outputs(a, &prefill)) < 0) return -1;
    INTERRUPTIBLE(status, ba_run_prefill(&prefill));
    return arg_check(status) < 0 ? -1 : make_lists(call, a, prefill.lists_shape);
}

/* Returns the scores, or None, and the lists. */
PyObject *py_select_prefill(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    BEGIN_CALL(select_prefill, ba_select_prefill_args, ba_select_prefill_args_init());
    const int failed = choose(&call, &a);
    PyMem_Free(a.kept.data);
    PyMem_Free(a.counts.data);
    return call_end(&call, failed);
}
