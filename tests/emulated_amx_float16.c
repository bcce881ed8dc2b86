/* The text over tiles for float16, with vec/vec.h's generic forms and tiles/tile.h's emulation: so it is checked on a machine that lacks both.
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
#define BA_PIECES 2
#define BA_ELEMENT_BYTES 2
#define BA_SPLIT_ELEMENT uint16_t
#define BA_SPLIT_FROM(p) NAME(v_from_f16)(p)
#define BA_SPLIT_TO(p, v) NAME(v_to_f16)(p, v)
#define BA_SPLIT_DTYPE float16
#include "kernels/tiles/split_tmpl.inc"
