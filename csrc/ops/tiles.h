/* Query tiles at work: the states of their panels, what their lanes see, and the lists that the tiles of one item walk side by side. Forward and
 * backward drivers share them. Internal. */
#ifndef BA_OPS_TILES_H
#define BA_OPS_TILES_H

#include "ops/plan.h"
#include "ops/walk.h"

#define BA_LOG2_E 0x1.71547652b82fep+0

enum { BA_MOST_GROUP_TILES = 32 /* of an item */, BA_TILE_PANELS = 32 /* of a tile, at most */ };

typedef enum ba_panel_width { BA_PANEL_WIDE, BA_PANEL_NARROW, BA_PANEL_FEW } ba_panel_width; /* the first two index a family's arrays */

typedef struct ba_panel_state {
    union {
        ba_panel panel;             /* forward. lo and hi are always set here, and shown to a kernel only where a chunk needs them */
        ba_gradient_panel gradient; /* backward; the same */
    };
    ba_panel_width width;
    int64_t lane, lanes; /* of the tile: the first, and how many */
    ba_range any, all;   /* keys that some lane sees; keys that every lane sees */
} ba_panel_state;

typedef struct ba_tile_state {
    ba_tile tile;
    int64_t head;   /* its KV head, counted from the item's first */
    int walk;       /* index of the list that it walks */
    ba_range range; /* keys that some query sees */
    char *q, *dout; /* backward: rows, by pack_tile */
    bool finite_q, finite_dout;
    int panels;
    ba_panel_state panel[BA_TILE_PANELS];
} ba_tile_state;

/* A panel's lanes see nothing yet; then lane i sees `seen`; then lanes from `lanes` up to `room`, which have no query, see everything, so that they
 * need no mask, and the tile sees what the panel sees. lo and hi are the panel's bounds. */
void ba_open_lanes(ba_panel_state *s);
void ba_set_lane(ba_panel_state *s, int64_t i, ba_range seen, int32_t *lo, int32_t *hi);
void ba_close_lanes(const ba_panel_state *s, int64_t room, int32_t *lo, int32_t *hi, ba_tile_state *t);

/* True where all lanes see all of these keys: the panel then needs no bounds. */
static inline bool ba_lanes_see_all(const ba_panel_state *s, const int32_t *key_index, int64_t keys) {
    return key_index[0] >= s->all.lo && key_index[keys - 1] < s->all.hi;
}

/* Rows of q, out or a gradient of them, of `lanes` lanes of a tile from `lane` on. */
void ba_find_lanes(const ba_problem *p, const ba_view *view, int64_t batch, const ba_tile *tile, int64_t lane, int64_t lanes, const void **rows);

/* A walk of the item's part of a list, of which no key is seen yet; not begun. bitmap NULL: all keys. */
ba_walk ba_new_walk(const ba_plan *plan, const ba_item *item, const uint64_t *bitmap, int64_t chunk_keys);
/* Where the item's part of its list begins. */
int64_t ba_first_place(const ba_plan *plan, const ba_item *item);

/* Makes and begins the walks of an item's tiles: tiles with equal lists share one. bitmaps: room for plan->bitmap_words words per tile. Returns how
 * many walks there are. */
int ba_begin_walks(const ba_plan *plan, const ba_item *item, ba_tile_state *tiles, uint64_t *bitmaps, int64_t chunk_keys, ba_walk *walks);

/* The walk that is furthest behind, so that lists that overlap find their keys in cache; -1: all are at their end. */
int ba_next_walk(const ba_walk *walks, int n);

#endif
