/* The plan of a call: turns index lists into items of work, checks the lists on the way, and sorts the items by cost. Internal.
 *
 * A *tile* is up to tile_queries queries that walk one list: queries of one block row, of all heads of a KV group where these share the list (or
 * there is none) and, for gradients, their rows fit into a tile; else of one head. An *item* is a run of neighbouring tiles of one (batch, KV head).
 * One thread walks the lists of an item's tiles side by side, so that its tiles find K and V in cache. In forward calls, the number of threads may
 * change the sizes of tiles and items, but it changes no query's result.
 *
 * Where a sequence has so few queries that the kernel for few queries attends them (decode), its list is also cut into *parts* of some hundreds or
 * thousands of keys. Each part is an item, and the states of the parts are joined afterwards, in their order. The sequence alone decides whether and
 * where a list is cut. Where all heads share the list, the item of a part walks it for several KV heads at once, because the heads of a token lie
 * side by side in token-major caches and are then read in the order of memory.
 *
 * A query is one token of one query head, so the number of queries of a tile, or of a KV head, is tokens times heads. Where heads are not counted,
 * queries are called *tokens*. Tokens of keys are called keys. The number of a query (first_query, ba_lane_query) is the number of its token among
 * those tokens of its sequence that have queries. All heads number their queries alike. */
#ifndef BA_OPS_PLAN_H
#define BA_OPS_PLAN_H

#include "core/pool.h"
#include "kernels/kernels.h"
#include "ops/problem.h"

typedef struct ba_item {
    int64_t first_tile, tiles;        /* these tiles of each of the KV heads below */
    int32_t batch, kv_head, kv_heads; /* KV heads kv_head .. kv_head + kv_heads - 1 */
    int64_t part;                     /* number of the part of the list; 0 where lists are not cut */
    double cost;                      /* in query-key pairs */
    double start;                     /* gradients: the share of the work of its (batch, KV head) that earlier items have; else 0 */
} ba_item;

typedef struct ba_tile {
    int64_t block_row;
    int64_t head, heads; /* query heads head .. head + heads - 1 share the list. Lane t of the row has query t / heads of head head + t % heads */
    int64_t first_lane, lanes; /* the tile's queries are lanes first_lane .. first_lane + lanes - 1 of the block row */
    int64_t first_query;       /* the number of the block row's first query */
} ba_tile;

static inline int64_t ba_lane_query(const ba_tile *tile, int64_t lane) { return tile->first_query + (tile->first_lane + lane) / tile->heads; }
static inline int64_t ba_lane_head(const ba_tile *tile, int64_t lane) { return tile->head + (tile->first_lane + lane) % tile->heads; }

/* How queries become tiles. */
typedef struct ba_tiling {
    int64_t tile_queries; /* the largest number of queries of a tile: tokens times shared_heads */
    int64_t row_tokens;   /* tokens per block row: block_q. Without lists, a row is the whole sequence, or for gradients one whole tile */
    int64_t shared_heads; /* query heads per tile: the group where its heads share lists and, for gradients, their rows fit into a tile; else 1 */
    bool gradients;       /* padding has tiles, too, and the tiles of a row are ordered by tokens first and by heads second */
} ba_tiling;

/* How the keys of a sequence of few queries are split into parts. */
typedef struct ba_splitting {
    int64_t most_queries;               /* the most queries of a KV head in such a sequence: tokens times query heads that share the KV head */
    int64_t part_keys, least_part_keys; /* the largest and the smallest number of keys per part */
} ba_splitting;

/* How tiles become items. */
typedef struct ba_grouping {
    int64_t tiles;     /* the largest number of tiles of an item, of each of its KV heads */
    int64_t few_heads; /* the largest number of KV heads of an item of few queries */
} ba_grouping;

typedef struct ba_plan {
    const ba_problem *problem;
    ba_tiling tiling;
    ba_splitting splitting;
    ba_grouping grouping;
    int64_t bitmap_words; /* words of a bitmap over block columns; 0 without lists */
    int64_t parts_most;   /* the largest number of parts of a batch entry */
    int64_t few_lanes;    /* the largest number of queries of a KV head of a batch entry of few queries; 0: there is no such entry */
    int64_t items;
    ba_item *item;     /* the most costly first. Gradients: by `start`, so that the items of each (batch, KV head) are spread over the call */
    double cost;       /* of all items */
    uint64_t *bitmaps; /* [worker]: scratch memory of ba_plan_make() */
} ba_plan;

/* Each of the next four functions decides the tiles, the parts and the number of items of a plan. ba_plan_make() then makes the items. */

/* The plan of a forward call. panel_lanes is the width of the widest panels that tiles consist of. */
ba_plan ba_plan_forward(const ba_problem *problem, const ba_tuning *tuning, int64_t panel_lanes, int threads);

/* The same for the driver by blocks (attend_by_block.h): a tile is a list row, and an item has many. */
ba_plan ba_plan_forward_by_block(const ba_problem *problem, const ba_tuning *tuning, int threads);

/* The same for gradients. The order of tiles and items is the order in which dK and dV are summed, so these orders depend on nothing but the sequence
 * and its lists. Tiles are full; without lists, tiles are cut as for lists whose rows are whole tiles. Items of one (batch, KV head) add in the order
 * in which the plan has them. */
ba_plan ba_plan_gradients(const ba_problem *problem, const ba_tuning *tuning);

/* The same for gradients by blocks: a tile is a list row, and an item has many. */
ba_plan ba_plan_gradients_by_block(const ba_problem *problem, const ba_tuning *tuning);

/* The number of keys per part of this batch entry. */
int64_t ba_plan_part_keys(const ba_plan *plan, int64_t batch);

/* Lays out the memory of a plan (scratch.h), as the next parts of its call's block. */
void ba_plan_lay_out(ba_plan *plan, int threads, char *base, int64_t *used);

/* Makes the items, in the memory that ba_plan_lay_out() has handed out for `threads` threads. Checks the entries of list rows that have queries, on
 * up to `threads` threads, and fails for the first bad one. (Rows all of whose queries are padding by q_lens are checked, too.) */
ba_status ba_plan_make(ba_plan *plan, int threads);

/* Tile number `tile` of one (batch, KV head). */
ba_tile ba_plan_tile(const ba_plan *plan, int64_t batch, int64_t kv_head, int64_t tile);

/* Inverts the lists of an item's tiles, each of which is one list row: list_rows[begin[column] .. begin[column + 1] - 1] becomes the numbers of the
 * list rows that name the column, counted from the item's first list row, in rising order. `begin` has room for columns + 1 numbers, `list_rows` for
 * all entries of all the lists. */
void ba_plan_invert_lists(const ba_plan *plan, const ba_item *item, int64_t columns, int32_t *begin, int32_t *list_rows);

/* Whether a call is run block by block: its lists are routed, and each list row has at most BA_FEW_QUERIES queries, where a token counts once for
 * each query head that walks the list row. Routed kernels attend such queries. */
bool ba_runs_by_block(const ba_problem *problem);

/* Whether the kernel for few queries attends a batch entry. It does so where the entry has at most BA_FEW_QUERIES queries, or at most
 * splitting.most_queries queries and many keys for each of them. A token counts once for each query head that shares a KV head. The lengths of the
 * sequence alone decide. */
bool ba_plan_few_queries(const ba_plan *plan, int64_t batch);

/* The most lanes that a tile has. */
static inline int64_t ba_plan_tile_lanes(const ba_plan *plan) {
    return ba_min(plan->tiling.tile_queries, plan->tiling.row_tokens * plan->tiling.shared_heads);
}

/* The number of panels of the largest tile of few queries; 0: there is no such tile. */
static inline int64_t ba_plan_few_panels(const ba_plan *plan) {
    return ba_ceil_div(ba_min(plan->few_lanes, plan->tiling.row_tokens * plan->tiling.shared_heads), BA_FEW_QUERIES);
}

/* The number of parts that the lists of a batch entry are cut into. */
int64_t ba_plan_parts(const ba_plan *plan, int64_t batch);

/* Sets the bits of the columns that a row lists, in a bitmap of `words` words. Returns false where an entry is out of range or listed twice; *at is
 * then the index of this entry in the row. */
bool ba_list_to_bitmap(const ba_problem *problem, int64_t batch, int64_t head, int64_t row, uint64_t *bitmap, int64_t words, int64_t *at);

/* Fails for the entry that ba_list_to_bitmap() has found: `bad` has its indices in problem->blocks. */
ba_status ba_refuse_list_entry(const ba_problem *problem, const int64_t bad[4]);

#endif
