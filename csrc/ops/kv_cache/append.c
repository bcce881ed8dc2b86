/* Writes new tokens into a paged cache. */
#include "ops/kv_cache/append.h"

#include <inttypes.h>
#include <stdlib.h>

#include "core/faults.h"
#include "core/float_mode.h"
#include "core/pool.h"
#include "core/status.h"
#include "ops/check.h"
#include "ops/kv_cache/kv_cache.h"
#include "ops/kv_cache/store_rows.h"
#include "ops/kv_cache/summarise_pages.h"

/* ---- Arrays that are written share no memory ------------------------------------------------------------------------ */

/* One array of the caches as an array of bytes, of shape (pages, tokens of a page, heads, bytes of a row). */
static ba_tensor bytes_of(const ba_caches *c, const ba_view *v, int64_t element, int64_t numbers) {
    return (ba_tensor){.data = v->data,
                       .dtype = BA_INT8,
                       .ndim = 4,
                       .dims = {c->pages, c->page_size, c->heads, numbers * element},
                       .strides = {v->batch_stride * element, v->token_stride * element, v->head_stride * element, 1}};
}

/* Checks that the arrays that are written share no memory with each other, nor with scales that are read. */
static ba_status check_apart(const ba_caches *c, const ba_store_call *call) {
    static const char *const names[] = {"k_cache", "v_cache", "k_scale", "v_scale"};
    const int64_t element = ba_dtype_size(c->dtype), real = (int64_t)sizeof(float);
    const ba_tensor all[] = {bytes_of(c, &c->k, element, c->k_width), bytes_of(c, &c->v, element, c->v_width), bytes_of(c, &c->k_scale, real, 1),
                             bytes_of(c, &c->v_scale, real, 1)};
    const bool v = call->arrays == 2, k_fixed = call->rows[0].scale_is_fixed, v_fixed = call->rows[1].scale_is_fixed;
    const bool given[] = {true, v, c->k_scale.data != NULL, v && c->v_scale.data != NULL}, fixed[] = {false, false, k_fixed, v_fixed};
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < i; j++)
            if (given[i] && given[j] && !(fixed[i] && fixed[j]) && !ba_are_apart(&all[i], &all[j]))
                return ba_fail(BA_ERROR_VALUE, BA_ARG("%s") ": expected memory of its own, got an array that overlaps " BA_ARG("%s"), names[i],
                               names[j]);
    return BA_OK;
}

/* ---- Slots ---------------------------------------------------------------------------------------------------------- */

/* The number of new tokens of a request. */
static int64_t new_tokens(const ba_page_tables *t, int64_t request) { return t->cu_q ? t->cu_q[request + 1] - t->cu_q[request] : 1; }

/* Writes the slot of each new token. The new tokens are the last of their requests. */
static ba_status slots_by_tables(const ba_page_tables *t, bool reused, const ba_caches *c, int64_t tokens, int64_t *slots) {
    int64_t n = 0;
    if (reused && t->queries != tokens)
        return ba_fail(BA_ERROR_VALUE, BA_ARG("k") ": expected %" PRId64 " tokens as the plan has them, got %" PRId64, t->queries, tokens);
    if (t->page_size != c->page_size)
        return ba_fail(BA_ERROR_VALUE, BA_ARG("k_cache") ": expected pages of %" PRId64 " tokens as the plan has them, got pages of %" PRId64,
                       t->page_size, c->page_size);
    if (t->q_begin)
        return ba_fail(BA_ERROR_VALUE,
                       BA_ARG("q_begin") ": expected none, since the tokens that are written are the last ones of their requests, got some");
    if (t->queries != tokens && t->cu_q)
        return ba_fail(BA_ERROR_VALUE, BA_ARG("q_lens") ": expected lengths that add up to " BA_ARG("k") "'s %" PRId64 " tokens, got %" PRId64,
                       tokens, t->queries);
    if (t->queries != tokens)
        return ba_fail(BA_ERROR_VALUE,
                       BA_ARG("q_lens") ": expected lengths that add up to " BA_ARG("k") "'s %" PRId64
                                                                                         " tokens, got none, which means 1 for each of %" PRId64
                                                                                         " requests",
                       tokens, t->queries);
    for (int64_t b = 0; b < t->batch; b++) {
        const int64_t count = new_tokens(t, b), *pages = t->page + t->first[b];
        if (count > t->seq_lens[b])
            return ba_fail(BA_ERROR_VALUE,
                           BA_ARG("q_lens") ": expected 0 to " BA_ARG("seq_lens") "[%" PRId64 "] = %" PRId64 ", got %" PRId64 " at [%" PRId64 "]", b,
                           t->seq_lens[b], count, b);
        BA_TRY(ba_look_at_turn(b));
        for (int64_t i = t->seq_lens[b] - count; i < t->seq_lens[b]; i++) {
            BA_TRY(ba_look_at_turn(n));
            const int64_t page = pages[i / c->page_size];
            if (page < 0 || page >= c->pages) return ba_refuse_page(page, c->pages, i / c->page_size, b);
            slots[n++] = page * c->page_size + i % c->page_size;
        }
    }
    return BA_OK;
}

static ba_status check_slots(const int64_t *slots, int64_t tokens, int64_t available) {
    for (int64_t i = 0; i < tokens; i++) {
        BA_TRY(ba_look_at_turn(i));
        if (slots[i] < -1 || slots[i] >= available)
            return ba_fail(BA_ERROR_VALUE,
                           BA_ARG("slot_mapping") ": expected slots from 0 to %" PRId64 ", or -1 for none, got %" PRId64 " at [%" PRId64 "]",
                           available - 1, slots[i], i);
    }
    return BA_OK;
}

/* Checks that no two tokens have the same slot, with a hash table of `size` entries, a power of two above `tokens`. */
static ba_status check_distinct(const char *name, const int64_t *slots, int64_t tokens, int64_t *table, int64_t size) {
    for (int64_t i = 0; i < size; i++) {
        BA_TRY(ba_look_at_turn(i));
        table[i] = -1;
    }
    for (int64_t i = 0; i < tokens; i++) {
        BA_TRY(ba_look_at_turn(i));
        if (slots[i] < 0) continue;
        int64_t at = (int64_t)((uint64_t)slots[i] * 0x9e3779b97f4a7c15u >> 32) & (size - 1);
        for (; table[at] >= 0; at = (at + 1) & (size - 1))
            if (table[at] == slots[i])
                return ba_fail(BA_ERROR_VALUE, BA_ARG("%s") ": expected each slot once, got slot %" PRId64 " twice", name, slots[i]);
        table[at] = slots[i];
    }
    return BA_OK;
}

/* Finds the slot of each token, and checks that all are distinct. `memory` has room for the slots, and behind them for a hash table of `hashed`
 * entries. */
static ba_status choose_slots(ba_store_call *c, const int64_t *slots, const ba_page_tables *tables, bool reused, const ba_caches *caches,
                              int64_t *memory, int64_t hashed) {
    if (slots) BA_TRY(check_slots(slots, c->tokens, caches->pages * caches->page_size));
    else BA_TRY(slots_by_tables(tables, reused, caches, c->tokens, memory));
    c->slots = slots ? slots : memory;
    return check_distinct(slots ? "slot_mapping" : "block_tables", c->slots, c->tokens, memory + c->tokens, hashed);
}

/* ---- The operation -------------------------------------------------------------------------------------------------- */

/* Checks k or v, and fills `rows`, except for the members that set_places() sets. */
static ba_status open_rows(const char *name, const ba_tensor *t, const ba_caches *c, ba_dtype dtype, int64_t dim, ba_stored_rows *rows) {
    BA_TRY(ba_check_float(name, t));
    if (t->ndim != 3 || t->dims[1] != c->heads || t->dims[2] != dim)
        return ba_fail(BA_ERROR_VALUE, BA_ARG("%s") ": expected shape (T, %" PRId64 ", %" PRId64 ") like " BA_ARG("%s_cache") ", got %s", name,
                       c->heads, dim, name, ba_shape_text(t).chars);
    BA_TRY(ba_check_last_axis(name, t));
    BA_TRY(ba_check_extent(name, t));
    *rows = (ba_stored_rows){.name = name,
                             .from_dtype = t->dtype,
                             .to_dtype = dtype,
                             .dim = dim,
                             .from = t->data,
                             .token_stride = ba_step(t, 0),
                             .head_stride = ba_step(t, 1)};
    return BA_OK;
}

/* Sets where the rows of one array go. */
static void set_places(ba_stored_rows *rows, const ba_view *cache, const ba_view *scale, bool scale_is_fixed) {
    rows->to = *cache;
    rows->scale = *scale;
    rows->scale_is_fixed = scale_is_fixed;
}

/* Checks that no two elements of a cache, and no two scales that are written, share memory. */
static ba_status check_own_places(const char *cache_name, const ba_tensor *cache, const char *scale_name, const ba_tensor *scale) {
    BA_TRY(ba_check_places(cache_name, cache));
    return ba_is_fixed_scale(scale) ? BA_OK : ba_check_places(scale_name, scale);
}

static ba_status open_call(const ba_tensor *k, const ba_tensor *v, const ba_paged_args *args, ba_caches *caches, ba_store_call *c) {
    ba_paged_args a = *args;
    if (!v && ba_given(&a.v_cache)) return ba_fail(BA_ERROR_VALUE, BA_ARG("v") ": expected values for " BA_ARG("v_cache") ", got none");
    if (!v && ba_given(&a.v_scale)) return ba_fail(BA_ERROR_VALUE, BA_ARG("v_scale") ": expected none without " BA_ARG("v") ", got some");
    if (v && !ba_given(&a.v_cache)) return ba_fail(BA_ERROR_VALUE, BA_ARG("v_cache") ": expected a cache for " BA_ARG("v") ", got none");
    if (!v) { /* ba_check_caches() takes two caches: the cache of K stands for the missing one */
        a.v_cache = a.k_cache;
        a.v_scale = a.k_scale;
    }
    BA_TRY(ba_check_threads(a.num_threads));
    BA_TRY(ba_check_caches(&a, caches));
    BA_TRY(open_rows("k", k, caches, caches->dtype, caches->k_dim, &c->rows[0]));
    BA_TRY(check_own_places("k_cache", &a.k_cache, "k_scale", &a.k_scale));
    set_places(&c->rows[0], &caches->k, &caches->k_scale, ba_is_fixed_scale(&a.k_scale));
    c->arrays = 1;
    if (v) {
        BA_TRY(open_rows("v", v, caches, caches->v_dtype, caches->v_dim, &c->rows[1]));
        BA_TRY(check_own_places("v_cache", &a.v_cache, "v_scale", &a.v_scale));
        set_places(&c->rows[1], &caches->v, &caches->v_scale, ba_is_fixed_scale(&a.v_scale));
        c->arrays = 2;
        if (v->dims[0] != k->dims[0])
            return ba_fail(BA_ERROR_VALUE, BA_ARG("v") ": expected %" PRId64 " tokens like " BA_ARG("k") ", got %" PRId64, k->dims[0], v->dims[0]);
    }
    c->tokens = k->dims[0];
    c->heads = caches->heads;
    c->page_size = caches->page_size;
    return check_apart(caches, c);
}

/* Opens the summaries of the pages that get new tokens. `begin` has room for a number per request. */
static ba_status open_summaries(const ba_paged_args *args, const ba_page_tables *tables, int64_t *begin, ba_quest_metadata_args *summaries,
                                ba_summary_call *call) {
    for (int64_t b = 0; b < tables->batch; b++) begin[b] = tables->seq_lens[b] - new_tokens(tables, b);
    summaries->k_cache = args->k_cache;
    summaries->k_scale = args->k_scale;
    summaries->kv_layout = args->kv_layout;
    summaries->num_threads = args->num_threads;
    summaries->begin = begin;
    summaries->end = tables->seq_lens;
    summaries->batch = tables->batch;
    return ba_open_summaries(summaries, tables, call);
}

/* Runs an opened call. `given`: NULL, or the summaries to update. `memory` has room for a slot per token, a hash table of `hashed` entries, and,
 * where summaries are given, a number per request. */
static ba_status run(ba_store_call *c, const ba_caches *caches, const int64_t *slots, const ba_page_tables *tables, bool reused,
                     const ba_paged_args *args, const ba_quest_metadata_args *given, int64_t *memory, int64_t hashed) {
    ba_quest_metadata_args summaries;
    ba_summary_call call;
    BA_TRY(choose_slots(c, slots, tables, reused, caches, memory, hashed));
    if (!given) return ba_store_rows(c, args->num_threads);
    summaries = *given;
    BA_TRY(open_summaries(args, tables, memory + c->tokens + hashed, &summaries, &call));
    BA_TRY(ba_store_rows(c, args->num_threads));
    return ba_run_summaries(&call);
}

ba_status ba_append(const ba_tensor *k, const ba_tensor *v, const int64_t *slots, const ba_page_tables *opened, const ba_paged_args *args,
                    const ba_quest_metadata_args *summaries) {
    BA_IN_USUAL_MODE;
    ba_caches caches;
    ba_store_call c = {.tokens = 0};
    ba_page_tables own = {0};
    const ba_page_tables *const tables = opened ? opened : &own;
    BA_TRY(open_call(k, v, args, &caches, &c));
    if (!slots && !opened) BA_TRY(ba_open_page_tables(args, caches.page_size, -1, -1, &own));
    int64_t hashed = 2;
    while (hashed <= c.tokens) hashed *= 2;
    hashed *= 2; /* at most half full, so that a search is short */
    const size_t bytes = (size_t)(c.tokens + hashed + (summaries ? tables->batch : 0)) * sizeof *slots;
    int64_t *memory = ba_fault(BA_FAULT_MEMORY) ? NULL : malloc(bytes);
    const ba_status status =
        memory ? run(&c, &caches, slots, tables, opened != NULL, args, summaries, memory, hashed)
               : ba_fail(BA_ERROR_MEMORY, BA_ARG("slot_mapping") ": expected %lld bytes of memory for a copy, got none", (long long)bytes);
    free(memory);
    ba_close_page_tables(&own);
    return status;
}

ba_status ba_append_kv(const ba_tensor *k, const ba_tensor *v, const int64_t *slots, const ba_paged_args *args) {
    BA_TRY(ba_check_pointer("k", k));
    BA_TRY(ba_check_pointer("args", args));
    return ba_append(k, v, slots, NULL, args, NULL);
}
