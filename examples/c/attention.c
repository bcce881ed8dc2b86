/* Attention from C: causal block-sparse attention over lists of blocks, and a step of decoding three requests over a paged cache. The results are
 * compared with plain arithmetic in double. The program prints the largest differences, and exits with status 1 if one is too large.
 *
 * After `make lib` and `make install-lib`, compile it with the shared library or with the static one:
 *
 *     cc -O2 attention.c -o attention $(pkg-config --cflags --libs blitz_attn) -lm
 *     cc -O2 attention.c -o attention $(pkg-config --cflags blitz_attn) $(pkg-config --variable=libdir blitz_attn)/libblitz_attn.a -lm -pthread
 */
#include <blitz_attn.h>
#include <math.h>
#include <stdio.h>

enum { HEADS = 4, KV_HEADS = 2, D = 64 };

static void fill(float *numbers, size_t bytes, double step) {
    for (size_t i = 0; i < bytes / sizeof(float); i++) numbers[i] = (float)sin(step * (double)i);
}

/* The maximum of `largest` and of the differences between `out` and softmax(q k^T / sqrt(D)) v, over the rows k and v that q sees. */
static double compare(double largest, const float *out, const float *q, const float *const *k, const float *const *v, int keys) {
    double sum = 0, mean[D] = {0};
    for (int j = 0; j < keys; j++) {
        double score = 0;
        for (int d = 0; d < D; d++) score += (double)q[d] * k[j][d];
        const double weight = exp(score / sqrt(D));
        sum += weight;
        for (int d = 0; d < D; d++) mean[d] += weight * v[j][d];
    }
    for (int d = 0; d < D; d++) {
        const double difference = fabs(out[d] - mean[d] / sum);
        if (!(difference <= largest)) largest = isnan(difference) ? INFINITY : difference;
    }
    return largest;
}

/* ---- Block-sparse attention: each block of queries attends to the first block of keys, the block before its own, and its own ------- */

enum { TOKENS = 500, BLOCK = 64, ROWS = (TOKENS + BLOCK - 1) / BLOCK, WIDTH = 3 };
static float q[HEADS][TOKENS][D], k[KV_HEADS][TOKENS][D], v[KV_HEADS][TOKENS][D], out[HEADS][TOKENS][D];
static int32_t lists[ROWS][WIDTH]; /* one list for all heads; -1 ends a row */

static double block_sparse(void) {
    fill(&q[0][0][0], sizeof q, 0.37);
    fill(&k[0][0][0], sizeof k, 0.73);
    fill(&v[0][0][0], sizeof v, 0.11);
    for (int row = 0; row < ROWS; row++)
        for (int i = 0; i < WIDTH; i++) lists[row][i] = i > row ? -1 : i == 0 ? 0 : row < WIDTH ? i : row - WIDTH + 1 + i;

    ba_block_sparse_args a = ba_block_sparse_args_init(); /* the scale is 1 / sqrt(D) */
    a.q = ba_contiguous(q, BA_FLOAT32, 4, (int64_t[]){1, HEADS, TOKENS, D});
    a.k = ba_contiguous(k, BA_FLOAT32, 4, (int64_t[]){1, KV_HEADS, TOKENS, D});
    a.v = ba_contiguous(v, BA_FLOAT32, 4, (int64_t[]){1, KV_HEADS, TOKENS, D});
    a.out = ba_contiguous(out, BA_FLOAT32, 4, (int64_t[]){1, HEADS, TOKENS, D});
    a.blocks = ba_contiguous(lists, BA_INT32, 2, (int64_t[]){ROWS, WIDTH});
    a.block_q = a.block_kv = BLOCK;
    a.causal = 1;
    if (ba_block_sparse_attention(&a) != BA_OK) {
        puts(ba_last_error());
        return INFINITY;
    }

    double largest = 0;
    for (int head = 0; head < HEADS; head++)
        for (int i = 0; i < TOKENS; i++) {
            const int kv_head = head / (HEADS / KV_HEADS), row = i / BLOCK;
            const float *keys[TOKENS], *values[TOKENS];
            int count = 0;
            for (int j = 0; j <= i; j++) {
                const int column = j / BLOCK;
                if (column != 0 && column != row - 1 && column != row) continue;
                keys[count] = k[kv_head][j];
                values[count++] = v[kv_head][j];
            }
            largest = compare(largest, out[head][i], q[head][i], keys, values, count);
        }
    return largest;
}

/* ---- A step of decoding: the new token of each request goes into the cache, and its query attends to all tokens of the request ----- */

enum { REQUESTS = 3, PAGES = 12, PAGE_SIZE = 16, MOST_PAGES = 5 };
static float k_cache[PAGES][PAGE_SIZE][KV_HEADS][D], v_cache[PAGES][PAGE_SIZE][KV_HEADS][D];
static float new_q[REQUESTS][HEADS][D], new_k[REQUESTS][KV_HEADS][D], new_v[REQUESTS][KV_HEADS][D], new_out[REQUESTS][HEADS][D];
static int32_t tables[REQUESTS][MOST_PAGES] = {{7}, {2, 11, 0, 5, 9}, {3, 10, 1}}; /* in the order of the tokens */
static const int64_t seq_lens[REQUESTS] = {1, 70, 33};                             /* with the new token */

static double decode(void) {
    fill(&k_cache[0][0][0][0], sizeof k_cache, 0.59);
    fill(&v_cache[0][0][0][0], sizeof v_cache, 0.83);
    fill(&new_q[0][0][0], sizeof new_q, 0.41);
    fill(&new_k[0][0][0], sizeof new_k, 0.67);
    fill(&new_v[0][0][0], sizeof new_v, 0.19);

    ba_paged_args a = ba_paged_args_init();
    a.q = ba_contiguous(new_q, BA_FLOAT32, 3, (int64_t[]){REQUESTS, HEADS, D});
    a.k_cache = ba_contiguous(k_cache, BA_FLOAT32, 4, (int64_t[]){PAGES, PAGE_SIZE, KV_HEADS, D});
    a.v_cache = ba_contiguous(v_cache, BA_FLOAT32, 4, (int64_t[]){PAGES, PAGE_SIZE, KV_HEADS, D});
    a.block_tables = ba_contiguous(tables, BA_INT32, 2, (int64_t[]){REQUESTS, MOST_PAGES});
    a.seq_lens = seq_lens;
    a.batch = REQUESTS;
    a.out = ba_contiguous(new_out, BA_FLOAT32, 3, (int64_t[]){REQUESTS, HEADS, D});
    const ba_tensor keys_to_add = ba_contiguous(new_k, BA_FLOAT32, 3, (int64_t[]){REQUESTS, KV_HEADS, D});
    const ba_tensor values_to_add = ba_contiguous(new_v, BA_FLOAT32, 3, (int64_t[]){REQUESTS, KV_HEADS, D});
    if (ba_append_kv(&keys_to_add, &values_to_add, NULL, &a) != BA_OK || ba_paged_attention(&a) != BA_OK) {
        puts(ba_last_error());
        return INFINITY;
    }

    double largest = 0;
    for (int request = 0; request < REQUESTS; request++)
        for (int head = 0; head < HEADS; head++) {
            const int kv_head = head / (HEADS / KV_HEADS), tokens = (int)seq_lens[request];
            const float *keys[MOST_PAGES * PAGE_SIZE], *values[MOST_PAGES * PAGE_SIZE];
            for (int t = 0; t < tokens - 1; t++) {
                const int page = tables[request][t / PAGE_SIZE];
                keys[t] = k_cache[page][t % PAGE_SIZE][kv_head];
                values[t] = v_cache[page][t % PAGE_SIZE][kv_head];
            }
            keys[tokens - 1] = new_k[request][kv_head];
            values[tokens - 1] = new_v[request][kv_head];
            largest = compare(largest, new_out[request][head], new_q[request][head], keys, values, tokens);
        }
    return largest;
}

int main(void) {
    const double sparse = block_sparse(), paged = decode();
    printf("block-sparse attention: largest difference %.1e\n", sparse);
    printf("paged decode: largest difference %.1e\n", paged);
    return sparse < 1e-5 && paged < 1e-5 ? 0 : 1;
}
