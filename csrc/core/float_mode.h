/* The float mode of a thread: how it rounds, and whether subnormal numbers count as 0. Programs change it: JAX's callback threads flush subnormal
 * numbers to 0, and so do programs that call torch.set_flush_denormal() or load code linked with -ffast-math. New threads inherit the mode. The
 * library computes in the usual mode, whatever its caller's mode is. Otherwise bits would depend on the caller, and kernels would lose those numbers
 * of float16 and float8 that they convert by way of subnormal numbers. So each function of the C API that computes with floating-point numbers, or
 * checks them, does this after BA_IN_USUAL_MODE, and so do the functions that bindings call instead. */
#ifndef BA_CORE_FLOAT_MODE_H
#define BA_CORE_FLOAT_MODE_H

#include <stdbool.h>
#include <stdint.h>

#if defined(__x86_64__)

typedef uint32_t ba_float_mode;
#define BA_USUAL_FLOAT_MODE 0x1f80u /* MXCSR: rounds to nearest, keeps subnormal numbers, and no exception traps */
#define BA_FLOAT_FLAGS 0x3fu        /* bits that record past exceptions and change no result */

static inline ba_float_mode ba_get_float_mode(void) { return __builtin_ia32_stmxcsr(); }
static inline void ba_set_float_mode(ba_float_mode mode) { __builtin_ia32_ldmxcsr(mode); }

#elif defined(__aarch64__)

typedef uint64_t ba_float_mode;
#define BA_USUAL_FLOAT_MODE 0u /* FPCR: rounds to nearest, keeps subnormal numbers, and no exception traps */
#define BA_FLOAT_FLAGS 0u      /* the flags are in another register, FPSR */

static inline ba_float_mode ba_get_float_mode(void) {
    uint64_t mode;
    __asm__ volatile("mrs %0, fpcr" : "=r"(mode));
    return mode;
}
static inline void ba_set_float_mode(ba_float_mode mode) { __asm__ volatile("msr fpcr, %0" : : "r"(mode) : "memory"); }

#else

typedef int ba_float_mode;
#define BA_USUAL_FLOAT_MODE 0
#define BA_FLOAT_FLAGS 0

static inline ba_float_mode ba_get_float_mode(void) { return 0; }
static inline void ba_set_float_mode(ba_float_mode mode) { (void)mode; }

#endif

typedef struct ba_mode_change {
    ba_float_mode before, program; /* the register and ba_thread.program_mode, as they were before the change */
    bool known;                    /* whether the thread has a ba_thread, so that `program` is set */
} ba_mode_change;

static inline bool ba_is_usual_mode(ba_float_mode mode) { return (mode & ~BA_FLOAT_FLAGS) == BA_USUAL_FLOAT_MODE; }

/* The slow paths of the two functions below, for threads in another mode than the usual one. */
ba_mode_change ba_change_float_mode(ba_float_mode before);
void ba_restore_float_mode(const ba_mode_change *change);

static inline ba_mode_change ba_enter_usual_mode(void) {
    const ba_float_mode before = ba_get_float_mode();
    return ba_is_usual_mode(before) ? (ba_mode_change){.before = before} : ba_change_float_mode(before);
}

static inline void ba_leave_usual_mode(const ba_mode_change *change) {
    if (!ba_is_usual_mode(change->before)) ba_restore_float_mode(change);
    else if (ba_get_float_mode() != change->before) ba_set_float_mode(change->before);
}

/* Sets the usual mode until the end of the enclosing block, and then restores the mode as it was, flags included. Where the mode was the usual one,
 * only the flags are restored. */
#define BA_IN_USUAL_MODE const ba_mode_change ba_mode_change_here __attribute__((cleanup(ba_leave_usual_mode), unused)) = ba_enter_usual_mode()

#endif
