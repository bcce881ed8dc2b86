/* Builds the tables of all levels. Each table begins with the portable kernels. Kernels of higher levels replace them, up to the table's own level
 * and the highest level of the CPU. */
#include "kernels/tables.h"

#include <pthread.h>

#include "blitz_attn.h"
#include "core/cpu.h"
#include "kernels/tile_traps.h"

static ba_kernels tables[BA_ISA_COUNT];
static pthread_once_t built = PTHREAD_ONCE_INIT;

static void build(void) {
    const ba_isa detected = ba_isa_detected();
    for (int level = 0; level < BA_ISA_COUNT; level++) {
        ba_kernels *table = &tables[level];
        const bool into_l2 = ba_prefetches_reach_l2((ba_isa)level);
        (void)into_l2; /* not used where the build has no level with such kernels */

        enum { BA_DTYPE_NUMBERS };
#define BA_FAMILY(from, dtype)                                                                                                                       \
    if ((int)ba_attend_##from##_##dtype.isa <= level && ba_attend_##from##_##dtype.isa <= detected) {                                                \
        table->attend[dtype] = &ba_attend_##from##_##dtype;                                                                                          \
        if (ba_attend_##from##_##dtype.gradient && ba_attend_##from##_##dtype.gradient->gradient[0])                                                 \
            table->vector[dtype] = &ba_attend_##from##_##dtype;                                                                                      \
    }
#define BA_CACHE(from, dtype)                                                                                                                        \
    if ((int)ba_cache_##from##_##dtype.isa <= level && ba_cache_##from##_##dtype.isa <= detected) table->cache[dtype] = &ba_cache_##from##_##dtype;
#define BA_FAMILY_L2(from, dtype)                                                                                                                    \
    if (into_l2 && table->attend[dtype] == &ba_attend_##from##_##dtype) table->attend[dtype] = &ba_attend_##from##_l2_##dtype;
#define BA_CACHE_L2(from, dtype)                                                                                                                     \
    if (into_l2 && table->cache[dtype] == &ba_cache_##from##_##dtype) table->cache[dtype] = &ba_cache_##from##_l2_##dtype;
#define BA_PROBE(from)                                                                                                                               \
    if ((int)ba_probes_##from.isa <= level && ba_probes_##from.isa <= detected) table->probes = &ba_probes_##from;
#include "kernels/kernels.inc"
#undef BA_FAMILY
#undef BA_CACHE
#undef BA_FAMILY_L2
#undef BA_CACHE_L2
#undef BA_PROBE
    }
}

const ba_kernels *ba_kernels_at(ba_isa level) {
    pthread_once(&built, build);
#ifdef BA_TILE_TRAPS
    ba_trap_tiles();
#endif
    return &tables[level];
}

const ba_kernels *ba_kernels_active(void) { return ba_kernels_at(ba_isa_active()); }

/* The level of the kernels that do each job of a dtype. Calls of few queries use the few kernels of the cache's dtype where their family has none.
 * Gradients whose family has no kernels for them use those of the vector family. A cache is listed with its own kernels, although bfloat16 queries
 * over it may use those of the bfloat16 family. */
static ba_isa few_isa(const ba_kernels *table, ba_dtype dtype) {
    const ba_attend_family *family = table->attend[dtype];
    return family->few->attend[dtype] != NULL && ba_tuning_at(family->isa)->few_least_heads[dtype] > 0 ? family->isa : table->cache[dtype]->isa;
}

static ba_isa gradient_isa(const ba_kernels *table, ba_dtype dtype) {
    return table->attend[dtype]->gradient != NULL ? table->attend[dtype]->isa : table->vector[dtype]->isa;
}

static ba_isa cache_isa(const ba_kernels *table, ba_dtype dtype) { return table->cache[dtype]->isa; }

int ba_kernel_info(ba_isa level, int64_t index, const char **name, ba_isa *implemented_at) {
    typedef ba_isa (*isa_fn)(const ba_kernels *table, ba_dtype dtype);
    static const struct {
        const char *name;
        isa_fn isa;
        ba_dtype dtype;
    } others[] = {
        {"few_float32", few_isa, BA_FLOAT32},
        {"few_float16", few_isa, BA_FLOAT16},
        {"few_bfloat16", few_isa, BA_BFLOAT16},
        {"few_float64", few_isa, BA_FLOAT64},
        {"gradient_float32", gradient_isa, BA_FLOAT32},
        {"gradient_float16", gradient_isa, BA_FLOAT16},
        {"gradient_bfloat16", gradient_isa, BA_BFLOAT16},
        {"gradient_float64", gradient_isa, BA_FLOAT64},
        {"cache_float32", cache_isa, BA_FLOAT32},
        {"cache_float16", cache_isa, BA_FLOAT16},
        {"cache_bfloat16", cache_isa, BA_BFLOAT16},
        {"cache_float64", cache_isa, BA_FLOAT64},
        {"cache_int8", cache_isa, BA_INT8},
        {"cache_float8_e4m3", cache_isa, BA_FLOAT8_E4M3},
        {"cache_q8_0", cache_isa, BA_Q8_0},
        {"cache_q4_0", cache_isa, BA_Q4_0},
        {"cache_q4_1", cache_isa, BA_Q4_1},
    };
    if ((unsigned)level >= BA_ISA_COUNT || index < 0) return 0;
    const ba_kernels *table = ba_kernels_at(level);
    if (index < BA_FLOAT_DTYPES) {
        *name = table->attend[index]->name;
        *implemented_at = table->attend[index]->isa;
        return 1;
    }
    index -= BA_FLOAT_DTYPES;
    if (index >= (int64_t)(sizeof others / sizeof *others)) return 0;
    *name = others[index].name;
    *implemented_at = others[index].isa(table, others[index].dtype);
    return 1;
}
