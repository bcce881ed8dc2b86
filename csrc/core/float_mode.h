/* How a thread computes with floating-point numbers: how it rounds, and whether subnormal numbers are taken for 0. Programs change that: threads of
 * JAX that call back flush subnormal numbers to 0, and so do programs that call torch.set_flush_denormal() or load code linked with -ffast-math. New
 * threads inherit the mode. The library computes in the usual mode whoever calls. Otherwise bits would depend on the caller, and kernels would lose
 * numbers of float16 and float8 that they convert by way of subnormal ones. */
#ifndef BA_CORE_FLOAT_MODE_H
#define BA_CORE_FLOAT_MODE_H

#include <stdint.h>

#if defined(__x86_64__)

typedef uint32_t ba_float_mode;
#define BA_USUAL_FLOAT_MODE 0x1f80u /* MXCSR: rounds to nearest, keeps subnormal numbers, and no exception traps */

static inline ba_float_mode ba_get_float_mode(void) { return __builtin_ia32_stmxcsr(); }
static inline void ba_set_float_mode(ba_float_mode mode) { __builtin_ia32_ldmxcsr(mode); }

#elif defined(__aarch64__)

typedef uint64_t ba_float_mode;
#define BA_USUAL_FLOAT_MODE 0u /* FPCR: the same */

static inline ba_float_mode ba_get_float_mode(void) {
    uint64_t mode;
    __asm__ volatile("mrs %0, fpcr" : "=r"(mode));
    return mode;
}
static inline void ba_set_float_mode(ba_float_mode mode) { __asm__ volatile("msr fpcr, %0" : : "r"(mode) : "memory"); }

#else

typedef int ba_float_mode;
#define BA_USUAL_FLOAT_MODE 0

static inline ba_float_mode ba_get_float_mode(void) { return 0; }
static inline void ba_set_float_mode(ba_float_mode mode) { (void)mode; }

#endif
#endif
