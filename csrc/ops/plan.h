/* From index lists to work: validated, cost-sorted items. Internal.
 *
 * A *tile* is up to tile_queries queries that walk one list: the queries of one block row, of all heads of a KV group
 * where these share the list (a broadcast list or none), else of one head. An *item* is a run of neighbouring tiles of
 * one (batch, KV head): one thread walks their lists side by side, so that tiles meet K and V while they are in cache.
 * Which tiles make an item depends on the thread count; what a tile computes does not.
 *
 * Where a sequence has so few queries that the kernel for few queries takes them (decode), its list is also cut into
 * *parts* of some hundred or thousand keys, each an item's work, whose states are joined afterwards in their order. Both rules look at
 * nothing but the sequence itself. Where all heads share the list, such an item walks it for several KV heads at once: in
 * token-major caches those lie side by side, and memory is read as it lies. */
#ifndef BA_OPS_PLAN_H
#define BA_OPS_PLAN_H

#include "core/pool.h"
#include "kernels/kernels.h"
#include "ops/problem.h"

typedef struct ba_item {
    int64_t first_tile, tiles;
    int32_t batch, kv_head, kv_heads; /* of heads kv_head .. kv_head + kv_heads - 1, each */
    int64_t part;
    double cost;  /* query-key pairs */
    double start; /* gradients: share of its (batch, KV head)'s work that is done before it; else 0 */
} ba_item;

typedef struct ba_tile {
    int64_t block_row;
    int64_t head, heads;       /* query heads head .. head+heads-1 share the list; lane t is query t / heads of head t % heads */
    int64_t first_lane, lanes; /* of the block row's (query, head) pairs */
    int64_t first_query;       /* of the block row */
} ba_tile;

static inline int64_t ba_lane_query(const ba_tile *tile, int64_t lane) { return tile->first_query + (tile->first_lane + lane) / tile->heads; }
static inline int64_t ba_lane_head(const ba_tile *tile, int64_t lane) { return tile->head + (tile->first_lane + lane) % tile->heads; }

typedef struct ba_plan {
    const ba_problem *problem;
    int64_t tile_queries, group_tiles;
    int64_t row_queries;  /* of a row of the grid: block_q; without lists the whole sequence is one */
    int64_t shared_heads; /* heads a tile holds: the group where lists are shared, else 1 */
    bool few_rows;        /* every row is for the kernel for few queries */
    bool gradients;       /* laid out by ba_plan_lay_out_gradients */
    int64_t items;
    ba_item *item; /* most costly first; gradients: heads side by side, each its most costly first */
    double cost;   /* of all items */
    int64_t bitmap_words;
    int64_t part_keys, least_part_keys;
    int64_t parts_most; /* of any batch entry */
    int64_t few_heads;  /* KV heads of an item at most, where the kernel for few queries serves it */
} ba_plan;

/* Decides tiles, parts and the number of items. panel_lanes: of the widest panels that tiles are met in. */
void ba_plan_lay_out(ba_plan *plan, const ba_problem *problem, const ba_tuning *tuning, int64_t panel_lanes, int threads);

/* The same where all rows are for queries that meet at blocks: a tile is a row, and an item has many. */
void ba_plan_lay_out_rows(ba_plan *plan, const ba_problem *problem, const ba_tuning *tuning, int threads);

/* The same for gradients, where the order of tiles and items decides in which order dK and dV are summed: nothing but the
 * sequence and its lists decides it. Tiles are full, and without lists they are those of lists of whole tiles. Items of one
 * (batch, KV head) come in the order in which they are to be summed. */
void ba_plan_lay_out_gradients(ba_plan *plan, const ba_problem *problem, const ba_tuning *tuning);

/* The same where all rows are for queries that meet at blocks. */
void ba_plan_lay_out_gradient_rows(ba_plan *plan, const ba_problem *problem, const ba_tuning *tuning);

/* Keys of a part of this batch entry. */
int64_t ba_plan_part_keys(const ba_plan *plan, int64_t batch);

/* Bytes that the plan needs beside the structure itself. */
int64_t ba_plan_bytes(const ba_plan *plan, int threads);

/* Makes the items in `memory`, and checks every entry of the lists on the way. */
ba_status ba_plan_make(ba_plan *plan, int threads, void *memory);

ba_tile ba_plan_tile(const ba_plan *plan, int64_t batch, int64_t kv_head, int64_t tile);

/* Turns the lists of an item's tiles around: rows[begin[column] .. begin[column + 1] - 1] are those that list the column, of the item's, in rising
 * order. begin has room for columns + 1, rows for an entry of each tile's list. */
void ba_plan_invert_lists(const ba_plan *plan, const ba_item *item, int64_t columns, int32_t *begin, int32_t *rows);

/* True where the lists route so few queries each that no panel is for them. */
bool ba_plan_few_rows(const ba_problem *problem);

/* True where a batch entry has no more queries than the kernel for few takes. */
static inline bool ba_plan_few_queries(const ba_plan *plan, int64_t batch) {
    const int64_t queries = ba_q_span(plan->problem, batch).valid * plan->problem->group;
    return queries > 0 && queries <= BA_FEW_QUERIES;
}

/* True where that kernel serves this batch entry: all of its queries together, or a row at a time. */
static inline bool ba_plan_few(const ba_plan *plan, int64_t batch) { return plan->few_rows || ba_plan_few_queries(plan, batch); }

/* Parts that the lists of a batch entry are cut into. */
int64_t ba_plan_parts(const ba_plan *plan, int64_t batch);

/* Marks the listed columns of a row. False where an entry is out of range or listed twice; *at is then its place. */
bool ba_list_to_bitmap(const ba_problem *problem, int64_t batch, int64_t head, int64_t row, uint64_t *bitmap, int64_t words, int64_t *at);

#endif
