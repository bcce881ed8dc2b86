/* Checks that the dot product of pairs in generic C (vec/vec.h), for builds without the instruction VDPBF16PS, gives the bits of the instruction. */
#undef __AVX512F__ /* or vec/vec.h would take the instruction */
#define BA_LANES 16
#define BA_SUFFIX pairs_in_c
#include "kernels/vec/vec.h"

#include "checkkernels.h"

#if defined(BA_HAVE_avx512_bf16) && !defined(BA_EMULATED)
static void dot_by_instruction(uint32_t *sum, const uint32_t *a, const uint32_t *b) {
    __asm__ volatile("vmovups (%0), %%zmm0\n\tvmovups (%1), %%zmm1\n\tvdpbf16ps (%2), %%zmm1, %%zmm0\n\tvmovups %%zmm0, (%0)"
                     :
                     : "r"(sum), "r"(a), "r"(b)
                     : "memory", "xmm0", "xmm1");
}

static bool is_nan(uint32_t bits) { return (bits & 0x7fffffff) > 0x7f800000; }
static uint32_t draw(void) { return (uint32_t)pick(1 << 16) << 16 | (uint32_t)pick(1 << 16); }

/* Operands: random bits; numbers whose products are near 1, near the smallest or near the largest number; and numbers whose sums end next to the
 * smallest normal number. */
static const struct {
    uint32_t keep, a, b, sum;
} kinds[] = {{0xffffffff, 0, 0, 0},
             {0x81ff81ff, 0x3e003e00, 0x3e003e00, 0x3e000000},
             {0x83ff83ff, 0x20002000, 0x1f001f00, 0},
             {0x83ff83ff, 0x5f005f00, 0x5f005f00, 0x7c000000},
             {0x80008000, 0x1a001a00, 0x1a001a00, 0x00800000},
             {0x80808080, 0x1a001a00, 0x19801980, 0x00800000}};

void check_dot_pairs(void) {
    record r = {.name = "in C"};
    for (int n = 0; n < 60000; n++) {
        const int kind = n % (int)(sizeof kinds / sizeof *kinds);
        uint32_t a[BA_LANES], b[BA_LANES], sum[BA_LANES];
        for (int i = 0; i < BA_LANES; i++) {
            a[i] = (draw() & kinds[kind].keep) | kinds[kind].a;
            b[i] = (draw() & kinds[kind].keep) | kinds[kind].b;
            sum[i] = (draw() & (kinds[kind].keep | 0xffff)) | kinds[kind].sum;
            if (kind >= 4) sum[i] &= 0xff800000;
        }
        vec emulated;
        ivec pairs_a, pairs_b;
        memcpy(&emulated, sum, sizeof emulated);
        memcpy(&pairs_a, a, sizeof pairs_a);
        memcpy(&pairs_b, b, sizeof pairs_b);
        emulated = NAME(v_dot_pairs)(emulated, pairs_a, pairs_b);
        dot_by_instruction(sum, a, b);
        for (int i = 0; i < BA_LANES; i++) {
            uint32_t bits;
            memcpy(&bits, (const char *)&emulated + 4 * i, sizeof bits);
            require(&r, bits == sum[i] || (is_nan(bits) && is_nan(sum[i])), "the instruction's bits [kind][lane]", kind, i);
        }
    }
    report("v_dot_pairs", "", &r, 1);
}
#else
void check_dot_pairs(void) {}
#endif
