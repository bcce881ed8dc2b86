/* Calls that choose blocks for block-sparse attention, and that write what was chosen as index lists. */
#include <math.h>

#include "fuzz.h"

static int64_t rows_of(int64_t tokens, int64_t block) { return tokens > 0 && block > 0 ? (tokens - 1) / block + 1 : 0; }

/* The largest number of blocks of `block` tokens that a sequence has. */
static int64_t most_blocks(const ba_block_sparse_args *a, const fz_sizes *s, const int64_t *cu, int64_t tokens, int64_t block) {
    if (s->layout != BA_TND) return rows_of(tokens, block);
    int64_t most = 0;
    for (int64_t b = 0; cu && b < a->batch && b < 100; b++) {
        const int64_t rows = rows_of(cu[b + 1] - cu[b], block);
        most = rows > most ? rows : most;
    }
    return most > 1000 ? 1000 : most;
}

static int64_t pool_of(int64_t block) {
    static const int64_t usual[] = {1, 8, 2, 4, 16, 3};
    const int64_t pool = fz_pick(usual, 6);
    if (fz_unusual()) return fz_unusual_number();
    return block > 0 && block % pool == 0 ? pool : fz_once_in(2) ? block : 1;
}

static int64_t always(void) { return fz_unusual() ? fz_unusual_number() : fz_once_in(3) ? fz_range(0, 5) : 0; }

static void draw_budgets(ba_select_prefill_args *a, int64_t lists) {
    a->budget = (ba_budget)fz_range(BA_BUDGET_DENSITY, BA_BUDGET_TOP_K);
    const int64_t dims[] = {fz_once_in(3) ? lists : 1};
    a->budgets = fz_tensor(FZ_INPUT, BA_FLOAT64, 1, dims, FZ_FREE_LAST);
    fz_seed();
    if (fz_backed(&a->budgets) && a->budgets.dtype == BA_FLOAT64 && a->budgets.ndim == 1 && a->budgets.dims[0] <= 1000)
        for (int64_t i = 0; i < a->budgets.dims[0]; i++) {
            double *number = (double *)a->budgets.data + i * a->budgets.strides[0];
            if (fz_unusual()) *number = fz_unusual_real();
            else *number = a->budget == BA_BUDGET_TOP_K ? 1 + (double)fz_below(12) : (1 + (double)fz_below(1000)) / 1000;
        }
    if (fz_unusual()) a->budget = (ba_budget)fz_unusual_number();
}

static uint64_t word_of(const ba_tensor *kept, const int64_t *at) {
    return ((const uint64_t *)kept->data)[at[0] * kept->strides[0] + at[1] * kept->strides[1] + at[2] * kept->strides[2] + at[3] * kept->strides[3]];
}

/* Compares lists with the bits of `kept`: each row must rise, list exactly the kept columns, and end with pads. */
static void compare_lists(const ba_tensor *kept, const ba_tensor *lists) {
    const int64_t group = kept->dims[1] ? lists->dims[1] / kept->dims[1] : 1;
    int64_t at[BA_MAX_DIMS];
    for (at[0] = 0; at[0] < lists->dims[0]; at[0]++)
        for (at[1] = 0; at[1] < lists->dims[1]; at[1]++)
            for (at[2] = 0; at[2] < lists->dims[2]; at[2]++) {
                int64_t place = 0;
                for (int64_t column = 0; column <= kept->dims[3] * 64; column++) { /* one more, for the pads */
                    const int64_t word[] = {at[0], at[1] / group, at[2], column / 64};
                    if (column < kept->dims[3] * 64 && !(word_of(kept, word) >> column % 64 & 1)) continue;
                    for (bool pad = column == kept->dims[3] * 64; place < lists->dims[3]; place++) {
                        at[3] = place;
                        const int64_t wanted = pad ? -1 : column, got = (int64_t)fz_get(lists, at);
                        if (got != wanted) fz_fail("list: expected %d at place %d, got %d", (int)wanted, (int)place, (int)got);
                        if (!pad) break;
                    }
                    if (column < kept->dims[3] * 64 && place++ >= lists->dims[3]) fz_fail("list: expected all %d columns, got fewer", (int)place);
                }
            }
}

typedef struct list_args {
    ba_tensor kept, lists;
} list_args;

static ba_status list(const void *args) {
    const list_args *a = args;
    return ba_list_kept(&a->kept, &a->lists);
}

/* Writes the chosen blocks as lists, which attention must accept if it accepts the same call without lists. */
static void use(const ba_select_prefill_args *a, const fz_sizes *s) {
    static const int64_t dtypes[] = {BA_INT32, BA_UINT16, BA_INT16, BA_INT64};
    list_args l = {.kept = a->kept};
    int64_t at[BA_MAX_DIMS] = {0}, widest = 0;
    for (at[0] = 0; at[0] < a->counts.dims[0]; at[0]++)
        for (at[1] = 0; at[1] < a->counts.dims[1]; at[1]++)
            for (at[2] = 0; at[2] < a->counts.dims[2]; at[2]++) {
                int64_t kept = 0, word[] = {at[0], at[1], at[2], 0};
                for (; word[3] < a->kept.dims[3]; word[3]++) kept += __builtin_popcountll(word_of(&a->kept, word));
                if (kept != (int64_t)fz_get(&a->counts, at)) fz_fail("counts: expected %d blocks in a row, got another number", (int)kept);
                widest = kept > widest ? kept : widest;
            }
    const int64_t dims[] = {a->kept.dims[0], s->heads, a->kept.dims[2], fz_once_in(8) ? fz_range(0, 40) : widest + fz_range(0, 2)};
    fz_set_role(&a->kept, FZ_INPUT);
    fz_set_role(&a->counts, FZ_INPUT);
    fz_set_role(&a->scores, FZ_INPUT);
    l.lists = fz_tensor(FZ_OUTPUT, (ba_dtype)fz_pick(dtypes, 4), 4, dims, FZ_FREE_LAST);
    if (fz_unusual()) l.kept = fz_tensor(FZ_INPUT, BA_INT64, 4, a->kept.dims, FZ_FREE_LAST);
    if (!fz_run(FZ_LIST_KEPT, list, &l, NULL)) return;
    compare_lists(&l.kept, &l.lists);
    const int head_axis = s->layout == BA_BSND ? 2 : 1;
    const int64_t heads = s->layout == BA_BSH ? a->call.num_heads : a->call.q.dims[head_axis];
    if (l.kept.data != a->kept.data || l.lists.dims[1] != heads || s->heads != heads) return; /* these are not the lists of this call */
    ba_block_sparse_args call = a->call;
    call.blocks = call.attn_mask = (ba_tensor){0};
    call.alibi_slopes = NULL;
    call.cu_rows = NULL;
    call.q_total = NULL;
    call.key_stride = call.key_last = 0;
    call.routed = 0;
    fz_set_role(&l.lists, FZ_INPUT);
    ba_tensor out, lse;
    if (ba_block_sparse_check(&call, &out, &lse) != BA_OK || s->dim != s->v_dim) return;
    call.blocks = l.lists;
    if (!fz_run(FZ_FORWARD_CHECK, fz_check_forward, &call, &call.num_threads)) fz_fail("expected lists that attention accepts, got a refusal");
    call.out = fz_tensor(FZ_OUTPUT, out.dtype, out.ndim, out.dims, FZ_PLAIN);
    fz_run(FZ_FORWARD, fz_forward, &call, &call.num_threads);
}

static ba_status choose(const void *args) { return ba_select_prefill(args); }

/* Scores of the caller with these axes. Some are not finite. */
static ba_tensor draw_given(const int64_t *dims) {
    ba_tensor t = fz_tensor(FZ_INPUT, BA_FLOAT32, 4, dims, FZ_FREE_LAST);
    fz_seed();
    if (!fz_backed(&t) || t.dtype != BA_FLOAT32 || t.ndim != 4 || fz_elements(&t) == 0 || fz_elements(&t) > 1e5) return t;
    int64_t at[BA_MAX_DIMS];
    for (at[0] = 0; at[0] < t.dims[0]; at[0]++)
        for (at[1] = 0; at[1] < t.dims[1]; at[1]++)
            for (at[2] = 0; at[2] < t.dims[2]; at[2]++)
                for (at[3] = 0; at[3] < t.dims[3]; at[3]++) {
                    float *score = (float *)t.data + at[0] * t.strides[0] + at[1] * t.strides[1] + at[2] * t.strides[2] + at[3] * t.strides[3];
                    *score = fz_below(9) ? (float)fz_below(1000) / 100 : fz_below(2) ? (float)NAN : (float)-INFINITY;
                }
    return t;
}

void fz_choose(void) {
    ba_select_prefill_args a = ba_select_prefill_args_init();
    fz_sizes s;
    fz_draw_forward(&a.call, &s);
    fz_unseen(&a.call.v);
    fz_unseen(&a.call.blocks);
    fz_unseen(&a.call.attn_mask);
    a.chooser = fz_unusual() ? (ba_chooser)fz_unusual_number() : (ba_chooser)fz_range(BA_CHOOSER_POOLED, BA_CHOOSER_VERTICAL_SLASH);
    a.pool_q = pool_of(a.call.block_q);
    a.pool_k = a.chooser == BA_CHOOSER_POOLED ? pool_of(a.call.block_kv) : a.chooser == BA_CHOOSER_ANTIDIAGONAL ? a.pool_q : 1;
    if (a.chooser == BA_CHOOSER_ANTIDIAGONAL && a.call.block_kv > 0 && a.call.block_kv % (a.pool_q ? a.pool_q : 1)) a.pool_q = a.pool_k = 1;
    if (a.chooser == BA_CHOOSER_VERTICAL_SLASH && !fz_unusual()) {
        a.pool_q = fz_range(1, 80);
        fz_unseen(&a.call.kv_ranges);
        a.call.kv_ranges = (ba_tensor){0};
    }
    a.term = fz_unusual() ? (ba_chooser_term)fz_unusual_number() : (ba_chooser_term)fz_range(BA_TERM_MEAN, BA_TERM_BOTH);
    a.largest = fz_once_in(2);
    a.per_kv_head = fz_once_in(2);
    draw_budgets(&a, a.per_kv_head ? s.kv_heads : s.heads);
    a.sink = always();
    a.recent = always();
    a.last_columns = always();
    a.first_rows = always();
    a.last_rows = always();
    const int64_t rows = most_blocks(&a.call, &s, a.call.cu_q, s.q_len, a.call.block_q);
    const int64_t columns = most_blocks(&a.call, &s, a.call.cu_kv, s.kv_len, a.call.block_kv);
    const int64_t batch = s.layout == BA_TND ? (a.call.batch < 0 || a.call.batch > 100 ? 1 : a.call.batch) : s.batch;
    const int64_t lists = a.per_kv_head ? s.kv_heads : s.heads;
    const int64_t kept[] = {batch, lists, rows, rows_of(columns, 64)}, scores[] = {batch, lists, rows, columns};
    a.kept = fz_tensor(FZ_OUTPUT, BA_INT64, 4, kept, FZ_FREE_LAST);
    a.counts = fz_tensor(FZ_OUTPUT, BA_INT32, 3, kept, FZ_FREE_LAST);
    if (fz_once_in(2)) a.scores = fz_tensor(FZ_OUTPUT, BA_FLOAT32, 4, scores, FZ_FREE_LAST);
    if (fz_once_in(5)) { /* drawn late, so that the inputs of past findings keep their meaning */
        const int64_t given[] = {batch, fz_once_in(2) ? lists : s.heads, rows, columns};
        a.given_scores = draw_given(given);
        if (fz_once_in(8)) fz_unseen(&a.given_scores);
        else a.chooser = BA_CHOOSER_GIVEN;
    }
    if (fz_unusual()) a.pool_k = fz_unusual_number();
    if (fz_is_heavy(&a.call)) fz_count_skipped(FZ_CHOOSE);
    else if (fz_run(FZ_CHOOSE, choose, &a, &a.call.num_threads)) use(&a, &s);
}
