/* Runs an item of few queries (decode). Reading memory limits the speed, so the rows that are read next are prefetched while keys are attended. A
 * tile of more queries than a kernel call takes has several panels, which take turns at each chunk of keys while it is in cache. */
#include "core/pool.h"
#include "ops/attend/attend_call.h"

/* Whether the heads of a token lie side by side in K and in V. The heads of an item then attend a chunk in one kernel call. */
static bool heads_are_beside(const ba_problem *p) {
    return ba_heads_are_beside(p->k.head_stride, p->k.token_stride, p->k_width) &&
           ba_heads_are_beside(p->v.head_stride, p->v.token_stride, p->v_width);
}

/* Bytes from the first to the last element of the rows of K (or V) of `heads` neighbouring heads of a token. */
static int64_t rows_bytes(const ba_problem *p, const ba_view *view, int64_t width, int64_t heads) {
    return ((heads - 1) * view->head_stride + width) * p->kv_element_size;
}

/* The distance of pass `which` of a prefetcher (ba_prefetch_tuning), in rows of `bytes` bytes. */
static int64_t rows_ahead(const ba_attend_call *c, int which, int64_t bytes) {
    return ba_min(c->tuning->few.keys, ba_ceil_div(c->few_prefetch->distances[which], bytes));
}

/* The largest distance of any pass, in rows of `bytes` bytes. */
static int64_t most_rows_ahead(const ba_attend_call *c, int64_t bytes) {
    int64_t most = 0;
    for (int i = 0; i < BA_PREFETCH_PASSES; i++) most = ba_max(most, rows_ahead(c, i, bytes));
    return most;
}

/* Sets `chunk` to the first rows of K of the item that this worker is likely to take next, as far as prefetches reach. Without lists, these rows are
 * known before that item begins. Returns false where there is no such item, or where its keys are not known. */
static bool guess_next_item(const ba_attend_call *c, int64_t index, ba_chunk_rows *chunk) {
    const ba_problem *p = c->problem;
    const int64_t next = index + c->threads;
    if (p->listed || next >= c->plan.items || !ba_plan_few_queries(&c->plan, c->plan.item[next].batch)) return false;
    const ba_item *item = &c->plan.item[next];
    ba_walk walk = ba_new_walk(&c->plan, item, NULL, c->tuning->few.keys);
    walk.range = (ba_range){ba_keys_in_place(p, item->batch, 0).lo, ba_keys_in_place(p, item->batch, ba_q_span(p, item->batch).valid - 1).hi};
    ba_walk_begin(&walk, ba_first_place(&c->plan, item));
    if (walk.key == BA_WALK_END) return false;
    const int64_t bytes = rows_bytes(p, &p->k, p->k_width, heads_are_beside(p) ? item->kv_heads : 1);
    walk.chunk_keys = ba_min(walk.chunk_keys, most_rows_ahead(c, bytes));
    chunk->keys = ba_walk_take(&walk, chunk->key_index);
    chunk->shared = 0;
    ba_find_k_rows(c, item, chunk);
    return true;
}

/* Rows of K, or of V, that a few kernel reads one after the other: the rows of one head, or of heads that lie side by side. */
typedef struct row_run {
    const void **rows; /* [keys]: rows of the item's first head */
    int64_t keys;
    int64_t offset; /* bytes from each of these rows to the row that is read */
    int64_t bytes;  /* of a row that is read */
} row_run;

/* The rows to prefetch while `now` is read: first the rows of `now`, except its first rows, which lie nearer than any pass reaches, and then the
 * first rows of `then`, which is read next. The pointers to the rows of `then` are written behind those of now->rows, so that one array has all
 * pointers. A prefetcher adds the offset of `now` to every pointer, so this offset is subtracted from the pointers to rows of `then`. */
static ba_prefetch_rows find_ahead(const ba_attend_call *c, const row_run *now, const row_run *then) {
    const int64_t more = then->keys ? ba_min(then->keys, most_rows_ahead(c, then->bytes)) : 0, all = now->keys + more;
    const int64_t nearest = rows_ahead(c, 0, now->bytes), begin = ba_min(nearest, all);
    for (int64_t j = 0; j < more; j++) now->rows[now->keys + j] = (const char *)then->rows[j] + then->offset - now->offset;
    ba_prefetch_rows ahead = ba_prefetch_once(now->rows + begin, all - begin, now->offset, now->bytes);
    ahead.others = ba_min(more, ahead.count);
    ahead.other_bytes = then->bytes;
    for (int i = 1; i < BA_PREFETCH_PASSES; i++)
        if (c->few_prefetch->distances[i]) ahead.skip[i] = rows_ahead(c, i, now->bytes) - nearest;
    return ahead;
}

/* Sets the rows that the kernel call for heads first .. first + heads - 1 prefetches: these heads' rows of K, then their rows of V, and then the rows
 * of K of the next heads or of the next chunk. */
static void prefetch_ahead(const ba_attend_call *c, const ba_attend_scratch *w, const ba_item *item, int64_t first, int64_t heads,
                           const ba_chunk_rows *here, const ba_chunk_rows *next) {
    const ba_problem *p = c->problem;
    const int64_t size = p->kv_element_size, k_step = p->k.head_stride * size;
    const int64_t k_bytes = rows_bytes(p, &p->k, p->k_width, heads), v_bytes = rows_bytes(p, &p->v, p->v_width, heads);
    const bool more = first + heads < item->kv_heads;
    const row_run k = {here->k_rows, here->keys, first * k_step, k_bytes}, v = {here->v_rows, here->keys, first * p->v.head_stride * size, v_bytes};
    row_run then = {0};
    if (more) then = (row_run){here->k_rows, here->keys, (first + heads) * k_step, k_bytes};
    else if (next) then = (row_run){next->k_rows, next->keys, 0, k_bytes};
    w->chunks->k_prefetch = find_ahead(c, &k, &v);
    w->chunks->v_prefetch = find_ahead(c, &v, &then);
}

/* Sets w->panels and w->chunks for one kernel call: for each of the heads first .. first + heads - 1, panel `number` of its tile `i`, and the keys of
 * the chunk that this panel sees. Returns the number of heads, or 0 where the panel sees no key. */
static int64_t collect_heads(const ba_attend_call *c, const ba_attend_scratch *w, const ba_item *item, int64_t i, int number, int64_t first,
                             int64_t heads, const ba_chunk_rows *here) {
    int64_t n = 0;
    for (int64_t head = first; head < first + heads; head++) {
        const ba_tile_state *t = &w->tiles[head * item->tiles + i];
        const ba_panel_state *s = &t->panel[number];
        w->chunks[n] = ba_head_chunk(c, w, head, n, here);
        /* Panel `number` of each head sees the same keys, so that either all heads are left out here or none is. */
        if (!ba_cut_to_seen(c, s, &w->panels[n], &w->chunks[n])) continue;
        /* A head whose keys the bias hides is attended all the same, because the heads of a kernel call are evenly spaced in memory. */
        ba_bias_chunk(c, w, item->batch, &t->tile, s, n, &w->chunks[n]);
        n++;
    }
    return n;
}

/* The tiles that walk the chunk's list attend the chunk; heads whose rows lie side by side attend it in one kernel call. Where tiles have several
 * panels, the first call fetches the rows from memory, and the others find them in cache. `next` is the chunk that follows, or NULL. */
static void attend_chunk(const ba_attend_call *c, const ba_attend_scratch *w, const ba_item *item, const ba_chunk_rows *here,
                         const ba_chunk_rows *next) {
    const ba_problem *p = c->problem;
    const int64_t size = p->kv_element_size;
    const bool beside = heads_are_beside(p);
    const int64_t together = beside ? item->kv_heads : 1;
    const bool followed = beside && ba_min(p->k.token_stride, p->v.token_stride) * size >= c->tuning->few.followed_bytes;
    for (int64_t i = 0; i < item->tiles; i++) {
        const ba_tile_state *t = &w->tiles[i];
        if (t->walk != here->walk) continue;
        for (int64_t first = 0; first < item->kv_heads; first += together) {
            /* Gathering prefetches by itself; where the hardware's prefetcher follows the rows, no prefetch is needed. */
            bool prefetches = !c->gathers && !(followed && t->tile.lanes <= c->few_prefetch->followed_queries);
            ba_fetch_scales(c, w, first, together, here);
            for (int number = 0; number < t->panels; number++) {
                const int64_t n = collect_heads(c, w, item, i, number, first, together, here);
                if (!n) continue;
                if (c->gathers) w->chunks->gathered = w->gathered;
                if (prefetches) prefetch_ahead(c, w, item, first, together, here, next);
                prefetches = false;
                c->few(w->panels, t->panel[number].lanes, w->chunks, n);
            }
        }
    }
}

void ba_attend_few(const ba_attend_call *c, int64_t index, int worker) {
    const ba_item *item = &c->plan.item[index];
    const int64_t tiles = item->tiles * item->kv_heads;
    const bool whole = ba_plan_parts(&c->plan, item->batch) == 1;
    ba_attend_scratch w;
    ba_lay_out_attend_scratch(c, c->scratch + worker * c->scratch_bytes, &w);
    ba_walk walks[BA_MOST_ITEM_TILES];
    for (int64_t i = 0; i < tiles; i++) ba_open_tile(c, &w, item, i);
    const int walk_count = ba_begin_walks(&c->plan, item, w.tiles, w.bitmaps, c->tuning->few.keys, walks);

    bool more = ba_next_chunk(c, item, walks, walk_count, &w.chunk[0]);
    for (int at = 0; more && !ba_stopped();) {
        const ba_chunk_rows *here = &w.chunk[at];
        at = (at + 1) % c->chunks;
        more = ba_next_chunk(c, item, walks, walk_count, &w.chunk[at]);
        attend_chunk(c, &w, item, here, more || guess_next_item(c, index, &w.chunk[at]) ? &w.chunk[at] : NULL);
    }
    for (int64_t i = 0; i < tiles; i++)
        for (int n = 0; n < w.tiles[i].panels; n++) {
            if (whole) ba_write_lanes(c, &w, item->batch, &w.tiles[i].tile, &w.tiles[i].panel[n]);
            else ba_keep_part(c, item, &w.tiles[i].tile, &w.tiles[i].panel[n]);
        }
}
