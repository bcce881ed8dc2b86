#include "kernels/kernels.h"

/* Found by measuring (benchmark/README.md says how and what else was tried).
 * chunk_keys: scores of a wide panel and its packed queries stay in L1 together.
 * list_keys: a row does not keep its turn for so long that other rows no longer find the keys they share in L2.
 * gradient_*: weights and slopes of a tile over a chunk, and the chunk's rows of K, V, dK and dV, stay in L2.
 * meeting_lanes: their sums, float [v_dim] each, take half of L2 at v_dim = 128; half as many were no faster. block_lanes, most_meeting: found on Zen
 * 5 (benchmark/README.md), not timed elsewhere. tile_queries: one widening of a bf16 or fp16 chunk serves this many queries; queries and output stay
 * in L2. few.followed_*: a token that has a page of memory for itself is a stream that prefetchers read ahead (AVX-512 server, Zen 3), where
 * arithmetic takes less time than reading (on Zen 3 four float32 queries are 15 % faster with requests, one 20 % without; on Zen 5 all are faster
 * with them). few.part_keys: an item of 2048 keys loses little to its beginning and end (Zen 5: of 4096, 1 % less time in 16 bits);
 * few.least_part_keys: one of 256 loses 2 to 18 % of its time (Zen 5), and gives a request of 1024 tokens four parts. few.distances: as much as a
 * core has under way, and some more (Zen 5; Zen 3: 8 of 128 keys); where requests run a chunk ahead, L2 is to have room for it: few.keys, few.bytes.
 * few.gathered_bytes: Zen 5, attention over selected blocks in token-major pages (5 to 15 % where rows are of 128 and 256 bytes, nothing or less
 * where they are longer); not timed elsewhere. */
/* clang-format off */
static const ba_tuning rows[BA_ISA_COUNT] = {
    /*                     chunk_keys  list_keys  tile_queries  group_tiles  most_tiles  gradient: keys  queries  tiles  meeting_lanes  most_meeting  block_lanes  inline_flops  shared_bytes  few: part_keys  least_part_keys  keys      bytes  followed_bytes  _queries  gathered_bytes  distances */
    [BA_ISA_PORTABLE]    = {      128,         0,          128,           4,          4,            128,      128,      4,          2048,         8192,          64,          4e5,            0, {         2048,             256,   64, 128 << 10,      INT64_MAX,         8,               0, { 128 << 10 } } },
#ifdef __aarch64__ /* not timed yet */
    [BA_ISA_NEON]        = {      256,         0,          128,           4,          4,            128,      128,      4,          2048,         8192,          64,          2e6,            0, {         2048,             256,   64, 128 << 10,      INT64_MAX,         8,               0, { 128 << 10 } } },
    [BA_ISA_NEON_BF16]   = {      256,         0,          128,           4,          4,            128,      128,      4,          2048,         8192,          64,          2e6,            0, {         2048,             256,   64, 128 << 10,      INT64_MAX,         8,               0, { 128 << 10 } } },
#else
    [BA_ISA_AVX2]        = {      256,         0,          128,           4,          4,            128,      128,      4,          2048,         8192,          64,          4e6,            0, {         1024,             256,  128,   2 << 20,           4096,         2,               0, { 24 << 10 } } },
    [BA_ISA_AVX512]      = {      256,         0,          128,           4,          4,            128,      128,      4,          2048,         8192,          64,          8e6,    512 << 20, {         2048,             256,   32, 256 << 10,           4096,         8,               0, { 8 << 10, 128 << 10 } } },
    [BA_ISA_AVX512_BF16] = {      256,         0,          128,           4,          4,            128,      128,      4,          1024,         8192,          64,          8e6,    512 << 20, {         4096,             256,  256,   4 << 20,           4096,         0,             256, { 8 << 10, 12 << 10, 16 << 10 } } },
    [BA_ISA_AMX]         = {      512,       256,          128,           8,         32,            128,      128,      4,          2048,         8192,          64,          3e7,    512 << 20, {         2048,             256,   32, 256 << 10,           4096,         8,               0, { 8 << 10, 128 << 10 } } },
#endif
};
/* clang-format on */

const ba_tuning *ba_tuning_at(ba_isa level) { return &rows[level]; }
