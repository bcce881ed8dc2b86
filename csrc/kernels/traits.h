/* The constants with which a level's kernels are compiled. The file of a level defines one of BA_TRAITS_PORTABLE, BA_TRAITS_AVX2, BA_TRAITS_AVX512,
 * BA_TRAITS_AVX512_L2 and BA_TRAITS_NEON, and BA_REAL_DOUBLE where real is double, and includes this file. Numbers that are chosen at run time are in
 * tuning.c.
 *
 *     BA_PREFETCH_LEVEL  where prefetches go, as __builtin_prefetch counts: 2 is L2, 3 is L1. 3 is right where cores ignore prefetches into L2 of
 *                        lines that no cache holds. Elsewhere 2 is right, since a core can wait for only a few lines into L1 at a time
 *     BA_ROUTED_SET      queries that a routed kernel takes together
 *     BA_ROUTED_AT_ONCE  vectors of keys, or of dims, that a routed kernel takes together: the registers hold them, the sums of a set, and one
 *                        operand of a query
 *     BA_FEW_MOST_SET    the most queries that a few kernel takes together
 *     BA_FEW_V_LOADS     the most vectors of V that a few kernel holds in registers, beside the sums
 *     BA_FEW_TRAITS      [element size][set size]: ba_few_traits of each combination
 *     BA_E4M3_PAIRS      defined where few kernels load e4m3 as pairs of bfloat16 (v_pairs_from_e4m3), which pays where vectors are wide */
#ifndef BA_TRAITS_H
#define BA_TRAITS_H

#include <stdbool.h>
#include <stdint.h>

/* How a few kernel goes through K and V, for elements of one size and a set of one size. */
typedef struct ba_few_traits {
    int unit_rows; /* rows of K that are scored together: a unit */
    int head_keys; /* keys of one head that are scored before those of the next head: as many as pay for fetching its queries */
    int bundle[2]; /* keys of one head that are added to O together: an even number, and as many as pay for fetching and storing the head's sums. [1]:
                      while rows to come are prefetched, so that the order of memory counts for more */
    int vectors;   /* vectors of V whose sums are in registers together. Dtypes whose V is loaded as pairs of bfloat16 take an even number */
    int passes[2]; /* passes in which a step prefetches a line of K [0] and of V [1]: as many as are worth their instructions */
    bool delayed;  /* the last sums across lanes of a unit are made among the products of the next unit, which need not wait for these sums */
    bool near[2];  /* rows of K [0] and of V [1] of the next steps are prefetched into L1 */
    bool common;   /* heads of BA_FEW_COMMON_DIM dims have code of their own, with fewer instructions per row, so that more rows are under way */
} ba_few_traits;

enum { BA_FEW_BYTES_1, BA_FEW_BYTES_2, BA_FEW_BYTES_4, BA_FEW_BYTES_8, BA_FEW_SIZES }; /* of an element */
enum { BA_SET_1, BA_SET_2, BA_SET_4, BA_SET_8, BA_FEW_SETS };

#define BA_FEW_SIZE_INDEX(bytes) ((bytes) == 1 ? BA_FEW_BYTES_1 : (bytes) == 2 ? BA_FEW_BYTES_2 : (bytes) == 4 ? BA_FEW_BYTES_4 : BA_FEW_BYTES_8)
#define BA_SET_INDEX(n) ((n) == 1 ? BA_SET_1 : (n) == 2 ? BA_SET_2 : (n) == 4 ? BA_SET_4 : BA_SET_8)

/* How many of the queries that are left make the next set. */
#define BA_FEW_SET(left) (BA_FEW_MOST_SET >= 8 && (left) >= 8 ? 8 : BA_FEW_MOST_SET >= 4 && (left) >= 4 ? 4 : (left) >= 2 ? 2 : 1)

enum {
    BA_FEW_COMMON_DIM = 128,     /* see ba_few_traits.common */
    BA_FEW_NEAR_V_ROWS = 16,     /* rows of V between a prefetch into L1 and the use */
    BA_FEW_PREFETCH_BYTES = 512, /* the most bytes of V that are prefetched at a time */
    BA_GATHER_DISTANCE = 16,     /* rows between a prefetch and the use while rows of one head are gathered */
    BA_GATHER_COMMON_BYTES = 256 /* rows of this size have a gathering loop of their own */
};

#endif

/* A file is compiled with one level's constants; portable.c has a second set of them, for double. */
#if !defined(BA_FEW_TRAITS) || defined(BA_REAL_DOUBLE)
#undef BA_PREFETCH_LEVEL
#undef BA_ROUTED_SET
#undef BA_ROUTED_AT_ONCE
#undef BA_FEW_MOST_SET
#undef BA_FEW_V_LOADS
#undef BA_FEW_TRAITS
#undef BA_E4M3_PAIRS

// clang-format off
#if defined(BA_TRAITS_AVX2)
/* 16 registers of 8 floats. */
#define BA_PREFETCH_LEVEL 2
#define BA_ROUTED_SET 6
#define BA_ROUTED_AT_ONCE 2
#define BA_FEW_MOST_SET 4
#define BA_FEW_V_LOADS 4
#define BA_FEW_TRAITS ba_few_traits_avx2
static const ba_few_traits ba_few_traits_avx2[BA_FEW_SIZES][BA_FEW_SETS] __attribute__((unused)) = {
  [BA_FEW_BYTES_1] = {
    [BA_SET_1] = {.unit_rows = 4, .head_keys = 4, .bundle = {8, 8}, .vectors = 8, .passes = {1, 1}, .common = 1},
    [BA_SET_2] = {.unit_rows = 2, .head_keys = 8, .bundle = {8, 8}, .vectors = 4, .passes = {1, 1}, .common = 1},
    [BA_SET_4] = {.unit_rows = 2, .head_keys = 8, .bundle = {8, 8}, .vectors = 2, .passes = {1, 1}, .common = 1},
  },
  [BA_FEW_BYTES_2 ... BA_FEW_BYTES_4] = {
    [BA_SET_1] = {.unit_rows = 4, .head_keys = 4, .bundle = {8, 4}, .vectors = 8, .passes = {1, 1}, .common = 1},
    [BA_SET_2] = {.unit_rows = 2, .head_keys = 8, .bundle = {8, 8}, .vectors = 4, .passes = {1, 1}, .common = 1},
    [BA_SET_4] = {.unit_rows = 2, .head_keys = 8, .bundle = {8, 8}, .vectors = 2, .passes = {1, 1}, .common = 1},
  },
};
#elif defined(BA_TRAITS_AVX512)
/* 32 registers of 16 floats, where prefetches go into L1. */
#define BA_PREFETCH_LEVEL 3
#define BA_ROUTED_SET 6
#define BA_ROUTED_AT_ONCE 4
#define BA_FEW_MOST_SET 8
#define BA_FEW_V_LOADS 8
#define BA_FEW_TRAITS ba_few_traits_avx512
#define BA_E4M3_PAIRS
static const ba_few_traits ba_few_traits_avx512[BA_FEW_SIZES][BA_FEW_SETS] __attribute__((unused)) = {
  [BA_FEW_BYTES_1] = {
    [BA_SET_1] = {.unit_rows = 4, .head_keys = 4, .bundle = {8, 8}, .vectors = 8, .passes = {2, 2}, .common = 1},
    [BA_SET_2] = {.unit_rows = 4, .head_keys = 4, .bundle = {8, 8}, .vectors = 8, .passes = {2, 2}, .common = 1},
    [BA_SET_4] = {.unit_rows = 4, .head_keys = 4, .bundle = {8, 8}, .vectors = 4, .passes = {2, 2}, .delayed = 1, .near = {1, 0}, .common = 1},
    [BA_SET_8] = {.unit_rows = 2, .head_keys = 2, .bundle = {16, 16}, .vectors = 3, .passes = {2, 2}, .delayed = 1, .near = {1, 0}, .common = 1},
  },
  [BA_FEW_BYTES_2] = {
    [BA_SET_1] = {.unit_rows = 1, .head_keys = 1, .bundle = {2, 2}, .vectors = 8, .passes = {3, 3}},
    [BA_SET_2] = {.unit_rows = 4, .head_keys = 4, .bundle = {8, 8}, .vectors = 8, .passes = {2, 3}, .near = {0, 1}, .common = 1},
    [BA_SET_4] = {.unit_rows = 4, .head_keys = 4, .bundle = {8, 8}, .vectors = 4, .passes = {2, 3}, .delayed = 1, .near = {1, 1}, .common = 1},
    [BA_SET_8] = {.unit_rows = 2, .head_keys = 2, .bundle = {16, 16}, .vectors = 3, .passes = {2, 1}, .delayed = 1, .near = {1, 1}, .common = 1},
  },
  [BA_FEW_BYTES_4] = {
    [BA_SET_1] = {.unit_rows = 1, .head_keys = 1, .bundle = {8, 8}, .vectors = 8, .passes = {2, 2}, .common = 1},
    [BA_SET_2] = {.unit_rows = 4, .head_keys = 4, .bundle = {8, 8}, .vectors = 8, .passes = {2, 3}, .near = {0, 1}},
    [BA_SET_4] = {.unit_rows = 4, .head_keys = 4, .bundle = {8, 8}, .vectors = 4, .passes = {2, 3}, .near = {1, 1}},
    [BA_SET_8] = {.unit_rows = 2, .head_keys = 2, .bundle = {16, 16}, .vectors = 3, .passes = {2, 1}, .near = {1, 1}},
  },
};
#elif defined(BA_TRAITS_AVX512_L2)
/* The same registers, where prefetches go into L2. Kernels return the same bits with these numbers as with those above, since no number changes the
 * order in which products are summed. */
#define BA_PREFETCH_LEVEL 2
#define BA_ROUTED_SET 6
#define BA_ROUTED_AT_ONCE 4
#define BA_FEW_MOST_SET 8
#define BA_FEW_V_LOADS 8
#define BA_FEW_TRAITS ba_few_traits_avx512_l2
#define BA_E4M3_PAIRS
static const ba_few_traits ba_few_traits_avx512_l2[BA_FEW_SIZES][BA_FEW_SETS] __attribute__((unused)) = {
  [BA_FEW_BYTES_1] = {
    [BA_SET_1] = {.unit_rows = 4, .head_keys = 4, .bundle = {8, 8}, .vectors = 8, .passes = {1, 1}, .delayed = 1, .common = 1},
    [BA_SET_2] = {.unit_rows = 4, .head_keys = 4, .bundle = {8, 8}, .vectors = 8, .passes = {1, 1}, .delayed = 1, .common = 1},
    [BA_SET_4] = {.unit_rows = 4, .head_keys = 4, .bundle = {8, 8}, .vectors = 4, .passes = {1, 1}, .delayed = 1, .near = {1, 0}, .common = 1},
    [BA_SET_8] = {.unit_rows = 2, .head_keys = 2, .bundle = {16, 16}, .vectors = 3, .passes = {1, 1}, .delayed = 1, .near = {1, 0}, .common = 1},
  },
  [BA_FEW_BYTES_2] = {
    [BA_SET_1] = {.unit_rows = 4, .head_keys = 4, .bundle = {8, 8}, .vectors = 8, .passes = {1, 1}, .common = 1},
    [BA_SET_2] = {.unit_rows = 4, .head_keys = 4, .bundle = {8, 8}, .vectors = 8, .passes = {1, 1}, .near = {0, 1}, .common = 1},
    [BA_SET_4] = {.unit_rows = 4, .head_keys = 4, .bundle = {8, 8}, .vectors = 4, .passes = {1, 1}, .delayed = 1, .near = {1, 1}, .common = 1},
    [BA_SET_8] = {.unit_rows = 2, .head_keys = 2, .bundle = {16, 16}, .vectors = 3, .passes = {1, 1}, .delayed = 1, .near = {1, 1}, .common = 1},
  },
  [BA_FEW_BYTES_4] = {
    [BA_SET_1] = {.unit_rows = 4, .head_keys = 4, .bundle = {8, 8}, .vectors = 8, .passes = {1, 1}, .common = 1},
    [BA_SET_2] = {.unit_rows = 4, .head_keys = 4, .bundle = {8, 8}, .vectors = 8, .passes = {1, 1}, .near = {0, 1}, .common = 1},
    [BA_SET_4] = {.unit_rows = 4, .head_keys = 4, .bundle = {8, 8}, .vectors = 4, .passes = {1, 1}, .near = {1, 1}, .common = 1},
    [BA_SET_8] = {.unit_rows = 2, .head_keys = 2, .bundle = {16, 16}, .vectors = 3, .passes = {1, 1}, .near = {1, 1}, .common = 1},
  },
};
#elif defined(BA_TRAITS_NEON)
/* 32 registers of 4 floats. */
#define BA_PREFETCH_LEVEL 2
#define BA_ROUTED_SET 6
#define BA_ROUTED_AT_ONCE 4
#define BA_FEW_MOST_SET 4
#define BA_FEW_V_LOADS 4
#define BA_FEW_TRAITS ba_few_traits_neon
static const ba_few_traits ba_few_traits_neon[BA_FEW_SIZES][BA_FEW_SETS] __attribute__((unused)) = {
  [BA_FEW_BYTES_1] = {
    [BA_SET_1] = {.unit_rows = 4, .head_keys = 4, .bundle = {8, 8}, .vectors = 8, .passes = {1, 1}, .common = 1},
    [BA_SET_2] = {.unit_rows = 2, .head_keys = 8, .bundle = {8, 8}, .vectors = 8, .passes = {1, 1}, .common = 1},
    [BA_SET_4] = {.unit_rows = 1, .head_keys = 8, .bundle = {8, 8}, .vectors = 4, .passes = {1, 1}, .common = 1},
  },
  [BA_FEW_BYTES_2 ... BA_FEW_BYTES_4] = {
    [BA_SET_1] = {.unit_rows = 4, .head_keys = 4, .bundle = {8, 4}, .vectors = 8, .passes = {1, 1}, .common = 1},
    [BA_SET_2] = {.unit_rows = 2, .head_keys = 8, .bundle = {8, 8}, .vectors = 8, .passes = {1, 1}, .common = 1},
    [BA_SET_4] = {.unit_rows = 1, .head_keys = 8, .bundle = {8, 8}, .vectors = 4, .passes = {1, 1}, .common = 1},
  },
};
#elif defined(BA_TRAITS_PORTABLE) && defined(BA_REAL_DOUBLE)
/* Vectors of 2 doubles, for any CPU. */
#define BA_PREFETCH_LEVEL 2
#define BA_ROUTED_SET 4
#define BA_ROUTED_AT_ONCE 2
#define BA_FEW_MOST_SET 2
#define BA_FEW_V_LOADS 4
#define BA_FEW_TRAITS ba_few_traits_portable_double
static const ba_few_traits ba_few_traits_portable_double[BA_FEW_SIZES][BA_FEW_SETS] __attribute__((unused)) = {
  [BA_FEW_BYTES_8] = {
    [BA_SET_1] = {.unit_rows = 2, .head_keys = 2, .bundle = {8, 4}, .vectors = 8, .passes = {1, 1}, .common = 1},
    [BA_SET_2] = {.unit_rows = 1, .head_keys = 8, .bundle = {8, 8}, .vectors = 4, .passes = {1, 1}, .common = 1},
  },
};
#elif defined(BA_TRAITS_PORTABLE)
/* Vectors of 4 floats, for any CPU. */
#define BA_PREFETCH_LEVEL 2
#define BA_ROUTED_SET 4
#define BA_ROUTED_AT_ONCE 2
#define BA_FEW_MOST_SET 4
#define BA_FEW_V_LOADS 4
#define BA_FEW_TRAITS ba_few_traits_portable
static const ba_few_traits ba_few_traits_portable[BA_FEW_SIZES][BA_FEW_SETS] __attribute__((unused)) = {
  [BA_FEW_BYTES_1] = {
    [BA_SET_1] = {.unit_rows = 4, .head_keys = 4, .bundle = {8, 8}, .vectors = 8, .passes = {1, 1}, .common = 1},
    [BA_SET_2] = {.unit_rows = 2, .head_keys = 8, .bundle = {8, 8}, .vectors = 4, .passes = {1, 1}, .common = 1},
    [BA_SET_4] = {.unit_rows = 1, .head_keys = 8, .bundle = {8, 8}, .vectors = 2, .passes = {1, 1}, .common = 1},
  },
  [BA_FEW_BYTES_2 ... BA_FEW_BYTES_4] = {
    [BA_SET_1] = {.unit_rows = 4, .head_keys = 4, .bundle = {8, 4}, .vectors = 8, .passes = {1, 1}, .common = 1},
    [BA_SET_2] = {.unit_rows = 2, .head_keys = 8, .bundle = {8, 8}, .vectors = 4, .passes = {1, 1}, .common = 1},
    [BA_SET_4] = {.unit_rows = 1, .head_keys = 8, .bundle = {8, 8}, .vectors = 2, .passes = {1, 1}, .common = 1},
  },
};
#endif
// clang-format on
#endif
