/* Vectors of 4 floats: the functions of vec.h for which aarch64 has an instruction that compilers do not find in the generic form. Included by
 * vec/vec.h only. */
#include <arm_neon.h>

/* v_max keeps its generic form, a comparison and a selection. FMAX returns NaN if either operand is NaN, and FMAXNM if either is a signalling NaN. */

/* FMLA can multiply by one element of a register. So four elements are loaded at once, and no element has to be spread over a register of its own. */
#define BA_HAVE_ELEMENTS 1
#define BA_ELEMENTS 4
typedef vec NAME(elements);
BA_INLINE vec NAME(v_elements)(const float *p, const int n) { return n == 4 ? NAME(v_load)(p) : (vec){*p}; }
BA_INLINE vec NAME(v_element)(vec a, const int i) { return NAME(v_set1)(a[i]); }

#define BA_HAVE_V_CONVERT 1
BA_INLINE vec NAME(v_from_f16)(const uint16_t *p) { return (vec)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
BA_INLINE vec NAME(v_from_bf16)(const uint16_t *p) { return (vec)vzip1q_u16(vdupq_n_u16(0), vcombine_u16(vld1_u16(p), vdup_n_u16(0))); }
BA_INLINE void NAME(v_to_f16)(uint16_t *p, vec a) { vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32((float32x4_t)a))); }

/* The upper halves of the sums are the values rounded to nearest, ties to even. */
#define BA_HAVE_V_TO_BF16 1
BA_INLINE void NAME(v_to_bf16)(uint16_t *p, vec a) {
    const uint32x4_t bits = (uint32x4_t)a, odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    const uint16x4_t rounded = vaddhn_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff))), nan = vorr_u16(vshrn_n_u32(bits, 16), vdup_n_u16(0x40));
    vst1_u16(p, vbsl_u16(vmovn_u32((uint32x4_t)(a == a)), rounded, nan));
}

BA_INLINE int16x8_t NAME(v_load_bytes)(const void *p) {
    int32_t bytes;
    memcpy(&bytes, p, sizeof bytes);
    return vmovl_s8(vreinterpret_s8_s32((int32x2_t){bytes}));
}
#define BA_HAVE_V_BYTES 1
BA_INLINE ivec NAME(v_load_i8)(const int8_t *p) { return (ivec)vmovl_s16(vget_low_s16(NAME(v_load_bytes)(p))); }

BA_INLINE ivec NAME(v_load_u8)(const uint8_t *p) {
    uint32_t bytes;
    memcpy(&bytes, p, sizeof bytes);
    return (ivec)vmovl_u16(vget_low_u16(vmovl_u8(vreinterpret_u8_u32((uint32x2_t){bytes}))));
}

#define BA_HAVE_V_SPREAD_F16 1
BA_INLINE vec NAME(v_spread_f16)(const void *p) {
    uint16_t bits;
    memcpy(&bits, p, sizeof bits);
    return (vec)vcvt_f32_f16(vreinterpret_f16_u16(vdup_n_u16(bits)));
}
BA_INLINE void NAME(v_spread_two_f16)(const void *p, vec *one, vec *other) {
    *one = NAME(v_spread_f16)(p);
    *other = NAME(v_spread_f16)((const char *)p + 2);
}

/* Converts by way of float16, whose exponent bias is larger by 8: the bits of exponent and mantissa move up by 7 places, the conversion to float
 * handles subnormal numbers, and a factor of 2^8 corrects the bias. The only NaN of e4m3 is turned into a NaN of float16. */
#define BA_HAVE_V_E4M3 1
BA_INLINE vec NAME(v_from_e4m3)(const uint8_t *p) {
    const uint16x4_t bits = vand_u16(vshl_n_u16(vreinterpret_u16_s16(vget_low_s16(NAME(v_load_bytes)(p))), 7), vdup_n_u16(0xbf80));
    const uint16x4_t nan = vceq_u16(vorr_u16(bits, vdup_n_u16(0x8000)), vdup_n_u16(0xbf80));
    return (vec)vcvt_f32_f16(vreinterpret_f16_u16(vorr_u16(bits, nan))) * 256.0f;
}
