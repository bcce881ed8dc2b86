#include "kernels/kernels.h"

/* Found by measuring (benchmark/README.md says how and what else was tried).
 * chunk_keys: scores of a wide panel and its packed queries stay in L1 together.
 * tile_queries: one widening of a bf16 or fp16 chunk serves this many queries; queries and output stay in L2. */
/* clang-format off */
static const ba_tuning rows[BA_ISA_COUNT] = {
    /*                     chunk_keys  tile_queries  split_keys  group_tiles  inline_flops */
    [BA_ISA_PORTABLE] = {         128,          128,       2048,           4,          4e5 },
    [BA_ISA_AVX2]     = {         256,          128,       2048,           4,          4e6 },
    [BA_ISA_AVX512]   = {         256,          128,       2048,           4,          8e6 },
    [BA_ISA_AVX512_BF16] = {      256,          128,       2048,           4,          8e6 },
    [BA_ISA_AMX]      = {         512,          128,       2048,           4,          3e7 },
};
/* clang-format on */

const ba_tuning *ba_tuning_at(ba_isa level) { return &rows[level]; }
