/* The portable level: compiled for the platform's baseline, without further flags. It has the only float64 family. */
#include "kernels/tables.h"

#define BA_TRAITS_PORTABLE
#include "kernels/traits.h"
#define BA_LEVEL portable
#define BA_LEVEL_ENUM BA_ISA_PORTABLE
#define BA_ACC_ROWS 4
#define BA_EACH_ROW_COUNT(X) X(1) X(2) X(3) X(4)

#define BA_LANES 4
#include "kernels/levels/vectors_tmpl.inc"

#undef BA_LANES
#define BA_LANES 2
#define BA_REAL_DOUBLE
#include "kernels/traits.h"
#include "kernels/levels/vectors_tmpl.inc"
