/* How a failure finds its sentence. Internal. */
#ifndef BA_CORE_STATUS_H
#define BA_CORE_STATUS_H

#include "blitz_attn.h"

/* Records the sentence for this thread and returns `code`: `return ba_fail(BA_ERROR_VALUE, "q: expected ..., got ...", ...)`. */
ba_status ba_fail(ba_status code, const char *format, ...) __attribute__((format(printf, 2, 3), cold));

#define BA_TRY(expression)                                                                                                                           \
    do {                                                                                                                                             \
        const ba_status ba_try_status = (expression);                                                                                                \
        if (ba_try_status != BA_OK) return ba_try_status;                                                                                            \
    } while (0)

#endif
