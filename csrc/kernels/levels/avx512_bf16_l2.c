/* The kernels for few queries of levels/avx512_bf16.c, with prefetches into L2 instead of L1. Where cores carry out such prefetches, a family with
 * these kernels replaces the family of that file. Both families return the same bits. */
#include "kernels/tables.h"
#ifdef BA_HAVE_avx512_bf16

#define BA_TRAITS_AVX512_L2
#include "kernels/traits.h"
#define BA_LEVEL avx512_bf16_l2
#define BA_LANES 16
#define BA_SUFFIX BA_CAT(f32, BA_LEVEL)
#include "kernels/vec/vec.h"
#include "kernels/levels/pairs_few_tmpl.inc"

#endif
