/* Query tiles of running items (not the tile registers of AMX): the states of their panels, the keys that their lanes see, and the walks over the
 * lists of an item's tiles. Forward and backward drivers share them. Internal. */
#ifndef BA_OPS_TILES_H
#define BA_OPS_TILES_H

#include "ops/plan/plan.h"
#include "ops/plan/walk.h"

enum {
    BA_MOST_ITEM_TILES = 32, /* the largest number of tiles per item */
    BA_TILE_PANELS = 32      /* the largest number of panels of a tile, or of all tiles that are joined */
};

typedef enum ba_panel_width { BA_PANEL_WIDE, BA_PANEL_NARROW, BA_PANEL_FEW } ba_panel_width; /* the first two index a family's arrays */

typedef struct ba_panel_state {
    union {
        ba_panel panel;             /* forward. lo and hi are always set here; a kernel gets them only where a chunk needs them */
        ba_gradient_panel gradient; /* backward, likewise */
    };
    ba_panel_width width;
    int64_t lane, lanes; /* the tile's lane that is the first of the panel, and how many lanes of the panel hold queries */
    ba_range any, all;   /* all keys that some lane sees lie in `any`; every lane sees all keys of `all` */
} ba_panel_state;

typedef struct ba_tile_state {
    ba_tile tile;
    int64_t head;   /* its KV head, counted from the item's first KV head */
    int walk;       /* the walk over its list */
    ba_range range; /* all keys that some query sees lie in this range */
    char *q, *dout; /* backward: rows, packed by pack_tile */
    bool finite_q, finite_dout;
    int panels;
    ba_panel_state panel[BA_TILE_PANELS];
} ba_tile_state;

/* Set the keys that the lanes of a panel see. ba_open_lanes() comes first; ba_set_lane() sets the keys of one lane; ba_close_lanes() lets the lanes
 * without a query (s->lanes .. room - 1) see all keys, so that they need no mask, and extends the range of the tile. lo and hi are the panel's
 * bounds. */
void ba_open_lanes(ba_panel_state *s);
void ba_set_lane(ba_panel_state *s, int64_t i, ba_range seen, int32_t *lo, int32_t *hi);
void ba_close_lanes(const ba_panel_state *s, int64_t room, int32_t *lo, int32_t *hi, ba_tile_state *t);

/* Whether all lanes see all of these keys, so that the panel needs no bounds. */
static inline bool ba_lanes_see_all(const ba_panel_state *s, const int32_t *key_index, int64_t keys) {
    return key_index[0] >= s->all.lo && key_index[keys - 1] < s->all.hi;
}

/* Finds the rows, of q, out or a gradient of either, that belong to `lanes` lanes of a tile from `lane` on. */
void ba_find_lanes(const ba_problem *p, const ba_view *view, int64_t batch, const ba_tile *tile, int64_t lane, int64_t lanes, const void **rows);

/* Makes a walk over the item's part of a list. The walk is not yet begun, and its range is empty. bitmap NULL: the list has all keys. */
ba_walk ba_new_walk(const ba_plan *plan, const ba_item *item, const uint64_t *bitmap, int64_t chunk_keys);
/* The position in the sequence of listed keys where the item's part begins. */
int64_t ba_first_place(const ba_plan *plan, const ba_item *item);

/* Makes and begins the walks of an item's opened tiles, and sets tiles[i].walk. Tiles with equal lists share a walk. `bitmaps` has room for
 * plan->bitmap_words words per tile. Returns the number of walks. */
int ba_begin_walks(const ba_plan *plan, const ba_item *item, ba_tile_state *tiles, uint64_t *bitmaps, int64_t chunk_keys, ba_walk *walks);

/* The walk whose next key is the lowest, so that walks over overlapping lists find their keys in cache; -1: all walks are at their end. */
int ba_next_walk(const ba_walk *walks, int n);

#endif
