#include "python/call.h"

#include <string.h>

#include "ops/check.h"

int call_begin(py_call *call, PyObject *module, int index, const operation *operation, void *args, PyObject *const *given, Py_ssize_t nargs,
               PyObject *kwnames) {
    call->state = PyModule_GetState(module);
    call->operation = operation;
    call->args = args;
    call->arrays = call->lists = call->results = 0;
    call->cumulative = NULL;
    call->pages_by_token = call->each = false;
    call->dtype = call->kv_dtype = BA_DTYPE_COUNT;
    call->bits = call->kv_bits = BA_UINT16;
    memset(call->place, -1, sizeof call->place);
    return arg_sort(call->state, index, operation, given, nargs, kwnames, call->values);
}

PyObject *call_end(py_call *call, int failed) {
    PyObject *result = NULL;
    if (!failed && call->results == 1) result = Py_NewRef(call->result[0]);
    else if (!failed && call->results == 0) result = Py_NewRef(Py_None);
    else if (!failed && (result = PyTuple_New(call->results)) != NULL)
        for (int i = 0; i < call->results; i++) PyTuple_SetItem(result, i, Py_NewRef(call->result[i]));
    for (int i = 0; i < call->arrays; i++) arg_release(&call->array[i]);
    for (int i = 0; i < call->lists; i++) PyMem_Free(call->list[i].values);
    for (int i = 0; i < call->results; i++) Py_DECREF(call->result[i]);
    PyMem_Free(call->cumulative);
    return result;
}

/* ---- Arrays ------------------------------------------------------------------------------------------------------------ */

static bool is_cache(arg_role role) { return role == ARG_CACHE; }

static ba_dtype bits_of(const py_call *call, arg_role role) { return role == ARG_FLOATS ? call->bits : is_cache(role) ? call->kv_bits : BA_UINT16; }

/* The name of the argument whose role is `role`. */
static const char *dtype_argument(const py_call *call, arg_role role) {
    int i = 0;
    while (call->operation->arguments[i].role != role) i++;
    return call->operation->arguments[i].name;
}

static int expect_named(const py_call *call, const char *name, arg_role role, ba_dtype dtype) {
    const ba_dtype named = is_cache(role) ? call->kv_dtype : call->dtype;
    return named == BA_DTYPE_COUNT ? 0 : arg_expect_dtype(name, dtype, dtype_argument(call, is_cache(role) ? ARG_KV_DTYPE : ARG_DTYPE), named);
}

int call_hold(py_call *call, PyObject *object, const char *name, arg_role role, int traits, ba_tensor *tensor) {
    if (object == Py_None && traits & ARG_OPTIONAL) return 0;
    arg_array *const array = &call->array[call->arrays];
    if ((traits & ARG_WRITTEN ? arg_hold_output : arg_hold)(call->state, object, name, role, bits_of(call, role), array) < 0) return -1;
    call->traits[call->arrays++] = traits;
    *tensor = array->tensor;
    return traits & ARG_NAMED ? expect_named(call, name, role, tensor->dtype) : 0;
}

int call_result(py_call *call, PyObject *given, const ba_tensor *shape, const char *name, arg_role role, ba_tensor *tensor) {
    arg_array *const array = &call->array[call->arrays];
    PyObject *const made = arg_hold_or_make_output(call->state, given, call->values[0], shape, name, role, bits_of(call, role), array);
    if (made == NULL) return -1;
    call->result[call->results++] = made;
    call->traits[call->arrays++] = ARG_WRITTEN;
    *tensor = array->tensor;
    return 0;
}

void call_no_result(py_call *call) { call->result[call->results++] = Py_NewRef(Py_None); }

const arg_array *call_array(const py_call *call, int index) {
    static const arg_array none;
    return call->place[index] < 0 ? &none : &call->array[call->place[index]];
}

bool call_same_array(const ba_tensor *a, const ba_tensor *b) {
    bool same = a->data == b->data && a->dtype == b->dtype && ba_same_shape(a, b);
    for (int i = 0; same && i < a->ndim; i++) same = a->strides[i] == b->strides[i];
    return same;
}

/* The loop skips the pair of an array and itself, a pair that it compares in the other order, two arrays of a pool, and summaries that are their
 * keys' array. Where a call has a pool, arrays that are written or of the pool may interleave, if they share no element. */
int call_expect_disjoint(const py_call *call) {
    enum { COMPARED = ARG_WRITTEN | ARG_POOL };
    bool has_pool = false;
    for (int i = 0; i < call->arrays; i++) has_pool |= (call->traits[i] & ARG_POOL) != 0;
    for (int i = 0; i < call->arrays; i++)
        for (int j = 0; call->traits[i] & COMPARED && j < call->arrays; j++) {
            if (i == j || (call->traits[j] & COMPARED && j > i) || call->traits[i] & call->traits[j] & ARG_POOL) continue;
            const bool pool = call->traits[i] & ARG_POOL; /* where new tokens overlap the cache, the sentence begins with the tokens */
            const arg_array *const a = &call->array[pool ? j : i], *const b = &call->array[pool ? i : j];
            if (call->pages_by_token && call->traits[j] & ARG_SUMMARISED && call_same_array(&a->tensor, &b->tensor)) continue;
            if (has_pool && call->traits[j] & COMPARED && ba_are_apart(&a->tensor, &b->tensor)) continue;
            if (arg_disjoint(a, b) < 0) return -1;
        }
    return 0;
}

/* ---- Lists ------------------------------------------------------------------------------------------------------------- */

int call_read_list(py_call *call, int index) {
    return arg_lengths(call->state, call->values[index], call->operation->arguments[index].name, call_add_list(call, index));
}

const arg_list *call_list(const py_call *call, int index) {
    static const arg_list none;
    return call->place[index] < 0 ? &none : &call->list[call->place[index]];
}

arg_list *call_add_list(py_call *call, int index) {
    call->place[index] = (signed char)call->lists;
    call->list[call->lists] = (arg_list){0};
    return &call->list[call->lists++];
}

const int64_t *call_cumulative(py_call *call, const arg_list *lengths) { return call->cumulative = arg_cumulative(lengths); }

int call_expect_lengths(const py_call *call, int64_t sequences, const char *meaning) {
    for (int i = 0; call->lists && i < call->operation->count; i++)
        if (call->operation->arguments[i].role == ARG_LENGTHS &&
            arg_expect_count(call_list(call, i), call->operation->arguments[i].name, sequences, meaning) < 0)
            return -1;
    return 0;
}

/* ---- Reading ----------------------------------------------------------------------------------------------------------- */

int call_spread(py_call *call, int index) {
    PyObject *const tuple = call->values[index];
    if (tuple == Py_None) return 0;
    if (!PyTuple_Check(tuple) || PyTuple_Size(tuple) >= call->operation->count - index) {
        arg_fail(PyExc_TypeError, BA_ARG("%s") ": expected a tuple of the arguments behind it, got %R", call->operation->arguments[index].name,
                 tuple);
        return -1;
    }
    for (Py_ssize_t i = PyTuple_Size(tuple); i-- > 0;) call->values[index + 1 + i] = PyTuple_GetItem(tuple, i);
    return 0;
}

static void *member_of(const py_call *call, const argument *argument) { return (char *)call->args + argument->member; }

static int read_dtypes(py_call *call, bool either) {
    const argument *const arguments = call->operation->arguments;
    for (int i = 0; i < call->operation->count; i++) {
        const bool kv = arguments[i].role == ARG_KV_DTYPE;
        if (call->values[i] == Py_None || (!kv && arguments[i].role != ARG_DTYPE)) continue;
        if (arg_dtype(call->values[i], arguments[i].name, kv ? ARG_CACHE : ARG_FLOATS, kv ? &call->kv_dtype : &call->dtype) < 0) return -1;
    }
    const bool named = call->dtype != BA_DTYPE_COUNT;
    call->bits = arg_bits(call->dtype);
    call->kv_bits = arg_bits(call->kv_dtype != BA_DTYPE_COUNT ? call->kv_dtype : call->dtype);
    if (either && !named && call->kv_bits == BA_BFLOAT16) call->bits = BA_BFLOAT16;
    return 0;
}

static int read_argument(py_call *call, int i) {
    const argument *const a = &call->operation->arguments[i];
    PyObject *const object = call->values[i];
    void *const member = member_of(call, a);
    switch (a->role) {
    case ARG_LIST:
    case ARG_LENGTHS:
        if (call_read_list(call, i) < 0) return -1;
        *(const int64_t **)member = call_list(call, i)->values;
        return 0;
    case ARG_INTEGER: return arg_int64(object, a->name, member);
    case ARG_TOKENS_BEFORE: return arg_tokens_before(object, a->name, member);
    case ARG_PAIR: return arg_pair(object, a->name, member);
    case ARG_NUMBER: return arg_double(object, a->name, member);
    case ARG_SCALE: return arg_scale(object, a->name, member);
    case ARG_FLAG: return arg_flag(object, a->name, member);
    case ARG_LAYOUT: return arg_layout(object, a->name, member);
    case ARG_KV_LAYOUT: return arg_kv_layout(object, a->name, member);
    case ARG_THREADS: return arg_threads(object, a->name, member);
    default: call->place[i] = (signed char)call->arrays; return call_hold(call, object, a->name, a->role, a->traits, member);
    }
}

int call_read(py_call *call, bool either) {
    if (read_dtypes(call, either) < 0) return -1;
    const argument *const arguments = call->operation->arguments;
    for (int i = 0; i < call->operation->count; i++) {
        if (call->values[i] == Py_None && arguments[i].traits & ARG_OPTIONAL) continue;
        if (arguments[i].role == ARG_HEADS || arguments[i].role == ARG_PER_SEQUENCE) call->each = true; /* for call_read_each() */
        else if (arguments[i].member != ARG_NO_MEMBER && read_argument(call, i) < 0) return -1;
    }
    return 0;
}

int call_read_each(py_call *call, int64_t heads, int64_t sequences, const char *meaning) {
    for (int i = 0; call->each && i < call->operation->count; i++) {
        const argument *const a = &call->operation->arguments[i];
        if (call->values[i] == Py_None) continue;
        if (a->role == ARG_HEADS && heads > 0) {
            arg_array *const array = &call->array[call->arrays];
            call->place[i] = (signed char)call->arrays;
            call->traits[call->arrays++] = a->traits; /* counted before it is read, so that call_end() releases an array that is held and then refused
                                                       * for its shape */
            if (arg_head_numbers(call->state, call->values[i], a->name, heads, array, member_of(call, a)) < 0) return -1;
        } else if (a->role == ARG_PER_SEQUENCE) {
            arg_list *const list = call_add_list(call, i);
            if (arg_numbers(call->state, call->values[i], a->name, sequences, meaning, list) < 0) return -1;
            if (a->member != ARG_NO_MEMBER) *(const int64_t **)member_of(call, a) = list->values;
        }
    }
    return 0;
}
