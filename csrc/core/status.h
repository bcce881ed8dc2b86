/* How a function reports a failure. Internal. */
#ifndef BA_CORE_STATUS_H
#define BA_CORE_STATUS_H

#include "blitz_attn.h"

/* Marks the name of an argument in a sentence, so that a caller who knows the argument by another name can put that name in its place. `name` is a
 * string literal, which may be "%s". The marks are two control characters, which sentences do not contain otherwise. */
#define BA_ARG(name) "\001" name "\002"
enum { BA_ARG_BEGIN = 1, BA_ARG_END = 2 };

/* Stores the sentence for this thread's ba_last_error() and returns `code`, as in
 * `return ba_fail(BA_ERROR_VALUE, BA_ARG("k") ": expected dtype %s like " BA_ARG("q") ", got %s", ...)`. Sentences longer than 511 bytes are cut.
 * Where the system has no memory for the thread's sentence, ba_fail() returns BA_ERROR_MEMORY, and ba_last_error() says so. */
ba_status ba_fail(ba_status code, const char *format, ...) __attribute__((format(printf, 2, 3), cold));

/* The sentence of ba_last_error() with the marks of BA_ARG(). */
const char *ba_last_marked_error(void);

/* Returns the status of `expression` from the enclosing function, unless the status is BA_OK. */
#define BA_TRY(expression)                                                                                                                           \
    do {                                                                                                                                             \
        const ba_status ba_try_status = (expression);                                                                                                \
        if (ba_try_status != BA_OK) return ba_try_status;                                                                                            \
    } while (0)

#endif
