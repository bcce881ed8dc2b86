/* A small vocabulary of vector operations over the compilers' vector extensions. Every vector kernel is written once in these operations, and
 * compiled once for each level.
 *
 * Each file in levels/ includes this header, through a template or directly, after it has defined
 *
 *     BA_LANES        elements of `real` in one vector: 4, 8 or 16; 2 for double
 *     BA_REAL_DOUBLE  if real is double; without it real is float
 *     BA_SUFFIX       ends the names of this instance, so that a level can have an instance for float and another for double
 *
 * The operators +, -, *, the comparisons and the casts of `vec` are plain C, and the compiler contracts a product and a sum into one multiply-add.
 * Everything that C cannot say is a function below. Each of them has a generic form here, which compiles for any number of lanes on any CPU: that is
 * how code for wide vectors is checked on a machine that lacks them. A header vec_<isa>.h replaces a generic form where an instruction does the work
 * better, and says so by defining BA_HAVE_<function>. */
#include <float.h>
#include <math.h>
#include <string.h>

#include "kernels/prefetch.h"
#include "kernels/prefetch_rows.h"
#include "kernels/kernels.h"

/* A level may include this header twice, for float and for double, so everything from an earlier inclusion is undefined first. */
#undef real
#undef real_int
#undef REAL_MAX
#undef vec
#undef ivec
#undef BA_HAVE_V_MAX
#undef BA_HAVE_V_NAN_OF
#undef BA_HAVE_V_EXP2
#undef BA_HAVE_V_CONVERT
#undef BA_HAVE_V_SHORT
#undef BA_HAVE_V_DOT
#undef BA_HAVE_V_BYTES
#undef BA_HAVE_V_E4M3
#undef BA_HAVE_V_SPREAD_F16
#undef BA_HAVE_V_LOOK_UP
#undef BA_HAVE_V_PAIRS_I8
#undef BA_HAVE_V_PAIRS_E4M3
#undef BA_HAVE_V_JOIN
#undef BA_HAVE_V_REPEAT
#undef BA_HAVE_V_SUM_PAIRS
#undef BA_HAVE_V_TO_BF16
#undef BA_HAVE_ELEMENTS
#undef BA_HAVE_V_REGISTER
#undef BA_ELEMENTS

#undef BA_CAT_
#undef BA_CAT
#undef NAME
#undef BA_INLINE
#define BA_CAT_(a, b) a##_##b
#define BA_CAT(a, b) BA_CAT_(a, b)
#define NAME(x) BA_CAT(x, BA_SUFFIX)
#define BA_INLINE static inline __attribute__((always_inline, unused))

#ifdef BA_REAL_DOUBLE
#define real double
#define real_int int64_t
#define REAL_MAX DBL_MAX
#else
#define real float
#define real_int int32_t
#define REAL_MAX FLT_MAX
#endif

#define vec NAME(vec)
#define ivec NAME(ivec)
typedef real vec __attribute__((vector_size(BA_LANES * sizeof(real))));
typedef real NAME(vec_unaligned) __attribute__((vector_size(BA_LANES * sizeof(real)), aligned(sizeof(real)), may_alias));
typedef real_int ivec __attribute__((vector_size(BA_LANES * sizeof(real))));

BA_INLINE vec NAME(v_load)(const real *p) { return *(const NAME(vec_unaligned) *)p; }
BA_INLINE void NAME(v_store)(real *p, vec a) { *(NAME(vec_unaligned) *)p = a; }
/* Loads n < BA_LANES reals; the other lanes are 0. */
BA_INLINE vec NAME(load_reals)(const real *p, int64_t n) {
    vec a = {0};
    memcpy(&a, p, (size_t)n * sizeof *p);
    return a;
}
BA_INLINE vec NAME(v_set1)(real a) { return a - (vec){0}; } /* a - 0 and not a + 0, so that -0 stays -0 */
BA_INLINE vec NAME(v_select)(ivec mask, vec yes, vec no) { return (vec)((mask & (ivec)yes) | (~mask & (ivec)no)); }

#ifndef BA_REAL_DOUBLE
/* Adds to the bits of every lane, modulo 2^32: a carry may run into the sign bit, which would be undefined for signed integers. */
BA_INLINE ivec NAME(v_add_bits)(ivec bits, uint32_t more) {
    typedef uint32_t unsigned_vec __attribute__((vector_size(BA_LANES * sizeof(uint32_t))));
    return (ivec)((unsigned_vec)bits + more);
}
/* Bits of which the upper 16 are `a` rounded to bfloat16, halves away from 0. The lower 16 bits are meaningless. */
BA_INLINE ivec NAME(v_half_up)(vec a) { return NAME(v_add_bits)((ivec)a, 0x8000); }
/* Each lane of x holds two bfloat16 elements. A lane of the result is not 0 if one of its two elements is NaN or infinite: adding 1 to an exponent of
 * all ones carries into the sign bit. */
BA_INLINE ivec NAME(v_nonfinite_pairs)(ivec x) { return NAME(v_add_bits)(x & 0x7fff7fff, 0x00800080) & (int32_t)0x80008000; }

/* 2^f for f in [-0.5, 0.5]: a minimax polynomial of degree 5 with a relative error of 7.5e-8. */
BA_INLINE vec NAME(exp2_poly)(vec f) {
    vec p = f * 0x1.5c08e6p-10f + 0x1.3d0c52p-7f;
    p = p * f + 0x1.c6b6e4p-5f;
    p = p * f + 0x1.ebf918p-3f;
    p = p * f + 0x1.62e428p-1f;
    return p * f + 0x1.000002p+0f;
}

/* The bits 0x8000 and 0xffff in each lane, with which v_pair_rounded rounds. */
typedef struct NAME(rounding) {
    ivec half, lower;
} NAME(rounding);

#if BA_LANES == 16 && defined(__AVX512F__)
#include "kernels/vec/vec_avx512.h"
#elif BA_LANES == 8 && defined(__AVX2__)
#include "kernels/vec/vec_avx2.h"
#elif BA_LANES == 4 && defined(BA_NEON)
#include "kernels/vec/vec_neon.h"
#endif
#endif

/* Makes the compiler compute *a here and keep it in a register. Otherwise it would move the computation towards the use of *a. */
BA_INLINE void NAME(v_pin)(vec *a) {
#ifdef BA_HAVE_V_REGISTER
    __asm__ volatile("" : "+v"(*a));
#else
    (void)a;
#endif
}

BA_INLINE void NAME(v_pin_bits)(ivec *a) {
    vec x = (vec)*a;
    NAME(v_pin)(&x);
    *a = (ivec)x;
}

/* Loads a vector into a register, here and once. Without the barrier the compiler would load the same memory again for each product that uses it,
 * and would move the load to another place in the loop. */
BA_INLINE vec NAME(v_load_once)(const real *p) {
    vec a = NAME(v_load)(p);
    NAME(v_pin)(&a);
    return a;
}

/* The larger of a and b. Where either is NaN the result is b, as MAXPS defines it. */
#ifndef BA_HAVE_V_MAX
BA_INLINE vec NAME(v_max)(vec a, vec b) { return NAME(v_select)((ivec)(a > b), a, b); }
#endif

/* b, but NaN in the lanes where `a` is NaN. */
#ifndef BA_HAVE_V_NAN_OF
BA_INLINE vec NAME(v_nan_of)(vec a, vec b) { return NAME(v_select)((ivec)(a == a), b, a); }
#endif

/* v_elements loads n elements that follow each other in memory, where n is 1 or BA_ELEMENTS. v_element spreads the i-th of these elements over all
 * lanes. The generic form only keeps the pointer. */
#ifndef BA_HAVE_ELEMENTS
#define BA_ELEMENTS 1
typedef const real *NAME(elements);
BA_INLINE const real *NAME(v_elements)(const real *p, const int n) { return (void)n, p; }
BA_INLINE vec NAME(v_element)(const real *p, const int i) { return NAME(v_set1)(p[i]); }
#endif

/* Lane i of the result is p[i % n]. n is a constant power of two, at most BA_LANES. */
#ifndef BA_HAVE_V_REPEAT
BA_INLINE vec NAME(v_repeat)(const real *p, const int n) {
    vec a;
    for (int i = 0; i < BA_LANES; i++) a[i] = p[i % n];
    return a;
}
#endif

/* 2^x for x at or below 0, or a little above. The result is 0 where x is -inf or, in float, below -126, and NaN where x is NaN. */
#ifndef BA_HAVE_V_EXP2
BA_INLINE vec NAME(v_exp2)(vec x) {
#ifdef BA_REAL_DOUBLE
    vec y;
    for (int i = 0; i < BA_LANES; i++) y[i] = exp2(x[i]);
    return y;
#else
    /* A result below the normal range is slow to make on many CPUs, and so is each product with it. */
    x = NAME(v_select)((ivec)(x < -126), NAME(v_set1)(-127), x);
    const vec magic = NAME(v_set1)(0x1.8p23f + 127.0f); /* the low mantissa bits of x + magic are round(x) plus the exponent's bias */
    const vec t = x + magic;
    const vec f = x - (t - magic);
    const vec scale = (vec)((ivec)t << 23); /* 2^round(x); 0 where round(x) is -127 */
    return NAME(exp2_poly)(f) * scale;
#endif
}
#endif

#if !defined(BA_REAL_DOUBLE) && !defined(BA_HAVE_V_SHORT)
/* a * b + c with one rounding, independently of how the compiler contracts the surrounding expression. */
BA_INLINE vec NAME(v_fma)(vec a, vec b, vec c) {
    vec y;
    for (int i = 0; i < BA_LANES; i++) y[i] = fmaf(a[i], b[i], c[i]);
    return y;
}
/* 2^x for every x; this generic form gives infinity above 120 already, and 0 below -126. */
BA_INLINE vec NAME(v_exp2_any)(vec x) { return NAME(v_select)((ivec)(x > 120), NAME(v_set1)((real)INFINITY), NAME(v_exp2)(x)); }
/* The three parts of v_exp2_short: the fraction of x, 2 to the power of that fraction, and 2^x from this power. In the generic form, the second part
 * does all the work. */
BA_INLINE vec NAME(v_short_fraction)(vec x) { return x; }
BA_INLINE vec NAME(v_short_power)(vec x) { return NAME(v_exp2_any)(x); }
BA_INLINE vec NAME(v_short_scale)(vec power, vec x) { return (void)x, power; }
/* Rounds the numbers of both vectors to bfloat16, halves away from 0, and puts them side by side: a lane of the result has `even` in its lower half
 * and `odd` in its upper half. A NaN must be the canonical one. `by` is v_rounding(). */
BA_INLINE ivec NAME(v_pair_rounded)(vec even, vec odd, const NAME(rounding) * by) {
    return ((NAME(v_add_bits)((ivec)even, 0x8000) >> 16) & by->lower) | (NAME(v_add_bits)((ivec)odd, 0x8000) & ~by->lower);
}
#if BA_LANES == 16
/* Loads, or stores, the numbers p[at[0]], p[at[1]], ... Where several go to the same place, the last one is stored. */
BA_INLINE vec NAME(v_gather)(const float *p, ivec at) {
    vec x;
    for (int i = 0; i < BA_LANES; i++) x[i] = p[at[i]];
    return x;
}
BA_INLINE void NAME(v_scatter)(float *p, ivec at, vec x) {
    for (int i = 0; i < BA_LANES; i++) p[at[i]] = x[i];
}
/* Loads four pieces of 16 bytes into one vector, in this order. */
BA_INLINE vec NAME(v_load_quarters)(const void *a, const void *b, const void *c, const void *d) {
    const void *const from[4] = {a, b, c, d};
    vec x;
    for (int i = 0; i < 4; i++) memcpy((char *)&x + 16 * i, from[i], 16);
    return x;
}
/* a and b each hold a row of 32 elements of 16 bits. Interleaves the two rows, so that elements of the same place stand side by side: `a` receives
 * places 0 to 15, b places 16 to 31. */
BA_INLINE void NAME(v_pair_halves)(vec *a, vec *b) {
    uint16_t from[2][32], to[32][2];
    memcpy(from[0], a, sizeof from[0]);
    memcpy(from[1], b, sizeof from[1]);
    for (int i = 0; i < 32; i++)
        for (int j = 0; j < 2; j++) to[i][j] = from[j][i];
    memcpy(a, to, sizeof *a);
    memcpy(b, to + 16, sizeof *b);
}
/* Each of the 8 vectors holds four quarters of 8 elements of 16 bits. Transposes the 8 x 8 elements of every quarter: element j of vector i is
 * exchanged with element i of vector j. */
BA_INLINE void NAME(v_transpose_octets)(vec *rows) {
    uint16_t from[8][4][8], to[8][4][8];
    memcpy(from, rows, sizeof from);
    for (int i = 0; i < 8; i++)
        for (int quarter = 0; quarter < 4; quarter++)
            for (int j = 0; j < 8; j++) to[i][quarter][j] = from[j][quarter][i];
    memcpy(rows, to, sizeof to);
}
#endif
/* True if any bit of the mask is set. */
BA_INLINE bool NAME(v_any)(ivec mask) {
    real_int any = 0;
    for (int i = 0; i < BA_LANES; i++) any |= mask[i];
    return any != 0;
}
#endif

#ifndef BA_REAL_DOUBLE
/* 2^x for every x. Where an instruction set has a form that is cheaper than v_exp2_any, its relative error is up to 2.7e-6. */
BA_INLINE vec NAME(v_exp2_short)(vec x) { return NAME(v_short_scale)(NAME(v_short_power)(NAME(v_short_fraction)(x)), x); }

/* The bits are written as floats, because gcc would build integer constants again for each use. A kernel that rounds all the time pins these
 * constants. */
BA_INLINE NAME(rounding) NAME(v_rounding)(void) { return (NAME(rounding)){(ivec)NAME(v_set1)(0x1p-134f), (ivec)NAME(v_set1)(0x1.fffep-134f)}; }
/* Makes the pairs of v_pair_rounded without constants of the caller. */
BA_INLINE ivec NAME(v_pair_bf16)(vec even, vec odd) {
    const NAME(rounding) by = NAME(v_rounding)();
    return NAME(v_pair_rounded)(even, odd, &by);
}
/* Pairs floats that are numbers of bfloat16, so that their upper halves hold all their bits: nothing is rounded. */
BA_INLINE ivec NAME(v_pair_exact)(vec even, vec odd) { return ((ivec)even >> 16 & 0xffff) | (ivec)odd; }

/* Loads n elements of 16 bits, two in each lane. Zeros fill the vector where n is less than 2 * BA_LANES. */
BA_INLINE vec NAME(v_load_pairs)(const uint16_t *p, int64_t n) {
    vec x = {0};
    if (n >= 2 * BA_LANES) memcpy(&x, p, sizeof x); /* memcpy, since p has no particular alignment */
    else memcpy(&x, p, (size_t)n * sizeof *p);
    return x;
}
/* Loads n elements of 16 bits (1 or 2) and repeats them in every lane. The upper half of each lane is 0 where n is 1. */
BA_INLINE ivec NAME(v_repeat_pair)(const uint16_t *p, const int n) {
    int32_t pair = 0;
    memcpy(&pair, p, (size_t)n * sizeof *p);
    return pair - (ivec){0};
}

/* sum + a.upper * b.upper + a.lower * b.lower, where each lane of a and b is a pair of bfloat16. The products are added in this order, and each
 * addition rounds once. Numbers below the normal range count as 0, in the operands and in the results. This is VDPBF16PS, or C that gives the same
 * bits. */
#ifndef BA_HAVE_V_DOT
/* x, or a zero of its sign where x is below the normal range. */
BA_INLINE float NAME(flush)(float x) { return fabsf(x) < 0x1p-126f ? copysignf(0, x) : x; }
BA_INLINE float NAME(fma_flushed)(float a, float b, float c) {
    const float y = fmaf(a, b, c);
    /* The instruction flushes a result that would be below the normal range if it were rounded with an unlimited exponent range. */
    return fabsf(y) == 0x1p-126f && fabs((double)a * b + c) < 0x1.ffffffp-127 ? copysignf(0, y) : NAME(flush)(y);
}
BA_INLINE vec NAME(v_dot_pairs)(vec sum, ivec a, ivec b) {
    const vec a_upper = (vec)(a & -0x10000), b_upper = (vec)(b & -0x10000), a_lower = (vec)(a << 16), b_lower = (vec)(b << 16);
    for (int i = 0; i < BA_LANES; i++) {
        const float upper = NAME(fma_flushed)(NAME(flush)(a_upper[i]), NAME(flush)(b_upper[i]), NAME(flush)(sum[i]));
        sum[i] = NAME(fma_flushed)(NAME(flush)(a_lower[i]), NAME(flush)(b_lower[i]), upper);
    }
    return sum;
}
#endif
#endif

/* tanh, with an error of a few units in the last place. Near 0, x + x^3 * p(x^2) with a polynomial p is used: (1 - e) / (1 + e) loses digits of a
 * small x, and a softcap multiplies this loss by a large number. Elsewhere tanh is computed by exp2; its limits are exactly -1 and 1. */
BA_INLINE vec NAME(v_tanh)(vec x) {
    const vec magnitude = NAME(v_max)(x, -x), e = NAME(v_exp2)(magnitude * (real)-2.88539008177792681);
    const vec far = (1 - e) / (1 + e), square = x * x;
    const real factors[] = {
#ifdef BA_REAL_DOUBLE /* relative error of 3e-19 */
        -0.333333333333333332,    0.133333333333332309,     -0.0539682539680897543,   0.0218694885258675977,
        -0.00886323519865913438,  0.00359212179694987049,   -0.00145576081386558739,  0.000589466741910190506,
        -0.000236353642941362435, 0.0000881958030574506438, -0.000022953304653337329,
#else /* 1.3e-9 */
        -0.333333328f, 0.1333322578f, -0.05393346915f, 0.02147068303f, -0.00694294175f,
#endif
    };
    enum { FACTORS = sizeof factors / sizeof *factors };
    vec sum = NAME(v_set1)(factors[FACTORS - 1]);
    for (int i = FACTORS - 2; i >= 0; i--) sum = sum * square + factors[i];
    const vec near = x + x * square * sum;
    const vec signed_far = NAME(v_select)((ivec)(x < 0), -far, NAME(v_select)((ivec)(x == x), far, x));
    return NAME(v_select)((ivec)(magnitude < (real)0.5), near, signed_far);
}

/* The score cap * tanh(score / cap); *rate is set to the result's derivative by the score. */
BA_INLINE vec NAME(v_cap)(vec score, real cap, vec *rate) {
    const vec t = NAME(v_tanh)(score * (1 / cap));
    *rate = 1 - t * t;
    return t * cap;
}

/* Conversion between half precision and float, BA_LANES elements at a time. From half precision it is exact for every input, including
 * subnormals, infinities and NaN. */
#if !defined(BA_REAL_DOUBLE) && !defined(BA_HAVE_V_CONVERT)
BA_INLINE ivec NAME(v_load_u16)(const uint16_t *p) {
    typedef uint16_t half_vec __attribute__((vector_size(BA_LANES * 2)));
    half_vec h;
    memcpy(&h, p, sizeof h);
    return __builtin_convertvector(h, ivec);
}
BA_INLINE vec NAME(v_from_bf16)(const uint16_t *p) { return (vec)(NAME(v_load_u16)(p) << 16); }
BA_INLINE vec NAME(v_from_f16)(const uint16_t *p) {
    const ivec h = NAME(v_load_u16)(p);
    const ivec magnitude = (h & 0x7fff) << 13;
    const vec scaled = (vec)magnitude * 0x1p112f; /* corrects the exponent's bias, and makes normal numbers of subnormal ones */
    const vec special = (vec)(magnitude | 0x7f800000);
    const vec value = NAME(v_select)((ivec)(magnitude >= 0x0f800000), special, scaled);
    return (vec)((ivec)value | ((h & 0x8000) << 16));
}
BA_INLINE void NAME(v_store_u16)(uint16_t *p, ivec a) {
    typedef uint16_t half_vec __attribute__((vector_size(BA_LANES * 2)));
    const half_vec h = __builtin_convertvector(a, half_vec);
    memcpy(p, &h, sizeof h);
}
/* Rounds to the nearest float16, ties to even. NaN stays NaN, and a number that is too large becomes infinity. Results in the normal range are
 * rounded by integer arithmetic. Smaller results are rounded by adding 0.5, because the last place of a float near 0.5 is the smallest step of
 * float16. */
BA_INLINE void NAME(v_to_f16)(uint16_t *p, vec a) {
    const ivec bits = (ivec)a & 0x7fffffff, sign = ((ivec)a >> 16) & 0x8000;
    const ivec normal = (bits - 0x38000000 + 0xfff + ((bits >> 13) & 1)) >> 13;
    const ivec small = (ivec)((vec)bits + 0.5f) - 0x3f000000;
    const ivec large = 0x7c00 | ((ivec)(bits > 0x7f800000) & 0x200);
    ivec h = ((ivec)(bits < 0x38800000) & small) | (~(ivec)(bits < 0x38800000) & normal);
    h = ((ivec)(bits >= 0x47800000) & large) | (~(ivec)(bits >= 0x47800000) & h);
    NAME(v_store_u16)(p, h | sign);
}
#endif

#ifndef BA_REAL_DOUBLE
/* Bits of which the upper 16 are the bfloat16 nearest to `a`, ties to even; NaN stays NaN. The lower 16 bits are meaningless. */
BA_INLINE ivec NAME(v_near_bf16)(vec a) {
    const ivec bits = (ivec)a, rounded = NAME(v_half_up)(a) - (~(bits >> 16) & 1), is_nan = (ivec)((bits & 0x7fffffff) > 0x7f800000);
    return (is_nan & (bits | 0x400000)) | (~is_nan & rounded);
}
/* Stores `a` rounded to the nearest bfloat16, as v_near_bf16 does. */
#ifndef BA_HAVE_V_TO_BF16
BA_INLINE void NAME(v_to_bf16)(uint16_t *p, vec a) {
    typedef uint16_t half_vec __attribute__((vector_size(BA_LANES * 2)));
    const half_vec h = __builtin_convertvector(NAME(v_near_bf16)(a) >> 16, half_vec);
    memcpy(p, &h, sizeof h);
}
#endif
#endif

#ifndef BA_REAL_DOUBLE
#ifndef BA_HAVE_V_BYTES
BA_INLINE ivec NAME(v_load_i8)(const int8_t *p) {
    typedef int8_t bytes __attribute__((vector_size(BA_LANES)));
    bytes b;
    memcpy(&b, p, sizeof b);
    return __builtin_convertvector(b, ivec);
}
BA_INLINE ivec NAME(v_load_u8)(const uint8_t *p) {
    typedef uint8_t bytes __attribute__((vector_size(BA_LANES)));
    bytes b;
    memcpy(&b, p, sizeof b);
    return __builtin_convertvector(b, ivec);
}
#endif
BA_INLINE vec NAME(v_from_i8)(const int8_t *p) { return __builtin_convertvector(NAME(v_load_i8)(p), vec); }
#ifndef BA_HAVE_V_E4M3
/* The format e4m3 has no infinity; it is NaN where all bits of the exponent and the mantissa are set. The bits are moved to the places that they
 * have in a float, and the bias of the exponent is corrected. Subnormal numbers are converted as integers instead. */
BA_INLINE vec NAME(v_from_e4m3)(const uint8_t *p) {
    const ivec bits = NAME(v_load_u8)(p), magnitude = bits & 0x7f;
    const vec normal = (vec)((magnitude << 20) + 0x3c000000); /* the bias goes from 7 to 127 */
    const vec small = __builtin_convertvector(magnitude, vec) * 0x1p-9f;
    vec value = NAME(v_select)((ivec)(magnitude < 8), small, normal);
    value = NAME(v_select)((ivec)(magnitude == 0x7f), NAME(v_set1)((real)NAN), value);
    return (vec)((ivec)value | ((bits & 0x80) << 24));
}
#endif
/* Spreads the float16 number at p over all lanes. p may have any alignment, and four bytes can be read there. */
#ifndef BA_HAVE_V_SPREAD_F16
BA_INLINE vec NAME(v_spread_f16)(const void *p) {
    uint16_t all[BA_LANES];
    for (int i = 0; i < BA_LANES; i++) memcpy(all + i, p, sizeof *all);
    return NAME(v_from_f16)(all);
}
/* The same for two float16 numbers that stand one behind the other. */
BA_INLINE void NAME(v_spread_two_f16)(const void *p, vec *one, vec *other) {
    *one = NAME(v_spread_f16)(p);
    *other = NAME(v_spread_f16)((const char *)p + 2);
}
#endif
#if BA_LANES == 16
/* 0, 1, 2 ... */
BA_INLINE vec NAME(v_count)(void) { return (vec){0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}; }
/* For each index, the lane of `table` whose number is in the low four bits of the index. */
#ifndef BA_HAVE_V_LOOK_UP
BA_INLINE vec NAME(v_look_up)(vec table, ivec indices) {
    vec found;
    for (int i = 0; i < BA_LANES; i++) found[i] = table[indices[i] & 15];
    return found;
}
#endif
#endif
/* These load n elements of one byte as bfloat16, two in each lane; zeros fill the vector where n is less than 2 * BA_LANES. Nothing is rounded:
 * bfloat16 holds all numbers of int8 and of e4m3. */
#define BA_PAIRS_FROM(type, convert)                                                                                                                 \
    type half[2][BA_LANES] = {{0}};                                                                                                                  \
    for (int64_t i = 0; i < ba_min(n, 2 * BA_LANES); i++) half[i % 2][i / 2] = p[i];                                                                 \
    return (vec)NAME(v_pair_exact)(convert(half[0]), convert(half[1]))
#ifndef BA_HAVE_V_PAIRS_I8
BA_INLINE vec NAME(v_pairs_from_i8)(const int8_t *p, int64_t n) { BA_PAIRS_FROM(int8_t, NAME(v_from_i8)); }
#endif
#ifndef BA_HAVE_V_PAIRS_E4M3
BA_INLINE vec NAME(v_pairs_from_e4m3)(const uint8_t *p, int64_t n) { BA_PAIRS_FROM(uint8_t, NAME(v_from_e4m3)); }
#endif
#undef BA_PAIRS_FROM
#endif

/* Puts the lanes of two vectors together by constant index lists. BA_INTERLEAVE(BA_LOW, step, a, b) takes the lanes of `a` whose number has the
 * bit `step` unset, and fills the lanes between them with the same lanes of b. BA_HIGH does so for the lanes whose number has the bit set.
 * Transposition and sums across lanes are made of these two. */
#define BA_LOW(j, step) ((j) & (step) ? BA_LANES + (j) - (step) : (j))
#define BA_HIGH(j, step) ((j) & (step) ? BA_LANES + (j) : ((j) + (step)) % BA_LANES)
#define BA_LANES_2(f, s) f(0, s), f(1, s)
#define BA_LANES_4(f, s) BA_LANES_2(f, s), f(2, s), f(3, s)
#define BA_LANES_8(f, s) BA_LANES_4(f, s), f(4, s), f(5, s), f(6, s), f(7, s)
#define BA_LANES_16(f, s) BA_LANES_8(f, s), f(8, s), f(9, s), f(10, s), f(11, s), f(12, s), f(13, s), f(14, s), f(15, s)
#if BA_LANES == 2
#define BA_EACH_LANE BA_LANES_2
#elif BA_LANES == 4
#define BA_EACH_LANE BA_LANES_4
#elif BA_LANES == 8
#define BA_EACH_LANE BA_LANES_8
#else
#define BA_EACH_LANE BA_LANES_16
#endif
#define BA_INTERLEAVE(half, step, a, b) __builtin_shufflevector(a, b, BA_EACH_LANE(half, step))

/* v_even takes the lanes with even numbers of two vectors that stand one after the other, v_odd the lanes with odd numbers. v_zip_low and
 * v_zip_high reverse that: they give the first and the second of the two vectors back. */
#define BA_EVEN_LANE(j, step) (2 * (j))
#define BA_ODD_LANE(j, step) (2 * (j) + 1)
#define BA_ZIP_LOW_LANE(j, step) ((j) / 2 + (j) % 2 * BA_LANES)
#define BA_ZIP_HIGH_LANE(j, step) (BA_LANES / 2 + (j) / 2 + (j) % 2 * BA_LANES)
BA_INLINE vec NAME(v_even)(vec a, vec b) { return BA_INTERLEAVE(BA_EVEN_LANE, 0, a, b); }
BA_INLINE vec NAME(v_odd)(vec a, vec b) { return BA_INTERLEAVE(BA_ODD_LANE, 0, a, b); }
BA_INLINE vec NAME(v_zip_low)(vec a, vec b) { return BA_INTERLEAVE(BA_ZIP_LOW_LANE, 0, a, b); }
BA_INLINE vec NAME(v_zip_high)(vec a, vec b) { return BA_INTERLEAVE(BA_ZIP_HIGH_LANE, 0, a, b); }
/* v_join_rows takes 2 * BA_LANES elements of 16 bits from each of two rows, and pairs those of the same position: the lower half of a lane is an
 * element of `one`, the upper half the same element of `other`. v_joined_low and v_joined_high put the pairs into the order of the elements: they
 * give the first and the second BA_LANES pairs. */
#if !defined(BA_REAL_DOUBLE) && !defined(BA_HAVE_V_JOIN)
BA_INLINE void NAME(v_join_rows)(const ivec one, const ivec other, ivec *two) {
    two[0] = (one & 0xffff) | other << 16;
    two[1] = (one >> 16 & 0xffff) | (other & -0x10000);
}
BA_INLINE vec NAME(v_joined_low)(vec a, vec b) { return NAME(v_zip_low)(a, b); }
BA_INLINE vec NAME(v_joined_high)(vec a, vec b) { return NAME(v_zip_high)(a, b); }
#endif

/* a and b hold rows of n lanes one behind the other. Takes the rows with even, or with odd, numbers. n is a constant power of two below BA_LANES. */
#define BA_EVEN_ROW(j, n) (2 * ((j) - (j) % (n)) + (j) % (n)) % (2 * BA_LANES)
#define BA_ODD_ROW(j, n) (BA_EVEN_ROW(j, n) + (n)) % (2 * BA_LANES)
BA_INLINE vec NAME(v_even_rows)(vec a, vec b, const int n) {
    if (n == 8) return BA_INTERLEAVE(BA_EVEN_ROW, 8, a, b);
    if (n == 4) return BA_INTERLEAVE(BA_EVEN_ROW, 4, a, b);
    if (n == 2) return BA_INTERLEAVE(BA_EVEN_ROW, 2, a, b);
    return NAME(v_even)(a, b);
}
BA_INLINE vec NAME(v_odd_rows)(vec a, vec b, const int n) {
    if (n == 8) return BA_INTERLEAVE(BA_ODD_ROW, 8, a, b);
    if (n == 4) return BA_INTERLEAVE(BA_ODD_ROW, 4, a, b);
    if (n == 2) return BA_INTERLEAVE(BA_ODD_ROW, 2, a, b);
    return NAME(v_odd)(a, b);
}
#undef BA_EVEN_ROW
#undef BA_ODD_ROW
#undef BA_EVEN_LANE
#undef BA_ODD_LANE
#undef BA_ZIP_LOW_LANE
#undef BA_ZIP_HIGH_LANE

/* Transposes a square of BA_LANES vectors: exchanges rows[i][j] and rows[j][i]. Each round exchanges off-diagonal blocks, which are twice as large as
 * in the round before. */
#define BA_TRANSPOSE_ROUND(step)                                                                                                                     \
    if (step < BA_LANES) {                                                                                                                           \
        _Pragma("GCC unroll 16") for (int i = 0; i < BA_LANES; i++) {                                                                                \
            if (i & step) continue;                                                                                                                  \
            const vec a = rows[i], b = rows[(i + step) % BA_LANES];                                                                                  \
            rows[i] = BA_INTERLEAVE(BA_LOW, step, a, b);                                                                                             \
            rows[(i + step) % BA_LANES] = BA_INTERLEAVE(BA_HIGH, step, a, b);                                                                        \
        }                                                                                                                                            \
    }
BA_INLINE void NAME(v_transpose)(vec *rows){BA_TRANSPOSE_ROUND(1) BA_TRANSPOSE_ROUND(2) BA_TRANSPOSE_ROUND(4) BA_TRANSPOSE_ROUND(8)}
#undef BA_TRANSPOSE_ROUND

/* Lane i of the result is lane i ^ step of x. step is a constant power of two below BA_LANES. */
#define BA_OTHER(j, step) (((j) ^ (step)) % BA_LANES)
BA_INLINE vec NAME(v_swap)(const vec x, const int step) {
    if (step == 8) return BA_INTERLEAVE(BA_OTHER, 8, x, x);
    if (step == 4) return BA_INTERLEAVE(BA_OTHER, 4, x, x);
    if (step == 2) return BA_INTERLEAVE(BA_OTHER, 2, x, x);
    return BA_INTERLEAVE(BA_OTHER, 1, x, x);
}
#undef BA_OTHER

/* Sums across lanes: lane i of the result is the sum of all lanes of rows[i]. `count`, a constant power of two, says how many rows there are; the
 * lanes beyond `count` repeat the ones before them. The additions pair the same lanes in the same order for every row and any count, so that a sum
 * does not depend on how many sums are made together.
 *
 * There are two halves, so that a caller can do other work between them. v_sum_pairs adds lanes in pairs and leaves half as many vectors, at the
 * front of `rows`; v_sum_paired makes the sums from these vectors. v_sum_each does both, for BA_LANES rows. */
#ifndef BA_HAVE_V_SUM_PAIRS
#define BA_SUM_ROUND(step)                                                                                                                           \
    if (step < BA_LANES && step >= count) rows[0] += NAME(v_swap)(rows[0], step);                                                                    \
    else if (step < BA_LANES) {                                                                                                                      \
        _Pragma("GCC unroll 16") for (int i = 0; i < count / step; i += 2) rows[i / 2] =                                                             \
            BA_INTERLEAVE(BA_LOW, step, rows[i], rows[i + 1]) + BA_INTERLEAVE(BA_HIGH, step, rows[i], rows[i + 1]);                                  \
    }
BA_INLINE void NAME(v_sum_pairs)(vec *rows, const int count) { BA_SUM_ROUND(1); }
BA_INLINE vec NAME(v_sum_paired)(vec *rows, const int count) {
    BA_SUM_ROUND(2);
    BA_SUM_ROUND(4);
    BA_SUM_ROUND(8);
    return rows[0];
}
#undef BA_SUM_ROUND
#endif
BA_INLINE vec NAME(v_sum_each)(vec *rows) {
    NAME(v_sum_pairs)(rows, BA_LANES);
    return NAME(v_sum_paired)(rows, BA_LANES);
}
#undef BA_LOW
#undef BA_HIGH
#undef BA_LANES_2
#undef BA_LANES_4
#undef BA_LANES_8
#undef BA_LANES_16
#undef BA_EACH_LANE
#undef BA_INTERLEAVE

/* Loads n floats as reals. n may be more than BA_LANES; if it is less, the other lanes are 0. */
BA_INLINE vec NAME(v_load_floats)(const float *p, int64_t n) {
    typedef float floats __attribute__((vector_size(BA_LANES * sizeof(float))));
    floats a = {0};
    memcpy(&a, p, (size_t)ba_min(n, BA_LANES) * sizeof *p);
    return __builtin_convertvector(a, vec);
}

/* The natural logarithm of l * 2^m; -inf where l is 0, which means that nothing was attended. */
BA_INLINE real NAME(log_sum_exp)(real m, real l) { return l == 0 ? -(real)INFINITY : (real)(((double)m + log2((double)l)) * 0x1.62e42fefa39efp-1); }
