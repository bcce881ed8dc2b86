/* Asking for rows ahead of their use. They lie where pages put them, which no hardware prefetcher can tell; and what is asked for in a
 * burst holds up the loads behind it, while a pause leaves memory idle. So the kernels for few ask a line or a few at every step of
 * their work, in the order in which the rows lie. Into L2: L1 has no room for them. */
#ifndef BA_ASKING_H
#define BA_ASKING_H

#include "kernels/kernels.h"

enum { BA_LINE_BYTES = 64 };

typedef struct ba_asking {
    const char *at, *stop; /* of the row at hand */
    const void *const *row, *const *end;
    int64_t offset, bytes;
    int64_t share; /* lines: a sixteenth of all */
} ba_asking;

static inline ba_asking ba_asking_for(ba_ahead ahead) {
    ba_asking a = {NULL, NULL, ahead.rows, ahead.rows, ahead.offset, ahead.bytes, 0};
    if (ahead.count <= 0) return a;
    a.end = ahead.rows + ahead.count;
    a.at = (const char *)*a.row + a.offset;
    a.stop = a.at + a.bytes;
    a.share = ba_ceil_div(ahead.count * ba_ceil_div(a.bytes, BA_LINE_BYTES), 16);
    return a;
}

/* So many bytes of the row at hand have been asked for: on to the next row if they were its last. */
static inline void ba_ask_step(ba_asking *a, int64_t bytes) {
    a->at += bytes;
    if (a->at < a->stop || ++a->row == a->end) return;
    a->at = (const char *)*a->row + a->offset;
    a->stop = a->at + a->bytes;
}

static inline void ba_ask(ba_asking *a) {
    if (a->row == a->end) return;
    __builtin_prefetch(a->at, 0, 2);
    ba_ask_step(a, BA_LINE_BYTES);
}

/* Asks for `bytes` that no row has in one piece; what comes after them is left for the next call. */
static __attribute__((noinline, unused)) void ba_ask_pieces(ba_asking *a, int64_t bytes) {
    while (bytes > 0 && a->row != a->end) {
        const int64_t some = ba_min(bytes, a->stop - a->at);
        for (int64_t at = 0; at < some; at += BA_LINE_BYTES) __builtin_prefetch(a->at + at, 0, 2);
        bytes -= some;
        ba_ask_step(a, some);
    }
}

/* The next `bytes` of the rows, for the caller to ask for line by line; where no row has so many in one piece, they are asked for here, and the
 * caller is given `otherwise`, which is something that it has anyhow. */
static inline const char *ba_ask_slice(ba_asking *a, int64_t bytes, const void *otherwise) {
    const char *slice = a->at;
    if (a->stop - slice < bytes) {
        ba_ask_pieces(a, bytes);
        return otherwise;
    }
    ba_ask_step(a, bytes);
    return slice;
}

/* `part` shares for every eight queries of one of the heads that are met meanwhile: what takes longer asks for more. */
static inline void ba_ask_share(ba_asking *a, int64_t part, int64_t heads) {
    ba_ask_pieces(a, ba_ceil_div(a->share * part, 8 * heads) * BA_LINE_BYTES);
}

#endif
