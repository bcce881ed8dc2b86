/* Arrays as their exporters describe them. */
#ifndef BA_PYTHON_RAW_ARRAY_H
#define BA_PYTHON_RAW_ARRAY_H

#include "python/arrays.h"

/* ---- Arrays ------------------------------------------------------------------------------------------------ */

/* The kind of an element, in terms that the buffer protocol and DLPack share. */
typedef enum element_kind { KIND_FLOAT, KIND_BFLOAT, KIND_FLOAT8, KIND_INT, KIND_UINT, KIND_BOOL, KIND_OTHER } element_kind;

typedef struct raw_array {
    char *data;
    element_kind kind;
    bool swapped; /* the elements are not in this machine's byte order */
    int64_t size; /* bytes per element */
    int ndim;
    int64_t dims[BA_MAX_DIMS], strides[BA_MAX_DIMS]; /* strides in bytes */
} raw_array;

/* Holds `object` in `array` and describes it in `raw`. The caller releases `array` on failure, too, since it may hold something then. */
int arg_hold_raw(module_state *state, PyObject *object, const char *name, arg_array *array, raw_array *raw);

/* Refuses dimensions whose product overflows, before anything is computed from them. */
int arg_check_dims(const char *name, const raw_array *raw);

/* Raises a TypeError `name: expected <expected>, got <the type of the elements><hint>`, and returns -1. */
int arg_fail_elements(PyObject *object, const arg_array *array, const char *expected, const char *hint);

/* Whether an argument of this role may have this dtype. */
bool arg_role_takes(arg_role role, ba_dtype dtype);

#endif
