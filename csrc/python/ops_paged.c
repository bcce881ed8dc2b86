/* Attention over paged caches, and writing into them. */
#include "python/ops.h"

#include <string.h>

#include "ops/kv_cache/append.h"
#include "ops/open/open.h"

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
        if (r->last_page_len.values == NULL || r->seq_lens.values != NULL) {
            PyErr_SetString(PyExc_TypeError, "indptr: expected last_page_len beside it, and no seq_lens");
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
    a->cu_q = r->cu_q = arg_cumulative(&r->q_lens);
    return r->cu_q == NULL ? -1 : 0;
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

/* Reads the number of tokens per chunk. None, and no number, means that requests are not cut into chunks. */
static int read_split(PyObject *object, ba_paged_args *a) {
    if (object == Py_None) return 0;
    if (arg_int64(object, "kv_split", &a->kv_split) < 0) return -1;
    if (a->kv_split != 0) return 0;
    PyErr_SetString(PyExc_ValueError, "kv_split: expected a positive multiple of the tokens of a page, got 0");
    return -1;
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

const ba_page_tables *page_tables_of(PyObject *object) {
    return PyCapsule_IsValid(object, plan_name) ? PyCapsule_GetPointer(object, plan_name) : NULL;
}

TAKES(open_page_tables, 9, "block_tables", "seq_lens", "indptr", "last_page_len", "q_lens", "q_begin", "page_size", "num_pages", "kv_split");
PyObject *py_open_page_tables(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    SORT_ARGUMENTS(open_page_tables, 9);
    module_state *state = PyModule_GetState(module);
    requests r = {0};
    ba_paged_args a = ba_paged_args_init();
    int64_t page_size, num_pages = -1;
    ba_page_tables *tables = NULL;
    PyObject *plan = NULL, *result = NULL;
    ba_status status;
    if (arg_int64(values[6], "page_size", &page_size) < 0) return NULL;
    if (page_size < 1) return PyErr_Format(PyExc_ValueError, "page_size: expected at least 1 token, got %lld", (long long)page_size);
    if (values[7] != Py_None && arg_int64(values[7], "num_pages", &num_pages) < 0) return NULL;
    if (values[7] != Py_None && num_pages < 0)
        return PyErr_Format(PyExc_ValueError, "num_pages: expected at least 0 pages, got %lld", (long long)num_pages);
    if (hold_tables(state, values[0], &r, &a) < 0 || read_requests(state, values, page_size, &r, &a) < 0 || read_split(values[8], &a) < 0) goto done;
    tables = PyMem_Calloc(1, sizeof *tables);
    if (tables == NULL) {
        PyErr_NoMemory();
        goto done;
    }
    INTERRUPTIBLE(status, ba_open_page_tables(&a, page_size, num_pages, -1, tables));
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

TAKES(page_table_lengths, 1, "tables");
PyObject *py_page_table_lengths(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    SORT_ARGUMENTS(page_table_lengths, 1);
    const ba_page_tables *tables = page_tables_of(values[0]);
    if (tables == NULL) return PyErr_Format(PyExc_TypeError, "tables: expected opened page tables, got something else");
    PyObject *const lists[] = {PyList_New((Py_ssize_t)tables->batch), PyList_New((Py_ssize_t)tables->batch)};
    bool made = lists[0] != NULL && lists[1] != NULL;
    for (int64_t b = 0; made && b < tables->batch; b++) {
        const int64_t numbers[] = {tables->seq_lens[b], tables->cu_q ? tables->cu_q[b + 1] - tables->cu_q[b] : 1};
        for (int i = 0; made && i < 2; i++) {
            PyObject *number = PyLong_FromLongLong(numbers[i]);
            made = number != NULL && PyList_SetItem(lists[i], (Py_ssize_t)b, number) == 0;
        }
    }
    PyObject *result = made ? PyTuple_Pack(2, lists[0], lists[1]) : NULL;
    Py_XDECREF(lists[0]);
    Py_XDECREF(lists[1]);
    return result;
}

/* ---- Attention ----------------------------------------------------------------------------------------------------- */

/* The arguments, in order; each gets an index and a name. block_tables may be opened page tables: then seq_lens, indptr,
 * last_page_len, q_lens, q_begin and kv_split are None. */
/* clang-format off */
#define PAGED_ARGUMENTS(X) \
    X(empty) X(q) X(k_cache) X(v_cache) X(block_tables) X(seq_lens) X(indptr) X(last_page_len) X(q_lens) X(q_begin) X(kv_split) X(selected) X(counts) \
    X(scale) X(kv_layout) X(window) X(sinks) X(softcap) X(k_scale) X(v_scale) X(return_lse) X(out) X(lse_out) X(dtype) X(kv_dtype) X(num_threads) \
    X(out_dtype) X(kv_ranges) X(attn_mask) X(alibi_slopes)
/* clang-format on */
#define AS_INDEX(name) PAGED_##name,
enum { PAGED_ARGUMENTS(AS_INDEX) PAGED_COUNT };

typedef struct paged_call {
    arg_array q, k_cache, v_cache, k_scale, v_scale, selected, kv_ranges, attn_mask, alibi_slopes, sinks, out, lse;
    arg_list counts;
    requests requests;
    const ba_page_tables *plan; /* opened tables; NULL: `requests` holds the call's own */
    ba_paged_args args;
} paged_call;

static void release_paged(paged_call *call) {
    arg_array *const arrays[] = {&call->q,         &call->k_cache,   &call->v_cache,      &call->k_scale, &call->v_scale, &call->selected,
                                 &call->kv_ranges, &call->attn_mask, &call->alibi_slopes, &call->sinks,   &call->out,     &call->lse};
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
    if (hold_optional(state, values[PAGED_selected], "selected", ARG_PAGES, BA_UINT16, &call->selected, &a->selected) < 0) return -1;
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
    if (arg_expect_dtype("q", a->q.dtype, "dtype", dtype) < 0 || arg_expect_dtype("k_cache", a->k_cache.dtype, "kv_dtype", kv_dtype) < 0) return -1;
    call->plan = page_tables_of(values[PAGED_block_tables]);
    if (call->plan == NULL && hold_tables(state, values[PAGED_block_tables], &call->requests, a) < 0) return -1;
    if (arg_kv_layout(values[PAGED_kv_layout], "kv_layout", &a->kv_layout) < 0) return -1;
    if (call->plan == NULL && read_requests(state, values + PAGED_block_tables, page_tokens(a), &call->requests, a) < 0) return -1;
    if (read_split(values[PAGED_kv_split], a) < 0) return -1;
    if (arg_out_dtype(values[PAGED_out_dtype], a->q.dtype, &a->unrounded) < 0) return -1;
    if (read_selected(state, values, call) < 0) return -1;
    if (hold_optional(state, values[PAGED_kv_ranges], "kv_ranges", ARG_TABLES, BA_UINT16, &call->kv_ranges, &a->kv_ranges) < 0) return -1;
    if (arg_mask(state, values[PAGED_attn_mask], "attn_mask", &call->attn_mask, &a->attn_mask) < 0) return -1;
    if (a->q.ndim == 3) { /* the library refuses other q */
        const int64_t heads = a->q.dims[1];
        if (arg_head_numbers(state, values[PAGED_sinks], "sinks", heads, &call->sinks, &a->sinks) < 0) return -1;
        if (arg_head_numbers(state, values[PAGED_alibi_slopes], "alibi_slopes", heads, &call->alibi_slopes, &a->alibi_slopes) < 0) return -1;
    }
    if (values[PAGED_window] != Py_None && arg_tokens_before(values[PAGED_window], "window", &a->window) < 0) return -1;
    if (values[PAGED_softcap] != Py_None && arg_double(values[PAGED_softcap], "softcap", &a->softcap) < 0) return -1;
    if (arg_threads(values[PAGED_num_threads], "num_threads", &a->num_threads) < 0) return -1;
    return arg_scale(values[PAGED_scale], "scale", &a->scale);
}

static int check_paged_disjoint(const paged_call *call) {
    const arg_array *const inputs[] = {
        &call->q,        &call->k_cache,   &call->v_cache, &call->k_scale,   &call->v_scale,     &call->requests.block_tables,
        &call->selected, &call->kv_ranges, &call->sinks,   &call->attn_mask, &call->alibi_slopes};
    for (size_t i = 0; i < COUNT_OF(inputs); i++)
        if (arg_disjoint(&call->out, inputs[i]) < 0 || arg_disjoint(&call->lse, inputs[i]) < 0) return -1;
    return arg_disjoint(&call->lse, &call->out);
}

/* A mask of one axis holds for all queries, and has one element for each token. A longer one is refused, as a longer one of more axes is not: it may
 * be the mask of all queries and tokens in one axis, as other libraries take it, of which only the first elements would be read. */
static int check_flat_mask(const ba_tensor *mask, const ba_problem *p) {
    if (mask->ndim != 1 || mask->dims[0] <= ba_max(1, p->kv_len)) return 0;
    PyErr_Format(PyExc_ValueError,
                 "attn_mask: expected %lld tokens in a mask of one axis, or shape (%lld, 1, %lld, %lld), a matrix of queries and tokens for each "
                 "request, got (%lld,)",
                 (long long)p->kv_len, (long long)p->batch, (long long)p->q_len, (long long)p->kv_len, (long long)mask->dims[0]);
    return -1;
}

TAKES(paged_attention, PAGED_seq_lens, PAGED_ARGUMENTS(AS_TEXT));
PyObject *py_paged_attention(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    SORT_ARGUMENTS(paged_attention, PAGED_COUNT);
    module_state *state = PyModule_GetState(module);
    paged_call call = {.args = ba_paged_args_init()};
    ba_attention attention = {.num_threads = 0};
    ba_dtype bits_as;
    int return_lse;
    ba_status status;
    PyObject *out = NULL, *lse = NULL, *result = NULL;

    if (arg_flag(values[PAGED_return_lse], "return_lse", &return_lse) < 0 || read_paged(state, values, &call, &bits_as) < 0) goto done;
    if (call.plan != NULL) status = ba_open_paged(&call.args, call.plan, &attention);
    else INTERRUPTIBLE(status, ba_open_paged(&call.args, NULL, &attention)); /* page tables may be long, so checking them may take time */
    if (arg_check_masked(status, &call.attn_mask) < 0 || check_flat_mask(&call.attn_mask.tensor, &attention.problem) < 0) goto done;

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

/* The arguments, in order; each gets an index and a name. The slot of each token comes from slot_mapping. Where slot_mapping is None, it comes from
 * block_tables if these are opened page tables, and otherwise from block_tables, seq_lens, indptr, last_page_len and q_lens. q_begin is always None:
 * it stands here because read_requests() takes it. */
/* clang-format off */
#define APPEND_ARGUMENTS(X) \
    X(k) X(v) X(k_cache) X(v_cache) X(slot_mapping) X(block_tables) X(seq_lens) X(indptr) X(last_page_len) X(q_lens) X(q_begin) X(kv_layout) X(k_scale) \
    X(v_scale) X(dtype) X(kv_dtype) X(num_threads)
/* clang-format on */
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
    if (arg_expect_dtype("k_cache", call->k_cache.tensor.dtype, "kv_dtype", kv_dtype) < 0) return -1;
    if (hold_scale(state, values[APPEND_k_scale], "k_scale", &call->k_scale, &a->k_scale) < 0) return -1;
    if (hold_scale(state, values[APPEND_v_scale], "v_scale", &call->v_scale, &a->v_scale) < 0) return -1;
    a->k_cache = call->k_cache.tensor;
    a->v_cache = call->v_cache.tensor;
    if (arg_kv_layout(values[APPEND_kv_layout], "kv_layout", &a->kv_layout) < 0) return -1;
    if (arg_threads(values[APPEND_num_threads], "num_threads", &a->num_threads) < 0) return -1;
    if (arg_lengths(state, values[APPEND_slot_mapping], "slot_mapping", &call->slots) < 0) return -1;
    if (call->slots.values != NULL)
        return arg_expect_count(&call->slots, "slot_mapping", call->k.tensor.ndim > 0 ? call->k.tensor.dims[0] : 0, "one for each of k's tokens");
    call->plan = page_tables_of(values[APPEND_block_tables]);
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
    append_call call = {.args = ba_paged_args_init()};
    const ba_tensor *v;
    ba_status status;
    PyObject *result = NULL;

    if (read_append(PyModule_GetState(module), values, &call) < 0 || check_append_disjoint(&call) < 0) goto done;
    v = values[APPEND_v] != Py_None ? &call.v.tensor : NULL;
    if (call.plan != NULL) INTERRUPTIBLE(status, ba_append_by_plan(&call.k.tensor, v, call.plan, &call.args));
    else INTERRUPTIBLE(status, ba_append_kv(&call.k.tensor, v, call.slots.values, &call.args));
    if (arg_check(status) == 0) result = Py_NewRef(Py_None);
done:
    release_append(&call);
    return result;
}
