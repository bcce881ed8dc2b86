/* AMX tiles with AVX-512 beside them. Dtypes that tiles do not serve have the kernels of the levels below. */
#include "kernels/tables.h"
#ifdef BA_HAVE_amx

#ifdef BA_EMULATED
#define BA_TILE_EMULATED
#endif
#define BA_LEVEL amx
#define BA_LEVEL_ENUM BA_ISA_AMX
#define BA_LANES 16
#include "kernels/tiles/bfloat16_tmpl.inc"

#endif
