/* Faults on request: in a build with BA_FAULTS (make asan, make faults) the n-th allocation, or the n-th start of a thread, can be made to
 * fail. In any other build nothing is counted and nothing fails. Internal. */
#ifndef BA_CORE_FAULTS_H
#define BA_CORE_FAULTS_H

#include <stdbool.h>
#include <stdint.h>

typedef enum ba_fault_kind { BA_FAULT_MEMORY, BA_FAULT_THREAD, BA_FAULT_KINDS } ba_fault_kind;

#ifdef BA_FAULTS
/* Asked before each: counts it, and says whether it shall fail. */
bool ba_fault(ba_fault_kind kind);
/* The n-th from here on fails, once (0: none does). Returns how many there were since the last call. */
int64_t ba_faults_set(ba_fault_kind kind, int64_t n);
#else
static inline bool ba_fault(ba_fault_kind kind) {
    (void)kind;
    return false;
}
#endif

#endif
