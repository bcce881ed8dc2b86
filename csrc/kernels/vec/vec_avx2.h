/* Vectors of 8 floats: the functions of vec.h for which AVX2, FMA or F16C have an instruction. Included by vec/vec.h only. */
#include <immintrin.h>

#define BA_HAVE_V_MAX 1
BA_INLINE vec NAME(v_max)(vec a, vec b) { return (vec)_mm256_max_ps((__m256)a, (__m256)b); }

#define BA_HAVE_V_NAN_OF 1
BA_INLINE vec NAME(v_nan_of)(vec a, vec b) { return (vec)_mm256_blendv_ps((__m256)b, (__m256)a, _mm256_cmp_ps((__m256)a, (__m256)a, _CMP_UNORD_Q)); }

#define BA_HAVE_V_CONVERT 1
BA_INLINE vec NAME(v_from_f16)(const uint16_t *p) { return (vec)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)); }
BA_INLINE vec NAME(v_from_bf16)(const uint16_t *p) { return (vec)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16); }
BA_INLINE void NAME(v_to_f16)(uint16_t *p, vec a) {
    _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph((__m256)a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

#define BA_HAVE_V_BYTES 1
BA_INLINE ivec NAME(v_load_i8)(const int8_t *p) { return (ivec)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)); }
BA_INLINE ivec NAME(v_load_u8)(const uint8_t *p) { return (ivec)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p)); }

/* Converts by way of float16, whose exponent bias is larger by 8: the bits of exponent and mantissa move up by 7 places, the conversion to float
 * handles subnormal numbers, and a factor of 2^8 corrects the bias. The only NaN of e4m3 is turned into a NaN of float16. */
#define BA_HAVE_V_E4M3 1
BA_INLINE vec NAME(v_from_e4m3)(const uint8_t *p) {
    const __m128i bits = _mm_and_si128(_mm_slli_epi16(_mm_cvtepi8_epi16(_mm_loadl_epi64((const __m128i *)p)), 7), _mm_set1_epi16((short)0xbf80));
    const __m128i nan = _mm_cmpeq_epi16(_mm_or_si128(bits, _mm_set1_epi16((short)0x8000)), _mm_set1_epi16((short)0xbf80));
    return (vec)_mm256_cvtph_ps(_mm_or_si128(bits, nan)) * 256.0f;
}

#define BA_HAVE_V_SPREAD_F16 1
BA_INLINE vec NAME(v_spread_f16)(const void *p) {
    int bits;
    memcpy(&bits, p, sizeof bits);
    return (vec)_mm256_broadcastss_ps(_mm_cvtph_ps(_mm_cvtsi32_si128(bits)));
}
BA_INLINE void NAME(v_spread_two_f16)(const void *p, vec *one, vec *other) {
    int bits;
    memcpy(&bits, p, sizeof bits);
    const __m128 both = _mm_cvtph_ps(_mm_cvtsi32_si128(bits));
    *one = (vec)_mm256_broadcastss_ps(both);
    *other = (vec)_mm256_broadcastss_ps(_mm_movehdup_ps(both));
}

#define BA_HAVE_V_REGISTER 1 /* a vec is one register */

#define BA_HAVE_V_REPEAT 1
BA_INLINE vec NAME(v_repeat)(const float *p, const int n) {
    if (n == 8) return (vec)_mm256_loadu_ps(p);
    if (n == 4) return (vec)_mm256_broadcast_ps((const __m128 *)p);
    if (n == 2) return (vec)_mm256_castpd_ps(_mm256_broadcast_sd((const double *)p));
    return (vec)_mm256_set1_ps(*p);
}

#define BA_HAVE_V_SUM_PAIRS 1
BA_INLINE void NAME(v_sum_pairs)(vec *rows, const int count) {
#pragma GCC unroll 4
    for (int i = 0; i < count; i += 2) {
        const __m256 a = (__m256)rows[i], b = (__m256)rows[count > 1 ? i + 1 : i];
        rows[i / 2] = (vec)(_mm256_unpacklo_ps(a, b) + _mm256_unpackhi_ps(a, b));
    }
}
BA_INLINE vec NAME(v_sum_paired)(vec *pairs, const int count) {
    __m256 four[2];
#pragma GCC unroll 2
    for (int i = 0; i < count; i += 4) {
        const __m256 a = (__m256)pairs[i / 2], b = (__m256)pairs[count > 2 ? i / 2 + 1 : i / 2];
        four[i / 4] = _mm256_shuffle_ps(a, b, 0x44) + _mm256_shuffle_ps(a, b, 0xee);
    }
    const __m256 a = four[0], b = four[count > 4 ? 1 : 0];
    return (vec)(_mm256_blend_ps(a, b, 0xf0) + _mm256_permute2f128_ps(a, b, 0x21));
}
