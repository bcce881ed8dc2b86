/* Vectors over a cache, for the processors that have tiles: AVX-512 as in levels/avx512.c, but prefetches go to L2. These cores keep few lines under
 * way into L1, and drop what comes early from it before it is used; those without tiles (Zen) do nothing for a prefetch into L2. */
#include "kernels/tables.h"
#ifdef BA_HAVE_amx

#define BA_LEVEL amx
#define BA_LEVEL_ENUM BA_ISA_AMX
#define BA_LANES 16
#define BA_PREFETCH_LEVEL 2
#define BA_SUFFIX BA_CAT(f32, BA_CAT(BA_LEVEL, cache))
#include "kernels/vec/vec.h"
#define BA_WIDE (2 * BA_LANES)
#define BA_NARROW BA_LANES
#include "kernels/float_elements_tmpl.inc"
#include "kernels/levels/caches_tmpl.inc"

#endif
