/* The eight AMX tile registers, each of 16 rows of 64 bytes, and the operations on them. Every operation is an instruction or, where
 * BA_TILE_EMULATED is defined, C that gives the same bits, so that code over tiles can be checked on a machine without AMX.
 *
 * Tile numbers are literals. Instructions on tiles have a "memory" clobber. gcc 12's own intrinsics lack that clobber, and gcc then moves or deletes
 * the stores that filled the memory. */
#ifndef BA_TILE_H
#define BA_TILE_H

#include <math.h>
#include <stdint.h>
#include <string.h>

enum { BA_TILE_ROWS = 16, BA_TILE_ROW_BYTES = 64, BA_TILE_BYTES = 1024 };

#ifndef BA_TILE_EMULATED

/* Palette 1, with all eight tiles at full size. */
static const struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} ba_tile_config __attribute__((aligned(64))) = {1, 0, {0}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};

/* A thread may use tiles between configure and release. */
static inline void ba_tile_configure(void) { __asm__ volatile("ldtilecfg %0" : : "m"(ba_tile_config)); }
static inline void ba_tile_release(void) { __asm__ volatile("tilerelease"); }

#define BA_TILE_ZERO(t) __asm__ volatile("tilezero %%tmm" #t : : : "memory")
/* BA_TILE_LOAD, BA_TILE_STREAM and BA_TILE_STORE take memory where the rows of a tile are `stride` bytes apart. BA_TILE_*_AT take memory where the
 * rows follow each other, from `offset` bytes behind p on. BA_TILE_PREFETCH_AT prefetches one line of such memory for writing. */
#define BA_TILE_LOAD(t, p, stride) __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #t : : "r"(p), "r"((int64_t)(stride)) : "memory")
/* Loads memory that is used once, so that it does not evict other data from the first-level cache. */
#define BA_TILE_STREAM(t, p, stride) __asm__ volatile("tileloaddt1 (%0,%1,1), %%tmm" #t : : "r"(p), "r"((int64_t)(stride)) : "memory")
#define BA_TILE_STORE(t, p, stride) __asm__ volatile("tilestored %%tmm" #t ", (%0,%1,1)" : : "r"(p), "r"((int64_t)(stride)) : "memory")
#if defined(__OPTIMIZE__) && defined(NDEBUG) && !defined(__clang__) && !defined(__SANITIZE_ADDRESS__)
/* In release builds by gcc the offset is a constant once functions are inlined, so that it becomes a part of the instruction. Elsewhere another
 * instruction adds it. */
#define BA_TILE_AT(instruction, p, offset)                                                                                                           \
    __asm__ volatile(instruction : : "r"(p), "r"((int64_t)BA_TILE_ROW_BYTES), "i"((int64_t)(offset)) : "memory")
#define BA_TILE_LOAD_AT(t, p, offset) BA_TILE_AT("tileloadd %c2(%0,%1,1), %%tmm" #t, p, offset)
#define BA_TILE_STREAM_AT(t, p, offset) BA_TILE_AT("tileloaddt1 %c2(%0,%1,1), %%tmm" #t, p, offset)
#define BA_TILE_STORE_AT(t, p, offset) BA_TILE_AT("tilestored %%tmm" #t ", %c2(%0,%1,1)", p, offset)
/* This is assembly, because gcc would compute the addresses of many prefetches early, and keep them in vector registers. */
#define BA_TILE_PREFETCH_AT(p, offset) __asm__ volatile("prefetchw %c1(%0)" : : "r"(p), "i"((int64_t)(offset)))
#endif
/* c += a b, where c is float [16][16], a is bfloat16 [16][32], and b holds pairs of rows: bfloat16 [16][16][2]. */
#define BA_TILE_DOT(c, a, b) __asm__ volatile("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #c : : : "memory")

#else

static _Thread_local unsigned char ba_tiles[8][BA_TILE_BYTES];

static inline void ba_tile_configure(void) { memset(ba_tiles, 0, sizeof ba_tiles); }
static inline void ba_tile_release(void) { memset(ba_tiles, 0xff, sizeof ba_tiles); }

static inline void ba_tile_load(int t, const void *p, int64_t stride) {
    for (int r = 0; r < BA_TILE_ROWS; r++) memcpy(ba_tiles[t] + r * BA_TILE_ROW_BYTES, (const char *)p + r * stride, BA_TILE_ROW_BYTES);
}
static inline void ba_tile_store(int t, void *p, int64_t stride) {
    for (int r = 0; r < BA_TILE_ROWS; r++) memcpy((char *)p + r * stride, ba_tiles[t] + r * BA_TILE_ROW_BYTES, BA_TILE_ROW_BYTES);
}

/* Numbers below the normal range count as 0, in the operands and in the results. */
static inline float ba_tile_flush(float x) { return fabsf(x) < 0x1p-126f ? copysignf(0, x) : x; }
/* a * b + c with one rounding, where a and b are bfloat16 elements: their products have so few digits that a double holds the exact sum, or enough of
 * it to round correctly. */
static inline float ba_tile_fma(float a, float b, float c) { return (float)((double)a * b + c); }
static inline float ba_tile_element(const unsigned char *p) {
    const uint32_t bits = (uint32_t)p[0] << 16 | (uint32_t)p[1] << 24;
    float x;
    memcpy(&x, &bits, sizeof x);
    return ba_tile_flush(x);
}

/* As the instruction does, this sums products of elements with even and with odd numbers separately, starting from 0, and then adds both sums. All
 * products of one element of tile a with a row of tile b are made in one loop, which compilers vectorise. */
static inline void ba_tile_dot(int c, int a, int b) {
    float right[2][16][16];
    for (int i = 0; i < 2; i++)
        for (int k = 0; k < 16; k++)
            for (int n = 0; n < 16; n++) right[i][k][n] = ba_tile_element(ba_tiles[b] + k * BA_TILE_ROW_BYTES + n * 4 + i * 2);
    for (int m = 0; m < BA_TILE_ROWS; m++) {
        float sum[2][16] = {{0}}, old[16];
        for (int i = 0; i < 2; i++)
            for (int k = 0; k < 16; k++) {
                const float left = ba_tile_element(ba_tiles[a] + m * BA_TILE_ROW_BYTES + k * 4 + i * 2);
                for (int n = 0; n < 16; n++) sum[i][n] = ba_tile_flush(ba_tile_fma(left, right[i][k][n], sum[i][n]));
            }
        memcpy(old, ba_tiles[c] + m * BA_TILE_ROW_BYTES, sizeof old);
        for (int n = 0; n < 16; n++) old[n] = ba_tile_flush(ba_tile_flush(old[n]) + ba_tile_flush(sum[0][n] + sum[1][n]));
        memcpy(ba_tiles[c] + m * BA_TILE_ROW_BYTES, old, sizeof old);
    }
}

#define BA_TILE_ZERO(t) memset(ba_tiles[t], 0, BA_TILE_BYTES)
#define BA_TILE_LOAD(t, p, stride) ba_tile_load(t, p, stride)
#define BA_TILE_STREAM(t, p, stride) ba_tile_load(t, p, stride)
#define BA_TILE_STORE(t, p, stride) ba_tile_store(t, p, stride)
#define BA_TILE_DOT(c, a, b) ba_tile_dot(c, a, b)

#endif

#ifndef BA_TILE_AT
#define BA_TILE_LOAD_AT(t, p, offset) BA_TILE_LOAD(t, (p) + (offset), BA_TILE_ROW_BYTES)
#define BA_TILE_STREAM_AT(t, p, offset) BA_TILE_STREAM(t, (p) + (offset), BA_TILE_ROW_BYTES)
#define BA_TILE_STORE_AT(t, p, offset) BA_TILE_STORE(t, (p) + (offset), BA_TILE_ROW_BYTES)
#define BA_TILE_PREFETCH_AT(p, offset) __builtin_prefetch((p) + (offset), 1, 3)
#endif
#endif
