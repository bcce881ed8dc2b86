/* The level avx512_bf16, whose VDPBF16PS multiplies pairs of bfloat16. The micro-kernel has 8 x 2 accumulators in 32 registers. Only bfloat16 has
 * a family here; the other dtypes use the kernels of the levels below. */
#include "kernels/tables.h"
#ifdef BA_HAVE_avx512_bf16

#define BA_TRAITS_AVX512
#include "kernels/traits.h"
#define BA_LEVEL avx512_bf16
#define BA_LEVEL_L2 avx512_bf16_l2
#define BA_LEVEL_ENUM BA_ISA_AVX512_BF16
#define BA_ACC_ROWS 8
#define BA_EACH_ROW_COUNT(X) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8)
#define BA_LANES 16
#include "kernels/levels/pairs_tmpl.inc"

#endif
