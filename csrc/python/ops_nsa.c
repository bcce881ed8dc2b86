/* The operations around the branches of native sparse attention. Callers give all arrays, the outputs included. */
#include "python/ops.h"

enum { MOST_ARRAYS = 16, MOST_LISTS = 4 };

/* The arrays and lists that a call holds. */
typedef struct held_call {
    module_state *state;
    ba_dtype bits_as;
    int arrays, lists;
    arg_array array[MOST_ARRAYS];
    bool output[MOST_ARRAYS];
    arg_list list[MOST_LISTS];
} held_call;

static void release(held_call *call) {
    for (int i = 0; i < call->arrays; i++) arg_release(&call->array[i]);
    for (int i = 0; i < call->lists; i++) PyMem_Free(call->list[i].values);
}

static int begin(held_call *call, PyObject *module, PyObject *dtype_object) {
    ba_dtype dtype;
    call->state = PyModule_GetState(module);
    if (arg_dtype(dtype_object, "dtype", ARG_FLOATS, &dtype) < 0) return -1;
    call->bits_as = arg_bits(dtype);
    return 0;
}

/* Holds an array. For None, the tensor stays "not given". */
static int hold(held_call *call, PyObject *object, const char *name, arg_role role, ba_tensor *tensor) {
    if (object == Py_None) return 0;
    arg_array *array = &call->array[call->arrays];
    if (arg_hold(call->state, object, name, role, call->bits_as, array) < 0) return -1;
    call->output[call->arrays++] = false;
    *tensor = array->tensor;
    return 0;
}

static int hold_output(held_call *call, PyObject *object, const char *name, arg_role role, ba_tensor *tensor) {
    if (object == Py_None) return 0;
    arg_array *array = &call->array[call->arrays];
    if (arg_hold_output(call->state, object, name, role, call->bits_as, array) < 0) return -1;
    call->output[call->arrays++] = true;
    *tensor = array->tensor;
    return 0;
}

/* Holds the arrays of a tuple, or none for None. Each has a name of its own in sentences. */
static int hold_each(held_call *call, PyObject *tuple, const char *const *names, Py_ssize_t most, bool output, ba_tensor *tensors) {
    if (tuple == Py_None) return 0;
    if (!PyTuple_Check(tuple) || PyTuple_Size(tuple) > most) {
        PyErr_Format(PyExc_TypeError, "%s: expected a tuple of at most %zd arrays", names[0], most);
        return -1;
    }
    for (Py_ssize_t i = 0; i < PyTuple_Size(tuple); i++) {
        PyObject *object = PyTuple_GetItem(tuple, i);
        if ((output ? hold_output : hold)(call, object, names[i], ARG_FLOATS, &tensors[i]) < 0) return -1;
    }
    return 0;
}

static int hold_list(held_call *call, PyObject *object, const char *name, const int64_t **values, int64_t *count) {
    arg_list *list = &call->list[call->lists];
    if (arg_lengths(call->state, object, name, list) < 0) return -1;
    call->lists++;
    *values = list->values;
    *count = list->count;
    return 0;
}

/* Reads the cumulative numbers of the sequences' tokens and blocks; both may be None. */
static int hold_sequences(held_call *call, PyObject *cu_object, PyObject *blocks_object, const int64_t **cu, const int64_t **cu_blocks,
                          int64_t *batch) {
    int64_t numbers = 1, block_numbers = 1;
    if (hold_list(call, cu_object, "cu_seqlens", cu, &numbers) < 0 || hold_list(call, blocks_object, "cu_blocks", cu_blocks, &block_numbers) < 0)
        return -1;
    *batch = numbers - 1;
    if (*cu == NULL) return 0;
    if (numbers < 1) {
        PyErr_SetString(PyExc_ValueError, "cu_seqlens: expected at least one number, got none");
        return -1;
    }
    if (*cu_blocks == NULL || block_numbers == numbers) return 0;
    PyErr_Format(PyExc_ValueError, "cu_blocks: expected %lld entries like cu_seqlens, got %lld", (long long)numbers, (long long)block_numbers);
    return -1;
}

/* Checks that no output shares memory with another array. */
static int check_disjoint(const held_call *call) {
    for (int i = 0; i < call->arrays; i++)
        for (int j = 0; call->output[i] && j < call->arrays; j++)
            if (i != j && arg_disjoint(&call->array[i], &call->array[j]) < 0) return -1;
    return 0;
}

/* Ends a py_<op> whose arguments are read: runs `statement`, which sets `status`, and returns None or NULL. */
#define FINISH(failed, statement)                                                                                                                    \
    do {                                                                                                                                             \
        ba_status status = BA_OK;                                                                                                                    \
        if (!(failed) && check_disjoint(&call) == 0) {                                                                                               \
            INTERRUPTIBLE(status, statement);                                                                                                        \
            result = arg_check(status) < 0 ? NULL : Py_NewRef(Py_None);                                                                              \
        }                                                                                                                                            \
        release(&call);                                                                                                                              \
        return result;                                                                                                                               \
    } while (0)

TAKES(block_means, 5, "x", "weight", "out", "block_size", "stride", "cu_seqlens", "cu_blocks", "dtype", "num_threads");
PyObject *py_block_means(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    SORT_ARGUMENTS(block_means, 9);
    held_call call = {0};
    ba_block_means_args a = {0};
    PyObject *result = NULL;
    const bool failed = begin(&call, module, values[7]) < 0 || hold(&call, values[0], "x", ARG_FLOATS, &a.x) < 0 ||
                        hold(&call, values[1], "weight", ARG_FLOATS, &a.weight) < 0 || hold_output(&call, values[2], "out", ARG_FLOATS, &a.out) < 0 ||
                        arg_int64(values[3], "block_size", &a.block_size) < 0 || arg_int64(values[4], "stride", &a.stride) < 0 ||
                        hold_sequences(&call, values[5], values[6], &a.cu, &a.cu_blocks, &a.batch) < 0 ||
                        arg_threads(values[8], "num_threads", &a.num_threads) < 0;
    FINISH(failed, ba_block_means(&a));
}

TAKES(block_means_backward, 5, "dout", "dx", "more", "block_size", "stride", "cu_seqlens", "cu_blocks", "dtype", "num_threads");
PyObject *py_block_means_backward(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    static const char *const more_names[] = {"more", "more", "more", "more"};
    SORT_ARGUMENTS(block_means_backward, 9);
    held_call call = {0};
    ba_block_means_backward_args a = {0};
    PyObject *result = NULL;
    const bool failed =
        begin(&call, module, values[7]) < 0 || hold(&call, values[0], "dout", ARG_FLOATS, &a.dout) < 0 ||
        hold_output(&call, values[1], "dx", ARG_FLOATS, &a.dx) < 0 || hold_each(&call, values[2], more_names, BA_MOST_SUMMANDS, false, a.more) < 0 ||
        arg_int64(values[3], "block_size", &a.block_size) < 0 || arg_int64(values[4], "stride", &a.stride) < 0 ||
        hold_sequences(&call, values[5], values[6], &a.cu, &a.cu_blocks, &a.batch) < 0 || arg_threads(values[8], "num_threads", &a.num_threads) < 0;
    FINISH(failed, ba_block_means_backward(&a));
}

static const char *const branch_names[] = {"o_cmp", "o_slc", "o_win"}, *const gradient_names[] = {"do_cmp", "do_slc", "do_win"};

TAKES(gate, 5, "q", "gate_proj_weight", "gates", "branches", "out", "dtype", "num_threads");
PyObject *py_gate(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    SORT_ARGUMENTS(gate, 7);
    held_call call = {0};
    ba_gate_args a = {0};
    PyObject *result = NULL;
    const bool weighted = values[1] != Py_None;
    const bool failed = begin(&call, module, values[5]) < 0 || hold(&call, values[0], "q", ARG_FLOATS, &a.q) < 0 ||
                        hold(&call, values[1], "gate_proj_weight", ARG_FLOATS, &a.weight) < 0 ||
                        (weighted ? hold_output : hold)(&call, values[2], "gates", ARG_LSE, &a.gates) < 0 ||
                        hold_each(&call, values[3], branch_names, 3, false, a.branch) < 0 ||
                        hold_output(&call, values[4], "out", ARG_FLOATS, &a.out) < 0 || arg_threads(values[6], "num_threads", &a.num_threads) < 0;
    FINISH(failed, ba_gate(&a));
}

TAKES(gate_backward, 9, "q", "gate_proj_weight", "gates", "branches", "dout", "dbranches", "dgates", "dq", "dgate_proj_weight", "dtype",
      "num_threads");
PyObject *py_gate_backward(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    SORT_ARGUMENTS(gate_backward, 11);
    held_call call = {0};
    ba_gate_backward_args a = {0};
    PyObject *result = NULL;
    const bool failed =
        begin(&call, module, values[9]) < 0 || hold(&call, values[0], "q", ARG_FLOATS, &a.q) < 0 ||
        hold(&call, values[1], "gate_proj_weight", ARG_FLOATS, &a.weight) < 0 || hold(&call, values[2], "gates", ARG_LSE, &a.gates) < 0 ||
        hold_each(&call, values[3], branch_names, 3, false, a.branch) < 0 || hold(&call, values[4], "dout", ARG_FLOATS, &a.dout) < 0 ||
        hold_each(&call, values[5], gradient_names, 3, true, a.dbranch) < 0 || hold_output(&call, values[6], "dgates", ARG_LSE, &a.dgates) < 0 ||
        hold_output(&call, values[7], "dq", ARG_FLOATS, &a.dq) < 0 || hold_output(&call, values[8], "dgate_proj_weight", ARG_LSE, &a.dweight) < 0 ||
        arg_threads(values[10], "num_threads", &a.num_threads) < 0;
    FINISH(failed, ba_gate_backward(&a));
}

/* The arguments, in order; each gets an index and a name. */
/* clang-format off */
#define SELECT_ARGUMENTS(X) \
    X(q) X(k_cmp) X(lse) X(block_indices) X(cmp_block_indices) X(scale) X(causal) X(compress_block_size) X(compress_stride) X(select_block_size) \
    X(q_tile_size) X(init_blocks) X(local_blocks) X(q_begin) X(tokens) X(cmp_group) X(cu_seqlens) X(cu_blocks) X(dtype) X(num_threads)
/* clang-format on */
#define AS_SELECT_INDEX(name) SELECT_##name,
enum { SELECT_ARGUMENTS(AS_SELECT_INDEX) SELECT_COUNT };

static int read_sizes(PyObject *const *values, ba_nsa_select_args *a) {
    const struct {
        int index;
        int64_t *value;
    } sizes[] = {{SELECT_compress_block_size, &a->compress_block},
                 {SELECT_compress_stride, &a->compress_stride},
                 {SELECT_select_block_size, &a->select_block},
                 {SELECT_q_tile_size, &a->tile},
                 {SELECT_init_blocks, &a->init_blocks},
                 {SELECT_local_blocks, &a->local_blocks},
                 {SELECT_cmp_group, &a->cmp_group}};
    for (size_t i = 0; i < COUNT_OF(sizes); i++)
        if (arg_int64(values[sizes[i].index], arguments_nsa_select.names[sizes[i].index], sizes[i].value) < 0) return -1;
    return 0;
}

/* Reads one number per sequence, or one for all of them; NULL for None. */
static int hold_numbers(held_call *call, PyObject *object, const char *name, int64_t count, const int64_t **values) {
    arg_list *list = &call->list[call->lists];
    if (arg_numbers(call->state, object, name, count, "one per sequence", list) < 0) return -1;
    call->lists++;
    *values = list->values;
    return 0;
}

/* Reads where the queries of each sequence stand, once q and the cumulative numbers are read. */
static int hold_places(held_call *call, PyObject *const *values, ba_nsa_select_args *a) {
    const int64_t sequences = a->cu_q ? a->batch : a->q.ndim > 0 ? a->q.dims[0] : 0;
    if (hold_numbers(call, values[SELECT_q_begin], "q_begin", sequences, &a->q_begin) < 0) return -1;
    return hold_numbers(call, values[SELECT_tokens], "tokens", sequences, &a->tokens);
}

TAKES(nsa_select, SELECT_cu_seqlens, SELECT_ARGUMENTS(AS_TEXT));
PyObject *py_nsa_select(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    SORT_ARGUMENTS(nsa_select, SELECT_COUNT);
    held_call call = {0};
    ba_nsa_select_args a = ba_nsa_select_args_init();
    PyObject *result = NULL;
    const bool failed =
        begin(&call, module, values[SELECT_dtype]) < 0 || hold(&call, values[SELECT_q], "q", ARG_FLOATS, &a.q) < 0 ||
        hold(&call, values[SELECT_k_cmp], "k_cmp", ARG_FLOATS, &a.k_cmp) < 0 || hold(&call, values[SELECT_lse], "lse", ARG_LSE, &a.lse) < 0 ||
        hold_output(&call, values[SELECT_block_indices], "block_indices", ARG_TABLES, &a.selected) < 0 ||
        hold_output(&call, values[SELECT_cmp_block_indices], "cmp_block_indices", ARG_TABLES, &a.selected_cmp) < 0 ||
        arg_scale(values[SELECT_scale], "scale", &a.scale) < 0 || arg_flag(values[SELECT_causal], "causal", &a.causal) < 0 ||
        read_sizes(values, &a) < 0 || hold_sequences(&call, values[SELECT_cu_seqlens], values[SELECT_cu_blocks], &a.cu_q, &a.cu_cmp, &a.batch) < 0 ||
        hold_places(&call, values, &a) < 0 || arg_threads(values[SELECT_num_threads], "num_threads", &a.num_threads) < 0;
    FINISH(failed, ba_nsa_select(&a));
}
