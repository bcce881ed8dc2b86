/* Sets a forward call up: chooses the kernels, makes the plan, hands out memory, and runs the items. Kernels and numbers are looked up by the call's
 * level and by dtype, and no branch names a level or a dtype. attend_entry.c decides which family attends which batch entries, and calls
 * ba_attend_with(). */
#include "core/arena.h"
#include "core/status.h"
#include "kernels/prefetch_rows.h"
#include "kernels/work_tuning.h"
#include "ops/attend/attend_by_block.h"
#include "ops/attend/attend_call.h"

#include <assert.h>

/* ---- The call ----------------------------------------------------------------------------------------------------- */

bool ba_attends_kv_dtype(const ba_kernels *kernels, const ba_attend_family *family, const ba_problem *problem) {
    return problem->k_dtype == problem->dtype || (family->takes_scales && kernels->cache[problem->k_dtype]->widen);
}

static void choose_kernels(ba_attend_call *c, const ba_problem *p, ba_isa level) {
    const ba_kernels *kernels = ba_kernels_at(level);
    const ba_attend_family *f = c->family, *vectors = kernels->vector[p->dtype], *native = kernels->attend[p->dtype];
    const ba_cache_kernels *cache = kernels->cache[p->k_dtype], *v_cache = kernels->cache[p->v_dtype];
    const bool own = ba_attends_kv_dtype(kernels, f, p);
    c->fill_bias = vectors->panel->fill_bias;
    c->fill_few_bias = vectors->panel->fill_few_bias;
    c->widen = own && p->k_dtype != p->dtype ? cache->widen : NULL;
    assert(!c->widen || BA_WIDE_KEYS % f->key_pad == 0);
    c->pack_k = !own ? cache->pack : f->pack->keys ? f->pack->keys : c->widen;
    c->pack_v = !own ? v_cache->pack : f->pack->values ? f->pack->values : c->widen;
    /* The number of query heads per KV head decides, not the number of queries in a panel: the number of heads is the same whether they share lists
     * or not, and both kinds of lists must give the same bits. */
    const int64_t least_heads = ba_tuning_at(native->isa)->few_least_heads[p->k_dtype];
    c->own_few = native->few->attend[p->k_dtype] && least_heads > 0 && p->group >= least_heads;
    c->few_family = c->own_few ? native : f;
    c->few = c->own_few ? native->few->attend[p->k_dtype] : p->k_dtype == p->v_dtype ? cache->few : cache->few_beside[p->v_dtype - BA_Q8_0];
    c->pack_few = c->own_few ? native->few->pack_queries : vectors->few->pack_queries;
    c->order_few = c->own_few ? native->few->order_queries : cache->order_few;
}

/* Chooses the tuning numbers: those of the family's level, except that the numbers for few queries are those of the call's level. All numbers are
 * copied to `own`. */
static void choose_tuning(ba_attend_call *c, ba_isa level, ba_tuning *own) {
    const ba_tuning *of_level = ba_tuning_at(level);
    *own = *ba_tuning_at(c->family->isa);
    own->few = c->own_few && of_level->tile_few.keys ? of_level->tile_few : of_level->few;
    /* few_queries is the largest number of queries that few kernels attend; panels attend larger numbers of queries. Panels of the level's own family
     * are faster than others, so few_queries is smaller where the call uses panels of that family: where the call widens rows, or where the family
     * has kernels of its own for few queries. (It does not matter whether this call has enough heads for these kernels.) */
    const ba_dtype kv_dtype = c->problem->k_dtype;
    const bool own_panels = c->widen || (c->family->few->attend[kv_dtype] && of_level->few_least_heads[kv_dtype] > 0);
    own->few_queries = own_panels ? of_level->own_few_queries : of_level->few_queries;
    c->prefetch_level = ba_prefetch_level(level);
    c->few_prefetch = c->prefetch_level == BA_INTO_L2 ? &own->few.into_l2 : &own->few.into_l1;
    c->tuning = own;
}

/* Chooses the size of chunks. Without lists or without has_cuts, chunks are large. Otherwise, where a block row fits into one panel, chunks are
 * small, so that neighbouring block rows attend a key while it is in cache. Where a block row takes several panels, chunks are large, because every
 * chunk loads the states of all panels. Where a block row has fewer panels than a kernel call takes, panels of several chunks are collected for one
 * kernel call. */
static void choose_chunks(ba_attend_call *c) {
    c->chunk_keys = c->tuning->chunk_keys;
    c->chunks = 2;
    if (!c->problem->listed || !c->family->has_cuts) return;
    const int64_t panels = ba_ceil_div(c->plan.tiling.row_tokens * c->plan.tiling.shared_heads, c->family->lanes[BA_PANEL_WIDE]);
    if (panels == 1) c->chunk_keys = c->tuning->list_keys;
    if (panels < BA_MANY_PANELS) c->chunks += (int)(BA_MANY_PANELS / panels);
}

/* Whether rows are gathered before few queries attend them: yes where an item has a single KV head, whose rows are short and have the rows of other
 * heads between them. */
static bool gathers(const ba_attend_call *c) {
    const ba_problem *p = c->problem;
    const bool scattered = p->k.token_stride > p->k_width && p->v.token_stride > p->v_width;
    return scattered && c->plan.grouping.few_heads == 1 && ba_max(p->k_width, p->v_width) * p->kv_element_size <= c->tuning->few.gathered_bytes;
}

/* Decides whether items may share packed K and V, as far as that is known before the plan is made. */
static void choose_sharing(ba_attend_call *c) {
    /* There is room for packed keys in whole chunks of the tuning's size; the size of this call's chunks, which may be smaller, divides that size. */
    c->sharing = (ba_sharing){.plan = &c->plan,
                              .family = c->family,
                              .chunk_keys = c->tuning->chunk_keys,
                              .pack_keys = c->chunk_keys,
                              .page_offset = c->tuning->page_offset,
                              .least_pairs = 2.0 * (double)ba_plan_tile_lanes(&c->plan),
                              .k.pack = c->pack_k,
                              .v.pack = c->pack_v};
    /* Sharing packs with the family's own functions, without scales, and does not widen rows. */
    if (c->pack_k != c->family->pack->keys || c->widen || !ba_may_share(c->problem, c->family)) return;
    c->shared_bytes = ba_sharing_lay_out(&c->sharing, NULL);
    if (c->shared_bytes > c->tuning->shared_bytes) c->shared_bytes = 0;
}

static void attend_item(void *context, int64_t index, int worker) {
    const ba_attend_call *c = context;
    if (ba_plan_few_queries(&c->plan, c->plan.item[index].batch)) ba_attend_few(c, index, worker);
    else ba_attend_panels(c, index, worker);
}

/* Lays out the memory of a call. */
static int64_t lay_out_call(ba_attend_call *c, int threads, char *base) {
    const int64_t in_page = c->tuning->page_offset;
    int64_t used = 0;
    ba_plan_lay_out(&c->plan, threads, base, &used);
    int64_t *part_offset = ba_take(base, &used, c->problem->batch * (int64_t)sizeof(int64_t));
    c->part_offset = part_offset;
    c->parts = ba_take(base, &used, ba_lay_out_parts(c, part_offset));
    c->scratch = ba_take_in_page(base, &used, threads * c->scratch_bytes, in_page, 0);
    if (c->shared_bytes) ba_sharing_lay_out(&c->sharing, ba_take_in_page(base, &used, c->shared_bytes, in_page, 0));
    return used;
}

ba_status ba_attend_with(ba_isa level, const ba_attend_family *family, const ba_problem *problem, int threads) {
    if (ba_runs_by_block(problem) && problem->block_kv >= ba_work.by_block_keys)
        return ba_attend_by_block(problem, family->routed ? family : ba_kernels_at(level)->vector[problem->dtype], threads);

    ba_attend_call c = {.problem = problem, .family = family};
    ba_tuning tuning;
    choose_kernels(&c, problem, level);
    choose_tuning(&c, level, &tuning);
    c.plan = ba_plan_forward(problem, &tuning, family->lanes[BA_PANEL_WIDE], threads);
    choose_chunks(&c);
    choose_sharing(&c);
    c.gathers = gathers(&c);
    threads = (int)ba_min(threads, ba_max(1, c.plan.items)); /* threads that would find no item need no scratch memory */
    ba_attend_scratch unused;
    c.scratch_bytes = ba_round_up(ba_lay_out_attend_scratch(&c, NULL, &unused), tuning.page_offset ? BA_PAGE : BA_ALIGN);
    char *memory;
    BA_TRY(ba_get_scratch(lay_out_call(&c, threads, NULL), &memory));
    lay_out_call(&c, threads, memory);

    ba_status status = ba_plan_make(&c.plan, threads);
    if (status == BA_OK) {
        const double flops = c.plan.cost * 2 * (double)(problem->head_dim + problem->v_dim);
        if (ba_is_small(flops, tuning.inline_flops)) threads = 1;
        c.threads = threads;
        status = ba_share_kv(&c.sharing, threads);
    }
    if (status == BA_OK) status = ba_parallel(threads, c.plan.items, attend_item, &c);
    if (status == BA_OK && c.plan.parts_most > 1) status = ba_parallel(threads, problem->batch * problem->kv_heads, ba_join_parts, &c);
    ba_arena_release();
    return status;
}
