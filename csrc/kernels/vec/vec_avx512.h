/* Vectors of 16 floats: the functions of vec.h for which AVX-512 has an instruction. Included by vec/vec.h only. */
#include <immintrin.h>

#define BA_HAVE_V_REGISTER 1 /* a vec is one register */
#define BA_HAVE_V_MAX 1
BA_INLINE vec NAME(v_max)(vec a, vec b) { return (vec)_mm512_max_ps((__m512)a, (__m512)b); }

#define BA_HAVE_V_NAN_OF 1
BA_INLINE vec NAME(v_nan_of)(vec a, vec b) {
    return (vec)_mm512_mask_mov_ps((__m512)b, _mm512_cmp_ps_mask((__m512)a, (__m512)a, _CMP_UNORD_Q), (__m512)a);
}

/* p * 2^floor(e), which is 2^x; NaN where x is NaN. Where x is below -126, the result is 0 instead of a subnormal number: Intel's cores take hundreds
 * of cycles to make a subnormal number, and as many for each product with it. */
BA_INLINE vec NAME(scale_normal)(vec p, vec e, vec x) {
    return (vec)_mm512_maskz_scalef_ps(_mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ), (__m512)p, (__m512)e);
}

/* VREDUCEPS gives the fraction. VSCALEFPS multiplies by the power of two, and handles infinity and NaN. */
#define BA_HAVE_V_EXP2 1
BA_INLINE vec NAME(v_exp2)(vec x) {
    const vec f = (vec)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    return NAME(scale_normal)(NAME(exp2_poly)(f), x - f, x);
}

#define BA_HAVE_V_SHORT 1
BA_INLINE vec NAME(v_fma)(vec a, vec b, vec c) { return (vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
BA_INLINE vec NAME(v_exp2_any)(vec x) { return NAME(v_exp2)(x); }
/* VSCALEFPS rounds the exponent down by itself, so the fraction is the distance from the whole number below. The polynomial has degree 4. */
BA_INLINE vec NAME(v_short_fraction)(vec x) { return (vec)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC); }
BA_INLINE vec NAME(v_short_power)(vec f) {
    vec p = f * 0x1.bb7cd8p-7f + 0x1.aa13eep-5f;
    p = p * f + 0x1.ee798ap-3f;
    p = p * f + 0x1.62d166p-1f;
    return p * f + 0x1.00002cp+0f;
}
BA_INLINE vec NAME(v_short_scale)(vec p, vec x) { return NAME(scale_normal)(p, x, x); }
BA_INLINE ivec NAME(v_pair_rounded)(vec even, vec odd, const NAME(rounding) * by) {
    const __m512i a = _mm512_add_epi32((__m512i)even, (__m512i)by->half), b = _mm512_add_epi32((__m512i)odd, (__m512i)by->half);
    /* This is a byte alignment and not a shift, since shifts run on the port that multiplies. VPTERNLOGD overwrites its first operand, which is not
     * needed again; 0xe4 takes bits of the first operand where those of the third are set, and bits of the second elsewhere. */
    return (ivec)_mm512_ternarylogic_epi32(_mm512_alignr_epi8(a, a, 2), b, (__m512i)by->lower, 0xe4);
}
BA_INLINE vec NAME(v_gather)(const float *p, ivec at) { return (vec)_mm512_i32gather_ps((__m512i)at, p, sizeof *p); }
BA_INLINE void NAME(v_scatter)(float *p, ivec at, vec x) { _mm512_i32scatter_ps(p, (__m512i)at, (__m512)x, sizeof *p); }
BA_INLINE vec NAME(v_load_quarters)(const void *a, const void *b, const void *c, const void *d) {
    __m512i x = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i *)a));
    x = _mm512_inserti32x4(x, _mm_loadu_si128((const __m128i *)b), 1);
    x = _mm512_inserti32x4(x, _mm_loadu_si128((const __m128i *)c), 2);
    return (vec)_mm512_inserti32x4(x, _mm_loadu_si128((const __m128i *)d), 3);
}
BA_INLINE void NAME(v_pair_halves)(vec *a, vec *b) {
    /* the indices of elements 0, 32, 1, 33, ... of both rows, and the same from element 16 on */
    const __m512i low = _mm512_set_epi32(0x2f000f, 0x2e000e, 0x2d000d, 0x2c000c, 0x2b000b, 0x2a000a, 0x290009, 0x280008, 0x270007, 0x260006, 0x250005,
                                         0x240004, 0x230003, 0x220002, 0x210001, 0x200000);
    const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    const __m512i x = (__m512i)*a, y = (__m512i)*b;
    *a = (vec)_mm512_permutex2var_epi16(x, low, y);
    *b = (vec)_mm512_permutex2var_epi16(x, high, y);
}
BA_INLINE void NAME(v_transpose_octets)(vec *rows) {
    __m512i a[8], b[8];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) { /* each round interleaves vectors i and i + 4, whose rows are 4, then 2, then 1 apart */
        a[2 * i] = _mm512_unpacklo_epi16((__m512i)rows[i], (__m512i)rows[i + 4]);
        a[2 * i + 1] = _mm512_unpackhi_epi16((__m512i)rows[i], (__m512i)rows[i + 4]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        b[2 * i] = _mm512_unpacklo_epi16(a[i], a[i + 4]);
        b[2 * i + 1] = _mm512_unpackhi_epi16(a[i], a[i + 4]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        rows[2 * i] = (vec)_mm512_unpacklo_epi16(b[i], b[i + 4]);
        rows[2 * i + 1] = (vec)_mm512_unpackhi_epi16(b[i], b[i + 4]);
    }
}
BA_INLINE bool NAME(v_any)(ivec mask) { return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask) != 0; }

#ifdef __AVX512BF16__
#define BA_HAVE_V_DOT 1
BA_INLINE vec NAME(v_dot_pairs)(vec sum, ivec a, ivec b) { return (vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b); }
#endif

#define BA_HAVE_V_CONVERT 1
BA_INLINE vec NAME(v_from_f16)(const uint16_t *p) { return (vec)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }
BA_INLINE vec NAME(v_from_bf16)(const uint16_t *p) {
    return (vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16);
}
BA_INLINE void NAME(v_to_f16)(uint16_t *p, vec a) {
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtps_ph((__m512)a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

#define BA_HAVE_V_BYTES 1
BA_INLINE ivec NAME(v_load_i8)(const int8_t *p) { return (ivec)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)); }
BA_INLINE ivec NAME(v_load_u8)(const uint8_t *p) { return (ivec)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p)); }

/* Converts by way of float16, whose exponent bias is larger by 8: the bits of exponent and mantissa move up by 7 places, the conversion to float
 * handles subnormal numbers, and a factor of 2^8 corrects the bias. The only NaN of e4m3 is turned into a NaN of float16. */
#define BA_HAVE_V_E4M3 1
BA_INLINE vec NAME(v_from_e4m3)(const uint8_t *p) {
    const __m256i bits =
        _mm256_and_si256(_mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)p)), 7), _mm256_set1_epi16((short)0xbf80));
    const __m256i nan = _mm256_cmpeq_epi16(_mm256_or_si256(bits, _mm256_set1_epi16((short)0x8000)), _mm256_set1_epi16((short)0xbf80));
    return (vec)_mm512_cvtph_ps(_mm256_or_si256(bits, nan)) * 256.0f;
}

#define BA_HAVE_V_SPREAD_F16 1
BA_INLINE vec NAME(v_spread_f16)(const void *p) {
    int bits;
    memcpy(&bits, p, sizeof bits);
    return (vec)_mm512_broadcastss_ps(_mm_cvtph_ps(_mm_cvtsi32_si128(bits)));
}
BA_INLINE void NAME(v_spread_two_f16)(const void *p, vec *one, vec *other) {
    int bits;
    memcpy(&bits, p, sizeof bits);
    const __m128 both = _mm_cvtph_ps(_mm_cvtsi32_si128(bits));
    *one = (vec)_mm512_broadcastss_ps(both);
    *other = (vec)_mm512_broadcastss_ps(_mm_movehdup_ps(both));
}

#define BA_HAVE_V_LOOK_UP 1
BA_INLINE vec NAME(v_look_up)(vec table, ivec indices) { return (vec)_mm512_permutexvar_ps((__m512i)indices, (__m512)table); }

BA_INLINE __m256i NAME(v_load_bytes)(const void *p, int64_t n) {
    return n >= 32 ? _mm256_loadu_si256((const __m256i *)p) : _mm256_maskz_loadu_epi8((1u << n) - 1, p);
}

#define BA_HAVE_V_PAIRS_I8 1
BA_INLINE vec NAME(v_pairs_from_i8)(const int8_t *p, int64_t n) {
    const __m256i bytes = NAME(v_load_bytes)(p, n);
    const __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_castsi256_si128(bytes)));
    const __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_extracti128_si256(bytes, 1)));
    /* the upper halves of all lanes: words 1, 3, 5 .. 63 of both vectors */
    const __m512i odd = _mm512_set_epi64(0x003f003d003b0039, 0x0037003500330031, 0x002f002d002b0029, 0x0027002500230021, 0x001f001d001b0019,
                                         0x0017001500130011, 0x000f000d000b0009, 0x0007000500030001);
    return (vec)_mm512_permutex2var_epi16((__m512i)low, odd, (__m512i)high);
}

#define BA_HAVE_V_PAIRS_E4M3 1
#ifdef __AVX512VBMI__
/* All numbers of e4m3 without their signs, in the order of their bits, as bfloat16: [0] has the lower bytes, [1] the upper bytes. VPERMI2B looks the
 * numbers up: it takes an index from the lowest 7 bits of a byte, and does not see the sign. */
#define BA_BYTE(bits, shift) (uint8_t)((bits) >> (shift))
#define BA_BUT_LAST(bits, shift)                                                                                                                     \
    BA_BYTE(bits, shift), BA_BYTE((bits) + 0x10, shift), BA_BYTE((bits) + 0x20, shift), BA_BYTE((bits) + 0x30, shift),                               \
        BA_BYTE((bits) + 0x40, shift), BA_BYTE((bits) + 0x50, shift), BA_BYTE((bits) + 0x60, shift)
#define BA_EIGHT(bits, shift) BA_BUT_LAST(bits, shift), BA_BYTE((bits) + 0x70, shift) /* of one exponent */
#define BA_SUBNORMAL(shift)                                                                                                                          \
    BA_BYTE(0, shift), BA_BYTE(0x3b00, shift), BA_BYTE(0x3b80, shift), BA_BYTE(0x3bc0, shift), BA_BYTE(0x3c00, shift), BA_BYTE(0x3c20, shift),       \
        BA_BYTE(0x3c40, shift), BA_BYTE(0x3c60, shift)
#define BA_NUMBERS(shift)                                                                                                                            \
    BA_SUBNORMAL(shift), BA_EIGHT(0x3c80, shift), BA_EIGHT(0x3d00, shift), BA_EIGHT(0x3d80, shift), BA_EIGHT(0x3e00, shift),                         \
        BA_EIGHT(0x3e80, shift), BA_EIGHT(0x3f00, shift), BA_EIGHT(0x3f80, shift), BA_EIGHT(0x4000, shift), BA_EIGHT(0x4080, shift),                 \
        BA_EIGHT(0x4100, shift), BA_EIGHT(0x4180, shift), BA_EIGHT(0x4200, shift), BA_EIGHT(0x4280, shift), BA_EIGHT(0x4300, shift),                 \
        BA_BUT_LAST(0x4380, shift), BA_BYTE(0x7fc0, shift) /* NaN */
static const uint8_t NAME(e4m3_bytes)[2][128] __attribute__((aligned(64), unused)) = {{BA_NUMBERS(0)}, {BA_NUMBERS(8)}};
#undef BA_BYTE
#undef BA_BUT_LAST
#undef BA_EIGHT
#undef BA_SUBNORMAL
#undef BA_NUMBERS
BA_INLINE vec NAME(v_pairs_from_e4m3)(const uint8_t *p, int64_t n) {
    /* byte 0, byte 0, byte 1, byte 1, ... */
    const __m512i twice = _mm512_set_epi64(0x1f1f1e1e1d1d1c1c, 0x1b1b1a1a19191818, 0x1717161615151414, 0x1313121211111010, 0x0f0f0e0e0d0d0c0c,
                                           0x0b0b0a0a09090808, 0x0707060605050404, 0x0303020201010000);
    const __m512i bytes = _mm512_permutexvar_epi8(twice, _mm512_castsi256_si512(NAME(v_load_bytes)(p, n)));
    const __m512i *lower = (const __m512i *)NAME(e4m3_bytes)[0], *upper = (const __m512i *)NAME(e4m3_bytes)[1];
    __m512i x = _mm512_mask2_permutex2var_epi8(lower[0], bytes, 0x5555555555555555, lower[1]);
    x = _mm512_mask2_permutex2var_epi8(upper[0], x, 0xaaaaaaaaaaaaaaaa, upper[1]);
    return (vec)_mm512_ternarylogic_epi32(x, bytes, _mm512_set1_epi16((short)0x8000), 0xf8); /* x | (bytes & sign) */
}
#else
/* In 16-bit lanes: the bits of exponent and mantissa move to their places in bfloat16, and the bias of the exponent is corrected. 0, the numbers that
 * are subnormal in e4m3, and NaN come from a table instead, which the lowest 5 bits index. */
BA_INLINE vec NAME(v_pairs_from_e4m3)(const uint8_t *p, int64_t n) {
    const __m512i table = _mm512_set_epi32(0x7fc00000, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0x3c603c40, 0x3c203c00, 0x3bc03b80, 0x3b000000);
    const __m512i x = _mm512_cvtepi8_epi16(NAME(v_load_bytes)(p, n)), moved = _mm512_slli_epi16(x, 4);
    const __m512i magnitude = _mm512_and_si512(moved, _mm512_set1_epi16(0x7f0));
    const __mmask32 special = _mm512_testn_epi16_mask(x, _mm512_set1_epi16(0x78)) | _mm512_cmpeq_epi16_mask(magnitude, _mm512_set1_epi16(0x7f0));
    const __m512i normal = _mm512_add_epi16(magnitude, _mm512_set1_epi16(0x3c00));
    const __m512i found = _mm512_mask_permutexvar_epi16(normal, special, x, table);
    return (vec)_mm512_ternarylogic_epi32(found, moved, _mm512_set1_epi16((short)0x8000), 0xf8); /* found | (moved & sign) */
}
#endif

/* Within each 128 bits, two[0] takes the lower four elements of both rows, and two[1] the upper four. */
#define BA_HAVE_V_JOIN 1
BA_INLINE void NAME(v_join_rows)(const ivec one, const ivec other, ivec *two) {
    two[0] = (ivec)_mm512_unpacklo_epi16((__m512i)one, (__m512i)other);
    two[1] = (ivec)_mm512_unpackhi_epi16((__m512i)one, (__m512i)other);
}
BA_INLINE vec NAME(v_joined_low)(vec a, vec b) {
    return (vec)_mm512_permutex2var_pd((__m512d)a, _mm512_set_epi64(11, 10, 3, 2, 9, 8, 1, 0), (__m512d)b);
}
BA_INLINE vec NAME(v_joined_high)(vec a, vec b) {
    return (vec)_mm512_permutex2var_pd((__m512d)a, _mm512_set_epi64(15, 14, 7, 6, 13, 12, 5, 4), (__m512d)b);
}

/* Lanes are first summed within groups of four, then across the groups that are 4 and 8 lanes apart. */
#define BA_HAVE_V_SUM_PAIRS 1
BA_INLINE void NAME(v_sum_pairs)(vec *rows, const int count) {
#pragma GCC unroll 8
    for (int i = 0; i < count; i += 2) {
        const __m512 a = (__m512)rows[i], b = (__m512)rows[count > 1 ? i + 1 : i];
        rows[i / 2] = (vec)(_mm512_unpacklo_ps(a, b) + _mm512_unpackhi_ps(a, b));
    }
}
BA_INLINE vec NAME(v_sum_paired)(vec *pairs, const int count) {
    __m512 four[4], eight[2];
#pragma GCC unroll 4
    for (int i = 0; i < count; i += 4) {
        const __m512 a = (__m512)pairs[i / 2], b = (__m512)pairs[count > 2 ? i / 2 + 1 : i / 2];
        four[i / 4] = _mm512_shuffle_ps(a, b, 0x44) + _mm512_shuffle_ps(a, b, 0xee);
    }
#pragma GCC unroll 2
    for (int i = 0; i < count; i += 8) {
        const __m512 a = four[i / 4], b = four[count > 4 ? i / 4 + 1 : i / 4];
        eight[i / 8] = _mm512_shuffle_f32x4(a, b, 0x44) + _mm512_shuffle_f32x4(a, b, 0xee);
    }
    const __m512 a = eight[0], b = eight[count > 8 ? 1 : 0];
    return (vec)(_mm512_shuffle_f32x4(a, b, 0x88) + _mm512_shuffle_f32x4(a, b, 0xdd));
}

/* append_keys (kernels.h) for the scores of as many keys as there are lanes. */
#define BA_HAVE_V_SCORED_KEYS 1
BA_INLINE int64_t NAME(v_append)(ba_scored_key *to, vec scores, int64_t first, double least) {
    const __m512 known = (__m512)NAME(v_select)((ivec)(scores == scores), scores, NAME(v_set1)(-(float)INFINITY));
    const __m512d halves[] = {_mm512_cvtps_pd(_mm512_castps512_ps256(known)), _mm512_cvtps_pd(_mm512_extractf32x8_ps(known, 1))};
    ba_scored_key *at = to;
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) { /* each half is packed, and then interleaved with its keys */
        const __m512i key = _mm512_add_epi64(_mm512_set1_epi64(first + 8 * i), _mm512_set_epi64(7, 6, 5, 4, 3, 2, 1, 0));
        const __mmask8 above = _mm512_cmp_pd_mask(halves[i], _mm512_set1_pd(least), _CMP_NLE_UQ);
        const __m512i score = _mm512_castpd_si512(_mm512_maskz_compress_pd(above, halves[i])), packed = _mm512_maskz_compress_epi64(above, key);
        _mm512_storeu_si512(at, _mm512_permutex2var_epi64(score, _mm512_set_epi64(11, 3, 10, 2, 9, 1, 8, 0), packed));
        _mm512_storeu_si512(at + 4, _mm512_permutex2var_epi64(score, _mm512_set_epi64(15, 7, 14, 6, 13, 5, 12, 4), packed));
        at += __builtin_popcount(above);
    }
    return at - to;
}

/* move_better (kernels.h) for one register of BA_SCORED_KEYS keys: the better ones go to `better`, and the others to `worse`. Both have room for a
 * whole register, which is always written. */
#define BA_SCORED_KEYS 4
BA_INLINE int64_t NAME(v_part)(const ba_scored_key *from, ba_scored_key pivot, ba_scored_key *better, ba_scored_key *worse) {
    const __m512i keys = _mm512_loadu_si512(from);
    const __m512d score = _mm512_castsi512_pd(keys), bound = _mm512_set1_pd(pivot.score);
    const __mmask8 is_score = 0x55, is_equal = _mm512_mask_cmp_pd_mask(is_score, score, bound, _CMP_EQ_OQ);
    unsigned is_better = _mm512_mask_cmp_pd_mask(is_score, score, bound, _CMP_GT_OQ);
    if (is_equal) { /* compares the keys, in the upper halves of elements whose lower halves are 0 */
        const __m512i key = _mm512_slli_epi64(_mm512_bsrli_epi128(keys, 8), 32), key_bound = _mm512_set1_epi64((int64_t)pivot.key << 32);
        is_better |= _mm512_mask_cmplt_epi64_mask(is_equal, key, key_bound);
    }
    const unsigned both = is_better * 3; /* the elements of these keys */
    _mm512_storeu_si512(better, _mm512_maskz_compress_epi64((__mmask8)both, keys));
    _mm512_storeu_si512(worse, _mm512_maskz_compress_epi64((__mmask8)~both, keys));
    return __builtin_popcount(is_better);
}

#define BA_HAVE_V_REPEAT 1
BA_INLINE vec NAME(v_repeat)(const float *p, const int n) {
    if (n == 16) return (vec)_mm512_loadu_ps(p);
    if (n == 8) return (vec)_mm512_broadcast_f32x8(_mm256_loadu_ps(p));
    if (n == 4) return (vec)_mm512_broadcast_f32x4(_mm_loadu_ps(p));
    if (n == 2) return (vec)_mm512_castpd_ps(_mm512_broadcastsd_pd(_mm_load_sd((const double *)p)));
    return (vec)_mm512_set1_ps(*p);
}
