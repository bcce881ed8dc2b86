#include <assert.h>

#include "kernels/kernels.h"
#include "kernels/work_tuning.h"

/* The numbers were found by measuring, level by level (docs/notes/ says how, and what else was tried); kernels.h and work_tuning.h say what each
 * number is. The rules:
 *
 *     chunk_keys                 the scores of a wide panel and its packed queries fit L1 together
 *     list_keys                  a list row is not attended for so long that the keys that it shares with other list rows leave L2
 *     tile_queries               packing one chunk serves as many queries as have room in L2 with their output
 *     gradient_*                 an item's weights and slopes over a chunk, and the chunk's rows of K, V, dK and dV, fit L2
 *     few_least_heads            with fewer query heads, tiles (amx) are so empty that vectors are as fast, and making pairs of int8 (avx512_bf16)
 *                                takes more time than multiplying pairs saves
 *     least_pairs                splitting elements into pieces costs as much as attending so many queries gains
 *     page_offset                all memory that a step of the kernel reads and stores is spread evenly over the sets of L1
 *     by_block_lanes             the sums of the queries of an item take half of L2 at v_dim = 128
 *     few_queries                reading a chunk from cache once for every eight queries takes less time than packing it
 *     few.part_keys              an item of so many keys loses little to its beginning and its end
 *     few.least_part_keys        a short request still gives several threads work
 *     few.keys, few.bytes        where prefetches run one chunk ahead, L2 holds both chunks
 *     distances                  somewhat more bytes than a core has outstanding at a time
 *     followed_*                 where all heads of a token lie side by side, their rows are one stream, which hardware prefetchers follow;
 *                                prefetches then pay only for so many queries that arithmetic takes as long as reading */
enum { KIB = 1 << 10, MIB = 1 << 20 };
#define ALL INT64_MAX

/* neon and neon_bf16 are not timed yet. avx512_bf16 has own_few_queries because its panels of bfloat16 multiply pairs, and are faster than others.
 * amx has no few_least_heads for int8 because tiles were not faster than vectors there. tile_few was found on a model of the tile unit, and not swept
 * on tiles (docs/notes/decode_xeon.rst): making scores reads half of the bytes in a third of the time, so that prefetches fall behind. The distance
 * is long enough for this. */
/* clang-format off */
#define NUMBERS(N) \
    /*name                             portable   neon       neon_bf16  avx2      avx512     avx512_bf16  amx */ \
    N(chunk_keys,                      128,       256,       256,       256,      256,       256,         512) \
    N(list_keys,                       0,         0,         0,         0,        0,         0,           256) \
    N(tile_queries,                    128,       128,       128,       128,      128,       128,         128) \
    N(item_tiles,                      4,         4,         4,         4,        4,         4,           8) \
    N(most_item_tiles,                 4,         4,         4,         4,        4,         4,           32) \
    N(gradient_keys,                   128,       128,       128,       128,      128,       128,         128) \
    N(gradient_queries,                128,       128,       128,       128,      128,       128,         128) \
    N(gradient_item_tiles,             4,         4,         4,         4,        4,         4,           4) \
    N(gradient_list_tiles,             4,         4,         4,         4,        4,         4,           2) \
    N(by_block_lanes,                  2048,      2048,      2048,      2048,     2048,      1024,        2048) \
    N(by_block_most_lanes,             8192,      8192,      8192,      8192,     8192,      8192,        8192) \
    N(by_block_least_lanes,            64,        64,        64,        64,       64,        64,          64) \
    N(inline_flops,                    4e5,       2e6,       2e6,       4e6,      8e6,       8e6,         3e7) \
    N(shared_bytes,                    0,         0,         0,         0,        512 * MIB, 512 * MIB,   512 * MIB) \
    N(few_least_heads[BA_BFLOAT16],    0,         0,         0,         0,        0,         1,           5) \
    N(few_least_heads[BA_FLOAT8_E4M3], 0,         0,         0,         0,        0,         1,           5) \
    N(few_least_heads[BA_INT8],        0,         0,         0,         0,        0,         4,           0) \
    N(page_offset,                     0,         0,         0,         0,        0,         0,           2048) \
    N(least_pairs[BA_FLOAT32],         0,         0,         0,         0,        0,         0,           72) \
    N(least_pairs[BA_FLOAT16],         0,         0,         0,         0,        0,         0,           12) \
    N(few_queries,                     16,        16,        16,        40,       40,        40,          16) \
    N(own_few_queries,                 0,         0,         0,         0,        0,         24,          8) \
    N(few.part_keys,                   2048,      2048,      2048,      1024,     2048,      4096,        2048) \
    N(few.least_part_keys,             256,       256,       256,       256,      256,       256,         256) \
    N(few.keys,                        64,        64,        64,        128,      32,        256,         256) \
    N(few.bytes,                       128 * KIB, 128 * KIB, 128 * KIB, 2 * MIB,  256 * KIB, 4 * MIB,     4 * MIB) \
    N(few.followed_bytes,              ALL,       ALL,       ALL,       4096,     4096,      4096,        4096) \
    N(few.gathered_bytes,              0,         0,         0,         0,        0,         256,         0) \
    N(few.into_l2.followed_queries,    8,         8,         8,         2,        0,         0,           8) \
    N(few.into_l2.distances[0],        128 * KIB, 128 * KIB, 128 * KIB, 24 * KIB, 16 * KIB,  16 * KIB,    16 * KIB) \
    N(few.into_l1.followed_queries,    0,         0,         0,         0,        8,         0,           0) \
    N(few.into_l1.distances[0],        0,         0,         0,         0,        8 * KIB,   8 * KIB,     0) \
    N(few.into_l1.distances[1],        0,         0,         0,         0,        128 * KIB, 12 * KIB,    0) \
    N(few.into_l1.distances[2],        0,         0,         0,         0,        0,         16 * KIB,    0) \
    N(tile_few.part_keys,              0,         0,         0,         0,        0,         0,           2048) \
    N(tile_few.least_part_keys,        0,         0,         0,         0,        0,         0,           256) \
    N(tile_few.keys,                   0,         0,         0,         0,        0,         0,           128) \
    N(tile_few.bytes,                  0,         0,         0,         0,        0,         0,           2 * MIB) \
    N(tile_few.followed_bytes,         0,         0,         0,         0,        0,         0,           4096) \
    N(tile_few.into_l2.distances[0],   0,         0,         0,         0,        0,         0,           128 * KIB)
/* clang-format on */

#define AT_PORTABLE(name, portable, neon, neon_bf16, avx2, avx512, avx512_bf16, amx) .name = portable,
#define AT_NEON(name, portable, neon, neon_bf16, avx2, avx512, avx512_bf16, amx) .name = neon,
#define AT_NEON_BF16(name, portable, neon, neon_bf16, avx2, avx512, avx512_bf16, amx) .name = neon_bf16,
#define AT_AVX2(name, portable, neon, neon_bf16, avx2, avx512, avx512_bf16, amx) .name = avx2,
#define AT_AVX512(name, portable, neon, neon_bf16, avx2, avx512, avx512_bf16, amx) .name = avx512,
#define AT_AVX512_BF16(name, portable, neon, neon_bf16, avx2, avx512, avx512_bf16, amx) .name = avx512_bf16,
#define AT_AMX(name, portable, neon, neon_bf16, avx2, avx512, avx512_bf16, amx) .name = amx,

static const ba_tuning levels[BA_ISA_COUNT] = {
    [BA_ISA_PORTABLE] = {NUMBERS(AT_PORTABLE)},
#ifdef __aarch64__
    [BA_ISA_NEON] = {NUMBERS(AT_NEON)},
    [BA_ISA_NEON_BF16] = {NUMBERS(AT_NEON_BF16)},
#else
    [BA_ISA_AVX2] = {NUMBERS(AT_AVX2)},         [BA_ISA_AVX512] = {NUMBERS(AT_AVX512)}, [BA_ISA_AVX512_BF16] = {NUMBERS(AT_AVX512_BF16)},
    [BA_ISA_AMX] = {NUMBERS(AT_AMX)},
#endif
};

const ba_tuning *ba_tuning_at(ba_isa level) {
    assert(levels[level].chunk_keys > 0); /* it fails where the level has no line in `levels`: its numbers are then 0 */
    return &levels[level];
}

const ba_work_tuning ba_work = {
    .parts = 8,
    .many_tiles = 16,
    .smaller_share = 0.95,
    .items = 8,
    .few_items = 4,
    .by_block_items = 4,
    .by_block_keys = 8,
    .by_block_young = 3,
    .alike_keys = 8,
    .few_keys = 64,
    .most_entries = 1 << 20,
    .survey_entries = 2e5,
    .small_work = 1e6,
    .small_quantised = 1e5,
    .small_products = 2e6,
    .small_padding = 1 << 20,
    .merge_rows = 256,
    .round_queries = 256,
    .round_bytes = 2 << 20,
    .stored_numbers = 1 << 15,
    .gradient_packs = 4,
    .gradient_keys = 512,
    .quest =
        {
            .pages = 16,
            .run_rows = 128,
            .thread_runs = 4,
            .chunk_rows = 256,
            .single_chunk_rows = 32,
            .ahead_bytes = 2048,
            .ahead_rows = 16,
            .insertion_keys = 64,
            .small_products = 5e5,
        },
    .choose =
        {
            .pooled_keys = 64,
            .ahead_tokens = 32,
            .bands = 8,
            .pooled_bytes = 32 << 20,
            .bucket_keys = 16,
            .moves = 8,
        },
    .tokens =
        {
            .rows = 512,
            .tile_rows = 1024,
            .tiles = 2,
            .part_keys = 512,
        },
    .nsa =
        {
            .mean_tokens = 256,
            .gate_tokens = 64,
            .gradient_tokens = 512,
        },
};
