/* Small helpers that every C file of the library may use. Only static inline functions stand here. */
#ifndef BA_CORE_COMMON_H
#define BA_CORE_COMMON_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

static inline int64_t ba_min(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t ba_max(int64_t a, int64_t b) { return a > b ? a : b; }
static inline int64_t ba_ceil_div(int64_t a, int64_t b) { return a / b + (a % b != 0); }
static inline int64_t ba_round_up(int64_t a, int64_t b) { return ba_ceil_div(a, b) * b; }

#endif
