#include "core/faults.h"

#ifdef BA_FAULTS
#include <stdatomic.h>

static _Atomic int64_t counted[BA_FAULT_KINDS], failing[BA_FAULT_KINDS];

bool ba_fault(ba_fault_kind kind) { return atomic_fetch_add(&counted[kind], 1) + 1 == atomic_load(&failing[kind]); }

int64_t ba_faults_set(ba_fault_kind kind, int64_t n) {
    atomic_store(&failing[kind], n);
    return atomic_exchange(&counted[kind], 0);
}
#else
typedef int ba_no_faults; /* ISO C forbids an empty file */
#endif
