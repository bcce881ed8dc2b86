/* Faults for tests: in a build with BA_FAULTS (make asan, make faults), a test can make the n-th allocation or the n-th start of a thread
 * fail. In any other build nothing is counted, and nothing is made to fail. Internal. */
#ifndef BA_CORE_FAULTS_H
#define BA_CORE_FAULTS_H

#include <stdbool.h>
#include <stdint.h>

typedef enum ba_fault_kind { BA_FAULT_MEMORY, BA_FAULT_THREAD, BA_FAULT_KINDS } ba_fault_kind;

#ifdef BA_FAULTS
/* Called before every start of a thread, and before every allocation without which a call fails. Counts the event, and returns true where it must
 * fail. */
bool ba_fault(ba_fault_kind kind);
/* Makes the n-th event of this kind from now on fail, and no other event; with n = 0, no event fails. Returns the number of events of this kind that
 * were counted since the last call of this function. */
int64_t ba_faults_set(ba_fault_kind kind, int64_t n);
#else
static inline bool ba_fault(ba_fault_kind kind) {
    (void)kind;
    return false;
}
#endif

#endif
