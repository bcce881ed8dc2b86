/* The operations on paged caches. */
#include "python/ops.h"

#include <string.h>

#include "ops/append.h"
#include "ops/open.h"

#define COUNT_OF(array) (sizeof(array) / sizeof *(array))

/* ---- Requests: page tables and lengths ------------------------------------------------------------------------------ */

typedef struct requests {
    arg_array block_tables;
    arg_list seq_lens, indptr, last_page_len, q_lens, q_begin;
    int64_t *cu_q;
} requests;

static void release_requests(requests *r) {
    arg_list *const lists[] = {&r->seq_lens, &r->indptr, &r->last_page_len, &r->q_lens, &r->q_begin};
    arg_release(&r->block_tables);
    for (size_t i = 0; i < COUNT_OF(lists); i++) PyMem_Free(lists[i]->values);
    PyMem_Free(r->cu_q);
}

/* Computes the lengths from the numbers of pages and from last_page_len. Where indptr is invalid, the lengths are arbitrary, because the library
 * refuses indptr. */
static int lengths_from_pages(requests *r, int64_t batch, int64_t page_size) {
    r->seq_lens.values = PyMem_Calloc((size_t)batch + 1, sizeof(int64_t));
    if (r->seq_lens.values == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    r->seq_lens.count = (Py_ssize_t)batch;
    for (int64_t b = 0; b < batch; b++) {
        const int64_t first = r->indptr.values[b], end = r->indptr.values[b + 1], last = r->last_page_len.values[b];
        const bool empty = first < 0 || end <= first;
        if (last < !empty || last > page_size) {
            PyErr_Format(PyExc_ValueError, "last_page_len: expected 1 to the %lld tokens of a page, got %lld at [%lld]", (long long)page_size,
                         (long long)last, (long long)b);
            return -1;
        }
        int64_t *length = &r->seq_lens.values[b];
        if (!empty && (__builtin_mul_overflow(end - first - 1, page_size, length) || __builtin_add_overflow(*length, last, length)))
            *length = INT64_MAX;
    }
    return 0;
}

/* Sets the lists of the requests. The C API takes them as bare pointers, so their number is checked here; the library checks their entries. */
static int set_requests(requests *r, int64_t page_size, ba_paged_args *a) {
    if (r->indptr.values != NULL) {
        a->batch = r->indptr.count - 1;
        if (a->batch < 0) {
            PyErr_SetString(PyExc_ValueError, "indptr: expected B + 1 entries, got 0");
            return -1;
        }
        if (arg_expect_count(&r->last_page_len, "last_page_len", a->batch, "one per request") < 0 || lengths_from_pages(r, a->batch, page_size) < 0)
            return -1;
    } else {
        a->batch = r->seq_lens.count;
    }
    a->indptr = r->indptr.values;
    a->seq_lens = r->seq_lens.values;
    a->q_begin = r->q_begin.values;
    if (arg_expect_count(&r->q_begin, "q_begin", a->batch, "one per request") < 0) return -1;
    if (r->q_lens.values == NULL) return 0;
    if (arg_expect_count(&r->q_lens, "q_lens", a->batch, "one per request") < 0) return -1;
    a->cu_q = r->cu_q = PyMem_Malloc((size_t)(a->batch + 1) * sizeof *r->cu_q);
    if (r->cu_q == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    r->cu_q[0] = 0;
    for (int64_t b = 0; b < a->batch; b++) /* the sum may wrap; the library then refuses it */
        if (__builtin_add_overflow(r->cu_q[b], r->q_lens.values[b], &r->cu_q[b + 1])) r->cu_q[b + 1] = INT64_MAX;
    return 0;
}

/* Reads tables, lengths and the places of queries. `values` are block_tables, seq_lens, indptr, last_page_len, q_lens, q_begin, in this order. With
 * indptr, block_tables lists the pages of all requests one after the other, and last_page_len replaces seq_lens. */
static int read_requests(module_state *state, PyObject *const *values, int64_t page_size, requests *r, ba_paged_args *a) {
    if (arg_lengths(state, values[1], "seq_lens", &r->seq_lens) < 0 || arg_lengths(state, values[2], "indptr", &r->indptr) < 0 ||
        arg_lengths(state, values[3], "last_page_len", &r->last_page_len) < 0 || arg_lengths(state, values[4], "q_lens", &r->q_lens) < 0 ||
        arg_lengths(state, values[5], "q_begin", &r->q_begin) < 0)
        return -1;
    return set_requests(r, page_size, a);
}

static int hold_tables(module_state *state, PyObject *object, requests *r, ba_paged_args *a) {
    if (arg_hold(state, object, "block_tables", ARG_TABLES, BA_UINT16, &r->block_tables) < 0) return -1;
    a->block_tables = r->block_tables.tensor;
    return 0;
}

/* Opened tables are kept in a capsule, which closes them when it is freed. */
static const char *const plan_name = "blitz_attn.page_tables";

static void close_plan(PyObject *capsule) {
    ba_page_tables *tables = PyCapsule_GetPointer(capsule, plan_name);
    ba_close_page_tables(tables);
    PyMem_Free(tables);
}

/* The opened tables in a capsule; NULL where `object` is something else. They belong to the capsule, to which the call has a reference. */
static const ba_page_tables *tables_of_plan(PyObject *object) {
    return PyCapsule_IsValid(object, plan_name) ? PyCapsule_GetPointer(object, plan_name) : NULL;
}

TAKES(open_page_tables, 8, "block_tables", "seq_lens", "indptr", "last_page_len", "q_lens", "q_begin", "page_size", "num_pages");
PyObject *py_open_page_tables(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    SORT_ARGUMENTS(open_page_tables, 8);
    module_state *state = PyModule_GetState(module);
    requests r = {0};
    ba_paged_args a = BA_PAGED_ARGS_INIT;
    int64_t page_size, num_pages = -1;
    ba_page_tables *tables = NULL;
    PyObject *plan = NULL, *result = NULL;
    ba_status status;
    if (arg_int64(values[6], "page_size", &page_size) < 0) return NULL;
    if (page_size < 1) return PyErr_Format(PyExc_ValueError, "page_size: expected at least 1 token, got %lld", (long long)page_size);
    if (values[7] != Py_None && arg_int64(values[7], "num_pages", &num_pages) < 0) return NULL;
    if (values[7] != Py_None && num_pages < 0)
        return PyErr_Format(PyExc_ValueError, "num_pages: expected at least 0 pages, got %lld", (long long)num_pages);
    if (hold_tables(state, values[0], &r, &a) < 0 || read_requests(state, values, page_size, &r, &a) < 0) goto done;
    tables = PyMem_Calloc(1, sizeof *tables);
    if (tables == NULL) {
        PyErr_NoMemory();
        goto done;
    }
    WITHOUT_GIL(status = ba_open_page_tables(&a, page_size, num_pages, -1, tables));
    if (arg_check(status) < 0) goto done;
    plan = PyCapsule_New(tables, plan_name, close_plan);
    if (plan == NULL) goto done;
    result = Py_BuildValue("(OLL)", plan, (long long)tables->batch, (long long)tables->queries);
    tables = NULL; /* the capsule owns them now */
done:
    release_requests(&r);
    if (tables != NULL) ba_close_page_tables(tables);
    PyMem_Free(tables);
    Py_XDECREF(plan);
    return result;
}

/* ---- Attention ----------------------------------------------------------------------------------------------------- */

/* The arguments, in order; each gets an index and a name. block_tables may be opened page tables: then seq_lens, indptr,
 * last_page_len, q_lens and q_begin are None. */
/* clang-format off */
#define PAGED_ARGUMENTS(X) \
    X(empty) X(q) X(k_cache) X(v_cache) X(block_tables) X(seq_lens) X(indptr) X(last_page_len) X(q_lens) X(q_begin) X(selected) X(counts) \
    X(scale) X(kv_layout) X(window) X(sinks) X(softcap) X(k_scale) X(v_scale) X(return_lse) X(out) X(lse_out) X(dtype) X(kv_dtype) X(num_threads) \
    X(out_dtype)
/* clang-format on */
#define AS_INDEX(name) PAGED_##name,
#define AS_TEXT(name) #name,
enum { PAGED_ARGUMENTS(AS_INDEX) PAGED_COUNT };

typedef struct paged_call {
    arg_array q, k_cache, v_cache, k_scale, v_scale, selected, sinks, out, lse;
    arg_list counts;
    requests requests;
    const ba_page_tables *plan; /* opened tables; NULL: `requests` holds the call's own */
    ba_paged_args args;
} paged_call;

static void release_paged(paged_call *call) {
    arg_array *const arrays[] = {&call->q,        &call->k_cache, &call->v_cache, &call->k_scale, &call->v_scale,
                                 &call->selected, &call->sinks,   &call->out,     &call->lse};
    for (size_t i = 0; i < COUNT_OF(arrays); i++) arg_release(arrays[i]);
    PyMem_Free(call->counts.values);
    release_requests(&call->requests);
}

static int hold_optional(module_state *state, PyObject *object, const char *name, arg_role role, ba_dtype bits_as, arg_array *array,
                         ba_tensor *tensor) {
    if (object == Py_None) return 0;
    if (arg_hold(state, object, name, role, bits_as, array) < 0) return -1;
    *tensor = array->tensor;
    return 0;
}

static int64_t page_tokens(const ba_paged_args *a) { return a->k_cache.ndim == 4 ? a->k_cache.dims[a->kv_layout == BA_NHD ? 1 : 2] : 1; }

static int read_selected(module_state *state, PyObject *const *values, paged_call *call) {
    ba_paged_args *a = &call->args;
    if (hold_optional(state, values[PAGED_selected], "selected", ARG_INDICES, BA_UINT16, &call->selected, &a->selected) < 0) return -1;
    if (values[PAGED_counts] == Py_None) return 0;
    int64_t dims[2];
    if (arg_matrix(state, values[PAGED_counts], "counts", dims, &call->counts) < 0) return -1;
    if (a->selected.ndim == 3 && (dims[0] != a->selected.dims[0] || dims[1] != a->selected.dims[1])) {
        PyErr_Format(PyExc_ValueError, "counts: expected shape (%lld, %lld) like the rows of selected, got (%lld, %lld)",
                     (long long)a->selected.dims[0], (long long)a->selected.dims[1], (long long)dims[0], (long long)dims[1]);
        return -1;
    }
    a->selected_counts = call->counts.values;
    return 0;
}

static int read_sinks(module_state *state, PyObject *object, paged_call *call) {
    ba_paged_args *a = &call->args;
    ba_tensor sinks = {0};
    if (hold_optional(state, object, "sinks", ARG_SCALES, BA_UINT16, &call->sinks, &sinks) < 0) return -1;
    if (object == Py_None || a->q.ndim != 3) return 0; /* the library refuses q */
    if (sinks.ndim != 1 || sinks.dims[0] != a->q.dims[1] || sinks.strides[0] != 1) {
        PyErr_Format(PyExc_ValueError, "sinks: expected a contiguous array of shape (%lld,), one number per head, got %d dimensions and %lld numbers",
                     (long long)a->q.dims[1], sinks.ndim, (long long)(sinks.ndim > 0 ? sinks.dims[0] : 1));
        return -1;
    }
    a->sinks = sinks.data;
    return 0;
}

/* Reads all inputs of a call. */
static int read_paged(module_state *state, PyObject *const *values, paged_call *call, ba_dtype *bits_as) {
    ba_paged_args *a = &call->args;
    ba_dtype dtype, kv_dtype;
    if (arg_dtype(values[PAGED_dtype], "dtype", ARG_FLOATS, &dtype) < 0) return -1;
    if (arg_dtype(values[PAGED_kv_dtype], "kv_dtype", ARG_CACHE, &kv_dtype) < 0) return -1;
    *bits_as = arg_bits(dtype);
    const ba_dtype kv_bits_as = arg_bits(kv_dtype == BA_DTYPE_COUNT ? dtype : kv_dtype);
    if (hold_optional(state, values[PAGED_q], "q", ARG_FLOATS, *bits_as, &call->q, &a->q) < 0) return -1;
    if (hold_optional(state, values[PAGED_k_cache], "k_cache", ARG_CACHE, kv_bits_as, &call->k_cache, &a->k_cache) < 0) return -1;
    if (hold_optional(state, values[PAGED_v_cache], "v_cache", ARG_CACHE, kv_bits_as, &call->v_cache, &a->v_cache) < 0) return -1;
    if (hold_optional(state, values[PAGED_k_scale], "k_scale", ARG_SCALES, BA_UINT16, &call->k_scale, &a->k_scale) < 0) return -1;
    if (hold_optional(state, values[PAGED_v_scale], "v_scale", ARG_SCALES, BA_UINT16, &call->v_scale, &a->v_scale) < 0) return -1;
    if (dtype != BA_DTYPE_COUNT && a->q.dtype != dtype) {
        PyErr_Format(PyExc_TypeError, "q: expected %s as dtype says, got %s", ba_dtype_name(dtype), ba_dtype_name(a->q.dtype));
        return -1;
    }
    if (kv_dtype != BA_DTYPE_COUNT && a->k_cache.dtype != kv_dtype) {
        PyErr_Format(PyExc_TypeError, "k_cache: expected %s as kv_dtype says, got %s", ba_dtype_name(kv_dtype), ba_dtype_name(a->k_cache.dtype));
        return -1;
    }
    call->plan = tables_of_plan(values[PAGED_block_tables]);
    if (call->plan == NULL && hold_tables(state, values[PAGED_block_tables], &call->requests, a) < 0) return -1;
    if (arg_kv_layout(values[PAGED_kv_layout], "kv_layout", &a->kv_layout) < 0) return -1;
    if (call->plan == NULL && read_requests(state, values + PAGED_block_tables, page_tokens(a), &call->requests, a) < 0) return -1;
    if (arg_out_dtype(values[PAGED_out_dtype], a->q.dtype, &a->unrounded) < 0) return -1;
    if (read_selected(state, values, call) < 0 || read_sinks(state, values[PAGED_sinks], call) < 0) return -1;
    if (values[PAGED_window] != Py_None && arg_int64(values[PAGED_window], "window", &a->window) < 0) return -1;
    if (values[PAGED_softcap] != Py_None && arg_double(values[PAGED_softcap], "softcap", &a->softcap) < 0) return -1;
    if (arg_threads(values[PAGED_num_threads], "num_threads", &a->num_threads) < 0) return -1;
    if (values[PAGED_scale] != Py_None) return arg_double(values[PAGED_scale], "scale", &a->scale);
    const int64_t dim = a->q.ndim > 0 ? a->q.dims[a->q.ndim - 1] : 0;
    a->scale = dim > 0 ? ba_default_scale(dim) : 1.0; /* the library refuses a q without D */
    return 0;
}

static int check_paged_disjoint(const paged_call *call) {
    const arg_array *const inputs[] = {&call->q,        &call->k_cache, &call->v_cache, &call->k_scale, &call->v_scale, &call->requests.block_tables,
                                       &call->selected, &call->sinks};
    for (size_t i = 0; i < COUNT_OF(inputs); i++)
        if (arg_disjoint(&call->out, inputs[i]) < 0 || arg_disjoint(&call->lse, inputs[i]) < 0) return -1;
    return arg_disjoint(&call->lse, &call->out);
}

TAKES(paged_attention, PAGED_seq_lens, PAGED_ARGUMENTS(AS_TEXT));
PyObject *py_paged_attention(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    SORT_ARGUMENTS(paged_attention, PAGED_COUNT);
    module_state *state = PyModule_GetState(module);
    paged_call call = {.args = BA_PAGED_ARGS_INIT};
    ba_attention attention = {.num_threads = 0};
    ba_dtype bits_as;
    int return_lse;
    ba_status status;
    PyObject *out = NULL, *lse = NULL, *result = NULL;

    if (arg_flag(values[PAGED_return_lse], "return_lse", &return_lse) < 0 || read_paged(state, values, &call, &bits_as) < 0) goto done;
    if (call.plan != NULL) status = ba_open_paged(&call.args, call.plan, &attention);
    else WITHOUT_GIL(status = ba_open_paged(&call.args, NULL, &attention)); /* page tables may be long, so checking them may take time */
    if (arg_check(status) < 0) goto done;

    out = arg_hold_or_make_output(state, values[PAGED_out], values[PAGED_empty], &attention.out_shape, "out", ARG_FLOATS, bits_as, &call.out);
    if (out == NULL) goto done;
    call.args.out = call.out.tensor;
    if (return_lse) {
        lse = arg_hold_or_make_output(state, values[PAGED_lse_out], values[PAGED_empty], &attention.lse_shape, "lse", ARG_LSE, BA_UINT16, &call.lse);
        if (lse == NULL) goto done;
        call.args.lse = call.lse.tensor;
    }
    if (check_paged_disjoint(&call) < 0 || arg_check(ba_set_paged_outputs(&call.args, &attention)) < 0) goto done;

    INTERRUPTIBLE(status, ba_run_attention(&attention));
    if (arg_check(status) < 0) goto done;
    result = return_lse ? PyTuple_Pack(2, out, lse) : Py_NewRef(out);
done:
    ba_close_attention(&attention);
    release_paged(&call);
    Py_XDECREF(out);
    Py_XDECREF(lse);
    return result;
}

/* ---- Writing ------------------------------------------------------------------------------------------------------- */

TAKES(quantize_kv, 3, "x", "values", "scale", "dtype", "kv_dtype");
PyObject *py_quantize_kv(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    SORT_ARGUMENTS(quantize_kv, 5);
    module_state *state = PyModule_GetState(module);
    arg_array x = {0}, numbers = {0}, scale = {0};
    ba_dtype dtype, kv_dtype;
    ba_status status;
    PyObject *result = NULL;

    if (arg_dtype(values[3], "dtype", ARG_FLOATS, &dtype) < 0 || arg_dtype(values[4], "kv_dtype", ARG_CACHE, &kv_dtype) < 0) return NULL;
    if (arg_hold(state, values[0], "x", ARG_FLOATS, arg_bits(dtype), &x) < 0) goto done;
    if (arg_hold_output(state, values[1], "values", ARG_CACHE, arg_bits(kv_dtype), &numbers) < 0) goto done;
    if (arg_hold_output(state, values[2], "scale", ARG_SCALES, BA_UINT16, &scale) < 0) goto done;
    if (arg_disjoint(&numbers, &x) < 0 || arg_disjoint(&scale, &x) < 0 || arg_disjoint(&scale, &numbers) < 0) goto done;
    INTERRUPTIBLE(status, ba_quantize_kv(&x.tensor, &numbers.tensor, &scale.tensor, 0));
    if (arg_check(status) == 0) result = Py_NewRef(Py_None);
done:
    arg_release(&x);
    arg_release(&numbers);
    arg_release(&scale);
    return result;
}

/* The arguments, in order; each gets an index and a name. Where slot_mapping is None, block_tables may be opened page tables: then seq_lens, indptr,
 * last_page_len and q_lens are None. q_begin is always None. */
#define APPEND_ARGUMENTS(X)                                                                                                                          \
    X(k)                                                                                                                                             \
    X(v)                                                                                                                                             \
    X(k_cache)                                                                                                                                       \
    X(v_cache)                                                                                                                                       \
    X(slot_mapping) X(block_tables) X(seq_lens) X(indptr) X(last_page_len) X(q_lens) X(q_begin) X(kv_layout) X(k_scale) X(v_scale) X(dtype)          \
        X(kv_dtype) X(num_threads)
#define AS_APPEND_INDEX(name) APPEND_##name,
enum { APPEND_ARGUMENTS(AS_APPEND_INDEX) APPEND_COUNT };

typedef struct append_call {
    arg_array k, v, k_cache, v_cache, k_scale, v_scale;
    arg_list slots;
    requests requests;
    const ba_page_tables *plan; /* opened tables, or NULL */
    ba_paged_args args;
} append_call;

static void release_append(append_call *call) {
    arg_array *const arrays[] = {&call->k, &call->v, &call->k_cache, &call->v_cache, &call->k_scale, &call->v_scale};
    for (size_t i = 0; i < COUNT_OF(arrays); i++) arg_release(arrays[i]);
    PyMem_Free(call->slots.values);
    release_requests(&call->requests);
}

/* Holds the scales of a cache. Those per token are written, so they must be writable; others are read. */
static int hold_scale(module_state *state, PyObject *object, const char *name, arg_array *array, ba_tensor *tensor) {
    if (hold_optional(state, object, name, ARG_SCALES, BA_UINT16, array, tensor) < 0) return -1;
    if (tensor->ndim < 2 || !array->read_only) return 0;
    PyErr_Format(PyExc_ValueError, "%s: expected a writable array, got a read-only one", name);
    return -1;
}

static int read_append(module_state *state, PyObject *const *values, append_call *call) {
    ba_paged_args *a = &call->args;
    ba_dtype dtype, kv_dtype;
    if (arg_dtype(values[APPEND_dtype], "dtype", ARG_FLOATS, &dtype) < 0) return -1;
    if (arg_dtype(values[APPEND_kv_dtype], "kv_dtype", ARG_CACHE, &kv_dtype) < 0) return -1;
    const ba_dtype bits_as = arg_bits(dtype == BA_DTYPE_COUNT ? kv_dtype : dtype),
                   kv_bits_as = arg_bits(kv_dtype == BA_DTYPE_COUNT ? dtype : kv_dtype);
    if (arg_hold(state, values[APPEND_k], "k", ARG_FLOATS, bits_as, &call->k) < 0) return -1;
    if (values[APPEND_v] != Py_None && arg_hold(state, values[APPEND_v], "v", ARG_FLOATS, bits_as, &call->v) < 0) return -1;
    if (arg_hold_output(state, values[APPEND_k_cache], "k_cache", ARG_CACHE, kv_bits_as, &call->k_cache) < 0) return -1;
    if (values[APPEND_v_cache] != Py_None && arg_hold_output(state, values[APPEND_v_cache], "v_cache", ARG_CACHE, kv_bits_as, &call->v_cache) < 0)
        return -1;
    if (hold_scale(state, values[APPEND_k_scale], "k_scale", &call->k_scale, &a->k_scale) < 0) return -1;
    if (hold_scale(state, values[APPEND_v_scale], "v_scale", &call->v_scale, &a->v_scale) < 0) return -1;
    a->k_cache = call->k_cache.tensor;
    a->v_cache = call->v_cache.tensor;
    if (arg_kv_layout(values[APPEND_kv_layout], "kv_layout", &a->kv_layout) < 0) return -1;
    if (arg_threads(values[APPEND_num_threads], "num_threads", &a->num_threads) < 0) return -1;
    if (arg_lengths(state, values[APPEND_slot_mapping], "slot_mapping", &call->slots) < 0) return -1;
    if (call->slots.values != NULL)
        return arg_expect_count(&call->slots, "slot_mapping", call->k.tensor.ndim > 0 ? call->k.tensor.dims[0] : 0, "one for each of k's tokens");
    call->plan = tables_of_plan(values[APPEND_block_tables]);
    if (call->plan != NULL) return 0;
    if (hold_tables(state, values[APPEND_block_tables], &call->requests, a) < 0) return -1;
    return read_requests(state, values + APPEND_block_tables, page_tokens(a), &call->requests, a);
}

/* Each array of tokens and each array that is written have memory of their own. k_cache and v_cache may lie in one array, interleaved. */
static int check_append_disjoint(const append_call *call) {
    const arg_array *const written[] = {&call->k_cache, &call->v_cache, &call->k_scale, &call->v_scale};
    for (size_t i = 0; i < COUNT_OF(written); i++)
        if (arg_disjoint(&call->k, written[i]) < 0 || arg_disjoint(&call->v, written[i]) < 0) return -1;
    return 0;
}

TAKES(append_paged_kv, APPEND_block_tables, APPEND_ARGUMENTS(AS_TEXT));
PyObject *py_append_paged_kv(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    SORT_ARGUMENTS(append_paged_kv, APPEND_COUNT);
    append_call call = {.args = BA_PAGED_ARGS_INIT};
    const ba_tensor *v;
    ba_status status;
    PyObject *result = NULL;

    if (read_append(PyModule_GetState(module), values, &call) < 0 || check_append_disjoint(&call) < 0) goto done;
    v = values[APPEND_v] != Py_None ? &call.v.tensor : NULL;
    if (call.plan != NULL) WITHOUT_GIL(status = ba_append_to(&call.k.tensor, v, NULL, call.plan, &call.args));
    else WITHOUT_GIL(status = ba_append_kv(&call.k.tensor, v, call.slots.values, &call.args));
    if (arg_check(status) == 0) result = Py_NewRef(Py_None);
done:
    release_append(&call);
    return result;
}

/* ---- Summaries of pages -------------------------------------------------------------------------------------------- */

typedef struct metadata_call {
    arg_array k_cache, block_tables, metadata_tables, largest, smallest, mean;
    arg_list begin, end;
    ba_quest_metadata_args args;
} metadata_call;

static void release_metadata(metadata_call *call) {
    arg_array *const arrays[] = {&call->k_cache, &call->block_tables, &call->metadata_tables, &call->largest, &call->smallest, &call->mean};
    for (size_t i = 0; i < COUNT_OF(arrays); i++) arg_release(arrays[i]);
    PyMem_Free(call->begin.values);
    PyMem_Free(call->end.values);
}

static int64_t table_entry(const ba_tensor *table, int64_t row, int64_t column) {
    const int64_t at = row * table->strides[0] + column * table->strides[1];
    return table->dtype == BA_INT64 ? ((const int64_t *)table->data)[at] : ((const int32_t *)table->data)[at];
}

/* Whether both arrays are the same pool of pages. */
static bool same_pool(const ba_tensor *a, const ba_tensor *b) {
    bool same = a->data == b->data && a->ndim == b->ndim;
    for (int i = 0; same && i < a->ndim; i++) same = a->dims[i] == b->dims[i] && a->strides[i] == b->strides[i];
    return same;
}

/* Marks the pages that a table uses with `mark`. Stops at a page that already has a mark of `taken`: returns -1 and sets *page to its number. Skips
 * numbers out of range, which the library refuses. */
static int mark_pages(uint8_t *marks, int64_t count, const ba_tensor *table, const arg_list *tokens, int64_t page_size, uint8_t mark, uint8_t taken,
                      int64_t *page) {
    if (table->ndim != 2 || table->dims[0] != tokens->count) return 0;
    for (int64_t b = 0; b < table->dims[0]; b++) {
        const int64_t length = tokens->values[b] < INT32_MAX ? tokens->values[b] : INT32_MAX; /* the library refuses such long requests */
        for (int64_t i = 0; i < table->dims[1] && i <= (length - 1) / page_size && length > 0; i++) {
            *page = table_entry(table, b, i);
            if (*page < 0 || *page >= count) continue;
            if (marks[*page] & taken) return -1;
            marks[*page] |= mark;
        }
    }
    return 0;
}

/* Checks that no summary page is listed twice, and that none holds keys, where the summaries are in the same pool of pages as the keys. */
static int check_summary_pages(const metadata_call *call) {
    const ba_quest_metadata_args *a = &call->args;
    const ba_tensor *summary = a->maxblocks.ndim ? &a->maxblocks : a->minblocks.ndim ? &a->minblocks : &a->meanblocks;
    if (a->k_cache.ndim != 4 || summary->ndim != 4) return 0; /* the library refuses these */
    const int64_t size = a->k_cache.dims[a->kv_layout == BA_NHD ? 1 : 2], rows = summary->dims[1], count = summary->dims[0];
    if (size < 1 || rows < 1 || count < 1 || rows > INT64_MAX / size) return 0;
    const bool pool = same_pool(&a->k_cache, &a->maxblocks) || same_pool(&a->k_cache, &a->minblocks) || same_pool(&a->k_cache, &a->meanblocks);
    uint8_t *marks = PyMem_Calloc((size_t)count, 1);
    if (marks == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    int64_t page = 0;
    if (pool) mark_pages(marks, count, &a->block_tables, &call->end, size, 1, 0, &page);
    const int status = mark_pages(marks, count, &a->metadata_tables, &call->end, size * rows, 2, 1 | 2, &page);
    if (status < 0)
        PyErr_Format(PyExc_ValueError, "metadata_block_tables: expected pages that nothing else uses, got %lld, which %s", (long long)page,
                     marks[page] & 1 ? "holds keys" : "is listed twice");
    PyMem_Free(marks);
    return status;
}

static int check_metadata_disjoint(const metadata_call *call) {
    const arg_array *const outputs[] = {&call->largest, &call->smallest, &call->mean};
    for (size_t i = 0; i < COUNT_OF(outputs); i++) {
        if (arg_disjoint(outputs[i], &call->block_tables) < 0 || arg_disjoint(outputs[i], &call->metadata_tables) < 0) return -1;
        const bool pool = call->args.kv_layout == BA_NHD && same_pool(&outputs[i]->tensor, &call->k_cache.tensor);
        if (!pool && arg_disjoint(outputs[i], &call->k_cache) < 0) return -1;
        for (size_t j = 0; j < i; j++)
            if (arg_disjoint(outputs[i], outputs[j]) < 0) return -1;
    }
    return check_summary_pages(call);
}

static int hold_summary(module_state *state, PyObject *object, const char *name, ba_dtype bits_as, arg_array *array, ba_tensor *tensor) {
    if (object == Py_None) return 0;
    if (arg_hold_output(state, object, name, ARG_FLOATS, bits_as, array) < 0) return -1;
    *tensor = array->tensor;
    return 0;
}

/* clang-format off */
#define METADATA_ARGUMENTS(X) \
    X(k_cache) X(block_tables) X(seq_lens) X(metadata_block_tables) X(maxblocks) X(minblocks) X(meanblocks) X(start_lens) X(kv_layout) X(dtype) \
    X(num_threads)
/* clang-format on */
#define AS_METADATA_INDEX(name) METADATA_##name,
enum { METADATA_ARGUMENTS(AS_METADATA_INDEX) METADATA_COUNT };

static int read_metadata(module_state *state, PyObject *const *values, metadata_call *call) {
    ba_quest_metadata_args *a = &call->args;
    const char *const *names = arguments_quest_metadata.names;
    ba_dtype dtype;
    if (arg_dtype(values[METADATA_dtype], "dtype", ARG_FLOATS, &dtype) < 0) return -1;
    const ba_dtype bits_as = arg_bits(dtype);
    if (arg_hold(state, values[METADATA_k_cache], names[METADATA_k_cache], ARG_FLOATS, bits_as, &call->k_cache) < 0) return -1;
    a->k_cache = call->k_cache.tensor;
    if (arg_hold(state, values[METADATA_block_tables], names[METADATA_block_tables], ARG_TABLES, BA_UINT16, &call->block_tables) < 0) return -1;
    a->block_tables = call->block_tables.tensor;
    if (arg_lengths(state, values[METADATA_seq_lens], names[METADATA_seq_lens], &call->end) < 0) return -1;
    a->end = call->end.values;
    a->batch = call->end.count;
    if (arg_hold(state, values[METADATA_metadata_block_tables], names[METADATA_metadata_block_tables], ARG_TABLES, BA_UINT16,
                 &call->metadata_tables) < 0)
        return -1;
    a->metadata_tables = call->metadata_tables.tensor;
    if (hold_summary(state, values[METADATA_maxblocks], names[METADATA_maxblocks], bits_as, &call->largest, &a->maxblocks) < 0) return -1;
    if (hold_summary(state, values[METADATA_minblocks], names[METADATA_minblocks], bits_as, &call->smallest, &a->minblocks) < 0) return -1;
    if (hold_summary(state, values[METADATA_meanblocks], names[METADATA_meanblocks], bits_as, &call->mean, &a->meanblocks) < 0) return -1;
    if (arg_lengths(state, values[METADATA_start_lens], names[METADATA_start_lens], &call->begin) < 0) return -1;
    if (arg_expect_count(&call->begin, names[METADATA_start_lens], a->batch, "as many as seq_lens has") < 0) return -1;
    a->begin = call->begin.values;
    if (arg_kv_layout(values[METADATA_kv_layout], names[METADATA_kv_layout], &a->kv_layout) < 0) return -1;
    if (arg_threads(values[METADATA_num_threads], names[METADATA_num_threads], &a->num_threads) < 0) return -1;
    return check_metadata_disjoint(call);
}

TAKES(quest_metadata, METADATA_meanblocks, METADATA_ARGUMENTS(AS_TEXT));
PyObject *py_quest_metadata(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    SORT_ARGUMENTS(quest_metadata, METADATA_COUNT);
    metadata_call call = {0};
    ba_status status = BA_OK;
    int failed = read_metadata(PyModule_GetState(module), values, &call);
    if (failed == 0) {
        INTERRUPTIBLE(status, ba_quest_metadata(&call.args));
        failed = arg_check(status);
    }
    release_metadata(&call);
    return failed == 0 ? Py_NewRef(Py_None) : NULL;
}

/* ---- Selecting pages ----------------------------------------------------------------------------------------------- */

/* k is the width of a result that is made here. a and b are the arrays that the method scores. recent is one number, or one per request. */
/* clang-format off */
#define SELECT_ARGUMENTS(X) \
    X(empty) X(method) X(query) X(a) X(b) X(tables) X(seq_lens) X(k) X(block_size) X(per_query_head) X(sink) X(recent) \
    X(tokens_since_metadata_update) X(budget) X(ascending) X(kv_layout) X(selected_indices) X(return_counts) X(return_scores) X(dtype) X(num_threads)
/* clang-format on */
#define AS_SELECT_INDEX(name) SELECT_##name,
enum { SELECT_ARGUMENTS(AS_SELECT_INDEX) SELECT_COUNT };

typedef struct select_call {
    arg_array q, a, b, tables, selected, counts, scores;
    arg_list seq_lens, recent, since, budget;
    ba_select_args args;
} select_call;

static void release_select(select_call *call) {
    arg_array *const arrays[] = {&call->q, &call->a, &call->b, &call->tables, &call->selected, &call->counts, &call->scores};
    arg_list *const lists[] = {&call->seq_lens, &call->recent, &call->since, &call->budget};
    for (size_t i = 0; i < COUNT_OF(arrays); i++) arg_release(arrays[i]);
    for (size_t i = 0; i < COUNT_OF(lists); i++) PyMem_Free(lists[i]->values);
}

static int arg_method(PyObject *object, ba_select_method *value) {
    static const char *const texts[] = {[BA_SELECT_QUEST] = "quest", [BA_SELECT_MEAN] = "mean", [BA_SELECT_MAX] = "max"};
    const char *text;
    if (arg_text(object, "method", &text) < 0) return -1;
    for (size_t i = 0; i < COUNT_OF(texts); i++) {
        if (strcmp(text, texts[i]) != 0) continue;
        *value = (ba_select_method)i;
        return 0;
    }
    PyErr_Format(PyExc_ValueError, "method: expected 'quest', 'mean' or 'max', got %R", object);
    return -1;
}

/* Reads one number per request, or one number that holds for all requests. */
static int read_per_request(module_state *state, PyObject *object, const char *name, int64_t batch, arg_list *list) {
    const bool is_array =
        PySequence_Check(object) || PyObject_HasAttr(object, state->dlpack_method); /* arrays have __index__, too, so this decides */
    if (!PyIndex_Check(object) || is_array) {
        if (arg_lengths(state, object, name, list) < 0) return -1;
        return arg_expect_count(list, name, batch, "one per request");
    }
    int64_t value;
    if (arg_int64(object, name, &value) < 0) return -1;
    list->values = PyMem_Malloc((size_t)(batch + 1) * sizeof *list->values);
    if (list->values == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    list->count = (Py_ssize_t)batch;
    for (int64_t b = 0; b < batch; b++) list->values[b] = value;
    return 0;
}

/* Adds the window rule to `recent`: pages that were not complete when the summaries were last made have no valid summary, so they are always
 * selected. With -1 tokens since then, the rule is off. */
static int add_window(select_call *call) {
    const ba_select_args *a = &call->args;
    if (call->since.values != NULL && call->recent.values == NULL) {
        PyErr_SetString(PyExc_TypeError, "recent: expected an integer, or one per request, with tokens_since_metadata_update, got NoneType");
        return -1;
    }
    for (int64_t b = 0; call->since.values != NULL && b < a->batch; b++) {
        const int64_t since = call->since.values[b], tokens = a->seq_lens[b];
        if (since < -1) {
            PyErr_Format(PyExc_ValueError, "tokens_since_metadata_update: expected at least 0, or -1 for no window, got %lld", (long long)since);
            return -1;
        }
        if (since < 0 || tokens < 1 || a->page_size < 1) continue;
        const int64_t summarised = since < tokens ? (tokens - since) / a->page_size : 0, pages = (tokens - 1) / a->page_size + 1;
        if (call->recent.values[b] < pages - summarised) call->recent.values[b] = pages - summarised;
    }
    return 0;
}

/* Everything that is read before outputs exist. */
static int read_select(module_state *state, PyObject *const *values, select_call *call) {
    ba_select_args *a = &call->args;
    ba_dtype dtype;
    if (arg_method(values[SELECT_method], &a->method) < 0 || arg_dtype(values[SELECT_dtype], "dtype", ARG_FLOATS, &dtype) < 0) return -1;
    const bool quest = a->method == BA_SELECT_QUEST, tokens = a->method == BA_SELECT_MAX;
    const ba_dtype bits_as = arg_bits(dtype);
    if (arg_hold(state, values[SELECT_query], "query", ARG_FLOATS, bits_as, &call->q) < 0) return -1;
    a->q = call->q.tensor;
    if (arg_hold(state, values[SELECT_a], quest ? "maxblocks" : tokens ? "k_cache" : "meanblocks", ARG_FLOATS, bits_as, &call->a) < 0) return -1;
    a->a = call->a.tensor;
    if (quest && arg_hold(state, values[SELECT_b], "minblocks", ARG_FLOATS, bits_as, &call->b) < 0) return -1;
    a->b = call->b.tensor;
    if (arg_hold(state, values[SELECT_tables], tokens ? "block_tables" : "metadata_block_tables", ARG_TABLES, BA_UINT16, &call->tables) < 0)
        return -1;
    a->tables = call->tables.tensor;
    if (arg_lengths(state, values[SELECT_seq_lens], "seq_lens", &call->seq_lens) < 0) return -1;
    a->seq_lens = call->seq_lens.values;
    a->batch = call->seq_lens.count;
    if (arg_kv_layout(values[SELECT_kv_layout], "kv_layout", &a->kv_layout) < 0) return -1;
    a->page_size = a->a.ndim == 4 ? a->a.dims[tokens && a->kv_layout == BA_HND ? 2 : 1] : 1;
    if (values[SELECT_block_size] != Py_None && arg_int64(values[SELECT_block_size], "block_size", &a->page_size) < 0) return -1;
    if (arg_flag(values[SELECT_per_query_head], "per_query_head", &a->per_query_head) < 0) return -1;
    if (arg_flag(values[SELECT_ascending], "ascending", &a->ascending) < 0) return -1;
    if (arg_int64(values[SELECT_sink], "sink", &a->sink) < 0) return -1;
    if (read_per_request(state, values[SELECT_recent], "recent", a->batch, &call->recent) < 0) return -1;
    if (read_per_request(state, values[SELECT_tokens_since_metadata_update], "tokens_since_metadata_update", a->batch, &call->since) < 0) return -1;
    if (arg_lengths(state, values[SELECT_budget], "budget", &call->budget) < 0) return -1;
    if (arg_expect_count(&call->budget, "budget", a->batch, "one per request") < 0 || add_window(call) < 0) return -1;
    a->recent = call->recent.values;
    a->budget = call->budget.values;
    return arg_threads(values[SELECT_num_threads], "num_threads", &a->num_threads);
}

/* The number of rows of the result. Where the queries or the summaries have none, it is arbitrary, because the library refuses them. */
static int result_shape(const ba_select_args *a, PyObject *k, ba_tensor *shape) {
    int64_t width;
    if (arg_int64(k, "k", &width) < 0) return -1;
    if (width < 1 || width > INT32_MAX) {
        PyErr_Format(PyExc_ValueError, "k: expected 1 to 2147483647 blocks, got %lld", (long long)width);
        return -1;
    }
    const int64_t heads = a->q.ndim == 3 ? a->q.dims[1] : 0, kv_axis = a->method == BA_SELECT_MAX && a->kv_layout == BA_HND ? 1 : 2;
    const int64_t kv_heads = a->a.ndim == 4 ? a->a.dims[kv_axis] : 0;
    *shape = (ba_tensor){.dtype = BA_INT32, .ndim = 3, .dims = {a->batch, a->per_query_head ? heads : kv_heads, width}};
    return 0;
}

TAKES(select_blocks, SELECT_COUNT, SELECT_ARGUMENTS(AS_TEXT));
PyObject *py_select_blocks(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    SORT_ARGUMENTS(select_blocks, SELECT_COUNT);
    module_state *state = PyModule_GetState(module);
    select_call call = {0};
    ba_tensor shape = {0};
    ba_status status;
    int return_counts, return_scores;
    PyObject *selected = NULL, *counts = NULL, *scores = NULL, *result = NULL, *given = values[SELECT_selected_indices];

    if (arg_flag(values[SELECT_return_counts], "return_counts", &return_counts) < 0 ||
        arg_flag(values[SELECT_return_scores], "return_scores", &return_scores) < 0 || read_select(state, values, &call) < 0)
        goto done;
    if (given == Py_None && result_shape(&call.args, values[SELECT_k], &shape) < 0) goto done;
    selected = arg_hold_or_make_output(state, given, values[SELECT_empty], &shape, "selected_indices", ARG_TABLES, BA_UINT16, &call.selected);
    if (selected == NULL) goto done;
    call.args.selected = call.selected.tensor;
    if (return_counts) {
        shape = call.args.selected;
        shape.ndim = 2;
        counts = arg_hold_or_make_output(state, Py_None, values[SELECT_empty], &shape, "counts", ARG_TABLES, BA_UINT16, &call.counts);
        if (counts == NULL) goto done;
        call.args.counts = call.counts.tensor;
    }
    if (return_scores) {
        shape = call.args.selected;
        shape.dtype = BA_FLOAT32;
        scores = arg_hold_or_make_output(state, Py_None, values[SELECT_empty], &shape, "scores", ARG_LSE, BA_UINT16, &call.scores);
        if (scores == NULL) goto done;
        call.args.scores = call.scores.tensor;
    }
    const arg_array *const inputs[] = {&call.q, &call.a, &call.b, &call.tables};
    for (size_t i = 0; i < COUNT_OF(inputs); i++)
        if (arg_disjoint(&call.selected, inputs[i]) < 0) goto done;

    INTERRUPTIBLE(status, ba_select_blocks(&call.args));
    if (arg_check(status) < 0) goto done;
    if (return_counts && return_scores) result = PyTuple_Pack(3, selected, counts, scores);
    else result = return_counts || return_scores ? PyTuple_Pack(2, selected, return_counts ? counts : scores) : Py_NewRef(selected);
done:
    release_select(&call);
    Py_XDECREF(selected);
    Py_XDECREF(counts);
    Py_XDECREF(scores);
    return result;
}
