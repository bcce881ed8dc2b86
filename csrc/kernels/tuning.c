#include <assert.h>

#include "kernels/kernels.h"
#include "kernels/work_tuning.h"

/* Found by measuring, level by level (docs/notes/ says how, and what else was tried); kernels.h says what each number is. The rules behind them:
 *
 *     chunk_keys                 the scores of a wide panel and its packed queries fit L1 together
 *     list_keys                  a list row is not attended for so long that the keys it shares with other rows leave L2
 *     tile_queries               packing one chunk serves as many queries as have room in L2 with their output
 *     gradient_*                 an item's weights and slopes over a chunk, and the chunk's rows of K, V, dK and dV, fit L2
 *     few_least_heads            with fewer query heads, tiles (amx) are so empty that vectors are as fast, and making pairs of int8
 *                                (avx512_bf16) takes longer than multiplying them saves
 *     least_pairs                splitting elements into pieces costs as much as attending so many queries gains
 *     page_offset                what a step of the kernel reads and stores together fills all of L1, and not some sets of it twice
 *     by_block_lanes             the sums of the queries of an item take half of L2 at v_dim = 128
 *     few_queries                reading a chunk from cache once for every eight queries takes less time than packing it
 *     few.part_keys              an item of so many keys loses little to its beginning and its end
 *     few.least_part_keys        a short request still gives several threads work
 *     few.keys, few.bytes        where requests run one chunk ahead, L2 holds both chunks
 *     distances                  as many bytes as a core has outstanding, and some more
 *     followed_*                 where all heads of a token lie side by side, their rows are one stream, which hardware prefetchers follow; requests
 *                                then pay only for so many queries that arithmetic takes as long as reading */
static const ba_tuning levels[BA_ISA_COUNT] = {
    [BA_ISA_PORTABLE] =
        {
            .chunk_keys = 128,
            .list_keys = 0,
            .tile_queries = 128,
            .item_tiles = 4,
            .most_item_tiles = 4,
            .gradient_keys = 128,
            .gradient_queries = 128,
            .gradient_item_tiles = 4,
            .by_block_lanes = 2048,
            .by_block_most_lanes = 8192,
            .by_block_least_lanes = 64,
            .inline_flops = 4e5,
            .shared_bytes = 0,
            .few_queries = 16,
            .few =
                {
                    .part_keys = 2048,
                    .least_part_keys = 256,
                    .keys = 64,
                    .bytes = 128 << 10,
                    .followed_bytes = INT64_MAX,
                    .gathered_bytes = 0,
                    .into_l2 = {.followed_queries = 8, .distances = {128 << 10}},
                },
        },
#ifdef __aarch64__ /* not timed yet */
    [BA_ISA_NEON] =
        {
            .chunk_keys = 256,
            .list_keys = 0,
            .tile_queries = 128,
            .item_tiles = 4,
            .most_item_tiles = 4,
            .gradient_keys = 128,
            .gradient_queries = 128,
            .gradient_item_tiles = 4,
            .by_block_lanes = 2048,
            .by_block_most_lanes = 8192,
            .by_block_least_lanes = 64,
            .inline_flops = 2e6,
            .shared_bytes = 0,
            .few_queries = 16,
            .few =
                {
                    .part_keys = 2048,
                    .least_part_keys = 256,
                    .keys = 64,
                    .bytes = 128 << 10,
                    .followed_bytes = INT64_MAX,
                    .gathered_bytes = 0,
                    .into_l2 = {.followed_queries = 8, .distances = {128 << 10}},
                },
        },
    [BA_ISA_NEON_BF16] =
        {
            .chunk_keys = 256,
            .list_keys = 0,
            .tile_queries = 128,
            .item_tiles = 4,
            .most_item_tiles = 4,
            .gradient_keys = 128,
            .gradient_queries = 128,
            .gradient_item_tiles = 4,
            .by_block_lanes = 2048,
            .by_block_most_lanes = 8192,
            .by_block_least_lanes = 64,
            .inline_flops = 2e6,
            .shared_bytes = 0,
            .few_queries = 16,
            .few =
                {
                    .part_keys = 2048,
                    .least_part_keys = 256,
                    .keys = 64,
                    .bytes = 128 << 10,
                    .followed_bytes = INT64_MAX,
                    .gathered_bytes = 0,
                    .into_l2 = {.followed_queries = 8, .distances = {128 << 10}},
                },
        },
#else
    [BA_ISA_AVX2] =
        {
            .chunk_keys = 256,
            .list_keys = 0,
            .tile_queries = 128,
            .item_tiles = 4,
            .most_item_tiles = 4,
            .gradient_keys = 128,
            .gradient_queries = 128,
            .gradient_item_tiles = 4,
            .by_block_lanes = 2048,
            .by_block_most_lanes = 8192,
            .by_block_least_lanes = 64,
            .inline_flops = 4e6,
            .shared_bytes = 0,
            .few_queries = 40,
            .few =
                {
                    .part_keys = 1024,
                    .least_part_keys = 256,
                    .keys = 128,
                    .bytes = 2 << 20,
                    .followed_bytes = 4096,
                    .gathered_bytes = 0,
                    .into_l2 = {.followed_queries = 2, .distances = {24 << 10}},
                },
        },
    [BA_ISA_AVX512] =
        {
            .chunk_keys = 256,
            .list_keys = 0,
            .tile_queries = 128,
            .item_tiles = 4,
            .most_item_tiles = 4,
            .gradient_keys = 128,
            .gradient_queries = 128,
            .gradient_item_tiles = 4,
            .by_block_lanes = 2048,
            .by_block_most_lanes = 8192,
            .by_block_least_lanes = 64,
            .inline_flops = 8e6,
            .shared_bytes = 512 << 20,
            .few_queries = 40,
            .few =
                {
                    .part_keys = 2048,
                    .least_part_keys = 256,
                    .keys = 32,
                    .bytes = 256 << 10,
                    .followed_bytes = 4096,
                    .gathered_bytes = 0,
                    .into_l2 = {.followed_queries = 0, .distances = {16 << 10}},
                    .into_l1 = {.followed_queries = 8, .distances = {8 << 10, 128 << 10}},
                },
        },
    [BA_ISA_AVX512_BF16] =
        {
            .chunk_keys = 256,
            .list_keys = 0,
            .tile_queries = 128,
            .item_tiles = 4,
            .most_item_tiles = 4,
            .gradient_keys = 128,
            .gradient_queries = 128,
            .gradient_item_tiles = 4,
            .by_block_lanes = 1024,
            .by_block_most_lanes = 8192,
            .by_block_least_lanes = 64,
            .inline_flops = 8e6,
            .shared_bytes = 512 << 20,
            .few_least_heads = {[BA_BFLOAT16] = 1, [BA_FLOAT8_E4M3] = 1, [BA_INT8] = 4},
            .few_queries = 40,
            .own_few_queries = 24, /* panels of bfloat16 multiply pairs, and are faster than other panels */
            .few =
                {
                    .part_keys = 4096,
                    .least_part_keys = 256,
                    .keys = 256,
                    .bytes = 4 << 20,
                    .followed_bytes = 4096,
                    .gathered_bytes = 256,
                    .into_l2 = {.followed_queries = 0, .distances = {16 << 10}},
                    .into_l1 = {.followed_queries = 0, .distances = {8 << 10, 12 << 10, 16 << 10}},
                },
        },
    [BA_ISA_AMX] =
        {
            .chunk_keys = 512,
            .list_keys = 256,
            .tile_queries = 128,
            .item_tiles = 8,
            .most_item_tiles = 32,
            .gradient_keys = 128,
            .gradient_queries = 128,
            .gradient_item_tiles = 2,
            .by_block_lanes = 2048,
            .by_block_most_lanes = 8192,
            .by_block_least_lanes = 64,
            .inline_flops = 3e7,
            .shared_bytes = 512 << 20,
            .few_least_heads = {[BA_BFLOAT16] = 5, [BA_FLOAT8_E4M3] = 5}, /* over int8, tiles were not faster than vectors */
            .page_offset = 2048,
            .least_pairs = {[BA_FLOAT32] = 72, [BA_FLOAT16] = 12},
            .few_queries = 16,
            .own_few_queries = 8,
            .few =
                {
                    .part_keys = 2048,
                    .least_part_keys = 256,
                    .keys = 256,
                    .bytes = 4 << 20,
                    .followed_bytes = 4096,
                    .gathered_bytes = 0,
                    .into_l2 = {.followed_queries = 8, .distances = {16 << 10}},
                },
            /* Found on a model of the tile unit, and not swept on tiles (docs/notes/decode_xeon.rst). Prefetches fall behind while scores are made,
             * which read half of the bytes in a third of the time; the distance covers that, too. */
            .tile_few =
                {
                    .part_keys = 2048,
                    .least_part_keys = 256,
                    .keys = 128,
                    .bytes = 2 << 20,
                    .followed_bytes = 4096,
                    .gathered_bytes = 0,
                    .into_l2 = {.followed_queries = 0, .distances = {128 << 10}},
                },
        },
#endif
};

const ba_tuning *ba_tuning_at(ba_isa level) {
    assert(levels[level].chunk_keys > 0); /* or the level has no block above, and its numbers are all 0 */
    return &levels[level];
}

const ba_work_tuning ba_work = {
    .parts = 8,
    .many_tiles = 16,
    .smaller_share = 0.95,
    .items = 8,
    .few_items = 4,
    .row_items = 4,
    .alike_keys = 8,
    .few_keys = 64,
    .most_entries = 1 << 20,
    .survey_entries = 2e5,
    .small_work = 1e6,
    .small_quantised = 1e5,
    .small_products = 2e6,
    .small_padding = 1 << 20,
    .merge_rows = 256,
    .chunk_rows = 256,
    .chunk_bytes = 2 << 20,
    .stored_numbers = 1 << 15,
    .gradient_packs = 4,
    .gradient_keys = 512,
    .quest =
        {
            .pages = 16,
            .stretch_rows = 128,
            .thread_stretches = 4,
            .chunk_rows = 256,
            .single_chunk_rows = 32,
            .ahead_bytes = 2048,
            .ahead_rows = 16,
            .insertion_keys = 64,
            .small_products = 5e5,
        },
    .choose =
        {
            .groups = 64,
            .ahead_tokens = 32,
            .strips = 8,
            .group_bytes = 32 << 20,
            .bucket_keys = 16,
            .moves = 8,
        },
    .nsa =
        {
            .mean_tokens = 256,
            .gate_tokens = 64,
            .gradient_tokens = 512,
        },
};
