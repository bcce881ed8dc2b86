/* The level neon_bf16: scores of bfloat16 are made by BFDOT, which multiplies pairs of dims, and rows of K are read in place. The vector kernels do
 * everything else, with V widened to float32. Weights stay float32: if they were rounded to bfloat16, their residuals would need a second product,
 * and nothing would be faster. */
#include "kernels/tables.h"
#ifdef BA_HAVE_neon_bf16

#define BA_NEON
#define BA_TRAITS_NEON
#include "kernels/traits.h"
#define BA_LEVEL neon_bf16
#define BA_LEVEL_ENUM BA_ISA_NEON_BF16
#define BA_ACC_ROWS 8
#define BA_EACH_ROW_COUNT(X) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8)
#define BA_LANES 4
#define BA_SUFFIX BA_CAT(f32, BA_LEVEL)
#include "kernels/vec/vec.h"

#define BA_OWN_SCORES "kernels/panel/scores_bf16_tmpl.inc"
#define BA_VECTORS 2
#define BA_WIDTH wide
#include "kernels/panel/attend_tmpl.inc"
#define BA_VECTORS 1
#define BA_WIDTH narrow
#include "kernels/panel/attend_tmpl.inc"
#include "kernels/few/join_tmpl.inc"

#define BA_WIDE (2 * BA_LANES)
#define BA_NARROW BA_LANES
#define BA_ELEMENT uint16_t
#define BA_FROM(p) NAME(v_from_bf16)(p)
#define BA_TO(p, v) NAME(v_to_bf16)(p, v)
#define BA_DTYPE bfloat16
#define BA_PAIRED
#include "kernels/elements_tmpl.inc"

/* Packs queries as [pair of dims][lane][2]. They are not scaled. */
BA_INLINE void NAME(pack_pairs)(const int64_t lanes, uint16_t *panel, const uint16_t *const *q_rows, int64_t n, int64_t dim) {
    for (int64_t lane = 0; lane < lanes; lane += BA_LANES)
        for (int64_t d = 0; d < dim; d += 2 * BA_LANES) {
            vec square[BA_LANES] = {{0}};
            for (int64_t i = 0; i < ba_min(BA_LANES, n - lane); i++)
                memcpy(&square[i], q_rows[lane + i] + d, (size_t)ba_min(2 * BA_LANES, dim - d) * sizeof *panel);
            NAME(v_transpose)(square);
            for (int64_t i = 0; i < BA_LANES; i++) memcpy(panel + (d / 2 + i) * 2 * lanes + 2 * lane, &square[i], sizeof *square);
        }
}
static BA_PACK_QUERIES(NAME(pack_pairs_wide)) {
    (void)scale;
    NAME(pack_pairs)(BA_WIDE, panel, (const uint16_t *const *)q_rows, n, dim);
}
static BA_PACK_QUERIES(NAME(pack_pairs_narrow)) {
    (void)scale;
    NAME(pack_pairs)(BA_NARROW, panel, (const uint16_t *const *)q_rows, n, dim);
}

#define BA_BOTH(part) {BA_CAT(NAME(part), wide), BA_CAT(NAME(part), narrow)}
const ba_attend_family ba_attend_neon_bf16_bfloat16 = {
    .name = "attend_bfloat16_neon_bf16_8x2x4",
    .isa = BA_LEVEL_ENUM,
    .lanes = {BA_WIDE, BA_NARROW},
    .dim_pad = BA_PACK_PAD,
    .key_pad = 1,
    .real_size = sizeof(float),
    .q_bytes = sizeof(float), /* few kernels use queries that are packed as reals */
    .scratch_per_key = BA_WIDE * sizeof(float),
    .pack_bytes = sizeof(float),
    .key_align = BA_LANES,
    .pack =
        &(const ba_pack_kernels){
            .values = BA_CAT(NAME(pack_rows), bfloat16),
            .queries = {NAME(pack_pairs_wide), NAME(pack_pairs_narrow)},
            .finish = {BA_CAT(NAME(finish_wide), bfloat16), BA_CAT(NAME(finish_narrow), bfloat16)},
            .finish_reals = {BA_CAT(NAME(finish_reals_wide), bfloat16), BA_CAT(NAME(finish_reals_narrow), bfloat16)},
            .merge_row = BA_CAT(NAME(merge_row), bfloat16),
            .add_reals = BA_CAT(NAME(add_reals), bfloat16),
        },
    .panel =
        &(const ba_panel_kernels){
            .attend = BA_BOTH(attend),
            .scores = BA_BOTH(scores),
            .sum_blocks = BA_CAT(NAME(sum_blocks), wide),
            .sum_heads = BA_CAT(NAME(sum_heads), wide),
            .softmax = BA_BOTH(softmax),
            .values = BA_BOTH(values),
        },
    .few =
        &(const ba_few_kernels){
            .attend = {[BA_BFLOAT16] = BA_CAT(NAME(few), bfloat16)},
            .pack_queries = BA_CAT(NAME(pack_few), bfloat16),
            .order_queries = BA_CAT(NAME(order_few), bfloat16),
            .finish = BA_CAT(NAME(finish_few), bfloat16),
            .finish_reals = BA_CAT(NAME(finish_reals_few), bfloat16),
            .join = NAME(join_few),
        },
};

#endif
