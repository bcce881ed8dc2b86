/* The tables of all levels. Each begins with the portable kernels; those of the levels above replace them, up to the level itself and to what the CPU
 * supports. */
#include "kernels/tables.h"

#include <pthread.h>

static ba_kernels tables[BA_ISA_COUNT];
static pthread_once_t built = PTHREAD_ONCE_INIT;

static void build(void) {
    const ba_isa detected = ba_isa_detected();
    for (int level = 0; level < BA_ISA_COUNT; level++) {
        ba_kernels *table = &tables[level];

        enum {
            float32 = BA_FLOAT32,
            float16 = BA_FLOAT16,
            bfloat16 = BA_BFLOAT16,
            float64 = BA_FLOAT64,
            int8 = BA_INT8,
            float8_e4m3 = BA_FLOAT8_E4M3
        };
#define BA_FAMILY(from, dtype)                                                                                                                       \
    if ((int)ba_attend_##from##_##dtype.isa <= level && ba_attend_##from##_##dtype.isa <= detected) {                                                \
        table->attend[dtype] = &ba_attend_##from##_##dtype;                                                                                          \
        if (ba_attend_##from##_##dtype.gradient && ba_attend_##from##_##dtype.gradient->gradient[0])                                                 \
            table->vector[dtype] = &ba_attend_##from##_##dtype;                                                                                      \
    }
#define BA_CACHE(from, dtype)                                                                                                                        \
    if ((int)ba_cache_##from##_##dtype.isa <= level && ba_cache_##from##_##dtype.isa <= detected) table->cache[dtype] = &ba_cache_##from##_##dtype;
#define BA_PROBE(from)                                                                                                                               \
    if ((int)ba_probes_##from.isa <= level && ba_probes_##from.isa <= detected) table->probes = &ba_probes_##from;
#include "kernels/kernels.inc"
#undef BA_FAMILY
#undef BA_CACHE
#undef BA_PROBE
    }
}

const ba_kernels *ba_kernels_at(ba_isa level) {
    pthread_once(&built, build);
    return &tables[level];
}

const ba_kernels *ba_kernels_active(void) { return ba_kernels_at(ba_isa_active()); }

int ba_kernel_info(ba_isa level, int64_t index, const char **name, ba_isa *implemented_at) {
    if ((unsigned)level >= BA_ISA_COUNT || index < 0 || index >= BA_FLOAT_DTYPES) return 0;
    const ba_kernels *table = ba_kernels_at(level);
    *name = table->attend[index]->name;
    *implemented_at = table->attend[index]->isa;
    return 1;
}
