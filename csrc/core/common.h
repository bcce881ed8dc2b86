/* Small helpers that every C file of the library may use. Only static inline functions stand here. */
#ifndef BA_CORE_COMMON_H
#define BA_CORE_COMMON_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

static inline int64_t ba_min(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t ba_max(int64_t a, int64_t b) { return a > b ? a : b; }
static inline int64_t ba_ceil_div(int64_t a, int64_t b) { return a / b + (a % b != 0); }
static inline int64_t ba_round_up(int64_t a, int64_t b) { return ba_ceil_div(a, b) * b; }

static inline float ba_float_of_bits(uint32_t bits) {
    float number;
    memcpy(&number, &bits, sizeof number);
    return number;
}

/* The exact number that the bits of a 16-bit float stand for. */
static inline float ba_from_bfloat16(uint16_t x) { return ba_float_of_bits((uint32_t)x << 16); }
static inline float ba_from_float16(uint16_t x) {
    const uint32_t sign = (uint32_t)(x & 0x8000) << 16, rest = x & 0x7fff;
    if (rest >= 0x7c00) return ba_float_of_bits(sign | 0x7f800000 | rest << 13);
    return ba_float_of_bits(sign | rest << 13) * 0x1p112f; /* the product makes subnormal numbers normal */
}

#endif
