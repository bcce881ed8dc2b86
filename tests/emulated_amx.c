/* The text over tiles, with vec/vec.h's generic forms and tiles/tile.h's emulation: so it is checked on a machine that lacks both.
 * Linked into checkkernels only. */
#ifndef __clang__
#pragma GCC optimize("O1") /* gcc 12 takes half a minute at -O3 to take 16 x 16 transposes apart into scalars */
#endif
#undef __AVX512F__ /* or vec/vec.h would take the instructions */

#define BA_TILE_EMULATED
#define BA_TRAITS_AMX
#include "kernels/traits.h"
#define BA_LEVEL emulated_amx
#define BA_LEVEL_ENUM BA_ISA_PORTABLE
#define BA_LANES 16
#include "kernels/tiles/bfloat16_tmpl.inc"
