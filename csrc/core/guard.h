/* Guards around scratch memory, in builds with AddressSanitizer only. The bytes between the parts of a driver's scratch memory are poisoned,
 * so that an overrun ends in a report and not in a wrong number. In any other build there are no such bytes. Internal. */
#ifndef BA_CORE_GUARD_H
#define BA_CORE_GUARD_H

#include <stdint.h>

#if defined(__SANITIZE_ADDRESS__)
#define BA_GUARDED
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define BA_GUARDED
#endif
#endif

#ifdef BA_GUARDED
#include <sanitizer/asan_interface.h>

enum { BA_GUARD = 256 }; /* poisoned bytes behind each part, in addition to the padding that rounds its size up */

/* Of the `room` bytes from `memory` on, allows the first `bytes` and poisons the others. */
static inline void ba_guard(const char *memory, int64_t bytes, int64_t room) {
    __asan_unpoison_memory_region(memory, (size_t)bytes);
    __asan_poison_memory_region(memory + bytes, (size_t)(room - bytes));
}
#else
enum { BA_GUARD = 0 };

static inline void ba_guard(const char *memory, int64_t bytes, int64_t room) {
    (void)memory;
    (void)bytes;
    (void)room;
}
#endif

#endif
