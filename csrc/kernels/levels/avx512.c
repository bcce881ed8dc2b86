/* The level avx512 (F, BW, DQ, VL). The micro-kernel has 8 x 2 accumulators in 32 registers. */
#include "kernels/tables.h"
#ifdef BA_HAVE_avx512

#define BA_TRAITS_AVX512
#include "kernels/traits.h"
#define BA_LEVEL avx512
#define BA_LEVEL_ENUM BA_ISA_AVX512
#define BA_ACC_ROWS 8
#define BA_EACH_ROW_COUNT(X) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8)
#define BA_LANES 16
#include "kernels/levels/vectors_tmpl.inc"

#endif
