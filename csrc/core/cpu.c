#define _DEFAULT_SOURCE /* syscall */
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif
#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "blitz_attn.h"
#include "core/common.h"
#include "core/cpu.h"
#include "core/status.h"
#include "core/thread.h"

#ifdef __aarch64__
#define LEVELS "portable, neon, neon_bf16"
static const char *const level_names[BA_ISA_COUNT] = {"portable", "neon", "neon_bf16"};
#else
#define LEVELS "portable, avx2, avx512, avx512_bf16, amx"
static const char *const level_names[BA_ISA_COUNT] = {"portable", "avx2", "avx512", "avx512_bf16", "amx"};
#endif

static pthread_once_t detection = PTHREAD_ONCE_INIT;
static ba_isa detected_level = BA_ISA_PORTABLE;
#ifdef __x86_64__
static bool reaches_l2 = false; /* see ba_prefetches_reach_l2 */
#endif
static atomic_int cap_level = BA_ISA_COUNT - 1;
static char cpu_model[128] = "unknown CPU";
static char environment_note[160];
static char refusal_note[160]; /* why a level that this CPU and this build have is not used; empty where there is no such level */

#if defined(__x86_64__) && !defined(BA_EMULATED) && !(defined(BA_NO_avx512_bf16) && defined(BA_NO_amx))
/* The kernels of avx512_bf16 and of amx use VBMI, too. Of the CPUs with AVX512_BF16, only Cooper Lake lacks VBMI, and avx512 is faster there
 * anyway. */
static bool has_bf16_and_vbmi(void) {
    unsigned eax, ebx, ecx, edx;
    return __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) && eax & 1u << 5 && __builtin_cpu_supports("avx512vbmi");
}
#endif

#if defined(__x86_64__) && !defined(BA_EMULATED) && !defined(BA_NO_avx512_bf16)
/* Whether avx512_bf16 is faster than avx512. VDPBF16PS does the work of two multiply-adds. AMD's cores issue it at the rate of one multiply-add;
 * Intel's cores issue it at a quarter of that rate, and are slower with it. On Intel's CPUs the level is used only where a CPU with amx is capped at
 * avx512_bf16. The vendor decides, not a measurement, so that a machine always gives the same answer. */
static bool multiplies_pairs_fast(void) { return __builtin_cpu_is("amd"); }
#endif

#if defined(__x86_64__) && !defined(BA_EMULATED) && !defined(BA_NO_amx)
/* Whether the CPU has tiles and bfloat16 tile products (CPUID leaf 7), and whether the system saves tiles on a context switch (XCR0). */
static bool cpuid_has_amx(void) {
    unsigned eax, ebx, ecx, edx, low, high;
    if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) || !(edx & 1u << 24) || !(edx & 1u << 22)) return false;
    if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx) || !(ecx & 1u << 27)) return false;
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (low >> 17 & 3) == 3;
}

/* Asks Linux to save tiles for this process: Linux does so only on request. The permission holds for all threads and for child processes. Where Linux
 * refuses, this function writes refusal_note and returns false. */
static bool request_tiles(void) {
#ifdef __linux__
    enum { ARCH_REQ_XCOMP_PERM = 0x1023, TILE_DATA = 18 };
    if (syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, TILE_DATA) == 0) return true;
    snprintf(refusal_note, sizeof refusal_note, "the CPU has amx, but the system refused permission to use it (%s)", strerror(errno));
#else
    snprintf(refusal_note, sizeof refusal_note, "the CPU has amx, which this library uses on Linux only");
#endif
    return false;
}
#endif

#if defined(__aarch64__) && !defined(BA_EMULATED) && !defined(BA_NO_neon) && !defined(BA_NO_neon_bf16)
static bool cpu_has_bf16(void) {
#if defined(__linux__)
    enum { BF16 = 1 << 14 }; /* HWCAP2_BF16, which older headers do not name */
    return getauxval(AT_HWCAP2) & BF16;
#elif defined(__APPLE__)
    int has = 0;
    size_t size = sizeof has;
    return sysctlbyname("hw.optional.arm.FEAT_BF16", &has, &size, NULL, 0) == 0 && has;
#else
    return false;
#endif
}
#endif

#if defined(__x86_64__) && !defined(BA_EMULATED)
/* AMD's Zen 4 (family 0x19) and Intel's cores with tiles (CPUID leaf 7) carry out prefetches into L2. AMD's Zen 5 (family 0x1A) does not: its kernels
 * must prefetch into L1 the lines that no cache holds. Other CPUs with AVX-512 have not been measured, and their kernels prefetch into L1, too.
 * Kernels that prefetch into L2 use VBMI. CPUID decides, not a measurement, so that a machine always takes the same path. */
static bool carries_out_l2_prefetches(void) {
    unsigned eax, ebx, ecx, edx;
    if (!__builtin_cpu_supports("avx512vbmi")) return false;
    if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) && edx & 1u << 24) return true;
    if (!__builtin_cpu_is("amd") || !__get_cpuid(1, &eax, &ebx, &ecx, &edx)) return false;
    const unsigned family = eax >> 8 & 0xf, extended = eax >> 20 & 0xff;
    return family + extended == 0x19;
}
#endif

/* The highest level that the CPU, the system and this build have, and that is fast on this CPU. __builtin_cpu_supports reads CPUID and XGETBV, so it
 * denies instruction sets whose registers the system does not save. F16C is not tested: some compilers' builtins do not know its name, and every CPU
 * with AVX2 has it. */
static ba_isa detect(void) {
    ba_isa level = BA_ISA_PORTABLE;
#ifdef BA_EMULATED
    level = BA_ISA_COUNT - 1; /* every level is plain C */
#elif defined(__x86_64__)
    __builtin_cpu_init();
#ifndef BA_NO_avx2
    if (!(__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))) return level;
    level = BA_ISA_AVX2;
#endif
#ifndef BA_NO_avx512
    if (!(__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
          __builtin_cpu_supports("avx512vl")))
        return level;
    level = BA_ISA_AVX512;
#endif
#if !defined(BA_NO_avx512_bf16) || !defined(BA_NO_amx)
    if (!has_bf16_and_vbmi()) return level;
#endif
#ifndef BA_NO_amx
#ifdef BA_TILE_TRAPS
    if (!cpuid_has_amx()) return BA_ISA_AMX; /* a signal handler carries out tile instructions (kernels/tile_traps.h) */
#endif
    if (cpuid_has_amx() && request_tiles()) return BA_ISA_AMX;
#endif
#ifndef BA_NO_avx512_bf16
    if (multiplies_pairs_fast()) return BA_ISA_AVX512_BF16;
    if (!refusal_note[0]) snprintf(refusal_note, sizeof refusal_note, "the CPU has avx512_bf16, but is faster without it");
#endif
#elif defined(__aarch64__) && !defined(BA_NO_neon)
    level = BA_ISA_NEON; /* every aarch64 CPU has it */
#ifndef BA_NO_neon_bf16
    if (!cpu_has_bf16()) return level;
    level = BA_ISA_NEON_BF16;
#endif
#endif
    return level;
}

static void read_cpu_model(void) {
    FILE *info = fopen("/proc/cpuinfo", "r");
    if (!info) return;
    char line[256];
    while (fgets(line, sizeof line, info)) {
        const char *colon = strchr(line, ':');
        if (!colon || strncmp(line, "model name", 10) != 0) continue;
        snprintf(cpu_model, sizeof cpu_model, "%.*s", (int)strcspn(colon + 2, "\n"), colon + 2);
        break;
    }
    fclose(info);
}

static void detect_once(void) {
    detected_level = detect();
#if defined(__x86_64__) && !defined(BA_EMULATED)
    reaches_l2 = carries_out_l2_prefetches();
#endif
    read_cpu_model();
    const char *cap = getenv("BLITZ_ATTN_ISA");
    if (!cap || !*cap) return;
    const int level = ba_isa_parse(cap);
    if (level < 0) snprintf(environment_note, sizeof environment_note, "BLITZ_ATTN_ISA=%.32s is not a level (" LEVELS ") and is ignored", cap);
    else atomic_store(&cap_level, level);
}

const char *ba_isa_name(ba_isa level) { return (unsigned)level < BA_ISA_COUNT ? level_names[level] : "unknown"; }

int ba_isa_parse(const char *name) {
    for (int level = 0; level < BA_ISA_COUNT; level++)
        if (strcmp(name, level_names[level]) == 0) return level;
    return -1;
}

ba_isa ba_isa_detected(void) {
    pthread_once(&detection, detect_once);
    return detected_level;
}

/* Where levels are emulated, avx512 and avx512_bf16 use kernels that prefetch into L1, and amx uses kernels that prefetch into L2, so that both kinds
 * are checked. All other levels have only kernels that prefetch into L2. */
bool ba_prefetches_reach_l2(ba_isa level) {
    pthread_once(&detection, detect_once);
#ifdef __aarch64__
    (void)level;
    return true;
#elif defined(__x86_64__)
    return level == BA_ISA_AMX || reaches_l2;
#else
    (void)level;
    return false;
#endif
}

ba_isa ba_isa_active(void) {
    const ba_isa detected = ba_isa_detected();
    const int cap = atomic_load_explicit(&cap_level, memory_order_relaxed);
    return cap < (int)detected ? (ba_isa)cap : detected;
}

ba_status ba_isa_set_cap(ba_isa level) {
    if ((unsigned)level >= BA_ISA_COUNT) return ba_fail(BA_ERROR_VALUE, BA_ARG("isa") ": expected one of " LEVELS ", got level %d", (int)level);
    ba_isa_detected(); /* reads BLITZ_ATTN_ISA now, so that it cannot replace this cap later */
    atomic_store(&cap_level, (int)level);
    return BA_OK;
}

const char *ba_isa_note(void) {
    const ba_isa detected = ba_isa_detected();
    ba_thread *const thread = ba_thread_make();
    if (!thread) return level_names[ba_isa_active()];
    char *const note = thread->note;
    const size_t size = sizeof thread->note;
    const int cap = atomic_load(&cap_level);
    if (environment_note[0] && cap == BA_ISA_COUNT - 1) return environment_note; /* ba_isa_set_cap() has set no lower cap */
    if (cap < (int)detected)
        snprintf(note, size, "%s: capped below the CPU's %s by isa() or BLITZ_ATTN_ISA", level_names[cap], level_names[detected]);
    else if (cap < BA_ISA_COUNT - 1 && cap > (int)detected)
        snprintf(note, size, "%s: the highest in use on this CPU; the cap %s is above it", level_names[detected], level_names[cap]);
    else if (refusal_note[0]) snprintf(note, size, "%s: %s", level_names[detected], refusal_note);
    else snprintf(note, size, "%s: the highest that this CPU and this build have", level_names[detected]);
    return note;
}

const char *ba_cpu_model(void) {
    ba_isa_detected();
    return cpu_model;
}
