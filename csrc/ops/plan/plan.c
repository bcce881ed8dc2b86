#include "ops/plan/plan.h"

#include <inttypes.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/pool.h"
#include "core/status.h"
#include "kernels/work_tuning.h"
#include "ops/scratch.h"

/* ---- Tiles ------------------------------------------------------------------------------------------------------ */

/* The number of tokens of a batch entry whose queries are in tiles. The forward pass leaves padding out, so that neither a result nor the choice of
 * its kernels depends on how much padding the entry has. Gradients have tiles for padding, too, because dQ of padding must become 0. */
static int64_t tokens_of_batch(const ba_problem *p, const ba_tiling *t, int64_t batch) {
    const ba_span q = ba_q_span(p, batch);
    return t->gradients ? q.rows : q.valid;
}

static int64_t rows_of_batch(const ba_problem *p, const ba_tiling *t, int64_t batch) {
    return ba_ceil_div(tokens_of_batch(p, t, batch), t->row_tokens);
}

static int64_t tokens_of_row(const ba_problem *p, const ba_tiling *t, int64_t batch, int64_t row) {
    return ba_min(t->row_tokens, tokens_of_batch(p, t, batch) - row * t->row_tokens);
}

static int64_t tiles_of_row(const ba_tiling *t, int64_t tokens) { return ba_ceil_div(tokens * t->shared_heads, t->tile_queries); }

/* The number of tiles of one KV head of a batch entry. All rows but the last have the same number. */
static int64_t tiles_of_batch(const ba_problem *p, const ba_tiling *t, int64_t batch) {
    const int64_t rows = rows_of_batch(p, t, batch), lists = p->group / t->shared_heads; /* of a block row */
    if (rows == 0) return 0;
    return lists * ((rows - 1) * tiles_of_row(t, tokens_of_row(p, t, batch, 0)) + tiles_of_row(t, tokens_of_row(p, t, batch, rows - 1)));
}

static int64_t all_tiles(const ba_problem *p, const ba_tiling *t) {
    int64_t tiles = 0;
    for (int64_t b = 0; b < p->batch; b++) tiles += p->kv_heads * tiles_of_batch(p, t, b);
    return tiles;
}

ba_tile ba_plan_tile(const ba_plan *plan, int64_t batch, int64_t kv_head, int64_t index) {
    const ba_problem *p = plan->problem;
    const ba_tiling *t = &plan->tiling;
    const int64_t lists = p->group / t->shared_heads; /* of a block row: one for each shared_heads query heads of the KV head */
    const int64_t rows = rows_of_batch(p, t, batch), per_row = lists * tiles_of_row(t, tokens_of_row(p, t, batch, 0));
    const int64_t row = ba_min(index / per_row, rows - 1), rest = index - row * per_row;
    const int64_t tokens = tokens_of_row(p, t, batch, row), tiles = tiles_of_row(t, tokens);
    int64_t list = rest / tiles, tile = rest % tiles;
    const int64_t lanes = tokens * t->shared_heads;
    /* the lanes are spread evenly, so that no tile of a row is nearly empty */
    int64_t begin = lanes * tile / tiles, end = lanes * (tile + 1) / tiles;
    /* Tiles of gradients are full, except the last of a row. dK and dV are summed tile by tile in this order: all heads over the first tokens, then
     * all heads over the next. Calls without lists sum in the same order. Where rows consist of whole tiles, dK and dV thus have the same bits with
     * a list of all blocks as without a list. */
    if (t->gradients) {
        list = rest % lists;
        tile = rest / lists;
        begin = tile * t->tile_queries;
        end = ba_min(lanes, begin + t->tile_queries);
    }
    return (ba_tile){.block_row = row,
                     .head = kv_head * p->group + list * t->shared_heads,
                     .heads = t->shared_heads,
                     .first_lane = begin,
                     .lanes = end - begin,
                     .first_query = row * t->row_tokens};
}

/* The largest number of keys that a query may attend. */
static int64_t keys_of_query(const ba_problem *p, int64_t batch) {
    const int64_t keys = ba_kv_span(p, batch).valid;
    return p->listed ? ba_min(keys, ba_min(p->blocks.dims[3], p->block_columns) * p->block_kv) : keys;
}

bool ba_plan_few_queries(const ba_plan *plan, int64_t batch) {
    const int64_t queries = ba_deciding_tokens(plan->problem, batch) * plan->problem->group;
    if (queries <= 0 || queries > plan->splitting.most_queries) return false;
    return queries <= BA_FEW_QUERIES || ba_kv_span(plan->problem, batch).valid >= queries * ba_work.few_keys;
}

/* The length of the sequence alone decides: other batch entries, the width of lists and the number of threads must not change any bit. */
int64_t ba_plan_part_keys(const ba_plan *plan, int64_t batch) {
    const int64_t keys = ba_kv_span(plan->problem, batch).valid;
    int64_t part = plan->splitting.least_part_keys;
    while (part < plan->splitting.part_keys && part * ba_work.parts < keys) part *= 2;
    return part;
}

int64_t ba_plan_parts(const ba_plan *plan, int64_t batch) {
    if (!ba_plan_few_queries(plan, batch)) return 1;
    return ba_max(1, ba_ceil_div(keys_of_query(plan->problem, batch), ba_plan_part_keys(plan, batch)));
}

/* ---- Lists ------------------------------------------------------------------------------------------------------ */

/* Copies `columns` bits of a bitmap, from bit `first` on, to the beginning of another one, whose other bits are 0. */
static void copy_bits(const uint64_t *from, int64_t first, int64_t columns, uint64_t *to) {
    const int64_t word = first / 64, shift = first % 64;
    for (int64_t i = 0; i * 64 < columns; i++) {
        const int64_t left = columns - i * 64;
        to[i] = from[word + i] >> shift;
        if (shift && left > 64 - shift) to[i] |= from[word + i + 1] << (64 - shift);
        if (left < 64) to[i] &= ((uint64_t)1 << left) - 1;
    }
}

bool ba_list_to_bitmap(const ba_problem *p, int64_t batch, int64_t head, int64_t row, uint64_t *bitmap, int64_t words, int64_t *at) {
    memset(bitmap, 0, (size_t)words * sizeof *bitmap);
    if (p->kv_splits) { /* the lists have been read and checked */
        const ba_kv_split *s = &p->kv_splits[batch];
        copy_bits(s->listed + ba_list_head(p, head) * s->listed_words, s->first_key / p->block_kv, ba_list_columns(p, batch), bitmap);
        return true;
    }
    const ba_tensor *t = &p->blocks;
    const int64_t list_batch = ba_list_batch(p, batch), list_head = ba_list_head(p, head), step = t->strides[3];
    const int64_t offset = list_batch * t->strides[0] + list_head * t->strides[1] + ba_list_row(p, batch, row) * t->strides[2];
    const int64_t columns = ba_list_columns(p, batch);
    const int64_t entries = p->block_counts ? p->block_counts[list_batch * t->dims[1] + list_head] : t->dims[3];
    for (int64_t i = 0; i < entries; i++) {
        const int64_t column = ba_list_entry(&p->blocks, offset + i * step);
        *at = i;
        if ((column == -1 || (column < 0 && !p->page_size)) && !p->block_counts) return true; /* in lists of pages, only -1 is a pad */
        if (column < 0 || column >= columns || bitmap[column / 64] >> (column % 64) & 1) return false;
        bitmap[column / 64] |= (uint64_t)1 << (column % 64);
    }
    return true;
}

void ba_plan_invert_lists(const ba_plan *plan, const ba_item *item, int64_t columns, int32_t *begin, int32_t *rows) {
    const ba_problem *p = plan->problem;
    const int64_t *steps = p->blocks.strides;
    memset(begin, 0, (size_t)(columns + 1) * sizeof *begin);
    for (int pass = 0; pass < 2; pass++) {
        for (int64_t row = item->tiles - 1; row >= 0; row--) {
            const ba_tile tile = ba_plan_tile(plan, item->batch, item->kv_head, item->first_tile + row);
            const int64_t at = ba_list_batch(p, item->batch) * steps[0] + ba_list_head(p, tile.head) * steps[1] +
                               ba_list_row(p, item->batch, tile.block_row) * steps[2];
            for (int64_t i = 0, column; i < p->blocks.dims[3] && (column = ba_list_entry(&p->blocks, at + i * steps[3])) >= 0; i++) {
                if (pass == 0) begin[column]++;
                else rows[--begin[column]] = (int32_t)row;
            }
        }
        if (pass == 0) /* begin[column] becomes the end of the column's rows, and the second pass fills the rows from their end */
            for (int64_t column = 1; column <= columns; column++) begin[column] += begin[column - 1];
    }
}

/* ---- Checking and costing, in parallel over items ---------------------------------------------------------------- */

typedef struct survey {
    ba_plan *plan;
    pthread_mutex_t lock;
    bool failed;
    int64_t bad[4]; /* where failed: the first bad entry in the order of the lists, as its batch, head, row and index in the row */
} survey;

/* Keeps a bad entry if it comes before those that were found so far. The same entry is reported whatever the threads do. */
static void keep_first_bad_entry(survey *s, const int64_t bad[4]) {
    pthread_mutex_lock(&s->lock);
    bool earlier = !s->failed;
    for (int i = 0; i < 4 && !earlier; i++) {
        if (bad[i] == s->bad[i]) continue;
        earlier = bad[i] < s->bad[i];
        break;
    }
    if (earlier) memcpy(s->bad, bad, sizeof s->bad);
    s->failed = true;
    pthread_mutex_unlock(&s->lock);
}

/* The number of keys of the range that lie in the columns of the bitmap. */
static int64_t count_keys(const ba_problem *p, const uint64_t *bitmap, int64_t words, ba_range range) {
    if (range.lo >= range.hi) return 0;
    int64_t keys = 0;
    for (int64_t w = range.lo / p->block_kv / 64; w < ba_min(words, (range.hi - 1) / p->block_kv / 64 + 1); w++)
        for (uint64_t bits = bitmap[w]; bits; bits &= bits - 1) {
            const int64_t column = w * 64 + __builtin_ctzll(bits);
            keys += ba_max(0, ba_min(range.hi, (column + 1) * p->block_kv) - ba_max(range.lo, column * p->block_kv));
        }
    return keys;
}

/* Checks the lists of one item and computes its cost. */
static void survey_item(void *context, int64_t index, int worker) {
    survey *s = context;
    const ba_plan *plan = s->plan;
    const ba_problem *p = plan->problem;
    ba_item *item = &plan->item[index];
    uint64_t *bitmap = plan->bitmaps + worker * plan->bitmap_words;
    const ba_span q = ba_q_span(p, item->batch);
    if (item->part > 0) return; /* the item of the first part checks the list and computes the cost for all parts */
    int64_t marked_row = -1, marked_head = -1;
    item->cost = 0;
    for (int64_t t = item->first_tile; t < item->first_tile + item->tiles; t++) {
        const ba_tile tile = ba_plan_tile(plan, item->batch, item->kv_head, t);
        if (p->listed && (tile.block_row != marked_row || tile.head != marked_head)) {
            int64_t at = 0;
            if (!ba_list_to_bitmap(p, item->batch, tile.head, tile.block_row, bitmap, plan->bitmap_words, &at)) {
                const int64_t bad[4] = {ba_list_batch(p, item->batch), ba_list_head(p, tile.head), ba_list_row(p, item->batch, tile.block_row), at};
                keep_first_bad_entry(s, bad);
                marked_row = -1; /* the bitmap is not complete */
                continue;        /* the first bad entry of the array is wanted, and lists of later tiles may come earlier in the array */
            }
            marked_row = tile.block_row;
            marked_head = tile.head;
        }
        /* The keys of the middle query stand for those of all queries. Padding adds no cost: costs decide the order of items, and so the rounding of
         * gradients, which padding must not change. */
        const int64_t lanes = ba_min(tile.lanes, (q.valid - tile.first_query) * tile.heads - tile.first_lane);
        if (lanes <= 0) continue;
        const int64_t first = tile.first_query + tile.first_lane / tile.heads, tokens = ba_ceil_div(lanes, tile.heads);
        const ba_range range = ba_visible_keys(p, item->batch, first + tokens / 2);
        const int64_t keys = p->listed ? count_keys(p, bitmap, plan->bitmap_words, range) : range.hi - range.lo;
        /* up to BA_FEW_QUERIES queries take as long as reading their keys takes; the time of more queries grows with their number */
        item->cost += (double)keys * (double)(ba_plan_few_queries(plan, item->batch) ? ba_max(lanes, BA_FEW_QUERIES) : lanes);
    }
    item->cost *= (double)item->kv_heads / (double)ba_plan_parts(plan, item->batch);
}

/* Checks lists that no tile reads, because all queries of their rows are padding. An item is one (batch entry, head of the lists). */
static void survey_padding(void *context, int64_t index, int worker) {
    survey *s = context;
    const ba_plan *plan = s->plan;
    const ba_problem *p = plan->problem;
    uint64_t *bitmap = plan->bitmaps + worker * plan->bitmap_words;
    const int64_t list_heads = p->blocks.dims[1], batch = index / list_heads, head = index % list_heads * (p->heads / list_heads);
    const int64_t rows = ba_ceil_div(ba_q_span(p, batch).rows, plan->tiling.row_tokens);
    for (int64_t row = rows_of_batch(p, &plan->tiling, batch); row < rows; row++) {
        int64_t at = 0;
        if (ba_list_to_bitmap(p, batch, head, row, bitmap, plan->bitmap_words, &at)) continue;
        const int64_t bad[4] = {ba_list_batch(p, batch), ba_list_head(p, head), ba_list_row(p, batch, row), at};
        keep_first_bad_entry(s, bad);
        return;
    }
}

/* The order of items: by `start`, then the most costly first. */
static int by_start(const void *left, const void *right) {
    const ba_item *a = left, *b = right;
    if (a->start != b->start) return a->start < b->start ? -1 : 1;
    if (a->cost != b->cost) return a->cost < b->cost ? 1 : -1;
    if (a->batch != b->batch) return a->batch < b->batch ? -1 : 1;
    if (a->part != b->part) return a->part < b->part ? -1 : 1;
    if (a->kv_head != b->kv_head) return a->kv_head < b->kv_head ? -1 : 1;
    return a->first_tile < b->first_tile ? -1 : a->first_tile > b->first_tile;
}

/* Merges the sorted items a[0 .. n) and a[n .. all) into `to`. */
static ba_status merge_items(const ba_item *a, int64_t n, int64_t all, ba_item *to) {
    for (int64_t i = 0, left = 0, right = n; i < all; i++) {
        BA_TRY(ba_look_at_turn(i));
        const bool first = right == all || (left < n && by_start(&a[left], &a[right]) < 0);
        to[i] = a[first ? left++ : right++];
    }
    return BA_OK;
}

/* Sorts n items by by_start(), which finds no two items equal. Many items are sorted in runs, which are then merged, because nothing can interrupt
 * qsort(). */
static ba_status sort_items(ba_item *item, int64_t n) {
    enum { RUN = 1 << 14 };
    ba_item *const spare = n > RUN ? malloc((size_t)n * sizeof *item) : NULL;
    const int64_t first_run = spare ? RUN : ba_max(1, n);
    ba_item *from = item, *to = spare;
    ba_status status = BA_OK;
    for (int64_t i = 0; i < n && status == BA_OK; i += first_run) {
        qsort(item + i, (size_t)ba_min(first_run, n - i), sizeof *item, by_start);
        if (spare) status = ba_look_for_stop();
    }
    for (int64_t run = first_run; run < n && status == BA_OK; run *= 2) {
        for (int64_t i = 0; i < n && status == BA_OK; i += 2 * run)
            status = merge_items(from + i, ba_min(run, n - i), ba_min(2 * run, n - i), to + i);
        ba_item *const merged = to;
        to = from;
        from = merged;
    }
    if (from != item) memcpy(item, from, (size_t)n * sizeof *item);
    free(spare);
    return status;
}

/* Items of one (batch, KV head) add to the same sums and wait for each other, so they must not run all at once. Each head's items are spread over the
 * whole call: `start` of an item becomes the share of the head's work that the head's earlier items have. Within a head, the most costly item comes
 * first. */
static ba_status spread_heads(ba_plan *plan) {
    ba_item *item = plan->item;
    for (int64_t i = 0; i < plan->items; i++) item[i].start = (double)(item[i].batch * plan->problem->kv_heads + item[i].kv_head);
    BA_TRY(sort_items(item, plan->items));
    for (int64_t first = 0, end; first < plan->items; first = end) {
        double cost = 0, done = 0;
        for (end = first; end < plan->items && item[end].batch == item[first].batch && item[end].kv_head == item[first].kv_head; end++)
            cost += item[end].cost;
        for (int64_t i = first; i < end; i++) {
            item[i].start = cost > 0 ? done / cost : 0;
            done += item[i].cost;
        }
    }
    return BA_OK;
}

/* ---- The plan ---------------------------------------------------------------------------------------------------- */

/* The number of KV heads per item of a batch entry, and the number of items of a batch entry. */
static int64_t heads_of_item(const ba_plan *plan, int64_t batch) { return ba_plan_few_queries(plan, batch) ? plan->grouping.few_heads : 1; }
static int64_t items_of_batch(const ba_plan *plan, int64_t batch) {
    return ba_ceil_div(plan->problem->kv_heads, heads_of_item(plan, batch)) *
           ba_ceil_div(tiles_of_batch(plan->problem, &plan->tiling, batch), plan->grouping.tiles) * ba_plan_parts(plan, batch);
}

/* Makes a plan of this tiling, splitting and grouping, and counts its items. */
static ba_plan plan_of(const ba_problem *problem, ba_tiling tiling, ba_splitting splitting, ba_grouping grouping) {
    ba_plan plan = {.problem = problem, .tiling = tiling, .splitting = splitting, .grouping = grouping, .parts_most = 1};
    plan.bitmap_words = problem->listed ? ba_ceil_div(problem->block_columns, 64) : 0;
    for (int64_t b = 0; b < problem->batch; b++) {
        plan.items += items_of_batch(&plan, b);
        plan.parts_most = ba_max(plan.parts_most, ba_plan_parts(&plan, b));
        if (ba_plan_few_queries(&plan, b)) plan.few_lanes = ba_max(plan.few_lanes, tokens_of_batch(problem, &tiling, b) * problem->group);
    }
    return plan;
}

static const ba_splitting unsplit = {BA_FEW_QUERIES, INT64_MAX, INT64_MAX};

/* How many query heads of a group walk the same list. */
static int64_t heads_of_list(const ba_problem *p) { return p->listed && p->blocks.dims[1] == p->heads && p->group > 1 ? 1 : p->group; }

bool ba_runs_by_block(const ba_problem *p) { return p->routed && p->listed && p->block_q * heads_of_list(p) <= BA_FEW_QUERIES; }

/* An upper bound of the call's flops. Few queries count as in survey_item(). */
static double most_flops(const ba_problem *p, const ba_tiling *t, ba_splitting splitting) {
    const ba_plan plan = {.problem = p, .tiling = *t, .splitting = splitting};
    double pairs = 0;
    for (int64_t b = 0; b < p->batch; b++) {
        const int64_t lanes = p->heads * tokens_of_batch(p, t, b);
        const int64_t few = ba_plan_few_queries(&plan, b) ? p->kv_heads * tiles_of_batch(p, t, b) * BA_FEW_QUERIES : 0;
        pairs += (double)ba_max(lanes, few) * (double)keys_of_query(p, b);
    }
    return pairs * 2 * (double)(p->head_dim + p->v_dim);
}

/* The tiling with the largest tiles. */
static ba_tiling forward_tiling(const ba_problem *p, const ba_tuning *tuning) {
    return (ba_tiling){.tile_queries = tuning->tile_queries, .row_tokens = p->listed ? p->block_q : INT32_MAX, .shared_heads = heads_of_list(p)};
}

/* Where each thread has only few tiles, the load is uneven when one thread has a tile more than another. The tiles are then made smaller, down to
 * half their size, where that makes the largest share of a thread smaller (smaller_share). This share is the most tiles that a thread gets, times the
 * lanes of the panels of an average tile. The last panel of a tile may be narrow: at every level, a narrow panel has half the lanes of a wide one.
 * The size of tiles changes no bit of the result; smaller tiles cost little. */
static ba_tiling even_tiling(const ba_problem *p, ba_tiling largest, int64_t panel_lanes, int threads) {
    if (threads == 1 || all_tiles(p, &largest) >= ba_work.many_tiles * threads) return largest;
    int64_t queries = 0;
    for (int64_t b = 0; b < p->batch; b++) queries += p->heads * tokens_of_batch(p, &largest, b);
    ba_tiling chosen = largest, tiling = largest;
    double least = INFINITY;
    for (; 2 * tiling.tile_queries >= largest.tile_queries; tiling.tile_queries -= panel_lanes) {
        const int64_t tiles = ba_max(1, all_tiles(p, &tiling));
        const double share = (double)(ba_ceil_div(tiles, threads) * ba_round_up(ba_ceil_div(queries, tiles), panel_lanes / 2));
        if (share >= ba_work.smaller_share * least) continue;
        least = share;
        chosen = tiling;
    }
    return chosen;
}

/* How many KV heads an item of few queries walks at once. The search begins with the number of heads whose rows of one chunk fit into the cache
 * together (few.bytes), divided by the number of panels that take turns at these rows. The number is halved until each thread has some items or, in a
 * call of one request, until all threads get the same number of items. It is not halved further, because an item of fewer heads reads smaller
 * stretches of memory. */
static int64_t choose_few_heads(const ba_plan *plan, const ba_tuning *tuning, int threads) {
    const ba_problem *p = plan->problem;
    const int64_t bytes = tuning->few.keys * (p->k_width + p->v_width) * p->kv_element_size;
    const bool shared = !p->listed || p->blocks.dims[1] == 1;
    int64_t heads =
        shared ? ba_max(1, ba_min(p->kv_heads, ba_min(BA_MOST_FEW_HEADS, tuning->few.bytes / ba_max(1, ba_plan_few_panels(plan)) / bytes))) : 1;
    for (;; heads = ba_ceil_div(heads, 2)) {
        heads = ba_ceil_div(p->kv_heads, ba_ceil_div(p->kv_heads, heads));
        ba_plan tried = *plan;
        tried.grouping.few_heads = heads;
        int64_t items = 0;
        for (int64_t b = 0; b < p->batch; b++) items += items_of_batch(&tried, b);
        const bool even = p->batch == 1 && items >= threads && items % threads == 0;
        if (heads == 1 || threads == 1 || items >= ba_work.few_items * threads || even) return heads;
    }
}

/* The number of tiles of an item. It is side_by_side, so that as many tiles as possible share each packed chunk. Where a call has few tiles, items
 * have fewer, so that every thread gets several items and none waits long for the last one. Smaller items are not needed where each thread gets the
 * same number of items and all tiles take the same time. Tiles do so in one sequence without lists and kv_ranges that has far fewer queries than keys
 * (some tokens of a prompt over a long cache). */
static int64_t choose_item_tiles(const ba_problem *p, const ba_tiling *t, int64_t side_by_side, int threads) {
    const int64_t all = all_tiles(p, t);
    if (threads == 1) return ba_max(1, ba_min(side_by_side, all));
    const int64_t usual = ba_max(1, ba_min(side_by_side, all / (ba_work.items * threads)));
    const bool alike = p->batch == 1 && !p->listed && !p->kv_ranges.data && ba_work.alike_keys * ba_q_span(p, 0).valid <= ba_kv_span(p, 0).valid;
    if (!alike) return usual;
    const int64_t tiles = tiles_of_batch(p, t, 0);
    for (int64_t n = ba_min(side_by_side, tiles); n > usual; n--)
        if (tiles % n == 0 && p->kv_heads * (tiles / n) % threads == 0) return n;
    return usual;
}

static ba_grouping forward_grouping(const ba_problem *p, ba_tiling t, ba_splitting splitting, const ba_tuning *tuning, int threads) {
    const int64_t lanes = ba_min(t.tile_queries, t.row_tokens * t.shared_heads);
    const int64_t side_by_side = ba_max(tuning->item_tiles, ba_min(tuning->most_item_tiles, tuning->item_tiles * t.tile_queries / lanes));
    const bool even = t.tile_queries < tuning->tile_queries; /* even_tiling() has made the shares even, for items of one tile */
    ba_plan plan = plan_of(p, t, splitting, (ba_grouping){1, 1});
    plan.grouping.tiles = even ? 1 : choose_item_tiles(p, &t, side_by_side, threads);
    plan.grouping.few_heads = choose_few_heads(&plan, tuning, threads);
    return plan.grouping;
}

ba_plan ba_plan_forward(const ba_problem *p, const ba_tuning *tuning, int64_t panel_lanes, int threads) {
    const ba_splitting splitting = {tuning->few_queries, tuning->few.part_keys, tuning->few.least_part_keys};
    ba_tiling tiling = forward_tiling(p, tuning);
    /* The caller will run a call of so little work on one thread. */
    if (ba_is_small(most_flops(p, &tiling, splitting), tuning->inline_flops)) threads = 1;
    tiling = even_tiling(p, tiling, panel_lanes, threads);
    return plan_of(p, tiling, splitting, forward_grouping(p, tiling, splitting, tuning, threads));
}

/* The most list rows of an item, which may have at most `lanes` lanes, and whose lists may have at most most_entries entries to invert. */
static int64_t most_rows(const ba_problem *p, const ba_tiling *t, int64_t lanes) {
    return ba_max(1, ba_min(lanes / (t->row_tokens * t->shared_heads), ba_work.most_entries / ba_max(1, p->blocks.dims[3])));
}

ba_plan ba_plan_forward_by_block(const ba_problem *p, const ba_tuning *tuning, int threads) {
    const ba_tiling tiling = {.tile_queries = BA_FEW_QUERIES, .row_tokens = p->block_q, .shared_heads = heads_of_list(p)};
    /* In an item of n queries whose list rows have `entries` entries each, n * entries / columns queries attend a block on average. `aim` is the n
     * for which this average is by_block_least_lanes. */
    const int64_t aim = tuning->by_block_least_lanes * p->block_columns / ba_max(1, p->blocks.dims[3]);
    const int64_t rows = most_rows(p, &tiling, ba_max(tuning->by_block_lanes, ba_min(aim, tuning->by_block_most_lanes)));
    const ba_grouping grouping = {.tiles = ba_max(1, ba_min(rows, all_tiles(p, &tiling) / (ba_work.by_block_items * threads))), .few_heads = 1};
    return plan_of(p, tiling, unsplit, grouping);
}

static ba_tiling gradient_tiling(const ba_problem *p, const ba_tuning *tuning) {
    ba_tiling tiling = {.tile_queries = tuning->gradient_queries,
                        .row_tokens = p->listed ? p->block_q : tuning->gradient_queries,
                        .shared_heads = 1,
                        .gradients = true};
    const bool lists_shared = !p->listed || p->blocks.dims[1] != p->heads;
    /* heads share a tile only where the rows of all heads fit into the tile */
    if (lists_shared && tiling.row_tokens <= tiling.tile_queries / p->group) tiling.shared_heads = p->group;
    return tiling;
}

ba_plan ba_plan_gradients(const ba_problem *p, const ba_tuning *tuning) {
    const bool differ = p->listed && p->block_q < tuning->gradient_item_tiles * tuning->gradient_queries;
    const ba_grouping grouping = {.tiles = differ ? tuning->gradient_list_tiles : tuning->gradient_item_tiles, .few_heads = 1};
    return plan_of(p, gradient_tiling(p, tuning), unsplit, grouping);
}

ba_plan ba_plan_gradients_by_block(const ba_problem *p, const ba_tuning *tuning) {
    const ba_tiling tiling = gradient_tiling(p, tuning);
    /* The number of columns must not enter here: the longest sequence of the batch decides this number, which would change the order of other
     * sequences' sums. */
    const ba_grouping grouping = {.tiles = most_rows(p, &tiling, tuning->by_block_lanes), .few_heads = 1};
    return plan_of(p, tiling, unsplit, grouping);
}

void ba_plan_lay_out(ba_plan *plan, int threads, char *base, int64_t *used) {
    plan->item = ba_take(base, used, plan->items * (int64_t)sizeof(ba_item));
    plan->bitmaps = ba_take(base, used, threads * plan->bitmap_words * (int64_t)sizeof(uint64_t));
}

/* The sentence names the indices in the caller's array. With cu_rows, that array lacks the first axis of p->blocks, and over pages it has queries
 * before heads. Over pages without cu_rows, it lacks the axis of rows. */
ba_status ba_refuse_list_entry(const ba_problem *p, const int64_t bad[4]) {
    const ba_tensor *t = &p->blocks;
    const int added_axis = p->cu_rows ? 0 : p->page_size ? 2 : -1;
    const bool rows_first = p->page_size && p->cu_rows;
    const int axes[] = {0, rows_first ? 2 : 1, rows_first ? 1 : 2, 3};
    const char *const unit = !p->page_size ? "block column" : p->block_kv == p->page_size ? "page" : "block";
    const int64_t sequence = rows_first ? ba_sequence_at(p->cu_rows, p->batch, bad[2]) : bad[0];
    int64_t at = 0;
    char where[128]; /* four numbers of 19 digits fit */
    size_t used = 0;
    for (int i = 0; i < 4; i++) {
        at += bad[i] * t->strides[i];
        if (axes[i] != added_axis) used += (size_t)snprintf(where + used, sizeof where - used, used ? ", %" PRId64 : "%" PRId64, bad[axes[i]]);
    }
    const int64_t column = ba_list_entry(t, at), columns = ba_list_columns(p, sequence);
    if (columns == 0)
        return ba_fail(BA_ERROR_VALUE, BA_ARG("%s") ": expected no %s, since %s %" PRId64 " has no %s, got %" PRId64 " at [%s]", p->list_name, unit,
                       p->page_size ? "request" : "sequence", sequence, p->page_size ? "tokens" : "keys", column, where);
    if (column < 0 || column >= columns)
        return ba_fail(BA_ERROR_VALUE, BA_ARG("%s") ": expected %ss from 0 to %" PRId64 "%s, got %" PRId64 " at [%s]%s", p->list_name, unit,
                       columns - 1, p->block_counts ? "" : ", or a pad", column, where,
                       column == UINT16_MAX && !p->page_size ? " (65535 is a pad in uint16 alone)" : "");
    return ba_fail(BA_ERROR_VALUE, BA_ARG("%s") ": expected each %s once per row, got %" PRId64 " again at [%s]", p->list_name, unit, column, where);
}

ba_status ba_plan_make(ba_plan *plan, int threads) {
    const ba_problem *problem = plan->problem;
    survey s = {.plan = plan, .lock = PTHREAD_MUTEX_INITIALIZER};
    int64_t n = 0;
    for (int64_t b = 0; b < problem->batch; b++) {
        BA_TRY(ba_look_at_turn(b));
        const int64_t tiles = tiles_of_batch(problem, &plan->tiling, b), parts = ba_plan_parts(plan, b), heads = heads_of_item(plan, b);
        for (int64_t g = 0; g < problem->kv_heads; g += heads)
            for (int64_t t = 0; t < tiles; t += plan->grouping.tiles)
                for (int64_t part = 0; part < parts; part++)
                    plan->item[n++] = (ba_item){.first_tile = t,
                                                .tiles = ba_min(plan->grouping.tiles, tiles - t),
                                                .batch = (int32_t)b,
                                                .kv_head = (int32_t)g,
                                                .kv_heads = (int32_t)ba_min(heads, problem->kv_heads - g),
                                                .part = part};
    }
    const double entries =
        problem->listed ? (double)problem->blocks.dims[2] * (double)problem->blocks.dims[3] * (double)(problem->batch * problem->heads) : 0;
    const int survey_threads = entries > ba_work.survey_entries ? threads : 1;
    BA_TRY(ba_parallel(survey_threads, plan->items, survey_item, &s));
    if (problem->listed && problem->q_lens && !plan->tiling.gradients)
        BA_TRY(ba_parallel(survey_threads, problem->batch * problem->blocks.dims[1], survey_padding, &s));
    if (s.failed) return ba_refuse_list_entry(problem, s.bad);
    for (int64_t i = 0; i < n; i++) {
        if (plan->item[i].part > 0) plan->item[i].cost = plan->item[i - 1].cost;
        plan->cost += plan->item[i].cost;
    }
    if (plan->tiling.gradients) BA_TRY(spread_heads(plan));
    return sort_items(plan->item, n);
}
