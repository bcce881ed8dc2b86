/* The level amx: bfloat16 on AMX tiles, with AVX-512 beside them. amx_float16.c and amx_float32.c have the families of those dtypes.
 * Dtypes without a family here use the kernels of the levels below. Few queries use the kernels for caches of levels/avx512_l2.c, except bfloat16
 * queries in large KV groups, which have kernels here. */
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
#include "kernels/tiles/bfloat16_tmpl.inc"

#endif
