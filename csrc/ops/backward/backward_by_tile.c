/* Gradients of tiles that walk their lists side by side, chunk by chunk. */
#include <assert.h>

#include "core/pool.h"
#include "ops/backward/backward_call.h"

int64_t ba_backward_by_tile_bytes(const ba_backward_call *c) {
    ba_backward_scratch unused;
    return ba_lay_out_backward_scratch(c, c->plan.grouping.tiles, NULL, &unused);
}

/* Opens a tile: adds its panels and sets the keys that their lanes see. */
static void open_tile(const ba_backward_call *c, const ba_backward_scratch *w, const ba_item *item, int64_t index, ba_tile_state *t) {
    const ba_problem *p = c->problem;
    const int64_t real = c->family->real_size, pad_k = ba_padded(c, p->head_dim), pad_v = ba_padded(c, p->v_dim);
    t->head = 0;
    t->tile = ba_plan_tile(&c->plan, item->batch, item->kv_head, index);
    t->range = (ba_range){INT64_MAX, 0};
    t->panels = 0;
    int64_t at = (index - item->first_tile) * ba_gradient_tile_room(c);
    t->q = w->q_rows + at * pad_k * real;
    t->dout = w->dout_rows + at * pad_v * real;
    for (int64_t lane = 0; lane < t->tile.lanes; lane += t->panel[t->panels - 1].lanes)
        ba_open_gradient_lanes(c, w, item, t, ba_add_gradient_panel(c, w, t, lane, &at), c->problem->scale);
    assert(at <= (index - item->first_tile + 1) * ba_gradient_tile_room(c)); /* or the last panel would reach into the next tile's memory */
}

static void write_dq(const ba_backward_call *c, const ba_backward_scratch *w, const ba_item *item, const ba_tile_state *t) {
    for (int n = 0; n < t->panels; n++) {
        const ba_panel_state *s = &t->panel[n];
        ba_find_lanes(c->problem, &c->gradients->dq, item->batch, &t->tile, s->lane, s->lanes, w->rows);
        ba_finish_dq(c, w, c->family->pack->finish[s->width], s, (void *const *)w->rows);
    }
}

/* Takes the keys of the next chunk of the walks; no keys where all walks are over. */
static void take_chunk(const ba_backward_call *c, const ba_item *item, ba_walk *walks, int walk_count, ba_gradient_rows *rows) {
    rows->walk = ba_next_walk(walks, walk_count);
    rows->keys = rows->walk < 0 ? 0 : ba_walk_take(&walks[rows->walk], rows->key_index);
    ba_find_gradient_rows(c, item, rows);
}

void ba_backward_by_tile(void *context, int64_t index, int worker) {
    const ba_backward_call *c = context;
    const ba_item *item = &c->plan.item[index];
    ba_backward_scratch w;
    ba_lay_out_backward_scratch(c, c->plan.grouping.tiles, c->scratch + worker * c->scratch_bytes, &w);
    ba_walk walks[BA_MOST_ITEM_TILES];
    for (int64_t i = 0; i < item->tiles; i++) open_tile(c, &w, item, item->first_tile + i, &w.tiles[i]);
    const int walk_count = ba_begin_walks(&c->plan, item, w.tiles, w.bitmaps, c->tuning->gradient_keys, walks);
    for (int64_t i = 0; i < item->tiles; i++) {
        ba_clear_dq(c, &w.tiles[i]);
        if (walks[w.tiles[i].walk].key == BA_WALK_END) continue; /* its queries see no key */
        ba_find_lanes(c->problem, &c->problem->q, item->batch, &w.tiles[i].tile, 0, w.tiles[i].tile.lanes, w.rows);
        ba_find_lanes(c->problem, &c->gradients->dout, item->batch, &w.tiles[i].tile, 0, w.tiles[i].tile.lanes, w.more_rows);
        ba_pack_gradient_tile(c, &w, &w.tiles[i]);
    }
    ba_gradient_rows *now = &w.chunk_rows[0], *next = &w.chunk_rows[1];
    take_chunk(c, item, walks, walk_count, now);
    while (now->keys > 0 && !ba_stopped()) {
        ba_turn_pass(c->turns, index, now->key_index[0]);
        take_chunk(c, item, walks, walk_count, next);
        const ba_chunk chunk = ba_open_gradient_chunk(c, &w, item, now, next);
        bool turn = false;
        const ba_tile_state *tiles[BA_MOST_ITEM_TILES];
        int64_t count = 0;
        for (int64_t i = 0; i < item->tiles; i++)
            if (w.tiles[i].walk == now->walk) tiles[count++] = &w.tiles[i];
        ba_run_gradient_tiles(c, &w, index, tiles, count, &chunk, &turn);
        ba_gradient_rows *const done = now;
        now = next;
        next = done;
    }
    ba_turn_pass(c->turns, index, BA_TURN_OVER);
    for (int64_t i = 0; i < item->tiles; i++) write_dq(c, &w, item, &w.tiles[i]);
}
