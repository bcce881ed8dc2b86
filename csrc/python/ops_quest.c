/* Summaries of the pages of a cache, and the selection of pages. */
#include "python/ops.h"

#include <string.h>

#include "ops/check.h"
#include "ops/kv_cache/summarise_pages.h"
#include "ops/select/select_pages.h"

/* ---- Summaries of pages -------------------------------------------------------------------------------------------- */

typedef struct metadata_call {
    arg_array k_cache, k_scale, block_tables, metadata_tables, largest, smallest, mean;
    arg_list begin, end;
    const ba_page_tables *plan; /* opened tables, or NULL */
    ba_quest_metadata_args args;
} metadata_call;

static void release_metadata(metadata_call *call) {
    arg_array *const arrays[] = {&call->k_cache, &call->k_scale,  &call->block_tables, &call->metadata_tables,
                                 &call->largest, &call->smallest, &call->mean};
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
    bool same = a->data == b->data && a->dtype == b->dtype && ba_same_shape(a, b);
    for (int i = 0; same && i < a->ndim; i++) same = a->strides[i] == b->strides[i];
    return same;
}

/* Marks the pages that a table uses with `mark`. Stops at a page that already has a mark of `taken`: returns -1 and sets *page to its number. Skips
 * numbers out of range, which the library refuses. */
static int mark_pages(uint8_t *marks, int64_t count, const ba_tensor *table, const ba_quest_metadata_args *a, int64_t page_size, uint8_t mark,
                      uint8_t taken, int64_t *page) {
    if (table->ndim != 2 || table->dims[0] != a->batch) return 0;
    for (int64_t b = 0; b < table->dims[0]; b++) {
        const int64_t length = a->end[b] < INT32_MAX ? a->end[b] : INT32_MAX; /* the library refuses such long requests */
        for (int64_t i = 0; i < table->dims[1] && i <= (length - 1) / page_size && length > 0; i++) {
            *page = table_entry(table, b, i);
            if (*page < 0 || *page >= count) continue;
            if (marks[*page] & taken) return -1;
            marks[*page] |= mark;
        }
    }
    return 0;
}

/* The same with the pages of opened tables, all of which are in use. */
static void mark_opened(uint8_t *marks, int64_t count, const ba_page_tables *tables, uint8_t mark) {
    for (int64_t i = 0; i < tables->first[tables->batch]; i++)
        if (tables->page[i] >= 0 && tables->page[i] < count) marks[tables->page[i]] |= mark;
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
    if (pool && call->plan) mark_opened(marks, count, call->plan, 1);
    else if (pool) mark_pages(marks, count, &a->block_tables, a, size, 1, 0, &page);
    const int status = mark_pages(marks, count, &a->metadata_tables, a, size * rows, 2, 1 | 2, &page);
    if (status < 0)
        PyErr_Format(PyExc_ValueError, "metadata_block_tables: expected pages that nothing else uses, got %lld, which %s", (long long)page,
                     marks[page] & 1 ? "holds keys" : "is listed twice");
    PyMem_Free(marks);
    return status;
}

static int check_metadata_disjoint(const metadata_call *call) {
    const arg_array *const outputs[] = {&call->largest, &call->smallest, &call->mean};
    for (size_t i = 0; i < COUNT_OF(outputs); i++) {
        if (arg_disjoint(outputs[i], &call->block_tables) < 0 || arg_disjoint(outputs[i], &call->metadata_tables) < 0 ||
            arg_disjoint(outputs[i], &call->k_scale) < 0)
            return -1;
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

/* Opened tables in the place of block_tables have the lengths, too: seq_lens is then None. */
/* clang-format off */
#define METADATA_ARGUMENTS(X) \
    X(k_cache) X(block_tables) X(seq_lens) X(metadata_block_tables) X(maxblocks) X(minblocks) X(meanblocks) X(start_lens) X(kv_layout) X(dtype) \
    X(num_threads) X(k_scale)
/* clang-format on */
#define AS_METADATA_INDEX(name) METADATA_##name,
enum { METADATA_ARGUMENTS(AS_METADATA_INDEX) METADATA_COUNT };

static int read_metadata(module_state *state, PyObject *const *values, metadata_call *call) {
    ba_quest_metadata_args *a = &call->args;
    const char *const *names = arguments_quest_metadata.names;
    ba_dtype dtype;
    if (arg_dtype(values[METADATA_dtype], "dtype", ARG_CACHE, &dtype) < 0) return -1;
    const ba_dtype cache_bits_as = arg_bits(dtype), bits_as = cache_bits_as == BA_BFLOAT16 ? BA_BFLOAT16 : BA_UINT16;
    if (arg_hold(state, values[METADATA_k_cache], names[METADATA_k_cache], ARG_CACHE, cache_bits_as, &call->k_cache) < 0) return -1;
    a->k_cache = call->k_cache.tensor;
    if (arg_expect_dtype("k_cache", a->k_cache.dtype, "dtype", dtype) < 0) return -1;
    if (values[METADATA_k_scale] != Py_None) {
        if (arg_hold(state, values[METADATA_k_scale], names[METADATA_k_scale], ARG_SCALES, BA_UINT16, &call->k_scale) < 0) return -1;
        a->k_scale = call->k_scale.tensor;
    }
    call->plan = page_tables_of(values[METADATA_block_tables]);
    if (call->plan != NULL) {
        a->end = call->plan->seq_lens;
        a->batch = call->plan->batch;
    } else {
        if (arg_hold(state, values[METADATA_block_tables], names[METADATA_block_tables], ARG_TABLES, BA_UINT16, &call->block_tables) < 0) return -1;
        a->block_tables = call->block_tables.tensor;
        if (arg_lengths(state, values[METADATA_seq_lens], names[METADATA_seq_lens], &call->end) < 0) return -1;
        a->end = call->end.values;
        a->batch = call->end.count;
    }
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
        INTERRUPTIBLE(status, call.plan ? ba_quest_metadata_by_plan(&call.args, call.plan) : ba_quest_metadata(&call.args));
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
    X(tokens_since_metadata_update) X(q_lens) X(budget) X(ascending) X(kv_layout) X(selected_indices) X(return_counts) X(return_scores) X(dtype) \
    X(num_threads) X(k_scale) X(kv_dtype)
/* clang-format on */
#define AS_SELECT_INDEX(name) SELECT_##name,
enum { SELECT_ARGUMENTS(AS_SELECT_INDEX) SELECT_COUNT };

typedef struct select_call {
    arg_array q, a, b, k_scale, tables, selected, counts, scores;
    arg_list seq_lens, q_lens, recent, since, budget;
    int64_t *cu_q;
    const ba_page_tables *plan; /* opened tables, or NULL */
    ba_select_args args;
} select_call;

static void release_select(select_call *call) {
    arg_array *const arrays[] = {&call->q, &call->a, &call->b, &call->k_scale, &call->tables, &call->selected, &call->counts, &call->scores};
    arg_list *const lists[] = {&call->seq_lens, &call->q_lens, &call->recent, &call->since, &call->budget};
    for (size_t i = 0; i < COUNT_OF(arrays); i++) arg_release(arrays[i]);
    for (size_t i = 0; i < COUNT_OF(lists); i++) PyMem_Free(lists[i]->values);
    PyMem_Free(call->cu_q);
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

/* With several queries per request, `recent` counts from the page of each query's own token. Together these are the newest pages, from `recent` - 1
 * before the page of the first query on. */
static void add_queries(select_call *call) {
    const ba_select_args *a = &call->args;
    for (int64_t b = 0; a->cu_q != NULL && call->recent.values != NULL && b < a->batch; b++) {
        const int64_t tokens = a->seq_lens[b];
        int64_t queries;
        if (__builtin_sub_overflow(a->cu_q[b + 1], a->cu_q[b], &queries) || queries < 1 || queries > tokens || a->page_size < 1 ||
            call->recent.values[b] < 1 || call->recent.values[b] > tokens)
            continue;
        call->recent.values[b] += (tokens - 1) / a->page_size - (tokens - queries) / a->page_size;
    }
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

/* Reads tables, lengths and numbers of queries, or takes all but the tables of summaries from opened tables, which stand in the place of seq_lens. */
static int read_select_requests(module_state *state, PyObject *const *values, select_call *call, bool tokens) {
    ba_select_args *a = &call->args;
    call->plan = page_tables_of(values[SELECT_seq_lens]);
    if (call->plan == NULL || !tokens) {
        if (arg_hold(state, values[SELECT_tables], tokens ? "block_tables" : "metadata_block_tables", ARG_TABLES, BA_UINT16, &call->tables) < 0)
            return -1;
        a->tables = call->tables.tensor;
    }
    if (call->plan != NULL) {
        a->seq_lens = call->plan->seq_lens;
        a->cu_q = call->plan->cu_q;
        a->batch = call->plan->batch;
        return 0;
    }
    if (arg_lengths(state, values[SELECT_seq_lens], "seq_lens", &call->seq_lens) < 0) return -1;
    a->seq_lens = call->seq_lens.values;
    a->batch = call->seq_lens.count;
    if (arg_lengths(state, values[SELECT_q_lens], "q_lens", &call->q_lens) < 0) return -1;
    if (arg_expect_count(&call->q_lens, "q_lens", a->batch, "one per request") < 0) return -1;
    if (call->q_lens.values != NULL) a->cu_q = call->cu_q = arg_cumulative(&call->q_lens);
    return call->q_lens.values != NULL && a->cu_q == NULL ? -1 : 0;
}

/* Everything that is read before outputs exist. */
static int read_select(module_state *state, PyObject *const *values, select_call *call) {
    ba_select_args *a = &call->args;
    ba_dtype dtype, kv_dtype;
    if (arg_method(values[SELECT_method], &a->method) < 0 || arg_dtype(values[SELECT_dtype], "dtype", ARG_FLOATS, &dtype) < 0) return -1;
    if (arg_dtype(values[SELECT_kv_dtype], "kv_dtype", ARG_CACHE, &kv_dtype) < 0) return -1;
    const bool quest = a->method == BA_SELECT_QUEST, tokens = a->method == BA_SELECT_MAX;
    const ba_dtype bits_as = arg_bits(dtype), a_bits_as = kv_dtype == BA_DTYPE_COUNT ? bits_as : arg_bits(kv_dtype);
    const char *const a_name = quest ? "maxblocks" : tokens ? "k_cache" : "meanblocks";
    if (arg_hold(state, values[SELECT_query], "query", ARG_FLOATS, bits_as, &call->q) < 0) return -1;
    a->q = call->q.tensor;
    if (arg_hold(state, values[SELECT_a], a_name, tokens ? ARG_CACHE : ARG_FLOATS, a_bits_as, &call->a) < 0) return -1;
    a->a = call->a.tensor;
    if (arg_expect_dtype(a_name, a->a.dtype, "kv_dtype", kv_dtype) < 0) return -1;
    if (values[SELECT_k_scale] != Py_None) {
        if (arg_hold(state, values[SELECT_k_scale], "k_scale", ARG_SCALES, BA_UINT16, &call->k_scale) < 0) return -1;
        a->k_scale = call->k_scale.tensor;
    }
    if (quest && arg_hold(state, values[SELECT_b], "minblocks", ARG_FLOATS, a_bits_as, &call->b) < 0) return -1;
    a->b = call->b.tensor;
    if (read_select_requests(state, values, call, tokens) < 0) return -1;
    if (arg_kv_layout(values[SELECT_kv_layout], "kv_layout", &a->kv_layout) < 0) return -1;
    a->page_size = a->a.ndim == 4 ? a->a.dims[tokens && a->kv_layout == BA_HND ? 2 : 1] : 1;
    if (call->plan != NULL) a->page_size = call->plan->page_size;
    else if (values[SELECT_block_size] != Py_None && arg_int64(values[SELECT_block_size], "block_size", &a->page_size) < 0) return -1;
    if (arg_flag(values[SELECT_per_query_head], "per_query_head", &a->per_query_head) < 0) return -1;
    if (arg_flag(values[SELECT_ascending], "ascending", &a->ascending) < 0) return -1;
    if (arg_int64(values[SELECT_sink], "sink", &a->sink) < 0) return -1;
    PyObject *const recent = values[SELECT_recent], *const since = values[SELECT_tokens_since_metadata_update];
    if (arg_numbers(state, recent, "recent", a->batch, "one per request", &call->recent) < 0) return -1;
    if (arg_numbers(state, since, "tokens_since_metadata_update", a->batch, "one per request", &call->since) < 0) return -1;
    add_queries(call);
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

TAKES(select_blocks, SELECT_k_scale, SELECT_ARGUMENTS(AS_TEXT));
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
    const arg_array *const inputs[] = {&call.q, &call.a, &call.b, &call.k_scale, &call.tables};
    for (size_t i = 0; i < COUNT_OF(inputs); i++)
        if (arg_disjoint(&call.selected, inputs[i]) < 0) goto done;

    INTERRUPTIBLE(status, call.plan ? ba_select_by_plan(&call.args, call.plan) : ba_select_blocks(&call.args));
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
