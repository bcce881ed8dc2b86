/* The blocks that block rows see. Where the queries are the last tokens and have no kv_ranges, neither end of a query's range of keys falls from one
 * query to the next, and the last query sees some key. The range of a block row then follows from its first and its last query. With kv_ranges, each
 * query may see any run of keys, and with q_begin, queries may stand so far behind the keys that a window shows them none. In these two cases, the
 * blocks that each block row sees and always keeps are noted before the scores are made, once for all heads. */
#include <string.h>

#include "core/pool.h"
#include "ops/scratch.h"
#include "ops/select/select_prefill_call.h"

static bool are_noted(const ba_prefill *c) { return c->p.kv_ranges.data || c->p.q_begin; }

ba_range ba_prefill_keys(const ba_prefill *c, int64_t batch, int64_t first, int64_t last) {
    if (!are_noted(c)) {
        const ba_range end = ba_keys_in_place(&c->p, batch, last);
        return (ba_range){end.hi ? ba_keys_in_place(&c->p, batch, first).lo : 0, end.hi};
    }
    ba_range hull = {INT64_MAX, 0};
    for (int64_t query = first; query <= last; query++) {
        const ba_range keys = ba_visible_keys(&c->p, batch, query);
        if (keys.hi == 0) continue;
        hull.lo = ba_min(hull.lo, keys.lo);
        hull.hi = ba_max(hull.hi, keys.hi);
    }
    return hull.hi ? hull : (ba_range){0, 0};
}

ba_range ba_prefill_blocks(const ba_prefill *c, int64_t batch, int64_t block_row) {
    if (c->notes.seen) return c->notes.seen[batch * c->p.block_rows + block_row];
    const int64_t q_valid = ba_q_span(&c->p, batch).valid, first = block_row * c->p.block_q;
    if (first >= q_valid) return (ba_range){0, 0};
    const ba_range keys = ba_prefill_keys(c, batch, first, ba_min(first + c->p.block_q, q_valid) - 1);
    return (ba_range){keys.lo / c->p.block_kv, ba_ceil_div(keys.hi, c->p.block_kv)};
}

int64_t ba_notes_lay_out(const ba_prefill *c, char *base, ba_notes *notes) {
    const int64_t n = are_noted(c) ? c->p.batch * c->p.block_rows : 0, bits = n * c->words * (int64_t)sizeof(uint64_t);
    int64_t used = 0;
    *notes = (ba_notes){0};
    if (n == 0) return 0;
    notes->seen = ba_take(base, &used, n * (int64_t)sizeof(ba_range));
    notes->visible = ba_take(base, &used, bits);
    notes->forced = ba_take(base, &used, bits);
    return used;
}

/* Sets the bits of blocks [lo, hi). */
static void set_run(uint64_t *words, int64_t lo, int64_t hi) {
    for (int64_t word = lo / 64; word * 64 < hi; word++) words[word] |= ba_bits_within(word, (ba_range){lo, hi});
}

void ba_note_block_row(void *context, int64_t item, int worker) {
    const ba_prefill *c = context;
    const ba_select_prefill_args *a = c->args;
    const int64_t batch = item / c->p.block_rows, block_row = item % c->p.block_rows, block = c->p.block_kv;
    const int64_t q_valid = ba_q_span(&c->p, batch).valid, block_rows = ba_ceil_div(q_valid, c->p.block_q), columns = ba_prefill_columns(c, batch);
    const int64_t first = block_row * c->p.block_q, end = ba_min(first + c->p.block_q, q_valid);
    uint64_t *visible = c->notes.visible + item * c->words, *forced = c->notes.forced + item * c->words;
    ba_range seen = {INT64_MAX, 0};
    (void)worker;
    memset(visible, 0, (size_t)c->words * sizeof *visible);
    memset(forced, 0, (size_t)c->words * sizeof *forced);
    for (int64_t query = first; query < end; query++) {
        const ba_range keys = ba_visible_keys(&c->p, batch, query);
        if (keys.hi == 0) continue;
        const ba_range own = {keys.lo / block, ba_ceil_div(keys.hi, block)};
        set_run(visible, own.lo, own.hi);
        seen.lo = ba_min(seen.lo, own.lo);
        seen.hi = ba_max(seen.hi, own.hi);
        /* The query's sinks are counted from the beginning of its range, and its recent blocks from the diagonal, or from the last key that the query
         * sees, where this key lies before the diagonal. */
        const int64_t begin = c->p.kv_ranges.data ? ba_max(0, ba_range_end(&c->p, batch, query, 0)) / block : 0;
        const int64_t newest = ba_min(ba_diagonal(&c->p, batch, query), keys.hi - 1);
        set_run(forced, ba_max(own.lo, begin), ba_min(own.hi, begin + ba_min(a->sink, columns)));
        if (a->recent == 0 || newest < keys.lo) continue;
        set_run(forced, ba_max(own.lo, newest / block - ba_min(newest / block, a->recent - 1)), newest / block + 1);
    }
    c->notes.seen[item] = seen.hi ? seen : (ba_range){0, 0};
    const bool whole = block_row < a->first_rows || block_row >= block_rows - ba_min(block_rows, a->last_rows);
    set_run(forced, whole ? 0 : columns - ba_min(columns, a->last_columns), columns);
    for (int64_t word = 0; word < c->words; word++) forced[word] &= visible[word];
}
