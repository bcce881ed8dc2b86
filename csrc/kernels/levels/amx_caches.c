/* The level amx, kernels for caches: the vector kernels of levels/avx512.c, but with the traits of cores that have tiles: prefetches go into L2. The
 * processors with tiles drop lines from L1 that arrive too early; those that levels/avx512.c serves best do not carry out prefetches into L2. */
#include "kernels/tables.h"
#ifdef BA_HAVE_amx

#define BA_TRAITS_AMX
#include "kernels/traits.h"
#define BA_LEVEL amx
#define BA_LEVEL_ENUM BA_ISA_AMX
#define BA_LANES 16
#define BA_SUFFIX BA_CAT(f32, BA_CAT(BA_LEVEL, cache))
#include "kernels/vec/vec.h"
#define BA_WIDE (2 * BA_LANES)
#define BA_NARROW BA_LANES
#include "kernels/float_elements_tmpl.inc"
#include "kernels/levels/caches_tmpl.inc"

#endif
