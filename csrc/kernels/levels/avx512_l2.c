/* The kernels for caches of levels/avx512.c, with prefetches into L2 instead of L1. The level amx uses these kernels, and so do the levels avx512 and
 * avx512_bf16 where cores carry out such prefetches (ba_prefetches_reach_l2). These cores have VBMI, which the conversion of e4m3 uses. Nothing else
 * differs: these kernels return the same bits as those of levels/avx512.c. */
#include "kernels/tables.h"
#ifdef BA_HAVE_avx512

#define BA_TRAITS_AVX512_L2
#include "kernels/traits.h"
#define BA_LEVEL avx512_l2
#define BA_LEVEL_ENUM BA_ISA_AVX512
#define BA_LANES 16
#define BA_SUFFIX BA_CAT(f32, BA_LEVEL)
#include "kernels/vec/vec.h"
#define BA_WIDE (2 * BA_LANES)
#define BA_NARROW BA_LANES
#include "kernels/float_elements_tmpl.inc"
#include "kernels/levels/caches_tmpl.inc"

#endif
