/* The level neon. The micro-kernel has 8 x 2 accumulators of 4 floats in 32 registers, and 8 registers for elements of K. */
#include "kernels/tables.h"
#ifdef BA_HAVE_neon

#ifndef BA_EMULATED
#define BA_NEON
#endif
#define BA_TRAITS_NEON
#include "kernels/traits.h"
#define BA_LEVEL neon
#define BA_LEVEL_ENUM BA_ISA_NEON
#define BA_ACC_ROWS 8
#define BA_EACH_ROW_COUNT(X) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8)
#define BA_LANES 4
#include "kernels/levels/vectors_tmpl.inc"

#endif
