/* Query tiles: what their lanes see, and their states. (These are not the tile registers of AMX, which csrc/kernels/tiles/ alone uses.) */
#include "ops/plan/tiles.h"

#include <string.h>

/* ---- Lanes ---------------------------------------------------------------------------------------------------------- */

void ba_open_lanes(ba_panel_state *s) {
    s->any = (ba_range){INT64_MAX, 0};
    s->all = (ba_range){0, INT64_MAX};
}

void ba_set_lane(ba_panel_state *s, int64_t i, ba_range seen, int32_t *lo, int32_t *hi) {
    lo[i] = (int32_t)seen.lo;
    hi[i] = (int32_t)seen.hi;
    s->all.lo = ba_max(s->all.lo, seen.lo);
    s->all.hi = ba_min(s->all.hi, seen.hi);
    if (seen.lo >= seen.hi) return;
    s->any.lo = ba_min(s->any.lo, seen.lo);
    s->any.hi = ba_max(s->any.hi, seen.hi);
}

void ba_close_lanes(const ba_panel_state *s, int64_t room, int32_t *lo, int32_t *hi, ba_tile_state *t) {
    for (int64_t i = s->lanes; i < room; i++) {
        lo[i] = 0;
        hi[i] = INT32_MAX;
    }
    t->range.lo = ba_min(t->range.lo, s->any.lo);
    t->range.hi = ba_max(t->range.hi, s->any.hi);
}

void ba_find_lanes(const ba_problem *p, const ba_view *view, int64_t batch, const ba_tile *tile, int64_t lane, int64_t lanes, const void **rows) {
    if (tile->heads == 1) { /* neighbouring lanes are one token apart */
        const char *row = ba_query_row(p, view, p->element_size, batch, tile->head, ba_lane_query(tile, lane));
        for (int64_t i = 0; i < lanes; i++) rows[i] = row + i * view->token_stride * p->element_size;
        return;
    }
    for (int64_t i = 0; i < lanes; i++)
        rows[i] = ba_query_row(p, view, p->element_size, batch, ba_lane_head(tile, lane + i), ba_lane_query(tile, lane + i));
}

/* ---- Walks ---------------------------------------------------------------------------------------------------------- */

int64_t ba_first_place(const ba_plan *plan, const ba_item *item) { return item->part * ba_plan_part_keys(plan, item->batch); }

ba_walk ba_new_walk(const ba_plan *plan, const ba_item *item, const uint64_t *bitmap, int64_t chunk_keys) {
    const bool whole = ba_plan_parts(plan, item->batch) == 1;
    return (ba_walk){.bitmap = bitmap,
                     .words = plan->bitmap_words,
                     .block_kv = plan->problem->block_kv,
                     .keys = ba_kv_span(plan->problem, item->batch).valid,
                     .chunk_keys = chunk_keys,
                     .stop = whole ? INT64_MAX : ba_first_place(plan, item) + ba_plan_part_keys(plan, item->batch),
                     .range = {INT64_MAX, 0}};
}

/* Clears the columns from `column` on, which hold padding only. Tiles with equal lists share a walk, and walks decide in which order gradients are
 * summed; so two lists that differ only in padding must count as equal, or padding would change bits. */
static void forget_columns_from(uint64_t *bitmap, int64_t words, int64_t column) {
    if (column / 64 < words) bitmap[column / 64] &= ((uint64_t)1 << (column % 64)) - 1;
    for (int64_t i = column / 64 + 1; i < words; i++) bitmap[i] = 0;
}

/* Reads the list of a tile into `bitmap`. Returns the number of the walk that has an equal list, or n where none of the n walks has one. */
static int find_walk(const ba_plan *plan, const ba_item *item, const ba_tile_state *t, const uint64_t *bitmaps, uint64_t *bitmap, int n) {
    const ba_problem *p = plan->problem;
    const int64_t words = plan->bitmap_words;
    int64_t at;
    ba_list_to_bitmap(p, item->batch, t->tile.head, t->tile.block_row, bitmap, words, &at);
    if (plan->tiling.gradients) forget_columns_from(bitmap, words, ba_ceil_div(ba_kv_span(p, item->batch).valid, p->block_kv));
    for (int k = 0; k < n; k++)
        if (memcmp(bitmaps + k * words, bitmap, (size_t)words * sizeof *bitmap) == 0) return k;
    return n;
}

int ba_begin_walks(const ba_plan *plan, const ba_item *item, ba_tile_state *tiles, uint64_t *bitmaps, int64_t chunk_keys, ba_walk *walks) {
    const bool listed = plan->problem->listed;
    int n = 0;
    for (int64_t i = 0; i < item->tiles * item->kv_heads; i++) {
        ba_tile_state *t = &tiles[i];
        const ba_tile_state *before = i ? &tiles[i - 1] : NULL;
        uint64_t *bitmap = bitmaps + n * plan->bitmap_words;
        /* Reading a list and comparing it with the others takes time. Three kinds of tiles need neither. */
        if (t->head > 0) t->walk = tiles[i - item->tiles].walk; /* the walk of this tile at the previous KV head: the heads of an item share lists */
        else if (!listed) t->walk = 0;                          /* all tiles attend all keys */
        else if (before && before->tile.block_row == t->tile.block_row && before->tile.head == t->tile.head)
            t->walk = before->walk; /* both tiles are of the same list row */
        else t->walk = find_walk(plan, item, t, bitmaps, bitmap, n);
        if (t->walk == n) /* no earlier tile has this list */
            walks[n++] = ba_new_walk(plan, item, listed ? bitmap : NULL, chunk_keys);
        ba_walk *l = &walks[t->walk];
        l->range.lo = ba_min(l->range.lo, t->range.lo);
        l->range.hi = ba_max(l->range.hi, t->range.hi);
    }
    for (int k = 0; k < n; k++) ba_walk_begin(&walks[k], ba_first_place(plan, item));
    return n;
}

int ba_next_walk(const ba_walk *walks, int n) {
    int next = 0;
    for (int k = 1; k < n; k++)
        if (walks[k].key < walks[next].key) next = k;
    return walks[next].key == BA_WALK_END ? -1 : next;
}
