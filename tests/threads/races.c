/* Several threads call operations at the same time, with various numbers of threads, and compare every result with that of one thread. The
 * program is built with ThreadSanitizer (make tsan), which reports data races in the pool, in the lists of work and in joining partial results.
 *
 *     races [rounds [callers]] */
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "blitz_attn.h"

enum { B = 2, H = 4, KV_HEADS = 2, TOKENS = 150, D = 16, BLOCK = 16, ROWS = (TOKENS + BLOCK - 1) / BLOCK, WIDTH = 5 };
enum { PAGES = 80, PAGE = 16, TABLE = 40, PLACES = 7, PARTS = 3, RESULTS = 4 };

static float q[B * H * TOKENS * D], k[B * KV_HEADS * TOKENS * D], v[B * KV_HEADS * TOKENS * D], dout[B * H * TOKENS * D];
static float k_cache[PAGES * PAGE * KV_HEADS * D], v_cache[PAGES * PAGE * KV_HEADS * D];
static float high[TABLE * PAGE * KV_HEADS * D], low[TABLE * PAGE * KV_HEADS * D];
static float forward_out[B * H * TOKENS * D], forward_lse[B * H * TOKENS];
static int32_t lists[H * ROWS * WIDTH], tables[B * TABLE], summary_tables[B * TABLE];
static const int64_t seq_lens[B] = {600, 333};

/* The outputs of one calling thread. */
typedef struct room {
    float result[RESULTS][PARTS * B * H * TOKENS * D];
    int32_t places[B * KV_HEADS * PLACES];
} room;

#define REALS(data, ...) ba_contiguous(data, BA_FLOAT32, (int)(sizeof((int64_t[]){__VA_ARGS__}) / 8), (int64_t[]){__VA_ARGS__})
#define INTS(data, ...) ba_contiguous(data, BA_INT32, (int)(sizeof((int64_t[]){__VA_ARGS__}) / 8), (int64_t[]){__VA_ARGS__})

static ba_block_sparse_args forward_args(float *out, float *lse, int listed, int threads) {
    ba_block_sparse_args a = ba_block_sparse_args_init();
    a.q = REALS(q, B, H, TOKENS, D);
    a.k = REALS(k, B, KV_HEADS, TOKENS, D);
    a.v = REALS(v, B, KV_HEADS, TOKENS, D);
    a.out = REALS(out, B, H, TOKENS, D);
    a.lse = REALS(lse, B, H, TOKENS);
    a.scale = ba_default_scale(D);
    a.causal = 1;
    a.num_threads = threads;
    a.block_q = a.block_kv = BLOCK;
    if (listed) a.blocks = INTS(lists, 1, H, ROWS, WIDTH);
    return a;
}

static ba_status dense(room *r, int threads) {
    const ba_block_sparse_args a = forward_args(r->result[0], r->result[1], 0, threads);
    return ba_block_sparse_attention(&a);
}

static ba_status listed(room *r, int threads) {
    const ba_block_sparse_args a = forward_args(r->result[0], r->result[1], 1, threads);
    return ba_block_sparse_attention(&a);
}

static ba_status backward(room *r, int threads) {
    ba_block_sparse_backward_args a = {.forward = forward_args(forward_out, forward_lse, 1, threads)};
    a.dout = REALS(dout, B, H, TOKENS, D);
    a.dq = REALS(r->result[0], B, H, TOKENS, D);
    a.dk = REALS(r->result[1], B, KV_HEADS, TOKENS, D);
    a.dv = REALS(r->result[2], B, KV_HEADS, TOKENS, D);
    return ba_block_sparse_attention_backward(&a);
}

static ba_status paged(room *r, int threads) {
    ba_paged_args a = ba_paged_args_init();
    a.q = REALS(q, B, H, D);
    a.k_cache = REALS(k_cache, PAGES, PAGE, KV_HEADS, D);
    a.v_cache = REALS(v_cache, PAGES, PAGE, KV_HEADS, D);
    a.block_tables = INTS(tables, B, TABLE);
    a.seq_lens = seq_lens;
    a.batch = B;
    a.scale = ba_default_scale(D);
    a.out = REALS(r->result[0], B, H, D);
    a.lse = REALS(r->result[1], B, H);
    a.num_threads = threads;
    return ba_paged_attention(&a);
}

static ba_status summaries(room *r, int threads) {
    ba_quest_metadata_args a = {.batch = B, .end = seq_lens, .num_threads = threads};
    a.k_cache = REALS(k_cache, PAGES, PAGE, KV_HEADS, D);
    a.block_tables = INTS(tables, B, TABLE);
    a.metadata_tables = INTS(summary_tables, B, TABLE);
    a.maxblocks = REALS(r->result[0], TABLE, PAGE, KV_HEADS, D);
    a.minblocks = REALS(r->result[1], TABLE, PAGE, KV_HEADS, D);
    return ba_quest_metadata(&a);
}

static ba_status selection(room *r, int threads) {
    ba_select_args a = {.method = BA_SELECT_QUEST, .batch = B, .page_size = PAGE, .seq_lens = seq_lens, .num_threads = threads};
    a.q = REALS(q, B, H, D);
    a.a = REALS(high, TABLE, PAGE, KV_HEADS, D);
    a.b = REALS(low, TABLE, PAGE, KV_HEADS, D);
    a.tables = INTS(summary_tables, B, TABLE);
    a.selected = INTS(r->places, B, KV_HEADS, PLACES);
    return ba_select_blocks(&a);
}

static ba_status merge(room *r, int threads) {
    (void)threads;
    ba_tensor outs[PARTS], lses[PARTS];
    for (int i = 0; i < PARTS; i++) {
        outs[i] = REALS(i ? dout : q, B, H, TOKENS, D);
        lses[i] = REALS(forward_lse, B, H, TOKENS);
    }
    const ba_tensor out = REALS(r->result[0], B, H, TOKENS, D), lse = REALS(r->result[1], B, H, TOKENS);
    return ba_merge_states(PARTS, outs, lses, &out, &lse);
}

static ba_status quantise(room *r, int threads) {
    const ba_tensor x = REALS(q, B * H * TOKENS, D), scale = REALS(r->result[1], B * H * TOKENS);
    ba_tensor values = REALS(r->result[0], B * H * TOKENS, D);
    values.dtype = BA_INT8;
    return ba_quantize_kv(&x, &values, &scale, threads);
}

static ba_status append(room *r, int threads) {
    static const int64_t slots[] = {5, 0, 9, -1, 7};
    const ba_tensor new = REALS(q, 5, KV_HEADS, D);
    ba_paged_args a = ba_paged_args_init();
    a.k_cache = REALS(r->result[0], 1, 10, KV_HEADS, D);
    a.v_cache = REALS(r->result[1], 1, 10, KV_HEADS, D);
    a.num_threads = threads;
    return ba_append_kv(&new, &new, slots, &a);
}

static const struct operation {
    const char *name;
    ba_status (*run)(room *, int threads);
} operations[] = {{"dense", dense},         {"listed", listed}, {"backward", backward}, {"paged", paged},  {"summaries", summaries},
                  {"selection", selection}, {"merge", merge},   {"quantise", quantise}, {"append", append}};
enum { OPERATIONS = sizeof operations / sizeof *operations };

static room *expected[OPERATIONS];
static int rounds = 60;
static _Atomic int failures;

static room *new_room(void) {
    room *r = malloc(sizeof *r);
    if (!r) exit(2);
    return memset(r, 0, sizeof *r);
}

static void *caller(void *seed) {
    unsigned state = (unsigned)(uintptr_t)seed;
    room *const r = new_room();
    for (int i = 0; i < rounds; i++) {
        const int n = rand_r(&state) % OPERATIONS, threads = 1 + rand_r(&state) % 8;
        memset(r, 0, sizeof *r);
        const ba_status status = operations[n].run(r, threads);
        if (status != BA_OK || memcmp(r, expected[n], sizeof *r) != 0) {
            failures++;
            printf("%s on %d threads: %s\n", operations[n].name, threads, status == BA_OK ? "other bits" : ba_last_error());
        }
        ba_set_num_threads(1 + (int)(rand_r(&state) % 4)); /* keeps changing the default, which ba_merge_states uses */
    }
    free(r);
    return NULL;
}

static void fill(float *data, size_t n) {
    static unsigned state = 1;
    for (size_t i = 0; i < n; i++) data[i] = (float)(rand_r(&state) % 2001 - 1000) / 500;
}
#define FILL(array) fill(array, sizeof(array) / sizeof *(array))

int main(int argc, char **argv) {
    if (argc > 1) rounds = atoi(argv[1]);
    const int callers = argc > 2 ? atoi(argv[2]) : 4;
    FILL(q), FILL(k), FILL(v), FILL(dout), FILL(k_cache), FILL(v_cache), FILL(high), FILL(low);
    for (int i = 0; i < H * ROWS; i++)
        for (int j = 0; j < WIDTH; j++) lists[i * WIDTH + j] = (i + 2 * j) % ROWS;
    for (int i = 0; i < B * TABLE; i++) {
        tables[i] = (i * 7) % PAGES;
        summary_tables[i] = i % TABLE;
    }
    for (int b = 0; b < B; b++)
        summary_tables[b * TABLE] = b * 4, summary_tables[b * TABLE + 1] = b * 4 + 1, summary_tables[b * TABLE + 2] = b * 4 + 2;
    ba_block_sparse_args a = forward_args(forward_out, forward_lse, 1, 1);
    if (ba_block_sparse_attention(&a) != BA_OK) return puts(ba_last_error()), 1;
    for (int n = 0; n < OPERATIONS; n++) {
        expected[n] = new_room();
        if (operations[n].run(expected[n], 1) != BA_OK) return printf("%s: %s\n", operations[n].name, ba_last_error()), 1;
    }
    pthread_t threads[64];
    for (int i = 0; i < callers; i++)
        if (pthread_create(&threads[i], NULL, caller, (void *)(uintptr_t)(i + 1)) != 0) return 2;
    for (int i = 0; i < callers; i++) pthread_join(threads[i], NULL);
    for (int n = 0; n < OPERATIONS; n++) free(expected[n]);
    printf("%d passed, %d failed\n", callers * rounds - failures, (int)failures);
    return failures != 0;
}
