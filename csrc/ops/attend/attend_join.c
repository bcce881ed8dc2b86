/* Parts of the keys of one sequence: keeps the states that each part leaves, and joins them. */
#include <assert.h>
#include <string.h>

#include "ops/attend/attend_call.h"

/* Bytes of the states of one part of one (batch, KV head): o of few_lanes queries, then their m, then their l. */
static int64_t part_bytes(const ba_attend_call *c) {
    return ba_round_up(c->plan.few_lanes * (BA_FEW_PAD(c->problem->v_dim) + 2) * c->family->real_size, BA_ALIGN);
}

/* The states of one part, from query `lane` of the group on, as a panel. */
static ba_panel part_panel(const ba_attend_call *c, int64_t batch, int64_t kv_head, int64_t part, int64_t lane) {
    const int64_t real_size = c->family->real_size, pad = BA_FEW_PAD(c->problem->v_dim), room = c->plan.few_lanes;
    char *base = c->parts + c->part_offset[batch] + (kv_head * ba_plan_parts(&c->plan, batch) + part) * part_bytes(c);
    return (ba_panel){
        .o = base + lane * pad * real_size, .m = base + (room * pad + lane) * real_size, .l = base + (room * (pad + 1) + lane) * real_size};
}

int64_t ba_lay_out_parts(const ba_attend_call *c, int64_t *offset) {
    int64_t bytes = 0;
    for (int64_t b = 0; b < c->problem->batch; b++) {
        const int64_t parts = ba_plan_parts(&c->plan, b);
        if (offset) offset[b] = parts > 1 ? bytes : -1;
        if (parts > 1) bytes += parts * c->problem->kv_heads * part_bytes(c);
    }
    return bytes;
}

void ba_keep_part(const ba_attend_call *c, const ba_item *item, const ba_tile *tile, const ba_panel_state *s) {
    const int64_t real_size = c->family->real_size, pad = BA_FEW_PAD(c->problem->v_dim), group = c->problem->group;
    for (int64_t i = 0; i < s->lanes; i++) {
        const int64_t query = ba_lane_query(tile, s->lane + i), head = ba_lane_head(tile, s->lane + i);
        const ba_panel to = part_panel(c, item->batch, head / group, item->part, query * group + head % group);
        memcpy(to.o, (char *)s->panel.o + i * pad * real_size, (size_t)(pad * real_size));
        memcpy(to.m, (char *)s->panel.m + i * real_size, (size_t)real_size);
        memcpy(to.l, (char *)s->panel.l + i * real_size, (size_t)real_size);
    }
}

void ba_join_parts(void *context, int64_t index, int worker) {
    const ba_attend_call *c = context;
    const ba_problem *p = c->problem;
    const int64_t batch = index / p->kv_heads, kv_head = index % p->kv_heads;
    if (c->part_offset[batch] < 0) return;
    const int64_t parts = ba_plan_parts(&c->plan, batch), lanes = ba_q_span(p, batch).valid * p->group;
    assert(lanes <= c->plan.few_lanes && c->plan.few_lanes <= BA_MAX_LANES); /* ba_write_lanes() has room for so many */
    ba_attend_scratch w;
    ba_lay_out_attend_scratch(c, c->scratch + worker * c->scratch_bytes, &w);
    ba_panel_state s = {.panel = part_panel(c, batch, kv_head, 0, 0), .width = BA_PANEL_FEW, .lanes = lanes};
    for (int64_t part = 1; part < parts; part++) {
        const ba_panel from = part_panel(c, batch, kv_head, part, 0);
        c->few_family->few->join(&s.panel, &from, lanes, p->v_dim);
    }
    const ba_tile tile = {.head = kv_head * p->group, .heads = p->group, .lanes = lanes};
    ba_write_lanes(c, &w, batch, &tile, &s);
}
