/* Declares the table that each line of kernels.inc names (a family, a cache table ...), for the files that define, dispatch or check them. */
#ifndef BA_TABLES_H
#define BA_TABLES_H

#include "kernels/kernels.h"

/* The levels of this build. The build defines BA_NO_<isa> for a level whose flags the compiler refuses, or that BLITZ_ATTN_LEVELS does not
 * name. */
#if defined(__x86_64__) && !defined(BA_NO_avx2)
#define BA_HAVE_avx2 1
#endif
#if defined(__x86_64__) && !defined(BA_NO_avx512)
#define BA_HAVE_avx512 1
#endif
#if defined(__x86_64__) && !defined(BA_NO_avx512_bf16)
#define BA_HAVE_avx512_bf16 1
#endif
#if defined(__x86_64__) && !defined(BA_NO_amx)
#define BA_HAVE_amx 1
#endif
#if defined(__aarch64__) && !defined(BA_NO_neon)
#define BA_HAVE_neon 1
#endif
#if defined(__aarch64__) && !defined(BA_NO_neon_bf16) && !defined(BA_EMULATED)
#define BA_HAVE_neon_bf16 1
#endif

/* The entries of an enum that gives the dtypes of kernels.inc their numbers. */
#define BA_DTYPE_NUMBERS                                                                                                                             \
    float32 = BA_FLOAT32, float16 = BA_FLOAT16, bfloat16 = BA_BFLOAT16, float64 = BA_FLOAT64, int8 = BA_INT8, float8_e4m3 = BA_FLOAT8_E4M3,          \
    q8_0 = BA_Q8_0, q4_0 = BA_Q4_0, q4_1 = BA_Q4_1

#define BA_FAMILY(level, dtype) extern const ba_attend_family ba_attend_##level##_##dtype;
#define BA_PROBE(level) extern const ba_probes ba_probes_##level;
#define BA_CACHE(level, dtype) extern const ba_cache_kernels ba_cache_##level##_##dtype;
#define BA_FAMILY_L2(level, dtype) BA_FAMILY(level##_l2, dtype) extern const ba_few_kernels ba_few_##level##_l2_##dtype;
#define BA_CACHE_L2(level, dtype) BA_CACHE(level##_l2, dtype)
#include "kernels/kernels.inc"
#undef BA_FAMILY
#undef BA_CACHE
#undef BA_FAMILY_L2
#undef BA_CACHE_L2
#undef BA_PROBE

#endif
