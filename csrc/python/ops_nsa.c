/* The operations around the branches of native sparse attention. Callers give all arrays, the outputs included. */
#include "python/call.h"

/* Holds the arrays of a tuple; names[i] stands for array i in sentences. Where the argument is None, holds nothing. */
static int hold_each(py_call *call, int index, const char *const *names, Py_ssize_t most, int traits, ba_tensor *tensors) {
    PyObject *const tuple = call->values[index];
    if (tuple == Py_None) return 0;
    if (!PyTuple_Check(tuple)) return arg_fail_kind(names[0], "a tuple", tuple);
    if (PyTuple_Size(tuple) > most)
        return arg_fail(PyExc_ValueError, BA_ARG("%s") ": expected at most %zd arrays, got %zd", names[0], most, PyTuple_Size(tuple));
    for (Py_ssize_t i = 0; i < PyTuple_Size(tuple); i++)
        if (call_hold(call, PyTuple_GetItem(tuple, i), names[i], ARG_FLOATS, traits | ARG_OPTIONAL, &tensors[i]) < 0) return -1;
    return 0;
}

/* Sets the number of packed sequences from the cumulative numbers of their tokens and blocks; both may be None. */
static int count_sequences(py_call *call, int cu_index, int blocks_index, int64_t *batch) {
    const arg_list *const cu = call_list(call, cu_index), *const blocks = call_list(call, blocks_index);
    *batch = cu->values == NULL ? 0 : cu->count - 1;
    if (cu->values == NULL) return 0;
    if (cu->count < 1) {
        arg_fail(PyExc_ValueError, BA_ARG("cu_seqlens") ": expected at least one number, got none");
        return -1;
    }
    if (blocks->values == NULL || blocks->count == cu->count) return 0;
    arg_fail(PyExc_ValueError, BA_ARG("cu_blocks") ": expected %zd entries like " BA_ARG("cu_seqlens") ", got %zd", cu->count, blocks->count);
    return -1;
}

OPERATION(block_means, ba_block_means_args, BLOCK_MEANS, MEANS_cu_seqlens, MEANS)

PyObject *py_block_means(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    BEGIN_CALL(block_means, ba_block_means_args, {.batch = 0});
    const bool failed = call_read(&call, false) < 0 || count_sequences(&call, MEANS_cu_seqlens, MEANS_cu_blocks, &a.batch) < 0;
    RUN_AND_END(failed, ba_block_means(&a));
}

OPERATION(block_means_backward, ba_block_means_backward_args, BLOCK_MEANS_BACKWARD, OF_MEANS_cu_seqlens, OF_MEANS)

PyObject *py_block_means_backward(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    static const char *const names[BA_MOST_SUMMANDS] = {"more", "more", "more", "more"};
    BEGIN_CALL(block_means_backward, ba_block_means_backward_args, {.batch = 0});
    const bool failed = call_read(&call, false) < 0 || hold_each(&call, OF_MEANS_more, names, BA_MOST_SUMMANDS, 0, a.more) < 0 ||
                        count_sequences(&call, OF_MEANS_cu_seqlens, OF_MEANS_cu_blocks, &a.batch) < 0;
    RUN_AND_END(failed, ba_block_means_backward(&a));
}

static const char *const branch_names[] = {"o_cmp", "o_slc", "o_win"}, *const gradient_names[] = {"do_cmp", "do_slc", "do_win"};

OPERATION(gate, ba_gate_args, GATE, GATE_dtype, GATE)

PyObject *py_gate(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    BEGIN_CALL(gate, ba_gate_args, {.num_threads = 0});
    const int traits = ARG_OPTIONAL | (call.values[GATE_gate_proj_weight] != Py_None ? ARG_WRITTEN : 0);
    const bool failed = call_read(&call, false) < 0 || call_hold(&call, call.values[GATE_gates], "gates", ARG_REALS, traits, &a.gates) < 0 ||
                        hold_each(&call, GATE_branches, branch_names, 3, 0, a.branch) < 0;
    RUN_AND_END(failed, ba_gate(&a));
}

OPERATION(gate_backward, ba_gate_backward_args, GATE_BACKWARD, OF_GATE_dtype, OF_GATE)

PyObject *py_gate_backward(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    BEGIN_CALL(gate_backward, ba_gate_backward_args, {.num_threads = 0});
    const bool failed = call_read(&call, false) < 0 || hold_each(&call, OF_GATE_branches, branch_names, 3, 0, a.branch) < 0 ||
                        hold_each(&call, OF_GATE_dbranches, gradient_names, 3, ARG_WRITTEN, a.dbranch) < 0;
    RUN_AND_END(failed, ba_gate_backward(&a));
}

OPERATION(nsa_select, ba_nsa_select_args, NSA_SELECT, NSA_cu_seqlens, NSA)

PyObject *py_nsa_select(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    BEGIN_CALL(nsa_select, ba_nsa_select_args, ba_nsa_select_args_init());
    bool failed = call_read(&call, false) < 0 || count_sequences(&call, NSA_cu_seqlens, NSA_cu_blocks, &a.batch) < 0;
    const int64_t sequences = a.cu_q ? a.batch : a.q.ndim > 0 ? a.q.dims[0] : 0;
    failed = failed || call_read_each(&call, 0, sequences, "one per sequence") < 0;
    RUN_AND_END(failed, ba_nsa_select(&a));
}
