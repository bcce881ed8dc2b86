/* The level avx2, with FMA and F16C. The micro-kernel has 6 x 2 accumulators in 16 registers. */
#include "kernels/tables.h"
#ifdef BA_HAVE_avx2

#define BA_TRAITS_AVX2
#include "kernels/traits.h"
#define BA_LEVEL avx2
#define BA_LEVEL_ENUM BA_ISA_AVX2
#define BA_ACC_ROWS 6
#define BA_EACH_ROW_COUNT(X) X(1) X(2) X(3) X(4) X(5) X(6)
#define BA_LANES 8
#include "kernels/levels/vectors_tmpl.inc"

#endif
