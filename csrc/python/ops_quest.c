/* Summaries of the pages of a cache, and the selection of pages. */
#include "python/call.h"

#include <string.h>

#include "ops/check.h"
#include "ops/select/select_pages.h"

/* ---- Summaries of pages -------------------------------------------------------------------------------------------- */

OPERATION(quest_metadata, ba_quest_metadata_args, QUEST_METADATA, METADATA_meanblocks, METADATA)

static int read_metadata(py_call *call, ba_quest_metadata_args *a) {
    if (call_read(call, true) < 0) return -1;
    if (call_hold(call, call->values[METADATA_block_tables], "block_tables", ARG_TABLES, 0, &a->block_tables) < 0) return -1;
    a->batch = call_list(call, METADATA_seq_lens)->count;
    if (arg_expect_count(call_list(call, METADATA_start_lens), "start_lens", a->batch, "as many as " BA_ARG("seq_lens") " has") < 0) return -1;
    call->pages_by_token = a->kv_layout == BA_NHD;
    return call_expect_disjoint(call) < 0 ? -1 : call_expect_summary_pages(a, NULL);
}

PyObject *py_quest_metadata(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    BEGIN_CALL(quest_metadata, ba_quest_metadata_args, {.batch = 0});
    ba_status status;
    int failed = read_metadata(&call, &a);
    if (!failed) {
        INTERRUPTIBLE(status, ba_quest_metadata(&a));
        failed = arg_check(status);
    }
    return call_end(&call, failed);
}

/* ---- Selecting pages ----------------------------------------------------------------------------------------------- */

OPERATION(select_blocks, ba_select_args, SELECT_BLOCKS, SELECT_k_scale, SELECT)

static int arg_method(PyObject *object, ba_select_method *value) {
    static const char *const texts[] = {[BA_SELECT_QUEST] = "quest", [BA_SELECT_MEAN] = "mean", [BA_SELECT_MAX] = "max"};
    const char *text;
    if (arg_text(object, "method", &text) < 0) return -1;
    for (size_t i = 0; i < COUNT_OF(texts); i++) {
        if (strcmp(text, texts[i]) != 0) continue;
        *value = (ba_select_method)i;
        return 0;
    }
    arg_fail(PyExc_ValueError, BA_ARG("method") ": expected 'quest', 'mean' or 'max', got %R", object);
    return -1;
}

/* With several queries per request, `recent` counts back from the page of each query's own token. Together, the recent pages of all queries are the
 * newest pages, beginning `recent` - 1 pages before the page of the first query. */
static void add_queries(const ba_select_args *a, int64_t *recent) {
    for (int64_t b = 0; a->cu_q != NULL && recent != NULL && b < a->batch; b++) {
        const int64_t tokens = a->seq_lens[b];
        int64_t queries;
        if (__builtin_sub_overflow(a->cu_q[b + 1], a->cu_q[b], &queries) || queries < 1 || queries > tokens || a->page_size < 1 || recent[b] < 1 ||
            recent[b] > tokens)
            continue;
        recent[b] += (tokens - 1) / a->page_size - (tokens - queries) / a->page_size;
    }
}

/* Raises `recent` by the window rule: pages that were not complete when the summaries were last made have no valid summary, so they are always
 * selected. tokens_since[b] counts the tokens since then; -1 turns the rule off. */
static int add_window(const ba_select_args *a, const int64_t *tokens_since, int64_t *recent) {
    if (tokens_since != NULL && recent == NULL) {
        arg_fail(PyExc_TypeError,
                 BA_ARG("recent") ": expected an integer, or one per request, with " BA_ARG("tokens_since_metadata_update") ", got NoneType");
        return -1;
    }
    for (int64_t b = 0; tokens_since != NULL && b < a->batch; b++) {
        const int64_t since = tokens_since[b], tokens = a->seq_lens[b];
        if (since < -1) {
            arg_fail(PyExc_ValueError, BA_ARG("tokens_since_metadata_update") ": expected at least 0, or -1 for no window, got %lld",
                     (long long)since);
            return -1;
        }
        if (since < 0 || tokens < 1 || a->page_size < 1) continue;
        const int64_t summarised = since < tokens ? (tokens - since) / a->page_size : 0, pages = (tokens - 1) / a->page_size + 1;
        if (recent[b] < pages - summarised) recent[b] = pages - summarised;
    }
    return 0;
}

/* Reads tables, lengths and numbers of queries. Where the caller gave opened tables as seq_lens, only tables of summaries are read, and all else
 * comes from the opened tables. */
static int read_select_requests(py_call *call, ba_select_args *a, const ba_page_tables *opened, bool tokens) {
    const char *const name = tokens ? "block_tables" : "metadata_block_tables";
    if ((opened == NULL || !tokens) && call_hold(call, call->values[SELECT_tables], name, ARG_TABLES, 0, &a->tables) < 0) return -1;
    if (opened != NULL) {
        a->seq_lens = opened->seq_lens;
        a->cu_q = opened->cu_q;
        a->batch = opened->batch;
        return 0;
    }
    if (call_read_list(call, SELECT_seq_lens) < 0 || call_read_list(call, SELECT_q_lens) < 0) return -1;
    const arg_list *const seq_lens = call_list(call, SELECT_seq_lens), *const q_lens = call_list(call, SELECT_q_lens);
    a->seq_lens = seq_lens->values;
    a->batch = seq_lens->count;
    if (arg_expect_count(q_lens, "q_lens", a->batch, "one per request") < 0) return -1;
    if (q_lens->values != NULL) a->cu_q = call_cumulative(call, q_lens);
    return q_lens->values != NULL && a->cu_q == NULL ? -1 : 0;
}

/* Holds the arrays that the method scores. */
static int read_scored(py_call *call, ba_select_args *a) {
    const bool quest = a->method == BA_SELECT_QUEST, tokens = a->method == BA_SELECT_MAX;
    const char *const name = quest ? "maxblocks" : tokens ? "k_cache" : "meanblocks";
    const ba_dtype bits = call->bits;
    call->bits = call->kv_bits; /* summaries are read as kv_dtype says */
    int failed = call_hold(call, call->values[SELECT_a], name, tokens ? ARG_CACHE : ARG_FLOATS, 0, &a->a) < 0 ||
                 arg_expect_dtype(name, a->a.dtype, "kv_dtype", call->kv_dtype) < 0 ||
                 (quest && call_hold(call, call->values[SELECT_b], "minblocks", ARG_FLOATS, 0, &a->b) < 0);
    call->bits = bits;
    return failed ? -1 : 0;
}

/* Reads all arguments except those of the results. */
static int read_select(py_call *call, ba_select_args *a, const ba_page_tables *opened) {
    PyObject *const *const values = call->values;
    if (arg_method(values[SELECT_method], &a->method) < 0 || call_read(call, false) < 0 || read_scored(call, a) < 0) return -1;
    const bool tokens = a->method == BA_SELECT_MAX;
    if (read_select_requests(call, a, opened, tokens) < 0) return -1;
    a->page_size = a->a.ndim == 4 ? a->a.dims[tokens && a->kv_layout == BA_HND ? 2 : 1] : 1;
    if (opened != NULL) a->page_size = opened->page_size;
    else if (values[SELECT_block_size] != Py_None && arg_int64(values[SELECT_block_size], "block_size", &a->page_size) < 0) return -1;
    if (call_read_each(call, 0, a->batch, "one per request") < 0) return -1;
    int64_t *const recent = call_list(call, SELECT_recent)->values, *const since = call_list(call, SELECT_tokens_since_metadata_update)->values;
    add_queries(a, recent);
    if (arg_expect_count(call_list(call, SELECT_budget), "budget", a->batch, "one per request") < 0) return -1;
    return add_window(a, since, recent);
}

/* The shape of the result. Where q or `a` has a wrong number of axes, the number of heads may be 0, because the library then refuses the call. */
static int result_shape(const ba_select_args *a, PyObject *k, ba_tensor *shape) {
    int64_t width;
    if (arg_int64(k, "k", &width) < 0) return -1;
    if (width < 1 || width > INT32_MAX) {
        arg_fail(PyExc_ValueError, BA_ARG("k") ": expected 1 to 2147483647 blocks, got %lld", (long long)width);
        return -1;
    }
    const int64_t heads = a->q.ndim == 3 ? a->q.dims[1] : 0, kv_axis = a->method == BA_SELECT_MAX && a->kv_layout == BA_HND ? 1 : 2;
    const int64_t kv_heads = a->a.ndim == 4 ? a->a.dims[kv_axis] : 0;
    *shape = (ba_tensor){.dtype = BA_INT32, .ndim = 3, .dims = {a->batch, a->per_query_head ? heads : kv_heads, width}};
    return 0;
}

/* Holds or makes the results. Where the caller gives selected_indices, k is not read. */
static int make_results(py_call *call, ba_select_args *a, bool return_counts, bool return_scores) {
    PyObject *const given = call->values[SELECT_selected_indices];
    ba_tensor shape = {0};
    if (given == Py_None && result_shape(a, call->values[SELECT_k], &shape) < 0) return -1;
    if (call_result(call, given, &shape, "selected_indices", ARG_TABLES, &a->selected) < 0) return -1;
    shape = a->selected;
    shape.ndim = 2;
    if (return_counts && call_result(call, Py_None, &shape, "counts", ARG_TABLES, &a->counts) < 0) return -1;
    shape = a->selected;
    shape.dtype = BA_FLOAT32;
    if (return_scores && call_result(call, Py_None, &shape, "scores", ARG_REALS, &a->scores) < 0) return -1;
    return call_expect_disjoint(call);
}

PyObject *py_select_blocks(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    BEGIN_CALL(select_blocks, ba_select_args, {.batch = 0});
    const ba_page_tables *const opened = page_tables_of(call.values[SELECT_seq_lens]);
    int return_counts, return_scores;
    ba_status status;
    int failed = arg_flag(call.values[SELECT_return_counts], "return_counts", &return_counts) < 0 ||
                 arg_flag(call.values[SELECT_return_scores], "return_scores", &return_scores) < 0 || read_select(&call, &a, opened) < 0 ||
                 make_results(&call, &a, return_counts, return_scores) < 0;
    if (!failed) {
        INTERRUPTIBLE(status, opened ? ba_select_by_tables(&a, opened) : ba_select_blocks(&a));
        failed = arg_check(status);
    }
    return call_end(&call, failed);
}
