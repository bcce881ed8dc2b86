/* Guards around scratch memory, under AddressSanitizer alone: what lies between the parts that a driver hands out is poisoned, so that
 * an overrun is a report and not a wrong number. In any other build there are none. Internal. */
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

enum { BA_GUARD = 256 }; /* bytes behind each part, beyond what its size is rounded up by */

/* Of `room` bytes, the first `bytes` may be used and the others may not. */
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
