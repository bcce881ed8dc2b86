/* Chooses tokens: the best keys of each query, by the scores of an indexer. An indexer has several small heads, which share one key per token.
 *
 * The keys are the lanes of a panel, and the panel is multiplied by the heads of some queries as rows. The sum over heads is then vertical, and the
 * kernel sum_heads makes scores[query][lane]. Keys that may be among a query's best become candidates in a buffer, which has room for a little more
 * than twice as many as the result has places. From a full buffer the worst candidates are dropped, and from then on only scores above the best
 * dropped score are taken in. So no array has a score of each pair. Keys come in rising order, and a key loses against an earlier one with the same
 * score. Where blocks of keys are chosen, the largest score so far of one block waits until the block ends. */
#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "core/arena.h"
#include "core/float_mode.h"
#include "core/pool.h"
#include "core/status.h"
#include "kernels/work_tuning.h"
#include "ops/check.h"
#include "ops/kv_cache/pages.h"
#include "ops/nsa/nsa.h"
#include "ops/problem.h"
#include "ops/reals.h"
#include "ops/scratch.h"

typedef ba_scored_key candidate;

typedef struct select_tokens_call {
    const ba_select_tokens_args *args;
    ba_token_rows q, k, k_scale;
    int64_t sequences, heads, dim;
    bool quantised; /* k is of 8 bits, and k_scale has a number per key */
    bool paged;     /* k has shape (pages, tokens of a page, D), and block_tables lists the pages of each sequence */
    double scale;
    double floor;                                  /* the largest number that is below min_score; NAN: all scores are high enough */
    int64_t top_k, width;                          /* keys or blocks that a query gets; places per row of the result: with keep_tail, one more */
    int64_t most;                                  /* candidates that stay: top_k, or the number of blocks where that is smaller */
    int64_t room;                                  /* candidates per query */
    int64_t tile;                                  /* queries of an item */
    int64_t part_keys;                             /* keys of an item. Where there are several parts, each is whole blocks, or a multiple of the lanes
                                                    * where a block is one key */
    int64_t parts;                                 /* of each sequence; parts of shorter sequences may be empty */
    int64_t most_keys, most_blocks;                /* of the longest sequence */
    int64_t at_once;                               /* queries whose heads are scored together */
    int64_t *first_tile;                           /* [sequences + 1] */
    const ba_attend_family *panel_family, *family; /* the family that packs keys, and the one that packs queries and computes scores */
    ba_append_keys_fn append_keys;
    ba_move_better_fn move_better;
    ba_pack_rows_fn widen; /* makes rows for panel_family from 8-bit keys: reals, or bfloat16 where scales_scores */
    bool scales_scores;    /* scores are multiplied by the scales of 8-bit keys, which the widened keys do not carry */
    int next_level;        /* the cache into which rows are prefetched */
    int64_t real_size, lanes, scratch_bytes;
    char *scratch;
    candidate *best; /* with several parts: [tile][query][part][most] */
    int64_t *counts; /* the numbers of these candidates: [tile][query][part] */
} select_tokens_call;

/* The places of the keys of a panel. */
typedef struct panel_keys {
    int64_t first, count; /* the number of the first key in its sequence, and the number of keys */
    const void **rows;
    float *scales; /* of 8-bit keys */
} panel_keys;

/* The kernel that divides candidates, and its spare memory. */
typedef struct divider {
    ba_move_better_fn move_better;
    candidate *spare; /* room for the most candidates that are divided at a time */
} divider;

typedef struct select_tokens_scratch {
    const void **pointers, **rows, **wide_rows;
    panel_keys keys[2]; /* of the panel at hand and of the next one, which take turns */
    char *panel, *wide, *packed, *chunk, *sums, *weights;
    candidate *candidates; /* [query][room] */
    divider divider;
    int64_t *counts;  /* [query] */
    int64_t *seen;    /* [query]: how many keys, from the first on, the query may choose from */
    double *least;    /* [query]: only scores above this one are taken in; NAN: all are */
    double *largest;  /* [query]: the largest score so far of the block that has begun */
    uint64_t *chosen; /* a bit per block */
} select_tokens_scratch;

static int64_t dim_pad(const select_tokens_call *c) { return ba_round_up(BA_FEW_PAD(c->dim), c->panel_family->dim_pad); }

/* Bytes of the packed rows of the queries that are scored together. Rows follow each other, so that a group may have rows of several queries. */
static int64_t packed_bytes(const select_tokens_call *c) {
    const ba_attend_family *f = c->family;
    return f->pack->keys ? ba_round_up(c->at_once * c->heads, f->key_pad) * ba_round_up(c->dim, f->dim_pad) * f->pack_bytes : 0;
}

static int64_t lay_out_worker(const select_tokens_call *c, char *base, select_tokens_scratch *s) {
    const int64_t rows = c->at_once * c->heads, tile_rows = c->tile * c->heads, real = c->real_size;
    int64_t used = 0;
    s->pointers = ba_take(base, &used, tile_rows * (int64_t)sizeof(void *));
    s->rows = ba_take(base, &used, tile_rows * (int64_t)sizeof(void *));
    for (int i = 0; i < 2; i++) {
        s->keys[i].rows = ba_take(base, &used, c->lanes * (int64_t)sizeof(void *));
        s->keys[i].scales = ba_take(base, &used, c->quantised ? c->lanes * (int64_t)sizeof(float) : 0);
    }
    s->panel = ba_take(base, &used, c->lanes * dim_pad(c) * c->panel_family->q_bytes);
    s->wide_rows = ba_take(base, &used, c->quantised ? c->lanes * (int64_t)sizeof(void *) : 0);
    s->wide = ba_take(base, &used, c->quantised ? c->lanes * ba_round_up(c->dim, BA_PACK_PAD) * real : 0);
    s->packed = ba_take(base, &used, ba_ceil_div(c->tile, c->at_once) * packed_bytes(c));
    s->chunk = ba_take(base, &used, rows * c->family->scratch_per_key);
    s->sums = ba_take(base, &used, c->at_once * c->lanes * real);
    s->weights = ba_take(base, &used, tile_rows * real);
    s->candidates = ba_take(base, &used, c->tile * c->room * (int64_t)sizeof *s->candidates);
    s->divider = (divider){c->move_better, ba_take(base, &used, ba_max(c->room, 2 * c->most) * (int64_t)sizeof(candidate))};
    s->counts = ba_take(base, &used, c->tile * (int64_t)sizeof *s->counts);
    s->seen = ba_take(base, &used, c->tile * (int64_t)sizeof *s->seen);
    s->least = ba_take(base, &used, c->tile * (int64_t)sizeof *s->least);
    s->largest = ba_take(base, &used, c->tile * (int64_t)sizeof *s->largest);
    s->chosen = ba_take(base, &used, ba_ceil_div(c->most_blocks, 64) * (int64_t)sizeof *s->chosen);
    return used;
}

/* ---- Candidates ------------------------------------------------------------------------------------------------------- */

static bool is_better(const candidate *a, const candidate *b) { return a->score > b->score || (a->score == b->score && a->key < b->key); }

static bool comes_before(const candidate *a, const candidate *b, bool by_key) { return by_key ? a->key < b->key : is_better(a, b); }

static void swap(candidate *a, candidate *b) {
    const candidate other = *a;
    *a = *b;
    *b = other;
}

static int64_t split(const divider *d, candidate *all, int64_t n, int64_t low, int64_t high);

/* Picks a pivot among n candidates, which are all different, and moves all better candidates to the front, with the pivot right behind them. Returns
 * the place of the pivot, which is near `wanted` where n is at least LEAST_SAMPLED. */
static int64_t divide(const divider *d, candidate *all, int64_t n, int64_t wanted) {
    enum { SAMPLE = 32, LEAST_SAMPLED = 8 * SAMPLE };
    int64_t of_pivot = n / 2;
    candidate *last = all + n - 1;
    if (n >= LEAST_SAMPLED) { /* the pivot comes from a sample, which is moved to the front */
        for (int64_t i = 0; i < SAMPLE; i++) swap(all + i, all + i * (n / SAMPLE));
        of_pivot = split(d, all, SAMPLE, wanted * SAMPLE / n, wanted * SAMPLE / n);
    } else {
        if (is_better(all + of_pivot, all)) swap(all + of_pivot, all);
        if (is_better(last, all + of_pivot)) swap(last, all + of_pivot);
        if (is_better(all + of_pivot, all)) swap(all + of_pivot, all);
    }
    const candidate pivot = all[of_pivot];
    swap(all + of_pivot, last); /* to stay apart while the others move */
    const int64_t at = d->move_better(all, n - 1, pivot, d->spare);
    swap(all + at, last);
    return at;
}

/* Chooses a place from `low` to `high`, and moves candidates so that those before this place are better than the candidate at it, and those behind
 * are worse. Returns the place. All candidates are different; 0 <= low <= high < n. */
static int64_t split(const divider *d, candidate *all, int64_t n, int64_t low, int64_t high) {
    for (int64_t begin = 0, end = n;;) {
        const int64_t at = begin + divide(d, all + begin, end - begin, (low + high) / 2 - begin);
        if (at < low) begin = at + 1;
        else if (at > high) end = at;
        else return at;
    }
}

/* Moves the best `kept` of n candidates, which are all different, to the front. */
static void keep_best(const divider *d, candidate *all, int64_t n, int64_t kept) {
    if (kept > 0 && kept < n) split(d, all, n, kept - 1, kept);
}

/* Sorts candidates, the best first or, by_key, the lowest key first: by a heap whose root is the candidate that comes last. */
static void sort(candidate *all, int64_t n, bool by_key) {
    for (int64_t built = n / 2, end = n; end > 1;) {
        if (built > 0) built--;
        else swap(all, all + --end);
        for (int64_t at = built, child; (child = 2 * at + 1) < end; at = child) {
            if (child + 1 < end && comes_before(all + child, all + child + 1, by_key)) child++;
            if (!comes_before(all + at, all + child, by_key)) break;
            swap(all + at, all + child);
        }
    }
}

/* Sorts candidates, which are all different, the best first. Where `depth` divisions have been so uneven that n is still large, a heap sorts the
 * rest. */
static void sort_best(const divider *d, candidate *all, int64_t n, int depth) {
    enum { FEW = 12 };
    for (; n > FEW && depth > 0; depth--) {
        const int64_t at = divide(d, all, n, n / 2);
        sort_best(d, all + at + 1, n - at - 1, depth - 1);
        n = at;
    }
    if (n > FEW) {
        sort(all, n, false);
        return;
    }
    for (int64_t i = 1; i < n; i++)
        for (int64_t at = i; at > 0 && is_better(all + at, all + at - 1); at--) swap(all + at, all + at - 1);
}

/* Makes room for n more candidates of a query. The number of candidates that stay is left open, so that one division is enough most of the time. */
static void make_room(const select_tokens_call *c, const select_tokens_scratch *s, int64_t query, int64_t n) {
    if (s->counts[query] + n <= c->room) return;
    candidate *all = s->candidates + query * c->room;
    const int64_t kept = split(&s->divider, all, s->counts[query], c->most, ba_min(c->most + c->most / 4, c->room - n));
    s->counts[query] = kept;
    s->least[query] = all[kept].score;
}

/* Takes the scores of the first n lanes, of which lane 0 is key `first`. All candidates so far have lower keys. */
static void add_keys(const select_tokens_call *c, const select_tokens_scratch *s, int64_t query, const void *scores, int64_t n, int64_t first) {
    make_room(c, s, query, n);
    s->counts[query] += c->append_keys(s->candidates + query * c->room + s->counts[query], scores, n, first, s->least[query]);
}

/* The same where blocks are chosen: a block becomes a candidate when its last key has come. `end` is the end of the query's keys in this part. */
static void add_blocks(const select_tokens_call *c, const select_tokens_scratch *s, int64_t query, const void *scores, int64_t n, int64_t first,
                       int64_t end) {
    const int64_t size = c->args->block_size;
    for (int64_t i = 0; i < n;) {
        const int64_t block = (first + i) / size, block_end = ba_min(end, (block + 1) * size);
        double largest = s->largest[query];
        for (; i < ba_min(n, block_end - first); i++) {
            const double score = ba_get_real(scores, i, c->real_size);
            if (score > largest) largest = score; /* NaN is never larger */
        }
        s->largest[query] = largest;
        if (first + i < block_end) return;
        if (!(largest <= s->least[query])) {
            make_room(c, s, query, 1);
            s->candidates[query * c->room + s->counts[query]++] = (candidate){largest, (int32_t)block};
        }
        s->largest[query] = -INFINITY;
    }
}

/* ---- An item: the queries of a tile and the keys of a part ------------------------------------------------------------ */

typedef struct item_of_tokens {
    int64_t sequence, first, queries; /* the tile's first query in its sequence, and the number of its queries */
    int64_t begin, end;               /* the part's keys */
    int64_t tile, part;               /* the places of the tile and of the part in c->best */
} item_of_tokens;

static int64_t queries_of(const select_tokens_call *c, int64_t n) { return ba_sequence_length(c->args->cu_q, c->q.tokens, n); }
static int64_t valid_queries(const select_tokens_call *c, int64_t n) { return c->args->q_lens ? c->args->q_lens[n] : queries_of(c, n); }
static int64_t tokens_of(const select_tokens_call *c, int64_t n) {
    return c->args->kv_lens ? c->args->kv_lens[n] : ba_sequence_length(c->args->cu_kv, c->k.tokens, n) * c->args->pool_size;
}
/* The number of keys that may be chosen: only complete pools have a key. */
static int64_t keys_of(const select_tokens_call *c, int64_t n) { return tokens_of(c, n) / c->args->pool_size; }

/* How many tokens, from the first on, a query sees. */
static int64_t tokens_seen(const select_tokens_call *c, int64_t n, int64_t query) {
    const int64_t tokens = tokens_of(c, n);
    if (query >= valid_queries(c, n)) return 0;
    if (!c->args->causal) return tokens;
    const int64_t begin = c->args->q_begin ? c->args->q_begin[n] : tokens - valid_queries(c, n);
    return ba_max(0, ba_min(tokens, begin + query + 1));
}

/* The most keys that one of the tile's queries i .. i + n - 1 may choose from. Queries behind the valid ones have none. */
static int64_t most_seen(const select_tokens_scratch *s, int64_t i, int64_t n) {
    int64_t most = 0;
    for (int64_t end = i + n; i < end; i++) most = ba_max(most, s->seen[i]);
    return most;
}

/* The element of weights, selected or scores where a query's row begins. */
static int64_t row_of(const select_tokens_call *c, const ba_tensor *t, int64_t sequence, int64_t query) {
    return c->args->cu_q ? (c->args->cu_q[sequence] + query) * ba_step(t, 0) : sequence * ba_step(t, 0) + query * ba_step(t, 1);
}

static void open_rows(const select_tokens_call *c, const select_tokens_scratch *s, const item_of_tokens *at) {
    const ba_tensor *weights = &c->args->weights;
    const int64_t step = ba_step(weights, weights->ndim - 1);
    for (int64_t i = 0; i < at->queries; i++) {
        const int64_t row = row_of(c, weights, at->sequence, at->first + i);
        for (int64_t h = 0; h < c->heads; h++) {
            s->pointers[i * c->heads + h] = ba_sequence_row(&c->q, c->args->cu_q, at->sequence, at->first + i, h);
            ba_set_real(s->weights, i * c->heads + h, ba_get_real(weights->data, row + h * step, c->real_size), c->real_size);
        }
    }
    const int64_t rows = at->queries * c->heads, together = c->at_once * c->heads;
    char *packed = s->packed;
    for (int64_t i = 0; i < rows; i += together, packed += packed_bytes(c)) {
        const int64_t some = ba_min(together, rows - i);
        if (c->family->pack->keys) c->family->pack->keys(packed, s->rows + i, s->pointers + i, NULL, some, c->dim);
        else memcpy(s->rows + i, s->pointers + i, (size_t)some * sizeof *s->rows);
    }
}

/* Finds the keys of the item's panel that begins with key `first`. Behind the last panel there are no keys. */
static void find_keys(const select_tokens_call *c, const item_of_tokens *at, int64_t first, panel_keys *keys) {
    const int64_t n = ba_max(0, ba_min(c->lanes, at->end - first)), sequence = at->sequence;
    keys->first = first;
    keys->count = n;
    for (int64_t i = 0; i < n;) {
        int64_t batch = c->args->cu_kv ? 0 : sequence, row = first + i + (c->args->cu_kv ? c->args->cu_kv[sequence] : 0), end = n;
        if (c->paged) {
            batch = ba_table_page(&c->args->block_tables, sequence, row / c->k.tokens);
            row %= c->k.tokens;
            end = ba_min(n, i + c->k.tokens - row);
        }
        for (int64_t j = i; c->quantised && j < end; j++) keys->scales[j] = *(const float *)(const void *)ba_row(&c->k_scale, batch, row + j - i, 0);
        const char *from = ba_row(&c->k, batch, row, 0);
        for (int64_t j = 0; i < end; i++, j++) keys->rows[i] = from + j * c->k.token_step;
    }
}

/* Scores the keys of a panel for all queries of the tile, and prefetches the keys of the next panel. */
static void score_panel(const select_tokens_call *c, const select_tokens_scratch *s, const item_of_tokens *at, const panel_keys *keys,
                        const panel_keys *next) {
    const int64_t begin = keys->first;
    if (c->quantised) c->widen(s->wide, s->wide_rows, keys->rows, keys->scales, keys->count, c->dim);
    c->panel_family->pack->queries[0](s->panel, c->quantised ? s->wide_rows : keys->rows, keys->count, c->dim, c->scale);
    const ba_panel panel = {.q = s->panel};
    int64_t next_rows = next->count;
    for (int64_t i = 0; i < at->queries; i += c->at_once) {
        const int64_t queries = ba_min(c->at_once, at->queries - i);
        const ba_chunk chunk = {.keys = queries * c->heads,
                                .head_dim = c->dim,
                                .v_dim = 1,
                                .k_rows = s->rows + i * c->heads,
                                .k_next = next->rows,
                                .v_next = next->rows,
                                .next_rows = next_rows,
                                .k_next_bytes = c->dim * ba_dtype_size(c->k.dtype),
                                .next_level = c->next_level,
                                .scale = c->scale,
                                .scratch = s->chunk};
        const ba_head_sums heads = {.sums = s->sums,
                                    .weights = s->weights + i * c->heads * c->real_size,
                                    .scales = c->scales_scores ? keys->scales : NULL,
                                    .queries = queries,
                                    .heads = c->heads};
        if (most_seen(s, i, queries) <= begin) continue;
        c->family->panel->sum_heads(&panel, &chunk, &heads);
        next_rows = 0;
        for (int64_t q = 0; q < queries; q++) {
            const void *scores = s->sums + q * c->lanes * c->real_size;
            const int64_t seen = s->seen[i + q], n = ba_min(keys->count, seen - begin);
            if (c->args->block_size == 1) add_keys(c, s, i + q, scores, n, begin);
            else add_blocks(c, s, i + q, scores, n, begin, ba_min(at->end, seen));
        }
    }
}

/* Writes a query's best candidates as a row of the result, and behind them, with keep_tail, the pool that the query sees in part, if any. */
static void write_row(const select_tokens_call *c, const select_tokens_scratch *s, int64_t sequence, int64_t query, candidate *all, int64_t count) {
    const ba_tensor *selected = &c->args->selected, *scores = &c->args->scores;
    const int64_t kept = ba_min(count, c->most), to = row_of(c, selected, sequence, query), step = ba_step(selected, selected->ndim - 1);
    int32_t *keys = (int32_t *)selected->data + to;
    keep_best(&s->divider, all, count, kept);
    if (c->args->ascending && !ba_given(scores)) { /* by a bit per key, which is quicker than sorting */
        int64_t n = 0;
        for (int64_t i = 0; i < kept; i++) s->chosen[all[i].key / 64] |= UINT64_C(1) << all[i].key % 64;
        for (int64_t w = 0; n < kept; w++)
            for (; s->chosen[w]; s->chosen[w] &= s->chosen[w] - 1) keys[n++ * step] = (int32_t)(w * 64 + __builtin_ctzll(s->chosen[w]));
    } else {
        if (c->args->ascending) sort(all, kept, true);
        else sort_best(&s->divider, all, kept, 64);
        for (int64_t i = 0; i < kept; i++) keys[i * step] = all[i].key;
    }
    for (int64_t i = kept; i < c->width; i++) keys[i * step] = -1;
    const int64_t seen = tokens_seen(c, sequence, query), pool = c->args->pool_size;
    const bool has_tail = c->args->keep_tail && seen % pool != 0;
    if (has_tail) keys[kept * step] = (int32_t)(seen / pool);
    if (!ba_given(scores)) return;
    const int64_t row = row_of(c, scores, sequence, query), stride = ba_step(scores, scores->ndim - 1);
    for (int64_t i = 0; i < c->width; i++) ba_set_real(scores->data, row + i * stride, i < kept ? all[i].score : -INFINITY, c->real_size);
    if (has_tail) ba_set_real(scores->data, row + kept * stride, INFINITY, c->real_size);
}

static int64_t tiles_of(const select_tokens_call *c, int64_t n) { return ba_ceil_div(queries_of(c, n), c->tile); }

/* An item of tile number `tile` of the call, with its sequence and its queries; its part and its keys are not set. */
static item_of_tokens tile_at(const select_tokens_call *c, int64_t tile) {
    item_of_tokens at = {.tile = tile, .sequence = ba_sequence_at(c->first_tile, c->sequences, tile)};
    at.first = (tile - c->first_tile[at.sequence]) * c->tile;
    at.queries = ba_min(c->tile, queries_of(c, at.sequence) - at.first);
    return at;
}

static void score_item(void *context, int64_t item, int worker) {
    const select_tokens_call *c = context;
    item_of_tokens at = tile_at(c, item / c->parts);
    at.part = item % c->parts;
    at.begin = at.part * c->part_keys;
    at.end = ba_min(at.begin + c->part_keys, keys_of(c, at.sequence));
    select_tokens_scratch s;
    lay_out_worker(c, c->scratch + worker * c->scratch_bytes, &s);
    for (int64_t i = 0; i < at.queries; i++) {
        s.counts[i] = 0;
        s.seen[i] = tokens_seen(c, at.sequence, at.first + i) / c->args->pool_size;
        s.least[i] = c->floor;
        s.largest[i] = -INFINITY;
    }
    memset(s.chosen, 0, (size_t)ba_ceil_div(c->most_blocks, 64) * sizeof *s.chosen);
    at.end = ba_min(at.end, most_seen(&s, 0, at.queries));
    if (at.begin < at.end) open_rows(c, &s, &at);
    find_keys(c, &at, at.begin, s.keys);
    for (int turn = 0; s.keys[turn].count > 0; turn = !turn) {
        if (ba_stopped()) return;
        find_keys(c, &at, s.keys[turn].first + c->lanes, s.keys + !turn);
        score_panel(c, &s, &at, s.keys + turn, s.keys + !turn);
    }
    for (int64_t i = 0; i < at.queries; i++) {
        candidate *all = s.candidates + i * c->room;
        if (c->parts == 1) {
            write_row(c, &s, at.sequence, at.first + i, all, s.counts[i]);
            continue;
        }
        const int64_t place = (at.tile * c->tile + i) * c->parts + at.part, kept = ba_min(s.counts[i], c->most);
        keep_best(&s.divider, all, s.counts[i], kept);
        c->counts[place] = kept;
        memcpy(c->best + place * c->most, all, (size_t)kept * sizeof *all);
    }
}

/* Finds the best of all parts for one query. */
static void join_item(void *context, int64_t item, int worker) {
    const select_tokens_call *c = context;
    const item_of_tokens at = tile_at(c, item / c->tile);
    const int64_t query = item % c->tile;
    if (query >= at.queries) return;
    select_tokens_scratch s;
    lay_out_worker(c, c->scratch + worker * c->scratch_bytes, &s);
    memset(s.chosen, 0, (size_t)ba_ceil_div(c->most_blocks, 64) * sizeof *s.chosen);
    candidate *all = c->best + item * c->parts * c->most;
    int64_t count = 0;
    for (int64_t part = 0; part < c->parts; part++) { /* moves the candidates of all parts together, and keeps the best */
        const int64_t some = c->counts[item * c->parts + part];
        memmove(all + count, all + part * c->most, (size_t)some * sizeof *all);
        keep_best(&s.divider, all, count + some, c->most);
        count = ba_min(count + some, c->most);
    }
    write_row(c, &s, at.sequence, at.first + query, all, count);
}

/* ---- The call ----------------------------------------------------------------------------------------------------------- */

/* Checks the lengths of keys, which count tokens. The last pool of each sequence may be incomplete, and then has no row. */
static ba_status check_kv_lens(const select_tokens_call *c) {
    const int64_t pool = c->args->pool_size, *lens = c->args->kv_lens;
    if (c->paged && !lens)
        return ba_fail(BA_ERROR_VALUE, BA_ARG("kv_lens") ": expected one length per sequence with " BA_ARG("block_tables") ", got none");
    if (c->paged && c->k.tokens < 1)
        return ba_fail(BA_ERROR_VALUE, BA_ARG("k") ": expected pages of at least 1 token, got %s", ba_shape_text(&c->args->k).chars);
    if (c->paged) return ba_check_table("block_tables", &c->args->block_tables, c->sequences, c->k.batch, "kv_lens", lens, pool, c->k.tokens);
    for (int64_t b = 0; lens && b < c->sequences; b++) {
        const int64_t limit = ba_sequence_length(c->args->cu_kv, c->k.tokens, b) * pool + pool - 1;
        if (lens[b] < 0 || lens[b] > limit)
            return ba_fail(BA_ERROR_VALUE, BA_ARG("kv_lens") ": expected lengths from 0 to %" PRId64 ", got %" PRId64 " at [%" PRId64 "]", limit,
                           lens[b], b);
    }
    return BA_OK;
}

/* Checks the weights of all queries that are valid: those of others do not count. */
static ba_status check_weights(const select_tokens_call *c) {
    const ba_tensor *t = &c->args->weights;
    const int64_t step = ba_step(t, t->ndim - 1), size = ba_dtype_size(t->dtype);
    for (int64_t b = 0, turn = 0; b < c->sequences; b++)
        for (int64_t i = 0; i < valid_queries(c, b); i++) {
            BA_TRY(ba_look_at_turn(turn++));
            for (int64_t h = 0, row = row_of(c, t, b, i); h < c->heads; h++) {
                const double weight = ba_get_real(t->data, row + h * step, size);
                if (!isfinite(weight))
                    return ba_fail(BA_ERROR_VALUE,
                                   BA_ARG("weights") ": expected finite numbers, got %s for head %" PRId64 " of query %" PRId64
                                                     " of sequence %" PRId64,
                                   ba_number_text(weight, t->dtype).chars, h, i, b);
            }
        }
    return BA_OK;
}

/* Checks k and k_scale, except for the number of packed keys. */
static ba_status take_keys(const ba_select_tokens_args *a, select_tokens_call *c) {
    const ba_tensor *k = &a->k, *scale = &a->k_scale;
    c->paged = ba_given(&a->block_tables);
    c->quantised = ba_is_quantised(k->dtype) && a->q.dtype != BA_FLOAT64;
    const bool packed = a->cu_q && !c->paged;
    const int rank = packed ? 2 : 3;
    const int64_t size = ba_dtype_size(k->dtype);
    if (c->quantised) BA_TRY(ba_check_cache_dtype("k", k));
    else BA_TRY(ba_check_float("k", k));
    if (k->ndim != rank)
        return ba_fail(BA_ERROR_VALUE, BA_ARG("k") ": expected shape %s, got %s",
                       c->paged ? "(num_blocks, page_size, D)"
                       : packed ? "(T, D)"
                                : "(B, Skv, D)",
                       ba_shape_text(k).chars);
    if (k->dtype != a->q.dtype && !c->quantised)
        return ba_fail(BA_ERROR_TYPE, BA_ARG("k") ": expected dtype %s like " BA_ARG("q") ", got %s", ba_dtype_name(a->q.dtype),
                       ba_dtype_name(k->dtype));
    if ((c->paged || packed) && k->dims[k->ndim - 1] != c->q.dim)
        return ba_fail(BA_ERROR_VALUE, BA_ARG("k") ": expected a last axis of %" PRId64 " like " BA_ARG("q") ", got %s", c->q.dim,
                       ba_shape_text(k).chars);
    if (!c->paged && !packed && (k->dims[2] != c->q.dim || k->dims[0] != c->q.batch))
        return ba_fail(BA_ERROR_VALUE, BA_ARG("k") ": expected %" PRId64 " batch entries and a last axis of %" PRId64 " like " BA_ARG("q") ", got %s",
                       c->q.batch, c->q.dim, ba_shape_text(k).chars);
    BA_TRY(ba_check_last_axis("k", k));
    BA_TRY(ba_check_extent("k", k));
    c->k = (ba_token_rows){.data = k->data,
                           .dtype = k->dtype,
                           .batch = packed ? 1 : k->dims[0],
                           .tokens = k->dims[rank - 2],
                           .heads = 1,
                           .dim = k->dims[rank - 1],
                           .batch_step = packed ? 0 : ba_step(k, 0) * size,
                           .token_step = ba_step(k, rank - 2) * size};
    const ba_tensor shape = {.dtype = BA_FLOAT32, .ndim = rank - 1, .dims = {k->dims[0], packed ? 0 : k->dims[1]}};
    if (!c->quantised)
        return !ba_given(scale) ? BA_OK
                                : ba_fail(BA_ERROR_VALUE, BA_ARG("k_scale") ": expected none with %s " BA_ARG("k") ", got shape %s",
                                          ba_dtype_name(k->dtype), ba_shape_text(scale).chars);
    if (!ba_given(scale))
        return ba_fail(BA_ERROR_VALUE, BA_ARG("k_scale") ": expected shape %s for %s " BA_ARG("k") ", got none", ba_shape_text(&shape).chars,
                       ba_dtype_name(k->dtype));
    BA_TRY(ba_check_same("k_scale", scale, &shape, false));
    c->k_scale = (ba_token_rows){.data = scale->data,
                                 .batch_step = packed ? 0 : ba_step(scale, 0) * (int64_t)sizeof(float),
                                 .token_step = ba_step(scale, rank - 2) * (int64_t)sizeof(float)};
    return BA_OK;
}

static ba_status check_call(const ba_select_tokens_args *a, select_tokens_call *c) {
    const bool packed = a->cu_q != NULL;
    const int rank = packed ? 3 : 4;
    BA_TRY(ba_take_rows("q", &a->q, packed ? "(T, H, D)" : "(B, Sq, H, D)", packed, &c->q));
    BA_TRY(take_keys(a, c));
    c->heads = c->q.heads;
    c->dim = c->q.dim;
    if (c->heads > BA_MAX_CHUNK) return ba_fail(BA_ERROR_VALUE, BA_ARG("q") ": expected at most %d heads, got %" PRId64, BA_MAX_CHUNK, c->heads);
    if (a->pool_size < 1 || a->pool_size > BA_MOST_TOKENS)
        return ba_fail(BA_ERROR_VALUE, BA_ARG("pool_size") ": expected 1 to %d tokens, got %" PRId64, BA_MOST_TOKENS, a->pool_size);
    if (a->block_size < 1 || a->block_size > BA_MOST_TOKENS)
        return ba_fail(BA_ERROR_VALUE, BA_ARG("block_size") ": expected 1 to %d keys, got %" PRId64, BA_MOST_TOKENS, a->block_size);
    if (a->block_size > 1 && a->pool_size > 1)
        return ba_fail(BA_ERROR_VALUE, BA_ARG("block_size") ": expected 1 with a " BA_ARG("pool_size") " above 1, got %" PRId64, a->block_size);
    if (c->k.tokens > BA_MOST_TOKENS / a->pool_size)
        return ba_fail(BA_ERROR_VALUE, BA_ARG("k") ": expected at most %d tokens, got %" PRId64 " times %" PRId64, BA_MOST_TOKENS, c->k.tokens,
                       a->pool_size);
    if (c->q.tokens > BA_MOST_TOKENS)
        return ba_fail(BA_ERROR_VALUE, BA_ARG("q") ": expected at most %d tokens, got %" PRId64, BA_MOST_TOKENS, c->q.tokens);
    BA_TRY(ba_take_scale(a->q.dtype, c->dim, a->scale, &c->scale));
    c->sequences = c->q.batch;
    int64_t longest;
    if (packed) {
        BA_TRY(ba_check_cumulative("cu_seqlens_q", a->cu_q, a->batch, c->q.tokens, &longest));
        if (!c->paged) BA_TRY(ba_check_cumulative("cu_seqlens_kv", a->cu_kv, a->batch, c->k.tokens, &longest));
        c->sequences = a->batch;
    }
    if (c->paged && a->cu_kv) return ba_fail(BA_ERROR_VALUE, BA_ARG("cu_seqlens_kv") ": expected none with " BA_ARG("block_tables") ", got some");
    if (!packed && a->cu_kv) return ba_fail(BA_ERROR_VALUE, BA_ARG("cu_seqlens_kv") ": expected none without " BA_ARG("cu_seqlens_q") ", got some");
    if (packed && (a->q_lens || (a->kv_lens && a->pool_size == 1 && !c->paged)))
        return ba_fail(BA_ERROR_VALUE, BA_ARG("%s") ": expected none with packed arrays, whose cumulative lengths give the lengths, got some",
                       a->q_lens ? "q_lens" : "kv_lens");
    BA_TRY(ba_check_lengths("q_lens", a->q_lens, c->sequences, c->q.tokens));
    BA_TRY(check_kv_lens(c));
    BA_TRY(ba_check_begins(a->q_begin, c->sequences));
    BA_TRY(ba_check_threads(a->num_threads));
    ba_tensor shape = {.dtype = ba_real_of(a->q.dtype), .ndim = rank - 1, .dims = {a->q.dims[0], a->q.dims[1], packed ? 0 : a->q.dims[2]}};
    if (!ba_given(&a->weights)) return ba_fail(BA_ERROR_VALUE, BA_ARG("weights") ": expected one number per query and head, got none");
    BA_TRY(ba_check_same("weights", &a->weights, &shape, false));
    if (isinf(a->min_score))
        return ba_fail(BA_ERROR_VALUE, BA_ARG("min_score") ": expected a finite number, got %s", ba_number_text(a->min_score, BA_FLOAT64).chars);
    c->floor = nextafter(a->min_score, -INFINITY);
    c->width = a->selected.ndim == rank - 1 ? a->selected.dims[rank - 2] : 1;
    c->top_k = c->width - (a->keep_tail != 0);
    if (c->top_k < 1)
        return ba_fail(BA_ERROR_VALUE, BA_ARG("selected") ": expected a last axis of at least %d, got %s", a->keep_tail ? 2 : 1,
                       ba_shape_text(&a->selected).chars);
    shape.dims[rank - 2] = c->width;
    if (ba_given(&a->scores)) BA_TRY(ba_check_output("scores", &a->scores, &shape, false));
    shape.dtype = BA_INT32;
    BA_TRY(ba_check_output("selected", &a->selected, &shape, false));
    return check_weights(c);
}

/* Lays out the memory of a call with this many workers. */
static int64_t lay_out_call(select_tokens_call *c, int threads, int64_t rows, char *base) {
    int64_t used = 0;
    c->first_tile = ba_take(base, &used, (c->sequences + 1) * (int64_t)sizeof *c->first_tile);
    c->best = ba_take(base, &used, c->parts > 1 ? rows * c->parts * c->most * (int64_t)sizeof *c->best : 0);
    c->counts = ba_take(base, &used, c->parts > 1 ? rows * c->parts * (int64_t)sizeof *c->counts : 0);
    c->scratch = ba_take(base, &used, threads * c->scratch_bytes);
    return used;
}

/* Cuts queries into tiles and keys into parts, and finds the number of threads. */
static int cut_call(select_tokens_call *c, int64_t *tiles) {
    double work = 0;
    int64_t most_queries = 1;
    for (int64_t b = 0; b < c->sequences; b++) {
        c->most_keys = ba_max(c->most_keys, keys_of(c, b));
        most_queries = ba_max(most_queries, queries_of(c, b));
        work += (double)queries_of(c, b) * (double)keys_of(c, b) * (double)(c->heads * c->dim);
    }
    /* a kernel that needs no scratch for its scores takes all queries of an item in one call */
    const int64_t rows = c->family->scratch_per_key ? ba_work.tokens.rows : ba_work.tokens.tile_rows;
    c->at_once = ba_min(most_queries, ba_max(1, rows / c->heads));
    c->tile = ba_min(most_queries, c->at_once * ba_max(1, ba_work.tokens.tile_rows / (c->at_once * c->heads)));
    *tiles = 0;
    for (int64_t b = 0; b < c->sequences; b++) *tiles += tiles_of(c, b);
    c->most_blocks = ba_ceil_div(c->most_keys, c->args->block_size);
    c->parts = 1;
    c->part_keys = ba_max(1, c->most_keys);
    const int threads = ba_is_small(work, ba_work.small_products) ? 1 : ba_threads_for(c->args->num_threads);
    if (*tiles > 0 && *tiles < threads * ba_work.tokens.tiles) { /* so few tiles that threads share the keys of each tile */
        const int64_t panels = ba_ceil_div(c->most_keys, c->lanes), least = ba_ceil_div(ba_work.tokens.part_keys, c->lanes);
        const int64_t wanted = ba_min(ba_ceil_div(threads * ba_work.tokens.tiles, *tiles), panels / ba_max(1, least));
        c->part_keys = ba_round_up(ba_max(1, ba_ceil_div(panels, ba_max(1, wanted))) * c->lanes, c->args->block_size);
        c->parts = ba_max(1, ba_ceil_div(c->most_keys, c->part_keys));
    }
    c->most = ba_max(1, ba_min(c->top_k, c->most_blocks));
    c->room = ba_min(2 * c->most + c->lanes, ba_max(1, c->most_blocks));
    return threads;
}

ba_status ba_select_tokens(const ba_select_tokens_args *args) {
    BA_IN_USUAL_MODE;
    BA_TRY(ba_check_pointer("args", args));
    select_tokens_call c = {.args = args};
    BA_TRY(check_call(args, &c));
    for (int i = 0; i < args->selected.ndim; i++)
        if (args->selected.dims[i] == 0) return BA_OK;
    const ba_dtype real = ba_real_of(args->q.dtype);
    const ba_kernels *kernels = ba_kernels_active();
    const ba_attend_family *own = kernels->attend[args->q.dtype];
    const ba_cache_kernels *cache = kernels->cache[args->k.dtype];
    /* bfloat16 holds the numbers of 8-bit keys exactly, so that nothing is rounded where kernels multiply bfloat16 */
    c.scales_scores = c.quantised && args->q.dtype == BA_BFLOAT16 && own->panel->sum_heads && own->takes_scales && cache->widen;
    c.family = own->panel->sum_heads && (!c.quantised || c.scales_scores) ? own : kernels->vector[args->q.dtype];
    c.panel_family = c.quantised && !c.scales_scores ? kernels->vector[real] : c.family;
    c.widen = c.scales_scores ? cache->widen : cache->pack;
    c.append_keys = kernels->vector[real]->panel->append_keys;
    c.move_better = kernels->vector[real]->panel->move_better;
    c.next_level = cache->prefetch_level;
    c.real_size = c.family->real_size;
    c.lanes = c.family->lanes[0];
    int64_t tiles;
    int threads = cut_call(&c, &tiles);
    const int64_t items = tiles * c.parts, rows = tiles * c.tile;
    threads = items < threads ? (int)ba_max(1, items) : threads;
    select_tokens_scratch unused;
    c.scratch_bytes = lay_out_worker(&c, NULL, &unused);
    char *memory;
    BA_TRY(ba_get_scratch(lay_out_call(&c, threads, rows, NULL), &memory));
    lay_out_call(&c, threads, rows, memory);
    c.first_tile[0] = 0;
    for (int64_t b = 0; b < c.sequences; b++) c.first_tile[b + 1] = c.first_tile[b] + tiles_of(&c, b);
    ba_status status = ba_parallel(threads, items, score_item, &c);
    if (status == BA_OK && c.parts > 1) status = ba_parallel(threads, rows, join_item, &c);
    ba_arena_release();
    return status;
}
