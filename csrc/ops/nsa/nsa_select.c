/* The selection of native sparse attention: chooses the blocks that each query, or each tile of queries, attends.
 *
 * The rows of the result are the lanes of a panel. A chunk of compressed keys gives scores [key][lane], from which scores of blocks [block][lane] are
 * made for all lanes at once. Each lane's blocks with the highest scores are then chosen, for BA_CHOOSE_LIST_ROWS lanes at a time. A thread holds the
 * block scores of one panel at a time. */
#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "core/arena.h"
#include "core/float_mode.h"
#include "core/pool.h"
#include "core/status.h"
#include "kernels/work_tuning.h"
#include "ops/check.h"
#include "ops/levels.h"
#include "ops/nsa/nsa.h"
#include "ops/problem.h"
#include "ops/reals.h"
#include "ops/scratch.h"

typedef struct nsa_select_call {
    const ba_nsa_select_args *args;
    const int64_t *cu_k; /* args->cu_cmp; NULL where args->cu_q is NULL */
    ba_token_rows q, k;
    bool by_query; /* a row of the result is a query (args->tile is 0), and not a tile of queries */
    int64_t sequences, group;
    int64_t list_heads; /* heads of the result: KV heads where by_query, else query heads */
    int64_t dim;
    double scale;
    int64_t narrow, wide;      /* the lengths of a compressed block and of a selected block, in strides */
    int64_t lanes, chunk_keys; /* lanes of a wide panel */
    int64_t most_blocks;       /* blocks of the longest sequence */
    int64_t width, cmp_width;  /* entries per row of `selected` and of `selected_cmp` */
    const ba_kernels *kernels;
    const ba_attend_family *family; /* where has_own, the family of q's dtype; else the family of reals */
    bool has_own;                   /* the family of q's own dtype has add_probabilities, which is used */
    int64_t real_size;
    int64_t *first_row, *first_panel; /* [sequences + 1], where args->cu_q is given: the first row and panel of each sequence among those of a head */
    int64_t scratch_bytes;
    char *scratch;
} nsa_select_call;

typedef struct nsa_select_scratch {
    char *rows;                         /* [lane][dim_pad()] reals: the mean queries of tiles */
    char *wide, *weights;               /* for ba_sum_rows() */
    const void **pointers;              /* to queries, or to means */
    char *q, *m;                        /* panels of the heads whose probabilities are summed: packed queries, log-sum-exps */
    char *l, *alpha, *lowest, *row_max; /* of one panel */
    int32_t *lo, *hi, *key_index;
    char *packed_k;
    const void **k_rows, **packed_k_rows;
    char *chunk;    /* scores, then probabilities of a chunk: [key][lane] */
    char *sum;      /* probabilities summed over heads: [key][lane] */
    char *side;     /* has_own: probabilities of heads that lie side by side: [key][lane] */
    char *scores;   /* scores of blocks: [block][lane] */
    char *means;    /* mean scores of runs of compressed keys: [run][lane] */
    char *keys;     /* scratch of the kernel `choose`: [block][BA_CHOOSE_LIST_ROWS] */
    int32_t *lists; /* the blocks that `choose` chooses: [BA_CHOOSE_LIST_ROWS][width + 1] */
} nsa_select_scratch;

static int64_t dim_pad(const nsa_select_call *c) { return ba_round_up(BA_FEW_PAD(c->dim), c->family->dim_pad); }

/* Lays out the scratch memory of one worker. */
static int64_t lay_out_nsa_select(const nsa_select_call *c, char *base, nsa_select_scratch *s) {
    const int64_t real = c->real_size, lanes = c->lanes, pad = dim_pad(c), keys = c->chunk_keys;
    const int64_t tile = ba_max(ba_min(c->args->tile, c->q.tokens), 1), heads = c->by_query ? c->group : 1;
    const int64_t runs = c->cmp_width ? ba_ceil_div(c->most_blocks, c->args->cmp_group) : 0;
    int64_t used = 0;
    s->rows = ba_take(base, &used, lanes * pad * real);
    s->wide = ba_take(base, &used, BA_ROWS_AT_ONCE * pad * real);
    s->weights = ba_take(base, &used, tile * real);
    s->pointers = ba_take(base, &used, ba_max(tile, lanes) * (int64_t)sizeof(void *));
    s->q = ba_take(base, &used, heads * lanes * pad * c->family->q_bytes);
    s->m = ba_take(base, &used, heads * lanes * real);
    s->l = ba_take(base, &used, lanes * real);
    s->alpha = ba_take(base, &used, lanes * real);
    s->lowest = ba_take(base, &used, lanes * real);
    s->row_max = ba_take(base, &used, lanes * real);
    s->lo = ba_take(base, &used, lanes * (int64_t)sizeof(int32_t));
    s->hi = ba_take(base, &used, lanes * (int64_t)sizeof(int32_t));
    s->key_index = ba_take(base, &used, keys * (int64_t)sizeof(int32_t));
    s->packed_k = ba_take(base, &used, keys * pad * real);
    s->k_rows = ba_take(base, &used, keys * (int64_t)sizeof(void *));
    s->packed_k_rows = ba_take(base, &used, keys * (int64_t)sizeof(void *));
    s->chunk = ba_take(base, &used, keys * ba_max(c->family->scratch_per_key, lanes * real));
    s->sum = ba_take(base, &used, c->by_query ? keys * lanes * real : 0);
    s->side = ba_take(base, &used, c->has_own ? keys * lanes * real : 0);
    s->scores = ba_take(base, &used, c->most_blocks * lanes * real);
    s->means = ba_take(base, &used, runs * lanes * real);
    s->keys = ba_take(base, &used, c->most_blocks * BA_CHOOSE_LIST_ROWS * real);
    s->lists = ba_take(base, &used, BA_CHOOSE_LIST_ROWS * (ba_max(c->width, c->cmp_width) + 1) * (int64_t)sizeof(int32_t));
    return used;
}

/* ---- One sequence and its rows -------------------------------------------------------------------------------------- */

/* The rows of the result that one item computes: one panel of one head. */
typedef struct item_rows {
    int64_t sequence, head; /* a KV head where by_query, else a query head */
    int64_t earlier;        /* rows of all sequences before this one, in packed results */
    int64_t first, rows;    /* rows of the sequence's result: the first one, and how many; row first + i is lane i of the panel */
    int64_t queries, keys;  /* of the sequence: queries in this call, and compressed keys */
    int64_t begin;          /* token number of the sequence's query 0 */
    int64_t blocks;         /* blocks of the sequence that can be selected */
    int width;              /* of the panels: 0 wide, 1 narrow; select_item() decides */
    int64_t lanes;          /* of such a panel */
    int64_t side;           /* query heads whose rows lie side by side in a panel: several where the rows leave room for them */
} item_rows;

/* ba_complete_blocks() with the sizes of the call. */
static int64_t complete_blocks(const ba_nsa_select_args *a, int64_t tokens) {
    return ba_complete_blocks(tokens, a->compress_block, a->compress_stride);
}

static int64_t queries_of(const nsa_select_call *c, int64_t n) { return ba_sequence_length(c->args->cu_q, c->q.tokens, n); }
static int64_t rows_of(const nsa_select_call *c, int64_t n) { return c->by_query ? queries_of(c, n) : ba_ceil_div(queries_of(c, n), c->args->tile); }
static int64_t begin_of(const nsa_select_call *c, int64_t n) { return c->args->q_begin ? c->args->q_begin[n] : 0; }
static int64_t tokens_of(const nsa_select_call *c, int64_t n) { return c->args->tokens ? c->args->tokens[n] : queries_of(c, n); }
static int64_t keys_of(const nsa_select_call *c, int64_t n) { return complete_blocks(c->args, tokens_of(c, n)); }
static int64_t blocks_of(const nsa_select_call *c, int64_t n) {
    return c->by_query ? ba_ceil_div(tokens_of(c, n), c->args->select_block) : keys_of(c, n);
}

/* Packs the rows of an item into a panel: queries of `heads` heads from `head` on, or the mean queries of a head's tiles. */
static void pack_rows(const nsa_select_call *c, const nsa_select_scratch *s, const item_rows *at, int64_t head, int64_t heads, void *panel) {
    const int64_t pad = dim_pad(c), tile = c->args->tile;
    if (c->by_query) {
        const ba_attend_family *f = c->has_own ? c->family : c->kernels->vector[c->q.dtype];
        for (int64_t i = 0; i < heads * at->rows; i++)
            s->pointers[i] = ba_sequence_row(&c->q, c->args->cu_q, at->sequence, at->first + i % at->rows, head + i / at->rows);
        f->pack->queries[at->width](panel, s->pointers, heads * at->rows, c->dim, c->scale * BA_LOG2_E);
        return;
    }
    for (int64_t i = 0; i < at->rows; i++) {
        char *row = s->rows + i * pad * c->real_size;
        const int64_t begin = (at->first + i) * tile, n = ba_min(tile, at->queries - begin);
        for (int64_t t = 0; t < n; t++) {
            ba_set_real(s->weights, t, 1 / (double)n, c->real_size);
            s->pointers[t] = ba_sequence_row(&c->q, c->args->cu_q, at->sequence, begin + t, head);
        }
        memset(row, 0, (size_t)(pad * c->real_size));
        ba_sum_rows(c->kernels, c->q.dtype, s->pointers, s->weights, n, c->dim, s->wide, row);
    }
    for (int64_t i = 0; i < at->rows; i++) s->pointers[i] = s->rows + i * pad * c->real_size;
    c->family->pack->queries[0](panel, s->pointers, at->rows, c->dim, c->scale);
}

/* Opens the g-th panel, of `heads` heads from `head` on: lane h * rows + i is row i of head number h among these. Sets s->hi to the numbers of
 * compressed keys that the lanes see, and *most and *least to the largest and the smallest of these numbers. m becomes the log-sum-exp of each query,
 * so that softmax gives the query's probabilities. */
static ba_panel open_panel(const nsa_select_call *c, const nsa_select_scratch *s, const item_rows *at, int64_t head, int64_t heads, int64_t g,
                           int64_t *most, int64_t *least) {
    const ba_nsa_select_args *a = c->args;
    const ba_panel panel = {.q = s->q + g * at->lanes * dim_pad(c) * c->family->q_bytes, .m = s->m + g * at->lanes * c->real_size, .l = s->l};
    pack_rows(c, s, at, head, heads, panel.q);
    *most = 0;
    *least = at->keys;
    for (int64_t i = 0; i < at->lanes; i++) {
        /* All panels of the item use the same s->hi. The last panel may have fewer heads, so lanes behind its heads are set as for a further head. */
        const int64_t query = at->first + i % at->rows, token = at->begin + query;
        int64_t sees = at->keys;
        double lse = INFINITY; /* makes the probabilities 0 */
        if (c->by_query && a->causal)
            sees = token < a->compress_block - 1 ? 0 : ba_min(at->keys, (token - (a->compress_block - 1)) / a->compress_stride + 1);
        if (c->by_query && i < heads * at->rows) {
            const int64_t *steps = a->lse.strides, own = head + i / at->rows;
            const int64_t place =
                a->cu_q ? (a->cu_q[at->sequence] + query) * steps[0] + own * steps[1] : at->sequence * steps[0] + query * steps[1] + own * steps[2];
            lse = ba_get_real(a->lse.data, place, c->real_size) * BA_LOG2_E;
            if (lse == -INFINITY) lse = INFINITY;
        }
        s->lo[i] = 0;
        s->hi[i] = (int32_t)sees;
        *most = ba_max(*most, sees);
        *least = ba_min(*least, sees);
        ba_set_real(panel.m, i, lse, c->real_size);
        ba_set_real(panel.l, i, 0, c->real_size);
    }
    return panel;
}

/* ---- Scores ------------------------------------------------------------------------------------------------------------ */

/* Prepares `keys` compressed keys from `begin` on to be scored: finds and packs their rows. */
static ba_chunk open_chunk(const nsa_select_call *c, const nsa_select_scratch *s, const item_rows *at, int64_t kv_head, int64_t begin, int64_t keys) {
    const void **rows = s->k_rows;
    for (int64_t j = 0; j < keys; j++) {
        rows[j] = ba_sequence_row(&c->k, c->cu_k, at->sequence, begin + j, kv_head);
        s->key_index[j] = (int32_t)(begin + j);
    }
    const ba_pack_rows_fn pack = c->has_own ? c->family->pack->keys : c->kernels->cache[c->k.dtype]->pack;
    if (pack) {
        pack(s->packed_k, s->packed_k_rows, rows, NULL, keys, c->dim);
        rows = s->packed_k_rows;
    }
    return (ba_chunk){.keys = keys,
                      .head_dim = c->dim,
                      .v_dim = 1,
                      .k_rows = rows,
                      .v_rows = rows,
                      .key_index = s->key_index,
                      .scale = c->scale * BA_LOG2_E,
                      .scratch = s->chunk};
}

/* Adds probabilities to s->sum[key][row]. `from` has the probabilities of `heads` heads side by side, [key][head][row]. The heads are added one after
 * the other, which gives the bits that a panel for each head gives. */
static void add_side(const nsa_select_call *c, const nsa_select_scratch *s, const item_rows *at, int64_t heads, const char *from, int64_t keys) {
    const int64_t real = c->real_size, line = at->lanes * real;
    for (int64_t j = 0; j < keys; j++)
        for (int64_t h = 0; h < heads; h++) c->family->pack->add_reals(s->sum + j * line, from + j * line + h * at->rows * real, at->rows);
}

/* Adds the probabilities of a panel of `heads` heads to s->sum, where row i of the item is lane i. */
static void add_panel(const nsa_select_call *c, const nsa_select_scratch *s, const item_rows *at, const ba_panel *panel, const ba_chunk *chunk,
                      int64_t heads) {
    const int64_t all = chunk->keys * at->lanes;
    if (c->has_own) {
        if (at->side > 1) memset(s->side, 0, (size_t)(all * c->real_size));
        c->family->panel->add_probabilities(panel, chunk, (float *)(at->side > 1 ? s->side : s->sum));
        if (at->side > 1) add_side(c, s, at, heads, s->side, chunk->keys);
        return;
    }
    c->family->panel->scores[at->width](panel, chunk, s->row_max);
    c->family->panel->softmax[at->width](panel, chunk, s->lowest, s->alpha); /* `lowest` is never above m, so m stays the log-sum-exp */
    if (at->side > 1) add_side(c, s, at, heads, s->chunk, chunk->keys);
    else c->family->pack->add_reals(s->sum, s->chunk, all);
}

/* Scores blocks for rows that are queries: the probabilities of each compressed key, summed over the group's heads, are added to the blocks that the
 * key overlaps. */
static void score_by_query(const nsa_select_call *c, const nsa_select_scratch *s, const item_rows *at) {
    const int64_t real = c->real_size, line = at->lanes * real, head = at->head * c->group;
    int64_t most = 0, least = 0;
    memset(s->scores, 0, (size_t)(at->blocks * line));
    for (int64_t i = 0; i < at->lanes; i++) ba_set_real(s->lowest, i, ba_initial_m(real), real);
    ba_panel panel = {0};
    for (int64_t g = 0; g < c->group; g += at->side)
        panel = open_panel(c, s, at, head + g, ba_min(at->side, c->group - g), g / at->side, &most, &least);
    for (int64_t begin = 0; begin < most; begin += c->chunk_keys) {
        const int64_t keys = ba_min(c->chunk_keys, most - begin);
        const ba_chunk chunk = open_chunk(c, s, at, at->head, begin, keys);
        if (begin + keys > least) {
            panel.lo = s->lo;
            panel.hi = s->hi;
        }
        memset(s->sum, 0, (size_t)(keys * line));
        for (int64_t g = 0; g < c->group; g += at->side) {
            panel.q = s->q + g / at->side * at->lanes * dim_pad(c) * c->family->q_bytes;
            panel.m = s->m + g / at->side * at->lanes * c->real_size;
            add_panel(c, s, at, &panel, &chunk, ba_min(at->side, c->group - g));
        }
        for (int64_t j = 0; j < keys; j++)
            for (int64_t n = 0; n < c->narrow; n++) {
                const int64_t block = (begin + j + n) / c->wide;
                if (block < at->blocks) c->family->pack->add_reals(s->scores + block * line, s->sum + j * line, at->rows);
            }
    }
}

/* Scores blocks for rows that are tiles: the scores are the products of the compressed keys and the mean query. */
static void score_by_tile(const nsa_select_call *c, const nsa_select_scratch *s, const item_rows *at) {
    int64_t most, least;
    const ba_panel panel = open_panel(c, s, at, at->head, 1, 0, &most, &least);
    for (int64_t begin = 0; begin < at->keys; begin += c->chunk_keys) {
        const int64_t keys = ba_min(c->chunk_keys, at->keys - begin);
        const ba_chunk chunk = open_chunk(c, s, at, at->head / c->group, begin, keys);
        c->family->panel->scores[0](&panel, &chunk, s->row_max);
        memcpy(s->scores + begin * at->lanes * c->real_size, s->chunk, (size_t)(keys * at->lanes * c->real_size));
    }
}

/* ---- The blocks with the highest scores ------------------------------------------------------------------------------------- */

/* The blocks of a row that are always selected, and those that compete for the other entries. */
typedef struct rules {
    int64_t init, local_lo, local_hi; /* blocks [0, init) and [local_lo, local_hi) are always selected */
    int64_t hi;                       /* all other blocks below this number compete */
} rules;

static rules rules_of(const nsa_select_call *c, const item_rows *at, int64_t row) {
    const ba_nsa_select_args *a = c->args;
    rules r = {.hi = at->blocks};
    if (!c->by_query) {
        if (a->causal) r.hi = ba_min(r.hi, ba_ceil_div((at->first + row + 1) * a->tile + at->begin, a->compress_block));
        return r;
    }
    const int64_t own = (at->first + row + at->begin) / a->select_block;
    if (a->causal) {
        r.hi = ba_min(r.hi, own + 1);
        r.local_lo = own + 1 - a->local_blocks;
        r.local_hi = own + 1;
    } else {
        r.local_lo = own - a->local_blocks / 2;
        r.local_hi = r.local_lo + a->local_blocks;
    }
    r.init = ba_min(a->init_blocks, r.hi);
    r.local_lo = ba_max(r.init, ba_min(r.local_lo, r.hi));
    r.local_hi = ba_max(r.local_lo, ba_min(r.local_hi, r.hi));
    return r;
}

/* Writes a list of blocks, padded with -1, to row `row` of the sequence's result. */
static void write_row(const nsa_select_call *c, const item_rows *at, int64_t row, const int32_t *list, int64_t length, const ba_tensor *out) {
    const int64_t *steps = out->strides, width = out->dims[out->ndim - 1];
    int32_t *to = (int32_t *)out->data + (c->args->cu_q ? at->head * steps[0] + (at->earlier + row) * steps[1]
                                                        : at->sequence * steps[0] + at->head * steps[1] + row * steps[2]);
    for (int64_t i = 0; i < width; i++) to[i * steps[out->ndim - 1]] = i < length ? list[i] : -1;
}

/* Chooses and writes each lane's blocks, in rising order; of equal scores, the lower block wins. `r` has the rules of each lane. */
static void choose(const nsa_select_call *c, const nsa_select_scratch *s, const item_rows *at, const char *scores, const rules *r,
                   const ba_tensor *out) {
    const int64_t width = out->dims[out->ndim - 1];
    for (int64_t first = 0; first < at->rows; first += BA_CHOOSE_LIST_ROWS) {
        const int64_t rows = ba_min(BA_CHOOSE_LIST_ROWS, at->rows - first);
        ba_choice choice = {
            .scores = scores + first * c->real_size, .stride = at->lanes, .list_rows = rows, .width = width, .keys = s->keys, .lists = s->lists};
        for (int64_t i = 0; i < rows; i++) {
            choice.init[i] = (int32_t)r[first + i].init;
            choice.local_lo[i] = (int32_t)r[first + i].local_lo;
            choice.local_hi[i] = (int32_t)r[first + i].local_hi;
            choice.hi[i] = (int32_t)r[first + i].hi;
            choice.blocks = ba_max(choice.blocks, r[first + i].hi);
        }
        c->kernels->vector[ba_real_of(c->q.dtype)]->routed->choose(&choice);
        for (int64_t i = 0; i < rows; i++) write_row(c, at, at->first + first + i, s->lists + i * (width + 1), choice.lengths[i], out);
    }
}

static void choose_blocks(const nsa_select_call *c, const nsa_select_scratch *s, const item_rows *at) {
    rules r[BA_MAX_LANES] = {{0}};
    for (int64_t i = 0; i < at->rows; i++) r[i] = rules_of(c, at, i);
    choose(c, s, at, s->scores, r, &c->args->selected);
}

/* Chooses the runs of cmp_group compressed keys with the highest mean scores. The mean is taken over the keys that compete and whose score is
 * not -inf. */
static void choose_runs(const nsa_select_call *c, const nsa_select_scratch *s, const item_rows *at) {
    const int64_t size = ba_min(c->args->cmp_group, INT32_MAX); /* any size above the number of keys means the same */
    rules r[BA_MAX_LANES] = {{0}};
    for (int64_t i = 0; i < at->rows; i++) {
        const int64_t end = rules_of(c, at, i).hi;
        r[i] = (rules){.hi = ba_ceil_div(end, size)};
        for (int64_t begin = 0; begin < end; begin += size) {
            double sum = 0;
            int64_t members = 0;
            for (int64_t j = begin; j < ba_min(begin + size, end); j++) {
                const double score = ba_get_real(s->scores, j * at->lanes + i, c->real_size);
                if (score == -INFINITY) continue;
                sum += score;
                members++;
            }
            ba_set_real(s->means, begin / size * at->lanes + i, members ? sum / (double)members : -INFINITY, c->real_size);
        }
    }
    choose(c, s, at, s->means, r, &c->args->selected_cmp);
}

/* ---- The call ----------------------------------------------------------------------------------------------------------------- */

static int64_t panels_of(const nsa_select_call *c, int64_t n) { return ba_ceil_div(rows_of(c, n), c->lanes); }

/* Lays out the memory of a call with this many workers. */
static int64_t lay_out_call(nsa_select_call *c, int threads, char *base) {
    const int64_t places = c->args->cu_q ? c->sequences + 1 : 0;
    int64_t used = 0;
    c->first_row = ba_take(base, &used, places * (int64_t)sizeof *c->first_row);
    c->first_panel = ba_take(base, &used, places * (int64_t)sizeof *c->first_panel);
    c->scratch = ba_take(base, &used, threads * c->scratch_bytes);
    return used;
}

static void find_sequences(const nsa_select_call *c) {
    if (!c->args->cu_q) return;
    for (int64_t n = 0, row = 0, panel = 0; n <= c->sequences; n++) {
        c->first_row[n] = row;
        c->first_panel[n] = panel;
        if (n == c->sequences) break;
        row += rows_of(c, n);
        panel += panels_of(c, n);
    }
}

static void select_item(void *context, int64_t item, int worker) {
    const nsa_select_call *c = context;
    item_rows at = {0};
    at.head = item % c->list_heads;
    item /= c->list_heads;
    if (c->args->cu_q) {
        at.sequence = ba_sequence_at(c->first_panel, c->sequences, item);
        at.earlier = c->first_row[at.sequence];
        item -= c->first_panel[at.sequence];
    } else {
        at.sequence = item / panels_of(c, 0);
        item %= panels_of(c, 0);
    }
    at.first = item * c->lanes;
    at.rows = ba_min(c->lanes, rows_of(c, at.sequence) - at.first);
    at.queries = queries_of(c, at.sequence);
    at.keys = keys_of(c, at.sequence);
    at.begin = begin_of(c, at.sequence);
    at.width = c->by_query && !c->has_own && c->group * at.rows <= c->family->lanes[1];
    at.lanes = c->family->lanes[at.width];
    at.side = c->by_query ? ba_max(1, ba_min(c->group, at.lanes / at.rows)) : 1;
    at.blocks = blocks_of(c, at.sequence);
    nsa_select_scratch s;
    lay_out_nsa_select(c, c->scratch + worker * c->scratch_bytes, &s);
    if (c->by_query) score_by_query(c, &s, &at);
    else score_by_tile(c, &s, &at);
    choose_blocks(c, &s, &at);
    if (ba_given(&c->args->selected_cmp)) choose_runs(c, &s, &at);
}

static ba_status check_sizes(const ba_nsa_select_args *a, nsa_select_call *c) {
    const struct {
        const char *name;
        int64_t value, least;
    } sizes[] = {{"compress_block_size", a->compress_block, 1},
                 {"compress_stride", a->compress_stride, 1},
                 {"select_block_size", a->select_block, 1},
                 {"q_tile_size", a->tile, 0},
                 {"init_blocks", a->init_blocks, 0},
                 {"local_blocks", a->local_blocks, 0}};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        if (sizes[i].value < sizes[i].least || sizes[i].value > BA_MOST_TOKENS)
            return ba_fail(BA_ERROR_VALUE, BA_ARG("%s") ": expected a number from %" PRId64 " to %d, got %" PRId64, sizes[i].name, sizes[i].least,
                           BA_MOST_TOKENS, sizes[i].value);
    if (a->compress_block % a->compress_stride || a->select_block % a->compress_stride)
        return ba_fail(BA_ERROR_VALUE,
                       BA_ARG("compress_stride") ": expected a divisor of " BA_ARG("compress_block_size") " = %" PRId64 " and of " BA_ARG(
                           "select_block_size") " = %" PRId64 ", got %" PRId64,
                       a->compress_block, a->select_block, a->compress_stride);
    if (!c->by_query && (a->compress_stride != a->compress_block || a->select_block != a->compress_block))
        return ba_fail(BA_ERROR_VALUE,
                       BA_ARG("compress_stride") ": expected " BA_ARG("compress_block_size") " = %" PRId64 " with tiles, got %" PRId64,
                       a->compress_block, a->compress_stride);
    BA_TRY(ba_take_scale(a->q.dtype, c->dim, a->scale, &c->scale));
    c->narrow = a->compress_block / a->compress_stride;
    c->wide = a->select_block / a->compress_stride;
    return ba_check_threads(a->num_threads);
}

/* Checks where the queries of each sequence stand among its tokens. */
static ba_status check_places(const ba_nsa_select_args *a, const nsa_select_call *c) {
    for (int64_t b = 0; b < c->sequences; b++) {
        const int64_t begin = begin_of(c, b), tokens = tokens_of(c, b), queries = queries_of(c, b);
        if (begin < 0 || begin > BA_MOST_TOKENS)
            return ba_fail(BA_ERROR_VALUE, BA_ARG("q_begin") ": expected numbers from 0 to %d, got %" PRId64, BA_MOST_TOKENS, begin);
        if (tokens > BA_MOST_TOKENS)
            return ba_fail(BA_ERROR_VALUE, BA_ARG("q") ": expected at most %d tokens per sequence, got %" PRId64, BA_MOST_TOKENS, tokens);
        if (tokens < begin || tokens - begin < queries)
            return ba_fail(BA_ERROR_VALUE, BA_ARG("q") ": expected at most %" PRId64 " tokens from token %" PRId64 " on, got %" PRId64, tokens, begin,
                           queries);
        if (a->cu_q && ba_sequence_length(c->cu_k, 0, b) != keys_of(c, b))
            return ba_fail(BA_ERROR_VALUE, BA_ARG("cu_blocks") ": expected %" PRId64 " blocks of sequence %" PRId64 ", got %" PRId64, keys_of(c, b),
                           b, ba_sequence_length(c->cu_k, 0, b));
        if (!a->cu_q && c->k.tokens < keys_of(c, b))
            return ba_fail(BA_ERROR_VALUE, BA_ARG("k_cmp") ": expected (%" PRId64 ", at least %" PRId64 ", Hkv, D), got %s", c->q.batch,
                           keys_of(c, b), ba_shape_text(&a->k_cmp).chars);
    }
    return BA_OK;
}

static ba_status check_lengths(const ba_nsa_select_args *a, nsa_select_call *c) {
    int64_t longest;
    c->sequences = a->cu_q ? a->batch : c->q.batch;
    if (!a->cu_q) {
        if (c->k.batch != c->q.batch)
            return ba_fail(BA_ERROR_VALUE, BA_ARG("k_cmp") ": expected (%" PRId64 ", blocks, Hkv, D), got %s", c->q.batch,
                           ba_shape_text(&a->k_cmp).chars);
        return check_places(a, c);
    }
    if (!a->cu_cmp) return ba_fail(BA_ERROR_VALUE, BA_ARG("cu_blocks") ": expected the cumulative numbers of the sequences' blocks, got none");
    BA_TRY(ba_check_cumulative("cu_seqlens", a->cu_q, a->batch, c->q.tokens, &longest));
    BA_TRY(ba_check_cumulative("cu_blocks", a->cu_cmp, a->batch, c->k.tokens, &longest));
    return check_places(a, c);
}

static ba_status check_select(const ba_nsa_select_args *a, nsa_select_call *c) {
    const bool packed = a->cu_q != NULL;
    BA_TRY(ba_take_rows("q", &a->q, packed ? "(T, H, D)" : "(B, N, H, D)", packed, &c->q));
    BA_TRY(ba_take_rows("k_cmp", &a->k_cmp, packed ? "(blocks, Hkv, D)" : "(B, blocks, Hkv, D)", packed, &c->k));
    if (a->k_cmp.dtype != a->q.dtype)
        return ba_fail(BA_ERROR_TYPE, BA_ARG("k_cmp") ": expected dtype %s like " BA_ARG("q") ", got %s", ba_dtype_name(a->q.dtype),
                       ba_dtype_name(a->k_cmp.dtype));
    if (c->k.dim != c->q.dim || c->q.heads % c->k.heads)
        return ba_fail(BA_ERROR_VALUE,
                       BA_ARG("k_cmp") ": expected D = %" PRId64
                                       ", as " BA_ARG("q") " has, and a number of heads that divides " BA_ARG("q") "'s %" PRId64 ", got %s",
                       c->q.dim, c->q.heads, ba_shape_text(&a->k_cmp).chars);
    c->dim = c->q.dim;
    c->group = c->q.heads / c->k.heads;
    c->list_heads = c->by_query ? c->k.heads : c->q.heads;
    BA_TRY(check_sizes(a, c));
    BA_TRY(check_lengths(a, c));
    int64_t rows = 0;
    for (int64_t b = 0; packed && b < a->batch; b++) rows += rows_of(c, b);
    if (!packed) rows = rows_of(c, 0);
    ba_tensor expected = {.dtype = BA_INT32, .ndim = 4, .dims = {c->q.batch, c->list_heads, rows, 1}};
    if (packed) expected = (ba_tensor){.dtype = BA_INT32, .ndim = 3, .dims = {c->list_heads, rows, 1}};
    const int last = expected.ndim - 1;
    c->width = expected.dims[last] = a->selected.ndim == expected.ndim ? a->selected.dims[last] : 1;
    BA_TRY(ba_check_output("block_indices", &a->selected, &expected, false));
    if (c->width < 1 || a->init_blocks + a->local_blocks > c->width)
        return ba_fail(BA_ERROR_VALUE,
                       BA_ARG("num_selected_blocks") ": expected at least 1, and at least " BA_ARG("init_blocks") " + " BA_ARG(
                           "local_blocks") " = %" PRId64 ", got %" PRId64,
                       a->init_blocks + a->local_blocks, c->width);
    if (c->by_query) {
        const ba_dtype real = ba_real_of(a->q.dtype);
        const ba_tensor lse = {.dtype = real, .ndim = packed ? 2 : 3, .dims = {a->q.dims[0], a->q.dims[1], packed ? 0 : a->q.dims[2]}};
        if (!ba_given(&a->lse)) return ba_fail(BA_ERROR_VALUE, BA_ARG("lse") ": expected the log-sum-exp of the compressed branch, got none");
        BA_TRY(ba_check_same("lse", &a->lse, &lse, false));
    }
    if (!ba_given(&a->selected_cmp)) return BA_OK;
    if (c->by_query) return ba_fail(BA_ERROR_VALUE, BA_ARG("num_cmp_selected_blocks") ": expected None without tiles, got some");
    if (a->cmp_group < 1) return ba_fail(BA_ERROR_VALUE, BA_ARG("cmp_group") ": expected at least 1 compressed key, got %" PRId64, a->cmp_group);
    c->cmp_width = expected.dims[last] = a->selected_cmp.ndim == expected.ndim ? a->selected_cmp.dims[last] : 1;
    BA_TRY(ba_check_output("cmp_block_indices", &a->selected_cmp, &expected, false));
    if (c->cmp_width < 1) return ba_fail(BA_ERROR_VALUE, BA_ARG("num_cmp_selected_blocks") ": expected at least 1, got %" PRId64, c->cmp_width);
    return BA_OK;
}

ba_status ba_nsa_select(const ba_nsa_select_args *args) {
    BA_IN_USUAL_MODE;
    BA_TRY(ba_check_pointer("args", args));
    nsa_select_call c = {.args = args, .cu_k = args->cu_q ? args->cu_cmp : NULL, .by_query = args->tile == 0};
    BA_TRY(check_select(args, &c));
    for (int i = 0; i < args->selected.ndim; i++)
        if (args->selected.dims[i] == 0) return BA_OK;
    const ba_dtype real = ba_real_of(args->q.dtype);
    const ba_isa active = ba_isa_active(), level = ba_level_with_parts(active, real);
    c.kernels = ba_kernels_at(level);
    c.family = c.kernels->vector[real];
    const ba_attend_family *own = ba_kernels_at(active)->attend[args->q.dtype];
    c.has_own = c.by_query && own->panel->add_probabilities;
    if (c.has_own) c.family = own;
    c.real_size = c.family->real_size;
    c.lanes = c.family->lanes[0];
    c.chunk_keys = ba_tuning_at(level)->chunk_keys;
    int64_t panels = 0;
    double work = 0;
    for (int64_t b = 0; b < c.sequences; b++) {
        c.most_blocks = ba_max(c.most_blocks, blocks_of(&c, b));
        panels += panels_of(&c, b);
        work += (double)rows_of(&c, b) * (double)keys_of(&c, b) * (double)(c.q.heads * c.dim);
    }
    const int threads = ba_threads_of_call(args->num_threads, work, ba_work.small_products, panels * c.list_heads);
    nsa_select_scratch unused;
    c.scratch_bytes = lay_out_nsa_select(&c, NULL, &unused);
    char *memory;
    BA_TRY(ba_get_scratch(lay_out_call(&c, threads, NULL), &memory));
    lay_out_call(&c, threads, memory);
    find_sequences(&c);
    const ba_status status = ba_parallel(threads, panels * c.list_heads, select_item, &c);
    ba_arena_release();
    return status;
}
