#include "kernels/kernels.h"

/* Found by measuring (benchmark/README.md says how and what else was tried).
 * chunk_keys: scores of a wide panel and its packed queries stay in L1 together.
 * list_keys: a row does not keep its turn for so long that other rows no longer find the keys they share in L2.
 * gradient_*: weights and slopes of a tile over a chunk, and the chunk's rows of K, V, dK and dV, stay in L2.
 * by_block_lanes: their sums, float [v_dim] each, take half of L2 at v_dim = 128; half as many were no faster. by_block_least_lanes,
 * by_block_most_lanes: found on Zen 5 (benchmark/README.md), not timed elsewhere. tile_queries: one widening of a bf16 or fp16 chunk serves this many
 * queries; queries and output stay in L2. few.followed_*: a token that has a page of memory for itself is a stream that prefetchers read ahead
 * (AVX-512 server, Zen 3), where arithmetic takes less time than reading (on Zen 3 four float32 queries are 15 % faster with requests, one 20 %
 * without; on Zen 5 all are faster with them). few.part_keys: an item of 2048 keys loses little to its beginning and end (Zen 5: of 4096, 1 % less
 * time in 16 bits); few.least_part_keys: one of 256 loses 2 to 18 % of its time (Zen 5), and gives a request of 1024 tokens four parts.
 * few.distances: as much as a core has under way, and some more (Zen 5; Zen 3: 8 of 128 keys); where requests run a chunk ahead, L2 is to have room
 * for it: few.keys, few.bytes. few.gathered_bytes: Zen 5, attention over selected blocks in token-major pages (5 to 15 % where rows are of 128 and
 * 256 bytes, nothing or less where they are longer); not timed elsewhere. */
static const ba_tuning rows[BA_ISA_COUNT] = {
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
            .few =
                {
                    .part_keys = 2048,
                    .least_part_keys = 256,
                    .keys = 64,
                    .bytes = 128 << 10,
                    .followed_bytes = INT64_MAX,
                    .followed_queries = 8,
                    .gathered_bytes = 0,
                    .distances = {128 << 10},
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
            .few =
                {
                    .part_keys = 2048,
                    .least_part_keys = 256,
                    .keys = 64,
                    .bytes = 128 << 10,
                    .followed_bytes = INT64_MAX,
                    .followed_queries = 8,
                    .gathered_bytes = 0,
                    .distances = {128 << 10},
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
            .few =
                {
                    .part_keys = 2048,
                    .least_part_keys = 256,
                    .keys = 64,
                    .bytes = 128 << 10,
                    .followed_bytes = INT64_MAX,
                    .followed_queries = 8,
                    .gathered_bytes = 0,
                    .distances = {128 << 10},
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
            .few =
                {
                    .part_keys = 1024,
                    .least_part_keys = 256,
                    .keys = 128,
                    .bytes = 2 << 20,
                    .followed_bytes = 4096,
                    .followed_queries = 2,
                    .gathered_bytes = 0,
                    .distances = {24 << 10},
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
            .few =
                {
                    .part_keys = 2048,
                    .least_part_keys = 256,
                    .keys = 32,
                    .bytes = 256 << 10,
                    .followed_bytes = 4096,
                    .followed_queries = 8,
                    .gathered_bytes = 0,
                    .distances = {8 << 10, 128 << 10},
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
            .few =
                {
                    .part_keys = 4096,
                    .least_part_keys = 256,
                    .keys = 256,
                    .bytes = 4 << 20,
                    .followed_bytes = 4096,
                    .followed_queries = 0,
                    .gathered_bytes = 256,
                    .distances = {8 << 10, 12 << 10, 16 << 10},
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
            .gradient_item_tiles = 4,
            .by_block_lanes = 2048,
            .by_block_most_lanes = 8192,
            .by_block_least_lanes = 64,
            .inline_flops = 3e7,
            .shared_bytes = 512 << 20,
            .few =
                {
                    .part_keys = 2048,
                    .least_part_keys = 256,
                    .keys = 256,
                    .bytes = 4 << 20,
                    .followed_bytes = 4096,
                    .followed_queries = 8,
                    .gathered_bytes = 0,
                    .distances = {16 << 10},
                },
            .tile_few =
                {
                    .part_keys = 2048,
                    .least_part_keys = 256,
                    .keys = 32,
                    .bytes = 256 << 10,
                    .followed_bytes = 4096,
                    .followed_queries = 8,
                    .gathered_bytes = 0,
                    .distances = {64 << 10},
                },
        },
#endif
};

const ba_tuning *ba_tuning_at(ba_isa level) { return &rows[level]; }
