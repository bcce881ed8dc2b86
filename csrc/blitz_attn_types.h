/* Status codes, dtypes, tensors and levels of instruction sets: the part of the C API that kernels know, too. blitz_attn.h includes this file;
 * programs include blitz_attn.h. */
#ifndef BLITZ_ATTN_TYPES_H
#define BLITZ_ATTN_TYPES_H

#include <stdint.h>

#if defined(_WIN32)
#define BA_API
#else
#define BA_API __attribute__((visibility("default")))
#endif

typedef enum ba_status {
    BA_OK = 0,
    BA_ERROR_TYPE,   /* an argument has a dtype that the function does not take (Python: TypeError) */
    BA_ERROR_VALUE,  /* an argument has a wrong shape, or a value out of range (Python: ValueError) */
    BA_ERROR_MEMORY, /* the system has no memory to give (Python: MemoryError) */
    BA_ERROR_SYSTEM, /* the process was forked while the call ran, and this is the child (Python: RuntimeError) */
    BA_INTERRUPTED,  /* the poll function (ba_set_poll) stopped the call; its outputs are undefined (Python: the signal handler's exception) */
} ba_status;

typedef enum ba_dtype {
    BA_FLOAT32,
    BA_FLOAT16,
    BA_BFLOAT16,
    BA_FLOAT64,
    BA_UINT16, /* index lists only, padded with 65535. Lists of the signed types are padded with any negative number, lists of pages with -1 */
    BA_INT16,
    BA_INT32,
    BA_INT64,
    BA_INT8,        /* caches of K and V, and keys of ba_select_tokens(), only; needs scales */
    BA_FLOAT8_E4M3, /* as BA_INT8. One sign bit, 4 bits of exponent, 3 of mantissa; NaN, but no infinity */
    BA_BOOL,        /* masks only: one byte, 0 or not 0 */
    /* Formats of llama.cpp's ggml, for caches of K and V only. A row is an array of bytes. Each 32 of its dims are stored as a float16 factor d, then
     * (q4_1 only) a float16 m, and then 32 integers n. q8_0: n is int8, x = d n; 34 bytes in all. q4_0: n has 4 bits, x = d (n - 8); 18 bytes. q4_1:
     * n has 4 bits, x = d n + m; 20 bytes. Byte i of the 16 bytes of 4-bit integers has the n of dim i in its lower half, and the n of dim i + 16 in
     * its upper half. The last axis of such an array counts bytes; head dims are multiples of 32. */
    BA_Q8_0,
    BA_Q4_0,
    BA_Q4_1,
    BA_DTYPE_COUNT
} ba_dtype;

enum { BA_MAX_DIMS = 4 };

/* A strided view of memory that the caller owns. Strides count elements, not bytes. They may be negative, and those of inputs
 * may be 0; but a last axis that runs over the channels of a head must be contiguous. No two elements of an output may share memory.
 * Where a comment of blitz_attn.h says "not given", the tensor may be all zero (`data == NULL && ndim == 0`). */
typedef struct ba_tensor {
    void *data;
    ba_dtype dtype;
    int ndim;
    int64_t dims[BA_MAX_DIMS];
    int64_t strides[BA_MAX_DIMS];
} ba_tensor;

/* Instruction set levels of the architecture that the program is compiled for, in rising order. A CPU that has a level has all levels below it. */
#ifdef __aarch64__
typedef enum ba_isa { BA_ISA_PORTABLE, BA_ISA_NEON, BA_ISA_NEON_BF16, BA_ISA_COUNT } ba_isa;
#else
typedef enum ba_isa { BA_ISA_PORTABLE, BA_ISA_AVX2, BA_ISA_AVX512, BA_ISA_AVX512_BF16, BA_ISA_AMX, BA_ISA_COUNT } ba_isa;
#endif

#endif
