/* The level amx, float16 on AMX tiles: every element is exactly the sum of two bfloat16 pieces. */
#include "kernels/tables.h"
#ifdef BA_HAVE_amx

#ifdef BA_EMULATED
#define BA_TILE_EMULATED
#endif
#define BA_TRAITS_AVX512_L2
#include "kernels/traits.h"
#define BA_LEVEL amx
#define BA_LEVEL_ENUM BA_ISA_AMX
#define BA_LANES 16
#define BA_PIECES 2
#define BA_SPLIT_ELEMENT uint16_t
#define BA_SPLIT_FROM(p) NAME(v_from_f16)(p)
#define BA_SPLIT_TO(p, v) NAME(v_to_f16)(p, v)
#define BA_SPLIT_DTYPE float16
#include "kernels/tiles/split_tmpl.inc"

#endif
