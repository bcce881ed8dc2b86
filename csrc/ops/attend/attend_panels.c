/* Runs an item of panels: tiles of many queries of one KV head, which walk their lists side by side. */
#include <assert.h>
#include <string.h>

#include "core/pool.h"
#include "ops/attend/attend_call.h"
#include "ops/plan/bias.h"

/* The rows of the next chunk. Each panel that attends the current chunk prefetches its share of them. */
typedef struct share {
    const ba_chunk_rows *rows; /* NULL: there is no next chunk */
    int64_t panels, panel;     /* how many panels there are, and the index of the next one that gets a share */
} share;

static void share_out(share *s, ba_chunk *chunk) {
    if (!s->rows) return;
    const int64_t begin = s->rows->keys * s->panel / s->panels, end = s->rows->keys * (s->panel + 1) / s->panels;
    chunk->k_next = s->rows->k_rows + begin;
    chunk->v_next = s->rows->v_rows + begin;
    chunk->next_rows = end - begin;
    s->panel++;
}

/* Panels of one width that are collected for one kernel call. No panel may be in a batch twice. */
typedef struct batch {
    ba_panel_width width;
    int64_t n;
    uint64_t walks; /* one bit per walk: whether panels of its tiles are collected */
    int older;      /* how many chunks before the current one may have panels here */
    ba_panel *panels;
    ba_chunk *chunks;
} batch;

/* Runs the kernel on the collected panels. */
static void flush(const ba_attend_call *c, batch *many) {
    const ba_attend_family *f = c->family;
    if (many->n && f->panel->attend_many[many->width]) f->panel->attend_many[many->width](many->panels, many->chunks, many->n);
    else
        for (int64_t i = 0; i < many->n; i++) f->panel->attend[many->width](&many->panels[i], &many->chunks[i]);
    many->n = 0;
    many->walks = 0;
    many->older = 0;
}

/* Collects the panels of a tile that see keys of the chunk. */
static void attend_tile(const ba_attend_call *c, const ba_attend_scratch *w, int64_t batch_entry, ba_tile_state *t, const ba_chunk *whole,
                        share *next, batch *many) {
    for (int n = 0; n < t->panels; n++) {
        ba_panel_state *s = &t->panel[n];
        ba_panel panel;
        ba_chunk chunk = *whole;
        if (!ba_cut_to_seen(c, s, &panel, &chunk)) continue;
        if (ba_has_bias(c->problem)) flush(c, many); /* there is memory for the bias of one panel only */
        if (!ba_bias_chunk(c, w, batch_entry, &t->tile, s, 0, &chunk)) continue;
        s->panel.fresh = false;
        share_out(next, &chunk);
        chunk.fetch_values = next->panels == 1 && !c->pack_v;
        if (many->n == BA_MANY_PANELS || many->width != s->width) flush(c, many);
        many->width = s->width;
        many->walks |= (uint64_t)1 << t->walk;
        many->panels[many->n] = panel;
        many->chunks[many->n++] = chunk;
    }
}

/* How rows of K, or of V, are packed, and where to. */
typedef struct pack_job {
    ba_pack_rows_fn pack; /* NULL: rows are not packed */
    char *packed;
    const void **packed_rows;
    const float *scales;
    int64_t dim;
} pack_job;

/* Packs all rows of the chunk except the first `shared`, which are packed already. Returns the pointers that the kernel is given. */
static const void *const *pack_others(const ba_attend_call *c, const ba_attend_scratch *w, const pack_job *job, const void *const *rows,
                                      int64_t shared, int64_t others) {
    if (!job->pack || !others) return rows;
    const void **packed_rows = job->packed_rows + shared;
    memcpy(job->packed_rows, rows, (size_t)shared * sizeof *rows);
    rows += shared;
    if (!c->widen || job->pack == c->widen) {
        job->pack(job->packed, packed_rows, rows, job->scales, others, job->dim);
        return job->packed_rows;
    }
    const int64_t row_bytes = ba_round_up(job->dim, c->family->dim_pad) * c->family->pack_bytes;
    for (int64_t j = 0; j < others; j += BA_WIDE_KEYS) {
        const void *wide_rows[BA_WIDE_KEYS];
        const int64_t keys = ba_min(BA_WIDE_KEYS, others - j);
        c->widen(w->wide, wide_rows, rows + j, NULL, keys, job->dim);
        job->pack(job->packed + j * row_bytes, packed_rows + j, wide_rows, NULL, keys, job->dim);
    }
    return job->packed_rows;
}

/* The tiles that walk the chunk's list attend the chunk. These tiles see no keys outside `range`. `next` is the chunk that follows, or NULL. */
static void attend_chunk(const ba_attend_call *c, const ba_attend_scratch *w, const ba_item *item, const ba_range *range, const ba_chunk_rows *here,
                         const ba_chunk_rows *next, batch *many) {
    const ba_problem *p = c->problem;
    assert(!many->n || !c->widen); /* panels that are collected need the scales of their own chunk */
    ba_fetch_scales(c, w, 0, 1, here);
    ba_chunk chunk = ba_head_chunk(c, w, 0, 0, here);
    int64_t skip = 0;
    if (chunk.key_index[0] < range->lo) { /* keys before the first visible one need not be packed */
        skip = ba_min(ba_first_at_least(chunk.key_index, chunk.keys, range->lo), chunk.keys - 1);
        skip -= skip % c->family->key_align;
        ba_skip_keys(&chunk, skip);
    }
    const int64_t shared = ba_max(0, here->shared - skip), others = chunk.keys - shared;
    /* The panels of this chunk cannot stay collected while the next chunk is attended in two cases: where w->chunk has slots for two chunks only, the
     * current and the next one, or where rows of this chunk are packed into memory that the rows of the next chunk need, too. */
    const bool alone = c->chunks == 2 || others;
    if (alone || many->walks >> here->walk & 1) flush(c, many);
    const pack_job k = {c->pack_k, w->packed_k, w->packed_k_rows, chunk.k_scale, p->head_dim},
                   v = {c->pack_v, w->packed_v, w->packed_v_rows, chunk.v_scale, p->v_dim};
    chunk.k_rows = pack_others(c, w, &k, chunk.k_rows, shared, others);
    chunk.v_rows = pack_others(c, w, &v, chunk.v_rows, shared, others);
    share shares = {next, 0, 0};
    for (int64_t i = 0; i < item->tiles; i++)
        if (w->tiles[i].walk == here->walk) shares.panels += w->tiles[i].panels;
    for (int64_t i = 0; i < item->tiles; i++)
        if (w->tiles[i].walk == here->walk) attend_tile(c, w, item->batch, &w->tiles[i], &chunk, &shares, many);
    if (alone) flush(c, many);
}

void ba_attend_panels(const ba_attend_call *c, int64_t index, int worker) {
    const ba_item *item = &c->plan.item[index];
    ba_attend_scratch w;
    ba_lay_out_attend_scratch(c, c->scratch + worker * c->scratch_bytes, &w);
    ba_walk walks[BA_MOST_ITEM_TILES];
    for (int64_t i = 0; i < item->tiles; i++) ba_open_tile(c, &w, item, i);
    const int walk_count = ba_begin_walks(&c->plan, item, w.tiles, w.bitmaps, c->chunk_keys, walks);

    batch many = {.panels = w.panels, .chunks = w.chunks};
    bool more = ba_next_chunk(c, item, walks, walk_count, &w.chunk[0]);
    for (int at = 0; more && !ba_stopped(); many.older++) {
        const ba_chunk_rows *here = &w.chunk[at];
        at = (at + 1) % c->chunks;
        if (many.older + 2 > c->chunks) flush(c, &many);
        more = ba_next_chunk(c, item, walks, walk_count, &w.chunk[at]);
        attend_chunk(c, &w, item, &walks[here->walk].range, here, more ? &w.chunk[at] : NULL, &many);
    }
    flush(c, &many);
    for (int64_t i = 0; i < item->tiles; i++)
        for (int n = 0; n < w.tiles[i].panels; n++) ba_write_lanes(c, &w, item->batch, &w.tiles[i].tile, &w.tiles[i].panel[n]);
}
