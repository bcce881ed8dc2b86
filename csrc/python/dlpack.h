/* The exchange structures of DLPack, laid out as its specification says: versions 0.x (capsule name "dltensor") and 1.x
 * ("dltensor_versioned"). Only what an importer of CPU memory reads has a name here. */
#ifndef BA_PYTHON_DLPACK_H
#define BA_PYTHON_DLPACK_H

#include <stdint.h>

enum { DL_DEVICE_CPU = 1 };
enum { DL_CODE_INT = 0, DL_CODE_UINT = 1, DL_CODE_FLOAT = 2, DL_CODE_BFLOAT = 4, DL_CODE_BOOL = 6, DL_CODE_FLOAT8_E4M3FN = 10 };
enum { DL_MAJOR_VERSION = 1 };

#define DL_FLAG_READ_ONLY UINT64_C(1)
#define DL_FLAG_IS_COPIED UINT64_C(2)

typedef struct dl_tensor {
    void *data;
    struct {
        int32_t type, id;
    } device;
    int32_t ndim;
    struct {
        uint8_t code, bits;
        uint16_t lanes;
    } dtype;
    int64_t *shape;
    int64_t *strides; /* in elements; NULL: compact, row-major */
    uint64_t byte_offset;
} dl_tensor;

typedef struct dl_managed {
    dl_tensor tensor;
    void *context;
    void (*deleter)(struct dl_managed *self);
} dl_managed;

typedef struct dl_managed_versioned {
    struct {
        uint32_t major, minor;
    } version; /* with another major version, nothing after `deleter` may be read */
    void *context;
    void (*deleter)(struct dl_managed_versioned *self);
    uint64_t flags;
    dl_tensor tensor;
} dl_managed_versioned;

#endif
