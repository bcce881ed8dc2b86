/* Merging of attention states. A py_call has room for a fixed number of arrays, but there may be any number of parts, so this file does without a
 * py_call. */
#include "python/ops.h"

#include "core/status.h"
#include "ops/check.h"

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
    if (!PyTuple_Check(outs)) return arg_fail_kind("outs", "a tuple", outs);
    if (!PyTuple_Check(lses)) return arg_fail_kind("lses", "a tuple", lses);
    call->parts = PyTuple_Size(outs);
    if (PyTuple_Size(lses) != call->parts) {
        arg_fail(PyExc_ValueError, BA_ARG("lses") ": expected %zd arrays, one for each of " BA_ARG("outs") ", got %zd", call->parts,
                 PyTuple_Size(lses));
        return -1;
    }
    if (call->parts == 0) {
        arg_fail(PyExc_ValueError, BA_ARG("outs") ": expected at least 1 array, got 0");
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
        if (arg_hold(state, object, call->names[i], is_lse ? ARG_REALS : ARG_FLOATS, bits_as, &call->arrays[i]) < 0) return -1;
        call->tensors[i] = call->arrays[i].tensor;
    }
    return 0;
}

/* Checks that an array has the shape of outs[0], or, with is_lse, the shape of the leading axes of outs[0]. */
static ba_status check_merge_shape(const char *name, const ba_tensor *t, const ba_tensor *first, bool is_lse) {
    ba_tensor expected = *first;
    expected.ndim -= is_lse;
    if (ba_same_shape(t, &expected)) return BA_OK;
    return ba_fail(BA_ERROR_VALUE, BA_ARG("%s") ": expected shape %s like %s, got %s", name, ba_shape_text(&expected).chars,
                   is_lse ? "the leading axes of " BA_ARG("outs[0]") : BA_ARG("outs[0]"), ba_shape_text(t).chars);
}

/* Puts axes of length 1 in front until there are `ndim` axes: the library merges outputs of four axes, and log-sum-exps of three. */
static void add_axes(ba_tensor *t, int ndim) {
    const int added = ndim - t->ndim;
    for (int i = ndim - 1; i >= 0; i--) {
        t->dims[i] = i < added ? 1 : t->dims[i - added];
        t->strides[i] = i < added ? 0 : t->strides[i - added];
    }
    t->ndim = ndim;
}

/* Checks the shapes of the caller's arrays, and gives all arrays as many axes as the library takes. */
static ba_status fit_merge(merge_call *call) {
    const ba_tensor first = call->tensors[0];
    if (first.ndim == 0) return ba_fail(BA_ERROR_VALUE, BA_ARG("outs[0]") ": expected shape (..., Dv), got ()");
    for (Py_ssize_t i = 0; i < 2 * call->parts; i++) BA_TRY(check_merge_shape(call->names[i], &call->tensors[i], &first, i >= call->parts));
    BA_TRY(check_merge_shape("out", &call->out.tensor, &first, false));
    BA_TRY(check_merge_shape("lse", &call->lse.tensor, &first, true));
    for (Py_ssize_t i = 0; i < 2 * call->parts; i++) add_axes(&call->tensors[i], i < call->parts ? 4 : 3);
    add_axes(&call->out.tensor, 4);
    add_axes(&call->lse.tensor, 3);
    return BA_OK;
}

OPERATION(merge_states, int, MERGE_STATES, MERGE_out, MERGE)

PyObject *py_merge_states(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    SORT_ARGUMENTS(merge_states, MERGE_COUNT);
    module_state *state = PyModule_GetState(module);
    merge_call call = {0};
    ba_dtype dtype;
    ba_status status;
    PyObject *out = NULL, *lse = NULL, *result = NULL;

    if (arg_dtype(values[MERGE_dtype], "dtype", ARG_FLOATS, &dtype) < 0) return NULL;
    const ba_dtype bits_as = arg_bits(dtype);
    if (read_parts(state, values[MERGE_outs], values[MERGE_lses], bits_as, &call) < 0) goto done;
    out = arg_hold_or_make_output(state, values[MERGE_out], values[MERGE_empty], &call.tensors[0], "out", ARG_FLOATS, bits_as, &call.out);
    if (out == NULL) goto done;
    lse = arg_hold_or_make_output(state, values[MERGE_lse_out], values[MERGE_empty], &call.tensors[call.parts], "lse_out", ARG_REALS, BA_UINT16,
                                  &call.lse);
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
