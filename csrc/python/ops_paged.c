/* Attention over paged caches, and writing into them. */
#include "python/call.h"

#include "ops/check.h"
#include "ops/kv_cache/append.h"
#include "ops/open/open.h"

/* ---- Requests: page tables and lengths ------------------------------------------------------------------------------ */

OPERATION(open_page_tables, ba_paged_args, OPEN_PAGE_TABLES, TABLES_COUNT, TABLES)

/* The arguments of a call's requests, counted from block_tables on. */
enum {
    REQUEST_seq_lens = TABLES_seq_lens - TABLES_block_tables,
    REQUEST_indptr = TABLES_indptr - TABLES_block_tables,
    REQUEST_last_page_len = TABLES_last_page_len - TABLES_block_tables,
    REQUEST_q_lens = TABLES_q_lens - TABLES_block_tables,
    REQUEST_q_begin = TABLES_q_begin - TABLES_block_tables
};

/* Opened tables are kept in a capsule, which closes them when it is freed. */
static const char *const capsule_name = "blitz_attn.page_tables";

static void close_capsule(PyObject *capsule) {
    ba_page_tables *tables = PyCapsule_GetPointer(capsule, capsule_name);
    ba_close_page_tables(tables);
    PyMem_Free(tables);
}

const ba_page_tables *page_tables_of(PyObject *object) {
    return PyCapsule_IsValid(object, capsule_name) ? PyCapsule_GetPointer(object, capsule_name) : NULL;
}

/* Computes the lengths from the numbers of pages and from last_page_len. Where indptr is invalid, the lengths are arbitrary, because the library
 * refuses indptr. */
static int lengths_from_pages(const arg_list *indptr, const arg_list *last_page_len, int64_t batch, int64_t page_size, arg_list *seq_lens) {
    seq_lens->values = PyMem_Calloc((size_t)batch + 1, sizeof(int64_t));
    if (seq_lens->values == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    seq_lens->count = (Py_ssize_t)batch;
    for (int64_t b = 0; b < batch; b++) {
        const int64_t first = indptr->values[b], end = indptr->values[b + 1], last = last_page_len->values[b];
        const bool empty = first < 0 || end <= first;
        if (last < !empty || last > page_size) {
            arg_fail(PyExc_ValueError, BA_ARG("last_page_len") ": expected 1 to the %lld tokens of a page, got %lld at [%lld]", (long long)page_size,
                     (long long)last, (long long)b);
            return -1;
        }
        int64_t *length = &seq_lens->values[b];
        if (!empty && (__builtin_mul_overflow(end - first - 1, page_size, length) || __builtin_add_overflow(*length, last, length)))
            *length = INT64_MAX;
    }
    return 0;
}

/* Reads the requests of a call without opened tables. The arguments of the requests begin with number `first`; call_read() has already read those of
 * them that have members. The C API takes lists as bare pointers, so the number of their entries is checked here; the library checks the entries. */
static int read_requests(py_call *call, int first, int64_t page_size, ba_paged_args *a) {
    const arg_list *const seq_lens = call_list(call, first + REQUEST_seq_lens), *const indptr = call_list(call, first + REQUEST_indptr);
    if (call_hold(call, call->values[first], "block_tables", ARG_TABLES, 0, &a->block_tables) < 0) return -1;
    if (call_read_list(call, first + REQUEST_last_page_len) < 0 || call_read_list(call, first + REQUEST_q_lens) < 0) return -1;
    const arg_list *const last_page_len = call_list(call, first + REQUEST_last_page_len), *const q_lens = call_list(call, first + REQUEST_q_lens);
    a->batch = seq_lens->count;
    if (indptr->values != NULL) {
        a->batch = indptr->count - 1;
        if (a->batch < 0) return arg_fail(PyExc_ValueError, BA_ARG("indptr") ": expected B + 1 entries, got 0");
        if (last_page_len->values == NULL || seq_lens->values != NULL)
            return arg_fail(PyExc_TypeError, BA_ARG("indptr") ": expected " BA_ARG("last_page_len") " and no " BA_ARG("seq_lens") " with it, got %s",
                            last_page_len->values == NULL ? "none" : "both");
        arg_list *const lengths = call_add_list(call, first + REQUEST_seq_lens);
        if (arg_expect_count(last_page_len, "last_page_len", a->batch, "one per request") < 0 ||
            lengths_from_pages(indptr, last_page_len, a->batch, page_size, lengths) < 0)
            return -1;
        a->seq_lens = lengths->values;
    }
    if (arg_expect_count(call_list(call, first + REQUEST_q_begin), "q_begin", a->batch, "one per request") < 0) return -1;
    if (q_lens->values == NULL) return 0;
    if (arg_expect_count(q_lens, "q_lens", a->batch, "one per request") < 0) return -1;
    a->cu_q = call_cumulative(call, q_lens);
    return a->cu_q == NULL ? -1 : 0;
}

/* Reads the number of tokens per KV split. None means that there are no KV splits; 0 is refused. */
static int read_split(PyObject *object, ba_paged_args *a) {
    if (object == Py_None) return 0;
    if (arg_int64(object, "kv_split", &a->kv_split) < 0) return -1;
    if (a->kv_split != 0) return 0;
    arg_fail(PyExc_ValueError, BA_ARG("kv_split") ": expected a positive multiple of the tokens of a page, got 0");
    return -1;
}

/* Reads page_size or num_pages, which must be at least `least`; `things` names what the number counts. */
static int read_count(py_call *call, int index, int64_t least, const char *things, int64_t *count) {
    const char *const name = call->operation->arguments[index].name;
    if (arg_int64(call->values[index], name, count) < 0) return -1;
    if (*count >= least) return 0;
    arg_fail(PyExc_ValueError, BA_ARG("%s") ": expected at least %lld %s, got %lld", name, (long long)least, things, (long long)*count);
    return -1;
}

/* Opens page tables, and returns them in a capsule. */
static PyObject *open_tables(py_call *call, ba_paged_args *a, int64_t *batch, int64_t *queries) {
    int64_t page_size, num_pages = -1;
    ba_status status;
    if (read_count(call, TABLES_page_size, 1, "token", &page_size) < 0) return NULL;
    if (call->values[TABLES_num_pages] != Py_None && read_count(call, TABLES_num_pages, 0, "pages", &num_pages) < 0) return NULL;
    if (call_read(call, false) < 0 || read_requests(call, TABLES_block_tables, page_size, a) < 0) return NULL;
    if (read_split(call->values[TABLES_kv_split], a) < 0) return NULL;
    ba_page_tables *const tables = PyMem_Calloc(1, sizeof *tables);
    if (tables == NULL) return PyErr_NoMemory();
    INTERRUPTIBLE(status, ba_open_page_tables(a, page_size, num_pages, -1, tables));
    PyObject *const capsule = arg_check(status) < 0 ? NULL : PyCapsule_New(tables, capsule_name, close_capsule);
    if (capsule != NULL) {
        *batch = tables->batch;
        *queries = tables->queries;
        return capsule;
    }
    ba_close_page_tables(tables);
    PyMem_Free(tables);
    return NULL;
}

PyObject *py_open_page_tables(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    BEGIN_CALL(open_page_tables, ba_paged_args, ba_paged_args_init());
    int64_t batch = 0, queries = 0;
    PyObject *const capsule = open_tables(&call, &a, &batch, &queries);
    Py_XDECREF(call_end(&call, capsule == NULL));
    return capsule == NULL ? NULL : Py_BuildValue("(NLL)", capsule, (long long)batch, (long long)queries);
}

TAKES(page_table_lengths, 1, {.name = "tables"});
PyObject *py_page_table_lengths(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    SORT_ARGUMENTS(page_table_lengths, 1);
    const ba_page_tables *tables = page_tables_of(values[0]);
    if (tables == NULL) {
        arg_fail_kind("tables", "opened page tables", values[0]);
        return NULL;
    }
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

OPERATION(paged_attention, ba_paged_args, PAGED_ATTENTION, PAGED_seq_lens, PAGED)

static int64_t page_tokens(const ba_paged_args *a) { return a->k_cache.ndim == 4 ? a->k_cache.dims[a->kv_layout == BA_NHD ? 1 : 2] : 1; }

/* Reads how many entries of each row of `selected` are in use. */
static int read_counts(py_call *call, ba_paged_args *a) {
    if (call->values[PAGED_counts] == Py_None) return 0;
    int64_t dims[2];
    if (arg_matrix(call->state, call->values[PAGED_counts], "counts", dims, &call->list[call->lists]) < 0) return -1;
    a->selected_counts = call->list[call->lists++].values;
    if (a->selected.ndim != 3 || (dims[0] == a->selected.dims[0] && dims[1] == a->selected.dims[1])) return 0;
    arg_fail(PyExc_ValueError, BA_ARG("counts") ": expected shape (%lld, %lld) like the rows of " BA_ARG("selected") ", got (%lld, %lld)",
             (long long)a->selected.dims[0], (long long)a->selected.dims[1], (long long)dims[0], (long long)dims[1]);
    return -1;
}

/* A mask of one axis holds for all queries, and has one element for each token. Unlike a mask of more axes, it must not be longer: a longer one may
 * be a flattened mask of queries and tokens, as other libraries take it, and only its first elements would be read. */
static int check_flat_mask(const ba_tensor *mask, const ba_problem *p) {
    if (mask->ndim != 1 || mask->dims[0] <= ba_max(1, p->kv_len)) return 0;
    arg_fail(
        PyExc_ValueError,
        BA_ARG("attn_mask") ": expected %lld tokens in a mask of one axis, or shape (%lld, 1, %lld, %lld), a matrix of queries and tokens for each "
                            "request, got (%lld,)",
        (long long)p->kv_len, (long long)p->batch, (long long)p->q_len, (long long)p->kv_len, (long long)mask->dims[0]);
    return -1;
}

static int open_paged(py_call *call, ba_paged_args *a, ba_attention *attention) {
    PyObject *const *const values = call->values;
    const ba_page_tables *const opened = page_tables_of(values[PAGED_block_tables]);
    ba_status status;
    int return_lse;
    if (call_spread(call, PAGED_rules) < 0 || arg_flag(values[PAGED_return_lse], "return_lse", &return_lse) < 0) return -1;
    if (call_read(call, false) < 0) return -1;
    if (opened == NULL && read_requests(call, PAGED_block_tables, page_tokens(a), a) < 0) return -1;
    if (read_split(values[PAGED_kv_split], a) < 0 || arg_out_dtype(values[PAGED_out_dtype], a->q.dtype, &a->unrounded) < 0) return -1;
    if (read_counts(call, a) < 0) return -1;
    if (a->q.ndim == 3 && call_read_each(call, a->q.dims[1], 0, "") < 0) return -1; /* the library refuses other q */
    if (opened != NULL) status = ba_open_paged(a, opened, attention);
    else INTERRUPTIBLE(status, ba_open_paged(a, NULL, attention)); /* page tables may be long, so checking them may take time */
    const arg_array *const mask = call_array(call, PAGED_attn_mask);
    if (arg_check(status) < 0 || check_flat_mask(&mask->tensor, &attention->problem) < 0) return -1;
    if (call_result(call, values[PAGED_out], &attention->out_shape, "out", ARG_FLOATS, &a->out) < 0) return -1;
    if (return_lse && call_result(call, values[PAGED_lse_out], &attention->lse_shape, "lse", ARG_REALS, &a->lse) < 0) return -1;
    return call_expect_disjoint(call) < 0 ? -1 : arg_check(ba_set_paged_outputs(a, attention));
}

PyObject *py_paged_attention(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    BEGIN_CALL(paged_attention, ba_paged_args, ba_paged_args_init());
    ba_attention attention = {.num_threads = 0};
    ba_status status;
    int failed = open_paged(&call, &a, &attention);
    if (!failed) {
        INTERRUPTIBLE(status, ba_run_attention(&attention));
        failed = arg_check(status);
    }
    ba_close_attention(&attention);
    return call_end(&call, failed);
}

/* ---- Writing ------------------------------------------------------------------------------------------------------- */

typedef struct quantise_args {
    ba_tensor x, values, scale;
} quantise_args;

OPERATION(quantize_kv, quantise_args, QUANTIZE_KV, QUANTISE_dtype, QUANTISE)

PyObject *py_quantize_kv(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    BEGIN_CALL(quantize_kv, quantise_args, {.x = {0}});
    ba_status status;
    int failed = call_read(&call, false) < 0 || call_expect_disjoint(&call) < 0;
    if (!failed) {
        INTERRUPTIBLE(status, ba_quantize_kv(&a.x, &a.values, &a.scale, 0));
        failed = arg_check(status);
    }
    return call_end(&call, failed);
}

typedef struct append_args {
    ba_tensor k, v;
    const int64_t *slots;
    ba_paged_args cache;
    ba_quest_metadata_args summaries;
} append_args;

OPERATION(append_paged_kv, append_args, APPEND_PAGED_KV, APPEND_block_tables, APPEND)

/* Scales per token are written, so their array must be writable. Other scales are only read. */
static int expect_writable_scale(const py_call *call, int index) {
    const arg_array *const scale = call_array(call, index);
    if (scale->tensor.ndim < 2 || !scale->read_only) return 0;
    arg_fail(PyExc_ValueError, BA_ARG("%s") ": expected a writable array, got a read-only one", scale->name);
    return -1;
}

/* Compares the pages of summaries with the pages of the requests, which opened tables or the caller's block_tables name. */
static int expect_apart(const append_args *a, const ba_page_tables *opened) {
    ba_quest_metadata_args summaries = a->summaries;
    summaries.k_cache = a->cache.k_cache;
    summaries.kv_layout = a->cache.kv_layout;
    summaries.block_tables = a->cache.block_tables;
    summaries.end = opened ? opened->seq_lens : a->cache.seq_lens;
    summaries.batch = opened ? opened->batch : a->cache.batch;
    return summaries.end ? call_expect_summary_pages(&summaries, opened) : 0; /* the library refuses requests without lengths */
}

static int read_append(py_call *call, append_args *a, const ba_page_tables *opened) {
    if (call_read(call, true) < 0) return -1;
    if (expect_writable_scale(call, APPEND_k_scale) < 0 || expect_writable_scale(call, APPEND_v_scale) < 0) return -1;
    if (a->slots != NULL) {
        const arg_list *const slots = call_list(call, APPEND_slot_mapping);
        if (arg_expect_count(slots, "slot_mapping", a->k.ndim > 0 ? a->k.dims[0] : 0, "one for each of " BA_ARG("k") "'s tokens") < 0) return -1;
    } else if (opened == NULL && read_requests(call, APPEND_block_tables, page_tokens(&a->cache), &a->cache) < 0) return -1;
    call->pages_by_token = a->cache.kv_layout == BA_NHD;
    if (call_expect_disjoint(call) < 0) return -1;
    return ba_given(&a->summaries.metadata_tables) ? expect_apart(a, opened) : 0;
}

PyObject *py_append_paged_kv(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    BEGIN_CALL(append_paged_kv, append_args, {.cache = ba_paged_args_init()});
    const ba_page_tables *const opened = call.values[APPEND_slot_mapping] == Py_None ? page_tables_of(call.values[APPEND_block_tables]) : NULL;
    ba_status status;
    int failed = read_append(&call, &a, opened);
    if (!failed) {
        const ba_tensor *const v = call.values[APPEND_v] != Py_None ? &a.v : NULL;
        INTERRUPTIBLE(status, ba_append(&a.k, v, a.slots, opened, &a.cache, ba_given(&a.summaries.metadata_tables) ? &a.summaries : NULL));
        failed = arg_check(status);
    }
    return call_end(&call, failed);
}
