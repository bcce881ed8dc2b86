/* The 16-lane text over vec/vec.h's generic forms, without AVX-512 and with whatever flags the compiler is given: so the
 * wide code is checked on a machine that lacks it. Linked into checkkernels only. */
#ifndef __clang__
#pragma GCC optimize("Og") /* gcc 12 takes half a minute at -O3 to take 16 x 16 transposes apart into scalars */
#endif
#undef __AVX512F__ /* or vec/vec.h would take the instructions */

#define BA_TRAITS_AVX512
#include "kernels/traits.h"
#define BA_LEVEL emulated
#define BA_LEVEL_ENUM BA_ISA_PORTABLE
#define BA_ACC_ROWS 8
#define BA_EACH_ROW_COUNT(X) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8)
#define BA_LANES 16
#include "kernels/levels/vectors_tmpl.inc"
